"""One order of passes for all ranks: where weights are sharded, every rank takes part in each pass of each other.

A word has the letters F, a forward pass, and B, a backward pass. A rank goes through the common word with its own
passes, in their order, and fills each letter that is not its next one by a pass of one token.
"""

from collections.abc import Sequence
from enum import Enum


class Pass(Enum):
    """What is to be done with a micro-batch."""

    keys = "keys"  # compute it without gradient or targets: it gives keys and values, and is computed again later
    loss = "loss"  # compute the loss
    backward = "backward"  # take the gradient


def common_word(words: Sequence[str]) -> str:
    """A short word that every rank with one of `words` can go through with `fillers`.

    Letter by letter, the rank with most passes left has its next one. A backward pass waits, and there is a forward
    pass, while a rank that is to fill it has no graph of a filler to take back.
    """
    left, kept = list(words), [0] * len(words)  # of each rank: passes to come, and graphs of fillers
    letters: list[str] = []
    while any(left):
        longest = max(left, key=lambda rest: (len(rest), rest.startswith("F")))
        filled = all(rest.startswith("B") or graphs for rest, graphs in zip(left, kept, strict=True))
        letter = "B" if longest.startswith("B") and filled else "F"
        letters.append(letter)
        for rank, rest in enumerate(left):
            if rest.startswith(letter):
                left[rank] = rest[1:]
            else:
                kept[rank] += 1 if letter == "F" else -1
    return "".join(letters)


def fillers(word: str, own: str) -> list[Pass | None]:
    """For each letter of the common word: None where the next pass of `own` comes, else what fills it.

    Ranks have different numbers of chains that are not held, so a word has more F than B, and a rank more fillers of F
    than of B. A filler that no later one takes back is without gradient: no graph is left over in the end.
    """
    found: list[Pass | None] = []
    kept: list[int] = []
    done = 0
    for place, letter in enumerate(word):
        if own[done : done + 1] == letter:
            found.append(None)
            done += 1
        elif letter == "F":
            kept.append(place)
            found.append(Pass.keys)
        else:
            found.append(Pass.backward)
            found[kept.pop()] = Pass.loss
    return found
