"""Asked outside what was measured, the twin says so in its result, or refuses under --strict; fp8 KV is read as fp8."""

from __future__ import annotations

import pytest

from spoc_lib.config import load_cluster
from spoc_lib.core.errors import InputError
from spoc_lib.engine.batch import Batch
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.simulate import simulate

DECODE = Batch(128, 128, 128 * 60_000, 128 * 128, 0, 0, 0.0, 0.0, 0, 128)


def engine(**flags) -> EmbeddedEngine:
    return EmbeddedEngine.from_cluster(load_cluster("sim-2xh200"), flags)


def test_fp8_kv_halves_what_a_token_takes_and_what_attention_reads():
    wide, narrow = engine(), engine(kv_cache_dtype="fp8")
    assert narrow.num_blocks == pytest.approx(2 * wide.num_blocks, rel=0.01)
    slow, fast = (one.step_time.components(DECODE)["attn"] for one in (wide, narrow))
    assert 0.45 * slow < fast < 0.7 * slow
    assert narrow.step_time.seconds(DECODE) < wide.step_time.seconds(DECODE)
    assert any("8 bits" in said for said in narrow.outside())
    assert engine(max_num_batched_tokens=8192).outside() == []


def test_a_run_outside_the_range_says_where_and_strict_refuses_it():
    asked = dict(users=3, duration_s=60, warmup_s=10, flags={"max_num_batched_tokens": 8192})
    said = simulate("sim-2xh200", **asked)["passport"]["outside"]
    assert any("tokens of context lie outside the measured" in sentence for sentence in said)
    with pytest.raises(InputError, match="refused under --strict"):
        simulate("sim-2xh200", **asked, strict=True)


@pytest.mark.parametrize("command, words", [
    ("engine simulate sim-4xh100 --users 2 --duration 30 --strict", "4 GPUs were not measured"),
    ("engine serve --cluster sim-2xh200 --strict", "outside the measured"),
    ("sweep run sim-4xh100 --strict", "4 GPUs were not measured"),
])
def test_strict_on_the_command_line_ends_with_one_sentence(command, words, here):
    done = here(*command.split())
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.count("\n") == 1


def test_a_server_within_the_range_is_not_refused():
    inside = engine(max_num_batched_tokens=8192, max_num_seqs=64, max_model_len=8192, enable_prefix_caching=False)
    assert inside.outside_as_server(strict=True) == []
