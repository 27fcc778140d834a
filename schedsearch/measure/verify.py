"""Verifies a kernel: compares every element of every output, and checks that it writes nothing else."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from schedsearch.device import BoundKernel, Device, LoadedKernel
from schedsearch.measure.compare import CodeCache, Comparer, Difference, Tolerance, Truth, open_comparer
from schedsearch.measure.inputs import Array, check_domains, check_pattern, check_scalars
from schedsearch.measure.reference import CheckedReference, is_rounded
from schedsearch.ops import ArgSpec
from schedsearch.ops.checks import is_sum_of_products
from schedsearch.ops.dtypes import decode, dtype
from schedsearch.ops.layout import Layout
from schedsearch.template import magnitude_of
from schedsearch.workload import Workload

ALIGNMENT = 256
_GUARD_BYTES = 256
_GUARD = 0xFF  # NaN in every floating-point format
_SPOT_CHECKS = 256
_SPOT_ERROR = 1e-9  # difference of float64 sums in two orders, relative to their magnitude


def verify_once(device: Device, workload: Workload, kernel: LoadedKernel) -> str | None:
    """What is wrong with a loaded kernel, or None. The kernel must be trusted not to crash the process.

    Raises:
        PlanError: its launch plan is not one for this workload.
        DeviceError, ArgumentError: it cannot be bound or launched, or fails on the device.
        OperatorError: the operator's reference fails.
    """
    kernel.artifact.plan.check(workload)
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
    ok: every element is within the tolerance and nothing but the outputs was written.
    max_error: largest |y - truth|.
    stray: memory outside the outputs was written; the process that ran the kernel can no longer be trusted.
    message: what is wrong; empty when ok.
    """

    ok: bool
    max_error: float
    stray: bool = False
    message: str = ""


def old_contents(outputs: Sequence[ArgSpec]) -> tuple[Mapping[str, int], ...]:
    """The content of outputs before each launch that verification needs: output -> the byte that fills it.

    One launch suffices for floats, whose poison is NaN. Any byte is a legal integer: an element that a kernel does not write
    may be correct by chance, but not in both of two launches with different bytes.
    """
    poisons = {output.name: dtype(output.dtype).poison for output in outputs}
    launches = max(map(len, poisons.values()))
    return tuple({name: bytes_[min(i, len(bytes_) - 1)] for name, bytes_ in poisons.items()} for i in range(launches))


