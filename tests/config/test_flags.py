"""Flags are read in one way wherever they stand: names in any spelling, each value as its flag takes it."""

from __future__ import annotations

import pytest
import yaml

from spoc_lib.config import load_cluster, read_flags
from spoc_lib.config.flags import load_catalogue, unknown_flags
from spoc_lib.core.errors import InputError
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.engine.flags import EngineFlags, parse_flags
from spoc_lib.pipeline.parameters import check
from spoc_lib.search.space import build_space
from spoc_lib.servers.commands import flag_arguments, merged_flags, shell_command

RIGHT = [
    ("max_num_seqs=64", 64), ("max_num_seqs= 64 ", 64), ("max_num_seqs=010", 10), ("max_num_seqs=1_000", 1000),
    ("max_num_seqs='64'", 64), ("max_num_batched_tokens=1e5", 100_000), ("max_num_batched_tokens=8192.0", 8192),
    ("max_num_batched_tokens=0x10", 16), ("max_num_batched_tokens=8k", 8000), ("max_num_batched_tokens=8K", 8192),
    ("max_num_batched_tokens=2.5k", 2500), ("gpu_memory_utilization=9e-1", 0.9), ("gpu_memory_utilization=1", 1.0),
    ("enable_prefix_caching=yes", True), ("enable_prefix_caching=True", True), ("enable_prefix_caching=off", False),
    ("kv_cache_dtype=fp8", "fp8"), ('kv_cache_dtype="fp8"', "fp8"), ("max_model_len=null", None),
    ("max_model_len=None", None), ("max_model_len=auto", "auto"), ("max_model_len=-1", "-1"),
    ("quantization=fp8", "fp8"), ("cudagraph_capture_sizes=1,2,4", "1 2 4"), ("runner=generate", "generate"),
    ('compilation_config={"mode": 3}', '{"mode": 3}'), ("mamba_cache_mode=none", "none"),
]


@pytest.mark.parametrize(("word", "value"), RIGHT)
def test_a_value_is_what_a_person_reads(word, value):
    (read,) = read_flags([word]).values()
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(("word", "sentence"), [
    ("kv_cache_dtype=pf8", "kv_cache_dtype: 'pf8' is not one of auto, bfloat16, .*: did you mean fp8?"),
    ("kv_cache_dtype=FP8_E4M3", "did you mean fp8_e4m3"), ("kv_cache_dtype=[fp8", r"'\[fp8' is not one of"),
    ("kv_cache_dtype={", "'{' is not one of"), ("kv_cache_dtype=a: b", "'a: b' is not one of"),
    ("kv_cache_dtype=", "kv_cache_dtype: no value is given"), ("kv_cache_dtype=null", "leave the flag out"),
    ("max_num_seqs=", "no value is given"), ("max_num_seqs=None", "leave the flag out"),
    ("max_num_seqs=many", "type int .a whole number., not 'many'"), ("max_num_seqs=6.5", "type int"),
    ("max_num_seqs=1:30", "type int"), ("max_num_seqs=true", "type int"), ("max_num_seqs=0", "at least 1"),
    ("max_num_seqs=-3", "at least 1"), ("max_num_seqs=inf", "type int"), ("max_num_seqs=1e400", "type int"),
    ("max_num_seqs=" + "9" * 5000, "type int"), ("max_model_len=soon", "a whole number, or auto or -1"),
    ("gpu_memory_utilization=nan", "type float"), ("gpu_memory_utilization=92", "at most 1"),
    ("enable_prefix_caching=1", "type bool"), ("enable_prefix_caching=maybe", "type bool"),
    ("runner=chat", "not one of auto, generate"), ("compilation_config=[fp8", "type json"),
    ("pipeline_parallel_size=two", "type int"), ("max_num_seqs", "name=value"), ("=1", "cannot be a flag"),
    ("max num=1", "cannot be a flag"), ("--max-num-seqs", "no value is given"), ("api_key=x", "is a credential"),
])
def test_any_other_value_is_one_sentence(word, sentence):
    with pytest.raises(InputError, match=f"^--set: .*{sentence}") as caught:
        read_flags([word], "--set")
    assert "\n" not in caught.value.message and len(caught.value.message) < 400


