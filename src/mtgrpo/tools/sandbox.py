"""Where code runs that nobody has read: with limits, and away from the network and from files."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self, cast

from mtgrpo.errors import ConfigError, refuse_without_effect, require
from mtgrpo.parts import Folder, Network, Part, Program, Reach, RunContext, extension
from mtgrpo.runtime import processes
from mtgrpo.tools import sandbox_calls, sandbox_init, sandbox_judge
from mtgrpo.tools.sandbox_init import READY
from mtgrpo.tools.sandbox_rules import system_calls

_GRACE_S = 0.5  # beyond the time limit, before the sandbox is ended from outside
_START_S = 30.0  # for the sandbox to be ready
_NOBODY = 65534
BUBBLEWRAP = "bubblewrap"  # namespaces: no network, no file but /usr, no process to be seen, none left
RLIMITS = "rlimits"  # weaker: limits alone; code can read your files and use your network
_START = """import json, sys, types
sources, limits = map(json.loads, sys.argv[1:])
for name, source in sources:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, "<sandbox>", "exec"), vars(module))
module.main(limits)
"""
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Result:
    """What a piece of code led to."""

    output: str  # what it printed, tracebacks included; the middle is left out where it is long
    error: str = ""  # the name of the exception that ended it
    stopped: str = ""  # why it was stopped, or its process died; its variables are then lost

    @property
    def passed(self) -> bool:
        return not self.error and not self.stopped


class InterpreterElsewhere(ABC):
    """An interpreter on the server at `sandbox.url`, whose variables stay, with what walls the server has."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    @abstractmethod
    async def run(self, code: str, **tests: str | bool) -> Result:
        """As `Interpreter.run`. Raises RuntimeError where the server does not answer, or fails."""

    @abstractmethod
    async def aclose(self) -> None:
        """Forget what was run."""


