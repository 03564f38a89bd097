"""What somebody sends: a record, a model, a chat template. One clear line each; nothing runs, leaks or hangs."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mtgrpo import cli
from mtgrpo.chat import ChatSettings, open_chat
from mtgrpo.cluster.keeper import Keeper
from mtgrpo.cluster.launch import Processes
from mtgrpo.config.compose import compose, parse
from mtgrpo.engines.server import Server, local, vllm
from mtgrpo.errors import ConfigError
from mtgrpo.model import tiny
from mtgrpo.model.load import ModelSettings, load_model
from mtgrpo.model.tokenizer import load_tokenizer
from mtgrpo.runtime import isolation
from saving import save_model
from test_run_record import recorded, taken_up

SOURCE = Path(cli.__file__).parent

# --- records


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:SECRET}",
        "a ${oc.env:SECRET,none} b",
        "${oc.env:${model.name}}",
        "${oc.decode:${oc.env:SECRET}}",
        "${hydra:runtime.cwd}",
        "${ oc.env:SECRET}",
    ],
)
def test_a_record_reads_nothing_of_this_machine(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "swordfish")
    monkeypatch.setenv("tiny", "swordfish")
    run = recorded(tmp_path, {"task": {"path": value}})
    with pytest.raises(ConfigError, match="add trust_code=true") as refused:
        taken_up(run)
    assert "swordfish" not in str(refused.value)


def test_what_a_record_refers_to_within_itself_is_taken_up(tmp_path: Path) -> None:
    run = recorded(tmp_path, {"sampling": {"max_new_tokens": "${rollout.group_size}"}})
    assert taken_up(run).experiment.sampling.max_new_tokens == 8


@pytest.mark.parametrize(
    "content",
    [
        "[" * 5_000,
        "{" * 5_000,
        "a: " * 5_000,
        "!!python/object/apply:os.system ['touch ran']",
        "a: !!python/name:os.system",
        "a: &a [*a]",
        "\0",
        "- a list",
        "",
        "a: ${b",
        "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{f'*a{n - 1},' * 9}]" for n in range(1, 20))]),
        "a: &a {b: 1}\n<<: *a",
        "a: !!python/object/apply:pathlib.Path [a]",
        "seed: " + "1" * 40,
        "seed: " + "1" * 10_000,
        "seed: 0x" + "f" * 90,
        "seed: " + "1:" * 20_000 + "1",
        "sampling: {stop_ids: [1" + "0" * 40 + "]}",
        "seed: 1e999",
        "a: 1\na: 2",
        "? {a: 1}\n: 2",
        "a: " + "x" * 300_000,
    ],
    ids=range(22),
)
def test_a_hostile_record_is_refused_in_one_line(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = recorded(tmp_path)
    for name in ("config.yaml", "hydra.yaml"):
        kept = (run / ".hydra" / name).read_text()
        (run / ".hydra" / name).write_text(content)
        for words in ([], ["trust_code=true"]):
            with pytest.raises(ConfigError) as refused:
                taken_up(run, *words)
            assert len(str(refused.value)) < 2000
        (run / ".hydra" / name).write_text(kept)
    assert not (tmp_path / "ran").exists()


# --- what executes


@functools.cache
def nodes() -> list[tuple[Path, ast.AST]]:
    return [(path, node) for path in SOURCE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]


def calls(name: str) -> list[tuple[Path, ast.Call]]:
    """Where the source calls a function or method of this name."""
    return [
        (path, node)
        for path, node in nodes()
        if isinstance(node, ast.Call) and name in (getattr(node.func, "attr", ""), getattr(node.func, "id", ""))
    ]


def test_no_code_of_a_model_is_run() -> None:
    loaders = ("AutoTokenizer", "AutoModelForCausalLM", "AutoConfig")
    found = [
        (path, call)
        for path, call in calls("from_pretrained")
        if isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") in loaders
    ]
    assert len(found) >= 3
    for path, call in found:
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        own_file = path.name == "smollm2.py"  # a file that the command `data` has made
        assert own_file or ast.unparse(named.get("trust_remote_code", ast.Constant(None))) == "False", path


def test_nothing_is_unpickled_or_evaluated() -> None:
    imported = {
        (name.name, path.name)
        for path, node in nodes()
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    found = {(name, file) for name, file in imported if name in ("pickle", "marshal", "shelve", "dill", "cloudpickle")}
    # Two write one alone: for its own server (see `loads`), and to see whether a trajectory can go to another process.
    # The processes of one run, on several ranks, send one another calls and tensors.
    ranks = ("controller.py", "rank.py", "wire.py")
    assert found <= {("pickle", name) for name in ("push.py", "__init__.py", *ranks)}
    for name in ("exec", "loads", "Unpickler"):
        found = [call for path, call in calls(name) if path.name not in ("sandbox_init.py", *ranks)]  # in the sandbox
        assert all(ast.unparse(call.func) in ("json.loads", "yaml.safe_load") for call in found), name
    assert not [call for _, call in calls("eval") if isinstance(call.func, ast.Name)]
    for _, call in calls("load"):
        assert ast.unparse(call.func) not in ("torch.load", "pickle.load")
        assert ast.unparse(call.func) != "yaml.load" or "SafeLoader" in ast.unparse(call)


def test_a_secret_of_the_environment_stands_in_nothing_that_a_run_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "swordfish")
    made = compose(parse(["recipe=jsonl", "task.path=${oc.env:MY_KEY}", "model.name=tiny"]))
    assert made.experiment.task.path == "swordfish"  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no such file"):  # nothing is written before the checks
        cli.run_command(["train", "recipe=jsonl", "task.path=${oc.env:MY_KEY}", "model.name=tiny"])
    assert not list(tmp_path.iterdir())


# --- models


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(load_model(ModelSettings("tiny"), 0), tiny.load_tokenizer(), folder)
    return folder


def damaged(folder: Path, target: Path, name: str, content: bytes) -> Path:
    """A copy of a model's folder in which one file has another content."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(content if file.name == name else file.read_bytes())
    return target


