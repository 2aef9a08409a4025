"""`spoc nsight`: how to capture a kernel trace, and what it says."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

from spoc_lib.cli.output import JsonOption, emit
from spoc_lib.core.errors import InputError

if TYPE_CHECKING:
    from spoc_lib.nsight.attach import Inside

app = typer.Typer(no_args_is_help=True, help="Inside the GPU: capture, decompose and compare kernel traces.",
                  rich_markup_mode=None)

Trace = Annotated[list[str], typer.Argument(
    help="a .sqlite, a parquetdir or a .nsys-rep of Nsight Systems; several that ran together, or their folder")]
Rules = Annotated[str | None, typer.Option(
    "--rules", help="YAML file of category rules, tried before the shipped ones")]


def _window(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        start, end = (float(part) for part in text.split(":"))
    except ValueError as error:
        raise InputError("bad-window", f"--window {text!r}: give START:END in seconds on the trace's clock, "
                         f"for example 60.12:60.30") from error
    return start, end


@app.command()
def decompose(
    trace: Trace,
    window: Annotated[str | None, typer.Option("--window", help="START:END in seconds on the trace's clock")] = None,
    nvtx_range: Annotated[str | None, typer.Option(
        "--range", help="cut to the kernels launched in NVTX ranges of this name, or NAME@DOMAIN")] = None,
    expect_gpus: Annotated[int | None, typer.Option(
        "--expect-gpus", help="TP x PP; another number of GPUs is refused")] = None,
    accept_graph_mode: Annotated[bool, typer.Option(
        "--accept-graph-mode", help="decompose a graph-mode capture of a program that launches no graphs")] = False,
    rules: Rules = None,
    model: Annotated[str | None, typer.Option("--model", help="with --gpu: the roofline verdict of it")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="GPU whose roofs to hold beside the measured times")] = None,
    batch: Annotated[str | None, typer.Option(
        "--batch", help="what an average step computed, where the trace does not tell: tokens=…,decodes=…")] = None,
    steps: Annotated[int | None, typer.Option(
        "--steps", min=1, help="steps in the window, if the trace shows none")] = None,
    tp: Annotated[int | None, typer.Option(
        "--tp", min=1, help="GPUs that share the model; default: all of the trace")] = None,
    untraced_step_s: Annotated[float | None, typer.Option(
        "--untraced-step-s", min=1e-6, help="the engine's decode step without the profiler: what the capture costs")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Where each GPU's time went: exclusive categories plus idle, summing to the window.

    Example: spoc nsight decompose trace.sqlite --expect-gpus 4 --model gpt-oss-120b --gpu h100-sxm
    """
    from spoc_lib import config
    from spoc_lib.nsight import capture_overhead, explain_idle, roofline, rule_book, shown_types
    from spoc_lib.nsight import decompose as run
    from spoc_lib.nsight.roofline import batch_of
    from spoc_lib.nsight.text import decomposition_text, verdict_text

    if (model is None) != (gpu is None):
        raise InputError("bad-option", "a roofline needs both: give --model and --gpu together")
    given, missing = batch_of(batch), None
    result = run(trace, _window(window), rules=rule_book(rules), nvtx_range=nvtx_range, expect_gpus=expect_gpus,
                 accept_graph_mode=accept_graph_mode)
    idle, types = explain_idle(result), shown_types(result)
    answer = result.to_dict() | {"idle": idle.to_dict(), "types": types.to_dict()}
    text = f"{decomposition_text(result)}\n{idle.sentence}\n{types.sentence}."
    if untraced_step_s is not None:
        overhead = capture_overhead(result, untraced_step_s)
        answer["overhead"] = overhead
        text = f"{text}\n{overhead.sentence}"
    if model is not None and gpu is not None:
        try:
            verdict = roofline(result, config.load_model(model), config.load_gpu(gpu), given, gpu_count=tp, steps=steps)
            answer["roofline"] = verdict.to_dict()
            text = f"{text}\n\n{verdict_text(verdict)}"
        except InputError as error:  # the decomposition stands without it
            missing = error
            answer |= {"roofline": None, "no_roofline": error.message}
            if error.code == "another-machine":
                text = f"{text}\n\nNo roofline: {error.message}."
    emit(answer, json, text)
    if missing is not None and missing.code == "another-machine":
        raise typer.Exit(1)
    if missing is not None:
        raise missing


