"""The whole configuration: one dataclass that holds one of each part. Each default is written once, on its part."""

import functools
import inspect
from abc import ABC
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from mtgrpo.advantages import AdvantageEstimator
from mtgrpo.agents import Agent
from mtgrpo.algorithms import Algorithm
from mtgrpo.algorithms.correction import Correction, OldPolicy
from mtgrpo.algorithms.kl import KL, Place
from mtgrpo.batch.settings import BatchSettings
from mtgrpo.chat import ChatSettings
from mtgrpo.condensers import Condenser
from mtgrpo.engines import Engine
from mtgrpo.environments import Environment
from mtgrpo.errors import Bounded, ConfigError, refuse_without_effect, require
from mtgrpo.model.settings import FROM_SCRATCH, ModelSettings
from mtgrpo.parallel import Parallel
from mtgrpo.parallel.cluster import Cluster
from mtgrpo.parallel.devices import Devices
from mtgrpo.parts import File, Parts, Reach, Text
from mtgrpo.policy.settings import Control, OptimizerSettings, ReferenceSettings, Schedule, Updates
from mtgrpo.profile import Profile
from mtgrpo.record.settings import RecordSettings
from mtgrpo.rewards import Reward
from mtgrpo.rollout.settings import Curriculum, Filter, RolloutSettings
from mtgrpo.tasks import Split, TaskSource
from mtgrpo.tasks.conversations import Conversations
from mtgrpo.tools.calls import Faults
from mtgrpo.types import Sampling

SINKS = ("console", "jsonl")  # where nothing else is chosen
LEAST_SCRATCH_LR = 1e-4  # a learning rate below it hardly moves weights from scratch
LATEST = "true"  # `resume=true`; any other text is the path of a checkpoint

ResumeMode = Enum("ResumeMode", {"exact": "exact", "continue": "continue"})
Form = Enum("Form", {"trajectories": "trajectories", "messages": "messages"})


@dataclass
class TrainerSettings(Updates, steps=">= 0", epochs=">= 0", total_turns=">= 0", wall_time_s=">= 0", idle_steps=">= 0"):
    """How long the run is. It ends at the first limit that is reached, and says which; 0 = no such limit."""

    steps: int = 100  # rollout batches
    epochs: int = 0  # passes over the training tasks
    total_turns: int = 0  # model turns sampled, over the run
    wall_time_s: float = 0.0  # of rollouts and updates; evaluation and saving are not counted
    idle_steps: int = 10  # in a row without anything to learn from, as where no group's rewards differ
    deterministic: bool | None = None  # every digit depends on the seed alone; null: in step and without an agent

    def __post_init__(self) -> None:
        super().__post_init__()
        if not any((self.steps, self.epochs, self.total_turns, self.wall_time_s)):
            cure = "set `steps`, `epochs`, `total_turns` or `wall_time_s` above 0; the warm start alone is `mtgrpo sft`"
            raise ConfigError(f"the run never ends: {cure}")


@dataclass
class WarmStart(Bounded, steps=">= 0 (0 = none)", batch_size=">= 1"):
    """Supervised steps on the task's demonstrations, before reinforcement learning. steps 0 = none."""

    steps: int = 0
    batch_size: int = 32  # demonstrations per step
    demonstrations: File = ""  # a file or folder of JSON Lines of messages; by default the task's own demonstrations
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)


class WarmStartAlone(WarmStart):
    """That of `mtgrpo sft`: no reinforcement learning follows."""


@dataclass
class Evaluation:
    """When and how the policy is measured, on held-out tasks."""

    every_steps: int = 0  # also during training, with one sample per task; 0 = only before and after
    stop: int = 0  # the run ends after so many evaluations without a better success than before; 0 = it goes on
    tasks: int = 200  # the first so many of the held-out ones, in the order of their file
    samples: int = 8  # per task at temperature 1; pass@8 needs 8
    fail_under: float = 0.0  # `mtgrpo eval` ends with exit code 1 where held-out success is lower; 0 = never
    no_tools: bool = False  # a control: the same tasks without tools too, `eval/no_tools/success`
    # further task sets, `eval/NAME/success`: [gsm8k], or {easy: {task: jsonl, val_files: [easy.jsonl]}}
    sets: Annotated[Any, Parts("task")] = None

    def __post_init__(self) -> None:
        require(self, every_steps=">= 0 (0 = only before and after)", fail_under=">= 0 and <= 1")
        require(self, tasks=">= 1", samples=">= 1", stop=">= 0 (0 = never)")
        if not self.every_steps:
            refuse_without_effect(self, ("stop",), "set `every_steps`, so that success is measured during training")


