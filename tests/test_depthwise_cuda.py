"""The CUDA templates of depthwise_conv2d: emulated against the definition, compiled, and run on a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bandwidth_support import verdict
from conv2d_numpy import KINDS, check_schedules
from depthwise_cuda_support import H200, KERNEL_MODULES, assert_compiles, emulate, run_on_device
from depthwise_support import case_workloads, random_workload
from hypothesis import given
from hypothesis import strategies as st
from ptx_emulator import PtxEmulator

from schedsearch import Workload, depthwise_conv2d
from schedsearch.device.detect import detect
from schedsearch.target import PRESETS, Target
from schedsearch.template import load_template
from schedsearch.templates.depthwise_conv2d.cuda_pixels import filter_pitch
from schedsearch.templates.depthwise_conv2d.patches import Axis, Patch, Piece, pieces
from schedsearch.testing.emulator import Memory
from schedsearch.testing.template_contract import TemplateContract

PIXELS = load_template("depthwise_conv2d_cuda")
FILTERS = load_template("depthwise_conv2d_dw_cuda")
TEMPLATES = {"forward": PIXELS, "grad_input": PIXELS, "grad_weight": FILTERS}
DTYPES = ("float16", "float32", "bfloat16")
TURING = Target("cuda", "Tesla T4", (7, 5), 40, 65536, 65536, 65536, 1024)


def layer(c: int, size: int, kernel: int = 3, stride: int = 1, dilation: int = 1, **more: Any) -> Workload:
    """A layer with the padding that keeps the size at stride 1."""
    given: dict[str, Any] = dict(
        n=32, c=c, h=size, w=size, r=kernel, s=kernel, stride=stride, dilation=dilation,
        padding=(kernel - 1) * dilation // 2,
    )  # fmt: skip
    return depthwise_conv2d(**{**given, **more})


class TestPixels(TemplateContract):
    template, target, compiled = PIXELS, H200, 1
    accepted = (
        layer(128, 56, epilogue=("scale_shift", "relu")),
        layer(512, 14, stride=2, direction="grad_input", dtype="float32", layout="NCHW", accumulate=True),
    )
    refused = (
        (layer(64, 56, direction="grad_weight"), "direction"),
        (layer(64, 56, direction="grad_both"), "depthwise_conv2d_both_cuda"),
        (layer(64, 300, stride=12, direction="grad_input"), "144"),
        (layer(64, 56, n=2**30), "n is"),
    )


def test_a_patch_of_one_row_reaches_one_row() -> None:
    """A sequence along the width: its row has more than 2**28 bytes, and a patch never has eight of them."""
    sequence = depthwise_conv2d(n=1, c=12288, h=1, w=16384, r=1, s=4, padding=(0, 3, 0, 0))
    for direction, template in TEMPLATES.items():
        assert template.validate(sequence.replace(direction=direction), H200) is None
    tall = depthwise_conv2d(n=1, c=12288, h=16, w=16384, r=3, s=3, padding=1)
    assert "reach over" in str(PIXELS.validate(tall, H200))


@pytest.mark.gpu
def test_a_sequence_along_the_width_on_the_device(gpu: Any) -> None:
    sequence = depthwise_conv2d(n=1, c=12288, h=1, w=16384, r=1, s=4, padding=(0, 3, 0, 0))
    assert verdict(gpu, PIXELS, sequence) is None


@pytest.mark.parametrize("direction", ["forward", "grad_input"])
@pytest.mark.mostly_long(2)
def test_a_layer_whose_epilogue_reads_nothing_for_its_channels_compiles(direction: str) -> None:
    assert_compiles(PIXELS, layer(64, 14, n=1, direction=direction), H200)


class TestFilters(TemplateContract):
    template, target, compiled = FILTERS, H200, 1
    accepted = (
        layer(128, 56, direction="grad_weight", deterministic=True),
        layer(512, 14, stride=2, direction="grad_weight", dtype="float32", layout="NCHW", accumulate=True),
    )
    refused = (
        (layer(64, 56), "direction"),
        (layer(64, 56, direction="grad_both"), "depthwise_conv2d_both_cuda"),
        (layer(64, 9000, n=60_000, direction="grad_weight"), "tiles"),
    )


# ---- index maps


def test_taps_meet_the_sources_of_the_definition() -> None:
    workload = layer(4, 11, kernel=5, stride=2, dilation=3, direction="grad_input")
    axis = Axis.of(workload, 0)
    outputs = workload.definition.output_hw(workload.params)[0]  # type: ignore[attr-defined]
    for first in range(0, 11, 4):
        for source, meetings in axis.meetings(4, 5).items():
            for target, tap in meetings:
                assert (first // 2 + source) * 2 - 6 + tap * 3 == first + target  # h = p * stride - padding + tap * dilation
        met = {(first // 2 + source, first + t, tap) for source, all_ in axis.meetings(4, 5).items() for t, tap in all_}
        for p, tap in np.ndindex(outputs, 5):
            h = p * 2 - 6 + tap * 3
            assert (not first <= h < first + 4) or (p, h, tap) in met


@given(
    st.integers(1, 20), st.integers(1, 5), st.sampled_from((1, 2, 3)), st.integers(1, 3), st.integers(0, 4),
    st.sampled_from(("forward", "grad_input")), st.sampled_from((1, 2, 4, 7)),
)  # fmt: skip
def test_patches_with_a_source_outside_are_counted(
    size: int, kernel: int, stride: int, dilation: int, padding: int, direction: str, units: int
) -> None:
    if size + 2 * padding < (kernel - 1) * dilation + 1:
        return
    workload = depthwise_conv2d(
        n=1, c=2, h=size, w=size, r=kernel, s=kernel, stride=stride, padding=padding, dilation=dilation, direction=direction
    )
    axis = Axis.of(workload, 0)
    tile = units * axis.down
    firsts = [first // axis.down * axis.up for first in range(0, axis.targets, tile)]  # sources at which patches start
    for source in axis.meetings(tile, kernel):
        before, after = sum(first + source < 0 for first in firsts), sum(first + source >= axis.sources for first in firsts)
        assert axis.outside(tile, source) == (before, after)


def test_pieces_are_aligned_and_cover_what_is_wanted() -> None:
    assert pieces(range(-1, 9), 56, 2) == (Piece(-1, 1), Piece(0, 8), Piece(8, 1))
    assert pieces(range(-1, 9), 14, 2) == (Piece(-1, 1), *(Piece(i, 2) for i in range(0, 8, 2)), Piece(8, 1))
    assert pieces(range(-2, 6), 8, 4) == (Piece(-2, 2), Piece(0, 4), Piece(4, 2))
    assert pieces((0, 4, 8), 8, 2) == (Piece(0, 1), Piece(4, 1), Piece(8, 1))
    assert pieces(range(3), 7, 4) == (Piece(0, 1), Piece(1, 1), Piece(2, 1))


def test_a_row_of_nchw_takes_few_loads() -> None:
    patch = Patch.of(layer(64, 112, layout="NCHW"), 4, 8, 3, 3, 1)
    assert [piece.length for piece in patch.source_pieces] == [1, 8, 1]
    assert patch.alignments == (16, 16)


def test_threads_that_copy_neighbouring_taps_write_to_different_banks() -> None:
    """Shared memory has 32 banks of 4 bytes. A vector of 4 channels is 16 bytes, which its loads need aligned."""
    taps = [filter_pitch(block_channels=64, vector=1) // 4 * tap % 32 for tap in range(32)]
    assert len(set(taps)) == 32
    assert filter_pitch(block_channels=64, vector=4) % 16 == 0 and filter_pitch(block_channels=64, vector=8) % 16 == 0


# ---- emulated

BORDERS: list[dict[str, Any]] = [
    dict(n=1, c=4, h=7, w=6, r=3, s=3, padding=1),
    dict(n=2, c=3, h=6, w=8, r=3, s=3, padding=1, layout="NCHW"),
    dict(n=1, c=8, h=9, w=5, r=5, s=5, padding=2, stride=2, direction="grad_input", dtype="float32"),
    dict(n=1, c=2, h=6, w=7, r=3, s=3, padding=2, dilation=2, layout="NCHW", direction="grad_input", accumulate=True),
    dict(n=1, c=1, h=10, w=12, r=9, s=11, padding=(4, 5, 0, 1), layout="NCHW", dtype="float32"),
    dict(n=1, c=2, h=15, w=8, r=9, s=8, padding=(4, 8), stride=2, dilation=(1, 3), direction="grad_input", dtype="float32"),
]


@pytest.mark.parametrize("shape", BORDERS, ids=str)
@pytest.mark.mostly_long(3)
def test_tested_and_untested_loads_give_the_definition(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]) -> None:
    workload = depthwise_conv2d(**shape)
    space = PIXELS.space(workload, H200)
    for border in ("test", "branch"):
        config = space.restrict({"border": [border]}).sample(1, np.random.default_rng(1))[0]
        emulate(monkeypatch, PIXELS, workload, config)
    emulate(monkeypatch, PIXELS, workload, PIXELS.default(workload, H200, space))


FILTER_SHAPES: list[dict[str, Any]] = [
    dict(n=3, c=4, h=7, w=6, r=3, s=3, padding=1),
    dict(n=2, c=3, h=6, w=8, r=3, s=3, padding=1, layout="NCHW", accumulate=True, dtype="float32"),
    dict(n=1, c=1, h=7, w=6, r=8, s=9, padding=4, multiplier=2, weight_layout="HWOI", accumulate=True),
]


@pytest.mark.parametrize("combine", ["workspace", "atomic"])
@pytest.mark.parametrize("shape", FILTER_SHAPES, ids=str)
@pytest.mark.mostly_long(3)
def test_splits_add_up_in_both_ways(monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], combine: str) -> None:
    workload = depthwise_conv2d(**shape, direction="grad_weight")
    space = FILTERS.space(workload, H200)
    small = {"tile_h": [1, 2], "tile_w": [1, 2], "rows": [1, 2], "columns": [1, 2]}
    for splits in (2, 8):
        several = space.restrict({**small, "splits": [splits], "combine": [combine]})
        emulate(monkeypatch, FILTERS, workload, several.sample(1, np.random.default_rng(splits))[0])


@pytest.mark.filterwarnings("ignore:invalid value")  # of the gradients that the definition computes besides
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("direction", ["forward", "grad_weight"])
def test_an_infinite_number_reaches_only_the_products_that_exist(
    monkeypatch: pytest.MonkeyPatch, direction: str, layout: str
) -> None:
    """The last pixel of x is infinite. Patches reach beyond y, and the second rounds of taps beyond the filter."""
    r, s = (8, 9) if direction == "forward" else (1, 3)
    workload = depthwise_conv2d(
        n=1, c=1, h=r + 2, w=s + 2, r=r, s=s, direction=direction, layout=layout, dtype="float32"
    )  # y is 3 x 3
    template, tile = TEMPLATES[direction], {"tile_h": [2], "tile_w": [2], "columns": [2], "rows": [1, 2]}
    config = template.space(workload, H200).restrict(tile).sample(1, np.random.default_rng(0))[0]

    def infinite(arrays: dict[str, Any]) -> None:
        arrays["x"].reshape(-1)[-1] = np.inf
        for name in ("weight", "dy"):
            if name in arrays:
                arrays[name][...] = 1  # infinity times zero would be NaN for the definition too

    emulate(monkeypatch, template, workload, config, change=infinite)


def test_a_deterministic_workload_has_no_atomics() -> None:
    space = FILTERS.space(layer(64, 28, direction="grad_weight", deterministic=True), H200)
    assert [knob.values for knob in space.knobs if knob.name == "combine"] == [("workspace",)]


class FarMemory(Memory):
    """Zeros everywhere; it notes how far writes to one buffer go."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start, self.touched = start, set[int]()

    def at(self, address: int, nbytes: int, alignment: int = 1) -> Any:
        self.touched.add(int(address) - self.start)
        return np.zeros(nbytes, np.uint8)


