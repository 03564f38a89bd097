"""The record of a run that an evaluation takes up: it may be somebody else's, or another version's."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.types import RunMode

from mtgrpo import cli
from mtgrpo.config.compose import Configured, ExperimentLoader, compose, composed_from, parse
from mtgrpo.config.trust import sign
from mtgrpo.errors import ConfigError

EVIL = "from pathlib import Path\nPath('ran').touch()\ndef f(x: int) -> str:\n    '''A tool.'''\n    return ''\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a run in it that brought a file of code."""
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("evil.py").write_text(EVIL)
    return tmp_path


@functools.cache
def usual() -> Configured:
    return compose(parse([]))


def recorded(place: Path, values: dict[str, Any] | None = None, **choices: Any) -> Path:
    """The folder of a run whose record has these values and choices in place of the usual ones."""
    made = usual()
    record = place / ".hydra"
    record.mkdir(exist_ok=True)
    (record / "config.yaml").write_text(yaml.safe_dump({**yaml.safe_load(made.values), **(values or {})}))
    chosen = {**made.choices, **choices}
    (record / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"runtime": {"choices": chosen}}}))
    return place


def taken_up(place: Path, *words: str) -> Configured:
    return compose(parse(words), run=place)


SANDBOX = {"kind": "rlimits", "folders": ["/home"], "url": "http://evil", "python": "./evil.sh"}