@dataclass
class Collection:
    """What `mtgrpo collect` writes: conversations of the policy as it is."""

    tasks: int = 200
    samples: int = 1  # per task
    held_out: bool = False  # of the held-out tasks in place of those of training
    # trajectories: with statuses, rewards, the lengths of turns and the metadata that tools may read, as in a run's
    # `trajectories`, for `sft.demonstrations`; messages: these and tools alone, as most libraries fine-tune on them
    form: Form = Form.trajectories
    file: Text = "collected.jsonl"  # in the run's folder; NAME.parquet: a table
    successes: bool = False  # only these

    def __post_init__(self) -> None:
        require(self, tasks=">= 1", samples=">= 1")
        if Path(self.file).suffix not in (".jsonl", ".parquet") or Path(self.file).name != self.file:
            raise ConfigError(f"`file` must be NAME.jsonl or NAME.parquet, got {self.file!r}")


@dataclass
class CheckpointSettings(
    Bounded, every_steps=">= 0 (0 = only where a stage or the run ends)", keep_last=">= 0 (0 = all)", keep_best=">= 0"
):
    """When the run is saved and how many checkpoints stay."""

    every_steps: int = 10  # of either stage: what a crash costs at most; 0 = only where a stage or the run ends
    keep_last: int = 3  # and step 0, which a warm start ends with; 0 = all
    keep_best: int = 1  # beside them, the best by held-out success; steps after which that was measured are saved


@dataclass
class Debug:
    """Controls and probes."""

    advantages: Control = Control.normal  # shuffled and flipped are controls that must not learn


