"""Fuzzes conditions of T1 descriptions: an expression is computed as Python would, or refused, and never runs as code.

Half of the expressions come from the grammar that is allowed, and are compared with Python's own arithmetic, row by row. The
others have forbidden parts, or are strings that were mutated.
"""

from __future__ import annotations

import builtins
import random
from pathlib import Path
from typing import Any

import numpy as np

from schedsearch.errors import UsageError
from schedsearch.records.formats.conditions import Condition
from schedsearch.records.formats.recording import Place

from . import fuzzing
from .commands import check_error
from .fuzzing import Broken, Result

NAME = "conditions"
FILE = "some_T1.json"
ROWS = 12
_RNG = np.random.default_rng(0)
COLUMNS: dict[str, Any] = {
    "bx": _RNG.choice([1, 2, 16, 32, 64, 128], ROWS),
    "by": _RNG.choice([1, 3, 8], ROWS),
    "tile": _RNG.integers(-3, 9, ROWS),
    "ratio": _RNG.choice([0.5, 1.5, 2.0], ROWS),
    "flag": _RNG.choice([True, False], ROWS),
    "order": _RNG.choice(["row", "column"], ROWS),
}
_NUMBERS = ("bx", "by", "tile", "ratio", "flag")
_FORBIDDEN = (
    *("__import__('os').system('true')", "open('/etc/passwd').read()", "bx.__class__", "().__class__.__bases__[0]", "bx[0]"),
    *("fuzz_trap()", "(lambda: fuzz_trap())()", "[x for x in (1,)]", "{**{}}", "f'{fuzz_trap()}'", "9**2**2", "1 << 9"),
    *("bx @ by", "~bx", "(y := 3)", "await bx", "yield", "min(*[1, 2])", "min(1, 2, key=fuzz_trap)", "max(bx)", "min()"),
    *("print(1)", "bx if by else tile", "'a' * 9", "'%s' % bx", "'a' + order", "1j", "b'x'", "...", "None", "bx is by"),
    *("bx in tile", "bx in ()", "bx in []", "9" * 400, "1e999", "-9223372036854775808", "9223372036854775807 + 1", "0 // 0"),
    *(
        "bx % 0",
        "1 / 0",
        "1.5 % 0",
        "unknown",
        "bx, by",
        "{bx}",
        "bx not in [1]",
        "order < 3",
        "order == 3",
        "order < 'row'",
    ),
    *("-order", "not order", "True + True", "'row'", "1.5", "", " ", "\x00", "bx\nby", "#", "\\", "bx == 1 #", "0x10 == 16"),
    *("1_0 == 10", "0b1 == bx", "00 == 0", "é", "ｂｘ == 1", "bx ＝ 1", "\ud800", "bx > 1;", "import os", "exec('1')"),
)


class Conditions:
    """See `fuzzing.Fuzzer`."""

    def __init__(self) -> None:
        setattr(builtins, "fuzz_trap", _trap)  # noqa: B010  # no expression may find it

    def case(self, random: random.Random, folder: Path) -> str:
        how = random.random()
        if how < 0.5:
            return self._allowed(_expression(random, 0), random)
        text = _expression(random, 0, forbidden=0.2)
        if how < 0.75:
            text = _mutated(text, random)
        if how > 0.97:
            text = random.choice(
                ("(" * 60 + text + ")" * 60, "-" * 110 + "1", "not " * 110 + "bx", " or ".join([text] * 90),
                 "+".join(["1"] * 110), "bx in [" + ",".join(map(str, range(2000))) + "]", text * 50, "1" + "<2" * 300,
                 "min(" * 90 + "1, 2" + ", 1)" * 90, "(" * 90)
            )  # fmt: skip
        try:
            held = Condition(text, COLUMNS.keys(), Place(FILE)).holds(COLUMNS, ROWS)
        except UsageError as error:
            check_error(error, (FILE,), "the condition")
            return "refused"
        if held.shape != (ROWS,) or held.dtype != np.bool_:
            raise Broken(f"{text!r} gives {held.dtype} of shape {held.shape}")
        return "computed"

    @staticmethod
    def _allowed(text: str, random: random.Random) -> str:
        """An allowed expression gives what Python gives in every row in which Python gives something."""
        try:
            held = Condition(text, COLUMNS.keys(), Place(FILE)).holds(COLUMNS, ROWS)
        except UsageError as error:
            check_error(error, (FILE,), "the condition")
            if "nested" in str(error) or "characters" in str(error):
                return "too deep"
            raise Broken(f"the allowed expression {text!r} is refused: {error}") from None
        for row in range(ROWS):
            names = {name: column[row].item() for name, column in COLUMNS.items()}
            try:
                wanted = bool(eval(text, {"__builtins__": {}, "min": min, "max": max}, names))
            except ZeroDivisionError:
                continue
            if held[row] != wanted:
                raise Broken(f"{text!r} is {held[row]} for {names}, Python says {wanted}")
        return "as Python"


