"""Where code runs that nobody has read: with limits, and away from the network and from files."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import platform
import shutil
import signal
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Self, cast

from mtgrpo.errors import ConfigError, refuse_without_effect, require
from mtgrpo.tools import sandbox_init
from mtgrpo.tools.sandbox_fusion import FusionSession
from mtgrpo.tools.sandbox_fusion import Result as Result

_INIT = Path(sandbox_init.__file__).read_text(encoding="utf-8")
_GRACE_S = 0.5  # beyond the time limit, before the sandbox is ended from outside
_NOBODY = 65534
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
# System calls by their numbers on x86_64 and aarch64: memory that no limit counts, and doors into the kernel.
_REFUSED = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
}
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}


class Kind(Enum):
    """What keeps code from the machine."""

    bubblewrap = "bubblewrap"  # namespaces: no network, no file but /usr, no process to be seen, none left
    rlimits = "rlimits"  # weaker: limits alone; code can read your files and use your network
    fusion = "fusion"  # a server of SandboxFusion at `url`, with what walls it has


@dataclass
class Sandbox:
    """How code runs. With bubblewrap (0.8 or later) as an unprivileged user in namespaces of its own."""

    kind: Kind = Kind.bubblewrap
    url: str = ""  # of the server, for kind=fusion
    python: str = "python3"  # the interpreter, of /usr or in one of `folders`
    folders: list[str] = field(default_factory=list[str])  # that code may read, beside /usr
    timeout_s: float = 10.0  # for each piece of code; for each of its processes as much processor time, too
    memory_mb: int = 512  # of all its processes together; rlimits: of each
    processes: int = 16  # threads included; rlimits: all those of the same user count
    file_mb: int = 16  # in /tmp, what it prints included, and as much in /dev/shm; rlimits: of each file
    output_chars: int = 4000  # of what it prints: beginning and end

    slots = cast("asyncio.Semaphore | None", None)  # once it is opened: one for each processor

    def __post_init__(self) -> None:
        require(self, timeout_s="> 0", memory_mb=">= 32", processes=">= 1", file_mb=">= 1", output_chars=">= 100")
        if self.kind is Kind.rlimits:
            refuse_without_effect(self, ("folders",), "with sandbox.kind=rlimits code can read what you can")
        if self.kind is Kind.fusion:
            refuse_without_effect(self, ("python", "folders", "processes", "file_mb"), "the server has its own")
        if bool(self.url) != (self.kind is Kind.fusion):
            raise ConfigError("sandbox.kind=fusion and sandbox.url=http://HOST:PORT belong together: set both or none")

    async def opened(self) -> Self:
        """It, once it was tried, with `slots` for those who share it.

        Raises ConfigError where this kind of sandbox does not work on this machine.
        """
        session = self.session()
        try:
            if (found := await session.run("print(6 * 7)")).output != "42\n":
                raise RuntimeError(f"print(6 * 7) gave {found}")
        except (OSError, RuntimeError) as error:
            if self.kind is Kind.fusion:
                raise ConfigError(f"sandbox.url={self.url} does not work: {error}") from error
            raise ConfigError(
                f"sandbox.kind={self.kind.value} with sandbox.python={self.python} does not work here: {error}; for "
                "bubblewrap install version 0.8 or later (apt-get install bubblewrap) on a system that allows user "
                "namespaces, or choose the weaker sandbox.kind=rlimits, in which code can read your files and use "
                "your network"
            ) from error
        finally:
            await session.close()
        running = copy.copy(self)
        running.slots = asyncio.Semaphore(os.cpu_count() or 1)
        return running

    def session(self) -> Session | FusionSession:
        """A new interpreter; whoever asks for it closes it. It starts with the first code that it is given."""
        if self.kind is Kind.fusion:
            return FusionSession(self.url, self.timeout_s, self.memory_mb, self.output_chars)
        return Session(self)

    def command(self, system_calls: int) -> list[str]:
        """What starts the interpreter. system_calls: a file that says which are refused."""
        limits = {
            "timeout_s": self.timeout_s,
            "memory_bytes": self.memory_mb << 20,
            "file_bytes": self.file_mb << 20,
            "processes": self.processes,
            "output_bytes": self.output_chars,
        }
        user = [f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
        unprivileged = ["setpriv", *user] if os.geteuid() == 0 else []
        walls = self._bubblewrap(system_calls) if self.kind is Kind.bubblewrap else []
        return [*unprivileged, *walls, self.python, "-I", "-X", "utf8", "-c", _INIT, json.dumps(limits)]

    def _bubblewrap(self, system_calls: int) -> list[str]:
        words = [
            "--unshare-all",
            "--unshare-user",
            "--disable-userns",
            "--die-with-parent",
            "--new-session",
            "--as-pid-1",
        ]
        words += ["--cap-drop", "ALL", "--seccomp", str(system_calls), "--ro-bind", "/usr", "/usr"]
        for folder in (Path("/", name) for name in ("bin", "lib", "lib64")):
            if folder.is_symlink():
                words += ["--symlink", os.readlink(folder), str(folder)]
            elif folder.is_dir():
                words += ["--ro-bind", str(folder), str(folder)]
        for folder in ("/etc/ld.so.cache", "/etc/alternatives"):
            words += ["--ro-bind-try", folder, folder]
        for folder in self.folders:
            words += ["--ro-bind", folder, folder]
        size = ["--size", str(self.file_mb << 20), "--tmpfs"]
        words += ["--proc", "/proc", "--dev", "/dev", *size, "/dev/shm", *size, "/tmp", "--chdir", "/tmp"]
        return ["bwrap", *words, "--remount-ro", "/dev", "--remount-ro", "/", "--"]


class Session:
    """An interpreter in a sandbox; variables stay from one piece of code to the next until something is stopped.

    It must live in one event loop: the kernel ends the sandbox with the thread that has started it.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox, self._lock = sandbox, asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._folder = ""  # to work in, where there is no /tmp of its own

    async def run(self, code: str) -> Result:
        """Run `code`, after what was begun before. Raises OSError or RuntimeError where the sandbox itself fails."""
        async with self._lock:
            try:
                result = await self._answer(code)
            except BaseException:
                await self.close()
                raise
            if result.stopped:
                await self.close()
            return result

    async def close(self) -> None:
        """End every process of it."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""

    async def _answer(self, code: str) -> Result:
        process = self._process = self._process or await self._start()
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        limit_s = self._sandbox.timeout_s
        try:
            async with asyncio.timeout(limit_s + _GRACE_S):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it says why on stderr
                    process.stdin.write(json.dumps(code).encode() + b"\n")
                    await process.stdin.drain()
                line = await process.stdout.readline()
                if not line and (said := (await process.stderr.read()).decode(errors="replace").strip()):
                    raise RuntimeError(f"the sandbox failed: {said[-500:]}")
        except TimeoutError:
            return Result("", stopped=f"it took longer than {limit_s:g} s")
        if not line:
            return Result("", stopped="it ended the process that watches it")
        found: dict[str, Any] = json.loads(line)
        return Result(found["output"], found["error"], found["stopped"])

    async def _start(self) -> asyncio.subprocess.Process:
        if self._sandbox.kind is Kind.rlimits:
            self._folder = tempfile.mkdtemp()
            os.chmod(self._folder, 0o777)  # the user that runs the code may be another
        program = _system_calls() if self._sandbox.kind is Kind.bubblewrap else b""
        rules, write = os.pipe()
        try:
            os.write(write, program)
            os.close(write)
            pipe = asyncio.subprocess.PIPE
            return await asyncio.create_subprocess_exec(
                *self._sandbox.command(rules),
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=_ENVIRONMENT,
                cwd=self._folder or "/",
                start_new_session=True,
                pass_fds=(rules,),
                limit=2**26,
            )
        finally:
            os.close(rules)


def _system_calls() -> bytes:
    """A program for the kernel's seccomp, in classic BPF: calls in `_REFUSED` fail with EPERM.

    Raises RuntimeError on other processors than x86_64 and aarch64.
    """
    if platform.machine() not in _ARCHITECTURES:
        raise RuntimeError(f"the processor is {platform.machine()}, not one of {', '.join(_ARCHITECTURES)}")
    name, column = _ARCHITECTURES[platform.machine()]
    numbers = [each[column] for each in _REFUSED.values()]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    steps: Sequence[tuple[int, int, int, int]] = [  # operation, steps to skip if true and if false, operand
        (load, 0, 0, 4),  # the architecture of the call
        (equal, 1, 0, name),
        (answer, 0, 0, 0x80000000),  # end the process
        (load, 0, 0, 0),  # the number of the call
        (at_least, len(numbers) + 1, 0, 0x40000000),  # another table of numbers
        *((equal, len(numbers) - nth, 0, number) for nth, number in enumerate(numbers)),
        (answer, 0, 0, 0x7FFF0000),  # allow
        (answer, 0, 0, 0x00050001),  # EPERM
    ]
    return b"".join(struct.pack("HBBI", *step) for step in steps)