@dataclass
class Experiment:
    """One run. Every field is an option group of the command line."""

    task: TaskSource
    environment: Environment
    condenser: Condenser
    reward: Reward
    algorithm: Algorithm
    advantage: AdvantageEstimator
    engine: Engine
    agent: Agent
    parallel: Parallel
    cluster: Cluster
    seed: int = 0  # of everything random: the same seed on the same machine gives the same run
    resume: File = ""  # true: go on in hydra.run.dir=FOLDER; or PATH of a checkpoint to go on from in a new folder
    # exact: steps after the checkpoint are run again from their start; continue: what the journal holds of them is
    # taken back, and conversations go on at their last turn; null: exact if rollout.max_staleness is 0
    resume_mode: ResumeMode | None = None
    # without a turn sampled or a micro-batch trained, and never less than rollout.timeout_s and rollout.score_timeout_s
    # with ten minutes more: the run says why, and ends; 0 = off
    watchdog_s: float = 3600.0
    kl: KL = field(default_factory=KL)
    reference: ReferenceSettings = field(default_factory=ReferenceSettings)
    correction: Correction = field(default_factory=Correction)
    filter: Filter = field(default_factory=Filter)
    curriculum: Curriculum = field(default_factory=Curriculum)
    model: ModelSettings = field(default_factory=ModelSettings)
    chat: ChatSettings = field(default_factory=ChatSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    faults: Faults = field(default_factory=Faults)
    sampling: Sampling = field(default_factory=Sampling)
    devices: Devices = field(default_factory=Devices)
    batch: BatchSettings = field(default_factory=BatchSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    sft: WarmStart = field(default_factory=WarmStart)
    eval: Evaluation = field(default_factory=Evaluation)
    collect: Collection = field(default_factory=Collection)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    # console, jsonl, wandb, tensorboard, mlflow, trackio or path/to/file.py:Name; settings as log.wandb.project=mine
    log: Annotated[Any, Reach.network] = None
    record: RecordSettings = field(default_factory=RecordSettings)
    debug: Debug = field(default_factory=Debug)
    profile: Profile = field(default_factory=Profile)

    def __post_init__(self) -> None:
        for name, base in groups().items():
            if not isinstance(part := getattr(self, name), base):
                raise ConfigError(
                    f"{name} must be an object of a class derived from {base.__name__}, got {part!r:.200}"
                )
        if self.resume.lower() in (LATEST, "false"):
            self.resume = LATEST if self.resume.lower() == LATEST else ""
        require(self, watchdog_s=">= 0 (0 = off)")
        self.advantage.check(self)
        self.algorithm.check(self)
        if self.eval.stop and not self.checkpoint.keep_best:
            raise ConfigError(
                f"eval.stop={self.eval.stop} ends a run after its best policy, which "
                "checkpoint.keep_best=0 throws away: set checkpoint.keep_best=1"
            )
        self._check_rewards()
        self._check_policies()
        self._check_agent()
        self._check_deterministic()
        parts = (self.task, self.environment, self.condenser, self.reward, self.engine, self.agent)
        for part in (*parts, self.parallel, self.cluster):
            part.check(self)
        if self.condenser.attends and not self.engine.attends:
            raise ConfigError(
                f"condenser {self.condenser.name} goes by the model's attention, which engine "
                f"{type(self.engine).__name__} cannot measure: set engine=local or another condenser"
            )
        if self.eval.no_tools and (self.agent.active or self.environment.without_tools() is None):
            raise ConfigError("eval.no_tools=true: the environment has no tools that could be left out; leave it out")
        if not self.trainer.steps and self.optimizer.schedule is not Schedule.constant:
            raise ConfigError(
                f"optimizer.schedule={self.optimizer.schedule.value} needs to know the last step: set trainer.steps, "
                "or optimizer.schedule=constant"
            )

    @property
    def optimizers(self) -> dict[str, OptimizerSettings]:
        """Those of the stages that a run has, by their settings."""
        warm = {"sft.optimizer": self.sft.optimizer} if self.sft.steps else {}
        return warm if isinstance(self.sft, WarmStartAlone) else {"optimizer": self.optimizer, **warm}

    @property
    def deterministic(self) -> bool:
        """Whether results depend on the seed alone."""
        chosen = self.trainer.deterministic
        return not (self.rollout.max_staleness or self.agent.active) if chosen is None else chosen

    @property
    def resumes_exactly(self) -> bool:
        """Whether a run that is resumed leaves its journal aside."""
        return not self.rollout.max_staleness if self.resume_mode is None else self.resume_mode is ResumeMode.exact

    @property
    def notes(self) -> list[str]:
        """What the user should know before training begins."""
        notes = [self.advantage.note(self.algorithm), self.reward.note(self.algorithm.scales_by_std)]
        if 0 < self.sft.steps <= (steps := self.sft.optimizer.warmup_steps):
            notes.append(f"the warm start ends while its learning rate rises: sft.optimizer.warmup_steps is {steps}")
        rates = {"sft.optimizer": (self.sft.optimizer.lr, 3e-3)} if self.sft.steps else {}
        for name, (lr, usual) in {**rates, "optimizer": (self.optimizer.lr, 5e-4)}.items():
            if self.model.name in FROM_SCRATCH and lr < LEAST_SCRATCH_LR:
                notes.append(
                    f"model.name={self.model.name} starts from scratch, and {name}.lr={lr:g} hardly moves it: begin "
                    f"the recipe with `defaults: [from_scratch]`, or set it near {usual:g}"
                )
        if self.sft.demonstrations and not self.sft.steps and not Path(self.model.name).is_dir():
            notes.append("sft.demonstrations is set and sft.steps is 0: there is no warm start; set sft.steps=300")
        return [note for note in notes if note]

    @property
    def rewards_turns(self) -> bool:
        """Whether single turns are rewarded."""
        return self.reward.judges_turns or self.environment.pays_turns or self.agent.active

    def _check_rewards(self) -> None:
        if self.filter.zero_variance and not self.algorithm.needs_variance:
            raise ConfigError(
                f"filter.zero_variance=true: with algorithm {type(self.algorithm).__name__} as it is set, groups of "
                "equal rewards have a gradient too; leave it out"
            )
        if self.kl.coef and self.kl.place is Place.reward and self.algorithm.scales_by_std:
            raise ConfigError(
                "kl.place=reward with algorithm.divide_by_std=true: where siblings are rewarded alike the penalty is "
                "all that differs, and would be scaled up whatever kl.coef is; set algorithm.divide_by_std=false"
            )

    def _check_policies(self) -> None:
        moving = self.reference.update_every or self.reference.ema
        if moving and not self.kl.coef:
            raise ConfigError("reference.update_every and reference.ema move a KL penalty's reference: set kl.coef")
        if (count := self.devices.reference.count) and not self.kl.coef:
            raise ConfigError(
                f"devices.reference asks for {count} devices for the reference of a KL penalty: set kl.coef"
            )
        old = self.correction.old_policy
        if self.algorithm.uses_behaviour_policy and (old not in (None, OldPolicy.engine) or self.correction.active):
            raise ConfigError(
                f"algorithm {type(self.algorithm).__name__} compares with the policy that sampled, which corrects for "
                "it already: leave correction.old_policy, correction.weight, correction.reject and correction.veto out"
            )
        if old is OldPolicy.interpolated and self.rollout.max_staleness < 2:
            raise ConfigError(
                "correction.old_policy=interpolated is for tokens that are two updates old or more: set "
                f"rollout.max_staleness to 2 or above, got {self.rollout.max_staleness}"
            )
        single = self.trainer.updates_per_batch == 1 and not self.trainer.minibatch_trajectories
        if self.reference.update_every == 1 and single:
            raise ConfigError(
                "reference.update_every=1 with one update per batch: the reference would always be the policy itself"
            )

    def _check_agent(self) -> None:
        if not self.agent.active:
            return
        if self.trainer.deterministic:
            raise ConfigError(
                "trainer.deterministic=true waits until every open conversation has asked for its next turn, and "
                f"nobody knows whether agent {type(self.agent).__name__} will: leave it out"
            )
        if self.agent.posts_rewards and not self.reward.takes_posted:
            raise ConfigError(
                "agent.posts_rewards=true: what the agent's program posts would take the place of reward "
                f"{type(self.reward).__name__}; set reward=environment, which scores by what is posted, or leave it out"
            )
        if self.resume_mode is ResumeMode["continue"]:
            raise ConfigError(
                "resume_mode=continue goes on with conversations that had begun; an agent's begin again: leave it out"
            )
        if self.condenser.active:
            raise ConfigError(
                f"condenser {self.condenser.name} condenses the conversations of the environment: with agent "
                f"{type(self.agent).__name__} the agent chooses its contexts itself; set condenser=none"
            )

    def _check_deterministic(self) -> None:
        hurried = ("timeout_s", "score_timeout_s", "extra_samples", "max_staleness")
        settings = [("sampling.timeout_s", self.sampling), *((f"rollout.{name}", self.rollout) for name in hurried)]
        for name, section in settings:
            field = name.rpartition(".")[2]
            value, usual = getattr(section, field), getattr(type(section), field)
            if value not in (0, usual) and self.deterministic:
                raise ConfigError(
                    f"{name}={value} makes results depend on the speed of the machine and of tools: "
                    f"set trainer.deterministic=false, or {name}={usual}"
                )

    def check_warm_start(self) -> None:
        """Raise ConfigError where a warm start is asked for and there are no demonstrations."""
        if self.sft.steps and not self.demonstrated.demonstrates:
            raise ConfigError(
                f"sft.steps={self.sft.steps}: task {type(self.task).__name__} has no demonstrations to learn from; set "
                "sft.steps=0, or sft.demonstrations=FILE, or write `demonstration` in a task source of your own "
                "(task=path/to/file.py:Name)"
            )
        if self.sft.steps and self.sft.demonstrations:
            try:
                self.demonstrated.stream(Split.train, self.seed)
            except ConfigError as error:
                raise ConfigError(str(error).replace("task.path", "sft.demonstrations")) from error

    @property
    def demonstrated(self) -> TaskSource:
        """The tasks of the warm start."""
        if not self.sft.demonstrations:
            return self.task
        return Conversations(path=self.sft.demonstrations, eval_fraction=0.0, system_prompt=self.task.system_prompt)

    def imitating(self) -> "Experiment":
        """As `mtgrpo sft` runs it, the warm start alone. Raises ConfigError where that would do nothing."""
        if not self.sft.steps:
            raise ConfigError("sft.steps=0: there is nothing to do; give sft.steps=NUMBER")
        return replace(self, sft=WarmStartAlone(**vars(self.sft)))

    def check_training(self) -> None:
        """Raise ConfigError for what can be evaluated but not trained."""
        if self.sampling.temperature == 0:
            raise ConfigError("sampling.temperature=0 is greedy: nothing is explored; training needs a value above 0")


@functools.cache
def groups() -> dict[str, type]:
    """The option groups, in the order of the Experiment's fields, with the base class of their options."""
    hints = get_type_hints(Experiment)
    return {name: hint for name, hint in hints.items() if inspect.isclass(hint) and ABC in hint.__bases__}
