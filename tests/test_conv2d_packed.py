"""conv2d over packed arguments: all steps emulated thread by thread against a model in int64, its plan, and its limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cluster_emulator import ClusterEmulator
from conv2d_numpy import KINDS, check_schedules
from moves_emulator import MovesEmulator
from test_conv2d_integers import drawn, sums
from test_conv2d_wgmma_emulated import SMALL, Requantise
from test_conv2d_wgmma_zero_points import run_ptx

import schedsearch.templates.conv2d.packed as module
import schedsearch.templates.conv2d.wgmma as wgmma_module
import schedsearch.templates.conv2d.wgmma_loads as wgmma_loads
from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.ops import Layout
from schedsearch.target import PRESETS, Target
from schedsearch.template import KernelStep
from schedsearch.templates.conv2d import wgmma_store
from schedsearch.templates.conv2d.packed import Conv2dPacked, Packed
from schedsearch.templates.layout_transform import kernels, places
from schedsearch.templates.layout_transform.repack import Repack
from schedsearch.templates.parts import (
    addressing,
    gather,
    pipeline,
    sharing,
    store,
    store_words,
    walk,
    wgmma,
    window_sums,
    zero_points,
)
from schedsearch.testing.emulator import Memory
from schedsearch.testing.template_contract import TemplateContract
from schedsearch.workload import Workload

H200 = PRESETS["h200"]
TEMPLATE = Conv2dPacked()
SHAPE: dict[str, Any] = {"n": 2, "h": 5, "w": 6, "c": 20, "k": 20, "r": 2, "s": 3, "padding": 1, "dtype": "int8"}


def conv(**change: Any) -> Workload:
    return Workload.conv2d(**{**SHAPE, **change})


# --- Emulated -----------------------------------------------------------------------------------------------------------

EMULATED: dict[str, dict[str, Any]] = {
    "NCHW, both channels filled up": {"layout": "NCHW"},
    "NHWC, three input channels, mixed signs": {"c": 3, "k": 24, "dtype": "uint8", "weight_dtype": "int8"},
    "NHWC with weights OIHW": {"c": 16, "k": 24, "weight_layout": "OIHW"},
    "a zero point, borders on all sides": {
        "layout": "NCHW",
        "zero_points": ["x"],
        "padding": (1, 2, 0, 1),
        "stride": (2, 1),
    },
    "both zero points, channels that fill up": {
        "layout": "NCHW",
        "zero_points": ["x", "weight"],
        "padding": (1, 2, 0, 1),
        "stride": (2, 1),
    },
    "NHWC, a zero point of the weight, 8-bit output": {"c": 28, "zero_points": ["weight"], "epilogue": ["requantise"]},
    "NCHW4c, 8-bit output": {"layout": "NCHW4c", "epilogue": ["requantise"]},
    "NCHW, 8-bit output of one channel": {"layout": "NCHW", "c": 1, "k": 1, "n": 1, "epilogue": ["requantise"]},
}


# name: (workload, x, batch)
FORMS: dict[str, tuple[dict[str, Any], int, str]] = {
    "blocks of 16, folded; strides; the last block has 4 channels": (
        {"layout": "NCHW", "h": 7, "stride": (2, 1), "padding": (1, 2, 0, 1)},
        16,
        "folded",
    ),
    "blocks of 16, an image for each tile, a zero point": (
        {"layout": "NCHW", "n": 3, "zero_points": ["x"], "padding": (1, 2, 0, 1)},
        16,
        "bound",
    ),
    "blocks of 32, folded, 3 images, a zero point, 8-bit output": (
        {"layout": "NCHW", "n": 3, "c": 70, "k": 24, "zero_points": ["x"], "epilogue": ["requantise"]},
        32,
        "folded",
    ),
    "blocks of 16, an image for each tile, both zero points": (
        {"layout": "NCHW4c", "n": 3, "zero_points": ["x", "weight"], "padding": (1, 2, 0, 1)},
        16,
        "bound",
    ),
    "blocks of 32 from NHWC, an image for each tile, dilation": (
        {"c": 40, "h": 6, "dilation": 2, "padding": 2},
        32,
        "bound",
    ),
    "blocks of 64 from NCHW4c, 8-bit output": (
        {"layout": "NCHW4c", "c": 68, "r": 1, "padding": 0, "epilogue": ["requantise"]},
        64,
        "folded",
    ),
    "blocks of 128, one image": ({"layout": "NCHW", "n": 1, "c": 130, "r": 1, "s": 1, "padding": 0}, 128, "folded"),
    "all channels, an image for each tile, past both ends, 8-bit output": (
        {"layout": "NCHW", "h": 9, "w": 9, "zero_points": ["x"], "epilogue": ["requantise"]},
        32,
        "bound",
    ),
}


@pytest.mark.parametrize("name", EMULATED)
@pytest.mark.mostly_long(9)
def test_all_steps_together_compute_the_convolution(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    w = conv(**EMULATED[name])
    inner = Packed(w, H200).workload
    assert (inner.layout, inner.weight_layout, inner.c % 16, inner.k % 8) == ("NHWC", "OHWI", 0, 0)
    assert_computes(monkeypatch, w, inner.c, "folded")


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.mostly_long(9)
def test_x_in_blocks_gives_the_same_sums(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    change, x, batch = FORMS[name]
    assert_computes(monkeypatch, conv(**change), x, batch)


def configured(w: Workload, x: int, batch: str, **change: Any) -> Config:
    """The default's tiles around a small convolution of this form of x."""
    form, space = Packed(w, H200).form(x, batch), TEMPLATE.space(w, H200)
    bk = 32 if x == Packed(w, H200).workload.c else max(x, 32)
    values = {**TEMPLATE.default(w, H200, space), **SMALL, "stages": 2, "bn": 16, "bk": bk, "x": x, "batch": batch, **change}
    around = Packed(w, H200).around(form)
    values |= {knob.name: knob.values[0] for knob in space.knobs if knob.name.startswith("pack_")}
    if "x" in around:
        own = around["x"].default()
        values |= {f"pack_{name}": value for name, value in own.items() if f"pack_{name}" in values}
    return Config(values)


