"""Games: what environments ask, answer and pay; the same game for the same seed."""

from __future__ import annotations

import asyncio
import copy
import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from busy_threads import busy_threads
from mtgrpo.config.compose import compose, parse
from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.environments.guess_number import GuessNumber
from mtgrpo.environments.user_simulator import UserSimulator
from mtgrpo.errors import ConfigError
from mtgrpo.integrations.gymnasium import Gymnasium
from mtgrpo.integrations.skyrl_gym import SkyRLGym
from mtgrpo.integrations.textarena import TextArena
from mtgrpo.tasks import Split
from mtgrpo.tasks.game import Game
from mtgrpo.tasks.guess_number import GuessNumber as Numbers
from mtgrpo.tasks.rows import Columns, task_from_row
from mtgrpo.types import Message, Task, ToolCall


def started(environment: Environment, task: Task) -> tuple[Environment, Opening]:
    playing = copy.copy(environment)
    return playing, asyncio.run(playing.start(task))


def say(playing: Environment, text: str) -> Reply:
    return asyncio.run(playing.step(Message("assistant", text)))


def played(environment: Environment, task: Task, moves: list[str]) -> list[Any]:
    """Everything that the environment says and pays, up to the end of the game."""
    playing, opening = started(environment, task)
    seen: list[Any] = [opening]
    for move in moves:
        seen.append(say(playing, move))
        if seen[-1].done:
            break
    asyncio.run(playing.stop())
    return seen


def tasks(split: Split = Split.train, count: int = 20, seed: int = 0) -> list[Task]:
    return list(itertools.islice(Game().stream(split, seed), count))


def game(seed: int, **metadata: Any) -> Task:
    return Task(
        f"game/{seed}", (Message("system", "Win."), Message("user", "Play.")), metadata={"seed": seed, **metadata}
    )


# --- guess_number ---


def test_a_number_is_found_by_halving() -> None:
    task = Task("n/1", (Message("user", "Guess my number: 10 to 40"),), metadata={"low": 10, "high": 40, "number": 29})
    playing, opening = started(GuessNumber(), task)
    assert opening.messages == task.messages
    replies = [say(playing, text) for text in ("25", "Is it 33?", "29")]
    assert [reply.messages[0].content for reply in replies[:2]] == ["higher: 26 to 40", "lower: 26 to 32"]
    assert [(reply.done, reply.reward) for reply in replies] == [(False, 0), (False, 0), (True, 1)]


@pytest.mark.parametrize("text", ["", "no idea", "20 or 21", "9" * 5000])
def test_what_is_no_guess_is_said_to_be_none(text: str) -> None:
    playing, _ = started(GuessNumber(), next(iter(Numbers().stream(Split.train, 0))))
    assert say(playing, text).messages[0].content == "error: say one number"


def test_a_guess_outside_narrows_nothing() -> None:
    task = Task("n/1", (Message("user", "?"),), metadata={"low": 10, "high": 40, "number": 29})
    playing, _ = started(GuessNumber(), task)
    assert [say(playing, text).messages[0].content for text in ("3", "99")] == ["higher: 10 to 40", "lower: 10 to 40"]


def test_no_range_is_in_both_splits() -> None:
    ranges = [
        {task.messages[0].content for task in itertools.islice(Numbers().stream(split, 0), 400)} for split in Split
    ]
    assert ranges[0].isdisjoint(ranges[1]) and min(map(len, ranges)) > 50
    with pytest.raises(ConfigError, match="too few"):
        for split in Split:
            next(Numbers(highest=10, min_width=20, max_width=20).stream(split, 0))


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_demonstrations_follow_the_environment(right: float) -> None:
    source, paid = Numbers(right=right), 0.0
    for task in itertools.islice(source.stream(Split.train, 0), 60):
        messages = source.demonstration(task, 3)
        playing, _ = started(GuessNumber(), task)
        for message, following in itertools.zip_longest(messages[::2], messages[1::2]):
            reply = say(playing, message.content)
            paid += reply.reward
            assert reply.done or following is None or reply.messages == (following,)
    assert paid == 60 if right else 0 < paid < 25


def test_a_task_of_another_source_is_refused() -> None:
    for environment in (GuessNumber(), UserSimulator()):
        with pytest.raises(ConfigError, match=r"other/1.*environment="):
            started(environment, Task("other/1", (Message("user", "?"),)))


def test_the_recipe_is_an_experiment() -> None:
    made = compose(parse(["recipe=guess_number_tiny"])).experiment
    assert made.environment == GuessNumber() and made.task == Numbers(highest=19, min_width=20, right=0.18)


# --- seeds ---


def test_games_are_a_function_of_seed_split_and_number() -> None:
    assert tasks() == tasks() != tasks(seed=1)
    seeds = [{task.metadata["seed"] for task in tasks(split, 200)} for split in Split]
    assert seeds[0].isdisjoint(seeds[1])


