"""The roofline verdict: what each category's time could be at best, which resource binds it, and what the kernels'
names say about 4-bit experts: FP4 products (the naive reading) or BF16 products on 4-bit traffic (W4A16)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pandas as pd

from spoc_lib.config import GpuSpec, ModelSpec
from spoc_lib.core.errors import InputError
from spoc_lib.engine.batch import Batch
from spoc_lib.nsight.categories import CATEGORIES, TITLES
from spoc_lib.nsight.decompose import Decomposition
from spoc_lib.nsight.identity import ShownTypes, require_same, shown_types
from spoc_lib.nsight.work import Hypothesis, hypotheses, step_work

#: What can bind, and how a sentence calls it.
RESOURCES = {"memory": "DRAM bandwidth", "compute": "tensor-core compute", "link": "NVLink",
             "copy": "copies between host and device", "host": "launch and host"}

#: Below this share of the nearest roof, the roof is not what limits a kernel.
_NEAR_ROOF = 0.5


@dataclass(frozen=True)
class Verdict:
    """table: one row a (phase, category), times in seconds a step on one GPU: measured_s, share (of the step),
    flops, dram_bytes, link_bytes (W4A16), memory_s, compute_s, link_s (the three roofs under W4A16), w4a16_s,
    fp4_naive_s, bf16_s (the largest roof under each hypothesis, kernel by kernel), binds, of_roof (w4a16_s /
    measured_s; null without measured time). phase `all` is the mean over all steps.

    The category `copy` is what of `mem` is copies between host and device. resources: share of the mean step by what
    binds (memory, compute, link, copy, host).
    """

    table: pd.DataFrame
    steps: int
    gpus: int
    model: str
    gpu: str
    compute_type: str
    compute_type_shown: bool
    resources: dict[str, float]
    binding_resource: str
    binding_category: str
    sentence: str
    sentences: list[str]
    simulated: bool

    def row(self, category: str, phase: str = "all") -> dict:
        """One row of `table` as a dictionary."""
        found = self.table[(self.table.phase == phase) & (self.table.category == category)]
        return found.iloc[0].to_dict() if len(found) else {}

    def to_dict(self) -> dict:
        """For JSON."""
        return {"model": self.model, "gpu": self.gpu, "gpus": self.gpus, "steps": self.steps,
                "simulated": self.simulated, "compute_type": self.compute_type,
                "compute_type_shown": self.compute_type_shown, "resources": self.resources,
                "binding_resource": self.binding_resource, "binding_category": self.binding_category,
                "sentence": self.sentence, "sentences": self.sentences,
                "categories": self.table.to_dict("records")}


def roofline(decomposition: Decomposition, model: ModelSpec, gpu: GpuSpec, batch: Batch | None = None, *,
             gpu_count: int | None = None, steps: int | None = None) -> Verdict:
    """Hold the measured times beside their roofs.

    The batch of each step is taken from its NVTX range; where the trace does not tell it, `batch` says what an
    average step computed. `steps`: how many steps the window holds, where the trace shows none. gpu_count: GPUs that
    share the model (tensor parallelism; default: those of the trace). InputError when neither trace nor parameters
    tell, and when the trace shows another model, GPU or spread than these (`identity`).
    """
    gpus = gpu_count or len(decomposition.totals())
    untold = require_same(decomposition, model, gpu, gpus)
    measured = _measured(decomposition, model, batch, steps)
    rows, total_steps = [], 0
    for phase, (counted, seconds, number) in measured.items():
        rows += _rows(phase, counted, seconds, number, model, gpu, gpus)
        total_steps = max(total_steps, number)
    table = pd.DataFrame(rows)
    return _conclude(decomposition, table, model, gpu, gpus, total_steps, untold)


Measured = dict[str, tuple[Counter, dict[str, float], int]]


def _measured(decomposition: Decomposition, model: ModelSpec, batch: Batch | None, steps: int | None) -> Measured:
    """{phase: (batches counted, seconds by category and idle summed over those steps on one GPU, steps)}."""
    frame = with_windows(decomposition.steps, model)
    told = len(frame) > 0 and frame[["decode_context", "prefill_pairs"]].notna().all(axis=None)
    devices = len(decomposition.totals())
    if told and batch is None:
        result: Measured = {}
        first = frame.groupby(["pid", "device"], sort=False).ngroup() == 0
        for phase, rows in [("all", frame), *frame.groupby("phase", sort=False)]:
            one = rows[first.reindex(rows.index)]
            batches = Counter(Batch(*values) for values in one[list(Batch._fields)].itertuples(index=False))
            seconds = {c: rows[f"{c}_ns"].sum() / devices / 1e9 for c in CATEGORIES}
            seconds["copy"] = rows.copy_ns.sum() / devices / 1e9
            seconds["mem"] -= seconds["copy"]
            seconds["idle"] = (rows.launch_gap_ns.sum() + rows.host_gap_ns.sum()) / devices / 1e9
            result[phase] = batches, seconds, len(one)
        return result
    if batch is None:
        raise InputError("no-batch", f"{decomposition.path} does not tell what its steps computed: give the average "
                         f"batch (--batch tokens=…,decodes=…,decode_context=…; batch in notebook 04)")
    if steps is None and len(frame):
        steps = int(frame.groupby(["pid", "device"]).step.nunique().max())
    if not steps:
        raise InputError("no-steps", f"{decomposition.path} shows no engine steps: say how many the window holds "
                         f"(--steps N; steps in notebook 04)")
    seconds = (decomposition.totals().mean() / 1e9).to_dict()
    seconds["copy"] = float(decomposition.host_copies.exposed_ns.mean()) / 1e9
    seconds["mem"] -= seconds["copy"]
    return {"all": (Counter({batch: steps}), seconds, steps)}


def batch_of(text: str | None, what: str = "--batch") -> Batch | None:
    """`tokens=64,decodes=64,…` as a batch; fields that are not given are 0. None for no text; InputError, naming `what`
    was given so, for anything else."""
    if not text:
        return None
    values = dict.fromkeys(Batch._fields, 0.0)
    try:
        for part in text.split(","):
            name, value = part.split("=")
            if name.strip() not in values or not 0 <= float(value) < np.inf:
                raise ValueError(name)
            values[name.strip()] = float(value)
    except ValueError as error:
        raise InputError("bad-batch", f"{what} {text!r}: give NAME=NUMBER pairs, separated by commas, of "
                         f"{', '.join(Batch._fields)}") from error
    return Batch._make(value if "pairs" in name else int(value) for name, value in values.items())


def with_windows(steps: pd.DataFrame, model: ModelSpec) -> pd.DataFrame:
    """Steps with what sliding layers attend to, where the trace does not tell it: contexts are taken to reach past the
    window, as they do in practice."""
    if steps.empty:
        return steps
    window = model.sliding_window or 0
    decode = np.minimum(steps.decode_context.astype(float), steps.decodes.astype(float) * window)
    pairs = np.minimum(steps.prefill_pairs.astype(float), steps.prefill_tokens.astype(float) * window)
    return steps.assign(decode_window=steps.decode_window.astype(float).fillna(decode),
                        prefill_window_pairs=steps.prefill_window_pairs.astype(float).fillna(pairs))


def _roofs(works: list, hypothesis: Hypothesis, model: ModelSpec, gpu: GpuSpec) -> dict[str, dict[str, float]]:
    """{category: {flops, dram_bytes, link_bytes, memory, compute, link, best}}; best: the largest roof, launch by
    launch."""
    result: dict[str, dict[str, float]] = {}
    dense = gpu.peak(*model.weights("dense"))
    for work in works:
        rate = {"moe_gemm": hypothesis.flops_per_s, "gemm": dense}.get(work.category, gpu.bf16_flops_per_s)
        roofs = {"memory": work.dram_bytes / gpu.dram_bytes_per_s, "compute": work.flops / rate,
                 "link": work.link_bytes / gpu.link_bytes_per_s}
        sums = result.setdefault(work.category, dict.fromkeys(
            ("flops", "dram_bytes", "link_bytes", "memory", "compute", "link", "best"), 0.0))
        for name, value in (("flops", work.flops), ("dram_bytes", work.dram_bytes),
                            ("link_bytes", work.link_bytes), *roofs.items(), ("best", max(roofs.values()))):
            sums[name] += work.count * value
    return result


def _rows(phase: str, batches: Counter, seconds: dict[str, float], steps: int, model: ModelSpec, gpu: GpuSpec,
          gpus: int) -> list[dict]:
    sums: dict[str, dict[str, dict[str, float]]] = {}
    for name, hypothesis in hypotheses(model, gpu).items():
        into = sums.setdefault(name, {})
        for batch, count in batches.items():
            for category, values in _roofs(step_work(model, gpus, batch, hypothesis), hypothesis, model, gpu).items():
                target = into.setdefault(category, dict.fromkeys(values, 0.0))
                for key, value in values.items():
                    target[key] += count * value / steps
    step_s = sum(seconds.values()) / steps
    rows = []
    for category in (*CATEGORIES, "copy", "idle"):
        took = seconds.get(category, 0.0) / steps
        ideal = sums["w4a16"].get(category)
        if ideal is None and not took:
            continue
        roofs = {r: (ideal or {}).get(r, 0.0) for r in ("memory", "compute", "link")}
        rows.append({
            "phase": phase, "category": category, "measured_s": took, "share": took / step_s if step_s else 0.0,
            "flops": (ideal or {}).get("flops", 0.0), "dram_bytes": (ideal or {}).get("dram_bytes", 0.0),
            "link_bytes": (ideal or {}).get("link_bytes", 0.0),
            "memory_s": roofs["memory"], "compute_s": roofs["compute"], "link_s": roofs["link"],
            **{f"{name}_s": values.get(category, {}).get("best", 0.0) for name, values in sums.items()},
            "binds": _binds(category, roofs),
            "of_roof": ideal["best"] / took if ideal and took else None,
        })
    return rows


def _binds(category: str, roofs: dict[str, float]) -> str:
    """The highest roof; collectives are NVLink's, idle time the host's, copies from and to the host a resource of their
    own; copies within the GPU and unknown kernels stream memory."""
    if category in ("idle", "comm", "copy"):
        return {"idle": "host", "comm": "link", "copy": "copy"}[category]
    return max(roofs, key=roofs.__getitem__) if any(roofs.values()) else "memory"


def _conclude(decomposition: Decomposition, table: pd.DataFrame, model: ModelSpec, gpu: GpuSpec, gpus: int,
              steps: int, untold: list[str]) -> Verdict:
    overall = table[table.phase == "all"]
    resources = {r: float(overall[overall.binds == r].share.sum()) for r in RESOURCES}
    busy = overall[overall.category != "idle"]
    top = busy.loc[busy.measured_s.idxmax()]
    types = shown_types(decomposition)
    sentences = [_step_sentence(table, phase, gpu) for phase in table.phase.unique() if phase != "all"] or [
        _step_sentence(table, "all", gpu)]
    if model.moe is not None:
        sentences.append(_expert_sentence(table, model.moe.weight_bits, gpu, types, decomposition.simulated))
    sentences += untold
    binding = max(resources, key=resources.__getitem__)
    over = int((busy.of_roof > 1.05).sum())
    if over:
        what = "category" if over == 1 else "categories"
        sentences.append(f"{over} {what} ran faster than the roof, so the batch given does not describe this "
                         f"trace, or the kernels skip work that the model counts.")
    sentence = (f"{'Simulated: ' if decomposition.simulated else ''}a step of {overall.measured_s.sum() * 1e3:.2f} ms "
                f"spends {top.share:.0%} in {TITLES[top.category]}; for {resources[binding]:.0%} of it the nearest "
                f"roof is {RESOURCES[binding]}" + (f", of which {TITLES[top.category]} reaches {top.of_roof:.0%}."
                                                   if top.of_roof > 0 and top.binds == binding else "."))
    return Verdict(table, steps, gpus, model.name, gpu.name, types.label, types.share > 0, resources, binding,
                   str(top.category), sentence, sentences, decomposition.simulated)


def _step_sentence(table: pd.DataFrame, phase: str, gpu: GpuSpec) -> str:
    rows = table[table.phase == phase]
    busy = rows[rows.category != "idle"].nlargest(2, "measured_s")
    parts = []
    for row in busy.itertuples():
        parts.append(f"{TITLES[row.category]} {row.share:.0%} ({_reach(row.binds, row.of_roof)})")
    idle = rows[rows.category == "idle"].share.sum()
    name = "step" if phase == "all" else f"{phase} step"
    return (f"A {name} takes {rows.measured_s.sum() * 1e3:.2f} ms on {gpu.title}: {', '.join(parts)}, "
            f"idle {idle:.0%}.")


def _reach(binds: str, of_roof: float | None) -> str:
    """Whether the hardware limits a category, or its kernels do: far below every roof, a faster GPU changes little."""
    if of_roof is None or of_roof != of_roof:
        return f"{RESOURCES[binds]}"
    if of_roof < _NEAR_ROOF:
        return f"nearest roof {RESOURCES[binds]}, but at {of_roof:.0%} of it: the kernels limit, not the hardware"
    return f"bound by {RESOURCES[binds]}, at {of_roof:.0%} of it"


def _expert_sentence(table: pd.DataFrame, weight_bits: float, gpu: GpuSpec, types: ShownTypes,
                     simulated: bool) -> str:
    """FP4-naive beside W4A16 beside measured, in the phase where the two differ most."""
    rows = table[(table.category == "moe_gemm") & (table.measured_s > 0)]
    if rows.empty:
        return "No expert GEMM ran in this window, so nothing is said about 4-bit experts."
    row = rows.loc[((rows.w4a16_s - rows.fp4_naive_s) / rows.measured_s).idxmax()]
    where = "a step" if row.phase == "all" else f"a {row.phase} step"
    times = (f"FP4-naive {row.fp4_naive_s * 1e3:.2f} ms, W4A16 {row.w4a16_s * 1e3:.2f} ms, "
             f"{'simulated' if simulated else 'measured'} {row.measured_s * 1e3:.2f} ms in {where}")
    proof = types.sentence
    if types.scheme == "W4A16":
        proof += ", so W4A16 is the roof"
    elif types.scheme and types.scheme != f"W{round(weight_bits)}A16":
        proof += f", which is {types.scheme}: neither reading is theirs"
    if row.w4a16_s - row.fp4_naive_s > 0.05 * row.measured_s:
        tail = (f"whoever counts on FP4 rates for {gpu.title} expects {row.w4a16_s / row.fp4_naive_s:.1f} times too "
                f"much of the experts")
    else:
        tail = (f"both read the same {weight_bits:g}-bit weights and DRAM binds them, so the rate of the "
                f"products makes no difference here")
    return f"{proof}: {times}; {tail}."
