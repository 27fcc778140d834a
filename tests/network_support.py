"""Small networks for the tests of executables, and what they compute by NumPy in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from conv2d_numpy import numpy_conv2d

import schedsearch
from schedsearch.executable.assemble import Executable, assemble
from schedsearch.executable.kernels import find_kernels
from schedsearch.network.graph import Constant, Network, Node, Value, View
from schedsearch.network.plan import first_plan

Array = np.ndarray[Any, Any]


def convolution(c: int, k: int, kernel: int, *stages: str, dtype: str = "float32", size: int = 6) -> schedsearch.Workload:
    return schedsearch.conv2d(
        n=1, h=size, w=size, c=c, k=k, r=kernel, s=kernel, padding=kernel // 2, dtype=dtype, epilogue=stages
    )


def two_convolutions(dtype: str = "float32") -> Network:
    """x -> 3x3 with bias and relu -> 1x1 with x as the residual -> y. All in NHWC, so that x and y are converted.

    The weights are small integers, which every format holds."""
    rng = np.random.default_rng(1)
    first = convolution(8, 16, 3, "bias", "relu", dtype=dtype)
    second = convolution(16, 8, 1, "residual", dtype=dtype)
    shape, middle = (1, 8, 6, 6), (1, 16, 6, 6)

    def constant(name: str, axes: str, *extents: int) -> Constant:
        return Constant(name, axes, rng.integers(-2, 3, extents).astype(np.float32))

    return Network(
        inputs=("x",),
        outputs=("y",),
        values={name: Value(name, "NCHW", each, dtype) for name, each in (("x", shape), ("t", middle), ("y", shape))},
        constants={
            each.name: each
            for each in (
                constant("w1", "OIHW", 16, 8, 3, 3), constant("b1", "K", 16), constant("w2", "OIHW", 8, 16, 1, 1)
            )
        },  # fmt: skip
        nodes=(
            Node("conv1", ("conv1", "relu1"), {"x": "x", "weight": "w1", "bias": "b1"}, {"y": "t"}, (first,)),
            Node("conv2", ("conv2", "add"), {"x": "t", "weight": "w2", "residual": "x"}, {"y": "y"}, (second,)),
        ),
    )


def truth(network: Network, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Every value of a network of convolutions in NHWC and views, in the model's order of axes, float64."""
    known = {name: np.asarray(array, np.float64) for name, array in inputs.items()}
    for node in network.nodes:
        if isinstance(node, View):
            known[node.y] = known[node.x].reshape(network.values[node.y].shape)
            continue
        way = node.ways[0]
        arguments = {}
        for name, spec in node.layouts(way):
            array = known[name] if name in known else network.constants[name].array if name in network.constants else None
            if array is not None:
                axes = network.values[name].axes if name in network.values else network.constants[name].axes
                arguments[_argument(node, name)] = array.transpose([axes.index(axis) for axis in spec.axes])
        (result,) = node.outputs.values()
        known[result] = numpy_conv2d(way, arguments, node.scalars).transpose(["NHWC".index(axis) for axis in "NCHW"])
    return known


def _argument(node: Node, name: str) -> str:
    return next(argument for argument, given in node.arguments.items() if given == name)


def build(network: Network, db: Any, target: schedsearch.Target) -> Executable:
    """The first plan with the kernels of a database, or with default ones."""
    plan = first_plan(network)
    workloads = [*plan.ways.values(), *(step.workload for step in plan.conversions)]
    kernels = find_kernels(workloads, db, target)
    return assemble(network, plan, kernels.__getitem__, target=target.key, model="small.onnx")
