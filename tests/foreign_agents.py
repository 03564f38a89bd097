"""Agents of others as they come from PyPI, for the calculator's tasks; with the Python of .venv-agents.

As a program it lets one of them play a scripted conversation, and prints what was recorded.
"""

# ruff: noqa: PLC0415  each agent imports what it needs, which takes a while
# pyright: basic
from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mtgrpo.agents import Address
from mtgrpo.tools import ToolError
from mtgrpo.tools.calculator import Calculator
from mtgrpo.types import Task

SPEC = {
    "name": "calculator",
    "description": "Evaluate an arithmetic expression.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}
MOST_TURNS = 8


def calculate(expression: str) -> str:
    try:
        return Calculator()(expression)
    except ToolError as error:
        return f"error: {error}"


def opening(task: Task) -> list[Any]:
    return [{"role": message.role, "content": message.content} for message in task.messages]


def question(task: Task) -> str:
    return task.messages[-1].content


async def openai_agents(task: Task, address: Address) -> str:
    from agents import Agent, FunctionTool, OpenAIChatCompletionsModel, RunConfig, Runner
    from openai import AsyncOpenAI

    async def invoke(context: Any, arguments: str) -> str:
        return calculate(json.loads(arguments).get("expression", ""))

    tool = FunctionTool(
        name=SPEC["name"],
        description=SPEC["description"],
        params_json_schema=SPEC["parameters"],
        on_invoke_tool=invoke,
        strict_json_schema=False,
    )
    async with AsyncOpenAI(base_url=address.openai_url, api_key=address.key) as client:
        model = OpenAIChatCompletionsModel(model=address.model, openai_client=client)
        agent = Agent(name="solver", tools=[tool], model=model)
        found = await Runner.run(
            agent, opening(task), max_turns=MOST_TURNS, run_config=RunConfig(tracing_disabled=True)
        )
        return str(found.final_output)


async def langgraph(task: Task, address: Address) -> str:
    from langchain_core.messages import ToolMessage
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph

    model = ChatOpenAI(model=address.model, base_url=address.openai_url, api_key=address.key)  # type: ignore[arg-type]
    bound = model.bind_tools([{"type": "function", "function": SPEC}])

    async def think(state: MessagesState) -> Any:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    def act(state: MessagesState) -> Any:
        calls = state["messages"][-1].tool_calls
        said = [(calculate(call["args"].get("expression", "")), call["id"]) for call in calls]
        return {"messages": [ToolMessage(text, tool_call_id=call_id) for text, call_id in said]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("act", act)
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", lambda state: "act" if state["messages"][-1].tool_calls else END)
    graph.add_edge("act", "think")
    found = await graph.compile().ainvoke({"messages": opening(task)}, {"recursion_limit": 3 * MOST_TURNS})
    return str(found["messages"][-1].content)


def smolagents(task: Task, address: Address) -> str:
    from smolagents import OpenAIModel, Tool, ToolCallingAgent

    class Calculate(Tool):
        name = "calculator"
        description = SPEC["description"]
        inputs = {"expression": {"type": "string", "description": "what to evaluate"}}  # noqa: RUF012
        output_type = "string"

        def forward(self, expression: str) -> str:
            return calculate(expression)

    model = OpenAIModel(model_id=address.model, api_base=address.openai_url, api_key=address.key)
    agent = ToolCallingAgent(tools=[Calculate()], model=model, max_steps=MOST_TURNS, verbosity_level=0)
    return str(agent.run(question(task)))


def mini_swe_agent(task: Task, address: Address) -> str:
    with TemporaryDirectory() as home:
        os.environ |= {"MSWEA_GLOBAL_CONFIG_DIR": home, "MSWEA_SILENT_STARTUP": "1"}
        os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
        from minisweagent.agents.default import DefaultAgent
        from minisweagent.environments.local import LocalEnvironment
        from minisweagent.models.litellm_model import LitellmModel

        model = LitellmModel(
            model_name=f"openai/{address.model}",
            model_kwargs={"api_base": address.openai_url, "api_key": address.key},
        )
        agent = DefaultAgent(
            model,
            LocalEnvironment(cwd=home),
            system_template="You run commands.",
            instance_template="{{task}}",
            step_limit=MOST_TURNS,
            cost_limit=0,
        )
        return str(agent.run(question(task))["submission"])


def main(name: str, outputs: list[str]) -> None:
    """Play with a policy that says `outputs`."""
    from mtgrpo.agents.python import Python
    from scripted import ScriptedEngine
    from test_agents import group_of, said

    left = iter(outputs)
    engine = ScriptedEngine(lambda key, turn: said(next(left)))
    agent = Python(function=f"{Path(__file__).resolve()}:{name}", timeout_s=100.0)
    with TemporaryDirectory() as folder:
        (found,) = group_of(engine, Path(folder), agent).trajectories
    turns = [(turn.parent, turn.message.content, len(turn.message.tool_calls)) for turn in found.turns]
    shown = {"status": found.status.value, "reason": found.reason, "reward": found.reward, "output": found.output}
    print(json.dumps({**shown, "turns": turns, "counts": found.counts}))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
