"""The parts that kernels share, one by one: schedulers against a count of all tiles, rings against stage and phase numbers,
shared memory and the table of machines against values computed by hand."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_emulator import ClusterEmulator
from numba import cuda, types

from schedsearch.backend import compile_source
from schedsearch.backend.cuda import _compile_to_ptx
from schedsearch.backend.ops import shared_base
from schedsearch.launch import Grid, Pointer, TensorMap
from schedsearch.ops.pixel_shuffle import PixelShuffle
from schedsearch.target import PRESETS
from schedsearch.template import KernelSource, KernelStep
from schedsearch.templates.parts import gather, machine, pipeline, ptx, store, walk
from schedsearch.templates.parts.shared import SharedLayout
from schedsearch.templates.parts.wgmma import Wgmma
from schedsearch.testing.emulator import Memory

H200 = PRESETS["h200"]


@pytest.fixture(autouse=True)
def emulator(monkeypatch: pytest.MonkeyPatch) -> ClusterEmulator:
    """The functions run as plain Python, with integers of their types' width."""
    stand_in = ClusterEmulator(Memory(), lambda value, *_: value, late=False)
    stand_in.stand_in(monkeypatch, gather, pipeline, store, walk)
    return stand_in


@pytest.mark.parametrize(("rows", "columns", "height"), [(6, 3, 2), (5, 3, 2), (7, 1, 16), (1, 4, 1), (9, 2, 4)])
def test_a_banded_walk_visits_every_tile_band_by_band_and_column_by_column(rows: int, columns: int, height: int) -> None:
    place = walk.banded(rows, columns, height)
    bands = [range(first, min(first + height, rows)) for first in range(0, rows, height)]
    expected = [(row, column) for band in bands for column in range(columns) for row in band]
    assert [place(tile) for tile in range(rows * columns)] == expected


