"""dyn_resize: the operator, its reference and templates against ONNX's definition of coordinates, and nodes of models."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from array_emulator import ArrayEmulator
from bandwidth_support import H200, verdict
from dynamic_support import assert_equal, emulated, expected, on_device
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import schedsearch
from schedsearch import Workload, dyn_resize
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.errors import WorkloadError
from schedsearch.ops.dependence import SizeError, evaluate
from schedsearch.ops.dyn_resize import DYN_RESIZE
from schedsearch.ops.resize import COORDINATES, ROUNDINGS
from schedsearch.template import load_template
from schedsearch.templates.arrange import kernels
from schedsearch.templates.parts import vectors
from schedsearch.templates.resize import axes, dyn_axes, dyn_cuda
from schedsearch.testing.emulator import Memory, replace_casts
from schedsearch.testing.op_contract import OpContract
from schedsearch.testing.template_contract import TemplateContract

CUDA, CPU = load_template("dyn_resize_cuda"), load_template("dyn_resize_cpu")
IMAGE: dict[str, Any] = {"n": 2, "c": 4, "h": 5, "w": 6, "oh": 9, "ow": 11}


class TestDynResize(OpContract):
    op = DYN_RESIZE
    examples = (
        IMAGE,
        {**IMAGE, "mode": "linear", "coordinates": "align_corners", "layout": "NCHW", "dtype": "float32"},
        {**IMAGE, "rounding": "ceil", "scale": [0.9, 1.75], "dtype": "uint8", "layout": "NCHW4c"},
    )
    wrong = (
        ({**IMAGE, "oh": 0}, "oh"),
        ({**IMAGE, "mode": "cubic"}, "mode"),
        ({**IMAGE, "mode": "linear", "dtype": "int8"}, "dtype"),
        ({**IMAGE, "scale": [1]}, "scale"),
        ({**IMAGE, "scale": [-1, 1]}, "scale"),
        ({**IMAGE, "layout": "HWC"}, "layout"),
        ({**IMAGE, "ow": 2**30, "scale": [2, 1e-4]}, "ow"),
        ({**IMAGE, "oh": 2**15, "ow": 2**15}, "oh"),
    )

    def test_a_scale_is_a_float32(self) -> None:
        assert dyn_resize(**IMAGE, scale=(0.1, 2)).id == dyn_resize(**IMAGE, scale=(float(np.float32(0.1)), 2.0)).id


def extents_of(workload: Workload, x: tuple[int, ...], *sizes: int) -> tuple[int, ...]:
    inputs = {"x": x, "sizes": sizes} if sizes else {"x": x}
    return evaluate(workload.shape_functions["y"], len(x), inputs)


def test_sizes_are_those_of_the_argument_or_of_the_scale_rounded_down() -> None:
    assert extents_of(dyn_resize(**IMAGE), (1, 3, 4, 4), 7, 2) == (1, 7, 2, 4)
    assert extents_of(dyn_resize(**IMAGE, layout="NCHW"), (1, 4, 3, 4), 7, 2) == (1, 4, 7, 2)
    blocked = dyn_resize(**{**IMAGE, "c": 8}, layout="NCHW4c")
    assert extents_of(blocked, (1, 2, 3, 4, 4), 7, 2) == (1, 2, 7, 2, 4)
    # the float32 nearest to 0.1 is above it, that of 0.7 below it
    scaled = dyn_resize(n=1, c=1, h=100, w=100, oh=100, ow=100, scale=(0.1, 0.7))
    for size in range(1, 100):
        height, width = (math.floor(Fraction(float(np.float32(scale))) * size) for scale in (0.1, 0.7))
        assert extents_of(scaled, (1, size, size, 1)) == (1, height, width, 1)
    assert extents_of(scaled, (1, 10, 10, 1)) == (1, 1, 6, 1)


def test_impossible_sizes_are_errors() -> None:
    workload = dyn_resize(**IMAGE)
    with pytest.raises(SizeError, match=r"sizes has a negative number; allowed: 0 or more"):
        extents_of(workload, (1, 3, 4, 4), 7, -1)
    with pytest.raises(SizeError, match="x has no pixels, but y has"):
        extents_of(workload, (1, 0, 4, 4), 7, 3)
    assert extents_of(workload, (0, 0, 4, 4), 7, 3) == (0, 7, 3, 4)
    assert extents_of(workload, (1, 0, 4, 4), 0, 3) == (1, 0, 3, 4)


# ---- kernels


def case(*used: int, **changes: Any) -> tuple[Workload, tuple[int, ...]]:
    """A workload, and (images, height and width of x, height and width of y unless there is a scale) of a run."""
    return dyn_resize(**{**IMAGE, **changes}), used


CASES = [
    case(2, 5, 6, 9, 11),
    case(1, 3, 5, 7, 2, rounding="round_prefer_ceil", coordinates="asymmetric", dtype="uint8"),
    case(2, 4, 3, 1, 8, mode="linear", coordinates="pytorch_half_pixel", dtype="float32", layout="NCHW"),
    case(1, 4, 3, 8, 1, mode="linear", coordinates="align_corners", dtype="bfloat16"),
    case(2, 3, 6, rounding="floor", scale=(1.7, 0.6), coordinates="asymmetric", layout="NCHW", dtype="int8"),
    case(2, 5, 4, scale=(1.3, 2.5), mode="linear", c=8, layout="NCHW4c"),
    case(1, 5, 6, rounding="ceil", coordinates="align_corners", scale=(1.5, 1.5), dtype="float32"),
    case(2, 1, 1, 4, 5, mode="linear"),
    case(2, 5, 6, 1, 1, coordinates="pytorch_half_pixel", layout="NCHW"),
]
EMPTY = [
    case(0, 5, 6, 3, 4),
    case(2, 5, 6, 0, 4, mode="linear"),
    case(2, 0, 6, 3, 4),  # impossible
    case(2, 5, 6, 10, 4),  # beyond the bound
    case(2, 1, 6, scale=(0.5, 1), mode="linear"),
]


def shown(part: Any) -> str:
    return part.label if isinstance(part, Workload) else "x".join(map(str, part))


def every_way() -> list[tuple[Workload, tuple[int, ...]]]:
    """All coordinates, with each rounding and between pixels, larger and smaller than x."""
    ways: list[dict[str, Any]] = [dict(rounding=each) for each in ROUNDINGS]
    found = []
    for way in (*ways, dict(mode="linear")):
        for coordinates in COORDINATES:
            changes = {"n": 1, "c": 1, "dtype": "float32", "coordinates": coordinates, **way}
            found += [case(1, 4, 6, 9, 4, **changes), case(1, 5, 5, scale=(1.4, 0.7), **changes)]
    return found


def example(workload: Workload, used: tuple[int, ...]) -> dict[str, Any]:
    """Integers, and a number beyond the extents that shows if it is read."""
    spec, rng = workload.signature[0], np.random.default_rng(0)
    sides = [spec.axes.index(axis) for axis in "HW"]
    extents = list(spec.shape)
    for place, size in zip((0, *sides), used):
        extents[place] = size
    x = np.full(spec.shape, 120)
    inside = tuple(slice(0, n) for n in extents)
    x[inside] = rng.integers(0, 100, x[inside].shape)
    return {"x": x, "x_extents": np.array(extents), "sizes": np.array(used[3:])}


def coordinate(workload: Workload, axis: int, size: int, out: int, position: int) -> Fraction:
    """As ONNX defines it."""
    scale = Fraction(float(np.float32(workload.scale[axis]))) if workload.scale else Fraction(out, size)
    half = Fraction(1, 2)
    if workload.coordinates == "align_corners":
        return Fraction(position * (size - 1), out - 1) if out > 1 else Fraction(0)
    if workload.coordinates == "asymmetric":
        return position / scale
    if workload.coordinates == "pytorch_half_pixel" and out == 1:
        return Fraction(0)
    return (position + half) / scale - half


ROUND = {
    "round_prefer_floor": lambda place: math.ceil(place - Fraction(1, 2)),
    "round_prefer_ceil": lambda place: math.floor(place + Fraction(1, 2)),
    "floor": math.floor,
    "ceil": math.ceil,
}


def weights(workload: Workload, axis: int, size: int, out: int) -> Any:
    """What each position of y takes of each pixel: (out, size)."""
    found = np.zeros((out, size))
    for position in range(out):
        place = coordinate(workload, axis, size, out, position)
        low, share = math.floor(place), float(place - math.floor(place))
        parts = [(low, 1 - share), (low + 1, share)]
        for pixel, weight in parts if workload.mode == "linear" else [(ROUND[workload.rounding](place), 1.0)]:
            found[position, min(max(pixel, 0), size - 1)] += weight
    return found


def definition(workload: Workload, used: tuple[int, ...]) -> dict[str, Any]:
    """y as a product of matrices, whose axes are then those of the layout."""
    arrays, spec = example(workload, used), workload.signature[0]
    sides = [spec.axes.index(axis) for axis in "HW"]
    x = arrays["x"][tuple(slice(0, n) for n in arrays["x_extents"])].astype(float)
    outs = used[3:] or tuple(
        math.floor(Fraction(float(np.float32(scale))) * size) for scale, size in zip(workload.scale, used[1:3])
    )
    for axis, place in enumerate(sides):
        by_pixel = weights(workload, axis, used[1 + axis], outs[axis])
        x = np.moveaxis(np.tensordot(by_pixel, x, axes=(1, place)), 0, place)
    return {"y": x, "y_extents": np.array(x.shape)}


def tolerance(workload: Workload) -> float:
    return {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}[workload.dtype] if workload.mode == "linear" else 0


def assert_is(workload: Workload, found: Any, wanted: Any) -> None:
    assert_equal(workload, found, wanted, tolerance(workload))


def emulate(monkeypatch: pytest.MonkeyPatch, workload: Workload, used: tuple[int, ...], **knobs: int) -> dict[str, Any]:
    vector = CUDA.space(workload, H200).values["vector"][-1]
    config = Config(vector=vector, threads=128, **{"each": 1, **knobs})
    return emulated(monkeypatch, CUDA, workload, example(workload, used), config, vectors, kernels, axes, dyn_axes, dyn_cuda)


@pytest.mark.parametrize(("workload", "used"), CASES, ids=shown)
def test_emulated_kernels_are_the_definition(
    monkeypatch: pytest.MonkeyPatch, workload: Workload, used: tuple[int, ...]
) -> None:
    assert_is(workload, emulate(monkeypatch, workload, used), definition(workload, used))


@pytest.mark.parametrize(("workload", "used"), every_way(), ids=shown)
def test_emulated_coordinates_are_those_of_onnx(
    monkeypatch: pytest.MonkeyPatch, workload: Workload, used: tuple[int, ...]
) -> None:
    assert_is(workload, emulate(monkeypatch, workload, used), definition(workload, used))


def test_threads_go_on_until_all_elements_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, used = case(2, 5, 6, 9, 11, dtype="float32", c=3, mode="linear")
    assert_is(workload, emulate(monkeypatch, workload, used, each=4), definition(workload, used))


def test_numerators_of_scales_may_have_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, used = case(1, 5, 6, scale=(1 / 3, 1.1), n=1, c=1, mode="linear", dtype="float32")
    assert_is(workload, emulate(monkeypatch, workload, used), definition(workload, used))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_pixels_are_exact_up_to_the_largest_bounds(data: st.DataObject) -> None:
    most = data.draw(st.sampled_from((9, 300, 2**15, 2**17, 2**31 - 1)), "largest bound")
    h, oh = (data.draw(st.integers(1, most), name) for name in ("h", "oh"))
    size, out = data.draw(st.integers(1, h), "height of x"), data.draw(st.integers(1, oh), "height of y")
    changes: dict[str, Any] = {"coordinates": data.draw(st.sampled_from(COORDINATES), "coordinates")}
    if data.draw(st.booleans(), "has a scale"):
        scale = float(np.float32(data.draw(st.floats(2**-16, 2**16), "scale")))
        out, changes["scale"] = math.floor(Fraction(scale) * size), (scale, 1)
    rounding = data.draw(st.sampled_from((*ROUNDINGS, "")), "rounding")
    changes |= {"rounding": rounding} if rounding else {"mode": "linear"}
    assume(1 <= out <= oh)
    try:
        workload = dyn_resize(n=1, c=1, h=h, w=1, oh=oh, ow=1, **changes)
    except WorkloadError as error:
        assert "products of both must stay below 2**62" in str(error)
        assume(False)
    position = data.draw(st.integers(0, out - 1), "position")
    place = coordinate(workload, 0, size, out, position)
    with pytest.MonkeyPatch.context() as patch:
        replace_casts(patch, dyn_axes, ArrayEmulator(Memory()).types)
        line = dyn_axes.line_of_run(workload, 0)(size, out)
        if workload.mode == "nearest":
            found = dyn_axes.pixel_of_run(workload, 0)(position, line, size)
            assert found == min(max(ROUND[workload.rounding](place), 0), size - 1)
        else:
            low, high, share = dyn_axes.pixels_of_run(workload, 0)(position, line, size)
            below = math.floor(place)
            assert (low, high) == tuple(min(max(each, 0), size - 1) for each in (below, below + 1))
            assert share == pytest.approx(float(place - below), abs=3e-7)


@pytest.mark.parametrize(("workload", "used"), EMPTY, ids=shown)
def test_without_pixels_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, workload: Workload, used: tuple[int, ...]
) -> None:
    found = emulate(monkeypatch, workload, used)
    assert found["y"].size == 0
    assert_is(workload, found, expected(workload, example(workload, used)))


@pytest.mark.parametrize(("workload", "used"), [*CASES, *every_way()], ids=shown)
def test_the_reference_is_the_definition(workload: Workload, used: tuple[int, ...]) -> None:
    assert_equal(workload, expected(workload, example(workload, used)), definition(workload, used), 1e-12)


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=() if n in (2, 4) else pytest.mark.long) for n in range(len(CASES))]
)
@pytest.mark.mostly_long(4)
def test_a_cpu_kernel_is_the_definition(device: CpuDevice, number: int) -> None:
    workload, used = CASES[number]
    assert_is(workload, on_device(device, CPU, workload, example(workload, used)), definition(workload, used))


@pytest.mark.long
@pytest.mark.parametrize(("workload", "used"), EMPTY, ids=shown)
def test_a_cpu_kernel_writes_nothing_without_pixels(device: CpuDevice, workload: Workload, used: tuple[int, ...]) -> None:
    arrays = example(workload, used)
    assert_is(workload, on_device(device, CPU, workload, arrays), expected(workload, arrays))


@pytest.mark.long
def test_a_call_gives_y_at_its_bound_and_its_extents() -> None:
    kernel = schedsearch.compile(dyn_resize(**{**IMAGE, "dtype": "float32"}), target="cpu", allow=("default",))
    x = np.arange(2 * 5 * 6 * 4, dtype=np.float32).reshape(2, 5, 6, 4)
    y, extents = kernel(x, np.array([2, 3, 3, 4]), np.array([6, 6]))
    assert y.shape == (2, 9, 11, 4) and extents.tolist() == [2, 6, 6, 4]
    np.testing.assert_array_equal(y[:, :6, :6], x[:, :3, :3].repeat(2, axis=1).repeat(2, axis=2))


class TestDynResizeCuda(TemplateContract):
    template, target = CUDA, H200
    accepted = (
        dyn_resize(n=4, c=256, h=100, w=100, oh=200, ow=200),
        dyn_resize(n=4, c=21, h=65, w=65, oh=520, ow=520, mode="linear", layout="NCHW", dtype="float32"),
        dyn_resize(n=4, c=64, h=65, w=65, oh=130, ow=90, mode="linear", scale=(1.7, 1.3)),
    )
    refused = ()
    compiled = 3


class TestDynResizeCpu(TemplateContract):
    template, target, compiled = CPU, detect("cpu"), 1
    accepted = (dyn_resize(n=4, c=21, h=65, w=65, oh=520, ow=520, layout="NCHW", dtype="float32"),)


@pytest.mark.long
@pytest.mark.parametrize(("workload", "used"), CASES[:6], ids=shown)
def test_verification_accepts_the_kernels(device: CpuDevice, workload: Workload, used: tuple[int, ...]) -> None:
    assert verdict(device, CPU, workload) is None


@pytest.mark.gpu
def test_kernels_on_the_device(gpu: Any) -> None:
    for workload, used in (*CASES, *every_way()):
        found = on_device(gpu, CUDA, workload, example(workload, used))
        assert_is(workload, found, definition(workload, used))
    for workload, used in EMPTY:
        arrays = example(workload, used)
        assert_is(workload, on_device(gpu, CUDA, workload, arrays), expected(workload, arrays))
    for workload, _ in CASES:
        assert verdict(gpu, CUDA, workload) is None, workload.label
