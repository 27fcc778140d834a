"""The program of a model.ssx is checked when it is read, whoever signed it: it computes what was built, or is refused.

Changed programs run in processes of their own, because one that is wrongly accepted may write anywhere.
"""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import network_support as support
import numpy as np
import pytest
from child_environment import child_environment
from hypothesis import given
from hypothesis import strategies as st

import schedsearch
from schedsearch.errors import DatabaseError, SchemaVersionError
from schedsearch.executable.assemble import Executable
from schedsearch.executable.check import ProgramError, check
from schedsearch.executable.file import load
from schedsearch.executable.program import Program, seal, unseal
from schedsearch.executable.stored import save
from schedsearch.executable.written import Written
from schedsearch.fields import FieldError, read
from schedsearch.identity import canonical_json
from schedsearch.records import trust

NETWORK = support.two_convolutions()


@pytest.fixture(scope="module")
def executable() -> Executable:
    return support.build(NETWORK, schedsearch.detect("cpu"))


@pytest.fixture
def path(executable: Executable, tmp_path: Path) -> Path:
    save(executable, tmp_path / "model.ssx")
    return tmp_path / "model.ssx"


def stored(path: Path) -> dict[str, Any]:
    """The program of a file, without its checksum."""
    with sqlite3.connect(path) as connection:
        return unseal(connection.execute("SELECT program FROM executable").fetchone()[0], required=True)


def put(path: Path, text: str, version: int = 5) -> None:
    """Another program in the file, which the user then trusts."""
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE executable SET program = ?, version = ?", (text, version))
    connection.close()
    trust.trust(path)


# ---- a file


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", DatabaseError, "its program cannot run: it is not JSON"),
        ("[" * 100_000, DatabaseError, "its program cannot run: it is not JSON"),
        ("[]", DatabaseError, "it is a list; allowed: an object"),
        ("{}", DatabaseError, "does not match its checksum"),
        ('{"a": 1, "a": 2}', DatabaseError, "a field occurs twice"),
        (seal("{}"), DatabaseError, "target is None; allowed: text"),
        (seal('{"target": "cpu", "model": "m", "kind": "later"}'), SchemaVersionError, "upgrade schedsearch"),
    ],
)
def test_a_program_that_is_none_is_refused_in_one_line(path: Path, text: str, error: type[Exception], message: str) -> None:
    put(path, text)
    with pytest.raises(error, match=message) as raised:
        load(path)
    assert "\n" not in str(raised.value) and "build" in str(raised.value)


def test_a_program_with_a_field_of_a_later_version_is_said_to_be_later(path: Path) -> None:
    put(path, seal(json.dumps({**stored(path), "streams": 2})))
    with pytest.raises(SchemaVersionError, match=r"a field 'streams', which this version does not know; upgrade"):
        load(path)


def test_a_file_of_the_version_without_checksums_still_runs(path: Path) -> None:
    put(path, canonical_json(stored(path)), version=4)
    x = np.ones((1, 8, 6, 6), np.float32)
    with load(path) as net:
        np.testing.assert_array_equal(net(x), support.truth(NETWORK, {"x": x})["y"])


