"""Whether the repetitions of a time can be trusted: how far they spread, and whether they fall into two groups.

A median between two groups is a time that the kernel hardly ever takes. It jumps from one group to the other when a few
repetitions change sides, so neither it nor a ratio made of it says anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from schedsearch.dashboard.views.noise import Doubt, Mode
from schedsearch.measurement import BUSY_SPREAD
from schedsearch.text import duration

Floats = NDArray[np.float64]

LEAST_REPETITIONS = 8  # with fewer, the dip test hardly ever finds two groups
LEAST_APART = 0.1  # two groups that are nearer than this are one time with two clock ticks, and do no harm
LEAST_SHARE = 0.1  # of the repetitions in the smaller group; fewer are outliers, which a median ignores

# The 99 % quantile of sqrt(n) times the dip of n uniform numbers, of 200,000 samples each (40,000 from n = 100 on), which
# the package diptest 0.12 computed.
_CRITICAL = (
    (8, 0.4893), (10, 0.5041), (12, 0.5126), (16, 0.5277), (20, 0.5410), (30, 0.5565), (50, 0.5733), (100, 0.5878),
    (200, 0.6028), (500, 0.6174),
)  # fmt: skip


@lru_cache(maxsize=4096)
def doubt_of(times_ns: tuple[float, ...]) -> Doubt:
    """Why the median of repetitions is not to be trusted; "" if it is, or if there are too few to tell."""
    if modes_of(times_ns):
        return "bimodal"
    spread = spread_of(times_ns)
    return "noisy" if spread is not None and spread > BUSY_SPREAD else ""


def words_of(times_ns: tuple[float, ...]) -> str:
    """A sentence about the doubt; "" if there is none."""
    if modes := modes_of(times_ns):
        low, high = modes
        return (
            f"its repetitions fall into two groups: {low.share:.0%} near {duration(low.time_ns)} and {high.share:.0%} "
            f"near {duration(high.time_ns)}, so their median is not to be trusted"
        )
    if doubt_of(times_ns):
        return f"its repetitions spread by {spread_of(times_ns):,.0%}, so other programs disturbed it"
    return ""


def spread_of(times_ns: Sequence[float]) -> float | None:
    """Interquartile range over the median, as `Measurement.spread` has it; None with fewer than four repetitions."""
    n = len(times_ns)
    if n < 4:
        return None
    ranked = sorted(times_ns)

    def at(quarter: int) -> float:
        whole, rest = divmod(quarter * (n + 1), 4)
        whole = min(max(whole, 1), n - 1)
        rest = quarter * (n + 1) - whole * 4
        return (ranked[whole - 1] * (4 - rest) + ranked[whole] * rest) / 4

    return round((at(3) - at(1)) / at(2), 5)


def modes_of(times_ns: Sequence[float]) -> tuple[Mode, Mode] | None:
    """The two groups into which repetitions fall; None if they are one group, or fewer than `LEAST_REPETITIONS`.

    They are two if all of this holds:

    - Hartigan's dip test rejects at the level of 1 % that they come from a distribution with one mode.
    - The split with the least variance inside the groups leaves each at least `LEAST_SHARE` of the repetitions.
    - The medians of the groups are at least `LEAST_APART` apart, as a share of the smaller one.

    Sources: J. A. Hartigan and P. M. Hartigan, "The dip test of unimodality", Annals of Statistics 13 (1985) 70; the split
    is W. D. Fisher's, "On grouping for maximum homogeneity", J. of the American Statistical Association 53 (1958) 789.
    """
    return None if len(times_ns) < LEAST_REPETITIONS else _modes(tuple(times_ns))


@lru_cache(maxsize=256)  # one view asks several times
def _modes(times_ns: tuple[float, ...]) -> tuple[Mode, Mode] | None:
    ranked: Floats = np.sort(np.asarray(times_ns, dtype=np.float64))
    n = len(ranked)
    at = _split(ranked)
    low, high = (float(np.median(part)) for part in (ranked[:at], ranked[at:]))
    if min(at, n - at) < LEAST_SHARE * n or high < (1 + LEAST_APART) * low or dip(ranked) * math.sqrt(n) <= _critical(n):
        return None
    return Mode(low, at / n), Mode(high, 1 - at / n)


def _split(ranked: Floats) -> int:
    """How many of the smallest values are the first of two groups with the least sum of squares around their means."""
    n = len(ranked)
    counts = np.arange(1, n)
    sums = np.cumsum(ranked)[:-1]
    between = sums**2 / counts + (ranked.sum() - sums) ** 2 / (n - counts)  # the squares inside are the rest of a constant
    return int(np.argmax(between)) + 1


def _critical(n: int) -> float:
    sizes, values = zip(*_CRITICAL)
    return float(np.interp(math.log(n), np.log(sizes), values))


def dip(ranked: Floats) -> float:
    """The largest distance between the empirical distribution and the unimodal distribution that is nearest to it.

    Args:
        ranked: at least one value, in ascending order.

    The algorithm is that of P. M. Hartigan (Applied Statistics 34 (1985) 320): it narrows the modal interval as long as
    the greatest convex minorant and the least concave majorant inside it are further apart than the dip outside.
    """
    n = len(ranked)
    found = 1.0  # in units of 1 / 2n
    low, high = 0, n - 1
    while ranked[high] > ranked[low]:
        below, above = _hull(ranked, low, high, convex=True), _hull(ranked, low, high, convex=False)
        apart, left, right = _furthest(ranked, below, above)
        if apart < found:
            break
        outside = [
            *(_sag(ranked, a, b, convex=True) for a, b in pairwise(below) if b <= left),
            *(_sag(ranked, a, b, convex=False) for a, b in pairwise(above) if a >= right),
        ]
        found = max([found, *outside])
        if (left, right) == (low, high):
            break
        low, high = left, right
    return found / (2 * n)


def _hull(x: Floats, low: int, high: int, *, convex: bool) -> list[int]:
    """The corners of the greatest convex minorant, or of the least concave majorant, of the points (x[i], i)."""
    corners: list[int] = []
    for i in range(low, high + 1):
        while len(corners) > 1:
            a, b = corners[-2:]
            turn = (b - a) * (x[i] - x[b]) - (i - b) * (x[b] - x[a])  # above 0: the slope falls at b
            if turn < 0 if convex else turn > 0:
                break
            corners.pop()
        corners.append(i)
    return corners


def _furthest(x: Floats, below: list[int], above: list[int]) -> tuple[float, int, int]:
    """The largest distance of both hulls at a corner, and the corners of the lower and the upper one around it."""
    best = (0.0, below[0], above[-1])
    for corner in above[1:-1]:
        at = int(np.searchsorted(below, corner))
        a, b = below[at - 1], below[at]
        apart = corner + 1 - (a + (x[corner] - x[a]) * (b - a) / (x[b] - x[a])) if x[b] > x[a] else 1.0
        best = max(best, (float(apart), a, corner), key=lambda each: each[0])
    for corner in below[1:-1]:
        at = int(np.searchsorted(above, corner))
        a, b = above[at - 1], above[at]
        apart = a + (x[corner] - x[a]) * (b - a) / (x[b] - x[a]) - (corner - 1) if x[b] > x[a] else 1.0
        best = max(best, (float(apart), corner, b), key=lambda each: each[0])
    return best


def _sag(x: Floats, a: int, b: int, *, convex: bool) -> float:
    """How far the empirical distribution is from a hull's edge between two of its corners."""
    if b - a < 2 or x[b] <= x[a]:
        return 1.0
    inside = np.arange(a, b + 1)
    line = a + (x[a : b + 1] - x[a]) * (b - a) / (x[b] - x[a])
    return float((inside - line).max() + 1 if convex else (line - inside).max() + 1)
