"""The layers of a network as tasks for tuning.

A layer is a kernel call of the network that `lower` makes: a node, such as a convolution, with the nodes behind it that its
epilogue computes. What is tuned is therefore precisely what a network looks up when it is built.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from schedsearch.network.graph import Node
from schedsearch.network.lower import lowering
from schedsearch.task import Task
from schedsearch.workload import Workload

if TYPE_CHECKING:
    import onnx_ir as ir

LAYOUT = "NHWC"


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        workloads: what it computes, once for each layout that was asked for and that can hold it.
        nodes: names of the nodes that it stands for, in order.
    """

    workloads: tuple[Workload, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Extraction:
    """What `extract` found.

    Attributes:
        layers: in the order of the graph.
        others: operator of ONNX -> names of its nodes that no layer stands for, without those that compute nothing.
        reasons: operator of ONNX -> why the first of its `others` is not a layer, although others of its kind may be.
    """

    layers: tuple[Layer, ...]
    others: Mapping[str, tuple[str, ...]]
    reasons: Mapping[str, str] = field(default_factory=dict)

    def tasks(self) -> tuple[Task, ...]:
        """Every distinct workload once, named after its first node, with the number of layers that have it as its weight.

        A node that stands for several gives each its name with a number: names of a workload file differ.
        """
        counts: dict[Workload, int] = {}
        names: dict[Workload, str] = {}
        taken: set[str] = set()
        for layer in self.layers:
            for workload in layer.workloads:
                counts[workload] = counts.get(workload, 0) + 1
                several = f" {workload.params.get('layout')}" if len(layer.workloads) > 1 else ""
                if workload in names:
                    continue
                name = f"{layer.nodes[0]}{several}"
                numbered = (f"{name} ({number})" for number in itertools.count(2))
                names[workload] = next(each for each in itertools.chain([name], numbered) if each not in taken)
                taken.add(names[workload])
        return tuple(Task(workload, weight=count, name=names[workload]) for workload, count in counts.items())


def extract(model: ir.Model, *, dtype: str | None = None, layouts: Sequence[str] = (LAYOUT,)) -> Extraction:
    """The layers of a graph.

    Args:
        model: from `read_model`.
        dtype: float16, bfloat16 or float32, in place of the dtype of layers in floating point; default: the graph's own.
        layouts: of images, e.g. NHWC, NCHW or NCHW32c. Weights have the layout that belongs to it.

    Raises:
        ModelError: the shape of a layer is not known, its input and weight do not fit one another, or none of the layouts
            can hold it.
    """
    found = lowering(model, dtype=dtype, layouts=layouts, mixed=False)
    layers = tuple(Layer(node.implementations, node.sources) for node in found.network.nodes if isinstance(node, Node))
    return Extraction(layers, found.others, found.reasons)
