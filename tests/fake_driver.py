"""A driver API that takes notes instead of driving a GPU."""

from __future__ import annotations

import ctypes
import threading
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

CLUSTERS_AT_ONCE = 31  # clusters of 4 blocks; 132 multiprocessors would fit 33
OURS, THEIRS = 100, 200  # contexts
GRAPH = 300

_same = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda value: value)


def number(argument: Any) -> int:
    """The handle that the driver gets by an argument of ctypes, whether it was converted before the call or is in it."""
    return int(_same(argument) or 0)


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900


class FakeDriver:
    """The calls of the driver that `schedsearch.device` makes, with a stack of contexts in each thread.

    Attributes:
        memory: address -> bytes of the allocations.
        retained: how often the primary context is retained.
        launches: (blocks, parameters as 64-bit words) of every launch that was accepted.
        launch_code: the return value of a launch in our context.
        nodes: (blocks, parameters) of the kernel nodes of the graph, in order.
        after, early: numbers of the nodes, from 1, that begin when the one in front of them has ended, and of those that
            may begin before.
        captured_stream: handle of the stream that is captured; 0: none.
        running: whether something was launched and not waited for.
        unloaded_while_running: how many modules were.
        graphs: how many graphs there are.
        graph_code: the return value of making an executable graph in our context.
        graph_launches: how many launches of graphs were accepted.
        wrong_streams: calls that went to the default stream of another context.
    """

    CUresult = Result
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    PARAMETERS = 2  # the same for every kernel

    def __init__(self) -> None:
        self._threads = threading.local()
        self.memory: dict[int, int] = {}
        self.retained = 0
        self.modules: set[int] = set()
        self.launches: list[tuple[int, tuple[int, ...]]] = []
        self.launch_code = 0
        self.nodes: list[tuple[int, tuple[int, ...]]] = []
        self.after: list[int] = []
        self.early: list[int] = []
        self.edges: dict[int, list[int]] = {}
        self.captured_stream = 0
        self.captured: list[int] = []
        self.running = False
        self.unloaded_while_running = 0
        self.graphs = 0
        self.graph_code = 0
        self.graph_launches = 0
        self.wrong_streams: list[str] = []
        self._next = 0x1000
        self.cuLaunchKernelEx, self.cuTensorMapReplaceAddress = self._launch, None
        self.cuOccupancyMaxActiveClusters = self._occupancy

    @property
    def contexts(self) -> list[int]:
        if not hasattr(self._threads, "contexts"):
            self._threads.contexts = []
        return self._threads.contexts

    def _require_context(self) -> Result:
        return Result.CUDA_SUCCESS if self.contexts[-1:] == [OURS] else Result.CUDA_ERROR_INVALID_CONTEXT

    def cuGetErrorName(self, code: Result) -> tuple[Result, bytes]:
        return Result.CUDA_SUCCESS, code.name.encode()

    def cuGetErrorString(self, code: Result) -> tuple[Result, bytes]:
        return Result.CUDA_SUCCESS, b"as told"

    def cuDeviceGet(self, ordinal: int) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, ordinal

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Result, int]:
        self.retained += 1
        return Result.CUDA_SUCCESS, OURS

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[Result]:
        self.retained -= 1
        return (Result.CUDA_SUCCESS,)

    def cuCtxPushCurrent(self, context: int) -> tuple[Result]:
        self.contexts.append(context)
        return (Result.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, self.contexts.pop()

    def cuCtxSetCurrent(self, context: int) -> tuple[Result]:
        self.contexts[-1:] = [context]
        return (Result.CUDA_SUCCESS,)

    def cuMemAlloc(self, nbytes: int) -> tuple[Result, int]:
        if code := self._require_context():
            return code, 0
        if nbytes > 1 << 30:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, 0
        self._next += 1 << 20
        self.memory[self._next] = nbytes
        return Result.CUDA_SUCCESS, self._next

    def cuMemFree(self, address: int) -> tuple[Result]:
        del self.memory[address]
        return (self._require_context(),)

    def cuCtxSynchronize(self) -> tuple[Result]:
        self.running = False
        return (self._require_context(),)

    def cuModuleLoadData(self, code: bytes) -> tuple[Result, int]:
        self.modules.add(len(self.modules))
        return self._require_context(), len(self.modules) - 1

    def cuModuleUnload(self, loaded: int) -> tuple[Result]:
        self.modules.remove(loaded)
        self.unloaded_while_running += self.running
        return (self._require_context(),)

    def cuModuleGetFunction(self, loaded: int, name: bytes) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, 7

    def cuFuncSetAttribute(self, function: int, attribute: int, value: int) -> tuple[Result]:
        return (self._require_context(),)

    def cuGraphCreate(self, flags: int) -> tuple[Result, int]:
        self.graphs += 1
        return self._require_context(), GRAPH

    def cuGraphInstantiate(self, graph: int, flags: int) -> tuple[Result, int]:
        return self._require_context() or Result(self.graph_code), GRAPH + 1

    def cuGraphExecDestroy(self, executable: int) -> tuple[Result]:
        return (self._require_context(),)

    def cuGraphDestroy(self, graph: int) -> tuple[Result]:
        self.graphs -= 1
        return (self._require_context(),)

    # The calls below go through ctypes: they return a plain number and take references.
    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.contexts[-1] if self.contexts else None
        return Result.CUDA_SUCCESS

    def cuGraphAddKernelNode_v2(self, node: Any, graph: Any, last: Any, count: Any, params: Any) -> int:
        assert graph.value == GRAPH
        self.nodes.append(self._node(params._obj))
        node._obj.value = len(self.nodes)
        self.edges[len(self.nodes)] = [] if last is None else last[: count.value]
        self.after += [len(self.nodes)] if last is not None else []
        return self._require_context()

    def cuGraphAddDependencies_v2(self, graph: Any, last: Any, node: Any, edge: Any, count: Any) -> int:
        assert graph.value == GRAPH and count.value == 1 and node._obj.value == len(self.nodes)
        self.edges[node._obj.value] += [last._obj.value]
        assert bytes(edge._obj) == bytes([1, 0, 1, 0, 0, 0, 0, 0])  # from the programmatic port, of the programmatic type
        self.early.append(node._obj.value)
        return self._require_context()

    def cuStreamGetCaptureInfo_v2(self, stream: Any, status: Any, number: Any, graph: Any, nodes: Any, count: Any) -> int:
        status._obj.value, graph._obj.value, count._obj.value = 1, GRAPH, len(self.captured)
        self._kept = (ctypes.c_void_p * len(self.captured))(*self.captured)
        nodes._obj.contents = ctypes.c_void_p.from_buffer(self._kept)
        return self._require_context()

    def cuStreamUpdateCaptureDependencies(self, stream: Any, nodes: Any, count: Any, flags: Any) -> int:
        assert flags.value == 1 and count.value == len(nodes)
        self.captured = list(nodes)
        return self._require_context()

    def cuGraphExecKernelNodeSetParams_v2(self, executable: Any, node: Any, params: Any) -> int:
        if code := self._require_context():
            return code
        assert number(executable) == GRAPH + 1
        self.nodes[number(node) - 1] = self._node(params._obj)
        return 0

    def cuGraphLaunch(self, executable: Any, stream: Any) -> int:
        """The default stream is that of the current context; other streams know theirs."""
        if not number(stream) and self.contexts[-1:] == [THEIRS]:
            self.wrong_streams.append("cuGraphLaunch")
        elif code := self._require_context():
            return code
        if number(stream) == self.captured_stream != 0:
            return Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        self.graph_launches += 1
        self.running = True
        self.launches += self.nodes
        return 0

    def cuMemcpyDtoDAsync_v2(self, destination: Any, source: Any, nbytes: Any, stream: Any) -> int:
        if not number(stream) and self.contexts[-1:] == [THEIRS]:
            self.wrong_streams.append("cuMemcpyDtoDAsync_v2")
        return 0

    def cuStreamIsCapturing(self, stream: Any, status: Any) -> int:
        assert number(stream), "asking for the default stream breaks captures of other streams"
        status._obj.value = int(number(stream) == self.captured_stream != 0)
        return self._require_context()

    def _node(self, params: Any) -> tuple[int, tuple[int, ...]]:
        assert params.function == 7 and params.block_x == 128
        pointers = (ctypes.c_void_p * self.PARAMETERS).from_address(params.parameters)
        return params.grid_x, tuple(ctypes.c_uint64.from_address(address).value for address in pointers)

    def _launch(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        code = self._require_context() or self.launch_code
        if not code:
            words = tuple(ctypes.c_uint64.from_address(address).value for address in parameters._obj[: self.PARAMETERS])
            self.launches.append((config._obj.grid_x, words))
        return code

    def _occupancy(self, clusters: Any, function: Any, config: Any) -> int:
        assert (function.value, config._obj.block_x, config._obj.shared_bytes) == (7, 256, 5000)
        clusters._obj.value = CLUSTERS_AT_ONCE
        return self._require_context()