@app.command()
def classify(
    file: Annotated[str, typer.Argument(help="kernel names, one a line, or what a profiler prints: nsys stats in any "
                                             "of its formats, ncu, rocprof, PyTorch's profiler")],
    rules: Rules = None,
    json: JsonOption = None,
) -> None:
    """Kernel names to categories.

    Example: spoc nsight classify kernels.csv --json -
    """
    from spoc_lib.nsight import classify as run
    from spoc_lib.nsight import rule_book
    from spoc_lib.nsight.namelist import kernel_names

    result = run(kernel_names(file), rule_book(rules))
    emit(result, json, "\n".join(f"{category:10} {name}" for name, category in result.items()))


def _tokens(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        first, second = (float(part) for part in text.split(":"))
    except ValueError:
        first = second = 0.0
    if not (0 < first < math.inf and 0 < second < math.inf):
        raise InputError("bad-tokens", f"--tokens {text!r}: give A:B, the tokens that each trace's window processed, "
                         f"for example 12000:9000")
    return first, second


@app.command()
def diff(
    a: Annotated[str, typer.Argument(help="the trace to compare with")],
    b: Annotated[str, typer.Argument(help="the trace that may be slower")],
    unit: Annotated[str | None, typer.Option("--unit", help="token, step or second; default: the finest told")] = None,
    tokens: Annotated[str | None, typer.Option(
        "--tokens", help="A:B, the tokens processed in each, where the traces do not tell")] = None,
    rules: Rules = None,
    json: JsonOption = None,
) -> None:
    """What got slower from one trace to another, by category, kernel and step, normalised per token.

    Example: spoc nsight diff before.sqlite after.sqlite
    """
    from spoc_lib.nsight import decompose as run
    from spoc_lib.nsight import diff as compare
    from spoc_lib.nsight import rule_book
    from spoc_lib.nsight.diff import UNITS
    from spoc_lib.nsight.text import diff_text

    if unit is not None and unit not in UNITS:
        raise InputError("bad-unit", f"--unit {unit!r}: use one of {', '.join(UNITS)}")
    book = rule_book(rules)
    result = compare(run(a, rules=book), run(b, rules=book), unit, _tokens(tokens))
    emit(result.to_dict(), json, diff_text(result))


def _inside(container: str | None, pod: str | None) -> Inside | None:
    from spoc_lib.nsight.attach import Inside
    from spoc_lib.servers.commands import container_engine

    if container and pod:
        raise InputError("bad-option", "--container and --pod name two places: give one of them")
    if container:
        return Inside("podman" if container_engine() == "podman" else "docker", container)
    if pod:
        namespace, _, name = pod.rpartition("/")
        return Inside("kubectl", name, namespace or None)
    return None


@app.command()
def plan(
    cluster: Annotated[str, typer.Argument(help="a name in data/clusters, or the path of a YAML file")],
    output: Annotated[str, typer.Option("--output", help="name of the report, without suffix")] = "trace",
    seconds: Annotated[float, typer.Option("--seconds", help="length of the captured window")] = 5.0,
    container: Annotated[str | None, typer.Option(
        "--container", help="capture inside this running Docker or Podman container")] = None,
    pod: Annotated[str | None, typer.Option("--pod", help="capture inside this pod: NAME or NAMESPACE/NAME")] = None,
    json: JsonOption = None,
) -> None:
    """How to capture a trace of a cluster's engine at its capacity limit: the commands, in order, with reasons.

    Example: spoc nsight plan my-cluster.yaml
    """
    from spoc_lib import config
    from spoc_lib.nsight.plan import capture_plan

    if seconds <= 0:
        raise InputError("bad-seconds", f"--seconds {seconds:g}: give the length of the window, more than 0")
    result = capture_plan(config.load_cluster(cluster), output=output, seconds=seconds,
                          inside=_inside(container, pod))
    emit(result.to_dict(), json, result.text())
