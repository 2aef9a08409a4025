"""`spoc engine accuracy` and `spoc engine calibrate`: the step time held to measurement, and made from it."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated, Any

import typer

from spoc_lib.cli.output import JsonOption, emit


def register(app: typer.Typer) -> None:
    """Add the commands to `spoc engine`."""
    app.command()(accuracy)
    app.command()(calibrate)


def accuracy(
    points: Annotated[str, typer.Argument(help="serving points: a CSV with the columns system, isl, osl, tp_size, "
                                               "conc, ttft_ms_mean, tpot_ms and optionally backend_version")],
    model: Annotated[str, typer.Option(help="model name or YAML file")] = "gpt-oss-120b",
    calibration: Annotated[str | None, typer.Option(help="calibration file instead of the shipped one")] = None,
    exact: Annotated[bool, typer.Option(help="every point on the plain core, step by step: minutes, same numbers")
                     ] = False,
    json: JsonOption = None,
) -> None:
    """Run measured serving points through the twin as they were measured; errors of TPOT and TTFT.

    Example: spoc engine accuracy serving_points.csv --json -
    """
    from spoc_lib.engine.steptime.accuracy import accuracy as run

    result = run(points, model, calibration, exact)
    emit(result.to_dict(), json, "" if json == "-" else result.text())


def calibrate(
    out: Annotated[str, typer.Option(help="calibration file to write (YAML)")],
    model: Annotated[str, typer.Option(help="model name or YAML file")] = "gpt-oss-120b",
    points: Annotated[str | None, typer.Option(help="serving points (CSV, as for accuracy)")] = None,
    requests: Annotated[str | None, typer.Option(help="a real run's requests.parquet; with --metrics, --gpu, --gpus")
                        ] = None,
    metrics: Annotated[str | None, typer.Option(help="the same run's metrics.parquet")] = None,
    nsight: Annotated[str | None, typer.Option(help="a kernel trace whose NVTX ranges tell the steps' batches; with "
                                                    "--gpu")] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU of that run: a name in data/gpus or a YAML file")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of that run")] = 1,
    batched_tokens: Annotated[int, typer.Option(min=1, help="max_num_batched_tokens of that run")] = 8192,
    start: Annotated[str | None, typer.Option(help="calibration to start from instead of the roofline")] = None,
    title: Annotated[str, typer.Option(help="title that goes into the file")] = "",
    source: Annotated[list[str] | None, typer.Option(help="sentence of provenance; repeatable")] = None,
    cross_validate: Annotated[bool, typer.Option(help="held-out errors, about five more fits")] = True,
    json: JsonOption = None,
) -> None:
    """Fit the step-time model to measurement and write a calibration file with its range and its errors.

    Example: spoc engine calibrate --points serving_points.csv --out my.steptime.yaml
    """
    from spoc_lib.core.errors import InputError
    from spoc_lib.engine.steptime import calibration_file
    from spoc_lib.engine.steptime.calibrate import calibrate as fit
    from spoc_lib.engine.steptime.calibrate import calibrate_run

    common: dict[str, Any] = {
        "start_path": start, "title": title, "sources": source or [],
        "command": " ".join(["spoc", *map(shlex.quote, sys.argv[1:])]),
        "progress": lambda line: print(line, file=sys.stderr),
    }
    if nsight:
        result = _from_trace(nsight, model, gpu, bool(points or requests or metrics), common)
    elif requests or metrics:
        if points or not (requests and metrics and gpu):
            raise InputError("bad-source", "a real run needs --requests, --metrics and --gpu together, and no --points")
        result = calibrate_run(model, requests, metrics, gpu_name=gpu, gpu_count=gpus, batched_tokens=batched_tokens,
                               **common)
    elif points:
        result = fit(model, points_path=points, cross_validate=cross_validate, **common)
    else:
        raise InputError("no-source", "nothing to calibrate from: give --points, --requests with "
                         "--metrics, or --nsight")
    path = calibration_file.save(out, result)
    lines = [f"{path}: calibration {result.id} of {result.model}"]
    for name, pair in (result.errors.model_dump() if result.errors else {}).items():
        if pair:
            lines.append(f"{name.replace('_', ' ')}: TPOT {pair['tpot_percent']} %, TTFT {pair['ttft_percent']} % over "
                         f"{pair['points']} points")
    emit({"file": str(path), "calibration_id": result.id, **result.model_dump()}, json, "\n".join(lines))


def _from_trace(trace: str, model: str, gpu: str | None, others: bool, common: dict):
    """A calibration from a decomposed kernel trace."""
    from spoc_lib.config import load_gpu, load_model
    from spoc_lib.core.errors import InputError
    from spoc_lib.engine.steptime.calibrate_steps import calibrate_steps
    from spoc_lib.nsight import decompose, measured_steps
    from spoc_lib.nsight.identity import require_same

    if others or not gpu:
        raise InputError("bad-source", "a kernel trace needs --nsight and --gpu together, and none of --points, "
                         "--requests and --metrics")
    found = decompose(trace)
    untold = require_same(found, load_model(model), load_gpu(gpu), len(found.totals()))
    kind = "simulated kernel trace" if found.simulated else "kernel trace"
    said = [*common["sources"], f"{kind} {found.path.rpartition('/')[2]}, {found.window_s:.3g} s", *untold]
    return calibrate_steps(model, measured_steps(found, load_model(model)), gpu_name=gpu, gpu_count=len(found.totals()),
                           **{**common, "sources": said})
