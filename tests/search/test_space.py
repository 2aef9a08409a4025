"""The flag space: data, cluster files, canonical flags, combinations that cannot be."""

from __future__ import annotations

import itertools

import pytest
import yaml

from spoc_lib.config import Cluster, load_cluster, rules
from spoc_lib.config.flags import Range, load_catalogue
from spoc_lib.core.errors import InputError
from spoc_lib.engine.flags import EngineFlags
from spoc_lib.search.space import build_space, flags_key

SHIPPED = ["sim-4xh100", "sim-2xh200", "vllm-cpu"]


def changed(name: str, **changes) -> Cluster:
    """The shipped cluster with some top-level fields replaced."""
    return Cluster.model_validate({**load_cluster(name).model_dump(), **changes})


def search(**space) -> dict:
    return {"target_users": 100, "space": space}


@pytest.mark.parametrize("name", SHIPPED)
def test_defaults_are_valid_and_in_the_space(name):
    space = build_space(load_cluster(name))
    assert space.invalid(space.defaults) is None
    assert all(space.defaults[flag] in values for flag, values in space.searched.items())
    assert flags_key(space.canonical(space.defaults)) == flags_key(space.defaults)


def test_defaults_follow_the_hardware():
    assert build_space(load_cluster("sim-4xh100")).defaults["max_num_batched_tokens"] == 8192
    cpu = build_space(load_cluster("vllm-cpu")).defaults
    assert (cpu["max_num_batched_tokens"], cpu["max_num_seqs"]) == (2048, 128)


def test_the_embedded_engine_has_the_same_defaults_as_the_data():
    catalogue, gpu = load_catalogue(), "sim-4xh100"
    defaults = build_space(load_cluster(gpu)).defaults
    engine = EngineFlags()
    assert {name: getattr(engine, name) for name in defaults} == defaults
    assert set(EngineFlags.model_fields) <= set(catalogue.flags)


def test_the_default_space_holds_the_five_flags_of_the_search():
    assert set(build_space(load_cluster("sim-2xh200")).searched) == {
        "max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization", "long_prefill_token_threshold",
        "enable_prefix_caching"}


def test_forbidden_flags_are_not_searched():
    space = build_space(changed("sim-4xh100", search=search() | {"forbidden": ["gpu-memory-utilization"]}))
    assert "gpu_memory_utilization" not in space.searched and len(space.searched) == 4


def test_a_twin_of_real_hardware_has_its_defaults():
    assert build_space(load_cluster("vllm-cpu")).twin_flags({})["block_size"] == 128
    simulated = build_space(load_cluster("sim-4xh100"))
    assert simulated.twin_flags({"max_num_seqs": 8}) == {**simulated.fixed, "max_num_seqs": 8}


def test_log_ranges_walk_in_round_values():
    points = Range(low=512, high=4096, scale="log", per_octave=2, also=[0]).points(int)
    assert points == [0, 512, 768, 1024, 1536, 2048, 3072, 4096]


def test_the_grid_holds_no_invalid_and_no_repeated_engine():
    space = build_space(load_cluster("sim-4xh100"))
    grid = list(space.grid())
    assert len({flags_key(flags) for flags in grid}) == len(grid) < space.size
    assert all(flags["max_num_batched_tokens"] >= flags["max_num_seqs"] for flags in grid)
    everything = (dict(zip(space.searched, p, strict=True)) for p in itertools.product(*space.searched.values()))
    known = {flags_key(flags) for flags in grid}
    assert all(space.invalid(c) or flags_key(c) in known for c in map(space.canonical, everything))


def test_flags_without_effect_fall_back_to_the_default():
    space = build_space(changed("sim-4xh100", search={"target_users": 150}))
    beyond = {**space.defaults, "max_num_batched_tokens": 1024, "long_prefill_token_threshold": 4096,
              "max_num_seqs": 256}
    assert space.canonical(beyond) == {**space.defaults, "max_num_batched_tokens": 1024}
    below = {**space.defaults, "max_num_seqs": 128}
    assert space.canonical(below) == below


