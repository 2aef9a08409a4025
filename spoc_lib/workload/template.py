"""The chat template of the workbench: messages in, prompt out, with a token count that is known beforehand.

Its form is that of gpt-oss (harmony): `<|start|>role<|message|>content<|end|>` for each message, then
`<|start|>assistant`. The three markers are single tokens, and so is each role, so a message costs `MESSAGE_TOKENS` and
a prompt `PROMPT_TOKENS` beyond the content. Markers are never part of a content's own tokens: a content is encoded
alone, which makes the seam between messages exact.

A real server has a template of its own; `measured_overhead` asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

START, MESSAGE, END = "<|start|>", "<|message|>", "<|end|>"
#: Their ids in gpt-oss's vocabulary (o200k with harmony's markers), above all ids of plain text.
START_ID, MESSAGE_ID, END_ID = 200006, 200008, 200007

#: Tokens that a message adds to its content: start, role, message before it; end after it.
MESSAGE_TOKENS = 4
#: Of these, the ones that stand before the content.
MESSAGE_LEAD_TOKENS = 3
#: Tokens that a prompt adds once: start, assistant.
PROMPT_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Overhead:
    """Tokens that a chat template adds: once a prompt, and for every message."""

    prompt_tokens: int = PROMPT_TOKENS
    message_tokens: int = MESSAGE_TOKENS

    def tokens(self, n_messages: int) -> int:
        """Tokens of the template in a prompt of `n_messages` messages."""
        return self.prompt_tokens + self.message_tokens * n_messages


def overhead_tokens(n_messages: int) -> int:
    """Tokens of a prompt of `n_messages` that are not content, in this template."""
    return PROMPT_TOKENS + MESSAGE_TOKENS * n_messages


TEMPLATE_OVERHEAD = Overhead()


def render(messages: Iterable[Mapping[str, Any]]) -> str:
    """The prompt's text, as a person reads it. `encode` gives its tokens."""
    parts = [f"{START}{m['role']}{MESSAGE}{content_text(m)}{END}" for m in messages]
    return "".join(parts) + f"{START}assistant"


def content_text(message: Mapping[str, Any]) -> str:
    """The text of a message's content: a string, a list of OpenAI content parts, or nothing."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if isinstance(part, Mapping))


def encode(messages: Iterable[Mapping[str, Any]], encode_text: Callable[[str], Sequence[int]]) -> list[int]:
    """The prompt's token ids; `encode_text` encodes a role or a content (callers may pass one that caches)."""
    ids: list[int] = []
    for message in messages:
        ids.append(START_ID)
        ids.extend(encode_text(message["role"]))
        ids.append(MESSAGE_ID)
        ids.extend(encode_text(content_text(message)))
        ids.append(END_ID)
    ids.append(START_ID)
    ids.extend(encode_text("assistant"))
    return ids


def measured_overhead(count_messages: Callable[[list[dict]], int], count_text: Callable[[str], int]) -> Overhead:
    """The overhead of a server's own template, from two prompts of one and three messages.

    count_messages: tokens of a chat prompt, as the server counts them; count_text: tokens of a plain text.
    """
    text = "import os\n"
    one = [{"role": "user", "content": text}]
    three = [*one, {"role": "assistant", "content": text}, {"role": "user", "content": text}]
    first, second = count_messages(one), count_messages(three)
    message = max(0, round((second - first) / 2) - count_text(text))
    return Overhead(prompt_tokens=max(0, first - count_text(text) - message), message_tokens=message)
