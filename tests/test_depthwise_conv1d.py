"""depthwise_conv1d: the operator, its reference and templates, against a definition in NumPy and that of images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bandwidth_support import H200, default, verdict
from dynamic_support import emulated, on_device

import schedsearch
from schedsearch import Workload, causal_conv1d_update, depthwise_conv1d
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.ops.causal_conv1d_update import CAUSAL_CONV1D_UPDATE
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
    token,
    update,
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
        Config(vector=4, ahead=ahead, length=4, lanes=8, threads=64, blocks_per_sm=1),
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


def test_emulated_lines_go_on_from_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = depthwise_conv1d(**SMALL | BOTH_STATES | dict(c=3, t=13, dtype="float16"), layout="NCT")
    arrays, config = example(workload), Config(vector=16, ahead=2, length=2, lanes=4, threads=64, blocks_per_sm=1)
    assert_close(workload, emulated(monkeypatch, LINES, workload, arrays, config, *MODULES), truth(workload, arrays))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES[1:4:2], ids=label)
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
            config = Config(vector=2, ahead=1, length=2, lanes=8, threads=64, blocks_per_sm=1)
            assert_close(workload, emulated(monkeypatch, ROWS, workload, arrays, config, *MODULES), right)


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


def test_verification_refuses_a_kernel_of_another_activation(device: CpuDevice) -> None:
    workload = depthwise_conv1d(**SMALL)
    assert verdict(device, CPU, workload.replace(epilogue=["silu"]), computed=workload) is not None


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
        depthwise_conv1d(n=1, c=5, t=1, taps=8, seq_idx=True, layout="NCT"),
    )
    refused = (
        (depthwise_conv1d(**LARGE), "layout"),
        (depthwise_conv1d(**LARGE | dict(taps=9), layout="NCT"), "taps"),
        (depthwise_conv1d(**LARGE, layout="NCT", padding=(0, 0)), "the same number"),
        (depthwise_conv1d(**LARGE, layout="NCT", final_state=True, direction="backward"), "states"),
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


# ---- causal_conv1d_update

UPDATE_CPU, UPDATE_CUDA = load_template("causal_conv1d_update_cpu"), load_template("causal_conv1d_update_cuda")
TOKEN_CUDA = load_template("causal_conv1d_token_cuda")
TOKEN: dict[str, Any] = {"n": 3, "c": 5, "t": 1, "taps": 4, "length": 5, "dtype": "float32"}


class TestUpdate(OpContract):
    op = CAUSAL_CONV1D_UPDATE
    examples = (
        TOKEN,
        TOKEN | {"rows": 7, "indices": True, "positions": True},
        TOKEN | {"t": 9, "epilogue": ["bias"], "layout": "NCT", "weight_dtype": "float16"},
    )
    wrong = (
        (TOKEN | {"length": 2}, "length"),
        (TOKEN | {"rows": 4}, "rows"),
        (TOKEN | {"rows": 2, "indices": True}, "rows"),
        (TOKEN | {"taps": 300}, "taps"),
        (TOKEN | {"epilogue": ["silu", "bias"]}, "epilogue"),
        (TOKEN | {"dtype": "int8"}, "dtype"),
    )


UPDATES: list[dict[str, Any]] = [
    TOKEN | dict(epilogue=["bias", "silu"], dtype="float16"),
    TOKEN | dict(t=3, indices=True, rows=4, dtype="bfloat16"),
    TOKEN | dict(t=2, positions=True, dtype="float16", weight_dtype="float32"),
    TOKEN | dict(t=6, positions=True, indices=True, rows=4, layout="NCT", epilogue=["silu"]),
    TOKEN | dict(taps=1, length=1),
]


def by_rows(workload: Workload, given: dict[str, Any]) -> dict[str, Array]:
    """One input after the other, from lists of the last ones."""
    p = workload.params
    x, state = by_channels(p, given["x"]).astype(np.float64), given["state_before"].astype(np.float64).copy()
    y = np.zeros((p.n, p.c, p.t))
    for n in range(p.n):
        row = int(given["indices"][n]) if p.indices else n
        if row < 0:
            continue
        position = int(given["positions"][n]) if p.positions else 0
        for c in range(p.c):
            last = list(np.roll(state[row, c], -position))
            for t in range(p.t):
                last.append(x[n, c, t])
                z = float(np.dot(last[-p.taps :], given["weight"][c])) + (float(given["bias"][c]) if p.bias else 0.0)
                y[n, c, t] = z / (1 + np.exp(-z)) if p.silu else z
            moved = np.array(last[-p.length :])
            state[row, c] = np.roll(moved, position + p.t) if p.positions else moved
    return {"y": by_channels(p, y), "state": state}


@pytest.mark.parametrize("case", UPDATES, ids=lambda case: causal_conv1d_update(**case).label)
def test_updates_are_the_definition(device: CpuDevice, case: dict[str, Any]) -> None:
    workload = causal_conv1d_update(**case)
    arrays = example(workload)
    if workload.params.indices:
        arrays["indices"] = np.array([2, -1, 0], np.int32)
    if workload.params.positions:
        arrays["positions"] = np.array([0, 7, 13], np.int32)
    right = by_rows(workload, arrays)
    points = load_reference(workload.op).points
    for name, array in right.items():
        found = points(workload, arrays, {}, np.arange(array.size), name).reshape(array.shape)
        np.testing.assert_allclose(found, array, rtol=1e-9, atol=1e-9, err_msg=name)
    assert_close(workload, on_device(device, UPDATE_CPU, workload, arrays), right)
    with pytest.MonkeyPatch.context() as patch:
        assert_close(workload, emulated(patch, UPDATE_CUDA, workload, arrays, None, update, parts, vectors), right)


TOKENS: list[dict[str, Any]] = [
    dict(n=3, c=24, t=1, taps=4, length=3, dtype="bfloat16", epilogue=["bias", "silu"]),  # as final states are
    dict(n=3, c=6, t=1, taps=4, length=4, dtype="float16", indices=True, rows=4),
    dict(n=2, c=4, t=1, taps=2, length=4, dtype="float32", weight_dtype="float16", epilogue=["bias"], layout="NCT"),
]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("case", TOKENS, ids=lambda case: causal_conv1d_update(**case).label)
def test_vectors_of_channels_take_a_token(monkeypatch: pytest.MonkeyPatch, case: dict[str, Any], rows: int) -> None:
    workload = causal_conv1d_update(**case)
    arrays, config = example(workload), default(TOKEN_CUDA, workload, H200)
    if workload.params.indices:
        arrays["indices"] = np.array([2, -1, 0], np.int32)
    config = Config(**{**dict(config), "rows": rows, "threads": 32})
    found = emulated(monkeypatch, TOKEN_CUDA, workload, arrays, config, token, update, parts, vectors)
    assert_close(workload, found, by_rows(workload, arrays))


def test_verification_accepts_updates(device: CpuDevice) -> None:
    for case in UPDATES[:4:2]:
        assert verdict(device, UPDATE_CPU, causal_conv1d_update(**case)) is None


class TestUpdateCpuContract(TemplateContract):
    template, target, compiled = UPDATE_CPU, detect("cpu"), 1
    accepted = (causal_conv1d_update(**UPDATES[0]),)


class TestUpdateCudaContract(TemplateContract):
    template, target, compiled = UPDATE_CUDA, H200, 1
    accepted = causal_conv1d_update(**UPDATES[1]), causal_conv1d_update(n=64, c=16384, t=1, taps=4, length=4)


class TestTokenContract(TemplateContract):
    template, target, compiled = TOKEN_CUDA, H200, 1
    accepted = causal_conv1d_update(**TOKENS[0]), causal_conv1d_update(n=64, c=16384, t=1, taps=4, length=4)
    refused = (
        (causal_conv1d_update(**TOKENS[1] | dict(t=2)), "steps"),
        (causal_conv1d_update(**TOKENS[1] | dict(positions=True)), "rings"),
        (causal_conv1d_update(**TOKENS[1] | dict(length=9)), "inputs"),
        (causal_conv1d_update(**TOKENS[0] | dict(c=5)), "whole accesses"),
    )


# ---- on a GPU


@pytest.mark.gpu
def test_updates_on_the_device(gpu: Any) -> None:
    for case in UPDATES:
        assert verdict(gpu, UPDATE_CUDA, causal_conv1d_update(**case | dict(c=300))) is None
    for case in TOKENS:
        assert verdict(gpu, TOKEN_CUDA, causal_conv1d_update(**case | dict(c=312))) is None


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
