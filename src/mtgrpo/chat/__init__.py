"""Messages <-> tokens: the only code that knows chat templates and tool-call formats.

What the policy sampled is never decoded and encoded again: `extend` returns only the new tokens, which follow the
context and the sampled output. Text that the policy did not sample cannot become a special token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mtgrpo.chat.base import Chat, ChatSettings, Thinking, Tools

__all__ = ["Chat", "ChatSettings", "Thinking", "Tools", "open_chat"]


def open_chat(tokenizer: Any, settings: ChatSettings) -> Chat:
    """The chat of `tokenizer` (a transformers fast tokenizer).

    With `chat.template=auto` the library `renderers` renders the models that it knows by name; for all others the
    tokenizer's own template is used. Raises ConfigError when there is no usable template.
    """
    from mtgrpo.chat.template import TemplateChat, template_source  # noqa: PLC0415  settings alone import no library
    from mtgrpo.model.load import end_tokens  # noqa: PLC0415

    name = str(tokenizer.name_or_path)
    added = set(tokenizer.get_added_vocab().values())
    ends = [token for token in end_tokens(name) if token in added] if name else []
    on_hub = "/" in name and not Path(name).exists()
    if on_hub and settings.template == "auto" and settings.tools is not Tools.prompt:
        from mtgrpo.chat.renderer import RendererChat, known_config  # noqa: PLC0415

        config = known_config(name)
        if config is not None and (chat := RendererChat(tokenizer, config, settings.thinking, ends)).knows_tools:
            return chat
    return TemplateChat(tokenizer, template_source(tokenizer, settings.template), settings, ends)
