"""What each notebook may be told: typed parameters, the same for papermill, `spoc run --set` and a hand-run cell.

papermill guesses types from text (`1.10` becomes 1.1, a hash like `12e5678` infinity, `false` stays text) and only
warns about a name that it does not know; here a wrong type or an unknown name is refused with a sentence.
"""

from __future__ import annotations

import ast
import os
import re
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from spoc_lib.config.access import without_secret_flag
from spoc_lib.config.flags import read_flags
from spoc_lib.core import yamlfile
from spoc_lib.core.errors import InputError
from spoc_lib.core.yamlfile import SHORT, Strict

#: Longest text, most users or trials, largest seed (the least that all random generators take), longest cap.
MOST_TEXT, MOST_COUNT, MOST_SEED, MOST_GAP_S = 4096, 1_000_000, 2**32 - 1, 86_400.0


def _words(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError(f"must be text; papermill turned it into {SHORT.repr(value)}: pass it with -r (raw) instead "
                         "of -p")
    if len(value) > MOST_TEXT:
        raise ValueError(f"must be at most {MOST_TEXT} characters, not {len(value)}")
    return value


def _text(value: Any) -> Any:
    if not _words(value).isprintable():
        raise ValueError("must be one line of plain text, without control characters")
    return value


def _flag_words(value: str) -> str:
    without_secret_flag(value.replace(",", " ").split())
    read_flags(value)
    return value


def _flag(value: Any) -> Any:
    words = {"true": True, "false": False, "yes": True, "no": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if isinstance(value, bool):
        return value
    raise ValueError("must be true or false")


def _whole(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,30}", value.strip()):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("must be a whole number")
    return value


def _number(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError("must be a number") from None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("must be a number")
    return value


Text = Annotated[str, BeforeValidator(_text)]
Words = Annotated[str, BeforeValidator(_words)]
FlagWords = Annotated[str, BeforeValidator(_words), AfterValidator(_flag_words)]
Flag = Annotated[bool, BeforeValidator(_flag)]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=MOST_COUNT)]
Seed = Annotated[int, BeforeValidator(_whole), Field(ge=0, le=MOST_SEED)]
Seconds = Annotated[float, BeforeValidator(_number), Field(ge=0, le=MOST_GAP_S)]


class Common(Strict):
    """Parameters of every notebook. Zero or empty means: what the profile, the cluster or the run says."""

    cluster: Text = "sim-4xh100"
    profile: Text = "quick"
    run_dir: Text = ""
    seed: Seed = 1


Kind = TypeVar("Kind", bound=Common)


class Workload(Common):
    """Of the notebooks that play conversations."""

    personas: Text = ""
    monorepo: Text = ""
    gap_cap_s: Seconds = 0.0


class P01(Workload):
    """Of workload modeling."""

    users: Count = 0


class P02(Workload):
    """Of the search."""

    trials: Count = 0
    target_users: Count = 0
    objective: Text = ""
    confirm_http: Flag = True


class P03(Workload):
    """Of the sweep; flags: name=value …"""

    flags: FlagWords = ""
    confirm_http: Flag = True


class P04(Workload):
    """Of the trace analysis; trace: a file to read, or a folder of those that ran together, capture: make one. What a
    trace may not tell: batch (tokens=…,decodes=…, of an average step), steps (in the window), rules (a file of
    categories), accept_graph_mode (no graphs were launched)."""

    flags: FlagWords = ""
    users: Count = 0
    trace: Text = ""
    capture: Flag = False
    batch: Text = ""
    steps: Count = 0
    rules: Text = ""
    accept_graph_mode: Flag = False


class P05(Common):
    """Of the report; runs: ids or folders, separated by commas."""

    runs: Text = ""
    paper: Flag = False
    what_if: Flag = False


@dataclass(frozen=True, slots=True)
class StageInfo:
    """A numbered notebook: `folder` is where its artefacts stand in the run, `reads` the stages it takes results of."""

    number: str
    notebook: str
    title: str
    folder: str
    parameters: type[Common]
    reads: tuple[str, ...] = ()


STAGES = {
    stage.number: stage
    for stage in (
        StageInfo("01", "01_workload_modeling", "workload modeling", "workload", P01),
        StageInfo("02", "02_nsga2_search", "NSGA-II search", "search", P02),
        StageInfo("03", "03_concurrency_sweep", "concurrency sweep", "sweep", P03, ("02",)),
        StageInfo("04", "04_nsight_trace_analysis", "Nsight trace analysis", "nsight", P04, ("02", "03")),
        StageInfo("05", "05_capacity_report", "capacity report", "report", P05,
                  ("01", "02", "03", "04")),
    )
}


def check(number: str, values: dict[str, Any]) -> Common:
    """The typed parameters of notebook `number`; InputError naming the parameter that is wrong or unknown."""
    stage = STAGES[number]
    unknown = sorted(set(values) - set(stage.parameters.model_fields))
    if unknown:
        raise InputError("unknown-parameter", f"notebook {stage.notebook} has no parameter '{unknown[0]}': it takes "
                         f"{', '.join(stage.parameters.model_fields)}")
    return yamlfile.parse(stage.parameters, values, f"parameters of {stage.notebook}")


def of_kind(kind: type[Kind], parameters: Common) -> Kind:
    """`parameters` as those of the notebook that has this kind; TypeError for another notebook's."""
    if not isinstance(parameters, kind):
        raise TypeError(f"{type(parameters).__name__} are not the parameters {kind.__name__}")
    return parameters


def from_notebook(number: str, namespace: dict[str, Any]) -> Common:
    """The parameters as they stand in a notebook's `globals()`.

    Names that papermill injected without the notebook knowing them are found in the source of its injected cell
    (`# Parameters`), which IPython keeps in `In`.
    """
    fields = STAGES[number].parameters.model_fields
    values = {name: namespace[name] for name in fields if name in namespace}
    for source in namespace.get("In", []):
        if source.lstrip().startswith("# Parameters"):
            for node in ast.parse(source).body:
                for target in getattr(node, "targets", []):
                    if isinstance(target, ast.Name):
                        values[target.id] = namespace.get(target.id)  # Python spells some letters its own way
    return check(number, values)


def split_settings(settings: list[str], stages: list[str]) -> dict[str, dict[str, str]]:
    """`--set name=value` pairs as parameters by stage; each must be known to one of `stages` at least."""
    chosen: dict[str, dict[str, str]] = {number: {} for number in stages}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator:
            raise InputError("bad-setting", f"--set {setting}: write it as name=value")
        takers = [n for n in stages if name in STAGES[n].parameters.model_fields and name not in Common.model_fields]
        if not takers:
            known = sorted({f for n in stages for f in STAGES[n].parameters.model_fields} - set(Common.model_fields))
            raise InputError("unknown-parameter", f"--set {name}: no such parameter; use one of {', '.join(known)}")
        for number in takers:
            chosen[number][name] = _user_path(name, value)
    return chosen


def absolute_settings(settings: list[str], stages: list[str]) -> list[str]:
    """The same `name=value` pairs, checked as by `split_settings`, their paths absolute: they mean the same from any
    folder."""
    chosen = split_settings(settings, stages)
    merged = {name: value for of_stage in chosen.values() for name, value in of_stage.items()}
    return [f"{name}={value}" for name, value in merged.items()]


def _user_path(name: str, value: str) -> str:
    """Notebooks run in their own folder, so a path given on the command line is made absolute."""
    recording = value.removeprefix("traces:")
    if recording != value and os.path.exists(os.path.expanduser(recording)):  # else a set on a hub
        return f"traces:{os.path.abspath(os.path.expanduser(recording))}"
    is_path = name in ("monorepo", "trace", "rules") or value.endswith((".yaml", ".yml"))
    return os.path.abspath(os.path.expanduser(value)) if is_path and value else value
