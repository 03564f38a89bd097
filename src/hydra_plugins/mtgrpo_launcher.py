"""The launcher of sweeps, for Hydra: each run in a fresh process of its own, one after the other."""

import itertools
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.utils import JobReturn, JobRuntime, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from mtgrpo.errors import ConfigError, program
from mtgrpo.record.reading import as_typed, flat, held_out_reward, read_settings
from mtgrpo.runtime.text import printable

OF_SWEEPS = ("hydra.mode", "hydra.run", "hydra.sweep", "hydra/sweeper", "hydra.launcher", "hydra/launcher")
FAILED = "failed.log"  # in the folder of a run that failed: the end of what it wrote to standard error
MOST_LINES = 200  # of it
CLOSES_S = 5.0  # for what a run has started and left behind to let go of its errors
TARGET = {"_target_": "hydra_plugins.mtgrpo_launcher.ProcessLauncher"}
ConfigStore.instance().store("process", TARGET, "hydra/launcher", provider="mtgrpo")


class ProcessLauncher(Launcher):
    """Runs `mtgrpo COMMAND ...` for each combination; one that fails does not stop the others."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra before `launch`."""
        self._loader: Any = hydra_context.config_loader
        self._master: Any = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Called by Hydra's sweeper. What a run returns is its held-out reward, for sweepers that optimise."""
        root, given = self._master.hydra.sweep.dir, OmegaConf.to_container(self._master.hydra.overrides)
        common = [line for line in cast(Any, given)["hydra"] if not line.startswith(OF_SWEEPS)]
        command = [sys.executable, "-P", "-m", "mtgrpo", str(JobRuntime.instance().get("name")), *self._loader.flags]
        results: list[JobReturn] = []
        failures: list[str] = []
        fixed = {word.casefold() for word in cast(Any, given)["task"]}  # Hydra makes true True
        for number, words in enumerate(job_overrides, initial_job_idx):
            varied = [word.replace("\\", "") for word in words if word.casefold() not in fixed]
            title = f"run {number} ({' '.join(varied)})"
            print(title, flush=True)
            config = self._configuration(number, words)
            folder = Path(root, str(config.hydra.sweep.subdir))
            if before := _is_done(config, folder, varied, "Optuna" in self._master.hydra.sweeper._target_):
                print(f"it has come to its end before, in {folder}", flush=True)
            place = QuotedString(str(folder), Quote.single).with_quotes()
            line = [*command, *words, *common, "hydra.mode=RUN", f"hydra.run.dir={place}"]
            try:
                code, said = (0, []) if before else _finished(line)
            except KeyboardInterrupt:
                with suppress(OSError):  # the terminal may be gone
                    place = shlex.quote(f"hydra.sweep.dir={root}")
                    print(f"the sweep goes on by its own command with resume=true {place}", flush=True)
                raise
            done = JobReturn(overrides=words, working_dir=str(folder))
            done.status = JobStatus.FAILED if code else JobStatus.COMPLETED
            done.return_value = SystemExit(1) if code else held_out_reward(folder)
            results.append(done)
            failures += [f"{title} failed with exit code {code}{_kept(said, folder)}"] if code else []
        if len(results) > 1 or failures:
            done = f"{len(results) - len(failures)} of {len(results)} runs done, in {root}"
            print(f"{done} ({program()} report {shlex.quote(str(root))})", *failures, sep="\n", flush=True)
        return results

    def _configuration(self, number: int, words: Sequence[str]) -> DictConfig:
        config = self._loader.load_sweep_config(self._master, list(words))
        with open_dict(config):
            config.hydra.job.id, config.hydra.job.num = str(number), number
        HydraConfig.instance().set_config(config)
        return config


def _is_done(config: DictConfig, folder: Path, varied: Iterable[str], chosen: bool) -> bool:
    """Whether a sweep that goes on has this run already. Raises ConfigError where what is varied was another there.

    chosen: by what came before, which a run that is made good changes. The other run is put aside then.
    """
    if str(config.resume).lower() != "true":
        return False
    given: Any = OmegaConf.to_container(config, enum_to_str=True)
    wanted = flat({key: value for key, value in given.items() if key not in ("hydra", "resume", "resume_mode")})
    kept = read_settings(folder)
    choices = given["hydra"]["runtime"]["choices"].items()
    wanted = {group: as_typed(choice) for group, choice in choices if group in kept} | wanted
    other = {key for key, value in wanted.items() if kept.get(key, value) != value}
    if swept := sorted(other & {word.partition("=")[0].lstrip("+") for word in varied}):
        was = f"{folder} has {swept[0]}={kept[swept[0]]}, not {wanted[swept[0]]}"
        if not chosen:
            raise ConfigError(f"{was}: a sweep goes on by the same command and resume=true")
        places = (folder.with_name(f"{folder.name}.before-{number}") for number in itertools.count(1))
        aside = folder.rename(next(place for place in places if not place.exists()))
        print(f"{was}: it begins anew, and what was there is now in {aside}", flush=True)
        return False
    return not other and wanted.keys() <= kept.keys() and held_out_reward(folder) is not None


def _kept(said: Sequence[bytes], folder: Path) -> str:
    """The end of what a run that failed has said, which is kept in its folder, for the report of the sweep."""
    if not said:
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FAILED).write_bytes(b"".join(said))
    return f": {printable(said[-1].decode(errors='replace').strip())} ({folder / FAILED})"


def _show(errors: Iterable[bytes], said: deque[bytes]) -> None:
    """Pass on each line, and keep the last ones; where nobody hears them any more, read on, or the run would wait."""
    for line in errors:
        said.append(line)
        with suppress(OSError, ValueError):
            print(line.decode(errors="replace"), end="", file=sys.stderr, flush=True)


def _finished(command: Sequence[str]) -> tuple[int, Sequence[bytes]]:
    """The exit code of a run, and the last lines of its errors, which are shown too.

    What asks the sweep to end is passed on; it ends when the run has saved and closed. Ctrl-C is not: the terminal
    sends it to both.
    """
    asked: list[int] = []
    said: deque[bytes] = deque(maxlen=MOST_LINES)
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:

        def end(number: int, _: object) -> None:
            asked.append(number)
            if number != signal.SIGINT:
                process.send_signal(number)

        heard = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, end) for number in heard}
        reader = threading.Thread(target=_show, args=(process.stderr, said), daemon=True)
        reader.start()
        try:
            code = process.wait()
            reader.join(CLOSES_S)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if asked:
        raise KeyboardInterrupt
    return code, said
