"""What a script must know of a foreign server, so that intended sizes are counted sizes: its tokenizer, the overhead of
its chat template, and its context limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spoc_lib.core.errors import InputError
from spoc_lib.workload.corpus import Corpus
from spoc_lib.workload.template import Overhead, measured_overhead
from spoc_lib.workload.tokenizer import RemoteTokenizer


@dataclass(frozen=True)
class Target:
    """A corpus cut to the server's tokens, and what `build_script` wants: `overhead` and `context_limit`."""

    corpus: Corpus
    overhead: Overhead
    context_limit: int | None


def measure_target(base_url: str, model: str, monorepo: str | Path | None = None, *, api_key: str | None = None,
                   headers: Mapping[str, str] | None = None, verify_tls: bool = True) -> Target:
    """Ask the server at `base_url` (vLLM's `/tokenize`); InputError when it does not answer or has no tokenizer."""
    tokenizer = RemoteTokenizer(base_url, model, api_key=api_key, headers=headers, verify_tls=verify_tls)
    overhead = measured_overhead(tokenizer.count_messages, tokenizer.count)
    return Target(Corpus.from_directory(monorepo, tokenizer), overhead, tokenizer.max_model_len)


def tokenizer_refusal(base_url: str, model: str, api_key: str | None = None) -> str | None:
    """Why the server cannot be asked for its tokens, in a sentence; None when it can."""
    tokenizer = RemoteTokenizer(base_url, model, api_key=api_key)
    try:
        ids = tokenizer.encode("import os\n")
        tokenizer.decode(ids)
        tokenizer.count_messages([{"role": "user", "content": "import os\n"}])
    except InputError as error:
        return error.message
    return None
