"""`spoc check`: what a run on this cluster will find missing, and what each lack costs, before anything starts."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from spoc_lib.config import Cluster, load_cluster
from spoc_lib.config.cluster import metrics_page
from spoc_lib.config.flags import unknown_flags
from spoc_lib.core.errors import SpocError


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. severity where it is not ok: stops (no run can work) | costs (the run works with less)."""

    subject: str
    ok: bool
    severity: str
    sentence: str


def preflight(cluster_name: str) -> list[Finding]:
    """All checks of one cluster, none of which starts or changes anything; InputError for a faulty cluster file."""
    cluster = load_cluster(cluster_name)
    found = list(_key(cluster))
    if found:  # is somebody there, at least
        cluster = cluster.model_copy(update={"engine": cluster.engine.without_key()})
    checks = (_engine, _flags, _workload, _client, _telemetry, _nsight)
    return found + [finding for check in checks for finding in check(cluster)]


def _ok(subject: str, sentence: str) -> Finding:
    return Finding(subject, True, "", sentence)


def _key(cluster: Cluster) -> Iterator[Finding]:
    """Is the API key where the cluster says."""
    try:
        cluster.engine.key()
    except SpocError as error:
        yield Finding("API key", False, "stops", error.message)


def _engine(cluster: Cluster) -> Iterator[Finding]:
    """Can the engine be had: embedded fits its GPUs, a command exists, an endpoint answers."""
    from spoc_lib.servers.commands import launch_command
    from spoc_lib.servers.readiness import Endpoint

    engine, subject = cluster.engine, f"engine ({cluster.engine.kind})"
    if engine.kind == "embedded":
        from spoc_lib.engine.embedded import EmbeddedEngine

        try:
            twin = EmbeddedEngine.from_cluster(cluster)
        except SpocError as error:
            yield Finding(subject, False, "stops", error.message)
            return
        yield _ok(subject, f"{cluster.model_name} fits: {twin.num_blocks} KV blocks of {twin.flags.block_size} tokens; "
                  "every number will be labelled simulated")
        for warning in twin.passport().get("warnings", []):
            yield Finding("passport", False, "costs", warning)
    elif engine.kind == "process":
        program = Path((engine.command or [""])[0])
        if shutil.which(program) or program.is_file():
            yield _ok(subject, f"starts with: {shlex.join(launch_command(cluster, {}, 0))} (port 0: any that is free)")
        else:
            yield Finding(subject, False, "stops", f"the program {program} does not exist: correct engine.command")
    elif engine.kind == "container":
        found = next((name for name in ("docker", "podman") if shutil.which(name)), None)
        yield (
            _ok(subject, f"{engine.image} through {found}")
            if found
            else Finding(subject, False, "stops",
                         "neither docker nor podman is installed: install one, or describe the engine as a process")
        )
    else:
        try:
            endpoint = Endpoint(str(engine.base_url), engine)
            endpoint.healthy()
            known = endpoint.identify(engine.served_model)
        except SpocError as error:
            yield Finding(subject, False, "stops", error.message)
            return
        yield _ok(subject, f"serves {known.model}, version {known.version}; its flags are fixed, so 02 is skipped")


def _flags(cluster: Cluster) -> Iterator[Finding]:
    """Is the flag space sound: names known, ranges not empty, fixed and searched apart."""
    from spoc_lib.search.space import build_space

    if cluster.engine.kind == "remote":
        return
    try:
        space = build_space(cluster)
    except SpocError as error:
        yield Finding("flags", False, "stops", error.message)
        return
    yield _ok("flags", f"{len(space.fixed)} fixed, {len(space.searched)} searched: {', '.join(space.searched)}")
    for sentence in unknown_flags([*space.fixed, *space.searched]):
        yield Finding("flags", False, "costs", f"{sentence}; it is passed on as it stands, unread")


def _workload(cluster: Cluster) -> Iterator[Finding]:
    """Personas, tokenizer and corpus."""
    from spoc_lib.workload.corpus import Corpus
    from spoc_lib.workload.personas import load_personas

    try:
        personas = load_personas(cluster.personas)
        corpus = Corpus.from_directory(cluster.corpus).summary()
    except SpocError as error:
        yield Finding("workload", False, "stops", error.message)
        return
    yield _ok("workload", f"personas {personas.name}; {corpus['files']} files of {corpus['source']}, tokenizer "
              f"{corpus['tokenizer']}; contexts end at {cluster.context_limit()} tokens")


def _client(cluster: Cluster) -> Iterator[Finding]:
    """Has this host's load generator been measured."""
    from spoc_lib.load.gate import stored

    check = stored()
    if check is None:
        yield Finding("client ceiling", False, "costs",
                      "this host's load generator was never measured, so a rung that it "
                      "limits cannot be told: spoc load selfcheck")
    else:
        yield _ok("client ceiling",
                  f"{check.ceiling_tokens_per_s:,.0f} tokens/s a process, lag p99 {check.lag_p99_s * 1e3:.1f} ms")


def _telemetry(cluster: Cluster) -> Iterator[Finding]:
    """Metrics pages and Prometheus, as far as they are there before the engine is started."""
    from spoc_lib.telemetry.preflight import preflight as look

    if cluster.simulated:
        yield _ok("telemetry", "the embedded engine brings its own vLLM and DCGM pages")
        return
    engine = cluster.engine
    page, access = metrics_page(cluster, engine.base_url) if engine.base_url else (None, engine)
    telemetry = cluster.telemetry
    for found in look(page, telemetry.dcgm_url, telemetry.prometheus_url, access, telemetry.credential()):
        if page is None and found.what.startswith("engine"):
            continue  # the engine is not started yet
        yield (_ok(found.what, found.detail) if found.present
               else Finding(found.what, False, "costs", f"{found.detail}: {found.cost}"))


def _nsight(cluster: Cluster) -> Iterator[Finding]:
    """Can a trace be captured and read here."""
    if cluster.simulated:
        yield _ok("nsight", "the embedded engine writes its own kernel trace, labelled simulated")
    elif shutil.which("nsys"):
        yield _ok("nsight", "nsys is installed")
    else:
        yield Finding("nsight", False, "costs",
                      "nsys is not installed here: capture where the engine runs (spoc nsight "
                      "plan) and pass the trace with --set trace=FILE, else 04 has nothing to read")
