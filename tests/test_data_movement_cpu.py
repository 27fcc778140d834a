"""Data movement on a CPU: every operator with random schedules, bit for bit, against its movement in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conv2d_support import run_on_cpu as run
from test_data_movement import moved, random_bits

import schedsearch
from schedsearch import Workload, concat, depth_to_space, pad, space_to_depth, strided_slice, transpose
from schedsearch.device.cpu import CpuDevice
from schedsearch.ops.movement import Box, Factor, Ragged
from schedsearch.template import load_reference
from schedsearch.templates.data_movement.cpu import DataMovementCpu
from schedsearch.templates.data_movement.cpu_kernels import parts_of
from schedsearch.testing.template_contract import TemplateContract

CPU = DataMovementCpu()
DTYPES = ("int8", "bfloat16", "float32", "int64")


def random_workload(rng: np.random.Generator) -> Workload:
    """Any operator, with runs of all lengths: those that fill blocks, those that do not, and single elements."""
    op = CPU.ops[rng.integers(len(CPU.ops))]
    dtype = DTYPES[rng.integers(len(DTYPES))]
    extents = [int(rng.choice([1, 2, 3, 5, 8, 16, 17, 33, 70])) for _ in range(rng.integers(1, 5))]
    while np.prod(extents) > 40_000:
        extents.pop()
    rank = len(extents)
    if op == "transpose":
        return transpose(x=extents, permutation=[int(axis) for axis in rng.permutation(rank)], dtype=dtype)
    if op in ("depth_to_space", "space_to_depth"):
        n, c, h, w = (int(each) for each in rng.choice([1, 2, 5, 8, 18], 4))
        block = int(rng.integers(1, 5))
        how: Any = dict(mode=str(rng.choice(["DCR", "CRD"])), layout=str(rng.choice(["NCHW", "NHWC"])), dtype=dtype)
        if op == "depth_to_space":
            return depth_to_space(n=n, c=c * block**2, h=h, w=w, block=block, **how)
        return space_to_depth(n=n, c=c, h=h * block, w=w * block, block=block, **how)
    if op == "strided_slice":
        strides = [int(each) for each in rng.choice([-3, -1, 1, 1, 2], rank)]
        begin = [int(rng.integers(extent)) if rng.integers(2) else None for extent in extents]
        return strided_slice(x=extents, begin=begin, end=[None] * rank, strides=strides, dtype=dtype)
    axis = int(rng.integers(rank))
    if op == "concat":
        others = [[*extents[:axis], int(rng.integers(1, 40)), *extents[axis + 1 :]] for _ in range(rng.integers(3))]
        return concat(x=[extents, *others], axis=axis, dtype=dtype)
    before, after = ([int(each) for each in rng.integers(-1, 4, rank)] for _ in range(2))
    before = [max(low, 0) if extent + low + high < 1 else low for low, extent, high in zip(before, extents, after)]
    after = [max(high, 0) for high in after]
    return pad(x=extents, before=before, after=after, value=3, dtype=dtype)


@pytest.mark.parametrize("number", range(30))
@pytest.mark.mostly_long(12)
def test_every_element_arrives(device: CpuDevice, number: int) -> None:
    rng = np.random.default_rng([19, number])
    workload = random_workload(rng)
    space = CPU.space(workload, device.target)
    config = CPU.default(workload, device.target, space) if number % 3 == 0 else space.sample(1, rng)[0]
    arrays = random_bits(workload)
    y = moved(workload, arrays)
    found = run(device, CPU.kernel(workload, device.target, config), arrays, {"y": (y.shape, y.dtype)})["y"]
    np.testing.assert_array_equal(found, y, err_msg=f"{workload.label} {dict(config)}")


SLICES: dict[str, dict[str, Any]] = {  # each is also a movement into a whole array, which has the same truth
    "transpose": {"x": [2, 3, 4], "permutation": [2, 0, 1], "slice_of": [4, 5, 3]},
    "depth_to_space": {"n": 2, "c": 8, "h": 3, "w": 5, "block": 2, "slice_of": [2, 5, 6, 10]},
    "space_to_depth": {"n": 2, "c": 3, "h": 4, "w": 6, "block": 2, "slice_of": [2, 20, 2, 3]},
    "strided_slice": {"x": [3, 4, 3], "begin": [1, 0], "end": [3, 2], "slice_of": [2, 5, 3]},
    "concat": {"x": [[2, 3, 4], [2, 1, 4]], "axis": 1, "slice_of": [2, 9, 4]},
    "pad": {"x": [5, 6], "before": [1, 1], "after": [1, 1], "slice_of": [7, 9]},
}


@pytest.mark.parametrize("op", SLICES)
@pytest.mark.mostly_long(3)
def test_the_truth_of_a_slice_is_that_of_an_array(device: CpuDevice, op: str) -> None:
    params = SLICES[op] | {"dtype": "int32"}
    part, whole = Workload(op, params), Workload(op, {name: each for name, each in params.items() if name != "slice_of"})
    arrays = random_bits(whole)
    y = moved(whole, arrays)
    kernel = load_reference(op).kernel(part, device.target)
    np.testing.assert_array_equal(run(device, kernel, arrays, {"y": (y.shape, np.dtype(np.int64))})["y"], y.view(np.int32))


LARGE = {  # blocks in registers, several items of every thread, lines past the caches
    "8-bit blocks": transpose(x=(2, 130, 200), permutation=(0, 2, 1), dtype="int8"),
    "32-bit blocks": transpose(x=(2, 130, 200), permutation=(0, 2, 1), dtype="float32"),
    "blocks of 64-bit runs": transpose(x=(2, 50, 70, 2), permutation=(0, 2, 1, 3), dtype="int32"),
    "interleaved": depth_to_space(n=1, c=48, h=20, w=50, block=4, mode="CRD"),
    "long runs": concat(x=[(3, 70_001), (3, 30)], axis=1, dtype="int8"),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.mostly_long(2)
def test_blocks_and_streams(device: CpuDevice, name: str) -> None:
    workload = LARGE[name]
    space = CPU.space(workload, device.target)
    values = {knob.name: knob.values[-1] for knob in space.knobs}
    config = schedsearch.Config({**values, "item_bytes": 1 << 14, "tile_x": min(values["tile_x"], 64)})
    arrays = random_bits(workload)
    y = moved(workload, arrays)
    found = run(device, CPU.kernel(workload, device.target, config), arrays, {"y": (y.shape, y.dtype)})["y"]
    np.testing.assert_array_equal(found, y)


def test_parts_are_the_fill_around_x_and_what_is_left() -> None:
    """One row of fill above two rows of three elements, and one column of fill on their right."""
    box = Box.of("x", [Factor(3, 3, 4, 0), Factor(4, 1, 1, 1)], x_start=-3, ragged=[Ragged(3, 3, 1), Ragged(3, 4)])
    above, right, inside = parts_of(box, 2, fill=7)
    assert (above.fill, above.y_start, above.nbytes) == (7, 0, 2 * 4)
    assert (right.fill, right.y_start, right.nbytes, right.y_run.y) == (7, 2 * (4 + 3), 2 * 2, 2 * 4)
    assert (inside.fill, inside.x_start, inside.y_start, inside.element_bytes) == (None, 0, 2 * 4, 2 * 3)


class TestCpuTemplate(TemplateContract):
    template, target = CPU, schedsearch.detect("cpu")
    accepted = (
        transpose(x=(2, 48, 49), permutation=(0, 2, 1), dtype="int8"),
        depth_to_space(n=2, c=16, h=5, w=7, block=2),
        space_to_depth(n=2, c=3, h=6, w=8, block=2, layout="NHWC", dtype="float32"),
        strided_slice(x=(20, 30), begin=(1, -1), end=(None, None), strides=(1, -2)),
        concat(x=[(3, 5), (3, 80)], axis=1, dtype="uint8"),
        pad(x=(3, 5, 7), before=(0, 1, 1), after=(0, 1, 1), dtype="float32"),
    )
    refused = ((transpose(x=(2**17, 2**17, 300, 500), permutation=(1, 0, 3, 2), dtype="int8"), "2**31"),)
    samples = 3


@pytest.mark.parametrize("workload", [strided_slice(x=(3, 4), begin=(3,)), pad(x=(3, 4), before=(-3,))])
def test_an_empty_result_needs_no_kernel(workload: Workload) -> None:
    kernel = schedsearch.compile(workload, target="cpu")
    assert kernel(np.zeros((3, 4), np.float16)).shape == (0, 4)


def test_a_call_takes_arrays_with_strides_and_without() -> None:
    workload = transpose(x=(5, 6), permutation=(1, 0), dtype="float32")
    kernel = schedsearch.compile(workload, target="cpu")
    x = np.arange(30, dtype=np.float32).reshape(5, 6)
    np.testing.assert_array_equal(kernel(x), x.T)
    with pytest.raises(schedsearch.ArgumentError, match="contiguous"):
        kernel(np.asfortranarray(x))