@pytest.mark.parametrize("kept", [0, 7, 100, 5000, -1])
def test_cut_weights_are_refused_in_one_line(kept: int, model_folder: Path, tmp_path: Path) -> None:
    whole = (model_folder / "model.safetensors").read_bytes()
    folder = damaged(model_folder, tmp_path / "m", "model.safetensors", whole[:kept])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(ModelSettings(str(folder)), 0)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"3", b"[" * 100_000, b'{"model_type": 3}', b'{"model_type": "no"}', b"\xff\xfe"]
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_model_with_a_hostile_file_is_refused_in_one_line(
    name: str, content: bytes, model_folder: Path, tmp_path: Path
) -> None:
    folder = damaged(model_folder, tmp_path / "m", name, content)
    try:
        load_tokenizer(str(folder))
        load_model(ModelSettings(str(folder)), 0)
    except ConfigError as refused:
        assert "cannot be loaded" in str(refused) and "\n" not in str(refused)


def test_code_that_a_model_brings_is_not_run(model_folder: Path, tmp_path: Path) -> None:
    config = json.loads((model_folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    folder = damaged(model_folder, tmp_path / "m", "config.json", json.dumps(config).encode())
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: ...\nclass M: ...\n")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(ModelSettings(str(folder)), 0)
    assert not (tmp_path / "ran").exists()


# --- chat templates

FINE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATES = {
    "a division by zero": ("{{ 1 / 0 }}", "division"),
    "what is not there": ("{{ messages[7].content.x.y }}", "no element 7|undefined"),
    "endless recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "a text of a gigabyte": ("{{ 'a' * 10**10 }}", "memory|too"),
    "more and more text": ("{% set n = namespace(t='aaaa') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}"
                           "{% endfor %}{{ n.t }}", "memory"),
    "a loop without an end": ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", "10 s"),
    "a power": ("{{ 9 ** (9 ** 9) }}", "10 s|memory"),
    "Python's inside": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "a file": ("{% include '/etc/passwd' %}", "loader|no"),
    "no template": ("{% for %}", "expected|unexpected|syntax"),
    "what raises": ("{{ raise_exception('never') }}", "never"),
    "a test that is none": ("{{ messages is nothing_known }}", "nothing_known"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "said"), TEMPLATES.values(), ids=list(TEMPLATES))
def test_a_hostile_template_is_refused_in_one_line(
    source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "LIMIT_S", 2 if "10 s" in said else 60)  # what takes memory may take its time
    path = tmp_path / "evil.jinja"
    path.write_text(FINE + source)
    with pytest.raises(ConfigError, match="the chat template") as refused:
        open_chat(tiny.load_tokenizer(), ChatSettings(template=str(path)))
    assert re.search(said.replace("10 s", "2 s"), str(refused.value), re.IGNORECASE), refused.value
    assert len(str(refused.value)) < 1000


ROLE = "<|im_start|>{{ m.role }}\n"
UNFAITHFUL = {
    "no message": ("{{ bos_token }}", r"hides or changes message 1 \(user\)"),
    "no message of the assistant": (
        "{% for m in messages if m.role != 'assistant' %}" + ROLE + "{{ m.content }}<|im_end|>\n{% endfor %}",
        r"hides or changes message 2 \(assistant\) of a conversation of the roles user, assistant, user",
    ),
    "no system message": (FINE.replace("in messages", "in messages if m.role != 'system'"), r"message 1 \(system\)"),
    "the last ten alone": (FINE.replace("messages", "messages[-10:]"), r"message 1 \(user\) .* assistant, \.\.\."),
    "other words": (FINE.replace("m.content", "m.content | upper"), r"message 1 \(user\)"),
    "the beginning alone": (FINE.replace("m.content", "m.content[:5000]"), r"message 1 \(user\)"),
    "words in lines of 80": (FINE.replace("m.content", "m.content | wordwrap"), r"message 1 \(user\)"),
    "spaces made one": (FINE.replace("m.content", "m.content.split() | join(' ')"), r"message 1 \(user\)"),
    "HTML": (FINE.replace("m.content", "m.content | escape"), r"message 1 \(user\)"),
    "the time": (FINE + "{{ strftime_now('%H:%M') }}", r"writes each time anew what stands at the end"),
    "the time before the second message": (
        FINE.replace("<|im_start|>", "{{ strftime_now('%S') if loop.index == 2 }}<|im_start|>"),
        r"writes each time anew what stands at message 2 \(assistant\)",
    ),
    "dice": (FINE + "{{ range(1000) | random }}", "writes each time anew"),
    "dice that nobody sees": ("{% if range(1000) | random > 1000 %}x{% endif %}" + FINE, "writes each time anew"),
    "words without meaning": (FINE + "{{ lipsum() }}", "writes each time anew"),
    "an address": (FINE + "{{ cycler('a') }}", "writes each time anew"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "said"), UNFAITHFUL.values(), ids=list(UNFAITHFUL))
def test_a_template_that_is_unfaithful_is_refused_in_one_line(source: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "unfaithful.jinja"
    path.write_text(source)
    cure = r"; choose another one with chat\.template=chatml or chat\.template=PATH$"
    with pytest.raises(ConfigError, match=f"the chat template cannot be used: it .*{said}.*{cure}") as refused:
        open_chat(tiny.load_tokenizer(), ChatSettings(template=str(path)))
    assert "\n" not in str(refused.value)


def test_tools_are_shown_in_the_prompt_where_a_template_hides_what_is_said_with_them(tmp_path: Path) -> None:
    path = tmp_path / "hiding.jinja"
    path.write_text("{{ tools }}" + FINE.replace("m.content", "m.content if m.role != 'tool' else 'done'"))
    chat = open_chat(tiny.load_tokenizer(), ChatSettings(template=str(path)))
    assert "in the prompt" in chat.notes[0]


FAITHFUL = {
    "contents are stripped": FINE.replace("m.content", "m.content | trim"),
    "the date": "{{ strftime_now('%d %b %Y') }}" + FINE,
    "replies as JSON": FINE.replace("m.content", "(m.content | tojson if m.role == 'tool' else m.content)"),
    "roles alternate": FINE + "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
    "a state within one rendering": "{% set n = namespace(n=0) %}"
    + FINE.replace("{{ m.role }}", "{% set n.n = n.n + 1 %}{{ n.n }}"),
}  # fmt: skip


@pytest.mark.parametrize("source", FAITHFUL.values(), ids=list(FAITHFUL))
def test_a_template_that_is_faithful_is_used(source: str, tmp_path: Path) -> None:
    path = tmp_path / "faithful.jinja"
    path.write_text(source)
    assert open_chat(tiny.load_tokenizer(), ChatSettings(template=str(path))).stop_ids


def test_a_good_template_leaves_no_process(tmp_path: Path) -> None:
    path = tmp_path / "good.jinja"
    path.write_text(FINE)
    open_chat(tiny.load_tokenizer(), ChatSettings(template=str(path)))
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_what_other_people_sent_has_no_say_in_the_limits() -> None:
    assert isolation.try_within_limits(lambda: None) == ""
    assert isolation.try_within_limits(lambda: bytearray(2**31)) == "took more memory than 1 GiB"
    assert isolation.try_within_limits(lambda: os._exit(7)) == "ended with 7"

    def raising() -> Any:
        raise ValueError

    assert isolation.try_within_limits(raising) == ""  # whoever asks meets it


# --- folders in which a command is typed

WORKERS = """
import asyncio, sys
from contextlib import closing
from mtgrpo.runtime.workers import Workers

if __name__ == "__main__":
    with closing(Workers()) as workers:
        print(asyncio.run(workers.run(sys.modules["os"].getenv, "PYTHONSAFEPATH")))
"""


@pytest.fixture
def marked(place: Path) -> Path:
    """Is there once a module of the working folder was run, which is called as one of ours and one of Python's."""
    marked = place.parent / "marked"
    for name in ("mtgrpo", "pickle"):
        (place / f"{name}.py").write_text(f"open({str(marked)!r}, 'w').close()\nraise SystemExit(7)\n")
    return marked


def test_workers_run_nothing_of_the_working_folder(marked: Path) -> None:
    program = marked.with_name("program.py")
    program.write_text(WORKERS)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=200)
    assert (marked.exists(), done.returncode) == (False, 0), done.stderr
    assert done.stdout == "None\n" and "PYTHONSAFEPATH" not in os.environ  # what these start has the user's


def test_ranks_run_nothing_of_the_working_folder(marked: Path) -> None:
    ranks, beat = Processes([0], marked.parent), marked.with_name("rank_0.json")
    while ranks.started[0].poll() is None and not beat.exists():
        time.sleep(0.05)
    ranks.end()
    for one in ranks.sockets:
        one.close()
    assert (marked.exists(), beat.exists()) == (False, True)


def test_servers_and_what_is_kept_on_other_machines_run_nothing_of_the_working_folder(marked: Path) -> None:
    keeper = Keeper(lambda: ("127.0.0.1", "node"))
    assert keeper.run(["mtgrpo", "--version"], {}, str(marked.with_name("log"))) == 0 and not marked.exists()
    words = [sys.executable, *local.command(Server(), "model", "float32", 8, ["--help"])]
    done = subprocess.run(words, env=local.environment(Server(), 0), capture_output=True, timeout=200)
    assert (marked.exists(), done.returncode) == (False, 0), done.stderr
    assert vllm.environment(Server(), 0)["PYTHONSAFEPATH"] == "1"  # older interpreters have no flag for it
