"""The CUDA kernels of the operators that only move data: emulated, compiled and on a GPU, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conv2d_numpy import KINDS, check_schedules
from conv2d_support import run_on_cpu as run  # it takes any device
from data_movement_support import (
    CUDA,
    H200,
    OPERATORS,
    TURING,
    Emulated,
    Moved,
    any_bits,
    movers,
    of_operator,
    random_configs,
    random_movement,
    random_source,
)
from long_cases import each_one_way
from test_conv2d_wgmma import instructions

import schedsearch
import schedsearch.templates.data_movement.staged_kernel as staged_kernel
import schedsearch.templates.data_movement.tile_places as tile_places
from schedsearch import (
    Workload,
    depth_to_space,
    layout_transform,
    space_to_depth,
    strided_slice,
    transpose,
)
from schedsearch.backend import RejectedError, compile_source
from schedsearch.config import Config
from schedsearch.device import open_device
from schedsearch.ops.movement import Box, Factor, Movement, permuted, row_strides
from schedsearch.target import PRESETS, Target
from schedsearch.template import KernelSource
from schedsearch.templates.data_movement.move import Move
from schedsearch.templates.data_movement.mover import Mover
from schedsearch.templates.data_movement.staging import Staging
from schedsearch.testing.emulator import replace_casts
from schedsearch.testing.template_contract import TemplateContract
from schedsearch.verification.verify import verify_once

EMULATED_THREADS = 3000  # threads times tiles
# Opcodes of machine code: the low 12 bits of an instruction (as nvdisasm names them), and its size in bits 73 to 75.
GLOBAL_STORES, COPY_TO_SHARED, ACCESS_128 = {0x386, 0x986}, 0xFAE, 6


# --- Emulated -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(64))
@pytest.mark.mostly_long(3)
def test_any_movement_with_any_schedule_moves_every_element(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    rng = np.random.default_rng([19, number])
    target = TURING if number % 8 == 0 else H200
    emulated = Emulated(monkeypatch, late=bool(number % 2))
    while True:
        moved = random_movement(rng)
        source, configs = random_source(moved, target, rng, default=number % 3 == 0)
        if sum(step.grid.work_items * step.block_threads for step in source.steps) <= EMULATED_THREADS:
            break
    emulated.check(source, moved.arrays, moved.y, f"{moved.movement} {configs}")


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.mostly_long(3)
def test_the_defaults_of_operators_move_every_element(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    workload = OPERATORS[name]
    arrays, y = of_operator(workload, np.random.default_rng(1))
    emulated = Emulated(monkeypatch, late=True)
    source = CUDA.kernel(workload, H200, CUDA.default(workload, H200, CUDA.space(workload, H200)))
    emulated.check(source, arrays, y, name)


@pytest.mark.parametrize(
    ("shape", "order", "dtype"),
    [
        ((2, 64, 80), (0, 2, 1), "float16"),
        ((64, 2, 80), (2, 1, 0), "int8"),
        ((112, 48), (1, 0), "float32"),
        ((64, 5, 80), (2, 0, 1), "float16"),
        ((160, 112), (1, 0), "int8"),  # the last tiles are not full
    ],
)
@pytest.mark.mostly_long(6)
def test_threads_that_store_several_vectors_move_every_element(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], order: tuple[int, ...], dtype: str
) -> None:
    workload = transpose(x=shape, permutation=order, dtype=dtype)
    arrays, y = of_operator(workload, np.random.default_rng(3))
    emulated, space = Emulated(monkeypatch, late=True), CUDA.space(workload, H200)
    default, values = CUDA.default(workload, H200, space), space.values
    assert values["across"] == {"int8": (1, 4, 8, 16), "float16": (1, 2, 4, 8), "float32": (1, 2, 4)}[dtype]
    for across in values["across"][1:]:
        choices = [
            Config({**default, "across": across, "tile": tile, "store_bytes": store_bytes, "threads": 64})
            for tile in values["tile"]
            for store_bytes in values["store_bytes"]
        ]
        legal = [config for config in choices if not space.check(config)]
        assert legal, across
        for config in (legal[0], legal[-1]):
            emulated.check(CUDA.kernel(workload, H200, config), arrays, y, f"{dict(config)}")


@pytest.mark.parametrize("distance", range(16))
@pytest.mark.mostly_long(5)
def test_bytes_at_any_distance_from_an_aligned_address_are_moved(monkeypatch: pytest.MonkeyPatch, distance: int) -> None:
    """A slice of odd rows, transposed into y behind bytes that stay as they are."""
    rng = np.random.default_rng([29, distance])
    rows, row, columns, at = 37, 75, 43, 5 * distance % 16
    x = any_bits(rng, (rows, row), 1)
    y = np.full(rows * columns + 32, 0xA5, np.uint8)
    y[at : at + rows * columns] = x[:, distance : distance + columns].T.ravel()
    box = Box.of("x", [Factor(columns, 1, rows), Factor(rows, row, 1)], x_start=distance, y_start=at)
    moved = Moved(Movement(1, (box,)), {"x": x}, y)
    emulated = Emulated(monkeypatch, late=bool(distance % 2))
    ((name, mover),) = movers(moved, H200)
    for config in (mover.default(), *random_configs(mover.space(), rng, 4)):
        source = KernelSource("cuda", "native", (mover.step(config, x=name, y="y"),))
        emulated.check(source, moved.arrays, y, f"{dict(config)}")


def blocks_of_pixels(make: Callable[..., Workload], block: int) -> dict[str, int]:
    """Sizes of an image with 3 channels and 3 x 13 blocks, as depth or as space."""
    if make is depth_to_space:
        return {"n": 1, "c": 3 * block**2, "h": 3, "w": 13}
    return {"n": 1, "c": 3, "h": 3 * block, "w": 13 * block}


BYTES: dict[str, Workload] = {
    "few odd channels to NHWC": layout_transform(n=2, c=23, h=9, w=11, layout="NCHW", to="NHWC", dtype="int8"),
    "odd channels to NCHW": layout_transform(n=2, c=27, h=9, w=7, layout="NHWC", to="NCHW", dtype="int8"),
    "one column": transpose(x=(3, 61, 2), permutation=(2, 0, 1), dtype="int8"),
    "short rows": transpose(x=(5, 7, 3, 2), permutation=(1, 3, 0, 2), dtype="int8"),
    **{
        f"{make.__name__} {block} {mode} {layout}": make(**image, block=block, mode=mode, layout=layout, dtype="int8")
        for make in (depth_to_space, space_to_depth)
        for block in (2, 3, 4, 5)
        for mode in ("DCR", "CRD")
        for layout in ("NCHW", "NHWC")
        for image in [blocks_of_pixels(make, block)]
    },
}


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.mostly_long(5)
def test_bytes_of_odd_shapes_are_moved(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    workload, rng = BYTES[name], np.random.default_rng([37, len(name)])
    arrays, y = of_operator(workload, rng)
    emulated, space = Emulated(monkeypatch, late=True), CUDA.space(workload, H200)
    for config in (CUDA.default(workload, H200, space), *random_configs(space, rng, 3)):
        emulated.check(CUDA.kernel(workload, H200, config), arrays, y, f"{dict(config)}")


def test_offsets_beyond_2_to_the_31_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tile of a transposition of 5 x 2**31 elements."""
    replace_casts(monkeypatch, tile_places)
    shape = (5, 2**16, 2**15)
    p = Move.of(permuted("x", shape, (2, 1, 0)), 2, 10 * 2**31, 10 * 2**31)
    s = Staging(p, (64, 64, 5), 16, 16)
    of_x, of_y = tile_places.tile_offsets(s, along_y=True)
    last = staged_kernel.tile_count(s) - 1
    assert last == 2**15 // 64 * 2**16 // 64 - 1
    assert of_x(last) == 2 * ((2**16 - 64) * 2**15 + 2**15 - 64)
    assert of_y(last) == 2 * 5 * ((2**15 - 64) * 2**16 + 2**16 - 64)


