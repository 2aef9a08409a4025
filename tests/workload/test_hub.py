"""Hub sets over real HTTP: a stand-in hub on this machine speaks the hub's protocol, `datasets` streams from it.

The imports run in a process of their own, for the hub's address is read when `datasets` is imported.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class StandInHub(ThreadingHTTPServer):
    """Dataset repositories: `files` by "owner/name/path". `sent` counts body bytes by file; a file in `breaks` loses
    its connection after so many bytes, every time."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Repository)
        self.files: dict[str, bytes] = {}
        self.sent: dict[str, int] = {}
        self.breaks: dict[str, int] = {}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Repository(BaseHTTPRequestHandler):
    """The part of the hub's API that streaming needs: revision, tree, paths-info, resolve with ranges."""

    protocol_version = "HTTP/1.1"
    server: StandInHub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if found := re.fullmatch(r"/datasets/(.+?/.+?)/resolve/[^/]+/(.+)", path):
            self._file("/".join(found.groups()))
        elif found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(/revision/[^/]+)?", path):
            self._json({"id": found[1], "sha": COMMIT, "private": False, "gated": False, "disabled": False, "tags": [],
                        "siblings": [{"rfilename": file} for file in self._below(found[1] + "/")]})
        elif found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/[^/]+(/.+)?", path):
            self._tree(found[1] + "/", (found[2] or "").strip("/"))
        else:
            self._absent("RepoNotFound")

    def do_POST(self) -> None:
        repository = "/".join(self.path.split("/")[3:5]) + "/"
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
        self._json([self._entry(repository, file) for file in asked if repository + file in self.server.files])

    def _below(self, prefix: str) -> list[str]:
        return [file.removeprefix(prefix) for file in self.server.files if file.startswith(prefix)]

    def _tree(self, repository: str, folder: str) -> None:
        """Files and folders right below a folder."""
        inside = f"{folder}/" if folder else ""
        below = self._below(repository + inside)
        folders = sorted({inside + file.split("/")[0] for file in below if "/" in file})
        entries = [{"type": "directory", "oid": "b" * 40, "size": 0, "path": name} for name in folders]
        entries += [self._entry(repository, inside + file) for file in below if "/" not in file]
        if entries:
            self._json(entries)
        else:
            self._absent("EntryNotFound")

    def _entry(self, repository: str, file: str) -> dict:
        return {"type": "file", "oid": "a" * 40, "size": len(self.server.files[repository + file]), "path": file}

    def _absent(self, code: str) -> None:
        self._json({"error": code}, 404, {"X-Error-Code": code, "X-Repo-Commit": COMMIT})

    def _json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self._head(status, {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _file(self, file: str) -> None:
        content = self.server.files.get(file)
        if content is None:
            self._absent("EntryNotFound" if self._below("/".join(file.split("/")[:2]) + "/") else "RepoNotFound")
            return
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(span[1]) if span else 0
        end = min(len(content), int(span[2]) + 1 if span and span[2] else len(content))
        self._head(206 if span else 200, {
            "ETag": f'"{len(content)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes",
            "Content-Length": str(end - start), "Content-Range": f"bytes {start}-{end - 1}/{len(content)}"})
        if self.command == "HEAD":
            return
        stop = min(end, self.server.breaks.get(file, end))
        for at in range(start, stop, 1 << 16):
            piece = content[at: min(stop, at + (1 << 16))]
            self.wfile.write(piece)
            self.server.sent[file] = self.server.sent.get(file, 0) + len(piece)
        if stop < end:
            self.close_connection = True
            self.connection.close()

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Silent: what was sent is counted instead."""


#: `spoc workload import` with the arguments of each line, without the pauses between tries: the tries themselves are
#: those of the hub's own clients.
CHILD = """
import contextlib, io, json, sys, time
from spoc_lib.cli import main
time.sleep = lambda seconds: None
for line in sys.stdin:
    sys.argv = ["spoc", "workload", "import", *json.loads(line)]
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
    print(json.dumps([status, out.getvalue(), err.getvalue()]), flush=True)
"""


@pytest.fixture(scope="module")
def hub():
    server = StandInHub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def spoc(hub, tmp_path_factory):
    """`spoc(arguments…)`: (exit status, standard output, standard error) of an import with this hub."""
    folder = tmp_path_factory.mktemp("hub")
    local = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "cache"), "NO_PROXY": "127.0.0.1",
             "no_proxy": "127.0.0.1"}
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          stderr=subprocess.DEVNULL, cwd=folder, env={**os.environ, **local}) as child:
        def run(*arguments):
            child.stdin.write(json.dumps([str(argument) for argument in arguments]) + "\n")
            child.stdin.flush()
            return json.loads(child.stdout.readline())

        yield run
        child.stdin.close()


def record(number: int, size: int) -> dict:
    """A session of two requests; beside it about `size` bytes that no import reads."""
    return {"messages": [{"role": "system", "content": "You fix code."},
                         {"role": "user", "content": f"issue {number}"},
                         {"role": "assistant", "content": "Look."}, {"role": "user", "content": "a.py"},
                         {"role": "assistant", "content": "Done."}],
            "patch": f"{number:08d}" * (size // 8)}


def json_lines(records: int, size: int) -> bytes:
    return (json.dumps(record(0, size)).encode() + b"\n") * records


def parquet(records: int, size: int, group: int) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([record(0, size)] * records), buffer, row_group_size=group,
                   compression="none", use_dictionary=False)
    return buffer.getvalue()


def sentence(result: list) -> str:
    """The one sentence of a refusal; the hub's clients may have warned before it."""
    status, _, said = result
    assert status == 2 and "Traceback" not in said, said
    lines = [line for line in said.splitlines() if line.startswith("spoc: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_set_is_streamed(hub, spoc, form):
    """Of four shards only the first is touched, and of that only its beginning."""
    shard = json_lines(1000, 50_000) if form == "jsonl" else parquet(1600, 50_000, 50)
    hub.files = {f"acme/{form}/data/train-{k:05d}-of-00004.{form}": shard for k in range(4)}
    hub.sent.clear()
    status, out, said = spoc(f"hub:acme/{form}", "--limit", 30, "--json", "-")
    assert status == 0, said
    found = json.loads(out)
    assert (found["sessions"], found["turns"], found["skipped"]) == (30, 60, [])
    assert list(hub.sent) == [f"acme/{form}/data/train-00000-of-00004.{form}"]
    assert sum(hub.sent.values()) < 0.75 * len(shard), (hub.sent, len(shard))


def test_a_split_by_its_name_without_a_prefix(hub, spoc):
    hub.files = {"acme/split/data/test-00000.jsonl": json_lines(40, 100)}
    status, out, _ = spoc("acme/split:test", "--json", "-")
    assert status == 0 and json.loads(out)["sessions"] == 40
    assert "Available splits: ['test']" in sentence(spoc("acme/split:train"))


def test_a_set_that_the_hub_does_not_have(hub, spoc):
    assert "doesn't exist" in sentence(spoc("acme/absent"))


def test_a_connection_that_breaks_at_once(hub, spoc):
    hub.files = {"acme/broken/data/train-00000.jsonl": json_lines(40, 1000)}
    hub.breaks = {"acme/broken/data/train-00000.jsonl": 2000}
    assert "peer closed connection" in sentence(spoc("acme/broken"))


def test_a_connection_that_breaks_later(hub, spoc):
    """What came before is kept, and what is missing is said."""
    hub.files = {"acme/breaking/data/train-00000.jsonl": json_lines(200, 100_000)}
    hub.breaks = {"acme/breaking/data/train-00000.jsonl": 16_000_000}
    status, out, said = spoc("acme/breaking", "--json", "-")
    assert status == 0 and "Traceback" not in said
    found = json.loads(out)
    assert 50 < found["sessions"] < 200
    assert found["skipped"][-1]["record"] == f"acme/breaking record {found['sessions']} and all after it"
    assert "peer closed connection" in found["skipped"][-1]["reason"]


def test_a_broken_line_spoils_no_other(hub, spoc):
    good = json_lines(5, 100)
    hub.files = {"acme/lines/data/train-00000.jsonl": good + b'{"messages": [{"role"\n' + b"\xff\xfe\n" + good}
    hub.breaks = {}
    status, out, said = spoc("acme/lines", "--json", "-")
    assert status == 0, said
    found = json.loads(out)
    assert found["sessions"] == 10
    assert [one["record"] for one in found["skipped"]] == ["acme/lines record 5", "acme/lines record 6"]
    assert all("not valid JSON" in one["reason"] for one in found["skipped"])
