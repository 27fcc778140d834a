"""conv2d_wgmma's own source runs thread by thread without a GPU: index maps, pipeline, and sharing within a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cluster_emulator import MAPPED, ClusterEmulator
from conv2d_numpy import convolve, depth_to_space, integers, to_bits
from long_cases import each_one_way

import schedsearch.templates.conv2d.weight_rows as weight_rows
import schedsearch.templates.conv2d.wgmma as module
import schedsearch.templates.conv2d.wgmma_loads as loads
from schedsearch.config import Config
from schedsearch.launch import Scalar
from schedsearch.ops.layout import Layout
from schedsearch.target import PRESETS
from schedsearch.templates.conv2d import wgmma_store
from schedsearch.templates.conv2d.geometry import Blocks, Im2col
from schedsearch.templates.conv2d.wgmma_sizes import ROW_STORES
from schedsearch.templates.parts import (
    addressing,
    epilogue_fragments,
    gather,
    pipeline,
    sharing,
    store,
    store_chunks,
    store_rows,
    store_words,
    walk,
    wgmma,
    zero_points,
)
from schedsearch.testing.emulator import Memory
from schedsearch.workload import Workload

H200 = PRESETS["h200"]
TEMPLATE = module.Conv2dWgmma()
SMALL = dict(
    warpgroups=1, bn=32, bk=64, stages=3, split_k=1, cluster_m=1, cluster_n=1, persistent=False, blocks_per_sm=1,
    schedule="together", band=1, l2_promotion=256,
)  # fmt: skip
SHAPE = dict(n=1, h=7, w=7, c=64, k=64, r=3, s=3, padding=1)
ROWS = dict(n=3, h=7, w=7, c=128, k=64, r=1, s=1)  # tiles: one for each image, and a bit more
TAILS = dict(n=3, h=9, w=7, c=40, k=56, r=3, s=3, padding=1)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one block per tile": (SHAPE, SMALL),
    "two groups, one of which has no rows": ({**TAILS, "n": 1, "h": 10, "c": 24}, {**SMALL, "warpgroups": 2, "bk": 32}),
    "more tiles than blocks": ({**SHAPE, "n": 4, "h": 8, "w": 10}, {**SMALL, "persistent": True}),
    "uneven groups of row tiles": ({**SHAPE, "n": 5, "r": 1, "s": 1, "padding": 0}, {**SMALL, "band": 4}),
    "stride, dilation, bk 16": (
        {**TAILS, "n": 1, "h": 15, "w": 12, "stride": 2, "dilation": (2, 1), "padding": (2, 0, 1, 1)},
        {**SMALL, "bn": 16, "bk": 16, "stages": 4},
    ),
    "float32 out": ({**TAILS, "out_dtype": "float32"}, {**SMALL, "bk": 64, "bn": 48, "persistent": True}),
    "split by 2": (SHAPE, {**SMALL, "split_k": 2}),
    "split by 4, uneven steps and columns": ({**TAILS, "n": 1}, {**SMALL, "split_k": 4, "bk": 32, "bn": 48, "stages": 2}),
    "split by 8, more blocks than columns": ({**SHAPE, "c": 128, "k": 16}, {**SMALL, "split_k": 8, "bn": 16, "stages": 2}),
    "split, two groups, float32 out": (
        {**TAILS, "out_dtype": "float32"},
        {**SMALL, "split_k": 2, "warpgroups": 2, "band": 2},
    ),
    "two rows share weights, fewer steps than stages": ({**ROWS, "n": 2, "k": 24}, {**SMALL, "cluster_m": 2}),
    "two columns share pixels, float32 out": (
        {**ROWS, "n": 1, "k": 72, "out_dtype": "float32"},
        {**SMALL, "cluster_n": 2, "stages": 2, "persistent": True},
    ),
    "2 x 2 tiles, past both ends, more than blocks": (
        {**ROWS, "n": 3, "c": 24, "k": 40, "r": 2, "s": 2, "padding": (0, 1, 1, 0)},
        {**SMALL, "cluster_m": 2, "cluster_n": 2, "bn": 16, "bk": 32, "stages": 2, "persistent": True, "band": 2},
    ),
    "split by 2, two rows share weights, uneven steps": (
        {**ROWS, "n": 2, "c": 40, "k": 24, "r": 5, "padding": (2, 0, 2, 0)},
        {**SMALL, "split_k": 2, "cluster_m": 2, "stages": 2},
    ),
    "split by 2, two columns share pixels, one past the end, float32 out": (
        {**ROWS, "n": 1, "c": 24, "k": 40, "s": 5, "padding": (0, 1, 0, 3), "out_dtype": "float32"},
        {**SMALL, "split_k": 2, "cluster_n": 2, "bn": 16, "bk": 32, "stages": 2},
    ),
    "groups in turn, more steps than stages": (
        {**TAILS, "n": 6, "k": 24},
        {**SMALL, "schedule": "in_turn", "persistent": True, "warpgroups": 2, "stages": 4},
    ),
    "two groups in turn with two, fewer steps than stages, float32 out": (
        {**ROWS, "n": 16, "c": 40, "k": 24, "out_dtype": "float32"},
        {**SMALL, "schedule": "in_turn", "persistent": True, "warpgroups": 4, "stages": 3},
    ),
    "depth_to_space, DCR, rows of images that straddle tiles": (
        {**TAILS, "n": 2, "h": 5, "w": 24, "k": 64, "epilogue": [{"depth_to_space": {"block": 2}}]},
        {**SMALL, "bn": 48, "warpgroups": 2},
    ),
    "depth_to_space, CRD, blocks of 3 x 3, more columns than channels": (
        {**SHAPE, "n": 2, "h": 5, "w": 8, "k": 72, "epilogue": [{"depth_to_space": {"block": 3, "mode": "CRD"}}]},
        {**SMALL, "bn": 80, "persistent": True},
    ),
    "depth_to_space, CRD, rows of images wider than a tile, shared weights": (
        {**ROWS, "n": 1, "h": 2, "w": 72, "c": 24, "epilogue": [{"depth_to_space": {"block": 2, "mode": "CRD"}}]},
        {**SMALL, "cluster_m": 2, "bk": 32, "stages": 2, "bn": 32},
    ),
    "depth_to_space, CRD, split by 2, one column of a block": (
        {**SHAPE, "w": 8, "c": 72, "k": 32, "epilogue": [{"depth_to_space": {"block": 2, "mode": "CRD"}}]},
        {**SMALL, "split_k": 2},
    ),
    "groups in turn, of blocks that share weights": (
        {**ROWS, "n": 7, "c": 72, "k": 24, "r": 2, "padding": (1, 0, 0, 0)},
        {**SMALL, "schedule": "in_turn", "persistent": True, "warpgroups": 2, "cluster_m": 2},
    ),
}
CASES |= {
    "a slice of a larger array": (
        {**SHAPE, "c": 24, "k": 40, "slice_of": 64}, {**SMALL, "bn": 48, "persistent": True, "warpgroups": 2}
    ),
    "a slice of float32": ({**SHAPE, "c": 24, "k": 40, "out_dtype": "float32", "slice_of": 52}, SMALL),
}  # fmt: skip
ROWS_WITHOUT_TMA: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rows of 10 bytes, more tiles than blocks": (
        {**SHAPE, "n": 3, "h": 8, "w": 10, "c": 24, "k": 5}, {**SMALL, "bn": 16, "persistent": True}
    ),
    "two channels at once, two groups, one of which has few rows": (
        {**TAILS, "n": 2, "c": 24, "k": 58}, {**SMALL, "bn": 48, "bk": 32, "warpgroups": 2}
    ),
    "four channels at once, split by 2, uneven columns": ({**TAILS, "n": 1, "k": 36}, {**SMALL, "split_k": 2, "bn": 48}),
    "odd channels, split by 4, more blocks than columns": (
        {**SHAPE, "c": 128, "k": 19}, {**SMALL, "split_k": 4, "bn": 32, "stages": 2}
    ),
    "odd channels, 2 x 2 tiles, past both ends": (
        {**ROWS, "n": 3, "c": 24, "k": 39, "r": 2, "s": 2, "padding": (0, 1, 1, 0)},
        {**SMALL, "cluster_m": 2, "cluster_n": 2, "bn": 16, "bk": 32, "stages": 2, "persistent": True, "band": 2},
    ),
    "odd channels, groups in turn": (
        {**TAILS, "n": 6, "k": 23}, {**SMALL, "schedule": "in_turn", "persistent": True, "warpgroups": 2, "stages": 4},
    ),
    "a slice of rows of 62 channels": (
        {**SHAPE, "c": 24, "k": 40, "slice_of": 62}, {**SMALL, "bn": 48, "persistent": True, "warpgroups": 2}
    ),
    "an odd slice of rows of 64 channels": ({**SHAPE, "c": 24, "k": 21, "slice_of": 64}, {**SMALL, "bn": 16}),
    "one channel": ({**SHAPE, "c": 24, "k": 1}, {**SMALL, "bn": 16}),
    "odd channels, tiles of which the last one has a single column": (
        {**SHAPE, "c": 24, "k": 33}, {**SMALL, "bn": 32, "persistent": True}
    ),
    "odd channels, an odd number of octets": ({**SHAPE, "c": 24, "k": 71}, {**SMALL, "bn": 80}),
}  # fmt: skip
for name, (shape, config) in ROWS_WITHOUT_TMA.items():
    CASES |= {f"{name}, in {row_store}": (shape, {**config, "row_store": row_store}) for row_store in ROW_STORES}
CASES["x is the last channels of a larger array"] = (
    {**TAILS, "n": 2, "c": 40, "x_slice": (64, 24)}, {**SMALL, "stages": 2}
)  # fmt: skip
# The modules that the kernel is made of.
MODULES = (module, loads, wgmma_store, gather, pipeline, sharing, store, store_chunks, store_rows, store_words, walk, wgmma)
PEERS = ({**ROWS, "n": 2, "k": 32}, {**SMALL, "cluster_m": 2})  # one cluster, and its loads never wait for its consumers


class BiasInMemory:
    """Stands in for the fused epilogue: y + bias, with the bias at the kernel's address."""

    identity = False
    alignments: Mapping[str, int] = MappingProxyType({})
    params = tuple(SimpleNamespace(kind="pointer", buffer="bias") for _ in range(7))

    def __init__(self, memory: Memory, columns: int) -> None:
        self.memory, self.columns = memory, columns

    def words_ahead(self, octets: int, interleaved: bool) -> int:
        return 0

    def fragments(
        self, octets: int, row_elements: int, interleaved: bool = False, blocks: Any = None, order: Any = None,
        singly: bool = False, ahead: bool = False,
    ) -> Any:  # fmt: skip
        assert not interleaved and blocks is None and row_elements == 8 * self.columns
        assert singly == (self.columns % 2 == 1) or self.columns % 8 == 0
        whole_octets = self.columns % 8 == 0
        order = order or epilogue_fragments.ChannelOrder(8 * octets, 1, 0)

        def fuse(acc: Any, columns: int, row: int, row_8: int, k: int, offset: int, bias: int, *_: Any) -> None:
            for pair in range(2 * octets):
                column = 8 * (pair // 2)
                if column < columns and (row, row_8)[pair % 2]:
                    assert singly or whole_octets or columns - column >= 2
                    place = (offset + column + pair % 2 * row_elements) % self.columns
                    channel = k + order.offset(column)
                    assert channel == (place if order.step == 1 else order.channel()(place)) < self.columns
                    for neighbour in range(min(2, columns - column)):
                        at = bias + 2 * (channel + neighbour * order.step)
                        acc[2 * pair + neighbour] += self.memory.at(at, 2).view(np.float16)[0]

        return fuse

    def single(self, v0: float, valid: int, k: int, offset: int, bias: int, *_: Any) -> float:
        assert valid and k == offset % self.columns
        return v0 + float(self.memory.at(bias + 2 * k, 2).view(np.float16)[0])

    def pair(self, v0: float, v1: float, valid: int, k: int, offset: int, *operands: Any) -> tuple[float, float]:
        assert k % 2 == offset % 2 == 0
        return self.single(v0, valid, k, offset, *operands), self.single(v1, valid, k + 1, offset + 1, *operands)


WAYS = {"copies at once": False, "copies late": True}


@pytest.mark.parametrize(("shape", "config", "late"), each_one_way(CASES, WAYS))
@pytest.mark.mostly_long(8)
def test_the_kernel_computes_the_convolution(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], config: dict[str, Any], late: bool
) -> None:
    run(monkeypatch, shape, config, ClusterEmulator(Memory(), lambda value, *_: value, late))


