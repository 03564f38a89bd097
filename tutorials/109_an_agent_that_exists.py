# %% [markdown]
# # 109: An agent that exists
#
# You want to train the agent that you have, without writing it again.
#
# Your agent talks to a model over HTTP, with OpenAI's or Anthropic's SDK, directly or below a framework. In training
# it talks to an endpoint on this machine instead. The policy answers there, and exactly the tokens that it sampled
# are trained.
#
# Here is such an agent: a loop that anybody might have written. It knows nothing of training. Two things come from
# outside: the address, and the task. It needs OpenAI's SDK (`pip install openai`).

# %%
from cells import file, sh

# %%
file(
    "my_agent.py",
    """
import ast
import json
import operator

from openai import OpenAI

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
ABOUT = {"name": "calculator", "description": "Evaluate an arithmetic expression.", "parameters": PARAMETERS}
DO = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculator(expression):
    try:
        sum_ = ast.parse(expression, mode="eval").body
        return str(DO[type(sum_.op)](sum_.left.value, sum_.right.value))
    except (SyntaxError, AttributeError, KeyError, TypeError):
        return "error: give a sum of two numbers, such as 17 * 23"


def solve(task, address):
    messages = [{"role": m.role, "content": m.content} for m in task.messages]
    with OpenAI(base_url=address.openai_url, api_key=address.key) as client:
        for _ in range(6):
            asked = {"model": address.model, "messages": messages, "tools": [{"type": "function", "function": ABOUT}]}
            answer = client.chat.completions.create(**asked).choices[0].message
            if not answer.tool_calls:
                return answer.content
            messages.append(answer.model_dump(exclude_none=True))
            for call in answer.tool_calls:
                result = calculator(json.loads(call.function.arguments)["expression"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""
""",
)

# %% [markdown]
# What `solve` returns is graded by the reward, here as before: the number after `####`. It may return a number of its
# own instead, or rewards of single turns.

# %%
sh(
    "mtgrpo train agent=python agent.function=my_agent.py:solve trainer.steps=5 rollout.prompts_per_step=6 "
    "eval.tasks=10 eval.samples=1 eval.every_steps=0 hydra.run.dir=runs/agent"
)

# %%
sh("mtgrpo show runs/agent --count 1")

# %% [markdown]
# `agent/exact_share` in `metrics.jsonl` says how many turns continue recorded tokens exactly. It is 1 for an agent
# that appends to its history. One that rewrites its history is trained all the same; more has to be computed.

# %%
sh("grep -o '\"agent/exact_share\": [0-9.]*' runs/agent/metrics.jsonl")

# %% [markdown]
# ## What next
#
# - A program in place of a function: `agent=command 'agent.argv=[/path/to/my-agent,"{prompt}"]'`; it finds the endpoint
#   in `OPENAI_BASE_URL`, where the model may have any name.
# - By hand first: `mtgrpo serve` puts a policy behind the same endpoint ([115](115_export_and_serve.md)).
# - Frameworks that were tried, and what is recorded: [agents](../agents.md).
