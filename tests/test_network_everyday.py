"""What everyday files have beside nodes of 32 bits: float64, fused nodes, pads of -inf, filters of 8 bits, spectra.

Expected values are those of the reference evaluator of onnx, on the model or on one that says the same in nodes of ONNX,
and those of NumPy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import schedsearch

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx import TensorProto, numpy_helper, parser  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from schedsearch.deadline import NEVER  # noqa: E402
from schedsearch.executable.build_options import BuildOptions  # noqa: E402
from schedsearch.executable.lowering import lowered  # noqa: E402
from schedsearch.executable.reading import for_device  # noqa: E402
from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.graph import Node  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import NoOperatorError, load  # noqa: E402

RNG = np.random.default_rng(5)


def model_of(signature: str, body: str, weights: dict[str, Any] | None = None) -> Any:
    text = f'<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> g ({signature}) {{ {body} }}'
    model = parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in (weights or {}).items())
    return model


def numbers(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def computed(model: Any, inputs: dict[str, Any]) -> list[Any]:
    network = lower(load(model).graph())
    values = evaluate(network, inputs)
    return [values[name].reshape(network.values[name].shape) for name in network.outputs]


def agree(model: Any, inputs: dict[str, Any], same: Any = None, narrowed: dict[str, Any] | None = None) -> None:
    """The network has the values of the evaluator, on `same` if that is given."""
    wanted = ReferenceEvaluator(same or model).run(None, inputs)
    for found, each in zip(computed(model, narrowed or inputs), wanted, strict=True):
        np.testing.assert_allclose(found, each, rtol=2e-5, atol=2e-5)


# --- float64 -----------------------------------------------------------------------------------------------------------
def test_float64_is_computed_in_float32() -> None:
    """As PyTorch's exporter writes `(torch.arange(w) + .5 - x) * 4`."""
    body = """
        wide = Cast <to = 11> (x) shifted = Sub (grid, wide) placed = Mul (shifted, four) scores = Sigmoid (x)
        scores_wide = Cast <to = 11> (scores) y = Concat <axis = 1> (placed, scores_wide)"""
    weights = {"grid": np.arange(6.0) + 0.5, "four": np.float64(4)}
    model = model_of("float[2, 6] x) => (double[2, 12] y", body, weights)
    network = lower(load(model).graph())
    assert {network.values[name].dtype for name in network.values} == {"float32"}
    agree(model, {"x": numbers(2, 6)})


def test_inputs_of_float64_become_float32_and_the_lowest_number_of_a_mask_stays_finite() -> None:
    body = "masked = Where (hidden, lowest, x) y = Softmax (masked)"
    weights = {"hidden": np.array([True, False, True]), "lowest": np.float64(np.finfo(np.float64).min)}
    model = model_of("double[2, 3] x) => (double[2, 3] y", body, weights)
    x = numbers(2, 3)
    agree(model, {"x": x.astype(np.float64)}, narrowed={"x": x})
    weights["hidden"] = np.ones(3, bool)  # no number is left: all are equal, and not NaN
    agree(model_of("double[2, 3] x) => (double[2, 3] y", body, weights), {"x": x.astype(np.float64)}, narrowed={"x": x})


# --- float16 on a CPU ---------------------------------------------------------------------------------------------------
def test_a_cpu_computes_float16_in_float32_between_ports_of_float16() -> None:
    weights = {"w": numbers(5, 3).astype(np.float16), "b": numbers(5).astype(np.float16)}
    body = "p = Gemm <transB = 1> (x, w, b) y = Tanh (p) z = Cast <to = 1> (p)"
    model = model_of("float16[2, 3] x) => (float16[2, 5] y, float[2, 5] z, float16[2, 5] p", body, weights)
    options = BuildOptions.of(NEVER, target="cpu", db="none.db")
    network = lowered(for_device(load(model).graph(), options), options)
    assert [network.values[name].dtype for name in (*network.inputs, *network.outputs)] == [
        *("float16", "float16", "float32", "float16")
    ]
    workloads = [each.implementations[0] for each in network.nodes if isinstance(each, Node)]
    assert [each.params.dtype for each in workloads if each.op == "dense"] == ["float32"]
    x = numbers(2, 3).astype(np.float16)
    found = evaluate(network, {"x": x})
    product = x.astype(np.float64) @ weights["w"].T.astype(np.float64) + weights["b"]
    for name, wanted in (("y", np.tanh(product)), ("z", product), ("p", product)):
        np.testing.assert_allclose(found[name].reshape(2, 5), wanted, rtol=2e-3, atol=1e-3)
    np.testing.assert_allclose(found["z"].reshape(2, 5), product, rtol=1e-6)  # float16 in between would be further off


# --- files that ONNX Runtime has optimised -----------------------------------------------------------------------------
FILTERS = {"w": numbers(5, 3, 3, 3), "b": numbers(5)}


