"""What runs in the interpreter of verifiers, and imports nothing of ours: lists an environment's tasks, or plays them.

    python program.py SETTINGS

SETTINGS is a JSON object with `environment` and `settings`. With `file` and `select` it writes the tasks to that file,
a line each, and says that it is ready. With `socket` it says when it is ready, and ends when its input does; meanwhile
it reads a line from each connection, plays that episode and answers in a line; where the connection closes, the episode
is cancelled.
"""

import asyncio
import contextlib
import importlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

KNOWN = "0.4"  # the minor version whose interface this is
LONGEST_LINE = 2**28  # bytes
BACKLOG = 4096  # connections that wait to be accepted; all conversations of a batch may begin at once
OWN_MODEL = "agent.settings={NAME: {client: {type: eval, base_url: ...}, model: ...}} gives an agent a model of its own"
READY = b"ready\n"


def library() -> Any:
    """The package verifiers. Raises ImportError where there is none, or another version."""
    try:
        found = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{sys.executable} has no package verifiers: pip install 'verifiers>=0.4,<0.5' uv") from None
    if found.split(".")[:2] != KNOWN.split("."):
        raise ImportError(f"{sys.executable} has verifiers {found}: pip install 'verifiers>=0.4,<0.5'")
    return importlib.import_module("verifiers.v1")


def environment_of(vf: Any, taskset: str, settings: Mapping[str, Any]) -> Any:
    """The environment. An agent of it that has neither harness nor runtime is played by a chat loop on this machine.

    That is verifiers' own harness `null`, which runs no code of the model. Their default runs it in a rented sandbox.
    """
    given: dict[str, Any] = {**settings, "taskset": {**settings.get("taskset", {}), "id": taskset}}
    fields = vf.env_config_type(taskset, given.get("id", "")).model_fields
    seats = {name: field.default for name, field in fields.items() if isinstance(field.default, vf.AgentConfig)}
    for name, seat in seats.items() if vf.default_harness_id(taskset) == "bash" else ():
        if not {"harness", "runtime"} & {*given.get(name, {}), *seat.model_fields_set}:
            given[name] = {**given.get(name, {}), "harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    return vf.load_environment(vf.resolve_env_config(given))


def row(task: Any) -> dict[str, Any]:
    """A task as a row of a file: its messages and all of its data; an id and an answer where it names them."""
    data = task.data.model_dump(mode="json", exclude_defaults=True)
    prompt = data.get("prompt") or "(The environment begins.)"
    said = [*map(dict, prompt)] if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    for message in said:
        parts = message.get("content") or ""
        shown = [part.get("text") or f"[{part.get('type', 'part')}]" for part in parts if isinstance(part, dict)]
        message["content"] = "\n".join(shown) if shown else parts
    system = [{"role": "system", "content": data["system_prompt"]}] if data.get("system_prompt") else []
    named = {name: data[name] for name in ("id", "answer") if isinstance(data.get(name), str | int | float)}
    return {"messages": [*system, *said], "verifiers": data, **named}


async def played(vf: Any, env: Any, asked: Mapping[str, Any]) -> dict[str, Any]:
    """One episode of a task against the endpoint that is asked for; what their rewards and metrics say of it."""
    kind = type(env.taskset).task_type()
    task = kind(kind.data_type().model_validate(asked["data"]), env.config.taskset.task)
    client = vf.EvalClientConfig(base_url=asked["url"], api_key_var="MTGRPO_KEY")  # the key is part of the URL
    episode = await env.run_episode(task, vf.ModelContext(client=client, model=asked["model"], sampling=vf.Sampling()))
    errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
    if errors or not episode.ok:
        why = [f"{error.type}: {error.message}" for error in errors]
        return {"error": why[0] if why else f"the episode ended by {[t.stop_condition for t in episode.traces]}"}
    ours = [trace for trace in episode.traces if trace.agent.config.client.base_url == asked["url"]]
    if len(ours) != 1:
        names = [trace.agent.name for trace in ours]
        return {"error": f"the policy played {names}: an episode has one reward only where it plays once; {OWN_MODEL}"}
    (trace,) = ours
    components = {name: value for name, value in trace.metrics.items() if value is not None}
    components |= {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    return {"reward": trace.reward, "components": components, "output": trace.last_reply}


async def play(vf: Any, env: Any, socket: str, output: int) -> None:
    """Play for everybody who connects, all at once, until the input ends; what is then under way is cancelled."""
    episodes: set[asyncio.Task[dict[str, Any]]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        episode = asyncio.create_task(played(vf, env, json.loads(await reader.readline())))
        episodes.add(episode)
        closed = asyncio.create_task(reader.read())
        closed.add_done_callback(lambda _: episode.cancel())
        (outcome,) = await asyncio.gather(episode, return_exceptions=True)
        if isinstance(outcome, BaseException):  # nobody reads of one that was cancelled
            outcome = {"error": f"{type(outcome).__name__}: {outcome}"}
        writer.write(json.dumps(outcome).encode() + b"\n")
        writer.close()
        episodes.remove(episode)

    ended = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(ended), sys.stdin)
    server = await asyncio.start_unix_server(answer, socket, limit=LONGEST_LINE, backlog=BACKLOG)
    async with env.serving(), server:
        os.write(output, READY)
        await ended.read()
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)


def write_tasks(vf: Any, env: Any, file: str, select: Mapping[str, Any]) -> None:
    """Write the tasks that `select` chooses, a line each."""
    tasks = env.taskset.select(vf.SelectConfig(**select))
    if not tasks.bounded:
        raise ValueError("it has no end: task.select={limit: 1000} takes a thousand of its tasks")
    with open(file, "w", encoding="utf-8") as rows:
        rows.writelines(f"{json.dumps(row(task))}\n" for task in tasks)


def main() -> None:
    """Do what the settings say; a mistake is the last line that is written to stderr."""
    output = os.dup(1)
    os.dup2(2, 1)  # what an environment prints is no answer
    settings = json.loads(sys.argv[1])
    try:
        vf = library()
        env = environment_of(vf, settings["environment"], settings["settings"])
        if "socket" in settings:
            asyncio.run(play(vf, env, settings["socket"], output))
        else:
            write_tasks(vf, env, settings["file"], settings["select"])
            os.write(output, READY)
    except Exception as error:
        print(" ".join(f"{type(error).__name__}: {error}".split()), file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
