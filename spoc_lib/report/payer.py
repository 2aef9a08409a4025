"""The page for the person who pays: the answer, how sure, what it costs, and what it costs to be wrong."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from spoc_lib.config import SHARES, Cluster, price_per_gpu_hour
from spoc_lib.report import style
from spoc_lib.report.answer import Answer
from spoc_lib.report.verdict import metric_name, ratio, sentences, time_text, who
from spoc_lib.report.wording import listed

#: The growth in users whose price is told.
GROWTH = 1.1


class Cards:
    """The answer at a glance: one card a cluster."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = list(answers)

    def _repr_html_(self) -> str:
        looks = style.looks([answer.cluster for answer in self.answers])
        return f'<div class="spoc-answer">{"".join(map(_card, self.answers, looks))}</div>'

    def __repr__(self) -> str:
        return "\n".join(sentences(self.answers))


class ShownAnswer(Answer):
    """An answer that shows itself as its card, or in a terminal as its sentence."""

    def __repr__(self) -> str:
        return sentences([self])[0]

    def _repr_html_(self) -> str:
        return Cards([self])._repr_html_()


def _card(answer: Answer, look: style.Look) -> str:
    big = f"{answer.users:g} users" if answer.resolved else "unresolved"
    rows = [("how sure", _sure(answer)), ("breaks first", _binding(answer)), ("used up", answer.saturated),
            ("10 % more users", _short_growth(answer)), ("cost", _short_cost(answer))]
    shown = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in rows if text)
    return (
        f'<div style="border-color:{look.colour}"><div class="small">{html.escape(answer.cluster.title)}</div>'
        f'<div class="big">{big}</div><span class="badge">{answer.label}</span><dl>{shown}</dl></div>'
    )


def _sure(answer: Answer) -> str:
    if not answer.resolved or answer.interval is None:
        return answer.reason
    low, high = answer.interval
    return f"{low:g} to {high:g} at {answer.level:.0%}"


def _binding(answer: Answer) -> str:
    binding = answer.binding
    if not binding:
        return ""
    if binding["metric"] in SHARES:
        return str(binding["name"])
    return f"{metric_name(binding['metric'])} p{binding['percentile']:g} <= {time_text(binding['limit_s'])}"


def _short_growth(answer: Answer) -> str:
    found = late_at_growth(answer) if answer.resolved else None
    return "" if found is None else f"{found[1]:.0%} too late ({found[2]:.0%} to {found[3]:.0%}) at {found[0]} users"


def _short_cost(answer: Answer) -> str:
    price = price_per_hour(answer.cluster)
    return f"{money(price / answer.users)} per user and hour" if price and answer.users and answer.resolved else ""


def money(value: float, digits: int = 3) -> str:
    """An amount in so many significant digits, never as a power of ten: `0.0925`, `9.84`, `52,300`."""
    if value >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return np.format_float_positional(float(f"{value:.{digits}g}"), trim="-")


def price_per_hour(cluster: Cluster) -> float | None:
    """Of all the cluster's GPUs, in the currency of the file that states it: the cluster's own price, else the GPU's;
    None where neither says one."""
    price = price_per_gpu_hour(cluster.hardware)
    return None if price is None else price * cluster.hardware.count


def cost_sentences(answers: Sequence[Answer]) -> list[str]:
    """What a user and a million output tokens cost, what the uncertainty of the answer is worth, and how many times the
    price of the first cluster's user another's is."""
    said = [_cost(answer, price) for answer in answers if (price := price_per_hour(answer.cluster)) is not None]
    unpriced = [answer.cluster.name for answer in answers if price_per_hour(answer.cluster) is None]
    if unpriced:
        said.append(f"No price is known of {listed(unpriced)}: state hardware.price_per_gpu_hour in the cluster "
                    "file and run notebook 03 once more in its run (rungs that are there are kept) to see what a user "
                    "costs.")
    priced = [answer for answer in answers if price_per_hour(answer.cluster) and answer.users and answer.resolved]
    return said + [_cost_ratio(other, priced[0]) for other in priced[1:]]


