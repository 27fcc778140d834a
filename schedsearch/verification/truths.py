"""The right outputs for given inputs, computed on the device by the operator's reference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from schedsearch.backend.code_cache import CodeCache
from schedsearch.backend.kept import compile_kept
from schedsearch.device import Device
from schedsearch.errors import DeviceError
from schedsearch.ops import ArgSpec
from schedsearch.ops.checks import FP32_ROUNDOFF
from schedsearch.ops.dtypes import decode, dtype
from schedsearch.template import KernelSource, magnitude_of
from schedsearch.typed import Array
from schedsearch.verification.compare import Tolerance, Truth
from schedsearch.verification.reference import CheckedReference, is_rounded, reference_name
from schedsearch.workload import Workload

ALIGNMENT = 256


def align(nbytes: int) -> int:
    return math.ceil(nbytes / ALIGNMENT) * ALIGNMENT


def truth_bytes(workload: Workload) -> int:
    """Device memory that `Truths` takes: 16 bytes for each element that may be rounded, 8 for every other."""
    return sum(align(8 * spec.size) * (2 if is_rounded(workload, spec) else 1) for spec in workload.outputs)


def allowed_roundoffs(workload: Workload, additions: float) -> float:
    """How many roundoff errors of float32, relative to the sum of |products|, an element may have after that many additions,
    each of which is as wrong as the operator allows, and the rounding of each factor."""
    rounding = workload.definition.rounding(workload.params)
    factors = sum(spec.role == "factor" for spec in workload.signature)
    return (additions * rounding.additions + factors * rounding.factors) / FP32_ROUNDOFF


class Truths(Mapping[str, Truth]):
    """Output -> truth. The memory is allocated here; `compute` fills it.

    Args:
        exact_sums: see `Tolerance.rounded`.
        roundoffs: roundoff errors of float32, relative to the magnitude, that are allowed for in one element; default: those
            of any order of summation.
        excused: see `Truth`; a share of an output's elements.

    Raises:
        DeviceError: there is not enough memory.
    """

    def __init__(
        self,
        device: Device,
        workload: Workload,
        *,
        exact_sums: bool,
        roundoffs: float | None = None,
        excused: float = 0.0,
    ) -> None:
        self._device, self._workload = device, workload
        self.nbytes = truth_bytes(workload)
        self._memory = device.allocate(self.nbytes)
        self._truths: dict[str, Truth] = {}
        address = self._memory
        for spec in workload.outputs:
            truth = Truth(
                spec.dtype,
                spec.size,
                address,
                excused=int(excused * spec.size),
                runs=spec.runs,
                partial=spec.partial,
                undecided=spec.undecided,
            )
            address += align(8 * spec.size)
            if is_rounded(workload, spec):
                errors = allowed_roundoffs(workload, workload.work.reduction) if roundoffs is None else roundoffs
                step = workload.definition.exact_step(workload.params) or 1.0
                tolerance = Tolerance.rounded(spec.dtype, errors, exact_sums=exact_sums, step=step)
                tolerance = Tolerance.quantised(spec.roundings) if spec.roundings else tolerance
                truth = replace(truth, magnitude=address, tolerance=tolerance)
                address += align(8 * spec.size)
            self._truths[spec.name] = truth

    def compute(self, code: CodeCache, inputs: Mapping[str, int], scalars: Mapping[str, float]) -> None:
        """Runs the reference.

        Args:
            code: contains the reference's machine code, or receives it.
            inputs: argument -> address.

        Raises:
            OperatorError: the reference of another package's operator fails.
            RuntimeError: schedsearch's own reference does.
        """
        reference = CheckedReference(self._workload)
        if not reference.pointwise:
            self._compute_whole(reference, code, inputs, scalars)
            return
        artifact = code.get(reference_name(self._workload), lambda: reference.build(self._device.target).artifact)
        addresses = {spec.name: inputs[spec.name] for spec in self._workload.signature}
        for name, truth in self.items():
            addresses |= {name: truth.address, magnitude_of(name): truth.magnitude}
        kernel = self._device.load(artifact)
        try:
            with reference.running("its kernel raised ", passed=DeviceError):
                kernel.bind(addresses, scalars).launch()
                self._device.synchronize()
        finally:
            kernel.close()

    def _compute_whole(
        self, reference: CheckedReference, code: CodeCache, inputs: Mapping[str, int], scalars: Mapping[str, float]
    ) -> None:
        """Gets the truth about whole outputs from a reference that works on arrays in the host's memory."""
        workload, device = self._workload, self._device

        def fetch(spec: ArgSpec, address: int) -> Array:
            raw = np.empty(spec.nbytes, np.uint8)
            device.copy_out(raw.data, address)
            return decode(raw.view(dtype(spec.dtype).storage), spec.dtype).reshape(spec.shape)

        def run(source: KernelSource) -> dict[str, Array]:
            artifact = code.get(reference_name(workload), lambda: compile_kept(source, device.target).artifact)
            addresses = {spec.name: inputs[spec.name] for spec in workload.signature}
            kernel = device.load(artifact)
            try:  # an output takes at most the eight bytes an element that its truth has
                kernel.bind({**addresses, **{name: truth.address for name, truth in self.items()}}, scalars).launch()
                device.synchronize()
            finally:
                kernel.close()
            return {spec.name: fetch(spec, self[spec.name].address) for spec in workload.outputs}

        arrays = {spec.name: fetch(spec, inputs[spec.name]) for spec in workload.signature}
        found = reference.whole(arrays, scalars, run, device.target)
        for name, truth in self.items():
            numbers = np.ascontiguousarray(found[name].reshape(-1), truth.number)
            device.copy_in(truth.address, numbers.view(np.uint8).data)
            if truth.tolerance is not None:
                finite = np.abs(numbers[np.isfinite(numbers)])
                magnitude = np.full(numbers.size, finite.max(initial=0.0))
                device.copy_in(truth.magnitude, magnitude.view(np.uint8).data)
        device.synchronize()

    def __getitem__(self, output: str) -> Truth:
        return self._truths[output]

    def __iter__(self) -> Iterator[str]:
        return iter(self._truths)

    def __len__(self) -> int:
        return len(self._truths)

    def close(self) -> None:
        self._device.free(self._memory)
