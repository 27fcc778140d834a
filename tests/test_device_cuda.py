"""The driver API as schedsearch uses it, on a fake driver. test_measure_gpu.py has the tests that need a device."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import struct
import threading
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from schedsearch.device import cuda_driver, open_device
from schedsearch.device.cuda import CudaDevice
from schedsearch.device.cuda_graph import KernelGraph, capture
from schedsearch.errors import ArgumentError, DeviceError
from schedsearch.executable.fixed import FixedNet
from schedsearch.executable.noted import Notes
from schedsearch.executable.program import Array, Call, Origin, Place, Program, Space
from schedsearch.executable.run import Calls, Weights
from schedsearch.launch import Artifact, Grid, LaunchPlan, Pointer, Scalar, Step
from schedsearch.target import PRESETS

CLUSTERS_AT_ONCE = 31  # clusters of 4 blocks; 132 multiprocessors would fit 33
OURS, THEIRS = 100, 200  # contexts
GRAPH = 300

# An ELF file with one empty section, as far as is checked before the driver gets it (System V ABI, "ELF Header").
EMPTY_OBJECT = b"\x7fELF\2\1".ljust(40, b"\0") + struct.pack("<Q10xHHH", 64, 64, 1, 0) + bytes(64)


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
        assert executable.value == GRAPH + 1
        self.nodes[node.value - 1] = self._node(params._obj)
        return 0

    def cuGraphLaunch(self, executable: Any, stream: Any) -> int:
        """The default stream is that of the current context; other streams know theirs."""
        if not stream.value and self.contexts[-1:] == [THEIRS]:
            self.wrong_streams.append("cuGraphLaunch")
        elif code := self._require_context():
            return code
        if stream.value == self.captured_stream:
            return Result.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        self.graph_launches += 1
        self.running = True
        self.launches += self.nodes
        return 0

    def cuMemcpyDtoDAsync_v2(self, destination: Any, source: Any, nbytes: Any, stream: Any) -> int:
        if not stream.value and self.contexts[-1:] == [THEIRS]:
            self.wrong_streams.append("cuMemcpyDtoDAsync_v2")
        return 0

    def cuStreamIsCapturing(self, stream: Any, status: Any) -> int:
        assert stream.value, "asking for the default stream breaks captures of other streams"
        status._obj.value = int(stream.value == self.captured_stream)
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


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(cuda_driver, "bindings", lambda: fake)
    monkeypatch.setattr(cuda_driver, "libcuda", lambda: fake)
    return fake


def pointwise(*steps: Step, **more: Any) -> Artifact:
    given = steps or (Step("kernel_0", (Pointer("x"), Pointer("y")), Grid(10), 128),)
    return Artifact(EMPTY_OBJECT, LaunchPlan("cuda", "sm_90a", given, **more))


PACKED = pointwise(
    Step("kernel_0", (Pointer("weight"), Pointer("packed")), Grid(1), 128, constant=True),
    Step("kernel_1", (Pointer("packed"), Pointer("y")), Grid(2), 128),
    workspaces={"packed": 512, "unused": 1 << 40},
)  # fmt: skip


# --- Contexts ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("before", [[], [THEIRS]], ids=["no context", "another one"])
def test_the_current_context_does_not_change(driver: FakeDriver, before: list[int]) -> None:
    driver.contexts.extend(before)
    device = open_device(PRESETS["h200"])
    address = device.allocate(64)
    device.free(address)
    device.synchronize()
    kernel = device.load(pointwise())
    kernel.bind({"x": 1, "y": 2}, {}).launch()
    with pytest.raises(DeviceError, match="OUT_OF_MEMORY"):
        device.allocate(1 << 40)
    kernel.close()
    device.close()
    assert driver.contexts == before and driver.launches == [(10, (1, 2))]


def test_a_launch_works_in_a_thread_without_a_context_and_beside_another_one(driver: FakeDriver) -> None:
    """PyTorch's autograd calls from its own threads."""
    bound = open_device(PRESETS["h200"]).load(pointwise()).bind({"x": 1, "y": 2}, {})
    left = []

    def call(*contexts: int) -> None:
        driver.contexts.extend(contexts)
        bound.launch()
        left.append(list(driver.contexts))

    for contexts in ((), (THEIRS,), (OURS,)):
        thread = threading.Thread(target=call, args=contexts)
        thread.start()
        thread.join()
    assert left == [[], [THEIRS], [OURS]] and len(driver.launches) == 3


def test_a_launch_that_fails_in_our_context_says_why(driver: FakeDriver) -> None:
    bound = open_device(PRESETS["h200"]).load(pointwise()).bind({"x": 1, "y": 2}, {})
    driver.launch_code = Result.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(DeviceError, match=r"cuLaunchKernelEx failed: CUDA_ERROR_ILLEGAL_ADDRESS \(as told\)"):
        bound.launch()
    assert driver.contexts == []


