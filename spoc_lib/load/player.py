"""The state of one user of the script between requests: its history, its encoder, and the turn that comes next."""

from __future__ import annotations

import time
from dataclasses import dataclass

from spoc_lib.load.bodies import BodyEncoder
from spoc_lib.load.reader import StreamReader, token_shares
from spoc_lib.load.script import History
from spoc_lib.workload.script import Turn, UserScript
from spoc_lib.workload.template import TEMPLATE_OVERHEAD, Overhead

#: More tokens than any context holds: makes the script end the conversation.
FULL = 1 << 30


@dataclass(slots=True)
class Prepared:
    """A turn ready to be sent: its body was encoded while the user thought, and finished at `ready_s` (monotonic)."""

    turn: Turn
    body: bytes
    ready_s: float


class Player:
    """The state of one user of the script: history, encoder, and the turn that comes next."""

    def __init__(self, script: UserScript, history: History, encoder: BodyEncoder,
                 overhead: Overhead = TEMPLATE_OVERHEAD) -> None:
        self.script, self.history, self.encoder, self.overhead = script, history, encoder, overhead
        self.next = self.prepared(0)

    def prepared(self, history_tokens: int) -> Prepared:
        """The turn that the script wants next, encoded."""
        turn = self.script.next(history_tokens)
        messages = self.history.apply(turn)
        self.messages = len(messages)
        body = self.encoder.encode(messages, turn.output_tokens)
        return Prepared(turn, body, time.monotonic())

    def remember(self, reader: StreamReader) -> None:
        """Put the server's reply into the history and prepare the next turn.

        The history is as long as the server says: its prompt tokens without the template's, and the reply; where
        it reports no usage, our own count.
        """
        total, prompt = reader.output_tokens, reader.count("prompt_tokens")
        reply_tokens = None
        if total is not None:
            shares = token_shares(reader.texts, reader.running_tokens, total)
            whole = self.history.echo == "reasoning"
            reply_tokens = round(sum(shares) if whole else sum(shares[number] for number in reader.content_at))
        self.history.add_reply(reader.reply, reply_tokens, reader.reasoning)
        known = self.history.history_tokens
        if prompt is not None and reply_tokens is not None:
            known = max(0, prompt - self.overhead.tokens(self.messages)) + reply_tokens
        self.next = self.prepared(known)

    def forget(self, overflow: bool) -> None:
        """The turn failed: take it back and go on; after an overflow only a new conversation can."""
        self.history.drop_last()
        self.next = self.prepared(FULL if overflow else self.history.history_tokens)
