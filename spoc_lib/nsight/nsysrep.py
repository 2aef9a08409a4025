"""`.nsys-rep` and left-over `.qdstrm` files: turned into SQLite by the user's own nsys, beside nothing of theirs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from spoc_lib.core.errors import InputError


def find_nsys() -> str | None:
    """Path of the `nsys` program, or None."""
    return shutil.which("nsys")


def find_importer() -> str | None:
    """Path of QdstrmImporter: on the PATH or in the host folder beside nsys; None when there is none."""
    found = shutil.which("QdstrmImporter")
    if found:
        return found
    nsys = find_nsys()
    roots = [Path(nsys).resolve().parent.parent] if nsys else []
    roots += [Path("/usr/lib/nsight-systems"), *Path("/opt/nvidia/nsight-systems").glob("*")]
    for root in roots:
        for importer in sorted(root.glob("host*/QdstrmImporter")):
            return str(importer)
    return None


def run_tool(command: list[str], what: str, timeout_s: float = 1800, environment: dict[str, str] | None = None) -> None:
    """Run one of nsys' programs to its end, in `environment` (default: ours); InputError with its last words where it
    fails."""
    try:
        done = subprocess.run(command, capture_output=True,
                              encoding="utf-8", errors="replace", timeout=timeout_s, check=False, env=environment)
    except subprocess.TimeoutExpired as error:
        raise InputError("nsys-failed", f"{what} did not end within {timeout_s:g} s") from error
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise InputError("nsys-failed", f"{what} failed: {lines[-1]}")


def convert_qdstrm(path: Path, folder: Path) -> Path:
    """The `.nsys-rep` that QdstrmImporter makes of a left-over `.qdstrm`, in `folder`."""
    importer = find_importer()
    if importer is None:
        raise InputError("no-importer", f"{path} is an unfinished capture, and QdstrmImporter (in the host folder of "
                         f"Nsight Systems) is not on this machine: convert it where nsys is installed")
    target = folder / f"{path.stem}.nsys-rep"
    run_tool([importer, "--input-file", str(path), "--output-file", str(target)], f"the conversion of {path}")
    return target


def export_sqlite(file: Path, path: Path, folder: Path) -> Path:
    """The SQLite export of the report `file`, written into `folder`. path: what the user gave. InputError when nsys is
    absent or refuses."""
    nsys = find_nsys()
    if nsys is None:
        raise InputError("no-nsys", f"{path} is a report of Nsight Systems, which nsys must read, and nsys is not on "
                         f"this machine: run 'nsys export --type sqlite {path.name}' where it is, and give the .sqlite "
                         f"file")
    if file.suffix not in (".nsys-rep", ".qdrep"):  # nsys goes by the name
        report = folder / f"{file.stem}.nsys-rep"
        report.symlink_to(file.resolve())
        file = report
    target = folder / f"{file.stem}.sqlite"
    run_tool([nsys, "export", "--type", "sqlite", "--force-overwrite", "true", "--output", str(target), str(file)],
             f"the export of {path}")
    return target