def test_the_primary_context_is_given_back_once(driver: FakeDriver) -> None:
    device = open_device(PRESETS["h200"])
    assert driver.retained == 1
    device.close()
    device.close()
    assert driver.retained == 0
    with pytest.raises(DeviceError, match="was closed; open it again"):
        device.allocate(1)


def test_a_device_that_is_no_longer_used_gives_its_context_back(driver: FakeDriver) -> None:
    device = open_device(PRESETS["h200"])
    bound = device.load(pointwise()).bind({"x": 1, "y": 2}, {})
    del device
    gc.collect()
    assert driver.retained == 1  # the bound launch needs it
    bound.launch()
    del bound
    gc.collect()
    assert driver.retained == 0


# --- Workspaces and constants ------------------------------------------------------------------------------------------
def test_workspaces_are_allocated_when_something_needs_them_and_freed_with_the_kernel(driver: FakeDriver) -> None:
    kernel = open_device(PRESETS["h200"]).load(PACKED)
    assert not driver.memory
    for _ in range(2):
        kernel.bind({"weight": 1, "y": 2}, {}).launch()
    assert list(driver.memory.values()) == [512]
    (packed,) = driver.memory
    assert driver.launches == [(1, (1, packed)), (2, (packed, 2))] * 2
    kernel.close()
    kernel.close()
    assert not driver.memory and not driver.modules


def test_a_workspace_that_is_given_is_not_allocated(driver: FakeDriver) -> None:
    kernel = open_device(PRESETS["h200"]).load(PACKED)
    kernel.bind({"weight": 1, "y": 2, "packed": 3}, {}).launch()
    prepared = kernel.prepare({"weight": 1, "packed": 4})
    kernel.bind({"y": 2}, {}, prepared).launch()
    assert driver.launches == [(1, (1, 3)), (2, (3, 2)), (1, (1, 4)), (2, (4, 2))] and not driver.memory


def test_each_prepared_set_of_constants_has_memory_of_its_own(driver: FakeDriver) -> None:
    kernel = open_device(PRESETS["h200"]).load(PACKED)
    one, other = kernel.prepare({"weight": 1}), kernel.prepare({"weight": 5})
    assert one.nbytes == other.nbytes == 512
    assert driver.launches == [(1, (1, one.addresses["packed"])), (1, (5, other.addresses["packed"]))]
    step = kernel.bind({"y": 2}, {}, other)
    del one, other
    gc.collect()
    assert len(driver.memory) == 1  # the bound launch keeps it
    del step
    gc.collect()
    assert not driver.memory


def test_the_buffers_of_a_step_must_be_given_unless_they_are_optional(driver: FakeDriver) -> None:
    device = open_device(PRESETS["h200"])
    kernel = device.load(pointwise(Step("kernel_0", (Pointer("bias", optional=True), Pointer("y")), Grid(1), 32)))
    for buffers in ({"y": 2}, {"y": 2, "bias": 3}):
        kernel.bind(buffers, {}).launch()
    assert driver.launches == [(1, (0, 2)), (1, (3, 2))]
    with pytest.raises(ArgumentError, match="no address for buffer 'y'; given: bias"):
        kernel.bind({"bias": 1}, {})
    with pytest.raises(ArgumentError, match="no address for buffer 'weight'; given: none"):
        device.load(PACKED).prepare({})
    with pytest.raises(ArgumentError, match="no value for the scalar 'slope'; given: none"):
        device.load(pointwise(Step("kernel_0", (Scalar("slope"),), Grid(1), 32))).bind({}, {})
    aligned = device.load(pointwise(alignments={"x": 16}))
    with pytest.raises(ArgumentError, match=r"x is at an address that is not a multiple of 16 bytes \(remainder 8\)"):
        aligned.bind({"x": 24, "y": 0}, {})


# --- Graphs ------------------------------------------------------------------------------------------------------------
def test_a_graph_launches_kernels_in_order_with_the_arguments_of_the_last_update(driver: FakeDriver) -> None:
    device = open_device(PRESETS["h200"])
    assert isinstance(device, CudaDevice)
    kernels = [
        device.load(PACKED).bind({"weight": 1, "y": 2, "packed": 3}, {}),
        device.load(pointwise()).bind({"x": 2, "y": 4}, {}),
    ]
    graph = KernelGraph(device, kernels)
    graph.launch(0)
    kernels[0].set_pointer("weight", 5)
    kernels[1].set_pointer("y", 6)
    graph.launch(0)
    before, driver.launches = driver.launches, []
    assert before == [(1, (1, 3)), (2, (3, 2)), (10, (2, 4))] * 2
    graph.update(0)
    graph.update(1)
    graph.launch(0)
    assert driver.launches == [(1, (5, 3)), (2, (3, 2)), (10, (2, 6))]
    graph.close()
    assert driver.contexts == []


