"""Data dependence of shapes: what a declaration may say, and that one function gives the same sizes everywhere.

Expected sizes are NumPy's.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import schedsearch
from schedsearch.backend import compile_source
from schedsearch.device import Device, LoadedKernel, open_device
from schedsearch.device.detect import detect
from schedsearch.errors import OperatorError
from schedsearch.ops import ArgSpec, Dependence, Op, Parameter, ShapeFunction
from schedsearch.ops.declared_shapes import declared_shapes
from schedsearch.ops.dependence import SizeError, check_bound, evaluate
from schedsearch.ops.size_steps import EXCEEDS, FIRST_PROBLEM, KINDS, NEGATIVE, SizeStep, Values, Words
from schedsearch.target import PRESETS, Target
from schedsearch.templates.parts.sizes import sizes_source

NOTHING, SHAPE, VALUE = Dependence.NOTHING, Dependence.SHAPE, Dependence.VALUE
BIG = 2**40


# ---- some shape functions, as an author writes them


def repeated(axis, x, repeats):  # type: ignore[no-untyped-def]
    """numpy.tile"""
    return x[axis] * repeats[axis]


def unknown_repeats(x, repeats):  # type: ignore[no-untyped-def]
    for axis in range(len(x)):
        if repeats[axis] < 0:
            return 1
    return 0


def broadcast(axis, a, b):  # type: ignore[no-untyped-def]
    """numpy.broadcast_shapes of two arrays; the first has the rank of the result."""
    place = axis - (len(a) - len(b))
    if place < 0 or b[place] == 1:
        return a[axis]
    return b[place]


def reshaped(axis, x, shape):  # type: ignore[no-untyped-def]
    """numpy.reshape: one -1 takes what is left."""
    if shape[axis] >= 0:
        return shape[axis]
    total, known = 1, 1
    for place in range(len(x)):
        total *= x[place]
    for place in range(len(shape)):
        if place != axis:
            known *= shape[place]
    return total // max(known, 1)


def ceil_divide(a, b):  # type: ignore[no-untyped-def]
    return -(-a // b)


def counted(axis, limits):  # type: ignore[no-untyped-def]
    """numpy.arange(start, stop, step)"""
    return max(0, ceil_divide(limits[1] - limits[0], limits[2]))


def no_step(limits):  # type: ignore[no-untyped-def]
    return 1 if limits[2] == 0 else 0


def shrunk(axis, x):  # type: ignore[no-untyped-def]
    return x[axis] - 5


SHRINK = ShapeFunction({"x": SHAPE}, shrunk)
TILE = ShapeFunction({"x": SHAPE, "repeats": VALUE}, repeated, unknown_repeats, ("repeats has a negative number",))
BROADCAST = ShapeFunction({"a": SHAPE, "b": SHAPE}, broadcast)
RESHAPE = ShapeFunction({"x": SHAPE, "shape": VALUE}, reshaped)
ARANGE = ShapeFunction({"limits": VALUE}, counted, no_step, ("the step is 0; allowed: any other number",))


# ---- on the host


@given(st.lists(st.integers(0, 5), min_size=3, max_size=3), st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_a_shape_function_runs_on_the_host(x: list[int], repeats: list[int]) -> None:
    assert evaluate(TILE, 3, {"x": x, "repeats": repeats}) == np.tile(np.empty(x), repeats).shape


@given(st.integers(-20, 20), st.integers(-20, 20), st.integers(-7, 7).filter(bool))
def test_it_may_call_plain_functions(start: int, stop: int, step: int) -> None:
    assert evaluate(ARANGE, 1, {"limits": (start, stop, step)}) == np.arange(start, stop, step).shape


def test_it_gets_only_what_it_needs() -> None:
    """A slice needs the values of its positions, but of the array to be sliced only the shape: no element is read."""

    def kept(axis, x, end):  # type: ignore[no-untyped-def]
        return min(x[axis], max(end[axis], 0))

    crop = ShapeFunction({"x": SHAPE, "fill": NOTHING, "end": VALUE}, kept)
    assert crop.inputs == ("x", "end") and crop.values == ("end",)
    assert evaluate(crop, 2, {"x": (5, 7), "end": (2, 9)}) == (2, 7)


@pytest.mark.parametrize(
    ("function", "inputs", "text"),
    [
        (ARANGE, {"limits": (0, 9, 0)}, r"arange: the step is 0; allowed: any other number; got limits=\[0, 9, 0\]"),
        (SHRINK, {"x": (6, 4)}, r"arange: extent -1 of dimension 1 is negative, for x=\[6, 4\]; correct the shape function"),
        (TILE, {"x": (BIG, 1), "repeats": (BIG, 1)}, "OverflowError: .* beyond int64"),
        (ARANGE, {"limits": (0, 9)}, "place 2 of 2 numbers; allowed: 0 to 1"),
    ],
)
def test_impossible_sizes_are_errors_that_name_operator_and_inputs(function: Any, inputs: Any, text: str) -> None:
    with pytest.raises(SizeError, match=text):
        evaluate(function, 2 if function is not ARANGE else 1, inputs, "arange")


def test_sizes_beyond_the_bound_are_errors_that_name_both() -> None:
    check_bound((3, 4), (3, 4), "y of tile")
    with pytest.raises(
        SizeError, match="y of tile would be 3x5, which exceeds its declared bound 3x4; declare larger bounds"
    ):
        check_bound((3, 5), (3, 4), "y of tile")


LAST = 2**63 - 1
ENDS = (-LAST - 1, -LAST, -7, -1, 0, 1, 2, 5, LAST - 1, LAST)


def test_the_numbers_of_a_range_are_counted_without_an_overflow() -> None:
    """Compared with Python's integers, which have no largest one."""
    function = schedsearch.arange(bound=9).shape_functions["y"]
    for start, limit, delta in itertools.product(ENDS, repeat=3):
        given = {"start": (start,), "limit": (limit,), "delta": (delta,)}
        if delta == 0:
            with pytest.raises(SizeError, match="y: delta is 0; allowed: positive numbers"):
                evaluate(function, 1, given, "y")
            continue
        count = max(0, -((start - limit) // delta))
        if count and abs(limit - start) > LAST:
            with pytest.raises(SizeError, match="y: start and limit are too far apart; allowed: less than 2"):
                evaluate(function, 1, given, "y")
        else:
            assert evaluate(function, 1, given, "y") == (count,)


def test_a_negative_size_is_named() -> None:
    function = schedsearch.expand(x=(1,), bound=(4, 5)).shape_functions["y"]
    with pytest.raises(SizeError, match=r"fill: shape has a negative number; allowed: 0 and above; got .* shape=\[2, -1\]"):
        evaluate(function, 2, {"x": (1,), "shape": (2, -1)}, "fill")


# ---- what a declaration refuses

TABLE = {"a": 3}
HALF = 0.5


def with_division(axis, x):  # type: ignore[no-untyped-def]
    return x[axis] / 2


def with_float(axis, x):  # type: ignore[no-untyped-def]
    return x[axis] * 0.5


def with_captured_float(axis, x):  # type: ignore[no-untyped-def]
    return x[axis] * HALF


def with_table(axis, x):  # type: ignore[no-untyped-def]
    return TABLE["a"]


def with_attribute(axis, x):  # type: ignore[no-untyped-def]
    return x.nbytes


def with_import(axis, x):  # type: ignore[no-untyped-def]
    import os

    return os.getpid()


def with_library(axis, x):  # type: ignore[no-untyped-def]
    return math.prod(x)


def with_open(axis, x):  # type: ignore[no-untyped-def]
    return len(open("sizes"))  # noqa: PTH123


def with_slice(axis, x):  # type: ignore[no-untyped-def]
    return len(x[1:])


def with_store(axis, x):  # type: ignore[no-untyped-def]
    x[0] = 3
    return x[0]


def with_nothing(axis, x):  # type: ignore[no-untyped-def]
    if x[0] > 3:
        return None
    return 1


def without_end(axis, x):  # type: ignore[no-untyped-def]  # noqa: RET503
    for place in range(len(x)):
        if x[place] > 3:
            return place


def with_two(axis, x):  # type: ignore[no-untyped-def]
    return x[0], x[1]


def with_itself(axis, x):  # type: ignore[no-untyped-def]
    return with_itself(axis, x)


def with_more(axis, x, y):  # type: ignore[no-untyped-def]
    return x[axis] + y[axis]


def with_default(axis, x=(1, 2)):  # type: ignore[no-untyped-def]
    return x[axis]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (with_division, "it has /, which is not whole; write //"),
        (without_end, "it may end without a return; return an integer at the end"),
        (with_float, "the constant 0.5, which is not an integer"),
        (with_captured_float, "it reads HALF, which is float and not declared"),
        (with_table, "it reads TABLE, which is dict and not declared"),
        (with_attribute, "it has Attribute"),
        (with_import, "it has a statement Import"),
        (with_library, "it has a call that is not name"),
        (with_open, "it calls open; allowed: abs, len, max, min, range, and plain functions"),
        (with_slice, "a subscript that is not name"),
        (with_store, "it assigns to something that is not a local variable"),
        (with_nothing, "it returns nothing"),
        (with_two, "it returns several values"),
        (with_itself, "with_itself calls itself: write a loop instead"),
        (with_more, r"takes \(axis, x, y\); by its declared dependences it gets \(axis, x\): declare what it reads"),
        (with_default, "has parameters with defaults or stars"),
        (lambda axis, x: 1, "a function that is written with def"),
    ],
)
def test_a_function_that_is_not_integer_python_is_refused_when_it_is_declared(function: Any, text: str) -> None:
    with pytest.raises(OperatorError, match=text):
        ShapeFunction({"x": SHAPE}, function)


