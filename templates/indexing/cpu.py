"""gather and scatter on CPUs: see docs/kernels/indexing.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedsearch.backend.cpu_ops import note_index
from schedsearch.config import Config
from schedsearch.launch import Grid, NumbaArray, Param
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.index_map import ByIndicesParams, IndexMap
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.indexing.cuda import WRONG, arrays_of, map_of
from schedsearch.templates.indexing.places import counter, extents_writer, finder, noter
from schedsearch.templates.parts.casts import i64
from schedsearch.templates.parts.cpu_threads import SharedByThreads, busy_threads, threads_knob
from schedsearch.workload import Workload

_ROWS = (1, 16, 256)
_LEAST_COLUMNS = 64  # neighbours of a row that a thread of scatter has


class GatherCpu(Template[ByIndicesParams]):
    """A work item has some rows."""

    name = "gather_cpu"
    version = 3
    op = "gather"
    kind = "cpu"

    def validate(self, workload: Workload[ByIndicesParams], target: Target) -> str | None:
        return None

    def space(self, workload: Workload[ByIndicesParams], target: Target) -> ConfigSpace:
        rows = map_of(workload).rows
        knobs = Knob("rows", tuple(n for n in _ROWS if n == 1 or n <= rows), "rows of a work item"), threads_knob(target)
        return ConfigSpace(knobs)

    def default(self, workload: Workload[ByIndicesParams], target: Target, space: ConfigSpace) -> Config:
        return Config(rows=space.values["rows"][-1], threads=busy_threads(workload, target, space.values["threads"]))

    def kernel(self, workload: Workload[ByIndicesParams], target: Target, config: Config) -> KernelSource:
        m, arrays = map_of(workload), arrays_of(workload)
        params: tuple[Param, ...] = (
            _bits(arrays["x"]), arrays["indices"], arrays["indices_extents"], arrays["x_extents"], _bits(arrays["y"]),
            arrays["y_extents"], WRONG,
        )  # fmt: skip
        items = -(-m.rows // config["rows"])
        step = KernelStep(gather_kernel(workload, m, config["rows"]), params, Grid(items), min(items, config["threads"]))
        return KernelSource("cpu", "native", (step,))


class ScatterCpu(SharedByThreads[ByIndicesParams]):
    """A work item has some columns of all rows, so that rows of one target come one after the other."""

    name = "scatter_cpu"
    version = 3
    op = "scatter"
    shared = "columns"
    least = _LEAST_COLUMNS

    def items(self, workload: Workload[ByIndicesParams]) -> int:
        return map_of(workload).run

    def kernel(self, workload: Workload[ByIndicesParams], target: Target, config: Config) -> KernelSource:
        m, arrays, threads = map_of(workload), arrays_of(workload), config["threads"]
        views = _bits(arrays["x"]), _bits(arrays["y"])
        size = workload.outputs[0].size
        shares = -(-size // 4096)
        steps = [KernelStep(_copy_kernel(size), views, Grid(shares), min(threads, shares), restores=True)]
        moved = workload.params.reduction == "none"
        params: tuple[Param, ...] = (
            arrays["indices"], arrays["indices_extents"], arrays["x_extents"],
            *(_bits(arrays[name]) if moved else arrays[name] for name in ("updates", "y")), arrays["y_extents"], WRONG,
        )  # fmt: skip
        columns = -(-m.run // threads)
        items = -(-m.run // columns)
        steps.append(KernelStep(scatter_kernel(workload, m, columns), params, Grid(items), items))
        return KernelSource("cpu", "native", tuple(steps))


def gather_kernel(workload: Workload[ByIndicesParams], m: IndexMap, rows: int) -> Callable[..., None]:
    """The kernel (x, indices, indices_extents, x_extents, y, y_extents, wrong_index, start, stop) over groups of rows."""
    p = workload.params
    find, counts, run, all_rows = finder(m, p.dynamic_x), counter(m, p.dynamic), m.run, m.rows
    note, write_extents, bounded = noter(m, p.dynamic_x, note_index), extents_writer(workload), p.dynamic or p.dynamic_x

    def gather(
        x: Any, indices: Any, indices_extents: Any, x_extents: Any, y: Any, y_extents: Any, wrong_index: Any, start: Any,
        stop: Any,
    ) -> None:  # fmt: skip
        if bounded and start == 0:
            write_extents(indices_extents, x_extents, y_extents)
        for row in range(start * rows, min(stop * rows, all_rows)):
            if counts(row, indices_extents):
                found, inside = find(row, indices, x_extents)
                to, source = i64(row * run), i64(found * run)
                if inside:
                    for i in range(run):
                        y[to + i] = x[source + i]
                else:
                    note(row, indices, x_extents, wrong_index)
                    for i in range(run):
                        y[to + i] = 0

    return gather


def scatter_kernel(workload: Workload[ByIndicesParams], m: IndexMap, columns: int) -> Callable[..., None]:
    """The kernel (indices, indices_extents, x_extents, updates, y, y_extents, wrong_index, start, stop) over groups of
    columns."""
    p = workload.params
    find, counts, run, rows = finder(m, p.dynamic_x), counter(m, p.dynamic), m.run, m.rows
    note, write_extents, bounded = noter(m, p.dynamic_x, note_index), extents_writer(workload), p.dynamic_x
    combine = _COMBINE[p.reduction]

    def scatter(
        indices: Any, indices_extents: Any, x_extents: Any, updates: Any, y: Any, y_extents: Any, wrong_index: Any,
        start: Any, stop: Any,
    ) -> None:  # fmt: skip
        if bounded and start == 0:
            write_extents(indices_extents, x_extents, y_extents)
        for row in range(rows):
            if counts(row, indices_extents):
                found, inside = find(row, indices, x_extents)
                if inside:
                    to, source = i64(found * run), i64(row) * run
                    for i in range(start * columns, min(stop * columns, run)):
                        y[to + i] = combine(y[to + i], updates[source + i])
                else:
                    note(row, indices, x_extents, wrong_index)

    return scatter


def _copy_kernel(size: int) -> Callable[..., None]:
    def copy(x: Any, y: Any, start: Any, stop: Any) -> None:
        for at in range(start * 4096, min(stop * 4096, size)):
            y[at] = x[at]

    return copy


def _replaced(old: Any, new: Any) -> Any:
    return new


def _added(old: Any, new: Any) -> Any:
    return old + new


def _larger(old: Any, new: Any) -> Any:
    return max(old, new)


def _smaller(old: Any, new: Any) -> Any:
    return min(old, new)


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {"none": _replaced, "add": _added, "max": _larger, "min": _smaller}


def _bits(array: NumbaArray) -> NumbaArray:
    """The same elements as integers: Numba on a CPU has no float16."""
    word = {1: "uint8", 2: "uint16", 4: "int32", 8: "int64"}[dtype_of(array.dtype).nbytes]
    return NumbaArray(array.buffer, word, array.shape, array.strides_bytes)
