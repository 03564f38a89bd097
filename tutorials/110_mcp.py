# %% [markdown]
# # 110: MCP
#
# You want the model to use the tools of an MCP server (Model Context Protocol).
#
# A server is a program that says which tools it has, and answers calls. Any will do. This one is yours, in ten lines
# (`pip install 'mtgrpo[mcp]'` first):

# %%
from cells import file, sh

# %%
file(
    "sums.py",
    '''
import ast
import operator

from mcp.server import MCPServer

app = MCPServer("sums", log_level="ERROR")
DO = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@app.tool(structured_output=False)
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression."""
    sum_ = ast.parse(expression, mode="eval").body
    return str(DO[type(sum_.op)](sum_.left.value, sum_.right.value))


app.run("stdio")
''',
)

# %% [markdown]
# The recipe says how the server is started. `prefix: ""` gives the tool its plain name; without it the model would
# see `sums_calculator`.

# %%
file(
    "with_server.yaml",
    """
defaults: [calculator]
environment:
  tools: {mcp: {servers: {sums: {command: [python, sums.py], prefix: ""}}}}
trainer: {steps: 5}
rollout: {prompts_per_step: 8}
eval: {tasks: 20, samples: 1, every_steps: 0}
""",
)

# %%
sh("mtgrpo train recipe=with_server.yaml hydra.run.dir=runs/mcp")

# %%
sh("mtgrpo show runs/mcp --count 1")

# %% [markdown]
# The server is started once for the run and shared by all conversations. An error that it reports (here: an
# expression that is none) is the model's, which reads what the server tells of it and may try again. A server that
# hangs or dies is started anew, and the call is made again. A server that remembers things is `stateful: true`: then
# each conversation has a process of its own.
#
# ## What next
#
# - Servers at an address, secrets, several servers: [tools](../tools.md#mcp-servers).
# - Three tools of a live server, from nothing, in minutes: `mtgrpo train recipe=mcp_tiny`. Held-out success on three
#   seeds: .195 -> .890, .285 -> .850, .295 -> .935.
# - [111](111_search_wikipedia.md): search.
