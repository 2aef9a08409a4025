"""Recorded sessions as a script: their lengths, gaps and sharing, played by the same drivers as personas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spoc_lib.workload.corpus import Corpus
from spoc_lib.workload.script import Segment
from spoc_lib.workload.traces.imported_user import ImportedUser
from spoc_lib.workload.traces.recording import Recording, text_segment


class ImportedScript(Recording):
    """A `ConversationScript` of recorded sessions.

    User n plays session n first (sub-agents' sessions are not played by themselves) and then others in a seeded order,
    without end. A session that is played again gets new identities, but for what sessions share in the recording.
    start: `stationary` finds each user in mid-session, with the recorded history and the rest of a gap; `cold` lets
    every user begin with a first request;
    timing: `closed` keeps the recorded gaps, capped; `timestamps` sends each session's first request at its recorded
    time and plays it once, from its beginning (a user is then a session).

    Gaps that the recording lacks (and those before a session) are taken from its other gaps of the same kind, a tool's
    or a human's; where it has none at all they are 0.
    """

    def user(self, number: int) -> ImportedUser:
        """User `number` (see `script.ConversationScript`)."""
        return ImportedUser(self, number)

    def users(self, count: int) -> Iterator[ImportedUser]:
        """The first `count` users."""
        return (self.user(number) for number in range(count))

    def with_gap_cap(self, gap_cap_s: float) -> ImportedScript:
        """The same sessions with another cap on think time."""
        return ImportedScript(self.sessions, self.seed, self.salt, gap_cap_s, self.context_limit, self.start,
                              self.timing)

    def from_the_beginning(self) -> ImportedScript:
        """The same script, every user starting cold."""
        return ImportedScript(self.sessions, self.seed, self.salt, self.gap_cap_s, self.context_limit, "cold",
                              self.timing)

    def describe(self) -> dict[str, Any]:
        """What was built from what, for the record."""
        return {"personas": "imported", "sessions": len(self.main), "seed": self.seed, "salt": self.salt,
                "gap_cap_s": self.gap_cap_s, "start": self.start, "context_limit": self.context_limit,
                "timing": self.timing}

    def texts(self, base: Corpus) -> RecordedTexts:
        """The corpus for playing these sessions to a real server: their own text, and `base` for what has none."""
        return RecordedTexts(self, base)


class RecordedTexts:
    """A corpus (`text`, `stream_text`, `tokenizer`, `summary`) that knows the recorded text of imported sessions."""

    def __init__(self, script: ImportedScript, base: Corpus) -> None:
        self._base, self.tokenizer = base, base.tokenizer
        self._texts = {text_segment(script, m.text, m.tokens, m.layer).stream: m
                       for session in script.sessions for request in session.requests for m in request.messages}

    def text(self, segment: Segment) -> str:
        """The text of a segment: as recorded, else the corpus's."""
        return self.stream_text(segment.stream, segment.tokens)

    def stream_text(self, stream: int, tokens: int) -> str:
        """The recorded text where it has this length, else text of the base corpus."""
        message = self._texts.get(stream)
        if message is not None and message.tokens == tokens:
            return message.text
        return self._base.stream_text(stream, tokens)

    def summary(self) -> dict[str, Any]:
        """The corpus's, and how many texts are recorded."""
        return {**self._base.summary(), "recorded_texts": len(self._texts)}
