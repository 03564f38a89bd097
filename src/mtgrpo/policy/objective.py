"""What one rollout batch trains: advantages, corrections and the loss of every token, update by update."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mtgrpo.advantages import advantages
from mtgrpo.advantages.rewards import Rewards
from mtgrpo.algorithms import PerToken, Tokens
from mtgrpo.algorithms.correction import OldPolicy, diagnostics, interpolate
from mtgrpo.algorithms.grpo import is_clamped, ratio_of
from mtgrpo.algorithms.kl import Estimator, Place, estimate
from mtgrpo.batch.forest import Batch
from mtgrpo.errors import RunError
from mtgrpo.model.scorer import Scores
from mtgrpo.policy.guard import worst_trajectory
from mtgrpo.policy.settings import Control, UpdateConfig
from mtgrpo.policy.step import CooperativeTask, Metrics, Policy
from mtgrpo.policy.witness import GroupEvidence, Witness, choose

NOT_REPRODUCIBLE = "the forward pass is not reproducible: before a batch's first update its log-probabilities changed"
_NOTED = ("weight", "last", "entropy", "factor", "clipped", "clamped")  # of each token, for the record of the step
WORST_MISMATCH = "mismatch/worst_trajectory"


class Objective:
    """Gives `Policy` the loss of tokens; `prepare` comes first, and `begin` before each update.

    Its tensors are [tokens], in fp64, and NaN or None where they are not needed.
    """

    def __init__(
        self,
        learning: UpdateConfig,
        policy: Policy,
        reference: dict[str, Tensor] | Tensor | None,
        kl_coef: float,
        batch: Batch,
        steps: Sequence[Tensor],
        version: int,
    ) -> None:
        """reference: the weights of that of a KL penalty, or what it says of `UpdateConfig.compared`.

        steps: the trajectories of each update. version: training steps that the policy has seen.
        """
        self._learning, self._policy, self._reference, self._kl_coef = learning, policy, reference, kl_coef
        self._batch, self._steps, self._version = batch, steps, version
        self._old = learning.old_policy
        nothing = torch.full((len(batch),), torch.nan, dtype=torch.float64)
        self.entries = torch.zeros(0, dtype=torch.long)  # which tokens have a loss
        self.witness: Witness | None = None  # a trajectory of the first update
        self._advantage = self._ref_logp = nothing
        self._target: Tensor | None = None  # of the value head
        self._before: Scores | None = None  # of the policy before the first update
        self._first_logp = nothing.clone()  # as each token was first scored
        rows = len(_NOTED) if learning.records else 2  # the weight and the log-probability alone
        self._noted = nothing.repeat(rows, 1)  # see `record`
        self._scored = nothing.repeat(rows - 1, 1)  # the same, but the weight, of the update on this rank
        self._update = self.entries  # the tokens of the update that has begun
        self._apart = [0.0]  # nats, of the first update from the old policy, in each micro-batch of this rank
        self._weight: Tensor | None = None  # the correction's factors
        self._kept: Tensor | None = None  # bool, by entropy
        self._first = True  # whether the update that has begun is the first of the batch
        self._sequence: Tensor | None = None  # of that update, what `Tokens.sequence` is taken from
        self._share = nothing.sum()  # of that update, of all its tokens
        self._state_weight = nothing  # of that update, what makes the sum over the states of a trajectory their mean

    def prepare(self, rewards: Rewards, seed: int, evidence: GroupEvidence | None) -> CooperativeTask[None]:
        """Compute the advantages, and what the losses need once for the batch, by as few forward passes as it takes."""
        learning, algorithm, batch = self._learning, self._learning.algorithm, self._batch
        everything = learning.compared(rewards)
        rewards = learning.advantage.weigh(rewards)
        in_reward = self._reference is not None and learning.kl.place is Place.reward
        if isinstance(self._reference, Tensor):
            self._ref_logp = self._reference
        elif self._reference is not None:
            self._ref_logp = (yield from self._policy.scoring(batch, everything, self._reference)).logp
        if in_reward or algorithm.has_critic:
            self._before = yield from self._score_before_update(everything)
        if in_reward and self._before is not None:
            penalty = estimate(learning.kl.estimator, self._before.logp, self._ref_logp)
            rewards = replace(rewards, per_token=-self._kl_coef * penalty)
        values = self._before.value if algorithm.has_critic and self._before else None
        if values is not None:
            values = values.nan_to_num(0.0)  # the critic says nothing of trajectories that are not trained
        assigned = advantages(learning.advantage, algorithm, rewards, values)
        self._target = assigned.target
        self._advantage = apply_control(learning.control, assigned.advantage, batch.trajectory, seed)
        if evidence:
            with self._policy.profiler.measure("check"):
                self.witness = choose(evidence, learning, rewards, values, self._steps[0].tolist(), seed)
        self.entries = entries = self._with_gradient(rewards).nonzero()[:, 0]
        if not self._advantage[entries].isfinite().all():
            raise RunError("an advantage is not finite: see the rewards in the trajectories of this step")
        from_trainer = self._old is OldPolicy.trainer and (len(self._steps) > 1 or learning.correction.active)
        if self._before is None and (from_trainer or algorithm.top_entropy < 1):
            self._before = yield from self._score_before_update(entries)
        if self._before is None:
            return
        if learning.correction.active and self._old is OldPolicy.trainer:
            self._weight = torch.ones(len(batch), dtype=torch.float64)
            logp, behaviour_logp = self._before.logp[entries], batch.behaviour_logp[entries]
            self._weight[entries] = learning.correction.weights(logp, behaviour_logp, batch.trajectory[entries])
        if algorithm.top_entropy < 1 and len(entries):
            entropy = _of_contexts(batch, self._before.entropy, entries)
            place = math.ceil(round((len(entries) - 1) * (1 - algorithm.top_entropy), 6))  # of torch.quantile's
            self._kept = entropy >= entropy[entries].kthvalue(place + 1).values  # which takes 2^24 numbers at most

    def _with_gradient(self, rewards: Rewards) -> Tensor:
        """Which tokens are computed: those of trajectories with a gradient, whole; [tokens] bool."""
        learning, matters = self._learning, rewards.trained
        in_loss = self._reference is not None and learning.kl.place is Place.loss
        if not (in_loss or learning.algorithm.always_has_gradient):
            trajectory = rewards.trajectory[rewards.turn]
            matters = matters & torch.isin(torch.arange(len(matters)), trajectory[self._advantage != 0])
        return rewards.of_tokens(matters)

    def _score_before_update(self, entries: Tensor) -> CooperativeTask[Scores]:
        """The scores of `entries` before the first update; packed, and so rounded, as the updates will be."""
        scores: Scores | None = None
        for members in self._steps[: len(self._steps) // self._learning.updates.updates_per_batch]:
            part = entries[torch.isin(self._batch.trajectory[entries], members)]
            new = yield from self._policy.scoring(self._batch, part)
            for whole, some in zip(scores or (), new, strict=False):
                if whole is not None and some is not None:
                    whole[part] = some[part]
            scores = scores or new
        assert scores is not None, "a pass has a mini-batch"
        return scores

    def begin(self, entries: Tensor, weights: Tensor, first: bool) -> CooperativeTask[None]:
        """Another update, on `entries` [n], which `weights` [tokens] weigh; what its losses need of all of them."""
        self._first = first
        self._update = entries
        self._scored[:, entries] = torch.nan
        self._noted[0, entries] = self._noted[0, entries].where(self._noted[0, entries].isfinite(), weights[entries])
        if self._target is not None:
            states = max(1, int(self._target[entries].isfinite().sum()))
            self._state_weight = 1 / (states * weights)  # so that values are averaged over the states
            self._share = weights[entries].sum()  # by which metrics are divided
        algorithm = self._learning.algorithm
        if not algorithm.needs_sequence_ratio:
            return
        advantage, trajectory = self._advantage[entries], self._batch.trajectory[entries]
        log_ratio = torch.zeros_like(advantage)
        if not first or self._old is not OldPolicy.trainer:  # else the policy is the old one
            now = (yield from self._policy.scoring(self._batch, entries)).logp[entries]
            log_ratio = now - self._old_logp(entries, now, self._batch.behaviour_logp[entries].to(now))
        term = algorithm.sequence_term(log_ratio, advantage)
        _, index, counts = torch.unique(trajectory, return_inverse=True, return_counts=True)
        means = torch.zeros(len(counts), dtype=torch.float64).index_add(0, index, term) / counts
        self._sequence = torch.full((len(self._batch),), torch.nan, dtype=torch.float64)
        self._sequence[entries] = means[index]

    def __call__(self, entries: Tensor, scores: Scores) -> PerToken:
        """The loss of `entries` [n]."""
        algorithm, kl, logp = self._learning.algorithm, self._learning.kl, scores.logp
        now = logp.detach()
        behaviour = self._batch.behaviour_logp[entries].to(now)
        old = self._old_logp(entries, now, behaviour)
        if self._first and self._old is OldPolicy.trainer and len(entries):
            self._apart.append((now - old).square().mean().sqrt().item())
        sequence = None if self._sequence is None else self._sequence[entries].to(logp)
        tokens = Tokens(logp, old, self._advantage[entries].to(logp), sequence)
        result = algorithm.loss(tokens)
        metrics = dict(result.metrics)
        clamped = is_clamped(tokens.log_ratio if sequence is None else sequence)
        factor = self._factor(entries, old, behaviour, metrics)
        loss = result.loss * factor
        ref_logp = self._ref_logp[entries].to(logp) if self._kl_coef and kl.place is Place.loss else None

        def penalty(logp: Tensor, of: Tensor | slice) -> Tensor | float:
            """What the distance to the reference adds to the loss `of` some of the entries."""
            return 0.0 if ref_logp is None else self._kl_coef * kl.penalty(logp, behaviour[of], ref_logp[of])

        if self._first and self.witness is not None:
            scale = self._policy.optimizer.scale
            self.witness.watch(entries, tokens, algorithm, penalty, factor, result.clipped, scale)
        if ref_logp is not None:
            loss = loss + penalty(logp, slice(None))
            clamped |= kl.clamped(now, behaviour, ref_logp)
        if algorithm.entropy_coef:
            loss = loss - algorithm.entropy_coef * scores.entropy
        if self._target is not None:
            value_loss = self._value_loss(self._target[entries], entries, scores)
            loss = loss + value_loss
            metrics["value_loss"] = value_loss.detach() * self._share.to(value_loss)
        if not self._first:
            ratio = ratio_of(tokens.log_ratio.detach())
            metrics |= {"ratio": ratio, "squared_ratio": ratio.square()}
        if clamped.any():
            metrics["log_ratio_clamped"] = clamped
        scored = (now, scores.entropy.detach(), factor, result.clipped, clamped)[: len(self._scored)]
        self._scored[:, entries] = torch.stack([values.double() for values in scored]).cpu()
        return PerToken(loss, result.clipped, metrics)

    def end_passes(self) -> None:
        """An update has its losses and gradient. Raises RunError where log-probabilities are not those of before."""
        parallel = self._policy.parallel
        scored, noted = parallel.total(self._scored[:, self._update]), self._noted[1:, self._update]
        first = self._first_logp[self._update]
        self._first_logp[self._update] = torch.where(first.isnan(), scored[0], first)
        noted[0] = scored[0]  # the last log-probability,
        noted[1:3] = torch.where(noted[1:3].isnan(), scored[1:3], noted[1:3])  # the first entropy and factor,
        noted[3:] = torch.fmax(noted[3:], scored[3:])  # and whether a token was ever cut
        self._noted[1:, self._update] = noted
        if self._first:
            self._policy.judge(parallel.largest(torch.tensor(self._apart).max().item()), NOT_REPRODUCIBLE)
        if self.witness is not None and self._first:
            self.witness.seen = round(parallel.add_up({"seen": float(self.witness.seen)})["seen"])

    def _old_logp(self, entries: Tensor, now: Tensor, behaviour: Tensor) -> Tensor:
        """What the ratio compares with; all [n]. now: the log-probabilities of this update, detached."""
        if self._old is OldPolicy.engine:
            return behaviour
        if self._old is OldPolicy.interpolated:
            return interpolate(behaviour, now, self._batch.version[entries].to(now.device), self._version)
        if self._before is None or len(self._steps) == 1:  # a single update is its own old policy
            return now
        return self._before.logp[entries].to(now)

    def _factor(self, entries: Tensor, old: Tensor, behaviour: Tensor, metrics: dict[str, Tensor]) -> Tensor:
        """What masks and corrections multiply the loss of `entries` by, [n]; adds its metrics."""
        factor = torch.ones_like(old)
        for part in (self._kept, self._weight):
            factor = factor if part is None else factor * part[entries].to(old)
        correction = self._learning.correction
        if self._old is OldPolicy.interpolated and correction.active:
            trajectory = self._batch.trajectory[entries].to(old.device)
            metrics["correction/weight"] = correction.weights(old, behaviour, trajectory)
            factor = factor * metrics["correction/weight"]
        return factor

    def _value_loss(self, target: Tensor, entries: Tensor, scores: Scores) -> Tensor:
        """Of each token [n]: 0 where its state has no target; its weighted sum is the mean over the states."""
        before = self._before
        assert scores.value is not None and before is not None and before.value is not None
        target, old = target.to(scores.value), before.value[entries].to(scores.value)
        loss = self._learning.algorithm.value_loss(scores.value, old, target.nan_to_num(0.0))
        return torch.where(target.isnan(), 0.0, loss * self._state_weight[entries].to(loss)).to(scores.logp)

    def record(self) -> dict[str, Tensor]:
        """What each token was paid, counted and scored, by name; [tokens] fp64, NaN where it is not known.

        `last` is the log-probability of its last update, `before` that of the policy before the first, or of the
        token's first one where that was not computed.
        """
        noted = dict(zip(_NOTED, self._noted, strict=True))
        noted |= {"advantage": self._advantage, "before": self._first_logp, "reference": self._ref_logp}
        noted["weight"] = noted["weight"] * noted["factor"]
        if self._before is not None:
            noted["before"] = torch.where(self._before.logp.isnan(), self._first_logp, self._before.logp)
            noted["entropy"] = torch.where(self._before.entropy.isnan(), noted["entropy"], self._before.entropy)
            if self._before.value is not None:
                noted["value"] = self._before.value
        return noted

    def describe(self) -> Metrics:
        """What the batch was like: distances to the engine and the reference, the correction, the critic."""
        entries, before, batch = self.entries, self._before, self._batch
        if len(entries) == 0:
            return {}
        logp = self._first_logp if before is None else before.logp
        log_rho = logp - batch.behaviour_logp  # where nothing was scored before, some tokens are by an updated policy
        metrics = diagnostics(log_rho[entries])
        advantage = self._advantage[entries]
        spread = {"mean": advantage.mean(), "std": advantage.std(correction=0)}
        spread |= {"min": advantage.min(), "max": advantage.max()}
        metrics |= {f"advantage/{name}": value.item() for name, value in spread.items()}
        if self._reference is not None:
            # By k1, whatever the penalty is: rare tokens make the mean of k3 several times too large in single batches.
            metrics["kl"] = estimate(Estimator.k1, logp[entries], self._ref_logp[entries]).mean().item()
            metrics["kl_coef"] = self._kl_coef
        if self._weight is not None:
            weight = self._weight[entries]
            metrics["correction/rejected"] = (weight == 0).double().mean().item()
            metrics["correction/weight"] = weight.mean().item()
        if self._target is not None and before is not None and before.value is not None:
            states = entries[self._target[entries].isfinite()]
            target, error = self._target[states], (self._target - before.value)[states]
            if len(states) > 1 and target.var() > 0:
                metrics["explained_variance"] = 1 - (error.var() / target.var()).item()
        if len(self._steps) == 1 or before is not None:  # else some tokens were scored only after an update
            fresh = entries[batch.version[entries] == self._version]
            if len(fresh):
                metrics[WORST_MISMATCH] = worst_trajectory(log_rho[fresh], batch.trajectory[fresh])
        return metrics


def apply_control(control: Control, advantage: Tensor, trajectory: Tensor, seed: int) -> Tensor:
    """What a control experiment trains on, from which nothing can be learned; all [tokens], by trajectory.

    shuffled: each trajectory gets the advantages of another, stretched over its own tokens.
    """
    if control is Control.normal:
        return advantage
    if control is Control.flipped:
        return -advantage
    _, index, counts = torch.unique_consecutive(trajectory, return_inverse=True, return_counts=True)
    starts = counts.cumsum(0) - counts
    generator = torch.Generator().manual_seed(seed + 2**40)  # another order than the mini-batches'
    other = torch.randperm(len(counts), generator=generator)[index]
    within = torch.arange(len(trajectory)) - starts[index]
    return advantage[starts[other] + within * counts[other] // counts[index]]


def _of_contexts(batch: Batch, entropy: Tensor, entries: Tensor) -> Tensor:
    """`entropy` [tokens], the same for all of `entries` that were sampled in one context.

    Where siblings are computed in several mini-batches, rounding gives each of them another one.
    """
    context = batch.forest.parent[batch.node]
    if batch.kept is not None:
        context = context * batch.kept.sets + batch.kept.number
    _, index = context.unique(return_inverse=True)
    largest = entropy.new_full((len(batch),), -torch.inf).scatter_reduce(0, index[entries], entropy[entries], "amax")
    return torch.where(entropy.isnan(), torch.nan, largest[index])