class Verification:
    """Inputs of one workload, the truth about its outputs, and guarded memory to run kernels in.

    The memory is one piece: guard, argument, guard, argument ... guard, output, guard, output, guard. Before each launch
    outputs are filled with `old_contents`; guards hold NaN. A read outside an argument therefore shows in an output, and an
    element that is not written keeps its old content. Comparisons find writes outside the outputs: with a copy in front of
    the first output, with the guard's byte after each output.

    Args:
        seed: of the inputs; the same seed gives the same numbers.
        code: contains the reference's machine code, or receives it.

    Raises:
        DeviceError: there is not enough memory.
        OperatorError: the reference of another package's operator fails or contradicts itself.
        RuntimeError: schedsearch's own reference does, or the comparison misses an error: a bug of schedsearch.
    """

    def __init__(self, device: Device, comparer: Comparer, code: CodeCache, workload: Workload, seed: int) -> None:
        self._device, self._comparer, self._workload, self.seed = device, comparer, workload, seed
        self._reference = CheckedReference(workload)
        self._old_contents = old_contents(workload.outputs)
        self.scalars = check_scalars(workload)
        rng = np.random.default_rng(seed)
        domains = check_domains(workload)
        self._patterns = {arg.name: check_pattern(arg, domains[arg.name], rng) for arg in workload.signature}
        self._offsets: dict[str, int] = {}
        end = _GUARD_BYTES
        for spec in (*workload.signature, *workload.outputs):
            self._offsets[spec.name] = end
            end += align(spec.nbytes) + _GUARD_BYTES
        self._inputs_end, self._end = self._offsets[workload.outputs[0].name], end
        truth_bytes = {spec.name: align(8 * spec.size) for spec in workload.outputs}
        rounded = [spec.name for spec in workload.outputs if is_rounded(workload, spec.dtype)]
        self.nbytes = end + self._inputs_end + sum(truth_bytes.values()) + sum(truth_bytes[name] for name in rounded)
        self._memory = device.allocate(self.nbytes)
        self._expected = self._memory + end
        self._truths: dict[str, Truth] = {}
        address = self._expected + self._inputs_end
        for spec in workload.outputs:
            step, tolerance = truth_bytes[spec.name], None
            if spec.name in rounded:
                exact_sums = is_sum_of_products(workload.signature)
                tolerance = Tolerance.rounded(spec.dtype, workload.work.reduction, exact_sums=exact_sums)
            self._truths[spec.name] = Truth(spec.dtype, spec.size, address, address + step if tolerance else 0, tolerance)
            address += 2 * step if tolerance else step
        try:
            self._restore()
            self._write_inputs(self._expected)
            self._compute_truths(code)
            self._check_truths(rng)
            self._check_comparer()
        except BaseException:
            self.close()
            raise

    def check(self, kernel: LoadedKernel, launch: Callable[[BoundKernel], None] | None = None) -> Verdict:
        """Runs the kernel on the inputs, once for each of `old_contents`, and judges it.

        Args:
            launch: launches the bound kernel in another way, e.g. after many others.

        Raises:
            DeviceError, ArgumentError: the kernel cannot be bound or launched, or fails on the device.
        """
        bound = kernel.bind({name: self._memory + offset for name, offset in self._offsets.items()}, self.scalars)
        max_error = 0.0
        for contents in self._old_contents:
            self._fill_outputs(contents)
            if launch is None:
                bound.launch()
            else:
                launch(bound)
            self._device.synchronize()
            verdict = self._judge()
            max_error = max(max_error, verdict.max_error)
            if not verdict.ok:
                return verdict
        return Verdict(True, max_error)

    def close(self) -> None:
        self._device.free(self._memory)

    # ---- preparing

    def _restore(self) -> None:
        self._device.fill(self._memory, _GUARD, self._end)
        self._write_inputs(self._memory)

    def _write_inputs(self, base: int) -> None:
        if base == self._expected:
            self._device.fill(base, _GUARD, self._inputs_end)
        for arg in self._workload.signature:
            self._patterns[arg.name].write(self._device, base + self._offsets[arg.name], arg.size)
        self._device.synchronize()

    def _fill_outputs(self, contents: Mapping[str, int]) -> None:
        for output in self._workload.outputs:
            self._device.fill(self._memory + self._offsets[output.name], contents[output.name], output.nbytes)
        self._device.synchronize()

    def _compute_truths(self, code: CodeCache) -> None:
        artifact = code.get(f"reference {self._workload.id}", lambda: self._reference.artifact(self._device.target))
        addresses = {arg.name: self._expected + self._offsets[arg.name] for arg in self._workload.signature}
        for name, truth in self._truths.items():
            addresses |= {name: truth.address, magnitude_of(name): truth.magnitude}
        kernel = self._device.load(artifact)
        try:
            kernel.bind(addresses, self.scalars).launch()
            self._device.synchronize()
        finally:
            kernel.close()

    def _check_truths(self, rng: np.random.Generator) -> None:
        arrays = {
            arg.name: decode(self._patterns[arg.name].elements(arg.size), arg.dtype).reshape(arg.shape)
            for arg in self._workload.signature
        }
        for output, truth in self._truths.items():
            indices = rng.integers(0, truth.size, min(_SPOT_CHECKS, truth.size))
            numpy = self._reference.points(arrays, self.scalars, indices, output)
            kernel = self._elements(truth.address, indices, numpy.dtype.name)
            if truth.tolerance is None:
                wrong = kernel != numpy
            else:
                magnitude = self._elements(truth.magnitude, indices, "float64")
                wrong = ~((np.abs(kernel - numpy) <= _SPOT_ERROR * np.maximum(magnitude, np.abs(numpy))) | (kernel == numpy))
            if wrong.any():
                raise self._reference.contradiction(output, indices, kernel, numpy, wrong)

    def _elements(self, address: int, indices: Array, name: str) -> Array:
        """Reads single numbers of eight bytes from an array on the device."""
        found = np.empty(indices.size, name)
        for place, index in enumerate(indices):
            self._device.copy_out(found[place : place + 1].data, address + 8 * int(index))
        return found

    def _check_comparer(self) -> None:
        """Checks the comparison: it must see the old content of outputs as wrong in at least one launch, and nothing else.

        This also compiles the comparison before a candidate waits for it.
        """
        seen = dict.fromkeys(self._truths, 0)
        for contents in self._old_contents:
            self._fill_outputs(contents)
            for name, difference in self._differences().items():
                seen[name] += difference.violations
        stray = self._stray_write()
        for output in self._workload.outputs:
            least = output.size * max(1, len(dtype(output.dtype).poison) - 1)
            if seen[output.name] < least or stray:
                raise RuntimeError(
                    f"the comparison sees {seen[output.name]} poisoned elements of {output.name}, which has at least "
                    f"{least} {stray}; this is a bug of schedsearch"
                )

    # ---- judging

    def _judge(self) -> Verdict:
        differences = self._differences()
        max_error = max(difference.max_error for difference in differences.values())
        stray = self._stray_write()
        if stray:
            self._restore()
            return Verdict(False, max_error, True, stray)
        wrong = [self._describe(name, difference) for name, difference in differences.items() if difference.violations]
        return Verdict(not wrong, max_error, False, "; ".join(wrong))

    def _differences(self) -> dict[str, Difference]:
        return {
            name: self._comparer.output(self._memory + self._offsets[name], truth) for name, truth in self._truths.items()
        }

    def _stray_write(self) -> str:
        """Describes writes outside the outputs; empty if there were none."""
        names = " and ".join(self._truths)
        count, first = self._comparer.words(self._memory, self._expected, self._inputs_end)
        if first is not None:
            return f"the kernel wrote outside {names}: {count} words in front changed, the first in {self._place(first)}"
        for output in self._workload.outputs:
            end = self._offsets[output.name] + output.nbytes
            behind = np.empty(align(output.nbytes) - output.nbytes + _GUARD_BYTES, np.uint8)
            self._device.copy_out(behind.data, self._memory + end)
            changed = np.flatnonzero(behind != _GUARD)
            if changed.size:
                return (
                    f"the kernel wrote outside {names}: {changed.size} bytes after the end of {output.name} changed, "
                    f"the first at +{changed[0]}"
                )
        return ""

    def _place(self, offset: int) -> str:
        """Which argument an offset in front of the outputs belongs to."""
        for arg in self._workload.signature:
            start = self._offsets[arg.name]
            if start <= offset < start + align(arg.nbytes):
                return f"argument {arg.name!r} at byte {offset - start}"
        return f"{self._inputs_end - offset} bytes before {self._workload.outputs[0].name}"

    def _describe(self, name: str, difference: Difference) -> str:
        (output,) = (spec for spec in self._workload.outputs if spec.name == name)
        truth, first = self._truths[name], difference.first
        assert first is not None
        raw = np.empty(dtype(output.dtype).nbytes, np.uint8)
        self._device.copy_out(raw.data, self._memory + self._offsets[name] + first * raw.size)
        (expected,) = self._elements(
            truth.address, np.array([first]), "float64" if dtype(output.dtype).is_float else "int64"
        )
        return (
            f"{name}: {difference.violations} of {output.size} elements are wrong, the largest error is "
            f"{difference.max_error:g}; first {name}[{_index_text(output, first)}] = "
            f"{decode(raw, output.dtype)[0].item()!r}, expected {expected.item()!r}"
        )


def _index_text(spec: ArgSpec, flat: int) -> str:
    """n=0, h=3, ... of a flat index; blocks of a layout count as axes of their own."""
    letters = tuple(spec.axes) if len(spec.axes) == len(spec.shape) else Layout.parse(spec.axes).dimensions
    places = np.unravel_index(flat, spec.shape)
    return ", ".join(f"{letter.lower()}={int(place)}" for letter, place in zip(letters, places))
