"""The siblings of one task at once: run, retried where the world failed, scored."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from mtgrpo.agents import Agent, Outcome
from mtgrpo.agents.none import NoAgent
from mtgrpo.chat import Chat
from mtgrpo.condensers import Condenser
from mtgrpo.endpoint.session import AgentSession, OpenChain
from mtgrpo.environments import STOP_S, Environment, copied
from mtgrpo.errors import POLICY_ERROR, ConfigError, PolicyError, TaskError
from mtgrpo.parts.extension import TRACEBACK, explained, keep_traceback
from mtgrpo.rewards import Reward, Score, checked, scores, spent_s
from mtgrpo.rollout.conversation import run_rollout
from mtgrpo.runtime.isolation import run_isolated
from mtgrpo.tools.calls import Faults
from mtgrpo.types import Attend, Group, Limits, OpenConversation, Sample, Sampling, Status, Task, Trajectory


@dataclass(frozen=True)
class RolloutRunner:
    """All that is the same for every conversation of a run."""

    environment: Environment
    chat: Chat
    reward: Reward
    sampling: Sampling
    limits: Limits
    condenser: Condenser
    retries: int
    timeout_s: float
    open_conversation: OpenConversation
    attend: Attend | None  # None: the engine cannot tell
    slots: asyncio.Semaphore  # bounds the conversations open at once
    score_timeout_s: float = 0.0  # 0 = none
    faults: Callable[..., AbstractContextManager[None]] = Faults().during  # of the conversation with that key
    agent: Agent = field(default_factory=NoAgent)  # leads the conversations in place of the environment, if active
    folder: Path | None = None  # of the run, where the first failure leaves its traceback
    scope: str = "train/0"  # what the rollouts are for: part of the key of every random number

    def at(self, scope: str, temperature: float | None = None) -> RolloutRunner:
        """The same, for another purpose and perhaps at another temperature."""
        changed = {} if temperature is None else {"temperature": temperature}
        return dataclasses.replace(self, scope=scope, sampling=dataclasses.replace(self.sampling, **changed))

    def again(self, task: Task, played: Counter[str]) -> RolloutRunner:
        """The same, with random numbers of their own for tasks of one id; played: how often each was, by its id."""
        repeated, played[task.id] = played[task.id], played[task.id] + 1
        return self.at(f"{self.scope}/again{repeated}") if repeated else self

    async def run_group(self, task: Task, size: int, extra: int = 0) -> Group:
        """Run siblings of `task` at once and score them; failed ones have status FAILED and no reward.

        Of `size` + `extra` siblings the group has the first `size` that end without failure; the others are given up.
        """
        running = [asyncio.ensure_future(self.run_one(task, sample_index)) for sample_index in range(size + extra)]
        try:
            ended = list(await asyncio.gather(*running)) if not extra else await _first(running, size)
        finally:
            for sibling in running:
                sibling.cancel()
            await asyncio.gather(*running, return_exceptions=True)  # each ends its conversation
        return await self._scored(Group(task, ended))

    async def run_one(self, task: Task, sample_index: int) -> Trajectory:
        """One trajectory, unscored; a failure of the world is retried with a fresh environment, then recorded."""
        queued = time.perf_counter()
        async with self.slots:  # kept for all attempts: who runs when must not depend on when others failed
            began = time.perf_counter()
            trajectory = await self._attempt(task, sample_index, 0)
            failures: list[str] = []
            for attempt in range(1, self.retries + 1):
                if not trajectory.failed:
                    break
                failures.append(trajectory.reason)
                trajectory = await self._attempt(task, sample_index, attempt)
                trajectory.attempts, trajectory.retried = attempt + 1, failures
        trajectory.sample_index, trajectory.queued_s, trajectory.began_s = sample_index, began - queued, began
        return trajectory

    async def _scored(self, group: Group) -> Group:
        """The group, all that did not fail of it scored together; what cannot be scored has failed."""
        seconds: list[float] = []
        spent_s.set(seconds)
        for trajectory in group.valid:
            if trajectory.given is not None:
                set_score(trajectory, Score(trajectory.given, trajectory.components))
        scored = [trajectory for trajectory in group.valid if trajectory.given is None]
        for trajectory, score in zip(scored, await self._scores(scored), strict=True):
            if isinstance(score, Exception):
                trajectory.status = Status.FAILED
                trajectory.reason = f"RewardError: {type(self.reward).__name__}: {self._why(score)}"
            else:
                set_score(trajectory, score)
        group.score_s = sum(seconds)
        return group

    async def _scores(self, valid: Sequence[Trajectory]) -> Sequence[Score | Exception]:
        try:
            async with asyncio.timeout(self.score_timeout_s or None):
                return await scores(self.reward, valid)
        except TaskError as error:
            return [error] * len(valid)
        except TimeoutError:
            return [TimeoutError(f"it took longer than rollout.score_timeout_s={self.score_timeout_s}")] * len(valid)

    async def _attempt(self, task: Task, sample_index: int, attempt: int) -> Trajectory:
        """One trajectory, whatever became of it: what a tool or an environment raises is counted and shown as data."""
        late = TimeoutError(f"it took longer than rollout.timeout_s={self.timeout_s}")
        within = functools.partial(run_isolated, timeout_s=self.timeout_s or None, late=late, grace_s=2 * STOP_S)
        scope = f"{self.scope}/attempt{attempt}"

        def open_chain(number: int) -> AbstractAsyncContextManager[Sample]:
            return self.open_conversation(scope + (f"/chain{number}" if number else ""), task.id, sample_index)

        try:
            bounds = self.sampling, self.limits
            if self.agent.active:
                return await within(lambda: _run_agent(task, self.agent, self.chat, open_chain, *bounds))
            async with open_chain(0) as sample:
                world, condensing = self.environment, (self.condenser, self.attend)
                with self.faults(scope, task.id, sample_index):
                    return await within(lambda: run_rollout(task, world, self.chat, sample, *bounds, *condensing))
        except Exception as error:
            if isinstance(error, ConfigError) and not isinstance(error, TaskError):
                raise
            return Trajectory(task, status=Status.FAILED, reason=self._why(error))

    def _why(self, error: Exception) -> str:
        """What to say of a failure; that of the first leaves its traceback."""
        if self.folder is not None and not (self.folder / TRACEBACK).exists():
            keep_traceback(error, self.folder)
        return explained(error)


async def _run_agent(
    task: Task, agent: Agent, chat: Chat, open_chain: OpenChain, sampling: Sampling, limits: Limits
) -> Trajectory:
    """A conversation that a foreign agent leads, in the place of the turn loop; what the policy answered it.

    Reaching a limit makes it TRUNCATED, also where the agent then gives up by an exception, and so does a PolicyError
    of the agent. What it raises otherwise is not caught here, nor what the engine raised: both are no outcome of the
    policy. Raises TimeoutError after `agent.timeout_s`, and RuntimeError where nothing was asked.
    """
    limits = dataclasses.replace(limits, requests=agent.max_requests)
    session = AgentSession(copied(task), chat, sampling, limits, open_chain, agent.pin_system, agent.strict)
    late = TimeoutError(f"the agent took longer than agent.timeout_s={agent.timeout_s}")
    began, cut = time.perf_counter(), ""
    async with agent.endpoint.conversation(session, agent.posts_rewards) as address:
        wanted = f"it must send them to {address.openai_url} (OPENAI_BASE_URL) or {address.url} (ANTHROPIC_BASE_URL)"
        try:
            outcome = await run_isolated(lambda: agent.run(copied(task), address), agent.timeout_s or None, late)
        except ConfigError:
            raise
        except Exception as error:
            if session.failure is not None:
                raise session.failure from error
            cut = session.limit or (POLICY_ERROR if isinstance(error, PolicyError) else "")
            if not session.counts["requests"] and "Connect" in type(error).__name__:  # of any client
                raise RuntimeError(f"{explained(error)}; no request came: {wanted}") from error
            if not cut or error is late:
                raise
            outcome = Outcome()
    if session.failure is not None:
        raise session.failure
    trajectory = session.trajectory
    if not session.counts["requests"]:
        raise RuntimeError(f"the agent ended without a request: {wanted}")
    if outcome.reward is not None:
        trajectory.given = None
        score = checked(Score(outcome.reward, outcome.components), trajectory, agent.run)
        if isinstance(score, Exception):
            raise score
        session.pay(score.total)
        trajectory.components = dict(score.components)
    for reply_id, amount in outcome.turn_rewards.items():
        session.pay(float(amount), reply_id)
    trajectory.output, trajectory.data = outcome.output, outcome.data
    trajectory.tool_s = max(0.0, time.perf_counter() - began - trajectory.sample_s)
    if cut := cut or session.limit:
        trajectory.status, trajectory.reason = Status.TRUNCATED, cut
    return session.finish(agent.trains())


def set_score(trajectory: Trajectory, score: Score) -> None:
    """Write down what a trajectory is worth; to what the reward gives each turn comes what the environment paid."""
    trajectory.reward, trajectory.components, trajectory.paid = score.total, dict(score.components), score.paid
    paid = [turn.paid for turn in trajectory.turns]
    amounts = [float(amount) for amount in score.turns] or [0.0] * len(paid)
    judged = bool(score.turns) or any(paid)
    trajectory.turn_rewards = [amount + more for amount, more in zip(amounts, paid, strict=True)] if judged else []


async def _first(running: Sequence[asyncio.Future[Trajectory]], size: int) -> list[Trajectory]:
    """The first `size` that end without failure; where there are too few, failed ones too."""
    ended: list[Trajectory] = []
    for sibling in asyncio.as_completed(running):
        ended.append(await sibling)
        if sum(not t.failed for t in ended) == size:
            break
    ended.sort(key=lambda trajectory: (trajectory.failed, trajectory.sample_index))
    return ended[:size]