def test_names_are_spelled_with_dashes_or_underscores_everywhere():
    for words in (["max_num_seqs=64"], ["max-num-seqs=64"], ["--max-num-seqs=64"], ["--max_num_seqs", "64"],
                  "--max-num-seqs 64", {"--max-num-seqs": 64}, {"max-num-seqs": "64"}):
        assert read_flags(words) == {"max_num_seqs": 64}
    assert read_flags(["tp=4"]) == read_flags(["-tp=4"]) == {"tensor_parallel_size": 4}
    assert read_flags("--no-enable-prefix-caching, watermark=0.01 --async-scheduling max_num_seqs=8") == {
        "enable_prefix_caching": False, "watermark": 0.01, "async_scheduling": True, "max_num_seqs": 8}
    assert read_flags({"no_async_scheduling": False}) == {"async_scheduling": True}
    assert read_flags("""compilation_config='{"mode": 3, "x": [1, 2]}' --max-model-len -1""") == {
        "compilation_config": '{"mode": 3, "x": [1, 2]}', "max_model_len": "-1"}


@pytest.mark.parametrize("given", [["max_num_seqs=8", "max-num-seqs=16"], {"max-num-seqs": 8, "max_num_seqs": 8},
                                   "tp=2 tensor_parallel_size=2", ["--async-scheduling", "--no-async-scheduling"]])
def test_a_flag_that_is_given_twice_is_refused(given):
    with pytest.raises(InputError, match="is given twice"):
        read_flags(given)


def cluster(folder, **changed):
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(load_cluster("sim-4xh100").model_dump(mode="json") | changed))
    return load_cluster(str(path))


REAL = {"kind": "process", "command": ["vllm", "serve"]}


@pytest.mark.parametrize("engine", [{"kind": "embedded"}, REAL])
def test_a_cluster_file_is_held_against_the_catalogue(engine, tmp_path):
    for field, given, sentence in (
            ("flags", {"kv-cache-dtype": "pf8"}, "mine.yaml: flags: kv_cache_dtype: 'pf8' is not one of"),
            ("flags", {"max_num_seqs": 8, "max-num-seqs": 16}, "'max_num_seqs' is given twice"),
            ("search", {"space": {"max_num_seqs": [8, "many"]}}, "search.space: max_num_seqs: wants .* not 'many'"),
            ("search", {"space": {"max_num_seqs": [1000, "1e3"]}}, "lists a value twice"),
            ("search", {"space": {"max_num_seqs": 8}}, "list of the values"),
            ("search", {"space": {"max-num-seqs": [8], "max_num_seqs": [16]}}, "is given twice"),
            ("search", {"forbidden": ["[fp8"]}, "search.forbidden: .* cannot be a flag")):
        with pytest.raises(InputError, match=sentence):
            cluster(tmp_path, engine=engine, **{field: given})
    mine = cluster(tmp_path, engine=engine, flags={"--max-num-batched-tokens": "16k", "max_model_len": None},
                   search={"space": {"enable-prefix-caching": ["yes", "no"]}, "forbidden": ["max-num-seqs"]})
    assert mine.flags == {"max_num_batched_tokens": 16000}
    assert mine.search.space == {"enable_prefix_caching": [True, False]} and mine.search.forbidden == ["max_num_seqs"]


def test_what_the_embedded_engine_cannot_simulate_it_refuses(tmp_path):
    simulated = load_cluster("sim-4xh100")
    for flags, sentence in (({"kv_cache_dtype": "nvfp4"}, "stores keys and values as auto, bfloat16"),
                            ({"kv_cache_dtype": "banana"}, "'banana' is not one of"),
                            ({"moe_backend": "triton"}, "does not model 'moe_backend'"),
                            ({"quantization": "fp8"}, "does not model 'quantization'"),
                            ({"max_num_sequences": 8}, "unknown flag .* did you mean max_num_seqs"),
                            ({"max_model_len": "auto"}, "max_model_len"), ({"banana": 1}, "unknown flag 'banana'")):
        with pytest.raises(InputError, match=sentence):
            EmbeddedEngine.from_cluster(simulated, flags)
    with pytest.raises(InputError, match="flags: unknown flag 'banana'"):
        build_space(cluster(tmp_path, flags={"banana": "auto"}))
    with pytest.raises(InputError, match="flags: .* does not model 'enforce_eager'"):
        build_space(cluster(tmp_path, flags={"enforce_eager": True}))
    auto, half = (EmbeddedEngine.from_cluster(simulated, {"kv_cache_dtype": kind}) for kind in ("auto", "bfloat16"))
    fp8 = EmbeddedEngine.from_cluster(simulated, {"kv_cache_dtype": "fp8_e4m3"})
    assert auto.num_blocks == half.num_blocks and fp8.num_blocks == pytest.approx(2 * auto.num_blocks, rel=1e-3)
    with pytest.raises(ValueError, match="stores keys and values"):
        EngineFlags(kv_cache_dtype="pf8")
    assert parse_flags({"--max-num-seqs": "7", "max_model_len": None}).max_num_seqs == 7


