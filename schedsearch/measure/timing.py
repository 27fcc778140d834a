"""Measures how long one launch takes: with operands in the cache (hot) or not (cold), constants plain or prepared, one
after the other or as in a network (chain)."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from schedsearch.device import BoundKernel, Device, LoadedKernel, Workspaces
from schedsearch.device.clock import launches_ns, lone_launches_ns, runs_ns
from schedsearch.measurement import CHAIN_GRAPH, HOT_GRAPH, PREPARED_MODES
from schedsearch.ops import ArgSpec
from schedsearch.target import Target
from schedsearch.typed import JsonObject
from schedsearch.verification.inputs import timing_pattern
from schedsearch.verification.truths import align
from schedsearch.workload import Workload

_COLD_FACTOR = {"cuda": 2.5, "cpu": 2.0}  # x the last-level cache
_CPU_ARENA_BYTES = 1_250_000_000  # virtual machines report caches of hundreds of MB that they share
_MEMORY_SHARE = 10  # of the device's memory, at most, for one workload's sets
_MAX_SETS = 1024  # each is bound or enqueued for every candidate, which takes host time
JUDGED_SETS = 4  # the first; their outputs are compared with known ones, and every kernel is timed on some of them
_MAX_CHAINED_SETS = 320  # in a chain the cache is flushed in front of each pass over the sets

_CODE_BYTES = 400_000  # of all loads of a kernel in a chain: several times the instruction caches of a multiprocessor
_LEAST_LOADS, _MOST_LOADS = 4, 16

_CHAIN_NS = {"cuda": 1e6, "cpu": 2e6}  # work between two readings of the clock
_MAX_CHAIN = 640
_SLOW_CHAIN_NS = 2e8
_MOST_SAMPLES = 30


@dataclass(frozen=True)
class Patience:
    """When to stop repeating.

    Attributes:
        half_width: relative half width of the median's confidence interval that is narrow enough.
        hopeless: a candidate whose first sample is more than this many times the best is not timed again.
        few: samples to take even when the time is over.
        enough: samples to take before the interval is checked.
        most: samples to take at most.
        budget_s: wall seconds; `few` samples are taken even beyond it.
    """

    half_width: float
    hopeless: float
    few: int = 3
    enough: int = 5
    most: int = _MOST_SAMPLES
    budget_s: float = 0.25


# A CPU is shared with the rest of the system, so its first sample says less.
PATIENCE = {"cuda": Patience(half_width=0.01, hopeless=2.0), "cpu": Patience(half_width=0.02, hopeless=3.0)}


def median_half_width(times: Sequence[float]) -> float:
    """Half the width of the median's confidence interval over the median.

    The interval lies between order statistics, whatever the distribution: of n sorted times the ranks n/2 -+ 0.98 sqrt(n)
    (95 %); the range of all below six times (94 % for five).
    """
    ordered = sorted(times)
    n = len(ordered)
    low = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n))) if n >= 6 else 0
    return (ordered[n - 1 - low] - ordered[low]) / 2 / statistics.median(ordered)


def repeat(sample: Callable[[int], list[float]], best_ns: float | None, patience: Patience) -> tuple[float, ...]:
    """Takes samples (ns per launch) until the median is known well enough or the candidate is hopeless.

    Args:
        sample: takes the given number of samples.
        best_ns: best time of the workload so far; a candidate whose first sample is over `hopeless` times this is dropped.
    """
    began = time.monotonic()
    times = sample(1)
    if best_ns is not None and times[0] > patience.hopeless * best_ns:
        return tuple(times)
    while len(times) < patience.most:
        over = time.monotonic() - began > patience.budget_s
        if len(times) >= (patience.few if over else patience.enough) and (
            over or median_half_width(times) <= patience.half_width
        ):
            break
        times += sample(patience.few - len(times) if len(times) < patience.few else 2)
    return tuple(times)


class Arena:
    """Sets of all operands (arguments and y) that a chain of launches rotates over, filled with normal random data.

    In mode `chain-graph-v1` only constants rotate, as the layers of a network have weights of their own. All sets have the
    other arguments in common, which so stay in the cache, and the outputs but for those of the first `JUDGED_SETS`.

    Attributes:
        sets: number of sets; what rotates exceeds the cold factor x the last-level cache, unless `capped`.
        buffers: for each set, name -> address.
        sizes: name -> bytes of an operand.
        prepared: whether constants are prepared before the time is taken.
        chained: whether a launch may begin before the one in front of it ends, as in a network.
        flush: address and bytes of memory whose writing flushes the cache, or None. It is written in front of each chain of
            launches, which then passes over the sets once if they are `capped`.
        capped: there are fewer sets, because of the device's memory or the number of sets that is worth binding.

    Raises:
        DeviceError: there is not enough memory.
    """

    def __init__(self, device: Device, workload: Workload, mode: str) -> None:
        specs = (*workload.signature, *workload.outputs)
        self.sizes = {spec.name: align(spec.span_bytes) for spec in specs}
        self.chained, self.prepared = mode == CHAIN_GRAPH, mode in PREPARED_MODES
        self._outputs = {spec.name for spec in workload.outputs}
        rotating = set(workload.constants) if self.chained else self.sizes.keys()
        self.sets, self.capped = set_count(sum(self.sizes[name] for name in rotating), device.target, mode)
        copies = [{spec.name: self._copy(spec, number, rotating) for spec in specs} for number in range(self.sets)]
        self.nbytes = sum(self.sizes[name] for name, _ in {each for copy in copies for each in copy.items()})
        flush_bytes = math.ceil(_COLD_FACTOR[device.target.kind] * device.target.l2_bytes)
        flushes = self.chained and self.sets > 1
        self.scalars = {scalar.name: scalar.default for scalar in workload.scalars}
        self._device = device
        self._memory = device.allocate(self.nbytes + (flush_bytes if flushes else 0))
        self.flush = (self._memory + self.nbytes, flush_bytes) if flushes else None
        self.buffers: list[dict[str, int]] = []
        address = self._memory
        known: dict[tuple[str, int], int] = {}
        for copy in copies:
            for spec in specs:
                key = spec.name, copy[spec.name]
                if key not in known:
                    known[key] = address
                    timing_pattern(workload, spec).write(device, address, spec.size, phase=7919 * key[1])  # copies differ
                    address += self.sizes[spec.name]
            self.buffers.append({name: known[name, number] for name, number in copy.items()})
        device.synchronize()

    def _copy(self, spec: ArgSpec, number: int, rotating: Collection[str]) -> int:
        """Which copy of an operand a set has."""
        if spec.name in rotating:
            return number
        return min(number, JUDGED_SETS) if spec.name in self._outputs else 0

    def facts(self) -> JsonObject:
        return {"sets": self.sets, "rotated_bytes": self.nbytes, **({"rotation_capped": True} if self.capped else {})}

    def close(self) -> None:
        self._device.free(self._memory)


def set_count(set_bytes: int, target: Target, mode: str) -> tuple[int, bool]:
    """(sets to rotate over, whether they are fewer than a cold cache wants).

    Args:
        set_bytes: of a set, as far as it rotates.
    """
    if mode == HOT_GRAPH or not set_bytes:
        return 1, False
    wanted = math.floor(_COLD_FACTOR[target.kind] * target.l2_bytes / set_bytes) + 1
    room = target.memory_bytes // _MEMORY_SHARE or _CPU_ARENA_BYTES
    if target.kind == "cpu":
        room = min(room, _CPU_ARENA_BYTES)
    sets = max(1, min(wanted, _MAX_CHAINED_SETS if mode == CHAIN_GRAPH else _MAX_SETS, room // set_bytes))
    return sets, sets < wanted


class Rotation:
    """The sets that launches of one kernel rotate over.

    In the modes of prepared constants those of every set are prepared here, each into memory of its own. Launches then
    rotate over the prepared sets and leave the constant steps out.

    Attributes:
        prepared: for each set the workspaces that replace its constants, or None.
        buffers: for each set, name -> address of every buffer that a launch reads or writes.

    Raises:
        DeviceError, ArgumentError: the kernel cannot be bound, or there is no memory for the prepared constants.
    """

    def __init__(self, kernel: LoadedKernel, arena: Arena, stream: int = 0) -> None:
        plan = kernel.artifact.plan
        used = {name for step in plan.steps if not (arena.prepared and step.constant) for name in step.buffers}
        self._arena = arena
        self.prepared: list[Workspaces | None] = []
        self.buffers: list[dict[str, int]] = []
        try:
            for operands in arena.buffers:
                made = kernel.prepare(operands, stream) if arena.prepared else None
                self.prepared.append(made)
                known = {**operands, **(made.addresses if made else {})}
                self.buffers.append({name: address for name, address in known.items() if name in used})
        except BaseException:
            self.close()
            raise

    def facts(self) -> JsonObject:
        """The facts of the arena, with the bytes that launches actually rotate over."""
        facts = self._arena.facts()
        if self._arena.prepared:
            places = {place for buffers in self.buffers for place in buffers.items()}
            operands = sum(self._arena.sizes.get(name, 0) for name, _ in places)
            prepared = sum(made.nbytes for made in self.prepared if made)
            facts |= {"rotated_bytes": operands + prepared, "prepared_bytes": prepared}
        return facts

    def close(self) -> None:
        """Frees the prepared constants."""
        for made in self.prepared:
            if made is not None:
                made.close()


class Timed(Protocol):
    """A loaded kernel that is ready to be timed repeatedly."""

    rotation: Rotation

    def sample(self, count: int) -> list[float]:
        """Takes `count` times of one launch, in ns; each is the mean over a chain of launches.

        Raises:
            DeviceError: a launch failed.
        """

    def launch(self, count: int) -> None:
        """Launches back to back, rotating over the sets; does not wait for the end."""

    def launch_set(self, number: int) -> None:
        """Launches once on one set; does not wait for the end."""

    def has_launched(self, number: int) -> bool:
        """Whether the samples taken so far contain a launch on this set."""

    def close(self) -> None: ...


class Timer(Protocol):
    """Prepares kernels for timing on one device."""

    def prepare(self, kernel: LoadedKernel, arena: Arena) -> Timed:
        """Raises DeviceError or ArgumentError if the kernel cannot be bound or launched."""


def open_timer(device: Device) -> Timer:
    return CudaTimer(device) if device.target.kind == "cuda" else CpuTimer()


def chain_length(launch_ns: float, sets: int, kind: str) -> int:
    """Launches per sample: whole rotations that make a sample long enough for the clock. A slow kernel gets fewer, because
    the few operands that it finds in the cache hardly change its time."""
    wanted = min(_MAX_CHAIN, math.ceil(_CHAIN_NS[kind] / launch_ns))
    whole = sets * math.ceil(wanted / sets)
    return whole if whole * launch_ns <= _SLOW_CHAIN_NS else max(1, int(_SLOW_CHAIN_NS / launch_ns))


class CudaTimer:
    """Captures a graph, a linear chain of launches; events around it give its time on the device."""

    def __init__(self, device: Any) -> None:
        from schedsearch.device.cuda import Event

        device.make_current()  # events and graphs need it
        self.device = device
        self.stream: int = device.create_stream()
        self.events = [Event() for _ in range(2 * _MOST_SAMPLES)]

    def prepare(self, kernel: LoadedKernel, arena: Arena) -> CudaTimed:
        return CudaTimed(self, kernel, arena)


class CudaTimed:
    def __init__(self, timer: CudaTimer, kernel: LoadedKernel, arena: Arena) -> None:
        self._timer, self._stream, self._flush = timer, timer.stream, arena.flush
        with contextlib.ExitStack() as stack:
            self.rotation = Rotation(kernel, arena, timer.stream)
            stack.callback(self.rotation.close)
            timer.device.synchronize()  # a kernel that begins early may read constants while the one in front prepares them
            prepared, early = self.rotation.prepared[0], arena.chained
            self._bound = [kernel.bind(arena.buffers[0], arena.scalars, prepared, early=early)]
            # All loads compute in the same workspaces, as one kernel launched again would.
            own, made = cast(Any, kernel).workspaces.addresses, prepared.addresses if prepared else {}
            places = {**own, **made, **arena.buffers[0]}
            for _ in range(more_loads(len(kernel.artifact.code), arena)):
                loaded = timer.device.load(kernel.artifact)
                stack.callback(loaded.close)
                self._bound.append(loaded.bind(places, arena.scalars, prepared, early=early))
            self._sets = [list(buffers.items()) for buffers in self.rotation.buffers]
            self._at: list[dict[str, int]] = [{} for _ in self._bound]  # the addresses that are bound
            self._launched = 0  # sets, from the first on
            self._launches = self._launches_of(arena)
            self._graph = timer.device.capture(self._stream, lambda _: self.launch(self._launches))
            self._launched = 0  # those for the estimate were before the caller's
            self._stack = stack.pop_all()

    def _launches_of(self, arena: Arena) -> int:
        """How many launches make a sample."""
        begin, end = self._timer.events[:2]
        self.launch(len(self._bound))  # the code travels to the device
        begin.record(self._stream)
        self.launch(2)
        end.record(self._stream)
        end.synchronize()
        launches = chain_length(max(1e3, begin.elapsed_ms(end) * 1e6 / 2), arena.sets, "cuda")
        # A second pass over few constants would find them in the cache.
        return min(launches, arena.sets) if arena.flush and arena.capped else launches

    def sample(self, count: int) -> list[float]:
        self._launched = max(self._launched, self._launches)
        if self._flush is None:
            times_ns = launches_ns(self._timer.events[: count + 1], self._stream, self._graph.launch)
        else:
            events = self._timer.events
            pairs = list(zip(events[:count], events[count : 2 * count], strict=True))
            times_ns = lone_launches_ns(pairs, self._stream, self._flush_cache, self._graph.launch)
        return [time_ns / self._launches for time_ns in times_ns]

    def _flush_cache(self, stream: int) -> None:
        assert self._flush is not None
        self._timer.device.fill_later(*self._flush, stream)

    def launch(self, count: int) -> None:
        """Moves an argument block from set to set: a launch, and its capture into a graph, copies the block."""
        self._launched = max(self._launched, count)
        for number in range(count):
            self._launch_set(number % len(self._sets), number % len(self._bound))

    def launch_set(self, number: int) -> None:
        self._launch_set(number, 0)

    def _launch_set(self, number: int, load: int) -> None:
        bound, at = self._bound[load], self._at[load]
        for name, address in self._sets[number]:
            if at.get(name) != address:
                bound.set_pointer(name, address)
                at[name] = address
        bound.launch(self._stream)

    def has_launched(self, number: int) -> bool:
        return number < self._launched

    def close(self) -> None:
        self._graph.close()
        self._stack.close()


def more_loads(code_bytes: int, arena: Arena) -> int:
    """How often code is loaded once more: in a chain, so often that a launch does not find it where the multiprocessors keep
    instructions, because in a network every kernel has code of its own."""
    return min(_MOST_LOADS, max(_LEAST_LOADS, math.ceil(_CODE_BYTES / code_bytes))) - 1 if arena.chained else 0


class CpuTimer:
    def prepare(self, kernel: LoadedKernel, arena: Arena) -> CpuTimed:
        return CpuTimed(kernel, arena)


class CpuTimed:
    """Launches in a row between two readings of the clock; the rotation continues from sample to sample."""

    def __init__(self, kernel: LoadedKernel, arena: Arena) -> None:
        self.rotation = Rotation(kernel, arena)
        self._bound: list[BoundKernel] = [
            kernel.bind(operands, arena.scalars, made) for operands, made in zip(arena.buffers, self.rotation.prepared)
        ]
        self._next = self._launched = 0
        self.launch(1)
        (estimate_ns,) = runs_ns([functools.partial(self.launch, 1)])
        self._launches = max(1, math.ceil(_CHAIN_NS["cpu"] / max(1, estimate_ns)))

    def sample(self, count: int) -> list[float]:
        chains = [self._chain(self._launches) for _ in range(count)]
        return [time_ns / self._launches for time_ns in runs_ns([functools.partial(_launch_all, each) for each in chains])]

    def launch(self, count: int) -> None:
        _launch_all(self._chain(count))

    def launch_set(self, number: int) -> None:
        self._bound[number].launch()

    def has_launched(self, number: int) -> bool:
        return number < self._launched

    def _chain(self, count: int) -> list[BoundKernel]:
        self._launched += count
        start, self._next = self._next, (self._next + count) % len(self._bound)
        return [self._bound[(start + i) % len(self._bound)] for i in range(count)]

    def close(self) -> None:
        self.rotation.close()


def _launch_all(chain: Sequence[BoundKernel]) -> None:
    for bound in chain:
        bound.launch()
