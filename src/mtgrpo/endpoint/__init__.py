"""The HTTP side of foreign agents: an endpoint that speaks as OpenAI and Anthropic do, and records what it samples.

`server.py` is HTTP, a dialect is one file, `session.py` decides what a request continues. What was sampled is recorded
exactly as it was sampled, in the context in which it was; nothing is rendered again, aligned or repaired.
"""

import json
from dataclasses import dataclass
from typing import Literal

from mtgrpo.types import Message, ToolCall, ToolSpec

Refusal = Literal["invalid", "overflow", "key", "missing", "closed", "large", "broken"]


canonical_json = json.JSONEncoder(sort_keys=True).encode  # equal for values that are equal; has no line break


class RefusedError(Exception):
    """A request is not answered: `kind` says which of the dialect's errors that is, the message what is wrong."""

    def __init__(self, kind: Refusal, text: str) -> None:
        super().__init__(text)
        self.kind: Refusal = kind


@dataclass(frozen=True, slots=True)
class Address:
    """What a foreign agent is given. Every request that carries the key belongs to its conversation.

    `rewards_key` is for the agent's own program: what the policy can reach must not have it.
    """

    url: str  # http://127.0.0.1:PORT, where Anthropic's SDK sends to; OpenAI's sends to `openai_url`
    key: str  # the API key
    model: str = "policy"  # a name to send; any other is accepted too
    rewards_key: str = ""  # with which rewards are posted, where agent.posts_rewards=true; it samples nothing

    @property
    def openai_url(self) -> str:
        """The base URL of OpenAI's SDK and of those that speak as it does."""
        return f"{self.url}/v1"

    def environ(self) -> dict[str, str]:
        """The variables that the SDKs read, and MTGRPO_URL, MTGRPO_KEY and, where rewards are posted, their key."""
        posts = {"MTGRPO_REWARDS_KEY": self.rewards_key} if self.rewards_key else {}
        return {
            **posts,
            "OPENAI_BASE_URL": self.openai_url,
            "OPENAI_API_BASE": self.openai_url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "MTGRPO_URL": self.url,
            "MTGRPO_KEY": self.key,
            "MTGRPO_MODEL": self.model,
        }


@dataclass(frozen=True, slots=True)
class Entry:
    """One message of a request."""

    message: Message
    ids: tuple[str, ...] = ()  # of the tool calls that it makes

    @property
    def calls(self) -> list[tuple[str, ToolCall]]:
        """Its tool calls, each with its id."""
        return list(zip(self.ids, self.message.tool_calls, strict=True))

    @property
    def meaning(self) -> str:
        """Equal for messages that mean the same. Reasoning does not count: agents may or may not send it."""
        calls = [(call.name, call.arguments) for call in self.message.tool_calls]
        content = self.message.content.strip() if self.message.role == "assistant" else self.message.content
        return canonical_json([self.message.role, content, self.message.name, calls])


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What an agent asks for, whatever the dialect."""

    messages: tuple[Entry, ...]
    tools: tuple[ToolSpec, ...]
    digest: str  # equal for requests with equal bodies
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()  # fields that have no effect here
    retry: int = -1  # how often the client has sent it before, as it says itself; -1 = it does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReply(Entry):
    """What the policy answered."""

    id: str
    finish: Literal["stop", "length", "stop_string"] = "stop"
    context_tokens: int = 0
    output_tokens: int = 0
    stop: str = ""  # the stop string that ended it
