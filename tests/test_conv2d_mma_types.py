"""conv2d_mma with integers, with float32 as TF32, and in every layout: emulated, compiled, and run on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import integer_model
import numpy as np
import pytest
from conv2d_numpy import numpy_conv2d
from conv2d_support import run_on_cpu
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from mma_emulated import emulate

from schedsearch.backend import compile_source
from schedsearch.backend.ops import operands_and_text
from schedsearch.config import Config
from schedsearch.constructors.convolutions import conv2d
from schedsearch.device.detect import detect
from schedsearch.launch import MAX_GRID_X
from schedsearch.ops.dtypes import encode
from schedsearch.ops.layout import Layout
from schedsearch.ops.sum_of_products import accumulator_dtype
from schedsearch.target import PRESETS, Target
from schedsearch.templates.conv2d.mma import Conv2dMma
from schedsearch.templates.conv2d.mma_sizes import Gemm
from schedsearch.templates.parts.mma import Mma
from schedsearch.workload import Workload

TEMPLATE, H200 = Conv2dMma(), PRESETS["h200"]
AMPERE_86 = Target("cuda", "RTX 3090", (8, 6), 82, 101376, 102400, 65536, 1536)
Array = np.ndarray[Any, Any]
SMALL = dict(bm=32, bn=32, bk=64, wm=16, wn=32, stages=3, slices=1, band=1, persistent=False, blocks_per_sm=1)
REQUANTISED = ("bias", "residual", {"requantise": {"to": "int8"}})


# --- Integers ------------------------------------------------------------------------------------------------------
BASE: dict[str, Any] = dict(n=2, h=5, w=4, c=32, k=32, r=3, s=2, padding=1, stride=(1, 2), dtype="int8")
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "16-byte pieces": (BASE, SMALL),
    "uint8 x uint8, two slices": (dict(BASE, dtype="uint8", dilation=(1, 2)), dict(SMALL, slices=2)),
    "uint8 x int8, 8-byte pieces": (dict(BASE, dtype="uint8", weight_dtype="int8", c=24, k=20), SMALL),
    "int8 x uint8, 4-byte pieces, odd k": (dict(BASE, weight_dtype="uint8", c=12, k=19), SMALL),
    "2-byte pieces, padding on one side": (dict(BASE, c=6, k=10, padding=(0, 2, 1, 0)), SMALL),
    "rgb, requantised, residual": (dict(BASE, c=3, k=5, epilogue=REQUANTISED), dict(SMALL, bk=32)),
    "requantised by fours, two slices": (dict(BASE, k=36, epilogue=REQUANTISED), dict(SMALL, slices=2)),
    "zero point": (dict(BASE, zero_points=["x"], c=16, epilogue=REQUANTISED), SMALL),
    "zero point, sums by pairs": (dict(BASE, zero_points=["x"], c=5, k=6, dtype="uint8", weight_dtype="int8"), SMALL),
    "NCHW4c, zero point": (
        dict(BASE, zero_points=["x"], layout="NCHW4c", c=8, k=8, groups=2, epilogue=REQUANTISED),
        dict(SMALL, merged=2),
    ),
    "zero points of both, borders of two rows, sums by fours": (
        dict(BASE, zero_points=["x", "weight"], padding=(2, 1, 1, 2), weight_dtype="uint8", epilogue=REQUANTISED), SMALL
    ),
    "zero points of both, merged groups of 3 and 5 channels, sums by ones": (
        dict(BASE, zero_points=["x", "weight"], c=12, k=20, groups=4, dtype="uint8"), dict(SMALL, merged=4)
    ),
    "zero point of the weight, NCHW, sums by pairs": (
        dict(BASE, zero_points=["weight"], layout="NCHW", c=6, k=6, dilation=(1, 2), weight_dtype="uint8"), SMALL
    ),
    "zero point of the weight, NCHW8c, two groups": (
        dict(BASE, zero_points=["weight"], layout="NCHW8c", c=16, k=16, groups=2), dict(SMALL, merged=2)
    ),
    "NCHW12c": (dict(BASE, layout="NCHW12c", c=24, k=36), SMALL),
    "NCHW16c, bound batch, persistent": (
        dict(BASE, layout="NCHW16c", c=48, h=7, epilogue=REQUANTISED),
        dict(SMALL, batch="bound", persistent=True),
    ),
    "NCHW32c, groups": (dict(BASE, layout="NCHW32c", c=64, k=64, groups=2), dict(SMALL, bk=32, band=8)),
    "NCHW": (dict(BASE, layout="NCHW", c=6, k=7, epilogue=REQUANTISED), dict(SMALL, bk=32)),
    "OIHW": (dict(BASE, weight_layout="OIHW", c=20), SMALL),
    "depthwise, merged": (dict(BASE, c=32, k=32, groups=32), dict(SMALL, merged=16, bn=16, wn=16)),
    "small groups, merged, two outputs each": (dict(BASE, c=12, k=8, groups=4, epilogue=REQUANTISED), dict(SMALL, merged=4)),
    "single channels": (dict(BASE, c=3, k=3, groups=3), dict(SMALL, bn=16, wn=16, bk=32)),
}  # fmt: skip


def complete(w: Workload, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the values of the further knobs of the workload's space."""
    further = {"batch": "folded", "merged": 1, "loads": "copies"}
    return {name: config.get(name, further.get(name)) for name in TEMPLATE.space(w, H200).names}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.mostly_long(4)
