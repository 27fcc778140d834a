"""conv2d_tcgen05 and matmul_tcgen05: their source runs thread by thread in a model of tensor memory, and compiles for cards
that have it."""

from __future__ import annotations

from typing import Any

import integer_model
import numpy as np
import pytest
from conv2d_numpy import convolve, expected, integers, to_bits
from mma_emulated import emulate
from tensor_memory_emulator import TensorEmulator

from schedsearch import batch_matmul, dense
from schedsearch.backend import CompileError, compile_source, compilers
from schedsearch.backend.cuda import ptx_of
from schedsearch.config import Config
from schedsearch.ops.dtypes import encode
from schedsearch.target import PRESETS
from schedsearch.template import Template, load_template, load_templates
from schedsearch.templates.conv2d import tcgen05
from schedsearch.templates.parts import tensor_memory
from schedsearch.templates.parts.tensor_memory import Product
from schedsearch.testing.emulator import Memory
from schedsearch.workload import Workload

TEMPLATE, B200, GB300 = tcgen05.Conv2dTcgen05(), PRESETS["b200"], PRESETS["gb300"]
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
OF_BYTES: dict[str, Any] = dict(n=2, h=7, w=6, c=48, k=36, r=3, s=2, padding=(1, 0, 2, 1), stride=(2, 1))
REQUANTISED = ["bias", {"requantise": {"to": "int8"}}]
INTEGER_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "int32 sums, rows of 64 bytes whose last one ends in zeros": (dict(dtype="int8"), {**SMALL, "bk": 64}),
    "requantised, zero points of both": (
        dict(dtype="int8", zero_points=["x", "weight"], epilogue=REQUANTISED),
        SMALL,
    ),
    "uint8 x int8, rows of 128 bytes, few stages": (
        dict(dtype="uint8", weight_dtype="int8", c=128, k=40),
        {**SMALL, "bn": 64, "bk": 128, "stages": 2},
    ),
    "int8 x uint8, groups": (dict(weight_dtype="uint8", dtype="int8", c=64, groups=2), {**SMALL, "bn": 16}),
}
FLOAT_CASES: dict[str, dict[str, Any]] = {
    "E4M3": dict(dtype="float8_e4m3"),
    "E5M2 x E4M3": dict(dtype="float8_e5m2", weight_dtype="float8_e4m3", out_dtype="float32"),
    "TF32": dict(dtype="float32", precision="tf32", c=20),
}
PRODUCTS: dict[str, Any] = {
    "two tiles of rows": dense(m=150, n=40, k=96, dtype="int8"),
    "weights of their own": batch_matmul(b=3, m=19, n=21, k=48, dtype="int8", epilogue=["bias"]),
}


def emulated(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], config: dict[str, Any], emulator: TensorEmulator
) -> None:
    """Compares y of one configuration with NumPy's."""
    workload = Workload.conv2d(**shape)
    arrays = integers(workload, np.random.default_rng(0))
    stored = {name: array.astype(np.float16) for name, array in arrays.items()}
    y = run(monkeypatch, workload, config, stored, emulator)
    expected(workload, arrays).check(to_bits(y, workload.out_dtype))


def run(
    monkeypatch: pytest.MonkeyPatch,
    workload: Workload,
    config: dict[str, Any],
    stored: dict[str, Any],
    emulator: TensorEmulator | None = None,
    by: Template = TEMPLATE,
) -> Any:
    """y of one configuration; products run late unless an emulator is given."""
    emulator = emulator or TensorEmulator(Memory(), lambda value, *_: value, True)
    modules = tcgen05, tensor_memory
    return emulate(monkeypatch, workload, config, stored, by=by, emulator=emulator, modules=modules)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.mostly_long(3)
def test_products_add_up_in_tensor_memory(monkeypatch: pytest.MonkeyPatch, case: str, late: bool) -> None:
    shape, config = CASES[case]
    assert TEMPLATE.space(Workload.conv2d(**shape), B200).check(Config(config)) == []
    emulated(monkeypatch, shape, config, TensorEmulator(Memory(), lambda value, *_: value, late))


