"""A process of its own for one conversation, which has ended with all that it started when the conversation ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from mtgrpo.endpoint import Address

INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE")  # variables; none of them is a secret


async def run_process(
    argv: Sequence[str], folder: Path, address: Address, environment: Mapping[str, str], keep: int
) -> str:
    """Run `argv` in `folder` to its end and return the last `keep` characters that it wrote to stdout and stderr.

    It gets the address in its variables and `environment`, and of the variables here only `INHERITED`. Raises
    RuntimeError for an exit code that is not 0. Its process group is killed, also when this is cancelled.
    """
    home = {"HOME": str(folder), "TMPDIR": str(folder)}
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    written = folder / ".output"
    with written.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=folder,
            env={**inherited, **home, **address.environ(), **environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = await process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what it has left behind
        await process.wait()
    with written.open("rb") as output:
        output.seek(max(0, written.stat().st_size - 4 * keep))
        said = output.read().decode(errors="replace")[-keep:] if keep else ""
    if code:
        raise RuntimeError(f"{argv[0]} ended with exit code {code}: {said[-500:].strip()}")
    return said