@pytest.mark.parametrize(
    ("values", "choices", "named"),
    [
        ({"environment": {"tools": ["evil.py:f"]}}, {}, "environment.tools.evil.py:f='evil.py:f' (code)"),
        ({"environment": {"tools": {"evil.py:f": {}}}}, {}, "environment.tools.evil.py:f='evil.py:f' (code)"),
        (
            {"environment": {"tools": {"./calculator": {}}}},
            {},
            "environment.tools../calculator='./calculator' (unknown)",
        ),
        (
            {"environment": {"tools": {"mcp": {"servers": {"a": {"command": ["rm", "-r"]}}}}}},
            {},
            "environment.tools.mcp.servers={'a': {'command': ['rm', '-r']}} (program)",
        ),
        (
            {"environment": {"tools": ["evil.${model.name}:f"]}, "model": {"name": "py"}},
            {},
            "environment.tools=['evil.${model.name}:f'] (secret)",
        ),
        (
            {"environment": {"tools": ["${chat.template}"]}, "chat": {"template": "evil.py:f"}},
            {},
            "environment.tools.evil.py:f='evil.py:f' (code); chat.template='evil.py:f' (file)",
        ),
        ({"environment": {"tools": [r"\${oc.env:A}:f"]}}, {}, r"environment.tools=['\\${oc.env:A}:f'] (secret)"),
        ({"seed": "${oc.env:A}"}, {}, "seed='${oc.env:A}' (secret)"),
        ({}, {"reward": ["numeric", "evil.py:f"]}, "reward='evil.py:f' (code)"),
        ({}, {"reward": "../reward/evil"}, "reward='../reward/evil' (unknown)"),
        ({}, {"engine": "server"}, "engine='Server' (program)"),
        ({}, {"engine": "auto"}, "engine='Auto' (program)"),
        ({"engine": {"python": "./evil.sh"}}, {"engine": "server"}, "engine.python='./evil.sh' (program)"),
        ({"engine.python": "./evil.sh"}, {"engine": "server"}, "engine.python='./evil.sh' (program)"),
        ({"engine": {"url": ["http://evil"]}}, {"engine": "server"}, "engine.url=['http://evil'] (network)"),
        ({"engine": {"arguments": ["--load"]}}, {"engine": "server"}, "engine.arguments=['--load'] (program)"),
        ({"engine": {"python": "./evil.sh"}}, {}, "engine.python='./evil.sh' (unknown)"),
        (
            {"environment": {"tools": {"python": {"sandbox": SANDBOX}}}},
            {},
            "environment.tools.python.sandbox.kind='rlimits' (may run); "
            "environment.tools.python.sandbox.folders=['/home'] (folder); "
            "environment.tools.python.sandbox.url='http://evil' (network); "
            "environment.tools.python.sandbox.python='./evil.sh' (program)",
        ),
        (
            {"reward": {"sandbox": {"kind": "rlimits"}}},
            {"reward": "unit_tests"},
            "reward.sandbox.kind='rlimits' (may run)",
        ),
        ({"reward.sandbox.kind": "rlimits"}, {"reward": "unit_tests"}, "reward.sandbox.kind='rlimits' (may run)"),
        ({"reward": {"sandbox.kind": "rlimits"}}, {"reward": "unit_tests"}, "reward.sandbox.kind='rlimits' (may run)"),
        (
            {"reward": {"url": "http://evil", "key": "AWS_SECRET_ACCESS_KEY", "cache": "/tmp/a"}},
            {"reward": "judge"},
            "reward.url='http://evil' (network); reward.key='AWS_SECRET_ACCESS_KEY' (secret); "
            "reward.cache='/tmp/a' (folder)",
        ),
        (
            {"reward": {"required_patterns": ["(a+)+b"], "forbidden_patterns": ["####|boxed"]}},
            {"reward": "format"},
            "reward.required_patterns=['(a+)+b'] (may never end)",
        ),
        ({"environment": {"answer_pattern": "(a|a){9}"}}, {}, "environment.answer_pattern='(a|a){9}' (may never end)"),
        (
            {"reward": {"of": {"judge": {"url": "http://evil", "weight": 2}}}},
            {"reward": ["judge", "numeric"]},
            "reward.of.judge.url='http://evil' (network)",
        ),
        (
            {"reward": {"judge": {"url": "http://evil", "weight": 2}, "of": None}},
            {"reward": ["judge", "numeric"]},
            "reward.judge={'url': 'http://evil', 'weight': 2} (unknown)",
        ),
        (
            {"reward": {"of": {"context_efficiency": {"of": ["evil.py:f"]}}}},
            {"reward": "composed"},
            "reward.of.context_efficiency.of.evil.py:f='evil.py:f' (code)",
        ),
        (
            {"task": {"system_prompt": "file:/etc/passwd"}},
            {"task": "word_problems"},
            "task.system_prompt='file:/etc/passwd' (file)",
        ),
        ({"task.prompt_template": "file:~/.netrc"}, {}, "task.prompt_template='file:~/.netrc' (file)"),
        ({"task": {"path": "/data"}}, {"task": "gsm8k"}, "task='Gsm8k' (network); task.path='/data' (folder)"),
        (
            {"task": {"of": [{"task": "gsm8k", "weight": 2, "path": "/data"}, {"task": "hub", "path": "a/b"}]}},
            {"task": "mixed"},
            "task.of.0.path='/data' (folder); task.of.1.path='a/b' (network)",
        ),
        ({"environment": {"game": "evil:Env"}}, {"environment": "gymnasium"}, "environment.game='evil:Env' (code)"),
        (
            {"environment": {"settings": {"env_id": "evil:Env"}}},
            {"environment": "gymnasium"},
            "environment.settings={'env_id': 'evil:Env'} (code)",
        ),
        ({"agent": {"environment": "evil"}}, {"agent": "verifiers"}, "agent.environment='evil' (code)"),
        ({"agent": {"function": "evil.py:f"}}, {"agent": "python"}, "agent.function='evil.py:f' (code)"),
        ({"agent": {"train": "evil.py:f"}}, {"agent": "verifiers"}, "agent.train='evil.py:f' (code)"),
        (
            {"eval": {"sets": {"a": {"task": "verifiers", "python": "./evil.sh"}}}},
            {},
            "eval.sets.a.python='./evil.sh' (program)",
        ),
        (
            {"eval": {"sets": {"gsm8k": {"system_prompt": "file:a"}}}},
            {},
            "eval.sets.gsm8k.system_prompt='file:a' (file)",
        ),
        ({"eval.sets": {"a": {"task": "evil.py:f"}}}, {}, "eval.sets.a={'task': 'evil.py:f'} (code)"),
        ({"agent": {"argv": ["touch", "ran"]}}, {"agent": "command"}, "agent.argv=['touch', 'ran'] (program)"),
        ({"chat": {"template": "a.jinja"}}, {}, "chat.template='a.jinja' (file)"),
        ({"chat": {"template": 7}}, {}, "chat.template=7 (file)"),
        ({"chat": "auto"}, {}, "chat='auto' (unknown)"),
        ({"model": {"name": "a/b"}}, {}, "model.name='a/b' (network)"),
        ({"sft": {"demonstrations": "/home"}}, {}, "sft.demonstrations='/home' (file)"),
        ({"never": 1}, {}, "never=1 (unknown)"),
        ({5: 1}, {}, "5=1 (unknown)"),
        ({"a\x1b[2J\u202e": "b\x1b\n"}, {}, r"a\x1b[2J\u202e='b\x1b\n' (unknown)"),
    ],
)
def test_what_a_received_record_would_reach_is_refused_by_its_name(
    values: dict[str, Any], choices: dict[str, Any], named: str, place: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        taken_up(recorded(place, values, **choices))
    wanted, _, cure = (
        str(refused.value)
        .partition("may not: ")[2]
        .rpartition("; type these settings yourself, or, where you trust it, ")
    )
    assert cure == "add trust_code=true" and str(refused.value).isprintable()
    assert set(named.split("; ")) <= set(wanted.split("; ")), wanted
    assert not (place / "ran").exists()


@pytest.mark.parametrize(
    ("values", "choices", "typed"),
    [
        ({"task": {"path": "/theirs"}}, {"task": "jsonl"}, ["task.path=/mine"]),
        ({"task": {"path": "/theirs"}}, {"task": "jsonl"}, ["task=calculator"]),
        ({"task.path": "/theirs", "task": {}}, {"task": "jsonl"}, ["task=calculator"]),
        ({"model": {"name": "a/b"}}, {}, ["model.name=tiny"]),
        ({"eval": {"sets": ["evil.py:f"]}}, {}, ["eval.sets=null"]),
        ({"eval": {"sets": ["evil.py:f"]}}, {}, ["~eval.sets"]),
        ({"environment": {"tools": {"search": {"corpus": "/a"}}}}, {}, ["environment.tools.search.corpus=/mine"]),
        (
            {"reward": {"of": {"ground_truth": {"file": "a"}}}},
            {"reward": ["ground_truth"]},
            ["reward.ground_truth.file=''"],
        ),
        ({"task": {"path": "/theirs"}}, {"task": "gsm8k"}, ["task=gsm8k", "task.path=/mine"]),
        ({"eval": {"sets": ["gsm8k"]}}, {}, ["eval.sets=[word_problems]"]),
        ({"engine": {}}, {"engine": "server"}, ["engine=server"]),
        ({"engine": {}}, {"engine": "server"}, ["engine=local"]),
        ({"reward": {"sandbox": {"kind": "rlimits"}}}, {"reward": "unit_tests"}, ["reward.sandbox={kind: bubblewrap}"]),
    ],
)
def test_what_the_reader_typed_stands_in_place_of_the_record(
    values: dict[str, Any], choices: dict[str, Any], typed: list[str], place: Path
) -> None:
    run = recorded(place, values, **choices)
    with pytest.raises(ConfigError, match="add trust_code=true"):
        taken_up(run)
    assert not set(_texts(yaml.safe_load(taken_up(run, *typed).values))) & {"/theirs", "a/b", "evil.py:f", "/a", "a"}


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict | list):
        return [text for each in (value.values() if isinstance(value, dict) else value) for text in _texts(each)]
    return [str(value)]