@pytest.mark.parametrize(("target", "expected"), [("h200", [2, 4]), ("a100", [])])
def test_kernels_that_wait_themselves_may_begin_early(driver: FakeDriver, target: str, expected: list[int]) -> None:
    """Of four kernels the second and the last one are bound so; the third does not wait for its predecessors."""
    device = open_device(PRESETS[target])
    assert isinstance(device, CudaDevice)
    waiting, other = (
        device.load(pointwise(Step("kernel_0", (Pointer("x"), Pointer("y")), Grid(10), 128, early=early)))
        for early in (True, False)
    )
    chain = [waiting, waiting, other, waiting]
    kernels = [kernel.bind({"x": 2, "y": 4}, {}, early=number > 0) for number, kernel in enumerate(chain)]
    KernelGraph(device, kernels).close()
    assert driver.early == expected and sorted(driver.early + driver.after) == [2, 3, 4]
    assert driver.edges == {1: [], 2: [1], 3: [2], 4: [3]}


def test_a_graph_that_captures_a_stream_gets_the_kernels_between_its_own_nodes(driver: FakeDriver) -> None:
    """What it has captured is complete before the two kernels that wait for nothing; what comes waits for the last one and
    for one that no kernel waits for."""
    device = open_device(PRESETS["h200"])
    assert isinstance(device, CudaDevice)
    kernel = device.load(pointwise(Step("kernel_0", (Pointer("x"), Pointer("y")), Grid(10), 128, early=True)))
    kernels = [kernel.bind({"x": 2, "y": 4}, {}, early=number > 0) for number in range(4)]
    driver.captured = [71, 72]
    capture(device, 5, kernels, [(), (), (1,), (2,)])
    assert driver.edges == {1: [71, 72], 2: [71, 72], 3: [2], 4: [3]} and driver.early == [3, 4]
    assert driver.captured == [1, 4]


def test_a_kernel_that_waits_for_several_may_begin_while_any_of_them_ends(driver: FakeDriver) -> None:
    """The first kernel has two steps; the second and the third wait for it only, and the fourth for both of these."""
    device = open_device(PRESETS["h200"])
    assert isinstance(device, CudaDevice)
    step = Step("kernel_0", (Pointer("x"), Pointer("y")), Grid(10), 128, early=True)
    one, two = (device.load(pointwise(*[step] * count)) for count in (1, 2))
    kernels = [kernel.bind({"x": 2, "y": 4}, {}, early=number > 0) for number, kernel in enumerate((two, one, one, one))]
    KernelGraph(device, kernels, [(), (0,), (0,), (2, 1)]).close()
    assert driver.edges == {1: [], 2: [1], 3: [2], 4: [2], 5: [4, 3]}
    assert driver.early == [3, 4, 5, 5]  # a node for each of its programmatic edges


def test_a_step_does_not_begin_before_another_one_has_made_what_it_reads_ahead(driver: FakeDriver) -> None:
    """The first step writes a workspace. The second reads it ahead; the third reads an argument ahead."""
    device = open_device(PRESETS["h200"])
    assert isinstance(device, CudaDevice)
    x, rows, y = map(Pointer, ("x", "rows", "y"))
    steps = (
        Step("kernel_0", (x, rows), Grid(10), 128, early=True),
        Step("kernel_0", (rows, y), Grid(10), 128, early=True, ahead=("rows",)),
        Step("kernel_0", (x, y), Grid(10), 128, early=True, ahead=("x",)),
    )
    plan = LaunchPlan("cuda", "sm_90a", steps, {"rows": 256})
    kernel = device.load(Artifact(EMPTY_OBJECT, plan)).bind({"x": 2, "y": 4}, {}, early=True)
    KernelGraph(device, [kernel]).close()
    assert driver.after == [2] and driver.early == [3]


def test_a_graph_that_the_driver_refuses_leaves_nothing(driver: FakeDriver) -> None:
    device = open_device(PRESETS["h200"])
    assert isinstance(device, CudaDevice)
    kernels = [device.load(pointwise()).bind({"x": 2, "y": 4}, {})]
    driver.graph_code = Result.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DeviceError, match="cuGraphInstantiate failed: CUDA_ERROR_OUT_OF_MEMORY"):
        KernelGraph(device, kernels)
    assert not driver.graphs and driver.contexts == []
    driver.graph_code, driver.nodes = 0, []
    graph = KernelGraph(device, kernels)
    assert driver.graphs == 1
    graph.close()
    assert not driver.graphs


