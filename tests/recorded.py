"""A run's folder with a record of tokens, made without a run."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from mtgrpo.batch.forest import build_batch
from mtgrpo.model import tiny
from mtgrpo.record.settings import TokenSettings
from mtgrpo.record.tokens import TokenRecorder
from mtgrpo.record.writing import write_trajectories
from mtgrpo.types import CallOutcome, CallRecord, Finish, Group, Message, Task, Trajectory, Turn, WeightPush

TOKENIZER = tiny.load_tokenizer()
ANSWERS = ["#### 391", "#### 39é1", "no 😀 idea", "#### 7"]


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def conversation(task: Task, sample: int, answer: str, condenses: bool = False) -> Trajectory:
    """Two turns, the second in a context of its own where it `condenses`."""
    asked = encode(f"<|im_start|>user\n{task.messages[0].content}<|im_end|>\n<|im_start|>assistant\n")
    first, second = encode("let me think<|im_end|>"), encode(f"{answer}<|im_end|>")
    more = encode("\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n")
    turns = [
        Turn(asked, first, [-0.5] * len(first), [3] * len(first), Finish.STOP, Message("assistant", "let me think")),
        Turn(asked[:4] + more if condenses else more, second, [-1.0] * len(second), [4] * len(second), Finish.STOP,
             Message("assistant", answer), parent=-1 if condenses else 0),
    ]  # fmt: skip
    turns[0].observations = (Message("user", "go on"),)
    for number, turn in enumerate(turns):
        turn.asked_s, turn.ended_s = 100.0 + number + sample, 100.5 + number + sample
    calls = (CallRecord("look", CallOutcome.outage, 1, 0.25, "down", 100.6 + sample),)
    times = {"began_s": 99.9 + sample, "queued_s": 0.5 + sample, "calls": calls}
    return Trajectory(task, sample, turns, reward=float("391" in answer), **times)


def make_recorded(folder: Path, steps: int = 2, answers: list[str] | None = None, asked: str = "?") -> Path:
    """Steps of two groups each; the rewards of the second are all equal. asked: how the question ends."""
    answers = answers or ANSWERS
    for step in range(1, steps + 1):
        said = [(Message("user", f"17 * 2{number}{asked}"),) for number in range(2)]
        tasks = [Task(f"sums/{number}", messages, "391", {"level": number}) for number, messages in enumerate(said)]
        groups = [Group(t, [conversation(t, n, a, n == 1) for n, a in enumerate(answers)]) for t in tasks]
        for trajectory in groups[1].trajectories:
            trajectory.reward = 1.0
        write_trajectories(folder, f"step_{step:06d}", groups, {}, [WeightPush(4, 100.5, 100.75)])
        trained = [trajectory for group in groups for trajectory in group.trajectories]
        batch = build_batch(trained)
        mean = sum(t.reward for t in groups[0].trajectories) / len(answers)
        paid = torch.tensor([t.reward - mean if t.task is tasks[0] else 0.0 for t in trained])
        nothing = torch.zeros(len(batch), dtype=torch.float64)
        columns = {
            **{"advantage": paid.double()[batch.trajectory], "weight": nothing + 1 / len(batch), "factor": nothing + 1},
            **{"clipped": nothing, "clamped": nothing, "entropy": nothing + 0.5},
            **{"before": batch.behaviour_logp + 0.01, "last": batch.behaviour_logp + 0.02},
        }
        recorder = TokenRecorder(TokenSettings(), folder, lambda note: None)
        recorder.write(step, groups, trained, batch, columns)
        row = {"stage": "reinforcement learning", "step": step, "reward/mean": mean + step / 10}
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row | {"eval/success": 0.5}) + "\n")
    place = folder / "checkpoints" / "step_000001"
    place.mkdir(parents=True, exist_ok=True)
    TOKENIZER.backend_tokenizer.save(str(place / "tokenizer.json"))
    return folder
