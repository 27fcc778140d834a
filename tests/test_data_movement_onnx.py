"""ONNX's own node cases of Transpose, DepthToSpace, SpaceToDepth, Slice, Concat and Pad, by their movements and on the CPU.

Cases of Pad with another mode than constant are refused by name, as there is no such parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bandwidth_support import node_cases
from conv2d_support import run_on_cpu as run
from test_data_movement import defined, moved

from schedsearch import Workload, concat, depth_to_space, pad, space_to_depth, strided_slice, transpose
from schedsearch.device.cpu import CpuDevice
from schedsearch.network.evaluate import evaluate
from schedsearch.network.lower import lower
from schedsearch.network.model import load
from schedsearch.templates.data_movement.cpu import DataMovementCpu

onnx = pytest.importorskip("onnx", reason="needs onnx")

MODULES = ("concat", "depthtospace", "pad", "slice", "spacetodepth", "transpose")
CPU = DataMovementCpu()


CASES = node_cases(*MODULES)
COMPILED = {  # the others differ in numbers only
    "test_concat_3d_axis_1", "test_constant_pad_axes", "test_depthtospace_crd_mode_example", "test_slice_neg_steps",
    "test_spacetodepth_dcr_mode_example", "test_transpose_all_permutations_4",
}  # fmt: skip
OTHER_MODES = {"test_edge_pad", "test_reflect_pad", "test_wrap_pad"}


def workload_of(case: Any, arrays: list[Any]) -> Workload:
    """The case's only node as a workload."""
    node = case.model.graph.node[0]
    given = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    x = arrays[0]
    dtype = str(x.dtype)
    inputs = [array.tolist() for array in arrays[1:]]
    if node.op_type == "Transpose":
        return transpose(x=x.shape, permutation=given.get("perm", list(range(x.ndim))[::-1]), dtype=dtype)
    if node.op_type in ("DepthToSpace", "SpaceToDepth"):
        make = depth_to_space if node.op_type == "DepthToSpace" else space_to_depth
        n, c, h, w = x.shape
        return make(n=n, c=c, h=h, w=w, block=given["blocksize"], mode=given.get("mode", b"DCR").decode(), dtype=dtype)
    if node.op_type == "Slice":
        begin, end, *rest = inputs
        return strided_slice(x=x.shape, begin=begin, end=end, **dict(zip(("axes", "strides"), rest)), dtype=dtype)
    if node.op_type == "Concat":
        return concat(x=[array.shape for array in arrays], axis=given["axis"], dtype=dtype)
    pads, value, *axes = inputs
    before, after = np.reshape(pads, (2, -1)).tolist()
    return pad(x=x.shape, before=before, after=after, value=value, axes=axes[0] if axes else (), dtype=dtype)


def array_of(value: Any) -> Any:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def test_all_operators_have_cases() -> None:
    ops = {case.model.graph.node[0].op_type.lower() for case in CASES.values()}
    assert ops == set(MODULES)
    assert set(CASES) > OTHER_MODES


@pytest.mark.parametrize("name", sorted(set(CASES) - OTHER_MODES))
@pytest.mark.mostly_long(2)
def test_a_case_of_onnx(device: CpuDevice, name: str) -> None:
    case = CASES[name]
    ((inputs, outputs),) = case.data_sets
    *arrays, expected = (array_of(each) for each in (*inputs, *outputs))
    workload = workload_of(case, arrays)
    assert workload.output.shape == expected.shape
    bits = f"u{expected.itemsize}"
    given = {
        spec.name: np.ascontiguousarray(array).view(bits).reshape(array.shape)
        for spec, array in zip(workload.signature, arrays)
    }
    wanted = np.ascontiguousarray(expected).view(bits).reshape(expected.shape)
    np.testing.assert_array_equal(moved(workload, given), wanted)
    np.testing.assert_array_equal(defined(workload, given), wanted)
    if name in COMPILED:
        space = CPU.space(workload, device.target)
        source = CPU.kernel(workload, device.target, CPU.default(workload, device.target, space))
        found = run(device, source, given, {"y": (wanted.shape, wanted.dtype)})["y"]
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("start", "stop", "step", "wanted"),
    [
        (-9, -9, -2, [0]),  # ONNX: the start is clamped to the first position when it runs backwards, and NumPy takes none
        (-9, 0, -1, []),
        (9, -9, -2, [4, 2, 0]),
        (-1, -(2**63), -1, [4, 3, 2, 1, 0]),
        (7, 2**31 - 1, 2, []),
    ],
)
def test_a_slice_takes_the_positions_that_onnx_says(start: int, stop: int, step: int, wanted: list[int]) -> None:
    pytest.importorskip("onnxscript")
    import onnx_ir

    from schedsearch.network.evaluate import evaluate
    from schedsearch.network.lower import lower
    from schedsearch.network.model import simplified

    helper = onnx.helper
    rows = {"starts": start, "ends": stop, "axes": 1, "steps": step}
    constants = [onnx.numpy_helper.from_array(np.array([number]), name) for name, number in rows.items()]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Slice", ["x", *rows], ["y"])], "net", [info("x", 1, [2, 5])], [info("y", 1, [2, len(wanted)])],
        constants,
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    x = np.arange(10, dtype=np.float32).reshape(2, 5)
    found = evaluate(lower(simplified(onnx_ir.from_proto(model), "net")), {"x": x})["y"]
    np.testing.assert_array_equal(found, x[:, wanted])


MOVED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "Transpose": ("y = Transpose (x)", lambda x: x.T),
    "Concat": ("y = Concat <axis = 0> (x, x)", lambda x: np.concatenate([x, x])),
    "Slice": ("y = Slice (x, one, end, one, two)", lambda x: x[:, 1:4:2]),
    "Pad": ("y = Pad (x, pads, number)", lambda x: np.pad(x, [(0, 0), (1, 2)], constant_values=2**53 + 1)),
}


@pytest.mark.parametrize("op", MOVED)
def test_integers_that_float64_lacks_are_moved_as_they_are(device: CpuDevice, op: str) -> None:
    line, wanted = MOVED[op]
    x = np.array([[2**53 + 1, -(2**63), 2**63 - 1, 0, 7], [-(2**53) - 1, 2**62 + 1, 1, -1, 5]])
    y = wanted(x)
    graph = onnx.parser.parse_graph(f"g (int64[2,5] x) => (int64[{y.shape[0]},{y.shape[1]}] y) {{ {line} }}")
    numbers = {"one": [1], "end": [4], "two": [2], "pads": [0, 1, 0, 2], "number": 2**53 + 1}
    given = {name: np.array(each) for name, each in numbers.items() if name in line}
    graph.initializer.extend(onnx.numpy_helper.from_array(each, name) for name, each in given.items())
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    network = lower(load(model).graph())
    np.testing.assert_array_equal(evaluate(network, {"x": x})["y"], y)
    if op == "Pad":
        (workload,) = (node.implementations[0] for node in network.nodes)
        source = CPU.kernel(
            workload, device.target, CPU.default(workload, device.target, CPU.space(workload, device.target))
        )
        np.testing.assert_array_equal(run(device, source, {"x": x}, {"y": (y.shape, y.dtype)})["y"], y)
