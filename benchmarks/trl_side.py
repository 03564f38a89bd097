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
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from mtgrpo.algorithms.grpo import GRPO
from mtgrpo.chat import Chat
from mtgrpo.chat.template import chatml
from mtgrpo.config.compose import compose, parse
from mtgrpo.config.experiment import Experiment
from mtgrpo.environments import Opening
from mtgrpo.model.lora import add_adapter
from mtgrpo.policy.optimizer import factor
from mtgrpo.rewards import Reward
from mtgrpo.stages.checks import open_tasks, open_tokenizer
from mtgrpo.tasks import Split
from mtgrpo.tools import ToolError
from mtgrpo.tools.calculator import Calculator
from mtgrpo.types import Finish, Message, Task, Trajectory, Turn

SCHEMA = "((tool.function or tool) | tojson)"  # what the chat template shows of a tool


@dataclass(frozen=True)
class Settings:
    """The arguments of a side."""

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
        self.rewarded = 0.0  # when the rewards were requested: the rollouts are done
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the first step."""
        self._began = wait({"resident_bytes": resident("VmRSS"), "threads": torch.get_num_threads()})

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


def scorer(reward: Reward, siblings: int, gate: Gate) -> Callable[..., list[float | None]]:
    """Our reward as a reward function of TRL's, which gives it the samples of a task one after another."""

    def score(completions: list[list[dict[str, Any]]], answer: list[str], **kwargs: Any) -> list[float | None]:
        gate.rewarded = time.perf_counter()
        found: list[float | None] = []
        for number, (messages, right) in enumerate(zip(completions, answer, strict=True)):
            last = Message("assistant", messages[-1].get("content") or "")
            turn = Turn([], [], [], [], Finish.STOP, last)
            found.append(reward.reward(Trajectory(Task("", (), right), number % siblings, [turn])))
        return found

    return score


def prompts(experiment: Experiment) -> Dataset:
    """The tasks of the whole run, in the order in which ours come."""
    stream, _ = open_tasks(experiment)
    tasks = list(islice(stream, experiment.trainer.steps * experiment.rollout.prompts_per_step))
    found = [messages(opening(experiment, task)) for task in tasks]
    return Dataset.from_dict({"prompt": found, "answer": [task.answer for task in tasks]})


def opening(experiment: Experiment, task: Task) -> Opening:
    """How a conversation of ours about `task` begins."""
    return asyncio.run(copy.copy(experiment.environment).start(task))


def messages(opening: Opening) -> list[dict[str, str]]:
    """As transformers' chat templates take them."""
    return [{"role": message.role, "content": message.content} for message in opening.messages]


def same_prompts(
    experiment: Experiment, own: PreTrainedTokenizerFast, chat: Chat
) -> tuple[Any, list[Callable[..., str]]]:
    """A tokenizer whose chat template shows the tool, if there is one, in our words, and the tools.

    TRL's schema has more words. The prompts of the first step are compared token by token.
    """
    tasks = islice(experiment.task.stream(Split.train, experiment.seed), experiment.rollout.prompts_per_step)
    ours = [opening(experiment, task) for task in tasks]
    tokenizer = copy.deepcopy(own)
    tools: list[Callable[..., str]] = []
    if ours[0].tools:
        shown = json.dumps(asdict(ours[0].tools[0]))
        assert SCHEMA in chatml()
        tokenizer.chat_template = chatml().replace(SCHEMA, json.dumps(shown))
        tools = [calculator]
    for one in ours:
        ids = tokenizer.apply_chat_template(
            messages(one), tools=tools or None, add_generation_prompt=True, return_dict=False
        )
        assert ids == chat.open(one.messages, one.tools), "the two sides see different prompts"
    return tokenizer, tools


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
    own, chat = open_tokenizer(experiment)
    tokenizer, tools = same_prompts(experiment, own, chat)
    model = AutoModelForCausalLM.from_pretrained(tokenizer.name_or_path, dtype=torch.float32)
    if experiment.model.lora.rank:
        add_adapter(model, experiment.model.lora, experiment.seed)  # as peft draws it, with our seed
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=scorer(experiment.reward, experiment.rollout.group_size, gate),
        args=configuration(experiment, settings, folder),
        train_dataset=prompts(experiment),
        processing_class=tokenizer,
        tools=tools,
        callbacks=[gate],
        optimizers=optimizer(experiment, model),
    )
    assert set(trainer.eos_token_ids) == set(chat.stop_ids), "the two sides end a turn at different tokens"
    return trainer


def main() -> None:
    """Train until there are no more steps or lines."""
    settings = Settings(**json.loads(sys.argv[1]))
    experiment = compose(parse(settings.words)).experiment
    with tempfile.TemporaryDirectory() as folder:
        build(experiment, settings, folder, Gate()).train()


if __name__ == "__main__":
    main()
