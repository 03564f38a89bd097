# %% [markdown]
# # 107: Long conversations
#
# You want conversations that are longer than what the model can read at once.
#
# Every turn adds to the *context*, what the model reads before it answers. A **condenser** makes the next context
# shorter: it keeps the opening, and of what came after only some. The task here is made for it: pages of amounts, to
# be read one by one and added up. All that is needed at any time is the total so far and the last page.
#
# To look at contexts no training is needed. So the policy below is no model at all: it reads pages and adds up, by
# rule. `rollout_with_advantages` ([the Python interface](../api.md)) plays a conversation with any function that turns
# tokens into tokens.

# %%
from cells import file, sh

# %%
file(
    "contexts.py",
    r'''
import asyncio
import re
import sys

import mtgrpo
from mtgrpo.model.tiny import load_tokenizer
from mtgrpo.tasks import Split
from mtgrpo.types import Completion, Finish

tokenizer = load_tokenizer()
ONE = ["algorithm=reinforce_pp", "rollout.group_size=1", "environment.max_context_length=512"]  # one conversation
experiment = mtgrpo.preset("ledger_tiny", *ONE, *sys.argv[1:])


def call(name, arguments):
    return '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>' % (name, arguments)


async def sample(tokens, sampling):
    """A page, then the sum of it and the total so far, and so on."""
    context = tokenizer.decode(tokens)
    replies = re.findall(r"<tool_response>\s*(.*?)\s*</tool_response>", context, re.DOTALL)
    calls = re.findall(r'"name": "(next_page|calculator)", "arguments"', context)
    print(f"{len(tokens)} tokens, {len(replies)} replies in sight")
    if replies and "no more" in replies[-1]:
        text = f"#### {replies[-2]}"
    elif len(replies) >= 2 and calls[-1] == "next_page":
        text = call("calculator", '{"expression": "%s + %s"}' % (replies[-2], replies[-1]))
    else:
        text = call("next_page", "{}")
    output = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    return Completion(output, [-1.0] * len(output), [0] * len(output), Finish.STOP)


task = next(experiment.task.stream(Split.train, 0))
groups = mtgrpo.rollout_with_advantages([task], sample=sample, tokenizer=tokenizer, experiment=experiment)
(scored,) = asyncio.run(groups)
(trajectory,) = scored.group.trajectories
print(trajectory.final, "expected", task.answer, "reward", trajectory.reward, trajectory.status.value)
''',
)

# %% [markdown]
# ## Everything stays
#
# A line for each turn: how long its context is.

# %%
sh("python contexts.py condenser=none")

# %% [markdown]
# ## The last two steps stay
#
# A step is a turn with the replies to it. `keep_last` condenses after every turn; the window is now 192 tokens:

# %%
sh("python contexts.py condenser=keep_last condenser.keep_last_n_steps=2 environment.max_context_length=192")

# %% [markdown]
# ## And in the same window without a condenser?

# %%
sh("python contexts.py condenser=none environment.max_context_length=192")

# %% [markdown]
# It is cut: `truncated`, and never right.
#
# ## What training makes of it
#
# `mtgrpo train recipe=ledger_tiny` trains a model from scratch on this task, in some ten minutes. Held-out success on
# three seeds, before and after 40 steps
# ([benchmarks](../../BENCHMARKS.md#conversations-that-the-window-does-not-hold)):
#
# | | before -> after | contexts a conversation |
# | --- | --- | --- |
# | `condenser=none` | .00 -> .00, .00 -> .00, .00 -> .00 | 1.0 |
# | `condenser=keep_last` | .36 -> .96, .26 -> .91, .37 -> .93 | 9.4 |
# | `condenser=summarize` | .40 -> .95, .27 -> .96, .36 -> .92 | 6.9 |
#
# Training sees every context as the model saw it. What contexts share is computed once, so condensing costs little.
#
# ## What next
#
# - `condenser=summarize`: the model writes down what it needs, and is trained to do so (`mtgrpo train
#   recipe=ledger_tiny condenser=summarize`; the rule above writes no summary). All condensers: [tasks and
#   rewards](../tasks_and_rewards.md#condensers). One of your own: `examples/condenser.py`.
# - [108](108_turn_rewards.md): which turn of a long conversation was good?
