"""conv2d_mma with x loaded as patches: strips, emulated kernels, the space, compiled kernels, and runs on a GPU."""

from __future__ import annotations

import re
from typing import Any

import integer_model
import numpy as np
import pytest
from cluster_emulator import ClusterEmulator
from conv2d_numpy import expected, integers, run_on_gpu, to_bits
from long_cases import except_long
from mma_emulated import emulate

from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.device.detect import detect
from schedsearch.target import PRESETS
from schedsearch.template import load_template
from schedsearch.templates.conv2d.mma import Conv2dMma
from schedsearch.templates.conv2d.mma_sizes import Plan
from schedsearch.templates.conv2d.strips import Strips
from schedsearch.testing.emulator import Memory
from schedsearch.workload import Workload

TEMPLATE, H200 = Conv2dMma(), PRESETS["h200"]
SMALL: dict[str, Any] = dict(
    bm=32, bn=32, bk=64, wm=16, wn=16, slices=1, stages=3, band=1, persistent=False, blocks_per_sm=1, loads="patches"
)  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "strips that end past the image": dict(n=3, h=6, w=17, c=64, k=40, r=3, s=3, padding=1),
    "two images in a tile, channels that end in zeros": dict(n=5, h=4, w=5, c=96, k=40, r=3, s=3, padding=1),
    "a taller padding below": dict(n=5, h=7, w=8, c=128, k=40, r=2, s=3, padding=(1, 0, 2, 1)),
    "dilation, groups": dict(n=1, h=9, w=13, c=128, k=40, r=3, s=2, padding=2, dilation=(2, 3), groups=2),
    "one row of taps": dict(n=2, h=3, w=40, c=64, k=16, r=1, s=7, padding=(0, 3, 0, 3), out_dtype="float32"),
    "many images in a tile": dict(n=40, h=1, w=2, c=64, k=16, r=2, s=1, padding=(1, 0, 0, 0)),
}
CASES: dict[str, dict[str, Any]] = {
    "strips that end past the image": {**SMALL, "persistent": True},
    "two images in a tile, channels that end in zeros": {**SMALL, "bm": 64, "slices": 2, "wm": 32},
    "a taller padding below": {**SMALL, "persistent": True, "stages": 12},
    "dilation, groups": {**SMALL, "bm": 96, "wm": 48, "stages": 2},
    "one row of taps": {**SMALL, "bn": 16, "stages": 8},
    "many images in a tile": {**SMALL, "bn": 16},
}
OF_INTEGERS: dict[str, Any] = dict(n=3, h=5, w=4, c=128, k=36, r=3, s=2, padding=1, dtype="int8")
INTEGER_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "requantised, both zero points": (
        {**OF_INTEGERS, "zero_points": ["x", "weight"], "epilogue": ["bias", {"requantise": {"to": "int8"}}]},
        {**SMALL, "bk": 128, "batch": "folded"},
    ),
    "uint8 x int8, more tiles than blocks": (
        {**OF_INTEGERS, "dtype": "uint8", "weight_dtype": "int8", "w": 9},
        {**SMALL, "bk": 128, "batch": "folded", "persistent": True, "bm": 16},
    ),
}  # fmt: skip


# --- Strips ----------------------------------------------------------------------------------------------------------


