"""A rank: does what the controller asks, as all ranks do, until there is no more; `python -m mtgrpo.cluster.rank`.

Rank 0 is told and answers; the others hear of it by a broadcast. An error that all have alike is an answer. An error of
one alone ends its process: others may wait for it in the midst of their work, until the controller ends them.
"""

from __future__ import annotations

import gc
import hashlib
import hmac
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import zip_longest
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from mtgrpo.cluster.wire import Call, Said, packed
from mtgrpo.errors import ConfigError, RunError
from mtgrpo.parallel.launch import KEY
from mtgrpo.runtime.files import write_whole
from mtgrpo.runtime.resources import keep_freed_memory

if TYPE_CHECKING:
    from mtgrpo.policy.trainer import TrainerConfig, TrainerRank

LIMIT = timedelta(hours=1)  # of ranks for one another: a checkpoint may take some to write
IDLE_S = 2.0  # after which rank 0 tells the others that there is nothing to do yet
ALIKE_S = 10.0  # for all ranks to come to the same error
BEAT_S = 1.0
MAC_BYTES = 32
_PACKAGE, _DISTRIBUTED = Path(__file__).resolve().parent.parent, Path(dist.__file__).parent
FACTS = ("version", "model_name", "config", "dtype", "lora", "size", "traits", "cuts_trees")  # of a weight source


def make_trainer(config: TrainerConfig, rank: int, ranks: int) -> TrainerRank:
    """What trains in this process. Its libraries take seconds to load: a rank is heard of before."""
    from mtgrpo.policy.layouts.start import make_layout  # noqa: PLC0415
    from mtgrpo.policy.trainer import TrainerRank  # noqa: PLC0415

    return TrainerRank(config, make_layout(config.parallel, rank, ranks))


