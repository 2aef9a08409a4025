"""The files for schedulers, run here by what stands in for the scheduler: bash with Slurm's variables, the shell loop
as it is, the DAG by a plain runner, the Jobs' own commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import typer
import yaml

from spoc_lib.cli.app import app
from spoc_lib.config import load_cluster

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "docs" / "schedulers"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TINY = {
    "name": "tiny", "title": "as little as shows everything", "audit_users": 10, "audit_turns": 4,
    "search_trials": 6, "search_population": 4, "search_finalists": 1, "screen_s": 20, "rung_s": 40, "warmup_s": 10,
    "http_rung_s": 6, "http_users": 6, "probes": 5, "trace_s": 0.2, "gap_cap_s": 2, "start": "stationary",
}  # fmt: skip


@pytest.fixture
def place(tmp_path):
    """A small cluster, a tiny profile, and the names with which the shipped files start them."""
    cluster = yaml.safe_load((ROOT / "data/clusters/sim-2xh200.yaml").read_text())
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(cluster | {"name": "small", "personas": "tiny",
                                                               "search": {"target_users": 5}}))
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    return tmp_path


def run(place: Path, *command: str, **more: str) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(command, cwd=place, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
                          env={**os.environ, "PATH": path, "SPOC_OUTPUTS": str(place / "outputs"),
                               "PROFILE": str(place / "tiny.yaml"), **more})


def test_slurm_runs_one_cluster_a_task_and_again_goes_on(place):
    (place / "clusters.txt").write_text("nowhere\nsmall.yaml\n")
    slurm = {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "1", "NOTEBOOKS": "04"}
    done = run(place, "bash", str(FILES / "slurm.sh"), "clusters.txt", **slurm)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((place / "outputs/small-77/run.json").read_text())["stages"]["04"]["state"] == "done"
    assert "kept" in run(place, "bash", str(FILES / "slurm.sh"), "clusters.txt", **slurm).stdout
    wrong = run(place, "bash", str(FILES / "slurm.sh"), "clusters.txt", **slurm | {"SLURM_ARRAY_TASK_ID": "5"})
    assert wrong.returncode == 2 and "mend --array" in wrong.stderr


class Store(ThreadingHTTPServer):
    """As much of a store behind http:// as papermill speaks with: PUT keeps, GET gives."""

    def __init__(self) -> None:
        kept = self.kept = {}

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                kept[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)


def test_papermill_alone_from_a_loop_writes_into_a_store_and_one_cluster_stops_no_other(place):
    store = Store()
    threading.Thread(target=store.serve_forever, daemon=True).start()
    (place / "again").mkdir()
    (place / "again" / "small.yaml").write_text((place / "small.yaml").read_text())
    done = run(place, "bash", str(FILES / "loop.sh"), "nowhere", "small.yaml", "again/small.yaml",
               NOTEBOOKS="04_nsight_trace_analysis", DEST=f"http://127.0.0.1:{store.server_port}/night")
    store.shutdown()
    assert done.returncode == 1 and "nowhere: 04_nsight_trace_analysis failed" in done.stderr, done.stderr
    folder, other = sorted((place / "outputs").glob("small-*"))  # two files of one name, two runs
    assert other.name == f"{folder.name}-2" and (folder / "nsight" / "result.json").exists()
    assert json.loads((folder / "run.json").read_text())["stages"]["04"]["state"] == "done"
    written = json.loads(store.kept[f"/night/{folder.name}.04_nsight_trace_analysis.ipynb"])
    assert written["metadata"]["papermill"]["exception"] is None and written["cells"][-1]["execution_count"]


