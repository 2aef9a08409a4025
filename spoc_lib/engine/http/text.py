"""Text and tokens of the embedded server: prompts into token ids, replies out of words.

Prompts. The tokenizer is pure Python (about 10 million characters a second), so nothing is encoded twice: a
message's ids are kept by the hash of its text, and a text is encoded in pieces of a line, which repeat in code (then
about 60 million a second). A piece may end after a newline where the next line starts with a character other than
white space and '/', perhaps indented: o200k's pattern never joins tokens there, so the ids of the pieces are the ids
of the whole.

Replies. Every reply token is one word with its leading space, and each such word is one token: n tokens of reply are
n tokens again when a client sends them back as history. Which words come follows from the prompt's tokens, `seed`
and the number of the choice, so the same request gets the same reply.
"""

from __future__ import annotations

import hashlib
import re
import threading
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spoc_lib.workload import template
from spoc_lib.workload.identity import generator, mix

SEAM = re.compile(r"(?<=\n)(?=[ \t]*[^\s/])")
#: Natural reply length where a request leaves the end to the model: log-uniform between these, in tokens.
SHORTEST_REPLY, LONGEST_REPLY = 64, 1024

_WORDS = """
the and for with that this are from new return not your can was have get all will class public out has set more
one they our their self time any over about work function which add use else also who some data private null when
end other off year like name need just act been may true min there them real value had would false type how were
into make result list than first import back start only string form look let static best under most find help want
long final read test every should know well hand then through user char require right pass state call point line
case code file open close write error check index count size length total order group field table query block node
tree path root left down up next last item key map keys values array input output print debug info build run main
config option default version update create delete insert select where join limit event handler listener callback
request response client server host port address network message queue thread process memory buffer cache page
""".split()  # noqa: SIM905


class TokenCache:
    """Token ids by key, two generations: the older is dropped when the younger is full, so that what is used stays.
    Bounded by tokens (4 bytes each)."""

    def __init__(self, max_tokens: int) -> None:
        self._half = max_tokens // 2
        self._young: dict[Any, array] = {}
        self._old: dict[Any, array] = {}
        self._young_tokens = 0

    def get(self, key: Any) -> array | None:
        """The token ids kept under `key`; None where there are none."""
        found = self._young.get(key)
        if found is None and (found := self._old.get(key)) is not None:
            self.put(key, found)
        return found

    def put(self, key: Any, ids: array) -> None:
        """Keep token ids; the older generation goes when the younger is full."""
        if self._young_tokens > self._half:
            self._old, self._young, self._young_tokens = self._young, {}, 0
        self._young[key] = ids
        self._young_tokens += len(ids) + 16  # an entry costs more than its ids


class PromptEncoder:
    """Token ids of prompts, cached; safe to call from several threads.

    encode_text: ids of a text without special tokens (o200k).
    """

    def __init__(self, encode_text, *, message_tokens: int = 32_000_000, piece_tokens: int = 8_000_000) -> None:
        self._encode_text = encode_text
        self._messages = TokenCache(message_tokens)
        self._pieces = TokenCache(piece_tokens)
        self._lock = threading.Lock()

    def text(self, text: str) -> array:
        """Ids of a text; encoded once per content."""
        if len(text) < 64:
            return self._piecewise(text)
        key = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        with self._lock:
            ids = self._messages.get(key)
        if ids is None:
            ids = self._piecewise(text)
            with self._lock:
                self._messages.put(key, ids)
        return ids

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> array:
        """Ids of a conversation under the workbench's chat template."""
        ids = array("i")
        for message in messages:
            ids.append(template.START_ID)
            ids.extend(self.text(message["role"]))
            ids.append(template.MESSAGE_ID)
            ids.extend(self.text(template.content_text(message)))
            ids.append(template.END_ID)
        ids.append(template.START_ID)
        ids.extend(self.text("assistant"))
        return ids

    def _piecewise(self, text: str) -> array:
        ids = array("i")
        for piece in SEAM.split(text):
            with self._lock:
                known = self._pieces.get(piece)
            if known is None:
                known = array("i", self._encode_text(piece))
                with self._lock:
                    self._pieces.put(piece, known)
            ids.extend(known)
        return ids


class Words:
    """The vocabulary of replies: words that are one token each, as text and as ids."""

    def __init__(self, encode_text) -> None:
        pieces = [" " + word for word in dict.fromkeys(_WORDS)]
        single = [(piece, ids[0]) for piece in pieces if len(ids := encode_text(piece)) == 1]
        self.text = [piece for piece, _ in single]
        self.bytes = [piece.encode() for piece, _ in single]  # letters and a space: no JSON escapes
        self.ids = np.array([token for _, token in single], dtype=np.int32)