@pytest.mark.parametrize("layout, buffers", [("NHWC", 0), ("NHWC", 2), ("NCHW", 0)])
def test_the_last_block_of_more_than_2_to_the_32_elements_is_where_it_belongs(
    monkeypatch: pytest.MonkeyPatch, layout: str, buffers: int
) -> None:
    workload = depthwise_conv2d(n=70_000, c=64, h=32, w=32, r=1, s=1, layout=layout)
    assert PIXELS.validate(workload, H200) is None
    memory = FarMemory(start=1 << 45)
    emulator = PtxEmulator(memory)
    emulator.stand_in(monkeypatch, *KERNEL_MODULES)
    few = PIXELS.space(workload, H200).restrict({"rows": [1], "columns": [1, 2], "buffers": [buffers]})
    config = few.sample(1, np.random.default_rng(0))[0]
    (step,) = PIXELS.kernel(workload, H200, config).steps
    x, weight, y = 1 << 50, 1 << 51, memory.start
    emulator.run_blocks(step, [x, weight, 0, y, *[0] * (len(step.params) - 4)], [step.grid.blocks(132) - 1])
    written = [offset for offset in memory.touched if 0 <= offset < 1 << 49]
    in_image = [offset % (64 * 32 * 32 * 2) for offset in written]
    assert {offset // (64 * 32 * 32 * 2) for offset in written} == {69_999}
    assert max(in_image) + 16 >= 64 * 32 * 32 * 2


@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize("direction", TEMPLATES)
@pytest.mark.mostly_long(4)
def test_random_workloads_and_configurations_give_the_definition(
    monkeypatch: pytest.MonkeyPatch, direction: str, seed: int
) -> None:
    rng, template = np.random.default_rng(seed), TEMPLATES[direction]
    workload = random_workload(rng, direction=direction, dtype=DTYPES[seed % 3], n=2, c=int(rng.integers(1, 9)))
    assert template.validate(workload, H200) is None
    space = template.space(workload, H200)
    emulate(monkeypatch, template, workload, space.sample(1, rng)[0], seed)


# ---- compiled

NO_SPILLS = [
    (layer(728, 32, n=1, padding=0, epilogue=("scale_shift", "relu"), dtype="float32"), "h200"),
    (layer(512, 14, layout="NCHW", dtype="float32"), "a100"),
    (layer(256, 28, stride=2, direction="grad_input", dtype="float32"), "h200"),
    (layer(144, 56, kernel=5, direction="grad_input", layout="NCHW"), "a100"),
    (layer(144, 56, kernel=5, direction="grad_weight", layout="NCHW", dtype="float32"), "a100"),
]


@pytest.mark.long
@pytest.mark.parametrize(("workload", "card"), NO_SPILLS, ids=lambda each: getattr(each, "label", each))
def test_the_default_compiles_without_spills(workload: Workload, card: str) -> None:
    assert_compiles(TEMPLATES[workload.direction], workload, PRESETS[card])


@pytest.mark.parametrize("seed", range(24))
def test_the_default_and_the_plain_configuration_are_legal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    workload = random_workload(
        rng, direction=("forward", "grad_input", "grad_weight")[seed // 2 % 3], dtype=DTYPES[seed % 3]
    )
    workload = workload.replace(n=int(rng.choice((1, 32, 100_000))), h=workload.h * 7, w=workload.w * 9)
    template = TEMPLATES[workload.direction]
    for target in (H200, PRESETS["a100"], TURING):
        if template.validate(workload, target):
            assert target is TURING and workload.dtype != "float32"
            continue
        space = template.space(workload, target)
        assert space.check(template.default(workload, target, space)) == []
        plain = template.plain(workload, target, space)
        assert plain is not None and space.check(plain) == []


# ---- the benchmark


def test_the_benchmark_has_every_layer_of_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    program = importlib.import_module("depthwise")
    assert len(program.chosen(program.arguments([]))) == 3 * 2 * 2 * (3 * 9 + 7)
    few = program.chosen(program.arguments(["--batch", "32", "--direction", "grad_input", "--only", "d4", "--limit", "1"]))
    assert [workload.label for workload in few] == ["depthwise_conv2d 32x28x28x512 3x3 p4 d4 grad_input f16 NHWC"]
    row = {"label": "a", "us": 2.0, "torch_us": 5.0, "copy_us": 1.8, "variant": "channels_last cudnn"}
    line = program.table([row]).splitlines()[2]
    assert line.split() == [
        "a",
        "2.00",
        "5.00",
        "2.50",
        "1.80",
        "90%",
        "channels_last",
        "cudnn",
    ]


# ---- on the device


@pytest.fixture(scope="module")
def device() -> Iterator[Any]:
    from schedsearch.device import open_device

    opened = open_device(detect("cuda"))
    yield opened
    opened.close()


@pytest.mark.gpu
@pytest.mark.many(each="direction")
@pytest.mark.parametrize("direction", TEMPLATES)
@pytest.mark.parametrize("seed", range(8))
def test_random_workloads_on_the_device(some_of: Callable[..., Any], device: Any, direction: str, seed: int) -> None:
    rng, template = np.random.default_rng(100 + seed), TEMPLATES[direction]
    workload = random_workload(rng, direction=direction, dtype=DTYPES[seed % 3])
    workload = workload.replace(h=workload.h + 9 * (seed % 4), w=workload.w + 11 * (seed % 3))
    check_schedules(
        lambda config: run_on_device(device, template, workload, config),
        template, workload, device.target, rng, some_of(KINDS, seed),
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(8))
def test_the_operator_cases_on_the_device(device: Any, shared: Any, part: int) -> None:
    for workload in [each for each in case_workloads(shared) if each.direction in TEMPLATES][part::8]:
        small = workload.replace(n=1, c=min(workload.c, 40))  # the same windows, in less time
        template = TEMPLATES[workload.direction]
        config = template.default(workload, device.target, template.space(workload, device.target))
        if template.space(small, device.target).check(config):
            config = template.default(small, device.target, template.space(small, device.target))
        run_on_device(device, template, small, config)
