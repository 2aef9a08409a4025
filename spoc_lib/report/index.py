"""`outputs/index.html`: every run with its verdict, cluster, flags, date and pages; sortable, offline."""

from __future__ import annotations

import html
import time
from pathlib import Path

from spoc_lib.core.errors import InputError
from spoc_lib.core.files import read_json, write_text

_HEAD = ("run", "cluster", "max users", "stopped by", "flags", "stages", "started", "pages")

_SORT = """
document.querySelectorAll('th').forEach((head, column) => {
  const sort = () => {
    const body = document.querySelector('tbody'), rows = [...body.rows];
    const up = head.dataset.up !== '1';
    head.dataset.up = up ? '1' : '0';
    const key = row => row.cells[column].dataset.key || row.cells[column].textContent;
    rows.sort((a, b) => key(a).localeCompare(key(b), undefined, {numeric: true}) * (up ? 1 : -1));
    rows.forEach(row => body.append(row));
  };
  head.addEventListener('click', sort);
  head.addEventListener('keydown', event => { if (event.key === 'Enter') sort(); });
});
"""


def rebuild(outputs: Path) -> Path:
    """Write `outputs/index.html` from the run folders that are there; a damaged run is listed as such."""
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    rows = "".join(_row(path.parent) for path in sorted(outputs.glob("*/run.json"), reverse=True))
    head = "".join(f'<th tabindex="0" role="button">{name}</th>' for name in _HEAD)
    return write_text(
        outputs / "index.html",
        (
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>SPOC runs</title>'
            f"<style>{style}"
            f"th{{cursor:pointer}}</style></head><body><main><h1>Runs</h1>"
            f"<p>Newest first; a click on a heading sorts.</p>"
            f'<div class="spoc-scroll"><table class="spoc-table"><thead><tr>{head}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div></main><script>{_SORT}</script></body></html>"
        ),
    )


def _row(folder: Path) -> str:
    try:
        state = read_json(folder / "run.json")
        stages = state["stages"]
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(state["anchor"]["wall_s"]))
    except (InputError, KeyError) as error:
        said = html.escape(f"damaged: {error}")
        return f'<tr><td>{html.escape(folder.name)}</td><td colspan="{len(_HEAD) - 1}">{said}</td></tr>'
    capacity = _capacity(folder)
    pages = " ".join(f'<a href="{folder.name}/{p.name}">{p.name[:2]}</a>' for p in sorted(folder.glob("*.html")))
    done = " ".join(f"{n}:{s['state']}" if s["state"] != "done" else n for n, s in sorted(stages.items()))
    cells = [folder.name, state.get("cluster", "comparison"), *capacity, done, started]
    return "<tr>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in cells) + f"<td>{pages}</td></tr>"


def _capacity(folder: Path) -> tuple[str, str, str]:
    path = folder / "sweep" / "capacity.json"
    if not path.exists():
        return "–", "–", "–"
    answer = read_json(path)
    users = answer.get("max_users")
    label = "simulated" if answer.get("simulated") else "measured"
    shown = f"{users} ({label})" if users is not None else "unresolved"
    slo = answer.get("binding") or {}
    stop = " ".join(str(slo[k]) for k in ("persona", "metric") if k in slo)
    flags = ", ".join(f"{k}={v}" for k, v in (answer.get("flags") or {}).items())
    return shown, stop or "–", flags or "defaults"
