"""arange, expand, reshape, where and dyn_concat on CPUs: see docs/kernels/arrange.md."""

from __future__ import annotations

from typing import Any

from schedsearch.config import Config
from schedsearch.launch import Grid
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep
from schedsearch.templates.arrange.cuda import OPS
from schedsearch.templates.arrange.kernels import arranging, elements_of, parameters
from schedsearch.templates.parts.cpu_threads import SharedByThreads
from schedsearch.workload import Workload


class ArrangeCpu(SharedByThreads):
    """Threads have an equal share each of the elements of y in use."""

    name = "arrange_cpu"
    version = 1
    op = "arange"

    @property
    def ops(self) -> tuple[str, ...]:
        return OPS

    def items(self, workload: Workload) -> int:
        return elements_of(workload)

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        threads = config["threads"]

        def share(elements: Any, start: Any, stop: Any) -> Any:
            return elements * start // threads, elements * stop // threads, 1

        run = arranging(workload, share)

        def arrange(*operands: Any, start: Any, stop: Any) -> None:
            run(operands, start, stop)

        return KernelSource("cpu", "native", (KernelStep(arrange, parameters(workload), Grid(threads), threads),))
