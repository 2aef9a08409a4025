"""A script played on paper: every reply comes as long as asked for, at a stated speed. What the audit looks at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from spoc_lib.core.schemas import SESSIONS
from spoc_lib.workload.script import NEVER_S, ConversationScript, Turn


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast replies come on paper: `ttft_s` to the first token, then `tokens_per_s`. It orders the requests of
    different users and sets the in-flight share; a real server's pace is measured, not assumed."""

    ttft_s: float = 1.0
    tokens_per_s: float = 60.0

    def service_s(self, output_tokens: int) -> float:
        """Seconds from sending to the last token."""
        return self.ttft_s + output_tokens / self.tokens_per_s


@dataclass(frozen=True, slots=True)
class Played:
    """A turn and when it is sent, in seconds from the start."""

    time_s: float
    turn: Turn


def play(script: ConversationScript, users: int, turns: int, pace: Pace | None = None) -> Iterator[Played]:
    """The first `turns` turns of each of the first `users` users, user by user; fewer of a user who is done."""
    pace = pace or Pace()
    for user in script.users(users):
        time_s, history = 0.0, 0
        for _ in range(turns):
            turn = user.next(history)
            if turn.think_time_s >= NEVER_S:
                break
            time_s += turn.think_time_s
            yield Played(time_s, turn)
            time_s += pace.service_s(turn.output_tokens)
            if turn.starts:
                history = sum(segment.tokens + reply for segment, reply in turn.history)
            history += sum(segment.tokens for segment in turn.append) + turn.output_tokens


def sessions_table(script: ConversationScript, users: int, turns: int) -> pd.DataFrame:
    """The turns of `play` as a table (`schemas.SESSIONS`).

    `append_tokens` counts the listed segments. The row of a user found in mid-conversation lists the segments of its
    history too; the replies among them appear in `prompt_tokens` only.
    """
    rows = []
    for played in play(script, users, turns):
        turn = played.turn
        segments = (*(segment for segment, _ in turn.history), *turn.append)
        rows.append((
            turn.persona, turn.user, turn.conversation, turn.turn, turn.kind,
            [segment.stream for segment in segments], [segment.tokens for segment in segments],
            [segment.layer for segment in segments],
            sum(segment.tokens for segment in segments), turn.prompt_tokens, turn.output_tokens, turn.think_time_s,
        ))
    return pd.DataFrame(rows, columns=SESSIONS.names)
