"""Results that are stored into slices of larger arrays: the parameter `slice_of` of every operator that has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bandwidth_support import H200, default, emulated, verdict
from data_movement_support import Emulated

import schedsearch
from schedsearch import concat, depth_to_space, elementwise, pad, pool2d, resize, space_to_depth, strided_slice, transpose
from schedsearch.device import open_device
from schedsearch.device.cpu import CpuDevice
from schedsearch.errors import WorkloadError
from schedsearch.ops.registry import operators
from schedsearch.template import load_reference, load_template
from schedsearch.templates.elementwise import cuda as elementwise_cuda
from schedsearch.templates.elementwise import float32_functions
from schedsearch.templates.parts import planes, slices
from schedsearch.templates.pool2d import cuda_kernel, cuda_planes
from schedsearch.templates.resize import axes, windows
from schedsearch.templates.resize import cuda as resize_cuda
from schedsearch.workload import Workload

Array = np.ndarray[Any, Any]

POOL: dict[str, Any] = {"n": 2, "c": 8, "h": 5, "w": 5, "r": 3, "s": 3, "padding": 1}
SIZES: dict[str, Any] = {"n": 2, "c": 8, "h": 3, "w": 4}
GATE: dict[str, Any] = {"y": (2, 3, 5, 8), "expression": "relu(a + b)", "inputs": ["a", ("b", "float16", (8,))]}
COMPUTED: dict[str, Workload] = {
    "pool, channels last": pool2d(**POOL, slice_of=(2, 5, 5, 24)),
    "pool, an odd pitch": pool2d(**POOL, slice_of=(2, 5, 5, 11)),
    "pool, planes": pool2d(**POOL, mode="average", layout="NCHW", slice_of=(2, 11, 5, 5)),
    "pool, blocks": pool2d(**POOL, layout="NCHW4c", slice_of=(2, 5, 5, 5, 4)),
    "shared windows": pool2d(n=2, c=8, h=7, w=7, r=7, s=7, mode="average", slice_of=(2, 1, 1, 24)),
    "chain, channels last": elementwise(**GATE, slice_of=(2, 3, 5, 24)),
    "chain, planes": elementwise(y=(2, 8, 3, 5), expression="abs(a)", slice_of=(2, 9, 3, 5)),
    "chain, an inner axis": elementwise(y=(2, 8, 3, 5), expression="abs(a)", slice_of=(2, 8, 3, 7)),
    "linear, channels last": resize(**SIZES, oh=6, ow=8, mode="linear", slice_of=(2, 6, 8, 24)),
    "nearest, planes": resize(**SIZES, oh=6, ow=8, layout="NCHW", slice_of=(2, 9, 6, 8)),
}
MOVED: dict[str, Workload] = {
    "transpose": transpose(x=(2, 8, 3, 5), permutation=(0, 2, 3, 1), slice_of=(2, 3, 5, 24)),
    "columns": transpose(x=(9, 8), permutation=(1, 0), slice_of=(8, 16)),
    "depth, planes": depth_to_space(n=2, c=16, h=3, w=5, block=2, mode="CRD", slice_of=(2, 9, 6, 10)),
    "depth, channels last": depth_to_space(n=2, c=16, h=3, w=5, block=2, layout="NHWC", slice_of=(2, 6, 10, 9)),
    "space": space_to_depth(n=2, c=4, h=4, w=6, block=2, slice_of=(2, 20, 2, 3)),
    "borders": pad(x=(2, 4, 5, 8), before=(0, 1, 1, 0), after=(0, 1, 2, 0), value=1, slice_of=(2, 6, 8, 24)),
    "cut": strided_slice(
        x=(2, 4, 5, 8), begin=(0, 1, 4, 0), end=(2, 4, -6, 8), strides=(1, 1, -2, 1), slice_of=(2, 9, 3, 8)
    ),
    "channels": concat(x=[(2, 4, 5, 8), (2, 4, 5, 16)], axis=-1, slice_of=(2, 4, 5, 48)),
}
EVERY = {**COMPUTED, **MOVED}


def arrays_of(workload: Workload) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    return {each.name: rng.integers(-8, 9, each.shape).astype(np.float16) for each in workload.signature}


def truth(workload: Workload, arrays: dict[str, Array]) -> Array:
    """y as an array of its own, by the operator's definition for single elements."""
    own = workload.replace(slice_of=())
    flat = np.arange(own.output.size, dtype=np.int64)
    exact = {name: array.astype(np.float64) for name, array in arrays.items()}
    found = np.asarray(load_reference(own.op).points(own, exact, {}, flat, "y"))
    return found.reshape(own.output.shape).astype(np.float16)


