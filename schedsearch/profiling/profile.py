"""The results of a hardware profiler: counters of each launch of a kernel, and figures computed from them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from schedsearch.identity import canonical_json
from schedsearch.typed import JsonMapping

# Figure -> the sets of Nsight Compute's metrics whose sum it is, the best first: names differ between cards and versions.
# The tensor pipe's cycles include every kind of matrix instruction. Before Hopper, and on Hopper in older versions, the
# half-precision pipe's metric replaces it, and counts wgmma too. `active` is relative to the cycles in which a
# multiprocessor had work, `elapsed` to the whole duration.
FIGURES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "duration_ns": (("gpu__time_duration.sum",),),
    "tensor_active_pct": (
        ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",),
        ("sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",),
        ("sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",),
    ),
    "tensor_elapsed_pct": (
        ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",),
        ("sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",),
    ),
    "occupancy_pct": (("sm__warps_active.avg.pct_of_peak_sustained_active",),),
    "l2_pct": (
        ("lts__throughput.avg.pct_of_peak_sustained_elapsed",),
        ("lts__t_sectors.avg.pct_of_peak_sustained_elapsed",),
    ),
    "l2_bytes": (("lts__t_bytes.sum",),),
    "dram_pct": (("dram__throughput.avg.pct_of_peak_sustained_elapsed",),),
    "dram_bytes": (
        ("dram__bytes.sum",),
        ("dram__bytes_read.sum", "dram__bytes_write.sum"),
        ("dram__bytes_op_read.sum", "dram__bytes_op_write.sum"),
    ),
}
# Also kept: the numbers of matrix instructions of Hopper's warp groups and of warps.
_INSTRUCTIONS = ("sm__inst_executed_pipe_tensor_op_gmma.sum", "sm__inst_executed_pipe_tensor_op_hmma.sum")
METRICS = tuple(dict.fromkeys([*(name for sets in FIGURES.values() for names in sets for name in names), *_INSTRUCTIONS]))
"""All metrics that a profiler is asked for."""


@dataclass(frozen=True)
class Launch:
    """The counters of one launch.

    Attributes:
        kernel: its name in the profiler.
        grid, block: their extents, e.g. "(132, 1, 1)".
        metrics: name -> value, for those of `METRICS` that were read; times in ns, sizes in bytes, the rest percent or
            counts.
    """

    kernel: str
    grid: str
    block: str
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Profile:
    """The counters of one kernel, which may have taken several launches.

    Attributes:
        subject: kernel for the record's own, or torch for PyTorch's version of the operator.
        tool: the profiler and its version.
        cache: flushed or kept, between launches and passes.
        launches: in the order in which they ran.
        missing: requested metrics that this card or this version does not have.
        taken_at: seconds since the epoch.
    """

    subject: str
    tool: str
    cache: str
    launches: tuple[Launch, ...]
    missing: tuple[str, ...] = ()
    taken_at: float = field(default=0.0)

    def __post_init__(self) -> None:
        if not self.launches:
            raise ValueError("a profile has at least one launch, got none")
        for launch in self.launches:
            if not all(math.isfinite(value) for value in launch.metrics.values()):
                raise ValueError(f"metrics must be finite numbers, got {dict(launch.metrics)}")

    def source(self, figure: str) -> tuple[str, ...]:
        """The metrics that a figure of `FIGURES` comes from, the same ones for every launch; () if it was not read."""
        for names in FIGURES[figure]:
            if all(name in launch.metrics for launch in self.launches for name in names):
                return names
        return ()

    def figure(self, figure: str, launch: Launch | None = None) -> float | None:
        """A figure of one launch or of the whole: times and sizes are added, percentages are means weighted by time."""
        names = self.source(figure)
        if not names:
            return None
        if launch is not None:
            return sum(launch.metrics[name] for name in names)
        values = [sum(one.metrics[name] for name in names) for one in self.launches]
        if not figure.endswith("_pct"):
            return sum(values)
        times = [self.figure("duration_ns", one) for one in self.launches]
        total_ns = sum(time_ns or 0.0 for time_ns in times)
        if not total_ns:
            return values[0] if len(values) == 1 else None
        return sum(value * (time_ns or 0.0) for value, time_ns in zip(values, times)) / total_ns

    def figures(self, launch: Launch | None = None) -> dict[str, float | None]:
        """All figures; None for those that were not read."""
        return {name: self.figure(name, launch) for name in FIGURES}

    def to_json(self) -> str:
        return canonical_json(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Raises KeyError, TypeError or ValueError if the data did not come from `to_json`."""
        data = json.loads(text)
        launches = tuple(
            Launch(str(one["kernel"]), str(one["grid"]), str(one["block"]), _numbers(one["metrics"]))
            for one in data["launches"]
        )
        return cls(
            subject=str(data["subject"]),
            tool=str(data["tool"]),
            cache=str(data["cache"]),
            launches=launches,
            missing=_names(data["missing"]),
            taken_at=float(data["taken_at"]),
        )


def _numbers(values: JsonMapping) -> dict[str, float]:
    return {str(name): float(value) for name, value in values.items()}


def _names(values: Iterable[object]) -> tuple[str, ...]:
    return tuple(map(str, values))
