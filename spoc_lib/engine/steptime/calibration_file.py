"""The file that a calibration is: parameters, what they were fitted to, where they hold, how wrong they are."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field

from spoc_lib.config import data_dir
from spoc_lib.core import yamlfile
from spoc_lib.core.files import plain, write_text
from spoc_lib.core.yamlfile import Strict
from spoc_lib.engine.steptime.parameters import Parameters

Interval = Annotated[list[float], Field(min_length=2, max_length=2)]


class Range(Strict):
    """Where the measurements lay. Intervals are closed: [least, most]."""

    gpus: list[str]
    gpu_counts: list[int]
    concurrency: Interval = Field(description="requests in flight")
    prompt_tokens: Interval
    context_tokens: Interval = Field(description="prompt and output of one request")
    batched_tokens: Interval = Field(description="max_num_batched_tokens of the measured servers")
    cached_prefix: bool = Field(description="whether prompts with prefix-cache hits were among the measurements")
    kv_bits: list[float] = [16]
    precisions: list[str] | None = Field(None, description="part and precision of the measured GEMMs, such as `experts "
                                         "W4A16 bf16`; null: as the model's file states it")
    attention: list[str] | None = Field(None, description="kinds of attention measured (softmax, sliding, mla, linear)")


class ErrorPair(Strict):
    """Mean absolute percentage errors over points."""

    points: int
    tpot_percent: float
    ttft_percent: float


class Errors(Strict):
    """fitted: on the points that the fit saw, flagged outliers left out; all_points: with them;
    the others: every point predicted by a fit that did not see its group. For a real run a point is a request,
    TPOT its decode time a token, TTFT that of requests whose prompt came in alone."""

    fitted: ErrorPair
    all_points: ErrorPair
    held_out_gpu_count: ErrorPair | None = None
    held_out_gpu: ErrorPair | None = None
    held_out_concurrency: ErrorPair | None = None
    held_out_lengths: ErrorPair | None = None
    held_out_time: ErrorPair | None = Field(None, description="a real run: each half predicted by the other")


class Residual(Strict):
    """One measured point: signed errors, model against measurement."""

    gpu: str
    gpu_count: int
    prompt: int
    output: int
    concurrency: int
    tpot_percent: float
    ttft_percent: float
    outlier: bool = False


class Calibration(Strict):
    """Step-time parameters of one model, with provenance."""

    model: str
    title: str
    command: str = Field(description="the command that made this file")
    sources: list[str]
    outlier_rule: str
    range: Range | None = Field(description="null when no serving point was fitted")
    errors: Errors | None = None
    parameters: Parameters
    residuals: list[Residual] = []

    @property
    def id(self) -> str:
        """Short hash of what determines a prediction: model and parameters."""
        text = self.model + yaml.safe_dump(self.parameters.model_dump(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def path_of(model_name: str) -> Path:
    """Where the calibration of a model is looked for."""
    return data_dir() / "kernels" / f"{model_name}.steptime.yaml"


def load(path: str | Path) -> Calibration:
    """Read a calibration; InputError names a faulty field."""
    return yamlfile.load(Calibration, path)


def save(path: str | Path, calibration: Calibration) -> Path:
    """Write a calibration, whole or not at all, residuals one a line."""
    head = plain(calibration.model_dump(exclude={"residuals"}))
    text = yaml.safe_dump(head, sort_keys=False, width=110, allow_unicode=True)
    rows = [yaml.safe_dump(r.model_dump(), sort_keys=False, default_flow_style=True, width=1000).strip()
            for r in calibration.residuals]
    if rows:
        text += "residuals:\n" + "".join(f"- {row}\n" for row in rows)
    return write_text(path, text)