def test_sums_and_requantised_numbers_are_exact(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    shape, config = CASES[case]
    w = conv2d(**shape)
    assert TEMPLATE.validate(w, H200) is None
    arrays = integer_model.arguments(w)
    late = len(case) % 2 == 0
    y = emulate(monkeypatch, w, complete(w, config), arrays, late=late)
    np.testing.assert_array_equal(y, integer_model.expected(w, arrays))


@st.composite
def small_convolutions(draw: st.DrawFn) -> tuple[Workload, int]:
    """A workload of integers that the emulator computes in a fraction of a second, and a seed of its configuration."""
    groups, block = draw(st.sampled_from([1, 2, 3, 8])), draw(st.sampled_from([0, 1, 4, 12, 16]))
    w = conv2d(
        n=draw(st.integers(1, 3)), h=draw(st.integers(1, 4)), w=draw(st.integers(1, 4)),
        c=groups * max(block, 1) * draw(st.integers(1, 3)), k=groups * max(block, 1) * draw(st.sampled_from([1, 3])),
        r=draw(st.integers(1, 3)), s=draw(st.integers(1, 3)), padding=draw(st.sampled_from([1, (2, 1, 1, 2)])),
        stride=draw(st.integers(1, 2)), groups=groups, layout={0: "NHWC", 1: "NCHW"}.get(block, f"NCHW{block}c"),
        dtype=draw(st.sampled_from(["int8", "uint8"])), weight_dtype=draw(st.sampled_from(["int8", "uint8"])),
        zero_points=draw(st.sampled_from([[], ["x"], ["x", "weight"]])),
        epilogue=draw(st.sampled_from([[], ["residual"], REQUANTISED])),
    )  # fmt: skip
    return w, draw(st.integers(0, 99))


@given(drawn=small_convolutions())
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.long
def test_random_convolutions_are_exact_with_random_configurations(drawn: tuple[Workload, int]) -> None:
    w, seed = drawn
    small = TEMPLATE.space(w, H200).restrict({"bm": [16, 32], "bn": [16], "persistent": [False]})
    config = small.sample(1, np.random.default_rng(seed))[0]
    arrays = integer_model.arguments(w, seed)
    with pytest.MonkeyPatch.context() as monkeypatch:
        y = emulate(monkeypatch, w, config, arrays, late=seed % 2 == 0)
    np.testing.assert_array_equal(y, integer_model.expected(w, arrays), err_msg=f"{w.label} {config}")


def test_sums_wrap_around_like_those_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    w = conv2d(n=1, h=1, w=1, c=40_000, k=1, r=1, s=1, dtype="uint8")
    arrays = {"x": np.full(w.signature[0].shape, 255, np.uint8), "weight": np.full(w.signature[1].shape, 255, np.uint8)}
    assert 2**31 < 40_000 * 255 * 255 < 2**32 and w.output.dtype == accumulator_dtype("uint8", "uint8", ()) == "uint32"
    config = dict(bm=16, bn=16, bk=256, wm=16, wn=16, slices=1, stages=2, band=1, persistent=False, blocks_per_sm=1)
    y = emulate(monkeypatch, w, complete(w, config), arrays)
    assert y.item() == 40_000 * 255 * 255


# --- float32 ------------------------------------------------------------------------------------------------------------
def drawn(w: Workload) -> dict[str, Array]:
    """x and weight in float32, normal, in the workload's layouts."""
    rng = np.random.default_rng(0)
    return {argument.name: rng.standard_normal(argument.shape).astype(np.float32) for argument in w.signature}


def convolved(w: Workload, arrays: dict[str, Array]) -> Array:
    """The convolution of float32 arrays in float64, in the workload's layout."""
    inner = w.replace(layout="NHWC", weight_layout="OHWI", dtype="float32", weight_dtype="float32", out_dtype="float32")
    sizes = {"N": w.n, "H": w.h, "W": w.w, "C": w.c}, {"O": w.k, "I": w.c // w.groups, "H": w.r, "W": w.s}
    x = Layout.parse(w.layout).unpack(arrays["x"], sizes[0], "NHWC")
    weight = Layout.parse(w.weight_layout).unpack(arrays["weight"], sizes[1], "OHWI")
    return Layout.parse(w.layout).pack(numpy_conv2d(inner, {"x": x, "weight": weight}), "NHWC")


def assert_float32_errors(w: Workload, arrays: dict[str, Array], y: Array) -> None:
    """Errors relative to the sum of magnitudes. TF32 rounds each factor by up to 2^-11 of it, and is seen to do so."""
    error = np.abs(y - convolved(w, arrays)) / convolved(w, {name: np.abs(array) for name, array in arrays.items()})
    of_sums = w.work.reduction * 2.0**-24
    if w.precision == "tf32":
        assert 2.0**-16 < error.max() <= 2.0**-10 + of_sums
    else:
        assert error.max() <= of_sums


FLOAT: dict[str, Any] = dict(n=2, h=5, w=4, c=24, k=20, r=3, s=2, padding=1, dtype="float32")
TF32_SMALL = dict(SMALL, bk=16)


@pytest.mark.parametrize(
    ("change", "config"),
    [
        ({}, {}),
        ({"layout": "NCHW4c", "batch": "bound"}, {"slices": 2}),
        ({"layout": "NCHW", "c": 3, "k": 5}, {}),
        ({"c": 8, "k": 8, "groups": 4}, {"merged": 4, "bk": 8}),
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["tf32", "fp32"])
@pytest.mark.mostly_long(3)
def test_float32_has_the_errors_of_its_precision(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], config: dict[str, Any], precision: str
) -> None:
    change = dict(change)
    batch = change.pop("batch", "folded")
    w = conv2d(**{**FLOAT, **change, "precision": precision})
    arrays = drawn(w)
    y = emulate(monkeypatch, w, complete(w, {**TF32_SMALL, **config, "batch": batch}), arrays)
    assert_float32_errors(w, arrays, y)


@pytest.mark.parametrize(("dtype", "weight_dtype"), [("float8_e4m3", "float8_e4m3"), ("float8_e5m2", "float8_e4m3")])
def test_float8_is_multiplied_exactly(monkeypatch: pytest.MonkeyPatch, dtype: str, weight_dtype: str) -> None:
    w = conv2d(**{**BASE, "c": 10, "k": 9, "dtype": dtype, "weight_dtype": weight_dtype, "out_dtype": "float32"})
    rng = np.random.default_rng(0)
    numbers = {a.name: rng.integers(-3, 4, a.shape).astype(np.float32) for a in w.signature}
    stored = {a.name: encode(numbers[a.name], a.dtype) for a in w.signature}
    y = emulate(monkeypatch, w, complete(w, SMALL), stored)
    np.testing.assert_array_equal(y, convolved(w, numbers))


def test_an_instruction_takes_32_bytes_of_k_whatever_the_dtype() -> None:
    def instructions(mma: Mma) -> list[str]:
        declared = operands_and_text(mma.multiply(32, 32, 128))
        assert declared is not None
        return [word for word in declared[1].split() if word.startswith("mma.sync")]

    tiles = 2 * 4
    assert instructions(Mma("float16")) == tiles * ["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"]
    assert instructions(Mma("float32")) == tiles * ["mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"]
    assert instructions(Mma("float32", products=3)) == 3 * instructions(Mma("float32"))
    assert instructions(Mma("int8", "uint8")) == tiles * ["mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32"]


# --- Compiling -----------------------------------------------------------------------------------------------------------
LAYER: dict[str, Any] = dict(n=32, h=28, w=28, c=128, k=128, r=3, s=3, padding=1)
COMPILED: list[tuple[Target, dict[str, Any]]] = [
    (PRESETS["a100"], dict(LAYER, dtype="int8", epilogue=["bias", "residual", "relu", "requantise"])),
    (AMPERE_86, dict(LAYER, dtype="uint8", weight_dtype="int8", layout="NCHW32c", zero_points=["x"], epilogue=REQUANTISED)),
    (PRESETS["a100"], dict(LAYER, dtype="uint8", zero_points=["x", "weight"], epilogue=["bias", "relu", "requantise"])),
    (H200, dict(LAYER, dtype="int8", c=3, k=65, epilogue=[{"dequantise": {"to": "float16"}}, "scale_shift", "quantise"])),
    (PRESETS["a100"], dict(LAYER, dtype="int8", epilogue=["bias", {"requantise_add": {"relu": True}}])),
    (AMPERE_86, dict(LAYER, dtype="float32", precision="tf32", epilogue=["bias", "relu"])),
    (H200, dict(LAYER, dtype="float32")),
    (H200, dict(LAYER, dtype="float8_e4m3", epilogue=["dequantise", "bias"])),
    (PRESETS["rtx4090"], dict(LAYER, dtype="float8_e4m3", epilogue=["dequantise", "bias"])),
    (PRESETS["rtx5090"], dict(LAYER, dtype="float8_e5m2", weight_dtype="float8_e4m3")),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("target", "shape"), COMPILED, ids=lambda v: v.name if isinstance(v, Target) else conv2d(**v).label)
def test_the_default_compiles_without_spills_or_local_memory(target: Target, shape: dict[str, Any]) -> None:
    w = conv2d(**shape)
    assert TEMPLATE.validate(w, target) is None
    source = TEMPLATE.kernel(w, target, TEMPLATE.default(w, target, TEMPLATE.space(w, target)))
    resources = compile_source(source, target).resources
    assert resources.local_bytes == resources.spill_bytes == 0


# --- Supported workloads -------------------------------------------------------------------------------------------------
@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    dtype = draw(st.sampled_from(["int8", "uint8", "float32", "float8_e4m3"]))
    groups, block = draw(st.sampled_from([1, 1, 2, 3, 32])), draw(st.sampled_from([0, 1, 4, 12, 32]))
    layout = {0: "NHWC", 1: "NCHW"}.get(block, f"NCHW{block}c")
    r, s = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    whole = dtype in ("int8", "uint8")
    return conv2d(
        n=draw(st.sampled_from([1, 2, 7, 100_000])), h=draw(st.integers(1, 300)), w=draw(st.integers(1, 300)),
        c=groups * max(block, 1) * draw(st.sampled_from([1, 2, 3, 16, 64])),
        k=groups * max(block, 1) * draw(st.sampled_from([1, 2, 3, 5, 64])),
        r=r, s=s, padding=(2 * r, 2 * s), dilation=draw(st.integers(1, 2)), stride=draw(st.integers(1, 3)),
        groups=groups, dtype=dtype, layout=layout,
        weight_dtype=draw(st.sampled_from(["int8", "uint8"])) if whole else None,
        zero_points=draw(st.sampled_from([[], ["x"]])) if whole else [],
        precision=draw(st.sampled_from(["fp32", "tf32"])) if dtype == "float32" else "fp32",
    )  # fmt: skip


@given(w=workloads(), target=st.sampled_from(list(PRESETS.values())))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_default_is_legal_and_its_grids_are_possible(w: Workload, target: Target) -> None:
    assume(not w.dtype.startswith("float8") or target.compute_capability >= (8, 9))
    assert TEMPLATE.validate(w, target) is None
    space = TEMPLATE.space(w, target)
    config = TEMPLATE.default(w, target, space)
    assert space.check(config) == []
    for step in TEMPLATE.kernel(w, target, config).steps:
        assert 1 <= step.grid.blocks(target.sms) <= MAX_GRID_X


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3"])
@pytest.mark.parametrize(("k", "size"), [(64, 150), (128, 87), (256, 87)])
def test_threads_of_a_default_that_copies_small_pieces_have_enough_registers(dtype: str, k: int, size: int) -> None:
    """One channel is a piece, and split products and widened float8 take more registers than other fragments."""
    layer = conv2d(n=1, h=size, w=size, c=1, k=k, r=3, s=3, dtype=dtype)
    for target in PRESETS.values():
        if TEMPLATE.validate(layer, target) is None:
            space = TEMPLATE.space(layer, target)
            assert space.check(TEMPLATE.default(layer, target, space)) == []


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - {"a100"}))
def test_fragments_of_float8_take_more_registers_only_where_they_are_widened(preset: str) -> None:
    """Code for compute capability 8.9 and 12 has QMMA, which takes four numbers in a register; other code has HMMA, behind
    conversions to fp16."""
    target = PRESETS[preset]
    widened = target.compute_capability not in ((8, 9), (12, 0))
    of_512_threads = dict(SMALL, bm=128, bn=128, wm=32, stages=2, loads="copies", batch="folded")
    problems = TEMPLATE.space(conv2d(**{**LAYER, "dtype": "float8_e4m3"}), target).check(of_512_threads)
    assert ["registers (estimated)" in each for each in problems] == [True] * widened
    for shape in (LAYER, dict(LAYER, c=1, padding=0, k=256), dict(LAYER, k=32), dict(LAYER, n=256)):
        layer = conv2d(**{**shape, "dtype": "float8_e4m3"})
        space = TEMPLATE.space(layer, target)
        assert space.check(TEMPLATE.default(layer, target, space)) == []


