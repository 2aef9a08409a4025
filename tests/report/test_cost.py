"""What the person who pays is told, held against sums done by hand."""

from __future__ import annotations

import sys
from dataclasses import replace

import pandas as pd
import pytest
import yaml

from spoc_lib import config
from spoc_lib.cli import main
from spoc_lib.config import load_cluster
from spoc_lib.core.errors import InputError
from spoc_lib.report import payer
from spoc_lib.report.verdict import Answer
from spoc_lib.sweep.compare import Swept, compare


@pytest.fixture
def priced(made_run, tmp_path):
    """(name, users at the limit, interval, price of a GPU-hour or None) as an `Answer` of a run with rungs in it."""
    def build(name: str, users: float | None, interval: list, price: float | None, verdict: str = "resolved") -> Answer:
        found = Answer.read(made_run(tmp_path / f"{name}-{price}", 120, seed=1, cluster=name))
        hardware = found.cluster.hardware.model_copy(update={"price_per_gpu_hour": price})
        return replace(found, cluster=found.cluster.model_copy(update={"hardware": hardware}), capacity={
            **found.capacity, "max_users": users, "interval": interval, "verdict": verdict})

    return build


def test_a_user_and_a_million_tokens_cost_what_the_sum_says(priced):
    answer = priced("sim-4xh100", 120, [100, 150], 3.0)
    # 4 GPUs x 3 = 12 an hour; 12/120, 12/150 and 12/100 a user; at 120 users 1200 tokens/s are 4.32 million an hour
    assert payer.price_per_hour(answer.cluster) == 12
    assert payer.cost_sentences([answer]) == [
        "sim-4xh100: 12 an hour for its 4 GPUs, 0.1 per user and hour at 120 users (0.08 to 0.12 over the interval), "
        "2.78 per million output tokens (their prompts included) at the rung of 120 users."]
    assert "<dt>cost</dt><dd>0.1 per user and hour</dd>" in payer.Cards([answer])._repr_html_()


def test_the_cost_of_being_wrong_is_the_idle_part_of_the_price(priced):
    idle, late = payer.cost_of_being_wrong([priced("sim-4xh100", 120, [100, 150], 3.0)])
    # 50 of 150 users unserved: a third of 12; 120 planned where 100 are sure: a fifth too many
    assert "planning for 100 users is safe at this confidence and leaves up to 33% of the possible users unserved, " \
        "4 of 12 an hour; planning for 120 risks 20% too many." in idle
    assert late.startswith("sim-4xh100: with 130 users, 8% more than it holds, ")
    without, _ = payer.cost_of_being_wrong([priced("sim-4xh100", 120, [100, 150], None)])
    assert "unserved; planning for 120" in without and "an hour" not in without


def test_two_clusters_of_other_prices_and_gpu_counts(priced):
    answers = [priced("sim-4xh100", 120, [100, 150], 3.0), priced("sim-2xh200", 80, [75, 96], 5.0)]
    # 10/80 = 0.125 against 12/120 = 0.1 a user: 1.25 times; (10/12)/(96/100) = 0.868 to (10/12)/(75/150) = 1.667
    assert payer.cost_sentences(answers)[-1] == (
        "A user on sim-2xh200 costs 1.25 times what one on sim-4xh100 costs (0.87 to 1.67), where both prices are in "
        "one currency.")


@pytest.mark.parametrize("other", [
    ("sim-2xh200", 80, [75, 96], None), ("sim-2xh200", 80, [60, None], 5.0, "unresolved"),
    ("sim-2xh200", 0, [0, 3], 5.0)])
def test_one_that_is_priced_and_one_that_has_no_price_or_no_capacity(priced, other):
    first, second = priced("sim-4xh100", 120, [100, 150], 3.0), priced(*other)
    said = payer.cost_sentences([first, second])
    assert len(said) == 2 and "0.1 per user and hour" in said[0], "no ratio is made of half of it"
    assert any(words in said[1] for words in ("No price is known of sim-2xh200:", "is open, for the capacity is unres",
                                              "10 an hour for its 2 GPUs, and not one user within the SLA"))
    card = payer.Cards([second])._repr_html_()
    assert "per user and hour" not in card and "inf" not in card
    assert not any("nan" in sentence or "inf" in sentence for sentence in payer.cost_of_being_wrong([first, second]))


def test_an_interval_that_begins_at_nobody_has_no_upper_price(priced):
    one, two = priced("sim-4xh100", 120, [0, 150], 3.0), priced("sim-2xh200", 80, [0, 96], 5.0)
    said = payer.cost_sentences([one, two])
    assert "(0.08 to any amount over the interval)" in said[0]
    assert "(0 upwards)" not in said[-1]
    assert not any("nan" in sentence or "inf" in sentence for sentence in said)


@pytest.mark.parametrize("value, text", [(0.0925, "0.0925"), (9.8449, "9.84"), (52_300.4, "52,300"), (999.6, "1,000"),
                                         (99.96, "100"), (0.00001234, "0.0000123"), (12.0, "12")])
def test_money_is_never_a_power_of_ten(value, text):
    assert payer.money(value) == text


def test_a_users_price_is_in_the_comparison_of_sweeps(made_run, tmp_path):
    one, two = (Swept.read(made_run(tmp_path / name, 120, seed=1, cluster=name) / "sweep")
                for name in ("sim-4xh100", "sim-2xh200"))
    dear = [replace(swept, answer={**swept.answer, "price_per_gpu_hour": price})
            for swept, price in ((one, 3.0), (two, 5.0))]
    row = compare(dear).iloc[0]
    assert row["ratio"] == pytest.approx(1) and row["ratio_per_price"] == pytest.approx(12 / 10)
    assert row["ratio_per_gpu"] == pytest.approx(2)
    assert pd.isna(compare([dear[0], two]).iloc[0]["ratio_per_price"])


def test_the_clusters_own_price_wins_over_its_gpus(tmp_path):
    told = yaml.safe_load((config.data_dir() / "gpus" / "h100-sxm.yaml").read_text()) | {"price_per_gpu_hour": 2.5}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(told))
    hardware = load_cluster("sim-4xh100").hardware.model_copy(update={"gpu": str(tmp_path / "mine.yaml")})
    assert config.price_per_gpu_hour(hardware) == 2.5
    assert config.price_per_gpu_hour(hardware.model_copy(update={"price_per_gpu_hour": 4.0})) == 4.0
    assert config.price_per_gpu_hour(load_cluster("sim-4xh100").hardware) is None


@pytest.mark.parametrize("price", [0, -3, ".inf", ".nan", "cheap", "yes", "[3]"])
def test_a_price_that_is_none_is_one_sentence_and_status_2(tmp_path, price, monkeypatch, capsys):
    text = yaml.safe_dump(yaml.safe_load((config.data_dir() / "clusters" / "sim-4xh100.yaml").read_text()) | {
        "hardware": {"gpu": "h100-sxm", "count": 4, "price_per_gpu_hour": "PRICE"}}).replace("PRICE", str(price))
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(InputError, match=r"field 'hardware\.price_per_gpu_hour': .*(greater|finite|number)") as caught:
        load_cluster(str(tmp_path / "mine.yaml"))
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(sys, "argv", ["spoc", "run", str(tmp_path / "mine.yaml")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and capsys.readouterr().err == f"spoc: {caught.value}\n"
