"""Slices that element-wise kernels read out of a larger array, against NumPy and ONNX's reference evaluator."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bandwidth_support import H200, default, emulated, on_cpu, verdict
from long_cases import except_long

import schedsearch
from schedsearch import Workload, elementwise
from schedsearch.backend import compile_source
from schedsearch.backend.cuda import _compile_to_ptx
from schedsearch.config import Config
from schedsearch.device import open_device
from schedsearch.device.cpu import CpuDevice
from schedsearch.errors import WorkloadError
from schedsearch.template import load_reference, load_template
from schedsearch.templates.elementwise import cuda as cuda_template
from schedsearch.templates.elementwise import float32_functions

CUDA, CPU = load_template("elementwise_cuda"), load_template("elementwise_cpu")
FORMATS = ("float16", "bfloat16", "float32", "int8", "uint8")
Entry = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def drawn(rng: np.random.Generator, name: str, y: tuple[int, ...]) -> Entry:
    """A slice along some axes, of any format, that is y's shape or broadcasts to it."""
    shape = tuple(1 if rng.integers(5) == 0 else n for n in y[rng.integers(len(y)) if rng.integers(4) == 0 else 0 :])
    strides = tuple(int(rng.choice([1, 1, 1, 2, 3])) for _ in shape)
    begin = tuple(int(rng.choice([0, 0, 1, 4, 8])) for _ in shape)
    more = rng.choice([0, 0, 1, 4, 8], len(shape))
    whole = tuple(b + (n - 1) * s + 1 + int(m) for b, n, s, m in zip(begin, shape, strides, more))
    return name, str(rng.choice(FORMATS)), shape, whole, begin, strides


def random_workload(seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    y = (*map(int, rng.choice([1, 2, 3, 8], rng.integers(1, 4))), int(rng.choice([1, 4, 7, 16])))
    inputs = [drawn(rng, "a", y), drawn(rng, "b", y), ("c", "float16", y)]
    return elementwise(y=y, expression="a - 2 * b + c", inputs=inputs, dtype="float32")


def example(workload: Workload) -> tuple[dict[str, Any], Any]:
    """Integers, whose sums every format of them holds, and y by NumPy's own slices."""
    rng = np.random.default_rng(0)
    arrays = {each.name: rng.integers(0, 30, each.shape).astype(np.float32) for each in workload.signature}
    a, b, c = (
        arrays[name][tuple(slice(f, f + (n - 1) * s + 1, s) for f, n, s in zip(begin, shape, strides))]
        for name, _, shape, _, begin, strides in (
            (*each, each[2], (0,) * len(each[2]), (1,) * len(each[2])) if len(each) == 3 else each
            for each in workload.inputs
        )
    )
    return arrays, np.broadcast_to(a - 2 * b + c, workload.y)


@pytest.mark.parametrize("seed", range(40))
def test_emulated_kernels_and_the_reference_read_slices(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    workload = random_workload(seed)
    arrays, expected = example(workload)
    config = Config(vector=CUDA.space(workload, H200).knobs[0].values[-1], unroll=2, threads=64)
    if CUDA.space(workload, H200).check(config):
        config = default(CUDA, workload, H200)
    found = emulated(monkeypatch, CUDA, workload, arrays, config, cuda_template, float32_functions)
    np.testing.assert_array_equal(found, expected)
    flat = np.arange(workload.output.size)
    exact = {name: array.astype(np.float64) for name, array in arrays.items()}
    points = load_reference("elementwise").points(workload, exact, {}, flat, "y")
    np.testing.assert_array_equal(np.reshape(points, workload.y), expected)


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    opened = open_device(schedsearch.detect("cpu"))
    assert isinstance(opened, CpuDevice)
    yield opened
    opened.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.mostly_long(6)
def test_cpu_kernels_read_slices(device: CpuDevice, seed: int) -> None:
    workload = random_workload(seed)
    arrays, expected = example(workload)
    np.testing.assert_array_equal(on_cpu(device, CPU, workload, arrays), expected)
    assert verdict(device, CPU, workload) is None


def test_a_slice_is_part_of_the_workload_unless_it_is_the_whole_array() -> None:
    entry = ("a", "float16", (6, 1), (6, 4), (0, 2), (1, 1))
    column = elementwise(y=(6, 1), expression="tanh(a)", inputs=[entry])
    whole = elementwise(y=(6, 1), expression="tanh(a)", inputs=[("a", "float16", (6, 1), (6, 1), (0, 0))])
    assert whole == elementwise(y=(6, 1), expression="tanh(a)") != column
    assert column == elementwise(y=(6, 1), expression="tanh(a)", inputs=[entry[:-1]])  # strides of 1
    assert column.signature[0].shape == (6, 4) and column.work.nbytes == 2 * 6 * 2
    assert column.label == 'elementwise 6x1 "tanh(a)" f16 a in 6x4 [:,2:3]'
    assert Workload.from_json(column.json) == column and hash(Workload.from_json(column.json)) == hash(column)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (
            ((6, 4), (0, 4)),
            "input a of extents 6x1 from [0, 4] on with strides [1, 1] is beyond 6x4; allowed: a slice of it",
        ),
        (((6, 4), (0, 0), (2, 1)), "is beyond 6x4"),
        (((6, 4), (0,)), "allowed: a list for each, with 2 integers"),
        (((6, 4), (0, -1)), "those of begin are at least 0"),
        (((6, 4),), "allowed: a name, [name, dtype], [name, dtype, extents] or [name, dtype, extents, slice_of, begin"),
    ],
)
def test_what_is_not_a_slice_is_refused(cut: tuple[Any, ...], message: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(message)):
        elementwise(y=(6, 1), expression="abs(a)", inputs=[("a", "float16", (6, 1), *cut)])


