"""Movements of data for tests of the CUDA kernels: drawn at random, those of operators, and their emulation.

The expected values are NumPy's: transpose, slices, pad and concatenate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from moves_emulator import MovesEmulator

import schedsearch.templates.data_movement.staged_kernel as staged_kernel
import schedsearch.templates.data_movement.tile_places as tile_places
import schedsearch.templates.layout_transform.kernels as kernels
import schedsearch.templates.layout_transform.places as places
from schedsearch import (
    Workload,
    concat,
    depth_to_space,
    layout_transform,
    pack,
    pad,
    space_to_depth,
    strided_slice,
    transpose,
)
from schedsearch.config import Config
from schedsearch.ops import Layout
from schedsearch.ops.data_movement import DataMovement
from schedsearch.ops.movement import Box, Factor, Movement, Ragged, permuted, row_strides
from schedsearch.space import ConfigSpace
from schedsearch.target import PRESETS, Target
from schedsearch.template import KernelSource
from schedsearch.templates.data_movement.cuda import DataMovementCuda
from schedsearch.templates.data_movement.move import Move
from schedsearch.templates.data_movement.mover import Mover
from schedsearch.testing.emulator import Memory

H200 = PRESETS["h200"]
TURING = Target("cuda", "sm_75", (7, 5), 20, 49_152, 65_536, 65536, 1024, 2 << 20, 1_500_000, 4 << 30)
CUDA = DataMovementCuda()
LONGEST = (0, 60, 12, 7, 5, 4)  # extents of emulated arrays by their number of dimensions


@dataclass
class Moved:
    """A movement, its arguments, and the y that NumPy makes of them."""

    movement: Movement
    arrays: dict[str, Any]
    y: Any


def any_bits(rng: np.random.Generator, shape: Any, element_bytes: int) -> Any:
    return rng.integers(0, 2 ** (8 * element_bytes), shape, f"u{element_bytes}")


def random_movement(rng: np.random.Generator, longest: tuple[int, ...] = LONGEST) -> Moved:
    """A permutation, slice, padding or concatenation of small arrays; a run of 16 bytes is not rare."""
    element = int(rng.choice([1, 2, 4]))
    rank = int(rng.integers(1, len(longest)))
    shape = [int(extent) for extent in rng.integers(1, longest[rank] + 1, rank)]
    if not rng.integers(3):
        shape[-1] = int(rng.choice([16, 32, 64]))
    make = (random_permutation, random_slice, random_padding, random_concatenation)[rng.integers(4)]
    return make(rng, shape, element)


def random_permutation(rng: np.random.Generator, shape: list[int], element: int) -> Moved:
    order, x = [int(axis) for axis in rng.permutation(len(shape))], any_bits(rng, shape, element)
    return Moved(Movement(element, (permuted("x", shape, order),)), {"x": x}, x.transpose(order))


def random_slice(rng: np.random.Generator, shape: list[int], element: int) -> Moved:
    x, in_x = any_bits(rng, shape, element), row_strides(shape)
    firsts = [int(rng.integers(extent)) for extent in shape]
    steps = [int(rng.choice([1, 1, 1, 2, 3, 20, -1, -2, -40])) for _ in shape]
    taken = np.ix_(*(range(extent)[first::step] for extent, first, step in zip(shape, firsts, steps)))
    y = x[taken]
    factors = [Factor(n, step * at, to) for n, step, at, to in zip(y.shape, steps, in_x, row_strides(y.shape))]
    start = sum(first * at for first, at in zip(firsts, in_x))
    return Moved(Movement(element, (Box.of("x", factors, x_start=start),)), {"x": x}, y)


def random_padding(rng: np.random.Generator, shape: list[int], element: int) -> Moved:
    x, in_x = any_bits(rng, shape, element), row_strides(shape)
    pads = [(int(before), int(after)) for before, after in rng.integers(0, 4, (len(shape), 2))]
    fill = int(any_bits(rng, (), element))
    y = np.pad(x, pads, constant_values=fill)
    ragged = [Ragged(before + n, n + before + after, before) for n, (before, after) in zip(shape, pads)]
    factors = [Factor(n, at, to, axis) for axis, (n, at, to) in enumerate(zip(y.shape, in_x, row_strides(y.shape)))]
    start = -sum(before * at for (before, _), at in zip(pads, in_x))
    return Moved(Movement(element, (Box.of("x", factors, x_start=start, ragged=ragged),), fill), {"x": x}, y)


def random_concatenation(rng: np.random.Generator, shape: list[int], element: int) -> Moved:
    axis = int(rng.integers(len(shape)))
    extents = [int(extent) for extent in rng.integers(1, 9, rng.integers(1, 4))]
    arrays = [any_bits(rng, [*shape[:axis], extent, *shape[axis + 1 :]], element) for extent in extents]
    y = np.concatenate(arrays, axis)
    in_y, boxes, at = row_strides(y.shape), [], 0
    for number, x in enumerate(arrays):
        factors = [Factor(*each) for each in zip(x.shape, row_strides(x.shape), in_y)]
        boxes.append(Box.of(f"x{number}", factors, y_start=at * in_y[axis]))
        at += x.shape[axis]
    return Moved(Movement(element, tuple(boxes)), {f"x{number}": x for number, x in enumerate(arrays)}, y)


def movers(moved: Moved, target: Target) -> list[tuple[str, Mover]]:
    movement, arrays = moved.movement, moved.arrays
    sizes = (movement.element_bytes, moved.y.nbytes, movement.fill)
    return [
        (box.x, Mover(Move.of(box, sizes[0], arrays[box.x].nbytes, *sizes[1:]), target)) for box in movement.boxes
    ]  # fmt: skip


def random_source(moved: Moved, target: Target, rng: np.random.Generator, default: bool) -> tuple[KernelSource, list[Any]]:
    """A step for each box with its default or a random configuration, and these configurations."""
    configs, steps = [], []
    for x, mover in movers(moved, target):
        assert mover.problem() is None
        space = mover.space()
        config = mover.default() if default else space.sample(1, rng)[0]
        assert space.check(config) == []
        configs.append(dict(config))
        steps.append(mover.step(config, x=x, y="y"))
    return KernelSource("cuda", "native", tuple(steps)), configs


class Emulated:
    """The kernels of the sources that are made after it run in its emulator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
        self.memory = Memory()
        self.emulator = MovesEmulator(self.memory, late_copies=late)
        self.emulator.stand_in(monkeypatch, kernels, places, staged_kernel, tile_places)

    def check(self, source: KernelSource, arrays: Mapping[str, Any], y: Any, what: str) -> None:
        found = np.full(y.nbytes, 0xA5, np.uint8).view(y.dtype)
        buffers = {name: self.memory.add(np.ascontiguousarray(x)) for name, x in arrays.items()}
        buffers["y"] = self.memory.add(found)
        for step in source.steps:
            self.emulator.run(step, buffers, sms=1)
        np.testing.assert_array_equal(found, y.ravel(), err_msg=what)


