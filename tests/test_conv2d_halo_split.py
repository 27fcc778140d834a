"""Tiles of conv2d_halo that a cluster shares: which they are, the kernel emulated thread by thread, compiled, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conv2d_numpy import check_sampled, exactly
from halo_emulation import emulate
from long_cases import each_one_way
from test_conv2d_halo import BASE, H200, SMALL, TEMPLATE, TOGETHER, TWO_CHUNKS
from test_conv2d_wgmma import CLUSTER_ARRIVE, CLUSTER_WAIT, EXIT, instructions

from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.target import PRESETS, Target
from schedsearch.templates.conv2d.halo_sizes import evaluate, split_ks
from schedsearch.workload import Workload

SPLIT = {**TOGETHER, "split_k": 2}
FOUR_CHUNKS = TWO_CHUNKS.replace(c=256)
LATE = BASE.replace(h=7, w=7, c=512, k=512, epilogue=["bias", "residual", "relu"])  # of ResNet-50

EMULATED: dict[str, tuple[Workload, dict[str, Any]]] = {
    "two parts, the last one of 8 channels": (TWO_CHUNKS, SPLIT),
    "four parts, a tile of one row": (
        FOUR_CHUNKS.replace(h=3, w=6), {**SPLIT, "split_k": 4, "tile_h": 1, "patches": 1, "weight_stages": 2}),
    "two chunks of each block, several column tiles and images, rows and channels": (
        FOUR_CHUNKS.replace(n=2, h=5, w=5, k=136),
        {**SPLIT, "tile_h": 3, "tile_w": 5, "channel_groups": 2, "row_groups": 2, "patches": 2}),
    "two chunks of each block, one patch at a time": (
        FOUR_CHUNKS.replace(h=3, w=6), {**SPLIT, "tile_h": 3, "patches": 1, "weight_stages": 2}),
    "one chunk, a row of taps of each block": (SMALL, {**SPLIT, "split_k": 3, "tile_h": 4}),
    "two chunks, of each two parts of the taps, which begin inside of a row": (
        TWO_CHUNKS.replace(r=2, s=5, dilation=(2, 1), padding=2), {**SPLIT, "split_k": 4, "patches": 1, "tile_h": 3}),
    "more blocks than rows": (
        TWO_CHUNKS.replace(h=5, w=5, c=200), {**SPLIT, "split_k": 4, "tile_h": 5, "tile_w": 5}),
    "strided and dilated": (
        TWO_CHUNKS.replace(h=13, w=12, stride=(2, 1), dilation=(1, 2), padding=2), {**SPLIT, "tile_h": 4}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "late"), each_one_way({name: [name] for name in EMULATED}, {"at once": False, "late": True})
)
@pytest.mark.mostly_long(2)
def test_the_emulated_kernel_computes_the_convolution(monkeypatch: pytest.MonkeyPatch, name: str, late: bool) -> None:
    workload, config = EMULATED[name]
    np.testing.assert_array_equal(*emulate(monkeypatch, workload, config, 132, late))


@pytest.mark.parametrize(("epilogue", "out_dtype"), [("residual", "float16"), ("residual", "float32"), ("bias", "float16")])
@pytest.mark.mostly_long(2)
def test_the_emulated_epilogue_sees_the_channels_and_pixels_of_a_block(
    monkeypatch: pytest.MonkeyPatch, epilogue: str, out_dtype: str
) -> None:
    workload, config = EMULATED["two chunks of each block, several column tiles and images, rows and channels"]
    workload = workload.replace(out_dtype=out_dtype, epilogue=[epilogue])
    np.testing.assert_array_equal(*emulate(monkeypatch, workload, config, 132, late=True))


@pytest.mark.parametrize(
    ("workload", "splits"),
    [
        (LATE, (1, 2, 4, 8)),  # eight chunks of 64 channels
        (LATE.replace(c=384), (1, 2, 3, 6)),
        (LATE.replace(c=320), (1, 5)),
        (LATE.replace(c=128), (1, 2, 6)),  # two chunks, each also in three parts of the taps
        (LATE.replace(c=64), (1, 3)),
        (LATE.replace(c=64, r=1, s=7, padding=(0, 3, 0, 3)), (1, 7)),
        (LATE.replace(c=64, r=2, s=5, padding=2), (1, 2, 5)),
        (LATE.replace(dtype="int8", epilogue=[]), (1, 2, 4)),  # four chunks of 128
        (LATE.replace(c=512, groups=8), (1,)),
        (BASE.replace(n=32, h=56, w=56, c=256, k=256), (1,)),  # there are tiles for all multiprocessors
    ],
)
def test_blocks_have_equal_parts_of_the_chunks_or_taps_of_few_tiles(workload: Workload, splits: tuple[int, ...]) -> None:
    assert split_ks(workload, H200) == splits == TEMPLATE.space(workload, H200).values["split_k"]


def test_records_without_the_knob_and_defaults_share_no_tiles() -> None:
    """No card has measured what a split tile is predicted to take."""
    space = TEMPLATE.space(LATE, H200)
    default = TEMPLATE.default(LATE, H200, space)
    assert default["split_k"] == 1
    earlier = Config({name: value for name, value in default.items() if name != "split_k"})
    assert TEMPLATE.current(earlier) == default and space.check(default) == []


@pytest.mark.parametrize("kind", [name for name, target in PRESETS.items() if target.compute_capability == (9, 0)])
def test_every_split_configuration_gives_each_block_something_to_do(kind: str) -> None:
    target = PRESETS[kind]
    space = TEMPLATE.space(LATE, target).restrict({"split_k": [2, 4, 8]})
    for config in space.sample(60, np.random.default_rng(0)):
        plan = evaluate(LATE, target, config)
        assert plan.weight_stages > 0 and plan.turns == 1 and plan.own_chunks * config["split_k"] == 8
        assert plan.own_taps == 9
        assert plan.patches <= plan.own_chunks and plan.patch_w % 8 == 0
        assert plan.own_rows * config["split_k"] >= plan.tile_h and plan.own_positions == plan.own_rows * plan.patch_w
        assert plan.tiles * config["split_k"] < 2 * target.sms * config["blocks_per_sm"]
        ring = plan.patches * plan.patch_bytes + plan.stages * plan.bn * 128
        assert plan.shared.offset("y") >= max(ring, plan.sums_bytes), "sums overwrite patches and weights only"
        step = TEMPLATE.kernel(LATE, target, config).steps[0]
        assert step.grid.blocks(target.sms, step.cluster) == plan.tiles * step.cluster == plan.tiles * config["split_k"]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_split_tiles_compile_without_spills_and_all_threads_meet_at_the_barrier_of_the_cluster(dtype: str) -> None:
    workload = LATE if dtype == "float16" else LATE.replace(dtype="int8", epilogue=["bias", "relu", "requantise"])
    space = TEMPLATE.space(workload, H200).restrict({"split_k": [2, 4]})
    for config in space.sample(2, np.random.default_rng(1)):
        built = compile_source(TEMPLATE.kernel(workload, H200, config), H200)  # refuses spills and serialised wgmma
        assert built.resources.shared_bytes == evaluate(workload, H200, config).shared_bytes
        opcodes = [instruction & 0xFFF for instruction in instructions(built.artifact.code)]
        assert opcodes.count(CLUSTER_ARRIVE) == opcodes.count(CLUSTER_WAIT) == 1
        assert EXIT not in opcodes[: opcodes.index(CLUSTER_WAIT)], "no thread leaves before the barrier"


SHARED_TILES = {
    "7x7x512": dict(h=7, w=7, c=512, k=512, epilogue=["bias", "residual", "relu"]),
    "14x14x256, 3 images": dict(n=3, h=14, w=14, c=256, k=200, out_dtype="float32"),
    "9x11x200, strided": dict(h=18, w=21, c=200, k=72, stride=2, dtype="bfloat16"),
    "13x17x512 in int8": dict(h=13, w=17, c=512, k=144, dtype="int8", epilogue=["bias", "relu", "requantise"]),
    "8x8x320, 5x5": dict(h=8, w=8, c=320, k=64, r=5, s=5, padding=2),
    "28x28x64, rows of taps": dict(h=28, w=28, c=64, k=64, epilogue=["bias", "relu"]),
    "14x14x256 in uint8, rows of taps": dict(
        h=14, w=14, c=256, k=256, dtype="uint8", weight_dtype="int8", out_dtype="int32"
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHARED_TILES)
def test_tiles_that_a_cluster_shares_are_exact(hopper: Target, shape: str, some_of: Callable[..., Any]) -> None:
    workload = Workload.conv2d(**{**dict(n=1, r=3, s=3, padding=1), **SHARED_TILES[shape]})
    for split_k in some_of(split_ks(workload, hopper)[1:], list(SHARED_TILES).index(shape)):
        space = TEMPLATE.space(workload, hopper).restrict({"split_k": [split_k]})
        check_sampled(exactly(TEMPLATE, workload, hopper), space, np.random.default_rng(split_k))
