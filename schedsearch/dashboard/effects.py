"""What knobs do, from the trials of one template: importance, values, pairs that differ in one knob, failures.

All functions take trials as arrays: `codes` is (trials, knobs) with the index of each value in `Knobs.values`, -1 where the
config lacks the knob. Times of static rejects and failures are NaN.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from schedsearch.dashboard.views.task import FailureGroup, KnobEffect, Knobs, PairEffect, SharedKnob, ValueEffect
from schedsearch.dashboard.views.values import JSON
from schedsearch.measurement import Outcome

Floats = NDArray[np.float64]
Codes = NDArray[np.int32]
T = TypeVar("T")

STAGES = {
    Outcome.REJECTED: "check",
    Outcome.COMPILE_ERROR: "build",
    Outcome.COMPILE_TIMEOUT: "build",
    Outcome.LAUNCH_ERROR: "launch",
    Outcome.RUN_TIMEOUT: "run",
    Outcome.WRONG_ANSWER: "verify",
    Outcome.WORKER_LOST: "run",
}
_MOST_PAIRS = 2000  # rows of the result for a template, those with the most pairs
_MOST_GROUPS = 100
_MOST_VALUES = 200
_REASON_CHARACTERS = 160
_GROUP_IDS = 20


@dataclass(frozen=True)
class Searched:
    """The trials of the search of one template: those of final races are left out."""

    knobs: Knobs
    codes: Codes
    times_ns: Floats
    outcomes: NDArray[np.str_]
    ids: NDArray[np.int64]
    messages: Sequence[str]

    @property
    def ok(self) -> NDArray[np.bool_]:
        return ~np.isnan(self.times_ns)

    @property
    def rejected(self) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self.outcomes == str(Outcome.REJECTED)
        return found


def quantiles(values: Floats) -> tuple[float, float, float, float, float] | None:
    """Least, lower quartile, median, upper quartile and greatest value; None without any."""
    if not values.size:
        return None
    least, low, middle, high, greatest = np.quantile(values, (0, 0.25, 0.5, 0.75, 1)).tolist()
    return least, low, middle, high, greatest


def epsilon_squared(groups: Codes, values: Floats) -> float | None:
    """Share of the variance of `values` that the groups explain, from 0 to 1, without the share that chance explains.

    None if there are not at least two more values than groups, or all values are equal. A knob with one value gives 0.

    Source: T. L. Kelley, "An unbiased correlation ratio measure", PNAS 21 (1935) 554.
    """
    _, where, counts = np.unique(groups, return_inverse=True, return_counts=True)
    n, k = len(values), len(counts)
    total = float(((values - values.mean()) ** 2).sum()) if n else 0.0
    if n < k + 2 or total <= 0:
        return None
    if k == 1:
        return 0.0
    means = np.bincount(where, values) / counts
    within = float(((values - means[where]) ** 2).sum())
    return max(0.0, 1 - (within / (n - k)) / (total / (n - 1)))


def rank_correlations(groups: NDArray[np.int64], first: Floats, second: Floats) -> list[tuple[int, float | None]]:
    """For each group 0, 1, ...: how many members it has, and Spearman's correlation of two values of its members.

    The correlation is None for fewer than two members, or if all values of one side are equal. Equal values share the mean
    of their ranks. All groups at once, because a long search has thousands of them.
    """
    count = int(groups.max()) + 1 if len(groups) else 0
    sizes = np.bincount(groups, minlength=count)
    centred = []
    for values in (first, second):
        ranks = _ranks(groups, values)
        centred.append(ranks - (np.bincount(groups, ranks, count) / np.maximum(sizes, 1))[groups])
    one, other = centred
    products = np.bincount(groups, one * other, count)
    spread = np.sqrt(np.bincount(groups, one * one, count) * np.bincount(groups, other * other, count))
    return [
        (int(n), float(product / scale) if n >= 2 and scale > 0 else None)
        for n, product, scale in zip(sizes, products, spread)
    ]


def _ranks(groups: NDArray[np.int64], values: Floats) -> Floats:
    """Ranks within each group, up to a constant of the group."""
    order = np.lexsort((values, groups))
    new = np.r_[True, (groups[order][1:] != groups[order][:-1]) | (values[order][1:] != values[order][:-1])]
    starts = np.flatnonzero(new)
    middles = (starts + np.r_[starts[1:], len(order)] - 1) / 2
    ranks = np.empty(len(order))
    ranks[order] = middles[np.cumsum(new) - 1]
    return ranks


def knob_effects(searched: Searched) -> list[KnobEffect]:
    """The effect of each knob on time and on failures, the most important first."""
    ok, rejected = searched.ok, searched.rejected
    logs = np.log(searched.times_ns[ok])
    failed = ~ok & ~rejected
    unusable = (~ok).astype(np.float64)
    effects = []
    for column, (name, values) in enumerate(zip(searched.knobs.names, searched.knobs.values)):
        codes = searched.codes[:, column]
        present = np.bincount(codes[codes >= 0], minlength=len(values))
        shown = range(len(values))
        if len(values) > _MOST_VALUES:
            shown = sorted(np.argsort(-present, kind="stable")[:_MOST_VALUES].tolist())  # type: ignore[assignment]
        rows = []
        for index in shown:
            mine = codes == index
            rows.append(
                ValueEffect(
                    values[index],
                    int((mine & ~rejected).sum()),
                    int((mine & failed).sum()),
                    int((mine & rejected).sum()),
                    quantiles(searched.times_ns[mine & ok]),
                )
            )
        importance = epsilon_squared(codes[ok], logs)
        effects.append(KnobEffect(searched.knobs.template, name, importance, epsilon_squared(codes, unusable), tuple(rows)))
    return sorted(effects, key=lambda effect: -(effect.importance or 0.0))


def pair_effects(searched: Searched) -> list[PairEffect]:
    """Ratios of times of configs that differ in one knob only. If a config has several times, the smallest counts."""
    ok = searched.ok
    codes, times = searched.codes[ok], searched.times_ns[ok]
    if not len(codes):
        return []
    order = np.lexsort((times, *codes.T[::-1]))
    codes, times = codes[order], times[order]
    first = np.r_[True, (codes[1:] != codes[:-1]).any(axis=1)]
    codes, logs = codes[first], np.log(times[first])
    # A config's hash is a sum over its knobs, modulo 2^64, so that a knob can be taken out of it again.
    weights: NDArray[np.uint64] = np.random.default_rng(0).integers(1, 2**63, (codes.shape[1],), dtype=np.uint64)
    hashes = (codes.astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64)
    found = []
    for column, (name, values) in enumerate(zip(searched.knobs.names, searched.knobs.values)):
        own = codes[:, column]
        ratios = _log_ratios(hashes - own.astype(np.uint64) * weights[column], own, logs)
        for (of, to), changes in ratios.items():
            low, middle, high = np.exp(np.quantile(changes, (0.25, 0.5, 0.75))).tolist()
            value_of, value_to = (None if index < 0 else values[index] for index in (of, to))
            found.append(PairEffect(searched.knobs.template, name, value_of, value_to, len(changes), middle, low, high))
    found.sort(key=lambda pair: -pair.pairs)
    return found[:_MOST_PAIRS]


def _log_ratios(group: NDArray[np.uint64], own: Codes, logs: Floats) -> dict[tuple[int, int], Floats]:
    """(value of, value to) with of < to -> log(time with to / time with of) of all configs of the same group."""
    order = np.lexsort((own, group))
    group, own, logs = group[order], own[order], logs[order]
    codes_of, codes_to, changes = [], [], []
    # In a group each value occurs once, so the pairs are those of rows that are 1, 2, ... apart.
    for apart in range(1, int(own.max()) - int(own.min()) + 1):
        same = group[apart:] == group[:-apart]
        if not same.any():
            break
        codes_of.append(own[:-apart][same])
        codes_to.append(own[apart:][same])
        changes.append((logs[apart:] - logs[:-apart])[same])
    if not changes:
        return {}
    of, to, change = np.concatenate(codes_of), np.concatenate(codes_to), np.concatenate(changes)
    order = np.lexsort((to, of))
    of, to, change = of[order], to[order], change[order]
    starts = np.flatnonzero(np.r_[True, (of[1:] != of[:-1]) | (to[1:] != to[:-1])])
    return {(int(of[start]), int(to[start])): part for start, part in zip(starts, np.split(change, starts[1:]))}


def reason_of(message: str) -> str:
    """The first line of a message with its numbers and addresses replaced by #, so that alike failures read alike."""
    line = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return re.sub(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?", "#", line)[:_REASON_CHARACTERS]


def failure_groups(searched: Searched) -> list[FailureGroup]:
    """Failures by outcome and reason, the most frequent first, with the values that they share."""
    groups: dict[tuple[str, str], list[int]] = {}
    reasons = {message: reason_of(message) for message in set(searched.messages)}
    outcomes = searched.outcomes.tolist()
    for position in np.flatnonzero(~searched.ok).tolist():
        groups.setdefault((outcomes[position], reasons[searched.messages[position]]), []).append(position)
    ranked = sorted(groups.items(), key=lambda item: -len(item[1]))[:_MOST_GROUPS]
    return [
        FailureGroup(
            template=searched.knobs.template,
            outcome=outcome,
            stage=STAGES[Outcome(outcome)],
            reason=reason or "no message",
            message=searched.messages[positions[0]],
            count=len(positions),
            ids=tuple(searched.ids[positions[:_GROUP_IDS]].tolist()),
            shared=tuple(_shared(searched, positions)),
        )
        for (outcome, reason), positions in ranked
    ]


def _shared(searched: Searched, positions: Sequence[int]) -> list[SharedKnob]:
    """Up to four values that most of the group has and that are at least 20 points less frequent elsewhere."""
    inside = np.zeros(len(searched.codes), dtype=bool)
    inside[list(positions)] = True
    if inside.all() or len(positions) < 3:
        return []
    found: list[tuple[float, SharedKnob]] = []
    for column, (name, values) in enumerate(zip(searched.knobs.names, searched.knobs.values)):
        codes = searched.codes[:, column] + 1
        here = np.bincount(codes[inside], minlength=len(values) + 1) / inside.sum()
        there = np.bincount(codes[~inside], minlength=len(values) + 1) / (~inside).sum()
        index = int(np.argmax(here - there))
        if index and here[index] >= 0.5 and here[index] - there[index] >= 0.2:
            shared = SharedKnob(name, values[index - 1], float(here[index]), float(there[index]))
            found.append((here[index] - there[index], shared))
    return [shared for _, shared in sorted(found, key=lambda item: -item[0])[:4]]


def worth(pairs: Sequence[PairEffect], template: str, knob: str, of: JSON, to: JSON) -> PairEffect | None:
    """The effect of changing a knob from `of` to `to`; pairs are kept in one direction only."""
    for pair in pairs:
        if (pair.template, pair.knob) == (template, knob):
            if _same(pair.of, of) and _same(pair.to, to):
                return pair
            if _same(pair.of, to) and _same(pair.to, of):
                return PairEffect(template, knob, of, to, pair.pairs, 1 / pair.ratio, 1 / pair.high, 1 / pair.low)
    return None


def _same(one: JSON, other: JSON) -> bool:
    return type(one) is type(other) and bool(one == other)