@pytest.mark.parametrize(
    ("fused", "plain"),
    [
        ('<activation = "Relu", pads = [1, 1, 1, 1]> (x, w, b)', "y = Relu (p)"),
        (
            '<activation = "LeakyRelu", activation_params = [0.2], pads = [1, 1, 1, 1]> (x, w, b, z)',
            "s = Add (p, z) y = LeakyRelu <alpha = 0.2> (s)",
        ),
        (
            '<activation = "Clip", activation_params = [-0.5, 1.5], pads = [1, 1, 1, 1]> (x, w, b)',
            "l = Constant <value = float {-0.5}> () h = Constant <value = float {1.5}> () y = Clip (p, l, h)",
        ),
        (
            '<activation = "HardSigmoid", activation_params = [0.3, 0.4], pads = [1, 1, 1, 1]> (x, w, b)',
            "y = HardSigmoid <alpha = 0.3, beta = 0.4> (p)",
        ),
        ("<pads = [1, 1, 1, 1]> (x, w, b, z)", "y = Add (p, z)"),
    ],
)
def test_a_fused_convolution_is_its_parts(fused: str, plain: str) -> None:
    signature = "float[1, 3, 6, 7] x, float[1, 5, 6, 7] z) => (float[1, 5, 6, 7] y"
    model = model_of(signature, f"y = com.microsoft.FusedConv {fused}", FILTERS)
    same = model_of(signature, f"p = Conv <pads = [1, 1, 1, 1]> (x, w, b) {plain}", FILTERS)
    agree(model, {"x": numbers(1, 3, 6, 7), "z": numbers(1, 5, 6, 7)}, same)


def test_a_fused_gemm_is_its_parts() -> None:
    weights, signature = {"w": numbers(4, 5), "b": numbers(4)}, "float[3, 5] x) => (float[3, 4] y"
    fused = '<transB = 1, alpha = 0.5, activation = "LeakyRelu", activation_alpha = 0.3> (x, w, b)'
    same = "p = Gemm <transB = 1, alpha = 0.5> (x, w, b) y = LeakyRelu <alpha = 0.3> (p)"
    model = model_of(signature, f"y = com.microsoft.FusedGemm {fused}", weights)
    agree(model, {"x": numbers(3, 5)}, model_of(signature, same, weights))


def test_a_fused_node_with_an_unknown_activation_is_refused() -> None:
    body = 'y = com.microsoft.FusedConv <activation = "Selu"> (x, w)'
    model = model_of("float[1, 3, 6, 7] x) => (float[1, 5, 4, 5] y", body, FILTERS)
    with pytest.raises(NoOperatorError, match="FusedConv"):
        lower(load(model).graph())


# --- quantised nodes ---------------------------------------------------------------------------------------------------
def test_filters_of_a_transposed_convolution_may_have_8_bits() -> None:
    weights = {
        "w": RNG.integers(-128, 128, (3, 4, 2, 2)).astype(np.int8),
        "ws": RNG.uniform(0.01, 0.1, 4).astype(np.float32),
        "wz": np.zeros(4, np.int8),
        "b": RNG.integers(-50, 50, 4).astype(np.int32),
        "bs": np.float32(0.01),
    }
    body = """
        wide = DequantizeLinear <axis = 1> (w, ws, wz) bias = DequantizeLinear (b, bs)
        y = ConvTranspose <strides = [2, 2]> (x, wide, bias)"""
    agree(model_of("float[1, 3, 4, 5] x) => (float[1, 4, 8, 10] y", body, weights), {"x": numbers(1, 3, 4, 5)})


def test_a_mean_of_dequantised_numbers_in_nhwc_has_what_it_reads() -> None:
    """The dequantised numbers are read through a transposition that is a view."""
    body = """
        wide = DequantizeLinear (x, scale) image = Transpose <perm = [0, 3, 1, 2]> (wide) y = GlobalAveragePool (image)"""
    model = model_of("uint8[2, 4, 5, 3] x) => (float[2, 3, 1, 1] y", body, {"scale": np.float32(0.1)})
    agree(model, {"x": RNG.integers(0, 256, (2, 4, 5, 3)).astype(np.uint8)})


def test_interpolated_integers_are_left_to_another_runtime() -> None:
    body = 'y = Resize <mode = "linear"> (x, , scales)'
    weights = {"scales": np.array([1, 1, 2, 2], np.float32)}
    with pytest.raises(NoOperatorError, match="interpolates uint8, which runtimes round in different ways"):
        lower(load(model_of("uint8[1, 2, 3, 4] x) => (uint8[1, 2, 6, 8] y", body, weights)).graph())


# --- pads --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan])
def test_pads_may_be_infinite(value: float) -> None:
    """As Keras pads before a MaxPool."""
    weights = {"pads": np.array([0, 0, 1, 0, 0, 0, 1, 2]), "value": np.float32(value)}
    body = "padded = Pad (x, pads, value) y = Max (padded, x0)"
    model = model_of("float[1, 2, 3, 4] x, float[1, 2, 5, 6] x0) => (float[1, 2, 5, 6] y", body, weights)
    agree(model, {"x": numbers(1, 2, 3, 4), "x0": numbers(1, 2, 5, 6)})


