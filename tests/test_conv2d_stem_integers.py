"""conv2d_stem of int8 and uint8: its kernel emulated thread by thread, compiled, and exact on a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import integer_model
import numpy as np
import pytest
from conv2d_support import covering
from ptx_emulator import PtxEmulator
from test_conv2d_stem import CONFIG, MODULES, StemEmulator
from test_conv2d_wgmma import LOCAL_LOAD, LOCAL_STORE, instructions

import schedsearch.templates.conv2d.stem as module
from schedsearch.backend import compile_source
from schedsearch.backend.cuda import _compile_to_ptx
from schedsearch.config import Config
from schedsearch.constructors.convolutions import conv2d
from schedsearch.target import PRESETS
from schedsearch.templates.conv2d.stem import Conv2dStem
from schedsearch.templates.conv2d.stem_sizes import Runs, Staging, evaluate, usable_tiles
from schedsearch.templates.parts import epilogue, epilogue_fragments
from schedsearch.testing.emulator import Memory
from schedsearch.workload import Workload

Array = np.ndarray[Any, Any]
H200 = PRESETS["h200"]
TEMPLATE = Conv2dStem()
RANDOM_SHAPES, SHARDS = 12, 2
IGMMA_FROM_REGISTERS = 0xDF1  # the low 12 bits of an instruction of sm_90, as nvdisasm names it
INT8 = ("bias", "relu", "requantise")
UINT8 = ("bias", "relu", {"requantise": {"to": "uint8"}})
SUM_OF_TWO = ("bias", {"requantise_add": {"to": "uint8", "middle": "int8", "residual": "uint8", "relu": True}})

RGB_7X7: dict[str, Any] = {
    "n": 1, "h": 224, "w": 224, "c": 3, "k": 64, "r": 7, "s": 7, "stride": 2, "padding": 3, "dtype": "int8"
}  # fmt: skip
RGB_3X3: dict[str, Any] = {**RGB_7X7, "r": 3, "s": 3, "stride": 1, "padding": 1}
SMALL: dict[str, Any] = {**RGB_3X3, "h": 6, "w": 16, "k": 16}
STEM: dict[str, Any] = {**RGB_7X7, "h": 11, "w": 32}


# --- Emulated: index maps, shifts, the order of channels, and the arithmetic of the epilogue ------------------------------
class IntegerEmulator(StemEmulator):
    """With weights of single bytes, and registers that hold integers or floats."""

    def load_run_of_bytes(self, piece: int) -> Callable[..., tuple[int, ...]]:
        def load(address: int, first: int, stop: int, fill: int) -> tuple[int, ...]:
            assert first % piece == stop % piece == 0
            run = np.full(16, fill & 255, np.uint8)
            for at in range(0, 16, piece):
                if first <= at < stop:
                    run[at : at + piece] = self.memory.at(address + at, piece)
            return tuple(int(word) for word in run.view(np.uint32))

        return load

    def pack_pair(self, dtype: str, accumulator: str = "float32") -> Callable[..., int]:
        return super().pack_pair(dtype, "float32")

    def store_global_b32x2(self, address: int, a: Any, b: Any) -> None:
        floats = isinstance(a, np.float32)
        self.memory.at(address, 8).view(np.float32 if floats else np.int32)[:] = a, b


EMULATED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "the stem of a network, int8": (
        {**STEM, "epilogue": INT8}, {**CONFIG, "warpgroups": 2, "register_steps": 4}, 1),
    "uint8 by int8, sums, words shifted by 0 to 24 bits": (
        {**SMALL, "n": 2, "dtype": "uint8", "weight_dtype": "int8"}, {**CONFIG, "tile_w": 16, "patches": 1}, 2),
    "4 channels, runs of whole words, uint8 by uint8 to uint8": (
        {**SMALL, "c": 4, "k": 32, "dtype": "uint8", "epilogue": UINT8}, CONFIG, 1),
    "odd strides, dilated rows, more columns than channels": (
        {**SMALL, "h": 12, "c": 5, "k": 8, "dilation": (3, 1), "stride": (1, 3), "padding": (4, 0, 2, 5)},
        {**CONFIG, "tile_w": 16, "warpgroups": 3}, 1),
    "runs that start in the middle of a word, uint8 by uint8, sums": (
        {**SMALL, "w": 32, "dtype": "uint8", "stride": (1, 4), "padding": (1, 3, 1, 0)}, CONFIG, 2),
    "one channel, a pixel a row of the tile, 16-byte runs": (
        {**SMALL, "h": 3, "w": 80, "c": 1, "s": 16, "padding": (0, 3, 1, 0)}, {**CONFIG, "tile_w": 64}, 2),
    "zero point, every border, a quantised residual": (
        {**SMALL, "k": 32, "dtype": "uint8", "weight_dtype": "int8", "zero_points": ["x"], "padding": (2, 1, 1, 3),
         "stride": 2, "epilogue": SUM_OF_TWO}, CONFIG, 1),
    "zero point, sums, tiles larger than the image": (
        {**SMALL, "n": 3, "h": 3, "c": 4, "weight_dtype": "uint8", "zero_points": ["x"]},
        {**CONFIG, "tile_w": 32, "warpgroups": 2}, 1),
    "two segments of y, int32 residual": (
        {**SMALL, "h": 4, "k": 144, "r": 1, "padding": (0, 1, 0, 1), "epilogue": ["residual", "requantise"]},
        {**CONFIG, "tile_w": 16}, 1),
    "half precision": (
        {**SMALL, "k": 72, "stride": 2, "epilogue": ["bias", {"dequantise": {"to": "float16"}}, "residual"]}, CONFIG, 1),
    "single precision": ({**SMALL, "k": 24, "epilogue": ["dequantise", "relu"]}, {**CONFIG, "tile_w": 16}, 1),
}  # fmt: skip
LATE = ("the stem of a network, int8", "zero point, sums, tiles larger than the image")


@pytest.mark.parametrize(
    ("name", "late"), [*((name, False) for name in EMULATED), *((name, True) for name in LATE)], ids=str
)
@pytest.mark.mostly_long(3)
def test_the_emulated_kernel_is_exact(monkeypatch: pytest.MonkeyPatch, name: str, late: bool) -> None:
    params, config, sms = EMULATED[name]
    w, memory = conv2d(**params), Memory()
    assert TEMPLATE.validate(w, H200) is None and config["tile_w"] in usable_tiles(w, H200)
    emulator = IntegerEmulator(memory, lambda value, *_: value, late)
    emulator.stand_in(monkeypatch, *MODULES)
    for operation in ("load_run_of_bytes", "multiply_patch"):
        monkeypatch.setattr(module, operation, getattr(emulator, operation))
    PtxEmulator(memory).stand_in(monkeypatch, epilogue, epilogue_fragments)
    for cached in ("fragments_operation", "load_ahead_operation"):
        monkeypatch.setattr(epilogue, cached, getattr(epilogue_fragments, cached).__wrapped__)
    monkeypatch.setattr(epilogue, "_operation", epilogue._operation.__wrapped__)
    arrays = integer_model.arguments(w)
    y = np.full(w.output.shape, 0x55, w.output.dtype)
    if w.output.dtype == "float16":
        y[:] = np.nan  # no element is stored twice
    pointers = {name: memory.add(array) for name, array in {**arrays, "y": y}.items() if name != "x"}
    source = TEMPLATE.kernel(w, dataclasses.replace(H200, sms=sms), Config(config))
    pointers |= {name: memory.add(np.full(nbytes, 0x55, np.uint8)) for name, nbytes in source.workspaces.items()}
    views = {"x": arrays["x"].reshape(w.n, w.h, w.w * w.c), "y": y}
    for step in source.steps:
        emulator.run(step, pointers, sms, views, integer_model.SCALARS)
    np.testing.assert_array_equal(y, integer_model.expected(w, arrays))


# --- Sizes, supported workloads, and the space ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("params", "shifted", "skipped", "steps"),
    [
        (RGB_7X7, True, 0, 7),
        (RGB_3X3, True, 0, 2),
        ({**RGB_7X7, "stride": 4}, False, 3, 7),  # runs start 9 values before a multiple of 12
        ({**RGB_3X3, "c": 4, "stride": 2}, False, 0, 2),
        ({**RGB_3X3, "c": 1, "stride": 4}, False, 3, 2),
        ({**RGB_3X3, "c": 1, "dtype": "float16"}, True, 0, 2),
    ],
    ids=str,
)
def test_runs_start_at_words_if_the_step_between_pixels_is_whole_words(
    params: dict[str, Any], shifted: bool, skipped: int, steps: int
) -> None:
    runs = Runs.of(conv2d(**params))
    assert (runs.shifted, runs.skipped, runs.steps) == (shifted, skipped, steps)


def test_a_patch_starts_at_a_multiple_of_16_bytes() -> None:
    """8 pixels of 3 bytes are 24 bytes, 16 pixels are 48."""
    assert usable_tiles(conv2d(**RGB_3X3), H200) == [16, 32, 64]
    assert usable_tiles(conv2d(**RGB_7X7), H200) == [8, 16, 32]
    assert 8 in usable_tiles(conv2d(**{**RGB_3X3, "dtype": "float16"}), H200)


@pytest.mark.parametrize(("k", "row", "segments"), [(16, 32, 1), (48, 64, 1), (64, 64, 1), (96, 128, 1), (144, 128, 2)])
def test_segments_of_bytes_are_as_wide_as_the_channels(k: int, row: int, segments: int) -> None:
    staging = Staging.of(conv2d(**{**RGB_3X3, "k": k, "epilogue": INT8}))
    assert (staging.channels, staging.row_bytes, staging.segments) == (row, row, segments)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"k": 24, "epilogue": INT8}, "k is 24; allowed: multiples of 16"),
        ({"k": 12}, "k is 12; allowed: multiples of 8"),
        ({"k": 144, "epilogue": SUM_OF_TWO}, "k is 144, and the residual has 8 bits; allowed: up to 128"),
        ({"zero_points": ["weight"]}, "weight has a zero point"),
        ({"c": 48}, "s * c is 144; allowed: up to 128"),
        ({"h": 200, "r": 150}, "r * ceil(s * c / 16) is 150; allowed: up to 128"),
        ({"dtype": "float8_e4m3"}, "dtype is float8_e4m3; allowed: float16, bfloat16, int8, uint8"),
        ({"slice_of": 64}, "y is a slice"),
    ],
    ids=str,
)
def test_an_unsupported_workload_is_refused_with_a_reason(change: dict[str, Any], reason: str) -> None:
    assert reason in str(TEMPLATE.validate(conv2d(**{**SMALL, **change}), H200))


@pytest.mark.parametrize(
    "params",
    [
        {**RGB_7X7, "n": 32, "epilogue": INT8},
        {**RGB_3X3, "epilogue": SUM_OF_TWO},
        {**RGB_3X3, "k": 128, "epilogue": SUM_OF_TWO},
        {**SMALL, "epilogue": INT8, "slice_of": 64},
        {**SMALL, "h": 1, "r": 1, "s": 1, "c": 1, "k": 8, "padding": 0},
    ],
    ids=str,
)
def test_a_supported_workload_has_a_legal_default(params: dict[str, Any]) -> None:
    w = conv2d(**params)
    assert TEMPLATE.validate(w, H200) is None
    space = TEMPLATE.space(w, H200)
    assert space.check(TEMPLATE.default(w, H200, space)) == []


# --- Compiled -----------------------------------------------------------------------------------------------------------
def random_workload(rng: np.random.Generator) -> Workload:
    """A small convolution of integers of any kind that the template supports."""

    def pick(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    while True:
        r, s = (int(v) for v in rng.integers(1, 8, 2))
        h, w = int(rng.integers(1, 40)), int(rng.integers(1, 65))
        w = w if rng.integers(4) == 0 else -(-w // 16) * 16  # rows of x are mostly multiples of 16 bytes
        padding, dilation = [int(v) for v in rng.integers(0, 8, 4)], int(rng.integers(1, 4))
        if (r - 1) * dilation >= h + padding[0] + padding[2] or s - 1 >= w + padding[1] + padding[3]:
            continue
        formats = {"to": pick("int8", "uint8"), "middle": pick("int8", "uint8"), "residual": pick("int8", "uint8")}
        ends: Any = pick(
            [],
            [{"requantise": {"to": pick("int8", "uint8")}}],
            [{"dequantise": {"to": pick("float16", "float32")}}],
            [{"requantise_add": {**formats, "relu": True}}],
        )
        before = ("bias", "relu", "clip") if "requantise_add" in str(ends) else ("bias", "residual", "relu", "clip")
        workload = conv2d(
            n=int(rng.integers(1, 6)), h=h, w=w, c=int(rng.integers(1, 17)), k=8 * int(rng.integers(1, 17)), r=r, s=s,
            stride=[int(v) for v in np.minimum(rng.integers(1, 6, 2), rng.integers(1, 6, 2))],
            padding=padding, dilation=(dilation, 1), dtype=pick("int8", "uint8"), weight_dtype=pick("int8", "uint8"),
            zero_points=pick([], ["x"]), epilogue=[*(stage for stage in before if rng.random() < 0.4), *ends],
        )  # fmt: skip
        if TEMPLATE.validate(workload, H200) is None:
            return workload


def random_candidate(number: int) -> tuple[Workload, Config]:
    rng = np.random.default_rng([52, number])
    workload = random_workload(rng)
    return workload, TEMPLATE.space(workload, H200).sample(1, rng)[0]


@pytest.mark.long
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_schedules_of_random_shapes_compile_well(shard: int) -> None:
    for workload, config in covering(map(random_candidate, range(RANDOM_SHAPES)))[shard::SHARDS]:
        built = compile_source(TEMPLATE.kernel(workload, H200, config), H200)  # refuses spills and serialised wgmma
        assert built.resources.local_bytes == 0
        assert built.resources.shared_bytes == evaluate(workload, H200, config).shared_bytes


COMPILED: dict[str, dict[str, Any]] = {
    "the stem of a network": {**RGB_7X7, "n": 32, "epilogue": INT8},
    "a quantised residual": {**RGB_7X7, "n": 32, "epilogue": SUM_OF_TWO},
    "zero point": {**RGB_7X7, "n": 32, "dtype": "uint8", "weight_dtype": "int8", "zero_points": ["x"], "epilogue": INT8},
    "zero point, a quantised residual, many channels": {
        **RGB_7X7,
        "n": 32,
        "k": 128,
        "dtype": "uint8",
        "weight_dtype": "int8",
        "zero_points": ["x"],
        "epilogue": SUM_OF_TWO,
    },
    "3x3": {**RGB_3X3, "epilogue": INT8},
    "half precision": {**RGB_3X3, "epilogue": ["bias", {"dequantise": {"to": "float16"}}, "residual", "leaky_relu"]},
}


@pytest.mark.long
@pytest.mark.parametrize("case", COMPILED)
def test_defaults_multiply_on_tensor_cores_without_local_memory(case: str) -> None:
    w = conv2d(**COMPILED[case])
    built = compile_source(TEMPLATE.kernel(w, H200, TEMPLATE.default(w, H200, TEMPLATE.space(w, H200))), H200)
    assert built.resources.local_bytes == built.resources.spill_bytes == 0
    opcodes = {word & 0xFFF for word in instructions(built.artifact.code)}
    assert IGMMA_FROM_REGISTERS in opcodes and not opcodes & {LOCAL_LOAD, LOCAL_STORE}


@pytest.mark.parametrize(
    ("params", "loads", "steps"),
    [(RGB_7X7, 2 * 2 * 2 * 7, 7), ({**RGB_7X7, "c": 4, "s": 5}, 2 * 2 * 7, 7), (RGB_3X3, 2 * 2 * 3, 2)],
    ids=["7x7, shifted", "7x5, 4 channels", "3x3, shifted"],
)
@pytest.mark.mostly_long(3)
def test_an_operand_is_one_load_from_shared_memory_or_two(params: dict[str, Any], loads: int, steps: int) -> None:
    w = conv2d(**params)
    source = TEMPLATE.kernel(w, H200, TEMPLATE.default(w, H200, TEMPLATE.space(w, H200)))
    text = _compile_to_ptx(source.steps[-1], "kernel", "sm_90a")
    assert text.count("ld.shared.b32") == loads
    assert text.count("k32.s32.s8.s8") == steps