@pytest.mark.parametrize("environment", ["gymnasium", "textarena"])
def test_a_task_without_a_seed_is_refused(environment: str) -> None:
    pytest.importorskip(environment)
    chosen = Gymnasium() if environment == "gymnasium" else TextArena()
    with pytest.raises(ConfigError, match="use task=game"):
        started(chosen, Task("other/1", (Message("user", "?"),)))


# --- gymnasium ---

MAP = ["SFF", "HFH", "FFG"]


@pytest.fixture
def lake() -> Gymnasium:
    pytest.importorskip("gymnasium")
    return Gymnasium(settings={"is_slippery": False, "desc": MAP})


def test_a_lake_is_seen_as_text_and_crossed(lake: Gymnasium) -> None:
    seen = played(lake, game(1), ["Right.", "I go down", "down", "right"])
    assert seen[0].messages == (Message("system", "Win."), Message("user", "Play.\n\n[S]FF\nHFH\nFFG"))
    assert seen[1].messages[0].content == "  (Right)\nS[F]F\nHFH\nFFG"
    assert [(reply.done, reply.reward) for reply in seen[1:]] == [(False, 0)] * 3 + [(True, 1)]


def test_a_hole_ends_the_game(lake: Gymnasium) -> None:
    assert played(lake, game(1), ["down"])[-1] == Reply(done=True)


def test_what_is_no_action_is_said_to_be_none(lake: Gymnasium) -> None:
    assert played(lake, game(1), ["jump"])[-1] == Reply((Message("user", "error: say one of left, down, right, up"),))


def test_actions_as_calls_of_a_tool(lake: Gymnasium) -> None:
    environment = Gymnasium(settings=lake.settings, tool=True)
    playing, opening = started(environment, game(1))
    assert opening.tools == environment.tool_specs and opening.tools[0].name == "act"
    right = ToolCall("act", {"action": "right"})
    for message in (Message("assistant", "right"), Message("assistant", tool_calls=(right, right))):
        reply = asyncio.run(playing.step(message))
        assert reply.tool_errors == reply.tool_calls and reply.messages[0].content.startswith("error: ")
    reply = asyncio.run(playing.step(Message("assistant", tool_calls=(right,))))
    assert (reply.tool_calls, reply.tool_errors, reply.messages[0].role) == (1, 0, "tool")


def test_the_map_may_be_the_task_s(lake: Gymnasium) -> None:
    seen = played(lake, game(1, settings={"desc": ["SG"]}), ["right"])
    assert seen[0].messages[1].content.endswith("[S]G") and seen[1] == Reply(done=True, reward=1.0)


@pytest.mark.parametrize("name", ["FrozenLake-v1", "CliffWalking-v1", "Taxi-v4", "Blackjack-v1"])
def test_a_toy_text_is_the_same_for_the_same_seed(name: str) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    if name not in gymnasium.registry:
        name = next(one for one in gymnasium.registry if one.startswith(name.partition("-")[0]))
    environment = Gymnasium(game=name)
    moves = random.Random(3).choices(environment._names, k=12)  # pyright: ignore[reportPrivateUsage]
    games = [played(environment, task, moves) for task in tasks() for _ in range(2)]
    assert games[::2] == games[1::2]
    assert name.startswith("Cliff") or len({str(one) for one in games}) > 1  # a cliff is always the same
    assert not any("\x1b" in str(one) for one in games)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"game": "NoSuchGame-v1", "actions": ["a"]}, "NoSuchGame"),
        ({"settings": {"no_such": 1}}, "no_such"),
        ({"actions": ["left", "right"]}, "name each"),
        ({"game": "Pendulum-v1", "actions": ["left"]}, "name each"),
    ],
)
def test_games_that_cannot_be_played_are_refused(settings: dict[str, Any], said: str) -> None:
    pytest.importorskip("gymnasium")
    with pytest.raises(ConfigError, match=said):
        started(Gymnasium(**settings), game(1))


def test_a_game_without_names_for_its_actions_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment\.actions="):
        Gymnasium(game="CartPole-v1")


# --- textarena ---


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some games write files where they are played."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["FrozenLake-v0", "GuessTheNumber-v0", "TowerOfHanoi-v0", "Blackjack-v0"])
def test_a_game_of_textarena_is_the_same_for_the_same_seed_and_leaves_chance_alone(name: str) -> None:
    pytest.importorskip("textarena")
    moves = ["[down]", "[7]", "[A C]", "[Hit]", "[right]"]
    random.seed(5)
    state = random.getstate()
    games = [played(TextArena(game=name), task, moves) for task in tasks(count=6) for _ in range(2)]
    assert random.getstate() == state
    assert games[::2] == games[1::2]
    assert games[0][0].messages[0].content.startswith("Play this game.\n\n")


def test_games_side_by_side_do_not_disturb_one_another() -> None:
    pytest.importorskip("textarena")
    moves = ["[Hit]", "[Stand]", "[Hit]", "[Hit]"]
    alone = [played(TextArena(game="Blackjack-v0"), task, moves) for task in tasks(count=2)]
    pairs = [started(TextArena(game="Blackjack-v0"), task) for task in tasks(count=2)]
    beside: list[list[Any]] = [[opening] for _, opening in pairs]
    for move in moves:
        for (playing, _), seen in zip(pairs, beside, strict=True):
            if not (len(seen) > 1 and seen[-1].done):
                seen.append(say(playing, move))
    assert beside == alone


