"""Comparisons of whole arrays where they lie: outputs against the reference, and memory against what it should hold."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from schedsearch.backend import compile_source
from schedsearch.device import Device, LoadedKernel
from schedsearch.launch import Artifact, Grid, Int64, Param, Pointer, Scalar
from schedsearch.measure.inputs import Array, decode
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.template import KernelSource, KernelStep

# Relative error of rounding to nearest, half a unit in the last place: 2 ** -(bits of the significand).
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
# What a tiny result may be off by: the smallest subnormal.
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149}
_FP32_ROUNDOFF = 2.0**-24


@dataclass(frozen=True)
class Tolerance:
    """|y - ref| <= output |ref| + min(accumulation x magnitude, limit) + smallest.

    Attributes:
        output: unit roundoff of y's format; allows exactly the rounding to nearest.
        accumulation: K 2^-24 for K fp32 additions; it is multiplied by magnitude = sum |x| |weight|.
        limit: on exact data half of the smallest product, so that one missing product shows; else infinite.
        smallest: of y's format.
    """

    output: float
    accumulation: float
    limit: float
    smallest: float

    @classmethod
    def of(cls, dtype: str, reduction_length: int, *, exact: bool) -> Tolerance:
        """For outputs of `dtype`; `exact`: the inputs are whole numbers whose sums are exact in fp32."""
        limit = 0.5 if exact else math.inf
        return cls(UNIT_ROUNDOFF[dtype], reduction_length * _FP32_ROUNDOFF, limit, SMALLEST[dtype])


@dataclass(frozen=True)
class Difference:
    """What a comparison found. A NaN where the reference has none is a violation.

    Attributes:
        violations: elements beyond the tolerance.
        max_error: largest |y - reference|, NaNs left out.
        first: flat index of the first violation, or None.
    """

    violations: int
    max_error: float
    first: int | None


class Comparer(Protocol):
    def output(self, y: int, reference: int, magnitude: int, size: int, dtype: str, tolerance: Tolerance) -> Difference:
        """Compares `size` elements of `dtype` at address y with float64 at the other two."""

    def words(self, memory: int, expected: int, nbytes: int) -> tuple[int, int | None]:
        """(number of 32-bit words that differ, byte offset of the first); `nbytes` is a multiple of 4."""

    def close(self) -> None: ...


class CodeCache:
    """Compiled helper kernels by name. The parent keeps a copy, so that a respawned child compiles none of them again."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._known: dict[str, Artifact] = {}
        self._fresh: dict[str, Artifact] = {}

    def learn(self, known: Mapping[str, Artifact]) -> None:
        """Takes over what an earlier process compiled."""
        self._known.update(known)

    def get(self, key: str, source: Callable[[], KernelSource]) -> Artifact:
        """The artifact of this name; compiled from `source()` the first time."""
        if key not in self._known:
            self._known[key] = self._fresh[key] = compile_source(source(), self._device.target).artifact
        return self._known[key]

    def take_fresh(self) -> dict[str, Artifact]:
        """What was compiled here since the last call."""
        fresh, self._fresh = self._fresh, {}
        return fresh


def open_comparer(device: Device, code: CodeCache) -> Comparer:
    return CudaComparer(device, code) if device.target.kind == "cuda" else CpuComparer()