# --- Tiles --------------------------------------------------------------------------------------------------------------


def test_runs_of_a_tile_of_odd_planes() -> None:
    """512 planes of 7 x 7: whole planes lie together in x, channels of a pixel in y."""
    s = Staging(Move.of(permuted("x", (2, 512, 49), (0, 2, 1)), 2, 10**6, 10**6), (1, 49, 64), 16, 16)
    assert (s.x_span_bytes, s.x_unit, s.x_rows) == (2 * 49 * 64, 16, ())
    assert (s.run_elements, s.y_unit, s.extents(s.y_rows)) == (64, 16, (49,))
    assert not s.partial_vectors


def test_runs_that_are_not_aligned_are_loaded_from_the_aligned_address_before() -> None:
    """Rows of 361 pixels of 2 bytes: they begin at any even address, so that 128 bytes take up to 9 loads."""
    s = Staging(Move.of(permuted("x", (1, 64, 361), (0, 2, 1)), 2, 10**6, 10**6), (64, 64), 16, 16)
    assert (s.x_span_bytes, s.x_unit, s.x_chunks, s.pitch) == (128, 2, 9, 144)


def test_rows_of_bytes_are_as_far_apart_as_in_x_apart_from_multiples_of_16() -> None:
    """Planes of 111826 pixels: 2 bytes beyond a multiple of 16."""
    s = Staging(Move.of(permuted("x", (8, 23, 111826), (0, 2, 1)), 1, 10**8, 10**8), (1, 768, 23), 16, 16)
    assert (s.x_unit, s.pitch, s.shared_strides) == (2, 784, (0, 1, 784 + 2))
    assert s.shared_bytes >= 14 + 22 * 786 + 784
    assert (s.segment, s.segment_ends) == ((1, 23), 1)


