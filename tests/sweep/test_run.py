"""A whole sweep on the twin: the answer's keys, resuming, comparing, and what a user may get wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml

from spoc_lib import config
from spoc_lib.cli import main
from spoc_lib.config import LadderSpec, Profile, Slo, load_cluster
from spoc_lib.core.errors import InputError
from spoc_lib.core.schemas import METRICS, RUNGS, SLO_VERDICTS
from spoc_lib.core.tables import read_table
from spoc_lib.sweep import drivers, run_sweep
from spoc_lib.sweep.capacity import read_capacity
from spoc_lib.sweep.compare import compare_folders
from spoc_lib.sweep.updown import up_and_down
from spoc_lib.workload import build_script

pytestmark = pytest.mark.slow

SLOS = [Slo(metric="ttft", percentile=95, limit_s=2.0), Slo(metric="itl", percentile=95, limit_s=0.04)]
LIMIT = 131_072


def profile(**changed) -> Profile:
    return Profile(**{**dict(
        name="test", title="seconds", audit_users=4, audit_turns=2, search_trials=1, search_population=2,
        search_finalists=1, screen_s=20, rung_s=40, warmup_s=10, http_rung_s=12, http_users=6, probes=6, trace_s=1,
        gap_cap_s=10), **changed})


def cluster(name: str = "sim-2xh200", **changed):
    spec = load_cluster(name)
    return spec.model_copy(update={"slos": SLOS, "ladder": LadderSpec(users=[5, 10, 20, 40, 80]), **changed})


def factory(salt: int):
    return build_script("spoc", 3, salt=salt, gap_cap_s=10, context_limit=LIMIT)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    said: list[str] = []
    return run_sweep(cluster(), profile(), {}, folder, factory, confirm_http=False, progress=said.append), said


def test_the_answer_has_every_key_of_the_design(swept):
    result, said = swept
    answer = json.loads((result.folder / "capacity.json").read_text())
    assert answer == result.capacity
    assert answer["simulated"] is True and answer["passport"]["simulated"]
    assert any("lie outside the measured" in said for said in answer["passport"]["outside"])
    assert answer["verdict"] in ("resolved", "unresolved") and answer["level"] == 0.9
    low, high = answer["interval"]
    assert low <= answer["max_users"] and (high is None or answer["max_users"] <= high)
    assert {"persona", "metric", "percentile", "limit_s", "value_s"} <= set(answer["binding"])
    assert answer["saturated"]["resource"] in ("prefill_compute", "decode_bandwidth", "kv_blocks", "sequence_slots",
                                               "token_budget", "interconnect", "throttled_gpu", "host", "client",
                                               "unknown")
    assert answer["saturated"]["evidence"] and len(answer["rungs"]) == len(result.rungs) <= 6
    assert answer["verdict"] == "resolved" or answer["next"]
    assert "at most 6 rungs" in said[0]
    assert [lesson["name"] for lesson in answer["lessons"]] == [
        "utilisation is not the SLA", "memory is not always the bottleneck", "chunked prefill is the trade-off",
        "overload leaves no trace"]
    assert {"before", "after", "moved", "users", "top_users", "slo"} <= set(result.up_down.columns)
    assert any("ysteresis, 50 s after an overload of" in text for text in result.findings())
    assert result.findings()[0].startswith("sim-2xh200 holds")


def test_the_tables_are_there_and_every_rung_accounts_for_all_its_users(swept):
    result, _ = swept
    rungs = read_table(result.folder / "rungs.parquet", RUNGS)
    assert (rungs["planned"] == rungs["completed"] + rungs["failed"] + rungs["censored"]).all()
    assert (rungs["little_error_ratio"] < 0.03).all() and (rungs["verdict"] != "invalid").all()
    assert rungs["sm_active_ratio"].between(0, 1).all() and rungs["kv_usage_ratio"].between(0, 1).all()
    slo = read_table(result.folder / "slo_verdicts.parquet", SLO_VERDICTS)
    assert set(slo["verdict"]) <= {"met", "missed", "undecided"}
    assert len(read_table(result.folder / "metrics.parquet", METRICS)) and result.window[0] < result.window[1]


def test_each_rung_meets_other_users_and_a_cold_cache():
    users = drivers.FreshUsers(factory)
    one, two = users.script(1), users.script(2)
    assert users.reseeds and users.personas == ["P0", "P1", "P2"] and users.gap_cap_s == 10
    assert (one.seed, one.salt) != (two.seed, two.salt) and one.seed != two.seed
    assert users.plain(7).seed == 3 and users.plain(7).salt == 7


def test_a_sweep_that_was_cut_off_pays_for_no_rung_twice(swept, tmp_path, monkeypatch):
    result, _ = swept
    played: list[int] = []
    real = drivers.virtual_rung

    def counted(engine, script, users, timing, seed):
        played.append(users)
        if len(played) == 3 and not resumed:
            raise KeyboardInterrupt
        return real(engine, script, users, timing, seed)

    def stairs(*given, **named):
        climbs.append(1)
        return up_and_down(*given, **named)

    resumed, climbs = False, []
    monkeypatch.setattr("spoc_lib.sweep.run.virtual_rung", counted)
    monkeypatch.setattr("spoc_lib.sweep.twinchecks.up_and_down", stairs)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(cluster(), profile(), {}, tmp_path, factory, confirm_http=False)
    first, resumed = list(played), True
    again = run_sweep(cluster(), profile(), {}, tmp_path, factory, confirm_http=False)
    assert first[:2] == again.rungs["users"].tolist()[:2] and len(first) == 3
    assert len(played) - 3 == len(result.rungs) - 2  # the rest of the ladder
    assert again.rungs["users"].tolist() == result.rungs["users"].tolist()
    assert again.capacity["max_users"] == result.capacity["max_users"]  # same script, same twin: same answer
    before = len(played)
    run_sweep(cluster(), profile(), {}, tmp_path, factory, confirm_http=False)
    assert len(played) == before and len(climbs) == 1
    rung = tmp_path / "rungs" / "01" / "rung.json"
    whole = rung.read_text()
    for spoiled in (whole[:300], "[]", "{}"):
        rung.write_text(spoiled)
        with pytest.raises(InputError, match="01/rung.json is damaged .*: remove it, and it is played again"):
            run_sweep(cluster(), profile(), {}, tmp_path, factory, confirm_http=False)
    rung.write_text(whole)
    changed = run_sweep(cluster(), profile(), {"max_num_seqs": 64}, tmp_path, factory, confirm_http=False)
    assert len(played) > before and changed.capacity["flags"] == {"max_num_seqs": 64}


def test_a_rung_of_another_workload_server_or_seed_is_not_taken_for_this_one(tmp_path, monkeypatch):
    played: list[int] = []
    real = drivers.virtual_rung

    def counted(engine, script, users, timing, seed):
        played.append(users)
        return real(engine, script, users, timing, seed)

    monkeypatch.setattr("spoc_lib.sweep.run.virtual_rung", counted)
    brief, one = profile(rung_s=5, warmup_s=1, probes=1), cluster(ladder=LadderSpec(users=[2]))
    priced = one.model_copy(update={"hardware": one.hardware.model_copy(update={"price_per_gpu_hour": 3.0})})
    larger = one.model_copy(update={"hardware": one.hardware.model_copy(update={"count": 4})})

    def capped(salt: int):
        return build_script("spoc", 3, salt=salt, gap_cap_s=1, context_limit=LIMIT)

    for asked, script, seed, again in ((one, factory, 0, 1), (one, factory, 0, 0), (priced, factory, 0, 0),
                                       (one, capped, 0, 1), (larger, capped, 0, 1), (larger, capped, 5, 1)):
        played.clear()
        run_sweep(asked, brief, {}, tmp_path, script, seed, confirm_http=False)
        assert len(played) == again, (asked.hardware, seed)
    shutil.copytree(config.data_dir(), tmp_path / "data")
    gpu = tmp_path / "data" / "gpus" / f"{larger.hardware.gpu}.yaml"
    gpu.write_text(gpu.read_text().replace("memory_gib: ", "memory_gib: 1"))
    monkeypatch.setenv("SPOC_DATA", str(tmp_path / "data"))
    run_sweep(larger, brief, {}, tmp_path, capped, 5, confirm_http=False)
    assert len(played) == 2, "another GPU by the same name"


def test_another_level_gives_another_interval(swept):
    result, _ = swept
    wide, narrow = (read_capacity(result.folder, level) for level in (0.99, 0.5))
    assert wide["interval"][0] <= narrow["interval"][0]
    assert wide["interval"][1] is None or wide["interval"][1] >= narrow["interval"][1]
    assert read_capacity(result.folder) == result.capacity
    with pytest.raises(InputError, match="0.9"):
        read_capacity(result.folder, 2.0)


def test_clusters_are_compared_over_the_limits(swept, tmp_path):
    result, _ = swept
    other = run_sweep(cluster("sim-4xh100"), profile(probes=5), {}, tmp_path, factory, confirm_http=False)
    table = compare_folders([result.folder, other.folder])
    assert table["own_limit"].sum() == 1 and len(table) == 12
    assert (table["naive_gpus"] == 2).all() and table["naive_bandwidth"].iloc[0] == pytest.approx(2 * 3.35 / 4.8)
    known = table.dropna(subset=["ratio", "low", "high"])
    assert len(known) and (known["low"] <= known["ratio"]).all() and (known["ratio"] <= known["high"]).all()
    assert known["ratio_per_gpu"].iloc[0] == pytest.approx(known["ratio"].iloc[0] / 2)
    assert table["ratio_per_price"].isna().all()  # no price is given
    loose = table.dropna(subset=["users"]).sort_values("limit_s")["users"]
    assert loose.is_monotonic_increasing
    with pytest.raises(InputError, match="two folders"):
        compare_folders([result.folder])


def test_an_slo_that_names_nobody_is_refused_before_anything_runs(tmp_path):
    bad = cluster(slos=[Slo(persona="P7", metric="ttft", limit_s=1.0)])
    with pytest.raises(InputError, match="P7.*use all or one of P0, P1, P2"):
        run_sweep(bad, profile(), {}, tmp_path, factory)
    assert not (tmp_path / "rungs").exists()


def test_the_command_line_refuses_in_one_sentence(tmp_path, monkeypatch, capsys):
    text = yaml.safe_load((load_cluster_path()).read_text())
    text["slos"] = [{"persona": "nobody", "metric": "ttft", "limit_s": 1.0}]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(text))
    for arguments, word in ((("run", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "o")), "nobody"),
                            (("run", "no-such-cluster"), "sim-4xh100"),
                            (("run", "sim-2xh200", "--flags", "max_num_seqs"), "name=value"),
                            (("run", "sim-2xh200", "--flags", "no_such_flag=1", "--out", str(tmp_path / "p")),
                             "no_such_flag"),
                            (("capacity", str(tmp_path)), "spoc sweep run"),
                            (("compare", str(tmp_path), str(tmp_path)), "spoc sweep run")):
        monkeypatch.setattr(sys, "argv", ["spoc", "sweep", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        said = capsys.readouterr().err.strip()
        assert stopped.value.code == 2 and word in said and len(said.splitlines()) == 1, said


def load_cluster_path():
    from spoc_lib.config import find

    return find("clusters", "sim-2xh200", "cluster")


def test_the_command_line_prints_the_answer(swept):
    result, _ = swept
    answer = subprocess.run([sys.executable, "-m", "spoc_lib", "sweep", "capacity", str(result.folder), "--json", "-"],
                            capture_output=True, text=True, check=False)
    assert answer.returncode == (0 if result.capacity["verdict"] == "resolved" else 1)
    assert json.loads(answer.stdout)["max_users"] == result.capacity["max_users"]


def test_a_client_that_cannot_keep_up_is_what_stops_it(tmp_path, monkeypatch):
    real = drivers.virtual_rung

    def outrun(engine, script, users, timing, seed):
        return replace(real(engine, script, users, timing, seed), client_limited=users > 10)

    monkeypatch.setattr("spoc_lib.sweep.run.virtual_rung", outrun)
    answer = run_sweep(cluster(), profile(probes=2), {}, tmp_path, factory, confirm_http=False).capacity
    assert answer["saturated"]["resource"] == "client" and answer["verdict"] == "unresolved"
    assert any("load generator could not keep up" in row["reason"] for row in answer["rungs"])
