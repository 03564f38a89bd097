# %% [markdown]
# # 111: Search Wikipedia
#
# You want a model that looks things up instead of guessing.
#
# The tool `search` finds passages in a file of yours by their words (BM25, as in most search engines), and `read`
# gives a whole passage. A passage is a line with `id`, `text` and perhaps `title`. Four of them, to see how it works
# (`pip install 'mtgrpo[search]'` first):

# %%
import json

from cells import file, sh

# %%
PASSAGES = [
    (
        "ada",
        "Ada Lovelace",
        "Ada Lovelace (1815 to 1852) wrote the first program, for the Analytical Engine of Charles Babbage.",
    ),
    ("alan", "Alan Turing", "Alan Turing (1912 to 1954) described the universal machine and helped to break Enigma."),
    ("grace", "Grace Hopper", "Grace Hopper (1906 to 1992) wrote one of the first compilers and found a moth."),
    (
        "engine",
        "Analytical Engine",
        "A mechanical computer that Charles Babbage designed from 1837 on; it was never built.",
    ),
]
with open("passages.jsonl", "w") as lines:
    for name, title, text in PASSAGES:
        print(json.dumps({"id": name, "title": title, "text": text}), file=lines)

# %%
sh("mtgrpo data check passages.jsonl")

# %% [markdown]
# The index is built when it is first used, or ahead of a run:

# %%
sh("mtgrpo data build passages.jsonl")

# %% [markdown]
# ## What the model would see
#
# A tool is ordinary Python, so it can be called by hand. Do that before you train: what you cannot find, nobody can.

# %%
file(
    "by_hand.py",
    """
import asyncio
import sys
from pathlib import Path

from mtgrpo.environments.tool_use import ToolUse
from mtgrpo.parts import RunContext
from mtgrpo.types import Message, Task, ToolCall


async def ask(*queries):
    environment = ToolUse(tools={"search": {"corpus": "passages.jsonl", "results": 2}})
    context = RunContext(Path(), print, {})
    async with environment.open(context) as opened, opened.conversation(Task("by hand", ())) as (playing, _):
        for query in queries:
            call = ToolCall("search", {"query": query})
            reply = await playing.step(Message("assistant", tool_calls=(call,)))
            print(f"search({query!r})\\n{reply.messages[0].content}\\n")


asyncio.run(ask(*sys.argv[1:]))
""",
)

# %%
sh("python by_hand.py 'first program' 'Babbage machine'")

# %% [markdown]
# ## Train
#
# Questions and answers are a file as in [103](103_your_tool.md); `reward=em` pays where the answer is the accepted
# one, whatever its capitals and articles. `--dry-run` checks all of it and runs nothing;
# `tiny` stands for a model that would have to be fetched:

# %%
with open("questions.jsonl", "w") as lines:
    print(json.dumps({"prompt": "When was Ada Lovelace born?", "answer": "1815"}), file=lines)
    print(json.dumps({"prompt": "When was Alan Turing born?", "answer": "1912"}), file=lines)

with open("held_out.jsonl", "w") as lines:
    print(json.dumps({"prompt": "When was Grace Hopper born?", "answer": "1906"}), file=lines)

# %%
sh(
    "mtgrpo train 'recipe=[jsonl,smollm2_135m]' model.name=tiny task.path=questions.jsonl "
    "'task.val_files=[held_out.jsonl]' 'environment.tools={search: {corpus: passages.jsonl}}' reward=em --dry-run"
)

# %% [markdown]
# ## Does it learn to search?
#
# Four passages teach nothing. With 12,583 paragraphs of Wikipedia (`$MTGRPO_DATA/search_qa/passages.jsonl`, not public;
# passages that begin as they do on people and works will do: `task.path=FOLDER
# environment.tools.search.corpus=FOLDER/passages.jsonl`) `mtgrpo train recipe=wiki_years_tiny` (20 minutes) asks when
# somebody was born, or from which year a film or song is. Half of its demonstrations search, half guess. On three seeds
# held-out success went from .465 to .865, .425 to .820 and .545 to .875; with shuffled advantages it drifted by +.075,
# -.080 and -.010, and without the tool it is below .02 ([benchmarks](../../BENCHMARKS.md#is-search-learned)).
#
# ## What next
#
# - Pay turns that show the answer: `'reward=[em,evidence]' reward.evidence.answers=true` ([108](108_turn_rewards.md)).
# - A real model: `recipe=smollm2_search` (`mtgrpo data smollm2` first, the same paragraphs), on GPUs `search_r1_3b`.
# - An index of all of Wikipedia, with Lucene: [the search tool](../tasks_and_rewards.md#the-search-tool).