def run(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], config: dict[str, Any], emulator: ClusterEmulator) -> None:
    """Runs the kernel and compares the result with NumPy's."""
    workload, memory = Workload.conv2d(**shape), emulator.memory
    emulator.stand_in(monkeypatch, *MODULES, epilogue_fragments)
    monkeypatch.setattr(module, "Epilogue", lambda _: BiasInMemory(memory, workload.k))
    rng = np.random.default_rng(0)
    arrays = integers(workload, rng)
    bias = rng.integers(-9, 10, workload.k).astype(np.float16)
    halves = {name: array.astype(np.float16) for name, array in arrays.items()}
    whole = workload.output.slice_of or workload.output.shape  # a slice begins at channel 8
    first = 8 if workload.output.slice_of else 0
    larger = np.full(whole, np.nan, np.float32 if workload.out_dtype == "float32" else np.float16)
    y, memory_of_y = larger[..., first : first + workload.k], larger.reshape(-1)[first:]

    step = TEMPLATE.kernel(workload, H200, Config(config)).steps[0]
    in_order = len(step.params[1].dims) == 4
    by_taps = halves["weight"].reshape(-1 if in_order else (workload.k, -1, workload.c))
    of_maps = {"x": halves["x"], "weight": by_taps, "y": memory_of_y if workload.output.slice_of else y}
    emulator.run(step, {"y": memory.add(memory_of_y), "bias": memory.add(bias)}, 2, of_maps)

    own_x = arrays["x"][..., -workload.c :]
    right = convolve(workload.replace(x_slice=()), own_x, arrays["weight"]) + bias.astype(np.float32)
    for stage in workload.epilogue:
        right = depth_to_space(right, workload.output_layout, **stage.params)
    assert np.isfinite(larger).sum() == right.size, "nothing around a slice is written"
    np.testing.assert_array_equal(to_bits(y, workload.out_dtype), to_bits(right, workload.out_dtype))


