"""The numbers that kernels are verified with.

They are whole numbers (and powers of two), so small and sparse that a kernel's sums are exact in any order of addition.
One missing product therefore shows; no error bound hides it. `by_role` chooses them by what an operator says about
its arguments. An operator that needs other numbers overrides `Op.check_inputs`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from schedsearch.ops.dtypes import dtype

if TYPE_CHECKING:
    from schedsearch.ops.base import ArgSpec

_LARGEST_FACTOR = 4  # of floating-point factors; integers use their whole format where sums allow it
_LARGEST_ADDEND = 8
_LARGEST_DATA = 127
_WIDEST_INTEGER = 1 << 20
_SIGMAS = 4.0
_SPARSEST = 2.0**-20
_SIGMA_UNIFORM_8_BITS = 74.0  # of a number that is uniform over 8 bits
_SIGMA_8_BITS = 32.0  # of sums that 8 bits hold, but for a few


@dataclass(frozen=True)
class Domain:
    """Numbers to draw from, uniformly. Only a fraction `density` of the draws is kept; the others become zero.

    Attributes:
        values: at least one number that the argument's format holds exactly; a `range` if there are many.

    Example:
        >>> Domain(range(-2, 3)).second_moment
        2.0
    """

    values: Sequence[float]
    density: float = 1.0

    @property
    def largest(self) -> float:
        """Largest magnitude."""
        if isinstance(self.values, range):
            return float(max(abs(self.values[0]), abs(self.values[-1])))
        return float(max(map(abs, self.values)))

    @property
    def mean(self) -> float:
        if isinstance(self.values, range):
            return self.density * (self.values[0] + self.values[-1]) / 2
        return self.density * sum(self.values) / len(self.values)

    @property
    def second_moment(self) -> float:
        """Mean of the squares; the variance where the mean is zero."""
        if isinstance(self.values, range):
            count, centre = len(self.values), (self.values[0] + self.values[-1]) / 2
            return self.density * (self.values.step**2 * (count**2 - 1) / 12 + centre**2)
        return self.density * sum(value**2 for value in self.values) / len(self.values)


def by_role(arguments: Sequence[ArgSpec], outputs: Sequence[ArgSpec], reduction: int) -> dict[str, Domain]:
    """What to draw for each argument.

    factor: with factors within +-a, the K products of an output sum to at most K a^2. `a` is the largest number for which
        this sum stays exact in the accumulator (2^24 in float32, 2^31 in int32) and four standard deviations of it stay
        exact in the outputs' formats. If even a = 1 is too much, most factors become zero. Narrow integer outputs reach
        their limits at two standard deviations, so that some elements saturate and most do not.
    addend: whole numbers that are not negligible beside the sum. If an operator sums without factors, they are the summands.
    scale: powers of two.
    index: every legal index, [0, `below`).
    data: whole numbers that the format holds exactly; the whole format for integers of eight bits.

    Args:
        arguments, outputs: of the workload.
        reduction: products, or addends, in the sum of one output element.
    """
    summed = _summands(arguments, reduction)
    domains = _summand_domains(arguments, summed, outputs, reduction)
    sigma = sum_sigma(arguments, reduction, domains)
    for argument in arguments:
        if argument.name not in domains:
            domains[argument.name] = _other(argument, reduction, sigma)
    return {argument.name: domains[argument.name] for argument in arguments}


def sum_sigma(arguments: Sequence[ArgSpec], reduction: int, domains: Mapping[str, Domain]) -> float:
    """Standard deviation of the sum in one output element, before scales and addends; 0 if nothing is summed."""
    summed = [domains[argument.name] for argument in _summands(arguments, reduction) if argument.name in domains]
    return _mean_and_sigma(summed, reduction)[1]


def likely_sigmas(arguments: Sequence[ArgSpec], reduction: int) -> dict[str, float]:
    """Standard deviations of numbers as a network has them: inputs and outputs near 1.

    The last factor shrinks with the reduction. Integers cannot shrink: they fill their format, and the first scale brings
    their sums to the range of 8 bits.
    """
    factors = [argument for argument in arguments if argument.role == "factor"]
    scales = [argument for argument in arguments if argument.role == "scale"]
    sigmas = dict.fromkeys((argument.name for argument in arguments), 1.0)
    shrink = 2.0 ** -round(math.log2(reduction) / 2)
    if factors and any(dtype(factor.dtype).is_float for factor in factors):
        sigmas[factors[-1].name] = shrink
    elif factors and scales:
        sigmas[scales[0].name] = shrink * _SIGMA_8_BITS * _SIGMA_UNIFORM_8_BITS ** -len(factors)
    return sigmas


def is_sum_of_products(arguments: Sequence[ArgSpec]) -> bool:
    """Whether the roles say that outputs are sums of products of arguments, so that they are exact on check inputs."""
    return bool(arguments) and all(argument.role != "data" for argument in arguments)


def _summands(arguments: Sequence[ArgSpec], reduction: int) -> list[ArgSpec]:
    factors = [argument for argument in arguments if argument.role == "factor"]
    return factors or [argument for argument in arguments if argument.role == "addend" and reduction > 1]


def _mean_and_sigma(summed: Sequence[Domain], reduction: int) -> tuple[float, float]:
    if not summed:
        return 0.0, 0.0
    mean = math.prod(domain.mean for domain in summed)
    variance = math.prod(domain.second_moment for domain in summed) - mean**2
    return reduction * mean, math.sqrt(reduction * max(0.0, variance))


def _summand_domains(
    arguments: Sequence[ArgSpec], summed: Sequence[ArgSpec], outputs: Sequence[ArgSpec], reduction: int
) -> dict[str, Domain]:
    integers = bool(summed) and not any(dtype(spec.dtype).is_float for spec in summed)
    gain = 2 ** sum(argument.role == "scale" for argument in arguments)
    accumulator = (2**30 if integers else 2**23) / gain  # half of what is exact: addends come on top
    exact = min(_likely_largest(output) for output in outputs) / gain

    def likely(domains: Mapping[str, Domain]) -> float:
        mean, sigma = _mean_and_sigma(list(domains.values()), reduction)
        return abs(mean) + _SIGMAS * sigma

    domains: dict[str, Domain] = {}
    for limit in range(255 if integers else _LARGEST_FACTOR, 0, -1):
        domains = {spec.name: Domain(_whole_numbers(spec, limit)) for spec in summed}
        worst = reduction * math.prod(domain.largest for domain in domains.values())
        if worst < accumulator and likely(domains) <= exact:
            return domains
    density = 1.0
    while density > _SPARSEST and likely(domains) > exact:
        density /= 2
        domains = {name: replace(domain, density=density) for name, domain in domains.items()}
    return domains


def _likely_largest(output: ArgSpec) -> float:
    row = dtype(output.dtype)
    return 2 * row.largest if not row.is_float and row.nbytes < 4 else row.exact_integers


def _other(argument: ArgSpec, reduction: int, sigma: float) -> Domain:
    row = dtype(argument.dtype)
    if argument.role == "index":
        assert argument.below is not None  # ArgSpec refuses an index without
        return Domain(range(argument.below))
    if argument.role == "scale":
        return Domain((1, 2) if row.kind == "uint" else (-2, -1, 1, 2))
    if argument.role == "addend":
        limit = _LARGEST_ADDEND if row.is_float else max(_LARGEST_ADDEND, round(sigma))
    elif row.is_float:
        limit = _LARGEST_DATA if reduction == 1 else _LARGEST_ADDEND
    else:
        limit = _WIDEST_INTEGER if reduction == 1 else 255
    return Domain(_whole_numbers(argument, limit))


def _whole_numbers(argument: ArgSpec, limit: int) -> range:
    """Those of the format within +-limit."""
    row = dtype(argument.dtype)
    return range(max(-limit, -row.exact_integers if row.is_float else int(row.lowest)), min(limit, row.exact_integers) + 1)
