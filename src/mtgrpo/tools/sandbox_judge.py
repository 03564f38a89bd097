"""The judge of a program: runs a task's tests where the program cannot reach them. Standard library alone.

Names that neither Python nor the tests nor the task's own code have are the program's; it runs in another process.
"""

import ast
import builtins
import contextlib
import importlib
import sys
from collections.abc import Callable
from typing import Any

from mtgrpo.tools.sandbox_calls import NAME, OPERATIONS, Peer

Execute = Callable[[str | ast.Module, dict[str, Any]], str]
_UNCHANGED = "<unchanged>"  # no name that code could have


class _Names(dict[str, Any]):
    """The built-in names of this process; all others are the program's."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(vars(builtins))
        self._peer = peer

    def of_program(self, name: str) -> Any:
        usual, self._peer.takes_objects = self._peer.takes_objects, True
        try:
            return self._peer.ask("name", name)
        finally:
            self._peer.takes_objects = usual

    __missing__ = of_program


class _Unchanged:
    """While it lasts, lists that are given to the program stay as they are: it could make expected and found equal."""

    def __init__(self, peer: Peer) -> None:
        self._peer, self._depth = peer, 0

    def __enter__(self) -> None:
        self._depth += 1
        self._peer.takes_changes = False

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._peer.takes_changes = self._depth == 0


class _Guarded(ast.NodeTransformer):
    """Puts statements that compare what calls give into `with _Unchanged`."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return _held(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        inner = [part for part in ast.walk(node.value) if isinstance(part, ast.Call) and part is not node.value]
        return _held(node) if any(call.args or call.keywords for call in inner) else node


def _held(node: ast.stmt) -> ast.AST:
    name = ast.Name(_UNCHANGED, ast.Load())
    return ast.copy_location(ast.With([ast.withitem(name)], [node]), node)


def uses_objects(setup: str, tests: str) -> bool:
    """Whether tests make objects of a program's classes, or call what its functions give: such objects stay with it.

    The task alone decides this. A method of such an object may answer what a test wants to hear.
    """
    if any(isinstance(node, ast.ClassDef) for node in ast.parse(setup).body):
        return True
    nodes = list(ast.walk(ast.parse(tests)))
    compared = [part for node in nodes if isinstance(node, ast.Compare) for part in (node.left, *node.comparators)]
    classes = {node.id for node in nodes if isinstance(node, ast.Name) and node.id[0].isupper()}
    classes -= set(dir(builtins)) | _bound(tests) | _bound(setup)
    return any(
        isinstance(node.func, ast.Call)
        or (isinstance(node.func, ast.Name) and node.func.id in classes and node not in compared)
        for node in nodes
        if isinstance(node, ast.Call)
    )


def _bound(text: str) -> set[str]:
    """The names that code gives a meaning to, anywhere."""
    names = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    return names


def judge(setup: str, tests: str, objects: bool, descriptor: int, execute: Execute) -> str:
    """Run `setup` and `tests` against the program at the other end. Gives the name of what they raise; "" = passed."""
    peer = Peer(descriptor, {name: OPERATIONS[name] for name in ("call", "next")}, judges=True)
    peer.takes_objects = objects
    builtin_names = _Names(peer)
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtin_names, _UNCHANGED: _Unchanged(peer)}
    if error := execute(setup, names):
        return error
    for name in _left_to_the_program(setup):
        names.pop(name, None)
    tree = ast.parse(tests, NAME)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - _bound(tests) - set(names)
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    names.update({name: importlib.import_module(name) for name in (used - called) & sys.stdlib_module_names})
    if used <= set(dir(builtins)):  # then the function that is tested has the name of a built-in one
        for name in used & called:
            with contextlib.suppress(NameError):
                names[name] = builtin_names.of_program(name)
    return execute(ast.fix_missing_locations(_Guarded().visit(tree)), names)


def _left_to_the_program(setup: str) -> list[str]:
    """What the task's own code only begins: classes, and functions whose body says nothing."""
    return [
        node.name
        for node in ast.parse(setup).body
        if isinstance(node, ast.ClassDef)
        or (isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and all(map(_says_nothing, node.body)))
    ]


def _says_nothing(statement: ast.stmt) -> bool:
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return constant or isinstance(statement, (ast.Pass, ast.Raise, ast.Import, ast.ImportFrom))
