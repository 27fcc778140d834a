"""The driver API as schedsearch uses it, on a fake driver. test_measure_gpu.py has the tests that need a device."""

from __future__ import annotations

import dataclasses
import gc
import struct
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from fake_driver import CLUSTERS_AT_ONCE, OURS, THEIRS, FakeDriver, Result

from schedsearch.device import cuda_driver, open_device
from schedsearch.device.cuda import CudaDevice
from schedsearch.device.cuda_graph import KernelGraph, capture
from schedsearch.errors import ArgumentError, DeviceError, DeviceMemoryError
from schedsearch.executable.fixed import FixedNet
from schedsearch.executable.noted import Notes
from schedsearch.executable.program import Array, Call, Origin, Place, Program, Space
from schedsearch.executable.run import Calls, Weights
from schedsearch.launch import Artifact, Grid, LaunchPlan, Pointer, Scalar, Step
from schedsearch.target import PRESETS

# An ELF file with one empty section, as far as is checked before the driver gets it (System V ABI, "ELF Header").
EMPTY_OBJECT = b"\x7fELF\2\1".ljust(40, b"\0") + struct.pack("<Q10xHHH", 64, 64, 1, 0) + bytes(64)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(cuda_driver, "bindings", lambda: fake)
    monkeypatch.setattr(cuda_driver, "libcuda", lambda: fake)
    monkeypatch.setattr(cuda_driver, "immediate", lambda: fake)
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
    assert driver.early == [2, 3, 4, 5, 5]  # a node for each of its programmatic edges; 2 is the second step of a launch


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
    with pytest.raises(DeviceMemoryError, match="cuGraphInstantiate failed: CUDA_ERROR_OUT_OF_MEMORY"):
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
