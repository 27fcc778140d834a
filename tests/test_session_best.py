"""What a tuning run takes for the best: final races with simulated collaborators, and what a race changes in the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from session_support import (
    CPU,
    GPU,
    OTHER,
    WORKLOAD,
    CpuSquare,
    Line,
    RandomTuner,
    Square,
    World,
    square_ns,
)

from schedsearch.config import Config
from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.measurement import Anchor, Outcome, Record
from schedsearch.processes.builder import Candidate
from schedsearch.session.observer import Observer, Trial
from schedsearch.space import ConfigSpace
from schedsearch.target import Target
from schedsearch.task import Task
from schedsearch.workload import Workload


class TestBest:
    def test_the_best_is_the_fastest_verified_one_and_never_slower_than_the_default(self) -> None:
        world = World()
        (task,) = world.tune(trials=50).tasks
        fastest = min(square_ns(Candidate(WORKLOAD, Square(), record.config)) for record in world.searched)
        assert task.best_ns == fastest <= task.default_ns == 246.0
        assert world.store.best(WORKLOAD, GPU.key).config == task.best_config  # type: ignore[union-attr]

    def test_a_wrong_answer_is_never_best(self) -> None:
        world = World(behaviour=lambda c: Outcome.WRONG_ANSWER if square_ns(c) < 150 else square_ns(c))
        (task,) = world.tune(trials=200).tasks
        assert task.best_ns is not None and task.best_ns >= 150

    def test_the_final_race_decides(self) -> None:
        def noisy(candidate: Candidate) -> float:
            return square_ns(candidate) * (0.5 if candidate.config["x"] == 3 else 1.0)

        world = World(behaviour=noisy, race_behaviour=square_ns)
        (task,) = world.tune(trials=200, race_size=5).tasks
        (raced,) = world.runner.raced
        assert Config(x=0, y=0) in raced, "the default always takes part"
        assert task.best_ns == min(square_ns(Candidate(WORKLOAD, Square(), config)) for config in raced)
        best = world.store.best(WORKLOAD, GPU.key)
        assert best is not None and best.final_race and best.config == task.best_config
        assert best.measurement.time_ns == task.best_ns

    def test_every_record_of_a_race_has_its_anchor(self) -> None:
        """Races of different days compare by the ratio to the first template's default, see `Record.anchor_ratio`."""
        hot = lambda c: 1.2 * square_ns(c)  # noqa: E731
        world = World(templates=(Line(), Square()), race_behaviour=hot)
        world.tune(trials=100)
        raced = [record for record in world.store.records if record.final_race]
        assert Config(z=0) in [record.config for record in raced], "although it is not the fastest default"
        assert {record.anchor for record in raced} == {Anchor(Config(z=0).json, 1200.0)}
        assert {record.anchor for record in world.searched} == {None}

    def test_a_best_that_won_a_race_gives_way_to_the_winner_of_a_race_only(self) -> None:
        world = World()
        world.tune(trials=10)
        first = world.store.best(WORKLOAD, GPU.key)
        assert first is not None and first.anchor is not None
        standing: list[Record | None] = []

        class Watch(Observer):
            def on_trial(self, event: Trial) -> None:
                if not event.final_race:
                    standing.append(world.store.best(WORKLOAD, GPU.key))

        world.behaviour = lambda c: 0.8 * square_ns(c)  # the card is now cooler
        world.race_behaviour = square_ns
        (task,) = world.tune(trials=40, observers=[Watch()]).tasks
        assert len(standing) == 30 and all(best is first for best in standing)
        best = world.store.best(WORKLOAD, GPU.key)
        assert best is not None and best.final_race and best.config == task.best_config

    def test_a_standing_best_that_computes_wrong_values_in_a_race_is_demoted_although_another_wins(self) -> None:
        world = World()
        world.tune(trials=10)
        first = world.store.best(WORKLOAD, GPU.key)
        assert first is not None
        demoted = []
        demote = world.store.demote
        world.store.demote = lambda *task: demoted.append(world.store.best(WORKLOAD, GPU.key)) or demote(*task)  # type: ignore
        world.race_behaviour = lambda c: Outcome.WRONG_ANSWER if c.config == first.config else square_ns(c)
        world.tune(trials=20)
        assert demoted == [first], "so that this machine loads its code no more"
        best = world.store.best(WORKLOAD, GPU.key)
        assert best is not None and best.config != first.config

    @pytest.mark.parametrize(("theirs", "raced"), [(Config(x=15, y=15), False), (Config(x=0, y=0), True)])
    def test_what_another_run_promoted_meanwhile_gives_way_to_a_slower_winner_only_if_it_raced_too(
        self, theirs: Config, raced: bool
    ) -> None:
        world = World()
        world.tune(trials=10)

        def promoted_meanwhile(candidate: Candidate) -> float:
            mine = world.store.records[0]
            fast = replace(mine, config=theirs, measurement=replace(mine.measurement, times_ns=(90.0,) * 3))
            (number,) = world.store.append_all([fast])
            world.store.promote(number, Artifact(theirs.json.encode(), LaunchPlan("cuda", "sm_90a", ())))
            return square_ns(candidate)

        world.race_behaviour = promoted_meanwhile
        (task,) = world.tune(trials=20).tasks
        assert (theirs in world.runner.raced[0]) == raced and task.best_ns is not None and task.best_ns > 90.0
        best = world.store.best(WORKLOAD, GPU.key)
        assert best is not None and best.config == (task.best_config if raced else theirs)

    def test_an_anchor_that_fails_is_none(self) -> None:
        world = World(race_behaviour=lambda c: Outcome.WRONG_ANSWER if c.config == Config(x=0, y=0) else square_ns(c))
        (task,) = world.tune(trials=100).tasks
        assert {record.anchor for record in world.store.records} == {None}
        assert task.default_ns is None and task.speedup is None and task.best_ns is not None

    def test_the_plain_configuration_races_although_it_was_not_tried(self) -> None:
        class Plain(Square):
            def plain(self, workload: Workload, target: Target, space: ConfigSpace) -> Config | None:
                return Config(x=0, y=15)

        world = World(templates=(Plain(),))
        (task,) = world.tune(trials=10).tasks
        assert Config(x=0, y=15) in world.runner.raced[0] and task.trials == 10
        assert task.race is not None and task.race.plain is not None and task.race.plain.config == Config(x=0, y=15)
        assert task.race.over_plain == square_ns(Candidate(WORKLOAD, Square(), Config(x=0, y=15))) / task.best_ns  # type: ignore[operator]
        (again,) = world.tune(trials=10).tasks
        assert again.race == task.race, "read from the records"
        assert again.trials == 10, "what only raced was not tried"
        (restricted,) = world.tune(Task(OTHER, restrict={"x": [3, 4]})).tasks
        assert restricted.race is not None and restricted.race.plain is None

    @pytest.mark.parametrize(("target", "square", "ahead"), [(GPU, Square, True), (CPU, CpuSquare, False)])
    def test_what_races_is_built_for_all_tasks_at_once_unless_that_disturbs_a_race(
        self, target: Target, square: type[Square], ahead: bool
    ) -> None:
        class Plain(square):  # type: ignore[misc, valid-type]
            def plain(self, workload: Workload, target: Target, space: ConfigSpace) -> Config | None:
                return Config(x=15, y=15)

        world = World(target=target, templates=(Plain(),))
        world.tune(WORKLOAD, OTHER, trials=10)
        races = [place for place, what in enumerate(world.log) if what == "race"]
        assert len(races) == 2
        assert ("built" in world.log[races[0] : races[1]]) != ahead

    def test_a_plain_configuration_alone_makes_no_race(self) -> None:
        class Plain(Square):
            def plain(self, workload: Workload, target: Target, space: ConfigSpace) -> Config | None:
                return Config(x=0, y=15)

        world = World(templates=(Plain(),), behaviour=lambda c: Outcome.COMPILE_ERROR)
        assert world.tune(trials=10).tasks[0].best_ns is None and not world.runner.raced

    def test_predictions_are_kept_with_the_state_of_the_model(self) -> None:
        class Fitted(RandomTuner):
            def predict(self, configs: Sequence[Config]) -> Any:
                return np.full(len(configs), float(len(self.told) // 16)) if len(self.told) >= 8 else None

        world = World(make_tuner=Fitted)
        world.tune(trials=60)
        predicted = [record for record in world.searched if record.prediction is not None]
        assert {(record.model, record.prediction) for record in predicted} == {(i + 1, float(i)) for i in range(4)}
        assert all((record.model is None) == (record.prediction is None) for record in world.store.records)

    def test_the_default_can_win_the_race(self) -> None:
        world = World(race_behaviour=lambda c: 90.0 if c.config == Config(x=0, y=0) else 500.0)
        (task,) = world.tune().tasks
        assert task.best_config == Config(x=0, y=0)
        assert task.best_ns == task.default_ns == 90.0
        assert task.speedup == 1.0

    def test_a_finalist_that_fails_in_the_race_is_replaced_by_the_next_fastest(self) -> None:
        world = World(race_behaviour=lambda c: Outcome.WRONG_ANSWER if square_ns(c) < 140 else square_ns(c))
        (task,) = world.tune(trials=256).tasks
        assert len(world.runner.raced) > 0
        assert task.best_ns is not None and task.best_ns >= 140
        assert world.store.best(WORKLOAD, GPU.key).config == task.best_config  # type: ignore[union-attr]

    def test_when_all_fail_in_the_race_there_is_no_best(self) -> None:
        world = World(race_behaviour=lambda c: Outcome.WRONG_ANSWER)
        summary = world.tune(trials=10)
        assert not summary.complete
        assert world.store.best(WORKLOAD, GPU.key) is None

    def test_a_task_without_a_valid_configuration_is_reported_and_raises_nothing(self) -> None:
        world = World(behaviour=lambda c: Outcome.COMPILE_ERROR)
        summary = world.tune(trials=10)
        assert not summary.complete
        assert (summary.tasks[0].best_ns, summary.tasks[0].template, summary.tasks[0].default_ns) == (None, None, None)
        assert summary.tasks[0].failures == {"compile_error": 10}

    def test_a_stored_best_of_another_template_is_only_beaten_by_a_faster_time(self) -> None:
        world = World(templates=(Line(),))
        world.tune(trials=10)
        world.templates = (Square(),)
        world.behaviour = lambda c: 5000.0
        world.tune(trials=10)
        assert world.store.best(WORKLOAD, GPU.key).template == "line"  # type: ignore[union-attr]
        world.behaviour = square_ns
        world.tune(trials=20)
        assert world.store.best(WORKLOAD, GPU.key).template == "square"  # type: ignore[union-attr]
