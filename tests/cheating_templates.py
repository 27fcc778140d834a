"""Candidates that are right when they are verified the plain way, and wrong later. One template each, for 1x1 convolutions.

`CPU` and `CUDA` list them by what they do. `faulty_templates.PointwiseCpu` and `PointwiseCuda` are right.
"""

from __future__ import annotations

from typing import Any, ClassVar

from faulty_templates import PointwiseCpu, PointwiseCuda, pointwise_function, shape_of

from schedsearch.config import Config
from schedsearch.launch import Grid, Int64, Pointer
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.workload import Workload

LATE = 200  # launches after which a kernel goes wrong
_SLOTS = 64  # pairs of addresses that a kernel remembers
_MAGIC = 0x5EED


def workspace_bytes(fault: str, workload: Workload) -> int:
    m, _, k = shape_of(workload)
    return {
        "remembers addresses": 8 * _SLOTS * m * k,
        "copies its previous result": 8 * m * k,
        "wrong after 200 launches": 16,
        "writes behind its workspace": 4 * 3,  # 12 bytes: the guard begins there, not at the next aligned address
        "writes before its workspace": 4 * 3,
        "reads what no launch wrote": 4 * 3,
    }.get(fault, 0)


FAULTS = (
    "skips finite outputs",
    "remembers addresses",
    "copies its previous result",
    "wrong on fractions",
    "wrong after 200 launches",
    "writes behind its workspace",
    "writes before its workspace",
    "reads what no launch wrote",
)


class CheatingCpu(PointwiseCpu):
    """Computes one element after the other, or does what `fault` says."""

    fault: ClassVar[str]

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        nbytes = workspace_bytes(self.fault, workload)
        return self._source(workload, self._function(workload, config), {"space": nbytes} if nbytes else None)

    def _function(self, workload: Workload, config: Config) -> Any:
        from numba import types

        from schedsearch.backend.cpu_ops import as_array

        m, c, k = shape_of(workload)
        fault, slots, late, magic = self.fault, _SLOTS, LATE, _MAGIC
        right = pointwise_function(workload, 1)

        def skips(x_at: Any, w_at: Any, y_at: Any, start: Any, stop: Any) -> None:
            x, y = as_array(x_at, (m, c), types.float32), as_array(y_at, (m, k), types.float32)
            for i in range(start, stop):
                if fault == "wrong on fractions":
                    needed = x[i, 0] == types.float32(types.int64(x[i, 0]))
                else:
                    needed = not abs(y[i, k - 1]) < types.float32(1e30)
                if needed:
                    right(x_at, w_at, y_at, i, i + 1)

        def remembers(x_at: Any, w_at: Any, y_at: Any, space_at: Any, start: Any, stop: Any) -> None:
            seen = as_array(space_at, (slots, m * k), types.uint64)
            for i in range(start, stop):
                slot = (types.int64(y_at) >> 8) % slots
                if seen[slot, i] != x_at ^ y_at:
                    right(x_at, w_at, y_at, i, i + 1)
                    seen[slot, i] = x_at ^ y_at

        def copies(x_at: Any, w_at: Any, y_at: Any, space_at: Any, start: Any, stop: Any) -> None:
            x, y = as_array(x_at, (m, c), types.float32), as_array(y_at, (m, k), types.float32)
            old = as_array(space_at, (2, m, k), types.float32)
            for i in range(start, stop):
                known = old[0, i, 0] == x[i, 0]
                if not known:
                    right(x_at, w_at, y_at, i, i + 1)
                old[0, i, 0] = x[i, 0]
                for j in range(k):
                    if known:
                        y[i, j] = old[1, i, j]
                    else:
                        old[1, i, j] = y[i, j]

        def goes_wrong(x_at: Any, w_at: Any, y_at: Any, space_at: Any, start: Any, stop: Any) -> None:
            count, y = as_array(space_at, (2,), types.int64), as_array(y_at, (m, k), types.float32)
            right(x_at, w_at, y_at, start, stop)
            if count[1] != magic:
                count[0], count[1] = 0, magic
            count[0] += 1
            if count[0] > late:
                y[0, 0] += types.float32(1.0)

        offset = {"writes behind its workspace": 12, "writes before its workspace": -4}.get(fault, 0)

        def strays(x_at: Any, w_at: Any, y_at: Any, space_at: Any, start: Any, stop: Any) -> None:
            right(x_at, w_at, y_at, start, stop)
            as_array(types.uint64(types.int64(space_at) + offset), (1,), types.float32)[0] = types.float32(77.0)

        def trusts(x_at: Any, w_at: Any, y_at: Any, space_at: Any, start: Any, stop: Any) -> None:
            space, y = as_array(space_at, (3,), types.float32), as_array(y_at, (m, k), types.float32)
            right(x_at, w_at, y_at, start, stop)
            y[0, 0] = max(y[0, 0], space[2])  # a maximum ignores NaN

        return {
            "skips finite outputs": skips,
            "wrong on fractions": skips,
            "remembers addresses": remembers,
            "copies its previous result": copies,
            "wrong after 200 launches": goes_wrong,
            "writes behind its workspace": strays,
            "writes before its workspace": strays,
            "reads what no launch wrote": trusts,
        }[fault]


