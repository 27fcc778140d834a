"""Judges what timed launches computed: one set of the timing data has known outputs.

Verification's numbers are small and whole, those of the timing are not: a kernel could tell them apart, by accident too. And
a kernel that skips its work where it finds numbers is fast only while it is timed.
"""

from __future__ import annotations

import math
import secrets

from schedsearch.backend.code_cache import CodeCache
from schedsearch.device import Device
from schedsearch.errors import DeviceError
from schedsearch.measure.timing import JUDGED_SETS, Arena, Timed
from schedsearch.ops.checks import FP32_ROUNDOFF, is_sum_of_products
from schedsearch.ops.dtypes import dtype
from schedsearch.verification.compare import Comparer, Tolerance, Truth
from schedsearch.verification.truths import Truths, allowed_roundoffs, truth_bytes
from schedsearch.workload import Workload

_DIRT = (0x3C, 0xBC, 0x35, 0xB5)  # finite, and near 1 in float16; not far from what the timing computes
_MEMORY_SHARE = 8
_EXCUSED = 1e-3


class TimedSet:
    """A set of the arena with the truth about its outputs.

    Attributes:
        number: of the set. It is drawn from the system's entropy, so that no kernel knows it.
    """

    def __init__(self, device: Device, comparer: Comparer, code: CodeCache, workload: Workload, arena: Arena) -> None:
        self._device, self._comparer, self._workload = device, comparer, workload
        self.number = secrets.randbelow(min(JUDGED_SETS, arena.sets))
        self._buffers = arena.buffers[self.number]
        self._truths = Truths(device, workload, exact_sums=False, roundoffs=likely_roundoffs(workload), excused=_EXCUSED)
        try:
            self._truths.compute(code, self._buffers, arena.scalars)
        except BaseException:
            self.close()
            raise

    @classmethod
    def make(cls, device: Device, comparer: Comparer, code: CodeCache, workload: Workload, arena: Arena) -> TimedSet | None:
        """None if the truth is not defined on the timing's numbers (sums may overflow, results are NaN) or takes too much
        memory.

        Raises:
            OperatorError, RuntimeError: the reference fails.
        """
        room = device.target.memory_bytes // _MEMORY_SHARE
        if _may_overflow(workload) or (room and truth_bytes(workload) > room):
            return None
        try:
            made = cls(device, comparer, code, workload, arena)
        except DeviceError:  # no memory is left; the verification goes without
            return None
        if is_sum_of_products(workload.signature) or made._is_a_number():
            return made
        made.close()
        return None

    @property
    def nbytes(self) -> int:
        return self._truths.nbytes

    def soil(self) -> None:
        """Fills the set's outputs with finite numbers that are wrong."""
        byte = secrets.choice(_DIRT)
        for output in self._workload.outputs:
            self._device.fill(self._buffers[output.name], byte, output.span_bytes)
        self._device.synchronize()

    def judge(self, timed: Timed) -> str:
        """Describes what is wrong with the outputs that timed launches left since `soil`, and with those of one more launch
        over new dirt; empty if they are right.

        Raises:
            DeviceError: the kernel fails on the device.
        """
        self._device.synchronize()
        wrong = self._differences() if timed.has_launched(self.number) else ""
        if not wrong:
            self.soil()
            timed.launch_set(self.number)
            self._device.synchronize()
            wrong = self._differences()
        return wrong and f"on the timing's random numbers {wrong}, although it was right on verification's numbers"

    def close(self) -> None:
        self._truths.close()

    def _differences(self) -> str:
        for name, truth in self._truths.items():
            difference = self._comparer.output(self._buffers[name], truth)
            if difference.violations > truth.excused:
                return (
                    f"{difference.violations} of {truth.size} elements of {name} are wrong, the largest error is "
                    f"{difference.max_error:g}"
                )
        return ""

    def _is_a_number(self) -> bool:
        """Whether no element of the truth is NaN. A NaN differs from itself."""
        for truth in self._truths.values():
            if truth.number == "float64":
                itself = Truth("float64", truth.size, truth.address, truth.address, Tolerance(0.0, 0.0, math.inf, 0.0))
                if self._comparer.output(truth.address, itself).violations:
                    return False
        return True


def likely_roundoffs(workload: Workload) -> float:
    """How many roundoff errors, relative to the sum of magnitudes, to allow for in a result on the timing's numbers.

    They have mean zero: partial sums stay within a few sqrt(K) products, while the sum of magnitudes grows with K. Each of K
    additions loses at most 2^-23 of a partial sum (tensor cores truncate), in all less than 8 sqrt(K) 2^-23 of the sum of
    magnitudes. The bound for any numbers, K 2^-24, would hide half of a long sum. Nothing is known about operators that are
    not sums of products, so they get room.

    Where the operator allows other roundings (`Op.rounding`), theirs count:

    - 2^-10 for each factor that may be cut to TF32. It may be the same in every product, so it does not cancel.
    - If additions keep only 14 bits, each of K loses at most 2^-13 of a partial sum. These errors are as random as the
      products, in all less than 8 * 2^-13 of the sum of magnitudes. But the sum itself, cut once for 32 products, always
      becomes smaller: by K / 32 * 2^-13 of itself, and it is at most 4 / sqrt(K) of the magnitudes.
    """
    reduction = workload.work.reduction
    if not is_sum_of_products(workload.signature):
        return 64.0 * reduction
    coarse = workload.definition.rounding(workload.params).additions > FP32_ROUNDOFF
    return allowed_roundoffs(workload, 8 + math.sqrt(reduction) / 8 if coarse else 16 * math.sqrt(reduction))


def _may_overflow(workload: Workload) -> bool:
    """Whether results of the timing's integers, which fill their formats, may leave 32 bits."""
    rows = {spec: dtype(spec.dtype) for spec in workload.signature if spec.role != "index"}
    integers = {spec: row for spec, row in rows.items() if not row.is_float}
    if any(row.nbytes > 1 for row in integers.values()):
        return True
    factors = [max(-row.lowest, row.largest) for spec, row in integers.items() if spec.role == "factor"]
    return bool(integers) and workload.work.reduction * math.prod(factors) > 2.0**31
