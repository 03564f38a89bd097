"""JSON schemas of tools: made from a signature and its docstring, and what arguments are checked by."""

import functools
import inspect
import json
import re
import reprlib
import textwrap
import typing
from collections.abc import Callable, Container, Mapping
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast

from jsonschema import Draft202012Validator, SchemaError, ValidationError
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from jsonschema_specifications import REGISTRY  # pyright: ignore[reportMissingTypeStubs]
from referencing import Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from mtgrpo.errors import ConfigError, PolicyError
from mtgrpo.parts.extension import place
from mtgrpo.runtime.files import is_deeper
from mtgrpo.types import ToolSpec


class ToolError(PolicyError):
    """A tool refuses what the model asked for; the model sees the text as its observation."""


def signature_spec(name: str, tool: Callable[..., Any], bound: Container[str] = ()) -> ToolSpec:
    """A callable as the model sees it: a JSON schema from the signature, descriptions from the docstring.

    The description is the docstring's first paragraph, those of the arguments come from its `Args:` section; for an
    object it is the docstring of `__call__`, or else of the class. A parameter is a str, int, float, bool, list, dict,
    Literal or Enum (the model gives the value), each also `| None`; with a default it is optional. Parameters that are
    `bound` are left out. Raises ConfigError naming the parameter that no schema can describe.
    """
    who = f"the tool {name}{place(_function(tool))}"
    description, arguments = _read_docstring(tool)
    if not description:
        raise ConfigError(f"{who} needs a docstring: its first paragraph is what the model is told of it")
    properties: dict[str, Any] = {}
    required: list[str] = []
    hints = _hints(_function(tool))
    for parameter in inspect.signature(tool).parameters.values():
        where = f"{who}: parameter {parameter.name!r}"
        if parameter.name in bound:
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"{where} cannot be given by name; the model calls tools with named arguments only")
        if parameter.name not in hints:
            raise ConfigError(f"{where} has no annotation; write {parameter.name}: str or another type")
        properties[parameter.name] = _schema(hints[parameter.name], where)
        if parameter.name in arguments:
            properties[parameter.name]["description"] = arguments[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    return ToolSpec(name, description, {"type": "object", "properties": properties, "required": required})


class ArgumentCheck:
    """Raises ToolError, in words that help the model, unless arguments fit the schema of a tool.

    closed: arguments that the schema does not name are refused, whether it says so or not. To make one raises
    ConfigError where the schema is none.
    """

    def __init__(self, spec: ToolSpec, closed: bool) -> None:
        self._name, self._made_of = spec.name, (spec, closed)
        schema: Any = {**spec.parameters, "additionalProperties": False} if closed else dict(spec.parameters)
        kind = validator_for(schema, default=Draft202012Validator)
        try:
            kind.check_schema(schema)
        except SchemaError as error:
            raise ConfigError(f"the tool {spec.name} has no valid JSON schema: {error.message[:200]}") from error
        self._validator = kind(schema, registry=REGISTRY)  # with this registry nothing is ever fetched
        resource = Resource[Any].from_contents(schema, default_specification=DRAFT202012)
        _resolve(spec.name, resource, REGISTRY.resolver_with_root(resource))

    def __call__(self, arguments: Mapping[str, Any]) -> None:
        if not isinstance(cast(Any, arguments), Mapping):
            raise ToolError(f"{self._name}: the arguments must be an object")
        try:
            errors = sorted(self._validator.iter_errors(dict(arguments)), key=_importance)
            refusal = _explained(errors[0], self._name) if errors else ""
            json.dumps(dict(arguments), ensure_ascii=False, allow_nan=False, default=str).encode()
            if is_deeper(arguments):
                raise RecursionError
        except OverflowError:
            refusal = f"{self._name}: a number is too large"
        except RecursionError:
            refusal = f"{self._name}: the arguments are nested too deeply"
        except Exception:  # the schema is valid: whatever else it is, the arguments alone have caused it
            refusal = f"{self._name}: the arguments are no JSON: half a character, or no number"
        if refusal:
            raise ToolError(refusal)

    def __reduce__(self) -> tuple[Any, ...]:  # a validator cannot be pickled
        return ArgumentCheck, self._made_of


def _resolve(tool: str, resource: Resource[Any], resolver: Any) -> None:
    """Look up every $ref of a schema. Raises ConfigError for one that leads nowhere."""
    if not isinstance(resource.contents, dict):
        return
    resolver = resolver.in_subresource(resource)
    reference = cast("dict[str, Any]", resource.contents).get("$ref")
    if isinstance(reference, str):
        try:
            resolver.lookup(reference)
        except Unresolvable as error:
            raise ConfigError(f"the tool {tool}: its JSON schema has nothing at $ref {reference!r}") from error
    for part in resource.subresources():
        _resolve(tool, part, resolver)


def from_json(arguments: Mapping[str, Any], tool: Callable[..., Any]) -> dict[str, Any]:
    """Checked arguments as the tool expects them: the values of an Enum become its members, 3.0 an int where asked."""
    hints = _hints(_function(tool))
    return {name: _from_json(value, hints[name]) for name, value in arguments.items()}


def _function(tool: Callable[..., Any]) -> Callable[..., Any]:
    return tool if inspect.isroutine(tool) else type(tool).__call__


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except NameError as error:
        raise ConfigError(f"the annotations of the tool {function.__qualname__} cannot be resolved: {error}") from None


def _read_docstring(tool: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The first paragraph, and the descriptions in the `Args:` section of a Google-style docstring."""
    text = _function(tool).__doc__ or (not inspect.isroutine(tool) and type(tool).__doc__) or ""
    if text.startswith(f"{type(tool).__name__}("):  # written by `dataclass`
        text = ""
    text = inspect.cleandoc(text)
    before, _, section = re.sub(r"^Args:[ \t]*$", "\0", text, count=1, flags=re.MULTILINE).partition("\0")
    description = " ".join(re.split(r"\n\s*\n", before.strip())[0].split())
    arguments: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(re.split(r"^(?=\S)", section, maxsplit=1, flags=re.MULTILINE)[0]).splitlines():
        if entry := re.match(r"(\w+)(?: *\([^)]*\))?: *(.*)", line):
            name = entry[1]
            arguments[name] = entry[2].strip()
        elif name and line.strip():
            arguments[name] = f"{arguments[name]} {line.strip()}".strip()
    return description, arguments


_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def _schema(annotation: Any, where: str) -> dict[str, Any]:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return {}
    if annotation in _JSON_TYPES:
        return {"type": _JSON_TYPES[annotation]}
    if origin is list:
        return {"type": "array", "items": _schema(inner[0], where)}
    if origin is dict and inner[0] is str:
        return {"type": "object", "additionalProperties": _schema(inner[1], where)}
    if origin in (Union, UnionType) and len(inner) == 2 and inner[1] is NoneType:
        schema = _schema(inner[0], where)
        schema |= {"type": [schema["type"], "null"]} if schema else {}
        return schema | ({"enum": [*schema["enum"], None]} if "enum" in schema else {})
    values = list(inner) if origin is Literal else []
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        values = [member.value for member in annotation]
    if values and {type(value) for value in values} in ({str}, {int}):
        return {"type": _JSON_TYPES[type(values[0])], "enum": values}
    raise ConfigError(
        f"{where} has the type {annotation}, which has no JSON schema here; "
        "use str, int, float, bool, list[...], dict[str, ...], an Enum or Literal of strings or of integers, "
        "or one of these | None"
    )


def _importance(error: ValidationError) -> tuple[int, str]:
    """A name that was mistyped explains that another is missing."""
    first = {"additionalProperties": 0, "required": 1}
    return first.get(str(error.validator), 2) + 3 * len(error.absolute_path), error.json_path


def _explained(error: ValidationError, tool: str) -> str:
    """What is wrong with the arguments, in one line whose length does not depend on theirs."""
    deepest = best_match([error]) or error  # of several alternatives, the one that fits best
    path = list(deepest.absolute_path)
    where = f"argument {path[0]!r}" + "".join(f"[{part!r}]" for part in path[1:]) if path else tool
    if not isinstance(deepest.schema, Mapping):  # the schema `false`
        return f"{where} does not take {reprlib.repr(deepest.instance)}"
    wanted, given = cast(Any, deepest.validator_value), cast(Any, deepest.instance)
    properties: Mapping[str, Any] = cast("dict[str, Any]", deepest.schema).get("properties", {})
    if deepest.validator == "additionalProperties":
        surplus = reprlib.repr(next(name for name in given if name not in properties))
        what = "its arguments" if not path else "it takes"
        return f"{where} has no argument {surplus}; {what}: {', '.join(properties) or 'none'}"
    if deepest.validator == "required":
        missing = next(name for name in wanted if name not in given)
        return f"missing argument {missing!r}" + (f" in {where}" if path else "")
    if deepest.validator == "type":
        kinds = [wanted] if isinstance(wanted, str) else wanted
        return f"{where} must be of type {' or '.join(kinds)}, got {reprlib.repr(given)}"
    if deepest.validator == "enum":
        return f"{where} must be one of {', '.join(repr(value) for value in wanted if value is not None)}"
    return f"{where} does not fit {deepest.validator} {reprlib.repr(wanted)}, got {reprlib.repr(given)}"


def _from_json(value: Any, annotation: Any) -> Any:
    inner = typing.get_args(annotation)
    if value is None:
        return None
    if annotation is int:  # a JSON schema takes 3.0 for an integer
        return int(value)
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        return annotation(value)
    if typing.get_origin(annotation) in (Union, UnionType):
        return _from_json(value, inner[0])
    if inner and isinstance(value, list):
        return [_from_json(item, inner[0]) for item in cast("list[Any]", value)]
    if inner and isinstance(value, dict):
        return {key: _from_json(item, inner[1]) for key, item in cast("dict[str, Any]", value).items()}
    return value
