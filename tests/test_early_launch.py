"""Kernels that begin before the one in front of them ends compute what they compute one after another.

See docs/decisions/230-kernels-begin-early.md.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

cuda = pytest.importorskip("numba.cuda")
pytest.importorskip("numba_cuda")
from numba import types  # noqa: E402

from schedsearch.backend import compile_source  # noqa: E402
from schedsearch.backend.cuda import ptx_of  # noqa: E402
from schedsearch.backend.ops import device_op  # noqa: E402
from schedsearch.device import open_device  # noqa: E402
from schedsearch.device.detect import detect  # noqa: E402
from schedsearch.launch import Grid, Int32, Pointer  # noqa: E402
from schedsearch.target import PRESETS  # noqa: E402
from schedsearch.template import KernelSource, KernelStep  # noqa: E402

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


def link(number: int, blocks: int, load: Any) -> KernelSource:
    """y[i] = 3 * x[j] + i for a j of another block. Blocks of some kernels are slow, each for a time of its own."""
    count, slow = blocks * THREADS, 400 * number

    def kernel(x, y, n):  # type: ignore[no-untyped-def]
        i = types.uint32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        wait_ns(types.uint64(slow) * types.uint64(types.uint32(cuda.blockIdx.x * 7) % types.uint32(11)))
        j = (i * types.uint32(37) + types.uint32(13)) % types.uint32(n)
        value = load(x + types.uint64(j) * types.uint64(4))
        store(y + types.uint64(i) * types.uint64(4), value * types.uint32(3) + i)

    step = KernelStep(kernel, (Pointer("x"), Pointer("y"), Int32(count)), Grid(blocks), THREADS)
    return KernelSource("cuda", "native", (step,))


def chained(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    i = np.arange(x.size, dtype=np.uint32)
    for _ in range(NODES):
        x = np.uint32(3) * x[(i * np.uint32(37) + np.uint32(13)) % np.uint32(x.size)] + i
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
@pytest.mark.parametrize("cached", ["", ".nc"])
@pytest.mark.parametrize(("blocks", "buffers"), [(16, 2), (16, 3), (132, 3), (600, 2), (600, 4)])
def test_a_chain_of_slow_kernels_is_exact(blocks: int, buffers: int, cached: str) -> None:
    """Few buffers in turn: a kernel overwrites what an earlier one read, and reads what an earlier one wrote."""
    from schedsearch.device.cuda_graph import KernelGraph

    count, target = blocks * THREADS, detect("cuda")
    device = open_device(target)
    try:
        memory = [device.allocate(4 * count) for _ in range(buffers)]
        kernels = [device.load(compile_source(link(number, blocks, LOADS[cached]), target).artifact) for number in range(5)]
        bound = [
            kernels[n * 7 % 5].bind({"x": memory[n % buffers], "y": memory[(n + 1) % buffers]}, {}, early=n > 0)
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
            assert np.array_equal(got, chained(x)), f"turn {turn}"
        graph.close()
    finally:
        device.close()
