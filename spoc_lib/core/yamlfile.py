"""YAML files checked against a pydantic model; every fault becomes one sentence that names file and field."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from spoc_lib.core.errors import InputError

Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """Base of every file format of the workbench: frozen, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def parse(model: type[Model], value: object, where: str) -> Model:
    """`value` as a `model`; InputError naming the first faulty field, `where` it stands, and what is wanted."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "(top level)"
        given = "" if first["type"] in ("missing", "extra_forbidden") else f" (given: {first['input']!r:.80})"
        wanted = {"missing": "this field is required", "extra_forbidden": "no such field"}.get(
            first["type"], first["msg"].removeprefix("Value error, ")
        )
        more = f"; {error.error_count() - 1} more faults" if error.error_count() > 1 else ""
        raise InputError("bad-field", f"{where}: field '{field}': {wanted}{given}{more}") from error


def load(model: type[Model], path: str | Path) -> Model:
    """Read and check one YAML file."""
    path = Path(path)
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError("unreadable", f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError("bad-yaml", f"{path} is not a text file") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise InputError("bad-yaml", f"{path} is not valid YAML{line}: {getattr(error, 'problem', error)}") from error
    return parse(model, value, str(path))
