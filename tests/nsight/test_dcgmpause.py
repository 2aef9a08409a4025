"""DCGM's profiling counters paused around a capture; a script called dcgmi stands for NVIDIA's."""

from __future__ import annotations

import pytest

from spoc_lib.nsight.dcgmpause import paused


@pytest.fixture
def dcgmi(tmp_path, monkeypatch):
    """`dcgmi("exit 1")`: a dcgmi on the PATH that writes down how it was called, then does this; its calls."""
    calls = tmp_path / "calls"

    def install(then: str = "exit 0"):
        program = tmp_path / "dcgmi"
        program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{then}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return lambda: calls.read_text().splitlines()

    return install


def test_the_counters_are_paused_and_resumed_however_the_block_ends(dcgmi):
    calls = dcgmi()
    with pytest.raises(RuntimeError), paused(recorded=True) as pause:
        assert calls() == ["profile --pause"] and pause.end_s is None
        raise RuntimeError("the load broke")
    assert calls() == ["profile --pause", "profile --resume"]
    assert pause.end_s >= pause.start_s and "the gap is left open" in pause.sentence


def test_a_run_without_dcgm_pauses_nothing(dcgmi, tmp_path):
    dcgmi()
    with paused(recorded=False) as pause:
        assert "none were paused" in pause.sentence
    assert pause.start_s is None and not (tmp_path / "calls").exists()


def test_what_dcgmi_refuses_is_said_and_leaves_no_gap(dcgmi):
    calls = dcgmi("echo 'Error: unable to connect to host engine' >&2; exit 255")
    with paused(recorded=True) as pause:
        pass
    assert calls() == ["profile --pause"] and pause.start_s is None
    assert "not paused (Error: unable to connect to host engine)" in pause.sentence


def test_counters_that_do_not_resume_are_said(dcgmi):
    dcgmi('test "$2" = --pause')
    with paused(recorded=True) as pause:
        pass
    assert pause.end_s is not None and pause.sentence.endswith("did not resume (no reason given): dcgmi profile "
                                                               "--resume.")


def test_a_machine_without_dcgmi_is_said(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with paused(recorded=True) as pause:
        pass
    assert "dcgmi is not on this machine" in pause.sentence
