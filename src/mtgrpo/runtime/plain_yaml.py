"""YAML that is plain data, whoever wrote it: of bounded size and depth, without tags, aliases and endless numbers."""

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml
from yaml.constructor import ConstructorError

from mtgrpo.errors import ConfigError

MAX_BYTES = 2**18  # of a file of settings
MAX_DEPTH = 32
MAX_DIGITS = 100
_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is ten times as fast
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


class BrokenYamlError(ConfigError):
    """The text is no YAML."""


class _PlainSafeLoader(_Parser):  # pyright: ignore[reportUntypedBaseClass]
    """As OmegaConf reads: 1e-3 is a number, a date is a text, and a key stands once in its mapping."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [(key.tag, str(key.value)) for key, _ in node.value]
        if len(set(keys)) < len(keys):
            raise ConstructorError(None, None, "a key stands twice", node.start_mark)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: Any) -> Any:
        if node.tag.endswith((":int", ":float")) and len(node.value) > MAX_DIGITS:
            raise ConstructorError(None, None, f"a number of {len(node.value)} digits", node.start_mark)
        return super().construct_scalar(node)


_PlainSafeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(_[0-9]+)*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), "-+0123456789"
)


def read_bounded(path: Path, most: int = MAX_BYTES) -> bytes:
    """What a file holds. Raises ConfigError where there is none, or one of more than `most` bytes."""
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {path}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) > most:
        raise ConfigError(f"{path} has more than {most:,} bytes, which no run or recipe writes")
    return content


def parse_yaml(content: bytes, path: Path) -> Any:
    """The plain data in YAML; None where there is none. path: for messages.

    Raises BrokenYamlError for what is no YAML, and ConfigError for aliases, tags, and what is nested too deep: both are
    looked for first, since libyaml goes down as far as the text does, and aliases of aliases are exponentially many.
    """
    depth = 0
    try:
        for event in yaml.parse(content, _Parser):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) or depth > MAX_DEPTH:
                raise ConfigError(f"{path} has aliases, tags, or more than {MAX_DEPTH} levels: write plain values")
        return yaml.load(content, _PlainSafeLoader)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        cut = re.search(rb": ##|\{[^{}\n'\"]{0,200}\s#", content)  # what follows # in an object on one line
        hint = '; # begins a comment: quote it, as content: "#### 12"' if cut else ""
        raise BrokenYamlError(f"{path} cannot be read: {' '.join(str(error).split()):.500}{hint}") from error
