"""Agents that exist already: they talk to the policy through an endpoint, as they would to OpenAI or Anthropic.

One file = one way to start an agent. What an agent sends is recorded by `endpoint/`; nothing of it is written again.
"""

import copy
import math
import os
from abc import ABC, abstractmethod
from asyncio.subprocess import STDOUT
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, cast

from mtgrpo.endpoint import Address as Address
from mtgrpo.errors import ConfigError
from mtgrpo.parts import Part, Reach, RunContext, Where, extension
from mtgrpo.runtime import processes
from mtgrpo.types import Task, Trajectory

if TYPE_CHECKING:
    from mtgrpo.endpoint.server import Endpoint

INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE")  # variables; none of them is a secret


@dataclass
class Outcome:
    """What an agent leaves. A number stands for an Outcome of that reward, a text for one of that output."""

    reward: float | None = None  # of the whole conversation; None = what it posted (`agent.posts_rewards`), or `reward`
    turn_rewards: Mapping[str, float] = field(default_factory=dict[str, float])  # by the id of a reply
    components: Mapping[str, float] = field(default_factory=dict[str, float])  # what `reward` is made of, by name
    output: str = ""  # its answer, which `reward` grades; "" = the text of its last reply
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])  # for a reward of your own: `trajectory.data`


def outcome_of(given: Any, function: Callable[..., Any] | None = None) -> Outcome:
    """What `function` returned or a reward file holds, as an Outcome. Raises MisgivenError or TypeError for others."""
    if given is None or isinstance(given, str):
        return Outcome(output=given or "")
    with suppress(TypeError, ValueError, OverflowError, AttributeError):  # of what is no number
        found = Outcome(reward=float(given)) if isinstance(given, int | float) else given
        if isinstance(given, dict):
            found = Outcome(turn_rewards=cast("dict[str, float]", given))
        if isinstance(found, Outcome) and all(map(math.isfinite, (found.reward or 0, *found.turn_rewards.values()))):
            return found
    wanted = "give None, a finite number, a text, an Outcome or rewards by reply id"
    error = TypeError(f"the agent gave {given!r:.200}; {wanted}")
    raise extension.misgiven(function, given, wanted) if function else error


@dataclass
class Agent(Part, ABC, max_requests=">= 1", timeout_s=">= 0 (0 = none)"):
    """Base of all agents."""

    active: ClassVar[bool] = True  # whether it takes the place of the environment
    or_function: ClassVar[str] = ", or give agent=python agent.function=FILE.py:NAME"
    endpoint = cast("Endpoint", None)  # where it sends its requests, while it is open

    max_requests: int = 64  # turns sampled in one attempt; then the conversation is truncated
    timeout_s: float = 1800.0  # of one attempt without its scoring; then it has failed; 0 = none
    # turns: all; main = no helpers with other tools; or path/to/file.py:f, trajectory -> bools
    train: Annotated[str, Where(Reach.code, r"(?!(all|main)\Z)")] = "all"
    pin_system: bool = False  # the first system prompt stands for later ones, where an agent rewrites it on its way
    posts_rewards: bool = False  # its program may post them, with MTGRPO_REWARDS_KEY; needs reward=environment
    strict: bool = False  # fields that have no effect, such as temperature, are refused; false: counted

    def __post_init__(self) -> None:
        super().__post_init__()
        self.trains()

    def trains(self) -> Callable[[Trajectory], Sequence[bool]]:
        """Says of each turn of a trajectory whether it is trained. Raises ConfigError."""
        if self.train == "all":
            return lambda trajectory: [True] * len(trajectory.turns)
        if self.train == "main":
            return lambda trajectory: [not turn.auxiliary for turn in trajectory.turns]
        if ".py:" not in self.train:
            raise ConfigError(f"`train={self.train}` is none of all, main and path/to/file.py:function")
        return extension.find(__name__, self.train, Agent)

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        """With its endpoint running."""
        if not self.active:
            yield self
            return
        from mtgrpo.endpoint.server import open_endpoint  # noqa: PLC0415  settings alone import no library

        async with open_endpoint() as endpoint:
            running = copy.copy(self)
            running.endpoint = endpoint
            yield running

    @abstractmethod
    async def run(self, task: Task, address: Address) -> Outcome:
        """Let the agent work on `task`; it sends its requests to `address`.

        Called in the event loop that samples for it: what blocks must run elsewhere. An exception fails the
        conversation, which is run again. When this is cancelled, whatever was started has to end.
        """


async def run_process(
    argv: Sequence[str], folder: Path, address: Address, environment: Mapping[str, str], keep: int
) -> str:
    """Run `argv` in `folder` to its end and return the last `keep` characters that it wrote to stdout and stderr.

    It gets the address in its variables and `environment`, and of the variables here only `INHERITED`. Raises
    RuntimeError for an exit code that is not 0. All that it has started ends with it, also when this is cancelled.
    """
    home = {"HOME": str(folder), "TMPDIR": str(folder)}
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    written = folder / ".output"
    variables = {**inherited, **home, **address.environ(), **environment}
    with written.open("wb") as output:
        program = await processes.start(argv, variables, folder, stdout=output, stderr=STDOUT)
    try:
        code = await program.wait()
    finally:
        await program.end()
    text = processes.read_end(written, keep)
    if code:
        raise RuntimeError(f"{argv[0]} ended with exit code {code}: {text[-500:].strip()}")
    return text
