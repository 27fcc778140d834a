"""Files of graphs whose sizes are computed: the program is data, and one that nobody could have built is refused."""

from __future__ import annotations

import copy
import json
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cli_support import isolate
from test_net import FOLDER, pytestmark, target  # noqa: F401  # skips with its reason

import schedsearch
from schedsearch.errors import DatabaseError, SchemaVersionError
from schedsearch.executable.program import seal, unseal
from schedsearch.fields import Codec, FieldError
from schedsearch.records import trust

NAME = "computed_v6.ssx"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    isolate(tmp_path, monkeypatch)
    shutil.copy(FOLDER / NAME, tmp_path / NAME)
    return tmp_path / NAME


def changed(path: Path, change: Callable[[Any], None]) -> Path:
    """The file with another text, which its user then trusts."""
    with sqlite3.connect(path) as connection:
        (text,) = connection.execute("SELECT program FROM executable").fetchone()
        data = unseal(text, required=True)
        change(data)
        connection.execute("UPDATE executable SET program = ?", (seal(json.dumps(data)),))
    connection.close()
    trust.trust(path)
    return path


def test_the_text_has_no_names_of_methods(path: Path) -> None:
    found: dict[str, Any] = {}
    with schedsearch.load(changed(path, lambda data: found.update(copy.deepcopy(data))), target=target()) as net:
        assert len(net.steps) == sum(len(each["calls"]) for each in found["program"]["segments"])
    fields = {"calls", "steps", "values", "fetched"}
    assert all(each.keys() == fields for each in found["program"]["segments"])
    step = next(step for each in found["program"]["segments"] for step in each["steps"])
    assert step["function"].keys() in ({"rule", "params"}, {"workload", "output"})


def call_of(data: Any) -> Any:
    return next(call for segment in data["program"]["segments"] for call in segment["calls"])


def step_of(data: Any) -> Any:
    return next(step for segment in data["program"]["segments"] for step in segment["steps"])


def put(data: Any, *place: Any) -> None:
    """Puts the last argument at the place that the others name."""
    *path, key, value = place
    for each in path:
        data = data[each]
    data[key] = value


IMPOSSIBLE: dict[str, Callable[[Any], None]] = {
    "no words": lambda data: put(data, "program", "words", 0),
    "fewer words": lambda data: put(data, "program", "words", 2),
    "words beyond the block": lambda data: put(data, "program", "values", "x", "words", {"first": 10**6, "count": 2}),
    "negative words": lambda data: put(data, "program", "values", "x", "words", {"first": -1, "count": 2}),
    "a larger array": lambda data: put(data, "program", "values", "x", "shape", [3, 300]),
    "a negative extent": lambda data: put(data, "program", "values", "x", "shape", [3, -3]),
    "another dtype": lambda data: put(data, "program", "values", "x", "dtype", "float64"),
    "no dtype": lambda data: put(data, "program", "values", "x", "dtype", "float"),
    "a view of nothing": lambda data: put(data, "program", "values", "x", "view_of", "nothing"),
    "another limit of a size": lambda data: put(data, "program", "values", "x", "sizes", "0", "most", 300),
    "reversed limits of a size": lambda data: put(data, "program", "values", "x", "sizes", "0", "least", 4),
    "an input that is not there": lambda data: put(data, "program", "inputs", ["x", "begin", "other"]),
    "a name too few": lambda data: data["program"]["called"].pop(),
    "an argument too few": lambda data: call_of(data)["inputs"].popitem(),
    "arguments that nothing makes": lambda data: put(call_of(data), "inputs", dict.fromkeys(call_of(data)["inputs"], "?")),
    "an argument that is made later": lambda data: data["program"]["segments"][0]["calls"].reverse(),
    "another scalar": lambda data: put(call_of(data), "scalars", {"other": 1.0}),
    "a workload that is not there": lambda data: put(call_of(data), "workload", 99),
    "a workload that is none": lambda data: put(data, "workloads", 0, "{}"),
    "a step beyond the block": lambda data: put(step_of(data), "to", "first", 10**6),
    "a step of other words": lambda data: put(step_of(data), "to", "count", 99),
    "a step without its bound": lambda data: put(step_of(data), "bound", [99, 99]),
    "parameters that a rule lacks": lambda data: put(step_of(data), "function", {"rule": "view", "params": {"x": 1}}),
    "a kernel too few": lambda data: data["kernels"].pop(),
    "a kernel of sizes too few": lambda data: data["sizes"].pop(),
    "a way that there is not": lambda data: put(data, "way", "other"),
    "a field of another type": lambda data: put(data, "program", "segments", 0, "calls", {}),
    "a key that is not a number": lambda data: put(data, "program", "values", "x", "sizes", {"n": None}),
}  # fmt: skip


@pytest.mark.parametrize("change", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_program_that_nobody_could_have_built_is_refused(path: Path, change: Callable[[Any], None]) -> None:
    with pytest.raises(DatabaseError, match=r"is damaged: its program cannot run: .*build it again") as raised:
        schedsearch.load(changed(path, change), target=target())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: put(step_of(data), "function", {"rule": "of a later version", "params": {}}),
        lambda data: put(data, "program", "streams", 2),
    ],
    ids=["rule", "field"],
)
def test_what_a_later_version_wrote_is_said_to_be_later(path: Path, change: Callable[[Any], None]) -> None:
    with pytest.raises(SchemaVersionError, match=r"which this version does not know; upgrade"):
        schedsearch.load(changed(path, change), target=target())


# ---- the codec


@dataclass(frozen=True)
class Line:
    base: str | Line
    plus: int


@dataclass(frozen=True)
class Every:
    text: str
    lines: tuple[int | Line, ...]
    pairs: tuple[tuple[str, float], ...]
    axes: dict[int, bool]
    several: tuple[int, ...] | None
    leaf: complex


def test_dataclasses_come_back_as_they_were() -> None:
    value = Every("a", (1, Line(Line("n", 2), 3)), (("x", 1.5), ("y", 2.0)), {0: True, 7: False}, None, 1 + 2j)
    data = json.loads(json.dumps(Codec({complex: lambda each: [each.real, each.imag]}).write(value)))
    reader = Codec({complex: lambda each: complex(*each)})
    assert reader.read(Every, data) == value
    for field, wrong, message in (
        ("lines", ["a"], "lines/0: 'a' is a str; allowed: int, Line"),
        ("pairs", [["x"]], "pairs/0: it is a list; allowed: a list of 2"),
        ("axes", {"-1": True}, "axes: '-1' is not a number"),
        ("several", [1.5], "several/0: 1.5 is"),
        ("more", 1, "a field 'more', which this version does not know"),
    ):
        with pytest.raises(FieldError, match=message):
            reader.read(Every, {**data, field: wrong})
