"""The record of a run that an evaluation takes up: it may be somebody else's, or another version's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.types import RunMode

from mtgrpo import cli
from mtgrpo.config.compose import Composed, ExperimentLoader, compose, composed_from, parse
from mtgrpo.errors import ConfigError

EVIL = "from pathlib import Path\nPath('ran').touch()\ndef f(x: int) -> str:\n    '''A tool.'''\n    return ''\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a run in it that brought a file of code."""
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("evil.py").write_text(EVIL)
    return tmp_path


def recorded(place: Path, values: dict[str, Any] | None = None, **choices: Any) -> Path:
    """The folder of a run whose record has these values and choices in place of the usual ones."""
    made = compose(parse(["recipe=gsm8k"]))
    record = place / ".hydra"
    record.mkdir(exist_ok=True)
    (record / "config.yaml").write_text(yaml.safe_dump({**yaml.safe_load(made.values), **(values or {})}))
    chosen = {**made.choices, **choices}
    (record / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"runtime": {"choices": chosen}}}))
    return place


def taken_up(place: Path, *words: str) -> Composed:
    return compose(parse(words), run=place)


@pytest.mark.parametrize(
    ("values", "choices", "named"),
    [
        ({"environment": {"tools": ["evil.py:f"]}}, {}, "evil.py:f"),
        ({"environment": {"tools": {"evil.py:f": {}}}}, {}, "evil.py:f"),
        ({"environment": {"tools": {"mcp": {"servers": {"a": {"command": ["rm", "-r"]}}}}}}, {}, "mcp"),
        ({"environment": {"tools": ["evil.${model.name}:f"]}, "model": {"name": "py"}}, {}, "evil.py:f"),
        ({"environment": {"tools": ["evil.${oc.env:AWAY}:f"]}}, {}, "evil.${oc.env:AWAY}:f"),
        ({"environment": {"tools": [r"\${oc.env:AWAY}:f"]}}, {}, "${oc.env:AWAY}:f"),
        ({}, {"reward": ["numeric", "evil.py:f"]}, "evil.py:f"),
        ({"engine": {"python": "./evil.sh"}}, {"engine": "server"}, "engine.python=./evil.sh"),
        ({"engine": {"url": ["http://evil"]}}, {"engine": "server"}, "engine.url=['http://evil']"),
        ({"environment": {"tools": {"python": {"sandbox": {"kind": "rlimits"}}}}}, {}, "sandbox.kind=rlimits"),
        ({"reward": {"sandbox": {"folders": ["/home"]}}}, {"reward": "unit_tests"}, "sandbox.folders=['/home']"),
        ({"agent": {"python": "./evil.sh"}}, {"agent": "verifiers"}, "verifiers"),
        ({"eval": {"sets": {"a": {"task": "verifiers", "python": "./evil.sh"}}}}, {}, "verifiers"),
        ({"agent": {"argv": ["touch", "ran"]}}, {"agent": "command"}, "agent=command with {'argv': ['touch', 'ran']}"),
    ],
)
def test_code_that_a_record_names_is_not_run_unasked(
    values: dict[str, Any], choices: dict[str, Any], named: str, place: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        taken_up(recorded(place, values, **choices))
    assert f"{named}; where you trust it, add trust_code=true" in str(refused.value)
    assert not (place / "ran").exists()


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
    callback = {"x": {"_target_": "mtgrpo.extension.load_file", "path": "evil.py"}}
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
    monkeypatch.setattr("mtgrpo.cli.checked", lambda *_: None)
    monkeypatch.setattr("mtgrpo.stages.evaluate.run_evaluation", lambda given, _: measured.append(given.model.name))
    words = ["eval", "checkpoint=checkpoints/step_000001", "hydra.job.chdir=true", "hydra.run.dir=there"]
    cli.run_command(words)
    assert measured == [str(checkpoint)]


def test_an_evaluation_goes_on_in_its_folder_where_that_is_asked_for(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (recorded(place) / "checkpoints" / "step_000001").mkdir(parents=True)
    measured: list[Path] = []
    monkeypatch.setattr("mtgrpo.cli.checked", lambda _, config, spared: composed_from(config))
    monkeypatch.setattr("mtgrpo.stages.evaluate.run_evaluation", lambda _, folder: measured.append(folder))
    words = ["eval", "checkpoint=checkpoints/step_000001", "hydra.run.dir=there"]
    cli.run_command(words)
    with pytest.raises(ConfigError, match="there is not empty"):
        cli.run_command(words)
    cli.run_command([*words, "resume=true"])
    assert len(measured) == 2 and len({folder.resolve() for folder in measured}) == 1
