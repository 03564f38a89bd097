# %% [markdown]
# # 113: Kill and resume
#
# You want to lose nothing when a machine is taken away in the middle of a run.
#
# The proof: one run that nothing disturbs, and one that is killed without warning and goes on. Both should end with
# the same numbers, to the last digit.

# %%
import json
import subprocess
import time
from pathlib import Path

from cells import sh

# %%
WORDS = "trainer.steps=4 rollout.prompts_per_step=4 eval.tasks=1 eval.samples=1 eval.every_steps=0 log=[jsonl]"

# %%
sh(
    "mtgrpo train trainer.steps=4 rollout.prompts_per_step=4 eval.tasks=1 eval.samples=1 eval.every_steps=0 "
    "'log=[jsonl]' hydra.run.dir=runs/whole"
)


# %%
def steps(folder):
    path = Path(folder, "metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row["stage"] == "reinforcement learning"]


killed = subprocess.Popen(["mtgrpo", "train", *WORDS.split(), "hydra.run.dir=runs/killed"], stdout=subprocess.DEVNULL)
while len(steps("runs/killed")) < 2 and killed.poll() is None:
    time.sleep(0.01)

killed.kill()  # kill -9: it cannot even say goodbye
print("exit code", killed.wait())

# %% [markdown]
# In its folder are a checkpoint and the journal, which has each turn that was sampled since. The same command with
# `resume=true` goes on (this one with its lines on the screen):

# %%
sh(
    "mtgrpo train trainer.steps=4 rollout.prompts_per_step=4 eval.tasks=1 eval.samples=1 eval.every_steps=0 "
    "hydra.run.dir=runs/killed resume=true"
)

# %%
for one, other in zip(steps("runs/whole"), steps("runs/killed"), strict=True):
    same = all(one[name] == other[name] for name in one if not name.startswith(("time/", "perf/")))
    print("step", one["step"], "reward", one["reward/mean"], other["reward/mean"], "all digits the same:", same)

# %% [markdown]
# Randomness is a function of seed, task, sibling, turn and position, and of nothing else. So what is sampled again
# after a crash is what was sampled before it.
#
# Put `resume=true` into the script that starts a run: on an empty folder it begins, on a folder with a run it goes
# on, after the end it does nothing.
#
# ## What next
#
# - `checkpoint.every_steps` (10) is how many updates a crash costs at most. What is kept:
#   [durability](../durability.md).
# - Ctrl-C, SIGTERM and a full disk end a run in order: [what ends a run](../durability.md#what-ends-a-run).
# - [114](114_sweeps_and_controls.md): several runs.