@dataclass
class Sandbox:
    """How code runs. With bubblewrap (0.8 or later) as an unprivileged user in namespaces of its own."""

    # rlimits are weaker; fusion, a server of SandboxFusion at `url`, is experimental: it was never run against one
    kind: Annotated[str, Reach.run] = BUBBLEWRAP
    url: Network = ""  # of the server, for kind=fusion
    python: Program = "python3"  # the interpreter, of /usr or in one of `folders`
    folders: list[Folder] = field(default_factory=list[str])  # that code may read, beside /usr
    timeout_s: float = 10.0  # for each piece of code; for each of its processes as much processor time, too
    memory_mb: int = 512  # of all its processes together; rlimits: of each
    processes: int = 16  # threads included; rlimits: all those of the same user count
    file_mb: int = 16  # in /tmp, what it prints included, and as much in /dev/shm; rlimits: of each file
    output_chars: int = 4000  # of what it prints: beginning and end

    slots = cast("asyncio.Semaphore | None", None)  # once it is opened: one for each processor

    def __post_init__(self) -> None:
        require(self, timeout_s="> 0", memory_mb=">= 32", processes=">= 1", file_mb=">= 1", output_chars=">= 100")
        if self.kind == RLIMITS:
            refuse_without_effect(self, ("folders",), "with sandbox.kind=rlimits code can read what you can")
        if self._elsewhere:
            refuse_without_effect(self, ("python", "folders", "processes", "file_mb"), "the server has its own")
        if bool(self.url) != bool(self._elsewhere):
            kind = self.kind if self._elsewhere else "fusion"
            raise ConfigError(f"sandbox.kind={kind} and sandbox.url=http://HOST:PORT belong together: set both or none")

    @property
    def _elsewhere(self) -> type[InterpreterElsewhere] | None:
        if self.kind in (BUBBLEWRAP, RLIMITS):
            return None
        try:
            return extension.find_class("mtgrpo.tools", self.kind, InterpreterElsewhere, "sandbox elsewhere")
        except ConfigError as error:
            raise ConfigError(f"sandbox.kind={self.kind} is not {BUBBLEWRAP} or {RLIMITS}, and {error}") from error

    async def opened(self) -> Self:
        """It, once it was tried, with `slots` for those who share it.

        Raises ConfigError where this kind of sandbox does not work on this machine.
        """
        try:
            async with aclosing(self.session()) as session:
                if (result := await session.run("print(6 * 7)")).output != "42\n":
                    raise RuntimeError(f"print(6 * 7) gave {result}")
        except (OSError, RuntimeError) as error:
            if self._elsewhere:
                raise ConfigError(f"sandbox.url={self.url} does not work: {error}") from error
            raise self.refused(error) from error
        running = copy.copy(self)
        running.slots = asyncio.Semaphore(os.cpu_count() or 1)
        return running

    def refused(self, why: object) -> ConfigError:
        """Says that this kind does not work on this machine."""
        return ConfigError(
            f"sandbox.kind={self.kind} with sandbox.python={self.python} does not work here: {why}; for bubblewrap "
            "install version 0.8 or later (apt-get install bubblewrap) on a system that allows user namespaces, or "
            "choose the weaker sandbox.kind=rlimits, in which code can read your files and use your network"
        )

    def session(self) -> Interpreter | InterpreterElsewhere:
        """A new interpreter; whoever asks for it closes it. It starts with the first code that it is given."""
        return (self._elsewhere or Interpreter)(self)

    def arguments(self) -> list[str]:
        """Of the Python that becomes the first process of a sandbox."""
        limits = {"timeout_s": self.timeout_s, "memory_bytes": self.memory_mb << 20, "output_bytes": self.output_chars}
        if not self._elsewhere:  # a server has its own
            limits |= {"file_bytes": self.file_mb << 20, "processes": self.processes}
        modules = (sandbox_calls, sandbox_judge, sandbox_init)
        sources = [(module.__name__, Path(module.__file__ or "").read_text(encoding="utf-8")) for module in modules]
        return ["-I", "-X", "utf8", "-c", _START, json.dumps(sources), json.dumps(limits)]

    def command(self, system_calls: int) -> list[str]:
        """What starts the interpreter. system_calls: a file that says which are allowed."""
        user = [f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
        unprivileged = ["setpriv", *user] if os.geteuid() == 0 else []
        walls = self._bubblewrap(system_calls) if self.kind == BUBBLEWRAP else []
        return [*unprivileged, *walls, self.python, *self.arguments()]

    def _bubblewrap(self, system_calls: int) -> list[str]:
        words = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
        words += ["--as-pid-1", "--cap-drop", "ALL", "--seccomp", str(system_calls), "--ro-bind", "/usr", "/usr"]
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


@dataclass
class Sandboxed(Part):
    """A part that runs code in a sandbox."""

    sandbox: Sandbox = field(default_factory=Sandbox)

    def check_machine(self) -> None:
        if self.sandbox.kind == BUBBLEWRAP and shutil.which("bwrap") is None:
            raise self.sandbox.refused("there is no program bwrap")

    @asynccontextmanager
    async def open(self, context: RunContext) -> AsyncGenerator[Self]:
        """With a sandbox that was tried. Raises ConfigError where it does not work."""
        running = copy.copy(self)
        running.sandbox = await self.sandbox.opened()
        yield running


class Interpreter:
    """An interpreter in a sandbox; variables stay from one piece of code to the next until something is stopped.

    It must live in one event loop: the kernel ends the sandbox with the thread that has started it.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox, self._lock = sandbox, asyncio.Lock()
        self._program: processes.ProcessTree | None = None
        self._folder = ""  # to work in, where there is no /tmp of its own

    async def run(self, code: str, **tests: str | bool) -> Result:
        """Run `code`, after what was begun before, and the `tests` with their `setup` on it; then the session is over.

        Raises OSError or RuntimeError where the sandbox does not start. Once it has, what happens is the code's doing.
        """
        async with self._lock:
            try:
                program = self._program = self._program or await self._start()
                result = await self._answer(program, json.dumps({"code": code, **tests}).encode() + b"\n")
            except BaseException:
                await self.aclose()
                raise
            if result.stopped:
                await self.aclose()
            return result

    async def aclose(self) -> None:
        program, self._program = self._program, None
        if program is not None:
            await program.end()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""

    async def _answer(self, program: processes.ProcessTree, request: bytes) -> Result:
        limit_s = self._sandbox.timeout_s
        try:
            async with asyncio.timeout(limit_s + _GRACE_S):
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    program.stdin.write(request)
                    await program.stdin.drain()
                line = await program.stdout.readline()
        except TimeoutError:
            return Result("", stopped=f"it took longer than {limit_s:g} s")
        if not line.endswith(b"\n"):
            return Result("", stopped="it ended the process that watches it")
        return Result(**json.loads(line))

    async def _start(self) -> processes.ProcessTree:
        supervised = self._sandbox.kind == RLIMITS  # in namespaces all end with the first process
        if supervised:
            self._folder = tempfile.mkdtemp()
            os.chmod(self._folder, 0o777)  # the user that runs the code may be another
        allowed = system_calls() if self._sandbox.kind == BUBBLEWRAP else b""
        rules, write = os.pipe()
        try:
            os.write(write, allowed)
            os.close(write)
            command, folder = self._sandbox.command(rules), self._folder or "/"
            options: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), PIPE)
            self._program = program = await processes.start(
                command, _ENVIRONMENT, folder, supervised=supervised, pass_fds=(rules,), limit=2**26, **options
            )
        finally:
            os.close(rules)
        async with asyncio.timeout(_START_S):
            if (await program.stdout.readline()).decode().strip() != READY:
                errors = (await program.stderr.read()).decode(errors="replace").strip()
                raise RuntimeError(f"the sandbox failed: {errors[-500:]}")
        return program
