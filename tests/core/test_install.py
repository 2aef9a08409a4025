"""The workbench installed for itself, as by a wheel: its data and notebooks come along, its imports are declared, and
what only caches something finds a folder."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from spoc_lib.core import caches

ROOT = Path(__file__).resolve().parents[2]


def imported(tree: ast.AST) -> set[str]:
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return {name.partition(".")[0] for name in names}


def test_every_package_that_is_imported_is_declared():
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "spoc_lib").rglob("*.py")]
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        sources += ["".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
                    if cell["cell_type"] == "code"]
    used = set().union(*(imported(ast.parse(source)) for source in sources))
    used -= {*sys.stdlib_module_names, "spoc_lib"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {canonicalize_name(Requirement(line).name) for line in
                [*project["dependencies"], *project["optional-dependencies"]["interop"]]}
    packages = metadata.packages_distributions()
    missing = {name for name in used if not declared & {canonicalize_name(one) for one in packages.get(name, [name])}}
    assert not missing, f"{sorted(missing)}: imported, and not declared in pyproject.toml"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The packages as a wheel would hold them, far from the checkout."""
    place = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-W", "ignore", "-c", "from setuptools import setup; setup()", "-q", "build",
                    "--build-base", place / "work", "build_py", "-d", place / "lib"], cwd=ROOT, check=True,
                   capture_output=True, timeout=120)
    return place / "lib"


def test_a_wheel_takes_data_and_notebooks_along(installed):
    def shipped(folder: Path, *patterns: str) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for pattern in patterns
                for path in folder.rglob(pattern)}

    assert shipped(installed / "spoc_lib/_data", "*.yaml", "LICENSES") == shipped(ROOT / "data", "*.yaml", "LICENSES")
    assert shipped(installed / "spoc_lib/_notebooks", "0*.ipynb") == shipped(ROOT / "notebooks", "0*.ipynb")
    assert (installed / "spoc_lib/report/page.css").is_file()


def test_an_installed_workbench_finds_its_data_and_writes_below_the_current_folder(installed, tmp_path):
    code = ("import json, sys; import spoc_lib; from spoc_lib import config; from spoc_lib.pipeline.runs import Run;"
            "from spoc_lib.pipeline.execute import notebooks_dir; from spoc_lib.report.provenance import git_state;"
            "run = Run.create('x', 'mine'); c = config.load_cluster('vllm-cpu');"
            "print(json.dumps([spoc_lib.__file__, config.names('clusters'), str(run.folder), git_state(),"
            "c.engine.command[0], len(list(notebooks_dir().glob('*.ipynb')))]))")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPOC_")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                          env=environment | {"PYTHONPATH": str(installed)})
    assert done.returncode == 0, done.stderr
    where, clusters, run, git, program, notebooks = json.loads(done.stdout)
    assert where.startswith(str(installed)) and clusters == ["sim-2xh200", "sim-4xh100", "vllm-cpu"]
    assert (run, git, notebooks) == (str(tmp_path / "outputs/mine"), "no git", 6)
    assert program == str(tmp_path / ".venv-vllm/bin/python")


def test_caches_find_a_folder_without_a_home(tmp_path, monkeypatch):
    for name in ("SPOC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    caches._found.cache_clear()
    assert caches.cache_dir() == tmp_path / "home/.cache/spoc"
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("HOME", str(blocked / "none"))
    caches._found.cache_clear()
    mine = caches.cache_dir()
    assert mine == tmp_path / f"spoc-cache-{os.getuid()}" and mine.stat().st_mode & 0o777 == 0o700
    mine.chmod(0o777)  # anybody's: not trusted with code that will be run
    caches._found.cache_clear()
    assert caches.cache_dir() != mine and caches.cache_dir().parent == tmp_path
    monkeypatch.setenv("SPOC_CACHE", str(tmp_path / "said"))
    assert caches.cache_dir() == tmp_path / "said"
    caches._found.cache_clear()


def test_compiled_code_goes_to_the_caches_where_its_own_folder_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setenv("SPOC_CACHE", str(tmp_path))
    monkeypatch.setenv("NUMBA_CACHE_DIR", "said")
    monkeypatch.setattr(caches, "PACKAGE", tmp_path / "gone")
    caches.place_compiled_code()
    assert os.environ["NUMBA_CACHE_DIR"] == "said"
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    caches.place_compiled_code()
    assert os.environ["NUMBA_CACHE_DIR"] == str(tmp_path / "numba")


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
                                         {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1"}])
def test_a_terminal_of_few_letters_gets_what_it_can_show(environment, tmp_path):
    (tmp_path / "names.txt").write_text("k\u00e4rnel_\u03b1\nnccl_\U0001f600\n", encoding="utf-8")

    def spoc(*words: str) -> bytes:
        done = subprocess.run([sys.executable, "-m", "spoc_lib", "nsight", *words], cwd=tmp_path, capture_output=True,
                              env=os.environ | environment, timeout=120)
        assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
        return done.stdout

    assert b"rnel_?" in spoc("classify", "names.txt")
    assert "k\u00e4rnel_\u03b1" in json.loads(spoc("classify", "names.txt", "--json", "-").decode("ascii"))
    assert b"--range" in spoc("decompose", "--help")
