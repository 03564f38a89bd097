"""The judge: what it is asked over HTTP, what its reply is worth, what is kept, and what a failure costs."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from mtgrpo.errors import ConfigError
from mtgrpo.parts import RunContext
from mtgrpo.rewards import Score, scores
from mtgrpo.rewards.composed import Composed
from mtgrpo.rewards.judge import Judge
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn

TASK = Task("task/1", (Message("user", "What is 1 + 1?"),), answer="2")


class Server:
    """Answers requests one after the other with the texts, or the statuses, it is given; the last one ever again."""

    def __init__(self, *replies: str | int | None) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        left = list(replies)
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                server.keys.append(self.headers["Authorization"])
                reply = left.pop(0) if len(left) > 1 else left[0]
                found = {"choices": [{"message": {"role": "assistant", "content": reply}}]}
                body = b"that is not possible" if isinstance(reply, int) else json.dumps(found).encode()
                self.send_response(reply if isinstance(reply, int) else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    def __enter__(self) -> Server:
        self._thread = Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def saying(*texts: str) -> list[Trajectory]:
    return [Trajectory(TASK, turns=[Turn([], [], [], [], Finish.STOP, Message("assistant", text))]) for text in texts]


@asynccontextmanager
async def judge(
    server: Server, folder: Path, secrets: dict[str, str] | None = None, **more: Any
) -> AsyncGenerator[Judge]:
    settings = Judge(url=server.url, model="wise", cache=str(folder), backoff_s=0, **more)
    async with settings.open(RunContext(folder, print, secrets or {})) as running:
        yield running


def totals(found: Sequence[Score | Exception]) -> list[Any]:
    return [one.total if isinstance(one, Score) else str(one) for one in found]


async def test_a_score_is_asked_for_and_scaled(tmp_path: Path) -> None:
    with Server("Quite right.\nScore: 7.5") as server:
        async with judge(server, tmp_path, {"OPENAI_API_KEY": "secret"}) as running:
            assert totals(await scores(running, saying("It is {reference}."))) == [0.75]
        [asked] = server.asked
        assert asked["model"] == "wise" and asked["temperature"] == 0 and server.keys == ["Bearer secret"]
        question = asked["messages"][0]["content"]
        assert "user: What is 1 + 1?" in question and "<reference>\n2\n" in question
        assert "<response>\nIt is {reference}.\n" in question  # what the policy says is filled in as it stands


async def test_what_was_judged_is_not_asked_again(tmp_path: Path) -> None:
    with Server("Score: 4", "Score: 9") as server:
        async with judge(server, tmp_path) as running:
            assert totals(await scores(running, saying("two", "two"))) == [0.4, 0.4]
        async with judge(server, tmp_path, max_requests=1) as running:
            found = await scores(running, saying("two", "three"))
            assert totals(found) == [0.4, 0.9] and len(server.asked) == 2
            assert [one.components for one in found if isinstance(one, Score)] == [{"cached": 1.0}, {"cached": 0.0}]
            with pytest.raises(ConfigError, match=r"reward\.max_requests=1 requests to the judge are spent"):
                await scores(running, saying("four"))
    assert len(server.asked) == 2


async def test_another_question_has_a_reply_of_its_own(tmp_path: Path) -> None:
    with Server("Score: 1", "Score: 2") as server:
        async with judge(server, tmp_path) as running:
            await scores(running, saying("two"))
        async with judge(server, tmp_path, prompt="Score {response} from 0 to 10.") as running:
            assert totals(await scores(running, saying("two"))) == [0.2]


@pytest.mark.parametrize("reply", ["I like it.", "Score: 11", "Score: -1", None, 500, 429])
async def test_what_is_no_score_is_asked_again_and_never_kept(reply: str | int | None, tmp_path: Path) -> None:
    with Server(reply, "The score: 3") as server:
        async with judge(server, tmp_path) as running:
            assert totals(await scores(running, saying("two"))) == [0.3] and len(server.asked) == 2
    with Server(reply) as server:
        async with judge(server, tmp_path / "other", retries=2) as running:
            [unscored] = await scores(running, saying("two"))
            # The policy can ask a judge for no score, but it cannot make a server fail.
            assert isinstance(unscored, Exception) is isinstance(reply, int) and len(server.asked) == 3
            assert isinstance(unscored, Exception) or unscored.total == 0
        assert list((tmp_path / "other").iterdir()) == []


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_message_too_long_for_the_judge_is_worth_nothing_where_others_are_judged(
    status: int, tmp_path: Path
) -> None:
    with Server("Score: 3", status) as server:
        async with judge(server, tmp_path) as running:
            assert totals(await scores(running, saying("two"))) == [0.3]
            assert totals(await scores(running, saying("two" * 9999))) == [0.0] and len(server.asked) == 2


async def test_a_server_that_is_not_there_is_said_before_a_run(tmp_path: Path) -> None:
    with Server("Score: 3") as server:
        pass
    with pytest.raises(ConfigError, match=rf"{server.url}/models does not answer.*correct reward.url={server.url}"):
        async with judge(server, tmp_path, retries=1):
            pass


async def test_a_server_that_is_lost_fails_the_trajectories(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        with Server("Score: 3") as server:
            running = await stack.enter_async_context(judge(server, tmp_path, retries=1))
        assert [isinstance(one, Exception) for one in await scores(running, saying("two", "three"))] == [True, True]


async def test_a_refusal_ends_the_run(tmp_path: Path) -> None:
    with Server(401) as server:
        async with judge(server, tmp_path) as running:
            with pytest.raises(ConfigError, match=r"refuses model wise with status 401: that is.*\$OPENAI_API_KEY"):
                await scores(running, saying("two"))
        assert len(server.asked) == 1


async def test_beside_another_reward(tmp_path: Path) -> None:
    with Server("Score: 5") as server:
        given = {"url": server.url, "model": "wise", "cache": str(tmp_path), "weight": 0.2, "backoff_s": 0}
        async with Composed(of={"em": {}, "judge": given}).open(RunContext(tmp_path, print, {})) as running:
            [score] = await scores(running, saying("2"))
    assert isinstance(score, Score) and score.total == pytest.approx(1.1)
    assert score.components == {"em": 1, "judge": 0.5, "judge/cached": 0}


@pytest.mark.parametrize(
    "settings, message",
    [
        ({}, "needs `url` and `model`"),
        ({"url": "http://localhost/v1"}, "needs `url` and `model`"),
        ({"url": "x", "model": "y", "lowest": 10}, "lowest=10 must be below highest=10"),
        ({"url": "x", "model": "y", "prompt": "How good?"}, r"must have \{response\} in it"),
        ({"url": "x", "model": "y", "timeout_s": 0}, "`timeout_s` must be > 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Judge(**settings)
