"""`spoc engine serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spoc_lib.cli.output import JsonOption, emit


def register(app: typer.Typer) -> None:
    """Add `serve` to the group."""
    app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)


def serve(
    context: typer.Context,
    cluster: Annotated[str, typer.Option(help="cluster: a name in data/clusters or a YAML file")] = "sim-4xh100",
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port of the API, 0 = any free one")] = 0,
    dcgm_port: Annotated[int, typer.Option(min=0, max=65535, help="port of the GPU counters, 0 = any free one")] = 0,
    served_model_name: Annotated[str | None, typer.Option(help="model name on the API")] = None,
    dev: Annotated[bool, typer.Option("--dev", help="add /reset_prefix_cache, /server_info, profiler routes")] = False,
    throttle: Annotated[str | None, typer.Option(help="heat one GPU, as gpu=1,at=60,factor=0.7")] = None,
    reasoning_tokens: Annotated[int, typer.Option(help="first tokens of a chat reply that are reasoning")] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="refuse to serve what lies outside the measured range")
                      ] = False,
    ready_file: Annotated[Path | None, typer.Option(help="JSON {base_url, dcgm_url, pid} when ready")] = None,
    json: JsonOption = None,
) -> None:
    """Serve the embedded engine over HTTP as vLLM does, with /metrics and GPU counters. Needs no GPU; all times are
    simulated and labelled so. Any engine flag follows by vLLM's name: --max-num-seqs 256. Ends on Ctrl-C, and then
    says what was served (--json).

    Example: spoc engine serve --cluster sim-2xh200 --port 8000 --max-num-batched-tokens 2048
    """
    from spoc_lib.config import load_cluster, read_flags
    from spoc_lib.engine.embedded import EmbeddedEngine
    from spoc_lib.engine.http.options import parse_throttle
    from spoc_lib.engine.http.server import ServerOptions
    from spoc_lib.engine.http.server import serve as run

    chosen = load_cluster(cluster)
    engine = EmbeddedEngine.from_cluster(chosen, read_flags(context.args, "engine flags"))
    engine.outside_as_server(strict=strict)
    result = run(engine, ServerOptions(
        host, port, dcgm_port, served_model_name or chosen.engine.served_model, dev, parse_throttle(throttle),
        reasoning_tokens, ready_file))
    emit(result, json, f"served {sum(result['requests'].values())} requests: {result['prompt_tokens']} prompt tokens, "
                       f"{result['cached_tokens']} of them cached, and {result['generation_tokens']} generated")