def test_rectangles_are_walked_along_a_row_then_down_an_image() -> None:
    origin = walk.rectangles(rows=3, columns=2, tile_h=4, tile_w=5)
    expected = [(image, 4 * row, 5 * column) for image, row, column in itertools.product(range(2), range(3), range(2))]
    assert [origin(tile) for tile in range(12)] == expected


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("first_parity", [0, 1])
def test_a_ring_flips_the_parity_once_a_round(stages: int, first_parity: int) -> None:
    advance = pipeline.producer(stages, 64).advance
    seen, state = [], (0, first_parity)
    for _ in range(3 * stages):
        seen.append(state)
        state = advance(*state)
    assert seen == [(step % stages, first_parity ^ (step // stages) % 2) for step in range(3 * stages)]


def test_a_consumer_of_some_phases_has_a_parity_for_each_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a ring of 3 stages it takes stages 0 and 1; another consumer has the next stage, so it then takes 0 again."""
    waited: list[tuple[int, int]] = []
    monkeypatch.setattr(pipeline, "ptx", type("Ptx", (), {"mbarrier_wait": lambda at, parity: waited.append((at, parity))}))
    take, advance = pipeline.consumer(3, phases="some")
    parities = 0
    for stage in (0, 1, 0):
        parities = take(800, stage, parities)
    assert waited == [(800, 0), (808, 0), (800, 1)]
    assert advance(2, parities) == (0, parities)


def test_im2col_steps_go_through_the_channels_of_each_tap() -> None:
    """40 channels in steps of 16 and 2 x 3 taps; a base pixel of row 17 of images of 3 x 4 output pixels."""
    steps = gather.im2col(
        out_w=4, out_pixels=12, stride=(2, 3), corner=(1, 2), channels=40, bk=16, kernel_w=3
    )  # fmt: skip
    expected = [(tap, channel, tap // 3, tap % 3) for tap in range(6) for channel in (0, 16, 32)]
    assert [steps.first(number) for number in range(18)] == expected
    state, walked = steps.first(0), []
    for _ in range(18):
        walked.append(state)
        state = steps.next(*state)
    assert walked == expected
    assert steps.pixel(17) == (1, 1 * 2 - 1, 1 * 3 - 2)  # pixel 5 of image 1 is output row 1, column 1


def test_regions_of_shared_memory_follow_one_another() -> None:
    layout = SharedLayout.of(ring=3 * 4096, y=1024, full=24, empty=24)
    assert [layout.offset(region) for region in ("ring", "y", "full", "empty")] == [0, 12288, 13312, 13336]
    assert layout.nbytes == 13360


@pytest.mark.parametrize("out_w", [8, 24, 40, 64, 1280])
def test_stores_through_depth_to_space_write_each_pixel_once_and_stay_inside(
    monkeypatch: pytest.MonkeyPatch, out_w: int
) -> None:
    """Of 2 blocks x 72 channels, 3 rows of images: a box starts at 128 bytes of shared memory and lies in a single row."""
    sent: list[tuple[int, ...]] = []
    monkeypatch.setattr(store, "ptx", type("Ptx", (), {"tma_store_4d": lambda y, *box: sent.append(box)}))
    rows, row_bytes = 3 * out_w, 16
    output = store.ShuffledOutput(144, 1, rows, rows, 144, 0, 1, PixelShuffle(144, 2, "DCR"), out_w)
    send = output.send(row_bytes)
    tiles = range(0, rows, 64)
    for first in tiles:
        send(None, 1024, 80, first)  # channel 8 of the second block
    assert {(within, of_block) for _, within, _, of_block, _ in sent} == {(8, 1)}
    assert all(address % 128 == 0 and 0 <= pixel <= out_w - output.box_pixels for address, _, pixel, _, _ in sent)
    written = [line * out_w + pixel + i for _, _, pixel, _, line in sent for i in range(output.box_pixels)]
    assert sorted(written) == list(range(rows))
    staged = [(line * out_w + pixel) % 64 * row_bytes + 1024 for _, _, pixel, _, line in sent]
    assert [address for address, *_ in sent] == staged


def test_the_emulator_refuses_a_store_that_starts_before_the_tensor(
    emulator: ClusterEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    y = TensorMap("y", "float16", dims=(8, 16), strides_bytes=(16,), element_strides=(1, 1), box=(8, 8))
    monkeypatch.setattr(ClusterEmulator, "block", emulator.new_block(1, 1024, 0))
    with pytest.raises(AssertionError, match="starts before the tensor"):
        emulator.tma_store_2d((y, np.zeros((16, 8), np.float16)), 0, 0, -1)


def test_a_layout_of_many_configurations_is_computed_at_once() -> None:
    stages = np.array([2, 3])
    layout = SharedLayout.of(ring=stages * 4096, y=0, full=stages * 8)
    assert layout.nbytes.tolist() == [8208, 12312] and layout.offsets["full"].tolist() == [8192, 12288]


def test_a_card_without_an_entry_gets_the_nearest_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = machine.MACHINES[H200.key]
    assert machine.machine(H200) is h200
    others = {"a": dataclasses.replace(h200, sms=78), "b": dataclasses.replace(h200, compute_capability=(12, 0))}
    monkeypatch.setattr(machine, "MACHINES", {**machine.MACHINES, **others})
    assert machine.machine(dataclasses.replace(H200, sms=114, name="another")) is h200  # 114 is nearer to 132 than to 78
    assert machine.machine(dataclasses.replace(H200, sms=80, name="another")) is others["a"]
    assert machine.machine(dataclasses.replace(H200, compute_capability=(12, 1))) is others["b"]


WGMMAS = {  # PTX ISA, wgmma.mma_async: elements of k, dtype of sums, instruction
    "float16": (16, "float32", "m64n32k16.f32.f16.f16"),
    "bfloat16": (16, "float32", "m64n32k16.f32.bf16.bf16"),
    "float32": (8, "float32", "m64n32k8.f32.tf32.tf32"),
    "float8_e4m3": (32, "float32", "m64n32k32.f32.e4m3.e4m3"),
    "float8_e5m2": (32, "float32", "m64n32k32.f32.e5m2.e5m2"),
    "int8": (32, "int32", "m64n32k32.s32.s8.s8"),
    "uint8": (32, "int32", "m64n32k32.s32.u8.u8"),
}


@pytest.mark.parametrize("dtype", WGMMAS)
def test_the_assembler_takes_wgmma_of_every_dtype(dtype: str) -> None:
    wgmma = Wgmma(dtype)
    assert (wgmma.k, wgmma.accumulator) == WGMMAS[dtype][:2]
    accumulators, sums = wgmma.accumulators(32), wgmma.accumulator_type
    multiply, wait, matrix = wgmma.steps(32, 2), wgmma.wait(0, 32), wgmma.matrix(64)

    def kernel(y: Any) -> None:
        acc = cuda.local.array(accumulators, sums)
        shared = shared_base()
        multiply(acc, matrix(shared), matrix(types.uint32(shared + 4096)), types.int32(0))
        wait(acc)
        total = acc[0]
        for number in range(1, accumulators):
            total += acc[number]
        ptx.store_global_f32(y + types.uint64(cuda.threadIdx.x) * types.uint64(4), types.float32(total))

    step = KernelStep(kernel, (Pointer("y"),), Grid(1), 128, 8192, shaped_by=frozenset({"accumulators"}))
    assert WGMMAS[dtype][2] in _compile_to_ptx(step, "kernel", "sm_90a")
    source = KernelSource("cuda", "sm_90a", (step,), alignments={"y": 16})
    assert compile_source(source, H200).resources.local_bytes == 0


def test_the_page_says_how_large_the_templates_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """To write its table again: python scripts/template_lines.py. Figures may lag behind the code by a tenth."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    lines = importlib.import_module("template_lines")
    made, marked = lines.table(), lines.MARKED.search(lines.PAGE.read_text())
    assert marked is not None
    now, said = (re.findall(r"`(\w+)` \| (\d+) \| (\d+) \| (\d+) % \| (\d+)", text) for text in (made, marked[0]))
    assert [row[0] for row in now] == [row[0] for row in said] == list(lines.TEMPLATES)
    for row, written in zip(now, said):
        assert [int(n) for n in written[1:]] == pytest.approx([int(n) for n in row[1:]], rel=0.1), row[0]
        assert int(row[4]) <= 150, f"{row[0]} has a function of {row[4]} lines; take a part out of it"
        is_small = int(row[1]) < 300  # it has little that another template could share
        assert is_small or row[0].endswith("_cpu") or int(row[3]) >= 50, f"of {row[0]}'s lines only {row[3]} % are shared"