class CheatingCuda(PointwiseCuda):
    """The same, one thread for each output element."""

    fault: ClassVar[str]

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        m, _, k = shape_of(workload)
        nbytes = workspace_bytes(self.fault, workload)
        params = (Pointer("x"), Pointer("weight"), Pointer("y"), Pointer("space", optional=not nbytes), Int64(m * k))
        step = KernelStep(self._function(workload), params, Grid(-(-m * k // 128)), 128)
        return KernelSource("cuda", "native", (step,), workspaces={"space": nbytes} if nbytes else {})

    def _function(self, workload: Workload) -> Any:
        from numba import cuda, types

        from schedsearch.backend.ops import device_op

        load = device_op("load", "ld.global.f32 $value, [$address];", ins={"address": "u64"}, outs={"value": "f32"})
        store = device_op("store", "st.global.f32 [$address], $value;", ins={"address": "u64", "value": "f32"})
        load_u64 = device_op("load_u64", "ld.global.u64 $value, [$address];", ins={"address": "u64"}, outs={"value": "u64"})
        store_u64 = device_op("store_u64", "st.global.u64 [$address], $value;", ins={"address": "u64", "value": "u64"})
        m, c, k = shape_of(workload)
        fault, size, slots, late, magic = self.fault, m * k, _SLOTS, LATE, _MAGIC
        finite, fractions = fault == "skips finite outputs", fault == "wrong on fractions"
        remembers, copies = fault == "remembers addresses", fault == "copies its previous result"
        counts, trusts = fault == "wrong after 200 launches", fault == "reads what no launch wrote"
        offset = {"writes behind its workspace": 12, "writes before its workspace": -4}.get(fault, 0)

        def cheats(x: Any, w: Any, y: Any, space: Any, count: Any) -> None:
            index = types.int64(cuda.blockIdx.x) * types.int64(128) + types.int64(cuda.threadIdx.x)
            if index >= count:
                return
            i, j = index // types.int64(k), index % types.int64(k)
            first = load(x + types.uint64(4 * i * c))
            mine = y + types.uint64(4 * index)
            if finite and abs(load(mine)) < types.float32(1e30):
                return
            if fractions and first != types.float32(types.int64(first)):
                return
            slot = space + types.uint64(8) * types.uint64((types.int64(y) >> types.int64(8)) % slots * size + index)
            if remembers and load_u64(slot) == x ^ y:
                return
            if copies and load(space + types.uint64(8 * index)) == first:
                store(mine, load(space + types.uint64(8 * index + 4)))
                return
            total = types.float32(0.0)
            for s in range(c):
                total += load(x + types.uint64(4 * (i * c + s))) * load(w + types.uint64(4 * (j * c + s)))
            if trusts and index == 0:
                total = max(total, load(space + types.uint64(8)))
            if counts and index == 0:
                launches = load_u64(space) if load_u64(space + types.uint64(8)) == types.uint64(magic) else types.uint64(0)
                store_u64(space, launches + types.uint64(1))
                store_u64(space + types.uint64(8), types.uint64(magic))
                if launches >= types.uint64(late):
                    total += types.float32(1.0)
            store(mine, total)
            if remembers:
                store_u64(slot, x ^ y)
            if copies:
                store(space + types.uint64(8 * index), first)
                store(space + types.uint64(8 * index + 4), total)
            if offset and index == 0:
                store(types.uint64(types.int64(space) + types.int64(offset)), types.float32(77.0))

        return cheats


def _templates(base: Any, suffix: str) -> dict[str, Template]:
    names = {fault: "".join(word.capitalize() for word in fault.split()) for fault in FAULTS}
    attributes = {fault: {"fault": fault, "name": f"{fault.replace(' ', '_')}_{suffix}"} for fault in FAULTS}
    return {fault: type(names[fault] + suffix.capitalize(), (base,), attributes[fault])() for fault in FAULTS}


CPU: dict[str, Template] = _templates(CheatingCpu, "cpu")
CUDA: dict[str, Template] = _templates(CheatingCuda, "cuda")
