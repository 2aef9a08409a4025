"""What the code may not do anywhere: run text as code, unpickle, hand a string to a shell, listen beyond loopback."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*(ROOT / "spoc_lib").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "commands", "pty"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput",
         "subprocess.getstatusoutput", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "tempfile.mktemp",
         "pd.read_pickle", "pandas.read_pickle", "os.execl", "os.execlp", "importlib.import_module"}
STARTERS = {"subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_call", "subprocess.check_output",
            "asyncio.create_subprocess_shell"}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def faults(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        where = f"line {getattr(node, 'lineno', 0)}"
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [one.name for one in node.names] + ([node.module] if isinstance(node, ast.ImportFrom) else [])
            found += [f"{where}: imports {name}" for name in names if name and name.split(".")[0] in MODULES]
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        given = {word.arg: word.value for word in node.keywords}
        if name in CALLS:
            found.append(f"{where}: calls {name}")
        if name in STARTERS or name.endswith("create_subprocess_shell"):
            if "shell" in given or name.endswith("_shell"):
                found.append(f"{where}: {name} through a shell")
            if node.args and isinstance(node.args[0], (ast.JoinedStr, ast.Constant, ast.BinOp)):
                found.append(f"{where}: {name} of a string: give it a list")
        if name in ("np.load", "numpy.load") and getattr(given.get("allow_pickle"), "value", True) is not False:
            found.append(f"{where}: {name} without allow_pickle=False")
        hosts = [one for one in (*node.args, *given.values()) if isinstance(one, ast.Constant)]
        found += [f"{where}: {name} on all interfaces" for one in hosts if one.value == "0.0.0.0"]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_runs_text_unpickles_or_uses_a_shell(path):
    assert not faults(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("bad", [
    "eval('1')", "import pickle", "from marshal import loads", "import subprocess\nsubprocess.run('ls', shell=True)",
    "import subprocess\nsubprocess.run(f'ls {x}')", "import os\nos.system('ls')", "import yaml\nyaml.load(x)",
    "import numpy as np\nnp.load(x)", "s.bind('0.0.0.0')",
])  # fmt: skip
def test_the_rule_sees_what_it_is_for(bad):
    assert faults(bad)


def test_notebooks_hold_no_shell_lines():
    import json

    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            lines = "".join(cell["source"]).splitlines() if cell["cell_type"] == "code" else []
            assert not [line for line in lines if line.lstrip().startswith(("!", "%%bash", "%%sh", "%run"))], path
            assert not faults("\n".join(line for line in lines if not line.lstrip().startswith("%")))