# --- Integers -----------------------------------------------------------------------------------------------------------
INTEGERS = {"n": 2, "h": 7, "w": 6, "c": 48, "k": 48, "r": 2, "s": 3, "padding": 1, "dtype": "int8"}
REQUANTISED: dict[str, Any] = {"epilogue": ["requantise"]}
ZERO: dict[str, Any] = {"zero_points": ["x"]}
INTEGER_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "int32": ({**INTEGERS, "weight_dtype": "uint8"}, SMALL),
    "int8, an odd number of 16 columns": ({**INTEGERS, **REQUANTISED}, {**SMALL, "bn": 48, "bk": 32}),
    "uint8, segments of 128 columns, past both ends": (
        {**INTEGERS, "k": 144, "dtype": "uint8", "weight_dtype": "int8", "epilogue": [{"requantise": {"to": "uint8"}}]},
        {**SMALL, "bn": 128, "bk": 128, "stages": 2, "persistent": True, "warpgroups": 2},
    ),
    "split by 2, int8": ({**INTEGERS, **REQUANTISED, "c": 128}, {**SMALL, "split_k": 2, "bn": 48}),
    "zero point, every border of rows and columns": (
        {**INTEGERS, **ZERO, "padding": (2, 1, 1, 3), "stride": (1, 2), "weight_dtype": "uint8"},
        {**SMALL, "bn": 48, "warpgroups": 2, "persistent": True},
    ),
    "zero point, int8, a kernel larger than the image": (
        {**INTEGERS, **ZERO, **REQUANTISED, "n": 3, "h": 3, "r": 4, "dilation": (2, 1), "padding": (3, 0, 2, 1)},
        {**SMALL, "bn": 32, "bk": 32},
    ),
    "zero point, split by 2, int8, no padding": (
        {**INTEGERS, **ZERO, **REQUANTISED, "c": 128, "padding": 0},
        {**SMALL, "split_k": 2, "bn": 48},
    ),
    "blocks of 16 channels, an image for each tile": (
        {**INTEGERS, "n": 3, "layout": "NCHW16c", "padding": (2, 1, 0, 1), "stride": (1, 2)},
        {**SMALL, "bn": 32, "bk": 32, "persistent": True},
    ),
    "blocks of 48 channels, 2 blocks of columns, int8, zero point": (
        {**INTEGERS, **REQUANTISED, **ZERO, "h": 11, "c": 96, "k": 96, "layout": "NCHW48c"},
        {**SMALL, "bn": 96, "bk": 64, "warpgroups": 2, "stages": 2},
    ),
    "half a block of columns, int8, one image": (
        {**INTEGERS, **REQUANTISED, "n": 1, "c": 64, "k": 128, "layout": "NCHW64c"},
        {**SMALL, "bn": 32, "bk": 32},
    ),
    "blocks of 32 channels, split by 2, int8": (
        {**INTEGERS, **REQUANTISED, "c": 64, "k": 64, "layout": "NCHW32c"},
        {**SMALL, "split_k": 2, "bn": 64, "bk": 32},
    ),
    "blocks of 16 channels, 2 x 2 tiles that share operands, past the last image, int8": (
        {**INTEGERS, **REQUANTISED, "n": 3, "k": 80, "layout": "NCHW16c"},
        {**SMALL, "cluster_m": 2, "cluster_n": 2, "bn": 32, "bk": 32, "stages": 2, "band": 2},
    ),
    "blocks of 16 channels, shared weights, groups in turn": (
        {**INTEGERS, "n": 5, "h": 11, "c": 32, "k": 32, "layout": "NCHW16c", "padding": 0},
        {**SMALL, "cluster_m": 2, "bn": 32, "bk": 32, "schedule": "in_turn", "persistent": True, "warpgroups": 2},
    ),
    "3 groups of 32 channels, two tiles of each share pixels, int8, zero point": (
        {**INTEGERS, **REQUANTISED, **ZERO, "c": 96, "k": 96, "groups": 3},
        {**SMALL, "bn": 16, "bk": 32, "cluster_n": 2, "stages": 2},
    ),
    "groups of 48 channels, more tiles than blocks": (
        {**INTEGERS, "c": 96, "k": 64, "groups": 2, "n": 3, "r": 1, "padding": 0},
        {**SMALL, "bn": 32, "bk": 32, "persistent": True},
    ),
    "16 merged groups of 4 channels, 8 at a time, zero point": (
        {**INTEGERS, **ZERO, "c": 64, "k": 64, "groups": 16},
        {**SMALL, "bn": 32, "bk": 32},
    ),
    "groups in blocks of 16 channels, int8": (
        {**INTEGERS, **REQUANTISED, "c": 64, "k": 96, "groups": 2, "layout": "NCHW16c"},
        {**SMALL, "bn": 48, "bk": 32},
    ),
    "2 x 2 tiles that share operands, int8": (
        {**INTEGERS, **REQUANTISED, "k": 80},
        {**SMALL, "cluster_m": 2, "cluster_n": 2, "bn": 32, "stages": 2, "band": 2},
    ),
}