def test_the_first_workloads_have_no_further_knobs() -> None:
    names = ["bm", "bn", "bk", "wm", "wn", "slices", "stages", "band", "persistent", "blocks_per_sm", "loads"]
    assert TEMPLATE.space(conv2d(**{**LAYER, "groups": 32}), H200).names == tuple(names)
    more = TEMPLATE.space(conv2d(**{**LAYER, "dtype": "int8", "groups": 32}), H200)
    assert more.names == (*names, "batch", "merged")
    assert more.knobs[-1].values == (1, 2, 4, 8, 16, 32)


def test_merged_groups_fill_a_chunk_and_a_tile() -> None:
    w = conv2d(**{**LAYER, "dtype": "int8", "groups": 128})
    assert TEMPLATE.default(w, H200, TEMPLATE.space(w, H200))["merged"] == 16
    assert [Gemm.of(w, merged).piece_x for merged in (1, 4, 16)] == [1, 4, 16]


# --- On the device -------------------------------------------------------------------------------------------------------
def on_device(w: Workload, configs: list[Config], arrays: dict[str, Array]) -> Iterator[Array]:
    """y of each configuration."""
    from schedsearch.device import open_device

    target = detect("cuda")
    scalars = {scalar.name: integer_model.SCALARS[scalar.name] for scalar in w.scalars}
    device = open_device(target)
    try:
        for config in configs:
            source = TEMPLATE.kernel(w, target, config)
            yield run_on_cpu(device, source, arrays, {"y": (w.output.shape, w.output.dtype)}, scalars)["y"]
    finally:
        device.close()


def some_configs(w: Workload, count: int, rng: np.random.Generator) -> list[Config]:
    target = detect("cuda")
    space = TEMPLATE.space(w, target)
    return [TEMPLATE.default(w, target, space), *space.sample(count, rng)]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["tf32", "fp32"])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NCHW4c"])
def test_float32_on_the_device_has_the_errors_of_its_precision(precision: str, layout: str) -> None:
    w = conv2d(n=2, h=14, w=13, c=64, k=40, r=3, s=3, padding=1, dtype="float32", precision=precision, layout=layout)
    arrays = drawn(w)
    for y in on_device(w, some_configs(w, 1, np.random.default_rng(0)), arrays):
        assert_float32_errors(w, arrays, y)
