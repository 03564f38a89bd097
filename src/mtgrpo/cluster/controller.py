"""What stands in the controller for a trainer of its own: asks all ranks, and sees that none of them fails.

Where one does, all are ended, and the run ends by one RanksError: which rank, how, and how to go on.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import pickle
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtgrpo.cluster.launch import Processes, inherited_sockets
from mtgrpo.cluster.wire import Call, Said, packed
from mtgrpo.errors import RanksError
from mtgrpo.model.load import load_model
from mtgrpo.policy.trainer import TrainerConfig
from mtgrpo.runtime.processes import read_end
from mtgrpo.weights.source import ModelWeights, WeightSource

LOOK_S = 0.25  # between two looks at the ranks
STOPPED_S = 60.0  # without a sign of life of a process that is there; a shared disk may take some
STILL_S = 1800.0  # without a move of any rank: for the first update, which compiles kernels, and all but updates;
PASS_S = 300.0  # for a pass of a later update, or
PASS_RATIO = 10.0  # so many times the longest before
SETTLED_S = 1.0  # for the rank that failed first to have said so, once it was seen that one has
TOLD_S = 15.0  # for a failure to be seen, once nothing more is heard
CLOSED_S = 30.0  # for ranks to end by themselves
IN_PASSES = ("updating", "imitating", "referring")  # methods that compute, pass by pass, and
IN_PARTS = (*IN_PASSES, "tensors")  # all that are generators


class Asked:
    """Whose methods are done by all ranks; what rank 0 gives counts."""

    def __init__(self, channel: _Channel, owner: str, **facts: Any) -> None:
        self._channel, self._owner = channel, owner
        vars(self).update(facts)

    def __getattr__(self, name: str) -> Any:
        ask = self._channel.parts if name in IN_PARTS else self._channel.ask
        return functools.partial(ask, self._owner, name)


class Ranks(Asked):
    """Has the methods of `TrainerRank`, on all ranks. Made in a task, which is cancelled where a rank fails."""

    def __init__(
        self,
        make: Callable[..., Any],
        config: TrainerConfig,
        devices: Sequence[int],
        role: str = "rank",
        start: Callable[[Sequence[int], Path], Processes] = Processes,
    ) -> None:
        """Start them, unless a launcher has, and `make(config, rank, ranks)` on each; raises what all of them raise.

        devices: one for each rank, a GPU where there are any.
        role: what people call each of them, and the folder of what they print, as several.
        start: starts the processes, given the folder for what they say.
        """
        self.notes: list[str] = []
        self._config, self._role = config, role
        self._folder = config.folder / f"{role}s"
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in self._folder.glob("rank_*.json"):
            old.unlink()
        self._signs = [_Sign(f"{role} {rank}", rank) for rank in range(len(devices))]
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        self._failure, self._over = "", threading.Event()
        self._changes = 0, 0
        self._sockets, self._processes = inherited_sockets(), None
        if not self._sockets:
            self._processes = start(devices, self._folder)
            self._sockets = self._processes.sockets
        training, self._saving = (
            _Channel(one, heard, self._failed)
            for one, heard in zip(self._sockets, (self._heard, self._heard_notes), strict=True)
        )
        super().__init__(training, "trainer")
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()
        try:
            training.ask("trainer", "make", make, config)
        except BaseException:
            self._end()
            raise

    def weights(self) -> WeightSource:
        """The present ones."""
        facts = self._channel.ask("weights", "facts")
        source: Any = RanksWeights(self._channel, lambda: self._changes[1], self._config, facts)
        return source

    def snapshot(self) -> Any:
        """A `Snapshot` on each rank, which writes while training goes on."""
        return Asked(self._saving, "snapshot", **self._channel.ask("trainer", "snapshot"))

    @property
    def changes(self) -> int:
        """See `TrainerRank.changes`; once what is under way has ended."""
        with self._channel.turn:
            return self._changes[0]

    @property
    def places(self) -> list[str]:
        """Where each rank stands, for people."""
        return [sign.place for sign in self._signs]

    def close(self) -> None:
        """End them. Raises RanksError where one had failed, whether or not somebody was told."""
        self._end()
        if self._failure:
            raise RanksError(self._failure)

    def _end(self) -> None:
        self._over.set()
        self._thread.join()
        self._hang_up()
        if self._processes:
            self._processes.end(CLOSED_S)
        for one in self._sockets:
            one.close()

    def _hang_up(self) -> None:
        """Rank 0 hears no more, which ends it, and nobody here waits for it."""
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _heard(self, said: Said) -> None:
        self._heard_notes(said)
        self._changes = said.changes

    def _heard_notes(self, said: Said) -> None:
        self.notes += said.notes

    def _failed(self) -> RanksError:
        """Why nothing more is heard."""
        self._thread.join(TOLD_S)
        return RanksError(self._failure or f"the ranks have ended, and none says why{self._cure('rank_0.log')}")

    def _look_on(self) -> None:
        while not self._over.wait(LOOK_S):
            if self._fault() and not self._over.wait(SETTLED_S) and (fault := self._fault()):
                rank, what = fault
                self._failure = f"{self._role} {rank} {what}{self._cure(f'rank_{rank}.log')}"
                waited_for = self._channel.turn.locked() or self._saving.turn.locked()
                if self._processes:
                    self._processes.end()
                self._hang_up()
                if self._task and not waited_for:  # else whoever waits raises it
                    self._loop.call_soon_threadsafe(self._task.cancel)
                return

    def _cure(self, log: str) -> str:
        again = f"go on with the same command and resume=true hydra.run.dir={self._config.folder}"
        return f"; the end of what it printed is in {self._folder / log}; {again}"

    def _fault(self) -> tuple[int, str] | None:
        """The rank that failed first, and how; None where all do what they shall."""
        faults = [fault for sign in self._signs if (fault := self._fault_of(sign))]
        if faults:
            return min(faults)[1:]
        if not (asked := self._channel.asked):
            for sign in self._signs:
                sign.still = 0  # to wait for a call is no standing still; to pass one on counts, for that may hang too
            return None
        limit_s = STILL_S
        if asked in self._channel.done:
            limit_s = max(PASS_S, PASS_RATIO * LOOK_S * max(sign.longest[asked] for sign in self._signs))
        if all(sign.still * LOOK_S >= limit_s for sign in self._signs):
            last = min(self._signs, key=lambda sign: (bool(sign.collective), sign.beat["place"][1:]))
            return last.rank, f"stands still, for {limit_s:g} s: {'; '.join(self.places)}"
        return None

    def _fault_of(self, sign: _Sign) -> tuple[float, int, str] | None:
        """What is wrong with a rank, after when that was: first those which were killed, for they say nothing of it.

        torch aborts the process of a rank that has lost another one, so that comes last.
        """
        rank, path = sign.rank, self._folder / f"rank_{sign.rank}.json"
        code = self._processes and self._processes.started[rank].poll()
        with suppress(OSError, ValueError):
            sign.look(json.loads(path.read_bytes()))
        if error := sign.beat.get("error"):
            return error[0], rank, f"ended: {error[1]}"
        if code is not None and code < 0:
            return math.inf if code == -signal.SIGABRT else 0.0, rank, f"was killed by signal {-code}"
        if code is not None:
            last = read_end(path.with_suffix(".log"), 2000).strip().rpartition("\n")[2]
            return math.inf, rank, f"ended with exit code {code}: {last}"
        if not self._processes and sign.is_gone:
            return 0.0, rank, "was killed: its process is gone"
        if sign.unchanged * LOOK_S > STOPPED_S:
            return math.inf, rank, f"has stopped: no sign of life for {STOPPED_S:g} s ({sign.place})"
        return None


@dataclass
class _Sign:
    """What a rank says of itself, and how many looks it has stayed the same, and its place."""

    name: str
    rank: int
    beat: dict[str, Any] = field(default_factory=dict[str, Any])
    unchanged: int = 0
    still: int = 0
    longest: Counter[str] = field(default_factory=Counter[str])  # looks that it was still and moved on then, by call

    def look(self, beat: dict[str, Any]) -> None:
        self.unchanged = (self.unchanged + 1) * (beat == self.beat)
        place, before = beat["place"], self.beat.get("place")
        if before and place != before:
            self.longest[before[0]] = max(self.longest[before[0]], self.still)
        self.still = (self.still + 1) * (place == before)
        self.beat = beat

    @property
    def collective(self) -> str:
        """In which it waits for others; "": in none that is known."""
        return self.beat.get("line", ("", ""))[1]

    @property
    def place(self) -> str:
        name, parts, phase, passes = self.beat.get("place", ("not begun", 0, "", 0))
        line, collective = self.beat.get("line", ("", ""))
        counted = f", part {parts}" * bool(parts) + f", {phase} ({passes} passes)" * bool(phase)
        return f"{self.name}: {name}{counted}" + f", in {collective}" * bool(collective) + f", {line}" * bool(line)

    @property
    def is_gone(self) -> bool:
        """Whether its process, on this machine, is there no more."""
        if self.beat.get("host") == socket.gethostname():
            try:
                os.kill(self.beat["pid"], 0)
            except ProcessLookupError:
                return True
        return False


class _Channel:
    """Calls through one pair of sockets, one at a time."""

    def __init__(self, one: socket.socket, heard: Callable[[Said], None], failed: Callable[[], RanksError]) -> None:
        self.turn = threading.Lock()
        self.asked = ""  # what is being done for the controller; what a rank is made by may take any time
        self.done = set[str]()  # methods that compute, and have given a result
        self._connection = Connection(os.dup(one.fileno()))
        self._heard, self._failed = heard, failed

    def ask(self, owner: str, name: str, *arguments: Any) -> Any:
        """What the call gives. Raises what all ranks raise alike, and RanksError where one fails."""
        try:
            return next(self.parts(owner, name, *arguments))
        except StopIteration as done:
            return done.value

    def parts(self, owner: str, name: str, *arguments: Any) -> Generator[Any, None, Any]:
        """As `ask`, of what is given in parts, as it comes; then the result."""
        with self.turn:
            self.asked = name if name != "make" else ""
            try:
                self._connection.send_bytes(packed(Call(owner, name, arguments)))
                said = self._receive()
                try:
                    while said.kind == "part":
                        yield said.value
                        said = self._receive()
                finally:
                    while said.kind == "part":  # nobody wants the rest
                        said = self._receive()
            except (EOFError, OSError) as error:
                raise self._failed() from error
            finally:
                self.asked = ""
            self.done |= {name} & {*IN_PASSES}
        if said.kind == "error":
            raise said.value
        return said.value

    def _receive(self) -> Said:
        said: Said = pickle.loads(self._connection.recv_bytes())
        self._heard(said)
        return said


class RanksWeights(Asked):
    """A `WeightSource`: the weights that the ranks train."""

    def __init__(self, channel: _Channel, changes: Callable[[], int], config: TrainerConfig, facts: Any) -> None:
        super().__init__(channel, "weights", **facts)
        self._changes, self._config = changes, config

    @property
    def changes(self) -> int:
        """See `WeightSource`; as far as it is known while an update is under way."""
        return self._changes()

    def tensors(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource`. What is pushed is received whole first: to wait for a server holds up no rank."""
        parts = self._channel.parts("weights", "tensors", dtype)
        yield from parts if dtype is None else list(parts)

    def here(self) -> ModelWeights:
        """A copy that is loaded now."""
        return ModelWeights(load_model(self._config.model, self._config.seed), self.version)
