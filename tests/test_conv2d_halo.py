"""The convolution that loads pixels once per tile: the supported workloads, its kernel emulated thread by thread, every
schedule compiles well, and results on a GPU are exact."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conv2d_numpy import FLOAT_STAGES, KINDS, check_sampled, check_schedules, exactly
from conv2d_support import covering
from halo_emulation import emulate
from hopper_emulator import HopperEmulator
from long_cases import each_one_way

from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.launch import Pointer, TensorMap
from schedsearch.target import PRESETS, Target
from schedsearch.templates.conv2d.halo import Conv2dHalo
from schedsearch.templates.conv2d.halo_sizes import Geometry, evaluate, even_splits, mergeable
from schedsearch.workload import Workload

H200 = PRESETS["h200"]
TEMPLATE = Conv2dHalo()
RANDOM_SHAPES, SHARDS = 16, 4

TOGETHER = {
    "tile_h": 2, "tile_w": 6, "channel_groups": 1, "row_groups": 1, "schedule": "together", "patches": 2, "weight_stages": 3,
    "blocks_per_sm": 1, "split_k": 1,
}  # fmt: skip
IN_TURN = {**TOGETHER, "row_groups": 2, "schedule": "in_turn", "weight_stages": 0}
SMALL = Workload.conv2d(n=2, h=7, w=11, c=24, k=24, r=3, s=3, padding=1)
TWO_CHUNKS = SMALL.replace(n=1, c=72)
GROUPS = SMALL.replace(h=5, w=6, c=48, k=48, groups=12)  # of 4 channels
MERGED = {**TOGETHER, "weight_stages": 0, "merged": 12}
MERGED_IN_TURN = {**IN_TURN, "merged": 12}


def random_workload(rng: np.random.Generator) -> Workload:
    """A small convolution of any kind that the template supports."""
    strides, grouped = int(rng.choice([2, 5])), bool(rng.integers(2))
    while True:
        r, s = (int(v) for v in rng.integers(1, 8, 2))
        h, w = (int(v) for v in rng.integers(1, 70, 2))
        stride = [int(v) for v in np.minimum(rng.integers(1, strides, 2), rng.integers(1, strides, 2))]
        groups = int(rng.integers(2, 41)) if grouped else 1
        most = max(2, 192 // groups)  # channels of a group
        inputs, outputs = (int(rng.integers(1, most)) if groups > 1 else 8 * int(rng.integers(1, 33)) for _ in range(2))
        dilation = [int(v) for v in np.minimum(rng.integers(1, 5, 2), rng.integers(1, 5, 2))]
        padding = [int(v) for v in rng.integers(0, 8, 4)]
        if (r - 1) * dilation[0] >= h + padding[0] + padding[2] or (s - 1) * dilation[1] >= w + padding[1] + padding[3]:
            continue
        stages = list(FLOAT_STAGES)
        workload = Workload.conv2d(
            n=int(rng.integers(1, 9)), h=h, w=w, c=groups * inputs, k=groups * outputs, r=r, s=s, groups=groups,
            stride=stride, padding=padding, dilation=dilation,
            dtype=["float16", "bfloat16"][rng.integers(2)],
            out_dtype=["float16", "bfloat16", "float32"][rng.integers(3)],
            epilogue=[stages[i] for i in rng.permutation(len(stages))[: rng.integers(0, 4)]],
        )  # fmt: skip
        if TEMPLATE.validate(workload, H200) is None:
            return workload


# --- Emulated: index maps are right, and no barrier is missing, early or waited for in vain -----------------------------


EMULATED: dict[str, tuple[Workload, dict[str, Any], int]] = {
    "one warpgroup, ring of weights": (SMALL, TOGETHER, 2),
    "one patch at a time": (TWO_CHUNKS, {**TOGETHER, "patches": 1, "weight_stages": 2}, 1),
    "rows side by side, weights stay": (TWO_CHUNKS, {**TOGETHER, "row_groups": 2, "weight_stages": 0}, 1),
    "channels and rows": (SMALL.replace(k=72, n=1), {**TOGETHER, "channel_groups": 2, "row_groups": 2, "patches": 1}, 1),
    "several column tiles": (SMALL.replace(k=136, n=1), {**TOGETHER, "channel_groups": 2, "tile_h": 7, "tile_w": 11}, 2),
    "in turn": (SMALL, IN_TURN, 2),
    "in turn, late release": (SMALL, {**IN_TURN, "patches": 3}, 1),
    "in turn, two chunks": (TWO_CHUNKS, IN_TURN, 1),
    "in turn, two chunks, fewer patches than chunks of groups": (TWO_CHUNKS, {**IN_TURN, "patches": 3}, 1),
    "in turn, two chunks, late release": (TWO_CHUNKS, {**IN_TURN, "patches": 4, "tile_h": 3}, 1),
    "three in turn": (SMALL, {**IN_TURN, "row_groups": 3, "patches": 4, "tile_w": 4}, 1),
    "dilated, one-sided padding": (
        SMALL.replace(dilation=(2, 3), padding=(3, 0, 1, 5), h=9), {**TOGETHER, "tile_h": 4, "tile_w": 5}, 1),
    "one row of taps": (SMALL.replace(r=1, padding=(0, 1, 0, 1)), {**IN_TURN, "tile_w": 11}, 1),
    "one column of taps": (SMALL.replace(s=1, padding=(1, 0, 1, 0)), {**TOGETHER, "tile_h": 4}, 1),
    "merged groups": (GROUPS, MERGED, 2),
    "merged groups, fewer than might be": (GROUPS, {**MERGED, "merged": 4}, 3),
    "merged groups in turn, half a row of weights": (
        GROUPS.replace(k=24), {**MERGED_IN_TURN, "patches": 3, "tile_w": 3}, 1),
    "merged groups of single channels, two columns": (
        SMALL.replace(n=1, h=5, w=6, c=96, k=96, groups=96, s=1, padding=(1, 0, 1, 0)),
        {**MERGED_IN_TURN, "tile_h": 3, "merged": 48}, 4),
    "merged groups of 3 and 2 channels": (
        SMALL.replace(n=1, h=5, w=6, c=72, k=48, groups=24, r=1, padding=(0, 1, 0, 1)),
        {**MERGED, "row_groups": 2, "merged": 8}, 3),
    "groups as they are, ring of weights": (SMALL.replace(n=1, h=5, c=80, k=144, groups=2), TOGETHER, 2),
    "groups of two column tiles, weights stay": (
        SMALL.replace(n=1, h=5, c=80, k=160, groups=2, s=1, padding=(1, 0, 1, 0)), {**IN_TURN, "patches": 4}, 9),
    "groups of 40 channels, 1x1": (
        SMALL.replace(c=120, k=120, groups=3, r=1, s=1, padding=0), {**TOGETHER, "weight_stages": 0}, 2),
    "columns of output channels, weights stay, uneven": (
        SMALL.replace(k=136, n=1), {**IN_TURN, "tile_h": 4, "tile_w": 4}, 8),
    "strided": (SMALL.replace(stride=2), {**TOGETHER, "tile_w": 3}, 2),
    "strided more one way, dilated, in turn": (
        SMALL.replace(h=12, w=13, stride=(2, 3), dilation=(3, 2), padding=(2, 1, 3, 0)), {**IN_TURN, "tile_w": 4}, 1),
    "strided, an even dilation, two chunks, rows": (
        TWO_CHUNKS.replace(h=13, stride=(4, 2), dilation=2, padding=2), {**TOGETHER, "row_groups": 2, "tile_w": 3}, 1),
    "merged groups, strided, 1x1": (
        GROUPS.replace(stride=2, r=1, s=1, padding=0), {**MERGED, "tile_w": 3}, 1),
    "merged groups, strided, in turn": (
        GROUPS.replace(h=9, w=8, stride=2, out_dtype="float32"), {**MERGED_IN_TURN, "tile_w": 4}, 1),
    "tiles larger than the image": (SMALL.replace(h=3, w=3, n=3), {**TOGETHER, "tile_h": 5, "tile_w": 6}, 1),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "late"), each_one_way({name: [name] for name in EMULATED}, {"at once": False, "late": True})
)
@pytest.mark.mostly_long(4)
def test_the_emulated_kernel_computes_the_convolution(monkeypatch: pytest.MonkeyPatch, name: str, late: bool) -> None:
    workload, config, sms = EMULATED[name]
    y, reference = emulate(monkeypatch, workload, config, sms, late)
    np.testing.assert_array_equal(y, reference)


FUSED = ["one warpgroup, ring of weights", "channels and rows", "in turn, two chunks", "in turn, two chunks, late release",
         "merged groups in turn, half a row of weights", "groups of two column tiles, weights stay", "strided",
         "tiles larger than the image"]  # fmt: skip


@pytest.mark.parametrize("out_dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("name", "epilogue"), [*((name, "residual") for name in FUSED), *((name, "bias") for name in FUSED[::3])]
)
@pytest.mark.mostly_long(5)
def test_the_emulated_epilogue_sees_its_channels_and_pixels(
    monkeypatch: pytest.MonkeyPatch, name: str, epilogue: str, out_dtype: str
) -> None:
    workload, config, sms = EMULATED[name]
    y, reference = emulate(monkeypatch, workload.replace(out_dtype=out_dtype, epilogue=[epilogue]), config, sms, late=True)
    np.testing.assert_array_equal(y, reference)


@pytest.mark.parametrize("operation", ["mbarrier_wait", "bulk_wait_read_all", "wgmma_wait", "cp_async_wait"])
@pytest.mark.mostly_long(2)
def test_the_emulator_notices_a_missing_wait(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    def no_wait(self: HopperEmulator, *_: Any) -> Any:
        return (lambda *_: None) if operation in ("wgmma_wait", "cp_async_wait") else None

    monkeypatch.setattr(HopperEmulator, operation, no_wait)
    workload, config, sms = EMULATED["merged groups in turn, half a row of weights"]
    try:
        y, reference = emulate(monkeypatch, workload, config, sms, late=True)
    except AssertionError:
        return
    assert not np.array_equal(y, reference)


# --- Supported workloads, and the space -------------------------------------------------------------------------------

BASE = Workload.conv2d(n=1, h=28, w=28, c=64, k=64, r=3, s=3, padding=1)


@pytest.mark.parametrize(
    ("workload", "target", "words"),
    [
        (BASE, PRESETS["a100"], ["9.0", "8.0"]),
        (BASE, PRESETS["b200"], ["9.0", "10.0"]),
        (BASE.replace(dtype="float32", out_dtype="float32"), H200, ["float32", "allowed: tf32"]),
        (BASE.replace(layout="NCHW", weight_layout="OIHW"), H200, ["NCHW", "NHWC"]),
        (BASE.replace(weight_layout="OIHW"), H200, ["OIHW", "OHWI"]),
        (BASE.replace(r=1, s=1, padding=0), H200, ["1x1", "groups"]),
        (BASE.replace(stride=(1, 9)), H200, ["stride", "(1, 9)", "1 to 8"]),
        (BASE.replace(c=72, k=144, groups=8), H200, ["8 groups have 9 input and 18 output channels", "multiples of 8"]),
        (BASE.replace(groups=16, r=7, s=7, padding=3), H200, ["4 input", "49 taps", "25 taps"]),
        (BASE.replace(c=12), H200, ["c is 12", "8"]),
        (BASE.replace(k=4), H200, ["k is 4", "8"]),
        (BASE.replace(padding=128, dilation=128), H200, ["256 x 256"]),
        (BASE.replace(padding=30, dilation=30), H200, ["60 x 60", "shared memory"]),
        (BASE.replace(n=2**31 // 784, c=8, k=8), H200, ["pixels", "2**31"]),
        (BASE.replace(k=2**30), H200, ["k is 1073741824", "2**30"]),
        (BASE.replace(n=1, w=2**30 - 2, stride=8, c=8, k=8), H200, ["padded w is 1073741824", "2**30"]),
    ],
)
def test_an_unsupported_workload_is_refused_with_a_reason(workload: Workload, target: Target, words: list[str]) -> None:
    reason = TEMPLATE.validate(workload, target)
    assert reason is not None and all(word in reason for word in words), reason


@pytest.mark.parametrize(
    "workload",
    [
        BASE.replace(padding=100),
        BASE.replace(padding=16, dilation=16),
        BASE.replace(r=1, s=7, padding=0),
        BASE.replace(h=1, w=1, n=64),
        BASE.replace(h=3, w=100_000),
        BASE.replace(c=4096, k=4096),
        BASE.replace(stride=2),
        BASE.replace(stride=(8, 3), padding=20),
        BASE.replace(groups=64),
        BASE.replace(groups=16, r=5, s=5, padding=2),
        BASE.replace(c=2048, k=2048, groups=32, stride=2),
        BASE.replace(c=1392, k=1392, groups=6),
        BASE.replace(c=16384, k=16384, groups=2048),
        BASE.replace(c=240, k=480, groups=3, r=1, s=1, padding=0),
    ],
)
def test_a_supported_workload_has_a_legal_default(workload: Workload) -> None:
    assert TEMPLATE.validate(workload, H200) is None
    assert TEMPLATE.space(workload, H200).check(TEMPLATE.default(workload, H200, TEMPLATE.space(workload, H200))) == []


@pytest.mark.parametrize(
    ("shape", "merged"),
    [
        (dict(c=128, k=128, groups=32), (2, 4, 8, 16)),  # ResNeXt-50 32x4d's stages
        (dict(c=256, k=256, groups=32), (1, 2, 4, 8)),
        (dict(c=512, k=512, groups=32), (1, 2, 4)),
        (dict(c=1024, k=1024, groups=32), (1, 2)),
        (dict(c=2048, k=2048, groups=32), (1,)),  # groups of 64
        (dict(c=240, k=240, groups=10), (1, 2)),  # of 24, of which 2 fit
        (dict(c=168, k=168, groups=7), (1,)),  # of 24, and 2 do not divide 7
        (dict(c=144, k=144, groups=144), (8, 16, 24, 48)),
        (dict(c=128, k=512, groups=32), (2, 4)),  # of 4 and 16
        (dict(c=256, k=64, groups=16), (2, 4)),  # of 16 and 4
        (dict(c=120, k=120, groups=1), (1,)),
        (dict(c=384, k=384, groups=32, r=7, s=7, padding=3), ()),  # of 12 channels
        (dict(c=512, k=512, groups=32, r=7, s=7, padding=3), (1,)),  # of 16
    ],
)
def test_groups_are_merged_by_octets_up_to_a_wgmma(shape: dict[str, int], merged: tuple[int, ...]) -> None:
    workload = BASE.replace(**shape)
    assert mergeable(workload) == merged
    if len(merged) > 1:
        sampled = TEMPLATE.space(workload, H200).sample(300, np.random.default_rng(0))
        assert {config["merged"] for config in sampled} == set(merged)


def test_only_a_workload_with_a_choice_has_the_knob() -> None:
    assert "merged" not in TEMPLATE.space(BASE, H200).names
    assert "merged" not in TEMPLATE.space(BASE.replace(c=2048, k=2048, groups=32), H200).names


@pytest.mark.parametrize(("stride", "dilation", "phases"), [(1, 1, 1), (2, 1, 4), (2, 2, 1), (2, 3, 4), (3, 1, 9), (4, 1, 9),
                                                            (4, 2, 4), ((2, 1), 1, 2)])  # fmt: skip
def test_a_phase_that_no_tap_reads_is_not_loaded(stride: Any, dilation: int, phases: int) -> None:
    """For 3x3 taps: remainders of row and column, times the dilation, modulo the stride, counted one by one."""
    workload = BASE.replace(stride=stride, dilation=dilation, padding=dilation)
    counted = {(r * dilation % workload.stride[0], s * dilation % workload.stride[1]) for r in range(3) for s in range(3)}
    assert Geometry.of(workload, merged=1).phases == len(counted) == phases


def test_columns_have_equal_numbers_of_blocks_on_every_card() -> None:
    """432 channels in 9 groups: 14 blocks for each group on any card, although 132 multiprocessors would allow 14.7."""
    workload = BASE.replace(n=32, c=432, k=432, groups=9)
    for config in TEMPLATE.space(workload, H200).restrict({"weight_stages": [0]}).sample(20, np.random.default_rng(0)):
        grid = TEMPLATE.kernel(workload, H200, config).steps[0].grid
        tiles = evaluate(workload, H200, config).pixel_tiles
        each = min(tiles, 132 * config["blocks_per_sm"] // 9)
        assert {grid.blocks(sms) for sms in (78, 132)} == {9 * each}


@pytest.mark.parametrize(("size", "most", "parts"), [(7, 7, [1, 2, 3, 4, 7]), (7, 3, [1, 2, 3]), (1, 9, [1]),
                                                     (300, 100, [75, 100])])  # fmt: skip
def test_a_tile_is_the_smallest_for_its_number_of_tiles(size: int, most: int, parts: list[int]) -> None:
    found = even_splits(size, most)
    assert (found if len(parts) > 2 or size == 1 else found[-2:]) == parts


# --- Compiled ---------------------------------------------------------------------------------------------------------


def check_tensor_map(param: TensorMap) -> None:
    """Limits of cuTensorMapEncodeTiled, from the CUDA driver API's page on tensor map objects."""
    assert 3 <= len(param.dims) <= 5 and all(1 <= dim <= 2**32 for dim in param.dims)
    assert len(param.strides_bytes) == len(param.dims) - 1
    assert all(stride % 16 == 0 and 0 < stride < 2**40 for stride in param.strides_bytes)
    assert len(param.box) == len(param.dims) and all(1 <= edge <= 256 for edge in param.box)
    assert param.box[0] * 2 == param.swizzle_bytes == 128


