"""A conversation with tools: it goes on as long as the model calls them."""

import asyncio
import copy
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Annotated, Any, NamedTuple, Self, cast

from mtgrpo import tools
from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.errors import ConfigError, PolicyError, meant
from mtgrpo.parts import Data, Parts, RunContext, built, extension, named
from mtgrpo.runtime.text import head_and_tail
from mtgrpo.tools import CallTimeoutError, Tool
from mtgrpo.tools.calls import CallLimits, Gate, call_tool, next_call, readable
from mtgrpo.tools.schema import ArgumentCheck
from mtgrpo.types import CallOutcome, CallRecord, Message, Task, ToolCall, ToolSpec

_LOOKED_AT = 1000  # the most items of what tools share that is looked at after each conversation


class OnOutage(Enum):
    """What becomes of a conversation whose tool stays out of order."""

    fail = "fail"  # it is run again (`rollout.retries`), then left out: conversations that call less are trained more
    observe = "observe"  # the model is told and goes on: conversations that call are rewarded less


class OutageError(RuntimeError):
    """A tool stays out of order."""


class _Offer(NamedTuple):
    """One of the tools that the model may call."""

    option: str  # that it comes from
    spec: ToolSpec
    check: ArgumentCheck
    gate: Gate


def _contents(tool: Tool) -> dict[str, tuple[int, ...]]:
    """Which objects lie in each list, set and dictionary that `tool` has, and that its copies share."""
    held: dict[str, Any] = dict(vars(tool))  # a copy, and each `tuple` in one go: calls in threads may add to them
    return {
        name: tuple(map(id, value.values() if isinstance(value, dict) else value))
        for name, value in held.items()
        if isinstance(value, (list, set, dict)) and len(cast("list[Any]", value)) <= _LOOKED_AT
    }