def assert_computes(monkeypatch: pytest.MonkeyPatch, w: Workload, block: int, batch: str) -> None:
    """All steps of a configuration, emulated, against a model in int64."""
    assert TEMPLATE.validate(w, H200) is None
    inner, form = Packed(w, H200).workload, Packed(w, H200).form(block, batch)
    memory = Memory()
    packing, convolving = MovesEmulator(memory, late_copies=True), ClusterEmulator(memory, lambda value, *_: value, True)
    packing.stand_in(monkeypatch, kernels, places)
    parts = (addressing, gather, pipeline, sharing, store, store_words, walk, wgmma, zero_points)
    convolving.stand_in(monkeypatch, wgmma_module, wgmma_loads, wgmma_store, window_sums, *parts)
    run_ptx(monkeypatch, memory)
    monkeypatch.setattr(wgmma_module, "Epilogue", Requantise)
    config = configured(w, block, batch)
    assert TEMPLATE.space(w, H200).check(config) == []
    source = TEMPLATE.kernel(w, H200, config)

    arrays, x, weight = drawn(w)
    x_zero, weight_zero = zeros_of(w)
    y = np.full(w.output.shape, 0x55, w.output.dtype)
    given = {"x": arrays["x"], "weight": arrays["weight"], "y": y}
    made = {name: np.full(nbytes, 0x55, np.uint8) for name, nbytes in source.workspaces.items()}
    buffers = {name: memory.add(array) for name, array in {**given, **made}.items()}
    x_arg, weight_arg = inner.signature[:2]
    tensors = {}
    for spec, shape in (
        (x_arg, Layout.parse(form.layout).shape({"N": w.n, "C": inner.c, "H": w.h, "W": w.w})),
        (weight_arg, (inner.k, inner.r * inner.s, inner.c)),
        (inner.output, inner.output.shape),
    ):
        packed = f"{spec.name}_packed"
        array = made[packed].view(spec.dtype) if packed in made else given[spec.name]
        tensors[packed if packed in made else spec.name] = array.reshape(shape)
    for step in source.steps:
        emulator = packing if is_move(step) else convolving
        emulator.run(step, buffers, 2, tensors, {"x_zero_point": float(x_zero), "weight_zero_point": float(weight_zero)})

    expected = sums(w, x - x_zero, weight - weight_zero)
    if w.epilogue:
        half = np.rint((np.arange(w.k) % 3 + 1) * expected / 2)
        expected = np.clip(half, np.iinfo(y.dtype).min, np.iinfo(y.dtype).max)
    np.testing.assert_array_equal(y, Layout.parse(w.layout).pack(expected.astype(w.output.dtype), "NHWC"))