def random_candidate(number: int) -> tuple[Workload, Config]:
    rng = np.random.default_rng([30, number])
    workload = random_workload(rng)
    return workload, TEMPLATE.space(workload, H200).sample(1, rng)[0]


@functools.cache
def random_candidates() -> list[tuple[Workload, Config]]:
    """A few in which everything occurs that makes other code; sizes of tiles and rings only change numbers in it."""

    def kinds(workload: Workload, config: Config) -> set[Any]:
        return {
            ("weights stay", config["weight_stages"] == 0),
            ("merged", config.get("merged", 1) > 1),
            ("patches", config["patches"] > 1),
            ("strided", max(workload.stride) > 1),
            ("split", config["split_k"] > 1),
        }

    sizes = ("tile_h", "tile_w", "patches", "weight_stages", "merged")
    return covering(map(random_candidate, range(RANDOM_SHAPES)), kinds, but=sizes)


@pytest.mark.long
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_schedules_of_random_shapes_compile_well(shard: int) -> None:
    for workload, config in random_candidates()[shard::SHARDS]:
        assert TEMPLATE.space(workload, H200).check(TEMPLATE.default(workload, H200, TEMPLATE.space(workload, H200))) == []
        source = TEMPLATE.kernel(workload, H200, config)
        for param in source.steps[0].params:
            if isinstance(param, TensorMap):
                check_tensor_map(param)
        built = compile_source(source, H200)  # refuses spills and serialised wgmma
        plan = evaluate(workload, H200, config)
        step = built.artifact.plan.steps[0]
        assert built.resources.shared_bytes == plan.shared_bytes <= H200.shared_bytes_per_block
        assert built.resources.registers * step.block_threads * config["blocks_per_sm"] <= H200.registers_per_sm
        assert built.resources.local_bytes == 0