def test_a_real_engine_gets_flags_that_the_catalogue_lacks(tmp_path):
    real = cluster(tmp_path, engine=REAL, flags={"brand_new_flag": "on", "max-num-seq": 3, "trust_remote_code": "yes"},
                   search={"space": {"other_new_flag": [1, 2], "max_num_active_seqs": [16, 32]}})
    assert real.flags == {"brand_new_flag": True, "max_num_seq": 3, "trust_remote_code": True}
    assert unknown_flags(real.flags) == [
        "unknown flag 'brand_new_flag': vllm has none of this name; `vllm serve --help=all` lists them",
        "unknown flag 'max_num_seq': did you mean max_num_seqs or max_num_active_seqs?"]
    assert "--brand-new-flag --max-num-seq 3 --trust-remote-code" in shell_command(real, {})
    space = build_space(real)
    assert space.launch_flags(space.defaults) == real.flags | {"other_new_flag": 1, "max_num_active_seqs": 16}
    assert merged_flags(real, {"max-num-seq": 5})["max_num_seq"] == 5


def test_values_reach_a_command_line_as_vllm_takes_them():
    given = read_flags(["cudagraph_capture_sizes=1 2 4", "max_num_batched_tokens=1e5", "watermark=0.0123456789",
                        "max_model_len=-1", "--no-async-scheduling", "compilation_config.mode=3"])
    assert flag_arguments(given) == [
        "--cudagraph-capture-sizes", "1", "2", "4", "--max-num-batched-tokens", "100000", "--watermark", "0.0123456789",
        "--max-model-len=-1", "--no-async-scheduling", "--compilation-config.mode", "3"]


def test_a_notebook_s_parameter_and_a_context_limit():
    with pytest.raises(InputError, match="flags: kv_cache_dtype: 'pf8' is not one of"):
        check("03", {"flags": "kv_cache_dtype=pf8"})
    model = load_cluster("sim-4xh100")
    assert model.context_limit() == 131_072 and model.context_limit({"max_model_len": 4096}) == 4096
    assert model.context_limit({"max_model_len": "auto"}) == model.context_limit({"max_model_len": -1}) == 131_072


def test_no_flag_stands_twice_in_the_catalogue():
    catalogue = load_catalogue()
    names = [*catalogue.flags, *catalogue.words, *catalogue.aliases,
             *(name for names in catalogue.others.values() for name in names)]
    assert len(names) == len(set(names)) > 250
    assert all(catalogue.spec(name) for name in catalogue.aliases.values())


@pytest.mark.parametrize(("given", "flags", "arguments"), [
    ("-tp 4 -dp=2 -O3", {"tensor_parallel_size": 4, "data_parallel_size": 2, "optimization_level": "3"},
     ["--tensor-parallel-size", "4", "--data-parallel-size", "2", "--optimization-level", "3"]),
    ("-cc.mode=3 -O.cudagraph_mode=FULL", {"compilation_config.mode": "3", "compilation_config.cudagraph_mode": "FULL"},
     ["--compilation-config.mode", "3", "--compilation-config.cudagraph-mode", "FULL"]),
    ("--cudagraph-capture-sizes 1 2 4 max_num_seqs=4", {"cudagraph_capture_sizes": "1 2 4", "max_num_seqs": 4},
     ["--cudagraph-capture-sizes", "1", "2", "4", "--max-num-seqs", "4"]),
    ("--lora-modules sql=/x chat=/y -tp 2", {"lora_modules": "sql=/x chat=/y", "tensor_parallel_size": 2},
     ["--lora-modules", "sql=/x", "chat=/y", "--tensor-parallel-size", "2"]),
    ({"lora_modules": '{"name": "a", "path": "/p"}'}, {"lora_modules": '{"name": "a", "path": "/p"}'},
     ["--lora-modules", '{"name": "a", "path": "/p"}']),
    ({"lora_modules": [{"name": "a", "path": "/p q"}, "b=/r"]},
     {"lora_modules": '["{\\"name\\": \\"a\\", \\"path\\": \\"/p q\\"}", "b=/r"]'},
     ["--lora-modules", '{"name": "a", "path": "/p q"}', "b=/r"]),
])
def test_short_names_and_flags_of_several_words_reach_the_engine_whole(given, flags, arguments):
    assert read_flags(given) == flags == read_flags(flags)
    assert flag_arguments(flags) == arguments


def test_half_an_object_is_no_word_of_a_list():
    with pytest.raises(InputError, match="lora_modules: wants a value of type list"):
        read_flags({"lora_modules": '{"name": "a", '})
