"""Many workers, one study: every slot is a waiting trial that exactly one worker takes.

Optuna moves a trial from WAITING to RUNNING in one database transaction, so a ticket is never taken twice; a worker
that dies stops its heartbeat, and its ticket is put back by the others.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.exceptions import DuplicatedStudyError
from optuna.storages import RDBStorage

from spoc_lib.search.sampler import interrupted

ISSUED = "tickets"
#: Attribute of a trial that is a ticket; a worker that came too late for the last one gets a trial without it.
TICKET = "ticket"
#: A worker that was about to issue tickets and has not done so within this time is taken for dead.
ISSUE_TIMEOUT_S = 30.0
POLL_S = 0.2


def issue(study: optuna.Study, storage: RDBStorage, initial: Sequence[Mapping[str, Any]], trials: int) -> None:
    """Make `trials` slots exist, the first ones holding the `initial` flags; one worker does it, others wait."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)
    if _claim(storage, f"{study.study_name}-tickets-{trials}"):
        _top_up(study, initial, trials)
        return
    deadline = time.monotonic() + ISSUE_TIMEOUT_S
    while study.user_attrs.get(ISSUED, 0) < trials and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if study.user_attrs.get(ISSUED, 0) < trials:
        _top_up(study, initial, trials)


def _claim(storage: RDBStorage, name: str) -> bool:
    """Whether this worker is the first to ask for `name`: study names are unique in the database."""
    try:
        optuna.create_study(storage=storage, study_name=name)
    except DuplicatedStudyError:
        return False
    return True


def _top_up(study: optuna.Study, initial: Sequence[Mapping[str, Any]], trials: int) -> None:
    live = sum(1 for t in study.get_trials(deepcopy=False) if not interrupted(t))
    for slot in range(live, trials):
        study.enqueue_trial(dict(initial[slot]) if slot < len(initial) else {}, user_attrs={TICKET: slot})
    study.set_user_attr(ISSUED, trials)