@pytest.mark.parametrize(
    ("values", "choices", "typed"),
    [
        ({"reward": {"sandbox": {"kind": "rlimits"}}}, {"reward": "unit_tests"}, "reward.sandbox={timeout_s: 1}"),
        ({"reward": {"url": "http://evil"}}, {"reward": "judge"}, "reward=judge"),
        ({"environment": {"tools": {"search": {"corpus": "/a"}}}}, {}, "environment.tools.search.results=3"),
    ],
)
def test_what_the_reader_typed_beside_the_record_vouches_for_nothing_in_it(
    values: dict[str, Any], choices: dict[str, Any], typed: str, place: Path
) -> None:
    with pytest.raises(ConfigError, match="add trust_code=true"):
        taken_up(recorded(place, values, **choices), typed)


def test_a_run_that_this_user_made_needs_no_trust(place: Path, own_settings: Path) -> None:
    run = recorded(place, {"environment": {"tools": ["evil.py:f"]}})
    sign(run)
    key = own_settings / "mtgrpo" / "key"
    assert key.stat().st_mode & 0o777 == 0o600 and len(key.read_bytes()) == 32
    taken_up(run)
    assert (place / "ran").exists()


@pytest.mark.parametrize(
    "change", ["config.yaml", "hydra.yaml", "signature", "none", "copied", "other key", "open key"]
)
def test_a_record_that_another_user_made_or_changed_counts_as_received(
    change: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place / "mine"))
    run = recorded(place, {"environment": {"tools": ["evil.py:f"]}})
    sign(run)
    record = run / ".hydra"
    if change in ("config.yaml", "hydra.yaml"):
        (record / change).write_bytes((record / change).read_bytes() + b"\n")
    elif change == "signature":
        (record / change).write_text("0" * 64)
    elif change == "none":
        (record / "signature").unlink()
    elif change == "copied":
        place.joinpath("theirs").mkdir()
        run = recorded(place / "theirs", {"environment": {"tools": ["evil.py:f", "calculator"]}})
        shutil.copy(record / "signature", run / ".hydra")
    elif change == "other key":
        monkeypatch.setenv("XDG_CONFIG_HOME", str(place / "theirs"))
    else:
        (place / "mine" / "mtgrpo" / "key").chmod(0o644)
    with pytest.raises(ConfigError, match="add trust_code=true"):
        taken_up(run)


