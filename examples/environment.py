"""An environment: a world that answers and pays, and tasks for it. A robot looks for the way through a room.

    mtgrpo train task=examples/environment.py:Rooms environment=examples/environment.py:Room reward=environment sft.steps=60 trainer.steps=2

`start` gives the first messages, `step` answers what the model said. Each conversation has a copy of the object.
"""  # noqa: E501

import random
from dataclasses import dataclass

from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.tasks import Generated, user
from mtgrpo.types import Message, Task

MOVES = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}


@dataclass
class Room(Environment):
    """Square rooms with a door in one corner; walls are told, and cost a move."""

    size: int = 3
    pays_closer: float = 0.1  # for each move towards the door

    pays_turns = True  # rewards belong to moves: advantage=turn can use them

    async def start(self, task):
        self.place, self.door = task.metadata["place"], task.metadata["door"]
        return Opening(task.messages)

    async def step(self, message):
        if message.content not in MOVES:
            return Reply(done=True)  # no move: the game is over
        x, y = (here + by for here, by in zip(self.place, MOVES[message.content], strict=True))
        if not (0 <= x < self.size and 0 <= y < self.size):
            return Reply((Message("user", f"A wall. {where(self.place, self.door)}"),))
        closer = distance(self.place, self.door) - distance((x, y), self.door)
        self.place = (x, y)
        if self.place == tuple(self.door):
            return Reply(done=True, reward=1.0)
        return Reply((Message("user", where(self.place, self.door)),), reward=self.pays_closer * closer)


@dataclass
class Rooms(Generated):
    """Places to start from, and doors; a demonstration walks at random."""

    size: int = 3

    def task(self, split, seed, index):
        name = f"rooms/{seed}/{split.value}/{index}"
        spots = [(x, y) for x in range(self.size) for y in range(self.size)]
        place, door = random.Random(name).sample(spots, 2)
        return Task(name, user(where(place, door)), metadata={"place": place, "door": door})

    def demonstration(self, task, seed):
        return (Message("assistant", random.Random(f"{seed}/{task.id}").choice(list(MOVES))),)


def where(place, door):
    """What the model is told."""
    return f"You are at {place[0]} {place[1]}, the door is at {door[0]} {door[1]}."


def distance(place, door):
    """In moves."""
    return abs(place[0] - door[0]) + abs(place[1] - door[1])
