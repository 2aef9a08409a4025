"""Real code as prompt text, cut to exact token counts.

A text is made of whole lines of the corpus, tokenised once. Two rules keep counts exact where texts meet:

1. A unit is a line that is not blank, with the blank lines after it. It ends with a newline, and the next unit begins
   with neither a newline nor a slash. In the splitting patterns of byte-pair vocabularies a newline run can only be
   joined by whitespace that leads to another newline (or, after punctuation, by a slash), so no token crosses the
   seam, and the tokens of a joined text are the tokens of its units.
2. A unit that must be cut is cut between tokens and closed by filler words and a newline, then counted again; the cut
   that keeps most of it and counts right is taken.

Every stream opens with a header line of words that its 64-bit identity chooses, so unequal streams differ within the
first line and can never share a cache block by accident. Of two lengths of one stream the shorter is
a prefix of the longer, but for the few filler tokens at its end.
"""

from __future__ import annotations

import hashlib
import math
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from spoc_lib.core.caches import cache_dir
from spoc_lib.core.errors import InputError
from spoc_lib.core.files import replacing
from spoc_lib.workload.identity import mix
from spoc_lib.workload.script import Segment
from spoc_lib.workload.source_text import read_units
from spoc_lib.workload.tokenizer import OfflineTokenizer, Tokenizer, offline_tokenizer

DEFAULT_MAX_BYTES = 8 << 20
#: A remote tokenizer counts line by line over HTTP: a smaller corpus keeps that to seconds.
REMOTE_MAX_BYTES = 96 << 10
#: Most words that headers and fillers choose from, and the bits of identity that a header carries.
_MAX_WORDS = 4096
_HEADER_BITS = 60


@dataclass(frozen=True)
class Corpus:
    """Lines of real text with their token counts. Build with `from_directory`."""

    source: str
    tokenizer: Tokenizer
    body: str = field(repr=False)
    char_ends: np.ndarray = field(repr=False)
    token_ends: np.ndarray = field(repr=False)
    words: tuple[str, ...] = field(repr=False)
    files: int = 0
    skipped_files: int = 0

    @classmethod
    def from_directory(cls, path: str | Path | None = None, tokenizer: Tokenizer | None = None,
                       max_bytes: int | None = None) -> Corpus:
        """The text files below `path`, in the order of their names, up to `max_bytes` (default: 8 MiB offline).

        `path` None: Python's installed standard library. InputError when there is no such directory or no text in it.
        """
        tokenizer = tokenizer or offline_tokenizer()
        remote = not isinstance(tokenizer, OfflineTokenizer)
        limit = max_bytes or (REMOTE_MAX_BYTES if remote else DEFAULT_MAX_BYTES)
        root = Path(path) if path is not None else Path(sysconfig.get_path("stdlib"))
        if not root.is_dir():
            raise InputError("no-corpus", f"monorepo '{root}' is not a directory: name a folder with source code")
        units, files, skipped = read_units(root, limit)
        if not units:
            seen = f"{skipped} files are binary or of unknown kind" if skipped else "it is empty"
            raise InputError("empty-corpus", f"monorepo '{root}' holds no text to send ({seen}): name a folder with "
                             "source code")
        counts = _cached_counts(units, tokenizer)
        return cls("standard library" if path is None else str(root), tokenizer, "".join(units),
                   np.cumsum([len(unit) for unit in units]), np.cumsum(counts), _single_token_words(tokenizer, units),
                   files, skipped)

    @property
    def header_tokens(self) -> int:
        """Tokens of a header line: '#', words for 60 bits of identity, the newline."""
        return math.ceil(_HEADER_BITS / math.log2(len(self.words))) + 2

    def text(self, segment: Segment) -> str:
        """Text of exactly `segment.tokens` tokens; it ends with a newline and may be joined to any other."""
        return self.stream_text(segment.stream, segment.tokens)

    def stream_text(self, stream: int, tokens: int) -> str:
        """The first `tokens` tokens of a stream (at least 1)."""
        if tokens < self.header_tokens:
            return self._words_line(stream, tokens)
        header = self._words_line(stream, self.header_tokens)
        return header + self._lines(mix(stream, 41), tokens - self.header_tokens)

    def seam_error_ratio(self, samples: int = 64) -> float:
        """How far the tokens of joined texts are from the sum of their counts (0: the seams are exact)."""
        texts = [self.stream_text(mix(k, 44), 40 + k % 23) for k in range(samples)]
        counted = self.tokenizer.count("".join(texts))
        return abs(counted / sum(40 + k % 23 for k in range(samples)) - 1)

    def summary(self) -> dict:
        """What the corpus holds, for the record."""
        return {"source": self.source, "tokenizer": self.tokenizer.name, "files": self.files,
                "skipped_files": self.skipped_files, "lines": len(self.char_ends), "chars": len(self.body),
                "tokens": int(self.token_ends[-1]), "seam_error_ratio": self.seam_error_ratio()}

    def _words_line(self, stream: int, tokens: int) -> str:
        """'# word word …' of exactly `tokens` tokens; the words follow from the stream."""
        if tokens < 1:
            raise ValueError("a text has at least 1 token")
        if tokens == 1:
            return "#\n" if self.tokenizer.count("#\n") == 1 else "#"
        if tokens == 2:
            return "x\n"
        width = len(self.words)
        bits = (mix(stream, 42) << 63) | mix(stream, 43)
        chosen = []
        for _ in range(tokens - 2):
            bits, digit = divmod(bits, width)
            chosen.append(self.words[digit])
        return "#" + "".join(chosen) + "\n"

    def _lines(self, start: int, tokens: int) -> str:
        """`tokens` tokens of consecutive lines from a place that `start` chooses, wrapping around the corpus."""
        if tokens == 0:
            return ""
        unit = start % len(self.token_ends)
        offset = int(self.token_ends[unit - 1]) if unit else 0
        parts, left = [], tokens
        while left > 0:
            last = int(np.searchsorted(self.token_ends, offset + left, side="right"))
            begin = int(self.char_ends[unit - 1]) if unit else 0
            end = int(self.char_ends[last - 1]) if last else 0
            if end > begin:
                parts.append(self.body[begin:end])
                left -= int(self.token_ends[last - 1]) - offset
            if last < len(self.token_ends):
                if left:
                    parts.append(self._cut(last, left))
                break
            unit, offset = 0, 0
        return "".join(parts)

    def _cut(self, unit: int, tokens: int) -> str:
        """The unit's first tokens, closed to exactly `tokens` tokens."""
        begin = int(self.char_ends[unit - 1]) if unit else 0
        ids = self.tokenizer.encode(self.body[begin:int(self.char_ends[unit])])
        for kept in range(min(tokens - 1, len(ids)), 0, -1):
            text = self.tokenizer.decode(ids[:kept])
            filler = tokens - kept - 1
            if "\n" in text or not text.strip():
                continue
            closed = text + "".join(self.words[k % len(self.words)] for k in range(filler)) + "\n"
            if self.tokenizer.count(closed) == tokens:
                return closed
        return self._words_line(0, tokens)