def in_larger(workload: Workload, y: Array, filling: Array) -> Array:
    """The larger array, whose first elements along the sliced axis are y."""
    filling[tuple(slice(extent) for extent in y.shape)] = y
    return filling


def test_every_operator_with_the_parameter_is_in_a_test() -> None:
    found = {name for name, op in operators()[0].items() if "slice_of" in op.parameters()}
    assert found == {workload.op for workload in EVERY.values()} | {"conv2d"}  # which has tests of its own


@pytest.mark.parametrize("workload", EVERY.values(), ids=EVERY)
def test_a_slice_is_part_of_the_workload_unless_it_is_all_of_y(workload: Workload) -> None:
    own = workload.replace(slice_of=())
    assert workload.output.slice_of and own.output.slice_of == () and workload.label.startswith(own.label)
    assert workload.label.endswith(f"into {'x'.join(map(str, workload.output.slice_of))}")
    assert own.replace(slice_of=list(own.output.shape)) == own and workload.work == own.work


@pytest.mark.parametrize(
    ("slice_of", "message"),
    [
        ((2, 5, 5), "slice_of is 2x5x5, but y is 2x5x5x8; allowed: as many extents, none of them smaller"),
        ((2, 5, 5, 7), "none of them smaller"),
        ((2, 5, 6, 9), "slice_of is 2x5x6x9, but y is 2x5x5x8; they may differ along one axis only"),
    ],
)
def test_what_is_not_a_slice_is_refused(slice_of: Sequence[int], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        pool2d(**POOL, slice_of=slice_of)
    with pytest.raises(WorkloadError, match=message):
        elementwise(y=(2, 5, 5, 8), expression="abs(a)", slice_of=slice_of)
    with pytest.raises(WorkloadError, match=message):
        transpose(x=(2, 5, 5, 8), permutation=(0, 1, 2, 3), slice_of=slice_of)


@pytest.mark.parametrize("workload", COMPUTED.values(), ids=COMPUTED)
def test_emulated_kernels_store_into_slices(monkeypatch: pytest.MonkeyPatch, workload: Workload) -> None:
    modules = (cuda_kernel, cuda_planes, planes, slices, elementwise_cuda, float32_functions, resize_cuda, axes, windows)
    names = {"pool2d": ("pool2d_cuda", "pool2d_planes_cuda")}.get(workload.op, (f"{workload.op}_cuda",))
    arrays = arrays_of(workload)
    expected = in_larger(workload, truth(workload, arrays), np.full(workload.output.slice_of, np.nan, np.float16))
    for template in map(load_template, names):
        if template.validate(workload, H200) is None:
            widest = default(template, workload, H200)
            found = emulated(monkeypatch, template, workload, arrays, widest, *modules)
            np.testing.assert_allclose(found, expected, rtol=2e-3, err_msg=f"{template.name} {dict(widest)}")


@pytest.mark.parametrize("workload", MOVED.values(), ids=MOVED)
def test_emulated_movements_store_into_slices(monkeypatch: pytest.MonkeyPatch, workload: Workload) -> None:
    template, arrays = load_template("data_movement_cuda"), arrays_of(workload)
    space = template.space(workload, H200)
    bits = np.full(workload.output.whole * 2, 0xA5, np.uint8).view(np.float16).reshape(workload.output.slice_of)
    expected = in_larger(workload, truth(workload, arrays), bits)
    for config in (template.default(workload, H200, space), space.sample(1, np.random.default_rng(2))[0]):
        emulator = Emulated(monkeypatch, late=True)
        source = template.kernel(workload, H200, config)
        raw = {name: array.view(np.uint16) for name, array in arrays.items()}
        emulator.check(source, raw, expected.view(np.uint16), f"{workload.label} {dict(config)}")


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    opened = open_device(schedsearch.detect("cpu"))
    assert isinstance(opened, CpuDevice)
    yield opened
    opened.close()


ON_CPU = ("pool, channels last", "chain, planes", "linear, channels last", "borders")


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.mostly_long(6)
def test_cpu_kernels_store_into_slices(device: CpuDevice, name: str) -> None:
    """Verification compares the slice, and finds writes around it."""
    workload = EVERY[name].replace(dtype="float32") if EVERY[name].op != "elementwise" else EVERY[name]
    template = load_template("data_movement_cpu" if workload.op == "pad" else f"{workload.op}_cpu")
    assert verdict(device, template, workload) is None


# --- Networks -----------------------------------------------------------------------------------------------------------
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx.reference import ReferenceEvaluator  # noqa: E402
from onnx_support import Net  # noqa: E402

from schedsearch.network.evaluate import evaluate  # noqa: E402
from schedsearch.network.graph import Node  # noqa: E402
from schedsearch.network.lower import lower  # noqa: E402
from schedsearch.network.model import read_model  # noqa: E402


def inception() -> Net:
    """Convolutions and a pool of one image."""
    net = Net(2, 32, 8, 8)
    pool = net.node("MaxPool", "x", kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4, name="pool")
    net.node("Concat", net.conv("x", 16, 32, 1, name="a"), pool, net.conv("x", 32, 32, name="b"), axis=1, name="all")
    return net


def skip() -> Net:
    """The skip connection of a U-Net: `down` has two more readers, so that it is copied into the slice."""
    net = Net(2, 16, 8, 8)
    down = net.conv("x", 16, 16, name="down")
    deep = net.conv(net.node("MaxPool", down, kernel_shape=[2, 2], strides=[2, 2], name="pool"), 32, 16, name="deep")
    up = net.node("Resize", deep, "", net.numbers(1.0, 1.0, 2.0, 2.0), name="up", mode="nearest")
    gate = net.node("Sigmoid", net.node("Mul", down, net.weight("g", 1, 16, 1, 1), name="mul"), name="gate")
    net.node("Concat", down, up, gate, axis=1, name="all")
    return net


def copies() -> Net:
    """Two arguments that would have to be copied apart from one another: one concatenation is cheaper."""
    net = Net(1, 16, 4, 4)
    net.node("Concat", "x", net.conv("x", 16, 16, name="a"), "x", axis=1, name="all")
    return net


@pytest.mark.parametrize(
    ("net", "offsets"),
    [
        (inception, {"a": 0, "pool": 16, "b": 48}),
        (skip, {"all": 0, "up": 16, "mul": 48}),
        (copies, {}),
    ],
)
def test_whatever_makes_the_arguments_of_a_concatenation_stores_into_slices(
    tmp_path: Path, net: Any, offsets: dict[str, int]
) -> None:
    built = net()
    network = lower(read_model(built.save(tmp_path)), layouts=("NHWC", "NCHW", "NCHW32c"))
    assert {node.name: node.offsets["y"] for node in network.nodes if isinstance(node, Node) and node.offsets} == offsets
    x = np.random.default_rng(0).integers(-2, 3, built.shape).astype(np.float32)
    (wanted,) = ReferenceEvaluator(built.model()).run(None, {"x": x})
    for number in range(2):
        found = evaluate(
            network,
            {"x": x},
            implementation=lambda node, number=number: node.implementations[min(number, len(node.implementations) - 1)],
        )  # type: ignore[misc]
        np.testing.assert_allclose(found[network.outputs[0]], wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.long(of="networks")
def test_a_built_network_stores_pools_and_chains_into_slices(tmp_path: Path) -> None:
    built = skip()
    path = built.save(tmp_path)
    x = np.random.default_rng(0).standard_normal(built.shape).astype(np.float32)
    (wanted,) = ReferenceEvaluator(built.model()).run(None, {"x": x})
    with schedsearch.build(path, db=tmp_path / "none.db", target="cpu", io_layout="NHWC", layout="NHWC") as net:
        y = net(np.ascontiguousarray(x.transpose(0, 2, 3, 1)))
        np.testing.assert_allclose(y.transpose(0, 3, 1, 2), wanted, rtol=1e-4, atol=1e-4)
        assert sum(" into " in call.label for call in net.steps) == 3
