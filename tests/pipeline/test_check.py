"""`spoc check`: what stops a run and what it will have to do without, said before anything starts."""

from __future__ import annotations

import json
import socket

import pytest
import yaml

from spoc_lib.cli import main
from spoc_lib.config import data_dir, load_cluster
from spoc_lib.servers import launch


@pytest.fixture
def checked(tmp_path, capsys, monkeypatch):
    """(exit status, findings by subject) of `spoc check` on a shipped cluster with some fields changed."""

    def check(name: str = "sim-4xh100", **changed) -> tuple[int, dict[str, dict]]:
        facts = yaml.safe_load((data_dir() / "clusters" / f"{name}.yaml").read_text()) | changed
        path = tmp_path / "cluster.yaml"
        path.write_text(yaml.safe_dump(facts))
        monkeypatch.setattr("sys.argv", ["spoc", "check", str(path), "--json", "-"])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, {one["subject"]: one for one in json.loads(capsys.readouterr().out)["findings"]}

    return check


def test_a_cluster_that_ships_can_run(checked):
    status, found = checked()
    assert status == 0 and not any(one["severity"] == "stops" for one in found.values())
    assert "KV blocks" in found["engine (embedded)"]["sentence"]
    assert found["workload"]["ok"] and found["telemetry"]["ok"] and found["nsight"]["ok"]


@pytest.mark.parametrize(("changed", "subject", "said"), [
    ({"flags": {"gpu_memory_utilization": 0.1}}, "engine (embedded)", "memory"),
    ({"search": {"target_users": 10, "space": {"no_such_flag": [1, 2]}}}, "flags", "no_such_flag"),
    ({"personas": "nobody"}, "workload", "nobody"),
    ({"engine": {"kind": "process", "command": ["/no/such/vllm", "serve"]}}, "engine (process)", "/no/such/vllm"),
    ({"engine": {"kind": "container", "image": "vllm/vllm-openai"}}, "engine (container)", "docker"),
    ({"engine": {"kind": "remote", "base_url": "http://127.0.0.1:9", "api_key_env": "SPOC_NO_SUCH_KEY"}},
     "engine (remote)", "127.0.0.1:9"),
])
def test_what_stops_a_run_is_named(checked, monkeypatch, tmp_path, changed, subject, said):
    monkeypatch.setenv("PATH", str(tmp_path))
    status, found = checked(**changed)
    assert status == 1 and found[subject]["severity"] == "stops" and said in found[subject]["sentence"]


def test_what_a_real_cluster_will_lack_costs_but_does_not_stop(checked, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n")
    with socket.create_server(("127.0.0.1", 0)) as held:
        free = held.getsockname()[1]
    status, found = checked(engine={"kind": "process", "command": [str(program)]},
                            telemetry={"dcgm_url": f"http://127.0.0.1:{free}/metrics"})
    assert status == 0 and str(program) in found["engine (process)"]["sentence"]
    lacks = [one for one in found.values() if not one["ok"]]
    assert {one["severity"] for one in lacks} == {"costs"}
    assert "nsys is not installed" in found["nsight"]["sentence"] and any("DCGM" in one["subject"] for one in lacks)


def test_a_server_that_answers_is_identified(checked, tmp_path):
    with launch(load_cluster("sim-4xh100"), {}, tmp_path / "engine") as server:
        status, found = checked(engine={"kind": "remote", "base_url": server.base_url,
                                        "api_key_env": "SPOC_NO_SUCH_KEY"})
    assert "gpt-oss-120b" in found["engine (remote)"]["sentence"]
    assert status == 1 and "SPOC_NO_SUCH_KEY holds no API key" in found["API key"]["sentence"]
