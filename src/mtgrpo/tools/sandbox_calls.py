"""Calls between two processes in the sandbox that do not trust one another. It needs the standard library alone.

A message is a line of JSON. Values go as data, by their built-in type, and come out as the receiver's own objects. What
is no data stays where it is: the other end gets a `Remote`, and asks for what it wants of it.
"""

import builtins
import importlib
import itertools
import json
import operator
import os
import sys
import traceback
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import Any, cast

MOST_BYTES = 2**25  # of a message
NAME, OWN = "<code>", "<sandbox>"  # files in tracebacks: the code that runs, and what runs it
_SAFE = 2**53


def _call(function: Any, /, *given: Any, **named: Any) -> Any:
    """`operator.call`, which a Python before 3.11 has not: the sandbox's may be older than ours."""
    return function(*given, **named)


_BINARY = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_OF_OBJECTS: dict[str, Callable[..., Any]] = {
    **{"len": len, "bool": bool, "str": str, "repr": repr, "abs": abs, "neg": operator.neg},
    **{"getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem},
}
OPERATIONS: dict[str, Callable[..., Any]] = {
    **_OF_OBJECTS,
    **{name: getattr(operator, name) for name in _BINARY},
    **{"call": _call, "next": next, "iter": iter},
    **{"getattr": getattr, "setattr": setattr, "isinstance": isinstance},
}
_FROM_ITEMS: dict[str, Callable[[list[Any]], Any]] = {
    **{"list": list, "tuple": tuple, "set": set, "frozenset": frozenset},
    "range": lambda items: range(*items),
    "dict": lambda items: dict(zip(items[::2], items[1::2], strict=True)),
}
_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "complex": lambda text: complex(*map(float.fromhex, text.split())),
    "bytes": bytes.fromhex,
    "Decimal": lambda text: importlib.import_module("decimal").Decimal(text),
    "Fraction": lambda text: importlib.import_module("fractions").Fraction(text),
}