def test_a_function_that_reads_what_is_declared_as_nothing_is_refused() -> None:
    with pytest.raises(OperatorError, match="declare what it reads, and nothing else"):
        ShapeFunction({"x": SHAPE, "repeats": NOTHING}, repeated)


class Tile(Op):
    """numpy.tile of a matrix; `bad` makes its declaration wrong in several ways."""

    name, reference = "tile", "nowhere:Nothing"

    def __init__(self, bad: str = "") -> None:
        self.bad = bad

    def parameters(self) -> Mapping[str, Parameter]:
        return {"rows": Parameter.count("rows"), "columns": Parameter.count("columns")}

    def arguments(self, params: Mapping[str, Any]) -> tuple[ArgSpec, ...]:
        dtype = "float32" if self.bad == "float" else "int64"
        return (
            ArgSpec("x", "AB", (params["rows"], params["columns"]), "float16"),
            ArgSpec("x_extents", "A", (2,), "int64"),
            ArgSpec("repeats", "A", (2,), dtype, "index", below=5),
        )

    def outputs(self, params: Mapping[str, Any]) -> tuple[ArgSpec, ...]:
        bound = 4 * params["rows"], 4 * params["columns"]
        return ArgSpec("y", "AB", bound, "float16", extents="y_extents"), ArgSpec("y_extents", "A", (2,), "int64")

    def shape_functions(self, params: Mapping[str, Any]) -> Mapping[str, ShapeFunction]:
        def negative(axis, x, repeats):  # type: ignore[no-untyped-def]
            return x[axis] * repeats[axis] - 1

        def beyond(axis, x, repeats):  # type: ignore[no-untyped-def]
            return x[axis + 1]

        if self.bad in ("negative", "beyond"):
            return {"y": ShapeFunction({"x": SHAPE, "repeats": VALUE}, negative if self.bad == "negative" else beyond)}
        if self.bad == "order":
            return {"y": ShapeFunction({"repeats": VALUE}, lambda_free)}
        return {"z" if self.bad == "output" else "y": TILE}