@pytest.mark.parametrize(
    ("extents", "segment", "ends"),
    [((3, 97, 5), (3, 97), 1), ((10, 2, 24), (1, 10), 2), ((2, 3, 9), (2, 3), 3), ((40,), (1, 40), 0)],
)
def test_segments_of_a_run_of_bytes(extents: tuple[int, ...], segment: tuple[int, int], ends: int) -> None:
    """y is one run whose digits have strides in x that do not follow one another; a vector has 16 elements."""
    in_y = row_strides(extents[::-1])
    factors = [Factor(extent, 3 * at, to) for extent, at, to in zip(extents[::-1], in_y[::-1], in_y)]
    s = Staging(Move(1, tuple(factors), 0, 0, (), 10**6, 10**6), extents[::-1], 16, 16)
    assert len(s.y_run) == len(extents)
    assert (s.segment, s.segment_ends) == (segment, ends)


def test_a_backward_run_starts_at_its_last_element() -> None:
    box = Box.of("x", [Factor(8, -1, 1)], x_start=7)
    s = Staging(Move.of(box, 4, 32, 32), (8,), 16, 16)
    assert (s.x_start, s.shared_start, s.shared_strides, s.x_span_bytes) == (0, 28, (-4,), 32)


@pytest.mark.parametrize(
    ("shape", "order", "element", "cycles"),
    [  # the fewest: 4 warps collect so many accesses of 32 threads, each in at least one cycle
        ((1, 1024, 1024), (0, 2, 1), 4, 16),
        ((1, 1024, 1024), (0, 2, 1), 2, 32),
        ((1, 1024, 1024), (0, 2, 1), 1, 64),
    ],
)
def test_the_swizzle_of_transpositions_leaves_few_conflicts(shape: Any, order: Any, element: int, cycles: int) -> None:
    nbytes = element * 2**20
    mover = Mover(Move.of(permuted("x", shape, order), element, nbytes, nbytes), H200)
    s = mover._staging(mover.tiles[mover.default()["tile"]], 16)
    unswizzled = staged_conflicts(s)
    assert cycles <= s.wavefronts <= 2 * cycles
    assert s.wavefronts < unswizzled or unswizzled == cycles


