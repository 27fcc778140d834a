"""The CPU template of conv2d: right for every workload and every configuration of its space."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conv2d_numpy import FLOAT_STAGES, expected
from conv2d_support import integer_arguments, run_on_cpu
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from long_cases import except_long

from schedsearch.backend import compile_source
from schedsearch.backend.cpu import _optimised_ir, _target_machine
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.target import Target
from schedsearch.template import load_templates
from schedsearch.templates.conv2d.cpu import Conv2dCpu
from schedsearch.workload import Workload

TEMPLATE = Conv2dCpu()
HOST = detect("cpu")
SCALARS = {"leaky_relu_slope": 0.25, "clip_min": -5.0, "clip_max": 20.0}


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(HOST)
    yield device
    device.close()


def check(device: CpuDevice, workload: Workload, configs: list[Config]) -> None:
    """Every configuration gives NumPy's result."""
    arrays = integer_arguments(workload)
    scalars = {scalar.name: SCALARS[scalar.name] for scalar in workload.scalars}
    truth = expected(workload, arrays, scalars)
    space = TEMPLATE.space(workload, HOST)
    for config in configs:
        assert space.check(config) == []
        source = TEMPLATE.kernel(workload, HOST, config)
        y = run_on_cpu(device, source, arrays, {"y": (workload.output.shape, np.float32)}, scalars)["y"]
        truth.check(y, str(config))


def test_a_residual_in_place_is_added_once(device: CpuDevice) -> None:
    """A row of 62 pixels is no multiple of the tiles that are best without a residual."""
    shape = {"n": 1, "h": 3, "w": 62, "c": 4, "k": 8, "r": 1, "s": 1, "dtype": "float32"}
    workload = Workload.conv2d(**shape, epilogue=["residual"])
    arrays = integer_arguments(workload)
    config = TEMPLATE.default(workload, HOST, TEMPLATE.space(workload, HOST))
    kernel = device.load(compile_source(TEMPLATE.kernel(workload, HOST, config), HOST).artifact)
    buffers = {name: device.allocate(array.nbytes) for name, array in arrays.items()}
    for name, array in arrays.items():
        device.copy_in(buffers[name], memoryview(array))
    kernel.bind({**buffers, "y": buffers["residual"]}, {}).launch()
    y = np.empty(workload.output.shape, np.float32)
    device.copy_out(memoryview(y), buffers["residual"])
    kernel.close()
    expected(workload, arrays, {}).check(y, str(config))


def some_configs(workload: Workload, count: int, seed: int = 0) -> list[Config]:
    sampled = TEMPLATE.space(workload, HOST).sample(count, np.random.default_rng(seed))
    return [TEMPLATE.default(workload, HOST, TEMPLATE.space(workload, HOST)), *sampled]


SHAPES = {
    "3x3": {"n": 2, "h": 9, "w": 10, "c": 20, "k": 24, "r": 3, "s": 3, "padding": 1},
    "asymmetric padding": {"n": 1, "h": 8, "w": 7, "c": 5, "k": 9, "r": 3, "s": 3, "padding": (2, 0, 1, 3)},
    "stride and dilation": {
        "n": 1,
        "h": 15,
        "w": 14,
        "c": 4,
        "k": 8,
        "r": 3,
        "s": 2,
        "stride": (3, 2),
        "dilation": (2, 3),
        "padding": 2,
    },
    "stride beyond the kernel": {"n": 1, "h": 9, "w": 9, "c": 8, "k": 8, "r": 1, "s": 1, "stride": 3},
    "one column": {"n": 2, "h": 37, "w": 1, "c": 20, "k": 24, "r": 5, "s": 1, "padding": (2, 0), "stride": (2, 1)},
    "few columns": {"n": 1, "h": 19, "w": 4, "c": 5, "k": 9, "r": 3, "s": 2, "padding": (2, 0, 1, 1), "dilation": (2, 1)},
    "1x7": {"n": 1, "h": 5, "w": 9, "c": 16, "k": 16, "r": 1, "s": 7, "padding": (0, 3)},
    "padding wider than the image": {"n": 1, "h": 2, "w": 2, "c": 3, "k": 4, "r": 3, "s": 3, "padding": 4},
    "input that no output reads": {"n": 1, "h": 10, "w": 10, "c": 4, "k": 4, "r": 2, "s": 2, "stride": 4},
    "RGB stem": {"n": 1, "h": 23, "w": 23, "c": 3, "k": 16, "r": 7, "s": 7, "stride": 2, "padding": 3},
    "groups of four": {"n": 2, "h": 7, "w": 7, "c": 16, "k": 16, "r": 3, "s": 3, "groups": 4, "padding": 1},
    "groups with a tail": {"n": 1, "h": 6, "w": 6, "c": 10, "k": 15, "r": 3, "s": 3, "groups": 5},
    "depthwise": {"n": 2, "h": 9, "w": 9, "c": 40, "k": 40, "r": 3, "s": 3, "groups": 40, "padding": 1, "stride": 2},
    "depthwise without padding": {"n": 1, "h": 9, "w": 9, "c": 32, "k": 32, "r": 5, "s": 3, "groups": 32},
    "channel multiplier": {"n": 1, "h": 6, "w": 6, "c": 6, "k": 12, "r": 3, "s": 3, "groups": 6},
    "one output": {"n": 1, "h": 3, "w": 3, "c": 5, "k": 1, "r": 3, "s": 3},
}


