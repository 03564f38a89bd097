"""The endpoint: what somebody received is trained once, as it was sampled; whatever is sent, the run goes on."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtgrpo.advantages.rewards import rewards_of
from mtgrpo.advantages.trajectory import WholeTrajectory
from mtgrpo.algorithms.average import Average
from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.batch.forest import build_batch
from mtgrpo.endpoint import Address, Entry, RefusedError, TurnReply, TurnRequest, server
from mtgrpo.endpoint.server import Endpoint, open_endpoint
from mtgrpo.endpoint.session import MAX_CHAINS, USED_UP, AgentSession
from mtgrpo.engines import Key
from mtgrpo.engines.local import Local
from mtgrpo.model.load import DType
from mtgrpo.parts import RunContext
from mtgrpo.policy.step import at_once
from mtgrpo.policy.updater import PolicyUpdater, UpdateConfig
from mtgrpo.record.writing import trajectory_row
from mtgrpo.rewards import Score, scores
from mtgrpo.rewards.judge import Judge
from mtgrpo.types import Completion, Group, Limits, Message, Sample, Sampling, Task, ToolSpec, Trajectory
from mtgrpo.weights.source import ModelWeights
from scripted import ScriptedEngine
from test_conversation import ANSWER, CALL, chat, said
from test_policy import Watched, make_model

for package in ("openai", "anthropic"):
    pytest.importorskip(package)
TASK = Task("task/1", (Message("user", "What is 17 * 23?"),), answer="391")
WIDE = Limits(context_tokens=4096)
TOOL = ToolSpec("calculator", "It calculates.", {"type": "object", "properties": {"expression": {"type": "string"}}})


def session(
    engine: Any, budget: Limits = WIDE, name: str = "", sampling: Sampling | None = None, **settings: Any
) -> AgentSession:
    def open_chain(number: int) -> Any:
        return engine.conversation(Key(5, f"train/1{name}/{number}", TASK.id, 0))

    return AgentSession(TASK, chat(), sampling or Sampling(max_new_tokens=200), budget, open_chain, **settings)


def scripted(*texts: str) -> ScriptedEngine:
    """Says the texts one after the other, whoever asks."""
    left = list(texts)
    return ScriptedEngine(lambda key, turn: said(left.pop(0)))


def request(*messages: Any, tools: Sequence[ToolSpec] = (), **more: Any) -> TurnRequest:
    """Messages are texts of user and model in turn, or Entry."""
    roles = ("user", "assistant")
    found = [one if isinstance(one, Entry) else Entry(Message(roles[n % 2], one)) for n, one in enumerate(messages)]
    digest = json.dumps([(one.meaning, one.ids, one.message.reasoning) for one in found] + [repr(tools)])
    return TurnRequest(tuple(found), tuple(tools), digest, **more)


def everything(trajectory: Trajectory) -> list[bool]:
    return [True] * len(trajectory.turns)


async def asked(of: AgentSession, *messages: Any, delivered: bool = True, **more: Any) -> TurnReply:
    connection = object()
    try:
        return await of.answer(request(*messages, **more), connection, ("r", "c"))
    finally:
        of.settle(connection, delivered)


def ended(of: AgentSession) -> Trajectory:
    return of.finish(everything)


# --- what continues what


async def test_an_exact_continuation_is_that_of_the_recorded_tokens() -> None:
    engine = scripted("  391 \n", "yes", "no", "other")
    of = session(engine)
    await asked(of, "hi")
    await asked(of, "hi", "391", "sure?")  # white space at the ends does not matter
    await asked(of, "hi", "391", "sure?", "yes", "really?")
    await asked(of, "hi", "391!", "sure?")  # rewritten: opened anew, as it was sent
    await of.close()
    trajectory = ended(of)
    assert [turn.parent for turn in trajectory.turns] == [-1, 0, 1, -1]
    assert [trajectory.context(n) for n in range(4)] == [context for _, context in engine.asked]
    assert trajectory.context(1)[: len(trajectory.context(0)) + len(said("  391 \n"))] == [
        *trajectory.context(0),
        *said("  391 \n"),
    ]
    assert (of.counts["exact"], of.counts["chains"], of.counts["drifted"]) == (2, 2, 1)
    shared = [Message("user", "hi"), Message("assistant", "391!"), Message("user", "sure?")]
    assert trajectory.context(3) == chat().open(shared, ())
    assert 0 < of.counts["drifted_tokens"] < len(trajectory.context(3))
    assert [list(turn.opens_with) for turn in trajectory.turns] == [[], [], [], shared]
    assert [turn.get("opens_with") for turn in trajectory_row(trajectory)["turns"]][:3] == [None] * 3
    assert trajectory_row(trajectory)["turns"][3]["opens_with"][1] == {"role": "assistant", "content": "391!"}


async def test_a_tool_call_is_known_by_its_id_whatever_was_made_of_it() -> None:
    of = session(scripted(f"Let me see.\n{CALL}", ANSWER))
    reply = await asked(of, "hi", tools=[TOOL])
    (call_id,) = reply.ids
    altered = Entry(replace(reply.message, content=""), (call_id,))
    answer = Entry(Message("tool", "391", name="calculator"))
    await asked(of, "hi", altered, answer, tools=[TOOL])
    await of.close()
    trajectory = ended(of)
    assert [turn.parent for turn in trajectory.turns] == [-1, 0]
    assert trajectory.turns[0].observations == (answer.message,)


async def test_other_tools_another_system_prompt_or_words_for_the_model_begin_a_chain() -> None:
    of = session(scripted(*["yes"] * 6))
    one, two = Entry(Message("system", "one")), Entry(Message("system", "two"))
    hi, yes, more = (
        Entry(Message("user", "hi")),
        Entry(Message("assistant", "yes")),
        Entry(Message("user", "more")),
    )
    await asked(of, one, hi)
    await asked(of, two, hi, yes, more)
    await asked(of, one, hi, yes, more, tools=[TOOL])
    await asked(of, one, hi, yes, more, Entry(Message("assistant", "put into its mouth")), more)
    await asked(of, one, hi, yes)  # nothing new
    await of.close()
    assert [turn.parent for turn in ended(of).turns] == [-1] * 5
    assert of.counts["rewritten_system"] == 1


async def test_the_record_has_what_the_agent_says_first_and_its_tools() -> None:
    of = session(scripted(CALL, ANSWER, "a title"))
    system, hi = Entry(Message("system", "You compute.")), Entry(Message("user", "hi"))
    reply = await asked(of, system, hi, tools=[TOOL])
    await asked(of, "Name this.", tools=[])
    answer = Entry(Message("tool", "391", name="calculator"))
    await asked(of, system, hi, Entry(reply.message, reply.ids), answer, tools=[TOOL])
    await of.close()
    row = trajectory_row(ended(of))
    assert [message["content"] for message in row["messages"][:2]] == ["You compute.", "hi"]
    assert [tool["function"]["name"] for tool in row["tools"]] == [TOOL.name]


async def test_a_system_prompt_can_be_pinned() -> None:
    of = session(scripted(*["yes"] * 3), pin_system=True)
    head, other = Entry(Message("system", "It is nine.")), Entry(Message("system", "It is ten."))
    rest = [
        Entry(Message("user", "hi")),
        Entry(Message("assistant", "yes")),
        Entry(Message("user", "more")),
    ]
    await asked(of, head, rest[0])
    await asked(of, other, *rest)
    await asked(of, *rest, rest[1], rest[2])  # even where it is gone
    await of.close()
    trajectory = ended(of)
    assert [turn.parent for turn in trajectory.turns] == [-1, 0, 1]
    assert "ten" not in chat().decode(trajectory.context(2))


async def test_a_stop_string_cuts_exactly_and_ends_the_chain() -> None:
    text = "Thought: it is easy. Observation: none #### 391"
    of = session(scripted(text, "no stop here", "x"))
    reply = await asked(of, "hi", stop=("Observation:", "####"))
    assert (reply.finish, reply.stop, reply.message.content) == ("stop_string", "Observation:", "Thought: it is easy. ")
    assert (await asked(of, "ho", stop=("Observation:",))).finish == "stop"
    await asked(of, "hi", "Thought: it is easy.", "go on")
    await of.close()
    trajectory = ended(of)
    cut = trajectory.turns[0]
    assert cut.output == said(text)[: len(cut.output)]
    assert "Observation:" in chat().decode(cut.output)
    assert "Observation:" not in chat().decode(cut.output[:-1])
    assert len(cut.logprobs) == len(cut.versions) == len(cut.output)
    assert trajectory.turns[2].parent == -1


async def test_max_tokens_may_be_lowered_and_never_raised() -> None:
    of = session(scripted("a b c d e f g", "h i j k l m n o p q"), sampling=Sampling(max_new_tokens=6))
    reply = await asked(of, "hi", max_tokens=3)
    assert (reply.finish, reply.output_tokens, of.limit) == ("length", 3, "")
    assert ((await asked(of, "ho", max_tokens=10**6)).output_tokens, of.limit) == (6, "max_new_tokens")
    await of.close()


# --- retries and clients that go


class Slow(ScriptedEngine):
    """Answers when it is let."""

    def __init__(self, *texts: str) -> None:
        left = list(texts)
        super().__init__(lambda key, turn: said(left.pop(0)))
        self.let = asyncio.Event()

    @asynccontextmanager
    async def conversation(self, key: Key) -> AsyncGenerator[Sample]:
        async with super().conversation(key) as sample:

            async def later(tokens: Sequence[int], sampling: Sampling) -> Completion:
                await self.let.wait()
                return await sample(tokens, sampling)

            yield later


async def test_a_retry_is_joined_or_answered_again() -> None:
    engine = Slow("one", "two", "three")
    of = session(engine)
    lost, retry = object(), object()
    first = asyncio.create_task(of.answer(request("hi"), lost))
    await asyncio.sleep(0)
    of.settle(lost, False)  # its client has gone
    second = asyncio.create_task(of.answer(request("hi"), retry))
    await asyncio.sleep(0)
    engine.let.set()
    assert (await first).message == (await second).message
    of.settle(retry, True)
    assert (await asked(of, "hi", retry=1)).message.content == "one"  # the reply was lost on its way
    assert (await asked(of, "hi", retry=0)).message.content == "two"  # it asks for another
    await of.close()
    assert [turn.message.content for turn in ended(of).turns] == ["one", "two"]
    assert of.counts["retries_joined"] == 2


async def test_equal_requests_at_once_are_samples_of_their_own() -> None:
    of = session(scripted("one", "two", "three"))
    replies = await asyncio.gather(*(asked(of, "hi") for _ in range(3)))
    assert sorted(reply.message.content for reply in replies) == ["one", "three", "two"]
    assert len({reply.id for reply in replies}) == 3
    await of.close()


async def test_what_nobody_received_is_shown_and_not_trained() -> None:
    of = session(scripted("lost", "kept", "more"))
    await asked(of, "hi", delivered=False)
    await asked(of, "ho")
    await asked(of, "ho", "kept", "go on")
    await of.close()
    trajectory = ended(of)
    assert [(turn.message.content, turn.parent) for turn in trajectory.turns] == [("kept", -1), ("more", 0)]
    assert [turn.message.content for turn in trajectory.untrained] == ["lost"]
    assert of.counts["discarded"] == 1


async def test_what_is_left_out_is_still_context() -> None:
    of = session(scripted("one", "two", "three"))
    await asked(of, "hi")
    await asked(of, "hi", "one", "b")
    await asked(of, "hi", "one", "b", "two", "c")
    await of.close()
    contexts = [of.trajectory.context(n) for n in range(3)]
    trajectory = of.finish(lambda trajectory: [True, False, True])
    assert [turn.parent for turn in trajectory.turns] == [-1, -1]
    assert [trajectory.context(n) for n in range(2)] == [contexts[0], contexts[2]]


async def test_a_session_that_ends_ends_what_it_samples() -> None:
    of = session(Slow("never"))
    waiting = asyncio.create_task(of.answer(request("hi"), object()))
    await asyncio.sleep(0)
    await of.close()
    with pytest.raises(RefusedError, match="has ended"):
        await waiting
    with pytest.raises(RefusedError, match="has ended"):
        await asked(of, "ho")


# --- limits


async def test_a_full_context_is_refused_and_a_spent_budget_is_told() -> None:
    of = session(scripted(*["yes"] * 9), Limits(context_tokens=100, sampled_tokens=1000, requests=2))
    with pytest.raises(RefusedError, match="tokens > 99 maximum") as refused:
        await asked(of, "word " * 200)
    assert (refused.value.kind, of.limit) == ("overflow", "max_context_length")
    await asked(of, "hi")
    assert of.limit == ""  # it went on
    for _ in range(3):
        assert (await asked(of, "hi")).message.content == USED_UP
    assert (of.limit, len(of.trajectory.turns)) == ("max_requests", 1)
    with pytest.raises(RefusedError) as refused:
        await asked(of, "hi")
    assert refused.value.kind == "closed"
    await of.close()


async def test_sampled_tokens_are_bounded_over_the_conversation() -> None:
    of = session(scripted(*["a b c d e f g h"] * 9), Limits(4096, sampled_tokens=12, requests=99))
    lengths = [(await asked(of, str(n))).output_tokens for n in range(4)]
    assert sum(lengths) == 12
    assert of.limit == "max_trajectory_tokens"
    await of.close()


async def test_requests_at_once_stay_within_what_is_left_together() -> None:
    """Nor does one cut another: it waits until it knows what the others took."""
    budget = Limits(4096, sampled_tokens=12, requests=99)
    of = session(scripted(*["a b c d e f g h"] * 9), budget, sampling=Sampling(max_new_tokens=5))
    replies = await asyncio.gather(*(asked(of, str(n)) for n in range(4)))
    assert [reply.output_tokens for reply in replies] == [5, 5, 2, 0]
    assert (replies[3].message.content, of.limit) == (USED_UP, "max_trajectory_tokens")
    await of.close()
    of = session(scripted("a", "b c d e f g h"), budget, sampling=Sampling(max_new_tokens=10))
    short, long = await asyncio.gather(asked(of, "one"), asked(of, "two"))
    assert long.finish == "stop" and short.output_tokens + long.output_tokens <= 12
    await of.close()


async def test_an_engine_that_fails_is_no_fault_of_the_agent() -> None:
    of = session(ScriptedEngine(lambda key, turn: [][0]))
    with pytest.raises(RefusedError, match="the engine failed: IndexError"):
        await asked(of, "hi")
    assert isinstance(of.failure, IndexError)
    await of.close()


async def test_states_are_compared_by_what_a_turn_answers_in_whatever_order_chains_come() -> None:
    async def recorded(*moves: tuple[str, ...]) -> Trajectory:
        of = session(scripted(*["yes"] * 9))
        for words in moves:
            await asked(of, *words)
        await of.close()
        return ended(of)

    one = await recorded(("a",), ("b",), ("a", "yes", "left"), ("b", "yes", "right"))
    two = await recorded(("b",), ("b", "yes", "right"), ("a",), ("a", "yes", "up"))
    token = torch.zeros(0, dtype=torch.long)
    anchor = rewards_of([Group(TASK, [one, two])], GRPO(), token, token).anchor.tolist()
    a, b, left, right = anchor[:4]
    assert anchor[4:7] == [b, right, a]
    assert len({a, b, left, right, anchor[7]}) == 5


# --- any interleaving


MOVES = st.tuples(st.integers(0, 5), st.integers(0, 99), st.booleans())


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99), st.booleans()), min_size=1, max_size=25), st.booleans()
)
def test_every_received_turn_is_trained_once_in_the_context_it_was_sampled_in(
    moves: list[tuple[int, int, bool]], at_once: bool
) -> None:
    """New chains, continuations, compactions, retries, equal requests and clients that go, in any order."""
    rng = random.Random(0)
    engine = ScriptedEngine(lambda key, turn: said(f"reply {rng.random()}"))

    async def play() -> tuple[AgentSession, list[TurnReply]]:
        of = session(engine)
        chains: list[list[Any]] = []
        received: dict[str, TurnReply] = {}
        sent: list[tuple[Any, ...]] = []

        async def move(kind: int, number: int, delivered: bool) -> None:
            chain: list[Any] = list(chains[number % len(chains)]) if chains else []
            if kind == 1 and chain:  # compaction
                chain = [f"so far: {chain[0]}", *chain[-2:]]
            elif kind > 1 and chain:
                chain = [*chain, f"go on {number}"] if kind > 3 else list(sent[number % len(sent)])
            else:
                chain = [f"hello {number}"]
            if len(chain) % 2 == 0:
                chain.append("?")
            sent.append(tuple(chain))
            reply = await asked(of, *chain, delivered=delivered, retry=int(kind == 2))
            if delivered:
                received[reply.id] = reply
                chains.append([*chain, reply.message.content])

        if at_once:
            half = len(moves) // 2
            for part in (moves[:half], moves[half:]):
                await asyncio.gather(*(move(*one) for one in part))
        else:
            for one in moves:
                await move(*one)
        await of.close()
        return of, list(received.values())

    of, received = asyncio.run(play())
    contexts = {tuple(turn.output): of.trajectory.context(n) for n, turn in enumerate(of.trajectory.turns)}
    assert sorted(map(tuple, contexts.values())) == sorted(tuple(context) for _, context in engine.asked)
    trajectory = ended(of)
    texts = [turn.message.content for turn in trajectory.turns]
    assert sorted(texts) == sorted(reply.message.content for reply in received)  # each has a text of its own
    for number, turn in enumerate(trajectory.turns):
        assert trajectory.context(number) == contexts[tuple(turn.output)]
        assert -1 <= turn.parent < number
    batch = build_batch([trajectory])
    assert batch.token.tolist() == [token for turn in trajectory.turns for token in turn.output]


async def test_the_trainer_gives_what_was_recorded_whatever_the_agent_does() -> None:
    """Chains that take turns, drift, helpers: the model's own forward pass over each context gives the same."""
    model = make_model(DType.float64)
    of = session(Local().start(ModelWeights(model), False, 1024), sampling=Sampling(max_new_tokens=12))
    first = await asked(of, "What is 17 * 23?")
    helper, second = await asyncio.gather(asked(of, "A title?"), asked(of, "What is 17 * 23?", "nothing", "Again!"))
    await asked(of, "A title?", helper.message.content, "Shorter!")
    await asked(of, "What is 17 * 23?", first.message.content, "Are you sure?")
    await asked(of, "What is 17 * 23?", "nothing", "Again!", second.message.content, "And again!")
    await of.close()
    trajectory = ended(of)
    assert len(trajectory.turns) == 6
    for number, turn in enumerate(trajectory.turns):
        context = trajectory.context(number)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([context + turn.output])).logits[0, len(context) - 1 : -1]
        expected = logits.log_softmax(-1)[range(len(turn.output)), turn.output]
        assert turn.logprobs == pytest.approx(expected.tolist(), abs=1e-9)