class CpuComparer:
    """NumPy on the memory itself, in pieces that stay in the cache."""

    _PIECE = 1 << 18

    def output(self, y: int, reference: int, magnitude: int, size: int, dtype: str, tolerance: Tolerance) -> Difference:
        got = decode(_bytes_at(y, size * dtype_of(dtype).nbytes), dtype)
        expected, bound = (_bytes_at(address, size * 8).view(np.float64) for address in (reference, magnitude))
        violations, max_error, first = 0, 0.0, None
        for start in range(0, size, self._PIECE):
            piece = slice(start, start + self._PIECE)
            with np.errstate(invalid="ignore", over="ignore"):
                error = np.abs(got[piece].astype(np.float64) - expected[piece])
                allowed = (
                    tolerance.output * np.abs(expected[piece])
                    + np.minimum(tolerance.accumulation * bound[piece], tolerance.limit)
                    + tolerance.smallest
                )
                wrong = ~(error <= allowed)
            count = int(np.count_nonzero(wrong))
            if count and first is None:
                first = start + int(np.argmax(wrong))
            violations += count
            max_error = max(max_error, float(np.nanmax(error, initial=0.0)))
        return Difference(violations, max_error, first)

    def words(self, memory: int, expected: int, nbytes: int) -> tuple[int, int | None]:
        different = _bytes_at(memory, nbytes).view(np.uint32) != _bytes_at(expected, nbytes).view(np.uint32)
        count = int(np.count_nonzero(different))
        return count, 4 * int(np.argmax(different)) if count else None

    def close(self) -> None:
        pass


