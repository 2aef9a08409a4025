"""The run itself stopped: kill -9 at every stage, Ctrl-C, a scheduler's SIGTERM, a dead kernel. What is finished is
kept, nothing lives on, no file is halved, and the run that goes on comes to the answer of an undisturbed one."""

from __future__ import annotations

import os
import signal
import time

import pytest

from spoc_lib.pipeline.parameters import STAGES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def stop(place, process, how: str) -> str:
    """End a run as `how` says; what it said on standard error."""
    if how == "kill -9 of the kernel":
        os.kill(place.find("ipykernel_launcher"), signal.SIGKILL)
    elif how == "kill -9":
        process.kill()
    else:
        os.kill(process.pid, {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM}[how])
    _, said = process.communicate(timeout=200)
    return said


@pytest.mark.parametrize("how", [
    "kill -9", "SIGTERM", pytest.param("Ctrl-C", marks=pytest.mark.chaos),
    pytest.param("kill -9 of the kernel", marks=pytest.mark.chaos)])  # fmt: skip
def test_a_stopped_run_keeps_what_is_done_and_goes_on(place, how):
    process = place.start("run", "small.yaml", "--profile", "tiny.yaml", "--run-id", "r", "--only", "02,04",
                          "--seed", "3", "--set", "confirm_http=false", "--set", "users=5")
    assert place.wait(lambda: place.stage("r", "04") == "running", 900) and place.stage("r", "02") == "done"
    time.sleep(1)
    said = stop(place, process, how)
    assert process.returncode != 0 and "Traceback" not in said, said
    place.no_orphans(90)
    if how != "kill -9":
        place.whole()
        assert place.stage("r", "04") == ("failed" if how.endswith("kernel") else "interrupted")
    result = place.outputs / "r" / "search" / "result.json"
    kept = result.stat().st_mtime_ns
    done = place.spoc("run", "small.yaml", "--run-id", "r", "--resume", "--only", "02,04")
    assert "02 NSGA-II search: done already, kept" in done.stdout
    assert place.stage("r", "04") == "done" and result.stat().st_mtime_ns == kept
    parameters = place.state("r")["stages"]["04"]["parameters"]
    assert (parameters["seed"], parameters["users"]) == (3, 5), "what the run was told must hold"
    place.whole()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The capacity that the small cluster comes to when nothing happens."""
    from importlib.util import module_from_spec, spec_from_file_location
    from pathlib import Path

    spec = spec_from_file_location("chaos_conftest", Path(__file__).with_name("conftest.py"))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    place = module.Place(tmp_path_factory.mktemp("undisturbed"))
    place.run("r", "--only", "02,03")
    return place.answer("r")


@pytest.mark.chaos
@pytest.mark.parametrize("late_s", [0.3, 4.0])
@pytest.mark.parametrize("number", STAGES)
def test_kill_9_at_every_stage_changes_no_answer(place, undisturbed, number, late_s):
    process = place.start("run", "small.yaml", "--profile", "tiny.yaml", "--run-id", "r")
    assert place.wait(lambda: place.stage("r", number) in ("running", "done"), 300)
    time.sleep(late_s)
    process.kill()
    process.communicate(timeout=60)
    place.no_orphans(90)
    done = place.spoc("run", "small.yaml", "--run-id", "r", "--resume", timeout=400)
    before = [n for n in STAGES if n < number]
    assert all(f"{n} {STAGES[n].title}: done already, kept" in done.stdout for n in before)
    assert {place.stage("r", n) for n in STAGES} == {"done"}
    assert all((place.outputs / "r" / f"{stage.notebook}.html").exists() for stage in STAGES.values())
    place.whole()
    for name in ("max_users", "interval", "binding", "flags"):
        assert place.answer("r")[name] == undisturbed[name], name
    assert "r" in (place.outputs / "index.html").read_text()


@pytest.mark.chaos
def test_kill_9_of_a_batch_takes_its_runs_along_and_the_batch_goes_on(place):
    place.cluster("other")
    process = place.start("batch", "small.yaml", "other.yaml", "--profile", "tiny.yaml", "--jobs", "2", "--run-id", "b")
    assert place.wait(lambda: sum("ipykernel_launcher" in one for one in place.processes().values()) == 2, 400)
    process.kill()
    process.communicate(timeout=60)
    place.no_orphans(90)
    place.whole()
    process = place.start("batch", "--resume", "--run-id", "b")
    assert place.wait(lambda: place.stage("small-b", "02"), 600), "01 is done to its last cell, and 02 begins"
    process.send_signal(signal.SIGTERM)
    out, said = process.communicate(timeout=200)
    assert process.returncode != 0 and "Traceback" not in said, said
    assert "go on with: spoc batch --resume --run-id b" in out
    place.no_orphans(90)
    assert place.stage("small-b", "01") == "done" and place.stage("other-b", "03") == ""
