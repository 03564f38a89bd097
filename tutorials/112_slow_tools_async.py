# %% [markdown]
# # 112: Slow tools
#
# You want to train with tools that take their time: a browser, a database, a test suite.
#
# Conversations of a step run at once. But by default every digit of a run depends on its seed alone, and so the engine
# decodes on when all of them have asked for their next turn: one that waits for a tool holds up the others.
# `trainer.deterministic=false` lets each go on by itself; digits then depend on how quick tools are. A run whose
# conversations wait much for one another says so.
#
# A calculator that takes half a second for each call, made slow on purpose (`faults.latency_s`). First by default:

# %%
import json

from cells import sh

# %%
sh(
    "mtgrpo train faults.latency_s=0.5 trainer.steps=6 rollout.prompts_per_step=8 eval.tasks=1 eval.samples=1 "
    "eval.every_steps=0 'log=[jsonl]' hydra.run.dir=runs/same_digits"
)

# %% [markdown]
# Then each for itself:

# %%
sh(
    "mtgrpo train faults.latency_s=0.5 trainer.steps=6 rollout.prompts_per_step=8 eval.tasks=1 eval.samples=1 "
    "eval.every_steps=0 'log=[jsonl]' trainer.deterministic=false hydra.run.dir=runs/each"
)

# %% [markdown]
# Still the step waits for its slowest conversation, and meanwhile nothing is trained. `rollout.max_staleness=1` lets
# conversations of the next step run ahead while the policy is trained, each for itself too. They are then sampled
# from a policy that is one update older than the one that is trained.

# %%
sh(
    "mtgrpo train faults.latency_s=0.5 trainer.steps=6 rollout.prompts_per_step=8 eval.tasks=1 eval.samples=1 "
    "eval.every_steps=0 'log=[jsonl]' rollout.max_staleness=1 hydra.run.dir=runs/ahead"
)


# %%
def steps(folder):
    with open(f"{folder}/metrics.jsonl") as lines:
        rows = [json.loads(line) for line in lines]
    return [row for row in rows if row["stage"] == "reinforcement learning"]


NAMES = [
    "time/rollout_s",
    "perf/tool_share",
    "rollout/token_staleness",
    "rollout/staleness_max",
    "policy/clip_fraction",
]
for folder in ("runs/same_digits", "runs/each", "runs/ahead"):
    rows = steps(folder)[1:]  # the first step compiles and checks
    print(folder, *(f"  {name:26}{sum(row[name] for row in rows) / len(rows):7.3f}" for name in NAMES), sep="\n")

# %% [markdown]
# | number | meaning |
# | --- | --- |
# | `time/rollout_s` | seconds that a step waited for its batch |
# | `perf/tool_share` | of the time of conversations, what they waited for tools |
# | `rollout/token_staleness` | updates since a token was sampled, the mean |
# | `rollout/staleness_max` | the same of a group since it was admitted; never above `rollout.max_staleness` |
# | `policy/clip_fraction` | tokens too far from the policy that sampled them, which do not count |
#
# Old tokens are not wrong: the ratio of the two policies corrects for it, and each group is trained within the bound
# or not sampled at all. A slow task is never dropped because it is slow. What it gains on three seeds, with tools
# that take .2 s (median): 57, 79 and 70 seconds to a success of .85 with staleness 2, in place of 106, 86 and 109
# ([benchmarks](../../BENCHMARKS.md#slow-tools-and-rollouts-ahead-of-the-trainer)).
#
# ## What next
#
# - A tool that hangs: `environment.call_timeout_s`; one that fails: [tools](../tools.md#whose-fault-it-is). Try
#   yours with `faults.error_rate=0.05 faults.hang_rate=0.05 environment.call_timeout_s=2`.
# - Corrections for more staleness: [algorithms](../algorithms.md#correction), `'recipe=[gsm8k,async]'`.
# - [113](113_kill_and_resume.md): what if the machine goes away.
