"""Kernels that begin before the one in front of them ends compute what they compute one after another.

See docs/decisions/230-kernels-begin-early.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

cuda = pytest.importorskip("numba.cuda")
pytest.importorskip("numba_cuda")
from numba import types  # noqa: E402

from schedsearch import conv2d, depthwise_conv2d  # noqa: E402
from schedsearch.backend import compile_source  # noqa: E402
from schedsearch.backend.cuda import ptx_of  # noqa: E402
from schedsearch.backend.elf import machine_code  # noqa: E402
from schedsearch.backend.ops import device_op, wait_for_predecessor  # noqa: E402
from schedsearch.device import open_device  # noqa: E402
from schedsearch.device.cuda_kernel import early_steps  # noqa: E402
from schedsearch.device.detect import detect  # noqa: E402
from schedsearch.errors import PlanError  # noqa: E402
from schedsearch.executable.assemble import assemble  # noqa: E402
from schedsearch.executable.branches import Access, Work, ordered  # noqa: E402
from schedsearch.executable.program import ChosenKernel, Origin  # noqa: E402
from schedsearch.executable.run import Weights  # noqa: E402
from schedsearch.launch import Artifact, Grid, Int32, LaunchPlan, Pointer, Step  # noqa: E402
from schedsearch.network.graph import Constant, Network, Node, Value  # noqa: E402
from schedsearch.network.plan import first_plan  # noqa: E402
from schedsearch.target import PRESETS  # noqa: E402
from schedsearch.template import KernelSource, KernelStep, load_template  # noqa: E402
from schedsearch.workload import Workload  # noqa: E402

NODES, THREADS = 40, 128
ADDRESS = {"address": "u64"}
LOADS = {
    name: device_op(name, f"ld.global{name}.u32 $value, [$address];", ins=ADDRESS, outs={"value": "u32"})
    for name in ("", ".nc")
}
store = device_op("store", "st.global.u32 [$address], $value;", ins={**ADDRESS, "value": "u32"})
wait_ns = device_op(
    "wait_ns",
    "{ .reg .pred p; .reg .u64 begin, now; mov.u64 begin, %globaltimer; again: mov.u64 now, %globaltimer; "
    "sub.u64 now, now, begin; setp.lt.u64 p, now, $ns; @p bra again; }",
    ins={"ns": "u64"},
)


def link(number: int, blocks: int, load: Any, ahead: bool = False) -> KernelSource:
    """y[i] = 3 * x[j] + w[i] for a j of another block. Blocks of some kernels are slow, each for a time of its own.

    Args:
        ahead: w is read before the wait, and blocks are slow before and after it.
    """
    count, slow = blocks * THREADS, 400 * number
    read = LOADS[""]

    def begin(w, i):  # type: ignore[no-untyped-def]
        return read(w + types.uint64(i) * types.uint64(4))

    def begin_ahead(w, i):  # type: ignore[no-untyped-def]
        wait_ns(types.uint64(slow) * types.uint64(types.uint32(cuda.blockIdx.x * 5) % types.uint32(3)))
        own = read(w + types.uint64(i) * types.uint64(4))
        wait_for_predecessor()
        return own

    first = begin_ahead if ahead else begin

    def kernel(x, w, y, n):  # type: ignore[no-untyped-def]
        i = types.uint32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        own = first(w, i)
        wait_ns(types.uint64(slow) * types.uint64(types.uint32(cuda.blockIdx.x * 7) % types.uint32(11)))
        j = (i * types.uint32(37) + types.uint32(13)) % types.uint32(n)
        value = load(x + types.uint64(j) * types.uint64(4))
        store(y + types.uint64(i) * types.uint64(4), value * types.uint32(3) + own)

    params = (Pointer("x"), Pointer("w"), Pointer("y"), Int32(count))
    step = KernelStep(kernel, params, Grid(blocks), THREADS, ahead=("w",) if ahead else ())
    return KernelSource("cuda", "native", (step,))


def chained(x: np.ndarray[Any, Any], w: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    i = np.arange(x.size, dtype=np.uint32)
    for _ in range(NODES):
        x = np.uint32(3) * x[(i * np.uint32(37) + np.uint32(13)) % np.uint32(x.size)] + w
    return x


def test_a_kernel_waits_before_its_first_load() -> None:
    (text,) = ptx_of(link(0, 2, LOADS[""]), PRESETS["h200"])
    assert text.index("griddepcontrol.wait") < re.search(r"\b(ld|st)\.global", text).start()  # type: ignore[union-attr]
    assert text.count("griddepcontrol.launch_dependents") == 1
    artifact = compile_source(link(0, 2, LOADS[""]), PRESETS["h200"]).artifact
    assert all(step.early for step in artifact.plan.steps)


def test_cards_without_the_instruction_get_code_without_it() -> None:
    (text,) = ptx_of(link(0, 2, LOADS[""]), PRESETS["a100"])
    artifact = compile_source(link(0, 2, LOADS[""]), PRESETS["a100"]).artifact
    assert "griddepcontrol" not in text and not any(step.early for step in artifact.plan.steps)


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [False, True], ids=["wait first", "read ahead"])
@pytest.mark.parametrize("cached", ["", ".nc"])
@pytest.mark.parametrize(("blocks", "buffers"), [(16, 2), (16, 3), (132, 3), (600, 2), (600, 4)])
def test_a_chain_of_slow_kernels_is_exact(blocks: int, buffers: int, cached: str, ahead: bool) -> None:
    """Few buffers in turn: a kernel overwrites what an earlier one read, and reads what an earlier one wrote."""
    from schedsearch.device.cuda_graph import KernelGraph

    count, target = blocks * THREADS, detect("cuda")
    device = open_device(target)
    try:
        memory = [device.allocate(4 * count) for _ in range(buffers)]
        w, kept = device.allocate(4 * count), np.arange(count, dtype=np.uint32)
        device.copy_in(w, memoryview(kept).cast("B"))
        sources = [link(number, blocks, LOADS[cached], ahead and number != 2) for number in range(5)]
        kernels = [device.load(compile_source(source, target).artifact) for source in sources]
        bound = [
            kernels[n * 7 % 5].bind({"x": memory[n % buffers], "w": w, "y": memory[(n + 1) % buffers]}, {}, early=n > 0)
            for n in range(NODES)
        ]
        graph = KernelGraph(device, bound)  # type: ignore[arg-type]
        rng = np.random.default_rng(blocks + buffers)
        got = np.empty(count, np.uint32)
        for turn in range(200):
            x = rng.integers(0, 1 << 32, count, np.uint32)
            device.copy_in(memory[0], memoryview(x).cast("B"))
            if turn % 2:
                graph.launch(0)
            else:
                for each in bound:
                    each.launch(0)
            device.synchronize()
            device.copy_out(memoryview(got).cast("B"), memory[NODES % buffers])
            assert np.array_equal(got, chained(x, kept)), f"turn {turn}"
        graph.close()
    finally:
        device.close()


def captured_by_torch(device: Any, bound: Any, after: Any) -> Any:
    """A graph of PyTorch with the kernels, or None without PyTorch."""
    try:
        import torch
    except ImportError:
        return None
    from schedsearch.device.cuda_graph import capture

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        capture(device, torch.cuda.current_stream().cuda_stream, bound, after)
    return graph


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [False, True], ids=["wait first", "read ahead"])
@pytest.mark.parametrize(("blocks", "buffers"), [(16, 3), (16, 6), (60, 5)])
def test_branches_of_slow_kernels_are_exact(blocks: int, buffers: int, ahead: bool) -> None:
    """Kernels read and write buffers at random. Those that do not need one another run side by side."""
    from schedsearch.device.cuda_graph import KernelGraph

    count, target, rng = blocks * THREADS, detect("cuda"), np.random.default_rng(blocks + buffers)
    moves = [rng.permutation(buffers)[:2].tolist() for _ in range(NODES)]  # the buffers that each reads and writes
    calls = [Work((Access(x, 0, 1, False), Access(y, 0, 1, True)), blocks) for x, y in moves]
    after = ordered(calls, target.sms).after
    assert any(len(each) > 1 for each in after)
    device = open_device(target)
    try:
        memory = [device.allocate(4 * count) for _ in range(buffers)]
        w, kept = device.allocate(4 * count), np.arange(count, dtype=np.uint32)
        device.copy_in(w, memoryview(kept).cast("B"))
        sources = [link(number, blocks, LOADS[""], ahead and number != 2) for number in range(5)]
        kernels = [device.load(compile_source(source, target).artifact) for source in sources]
        bound = [
            kernels[n * 7 % 5].bind({"x": memory[x], "w": w, "y": memory[y]}, {}, early=n > 0)
            for n, (x, y) in enumerate(moves)
        ]
        graph = KernelGraph(device, bound, after)  # type: ignore[arg-type]
        captured = captured_by_torch(device, bound, after)
        got, i = np.empty(count, np.uint32), np.arange(count, dtype=np.uint32)
        for turn in range(200):
            state = [rng.integers(0, 1 << 32, count, np.uint32) for _ in range(buffers)]
            for address, numbers in zip(memory, state):
                device.copy_in(address, memoryview(numbers).cast("B"))
            if turn % 2 and captured is not None:
                captured.replay()
            else:
                graph.launch(0)
            device.synchronize()
            for x, y in moves:
                state[y] = np.uint32(3) * state[x][(i * np.uint32(37) + np.uint32(13)) % np.uint32(count)] + kept
            for number, (address, numbers) in enumerate(zip(memory, state)):
                device.copy_out(memoryview(got).cast("B"), address)
                assert np.array_equal(got, numbers), f"turn {turn}, buffer {number}"
        graph.close()
    finally:
        device.close()


# --- Constants that are read before the wait -----------------------------------------------------------------------------


def reading_ahead() -> KernelSource:
    """y[i] = 3 * weight[i] + x[i], with the weight read before the wait."""
    load = LOADS[""]

    def kernel(x, weight, y):  # type: ignore[no-untyped-def]
        i = types.uint64(types.uint32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x))
        own = load(weight + i * types.uint64(4))
        wait_for_predecessor()
        store(y + i * types.uint64(4), own * types.uint32(3) + load(x + i * types.uint64(4)))

    params = (Pointer("x"), Pointer("weight"), Pointer("y"))
    return KernelSource("cuda", "native", (KernelStep(kernel, params, Grid(2), THREADS, ahead=("weight",)),))


def test_a_kernel_may_place_the_wait_behind_its_constants() -> None:
    (text,) = ptx_of(reading_ahead(), PRESETS["h200"])
    wait = text.index("griddepcontrol.wait")
    assert len(re.findall(r"\bld\.global", text[:wait])) == 1 and not re.search(r"\bst\.global", text[:wait])
    assert text.count("griddepcontrol.wait") == text.count("griddepcontrol.launch_dependents") == 1
    assert compile_source(reading_ahead(), PRESETS["h200"]).artifact.plan.steps[0].ahead == ("weight",)


# ACQBULK, LDG, and SYNCS.PHASECHK of sm_90, as nvdisasm names them
WAIT_OPCODE, LOAD_OPCODE, BARRIER_OPCODE = 0x82E, 0x981, 0x5A7


@pytest.mark.parametrize("name", ["depthwise_conv2d_cuda", "conv2d_few_outputs"])
@pytest.mark.mostly_long(2)
def test_the_assembler_leaves_the_loads_of_constants_in_front_of_the_wait(name: str) -> None:
    """It moves the wait up over loads by ld.global.nc, which it takes for loads of what nothing writes."""
    channels = dict(c=576) if name.startswith("depthwise") else dict(c=16, k=8)
    make = depthwise_conv2d if name.startswith("depthwise") else conv2d
    workload = make(n=1, h=14, w=14, r=3, s=3, padding=1, epilogue=("bias",), **channels)
    template, target = load_template(name), PRESETS["h200"]
    config = template.default(workload, target, template.space(workload, target))
    artifact = compile_source(template.kernel(workload, target, config), target).artifact
    (code,) = machine_code(artifact.code).values()
    opcodes = [int.from_bytes(code[at : at + 8], "little") & 0xFFF for at in range(0, len(code), 16)]
    taps = 9
    assert opcodes[: opcodes.index(WAIT_OPCODE)].count(LOAD_OPCODE) >= taps
    assert artifact.plan.steps[0].ahead[0] == "weight"


@pytest.mark.parametrize(
    "options",
    [
        {"epilogue": ("bias", "residual", "relu")},
        {
            "dtype": "uint8",
            "weight_dtype": "int8",
            "epilogue": ("bias", {"requantise_add": {"to": "uint8", "residual": "uint8"}}),
        },
    ],
    ids=["float16", "uint8"],
)
@pytest.mark.mostly_long(2)
def test_the_assembler_leaves_the_loads_of_a_residual_in_front_of_the_first_tile(options: dict[str, Any]) -> None:
    """It moves loads by ld.global.nc down to where their values are needed; then nothing hides their latency."""
    workload = conv2d(n=1, h=14, w=14, c=256, k=1024, r=1, s=1, **options)
    template, target = load_template("conv2d_wgmma"), PRESETS["h200"]
    config = template.default(workload, target, template.space(workload, target))
    artifact = compile_source(template.kernel(workload, target, config), target).artifact
    (code,) = machine_code(artifact.code).values()
    opcodes = [int.from_bytes(code[at : at + 8], "little") & 0xFFF for at in range(0, len(code), 16)]
    behind = opcodes[opcodes.index(WAIT_OPCODE) :]
    words = config["bn"] // (8 if options["epilogue"][1] == "residual" else 16) * 2  # of a thread: 4 bytes of two rows
    assert behind[: behind.index(BARRIER_OPCODE)].count(LOAD_OPCODE) == words


def test_blocks_that_are_slow_for_a_test_idle_on_both_sides_of_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_SLOW_BLOCKS", "3000")
    (text,) = ptx_of(reading_ahead(), PRESETS["h200"])
    before, behind = text.split("griddepcontrol.wait")
    assert all(part.count(", 3000;") == part.count("%globaltimer") // 2 == 1 for part in (before, behind))
    assert compile_source(reading_ahead(), PRESETS["h200"]).artifact.plan.steps[0].early


def test_cards_without_the_instruction_read_nothing_ahead() -> None:
    (text,) = ptx_of(reading_ahead(), PRESETS["a100"])
    step = compile_source(reading_ahead(), PRESETS["a100"]).artifact.plan.steps[0]
    assert "griddepcontrol" not in text and not step.early and not step.ahead


def test_a_plan_reads_only_its_own_buffers_ahead() -> None:
    step = Step("kernel_0", (Pointer("x"),), Grid(1), 128, early=True, ahead=("weight",))
    with pytest.raises(PlanError, match="it reads weight ahead, which is none of its buffers"):
        LaunchPlan("cuda", "sm_90a", (step,)).check()


def test_further_steps_of_a_launch_begin_early_in_any_case() -> None:
    """What is in front of the first step is not known. A step that reads ahead what another one makes waits for its end."""
    x, w, packed, sums, y = map(Pointer, ("x", "w", "packed", "sums", "y"))
    steps = (
        Step("pack", (w, packed), Grid(1), 1, early=True, ahead=("w",)),
        Step("parts", (x, packed, sums), Grid(1), 1, early=True, ahead=("packed",)),
        Step("sum", (sums, y), Grid(1), 1, early=True),
        Step("old", (y, y), Grid(1), 1),
    )
    plan = LaunchPlan("cuda", "sm_90a", steps, {"packed": 4, "sums": 4})
    assert early_steps(plan, (0, 1, 2, 3), early=False) == [False, False, True, False]
    assert early_steps(plan, (0, 1, 2, 3), early=True) == [True, False, True, False]
    assert early_steps(plan, (1, 2), early=False) == [False, True]
    assert early_steps(plan, (1, 2), early=True) == [True, True]  # packed was made before


class Recorder:
    """A device that notes which kernels may begin early."""

    def __init__(self) -> None:
        self.target, self.early = PRESETS["h200"], list[bool]()
        self._next = 1 << 20

    def allocate(self, nbytes: int) -> int:
        self._next += (nbytes + 1023) // 1024 * 1024
        return self._next

    def load(self, artifact: Any) -> Any:
        def bind(buffers: Any, scalars: Any, prepared: Any, *, early: bool) -> None:
            self.early.append(early)

        return SimpleNamespace(artifact=artifact, bind=bind, prepare=lambda addresses: object(), close=lambda: None)

    def ignore(self, *arguments: object) -> None:
        pass

    copy_in = free = ignore
    synchronize = close = ignore


def product(name: str, x: str, weight: str, y: str) -> Node:
    workload: Workload = Workload("batch_matmul", dict(b=1, m=64, n=64, k=64, dtype="float16"))
    letters = {spec.name: "ABC" for spec in (*workload.signature, *workload.outputs)}
    return Node(name, (name,), {"x": x, "weight": weight}, {"y": y}, (workload,), letters={workload: letters})


def reads_ahead(packs: bool) -> Callable[[Workload], ChosenKernel]:
    """Kernels that read their weight before the wait; those that pack it, if it is a constant, read the packed one."""

    def kernel(workload: Workload) -> ChosenKernel:
        x, weight, y = map(Pointer, ("x", "weight", "y"))
        steps: tuple[Step, ...] = (Step("run", (x, weight, y), Grid(1), 1, early=True, ahead=("weight",)),)
        if packs:
            packed = Pointer("packed")
            steps = (
                Step("pack", (weight, packed), Grid(1), 1, constant=True, early=True),
                Step("run", (x, packed, y), Grid(1), 1, early=True, ahead=("packed",)),
            )
        plan = LaunchPlan("cuda", "sm_90a", steps, {"packed": 1 << 20} if packs else {})
        return ChosenKernel(Artifact(workload.id.encode(), plan), Origin("exact", "t", "{}"))

    return kernel


@pytest.mark.parametrize("packs", [False, True])
def test_a_weight_that_an_earlier_kernel_computes_is_not_read_ahead(packs: bool) -> None:
    """t = x w1', u = t w2', y = u t'. What stands before the first call is unknown, the last one's weight is computed."""
    shapes = {"x": (1, 64, 64), "t": (1, 64, 64), "u": (1, 64, 64), "y": (1, 64, 64)}
    network = Network(
        inputs=("x",),
        outputs=("y",),
        values={name: Value(name, "ABC", shape, "float16") for name, shape in shapes.items()},
        constants={name: Constant(name, "ABC", np.ones((1, 64, 64), np.float32)) for name in ("w1", "w2")},
        nodes=(product("1", "x", "w1", "t"), product("2", "t", "w2", "u"), product("3", "u", "t", "y")),
    )
    executable = assemble(network, first_plan(network), reads_ahead(packs), target=PRESETS["h200"].key)
    device = Recorder()
    loaded = Weights(executable, device)  # type: ignore[arg-type]
    loaded.bind(1 << 30, [1 << 31], [1 << 32], SimpleNamespace(buffers=lambda number: {}))  # type: ignore[arg-type]
    assert device.early == [False, True, False]