def places(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Every place in JSON data."""
    items: Any = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def changed(data: Any, place: tuple[str | int, ...], change: str) -> Any:
    """A copy with one place changed."""
    data = json.loads(json.dumps(data))
    holder = data
    for key in place[:-1]:
        holder = holder[key]
    key, old = place[-1], holder[place[-1]]
    if change == "delete":
        del holder[key]
    elif change == "another":
        holder[key] = old + 1 if type(old) in (int, float) else old + "x" if isinstance(old, str) else "text"
    elif change == "type":
        holder[key] = [] if not isinstance(old, list) else {}
    else:
        holder[key] = {"negative": -1, "large": 1 << 40, "huge": 10**30, "null": None, "zero": 0}[change]
    return data


CHANGES = ("delete", "another", "type", "negative", "large", "huge", "null", "zero")


def test_a_trusted_program_that_was_changed_at_any_place_is_refused(path: Path) -> None:
    good = json.loads(seal(json.dumps(stored(path))))
    rng = random.Random(0)
    for place in places(good):
        other = changed(good, place, rng.choice(CHANGES))
        if other != good:
            with pytest.raises(FieldError):
                unseal(json.dumps(other), required=True)
    put(path, json.dumps(changed(good, ("calls", 0, "offsets"), "type")))
    with pytest.raises(DatabaseError, match=r"does not match its checksum, so it was changed after it was built; restore"):
        load(path)


# ---- a program whose author made a checksum

# What the numbers depend on, and nothing but the checksum can know.
FREE = {"scalars", "buffers", "weights", "inputs", "outputs", "constants", "arrays"}

RUNNER = """
import json, sys
import numpy as np, schedsearch
from schedsearch.device import open_device
from schedsearch.errors import DatabaseError, UsageError
from schedsearch.executable.check import check, readable
from schedsearch.executable.program import Program
from schedsearch.executable.stored import Stored
from schedsearch.executable.fixed import FixedNet
x, y = np.ones((1, 8, 6, 6), np.float32), np.load(sys.argv[2])
for line in sys.stdin:
    number, text = line.split(" ", 1)
    print(number, end=" ", flush=True)
    try:
        with readable("f"):
            stored = Stored(sys.argv[1], Program.from_json(text))
            check(stored.program, stored.plans())
        with FixedNet(stored, open_device(schedsearch.detect("cpu"))) as net:
            found = net(x)
        same = found.shape == y.shape and found.dtype == y.dtype and np.array_equal(found, y)
        print("right" if same else "wrong", flush=True)
    except (DatabaseError, UsageError) as error:
        assert "\\n" not in str(error)
        print("refused", flush=True)
"""


def outcomes(path: Path, programs: list[Any], folder: Path) -> list[str]:
    """What became of each program, with the code and weights of a file: refused, right or wrong."""
    truth = support.truth(NETWORK, {"x": np.ones((1, 8, 6, 6), np.float32)})["y"]
    np.save(folder / "y.npy", truth.astype(np.float32))
    lines = "".join(f"{number} {json.dumps(each)}\n" for number, each in enumerate(programs))
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, path, folder / "y.npy"], input=lines, capture_output=True, text=True,
        env=child_environment(), timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout[-200:], done.stderr[-2000:])
    return [line.split()[1] for line in done.stdout.splitlines()]


@pytest.mark.long
def test_a_program_changed_at_any_place_is_refused_or_computes_the_same(path: Path, tmp_path: Path) -> None:
    good = stored(path)
    tried = [(place, change) for place in places(good) for change in CHANGES if place[0] != "reasons"]
    tried = [(place, change) for place, change in tried if changed(good, place, change) != good]
    found = outcomes(path, [good, *(changed(good, place, change) for place, change in tried)], tmp_path)
    assert found[0] == "right"
    wrong = [each for each, outcome in zip(tried, found[1:], strict=True) if outcome == "wrong"]
    assert [each for each in wrong if not FREE & {str(key) for key in each[0]}] == []
    assert found.count("refused") > len(found) // 2


@pytest.mark.long
def test_a_program_whose_addresses_and_calls_are_mixed_up_never_leaves_its_memory(path: Path, tmp_path: Path) -> None:
    """Several changes at once, of numbers to other numbers of the program."""
    good, rng = stored(path), random.Random(1)
    numbers = [place for place in places(good) if place[0] in ("arrays", "calls", "inputs", "outputs", "copies")]
    programs = []
    for _ in range(300):
        other = good
        for place in rng.sample(numbers, 3):
            holder: Any = other
            try:
                for key in place:
                    holder = holder[key]
            except (KeyError, IndexError, TypeError):
                continue
            if type(holder) is int:
                values = [256, 512, 1024, 0, 1, 2, 3, 4, 5, holder * 2, holder + 256]
                other = json.loads(json.dumps(other))
                holder = other
                for key in place[:-1]:
                    holder = holder[key]
                holder[place[-1]] = rng.choice(values)
        calls = list(other["calls"])
        rng.shuffle(calls)
        programs.append({**other, "calls": calls if rng.random() < 0.3 else other["calls"][: rng.randrange(1, 4)]})
    assert len(outcomes(path, programs, tmp_path)) == len(programs)


# ---- the rules


def rejected(executable: Executable, program: Program, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        check(program, {sha256: each.plan for sha256, each in executable.artifacts.items()})


def test_what_is_built_obeys_the_rules(executable: Executable) -> None:
    check(executable.program, {sha256: each.plan for sha256, each in executable.artifacts.items()})
    assert read(Program, json.loads(executable.program.json)) == executable.program


def test_every_array_is_written_before_it_is_read(executable: Executable) -> None:
    program = executable.program
    rejected(executable, replace(program, calls=()), "output 0 reads 'y' at output 0, which nothing has written there")
    rejected(executable, replace(program, calls=program.calls[::-1]), "which nothing has written there before")


def test_arrays_lie_in_their_memory_and_constants_apart(executable: Executable) -> None:
    program = executable.program
    arena = next(number for number, each in enumerate(program.arrays) if each.place.space == "arena")

    def moved(index: int, offset: int) -> Program:
        array = program.arrays[index]
        arrays = [*program.arrays]
        arrays[index] = replace(array, place=replace(array.place, offset=offset))
        return replace(program, arrays=tuple(arrays))

    rejected(executable, moved(arena, 1 << 40), "outside of the .* bytes there")
    rejected(executable, moved(arena, -256), "outside of the .* bytes there")
    rejected(executable, moved(arena, 3), "which is not aligned")
    rejected(executable, moved(program.inputs[0], 256), "there is no such port")
    kept = [index for index in program.constants if program.arrays[index].place.space == "constant"]
    if len(kept) > 1:
        rejected(executable, moved(kept[1], program.arrays[kept[0]].place.offset), "lies on another one")


def test_calls_get_what_their_workloads_take(executable: Executable) -> None:
    program = executable.program
    number = next(number for number, each in enumerate(program.calls) if each.sources)
    call = program.calls[number]
    name = call.outputs[0]

    def with_call(**changes: Any) -> Program:
        calls = [*program.calls]
        calls[number] = replace(call, **changes)
        return replace(program, calls=tuple(calls))

    rejected(executable, with_call(offsets={name: 1 << 40}), "its array 't' is float32 of")
    rejected(executable, with_call(buffers={**call.buffers, name: 99}), "is array 99; there are arrays 0 to")
    rejected(executable, with_call(buffers={**call.buffers, "zz": 0}), "takes .* and writes")
    rejected(executable, with_call(scalars={"zz": 1.0}), "has the scalars zz")
    rejected(executable, with_call(artifact="ab" * 32), "which is not in the file")
    rejected(executable, with_call(workload="{"), "call ")
    rejected(executable, with_call(outputs=()), "writes")
    other = next(index for each, index in call.buffers.items() if each not in call.outputs)
    rejected(executable, with_call(buffers={**call.buffers, name: other}), r"its array|over|constant")


stretches = st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 3)).map(
    lambda each: (*sorted(each[:2]), each[2])
)


@given(st.lists(stretches, max_size=12), stretches)
def test_what_bytes_hold_is_what_was_written_last(writes: list[tuple[int, int, int]], asked: tuple[int, int, int]) -> None:
    memory, held = Written(), [None] * 40
    for start, end, tag in writes:
        memory.write(start, end, tag)
        held[start:end] = [tag] * (end - start)
    start, end, tag = asked
    assert memory.holds(start, end, tag) == all(each == tag for each in held[start:end])
    assert memory.meets(start, end) == any(each is not None for each in held[start:end])


def test_fields_of_a_wrong_type_name_their_place(executable: Executable) -> None:
    data = json.loads(canonical_json(asdict(executable.program)))
    data["arrays"][1]["shape"][0] = True
    with pytest.raises(FieldError, match=r"arrays/1/shape/0: True is a bool; allowed: int"):
        read(Program, data)
    with pytest.raises(FieldError, match=r"the field 'copies' is missing"):
        read(Program, {name: value for name, value in data.items() if name != "copies"})
