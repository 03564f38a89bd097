"""`mtgrpo report`: what it reads, what it claims, and that a model's words stay words."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtgrpo.errors import ConfigError
from mtgrpo.evaluation.findings import OTHER_BEFORE
from mtgrpo.evaluation.statistics import compare, mean_over_tasks, wilson
from mtgrpo.record import reading
from mtgrpo.record.reading import find_runs, read_metrics, read_runs
from mtgrpo.record.writing import write_versions
from mtgrpo.report import content, main
from mtgrpo.report.charts import chart
from mtgrpo.runtime.text import sparkline
from mtgrpo.types import LEARNING

EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\x00\x1b[31m\u202e&amp;```\n# head [x](js:1)"
SETTINGS = {
    "seed": 3,
    "eval": {"tasks": 40, "samples": 2},
    "task": {"max_steps": 4, "extra": {}},
    "model": {"name": "tiny"},
    "reward": {"success_at": 1.0},
    "trainer": {"steps": 5},
}


def row(stage: str, step: int, **metrics: Any) -> dict[str, Any]:
    return {"stage": stage, "step": step, **{name.replace("__", "/"): value for name, value in metrics.items()}}


def training(steps: int) -> list[dict[str, Any]]:
    return [
        row("warm start", 1, sft__loss=2.5),
        row("warm start", 2, sft__loss=1.5),
        row("evaluation", 1, eval__success=0.25, eval__greedy=0.3),
        *(row(LEARNING, s, reward__mean=s / 10, policy__kl=0.0, time__train_s=2.0) for s in range(1, steps)),
        row(LEARNING, steps, reward__mean=None, eval__success=0.5, time__train_s=4.0),
        row("evaluation", 1, eval__success=0.75, eval__greedy=0.8),
    ]


def trajectory(task: str, reward: float, status: str = "completed", said: str = "391") -> dict[str, Any]:
    call = {"name": "calculator", "arguments": {"e": said}}
    messages = [
        {"role": "system", "content": "Use the tool."},
        {"role": "assistant", "content": "an example in the prompt"},
        {"role": "user", "content": "What is 17 * 23?"},
        {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "name": "calculator", "content": said},
        {"role": "assistant", "content": said, "error": "not JSON"},
    ]
    ended = {"status": status, "reward": reward, "reason": ""}
    return {"task": task, **ended, "answer": "391", "messages": messages, "turns": [{}, {}]}


def make_run(
    folder: Path,
    rows: Sequence[Mapping[str, Any]] = (),
    summary: Mapping[str, Any] | None = None,
    given: Sequence[str] = ("seed=3",),
    trajectories: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> Path:
    """A folder as a run leaves it."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / "trajectories").mkdir()
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(SETTINGS))
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(list(given)))
    choices = {"recipe": "calculator", "task": "calculator", "hydra/launcher": "basic"}
    (folder / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump({"hydra": {"runtime": {"choices": choices}}}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows or training(5)))
    (folder / "notes.txt").write_text("chat: template auto\nstopped\n")
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    for name, found in (trajectories or {}).items():
        (folder / "trajectories" / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    return folder


SUMMARY = {
    "eval/success/before": 0.25,
    "eval/success/after": 0.75,
    "eval/greedy/before": 0.3,
    "eval/greedy/after": 0.8,
    "eval/pass@2/before": 0.4,
    "eval/pass@2/after": 0.9,
    "eval/turns/after": 2.5,
    "train/steps": 5.0,
    "time/sft_s": 30.0,
    "time/rl_s": 600.0,
}


def the_run(folder: Path, **parts: Any) -> Any:
    (run,) = read_runs([make_run(folder, **parts)])
    return run


class Page(HTMLParser):
    """The tags, the attributes and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


# ---------------------------------------------------------------- reading


def test_few_rows_are_all_kept_and_many_are_thinned(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps(row(LEARNING, step, reward__mean=step)) for step in range(1, 10_001)]
    lines[4998:4998] = [json.dumps(row("evaluation", 1, eval__success=0.5))]
    path.write_text("\n".join(lines[:50]))
    assert read_metrics(path).total == len(read_metrics(path).rows) == 50
    path.write_text("\n".join(lines) + "\n")
    found = read_metrics(path, points=100)
    steps = [line["step"] for line in found.stage(LEARNING)]
    assert found.total == 10_001
    assert 50 <= len(steps) <= 101
    assert (steps[0], steps[-1]) == (1, 10_000)
    assert len({after - before for before, after in pairwise(steps[:-1])}) == 1  # evenly
    assert [line["eval/success"] for line in found.stage("evaluation")] == [0.5]  # rare, and never left out
    first = [json.dumps(row("warm start", step, sft__loss=1)) for step in range(1, 1_000)]
    path.write_text("\n".join([*first, *lines, json.dumps(row("evaluation", 90, eval__success=0.9))]) + "\n")
    ends = read_metrics(path, points=100)
    assert [ends.stage(stage)[-1]["step"] for stage in ("warm start", LEARNING, "evaluation")] == [999, 10_000, 90]
    lines[6001] = json.dumps(
        json.loads(lines[6001]) | dict.fromkeys(["eval/success", "eval/turns", "eval/failed"], 0.7)
    )
    path.write_text("\n".join(lines) + "\n")
    assert [line["step"] for line in read_metrics(path, points=100).rows if line.get("eval/success") == 0.7] == [6001]


def test_a_row_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    run = the_run(tmp_path / "run")
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"stage": "reinforcement lear')
    metrics = read_metrics(run.folder / "metrics.jsonl")
    assert (metrics.total, metrics.unreadable, metrics.rows) == (run.metrics.total + 2, 2, run.metrics.rows)
    assert read_metrics(tmp_path / "nowhere").total == 0


def test_runs_of_a_sweep_in_their_order(tmp_path: Path) -> None:
    for number in range(11):
        make_run(tmp_path / "sweep" / str(number))
    other = make_run(tmp_path / "other")
    runs = read_runs(find_runs([tmp_path / "sweep", other, other]))
    assert [run.name for run in runs] == [*(f"sweep/{number}" for number in range(11)), "other"]
    with pytest.raises(ConfigError, match=r"holds no run: no metrics\.jsonl or summary\.json"):
        find_runs([tmp_path / "nowhere"])
    (model := tmp_path / "exported").mkdir()
    (model / "config.json").touch()
    with pytest.raises(ConfigError, match=r"it is a model, which eval and play take as model\.name"):
        find_runs([model])


def test_settings_as_they_are_typed(tmp_path: Path) -> None:
    run = the_run(tmp_path / "run")
    assert run.settings["task"] == "calculator"
    assert run.settings["task.max_steps"] == "4"
    assert run.settings["task.extra"] == "{}"
    assert run.settings["recipe"] == "calculator"
    assert "hydra/launcher" not in run.settings
    assert "trainer.steps" in content.set_by_recipe(run)


# ---------------------------------------------------------------- what it claims


def test_intervals_without_the_conversations_are_as_wide_as_one_sample_per_task(tmp_path: Path) -> None:
    found = content.measurements(the_run(tmp_path / "run", summary=SUMMARY))
    assert [measured.metric for measured in found] == ["success", "greedy", "pass@2"]
    assert (found[0].before, found[0].after, found[0].comparison) == (wilson(0.25, 40), wilson(0.75, 40), None)
    assert content.change(found[0]) == "+50.0 points"
    assert content.interval(found[0].after) == "75.0% (59.8% to 85.8%)"


def test_both_evaluations_are_compared_task_by_task(tmp_path: Path) -> None:
    tasks = [f"task/{number}" for number in range(20)]
    before = [trajectory(task, 0.0) for task in tasks for _ in range(2)]
    after = [trajectory(task, float(number % 4 > 0)) for number, task in enumerate(tasks) for _ in range(2)]
    after += [trajectory("task/0", 1.0, "failed"), trajectory("task/19", 1.0, "truncated")]
    parts = {"evaluation_before": before, "evaluation_after": after}
    (success, *_) = content.measurements(the_run(tmp_path / "run", summary=SUMMARY, trajectories=parts))
    outcomes = [[float(number % 4 > 0)] * 2 for number in range(20)]
    outcomes[19].append(0.0)  # truncated: no success, whatever the reward; the failed one does not count
    assert success.before == mean_over_tasks([[0.0, 0.0]] * 20)
    assert success.after == mean_over_tasks(outcomes)
    assert success.comparison == compare([[0.0, 0.0]] * 20, outcomes)
    assert "p < 0.0001" in content.change(success)


def test_an_evaluation_alone(tmp_path: Path) -> None:
    run = the_run(tmp_path / "run", summary={"eval/success": 0.5, "eval/greedy": None, "eval/pass@2": 2.0})
    success = content.measurements(run)[0]
    assert (success.before, success.after) == (None, wilson(0.5, 40))
    assert [content.interval(measured.after) for measured in content.measurements(run)][1:] == ["", ""]


def test_series_stand_at_the_steps_of_their_stage(tmp_path: Path) -> None:
    found = content.series(the_run(tmp_path / "run"))
    assert found["sft/loss"] == [(1, 2.5), (2, 1.5)]
    assert found["reward/mean"] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]  # without the NaN of step 5
    assert found["eval/success"] == [(0, 0.25), (5, 0.75)]  # the last measurement of step 5
    assert list(found)[:2] == ["reward/mean", "eval/success"]


def test_the_configuration_begins_with_what_differs(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(seed), given=[f"seed={seed}", "+model.name=tiny"]) for seed in (1, 2)]
    (runs[1] / ".hydra" / "config.yaml").write_text(yaml.safe_dump({**SETTINGS, "seed": 4}))
    found = dict(content.configuration(read_runs(runs)))
    assert list(found) == ["Different between the runs", "Given on the command line", "Set by the recipe", "Defaults"]
    assert found["Different between the runs"] == [("seed", ["3", "4"])]
    assert found["Given on the command line"] == [("model.name", ["tiny", "tiny"])]
    assert {key for key, _ in found["Set by the recipe"]} == {"task", "task.max_steps", "trainer.steps", "eval.tasks"}
    assert "reward.success_at" in dict(found["Defaults"])


def test_times(tmp_path: Path) -> None:
    found = dict(content.timing([the_run(tmp_path / "run", summary=SUMMARY)]))
    assert found["warm start"] == ["0:30"]
    assert found["reinforcement learning, without evaluation"] == ["10:00"]
    assert found["time/train_s, mean of a step"] == ["2.4"]


def test_phases_that_took_no_time_are_left_out(tmp_path: Path) -> None:
    rows = [{"stage": LEARNING, "step": n, "profile/check_s": n - 1.0, "profile/forward_s": 0.0} for n in (1, 2)]
    found = dict(content.timing([the_run(tmp_path / "run", rows=rows)]))
    assert found["profile/check_s, mean of a step"] == ["0.5"]
    assert "profile/forward_s, mean of a step" not in found


def test_examples_of_success_and_failure(tmp_path: Path) -> None:
    rewards = [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    found = [trajectory(f"task/{number // 2}", reward) for number, reward in enumerate(rewards)]
    run = the_run(tmp_path / "run", trajectories={"step_000005": found, "step_000004": found[:1]})
    source, examples = content.examples(run)
    assert source == "step 5 of training"
    assert [(example.success, example.row["task"]) for example in examples] == [
        (True, "task/1"),
        (True, "task/3"),
        (False, "task/0"),
        (False, "task/2"),
    ]
    assert [message["role"] for message in examples[0].prompt] == ["system", "assistant", "user"]
    assert [message["role"] for message in examples[0].said] == ["assistant", "tool", "assistant"]
    assert reading.calls(examples[0].said[0]) == ['calculator({"e": "391"})']


# ---------------------------------------------------------------- the page


def test_the_page_needs_nothing_and_shows_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", summary=SUMMARY, trajectories={"step_000005": [trajectory("task/1", 1.0)]})
    write_versions(run, 2)
    assert main([str(run)]) == 0
    assert capsys.readouterr().out == f"the report is in {run / 'report.html'}\n"
    page = Page((run / "report.html").read_text())
    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object", "form", "a"} & set(page.tags)
    assert not {"src", "href", "action"} & {name for name, _ in page.attributes}
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    for said in [
        "75.0%",
        "59.8% to 85.8%",
        "+50.0 points",
        "reward/mean",
        "success: task/1",
        "calculator",
        "What is 17 * 23?",
    ]:
        assert said in page.text
    for said in ["recipe calculator", "expected 391", "trainer.steps", "10:00", "transformers"]:
        assert said in page.text
    assert page.tags.count("svg") == 5


def test_what_a_model_wrote_stays_text(tmp_path: Path) -> None:
    evil = trajectory(EVIL, 1.0, said=EVIL) | {"answer": EVIL, "reason": EVIL, "status": "completed"}
    lines = [
        *training(3),
        row(LEARNING, 4, **{EVIL: 0.5}),
        row(LEARNING, 5, **{EVIL: 1.5}),
    ]
    run = make_run(tmp_path / "run", lines, given=[f"seed={EVIL}"], trajectories={"step_000005": [evil]})
    (run / "notes.txt").write_text(EVIL)
    (run / "versions.json").write_text(json.dumps({EVIL: EVIL}))
    main([str(run)])
    text = (run / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert not {"script", "img"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>\\x00\\x1b[31m\\u202e&amp;```" in page.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e]", text)
    main([str(run), "--markdown"])
    markdown = (run / "report.md").read_text()
    outside = re.sub(r"^(`{3,})text\n.*?^\1$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"(?<!\\)<", outside)
    assert not re.search(r"(?<!\\)\]\(", outside)
    assert re.findall("^# .*", outside, re.MULTILINE) == ["# Report: run"]


def test_markdown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", summary=SUMMARY, trajectories={"step_000005": [trajectory("task/1", 1.0)]})
    target = tmp_path / "card.md"
    main([str(run), "--markdown", "--out", str(target)])
    text = target.read_text()
    assert "| success | 25.0% (14.2% to 40.2%) | 75.0% (59.8% to 85.8%) | +50.0 points |" in text
    assert "| reward/mean | ▁▃▆█ | 0.1 | 0.4 | 0.1 | 0.4 |" in text
    assert "**Success: task/1, reward 1, completed, expected 391**" in text
    tables = re.findall(r"^\|.*\|$(?:\n^\|.*\|$)*", text, re.MULTILINE)
    assert len(tables) >= 4
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_runs_side_by_side(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / name, summary={**SUMMARY, "eval/success/after": rate})
        for name, rate in (("a", 0.5), ("b", 0.9))
    ]
    main([*map(str, runs), "--out", str(tmp_path / "both.html")])
    page = Page((tmp_path / "both.html").read_text())
    assert "Report: 2 runs" in page.text
    assert {"50.0%", "90.0%"} <= set(re.findall(r"\d+\.\d%", page.text))
    assert page.tags.count("svg") == 5  # both in each


def test_runs_are_compared_with_the_first_task_by_task(tmp_path: Path) -> None:
    def evaluation(solved: int) -> dict[str, Any]:
        rows = [trajectory(f"t/{n}", float(n < solved)) for n in range(10) for _ in range(2)]
        return {"summary": SUMMARY, "trajectories": {"evaluation_after": rows}}

    folders = [make_run(tmp_path / name, **evaluation(solved)) for name, solved in (("a", 2), ("b", 8), ("c", 2))]
    b, c = content.against_first(read_runs(folders))
    assert b.startswith("b against a, success on 10 tasks: +60.0 points (") and b.endswith(", p = 0.031")  # 2 / 2**6
    assert c.startswith("c against a, success on 10 tasks: +0.0 points (") and c.endswith(", p = 1")


def test_what_was_measured_otherwise_is_not_compared(tmp_path: Path) -> None:
    same, other = (
        make_run(tmp_path / str(n), summary={**SUMMARY, **more}) for n, more in enumerate(({}, {OTHER_BEFORE: 1.0}))
    )
    compared, not_compared = (content.results(read_runs([run]))[0][1] for run in (same, other))
    assert compared[:3] == not_compared[:3] and compared[3].endswith(" points")
    assert not_compared[3] == "none: before was measured otherwise"


def test_a_run_that_has_not_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    main([str(run)])
    said = "no summary.json: it runs, or it ended after 5 steps of training. stopped"
    assert said in Page((run / "report.html").read_text()).text
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").touch()
    assert main([str(empty)]) == 0
    assert "None were recorded." in (empty / "report.html").read_text()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="choose another place with --out FILE"):
        main([str(run), "--out", str(tmp_path / "nowhere" / "report.html")])


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [-3.0, 1e-12, 4.0], [1e9, 2e9], list(range(1000))])
def test_a_curve_stays_in_its_frame(values: list[float]) -> None:
    drawn = chart("m", [[(float(step), value) for step, value in enumerate(values)], None])
    found = re.findall(r"(-?[\d.]+),(-?[\d.]+)", " ".join(re.findall(r'points="([^"]*)"', drawn)))
    assert found
    for left, top in found:
        assert 50 <= float(left) <= 352
        assert 8 <= float(top) <= 170
    assert len(drawn) < 20_000


def test_a_line_of_bars() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 1.0], 8) == "▁▁"
    assert sparkline([0.123456789] * 100, 7) == "▁" * 7  # whatever rounding does to means
    assert sparkline([], 8) == ""
    assert len(sparkline(list(range(1000)), 30)) == 30


def test_a_million_rows(tmp_path: Path) -> None:
    line = '{{"stage": "reinforcement learning", "step": {}, "reward/mean": {}, "policy/kl": 0.001}}\n'
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.writelines(line.format(step, 1 - math.exp(-step / 3e5)) for step in range(1, 1_000_001))
    code = "import sys; from mtgrpo.report import main; main(sys.argv[1:]); print(open('/proc/self/status').read())"
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(re.findall(r"VmHWM:\s+(\d+) kB", run.stdout)[0]) < 200 * 1024
    assert (tmp_path / "report.html").stat().st_size < 500_000
    assert "of 1,000,000 rows are drawn" in (tmp_path / "report.html").read_text()