# Layout, and whether the default is run or a random configuration, so that each shape and each of these four pairs occurs.
VARIANTS = [("NHWC", "default"), ("NCHW", "random"), ("NHWC", "random"), ("NCHW", "default")]
IN_BOTH_LAYOUTS = ("asymmetric padding", "stride and dilation", "groups with a tail", "depthwise")


def variants() -> list[Any]:
    """Every shape once, and some of them in the other layout with the other configuration."""
    pairs = list(zip(SHAPES, itertools.cycle(VARIANTS)))
    other = {"NHWC": "NCHW", "NCHW": "NHWC", "default": "random", "random": "default"}
    params = [pytest.param(SHAPES[name], *rest, id="-".join([name, *rest])) for name, rest in pairs]
    others = [(name, other[layout], other[config]) for name, (layout, config) in pairs if name in IN_BOTH_LAYOUTS]
    return params + [
        pytest.param(SHAPES[name], *rest, id="-".join([name, *rest]), marks=pytest.mark.long) for name, *rest in others
    ]


@pytest.mark.parametrize(("shape", "layout", "config"), variants())
@pytest.mark.mostly_long(8)
def test_shapes_in_both_layouts(device, shape, layout, config):
    workload = Workload.conv2d(**shape, dtype="float32", layout=layout)
    check(device, workload, [some_configs(workload, 1)[config == "random"]])


@pytest.mark.parametrize("layouts", [("NHWC", "OIHW"), ("NCHW", "OHWI")])
@pytest.mark.mostly_long(2)
def test_weights_in_the_other_layout(device, layouts):
    workload = Workload.conv2d(**SHAPES["3x3"], dtype="float32", layout=layouts[0], weight_layout=layouts[1])
    check(device, workload, some_configs(workload, 1)[layouts[0] == "NCHW" :][:1])


@pytest.mark.parametrize("layout", except_long(["NHWC", "NCHW"], long=["NCHW"]))
def test_epilogues_are_fused_in_order(device, layout):
    epilogue = ("residual", "leaky_relu", "scale_shift", "relu", "bias", "clip", "relu")
    workload = Workload.conv2d(n=1, h=7, w=6, c=5, k=20, r=3, s=3, dtype="float32", layout=layout, epilogue=epilogue)
    check(device, workload, some_configs(workload, 1)[1:])


@pytest.mark.parametrize("epilogue", [("relu",), tuple(stage for stage in FLOAT_STAGES if stage != "relu")], ids="+".join)
@pytest.mark.mostly_long(2)
def test_every_stage_has_an_epilogue(device, epilogue):
    """relu is alone: it would hide what leaky_relu does."""
    workload = Workload.conv2d(n=1, h=3, w=3, c=2, k=8, r=1, s=1, dtype="float32", epilogue=epilogue)
    check(device, workload, [TEMPLATE.default(workload, HOST, TEMPLATE.space(workload, HOST))])


@pytest.mark.parametrize(("layout", "config"), VARIANTS[:2])
@pytest.mark.mostly_long(2)
def test_a_slice_adds_an_array_of_its_own_size(device, layout, config):
    """As the last convolution of a block of YOLOv8 does: its result is part of a Concat, and what it adds is not."""
    shape = {"n": 2, "h": 5, "w": 6, "c": 4, "k": 9, "r": 3, "s": 3, "padding": 1, "slice_of": 14}
    workload = Workload.conv2d(**shape, dtype="float32", layout=layout, epilogue=("bias", "silu", "residual"))
    arrays, scalars = integer_arguments(workload), {}
    arrays = {name: array * np.float32(0.125) for name, array in arrays.items()}
    truth = expected(workload, arrays, scalars).y
    axis = layout.index("C")
    source = TEMPLATE.kernel(workload, HOST, some_configs(workload, 1)[config == "random"])
    y = run_on_cpu(device, source, arrays, {"y": (workload.output.slice_of, np.float32)}, scalars)["y"]
    np.testing.assert_allclose(np.take(y, range(9), axis), truth, rtol=1e-5, atol=1e-5)