def staged_conflicts(s: Staging) -> int:
    """Cycles without a swizzle, counted bank by bank."""
    total = 0
    for access in s._sampled_places():
        words = {int(place) // 4 for place in access}
        total += max(sum(word % 32 == bank for word in words) for bank in range(32))
    return total


def test_the_defaults_of_large_transpositions_are_the_fastest_measured() -> None:
    """On an H200, benchmarks/results/transpositions_h200.json; the tile is as wide as the image has channels."""
    found = {}
    for layout, to in (("NCHW", "NHWC"), ("NHWC", "NCHW")):
        workload = layout_transform(n=1, c=128, h=720, w=1280, layout=layout, to=to)
        found[layout] = CUDA.default(workload, H200, CUDA.space(workload, H200))
    shared = {"tile": "128x128", "threads": 128, "persistent": False, "blocks_per_sm": 1, "buffers": 1, "store_bytes": 16}
    for layout, across, stores in (("NCHW", 8, "default"), ("NHWC", 2, "streaming")):
        assert dict(found[layout]).items() >= {**shared, "across": across, "stores": stores}.items()


def test_common_runs_count_as_wide_elements() -> None:
    box = permuted("x", (8, 6, 4), (1, 0, 2))
    assert Move.of(box, 2, 384, 384).element_bytes == 8
    assert Move.of(replace(box, x_start=2), 2, 400, 384).element_bytes == 4
    assert Move.of(replace(box, x_start=1), 2, 400, 384).element_bytes == 2


# --- Compiled -----------------------------------------------------------------------------------------------------------

IMAGE = {"n": 1, "c": 64, "h": 72, "w": 128, "block": 2}
WIDE: dict[str, Workload] = {
    "odd planes": transpose(x=(8, 128, 361), permutation=(0, 2, 1)),
    "odd planes of bytes": transpose(x=(8, 361, 128), permutation=(0, 2, 1), dtype="int8"),
    "CRD": depth_to_space(**IMAGE, mode="CRD"),
    "CRD in NHWC": depth_to_space(**IMAGE, mode="CRD", layout="NHWC"),
    "back to depth": space_to_depth(**IMAGE, mode="CRD"),
}


class TestCudaTemplate(TemplateContract):
    template, target = CUDA, H200
    accepted = (
        WIDE["odd planes"],
        WIDE["CRD"],
        WIDE["back to depth"],
        depth_to_space(**IMAGE, layout="NHWC"),
        OPERATORS["backwards"],
        OPERATORS["nothing"],
        OPERATORS["channels"],
        OPERATORS["borders of rows"],
        OPERATORS["blocks of channels"],
    )
    refused = ((transpose(x=(2**24, 2**24, 3), permutation=(1, 0, 2)), "tiles"),)
    samples, compiled = 4, 1


@pytest.mark.parametrize(
    ("name", "target"), each_one_way({name: [name] for name in WIDE}, {"sm_80": PRESETS["a100"], "sm_90": H200})
)
@pytest.mark.mostly_long(5)
def test_defaults_spill_nothing_and_access_16_bytes(target: Target, name: str) -> None:
    workload = WIDE[name]
    config = CUDA.default(workload, target, CUDA.space(workload, target))
    built = compile_source(CUDA.kernel(workload, target, config), target)
    assert built.resources.spill_bytes == built.resources.local_bytes == 0
    wide = {code & 0xFFF for code in instructions(built.artifact.code) if code >> 73 & 7 == ACCESS_128}
    assert COPY_TO_SHARED in wide
    assert config["store_bytes"] < 16 or GLOBAL_STORES & wide


def spilled(workload: Workload) -> int:
    """Bytes of registers that the default spills; the backend refuses it if there are any."""
    config = CUDA.default(workload, H200, CUDA.space(workload, H200))
    return compile_source(CUDA.kernel(workload, H200, config), H200).resources.spill_bytes


@pytest.mark.parametrize(
    ("dtype", "stride"),
    [pytest.param("float16", 2, marks=pytest.mark.long), ("int8", 4), pytest.param("int8", 16, marks=pytest.mark.long)],
)
@pytest.mark.mostly_long(3)
def test_defaults_of_slices_with_gaps_build(dtype: str, stride: int) -> None:
    """Collecting elements with gaps took more registers than the blocks of a multiprocessor had."""
    shape = (256, 1024, 512)
    assert spilled(strided_slice(x=shape, begin=(0, 0, 0), end=shape, strides=(1, 1, stride), dtype=dtype)) == 0


@pytest.mark.long
@pytest.mark.parametrize("number", range(100))
def test_defaults_of_any_slice_build(number: int) -> None:
    rng = np.random.default_rng([31, number])
    shape = tuple(int(n) for n in rng.choice([3, 7, 16, 56, 100, 256, 512, 1000], rng.integers(1, 5)))
    strides = [*(int(n) for n in rng.choice([1, 1, 1, 2, 3, -1], len(shape) - 1))]
    strides.append(int(rng.choice([1, 2, 3, 4, 5, 6, 8, 12, 16, -1, -2, -4])))
    ends = [(int(rng.integers(0, n // 4 + 1)), int(rng.integers(n - n // 4, n + 1))) for n in shape]
    begin = [low if step > 0 else high - 1 for (low, high), step in zip(ends, strides)]
    end = [high if step > 0 else (low - 1 if low else None) for (low, high), step in zip(ends, strides)]
    dtype = str(rng.choice(["int8", "float16", "float32"]))
    assert spilled(strided_slice(x=shape, begin=begin, end=end, strides=strides, dtype=dtype)) == 0


# --- On a GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.many
@pytest.mark.parametrize("number", range(40))
def test_a_gpu_moves_every_element(some_of: Callable[..., Any], number: int) -> None:
    rng = np.random.default_rng([23, number])
    target = schedsearch.detect("cuda")
    moved = random_movement(rng, longest=(0, 100_000, 400, 60, 30, 12))
    arrays = {name: np.ascontiguousarray(x) for name, x in moved.arrays.items()}
    with contextlib.closing(open_device(target)) as gpu:
        for default in some_of((True, False), number):
            source, configs = random_source(moved, target, rng, default)
            try:
                found = run(gpu, source, arrays, {"y": (moved.y.shape, moved.y.dtype)})["y"]
            except RejectedError:
                assert not default, f"{moved.movement} {configs}"
            else:
                np.testing.assert_array_equal(found, moved.y, err_msg=f"{moved.movement} {configs}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*WIDE, *(name for name in OPERATORS if name != "nothing")])
def test_a_gpu_runs_the_operators(some_of: Callable[..., Any], name: str) -> None:
    workload, number = {**WIDE, **OPERATORS}[name], [*WIDE, *OPERATORS].index(name)
    target = schedsearch.detect("cuda")
    arrays, y = of_operator(workload, np.random.default_rng(2))
    with contextlib.closing(open_device(target)) as gpu:

        def check(config: Config) -> None:
            found = run(gpu, CUDA.kernel(workload, target, config), arrays, {"y": (y.shape, y.dtype)})["y"]
            np.testing.assert_array_equal(found, y, err_msg=f"{workload.label} {dict(config)}")

        check_schedules(check, CUDA, workload, target, np.random.default_rng(3), some_of(KINDS, number))


@pytest.mark.gpu
def test_a_gpu_stores_no_more_of_the_last_vector_of_bytes_than_y_has() -> None:
    workload = schedsearch.depth_to_space(n=2, c=342, h=1117, w=97, block=3, mode="DCR", layout="NCHW", dtype="int8")
    target = schedsearch.detect("cuda")
    with contextlib.closing(open_device(target)) as gpu:
        source = CUDA.kernel(workload, target, CUDA.default(workload, target, CUDA.space(workload, target)))
        kernel = gpu.load(compile_source(source, target).artifact)
        assert verify_once(gpu, workload, kernel) is None
