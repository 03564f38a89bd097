import asyncio
from dataclasses import dataclass

from mtgrpo.environments import Environment, Opening, Reply
from mtgrpo.types import Message


@dataclass
class Shell(Environment):
    """What the model says goes to a process, whose answers it sees and is paid for."""

    command: str = "cat"
    pays_turns = True

    async def start(self, task):
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(self.command, stdin=pipe, stdout=pipe)
        return Opening(task.messages)

    async def step(self, message):
        self.process.stdin.write(b"%d\n" % len(message.content))
        answer = (await self.process.stdout.readline()).decode().strip()
        return Reply((Message("user", answer),), reward=int(answer) % 5)

    async def stop(self):
        self.process.kill()
        await self.process.wait()
