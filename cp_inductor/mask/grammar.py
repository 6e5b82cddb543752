"""Parse expressions of indices from text, without evaluating Python.

    "(k - q <= 0) & (q - k - 127 <= 0)"      =>  sympy.And(sympy.Le(...), sympy.Le(...))
    "__import__('os')"                       =>  InvalidText

Masks come from command lines and from recipes in programs that others have saved, so the text is
not trusted. It may contain numbers, the names and functions of a `Grammar`, and Python's operators
with Python's precedence. Its size is bounded, too, so that every text is parsed or refused quickly:
characters, words, nesting, relations, digits, and the number of terms that products and powers
would have if they were multiplied out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from sympy import Expr
from sympy.logic.boolalg import Boolean

from cp_inductor.errors import InvalidText

# A rule that is read from a graph has at most about 2,500 operations, and 64 relations.
MAX_CHARACTERS = 1 << 16
MAX_WORDS = 1 << 14
MAX_CALLS = 2048
# Sympy compares these with each other: relations, and the arguments of Min and Max.
MAX_RELATIONS = 256
MAX_DEPTH = 32
MAX_DIGITS = 20
MAX_EXPONENT = 64
MAX_FACTORS = 8
MAX_DIVISIONS = 2
MAX_CASES = 16
# The terms of all products and powers together, if they were multiplied out.
MAX_TERMS = 1024
# Enough for every rule: indices have 63 bits, and are multiplied once.
MAX_BITS = 256

_WORD = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<sign>\*\*|//|<=|>=|==|!=|[-+*/%<>&|^~(),]))",
    re.ASCII,
)

# Python's precedence, from the operators that bind least to those that bind most.
_LEVELS = (
    ("or",),
    ("and",),
    ("not",),
    ("<=", "<", ">=", ">", "==", "!="),
    ("|",),
    ("^",),
    ("&",),
    ("+", "-"),
    ("*", "/", "//", "%"),
    ("**",),
)
_LEVEL = {sign: level for level, signs in enumerate(_LEVELS) for sign in signs}
_NOT, _RELATION, _SUM, _POWER = (_LEVEL[sign] for sign in ("not", "<=", "+", "**"))
_RELATIONS: Mapping[str, Callable[..., Any]] = {
    "<=": sympy.Le,
    "<": sympy.Lt,
    ">=": sympy.Ge,
    ">": sympy.Gt,
    "==": sympy.Eq,
    "!=": sympy.Ne,
}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a text may call.

    Attributes:
        build: arguments -> expression; raises ValueError if it does not accept the arguments.
        num_arguments: the least and the greatest number of arguments.
        compares: sympy compares the arguments with each other, so they count as relations.
    """

    build: Callable[..., Any]
    num_arguments: tuple[int, int]
    compares: bool = False


@dataclass(frozen=True, slots=True)
class Grammar:
    """The names that a text may contain.

    Attributes:
        values: constants and indices by name.
        functions: by name.
        tables: the pattern of the names of run-time tables, and name -> function.
    """

    values: Mapping[str, Any]
    functions: Mapping[str, Function]
    tables: tuple[re.Pattern[str], Callable[[str], Function]]

    def parse(self, text: str) -> Any:
        """Return the expression that a text stands for.

        Raises:
            InvalidText: the text is not in the grammar, or too large.
        """
        return _Reader(self, text).read()