def _bytes_at(address: int, nbytes: int) -> Array:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class CudaComparer:
    """Two kernels that reduce into 24 bytes: a count, the bits of the largest error, the first index."""

    def __init__(self, device: Device, code: CodeCache) -> None:
        self._device, self._code = device, code
        self._result = device.allocate(24)
        self._kernels: dict[tuple[str, int], LoadedKernel] = {}

    def output(self, y: int, reference: int, magnitude: int, size: int, dtype: str, tolerance: Tolerance) -> Difference:
        count, bits, first = self._run(
            self._kernel(f"compare_output {dtype}", size, lambda: _output_source(self._arch, dtype)),
            {"y": y, "reference": reference, "magnitude": magnitude},
            {
                "output": tolerance.output,
                "accumulation": tolerance.accumulation,
                "limit": tolerance.limit,
                "smallest": tolerance.smallest,
            },
        )
        return Difference(count, float(np.uint64(bits).view(np.float64)), first if count else None)

    def words(self, memory: int, expected: int, nbytes: int) -> tuple[int, int | None]:
        kernel = self._kernel("compare_words", nbytes // 4, lambda: _words_source(self._arch))
        count, _, first = self._run(kernel, {"memory": memory, "expected": expected}, {})
        return count, 4 * first if count else None

    def close(self) -> None:
        for kernel in self._kernels.values():
            kernel.close()
        self._device.free(self._result)

    @property
    def _arch(self) -> str:
        major, minor = self._device.target.compute_capability
        return f"sm_{major}{minor}"

    def _kernel(self, name: str, size: int, source: Callable[[], KernelSource]) -> LoadedKernel:
        """Compiled once for all sizes, as the size is a parameter of the plan; loaded once for each."""
        if (name, size) not in self._kernels:
            artifact = self._code.get(name, source)
            (step,) = artifact.plan.steps
            params = tuple(Int64(size) if isinstance(param, Int64) else param for param in step.params)
            plan = replace(artifact.plan, steps=(replace(step, params=params, grid=_grid(size)),))
            self._kernels[name, size] = self._device.load(Artifact(artifact.code, plan))
        return self._kernels[name, size]

    def _run(self, kernel: LoadedKernel, buffers: Mapping[str, int], scalars: Mapping[str, float]) -> tuple[int, int, int]:
        result = np.array([0, 0, 2**64 - 1], np.uint64)
        self._device.copy_in(self._result, result.data)
        kernel.bind({**buffers, "result": self._result}, scalars).launch()
        self._device.synchronize()
        self._device.copy_out(result.data, self._result)
        return int(result[0]), int(result[1]), int(result[2])


_THREADS = 256


def _grid(size: int) -> Grid:
    return Grid(max(1, math.ceil(size / _THREADS)), blocks_per_sm=8)


def _source(arch: str, function: Callable[..., None], params: tuple[Param, ...]) -> KernelSource:
    return KernelSource("cuda", arch, (KernelStep(function, params, _grid(1), _THREADS),))


def _kernel_language() -> tuple[Any, Any, Any]:
    """Numba's `cuda` and `types`, and `device_op`; imported only where kernels are compiled."""
    from numba import cuda, types

    from schedsearch.backend.ops import device_op

    return cuda, types, device_op


def _words_source(arch: str) -> KernelSource:
    cuda, types, device_op = _kernel_language()
    load = device_op("load_u32", "ld.global.b32 $value, [$address];", ins={"address": "u64"}, outs={"value": "u32"})
    report = _report_op(device_op)

    def compare_words(memory: Any, expected: Any, result: Any, count: Any) -> None:
        stride = types.int64(cuda.gridDim.x) * types.int64(_THREADS)
        index = types.int64(cuda.blockIdx.x) * types.int64(_THREADS) + types.int64(cuda.threadIdx.x)
        while index < count:
            if load(memory + types.uint64(4 * index)) != load(expected + types.uint64(4 * index)):
                report(result, index)
            index += stride

    return _source(arch, compare_words, (Pointer("memory"), Pointer("expected"), Pointer("result"), Int64(0)))


def _output_source(arch: str, dtype: str) -> KernelSource:
    cuda, types, device_op = _kernel_language()
    load_f64 = device_op("load_f64", "ld.global.f64 $value, [$address];", ins={"address": "u64"}, outs={"value": "f64"})
    load_y = device_op("load_y", _LOAD_AS_F64[dtype], ins={"address": "u64"}, outs={"value": "f64"})
    raise_maximum = device_op(  # the bits of non-negative doubles are ordered as the doubles are
        "raise_maximum",
        "{ .reg .b64 bits; mov.b64 bits, $error; red.global.max.u64 [$result + 8], bits; }",
        ins={"result": "u64", "error": "f64"},
    )
    report = _report_op(device_op)
    itemsize = dtype_of(dtype).nbytes

    def compare_output(
        y: Any, reference: Any, magnitude: Any, result: Any, size: Any,
        output: Any, accumulation: Any, limit: Any, smallest: Any,
    ) -> None:  # fmt: skip
        stride = types.int64(cuda.gridDim.x) * types.int64(_THREADS)
        index = types.int64(cuda.blockIdx.x) * types.int64(_THREADS) + types.int64(cuda.threadIdx.x)
        largest = types.float64(0.0)
        while index < size:
            expected = load_f64(reference + types.uint64(8 * index))
            error = abs(load_y(y + types.uint64(itemsize * index)) - expected)
            slack = min(types.float64(accumulation) * load_f64(magnitude + types.uint64(8 * index)), types.float64(limit))
            allowed = types.float64(output) * abs(expected) + slack + types.float64(smallest)
            if not error <= allowed:  # also when it is NaN
                report(result, index)
            if error > largest:
                largest = error
            index += stride
        if largest > 0.0:
            raise_maximum(result, largest)

    params = tuple(map(Pointer, ("y", "reference", "magnitude", "result")))
    scalars = tuple(map(Scalar, ("output", "accumulation", "limit", "smallest")))
    return _source(arch, compare_output, (*params, Int64(0), *scalars))


def _report_op(device_op: Callable[..., Any]) -> Any:
    """Counts an element and keeps the lowest index."""
    return device_op(
        "report",
        "red.global.add.u64 [$result], 1; red.global.min.u64 [$result + 16], $index;",
        ins={"result": "u64", "index": "i64"},
    )


_LOAD_AS_F64 = {
    "float16": "{ .reg .b16 h; .reg .f32 f; ld.global.b16 h, [$address]; cvt.f32.f16 f, h; cvt.f64.f32 $value, f; }",
    "bfloat16": "{ .reg .b16 h; .reg .b32 w; .reg .f32 f; ld.global.b16 h, [$address]; cvt.u32.u16 w, h; "
    "shl.b32 w, w, 16; mov.b32 f, w; cvt.f64.f32 $value, f; }",
    "float32": "{ .reg .f32 f; ld.global.f32 f, [$address]; cvt.f64.f32 $value, f; }",
}
