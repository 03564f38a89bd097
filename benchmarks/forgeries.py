"""Wrong programs that try to pass the tests of a task all the same, in real sandboxes: `reward=unit_tests`.

    forgeries.held_share    the share of tries, a program on one kind of tests each, that earned 0 and were no failure

The programs and the kinds of tests are those of tests/attack/forgeries.py. A right program passes every kind.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from record import finish

from mtgrpo.tools.sandbox import Sandbox
from mtgrpo.tools.unit_tests import run_tests
from mtgrpo.types import Task

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "attack"))
from forgeries import FORGERIES, METHOD, RIGHT, TESTS


async def passes(sandbox: Sandbox, code: str, tests: str) -> bool | None:
    """Whether a program passes; None where the sandbox fails."""
    try:
        return (await run_tests(sandbox, Task("forged", (), metadata={"tests": tests}), code + METHOD)).passed
    except (OSError, RuntimeError):
        return None


async def main() -> None:
    sandbox = await Sandbox(timeout_s=2, memory_mb=256).opened()
    right = await asyncio.gather(*(passes(sandbox, RIGHT, tests) for tests in TESTS.values()))
    assert all(right), right
    found = {
        name: await asyncio.gather(*(passes(sandbox, code, tests) for tests in TESTS.values()))
        for name, code in FORGERIES.items()
    }
    detail = {name: {"tries": len(tried), "held": tried.count(False)} for name, tried in found.items()}
    tries, held = (sum(row[key] for row in detail.values()) for key in ("tries", "held"))
    finish("forgeries", {"forgeries.held_share": held / tries}, detail, "forgeries.json")


if __name__ == "__main__":
    asyncio.run(main())
