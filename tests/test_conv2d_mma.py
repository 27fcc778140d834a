"""conv2d_mma supports every convolution: it is emulated, compiled for three architectures, and run on a GPU if present."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conv2d_numpy import convolve, expected, integers, run_on_gpu, to_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from mma_emulated import emulate

from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.device.detect import detect
from schedsearch.launch import MAX_GRID_X, LaunchPlan
from schedsearch.target import PRESETS, Target
from schedsearch.templates.conv2d.mma import Conv2dMma
from schedsearch.templates.conv2d.mma_kernel import swizzle
from schedsearch.templates.conv2d.mma_sizes import Gemm
from schedsearch.workload import Workload

TEMPLATE = Conv2dMma()
H200 = PRESETS["h200"]
ALL_STAGES = ("bias", "scale_shift", "residual", "leaky_relu", "clip")

# One workload for each way of loading and storing, with tails along every axis.
SHAPES: dict[str, dict[str, Any]] = {
    "c32": dict(n=1, h=6, w=5, c=32, k=24, r=3, s=3, padding=1),
    "c8 of 16-byte chunks across taps": dict(n=2, h=7, w=6, c=8, k=24, r=3, s=2, padding=(1, 0, 2, 1), stride=(2, 1)),
    "c12 of 8-byte pieces": dict(n=2, h=5, w=6, c=12, k=6, r=3, s=2, dilation=(1, 2), padding=1),
    "c6 of 4-byte pieces": dict(n=1, h=7, w=6, c=6, k=10, r=2, s=3, padding=(0, 2, 1, 0)),
    "rgb": dict(n=2, h=9, w=8, c=3, k=16, r=5, s=5, stride=2, padding=2),
    "one channel in and out": dict(n=3, h=5, w=4, c=1, k=1, r=3, s=1, padding=(1, 0)),
    "odd k": dict(n=1, h=4, w=4, c=16, k=19, r=1, s=1),
    "groups": dict(n=1, h=5, w=5, c=24, k=12, r=3, s=3, padding=1, groups=3),
    "depthwise": dict(n=2, h=5, w=4, c=6, k=6, r=3, s=3, padding=1, groups=6),
    "fp32 out": dict(n=1, h=5, w=5, c=16, k=20, r=1, s=3, padding=(0, 1), out_dtype="float32"),
    "NCHW, groups": dict(n=2, h=5, w=4, c=12, k=10, r=3, s=2, padding=1, groups=2, layout="NCHW"),
    "fp32 out, odd k": dict(n=1, h=5, w=5, c=5, k=7, r=2, s=2, out_dtype="float32"),
}
SMALL = dict(
    bm=32, bn=32, bk=32, wm=16, wn=32, stages=3, slices=1, band=1, persistent=False, blocks_per_sm=1, loads="copies"
)  # fmt: skip
SCHEDULES = [
    SMALL,
    {**SMALL, "bm": 16, "bn": 16, "wn": 16, "bk": 16, "stages": 2},
    {**SMALL, "bm": 16, "bn": 16, "wn": 16, "bk": 64, "stages": 4, "slices": 4},
    {**SMALL, "bm": 16, "wm": 16, "bk": 128, "stages": 2, "slices": 2},
    {**SMALL, "bm": 16, "wn": 16, "bk": 16, "band": 8},
    {**SMALL, "bm": 64, "wm": 32, "bn": 16, "wn": 16, "stages": 4, "persistent": True},
]


def emulated(
    monkeypatch: pytest.MonkeyPatch, workload: Workload, config: dict[str, Any], late: bool
) -> tuple[Any, dict[str, Any]]:
    """y of one configuration without an epilogue, in `to_bits` form, and the arrays that it was computed from."""
    arrays = integers(workload, np.random.default_rng(0))
    stored = {name: array.astype(np.float16) for name, array in arrays.items()}
    return to_bits(emulate(monkeypatch, workload, config, stored, late=late), workload.out_dtype), arrays


@pytest.mark.parametrize("late_copies", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.mostly_long(3)
def test_every_way_of_loading_and_storing_computes_the_convolution(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any], late_copies: bool
) -> None:
    workload = Workload.conv2d(**shape)
    y, arrays = emulated(monkeypatch, workload, SMALL, late_copies)
    expected(workload, arrays).check(y)


@pytest.mark.parametrize("late_copies", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.mostly_long(6)
def test_every_schedule_computes_the_same(
    monkeypatch: pytest.MonkeyPatch, schedule: dict[str, Any], late_copies: bool
) -> None:
    workload = Workload.conv2d(n=3, h=8, w=7, c=48, k=40, r=3, s=3, padding=1, stride=(1, 2), groups=2)
    TEMPLATE.space(workload, H200).restrict({}).require(
        Config({**schedule, "persistent": False, "blocks_per_sm": 1, "band": 1})
    )
    y, arrays = emulated(monkeypatch, workload, schedule, late_copies)
    expected(workload, arrays).check(y)


@pytest.mark.parametrize("chunks", [2, 4, 8, 16])
def test_swizzle_spreads_eight_rows_over_all_banks_and_keeps_chunks_apart(chunks: int) -> None:
    flip = swizzle(chunks)
    for first in range(0, 64, 8):
        for chunk in range(chunks):
            at = [(row * chunks + (chunk ^ flip(row))) % 8 for row in range(first, first + 8)]
            assert sorted(at) == list(range(8))
    for row in range(32):
        assert sorted(chunk ^ flip(row) for chunk in range(chunks)) == list(range(chunks))


# --- Compiling -------------------------------------------------------------------------------------------------------
COMPILED: list[dict[str, Any]] = [
    dict(n=32, h=56, w=56, c=64, k=64, r=3, s=3, padding=1, epilogue=("bias", "relu")),
    dict(n=1, h=14, w=14, c=256, k=256, r=3, s=3, padding=1, dtype="bfloat16"),
    dict(n=32, h=224, w=224, c=3, k=64, r=7, s=7, stride=2, padding=3, epilogue=ALL_STAGES),
    dict(n=32, h=14, w=14, c=36, k=21, r=3, s=3, padding=1, out_dtype="float32", epilogue=ALL_STAGES),
    dict(n=8, h=28, w=28, c=96, k=96, r=3, s=3, padding=1, groups=96, epilogue=("relu",)),
    dict(n=2**22, h=32, w=32, c=8, k=8, r=1, s=1),  # 2**32 pixels need 64-bit counts
]
# The H200 compiles every one, the others the first; the contract tests compile a tail for an A100.
SHAPES_OF = {"h200": COMPILED, "b200": COMPILED[:1], "a100": COMPILED[:1]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "shape"),
    [(PRESETS[name], shape) for name, shapes in SHAPES_OF.items() for shape in shapes],
    ids=lambda value: value.name if isinstance(value, Target) else Workload.conv2d(**value).label,
)
def test_the_default_compiles_without_spills_or_local_memory(target: Target, shape: dict[str, Any]) -> None:
    workload = Workload.conv2d(**shape)
    config = TEMPLATE.default(workload, target, TEMPLATE.space(workload, target))
    built = compile_source(TEMPLATE.kernel(workload, target, config), target)
    assert built.resources.local_bytes == 0
    assert built.resources.spill_bytes == 0
    assert built.resources.registers * built.artifact.plan.steps[0].block_threads <= target.registers_per_sm
    plan = built.artifact.plan
    assert LaunchPlan.from_json(plan.to_json()) == plan
    assert plan.arch == f"sm_{target.compute_capability[0]}{target.compute_capability[1]}"


@pytest.mark.long
def test_a_sampled_configuration_of_a_common_shape_compiles() -> None:
    workload = Workload.conv2d(n=32, h=28, w=28, c=128, k=128, r=3, s=3, padding=1, epilogue=("bias", "residual", "relu"))
    (config,) = TEMPLATE.space(workload, H200).sample(1, np.random.default_rng(3))
    built = compile_source(TEMPLATE.kernel(workload, H200, config), H200)
    assert built.resources.local_bytes == 0, config


def test_the_fast_path_is_made_of_tensor_core_and_asynchronous_copy_instructions() -> None:
    from schedsearch.backend.cuda import _compile_to_ptx

    workload = Workload.conv2d(n=32, h=56, w=56, c=64, k=64, r=3, s=3, padding=1)
    config = TEMPLATE.default(workload, H200, TEMPLATE.space(workload, H200))
    text = _compile_to_ptx(TEMPLATE.kernel(workload, H200, config).steps[0], "kernel", "sm_90")
    warp_tiles = config["wm"] // 16 * config["wn"] // 8 * config["bk"] // 16 // config["slices"]
    assert text.count("mma.sync.aligned.m16n8k16") == warp_tiles
    assert "cp.async.cg.shared.global.L2::128B" in text and "ldmatrix.sync.aligned.m8n8.x4" in text
    assert "st.global.v4" in text and "st.global.b16" not in text


# --- Supported workloads ---------------------------------------------------------------------------------------------
@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    groups = draw(st.sampled_from([1, 1, 1, 2, 3, 32]))
    r, s = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    dtype = draw(st.sampled_from(["float16", "bfloat16"]))
    return Workload.conv2d(
        n=draw(st.sampled_from([1, 2, 7, 32, 256, 100_000])),
        h=draw(st.integers(1, 300)),
        w=draw(st.integers(1, 300)),
        c=groups * draw(st.sampled_from([1, 2, 3, 4, 8, 12, 48, 64, 100, 512, 2048])),
        k=groups * draw(st.sampled_from([1, 2, 3, 5, 8, 64, 100, 1000])),
        r=r,
        s=s,
        stride=(draw(st.integers(1, 8)), draw(st.integers(1, 3))),
        padding=(2 * r, draw(st.integers(2 * s, 2 * s + 3)), 2 * r, 2 * s),
        dilation=draw(st.integers(1, 4)),
        groups=groups,
        dtype=dtype,
        out_dtype=draw(st.sampled_from([dtype, "float32"])),
    )


@given(workload=workloads(), target=st.sampled_from(list(PRESETS.values())))
@settings(max_examples=150, deadline=None)
def test_the_default_is_legal_and_its_grid_is_possible(workload: Workload, target: Target) -> None:
    assert TEMPLATE.validate(workload, target) is None
    config = TEMPLATE.default(workload, target, TEMPLATE.space(workload, target))
    assert TEMPLATE.space(workload, target).check(config) == []
    grid = TEMPLATE.kernel(workload, target, config).steps[0].grid
    assert 1 <= grid.blocks(target.sms) <= MAX_GRID_X


def test_small_batches_get_more_and_smaller_tiles() -> None:
    def tiles(n: int) -> tuple[int, int]:
        workload = Workload.conv2d(n=n, h=14, w=14, c=256, k=256, r=3, s=3, padding=1)
        config = TEMPLATE.default(workload, H200, TEMPLATE.space(workload, H200))
        return config["bm"] * config["bn"], TEMPLATE.kernel(workload, H200, config).steps[0].grid.work_items

    assert tiles(1)[0] < tiles(32)[0]
    assert tiles(1)[1] > H200.sms // 2


def test_alignments_are_those_of_the_widest_access() -> None:
    def alignments(**shape: Any) -> dict[str, int]:
        workload = Workload.conv2d(n=4, h=8, w=8, r=3, s=3, **shape)
        return dict(
            TEMPLATE.kernel(workload, H200, TEMPLATE.default(workload, H200, TEMPLATE.space(workload, H200))).alignments
        )

    assert alignments(c=64, k=64) == {"x": 16, "weight": 16, "y": 16}
    assert alignments(c=3, k=5, epilogue=("bias", "residual")) == {"x": 2, "weight": 2, "bias": 2, "residual": 2, "y": 2}
    assert alignments(c=12, k=6, out_dtype="float32", epilogue=("residual",)) == {
        "x": 8, "weight": 8, "residual": 8, "y": 8,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (dict(dtype="int8", zero_points=["weight"], n=2**22), "the zero point of the weight needs 268435456 sums of x"),
        (dict(n=2**30), "n is 1073741824"),
    ],
)
def test_refusals_say_why(changes: dict[str, Any], word: str) -> None:
    workload = Workload.conv2d(**{**dict(n=1, h=8, w=8, c=8, k=8, r=1, s=1), **changes})
    reason = TEMPLATE.validate(workload, H200)
    assert reason is not None and word in reason


def test_older_devices_are_refused() -> None:
    turing = Target("cuda", "T4", (7, 5), 40, 65536, 65536, 65536, 1024)
    reason = TEMPLATE.validate(Workload.conv2d(n=1, h=8, w=8, c=8, k=8, r=1, s=1), turing)
    assert reason is not None and "7.5" in reason


def test_pieces_follow_divisibility() -> None:
    pieces = [Gemm.of(Workload.conv2d(n=1, h=8, w=8, c=c, k=8, r=2, s=2)) for c in (64, 12, 6, 3)]
    assert [(gemm.piece_x, gemm.piece_w) for gemm in pieces] == [(8, 8), (4, 8), (2, 8), (1, 4)]


# --- On the device ---------------------------------------------------------------------------------------------------
def random_workload(rng: np.random.Generator) -> Workload:
    """A convolution of 16-bit floats of any kind that the template supports."""

    def pick(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    groups = pick(1, 1, 1, 2, 4)
    r, s = int(rng.integers(1, 6)), int(rng.integers(1, 6))
    dtype = pick("float16", "bfloat16")
    stages = [stage for stage in (*ALL_STAGES, "relu") if rng.random() < 0.4]
    return Workload.conv2d(
        n=int(rng.integers(1, 9)), h=int(rng.integers(5, 40)), w=int(rng.integers(5, 40)),
        c=groups * pick(1, 3, 4, 6, 8, 12, 16, 40, 64, 96), k=groups * pick(1, 3, 6, 8, 17, 32, 64, 72),
        r=r, s=s, stride=(int(rng.integers(1, 4)), int(rng.integers(1, 4))),
        padding=tuple(int(p) for p in rng.integers(2, 6, 4)), dilation=(1, int(rng.integers(1, 3))), groups=groups,
        dtype=dtype, out_dtype=pick(dtype, dtype, "float32"), epilogue=[stages[i] for i in rng.permutation(len(stages))],
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "size"), [(32, 300), (100_000, 14)])
def test_large_images_and_batches_beyond_two_gigabytes_are_exact(n: int, size: int) -> None:
    target = detect("cuda")
    few = 4
    part = Workload.conv2d(n=few, h=size, w=size, c=64, k=64, r=3, s=3, padding=1)
    arrays = integers(part, np.random.default_rng(0))
    truth = to_bits(convolve(part, arrays["x"], arrays["weight"]), "float16")
    whole = part.replace(n=n)
    arrays["x"] = np.tile(arrays["x"], (n // few, 1, 1, 1))
    y = run_on_gpu(TEMPLATE, whole, target, TEMPLATE.default(whole, target, TEMPLATE.space(whole, target)), arrays)
    assert (y.reshape(n // few, *truth.shape) == truth).all()
