"""recurrent: the operator, its reference and templates, against ONNX's definitions in NumPy and PyTorch's cells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from bandwidth_support import H200, verdict
from dynamic_support import assert_equal, emulated, expected, on_device

from schedsearch import Workload, recurrent
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.ops.dtypes import decode, encode
from schedsearch.ops.recurrent import FUNCTIONS, RECURRENT, Activation
from schedsearch.template import load_template
from schedsearch.templates.parts import vectors
from schedsearch.templates.recurrent import cuda_kernels, functions
from schedsearch.testing.op_contract import OpContract
from schedsearch.testing.template_contract import TemplateContract

CUDA, CPU = load_template("recurrent_cuda"), load_template("recurrent_cpu")
MODULES = cuda_kernels, functions, vectors
Array = np.ndarray[Any, Any]

SMALL: dict[str, Any] = {"cell": "lstm", "t": 3, "n": 2, "hidden": 5}


class TestRecurrent(OpContract):
    op = RECURRENT
    examples = (
        SMALL,
        SMALL | {"direction": "bidirectional", "optional": ["sequence_lens", "initial_h"], "results": ["y_c", "y"]},
        SMALL | {"cell": "gru", "linear_before_reset": True, "optional": ["bias"], "batch_first": True, "dtype": "float16"},
        SMALL | {"activations": ["hard_sigmoid", "tanh", "affine"], "alpha": [0.1, 0, 2], "beta": [0.4, 0, 0.5]},
        SMALL | {"cell": "rnn", "direction": "bidirectional", "activations": ["relu", "elu"], "clip": 3.0},
        SMALL | {"input_forget": True, "optional": ["peepholes"]},
    )
    wrong = (
        (SMALL | {"cell": "cell"}, "cell"),
        (SMALL | {"t": 0}, "t"),
        (SMALL | {"hidden": 0}, "hidden"),
        (SMALL | {"cell": "gru", "optional": ["initial_c"]}, "optional"),
        (SMALL | {"cell": "gru", "optional": ["bias"]}, "optional"),
        (SMALL | {"cell": "rnn", "results": ["y_c"]}, "results"),
        (SMALL | {"results": []}, "results"),
        (SMALL | {"activations": ["tanh"]}, "activations"),
        (SMALL | {"activations": ["sigmoid", "tanh", "tangent"]}, "activations"),
        (SMALL | {"alpha": [1.0]}, "alpha"),
        (SMALL | {"clip": -1.0}, "clip"),
        (SMALL | {"linear_before_reset": True}, "linear_before_reset"),
        (SMALL | {"cell": "rnn", "input_forget": True}, "input_forget"),
        (SMALL | {"dtype": "float64"}, "dtype"),
    )

    def test_activations_of_one_direction_are_those_of_both(self) -> None:
        once = recurrent(cell="rnn", t=1, n=1, hidden=1, direction="bidirectional", activations=["elu"], alpha=[0.5])
        twice = recurrent(
            cell="rnn", t=1, n=1, hidden=1, direction="bidirectional", activations=["elu"] * 2, alpha=[0.5] * 2
        )
        assert once.id == twice.id


CASES: list[dict[str, Any]] = [
    dict(cell="lstm", t=4, n=3, hidden=5, optional=("initial_h", "initial_c", "sequence_lens"), results=("y", "y_h", "y_c")),
    dict(cell="gru", t=3, n=2, hidden=9, direction="bidirectional", optional=("initial_h",), results=("y", "y_h")),
    dict(
        cell="gru", t=3, n=3, hidden=3, direction="reverse", linear_before_reset=True, optional=("bias", "sequence_lens"),
        batch_first=True, results=("y", "y_h"),
    ),
    dict(cell="rnn", t=5, n=2, hidden=1, direction="bidirectional", activations=("relu", "softsign"), results=("y", "y_h")),
    dict(
        cell="lstm", t=2, n=3, hidden=6, direction="reverse", optional=("peepholes",), input_forget=True, clip=0.7,
        batch_first=True, dtype="float16", results=("y", "y_c"),
    ),
    dict(cell="lstm", t=2, n=2, hidden=17, dtype="bfloat16", results=("y_h",)),
]  # fmt: skip


def example(workload: Workload, seed: int = 0) -> dict[str, Any]:
    """Random numbers; the first row has no steps."""
    rng = np.random.default_rng(seed)
    found = {}
    for spec in workload.signature:
        if spec.name == "sequence_lens":
            found[spec.name] = np.array(
                [0, workload.t, *rng.integers(1, workload.t + 1, workload.n)][: workload.n], np.int32
            )
        else:
            numbers = rng.standard_normal(spec.shape) / (workload.hidden**0.5 if spec.name == "r" else 1)
            found[spec.name] = decode(encode(numbers, spec.dtype), spec.dtype)
    return found


def tolerance(workload: Workload) -> float:
    return {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}[workload.dtype]


@pytest.mark.parametrize("case", CASES, ids=lambda case: recurrent(**case).label)
@pytest.mark.mostly_long(3)
def test_emulated_kernels_are_the_definition(monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    workload = recurrent(**case)
    arrays = example(workload)
    for config in (dict(rows=1, split=1, unroll=1), dict(rows=2, split=4, unroll=2)):
        found = emulated(monkeypatch, CUDA, workload, arrays, Config(threads=64, **config), *MODULES)
        assert_equal(workload, found, expected(workload, arrays), tolerance(workload))


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: recurrent(**case).label)
@pytest.mark.mostly_long(2)
def test_a_cpu_kernel_is_the_definition(device: CpuDevice, case: dict[str, Any]) -> None:
    workload = recurrent(**case)
    arrays = example(workload)
    assert_equal(workload, on_device(device, CPU, workload, arrays), expected(workload, arrays), tolerance(workload))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES[2:], ids=lambda case: recurrent(**case).label)
def test_cpu_kernels_are_the_definition(device: CpuDevice, case: dict[str, Any]) -> None:
    workload = recurrent(**case)
    space, arrays = CPU.space(workload, device.target), example(workload)
    for config in (CPU.default(workload, device.target, space), *space.sample(2, np.random.default_rng(1))):
        found = on_device(device, CPU, workload, arrays, config)
        assert_equal(workload, found, expected(workload, arrays), tolerance(workload))


def of_torch(cell: str, arrays: Mapping[str, Array], hidden: int) -> dict[str, Array]:
    """torch's layer in float64 for one direction, whose input is `gates` itself."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    order = {"lstm": (0, 2, 3, 1), "gru": (1, 0, 2), "rnn": (0,)}[cell]  # torch's gates, of ONNX's
    count = len(order) * hidden
    layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}[cell](count, hidden).double()

    def sorted_gates(matrix: Array) -> Any:
        return torch.tensor(np.concatenate([matrix[gate * hidden : (gate + 1) * hidden] for gate in order]))

    with torch.no_grad():
        layer.weight_ih_l0.copy_(sorted_gates(np.eye(count)))
        layer.weight_hh_l0.copy_(sorted_gates(arrays["r"][0].astype(np.float64)))
        layer.bias_ih_l0.zero_()
        layer.bias_hh_l0.zero_()
        if "bias" in arrays:
            layer.bias_hh_l0[2 * hidden :] = torch.tensor(arrays["bias"][0].astype(np.float64))
        states = [torch.tensor(arrays[name].astype(np.float64)) for name in ("initial_h", "initial_c") if name in arrays]
        y, last = layer(torch.tensor(arrays["gates"].astype(np.float64)), tuple(states) if cell == "lstm" else states[0])
    y_h, y_c = last if cell == "lstm" else (last, None)
    found = {"y": y[:, None].numpy(), "y_h": y_h.numpy()}
    return found | ({"y_c": y_c.numpy()} if y_c is not None else {})


