"""Conditions of T1 descriptions have the same meaning as in Python and can do nothing else."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import replay_support as support
from cli_support import schedsearch
from hypothesis import given
from hypothesis import strategies as st

from schedsearch.errors import UsageError
from schedsearch.records.formats.conditions import Condition
from schedsearch.records.formats.recording import Place

NAMES = ("a", "b", "name")
POINTS = list(itertools.product((0, 1, 2, 3, 16), (-1, 0, 2, 5), ("x", "y")))
COLUMNS = {name: np.array(column) for name, column in zip(NAMES, zip(*POINTS))}


def holds(text: str) -> list[bool]:
    return Condition(text, NAMES, Place("some_T1.json")).holds(COLUMNS, len(POINTS)).tolist()


def python(text: str) -> list[bool]:
    """Python's own result. An `and` or `or` must cover a division by zero."""
    code = compile(text.strip(), "<condition>", "eval")
    return [bool(eval(code, {"__builtins__": {}, "min": min, "max": max}, dict(zip(NAMES, point)))) for point in POINTS]


@pytest.mark.parametrize(
    "text",
    [
        "a * 2 + 1 <= 3",
        "a == 0 or b % a == 0",
        "not (a > 1 and b > 1)",
        "0 < a <= 3 != b",
        "a // 2 == b or -a - b < -(2 * 8)",
        "(a + b) / 2 >= 1.5",
        "a in [1, 2, 16] and b not in (0,)",
        "name == 'x' or a > 2",
        "name in ['x']",
        "max(a, b, 2) - min(a, b) < 3",
        "(a > 1) + (b > 1) == 2",
        "-(a > 1) < 0",
        "a",
        "True",
        "a == 1 or (b == 2 or name != \"y\") and not a",
        " use " .replace("use", "a < 2 "),
    ],
)  # fmt: skip
def test_a_condition_has_the_same_meaning_as_in_python(text: str) -> None:
    assert holds(text) == python(text)


_leaf = st.sampled_from(["a", "b", "1", "2", "7"])
_number = st.recursive(_leaf, lambda x: st.tuples(x, st.sampled_from(["+", "-", "*"]), x).map(lambda t: f"({' '.join(t)})"))
_comparison = st.tuples(_number, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), _number).map(" ".join)
_condition = st.recursive(
    _comparison,
    lambda x: st.one_of(
        st.tuples(x, st.sampled_from(["and", "or"]), x).map(lambda t: f"({' '.join(t)})"), x.map(lambda t: f"not ({t})")
    ),
    max_leaves=5,
)


@given(_condition)
def test_random_conditions_have_the_same_meaning_as_in_python(text: str) -> None:
    assert holds(text) == python(text)


ATTACKS = [
    "__import__('os').system('touch pwned')",
    "open('pwned', 'w')",
    "print(1) or True",
    "len(name) > 0",
    "abs(a) > 1",
    "max(a)",
    "max(*[a, b])",
    "max(a, b, key=print)",
    "(lambda: a)()",
    "a.real > 0",
    "name[0] == 'x'",
    "[a for a in (1, 2)]",
    "a if b else a",
    "(a := 3) > 2",
    "f'{a}' == '1'",
    "a ** 9 ** 9 ** 9 > 1",
    "1 << 99999999999",
    "a is b",
    "a in name",
    "unknown > 1",
    "__builtins__",
    "a = 3",
    "a >",
    "",
    "1j == a",
    "b'x' == name",
    "None == a",
    "... == a",
    "99999999999999999999 > a",
    "(" * 5000 + "a" + ")" * 4000,
    "-" * 9000 + "a",
    "a + " * 4000 + "a",
    "await a",
    "a\x00b",
]


@pytest.mark.parametrize("text", ATTACKS, ids=range(len(ATTACKS)))
def test_nothing_else_is_accepted_and_nothing_is_run(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"^some_T1\.json: "):
        Condition(text, NAMES, Place("some_T1.json"))
    assert list(tmp_path.iterdir()) == []


def test_the_command_names_file_place_and_call_and_exits_with_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    support.write(Path("some_T1.json"), support.t1("bx > 0", "print('run') or open('pwned', 'w')"))
    support.write(Path("some_T4.json"), support.t4(support.cache()))
    result = schedsearch("replay", "some_T4.json")
    assert result.exit_code == 2 and result.stdout == "" and result.stderr.count("\n") == 1
    assert "some_T1.json: ConfigurationSpace.Conditions[1].Expression" in result.stderr
    assert "calls a function: print('run')" in result.stderr
    assert not Path("pwned").exists()


@pytest.mark.parametrize(
    "text",
    [
        "name * 2 == a",
        "'%99999999999s' % a == name",
        "'a' * 9999999999 != name",
        "name + name",
        "name > 3",
        "not name",
        "max(name, 3) == a",
    ],
)
def test_calculating_with_texts_is_a_clear_error(text: str) -> None:
    """This holds even if the result would fill the memory."""
    with pytest.raises(UsageError, match=re.escape(f"some_T1.json: {text!r} cannot be computed: texts can be compared")):
        holds(text)


@pytest.mark.parametrize(("text", "name"), [("a ** 2 > 1", "Pow"), ("a & b", "BitAnd"), ("~a", "Invert")])
def test_an_operation_that_is_not_allowed_is_named(text: str, name: str) -> None:
    with pytest.raises(UsageError, match=f"column 1: {name} is not allowed"):
        Condition(text, NAMES, Place("some_T1.json"))


@pytest.mark.parametrize("factors", [[2**32, 2**32], [2**62, 3], [999_999_999_999] * 90, [-(10**18)] * 7])
def test_products_of_constants_are_of_64_bits_as_those_of_columns_are(factors: list[int]) -> None:
    """Python's whole numbers would grow without limit; here they wrap around."""
    wrapped = (math.prod(factors) + 2**63) % 2**64 - 2**63
    text = "*".join(map(str, factors))
    assert holds(f"{text} == {wrapped}") == [True] * len(POINTS)
    assert holds(f"{text} > a") == [wrapped > a for a, _, _ in POINTS]
    assert holds(f"{text} * b < a") == [(wrapped * b + 2**63) % 2**64 - 2**63 < a for a, b, _ in POINTS]


@pytest.mark.parametrize("text", ["1.5 % 0 > 1 or a == a", "1.5 / 0.0 > 1 or a == a", "2.5 // False > 1 or a == a"])
def test_a_division_of_constants_by_zero_is_harmless_if_an_or_covers_it(text: str) -> None:
    assert all(holds(text))
