"""Records to write in every format, and what a format keeps of them."""

from __future__ import annotations

from records_support import record as make_record

from schedsearch.config import Config
from schedsearch.measurement import Outcome, Record

FORMATS = ("kernel-tuner", "t4", "autotvm")


def records() -> list[Record]:
    """Records of every outcome. One configuration was measured three times, the last time in a final race."""
    made = [
        make_record(1000.0 + i, outcome, number=i, config=Config(bm=2**i, order="row", swizzle=i % 2 == 0))
        for i, outcome in enumerate(Outcome)
    ]
    again = {"config": made[0].config}
    return [*made, make_record(1100.0, number=50, **again), make_record(900.0, number=51, final_race=True, **again)]


def bare(history: list[Record]) -> list[Record]:
    return [Record(**{**vars(one), "source": ""}) for one in history]
