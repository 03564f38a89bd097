"""What is set of the update: the optimiser, the reference of a KL penalty, how often a batch is used."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mtgrpo.advantages import AdvantageEstimator
from mtgrpo.advantages.rewards import Rewards
from mtgrpo.algorithms import Algorithm, Tensor
from mtgrpo.algorithms.correction import Correction, OldPolicy
from mtgrpo.algorithms.kl import KL, Place
from mtgrpo.errors import Bounded, ConfigError, refuse_without_effect, require
from mtgrpo.runtime.packages import refuse_without_package


class Kind(Enum):
    """AdamW (arXiv:1711.05101), or Muon (Jordan 2024) for matrices with AdamW for embeddings and vectors."""

    adamw = "adamw"
    adamw_8bit = "adamw_8bit"  # moments in 8 bits (arXiv:2110.02861), a quarter of the memory; needs bitsandbytes
    muon = "muon"


class Schedule(Enum):
    """The learning rate over the run, after `warmup_steps` of linear warm-up."""

    constant = "constant"
    linear = "linear"  # falls linearly to 0
    cosine = "cosine"  # falls to 0 along half a cosine
    wsd = "wsd"  # warm-up, stable, then linearly to 0 over the last 40 %


@dataclass
class OptimizerSettings:
    """The optimiser of one training stage."""

    kind: Kind = Kind.adamw  # adamw_8bit: moments in 8 bits; muon: for hidden matrices, with AdamW for the rest
    offload: bool = False  # gradients, moments and the step in the host's memory, 16 bytes a weight; slower
    lr: float = 1e-6
    muon_lr: float = 0.02  # of the matrices when kind=muon; `lr` is that of the rest
    weight_decay: float = 0.0  # of all trained tensors, norm gains and biases too (HF Trainer and TRL leave these out)
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    schedule: Schedule = Schedule.constant
    warmup_steps: int = 0
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm

    def __post_init__(self) -> None:
        require(self, lr="> 0 and <= 1", muon_lr="> 0 and <= 1", max_grad_norm="> 0", weight_decay=">= 0 and <= 1")
        require(self, warmup_steps=">= 0")
        if self.kind is Kind.adamw_8bit:
            refuse_without_package("bitsandbytes", "`kind=adamw_8bit`")
            if self.offload:
                raise ConfigError("`offload=true` steps on the host, `kind=adamw_8bit` on the GPU: choose one of them")
        if self.kind is not Kind.muon:
            refuse_without_effect(self, ("muon_lr",), "set `kind=muon`")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"`betas` must be two numbers in [0, 1), got {self.betas}")


@dataclass
class ReferenceSettings:
    """Which policy a KL penalty compares with. By default it is the one that reinforcement learning began with."""

    update_every: int = 0  # steps after which the reference becomes the policy of then; 0 = never
    ema: float = 0.0  # after each step the reference moves this share of the way towards the policy; 0 = it stays

    def __post_init__(self) -> None:
        require(self, update_every=">= 0", ema=">= 0 and <= 1")
        if self.update_every and self.ema:
            raise ConfigError(
                f"`update_every={self.update_every}` and `ema={self.ema}` are two ways to move the "
                "reference: set one of them to 0"
            )

    def share(self, step: int) -> float:
        """Of the way to the policy that the reference moves after training step number `step` (from 1)."""
        refreshed = bool(self.update_every) and step % self.update_every == 0
        return 1.0 if refreshed else self.ema


@dataclass
class Updates(Bounded, minibatch_trajectories=">= 0", updates_per_batch=">= 1"):
    """How one rollout batch is used."""

    minibatch_trajectories: int = 0  # trajectories per optimiser step; 0 = the whole batch in one step
    updates_per_batch: int = 1  # passes over the batch


class Control(Enum):
    """What the update is given: the advantages, or a control that must not learn."""

    normal = "normal"
    shuffled = "shuffled"  # permuted over the whole batch
    flipped = "flipped"  # with the opposite sign


@dataclass(frozen=True)
class UpdateConfig:
    """What is learnt from a rollout batch, and how."""

    algorithm: Algorithm
    advantage: AdvantageEstimator
    kl: KL = field(default_factory=KL)
    reference: ReferenceSettings = field(default_factory=ReferenceSettings)
    correction: Correction = field(default_factory=Correction)
    updates: Updates = field(default_factory=Updates)
    length: int = 1  # of average=constant, in tokens
    stale: bool = False  # whether older weights may have sampled a batch
    exact: bool = False  # whether the engine's log-probabilities are the trainer's, but for rounding
    control: Control = Control.normal
    records: bool = False  # whether what each token was paid is kept until it is asked for
    scores_after: bool = False  # and how likely it is after the update
    apart: bool = False  # whether the reference of a KL penalty is in processes of its own

    @property
    def old_policy(self) -> OldPolicy:
        """The denominator of the ratio."""
        return self.correction.resolve(self.stale, self.algorithm.uses_behaviour_policy)

    def compared(self, rewards: Rewards) -> Tensor:
        """The tokens [n] int64 that are compared with the reference.

        What counts in a baseline is charged for its distance too, also where it is not trained.
        """
        in_reward = self.kl.coef > 0 and self.kl.place is Place.reward
        return (rewards.of_tokens(self.advantage.weigh(rewards).trained) | in_reward).nonzero()[:, 0]
