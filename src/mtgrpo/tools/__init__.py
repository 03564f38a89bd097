"""What a model may call. One tool = one file: a dataclass whose fields are its settings and whose `__call__` does the
work, or a plain function in a file of your own. The model sees the signature and the docstring.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import re
import reprlib
import textwrap
import threading
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Union, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mtgrpo.errors import ConfigError
from mtgrpo.extension import find
from mtgrpo.types import Task, ToolSpec


class ToolError(Exception):
    """A tool refuses what the model asked for; the model sees the text as its observation."""


class CallTimeoutError(ToolError):
    """A call took too long: what it was asked to do may have no end, so the model sees this too."""


@dataclass
class Tool(ABC):
    """Base of all tools. The file name is the tool's name.

    Like an environment, a tool is settings only; every conversation calls a shallow copy of its own, so a call may put
    state on `self` (replacing, never mutating, shared fields).
    """

    blocking: ClassVar[bool] = True  # run in a thread, so that nothing else waits; False for microsecond work
    idempotent: ClassVar[bool] = True  # a call that failed may be made again; False: it might do its work twice

    def begin(self, task: Task) -> None:  # noqa: B027  (most tools need not know)
        """Called on the conversation's own copy before it begins, for tools that depend on the task."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do the work and return what the model sees (made a string by `str`); may be a coroutine function.

        Raise ToolError for the model's mistakes. Any other exception, also SystemExit or the time-out of a server that
        was asked, means that the tool is out of order: the call is made again if the tool is `idempotent`, then
        `environment.on_outage` decides.
        """


def load(tools: Any) -> dict[str, Callable[..., Any]]:
    """The tools that a configuration names, under the names the model calls them by.

    `tools` is a list (`["calculator", "path/to/file.py:search"]`) or a mapping from such names to settings
    (`{"calculator": {"max_digits": 20}}`). A tool of a file of your own has the name it has there.
    Raises ConfigError for an unknown tool or setting and for two tools of one name.
    """
    if not isinstance(tools, list | Mapping):
        raise ConfigError(f"tools must be a list such as [calculator], or a mapping from names to settings: {tools!r}")
    loaded: dict[str, Callable[..., Any]] = {}
    for option in cast("list[Any] | Mapping[Any, Any]", tools):
        if not isinstance(option, str):
            raise ConfigError(
                f"not the name of a tool: {option!r}; settings go like {{calculator: {{max_digits: 20}}}}"
            )
        settings: Any = cast("Mapping[str, Any]", tools)[option] if isinstance(tools, Mapping) else {}
        name = option.rpartition(":")[2]
        if name in loaded:
            raise ConfigError(f"two tools are named {name!r}: the model could not tell them apart; rename one")
        loaded[name] = _build(name, find("mtgrpo.tools", option, Tool), {} if settings is None else settings)
    return loaded


def spec(name: str, tool: Callable[..., Any]) -> ToolSpec:
    """The tool as the model sees it: a JSON schema from the signature, descriptions from the docstring.

    The description is the docstring's first paragraph, those of the arguments come from its `Args:` section; for a Tool
    it is the docstring of `__call__`, or else of the class. A parameter is a str, int, float, bool, list, dict, Literal
    or Enum (the model gives the value), each also `| None`; with a default it is optional.
    Raises ConfigError naming the parameter that no schema can describe.
    """
    description, arguments = _read_docstring(_docstring(tool))
    if not description:
        raise ConfigError(f"the tool {name} needs a docstring: its first paragraph is what the model is told of it")
    properties: dict[str, Any] = {}
    required: list[str] = []
    hints = _hints(_function(tool))
    for parameter in inspect.signature(tool).parameters.values():
        where = f"the tool {name}: parameter {parameter.name!r}"
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


def check_arguments(spec: ToolSpec, arguments: Mapping[str, Any]) -> None:
    """Raise ToolError, in words that help the model, unless `arguments` fit the schema of the tool."""
    properties = spec.parameters["properties"]
    for name in arguments:
        if name not in properties:
            raise ToolError(f"{spec.name} has no argument {name!r}; its arguments: {', '.join(properties) or 'none'}")
    for name in spec.parameters["required"]:
        if name not in arguments:
            raise ToolError(f"missing argument {name!r}")
    for name, value in arguments.items():
        _check(value, properties[name], f"argument {name!r}")


async def call(tool: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float) -> str:
    """What the tool answers to checked arguments, as a string. Raises CallTimeoutError after `timeout_s` seconds.

    What the tool raises comes through if it is an Exception; SystemExit and the like, which would end the whole
    program, become RuntimeError, and so do StopIteration, which no coroutine can raise, and its own cancellation.
    A blocking tool runs in a thread of its own. Python cannot stop a thread: after a time-out it runs on, unheard.
    """
    function = _function(tool)
    hints = _hints(function)
    work = functools.partial(tool, **{name: _from_json(value, hints[name]) for name, value in arguments.items()})
    blocking = getattr(tool, "blocking", True) and not inspect.iscoroutinefunction(function)
    answer = asyncio.ensure_future(_answer(work, blocking))
    try:
        # Unlike asyncio.timeout this takes an answer that came in time while the event loop was busy.
        await asyncio.wait({answer}, timeout=timeout_s)
        if not answer.done():
            raise CallTimeoutError(f"no answer within {timeout_s:g} s")
    finally:
        if not answer.done():
            answer.cancel()
            await asyncio.wait({answer})
    if answer.cancelled():
        raise RuntimeError("CancelledError")
    return answer.result()


async def _answer(work: Callable[[], Any], blocking: bool) -> str:
    try:
        answer = await _in_thread(work) if blocking else work()
        return str(await answer if inspect.isawaitable(answer) else answer)
    except (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
        raise  # the last three come from outside: this call is given up, or the person wants to stop
    except BaseException as error:
        raise _failure(error) from error


def _in_thread(work: Callable[[], Any]) -> asyncio.Future[Any]:
    """Run `work` in a daemon thread of its own.

    Unlike in a pool, calls never queue behind others that hang, and a call that hangs cannot keep a program alive.
    """
    result: Future[Any] = Future()
    result.set_running_or_notify_cancel()  # from here on the asyncio side may give up without an error in the thread

    def run() -> None:
        try:
            result.set_result(work())
        except StopIteration as error:  # an asyncio future refuses it, and whoever waits would wait for ever
            result.set_exception(_failure(error))
        except Exception as error:
            result.set_exception(error)
        except BaseException as error:
            result.set_exception(_failure(error))

    threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True).start()
    return asyncio.wrap_future(result)


def _failure(error: BaseException) -> RuntimeError:
    failure = RuntimeError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _build(name: str, found: Any, settings: Any) -> Callable[..., Any]:
    if not isinstance(settings, dict):
        raise ConfigError(f"settings of the tool {name} must be a mapping such as {{max_digits: 20}}, got {settings!r}")
    settings = cast("dict[str, Any]", settings)
    if inspect.isclass(found) and issubclass(found, Tool):
        try:
            config = OmegaConf.structured(found)
            if unknown := [key for key in settings if key not in config]:
                known = ", ".join(str(key) for key in config) or "none"
                raise ConfigError(f"the tool {name} has no setting {unknown[0]!r}; its settings: {known}")
            return cast(Tool, OmegaConf.to_object(OmegaConf.merge(config, settings)))
        except OmegaConfBaseException as error:
            raise ConfigError(f"the tool {name} with settings {settings}: {error}") from None
    if inspect.isclass(found) or not callable(found):
        raise ConfigError(f"the tool {name} must be a function or a subclass of Tool, it is {found!r}")
    if settings:
        raise ConfigError(f"the tool {name} is a function, which has no settings, got {settings}")
    return found


def _function(tool: Callable[..., Any]) -> Callable[..., Any]:
    return type(tool).__call__ if isinstance(tool, Tool) else tool


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except NameError as error:
        raise ConfigError(f"the annotations of the tool {function.__qualname__} cannot be resolved: {error}") from None


def _docstring(tool: Callable[..., Any]) -> str:
    own = _function(tool).__doc__
    if own or not isinstance(tool, Tool):
        return own or ""
    of_class = type(tool).__doc__ or ""
    written_by_dataclass = of_class.startswith(f"{type(tool).__name__}(")
    return "" if written_by_dataclass else of_class


def _read_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """The first paragraph, and the descriptions in the `Args:` section of a Google-style docstring."""
    text = inspect.cleandoc(docstring)
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
_PYTHON_TYPES = {name: kind for kind, name in _JSON_TYPES.items()}


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
        return {**_schema(inner[0], where), "nullable": True}
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


def _check(value: object, schema: Mapping[str, Any], where: str) -> None:
    kind = schema.get("type")
    if kind is None or (value is None and "nullable" in schema):
        return
    expected = (int, float) if kind == "number" else _PYTHON_TYPES[kind]
    if not isinstance(value, expected) or (isinstance(value, bool) and kind != "boolean"):
        raise ToolError(f"{where} must be of type {kind}, got {reprlib.repr(value)}")
    if "enum" in schema and value not in schema["enum"]:
        raise ToolError(f"{where} must be one of {', '.join(map(repr, schema['enum']))}")
    if kind == "array":
        for index, item in enumerate(cast("list[Any]", value)):
            _check(item, schema.get("items", {}), f"{where}[{index}]")
    if kind == "object":
        for key, item in cast("dict[str, Any]", value).items():
            _check(item, schema.get("additionalProperties", {}), f"{where}[{key!r}]")


def _from_json(value: Any, annotation: Any) -> Any:
    """Turn the values of an Enum into its members, wherever they stand."""
    inner = typing.get_args(annotation)
    if value is None:
        return None
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        return annotation(value)
    if typing.get_origin(annotation) in (Union, UnionType):
        return _from_json(value, inner[0])
    if inner and isinstance(value, list):
        return [_from_json(item, inner[0]) for item in cast("list[Any]", value)]
    if inner and isinstance(value, dict):
        return {key: _from_json(item, inner[1]) for key, item in cast("dict[str, Any]", value).items()}
    return value