def _trap(*arguments: Any) -> Any:
    raise Broken("an expression ran as code")


def _expression(rng: random.Random, depth: int, forbidden: float = 0.0) -> str:
    """A random text that is true or false; with `forbidden`, parts of it may be anything."""
    if rng.random() < forbidden / (depth + 1):
        return rng.choice(_FORBIDDEN)
    how = rng.random()
    if depth < 4 and how < 0.25:
        parts = [_expression(rng, depth + 1, forbidden) for _ in range(rng.choice((2, 2, 3)))]
        return "(" + rng.choice((" and ", " or ")).join(parts) + ")"
    if depth < 4 and how < 0.32:
        return f"(not {_expression(rng, depth + 1, forbidden)})"
    if how < 0.4:
        return _texts(rng)
    links = rng.choice((1, 1, 1, 2))
    text = _number(rng, depth + 1, forbidden)
    for _ in range(links):
        text += f" {rng.choice(('<', '<=', '>', '>=', '==', '!='))} {_number(rng, depth + 1, forbidden)}"
    if links == 1 and rng.random() < 0.1:
        choices = ", ".join(_number(rng, 9, forbidden) for _ in range(rng.randrange(1, 4)))
        return f"({_number(rng, depth + 1, forbidden)} {rng.choice(('in', 'not in'))} [{choices}])"
    return f"({text})"


def _texts(rng: random.Random) -> str:
    return rng.choice(
        (
            "(order == 'row')",
            "('column' != order)",
            "(order in ['row', 'x'])",
            "(order not in ('x', 'column'))",
            "flag",
            "(flag)",
        )
    )


def _number(rng: random.Random, depth: int, forbidden: float) -> str:
    if rng.random() < forbidden / (depth + 1):
        return rng.choice(_FORBIDDEN)
    if depth > 4 or rng.random() < 0.4:
        return rng.choice((*_NUMBERS, *_NUMBERS, "0", "1", "2", "3", "16", "1024", "0.5", "1.0", "True"))
    how = rng.random()
    if how < 0.1:
        return f"{rng.choice(('min', 'max'))}({_number(rng, depth + 1, forbidden)}, {_number(rng, depth + 1, forbidden)})"
    if how < 0.15:
        return f"(-{_number(rng, depth + 1, forbidden)})"
    operation = rng.choice(("+", "-", "*", "/", "//", "%"))
    return f"({_number(rng, depth + 1, forbidden)} {operation} {_number(rng, depth + 1, forbidden)})"


_PIECES = (*"()[].'\",:=\n\t\x00é\\#@; 9a", "**", "__")


def _mutated(text: str, rng: random.Random) -> str:
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(text) + 1)
        piece = rng.choice(
            (
                "(",
                ")",
                "[",
                "]",
                ".",
                "'",
                '"',
                ",",
                ":",
                "=",
                "**",
                "\n",
                "\t",
                "\x00",
                "é",
                "\\",
                "#",
                "@",
                ";",
                " ",
                "9",
                "a",
            )
        )
        text = rng.choice(
            (text[:at] + piece + text[at:], text[:at] + text[at + 1 :], text[:at], text[:at] + rng.choice(_FORBIDDEN))
        )
    return text


def run(seed: int, count: int, folder: Path, deadline_s: float | None = None, first: int = 0, **options: Any) -> Result:
    """See `fuzzing.run`."""
    return fuzzing.run(NAME, Conditions(), seed, count, folder, deadline_s, first=first, **options)
