"""Who wins a final race: never a configuration that cannot be told from the default, and ties always in the same way."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from session_support import CPU, GPU, WORKLOAD, Square, World, square_ns

from schedsearch.config import Config
from schedsearch.measure import run_worker
from schedsearch.measurement import Measurement, Outcome, Verdict
from schedsearch.session.race import Entrant, judged, neighbours_ns
from schedsearch.target import Target

WON, TIED, NONE = Verdict.WON, Verdict.TIED, Verdict.NONE


def entrant(x: int, *times_ns: float, template: str = "square", sustained_ns: float | None = None, **more: Any) -> Entrant:
    measurement = Measurement(Outcome.OK, times_ns=times_ns, sustained_ns=sustained_ns)
    return Entrant(template, Config(x=x), measurement, **more)


class TestTheWinner:
    def test_is_the_fastest_if_the_times_tell_it_from_the_others(self) -> None:
        assert judged([entrant(1, 100, 101, 102), entrant(2, 90, 91, 92), entrant(3, 95, 96, 97)]) == [NONE, WON, NONE]

    def test_is_the_default_if_the_fastest_cannot_be_told_from_it(self) -> None:
        default = entrant(0, 100.4, 100.4, 100.4, is_anchor=True, is_default=True)
        assert judged([entrant(1, 100, 100, 100), default]) == [TIED, WON]

    def test_is_not_the_default_if_that_is_slower_than_noise(self) -> None:
        default = entrant(0, 101, 101, 101, is_anchor=True, is_default=True)
        assert judged([entrant(1, 100, 100, 100), default]) == [WON, NONE]

    def test_is_the_default_of_the_task_before_that_of_another_template(self) -> None:
        own = entrant(0, 100.2, 100.2, is_anchor=True, is_default=True)
        other = entrant(0, 100, 100, template="line", is_default=True)
        assert judged([other, own]) == [TIED, WON]
        assert judged([other, entrant(1, 99.9, 99.9)]) == [WON, TIED]

    def test_is_told_by_pairs_of_the_same_turn(self) -> None:
        """A card that becomes hot slows everybody: the medians differ by less than the turns do."""
        drift = [1 + 0.02 * turn for turn in range(8)]
        fast, slow = [100 * each for each in drift], [101 * each for each in drift]
        default = entrant(0, *slow, is_anchor=True, is_default=True)
        assert judged([entrant(1, *fast), default]) == [WON, NONE]

    def test_of_unsteady_times_is_the_default(self) -> None:
        first, second = [100.0, 110.0, 104.0, 98.0] * 4, [109.0, 101.0, 99.0, 112.0] * 4
        default = entrant(0, *second, is_anchor=True, is_default=True)
        assert judged([entrant(1, *first), default]) == [TIED, WON]

    def test_has_the_best_neighbourhood_among_equals(self) -> None:
        """Its speed is the least a matter of this day's noise."""
        cliff = entrant(1, 100, 100, neighbours_ns=150.0)
        plateau = entrant(2, 100.1, 100.1, neighbours_ns=104.0)
        unknown = entrant(3, 100, 100, neighbours_ns=None)
        assert judged([cliff, plateau, unknown]) == [TIED, WON, TIED]

    def test_is_the_first_by_its_text_among_equals_of_equal_neighbourhoods(self) -> None:
        equals = [entrant(x, 100, 100, neighbours_ns=104.0) for x in (3, 1, 2)]
        for seed in range(6):
            shuffled = random.Random(seed).sample(equals, 3)
            (winner,) = [each for each, verdict in zip(shuffled, judged(shuffled)) if verdict is WON]
            assert winner.config == Config(x=1)

    def test_must_not_lose_to_the_default_under_load(self) -> None:
        """Faster in bursts, and 13 % slower once the card is hot."""
        default = entrant(0, 100, 100, sustained_ns=110, is_anchor=True, is_default=True)
        assert judged([entrant(1, 96, 96, sustained_ns=124), default]) == [NONE, WON]
        assert judged([entrant(1, 96, 96, sustained_ns=104), default]) == [WON, NONE]

    def test_never_took_longer_than_the_default(self) -> None:
        """Equal to the fastest in noise, and slower than a default that the same noise leaves behind the fastest."""
        fastest, default = entrant(1, *[100.0] * 9), entrant(0, *[102.0] * 9, is_anchor=True, is_default=True)
        noisy = entrant(2, *[96.0, 110.0, 98.0, 104.0, 103.0, 95.0, 106.0, 97.0, 108.0], neighbours_ns=101.0)
        assert judged([fastest, default, noisy]) == [WON, NONE, TIED]

    def test_of_an_empty_race_is_nobody(self) -> None:
        assert judged([]) == []


