"""What a trace says of itself: exporter, options, diagnostics, clock; and the reasons to refuse it.

Only named options are read. Command lines, the environment and everything else that may hold a secret is never
opened.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from spoc_lib.core.errors import InputError
from spoc_lib.engine.kerneltrace import SIMULATED, SIMULATED_BY
from spoc_lib.nsight.sources import TraceSource

GRAPH_TRACE = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_GRAPH_MODES = ("CUDA_GRAPH_TRACE_OPTIONS:MODE", "PROCESS_0:CUDA_GRAPH_TRACE_OPTIONS:MODE")
_HOST = "DEVICE_DISPLAY_NAME"
#: What whoever sees graphs instead of kernels must do.
RECAPTURE = "capture again with --cuda-graph-trace=node"


@dataclass(frozen=True)
class Metadata:
    """Exporter and capture options of a trace."""

    product: str | None = None
    schema: str | None = None
    graph_mode: str | None = None
    graph_launches: int = 0
    simulated: bool = False
    simulated_by: str | None = None
    utc_epoch_ns: int | None = None
    host: str | None = None
    diagnostics: tuple[str, ...] = ()
    known_schema: bool = True
    notes: list[str] = field(default_factory=list)


def _named(source: TraceSource, table: str, names: tuple[str, ...]) -> dict[str, str]:
    if table not in source.tables() or not {"name", "value"} <= set(source.columns(table)):
        return {}
    return dict(source.rows(table, ("name", "value"), {"name": names}))


def read_metadata(source: TraceSource) -> Metadata:
    """Read the options that matter, by name, from either generation of metadata tables."""
    tables = source.tables()
    export = {}
    for table in ("EXPORT_META_DATA", "META_DATA_EXPORT"):
        export.update(_named(source, table, ("EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION")))
    capture = _named(source, "META_DATA_CAPTURE", (*_GRAPH_MODES, SIMULATED, SIMULATED_BY, _HOST))
    graphs = 0
    if GRAPH_TRACE in tables and "start" in source.columns(GRAPH_TRACE):
        graphs = sum(chunk.shape[1] for chunk in source.integers(GRAPH_TRACE, ("start",)))
    epoch = None
    if "utcEpochNs" in source.columns("TARGET_INFO_SESSION_START_TIME"):
        rows = source.rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",))
        epoch = rows[0][0] if rows else None
    return Metadata(
        product=export.get("EXPORT_PRODUCT_VERSION"), schema=export.get("EXPORT_SCHEMA_VERSION"),
        graph_mode=next((capture[m] for m in _GRAPH_MODES if m in capture), None), graph_launches=graphs,
        simulated=capture.get(SIMULATED) == "true", simulated_by=capture.get(SIMULATED_BY), utc_epoch_ns=epoch,
        host=capture.get(_HOST), diagnostics=_diagnostics(source),
        known_schema="StringIds" in tables or any(t.startswith("CUPTI_ACTIVITY_KIND_") for t in tables))


def _diagnostics(source: TraceSource) -> tuple[str, ...]:
    """The profiler's own words on CUDA tracing, warnings and errors first."""
    columns = source.columns("DIAGNOSTIC_EVENT")
    if not {"severity", "text"} <= set(columns):
        return ()
    rows = source.rows("DIAGNOSTIC_EVENT", ("severity", "text"))
    about = [(severity, " ".join((text or "").split())) for severity, text in rows
             if "CUDA" in (text or "") or "CUPTI" in (text or "")]
    rank = {3: 0, 2: 1}  # 3 error, 2 warning
    return tuple(text for _, text in sorted(about, key=lambda pair: rank.get(pair[0], 2)))


def refuse_without_kernels(source: TraceSource, metadata: Metadata) -> NoReturn:
    """Say why there is nothing to decompose."""
    if metadata.graph_launches:
        raise InputError("graph-mode", f"{source.path} holds {metadata.graph_launches} CUDA graphs as single entries "
                         f"and no kernels: {RECAPTURE}")
    said = "; ".join(f"'{text}'" for text in metadata.diagnostics[:4])
    quoted = f"; the profiler said {said}" if said else ""
    if (metadata.graph_mode or "").lower() == "graph":
        remedy = f"trace CUDA in every process (-t cuda,nvtx --trace-fork-before-exec=true) and {RECAPTURE}"
    else:
        remedy = "trace CUDA in every process (-t cuda,nvtx --trace-fork-before-exec=true --cuda-graph-trace=node)"
    raise InputError("no-kernels", f"{source.path} holds no GPU kernels{quoted}: {remedy}")
