"""The Hopper convolution: the workloads that it supports and refuses, every schedule compiles well, results are exact."""

from __future__ import annotations

import functools
import math
import struct
from collections import Counter
from typing import Any

import numpy as np
import pytest
from conv2d_numpy import FLOAT_STAGES, check_sampled
from conv2d_support import covering

from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.device.detect import detect
from schedsearch.launch import TensorMap
from schedsearch.target import PRESETS, Target
from schedsearch.templates.conv2d.geometry import Im2col
from schedsearch.templates.conv2d.wgmma import BNS, SPLIT_KS, Conv2dWgmma
from schedsearch.templates.conv2d.wgmma_sizes import evaluate, l2_row_cost, octets_per_block, store_segment, useful_bks
from schedsearch.templates.parts.machine import machine
from schedsearch.workload import Workload

H200 = PRESETS["h200"]
TEMPLATE = Conv2dWgmma()
HALVES = Workload.conv2d(n=1, h=8, w=8, c=8, k=8, r=1, s=1)
RANDOM_SHAPES, SHARDS = 64, 5

# Opcodes of sm_90 machine code: the low 12 bits of a 16-byte instruction (as nvdisasm names them).
HGMMA, TMA_LOAD, TMA_LOAD_TO_SELF, TMA_STORE, LOCAL_STORE, LOCAL_LOAD = 0x9F0, 0x3B4, 0x5B4, 0x3B5, 0x387, 0x983
CLUSTER_ARRIVE, CLUSTER_WAIT, EXIT = 0x9C7, 0xDC7, 0x94D
STORE, OF_16_BYTES = 0x986, 6  # the codes of 2 and 4 bytes are 2 and 4
MULTICAST = 1 << 75  # a flag of TMA_LOAD (for im2col and multicast loads; TMA_LOAD_TO_SELF is any other load)


def random_workload(rng: np.random.Generator) -> Workload:
    """A small convolution of any kind that the template supports."""
    kernel = [(r, s) for r in range(1, 8) for s in range(1, 8) if r == s or (r, s) in ((1, 7), (7, 1))]
    while True:
        r, s = kernel[rng.integers(len(kernel))]
        h, w = (int(v) for v in rng.integers(1, 40, 2))
        stride, dilation = ([int(v) for v in np.minimum(rng.integers(1, top, 2), rng.integers(1, top, 2))] for top in (9, 5))
        padding = [int(v) for v in rng.integers(0, 8, 4)]
        if (r - 1) * dilation[0] >= h + padding[0] + padding[2] or (s - 1) * dilation[1] >= w + padding[1] + padding[3]:
            continue
        stages = list(FLOAT_STAGES)
        return Workload.conv2d(
            n=int(rng.integers(1, 9)), h=h, w=w, c=8 * int(rng.integers(1, 17)), k=8 * int(rng.integers(1, 17)), r=r, s=s,
            stride=stride, padding=padding, dilation=dilation,
            dtype=["float16", "bfloat16"][rng.integers(2)],
            out_dtype=["float16", "bfloat16", "float32"][rng.integers(3)],
            epilogue=[stages[i] for i in rng.permutation(len(stages))[: rng.integers(0, 4)]],
        )  # fmt: skip


def random_candidate(number: int) -> tuple[Workload, Config]:
    rng = np.random.default_rng([20, number])
    workload = random_workload(rng)
    return workload, TEMPLATE.space(workload, H200).sample(1, rng)[0]


def instructions(code: bytes) -> list[int]:
    """The 128-bit instructions in the .text sections of a cubin (ELF64)."""
    (offset,), (count, names) = struct.unpack_from("<Q", code, 0x28), struct.unpack_from("<HH", code, 0x3C)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, offset + 64 * i) for i in range(count)]
    found: list[int] = []
    for section in sections:
        if code[sections[names][4] + section[0] :].startswith(b".text"):
            text = code[section[4] : section[4] + section[5]]
            found += [int.from_bytes(text[i : i + 16], "little") for i in range(0, len(text), 16)]
    return found


