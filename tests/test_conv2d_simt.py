"""conv2d_simt on CUDA cores: emulated against a model in int64, compiled for four architectures, and run on a GPU."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any

import integer_model
import numpy as np
import pytest
from conv2d_numpy import numpy_conv2d
from simt_emulator import SimtEmulator

import schedsearch.templates.conv2d.simt as module
from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.constructors.convolutions import conv2d
from schedsearch.ops import STAGES
from schedsearch.ops.dtypes import decode
from schedsearch.ops.layout import Layout
from schedsearch.target import PRESETS, Target
from schedsearch.templates.conv2d import simt_kernel, simt_loads, weight_rows
from schedsearch.templates.conv2d.simt import Conv2dSimt
from schedsearch.templates.conv2d.simt_sizes import Gemm
from schedsearch.templates.parts import addressing, walk
from schedsearch.testing.emulator import Memory
from schedsearch.workload import Workload

TEMPLATE, H200 = Conv2dSimt(), PRESETS["h200"]
TURING = Target("cuda", "Tesla T4", (7, 5), 40, 65536, 65536, 65536, 1024)
PASCAL = Target("cuda", "Tesla P40", (6, 1), 30, 49152, 98304, 65536, 2048)
Array = np.ndarray[Any, Any]

SMALL = dict(
    bm=16, bn=16, bk=8, tm=2, tn=2, stages=2, loads="registers", batch="folded", band=1, persistent=False, blocks_per_sm=1
)  # fmt: skip
# One workload for each way of loading and storing, with tails along every axis.
SHAPES: dict[str, dict[str, Any]] = {
    "16 bytes of NHWC": dict(n=1, h=6, w=5, c=32, k=20, r=3, s=3, padding=1, dtype="int8"),
    "8 bytes across taps": dict(n=2, h=5, w=6, c=8, k=6, r=3, s=2, padding=(1, 0, 2, 1), stride=(2, 1), dtype="uint8"),
    "4 bytes, mixed signs": dict(n=1, h=5, w=6, c=12, k=8, r=2, s=3, dilation=(1, 2), dtype="uint8", weight_dtype="int8"),
    "bytes: rgb": dict(n=1, h=9, w=8, c=3, k=12, r=5, s=5, stride=2, padding=2, dtype="int8", weight_dtype="uint8"),
    "bytes of NCHW": dict(n=2, h=5, w=4, c=6, k=5, r=3, s=2, padding=1, layout="NCHW", dtype="int8"),
    "bytes of small blocks": dict(n=1, h=5, w=4, c=9, k=6, r=2, s=2, layout="NCHW3c", dtype="int8"),
    "blocks of 4": dict(n=2, h=4, w=5, c=8, k=12, r=3, s=3, padding=1, layout="NCHW4c", dtype="int8"),
    "blocks of 32": dict(n=1, h=4, w=5, c=64, k=32, r=1, s=2, layout="NCHW32c", dtype="uint8"),
    "groups of blocks": dict(n=1, h=4, w=4, c=16, k=24, r=3, s=3, padding=1, groups=2, layout="NCHW4c", dtype="int8"),
    "groups of 2": dict(n=1, h=4, w=4, c=6, k=9, r=3, s=3, padding=1, groups=3, weight_layout="OIHW", dtype="int8"),
    "depthwise": dict(n=2, h=5, w=4, c=6, k=6, r=3, s=3, padding=1, groups=6, dtype="int8"),
    "float": dict(n=1, h=5, w=6, c=12, k=8, r=3, s=3, padding=1, dtype="float32"),
    "float NCHW": dict(n=2, h=5, w=6, c=5, k=7, r=2, s=3, padding=1, groups=1, layout="NCHW", dtype="float32"),
    "float blocks of 8": dict(n=1, h=3, w=5, c=16, k=8, r=2, s=2, layout="NCHW8c", dtype="float32"),
}
SCHEDULES: list[dict[str, Any]] = [
    {**SMALL, "loads": "async"},
    {**SMALL, "loads": "async", "stages": 4, "bk": 16, "tm": 1, "batch": "bound"},
    {**SMALL, "bm": 32, "tm": 4, "bk": 4, "band": 8},
    {**SMALL, "bn": 8, "tn": 1, "bk": 32, "loads": "async", "stages": 3},
    {**SMALL, "bn": 32, "tn": 4, "batch": "bound", "persistent": True},
]
EPILOGUES: list[list[Any]] = [
    ["bias", "relu", "requantise"],
    ["bias", {"requantise_add": {"relu": True}}],
    ["bias", "residual", "clip", {"requantise": {"to": "uint8"}}],
    ["bias", {"dequantise": {"to": "float16"}}, "scale_shift", "residual", "leaky_relu"],
    ["dequantise"],
]


def epilogue_of(workload: Workload, arrays: dict[str, Array]) -> Any:
    """A stand-in for `Epilogue`: the stages by their definitions, one value at a time."""
    operands = {a.name: decode(arrays[a.name].ravel(), a.dtype).astype(np.float64) for a in workload.signature[2:]}
    scalars = integer_model.SCALARS
    total = workload.replace(epilogue=()).output.dtype if workload.dtype != "float32" else "float32"

    def single(value: Any, valid: int, k: int, offset: int, *_: Any) -> Any:
        value = float(np.int64(int(value)).astype(total)) if total != "float32" else float(value)
        for stage in workload.epilogue:
            at = {each.name: k if each.axes == "K" else offset for each in stage.kind.operands}
            picked = {name: operands[name][index] for name, index in at.items()}
            value = float(STAGES[stage.name].apply(np.float64(value), picked, scalars, stage.params))
        return value

    def pair(a: Any, b: Any, valid: int, k: int, offset: int, *rest: Any) -> Any:
        assert k % 2 == 0 and offset % 2 == 0
        return single(a, valid, k, offset, *rest), single(b, valid, k + 1, offset + 1, *rest)

    return SimpleNamespace(params=(), alignments={}, pair=pair, single=single)


def emulate(monkeypatch: pytest.MonkeyPatch, workload: Workload, config: dict[str, Any], late: bool = True) -> Array:
    """Compares y of one configuration, emulated step by step, with the model; returns y."""
    memory = Memory()
    emulator = SimtEmulator(memory, lambda value, *_: value, late)
    emulator.stand_in(monkeypatch, simt_kernel, simt_loads, weight_rows, addressing, walk)
    arrays = integer_model.arguments(workload)
    monkeypatch.setattr(module, "Epilogue", lambda *_, **__: epilogue_of(workload, arrays))
    source = TEMPLATE.kernel(workload, H200, Config(config))
    storage = {"float16": np.uint16, "bfloat16": np.uint16}.get(workload.output.dtype, workload.output.dtype)
    y = np.frombuffer(bytearray(b"\xaa" * workload.output.nbytes), storage).reshape(workload.output.shape)
    buffers = {name: memory.add(array) for name, array in {**arrays, "y": y}.items()}
    buffers |= {name: memory.add(np.full(size, 0x77, np.uint8)) for name, size in source.workspaces.items()}
    for step in source.steps:
        emulator.run(step, buffers, sms=2, scalars=integer_model.SCALARS)
    np.testing.assert_array_equal(y, expected(workload, arrays).view(storage), err_msg=f"{workload.label} {config}")
    return y


def expected(workload: Workload, arrays: dict[str, Array]) -> Array:
    if workload.dtype != "float32":
        return integer_model.expected(workload, arrays)
    sizes = {"N": workload.n, "C": workload.c, "H": workload.h, "W": workload.w}
    plain = workload.replace(layout="NHWC", weight_layout="OHWI", epilogue=())
    x = Layout.parse(workload.layout).unpack(arrays["x"], sizes, "NHWC")
    weight_sizes = {"O": workload.k, "I": workload.c // workload.groups, "H": workload.r, "W": workload.s}
    weight = Layout.parse(workload.weight_layout).unpack(arrays["weight"], weight_sizes, "OHWI")
    y = numpy_conv2d(plain, {"x": x, "weight": weight}).astype(np.float32)
    return Layout.parse(workload.layout).pack(y, "NHWC")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.mostly_long(3)
def test_every_way_of_loading_and_storing_computes_the_convolution(
    monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]
) -> None:
    emulate(monkeypatch, conv2d(**shape), SMALL)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.mostly_long(3)
def test_every_schedule_computes_the_same(monkeypatch: pytest.MonkeyPatch, schedule: dict[str, Any]) -> None:
    workload = conv2d(n=2, h=4, w=3, c=160, k=40, r=2, s=2, padding=1, stride=(1, 2), groups=2, dtype="int8")
    TEMPLATE.space(workload, H200).require(Config({**schedule, "persistent": False, "blocks_per_sm": 1, "band": 1}))
    emulate(monkeypatch, workload, schedule, late=True)


def test_copies_that_are_done_at_once_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = conv2d(n=1, h=4, w=4, c=80, k=8, r=1, s=2, dtype="int8")
    emulate(monkeypatch, workload, {**SMALL, "loads": "async", "stages": 3}, late=False)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NCHW4c"])
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
@pytest.mark.mostly_long(4)
def test_epilogues_get_the_channel_and_the_place_in_y(monkeypatch: pytest.MonkeyPatch, layout: str, epilogue: Any) -> None:
    shape: dict[str, Any] = dict(n=2, h=3, w=2, c=4, k=8, r=1, s=1, dtype="int8", layout=layout)
    emulate(monkeypatch, conv2d(**shape, epilogue=epilogue), {**SMALL, "tm": 1, "tn": 1, "bn": 8, "bk": 4})


@pytest.mark.parametrize("loads", ["registers", "async"])
@pytest.mark.parametrize("zero_points", [["x"], ["weight"], ["x", "weight"]], ids=str)
@pytest.mark.parametrize("dtypes", [("int8", "uint8"), ("uint8", "uint8")], ids=str)
def test_zero_points_are_exact_with_padding_and_channels_that_do_not_fill_a_word(
    monkeypatch: pytest.MonkeyPatch, zero_points: list[str], dtypes: tuple[str, str], loads: str
) -> None:
    dtype, weight_dtype = dtypes
    shape: dict[str, Any] = dict(
        n=1, h=4, w=3, k=5, r=3, s=2, dtype=dtype, weight_dtype=weight_dtype, zero_points=zero_points
    )
    if loads == "registers":
        emulate(monkeypatch, conv2d(**shape, c=6, groups=1, padding=(1, 0, 2, 1)), SMALL)
    else:
        emulate(monkeypatch, conv2d(**shape, c=12), {**SMALL, "loads": loads})


def draw(seed: int) -> tuple[Workload, Config]:
    """A random convolution of everything that the operator has, and a random small configuration."""
    rng = random.Random(seed)
    dtype = rng.choice(("int8", "uint8", "float32"))
    integer = dtype != "float32"
    layout = rng.choice(("NHWC", "NCHW", "NCHW2c", "NCHW4c", "NCHW16c"))
    block = int(re.sub(r"\D", "", layout) or 1)
    groups, r, s = rng.choice((1, 1, 2, 3)), rng.randint(1, 3), rng.randint(1, 3)
    parameters: dict[str, Any] = dict(
        n=rng.randint(1, 3), h=rng.randint(3, 6), w=rng.randint(3, 6), r=r, s=s, dtype=dtype, layout=layout, groups=groups,
        c=groups * block * rng.randint(1, max(1, 12 // block)), k=groups * block * rng.randint(1, max(1, 12 // block)),
        stride=(rng.randint(1, 2), rng.randint(1, 3)), padding=tuple(rng.randint(1, 3) for _ in range(4)),
        dilation=(rng.randint(1, 2), rng.randint(1, 2)),
    )  # fmt: skip
    if integer:
        parameters["weight_dtype"] = rng.choice(("int8", "uint8"))
        parameters["zero_points"] = [name for name in ("x", "weight") if rng.random() < 0.4]
        parameters["epilogue"] = rng.choice([[], *EPILOGUES])
    if block == 1:
        parameters["weight_layout"] = rng.choice(("OHWI", "OIHW"))
    workload = conv2d(**parameters)
    space = TEMPLATE.space(workload, H200).restrict({"bm": [16, 32], "bn": [8, 16], "tm": [1, 2, 4], "persistent": [False]})
    return workload, space.sample(1, np.random.default_rng(seed))[0]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.mostly_long(4)
def test_random_convolutions_and_configurations_are_exact(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    workload, config = draw(seed)
    assert TEMPLATE.validate(workload, H200) is None
    emulate(monkeypatch, workload, dict(config), late=bool(seed % 2))


# --- Compiling --------------------------------------------------------------------------------------------------------
LAYER: dict[str, Any] = dict(n=32, h=56, w=56, c=64, k=64, r=3, s=3, padding=1)
COMPILED: dict[str, tuple[Target, dict[str, Any]]] = {
    "dp4a, cp.async": (H200, dict(dtype="int8", epilogue=["bias", "relu", "requantise"])),
    "dp4a, blocks, zero points": (
        PRESETS["a100"],
        dict(dtype="uint8", weight_dtype="int8", layout="NCHW4c", zero_points=["x", "weight"], epilogue=["requantise"]),
    ),
    "float32, NCHW, before cp.async": (TURING, dict(dtype="float32", layout="NCHW", epilogue=["bias", "relu", "clip"])),
    "bytes, bfloat16 before its instructions": (
        TURING,
        dict(dtype="int8", c=3, epilogue=["bias", {"dequantise": {"to": "bfloat16"}}, "leaky_relu"]),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", COMPILED)
def test_the_default_compiles_without_spills_or_local_memory(case: str) -> None:
    target, changes = COMPILED[case]
    workload = conv2d(**{**LAYER, **changes})
    assert TEMPLATE.validate(workload, target) is None
    config = TEMPLATE.default(workload, target, TEMPLATE.space(workload, target))
    built = compile_source(TEMPLATE.kernel(workload, target, config), target)
    assert built.resources.local_bytes == built.resources.spill_bytes == 0
    assert built.resources.registers * built.artifact.plan.steps[-1].block_threads <= target.registers_per_sm
    assert built.shared, "a name is missing in SHAPED_BY"


def test_the_weight_is_packed_once_for_many_calls() -> None:
    workload = conv2d(**LAYER, dtype="int8", zero_points=["x"])
    source = TEMPLATE.kernel(workload, H200, TEMPLATE.default(workload, H200, TEMPLATE.space(workload, H200)))
    assert [step.constant for step in source.steps] == [True, True, False]
    assert source.workspaces == {"weight_rows": 64 * 9 * 64, "weight_sums": 4 * 64}


# --- Supported workloads ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(6))
def test_the_default_is_legal_on_every_card(seed: int) -> None:
    rng = random.Random(seed)
    for target in (PASCAL, TURING, PRESETS["a100"], H200):
        workload, _ = draw(100 * seed)
        workload = workload.replace(n=rng.choice((1, 32, 100_000)), h=rng.randint(9, 300), w=rng.randint(9, 300))
        space = TEMPLATE.space(workload, target)
        assert space.check(TEMPLATE.default(workload, target, space)) == []
        plain = TEMPLATE.plain(workload, target, space)
        assert plain is None or space.check(plain) == []


def test_words_and_loads_follow_the_layout() -> None:
    def sizes(**changes: Any) -> tuple[int, int, int]:
        gemm = Gemm.of(conv2d(**{**LAYER, "dtype": "int8", **changes}))
        return gemm.piece, gemm.vector, gemm.tap_words

    assert sizes() == (4, 4, 16)
    assert sizes(c=24, k=6) == (2, 1, 6)
    assert sizes(c=3) == (0, 4, 1)
    assert sizes(layout="NCHW") == (0, 1, 16)
    assert sizes(layout="NCHW4c") == (1, 4, 16)
    assert sizes(layout="NCHW2c") == (0, 1, 16)
    assert sizes(dtype="float32", layout="NCHW") == (1, 1, 64)
    assert sizes(dtype="float32", groups=32) == (2, 1, 2)


@pytest.mark.parametrize(
    ("changes", "target", "word"),
    [
        (dict(dtype="float16"), H200, "dtype is float16; allowed: float32, int8, uint8"),
        (dict(dtype="int8"), Target("cuda", "Tesla P100", (6, 0), 56, 49152, 65536, 65536, 2048), "6.1 or later"),
        (dict(dtype="int8", n=2**30), H200, "n is 1073741824"),
    ],
    ids=str,
)
def test_refusals_say_why(changes: dict[str, Any], target: Target, word: str) -> None:
    assert word in str(TEMPLATE.validate(conv2d(**{**LAYER, **changes}), target))
