"""A checkpoint as a model for others: transformers and peft load it and compute what the checkpoint does."""

from __future__ import annotations

import ast
import json
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from mtgrpo import cli, preset
from mtgrpo.commands import export, prompted
from mtgrpo.commands.prompted import reach_nothing
from mtgrpo.config.trust import sign
from mtgrpo.environments.tool_use import OutageError
from mtgrpo.errors import ConfigError
from mtgrpo.model.load import load_model
from mtgrpo.model.settings import LoRA, ModelSettings
from mtgrpo.model.tokenizer import load_tokenizer
from mtgrpo.stages.trainer import next_commands
from mtgrpo.weights import checkpoint
from mtgrpo.weights.saved import TRAINING_FILES
from saving import save_model

IDS = torch.tensor([[5, 9, 200, 31, 77]])
STATE: dict[str, Any] = {
    "settings": {"model.name": "some/model", "algorithm": "grpo", "optimizer.lr": "1e-05"},
    "success": {0: 0.25, 20: 0.75, 40: 0.5},
    "summary": {},
    "stream": {},
}


def saved(
    folder: Path, rank: int = 0, value_head: bool = False, state: dict[str, Any] = STATE
) -> tuple[Path, torch.Tensor]:
    """A checkpoint, and the logits of its policy."""
    save_model(load_model(ModelSettings("tiny"), 0), load_tokenizer("tiny"), folder / "base")
    model = load_model(ModelSettings(str(folder / "base"), lora=LoRA(rank), value_head=value_head), 0).cpu()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.requires_grad and "value" not in name:
                weight.add_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    copied = checkpoint.ModelSnapshot(model, {"a": torch.ones(2)})
    path = checkpoint.write(folder, 20, copied, state, checkpoint.tokenizer_files(load_tokenizer("tiny")))
    return path, logits(model)


@torch.no_grad()
def logits(model: PreTrainedModel | PeftModel) -> torch.Tensor:
    return model.float().eval()(input_ids=IDS).logits


def exported(path: Path, to: str, out: Path) -> Path:
    with pytest.raises(SystemExit) as left:
        cli.main(["export", str(path), "--to", to, "--out", str(out)])
    assert not left.value.code
    return out


@pytest.mark.parametrize(("to", "rank", "value_head"), [("hf", 0, False), ("hf", 0, True), ("merged", 4, False)])
def test_what_is_exported_is_a_model_of_transformers(to: str, rank: int, value_head: bool, tmp_path: Path) -> None:
    path, expected = saved(tmp_path, rank, value_head)
    out = exported(path, to, tmp_path / "out")
    model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(out).chat_template == load_tokenizer("tiny").chat_template
    names = {file.name for file in out.iterdir()}
    assert names.isdisjoint(TRAINING_FILES) and not any("adapter" in name for name in names)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft, of transformers
def test_an_adapter_is_exported_for_peft(tmp_path: Path) -> None:
    path, expected = saved(tmp_path, rank=4)
    out = exported(path, "peft", tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, out)), expected, rtol=1e-4, atol=1e-4)
    assert not (out / "model.safetensors").exists()