def check_tensor_map(param: TensorMap) -> None:
    """Limits of cuTensorMapEncode*, from the CUDA driver API's page on tensor map objects."""
    assert 1 <= len(param.dims) <= 5 and all(1 <= dim <= 2**32 for dim in param.dims)
    assert len(param.strides_bytes) == len(param.dims) - 1
    assert all(stride % 16 == 0 and 0 < stride < 2**40 for stride in param.strides_bytes)
    assert len(param.element_strides) == len(param.dims) and all(1 <= stride <= 8 for stride in param.element_strides)
    size = 4 if param.dtype == "float32" else 2
    if param.is_im2col:
        assert len(param.lower) == len(param.upper) == len(param.dims) - 2 == 2
        assert all(-128 <= corner <= 127 for corner in (*param.lower, *param.upper))
        assert param.channels_per_pixel <= 256 and param.pixels_per_column <= 1024
        inner = param.channels_per_pixel
    else:
        assert len(param.box) == len(param.dims) and all(1 <= edge <= 256 for edge in param.box)
        inner = param.box[0]
    assert inner * size % 16 == 0 and inner * size <= (param.swizzle_bytes or 16) in (16, 32, 64, 128)


def tiles_of_cluster(config: Config) -> int:
    return int(config["cluster_m"] * config["cluster_n"])


@functools.cache
def random_candidates() -> list[tuple[Workload, Config]]:
    """Candidates that together have every way to share tiles and operands, every schedule, and split K with both outputs.

    The number of stages and the order of tiles are only numbers in the same code, so not every value of them occurs.
    """

    def sharing(workload: Workload, config: Config) -> set[Any]:
        cluster = config["split_k"] > 1, config["cluster_m"] > 1, config["cluster_n"] > 1
        return {(cluster, config["schedule"]), ("split", config["split_k"] > 1, workload.out_dtype == "float32")}

    return covering(map(random_candidate, range(RANDOM_SHAPES)), sharing, but=("stages", "band"))


@pytest.mark.long
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_schedules_of_random_shapes_compile_well(shard: int) -> None:
    for workload, config in random_candidates()[shard::SHARDS]:
        assert TEMPLATE.validate(workload, H200) is None, workload
        source = TEMPLATE.kernel(workload, H200, config)
        for param in source.steps[0].params:
            if isinstance(param, TensorMap):
                check_tensor_map(param)
        built = compile_source(source, H200)  # refuses spills and serialised wgmma
        plan = evaluate(workload, H200, config)
        step = built.artifact.plan.steps[0]
        assert built.resources.shared_bytes == step.dynamic_shared_bytes == plan.shared_bytes <= H200.shared_bytes_per_block
        assert built.resources.registers * step.block_threads * config["blocks_per_sm"] <= H200.registers_per_sm
        assert step.cluster == config["split_k"] * tiles_of_cluster(config) <= 8
        assert step.grid.blocks(H200.sms, step.cluster) <= plan.blocks and plan.blocks % step.cluster == 0
        assert plan.tiles * config["split_k"] <= plan.blocks < 4 * plan.tiles * config["split_k"]
        assert step.grid.blocks(H200.sms, step.cluster) % step.cluster == 0
        code = instructions(built.artifact.code)
        found = Counter(instruction & 0xFFF for instruction in code)
        assert found[HGMMA] and found[HGMMA] % (config["bk"] // 16) == 0
        # Pixels and weights have the same number of loads. Loads that a row or a column of blocks shares are multicast.
        loads = found[TMA_LOAD] + found[TMA_LOAD_TO_SELF]
        multicast = sum(instruction & 0xFFF == TMA_LOAD and instruction & MULTICAST > 0 for instruction in code)
        assert loads and multicast == loads // 2 * ((config["cluster_m"] > 1) + (config["cluster_n"] > 1))
        assert found[TMA_STORE]  # also of float32
        # Barriers of the cluster are on the path that all threads take, so no warp can miss one or meet one twice.
        barriers = (config["split_k"] > 1) + (tiles_of_cluster(config) > 1)
        assert (found[CLUSTER_ARRIVE], found[CLUSTER_WAIT]) == (barriers, barriers)
        if config["split_k"] > 1:
            opcodes = [instruction & 0xFFF for instruction in code]
            assert EXIT not in opcodes[: len(opcodes) - opcodes[::-1].index(CLUSTER_WAIT)]
        assert built.resources.local_bytes == 0 and not found[LOCAL_STORE] and not found[LOCAL_LOAD]


@pytest.mark.long
@pytest.mark.parametrize(
    ("bn", "split_k", "cluster_m", "out_dtype"),
    [(192, 1, 2, "bfloat16"), (256, 1, 1, "float32"), (256, 2, 2, "bfloat16"), (256, 2, 2, "float32")],
)
def test_accumulators_of_wide_tiles_stay_in_registers_whatever_the_epilogue(
    bn: int, split_k: int, cluster_m: int, out_dtype: str
) -> None:
    workload = Workload.conv2d(n=4, h=28, w=28, c=256, k=512, r=3, s=3, padding=1, dtype="bfloat16", out_dtype=out_dtype,
                               epilogue=["bias", "scale_shift", "residual", "leaky_relu", "clip"])  # fmt: skip
    fixed = dict(
        bn=bn, bk=64, stages=3, warpgroups=1, split_k=split_k, cluster_m=cluster_m, cluster_n=1, blocks_per_sm=1,
        band=8,
    )  # fmt: skip
    space = TEMPLATE.space(workload, H200).restrict({name: [value] for name, value in fixed.items()})
    config = space.sample(1, np.random.default_rng(0))[0]
    assert compile_source(TEMPLATE.kernel(workload, H200, config), H200).resources.local_bytes == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("groups", "bn", "cluster_m", "out_dtype"), [(2, 224, 1, "float32"), (2, 224, 1, "bfloat16"), (4, 96, 2, "bfloat16")]
)
def test_accumulators_of_groups_in_turn_stay_in_registers(groups: int, bn: int, cluster_m: int, out_dtype: str) -> None:
    workload = Workload.conv2d(n=32, h=28, w=28, c=256, k=512, r=1, s=1, dtype="bfloat16", out_dtype=out_dtype,
                               epilogue=["bias", "residual", "relu"])  # fmt: skip
    fixed = dict(schedule="in_turn", warpgroups=groups, bn=bn, bk=64, stages=3, cluster_m=cluster_m, cluster_n=1)
    space = TEMPLATE.space(workload, H200).restrict({name: [value] for name, value in fixed.items()})
    source = TEMPLATE.kernel(workload, H200, space.sample(1, np.random.default_rng(0))[0])
    assert source.steps[0].block_threads == 128 * (groups + 1)
    assert compile_source(source, H200).resources.local_bytes == 0


