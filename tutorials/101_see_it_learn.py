# %% [markdown]
# # 101: See it learn
#
# You want to see a language model learn by reinforcement, on your own machine, in less than a minute.
#
# The model is small (half a million weights) and comes with the package. Its **task**: a story about numbers, such as
# "Sam has 392 books. Sam is given 296 more. Sam finds 296 more. How many books does Sam have?", with two to four
# steps. Its **tool**: a calculator. It ends with `####` and the answer.
# It was taught by a careless teacher, who did seven of ten sums in the head, wrongly. So it knows how the calculator
# is called, and mostly does not call it.
#
# Nobody will show it what is right. Each step of training does this:
#
# 1. Take 16 tasks, and let the model try each of them 8 times. Such tries are called *trajectories*, the 8 of a task
#    a *group*.
# 2. Give each trajectory a **reward**: 1 where the final number is right, else 0.
# 3. Compare siblings: the **advantage** of a trajectory is its reward minus the mean reward of its group.
# 4. Change the weights a little, so that what had a positive advantage becomes likelier, and what had a negative one
#    rarer.
#
# This is GRPO, *group relative policy optimisation*. Six steps of it. The first lines name the parts of the run; pass
# over them. The lines of steps are explained in [102](102_read_a_run.md); what shows progress is left out here.

# %%
from cells import sh
from matplotlib import pyplot as plt

# %%
sh("mtgrpo train trainer.steps=6 rollout.prompts_per_step=16 eval.tasks=40 eval.samples=2 hydra.run.dir=runs/first")

# %% [markdown]
# Read the line that begins with `held-out success`. Held-out tasks are never trained on, and are tried before and
# after. `sampled` draws each token by its probability, as in training. `greedy` takes the likeliest token every time:
# its habit was to guess, now it is to calculate. `pass@2` asks whether one of two samples is right.
#
# A conversation before training, and one after it:

# %%
sh("mtgrpo show runs/first --before --failures --count 1")

# %%
sh("mtgrpo show runs/first --count 1")

# %% [markdown]
# The run has drawn its own curve:

# %%
plt.figure(figsize=(8, 4))
plt.imshow(plt.imread("runs/first/curve.png"))
plt.axis("off")
plt.show()

# %% [markdown]
# ## What next
#
# - Train it to the end: `mtgrpo train` takes 25 steps, and two minutes. `seed=1` gives another run.
# - Talk to what you have trained: `mtgrpo play checkpoint=runs/first/checkpoints/step_000006`. An empty line takes one
#   of its tasks. It samples, so it errs now and then; it knows such stories alone, of two to four steps,
#   that begin with a number of three digits.
# - [102](102_read_a_run.md) looks into the folder of a run.