class TestANeighbourhood:
    def test_is_what_differs_in_one_knob(self) -> None:
        results = {Config(x=1, y=1): 10.0, Config(x=2, y=1): 20.0, Config(x=1, y=5): 40.0, Config(x=2, y=2): 1.0}
        assert neighbours_ns(Config(x=1, y=1), results) == 30.0

    def test_counts_a_failure_as_the_slowest(self) -> None:
        assert (
            neighbours_ns(Config(x=1, y=1), {Config(x=2, y=1): 20.0, Config(x=3, y=1): None, Config(x=4, y=1): 30.0}) == 30.0
        )

    def test_may_be_unknown(self) -> None:
        assert neighbours_ns(Config(x=1, y=1), {Config(x=1, y=1): 10.0}) is None


class Racer:
    """A kernel that takes so long, and longer on a hot card."""

    def __init__(self, time_ns: float, hot: float) -> None:
        self.time_ns, self.hot, self.calls = time_ns, hot, 0

    def sample(self, count: int) -> list[float]:
        self.calls += 1
        return [self.time_ns * (self.hot if self.calls > 1 else 1.0)] * count


class TestUnderLoad:
    def sustained(
        self, racers: list[Racer], target: Target, monkeypatch: pytest.MonkeyPatch, turn_s: float = 0.0
    ) -> list[float]:
        for name in ("_HEATING_S", "_SUSTAINED_TURN_S"):
            monkeypatch.setattr(run_worker, name, 1e-3)
        worker = object.__new__(run_worker._RunWorker)
        worker._device = SimpleNamespace(target=target)  # type: ignore[assignment]
        return worker._sustained(racers, [[racer.time_ns] for racer in racers], turn_s)  # type: ignore[arg-type]

    def test_long_kernels_on_a_gpu_are_timed_in_turns_once_the_card_is_hot(self, monkeypatch: pytest.MonkeyPatch) -> None:
        racers = [Racer(100e3, 1.0), Racer(200e3, 1.5)]
        assert self.sustained(racers, GPU, monkeypatch) == [100e3, 300e3]

    def test_short_kernels_and_those_of_a_cpu_are_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        short, long = [Racer(99e3, 1.0), Racer(200e3, 1.0)], [Racer(200e3, 1.0)]
        assert self.sustained(short, GPU, monkeypatch) == self.sustained(long, CPU, monkeypatch) == []
        assert [racer.calls for racer in (*short, *long)] == [0, 0, 0]

    def test_kernels_so_long_that_the_race_itself_was_under_load_are_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.sustained([Racer(30e6, 1.0)], GPU, monkeypatch, turn_s=0.06) == []


class TestInARun:
    def test_the_records_of_the_race_have_the_verdicts(self) -> None:
        """All that differs from the winner by less than noise is tied, and stays known."""
        flat = World(race_behaviour=lambda c: 100.0 if square_ns(c) < 150 else 200.0)
        (task,) = flat.tune(trials=200, race_size=4).tasks
        raced = [record for record in flat.store.records if record.final_race]
        won = [record for record in raced if record.verdict is WON]
        tied = [record for record in raced if record.verdict is TIED]
        assert [record.config for record in won] == [task.best_config]
        assert {record.measurement.time_ns for record in won + tied} == {100.0}
        assert len(tied) == sum(record.measurement.time_ns == 100.0 for record in raced) - 1 > 0
        assert task.race is not None and {each.config for each in task.race.tied} == {record.config for record in tied}
        assert all(record.verdict is NONE for record in flat.searched)

    def test_a_race_without_a_faster_one_leaves_the_default(self) -> None:
        world = World(race_behaviour=lambda c: 250.0 if c.config == Config(x=0, y=0) else 249.0)
        (task,) = world.tune(trials=64).tasks
        best = world.store.best(WORKLOAD, GPU.key)
        assert best is not None and best.config == task.best_config == Config(x=0, y=0)
        assert task.speedup == 1.0

    def test_a_race_is_remembered_with_its_winner(self) -> None:
        world = World(race_behaviour=lambda c: 250.0 if c.config == Config(x=0, y=0) else 249.0)
        world.tune(trials=64)
        (again,) = world.tune(trials=64).tasks
        assert again.new_trials == 0 and again.best_config == Config(x=0, y=0)
        assert again.race is not None and again.race.tied

    @pytest.mark.parametrize("flat_from", [100.0, 103.0])
    @pytest.mark.mostly_long(2)
    def test_two_seeds_name_the_same_of_equal_configurations(self, flat_from: float) -> None:
        """The whole space is known to both; the order in which they saw it differs."""

        def times(candidate: Any) -> float:
            return max(flat_from, square_ns(candidate))

        winners = set()
        for seed in range(4):
            (task,) = World(behaviour=times).tune(trials=256, seed=seed).tasks
            winners.add(task.best_config)
        assert len(winners) == 1, Square.name