@pytest.mark.parametrize("average", [Average.trajectory_mean, Average.token_mean, Average.prompt_mean])
async def test_a_trajectory_weighs_the_same_however_many_chains_it_has(average: Average) -> None:
    outputs = [f"#### {n}" for n in range(5)]

    async def of_chains(apart: bool) -> Trajectory:
        of, history = session(scripted(*outputs)), []
        for number in range(5):
            history.append(f"question {number}")
            reply = await asked(of, *([history[-1]] if apart else history))
            history.append(reply.message.content)
        await of.close()
        return ended(of)

    one, five, other = await of_chains(False), await of_chains(True), await of_chains(False)
    assert (one.segments, five.segments) == (1, 5)
    one.reward = five.reward = 1.0
    found: list[list[float]] = []
    for trajectory in (one, five):
        policy = Watched(make_model())
        batch = build_batch([trajectory, other])
        algorithm = GRPO(average=average)
        rewards = rewards_of([Group(TASK, [trajectory, other])], algorithm, batch.trajectory, batch.turn)
        at_once(PolicyUpdater(policy, UpdateConfig(algorithm, WholeTrajectory())).training(batch, rewards, 0, 0))
        (entries, weights_of) = policy.steps[0]
        owner = batch.trajectory[entries]
        found.append([float(weights_of[owner == n].sum()) for n in range(2)])
    assert found[0] == pytest.approx(found[1])


