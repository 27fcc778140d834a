"""A quantised network computes, bit for bit, what integers give: a residual block on a CPU against int64 in NumPy.

The formulas are those of docs/workload-file.md: sums of products in integers, a bias rounded to their unit, one product
with a float32 scale, one rounding half to even, saturation. An addition of two quantised arrays is in float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from cli_support import schedsearch as command  # noqa: E402
from onnx import TensorProto  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_support import Net  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import read_model  # noqa: E402

Array = np.ndarray[Any, np.dtype[Any]]
F32 = np.float32

# Of values. Quotients of sums of numbers of x and conv1 by that of their sum are wholes and halves, but for their roundoff.
SCALES = {"x": 0.35, "conv0": 0.137, "conv1": 0.7, "sum": 0.7}
ZEROS = {"x": 3, "conv0": 100, "conv1": 121, "sum": 7}
WEIGHT_SCALES = np.linspace(0.0006, 0.0022, 16).astype(F32)


def block(*, apart: bool = False) -> tuple[Net, dict[str, Array]]:
    """relu(conv1(relu(conv0(x))) + x) and a pool, as tools for quantisation write them; and its weights.

    Args:
        apart: the result of conv1 leaves the network too, so that it cannot disappear in a kernel.
    """
    net = Net(1, 16, 7, 6, dtype=TensorProto.UINT8)
    weights: dict[str, Array] = {}

    def dequantised(value: str, name: str) -> str:
        return net.node("DequantizeLinear", value, net.numbers(SCALES[name]), net.numbers(ZEROS[name], dtype=np.uint8))

    def quantised(value: str, name: str) -> str:
        return net.node("QuantizeLinear", value, net.numbers(SCALES[name]), net.numbers(ZEROS[name], dtype=np.uint8))

    skip = value = dequantised("x", "x")
    for name in ("conv0", "conv1"):
        random = np.random.default_rng(len(name) + len(weights))
        weights[name] = random.integers(-127, 128, (16, 16, 3, 3)).astype(np.int8)
        weights[f"{name}.bias"] = random.uniform(-1, 1, 16).astype(F32)
        scale = net.weight(f"{name}.scale", 16, value=WEIGHT_SCALES)
        stored = net.weight(f"{name}.weight", 16, 16, 3, 3, dtype=np.int8, value=weights[name])
        filters = net.node("DequantizeLinear", stored, scale, net.weight(f"{name}.zero", 16, dtype=np.int8, value=0), axis=0)
        bias = net.weight(f"{name}.bias", 16, value=weights[f"{name}.bias"])
        made = net.node("Conv", value, filters, bias, name=name, pads=[1] * 4)
        made = net.node("Relu", made) if name == "conv0" else made
        codes = quantised(made, name)
        value = dequantised(codes, name)
    total = quantised(net.node("Relu", net.node("Add", value, skip)), "sum")
    pooled = net.node("MaxPool", dequantised(total, "sum"), kernel_shape=[2, 2], strides=[2, 2])
    net.results = [quantised(pooled, "sum"), *([codes] if apart else [])]
    return net, weights


def whole_numbers(x: Array, weights: dict[str, Array]) -> Array:
    """The block in int64, and in float32 where the formulas say so."""
    value, scale, zero = x.astype(np.int64), F32(SCALES["x"]), ZEROS["x"]
    for name in ("conv0", "conv1"):
        padded = np.pad(value - zero, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
        sums = np.einsum("nchwrs,kcrs->nkhw", windows, weights[name].astype(np.int64))
        unit = scale * WEIGHT_SCALES  # what an integer of the sums stands for
        sums += np.rint(weights[f"{name}.bias"] / unit.astype(np.float64)).astype(np.int64)[:, None, None]
        sums = np.maximum(sums, 0) if name == "conv0" else sums
        scaled = sums.astype(F32) * (unit / F32(SCALES[name])).astype(F32)[:, None, None]
        scale, zero = F32(SCALES[name]), ZEROS[name]
        value = np.clip(np.rint(scaled).astype(np.int64) + zero, 0, 255)
    left, right = (value - zero).astype(F32) * scale, (x.astype(np.int64) - ZEROS["x"]).astype(F32) * F32(SCALES["x"])
    quotient = np.maximum(left + right, F32(0)) / F32(SCALES["sum"])
    total = np.clip(np.rint(quotient).astype(np.int64) + ZEROS["sum"], 0, 255)
    return total[:, :, :6].reshape(1, 16, 3, 2, 3, 2).max(axis=(3, 5)).astype(np.uint8)


@pytest.mark.long
def test_a_residual_block_is_equal_to_whole_numbers_in_every_bit(tmp_path: Path) -> None:
    net, weights = block()
    path = net.save(tmp_path)
    network = lower(read_model(path), layouts=("NHWC", "NCHW"))
    with schedsearch.build(path, db=tmp_path / "none.db", target="cpu") as built:
        labels = [call.label for call in built.steps if not call.label.startswith("layout_transform")]
        assert [label.split()[0] for label in labels] == ["conv2d", "conv2d", "pool2d"]
        assert labels[1].endswith("+bias+requantise_add(middle=uint8, relu=True, residual=uint8, to=uint8)")
        for seed in range(4):
            x = np.random.default_rng(seed).integers(0, 256, (1, 16, 7, 6)).astype(np.uint8)
            expected = whole_numbers(x, weights)
            assert len(np.unique(expected)) > 30  # not all saturated
            np.testing.assert_array_equal(built(x), expected)
        np.testing.assert_array_equal(evaluate(network, {"x": x})[network.outputs[0]], expected)


@pytest.mark.long
def test_an_addition_of_its_own_computes_the_same_as_one_in_an_epilogue(tmp_path: Path) -> None:
    net, weights = block(apart=True)
    with schedsearch.build(net.save(tmp_path), db=tmp_path / "none.db", target="cpu") as built:
        assert [call.label.split()[0] for call in built.steps].count("elementwise") == 1
        x = np.random.default_rng(0).integers(0, 256, (1, 16, 7, 6)).astype(np.uint8)
        np.testing.assert_array_equal(built(x)[0], whole_numbers(x, weights))


@pytest.mark.long
def test_run_says_how_many_whole_numbers_of_each_layer_equal_those_of_the_model(tmp_path: Path) -> None:
    path = block()[0].save(tmp_path)
    x = np.random.default_rng(0).integers(0, 256, (1, 16, 7, 6)).astype(np.uint8)
    np.save(tmp_path / "x.npy", x)
    wanted = ReferenceEvaluator(onnx.load(path)).run(None, {"x": x}, intermediate=True)
    with schedsearch.build(path, db=tmp_path / "no.db", target="cpu", out=tmp_path / "net.ssx") as built:
        found = built.trace(x)
    arguments = ("run", tmp_path / "net.ssx", "--input", tmp_path / "x.npy", "--compare", "onnx", "--repeat", "0")
    errors = json.loads(command(*arguments, "--json").stdout)["errors"]
    assert [each["value"] for each in errors] == list(found) and len(found) == 3
    for each in errors:
        mine, other = (array.astype(int).ravel().tolist() for array in (found[each["value"]], wanted[each["value"]]))
        assert each["elements"] == len(mine) and each["equal"] == sum(map(int.__eq__, mine, other))
        assert each["largest"] == max(abs(a - b) for a, b in zip(mine, other)) <= 1


@pytest.mark.long
@pytest.mark.parametrize(("zero_point", "equal", "told"), [
    (3, 8, "integers: 1 value, equal in every bit"),
    (5, 2, "integers: 0 of 1 values equal in every bit; the others differ by 2 steps at most (codes.out)"),
])  # fmt: skip
def test_differences_of_whole_numbers_are_counted_in_steps(tmp_path: Path, zero_point: int, equal: int, told: str) -> None:
    """Against a model with another zero point, all codes differ but those that are saturated: 255, twice."""

    def save(zero: int) -> Path:
        net = Net(1, 8)
        net.node("QuantizeLinear", "x", net.numbers(0.5), net.numbers(zero, dtype=np.uint8), name="codes")
        return net.save(tmp_path)

    with schedsearch.build(save(3), db=tmp_path / "no.db", target="cpu", out=tmp_path / "net.ssx"):
        save(zero_point)
    np.save(tmp_path / "x.npy", np.asarray([[0, 1, 2, 3, 4, 60, 1000, 2000]], np.float32))
    done = command("run", tmp_path / "net.ssx", "--input", tmp_path / "x.npy", "--compare", "onnx", "--repeat", "0")
    assert told in done.stdout, done.stdout + done.stderr
    assert f"{equal} of 8" in done.stdout
