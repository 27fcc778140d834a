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


def two_convolutions(dtype: str = "float32", channels: int = 8) -> Network:
    """x -> 3x3 with bias and x as the residual -> t -> the same with other weights and t as the residual -> y.

    The kernels take NHWC, so that x and y are converted. The weights are small integers, which every format holds.
    """
    rng = np.random.default_rng(1)
    shape = (1, channels, 6, 6)
    workload = schedsearch.conv2d(
        n=1, h=6, w=6, c=channels, k=channels, r=3, s=3, padding=1, dtype=dtype, epilogue=("bias", "residual", "relu")
    )
    constants = {}
    for number in "12":
        for name, axes, extents in (("w", "OIHW", (channels, channels, 3, 3)), ("b", "K", (channels,))):
            array = rng.integers(-1, 2, extents).astype(np.float32)
            constants[name + number] = Constant(name + number, axes, array)

    def node(number: str, x: str, y: str) -> Node:
        arguments = {"x": x, "weight": "w" + number, "bias": "b" + number, "residual": x}
        return Node("conv" + number, ("conv" + number, "add" + number), arguments, {"y": y}, (workload,))

    return Network(
        inputs=("x",),
        outputs=("y",),
        values={name: Value(name, "NCHW", shape, dtype) for name in "xty"},
        constants=constants,
        nodes=(node("1", "x", "t"), node("2", "t", "y")),
    )


def truth(network: Network, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Every value of a network of convolutions in NHWC and views, in the model's order of axes, float64."""
    known = {name: np.asarray(array, np.float64) for name, array in inputs.items()}
    for node in network.nodes:
        if isinstance(node, View):
            known[node.y] = known[node.x].reshape(network.values[node.y].shape)
            continue
        workload, arguments = node.implementations[0], {}
        for spec in workload.signature:
            name = node.arguments[spec.name]
            axes = network.values[name].axes if name in known else network.constants[name].axes
            array = known[name] if name in known else network.constants[name].array
            arguments[spec.name] = array.transpose([axes.index(axis) for axis in spec.axes])
        (result,) = node.outputs.values()
        known[result] = numpy_conv2d(workload, arguments, node.scalars).transpose(["NHWC".index(axis) for axis in "NCHW"])
    return known


def build(network: Network, target: schedsearch.Target, db: Any = "no.db") -> Executable:
    """The first plan with the kernels of a database, or with default ones."""
    plan = first_plan(network)
    workloads = [*plan.implementations.values(), *(step.workload for step in plan.conversions)]
    kernels = find_kernels(workloads, db, target)
    return assemble(network, plan, kernels.__getitem__, target=target.key, model="small.onnx")
