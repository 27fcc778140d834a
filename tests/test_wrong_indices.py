"""Indices of gather and scatter that are out of range: kernels note them, and a call raises for them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from dynamic_support import emulated, on_device
from gather_scatter_support import MODULES, OPEN, TEMPLATES, WORKLOADS, example

from schedsearch import Workload, gather
from schedsearch import compile as compile_
from schedsearch.device.index_notes import IndexNotes
from schedsearch.errors import IndexRangeError
from schedsearch.ops.dtypes import encode
from schedsearch.ops.wrong_index import WRONG_INDEX


def one_wrong(workload: Workload, end: int) -> tuple[dict[str, Any], tuple[int, ...], int]:
    """An example with one index out of range, at one of both ends: the arrays, its place, its axis. The place is the last
    one in use along every axis."""
    arrays = example(workload, wrong=False, least=3)
    place = tuple(n // 2 for n in workload.indices)
    axis = workload.params.get("batch_dims", 0) + place[-1] if workload.by == "tuples" else workload.axis
    extent = arrays.get("x_extents", workload.x)[axis]
    arrays["indices"][place] = extent if end else -extent - 1
    if workload.dynamic:
        arrays["indices_extents"] = np.array(place) + 1
    return arrays, place, axis


def noted(workload: Workload, words: Any) -> tuple[tuple[int, ...], int] | None:
    """The place and the index in the words that a kernel was given."""
    return (tuple(map(int, np.unravel_index(words[0] - 1, workload.indices))), int(words[1])) if words[0] else None


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.label)
@pytest.mark.mostly_long(3)
def test_emulated_kernels_note_the_index_that_is_out_of_range(monkeypatch: pytest.MonkeyPatch, workload: Workload) -> None:
    template, _ = TEMPLATES[workload.op]
    for number, each in enumerate((workload, *(workload.replace(**some) for some in OPEN))):
        arrays, place, _ = one_wrong(each, number % 2)
        words = np.zeros(2, np.int64)
        emulated(monkeypatch, template, each, arrays, None, *MODULES, also={WRONG_INDEX: words})
        assert noted(each, words) == (place, arrays["indices"][place])
        words[:] = 5, 7  # what was noted before stays
        emulated(monkeypatch, template, each, arrays, None, *MODULES, also={WRONG_INDEX: words})
        assert words.tolist() == [5, 7]
        words[:] = 0
        if not each.dynamic:
            arrays = example(each, wrong=False)
            emulated(monkeypatch, template, each, arrays, None, *MODULES, also={WRONG_INDEX: words})
            assert not words.any()
        for axis in range(len(place) - (each.by == "tuples")) if each.dynamic else ():
            fewer = np.array(place) + 1
            fewer[axis] = place[axis]  # what is not in use is not looked at
            arrays["indices_extents"] = fewer
            emulated(monkeypatch, template, each, arrays, None, *MODULES, also={WRONG_INDEX: words})
            assert not words.any()


@pytest.mark.long
@pytest.mark.parametrize("workload", (WORKLOADS[3], WORKLOADS[4], WORKLOADS[6], WORKLOADS[9]), ids=lambda each: each.label)
def test_calls_on_a_cpu_raise_for_the_index_that_is_out_of_range(workload: Workload) -> None:
    with compile_(workload, target="cpu", allow=("default",)) as kernel:
        good = {name: stored_as(workload, name, array) for name, array in example(workload, wrong=False).items()}
        kernel(**good)
        for end in (0, 1):
            arrays, place, axis = one_wrong(workload, end)
            given = {name: stored_as(workload, name, array) for name, array in arrays.items()}
            extent, index = workload.x[axis], arrays["indices"][place]
            text = f"the index at {list(place)} of 'indices' is {index}, but axis {axis} of 'x' has extent {extent}"
            with pytest.raises(IndexRangeError, match=re.escape(f"{text}; allowed: {-extent} to {extent - 1}")):
                kernel(**given)
            step = kernel.bind(**given)
            step()
            with pytest.raises(IndexRangeError, match=re.escape(text)):
                kernel.check()
            kernel.check()
            kernel(**good)


def test_a_message_says_what_is_known_of_the_extent() -> None:
    workload = gather(x=(4, 6), indices=(3, 2), axis=1, dtype="float32", dynamic_x=True)
    with compile_(workload, target="cpu", allow=("default",)) as kernel:
        x, used = np.arange(24, dtype=np.float32).reshape(4, 6), np.array([4, 5])
        y, extents_of_y = kernel(x, np.array([[0, -5], [4, 1], [2, 3]]), used)
        assert extents_of_y.tolist() == [4, 3, 2]
        np.testing.assert_array_equal(y, x[:, [[0, 0], [4, 1], [2, 3]]])
        text = (
            "the index at [1, 0] of 'indices' is 5, but axis 1 of 'x' was shorter: its extent e is known at run time only, "
            "and at most 6; allowed: -e to e - 1"
        )
        with pytest.raises(IndexRangeError, match=re.escape(text)):
            kernel(x, np.array([[0, -5], [5, 1], [2, 3]]), used)


def stored_as(workload: Workload, name: str, array: Any) -> Any:
    spec = next(each for each in workload.signature if each.name == name)
    return encode(np.ascontiguousarray(array), spec.dtype)


@pytest.mark.gpu
def test_kernels_on_the_device_note_an_index(gpu: Any) -> None:
    """In pinned memory of the host, which is not copied. What was noted first stays until it was read."""
    notes = IndexNotes(gpu, ["call"], lambda *found: f"{found}")
    for workload in WORKLOADS:
        template = TEMPLATES[workload.op][0]
        for end in (0, 1):
            arrays, place, _ = one_wrong(workload, end)
            on_device(gpu, template, workload, arrays, also=notes.buffers("call"))
            found = "call", int(np.ravel_multi_index(place, workload.indices)), int(arrays["indices"][place])
            with pytest.raises(IndexRangeError, match=re.escape(f"{found}")):
                notes.check()
            on_device(gpu, template, workload, example(workload, wrong=False), also=notes.buffers("call"))
            notes.check()
    notes.close()
