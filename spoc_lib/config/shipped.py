"""Where the files that ship lie, and how a file is meant: by a name in data/ or by its path."""

from __future__ import annotations

import os
from pathlib import Path

from spoc_lib.core.errors import InputError
from spoc_lib.core.yamlfile import SHORT

PACKAGE = Path(__file__).resolve().parent.parent
#: None where the package is installed for itself.
CHECKOUT = PACKAGE.parent if (PACKAGE.parent / "data" / "clusters").is_dir() else None


def shipped_dir(name: str) -> Path:
    """`data` or `notebooks` as they ship: the checkout's, or the installed package's own (links in the checkout, so
    that a wheel takes them along)."""
    return CHECKOUT / name if CHECKOUT else PACKAGE / f"_{name}"


def data_dir() -> Path:
    """The project's `data/` folder; `SPOC_DATA` overrides it."""
    return Path(os.environ.get("SPOC_DATA") or shipped_dir("data"))


def data_file(*parts: str) -> Path:
    """One file of `data_dir`, the shipped one where `SPOC_DATA` has none."""
    own = data_dir().joinpath(*parts)
    return own if own.is_file() else shipped_dir("data").joinpath(*parts)


def project_dir() -> Path:
    """The folder above `data/`, where `outputs/` lie; for a package that is installed for itself the current one."""
    own = os.environ.get("SPOC_DATA")
    return Path(own).absolute().parent if own else CHECKOUT or Path.cwd()


def names(folder: str) -> list[str]:
    """Names of what ships in data/<folder>."""
    return sorted(path.stem for path in (data_dir() / folder).glob("*.yaml"))


def is_path(name_or_path: str) -> bool:
    """Whether a file is meant by its path."""
    return name_or_path.endswith((".yaml", ".yml")) or os.sep in name_or_path


def name_of(name_or_path: str) -> str:
    """What a file is called: by its name, or by that of a path's last part."""
    return Path(name_or_path).stem if is_path(name_or_path) else name_or_path


def from_folder_of(file: Path, path: str) -> str:
    """The whole path of `path` as it stands in `file`: meant from that file's folder."""
    return os.path.normpath(file.parent.resolve() / os.path.expanduser(path))


def beside(file: Path, name_or_path: str) -> str:
    """As `from_folder_of`; a name stays a name."""
    return from_folder_of(file, name_or_path) if is_path(name_or_path) else name_or_path


def find(folder: str, name_or_path: str, what: str) -> Path:
    """The file that `name_or_path` means: a path to YAML, or a name in data/<folder>."""
    path = Path(name_or_path) if is_path(name_or_path) else data_dir() / folder / f"{name_or_path}.yaml"
    if not os.path.isfile(path):  # False, too, for a name that no file can have
        raise InputError(
            f"unknown-{what}",
            f"unknown {what} {SHORT.repr(name_or_path)}: use one of {', '.join(names(folder))} or the path of a YAML "
            "file",
        )
    return path