def test_a_run_is_not_signed_where_no_key_can_be_kept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place / "evil.py"))  # a file
    run = recorded(place)
    sign(run)
    assert not (run / ".hydra" / "signature").exists()


@pytest.mark.parametrize("part", [".hydra", ".hydra/config.yaml", ".hydra/hydra.yaml"])
def test_a_record_is_read_from_the_run_s_folder_alone(part: str, place: Path) -> None:
    run = recorded(place)
    (run / part).rename(place / "elsewhere")
    (run / part).symlink_to(place / "elsewhere")
    with pytest.raises(ConfigError, match="is a link or no file"):
        taken_up(run)


def test_a_pipe_is_no_record(place: Path) -> None:
    run = recorded(place)
    (run / ".hydra" / "config.yaml").unlink()
    os.mkfifo(run / ".hydra" / "config.yaml")
    with pytest.raises(ConfigError, match="is a link or no file"):
        taken_up(run)


def test_a_record_sends_nothing_to_its_own_tracker(place: Path) -> None:
    run = recorded(place, {"log": {"mlflow": {"tracking_uri": "http://evil"}}})
    assert taken_up(run).experiment.log == ["console", "jsonl"]


def test_what_runs_in_the_usual_sandbox_needs_no_trust(place: Path) -> None:
    taken_up(recorded(place, {"environment": {"tools": {"python": {"sandbox": {"kind": "bubblewrap"}}}}}))


def test_code_that_a_record_names_is_run_where_it_is_trusted(place: Path) -> None:
    run = recorded(place, {"environment": {"tools": ["evil.py:f"]}})
    with pytest.raises(ConfigError, match="trust_code=true"):
        taken_up(run, "trust_code=false")
    taken_up(run, "trust_code=true")
    assert (place / "ran").exists()


