# %% [markdown]
# # 104: Your reward and its traps
#
# You want to say yourself what is good. Say it carefully: the model learns what you pay for, not what you mean.
#
# A reward is a class with one method. It gets a whole trajectory and gives a number. Here: 1 for the right answer,
# and because long answers cost money, a little less for each token.

# %%
import json

from cells import file, sh
from matplotlib import pyplot as plt

# %%
file(
    "brief.py",
    '''
from dataclasses import dataclass

from mtgrpo.rewards import Reward, Score


@dataclass
class Brief(Reward):
    """1 for the right number, less a price for each sampled token."""

    per_token: float = 0.05
    wrong_pays_too: bool = True  # the price is taken from wrong answers as well
    success_at: float = 0.1  # from here on it counts as a success

    def reward(self, trajectory):
        right = float(trajectory.final.rpartition("####")[2].strip() == trajectory.task.answer)
        cost = self.per_token * trajectory.sampled_tokens
        total = right - cost if self.wrong_pays_too else right * max(0.1, 1 - cost)
        return Score(total, components={"right": right})
''',
)

# %% [markdown]
# The fields of the class are its settings: `reward.per_token=0.05` on the command line. `components` are logged
# beside the reward. Always log what you mean (`right`) beside what you pay.

# %%
sh(
    "mtgrpo train reward=brief.py:Brief trainer.steps=6 rollout.prompts_per_step=16 eval.tasks=20 eval.samples=2 "
    "'log=[jsonl]' hydra.run.dir=runs/trap"
)

# %%


def curves(folder):
    with open(f"{folder}/metrics.jsonl") as lines:
        rows = [json.loads(line) for line in lines]
    steps = [row for row in rows if row["stage"] == "reinforcement learning"]
    return {name: [round(row[name], 2) for row in steps] for name in ("reward/mean", "reward/right/mean")}


trap = curves("runs/trap")
print(trap)

# %% [markdown]
# The reward rises, and the share of right answers falls. Nothing is broken: a sum done with the calculator takes some
# 35 tokens and costs more than 1, a guess takes six. So guessing pays best, and that is what it learned. This is
# *reward hacking*.
#
# The cure is not a smaller price, which only hides it for harder tasks. Let the price be taken from right answers
# alone, and never all of it: then no wrong answer is better than any right one.

# %%
sh(
    "mtgrpo train reward=brief.py:Brief reward.wrong_pays_too=false reward.per_token=0.01 trainer.steps=6 "
    "rollout.prompts_per_step=16 eval.tasks=20 eval.samples=2 'log=[jsonl]' hydra.run.dir=runs/cured"
)

# %%
cured = curves("runs/cured")
figure, axes = plt.subplots(1, 2, figsize=(9, 3), sharex=True)
for axis, (title, run) in zip(axes, {"trap": trap, "cured": cured}.items(), strict=True):
    for name, values in run.items():
        axis.plot(range(1, 7), values, marker="o", label=name)
    axis.set(title=title, xlabel="step")
    axis.legend()

print(cured)
plt.show()

# %% [markdown]
# ## Five habits
#
# 1. Read conversations, above all those with the highest rewards: `mtgrpo show RUN`.
# 2. Measure what you mean on held-out tasks, by a plain reward that is not the one you train on: `mtgrpo eval
#    checkpoint=runs/trap/checkpoints/step_000006 reward=numeric`.
# 3. A reward that every sibling gets teaches nothing: advantages are differences.
# 4. What cannot be graded is 0 (`raise PolicyError`). What failed through no fault of the model is no 0: raise
#    anything else, and the trajectory is left out.
# 5. Several parts: `'reward=[numeric,length]' reward.length.weight=0.2`, each logged by itself.
#
# ## What next
#
# - All rewards: [tasks and rewards](../tasks_and_rewards.md#rewards). `context_efficiency` is brevity with a proven
#   bound.
# - [105](105_your_game.md): a world that pays by itself.