@pytest.mark.integrations
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn"])
def test_the_reference_is_a_layer_of_torch(cell: str) -> None:
    """PyTorch's GRU resets behind the product."""
    optional = {"lstm": ("initial_h", "initial_c"), "gru": ("bias", "initial_h"), "rnn": ("initial_h",)}[cell]
    results = ("y", "y_h", "y_c") if cell == "lstm" else ("y", "y_h")
    workload = recurrent(
        cell=cell, t=6, n=3, hidden=7, optional=optional, results=results, linear_before_reset=cell == "gru"
    )  # fmt: skip
    arrays = example(workload)
    assert_equal(workload, expected(workload, arrays), of_torch(cell, arrays, workload.hidden), 1e-12)


def test_a_reversed_row_is_the_row_backwards_within_its_length() -> None:
    forward = recurrent(cell="gru", t=5, n=2, hidden=4, optional=("sequence_lens",), results=("y", "y_h"))
    arrays = example(forward) | {"sequence_lens": np.array([3, 5], np.int32)}
    turned = {**arrays, "gates": arrays["gates"].copy()}
    for row, length in enumerate(arrays["sequence_lens"]):
        turned["gates"][:length, row] = arrays["gates"][:length, row][::-1]
    found, other = expected(forward.replace(direction="reverse"), arrays), expected(forward, turned)
    np.testing.assert_array_equal(found["y_h"], other["y_h"])
    for row, length in enumerate(arrays["sequence_lens"]):
        np.testing.assert_array_equal(found["y"][:length, :, row], other["y"][:length, :, row][::-1])
        assert not found["y"][length:, :, row].any()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activations_are_their_definitions(name: str) -> None:
    x = np.linspace(-20, 20, 4001).astype(np.float32)
    alpha, beta = (FUNCTIONS[name].alpha or 0.0), (FUNCTIONS[name].beta or 0.0)
    wide = x.astype(np.float64)
    right = {
        "sigmoid": 1 / (1 + np.exp(-wide)), "tanh": np.tanh(wide), "relu": np.maximum(wide, 0),
        "softsign": wide / (1 + np.abs(wide)), "softplus": np.log1p(np.exp(wide)), "affine": wide,
        "leaky_relu": np.where(wide < 0, 0.01 * wide, wide), "thresholded_relu": np.where(wide >= 1, wide, 0),
        "scaled_tanh": np.tanh(wide), "hard_sigmoid": np.clip(0.2 * wide + 0.5, 0, 1),
        "elu": np.where(wide < 0, np.expm1(np.minimum(wide, 0)), wide),
    }[name]  # fmt: skip
    function = functions.function_of(Activation(name, alpha, beta), 0.0, cuda_kernels.CUDA)
    found = np.array([function(each) for each in x], np.float64)
    np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-7 if name == "hard_sigmoid" else 1e-37)