# --- over HTTP


@asynccontextmanager
async def served(
    engine: Any, posts_rewards: bool = False, **more: Any
) -> AsyncGenerator[tuple[Address, AgentSession, httpx.AsyncClient, Endpoint]]:
    of = session(engine, **more)
    async with (
        open_endpoint() as endpoint,
        httpx.AsyncClient(timeout=30) as client,
        endpoint.conversation(of, posts_rewards) as address,
    ):
        yield address, of, client, endpoint


HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
ROUTES = {
    "/chat/completions": HI,
    "/messages": HI,
    "/responses": {"input": "hi"},
}
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]


def code(answer: httpx.Response) -> Any:
    """The dialect's own word for what is wrong."""
    error = answer.json()["error"]
    assert error["message"]
    return error.get("code") or error["type"]


async def test_it_may_be_the_judge_of_a_reward(tmp_path: Path) -> None:
    async with served(scripted("Good.\nScore: 8")) as (address, *_):
        judge = Judge(url=address.openai_url, model="any", key="KEY", cache=str(tmp_path))
        async with judge.open(RunContext(tmp_path, print, {"KEY": address.key})) as running:
            assert await scores(running, [Trajectory(TASK)]) == [Score(0.8, {"cached": 0.0})]


async def test_what_is_wrong_is_told_in_the_words_of_the_dialect() -> None:
    async with served(scripted(*["yes"] * 9)) as (address, _, client, endpoint):

        async def post(path: str, body: Any, key: str = address.key) -> httpx.Response:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"authorization": f"Bearer {key}"}
            return await client.post(f"{address.openai_url}{path}", content=content, headers=headers)

        for path, good in ROUTES.items():
            ours = path == "/messages"
            invalid = "invalid_request_error"
            for body, status, word in [
                (b"{", 400, invalid),
                (b"[]", 400, invalid),
                ({}, 400, invalid),
                (good | {"n": 2}, 400, invalid),
                (good | {"messages": IMAGE, "input": IMAGE}, 400, invalid),
                (good | {"messages": [{"role": "king"}], "input": [{"role": "king"}]}, 400, invalid),
                (good | {"tools": [{"type": "web_search_20260101"}]}, 400, invalid),
                (good | {"max_tokens": 0, "max_output_tokens": 0}, 400, invalid),
                (b" " * 10_000_000, 413, "request_too_large"),
            ]:
                answer = await post(path, body)
                assert (answer.status_code, code(answer)) == (status, word), (path, str(body)[:80])
                assert answer.headers["x-should-retry"] == "false"
            answer = await post(path, good, key="sk-1-0")
            assert (answer.status_code, code(answer)) == (401, "authentication_error" if ours else "invalid_api_key")
            long = [{"role": "user", "content": "word " * 9000}]
            answer = await post(path, good | {"messages": long, "input": long})
            assert answer.status_code == 400
            if ours:
                assert "prompt is too long: 1" in answer.json()["error"]["message"]
            else:
                assert code(answer) == "context_length_exceeded"
            assert (await post(path, good)).status_code == 200  # and it goes on
            async with endpoint.conversation(session(scripted())) as other:
                pass
            answer = await post(path, good, key=other.key)
            assert (answer.status_code, code(answer)) == (
                409,
                "invalid_request_error" if ours else "conversation_closed",
            )
        assert (await post("/nothing", {})).status_code == 404
        assert (await client.get(f"{address.url}/health")).json() == {"status": "ok"}
        assert (await client.get(f"{address.openai_url}/models")).json()["data"][0]["id"] == "policy"