@pytest.mark.parametrize("number", range(0, RANDOM_SHAPES, 5))
def test_the_default_is_legal(number: int) -> None:
    workload, _ = random_candidate(number)
    assert TEMPLATE.space(workload, H200).check(TEMPLATE.default(workload, H200, TEMPLATE.space(workload, H200))) == []


BASE = Workload.conv2d(n=1, h=28, w=28, c=64, k=64, r=3, s=3, padding=1)


@pytest.mark.parametrize(
    ("workload", "target", "words"),
    [
        (BASE, PRESETS["a100"], ["9.0", "8.0"]),
        (BASE, PRESETS["b200"], ["9.0", "10.0"]),
        (BASE.replace(dtype="float32", out_dtype="float32"), H200, ["float32 with precision fp32", "allowed: tf32"]),
        (BASE.replace(layout="NCHW", weight_layout="OIHW"), H200, ["NCHW", "NHWC"]),
        (BASE.replace(weight_layout="OIHW"), H200, ["OIHW", "OHWI"]),
        (BASE.replace(groups=2), H200, ["groups", "2"]),
        (BASE.replace(c=12), H200, ["c is 12", "8"]),
        (BASE.replace(k=4, out_dtype="float32"), H200, ["k is 4", "8"]),
        (BASE.replace(stride=(1, 9)), H200, ["horizontal", "9", "8"]),
        (BASE.replace(padding=(129, 1, 129, 1)), H200, ["vertical", "-129", "-128"]),
        (BASE.replace(padding=(1, 1, 1, 140), r=1, s=1), H200, ["horizontal", "140", "127"]),
        (BASE.replace(padding=128, dilation=128), H200, ["reaches", "256", "255"]),
        (BASE.replace(padding=66, dilation=(1, 98), h=10, w=80), H200, ["horizontal", "-130"]),
        (BASE.replace(n=2**31 // 784, c=8, k=8), H200, ["pixels", "2**31"]),
        (BASE.replace(c=2**30), H200, ["c is 1073741824", "2**30"]),
        (BASE.replace(k=2**30), H200, ["k is 1073741824", "2**30"]),
        (BASE.replace(c=2**27), H200, ["r*s*c is 1207959552", "2**30"]),
        (BASE.replace(n=1, w=2**30 - 2, stride=8, c=8, k=8), H200, ["padded w is 1073741824", "2**30"]),
    ],
)  # fmt: skip
def test_an_unsupported_workload_is_refused_with_a_reason(workload: Workload, target: Target, words: list[str]) -> None:
    reason = TEMPLATE.validate(workload, target)
    assert reason is not None and all(word in reason for word in words), reason


def test_limits_that_are_just_reached_are_taken() -> None:
    for workload in (
        BASE.replace(stride=8),
        BASE.replace(padding=(128, 128, 127, 127), r=1, s=1),
        BASE.replace(padding=128, dilation=127),
        BASE.replace(n=2**31 // 784 - 1, c=8, k=8),
    ):
        assert TEMPLATE.validate(workload, H200) is None, workload


@pytest.mark.parametrize("split_k", SPLIT_KS)
@pytest.mark.parametrize("bn", BNS)
def test_store_segments_cover_the_stores_of_each_block_and_fit_a_swizzle(bn: int, split_k: int) -> None:
    q = {"bn": bn, "split_k": split_k}
    segment, own = store_segment(HALVES, Im2col.of(HALVES), q), 8 * octets_per_block(HALVES, q)
    assert segment * 2 in (16, 32, 64, 128) and own * split_k >= bn
    assert all(max(0, min(bn - rank * own, own)) % segment == 0 for rank in range(split_k))


@pytest.mark.parametrize(("channels", "bks"), [(8, {16}), (16, {16}), (24, {32}), (32, {32}), (48, {64, 16}), (64, {64}),
                                               (80, {64, 32, 16}), (96, {64, 32}), (256, {64})])  # fmt: skip
def test_a_narrow_k_step_is_offered_only_where_it_saves_padding(channels: int, bks: set[int]) -> None:
    assert set(useful_bks(channels)) == bks


@pytest.mark.parametrize(("k", "bn", "elements"), [(255, 256, 1), (58, 64, 2)])
@pytest.mark.long
def test_rows_leave_in_chunks_of_16_bytes(k: int, bn: int, elements: int) -> None:
    """With every kind of epilogue operand and the most accumulators; `elements` are what the ends of a row are stored by."""
    workload = Workload.conv2d(n=2, h=9, w=9, c=64, k=k, r=1, s=1, epilogue=["bias", "residual", "relu"])
    config = Config(
        warpgroups=1, bn=bn, bk=64, stages=2, split_k=1, cluster_m=1, cluster_n=1, persistent=False, blocks_per_sm=1,
        schedule="together", band=1, l2_promotion=256, row_store="chunks",
    )  # fmt: skip
    assert not TEMPLATE.space(workload, H200).check(config)
    source = TEMPLATE.kernel(workload, H200, config)
    code = instructions(compile_source(source, H200).artifact.code)  # refuses spills and serialised wgmma
    widths = Counter(instruction >> 73 & 7 for instruction in code if instruction & 0xFFF == STORE)
    assert widths.keys() == {OF_16_BYTES, 2 * elements}
    assert source.alignments["y"] == source.alignments["residual"] == 2 * elements


# --- On a GPU: exact results of small integers ------------------------------------------------------------------------


def run(workload: Workload, target: Target, config: Config, arguments: dict[str, Any], scalars: dict[str, float]) -> Any:
    """Compiles, launches twice into a poisoned output, and returns it (torch tensor in the output's axes)."""
    import torch

    from schedsearch.device import open_device

    artifact = compile_source(TEMPLATE.kernel(workload, target, config), target).artifact
    y = torch.full(workload.output.shape, math.nan, dtype=getattr(torch, workload.out_dtype), device="cuda")
    loaded = open_device(target).load(artifact)
    try:
        pointers = {name: array.data_ptr() for name, array in arguments.items()}
        torch.cuda.synchronize()
        bound = loaded.bind({**pointers, "y": y.data_ptr()}, scalars)
        for _ in range(2):
            bound.launch()
        torch.cuda.synchronize()
    finally:
        loaded.close()
    return y


def integers(workload: Workload, seed: int) -> dict[str, Any]:
    """Arguments of small integers: every sum is exact in float32, so one product too many or too few shows."""
    import torch

    torch.manual_seed(seed)
    return {
        spec.name: torch.randint(-2, 3, spec.shape, device="cuda", dtype=torch.int8).to(getattr(torch, spec.dtype))
        for spec in workload.signature
    }


def expected(workload: Workload, arguments: dict[str, Any], scalars: dict[str, float]) -> Any:
    """PyTorch's result in float64, with epilogue stages in the workload's order, rounded once to the output's dtype."""
    import torch
    from torch.nn import functional

    wide = {name: array.double() for name, array in arguments.items()}
    top, left, bottom, right = workload.padding
    x = functional.pad(wide["x"].permute(0, 3, 1, 2), (left, right, top, bottom))
    y = functional.conv2d(x, wide["weight"].permute(0, 3, 1, 2), stride=workload.stride, dilation=workload.dilation)
    y = y.permute(0, 2, 3, 1)
    for stage in (each.name for each in workload.epilogue):
        if stage == "bias":
            y = y + wide["bias"]
        elif stage == "scale_shift":
            y = y * wide["scale"] + wide["shift"]
        elif stage == "residual":
            y = y + wide["residual"]
        elif stage == "relu":
            y = y.clamp(min=0)
        else:
            assert stage == "clip"
            y = y.clamp(scalars["clip_min"], scalars["clip_max"])
    return y.to(getattr(torch, workload.out_dtype))


SCALARS = {"clip_min": -20.0, "clip_max": 50.0}


def check(workload: Workload, target: Target, config: Config, seed: int = 0) -> None:
    import torch

    scalars = {spec.name: SCALARS[spec.name] for spec in workload.scalars}
    arguments = integers(workload, seed)
    y, reference = run(workload, target, config, arguments, scalars), expected(workload, arguments, scalars)
    wrong = int((y != reference).sum() + torch.isnan(y).sum())
    assert wrong == 0, f"{wrong} of {y.numel()} elements differ: {workload.label} {config}"


def sampled_is_exact(workload: Workload, target: Target, rng: np.random.Generator, **only: Any) -> None:
    """A configuration with these knobs gives exact results."""
    space = TEMPLATE.space(workload, target).restrict({knob: [value] for knob, value in only.items()})
    check_sampled(lambda config: check(workload, target, config), space, rng)


@pytest.fixture(scope="module")
def gpu() -> Target:
    pytest.importorskip("torch", reason="PyTorch computes the expected values")
    target = detect("cuda")
    if target.compute_capability != (9, 0):
        pytest.skip(f"needs compute capability 9.0, found {target.compute_capability}")
    return target


@pytest.mark.gpu
@pytest.mark.parametrize("split_k", [2, 4, 8])
@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16", "float32"])
def test_a_tile_that_a_cluster_shares_is_exact(gpu: Target, split_k: int, out_dtype: str) -> None:
    epilogue = {2: [], 4: ["bias", "residual", "relu"], 8: ["scale_shift", "clip"]}[split_k]
    workload = Workload.conv2d(n=2, h=9, w=7, c=136, k=200, r=3, s=3, padding=1, out_dtype=out_dtype, epilogue=epilogue)
    rng = np.random.default_rng([22, split_k, *out_dtype.encode()])
    sampled_is_exact(workload, gpu, rng, split_k=split_k)


@pytest.mark.gpu
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(("cluster_m", "cluster_n"), [(2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4)])
def test_tiles_of_a_cluster_that_share_operands_are_exact(
    gpu: Target, cluster_m: int, cluster_n: int, persistent: bool
) -> None:
    """The cluster does not divide the rows and columns of tiles. A persistent grid has several rounds per block."""
    if not persistent:
        workload = Workload.conv2d(n=8, h=13, w=11, c=136, k=200, r=3, s=3, padding=1)
    else:
        workload = Workload.conv2d(n=150, h=13, w=11, c=64, k=200, r=1, s=1, stride=2, epilogue=["bias", "residual", "relu"])
    rng = np.random.default_rng([23, cluster_m, cluster_n])
    sampled_is_exact(workload, gpu, rng, cluster_m=cluster_m, cluster_n=cluster_n, persistent=persistent)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("split_k", "cluster_m", "cluster_n"), [(2, 2, 1), (2, 1, 2), (2, 2, 2), (4, 2, 1), (4, 1, 2), (2, 4, 1), (2, 1, 4)]
)
def test_blocks_that_share_a_tile_and_operands_are_exact(gpu: Target, split_k: int, cluster_m: int, cluster_n: int) -> None:
    if cluster_m > cluster_n:
        workload = Workload.conv2d(n=5, h=13, w=11, c=136, k=200, r=3, s=3, padding=1)
    else:
        workload = Workload.conv2d(n=5, h=13, w=11, c=520, k=200, r=1, s=1, epilogue=["bias", "residual", "relu"])
    rng = np.random.default_rng([24, split_k, cluster_m, cluster_n])
    sampled_is_exact(workload, gpu, rng, split_k=split_k, cluster_m=cluster_m, cluster_n=cluster_n)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("out_dtype", ["float16", "float32"])
def test_groups_that_take_tiles_in_turn_are_exact(gpu: Target, groups: int, out_dtype: str) -> None:
    """Blocks with few and many tiles, and tiles with fewer and more steps than stages."""
    rng = np.random.default_rng([25, groups])
    shapes = dict(n=150, c=136, r=3, s=3, padding=1), dict(n=400, c=72, r=1, s=1, epilogue=["bias", "residual"])
    for cluster_m, shape in zip((1, 2), shapes if out_dtype == "float16" else shapes[::-1]):
        workload = Workload.conv2d(h=13, w=11, k=200, out_dtype=out_dtype, **shape)  # type: ignore[arg-type]
        sampled_is_exact(workload, gpu, rng, schedule="in_turn", warpgroups=groups, cluster_m=cluster_m)


@pytest.mark.gpu
def test_an_image_of_ninety_thousand_pixels_is_exact(gpu: Target) -> None:
    import torch

    workload = Workload.conv2d(n=32, h=300, w=300, c=64, k=64, r=3, s=3, padding=1, epilogue=["residual"])
    rng = np.random.default_rng(0)
    space = TEMPLATE.space(workload, gpu)
    for config in [TEMPLATE.default(workload, gpu, space), *space.sample(1, rng)]:
        check(workload, gpu, config)
        torch.cuda.empty_cache()


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", ["float16", "float32"])
def test_a_batch_of_a_hundred_thousand_images_is_exact(gpu: Target, out_dtype: str) -> None:
    """1.25e9 outputs have byte offsets past 2**31. The test compares slices of the batch, which are also convolutions."""
    import torch

    workload = Workload.conv2d(n=100_000, h=14, w=14, c=64, k=64, r=3, s=3, padding=1, out_dtype=out_dtype,
                               epilogue=["bias", "residual", "relu"])  # fmt: skip
    arguments = integers(workload, 0)
    space = TEMPLATE.space(workload, gpu)
    for config in [TEMPLATE.default(workload, gpu, space), *space.sample(1, np.random.default_rng(1))]:
        y = run(workload, gpu, config, arguments, {})
        for start in range(0, workload.n, 10_000):
            part = workload.replace(n=10_000)
            images = slice(start, start + part.n)
            sliced = {**arguments, "x": arguments["x"][images], "residual": arguments["residual"][images]}
            assert torch.equal(y[images], expected(part, sliced, {})), f"images from {start}: {config}"
        del y


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [8, 24, 48, 72])
def test_an_infinite_weight_of_one_tap_does_not_reach_another(gpu: Target, channels: int) -> None:
    """In memory, the channels past C of a k step belong to the next tap. They must not be multiplied, not even by zero."""
    import torch

    workload = Workload.conv2d(n=1, h=9, w=9, c=channels, k=16, r=2, s=2)
    for config in TEMPLATE.space(workload, gpu).sample(1, np.random.default_rng(channels)):
        arguments = integers(workload, 1)
        arguments["x"] = arguments["x"].abs() + 1
        arguments["weight"][3, 0, 1, 0] = math.inf
        y = run(workload, gpu, config, arguments, {})
        assert torch.isposinf(y[..., 3]).all() and torch.isfinite(y[..., [k for k in range(16) if k != 3]]).all()


@pytest.mark.parametrize("channels", [64, 96, 128, 136, 272, 488])
@pytest.mark.parametrize("bk", [16, 32, 64])
def test_lines_and_sectors_of_a_row_are_those_of_its_addresses(channels: int, bk: int) -> None:
    starts = [2 * (pixel * channels + step * bk) for pixel in range(64) for step in range(channels // bk)]
    lines = np.mean([(start + 2 * bk - 1) // 128 - start // 128 + 1 for start in starts])
    sectors = np.mean([(start + 2 * bk - 1) // 32 - start // 32 + 1 for start in starts])
    assert l2_row_cost(channels, bk, machine(H200).im2col) == pytest.approx(0.64 * 32 * sectors + 46 * lines, rel=0.01)
