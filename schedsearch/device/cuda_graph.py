"""Bound kernels as one CUDA graph, whose arguments may change between launches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Sequence

from schedsearch.device import cuda_driver
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


_SET_DEPENDENCIES = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES
_EARLY = _EdgeData(from_port=1, type=1)  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC


class KernelGraph:
    """A graph that launches bound kernels. Any thread may call its methods, one at a time.

    Kernels may begin while those end that they wait for, if they were bound so. They wait for all of them before they read
    anything but constants.

    The nodes are made one by one, not captured, so that each is known: after `set_pointer` on one of the kernels, `update`
    changes its nodes. Launches that are already enqueued keep the arguments that they had.

    Args:
        after: of each kernel, the numbers of those before it that it waits for; default: the one before it.

    Attributes:
        launch: enqueues the graph on a stream.
        launch_on_default_stream: as of a `Graph`.

    Raises:
        DriverError: the driver refuses a kernel.
    """

    def __init__(
        self, device: CudaDevice, kernels: Sequence[CudaBoundKernel], after: Sequence[Sequence[int]] | None = None
    ) -> None:
        self._device = device
        with device.current():
            graph = device.create_graph()
            with destroyed_on_error(graph):
                nodes, _ = _add_nodes(device, int(graph), kernels, after)
            self._graph = Graph(device, graph)
        self._set = cuda_driver.libcuda().cuGraphExecKernelNodeSetParams_v2
        self._nodes = [
            [(cuda_driver.argument(node.value or 0), ctypes.byref(params)) for node, params in some] for some in nodes
        ]
        self.launch: Callable[[int], None] = self._graph.launch
        self.launch_on_default_stream = self._graph.launch_on_default_stream

    def update(self, number: int) -> None:
        """Takes over the arguments that the kernel of this number has now, for launches from here on."""
        executable = self._graph.handle
        for node, params in self._nodes[number]:
            if self._set(executable, node, params):  # our context is not current, or this says why it fails
                self._device.call_quickly("cuGraphExecKernelNodeSetParams_v2", executable, node, params)

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


def capture(
    device: CudaDevice, stream: int, kernels: Sequence[CudaBoundKernel], after: Sequence[Sequence[int]] | None = None
) -> None:
    """Adds kernels to the graph that captures a stream, as `KernelGraph` has them: behind what it has captured so far, and
    in front of what comes.

    Raises:
        DriverError: the driver refuses a kernel, or the capture has failed.
    """
    status, number, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_size_t()
    graph, found = ctypes.c_void_p(), ctypes.POINTER(ctypes.c_void_p)()
    places, handle = map(ctypes.byref, (status, number, graph, found, count)), ctypes.c_void_p(stream)
    with device.current():
        device.call_quickly("cuStreamGetCaptureInfo_v2", handle, *places)
        before = [ctypes.c_void_p(found[each]) for each in range(count.value)]
        _, ends = _add_nodes(device, int(graph.value or 0), kernels, after, before)
        waits, how = (ctypes.c_void_p * len(ends))(*(each.value for each in ends)), ctypes.c_uint(_SET_DEPENDENCIES)
        device.call_quickly("cuStreamUpdateCaptureDependencies", handle, waits, ctypes.c_size_t(len(ends)), how)


_Nodes = list[list[tuple[ctypes.c_void_p, _KernelNodeParams]]]


def _add_nodes(
    device: CudaDevice,
    graph: int,
    kernels: Sequence[CudaBoundKernel],
    after: Sequence[Sequence[int]] | None,
    before: Sequence[ctypes.c_void_p] = (),
) -> tuple[_Nodes, list[ctypes.c_void_p]]:
    """Adds kernels to a graph, those that wait for no other one behind the nodes `before`.

    Returns:
        The nodes of each kernel, and those that no kernel waits for.
    """
    added: _Nodes = []
    ends: list[Sequence[ctypes.c_void_p]] = []  # of each kernel: its last node, or what it waits for if it has none
    awaited: set[int] = set()
    own: set[int | None] = set()
    for number, kernel in enumerate(kernels):
        waits = range(max(number - 1, 0), number) if after is None else after[number]
        awaited.update(waits)
        last: Sequence[ctypes.c_void_p] = before
        if waits:
            last = list({node.value: node for other in waits for node in ends[other]}.values())
        nodes: list[tuple[ctypes.c_void_p, _KernelNodeParams]] = []
        for params, early in _params(kernel):
            last = [_add_node(device, graph, last, params, early and _may_begin_early(last, own))]
            own.add(last[0].value)
            nodes.append((last[0], params))
        ends.append(last)
        added.append(nodes)
    return added, [node for number, some in enumerate(ends) if number not in awaited for node in some]


def _may_begin_early(before: Sequence[ctypes.c_void_p], own: Collection[int | None]) -> bool:
    """Whether a kernel may begin while the nodes that it waits for still run: `own` ones, which have waited themselves."""
    return bool(before) and all(node.value in own for node in before)


def _add_node(
    device: CudaDevice, graph: int, before: Sequence[ctypes.c_void_p], params: _KernelNodeParams, early: bool
) -> ctypes.c_void_p:
    """Args: early: the kernel begins while those before it still run."""
    node, whole, count = ctypes.c_void_p(), ctypes.c_void_p(graph), 0 if early else len(before)
    complete = (ctypes.c_void_p * count)(*(each.value for each in before)) if count else None
    device.call_quickly(
        "cuGraphAddKernelNode_v2", ctypes.byref(node), whole, complete, ctypes.c_size_t(count), ctypes.byref(params)
    )
    if early:
        edge, one = ctypes.byref(_EARLY), ctypes.c_size_t(1)
        for other in before:
            device.call_quickly("cuGraphAddDependencies_v2", whole, ctypes.byref(other), ctypes.byref(node), edge, one)
    return node
