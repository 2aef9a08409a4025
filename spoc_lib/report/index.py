"""`outputs/index.html`: every run with its verdict, cluster, flags, date, status and pages; sortable, offline."""

from __future__ import annotations

import fcntl
import html
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spoc_lib.core.errors import InputError
from spoc_lib.core.files import read_record, write_text
from spoc_lib.report.page import STYLE

#: Columns: heading, whether its cells are numbers.
COLUMNS = (("run", False), ("cluster", False), ("status", False), ("users", True), ("verdict", False), ("pages", False),
           ("started", False), ("flags", False))

_SORT = """
const table = document.querySelector('table'), body = table.tBodies[0], said = document.getElementById('said');
table.querySelectorAll('th button').forEach((button, column) => button.addEventListener('click', () => {
  const head = button.parentElement, up = head.getAttribute('aria-sort') !== 'ascending';
  table.querySelectorAll('th').forEach(other => other.removeAttribute('aria-sort'));
  head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
  const key = row => row.cells[column].dataset.key ?? row.cells[column].textContent;
  const rows = [...body.rows].sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === '' || y === '') return (x === '') - (y === '');
    return x.localeCompare(y, undefined, {numeric: true}) * (up ? 1 : -1);
  });
  rows.forEach(row => body.append(row));
  said.textContent = `sorted by ${button.textContent}, ${up ? 'ascending' : 'descending'}`;
}));
"""


@dataclass(frozen=True)
class Row:
    """One run of the index. status: done | failed | interrupted | running | stopped (its process is gone) | outdated (a
    stage before it ran again)."""

    run: str
    cluster: str = "–"
    status: str = "damaged"
    verdict: str = "–"
    users: str = ""
    sort_users: str = ""
    flags: str = "–"
    started: str = ""
    pages: list[str] = field(default_factory=list)


def rows(outputs: Path) -> list[Row]:
    """Every run of `outputs`, newest first; one whose files cannot be read is listed as damaged, with the reason."""
    found = [_row(path.parent) for path in outputs.glob("[!.]*/run.json")]
    return sorted(found, key=lambda row: (row.started, row.run), reverse=True)


def rebuild(outputs: Path) -> Path:
    """Write `outputs/index.html` from the run folders that are there."""
    found = rows(outputs)
    head = "".join(f'<th scope="col"{" class=num" if number else ""}><button type="button">{name}</button></th>'
                   for name, number in COLUMNS)
    table = (f'<table class="spoc-table spoc-index"><thead><tr>{head}</tr></thead>'
             f"<tbody>{''.join(map(_cells, found))}</tbody></table>")
    body = (f'<h1>Runs</h1><p>{len(found)} runs, newest first. A heading sorts; press it again to turn the order '
            f'round.</p><p id="said" class="visually-hidden" role="status"></p>'
            f'<div class="spoc-scroll" tabindex="0" role="region" aria-label="table of runs">{table}</div>')
    if not found:
        body = "<h1>Runs</h1><p>No run yet: <code>spoc run sim-4xh100</code> makes one.</p>"
    script = f"<script>{_SORT}</script>" if found else ""
    return write_text(outputs / "index.html", (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>SPOC runs</title>'
        f'<style>{STYLE}</style></head><body><main class="wide">{body}</main>{script}</body></html>\n'))


def _row(folder: Path) -> Row:
    try:
        state = read_record(folder / "run.json", "run state", "anchor", "stages")
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(state["anchor"]["wall_s"]))
        verdict, users, sort_users, flags = _answer(folder)
        return Row(folder.name, state.get("cluster", "comparison"), _status(folder, state["stages"]), verdict, users,
                   sort_users, flags, started, [path.name for path in sorted(folder.glob("0*.html"))])
    except (InputError, KeyError, TypeError, AttributeError) as error:
        return Row(folder.name, verdict=f"unreadable: {error}")


def _status(folder: Path, stages: dict[str, Any]) -> str:
    """The worst state of the run's stages, in words."""
    states = {number: stage["state"] for number, stage in sorted(stages.items())}
    for bad in ("failed", "interrupted", "running"):
        at = [number for number, state in states.items() if state == bad]
        if at:
            word = "stopped" if bad == "running" and not _busy(folder, at) else bad
            return f"{word} in {', '.join(at)}"
    old = [number for number in states if outdated(stages, number)]
    if old:
        return f"outdated in {', '.join(old)}"
    skipped = [number for number, state in states.items() if state == "skipped"]
    return ("done" if states else "not begun") + (f" without {', '.join(skipped)}" if skipped else "")


def outdated(stages: dict[str, Any], number: str) -> list[str]:
    """The stages of a run whose results stage `number` used and that came to an end once more since it began."""
    return [other for other, then in stages[number].get("reads", {}).items()
            if stages.get(other, {}).get("finishes", 0) != then]


def _busy(folder: Path, stages: list[str]) -> bool:
    """Whether a process holds the run, or (plain papermill, JupyterLab) one of its `stages`."""
    return any(_held(folder / name) for name in (".lock", *(f".{number}.lock" for number in stages)))


def _held(lock: Path) -> bool:
    try:
        with open(lock) as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _answer(folder: Path) -> tuple[str, str, str, str]:
    """(verdict, users, users to sort by, flags) from the sweep, or the verdict of a comparison."""
    path = folder / "sweep" / "capacity.json"
    if not path.exists():
        report = folder / "report.json"
        said = read_record(report, "report", "verdict")["verdict"] if report.exists() else []
        return said[-1] if said else "–", "", "", "–"  # the last sentence is the ratio where there are several clusters
    answer = read_record(path, "capacity answer")
    users, label = answer.get("max_users"), "simulated" if answer.get("simulated") else "measured"
    flags = " ".join(f"{k}={v}" for k, v in (answer.get("flags") or {}).items()) or "vLLM's defaults"
    if users is None or answer.get("verdict") != "resolved":
        return f"unresolved: {answer.get('reason', '')}", "?", "", flags
    low, high = answer["interval"]
    binding, saturated = (answer.get("binding") or {}).get("name"), (answer.get("saturated") or {}).get("resource")
    verdict = f"{label}; {binding} binds" if binding else label
    if saturated and saturated != "unknown":
        verdict += f", {saturated.replace('_', ' ')} is used up"
    return verdict, f"{users} ({low} to {high})", str(users), flags


def _cells(row: Row) -> str:
    links = " ".join(f'<a href="{html.escape(row.run)}/{html.escape(name)}" '
                     f'aria-label="{html.escape(name[3:-5].replace("_", " "))} of {html.escape(row.run)}">'
                     f"{html.escape(name[:2])}</a>" for name in row.pages)
    best = f"{row.run}/{row.pages[-1]}" if row.pages else ""
    name = f'<a href="{html.escape(best)}">{html.escape(row.run)}</a>' if best else html.escape(row.run)
    tone = row.status.split()[0]
    return (
        f'<tr><th scope="row" data-key="{html.escape(row.run)}">{name}</th>'
        f'<td class="date">{html.escape(row.cluster)}</td>'
        f'<td><span class="state {tone}">{html.escape(row.status)}</span></td>'
        f'<td class="num" data-key="{row.sort_users}">{html.escape(row.users)}</td>'
        f'<td class="long">{html.escape(row.verdict)}</td><td class="pages">{links or "–"}</td>'
        f'<td class="date">{row.started}</td><td class="flags">{html.escape(row.flags)}</td></tr>'
    )