def test_a_depthwise_tile_reads_nhwc_in_place(device):
    workload = Workload.conv2d(**SHAPES["depthwise without padding"], dtype="float32")
    space = TEMPLATE.space(workload, HOST).restrict({"x_layout": ["direct"]})
    check(device, workload, space.sample(1, np.random.default_rng(0)))


@pytest.mark.long
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_small_workload_with_any_config(device, data):
    draw = data.draw
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    r, s = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    workload = Workload.conv2d(
        n=draw(st.integers(1, 2)),
        h=draw(st.integers(1, 9)) + (r - 1) * dilation[0],
        w=draw(st.integers(1, 20)) + (s - 1) * dilation[1],
        c=groups * draw(st.integers(1, 18)),
        k=groups * draw(st.integers(1, 40)),
        r=r,
        s=s,
        stride=draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        padding=draw(st.tuples(*[st.integers(0, 3)] * 4)),
        dilation=dilation,
        groups=groups,
        dtype="float32",
        layout=draw(st.sampled_from(["NHWC", "NCHW"])),
        epilogue=draw(st.lists(st.sampled_from(sorted(FLOAT_STAGES)), unique=True, max_size=2)),
    )
    check(device, workload, some_configs(workload, 1, seed=draw(st.integers(0, 1000)))[1:])


# ---- cases of TVM's operator tests

KINDS = ("conv2d_nchw (cuda float)", "group_conv2d_nchw", "group_conv2d_nhwc")
MAX_FLOPS = 3e7
MAX_CASES = 4


