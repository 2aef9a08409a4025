"""What to try next: each sentence from a figure of the trace, the one with most time at stake first."""

from __future__ import annotations

from collections.abc import Iterator

from spoc_lib.nsight.categories import TITLES
from spoc_lib.nsight.decompose import Decomposition
from spoc_lib.nsight.idle import explain_idle
from spoc_lib.nsight.roofline import RESOURCES, Verdict

#: Below this share of the window a cause is not worth a trial.
WORTH = 0.05
#: A kernel that reaches less of its roof than this has better implementations to be looked for.
POOR_ROOF = 0.5
_MOST = 5
#: Kernels that only stream activations, which compilers fuse.
_FUSABLE = ("norm", "rope", "act", "other", "mem")

Stake = tuple[float, str]


def advice(found: Decomposition, verdict: Verdict | None) -> list[str]:
    """Next steps, at most five; `stake` in each is the share of the window that it can win at best."""
    stakes = [*_idle(found), *_collectives(found), *_kernels(found)]
    if verdict is not None:
        stakes += [*_experts(verdict), *_decode(found, verdict), *_prefill(verdict)]
    stakes += _mixed(found)
    chosen = [text for share, text in sorted(stakes, key=lambda one: -one[0]) if share >= WORTH][:_MOST]
    return chosen or ["Nothing takes enough of the window to be worth a trial: more users need more or faster GPUs, or "
                      "fewer tokens (prefix caching, shorter prompts)."]


def _idle(found: Decomposition) -> Iterator[Stake]:
    """Idle time by its cause, and time in which a GPU only copies from or to the host."""
    share = explain_idle(found).table.set_index("cause").share
    decodes = _decodes(found)
    sizes = f"; capture sizes up to {decodes:.0f} sequences" if decodes else ""
    yield share["launch"], (f"Launch gaps, {share['launch']:.0%} at stake: make sure that CUDA graphs cover the decode "
                            f"batch (no --enforce-eager{sizes}), for a graph launches all kernels of a step at once.")
    where = "between steps, " if len(found.steps) else ""
    yield share["host"], (f"The host {where}{share['host']:.0%} at stake: it launches after the GPU has gone idle, so "
                          f"let it prepare the next step while the GPU runs this one (--async-scheduling), and keep "
                          f"its cores free of the load generator.")
    yield share["device"], (f"Gaps before kernels that were launched in time, {share['device']:.0%} at stake: they "
                            f"are the GPU's own, one a kernel, so fewer and larger kernels shorten them (a compiled "
                            f"model with its fusions on, no --enforce-eager).")
    yield share["outside"], (f"No step runs in {share['outside']:.0%} of the window, neither on the GPU nor on the "
                             f"host: with requests waiting it is the scheduler (--async-scheduling), without, trace "
                             f"again with more users.")
    yield share["unknown"], (f"Idle, {share['unknown']:.0%} at stake, for a reason that the trace does not tell: "
                             f"capture again with the CUDA calls and NVTX ranges in it (spoc nsight plan) and export "
                             f"all tables, so that late launches are told from the GPU's own latency.")
    copies, slow = found.host_copies.exposed_ns.sum(), found.host_copies.pageable_ns.sum()
    pinned = ", from pinned memory (most of it is pageable now)" if slow > copies / 2 else ""
    yield share["copies"], (f"Copies between host and device, {share['copies']:.0%} at stake: the link to the host "
                            f"limits, not the GPU. If weights were still loading, trace later; else keep weights and "
                            f"KV cache on the GPU (no offloading), or overlap the copies with kernels on a stream of "
                            f"their own{pinned}.")


def _decodes(found: Decomposition) -> float:
    if found.steps.empty:
        return 0.0
    rows = found.steps[found.steps.decodes.notna() & (found.steps.decodes > 0)]
    return float(rows.decodes.max()) if len(rows) else 0.0


def _collectives(found: Decomposition) -> Iterator[Stake]:
    """Waiting for a late GPU and the transfer itself want different remedies."""
    exposed = float(found.shares().get("comm", 0.0).mean())
    waiting = exposed * found.waiting.wait_share if found.waiting.paired else 0.0
    late, width = found.waiting.late, max((len(group) for group in found.waiting.groups), default=0)
    if late is not None:
        yield waiting, (f"Waiting in collectives, {waiting:.0%} at stake: GPU {late[1]} of process {late[0]} comes "
                        f"late ({found.waiting.late_share:.0%} of its group's waiting); look at its clocks and "
                        f"violations in DCGM and at what else runs on its host cores.")
    gpus = width or len(found.totals())
    if gpus > 1:
        transfer = exposed - waiting
        yield transfer, (f"Collectives that no compute hides, {transfer:.0%} at stake: fuse the all-reduce with the "
                         f"norm behind it, or, where the model fits on half the GPUs, serve two replicas instead "
                         f"of one over {gpus}.")