async def test_a_conversation_whose_end_is_cancelled_leaves_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = asyncio.Event()

    async def close() -> None:
        ending.set()
        await asyncio.sleep(60)

    async with served(scripted("yes")) as (*_, endpoint):
        other, there = session(scripted()), len(endpoint._sessions)
        monkeypatch.setattr(other, "close", close)

        async def ends() -> None:
            async with endpoint.conversation(other):
                pass

        task = asyncio.create_task(ends())
        await ending.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and len(endpoint._sessions) == there


async def test_tokens_are_counted_exactly() -> None:
    async with served(scripted("yes")) as (address, of, client, _):
        headers = {"x-api-key": address.key}
        url = f"{address.url}/v1/messages"
        counted = (await client.post(f"{url}/count_tokens", json=HI, headers=headers)).json()
        reply = (await client.post(url, json=HI, headers=headers)).json()
        assert counted["input_tokens"] == reply["usage"]["input_tokens"] == len(of.trajectory.context(0))


async def test_rewards_are_posted_with_a_key_that_the_policy_has_not() -> None:
    async with served(scripted("yes"), posts_rewards=True) as (address, of, client, endpoint):
        url = f"{address.url}/v1"
        assert address.environ()["MTGRPO_REWARDS_KEY"] == address.rewards_key
        reply = (await client.post(f"{url}/messages", json=HI, headers={"x-api-key": address.key})).json()
        for body in [{"reward": 0.5}, {"reward": 1}, {"reward": 0.25, "reply": reply["id"]}]:
            answer = await client.post(f"{address.url}/s/{address.rewards_key}/v1/rewards", json=body)  # in the path
            assert answer.status_code == 200
            stolen = await client.post(f"{url}/rewards", json=body, headers={"x-api-key": address.key})
            assert (stolen.status_code, "agent.posts_rewards=true" in stolen.text) == (401, True)
        sampled = await client.post(f"{url}/messages", json=HI, headers={"x-api-key": address.rewards_key})
        assert sampled.status_code == 401
        assert (of.trajectory.given, of.trajectory.turns[0].paid) == (1.5, 0.25)
        async with endpoint.conversation(session(scripted())) as other:
            key = other.key.replace("sk-", "rk-", 1)
            answer = await client.post(f"{url}/rewards", json={"reward": 1}, headers={"x-api-key": key})
            assert (other.rewards_key, "MTGRPO_REWARDS_KEY" in other.environ(), answer.status_code) == ("", False, 401)


