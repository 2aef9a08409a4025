"""What a script must know of a foreign server, so that intended sizes are counted sizes: its tokenizer, the overhead of
its chat template, and its context limit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spoc_lib.config.access import Access
from spoc_lib.core.errors import InputError
from spoc_lib.workload.corpus import Corpus
from spoc_lib.workload.template import Overhead, measured_overhead
from spoc_lib.workload.tokenizer import RemoteTokenizer, Tokenizer, offline_tokenizer

#: Text in which two vocabularies, or two ways to split before them, would part: code, numbers, several scripts.
SAMPLE = """def softmax(x: np.ndarray, axis=-1):  # 1e-12 keeps 0/0 away\n\tpeak = x.max(axis=axis, keepdims=True)\n
    return {"α": 0.25, 'naïve': "übermäßig", "値": 12345678, "ключ": [None] * 3}\n\n\n
if __name__ == '__main__':\r\n        assert isn't_it(3.14159) != 0xDEADBEEF; print(f"{x!r:>10}\\n")   \n
HTTPServerError: GET https://example.org/a/b?c=d&e=%20f 503 (Service Unavailable) — re-try… 🚀 don't WE'LL\n"""


@dataclass(frozen=True)
class Target:
    """A corpus cut to the server's tokens, and what `build_script` wants: `overhead` and `context_limit`."""

    corpus: Corpus
    overhead: Overhead
    context_limit: int | None


def measure_target(base_url: str, model: str, monorepo: str | Path | None = None, *,
                   access: Access | None = None) -> Target:
    """Ask the server at `base_url` (vLLM's `/tokenize`); InputError when it does not answer or has no tokenizer.

    A server that encodes as the offline tokenizer does is asked no further: its texts are cut here. Each question
    would go through the server under load, and a user would wait for the answers instead of thinking.
    """
    remote = RemoteTokenizer(base_url, model, access)
    overhead = measured_overhead(remote.count_messages, remote.count)
    offline = offline_tokenizer()
    tokenizer: Tokenizer = offline if remote.encode(SAMPLE) == offline.encode(SAMPLE) else remote
    return Target(Corpus.from_directory(monorepo, tokenizer), overhead, remote.max_model_len)


def tokenizer_refusal(base_url: str, model: str, access: Access | None = None) -> str | None:
    """Why the server cannot be asked for its tokens, in a sentence; None when it can."""
    tokenizer = RemoteTokenizer(base_url, model, access)
    try:
        ids = tokenizer.encode("import os\n")
        tokenizer.decode(ids)
        tokenizer.count_messages([{"role": "user", "content": "import os\n"}])
    except InputError as error:
        return error.message
    return None
