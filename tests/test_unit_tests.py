"""What tests of a task may do with a program that runs in another process, in real sandboxes."""

from __future__ import annotations

import pytest

from mtgrpo.errors import ConfigError
from mtgrpo.tools.sandbox import Sandbox
from mtgrpo.tools.unit_tests import objects_in, run_tests
from mtgrpo.types import Task
from test_sandbox import kind, nothing_left

pytestmark = pytest.mark.real
__all__ = ["kind", "nothing_left"]  # fixtures

VALUES = "None, True, 2**70, -1.5, float('inf'), 1j, 'ä\\ud800', b'x', [1], (1,), {1}, frozenset({1}), {(1, 2): [None]}"
STACK = """
class Stack:
    def __init__(self, *items): self.items = list(items)
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
"""
PASSING = {
    "values": ("def f(*x): return x", f"values = ({VALUES})\nassert f(*values) == values"),
    "kinds of values": ("def f(x): return x", "assert type(f((1,))) is tuple and type(f(True)) is bool"),
    "numbers": (
        "from decimal import Decimal\nfrom fractions import Fraction\ndef f(): return Decimal('.1'), Fraction(1, 3)",
        "from decimal import Decimal\nfrom fractions import Fraction\nassert f() == (Decimal('.1'), Fraction(1, 3))",
    ),
    "subclasses": (
        "from collections import Counter, namedtuple\ndef f(x): return Counter(x), namedtuple('P', 'x y')(1, 2)",
        "assert f('aab') == ({'a': 2, 'b': 1}, (1, 2))",
    ),
    "named arguments": ("def f(*, a, b=2): return a - b", "assert f(a=5) == 3"),
    "sorted in place": ("def f(x): x.sort()", "x = [2, 1]\nf(x)\nassert x == [1, 2]"),
    "a number and a change": ("def f(x): x.pop(); return 1", "x = [2, 1]\nn = f(x)\nassert x[:n] == [2]"),
    "functions given": ("def f(g, x): return [g(i) for i in x]", "assert f(lambda i: i * i, range(3)) == [0, 1, 4]"),
    "functions returned": ("def f(x): return lambda y: x + y", "assert f(1)(2) == 3"),
    "iterators": (
        "def f(x):\n    while True:\n        yield next(x)\n        x = map(abs, x)",
        "from itertools import islice\nassert list(islice(f(iter([1, -2, 3])), 2)) == [1, 2]",
    ),
    "errors": (
        "class Own(ValueError): pass\ndef f(): raise Own('bad')",
        "try:\n    f()\nexcept ValueError as error:\n    assert str(error) == 'bad'\nelse:\n    assert False",
    ),
    "a main part": ("def f(): return 1\nif __name__ == '__main__':\n    print(f(), input())", "assert f() == 1"),
    "variables": ("LIMIT = 3", "assert LIMIT == 3"),
    "objects": (STACK, "s = Stack(1)\ns.push(2)\nassert len(s) == 2 and list(s) == [1, 2] and s.pop() == 2 and 1 in s"),
    "equal objects": (STACK, "assert Stack(1) == Stack(1) and Stack(1) != Stack(2) and isinstance(Stack(), Stack)"),
    "methods": (
        "class Solution:\n    def f(self, x): return x + 1",
        "def check(f):\n    assert f(1) == 2\ncheck(Solution().f)",
    ),
    "the name of a built-in": ("def sum(a, b): return a + b", "assert sum(1, 2) == 3"),
}


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", PASSING)
async def test_tests_may(name: str) -> None:
    code, tests = PASSING[name]
    found = await run_tests(Sandbox(timeout_s=5), Task("1", (), metadata={"tests": tests}), code)
    assert found.passed, found


FAILING = {
    "another value": ("def f(): return 1", "assert f() == 2", "AssertionError"),
    "another kind": ("def f(): return [1]", "assert f() == (1,)", "AssertionError"),
    "no such function": ("", "assert f() == 2", "NameError"),
    "no data": ("def f(): return object()", "assert f()", "TypeError"),
    "an end of a loop": (
        "def f(x): raise StopIteration",
        "assert all(map(lambda x: f(x) == 1, [1, 2]))",
        "RuntimeError",
    ),
    "a helper of the task": (
        "def near(a, b): return True\ndef f(): return 1",
        "assert near(f(), 2)",
        "AssertionError",
    ),
    "tests that do not run": ("def f(): pass", "import nothing_of_that_name", "ModuleNotFoundError"),
}


async def test_a_program_may_begin_with_what_must_stand_first_and_has_its_own_lines(kind: str) -> None:
    task = Task("1", (), metadata={"setup": "import math\n\ndef f():\n    pass\n", "tests": "assert f(1) == 4"})
    code = "from __future__ import annotations\ndef f(n: X):\n    return math.ceil(n + 2.5)"
    assert (await run_tests(Sandbox(kind=kind, timeout_s=5), task, code)).passed
    assert 'File "<code>", line 2' in (await run_tests(Sandbox(kind=kind, timeout_s=5), task, "x = 1\nx.y")).output


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", FAILING)
async def test_tests_fail_for(name: str, kind: str) -> None:
    code, tests, error = FAILING[name]
    setup = "def near(a, b):\n    return abs(a - b) < 1e-6\n\ndef f():\n    '''To be written.'''\n"
    task = Task("1", (), metadata={"setup": setup, "tests": tests})
    found = await run_tests(Sandbox(kind=kind, timeout_s=5), task, code or "del f")
    assert (found.error, found.stopped) == (error, "") and error in found.output


async def test_what_a_program_prints_and_why_it_fails_is_shown() -> None:
    code = "print('here')\ndef f():\n    raise KeyError('lost')"
    found = await run_tests(Sandbox(timeout_s=5), Task("1", (), metadata={"tests": "f()"}), code)
    assert found.error == "KeyError"
    assert (
        found.output.startswith("here\n")
        and 'File "<code>", line 3' in found.output
        and "<sandbox>" not in found.output
    )


async def test_what_ends_the_program_or_the_judge_is_no_failure() -> None:
    kill = "import os\ndef f():\n    for pid in filter(str.isdigit, os.listdir('/proc')):\n"
    kill += "        if int(pid) not in (1, os.getpid()): os.kill(int(pid), 9)\n    os.kill(1, 2)"
    task = Task("1", (), metadata={"tests": "f()"})
    assert "tests ended with code -9" in (await run_tests(Sandbox(timeout_s=5), task, kill)).stopped
    assert not (await run_tests(Sandbox(timeout_s=5), task, "import os\ndef f(): os._exit(0)")).passed


def test_tests_that_make_objects_are_known() -> None:
    def objects(tests: str, setup: str = "") -> bool:
        return objects_in(Task("1", (), metadata={"tests": tests, "setup": setup}))

    assert objects("s = Stack()") and objects("assert Solution().f(1) == 2") and objects("assert f(1)(2) == 3")
    assert objects("assert f(Node(1)) == 2", "class Node: pass")
    assert not objects("assert Largest([1]) == 1\nassert set(f(1)) == {2}\nfrom decimal import Decimal\nf(Decimal(1))")


def test_tests_that_are_no_python_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"`tests` of task 1.* are no Python"):
        objects_in(Task("1", (), metadata={"tests": "assert f( =="}))