@pytest.mark.parametrize(
    "amount",
    [
        f"1{'0' * 400}",
        "9" * 5000,
        "1e999",
        "-1e999",
        "NaN",
        "Infinity",
        "true",
        "null",
        '"1"',
        "[1]",
        "1e6",
        "-1000001",
    ],
    ids=lambda amount: amount[:12],
)
async def test_rewards_that_are_no_bounded_number_are_refused(amount: str) -> None:
    async with served(scripted("yes"), posts_rewards=True) as (address, of, client, _):
        headers = {"x-api-key": address.rewards_key}
        await client.post(f"{address.url}/v1/messages", json=HI, headers={"x-api-key": address.key})
        of.pay(1.0)
        for reply in ("", ', "reply": "msg_1-0"', ', "reply": "msg_9-9"'):
            of.trajectory.turns[0].paid = 1.0
            content = f'{{"reward": {amount}{reply}}}'
            answer = await client.post(f"{address.url}/v1/rewards", content=content, headers=headers)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert (of.trajectory.given, of.trajectory.turns[0].paid) == (1.0, 1.0)


DEEP = '{"a":' * 500 + "1" + "}" * 500


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": True, "max_output_tokens": True},
        {"max_tokens": 1.5, "max_output_tokens": 1.5},
        {"n": True},
        {"tools": json.loads(f"[{DEEP}]")},
        {"temperature": float("nan")},
        {"temperature": float("-inf")},
        {
            "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]}],
            "input": [{"type": "function_call", "name": "f", "arguments": DEEP}],
        },
        {
            "messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": NaN}'}}]}],
            "input": [{"type": "function_call", "name": "f", "arguments": '{"a": NaN}'}],
        },
    ],
    ids=lambda more: next(iter(more)),
)
async def test_what_is_no_number_and_what_is_nested_too_deep_is_refused(more: dict[str, Any]) -> None:
    async with served(scripted("yes")) as (address, _, client, _):
        for path in ("/chat/completions", "/responses"):
            headers = {"authorization": f"Bearer {address.key}"}
            body = json.dumps(ROUTES[path] | more)
            answer = await client.post(f"{address.openai_url}{path}", content=body, headers=headers)
            assert (answer.status_code, code(answer)) == (400, "invalid_request_error"), path
        answer = await client.post(f"{address.openai_url}/responses", json=ROUTES["/responses"], headers=headers)
        assert answer.status_code == 200


