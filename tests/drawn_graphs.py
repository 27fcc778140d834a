"""Graphs of ONNX nodes that are drawn at random, for tests of what is folded and fused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
ir = pytest.importorskip("onnx_ir")

from hypothesis import strategies as st  # noqa: E402
from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

Array = np.ndarray[Any, Any]
_NUMBERS = (-math.inf, -2.0, -0.5, 0.0, 0.25, 1.0, 2.0, 3.0, 6.0, math.inf)


class Graph:
    """A random chain of nodes over an image or matrix."""

    def __init__(self, draw: st.DrawFn, opset: int) -> None:
        self.draw, self.opset = draw, opset
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.rng = np.random.default_rng(draw(st.integers(0, 99)))
        self.input = draw(st.sampled_from([(1, 2, 4, 5), (2, 4, 3, 3), (2, 6), (3, 4, 5)]))
        self.shape, self.value, self.kept = self.input, "x", list[str]()

    def __repr__(self) -> str:
        return f"opset {self.opset}: {onnx.printer.to_text(self.model([*self.kept, self.value]).graph)}"

    @property
    def is_rounded(self) -> bool:
        """Whether a value is float16; a chain of element-wise nodes rounds only its result."""
        return any(each.i == TensorProto.FLOAT16 for node in self.nodes for each in node.attribute if each.name == "to")

    def pick(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def constant(self, array: Any, dtype: Any = np.float32) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def add(self, op: str, *more: str, first: bool = True, **attributes: Any) -> None:
        name = f"v{len(self.nodes)}"
        inputs = [self.value, *more] if first else [*more, self.value]
        self.nodes.append(helper.make_node(op, inputs, [name], name=f"n{len(self.nodes)}", **attributes))
        self.value = name
        self.shape = self.after().shape

    def after(self) -> Array:
        """What the nodes so far make of x."""
        with np.errstate(all="ignore"):
            return np.asarray(ReferenceEvaluator(self.model([self.value])).run(None, {"x": self.x()})[0])

    def x(self) -> Array:
        return (3 * np.random.default_rng(3).standard_normal(self.input)).astype(np.float32)

    def model(self, outputs: list[str]) -> Any:
        info = helper.make_tensor_value_info
        graph = helper.make_graph(
            self.nodes, "random", [info("x", TensorProto.FLOAT, self.input)],
            [info(name, TensorProto.FLOAT, None) for name in outputs], self.weights,
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)


def clip(graph: Graph) -> None:
    low, high = (graph.pick(None, *_NUMBERS) for _ in "lh")
    if graph.opset < 11:
        bounds = {name: each for name, each in (("min", low), ("max", high)) if each is not None}
        graph.add("Clip", **bounds)
        return
    graph.add("Clip", *("" if each is None else graph.constant(each) for each in (low, high)))


def bound(graph: Graph) -> None:
    shape = graph.pick((), (1,), (1,) * len(graph.shape), (1, *(1,) * len(graph.shape)))
    number = graph.constant(np.full(shape, graph.pick(*_NUMBERS)))
    graph.add(graph.pick("Max", "Min"), number, first=graph.pick(True, False))


def activation(graph: Graph) -> None:
    op = graph.pick("Relu", "Relu", "Relu", "LeakyRelu", "Sigmoid", "HardSigmoid", "Identity", "Neg", "Abs")
    graph.add(op, **({"alpha": graph.pick(0.0, 0.1, -0.5, 1.0)} if op == "LeakyRelu" else {}))


def arithmetic(graph: Graph) -> None:
    shape = graph.pick((), (1,), (1,) * len(graph.shape), (1,) * (len(graph.shape) + 1), graph.shape[-1:], graph.shape)
    number = graph.constant(
        np.full(shape, graph.pick(0.0, 1.0, 2.0)) + graph.pick(0, 0, 1) * graph.rng.random(shape).round(1)
    )
    op = graph.pick("Add", "Sub", "Mul", "Div", "Pow")
    graph.add(op, number, first=op in ("Div", "Pow") or graph.pick(True, False))


def pad(graph: Graph) -> None:
    rank = len(graph.shape)
    if not rank:
        return  # a single number has no axes
    pads = [graph.pick(0, 0, 1, 2) if axis > 1 else graph.pick(0, 0, 0, 1) for axis in range(rank)] * 2
    pads[-1] += graph.pick(0, 0, 1)
    mode, value = graph.pick("constant", "constant", "constant", "edge"), graph.pick(0.0, 0.0, 0.5)
    if graph.opset < 11:
        graph.add("Pad", pads=pads, value=value, mode=mode)
        return
    given = [graph.constant(pads, np.int64)]
    if mode == "constant":
        given += graph.pick([], [graph.constant(value)])
    graph.add("Pad", *given, mode=mode)


def convolution(graph: Graph) -> None:
    if len(graph.shape) != 4 or min(graph.shape[2:]) < 3:
        graph.add("Relu")
        return
    c, k, op = graph.shape[1], graph.pick(2, 4), graph.pick("Conv", "Conv", "ConvTranspose")
    groups = graph.pick(1, 2) if c % 2 == 0 and op == "Conv" else 1  # the evaluator of onnx 1.23.2 fails for other groups
    r, s = graph.pick(1, 2, 3), graph.pick(1, 3)
    shape = (k, c // groups, r, s) if op == "Conv" else (c, k // groups, r, s)
    given = [graph.constant(graph.rng.standard_normal(shape).round(1))]
    given += graph.pick([], [graph.constant(graph.rng.standard_normal(k).round(1))])
    window: dict[str, Any] = {"group": groups, "strides": graph.pick([1, 1], [2, 1], [2, 2])}
    if op == "Conv":
        window |= graph.pick(
            {}, {"pads": [1, 0, 0, 1]}, {"auto_pad": "VALID"}, {"auto_pad": "SAME_UPPER"}, {"auto_pad": "SAME_LOWER"}
        )
        window |= {} if "SAME" in window.get("auto_pad", "") else graph.pick({}, {"dilations": [1, 1]})
    graph.add(op, *given, **window)


def batch_norm(graph: Graph) -> None:
    if len(graph.shape) < 2 or graph.opset < 14:  # before it, onnx 1.23.2 takes means from x
        graph.add("Relu")
        return
    parts = [graph.constant(graph.rng.uniform(0.5, 1.5, graph.shape[1]).round(2)) for _ in range(4)]
    graph.add("BatchNormalization", *parts, epsilon=graph.pick(1e-5, 0.1))


def product(graph: Graph) -> None:
    k, n = graph.shape[-1] if graph.shape else 0, graph.pick(2, 3)
    if len(graph.shape) != 2:
        graph.add("Abs")
        return
    transposed = graph.pick(0, 1)
    weight = graph.constant(graph.rng.standard_normal((n, k) if transposed else (k, n)).round(1))
    bias = graph.constant(graph.rng.standard_normal(graph.pick((), (1,), (n,), (1, n), (graph.shape[0], 1))).round(1))
    if graph.pick(True, False) and not transposed:
        graph.add("MatMul", weight)
        return
    graph.add("Gemm", weight, bias, transB=transposed, alpha=graph.pick(1.0, 0.5), beta=graph.pick(1.0, 2.0))


def move(graph: Graph) -> None:
    rank = len(graph.shape)
    if not rank:
        graph.add("Neg")
        return
    size, kind = (
        math.prod(graph.shape),
        graph.pick("transpose", "reshape", "flatten", "unsqueeze", "squeeze", "slice", "expand"),
    )
    axis = graph.draw(st.integers(-rank, rank - 1))
    of_inputs = graph.opset >= 13
    if kind == "transpose":
        graph.add("Transpose", perm=list(graph.draw(st.permutations(range(rank)))))
    elif kind == "reshape":
        choices = [[-1], [graph.shape[0], -1], [0, -1], [1, -1, 1], list(graph.shape), [-1, size // graph.shape[0] or 1]]
        choices += [[2, size // 2]] * (size % 2 == 0) + [[1, 2, -1, 1]] * (size % 2 == 0)
        graph.add("Reshape", graph.constant(graph.pick(*choices), np.int64))
    elif kind == "flatten":
        graph.add("Flatten", axis=axis if graph.opset >= 11 else axis % rank)
    elif kind in ("unsqueeze", "squeeze"):
        axes = [axis if of_inputs else axis % rank]
        if (kind == "squeeze" and graph.shape[axis] != 1) or rank == 5:
            graph.add("Relu")
            return
        given, attributes = ([graph.constant(axes, np.int64)], {}) if of_inputs else ([], {"axes": axes})
        graph.add(kind.capitalize(), *given, **attributes)
    elif kind == "slice":
        begin, end = graph.pick(0, 0, 1, -2), graph.pick(2, 3, 1 << 62, graph.shape[axis])
        if graph.opset < 10:
            if not len(range(graph.shape[axis])[begin:end]):
                graph.add("Relu")
                return
            graph.add("Slice", starts=[begin], ends=[end], axes=[axis % rank])
            return
        step = graph.pick(1, 1, 2)
        if not len(range(graph.shape[axis])[begin:end:step]):
            graph.add("Relu")
            return
        graph.add("Slice", *(graph.constant([each], np.int64) for each in (begin, end, axis, step)))
    elif graph.opset >= 8:
        graph.add("Expand", graph.constant(graph.pick(graph.shape, (1,), (2, *(1,) * rank))[-5:], np.int64))


def conversion(graph: Graph) -> None:
    graph.add("Cast", to=graph.pick(TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE))
    graph.add("Cast", to=graph.pick(TensorProto.FLOAT, TensorProto.FLOAT16))
    graph.add("Cast", to=TensorProto.FLOAT)


def reduction(graph: Graph) -> None:
    rank = len(graph.shape)
    if not rank:
        graph.add("Abs")
        return
    op, axis = (
        graph.pick("ReduceMean", "ReduceMax", "ReduceSum", "ReduceMin", "Softmax"),
        graph.draw(st.integers(-rank, rank - 1)),
    )
    axis = axis if graph.opset >= 11 else axis % rank
    if op == "Softmax":
        if graph.opset < 13:  # of all axes from this one on; onnx's evaluator takes this axis alone
            axis = len(graph.shape) - 1
        graph.add(op, axis=axis)
        return
    by_input = graph.opset >= (13 if op == "ReduceSum" else 18)
    given, attributes = ([graph.constant([axis], np.int64)], {}) if by_input else ([], {"axes": [axis]})
    graph.add(op, *given, keepdims=graph.pick(0, 1), **attributes)


def halves(graph: Graph) -> None:
    """Both halves of the last axis, the second in front."""
    if not graph.shape or graph.shape[-1] < 2 or graph.opset < 10:
        graph.add("Relu")
        return
    extent, middle, whole = graph.shape[-1], graph.shape[-1] // 2, graph.value
    parts = []
    for begin, end in ((0, middle), (middle, extent)):
        graph.value = whole
        graph.add("Slice", *(graph.constant([each], np.int64) for each in (begin, end, -1)))
        parts.append(graph.value)
    name = f"v{len(graph.nodes)}"
    axis = -1 if graph.opset > 10 else len(graph.shape) - 1
    graph.nodes.append(helper.make_node("Concat", parts[::-1], [name], axis=axis))
    graph.value = name
    graph.shape = graph.after().shape


_STEPS: tuple[Callable[[Graph], None], ...] = (
    clip, clip, bound, activation, activation, arithmetic, pad, convolution, convolution, batch_norm, product, move, move,
    conversion, reduction, halves,
)  # fmt: skip


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    graph = Graph(draw, draw(st.sampled_from([8, 9, 10, 11, 13, 17, 18, 21])))
    for _ in range(draw(st.integers(2, 7))):
        draw(st.sampled_from(_STEPS))(graph)
        if draw(st.integers(0, 9)) == 0:
            graph.kept.append(graph.value)
    return graph