def check_text(text: object, most: int, *, site: str) -> None:
    """Refuse what is no text, or a longer one than is ever written.

    Raises:
        InvalidText: says what it is.
    """
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
    """A recursive-descent parser of one text, which counts what it has read."""

    def __init__(self, grammar: Grammar, text: str) -> None:
        self.grammar, self.text = grammar, text
        self.words = self._split()
        self.at = self.depth = self.num_relations = self.num_calls = self.num_terms = 0
        # By expression: how many terms it would have, multiplied out. Others have one.
        self.terms: dict[Any, int] = {}

    def read(self) -> Any:
        value = self._expression()
        if self.at < len(self.words):
            raise self._error(f"{self.words[self.at]!r} where the expression was at its end")
        return value

    def _error(self, got: str) -> InvalidText:
        return InvalidText(
            site=f"the mask {shortened(self.text)}",
            expected="'causal', 'full', or an expression of the indices b, h, q and k"
            " such as '(k - q <= 0) & (q - k - 127 <= 0)'",
            got=got,
            remedy=f"write it with numbers, + - * / // % **, comparisons, & | ~ and"
            f" {', '.join(self.grammar.functions)}",
        )

    def _split(self) -> list[str]:
        if len(self.text) > MAX_CHARACTERS:
            raise self._error(f"{len(self.text)} characters, more than {MAX_CHARACTERS}")
        words, at, end = [], 0, len(self.text.rstrip())
        while at < end:
            match = _WORD.match(self.text, at)
            if match is None:
                raise self._error(f"{shortened(self.text[at:].lstrip(), 20)}")
            words.append(match.group().strip())
            at = match.end()
        if len(words) > MAX_WORDS:
            raise self._error(f"{len(words)} words, more than {MAX_WORDS}")
        return words

    # --- Words ----------------------------------------------------------------------------------

    @property
    def _next(self) -> str:
        return self.words[self.at] if self.at < len(self.words) else ""

    def _take(self) -> str:
        word = self._next
        self.at += 1
        return word

    def _expect(self, word: str) -> None:
        if self._next != word:
            got = repr(self._next) if self._next else "the end"
            raise self._error(f"{got} where {word!r} was to come")
        self._take()

    # --- Expressions ----------------------------------------------------------------------------

    def _expression(self, lowest: int = 0) -> Any:
        """Read operands, and the operators between them that bind at least as `lowest`."""
        value = self._operand()
        while (level := _LEVEL.get(self._next, -1)) >= lowest and level != _NOT:
            # Join a chain a + b + c at once: making a sum term by term takes quadratic time.
            signs, operands = [], [value]
            while _LEVEL.get(self._next) == level:
                signs.append(self._take())
                operands.append(self._expression(level + 1))
            value = self._join(level, signs, operands)
        return value

    def _operand(self) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} levels, one within the other")
        word = self._take()
        match word:
            case "(":
                value = self._expression()
                self._expect(")")
            case "+" | "-":
                inner = self._number_of(self._expression(_POWER), word)
                value = self._made(inner if word == "+" else -inner, self._terms_of(inner))
            case "~" | "not":
                value = sympy.Not(
                    self._truth_of(self._expression(_NOT + 1 if word == "not" else _POWER), word)
                )
            case _:
                value = self._atom(word)
        self.depth -= 1
        return value

    def _atom(self, word: str) -> Any:
        if word[:1].isdigit() or word[:1] == ".":
            return self._number(word)
        if word in self.grammar.values:
            return self.grammar.values[word]
        pattern, make_table = self.grammar.tables
        if word == "Piecewise":
            return self._piecewise()
        if pattern.fullmatch(word):
            return self._call(word, make_table(word))
        if word in self.grammar.functions:
            return self._call(word, self.grammar.functions[word])
        if word.isidentifier() and word not in _LEVEL:
            raise self._error(f"the name {shortened(word, 20)}, which it does not know")
        raise self._error(f"{word!r} where a value was to come" if word else "the end of the text")

    def _number(self, word: str) -> Expr:
        if word.isdigit():
            if len(word) > MAX_DIGITS:
                raise self._error(f"a number of {len(word)} digits, more than {MAX_DIGITS}")
            return sympy.Integer(int(word))
        value = float(word)
        if len(word) > 2 * MAX_DIGITS or not math.isfinite(value):
            raise self._error(f"the number {shortened(word, 20)}")
        return sympy.Float(value)

    def _call(self, name: str, function: Function) -> Any:
        arguments = self._arguments(name)
        least, most = function.num_arguments
        if not least <= len(arguments) <= most:
            wanted = str(least) if least == most else f"{least} to {most}"
            raise self._error(f"{name} of {len(arguments)} arguments, where it has {wanted}")
        self.num_calls += 1
        if self.num_calls > MAX_CALLS:
            raise self._error(f"more than {MAX_CALLS} functions and tables")
        if function.compares:
            self._count_relations(len(arguments) - 1)
        try:
            value = function.build(*(self._number_of(argument, name) for argument in arguments))
        except ValueError as error:
            raise self._error(f"{name} of {error}") from None
        return self._made(value, 1)

    def _arguments(self, name: str) -> list[Any]:
        if self._next != "(":
            raise self._error(f"{name} without its arguments")
        self._take()
        arguments = [self._expression()]
        while self._next == ",":
            self._take()
            arguments.append(self._expression())
        self._expect(")")
        return arguments

    def _piecewise(self) -> Expr:
        """Read Piecewise((value, condition), ...)."""
        self._expect("(")
        cases = []
        while True:
            case = self._arguments("a case of Piecewise")
            if len(case) != 2:
                raise self._error(f"a case of Piecewise of {len(case)} parts")
            cases.append(
                (self._number_of(case[0], "Piecewise"), self._truth_of(case[1], "Piecewise"))
            )
            if self._next != ",":
                break
            self._take()
        self._expect(")")
        if len(cases) > MAX_CASES:
            raise self._error(f"Piecewise of {len(cases)} cases, more than {MAX_CASES}")
        if cases[-1][1] != sympy.true:
            raise self._error("Piecewise whose last condition is not True")
        return self._made(sympy.Piecewise(*cases), 1)

    # --- Operators ------------------------------------------------------------------------------

    def _join(self, level: int, signs: Sequence[str], operands: Sequence[Any]) -> Any:
        sign = signs[0]
        if level == _RELATION:
            return self._compare(signs, operands)
        if level < _SUM:
            truths = [self._truth_of(operand, sign) for operand in operands]
            if sign == "^":
                raise self._error("'^': write (a & ~b) | (b & ~a)")
            return (sympy.And if sign in ("&", "and") else sympy.Or)(*truths)
        numbers = [self._number_of(operand, sign) for operand in operands]
        if level == _POWER:
            return self._power(*numbers) if len(numbers) == 2 else self._refuse_towers()
        if level == _SUM:
            parts = [-n if s == "-" else n for n, s in zip(numbers, ["+", *signs], strict=True)]
            return self._made(sympy.Add(*parts), sum(map(self._terms_of, numbers)))
        return self._product(signs, numbers)

    def _refuse_towers(self) -> Any:
        raise self._error("a power of a power")

    def _compare(self, signs: Sequence[str], operands: Sequence[Any]) -> Boolean:
        self._count_relations(len(signs))
        numbers = [self._number_of(n, s) for n, s in zip(operands, [signs[0], *signs], strict=True)]
        pairs = zip(signs, numbers, numbers[1:], strict=False)
        return sympy.And(*(_RELATIONS[sign](left, right) for sign, left, right in pairs))

    def _product(self, signs: Sequence[str], numbers: Sequence[Expr]) -> Expr:
        if sum(not number.is_number for number in numbers) > MAX_FACTORS:
            raise self._error(f"a product of more than {MAX_FACTORS} factors")
        if sum(sign != "*" for sign in signs) > MAX_DIVISIONS:
            raise self._error(f"more than {MAX_DIVISIONS} divisions in one product")
        value, num_terms = numbers[0], self._terms_of(numbers[0])
        factors = [value]
        for sign, number in zip(signs, numbers[1:], strict=True):
            if sign == "*":
                factors.append(number)
            else:
                value = self._divided(sign, sympy.Mul(*factors), number)
                factors = [value]
            num_terms *= self._terms_of(number)
            self._check_terms(num_terms)
        if num_terms > 1:
            self.num_terms += num_terms
            self._check_terms(self.num_terms)
        return self._made(sympy.Mul(*factors), num_terms)

    def _divided(self, sign: str, value: Expr, divisor: Expr) -> Expr:
        is_number = divisor.is_number and divisor.is_positive
        is_scale = isinstance(divisor, sympy.Pow) and divisor.base.is_number
        if not (is_number or (is_scale and sign == "/")):
            raise self._error(f"a division by {shortened(str(divisor), 20)}, not a positive number")
        if sign == "/":
            return value / divisor
        if not isinstance(divisor, sympy.Integer):
            raise self._error(f"{sign!r} by {divisor}, which is no integer")
        return sympy.floor(value / divisor) if sign == "//" else sympy.Mod(value, divisor)

    def _power(self, base: Expr, exponent: Expr) -> Expr:
        if base.is_number and base.is_positive and base.is_finite:
            if exponent.is_number and not abs(exponent) <= MAX_EXPONENT:
                raise self._error(f"the exponent {shortened(str(exponent), 20)}")
            if exponent.is_number and not isinstance(exponent, (sympy.Integer, sympy.Float)):
                raise self._error(f"the exponent {exponent}, which is no integer")
            return self._made(base**exponent, 1)
        if not isinstance(exponent, sympy.Integer) or not 1 <= exponent <= MAX_FACTORS:
            raise self._error(f"the exponent {shortened(str(exponent), 20)}")
        num_terms = self._terms_of(base) ** int(exponent)
        self._check_terms(num_terms)
        self.num_terms += num_terms
        self._check_terms(self.num_terms)
        return self._made(base**exponent, num_terms)

    # --- Bounds ---------------------------------------------------------------------------------

    def _number_of(self, value: Any, where: str) -> Expr:
        if not isinstance(value, Expr):
            raise self._error(f"a condition beside {where!r}, where a number was to come")
        return value

    def _truth_of(self, value: Any, where: str) -> Boolean:
        if not isinstance(value, Boolean) or isinstance(value, Expr):
            raise self._error(f"a number beside {where!r}, where a condition was to come")
        return value

    def _count_relations(self, more: int) -> None:
        self.num_relations += more
        if self.num_relations > MAX_RELATIONS:
            raise self._error(f"more than {MAX_RELATIONS} relations")

    def _check_terms(self, num_terms: int) -> None:
        if num_terms > MAX_TERMS:
            raise self._error(f"products of more than {MAX_TERMS} terms")

    def _terms_of(self, value: Expr) -> int:
        return self.terms.get(value, 1)

    def _made(self, value: Any, num_terms: int) -> Any:
        """Record how many terms an expression has; refuse NaN and numbers that are too large."""
        if isinstance(value, Expr):
            coefficient = value.as_coeff_Mul()[0]
            if coefficient in (sympy.nan, sympy.zoo):
                raise self._error("what is not a number")
            parts = sympy.fraction(coefficient) if coefficient.is_Rational else ()
            if any(abs(int(part)).bit_length() > MAX_BITS for part in parts):
                raise self._error(f"a number of more than {MAX_BITS} bits")
            self.terms[value] = max(num_terms, self.terms.get(value, 1))
        return value
