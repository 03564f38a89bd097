"""How many conversations a step has, and how far they may go."""

from __future__ import annotations

from dataclasses import dataclass

from mtgrpo.errors import require


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
    timeout_s: float = 3600.0  # of one attempt at a conversation, training meanwhile too; then it has failed; 0 = none
    score_timeout_s: float = 0.0  # of scoring the siblings of a task; what exceeds it fails; 0 = none
    max_staleness: int = 0  # weight updates between a group's admission and its training; 0 = in step
    ahead: float = 1.5  # batches of groups run at once where max_staleness > 0: more hides slower tools, is staler
    extra_samples: int = 0  # run beside `group_size`; the first to finish are trained: quicker, biased to the quick

    def __post_init__(self) -> None:
        require(self, group_size=">= 1", prompts_per_step=">= 1", max_concurrent=">= 1")
        require(self, max_trajectory_tokens=">= 1", max_trajectory_tool_tokens=">= 1")
        require(self, timeout_s=">= 0 (0 = none)", score_timeout_s=">= 0 (0 = none)", extra_samples=">= 0")
        require(self, retries=">= 0", max_failed=">= 0 and <= 1 (1 = the run goes on whatever fails)")
        require(self, max_staleness=">= 0", ahead="> 1 (nothing runs ahead otherwise)")
