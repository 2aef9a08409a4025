"""What a notebook waits for before its first line: imports without seconds that nobody needs, one compilation."""

from __future__ import annotations

import subprocess
import sys
import threading

from spoc_lib.core import caches


def test_notebooks_and_papermill_build_no_grammar():
    code = ("import sys; from spoc_lib.report import style; style.activate(); import papermill, nbconvert, nbformat;"
            "assert 'lark' not in sys.modules and 'rfc3987_syntax' not in sys.modules;"
            "nbformat.validate(nbformat.v4.new_notebook());"
            "import jsonschema\n"
            "try: jsonschema.validate({'a': 1}, {'properties': {'a': {'type': 'string'}}})\n"
            "except jsonschema.ValidationError: print('refused')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "refused\n", done.stderr


def test_who_needs_what_another_compiles_waits_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOC_CACHE", str(tmp_path))
    order: list[str] = []

    def second() -> None:
        with caches.one_compiles("loop"):
            order.append("second")

    with caches.one_compiles("loop"):
        waiting = threading.Thread(target=second)
        waiting.start()
        with caches.one_compiles("another loop"):
            waiting.join(0.2)
        order.append("first")
    waiting.join(10)
    assert order == ["first", "second"]
