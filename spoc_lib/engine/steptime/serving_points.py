"""Published serving measurements: one closed-loop benchmark a point, and the requests that it sent.

The benchmark: `concurrency` requests at any time, the next one sent when one ends, ten times that many in all; prompt
and output lengths uniform in [0.8, 1] × (isl, osl); prefix caching off, max_num_batched_tokens 8192, memory
utilisation 0.9, max_num_seqs = concurrency; mean TTFT and mean TPOT over all requests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd

from spoc_lib.config import names
from spoc_lib.core.errors import InputError

MAX_NUM_BATCHED_TOKENS = 8192
GPU_MEMORY_UTILIZATION = 0.9
PROMPTS_PER_SLOT = 10
SHORTEST = 0.8
#: The first release whose step overhead the model takes as today's.
CURRENT_RELEASE = (0, 18)

COLUMNS = ("system", "isl", "osl", "tp_size", "conc", "ttft_ms_mean", "tpot_ms")

NOT_MODELLED = {"moe_ep_size": "expert parallelism", "pp_size": "pipeline parallelism",
                "attention_dp_size": "data parallelism"}


@dataclass(frozen=True, slots=True)
class ServingPoint:
    """One measured point; times in seconds. `release`: the server's version as stated, '' where it is not."""

    gpu: str
    gpu_count: int
    prompt: int
    output: int
    concurrency: int
    ttft_s: float
    tpot_s: float
    release: str = ""

    @property
    def earlier_release(self) -> bool:
        """Whether the server was older than `CURRENT_RELEASE`, or of unstated release."""
        version = re.match(r"(\d+)\.(\d+)", self.release)
        return version is None or (int(version[1]), int(version[2])) < CURRENT_RELEASE

    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Prompt and output tokens of each request, int64, drawn as vLLM's random data set draws them: uniform
        integers from NumPy's legacy generator of seed 0, all prompts first."""
        return _lengths(self.prompt, self.output, PROMPTS_PER_SLOT * self.concurrency)


@lru_cache(maxsize=256)
def _lengths(prompt: int, output: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(0)
    drawn = [random.randint(max(1, int(size * SHORTEST)), size + 1, size=count).astype(np.int64)
             for size in (prompt, output)]
    for one in drawn:
        one.setflags(write=False)
    return drawn[0], drawn[1]


def read_points(path: str | Path) -> list[ServingPoint]:
    """Serving points from a CSV with `COLUMNS` and optionally backend_version; times in ms in the file.

    InputError in one sentence for a missing file or column, an unknown system, or a number that makes no sense.
    """
    path = Path(path)
    try:
        table = pd.read_csv(path, dtype={"backend_version": str})
    except OSError as error:
        raise InputError("unreadable", f"cannot read the serving points {path}: {error.strerror}") from error
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise InputError("bad-csv", f"the serving points {path} are not valid CSV: {str(error).strip()}") from error
    missing = [name for name in COLUMNS if name not in table.columns]
    if missing:
        raise InputError("missing-column", f"the serving points {path} lack the column '{missing[0]}': needed are "
                         f"{', '.join(COLUMNS)}")
    if table.empty:
        raise InputError("no-points", f"the serving points {path} hold no row")
    for column, what in NOT_MODELLED.items():
        if column in table.columns and (pd.to_numeric(table[column], errors="coerce") > 1).any():
            raise InputError("bad-field", f"{path}: column '{column}': {what} is not modelled; leave those rows out")
    if "model" in table.columns and table["model"].nunique() > 1:
        raise InputError("bad-field", f"{path}: column 'model': points of {table['model'].nunique()} models stand in "
                         "it; keep the rows of one")
    return [_point(row, f"{path} row {number}") for number, row in enumerate(table.to_dict("records"), start=2)]


def _point(row: dict, where: str) -> ServingPoint:
    gpu = str(row["system"]).strip().replace("_", "-")
    if gpu not in names("gpus"):
        raise InputError("unknown-system", f"{where}: unknown system '{row['system']}': use one of "
                         f"{', '.join(name.replace('-', '_') for name in names('gpus'))}")
    gpu_count, prompt, output, concurrency = (
        _number(row, name, where, whole=True) for name in ("tp_size", "isl", "osl", "conc"))
    ttft_s, tpot_s = (_number(row, name, where) / 1e3 for name in ("ttft_ms_mean", "tpot_ms"))
    if concurrency > MAX_NUM_BATCHED_TOKENS:
        raise InputError("bad-field", f"{where}: column 'conc': {concurrency} exceeds max_num_batched_tokens "
                         f"({MAX_NUM_BATCHED_TOKENS})")
    if output < 2:
        raise InputError("bad-field", f"{where}: column 'osl': TPOT needs at least 2 output tokens")
    release = row.get("backend_version")
    return ServingPoint(gpu, gpu_count, prompt, output, concurrency, ttft_s, tpot_s,
                        release="" if pd.isna(release) else str(release))


def _number(row: dict, name: str, where: str, whole: bool = False):
    value = pd.to_numeric(row[name], errors="coerce")
    if not (np.isfinite(value) and value > 0 and (not whole or value == int(value))):
        raise InputError("bad-field", f"{where}: column '{name}': '{row[name]}' is not a positive "
                         f"{'whole ' if whole else ''}number")
    return int(value) if whole else float(value)


def groups(points: Sequence[ServingPoint]) -> dict[str, list]:
    """Labels for cross-validation, one a point: by GPU count, GPU, concurrency, and lengths."""
    return {
        "held_out_gpu_count": [p.gpu_count for p in points],
        "held_out_gpu": [p.gpu for p in points],
        "held_out_concurrency": [p.concurrency for p in points],
        "held_out_lengths": [f"{p.prompt}/{p.output}" for p in points],
    }
