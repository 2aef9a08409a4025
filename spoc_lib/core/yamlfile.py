"""YAML files checked against a pydantic model; every fault becomes one sentence that names file and field."""

from __future__ import annotations

import codecs
import contextlib
import html
import math
import re
import reprlib
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from yaml.constructor import ConstructorError

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


def parse(model: type[Model], value: object, where: str, node: yaml.Node | None = None) -> Model:
    """`value` as a `model`; InputError naming the first faulty field, `where` it stands, and what is wanted.

    node: what `value` was read from, for the line."""
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
        line = f"line {_line(node, first['loc'])}: " if node else ""
        raise InputError("bad-field", f"{where}: {line}field '{field}': {wanted}{given}{more}") from error


def load(model: type[Model], path: str | Path) -> Model:
    """Read and check one YAML file.

    Values are those of YAML 1.2's core schema, where a person and a program read the same: `010` is ten, `1e5` a
    number, `1:30` and `2026-01-02` text, and only `true` and `false` are truths (a field that wants one takes `yes`,
    `no`, `on` and `off` too); beside it, `1_000` is a thousand. A key that stands twice is refused, with its lines.
    """
    node, value = _read(Path(path))
    return parse(model, value, str(path), node)


def read(path: str | Path) -> object:
    """What one YAML file says, as `load` reads it."""
    return _read(Path(path))[1]


def text_of(path: str | Path) -> str:
    """The text of a file; InputError where it cannot be read, or is none."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            return _text(file.read(MOST_BYTES + 1), path)
    except OSError as error:
        raise InputError("unreadable", f"cannot read {path}: {error.strerror}") from error


def dump(value: object, **options: Any) -> str:
    """`value` as YAML that `load` reads back as it is, as do readers of YAML 1.1. options: of `yaml.dump`."""
    return yaml.dump(value, Dumper=_Dumper, **{"sort_keys": False, "allow_unicode": True, **options})


def _read(path: Path) -> tuple[yaml.Node | None, object]:
    text = text_of(path)
    try:
        return _value(text, path)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        problem = ", ".join(filter(None, (getattr(error, "context", ""), getattr(error, "problem", str(error)))))
        fix = ": indent with blanks" if "'\\t'" in problem else ""
        raise InputError("bad-yaml", f"{path} is not valid YAML{line}: {problem}{fix}") from error
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, a thousand brackets
        raise InputError("bad-yaml", f"{path} holds what YAML cannot mean: {error}") from error


class Word(str):
    """`yes`, `no`, `on` or `off` as it stands without quotes: a truth to some readers of YAML, text to others."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core schema, with merge keys; no other tags."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {}
    yaml_constructors: ClassVar[dict[Any, Any]] = {}

    def undefined(self, node: yaml.Node) -> None:
        """The fault of a tag that has no meaning here."""
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        raise ConstructorError(None, None, f"the tag {tag:.40} has no meaning here: write the plain value",
                               node.start_mark)

    def text(self, node: yaml.ScalarNode) -> str:
        """Text; what may be meant as a truth is marked."""
        plain = not node.style and str(node.value).lower() in ("yes", "no", "on", "off")
        return Word(node.value) if plain else str(self.construct_scalar(node))


def _scalar(kind: str, shape: str, first: str, read: Callable[[str], object]) -> None:
    """Teach the loader one type of scalar: what it looks like, what it begins with, what it means."""
    pattern, tag = re.compile(shape), f"tag:yaml.org,2002:{kind}"

    def construct(loader: _Loader, node: yaml.ScalarNode) -> object:
        text = str(loader.construct_scalar(node))
        try:
            if pattern.fullmatch(text):
                return read(text.replace("_", ""))
        except (ValueError, OverflowError):  # 5000 digits, 1e999
            pass
        raise ConstructorError(None, None, f"{SHORT.repr(text)} cannot be read as {kind}: if it is text, write it in "
                               "quotes", node.start_mark)

    _Loader.add_implicit_resolver(tag, re.compile(f"(?:{shape})$"), list(first))
    _Loader.add_constructor(tag, construct)


def _integer(text: str) -> int:
    return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))


def _decimal(text: str) -> float:
    value = float(text.replace(".inf", "inf").replace(".nan", "nan"))
    if math.isinf(value) and "inf" not in text:
        raise OverflowError
    return value


