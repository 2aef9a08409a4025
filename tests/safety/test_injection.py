"""Hostile values through every parameter that reaches a command line: they arrive as they are, as one word, and nothing
in them is carried out."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from spoc_lib.config import Cluster, load_cluster, read_flags
from spoc_lib.core.errors import InputError, SpocError
from spoc_lib.pipeline.execute import choose_stages, run_cluster
from spoc_lib.pipeline.parameters import split_settings
from spoc_lib.pipeline.runs import Run
from spoc_lib.servers import LaunchFailure, launch, shell_command
from spoc_lib.servers.commands import prepare
from spoc_lib.servers.process import GuardedProcess
from spoc_lib.workload.corpus import Corpus
from spoc_lib.workload.personas import load_personas

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = ["; touch pwned", "$(touch pwned)", "`touch pwned`", "| touch pwned", "&& touch pwned", "a\ntouch pwned",
           "x'; touch pwned; '", 'x"; touch pwned; "', "> pwned", "--help", "-v/:/host", "../../pwned", "~root",
           "{project}", "%s%n", "\u202epwned", "a b"]
KINDS = {"process": {"command": ["vllm", "serve"]}, "container": {"image": "vllm/vllm-openai:v1"}, "embedded": {}}


def cluster(kind: str, **changes) -> Cluster:
    engine = {"kind": kind, **KINDS[kind], **changes.pop("engine", {})}
    return Cluster.model_validate({
        "name": "here", "title": "t", "hardware": {"gpu": "h100-sxm", "count": 1}, "engine": engine,
        "model": "gpt-oss-120b", "ladder": {"users": [1]}, "slos": [{"metric": "ttft", "limit_s": 1.0}], **changes})


@pytest.fixture(autouse=True)
def nothing_is_carried_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPOC_OUTPUTS", str(tmp_path / "outputs"))
    yield
    assert not [path for path in [tmp_path, *tmp_path.parents[:2]] if (path / "pwned").exists()]
    assert not (ROOT / "pwned").exists() and not (ROOT / "notebooks" / "pwned").exists()


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("kind", KINDS)
def test_the_value_of_a_flag_stays_one_word(kind, value, tmp_path):
    words = prepare(cluster(kind), {"attention_backend": value}, 8000, tmp_path).arguments
    at = next(i for i, word in enumerate(words) if word.startswith("--attention-backend"))
    assert words[at] == f"--attention-backend={value}" or words[at + 1] == value
    if value.startswith("-"):
        assert value not in words, "it would be read as an option of its own"
    line = shell_command(cluster(kind), {"attention_backend": value})
    assert shlex.join(shlex.split(line)) == line and len(shlex.split(line)) <= 6


@pytest.mark.parametrize("value", [value for value in HOSTILE if value != "--help"])
def test_the_name_of_a_flag_is_a_name(value, tmp_path):
    with pytest.raises(InputError, match="flag"):
        prepare(cluster("process"), {value: 1}, 8000, tmp_path)
    with pytest.raises(InputError, match="flag"):
        shell_command(cluster("embedded"), {value: 1})


@pytest.mark.parametrize("value", HOSTILE)
def test_image_model_and_environment_are_refused_or_one_word(value, tmp_path):
    for engine in ({"image": value}, {"served_model": value}, {"environment": {value: "1"}}):
        try:
            words = prepare(cluster("container", engine=engine), {}, 8000, tmp_path).arguments
        except (InputError, ValueError):
            continue
        assert value in words and not value.startswith("-")
    words = prepare(cluster("container", engine={"environment": {"TOKEN": value}}), {}, 8000, tmp_path)
    assert value not in words.arguments or value in ("a b",), "values go by the environment, not the command line"
    assert words.environment["TOKEN"] == value


@pytest.mark.parametrize("value", HOSTILE)
def test_a_program_gets_its_words_as_they_were_written(value, tmp_path):
    """Through the guard and all: the engine's command is words, never a line for a shell."""
    wrote = tmp_path / "argv.json"
    echo = f"import json, sys; json.dump(sys.argv[1:], open({str(wrote)!r}, 'w'))"
    process = GuardedProcess([sys.executable, "-c", echo, value], tmp_path / "log",
                             cleanup=[[sys.executable, "-c", "pass", value]])
    process._guard.wait(20)
    process.stop()
    assert json.loads(wrote.read_text()) == [value]


@pytest.mark.parametrize("value", HOSTILE)
def test_names_and_paths_of_a_run_are_refused_before_anything_starts(value, tmp_path):
    given = {"cluster_name": "sim-4xh100", "stages": ["01"], "settings": {}, "say": print}
    for changed in ({"cluster_name": value}, {"profile": value}):
        with pytest.raises(InputError):
            run_cluster(**given | changed)
    if value not in ("pwned",):
        with pytest.raises(InputError, match="run id"):
            Run.create("c", value)
    with pytest.raises(InputError):
        choose_stages(value)
    with pytest.raises(InputError):
        Run.open(value)
    with pytest.raises(InputError):
        split_settings([f"{value}=1"], ["01", "02", "03", "04", "05"])
    assert split_settings([f"flags={value}"], ["03"]) == {"03": {"flags": value}}


@pytest.mark.parametrize("value", HOSTILE)
def test_a_cluster_file_of_hostile_words_starts_nothing(value, tmp_path):
    spec = yaml.safe_load((ROOT / "data/clusters/sim-4xh100.yaml").read_text())
    for change in ({"name": value}, {"model": value}, {"hardware": {"gpu": value, "count": 1}},
                   {"engine": {"kind": "remote", "base_url": value}},
                   {"engine": {"kind": "process", "command": [value]}}):
        path = tmp_path / "hostile.yaml"
        path.write_text(yaml.safe_dump(spec | change))
        with pytest.raises((SpocError, LaunchFailure)), launch(load_cluster(str(path)), {}, tmp_path / "launch"):
            pass
    for read in (load_personas, Corpus.from_directory):
        with pytest.raises(InputError):
            read(value)


@pytest.mark.parametrize("text", HOSTILE)
def test_flags_given_as_text_are_values_or_a_sentence(text):
    try:
        flags = read_flags(text)
    except InputError as error:
        assert "flags" in error.message
    else:
        assert all(isinstance(value, (bool, int, float, str, type(None))) for value in flags.values())


def test_the_command_line_itself_carries_nothing_out(tmp_path):
    """As a user would be tricked into it; in one process above, with the others."""
    for words in (["run", "; touch pwned"], ["run", "sim-4xh100", "--run-id", "../../pwned"]):
        done = subprocess.run([sys.executable, "-m", "spoc_lib", *words], capture_output=True, text=True,
                              env={**os.environ, "SPOC_OUTPUTS": str(tmp_path / "o")}, check=False)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
