"""Verifies a kernel: compares every element of every output, and checks that it writes nothing else.

A kernel may be right the first time only: it may skip its work where the output already holds numbers, remember results by
address or by some of its inputs, or rely on what an earlier launch left in a workspace. Verification therefore launches one
bound kernel several times, over different old contents of outputs and workspaces, and changes inputs in their place between
launches, one argument after the other.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from schedsearch.backend.code_cache import CodeCache
from schedsearch.device import BoundKernel, Device, LoadedKernel
from schedsearch.errors import OperatorError
from schedsearch.ops import ArgSpec
from schedsearch.ops.dtypes import decode, dtype
from schedsearch.typed import Array
from schedsearch.verification.compare import Comparer, Difference, is_undefined, open_comparer
from schedsearch.verification.inputs import Pattern, check_domains, check_pattern, check_scalars, second_domains
from schedsearch.verification.prepared import PreparedPath
from schedsearch.verification.reference import CheckedReference
from schedsearch.verification.truths import Truths, align
from schedsearch.verification.unwritten import element_text, unwritten, unwritten_text
from schedsearch.verification.workspaces import GuardedWorkspaces
from schedsearch.workload import Workload

_GUARD_BYTES = 256
_LAST_GUARD_BYTES = 65536  # what lies behind are truths, which a stray write must not change
_GUARD = 0xFF  # NaN in every floating-point format
_WORKSPACE_CONTENTS = (0xFF, 0x5A)  # NaN, and a finite number in every format
_SPOT_CHECKS = 256  # elements of which NumPy computes the truth, too
_RUN = 64  # consecutive elements that are compared after a change of inputs
_FEWEST = 8  # of both, where an element is the sum of millions of products
_NUMPY_PRODUCTS = 1 << 24  # more take NumPy seconds
_INEXACT = 64  # roundings of an output, where sums are not exact
_MOST_INEXACT = 1 / 8  # relative errors beyond are those of other numbers, however long the sum
_SPOT_ERROR = 1e-9  # difference of float64 sums in two orders, relative to their magnitude


def verify_once(device: Device, workload: Workload, kernel: LoadedKernel, code: CodeCache | None = None) -> str | None:
    """What is wrong with a loaded kernel, or None. The kernel must be trusted not to crash the process.

    Args:
        code: contains the kernels that verify it, or receives them; see `ahead.verifying_recipes`.

    Raises:
        PlanError: its launch plan is not one for this workload.
        DeviceError, ArgumentError: it cannot be bound or launched, or fails on the device.
        OperatorError: the operator's reference fails.
    """
    kernel.artifact.plan.check(workload)
    code = CodeCache() if code is None else code
    with contextlib.ExitStack() as stack:
        comparer = stack.enter_context(contextlib.closing(open_comparer(device, code)))
        verification = stack.enter_context(contextlib.closing(Verification(device, comparer, code, workload, seed=0)))
        return verification.check(kernel).message or None


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


@dataclass(frozen=True)
class _Change:
    """An argument whose numbers are replaced in their place, and some elements of the outputs thereafter.

    Attributes:
        argument: its name. Arguments of earlier changes keep their new numbers if they are no constants. Constants do not: a
            call with some of them prepared sees the changes of the others alone.
        image: address of the new numbers.
        nbytes: of the argument.
        constant: whether it is one.
        truths: output -> (index of the first element, up to `_RUN` elements as float64 or int64).
    """

    argument: str
    image: int
    nbytes: int
    constant: bool
    truths: Mapping[str, tuple[int, Array]]


class Verification:
    """Inputs of one workload, the truth about its outputs, and guarded memory to run kernels in.

    The memory is one piece: guard, argument, guard, argument ... guard, output, guard, output, guard. Before each launch
    outputs are filled with `old_contents`; guards hold NaN. A read outside an argument therefore shows in an output, and an
    element that is not written keeps its old content. Comparisons find writes outside the outputs: with a copy in front of
    the first output, with the guard's byte after each output.

    There are two draws of numbers for each argument. All outputs are known for the first. After a change to the second, of
    one argument after the other, a run of elements is known. Constants change last and one at a time, because prepared calls
    do not see it of some. If the reference answers for whole arrays only, nothing is changed.

    Args:
        seed: of the inputs; the same seed gives the same numbers.
        code: contains the reference's machine code, or receives it.

    Raises:
        DeviceError: there is not enough memory.
        OperatorError: the reference of another package's operator fails or contradicts itself, or the outputs are undefined
            for all numbers that were tried.
        RuntimeError: schedsearch's own reference does, or the comparison misses an error: a bug of schedsearch.
    """

    def __init__(self, device: Device, comparer: Comparer, code: CodeCache, workload: Workload, seed: int) -> None:
        self._device, self._comparer, self._workload, self.seed = device, comparer, workload, seed
        self._reference = CheckedReference(workload)
        self._old_contents = old_contents(workload.outputs)
        self._slices = {output.name: output for output in workload.outputs if output.slice_of}
        self._between = dict.fromkeys(self._slices, 0)  # the byte that was last written to what lies between their runs
        self.scalars = check_scalars(workload)
        rng = np.random.default_rng(seed)
        domains, seconds = check_domains(workload), second_domains(workload)
        self._patterns = {arg.name: check_pattern(arg, domains[arg.name], rng) for arg in workload.signature}
        others = {arg.name: check_pattern(arg, seconds[arg.name], rng) for arg in workload.signature}
        self._offsets: dict[str, int] = {}
        end = _GUARD_BYTES
        for spec in (*workload.signature, *workload.outputs):
            self._offsets[spec.name] = end
            end += align(spec.span_bytes) + _GUARD_BYTES
        end += _LAST_GUARD_BYTES - _GUARD_BYTES
        self._inputs_end, self._end = self._offsets[workload.outputs[0].name], end
        exact_sums = workload.definition.exact_step(workload.params) is not None
        self._truths = Truths(device, workload, exact_sums=exact_sums)
        try:
            memory_bytes = end + 2 * self._inputs_end
            self._memory = device.allocate(memory_bytes)
        except BaseException:
            self._truths.close()
            raise
        self.nbytes = memory_bytes + self._truths.nbytes
        self._expected = self._memory + end
        self._others = self._expected + self._inputs_end
        try:
            self._write_inputs(self._expected, self._patterns)
            self._write_inputs(self._others, others)
            self._restore()
            self._truths.compute(code, {name: self._expected + at for name, at in self._offsets.items()}, self.scalars)
            arrays = {arg.name: self._on_host(arg, self._patterns) for arg in workload.signature}
            if self._reference.pointwise:
                self._check_truths(arrays, rng)
            self._changes = tuple(self._plan_changes(arrays, others, rng)) if self._reference.pointwise else ()
            self._check_comparer()
        except BaseException:
            self.close()
            raise

    def check(self, kernel: LoadedKernel) -> Verdict:
        """Judges a kernel. It is launched once for each of `old_contents`, twice at least if it has workspaces, and once
        after each change of an argument. Its workspaces have guards.

        Raises:
            DeviceError, ArgumentError: the kernel cannot be bound or launched, or fails on the device.
        """
        self._restore()
        with contextlib.closing(GuardedWorkspaces(self._device, kernel.artifact.plan)) as spaces:
            launches = max(len(self._old_contents), len(_WORKSPACE_CONTENTS) if spaces else 1)
            bound, max_error = None, 0.0
            for number in range(launches):
                if spaces or bound is None:  # constants are prepared again, over the new content of workspaces
                    spaces.fill(_WORKSPACE_CONTENTS[number % len(_WORKSPACE_CONTENTS)])
                    bound = self._bind(kernel, spaces.addresses)
                self._fill_outputs(self._old_contents[min(number, len(self._old_contents) - 1)])
                verdict = self._launch(bound, spaces)
                max_error = max(max_error, verdict.max_error)
                if not verdict.ok:
                    return verdict
            assert bound is not None
            wrong = self._change_inputs(bound, _prepared(kernel))
            overrun = spaces.overrun()
            if wrong or overrun:
                return Verdict(False, max_error, bool(overrun), overrun or wrong)
        return Verdict(True, max_error)

    def bind(self, kernel: LoadedKernel) -> BoundKernel:
        """Binds a kernel to this verification's memory, for `check_again`. It uses its own workspaces, as callers do."""
        self._restore()
        return self._bind(kernel, {})

    def check_again(self, kernel: LoadedKernel, bound: BoundKernel) -> Verdict:
        """Judges a bound kernel that has been launched since, here or elsewhere. First it gets other inputs, then those
        that all outputs are known for. Outputs hold finite numbers, and workspaces what earlier launches left.

        Raises:
            DeviceError: the kernel fails on the device.
        """
        wrong = self._change_inputs(bound, _prepared(kernel), stepwise=False)
        if wrong:
            return Verdict(False, 0.0, False, wrong)
        self._restore()
        return self._launch(bound, None)

    def close(self) -> None:
        self._device.free(self._memory)
        self._truths.close()

    # ---- preparing

    def _bind(self, kernel: LoadedKernel, workspaces: Mapping[str, int]) -> BoundKernel:
        addresses = {name: self._memory + offset for name, offset in self._offsets.items()}
        return kernel.bind({**addresses, **workspaces}, self.scalars)

    def _restore(self) -> None:
        """Inputs and guards as they were; outputs keep their content."""
        self._device.copy(self._memory, self._expected, self._inputs_end)
        for output in self._workload.outputs:
            end = self._offsets[output.name] + output.span_bytes
            self._device.fill(self._memory + end, _GUARD, self._behind(output))
        self._device.synchronize()

    def _behind(self, output: ArgSpec) -> int:
        """Bytes of the guard that begins at the exact end of an output."""
        last = output.name == self._workload.outputs[-1].name
        return align(output.span_bytes) - output.span_bytes + (_LAST_GUARD_BYTES if last else _GUARD_BYTES)

    def _write_inputs(self, base: int, patterns: Mapping[str, Pattern]) -> None:
        self._device.fill(base, _GUARD, self._inputs_end)
        for arg in self._workload.signature:
            patterns[arg.name].write(self._device, base + self._offsets[arg.name], arg.size)
        self._device.synchronize()

    def _on_host(self, arg: ArgSpec, patterns: Mapping[str, Pattern]) -> Array:
        return patterns[arg.name].decoded(arg.size, arg.dtype).reshape(arg.shape)

    def _plan_changes(
        self, arrays: dict[str, Array], others: Mapping[str, Pattern], rng: np.random.Generator
    ) -> Iterator[_Change]:
        """The changes in their order; `arrays` then holds the new numbers of all but constants."""
        for arg in sorted(self._workload.signature, key=lambda arg: arg.constant):
            before = arrays[arg.name]
            arrays[arg.name] = self._on_host(arg, others)
            truths = {}
            for output in self._workload.outputs:
                run = output.runs[0]
                count = min(self._few(_RUN), run)
                first = int(rng.integers(0, run - count + 1))
                if output.name in self._slices:
                    first += run * int(rng.integers(0, output.size // run))
                truths[output.name] = (
                    first,
                    self._reference.points(arrays, self.scalars, np.arange(first, first + count), output.name),
                )
            yield _Change(arg.name, self._others + self._offsets[arg.name], arg.nbytes, arg.constant, truths)
            if arg.constant:
                arrays[arg.name] = before

    def _few(self, most: int) -> int:
        """How many elements NumPy computes."""
        return max(_FEWEST, min(most, _NUMPY_PRODUCTS // max(self._workload.work.reduction, 1)))

    def _fill_outputs(self, contents: Mapping[str, int]) -> None:
        for output in self._workload.outputs:
            self._device.fill(self._memory + self._offsets[output.name], contents[output.name], output.span_bytes)
        self._between = {name: contents[name] for name in self._slices}
        self._device.synchronize()

    def _check_truths(self, arrays: Mapping[str, Array], rng: np.random.Generator) -> None:
        for output, truth in self._truths.items():
            indices = rng.integers(0, truth.size, min(self._few(_SPOT_CHECKS), truth.size))
            numpy = self._reference.points(arrays, self.scalars, indices, output)
            kernel = self._elements(truth.address, indices, numpy.dtype.name)
            if truth.tolerance is None:
                wrong = kernel != numpy
            else:
                magnitude = self._elements(truth.magnitude, indices, "float64")
                wrong = ~((np.abs(kernel - numpy) <= _SPOT_ERROR * np.maximum(magnitude, np.abs(numpy))) | (kernel == numpy))
            undefined = is_undefined(kernel) & (is_undefined(numpy) | truth.undecided)
            if undefined.any() and not truth.partial and kernel.dtype.kind == "f":
                raise OperatorError(
                    f"{self._workload} cannot be verified: {output} is NaN at {int(undefined.sum())} of {indices.size} "
                    "points, for every choice of numbers that was tried; write it so that it is defined more often"
                )
            wrong &= ~undefined
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
            defined = output.size - (int(np.count_nonzero(self._undefined(output))) if output.partial else 0)
            least = defined * max(1, len(dtype(output.dtype).poison) - 1)
            if seen[output.name] < least or stray:
                raise RuntimeError(
                    f"the comparison sees {seen[output.name]} poisoned elements of {output.name}, which has at least "
                    f"{least} {stray}; this is a bug of schedsearch"
                )

    def _undefined(self, output: ArgSpec) -> Array:
        """Which elements have no truth."""
        truth = self._truths[output.name]
        found = np.empty(truth.size, truth.number)
        self._device.copy_out(found.view(np.uint8).data, truth.address)
        return is_undefined(found)

    # ---- judging

    def _launch(self, bound: BoundKernel, spaces: GuardedWorkspaces | None) -> Verdict:
        bound.launch()
        self._device.synchronize()
        verdict = self._judge(bound)
        overrun = spaces.overrun() if spaces and not verdict.stray else ""
        return Verdict(False, verdict.max_error, True, overrun) if overrun else verdict

    def _change_inputs(self, bound: BoundKernel, prepared: Sequence[str], *, stepwise: bool = True) -> str:
        """Replaces the numbers of arguments in their place, except those that are prepared, and launches after each change
        (or after the last one, when one constant has changed). Outputs keep what the launch before has left.

        Returns:
            A description of wrong elements; empty if all are right.
        """
        changes = [change for change in self._changes if change.argument not in prepared]
        for change in changes:
            is_last = change is changes[-1]
            if not stepwise and change.constant and not is_last:
                continue
            place = self._memory + self._offsets[change.argument]
            self._device.copy(place, change.image, change.nbytes)
            if not stepwise and not is_last:
                continue
            self._device.synchronize()
            bound.launch()
            self._device.synchronize()
            for output in self._workload.outputs:
                if wrong := self._stale(output, *change.truths[output.name]):
                    what = f"{change.argument} changed in its place" if stepwise else "inputs changed in their places"
                    return f"after {what}, {wrong}; the kernel must not rely on earlier launches"
            if change.constant:
                self._device.copy(place, self._expected + self._offsets[change.argument], change.nbytes)
        return ""

    def _stale(self, output: ArgSpec, first: int, expected: Array) -> str:
        """Describes elements that differ from the expected ones. Where sums are not exact, most of them must, by more than a
        sum of that length can err relative to its result; magnitudes are not known here."""
        if not expected.size:
            return ""
        row = dtype(output.dtype)
        raw = np.empty(expected.size * row.nbytes, np.uint8)
        self._device.copy_out(raw.data, self._memory + self._offsets[output.name] + output.place(first) * row.nbytes)
        got = decode(raw.view(row.storage), output.dtype)
        tolerance = self._truths[output.name].tolerance
        with np.errstate(invalid="ignore", over="ignore"):
            if tolerance is None:
                wrong, enough = got != expected, expected.size // 2 + 1 if output.undecided else 1
            else:
                exact = math.isfinite(tolerance.limit)
                rounded = tolerance.output * np.abs(expected) + tolerance.smallest
                inexact = _INEXACT * rounded + min(tolerance.accumulation, _MOST_INEXACT) * np.abs(expected)
                error = np.abs(got.astype(np.float64) - expected)
                wrong = ~((error <= (rounded + tolerance.limit if exact else inexact)) | (got == expected))
                enough = 1 if exact else expected.size // 2 + 1
        if output.partial:
            wrong &= ~is_undefined(expected)
        if np.count_nonzero(wrong) < enough:
            return ""
        place = int(np.argmax(wrong))
        value, wanted = got[place].item(), expected[place].item()
        return (
            f"{output.name}: {np.count_nonzero(wrong)} of {expected.size} elements are wrong; first "
            f"{element_text(output, first + place)} = {value!r}, expected {wanted!r}"
        )

    def _judge(self, bound: BoundKernel) -> Verdict:
        """Judges the last launch. If elements are wrong, the kernel is launched again, to tell which it never writes."""
        differences = self._differences()
        max_error = max(difference.max_error for difference in differences.values())
        if stray := self._stray_write():
            self._restore()
            return Verdict(False, max_error, True, stray)
        wrong = {name: self._describe(name, difference) for name, difference in differences.items() if difference.violations}
        between = self._changed_between()
        if wrong:
            addresses = {name: self._memory + self._offsets[name] for name in differences}
            kept = unwritten(self._device, bound, self._workload.outputs, addresses)
            if stray := self._stray_write():
                self._restore()
                return Verdict(False, max_error, True, stray)
            for output in self._workload.outputs:
                if output.name in wrong:
                    defined = kept[output.name] & ~self._undefined(output) if output.partial else kept[output.name]
                    text = unwritten_text(output, defined, differences[output.name].violations)
                    wrong[output.name] = text or wrong[output.name]
        return Verdict(not (wrong or between), max_error, False, "; ".join([*wrong.values(), *between]))

    def _differences(self) -> dict[str, Difference]:
        return {
            name: self._comparer.output(self._memory + self._offsets[name], truth) for name, truth in self._truths.items()
        }

    def _changed_between(self) -> list[str]:
        """Describes writes between the runs of outputs that are slices: to elements of the array around them."""
        found = []
        for name, spec in self._slices.items():
            count, first = self._comparer.between(self._memory + self._offsets[name], spec, self._between[name])
            if first is not None:
                found.append(
                    f"{count} bytes of the array of which {name} is a slice changed, the first {first} bytes after {name} "
                    "begins; the kernel must write the slice only"
                )
        return found

    def _stray_write(self) -> str:
        """Describes writes outside the outputs; empty if there were none."""
        names = " and ".join(self._truths)
        count, first = self._comparer.words(self._memory, self._expected, self._inputs_end)
        if first is not None:
            return f"the kernel wrote outside {names}: {count} words in front changed, the first in {self._place(first)}"
        for output in self._workload.outputs:
            end = self._offsets[output.name] + output.span_bytes
            behind = np.empty(self._behind(output), np.uint8)
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
        self._device.copy_out(raw.data, self._memory + self._offsets[name] + output.place(first) * raw.size)
        (expected,) = self._elements(truth.address, np.array([first]), truth.number)
        error = f", the largest error is {difference.max_error:g}" if difference.max_error else ""  # 0: all of them are NaN
        return (
            f"{name}: {difference.violations} of {output.size} elements are wrong{error}; first "
            f"{element_text(output, first)} = {decode(raw, output.dtype)[0].item()!r}, expected {expected.item()!r}"
        )


def _prepared(kernel: LoadedKernel) -> tuple[str, ...]:
    """Names of the arguments that were prepared when the kernel was bound, so that it no longer reads them."""
    return kernel.artifact.plan.constants if isinstance(kernel, PreparedPath) else ()