def _day(text: str) -> str:
    """A day is text here; one that does not exist is a slip."""
    date.fromisoformat(text)
    return text


_scalar("null", "~|null|Null|NULL|", "~nN\0", lambda text: None)
_scalar("bool", "true|True|TRUE|false|False|FALSE", "tTfF", lambda text: text.lower() == "true")
_scalar("int", r"[-+]?(?:\d+|\d{1,3}(?:_\d{3})+)|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789", _integer)
_scalar("float", r"[-+]?(?:\.\d+|(?:\d+|\d{1,3}(?:_\d{3})+)(?:\.\d*)?)(?:[eE][-+]?\d+)?|[-+]?\.(?:inf|Inf|INF)"
        r"|\.(?:nan|NaN|NAN)", "-+0123456789.", lambda text: _decimal(text.lower()))
_scalar("timestamp", r"\d{4}-\d\d-\d\d", "0123456789", _day)
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("$"), [""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile("<<$"), ["<"])
_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.text)
_Loader.add_constructor("tag:yaml.org,2002:seq", _Loader.construct_yaml_seq)
_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_yaml_map)
_Loader.add_constructor(None, _Loader.undefined)


class _FastLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The same by libyaml, ten times as fast; its own faults are worse to read."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
    yaml_constructors = _Loader.yaml_constructors
    undefined, text = _Loader.undefined, _Loader.text


class _Dumper(yaml.SafeDumper):
    """Writes text in quotes wherever one of the two schemas would take it for something else."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[Any]]] = {
        start: [one for schema in (yaml.SafeLoader, _Loader) for one in schema.yaml_implicit_resolvers.get(start, [])]
        for start in {*yaml.SafeLoader.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}}


_Dumper.add_multi_representer(str, yaml.SafeDumper.represent_str)


def _text(data: bytes, path: Path) -> str:
    """What the bytes of a file say: UTF-8, with or without its mark, or UTF-16 by its mark."""
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError("bad-yaml", f"{path} is not a text file in UTF-8 (line {line}): save it as UTF-8") from error


def _value(text: str, path: Path) -> tuple[yaml.Node | None, object]:
    """The text's tree, and what it means; InputError when it is too much, or a key stands twice."""
    if "\t" not in text:  # libyaml takes tabs where YAML does not
        with contextlib.suppress(yaml.YAMLError):
            return _loaded(text, path, _FastLoader)
    return _loaded(text, path, _Loader)


def _loaded(text: str, path: Path, kind: type) -> tuple[yaml.Node | None, object]:
    too_large = InputError("too-large", f"{path} is too large for a file of this kind: {MOST_BYTES // 10**6} MB and "
                           f"{MOST_NODES:,} values at most, aliases written out")
    if len(text) > MOST_BYTES:
        raise too_large
    loader = kind(text)
    try:
        node = loader.get_single_node()
        if _nodes(node, {}) > MOST_NODES:
            raise too_large
        _unique_keys(node, path, set())
        return node, None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _nodes(node: yaml.Node | None, known: dict[int, float]) -> float:
    """Nodes below this one with every alias written out; infinite where one holds itself."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = float("inf")  # until it is counted: whoever comes back here goes round in circles
        known[id(node)] = 1 + sum(_nodes(one, known) for one in _children(node))
    return known[id(node)]


def _children(node: yaml.CollectionNode) -> list[yaml.Node]:
    return [one for pair in node.value for one in pair] if isinstance(node, yaml.MappingNode) else list(node.value)


def _unique_keys(node: yaml.Node | None, path: Path, seen: set[int]) -> None:
    """InputError for the first key that stands twice in one mapping, before merge keys are filled in."""
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return
    seen.add(id(node))
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode):
            line, first = key.start_mark.line + 1, lines.get((key.tag, key.value))
            if first is not None:
                where = f"line {line}" if first == line else f"lines {first} and {line}"
                raise InputError("key-twice", f"{path}: the key '{key.value:.60}' stands twice, at {where}: keep one")
            lines[key.tag, key.value] = line
    for one in _children(node):
        _unique_keys(one, path, seen)


def _line(node: yaml.Node, location: tuple[int | str, ...]) -> int:
    """The line of a field, of what holds it where it is not there (a type's name in a union is no field)."""
    line = node.start_mark.line + 1
    for part in location:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if getattr(key, "value", None) == str(part)), None)
            if found is None:
                continue
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
    return line
