"""Files of other tuners with any value at any place are read, or refused with an error that names the file."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import replay_support as support
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schedsearch.errors import UsageError
from schedsearch.records.formats.exchange import import_file
from schedsearch.records.store import Store
from schedsearch.replay import load, run

CACHE = support.cache({"bx": [16, 32, 128], "unroll": [1, 2], "order": ["row"], "fixed": [7]})
LINE = {
    "input": ["cuda", "dense", [["TENSOR", [1, 64], "float32"]], {}],
    "config": {"index": 7, "code_hash": None, "entity": [["tile", "sp", [-1, 2]], ["unroll", "ot", 512]]},
    "result": [[0.0015, 0.0017], 0, 2.5, 1600000000.5],
    "version": 0.2,
}

_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**20, 10**400, 1e20, 1e308, 5e-324, -0.0, "\ud800"]),
    st.floats(),
    st.text(),
)
VALUES = st.one_of(_scalars, st.lists(_scalars, max_size=3), st.dictionaries(st.text(), _scalars, max_size=2))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [each for key, item in inside for each in [(*path, key), *places(item, (*path, key))]]


@st.composite
def bent(draw: st.DrawFn, value: Any) -> str:
    """The text of a JSON value with one or two of its parts replaced or removed."""
    changed = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 2))):
        *path, last = draw(st.sampled_from(places(changed)))
        at = changed
        for step in path:
            at = at[step]
        if draw(st.booleans()) and isinstance(at, dict):
            del at[last]
        else:
            at[last] = draw(VALUES)
        if not places(changed):
            break
    return json.dumps(changed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


FUZZ = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def replayed_or_refused(path: Path) -> None:
    try:
        (space,) = load([path]).spaces
    except UsageError as error:
        assert "some_T" in str(error) or path.name in str(error)
    else:
        assert run(space, "random", 0, 3).proposals >= 2


@FUZZ
@given(text=bent(CACHE))
def test_kernel_tuner_caches(folder: Path, text: str) -> None:
    replayed_or_refused(support.write(folder / "cache.json", text))


@FUZZ
@given(text=bent(support.t4(CACHE)))
def test_t4_results(folder: Path, text: str) -> None:
    support.write(folder / "some_T1.json", support.t1("bx > 0"))
    replayed_or_refused(support.write(folder / "some_T4.json", text))


@FUZZ
@given(text=bent(support.t1("bx > 0", "unroll < 9")))
def test_t1_descriptions(folder: Path, text: str) -> None:
    support.write(folder / "some_T1.json", text)
    replayed_or_refused(support.write(folder / "some_T4.json", support.t4(CACHE)))


@settings(FUZZ, max_examples=30)
@given(text=bent(LINE))
def test_autotvm_logs(folder: Path, text: str) -> None:
    path = support.write(folder / "some.log", f"{json.dumps(LINE)}\n{text}\n")
    with Store.open(folder / "fuzz.db") as store:
        try:
            import_file(store, path, "autotvm")
        except UsageError as error:
            assert str(error).startswith(f"{path}")
        else:
            assert store.history()
