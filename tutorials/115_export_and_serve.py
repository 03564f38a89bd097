# %% [markdown]
# # 115: Export and serve
#
# You want to use what you have trained, elsewhere.
#
# A short run to have something to take along (what stands at the end needs `pip install openai`):

# %%
import os
import subprocess
from pathlib import Path

from cells import file, sh
from openai import OpenAI

# %%
sh(
    "mtgrpo train trainer.steps=6 rollout.prompts_per_step=8 eval.tasks=1 eval.samples=1 eval.every_steps=0 "
    "'log=[jsonl]' hydra.run.dir=runs/a"
)

# %% [markdown]
# ## A folder for transformers and vLLM

# %%
sh("mtgrpo export runs/a --to hf --out my-model")

# %%
print(*sorted(path.name for path in Path("my-model").iterdir()), sep="\n")

# %% [markdown]
# Beside the weights stands what the model was trained to see: its tools, its opening, a whole conversation
# (`example.txt`), and `chat.py`, which leads one with plain transformers. A model that is asked in another form than
# it was trained in is worse; this is the most common reason why "it was better in training".

# %%
sh("head -c 600 my-model/example.txt")

# %%
file(
    "use.py",
    """
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("my-model"), AutoTokenizer.from_pretrained("my-model")
before, turn, _ = Path("my-model/example.txt").read_text().partition("<|im_start|>assistant\\n")
tokens = tokenizer(before + turn, return_tensors="pt", add_special_tokens=False)
output = model.generate(**tokens, max_new_tokens=40, do_sample=False, eos_token_id=tokenizer.eos_token_id)
print(tokenizer.decode(output[0, tokens["input_ids"].shape[1] :]))
""",
)

# %%
sh("python use.py 2>/dev/null")

# %% [markdown]
# ## Behind an endpoint
#
# `mtgrpo serve` speaks OpenAI's and Anthropic's interfaces, from a checkpoint of a run:

# %%
serving = ["mtgrpo", "serve", "checkpoint=runs/a/checkpoints/step_000006", "hydra.run.dir=runs/serving"]
server = subprocess.Popen(serving, stdout=subprocess.PIPE, text=True)
for line in server.stdout:  # it prints the variables to set: OPENAI_BASE_URL, OPENAI_API_KEY and others
    if line.startswith("export "):
        name, _, value = line.removeprefix("export ").strip().partition("=")
        os.environ[name] = value
        print(name)
    if "MTGRPO_MODEL" in line:
        break

# %%
STORY = "Sam has 392 books. Sam is given 296 more. Sam finds 296 more. How many books does Sam have?"
parameters = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
about = {"name": "calculator", "description": "Evaluate an arithmetic expression.", "parameters": parameters}
answer = OpenAI().chat.completions.create(
    model="policy",
    messages=[{"role": "user", "content": STORY}],
    temperature=0,
    tools=[{"type": "function", "function": about}],
)
print(answer.choices[0].message.tool_calls[0].function)
server.terminate()
_ = server.communicate()  # it says that it was interrupted

# %% [markdown]
# It is meant for trying an agent by hand. For many users take vLLM: the model card in `my-model` has the command.
#
# ## What next
#
# - Of a run with LoRA the adapter alone (`--to peft`), or added to its base (`--to merged`): `mtgrpo export --help`.
# - Conversations for the viewers of others: `--to atif`, `--to inspect`
#   ([view](../view.md#for-the-viewers-of-others)).
# - You have seen all of it. [The command](../command.md) and [a file of each kind](../your_own_agent.md) say the
#   rest.
