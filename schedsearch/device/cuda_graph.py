"""Bound kernels as one CUDA graph, whose arguments may change between launches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from schedsearch.device.cuda import CudaDevice, Graph, destroyed_on_error
from schedsearch.device.cuda_kernel import GRID_FIELDS, CudaBoundKernel


class _KernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 of the driver API."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        *GRID_FIELDS,
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class _EdgeData(ctypes.Structure):
    """CUgraphEdgeData of the driver API."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


_EARLY = _EdgeData(from_port=1, type=1)  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC


class KernelGraph:
    """A graph that launches bound kernels one after the other. Any thread may call its methods, one at a time.

    The nodes are made one by one, not captured, so that each is known: after `set_pointer` on one of the kernels, `update`
    changes its nodes. Launches that are already enqueued keep the arguments that they had.

    Attributes:
        launch: enqueues the graph on a stream.

    Raises:
        DriverError: the driver refuses a kernel.
    """

    def __init__(self, device: CudaDevice, kernels: Sequence[CudaBoundKernel]) -> None:
        self._device = device
        self._nodes: list[list[tuple[ctypes.c_void_p, _KernelNodeParams]]] = []
        with device.current():
            graph = device.create_graph()
            last: ctypes.c_void_p | None = None
            with destroyed_on_error(graph):
                for kernel in kernels:
                    nodes = []
                    for params, early in _params(kernel):
                        last = self._add(int(graph), last, params, early)
                        nodes.append((last, params))
                    self._nodes.append(nodes)
            self._graph = Graph(device, graph)
        self.launch: Callable[[int], None] = self._graph.launch

    def _add(self, graph: int, last: ctypes.c_void_p | None, params: _KernelNodeParams, early: bool) -> ctypes.c_void_p:
        node, whole, before = ctypes.c_void_p(), ctypes.c_void_p(graph), None if last is None else ctypes.byref(last)
        at_once = before if not early else None
        self._device.call_quickly(
            "cuGraphAddKernelNode_v2",
            ctypes.byref(node), whole, at_once, ctypes.c_size_t(at_once is not None), ctypes.byref(params),
        )  # fmt: skip
        if early and before is not None:
            edge = ctypes.byref(_EARLY)
            self._device.call_quickly(
                "cuGraphAddDependencies_v2", whole, before, ctypes.byref(node), edge, ctypes.c_size_t(1)
            )
        return node

    def update(self, number: int) -> None:
        """Takes over the arguments that the kernel of this number has now, for launches from here on."""
        executable = self._graph.handle
        for node, params in self._nodes[number]:
            self._device.call_quickly("cuGraphExecKernelNodeSetParams_v2", executable, node, ctypes.byref(params))

    def close(self) -> None:
        with self._device.current():
            self._graph.close()


def _params(kernel: CudaBoundKernel) -> list[tuple[_KernelNodeParams, bool]]:
    """The nodes of a kernel, and whether each may begin while the one before it still runs. They refer to its argument
    block, which must stay as long as the graph is updated."""
    nodes = []
    for config, function, parameters in kernel.launches:
        sizes = (getattr(config, name) for name, _ in GRID_FIELDS)
        params = _KernelNodeParams(function, *sizes, ctypes.addressof(parameters))
        nodes.append((params, config.attribute_count > 0))
    return nodes
