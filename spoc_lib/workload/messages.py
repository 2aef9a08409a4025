"""A conversation as OpenAI chat messages: what the HTTP driver sends, built from a script's turns."""

from __future__ import annotations

from typing import Literal

from spoc_lib.workload.corpus import Corpus
from spoc_lib.workload.identity import mix
from spoc_lib.workload.script import SHARED_LAYERS, Segment, Turn
from spoc_lib.workload.template import TEMPLATE_OVERHEAD

__all__ = ["TEMPLATE_OVERHEAD", "Conversation"]


class Conversation:
    """The messages of one user's current conversation.

    Common ground goes first, into the system message; everything else alternates between user and assistant. The
    replies that `add_reply` brings are the server's own; those of a stationary start are synthetic text of the planned
    length, from a stream of their own.

    echo: what of a reply returns to the server, its `content` or also its `reasoning`.
    """

    def __init__(self, corpus: Corpus, echo: Literal["content", "reasoning"] = "content") -> None:
        self._corpus, self.echo = corpus, echo
        self._messages: list[dict] = []
        self._sizes: list[int] = []

    @property
    def history_tokens(self) -> int:
        """Content of the history in tokens, replies included, template excluded."""
        return sum(self._sizes)

    @property
    def messages(self) -> list[dict]:
        """The history as it stands; a copy, so that a body under way is never changed."""
        return list(self._messages)

    def apply(self, turn: Turn) -> list[dict]:
        """Append what `turn` brings and return the messages of its request."""
        if turn.starts:
            self._messages, self._sizes = [], []
            pending: list[Segment] = []
            for segment, reply_tokens in turn.history:
                pending.append(segment)
                if reply_tokens:
                    self._append(pending)
                    pending = []
                    self._reply(self._corpus.stream_text(mix(segment.stream, 51), reply_tokens), reply_tokens)
            self._append([*pending, *turn.append])
        else:
            self._append(turn.append)
        return self.messages

    def add_reply(self, text: str, tokens: int | None = None, reasoning: str | None = None) -> None:
        """Put the server's reply into the history. `tokens`: its length where known, else it is counted offline."""
        if self.echo == "reasoning" and reasoning:
            text = reasoning + text
        self._reply(text, self._corpus.tokenizer.count(text) if tokens is None else tokens)

    def drop_last(self) -> None:
        """Take back the last user message of a request that failed, so that roles keep alternating."""
        if self._messages and self._messages[-1]["role"] == "user":
            self._messages.pop()
            self._sizes.pop()

    def _reply(self, text: str, tokens: int) -> None:
        self._messages.append({"role": "assistant", "content": text})
        self._sizes.append(tokens)

    def _append(self, segments: tuple[Segment, ...] | list[Segment]) -> None:
        shared = [s for s in segments if s.layer in SHARED_LAYERS] if not self._messages else []
        own = segments[len(shared):]
        for role, group in (("system", shared), ("user", own)):
            if group:
                self._messages.append({"role": role, "content": "".join(map(self._corpus.text, group))})
                self._sizes.append(sum(segment.tokens for segment in group))