def test_what_a_record_gives_hydra_is_left_out(place: Path) -> None:
    callback = {"x": {"_target_": "mtgrpo.parts.extension.load_file", "path": "evil.py"}}
    for given in (
        {"hydra": {"callbacks": callback, "job": {"env_set": {"A": "b"}}}},
        {"hydra.callbacks": callback, "hydra.job.env_set": {"A": "b"}},
    ):
        run = recorded(place, given)
        hydra = ExperimentLoader(run=run).load_configuration("base", [], RunMode.RUN).hydra
        assert (hydra.callbacks, hydra.job.env_set) == ({}, {})


@pytest.mark.parametrize(
    ("content", "lacking"),
    [
        ({"runtime": {"choices": {"task": "gsm8k"}}}, "'environment'"),
        ({"runtime": None}, "'choices'"),
        ({}, "'runtime'"),
    ],
)
def test_a_record_of_another_version_is_told(content: dict[str, Any], lacking: str, place: Path) -> None:
    run = recorded(place)
    (run / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump({"hydra": content}))
    with pytest.raises(ConfigError, match=f"lacks {lacking}: another version of mtgrpo wrote it"):
        taken_up(run)


def test_a_checkpoint_is_found_from_the_folder_that_the_command_was_typed_in(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = recorded(place) / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    measured: list[str] = []
    monkeypatch.setattr("mtgrpo.commands.experiments._checked", lambda *_: None)

    async def note(experiment: Any, _: Path) -> None:
        measured.append(experiment.model.name)

    monkeypatch.setattr("mtgrpo.stages.evaluate.run_evaluation", note)
    words = ["eval", "checkpoint=checkpoints/step_000001", "hydra.job.chdir=true", "hydra.run.dir=there"]
    cli.run_command(words)
    assert measured == [str(checkpoint)]


@pytest.mark.parametrize(
    ("words", "began", "hints"),
    [
        ("trust_code=true environment.tools=[away.py:tool]", "/tmp", True),
        ("trust_code=true environment.tools=[away.py:tool]", "/nowhere/here", False),  # the run came from elsewhere
        ("trust_code=true environment.tools=[] eval.tasks=0", "/tmp", False),
        ("", "/tmp", False),  # the record is refused: nothing of it is quoted
    ],
)
def test_a_file_that_the_record_names_is_missed_where_another_folder_is_meant(
    words: str, began: str, hints: bool, place: Path
) -> None:
    run = recorded(place, {"environment": {"tools": [f"no file {place}/evil.py:f"]}})
    (run / "checkpoints/step_000001").mkdir(parents=True)
    hydra = yaml.safe_load((run / ".hydra/hydra.yaml").read_text())
    hydra["hydra"]["runtime"]["cwd"] = began
    (run / ".hydra/hydra.yaml").write_text(yaml.safe_dump(hydra))
    with pytest.raises(ConfigError) as refused:
        cli.run_command(["eval", f"checkpoint={run}", *words.split()])
    hint = f"; names in the record of {run} are relative to '/tmp', where it was started: go there"
    assert str(refused.value).endswith(hint) == hints and "\n" not in str(refused.value)


def test_an_evaluation_goes_on_in_its_folder_where_that_is_asked_for(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (recorded(place) / "checkpoints" / "step_000001").mkdir(parents=True)
    measured: list[Path] = []
    monkeypatch.setattr("mtgrpo.commands.experiments._checked", lambda _, config, *others: composed_from(config))

    async def note(_: object, folder: Path) -> None:
        measured.append(folder)

    monkeypatch.setattr("mtgrpo.stages.evaluate.run_evaluation", note)
    words = ["eval", "checkpoint=checkpoints/step_000001", "hydra.run.dir=there"]
    cli.run_command(words)
    with pytest.raises(ConfigError, match="there is not empty"):
        cli.run_command(words)
    cli.run_command([*words, "resume=true"])
    assert len(measured) == 2 and len({folder.resolve() for folder in measured}) == 1
