"""conv2d_cpu_int8 is right in every bit: for every layout, sign, zero point, group size, stage and configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import integer_model
import numpy as np
import pytest
from conv2d_support import run_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from integer_cases import FAMILIES, cases, workload_of
from llvmlite import binding as llvm
from long_cases import except_long
from numba import types

from schedsearch.backend.cpu import _optimised_ir, _target_machine
from schedsearch.backend.cpu_dot import DOT_INSTRUCTIONS, dot_instruction, dot_tile_ops
from schedsearch.backend.cpu_ops import as_array
from schedsearch.config import Config
from schedsearch.constructors.convolutions import conv2d
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.launch import Grid, Pointer
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep
from schedsearch.templates.conv2d.cpu_int8 import Conv2dCpuInt8
from schedsearch.workload import Workload

TEMPLATE, HOST = Conv2dCpuInt8(), detect("cpu")
STORAGE = {"bfloat16": "uint16"}


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(HOST)
    yield device
    device.close()


def check(device: CpuDevice, w: Workload, config: Config) -> None:
    assert TEMPLATE.validate(w, HOST) is None
    assert TEMPLATE.space(w, HOST).check(config) == []
    arrays = integer_model.arguments(w)
    scalars = {scalar.name: integer_model.SCALARS[scalar.name] for scalar in w.scalars}
    outputs = {"y": (w.output.shape, STORAGE.get(w.output.dtype, w.output.dtype))}
    y = run_on_cpu(device, TEMPLATE.kernel(w, HOST, config), arrays, outputs, scalars)["y"]
    np.testing.assert_array_equal(y, integer_model.expected(w, arrays), err_msg=f"{w.label} with {config}")


def default(w: Workload, target: Target = HOST) -> Config:
    return TEMPLATE.default(w, target, TEMPLATE.space(w, target))


def drawn(w: Workload, seed: int = 0, **restricted: Any) -> Config:
    space = TEMPLATE.space(w, HOST).restrict({name: [value] for name, value in restricted.items()})
    return space.sample(1, np.random.default_rng(seed))[0]


SMALL: dict[str, Any] = {"n": 2, "h": 8, "w": 9, "c": 24, "k": 20, "r": 3, "s": 2}
CASES: dict[str, dict[str, Any]] = {  # each has several properties, because a case takes two seconds of compiling
    "int8 by int8, zero points, channels that fill no word": {
        **SMALL, "dtype": "int8", "c": 7, "padding": (2, 0, 1, 3), "stride": (2, 1), "zero_points": ["x", "weight"],
    },
    "uint8 by uint8, NCHW, few columns, dilation, unsigned sums": {
        **SMALL, "dtype": "uint8", "w": 4, "layout": "NCHW", "dilation": (2, 3), "padding": 2,
        "epilogue": ["residual", "clip", "bias", "relu"],
    },
    "int8 by uint8, in place, few columns, other layout of weights, bfloat16": {
        **SMALL, "w": 5, "dtype": "int8", "weight_dtype": "uint8", "weight_layout": "OIHW",
        "epilogue": ["bias", {"dequantise": {"to": "bfloat16"}}, "residual", "relu"],
    },
    "uint8 by int8, NCHW6c, groups, requantised to uint8": {
        **SMALL, "dtype": "uint8", "weight_dtype": "int8", "layout": "NCHW6c", "k": 36, "groups": 2, "padding": 1,
        "zero_points": ["x", "weight"], "epilogue": ["bias", "clip", {"requantise": {"to": "uint8"}}],
    },
    "NCHW32c in place, a batch norm, quantised": {
        **SMALL, "dtype": "int8", "layout": "NCHW32c", "c": 64, "k": 64, "r": 1, "s": 1,
        "epilogue": ["bias", "residual", "relu", "dequantise", "scale_shift", {"quantise": {"to": "uint8"}}],
    },
    "uint8 by int8, zero point, a quantised residual": {
        **SMALL, "dtype": "uint8", "weight_dtype": "int8", "layout": "NCHW4c", "padding": 1, "zero_points": ["x"],
        "epilogue": ["bias", {"requantise_add": {"to": "uint8", "middle": "uint8", "residual": "int8", "relu": True}}],
    },
    "depthwise, zero points, float16": {
        **SMALL, "dtype": "uint8", "k": 24, "groups": 24, "padding": 1, "stride": 2, "zero_points": ["x", "weight"],
        "epilogue": [{"dequantise": {"to": "float16"}}, "scale_shift", "residual", "leaky_relu"],
    },
}  # fmt: skip


LONG = ("int8 by uint8, in place, other layout of weights, bfloat16", "NCHW32c in place, a batch norm, quantised")


@pytest.mark.parametrize("case", except_long(CASES, LONG))
@pytest.mark.mostly_long(6)
def test_the_default_is_exact(device: CpuDevice, case: str) -> None:
    w = conv2d(**CASES[case])
    check(device, w, default(w))


def pairs(least: int, most: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(least, most), st.integers(least, most))


OF_INTEGERS = st.lists(st.sampled_from(["bias", "residual", "relu", "clip"]), unique=True)
OF_FLOATS = st.lists(st.sampled_from(["scale_shift", "relu", "leaky_relu"]), unique=True)
BYTES = st.sampled_from(["int8", "uint8"])
ADDED = st.fixed_dictionaries({"to": BYTES, "middle": BYTES, "residual": BYTES, "relu": st.booleans()})
TO_8_BITS = st.one_of(BYTES.map(lambda to: {"requantise": {"to": to}}), ADDED.map(lambda params: {"requantise_add": params}))
TO_FLOATS = st.sampled_from([{"dequantise": {"to": to}} for to in ("float32", "float16", "bfloat16")])


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Small convolutions with anything that the operator has for 8-bit numbers."""
    (r, s), dilation, (over_h, over_w) = draw(pairs(1, 3)), draw(pairs(1, 3)), draw(pairs(0, 9))
    block = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16, 32]))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3, 5]))
    inputs, outputs = draw(st.integers(1, max(1, 40 // block))), draw(st.integers(1, max(1, 40 // block)))
    layout = draw(st.sampled_from(["NHWC", "NCHW", f"NCHW{block}c"]))
    more = {} if "c" in layout else {"weight_layout": draw(st.sampled_from(["OHWI", "OIHW"]))}
    if draw(st.integers(0, 4)) == 0 and "c" not in layout:  # depthwise
        groups, inputs, outputs, block = draw(st.integers(2, 40)), 1, draw(st.sampled_from([1, 2])), 1
    stages: list[Any] = draw(OF_INTEGERS)
    end = draw(st.sampled_from([None, TO_8_BITS, TO_FLOATS]))
    last = [] if end is None else [draw(end)]
    if last and "requantise_add" in last[0]:  # which has the residual
        stages = [stage for stage in stages if stage != "residual"]
    stages = stages + last + (draw(OF_FLOATS) if end is TO_FLOATS else [])
    return conv2d(
        n=draw(st.integers(1, 3)), h=(r - 1) * dilation[0] + 1 + over_h, w=(s - 1) * dilation[1] + 1 + over_w,
        c=groups * inputs * block, k=groups * outputs * block, r=r, s=s, groups=groups, dilation=dilation, layout=layout,
        stride=draw(pairs(1, 3)), padding=(*draw(pairs(0, 3)), *draw(pairs(0, 3))), epilogue=stages,
        dtype=draw(st.sampled_from(["int8", "uint8"])), weight_dtype=draw(st.sampled_from(["int8", "uint8"])),
        zero_points=draw(st.lists(st.sampled_from(["x", "weight"]), unique=True)), **more,
    )  # fmt: skip


@pytest.mark.long
@given(workloads(), st.integers(0, 2**32 - 1))
@settings(max_examples=3, deadline=None, derandomize=True)
def test_random_convolutions_are_exact_with_random_configurations(device: CpuDevice, w: Workload, seed: int) -> None:
    check(device, w, drawn(w, seed))


@pytest.mark.long
def test_a_share_of_the_recorded_cases(device: CpuDevice, shared: Path) -> None:
    """The case of each family with the fewest multiplications: what takes time is compiling a kernel for each."""
    chosen = [min(map(workload_of, cases(shared, family)), key=lambda w: w.flops) for family in FAMILIES]
    for w in dict.fromkeys(chosen):
        check(device, w, default(w))


@pytest.mark.parametrize("instruction", DOT_INSTRUCTIONS)
def test_every_instruction_sums_products_of_four_bytes(device: CpuDevice, instruction: str) -> None:
    """Extreme bytes show saturation: 255 * -128 twice is beyond 16 bits. 32 lanes are more than a vector register has."""
    if DOT_INSTRUCTIONS.index(instruction) < DOT_INSTRUCTIONS.index(dot_instruction()):
        pytest.skip(f"this processor has no {instruction}")
    rows, columns, lanes, depth = 2, 2, 32, 3
    rng = np.random.default_rng(0)
    x = rng.choice(np.array([0, 1, 127, 128, 255], np.uint8), (rows, depth, 4))
    w = rng.choice(np.array([-128, -1, 0, 127], np.int8), (depth, columns * lanes, 4))
    ops = dot_tile_ops(
        rows, columns, lanes, depth, x_row_bytes=4 * depth, flip_x=False, x_sums=True, instruction=instruction
    )
    zero, multiply_add, spill = ops.zero, ops.multiply_add, ops.spill
    width = (columns + 1) * lanes

    def kernel(x, w, y, start, stop):  # type: ignore[no-untyped-def]
        found = as_array(spill(multiply_add(zero(), types.int64(x), types.int64(w))), (rows, width), types.int32)
        out = as_array(y, (rows, width), types.int32)
        for i in range(rows):
            for j in range(width):
                out[i, j] = found[i, j]

    source = KernelSource("cpu", "native", (KernelStep(kernel, (Pointer("x"), Pointer("w"), Pointer("y")), Grid(1), 1),))
    y = run_on_cpu(device, source, {"x": x, "w": w}, {"y": ((rows, width), np.int32)})["y"]
    np.testing.assert_array_equal(y[:, :-lanes], np.einsum("idb,dkb->ik", x.astype(np.int64), w.astype(np.int64)))
    np.testing.assert_array_equal(y[:, -lanes:], np.repeat(x.sum(axis=(1, 2), dtype=np.int64)[:, None], lanes, 1))


def test_the_instruction_follows_from_the_processor() -> None:
    assert dot_instruction({"avx512vnni": True, "avx512vl": True, "sse2": True}) == "vpdpbusd"
    assert dot_instruction({"avxvnni": True, "avx2": True, "sse2": True}) == "vpdpbusd"
    assert dot_instruction({"avx512vnni": True, "sse2": True}) == "vpmaddwd"
    assert dot_instruction({"avx2": True, "sse2": True}) == "vpmaddwd"
    assert dot_instruction({"neon": True}) == "plain"


@pytest.mark.skipif(dot_instruction() != "vpdpbusd", reason="this processor has no VNNI")
def test_the_inner_loop_is_vnni() -> None:
    w = conv2d(n=1, h=14, w=14, c=64, k=64, r=3, s=3, padding=1, dtype="int8")
    config = default(w)
    step = TEMPLATE.kernel(w, HOST, config).steps[-1]
    assembly = _target_machine().emit_assembly(llvm.parse_assembly(_optimised_ir(step, "f")))
    register = "zmm" if HOST.simd_bits >= 512 else "ymm"
    found = re.findall(rf"vpdpbusd\s.*%{register}", assembly)
    assert len(found) >= config["ow_tile"] * config["oc_vectors"] * config["unroll"]


TARGETS = [HOST, Target("cpu", "AVX2", sms=4, simd_bits=256), Target("cpu", "NEON", sms=64, simd_bits=128)]


@pytest.mark.parametrize("target", TARGETS, ids=["host", "avx2", "128 bits"])
def test_the_default_and_the_plain_configuration_are_legal_everywhere(target: Target) -> None:
    layers = [*CASES.values(), {"n": 1, "h": 7, "w": 7, "c": 512, "k": 2048, "r": 1, "s": 1, "dtype": "uint8"}]
    for layer in layers:
        w = conv2d(**layer)
        space = TEMPLATE.space(w, target)
        plain = TEMPLATE.plain(w, target, space)
        assert space.check(TEMPLATE.default(w, target, space)) == []
        assert plain is not None and space.check(plain) == []


def test_floats_are_refused_with_a_reason() -> None:
    reason = TEMPLATE.validate(conv2d(**{**SMALL, "dtype": "float32"}), HOST)
    assert reason == "dtype is float32; allowed: int8, uint8"


def test_weights_are_packed_once_if_the_caller_prepares_them() -> None:
    w = conv2d(**SMALL, dtype="int8", padding=1)
    assert [(step.function.__name__, step.constant) for step in TEMPLATE.kernel(w, HOST, default(w)).steps] == [
        ("pack_x", False), ("pack_weight", True), ("convolve", False),
    ]  # fmt: skip
