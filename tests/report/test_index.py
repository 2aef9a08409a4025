"""The index of runs: every run with its state, damaged ones too; sorted by a key press in a browser with no network."""

from __future__ import annotations

import json
import re

import pytest

from spoc_lib.report import index


@pytest.fixture(scope="module")
def outputs(made_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs")
    for name, truth in (("b", 120), ("a", 104)):
        made_run(folder / name, truth, seed=1)
    state = json.loads((folder / "a" / "run.json").read_text())
    for name, stages in (("c", {"01": {"state": "running"}}), ("d", {"01": {"state": "failed"}}), ("e", {})):
        (folder / name).mkdir()
        (folder / name / "run.json").write_text(json.dumps({**state, "run_id": name, "stages": stages}))
    (folder / "<x>").mkdir()
    (folder / "<x>" / "run.json").write_text("{")
    (folder / "b" / "05_capacity_report.html").write_text("page")
    return folder


def test_states_in_words(outputs):
    said = {row.run: row.status for row in index.rows(outputs)}
    assert said == {"a": "done", "b": "done", "c": "stopped in 01", "d": "failed in 01", "e": "not begun",
                    "<x>": "damaged"}


def test_a_row_tells_verdict_users_flags_and_pages(outputs):
    row = next(row for row in index.rows(outputs) if row.run == "b")
    assert re.fullmatch(r"1[12]\d \(\d+ to \d+\)", row.users) and "all itl p95 <= 0.05 s binds" in row.verdict
    assert row.flags == "max_num_seqs=256" and row.pages == ["05_capacity_report.html"]


def test_a_key_on_a_heading_sorts_in_a_browser(outputs, open_page, tmp_path):
    text = index.rebuild(outputs).read_text()
    assert not re.search(r"https?:|<link|src=", text) and "<x>" not in text.replace("<x>", "", 0).split("</style>")[1]
    press = "<script>const b = document.querySelectorAll('th button')[{}]; b.focus(); b.click();</script></body>"
    (tmp_path / "pressed.html").write_text(text.replace("</body>", press.format(3)))
    dom, log = open_page(tmp_path / "pressed.html")
    order = re.findall(r'<th scope="row" data-key="(\w)"', dom)
    assert order[:2] == ["a", "b"], "by users, ascending; runs without an answer come last"
    assert 'aria-sort="ascending"' in dom and "sorted by users, ascending" in dom
    assert not re.findall(r"CONSOLE.*(?:error|Error|Failed).*", log)


def test_no_run_at_all_is_said(tmp_path):
    assert "No run yet" in index.rebuild(tmp_path).read_text()
