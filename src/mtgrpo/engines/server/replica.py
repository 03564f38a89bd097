"""One server: its process where it is ours, and what every kind of server is asked over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from abc import abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import aiohttp

from mtgrpo.engines.server import guard
from mtgrpo.errors import ConfigError, EngineError
from mtgrpo.sync import Server
from mtgrpo.types import Finish, Sampling

HEALTH = "/health"
HANGS_S = 60.0  # without an answer, and a server is lost
POLL_S = 0.5  # between two questions whether a server that starts is ready
SAID = 15  # lines of a server's log that are shown when it ends


class LostError(EngineError):
    """A server answers no more, or says that it is broken: others may answer in its place."""


@dataclass(frozen=True)
class Part:
    """What a server sampled for one request; `finish` is None where it was interrupted."""

    tokens: list[int]
    logprobs: list[float]
    kept: list[array[int]]
    finish: Finish | None


@dataclass
class Process:
    """A server that we start, and that never outlives us."""

    command: list[str]
    environment: Mapping[str, str]
    log: Path  # is appended to
    folder: Path  # is removed when we are killed
    socket: Path  # in that folder, where it listens: whoever may enter the folder controls it
    _guard: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, after the end of what ran before."""
        self.socket.unlink(missing_ok=True)  # it would not listen where another did
        guarded = [sys.executable, "-I", guard.__file__, str(os.getpid()), str(self.folder), *self.command]
        with self.log.open("ab") as log:
            self._guard = subprocess.Popen(
                guarded,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(self.environment),
                start_new_session=True,  # Ctrl-C reaches us alone
            )

    @property
    def ended(self) -> str:
        """How it ended and what it said last; "" while it runs."""
        if self._guard is None or self._guard.poll() is None:
            return ""
        said = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-SAID:]
        return "\n".join([f"it ended with exit code {self._guard.returncode}; the end of {self.log}:", *said])

    async def stop(self) -> None:
        """End it, and return when all of it is gone."""
        if self._guard is not None:
            if self._guard.poll() is None:
                self._guard.send_signal(signal.SIGTERM)
            await asyncio.to_thread(self._guard.wait)


class Replica(Server):
    """A server that is running, or that is started as `process`."""

    generates: ClassVar[str]  # the path of its requests for tokens
    _label = ""  # of its weights

    def __init__(self, name: str, url: str, process: Process | None = None) -> None:
        """The server at `url`, or that `process` starts on its socket."""
        self.name, self.process = name, process
        self.alive = False  # whether it holds the present weights and answers
        self.gone = False  # whether nobody tries to get it back
        self.restarts = 0  # since it answered last
        self.lost: asyncio.Future[None]  # done when it is found not to answer; new whenever it comes back
        self.load = 0  # tokens of the requests that it works on
        self._url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None  # from the first request on, for it needs an event loop

    async def ask(self, method: str, path: str, timeout_s: float | None = 600.0, **more: Any) -> Any:
        """The JSON that it answers, None for anything else. EngineError where it refuses, with what it says.

        LostError where it cannot be reached, or fails at what it is there for.
        """
        self._session = self._session or self._connect()
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, f"{self._url}{path}", timeout=limit, **more) as answer:
                if answer.status < 400:
                    return await answer.json() if "json" in answer.content_type else None
                status, said = answer.status, await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise LostError(f"{self.name}: {type(error).__name__} {error}".rstrip()) from error
        lost = path == HEALTH or (status >= 500 and path == self.generates)
        raise (LostError if lost else EngineError)(f"{self.name} answered {path} with {status}: {said[:500]}")

    def _connect(self) -> aiohttp.ClientSession:
        """For as many requests at once as there are.

        A server drops connections that were idle for 5 s; one that is used just then would look like a lost server.
        """
        limits: dict[str, Any] = {"limit": 0, "keepalive_timeout": 1.0}
        if self.process:
            return aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self.process.socket), **limits))
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(**limits), trust_env=True)  # perhaps by a proxy

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

    async def label(self, version: int) -> None:
        """Call its weights `version`; answers sampled with others raise LostError from here on."""
        self._label = str(version)
        await self.ask("POST", "/update_weight_version", json={"new_version": self._label})

    async def close(self) -> None:
        """End what is ours."""
        self.alive = False
        if self._session:
            await self._session.close()
        if self.process:
            await self.process.stop()

    @abstractmethod
    async def check(self, config: Mapping[str, Any], longest: int) -> None:
        """Raise ConfigError where it serves another model than `config` says, or shorter contexts than `longest`."""

    @abstractmethod
    async def sample(self, tokens: Sequence[int], sampling: Sampling, seed: int) -> Part:
        """Go on after `tokens`."""

    @abstractmethod
    async def likeliest(self, tokens: Sequence[int], count: int) -> list[dict[int, float]]:
        """For each of `tokens` but the first, log-probabilities of it and of the `count` likeliest in its place.

        At last the log-probability of one token that is sampled after them at temperature `HOT`.
        """

    @abstractmethod
    async def abort(self) -> None:
        """Answer the requests in flight with what they have."""

    async def reset_cache(self) -> None:
        """Forget keys and values that other weights computed, where taking new ones has not done so."""

    async def sleep(self) -> None:
        """Give the GPU's memory back, where it is shared."""

    async def wake(self) -> None:
        """Take it again; the weights are those from before."""