@dataclass
class ToolUse(CallLimits, Environment):
    """The model may call `tools`, several at once; a message without a call ends the conversation.

    A call that cannot be made (unreadable, unknown tool, wrong arguments, refused by the tool) is answered with
    "error: <why>". One that fails through the tool is made again, after `backoff_s` and then twice as long each time,
    unless the tool says that its calls are not `idempotent`. No answer within `call_timeout_s`, or one that is no text,
    may be the tool's fault or the model's: such a call is made again once, then the model sees what came of it. Without
    tools there are no calls to count, and the answer to what looks like one comes from the user.
    """

    # [calculator, path/to/file.py:search], or with settings {calculator: {max_digits: 20}}
    tools: Annotated[Any, Parts("tool")] = None
    limits: Data = None  # what is different for single tools: {search: {call_timeout_s: 5, max_concurrent_calls: 8}}
    on_outage: OnOutage = OnOutage.fail  # after the last attempt: the conversation fails, or the model is told

    def __post_init__(self) -> None:
        self._note: Callable[[str], object] = str  # once it is open, what the run tells people by
        CallLimits.__post_init__(self)
        Environment.__post_init__(self)
        self._use(tools.load(self.tools or []))
        if not self.opens:
            self._refuse_unknown_limits()

    def _use(self, loaded: dict[str, Tool]) -> None:
        """The tools, by their options' names. Raises ConfigError where the model could not tell two apart."""
        self._loaded = loaded
        self._failed = set[str]()  # tools whose first failure has been told
        self._shared = {name: _contents(tool) for name, tool in loaded.items() if not extension.is_ours(tool)}
        self._tools: dict[str, Tool] = {}  # of a conversation
        self._offers: dict[str, _Offer] = {}
        for option, tool in loaded.items():
            given: Any = tool.specs()
            if not (isinstance(given, list | tuple) and all(isinstance(spec, ToolSpec) for spec in cast("Any", given))):
                expected = "give a list of ToolSpec(name, description, parameters)"
                raise ConfigError(str(extension.misgiven(tool.specs, given, expected)))
            for spec in cast("Sequence[ToolSpec]", given):
                if spec.name in self._offers:
                    raise ConfigError(f"two tools are named {spec.name!r}: the model could not tell them apart")
                closed = type(tool).specs is Tool.specs  # made from a signature, which takes no other arguments
                gate = Gate(self._limits(spec.name, tool.max_at_once))
                self._offers[spec.name] = _Offer(option, spec, ArgumentCheck(spec, closed), gate)

    def _limits(self, tool: str, max_at_once: int) -> CallLimits:
        usual = {field.name: getattr(self, field.name) for field in fields(CallLimits)}
        usual["max_concurrent_calls"] = min(filter(None, (self.max_concurrent_calls, max_at_once)), default=0)
        own = named(self.limits or {}, "environment.limits", "search: {call_timeout_s: 5}").get(tool, {})
        return built(f"environment.limits of {tool}", CallLimits, {**usual, **own})

    @property
    def tool_specs(self) -> tuple[ToolSpec, ...]:
        return tuple(offer.spec for offer in self._offers.values())

    @property
    def opens(self) -> bool:
        return type(self).open is not ToolUse.open or any(tool.opens for tool in self._loaded.values())

    def without_tools(self) -> Self | None:
        return replace(self, tools=[], limits=None) if self.tools else None

    @property
    def replayable(self) -> bool:
        return all(tool.replayable for tool in self._loaded.values())

    def check_machine(self) -> None:
        for tool in self._loaded.values():
            tool.check_machine()

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        async with AsyncExitStack() as stack:
            running = copy.copy(self)
            running._note = context.note
            enter = stack.enter_async_context
            running._use({name: await enter(tool.open(context)) for name, tool in self._loaded.items()})
            running._refuse_unknown_limits()
            yield running

    def _refuse_unknown_limits(self) -> None:
        if unknown := [name for name in self.limits or {} if name not in self._offers]:
            names = ", ".join(self._offers)
            raise ConfigError(f"environment.limits: there is no tool {unknown[0]!r}; the tools are: {names}")

    async def start(self, task: Task) -> Opening:
        # A conversation has tools of its own, so that one with state shares none of it with another conversation.
        self._tools = {}
        for name, tool in self._loaded.items():
            self._tools[name] = copy.copy(tool)
            await extension.awaited(self._tools[name].start, task)
        return Opening(task.messages, self.tool_specs)

    async def stop(self) -> None:
        async with AsyncExitStack() as stack:
            for tool in self._tools.values():
                stack.push_async_callback(extension.awaited, tool.stop)
        self._tell_shared()

    def _tell_shared(self) -> None:
        """Say, once of each, which of somebody's own tools this conversation has changed for the others too."""
        for name, before in list(self._shared.items()):
            now = _contents(self._loaded[name])
            if changed := [f"`{field}`" for field, held in now.items() if held != before.get(field, held)]:
                del self._shared[name]
                self._note(
                    f"the tool {name} changed {', '.join(changed)}, which all conversations share: right for a cache, "
                    "but what belongs to one conversation is made in `async def start(self, task)`"
                )

    async def step(self, message: Message) -> Reply:
        if not message.error and not message.tool_calls:
            return Reply(done=True)
        if not self._offers:  # then a chat template may have no role "tool"
            return Reply((Message("user", f"error: {message.error or 'there are no tools'}"),))
        if message.error:
            return Reply((Message("tool", f"error: {message.error}"),), calls=(CallRecord("", CallOutcome.refused),))
        # Every call is waited for, also after one has failed: nothing of this conversation runs on behind its back.
        answers = await asyncio.gather(*map(self._answer, message.tool_calls))
        for record, _, error in answers:
            if error is not None and self.on_outage is OnOutage.fail:
                raise OutageError(record.why) from error
        return Reply(
            tuple(Message("tool", text, name=record.name) for record, text, _ in answers),
            calls=tuple(record for record, *_ in answers),
        )

    async def _answer(self, call: ToolCall) -> tuple[CallRecord, str, Exception | None]:
        """What became of a call, what the model sees of it, and why the tool failed."""
        began, offer = time.perf_counter(), self._offers.get(call.name)
        if offer is None:
            return CallRecord(call.name, CallOutcome.unknown, began_s=began), f"error: {self.refusal(call)}", None
        outcome, text, retries, failure = await self._call(call, offer)
        why = f"the tool {call.name} failed: {extension.explained(failure)}" if failure else ""
        record = CallRecord(call.name, outcome, retries, time.perf_counter() - began, why, began)
        return record, head_and_tail(text, offer.gate.limits.max_output_chars or len(text)), failure

    def refusal(self, call: ToolCall) -> str:
        """Why no tool takes a call, in words for the model; "" where one does."""
        if call.name not in self._offers:
            hint = meant(call.name[:100], self._offers)
            return f"there is no tool {call.name!r}; {hint}the tools are: {', '.join(self._offers)}"
        try:
            self._offers[call.name].check(call.arguments)
        except PolicyError as error:
            return str(error)
        return ""

    async def _call(self, call: ToolCall, offer: _Offer) -> tuple[CallOutcome, str, int, Exception | None]:
        """Make a call, and again where the tool fails: what it led to, the text, how often again, and the failure."""
        limits, fault, retries = offer.gate.limits, next_call(), 0
        max_retries = limits.call_retries if self._tools[offer.option].repeatable(call.name) else 0
        unclear = min(1, max_retries)  # further attempts where it may have been the model's doing

        async def attempt() -> str:
            tool = self._tools[offer.option]  # another one after a call that took too long
            return await call_tool(tool, call.name, call.arguments, limits.call_timeout_s, fault)

        while True:
            try:
                offer.check(call.arguments)
                answer = await offer.gate.attempt(attempt)
                if not unclear or readable(answer):
                    return CallOutcome.answered, answer, retries, None
                unclear -= 1
            except CallTimeoutError as error:
                # What still runs in a thread keeps the state of the object to itself.
                self._tools[offer.option] = copy.copy(self._tools[offer.option])
                if not unclear:
                    return CallOutcome.timed_out, f"error: {error}", retries, None
                unclear -= 1
            except PolicyError as error:
                return CallOutcome.refused, f"error: {error}", retries, None
            except Exception as error:
                if call.name not in self._failed:
                    self._failed.add(call.name)
                    again = f"made again up to {max_retries} times" if max_retries else "not made again"
                    self._note(f"the tool {call.name} failed; such calls are {again}: {extension.explained(error)}")
                if retries >= max_retries:
                    return CallOutcome.outage, f"error: the tool {call.name} is out of order", retries, error
                await asyncio.sleep(limits.backoff_s * 2**retries)
            retries += 1