IMAGES = {"n": 1, "c": 8, "h": 4, "w": 6, "block": 2}
OPERATORS: dict[str, Workload] = {
    "odd planes to NHWC": transpose(x=(2, 20, 49), permutation=(0, 2, 1)),
    "odd planes to NCHW": transpose(x=(2, 49, 20), permutation=(0, 2, 1), dtype="int8"),
    "five axes": transpose(x=(3, 4, 5, 2, 6), permutation=(4, 1, 3, 0, 2), dtype="float32"),
    "the same": transpose(x=(7, 9), permutation=(0, 1)),
    "integers of 64 bits": transpose(x=(7, 3, 10), permutation=(2, 1, 0), dtype="int64"),
    "integers of 64 bits between others": pad(x=(3, 5, 7), before=(0, 2, 3), after=(1, 0, 1), value=7, dtype="int64"),
    **{
        f"{make.__name__} {mode} {layout} {dtype}": make(**IMAGES, mode=mode, layout=layout, dtype=dtype)
        for make in (depth_to_space, space_to_depth)
        for mode in ("DCR", "CRD")
        for layout, dtype in (("NCHW", "float16"), ("NHWC", "float16"), ("NHWC", "int8"))
    },
    "blocks of 3 in odd images": depth_to_space(n=1, c=18, h=3, w=5, block=3, mode="CRD"),
    "rows": strided_slice(x=(9, 64), begin=(2,), end=(7,), dtype="float32"),
    "columns": strided_slice(x=(9, 70), begin=(0, 3), end=(9, 60)),
    "backwards": strided_slice(x=(5, 40), begin=(4, 39), end=(None, None), strides=(-2, -1), dtype="uint8"),
    "far apart": strided_slice(x=(300,), begin=(1,), end=(300,), strides=(37,)),
    "nothing": strided_slice(x=(5, 40), begin=(3,), end=(3,)),
    "channels": concat(x=[(2, 5, 3, 3), (2, 2, 3, 3), (2, 9, 3, 3)], axis=1),
    "columns beside columns": concat(x=[(9, 8), (9, 16)], axis=1, dtype="float32"),
    "borders of images": pad(x=(1, 4, 5, 8), before=(1, 1), after=(2, 2), axes=(1, 2), value=-1),
    "borders of rows": pad(x=(3, 5, 7), before=(0, 2, 3), after=(1, 0, 1), value=7, dtype="int8"),
    "blocks of channels": layout_transform(n=1, c=20, h=5, w=7, layout="NCHW", to="NCHW16c", dtype="int8"),
    "channels from blocks": layout_transform(n=2, c=20, h=3, w=7, layout="NCHW16c", to="NHWC"),
    "cut and padded": pad(x=(9, 20), before=(-2, 3), after=(1, -5), dtype="float32"),
}


def of_operator(workload: Workload, rng: np.random.Generator) -> tuple[dict[str, Any], Any]:
    """Arguments with any bits, and y by the operator's definition of single elements."""
    definition = workload.definition
    if workload.op == "layout_transform":
        return of_layout(workload, rng)
    assert isinstance(definition, DataMovement)
    movement = definition.movement(workload.params)
    arrays = {spec.name: any_bits(rng, spec.shape, movement.element_bytes) for spec in workload.signature}
    numbers, positions = definition.sources(workload.params, np.arange(workload.output.size))
    y = np.full(workload.output.size, movement.fill, f"u{movement.element_bytes}")
    for number, x in enumerate(arrays.values()):
        y[numbers == number] = x.ravel()[positions[numbers == number]]
    return arrays, y


def of_layout(workload: Workload, rng: np.random.Generator) -> tuple[dict[str, Any], Any]:
    """x with any bits, also in its padding, and y by `schedsearch.pack`."""
    bytes_of_element = workload.signature[0].nbytes // workload.signature[0].size
    values = any_bits(rng, [workload.params[axis] for axis in "nchw"], bytes_of_element)
    return {"x": Layout.parse(workload.layout).pack(values, "NCHW", fill=0x5A)}, pack(values, workload.to).ravel()


def random_configs(space: ConfigSpace, rng: np.random.Generator, count: int) -> list[Config]:
    """Legal configurations that the emulator runs in little time."""
    found = [config for config in space.sample(60, rng) if config["threads"] <= 128 and config["blocks_per_sm"] <= 2]
    return found[:count]