def lambda_free(axis, repeats):  # type: ignore[no-untyped-def]
    return repeats[axis]


PARAMS = {"rows": 3, "columns": 5}


def test_the_declaration_of_an_operator_is_tried_on_its_own_inputs() -> None:
    assert declared_shapes(Tile(), PARAMS) == {"y": TILE}


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ("negative", r"extent -1 of dimension \d is negative"),
        ("beyond", "place 2 of 2 numbers"),
        ("order", "declare one for each argument in order: x, repeats"),
        ("output", "there is no such output; allowed: y, y_extents"),
        ("float", "needs the values of repeats, which are float32, not integers"),
    ],
)
def test_an_operator_with_a_wrong_declaration_is_refused(bad: str, text: str) -> None:
    with pytest.raises(OperatorError, match=f"the shape function of . of operator tile.*{text}"):
        declared_shapes(Tile(bad), PARAMS)


# ---- on a device


class Segment:
    """Sizes of a segment of four operators: y = tile(x), z = reshape(y), w = broadcast(y, z) and n = arange."""

    bounds = ((400, 400), (1000, 1000), (1000, 1000), (50,))
    words = 1 + 2 + 2 + 2 + 2 + 1

    def __init__(self, target: Target) -> None:
        x, y, z, w, n = Words(1, 2), Words(3, 2), Words(5, 2), Words(7, 2), Words(9, 1)
        repeats, shape, limits = Values("repeats", "int32", 2), Values("shape", "int64", 2), Values("limits", "int64", 3)
        places = ((TILE, (x, repeats), y), (RESHAPE, (y, shape), z), (BROADCAST, (y, z), w), (ARANGE, (limits,), n))
        steps = [SizeStep(f, inputs, to, bound) for (f, inputs, to), bound in zip(places, self.bounds)]
        self.built = compile_source(sizes_source(steps, self.words, target), target)
        self.target = target

    @functools.cached_property
    def device(self) -> Device:
        return open_device(self.target)

    @functools.cached_property
    def kernel(self) -> LoadedKernel:
        return self.device.load(self.built.artifact)

    def run(self, x: Sequence[int], repeats: Sequence[int], shape: Sequence[int], limits: Sequence[int]) -> list[int]:
        """All words of the block."""
        arrays = {
            "sizes": np.array([99, *x, *[-7] * 7], np.int64),
            "repeats": np.array(repeats, np.int32),
            "shape": np.array(shape, np.int64),
            "limits": np.array(limits, np.int64),
        }
        places = {name: self.device.allocate(array.nbytes) for name, array in arrays.items()}
        for name, array in arrays.items():
            self.device.copy_in(places[name], array.view(np.uint8).data)
        self.kernel.bind(places, {}).launch()
        self.device.synchronize()
        self.device.copy_out(arrays["sizes"].view(np.uint8).data, places["sizes"])
        for place in places.values():
            self.device.free(place)
        return [int(word) for word in arrays["sizes"]]