def test_an_invalid_combination_is_named_with_its_values():
    space = build_space(load_cluster("sim-4xh100"))
    reason = space.invalid({**space.defaults, "max_num_batched_tokens": 512})
    assert "max_num_batched_tokens (512)" in reason and "max_num_seqs (1024)" in reason


def test_a_rule_with_an_unset_side_does_not_apply():
    rule = rules.Rule(require=("max_num_active_seqs", "<=", "max_num_seqs"), reason="x")
    assert rules.broken([rule], {"max_num_active_seqs": None, "max_num_seqs": 8}) is None
    assert "max_num_active_seqs (9)" in rules.broken([rule], {"max_num_active_seqs": 9, "max_num_seqs": 8})


def test_a_launch_of_the_defaults_passes_the_fixed_flags_alone():
    space = build_space(load_cluster("vllm-cpu"))
    assert space.launch_flags(space.defaults) == {"max_model_len": 4096}
    assert space.launch_flags({**space.defaults, "max_num_seqs": 8}) == {"max_model_len": 4096, "max_num_seqs": 8}


@pytest.mark.parametrize(("changes", "words"), [
    ({"search": search(max_num_batch_tokens=[1024])}, ["max_num_batch_tokens", "did you mean max_num_batched_tokens"]),
    ({"search": search(max_num_seqs=[])}, ["max_num_seqs", "empty range"]),
    ({"search": search(max_num_seqs=[8, 8])}, ["max_num_seqs", "twice"]),
    ({"search": search(max_num_seqs=["many"])}, ["max_num_seqs", "type int"]),
    ({"search": search(max_num_seqs=[0])}, ["max_num_seqs", "at least 1"]),
    ({"search": search(enable_prefix_caching=[1])}, ["enable_prefix_caching", "type bool"]),
    ({"search": search(gpu_memory_utilization=[0.5, 1.2])}, ["gpu_memory_utilization", "at most 1"]),
    ({"search": search(moe_backend=["triton"])}, ["moe_backend", "embedded engine"]),
    ({"search": search(max_num_seqs=[8]), "flags": {"max_num_seqs": 16}}, ["max_num_seqs", "held fixed"]),
    ({"search": search(max_num_seqs=[8]) | {"forbidden": ["--max-num-seqs"]}},
     ["'max_num_seqs' is forbidden and yet searched", "remove one of the two"]),
    ({"search": search() | {"forbidden": ["tensor_parallel_size"]}, "flags": {"tensor_parallel_size": 4}},
     ["'tensor_parallel_size' is forbidden and yet held fixed"]),
    ({"search": search() | {"forbidden": ["max_num_seq"]}}, ["search.forbidden", "did you mean max_num_seqs"]),
    ({"flags": {"max_num_batched_tokens": 512}}, ["max_num_batched_tokens (512)", "conflict"]),
    ({"flags": {"max_num_seqs": "x"}, "search": search()}, ["flags", "max_num_seqs", "type int"]),
])
def test_bad_spaces_are_one_sentence(changes, words):
    with pytest.raises(InputError) as error:
        build_space(changed("sim-4xh100", **changes))
    assert all(word in error.value.message for word in words), error.value.message


def test_the_command_line_answers_bad_input_with_one_sentence(tmp_path, here):
    path = tmp_path / "mine.yaml"
    spec = load_cluster("sim-4xh100").model_dump(mode="json")
    path.write_text(yaml.safe_dump({**spec, "search": search(max_nums_seqs=[8])}))
    remote = tmp_path / "remote.yaml"
    remote.write_text(yaml.safe_dump({**spec, "engine": {"kind": "remote", "base_url": "http://127.0.0.1:9"}}))
    for arguments, word in ((["run", str(path)], "max_nums_seqs"), (["run", str(remote)], "remote"),
                            (["resume", str(tmp_path)], "holds no search"), (["best", str(tmp_path)], "no search")):
        done = here("search", *arguments, *(["--out", tmp_path / "out"] if arguments[0] == "run" else []))
        assert done.returncode == 2, done.stderr
        assert word in done.stderr and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
