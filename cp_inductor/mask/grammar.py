"""Read expressions of indices from text by Python's parser, without evaluating Python.

    "(k - q <= 0) & (q - k - 127 <= 0)"      =>  sympy.And(sympy.Le(...), sympy.Le(...))
    "__import__('os')"                       =>  InvalidText

Masks come from command lines and from recipes in programs that others have saved, so the text is
not trusted. Of Python's expressions it may contain numbers, operators, and the names and functions
below; every other node of the tree is refused. Its size is bounded, too, so that every text is read
or refused quickly: characters, nodes, nesting, relations, digits, and the number of terms that
products and powers would have if they were multiplied out.
"""

from __future__ import annotations

import ast
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
from sympy import Expr
from sympy.logic.boolalg import Boolean

from cp_inductor.errors import InvalidText
from cp_inductor.mask.language import FUNCTIONS, INDICES, SCORE, Power, Step, table

# A rule that is read from a graph has at most about 2,500 operations, and 64 relations.
MAX_CHARACTERS = 1 << 16
MAX_NODES = 1 << 15
MAX_CALLS = 2048
# Sympy compares these with each other: relations, and the arguments of Min and Max.
MAX_RELATIONS = 256
# What stands in parentheses is up to three levels: a function of a product of a sum.
MAX_DEPTH = 96
MAX_DIGITS = 20
MAX_EXPONENT = 64
MAX_FACTORS = 8
MAX_DIVISIONS = 2
MAX_CASES = 16
# The terms of all products and powers together, if they were multiplied out.
MAX_TERMS = 1024
# Enough for every rule: indices have 63 bits, and are multiplied once.
MAX_BITS = 256

# Python's parser would skip comments, and read strings.
_CHARACTERS = re.compile(r"[\w .,()<>=!&|^~+\-*/%]*", re.ASCII)

# Name => (arguments -> expression, the least and the greatest number of arguments). These, the
# operators and Piecewise are all that `Rule.format` writes, and that `evaluate` understands.
_FUNCTIONS: Mapping[str, tuple[Callable[..., Any], int, int]] = {
    "Eq": (sympy.Eq, 2, 2),
    "Ne": (sympy.Ne, 2, 2),
    "Min": (sympy.Min, 2, 8),
    "Max": (sympy.Max, 2, 8),
    "floor": (sympy.floor, 1, 1),
    "Mod": (sympy.Mod, 2, 2),
    "Step": (Step, 2, 2),
    **{function.__name__: (function, 1, 1) for function in FUNCTIONS if function is not Power},
    "Power": (Power, 2, 2),
}
# Name => (arguments -> whether they are right, what is expected where they are not).
_ARGUMENTS: Mapping[str, tuple[Callable[[Expr, Expr], bool], str]] = {
    "Mod": (lambda _, divisor: divisor.is_Integer and divisor > 0, "a positive integer"),
    "Step": (lambda _, at: at.is_Integer, "an integer"),
    "Power": (lambda base, exponent: base.is_Number or exponent.is_Number, "a number in one place"),
}
_COMPARING = ("Eq", "Ne", "Min", "Max")
_VALUES: dict[str, Any] = {"oo": sympy.oo, **{str(index): index for index in INDICES}}
_TABLE = re.compile("[tx](0|[1-9][0-9]{0,3})", re.ASCII)

_RELATIONS: Mapping[type[ast.cmpop], Callable[..., Any]] = {
    ast.LtE: sympy.Le,
    ast.Lt: sympy.Lt,
    ast.GtE: sympy.Ge,
    ast.Gt: sympy.Gt,
    ast.Eq: sympy.Eq,
    ast.NotEq: sympy.Ne,
}


def parse(text: str, *, of_scores: bool = False) -> Any:
    """Return what a text is: a condition on indices, or a number, of the score s as well.

    Raises:
        InvalidText: the text contains anything else, or is too large.
    """
    reader = _Reader(text, _VALUES | ({str(SCORE): SCORE} if of_scores else {}))
    read = reader.number if of_scores else reader.truth
    return read(reader.parsed())


def check_text(text: object, most: int, *, site: str) -> None:
    """Raise InvalidText for what is no text, or a longer one than is ever written."""
    if isinstance(text, str) and len(text) <= most:
        return
    raise InvalidText(
        site=site,
        expected=f"a text of at most {most} characters",
        got=f"one of {len(text)}" if isinstance(text, str) else f"a {type(text).__name__}",
        remedy="pass what format() wrote",
    )


def shortened(text: str, most: int = 60) -> str:
    """Return a text for a message: quoted, and cut to `most` characters."""
    return repr(text if len(text) <= most else text[: most - 3] + "...")


