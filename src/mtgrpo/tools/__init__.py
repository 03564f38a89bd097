"""What a model may call: a plain function, or a dataclass whose fields are its settings. One file = one tool, or one
family of tools.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mtgrpo.errors import ConfigError
from mtgrpo.parts import Part, built, extension, named
from mtgrpo.parts.extension import misgiven
from mtgrpo.runtime.isolation import run_in_thread
from mtgrpo.tools import schema
from mtgrpo.tools.schema import ToolError as ToolError
from mtgrpo.types import Task, ToolSpec


class CallTimeoutError(ToolError):
    """A call took too long: what it was asked to do may have no end, so the model sees this too."""


@dataclass
class Tool(Part):
    """Base of all tools. Write `__call__`, or `specs` and `call` where one option gives several tools.

    Like an environment, a tool is settings only. It is opened once for a run (`open`); every conversation starts a
    shallow copy of that and stops it, so `start` and a call may put state on `self` (replacing, never mutating, shared
    fields). What the model sees of a tool with `__call__` is its option's name, its signature and its docstring.
    """

    blocking = True  # `__call__` runs in a thread, so that nothing else waits; False for microsecond work
    idempotent = True  # a call that failed may be made again; False: it might do its work twice
    max_at_once = 0  # calls, over all conversations, that the settings may lower; 0 = any number
    option_name = ""  # what the option is called
    _function = cast("Callable[..., Any] | None", None)  # what is called in place of the tool itself
    _settings = cast("Mapping[str, Any]", {})  # arguments that the model does not give

    async def start(self, task: Task) -> None:
        """Called on the conversation's own copy before it begins."""

    async def stop(self) -> None:
        """Called when the conversation has ended, however it did; also where `start` did not come to its end.

        After a call that took too long it is a copy that goes on and is stopped. What such a call still puts on `self`
        in its thread is not: a call that opens something closes it itself.
        """

    def specs(self) -> Sequence[ToolSpec]:
        """The tools that it offers while it is open; before that, those that are known already."""
        name, target = self.option_name or type(self).__name__, cast(Any, self._function or self)
        return [schema.signature_spec(name, target, self._settings)]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Do the work of the tool `name` and return what the model sees (made a string by `str`).

        Raise ToolError for the model's mistakes. Any other exception, also SystemExit or the time-out of a server that
        was asked, means that the tool is out of order: the call is made again if the tool is `idempotent`, then
        `environment.on_outage` decides. So for `__call__`, which may be a coroutine function.
        """
        target = cast(Any, self._function or self)
        work = functools.partial(target, **self._settings, **schema.from_json(arguments, target))
        asynchronous = any(map(inspect.iscoroutinefunction, (target, type(target).__call__)))
        answer = await run_in_thread(work) if self.blocking and not asynchronous else work()
        answer = await answer if inspect.isawaitable(answer) else answer
        if answer is None and inspect.signature(target).return_annotation in (str, "str"):
            raise misgiven(self._function or cast(Any, self).__call__, None, "give what the model reads, if only ''")
        return answer

    def repeatable(self, name: str) -> bool:
        """Whether a call of the tool `name` that failed may be made again."""
        return self.idempotent

    @property
    def replayable(self) -> bool:
        """Whether all calls of a conversation may be made again, after another `start`."""
        return self.idempotent


class _FunctionTool(Tool):
    """A plain function. Its settings are values of parameters, which the model then neither sees nor gives."""

    def __init__(self, function: Callable[..., Any], settings: Mapping[str, Any]) -> None:
        self._function, self._settings = function, settings
        self.blocking = getattr(function, "blocking", True)
        self.idempotent = getattr(function, "idempotent", True)


def load(options: Any) -> dict[str, Tool]:
    """The tools that a configuration names, by their options' names.

    `options` is a list (`["calculator", "path/to/file.py:search"]`) or a mapping from such names to settings
    (`{"calculator": {"max_digits": 20}}`). A tool of a file of your own has the name it has there.
    Raises ConfigError for an unknown tool or setting and for two tools of one name.
    """
    loaded: dict[str, Tool] = {}
    for option, settings in named(options, "environment.tools", "calculator: {max_digits: 20}").items():
        name = option.rpartition(":")[2]
        if name in loaded:
            raise ConfigError(f"two tools are named {name!r}: the model could not tell them apart; rename one")
        loaded[name] = _build(name, extension.find(__name__, option, Tool), settings)
        loaded[name].option_name = name
    return loaded


def _build(name: str, found: Any, settings: dict[str, Any]) -> Tool:
    if inspect.isclass(found) and issubclass(found, Tool):
        several = found.specs is not Tool.specs and found.call is not Tool.call
        if not several and not any("__call__" in vars(base) for base in found.__mro__):
            raise ConfigError(f"the tool {name} has no __call__; write one, or `specs` and `call` for several tools")
        extension.check_methods(found, Tool, f"the tool {name}")
        return built(f"tool {name}", found, settings)
    if inspect.isclass(found) or not callable(found):
        raise ConfigError(f"the tool {name} must be a function or a subclass of Tool, it is {extension.kind_of(found)}")
    optional = {**schema.signature_spec(name, found).parameters, "required": []}
    try:
        schema.ArgumentCheck(ToolSpec(name, "", optional), closed=True)(settings)
    except ToolError as error:
        raise ConfigError(f"the tool {name} with settings {settings}: {error}") from None
    return _FunctionTool(found, schema.from_json(settings, found))
