"""The house: one-way imports between rooms, and imports that open, patch and reach nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "spoc_lib"
#: Floors from the ground up; sweep and nsight share one, and sweep's rungs serve the search above.
FLOORS = [
    ["core"],
    ["config"],
    ["metrics"],
    ["workload"],
    ["engine"],
    ["servers"],
    ["load"],
    ["telemetry"],
    ["sweep", "nsight"],
    ["search"],
    ["report"],
    ["pipeline"],
    ["cli", "interactive"],
]
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
#: Folders inside a room, each below those that may import it.
INNER = {"engine": ["scheduling", "steptime", "fast", "http"], "workload": ["model", "traces", "fitting", "audit"]}
CARD = {
    "jupyterlab",
    "papermill",
    "optuna",
    "locust",
    "aiohttp",
    "pandas",
    "plotly",
    "nvtx",
    "prometheus_api_client",
    "datasets",
}


def imported(path: Path) -> set[str]:
    """Dotted names that a file imports, at its top or inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_a_room_imports_only_from_rooms_below_it():
    wrong = []
    for path in LIBRARY.rglob("*.py"):
        room = path.relative_to(LIBRARY).parts[0].removesuffix(".py")
        if room in FLOOR:
            for name in imported(path):
                other = name.split(".")[1] if name.startswith("spoc_lib.") else room
                if other != room and FLOOR.get(other, 0) >= FLOOR[room]:
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(sorted(wrong))


def modules() -> dict[str, set[str]]:
    """Each module of the library by its dotted name, with the modules that it imports, wherever it does so."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
             for path in LIBRARY.rglob("*.py")}

    def meant(name: str) -> str:
        return name if name in paths else name.rpartition(".")[0]

    return {name: {meant(one) for one in imported(path)} & set(paths) - {name} for name, path in paths.items()}


def test_no_module_imports_itself_in_a_circle():
    """Whoever imports nothing that is left is taken away, until nobody is: what remains goes round in circles."""
    left = modules()
    while free := {name for name, wanted in left.items() if not wanted & set(left)}:
        left = {name: wanted for name, wanted in left.items() if name not in free}
    assert not left, "\n".join(f"{name} imports {sorted(wanted & set(left))}" for name, wanted in sorted(left.items()))


@pytest.mark.parametrize("room", INNER)
def test_a_folder_inside_a_room_imports_only_from_folders_below_it(room):
    order, wrong = INNER[room], []
    assert set(order) == {path.name for path in (LIBRARY / room).iterdir() if path.is_dir() and path.name[0] != "_"}
    for name, wanted in modules().items():
        _, where, folder, *_ = [*name.split("."), "", "", ""]
        for other in wanted if where == room and folder in order else ():
            theirs = [*other.split("."), "", ""][2] if other.startswith(f"spoc_lib.{room}.") else ""
            if theirs in order and order.index(theirs) > order.index(folder):
                wrong.append(f"{name} imports {other}")
    assert not wrong, "\n".join(sorted(wrong))


def test_every_package_of_the_card_is_used():
    """jupyterlab is what people open the notebooks in; all others are called by the library."""
    used = {name.split(".")[0] for path in LIBRARY.rglob("*.py") for name in imported(path)}
    assert used >= CARD - {"jupyterlab"}
    assert "jupyter lab" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("room", [room for rooms in FLOORS for room in rooms])
def test_importing_a_room_patches_nothing_and_opens_no_socket(room):
    code = (
        "import socket, sys, threading\n"
        "start, connect = threading.Thread.start, socket.socket.connect\n"
        "def refuse(*a): raise SystemExit('a socket was opened on import')\n"
        "socket.socket.connect = socket.socket.bind = refuse\n"
        f"import spoc_lib.{room}\n"
        "assert threading.Thread.start is start, 'threading was patched'\n"
        "assert not {'locust', 'gevent'} & set(sys.modules), 'locust came along'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def public(nodes: list[ast.stmt]) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node for node in nodes if isinstance(node, kinds) and not node.name.startswith("_")]


@cache
def classes() -> dict[str, ast.ClassDef]:
    return {node.name: node for path in LIBRARY.rglob("*.py")
            for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)}


def told_by_bases(node: ast.ClassDef) -> set[str]:
    """Methods that a class of the library on which this one builds says something about."""
    bases = [classes()[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes()]
    own = {method.name for base in bases for method in public(base.body) if ast.get_docstring(method)}
    return own.union(*map(told_by_bases, bases))


@pytest.mark.parametrize("path", sorted(LIBRARY.rglob("*.py")), ids=lambda path: str(path.relative_to(LIBRARY)))
def test_modules_and_all_that_is_public_in_them_say_what_they_are(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree) or not tree.body
    mute = [node.name for node in public(tree.body) if not ast.get_docstring(node)]
    for node in public(tree.body):
        if isinstance(node, ast.ClassDef):
            mute += [f"{node.name}.{method.name}" for method in public(node.body)
                     if not ast.get_docstring(method) and method.name not in told_by_bases(node)]
    assert not mute
