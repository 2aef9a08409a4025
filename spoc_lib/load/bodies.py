"""Request bodies, encoded ahead of time: a history of 128 k tokens is half a megabyte, and encoding it costs
milliseconds that every other user's stamps would pay. Each message is encoded once; a body is joined bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from spoc_lib.load.plan import LoadPlan


class BodyEncoder:
    """Encodes the bodies of one conversation; messages seen in the previous call are not encoded again.

    Sampling is fixed so that the server works for exactly the asked tokens: `max_tokens`, `ignore_eos` (a vLLM
    extension that others ignore or refuse: `extra_body` may set it to null to leave it out), temperature 0. With
    `max_tokens` null there the budget is sent as `max_completion_tokens`, which OpenAI's reasoning models want.
    """

    def __init__(self, plan: LoadPlan) -> None:
        self._chat = plan.api == "chat"
        self._fixed, self._budget = plan.body({
            "model": plan.model, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.0,
            "ignore_eos": True})
        self._messages: list[Mapping[str, Any]] = []
        self._pieces: list[bytes] = []

    def encode(self, messages: Sequence[Mapping[str, Any]], max_tokens: int) -> bytes:
        """The JSON body of a request for `max_tokens` tokens after `messages`."""
        self._take(messages)
        tail = orjson.dumps({**self._fixed, self._budget: max_tokens})
        if self._chat:
            return b"".join((b'{"messages":[', b",".join(self._pieces), b"],", tail[1:]))
        prompt = b"".join(piece[1:-1] for piece in self._pieces)
        return b"".join((b'{"prompt":"', prompt, b'",', tail[1:]))

    def _take(self, messages: Sequence[Mapping[str, Any]]) -> None:
        same = 0
        for old, new in zip(self._messages, messages, strict=False):
            if old is not new and old != new:
                break
            same += 1
        del self._pieces[same:]
        for message in messages[same:]:
            self._pieces.append(orjson.dumps(message if self._chat else _plain_text(message)))
        self._messages = list(messages)


def _plain_text(message: Mapping[str, Any]) -> str:
    """A message as a completion prompt holds it: its text, ended by a line."""
    return f"{message['content']}\n"
