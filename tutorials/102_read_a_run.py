# %% [markdown]
# # 102: Read a run
#
# You want to know what happened in a run: whether it learned, what the model did, and what each token was paid.
#
# Everything is in the run's folder, as plain files. First a short run to look at. `'log=[jsonl]'` leaves the terminal
# silent, for half a minute:

# %%
import json

from cells import sh
from matplotlib import pyplot as plt

# %%
sh(
    "mtgrpo train trainer.steps=4 rollout.prompts_per_step=8 eval.tasks=20 eval.samples=2 'log=[jsonl]' "
    "hydra.run.dir=runs/a"
)

# %% [markdown]
# ## Numbers
#
# `metrics.jsonl` has a line for each step. Five numbers tell most of it:

# %%
with open("runs/a/metrics.jsonl") as file:
    rows = [json.loads(line) for line in file]

steps = [row for row in rows if row["stage"] == "reinforcement learning"]
FIVE = ["reward/mean", "reward/groups_with_variance", "policy/entropy", "policy/clip_fraction", "rollout/tool_rate"]
for name in FIVE:
    print(f"{name:28}", *(f"{row[name]:6.3f}" for row in steps))

# %% [markdown]
# | number | good | bad |
# | --- | --- | --- |
# | `reward/mean`: what trajectories earn | rises | flat: see the next line |
# | `reward/groups_with_variance`: groups that can teach | above .2 | 0: siblings all earn the same |
# | `policy/entropy`: how undecided the policy is | falls slowly | drops to 0 early: it tries nothing new any more |
# | `policy/clip_fraction`: tokens that moved too far to count | below .2 | high: the learning rate is too high |
# | `rollout/tool_rate`: trajectories that call a tool | as the task needs | falls to 0: it has unlearned its tools |
#
# Steps differ by chance, for each has other tasks. Held-out success is the fair comparison:

# %%
with open("runs/a/summary.json") as file:
    summary = json.load(file)

print("sampled", summary["eval/success/before"], "->", summary["eval/success/after"])
print("greedy ", summary["eval/greedy/before"], "->", summary["eval/greedy/after"])
plt.figure(figsize=(5, 3))
plt.plot([row["step"] for row in steps], [row["reward/mean"] for row in steps], marker="o")
plt.xlabel("step")
plt.ylabel("mean reward")
plt.show()

# %% [markdown]
# ## Tokens
#
# In `<>` stands what the model sampled, after its advantage. Nothing else is trained: neither the question nor what
# the tool answered.

# %%
sh("mtgrpo show runs/a --step 1 --tokens --count 1")

# %% [markdown]
# ## Pages
#
# `mtgrpo view runs/a` opens all of it in a browser: curves, groups, conversations with each token coloured by what it
# was paid. `--out` writes the page as files instead. `mtgrpo report` writes one page about the run, to be sent to
# others.

# %%
sh("mtgrpo view runs/a --out page")

# %%
sh("mtgrpo report runs/a")

# %% [markdown]
# ## What next
#
# - All numbers: [metrics](../metrics.md). All screens of the page: [view](../view.md).
# - `mtgrpo watch runs/a` shows a run while it runs.
# - [103](103_your_tool.md) trains with a tool of your own.
