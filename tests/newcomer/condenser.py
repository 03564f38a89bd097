from dataclasses import dataclass

from mtgrpo.condensers import Condenser, newest


@dataclass
class Half(Condenser):
    """The newest steps that half of the budget holds."""

    async def condense(self, conversation):
        return newest(conversation, conversation.steps, share=0.5)