def gate(first: int, channels: int = 64) -> Workload:
    """x[..., first:] * sigmoid(x[..., :64]) of an image with channels last."""
    y, whole = (8, 56, 56, channels), (8, 56, 56, 2 * channels + 8)
    inputs = [("a", "float16", y, whole, (0, 0, 0, first)), ("b", "float16", y, whole, (0, 0, 0, 0))]
    return elementwise(y=y, expression="a * sigmoid(b)", inputs=inputs)


@pytest.mark.parametrize(("first", "bytes_of_a"), [(64, 16), pytest.param(68, 8, marks=pytest.mark.long), (65, 2)])
@pytest.mark.mostly_long(2)
def test_aligned_slices_are_loaded_with_16_bytes_and_others_with_what_their_place_allows(
    first: int, bytes_of_a: int
) -> None:
    workload = gate(first)
    config = Config(vector=8, unroll=1, threads=128)
    source = CUDA.kernel(workload, H200, config)
    assert default(CUDA, workload, H200)["vector"] == 8
    assert dict(source.alignments) == {"a": bytes_of_a, "b": 16, "y": 16}
    text = _compile_to_ptx(source.steps[0], "kernel", "sm_90")
    loads = [line for line in text.splitlines() if "ld.global" in line]
    wide = sum(".v4." in line for line in loads)
    assert (wide, len(loads)) == (1 + (bytes_of_a == 16), 1 + 16 // bytes_of_a)
    assert sum(".v4." in line for line in text.splitlines() if "st.global" in line) == 1
    resources = compile_source(source, H200).resources
    assert resources.local_bytes == resources.spill_bytes == 0 and resources.registers <= 64


# --- Networks -----------------------------------------------------------------------------------------------------------
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_support import Net  # noqa: E402

from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.graph import Node  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import read_model  # noqa: E402


def glu(*sizes: int, axis: int = 1) -> Net:
    """A convolution whose result is split; the parts are gates of one another."""
    net = Net(2, 8, 6, 8)
    y = net.conv("x", sum(sizes) if axis == 1 else 32, 8, name="conv")
    count = len(sizes)
    net.node("Split", y, net.row(*sizes), axis=axis, outputs=count, name="split")
    parts = ["split.out", *(f"split.out{number}" for number in range(1, count))]
    last = net.node("Tanh", parts[0], name="tanh")
    for number, part in enumerate(parts[1:]):
        last = net.node("Mul", last, net.node("Sigmoid", part, name=f"gate{number}"), name=f"mul{number}")
    return net


def boxes() -> Net:
    """Columns of rows, as detectors decode them."""
    net = Net(5, 4)
    net.node("Split", "x", axis=1, num_outputs=4, outputs=4, name="split")
    x, y, w, h = ("split.out", "split.out1", "split.out2", "split.out3")
    half_w, half_h = (net.node("Mul", net.node("Exp", each), net.numbers(0.5)) for each in (w, h))
    corners = [net.node(op, *pair) for op, pair in (
        ("Sub", (x, half_w)), ("Sub", (y, half_h)), ("Add", (x, half_w)), ("Add", (y, half_h))
    )]  # fmt: skip
    net.node("Concat", *corners, axis=1, name="all")
    return net


def focus() -> Net:
    """Every other pixel, added to those between them; a slice that goes backwards stays."""
    net = Net(1, 16, 6, 8)
    even = net.node("Slice", "x", net.row(0, 0), net.row(99, 99), net.row(2, 3), net.row(2, 2), name="even")
    odd = net.node("Slice", "x", net.row(1, 1), net.row(99, 99), net.row(2, 3), net.row(2, 2), name="odd")
    back = net.node("Slice", even, net.row(-1), net.row(-99), net.row(3), net.row(-1), name="back")
    net.node("Add", net.node("Add", even, odd, name="sum"), back, name="add")
    return net


def read_twice() -> Net:
    """A part that a pool reads as well is copied once, for both."""
    net = Net(1, 64, 4, 4)
    net.node("Split", net.node("Relu", "x", name="relu"), axis=1, num_outputs=2, outputs=2, name="split")
    pool = net.node("MaxPool", "split.out", kernel_shape=[3, 3], pads=[1] * 4, name="pool")
    net.node("Add", net.node("Add", "split.out", "split.out1", name="sum"), pool, name="all")
    return net


def quantised() -> Net:
    """The halves of quantised channels, dequantised, added and quantised again."""
    net = Net(1, 8, 4, 4)
    scale, zero = net.numbers(0.25), net.numbers(3, dtype=np.uint8)
    whole = net.node("QuantizeLinear", net.node("Relu", "x", name="relu"), scale, zero, name="quantise")
    net.node("Split", whole, axis=1, num_outputs=2, outputs=2, name="split")
    halves = [net.node("DequantizeLinear", half, scale, zero) for half in ("split.out", "split.out1")]
    total = net.node("QuantizeLinear", net.node("Add", *halves, name="add"), scale, zero, name="again")
    net.node("DequantizeLinear", total, scale, zero, name="numbers")
    return net


CASES = {
    "whole blocks": (lambda: glu(32, 32), 0),
    "uneven": (lambda: glu(5, 5, 5, axis=1), 0),
    "rows": (lambda: glu(2, 2, 2, axis=2), 0),
    "columns": (lambda: glu(4, 4, axis=-1), 0),
    "boxes": (boxes, 0),
    "quantised": (quantised, 0),
    "strides": (focus, 2),
    "read twice": (read_twice, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_networks_read_slices_in_place(tmp_path: Path, name: str) -> None:
    """Every implementation, in each layout that images may have."""
    made, copies = CASES[name]
    built = made()
    network = lower(read_model(built.save(tmp_path)), layouts=("NHWC", "NCHW", "NCHW32c"))
    nodes = [node for node in network.nodes if isinstance(node, Node)]
    assert sum(node.implementations[0].op == "strided_slice" for node in nodes) == copies
    x = np.random.default_rng(0).integers(-2, 3, built.shape).astype(np.float32)
    (wanted,) = ReferenceEvaluator(built.model()).run(None, {"x": x})
    for number in range(max(len(node.implementations) for node in nodes)):
        found = evaluate(
            network,
            {"x": x},
            implementation=lambda node, number=number: node.implementations[min(number, len(node.implementations) - 1)],
        )  # type: ignore[misc]
        np.testing.assert_allclose(found[network.outputs[0]], wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_shorter_formats_are_read_in_place_too(tmp_path: Path, dtype: str) -> None:
    network = lower(read_model(boxes().save(tmp_path)), dtype=dtype)
    nodes = [node for node in network.nodes if isinstance(node, Node)]
    cuts = [
        each
        for node in nodes
        if node.implementations[0].op == "elementwise"
        for each in node.implementations[0].inputs
        if len(each) > 3
    ]
    assert {each[1] for each in cuts} == {dtype} and {each[3] for each in cuts} == {(5, 4)}
    assert sorted({each[4][1] for each in cuts}) == [0, 1, 2, 3]
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    (wanted,) = ReferenceEvaluator(boxes().model()).run(None, {"x": x})
    found = evaluate(network, {"x": x})[network.outputs[0]]
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("name", except_long(["uneven", "boxes", "strides", "quantised"], long=["uneven", "boxes"]))
@pytest.mark.mostly_long(2)
def test_built_networks_read_slices_in_place(tmp_path: Path, name: str) -> None:
    built = CASES[name][0]()
    path = built.save(tmp_path)
    x = np.random.default_rng(0).standard_normal(built.shape).astype(np.float32)
    (wanted,) = ReferenceEvaluator(built.model()).run(None, {"x": x})
    with schedsearch.build(path, db=tmp_path / "none.db", target="cpu") as net:
        np.testing.assert_allclose(net(x), wanted, rtol=1e-4, atol=1e-4)
        assert "      reads in place, without a copy: " in net.explain()
