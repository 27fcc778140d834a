"""The numbers that kernels are verified with.

They are integers (and powers of two), so small and sparse that a kernel's sums are exact in any order of addition.
One missing product therefore shows; no error bound hides it. `by_role` chooses them by what an operator says about
its arguments and its arithmetic. An operator that needs other numbers overrides `Op.check_inputs`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from schedsearch.ops.dtypes import dtype
from schedsearch.ops.specs import ArgSpec

FP32_ROUNDOFF = 2.0**-24
_LARGEST_FACTOR = 4  # of floating-point factors; integers use their whole format where sums allow it
_LARGEST_ADDEND = 8
_LARGEST_DATA = 127
_WIDEST_INTEGER = 1 << 20
_SIGMAS = 4.0
_SPARSEST = 2.0**-20
_SIGMA_UNIFORM_8_BITS = 74.0  # of a number that is uniform over 8 bits
_SIGMA_8_BITS = 32.0  # of sums that 8 bits hold, but for a few


@dataclass(frozen=True)
class Rounding:
    """How a kernel may round while it computes. Its output's format adds one rounding to nearest.

    Attributes:
        factors: largest relative error of a factor of a product: 2^-10 if kernels may cut factors to the 10 stored bits of
            TF32; 0 if they must multiply the factors as they are.
        additions: largest error of an addition, relative to its result: 2^-24 for float32.
        factor_bits: bits of the significand that kernels must keep of each factor, the leading one included. Verification
            uses numbers with so many bits, so that a kernel that keeps fewer fails. 0 asks for nothing: the small numbers
            that `by_role` draws anyway have three bits.
    """

    factors: float = 0.0
    additions: float = FP32_ROUNDOFF
    factor_bits: int = 0


@dataclass(frozen=True)
class Domain:
    """Numbers to draw from, uniformly. Only a fraction `density` of the draws is kept; the others become zero.

    Attributes:
        values: at least one number that the argument's format holds exactly; a `range` if there are many.
        rare: numbers that take the place of a fraction `rarity` of the draws.
        ordered: `values` are the argument's elements in their order, repeated; nothing is drawn.
        second: what verification draws when it replaces an argument's numbers by others; None: from the same domain.

    Examples:
        >>> Domain(range(-2, 3)).second_moment
        2.0
    """

    values: Sequence[float]
    density: float = 1.0
    rare: Sequence[float] = ()
    rarity: float = 0.0
    second: Domain | None = None
    ordered: bool = False

    @property
    def largest(self) -> float:
        """Largest magnitude."""
        return max(_largest(self.values), _largest(self.rare) if self.rarity else 0.0)

    @property
    def mean(self) -> float:
        usual = self.density * _mean(self.values)
        return usual + self.rarity * (_mean(self.rare) - usual) if self.rarity else usual

    @property
    def second_moment(self) -> float:
        """Mean of the squares; the variance where the mean is zero."""
        usual = self.density * _mean_square(self.values)
        return usual + self.rarity * (_mean_square(self.rare) - usual) if self.rarity else usual


def _largest(values: Sequence[float]) -> float:
    return float(max(abs(values[0]), abs(values[-1])) if isinstance(values, range) else max(map(abs, values)))


def _mean(values: Sequence[float]) -> float:
    return (values[0] + values[-1]) / 2 if isinstance(values, range) else sum(values) / len(values)


def _mean_square(values: Sequence[float]) -> float:
    if isinstance(values, range):
        return values.step**2 * (len(values) ** 2 - 1) / 12 + _mean(values) ** 2
    return sum(value**2 for value in values) / len(values)


def by_role(
    arguments: Sequence[ArgSpec], outputs: Sequence[ArgSpec], reduction: int, rounding: Rounding | None = None
) -> dict[str, Domain]:
    """What to draw for each argument.

    factor: with factors within +-a, the K products of an output sum to at most K a^2. `a` is the largest number for which
        this sum stays exact in the accumulator (2^24 in float32, 2^31 in int32) and four standard deviations of it stay
        exact in the outputs' formats. If even a = 1 is too much, most factors become zero. Narrow integer outputs reach
        their limits at two standard deviations, so that some elements saturate and most do not. Where the operator asks for
        a precision of floating-point factors, see `_long_factors`.
    addend: integers that are not negligible beside the sum. If an operator sums without factors, they are the summands.
    scale: powers of two.
    index: every legal index, [0, `below`).
    data: integers that the format holds exactly; the whole format for integers of eight bits.

    Args:
        arguments, outputs: of the workload.
        reduction: products, or addends, in the sum of one output element.
        rounding: of kernels; default: float32 additions of factors as they are.
    """
    rounding = rounding or Rounding()
    summed = _summands(arguments, reduction)
    domains = _summand_domains(arguments, summed, outputs, reduction, rounding)
    if rounding.factor_bits:
        domains = _long_factors(domains, arguments, reduction, rounding)
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

    The last factor shrinks with the reduction. Numbers of 8 bits do not shrink. Integers fill their format, and the first
    scale brings their sums to the range of 8 bits; it brings sums of float8 near 1.
    """
    factors = [argument for argument in arguments if argument.role == "factor"]
    scales = [argument for argument in arguments if argument.role == "scale"]
    sigmas = dict.fromkeys((argument.name for argument in arguments), 1.0)
    shrink = 2.0 ** -round(math.log2(reduction) / 2)
    if factors and any(dtype(factor.dtype).is_float for factor in factors):
        narrow = all(dtype(factor.dtype).nbytes == 1 for factor in factors)
        if not narrow or scales:
            sigmas[(scales[0] if narrow else factors[-1]).name] = shrink
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
    arguments: Sequence[ArgSpec],
    summed: Sequence[ArgSpec],
    outputs: Sequence[ArgSpec],
    reduction: int,
    rounding: Rounding,
) -> dict[str, Domain]:
    integers = bool(summed) and not any(dtype(spec.dtype).is_float for spec in summed)
    gain = 2 ** sum(argument.role == "scale" for argument in arguments)
    accumulator = (2**30 if integers else 0.5 / rounding.additions) / gain  # half of what is exact: addends come on top
    exact = min(_likely_largest(output) for output in outputs) / gain
    short = not integers and rounding.additions > FP32_ROUNDOFF  # the largest sum need not be exact, but any likely one
    exact = min(exact, accumulator / 2) if short else exact

    def likely(domains: Mapping[str, Domain]) -> float:
        mean, sigma = _mean_and_sigma(list(domains.values()), reduction)
        return abs(mean) + _SIGMAS * sigma

    domains: dict[str, Domain] = {}
    for limit in range(255 if integers else _LARGEST_FACTOR, 0, -1):
        domains = {spec.name: Domain(_whole_numbers(spec, limit)) for spec in summed}
        worst = reduction * math.prod(domain.largest for domain in domains.values())
        if (worst < accumulator or short) and likely(domains) <= exact:
            return domains
    density = 1.0
    while density > _SPARSEST and likely(domains) > exact:
        density /= 2
        domains = {name: replace(domain, density=density) for name, domain in domains.items()}
    return domains


