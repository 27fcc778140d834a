"""Conditions of T1 descriptions have the same meaning as in Python and can do nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import replay_support as support
from cli_support import schedsearch
from hypothesis import given
from hypothesis import strategies as st

from schedsearch.config import Config
from schedsearch.errors import UsageError
from schedsearch.records.formats import kernel_tuner, t4
from schedsearch.records.formats.conditions import MAX_DEPTH, MAX_LENGTH, Condition
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
    "a ** 2 ** 2 > 1",
    "1 << 3 > a",
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
    "(" * 90 + "a" + ")" * 80,
    "-" * MAX_DEPTH + "a",
    "a + " * MAX_DEPTH + "a",
    "a > 1 or " * (MAX_LENGTH // 9) + "a > 1",
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
        "'%9s' % a == name",
        "'a' * 9 != name",
        "name + name",
        "name > 3",
        "not name",
        "max(name, 3) == a",
    ],
)
def test_calculating_with_texts_is_a_clear_error(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"some_T1.json: {text!r} cannot be computed: strings can be compared")):
        holds(text)


@pytest.mark.parametrize(("text", "name"), [("a ** 2 > 1", "Pow"), ("a & b", "BitAnd"), ("~a", "Invert")])
def test_an_operation_that_is_not_allowed_is_named(text: str, name: str) -> None:
    with pytest.raises(UsageError, match=f"column 1: {name} is not allowed"):
        Condition(text, NAMES, Place("some_T1.json"))


@pytest.mark.parametrize("factors", [[2**32, 2**32], [2**62, 3], [999_999_999_999] * 90, [-(10**18)] * 7])
def test_products_of_constants_are_of_64_bits_as_those_of_columns_are(factors: list[int]) -> None:
    """Python's integers would grow without limit; here they wrap around."""
    wrapped = (math.prod(factors) + 2**63) % 2**64 - 2**63
    text = "*".join(map(str, factors))
    assert holds(f"{text} == {wrapped}") == [True] * len(POINTS)
    assert holds(f"{text} > a") == [wrapped > a for a, _, _ in POINTS]
    assert holds(f"{text} * b < a") == [(wrapped * b + 2**63) % 2**64 - 2**63 < a for a, b, _ in POINTS]


@pytest.mark.parametrize("text", ["1.5 % 0 > 1 or a == a", "1.5 / 0.0 > 1 or a == a", "2.5 // False > 1 or a == a"])
def test_a_division_of_constants_by_zero_is_harmless_if_an_or_covers_it(text: str) -> None:
    assert all(holds(text))


def description(tmp_path: Path, data: object) -> t4.Description:
    return t4.Description(support.write(tmp_path / "some_T1.json", data))


def test_the_work_of_all_conditions_is_limited_before_any_runs(tmp_path: Path) -> None:
    """2,000 comparisons of 18 configurations are computed; of 100,000 configurations they would take too long."""
    text = " and ".join(["bx > 0"] * 400)
    made = description(tmp_path, support.t1(*[text] * 5))
    assert [condition.operations for condition in made.conditions] == [400 * 3 + 1] * 5
    entries = kernel_tuner.parse(support.cache(), "some.json").entries
    made.require(entries, [Place("some.json")] * len(entries))
    with pytest.raises(UsageError, match=r"Conditions: the conditions take 108,090,000 operations for 18,000 config"):
        made.require(entries * 1000, [Place("some.json")] * 18_000)


def test_the_length_of_all_conditions_is_limited(tmp_path: Path) -> None:
    text = "bx > 0" + " " * 9_900
    with pytest.raises(UsageError, match=r"Conditions\[20\]: the conditions up to here have more than 200,000 characters"):
        description(tmp_path, support.t1(*[text] * 30))


def test_parts_of_an_expression_are_joined_one_at_a_time() -> None:
    """At most a few columns are alive at once, however many parts an expression has."""
    n, alive, most = 1000, 0, 0

    class Columns(dict[str, np.ndarray]):
        def __getitem__(self, name: str) -> np.ndarray:
            nonlocal alive, most
            column = np.ones(n, np.int64)
            alive, most = alive + 1, max(most, alive + 1)
            weakref.finalize(column, gone)
            return column

    def gone() -> None:
        nonlocal alive
        alive -= 1

    for text in (" or ".join(["a"] * 500), "max(" + ", ".join(["a"] * 500) + ")", "a in [" + ", ".join(["a"] * 500) + "]"):
        assert Condition(text, NAMES, Place("some_T1.json")).holds(Columns(), n).all()
    assert most < 10


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (list(range(100_001)), "has 100,001 values; a parameter may have at most 100,000"),
        (str(list(range(40_000))), "a list in a string of 268,890 characters; at most 200,000 are read"),
        ("[" * 1000 + "]" * 1000, "is not a list of numbers and strings"),
        ("[10**2]", "is not a list of numbers and strings"),
        ("['a'*3]", "is not a list of numbers and strings"),
        (f"[{'9' * 5000}]", "is not a list of numbers and strings"),
    ],
)
def test_long_lists_of_values_are_refused(tmp_path: Path, values: object, message: str) -> None:
    data = support.t1()
    data["ConfigurationSpace"]["TuningParameters"][0]["Values"] = values
    with pytest.raises(UsageError, match=re.escape(message)):
        description(tmp_path, data)


def test_a_long_text_takes_no_memory_for_every_configuration(tmp_path: Path) -> None:
    """In an array of strings each would take the space of the longest: 18,000 of a megabyte are 72 GB."""
    params = {**support.PARAMS, "order": ["row", "column", "x" * 2**20]}
    data = support.t1("order in ['row', 'column']", params=params)
    data["ConfigurationSpace"]["TuningParameters"][2]["Values"] = params["order"]
    made = description(tmp_path, data)
    entries = kernel_tuner.parse(support.cache(), "some.json").entries * 1000
    long = dataclasses.replace(entries[0], config=Config({**entries[0].config, "order": "x" * 2**20}))
    with pytest.raises(UsageError, match=r"last: .* breaks the condition"):
        made.require([*entries, long], [*[Place("some.json")] * len(entries), Place("last")])
