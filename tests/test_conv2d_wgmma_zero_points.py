"""conv2d_wgmma with zero points of x and of the weight: its source and the PTX of its corrections and stages, emulated.

Factors take their whole formats, and results are compared bit for bit with a model in int64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import integer_model
import numpy as np
import pytest
from cluster_emulator import ClusterEmulator
from conv2d_numpy import KINDS, check_schedules
from conv2d_support import run_on_cpu
from ptx_emulator import PtxEmulator
from test_conv2d_wgmma import LOCAL_LOAD, LOCAL_STORE, instructions
from test_conv2d_wgmma_emulated import MODULES, SMALL

from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.constructors.convolutions import conv2d
from schedsearch.launch import Pointer
from schedsearch.target import PRESETS, Target
from schedsearch.templates.conv2d import weight_rows
from schedsearch.templates.conv2d.wgmma import Conv2dWgmma
from schedsearch.templates.parts import addressing, epilogue, epilogue_fragments, store, window_sums, zero_points
from schedsearch.templates.parts.window_sums import SUMS
from schedsearch.testing.emulator import Emulator, Memory

Array = np.ndarray[Any, Any]
H200, TEMPLATE = PRESETS["h200"], Conv2dWgmma()
SHAPE: dict[str, Any] = {"n": 2, "h": 7, "w": 6, "c": 48, "k": 48, "r": 2, "s": 3, "padding": 1, "dtype": "int8"}
WEIGHT: dict[str, Any] = {**SHAPE, "zero_points": ["weight"]}
BOTH: dict[str, Any] = {**SHAPE, "zero_points": ["x", "weight"]}
QUANTISED = {"requantise_add": {"to": "uint8", "middle": "int8", "residual": "uint8", "relu": True}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "of the weight, strides, asymmetric padding, two groups of rows": (
        {**WEIGHT, "n": 3, "padding": (2, 1, 1, 3), "stride": (1, 2), "weight_dtype": "uint8"},
        {**SMALL, "bn": 48, "bk": 32, "warpgroups": 2, "persistent": True},
    ),
    "both, int8, columns past the end": (
        {**BOTH, "k": 80, "epilogue": ["bias", "requantise"]},
        {**SMALL, "bn": 48, "bk": 32},
    ),
    "both, a dilated kernel larger than the image": (
        {**BOTH, "n": 3, "h": 3, "r": 4, "dilation": (2, 1), "padding": (3, 0, 2, 1), "dtype": "uint8"},
        {**SMALL, "bk": 32},
    ),
    "both, blocks of 32 channels, an image for each tile": (
        {**BOTH, "n": 3, "c": 64, "k": 64, "layout": "NCHW32c", "padding": (2, 1, 0, 1), "stride": (1, 2)},
        {**SMALL, "bk": 32, "persistent": True},
    ),
    "both, blocks of 16 channels, images of two tiles, uint8": (
        {**BOTH, "h": 12, "layout": "NCHW16c", "epilogue": ["bias", "relu", {"requantise": {"to": "uint8"}}]},
        {**SMALL, "bn": 48, "bk": 32},
    ),
    "blocks of 32 channels, split by 2, int8": (
        {**WEIGHT, "c": 64, "k": 64, "layout": "NCHW32c", "epilogue": ["requantise"]},
        {**SMALL, "split_k": 2, "bn": 64, "bk": 32},
    ),
    "blocks of 16 channels, 2 x 2 tiles that share operands, past the last image": (
        {**BOTH, "n": 3, "k": 80, "layout": "NCHW16c"},
        {**SMALL, "cluster_m": 2, "cluster_n": 2, "bk": 32, "stages": 2, "band": 2},
    ),
    "3 groups of 32 channels, two tiles of each share pixels, int8": (
        {**BOTH, "c": 96, "k": 96, "groups": 3, "epilogue": ["bias", "requantise"]},
        {**SMALL, "bn": 16, "bk": 32, "cluster_n": 2, "stages": 2},
    ),
    "groups in blocks of 16 channels": (
        {**WEIGHT, "c": 64, "k": 96, "groups": 2, "layout": "NCHW16c"},
        {**SMALL, "bn": 48, "bk": 32},
    ),
    "16 merged groups of 4 channels, 8 at a time": (
        {**BOTH, "n": 1, "c": 64, "k": 64, "groups": 16},
        {**SMALL, "bk": 32},
    ),
    "16 merged groups of 3 output channels, int8": (
        {**BOTH, "n": 1, "c": 64, "k": 48, "groups": 16, "epilogue": ["bias", "requantise"]},
        {**SMALL, "bn": 48, "bk": 64},
    ),
    "split by 2, two rows of tiles share weights, a quantised residual": (
        {**BOTH, "n": 3, "c": 96, "epilogue": ["bias", QUANTISED]},
        {**SMALL, "split_k": 2, "cluster_m": 2, "bk": 32, "stages": 2},
    ),
    "a quantised residual, loaded ahead": (
        {**BOTH, "epilogue": ["bias", QUANTISED]},
        {**SMALL, "bn": 48, "bk": 32, "warpgroups": 2},
    ),
    "a quantised residual in blocks": (
        {**BOTH, "layout": "NCHW16c", "epilogue": [QUANTISED]},
        {**SMALL, "bn": 32, "bk": 32},
    ),
    "groups of warps in turn, a residual of sums": (
        {**BOTH, "n": 5, "h": 11, "c": 32, "k": 32, "padding": 0, "epilogue": ["bias", "residual"]},
        {**SMALL, "cluster_m": 2, "bk": 32, "schedule": "in_turn", "persistent": True, "warpgroups": 2},
    ),
    "float16 after dequantise": (
        {**BOTH, "epilogue": ["bias", {"dequantise": {"to": "float16"}}, "residual", "relu"]},
        {**SMALL, "bn": 48, "bk": 32},
    ),
    "float32 after dequantise, in blocks": (
        {**BOTH, "layout": "NCHW16c", "epilogue": [{"dequantise": {"to": "float32"}}]},
        {**SMALL, "bn": 48, "bk": 32},
    ),
}


OPERATIONS = [  # on fragments; each remembers what it has made
    (window_sums, "correct_rows"), (window_sums, "correct_channels"), (zero_points, "correct_fragments"),
    (epilogue, "load_ahead_operation"), (epilogue, "fragments_operation"),
]  # fmt: skip
MAKERS = [(module, name, getattr(module, name).__wrapped__) for module, name in OPERATIONS]


def run_ptx(monkeypatch: pytest.MonkeyPatch, memory: Memory) -> None:
    """Lets the corrections and stages of the kernels that are built from now on run as PTX."""
    emulator = PtxEmulator(memory)

    def device_op(name: str, ptx: str, **operands: Any) -> Callable[..., Any]:
        operation = emulator.device_op(name, ptx, **operands)

        def operate(registers: list[Any], *arguments: Any) -> None:
            operation(registers, *arguments)
            registers[:] = [_bits(value) for value in registers]

        return operate if operands.get("inout") else operation

    for module, name, make in MAKERS:
        monkeypatch.setattr(module, name, make)
    for module in (window_sums, zero_points, epilogue, epilogue_fragments):
        monkeypatch.setattr(module, "device_op", device_op)


def _bits(value: Any) -> int:
    return int(value.view(np.int32)) if isinstance(value, np.float32) else int(value)


# These take a thread of the emulator 4 seconds or more; the others have their blocks, groups and parts one by one.
SLOW = {
    "blocks of 16 channels, 2 x 2 tiles that share operands, past the last image",
    "3 groups of 32 channels, two tiles of each share pixels, int8",
    "16 merged groups of 4 channels, 8 at a time",
    "split by 2, two rows of tiles share weights, a quantised residual",
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.long] * (case in SLOW)) for case in CASES])
@pytest.mark.mostly_long(15)
def test_results_are_those_of_a_model_in_int64(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    (shape, config), late = CASES[case], list(CASES).index(case) % 2 == 0
    w, memory = conv2d(**shape), Memory()
    assert TEMPLATE.validate(w, H200) is None
    emulator = ClusterEmulator(memory, lambda value, *_: value, late)
    emulator.stand_in(monkeypatch, *MODULES, weight_rows, addressing, window_sums, zero_points)
    run_ptx(monkeypatch, memory)
    source = TEMPLATE.kernel(w, H200, Config(config))
    arrays = integer_model.arguments(w)
    y = np.full(w.output.shape, np.nan if w.output.dtype.startswith("float") else 99, w.output.dtype)
    workspaces = {name: np.full(nbytes, 0x55, np.uint8) for name, nbytes in source.workspaces.items()}
    buffers = {name: memory.add(array) for name, array in {**arrays, **workspaces, "y": y}.items()}
    of_maps = {"x": arrays["x"], "y": y, "weight": arrays["weight"].reshape(w.k, w.r * w.s, -1)}
    if w.layout != "NHWC":
        of_maps["weight"] = arrays["weight"].reshape(-1)
    if weight_rows.ROWS in workspaces:
        rows = workspaces[weight_rows.ROWS].view(w.weight_dtype)
        of_maps[weight_rows.ROWS] = rows.reshape(w.k, w.r * w.s, -1)
    for step in source.steps:
        emulator.run(step, buffers, 2, of_maps, integer_model.SCALARS)
    np.testing.assert_array_equal(y, integer_model.expected(w, arrays))


# --- The operations ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("interleaved", "groups", "outputs"),
    [(False, 1, 0), (False, 3, 0), (False, 8, 2), (False, 8, 3), (True, 4, 4), (True, 16, 1), (True, 4, 6)],
)
def test_every_accumulator_gets_the_sum_of_its_pixel_and_group(
    monkeypatch: pytest.MonkeyPatch, interleaved: bool, groups: int, outputs: int
) -> None:
    """One group in a tile if `outputs` is 0. Rows and columns past the end read nothing, which is outside of the table.

    PTX ISA, wgmma's D fragment: a thread's values of an octet are columns 0 and 1 of row r, then of row r + 8. If columns
    are interleaved, column j of octet o (of two) is channel 2 j + o of 16.
    """
    memory, octets, pixel = Memory(), 6, 5
    run_ptx(monkeypatch, memory)
    table = np.arange(1, 1 + 64 * groups, dtype=np.int32).reshape(64, groups) * 7
    at, k = memory.add(table), 8 if interleaved else 6
    for rows, columns in ((9, 48), (1, 48), (0, 48), (-3, 48), (9, 16), (9, 0), (9, -16)):
        acc = [1000 * i for i in range(4 * octets)]
        if outputs:
            each = window_sums.correct_channels(octets, interleaved, groups, outputs)
            each(acc, columns, rows, pixel * groups, k, at, np.float32(-3))
        else:
            window_sums.correct_rows(octets, groups)(acc, columns, rows, pixel * groups + groups - 1, at, np.float32(-3))
        for octet, row, column in np.ndindex(octets, 2, 2):
            place = 16 * (octet // 2) + 2 * column + octet % 2 if interleaved else 8 * octet + column
            if place - place % (16 if interleaved else 8) < columns and 8 * row < rows:
                group = (k + place) // outputs if outputs else groups - 1
                expected = 3 * int(table.reshape(-1)[(pixel + 8 * row) * groups + group])
                i = 4 * octet + 2 * row + column
                assert acc[i] == 1000 * i + expected, (rows, columns, octet, row, column)


@pytest.mark.parametrize(("images", "steps"), [(1, (0, 1)), (3, (4, 1))], ids=["rows of all images", "rows of one"])
def test_a_row_of_tiles_has_the_number_of_its_pixel(
    monkeypatch: pytest.MonkeyPatch, images: int, steps: tuple[int, int]
) -> None:
    """70 pixels of an image, in tiles of 64 rows: those of the next image begin at row 128."""
    emulator = Emulator(Memory(), lambda value, *_: value, late_copies=False)
    emulator.stand_in(monkeypatch, store)
    padded = 128 if images > 1 else 210
    output = store.Output(64, images, 70 if images > 1 else 210, padded, 16 if images > 1 else 64, *steps)
    locate, first_pixel = output.locate(), output.first_pixel()
    found = [first_pixel(row) + locate(row)[1] for row in range(padded * images) if locate(row)[1] < output.rows]
    assert found == list(range(210))


# --- Compiled ---------------------------------------------------------------------------------------------------------
LAYER: dict[str, Any] = {"n": 32, "h": 28, "w": 28, "c": 128, "k": 512, "r": 3, "s": 3, "padding": 1, "dtype": "int8"}
COMPILED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "64 x 256, int8": ({"epilogue": ["bias", "relu", "requantise"]}, {"bn": 256}),
    "64 x 256, int8 in blocks": ({"layout": "NCHW32c", "epilogue": ["requantise"]}, {"bn": 256}),
    "64 x 64, merged groups, int8": ({"groups": 32, "c": 256, "epilogue": ["requantise"]}, {"bn": 64}),
    "64 x 224, a quantised residual": ({"epilogue": ["bias", QUANTISED]}, {"bn": 224}),
    "64 x 256, split by 2, float16": ({"n": 1, "epilogue": [{"dequantise": {"to": "float16"}}]}, {"bn": 256, "split_k": 2}),
}


@pytest.mark.long
@pytest.mark.parametrize("case", COMPILED)
def test_sums_of_wide_tiles_stay_in_registers(case: str) -> None:
    change, knobs = COMPILED[case]
    w = conv2d(**{**LAYER, "zero_points": ["x", "weight"], **change})
    assert TEMPLATE.validate(w, H200) is None
    fixed = {"warpgroups": 1, "stages": 2, "cluster_m": 1, "cluster_n": 1, "blocks_per_sm": 1, **knobs}
    space = TEMPLATE.space(w, H200).restrict({name: [value] for name, value in fixed.items()})
    built = compile_source(TEMPLATE.kernel(w, H200, space.sample(1, np.random.default_rng(0))[0]), H200)
    assert built.resources.local_bytes == built.resources.spill_bytes == 0
    assert not {word & 0xFFF for word in instructions(built.artifact.code)} & {LOCAL_LOAD, LOCAL_STORE}


def test_the_sums_are_written_at_every_call_and_the_table_once() -> None:
    w = conv2d(**BOTH)
    source = TEMPLATE.kernel(w, H200, Config(SMALL))
    assert [step.constant for step in source.steps] == [False, True, False]
    assert source.workspaces[SUMS] == 4 * w.n * 8 * 6
    assert [param.buffer for param in source.steps[0].params if isinstance(param, Pointer)] == ["x", SUMS]


# --- On a GPU ---------------------------------------------------------------------------------------------------------
SIGNS: dict[str, Any] = {"dtype": "uint8", "weight_dtype": "int8", "zero_points": ["x", "weight"]}
PIXELS: dict[str, Any] = {"n": 2, "h": 13, "w": 11, "c": 80, "k": 96, "r": 3, "s": 3, "padding": 1, **SIGNS}
LAYERS: dict[str, dict[str, Any]] = {
    "of the weight, strides": {**PIXELS, "dtype": "int8", "weight_dtype": "uint8", "zero_points": ["weight"], "stride": 2},
    "both, borders on all sides, int8": {**PIXELS, "padding": (2, 0, 1, 3), "epilogue": ["bias", "relu", "requantise"]},
    "blocks of 16 channels, int8": {**PIXELS, "layout": "NCHW16c", "epilogue": ["bias", "requantise"]},
    "blocks of 32 channels, sums": {**PIXELS, "n": 3, "layout": "NCHW32c", "c": 96, "stride": (1, 2), "dilation": 2},
    "blocks of 32 channels, 2 groups": {**PIXELS, "layout": "NCHW32c", "c": 128, "k": 128, "groups": 2},
    "2 groups of 48 channels, int8": {**PIXELS, "c": 96, "groups": 2, "epilogue": ["requantise"]},
    "merged groups of 4 output channels": {**PIXELS, "groups": 20, "k": 80},
    "merged groups of 3 output channels, int8": {**PIXELS, "groups": 16, "c": 64, "k": 48, "epilogue": ["requantise"]},
    "a quantised residual": {**PIXELS, "epilogue": ["bias", QUANTISED]},
    "a quantised residual in blocks": {**PIXELS, "layout": "NCHW16c", "epilogue": ["bias", QUANTISED]},
    "float16": {**PIXELS, "epilogue": ["bias", {"dequantise": {"to": "float16"}}, "scale_shift", "residual", "leaky_relu"]},
    "float32, one tap, many pixels": {**PIXELS, "n": 20, "h": 40, "r": 1, "s": 1, "padding": 0, "epilogue": ["dequantise"]},
    "few pixels, many steps": {**PIXELS, "n": 1, "h": 7, "w": 7, "c": 512, "k": 256, "epilogue": ["bias", "requantise"]},
}


@pytest.mark.parametrize("layer", LAYERS)
def test_the_default_is_legal(layer: str) -> None:
    w = conv2d(**LAYERS[layer])
    assert TEMPLATE.validate(w, H200) is None
    space = TEMPLATE.space(w, H200)
    assert space.check(TEMPLATE.default(w, H200, space)) == []


@pytest.mark.gpu
@pytest.mark.parametrize("layer", LAYERS)
def test_a_gpu_computes_the_same(hopper: Target, some_of: Callable[..., Any], layer: str) -> None:
    from schedsearch.device import open_device

    w, number = conv2d(**LAYERS[layer]), list(LAYERS).index(layer)
    arrays = integer_model.arguments(w)
    storage = np.uint16 if w.output.dtype == "float16" else w.output.dtype
    expected = integer_model.expected(w, arrays).view(storage)
    scalars = {scalar.name: integer_model.SCALARS[scalar.name] for scalar in w.scalars}
    device = open_device(hopper)

    def check(config: Config) -> None:
        outputs = {"y": (w.output.shape, storage)}
        y = run_on_cpu(device, TEMPLATE.kernel(w, hopper, config), arrays, outputs, scalars)["y"]
        np.testing.assert_array_equal(y, expected, err_msg=str(config))

    try:
        kinds = some_of(KINDS, number)
        check_schedules(check, TEMPLATE, w, hopper, np.random.default_rng([7, number]), kinds)
    finally:
        device.close()