async def test_keys_and_headers_of_any_length_are_answered() -> None:
    async with served(scripted("yes", "yes")) as (address, _, client, _):
        url = f"{address.openai_url}/chat/completions"
        for key in (f"sk-{'9' * 5000}-0", "sk-\xb2-0", "sk--", "---", "\xff"):
            answer = await client.post(url, json=HI, headers={"x-api-key": key.encode("latin-1")})
            assert (answer.status_code, code(answer)) == (401, "invalid_api_key")
        headers = {"x-api-key": address.key, "x-stainless-retry-count": "9" * 5000}
        assert (await client.post(url, json=HI, headers=headers)).status_code == 200
        options = HI | {"stream": True, "stream_options": [1]}
        assert "[DONE]" in (await client.post(url, json=options, headers={"x-api-key": address.key})).text


async def test_what_the_policy_says_is_sent_as_json_that_every_client_reads() -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    strange = '<tool_call>\n{"name": "f", "arguments": {"x": NaN, "y": -Infinity}}\n</tool_call>'
    for path, body in ROUTES.items():
        async with served(scripted(strange, strange)) as (address, _, client, _):
            url, headers = f"{address.openai_url}{path}", {"authorization": f"Bearer {address.key}"}
            for stream in (False, True):
                answer = await client.post(url, json=body | {"stream": stream}, headers=headers)
                lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
                for line in lines if stream else [answer.text]:
                    json.loads(line, parse_constant=refuse)


