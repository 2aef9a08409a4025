"""The twin fitted to one launch predicts others: a slowed twin stands for the real server."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from spoc_lib.config import Cluster, load_cluster, load_profile
from spoc_lib.engine.steptime.parameters import Parameters
from spoc_lib.search.heldout import CalibratedTwin, held_out
from spoc_lib.search.space import build_space
from spoc_lib.search.study import SearchStudy
from spoc_lib.search.workload import script_factory

pytestmark = pytest.mark.slow

SPACE = {"max_num_batched_tokens": [512, 2048, 8192], "enable_prefix_caching": [True, False]}


@dataclass
class SlowServer(CalibratedTwin):
    """A server whose gaps between steps are long, and whose prompts come late to it."""

    def engine(self, flags):
        engine = super().engine(flags)
        slow = engine.step_time.parameters.model_copy(update={"gap_us": 6000.0, "frontend_us": 9000.0})
        return dataclasses.replace(engine, step_time=engine.step_time.with_parameters(slow))


def test_a_twin_fitted_to_the_defaults_predicts_the_other_engines(tmp_path):
    base = load_cluster("sim-4xh100").model_dump()
    cluster = Cluster.model_validate({**base, "personas": "tiny", "search": {"target_users": 24, "space": SPACE}})
    space, factory = build_space(cluster), script_factory(cluster, load_profile("quick"), 1)
    server = SlowServer(cluster, space, factory, 24, 16.0, 4.0)
    others = [{**space.defaults, "max_num_batched_tokens": 2048}, {**space.defaults, "enable_prefix_caching": False}]
    study = SearchStudy(space, server, tmp_path, "workload", 1, 4, [space.defaults, *others])

    def twin(parameters: Parameters | None) -> CalibratedTwin:
        return CalibratedTwin(cluster, space, factory, 24, 16.0, 4.0, evidence=False, parameters=parameters)

    study.run(1)
    assert "another engine than the defaults" in held_out(study, cluster, twin).sentence
    study.run(3)
    found = held_out(study, cluster, twin)
    assert found.table["trial"].tolist() == [1, 1, 1, 2, 2, 2]
    itl = found.table[found.table["objective"] == "itl_p95_s"]
    assert (itl["twin_error_ratio"] < -0.2).all()
    assert (itl["calibrated_error_ratio"].abs() < 0.5 * itl["twin_error_ratio"].abs()).all()
    assert "predicts the 2 other engines" in found.sentence and "p95 ITL" in found.sentence
    (tmp_path / "trials" / "0000" / "requests.parquet").unlink()
    assert "could not be fitted" in held_out(study, cluster, twin).sentence
