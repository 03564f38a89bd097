"""`mtgrpo view`: what the page shows is what is recorded, whoever wrote it; requests that attack are refused."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, unused_port

from chromium import AXE, SERIOUS, Page, chromium
from mtgrpo.commands.view import main
from mtgrpo.errors import ConfigError
from mtgrpo.record.decoding import parted
from mtgrpo.record.reading import heads, read_runs
from mtgrpo.record.tokens import read_tokens
from mtgrpo.record.writing import page_of
from mtgrpo.report import content
from mtgrpo.runtime.files import strict_json
from mtgrpo.viewer.resources import Runs
from mtgrpo.viewer.server import HEADERS, application, serve, static_files
from recorded import ANSWERS, TOKENIZER, encode, make_recorded

HOSTILE = [
    "<script>window.hacked = 1</script><img src=x onerror=window.hacked=2> 391",
    "\u202e\u05e9\u05dc\u05d5\u05dd \x1b[2J",
]
NOTED = """the engine is local
step 2: rewards fall; see mtgrpo view /somewhere/a --at step_000002/c/1
stopped after step 3
"""
SCREENS = [
    "/",
    "/curves/0",
    "/r/0/step_000001",
    "/r/0/step_000001/g/0",
    "/r/0/step_000001/c/1",
    "/r/0/step_000001/forest",
]
SCREENS += ["/r/0/step_000001/timeline", "/r/0/task/sums%2F0", "/r/0/step_000002/c/0/t/3"]


# ---------------------------------------------------------------- what is shown


def test_a_line_that_is_no_conversation_stands_as_failed(tmp_path: Path) -> None:
    lines = [
        '{"task": "a", "status": "completed", "reward": 1-2, "answer": "1"',
        '{"task": "b", "status": "completed", ',
    ]
    good = '{"task": "c", "status": "completed", "reward": 1.0, "answer": "1", "turns": []}'
    (tmp_path / "step_000001.jsonl").write_text("\n".join([*lines, good, ""]))
    found = [(status, reward) for _, status, reward, _ in heads(tmp_path / "step_000001.jsonl")]
    assert found == [("failed", None), ("failed", None), ("completed", 1.0)]


def test_a_conversation_is_shown_as_the_engine_was_sent_it(tmp_path: Path) -> None:
    make_recorded(tmp_path)
    record, runs = read_tokens(tmp_path, 2), Runs([tmp_path])
    assert record is not None
    for line in range(2 * len(ANSWERS)):
        shown = runs.read(f"0/step_000002/{line}")
        for turn, place in zip(shown["tokens"]["turns"], record.turns(line) or (), strict=True):
            whole = record.arrays["forest_token"][record.path(place)].tolist()
            before = shown["tokens"]["turns"][turn["parent"]] if turn["parent"] >= 0 else None
            context = (before["whole"] if before else "") + turn["context"]
            turn["whole"] = context + "".join(turn["pieces"])
            assert turn["whole"] == TOKENIZER.decode(whole)
            assert turn["ids"] == whole[-len(turn["ids"]) :] and encode(turn["whole"]) == whole
            entries = slice(int(record.first[place]), int(record.first[place + 1]))
            assert turn["columns"]["advantage"] == pytest.approx(record.arrays["advantage"][entries].tolist(), abs=1e-6)
            ratio = np.exp(record.arrays["before"][entries].astype(float))
            assert np.exp(turn["columns"]["before"]) == pytest.approx(ratio, abs=1e-5)


def test_what_a_turn_adds_is_told_from_what_was_sampled() -> None:
    tokens = encode("asked 😀") + encode("said é😀")
    sampled = len(encode("said é😀"))
    context, said = parted(TOKENIZER.backend_tokenizer, tokens, 2, sampled)
    assert context == TOKENIZER.decode(tokens[2:-sampled]) and "".join(said) == "said é😀" and len(said) == sampled


def test_groups_and_curves_are_listed(tmp_path: Path) -> None:
    make_recorded(tmp_path, steps=3)
    runs = Runs([tmp_path])
    (run,) = runs.read("runs")
    assert (run["name"], run["step"], run["ended"]) == (tmp_path.name, 3, False)
    assert run["rewards"] == pytest.approx([0.35, 0.45, 0.55])
    rows = runs.read("0/step_000002/list")["rows"]
    assert [(row["task"], row["group"], row["sample"], row["reward"]) for row in rows[:5]] == [
        *(("sums/0", 0, sample, float("391" in answer)) for sample, answer in enumerate(ANSWERS)),
        ("sums/1", 1, 0, 1.0),
    ]
    assert rows[0]["advantage"] == [0.75, 0.75] and rows[0]["apart"] == pytest.approx([0.01, 0.01], abs=1e-4)
    assert (rows[1]["contexts"], rows[0]["contexts"]) == (2, 1)
    index = runs.read("0/index")
    assert index["tasks"] == ["sums/0", "sums/1"] and index["recorded"] == [1, 2, 3]
    assert index["files"][0] == {
        "name": "step_000001",
        "tasks": [0] * 4 + [1] * 4,
        "rewards": [1, 0, 0, 0] + [1] * 4,
        "failed": [],
    }
    assert runs.read("0/metrics")["columns"]["eval/success"] == [0.5, 0.5, 0.5]


def test_success_is_as_a_report_has_it(tmp_path: Path) -> None:
    """Tasks of one name are told apart by their answers."""
    make_recorded(tmp_path, steps=1)
    rows = [
        {"task": "same", "sample": 0, "status": "completed", "reason": "", "reward": float(right), "answer": answer}
        for answer, right in [("1", True), ("1", True), ("2", False), ("2", False), ("2", False), ("3", True)]
    ]
    rows.append({**rows[0], "status": "failed", "reward": None})
    (tmp_path / "trajectories/evaluation_after.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra/config.yaml").write_text("reward: {success_at: 1.0}\n")
    (tmp_path / "summary.json").write_text(json.dumps({"eval/success/after": 0.5}))
    (success,) = content.measurements(read_runs([tmp_path])[0])
    assert success.after is not None
    (run,) = Runs([tmp_path]).read("runs")
    assert run["after"] == [success.after.mean, success.after.low, success.after.high]


def test_a_run_says_what_was_noted_what_success_means_and_what_evaluations_found(tmp_path: Path) -> None:
    make_recorded(tmp_path, steps=2)
    (tmp_path / "notes.txt").write_text(NOTED)
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra/config.yaml").write_text("reward: {success_at: 0.5}\nenvironment: {max_turns: 9}\n")
    choices = "{hydra: {runtime: {choices: {reward: environment, environment: guess_number}}}}"
    (tmp_path / ".hydra/hydra.yaml").write_text(choices)
    rows = (tmp_path / "metrics.jsonl").read_text()
    before, after = (
        {"stage": "evaluation", "step": 40, "eval/success": share, "eval/greedy": 1} for share in (0.1, 0.9)
    )
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(before)}\n{rows}{json.dumps(after)}\n")
    runs = Runs([tmp_path])
    (run,) = runs.read("runs")
    assert (run["notes"], run["warnings"], run["newest"]) == (3, 1, [NOTED.splitlines()[1]])
    assert "with a reward of 0.5 or more" in run["success"] and "The model guesses the number" in run["success"]
    for name in ("evaluation_before", "evaluation_after"):
        (tmp_path / f"trajectories/{name}.jsonl").write_text("")
    order = ["evaluation_before", "step_000001", "step_000002", "evaluation_after"]
    assert [file["name"] for file in runs.read("0/index")["files"]] == order
    metrics = runs.read("0/metrics")
    assert metrics["steps"] == [0, 1, 2] and metrics["success"] == run["success"]
    assert metrics["columns"]["eval/success"] == [0.1, 0.5, 0.9] and metrics["columns"]["eval/greedy"] == [1, None, 1]
    assert metrics["columns"]["reward/mean"] == [None, pytest.approx(0.35), pytest.approx(0.45)]


def test_a_list_has_the_question_not_that_of_an_example(tmp_path: Path) -> None:
    make_recorded(tmp_path)
    path = tmp_path / "trajectories" / "step_000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    example = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    path.write_text("".join(json.dumps(row | {"messages": example + row["messages"]}) + "\n" for row in rows))
    found = Runs([tmp_path]).read("0/step_000001/list")["rows"]
    assert [(row["asked"], row["said"]) for row in found[:2]] == [("17 * 20?", ANSWERS[0]), ("17 * 20?", ANSWERS[1])]


def test_what_went_wrong_is_counted(tmp_path: Path) -> None:
    make_recorded(tmp_path)
    path = tmp_path / "trajectories" / "step_000001.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    said = [
        ("assistant", {"error": "not JSON"}),
        ("tool", {"content": "error: out of ink"}),
        ("tool", {"content": "3"}),
    ]
    row |= {"messages": [{"role": role, **more} for role, more in said], "retried": ["down"], "outages": ["a", "b"]}
    row |= {"untrained_because": "its rewards are all equal"}
    path.write_text(json.dumps(row) + "\n")
    (found,) = Runs([tmp_path]).read("0/step_000001/list")["rows"]
    assert (found["unreadable"], found["errors"], found["retried"], found["outages"]) == (1, 1, 1, 2)
    assert found["untrained_because"] == "its rewards are all equal"


def test_the_forest_is_made_of_runs_of_tokens(tmp_path: Path) -> None:
    make_recorded(tmp_path)
    found, record = Runs([tmp_path]).read("0/step_000001/forest"), read_tokens(tmp_path, 1)
    assert record is not None
    assert sum(found["length"]) == found["nodes"] == len(record.arrays["forest_token"]) == found["whole"][1]
    assert sum(found["sampled"]) == len(record.arrays["node"])
    paid = (record.arrays["weight"].astype(float) * record.arrays["advantage"]).sum()
    assert sum(found["push"]) == pytest.approx(paid, abs=1e-6)
    deepest = max(depth + length for depth, length in zip(found["depth"], found["length"], strict=True))
    assert deepest == max(len(record.path(turn)) for turn in range(len(record.first) - 1))
    roots = [leaves for depth, leaves in zip(found["depth"], found["leaves"], strict=True) if depth == 0]
    assert sum(roots) == 1 + max(leaf for leaf in found["leaf"])
    assert found["text"][0].startswith("<|im_start|>user\n17")


def test_of_a_large_forest_the_first_bars_are_drawn_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Runs([make_recorded(tmp_path)]).read("0/step_000001/forest")
    monkeypatch.setattr("mtgrpo.viewer.tokens._MOST_RUNS", 3)
    found = Runs([tmp_path]).read("0/step_000001/forest")
    assert found["runs"] == whole["runs"] == len(whole["depth"]) > 3
    for name in ("depth", "length", "leaf", "leaves", "push", "sampled", "line", "text"):
        assert found[name] == whole[name][:3], name


def test_a_timeline_has_the_times_of_turns(tmp_path: Path) -> None:
    make_recorded(tmp_path)
    found = Runs([tmp_path]).read("0/step_000001/timeline")
    assert [lane["line"] for lane in found["lanes"]] == [3, 7, 2, 6, 1, 5, 0, 4] and found[
        "count"
    ] == 8  # slowest first
    lane = found["lanes"][2]
    told = [(turn["asked_s"], turn["ended_s"], turn["output_tokens"]) for turn in lane["turns"]]
    assert told == [(2.6, 3.1, 5), (3.6, 4.1, len(encode("no 😀 idea<|im_end|>")))]  # from the first that queued
    assert lane["times"] == {"began_s": 2.5, "queued_s": 2.5} and lane["calls"][0]["began_s"] == 3.2
    assert found["pushes"] == [{"version": 4, "began_s": 1.1, "ended_s": 1.35}]


def test_what_is_written_where_it_changes_is_shown_everywhere(tmp_path: Path) -> None:
    runs = Runs([make_recorded(tmp_path)])
    levels = [runs.read(f"0/step_000001/{line}")["row"]["metadata"] for line in range(8)]
    assert levels == [{"level": 0}] * 4 + [{"level": 1}] * 4


def test_a_run_without_tokens_or_tokenizer_is_shown_all_the_same(tmp_path: Path) -> None:
    make_recorded(tmp_path)
    (tmp_path / "tokens" / "step_000001.npz").unlink()
    (tmp_path / "checkpoints" / "step_000001" / "tokenizer.json").unlink()
    runs = Runs([tmp_path])
    assert runs.read("0/step_000001/1")["tokens"] is None and runs.read("0/step_000001/1")["row"]["task"] == "sums/0"
    shown = runs.read("0/step_000002/1")["tokens"]
    assert not shown["decoded"] and shown["turns"][0]["pieces"][0] == f"{shown['turns'][0]['ids'][0]} "


@pytest.mark.parametrize(
    "name",
    ["", "0", "1/metrics", "0/nothing", "0/step_000009/list", "0/step_000001/99", "0/step_000001/-1", "0/../index",
     "0/../../etc/list", "0/step_000001/../0", "0/%2e%2e/list", "00000000/metrics", "0/step_000001/forest/1",
     "0/step_000001/1e3", "\u0660/metrics", "0/evaluation_before/list", "0/.lock/list"],
)  # fmt: skip
def test_there_is_nothing_else(name: str, tmp_path: Path) -> None:
    assert Runs([make_recorded(tmp_path)]).read(name) is None


def test_broken_lines_of_a_run_keep_their_places(tmp_path: Path) -> None:
    make_recorded(tmp_path)
    path = tmp_path / "trajectories" / "step_000001.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    deep = '{"task": "deep", "messages": ' + "[" * 5000 + "]" * 5000 + "}\n"
    path.write_text(
        "".join([lines[0], "not JSON\n", deep, '{"task": 5, "messages": [1, {"role": 7}]}\n', *lines[4:]])
        + '{"task": "cut'
    )
    rows = Runs([tmp_path]).read("0/step_000001/list")["rows"]
    assert [row["line"] for row in rows] == list(range(9))
    assert [row["task"] for row in rows] == ["sums/0", None, None, None, "sums/1", "sums/1", "sums/1", "sums/1", None]
    assert Runs([tmp_path]).read("0/step_000001/4")["row"]["task"] == "sums/1"


# ---------------------------------------------------------------- requests


@asynccontextmanager
async def served(folder: Path, secret: str = "") -> AsyncGenerator[TestClient[Any, Any]]:
    server = TestServer(application(Runs([folder]), frozenset(["127.0.0.1:8765", "localhost:8765"]), secret))
    async with TestClient(server) as client:
        yield client


GOOD = {"Host": "localhost:8765"}


async def test_the_page_and_its_files_are_served_with_a_strict_policy(tmp_path: Path) -> None:
    async with served(make_recorded(tmp_path)) as client:
        for name in ["", *static_files(), "api/runs.json", "api/0/step_000001/1.json"]:
            answer = await client.get(f"/{name}", headers=GOOD)
            assert answer.status == 200, name
            assert {key: answer.headers[key] for key in HEADERS} == HEADERS
        page = (await (await client.get("/", headers=GOOD)).read()).decode()
        assert "<script>" not in page and "style=" not in page and "http" not in page
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1", "localhost:8766", "127.0.0.1:8765.evil.example", "evil@localhost:8765", ""]
)
async def test_another_host_is_refused(host: str, tmp_path: Path) -> None:
    async with served(make_recorded(tmp_path)) as client:
        for path in ("/", "/api/runs.json", "/nothing"):
            answer = await client.get(path, headers={"Host": host})
            assert answer.status == 421 and "17 *" not in await answer.text()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"])
async def test_another_method_is_refused(method: str, tmp_path: Path) -> None:
    async with served(make_recorded(tmp_path)) as client:
        for path in ("/", "/api/runs.json"):
            answer = await client.request(method, path, headers=GOOD)
            assert answer.status == 405 and HEADERS.items() <= dict(answer.headers).items()


RAW = [
    (b"GET /api/runs.json HTTP/1.1\r\nHost: evil.example\r\nHost: localhost:8765\r\n\r\n", (400, 421)),
    (b"GET http://evil.example/api/runs.json HTTP/1.1\r\nHost: localhost:8765\r\n\r\n", (400, 421, 404, 200)),
    (b"GET /../../../etc/passwd HTTP/1.1\r\nHost: localhost:8765\r\n\r\n", (400, 404)),
    (b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: localhost:8765\r\n\r\n", (400, 404)),
    (b"GET /vendor/../../server.py HTTP/1.1\r\nHost: localhost:8765\r\n\r\n", (400, 404)),
    (b"GET //etc/passwd HTTP/1.1\r\nHost: localhost:8765\r\n\r\n", (400, 404)),
    (b"GET /api/0/..%2f..%2fetc%2fpasswd/list.json HTTP/1.1\r\nHost: localhost:8765\r\n\r\n", (400, 404)),
    (b"GET /api/0/step_000001%00/list.json HTTP/1.1\r\nHost: localhost:8765\r\n\r\n", (400, 404)),
    (b"GET / HTTP/1.1\r\nHost: localhost:8765\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", (400, 431)),
    (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost:8765\r\n\r\n", (400, 414)),
    (b"GET / HTTP/1.1\r\nHost: localhost:8765\r\nContent-Length: 9\r\n\r\n123456789", (413,)),
    (b"GET / HTTP/1.1\r\nHost: localhost:8765\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", (413,)),
    (b"BREW / HTTP/1.1\r\nHost: localhost:8765\r\n\r\n", (400, 405)),
    (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", (400,)),
]


@pytest.mark.parametrize(("request_", "statuses"), RAW)
async def test_what_no_browser_sends_is_refused(request_: bytes, statuses: tuple[int, ...], tmp_path: Path) -> None:
    async with served(make_recorded(tmp_path)) as client:
        reader, writer = await asyncio.open_connection(client.server.host, client.server.port)
        writer.write(request_)
        said = await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        assert int(said.split()[1]) in statuses
        assert (await client.get("/api/runs.json", headers=GOOD)).status == 200  # it goes on


async def test_opened_to_the_network_it_asks_for_the_secret(tmp_path: Path) -> None:
    async with served(make_recorded(tmp_path), secret="open sesame") as client:
        assert (await client.get("/", headers=GOOD)).status == 200  # the page alone, which is everybody's
        for given in ({}, {"X-View-Secret": "open sesam"}, {"X-View-Secret": "Open sesame"}, {"X-View-Secret": "é"}):
            answer = await client.get("/api/0/step_000001/1.json", headers=GOOD | given)
            assert answer.status == 401 and "17 *" not in await answer.text()
        answer = await client.get("/api/runs.json", headers=GOOD | {"X-View-Secret": "open sesame"})
        assert answer.status == 200


def test_what_is_refused_of_a_run_hides_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of its own hides no other run, a record of tokens no conversation; the page is written too."""
    damaged, linked = (make_recorded(tmp_path / name) for name in "ab")
    (damaged / "tokens" / "step_000001.npz").write_bytes(b"PK nothing")
    (linked / "notes.txt").symlink_to("/etc/hostname")
    runs = Runs([damaged, linked])
    shown = runs.read("0/step_000001/1")
    assert shown["row"]["task"] == "sums/0" and shown["tokens"] is None and "is no record" in capsys.readouterr().err
    assert "recorded" not in runs.read("0/step_000001/list")["rows"][0] and runs.read("0/step_000001/forest") is None
    (note,) = runs.read("1/metrics")["notes"]
    assert "outside of the run" in note and [run["notes"] for run in runs.read("runs")] == [0, 1]
    assert main([str(damaged), str(linked), "--out", str(tmp_path / "out")]) == 0


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 stands for every address"),
        (["--host", "::"], "stands for every address"),
        (["--port", "70000"], "--port must be a number up to 65535"),
        (["--out", "."], "is there already"),
        (["--host", "203.0.113.7"], "cannot listen on 203.0.113.7"),
    ],
)
def test_what_cannot_be_is_said(words: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        main([str(make_recorded(tmp_path)), *words])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_the_address_opens_a_place(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, said = make_recorded(tmp_path), list[str]()

    def show(text: str) -> None:
        said.append(text)
        raise KeyboardInterrupt

    monkeypatch.setattr("mtgrpo.viewer.server.show", show)
    words = shlex.split(page_of(run / "trajectories" / "step_000001.jsonl", 3))
    assert words[:2] == ["mtgrpo", "view"] and main([*words[2:], "--host", host]) == 0
    address = rf"http://{host}:\d+/#(secret=[\w-]+)?/r/0/step_000001/c/3"
    assert re.fullmatch(rf"open {address}   \(Ctrl-C ends it\)", said[0])
    assert ("secret" in said[0]) == (host != "127.0.0.1")


@pytest.mark.parametrize(
    ("host", "port", "asked"),
    [("Machine", 8765, "machine:8765"), ("machine", 80, "machine"), ("FE80::1", 80, "[fe80::1]")],
)
async def test_it_answers_to_the_name_as_browsers_give_it(
    host: str, port: int, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_as = list[frozenset[str]]()

    def made(runs: Runs, hosts: frozenset[str], secret: str) -> web.Application:
        served_as.append(hosts)
        return application(runs, hosts, secret)

    monkeypatch.setattr("mtgrpo.viewer.server.application", made)
    with pytest.raises(ConfigError, match="cannot listen"):  # there is no such machine
        await serve(Runs([make_recorded(tmp_path)]), host, port, "")
    assert asked in served_as[0]


NODE = """import { groups_of } from "./step.js";
import { highest, lowest } from "./dom.js";
const many = Array(500000).fill(0.5);
many[7] = -2;
const rows = many.map((reward, line) => ({ line, group: 0, reward, status: "completed" }));
console.log(highest(many), lowest(many), groups_of(rows)[0].spread);
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
def test_a_file_may_have_any_number_of_conversations(tmp_path: Path) -> None:
    for name, text in static_files().items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text)
    (tmp_path / "app.js").write_text("export const go = 0, key = 0, link = 0, name_of = 0, read = 0;")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "page.cjs").write_text("document = { getElementById: () => ({}) }; import('./many.js');")
    (tmp_path / "many.js").write_text(NODE)
    done = subprocess.run(["node", "page.cjs"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "0.5 -2 2.5\n"


def test_the_page_is_written_as_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = make_recorded(tmp_path / "run"), tmp_path / "out"
    assert main([str(run), "--out", str(out)]) == 0
    assert f"files are in {out}" in capsys.readouterr().out
    written = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert written == {
        *static_files(), "api/top.json", "api/0.json", "api/0/step_000001.json", "api/0/step_000002.json",
    }  # fmt: skip
    for name in Runs([run]).names():
        place, _, key = name.rpartition("/")
        held = json.loads((out / "api" / f"{place or 'top'}.json").read_text())
        assert held[key] == json.loads(strict_json(Runs([run]).read(name))), name
    assert "Content-Security-Policy" in (out / "index.html").read_text()


def test_what_is_written_by_hand_stays_small() -> None:
    place = Path(__file__).parents[1] / "src/mtgrpo/viewer"
    files = [*place.glob("*.py"), *(place / "static").glob("*.js"), place.parent / "commands" / "view.py"]
    lengths = {path.name: len(path.read_text().splitlines()) for path in files}
    assert sum(lengths.values()) <= 1500 and max(lengths.values()) <= 400
    for path in files:  # text of models is only ever set as text
        assert not any(
            word in path.read_text() for word in ("innerHTML", "insertAdjacentHTML", "eval(", "document.write")
        )


# ---------------------------------------------------------------- in a browser


@asynccontextmanager
async def browsed(folder: Path, profile: Path, *others: Path) -> AsyncGenerator[Page]:
    """A browser with the page of a run, or of several."""
    port = unused_port()
    server = TestServer(application(Runs([folder, *others]), frozenset([f"127.0.0.1:{port}"]), ""), port=port)
    async with server, chromium(profile) as page:
        await page.open(f"http://127.0.0.1:{port}/")
        yield page


@pytest.mark.real
async def test_every_screen_is_shown_without_a_complaint_and_runs_nothing_of_the_policys(tmp_path: Path) -> None:
    run = make_recorded(tmp_path / "run", answers=[*HOSTILE, "1 + " * 10_000, "#### 391"], asked="7" * 1_000_000)
    async with browsed(run, tmp_path / "profile") as page:
        for dark in (False, True):
            await page.size(390 if dark else 1400, 900, dark)
            for screen in SCREENS:
                await page.screen(screen)
                assert await page.value("document.querySelector('.error, .empty') === null"), screen
                assert await page.value("document.querySelector('#page').textContent.length > 40"), screen
                wide = await page.value("document.documentElement.scrollWidth - innerWidth")
                assert wide <= 0, (screen, wide)
        assert await page.value("window.hacked") is None
        assert await page.value("document.querySelectorAll('#page script, #page img').length") == 0
        await page.screen("/r/0/step_000001/c/0")
        assert "<script>window.hacked = 1</script>" in await page.value("document.querySelector('article').textContent")
        await page.screen("/r/0/step_000001/c/1")
        said = (await page.value("document.querySelector('article').textContent")).replace(
            "·", ""
        )  # of parts of characters
        assert "\\u202e\u05e9" in said and "\\x1b[2J" in said and "\x1b" not in said
        assert page.complaints == []


async def answering(port: int) -> None:
    async with asyncio.timeout(30):
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.05)


@pytest.mark.real
async def test_the_page_of_files_shows_every_screen(tmp_path: Path) -> None:
    main([str(make_recorded(tmp_path / "run")), "--out", str(tmp_path / "out")])
    port = unused_port()
    words = [sys.executable, "-m", "http.server", "-b", "127.0.0.1", "-d", str(tmp_path / "out"), str(port)]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*words, stdout=quiet, stderr=quiet)
    try:
        await answering(port)
        async with chromium(tmp_path / "profile") as page:
            await page.open(f"http://127.0.0.1:{port}/")
            for screen in SCREENS:
                await page.screen(screen)
                assert await page.value("document.querySelector('.error, .empty') === null"), screen
            assert page.complaints == []
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.real
async def test_people_with_impairments_can_read_every_screen(tmp_path: Path) -> None:
    """By the rules of axe-core, which is a file of JavaScript."""
    if not AXE.is_file():
        pytest.skip("no axe-core: make mcp-servers")
    runs = [make_recorded(tmp_path / f"a run with a long name, the {number}th", steps=3) for number in range(3)]
    for number, run in enumerate(runs):
        (run / "notes.txt").write_text(NOTED)
        (run / ".hydra").mkdir()
        (run / ".hydra/config.yaml").write_text(f"trainer: {{steps: {number}}}\n")
    async with browsed(runs[0], tmp_path / "profile", *runs[1:]) as page:
        await page.value(AXE.read_text() + "; 0")
        for width, dark in ((1400, False), (1400, True), (390, False)):
            await page.size(width, 900, dark)
            for screen in [*SCREENS, "/curves/0,1,2"]:
                await page.screen(screen)
                assert await page.value(SERIOUS) == [], (screen, width, dark)


@pytest.mark.real
async def test_of_a_long_conversation_only_what_is_near_is_coloured_token_by_token(tmp_path: Path) -> None:
    run = make_recorded(tmp_path / "run", steps=1, answers=["1 +\n" * 10_000, "#### 391"])
    ids = [token for turn in Runs([run]).read("0/step_000001/0")["tokens"]["turns"] for token in turn["ids"]]
    async with browsed(run, tmp_path / "profile") as page:
        far = len(ids) // 2
        await page.screen(f"/r/0/step_000001/c/0/t/{far}")
        assert await page.value("document.querySelector('.wanted').dataset.i") == str(far)
        await page.until("document.querySelector('.wanted').getBoundingClientRect().top < innerHeight")
        assert await page.value("document.querySelectorAll('.tok').length") < len(ids) / 4
        parts = "[...document.querySelectorAll('.tokens')].map((turn) => turn.textContent).join('')"
        assert (await page.value(parts)).replace("⏎", "") == TOKENIZER.decode(ids)
        await page.press("6")
        shades = "[...new Set([...document.querySelectorAll('.tok')].map((token) => token.className.trim()))]"
        assert set(await page.value(shades)) == {"tok s8", "tok s8 wanted"}
        await page.value("scrollTo(0, document.body.scrollHeight)")
        await page.until(f"document.querySelector('[data-i=\"{len(ids) - 1}\"]') !== null")
        assert set(await page.value(shades)) == {"tok s8", "tok s8 wanted"} and page.complaints == []


@pytest.mark.real
async def test_the_page_follows_a_run_that_trains(tmp_path: Path) -> None:
    run = make_recorded(tmp_path / "run", steps=1)
    async with browsed(run, tmp_path / "profile") as page:
        step = "document.querySelector('progress').value"
        assert await page.value(step) == 1
        row = {"stage": "reinforcement learning", "step": 7, "reward/mean": 0.5}
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        await page.until(f"{step} === 7")
        assert page.complaints == []


@pytest.mark.real
async def test_keys_and_clicks_lead_through_the_page(tmp_path: Path) -> None:
    run = make_recorded(tmp_path / "run")
    (run / "notes.txt").write_text(NOTED)
    async with browsed(run, tmp_path / "profile") as page:
        where = "location.hash + ''"
        noted = "[...document.querySelectorAll('.notes a')].map((one) => [one.textContent, one.hash])"
        await page.shown("")
        assert await page.value(noted) == [
            ["1 warning3 notes", "#/curves/0"],
            ["step 2: rewards fall", "#/r/0/step_000002/c/1"],
        ]
        await page.value("location.hash = 'secret=s_-1/r/0/step_000001/c/1'")  # as it is announced to a network
        await page.shown("/r/0/step_000001/c/1")
        assert await page.value("sessionStorage.getItem('secret')") == "s_-1"
        assert await page.value(where) == "#/r/0/step_000001/c/1"
        await page.press("j")
        await page.shown("/r/0/step_000001/c/2")
        await page.press("g")
        await page.shown("/r/0/step_000001/g/0")
        parted_at = await page.value("[...document.querySelectorAll('.parting')].map((token) => token.textContent)")
        assert len(parted_at) == 3  # each of the others parts from the first
        await page.press("t")
        await page.shown("/r/0/step_000001")
        await page.value("document.querySelector('input[type=search]').value = 'idea'")
        await page.value("document.querySelector('input[type=search]').dispatchEvent(new Event('input'))")
        assert await page.value("document.querySelectorAll('tbody tr').length") == 2
        await page.screen("/r/0/step_000001/c/0")
        shades = "[...document.querySelectorAll('.tok')].map((token) => token.className.trim())"
        assert set(await page.value(shades)) == {"tok p8"}
        await page.press("6")
        assert set(await page.value(shades)) == {"tok s8"}
        await page.press("1")
        await page.screen("/r/0/step_000001/c/0/t/2")
        token = "document.querySelector('.wanted').dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
        await page.value(token)
        tip = await page.value("document.getElementById('tip').textContent")
        assert tip.startswith("token 2 ") and "advantage +0.75" in tip and "ratio 1.01" in tip
        assert await page.value(where) == "#/r/0/step_000001/c/0/t/2" and page.complaints == []


CHOOSE = (
    """(() => { const one = document.querySelector("%s"); one.value = "%s"; one.dispatchEvent(new Event("%s")); })()"""
)
MOVE = """(() => {
  const picture = document.querySelector("canvas[role=img]"), at = picture.getBoundingClientRect();
  const where = {clientX: at.left + %s, clientY: at.top + %s, bubbles: true};
  picture.dispatchEvent(new PointerEvent("pointermove", where));
  const told = document.getElementById("tip").hidden ? "" : document.getElementById("tip").textContent;
  if (told) picture.dispatchEvent(new MouseEvent("click", where));
  return told;
})()"""


@pytest.mark.real
async def test_every_screen_of_a_real_run_is_opened_filtered_hovered_and_linked(tmp_path: Path) -> None:
    words = ["trainer.steps=2", "rollout.prompts_per_step=6", "rollout.group_size=4", "eval.tasks=4", "eval.samples=2"]
    words += ["log=[jsonl]", "seed=3", f"hydra.run.dir={tmp_path}/run"]
    training = await asyncio.create_subprocess_exec(sys.executable, "-m", "mtgrpo", "train", *words)
    assert await training.wait() == 0
    step, tip = "/r/0/step_000002", "document.getElementById('tip').textContent"
    async with browsed(tmp_path / "run", tmp_path / "profile") as page:
        await page.size(1400, 900)
        text, rows = "document.querySelector('#page').textContent", "document.querySelectorAll('tbody tr').length"
        assert "1 when the number" in await page.value(text) and await page.value(rows) == 1
        await page.value("document.querySelector('input[type=checkbox]').click()")
        await page.value("document.querySelector('button').click()")
        await page.shown("/curves/0")
        await page.value(CHOOSE % ("input[type=search]", "eval/success", "input"))
        assert await page.value("document.querySelectorAll('figure').length") == 1
        await page.value("document.querySelector('.files a[href$=step_000001]').click()")
        await page.shown("/r/0/step_000001")

        await page.screen(step)
        assert await page.value(rows) == 6
        rewards = [row["reward"] for row in Runs([tmp_path / "run"]).read("0/step_000002/list")["rows"]]
        mixed = [one for one in range(6) if len(set(rewards[4 * one : 4 * one + 4])) > 1]
        await page.value(CHOOSE % ("select[aria-label=show]", "mixed", "change"))
        assert await page.value(rows) == len(mixed) > 0
        await page.value(CHOOSE % ("select[aria-label='sort by']", "tokens", "change"))
        await page.value(CHOOSE % ("select[aria-label=show]", "", "change"))
        sizes = "[...document.querySelectorAll('td[data-name=tokens]')].map((cell) => Number(cell.textContent))"
        assert (found := await page.value(sizes)) == sorted(found, reverse=True)

        await page.screen(f"{step}/g/{mixed[0]}")
        base = "[...document.querySelectorAll('.panel')].findIndex((panel) => panel.matches('.base'))"
        assert await page.value(base) == 0 and await page.value("document.querySelectorAll('.parting').length") > 0
        await page.value("document.querySelectorAll('.panel button')[1].click()")
        assert await page.value(base) == 2
        token = "document.querySelector('.tok').dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
        await page.value(token)
        assert (await page.value(tip)).startswith("token 0 ")
        await page.value("document.querySelector('.panel header a').click()")
        await page.shown(f"{step}/c/{4 * mixed[0]}")
        assert "version 1 as the engine says, at most " in await page.value(text)

        for screen, x, y, told in (("forest", 5, 5, "not sampled"), ("timeline", 500, 24, "sample")):
            await page.screen(f"{step}/{screen}")
            await page.until("document.querySelector('canvas').style.height !== ''")
            assert told in await page.value(MOVE % (x, y))
            await page.until("/\\/c\\/\\d+$/.test(location.hash) && !document.querySelector('.busy')")
        held_out = Runs([tmp_path / "run"]).read("0/evaluation_after/list")["rows"][0]["task"]
        await page.screen("/r/0/task/" + quote(held_out, safe=""))
        assert await page.value(rows) == 4  # sampled and greedy, before and after
        said = "document.querySelector('.said').textContent"
        before = await page.value(said)
        await page.value(CHOOSE % (".panel select", "evaluation_after/0", "change"))
        await page.until(f"document.querySelector('.panel select').value === 'evaluation_after/0' && {said} !== ''")
        assert before and page.complaints == []
