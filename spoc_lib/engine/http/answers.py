"""Answers of the embedded server: JSON bodies and streamed chunks, field by field as vLLM 0.32 sends them.

A streamed chunk differs from the next one only in its text, so everything around the text is rendered once
per request: a token costs two concatenations.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

import orjson

VERSION = "0.32.0"
FINGERPRINT = f"vllm-{VERSION}-spoc"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a whole answer; `completion_tokens` over all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    created_cache_tokens: int | None = None

    def counts(self) -> dict:
        """As `usage` stands in an answer."""
        return {"prompt_tokens": self.prompt_tokens,
                "total_tokens": self.prompt_tokens + self.completion_tokens,
                "completion_tokens": self.completion_tokens}

    def whole(self) -> dict:
        """As a plain answer holds it."""
        details = {"cached_tokens": self.cached_tokens, "created_cache_tokens": self.created_cache_tokens,
                   "multimodal_tokens": None}
        return {**self.counts(), "prompt_tokens_details": details, "completion_tokens_details": None}

    def streamed(self) -> dict:
        """As the last chunk of a stream holds it: unset fields are left out."""
        details = {"cached_tokens": self.cached_tokens}
        if self.created_cache_tokens is not None:
            details["created_cache_tokens"] = self.created_cache_tokens
        return {**self.counts(), "prompt_tokens_details": details}


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice. `reasoning` is None where the reply has none."""

    index: int
    text: str
    finish_reason: str | None
    stop_reason: str | None = None
    reasoning: str | None = None


class Answer:
    """What all parts of one answer share: id, creation time, model. `chat` or plain completion."""

    def __init__(self, model: str, chat: bool) -> None:
        self.chat = chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex[:16]}"
        self._head = {"id": self.id, "object": self._object(False), "created": int(time.time()),
                      "model": model}

    def _object(self, streamed: bool) -> str:
        if not self.chat:
            return "text_completion"
        return "chat.completion.chunk" if streamed else "chat.completion"

    def whole(self, choices: list[Choice], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        body = {
            **self._head,
            "choices": [self._chat_choice(one) if self.chat else self._text_choice(one) for one in choices],
            "service_tier": None, "system_fingerprint": FINGERPRINT, "usage": usage.whole(),
        }
        if self.chat:
            body |= dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text"))
        body |= dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "metrics"))
        return orjson.dumps(body)

    @staticmethod
    def _chat_choice(one: Choice) -> dict:
        message = {"role": "assistant", "content": one.text, "refusal": None, "annotations": None,
                   "audio": None, "function_call": None, "reasoning": one.reasoning}
        return {"index": one.index, "message": message, "logprobs": None, "finish_reason": one.finish_reason,
                "stop_reason": one.stop_reason, "token_ids": None, "routed_experts": None}

    @staticmethod
    def _text_choice(one: Choice) -> dict:
        return {"index": one.index, "text": one.text, "logprobs": None, "finish_reason": one.finish_reason,
                "stop_reason": one.stop_reason, "token_ids": None, "prompt_logprobs": None,
                "prompt_token_ids": None, "routed_experts": None}

    def opening(self) -> bytes:
        """Everything of a chunk before its list of choices."""
        head = orjson.dumps({**self._head, "object": self._object(True)})
        return b"data: " + head[:-1] + b',"choices":['

    def usage_chunk(self, usage: Usage) -> bytes:
        """The chunk without choices that closes a stream with `include_usage`."""
        return self.opening() + b'],"usage":' + orjson.dumps(usage.streamed()) + self._fingerprint() + b"}\n\n"

    @staticmethod
    def _fingerprint() -> bytes:
        return b',"system_fingerprint":"' + FINGERPRINT.encode() + b'"'


class ChunkWriter:
    """Renders the chunks of one streamed choice.

    prompt_tokens: None, or a number when every chunk carries the usage so far (`continuous_usage_stats`);
    fingerprint: the last chunk carries the system fingerprint (a stream without a usage chunk).
    """

    def __init__(self, answer: Answer, index: int, *, prompt_tokens: int | None, fingerprint: bool) -> None:
        self._answer, self._index = answer, index
        self._prompt_tokens = prompt_tokens
        self._opening = answer.opening()
        start = b'{"index":%d,' % index
        if answer.chat:
            self._text = self._opening + start + b'"delta":{"content":"'
            self._reasoning = self._opening + start + b'"delta":{"reasoning":"'
            self._after = b'"},"logprobs":null,"finish_reason":null,"token_ids":null}]'
        else:
            self._text = self._reasoning = self._opening + start + b'"text":"'
            self._after = (b'","logprobs":null,"finish_reason":null,"stop_reason":null,'
                           b'"prompt_token_ids":null,"token_ids":null}]')
        self._closing = b"}\n\n"
        self._last_closing = (Answer._fingerprint() if fingerprint else b"") + b"}\n\n"
        self._suffix = self._after + self._closing  # the common case: no usage in the chunk

    def role(self) -> bytes:
        """The first chunk of a chat choice: a role, no content."""
        return (self._opening + b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,'
                b'"finish_reason":null}]' % self._index + self._usage(0)
                + b',"prompt_token_ids":null,"prompt_text":null}\n\n')

    def text(self, text: bytes, tokens: int, reasoning: bool = False) -> bytes:
        """A chunk with `text` (JSON-escaped UTF-8, no quotes); `tokens` of this choice so far."""
        head = self._reasoning if reasoning else self._text
        if self._prompt_tokens is None:
            return head + text + self._suffix
        return head + text + self._after + self._usage(tokens) + self._closing

    def last(self, text: bytes, tokens: int, finish_reason: str, stop_reason: str | None,
             reasoning: bool = False) -> bytes:
        """The chunk that finishes the choice; it carries its last text."""
        head = self._reasoning if reasoning else self._text
        reason = orjson.dumps(finish_reason) + b',"stop_reason":' + orjson.dumps(stop_reason)
        if self._answer.chat:
            after = b'"},"logprobs":null,"finish_reason":' + reason + b',"token_ids":null}]'
        else:
            after = (b'","logprobs":null,"finish_reason":' + reason
                     + b',"prompt_token_ids":null,"token_ids":null}]')
        return head + text + after + self._usage(tokens) + self._last_closing

    def _usage(self, tokens: int) -> bytes:
        if self._prompt_tokens is None:
            return b""
        counts = {**Usage(self._prompt_tokens, tokens).counts(), "completion_tokens_details": None}
        return b',"usage":' + orjson.dumps(counts)


def models(model: str, max_model_len: int, started_s: float) -> bytes:
    """/v1/models."""
    permission = {
        "id": "modelperm-" + uuid.uuid4().hex[:16], "object": "model_permission",
        "created": int(time.time()), "allow_create_engine": False, "allow_sampling": True, "allow_logprobs": True,
        "allow_search_indices": False, "allow_view": True, "allow_fine_tuning": False, "organization": "*",
        "group": None, "is_blocking": False,
    }
    card = {"id": model, "object": "model", "created": int(started_s), "owned_by": "vllm", "root": model,
            "parent": None, "max_model_len": max_model_len, "permission": [permission]}
    return orjson.dumps({"object": "list", "data": [card]})
