"""The model sees its last steps and those older ones that have most to do with them."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mtgrpo.condensers import Condenser, Conversation, best_and_newest
from mtgrpo.types import Message

K1, B = 1.5, 0.75  # of BM25, as is usual


@dataclass
class Recall(Condenser, keep_last_n_steps=">= 0", recalled_steps=">= 0"):
    """Keeps the last `keep_last_n_steps` steps and brings back the best `recalled_steps` of the others.

    How much an older step has to do with the task and the last step is its BM25 score (Robertson and Zaragoza 2009).
    What is kept stays in its order. Steps that the budget does not hold are dropped, the worst of the recalled first.
    """

    keep_last_n_steps: int = 2
    recalled_steps: int = 2

    async def condense(self, conversation: Conversation) -> list[Message]:
        steps = conversation.steps
        start = max(0, len(steps) - self.keep_last_n_steps)
        query = [*conversation.opening, *(steps[-1] if steps else ())]
        ranked = bm25([_words(step) for step in steps[:start]], _words(query))
        return best_and_newest(conversation, ranked[: self.recalled_steps], start)


def bm25(documents: Sequence[Sequence[str]], query: Sequence[str]) -> list[int]:
    """The numbers of the documents, the best first; of equals the later first."""
    counts = [Counter(document) for document in documents]
    length = sum(map(len, documents)) / max(1, len(documents))

    having = Counter(word for count in counts for word in count)
    words = sorted(set(query) & set(having))  # in one order: sums of floats depend on it

    def score(count: Counter[str]) -> float:
        total = 0.0
        for word in words:
            rarity = math.log(1 + (len(counts) - having[word] + 0.5) / (having[word] + 0.5))
            damped = K1 * (1 - B + B * count.total() / length)
            total += rarity * count[word] * (K1 + 1) / (count[word] + damped)
        return total

    return sorted(range(len(documents)), key=lambda i: (-score(counts[i]), -i))


def _words(messages: Sequence[Message]) -> list[str]:
    parts = [message.content for message in messages]
    parts += [str(value) for message in messages for call in message.tool_calls for value in call.arguments.values()]
    return re.findall(r"\w+", " ".join(parts).lower())