def read_rows(workload: Workload, strips: Strips, first: int, bm: int) -> set[tuple[int, int]]:
    """(image, row of the padded image) of all that the taps of a tile read, counted pixel by pixel."""
    found = set()
    for pixel in range(first, min(first + bm, strips.pixels)):
        image, row = divmod(pixel // strips.width, strips.out_h)
        found |= {(image, row + r * workload.dilation[0]) for r in range(workload.r)}
    return found


@pytest.mark.parametrize("bm", [16, 48, 64, 96, 192, 256])
@pytest.mark.parametrize("name", SHAPES)
def test_a_patch_has_all_rows_that_a_tile_reads(name: str, bm: int) -> None:
    workload = Workload.conv2d(**SHAPES[name])
    strips = Strips.of(workload, bm)
    tiles = range(0, strips.pixels, bm)
    most = 0
    for first in tiles:
        rows = read_rows(workload, strips, first, bm)
        # Between two images lie the padded rows that no tap of either reads in this tile.
        places = [image * (strips.out_h + strips.reach[0]) + row for image, row in rows]
        most = max(most, max(places) - min(places) + 1)
    assert most <= strips.rows
    assert strips.count * strips.width >= workload.output.shape[2] > (strips.count - 1) * strips.width


@pytest.mark.parametrize("bm", [64, 192])
@pytest.mark.parametrize("name", SHAPES)
def test_eight_neighbours_are_free_of_bank_conflicts(name: str, bm: int) -> None:
    """ldmatrix reads the 8 rows of 16 bytes of one matrix at once: at the same chunk, swizzled by the position modulo 8."""
    strips = Strips.of(Workload.conv2d(**SHAPES[name]), bm)
    within = min(strips.pixels, strips.out_h * strips.width)  # of one image
    for first in range(0, within - 7, 8):
        pixels = range(first, first + 8)
        positions = {(pixel // strips.width * strips.pitch + pixel % strips.width) % 8 for pixel in pixels}
        assert len(positions) == 8


# --- Emulated --------------------------------------------------------------------------------------------------------


def emulated(monkeypatch: pytest.MonkeyPatch, name: str, **how: Any) -> tuple[Any, ...]:
    """y in `to_bits` form, with the workload and the arrays that it was computed from."""
    workload = Workload.conv2d(**SHAPES[name])
    arrays = integers(workload, np.random.default_rng(0))
    stored = {name: array.astype(np.float16) for name, array in arrays.items()}
    return workload, arrays, to_bits(emulate(monkeypatch, workload, CASES[name], stored, **how), workload.out_dtype)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.mostly_long(4)
def test_tiles_are_loaded_as_patches(monkeypatch: pytest.MonkeyPatch, name: str, late: bool) -> None:
    workload, arrays, y = emulated(monkeypatch, name, late=late)
    expected(workload, arrays).check(y)


@pytest.mark.parametrize("case", INTEGER_CASES)
@pytest.mark.mostly_long(1)
def test_sums_of_integers_are_exact(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    shape, config = INTEGER_CASES[case]
    workload = Workload.conv2d(**shape)
    assert set(config) == set(TEMPLATE.space(workload, H200).names)
    arrays = integer_model.arguments(workload)
    y = emulate(monkeypatch, workload, config, arrays, late=True)
    np.testing.assert_array_equal(y, integer_model.expected(workload, arrays))


class Hasty(ClusterEmulator):
    """The loading thread does not wait until a patch or a stage has been read."""

    def mbarrier_wait(self, shared: int, parity: int) -> None:
        if self.thread.number < self.block.size - 32:
            super().mbarrier_wait(shared, parity)


class Unready(ClusterEmulator):
    """Warps multiply without waiting for the operands."""

    def mbarrier_wait(self, shared: int, parity: int) -> None:
        if self.thread.number >= self.block.size - 32:
            super().mbarrier_wait(shared, parity)


@pytest.mark.parametrize("careless", [Hasty, Unready])
def test_a_wait_that_is_missing_shows(monkeypatch: pytest.MonkeyPatch, careless: type[ClusterEmulator]) -> None:
    emulator = careless(Memory(), lambda value, *_: value, True)
    with pytest.raises(AssertionError):  # a barrier's count, or the numbers
        workload, arrays, y = emulated(monkeypatch, "dilation, groups", emulator=emulator)
        expected(workload, arrays).check(y)


# --- The space -------------------------------------------------------------------------------------------------------


def loads_of(card: str = "h200", **shape: Any) -> tuple[Any, ...]:
    workload = Workload.conv2d(**{**dict(n=4, h=8, w=8, c=64, k=64, r=3, s=3), **shape})
    return tuple(TEMPLATE.space(workload, PRESETS[card]).values["loads"])


def test_kernels_with_several_taps_and_stride_1_have_patches() -> None:
    assert {card for card in PRESETS if "patches" in loads_of(card)} == {"h100", "h200", "b200", "gb300", "rtx5090"}
    assert loads_of(r=1, s=1) == loads_of(stride=2) == loads_of(stride=(1, 2)) == ("copies", "tma")
    assert loads_of(w=600, s=2, dilation=(1, 128)) == ("copies", "tma", "patches")
    assert loads_of(layout="NCHW") == ("copies",)


@pytest.mark.parametrize("name", SHAPES)
def test_the_space_knows_the_tiles_and_the_shared_memory_of_each_configuration(name: str) -> None:
    workload = Workload.conv2d(**SHAPES[name])
    space = TEMPLATE.space(workload, H200).restrict({"loads": ["patches"]})
    assert space.size.count >= 64
    for config in space.sample(16, np.random.default_rng(0)):
        plan = Plan.of(workload, config)
        derived = {name: np.array([value]) for name, value in config.items()}
        for name, formula in space.derived.items():
            derived[name] = np.asarray(formula(derived))
        assert derived["tiles"] == plan.tiling.tiles and derived["shared_bytes"] == plan.shared_bytes
        assert derived["threads"] == plan.threads and derived["steps"] == plan.steps
        assert plan.w_offset % 1024 == 0 == plan.barrier_offset % 8


# --- Compiling -------------------------------------------------------------------------------------------------------
LAYER: dict[str, Any] = dict(n=32, h=28, w=28, c=128, k=128, r=3, s=3, padding=1, epilogue=("bias", "relu"))
FAST: dict[str, Any] = {**SMALL, "bm": 128, "bn": 128, "wm": 64, "wn": 32, "stages": 4}


@pytest.mark.parametrize("card", except_long(["h200", "b200", "rtx5090"], long=["b200", "rtx5090"]))
@pytest.mark.mostly_long(3)
def test_a_kernel_loads_rows_and_its_loops_stay_loops(card: str) -> None:
    pytest.importorskip("numba_cuda", reason="needs numba-cuda: install the extra cu12 or cu13")
    from schedsearch.backend.cuda import ptx_of

    workload, target = Workload.conv2d(**LAYER), PRESETS[card]
    config = {**FAST, "bm": 64, "bn": 64, "wm": 32, "wn": 32} if card == "rtx5090" else FAST
    source = TEMPLATE.kernel(workload, target, Config(config))
    text = "\n".join(ptx_of(source, target))
    warp_tile = config["wm"] // 16 * config["wn"] // 8 * 4  # instructions of a tap of 64 channels
    assert 0 < text.count("mma.sync") < 9 * warp_tile  # not one copy for each tap
    assert "wgmma" not in text and "cp.async.c" not in text
    assert "im2col" not in text and len(re.findall(r"cp\.async\.bulk\.tensor\.4d", text)) <= 8  # of a patch's 19 rows
    found = compile_source(source, target).resources
    assert found.spill_bytes == 0 and found.registers * (32 * 8 + 32) <= target.registers_per_sm


# --- On the device ---------------------------------------------------------------------------------------------------


def random_workload(rng: np.random.Generator) -> Workload:
    groups, r, s = int(rng.choice([1, 1, 2])), int(rng.integers(1, 5)), int(rng.integers(2, 5))
    return Workload.conv2d(
        n=int(rng.integers(1, 9)), h=int(rng.integers(6, 30)), w=int(rng.integers(10, 70)),
        c=groups * 64 * int(rng.integers(1, 4)), k=groups * int(rng.integers(2, 90)), r=r, s=s,
        padding=int(rng.integers(0, 3)), dilation=(int(rng.integers(1, 3)), int(rng.integers(1, 4))), groups=groups,
        dtype=str(rng.choice(["float16", "bfloat16"])), epilogue=("bias", "relu") if rng.random() < 0.5 else (),
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_patches_give_right_sums(seed: int) -> None:
    target, rng = detect("cuda"), np.random.default_rng(seed)
    if target.older_than((9, 0)):
        pytest.skip("the card has no TMA")
    workload = random_workload(rng)
    arrays = integers(workload, rng)
    for config in TEMPLATE.space(workload, target).restrict({"loads": ["patches"]}).sample(4, rng):
        expected(workload, arrays).check(run_on_gpu(TEMPLATE, workload, target, config, arrays))


@pytest.mark.gpu
@pytest.mark.parametrize("form", INTEGER_CASES)
def test_integers_are_exact_on_the_device(form: str) -> None:
    target = detect("cuda")
    if target.older_than((9, 0)):
        pytest.skip("the card has no TMA")
    workload = Workload.conv2d(**{**INTEGER_CASES[form][0], "h": 23, "w": 19})
    check = integer_model.exactly(load_template("conv2d_mma"), workload, target)
    for config in TEMPLATE.space(workload, target).restrict({"loads": ["patches"]}).sample(3, np.random.default_rng(1)):
        check(config)