def _long_factors(
    domains: Mapping[str, Domain], arguments: Sequence[ArgSpec], reduction: int, rounding: Rounding
) -> dict[str, Domain]:
    """Adds odd integers of `factor_bits` bits to the first factor, and to the others' second numbers.

    A kernel that keeps fewer bits of them errs by a whole product or more, which verification sees. About one product of a
    sum has such a factor (16 or more are as good as impossible) and its other factor is small, so that sums stay exact:
    below 2^24, or 2^13 if additions are that much coarser. At no time have two factors of a product so many bits: a kernel
    that splits a factor a into a coarse a_hi and a fine a_lo, and leaves a_lo b_lo out because it is below the roundoff of
    float32, errs by nothing.

    All elements are compared with numbers where the first factor is long. Verification then replaces the factors one by one,
    so that the first becomes short before another becomes long.
    """
    gain = sum(argument.role == "scale" for argument in arguments)
    # 16 products with a factor of up to 4, doubled by each scale
    room = min(rounding.factor_bits, round(-math.log2(rounding.additions)) - 6 - gain)
    formats = {argument.name: dtype(argument.dtype) for argument in arguments}
    found = {}
    for place, (name, short) in enumerate(domains.items()):
        bits = min(room, round(-math.log2(formats[name].roundoff)))
        least, beyond = 2 ** (bits - 1), 2**bits
        spread = sorted({least + 1, beyond - 1, *(least + (beyond - least) * i // 7 | 1 for i in range(7))})
        numbers = tuple(float(sign * number) for number in spread for sign in (-1, 1))
        long = replace(short, rare=numbers, rarity=1.0 / max(2, reduction))
        found[name] = replace(long, second=short) if place == 0 else replace(short, second=long)
    return found


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
