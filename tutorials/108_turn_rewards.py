# %% [markdown]
# # 108: Turn rewards
#
# You want to pay for single turns, not only for how a conversation ends.
#
# One reward at the end says little about a conversation of ten turns: which of them was the mistake? Where you can
# judge a turn by itself, do. The reward `calculation` pays 1 for the right answer, as `numeric` does, and 1 for each
# turn whose call gave the next intermediate result. `advantage` says how that reaches the tokens:
#
# | `advantage=` | a token gets |
# | --- | --- |
# | `trajectory` (the default) | the whole conversation's reward, compared with its siblings |
# | `turn` | how it ended and what was paid from its turn on, compared with the same turn of siblings |
# | `return_to_go` | the same, compared with whole conversations; `advantage.gamma` counts later pay for less |
#
# Most algorithms will do ([which](../algorithms.md)); `cispo` is GRPO with clipped weights in place of
# clipped gradients.

# %%
import json

from cells import sh

# %%
sh(
    "mtgrpo train reward=calculation advantage=turn algorithm=cispo trainer.steps=6 rollout.prompts_per_step=16 "
    "eval.tasks=20 eval.samples=2 'log=[jsonl]' hydra.run.dir=runs/turns"
)

# %%
with open("runs/turns/metrics.jsonl") as lines:
    rows = [json.loads(line) for line in lines]

steps = [row for row in rows if row["stage"] == "reinforcement learning"]
for name in ("reward/success", "reward/turns_of_trajectory", "rollout/turns"):
    print(f"{name:28}", *(f"{row[name]:6.2f}" for row in steps))

# %% [markdown]
# `reward/turns_of_trajectory` is how many turns of a conversation were paid. It rises together with success.
#
# Now look at conversations of one step that differ between turns. A conversation whose first calls were right and
# whose end was wrong is a mixed one: with one reward at the end, all its turns would be pushed down.

# %%
with open("runs/turns/trajectories/step_000001.jsonl") as lines:
    told = [json.loads(line) for line in lines]

mixed = [one for one in told if one["reward"] == 0 and any(one["turn_rewards"])]
print(len(mixed), "of", len(told), "conversations had turns that were paid, and a wrong end")
for message in mixed[0]["messages"]:
    calls = [call["arguments"] for call in message.get("tool_calls", [])]
    print(f"{message['role']:10}", message["content"] or "", *calls)

print("paid for each turn:", mixed[0]["turn_rewards"])

# %% [markdown]
# ## With a reward of your own
#
# `Score(total, turns=[...])` gives a number for each turn; the class says `judges_turns = True`. An environment pays
# turns by `Reply(..., reward=...)`.
#
# Pay turns only for what leads to the goal. A turn that pays by itself is repeated for its own sake, as in
# [104](104_your_reward_and_its_traps.md).
#
# ## What next
#
# - Which estimator goes with which algorithm, and their formulas: [algorithms](../algorithms.md).
# - A critic that learns what a state is worth: `algorithm=ppo advantage=gae model.value_head=true`.
# - [109](109_an_agent_that_exists.md): turns of an agent that you have already.