class Peer:
    """One end of the calls. `operations`: what the other end may have done here, by name."""

    def __init__(self, descriptor: int, operations: Mapping[str, Callable[..., Any]], judges: bool) -> None:
        self._reader, self._writer = os.fdopen(os.dup(descriptor), "rb"), os.fdopen(descriptor, "wb")
        self._operations, self._judges = operations, judges
        self._lent: list[Any] = []
        self.takes_objects = True  # whether results may be objects that stay there, beside functions by their names
        self.takes_changes = True  # whether lists, dictionaries and sets are afterwards as the other end has them

    def ask(self, operation: str, /, *operands: Any, **named: Any) -> Any:
        """What `operation` gives at the other end, whose calls are answered meanwhile. Raises what it raises."""
        self._send("do", operation, self._encode(operands), self._encode(named))
        while True:
            kind, *parts = self._receive()
            if kind == "do":
                self._do(*parts)
            elif kind == "gave":
                if self.takes_changes:
                    for operand, changed in zip(operands, parts[1], strict=False):
                        _take_over(operand, self._decode(changed))
                return self._decode(parts[0])
            else:
                raise _make_error(operation, parts[0], self._decode(parts[1]))

    def serve(self) -> None:
        """Answer until the other end has gone."""
        while True:
            self._do(*self._receive()[1:])

    def _do(self, operation: str, operands: Any, named: Any) -> None:
        try:
            values = self._decode(operands)
            if self._judges and operands[1][0][0] != "yours":
                raise TypeError("what was given can be called, nothing else")  # type("E", (), ...) makes objects here
            result = self._operations[operation](*values, **self._decode(named))
            after = [self._encode(value) if type(value) in (list, dict, set) else None for value in values]
            changed = [new if new != old else None for old, new in zip(operands[1], after, strict=True)]
            answer = "gave", self._encode(result), changed
        except BaseException as error:
            if not self._judges:
                show(error)
            names = [kind.__name__ for kind in type(error).__mro__]
            answer = "raised", names, self._encode([str(error)])
        self._send(*answer)

    def _send(self, *parts: Any) -> None:
        self._writer.write(json.dumps(parts).encode() + b"\n")
        self._writer.flush()

    def _receive(self) -> list[Any]:
        line = self._reader.readline(MOST_BYTES)
        if not line.endswith(b"\n"):
            raise EOFError("the program has ended, or said too much")
        return json.loads(line)

    def _encode(self, value: Any) -> Any:
        """`value` as JSON. Subclasses of built-in types go as what they are derived from."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, Remote):
            return ["yours", value.__dict__["_number"]]
        for kind in (str, int, float, complex, bytes):
            if isinstance(value, kind):
                return _spell(kind, value)
        for kind in (list, tuple, set, frozenset, range):
            if isinstance(value, kind):
                items = (value.start, value.stop, value.step) if isinstance(value, range) else value
                return [kind.__name__, [self._encode(item) for item in cast(Iterable[Any], items)]]
        if isinstance(value, dict):
            pairs = cast("dict[Any, Any]", value).items()
            return ["dict", [self._encode(each) for pair in pairs for each in pair]]
        module = type(value).__module__
        if module in ("decimal", "fractions") and type(value).__name__ in _FROM_TEXT:
            return [type(value).__name__, str(value)]
        if module == "numpy" and hasattr(value, "tolist"):
            return self._encode(value.tolist())
        if isinstance(value, (KeysView, ValuesView, ItemsView)):
            return self._encode(list(cast(Iterable[Any], value)))
        if isinstance(value, Iterator):
            return ["iterator", self._lend(value)]
        if isinstance(value, type) and vars(builtins).get(value.__name__) is value:
            return ["type", value.__name__]
        if self._judges and not callable(value):
            raise TypeError(f"a program can be given data and functions, not an object of class {type(value).__name__}")
        return ["object", self._lend(value)]

    def _lend(self, value: Any) -> int:
        self._lent.append(value)
        return len(self._lent) - 1

    def _decode(self, coded: Any) -> Any:
        """The value that JSON of the other end stands for. Raises ValueError or TypeError for what stands for none."""
        if coded is None or type(coded) in (bool, str, int):
            return coded
        kind, what = coded
        if kind in _FROM_ITEMS:
            return _FROM_ITEMS[kind]([self._decode(item) for item in what])
        if kind in _FROM_TEXT:
            return _FROM_TEXT[kind](what)
        if kind == "type" and isinstance(built_in := vars(builtins).get(what), type):
            return built_in
        if kind == "yours":
            return self._lent[what]
        if kind == "iterator":
            return _pull(Remote(self, int(what)))
        if kind == "object" and self.takes_objects:
            return Remote(self, int(what))
        raise TypeError("the result is no plain data: number, text, list, tuple, set, dictionary or iterator of such")


class Remote:
    """An object that stays at the other end. Operators work between two such; with data nothing is ever equal."""

    def __init__(self, peer: Peer, number: int) -> None:
        self.__dict__.update(_peer=peer, _number=number)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Remote) and self.__dict__["_peer"].ask("isinstance", instance, self) is True

    __hash__ = object.__hash__


def _add_method(operation: str) -> None:
    """Give `Remote` the method that asks the other end for `operation`."""

    def method(self: Remote, /, *operands: Any, **named: Any) -> Any:
        if operation in _BINARY and not isinstance(operands[0], Remote):
            return NotImplemented
        return self.__dict__["_peer"].ask(operation, self, *operands, **named)

    setattr(Remote, f"__{operation}__", method)


for _operation in (*_OF_OBJECTS, *_BINARY, "getattr", "setattr", "call", "iter"):
    _add_method(_operation)


def _pull(remote: Remote) -> Iterator[Any]:
    """The items of an iterator of the other end, each when it is wanted."""
    while True:
        try:
            item = remote.__dict__["_peer"].ask("next", remote)
        except StopIteration:
            return
        yield item


def _spell(kind: type, value: Any) -> Any:
    if kind is str:
        return str.__str__(value)
    if kind is int:
        whole = int.__int__(value)
        return whole if -_SAFE < whole < _SAFE else ["int", hex(whole)]
    if kind is complex:
        return ["complex", f"{float.hex(value.real)} {float.hex(value.imag)}"]
    return [kind.__name__, cast(Any, kind).hex(value)]


def _take_over(operand: Any, changed: Any) -> None:
    """Change a list, dictionary or set in place to what the other end has made of it."""
    if changed is None or type(changed) is not type(operand):
        return
    if isinstance(operand, list):
        operand[:] = changed
    elif isinstance(operand, (dict, set)):
        cast("dict[Any, Any]", operand).clear()
        cast("dict[Any, Any]", operand).update(changed)


def _make_error(operation: str, names: Sequence[Any], arguments: Sequence[Any]) -> BaseException:
    """An exception of this process' own class: the first of `names` that is a built-in one.

    Only the end of an iterator may be told as such: elsewhere it would end a loop over tests.
    """
    for name in names:
        kind = vars(builtins).get(name) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, Exception):
            if issubclass(kind, (StopIteration, StopAsyncIteration)) and operation != "next":
                break
            return kind.__new__(kind, *arguments)
    return RuntimeError(f"the program raised {names[:1]}")


def show(error: BaseException) -> None:
    """Print the traceback from where the code begins, without the sandbox's own frames."""
    part: traceback.TracebackException | None
    first = part = traceback.TracebackException.from_exception(error)
    while part is not None:
        code = itertools.dropwhile(lambda frame: frame.filename != NAME, part.stack)
        frames = [frame for frame in code if frame.filename != OWN]
        cast(Any, part).stack = traceback.StackSummary.from_list(frames) if frames else None
        part = part.__cause__ or part.__context__
    print("".join(first.format()), end="", file=sys.stderr)
