"""The shared ground: percentiles, whole files, tables that grow, YAML faults as sentences."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spoc_lib import config
from spoc_lib.core import files, tables
from spoc_lib.core.errors import InputError
from spoc_lib.core.stats import percentile

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = pa.schema([("x", pa.int64()), ("name", pa.string())])


def test_percentile_is_nearest_rank():
    values = [15, 20, 35, 40, 50]
    assert [percentile(values, q) for q in (5, 30, 40, 50, 100)] == [15, 20, 20, 35, 50]


def test_a_failure_is_an_infinite_latency_never_nan():
    values = [1.0] * 94 + [math.inf] * 6
    assert percentile(values, 94) == 1.0
    assert percentile(values, 95) == math.inf


def test_percentile_refuses_nan_and_is_nan_without_values():
    assert math.isnan(percentile([], 50))
    with pytest.raises(ValueError, match="NaN"):
        percentile([1.0, math.nan], 50)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.1, 100))
def test_percentile_covers_its_share(values, q):
    p = percentile(values, q)
    assert p in values
    assert sum(v <= p for v in values) / len(values) >= q / 100 - 1e-9


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    target = files.write_text(tmp_path / "a.txt", "old")
    with pytest.raises(RuntimeError), files.replacing(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_json_holds_infinities_and_nan_plainly():
    assert files.plain({"a": math.inf, "b": math.nan, "c": (1, 2)}) == {"a": "inf", "b": None, "c": [1, 2]}


def test_table_round_trip_and_schema_faults(tmp_path):
    path = tables.write_table(tmp_path / "t.parquet", [{"x": 1, "name": "a"}], SCHEMA)
    assert tables.read_table(path, SCHEMA).to_dict("records") == [{"x": 1, "name": "a"}]
    with pytest.raises(ValueError, match="unknown columns"):
        tables.write_table(path, [{"x": 1, "nome": "a"}], SCHEMA)
    with pytest.raises(InputError, match="does not exist"):
        tables.read_table(tmp_path / "absent.parquet", SCHEMA)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(InputError, match="not a readable Parquet"):
        tables.read_table(tmp_path / "bad.parquet", SCHEMA)


def test_a_killed_appender_loses_only_what_was_not_flushed(tmp_path):
    path = tmp_path / "grow.parquet"
    writer = tables.TableAppender(path, SCHEMA)
    writer.append({"x": 1, "name": "a"})
    writer.flush()
    writer.append({"x": 2, "name": "lost"})
    assert not path.exists()
    tables.TableAppender.recover(path, SCHEMA)
    assert tables.read_table(path, SCHEMA)["x"].tolist() == [1]


@pytest.mark.parametrize(
    "folder, load",
    [
        ("clusters", config.load_cluster),
        ("models", config.load_model),
        ("gpus", config.load_gpu),
        ("profiles", config.load_profile),
    ],
)
def test_everything_that_ships_loads(folder, load):
    names = [n for n in config.names(folder) if "calibration" not in n]
    assert names
    for name in names:
        assert load(name).name == name


@pytest.mark.parametrize(
    "change, words",
    [
        ("hardware: {gpu: h100-sxm, count: 4}", None),
        ("hardware: {gpu: h100-sxm, count: 0}", "hardware.count"),
        ("hardware: {gpu: h100-sxm, cuont: 4}", "hardware"),
        ("hardware: [broken", "not valid YAML"),
        ("hardware: {gpu: b9000, count: 4}", "unknown gpu 'b9000'"),
    ],
)
def test_a_fault_in_a_cluster_file_is_one_sentence_that_names_the_field(tmp_path, change, words):
    text = (ROOT / "data/clusters/sim-4xh100.yaml").read_text().replace("hardware: {gpu: h100-sxm, count: 4}", change)
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    if words is None:
        assert config.load_cluster(str(path)).hardware.count == 4
        return
    with pytest.raises(InputError) as caught:
        config.load_cluster(str(path))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_default_slos_stand():
    """The limits that the shipped comparison is judged by; moving them moves the answer, so a test holds them."""
    for name in ("sim-4xh100", "sim-2xh200"):
        slos = config.load_cluster(name).slos
        assert [(s.persona, s.metric, s.percentile, s.limit_s) for s in slos] == [
            ("all", "ttft", 95, 5.0),
            ("all", "itl", 95, 0.05),
        ]
