"""A conversation that a foreign agent leads, in the place of the turn loop."""

from __future__ import annotations

import dataclasses
import time

from mtgrpo.agents import Agent, Outcome
from mtgrpo.chat import Chat
from mtgrpo.endpoint.session import AgentSession, OpenChain
from mtgrpo.errors import ConfigError
from mtgrpo.runtime.isolation import run_isolated
from mtgrpo.types import Limits, Sampling, Status, Task, Trajectory


async def run_agent(
    task: Task, agent: Agent, chat: Chat, open_chain: OpenChain, sampling: Sampling, limits: Limits
) -> Trajectory:
    """Let `agent` work on `task`, and record what the policy answered it.

    Reaching a limit makes it TRUNCATED, also where the agent then gives up by an exception. What the agent raises
    otherwise is not caught here, nor what the engine raised: both are no outcome of the policy. Raises TimeoutError
    after `agent.timeout_s`, and RuntimeError where nothing was asked.
    """
    limits = dataclasses.replace(limits, requests=agent.max_requests)
    session = AgentSession(task, chat, sampling, limits, open_chain, agent.pin_system, agent.strict)
    late = TimeoutError(f"the agent took longer than agent.timeout_s={agent.timeout_s}")
    began = time.perf_counter()
    async with agent.endpoint.conversation(session, agent.posts_rewards) as address:
        try:
            outcome = await run_isolated(lambda: agent.run(task, address), agent.timeout_s or None, late)
        except ConfigError:
            raise
        except Exception as error:
            if session.failure is not None:
                raise session.failure from error
            if not session.limit or error is late:
                raise
            outcome = Outcome()
    if session.failure is not None:
        raise session.failure
    trajectory = session.trajectory
    if not session.counts["requests"]:
        raise RuntimeError(
            f"the agent ended without a request: it must send them to {address.openai_url} (OPENAI_BASE_URL) or "
            f"{address.url} (ANTHROPIC_BASE_URL)"
        )
    if outcome.reward is not None:
        trajectory.given = None
        session.pay(float(outcome.reward))
        trajectory.components = dict(outcome.components)
    for reply_id, amount in outcome.turn_rewards.items():
        session.pay(float(amount), reply_id)
    trajectory.output, trajectory.data = outcome.output, outcome.data
    trajectory.tool_s = max(0.0, time.perf_counter() - began - trajectory.sample_s)
    if session.limit:
        trajectory.status, trajectory.reason = Status.TRUNCATED, session.limit
    return session.finish(agent.trains())