class Requantise:
    """Stands in for the fused epilogue: (channel % 3 + 1) * sum / 2, rounded. Channels are those of interleaved columns."""

    identity = False
    alignments: Mapping[str, int] = MappingProxyType({})

    def __init__(self, workload: Workload, further: Any = ()) -> None:
        self.columns, self.identity = workload.k, not workload.epilogue
        plain = np.broadcast_to(
            np.arange(workload.k), (workload.n, *workload.definition.output_hw(workload.params), workload.k)
        )
        self.channels = Layout.parse(workload.layout).pack(plain, "NHWC").reshape(-1)  # of the elements of y in memory
        self.params = (*(Scalar(scalar.name) for scalar in workload.scalars), *further)

    def channel_of(self, offset: int) -> int:
        return int(self.channels[offset])

    def index(self, name: str) -> int:
        return [getattr(param, "name", getattr(param, "buffer", "")) for param in self.params].index(name)

    def words_ahead(self, octets: int, interleaved: bool) -> int:
        return 0

    def fragments(self, octets: int, row_elements: int, interleaved: bool, blocks: Any, order: Any, *, ahead: bool) -> Any:
        def fuse(acc: Any, columns: int, row: int, row_8: int, k: int, offset: int, *_: Any) -> None:
            assert interleaved
            for column in range(0, min(columns, 8 * octets) if row else 0, 16):
                block, block_elements = blocks or (self.columns, 0)
                at = offset + column // block * block_elements + column % block
                assert self.channel_of(at) == self.channel_of(at + 3) - 3 == k + column
                assert not row_8 or self.channel_of(at + row_elements) == k + column
            for octet in range(octets):
                for i in range(4):
                    channel = k + octet // 2 * 16 + 2 * (i % 2) + octet % 2
                    if octet // 2 * 16 < columns:
                        acc[4 * octet + i] = round((channel % 3 + 1) * acc[4 * octet + i] / 2)

        return fuse


