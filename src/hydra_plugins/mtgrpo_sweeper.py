"""The sweeper `optuna`, for Hydra: what each run is given, Optuna chooses by the held-out reward of those before it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from mtgrpo.config.sweep import Values, describe_space, read_space, varies
from mtgrpo.errors import RunError

SETTINGS = {
    "_target_": "hydra_plugins.mtgrpo_sweeper.OptunaSweeper",
    "trials": 20,  # runs, one after the other
    "seed": 0,  # of what Optuna chooses
    "params": {},  # in a file: settings that vary
}
ConfigStore.instance().store("optuna", SETTINGS, "hydra/sweeper", provider="mtgrpo")


class OptunaSweeper(Sweeper):
    """Optuna's tree-structured Parzen estimator; the same command makes the same choices, so a sweep can be resumed."""

    def __init__(self, trials: int, seed: int, params: object) -> None:
        self._trials, self._seed = trials, seed

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra before `sweep`."""
        start = Plugins.instance().instantiate_launcher
        self._launcher = start(hydra_context=hydra_context, task_function=task_function, config=config)
        self._loader, self._master = hydra_context.config_loader, config

    def sweep(self, arguments: list[str]) -> Sequence[JobReturn]:
        """Run the trials, and say which was the best. Raises RunError where none has come to its end."""
        import optuna  # noqa: PLC0415  an extra

        space = read_space(self._master, self._loader)
        distributions = {key: _distribution(values) for key, values in space.items()}
        folder = Path(self._master.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self._master, folder / "multirun.yaml")
        print(f"{self._trials} trials: {describe_space(space)}", flush=True)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=self._seed))
        results: list[JobReturn] = []
        for number in range(self._trials):
            trial = study.ask(distributions)
            results += self._launcher.launch([_words(trial.params)], initial_job_idx=number)
            value = results[-1].return_value if results[-1].status is JobStatus.COMPLETED else None
            study.tell(trial, value, optuna.trial.TrialState.FAIL if value is None else None)
        ended = [trial for trial in study.trials if trial.value is not None]
        if not ended:
            raise RunError(f"none of {self._trials} trials has come to its end, in {folder}")
        best = study.best_trial
        chosen = " ".join(_words({key: value for key, value in best.params.items() if varies(space[key])}))
        print(f"best of {len(ended)} trials: run {best.number}, held-out reward {best.value:.3f}, with {chosen}")
        return results


def _words(params: dict[str, Any]) -> list[str]:
    """What a run is given, to four digits."""
    return [f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in params.items()]


def _distribution(values: Values) -> Any:
    """What Optuna chooses from."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution  # noqa: PLC0415

    if isinstance(values, list):
        return CategoricalDistribution(values)
    kind: Any = IntDistribution if isinstance(values.start, int) and isinstance(values.end, int) else FloatDistribution
    return kind(values.start, values.end, log="log" in values.tags)
