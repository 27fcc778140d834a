"""Candidates that misbehave, one template each, for the fault tests. All run 1x1 convolutions of float32 NHWC.

`PointwiseCpu` and `PointwiseCuda` are right. The others copy them and have one fault each.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from schedsearch.config import Config
from schedsearch.launch import Grid, Int64, Pointer
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.workload import Workload

CPU_BUFFERS = (Pointer("x"), Pointer("weight"), Pointer("y"))


def shape_of(workload: Workload) -> tuple[int, int, int]:
    """Pixels, input channels, output channels."""
    return workload.output.size // workload.k, workload.c, workload.k


class _Pointwise(Template):
    op = "conv2d"

    def validate(self, workload: Workload, target: Target) -> str | None:
        fits = (workload.r, workload.s, workload.stride, workload.padding) == (1, 1, (1, 1), (0, 0, 0, 0))
        plain = (workload.dtype, workload.layout, workload.epilogue, workload.groups) == ("float32", "NHWC", (), 1)
        return None if fits and plain else "only plain 1x1 float32 NHWC convolutions"

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        return ConfigSpace([Knob("step", (1, 2, 4, 8), "input channels per step of the loop")])

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        return Config(step=1)


class PointwiseCpu(_Pointwise):
    name = "pointwise_cpu"
    kind = "cpu"

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        return self._source(workload, self._function(workload, config))

    def _source(self, workload: Workload, function: Any, workspaces: dict[str, int] | None = None) -> KernelSource:
        params = (*CPU_BUFFERS, *map(Pointer, workspaces or {}))
        step = KernelStep(function, params, Grid(shape_of(workload)[0]), block_threads=1)
        return KernelSource("cpu", "native", (step,), workspaces=workspaces or {})

    def _function(self, workload: Workload, config: Config) -> Any:
        return pointwise_function(workload, config["step"])


class CommonPieceCpu(PointwiseCpu):
    """Candidates of step 1 and 2 have a piece in common, which takes until the file exists that the variable names."""

    name = "common_piece_cpu"
    DONE = "COMMON_PIECE_IS_DONE"

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        from schedsearch.backend.sharing import Key, piece

        def make() -> bytes:
            ends_s = time.monotonic() + 60
            while not Path(os.environ[self.DONE]).exists() and time.monotonic() < ends_s:
                time.sleep(0.01)
            return b"made"

        if config["step"] <= 2:
            piece(Key("0" * 64, lasting=False), make)
        return super().kernel(workload, target, config)


def pointwise_function(workload: Workload, step: int, channels: int | None = None) -> Any:
    from numba import types

    from schedsearch.backend.cpu_ops import as_array

    m, c, k = shape_of(workload)
    used = (c if channels is None else channels) // step

    def pointwise(x_at: Any, w_at: Any, y_at: Any, start: Any, stop: Any) -> None:
        x, w, y = (
            as_array(x_at, (m, c), types.float32),
            as_array(w_at, (k, c), types.float32),
            as_array(y_at, (m, k), types.float32),
        )
        for i in range(start, stop):
            for j in range(k):
                total = types.float32(0.0)
                for s in range(used):
                    for t in range(step):
                        total += x[i, s * step + t] * w[j, s * step + t]
                y[i, j] = total

    return pointwise


class PackedCpu(PointwiseCpu):
    """Right: one step copies the weight into a workspace, and the next step multiplies from there."""

    name = "packed_cpu"
    constant = "weight"  # the argument that the constant step reads

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        from numba import types

        from schedsearch.backend.cpu_ops import as_array

        _, c, k = shape_of(workload)

        def pack(w_at: Any, packed_at: Any, start: Any, stop: Any) -> None:
            w, packed = as_array(w_at, (c * k,), types.float32), as_array(packed_at, (c * k,), types.float32)
            for i in range(start, stop):
                packed[i] = w[i]

        (multiply,) = super().kernel(workload, target, config).steps
        packed = Pointer("packed")
        steps = (
            KernelStep(pack, (Pointer(self.constant), packed), Grid(c * k), block_threads=1, constant=True),
            replace(multiply, params=(Pointer("x"), packed, Pointer("y"))),
        )
        return KernelSource("cpu", "native", steps, workspaces={"packed": 4 * c * k})


class FalseConstantCpu(PackedCpu):
    """Marks a step as constant although it reads x."""

    name = "false_constant_cpu"
    constant = "x"


class AbortInBuilder(PointwiseCpu):
    name = "abort_in_builder"

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        os.abort()


class EndlessCompile(PointwiseCpu):
    name = "endless_compile"

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        while True:
            time.sleep(60.0)


class RaisingTemplate(PointwiseCpu):
    name = "raising_template"

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        raise ZeroDivisionError("a tile of no elements")


class Untypable(PointwiseCpu):
    name = "untypable"

    def _function(self, workload: Workload, config: Config) -> Any:
        def untypable(x_at: Any, w_at: Any, y_at: Any, start: Any, stop: Any) -> None:
            x_at.no_such_attribute()

        return untypable


class MissingProduct(PointwiseCpu):
    """Leaves out the last input channel."""

    name = "missing_product"

    def _function(self, workload: Workload, config: Config) -> Any:
        return pointwise_function(workload, 1, channels=workload.c - 1)


class _StrayWrite(PointwiseCpu):
    """Right, except that it writes one forbidden element, at y + `where(workload)` elements."""

    @staticmethod
    def where(workload: Workload) -> int:
        raise NotImplementedError

    def _function(self, workload: Workload, config: Config) -> Any:
        from numba import types

        from schedsearch.backend.cpu_ops import as_array

        right = pointwise_function(workload, 1)
        offset = 4 * self.where(workload)

        def stray_write(x_at: Any, w_at: Any, y_at: Any, start: Any, stop: Any) -> None:
            right(x_at, w_at, y_at, start, stop)
            as_array(types.uint64(types.int64(y_at) + offset), (1,), types.float32)[0] = types.float32(77.0)  # no input

        return stray_write


class WriteAfterEnd(_StrayWrite):
    name = "write_after_end"

    @staticmethod
    def where(workload: Workload) -> int:
        return workload.output.size


class WriteBeforeStart(_StrayWrite):
    name = "write_before_start"

    @staticmethod
    def where(workload: Workload) -> int:
        return -1


class UnwrittenRow(PointwiseCpu):
    """Never computes the last pixel."""

    name = "unwritten_row"

    def _source(self, workload: Workload, function: Any, workspaces: dict[str, int] | None = None) -> KernelSource:
        step = KernelStep(function, CPU_BUFFERS, Grid(shape_of(workload)[0] - 1), block_threads=1)
        return KernelSource("cpu", "native", (step,))


class NullWrite(PointwiseCpu):
    """Writes to address 8."""

    name = "null_write"

    def _function(self, workload: Workload, config: Config) -> Any:
        from numba import types

        from schedsearch.backend.cpu_ops import as_array

        def null_write(x_at: Any, w_at: Any, y_at: Any, start: Any, stop: Any) -> None:
            as_array(types.uint64(8), (1,), types.float32)[0] = types.float32(1.0)

        return null_write


class EndlessKernel(PointwiseCpu):
    name = "endless_kernel"

    def _function(self, workload: Workload, config: Config) -> Any:
        from numba import types

        from schedsearch.backend.cpu_ops import as_array

        def endless(x_at: Any, w_at: Any, y_at: Any, start: Any, stop: Any) -> None:
            y = as_array(y_at, (1,), types.float32)
            while True:
                y[0] += types.float32(1.0)

        return endless


class WrongWhenHot(PointwiseCpu):
    """Right for the first launches after loading and wrong from the 30th on, like a data race. It counts in a workspace."""

    name = "wrong_when_hot"

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        from numba import types

        from schedsearch.backend.cpu_ops import as_array

        right = pointwise_function(workload, 1)

        def wrong_when_hot(x_at: Any, w_at: Any, y_at: Any, count_at: Any, start: Any, stop: Any) -> None:
            count = as_array(count_at, (1,), types.int64)
            right(x_at, w_at, y_at, start, stop)
            count[0] += 1
            if count[0] > 30:
                as_array(y_at, (1,), types.float32)[0] += types.float32(1.0)

        return self._source(workload, wrong_when_hot, {"count": 8})


class PointwiseCuda(_Pointwise):
    """One thread per output element."""

    name = "pointwise_cuda"
    kind = "cuda"
    fault = ""

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        m, _, k = shape_of(workload)
        params = (Pointer("x"), Pointer("weight"), Pointer("y"), Int64(m * k))
        step = KernelStep(self._function(workload), params, Grid(-(-m * k // 128)), 128)
        return KernelSource("cuda", "native", (step,))

    def _function(self, workload: Workload) -> Any:
        from numba import cuda, types

        from schedsearch.backend.ops import device_op

        load = device_op("load", "ld.global.f32 $value, [$address];", ins={"address": "u64"}, outs={"value": "f32"})
        store = device_op("store", "st.global.f32 [$address], $value;", ins={"address": "u64", "value": "f32"})
        _, c, k = shape_of(workload)
        used = c - 1 if self.fault == "missing product" else c
        address = 64 if self.fault == "illegal address" else 0
        endless = self.fault == "endless"
        offset = {"write after end": 4 * workload.output.size, "write before start": -4}.get(self.fault, 0)

        def pointwise(x: Any, w: Any, y: Any, size: Any) -> None:
            index = types.int64(cuda.blockIdx.x) * types.int64(128) + types.int64(cuda.threadIdx.x)
            if index >= size:
                return
            i, j = index // types.int64(k), index % types.int64(k)
            total = types.float32(0.0)
            for s in range(used):
                total += load(x + types.uint64(4 * (i * c + s))) * load(w + types.uint64(4 * (j * c + s)))
            store(y + types.uint64(4 * index), total)
            if address:
                store(types.uint64(address), total)
            if offset and index == 0:
                store(types.uint64(types.int64(y) + types.int64(offset)), types.float32(77.0))
            while endless and load(x) < types.float32(1e30):  # a condition that is known only on the device
                store(y + types.uint64(4 * index), total)

        return pointwise


class MissingProductCuda(PointwiseCuda):
    name = "missing_product_cuda"
    fault = "missing product"


class IllegalAddressCuda(PointwiseCuda):
    name = "illegal_address_cuda"
    fault = "illegal address"


class EndlessCuda(PointwiseCuda):
    name = "endless_cuda"
    fault = "endless"


class WriteAfterEndCuda(PointwiseCuda):
    name = "write_after_end_cuda"
    fault = "write after end"


class WriteBeforeStartCuda(PointwiseCuda):
    name = "write_before_start_cuda"
    fault = "write before start"


class _Minefield(Template):
    """The knob `fault` chooses the template above that makes a configuration."""

    templates: ClassVar[dict[str, Template]]
    op = "conv2d"

    def validate(self, workload: Workload, target: Target) -> str | None:
        return self.templates["none"].validate(workload, target)

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        return ConfigSpace([Knob("fault", tuple(self.templates)), Knob("step", (1, 2))])

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        return Config(fault="none", step=1)

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        return self.templates[config["fault"]].kernel(workload, target, Config(step=config["step"]))


class MinefieldCpu(_Minefield):
    name = "minefield_cpu"
    kind = "cpu"
    templates: ClassVar[dict[str, Template]] = {
        "none": PointwiseCpu(),
        "abort": AbortInBuilder(),
        "endless compile": EndlessCompile(),
        "raise": RaisingTemplate(),
        "untypable": Untypable(),
        "wrong": MissingProduct(),
        "unwritten": UnwrittenRow(),
        "stray": WriteAfterEnd(),
        "crash": NullWrite(),
        "hang": EndlessKernel(),
    }


class MinefieldCuda(_Minefield):
    name = "minefield_cuda"
    kind = "cuda"
    templates: ClassVar[dict[str, Template]] = {
        "none": PointwiseCuda(),
        "abort": AbortInBuilder(),
        "endless compile": EndlessCompile(),
        "raise": RaisingTemplate(),
        "wrong": MissingProductCuda(),
        "stray": WriteAfterEndCuda(),
        "crash": IllegalAddressCuda(),
        "hang": EndlessCuda(),
    }