def _cost(answer: Answer, price: float) -> str:
    hourly = f"{answer.cluster.name}: {money(price, 4)} an hour for its {answer.cluster.hardware.count} GPUs"
    if not (answer.resolved and answer.interval):
        return f"{hourly}; what a user costs is open, for the capacity is unresolved."
    if not answer.users:
        return f"{hourly}, and not one user within the SLA."
    low, high = answer.interval
    dear = money(price / low) if low else "any amount"
    said = f"{hourly}, {money(price / answer.users)} per user and hour at {answer.users:g} users " \
        f"({money(price / high)} to {dear} over the interval)"
    rung = answer.nearest
    if rung is not None and rung["output_tokens_per_s"] > 0:
        tokens = price / (3600 * rung["output_tokens_per_s"] / 1e6)
        said += f", {money(tokens)} per million output tokens (their prompts included) at the rung of " \
            f"{rung['users']} users"
    return said + "."


def _cost_ratio(other: Answer, first: Answer) -> str:
    """Hours of both clusters bought at their prices, users by the interval that both intervals allow."""
    users, low, high = ratio(other, first)
    prices = (price_per_hour(other.cluster) or 0) / (price_per_hour(first.cluster) or 1)
    most = f"to {prices / low:.2f}" if low else "upwards"
    return (f"A user on {other.cluster.name} costs {prices / users:.2f} times what one on {first.cluster.name} costs "
            f"({prices / high:.2f} {most}), where both prices are in one currency.")


def cost_of_being_wrong(answers: Sequence[Answer]) -> list[str]:
    """What happens at the other end of the interval, and with a tenth more users."""
    return [sentence for answer in answers if answer.users and answer.interval and answer.resolved
            for sentence in (_too_few(answer), _too_many(answer)) if sentence]


def _too_few(answer: Answer) -> str:
    low, high = answer.interval or (0.0, 0.0)
    if not (answer.users and low < high < math.inf):
        return ""
    idle = f"{answer.cluster.name}: planning for {low:g} users is safe at this confidence and leaves up to " \
        f"{(high - low) / high:.0%} of the possible users unserved"
    price = price_per_hour(answer.cluster)
    if price:
        idle += f", {money(price * (high - low) / high)} of {money(price, 4)} an hour"
    return idle + (f"; planning for {answer.users:g} risks {(answer.users - low) / low:.0%} too many."
                   if 0 < low < answer.users else ".")


def _too_many(answer: Answer) -> str:
    found, binding = late_at_growth(answer), answer.binding
    if not binding:
        return ""
    wanted = GROWTH * (answer.users or 0)
    if found is None:
        return f"{answer.cluster.name}: nothing was run {GROWTH - 1:.0%} beyond the limit: what happens there is open."
    users, share, low, high = found
    what = {"ttft": "requests wait for their first token for more than", "e2e": "requests last longer than",
            "itl": "tokens keep their reader waiting more than"}.get(binding["metric"])
    beyond = f"{what} {time_text(binding['limit_s'])}" if what else f"samples are beyond {binding['name']}"
    ran = "" if abs(users / wanted - 1) < 0.02 else f" (the rung nearest to {wanted:.0f})"
    row = answer.climbed[answer.climbed["users"] == users].iloc[0]
    more = users / (answer.users or 1) - 1
    return (f"{answer.cluster.name}: with {users} users, {more:.0%} more than it holds{ran}, "
            f"{100 * share:.0f} of 100 ({100 * low:.0f} to {100 * high:.0f}) {beyond}, {who(binding['persona'])} "
            f"together; p95 TTFT is {time_text(row['ttft_p95_s'])}, p95 ITL {time_text(row['itl_p95_s'])}.")


def late_at_growth(answer: Answer) -> tuple[int, float, float, float] | None:
    """(users, share of the binding SLO's samples beyond its limit, low, high) at the rung beyond the capacity that is
    nearest to `GROWTH` times it; None where no rung lies within half and twice that growth."""
    binding, capacity = answer.binding, answer.users
    if not binding or not capacity:
        return None
    rows = answer.slo[answer.slo["rung"].isin(answer.climbed["rung"])]
    for name in ("persona", "metric", "percentile"):
        rows = rows[rows[name] == binding[name]]
    growth = rows["users"] / capacity - 1
    rows = rows[(growth >= 0.5 * (GROWTH - 1)) & (growth <= 2 * (GROWTH - 1))]
    if rows.empty:
        return None
    users = int(rows.loc[(rows["users"] - GROWTH * capacity).abs().idxmin(), "users"])
    there: pd.DataFrame = rows[rows["users"] == users]
    share = float(there["beyond_ratio"].mean())
    low, high = float(there["beyond_low_ratio"].min()), float(there["beyond_high_ratio"].max())
    return users, share, low, high if math.isfinite(high) else 1.0