def test_a_game_of_textarena_pays_at_its_end() -> None:
    pytest.importorskip("textarena")
    found = [played(TextArena(), task, ["[right]", "[down]"] * 4)[-1] for task in tasks(count=30)]
    assert {reply.done for reply in found} == {True, False} or all(reply.done for reply in found)
    assert any(reply.reward == 1 for reply in found) and all(reply.reward == 0 for reply in found if not reply.done)


@pytest.mark.parametrize("name, move", [("GuessTheNumber-v0", f"[{'9' * 5000}]"), ("Countdown-v0", "I do not know")])
def test_a_move_that_is_none_is_answered(name: str, move: str) -> None:
    pytest.importorskip("textarena")
    assert "invalid move" in played(TextArena(game=name), game(3), [move])[-1].messages[0].content


@pytest.mark.parametrize("name", ["NoSuchGame-v0", "TicTacToe-v0"])
def test_unknown_games_and_those_for_two_are_refused(name: str) -> None:
    pytest.importorskip("textarena")
    with pytest.raises(ConfigError, match=name):
        started(TextArena(game=name), game(1))


# --- user_simulator ---

SCRIPT = [
    {"when": ["name"], "say": ["Ann.", "I am Ann."], "reward": 0.5},
    {"when": ["where"], "say": ["Rome."]},
    {"when": ["Ann", "rome"], "done": True, "reward": 1},
]


def test_a_user_answers_by_the_script() -> None:
    task = Task("user/1", (Message("user", "Book a flight."),), metadata={"script": SCRIPT})
    moves = ["Your name?", "Name, please.", "Where to?", "hm", "A flight for Ann to Rome", "?"]
    seen = played(UserSimulator(), task, moves)
    assert seen == played(UserSimulator(), task, moves)
    said = [reply.messages[0].content for reply in seen[1:5]]
    assert {*said[:2]} <= {"Ann.", "I am Ann."} and said[2:] == ["Rome.", UserSimulator.otherwise]
    assert [reply.reward for reply in seen[1:]] == [0.5, 0, 0, 0, 1] and seen[-1] == Reply(done=True, reward=1)


@pytest.mark.parametrize(
    "script",
    [
        None,
        3,
        [{"say": ["x"]}],
        [{"when": "x", "say": ["x"]}],
        [{"when": ["x"]}],
        [{"when": ["x"], "say": [3]}],
        [{"when": ["x"], "say": ["y"], "reward": "z"}],
    ],
)
def test_a_script_that_cannot_be_read_is_refused(script: Any) -> None:
    with pytest.raises(ConfigError, match="user_simulator"):
        started(UserSimulator(), Task("user/1", (Message("user", "?"),), metadata={"script": script}))


# --- skyrl-gym ---


def row(**more: Any) -> Task:
    question = "Tom has 3 apples and buys 4 more. How many?"
    spec = {"method": "rule", "ground_truth": "7"}
    found = {"prompt": [{"role": "user", "content": question}], "reward_spec": spec, "extra_info": {}, **more}
    return task_from_row(found, Columns(), "row 1", "row-1")


def test_an_environment_of_skyrl_plays_a_row_of_its_data() -> None:
    pytest.importorskip("skyrl_gym")
    environment = SkyRLGym(game="gsm8k_multi_turn", max_turns=3)
    seen = played(environment, row(), ["I think 8.\n#### 8", "no idea", "#### 7"])
    assert seen[0].messages == row().messages and row().answer == "7"
    assert seen[1].messages[0].role == "user" and "#### ANSWER" in seen[1].messages[0].content
    assert [(reply.done, round(reply.reward, 6)) for reply in seen[1:]] == [(False, 0.066667), (False, 0), (True, 1)]


def test_the_turns_that_an_environment_of_skyrl_allows_are_ours() -> None:
    pytest.importorskip("skyrl_gym")
    seen = played(SkyRLGym(game="gsm8k_multi_turn", max_turns=2), row(), ["?", "?"])
    assert seen[-1].done


async def test_an_environment_of_skyrl_waits_for_no_thread_of_others() -> None:
    playing = SkyRLGym()
    found, closed = {"observations": [], "done": True, "reward": 1}, list[bool]()
    vars(playing)["_game"] = SimpleNamespace(step=lambda said: found, close=lambda: closed.append(True))
    async with busy_threads():
        assert await playing.step(Message("assistant", "7")) == Reply((), True, 1.0)
        await playing.stop()
    assert closed


@pytest.mark.parametrize("game_id, said", [("no_such", "no_such"), ("search", "search_url"), ("text2sql", "db_id")])
def test_what_an_environment_of_skyrl_lacks_is_said(game_id: str, said: str) -> None:
    pytest.importorskip("skyrl_gym")
    with pytest.raises(ConfigError, match=rf"environment\.game={game_id} .*row-1.*{said}"):
        started(SkyRLGym(game=game_id), row())