class Reply:
    """One choice's reply, known in full before its first token: which words, how many, and why it ends.

    indices: word numbers, one a token; length: tokens until it ends; finish_reason: stop or length;
    stop_reason: the stop string that ended it; end: characters of it that a client sees.
    """

    __slots__ = ("words", "indices", "length", "finish_reason", "stop_reason", "_text", "_ends", "_end", "_hold")

    def __init__(self, words: Words, identity: int, *, limit: int, minimum: int = 0, ignore_eos: bool = False,
                 stops: Sequence[str] = (), include_stop: bool = False) -> None:
        random = generator(identity)
        natural = int(np.exp(random.uniform(np.log(SHORTEST_REPLY), np.log(LONGEST_REPLY))))
        self.words = words
        self.length = limit if ignore_eos else min(max(natural, minimum, 1), limit)
        self.finish_reason = "length" if self.length == limit else "stop"
        self.stop_reason: str | None = None
        self.indices = random.integers(0, len(words.text), self.length).astype(np.uint16)
        self._text: str | None = None
        if stops:
            self._find_stop(stops, minimum, include_stop)

    def _find_stop(self, stops: Sequence[str], minimum: int, include_stop: bool) -> None:
        pieces = [self.words.text[index] for index in self.indices]
        self._text = "".join(pieces)
        self._ends = np.cumsum([len(piece) for piece in pieces])
        self._end = len(self._text)
        self._hold = max(map(len, stops)) - 1  # a stop string may have begun in the last characters
        best: tuple[int, int, str] | None = None  # (token that completes it, start, string)
        earliest = int(self._ends[minimum - 1]) if minimum else 0
        for stop in stops:
            start = self._text.find(stop, max(0, earliest - len(stop) + 1))
            if start >= 0:
                token = int(np.searchsorted(self._ends, start + len(stop)))
                best = min(best or (token, start, stop), (token, start, stop))
        if best:
            token, start, stop = best
            self.length, self.finish_reason, self.stop_reason = token + 1, "stop", stop
            self._end = start + len(stop) if include_stop else start

    @property
    def token_ids(self) -> np.ndarray:
        """Ids of the tokens so far."""
        return self.words.ids[self.indices[:self.length]]

    def piece(self, start: int, stop: int) -> bytes:
        """What a client gets to see when the tokens start … stop - 1 arrive, UTF-8 and JSON-escaped."""
        if self._text is None:
            table, indices = self.words.bytes, self.indices
            if stop - start == 1:
                return table[indices[start]]
            return b"".join([table[index] for index in indices[start:stop]])
        return self._text[self._visible(start):self._visible(stop)].encode()

    def _visible(self, tokens: int) -> int:
        if tokens == 0:
            return 0
        if tokens >= self.length:
            return self._end
        return max(0, min(int(self._ends[tokens - 1]) - self._hold, self._end))

    def text(self, start: int = 0, stop: int | None = None) -> str:
        """The text of tokens `start` to `stop`."""
        return self.piece(start, self.length if stop is None else stop).decode()


class HashedContent:
    """A request's tokens, the prompt and its whole future reply, with all block keys computed at once.

    A block's key identifies the block and everything before it: two 64-bit sums, over all positions up to the
    block's end, of a hash of (position, token). One vector pass (some 20 ns a token) in place of a chain of
    digests; all requests of a server must use it. Not made to withstand crafted collisions.
    """

    __slots__ = ("_keys",)

    def __init__(self, prompt: array, reply: np.ndarray, block_size: int) -> None:
        tokens = np.concatenate([np.frombuffer(prompt, dtype=np.int32), reply])
        whole = len(tokens) // block_size * block_size
        sums = np.empty((whole // block_size, 2), dtype=np.uint64)
        for lane, salt in enumerate(_SALTS):
            mixed = _mixed(tokens[:whole], salt).reshape(-1, block_size)
            sums[:, lane] = np.cumsum(mixed.sum(axis=1, dtype=np.uint64), dtype=np.uint64)
        self._keys = sums.tobytes()

    def key(self, index: int) -> bytes:
        """Key of block `index`, 16 bytes."""
        return self._keys[16 * index:16 * index + 16]

    def append(self, token: int) -> None:
        """The reply is already part of the tokens."""


_SALTS = (0x243F6A8885A308D3, 0x13198A2E03707344)


def _mixed(tokens: np.ndarray, salt: int) -> np.ndarray:
    """A 64-bit hash of each (position, token), SplitMix64's finaliser."""
    state = np.arange(len(tokens), dtype=np.uint64) << np.uint64(32)
    state ^= tokens.astype(np.uint64)
    state += np.uint64(salt)
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state


def prompt_identity(prompt: array) -> int:
    """A 63-bit number that belongs to a prompt's tokens: the seed of its replies."""
    tokens = np.frombuffer(prompt, dtype=np.int32)
    return mix(len(tokens), int(_mixed(tokens, _SALTS[0]).sum(dtype=np.uint64)))
