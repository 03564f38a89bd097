# %% [markdown]
# # 105: Your game
#
# You want to train in a world of your own: a game, a simulator, a service that answers.
#
# An environment is a class with two methods. `start` gives the first messages of a conversation. `step` gets what the
# model said, changes the world, and answers; `reward` pays, `done=True` ends. Each conversation has a copy of the
# object to itself, so state simply stands on `self`.
#
# The game: a corridor with a pit at its left end and a treasure at its right end. Nobody says which is where.

# %%
import json
import random

from cells import file, sh

# %%
file(
    "corridor.py",
    '''
from dataclasses import dataclass

from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.types import Message


@dataclass
class Corridor(Environment):
    """A pit at place 0, a treasure at the other end; the model says left or right."""

    length: int = 4

    async def start(self, task):
        self.place = task.metadata["place"]
        return Opening(task.messages)

    async def step(self, message):
        moves = {"left": -1, "right": 1}
        if message.content not in moves:
            return Reply(done=True)  # it said something else: the game is over, it earns nothing
        self.place += moves[message.content]
        if self.place in (0, self.length):
            return Reply(done=True, reward=float(self.place == self.length))
        return Reply((Message("user", f"You stand at {self.place}."),))
''',
)

# %% [markdown]
# ## Places to start from, and moves to imitate
#
# A model from scratch does not even know the two words. So it first imitates games in which every move is drawn by
# chance.

# %%
random.seed(0)
for name, places in ("games.jsonl", (2, 3)), ("held_out.jsonl", (1,)):
    with open(name, "w") as lines:
        for place in places:
            print(json.dumps({"prompt": f"You stand at {place}.", "place": place}), file=lines)

with open("played.jsonl", "w") as lines:
    for number in range(200):
        place, messages = 1 + number % 3, []
        while 0 < place < 4 and len(messages) < 12:
            move = random.choice(["left", "right"])
            messages += [{"role": "user", "content": f"You stand at {place}."}, {"role": "assistant", "content": move}]
            place += 1 if move == "right" else -1
        print(json.dumps({"messages": messages, "place": 1 + number % 3}), file=lines)

# %%
file(
    "corridor.yaml",
    """
defaults:
  - calculator_from_scratch
  - override /task: jsonl
  - override /environment: corridor.py:Corridor
  - override /reward: environment
task: {path: games.jsonl, val_files: [held_out.jsonl]}
environment: {max_turns: 6}
sft: {demonstrations: played.jsonl, steps: 40, optimizer: {warmup_steps: 5}}
sampling: {max_new_tokens: 8}
optimizer: {lr: 1e-3}
rollout: {prompts_per_step: 8}
trainer: {steps: 10}
eval: {tasks: 1, samples: 32, every_steps: 0}
""",
)

# %% [markdown]
# `reward=environment` takes what the environment has paid. Train it:

# %%
sh("mtgrpo train recipe=corridor.yaml hydra.run.dir=runs/corridor")

# %%
sh("mtgrpo show runs/corridor --step 1 --count 1")

# %%
sh("mtgrpo show runs/corridor --step 10 --count 1")

# %% [markdown]
# It found out by reward alone that right is where the treasure is. Look at `sampled`: `greedy` was right before, for
# right happened to be a little likelier than left. The reward came at the end of a game, and every move of the game
# got the same advantage: good moves are more often in games that end well.
#
# ## What next
#
# - A larger corridor: `environment.length=6`, and other places. Its warning of little variance is of the one held-out
#   place, the hardest. In `mtgrpo play` an empty line begins a game, and ends it when it is over.
# - Pay single moves: `Reply(..., reward=...)` at any step; [108](108_turn_rewards.md) uses such rewards.
# - [Games that exist](../tasks_and_rewards.md#environments): gymnasium, textarena, `recipe=guess_number_tiny`.
