"""The endpoint: what somebody received is trained once, as it was sampled; whatever is sent, the run goes on."""

from __future__ import annotations

import asyncio
import json
import random
import threading
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
from mtgrpo.endpoint import Address, RefusedError, Reply, Request, Said, server
from mtgrpo.endpoint.server import Endpoint, open_endpoint
from mtgrpo.endpoint.session import USED_UP, Budget, Session
from mtgrpo.engines import Key
from mtgrpo.engines.local import Local
from mtgrpo.model.load import DType
from mtgrpo.part import RunContext
from mtgrpo.policy.updater import PolicyUpdater, UpdateConfig
from mtgrpo.rewards import Score, scores
from mtgrpo.rewards.judge import Judge
from mtgrpo.types import Completion, Group, Message, Sample, Sampling, Task, ToolSpec, Trajectory
from scripted import ScriptedEngine
from test_conversation import ANSWER, CALL, chat, said
from test_policy import Watched, make_model

for package in ("uvicorn", "openai", "anthropic"):
    pytest.importorskip(package)
TASK = Task("task/1", (Message("user", "What is 17 * 23?"),), answer="391")
WIDE = Budget(context_tokens=4096, sampled_tokens=10**6, requests=10**6)
TOOL = ToolSpec("calculator", "It calculates.", {"type": "object", "properties": {"expression": {"type": "string"}}})


def session(
    engine: Any, budget: Budget = WIDE, name: str = "", sampling: Sampling | None = None, **settings: Any
) -> Session:
    def open_chain(number: int) -> Any:
        return engine.conversation(Key(5, f"train/1{name}/{number}", TASK.id, 0))

    return Session(TASK, chat(), sampling or Sampling(max_new_tokens=200), budget, open_chain, **settings)


def scripted(*texts: str) -> ScriptedEngine:
    """Says the texts one after the other, whoever asks."""
    left = list(texts)
    return ScriptedEngine(lambda key, turn: said(left.pop(0)))


def request(*messages: Any, tools: Sequence[ToolSpec] = (), **more: Any) -> Request:
    """Messages are texts of user and model in turn, or Said."""
    roles = ("user", "assistant")
    found = [one if isinstance(one, Said) else Said(Message(roles[n % 2], one)) for n, one in enumerate(messages)]
    digest = json.dumps([(one.meaning, one.ids, one.message.reasoning) for one in found] + [repr(tools)])
    return Request(tuple(found), tuple(tools), digest, **more)


def everything(trajectory: Trajectory) -> list[bool]:
    return [True] * len(trajectory.turns)


async def asked(of: Session, *messages: Any, delivered: bool = True, **more: Any) -> Reply:
    connection = object()
    try:
        return await of.answer(request(*messages, **more), connection, ("r", "c"))
    finally:
        of.settle(connection, delivered)


def ended(of: Session) -> Trajectory:
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


async def test_a_tool_call_is_known_by_its_id_whatever_was_made_of_it() -> None:
    of = session(scripted(f"Let me see.\n{CALL}", ANSWER))
    reply = await asked(of, "hi", tools=[TOOL])
    (call_id,) = reply.call_ids
    altered = Said(replace(reply.message, content=""), (call_id,))
    answer = Said(Message("tool", "391", name="calculator"))
    await asked(of, "hi", altered, answer, tools=[TOOL])
    await of.close()
    trajectory = ended(of)
    assert [turn.parent for turn in trajectory.turns] == [-1, 0]
    assert trajectory.turns[0].observations == (answer.message,)


async def test_other_tools_another_system_prompt_or_words_for_the_model_begin_a_chain() -> None:
    of = session(scripted(*["yes"] * 6))
    one, two = Said(Message("system", "one")), Said(Message("system", "two"))
    hi, yes, more = Said(Message("user", "hi")), Said(Message("assistant", "yes")), Said(Message("user", "more"))
    await asked(of, one, hi)
    await asked(of, two, hi, yes, more)
    await asked(of, one, hi, yes, more, tools=[TOOL])
    await asked(of, one, hi, yes, more, Said(Message("assistant", "put into its mouth")), more)
    await asked(of, one, hi, yes)  # nothing new
    await of.close()
    assert [turn.parent for turn in ended(of).turns] == [-1] * 5
    assert of.counts["rewritten_system"] == 1


async def test_a_system_prompt_can_be_pinned() -> None:
    of = session(scripted(*["yes"] * 3), pin_system=True)
    head, other = Said(Message("system", "It is nine.")), Said(Message("system", "It is ten."))
    rest = [Said(Message("user", "hi")), Said(Message("assistant", "yes")), Said(Message("user", "more"))]
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
    of = session(scripted(*["yes"] * 9), Budget(context_tokens=100, sampled_tokens=1000, requests=2))
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
    of = session(scripted(*["a b c d e f g h"] * 9), Budget(4096, sampled_tokens=12, requests=99))
    lengths = [(await asked(of, str(n))).output_tokens for n in range(4)]
    assert sum(lengths) == 12
    assert of.limit == "max_trajectory_tokens"
    await of.close()


async def test_requests_at_once_stay_within_what_is_left_together() -> None:
    """Nor does one cut another: it waits until it knows what the others took."""
    budget = Budget(4096, sampled_tokens=12, requests=99)
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

    async def play() -> tuple[Session, list[Reply]]:
        of = session(engine)
        chains: list[list[Any]] = []
        received: dict[str, Reply] = {}
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
    of = session(Local().start(model, False, 1024), sampling=Sampling(max_new_tokens=12))
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
        PolicyUpdater(policy, UpdateConfig(algorithm, WholeTrajectory())).train(batch, rewards, 0, 0)
        (entries, weights_of) = policy.steps[0]
        owner = batch.trajectory[entries]
        found.append([float(weights_of[owner == n].sum()) for n in range(2)])
    assert found[0] == pytest.approx(found[1])


# --- over HTTP


@asynccontextmanager
async def served(engine: Any, **more: Any) -> AsyncGenerator[tuple[Address, Session, httpx.AsyncClient, Endpoint]]:
    of = session(engine, **more)
    async with (
        open_endpoint() as endpoint,
        httpx.AsyncClient(timeout=30) as client,
        endpoint.conversation(of) as address,
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


async def test_tokens_are_counted_exactly_and_rewards_are_taken() -> None:
    async with served(scripted("yes")) as (address, of, client, _):
        headers = {"x-api-key": address.key}
        url = f"{address.url}/v1/messages"
        counted = (await client.post(f"{url}/count_tokens", json=HI, headers=headers)).json()
        reply = (await client.post(url, json=HI, headers=headers)).json()
        assert counted["input_tokens"] == reply["usage"]["input_tokens"] == len(of.trajectory.context(0))
        paid = [{"reward": 0.5}, {"reward": 1}, {"reward": 0.25, "reply": reply["id"]}]
        for body in paid:
            answer = await client.post(f"{address.url}/s/{address.key}/v1/rewards", json=body)  # the key in the path
            assert answer.status_code == 200
        for wrong in ({"reward": "much"}, {"reward": 1, "reply": "msg_9-9"}, {}):
            assert (await client.post(f"{address.url}/v1/rewards", json=wrong, headers=headers)).status_code == 400
        assert (of.trajectory.given, of.trajectory.turns[0].paid) == (1.5, 0.25)


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