def zeros_of(w: Workload) -> list[int]:
    """The zero points of x and of the weight."""
    return [zero if name in w.zero_points else 0 for name, zero in (("x", 3), ("weight", 5))]


def is_move(step: KernelStep) -> bool:
    return step.function.__name__ in ("transpose", "copy")


def test_vectors_of_channels_are_filled_up_with_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    emulator = MovesEmulator(memory)
    emulator.stand_in(monkeypatch, kernels, places)
    repack = Repack.of(Layout.parse("K"), Layout.parse("K"), {"K": 21}, 4, H200, y_sizes={"K": 32})
    bias, filled = np.arange(1, 22, dtype=np.int32), np.full(32, -1, np.int32)
    emulator.run(
        repack.step(repack.default(), x="bias", y="filled"), {"bias": memory.add(bias), "filled": memory.add(filled)}, 1
    )
    assert filled.tolist() == [*range(1, 22), *[0] * 11]


# --- The plan -----------------------------------------------------------------------------------------------------------


def plan(w: Workload) -> tuple[list[tuple[str, str, bool]], Any]:
    """(read, written, constant) of each step around the convolution, and the source."""
    source = TEMPLATE.kernel(w, H200, TEMPLATE.default(w, H200, TEMPLATE.space(w, H200)))
    moves = [(*(param.buffer for param in step.params), step.constant) for step in source.steps if is_move(step)]
    return moves, source


def test_weights_and_vectors_are_packed_once_and_x_at_every_call() -> None:
    moves, source = plan(conv(layout="NCHW", epilogue=["bias", "residual", "relu", "requantise"]))
    assert moves == [
        ("x", "x_packed", False),
        ("weight", "weight_packed", True),
        ("bias", "bias_packed", True),
        ("residual", "residual_packed", False),
        ("requantise_scale", "requantise_scale_packed", True),
        ("y_packed", "y", False),
    ]
    assert source.workspaces["x_packed"] == 2 * 5 * 6 * 32
    assert source.workspaces["weight_packed"] == 32 * 2 * 3 * 32
    assert source.workspaces["bias_packed"] == source.workspaces["requantise_scale_packed"] == 4 * 32


def test_what_has_the_wanted_form_is_not_packed() -> None:
    moves, _ = plan(conv(c=30, k=32, epilogue=["bias", "requantise"]))
    assert moves == [("x", "x_packed", False), ("weight", "weight_packed", True)]
    moves, _ = plan(conv(c=32, k=32, weight_layout="OIHW"))
    assert moves == [("weight", "weight_packed", True)]


@pytest.mark.parametrize(
    ("workload", "target", "words"),
    [
        (conv(c=32, k=32), H200, ["needs no packing", "conv2d_wgmma"]),
        (conv(layout="NCHW", groups=2), H200, ["groups is 2", "allowed: 1"]),
        (conv(layout="NCHW"), PRESETS["a100"], ["9.0", "8.0"]),
        (conv(layout="NCHW", stride=9, h=20, w=20), H200, ["stride is 9"]),
    ],
)
def test_what_it_cannot_run_is_refused_with_a_reason(workload: Workload, target: Target, words: list[str]) -> None:
    reason = TEMPLATE.validate(workload, target)
    assert reason is not None and [word for word in words if word not in reason] == []


def test_its_knobs_are_those_of_the_inner_convolution_the_form_of_x_and_both_moves() -> None:
    w = conv(layout="NCHW")
    inner = set(module._INNER.space(Packed(w, H200).workload, H200).names)
    own = set(TEMPLATE.space(w, H200).names) - inner
    assert own == {
        "x", "batch",
        *(f"{prefix}{knob}" for prefix in ("pack_", "unpack_") for knob in ("tile_x_bytes", "tile_y_bytes", "threads")),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("workload", "xs", "batches"),
    [
        (conv(layout="NCHW", c=130), (16, 32, 64, 128, 144), ("folded", "bound")),
        (conv(layout="NCHW", c=130, n=1), (16, 32, 64, 128, 144), ("folded",)),
        (conv(layout="NCHW", c=16), (16,), ("folded", "bound")),
        (conv(layout="NCHW24c", c=144, k=24), (144,), ("folded", "bound")),  # blocks of 16 would straddle those of 24
        (conv(layout="NCHW4c", c=68), (16, 32, 64, 80), ("folded", "bound")),
        # Blocks of 16 bytes: the smallest k step has 32 bytes and would meet weights of the next block, which may be NaN.
        (conv(layout="NCHW", c=64, dtype="float8_e4m3", out_dtype="float16"), (32, 64), ("folded", "bound")),
        (conv(layout="NCHW", c=64, dtype="float16"), (16, 32, 64), ("folded", "bound")),
    ],
    ids=lambda value: value.label if isinstance(value, Workload) else str(value),
)
def test_x_is_packed_to_blocks_that_nest_and_hold_a_k_step(
    workload: Workload, xs: tuple[int, ...], batches: tuple[str, ...]
) -> None:
    space = TEMPLATE.space(workload, H200)
    values = {knob.name: knob.values for knob in space.knobs}
    assert (values["x"], values["batch"]) == (xs, batches)
    default = TEMPLATE.default(workload, H200, space)
    assert (default["x"], default["batch"]) == (max(xs), "folded")


