"""Questions asked of the twin beside finished sweeps: sensitivity of the capacity, best token budgets, a huge prompt's
arrival, a throttled GPU, what-ifs. Each answer is kept in its run's folder, so that a report over several runs does not
ask it again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pandas as pd

from spoc_lib.config import Profile, load_profile
from spoc_lib.core.files import plain, read_json, write_json
from spoc_lib.report.answer import Answer, copies
from spoc_lib.report.paper_claims import BUDGETS

if TYPE_CHECKING:
    from spoc_lib.sweep.cases import Case  # it brings the compiled engine, which most reports do without

#: Users of the studies at a load that the cluster holds, as a share of its limit.
LOADED = 0.75
Say = Callable[[str], None]


@dataclass(frozen=True)
class Study:
    """One run's tables: see `sensitivity.sensitivity`, `tradeoffs.best_budgets`, `tradeoffs.long_prompt_arrival`,
    `tradeoffs.throttle_effect`, `sensitivity.grid` (at the paper's token budget). users: of arrival and throttle."""

    answer: Answer
    case: Case
    users: int
    sensitivity: pd.DataFrame
    budgets: pd.DataFrame
    arrival: pd.DataFrame
    throttle: pd.DataFrame
    grid: pd.DataFrame


def profile_of(answer: Answer) -> Profile:
    """The profile that the run was swept under: the copy that the run keeps, else the file as it is today."""
    sweep = read_json(answer.folder / "run.json")["stages"]["03"]
    return load_profile(str(copies(answer.folder, sweep).get("profile", sweep["parameters"]["profile"])))


def case_of(answer: Answer) -> Case:
    """The question that the run's sweep asked: its flags, its personas, its gap cap, its seed."""
    from spoc_lib.sweep.cases import Case

    sweep = read_json(answer.folder / "run.json")["stages"]["03"]
    asked = sweep["parameters"]
    personas = str(copies(answer.folder, sweep).get("personas", asked.get("personas") or answer.cluster.personas))
    return Case.of(
        answer.cluster,
        profile_of(answer),
        answer.capacity["flags"],
        seed=int(asked["seed"]),
        gap_cap_s=float(answer.capacity["gap_cap_s"]),
        near=int(answer.users or 60),
    ).changed(personas=os.path.expanduser(personas))


def paper_study(answer: Answer, say: Say = lambda text: None) -> Study:
    """All that `paper.findings` wants to know of one run, from its folder where it was asked before."""
    from spoc_lib.sweep import sensitivity, tradeoffs

    case = case_of(answer)
    budget = BUDGETS.get((answer.cluster.hardware.count, answer.cluster.hardware.gpu_name))
    theirs = tradeoffs.with_budget(case, budget) if budget else case
    users = max(1, int(LOADED * case.near))
    return Study(
        answer,
        case,
        users,
        _kept(answer, "sensitivity", case, lambda: sensitivity.sensitivity(case), say),
        _kept(answer, "budgets", case, lambda: tradeoffs.best_budgets(case), say),
        _kept(answer, "arrival", case, lambda: tradeoffs.long_prompt_arrival(case, users), say),
        _kept(answer, "throttle", case, lambda: tradeoffs.throttle_effect(case, users), say),
        _kept(answer, "grid", theirs, lambda: sensitivity.grid(theirs), say),
    )


def simulated_studies(answers: list[Answer], say: Say = lambda text: None) -> list[Study]:
    """`paper_study` of every run whose cluster is simulated; a real engine is not asked what the twin would do."""
    return [paper_study(answer, say) for answer in answers if answer.cluster.simulated and answer.users]


def what_ifs(answers: list[Answer], say: Say = lambda text: None) -> pd.DataFrame:
    """`whatif.what_if` of every simulated run, one below the other."""
    from spoc_lib.sweep import whatif

    found = []
    for answer in answers:
        if answer.cluster.simulated:
            case = case_of(answer)
            found.append(_kept(answer, "what_if", case, partial(whatif.what_if, case), say))
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame()


def _kept(answer: Answer, name: str, case: Case, ask: Callable[[], pd.DataFrame], say: Say) -> pd.DataFrame:
    """The table from the run's folder if the same was asked of the same step time, else asked now and kept."""
    path = answer.folder / "studies" / f"{name}.json"
    key = plain({"case": repr(case), "calibration": case.engine().passport().get("calibration_id")})
    if path.exists():
        known = read_json(path)
        if known["key"] == key:
            return pd.DataFrame(known["rows"]).replace({"inf": float("inf")}).infer_objects()
    say(f"{answer.cluster.name}: {name.replace('_', ' ')}")
    table = ask()
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"key": key, "rows": table.astype(object).where(table.notna(), None).to_dict("records")})
    return table
