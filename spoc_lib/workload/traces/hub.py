"""Records of a hub set, streamed: only what is asked for comes over the network, nothing is kept on disk."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from spoc_lib.core.errors import InputError

HUB = "hub:"
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:\w+)?")
#: Files of one JSON value a line.
LINES = re.compile(r"\.(jsonl|ndjson)(\.(gz|bz2|xz|zst))?$")
#: Tries of one read, each with the hub client's own five: a minute of patience where `datasets` would have ten.
TRIES = 2
_INSTEAD = "or save it to a jsonl or parquet file and import that"


def records(dataset: str, split: str, limit: int | None) -> Iterator[Any]:
    """The first `limit` records of a split (None: all); of JSON lines each as its bytes, so that a broken one spoils
    no other. InputError when the hub is not reachable, does not know the set, or breaks off."""
    _reach(dataset)
    import datasets

    datasets.config.STREAMING_OPEN_MAX_RETRIES = datasets.config.STREAMING_READ_MAX_RETRIES = TRIES
    try:
        files = (datasets.load_dataset_builder(dataset).config.data_files or {}).get(split)
        if files and all(LINES.search(name) for name in files):
            yield from islice(_lines(files), limit)
        else:
            yield from islice(datasets.load_dataset(dataset, split=split, streaming=True), limit)
    except Exception as error:  # whatever `datasets`, its readers or the network raise: to us the source has failed
        raise InputError("hub-failed", f"the hub set '{dataset}' (split {split}) cannot be read: {_told(error)}; check "
                         f"name, split and network, {_INSTEAD}") from error


def _lines(files: Sequence[str]) -> Iterator[bytes]:
    """The lines of files on the hub, without the empty ones, read ahead by blocks of some MB."""
    import fsspec

    for name in files:
        with fsspec.open(name, "rb", compression="infer") as handle:
            yield from (line for line in handle if line.strip())


def _reach(dataset: str) -> None:
    """Call the hub (or the proxy before it) briefly: its own client would try again for half a minute."""
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    proxy = None if proxy_bypass(endpoint.hostname or "") else getproxies().get(endpoint.scheme)
    if proxy:
        endpoint = urlsplit(proxy)
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        why = "HF_HUB_OFFLINE is set"
    else:
        try:
            port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
            socket.create_connection((endpoint.hostname, port), timeout=5).close()
            return
        except OSError as error:
            why = f"{endpoint.hostname} is not reachable ({error.strerror or error})"
    raise InputError("hub-offline", f"'{dataset}' is no file here, and as a hub set it cannot be read: {why}; go "
                     f"online, {_INSTEAD}")


def _told(error: BaseException) -> str:
    """The first line of the error that began it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
