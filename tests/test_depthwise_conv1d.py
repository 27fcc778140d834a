"""depthwise_conv1d: the operator, its reference and templates, against a definition in NumPy and that of images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bandwidth_support import H200, verdict
from dynamic_support import emulated, on_device

import schedsearch
from schedsearch import Workload, depthwise_conv1d
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.errors import WorkloadError
from schedsearch.ops.depthwise_conv1d import DEPTHWISE_CONV1D
from schedsearch.ops.dtypes import decode, encode
from schedsearch.template import load_reference, load_template
from schedsearch.templates.depthwise_conv1d import (
    cuda_any_kernels,
    cuda_lines_kernels,
    cuda_lines_parts,
    cuda_rows_kernels,
    cuda_rows_parts,
    parts,
)
from schedsearch.templates.parts import vectors
from schedsearch.testing.op_contract import OpContract
from schedsearch.testing.template_contract import TemplateContract

ROWS, ANY = load_template("depthwise_conv1d_rows_cuda"), load_template("depthwise_conv1d_any_cuda")
LINES = load_template("depthwise_conv1d_lines_cuda")
CPU = load_template("depthwise_conv1d_cpu")
MODULES = cuda_rows_kernels, cuda_rows_parts, cuda_lines_kernels, cuda_lines_parts, cuda_any_kernels, parts, vectors
Array = np.ndarray[Any, Any]
SMALL: dict[str, Any] = {"n": 2, "c": 12, "t": 19, "taps": 4, "dtype": "float32"}
BOTH_STATES = {"initial_state": True, "final_state": True}
LARGE: dict[str, Any] = {"n": 8, "c": 4096, "t": 2048, "taps": 4, "dtype": "bfloat16"}


class TestDepthwiseConv1d(OpContract):
    op = DEPTHWISE_CONV1D
    examples = (
        SMALL,
        SMALL | {"direction": "backward", "epilogue": ["bias", "silu"], "layout": "NCT"},
        SMALL | {"padding": [1, 2], "dilation": 2, "weight_dtype": "bfloat16"},
        SMALL | {"initial_state": True, "final_state": True, "epilogue": ["silu"]},
        SMALL | {"seq_idx": True, "direction": "backward"},
        SMALL | {"taps": 1, "t": 1, "n": 1, "c": 1},
    )
    wrong = (
        (SMALL | {"t": 0}, "t"),
        (SMALL | {"taps": 0}, "taps"),
        (SMALL | {"taps": 257}, "taps"),
        (SMALL | {"t": 3, "padding": [0, 0]}, "t"),
        (SMALL | {"padding": [1]}, "padding"),
        (SMALL | {"padding": [-1, 0]}, "padding"),
        (SMALL | {"dilation": 0}, "dilation"),
        (SMALL | {"dilation": 65536}, "dilation"),
        (SMALL | {"dtype": "int8"}, "dtype"),
        (SMALL | {"layout": "NHWC"}, "layout"),
        (SMALL | {"epilogue": ["relu"]}, "epilogue"),
        (SMALL | {"epilogue": ["silu", "bias"]}, "epilogue"),
        (SMALL | {"seq_idx": True, "initial_state": True}, "seq_idx"),
        (SMALL | {"final_state": True, "padding": [1, 2]}, "final_state"),
        (SMALL | {"initial_state": True, "taps": 1}, "initial_state"),
        (SMALL | {"direction": "grad_input"}, "direction"),
    )

    def test_causal_is_the_default(self) -> None:
        assert depthwise_conv1d(**SMALL, padding=(3, 0)).id == depthwise_conv1d(**SMALL).id
        assert depthwise_conv1d(**SMALL, dilation=2, padding=(6, 0)).id == depthwise_conv1d(**SMALL, dilation=2).id


CASES: list[dict[str, Any]] = [
    SMALL,
    SMALL | dict(taps=3, dtype="float16", epilogue=["bias", "silu"]),
    SMALL | dict(dtype="bfloat16", seq_idx=True, epilogue=["bias"]),
    SMALL
    | dict(dilation=2, dtype="float16", weight_dtype="float32", initial_state=True, final_state=True, epilogue=["silu"]),
    SMALL | dict(taps=5, dilation=2, padding=(2, 3)),
    SMALL | dict(taps=3, padding=(0, 3), epilogue=["silu"]),
    SMALL | BOTH_STATES | dict(t=2),
]
DIRECTIONS = "forward", "backward"
LAYOUTS = "NTC", "NCT"


def label(case: dict[str, Any]) -> str:
    return depthwise_conv1d(**case).label


def example(workload: Workload, seed: int = 0) -> dict[str, Any]:
    """Random numbers; sequences of five steps in the mean."""
    rng = np.random.default_rng(seed)
    found = {}
    for spec in workload.signature:
        numbers = rng.standard_normal(spec.shape)
        found[spec.name] = decode(encode(numbers, spec.dtype), spec.dtype)
        if spec.name == "seq_idx":
            found[spec.name] = np.cumsum(rng.random(spec.shape) < 0.2, axis=1).astype(np.int32)
    return found


def forward(p: Any, given: dict[str, Any]) -> Array:
    """y as (n, c, t) in float64, from x as (n, c, t), by taps."""
    x, weight = given["x"].astype(np.float64), given["weight"].astype(np.float64)
    before = given["initial_state"].astype(np.float64) if "initial_state" in given else np.zeros((p.n, p.c, p.padding[0]))
    padded = np.concatenate([before, x, np.zeros((p.n, p.c, p.padding[1]))], axis=2)
    y = np.zeros((p.n, p.c, p.steps))
    for k in range(p.taps):
        part = padded[:, :, k * p.dilation : k * p.dilation + p.steps]
        if p.seq_idx:
            numbers = np.pad(given["seq_idx"], ((0, 0), (p.padding[0], 0)), constant_values=-1)
            part = part * (numbers[:, k * p.dilation : k * p.dilation + p.steps] == given["seq_idx"])[:, None]
        y += part * weight[:, k, None]
    if p.bias:
        y += given["bias"].astype(np.float64)[:, None]
    return y / (1 + np.exp(-y)) if p.silu else y


def by_channels(p: Any, array: Array) -> Array:
    return array.transpose(0, 2, 1) if p.layout == "NTC" else array


def expected(workload: Workload, given: dict[str, Any]) -> dict[str, Array]:
    """The outputs by the definition; gradients by differences of a sum, which is exact to 1e-9 in float64."""
    p = workload.params
    arrays = {name: by_channels(p, each) if name in ("x", "dy") else each for name, each in given.items()}
    if p.direction == "forward":
        found = {"y": by_channels(p, forward(p, arrays))}
        if p.final_state:
            before = arrays.get("initial_state", np.zeros((p.n, p.c, p.reach)))
            found["final_state"] = np.concatenate([before, arrays["x"]], axis=2)[:, :, -p.reach :]
        return found

    def loss(changed: dict[str, Array]) -> float:
        total = float((forward(p, changed) * arrays["dy"]).sum())
        if p.final_state:
            before = changed.get("initial_state", np.zeros((p.n, p.c, p.reach)))
            total += float(
                (np.concatenate([before, changed["x"]], axis=2)[:, :, -p.reach :] * arrays["d_final_state"]).sum()
            )
        return total

    found = {}
    for name in ("x", "weight", "bias", "initial_state"):
        if name in arrays:
            start, step = {**arrays, name: arrays[name].astype(np.float64)}, 1e-4
            slopes = np.zeros(arrays[name].shape)
            for place in np.ndindex(slopes.shape):
                moved = [start[name].copy(), start[name].copy()]
                moved[0][place] += step
                moved[1][place] -= step
                slopes[place] = (loss({**start, name: moved[0]}) - loss({**start, name: moved[1]})) / (2 * step)
            short = {"x": "dx", "weight": "dw", "bias": "db", "initial_state": "d_initial_state"}[name]
            found[short] = by_channels(p, slopes) if name == "x" else slopes
    return found


def assert_close(workload: Workload, found: dict[str, Any], right: dict[str, Array]) -> None:
    assert set(found) == set(right)
    relative = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}[workload.dtype]
    for name, array in right.items():
        scale = max(1.0, float(np.abs(array).max()))
        assert np.abs(found[name] - array).max() < relative * scale, (workload.label, name)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("case", CASES, ids=label)
def test_the_reference_is_the_definition(case: dict[str, Any], direction: str) -> None:
    """The points of the reference, which every kernel is compared with, and finite differences of the definition."""
    workload = depthwise_conv1d(**case | dict(direction=direction, c=3, t=min(case["t"], 11), layout="NCT"))
    arrays, reference = example(workload), load_reference(workload.op)
    for name, right in expected(workload, arrays).items():
        found = reference.points(workload, arrays, {}, np.arange(right.size), name).reshape(right.shape)
        np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-6, err_msg=name)


def truth(workload: Workload, arrays: dict[str, Any]) -> dict[str, Array]:
    points = load_reference(workload.op).points
    return {
        each.name: points(workload, arrays, {}, np.arange(each.size), each.name).reshape(each.shape)
        for each in workload.outputs
    }


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("case", CASES[1:4], ids=label)
def test_emulated_streams_are_the_definition(monkeypatch: pytest.MonkeyPatch, case: dict[str, Any], direction: str) -> None:
    ahead = 2 if case["taps"] == 3 else 4  # a window that moves, and a ring
    workload = depthwise_conv1d(**case, direction=direction)
    arrays = example(workload)
    found = emulated(
        monkeypatch,
        ROWS,
        workload,
        arrays,
        Config(vector=4, ahead=ahead, length=8, lanes=8, threads=64, blocks_per_sm=1),
        *MODULES,
    )
    assert_close(workload, found, truth(workload, arrays))


OF_LINES: list[dict[str, Any]] = [
    SMALL | dict(c=3, t=29, taps=3, dtype="float16", epilogue=["bias", "silu"]),  # lines begin anywhere
    SMALL | dict(c=3, t=48, dtype="bfloat16", seq_idx=True, epilogue=["silu"]),
    SMALL | dict(c=2, t=21, taps=5, dilation=2, padding=(2, 6)),
    SMALL | dict(c=2, t=5, taps=1),
]


@pytest.mark.parametrize("case", OF_LINES, ids=label)
def test_emulated_lines_are_the_definition(monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    wide = 4 if case["dtype"] == "float32" else 8
    for direction in DIRECTIONS:
        workload = depthwise_conv1d(**case, direction=direction, layout="NCT")
        arrays, of = example(workload), dict(lanes=4, threads=64, blocks_per_sm=1)
        config = Config(vector=wide, length=2, ahead=1, **of)
        if direction == "backward":
            config = Config(vector=2 * wide, length=1, ahead=1, **of)
        assert_close(workload, emulated(monkeypatch, LINES, workload, arrays, config, *MODULES), truth(workload, arrays))


@pytest.mark.parametrize("t", [2, 13])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_emulated_lines_go_on_from_a_state(monkeypatch: pytest.MonkeyPatch, direction: str, t: int) -> None:
    case = SMALL | BOTH_STATES | dict(c=3, t=t, taps=3, dilation=2, dtype="float16", epilogue=["silu"])
    workload, of = depthwise_conv1d(**case, layout="NCT", direction=direction), dict(lanes=4, threads=64, blocks_per_sm=1)
    arrays, config = example(workload), Config(vector=16, ahead=2, length=2, **of)
    if direction == "backward":
        config = Config(vector=8, ahead=1, length=1, **of)
    assert_close(workload, emulated(monkeypatch, LINES, workload, arrays, config, *MODULES), truth(workload, arrays))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES[1:4:2], ids=label)
@pytest.mark.mostly_long(3)
def test_emulated_kernels_of_any_taps_are_the_definition(
    monkeypatch: pytest.MonkeyPatch, case: dict[str, Any], layout: str
) -> None:
    for direction in DIRECTIONS:
        workload = depthwise_conv1d(**case | dict(c=5, t=11), direction=direction, layout=layout)
        arrays = example(workload)
        found = emulated(monkeypatch, ANY, workload, arrays, Config(length=2, lanes=8, threads=64), *MODULES)
        assert_close(workload, found, truth(workload, arrays))


@pytest.mark.long
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("case", CASES, ids=label)
def test_all_emulated_kernels_are_the_definition(
    monkeypatch: pytest.MonkeyPatch, case: dict[str, Any], direction: str
) -> None:
    for layout in LAYOUTS:
        workload = depthwise_conv1d(**case, direction=direction, layout=layout)
        arrays = example(workload)
        right = truth(workload, arrays)
        for length in (1, 8):
            config = Config(length=length, lanes=8, threads=64)
            assert_close(workload, emulated(monkeypatch, ANY, workload, arrays, config, *MODULES), right)
        if layout == "NTC":
            for ahead in (1, 8) if case["t"] > 8 else (1,):
                config = Config(vector=2, ahead=ahead, length=max(ahead, 2), lanes=8, threads=64, blocks_per_sm=1)
                assert_close(workload, emulated(monkeypatch, ROWS, workload, arrays, config, *MODULES), right)
        elif LINES.validate(workload, H200) is None:
            wide = 4 if case["dtype"] == "float32" else 8
            for vector in (wide, 2 * wide):
                config = Config(vector=vector, ahead=1, length=1, lanes=4, threads=64, blocks_per_sm=1)
                assert_close(workload, emulated(monkeypatch, LINES, workload, arrays, config, *MODULES), right)


@pytest.mark.parametrize("layout", ["NTC", pytest.param("NCT", marks=pytest.mark.long)])
def test_a_cpu_kernel_is_the_definition(device: CpuDevice, layout: str) -> None:
    workload = depthwise_conv1d(**CASES[3] | dict(c=130, t=77), layout=layout)
    arrays = example(workload)
    assert_close(workload, on_device(device, CPU, workload, arrays), truth(workload, arrays))


@pytest.mark.long
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES, ids=label)
def test_verification_accepts_cpu_kernels(device: CpuDevice, case: dict[str, Any], layout: str, direction: str) -> None:
    workload = depthwise_conv1d(**case | dict(c=20, t=max(70, case["t"])), layout=layout, direction=direction)
    assert verdict(device, CPU, workload) is None


@pytest.mark.long
def test_verification_refuses_a_kernel_of_another_activation(device: CpuDevice) -> None:
    workload = depthwise_conv1d(**SMALL)
    assert verdict(device, CPU, workload.replace(epilogue=["silu"]), computed=workload) is not None


@pytest.mark.long
def test_the_operator_of_images_is_a_witness(device: CpuDevice) -> None:
    """A sequence is an image of height 1."""
    workload = depthwise_conv1d(n=2, c=16, t=50, taps=5, dtype="float32", padding=(2, 2), layout="NCT")
    image = schedsearch.depthwise_conv2d(n=2, c=16, h=1, w=50, r=1, s=5, dtype="float32", padding=(0, 2), layout="NCHW")
    arrays = example(workload)
    theirs = on_device(
        device, load_template("depthwise_conv2d_cpu"), image,
        {"x": arrays["x"].reshape(2, 16, 1, 50), "weight": arrays["weight"].reshape(16, 1, 1, 5)},
    )  # fmt: skip
    found = on_device(device, CPU, workload, arrays)
    np.testing.assert_allclose(found["y"], theirs["y"].reshape(2, 16, 50), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.mostly_long(2)
def test_a_convolution_over_time_is_that_of_images_of_one_row(device: CpuDevice, layout: str) -> None:
    workload = schedsearch.conv1d(
        n=2, c=6, t=21, k=4, taps=3, stride=2, padding=(3, 1), dilation=2, groups=2, dtype="float32", layout=layout
    )
    assert (workload.op, workload.params.h, workload.params.w) == ("conv2d", 1, 21)
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((2, 6, 21)).astype(np.float32), rng.standard_normal((4, 3, 3)).astype(np.float32)
    padded, right = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (3, 1))), np.zeros((2, 4, 11))
    for k in range(4):
        for t in range(11):
            window = padded[:, k // 2 * 3 : k // 2 * 3 + 3, 2 * t : 2 * t + 5 : 2]
            right[:, k, t] = (window * weight[k]).sum((1, 2))
    order = {"NTC": ((0, 2, 1), (0, 2, 1)), "NCT": ((0, 1, 2), (0, 1, 2))}[layout]
    given = {spec.name: spec.shape for spec in workload.signature}
    arrays = {
        "x": np.ascontiguousarray(x.transpose(order[0])).reshape(given["x"]),
        "weight": np.ascontiguousarray(weight.transpose(order[1])).reshape(given["weight"]),
    }
    found = on_device(device, load_template("conv2d_cpu"), workload, arrays)["y"]
    shape = (2, 11, 4) if layout == "NTC" else (2, 4, 11)
    np.testing.assert_allclose(found.reshape(shape).transpose(order[0]), right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"t": 0, "taps": True}, "^t: t must be an integer of at least 1, got 0; taps: taps must be .* got True$"),
        ({"stride": 0}, "^stride: .* got 0$"),
        ({"layout": "NCHW"}, "'NCHW' is not possible; allowed: NTC, NCT"),
        ({"padding": (1, 2, 3)}, r"^padding: .* \[before, behind\], got \(1, 2, 3\)"),
        ({"padding": "same"}, r"^padding: .* got 'same'"),
        ({"dilation": 4}, "^taps: taps span 9 steps, and x with its padding has 8; enlarge the padding"),
    ],
)  # fmt: skip
def test_mistakes_of_a_convolution_over_time_are_named_by_its_own_parameters(change: dict[str, Any], words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        schedsearch.conv1d(**{"n": 1, "c": 4, "t": 8, "k": 4, "taps": 3, **change})


def test_one_machine_code_serves_all_lengths(tmp_path: Any) -> None:
    """Other lengths, batches and channels than those that it was compiled and verified for."""
    with schedsearch.KernelCache(tmp_path / "none.db", "cpu", allow=("default",)) as kernels:
        codes = set()
        for n, c, t in ((1, 16, 5), (3, 32, 300), (2, 48, 1)):
            workload = depthwise_conv1d(n=n, c=c, t=t, taps=4, dtype="float32", epilogue=["silu"])
            kernel, arrays = kernels.kernel(workload), example(workload)
            assert kernel.verified
            codes.add(kernel.artifact.code)
            assert_close(workload, {"y": kernel(*arrays.values())}, truth(workload, arrays))
        assert len(codes) == 1


@pytest.mark.long
def test_pieces_of_a_sequence_give_the_bits_of_the_whole(device: CpuDevice) -> None:
    whole = depthwise_conv1d(n=1, c=20, t=40, taps=4, dtype="float16", epilogue=["silu"], final_state=True)
    arrays = example(whole)
    y = on_device(device, CPU, whole, arrays)
    first, second = whole.replace(t=2), whole.replace(t=38, initial_state=True)
    begin = on_device(device, CPU, first, {**arrays, "x": arrays["x"][:, :2]})
    rest = {**arrays, "x": arrays["x"][:, 2:], "initial_state": begin["final_state"]}
    end = on_device(device, CPU, second, rest)
    assert np.array_equal(np.concatenate([begin["y"], end["y"]], axis=1), y["y"])
    assert np.array_equal(end["final_state"], y["final_state"])


class TestRowsContract(TemplateContract):
    template, target, compiled = ROWS, H200, 1
    accepted = (
        depthwise_conv1d(**LARGE, epilogue=["bias", "silu"]),
        depthwise_conv1d(**LARGE, epilogue=["silu"], direction="backward"),
        depthwise_conv1d(n=1, c=5, t=1, taps=8, seq_idx=True),
    )
    refused = (
        (depthwise_conv1d(**LARGE, layout="NCT"), "layout"),
        (depthwise_conv1d(**LARGE | dict(taps=9)), "taps"),
        (depthwise_conv1d(n=1, c=1, t=2**30, taps=2), "steps"),
    )


class TestLinesContract(TemplateContract):
    template, target, compiled = LINES, H200, 1
    accepted = (
        depthwise_conv1d(**LARGE, layout="NCT", epilogue=["bias", "silu"]),
        depthwise_conv1d(**LARGE, layout="NCT", epilogue=["silu"], direction="backward"),
        depthwise_conv1d(**LARGE | BOTH_STATES, layout="NCT", direction="backward"),
        depthwise_conv1d(n=1, c=5, t=1, taps=8, seq_idx=True, layout="NCT"),
    )
    refused = (
        (depthwise_conv1d(**LARGE), "layout"),
        (depthwise_conv1d(**LARGE | dict(taps=9), layout="NCT"), "taps"),
        (depthwise_conv1d(**LARGE, layout="NCT", padding=(0, 0)), "the same number"),
    )


class TestAnyContract(TemplateContract):
    template, target, compiled = ANY, H200, 1
    accepted = (
        depthwise_conv1d(**LARGE | dict(taps=64), layout="NCT", epilogue=["silu"]),
        depthwise_conv1d(**LARGE, epilogue=["silu"], direction="backward", initial_state=True),
    )


class TestCpuContract(TemplateContract):
    template, target, compiled = CPU, detect("cpu"), 1
    accepted = depthwise_conv1d(**SMALL), depthwise_conv1d(**LARGE, layout="NCT", direction="backward", epilogue=["silu"])


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("template", [ROWS, LINES, ANY], ids=lambda each: each.name)
@pytest.mark.parametrize("case", CASES, ids=label)
def test_kernels_on_the_device(gpu: Any, template: Any, case: dict[str, Any], direction: str) -> None:
    for layout in LAYOUTS:
        for c, t in ((200, 333), (7, 1), (64, 1024)):
            workload = depthwise_conv1d(**case | dict(c=c, t=max(t, case["t"])), layout=layout, direction=direction)
            if template.validate(workload, gpu.target) is not None:
                continue
            assert verdict(gpu, template, workload) is None, workload.label


@pytest.mark.gpu
def test_many_taps_on_the_device(gpu: Any) -> None:
    for layout in LAYOUTS:
        for direction in DIRECTIONS:
            workload = depthwise_conv1d(
                n=2, c=40, t=500, taps=100, dtype="bfloat16", layout=layout, direction=direction, epilogue=["bias", "silu"]
            )
            assert verdict(gpu, ANY, workload) is None, workload.label
