# %% [markdown]
# # 103: Your tool
#
# You want the model to call a Python function of yours.
#
# A tool is a function. The model sees its name, its arguments and its docstring. `ToolError` is for what the model
# did wrong: it reads the message and may try again. Any other exception means that the tool is broken; such a
# conversation is run again, and is never counted as the model's failure.

# %%
import json
import random

from cells import file, sh

# %%
random.seed(0)
PRICES = {str(number): random.randint(1, 99) for number in random.sample(range(100, 1000), 300)}
with open("prices.json", "w") as out:
    json.dump(PRICES, out)

# %%
file(
    "price.py",
    '''
import json

from mtgrpo.tools import ToolError

with open("prices.json") as lines:
    PRICES = json.load(lines)


def price(article: str) -> str:
    """The price of an article, by its number."""
    if article not in PRICES:
        raise ToolError(f"there is no article {article}")
    return str(PRICES[article])
''',
)

# %% [markdown]
# ## Tasks
#
# Tasks are lines of a file, with a prompt and the answer. Of 300 articles 50 are held out: neither tasks to train on
# nor demonstrations name them.

# %%
articles = list(PRICES)
for name, part in ("problems.jsonl", articles[:250]), ("held_out.jsonl", articles[250:]):
    with open(name, "w") as lines:
        for article in part:
            row = {"prompt": f"What does article {article} cost?", "answer": str(PRICES[article])}
            print(json.dumps(row), file=lines)

# %% [markdown]
# ## A warm start
#
# Reinforcement makes likelier what the model does now and then. A large chat model calls a new tool when it is told
# of it. Ours, the small one of [101](101_see_it_learn.md), knows a calculator alone, so it first imitates 250
# demonstrations. Four of ten call the tool, six just guess.

# %%
with open("demos.jsonl", "w") as lines:
    for article in articles[:250]:
        messages = [{"role": "user", "content": f"What does article {article} cost?"}]
        if random.random() < 0.4:
            call = {"function": {"name": "price", "arguments": {"article": article}}}
            messages.append({"role": "assistant", "tool_calls": [call]})
            messages.append({"role": "tool", "name": "price", "content": str(PRICES[article])})
            messages.append({"role": "assistant", "content": f"#### {PRICES[article]}"})
        else:
            messages.append({"role": "assistant", "content": f"#### {random.randint(1, 99)}"})
        print(json.dumps({"messages": messages}), file=lines)

# %% [markdown]
# ## Train
#
# Which task, which tool, which demonstrations. The reward is `numeric`: 1 where the number after `####` is the
# answer.

# %%
file(
    "shop.yaml",
    """
defaults: [calculator, override /task: jsonl]
task: {path: problems.jsonl, val_files: [held_out.jsonl]}
environment: {tools: ["price.py:price"]}
sft: {demonstrations: demos.jsonl, steps: 80, optimizer: {warmup_steps: 5}}
optimizer: {lr: 1e-3}
trainer: {steps: 8}
rollout: {prompts_per_step: 8}
eval: {tasks: 50, samples: 2, every_steps: 0}
""",
)

# %%
sh("mtgrpo train recipe=shop.yaml hydra.run.dir=runs/shop")

# %%
sh("mtgrpo show runs/shop --count 1")

# %% [markdown]
# ## What next
#
# - With a chat model there is no warm start: `mtgrpo train 'recipe=[shop.yaml,smollm2_135m]' sft.steps=0
#   sft.demonstrations=`, and worked examples in the prompt (`task.examples`).
# - Tools with state, limits, and what becomes of a call that fails: [tools](../tools.md).
# - [104](104_your_reward_and_its_traps.md): a reward of your own.