def test_s3_through_papermills_own_handler(place, tmp_path):
    boto3 = pytest.importorskip("boto3", reason="papermill's S3 handler needs boto3 (papermill[s3])")
    server = pytest.importorskip("moto.server", reason="moto, which speaks S3's protocol, is not installed")
    stand_in = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    stand_in.start()
    host, port = stand_in.get_host_and_port()
    address = f"http://{host}:{port}"
    keys = {"AWS_ACCESS_KEY_ID": "made-up", "AWS_SECRET_ACCESS_KEY": "sk-never-to-be-seen",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": address, "BOTO3_ENDPOINT_URL": address}
    client = boto3.client("s3", endpoint_url=address, aws_access_key_id="made-up", aws_secret_access_key="x",
                          region_name="us-east-1")
    client.create_bucket(Bucket="nights")
    done = run(place, "bash", str(FILES / "loop.sh"), "small.yaml", NOTEBOOKS="04_nsight_trace_analysis",
               DEST="s3://nights/one", **keys)
    assert done.returncode == 0, done.stderr
    (name,) = [one["Key"] for one in client.list_objects_v2(Bucket="nights")["Contents"]]
    body = client.get_object(Bucket="nights", Key=name)["Body"].read()
    stand_in.stop()
    assert json.loads(body)["metadata"]["papermill"]["exception"] is None and b"sk-never" not in body


def jobs() -> list[dict]:
    return [one for one in yaml.safe_load_all((FILES / "kubernetes.yaml").read_text()) if one["kind"] == "Job"]


def test_each_kubernetes_job_is_sound_and_its_command_is_ours():
    claims = {one["metadata"]["name"] for one in yaml.safe_load_all((FILES / "kubernetes.yaml").read_text())
              if one["kind"] == "PersistentVolumeClaim"}
    cli = typer.main.get_command(app)
    for job in jobs():
        assert job["apiVersion"] == "batch/v1"
        pod = job["spec"]["template"]["spec"]
        assert pod["restartPolicy"] == "Never"
        assert {one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"]} <= claims
        (container,) = pod["containers"]
        assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}
        program, *words = container["command"]
        assert program == "spoc" and all(isinstance(word, str) for word in words)
        with cli.make_context("spoc", list(words)) as context:
            name, command, rest = cli.resolve_command(context, list(words))
            command.make_context(name, rest, parent=context)
        if name == "run":
            load_cluster(words[1])
        keys = [one for one in container["env"] if "KEY" in one["name"]]
        assert all("value" not in one for one in keys), "a key comes from a Secret"


RUNNER = '''
import importlib.util, json, sys, types

class DAG:
    tasks = []
    def __init__(self, **about): self.about = about
    def __enter__(self): return self
    def __exit__(self, *_): pass

class PapermillOperator:
    template_fields = ("input_nb", "output_nb", "parameters", "kernel_name", "language_name")
    def __init__(self, *, task_id, input_nb, output_nb, parameters, kernel_name, language_name):
        self.task_id, self.input_nb, self.output_nb = task_id, input_nb, output_nb
        self.parameters, self.after = parameters, []
        DAG.tasks.append(self)
    def __rshift__(self, other):
        other.after.append(self.task_id)
        return other

for name in ("airflow", "airflow.providers", "airflow.providers.papermill", "airflow.providers.papermill.operators",
             "airflow.providers.papermill.operators.papermill"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["airflow"].DAG = DAG
sys.modules["airflow.providers.papermill.operators.papermill"].PapermillOperator = PapermillOperator
spec = importlib.util.spec_from_file_location("dag", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(json.dumps([vars(task) for task in DAG.tasks]))
'''


def dag(place: Path) -> list[dict]:
    """The DAG's tasks as a plain runner sees them."""
    (place / "runner.py").write_text(RUNNER)
    done = run(place, sys.executable, "runner.py", str(FILES / "airflow_dag.py"), SPOC_PROJECT=str(ROOT),
               SPOC_CLUSTERS="small.yaml,other.yaml", SPOC_PROFILE=str(place / "tiny.yaml"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_dag_runs_four_notebooks_a_cluster_in_order_and_then_the_report(place):
    from spoc_lib.pipeline.parameters import check

    tasks = {task["task_id"]: task for task in dag(place)}
    assert set(tasks) == {f"{name}-{n}" for name in ("small", "other") for n in ("01", "02", "03", "04")} | {"report"}
    assert tasks["small-03"]["after"] == ["small-02"] and set(tasks["report"]["after"]) == {"small-04", "other-04"}
    for name, task in tasks.items():
        assert Path(task["input_nb"]).is_file() and "{{ ts_nodash }}" in task["output_nb"]
        check("05" if name == "report" else name[-2:], task["parameters"])
    assert tasks["small-01"]["parameters"]["run_dir"] == tasks["small-04"]["parameters"]["run_dir"]