@pytest.mark.parametrize("turns", [1, 5])
async def test_what_a_request_costs_does_not_grow_with_the_turns_that_are_recorded(turns: int) -> None:
    """Counted are the lines and calls of this package while a request that is as long as the other is answered."""
    of, work = session(ScriptedEngine(lambda key, turn: said("yes"))), Counter[int]()

    def count(frame: Any, event: str, argument: Any) -> Any:
        work[number] += "mtgrpo" in frame.f_code.co_filename
        return count

    messages: list[str] = []
    for number in range(505):  # conversations of so many turns, one after the other
        messages = [*messages, "yes", f"and {number}?"] if number % turns else [f"question {number}"]
        sys.settrace(count if number in (204, 504) else None)
        try:
            await asked(of, *messages)
        finally:
            sys.settrace(None)
    assert len(messages) == 2 * turns - 1
    assert of.counts["exact"] == 505 * (turns - 1) / turns
    assert 0 < work[504] <= 1.02 * work[204]


async def test_no_more_conversations_with_the_engine_are_open_than_are_needed() -> None:
    engine = ScriptedEngine(lambda key, turn: said("yes"))
    of = session(engine)
    for number in range(2 * MAX_CHAINS):
        await asked(of, f"question {number}")
    assert [len({key for key, _ in asked}) for asked in (engine.asked[:MAX_CHAINS], engine.asked)] == [MAX_CHAINS] * 2


async def test_a_content_that_is_no_text_is_named() -> None:
    async with served(scripted("yes")) as (address, _, client, _):
        headers = {"authorization": f"Bearer {address.key}"}
        body = HI | {"messages": [*HI["messages"], {"role": "user", "content": 17}]}
        answer = await client.post(f"{address.openai_url}/chat/completions", json=body, headers=headers)
        said = "the content of messages[1] must be a string or a list of parts, got 17"
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, said)


async def test_fields_without_effect_are_counted_or_refused() -> None:
    body = HI | {"temperature": 0.3, "seed": 4, "tool_choice": "required", "user": "me", "logprobs": None}
    for strict in (False, True):
        async with served(scripted("yes"), strict=strict) as (address, of, client, _):
            headers = {"authorization": f"Bearer {address.key}"}
            answer = await client.post(f"{address.openai_url}/chat/completions", json=body, headers=headers)
            assert answer.status_code == (400 if strict else 200)
            if not strict:
                assert {name: of.counts[name] for name in of.counts if "/" in name} == {
                    "ignored/temperature": 1,
                    "ignored/seed": 1,
                    "ignored/tool_choice": 1,
                }
            else:
                assert "temperature, seed, tool_choice would have no effect" in answer.json()["error"]["message"]


