"""`spoc load`: one rung of real load, and the client measured against a paced server."""

from __future__ import annotations

import secrets
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from spoc_lib.cli.output import JsonOption, emit

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None,
    help="Real Locust users against any OpenAI-compatible endpoint, every request accounted for.")


@app.command("run")
def run_command(
    base_url: Annotated[str, typer.Option(help="http(s) address of the server, with or without /v1")],
    model: Annotated[str | None, typer.Option(help="model name on the API; default: the first that is served")] = None,
    users: Annotated[int, typer.Option(min=1, help="live conversations")] = 10,
    duration: Annotated[float, typer.Option(help="seconds, ramp and warm-up included")] = 60.0,
    personas: Annotated[str, typer.Option(help="persona set: a name (spoc, tiny, …) or a YAML file")] = "spoc",
    corpus: Annotated[str | None, typer.Option(help="folder of text; default: Python's standard library")] = None,
    tokenizer: Annotated[str, typer.Option(help="whose tokens the sizes are: offline (o200k), or target (the "
                                                "server's /tokenize)")] = "offline",
    seed: Annotated[int, typer.Option(help="the same seed gives the same conversations")] = 0,
    salt: Annotated[int | None, typer.Option(help="texts of the same sizes, other ones for each salt; default: a fresh "
                                                  "one, so a cold cache (with --cache reset or warm: 0)")] = None,
    cache: Annotated[str, typer.Option(help="salt (rely on another salt), reset (empty it first) or warm")] = "salt",
    start: Annotated[str, typer.Option(help="stationary (users in mid-conversation) or cold")] = "stationary",
    gap_cap: Annotated[float, typer.Option(help="longest think time, seconds")] = 60.0,
    rate_per_s: Annotated[float | None, typer.Option(help="open loop: conversations that arrive a second; each is a "
                                                          "user (--users is not needed)")] = None,
    cv: Annotated[float, typer.Option(help="burstiness of arrivals: 1 is Poisson, above 1 gamma bursts")] = 1.0,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="open loop: recorded sessions (--personas "
                                             "traces:PATH) at their recorded times")] = False,
    scale: Annotated[float, typer.Option(help="multiplies all token sizes")] = 1.0,
    context_limit: Annotated[int | None, typer.Option(help="tokens; default: what the server says")] = None,
    warmup: Annotated[float, typer.Option(help="seconds after the ramp that never count")] = 0.0,
    ramp: Annotated[float, typer.Option(help="seconds over which the users start")] = 0.0,
    api: Annotated[str, typer.Option(help="chat or completions")] = "chat",
    api_key_env: Annotated[str | None, typer.Option(help="environment variable that holds the API key")] = None,
    api_key_header: Annotated[str, typer.Option(help="header that carries it: as a bearer token, or in another such as "
                                                     "api-key alone")] = "Authorization",
    header: Annotated[list[str] | None, typer.Option(help="'Name: value', may be repeated")] = None,
    body: Annotated[str, typer.Option(help="JSON object merged into every request; null leaves a field out")] = "{}",
    insecure: Annotated[bool, typer.Option("--insecure", help="do not check the TLS certificate")] = False,
    request_timeout: Annotated[float, typer.Option(help="seconds for a whole answer")] = 600.0,
    idle_timeout: Annotated[float, typer.Option(help="seconds without a byte")] = 120.0,
    stop_timeout: Annotated[float, typer.Option(help="seconds that answers in flight get at the end")] = 30.0,
    processes: Annotated[int, typer.Option(min=1, help="client processes; the users are shared out")] = 1,
    master: Annotated[str | None, typer.Option(help="HOST:PORT to listen on: the processes are then workers that join "
                                                    "from other machines (spoc load worker)")] = None,
    ui: Annotated[int | None, typer.Option(help="port for Locust's own web page on 127.0.0.1")] = None,
    out: Annotated[Path | None, typer.Option(help="folder for the tables; default: a new one below outputs/")] = None,
    json: JsonOption = None,
) -> None:
    """Play the personas as USERS closed-loop conversations for DURATION seconds and report what they saw.

    Exit status 1 when the rung is invalid (interrupted, a client lost, nothing completed, too few users live).

    Example: spoc load run --base-url http://127.0.0.1:8000 --users 20 --duration 60 --personas tiny
    """
    from spoc_lib.cli.run import stop_gently
    from spoc_lib.load import read_run, run
    from spoc_lib.load.endpoint import first_model
    from spoc_lib.load.runner import describe

    arrivals = {"rate_per_s": rate_per_s, "cv": cv} if timestamps or rate_per_s is not None else None
    if arrivals:
        from spoc_lib.load.script import arriving

        users = arriving(personas, rate_per_s, cv, duration, seed)
    if salt is None:
        salt = secrets.randbelow(1 << 31) if cache == "salt" else 0
    given = dict(
        base_url=base_url, model=model or "?", users=users, duration_s=duration, personas=personas, corpus=corpus,
        tokenizer=tokenizer, seed=seed, salt=salt, cache=cache, start=start, gap_cap_s=gap_cap, scale=scale,
        context_limit=context_limit, arrivals=arrivals,
        warmup_s=warmup, ramp_s=ramp, api=api, api_key_env=api_key_env, api_key_header=api_key_header,
        headers=_headers(header or []),
        extra_body=_object(body), verify_tls=not insecure, request_timeout_s=request_timeout,
        idle_timeout_s=idle_timeout, stop_timeout_s=stop_timeout, processes=processes, master=master, ui_port=ui)
    plan = _plan(given)
    if model is None:
        plan = _plan({**given, "model": first_model(plan)})
    folder = out or _new_folder()
    stop_gently()
    try:
        result = run(plan, folder, progress=_progress(json == "-"))
    except KeyboardInterrupt:
        result = read_run(folder)
    finally:
        _progress_end()
    emit(result.summary, json, f"{describe(result.summary)}\ntables: {result.folder}")
    if not result.summary["valid"]:
        raise typer.Exit(1)


