"""What a sweep asks its twin beside the ladder: the lessons, with one flag changed at the limit; and up and down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import pandas as pd

from spoc_lib.config import Cluster
from spoc_lib.core.errors import InputError
from spoc_lib.core.files import plain, read_json, write_json
from spoc_lib.engine.embedded import EmbeddedEngine
from spoc_lib.sweep import lessons
from spoc_lib.sweep.book import Entry, RungBook
from spoc_lib.sweep.drivers import FreshUsers, virtual_rung
from spoc_lib.sweep.fit import Crossing
from spoc_lib.sweep.record import Timing
from spoc_lib.sweep.updown import differences, up_and_down

#: Numbers of rungs that are not shown among the others, and the salt of the users who go up and down.
VARIANTS, UP_DOWN_SALT = 200, 1_100
#: After a step up or down, so many simulated seconds are not measured (an overload of half as many users again takes
#: minutes to drain); then at most so many are.
SETTLE_S, MEASURED_S = 400.0, 300.0
#: Users of the steps, relative to the most that were met, and of the overload.
FOOT, OVERLOAD = 0.75, 1.5


@dataclass
class TwinChecks:
    """The questions of one sweep; rungs already in `book` are not played again."""

    cluster: Cluster
    flags: dict[str, Any]
    book: RungBook
    users: FreshUsers
    timing: Timing
    seed: int
    say: Callable[[str], None]

    def lessons(self, limit: Entry, crossing: Crossing, up_down: pd.DataFrame) -> list[lessons.Lesson]:
        """The lessons, asked at the limit's users and script with one flag changed."""
        flags = EmbeddedEngine.from_cluster(self.cluster, self.flags).flags
        budget, rungs, number = flags.max_num_batched_tokens, self.book.rungs(), count(VARIANTS)
        uncached = self._variant(next(number), limit, {"enable_prefix_caching": False}) \
            if flags.enable_prefix_caching else None
        others = [other for other in (max(budget // 4, flags.max_num_seqs), budget * 2) if other != budget]
        asked = [(other, self._variant(next(number), limit, {"max_num_batched_tokens": other})) for other in others]
        budgets = [(budget, limit.row), *((other, row) for other, row in asked if row is not None)]
        return [lessons.utilisation_is_not_the_sla(rungs, crossing.users),
                lessons.memory_is_not_always_the_bottleneck(limit.row, uncached, rungs, crossing.users),
                lessons.chunked_prefill_is_the_trade_off(budgets),
                lessons.overload_leaves_no_trace(up_down, self._settle_s)]

    def _variant(self, number: int, limit: Entry, changed: dict[str, Any]) -> dict[str, Any] | None:
        """RUNGS row of the limit's rung with some flags changed; None where they contradict each other."""
        flags = {**self.flags, **changed}
        try:
            engine = EmbeddedEngine.from_cluster(self.cluster, flags)
        except InputError:
            return None
        users, salt = int(limit.row["users"]), limit.number + 1
        self.say(f"what if {changed} at {users} users")
        key = dict(users=users, driver="virtual", timing=asdict(self.timing), flags=flags, engine=None)
        return self.book.aside(number, key, lambda: virtual_rung(
            engine, self.users.script(salt), users, self.timing, self.seed)).row

    @property
    def _settle_s(self) -> float:
        return min(SETTLE_S, self.timing.duration_s)

    def up_and_down(self) -> pd.DataFrame:
        """`updown.differences` of one twin that goes up to an overload and back; empty where no rung was met."""
        met = [entry.row["users"] for entry in self.book.ladder_entries if entry.row["verdict"] == "met"]
        missed = [entry.row["users"] for entry in self.book.ladder_entries if entry.row["verdict"] == "missed"]
        within = max((users for users in met if users < min(missed, default=0)), default=0)
        if not within:
            return pd.DataFrame()
        top = max(round(OVERLOAD * within), min(missed))
        levels = sorted({max(1, round(FOOT * within)), within, top})
        measured_s = min(MEASURED_S, self.timing.duration_s - self.timing.warmup_s)
        key = plain(dict(levels=levels, settle_s=self._settle_s, measured_s=measured_s, flags=self.flags,
                         **self.book.asked))
        path = self.book.folder / "up_and_down.json"
        if not path.exists() or read_json(path, "up and down")["key"] != key:
            self.say(f"up and down through {', '.join(map(str, levels))} users on one twin")
            engine = EmbeddedEngine.from_cluster(self.cluster, self.flags)
            found = differences(up_and_down(engine, self.users.script(UP_DOWN_SALT), levels, self.book.slos,
                                            settle_s=self._settle_s, measured_s=measured_s, seed=self.seed))
            write_json(path, {"key": key, "differences": found.to_dict("records")})
        return pd.DataFrame(read_json(path, "up and down")["differences"]).replace({"inf": float("inf")})