class _Reader:
    """Reads the tree of one text, and counts what it has read."""

    def __init__(self, text: str, values: Mapping[str, Any]) -> None:
        self.text, self.values = " ".join(text.split()), values
        self.depth = self.num_relations = self.num_calls = self.num_terms = 0
        # By expression: how many terms it would have, multiplied out. Others have one.
        self.terms: dict[Any, int] = defaultdict(lambda: 1)

    def parsed(self) -> ast.expr:
        self._bound(len(self.text), MAX_CHARACTERS, "characters")
        rest = _CHARACTERS.sub("", self.text, count=1)
        if rest:
            raise self._error(shortened(rest, 20))
        try:
            tree = ast.parse(self.text, mode="eval").body
        except SyntaxError as error:
            raise self._error(error.msg if self.text else "the end of the text") from None
        except (RecursionError, MemoryError):
            raise self._error("more than Python's parser can hold") from None
        self._bound(sum(1 for _ in ast.walk(tree)), MAX_NODES, "nodes")
        return tree

    def _error(self, got: str) -> InvalidText:
        return InvalidText(
            site=f"the mask {shortened(self.text)}",
            expected="'causal', 'full', or an expression of the indices b, h, q and k"
            " such as '(k - q <= 0) & (q - k - 127 <= 0)'",
            got=got,
            remedy=f"write it with numbers, + - * / // % **, comparisons, & | ~ and"
            f" {', '.join(_FUNCTIONS)}",
        )

    def _value(self, node: ast.expr) -> Any:
        self.depth += 1
        self._bound(self.depth, MAX_DEPTH, "levels, one within the other")
        value: Any = None
        match node:
            case ast.Constant(value=int() | float() as number):
                if abs(number) >= (math.inf if isinstance(number, float) else 10**MAX_DIGITS):
                    raise self._error(f"the number {shortened(str(number), 20)}")
                value = self._made(sympy.sympify(number), 1)
            case ast.Name(id=name):
                value = self.values.get(name)
                if value is None:
                    raise self._error(f"the name {shortened(name, 20)}, which is no value")
            case ast.Call(func=ast.Name(id="Piecewise"), args=cases, keywords=[]):
                value = self._made(sympy.Piecewise(*self._cases(cases)), 1)
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                value = self._made(self._call(name, arguments), 1)
            case ast.Compare(left=left, ops=ops, comparators=others):
                value = self._compare([left, *others], ops)
            case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=inner):
                value = sympy.Not(self.truth(inner))
            case ast.BoolOp(op=op, values=parts):
                join = sympy.And if isinstance(op, ast.And) else sympy.Or
                value = join(*map(self.truth, parts))
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr() as op):
                join = sympy.And if isinstance(op, ast.BitAnd) else sympy.Or
                value = join(*(self.truth(part) for _, part in _chain(node, type(op))))
            case ast.UnaryOp(op=ast.UAdd() | ast.USub() as op, operand=inner):
                number = self.number(inner)
                signed = -number if isinstance(op, ast.USub) else number
                value = self._made(signed, self.terms[number])
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                links = [(op, self.number(part)) for op, part in _chain(node, ast.Add, ast.Sub)]
                parts = [-part if isinstance(op, ast.Sub) else part for op, part in links]
                value = self._made(sympy.Add(*parts), sum(self.terms[n] for _, n in links))
            case ast.BinOp(op=ast.Mult() | ast.Div() | ast.FloorDiv() | ast.Mod()):
                value = self._product(_chain(node, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod))
            case ast.BinOp(op=ast.Pow(), left=base, right=exponent):
                value = self._power(self.number(base), self.number(exponent))
            case _:
                raise self._error(self._said(node))
        self.depth -= 1
        return value

    def _call(self, name: str, arguments: Sequence[ast.expr]) -> Any:
        if _TABLE.fullmatch(name):
            function, least, most = table(int(name[1:]), is_integer=name[0] == "t"), 1, 4
        elif name in _FUNCTIONS:
            function, least, most = _FUNCTIONS[name]
        else:
            raise self._error(f"the name {shortened(name, 20)}, which is no function")
        if not least <= len(arguments) <= most:
            wanted = str(least) if least == most else f"{least} to {most}"
            raise self._error(f"{name} of {len(arguments)} arguments, where it has {wanted}")
        self.num_calls += 1
        self._bound(self.num_calls, MAX_CALLS, "functions and tables")
        if name in _COMPARING:
            self._count_relations(len(arguments) - 1)
        numbers = [self.number(argument) for argument in arguments]
        is_right, expected = _ARGUMENTS.get(name, (None, ""))
        if is_right is not None and not is_right(*numbers):
            raise self._error(f"{name} of {numbers[-1]}, expected {expected}")
        try:
            return function(*numbers)
        except ValueError as error:
            raise self._error(f"{name} of {error}") from None

    def _cases(self, cases: Sequence[ast.expr]) -> list[tuple[Expr, Boolean]]:
        """Return the cases of Piecewise((value, condition), ...)."""
        self._bound(len(cases), MAX_CASES, "cases of a Piecewise")
        pairs = []
        for case in cases:
            if not isinstance(case, ast.Tuple) or len(case.elts) != 2:
                raise self._error(f"{self._said(case)} as a case of Piecewise")
            pairs.append((self.number(case.elts[0]), self.truth(case.elts[1])))
        if not pairs or pairs[-1][1] != sympy.true:
            raise self._error("Piecewise whose last condition is not True")
        return pairs

    # --- Operators ------------------------------------------------------------------------------

    def _compare(self, operands: Sequence[ast.expr], ops: Sequence[ast.cmpop]) -> Boolean:
        self._count_relations(len(ops))
        if not all(type(op) in _RELATIONS for op in ops):
            raise self._error("'in' or 'is'")
        numbers = [self.number(operand) for operand in operands]
        pairs = zip(ops, numbers, numbers[1:], strict=False)
        return sympy.And(*(_RELATIONS[type(op)](left, right) for op, left, right in pairs))

    def _product(self, links: Sequence[tuple[ast.operator | None, ast.expr]]) -> Expr:
        divisions = sum(isinstance(op, (ast.Div, ast.FloorDiv, ast.Mod)) for op, _ in links)
        self._bound(divisions, MAX_DIVISIONS, "divisions in one product")
        numbers = [(op, self.number(part)) for op, part in links]
        num_factors = sum(not number.is_number for _, number in numbers)
        self._bound(num_factors, MAX_FACTORS, "factors of one product")
        factors: list[Expr] = []
        for op, number in numbers:
            if op is None or isinstance(op, ast.Mult):
                factors.append(number)
            else:
                factors = [self._divided(op, sympy.Mul(*factors), number)]
        num_terms = math.prod(self.terms[number] for _, number in numbers)
        return self._made(sympy.Mul(*factors), num_terms, is_product=True)

    def _divided(self, op: ast.operator, value: Expr, divisor: Expr) -> Expr:
        is_number = divisor.is_number and divisor.is_positive
        if isinstance(op, ast.Div):
            if is_number or (isinstance(divisor, sympy.Pow) and divisor.base.is_number):
                return value / divisor
        elif is_number and divisor.is_Integer:
            is_whole = isinstance(op, ast.FloorDiv)
            return sympy.floor(value / divisor) if is_whole else sympy.Mod(value, divisor)
        wanted = "number" if isinstance(op, ast.Div) else "integer"
        raise self._error(f"a division by {shortened(str(divisor), 20)}, no positive {wanted}")

    def _power(self, base: Expr, exponent: Expr) -> Expr:
        if base.is_number and base.is_positive and base.is_finite:
            is_plain = isinstance(exponent, (sympy.Integer, sympy.Float))
            is_small = is_plain and abs(exponent) <= MAX_EXPONENT
            is_right, num_terms = is_small or not exponent.is_number, 1
        else:
            is_right = isinstance(exponent, sympy.Integer) and 1 <= exponent <= MAX_FACTORS
            num_terms = self.terms[base] ** int(exponent) if is_right else 1
        if not is_right:
            raise self._error(f"the exponent {shortened(str(exponent), 20)}")
        return self._made(base**exponent, num_terms, is_product=True)

    # --- Bounds ---------------------------------------------------------------------------------

    def _bound(self, number: int, most: int, what: str) -> None:
        if number > most:
            raise self._error(f"more than {most} {what}")

    def _said(self, node: ast.expr) -> str:
        return shortened(ast.get_source_segment(self.text, node) or "", 20)

    def number(self, node: ast.expr) -> Expr:
        value = self._value(node)
        if not isinstance(value, Expr):
            raise self._error(f"the condition {self._said(node)}, where a number was to come")
        return value

    def truth(self, node: ast.expr) -> Boolean:
        value = self._value(node)
        if not isinstance(value, Boolean) or isinstance(value, Expr):
            raise self._error(f"the number {self._said(node)}, where a condition was to come")
        return value

    def _count_relations(self, more: int) -> None:
        self.num_relations += more
        self._bound(self.num_relations, MAX_RELATIONS, "relations")

    def _made(self, value: Any, num_terms: int, *, is_product: bool = False) -> Any:
        """Record how many terms an expression has; refuse NaN and numbers that are too large.

        Sympy has not multiplied out products.
        """
        self.num_terms += num_terms if is_product and num_terms > 1 else 0
        if self.num_terms > MAX_TERMS:
            raise self._error(f"products of more than {MAX_TERMS} terms")
        if isinstance(value, Expr):
            coefficient = value.as_coeff_Mul()[0]
            if coefficient in (sympy.nan, sympy.zoo):
                raise self._error("what is not a number")
            parts = sympy.fraction(coefficient) if coefficient.is_Rational else ()
            if any(abs(int(part)).bit_length() > MAX_BITS for part in parts):
                raise self._error(f"a number of more than {MAX_BITS} bits")
            self.terms[value] = max(num_terms, self.terms[value])
        return value


def _chain(node: ast.expr, *ops: type[ast.operator]) -> list[tuple[ast.operator | None, ast.expr]]:
    """Return the operands of a chain a + b - c, each with the operator ahead of it.

    A chain is joined at once: making a sum term by term takes quadratic time.
    """
    links: list[tuple[ast.operator | None, ast.expr]] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ops):
        links.append((node.op, node.right))
        node = node.left
    return [(None, node), *reversed(links)]