@pytest.mark.parametrize(("shape", "config", "late"), each_one_way(INTEGER_CASES, WAYS))
@pytest.mark.mostly_long(12)
def test_sums_of_whole_numbers(monkeypatch: pytest.MonkeyPatch, shape: Any, config: Any, late: bool) -> None:
    run_integers(monkeypatch, shape, config, ClusterEmulator(Memory(), lambda value, *_: value, late))


def run_integers(monkeypatch: pytest.MonkeyPatch, shape: Any, config: Any, emulator: ClusterEmulator) -> None:
    """Runs the kernel and compares the result with NumPy's."""
    workload = Workload.conv2d(**shape)
    plain = workload.replace(layout="NHWC", weight_layout="OHWI")
    emulator.stand_in(monkeypatch, *MODULES, weight_rows, addressing, zero_points)
    monkeypatch.setattr(module, "Epilogue", Requantise)
    rng = np.random.default_rng(0)
    limits = {name: np.iinfo(dtype) for name, dtype in (("x", workload.dtype), ("weight", workload.weight_dtype))}
    # Small enough for sums that often fit into 8 bits.
    arrays = {
        arg.name: rng.integers(max(-3, limits[arg.name].min), 4, arg.shape).astype(arg.dtype)
        for arg in plain.signature
        if arg.name in limits
    }
    y = np.zeros(workload.output.shape, workload.out_dtype)
    source = TEMPLATE.kernel(workload, H200, Config(config))
    in_memory = {"x": arrays["x"], "weight": arrays["weight"].reshape(workload.k, -1, workload.c // workload.groups)}
    if workload.layout != "NHWC":
        in_memory["x"] = Layout.parse(workload.layout).pack(arrays["x"], "NHWC")
        in_memory["weight"] = Layout.parse(workload.weight_layout).pack(arrays["weight"], "OHWI").reshape(-1)
    memory, zero_point = emulator.memory, 3 if workload.zero_points else 0
    buffers = {name: memory.add(array) for name, array in (("y", y), ("weight", in_memory["weight"]))}
    workspaces = {name: np.full(nbytes, 0x55, np.uint8) for name, nbytes in source.workspaces.items()}
    buffers |= {name: memory.add(array) for name, array in workspaces.items()}
    if weight_rows.ROWS in workspaces:
        rows = workspaces[weight_rows.ROWS].view(workload.weight_dtype)
        in_memory[weight_rows.ROWS] = rows.reshape(workload.k, workload.r * workload.s, -1)
    for step in source.steps:
        emulator.run(step, buffers, 2, {**in_memory, "y": y}, {"x_zero_point": float(zero_point)})
    x = arrays["x"].astype(np.float32) - zero_point
    right = convolve(plain, x, arrays["weight"].astype(np.float32)).astype(np.int64)
    if workload.epilogue:
        right = np.rint((np.arange(workload.k) % 3 + 1) * right / 2)
        right = np.clip(right, np.iinfo(y.dtype).min, np.iinfo(y.dtype).max)
    np.testing.assert_array_equal(y, Layout.parse(workload.layout).pack(right, "NHWC"))


@pytest.mark.parametrize(("block", "of_y"), [(16, 48), (48, 16), (16, 32)], ids=str)
def test_blocks_whose_images_follow_each_other_are_folded_into_rows(
    monkeypatch: pytest.MonkeyPatch, block: int, of_y: int
) -> None:
    """x in (C / x, N, H, W, x) and y likewise, with weights in OHWI: a tile has pixels of several images."""
    workload = Workload.conv2d(**{**INTEGERS, "n": 3, "h": 5, "k": 96 if of_y == 32 else 48})
    emulator = ClusterEmulator(Memory(), lambda value, *_: value, True)
    emulator.stand_in(monkeypatch, *MODULES, epilogue_fragments)
    x_blocks, y_blocks = Blocks.folded(48, 3, block), Blocks.folded(workload.k, 3, of_y)
    gemm = Im2col.of(workload, x=x_blocks, y=y_blocks)
    assert gemm.images == 1
    rng = np.random.default_rng(0)
    x, weight = (rng.integers(-3, 4, arg.shape).astype(np.int8) for arg in workload.signature)
    _, p, q, k = workload.output.shape
    y = np.zeros((y_blocks.count, 3, p, q, of_y), np.int32)
    config = Config({**SMALL, "bn": of_y, "bk": 32 if block == 16 else 64})
    assert TEMPLATE.space(workload, H200, gemm).check(config) == []
    step = TEMPLATE.kernel(workload, H200, config, gemm).steps[0]
    folded = np.ascontiguousarray(np.moveaxis(x.reshape(3, 5, 6, -1, block), 3, 0))
    tensors = {"x": folded, "weight": weight.reshape(k, -1, 48), "y": y.reshape(y_blocks.count, 3 * p * q, of_y)}
    emulator.run(step, {}, 2, tensors)
    right = convolve(workload, x.astype(np.float32), weight.astype(np.float32)).astype(np.int64)
    np.testing.assert_array_equal(np.moveaxis(y, 0, 3).reshape(right.shape), right)


# --- Synchronisation of a cluster's blocks ------------------------------------------------------------------------------


class Forgetful(ClusterEmulator):
    """Blocks do not tell others that they have read a stage."""

    def mbarrier_arrive_at_peer(self, address: int) -> None:
        if address == self.map_shared(address % MAPPED, self.block.index):
            super().mbarrier_arrive_at_peer(address)


def test_a_block_that_does_not_tell_its_peer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="waits for ever: mbarrier"):
        run(monkeypatch, *PEERS, Forgetful(Memory(), lambda value, *_: value, late=False))


class Slow(ClusterEmulator):
    """The second block signals the first one only when no other thread can continue."""

    def mbarrier_arrive_at_peer(self, address: int) -> None:
        if self.block.index and address < 2 * MAPPED:
            self.threads.idle()
        super().mbarrier_arrive_at_peer(address)


class Hasty(Slow):
    """The loading thread does not wait for other blocks, not even at the end."""

    def mbarrier_wait(self, shared: int, parity: int) -> None:
        if self.thread.number != 128 * PEERS[1]["warpgroups"]:
            super().mbarrier_wait(shared, parity)


def test_a_block_stays_until_its_peers_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, *PEERS, Slow(Memory(), lambda value, *_: value, late=False))
    with pytest.raises(AssertionError, match="a block that has left"):
        run(monkeypatch, *PEERS, Hasty(Memory(), lambda value, *_: value, late=False))


