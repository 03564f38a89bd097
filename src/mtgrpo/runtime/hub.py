"""The Hugging Face hub: whether it is asked, and whether it answers."""

import functools
import os
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from mtgrpo.errors import ConfigError, UnreachableError

PATIENCE_S = 4.0  # for an answer; to resolve its name alone may take longer


def stay_offline() -> None:
    """From here on no library asks the hub: they take what they have kept of it on this machine."""
    from huggingface_hub import constants  # noqa: PLC0415  settings alone import no library

    constants.HF_HUB_OFFLINE = True


def _may_have(name: str) -> bool:
    return not Path(name).exists() and re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name) is not None


def _is_here(name: str) -> bool:
    """Whether there is a folder of this name with a configuration, or what the hub's own library keeps of it."""
    from huggingface_hub import constants  # noqa: PLC0415

    return any(Path(name).glob("*.json")) or Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}").is_dir()


@functools.cache
def _try() -> None:
    """Where the hub does not answer in time, no library asks it any more: they would try again for a minute."""
    import httpx  # noqa: PLC0415  as the hub's own library, so by the same proxies and certificates
    from huggingface_hub import constants  # noqa: PLC0415

    answered = threading.Event()

    def ask() -> None:
        with suppress(httpx.HTTPError, httpx.InvalidURL, OSError):
            httpx.head(constants.ENDPOINT, timeout=PATIENCE_S)
            answered.set()

    if not constants.HF_HUB_OFFLINE:
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(PATIENCE_S)
        if not answered.is_set():
            stay_offline()


@contextmanager
def refuse_unloadable(what: str, name: str, cure: str, kind: str = "") -> Generator[None]:
    """Within, whatever keeps `what`, called `name`, from being loaded is a ConfigError that says the `cure`.

    A missing name, a missing network and a damaged file have no common base. Raises UnreachableError where it may be on
    the hub, which does not answer or is not asked. kind: of the repository, such as "datasets/".
    """
    from huggingface_hub import constants  # noqa: PLC0415

    if _may_have(name):
        _try()
    elif not Path(name).exists():
        raise ConfigError(f"{what} cannot be loaded: there is no such folder; {cure}")
    try:
        if not kind and not _is_here(name) and (constants.HF_HUB_OFFLINE or not _may_have(name)):
            raise FileNotFoundError("there is no folder of a model")  # sooner than those whose import takes seconds
        yield
    except ConfigError:
        raise
    except Exception as error:
        if constants.HF_HUB_OFFLINE and _may_have(name):
            raise UnreachableError(
                f"{what} is not on this machine, and {constants.ENDPOINT} does not answer or is not asked; {cure}"
            ) from error
        reason = str(error).partition("\n")[0] or type(error).__name__
        if re.search(r"gated|cannot be accessed|40[13] Client|Unauthorized|Forbidden", str(error)):
            account = "HF_TOKEN is set: its" if os.environ.get("HF_TOKEN") else "set HF_TOKEN to a token whose"
            page = f"{constants.ENDPOINT}/{kind}{name}"
            cure += f"; if it is gated or private, {account} account must have been given access at {page}"
        raise ConfigError(f"{what} cannot be loaded ({reason}); {cure}") from error
