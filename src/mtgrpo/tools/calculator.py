"""Exact arithmetic for models: short to describe, bounded in time, the same digits on every machine."""

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal, Inexact
from fractions import Fraction
from functools import partial
from typing import Any

from simpleeval import InvalidExpression, SimpleEval  # pyright: ignore[reportMissingTypeStubs]

from mtgrpo.tools import Tool, ToolError

ROUNDED_DIGITS = 12  # significant digits of a result with no end, such as 1/3
_FOREIGN = re.compile(r"[^0-9.+\-*/%() ]")


@dataclass
class Calculator(Tool, max_length=">= 1", max_digits=">= 1 and <= 1000"):
    """Evaluates + - * / // % ** and parentheses on integers and decimals, exactly.

    A result of up to `max_digits` digits comes out in full (0.1 + 0.2 is 0.3), one with more decimals or with no end is
    rounded to 12 significant digits. Every number on the way is bounded too, so no expression can take long.
    """

    blocking = False

    max_length: int = 200  # characters of an expression
    max_digits: int = 40  # digits of an integer, and of a fraction's numerator and denominator

    def __call__(self, expression: str) -> str:
        """Evaluate an arithmetic expression."""
        if len(expression) > self.max_length:
            raise ToolError(f"the expression is longer than {self.max_length} characters")
        expression = expression.strip()
        # Of these characters alone no names, texts, attributes or lists can be made.
        if foreign := _FOREIGN.search(expression):
            raise ToolError(f"cannot read {foreign[0]!r}: use numbers, + - * / // % ** and parentheses")
        try:
            return self._text(self._evaluate(expression))
        except ZeroDivisionError:
            raise ToolError("division by zero") from None
        except (RecursionError, MemoryError):  # MemoryError is how the parser says it
            raise ToolError("the expression is nested too deeply") from None
        except (InvalidExpression, SyntaxError):
            raise ToolError(f"cannot read {expression!r}") from None

    def _evaluate(self, expression: str) -> Fraction:
        evaluator: Any = SimpleEval(
            operators={
                ast.USub: operator.neg,
                ast.UAdd: operator.pos,
                ast.Add: self._exact(operator.add),
                ast.Sub: self._exact(operator.sub),
                ast.Mult: self._exact(operator.mul),
                ast.Div: self._exact(operator.truediv),
                ast.FloorDiv: self._exact(operator.floordiv),
                ast.Mod: self._exact(operator.mod),
                ast.Pow: self._power,
            },
            functions={},
            names={},
        )
        evaluator.nodes[ast.Constant] = partial(self._literal, expression)
        return evaluator.eval(expression)

    def _literal(self, expression: str, node: ast.Constant) -> Fraction:
        if node.value is ...:
            raise InvalidExpression(expression)
        return self._bounded(Fraction(expression[node.col_offset : node.end_col_offset]))  # floats would be rounded

    def _exact(self, operation: Callable[[Any, Any], Any]) -> Callable[[Fraction, Fraction], Fraction]:
        return lambda left, right: self._bounded(Fraction(operation(left, right)))

    def _power(self, base: Fraction, exponent: Fraction) -> Fraction:
        if exponent.denominator != 1:
            raise ToolError("an exponent must be a whole number")
        largest = max(abs(base.numerator), base.denominator)
        # The power has at least (bits - 1) * |exponent| bits and a digit less than 4: refused before it is computed.
        if (largest.bit_length() - 1) * abs(exponent) > 4 * self.max_digits:
            raise self._too_long()
        return self._bounded(base ** int(exponent))

    def _bounded(self, number: Fraction) -> Fraction:
        limit = 10**self.max_digits
        if abs(number.numerator) >= limit or number.denominator >= limit:
            raise self._too_long()
        return number

    def _too_long(self) -> ToolError:
        return ToolError(f"a number has more than {self.max_digits} digits")

    def _text(self, number: Fraction) -> str:
        numerator, denominator = Decimal(number.numerator), Decimal(number.denominator)
        if denominator == 1:
            return str(number.numerator)
        context = Context(prec=self.max_digits)
        quotient = context.divide(numerator, denominator)
        if context.flags[Inexact]:
            whole_digits = len(str(abs(number.numerator) // number.denominator))
            context = Context(prec=max(ROUNDED_DIGITS, whole_digits))
            quotient = context.divide(numerator, denominator)
        return format(quotient.normalize(context), "f")
