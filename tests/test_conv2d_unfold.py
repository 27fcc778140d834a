"""The convolution of unfolded columns: the supported workloads, its unfolding emulated thread by thread, the remaining
convolution gives the same result, every schedule compiles well, and results on a GPU are exact."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from conv2d_numpy import FLOAT_STAGES, convolve, integers
from conv2d_support import covering

import schedsearch.templates.conv2d.unfold as module
from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.launch import Pointer, TensorMap
from schedsearch.target import PRESETS, Target
from schedsearch.template import KernelStep
from schedsearch.templates.conv2d.unfold import Conv2dUnfold
from schedsearch.templates.conv2d.wgmma import Conv2dWgmma
from schedsearch.templates.parts.window_sums import SUMS, WindowSums
from schedsearch.testing.emulator import Emulator, Memory, replace_casts
from schedsearch.workload import Workload

H200 = PRESETS["h200"]
TEMPLATE = Conv2dUnfold()
RANDOM_SHAPES, SHARDS = 12, 2

RGB_7X7 = Workload.conv2d(n=1, h=224, w=224, c=3, k=64, r=7, s=7, stride=2, padding=3)
RGB_3X3 = Workload.conv2d(n=1, h=224, w=224, c=3, k=64, r=3, s=3, padding=1)
RGB_3X3_STRIDED = Workload.conv2d(n=1, h=299, w=299, c=3, k=32, r=3, s=3, stride=2)
SMALL = Workload.conv2d(n=2, h=6, w=7, c=3, k=16, r=3, s=3, padding=1)


def random_workload(rng: np.random.Generator) -> Workload:
    """A small convolution of any kind that the template supports."""
    while True:
        r, s = (int(v) for v in rng.integers(1, 8, 2))
        h, w = (int(v) for v in rng.integers(1, 40, 2))
        stride, dilation = ([int(v) for v in np.minimum(rng.integers(1, top, 2), rng.integers(1, top, 2))] for top in (9, 5))
        padding = [int(v) for v in rng.integers(0, 8, 4)]
        if (r - 1) * dilation[0] >= h + padding[0] + padding[2] or (s - 1) * dilation[1] >= w + padding[1] + padding[3]:
            continue
        stages = list(FLOAT_STAGES)
        workload = Workload.conv2d(
            n=int(rng.integers(1, 6)), h=h, w=w, c=int(rng.integers(1, 31)), k=8 * int(rng.integers(1, 13)), r=r, s=s,
            stride=stride, padding=padding, dilation=dilation,
            dtype=["float16", "bfloat16"][rng.integers(2)],
            out_dtype=["float16", "bfloat16", "float32"][rng.integers(3)],
            epilogue=[stages[i] for i in rng.permutation(len(stages))[: rng.integers(0, 4)]],
        )  # fmt: skip
        if TEMPLATE.validate(workload, H200) is None:
            return workload


def config_with(workload: Workload, unfold_threads: int, unfold_chunks: int) -> Config:
    default = TEMPLATE.default(workload, H200, TEMPLATE.space(workload, H200))
    return Config({**default, "unfold_threads": unfold_threads, "unfold_chunks": unfold_chunks})


def inner_workload(w: Workload) -> Workload:
    """The remaining convolution, from the definition: columns of the kernel are channels of one output column each."""
    channels = math.ceil(w.s * w.c / 8) * 8
    return Workload.conv2d(
        n=w.n, h=w.h, w=w.output.shape[2], c=channels, k=w.k, r=w.r, s=1, stride=(w.stride[0], 1),
        padding=(w.padding[0], 0, w.padding[2], 0), dilation=(w.dilation[0], 1), dtype=w.dtype, out_dtype=w.out_dtype,
        epilogue=w.epilogue,
    )  # fmt: skip


# --- Emulated -----------------------------------------------------------------------------------------------------------


class UnfoldEmulator(Emulator):
    """Emulates the loads of this template: it must not read an element that is not valid."""

    def __init__(self, memory: Any) -> None:
        super().__init__(memory, lambda value, *_: value, late_copies=False)

    def load_halves(self, low_address: int, low: int, high_address: int, high: int) -> int:
        halves = [
            int(self.memory.at(address, 2).view(np.uint16)[0]) if valid else 0
            for address, valid in ((low_address, low), (high_address, high))
        ]
        return halves[0] | halves[1] << 16

    def load_run_of_bytes(self, piece: int) -> Any:
        def load(address: int, first: int, stop: int, fill: int) -> tuple[int, ...]:
            assert first % piece == stop % piece == 0 and fill == (fill & 255) * 0x01010101
            run = np.full(16, fill & 255, np.uint8)
            for at in range(0, 16, piece):
                if first <= at < stop:
                    run[at : at + piece] = self.memory.at(address + at, piece)
            return tuple(int(word) for word in run.view(np.uint32))

        return load

    def load_four_bytes(self, row: int, *positions_and_fill: int) -> int:
        *positions, fill = positions_and_fill
        loaded = [int(self.memory.at(row + at, 1)[0]) if at >= 0 else fill & 255 for at in positions]
        return sum(byte << 8 * number for number, byte in enumerate(loaded))


def unfolding_step(
    monkeypatch: pytest.MonkeyPatch, emulator: UnfoldEmulator, workload: Workload, config: Config
) -> KernelStep:
    replace_casts(monkeypatch, module, emulator.types)
    for name in ("cuda", "load_halves", "load_run", "load_run_of_bytes", "load_four_bytes"):
        monkeypatch.setattr(module, name, getattr(emulator, name))
    monkeypatch.setattr(module, "ptx", emulator)
    return TEMPLATE.kernel(workload, H200, config).steps[0]


EMULATED: dict[str, tuple[Workload, int]] = {
    "rgb, one row of padding": (SMALL, 1),
    "rgb, four chunks per thread": (SMALL, 4),
    "the stem of a network": (SMALL.replace(n=1, h=5, w=20, r=7, s=7, stride=2, padding=3), 2),
    "dilated": (SMALL.replace(dilation=(1, 2), padding=(1, 3, 1, 0)), 1),
    "dilated, an even number of channels": (SMALL.replace(c=6, dilation=(2, 3), padding=(2, 4, 2, 5)), 1),
    "an even number of channels": (SMALL.replace(c=10, s=2, padding=(1, 0, 1, 1)), 1),
    "one channel": (SMALL.replace(c=1), 1),
    "five channels, nothing filled up in 8 columns": (SMALL.replace(c=5, s=8, padding=(1, 4, 1, 3)), 1),
    "one tap, padded channels": (SMALL.replace(c=12, r=1, s=1, padding=0), 1),
    "wide strides": (SMALL.replace(w=40, stride=(3, 11)), 1),
    "an image narrower than the kernel": (SMALL.replace(w=1, s=5, padding=(1, 2, 1, 4)), 1),
    "columns of padding alone": (SMALL.replace(w=2, padding=(1, 9, 1, 9)), 1),
}


@pytest.mark.parametrize("name", EMULATED)
def test_unfolding_and_the_convolution_that_is_left_compute_the_convolution(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    workload, chunks = EMULATED[name]
    assert TEMPLATE.validate(workload, H200) is None
    memory = Memory()
    emulator = UnfoldEmulator(memory)
    step = unfolding_step(monkeypatch, emulator, workload, config_with(workload, 64, chunks))
    inner = inner_workload(workload)
    arrays = integers(workload, np.random.default_rng(0))
    given = {key: array.astype(np.float16) for key, array in arrays.items()}
    shapes = {"x_unfolded": (inner.n, inner.h, inner.w, inner.c), "weight_unfolded": (inner.k, inner.r, 1, inner.c)}
    made = {key: np.full(shape, np.nan, np.float16) for key, shape in shapes.items()}
    emulator.run(step, {key: memory.add(array) for key, array in {**given, **made}.items()}, sms=1)

    left = convolve(inner, made["x_unfolded"].astype(np.float32), made["weight_unfolded"].astype(np.float32))
    np.testing.assert_array_equal(left, convolve(workload, arrays["x"], arrays["weight"]))


WHOLE = {"k": 16, "dtype": "int8"}
WHOLE_NUMBERS: dict[str, tuple[dict[str, Any], int]] = {
    "rgb, zero point": ({"c": 3, "zero_points": ["x"], "padding": (1, 2, 0, 1)}, 1),
    "uint8, 4 channels, zero point": ({"c": 4, "dtype": "uint8", "weight_dtype": "int8", "zero_points": ["x"]}, 2),
    "6 channels, dilated, zero point": ({"c": 6, "dilation": (1, 2), "padding": (1, 3, 1, 0), "zero_points": ["x"]}, 1),
    "rgb, zero point of the weight": ({"c": 3, "zero_points": ["weight"]}, 1),
    "rgb, both zero points": ({"c": 3, "zero_points": ["x", "weight"], "stride": (1, 2)}, 1),
    "an even number of channels": ({"c": 10, "weight_dtype": "uint8", "stride": 2}, 1),
    "one channel, dilated": ({"c": 1, "dilation": 2, "padding": 2}, 4),
}


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
def test_unfolding_whole_numbers_fills_columns_outside_of_the_image_with_the_zero_point(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    change, chunks = WHOLE_NUMBERS[name]
    workload = Workload.conv2d(**{**dict(n=2, h=6, w=7, r=3, s=3, padding=1), **WHOLE, **change})
    assert TEMPLATE.validate(workload, H200) is None
    memory = Memory()
    emulator = UnfoldEmulator(memory)
    unfolding_step(monkeypatch, emulator, workload, config_with(workload, 64, chunks))
    source = TEMPLATE.kernel(workload, H200, config_with(workload, 64, chunks))
    z, channels = 5 if "x" in workload.zero_points else 0, math.ceil(workload.s * workload.c / 16) * 16
    rng = np.random.default_rng(0)
    given = {arg.name: rng.integers(0, 8, arg.shape).astype(arg.dtype) for arg in workload.signature}
    shapes = {
        "x_unfolded": (workload.n, workload.h, workload.output.shape[2], channels),
        "weight_unfolded": (workload.k, workload.r, 1, channels),
    }
    made = {key: np.full(shape, 99, given[key.split("_")[0]].dtype) for key, shape in shapes.items()}
    step = source.steps[-2]
    buffers = {key: memory.add(array) for key, array in {**given, **made}.items()}
    emulator.run(step, buffers, sms=1, scalars={"x_zero_point": float(z)})

    inner = Workload.conv2d(
        n=workload.n, h=workload.h, w=workload.output.shape[2], c=channels, k=workload.k, r=workload.r, s=1,
        stride=(workload.stride[0], 1), padding=(workload.padding[0], 0, workload.padding[2], 0),
        dilation=(workload.dilation[0], 1), dtype="float32",
    )  # fmt: skip
    left = convolve(inner, made["x_unfolded"].astype(np.float32) - z, made["weight_unfolded"].astype(np.float32))
    plain = workload.replace(dtype="float32", weight_dtype="float32", zero_points=(), out_dtype="float32")
    right = convolve(plain, given["x"].astype(np.float32) - z, given["weight"].astype(np.float32))
    np.testing.assert_array_equal(left, right)


def test_sums_for_a_zero_point_of_the_weight_are_those_of_x_as_it_is_given() -> None:
    """The kernel looks up the sums of its own output pixels. Unfolding changes neither their number nor their order."""
    workload = SMALL.replace(dtype="int8", out_dtype="int32", zero_points=["x", "weight"], c=4, padding=(1, 2, 0, 1))
    source = TEMPLATE.kernel(workload, H200, config_with(workload, 64, 1))
    windows = WindowSums.of(workload)
    assert windows is not None and len(source.steps) == 4
    assert (source.steps[0].params, source.steps[0].grid) == (windows.step().params, windows.step().grid)
    assert Pointer(SUMS) in source.steps[-1].params and windows.workspaces.items() <= source.workspaces.items()
    assert source.alignments["x"] == windows.run == 4


@pytest.mark.long
def test_the_stem_of_a_quantised_network_compiles() -> None:
    epilogue = ["bias", "relu", {"requantise": {"to": "uint8"}}]
    workload = RGB_7X7.replace(
        dtype="uint8", weight_dtype="int8", zero_points=["x"], epilogue=epilogue, out_dtype="uint8"
    )  # fmt: skip
    source = TEMPLATE.kernel(workload, H200, TEMPLATE.default(workload, H200, TEMPLATE.space(workload, H200)))
    assert [step.constant for step in source.steps] == [True, False, False]
    compiled = compile_source(source, H200)
    assert compiled.resources.local_bytes == compiled.resources.spill_bytes == 0
    compiled.artifact.plan.check(workload)


class CountingMemory:
    """x of any size, with element i equal to i modulo a prime, and the values that a block writes, by address."""

    PRIME = 65521
    X, UNFOLDED = 1 << 50, 1 << 54

    def __init__(self) -> None:
        self.written: dict[int, np.ndarray[Any, Any]] = {}

    def at(self, address: int, nbytes: int) -> np.ndarray[Any, Any]:
        if address >= self.UNFOLDED:
            return self.written.setdefault(address - self.UNFOLDED, np.zeros(nbytes, np.uint8))
        first = (address - self.X) // 2
        return (np.arange(first, first + nbytes // 2) % self.PRIME).astype(np.uint16).view(np.uint8)


@pytest.mark.parametrize("c", [3, 2])
def test_offsets_past_32_bits_are_right(monkeypatch: pytest.MonkeyPatch, c: int) -> None:
    workload = Workload.conv2d(n=2**20 + 3, h=64, w=64, c=c, k=8, r=1, s=5, padding=(0, 2, 0, 2), stride=(8, 1))
    assert TEMPLATE.validate(workload, H200) is None
    memory = CountingMemory()
    emulator = UnfoldEmulator(memory)
    step = unfolding_step(monkeypatch, emulator, workload, config_with(workload, 64, 1))
    pixel_chunks = 2
    chunks = workload.n * workload.h * workload.w * pixel_chunks
    assert chunks > 2**32
    for block in (2**25, 2**26 + 12345, chunks // 64 - 1):
        memory.written.clear()
        emulator.run_blocks(step, [memory.X, memory.UNFOLDED, 0, 0], [block])
        assert sorted(memory.written) == [16 * (64 * block + i) for i in range(64)]
        for address, chunk in memory.written.items():
            pixel, part = divmod(address // 16, pixel_chunks)
            row, q = divmod(pixel, workload.w)
            for i, value in enumerate(chunk.view(np.uint16)):
                tap, channel = divmod(8 * part + i, c)
                inside = tap < 5 and 0 <= q - 2 + tap < workload.w
                right = ((row * workload.w + q - 2 + tap) * c + channel) % memory.PRIME if inside else 0
                assert value == right, (block, address, i)


# --- The plan -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(12))
def test_the_second_step_is_conv2d_wgmma_over_the_workspaces(number: int) -> None:
    workload = random_workload(np.random.default_rng([41, number]))
    inner = inner_workload(workload)
    config = TEMPLATE.default(workload, H200, TEMPLATE.space(workload, H200))
    source = TEMPLATE.kernel(workload, H200, config)
    inner_config = Config({name: config[name] for name in Conv2dWgmma().space(inner, H200).names})
    alone = Conv2dWgmma().kernel(inner, H200, inner_config)
    assert inner.output == workload.output and len(source.steps) == 2
    assert source.workspaces == {
        "x_unfolded": 2 * math.prod((inner.n, inner.h, inner.w, inner.c)),
        "weight_unfolded": 2 * math.prod((inner.k, inner.r, inner.c)),
    }
    assert [p.buffer for p in source.steps[0].params if isinstance(p, Pointer)] == [
        "x", "x_unfolded", "weight", "weight_unfolded",
    ]  # fmt: skip
    assert source.steps[1].grid == alone.steps[0].grid and source.steps[1].cluster == alone.steps[0].cluster
    for ours, theirs in zip(source.steps[1].params, alone.steps[0].params):
        if isinstance(theirs, (Pointer, TensorMap)) and theirs.buffer in ("x", "weight"):
            assert isinstance(ours, type(theirs)) and ours.buffer == f"{theirs.buffer}_unfolded"
        else:
            assert ours == theirs
    for name in ("x", "weight"):
        assert source.alignments[name] == (4 if workload.c % 2 == 0 else 2)


# --- Supported workloads, and the space --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workload", "target", "words"),
    [
        (SMALL, PRESETS["a100"], ["9.0", "8.0"]),
        (SMALL, PRESETS["b200"], ["9.0", "10.0"]),
        (SMALL.replace(dtype="float32", out_dtype="float32"), H200, ["dtype is float32", "float16, bfloat16"]),
        (SMALL.replace(dtype="float8_e4m3"), H200, ["dtype is float8_e4m3", "float16, bfloat16"]),
        (SMALL.replace(layout="NCHW", weight_layout="OIHW"), H200, ["NCHW", "NHWC"]),
        (SMALL.replace(weight_layout="OIHW"), H200, ["OIHW", "OHWI"]),
        (SMALL.replace(c=6, groups=2), H200, ["groups", "2"]),
        (SMALL.replace(c=8), H200, ["c is 8", "conv2d_wgmma"]),
        (SMALL.replace(k=12), H200, ["k is 12", "8"]),
        (SMALL.replace(c=43), H200, ["s * c is 129", "128"]),
        (SMALL.replace(stride=(9, 1)), H200, ["vertical", "9", "8"]),
        (SMALL.replace(padding=(129, 1, 129, 1)), H200, ["vertical", "-129", "-128"]),
        (SMALL.replace(n=2**31 // 42), H200, ["pixels", "2**31"]),
        (SMALL.replace(n=1, h=1, w=2**30, r=1, stride=(1, 8), padding=0), H200, ["a padded row", "2**31"]),
        (SMALL.replace(n=1, h=1, w=2**28 + 2, c=1, r=1, padding=0), H200, ["an unfolded row", "2**31"]),
    ],
)
def test_an_unsupported_workload_is_refused_with_a_reason(workload: Workload, target: Target, words: list[str]) -> None:
    reason = TEMPLATE.validate(workload, target)
    assert reason is not None and all(word in reason for word in words), reason


@pytest.mark.parametrize(
    "workload",
    [
        RGB_7X7,
        RGB_7X7.replace(n=32),
        RGB_3X3,
        RGB_3X3_STRIDED,
        SMALL.replace(c=42),
        SMALL.replace(stride=(1, 100), w=1000),
        SMALL.replace(dilation=(1, 300), w=1000),
        SMALL.replace(padding=(1, 500, 1, 400)),
        SMALL.replace(n=1, h=1, w=1, r=1, s=1, c=1, k=8, padding=0),
    ],
)
def test_a_supported_workload_has_a_legal_default(workload: Workload) -> None:
    assert TEMPLATE.validate(workload, H200) is None
    assert TEMPLATE.space(workload, H200).check(TEMPLATE.default(workload, H200, TEMPLATE.space(workload, H200))) == []


@pytest.mark.parametrize("number", range(20))
def test_random_workloads_have_a_legal_default(number: int) -> None:
    workload = random_workload(np.random.default_rng([42, number]))
    assert TEMPLATE.space(workload, H200).check(TEMPLATE.default(workload, H200, TEMPLATE.space(workload, H200))) == []


# --- Compiled -----------------------------------------------------------------------------------------------------------


def random_candidate(number: int) -> tuple[Workload, Config]:
    rng = np.random.default_rng([43, number])
    workload = random_workload(rng)
    return workload, TEMPLATE.space(workload, H200).sample(1, rng)[0]


@pytest.mark.long
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_schedules_of_random_shapes_compile_well(shard: int) -> None:
    numbers = ("stages", "band", "unfold_threads", "unfold_chunks")  # which do not make other code
    for workload, config in covering(map(random_candidate, range(RANDOM_SHAPES)), but=numbers)[shard::SHARDS]:
        source = TEMPLATE.kernel(workload, H200, config)
        built = compile_source(source, H200)  # refuses spills and serialised wgmma
        assert set(built.artifact.plan.workspaces) == {"x_unfolded", "weight_unfolded"}
        assert len(built.artifact.plan.steps) == 2
        if not workload.epilogue:
            assert built.resources.local_bytes == 0