@pytest.mark.parametrize("case", INTEGER_CASES)
def test_integers_add_up_in_int32(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    change, config = INTEGER_CASES[case]
    workload = Workload.conv2d(**{**OF_BYTES, **change})
    assert TEMPLATE.space(workload, B200).check(Config(config)) == []
    arrays = integer_model.arguments(workload)
    y = run(monkeypatch, workload, config, arrays)
    np.testing.assert_array_equal(y, integer_model.expected(workload, arrays))


@pytest.mark.parametrize("case", FLOAT_CASES)
def test_float8_and_tf32_are_multiplied_exactly(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    workload = Workload.conv2d(**{**OF_BYTES, **FLOAT_CASES[case]})
    config = {**SMALL, "bk": 2 * Product(workload.dtype, 16).k}
    assert TEMPLATE.space(workload, B200).check(Config(config)) == []
    numbers = integers(workload, np.random.default_rng(0))
    y = run(monkeypatch, workload, config, {a.name: encode(numbers[a.name], a.dtype) for a in workload.signature})
    np.testing.assert_array_equal(y, convolve(workload, numbers["x"], numbers["weight"]))


@pytest.mark.parametrize("case", PRODUCTS)
def test_products_of_matrices(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    workload, template = PRODUCTS[case], load_template("matmul_tcgen05")
    config = {**SMALL, "bn": 16}
    assert template.space(workload, B200).check(Config(config)) == []
    rng = np.random.default_rng(0)
    arrays = {a.name: rng.integers(0 if a.dtype == "uint8" else -8, 9, a.shape).astype(a.dtype) for a in workload.signature}
    y = run(monkeypatch, workload, config, arrays, by=template)
    factors = arrays["x"].astype(np.int64), arrays["weight"].astype(np.int64)
    np.testing.assert_array_equal(y, factors[0] @ factors[1].swapaxes(-1, -2) + arrays.get("bias", 0))


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
    assert Product("float32", 32).instruction == 1 << 4 | 2 << 7 | 2 << 10 | 4 << 17 | 8 << 24
    assert Product("float8_e4m3", 32, "float8_e5m2").instruction == 1 << 4 | 1 << 10 | 4 << 17 | 8 << 24
    assert Product("int8", 32, "uint8").instruction == 2 << 4 | 1 << 7 | 4 << 17 | 8 << 24
    assert [Product("float16", columns).allocated for columns in (16, 48, 256)] == [32, 64, 256]


def needs_a_compiler() -> None:
    if problem := compilers.chosen().problem():
        pytest.skip(problem)


def test_a_kernel_compiles_to_products_of_tensor_memory_and_tensor_copies() -> None:
    needs_a_compiler()
    workload = Workload.conv2d(n=32, h=28, w=28, c=128, k=128, r=3, s=3, padding=1, epilogue=("bias", "relu"))
    source = TEMPLATE.kernel(workload, B200, Config(bn=128, bk=64, stages=4, band=1))
    text = "\n".join(ptx_of(source, B200))
    assert "tcgen05.mma.cta_group::1.kind::f16" in text and "tcgen05.ld.sync.aligned.32x32b.x32" in text
    assert "cp.async.bulk.tensor.4d" in text and "cp.async.c" not in text and "mma.sync" not in text
    built = compile_source(source, B200)
    assert built.artifact.plan.arch == "sm_100a" and built.resources.local_bytes == 0


@pytest.mark.parametrize(
    ("kind", "change", "cards"),
    [
        (
            "f8f6f4",
            dict(dtype="float8_e4m3", weight_dtype="float8_e5m2", epilogue=["dequantise", "bias"]),
            ["b200", "gb300"],
        ),
        ("tf32", dict(dtype="float32", precision="tf32"), ["gb300"]),
        ("i8", dict(dtype="uint8", weight_dtype="int8", zero_points=["x"], epilogue=["bias", "requantise"]), ["b200"]),
    ],
)
@pytest.mark.long
def test_each_kind_of_products_compiles_without_local_memory(kind: str, change: dict[str, Any], cards: list[str]) -> None:
    needs_a_compiler()
    workload = Workload.conv2d(**{**dict(n=32, h=28, w=28, c=128, k=128, r=3, s=3, padding=1), **change})
    for target in (PRESETS[card] for card in cards):
        assert TEMPLATE.validate(workload, target) is None
        source = TEMPLATE.kernel(workload, target, TEMPLATE.default(workload, target, TEMPLATE.space(workload, target)))
        assert f"tcgen05.mma.cta_group::1.kind::{kind} " in "\n".join(ptx_of(source, target))
        assert compile_source(source, target).resources.local_bytes == 0


def test_integers_are_refused_where_ptxas_compiles_no_such_product() -> None:
    needs_a_compiler()
    workload = Workload.conv2d(n=1, h=8, w=8, c=32, k=32, r=3, s=3, dtype="int8")
    reason = "tcgen05 multiplies int8 on compute capability 10.0, got 10.3; allowed here: float16, bfloat16, float32"
    assert reason in (TEMPLATE.validate(workload, GB300) or "")
    with pytest.raises(CompileError, match=r"'\.kind::i8' not supported on \.target 'sm_103a'"):
        compile_source(TEMPLATE.kernel(workload, GB300, Config(SMALL)), GB300)


@pytest.mark.parametrize("card", ["b200", "gb300"])
def test_every_default_is_legal(card: str) -> None:
    target = PRESETS[card]
    changes = [*FLOAT_CASES.values(), *(change for change, _ in INTEGER_CASES.values() if card == "b200")]
    for shape in (*(shape for shape, _ in CASES.values()), *({**OF_BYTES, **change} for change in changes)):
        workload = Workload.conv2d(**shape)
        assert TEMPLATE.validate(workload, target) is None
        space = TEMPLATE.space(workload, target)
        assert space.check(TEMPLATE.default(workload, target, space)) == []
        assert TEMPLATE.kernel(workload, target, TEMPLATE.default(workload, target, space)).arch == f"{target.architecture}a"


def test_without_records_a_template_that_cards_have_run_comes_first() -> None:
    workload = Workload.conv2d(n=32, h=28, w=28, c=128, k=128, r=3, s=3, padding=1)
    assert [each.name for each in load_templates().matching(workload, B200)] == ["conv2d_mma", TEMPLATE.name]
    names = [each.name for each in load_templates().matching(dense(m=512, n=512, k=512), B200)]
    assert names == ["matmul_mma", "matmul_tcgen05"]


@pytest.mark.parametrize(
    ("card", "changes", "reason"),
    [
        ("h200", {}, "tcgen05 needs compute capability 10, got 9.0"),
        ("rtx5090", {}, "tcgen05 needs compute capability 10, got 12.0"),
        ("b200", {"dtype": "float32"}, "precision is fp32; allowed: tf32"),
        ("b200", {"dtype": "int8", "c": 96, "k": 48, "groups": 2}, "has 48 channels; allowed: multiples of 32"),
        ("b200", {"c": 20}, "a group has 20 channels; allowed: multiples of 8"),
        ("b200", {"c": 48, "k": 48, "groups": 2}, "has 24 channels; allowed: multiples of 16"),
        ("b200", {"layout": "NCHW"}, "layout and weight_layout are NCHW and OIHW; allowed: NHWC and OHWI"),
    ],
)
def test_refusals_say_why(card: str, changes: dict[str, Any], reason: str) -> None:
    workload = Workload.conv2d(**{**dict(n=1, h=8, w=8, c=32, k=32, r=3, s=3), **changes})
    assert reason in (TEMPLATE.validate(workload, PRESETS[card]) or "")