def test_a_wrong_length_is_noted_and_nothing_outside_is_touched(monkeypatch: pytest.MonkeyPatch, device: CpuDevice) -> None:
    workload = recurrent(cell="rnn", t=3, n=3, hidden=2, optional=("sequence_lens",), results=("y", "y_h"))
    arrays = example(workload)
    right = expected(workload, arrays | {"sequence_lens": np.array([3, 0, 2], np.int32)})
    arrays["sequence_lens"] = np.array([9, -1, 2], np.int32)
    words = np.zeros(2, np.int64)
    config = Config(threads=64, rows=2, split=1, unroll=1)
    assert_equal(
        workload, emulated(monkeypatch, CUDA, workload, arrays, config, *MODULES, also={"wrong_index": words}), right, 1e-6
    )
    assert tuple(words) in ((1, 9), (2, -1))
    words[:] = 0
    on_cpu = on_device(device, CPU, workload, arrays, also={"wrong_index": words.ctypes.data})
    assert_equal(workload, on_cpu, right, 1e-6)
    assert tuple(words) in ((1, 9), (2, -1))
    message = workload.definition.wrong_index(workload.params, 0, 9, {"sequence_lens": "lens"})
    assert message == "lens[0] is 9, but a sequence has 3 steps; allowed: 0 to 3"


@pytest.mark.parametrize(
    "wrong", [{"direction": "reverse"}, pytest.param({"linear_before_reset": True}, marks=pytest.mark.long)], ids=str
)
@pytest.mark.long
def test_verification_accepts_a_kernel_and_refuses_that_of_another_workload(
    device: CpuDevice, wrong: dict[str, Any]
) -> None:
    right = recurrent(cell="gru", t=4, n=2, hidden=6, optional=("sequence_lens",))
    assert verdict(device, CPU, right) is None
    assert verdict(device, CPU, right, right.replace(**wrong)) is not None


class TestCpuContract(TemplateContract):
    template, target, compiled = CPU, detect("cpu"), 1
    accepted = (recurrent(**CASES[0]), recurrent(cell="gru", t=50, n=9, hidden=1024, dtype="float16"))


class TestCudaContract(TemplateContract):
    template, target, compiled = CUDA, H200, 1
    accepted = (
        recurrent(**CASES[1]),
        recurrent(cell="lstm", t=50, n=33, hidden=2048, dtype="float16"),
        recurrent(cell="gru", t=1, n=1, hidden=37, linear_before_reset=True, optional=("bias",)),
    )
    refused = ((recurrent(cell="lstm", t=1, n=1, hidden=9000), "shared memory"),)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [*CASES, dict(cell="lstm", t=20, n=3, hidden=2048), dict(cell="gru", t=9, n=5, hidden=1025)], ids=str
)
def test_kernels_on_the_device(gpu: Any, case: dict[str, Any]) -> None:
    workload = recurrent(**case)
    arrays = example(workload)
    found = on_device(gpu, CUDA, workload, arrays)
    assert_equal(workload, found, expected(workload, arrays), 4 * tolerance(workload))
    assert verdict(gpu, CUDA, workload) is None