def test_bound_tiles_are_those_of_every_image_and_folded_ones_of_all_together() -> None:
    w = conv(layout="NCHW", n=3, c=64, k=16)  # 6 x 6 pixels of y in each image, 64 in a tile
    space = TEMPLATE.space(w, H200)
    configs = [configured(w, x, batch, bk=bk) for x, bk in ((64, 64), (16, 32)) for batch in ("folded", "bound")]
    assert [space.check(config) for config in configs] == [[]] * 4
    features = space.encode(space.indices(configs))

    def counted(name: str) -> list[int]:
        column = features[:, space.feature_names.index(name)]
        return [round(2 ** float(value) - 1) for value in column]

    assert counted("row_tiles") == [2, 3, 2, 3]
    assert counted("k_steps") == [6, 6, 24, 24]  # 6 taps: of 64 channels, or of 4 blocks
    assert space.check({**configs[2], "bk": 64}) != []


@pytest.mark.long
def test_blocks_with_bound_tiles_compile_without_spills() -> None:
    w = conv(layout="NCHW", n=3, c=70, k=40, zero_points=["x"], epilogue=["bias", "residual", "relu", "requantise"])
    config = configured(w, 32, "bound", bn=48)
    assert TEMPLATE.space(w, H200).check(config) == []
    built = compile_source(TEMPLATE.kernel(w, H200, config), H200)
    assert built.resources.spill_bytes == built.resources.local_bytes == 0


class TestContract(TemplateContract):
    template, target = TEMPLATE, H200
    accepted = (
        conv(layout="NCHW", epilogue=["bias", "relu", "requantise"]),
        conv(layout="NCHW24c", c=24, k=24, zero_points=["x"]),
        conv(layout="NCHW", dtype="float16", epilogue=["bias", "residual"]),
    )
    samples, compiled = 4, 1


# --- On a GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*EMULATED, *FORMS])
def test_a_gpu_computes_exact_sums(some_of: Callable[..., Any], name: str) -> None:
    from conv2d_support import run_on_cpu as run  # it takes any device

    import schedsearch
    from schedsearch.device import open_device

    target = schedsearch.detect("cuda")
    change, x, batch = FORMS[name] if name in FORMS else (EMULATED[name], 0, "")
    w = conv(**{"n": 3, **change, "epilogue": [], "h": 31, "w": 29})
    if reason := TEMPLATE.validate(w, target):
        pytest.skip(reason)
    arrays, logical_x, weight = drawn(w)
    x_zero, weight_zero = zeros_of(w)
    given = {"x_zero_point": float(x_zero), "weight_zero_point": float(weight_zero)}
    scalars = {scalar.name: given[scalar.name] for scalar in w.scalars}
    expected = sums(w, logical_x - x_zero, weight - weight_zero)
    device, space, rng = open_device(target), TEMPLATE.space(w, target), np.random.default_rng(5)

    def check(config: Config) -> None:
        source = TEMPLATE.kernel(w, target, config)
        y = run(device, source, arrays, {"y": (w.output.shape, np.dtype(w.output.dtype))}, scalars)["y"]
        np.testing.assert_array_equal(y, Layout.parse(w.layout).pack(expected.astype(y.dtype), "NHWC"), err_msg=str(config))

    kinds = some_of(KINDS, [*EMULATED, *FORMS].index(name))
    check_schedules(check, TEMPLATE, w, target, rng, kinds, space.restrict({"x": [x], "batch": [batch]}) if x else space)
    device.close()
