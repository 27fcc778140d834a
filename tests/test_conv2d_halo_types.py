"""conv2d_halo of int8, uint8, float8 and TF32: its kernel emulated thread by thread, compiled, and exact on a GPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import integer_model
import numpy as np
import pytest
from halo_emulation import MODULES, emulator_of
from long_cases import each_one_way
from test_conv2d_halo import IN_TURN, TOGETHER
from test_conv2d_wgmma import LOCAL_LOAD, LOCAL_STORE, instructions

import schedsearch.templates.conv2d.halo as module
import schedsearch.templates.conv2d.halo_store as store_module
from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.constructors.convolutions import conv2d
from schedsearch.target import PRESETS
from schedsearch.templates.conv2d.halo import Conv2dHalo
from schedsearch.templates.conv2d.halo_sizes import evaluate
from schedsearch.templates.parts import addressing, zero_points
from schedsearch.templates.parts.epilogue_fragments import TileRows
from schedsearch.templates.parts.stages import epilogue_operands
from schedsearch.testing.emulator import Memory
from schedsearch.workload import Workload

Array = np.ndarray[Any, Any]
H200 = PRESETS["h200"]
TEMPLATE = Conv2dHalo()
REQUANTISED = ("bias", "residual", {"requantise": {"to": "int8"}})
SMALL: dict[str, Any] = {"n": 2, "h": 6, "w": 9, "c": 48, "k": 32, "r": 3, "s": 3, "padding": 1, "dtype": "int8"}
GROUPS: dict[str, Any] = {**SMALL, "n": 1, "h": 5, "w": 6, "c": 48, "k": 48, "groups": 12}  # of 4 channels
MERGED: dict[str, Any] = {**TOGETHER, "weight_stages": 0, "merged": 12}

# Opcodes of sm_90 machine code: the low 12 bits of a 16-byte instruction (as nvdisasm names them).
IGMMA, QGMMA, HGMMA = 0x9F1, 0x9F3, 0x9F0


# --- Emulated -----------------------------------------------------------------------------------------------------------
class Stages:
    """Stands in for the epilogue: bias, residual and requantise of each sum by its channel and pixel, in this order.

    `outputs` counts the output channels of one group, even if groups are merged.
    """

    alignments: Mapping[str, int] = MappingProxyType({})

    def __init__(self, arrays: Mapping[str, Array], outputs: int, workload: Workload, further: Any = ()) -> None:
        self.arrays, self.outputs, self.workload = arrays, outputs, workload
        self.identity = not workload.epilogue
        operands = epilogue_operands(workload)
        self.params = (*(each.param for each in operands), *further)
        self.names = [*(each.name for each in operands), *(each.buffer for each in further)]

    def index(self, name: str) -> int:
        return self.names.index(name)

    def value(self, total: int, channel: int, element: int) -> int:
        names = [stage.name for stage in self.workload.epilogue]
        if "bias" in names:
            total += int(self.arrays["bias"][channel])
        if "residual" in names:
            total += int(self.arrays["residual"].reshape(-1)[element])
        if "requantise" in names:
            product = np.float32(total) * self.arrays["requantise_scale"][channel]
            total = int(np.rint(product)) + int(integer_model.SCALARS["y_zero_point"])
        return total

    def transposed(self, octets: int, tile: TileRows) -> Any:
        _, _, out_w, k_all = self.workload.output.shape
        assert (tile.row_elements, tile.pixel_elements) == (out_w * k_all, k_all)

        def fuse(
            acc: list[Any],
            channels: int,
            rows: int,
            columns: int,
            position: int,
            staged: int,
            k: int,
            offset: int,
            *params: Any,
        ) -> None:
            assert channels <= self.outputs and (k + channels) % self.outputs == 0
            for number in range(4 * octets):
                row, column = divmod(8 * (number // 4) + position + number % 2, tile.patch_w)
                of_second = number // 2 % 2 * tile.second
                if row < rows and column < columns and of_second < channels:
                    element = offset + row * tile.row_elements + column * tile.pixel_elements + of_second
                    assert element % k_all == k + of_second
                    acc[number] = self.value(acc[number], k + of_second, element)

        return fuse


def store_as_32_bits(memory: Memory, octets: int, tile: TileRows, accumulator: str) -> Any:
    def keep(acc: list[Any], y: int, channels: int, rows: int, columns: int, position: int, offset: int) -> None:
        for number in range(4 * octets):
            row, column = divmod(8 * (number // 4) + position + number % 2, tile.patch_w)
            if row < rows and column < columns and 8 * (number // 2 % 2) < channels:
                element = offset + row * tile.row_elements + column * tile.pixel_elements + 8 * (number // 2 % 2)
                memory.at(y + 4 * element, 4).view(accumulator)[0] = acc[number]

    return keep


EMULATED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "sums, a ring of weights": (SMALL, TOGETHER, 2),
    "int8, 3 + 2 octets of positions": (
        {**SMALL, "epilogue": REQUANTISED}, {**TOGETHER, "tile_h": 3, "tile_w": 9, "weight_stages": 0}, 1),
    "uint8 by int8, two chunks, rows and columns of warpgroups": (
        {**SMALL, "n": 1, "c": 144, "k": 112, "dtype": "uint8", "weight_dtype": "int8", "s": 1, "padding": (1, 0, 1, 0),
         "epilogue": ["bias", {"requantise": {"to": "uint8"}}]},
        {**TOGETHER, "channel_groups": 2, "row_groups": 2, "tile_w": 5, "patches": 1}, 1),
    "int8, in turn, y in the patch": (
        {**SMALL, "epilogue": REQUANTISED, "weight_dtype": "uint8"}, {**IN_TURN, "tile_w": 5, "patches": 3}, 1),
    "int8, strided": (
        {**SMALL, "h": 9, "stride": 2, "epilogue": ["requantise"]}, {**TOGETHER, "tile_w": 5}, 2),
    "int8, merged groups": ({**GROUPS, "epilogue": REQUANTISED}, MERGED, 2),
    "int8, merged single channels": (
        {**GROUPS, "c": 32, "k": 32, "groups": 32, "s": 1, "padding": (1, 0, 1, 0), "epilogue": ["requantise"]},
        {**MERGED, "merged": 16}, 3),
    "zero point, every border of rows and columns, strided": (
        {**SMALL, "h": 7, "zero_points": ["x"], "padding": (2, 1, 1, 3), "stride": (1, 2), "weight_dtype": "uint8"},
        {**TOGETHER, "tile_h": 3, "tile_w": 3}, 2),
    "zero point, uint8 to int8, in turn, tiles with and without borders": (
        {**SMALL, "n": 1, "h": 7, "dtype": "uint8", "zero_points": ["x"], "weight_dtype": "int8", "epilogue": REQUANTISED},
        {**IN_TURN, "tile_h": 2, "tile_w": 3}, 2),
    "zero point, a kernel larger than the image, groups": (
        {**SMALL, "h": 3, "w": 3, "r": 5, "s": 4, "dilation": (1, 2), "padding": (4, 5, 3, 2), "c": 64, "k": 64,
         "groups": 2, "zero_points": ["x"]}, {**TOGETHER, "tile_h": 4, "tile_w": 4, "merged": 1}, 1),
    "zero point, a tile that two blocks share, rows of warpgroups": (
        {**SMALL, "n": 1, "h": 7, "c": 144, "dtype": "uint8", "zero_points": ["x"], "weight_dtype": "int8",
         "epilogue": ["bias", "residual", {"requantise": {"to": "uint8"}}]},
        {**TOGETHER, "tile_h": 3, "tile_w": 9, "row_groups": 2, "split_k": 2}, 9),
    "sums, a tile that three blocks share": (
        {**SMALL, "n": 1, "c": 272}, {**TOGETHER, "tile_h": 4, "patches": 1, "split_k": 3}, 9),
    "sums, groups of 48 channels as they are": (
        {**SMALL, "n": 1, "c": 96, "k": 96, "groups": 2, "r": 1, "padding": (0, 1, 0, 1)}, TOGETHER, 2),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "late"), each_one_way({name: [name] for name in EMULATED}, {"at once": False, "late": True})
)
@pytest.mark.mostly_long(4)
def test_sums_of_whole_numbers(monkeypatch: pytest.MonkeyPatch, name: str, late: bool) -> None:
    params, config, sms = EMULATED[name]
    w, memory = conv2d(**params), Memory()
    assert TEMPLATE.validate(w, H200) is None
    emulator = emulator_of(memory, config, late)
    emulator.stand_in(monkeypatch, *MODULES, addressing, zero_points)
    arrays = integer_model.arguments(w)
    outputs = w.k // w.groups * config.get("merged", 1)
    monkeypatch.setattr(module, "Epilogue", functools.partial(Stages, arrays, outputs))
    monkeypatch.setattr(store_module, "store_transposed", functools.partial(store_as_32_bits, memory))
    y = np.zeros(w.output.shape, w.output.dtype)
    tensors = {**arrays, "y": y}
    pointers = {name: memory.add(array) for name, array in tensors.items() if name != "x"}
    source = TEMPLATE.kernel(w, dataclasses.replace(H200, sms=sms), Config(config))
    workspaces = {name: np.full(nbytes, 0x55, np.uint8) for name, nbytes in source.workspaces.items()}
    pointers |= {name: memory.add(array) for name, array in workspaces.items()}
    views = {
        param.buffer: np.lib.stride_tricks.as_strided(
            tensors[param.buffer], param.dims[::-1], (*param.strides_bytes[::-1], tensors[param.buffer].itemsize)
        )
        for param in source.steps[-1].params
        if param.kind == "tensor_map"
    }
    for step in source.steps:
        emulator.run(step, pointers, sms, views, integer_model.SCALARS)
    np.testing.assert_array_equal(y, integer_model.expected(w, arrays))


# --- Supported, and compiled ----------------------------------------------------------------------------------------------
LAYER: dict[str, Any] = {"n": 32, "h": 28, "w": 28, "c": 128, "k": 128, "r": 3, "s": 3, "padding": 1}
INT8: dict[str, Any] = {**LAYER, "dtype": "int8"}
FLOAT: dict[str, Any] = {**LAYER, "dtype": "float32", "precision": "tf32"}
SMALLER = {"n": 2, "h": 14, "w": 14}
COMPILED: dict[str, tuple[dict[str, Any], int]] = {
    "int8, 64 channels": ({**INT8, "h": 56, "w": 56, "c": 64, "k": 64, "epilogue": ["bias", "relu", "requantise"]}, IGMMA),
    "uint8, residual of 32 bits": (
        {**INT8, **SMALLER, "dtype": "uint8", "epilogue": ["bias", "residual", "clip", {"requantise": {"to": "uint8"}}]},
        IGMMA,
    ),
    "a quantised residual": (
        {**INT8, **SMALLER, "epilogue": ["bias", {"requantise_add": {"to": "uint8", "residual": "uint8", "relu": True}}]},
        IGMMA,
    ),
    "a batch norm in half precision, strided": (
        {**INT8, **SMALLER, "stride": 2, "epilogue": ["bias", {"dequantise": {"to": "float16"}}, "scale_shift", "residual"]},
        IGMMA,
    ),
    "zero point, merged groups, quantised again": (
        {**INT8, **SMALLER, "groups": 32, "zero_points": ["x"], "epilogue": ["dequantise", "residual", "quantise"]},
        IGMMA,
    ),
    "float8": (
        {**LAYER, **SMALLER, "dtype": "float8_e4m3", "epilogue": [{"dequantise": {"to": "bfloat16"}}, "residual"]},
        QGMMA,
    ),
    "TF32": ({**FLOAT, **SMALLER, "epilogue": ["bias", "residual", "relu"]}, HGMMA),
}


@pytest.mark.long
@pytest.mark.parametrize("case", COMPILED)
def test_kernels_multiply_on_tensor_cores_without_local_memory(case: str) -> None:
    params, opcode = COMPILED[case]
    w = conv2d(**params)
    assert TEMPLATE.validate(w, H200) is None
    config = TEMPLATE.default(w, H200, TEMPLATE.space(w, H200))
    built = compile_source(TEMPLATE.kernel(w, H200, config), H200)
    assert built.resources.local_bytes == built.resources.spill_bytes == 0
    opcodes = {word & 0xFFF for word in instructions(built.artifact.code)}
    assert opcode in opcodes and not opcodes & {LOCAL_LOAD, LOCAL_STORE}
    assert built.resources.shared_bytes == evaluate(w, H200, config).shared_bytes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "int8", "c": 24}, "c is 24; allowed: multiples of 16"),
        ({"dtype": "int8", "k": 24, "epilogue": ["requantise"]}, "k is 24; allowed: multiples of 16"),
        ({"dtype": "int8", "zero_points": ["x", "weight"]}, "weight has a zero point"),
        (
            {"dtype": "int8", "layout": "NCHW32c"},
            "layout and weight_layout are NCHW32c and OIHW32o32i; allowed: NHWC and OHWI",
        ),
        ({"dtype": "int8", "c": 72 * 16, "k": 144, "groups": 16}, "16 groups have 72 input and 9 output channels"),
        (
            {"dtype": "int8", "epilogue": [{"dequantise": {"to": "float16"}}, "residual", "quantise"]},
            "the residual has 16 bits and y is int8",
        ),
        ({"dtype": "float32"}, "float32 with precision fp32; allowed: tf32"),
        ({"dtype": "float8_e4m3", "c": 24}, "c is 24; allowed: multiples of 16"),
    ],
    ids=str,
)
def test_what_it_does_not_take(change: dict[str, Any], reason: str) -> None:
    assert reason in str(TEMPLATE.validate(conv2d(**{**LAYER, **change}), H200))


def test_positions_of_integers_are_multiples_of_16_and_rows_of_staged_bytes_start_at_lines() -> None:
    """wgmma takes no other numbers of columns of integers, and TMA stores from multiples of 128 bytes, 2 positions."""
    for epilogue, unit in (([], 1), (["requantise"], 2)):
        w = conv2d(**{**INT8, "h": 7, "w": 7, "epilogue": epilogue})
        for config in TEMPLATE.space(w, H200).sample(50, np.random.default_rng(0)):
            plan = evaluate(w, H200, config)
            row_unit = unit if plan.split_k == 1 else 8  # see docs/kernels/conv2d_halo.md, "Tiles that a cluster shares"
            assert plan.positions % 16 == 0 and plan.patch_w == -(-(plan.tile_w + 2) // row_unit) * row_unit


def test_a_patch_holds_128_bytes_of_a_pixel() -> None:
    for dtype, chunks in (("int8", 1), ("float8_e5m2", 1), ("float32", 4)):
        w = conv2d(**{**LAYER, "dtype": dtype, "precision": "tf32" if dtype == "float32" else "fp32"})
        config = TEMPLATE.default(w, H200, TEMPLATE.space(w, H200))
        x = next(param for param in TEMPLATE.kernel(w, H200, config).steps[0].params if getattr(param, "buffer", "") == "x")
        assert x.box[0] * chunks == 128  # type: ignore[union-attr]
