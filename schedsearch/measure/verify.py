"""Does a kernel compute what its operator says? Every element is compared, on the device that computed it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from schedsearch.device import BoundKernel, Device, LoadedKernel
from schedsearch.measure.compare import CodeCache, Comparer, Difference, Tolerance, open_comparer
from schedsearch.measure.inputs import decode, exact_scalars, integer_domains, integer_pattern, reduction_length
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.template import load_reference
from schedsearch.workload import Workload

ALIGNMENT = 256
_GUARD_BYTES = 256
_POISON = 0xFF  # NaN in every floating-point format
_SPOT_CHECKS = 256


def verify_once(device: Device, workload: Workload, kernel: LoadedKernel) -> str | None:
    """What is wrong with a loaded kernel, or None. For a kernel that is trusted not to take the process down.

    Raises:
        DeviceError, ArgumentError: it cannot be bound or launched, or does not end well.
    """
    code = CodeCache(device)
    with contextlib.ExitStack() as stack:
        comparer = stack.enter_context(contextlib.closing(open_comparer(device, code)))
        verification = stack.enter_context(contextlib.closing(Verification(device, comparer, code, workload, seed=0)))
        return verification.check(kernel).message or None


def align(nbytes: int) -> int:
    return math.ceil(nbytes / ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    ok: every element is within the tolerance and nothing but y was written.
    max_error: largest |y - reference|.
    stray: memory outside y was written; the process that ran the kernel is not to be trusted any more.
    message: what is wrong; empty when ok.
    """

    ok: bool
    max_error: float
    stray: bool = False
    message: str = ""


