"""Try a finished policy by hand: talk to it and its tools in the terminal, or serve it to agents."""

import asyncio
import copy
import itertools
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from mtgrpo.agents.none import NoAgent
from mtgrpo.config.experiment import Experiment
from mtgrpo.endpoint.server import open_endpoint
from mtgrpo.endpoint.session import AgentSession
from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.environments.single_turn import SingleTurn
from mtgrpo.parts.extension import explained
from mtgrpo.rollout.conversation import run_rollout
from mtgrpo.runtime.isolation import run_in_thread
from mtgrpo.runtime.text import printable, show
from mtgrpo.stages.run import open_run
from mtgrpo.types import UNLIMITED, Limits, Message, Status, Task


@dataclass
class _Keyboard:
    """What the person types, until they leave: with Ctrl-D, the end of the input."""

    left: bool = False

    async def ask(self, as_whom: str = "you") -> str:
        """The next line; "" from where they have left."""
        try:
            return "" if self.left else (await run_in_thread(lambda: input(f"{as_whom}: "))).strip()
        except EOFError:
            print()
            self.left = True
            return ""


@dataclass
class _Person(Environment):
    """Shows what the model and `world` say; where the conversation would end, the person goes on, or ends it."""

    world: Environment = field(default_factory=SingleTurn)
    keyboard: _Keyboard = field(default_factory=_Keyboard)
    answers: bool = False  # the person, in the place of an agent, which did

    async def start(self, task: Task) -> Opening:
        self.world = copy.copy(self.world)  # of this conversation
        return await self.world.start(task)

    async def stop(self) -> None:
        await self.world.stop()

    async def step(self, message: Message) -> Reply:
        calls = [f"-> {call.name}({json.dumps(call.arguments, ensure_ascii=False)})" for call in message.tool_calls]
        _show("model", "\n".join(filter(None, [message.reasoning, message.content, *calls])))
        if self.answers and calls:
            told = [Message("tool", await self.keyboard.ask(one.name), name=one.name) for one in message.tool_calls]
            return Reply(tuple(told), done=self.keyboard.left)
        reply = await self.world.step(message)
        for answer in reply.messages:
            _show(answer.name or answer.role, answer.content)
        if not reply.done:
            return reply
        said = await self.keyboard.ask()
        return Reply((*reply.messages, Message("user", said)), done=not said)


async def run_playing(experiment: Experiment, folder: Path) -> None:
    """Talk to the model as it is; an empty line takes a problem of the held-out tasks."""
    async with open_run(_by_hand(experiment), folder, trains=False) as run:
        runner = run.runner.at("play")
        world = runner.environment
        if experiment.agent.active:
            run.sinks.note("you answer its calls, in the place of the agent; `mtgrpo serve` serves it to the agent")
        run.sinks.note("your words, then Enter; an empty line takes an example, or ends a conversation; Ctrl-D leaves")
        examples, example, keyboard = itertools.cycle(run.held_out), run.held_out[0], _Keyboard()
        if example.metadata:
            row = json.dumps(dict(example.metadata), ensure_ascii=False, default=str)
            run.sinks.note(
                f"tools see the row of the last example with your words, at first of {example.id}: {row:.200}"
            )
        for number in itertools.count():
            said = await keyboard.ask()
            if keyboard.left:
                return
            if said:
                words = run.experiment.task.with_prompt((Message("user", said),))
                task = replace(example, id=f"play/{number}", messages=words)
            else:
                task = example = next(examples)
                _show("example", task.messages[-1].content)
            person = _Person(max_turns=UNLIMITED, max_tool_tokens=world.max_tool_tokens, world=world, keyboard=keyboard)
            person.answers = experiment.agent.active
            async with runner.open_conversation("play", task.id, number) as sample:
                limits = Limits(runner.limits.context_tokens)
                shared = (sample, runner.sampling, limits, runner.condenser, runner.attend)
                try:
                    ended = await run_rollout(task, person, run.chat, *shared)
                except Exception as error:  # of somebody's tool or environment
                    run.sinks.note(f"this conversation failed: {explained(error)}")
                    continue
            if ended.status is Status.TRUNCATED:
                _show("model", ended.turns[-1].message.content if ended.turns else "")
                run.sinks.note(f"cut by {ended.reason}")


def _show(who: str, text: str) -> None:
    print(f"{who}: {printable(text)}")


async def run_serving(experiment: Experiment, folder: Path) -> None:
    """Serve the model as it is until Ctrl-C; says where, and with which key."""
    async with open_run(_by_hand(experiment), folder, trains=False) as run, open_endpoint() as endpoint:
        runner = run.runner.at("serve")
        session = AgentSession(
            Task("serve", ()),
            run.chat,
            runner.sampling,
            Limits(runner.limits.context_tokens),
            lambda number: runner.open_conversation(f"serve/chain{number}", "serve", 0),
        )
        async with endpoint.conversation(session) as address:
            show("serving until Ctrl-C:")  # no notes, which the run's folder keeps, for there is a key in them
            for variable, value in address.environ().items():
                show(f"export {variable}={value}")
            await asyncio.Event().wait()


def _by_hand(experiment: Experiment) -> Experiment:
    """The settings under which somebody tries a policy."""
    return replace(
        experiment,
        agent=NoAgent(),
        watchdog_s=0.0,  # silence is no fault
        trainer=replace(experiment.trainer, deterministic=False),  # it would wait for who says nothing
    )
