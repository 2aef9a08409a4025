"""Airflow: one task a notebook and cluster by the Papermill operator, then the report over all clusters.

Needs `apache-airflow-providers-papermill` beside this project in the workers' environment. Set the variables below, and
put the file into the DAGs' folder. A task that fails stops its own cluster only; the report waits until all are there:
clear the failed task to try again, or compare those that finished with `spoc report RUN RUN`.
"""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from pathlib import Path

from airflow import DAG
from airflow.providers.papermill.operators.papermill import PapermillOperator

PROJECT = Path(os.environ.get("SPOC_PROJECT", "/opt/spoc"))
OUTPUTS = os.environ.get("SPOC_OUTPUTS", str(PROJECT / "outputs"))
#: Where the executed notebooks go: a folder or any address that papermill writes to (s3://bucket/prefix, …).
EXECUTED = os.environ.get("SPOC_EXECUTED", f"{OUTPUTS}/executed")
PROFILE = os.environ.get("SPOC_PROFILE", "standard")
CLUSTERS = os.environ.get("SPOC_CLUSTERS", "sim-4xh100,sim-2xh200").split(",")
NOTEBOOKS = ("01_workload_modeling", "02_nsga2_search", "03_concurrency_sweep", "04_nsight_trace_analysis")
STAMP = "{{ ts_nodash }}"


def notebook(task_id: str, name: str, parameters: dict[str, str], **more: object) -> PapermillOperator:
    """One notebook, executed into `EXECUTED`, its parameters typed as the notebook wants them: all text here."""
    return PapermillOperator(
        task_id=task_id,
        input_nb=str(PROJECT / "notebooks" / f"{name}.ipynb"),
        output_nb=f"{EXECUTED}/{task_id}-{STAMP}.ipynb",
        parameters=parameters,
        kernel_name="python3",
        language_name="python",
        **more,
    )


with DAG(
    dag_id="spoc",
    description="How many users can these clusters hold under their SLAs?",
    start_date=datetime(2026, 1, 1),
    schedule=None,
    catchup=False,
    default_args={"retries": 1, "retry_delay": timedelta(minutes=5), "execution_timeout": timedelta(hours=4)},
) as dag:
    runs = [f"{OUTPUTS}/{Path(cluster).stem}-{STAMP}" for cluster in CLUSTERS]
    report = notebook(
        "report",
        "05_capacity_report",
        {"cluster": CLUSTERS[0], "profile": PROFILE, "runs": ",".join(runs), "run_dir": f"{OUTPUTS}/report-{STAMP}"},
    )
    for cluster, run in zip(CLUSTERS, runs, strict=True):
        before = None
        for name in NOTEBOOKS:
            task = notebook(
                f"{Path(cluster).stem}-{name[:2]}", name, {"cluster": cluster, "profile": PROFILE, "run_dir": run}
            )
            if before is not None:
                before >> task
            before = task
        before >> report
