"""Pairs of knobs: the times of every pair of their values, for the pairs that matter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np

from schedsearch.dashboard.effects import Codes, Searched, epsilon_squared
from schedsearch.dashboard.views.task import KnobCells, KnobEffect, KnobPair

MOST_KNOBS = 6  # of a template, the most important ones: 15 pairs
MOST_VALUES = 24  # of a knob; more cannot be read from a map
LEAST_TRIALS = 2  # valid ones for each pair of values on average; with fewer, nobody knows what both explain


def knob_pairs(searched: Searched, effects: Sequence[KnobEffect]) -> list[KnobPair]:
    """The pairs of the knobs that matter most, the most important pair first; those of unknown importance come last.

    Args:
        effects: of the knobs of `searched`, the most important first (`effects.knob_effects`).
    """
    knobs = searched.knobs
    columns = [knobs.names.index(effect.knob) for effect in effects]
    alone = {column: effect.importance or 0.0 for column, effect in zip(columns, effects)}
    shown = [column for column in columns if 2 <= len(knobs.values[column]) <= MOST_VALUES][:MOST_KNOBS]
    found = []
    for one, other in combinations(sorted(shown), 2):
        pairs = (searched.codes[:, one] + 1) * (MOST_VALUES + 1) + searched.codes[:, other] + 1
        ok = searched.ok
        enough = ok.sum() >= LEAST_TRIALS * len(np.unique(pairs[ok]))
        together = epsilon_squared(pairs[ok], np.log(searched.times_ns[ok])) if enough else None
        found.append(
            KnobPair(
                template=knobs.template,
                first=knobs.names[one],
                second=knobs.names[other],
                importance=together,
                gain=None if together is None else max(0.0, together - max(alone[one], alone[other])),
                cells=_cells(searched, searched.codes[:, one], searched.codes[:, other]),
            )
        )
    rank = {effect.knob: place for place, effect in enumerate(effects)}
    return sorted(found, key=lambda pair: (-(pair.importance or 0.0), rank[pair.first] + rank[pair.second]))


def _cells(searched: Searched, first: Codes, second: Codes) -> KnobCells:
    """The pairs of values that trials have; trials that lack one of both knobs are left out."""
    used = (first >= 0) & (second >= 0) & ~searched.rejected
    first, second, times, ids = first[used], second[used], searched.times_ns[used], searched.ids[used]
    order = np.lexsort((times, second, first))  # failures, which are NaN, come last in their cell
    first, second, times, ids = first[order], second[order], times[order], ids[order]
    changes = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    starts = [0, *(np.flatnonzero(changes) + 1).tolist()] if len(first) else []
    cells = KnobCells([], [], [], [], [], [], [])
    for start, end in pairwise([*starts, len(first)]):
        valid = times[start:end][~np.isnan(times[start:end])]
        cells.first.append(int(first[start]))
        cells.second.append(int(second[start]))
        cells.trials.append(int(end - start))
        cells.failures.append(int(end - start - len(valid)))
        cells.best_ns.append(float(valid[0]) if len(valid) else None)
        cells.median_ns.append(float(np.median(valid)) if len(valid) else None)
        cells.best_id.append(int(ids[start]) if len(valid) else None)
    return cells
