"""`spoc workload`: scripts from personas, the audit, foreign traces in, peers' formats out."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from spoc_lib.cli.output import JsonOption, emit

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                  help="Who asks what: conversations from personas or recorded traces, audited and exported.")

Personas = Annotated[str, typer.Argument(help="name in data/personas, or path of a YAML file")]
Paths = Annotated[list[str], typer.Argument(help="files, folders, or hub:OWNER/NAME[:SPLIT]")]
Users = Annotated[int, typer.Option(min=1, help="users to play")]
Turns = Annotated[int, typer.Option(min=1, help="turns of each user")]
Seed = Annotated[int, typer.Option(help="sizes, times and choices")]
Salt = Annotated[int, typer.Option(help="identities only: the same conversations, foreign to a warm cache")]
GapCap = Annotated[float, typer.Option(help="longest think time in seconds; it moves 'how many users'")]
Start = Annotated[str, typer.Option(help="stationary (users found in mid-conversation) or cold")]
ContextLimit = Annotated[int | None, typer.Option(help="the server's max_model_len in tokens")]
Scale = Annotated[float, typer.Option(help="multiplies all token sizes")]
Monorepo = Annotated[str | None, typer.Option(metavar="DIR", help="code for prompts (default: Python's library)")]


Rate = Annotated[float | None, typer.Option(help="open arrivals: new conversations a second (users are then arrivals)")]
Cv = Annotated[float, typer.Option(help="burstiness of open arrivals: 1 is Poisson, above 1 bursts (gamma)")]
Duration = Annotated[float, typer.Option(help="seconds of open arrivals")]


def _opened(script: Any, users: int, rate_per_s: float | None, cv: float, duration_s: float) -> tuple[Any, int]:
    """The script with open arrivals where a rate is given, and its number of users."""
    if rate_per_s is None:
        return script, users
    from spoc_lib.workload.arrivals import kind_of, open_script

    script = open_script(script, rate_per_s, duration_s, kind=kind_of(cv), cv=cv)
    return script, len(script.times_s)


@app.command()
def build(personas: Personas = "spoc", users: Users = 300, turns: Turns = 20, seed: Seed = 1, salt: Salt = 0,
          gap_cap_s: GapCap = 60.0, start: Start = "stationary", context_limit: ContextLimit = None, scale: Scale = 1.0,
          rate_per_s: Rate = None, cv: Cv = 1.0, duration_s: Duration = 600.0,
          output: Annotated[str | None, typer.Option("--output", "-o", help="Parquet file for the turns")] = None,
          json: JsonOption = None) -> None:
    """Build a script and list its turns.

    Example: spoc workload build spoc --users 300 --turns 20 -o sessions.parquet
    """
    from spoc_lib.core.schemas import SESSIONS
    from spoc_lib.core.tables import write_table
    from spoc_lib.workload import build_script
    from spoc_lib.workload.playback import sessions_table

    began = time.perf_counter()
    script = build_script(personas, seed, salt=salt, gap_cap_s=gap_cap_s, start=start, context_limit=context_limit,
                          scale=scale)
    script, users = _opened(script, users, rate_per_s, cv, duration_s)
    table = sessions_table(script, users, turns)
    if output:
        write_table(output, table, SESSIONS)
    result = {**script.describe(), "users": users, "turns": turns, "requests": len(table),
              "prompt_tokens": int(table.prompt_tokens.sum()), "append_tokens": int(table.append_tokens.sum()),
              "output_tokens": int(table.output_tokens.sum()), "conversations": _conversations(table),
              "seconds": time.perf_counter() - began, "output": output}
    emit(result, json, f"{len(table)} requests of {users} users, {result['prompt_tokens']:,} prompt tokens of which "
         f"{result['append_tokens']:,} are appended, {result['output_tokens']:,} output tokens; start {start}, think "
         f"time capped at {gap_cap_s:g} s" + (f"; written to {output}" if output else ""))


def _conversations(table: Any) -> int:
    return int(table.groupby(["user", "conversation"]).ngroups)


@app.command()
def audit(personas: Personas = "spoc", users: Users = 300, turns: Turns = 20, seed: Seed = 1, salt: Salt = 0,
          gap_cap_s: GapCap = 60.0, start: Start = "stationary", context_limit: ContextLimit = None, scale: Scale = 1.0,
          monorepo: Monorepo = None,
          base_url: Annotated[str | None, typer.Option(help="count with this server's tokenizer and template")] = None,
          model: Annotated[str, typer.Option(help="the model's name on that server")] = "",
          api_key_env: Annotated[str | None, typer.Option(help="environment variable that holds the API key")] = None,
          json: JsonOption = None) -> None:
    """Compare what a script asks for with what its personas intend; exit status 1 when a gate fails.

    Example: spoc workload audit spoc --users 300 --turns 20 --json audit.json
    """
    from spoc_lib.config.access import Access
    from spoc_lib.workload import build_script, load_personas
    from spoc_lib.workload.audit import audit as run
    from spoc_lib.workload.corpus import Corpus
    from spoc_lib.workload.target import measure_target
    from spoc_lib.workload.template import TEMPLATE_OVERHEAD

    loaded = load_personas(personas)
    overhead = TEMPLATE_OVERHEAD
    if base_url:
        target = measure_target(base_url, model, monorepo, access=Access(api_key_env=api_key_env))
        corpus, overhead, context_limit = target.corpus, target.overhead, context_limit or target.context_limit
    else:
        corpus = Corpus.from_directory(monorepo)
    script = build_script(loaded, seed, salt=salt, gap_cap_s=gap_cap_s, start=start, context_limit=context_limit,
                          scale=scale, overhead=overhead)
    result = run(script, loaded, corpus, users, turns)
    emit(result.to_dict(), json, _audit_text(result))
    if not result.passed:
        raise typer.Exit(1)


def _audit_text(result: Any) -> str:
    lines = [f"{'pass' if gate.passed else 'FAIL'}  {gate.name}: {gate.sentence}" for gate in result.gates]
    lines += ["", "Intended / realised: mean and quantiles by persona:"]
    lines += [f"  {row.persona:8} {row.quantity:28} mean {row.intended_mean:9.4g} / {row.realised_mean:<9.4g}"
              + "".join(f" p{q} {getattr(row, f'intended_p{q}'):.4g} / {getattr(row, f'realised_p{q}'):.4g} "
                        for q in (25, 50, 75, 90)) for row in result.quantities.itertuples()]
    lines += ["", "In-flight share of a user by cap on think time:"]
    lines += [f"  {row.gap_cap_s:6g} s  {row.in_flight_ratio:.3f}, one request in flight stands for "
              f"{row.users_per_request:.1f} users{'  (this script)' if row.in_use else ''}"
              for row in result.gap_caps.itertuples()]
    sharing = result.sharing
    lines += ["", f"Ideal reuse with an infinite prefix cache: {result.ideal_hit_ratio:.1%} of "
              f"{sharing.prompt_tokens:,} prompt tokens; {sharing.unique_tokens:,} tokens are unique."]
    lines += [f"  {row.layer:13} {row.prompt_tokens:13,} tokens, {row.reused_ratio:.1%} reused"
              for row in sharing.layers.itertuples()]
    return "\n".join(lines)


@app.command("import")
def import_(paths: Paths,
            limit: Annotated[int | None, typer.Option(min=1, help="most records to read from each source")] = None,
            json: JsonOption = None) -> None:
    """Read foreign traces: sessions, turns, tokens, own-history reuse, and what was skipped and why.

    Example: spoc workload import trajectories/ --json -
    """
    from spoc_lib.workload.traces.importers import import_paths

    result = import_paths(list(paths), limit=limit).to_dict()
    lines = [f"{result['sessions']} sessions, {result['turns']} turns, {result['tokens']:,} prompt tokens; "
             + (f"{result['own_history_reuse']:.1%} of later prompts were in their own history"
                if result["turns"] > result["sessions"] else "no session has a second turn")
             + f"; formats: {', '.join(f'{name} {count}' for name, count in result['formats'].items())}"]
    lines += [f"note: {note}" for note in result["notes"]]
    lines += [f"skipped {skip['record']}: {skip['reason']}" for skip in result["skipped"][:20]]
    if len(result["skipped"]) > 20:
        lines.append(f"… and {len(result['skipped']) - 20} more skipped records (all with --json)")
    emit(result, json, "\n".join(lines))


@app.command()
def fit(paths: Paths,
        output: Annotated[str, typer.Option("--output", "-o", help="persona file to write")],
        name: Annotated[str, typer.Option(help="name of the persona set")] = "fitted",
        source: Annotated[str, typer.Option(help="where the traces come from, for the record")] = "",
        groups: Annotated[int, typer.Option(min=1, help="most personas in a context window")] = 2,
        figure: Annotated[str | None, typer.Option(help="HTML file for the goodness of fit, drawn")] = None,
        json: JsonOption = None) -> None:
    """Fit personas to recorded sessions; exit status 1 when a quantile is off by more than 5 % at p25 to p90.

    Example: spoc workload fit traces/ -o my-personas.yaml --figure fit.html
    """
    from spoc_lib.core.files import write_text
    from spoc_lib.workload.fitting.fit import TOLERANCE
    from spoc_lib.workload.fitting.fit import fit as run
    from spoc_lib.workload.fitting.output import draw, to_yaml
    from spoc_lib.workload.traces.importers import import_paths

    result = run(import_paths(list(paths)), name=name, source=source, groups=groups)
    write_text(output, to_yaml(result))
    if figure:
        write_text(figure, draw(result))
    lines = [f"{result.sessions} sessions, {result.turns} turns, {len(result.personas.personas)} personas: {output}"]
    for row in result.table.itertuples():
        lines.append(f"  {row.quantity:28} worst error {row.worst_error:6.1%}   measured p25/50/75/90 "
                     + " ".join(f"{getattr(row, f'measured_p{q}'):.4g}" for q in (25, 50, 75, 90)) + "   realised "
                     + " ".join(f"{getattr(row, f'realised_p{q}'):.4g}" for q in (25, 50, 75, 90)))
    emit({"sessions": result.sessions, "turns": result.turns, "personas": len(result.personas.personas),
          "worst_error": result.worst_error, "tolerance": TOLERANCE, "table": result.table.to_dict("records"),
          "families": result.families.to_dict("records"), "output": output}, json, "\n".join(lines))
    if result.worst_error > TOLERANCE:
        raise typer.Exit(1)


@app.command()
def export(personas: Personas = "spoc",
           form: Annotated[str, typer.Option("--format", help="mooncake, openai, sharegpt, aiperf, guidellm")] = (
               "mooncake"),
           output: Annotated[str, typer.Option("--output", "-o", help="JSON Lines file to write")] = "workload.jsonl",
           traces: Annotated[list[str] | None, typer.Option("--from", help="traces instead of personas")] = None,
           users: Users = 10, turns: Turns = 10, seed: Seed = 1, salt: Salt = 0, gap_cap_s: GapCap = 60.0,
           rate_per_s: Rate = None, cv: Cv = 1.0, duration_s: Duration = 600.0,
           start: Start = "cold", context_limit: ContextLimit = None, scale: Scale = 1.0, monorepo: Monorepo = None,
           json: JsonOption = None) -> None:
    """Write the workload in a peer's format, so that anyone can check it with their own tool.

    Example: spoc workload export spoc --format aiperf --users 20 -o spoc-aiperf.jsonl
    """
    from spoc_lib.core.errors import InputError
    from spoc_lib.core.files import replacing
    from spoc_lib.workload import build_script
    from spoc_lib.workload import export as exports
    from spoc_lib.workload.corpus import Corpus
    from spoc_lib.workload.traces.importers import import_paths

    if form not in exports.FORMATS:
        raise InputError("unknown-format", f"unknown format '{form}': use one of {', '.join(exports.FORMATS)}")
    corpus = Corpus.from_directory(monorepo) if form != "mooncake" else None
    if traces:
        recorded = import_paths(list(traces)).script(seed, salt=salt, gap_cap_s=gap_cap_s, context_limit=context_limit)
        script: Any = recorded
        extra: tuple[Any, ...] = () if corpus is None else (recorded.texts(corpus),)
    else:
        script = build_script(personas, seed, salt=salt, gap_cap_s=gap_cap_s, start=start, context_limit=context_limit,
                              scale=scale)
        extra = () if corpus is None else (corpus,)
    script, users = _opened(script, users, rate_per_s, cv, duration_s)
    count = 0
    with replacing(output) as temporary, open(temporary, "wb") as handle:
        for line in exports.lines(exports.FORMATS[form](script, users, turns, *extra)):
            handle.write(line)
            count += 1
    emit({"format": form, "records": count, "output": output, "users": users, "turns": turns, **script.describe()},
         json, f"{count} records of {users} users in {form}'s format: {output}")
