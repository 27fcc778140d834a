"""Lines about how far a run of tuning is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from schedsearch.session.observer import Phase
from schedsearch.session.told import Told


def trial(task: int, done: int, elapsed_s: float, final_race: bool = False) -> Any:
    return SimpleNamespace(task=task, done=done, elapsed_s=elapsed_s, final_race=final_race)


def test_a_run_is_told_by_phase_and_every_five_seconds() -> None:
    said: list[str] = []
    told = Told(said.append, 3)
    told.on_phase(Phase("building", 0.0))
    for place, elapsed_s in enumerate((1.0, 4.9, 5.0, 6.0, 9.9, 12.0)):
        told.on_trial(trial(min(place, 1), place + 1, elapsed_s))
    assert told.count == 2
    told.on_trial(trial(2, 6, 20.0, final_race=True))
    assert told.count == 3
    assert said == [
        "tuning: building",
        "tuned 2 of 3 after 5 s, 3 trials",
        "tuned 2 of 3 after 12 s, 6 trials",
        "tuned 3 of 3 after 20 s, in the final race",
    ]