def test_the_card_says_what_was_trained_and_how_well_it_did(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    card = (exported(path, "hf", tmp_path / "out") / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "\nbase_model: some/model\n" in card
    assert (
        "step 20 of reinforcement learning" in card
        and "| 0 | 0.250 |\n| 20 | 0.750 |\n" in card
        and "| 40 |" not in card
    )
    assert "| `algorithm` | `grpo` |" in card


def test_the_card_of_a_warm_start_speaks_of_no_reinforcement_learning(tmp_path: Path) -> None:
    state = {name: value for name, value in STATE.items() if name != "stream"} | {"sft": {"step": 50, "tasks": {}}}
    path, _ = saved(tmp_path, state=state)
    card = (exported(path, "hf", tmp_path / "out") / "README.md").read_text()
    assert "step 50 of the warm start, supervised" in card and "reinforcement" not in card


def test_the_card_has_what_a_run_measured_after_its_last_checkpoint(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    (tmp_path / "summary.json").write_text('{"train/steps": 20, "eval/success/after": 0.875}')
    assert "| 0 | 0.250 |\n| 20 | 0.875 |\n" in (exported(path, "hf", tmp_path / "out") / "README.md").read_text()


def test_the_newest_checkpoint_of_a_run_is_not_what_a_crash_left_beside_it(tmp_path: Path) -> None:
    for name in ("step_000001", "step_000002", "step_000002.replaced"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match="checkpoints/step_000002 is not a checkpoint"):
        export.main([str(tmp_path), "--out", str(tmp_path / "out")])
    assert f"play checkpoint={tmp_path}/checkpoints/step_000002  " in next_commands(tmp_path, preset("calculator"))


@pytest.mark.parametrize(
    "state", [{}, {"settings": {}}, {"settings": 5, "success": {}}, {"settings": {}, "success": 5}]
)
def test_the_state_of_no_run_is_refused(state: dict[str, object], tmp_path: Path) -> None:
    model = load_model(ModelSettings("tiny"), 0)
    path = checkpoint.write(tmp_path, 20, checkpoint.ModelSnapshot(model, {}), state, {})
    with pytest.raises(ConfigError, match=r"its state\.json is not that of a run"):
        export.main([str(path), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


TOOL = {"name": "calculator", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
CALL = {"name": "calculator", "arguments": {"expression": "2 + 3"}}


def conversation(question: str, reward: float, *said: dict[str, object]) -> dict[str, object]:
    """A row of a run's trajectories, whose prompt has a worked example."""
    opening = [("system", "Be brief."), ("user", "1 + 1?"), ("assistant", "2"), ("user", question)]
    messages = [*({"role": role, "content": content} for role, content in opening), *said]
    turns = [{}] * sum(message["role"] == "assistant" for message in said)
    return {"status": "completed", "reward": reward, "messages": messages, "turns": turns}


def keep_conversations(run: Path) -> None:
    answered = [{"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "5"}]
    rows = [
        {**conversation("7 + 1?", 0.0, {"role": "assistant", "content": "9"}), "tools": [{"function": TOOL}]},
        conversation("2 + 3?", 1.0, *answered, {"role": "assistant", "content": "5"}),
    ]
    (run / "trajectories").mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "trajectories/evaluation_after.jsonl").write_text(lines + '{"messages": 5}\n{"cut')


def test_it_holds_what_the_model_was_trained_to_see(tmp_path: Path) -> None:
    settings = {"environment.tools": '["calculator"]', "sampling.max_new_tokens": "40", "environment.max_turns": "3"}
    saved(tmp_path, state={**STATE, "settings": {**STATE["settings"], **settings}})
    keep_conversations(tmp_path)
    out = exported(tmp_path, "hf", tmp_path / "out")  # of a run: its last checkpoint
    tools, opening = (json.loads((out / name).read_text()) for name in ("tools.json", "opening.json"))
    assert tools == [{"function": TOOL}] and [message["content"] for message in opening] == ["Be brief.", "1 + 1?", "2"]
    example = (out / "example.txt").read_text()
    assert example.startswith("<|im_start|>system\nBe brief.") and '"description": "Adds."' in example
    assert '"expression": "2 + 3"' in example and "<tool_response>\n5" in example
    card = (out / "README.md").read_text()
    assert "`tools.json` (calculator)" in card and "--tool-call-parser hermes" in card and "    Be brief." in card
    assert json.loads((out / "generation_config.json").read_text())["max_new_tokens"] == 40
    program, answering = ((out / name).read_text() for name in ("chat.py", "tools.py"))
    compile(program, "chat.py", "exec")
    assert "range(3)" in program and "OPTIONS = {'calculator': {}}" in answering
    used = ran(out)
    used["start"](opening, json.loads((out / "example.json").read_text()))
    (answer, mistake) = (used["answers"](f"<tool_call>{text}</tool_call>") for text in (json.dumps(CALL), "{"))
    assert answer == [{"role": "tool", "name": "calculator", "content": "5"}]
    assert len(mistake) == 1 and mistake[0]["content"].startswith("error: ") and not used["answers"]("5")
    used["stop"]()
    used["run"].__self__.close()


def ran(out: Path) -> dict[str, Any]:
    """What tools.py of an export defines."""
    used: dict[str, Any] = {"__file__": str(out / "tools.py")}
    exec(compile((out / "tools.py").read_text(), "tools.py", "exec"), used)
    return used


TILL = """
from dataclasses import dataclass
from mtgrpo.tools import Tool, ToolError

@dataclass
class Till(Tool):
    'Buy a thing.'

    currency: str = "EUR"

    async def start(self, task):
        self.prices, self.bought = task.metadata["prices"], []

    async def stop(self):
        print("stopped after", self.bought)

    def __call__(self, thing: str) -> str:
        if thing not in self.prices:
            raise ToolError(f"there is no {thing}")
        self.bought = [*self.bought, thing]
        return f"{sum(self.prices[one] for one in self.bought)} {self.currency}"
"""


def keep_record(run: Path, tools: Any, mine: bool = True) -> None:
    """What a run writes of its settings, signed where it is `mine`."""
    (run / ".hydra").mkdir()
    (run / ".hydra/config.yaml").write_text(json.dumps({"environment": {"tools": tools}}))
    (run / ".hydra/hydra.yaml").write_text("{}")
    if mine:
        sign(run)


def buys(thing: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'Till', 'arguments': {'thing': thing}})}</tool_call>"


@pytest.mark.parametrize("name", ["till.py", "tools.py"])  # the second is what an export calls a file of its own
def test_a_tool_with_a_state_begins_with_the_row_of_the_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "typed").mkdir()
    monkeypatch.chdir(tmp_path / "typed")
    Path(name).write_text(TILL)
    settings = {f"environment.tools.{name}:Till.currency": "USD", "task": f"{tmp_path}/my.py:Bills"}
    path, _ = saved(tmp_path, state={**STATE, "settings": {**STATE["settings"], **settings}})
    keep_record(tmp_path, {f"{name}:Till": {"currency": "USD"}})
    tool = {"function": {"name": "Till", "parameters": {}}}
    row = {**conversation("Buy.", 1.0, {"role": "assistant", "content": "9"}), "tools": [tool], "answer": "9"}
    (tmp_path / "trajectories").mkdir()
    prices = {"metadata": {"prices": {"tea": 3, "pot": None}}}
    (tmp_path / "trajectories/evaluation_after.jsonl").write_text(json.dumps({**row, **prices}) + "\n")
    out = exported(path, "hf", tmp_path / "out")
    Path(name).unlink()  # what is exported needs it no more
    written = "".join((out / one).read_text() for one in ("README.md", "chat.py", "tools.py"))
    assert str(tmp_path) not in written and "The `start(task)` of a tool gets the row" in written
    example = json.loads((out / "example.json").read_text())
    assert example == {"question": "Buy.", "answer": "9", **prices}
    used = ran(out)
    for _ in range(2):  # each conversation begins anew
        used["start"]([{"role": "user", "content": "Buy."}], example)
        said = [used["answers"](buys(thing))[0]["content"] for thing in ("tea", "tea", "car")]
        assert said == ["3 USD", "6 USD", "error: there is no car"]
        used["stop"]()
    assert capsys.readouterr().out.count("stopped after ['tea', 'tea']") == 2
    used["start"]([], example)
    with pytest.raises(OutageError, match="the tool Till failed: TypeError"):  # no mistake of the model
        used["answers"](buys("pot"))
    used["run"].__self__.close()


@pytest.mark.parametrize("own", [True, False])
def test_a_program_says_what_its_tools_with_a_state_begin_with(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("till.py").write_text(TILL)
    option, name = ("till.py:Till", "Till") if own else ("calculator", "calculator")
    few = {"environment.max_turns": "1", "sampling.max_new_tokens": "2", "environment.tools": json.dumps([option])}
    path, _ = saved(tmp_path, state={**STATE, "settings": {**STATE["settings"], **few}})
    keep_record(tmp_path, [option])
    tool = {"function": {"name": name, "parameters": {}}}
    row = {**conversation("Buy.", 1.0), "tools": [tool], "metadata": {"prices": {"tea": 3}}}
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories/evaluation_after.jsonl").write_text(json.dumps(row) + "\n")
    out = exported(path, "hf", tmp_path / "out")
    monkeypatch.syspath_prepend(out)
    monkeypatch.setattr("sys.argv", ["chat.py", "How", "much?"])
    monkeypatch.delitem(sys.modules, "tools", raising=False)
    runpy.run_path(str(out / "chat.py"), run_name="__main__")["tools"].run.__self__.close()
    said, warned = capsys.readouterr()
    assert "[user] How much?" in said
    assert (f"The tools begin with the row of {out}/example.json" in warned) is own


def test_a_program_shows_the_calls_of_worked_examples_and_its_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {"environment.max_turns": "1", "sampling.max_new_tokens": "2", "environment.tools": '["calculator"]'}
    path, _ = saved(tmp_path, state={**STATE, "settings": {**STATE["settings"], **few}})
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    shown = [{"role": "user", "content": "2 + 3?"}, called, {"role": "tool", "name": "calculator", "content": "5"}]
    row = conversation("1 + 1?", 1.0, {"role": "assistant", "content": "2"})
    messages = [*shown, {"role": "assistant", "content": "#### 5"}, *cast("list[Any]", row["messages"])[-2:]]
    (tmp_path / "trajectories").mkdir()
    kept = json.dumps({**row, "messages": messages, "tools": [{"function": TOOL}]})
    (tmp_path / "trajectories/evaluation_after.jsonl").write_text(kept + "\n")
    out = exported(path, "hf", tmp_path / "out")
    monkeypatch.syspath_prepend(out)
    monkeypatch.setattr("sys.argv", ["chat.py"])
    monkeypatch.delitem(sys.modules, "tools", raising=False)
    capsys.readouterr()
    runpy.run_path(str(out / "chat.py"), run_name="__main__")["tools"].run.__self__.close()
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["[user] 2 + 3?", "[assistant] calculator({'expression': '2 + 3'})"]
    assert said[2:5] == ["[tool] 5", "[assistant] #### 5", "[user] 1 + 1?"]
    (out / "model.safetensors").unlink()  # its help asks no model
    for word in ("-h", "--help"):
        monkeypatch.setattr("sys.argv", ["chat.py", word])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(out / "chat.py"), run_name="__main__")
        assert not left.value.code and capsys.readouterr().out.startswith("python chat.py [QUESTION]: this model")


@pytest.mark.parametrize(("typed", "mine"), [(True, True), (False, True), (True, False)])
def test_a_file_is_taken_along_only_from_below_the_folder_in_which_it_is_typed(
    typed: bool, mine: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that came from elsewhere may name any file of this machine, and no run of mine signed it."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    file = tmp_path / ("work/till.py" if typed else "till.py")
    file.write_text(TILL)
    tools = [f"{file}:Till"]
    settings = {**STATE["settings"], "environment.tools": json.dumps(tools)}
    path, _ = saved(tmp_path, state={**STATE, "settings": settings})
    keep_record(tmp_path, tools, mine)
    (tmp_path / "trajectories").mkdir()
    row = {**conversation("Buy.", 1.0), "tools": [{"function": {"name": "Till", "parameters": {}}}]}
    (tmp_path / "trajectories/evaluation_after.jsonl").write_text(json.dumps(row) + "\n")
    assert (exported(path, "hf", tmp_path / "out") / "till.py").exists() == (typed and mine)


def test_a_received_checkpoint_reaches_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evil.py").write_text("raise SystemExit('run')\n")
    Path(".env").write_text("HF_TOKEN=secret\n")
    settings = {**STATE["settings"], "task": "evil.py:Tasks", "environment.tools": '[".env:calculator"]'}
    path, _ = saved(tmp_path, state={**STATE, "settings": settings})
    keep_conversations(tmp_path)
    out = exported(path, "hf", tmp_path / "out")
    assert not (out / ".env").exists() and "Its tasks were task=evil.py:Tasks." in (out / "README.md").read_text()


INJECTED = 'none"""\nraise SystemExit("run")\n"""\n\n    run `this` <b>\x1b[31m'


def test_a_received_value_is_neither_code_nor_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("condenser", "recipe", "task", "environment", "reward", "model.name", "agent", "task.prompt_template")
    settings = dict.fromkeys(names, INJECTED) | {"task.prompt_template": INJECTED + "{prompt}"}
    path, _ = saved(tmp_path, state={**STATE, "settings": settings})
    keep_conversations(tmp_path)
    rows = (tmp_path / "trajectories/evaluation_after.jsonl").read_text()
    named = rows.replace('"name": "calculator", "desc', f'"name": {json.dumps(INJECTED)}, "desc')
    assert named != rows
    (tmp_path / "trajectories/evaluation_after.jsonl").write_text(named)
    out = exported(path, "hf", tmp_path / "out")
    for name in ("chat.py", "tools.py"):
        found = ast.walk(ast.parse((out / name).read_text()))
        raised = [node for node in found if isinstance(node, ast.Raise) and "run" in ast.unparse(node)]
        assert [node for node in raised if "write in `use`" not in ast.unparse(node)] == []
    card = (out / "README.md").read_text()
    assert "base_model" not in card and "\x1b" not in card + capsys.readouterr().out
    assert "run `this`" not in card and "<b>" not in card and "    run" not in card


def test_a_chat_template_is_tried_before_it_renders_what_a_run_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried in a process with limits, which the rendering has not."""
    path, _ = saved(tmp_path)
    keep_conversations(tmp_path)
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = "{% for one in range(9) %}{{ messages | length }}{% endfor %}"
    monkeypatch.setattr(export, "load_tokenizer", lambda _: tokenizer)
    monkeypatch.setattr(prompted, "_rendered", lambda *_: pytest.fail("it is rendered"))
    with pytest.raises(ConfigError, match="chat template"):
        export.main([str(path), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_the_card_has_the_words_of_the_run(tmp_path: Path) -> None:
    settings = {**STATE["settings"], "recipe": "jsonl", "reward": "[numeric, /a/my köln/till.py:Right, b/own.py:R]"}
    path, _ = saved(tmp_path, state={**STATE, "settings": settings})
    keep_conversations(tmp_path)
    keep_record(tmp_path, [])
    (tmp_path / "metrics.jsonl").touch()
    kept = ["task=jsonl", "task.path='my bills.jsonl'", "environment.tools=[till.py:Till]", "reward.success_at=1"]
    left_out = ["model.name=tiny", "sft.steps=50", "log=[jsonl]", "+hydra.x=1", "resume=true"]
    (tmp_path / ".hydra/overrides.yaml").write_text(json.dumps([*left_out[:2], *kept, *left_out[2:]]))
    card = (exported(path, "hf", tmp_path / "out") / "README.md").read_text()
    assert "| `reward` | `[numeric, till.py:Right, own.py:R]` |" in card
    lines = [shlex.split(line) for line in card.splitlines() if line.startswith("    mtgrpo ")]
    assert lines[0] == ["mtgrpo", "eval", "model.name=FOLDER", "recipe=jsonl", *kept]
    told = ["model.name=FOLDER", "sft.steps=0", "recipe=jsonl", *kept, "optimizer.lr=1e-06"]
    assert lines[1] == ["mtgrpo", "train", *told]


HARMLESS = ["recipe=gsm8k", "reward=numeric", "trainer.steps=3", "environment.tools=[calculator]"]


def test_words_that_reach_something_are_told_from_those_that_do_not() -> None:
    assert reach_nothing(HARMLESS) and reach_nothing(["recipe=[jsonl,lora]"])
    for word in [
        "reward=received/evil.py:R",
        "reward=numeric,evil.py:R",
        "reward={a:1}",
        "environment.tools=[calculator,evil.py:T]",
        "task.path=secret.jsonl",
        "task.prompt_template='${oc.env:KEY}{prompt}'",
        "hydra/launcher=other",
        "--config-dir=received",
        "seed='1\n\nType evil'",
        "recipe=received/evil.yaml",
        "recipe=gsm8k",  # a second one
    ]:
        assert not reach_nothing(["recipe=gsm8k", word]), word


@pytest.mark.parametrize("kept", [True, False])
def test_the_words_of_a_received_record_are_left_out_where_they_reach_something(kept: bool, tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    keep_conversations(tmp_path)
    keep_record(tmp_path, [], mine=False)
    (tmp_path / "metrics.jsonl").touch()
    words = HARMLESS if kept else ["recipe=received/evil.yaml", "recipe=gsm8k", "reward=received/evil.py:R"]
    (tmp_path / ".hydra/overrides.yaml").write_text(json.dumps(words))
    card = (exported(path, "hf", tmp_path / "out") / "README.md").read_text()
    lines = [shlex.split(line)[3:] for line in card.splitlines() if line.startswith("    mtgrpo eval")]
    assert lines == [HARMLESS if kept else ["recipe=gsm8k"]]
    assert ("its other words are left out" in card) is ("evil" not in card and not kept)


def test_a_program_says_where_tools_go_that_need_more_than_a_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = saved(tmp_path)  # whose environment.tools are not known
    keep_conversations(tmp_path)
    out = exported(path, "hf", tmp_path / "out")
    program, answering = ((out / name).read_text() for name in ("chat.py", "tools.py"))
    compile(program, "chat.py", "exec")
    compile(answering, "tools.py", "exec")
    assert "import mtgrpo" not in program + answering and "write in `use` what the tool {name} answers" in answering
    assert "`tools.py` answers no call yet" in (out / "README.md").read_text()
    assert "its tools.py answers no call yet: write what `use` gives\n" in capsys.readouterr().out


def test_what_is_exported_says_that_it_does_without_the_condenser(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**STATE["settings"], "condenser": "keep_last"}
    path, _ = saved(tmp_path, state={**STATE, "settings": settings})
    keep_conversations(tmp_path)
    out = exported(path, "hf", tmp_path / "out")
    assert "chat.py and servers do without its condenser, keep_last: " in capsys.readouterr().out
    assert "(condenser=keep_last)" in (out / "README.md").read_text()
    assert '"""python chat.py' in (said := (out / "chat.py").read_text()) and "but for its condenser." in said
    path, _ = saved(tmp_path / "other")
    keep_conversations(tmp_path / "other")
    out = exported(path, "hf", tmp_path / "other/out")
    assert "condens" not in (out / "README.md").read_text() + (out / "chat.py").read_text() + capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("calculator", "`use` gives. Tools of your own come along where you made the run on this"),
        ("Store", "`use` gives. A Tool that offers several by `specs` is not copied"),
    ],
)
def test_tools_that_are_not_copied_are_missed(
    option: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = {"environment.tools": f'["away.py:{option}"]'}
    path, _ = saved(tmp_path, state={**STATE, "settings": {**STATE["settings"], **tools}})
    keep_conversations(tmp_path)
    exported(path, "hf", tmp_path / "out")
    assert said in capsys.readouterr().out


def test_the_tools_of_an_agent_are_left_to_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the environment are what its warm start saw of them, and may answer nothing."""
    settings = {"agent": "python", "environment.tools": '["calculator"]'}
    path, _ = saved(tmp_path, state={**STATE, "settings": {**STATE["settings"], **settings}})
    keep_conversations(tmp_path)
    out = exported(path, "hf", tmp_path / "out")
    assert "OPTIONS" not in (out / "tools.py").read_text()
    assert "In its training an agent answered them: let that agent ask" in (out / "README.md").read_text()
    said = "its tools.py answers no call yet: write what `use` gives, as your agent does, which has the tools\n"
    assert capsys.readouterr().out.endswith(said)


def test_without_conversations_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = saved(tmp_path)
    out = exported(path, "hf", tmp_path / "out\x1b[2J")
    said, shown = "What tools and prompts it was trained with is not known", capsys.readouterr().out
    assert said in shown and "\x1b" not in shown and said in (out / "README.md").read_text()
    assert not (out / "tools.json").exists()


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    with pytest.raises(ConfigError, match="holds all weights; give --to hf"):
        export.main([str(path), "--to", "peft", "--out", str(tmp_path / "out")])
    with pytest.raises(ConfigError, match="it is there already"):
        export.main([str(path), "--out", str(tmp_path)])
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"model\.safetensors: it has 0 bytes"):
        export.main([str(path), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