@pytest.fixture(scope="module")
def on_cpu() -> Segment:
    return Segment(detect("cpu"))


small = st.integers(0, 9)
positions = st.integers(-60, 60)
whole = st.sampled_from([-(2**63), -(2**62), -1, 0, 1, 2**62, 2**63 - 1]) | positions


def expected(x: Any, repeats: Any, shape: Any, limits: Any) -> list[int]:
    """What the functions give on the host, with the first mistake as status and zeros for what is impossible."""
    found, status = [*x], 0
    y: tuple[int, ...] = ()
    z: tuple[int, ...] = ()
    cases: list[tuple[ShapeFunction, int, Any]] = [
        (TILE, 2, lambda: {"x": x, "repeats": repeats}),
        (RESHAPE, 2, lambda: {"x": y, "shape": shape}),
        (BROADCAST, 2, lambda: {"a": y, "b": z}),
        (ARANGE, 1, lambda: {"limits": limits}),
    ]
    for number, ((function, rank, inputs), bound) in enumerate(zip(cases, Segment.bounds), start=1):
        kind = 0
        try:
            sizes = evaluate(function, rank, inputs())
            kind = EXCEEDS if any(n > most for n, most in zip(sizes, bound)) else 0
        except SizeError as error:
            kind = NEGATIVE if "is negative" in str(error) else FIRST_PROBLEM
        sizes = (0,) * rank if kind else sizes
        status = status or (number * KINDS + kind if kind else 0)
        y, z = (sizes, z) if number == 1 else (y, sizes) if number == 2 else (y, z)
        found += sizes
    return [status, *found]


def check_segment(segment: Segment, x: Any, repeats: Any, shape: Any, limits: Any) -> None:
    assert segment.run(x, repeats, shape, limits) == expected(x, repeats, shape, limits)


pairs = {"x": st.tuples(small, small), "repeats": st.tuples(*[st.integers(-2, 60)] * 2)}
shapes = st.tuples(small, st.just(-1)) | st.tuples(st.just(-1), small) | st.tuples(*[st.integers(-3, 40)] * 2)


@settings(max_examples=150)
@given(**pairs, shape=shapes, limits=st.tuples(positions, positions, st.integers(-9, 9)))
def test_the_compiled_functions_of_a_segment_give_what_the_host_gives(
    on_cpu: Segment, x: Any, repeats: Any, shape: Any, limits: Any
) -> None:
    check_segment(on_cpu, x, repeats, shape, limits)


def test_a_mistake_leaves_extents_of_zero_and_a_status(on_cpu: Segment) -> None:
    """The status names the first step that went wrong, the second one, and its first problem."""
    assert on_cpu.run((2, 3), (2, 2), (4, 6), (0, 9, 0)) == [4 * KINDS + FIRST_PROBLEM, 2, 3, 4, 6, 4, 6, 4, 6, 0]
    assert on_cpu.run((9, 9), (50, 2), (4, 6), (0, 9, 1))[:5] == [KINDS + EXCEEDS, 9, 9, 0, 0]


def test_a_segment_is_one_small_kernel_for_a_gpu() -> None:
    built = Segment(PRESETS["h200"]).built
    (step,) = built.artifact.plan.steps
    assert (step.grid.work_items, step.block_threads) == (1, 32) and not built.resources.spill_bytes


@pytest.mark.gpu
def test_a_gpu_computes_the_sizes_of_a_segment() -> None:
    segment, rng = Segment(detect("cuda")), np.random.default_rng(0)
    for _ in range(100):
        x, repeats = rng.integers(0, 10, 2), rng.integers(-2, 60, 2)
        shape = (int(rng.integers(0, 10)), -1) if rng.integers(2) else tuple(map(int, rng.integers(-3, 40, 2)))
        limits = tuple(map(int, rng.integers(-9, 9, 3)))
        check_segment(segment, tuple(map(int, x)), tuple(map(int, repeats)), shape, limits)
