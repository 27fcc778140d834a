"""Data that kernels are verified and timed with, cheap to make at any size: one random block, repeated.

A block's length is prime, so that two elements whose distance is a multiple of some row, channel or image never hold the
same number for that reason: an index that is off shows.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.device import Device
from schedsearch.ops import ArgSpec
from schedsearch.workload import Workload

Array = np.ndarray[Any, np.dtype[Any]]

BLOCK = 1_048_573  # the largest prime below 2**20
_WRITE_BYTES = 16 << 20

# Whole numbers up to this magnitude are exact in the format: 2 ** (bits of the significand).
EXACT_INTEGERS = {"float16": 2**11, "bfloat16": 2**8, "float32": 2**24}
_LARGEST_FACTOR = 4
_SIGMAS = 4.0


def reduction_length(workload: Workload) -> int:
    """K: products summed into one output element; c / groups * r * s of a convolution."""
    return workload.work.reduction


@dataclass(frozen=True)
class Domain:
    """Whole numbers to draw from, uniformly; all but a fraction `density` of the draws become zero."""

    values: tuple[int, ...]
    density: float = 1.0

    def draw(self, count: int, rng: np.random.Generator) -> Array:
        """float32, shape (count,)."""
        drawn: Array = np.array(self.values, np.float32)[rng.integers(0, len(self.values), count, np.int16)]
        if self.density < 1.0:
            drawn[rng.random(count, np.float32) >= self.density] = 0.0
        return drawn

    @property
    def variance(self) -> float:
        """Of the draws; every domain here is symmetric about zero."""
        return self.density * sum(value**2 for value in self.values) / len(self.values)


def integer_domains(workload: Workload) -> dict[str, Domain]:
    """Per argument, what to draw for verification so that fp32 accumulation is exact in every order.

    With factors within +-a the K products of an element sum to at most K a^2 < 2^24. Factors are made smaller, and
    then sparser, until four standard deviations of the sum are exact in the output's format too; the rare larger element
    is covered by the tolerance.
    """
    length = reduction_length(workload)
    names = [arg.name for arg in workload.signature]
    gain = 2 if "scale" in names else 1
    largest_variance = EXACT_INTEGERS[workload.output.dtype] / (_SIGMAS * gain * math.sqrt(length))  # of a factor
    for limit in range(_LARGEST_FACTOR, 0, -1):
        factor = Domain(tuple(range(-limit, limit + 1)))
        if factor.variance <= largest_variance and gain * length * limit**2 < 2**23:
            break
    else:
        factor = Domain((-1, 0, 1), min(1.0, 1.5 * largest_variance))
    special = {"x": factor, "weight": factor, "scale": Domain((-2, -1, 1, 2))}
    return {name: special.get(name, Domain(tuple(range(-8, 9)))) for name in names}


def exact_scalars(workload: Workload) -> dict[str, float]:
    """Call-time scalars for verification: powers of two and whole numbers within the outputs' range, none at its default,
    so that a kernel which ignores them fails. Unknown ones keep their default."""
    domains = integer_domains(workload)
    sigma = math.sqrt(reduction_length(workload) * domains["x"].variance * domains["weight"].variance)
    return dict(workload.definition.check_scalars(workload.params, sigma))


def encode(values: Array, dtype: str) -> Array:
    """float32 values rounded to `dtype`; bfloat16, which NumPy lacks, as its uint16 bits."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return values.astype(dtype)


def decode(raw: Array, dtype: str) -> Array:
    """Inverse of `encode` on an array of bytes or of the storage type; float32 for bfloat16, else `dtype`."""
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.view(dtype)


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


def integer_pattern(spec: ArgSpec, domain: Domain, rng: np.random.Generator) -> Pattern:
    return Pattern(encode(domain.draw(min(spec.size, BLOCK), rng), spec.dtype))


@functools.lru_cache(maxsize=8)
def normal_pattern(dtype: str, sigma: float) -> Pattern:
    """Normally distributed numbers; the same in every process, so that times compare."""
    return Pattern(encode(np.random.default_rng(0).standard_normal(BLOCK, np.float32) * np.float32(sigma), dtype))


def normal_sigma(workload: Workload, name: str) -> float:
    """Standard deviation of an argument's timing data: weights shrink with K so that outputs stay near 1."""
    return 2.0 ** -round(math.log2(reduction_length(workload)) / 2) if name == "weight" else 1.0
