"""Parameters from measured kernel tables: the start of the shipped calibration, made once.

    python tools/kernel_tables.py FOLDER --out start.steptime.yaml
    spoc engine calibrate --start start.steptime.yaml --points serving_points.csv --out FILE

A folder of CSVs, one kernel family a file (by the end of its name): `…_decode_attention_ms.csv`,
`…_prefill_attention_ms.csv`, `…_allreduce_ms.csv`, `…_gemm_bf16_ms.csv`, `…_moe_ms.csv`; times in ms. Each family
fixes its own parameters, by least squares on the logarithm of time. The model's formulas are what is fitted, not the
tables' numbers, so what a calibration file holds afterwards is a handful of efficiencies and latencies.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from spoc_lib.config import GpuSpec, ModelSpec, load_gpu, load_model, names
from spoc_lib.core.errors import InputError, SpocError
from spoc_lib.engine.steptime import calibration_file
from spoc_lib.engine.steptime.calibration_file import Calibration
from spoc_lib.engine.steptime.kernels import (
    Shard,
    allreduce_seconds,
    attention_coefficients,
    expert_seconds,
    gemm_seconds,
    route_seconds,
)
from spoc_lib.engine.steptime.parameters import ROOFLINE, Parameters, scaled

#: A step's tokens stay below this; larger rows of the tables are left out.
MOST_TOKENS = 16384
#: Token counts at which GEMMs are compared: evenly spread on a logarithmic scale, where the table crowds.
GEMM_TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]

Predict = Callable[[pd.DataFrame, Callable[[int], Shard]], np.ndarray]


def _attention(rows: pd.DataFrame, shard: Callable[[int], Shard], prefill: bool) -> np.ndarray:
    heads = int(rows["num_heads"].iloc[0])
    one = shard(shard(1).model.heads // heads)
    c, model = attention_coefficients(one), one.model
    window = int(rows["window_size"].iloc[0])
    layers = model.sliding_layers if window else one.full_layers
    batch = rows["batch_size"].to_numpy(float)
    fixed = c["step"] / model.layers
    if prefill:
        new = rows["isl"].to_numpy(float)
        seen = np.minimum(new, window) if window else new
        pairs = batch * (seen * (seen + 1) / 2 + (new - seen) * window)
        each = c["prefill_window_pairs" if window else "prefill_pairs"] / max(layers, 1)
        return fixed + c["mixed"] / model.layers + batch * new * c["prefill_tokens"] / model.layers + pairs * each
    context = rows["step"].to_numpy(float) + 1
    context = np.minimum(context, window) if window else context
    each = c["decode_window" if window else "decode_context"] / max(layers, 1)
    return fixed + batch * c["decodes"] / model.layers + batch * context * each


def _decode(rows: pd.DataFrame, shard: Callable[[int], Shard]) -> np.ndarray:
    return _attention(rows, shard, prefill=False)


def _prefill(rows: pd.DataFrame, shard: Callable[[int], Shard]) -> np.ndarray:
    return _attention(rows, shard, prefill=True)


def _allreduce(rows: pd.DataFrame, shard: Callable[[int], Shard]) -> np.ndarray:
    return allreduce_seconds(shard(int(rows["num_gpus"].iloc[0])), rows["message_size"].to_numpy(float))


def _gemm(rows: pd.DataFrame, shard: Callable[[int], Shard]) -> np.ndarray:
    return gemm_seconds(shard(1), *(rows[name].to_numpy(float) for name in ("m", "k", "n")))


def _moe(rows: pd.DataFrame, shard: Callable[[int], Shard]) -> np.ndarray:
    one, tokens = shard(int(rows["moe_tp_size"].iloc[0])), rows["num_tokens"].to_numpy(float)
    return expert_seconds(one, tokens) + route_seconds(one, tokens)


#: file suffix → (prediction of one group of rows, columns that group them, parameters that the family fixes)
FAMILIES: dict[str, tuple[Predict, tuple[str, ...], tuple[str, ...]]] = {
    "decode_attention": (_decode, ("num_heads", "window_size"), (
        "attention_launch_us", "decode_request_ns", "decode_request_fixed_ns", "decode_read_efficiency",
        "decode_read_tb_per_s")),
    "prefill_attention": (_prefill, ("num_heads", "window_size"), (
        "attention_prefill_launch_us", "prefill_token_ns", "prefill_compute_efficiency",
        "window_compute_efficiency")),
    "allreduce": (_allreduce, ("num_gpus",), (
        "allreduce_latency_us", "allreduce_rank_us", "allreduce_efficiency", "allreduce_efficiency_gain")),
    "gemm_bf16": (_gemm, (), ("gemm_read_efficiency", "gemm_compute_efficiency", "gemm_launch_us")),
    "moe": (_moe, ("moe_tp_size",), (
        "expert_unpack_tb_per_s", "expert_compute_efficiency", "expert_launch_us", "expert_padding_rows",
        "expert_tile_rows", "expert_skew", "route_passes")),
}


def fit_tables(folder: str | Path, model: ModelSpec, start: Parameters) -> tuple[Parameters, dict[str, dict]]:
    """`start` with the parameters that the tables in `folder` determine, and by family: rows, median and 90th
    percentile of the absolute error in percent. InputError when the folder holds no table or a faulty one."""
    parameters, quality = start, {}
    for family, (predict, by, fitted) in FAMILIES.items():
        for path in sorted(Path(folder).glob(f"*_{family}_ms.csv")):
            parts = _groups(path, family, by)
            parameters, error = _fit_family(parts, predict, fitted, model, parameters)
            quality[family] = {"rows": int(sum(len(rows) for _, rows in parts)),
                               "median_percent": float(np.median(error)),
                               "p90_percent": float(np.quantile(error, 0.9))}
    if not quality:
        raise InputError("no-tables", f"{folder} holds no kernel table: its files should end in "
                         f"{', '.join(f'_{family}_ms.csv' for family in FAMILIES)}")
    return parameters, quality


def _groups(path: Path, family: str, by: Sequence[str]) -> list[tuple[GpuSpec, pd.DataFrame]]:
    """The rows that a step can meet, one part a GPU and a value of the columns `by`."""
    try:
        rows = pd.read_csv(path)
        rows = _usable(rows, family)
        parts = rows.groupby(["system", *by], sort=True)
        return [(_gpu(str(key[0]), path), part) for key, part in parts]
    except KeyError as error:
        raise InputError("missing-column", f"the kernel table {path} lacks the column {error}") from error
    except (OSError, ValueError) as error:
        raise InputError("bad-csv", f"cannot read the kernel table {path}: {error}") from error


def _gpu(system: str, path: Path) -> GpuSpec:
    name = system.replace("_", "-")
    if name not in names("gpus"):
        raise InputError("unknown-system", f"{path}: unknown system '{system}': use one of "
                         f"{', '.join(names('gpus'))}")
    return load_gpu(name)


def _usable(rows: pd.DataFrame, family: str) -> pd.DataFrame:
    if family == "allreduce":  # decode and captured chunks run in CUDA graphs
        return rows[rows["kernel_source"].str.endswith("graph") & (rows["message_size"] <= 2**27)]
    if family == "moe":  # balanced routing hits more experts than real routing does
        return rows[~rows["distribution"].eq("balanced") & (rows["num_tokens"] <= MOST_TOKENS)]
    if family == "gemm_bf16":  # smaller weights stay in the L2 cache of a repeated measurement
        return rows[rows["m"].isin(GEMM_TOKENS) & (rows["n"] * rows["k"] >= 12_000_000)]
    if family == "prefill_attention":
        return rows[(rows["batch_size"] * rows["isl"] <= 2 * MOST_TOKENS) & (rows["isl"] >= 16)]
    return rows


def _fit_family(parts, predict: Predict, fitted: Sequence[str], model: ModelSpec, start: Parameters
                ) -> tuple[Parameters, np.ndarray]:
    measured = np.concatenate([rows["latency_ms"].to_numpy(float) for _, rows in parts]) / 1e3

    def shard_of(parameters: Parameters, gpu: GpuSpec, count: int) -> Shard:
        return Shard(model, gpu, count, parameters)

    def log_error(x: np.ndarray) -> np.ndarray:
        parameters = scaled(start, dict(zip(fitted, np.exp(x), strict=True)))
        return np.log(np.concatenate([predict(rows, partial(shard_of, parameters, gpu)) for gpu, rows in parts])
                      / measured)

    best = least_squares(log_error, np.zeros(len(fitted)), loss="soft_l1", f_scale=0.1, diff_step=1e-4)
    return scaled(start, dict(zip(fitted, np.exp(best.x), strict=True))), 100 * np.abs(np.expm1(log_error(best.x)))


def calibration(folder: str | Path, model_name: str, command: str = "") -> Calibration:
    """The tables' parameters as a calibration that states no range and no error: no serving point was seen."""
    model = load_model(model_name)
    parameters, quality = fit_tables(folder, model, ROOFLINE)
    sources = [f"kernel tables, {family}: {one['rows']} rows, median error of the fitted formula "
               f"{one['median_percent']:.1f} %" for family, one in quality.items()]
    return Calibration(model=model.name, title=f"kernels of {model.name}", command=command, sources=sources,
                       outlier_rule="none", range=None, parameters=parameters)


def main() -> None:
    """The command line above; exit status 2 and one sentence for a faulty folder."""
    parser = argparse.ArgumentParser(description="fit the step time's kernels to measured tables")
    parser.add_argument("folder", type=Path, help="CSVs, one kernel family a file")
    parser.add_argument("--model", default="gpt-oss-120b", help="model name or YAML file")
    parser.add_argument("--out", type=Path, required=True, help="calibration file to write (YAML)")
    arguments = parser.parse_args()
    try:
        made = calibration(arguments.folder, arguments.model, shlex.join(["python", *sys.argv]))
    except SpocError as error:
        parser.error(error.message)
    calibration_file.save(arguments.out, made)
    print("\n".join(made.sources))


if __name__ == "__main__":
    main()