@pytest.mark.parametrize("value", [-np.inf, np.inf])
def test_an_attribute_may_be_the_infinity_that_old_opsets_pad_with(value: float) -> None:
    pad = onnx.helper.make_node("Pad", ["x"], ["padded"], pads=[0, 1, 2, 0], value=value)
    largest = onnx.helper.make_node("Max", ["padded", "x0"], ["y"])
    info = onnx.helper.make_tensor_value_info
    inputs = [info("x", TensorProto.FLOAT, [2, 3]), info("x0", TensorProto.FLOAT, [4, 4])]
    graph = onnx.helper.make_graph([pad, largest], "g", inputs, [info("y", TensorProto.FLOAT, [4, 4])])
    x, x0 = numbers(2, 3), numbers(4, 4)
    (y,) = computed(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 10)]), {"x": x, "x0": x0})
    np.testing.assert_array_equal(y, np.maximum(np.pad(x, [(0, 2), (1, 0)], constant_values=value), x0))


# --- signals -----------------------------------------------------------------------------------------------------------
def test_a_spectrogram_is_that_of_numpy() -> None:
    """Log mel energies of frames, as audio models compute them from samples."""
    window, mel = np.hanning(16).astype(np.float32), RNG.random((9, 5), np.float32)
    weights = {"step": np.int64(5), "window": window, "mel": mel, "axis": np.array([-1])}
    body = """
        s = STFT <onesided = 1> (x, step, window) squares = Mul (s, s) power = ReduceSum <keepdims = 0> (squares, axis)
        energy = MatMul (power, mel) y = Log (energy)"""
    model = model_of("float[2, 61, 1] x) => (float[2, 10, 5] y", body, weights)
    x = numbers(2, 61, 1)
    frames = np.lib.stride_tricks.sliding_window_view(x[..., 0], 16, axis=1)[:, ::5].astype(np.float64)
    wanted = np.log(np.abs(np.fft.rfft(frames * window)) ** 2 @ mel)
    np.testing.assert_allclose(computed(model, {"x": x})[0], wanted, rtol=1e-4, atol=1e-4)


def test_a_transform_that_is_cut_off_or_filled_is_that_of_numpy() -> None:
    for length in (8, 20):
        model = model_of(
            "float[3, 13, 1] x) => (float[3, n, 2] y",
            "y = DFT (x, n_fft, axis)",
            {"n_fft": np.int64(length), "axis": np.int64(1)},
        )
        x = numbers(3, 13, 1)
        wanted = np.fft.fft(x[..., 0].astype(np.float64), length, axis=1)
        np.testing.assert_allclose(
            computed(model, {"x": x})[0], np.stack([wanted.real, wanted.imag], -1), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(
    ("inputs", "body", "reason"),
    [
        ("float[1, 9, 1] x, int64 n", "y = DFT (x, n)", "has a length that is computed; allowed: a constant"),
        (
            "float[1, 9, 1] x, float[4] w",
            "s = Constant <value = int64 {2}> () y = STFT (x, s, w)",
            "has a step, a window or",
        ),
        (
            "float[1, 40000, 1] x",
            "y = DFT (x)",
            "needs a table of 12,800,000,000 bytes; allowed: up to 67,108,864",
        ),
    ],
)
def test_transforms_that_need_more_than_a_table_are_refused(inputs: str, body: str, reason: str) -> None:
    with pytest.raises(NoOperatorError, match=reason):
        lower(load(model_of(f"{inputs}) => (float[a, b, c] y", body)).graph())


# --- files --------------------------------------------------------------------------------------------------------------
def test_a_constant_factor_of_several_products_can_be_written_and_loaded(tmp_path: Path) -> None:
    model, x = (
        model_of("float[3, 4, 5] x) => (float[3, 4, 5] y", "y = MatMul (w, x)", {"w": numbers(4, 4)}),
        numbers(3, 4, 5),
    )
    onnx.save(model, tmp_path / "net.onnx")
    made = {"target": "cpu", "db": tmp_path / "none.db", "out": tmp_path / "net.ssx", "progress": False, "check": False}
    schedsearch.build(tmp_path / "net.onnx", **made).close()
    with schedsearch.load(tmp_path / "net.ssx") as net:
        np.testing.assert_allclose(net(x), ReferenceEvaluator(model).run(None, {"x": x})[0], rtol=1e-5, atol=1e-5)


assert TensorProto.DOUBLE == 11  # as in the texts above


def test_the_nearest_pixel_is_chosen_before_a_place_is_reflected() -> None:
    places = np.array([-1.5, -2.5, -3.5, 4.5, 5.5, 6.5])
    grid = np.zeros((1, 1, 6, 2), np.float32)
    grid[0, 0, :, 0] = (2 * places + 1) / 4 - 1
    body = 'y = GridSample <mode = "nearest", padding_mode = "reflection"> (x, g)'
    model = model_of("float[1, 1, 1, 4] x, float[1, 1, 6, 2] g) => (float[1, 1, 1, 6] y", body)
    agree(model, {"x": np.arange(4, dtype=np.float32).reshape(1, 1, 1, 4), "g": grid})
