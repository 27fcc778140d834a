"""arange, expand, reshape, where and dyn_concat on NVIDIA GPUs: see docs/kernels/arrange.md."""

from __future__ import annotations

from typing import Any

from numba import cuda

from schedsearch.config import Config
from schedsearch.launch import Grid
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.arrange.kernels import arranging, elements_of, parameters
from schedsearch.templates.parts.casts import i64
from schedsearch.workload import Workload

OPS = ("arange", "expand", "reshape", "where", "dyn_concat")
THREADS = (128, 256, 512)
EACH = (1, 4, 16)


class ArrangeCuda(Template):
    """Blocks that loop over the elements of y in use."""

    name = "arrange_cuda"
    version = 1
    op = "arange"
    kind = "cuda"

    @property
    def ops(self) -> tuple[str, ...]:
        return OPS

    def validate(self, workload: Workload, target: Target) -> str | None:
        return None

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        size = elements_of(workload)
        each = tuple(n for n in EACH if n == 1 or n * THREADS[0] < size)
        return ConfigSpace((Knob("threads", THREADS, "threads of a block"), Knob("each", each, "elements of a thread")))

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        """Several elements each where all multiprocessors stay busy."""
        busy = elements_of(workload) // (target.sms * 2048)
        return Config(threads=256, each=max(n for n in space.values["each"] if n == 1 or n <= busy))

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        run, threads = arranging(workload, _of_grid), config["threads"]

        def arrange(*operands: Any) -> None:
            thread = i64(cuda.blockIdx.x) * threads + cuda.threadIdx.x
            run(operands, thread, i64(cuda.gridDim.x) * threads)

        blocks = -(-elements_of(workload) // (config["threads"] * config["each"]))
        step = KernelStep(arrange, parameters(workload), Grid(blocks), config["threads"])
        return KernelSource("cuda", "native", (step,))


def _of_grid(elements: Any, thread: Any, threads: Any) -> Any:
    """Neighbours have neighbouring elements."""
    return thread, elements, threads