class Heart:
    """Says each second, in `rank_N.json` of a folder, that this process runs, and what it has come to."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._parent, self._beats, self._turn = os.getppid(), 0, threading.Lock()
        self.place: tuple[str, int] = "starting", 0  # what is done, and how many parts of it are
        self.within: Callable[[], tuple[str, int]] = lambda: ("", 0)  # the phase of it, and how many have begun
        self._error: tuple[float, str] | None = None

    def start(self, folder: Path) -> None:
        """Begin, unless it has; what this process prints goes to `rank_N.log` from here on."""
        if self._path is None:
            self._path = folder / f"rank_{os.environ['RANK']}.json"
            log = os.open(self._path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while os.getppid() == self._parent:
            self._beat()
            time.sleep(BEAT_S)
        self._end("what had started it is gone")
        os._exit(1)

    def _beat(self) -> None:
        with self._turn:
            self._beats += 1
            said = {"host": socket.gethostname(), "pid": os.getpid(), "beats": self._beats}
            said |= {"place": [*self.place, *self.within()], "line": line_of_main_thread()}
            if self._path is not None:
                with suppress(OSError):  # the disk may be full
                    write_whole(self._path, json.dumps(said | {"error": self._error}).encode(), durable=False)

    def _end(self, why: str) -> None:
        self._error = time.time(), why
        self._beat()

    @contextmanager
    def stops_by_error(self, leave: Callable[[int], object]) -> Generator[None]:
        """An error within is told; then the process ends."""
        try:
            yield
        except BaseException as error:
            self._end(traceback.format_exception_only(error)[-1].strip().splitlines()[0])
            traceback.print_exc()
            leave(1)


def line_of_main_thread() -> tuple[str, str]:
    """Which line of this package the main thread is at, and in which collective or other call of torch.distributed."""
    frames, collective = sys._current_frames(), ""  # pyright: ignore[reportPrivateUsage]  (documented)
    frame = frames.get(threading.main_thread().ident or 0)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if _PACKAGE in path.parents:
            return f"{path.relative_to(_PACKAGE)}:{frame.f_lineno}", collective
        if _DISTRIBUTED in path.parents or "deepspeed" in path.parts:
            collective = collective or frame.f_code.co_name
        frame = frame.f_back
    return "", collective


class Channel:
    """Calls that all ranks hear at once, in one order. Made on all ranks at once.

    Whoever reaches the port of a process group may be any rank of it. So a call comes with a code by which the others
    know, before they unpickle it, that it is of who has their `key`, and the next of this channel.
    """

    def __init__(self, name: str, connection: Connection | None, key: bytes) -> None:
        """connection: to the controller, of rank 0 alone. key: b"" where a launcher has given the ranks none."""
        self.name, self.calls, self._connection, self._key = name, 0, connection, key
        self._group: Any = dist.new_group(backend="gloo", timeout=LIMIT)

    def hear(self) -> Call | None:
        """The next call; None where no more will come. Raises RunError for one that rank 0 of this run did not send."""
        while True:
            told = self._receive(self._connection) if self._connection else b""
            told = self._code(told) + told if told else told
            size = torch.tensor(-1 if told is None else len(told))
            dist.broadcast(size, 0, self._group)
            if size < 0:
                return None
            if size:
                content = torch.frombuffer(bytearray(told or int(size)), dtype=torch.uint8)
                dist.broadcast(content, 0, self._group)
                code, call = content[:MAC_BYTES].numpy(), content[MAC_BYTES:].numpy().data
                if self._connection is None and not hmac.compare_digest(code.tobytes(), self._code(call)):
                    raise RunError("another process than rank 0 of this run has said what to do, and was not obeyed")
                self.calls += 1
                return pickle.loads(call)

    def _code(self, call: bytes | memoryview) -> bytes:
        code = hashlib.blake2b(f"{self.name} {self.calls}\n".encode(), key=self._key, digest_size=MAC_BYTES)
        code.update(call)
        return code.digest()

    def _receive(self, connection: Connection) -> bytes | None:
        """What the controller says; b"": nothing yet, None: it has closed."""
        try:
            return connection.recv_bytes() if connection.poll(IDLE_S) else b""
        except (EOFError, OSError):
            return None

    def say(self, said: Said) -> None:
        """To the controller, of rank 0; parts at once, all else when every rank has come to it."""
        if said.kind != "part":
            dist.barrier(self._group)
        if self._connection is not None:
            self._connection.send_bytes(packed(said))


class RankWork:
    """What the channels of a rank share: its trainer, and the last snapshot."""

    def __init__(self, heart: Heart, store: Any) -> None:
        self._heart, self._store = heart, store  # that all ranks have
        self._trainer: Any = None
        self._weights: Any = None  # those of the trainer when it was made, which count its changes
        self._snapshot: Any = None

    def obey(self, channel: Channel) -> None:
        """Do what is asked through `channel`, until no more comes."""
        while (call := channel.hear()) is not None:
            try:
                kind, value = "result", self._finish(channel, call)
            except (ConfigError, RunError) as error:
                if not self._is_alike(f"{channel.name} {channel.calls}", error):
                    raise
                kind, value = "error", error
            self._say(channel, kind, value)
            self._stand(call, "waiting", 0)

    def _stand(self, call: Call, name: str, parts: int) -> None:
        """Say where training stands; a snapshot is written beside it."""
        if call.owner != "snapshot":
            self._heart.place = name, parts

    def _finish(self, channel: Channel, call: Call) -> Any:
        """What the call gives; parts are said meanwhile."""
        self._stand(call, call.name, 0)
        result = self._do(call)
        while isinstance(result, Generator):
            try:
                part = next(result)
            except StopIteration as done:
                return done.value
            self._stand(call, call.name, self._heart.place[1] + 1)
            self._say(channel, "part", part)
        return result

    def _do(self, call: Call) -> Any:
        if call.name == "make":
            make, config = call.arguments
            self._heart.start(config.folder / "ranks")
            self._trainer = make(config, dist.get_rank(), dist.get_world_size())
            self._heart.within = lambda: self._trainer.place
            self._weights = self._trainer.weights()
            gc.collect()
            gc.freeze()  # what is loaded stays
            return None
        owner = {"trainer": self._trainer, "snapshot": self._snapshot}.get(call.owner) or self._trainer.weights()
        if call.name == "facts":
            return {name: getattr(owner, name) for name in FACTS}
        result = getattr(owner, call.name)(*call.arguments)
        if call.name != "snapshot":
            return result
        self._snapshot = result
        return {"bytes": result.bytes}

    def _say(self, channel: Channel, kind: str, value: Any) -> None:
        notes, changes = list[str](), (0, 0)
        if self._trainer is not None:
            changes = self._trainer.changes, self._weights.changes
            notes = list(self._trainer.notes)
            del self._trainer.notes[: len(notes)]
        channel.say(Said(kind, value, notes, changes))

    def _is_alike(self, call: str, error: Exception) -> bool:
        """Whether all ranks have this error."""
        keys = [f"{call} of {rank}" for rank in range(dist.get_world_size())]
        self._store.set(keys[dist.get_rank()], repr(error))
        try:
            self._store.wait(keys, timedelta(seconds=ALIKE_S))
        except dist.DistError:
            return False
        return len({self._store.get(key) for key in keys}) == 1


def serve(connections: Sequence[Connection], folder: Path | None, leave: Callable[[int], object]) -> None:
    """Be the rank that the environment says, until the controller closes; then `leave` with an exit code.

    connections: to the controller, of rank 0 alone, for training and for saving, which goes on beside it. folder: where
    to say what it has come to; None: the controller will tell.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller, which saves
    heart = Heart()
    if folder is not None:
        heart.start(folder)
    with heart.stops_by_error(leave):
        store, rank, ranks = next(rendezvous("env://", timeout=LIMIT))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=LIMIT)
        if not torch.cuda.is_available():
            keep_freed_memory()
        named, key = zip_longest(("training", "saving"), connections), os.environ.pop(KEY, "").encode()
        training, saving = [Channel(name, connection, key) for name, connection in named]
        work = RankWork(heart, store)

        def save() -> None:
            with heart.stops_by_error(leave):
                work.obey(saving)

        thread = threading.Thread(target=save, daemon=True)
        thread.start()
        work.obey(training)
        thread.join(LIMIT.total_seconds())
        dist.destroy_process_group()
    leave(0)


def flush_and_exit(code: int) -> None:
    """End the process, whatever its threads do."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve([Connection(int(number)) for number in sys.argv[2:]], Path(sys.argv[1]), flush_and_exit)
