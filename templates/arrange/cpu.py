"""arange, expand, reshape, where and dyn_concat on CPUs: see docs/kernels/arrange.md."""

from __future__ import annotations

from typing import Any

from schedsearch.config import Config
from schedsearch.launch import Grid
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.arrange.cuda import OPS
from schedsearch.templates.arrange.kernels import arranging, elements_of, parameters
from schedsearch.workload import Workload

_LEAST = 4096  # elements that are worth a thread


class ArrangeCpu(Template):
    """Threads have an equal share each of the elements of y in use."""

    name = "arrange_cpu"
    version = 1
    op = "arange"
    kind = "cpu"

    @property
    def ops(self) -> tuple[str, ...]:
        return OPS

    def validate(self, workload: Workload, target: Target) -> str | None:
        return None

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        threads = tuple(range(1, target.sms + 1)) if target.sms <= 8 else (1, target.sms // 2, target.sms)
        return ConfigSpace((Knob("threads", threads, "threads that share the elements"),))

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        wanted = max(1, elements_of(workload) // _LEAST)
        return Config(threads=max(n for n in space.values["threads"] if n == 1 or n <= wanted))

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        threads = config["threads"]

        def share(elements: Any, start: Any, stop: Any) -> Any:
            return elements * start // threads, elements * stop // threads, 1

        run = arranging(workload, share)

        def arrange(*operands: Any, start: Any, stop: Any) -> None:
            run(operands, start, stop)

        return KernelSource("cpu", "native", (KernelStep(arrange, parameters(workload), Grid(threads), threads),))
