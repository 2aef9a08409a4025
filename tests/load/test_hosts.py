"""Three hosts: the master with the server, and two workers in network namespaces of their own. One cable is cut."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest

from spoc_lib.load import FixedTurns, LoadPlan, run
from spoc_lib.load.clientcheck import paced_server

pytestmark = [pytest.mark.slow, pytest.mark.alone]
#: RFC 2544 keeps these addresses for benchmarks of networks.
HOST = "198.18.{}.1"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def hosts():
    """Two namespaces, each with a cable to this host; yields (namespace, our end of its cable) of both."""
    if shutil.which("ip") is None:
        pytest.skip("no network namespaces here: the command 'ip' is not installed")
    made = [(f"spoc-{os.getpid()}-{k}", f"spoc{os.getpid() % 100_000}{k}", k + 1) for k in range(2)]
    try:
        try:
            for name, cable, k in made:
                ip("netns", "add", name)
                ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("addr", "add", HOST.format(k) + "/24", "dev", cable)
                ip("link", "set", cable, "up")
                for words in (("addr", "add", f"198.18.{k}.2/24", "dev", "eth0"), ("link", "set", "eth0", "up"),
                              ("route", "add", "default", "via", HOST.format(k))):
                    ip("-n", name, *words)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        yield [(name, cable) for name, cable, _ in made]
    finally:
        for name, _, _ in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)  # its cable goes with it


def test_a_host_whose_cable_is_cut_is_lost_and_the_other_goes_on(tmp_path, hosts):
    address = HOST.format(1)
    with socket.create_server((address, 0)) as listener:
        port = listener.getsockname()[1]
    workers = [subprocess.Popen(["ip", "netns", "exec", name, sys.executable, "-m", "spoc_lib.load.worker", address,
                                 str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for name, _ in hosts]

    def cut() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:  # until the master has heard of requests of both
            heard = [path for path in tmp_path.glob("client-*/planned.jsonl") if path.stat().st_size]
            if len(heard) == 2:
                break
            time.sleep(0.05)
        ip("link", "set", hosts[1][1], "down")

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        with paced_server(0.05, 0.05, log=False, host=address) as url:
            plan = LoadPlan(base_url=url, model="paced", users=4, duration_s=8.0, processes=2, stop_timeout_s=5,
                            master=f"{address}:{port}", fixed=FixedTurns(output_tokens=60))
            result = run(plan, tmp_path)
    finally:
        cutter.join()
        for worker in workers:
            worker.kill()
            worker.wait()
    summary, requests = result.summary, result.requests
    assert summary["planned"] == summary["completed"] + summary["failed"] + summary["censored"] == len(requests)
    assert requests["request"].is_unique and sorted(requests["user"].unique()) == [0, 1, 2, 3]
    assert summary["lost_clients"] == 1 and not summary["valid"]
    lost = requests[requests["error_class"] == "client_lost"]
    assert len(lost) == 2 and lost["user"].nunique() == 2
    others = requests[~requests["user"].isin(lost["user"])]
    assert (others["outcome"] == "completed").all()  # none was lost on the way either
    assert others["end_s"].max() - lost["send_s"].max() > 2  # they went on after the cable was cut
    chunks = result.chunks[result.chunks["request"].isin(others["request"])]
    assert (chunks.groupby("request")["tokens"].sum() == 60).all()
    assert [abs(worker["clock_offset_s"]) < 0.05 for worker in summary["workers"]] == [True]  # of the one that answered