def test_the_default_stream_is_ours_where_another_gpu_is_current(driver: FakeDriver) -> None:
    device = open_device(PRESETS["h200"])
    assert isinstance(device, CudaDevice)
    graph = KernelGraph(device, [device.load(pointwise()).bind({"x": 2, "y": 4}, {})])
    driver.contexts.append(THEIRS)
    graph.launch(0)
    device.copy(1, 2, 3)
    assert driver.launches == [(10, (2, 4))] and not driver.wrong_streams and driver.contexts == [THEIRS]


# --- Networks ----------------------------------------------------------------------------------------------------------
def pair_of_calls() -> SimpleNamespace:
    """A network of two kernels: input -> arena -> output."""
    spaces: tuple[tuple[str, Space], ...] = (("x", "input"), ("h", "arena"), ("y", "output"))
    arrays = tuple(Array(name, "A", "A", (4,), "float32", (4,), Place(space)) for name, space in spaces)
    calls = tuple(
        Call(f"call{i}", ("n",), "", "", "code", {"x": i, "y": i + 1}, ("y",), {}, {}, Origin("exact", "", ""))
        for i in range(2)
    )
    program = Program("", "", arrays, (0,), (2,), (), calls, (), 16, 16, 0)
    return SimpleNamespace(program=program, artifacts={"code": pointwise(alignments={"x": 16})}, weights=())


def test_a_network_without_memory_for_its_values_gives_everything_back(driver: FakeDriver) -> None:
    parts = pair_of_calls()
    parts.program = dataclasses.replace(parts.program, arena_bytes=1 << 40)
    with pytest.raises(DeviceError, match="OUT_OF_MEMORY"):
        FixedNet(parts, open_device(PRESETS["h200"]))
    assert not driver.memory and not driver.modules and not driver.retained


def test_a_network_that_is_closed_waits_for_its_calls(driver: FakeDriver) -> None:
    net = FixedNet(pair_of_calls(), open_device(PRESETS["h200"]))
    net._moved([64], [96]).launch(5)
    assert driver.running and driver.modules
    net.close()
    assert not driver.modules and not driver.unloaded_while_running and not driver.memory


def test_a_network_is_one_graph_whose_arguments_follow_its_inputs(driver: FakeDriver) -> None:
    weights = Weights(pair_of_calls(), open_device(PRESETS["h200"]))
    calls = Calls(weights, 32, [64], [96], Notes(weights))
    for inputs in ([64], [64], [128]):
        calls.move(inputs, [96])
        calls.launch(5)
    assert driver.graph_launches == 3
    assert driver.launches == [(10, (64, 32)), (10, (32, 96))] * 2 + [(10, (128, 32)), (10, (32, 96))]
    with pytest.raises(ArgumentError, match="multiple of 16 bytes"):
        calls.move([129], [96])


def test_a_network_whose_stream_is_captured_launches_its_kernels(driver: FakeDriver) -> None:
    weights = Weights(pair_of_calls(), open_device(PRESETS["h200"]))
    calls = Calls(weights, 32, [64], [96], Notes(weights))
    driver.captured_stream = 5
    calls.launch(5)
    assert driver.launches == [(10, (64, 32)), (10, (32, 96))] and not driver.nodes  # nothing is instantiated either
    calls.launch(6)
    calls.move([128], [160])
    calls.launch(5)
    assert driver.launches[4:] == [(10, (128, 32)), (10, (32, 160))] and driver.graph_launches == 1
    driver.captured_stream = 0
    calls.launch(5)
    assert driver.launches[6:] == [(10, (128, 32)), (10, (32, 160))] and driver.graph_launches == 2
    calls.close()
    assert driver.contexts == []


# --- Grids -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("grid", "cluster", "blocks"),
    [
        (Grid(1000, blocks_per_sm=1), 4, 4 * CLUSTERS_AT_ONCE),  # the remaining clusters would run after all others
        (Grid(40, blocks_per_sm=1), 4, 40),
        (Grid(1000, blocks_per_sm=1), 1, 132),
        (Grid(1000), 4, 1000),
    ],
)
def test_a_persistent_grid_has_the_clusters_that_the_card_runs_at_once(
    driver: FakeDriver, grid: Grid, cluster: int, blocks: int
) -> None:
    step = Step("kernel_0", (Pointer("x"), Pointer("y")), grid, 256, 5000, cluster)
    open_device(PRESETS["h200"]).load(pointwise(step)).bind({"x": 1, "y": 2}, {}).launch()
    assert driver.launches == [(blocks, (1, 2))]
