"""ONNX models whose inputs are open in later axes, such as height and width of images and the length of texts.

Expected values are onnx.reference's.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxscript")

from onnx import TensorProto, helper, numpy_helper
from test_dynamic_model import agrees, artifact, device  # noqa: F401

import schedsearch
from schedsearch import dyn_strided_slice
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.dynamic.graph import DynamicGraph, Size
from schedsearch.dynamic.model import read_graph
from schedsearch.dynamic.net import DynamicNet
from schedsearch.errors import ArgumentError, UsageError

FLOAT, HALF, WHOLE, TRUTH = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64, TensorProto.BOOL
NUMPY = {FLOAT: np.float32, HALF: np.float16, WHOLE: np.int64, TRUTH: np.uint8}
LIMITS = {TRUTH: (0, 2)}
SIZES = {"n": Size("n", 0, 2), "h": Size("h", 0, 3), "w": Size("w", 2, 5), "s": Size("s", 1, 6)}
IMAGE, TEXT = ("n", 3, "h", "w"), ("n", "s")
Inputs = dict[str, tuple[int, tuple[int | str, ...]]]  # name -> format and extents


def model(inputs: Inputs, *nodes: tuple[Any, ...], results: int = 1, **constants: Any) -> Any:
    """Nodes (operator, inputs, attributes) in order; t is the result before. The last `results` of them are outputs."""
    made: list[Any] = []
    for number, (op, given, attributes) in enumerate(nodes):
        names = [f"t{number - 1}" if name == "t" else name for name in given.split()]
        made.append(helper.make_node(op, names, [f"t{number}"], name=f"{op} {number}", **attributes))
    ports = [helper.make_tensor_value_info(name, dtype, sizes) for name, (dtype, sizes) in inputs.items()]
    positions = [name for name in ("begin", "end") if any(name in given.split() for _, given, _ in nodes)]
    ports += [helper.make_tensor_value_info(name, WHOLE, [4]) for name in positions]
    outputs = [helper.make_empty_tensor_value_info(node.output[0]) for node in made[-results:]]
    weights = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(made, "open", ports, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def arrays(inputs: Inputs, least: int = 0, **more: Any) -> list[dict[str, Any]]:
    """Inputs of all combinations of sizes within their bounds, in an order that changes several sizes at once."""
    names = sizes_of(inputs)
    found, rng = [], np.random.default_rng(0)
    for numbers in itertools.product(*(range(max(SIZES[name].least, least), SIZES[name].most + 1) for name in names)):
        sizes = dict(zip(names, numbers))
        given = {
            name: rng.integers(*LIMITS.get(dtype, (-20, 20)), [sizes.get(each, each) for each in axes]).astype(NUMPY[dtype])
            for name, (dtype, axes) in inputs.items()
        }
        found.append(given | more)
    rng.shuffle(found)  # type: ignore[arg-type]
    return found


def sizes_of(*inputs: Inputs) -> dict[str, Size]:
    return {name: SIZES[name] for each in inputs for _, axes in each.values() for name in axes if isinstance(name, str)}


X: Inputs = {"x": (FLOAT, IMAGE)}
XY: Inputs = {"x": (FLOAT, IMAGE), "y": (FLOAT, IMAGE)}
WINDOW = {"begin": np.array([0, 1, 1, -4]), "end": np.array([9, 3, 3, -1])}

CASES: dict[str, tuple[Inputs, tuple[tuple[Any, ...], ...], dict[str, Any]]] = {
    "element by element": (X, (("Relu", "x", {}),), {}),
    "two inputs, half": ({"x": (HALF, IMAGE), "y": (HALF, IMAGE)}, (("Add", "x y", {}), ("Mul", "t x", {})), {}),
    "rows of pixels": (X, (("Relu", "x", {}), ("Reshape", "t to", {})), {"to": [0, 3, -1]}),
    "an input reshaped": ({"x": (WHOLE, IMAGE)}, (("Reshape", "x to", {}),), {"to": [-1]}),
    "an input transposed": ({"x": (HALF, IMAGE)}, (("Transpose", "x", {"perm": [2, 0, 3, 1]}),), {}),
    "a window": (X, (("Relu", "x", {}), ("Slice", "t begin end", {})), {}),
    "a window of an input that is also read whole": (
        X, (("Slice", "x begin end", {}), ("Add", "x x", {})), {},
    ),
    "one of two by a condition": (
        {"c": (TRUTH, IMAGE), "x": (WHOLE, IMAGE), "y": (WHOLE, IMAGE)}, (("Where", "c x y", {}),), {},
    ),
    "side by side": (XY, (("Concat", "x y", {"axis": 1}), ("Neg", "t", {})), {}),
    "rows of texts": ({"x": (WHOLE, TEXT), "y": (WHOLE, TEXT)}, (("Concat", "x y", {"axis": 0}),), {}),
    "texts": ({"x": (FLOAT, TEXT), "y": (FLOAT, TEXT)}, (("Sub", "x y", {}),), {}),
    "of other sizes": ({"x": (FLOAT, IMAGE), "y": (FLOAT, TEXT)}, (("Relu", "x", {}), ("Relu", "y", {})), {}),
}  # fmt: skip
TWO_RESULTS = ("a window of an input that is also read whole", "of other sizes")


LONG = ("two inputs, half", "a window", "side by side", "of other sizes", "rows of pixels")  # their parts are in the others


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in CASES])
@pytest.mark.mostly_long(16)
def test_all_sizes_between_the_bounds(device: Any, name: str) -> None:
    inputs, nodes, constants = CASES[name]
    made = model(inputs, *nodes, results=1 + (name in TWO_RESULTS), **constants)
    assert not all(read_graph(made, sizes_of(inputs)).program().values[each].strided for each in inputs)
    positions = WINDOW if any("begin" in given for _, given, _ in nodes) else {}
    agrees(device, made, sizes_of(inputs), *arrays(inputs, 1 if "to" in constants else 0, **positions))


@pytest.mark.long(of="networks")
def test_a_view_of_an_input_has_its_strides(device: Any) -> None:
    """Where all calls take strides, the input stays where the caller has it."""
    graph = DynamicGraph()
    x = graph.input("x", (SIZES["n"], SIZES["h"], SIZES["w"]), "float32")
    begin, end = (graph.input(name, (4,), "int64") for name in ("begin", "end"))
    view = graph.view(x, (2, 1, 3, 5), name="view")
    window = dyn_strided_slice(x=(2, 1, 3, 5), dynamic=True, dtype="float32")
    graph.output(graph.call(window, view, begin, end, graph.constant("steps", np.ones(4, np.int64))))
    positions = np.array([0, 0, 1, 1]), np.array([3, 1, 3, 4])
    with DynamicNet(graph.program(), device, artifact) as net:
        for _ in range(2):
            for n, h, w in itertools.product(range(3), range(4), range(2, 6)):
                a = np.random.default_rng(n * h * w).random((n, h, w), np.float32)
                np.testing.assert_array_equal(net(a, *positions), a[:, None, 1:3, 1:4])
        bound = net.bind(a[:1, :2].copy(), *positions)
        bound.step()
        np.testing.assert_array_equal(bound.sliced()[0], a[:1, None, 1:2, 1:4])
        bound.close()


def test_later_runs_take_other_arrays_of_the_same_sizes(device: Any) -> None:
    made = model(XY, ("Add", "x y", {}))
    with DynamicNet(read_graph(made, sizes_of(XY)).program(), device, artifact) as net:
        runs = []
        for given in arrays(XY)[:12] * 3:
            a, b = (array + len(runs) for array in given.values())
            runs.append((net(a, b), a + b))
        for found, wanted in runs:
            np.testing.assert_array_equal(found, wanted)


def test_arrays_that_are_not_contiguous_are_refused(device: Any) -> None:
    with DynamicNet(read_graph(model(X, ("Relu", "x", {})), sizes_of(X)).program(), device, artifact) as net:
        whole = np.arange(2 * 3 * 3 * 5, dtype=np.float32).reshape(2, 3, 3, 5) - 50
        for part in (whole[:, :, :2], whole[..., :3], whole[:, ::-1], whole.transpose(0, 1, 3, 2)[:, :, :3, :3]):
            with pytest.raises(ArgumentError, match="strides"):
                net(part)
            with pytest.raises(ArgumentError, match="strides"):
                net.bind(part)
            np.testing.assert_array_equal(net(part.copy()), np.maximum(part, 0))


def test_operators_that_only_count_rows_say_so() -> None:
    """Their kernels know where the first axis of x ends, and no other."""
    text: Inputs = {"x": (FLOAT, TEXT)}
    nodes = ("Relu", "x", {}), ("TopK", "t one", {"axis": 1})
    made = model(text, *nodes, one=np.array([1]))
    made.graph.node[1].output.append("places")
    message = r"node TopK 1 \(TopK\): .* takes x of fixed extents; it gets \[n, s\], some of which are known"
    with pytest.raises(UsageError, match=message):
        read_graph(made, sizes_of(text))


@pytest.mark.gpu
def test_a_gpu_takes_images_of_any_height_and_width() -> None:
    torch = pytest.importorskip("torch")
    program = read_graph(model(XY, ("Add", "x y", {}), ("Relu", "t", {})), sizes_of(XY)).program()
    with contextlib.closing(open_device(detect("cuda"))) as gpu:
        code = functools.partial(schedsearch.compile, target="cuda", allow=("default",))
        with DynamicNet(program, gpu, lambda workload: code(workload).artifact) as net:
            for given in arrays(XY)[:20]:
                x, y = (torch.from_numpy(each).cuda() for each in given.values())
                assert torch.equal(net(x, y), torch.relu(x + y))
                bound = net.bind(x, y)
                for _ in range(2):
                    bound.step()
                    assert torch.equal(bound.sliced()[0], torch.relu(x + y))
                    x += 1
                bound.close()