def _kernels(found: Decomposition) -> Iterator[Stake]:
    shares = found.shares().mean()
    copies = found.host_copies.exposed_ns.mean() / 1e9 / found.window_s  # are advised on by themselves
    fusable = float(sum(shares.get(c, 0.0) for c in _FUSABLE)) - copies
    if fusable > 3 * WORTH:
        yield fusable, (f"Small kernels that only move activations, {fusable:.0%} at stake: check that the model runs "
                        f"compiled (no --enforce-eager) with its fusions on.")
    sampling = float(shares.get("sample", 0.0))
    yield sampling, (f"Sampling, {sampling:.0%} at stake: top-k and top-p sort the vocabulary; try FlashInfer's "
                     f"sampler, or greedy answers where they do.")
    unknown = sum(one["share"] for one in found.unknown_kernels) * found.busy_ratio()
    yield unknown, (f"Kernels without a category, {unknown:.0%} of the window: name them in a rule file (--rules; "
                    f"rules in notebook 04) before concluding more.")


def _experts(verdict: Verdict) -> Iterator[Stake]:
    row = verdict.row("moe_gemm")
    if row and row["of_roof"] and row["of_roof"] < POOR_ROOF:
        stake = row["share"] * (1 - row["of_roof"])
        yield stake, (f"Expert GEMMs, {stake:.0%} at stake: they reach {row['of_roof']:.0%} of their roof, so try "
                      f"another MoE backend or tuned tile sizes for {verdict.gpu}.")


def _decode(found: Decomposition, verdict: Verdict) -> Iterator[Stake]:
    """What decode steps read from memory: weights are shared by the batch, keys and values are not."""
    steps = verdict.table[(verdict.table.phase == "decode")]
    of_all = _phase_share(found, "decode")
    for category, remedy in (
            ("attn", "store keys and values in 8 bits (--kv-cache-dtype fp8): half the bytes, and twice the cache"),
            ("moe_gemm", "every step reads the chosen experts' weights whole, so more sequences a step "
                         "(--max-num-seqs) share the read, until the inter-token latency's limit"),
            ("gemm", "every step reads the weights whole, so more sequences a step (--max-num-seqs) share the read, "
                     "and 8-bit weights halve it")):
        row = steps[steps.category == category]
        if len(row) and row.iloc[0].binds == "memory" and (row.iloc[0].of_roof or 0) >= POOR_ROOF:
            stake = float(row.iloc[0].share) * of_all / 2
            yield stake, (f"{TITLES[category].capitalize() if category != 'moe_gemm' else TITLES[category]} in decode "
                          f"steps is bound by {RESOURCES['memory']}, about {stake:.0%} at stake: {remedy}.")


def _prefill(verdict: Verdict) -> Iterator[Stake]:
    rows = verdict.table[verdict.table.phase.isin(["prefill", "mixed"]) & (verdict.table.binds == "compute")]
    for phase, part in rows.groupby("phase"):
        share = float(part.share.sum())
        if share > POOR_ROOF:
            yield WORTH, (f"{share:.0%} of a {phase} step is bound by {RESOURCES['compute']}: no flag makes that "
                          f"cheaper, only prompts that are not computed again (prefix caching, routing a conversation "
                          f"to the replica that holds it).")


def _mixed(found: Decomposition) -> Iterator[Stake]:
    """Prompts that hold up the streams beside them."""
    summary = {one["phase"]: one for one in found.step_summary()}
    if not {"mixed", "decode"} <= set(summary):
        return
    ratio, share = summary["mixed"]["mean_s"] / summary["decode"]["mean_s"], _phase_share(found, "mixed")
    if ratio > 2:
        yield share / 2, (f"Mixed steps last {ratio:.1f} times a decode step and fill {share:.0%} of the window: a "
                          f"smaller --max-num-batched-tokens shortens them (better inter-token latency, slower first "
                          f"token).")


def _phase_share(found: Decomposition, phase: str) -> float:
    rows = found.table[found.table.phase == phase]
    return float(rows.busy_ns.sum() / max(1, found.table.busy_ns.sum()))