def _single_token_words(tokenizer: Tokenizer, units: list[str]) -> tuple[str, ...]:
    """Words of the corpus that are one token each after a space, most frequent first; their number a power of two.

    InputError when the vocabulary has fewer than 16 of them: headers could not tell streams apart.
    """
    frequent = Counter(re.findall(r"(?<![^ ])[a-z]{2,9}(?![^ \n])", "".join(units[:50_000])))
    candidates = sorted(frequent, key=lambda word: (-frequent[word], word))[: 2 * _MAX_WORDS]
    if not isinstance(tokenizer, OfflineTokenizer):
        candidates = candidates[:512]
    single = [f" {word}" for word in candidates if tokenizer.count(f" {word}") == 1][:_MAX_WORDS]
    if len(single) < 16:
        raise InputError("small-corpus", f"corpus and tokenizer {tokenizer.name} share only {len(single)} words "
                         "of one token; at least 16 are needed: name a larger folder of source code")
    return tuple(single[: 1 << (len(single).bit_length() - 1)])


def _cached_counts(units: list[str], tokenizer: Tokenizer) -> np.ndarray:
    """Tokens of each unit; kept in the user's cache folder under the hash of text and vocabulary."""
    digest = hashlib.sha256("".join(units).encode())
    digest.update(repr(tokenizer.encode("".join(units[:40]))).encode())
    path = cache_dir() / f"corpus-{digest.hexdigest()[:32]}.npy"
    try:
        counts = np.load(path, allow_pickle=False)
        if counts.shape == (len(units),):
            return counts
    except (OSError, ValueError, EOFError):
        pass  # absent or damaged: it is only a cache, count again
    counts = np.fromiter((tokenizer.count(unit) for unit in units), dtype=np.int32, count=len(units))
    try:
        with replacing(path) as temporary, open(temporary, "wb") as handle:
            np.save(handle, counts, allow_pickle=False)
    except OSError:
        pass  # a read-only home costs the next start a second, nothing else
    return counts
