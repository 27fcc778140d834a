"""conv2d_tcgen05: its source runs thread by thread in a model of tensor memory, and it compiles for cards that have it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conv2d_numpy import expected, integers, to_bits
from mma_emulated import emulate
from tensor_memory_emulator import TensorEmulator

from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.target import PRESETS
from schedsearch.template import load_templates
from schedsearch.templates.conv2d import tcgen05
from schedsearch.templates.parts import tensor_memory
from schedsearch.templates.parts.tensor_memory import Product
from schedsearch.testing.emulator import Memory
from schedsearch.workload import Workload

TEMPLATE, B200 = tcgen05.Conv2dTcgen05(), PRESETS["b200"]
SMALL = dict(bn=32, bk=32, stages=3, band=1)
TAPS: dict[str, Any] = dict(n=2, h=7, w=6, c=24, k=40, r=3, s=2, padding=(1, 0, 2, 1), stride=(2, 1))
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "several tiles of pixels, rows of 64 bytes": (dict(n=3, h=9, w=7, c=32, k=24, r=3, s=3, padding=1), SMALL),
    "rows of 32 bytes, few stages, several tiles of channels": (
        TAPS,
        {**SMALL, "bn": 16, "bk": 16, "stages": 2},
    ),
    "rows of 128 bytes, the last step of a tap has zeros": ({**TAPS, "c": 48}, {**SMALL, "bk": 64, "bn": 64}),
    "float32 out, dilation": ({**TAPS, "dilation": (1, 2), "w": 9, "out_dtype": "float32"}, {**SMALL, "bk": 16}),
    "groups, fewer steps than stages": (dict(n=1, h=8, w=7, c=64, k=48, r=1, s=1, groups=2), {**SMALL, "stages": 2}),
    "odd channels": (dict(n=1, h=5, w=5, c=16, k=19, r=1, s=3), {**SMALL, "bk": 16, "stages": 4}),
}


def emulated(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], config: dict[str, Any], emulator: TensorEmulator
) -> None:
    """Compares y of one configuration with NumPy's."""
    workload = Workload.conv2d(**shape)
    arrays = integers(workload, np.random.default_rng(0))
    stored = {name: array.astype(np.float16) for name, array in arrays.items()}
    modules = tcgen05, tensor_memory
    y = emulate(monkeypatch, workload, config, stored, by=TEMPLATE, emulator=emulator, modules=modules)
    expected(workload, arrays).check(to_bits(y, workload.out_dtype))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_products_add_up_in_tensor_memory(monkeypatch: pytest.MonkeyPatch, case: str, late: bool) -> None:
    shape, config = CASES[case]
    assert TEMPLATE.space(Workload.conv2d(**shape), B200).check(Config(config)) == []
    emulated(monkeypatch, shape, config, TensorEmulator(Memory(), lambda value, *_: value, late))


class Unready(TensorEmulator):
    """Products do not wait for their operands."""

    def mbarrier_wait(self, shared: int, parity: int) -> None:
        if self.thread.number != self.block.size - 32:
            super().mbarrier_wait(shared, parity)


class Hasty(TensorEmulator):
    """Stages are loaded again before their products have read them."""

    def mbarrier_wait(self, shared: int, parity: int) -> None:
        if self.thread.number != self.block.size - 64:
            super().mbarrier_wait(shared, parity)


class Early(TensorEmulator):
    """Results are taken before the tile is complete."""

    def mbarrier_wait(self, shared: int, parity: int) -> None:
        if self.thread.number >= self.block.size - 64:
            super().mbarrier_wait(shared, parity)


class Keeping(TensorEmulator):
    """A block keeps its columns."""

    def release(self, tensor: int, columns: int) -> None:
        pass


@pytest.mark.parametrize("careless", [Unready, Hasty, Early, Keeping])
def test_what_is_missing_shows(monkeypatch: pytest.MonkeyPatch, careless: type[TensorEmulator]) -> None:
    emulator = careless(Memory(), lambda value, *_: value, True)
    with pytest.raises(AssertionError):
        emulated(monkeypatch, TAPS, {**SMALL, "bn": 16, "bk": 16, "stages": 2}, emulator)


def test_the_instruction_descriptor_has_the_bits_of_the_manual() -> None:
    """PTX ISA, "Instruction descriptor": sums of float32 (1) at 4, formats at 7 and 10, N / 8 at 17, M / 16 at 24."""
    assert Product("float16", 256).instruction == 1 << 4 | 32 << 17 | 8 << 24
    assert Product("bfloat16", 16).instruction == 1 << 4 | 1 << 7 | 1 << 10 | 2 << 17 | 8 << 24
    assert [Product("float16", columns).allocated for columns in (16, 48, 256)] == [32, 64, 256]


def test_a_kernel_has_products_of_tensor_memory_and_tensor_copies() -> None:
    pytest.importorskip("numba_cuda", reason="needs numba-cuda: install the extra cu12 or cu13")
    from schedsearch.backend.cuda import ptx_of

    workload = Workload.conv2d(n=32, h=28, w=28, c=128, k=128, r=3, s=3, padding=1, epilogue=("bias", "relu"))
    source = TEMPLATE.kernel(workload, B200, Config(bn=128, bk=64, stages=4, band=1))
    text = "\n".join(ptx_of(source, B200))
    assert "tcgen05.mma.cta_group::1.kind::f16" in text and "tcgen05.ld.sync.aligned.32x32b.x32" in text
    assert "cp.async.bulk.tensor.4d" in text and "cp.async.c" not in text and "mma.sync" not in text
    built = compile_source(source, B200)
    assert built.artifact.plan.arch == "sm_100a" and built.resources.local_bytes == 0


@pytest.mark.parametrize("card", ["b200", "gb300"])
def test_every_default_is_legal(card: str) -> None:
    target = PRESETS[card]
    for shape, _ in CASES.values():
        workload = Workload.conv2d(**shape)
        space = TEMPLATE.space(workload, target)
        assert space.check(TEMPLATE.default(workload, target, space)) == []
        assert TEMPLATE.kernel(workload, target, TEMPLATE.default(workload, target, space)).arch == f"{target.architecture}a"


def test_without_records_a_template_that_cards_have_run_comes_first() -> None:
    workload = Workload.conv2d(n=32, h=28, w=28, c=128, k=128, r=3, s=3, padding=1)
    assert [each.name for each in load_templates().matching(workload, B200)] == ["conv2d_mma", TEMPLATE.name]


@pytest.mark.parametrize(
    ("card", "changes", "reason"),
    [
        ("h200", {}, "tcgen05 needs compute capability 10, got 9.0"),
        ("rtx5090", {}, "tcgen05 needs compute capability 10, got 12.0"),
        ("b200", {"dtype": "int8"}, "dtype is int8; allowed: float16, bfloat16"),
        ("b200", {"c": 20}, "a group has 20 channels; allowed: multiples of 8"),
        ("b200", {"c": 48, "k": 48, "groups": 2}, "has 24 channels; allowed: multiples of 16"),
        ("b200", {"layout": "NCHW"}, "layout and weight_layout are NCHW and OIHW; allowed: NHWC and OHWI"),
    ],
)
def test_refusals_say_why(card: str, changes: dict[str, Any], reason: str) -> None:
    workload = Workload.conv2d(**{**dict(n=1, h=8, w=8, c=32, k=32, r=3, s=3), **changes})
    assert reason in (TEMPLATE.validate(workload, PRESETS[card]) or "")
