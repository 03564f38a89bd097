"""The Hugging Face hub: whether it is asked, and whether it answers."""

from __future__ import annotations

import functools
import os
import queue
import re
import threading
from pathlib import Path

from mtgrpo.errors import UnreachableError

PATIENCE_S = 4.0  # for an answer; to resolve its name alone may take longer


def stay_offline() -> None:
    """From here on no library asks the hub: they take what they have kept of it on this machine."""
    from huggingface_hub import constants  # noqa: PLC0415  settings alone import no library

    constants.HF_HUB_OFFLINE = True


def try_hub(name: str) -> None:
    """To be called before libraries look for `name`: where the hub does not answer in time, nothing asks it any more.

    Left to themselves they would try again for a minute.
    """
    if _may_have(name):
        _try()


def _may_have(name: str) -> bool:
    """Whether it is no folder or file of this machine, but may be a name on the hub."""
    return not Path(name).exists() and re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name) is not None


@functools.cache
def _try() -> None:
    import httpx  # noqa: PLC0415  as the hub's own library, so by the same proxies and certificates
    from huggingface_hub import constants  # noqa: PLC0415

    answers: queue.Queue[bool] = queue.Queue()

    def ask() -> None:
        try:
            answers.put(httpx.head(constants.ENDPOINT, timeout=PATIENCE_S).status_code > 0)
        except (httpx.HTTPError, httpx.InvalidURL, OSError):
            answers.put(False)

    if constants.HF_HUB_OFFLINE:
        return
    threading.Thread(target=ask, daemon=True).start()
    try:
        answered = answers.get(timeout=PATIENCE_S)
    except queue.Empty:
        answered = False
    if not answered:
        stay_offline()


def refuse_offline(name: str, what: str, cure: str) -> None:
    """Raise UnreachableError where the hub was not asked for `what`, called `name`, which was not found."""
    from huggingface_hub import constants  # noqa: PLC0415

    if constants.HF_HUB_OFFLINE and _may_have(name):
        raise UnreachableError(
            f"{what} is not on this machine, and {constants.ENDPOINT} does not answer or is not asked; {cure}"
        )


def rights(error: Exception, page: str) -> str:
    """How to get at what the hub keeps for some, for the end of a message; "" where `error` is about something else.

    page: of the repository on the hub, such as datasets/NAME.
    """
    from huggingface_hub import constants  # noqa: PLC0415

    if not re.search(r"gated|cannot be accessed|40[13] Client|Unauthorized|Forbidden", str(error)):
        return ""
    known = "HF_TOKEN is set: its account" if os.environ.get("HF_TOKEN") else "set HF_TOKEN to a token whose account"
    return f"; if it is gated or private, {known} must have been given access at {constants.ENDPOINT}/{page}"
