"""How many conversations a step has, and how far they may go."""

from __future__ import annotations

from dataclasses import dataclass

from mtgrpo.errors import ConfigError


@dataclass
class RolloutSettings:
    """How many conversations, and how long they may grow."""

    group_size: int = 8  # siblings per task
    prompts_per_step: int = 8  # tasks per training step
    max_concurrent: int = 512  # conversations open at once
    max_trajectory_tokens: int = 4096  # sampled by the policy, over all turns
    max_trajectory_tool_tokens: int = 8192  # added by the environment, over all turns
    retries: int = 1  # fresh attempts for a conversation that failed through no fault of the model
    max_failed: float = 0.5  # the share of a batch's conversations that may fail; more ends the run
    timeout_s: float = 14400.0  # of one attempt at a conversation, training meanwhile too; then it has failed; 0 = none
    score_timeout_s: float = 0.0  # of scoring the siblings of a task; what exceeds it fails; 0 = none
    max_staleness: int = 0  # weight updates between a group's admission and its training; 0 = in step
    ahead: float = 1.5  # batches of groups run at once where max_staleness > 0: more hides slower tools, is staler
    extra_samples: int = 0  # run beside `group_size`; the first to finish are trained: quicker, biased to the quick

    def __post_init__(self) -> None:
        for name in (
            "group_size",
            "prompts_per_step",
            "max_concurrent",
            "max_trajectory_tokens",
            "max_trajectory_tool_tokens",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"rollout.{name} must be >= 1, got {getattr(self, name)}")
        if self.ahead <= 1:
            raise ConfigError(f"rollout.ahead must be above 1, got {self.ahead}: nothing runs ahead otherwise")
        if not 0 <= self.max_failed <= 1:
            raise ConfigError(
                f"rollout.max_failed must be in [0, 1] (1 = the run goes on whatever fails), got {self.max_failed}"
            )
        for name in ("retries", "timeout_s", "score_timeout_s", "max_staleness", "extra_samples"):
            if getattr(self, name) < 0:
                raise ConfigError(f"rollout.{name} must be >= 0, got {getattr(self, name)}")