@app.command("worker")
def worker_command(
    address: Annotated[str, typer.Argument(help="HOST:PORT of the master (spoc load run --master)")],
    once: Annotated[bool, typer.Option("--once", help="leave after one rung")] = False,
) -> None:
    """Lend this machine to a master: play a share of the users of each rung it runs, until interrupted.

    An API key is read from this machine's environment, under the name that the plan gives.

    Example: spoc load worker 10.0.0.1:5557
    """
    import subprocess

    from spoc_lib.core.errors import InputError
    from spoc_lib.load.plan import host_and_port

    try:
        host, port = host_and_port(address)
    except ValueError as error:
        raise InputError("bad-address", f"the master's address {error}") from error
    while True:
        status = subprocess.run([sys.executable, "-m", "spoc_lib.load.worker", host, str(port)], check=False).returncode
        if once or status < 0:
            raise typer.Exit(1 if status else 0)


@app.command("selfcheck")
def selfcheck_command(
    users: Annotated[int, typer.Option(min=1, help="streams at once")] = 100,
    duration: Annotated[float, typer.Option(help="seconds")] = 10.0,
    ttft: Annotated[float, typer.Option(help="the paced server's time to first token, seconds")] = 0.2,
    itl: Annotated[float, typer.Option(help="the paced server's time between tokens, seconds")] = 0.02,
    output_tokens: Annotated[int, typer.Option(min=2, help="tokens an answer")] = 200,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="tokens a prompt")] = 16,
    json: JsonOption = None,
) -> None:
    """Run this client against a paced server on this machine: how late are its stamps, how much can it hold?

    The result is stored for this host and gates every later rung: over half of the ceiling, or a lag above 10 % of
    the measured time between tokens, marks a rung as client-limited. Exit status 1 when the lag is already above
    10 % of the tested time between tokens.

    Example: spoc load selfcheck --users 300
    """
    from spoc_lib.load import selfcheck

    try:
        check = selfcheck(users, duration, ttft_s=ttft, itl_s=itl, output_tokens=output_tokens,
                          prompt_tokens=prompt_tokens, progress=_progress(json == "-"))
    finally:
        _progress_end()
    lines = [check.sentence,
             f"lag of the stamps ms p50 {1e3 * check.lag_p50_s:.3f}, p99 {1e3 * check.lag_p99_s:.3f}",
             f"TTFT error ms p50 {1e3 * check.ttft_error_p50_s:.2f}, p99 {1e3 * check.ttft_error_p99_s:.2f}; "
             f"gap error ms p50 {1e3 * check.gap_error_p50_s:.2f}, p99 {1e3 * check.gap_error_p99_s:.2f}",
             f"the paced server itself was late by p50 {1e3 * check.server_late_p50_s:.2f}, "
             f"p99 {1e3 * check.server_late_p99_s:.2f} ms; stamps: {check.stamps}"]
    emit(check, json, "\n".join(lines))
    if not check.passed:
        raise typer.Exit(1)


def _plan(given: dict[str, Any]) -> Any:
    from spoc_lib.core import yamlfile
    from spoc_lib.load import LoadPlan

    return yamlfile.parse(LoadPlan, given, "load run")


def _headers(pairs: list[str]) -> dict[str, str]:
    from spoc_lib.core.errors import InputError

    headers = {}
    for pair in pairs:
        name, colon, value = pair.partition(":")
        if not colon or not name.strip():
            raise InputError("bad-header", f"--header wants 'Name: value', not '{pair}'")
        headers[name.strip()] = value.strip()
    return headers


def _object(text: str) -> dict[str, Any]:
    import orjson

    from spoc_lib.core.errors import InputError

    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InputError("bad-json", f"--body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError("bad-json", "--body must be a JSON object, for example '{\"top_p\": 0.9}'")
    return value


def _new_folder() -> Path:
    from spoc_lib.pipeline.runs import outputs_dir

    base = outputs_dir()
    base.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="load-", dir=base))


def _progress(quiet: bool) -> Any:
    """A line that is rewritten on a terminal; silent elsewhere."""
    if quiet or not sys.stderr.isatty():
        return None

    def show(state: dict[str, Any]) -> None:
        ttft = state["ttft_p95_s"]
        done = min(1.0, state["elapsed_s"] / state["duration_s"])
        bar = "#" * round(20 * done)
        text = (f"\r[{bar:<20}] {state['elapsed_s']:5.0f}/{state['duration_s']:.0f} s  live {state['live']}  "
                f"in flight {state['in_flight']}  completed {state['completed']}  failed {state['failed']}  "
                f"TTFT p95 {'-' if ttft is None else f'{1e3 * ttft:.0f} ms'}")
        sys.stderr.write(text.ljust(110))
        sys.stderr.flush()

    return show


def _progress_end() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r" + " " * 112 + "\r")
        sys.stderr.flush()
