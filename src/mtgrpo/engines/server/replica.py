"""One server: its process where it is ours, and what every kind of server is asked over HTTP."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from array import array
from asyncio.subprocess import STDOUT
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from mtgrpo.errors import ConfigError, EngineError
from mtgrpo.runtime import processes
from mtgrpo.runtime.http import SHOWN, HttpClient, HttpError
from mtgrpo.types import Finish, Sampling

HEALTH = "/health"
ANSWER_TIMEOUT_S = 60.0  # without an answer, and a server is lost
POLL_S = 0.5  # between two questions whether a server that starts is ready
GRACE_S = 20.0  # for a server to end by itself
FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": None}
SAID = 2000  # characters at the end of a server's log that are shown when it ends
HEAT = 2.0  # temperature of one more token: its log-probability must be that of the same distribution


class LostError(EngineError):
    """A server answers no more, or says that it is broken: others may answer in its place."""


@dataclass(frozen=True)
class Answered:
    """What a server sampled for one request; `finish` is None where it was interrupted."""

    tokens: list[int]
    logprobs: list[float]
    kept: list[array[int]]
    finish: Finish | None


class ServerProcess(ABC):
    """A server that we start, wherever it is, and that never outlives us."""

    @abstractmethod
    async def start(self) -> str:
        """Start it, after the end of what ran before; its address. Raises LostError where that is lost meanwhile."""

    @property
    @abstractmethod
    def ended(self) -> str:
        """How it ended and what it said last; "" while it runs. Raises LostError where its machine is lost."""

    @abstractmethod
    async def stop(self) -> None:
        """End it, and return when all of it is gone."""

    def is_leaving(self) -> bool:
        """Whether its machine has said that it is about to go."""
        return False


class Elsewhere(Protocol):
    """Places a server somewhere: `mtgrpo launch WORDS` with these variables, whose log is appended to `log`."""

    def __call__(self, words: Sequence[str], variables: Mapping[str, str], devices: int, log: Path) -> ServerProcess:
        """devices: GPUs that it takes, where there are any."""
        ...


@dataclass
class Process(ServerProcess):
    """A server on this machine."""

    command: list[str]
    environment: Mapping[str, str]
    log: Path  # is appended to
    folder: Path  # is removed when we are killed
    socket: Path  # in that folder, where it listens: whoever may enter the folder controls it
    program: processes.ProcessTree | None = None  # once it was started

    async def start(self) -> str:
        await self.stop()
        self.socket.unlink(missing_ok=True)  # it would not listen where another did
        with self.log.open("ab") as log:
            self.program = await processes.start(
                self.command, self.environment, stdout=log, stderr=STDOUT, grace_s=GRACE_S, remove=self.folder
            )
        return "http://server"

    @property
    def ended(self) -> str:
        if self.program is None or self.program.returncode is None:
            return ""
        code, said = self.program.returncode, processes.read_end(self.log, SAID)
        return f"it ended with exit code {code}; the end of {self.log}:\n{said}"

    async def stop(self) -> None:
        if self.program is not None:
            await self.program.end()


class Replica(ABC):
    """A server that is running, or that is started as `process`."""

    generates: ClassVar[str]  # the path of its requests for tokens
    _label = ""  # of its weights

    def __init__(self, name: str, url: str, process: ServerProcess | None = None) -> None:
        """The server at `url`, or that `process` starts."""
        self.name, self.process = name, process
        self.alive = False  # whether it holds the present weights and answers
        self.gone = False  # whether nobody tries to get it back
        self.restarts = 0  # since it answered last
        self.lost: asyncio.Future[None]  # done when it is found not to answer; new whenever it comes back
        self.leaving = False  # whether it is to be emptied, for its machine is about to go
        self.load = 0  # tokens of the requests that it works on
        self._busy_s, self._since = 0.0, 0.0  # how long it had any; since when it has some
        self._client = HttpClient(url, socket=process.socket if isinstance(process, Process) else None)

    async def ask(
        self, method: str, path: str, body: Any = None, timeout_s: float | None = 600.0, **params: str | int
    ) -> Any:
        """The JSON that it answers, None for anything else. EngineError where it refuses, with what it says.

        LostError where it cannot be reached, or fails at what it is there for.
        """
        try:
            return await self._client.request(method, path, body, params or None, timeout_s)
        except HttpError as error:
            status = error.status
            lost = not status or path == HEALTH or (status >= 500 and path == self.generates)
            answer = f" answered {path} with {status}: {error.body[:SHOWN]}" if status else f": {error.body}"
            raise (LostError if lost else EngineError)(f"{self.name}{answer}") from error

    async def start(self) -> None:
        """Start it where it is ours."""
        if self.process:
            self._client.url = await self.process.start()

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when it answers. Raises ConfigError when it ends, or does not answer in time."""
        ends = time.monotonic() + timeout_s
        while True:
            if self.process and (how := self.process.ended):
                raise ConfigError(f"{self.name} could not be started: {how}")
            try:
                await self.ask("GET", HEALTH, timeout_s=10)
                return
            except LostError as error:
                if time.monotonic() > ends:
                    raise ConfigError(
                        f"no server answers after {timeout_s:g} s: {error}; start one there, or set engine.url=[] and "
                        "engine.python=PATH to have one started"
                    ) from error
            await asyncio.sleep(POLL_S)

    def add_load(self, tokens: int) -> None:
        """So many tokens more are asked of it, or less."""
        if not self.load:
            self._since = time.perf_counter()
        self.load += tokens
        if not self.load:
            self._busy_s += time.perf_counter() - self._since

    def take_busy_s(self) -> float:
        """For how long it had something to do since this was asked last."""
        now = time.perf_counter()
        busy_s, self._busy_s = self._busy_s + (now - self._since if self.load else 0.0), 0.0
        self._since = now
        return busy_s

    async def label(self, version: int) -> None:
        """Call its weights `version`; answers sampled with others raise LostError from here on."""
        self._label = str(version)
        await self.ask("POST", "/update_weight_version", {"new_version": self._label})

    async def close(self) -> None:
        """End what is ours."""
        self.alive = False
        await self._client.close()
        if self.process:
            await self.process.stop()

    def _check_length(self, length: int, longest: int, word: str) -> None:
        """Raise ConfigError where it was started for contexts of `length` tokens, and the run's are longer."""
        if length < longest:
            raise ConfigError(
                f"{self.name} serves contexts of {length} tokens, and the run's may grow to {longest}: start it with "
                f"{word} {longest}, or set environment.max_context_length lower"
            )

    @abstractmethod
    async def check(self, config: Mapping[str, Any], longest: int) -> None:
        """Raise ConfigError where it serves another model than `config` says, or shorter contexts than `longest`."""

    @abstractmethod
    async def sample(self, tokens: Sequence[int], sampling: Sampling, seed: int) -> Answered:
        """Go on after `tokens`."""

    @abstractmethod
    async def likeliest(self, tokens: Sequence[int], count: int) -> list[dict[int, float]]:
        """For each of `tokens` but the first, log-probabilities of it and of the `count` likeliest in its place.

        At last the log-probability of one token that is sampled after them at the temperature `HEAT`.
        """

    @abstractmethod
    async def abort(self) -> None:
        """Answer the requests in flight with what they have."""

    @abstractmethod
    async def reload(self, folder: Path) -> None:
        """Read all weights anew from the files in `folder`."""

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Sample with adapter `name`, which is in `folder`, from here on. By default it is refused."""
        raise ConfigError(f"{self.name} takes no adapters: set engine.kind=vllm, or train all weights")

    async def reset_cache(self) -> None:
        """Forget keys and values that other weights computed, where taking new ones has not done so."""
        return

    async def sleep(self) -> None:
        """Give the GPU's memory back, where it is shared."""
        return

    async def wake(self) -> None:
        """Take it again; the weights are those from before."""
        return
