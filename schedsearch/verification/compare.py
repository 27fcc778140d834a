"""Compares whole arrays in device memory: outputs with the reference, and memory with its expected content."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np

from schedsearch.backend import BuildResult
from schedsearch.backend.code_cache import CodeCache
from schedsearch.backend.kept import compile_kept
from schedsearch.device import BoundKernel, Device, LoadedKernel
from schedsearch.device.memory import bytes_at
from schedsearch.launch import Artifact, Grid, Int64, Param, Pointer, Scalar
from schedsearch.ops import ArgSpec
from schedsearch.ops.dtypes import DTYPES, decode, dtype
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep
from schedsearch.typed import Array

_FP32_ROUNDOFF = DTYPES["float32"].roundoff
_FP64_ROUNDOFF = DTYPES["float64"].roundoff


# The truth about elements beyond the extents of an output, where `ArgSpec.extents` names them.
UNDEFINED = {"float64": math.nan, "int64": -(2**63)}


def is_undefined(truths: Array) -> Array:
    """Which truths are `UNDEFINED`; bool, in the shape of `truths`."""
    return np.isnan(truths) if truths.dtype.kind == "f" else truths == UNDEFINED["int64"]


@dataclass(frozen=True)
class Tolerance:
    """|y - truth| <= output |truth| + min(accumulation x magnitude, limit) + smallest.

    Attributes:
        output: unit roundoff of y's format; allows exactly the rounding to nearest.
        accumulation: K 2^-24 for K float32 additions; it is multiplied by the reference's magnitude.
        limit: half of what one missing summand changes at least if check inputs make sums exact, so that it shows; otherwise
            infinite.
        smallest: of y's format; half a unit of an integer format.
    """

    output: float
    accumulation: float
    limit: float
    smallest: float

    @classmethod
    def rounded(cls, name: str, reduction: float, *, exact_sums: bool, step: float = 1.0) -> Tolerance:
        """For an output that may be rounded.

        Args:
            name: of its float format.
            reduction: additions in one element.
            exact_sums: the inputs are such that sums are exact.
            step: see `Op.exact_step`; with `exact_sums` only.
        """
        row = dtype(name)
        # float64 outputs are computed in float64, as the reference itself is.
        roundoff = 2 * _FP64_ROUNDOFF if row.roundoff <= _FP64_ROUNDOFF else _FP32_ROUNDOFF
        return cls(row.roundoff, reduction * roundoff, step / 2 if exact_sums else math.inf, row.smallest)

    @classmethod
    def quantised(cls, roundings: int) -> Tolerance:
        """For an integer output that is rounded from a float32, whose truth is not rounded: half a unit, plus what the
        roundings before it may add, but never so much that an integer has no wrong neighbour.

        Args:
            roundings: to float32, before the rounding to an integer.
        """
        return cls(0.0, roundings * _FP32_ROUNDOFF, 0.25, 0.5)


@dataclass(frozen=True)
class Difference:
    """The result of a comparison. A NaN that the reference does not have is a violation.

    Attributes:
        violations: number of elements beyond the tolerance.
        max_error: largest |y - truth|, without NaNs.
        first: flat index of the first violation, or None.
    """

    violations: int
    max_error: float
    first: int | None


@dataclass(frozen=True)
class Truth:
    """The expected content of an output.

    Attributes:
        dtype: of the output.
        size: number of elements.
        address: of `size` float64, or int64 if the output has an integer format and no tolerance.
        magnitude: address of `size` float64 that the tolerance multiplies; unused without a tolerance.
        tolerance: None if the output must equal the truth.
        excused: violations that are no error: on numbers that are not exact, a step function in an epilogue (rounding to an
            integer, say) may fall on the other side for a few elements.
        partial: elements whose truth is `UNDEFINED` are not compared: the output has extents that are known at run time, and
            they lie beyond, or it is `undecided`.
        undecided: see `ArgSpec`; NumPy may have a number where the truth is `UNDEFINED`.
        runs: of the output in memory, see `ArgSpec.runs`; the truth has no gaps. Default: one run.
    """

    dtype: str
    size: int
    address: int
    magnitude: int = 0
    tolerance: Tolerance | None = None
    excused: int = 0
    runs: tuple[int, int] = (1, 1)
    partial: bool = False
    undecided: bool = False

    @property
    def number(self) -> str:
        """The dtype of the numbers at `address`."""
        return "float64" if dtype(self.dtype).is_float or self.tolerance is not None else "int64"


class Comparer(Protocol):
    def output(self, y: int, truth: Truth) -> Difference:
        """Compares the output at address y with the truth."""

    def words(self, memory: int, expected: int, nbytes: int) -> tuple[int, int | None]:
        """(number of 32-bit words that differ, byte offset of the first); `nbytes` is a multiple of 4."""

    def between(self, y: int, spec: ArgSpec, byte: int) -> tuple[int, int | None]:
        """(number of bytes between the runs of a slice at address y that differ from `byte`, offset of the first)."""

    def close(self) -> None: ...


def open_comparer(device: Device, code: CodeCache) -> Comparer:
    return CudaComparer(device, code) if device.target.kind == "cuda" else CpuComparer()


class CpuComparer:
    """Compares with NumPy in the memory itself, in pieces that stay in the cache."""

    _PIECE = 1 << 18

    def output(self, y: int, truth: Truth) -> Difference:
        row = dtype(truth.dtype)
        stored = _runs_at(y, truth.size, truth.runs, row.storage)
        expected = _array_at(truth.address, truth.size, truth.number)
        violations, max_error, first = 0, 0.0, None
        for start in range(0, truth.size, self._PIECE):
            piece = slice(start, start + self._PIECE)
            got, wanted = decode(stored[piece], truth.dtype), expected[piece]
            with np.errstate(invalid="ignore", over="ignore"):
                error = np.abs(got.astype(np.float64) - wanted)
                if truth.tolerance is None:
                    wrong = got != wanted
                else:
                    bound = _array_at(truth.magnitude, truth.size, "float64")[piece]
                    wrong = ~((error <= _allowed(truth.tolerance, wanted, bound)) | (got == wanted))
                if truth.partial:
                    undefined = is_undefined(wanted)
                    wrong, error = wrong & ~undefined, np.where(undefined, 0.0, error)
            count = int(np.count_nonzero(wrong))
            if count and first is None:
                first = start + int(np.argmax(wrong))
            violations += count
            max_error = max(max_error, float(np.nanmax(error, initial=0.0)))
        return Difference(violations, max_error, first)

    def words(self, memory: int, expected: int, nbytes: int) -> tuple[int, int | None]:
        different = _array_at(memory, nbytes // 4, "uint32") != _array_at(expected, nbytes // 4, "uint32")
        count = int(np.count_nonzero(different))
        return count, 4 * int(np.argmax(different)) if count else None

    def between(self, y: int, spec: ArgSpec, byte: int) -> tuple[int, int | None]:
        size, (gaps, run, step) = spec.span_bytes, _gaps(spec)
        offsets = np.arange(gaps * (step - run))
        offsets = offsets // (step - run) * step + run + offsets % (step - run)
        wrong = _array_at(y, size, "uint8")[offsets] != byte
        count = int(np.count_nonzero(wrong))
        return count, int(offsets[np.argmax(wrong)]) if count else None

    def close(self) -> None:
        pass


def _array_at(address: int, size: int, name: str) -> Array:
    return np.frombuffer(bytes_at(address, size * np.dtype(name).itemsize), name)


def _runs_at(address: int, size: int, runs: tuple[int, int], name: str) -> Array:
    """The elements of an array that may be a slice: a copy if it is one."""
    run, step = runs
    if run == step or not size:
        return _array_at(address, size, name)
    count = size // run
    stored = _array_at(address, count * step - (step - run), name)
    return np.lib.stride_tricks.as_strided(stored, (count, run), (step * stored.itemsize, stored.itemsize)).reshape(-1)


def _extents(truth: Truth) -> tuple[int, int, int]:
    """(elements, elements of a run, elements between two runs)."""
    run, step = truth.runs
    return truth.size, max(run, 1), step - run


def _gaps(spec: ArgSpec) -> tuple[int, int, int]:
    """(gaps between the runs of a slice, bytes of a run, bytes from the start of a run to the next)."""
    run, step = spec.runs
    itemsize = dtype(spec.dtype).nbytes
    return max(spec.size // run - 1, 0) if run else 0, run * itemsize, step * itemsize


def _allowed(tolerance: Tolerance, truth: Array, magnitude: Array) -> Array:
    slack: Array = np.minimum(tolerance.accumulation * magnitude, tolerance.limit)
    return tolerance.output * np.abs(truth) + slack + tolerance.smallest


@dataclass(frozen=True)
class Comparison:
    """A kernel of `CudaComparer`, which serves all sizes.

    Attributes:
        kind: `exactly` and `output` compare an output without and with a tolerance.
        dtype, partial: of an output, as in `Truth`.
    """

    kind: Literal["exactly", "output", "words", "between"]
    dtype: str = ""
    partial: bool = False

    @classmethod
    def of(cls, dtype: str, tolerated: bool, partial: bool) -> Comparison:
        """That of an output."""
        return cls("output" if tolerated else "exactly", dtype, partial)

    @property
    def name(self) -> str:
        """The name of its machine code in a `CodeCache`."""
        return " ".join([f"compare_{self.kind}", *filter(None, [self.dtype, "partial" if self.partial else ""])])

    def build(self, target: Target) -> BuildResult:
        """The compiled kernel."""
        if self.kind == "words":
            source = _words_source()
        elif self.kind == "between":
            source = _between_source()
        else:
            source = (_exact_source if self.kind == "exactly" else _output_source)(self.dtype, self.partial)
        return compile_kept(source, target)


WORDS, BETWEEN = Comparison("words"), Comparison("between")


class CudaComparer:
    """Compares with kernels that reduce into 24 bytes: a count, the bits of the largest error, the first index."""

    def __init__(self, device: Device, code: CodeCache) -> None:
        self._device, self._code = device, code
        self._result = device.allocate(24)
        self._kernels: dict[tuple[Comparison, tuple[int, ...]], LoadedKernel] = {}
        self._bound: dict[LoadedKernel, BoundKernel] = {}

    def output(self, y: int, truth: Truth) -> Difference:
        kernel = self._kernel(Comparison.of(truth.dtype, truth.tolerance is not None, truth.partial), _extents(truth))
        buffers = {"y": y, "truth": truth.address}
        if truth.tolerance is None:
            count, bits, first = self._run(kernel, buffers, {})
        else:
            count, bits, first = self._run(kernel, {**buffers, "magnitude": truth.magnitude}, vars(truth.tolerance))
        return Difference(count, float(np.uint64(bits).view(np.float64)), first if count else None)

    def words(self, memory: int, expected: int, nbytes: int) -> tuple[int, int | None]:
        kernel = self._kernel(WORDS, (nbytes // 4,))
        count, _, first = self._run(kernel, {"memory": memory, "expected": expected}, {})
        return count, 4 * first if count else None

    def between(self, y: int, spec: ArgSpec, byte: int) -> tuple[int, int | None]:
        gaps, run, step = _gaps(spec)
        kernel = self._kernel(BETWEEN, (gaps * (step - run), run, step, byte))
        count, _, first = self._run(kernel, {"y": y}, {})
        return count, first if count else None

    def close(self) -> None:
        for kernel in self._kernels.values():
            kernel.close()
        self._device.free(self._result)

    def _kernel(self, comparison: Comparison, numbers: tuple[int, ...]) -> LoadedKernel:
        """Compiled once for all sizes, as the numbers are parameters of the plan; loaded once for each.

        Args:
            numbers: the values of the parameters of 64 bits in their order; the first counts what is compared.
        """
        if (comparison, numbers) not in self._kernels:
            artifact = self._code.get(comparison.name, lambda: comparison.build(self._device.target).artifact)
            (step,) = artifact.plan.steps
            values = iter(numbers)
            params = tuple(Int64(next(values)) if isinstance(param, Int64) else param for param in step.params)
            plan = replace(artifact.plan, steps=(replace(step, params=params, grid=_grid(numbers[0])),))
            self._kernels[comparison, numbers] = self._device.load(Artifact(artifact.code, plan))
        return self._kernels[comparison, numbers]

    def _run(self, kernel: LoadedKernel, buffers: Mapping[str, int], scalars: Mapping[str, float]) -> tuple[int, int, int]:
        result = np.array([0, 0, 2**64 - 1], np.uint64)
        self._device.copy_in(self._result, result.data)
        bound = self._bound.get(kernel)
        if bound is None:
            bound = self._bound[kernel] = kernel.bind({**buffers, "result": self._result}, scalars)
        for name, address in buffers.items():
            bound.set_pointer(name, address)
        for name, value in scalars.items():
            bound.set_scalar(name, value)
        bound.launch()
        self._device.synchronize()
        self._device.copy_out(result.data, self._result)
        return int(result[0]), int(result[1]), int(result[2])


_THREADS = 256


def _grid(size: int) -> Grid:
    return Grid(max(1, math.ceil(size / _THREADS)), blocks_per_sm=8)


def _source(function: Callable[..., None], params: tuple[Param, ...]) -> KernelSource:
    step = KernelStep(function, params, _grid(1), _THREADS, shaped_by=frozenset())  # dtypes share a run of the front end
    return KernelSource("cuda", "native", (step,))


def _words_source() -> KernelSource:
    from numba import types

    at, report = _access(), _report()
    load, first, step = at.load("uint32"), at.first, at.step

    def compare_words(memory: Any, expected: Any, result: Any, count: Any) -> None:
        memory, expected = types.int64(memory), types.int64(expected)
        for index in range(first(), count, step()):
            if load(memory + 4 * index) != load(expected + 4 * index):
                report(result, index)

    return _source(compare_words, (Pointer("memory"), Pointer("expected"), Pointer("result"), Int64(0)))


def _between_source() -> KernelSource:
    from numba import types

    at, report = _access(), _report()
    load, first, next_ = at.load("uint8"), at.first, at.step

    def compare_between(y: Any, result: Any, size: Any, run: Any, step: Any, byte: Any) -> None:
        y, gap = types.int64(y), step - run
        for index in range(first(), size, next_()):
            offset = types.int64(index // gap * step + run + index % gap)
            if load(y + offset) != byte:
                report(result, offset)

    return _source(compare_between, (Pointer("y"), Pointer("result"), *(Int64(1),) * 4))


def _exact_source(name: str, partial: bool) -> KernelSource:
    from numba import types

    at, report, raise_maximum = _access(), _report(), _raise_maximum()
    row = dtype(name)
    load_y, load_truth = at.load(name), at.load("float64" if row.is_float else "int64")
    first, step, itemsize, counts = at.first, at.step, row.nbytes, _counts(row.is_float, partial)

    def compare_exactly(y: Any, truth: Any, result: Any, size: Any, run: Any, gap: Any) -> None:
        y, truth = types.int64(y), types.int64(truth)
        largest = types.float64(0.0)
        for index in range(first(), size, step()):
            got, expected = load_y(y + itemsize * (index + index // run * gap)), load_truth(truth + 8 * index)
            if got != expected and counts(expected):  # also when it is NaN
                report(result, index)
                error = abs(types.float64(got) - types.float64(expected))
                if error > largest:
                    largest = error
        if largest > 0.0:
            raise_maximum(result, largest)

    return _source(compare_exactly, (Pointer("y"), Pointer("truth"), Pointer("result"), *(Int64(1),) * 3))


def _output_source(name: str, partial: bool) -> KernelSource:
    from numba import types

    at, report, raise_maximum = _access(), _report(), _raise_maximum()
    load_y, load_f64 = at.load(name), at.load("float64")
    first, step, itemsize, counts = at.first, at.step, dtype(name).nbytes, _counts(True, partial)

    def compare_output(
        y: Any, truth: Any, magnitude: Any, result: Any, size: Any, run: Any, gap: Any,
        output: Any, accumulation: Any, limit: Any, smallest: Any,
    ) -> None:  # fmt: skip
        y, truth, magnitude = types.int64(y), types.int64(truth), types.int64(magnitude)
        largest = types.float64(0.0)
        for index in range(first(), size, step()):
            got, expected = load_y(y + itemsize * (index + index // run * gap)), load_f64(truth + 8 * index)
            error = abs(got - expected)
            slack = min(types.float64(accumulation) * load_f64(magnitude + 8 * index), types.float64(limit))
            allowed = types.float64(output) * abs(expected) + slack + types.float64(smallest)
            if not (error <= allowed or got == expected) and counts(expected):  # also when it is NaN
                report(result, index)
            if error > largest:
                largest = error
        if largest > 0.0:
            raise_maximum(result, largest)

    params = tuple(map(Pointer, ("y", "truth", "magnitude", "result")))
    scalars = tuple(map(Scalar, ("output", "accumulation", "limit", "smallest")))
    return _source(compare_output, (*params, *(Int64(1),) * 3, *scalars))


def _counts(is_float: bool, partial: bool) -> Callable[[Any], Any]:
    """`counts(expected)` for kernels: whether an element is compared."""
    undefined = UNDEFINED["int64"]

    def every(expected: object) -> Any:
        return True

    def number(expected: Any) -> Any:
        return expected == expected

    def integer(expected: object) -> Any:
        return expected != undefined

    return (number if is_float else integer) if partial else every


def _access() -> Any:
    from schedsearch.backend.access import access

    return access("cuda")


def _report() -> Any:
    """Counts an element and keeps the lowest index."""
    from schedsearch.backend.ops import device_op

    return device_op(
        "report",
        "red.global.add.u64 [$result], 1; red.global.min.u64 [$result + 16], $index;",
        ins={"result": "u64", "index": "i64"},
    )


def _raise_maximum() -> Any:
    """Keeps the largest error; the bits of non-negative doubles are ordered as the doubles are."""
    from schedsearch.backend.ops import device_op

    return device_op(
        "raise_maximum",
        "{ .reg .b64 bits; mov.b64 bits, $error; red.global.max.u64 [$result + 8], bits; }",
        ins={"result": "u64", "error": "f64"},
    )
