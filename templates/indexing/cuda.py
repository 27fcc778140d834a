"""gather and scatter on NVIDIA GPUs: see docs/kernels/indexing.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from schedsearch.config import Config
from schedsearch.launch import Grid, NumbaArray, Param, Pointer
from schedsearch.launch_rules import MAX_GRID_X
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.index_map import ByIndicesParams, IndexMap, index_map
from schedsearch.ops.params import MAX_INT
from schedsearch.ops.wrong_index import WRONG_INDEX
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Renamed, Template
from schedsearch.templates.indexing import cuda_kernels as kernels
from schedsearch.templates.own_kernel.copies import copy_on_gpu
from schedsearch.workload import Workload

MOST_BYTES = 16  # of one access
LANES = tuple(1 << i for i in range(9))
THREADS = (128, 256, 512)
EACH = (1, 2, 4)
_COPY_THREADS = 256
WRONG = Pointer(WRONG_INDEX, optional=True)


class _RowsCuda(Template[ByIndicesParams]):
    """`lanes` threads share a row of neighbours, `each` rows at a time, and move it in vectors."""

    kind = "cuda"
    renamed: ClassVar[Renamed] = {"vector": "vector_bytes"}

    def validate(self, workload: Workload[ByIndicesParams], target: Target) -> str | None:
        m = map_of(workload)
        if m.rows > MAX_GRID_X:
            return f"indices choose {m.rows} rows; allowed: less than 2**31"
        return None

    def space(self, workload: Workload[ByIndicesParams], target: Target) -> ConfigSpace:
        m, vectors = map_of(workload), self._vectors(workload)
        longest = m.run * dtype_of(workload.params.dtype).nbytes // vectors[-1]
        knobs = (
            Knob("vector_bytes", vectors, "bytes of an access"),
            Knob("lanes", tuple(n for n in LANES if n < 2 * longest) or (1,), "threads that share a row"),
            Knob("each", EACH, "rows of a thread, whose loads are in flight together"),
            Knob("threads", THREADS, "threads of a block"),
        )
        return ConfigSpace(knobs, (Constraint("a block has whole rows", lambda k: k["lanes"] <= k["threads"]),))

    def default(self, workload: Workload[ByIndicesParams], target: Target, space: ConfigSpace) -> Config:
        """The widest accesses, a thread for each of a row, up to a warp; several rows where there are many."""
        m, values = map_of(workload), space.values
        vector = values["vector_bytes"][-1]
        wanted = min(m.run * dtype_of(workload.params.dtype).nbytes // vector, 32)
        lanes = min((n for n in values["lanes"] if n >= wanted), default=values["lanes"][-1])
        busy = target.sms * 2048
        each = max(n for n in EACH if n == 1 or m.rows * lanes >= 2 * n * busy)
        return Config(vector_bytes=vector, lanes=lanes, each=each, threads=256)

    def _vectors(self, workload: Workload[ByIndicesParams]) -> tuple[int, ...]:
        """Bytes of an access that divide those of a row."""
        element = dtype_of(workload.params.dtype).nbytes
        widest = math.gcd(map_of(workload).run * element, MOST_BYTES)
        return tuple(n for n in (1, 2, 4, 8, 16) if element <= n <= widest)


class GatherCuda(_RowsCuda):
    name = "gather_cuda"
    version = 3
    op = "gather"

    def kernel(self, workload: Workload[ByIndicesParams], target: Target, config: Config) -> KernelSource:
        m, arrays = map_of(workload), arrays_of(workload)
        params = (
            Pointer("x"), arrays["indices"], arrays["indices_extents"], arrays["x_extents"], Pointer("y"),
            arrays["y_extents"], WRONG,
        )  # fmt: skip
        shape = (config[name] for name in ("vector_bytes", "lanes", "each", "threads"))
        function = kernels.gather_kernel(workload, m, *shape)
        step = KernelStep(function, params, _grid(m, config), config["threads"])
        return KernelSource("cuda", "native", (step,), alignments=dict.fromkeys(("x", "y"), config["vector_bytes"]))


class ScatterCuda(_RowsCuda):
    name = "scatter_cuda"
    version = 3
    op = "scatter"

    def validate(self, workload: Workload[ByIndicesParams], target: Target) -> str | None:
        if problem := super().validate(workload, target):
            return problem
        words = _copied(workload)[2]
        return None if words <= MAX_INT * _COPY_THREADS else f"x has {words} words; allowed: less than 2**39"

    def _vectors(self, workload: Workload[ByIndicesParams]) -> tuple[int, ...]:
        """Combined elements are updated one by one."""
        return super()._vectors(workload)[: 1 if workload.params.reduction != "none" else None]

    def kernel(self, workload: Workload[ByIndicesParams], target: Target, config: Config) -> KernelSource:
        m, arrays = map_of(workload), arrays_of(workload)
        word, size, words = _copied(workload)
        views = tuple(NumbaArray(name, word, (words,), (size,)) for name in ("x", "y"))
        steps = [KernelStep(copy_on_gpu, views, Grid(-(-words // _COPY_THREADS)), _COPY_THREADS, restores=True)]
        shape = config["lanes"], config["each"], config["threads"]
        if workload.params.reduction != "none":
            params: tuple[Param, ...] = (
                *(arrays[name] for name in ("indices", "indices_extents", "x_extents", "updates", "y", "y_extents")),
                WRONG,
            )
            function = kernels.combine_kernel(workload, m, *shape)
            steps.append(KernelStep(function, params, _grid(m, config), config["threads"]))
            return KernelSource("cuda", "native", tuple(steps))
        last = NumbaArray("last", "int32", (m.targets,), (4,))
        steps.append(KernelStep(kernels.fill_kernel(m.targets), (last,), Grid(-(-m.targets // 256)), 256))
        read = arrays["indices"], arrays["indices_extents"], arrays["x_extents"]
        marking = (*read, last, arrays["y_extents"], WRONG)
        steps.append(KernelStep(kernels.mark_kernel(workload, m), marking, Grid(-(-m.rows // 256)), 256))
        params = (Pointer("updates"), *read, last, Pointer("y"))
        function = kernels.replace_kernel(workload, m, config["vector_bytes"], *shape)
        steps.append(KernelStep(function, params, _grid(m, config), config["threads"]))
        alignments = dict.fromkeys(("updates", "y"), config["vector_bytes"])
        return KernelSource("cuda", "native", tuple(steps), {"last": 4 * m.targets}, alignments)


def map_of(workload: Workload[ByIndicesParams]) -> IndexMap:
    return index_map(workload.params)


class _Absent(dict[str, NumbaArray]):
    """Arrays by name; those that a workload lacks are stood in for by its indices, which no kernel then reads or writes."""

    def __missing__(self, name: str) -> NumbaArray:
        return self["indices"]


def arrays_of(workload: Workload[ByIndicesParams]) -> Mapping[str, NumbaArray]:
    """The arguments and outputs as flat arrays of Numba; 16-bit floats and shorter ones as their bits."""
    found = _Absent()
    for spec in (*workload.signature, *workload.outputs):
        row = dtype_of(spec.dtype)
        found[spec.name] = NumbaArray(spec.name, row.storage, (spec.size,), (row.nbytes,))
    return found


def _grid(m: IndexMap, config: Config) -> Grid:
    return Grid(-(-m.rows // (config["threads"] // config["lanes"] * config["each"])))


_WORDS = ("int64", "int32", "uint16", "uint8")


def _copied(workload: Workload[ByIndicesParams]) -> tuple[str, int, int]:
    """The words in which x is copied: their dtype, bytes and number."""
    nbytes: int = workload.outputs[0].nbytes
    word = next(name for name in _WORDS if nbytes % dtype_of(name).nbytes == 0)
    return word, dtype_of(word).nbytes, nbytes // dtype_of(word).nbytes
