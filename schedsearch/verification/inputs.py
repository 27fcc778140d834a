"""The data for verifying and timing kernels: one random block, repeated, which is cheap to make at any size.

The length of a block is prime. Elements whose distance is a multiple of some row, channel or image therefore hold different
numbers, so that a wrong index shows.

See docs/decisions/035-verification-by-role.md.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from schedsearch.device import Device
from schedsearch.ops import ArgSpec
from schedsearch.ops.checks import Domain, likely_sigmas, sum_sigma
from schedsearch.ops.dtypes import decode, dtype, encode
from schedsearch.typed import Array
from schedsearch.workload import Workload

BLOCK = 1_048_573  # the largest prime below 2**20
_WRITE_BYTES = 16 << 20
_SUM_ROOM = 1 << 10  # addends of 32 bits are as small as 2**21


# ---- for verification


def check_domains(workload: Workload) -> Mapping[str, Domain]:
    """The domain that the operator draws each argument from: see `schedsearch.ops.checks` and `Op.check_inputs`."""
    return workload.definition.check_inputs(workload.params)


def check_scalars(workload: Workload) -> dict[str, float]:
    """Values of the call-time scalars for verification; see `Op.check_scalars`."""
    spread = sum_sigma(workload.signature, workload.work.reduction, check_domains(workload))
    return dict(workload.definition.check_scalars(workload.params, spread))


def draw(domain: Domain, count: int, rng: np.random.Generator) -> Array:
    """`count` numbers of a domain: float32, or int64 if the domain is a `range`; shape (count,)."""
    if domain.ordered:
        listed: Array = np.resize(np.array(domain.values), count)
        return listed
    places = rng.integers(0, len(domain.values), count, np.int16 if len(domain.values) < 2**15 else np.int64)
    if isinstance(domain.values, range):
        drawn: Array = domain.values.start + domain.values.step * places.astype(np.int64)
    else:
        drawn = np.array(domain.values, np.float32)[places]
    if domain.density < 1.0:
        drawn[rng.random(count, np.float32) >= domain.density] = 0
    if domain.rarity:
        rare = np.array(domain.rare, np.float32)[rng.integers(0, len(domain.rare), count)]
        drawn = np.where(rng.random(count, np.float32) < domain.rarity, rare, drawn)
    return drawn


def second_domains(workload: Workload) -> Mapping[str, Domain]:
    """The domain of the numbers that replace an argument's first ones while a kernel is verified."""
    return {name: domain.second or domain for name, domain in check_domains(workload).items()}


def check_pattern(spec: ArgSpec, domain: Domain, rng: np.random.Generator) -> Pattern:
    """An argument's numbers for verification."""
    return Pattern(encode(draw(domain, min(spec.size, BLOCK), rng), spec.dtype))


# ---- for timing


def timing_pattern(workload: Workload, spec: ArgSpec) -> Pattern:
    """The content of an argument or output while kernels are timed; equal in every process, so that times are comparable.

    Floats are normally distributed, integers uniform over their format (power, and with it the clock, depends on the data),
    indices uniform over the legal ones. Integer addends leave room for the sum in their format.
    An operator may ask for others (`Op.timing_inputs`).
    """
    if (domain := workload.definition.timing_inputs(workload.params).get(spec.name)) is not None:
        return check_pattern(spec, domain, np.random.default_rng(0))
    if spec.below is not None:
        return _uniform_pattern(spec.dtype, 0, spec.below - 1)
    row = dtype(spec.dtype)
    if not row.is_float:
        room = _SUM_ROOM if spec.role == "addend" and row.nbytes > 1 else 1
        return _uniform_pattern(spec.dtype, int(row.lowest) // room, int(row.largest) // room)
    return _normal_pattern(spec.dtype, normal_sigma(workload, spec.name))


def normal_sigma(workload: Workload, name: str) -> float:
    """Standard deviation of an argument's timing data; see `schedsearch.ops.checks.likely_sigmas`."""
    return likely_sigmas(workload.signature, workload.work.reduction).get(name, 1.0)  # an output has none


@functools.lru_cache(maxsize=8)
def _normal_pattern(name: str, sigma: float) -> Pattern:
    return Pattern(encode(np.random.default_rng(0).standard_normal(BLOCK, np.float32) * np.float32(sigma), name))


@functools.lru_cache(maxsize=8)
def _uniform_pattern(name: str, lowest: int, largest: int) -> Pattern:
    numbers = np.random.default_rng(0).integers(lowest, largest, BLOCK, np.int64, endpoint=True)
    return Pattern(encode(numbers, name))


# ---- in memory


class Pattern:
    """A block of numbers in the storage type, repeated over arrays of any size.

    Args:
        block: shape (n,), n == BLOCK unless one array is shorter.
    """

    def __init__(self, block: Array) -> None:
        self._block = block
        copies = 1 if block.size < BLOCK else max(1, _WRITE_BYTES // block.nbytes)
        self._length = copies * block.size
        self._doubled = np.resize(block, self._length + block.size)

    def write(self, device: Device, address: int, count: int, phase: int = 0) -> None:
        """Writes elements phase, phase + 1 ... of the endless pattern to `count` elements at an address."""
        phase %= self._block.size
        for start in range(0, count, self._length):
            piece = self._doubled[phase : phase + min(self._length, count - start)]
            device.copy_in(address + start * piece.itemsize, piece.view(np.uint8).data)

    def elements(self, count: int) -> Array:
        """The first `count` elements, shape (count,)."""
        return np.resize(self._block, count)

    def decoded(self, count: int, name: str) -> Array:
        """The same as numbers of the dtype of this name."""
        return np.resize(decode(self._block, name), count)