# --- Synchronisation of a split tile's blocks ---------------------------------------------------------------------------

SPLIT = CASES["split by 2, two rows share weights, uneven steps"]


class Early(ClusterEmulator):
    """Blocks do not wait for each other before they send sums to memory that others may still read."""

    def cluster_wait(self) -> None:
        if self.block.cluster.phase:  # the first is before the loads
            self.thread.cluster_phase = None
        else:
            super().cluster_wait()


class Impatient(ClusterEmulator):
    """Blocks add up sums that have not arrived yet."""

    def mbarrier_wait(self, shared: int, parity: int) -> None:
        if shared != max(self.block.barriers):  # the last barrier counts the sums
            super().mbarrier_wait(shared, parity)


class Leaving(ClusterEmulator):
    """Blocks leave while their stores read shared memory."""

    def bulk_wait_read_all(self) -> None:
        pass


@pytest.mark.parametrize("careless", [Early, Impatient, Leaving])
def test_a_split_tile_whose_blocks_do_not_wait_is_noticed(
    monkeypatch: pytest.MonkeyPatch, careless: type[ClusterEmulator]
) -> None:
    with pytest.raises(AssertionError, match=r"not equal|a block that has left"):
        run(monkeypatch, *SPLIT, careless(Memory(), lambda value, *_: value, late=True))
