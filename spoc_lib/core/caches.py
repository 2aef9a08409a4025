"""Where caches lie: a folder that this user may write, also without a home and where the code is somebody else's."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent


def cache_dir() -> Path:
    """`SPOC_CACHE`, else `spoc` in the user's cache folder, else (no home, or one that cannot be written) a folder of
    this user's own among the temporary files."""
    own = os.environ.get("SPOC_CACHE")
    return Path(os.path.expanduser(own)) if own else _found(os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"))


@cache
def _found(caches: str | None, home: str | None) -> Path:
    wanted = Path(caches or os.path.join(os.path.expanduser("~"), ".cache")) / "spoc"
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        if os.access(wanted, os.W_OK | os.X_OK):
            return wanted
    except OSError:
        pass
    shared = Path(tempfile.gettempdir()) / f"spoc-cache-{os.getuid()}"
    try:
        shared.mkdir(mode=0o700, exist_ok=True)
        facts = shared.lstat()
        if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022:
            return shared
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="spoc-cache-"))


def place_compiled_code() -> None:
    """Numba keeps what it compiled beside the source and fails where it cannot: then it goes into `cache_dir`, for this
    process and its children."""
    if not os.environ.get("NUMBA_CACHE_DIR") and not os.access(PACKAGE, os.W_OK):
        os.environ["NUMBA_CACHE_DIR"] = str(cache_dir() / "numba")


@contextlib.contextmanager
def one_compiles(name: str) -> Iterator[None]:
    """Of several processes that need the compiled code `name` only one compiles it; the others wait here, and then
    load it from numba's cache. Held by the kernel, so that a killed process leaves no lock."""
    folder = cache_dir() / "compiling"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