LAYERS = {
    "28x28x128": BASE.replace(n=32, c=128, k=128),
    "300x300x64": BASE.replace(n=32, h=300, w=300),
    "56x56x256 in 32 groups, strided": BASE.replace(
        n=32, h=56, w=56, c=256, k=256, groups=32, stride=2, out_dtype="float32"
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("layer", LAYERS)
def test_an_epilogue_keeps_accumulators_in_registers(layer: str) -> None:
    """All stages in the default configuration: no local memory, and only a few more registers than without them."""
    workload = LAYERS[layer].replace(epilogue=FLOAT_STAGES)
    config = TEMPLATE.default(workload, H200, TEMPLATE.space(workload, H200))
    fused = compile_source(TEMPLATE.kernel(workload, H200, config), H200).resources
    assert fused.local_bytes == fused.spill_bytes == 0
    if layer == "28x28x128":
        plain = compile_source(TEMPLATE.kernel(workload.replace(epilogue=()), H200, config), H200).resources
        assert fused.registers <= plain.registers + 24


def test_a_residual_of_16_bits_is_loaded_like_y_is_stored() -> None:
    for out_dtype, alignment in (("float16", 16), ("float32", 8)):
        workload = BASE.replace(epilogue=["residual"], out_dtype=out_dtype)
        source = TEMPLATE.kernel(workload, H200, TEMPLATE.default(workload, H200, TEMPLATE.space(workload, H200)))
        residual = next(p for p in source.steps[0].params if getattr(p, "buffer", "") == "residual")
        assert source.alignments["residual"] == alignment
        if out_dtype == "float16":
            y = next(p for p in source.steps[0].params if getattr(p, "buffer", "") == "y")
            assert dataclasses.replace(residual, buffer="y") == y
        else:
            assert residual == Pointer("residual")


# --- On a GPU: exact results of small integers ------------------------------------------------------------------------


GROUPED = {
    "groups of 4": dict(c=128, k=128, groups=32),
    "groups of 4, strided": dict(c=256, k=256, groups=64, stride=2, epilogue=["bias", "relu"]),
    "groups of 8 and 16": dict(c=128, k=256, groups=16, epilogue=["bias", "residual"]),
    "groups of 32, dilated": dict(c=256, k=256, groups=8, dilation=2, padding=2, dtype="bfloat16"),
    "groups of 64, strided": dict(c=512, k=512, groups=8, stride=2),
    "groups of 24, not merged": dict(c=168, k=168, groups=7, out_dtype="float32"),
    "groups of 112": dict(c=336, k=336, groups=3, stride=(1, 2)),
    "groups of 232": dict(c=464, k=464, groups=2),
    "single channels": dict(c=144, k=144, groups=144),
    "single channels, 5x5, strided": dict(c=96, k=96, groups=96, r=5, s=5, padding=2, stride=2),
    "groups of 80, 1x1": dict(c=240, k=240, groups=3, r=1, s=1, padding=0),
    "groups of 3 and 2, 1x1": dict(c=72, k=48, groups=24, r=1, s=1, padding=0, epilogue=["residual", "relu"]),
    "one group, strided": dict(c=72, k=136, stride=2, epilogue=["scale_shift"]),
    "one group, strided by 3, 7x7": dict(c=64, k=64, r=7, s=7, padding=3, stride=3),
    "one group, weights of several columns stay": dict(c=40, k=200),
}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GROUPED)
def test_groups_and_strides_are_exact(hopper: Target, some_of: Callable[..., Any], shape: str) -> None:
    """Of few tiles and of many."""
    number = list(GROUPED).index(shape)
    for n, h, w in some_of([(2, 9, 13), (24, 29, 28)], number // 2):
        workload = Workload.conv2d(**{**dict(n=n, h=h, w=w, r=3, s=3, padding=1), **GROUPED[shape]})
        check, kinds = exactly(TEMPLATE, workload, hopper), some_of(KINDS, number)
        check_schedules(check, TEMPLATE, workload, hopper, np.random.default_rng(33), kinds)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["together", "in_turn"])
def test_many_tiles_a_block_are_exact(hopper: Target, schedule: str) -> None:
    workload = Workload.conv2d(n=8, h=150, w=150, c=64, k=64, r=3, s=3, padding=1, epilogue=["bias", "relu"])
    space = TEMPLATE.space(workload, hopper).restrict({"schedule": [schedule]})
    check_sampled(exactly(TEMPLATE, workload, hopper), space, np.random.default_rng(0))