async def test_a_stream_is_kept_alive_and_told_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.05)
    engine = Slow("yes")
    async with served(engine) as (address, _, client, _):
        headers = {"authorization": f"Bearer {address.key}"}
        asyncio.get_running_loop().call_later(0.3, engine.let.set)
        url = f"{address.openai_url}/chat/completions"
        answer = await client.post(url, json=HI | {"stream": True}, headers=headers)
        assert answer.text.startswith(": keep-alive\n\n")
        assert answer.text.endswith("data: [DONE]\n\n")
        engine.let.clear()
        asyncio.get_running_loop().call_later(0.3, engine.let.set)
        answer = await client.post(url, json=HI | {"stream": True}, headers=headers)  # the script has ended
        assert (answer.status_code, "the engine failed: IndexError" in answer.text) == (200, True)
        assert '"type": "server_error"' in answer.text


async def test_a_socket_that_drops_in_mid_stream_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.05)
    engine = Slow("one", "two")
    async with served(engine) as (address, of, client, _):
        headers = {"authorization": f"Bearer {address.key}"}
        url, body = f"{address.openai_url}/chat/completions", HI | {"stream": True}
        async with client.stream("POST", url, json=body, headers=headers) as dropped:
            assert await anext(dropped.aiter_text()) == ": keep-alive\n\n"
        while not of._exchanges[0].lost:  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(0.01)
        engine.let.set()
        answer = await client.post(url, json=body, headers=headers)
        assert '"content": "one"' in answer.text
        async with client.stream("POST", url, json=HI | {"user": "lost"}, headers=headers) as dropped:
            await dropped.aread()
    trajectory = ended(of)
    assert [turn.message.content for turn in trajectory.turns] == ["one", "two"]
    assert of.counts["retries_joined"] == 1


async def test_two_agents_with_one_key_do_not_mix() -> None:
    """They are two chains of one trajectory."""
    engine = ScriptedEngine(lambda key, turn: said(f"{len(engine.asked)}"))
    async with served(engine) as (address, of, client, _):
        headers = {"authorization": f"Bearer {address.key}"}

        async def agent(name: str) -> None:
            messages: list[Any] = [{"role": "user", "content": name}]
            for _ in range(5):
                answer = await client.post(
                    f"{address.openai_url}/chat/completions", json={"messages": messages}, headers=headers
                )
                messages.append(answer.json()["choices"][0]["message"])
                messages.append({"role": "user", "content": f"{name} again"})

        await asyncio.gather(agent("one"), agent("two"))
    trajectory = ended(of)
    assert (len(trajectory.turns), trajectory.segments, of.counts["exact"]) == (10, 2, 8)
    for number in range(10):
        assert ("one" in chat().decode(trajectory.context(number))) != (
            "two" in chat().decode(trajectory.context(number))
        )


async def test_a_thousand_sessions_leave_nothing_behind() -> None:
    before = threading.active_count(), len(asyncio.all_tasks())
    async with open_endpoint() as endpoint:

        async def converse(number: int) -> int:
            of = session(scripted("yes"), name=str(number))
            async with endpoint.conversation(of) as address:
                reader, writer = await asyncio.open_connection("127.0.0.1", int(address.url.rpartition(":")[2]))
                body = json.dumps(HI).encode()
                head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {address.key}\r\n"
                writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
                status = await reader.readline()
                if number % 2:
                    await reader.readuntil(b"}}")
                writer.close()
                assert b"200" in status
            return len(of.finish(everything).turns)

        found: list[int] = []
        for start in range(0, 1000, 100):
            found += await asyncio.gather(*(converse(start + n) for n in range(100)))
        assert found == [1] * 1000
        assert endpoint._sessions == {}  # pyright: ignore[reportPrivateUsage]
    await asyncio.sleep(0.05)
    assert (threading.active_count(), len(asyncio.all_tasks())) == before
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", int(endpoint.url.rpartition(":")[2]))


async def test_examples_of_the_agents_own_are_no_drift() -> None:
    of = session(scripted("a plan", "391", "done"))
    await asked(of, "plan", "an example of mine", "now plan")
    await asked(of, "work", "another example", "now work")  # repeats nothing that was sampled
    await asked(of, "summary of it all: a plan", "a plan", "go on")  # repeats a reply elsewhere
    await of.close()
    ended(of)
    assert (of.counts["chains"], of.counts["drifted"]) == (3, 1)


async def test_a_session_whose_end_nobody_waits_for_closes_its_conversations() -> None:
    closed: list[int] = []
    of = session(scripted("391"))
    opened = of._open_chain

    @asynccontextmanager
    async def chain(number: int) -> AsyncGenerator[Any]:
        async with opened(number) as sample:
            try:
                yield sample
            finally:
                closed.append(number)

    of._open_chain = chain
    await asked(of, "hi")
    of._waiting[object()] = of._exchanges[0]  # somebody is still sent a reply
    closing = asyncio.create_task(of.close())
    await asyncio.sleep(0.02)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert closed == [0]
