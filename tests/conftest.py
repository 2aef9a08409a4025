"""Fixtures of the whole suite."""

from __future__ import annotations

import os
import re
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items):
    """Files with slow tests first: where files run side by side, nobody waits in the end for one that began last."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def outputs_of_tests(tmp_path_factory):
    """What a test writes by default goes into a folder of the suite's own, never into the user's outputs/."""
    os.environ.setdefault("SPOC_OUTPUTS", str(tmp_path_factory.mktemp("outputs")))


@pytest.fixture(scope="session")
def shared():
    """`shared("data/…")`: a path in the folder of real recordings beside the checkout; skips where it is absent."""
    base = (ROOT / os.environ.get("SPOC_SHARED", "../shared")).resolve()

    def find(relative: str) -> Path:
        path = base / relative
        if not path.exists():
            pytest.skip(f"the real recording {relative} is not beside this checkout")
        return path

    return find


@pytest.fixture(scope="session")
def unframed():
    """`unframed(page's text)`: its figures that no question opens or no finding closes, by their ids."""
    marks = re.compile(r'<p class="spoc-question">[^<]|id="(figure-\d+)"|<div class="spoc-finding \w+"><p>[^<]')

    def find(text: str) -> list[str]:
        found = [(mark.group(1), mark.group().split('"')[1][:10]) for mark in marks.finditer(text)]
        kinds = [None, *(kind for _, kind in found), None]
        return [figure for at, (figure, _) in enumerate(found, 1)
                if figure and (kinds[at - 1], kinds[at + 1]) != ("spoc-quest", "spoc-findi")]

    return find


@pytest.fixture
def here(monkeypatch, capsys):
    """`here("engine", "accuracy", …)`: what `spoc engine accuracy …` answers, by its own entry point in this process:
    a new Python for each question takes longer than the answer."""
    from spoc_lib.cli import main

    def ask(*words: object) -> subprocess.CompletedProcess:
        command = ["spoc", *map(str, words)]
        monkeypatch.setattr(sys, "argv", command)
        capsys.readouterr()  # what was said before is not the answer
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return subprocess.CompletedProcess(command, end.value.code or 0, said.out, said.err)

    return ask


@pytest.fixture
def open_page(tmp_path):
    """`open_page(path)`: (DOM after scripts ran, browser's own log) from headless Chromium with no network."""
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")

    def look(page: Path) -> tuple[str, str]:
        done = subprocess.run(
            [
                chromium,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--host-resolver-rules=MAP * ~NOTFOUND",
                f"--user-data-dir={tmp_path / 'profile'}",
                "--enable-logging=stderr",
                "--virtual-time-budget=10000",
                "--dump-dom",
                page.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        return done.stdout, done.stderr

    return look


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    """(a TLS server's context, the file of the authority that vouches for it): for 127.0.0.1, unknown to the system."""
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
               "-addext", "subjectAltName=IP:127.0.0.1",
               "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("openssl is not installed: no certificate for TLS")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context, folder / "cert.pem"
