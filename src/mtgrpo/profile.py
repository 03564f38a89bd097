"""Where the time of a run goes: seconds by phase, and a trace of chosen steps."""

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from mtgrpo.errors import ConfigError, refuse_without_effect

PHASES: tuple[str, ...] = ("packing", "forward", "backward", "update", "check")  # of a training step


@dataclass
class Profile:
    """Measurements under profile/ in every step, and their means at the end. On a GPU they cost some speed."""

    enabled: bool = False  # seconds a conversation waits for the policy and for tools, seconds of a step's phases
    reward: bool = True  # also seconds of scoring
    condensation: bool = True  # also seconds of condensing, and tokens before and after
    # the steps whose updates are traced, in traces/step_000003.json (Chrome's format)
    trace_steps: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        if not self.enabled:
            refuse_without_effect(self, ("reward", "condensation", "trace_steps"), "set `enabled=true`")
        if wrong := [step for step in self.trace_steps if step < 1]:
            raise ConfigError(f"`trace_steps`: steps count from 1, got {wrong[0]}")


class Profiler:
    """Takes the measurements. Disabled, it takes none and waits for no device."""

    def __init__(self, settings: Profile | None = None) -> None:
        self._settings = settings or Profile()
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)  # of the phases of the present step
        self._steps: list[dict[str, float]] = []
        self.phase, self.passes = "", 0  # what began last, and how many did: where a process stands

    @contextmanager
    def measure(self, phase: str) -> Generator[None]:
        """Count the time inside as `phase`, one of PHASES, but for that of phases within."""
        self.phase, self.passes = phase, self.passes + 1
        if not self._settings.enabled:
            yield
            return
        began, counted = self._now(), sum(self._seconds.values())
        try:
            yield
        finally:
            within = sum(self._seconds.values()) - counted
            self._seconds[phase] += self._now() - began - within

    @contextmanager
    def trace(self, step: int, folder: Path) -> Generator[None]:
        """Around the update of step number `step`: writes its trace into the run's `folder` where that is set."""
        if step not in self._settings.trace_steps:
            yield
            return
        import torch  # noqa: PLC0415  settings alone import no library

        with torch.profiler.profile() as profiler:
            yield
        path = folder / "traces" / f"step_{step:06d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))

    def take(self) -> dict[str, float]:
        """The seconds of the phases since it was asked last."""
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return seconds

    def step(
        self, conversations: Mapping[str, float], trained: Mapping[str, float], train_s: float, sync_s: float
    ) -> dict[str, float]:
        """The measurements of a step: those of its `conversations`, and the seconds of the phases of its update.

        The trainer took `trained` seconds of phases; the update took `train_s` in all, and new weights for the engine
        `sync_s`.
        """
        if not self._settings.enabled:
            return {}
        phases = {f"{phase}_s": seconds + trained[phase] for phase, seconds in self.take().items()}
        phases["other_s"] = train_s - sum(phases.values())
        measured = {**conversations, **phases, "sync_s": sync_s}
        self._steps.append(measured)
        return {f"profile/{name}": value for name, value in measured.items()}

    def summary(self) -> str:
        """The means over all steps as lines of text, without those that are 0; "" without steps."""
        if not self._steps:
            return ""
        means = {name: mean(step[name] for step in self._steps) for name in self._steps[0]}
        rows = [f"  {name.replace('_', ' '):<34}{value:12,.3f}" for name, value in means.items() if value]
        return "\n".join([f"profile, means over {len(self._steps)} steps:", *rows])

    def _now(self) -> float:
        import torch  # noqa: PLC0415  settings alone import no library

        if torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels count for the phase that launched them
        return time.perf_counter()
