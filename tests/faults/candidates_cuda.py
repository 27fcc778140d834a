"""Kernels that misbehave on a GPU. As `candidates`, for the template `faulty_cuda`."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

from faulty_templates import PointwiseCuda, shape_of

from schedsearch.config import Config
from schedsearch.launch import Grid, Int64, Pointer
from schedsearch.measurement import Outcome
from schedsearch.space import ConfigSpace
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep
from schedsearch.workload import Workload

from . import candidates, runs
from .fault import LAUNCH_ERROR, OK, RUN_TIMEOUT, WRONG, Fault, fault, faulty_space
from .scenario import Batch, Scenario

_THREADS = 128
_BATCH = 20
FAULTS: dict[str, Fault] = {}


class FaultyCuda(PointwiseCuda):
    """See the module."""

    name = "faulty_cuda"

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        return faulty_space(FAULTS)

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        return Config(fault=runs.HEALTHY, number=0)

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        number = config["number"]
        if config["fault"] == runs.HEALTHY:
            made: Any = pointwise(workload, number)
        else:
            made = FAULTS[config["fault"]].make(workload, random.Random(f"{config['fault']} {number}"))
        function, launch = made if isinstance(made, tuple) else (made, {})
        workspaces = launch.get("workspaces", {})
        m, _, k = shape_of(workload)
        params = (Pointer("x"), Pointer("weight"), Pointer("y"), Int64(m * k), *map(Pointer, workspaces))
        step = KernelStep(
            function, params, Grid(launch.get("blocks", -(-m * k // _THREADS))), launch.get("threads", _THREADS),
            dynamic_shared_bytes=launch.get("shared_bytes", 0),
        )  # fmt: skip
        return KernelSource("cuda", "native", (step,), workspaces=workspaces)


def _operations() -> tuple[Any, Any]:
    from schedsearch.backend.ops import device_op

    load = device_op("load", "ld.global.f32 $value, [$address];", ins={"address": "u64"}, outs={"value": "f32"})
    store = device_op("store", "st.global.f32 [$address], $value;", ins={"address": "u64", "value": "f32"})
    return load, store


def _nothing(x: Any, w: Any, y: Any, index: Any, total: Any, space: Any) -> Any:
    return total


def pointwise(
    workload: Workload,
    number: int,
    after: Callable[..., Any] = _nothing,
    channels: int | None = None,
    workspaces: dict[str, int] | None = None,
    **launch: int,
) -> Any:
    """One thread per output element. Each number has machine code of its own.

    Args:
        after: a device function of (x, weight, y, index, total, workspace) that is called before the store; it returns what
            is stored.
    """
    from numba import cuda, types

    load, store = _operations()
    _, c, k = shape_of(workload)
    used, marker = c if channels is None else channels, int(number)

    def element(x: Any, w: Any, y: Any, size: Any, space: Any) -> None:
        index = types.int64(cuda.blockIdx.x) * types.int64(_THREADS) + types.int64(cuda.threadIdx.x)
        if index >= size:
            return
        i, j = index // types.int64(k), index % types.int64(k)
        total = types.float32(0.0)
        for s in range(used):
            total += load(x + types.uint64(4 * (i * c + s))) * load(w + types.uint64(4 * (j * c + s)))
        if size == -1 - marker:  # never, but only a reader knows
            total += types.float32(1.0)
        total = after(x, w, y, index, total, space)
        store(y + types.uint64(4 * index), total)

    if workspaces:

        def with_space(x: Any, w: Any, y: Any, size: Any, space: Any) -> None:
            element(x, w, y, size, space)

        return with_space, {"workspaces": workspaces, **launch}

    def without_space(x: Any, w: Any, y: Any, size: Any) -> None:
        element(x, w, y, size, types.uint64(0))

    return without_space, launch


_fault = functools.partial(fault, FAULTS)


def _stores(workload: Workload, rng: random.Random, offset: int, workspace: int = 0) -> Any:
    """A right kernel that also writes one float at y + offset bytes, or at the workspace + offset bytes."""
    from numba import types

    _, store = _operations()
    offset_ = int(offset)

    def after(x: Any, w: Any, y: Any, index: Any, total: Any, space: Any) -> Any:
        if index == 0:
            base = space if workspace else y
            store(types.uint64(types.int64(base) + types.int64(offset_)), types.float32(77.0))
        return total

    number = rng.randrange(1 << 30)
    return pointwise(workload, number, after, workspaces={"scratch": workspace} if workspace else None)


def _runs_ptx(workload: Workload, rng: random.Random, ptx: str, first: int = 1) -> Any:
    """A kernel whose threads with an index below `first` execute one more instruction."""
    from schedsearch.backend.ops import device_op

    addressed = "$address" in ptx
    faulty = device_op("fault", ptx, ins={"address": "u64"} if addressed else {})

    def after(x: Any, w: Any, y: Any, index: Any, total: Any, space: Any) -> Any:
        if index < first:
            if addressed:
                faulty(y)
            else:
                faulty()
        return total

    return pointwise(workload, rng.randrange(1 << 30), after)


@_fault("illegal-address", "writes or reads an address that is not mapped", LAUNCH_ERROR)
def _(workload: Workload, rng: random.Random) -> Any:
    address = rng.choice([0, 64, 0xDEAD_BEEF_0000, 1 << 46, (1 << 64) - 4096]) + 4 * rng.randrange(64)
    what = rng.choice(["st.global.f32 [at], 0f3F800000;", "st.f32 [at], 0f3F800000;"])
    return _runs_ptx(workload, rng, f"{{ .reg .u64 at; mov.u64 at, {address}; {what} }}")


@_fault("misaligned", "writes a float to an odd address", LAUNCH_ERROR)
def _(workload: Workload, rng: random.Random) -> Any:
    width, off = rng.choice([("f32", rng.randrange(1, 4)), ("f64", rng.randrange(1, 8)), ("v4.f32", 4)])
    value = {"f32": "0f3F800000", "f64": "0d3FF0000000000000", "v4.f32": "{0f0, 0f0, 0f0, 0f0}"}[width]
    value = value.replace("0f0", "0f00000000").replace("0f000000003F800000", "0f3F800000")
    return _runs_ptx(workload, rng, f"st.global.{width} [$address+{off}], {value};")


@_fault("shared-address", "writes shared memory that the block does not have", LAUNCH_ERROR)
def _(workload: Workload, rng: random.Random) -> Any:
    address = rng.choice([1 << 18, 1 << 20, 0x7FFFFF00])
    return _runs_ptx(workload, rng, f"{{ .reg .u32 at; mov.u32 at, {address}; st.shared.f32 [at], 0f3F800000; }}")


@_fault("trap", "executes a trap instruction", LAUNCH_ERROR)
def _(workload: Workload, rng: random.Random) -> Any:
    return _runs_ptx(workload, rng, "trap;", first=rng.choice([1, 32, 1000]))


@_fault("early-exit", "ends some of its threads before they have written their output", WRONG)
def _(workload: Workload, rng: random.Random) -> Any:
    return _runs_ptx(workload, rng, "exit;", first=rng.randrange(1, 64))


@_fault("deadlock", "lets some threads wait at a barrier that the others never reach", RUN_TIMEOUT, slow=True)
def _(workload: Workload, rng: random.Random) -> Any:
    ptx = f"bar.sync {rng.randrange(1, 15)}, {_THREADS};"
    return _runs_ptx(workload, rng, ptx, first=32)


@_fault("endless", "loops or sleeps without end", RUN_TIMEOUT, slow=True)
def _(workload: Workload, rng: random.Random) -> Any:
    work = rng.choice(["nanosleep.u32 1000;", "ld.volatile.global.f32 value, [$address];", "membar.gl;"])
    return _runs_ptx(workload, rng, f"{{ .reg .f32 value; again: {work} bra again; }}", first=rng.choice([1, 10_000]))


@_fault("local-memory", "takes up to half a megabyte of local memory per thread", *Outcome)
def _(workload: Workload, rng: random.Random) -> Any:
    from numba import cuda, types

    count = rng.choice([1 << 12, 1 << 15, 1 << 16, 1 << 17])

    def after(x: Any, w: Any, y: Any, index: Any, total: Any, space: Any) -> Any:
        hoard = cuda.local.array(count, types.float32)
        for s in range(count):
            hoard[s] = total + types.float32(s)
        return total + hoard[(index * types.int64(7919)) % types.int64(count)] * types.float32(0.0)

    return pointwise(workload, rng.randrange(1 << 30), after)


@_fault("before", "writes in front of its output", WRONG)
def _(workload: Workload, rng: random.Random) -> Any:
    return _stores(workload, rng, -4 * rng.randrange(1, 60))


@_fault("behind", "writes behind its output", WRONG)
def _(workload: Workload, rng: random.Random) -> Any:
    return _stores(workload, rng, 4 * (workload.output.size + rng.randrange(60)))


@_fault("between", "writes before or behind a workspace", WRONG)
def _(workload: Workload, rng: random.Random) -> Any:
    size = 4 * rng.randrange(1, 40)
    return _stores(workload, rng, rng.choice([-4, -8, size, size + 4]), size)


@_fault("neighbours", "writes up to 64 KiB away from its output, where other arrays may lie", WRONG, LAUNCH_ERROR, OK)
def _(workload: Workload, rng: random.Random) -> Any:
    return _stores(workload, rng, rng.choice([-1, 1]) * 4 * rng.randrange(64, 16_384))


@_fault("device-memory", "wants more memory than the device has", LAUNCH_ERROR, Outcome.REJECTED, Outcome.COMPILE_ERROR)
def _(workload: Workload, rng: random.Random) -> Any:
    return pointwise(workload, rng.randrange(1 << 30), workspaces={"scratch": rng.choice([1 << 38, 1 << 42, 1 << 60])})


@_fault("resources", "wants more threads, blocks or shared memory than a launch may have", *(set(Outcome) - {OK}))
def _(workload: Workload, rng: random.Random) -> Any:
    launch = rng.choice([{"threads": 2048}, {"shared_bytes": 1 << 20}, {"blocks": 1 << 40}, {"threads": 0}, {"blocks": 0}])
    return pointwise(workload, rng.randrange(1 << 30), **launch)


@_fault("wrong", "leaves out a channel, or adds a little to one element", WRONG)
def _(workload: Workload, rng: random.Random) -> Any:
    from numba import types

    m, c, k = shape_of(workload)
    if rng.random() < 0.3:
        return pointwise(workload, rng.randrange(1 << 30), channels=rng.randrange(c))
    place, little = rng.randrange(m * k), rng.choice([0.25, 1.0, -1.0, 1e30, float("nan"), float("inf")])

    def after(x: Any, w: Any, y: Any, index: Any, total: Any, space: Any) -> Any:
        return total + types.float32(little) if index == place else total

    return pointwise(workload, rng.randrange(1 << 30), after)


@_fault("inputs", "changes an input", WRONG)
def _(workload: Workload, rng: random.Random) -> Any:
    from numba import types

    load, store = _operations()
    m, c, k = shape_of(workload)
    weight, place = bool(rng.random() < 0.5), 4 * rng.randrange(min(m, k) * c)

    def after(x: Any, w: Any, y: Any, index: Any, total: Any, space: Any) -> Any:
        if index == 0:
            at = (w if weight else x) + types.uint64(place)
            store(at, load(at) + types.float32(1.0))
        return total

    return pointwise(workload, rng.randrange(1 << 30), after)


# Cheating. The workspace is not cleared between launches.


@_fault("cheat-finite", "skips its work where the output already holds a finite number", WRONG)
def _(workload: Workload, rng: random.Random) -> Any:
    from numba import types

    load, _ = _operations()

    def after(x: Any, w: Any, y: Any, index: Any, total: Any, space: Any) -> Any:
        old = load(y + types.uint64(4 * index))
        return old if abs(old) < types.float32(1e30) else total

    return pointwise(workload, rng.randrange(1 << 30), after)


def _counting(workload: Workload, rng: random.Random, spoil: Callable[[Any, Any], Any], patience: int) -> Any:
    """A kernel that is right for the first `patience` launches: every element counts its launches in a workspace."""
    from numba import types

    load, store = _operations()
    m, _, k = shape_of(workload)

    def after(x: Any, w: Any, y: Any, index: Any, total: Any, space: Any) -> Any:
        at = space + types.uint64(4 * index)
        count = load(at)
        if not count < types.float32(1e6):  # poison
            count = types.float32(0.0)
        store(at, count + types.float32(1.0))
        return spoil(total, index) if count > types.float32(patience) else total

    return pointwise(workload, rng.randrange(1 << 30), after, workspaces={"count": 4 * m * k})


@_fault("cheat-remember", "works for some launches only, and then writes zeros", WRONG)
def _(workload: Workload, rng: random.Random) -> Any:
    from numba import types

    def zero(total: Any, index: Any) -> Any:
        return types.float32(0.0)

    return _counting(workload, rng, zero, rng.randrange(1, 40))


@_fault("cheat-late", "is right for the first 30 to 400 launches", WRONG, OK, right=False)
def _(workload: Workload, rng: random.Random) -> Any:
    from numba import types

    def add(total: Any, index: Any) -> Any:
        return total + types.float32(1.0) if index == 5 else total

    return _counting(workload, rng, add, rng.randrange(30, 400))


@_fault("cheat-address", "works once for each address of the output", WRONG)
def _(workload: Workload, rng: random.Random) -> Any:
    from numba import types

    load, store = _operations()
    m, _, k = shape_of(workload)

    def after(x: Any, w: Any, y: Any, index: Any, total: Any, space: Any) -> Any:
        at = space + types.uint64(4 * index)
        name = types.float32(((x ^ y) >> types.uint64(8)) & types.uint64(0x7FFFFF))
        if load(at) == name:
            return load(y + types.uint64(4 * index))
        store(at, name)
        return total

    return pointwise(workload, rng.randrange(1 << 30), after, workspaces={"seen": 4 * m * k})


@_fault("cheat-inputs", "returns its last answer while the first element of x is the same", WRONG)
def _(workload: Workload, rng: random.Random) -> Any:
    from numba import types

    load, store = _operations()
    m, c, k = shape_of(workload)

    def after(x: Any, w: Any, y: Any, index: Any, total: Any, space: Any) -> Any:
        at = space + types.uint64(8 * index)
        first = load(x + types.uint64(4 * (index // types.int64(k)) * c))
        if load(at) == first:
            return load(at + types.uint64(4))
        store(at, first)
        store(at + types.uint64(4), total)
        return total

    return pointwise(workload, rng.randrange(1 << 30), after, workspaces={"old": 8 * m * k})


def _tries(name: str) -> Callable[[Batch], None]:
    def run(batch: Batch) -> None:
        seeds = candidates.numbers(batch)
        run_timeout_s = 4.0 if FAULTS[name].slow else 10.0
        plan = runs.Plan({runs.HEALTHY: [0, 1], name: list(seeds)}, "cuda", 30.0, run_timeout_s, workers=4)
        candidates.check(batch, plan, runs.tune(plan, batch.folder, limit_s=550.0), {name: FAULTS[name]}, seeds)

    return run


SCENARIOS = [
    Scenario(f"device.{name}", f"the kernel {each.what}", _tries(name), "cuda", batch=_BATCH)
    for name, each in FAULTS.items()
]