class Verification:
    """Inputs of one workload, the truth about its output, and guarded memory to run kernels in.

    The memory is one piece: guard, argument, guard, argument ... guard, y, guard. Guards and y are poisoned with NaN, so
    that a read outside an argument shows in the output, an element that is not written stays NaN, and a write outside y
    shows by comparison with a copy of what stands before y.

    Args:
        seed: of the inputs; the same seed gives the same numbers.
        code: holds the reference's machine code, or takes it.

    Raises:
        DeviceError: the memory cannot be had.
        RuntimeError: the reference kernel contradicts its NumPy definition: a bug of schedsearch.
    """

    def __init__(self, device: Device, comparer: Comparer, code: CodeCache, workload: Workload, seed: int) -> None:
        self._device, self._comparer, self._workload, self.seed = device, comparer, workload, seed
        self.scalars = exact_scalars(workload)
        rng = np.random.default_rng(seed)
        domains = integer_domains(workload)
        self._patterns = {arg.name: integer_pattern(arg, domains[arg.name], rng) for arg in workload.signature}
        self._offsets, offset = {}, _GUARD_BYTES
        for arg in (*workload.signature, workload.output):
            self._offsets[arg.name] = offset
            offset += align(arg.nbytes) + _GUARD_BYTES
        self._y_offset = self._offsets[workload.output.name]
        self._tail_offset = self._y_offset + workload.output.nbytes
        self._tail_bytes = offset - self._tail_offset
        truth_bytes = 8 * workload.output.size
        self.nbytes = offset + self._y_offset + 2 * align(truth_bytes)
        self._memory = device.allocate(self.nbytes)
        self._expected = self._memory + offset
        self._reference = self._expected + self._y_offset
        self._magnitude = self._reference + align(truth_bytes)
        self._tolerance = Tolerance.of(workload.output.dtype, reduction_length(workload), exact=True)
        try:
            self._restore()
            self._write_inputs(self._expected)
            self._compute_reference(code)
            self._check_reference(rng)
            self._check_comparer()
        except BaseException:
            self.close()
            raise

    def check(self, kernel: LoadedKernel, launch: Callable[[BoundKernel], None] | None = None) -> Verdict:
        """Runs the kernel once on the inputs and judges it; `launch` does so in another way, e.g. behind many others.

        Raises:
            DeviceError, ArgumentError: the kernel cannot be bound, launched or does not end well.
        """
        output = self._workload.output
        y = self._memory + self._y_offset
        bound = kernel.bind({name: self._memory + offset for name, offset in self._offsets.items()}, self.scalars)
        self._device.fill(y, _POISON, output.nbytes)
        self._device.synchronize()
        if launch is None:
            bound.launch()
        else:
            launch(bound)
        self._device.synchronize()
        difference = self._comparer.output(y, self._reference, self._magnitude, output.size, output.dtype, self._tolerance)
        stray = self._stray_write()
        if stray:
            self._restore()
            return Verdict(False, difference.max_error, True, stray)
        if difference.violations:
            return Verdict(False, difference.max_error, False, self._describe(difference))
        return Verdict(True, difference.max_error)

    def close(self) -> None:
        self._device.free(self._memory)

    def _restore(self) -> None:
        self._device.fill(self._memory, _POISON, self._tail_offset + self._tail_bytes)
        self._write_inputs(self._memory)

    def _write_inputs(self, base: int) -> None:
        if base == self._expected:
            self._device.fill(base, _POISON, self._y_offset)
        for arg in self._workload.signature:
            self._patterns[arg.name].write(self._device, base + self._offsets[arg.name], arg.size)
        self._device.synchronize()

    def _compute_reference(self, code: CodeCache) -> None:
        reference = load_reference(self._workload.op)
        artifact = code.get(f"reference {self._workload.id}", lambda: reference.kernel(self._workload, self._device.target))
        addresses = {arg.name: self._expected + self._offsets[arg.name] for arg in self._workload.signature}
        addresses |= {self._workload.output.name: self._reference, "magnitude": self._magnitude}
        kernel = self._device.load(artifact)
        try:
            kernel.bind(addresses, self.scalars).launch()
            self._device.synchronize()
        finally:
            kernel.close()

    def _check_reference(self, rng: np.random.Generator) -> None:
        output = self._workload.output
        indices = rng.integers(0, output.size, min(_SPOT_CHECKS, output.size))
        arrays = {
            arg.name: decode(self._patterns[arg.name].elements(arg.size), arg.dtype).reshape(arg.shape)
            for arg in self._workload.signature
        }
        expected = load_reference(self._workload.op).points(self._workload, arrays, self.scalars, indices)
        got = np.empty(indices.size, np.float64)
        for place, index in enumerate(indices):
            self._device.copy_out(got[place : place + 1].data, self._reference + 8 * int(index))
        wrong = ~np.isclose(got, expected, rtol=1e-9, atol=1e-9)
        if wrong.any():
            worst = int(np.argmax(wrong))
            raise RuntimeError(
                f"the reference kernel of {self._workload.label} contradicts NumPy at {int(wrong.sum())} of {indices.size} "
                f"points, first y.flat[{int(indices[worst])}] = {got[worst]!r}, NumPy says {float(expected[worst])!r}; "
                "this is a bug of schedsearch"
            )

    def _check_comparer(self) -> None:
        """Poison must be seen everywhere, and nothing else. Also compiles the comparison before a candidate waits."""
        output = self._workload.output
        difference = self._comparer.output(
            self._memory + self._y_offset, self._reference, self._magnitude, output.size, output.dtype, self._tolerance
        )
        stray = self._stray_write()
        if difference.violations != output.size or stray:
            raise RuntimeError(
                f"the comparison sees {difference.violations} of {output.size} poisoned elements {stray}; "
                "this is a bug of schedsearch"
            )

    def _stray_write(self) -> str:
        """What was written outside y, as text; empty when nothing was."""
        count, first = self._comparer.words(self._memory, self._expected, self._y_offset)
        if first is not None:
            name, offset = max(
                ((name, offset) for name, offset in self._offsets.items() if offset <= first), key=lambda item: item[1],
                default=("", 0),
            )  # fmt: skip
            within = name and first < offset + align(self._sizes()[name])
            place = f"argument {name!r} at byte {first - offset}" if within else f"{self._y_offset - first} bytes before y"
            return f"the kernel wrote outside y: {count} words in front of it changed, the first in {place}"
        tail = np.empty(self._tail_bytes, np.uint8)
        self._device.copy_out(tail.data, self._memory + self._tail_offset)
        changed = np.flatnonzero(tail != _POISON)
        if changed.size:
            return f"the kernel wrote outside y: {changed.size} bytes after its end changed, the first at +{changed[0]}"
        return ""

    def _sizes(self) -> dict[str, int]:
        return {arg.name: arg.nbytes for arg in self._workload.signature}

    def _describe(self, difference: Difference) -> str:
        output = self._workload.output
        assert difference.first is not None
        raw = np.empty(dtype_of(output.dtype).nbytes, np.uint8)
        self._device.copy_out(raw.data, self._memory + self._y_offset + difference.first * raw.size)
        truth = np.empty(1, np.float64)
        self._device.copy_out(truth.data, self._reference + 8 * difference.first)
        place = ", ".join(
            f"{axis.lower()}={int(i)}" for axis, i in zip(output.axes, np.unravel_index(difference.first, output.shape))
        )
        return (
            f"{difference.violations} of {output.size} elements are wrong, the largest error is {difference.max_error:g}; "
            f"first y[{place}] = {float(decode(raw, output.dtype)[0])!r}, expected {float(truth[0])!r}"
        )
