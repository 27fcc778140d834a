"""The stem convolution: the supported workloads, its kernel emulated thread by thread, every schedule compiles well, and
results on a GPU are exact."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cluster_emulator import ClusterEmulator
from conv2d_numpy import FLOAT_STAGES, convolve, integers, to_bits
from conv2d_support import covering
from hopper_emulator import HopperBlock, HopperEmulator, multiplied
from moves_emulator import MovesEmulator

import schedsearch.templates.conv2d.stem as module
import schedsearch.templates.conv2d.stem_products as stem_products
import schedsearch.templates.conv2d.stem_store as stem_store
from schedsearch.backend import compile_source
from schedsearch.backend.cuda import _compile_to_ptx
from schedsearch.config import Config
from schedsearch.launch import TensorMap
from schedsearch.target import PRESETS, Target
from schedsearch.template import KernelSource
from schedsearch.templates.conv2d.stem import Conv2dStem
from schedsearch.templates.conv2d.stem_sizes import bank_rounds, evaluate, flattened
from schedsearch.templates.data_movement import staged_kernel, tile_places
from schedsearch.templates.layout_transform import kernels, places
from schedsearch.templates.parts import pipeline, store, store_rows, walk, zero_points
from schedsearch.testing.emulator import Memory
from schedsearch.workload import Workload

H200 = PRESETS["h200"]
TEMPLATE = Conv2dStem()
RANDOM_SHAPES, SHARDS = 24, 4

RGB_7X7 = Workload.conv2d(n=1, h=224, w=224, c=3, k=64, r=7, s=7, stride=2, padding=3)
RGB_3X3 = Workload.conv2d(n=1, h=224, w=224, c=3, k=64, r=3, s=3, padding=1)
SMALL = Workload.conv2d(n=2, h=6, w=16, c=3, k=16, r=3, s=3, stride=2, padding=1)
CONFIG = {"tile_w": 8, "warpgroups": 1, "patches": 2, "register_steps": 2, "blocks_per_sm": 1}


def random_workload(rng: np.random.Generator) -> Workload:
    """A small convolution of any kind that the template supports."""
    while True:
        r, s = (int(v) for v in rng.integers(1, 8, 2))
        h, w = int(rng.integers(1, 40)), int(rng.integers(1, 65))
        w = w if rng.integers(4) == 0 else -(-w // 8) * 8  # rows of x are mostly multiples of 16 bytes
        stride = [int(v) for v in np.minimum(rng.integers(1, 6, 2), rng.integers(1, 6, 2))]
        padding, dilation = [int(v) for v in rng.integers(0, 8, 4)], int(rng.integers(1, 4))
        if (r - 1) * dilation >= h + padding[0] + padding[2] or s - 1 >= w + padding[1] + padding[3]:
            continue
        stages = list(FLOAT_STAGES)
        workload = Workload.conv2d(
            n=int(rng.integers(1, 6)), h=h, w=w, c=int(rng.integers(1, 17)), k=8 * int(rng.integers(1, 17)), r=r, s=s,
            stride=stride, padding=padding, dilation=(dilation, 1),
            dtype=["float16", "bfloat16"][rng.integers(2)],
            out_dtype=["float16", "bfloat16", "float32"][rng.integers(3)],
            epilogue=[stages[i] for i in rng.permutation(len(stages))[: rng.integers(0, 4)]],
        )  # fmt: skip
        if TEMPLATE.validate(workload, H200) is None:
            return workload


# --- Emulated: index maps are right, and no barrier is missing or early --------------------------------------------------


class StemEmulator(ClusterEmulator):
    """Emulates patches that are not swizzled, and a wgmma whose first operand each thread reads from its patch."""

    def _load(self, shared: int, tensor: Any, coordinates: tuple[int, ...], barrier: int) -> None:
        param, array = tensor
        assert param.swizzle_bytes == 0 and shared % 128 == 0 and param.box[0] * array.itemsize % 16 == 0
        box = np.zeros(param.box[::-1], array.dtype)
        inside, at = self._box(param, array, coordinates)
        box[at] = array[inside]
        block = self.block

        def copy() -> None:
            block.shared[shared : shared + box.nbytes] = box.reshape(-1).view(np.uint8)
            block.barriers[int(barrier)].update(0, -box.nbytes)

        self._start(copy)

    def _operand(self, block: HopperBlock, descriptor: int, rows: int, dtype: str) -> Any:
        return HopperEmulator._operand(self, block, descriptor, rows, dtype)

    def multiply_patch(self, workload: Workload, patch_w: int, register_steps: int) -> Callable[..., None]:
        offsets = stem_products.octet_offsets(workload, patch_w)
        runs, masked = module.Runs.of(workload), stem_products.masked(workload)
        columns = runs.columns

        def word_of(pixel: int, shift: int, first_mask: int, last_mask: int, number: int) -> int:
            offset = offsets[number]
            if offset is None:
                return 0
            word = int(self._shared(pixel + offset, 4).view(np.uint32)[0])
            if runs.shifted:
                word |= int(self._shared(pixel + offset + 4, 4).view(np.uint32)[0]) << 32
            else:
                assert shift == 0
            word = word >> shift & 0xFFFFFFFF
            if masked and runs.skipped and number % runs.octets == 0:
                word &= first_mask
            return word & last_mask if masked and runs.values % 8 and (number + 1) % runs.octets == 0 else word

        def multiply(
            acc: list[Any], pixel: int, pixel_8: int, shift: int, shift_8: int, first: int, last: int, weights: int
        ) -> None:
            block, (group, thread) = self.block, divmod(self.thread.number, 128)
            rows = []
            for at, by in ((pixel, shift), (pixel_8, shift_8)):
                words = [word_of(int(at), int(by), int(first), int(last), number) for number in range(len(offsets))]
                rows.append(np.array(words, np.uint32).view(np.uint8).reshape(-1, 4))

            def product(fragments: list[Any]) -> Any:
                a = np.zeros((64, len(offsets), 16), np.uint8)  # A's fragment in registers, 4 bytes a word: PTX ISA, wgmma
                for number, halves in enumerate(fragments):
                    for half, values in enumerate(halves):
                        a[number // 32 * 16 + number % 32 // 4 + 8 * half, :, number % 4 * 4 : number % 4 * 4 + 4] = values
                descriptors = [
                    weights + (step // 4 * columns * 128 + step % 4 * 32) // 16 for step in range(len(offsets) // 2)
                ]
                of_steps = [self._operand(block, each, columns, workload.weight_dtype) for each in descriptors]
                b = np.concatenate(of_steps, axis=1)
                sums = multiplied(a.reshape(64, -1), workload.dtype) @ b.T
                return sums if masked else sums.astype(np.int64)

            sums = block.meet(f"the product of group {group}", 128, thread, rows, product)
            warp, lane = divmod(thread, 32)
            own = sums[warp * 16 + lane // 4 :: 8][:2]
            acc[:] = own.reshape(2, -1, 8)[:, :, lane % 4 * 2 : lane % 4 * 2 + 2].transpose(1, 0, 2).reshape(-1).tolist()

        return multiply


MODULES = (module, stem_products, stem_store, pipeline, store, store_rows, walk, zero_points)


def emulate(
    monkeypatch: pytest.MonkeyPatch, workload: Workload, config: dict[str, Any], sms: int, late: bool
) -> tuple[Any, Any]:
    """y of one configuration and the expected y. The stand-in for an epilogue adds k % 5 + offset % 7."""

    def fragments(octets: int, row_elements: int, interleaved: bool, *, ahead: bool) -> Callable[..., None]:
        assert not interleaved

        def fuse(acc: list[Any], columns: int, row: int, row_8: int, k: int, offset: int, *_: Any) -> None:
            assert 8 * octets == columns == workload.k
            for i in range(4 * octets):
                channel, element = 8 * (i // 4) + i % 2, offset + 8 * (i // 4) + i % 2 + i // 2 % 2 * row_elements
                if (row, row_8)[i // 2 % 2]:
                    assert element % workload.k == k + channel and element < np.prod(workload.output.shape)
                    acc[i] += (k + channel) % 5 + element % 7

        return fuse

    def single(value: float, valid: int, k: int, offset: int, *_: Any) -> float:
        assert valid and offset % workload.k == k and offset < np.prod(workload.output.shape)
        return value + (k % 5 + offset % 7 if fused else 0)

    def pair(v0: float, v1: float, valid: int, k: int, offset: int, *_: Any) -> tuple[float, float]:
        assert k % 2 == offset % 2 == 0
        return single(v0, valid, k, offset), single(v1, valid, k + 1, offset + 1)

    memory = Memory()
    emulator = StemEmulator(memory, lambda value, *_: value, late)
    zeros = tuple(SimpleNamespace(kind="i64", value=0) for _ in range(7))
    fused = bool(workload.epilogue)
    stand_in = SimpleNamespace(
        params=zeros, alignments={}, fragments=fragments, identity=not fused, accumulator="float32",
        words_ahead=lambda *_: 0, single=single, pair=pair,
    )  # fmt: skip
    emulator.stand_in(monkeypatch, *MODULES)
    moves = MovesEmulator(memory, late_copies=late)
    moves.stand_in(monkeypatch, staged_kernel, tile_places, kernels, places)
    for name in ("load_run", "multiply_patch"):
        monkeypatch.setattr(module, name, getattr(emulator, name))
    monkeypatch.setattr(module, "Epilogue", lambda _: stand_in)
    arrays = integers(workload, np.random.default_rng(0))
    whole = workload.output.slice_of or workload.output.shape
    larger = np.full(whole, np.nan, np.float32 if workload.out_dtype == "float32" else np.float16)
    y = larger[..., : workload.k]
    source = TEMPLATE.kernel(workload, dataclasses.replace(H200, sms=sms), Config(config))
    *copies, step = source.steps
    x, weight = arrays["x"].astype(np.float16), arrays["weight"].astype(np.float16)
    read = flattened(workload).params
    rows = {"x": x.reshape(read.n, read.h, read.w * read.c)}
    if copies:
        rows["x_rows"] = copied_rows(moves, memory, source, x)
    emulator.run(step, {"y": memory.add(larger), "weight": memory.add(weight)}, sms, {**rows, "y": y})
    assert np.isnan(larger[..., workload.k :]).all(), "nothing around a slice is written"
    reference = convolve(workload, arrays["x"], arrays["weight"])
    if fused:
        reference += np.arange(workload.k) % 5 + np.arange(y.size).reshape(y.shape) % 7
    return to_bits(y, workload.out_dtype), to_bits(reference.astype(np.float32), workload.out_dtype)


def copied_rows(emulator: MovesEmulator, memory: Memory, source: KernelSource, x: Any) -> Any:
    """x as TMA reads it from the workspace that the first step writes: rows a multiple of 16 bytes apart."""
    copy, step = source.steps
    tensor = next(param for param in step.params if isinstance(param, TensorMap) and param.buffer == "x_rows")
    workspace = np.full(source.workspaces["x_rows"] // 2, np.nan, np.float16)
    emulator.run(copy, {"x": memory.add(np.ascontiguousarray(x)), "x_rows": memory.add(workspace)}, 1)
    distances = tuple(reversed([2, *tensor.strides_bytes]))
    assert all(distance % 16 == 0 for distance in distances[:2])  # CUDA driver API, cuTensorMapEncodeTiled
    return np.lib.stride_tricks.as_strided(workspace, tensor.dims[::-1], distances)


EMULATED: dict[str, tuple[Workload, dict[str, Any], int]] = {
    "rgb, stride 2": (SMALL, CONFIG, 1),
    "the stem of a network": (
        SMALL.replace(n=1, h=13, w=40, k=64, r=7, s=7, padding=3), {**CONFIG, "tile_w": 16, "warpgroups": 2}, 1),
    "pairs that are not words": (SMALL.replace(stride=1, padding=(0, 2, 1, 1)), {**CONFIG, "tile_w": 16, "patches": 1}, 2),
    "one channel, a pixel a row of the tile": (SMALL.replace(c=1, w=72, h=3, stride=1), {**CONFIG, "tile_w": 64}, 2),
    "runs of whole octets": (SMALL.replace(c=8, w=24, stride=1, r=2, s=2, padding=0, k=8), {**CONFIG, "patches": 3}, 1),
    "a filler of an octet, two segments of y": (SMALL.replace(c=4, r=1, s=3, k=72, padding=(0, 1, 0, 1)), CONFIG, 1),
    "dilated rows, uneven strides": (
        SMALL.replace(h=12, c=5, dilation=(3, 1), stride=(1, 3), padding=(4, 0, 2, 5)), {**CONFIG, "warpgroups": 3}, 1),
    "rows that are no multiple of 16 bytes": (SMALL.replace(w=13, padding=(1, 2, 0, 1)), {**CONFIG, "warpgroups": 2}, 1),
    "rows of 10 bytes of y": (SMALL.replace(k=5, stride=1, c=6, w=20, r=5, s=5, padding=2), CONFIG, 1),
    "pixels of 58 channels in one row, two channels at once": (
        SMALL.replace(n=3, h=5, w=7, c=58, k=58, r=1, s=1, stride=1, padding=0),
        {**CONFIG, "tile_w": 64, "warpgroups": 2}, 1),
    "pixels of 24 channels in one row, a slice of 33": (
        SMALL.replace(n=1, h=9, w=9, c=24, k=11, r=1, s=1, stride=1, padding=0, slice_of=33), {**CONFIG, "tile_w": 64}, 1),
    "rows of a patch of several boxes, four channels at once": (
        SMALL.replace(n=2, h=9, w=12, c=36, k=36, stride=1, padding=1), CONFIG, 1),
    "several boxes, odd channels, rows that are no multiple of 16 bytes": (
        SMALL.replace(n=1, h=6, w=9, c=41, k=16, stride=1, padding=(1, 0, 0, 2)), CONFIG, 1),
    "tiles larger than the image": (SMALL.replace(h=3, w=8, n=3), {**CONFIG, "tile_w": 32, "warpgroups": 2}, 1),
}  # fmt: skip


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("name", EMULATED)
@pytest.mark.mostly_long(3)
def test_the_emulated_kernel_computes_the_convolution(monkeypatch: pytest.MonkeyPatch, name: str, late: bool) -> None:
    workload, config, sms = EMULATED[name]
    assert TEMPLATE.validate(workload, H200) is None
    y, reference = emulate(monkeypatch, workload, config, sms, late)
    np.testing.assert_array_equal(y, reference)


@pytest.mark.parametrize("out_dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", ["rgb, stride 2", "pairs that are not words", "tiles larger than the image"])
def test_the_emulated_epilogue_sees_its_channels_and_pixels(
    monkeypatch: pytest.MonkeyPatch, name: str, out_dtype: str
) -> None:
    workload, config, sms = EMULATED[name]
    y, reference = emulate(monkeypatch, workload.replace(out_dtype=out_dtype, epilogue=["bias"]), config, sms, late=True)
    np.testing.assert_array_equal(y, reference)


@pytest.mark.parametrize(
    ("left", "unmet"),
    [(0, 3), (1, 2)],  # columns 0..2, 4..6, 8..10, 12..14 and columns -1..1, 3..5, 7..9, 11..13
    ids=["behind its last value", "before its first, odd one"],
)
def test_values_beside_a_run_do_not_spoil_it(monkeypatch: pytest.MonkeyPatch, left: int, unmet: int) -> None:
    """An infinite value outside of all kernel rows of a pixel is not multiplied by a filler of the weights."""
    workload, config, sms = EMULATED["rgb, stride 2"]
    workload = workload.replace(stride=(1, 4), padding=(0, left, 0, 0))

    finite = integers

    def one_infinite(given: Workload, rng: np.random.Generator) -> dict[str, Any]:
        arrays = finite(given, rng)
        arrays["x"][:, :, unmet] = np.inf
        return arrays

    monkeypatch.setattr("test_conv2d_stem.integers", one_infinite)
    y, reference = emulate(monkeypatch, workload, config, sms, late=False)
    assert np.isfinite(reference.view(np.float16)).all()
    np.testing.assert_array_equal(y, reference)


@pytest.mark.parametrize("operation", ["mbarrier_wait", "bulk_wait_read_all", "group_barrier"])
def test_the_emulator_notices_a_missing_wait(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    def no_wait(self: StemEmulator, *_: Any) -> Any:
        return (lambda group: None) if operation == "group_barrier" else None

    monkeypatch.setattr(StemEmulator, operation, no_wait)
    workload, config, sms = EMULATED["rgb, stride 2"]
    try:
        y, reference = emulate(monkeypatch, workload.replace(n=4), config, sms, late=True)
    except AssertionError:
        return
    assert not np.array_equal(y, reference)


# --- Supported workloads, and the space ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workload", "target", "words"),
    [
        (SMALL, PRESETS["a100"], ["9.0", "8.0"]),
        (SMALL, PRESETS["b200"], ["9.0", "10.0"]),
        (SMALL.replace(dtype="float32", out_dtype="float32"), H200, ["float32", "float16"]),
        (SMALL.replace(layout="NCHW", weight_layout="OIHW"), H200, ["NCHW", "NHWC"]),
        (SMALL.replace(weight_layout="OIHW"), H200, ["OIHW", "OHWI"]),
        (SMALL.replace(c=6, groups=2), H200, ["groups", "2"]),
        (SMALL.replace(c=48), H200, ["s * c is 144", "128"]),
        (SMALL.replace(h=100, r=70, c=8, padding=0), H200, ["r * ceil(s * c / 8) is 210", "128"]),
        (SMALL.replace(dilation=2), H200, ["horizontal dilation is 2", "1"]),
        (SMALL.replace(k=12, out_dtype="float32"), H200, ["k is 12", "8"]),
        (SMALL.replace(c=171), H200, ["s * c is 513", "512"]),
        (SMALL.replace(k=264), H200, ["k is 264", "256"]),
        (SMALL.replace(stride=(1, 12), w=64, c=8), H200, ["stride (1, 12)", "256"]),
        (SMALL.replace(n=2**31 // 24), H200, ["pixels", "2**31"]),
        (SMALL.replace(n=1, w=2**29, stride=(1, 8), c=8), H200, ["w * c is 4294967296", "2**30"]),
    ],
)
def test_an_unsupported_workload_is_refused_with_a_reason(workload: Workload, target: Target, words: list[str]) -> None:
    reason = TEMPLATE.validate(workload, target)
    assert reason is not None and all(word in reason for word in words), reason


@pytest.mark.parametrize(
    "workload",
    [
        RGB_7X7,
        RGB_7X7.replace(n=32, epilogue=["bias", "relu"]),
        RGB_3X3.replace(out_dtype="float32", epilogue=["residual"]),
        SMALL.replace(c=16, stride=1),
        SMALL.replace(stride=(20, 1), h=100),
        SMALL.replace(padding=(1, 500, 1, 400)),
        SMALL.replace(k=256),
        SMALL.replace(n=1, h=1, w=8, r=1, s=1, c=1, k=8, padding=0),
    ],
)
def test_a_supported_workload_has_a_legal_default(workload: Workload) -> None:
    assert TEMPLATE.validate(workload, H200) is None
    assert TEMPLATE.space(workload, H200).check(TEMPLATE.default(workload, H200, TEMPLATE.space(workload, H200))) == []


@pytest.mark.parametrize(("pixel_bytes", "rounds"), [(12, 1), (16, 1), (32, 2), (64, 4), (128, 8), (6, 1), (3, 1)])
def test_bank_rounds_are_the_most_words_of_a_bank(pixel_bytes: int, rounds: int) -> None:
    """3 channels with stride 2 (12 bytes in fp16) and 4 with stride 2 (16) have no conflicts. Pixels 32 words apart share 4
    banks."""
    assert bank_rounds(pixel_bytes) == rounds


# --- Compiled -----------------------------------------------------------------------------------------------------------


def random_candidate(number: int) -> tuple[Workload, Config]:
    rng = np.random.default_rng([50, number])
    workload = random_workload(rng)
    return workload, TEMPLATE.space(workload, H200).sample(1, rng)[0]


@pytest.mark.long
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_schedules_of_random_shapes_compile_well(shard: int) -> None:
    for workload, config in covering(map(random_candidate, range(RANDOM_SHAPES)))[shard::SHARDS]:
        assert TEMPLATE.space(workload, H200).check(TEMPLATE.default(workload, H200, TEMPLATE.space(workload, H200))) == []
        source = TEMPLATE.kernel(workload, H200, config)
        box = next(p for p in source.steps[-1].params if isinstance(p, TensorMap) and p.buffer in ("x", "x_rows")).box
        assert box[0] * 2 % 16 == 0 and max(box) <= 256  # CUDA driver API, cuTensorMapEncodeTiled
        built = compile_source(source, H200)  # refuses spills and serialised wgmma
        plan = evaluate(workload, H200, config)
        assert built.resources.shared_bytes == plan.shared_bytes <= H200.shared_bytes_per_block
        assert built.resources.registers * plan.threads * config["blocks_per_sm"] <= H200.registers_per_sm
        assert built.resources.local_bytes == 0


@pytest.mark.long
@pytest.mark.parametrize("workload", [RGB_7X7, RGB_7X7.replace(n=32), RGB_3X3], ids=lambda workload: workload.label)
def test_an_epilogue_needs_no_local_memory(workload: Workload) -> None:
    for epilogue in ((), FLOAT_STAGES):
        for out_dtype in ("float16", "float32"):
            fused = workload.replace(epilogue=epilogue, out_dtype=out_dtype)
            built = compile_source(
                TEMPLATE.kernel(fused, H200, TEMPLATE.default(fused, H200, TEMPLATE.space(fused, H200))), H200
            )
            assert built.resources.local_bytes == built.resources.spill_bytes == 0


@pytest.mark.parametrize(("workload", "loads"), [(RGB_7X7, 4 * 10 + 2), (RGB_3X3, 2 * 4 * 3)], ids=["stride 2", "stride 1"])
@pytest.mark.mostly_long(2)
def test_an_operand_is_one_load_from_shared_memory(workload: Workload, loads: int) -> None:
    """7x7x3: 21 octets and one of filler, two loads each. 3x3x3 with stride 1: two for a pair that is not a word."""
    source = TEMPLATE.kernel(workload, H200, TEMPLATE.default(workload, H200, TEMPLATE.space(workload, H200)))
    text = _compile_to_ptx(source.steps[-1], "kernel", "sm_90a")
    assert text.count("ld.shared.b32") == loads
    assert text.count("wgmma.mma_async") == {RGB_7X7: 11, RGB_3X3: 3}[workload]
