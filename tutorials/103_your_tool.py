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
PRICES = {"tea": 3, "rice": 5, "soap": 2, "lamp": 40, "book": 12, "chair": 75}
PRICES |= {"coat": 90, "cup": 7, "bed": 310, "knife": 18, "clock": 25, "pen": 1}
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


def price(thing: str) -> str:
    """The price of a thing."""
    if thing not in PRICES:
        raise ToolError(f"we have {', '.join(PRICES)}")
    return str(PRICES[thing])
''',
)

# %% [markdown]
# ## Tasks
#
# Tasks are lines of a file, with a prompt and the answer. Of twelve things eight are trained on, four are held out.

# %%
things = list(PRICES)
for name, part in ("problems.jsonl", things[:8]), ("held_out.jsonl", things[8:]):
    with open(name, "w") as lines:
        for thing in part:
            row = {"prompt": f"What does a {thing} cost?", "answer": str(PRICES[thing])}
            print(json.dumps(row), file=lines)

# %% [markdown]
# ## A warm start
#
# Reinforcement makes likelier what the model does now and then. A large chat model calls a new tool when it is told
# of it. Ours has never seen this one, so it first imitates 200 demonstrations. Four of ten call the tool, six just
# guess.

# %%
random.seed(0)
with open("demos.jsonl", "w") as lines:
    for _ in range(200):
        thing = random.choice(things)
        messages = [{"role": "user", "content": f"What does a {thing} cost?"}]
        if random.random() < 0.4:
            call = {"function": {"name": "price", "arguments": {"thing": thing}}}
            messages.append({"role": "assistant", "tool_calls": [call]})
            messages.append({"role": "tool", "name": "price", "content": str(PRICES[thing])})
            messages.append({"role": "assistant", "content": f"#### {PRICES[thing]}"})
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
defaults: [calculator_from_scratch, override /task: jsonl]
task: {path: problems.jsonl, val_files: [held_out.jsonl]}
environment: {tools: ["price.py:price"]}
sft: {demonstrations: demos.jsonl, steps: 80, optimizer: {warmup_steps: 5}}
optimizer: {lr: 1e-3}
trainer: {steps: 8}
rollout: {prompts_per_step: 8}
eval: {tasks: 4, samples: 8, every_steps: 0}
""",
)

# %%
sh("mtgrpo train recipe=shop.yaml hydra.run.dir=runs/shop")

# %%
sh("mtgrpo show runs/shop --count 1")

# %% [markdown]
# ## What next
#
# - With a chat model there is no warm start: `mtgrpo train recipe=[shop.yaml,smollm2_135m] sft.steps=0
#   sft.demonstrations=null`, and worked examples in the prompt (`task.examples`).
# - Tools with state, limits, and what becomes of a call that fails: [tools](../tools.md).
# - [104](104_your_reward_and_its_traps.md): a reward of your own.
