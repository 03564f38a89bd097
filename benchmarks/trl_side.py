"""TRL's GRPOTrainer on a configuration of ours: the rival in versus_trl.py, in a process of its own.

    python benchmarks/trl_side.py '{"words": ["seed=1"], "completion": 128}'

It waits between steps as gate.py does. Model, tokenizer, tasks and their order, tool, reward, sampling, optimiser and
loss are those that the words describe to `mtgrpo train`; prompts and the calculator's replies are the same tokens.
"""

from __future__ import annotations

import asyncio
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from datasets import Dataset
from gate import wait
from record import resident
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.compose import compose, parse
from mtgrpo.experiment import Experiment
from mtgrpo.policy.optimizer import factor
from mtgrpo.rewards import Reward
from mtgrpo.rollout.chat import chatml
from mtgrpo.run import Inputs, check
from mtgrpo.tasks import Split
from mtgrpo.tools import ToolError
from mtgrpo.tools.calculator import Calculator
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn

SCHEMA = "((tool.function or tool) | tojson)"  # what the chat template shows of a tool


@dataclass(frozen=True)
class Settings:
    """What a side is told on its command line."""

    words: list[str]  # of `mtgrpo train`
    completion: int  # longest conversation in tokens after its prompt, tool replies included
    micro_batches: int = 1
    checkpointing: bool = True  # TRL's default
    continuous_batching: bool = False


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: the expression
    """
    try:
        return Calculator()(expression)
    except ToolError as error:
        return f"error: {error}"


class Gate(TrainerCallback):
    """Holds the trainer between steps; a step ends with its log line."""

    def __init__(self) -> None:
        self.rewarded = 0.0  # when the rewards were asked for: the rollouts are done
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the first step."""
        self._began = wait({"resident_bytes": resident("VmRSS")})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        """Wait for the next step; what comes last is a summary of the run."""
        if "reward" not in logs:
            return
        ended = time.perf_counter()
        conversations = args.generation_batch_size
        found = {
            "seconds": ended - self._began,
            "time/rollout_s": self.rewarded - self._began,
            "time/train_s": ended - self.rewarded,
            "sampled_tokens": logs["completions/mean_length"] * conversations,
            "peak_bytes": resident("VmHWM"),
        }
        self._began = wait(found | logs)


def scorer(reward: Reward, gate: Gate) -> Callable[..., list[float | None]]:
    """Our reward as a reward function of TRL's."""

    def score(completions: list[list[dict[str, Any]]], answer: list[str], **kwargs: Any) -> list[float | None]:
        gate.rewarded = time.perf_counter()
        found: list[float | None] = []
        for messages, right in zip(completions, answer, strict=True):
            last = Message("assistant", messages[-1].get("content") or "")
            turn = Turn([], [], [], [], Finish.STOP, last)
            found.append(reward.reward(Trajectory(Task("", (), right), turns=[turn])))
        return found

    return score


def prompts(experiment: Experiment, inputs: Inputs) -> Dataset:
    """The tasks of the whole run, in the order in which ours come."""
    tasks = list(islice(inputs.tasks, experiment.trainer.steps * experiment.rollout.prompts_per_step))
    return Dataset.from_dict({"prompt": [messages(task) for task in tasks], "answer": [task.answer for task in tasks]})


def messages(task: Task) -> list[dict[str, str]]:
    """As transformers' chat templates take them."""
    return [{"role": message.role, "content": message.content} for message in task.messages]


def same_prompts(experiment: Experiment, inputs: Inputs) -> Any:
    """A tokenizer whose chat template shows the tool in our words; TRL's schema has more of them."""
    task = next(experiment.task.open(Split.train, experiment.seed))
    opening = asyncio.run(copy.copy(experiment.environment).start(task))
    shown = json.dumps(asdict(opening.tools[0]))
    tokenizer = copy.deepcopy(inputs.tokenizer)
    assert SCHEMA in chatml()
    tokenizer.chat_template = chatml().replace(SCHEMA, json.dumps(shown))
    ids = tokenizer.apply_chat_template(
        messages(task), tools=[calculator], add_generation_prompt=True, return_dict=False
    )
    assert ids == inputs.chat.open(opening.messages, opening.tools), "the two sides see different prompts"
    return tokenizer


def configuration(experiment: Experiment, settings: Settings, folder: str) -> GRPOConfig:
    """The same training in TRL's words."""
    algorithm, sampling = experiment.algorithm, experiment.sampling
    assert isinstance(algorithm, GRPO), "TRL has no other algorithm that we have"
    batch = experiment.rollout.prompts_per_step * experiment.rollout.group_size
    return GRPOConfig(
        output_dir=folder,
        max_steps=experiment.trainer.steps,
        seed=experiment.seed,
        shuffle_dataset=False,
        per_device_train_batch_size=batch // settings.micro_batches,
        gradient_accumulation_steps=settings.micro_batches,
        gradient_checkpointing=settings.checkpointing,
        num_generations=experiment.rollout.group_size,
        max_completion_length=settings.completion,
        max_tool_calling_iterations=experiment.environment.max_turns - 1,
        use_transformers_continuous_batching=settings.continuous_batching,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        beta=experiment.kl.coef,
        epsilon=algorithm.clip_low,
        epsilon_high=algorithm.clip_high,
        scale_rewards="group" if algorithm.divide_by_std else "none",
        loss_type="dapo",  # the mean over all tokens of the batch, as algorithm.average=token_mean
        max_grad_norm=experiment.optimizer.max_grad_norm,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        logging_strategy="steps",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def optimizer(experiment: Experiment, model: PreTrainedModel) -> tuple[torch.optim.AdamW, LambdaLR]:
    """The same AdamW and the same learning rate at every step; transformers' own warm-up begins with a rate of 0."""
    settings, steps = experiment.optimizer, experiment.trainer.steps
    first, second = settings.betas
    adamw = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=(first, second), weight_decay=settings.weight_decay, foreach=True
    )
    return adamw, LambdaLR(adamw, lambda step: factor(settings, step, steps))


def build(experiment: Experiment, settings: Settings, folder: str, gate: Gate) -> GRPOTrainer:
    """The trainer, which writes to `folder` what it must."""
    inputs = check(experiment)
    model = AutoModelForCausalLM.from_pretrained(experiment.model.name, dtype=torch.float32)
    return GRPOTrainer(
        model=model,
        reward_funcs=scorer(experiment.reward, gate),
        args=configuration(experiment, settings, folder),
        train_dataset=prompts(experiment, inputs),
        processing_class=same_prompts(experiment, inputs),
        tools=[calculator],
        callbacks=[gate],
        optimizers=optimizer(experiment, model),
    )


def main() -> None:
    """Train until there are no more steps or lines."""
    settings = Settings(**json.loads(sys.argv[1]))
    experiment = compose(parse(settings.words)).experiment
    with tempfile.TemporaryDirectory() as folder:
        build(experiment, settings, folder, Gate()).train()


if __name__ == "__main__":
    main()
