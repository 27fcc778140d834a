"""The knobs of a grid whose blocks may loop over tiles, and their rules: `persistent` and `blocks_per_sm`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from schedsearch.space import Columns, Constraint, Knob

PERSISTENT_DOC = "whether blocks loop over tiles; otherwise there is a block for each"


def persistent_knobs(most: Sequence[int]) -> tuple[Knob, Knob]:
    """`persistent` and `blocks_per_sm`, which is 1 without a persistent grid, and one of `most` with it."""
    doc = "blocks of a persistent grid that share a multiprocessor; 1 without it"
    return Knob("persistent", (False, True), PERSISTENT_DOC), Knob("blocks_per_sm", tuple(sorted({1, *most})), doc)


def persistent_rule(most: Sequence[int]) -> Constraint:
    """The rule of `persistent_knobs`."""
    return Constraint(
        f"blocks_per_sm is 1 without a persistent grid, and at least {min(most)} with it",
        lambda k: np.where(k["persistent"], k["blocks_per_sm"] >= min(most), k["blocks_per_sm"] == 1),
    )


def resident(k: Columns | Mapping[str, Any]) -> Any:
    """Blocks of a persistent grid that share a multiprocessor; 0 if the grid is not persistent."""
    return k["persistent"] * k["blocks_per_sm"]


def earlier_blocks_per_sm(most: Sequence[int]) -> dict[int | str | bool, dict[str, int | str | bool]]:
    """What values of `blocks_per_sm` mean in records from before `persistent`; see `Template.renamed`."""
    found: dict[int | str | bool, dict[str, int | str | bool]] = {0: {"persistent": False, "blocks_per_sm": 1}}
    for count in most:
        found[count] = {"persistent": True, "blocks_per_sm": count}
    return found
