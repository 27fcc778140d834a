"""The knob `threads` of CPU templates, and a base for those that have no other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from schedsearch.config import Config
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import Template
from schedsearch.template.contract import P
from schedsearch.workload import Workload

# What one thread is taken to do in a nanosecond: multiply-adds in every 32-bit lane, one in two cycles of 3 GHz; and bytes
# of operands, which mostly come from a cache. Waking a thread takes 5 to 10 us, so each of them should work as long.
_MULTIPLY_ADDS_OF_LANE, _BYTES, _LEAST_NS = 1.5, 20.0, 8_000.0


def busy_threads(workload: Workload, target: Target, allowed: Iterable[int]) -> int:
    """The most threads of those allowed that all get work for some microseconds: the default of the knob `threads`.

    A call that does less is computed by the calling thread alone, and no other is woken.
    """
    lanes = max(target.simd_bits // 32, 1)
    time_ns = workload.flops / 2 / (_MULTIPLY_ADDS_OF_LANE * lanes) + workload.work.nbytes / _BYTES
    counts = [int(count) for count in allowed]
    return max((count for count in counts if count * _LEAST_NS <= time_ns), default=min(counts))


def threads_knob(target: Target, shared: str = "work items") -> Knob:
    """One thread, half of the cores, all of them; up to 8 cores every number."""
    threads = tuple(range(1, target.sms + 1)) if target.sms <= 8 else (1, target.sms // 2, target.sms)
    return Knob("threads", threads, f"threads that share the {shared}")


class SharedByThreads(Template[P]):
    """A base of CPU templates whose only knob is `threads`. The default gives each of them `least` items or more."""

    kind = "cpu"
    least: ClassVar[int] = 4096
    shared: ClassVar[str] = "elements"

    @abstractmethod
    def items(self, workload: Workload[P]) -> int:
        """How many items the threads share."""

    def validate(self, workload: Workload[P], target: Target) -> str | None:
        return None

    def space(self, workload: Workload[P], target: Target) -> ConfigSpace:
        return ConfigSpace((threads_knob(target, self.shared),))

    def default(self, workload: Workload[P], target: Target, space: ConfigSpace) -> Config:
        wanted = max(1, self.items(workload) // self.least)
        return Config(threads=max(n for n in space.values["threads"] if n == 1 or n <= wanted))
