"""Untrusted input, made up by hypothesis: what comes out is a result or one sentence, whatever went in.

`SPOC_FUZZ=5000 pytest tests/safety/test_fuzz.py -s` looks longer and prints how many cases it tried.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spoc_lib.config import Cluster, Profile, read_flags
from spoc_lib.core import yamlfile
from spoc_lib.core.errors import InputError, SpocError
from spoc_lib.pipeline.parameters import STAGES, check, from_notebook, split_settings
from spoc_lib.workload.personas import load_personas
from spoc_lib.workload.traces.importers import import_path

ROOT = Path(__file__).resolve().parents[2]
CASES = int(os.environ.get("SPOC_FUZZ", "60"))
many = settings(max_examples=CASES, deadline=None, database=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
COUNTED: Counter[tuple[str, str]] = Counter()

word = st.text(max_size=12)
leaf = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), word,
                 st.sampled_from([0, -1, 2**63, 1e308, "inf", "nan", "", "../x", "-x", "\x00", "01", "12e5678"]))
anything = st.recursive(leaf, lambda inner: st.one_of(st.lists(inner, max_size=4),
                                                      st.dictionaries(word, inner, max_size=4)), max_leaves=12)


@pytest.fixture(scope="module", autouse=True)
def figures():
    yield
    for (name, what), count in sorted(COUNTED.items()):
        print(f"fuzz {name}: {count} {what}")


def judged(name: str, act) -> None:
    """`act` gives a result or raises a SpocError with a sentence; anything else is the finding."""
    try:
        act()
    except SpocError as error:
        assert error.message.strip() and len(error.message) < 2000
        COUNTED[name, "refused with a sentence"] += 1
    else:
        COUNTED[name, "taken"] += 1


@many
@given(number=st.sampled_from(sorted(STAGES)), data=st.data())
def test_parameters_of_notebooks(number, data):
    fields = list(STAGES[number].parameters.model_fields)
    values = data.draw(st.dictionaries(st.one_of(st.sampled_from(fields), word), anything, max_size=5))
    judged("notebook parameters", lambda: check(number, values))
    injected = "# Parameters\n" + "\n".join(f"{name} = {value!r}" for name, value in values.items()
                                            if name.isidentifier() and isinstance(value, (str, int, bool)))
    try:
        compile(injected, "cell", "exec")
    except SyntaxError:  # a keyword as a name
        return
    judged("injected cells", lambda: from_notebook(number, {**values, "In": [injected]}))


@many
@given(st.lists(st.text(max_size=30), max_size=3), st.text(max_size=40))
def test_settings_and_flags_as_text(pairs, flags):
    judged("--set", lambda: split_settings(pairs, sorted(STAGES)))
    judged("flag text", lambda: read_flags(flags))


def spoiled(draw, value, depth: int = 0):
    """`value` with one thing in it replaced, removed or renamed."""
    if isinstance(value, dict) and value and (depth == 0 or draw(st.booleans())):
        name = draw(st.sampled_from(sorted(value, key=str)))
        how = draw(st.sampled_from(["deeper", "remove", "rename", "replace"]))
        if how == "remove":
            return {k: v for k, v in value.items() if k != name}
        if how == "rename":
            return {(draw(word) if k == name else k): v for k, v in value.items()}
        return {**value, name: spoiled(draw, value[name], depth + 1) if how == "deeper" else draw(anything)}
    if isinstance(value, list) and value and draw(st.booleans()):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], spoiled(draw, value[at], depth + 1), *value[at + 1:]]
    return draw(anything)


@many
@given(name=st.sampled_from(["clusters/sim-4xh100", "clusters/vllm-cpu", "profiles/quick"]), data=st.data())
def test_files_of_clusters_and_profiles(name, data):
    good = yaml.safe_load((ROOT / "data" / f"{name}.yaml").read_text())
    model = Profile if name.startswith("profiles") else Cluster
    judged("YAML files", lambda: yamlfile.parse(model, spoiled(data.draw, good), name))


@many
@given(text=st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda t: t.encode("utf-8", "replace"))))
def test_yaml_of_any_bytes(text, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(text)
    judged("YAML bytes", lambda: yamlfile.load(Cluster, path))
    judged("persona bytes", lambda: load_personas(str(path)))


TRACES = {
    "messages.json": [{"messages": [{"role": "user", "content": "hello there"},
                                    {"role": "assistant", "content": "hi"},
                                    {"role": "user", "content": "and now?"}]}],
    "sharegpt.json": [{"id": "a", "conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "x"},
                                                    {"from": "human", "value": "more"}]}],
    "a.traj": {"trajectory": [{"action": "ls", "observation": "a b", "response": "look", "execution_time": 0.2}],
               "history": [{"role": "system", "content": "s"}, {"role": "user", "content": "fix it"},
                           {"role": "assistant", "content": "ls"}, {"role": "user", "content": "a b"}]},
    "mooncake.jsonl": [{"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]},
                       {"timestamp": 900, "input_length": 1536, "output_length": 9, "hash_ids": [1, 2, 3]}],
    "kv.json": {"id": "t", "block_size": 64, "models": ["m"], "requests": [
        {"t": 0.0, "type": "n", "in": 128, "out": 4, "hash_ids": [1, 2], "api_time": 0.5, "think_time": 0.0},
        {"t": 4.0, "type": "n", "in": 192, "out": 4, "hash_ids": [1, 2, 3], "api_time": 0.5, "think_time": 3.0}]},
}


@many
@given(name=st.sampled_from(sorted(TRACES)), data=st.data())
def test_traces_of_conversations(name, data, tmp_path_factory):
    value = spoiled(data.draw, TRACES[name])
    path = tmp_path_factory.getbasetemp() / f"fuzz-{name}"
    lines = isinstance(value, list) and name.endswith("jsonl")
    text = "\n".join(json.dumps(one) for one in value) if lines else json.dumps(value)
    cut = data.draw(st.integers(0, len(text)) if data.draw(st.integers(0, 4)) == 0 else st.just(len(text)))
    path.write_bytes(text[:cut].encode("utf-8", "surrogatepass"))
    judged(f"trace {name}", lambda: import_path(path).to_dict())


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """A small trace as the twin writes it."""
    from spoc_lib.config import load_cluster
    from spoc_lib.engine.embedded import EmbeddedEngine
    from spoc_lib.engine.kerneltrace import write_trace
    from spoc_lib.sweep.drivers import virtual_rung
    from spoc_lib.sweep.record import Timing
    from spoc_lib.workload import build_script

    engine = EmbeddedEngine.from_cluster(load_cluster("sim-2xh200"), {})
    rung = virtual_rung(engine, build_script("tiny", 1, gap_cap_s=2), 4, Timing(3.0, 1.0), 1)
    path = tmp_path_factory.mktemp("kernels") / "trace.sqlite"
    write_trace(path, engine, rung.steps, rung.window[0], rung.window[0] + 0.3)
    return path


@settings(many, max_examples=max(10, CASES // 3))
@given(data=st.data())
def test_traces_of_kernels_with_bytes_turned(kernels, data):
    from spoc_lib.nsight import decompose

    broken = kernels.with_name("broken.sqlite")
    shutil.copy(kernels, broken)
    size = broken.stat().st_size
    with open(broken, "r+b") as file:
        for at in data.draw(st.lists(st.integers(0, min(size, 8192) - 1), min_size=1, max_size=8)):
            file.seek(at)
            file.write(data.draw(st.binary(min_size=1, max_size=4)))
        if data.draw(st.booleans()):
            file.truncate(data.draw(st.integers(0, size)))
    judged("kernel trace", lambda: decompose(broken))


def test_a_sentence_is_kept_short_whatever_was_given():
    with pytest.raises(InputError) as caught:
        yamlfile.parse(Cluster, {"name": "x" * 1_000_000, "title": ["y" * 100_000]}, "big")
    assert len(caught.value.message) < 500


@pytest.mark.parametrize("text, words", [
    ("a: &a [x, x]\n" + "\n".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]" for a, b in zip("abcdefghi", "bcdefghij",
                                                                                           strict=True)), "too large"),
    ("a: &a [*a]\n", "too large"),
    ("x: [" + "[" * 5000 + "]" * 5000 + "]", "YAML"),
    ("title: 2026-02-31", "YAML"),
    ("x" * 20_000_001, "too large"),
], ids=["billion laughs", "holds itself", "deep", "no such day", "long"])  # fmt: skip
def test_small_files_that_mean_too_much_are_refused_at_once(text, words, tmp_path):
    (tmp_path / "bomb.yaml").write_text(text)
    began = time.process_time()
    with pytest.raises(InputError, match=words):
        yamlfile.load(Cluster, tmp_path / "bomb.yaml")
    assert time.process_time() - began < 20


def test_traces_larger_than_memory_would_hold_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("spoc_lib.workload.traces.importers.LARGEST_BYTES", 300)
    (tmp_path / "one.json").write_text(json.dumps(TRACES["messages.json"] * 9))
    (tmp_path / "two.jsonl").write_text(json.dumps(TRACES["mooncake.jsonl"][0] | {"x": "y" * 400}) + "\n")
    for name, words in (("one.json", "larger than 300 bytes"), ("two.jsonl", "line 1 is longer than 300 bytes")):
        with pytest.raises(InputError, match=words):
            import_path(tmp_path / name)
