"""YAML files checked against a pydantic model; every fault becomes one sentence that names file and field."""

from __future__ import annotations

import html
import reprlib
from pathlib import Path
from typing import Annotated, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from spoc_lib.core.errors import InputError


def _number(value: object) -> object:
    """`yes` and `on` are truths in YAML, and pydantic would take them for 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


PositiveOrInf = Annotated[float, BeforeValidator(_number), Field(gt=0)]
Positive = Annotated[PositiveOrInf, Field(allow_inf_nan=False)]
PositiveInt = Annotated[int, BeforeValidator(_number), Field(gt=0)]
Model = TypeVar("Model", bound=BaseModel)
#: Nobody writes more by hand. The nodes are counted with every alias written out: a few lines can mean billions.
MOST_BYTES, MOST_NODES = 20_000_000, 2_000_000
#: The type of a fault whose input is a credential: what was given is not repeated.
SECRET = "secret"
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 80


class Strict(BaseModel):
    """Base of every file format of the workbench: frozen, and unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __dir__(self) -> list[str]:
        """The fields and what is derived from them, without pydantic's own tools: what tab completion should offer."""
        derived = {name for kind in type(self).__mro__ for name, value in vars(kind).items()
                   if isinstance(value, property) and not name.startswith(("_", "model_"))}
        return sorted({*type(self).model_fields, *derived})

    def _repr_html_(self) -> str:
        rows = ((name, getattr(self, name)) for name in type(self).model_fields)
        cells = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(_shown(value))}</td></tr>"
                        for name, value in rows if value not in (None, [], {}))
        return f'<table class="spoc-facts">{cells}</table>'


def _shown(value: object) -> str:
    """A field for people: nested files as `name value`, lists with commas."""
    if isinstance(value, BaseModel):
        told = ((name, getattr(value, name)) for name in type(value).model_fields)
        return ", ".join(f"{name} {_shown(inner)}" for name, inner in told if inner not in (None, [], {}))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(inner)}" for name, inner in value.items())
    if isinstance(value, (list, tuple)):
        return "; ".join(map(_shown, value))
    return str(value)


def parse(model: type[Model], value: object, where: str) -> Model:
    """`value` as a `model`; InputError naming the first faulty field, `where` it stands, and what is wanted."""
    try:
        return model.model_validate(value)
    except InputError as error:  # of a validator that has its own sentence
        raise InputError(error.code, f"{where}: {error.message}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "(top level)"
        untold = first["type"] in ("missing", "extra_forbidden", SECRET)
        given = "" if untold else f" (given: {SHORT.repr(first['input']):.80})"
        wanted = {"missing": "this field is required", "extra_forbidden": "no such field"}.get(
            first["type"], first["msg"].removeprefix("Value error, ")
        )
        more = f"; {error.error_count() - 1} more faults" if error.error_count() > 1 else ""
        raise InputError("bad-field", f"{where}: field '{field}': {wanted}{given}{more}") from error


def load(model: type[Model], path: str | Path) -> Model:
    """Read and check one YAML file."""
    path = Path(path)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MOST_BYTES + 1)
        value = _value(text, path)
    except OSError as error:
        raise InputError("unreadable", f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError("bad-yaml", f"{path} is not a text file") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise InputError("bad-yaml", f"{path} is not valid YAML{line}: {getattr(error, 'problem', error)}") from error
    except (ValueError, RecursionError) as error:  # a date that does not exist, a thousand brackets
        raise InputError("bad-yaml", f"{path} holds what YAML cannot mean: {error}") from error
    return parse(model, value, str(path))


def _value(text: str, path: Path) -> object:
    """What the text means; InputError when it is too much."""
    too_large = InputError("too-large", f"{path} is too large for a file of this kind: {MOST_BYTES // 10**6} MB and "
                           f"{MOST_NODES:,} values at most, aliases written out")
    if len(text) > MOST_BYTES:
        raise too_large
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if _nodes(node, {}) > MOST_NODES:
            raise too_large
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _nodes(node: yaml.Node | None, known: dict[int, float]) -> float:
    """Nodes below this one with every alias written out; infinite where one holds itself."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = float("inf")  # until it is counted: whoever comes back here goes round in circles
        parts = [one for pair in node.value for one in pair] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_nodes(one, known) for one in parts)
    return known[id(node)]
