"""`WorkloadRange`: workloads that differ in one size, such as the batch, as one value with a stable identity."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from schedsearch.errors import UsageError, did_you_mean
from schedsearch.identity import canonical_json, sha256_hex
from schedsearch.workload import Workload

MAX_SIZES = 1024  # of a range
RANGE_TEXT = re.compile(r"\s*(\d{1,9})\s*\.\.\s*(\d{1,9})\s*")  # 1..64, as workload files write it


@dataclass(frozen=True)
class WorkloadRange:
    """Workloads for every value of one size from `low` to `high`. `Workload.with_dynamic` makes one.

    Attributes:
        workload: the one with the largest size.
        parameter: name of the size.

    Raises:
        UsageError: the parameter cannot be dynamic, or the bounds are impossible.
        WorkloadError: there is no such workload with one of the bounds.
    """

    workload: Workload
    parameter: str
    low: int
    high: int

    def __post_init__(self) -> None:
        name, low, high = self.parameter, self.low, self.high
        parameters = self.workload.definition.parameters()
        sizes = [each for each, parameter in parameters.items() if parameter.size]
        if name not in sizes:
            raise UsageError(
                f"{self.workload.op} has no size {name!r}{did_you_mean(str(name), sizes)}; allowed: {', '.join(sizes)}"
            )
        for what, bound in (("lowest", low), ("highest", high)):
            if type(bound) is not int or bound < 1:
                raise UsageError(f"the {what} {name} is {bound!r}; allowed: an integer, 1 or more")
        if not low < high:
            raise UsageError(f"{name} from {low} to {high} is not a range; give the smaller bound first: {name}: 1..64")
        if high - low >= MAX_SIZES:
            raise UsageError(f"{name} from {low} to {high} has {high - low + 1} sizes; allowed: up to {MAX_SIZES}")
        object.__setattr__(self, "workload", self.workload.replace(**{name: high}))
        ends = zip(self.at(low).signature, self.workload.signature)
        dependent = [(one, other) for one, other in ends if one.shape != other.shape]
        if not dependent:
            raise UsageError(f"no argument's shape depends on {name}, so that a call does not show it; tune each {name}")
        if fixed := [one.name for one, _ in dependent if one.constant]:
            raise UsageError(
                f"{name} cannot be dynamic: {', '.join(fixed)}, which does not change between calls, has a shape that "
                f"depends on it; tune each {name}"
            )

    @property
    def sizes(self) -> range:
        return range(self.low, self.high + 1)

    def at(self, size: int) -> Workload:
        """The workload of one size."""
        return self.workload.replace(**{self.parameter: size})

    @functools.cached_property
    def json(self) -> str:
        """Canonical JSON; inverse: `from_json`."""
        return canonical_json(
            {"workload": self.workload.json, "parameter": self.parameter, "low": self.low, "high": self.high}
        )

    @property
    def family(self) -> str:
        """Hex digest of everything but the bounds."""
        data = json.loads(self.workload.json)
        del data["params"][self.parameter]
        return sha256_hex(canonical_json({**data, "dynamic": self.parameter}))

    @property
    def label(self) -> str:
        return f"{self.workload.label}, {self.parameter} = {self.low} to {self.high}"

    def samples(self) -> list[int]:
        """The sizes that a search tunes: both ends, and between them in steps of about a factor of two."""
        steps = max(2, math.ceil(math.log2(self.high / self.low)))
        ratio = (self.high / self.low) ** (1 / steps)
        return sorted({self.low, self.high, *(round(self.low * ratio**step) for step in range(1, steps))})


def between(sizes: Sequence[int]) -> list[int]:
    """The sizes halfway between neighbours.

    >>> between([1, 2, 4, 8])
    [3, 6]
    """
    return [(one + other) // 2 for one, other in itertools.pairwise(sizes) if other - one > 1]