def tvm_workload(kind: str, case: dict) -> Workload:  # type: ignore[type-arg]
    padding = case["padding"]
    if padding in ("SAME", "VALID"):
        extent = (case["kernel"] - 1) * case["dilation"] + 1
        total = max((-(-case["in_size"] // case["stride"]) - 1) * case["stride"] + extent - case["in_size"], 0)
        padding = [total // 2, total // 2, total - total // 2, total - total // 2] if padding == "SAME" else 0
    layout = "NHWC" if kind.endswith("nhwc") else "NCHW"
    epilogue = ["bias"] * case["add_bias"] + ["relu"] * (case.get("add_relu", False) or case.get("apply_relu", False))
    return Workload.conv2d(
        n=case["batch"], h=case["in_size"], w=case["in_size"], c=case["in_channel"], k=case["num_filter"],
        r=case["kernel"], s=case["kernel"], stride=case["stride"], padding=padding, dilation=case["dilation"],
        groups=case.get("groups", 1), dtype="float32", layout=layout, epilogue=epilogue,
    )  # fmt: skip


@pytest.mark.long
def test_a_share_of_tvms_operator_cases(device, shared):
    cases = json.loads((shared / "cases" / "operator_cases.json").read_text())["cases"]
    workloads = {tvm_workload(kind, case): kind for kind in KINDS for case in cases[kind]}
    small = sorted((w for w in workloads if w.flops <= MAX_FLOPS), key=lambda w: w.flops)
    # A few cases of each kind, evenly over sizes.
    by_kind = [[w for w in small if workloads[w] == kind] for kind in KINDS]
    chosen = {w for each in by_kind for w in each[:: max(len(each) * len(KINDS) // MAX_CASES, 1)]}
    assert len(chosen) >= MAX_CASES
    assert {workloads[w] for w in chosen} == set(KINDS)
    for number, workload in enumerate(sorted(chosen, key=lambda w: w.json)):
        check(device, workload, some_configs(workload, 1, seed=number)[number % 2 :][:1])


# ---- the space and the default

AVX2 = Target("cpu", "an AVX2 machine", sms=4, simd_bits=256)
NEON = Target("cpu", "a 128-bit machine", sms=64, simd_bits=128)
MANY = [
    *SHAPES.values(),
    {"n": 1, "h": 28, "w": 28, "c": 128, "k": 128, "r": 3, "s": 3, "padding": 1},
    {"n": 1, "h": 56, "w": 56, "c": 64, "k": 64, "r": 3, "s": 3, "padding": 1},
    {"n": 1, "h": 7, "w": 7, "c": 512, "k": 512, "r": 3, "s": 3, "padding": 1},
    {"n": 32, "h": 147, "w": 149, "c": 32, "k": 64, "r": 3, "s": 3},
    {"n": 1, "h": 1, "w": 1, "c": 2048, "k": 1000, "r": 1, "s": 1},
]


@pytest.mark.parametrize("target", [HOST, AVX2, NEON], ids=["host", "avx2", "128 bits"])
@pytest.mark.mostly_long(3)
def test_the_default_is_legal_everywhere(target):
    for shape in MANY:
        for layout in ("NHWC", "NCHW"):
            workload = Workload.conv2d(**shape, dtype="float32", layout=layout)
            assert TEMPLATE.validate(workload, target) is None
            space = TEMPLATE.space(workload, target)
            assert space.check(TEMPLATE.default(workload, target, TEMPLATE.space(workload, target))) == []
            assert space.size.count > 0
            plain = TEMPLATE.plain(workload, target, space)
            assert plain is not None and space.check(plain) == []
            assert {plain[name] for name in ("ow_tile", "oc_vectors", "unroll", "oh_tile")} == {1}, "nothing is tiled"


def test_a_thread_count_is_part_of_the_configuration():
    workload = Workload.conv2d(**SHAPES["3x3"], dtype="float32")
    assert [knob.values for knob in TEMPLATE.space(workload, AVX2).knobs if knob.name == "threads"] == [(1, 2, 3, 4)]
    assert {knob.values for knob in TEMPLATE.space(workload, NEON).knobs if knob.name == "threads"} == {
        (1, 2, 4, 8, 16, 32, 64)
    }
    config = Config({**TEMPLATE.default(workload, AVX2, TEMPLATE.space(workload, AVX2)), "threads": 3})
    assert {step.block_threads for step in TEMPLATE.kernel(workload, AVX2, config).steps} == {3}


def test_every_knob_is_documented():
    for knob in TEMPLATE.space(Workload.conv2d(**SHAPES["3x3"], dtype="float32"), HOST).knobs:
        assert len(knob.doc) > 10 and "\n" not in knob.doc


def test_other_dtypes_are_refused_with_a_reason():
    reason = TEMPLATE.validate(Workload.conv2d(n=1, h=4, w=4, c=8, k=8, r=1, s=1, dtype="float32", layout="NCHW8c"), HOST)
    assert reason == "layout is NCHW8c; allowed: NHWC, NCHW"
    for dtype in ("float16", "bfloat16"):
        reason = TEMPLATE.validate(Workload.conv2d(**SHAPES["3x3"], dtype=dtype), HOST)
        assert reason is not None and dtype in reason and "float32" in reason


def test_the_template_is_found_by_name():
    assert isinstance(load_templates(["conv2d_cpu"])["conv2d_cpu"], Conv2dCpu)


@pytest.mark.parametrize(("x_layout", "copy"), [("packed", "pack_x"), ("padded", "pad_x")])
def test_packing_is_charged_to_every_launch(x_layout, copy):
    """Packing is a step of the plan, so it is measured. A caller can pack the weight once."""
    workload = Workload.conv2d(**SHAPES["3x3"], dtype="float32")
    space = TEMPLATE.space(workload, HOST)
    config = TEMPLATE.default(workload, HOST, space.restrict({"x_layout": [x_layout]}))
    source = TEMPLATE.kernel(workload, HOST, config)
    assert [(step.function.__name__, step.constant) for step in source.steps] == [
        (copy, False), ("pack_weight", True), ("convolve", False),
    ]  # fmt: skip


@pytest.mark.skipif(HOST.simd_bits < 256, reason="looks for x86 vector instructions, and this CPU has none")
def test_the_inner_loop_is_vector_fused_multiply_adds():
    from llvmlite import binding as llvm

    workload = Workload.conv2d(n=1, h=28, w=28, c=128, k=128, r=3, s=3, padding=1, dtype="float32")
    config = TEMPLATE.default(workload, HOST, TEMPLATE.space(workload, HOST))
    step = TEMPLATE.kernel(workload, HOST, config).steps[-1]
    ir = _optimised_ir(step, "convolve")
    assembly = _target_machine().emit_assembly(llvm.parse_assembly(ir))
    register = "zmm" if HOST.simd_bits >= 512 else "ymm"
    fused = re.findall(rf"vfn?m(?:add|sub)\w*ps\s.*%{register}", assembly)
    assert len(fused) >= config["ow_tile"] * config["oc_vectors"] * config["unroll"]
    assert not re.findall(r"vfn?m(?:add|sub)\w*ss\s", assembly)
