"""The fused epilogue: its launch parameters, the PTX of each stage, and its arithmetic on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conv2d_numpy import FLOAT_STAGES, expected, from_bits, integers, run_on_gpu
from numba import cuda, types

from schedsearch.backend.cuda import _compile_to_ptx, compile_cuda
from schedsearch.device.detect import detect
from schedsearch.launch import Float32, Grid, Int32, Pointer, Scalar
from schedsearch.target import PRESETS
from schedsearch.template import KernelSource, KernelStep
from schedsearch.templates.conv2d.mma import Conv2dMma
from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.templates.parts.epilogue_fragments import TileRows, store_transposed
from schedsearch.templates.parts.epilogue_text import EpiloguePlan
from schedsearch.templates.parts.stages import epilogue_operands
from schedsearch.workload import Workload

ALL_STAGES = FLOAT_STAGES
DTYPES = [("float16", "float16"), ("float16", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
ZERO = Float32(0.0)


def absent(name: str) -> Pointer:
    return Pointer(name, optional=True)


def conv(*stages: str, k: int = 8, dtype: str = "float16", out_dtype: str | None = None) -> Workload:
    return Workload.conv2d(n=2, h=4, w=5, c=8, k=k, r=1, s=1, dtype=dtype, out_dtype=out_dtype, epilogue=stages)


def step(workload: Workload, form: str) -> KernelStep:
    """A kernel that applies `pair` or `single` to constants."""
    epilogue = Epilogue(workload)
    pair, single, pairs = epilogue.pair, epilogue.single, form == "pair"

    def kernel(y: Any, v0: Any, v1: Any, k: Any, *operands: Any) -> None:
        if pairs:
            y0, y1 = pair(v0, v1, 1, k, k, *operands)
            ptx.store_global_f32x2(y, y0, y1)
        else:
            ptx.store_global_f32(y, single(v0, 1, k, k, *operands))

    return KernelStep(kernel, (Pointer("y"), ZERO, ZERO, Int32(0), *epilogue.params), Grid(1), 32)


def fragments_step(workload: Workload, octets: int) -> KernelStep:
    """A kernel that applies `fragments` to zeros and stores the last pair of the second row."""
    epilogue = Epilogue(workload)
    size = 4 * octets
    fuse = epilogue.fragments(octets, 8 * workload.k)

    def kernel(y: Any, columns: Any, row: Any, k: Any, *operands: Any) -> None:
        acc = cuda.local.array(size, types.float32)
        for i in range(size):
            acc[i] = types.float32(0)
        fuse(acc, columns, row, row, k, k, *operands)
        ptx.store_global_f32x2(y, acc[size - 2], acc[size - 1])

    return KernelStep(kernel, (Pointer("y"), Int32(8), Int32(1), Int32(0), *epilogue.params), Grid(1), 32)


def transposed_step(workload: Workload, octets: int) -> KernelStep:
    """A kernel that applies `transposed` to zeros and stores the last pair of the second channel."""
    epilogue = Epilogue(workload)
    size = 4 * octets
    fuse = epilogue.transposed(octets, TileRows(10, 20 * workload.k, workload.k))

    def kernel(y: Any, rows: Any, staged: Any, k: Any, *operands: Any) -> None:
        acc = cuda.local.array(size, types.float32)
        for i in range(size):
            acc[i] = types.float32(0)
        fuse(acc, 16, rows, 10, 0, staged, k, k, *operands)
        ptx.store_global_f32x2(y, acc[size - 2], acc[size - 1])

    return KernelStep(kernel, (Pointer("y"), Int32(8), Int32(0), Int32(0), *epilogue.params), Grid(1), 32)


def ptx_of(workload: Workload, form: str = "pair") -> str:
    return _compile_to_ptx(step(workload, form), "kernel", "sm_80")


# --- Launch parameters -----------------------------------------------------------------------------------------------
def test_parameters_are_seven_whatever_the_stages() -> None:
    assert Epilogue(conv()).params == (*map(absent, ("bias", "scale", "shift", "residual")), ZERO, ZERO, ZERO)
    assert Epilogue(conv(*ALL_STAGES)).params == (
        Pointer("bias"), Pointer("scale"), Pointer("shift"), Pointer("residual"),
        Scalar("leaky_relu_slope"), Scalar("clip_min"), Scalar("clip_max"),
    )  # fmt: skip
    assert Epilogue(conv("residual", "clip")).params == (
        absent("bias"), absent("scale"), absent("shift"), Pointer("residual"), ZERO, Scalar("clip_min"), Scalar("clip_max"),
    )  # fmt: skip


def test_identity_and_alignments() -> None:
    assert Epilogue(conv()).identity
    assert not Epilogue(conv("relu")).identity
    assert Epilogue(conv("bias", "residual", out_dtype="float32")).alignments == {"bias": 4, "residual": 8}


# --- Its PTX ---------------------------------------------------------------------------------------------------------
def test_sums_of_integers_stay_in_integer_registers() -> None:
    workload = Workload.conv2d(n=1, h=4, w=5, c=8, k=8, r=1, s=1, dtype="int8", epilogue=("bias", "residual", "requantise"))
    epilogue = Epilogue(workload)
    pair, single = epilogue.pair, epilogue.single

    def kernel(y: Any, k: Any, *operands: Any) -> None:
        y0, y1 = pair(k, k, 1, k, k, *operands)
        ptx.store_global_b32x2(y, y0, single(y1, 1, k, k, *operands))

    built = compile_cuda(
        KernelSource(
            "cuda", "native", (KernelStep(kernel, (Pointer("y"), Int32(0), *epilogue.params), Grid(1), 32),)
        ),
        PRESETS["a100"],
    )  # fmt: skip
    assert epilogue.accumulator == "int32"
    assert built.resources.spill_bytes == 0


@pytest.mark.parametrize(("before", "maxima"), [("relu", 0), ("residual", 1)])
def test_requantise_right_after_relu_takes_an_instruction_less(before: str, maxima: int) -> None:
    epilogue = ("relu", "bias", before, "requantise")
    workload = Workload.conv2d(n=1, h=4, w=5, c=8, k=8, r=1, s=1, dtype="int8", epilogue=epilogue)
    requantise = EpiloguePlan.of(workload, epilogue_operands(workload)).stages[-1]
    assert requantise.ptx.count("max.f32") == maxima


@pytest.mark.parametrize(
    ("stage", "instruction", "loads"),
    [
        ("bias", "add.f32", 1),
        ("scale_shift", "fma.rn.f32", 2),
        ("residual", "add.f32", 1),
        ("relu", "max.NaN.f32", 0),
        ("leaky_relu", "selp.f32", 0),
        ("clip", "min.NaN.f32", 0),
    ],
)
def test_a_stage_is_its_instruction_and_its_loads(stage: str, instruction: str, loads: int) -> None:
    pair, single = ptx_of(conv(stage)), ptx_of(conv(stage), "single")
    assert pair.count(instruction) == 2 and single.count(instruction) == 1
    assert pair.count("ld.global.nc.b32") == loads  # two 16-bit values at once
    assert single.count("ld.global.nc.b16") == loads
    assert pair.count("@inside ld.global") == pair.count("ld.global")  # nothing is read where `valid` is 0


@pytest.mark.parametrize(("stage", "loads_of_an_octet"), [("bias", 1), ("scale_shift", 2), ("residual", 2), ("clip", 0)])
def test_rows_of_a_fragment_share_the_operands_of_a_channel(stage: str, loads_of_an_octet: int) -> None:
    text = _compile_to_ptx(fragments_step(conv(stage, k=64), 5), "kernel", "sm_90a")
    loads = [line for line in text.splitlines() if "ld.global" in line]
    assert len(loads) == 5 * loads_of_an_octet and all("@inside" in line or "@column" in line for line in loads)
    second_octet = [line for line in loads if "+16]" in line]  # 8 channels of 2 bytes
    assert len(second_octet) == loads_of_an_octet


@pytest.mark.parametrize(
    ("stage", "out_dtype", "channel_loads", "residual_loads"),
    [
        ("bias", "float16", 2, 0),
        ("scale_shift", "float32", 4, 0),
        ("residual", "float16", 0, 0),
        ("residual", "float32", 0, 20),
    ],
)
def test_transposed_fragments_load_the_operands_of_a_channel_once(
    stage: str, out_dtype: str, channel_loads: int, residual_loads: int
) -> None:
    """5 octets of 8 positions, two channels per thread: a 32-bit residual takes 4 loads per octet, a 16-bit one ldmatrix."""
    text = _compile_to_ptx(transposed_step(conv(stage, k=64, out_dtype=out_dtype), 5), "kernel", "sm_90a")
    lines = text.splitlines()
    loads = [line for line in lines if "ld.global" in line]
    assert len([line for line in loads if ".b16" in line]) == channel_loads
    assert len([line for line in loads if ".f32" in line]) == residual_loads
    assert all("@inside" in line or "@valid" in line for line in loads)
    staged = stage == "residual" and out_dtype == "float16"
    assert [text.count(f"ldmatrix.sync.aligned.m8n8.{n}.trans") for n in ("x4", "x2")] == ([2, 1] if staged else [0, 0])


def test_transposed_float32_is_stored_where_it_lies_inside() -> None:
    """4 values per octet: two neighbouring positions of channels k and k + 8, which are 32 bytes apart."""
    store = store_transposed(5, TileRows(10, 20 * 64, 64))

    def kernel(y: Any, rows: Any) -> None:
        acc = cuda.local.array(20, types.float32)
        for i in range(20):
            acc[i] = types.float32(i)
        store(acc, y, 16, rows, 10, 0, 0)

    text = _compile_to_ptx(KernelStep(kernel, (Pointer("y"), Int32(8)), Grid(1), 32), "kernel", "sm_90a")
    stores = [line for line in text.splitlines() if "st.global.f32" in line]
    assert len(stores) == 20 and all("@valid" in line for line in stores)
    assert sum("+32]" in line for line in stores) == 10


def test_stages_run_in_the_order_of_the_workload() -> None:
    first, second = ptx_of(conv("bias", "relu")), ptx_of(conv("relu", "bias"))
    assert first.index("add.f32") < first.index("max.NaN.f32")
    assert second.index("max.NaN.f32") < second.index("add.f32")
    assert ptx_of(conv("relu", "bias", "relu")).count("max.NaN.f32") == 4


def test_without_stages_there_is_no_arithmetic() -> None:
    text = ptx_of(conv())
    assert "add.f32" not in text and "ld.global" not in text


@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPES)
@pytest.mark.parametrize(("target", "arch"), [("a100", "sm_80"), ("h200", "sm_90a"), ("b200", "sm_100")])
@pytest.mark.mostly_long(15)
def test_all_stages_assemble(dtype: str, out_dtype: str, target: str, arch: str) -> None:
    workload = conv(*ALL_STAGES, dtype=dtype, out_dtype=out_dtype)
    transposed = (transposed_step(workload, 32), transposed_step(workload, 5))
    steps = (step(workload, "pair"), step(workload, "single"), fragments_step(workload, 32), *transposed)
    built = compile_cuda(KernelSource("cuda", arch, steps), PRESETS[target])
    assert built.resources.local_bytes == 0


# --- On the device, inside a convolution -----------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.many(each="stages")
@pytest.mark.parametrize("k", [8, 6, 5], ids="k{}".format)
@pytest.mark.parametrize(("dtype", "out_dtype"), DTYPES)
@pytest.mark.parametrize("stages", [(stage,) for stage in ALL_STAGES] + [ALL_STAGES, ALL_STAGES[::-1]], ids="+".join)
def test_arithmetic_is_exact_and_keeps_nan(stages: tuple[str, ...], dtype: str, out_dtype: str, k: int) -> None:
    template, target = Conv2dMma(), detect("cuda")
    workload = conv(*stages, k=k, dtype=dtype, out_dtype=out_dtype)
    arrays = integers(workload, np.random.default_rng(0))
    arrays["x"][0, 1, 2, 3] = np.nan
    y = run_on_gpu(template, workload, target, template.default(workload, target, template.space(workload, target)), arrays)
    assert np.isnan(from_bits(y[0, 1, 2], out_dtype)).all()
    arrays["x"][0, 1, 2, 3] = 0
    truth = expected(workload, arrays)
    y[0, 1, 2] = truth.bits[0, 1, 2]
    truth.check(y)
