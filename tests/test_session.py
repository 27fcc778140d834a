"""The tuning loop, with collaborators that are functions of the configuration: what it measures, records and decides."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedsearch import hints
from schedsearch.arms import Task, plan_tasks
from schedsearch.errors import ConfigError, Interrupted, UnsupportedError, UsageError
from schedsearch.launch import Artifact, Grid, LaunchPlan, Step
from schedsearch.loop import Session
from schedsearch.measure.builder import Built, Candidate
from schedsearch.measurement import COLD_GRAPH, Measurement, Outcome, Record, Resources
from schedsearch.observer import Observer, RunSummary, TaskSummary, Trial
from schedsearch.options import Options
from schedsearch.records.store import Store
from schedsearch.session import tune
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, Template, TemplateSet
from schedsearch.workload import Config, Workload

GPU = Target("cuda", "a pretended GPU", (9, 0), 132)
CPU = Target("cpu", "a pretended CPU", sms=2)
WORKLOAD = Workload.conv2d(n=1, h=8, w=8, c=8, k=8, r=3, s=3)
OTHER = Workload.conv2d(n=2, h=8, w=8, c=8, k=8, r=3, s=3)


class Square(Template):
    """256 configurations; the time is (x - 11)^2 + (y - 5)^2 + 100 ns in most tests, the default 346 ns."""

    name = "square"
    op = "conv2d"
    kind = "cuda"

    def validate(self, workload: Workload, target: Target) -> str | None:
        return "k must be 8" if workload.k != 8 else None

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        return ConfigSpace([Knob("x", tuple(range(16))), Knob("y", tuple(range(16)))])

    def default(self, workload: Workload, target: Target) -> Config:
        return Config(x=0, y=0)

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        raise NotImplementedError("nothing is compiled here")


class Line(Square):
    name = "line"

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        return ConfigSpace([Knob("z", tuple(range(64)))], [Constraint("z != 3", lambda k: k["z"] != 3)])

    def default(self, workload: Workload, target: Target) -> Config:
        return Config(z=0)


class CpuSquare(Square):
    name = "cpu_square"
    kind = "cpu"


def square_ns(candidate: Candidate) -> float:
    config = candidate.config
    return float((config["x"] - 11) ** 2 + (config["y"] - 5) ** 2 + 100) if "x" in config else 1000.0 + config["z"]


Behaviour = Callable[[Candidate], "float | Outcome"]


class FakeBuilder:
    """Everything is built by the next poll. `code` says which machine code a configuration becomes."""

    def __init__(self, behaviour: Behaviour, code: Callable[[Config], str], log: list[str]) -> None:
        self._behaviour, self._code, self._log = behaviour, code, log
        self._queue: list[tuple[int, Candidate]] = []
        self._tokens = itertools.count()
        self.submitted: list[Candidate] = []
        self.most_pending = 0

    @property
    def pending(self) -> int:
        return len(self._queue)

    def submit(self, candidate: Candidate) -> int:
        token = next(self._tokens)
        self._queue.append((token, candidate))
        self.submitted.append(candidate)
        self.most_pending = max(self.most_pending, self.pending)
        self._log.append("submit")
        return token

    def poll(self, timeout_s: float) -> list[tuple[int, Built | Measurement]]:
        done, self._queue = self._queue, []
        return [(token, self._build(candidate)) for token, candidate in done]

    def _build(self, candidate: Candidate) -> Built | Measurement:
        outcome = self._behaviour(candidate)
        if outcome in (Outcome.REJECTED, Outcome.COMPILE_ERROR, Outcome.COMPILE_TIMEOUT):
            return Measurement(Outcome(outcome), message="as the test wants", build_s=0.5)
        step = Step("kernel", (), Grid(1), 32)
        artifact = Artifact(candidate.config.json.encode(), LaunchPlan("cuda", "sm_90a", (step,)))
        self._log.append("built")
        return Built(artifact, Resources(registers=32), self._code(candidate.config), build_s=0.5)


@dataclass
class FakeRunner:
    """Measures what `behaviour` says; the race too unless `race_behaviour` says otherwise."""

    behaviour: Behaviour
    template_of: Callable[[Config], Template]
    log: list[str]
    race_behaviour: Behaviour | None = None
    measured: list[tuple[Config, float | None]] = field(default_factory=list)
    raced: list[list[Config]] = field(default_factory=list)
    before: Callable[[Config], None] = lambda config: None
    prepared: list[Workload] = field(default_factory=list)
    preparation_s: float = 0.0
    prepare_s: float = 0.0

    def prepare(self, workload: Workload) -> None:
        if workload not in self.prepared:
            self.prepared.append(workload)
            time.sleep(self.preparation_s)
            self.prepare_s += self.preparation_s

    def measure(self, workload: Workload, built: Built, best_ns: float | None) -> Measurement:
        self.prepare(workload)
        config = Config.from_json(built.artifact.code.decode())
        self.before(config)
        self.measured.append((config, best_ns))
        self.log.append("measure")
        return self._measurement(workload, config, self.behaviour)

    def race(self, workload: Workload, built: Sequence[Built]) -> list[Measurement]:
        configs = [Config.from_json(each.artifact.code.decode()) for each in built]
        self.raced.append(configs)
        return [self._measurement(workload, config, self.race_behaviour or self.behaviour) for config in configs]

    def _measurement(self, workload: Workload, config: Config, behaviour: Behaviour) -> Measurement:
        result = behaviour(Candidate(workload, self.template_of(config), config))
        if isinstance(result, Outcome):
            return Measurement(result, message="as the test wants", run_s=0.1)
        return Measurement(Outcome.OK, times_ns=(result,) * 3, run_s=0.1, max_error=0.0)


class MemoryStore:
    """The store's contract in a list."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.best_ids: dict[tuple[str, str, str], int] = {}
        self.runs: dict[str, Any] = {}
        self.threads: set[int] = set()

    def append(self, record: Record) -> int:
        self.threads.add(threading.get_ident())
        self.records.append(record)
        return len(self.records) - 1

    def promote(self, record_id: int, artifact: Artifact, *, if_faster: bool) -> bool:
        record = self.records[record_id]
        assert record.measurement.ok, "what is not ok is never best"
        assert artifact.code.decode() == record.config.json
        best = self.best(record.workload, record.target, record.measurement.mode)
        if if_faster and best is not None and best.measurement.time_ns <= record.measurement.time_ns:
            return False
        self.best_ids[record.workload.id, record.target, record.measurement.mode] = record_id
        return True

    def demote(self, workload: Workload, target_key: str, mode: str = COLD_GRAPH) -> bool:
        return self.best_ids.pop((workload.id, target_key, mode), None) is not None

    def best(self, workload: Workload, target_key: str, mode: str = COLD_GRAPH) -> Record | None:
        record_id = self.best_ids.get((workload.id, target_key, mode))
        return None if record_id is None else self.records[record_id]

    def measured(
        self,
        workload: Workload,
        target_key: str,
        template: str,
        version: int,
        mode: str,
        toolchain: Mapping[str, str] | None,
    ) -> dict[Config, Record]:
        wanted = (workload, target_key, template, version, mode, toolchain)
        return {
            r.config: r
            for r in self.records
            if (r.workload, r.target, r.template, r.template_version, r.measurement.mode, r.toolchain) == wanted
        }

    def tuned(self, op: str, template: str, version: int, mode: str) -> list[tuple[Workload, str]]:
        wanted = (op, template, version, mode, True)
        return list(
            {
                (r.workload, r.target): None
                for r in self.records
                if (r.workload.op, r.template, r.template_version, r.measurement.mode, r.measurement.ok) == wanted
            }
        )

    def evidence(
        self, workload: Workload, target_key: str, template: str, version: int, mode: str, *, limit: int
    ) -> list[tuple[Config, float | None]]:
        found = self.measured(workload, target_key, template, version, mode, {"compiler": "1"})
        times = [(config, record.measurement.time_ns) for config, record in found.items()]
        return sorted(times, key=lambda result: (result[1] is None, result[1]))[:limit]

    def start_run(self, info: dict[str, Any]) -> str:
        self.runs[f"run{len(self.runs)}"] = None
        return f"run{len(self.runs) - 1}"

    def finish_run(self, run_id: str, summary: dict[str, Any]) -> None:
        self.runs[run_id] = summary


class RandomTuner:
    """Default first, then the hints, then everything else in a random order."""

    batch = 4

    def __init__(
        self, space: ConfigSpace, seed: int, default: Config | None, exclude: Any, hints: Sequence[Config] = ()
    ) -> None:
        everything = space.sample(10**6, np.random.default_rng(seed))
        ordered = list(dict.fromkeys([default] * (default is not None) + list(hints) + everything))
        self.hints = list(hints)
        self.sources: list[Sequence[tuple[Config, float | None]]] = []
        self._left = [config for config in ordered if config not in exclude]
        self.told: list[tuple[Config, float | None]] = []
        self.asked: list[Config] = []

    @property
    def finished(self) -> bool:
        return not self._left

    def ask(self, n: int) -> list[Config]:
        taken, self._left = self._left[:n], self._left[n:]
        self.asked += taken
        return taken

    def tell(self, results: Sequence[tuple[Config, float | None]]) -> None:
        self.told += results

    def transfer(self, sources: Sequence[Sequence[tuple[Config, float | None]]]) -> None:
        assert not self.asked, "sources come before the first ask"
        self.sources += sources

    def predict(self, configs: Sequence[Config]) -> Any:
        return np.array([float(config.get("x", 0)) for config in configs])


@dataclass
class World:
    """A session's collaborators, and what they saw."""

    behaviour: Behaviour = square_ns
    code: Callable[[Config], str] = lambda config: config.json
    race_behaviour: Behaviour | None = None
    templates: tuple[Template, ...] = (Square(),)
    target: Target = GPU
    store: MemoryStore = field(default_factory=MemoryStore)
    make_tuner: type[RandomTuner] = RandomTuner
    make_builder: type[FakeBuilder] = FakeBuilder
    tuners: list[RandomTuner] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    before: Callable[[Config], None] = lambda config: None
    preparation_s: float = 0.0

    def tune(self, *tasks: Task | Workload, observers: Sequence[Observer] = (), **options: Any) -> RunSummary:
        plans = plan_tasks(tasks or [WORKLOAD], TemplateSet(self.templates), self.target)
        self.tuners.clear()
        self.log.clear()
        self.trials.clear()
        self.builder = self.make_builder(self.behaviour, self.code, self.log)
        self.runner = FakeRunner(self.behaviour, self._template_of, self.log, self.race_behaviour, before=self.before)
        self.runner.preparation_s = self.preparation_s
        session = Session(
            plans, self.store, self.builder, self.runner, self.target, Options(**{"trials": 20, **options}),
            {"compiler": "1"}, [_Keep(self.trials), *observers], db="records.db", tuner_factory=self._tuner,
        )  # fmt: skip
        return session.run()

    def _tuner(
        self, name: str, space: ConfigSpace, *, seed: int, default: Config | None, exclude: Any, hints: Sequence[Config]
    ) -> RandomTuner:
        self.tuners.append(self.make_tuner(space, seed, default, exclude, hints))
        return self.tuners[-1]

    def _template_of(self, config: Config) -> Template:
        return next(t for t in self.templates if not t.space(WORKLOAD, self.target).check(config))

    @property
    def searched(self) -> list[Record]:
        return [record for record in self.store.records if not record.final_race]


class _Keep(Observer):
    def __init__(self, trials: list[Trial]) -> None:
        self._trials = trials

    def on_trial(self, event: Trial) -> None:
        self._trials.append(event)


class TestBudget:
    def test_spends_exactly_the_trials_each_on_a_distinct_configuration(self) -> None:
        world = World()
        summary = world.tune(trials=20)
        assert summary.stopped == "trials"
        assert [task.trials for task in summary.tasks] == [20]
        assert len({record.config for record in world.searched}) == len(world.searched) == 20

    def test_the_default_is_measured_first(self) -> None:
        world = World()
        world.tune()
        assert world.runner.measured[0][0] == Config(x=0, y=0)

    def test_rejected_candidates_are_recorded_and_cost_no_trial(self) -> None:
        world = World(behaviour=lambda c: Outcome.REJECTED if c.config["x"] % 2 else square_ns(c))
        summary = world.tune(trials=20)
        outcomes = Counter(record.measurement.outcome for record in world.searched)
        assert outcomes[Outcome.OK] == 20
        assert outcomes[Outcome.REJECTED] == summary.tasks[0].outcomes["rejected"] > 0
        assert summary.tasks[0].trials == 20

    def test_equal_machine_code_is_measured_once_and_costs_one_trial(self) -> None:
        world = World(code=lambda config: str(config["x"]))
        summary = world.tune(trials=16)
        assert len(world.runner.measured) == 16  # one for each x
        assert summary.tasks[0].outcomes["duplicate"] == len(world.builder.submitted) - 16 > 0
        assert len(dict(world.tuners[0].told)) == len(world.builder.submitted), "the tuner hears of duplicates too"

    def test_failures_cost_a_trial_and_are_told_as_failures(self) -> None:
        failures = [
            Outcome.COMPILE_ERROR,
            Outcome.WRONG_ANSWER,
            Outcome.RUN_TIMEOUT,
            Outcome.WORKER_LOST,
            Outcome.LAUNCH_ERROR,
        ]
        world = World(behaviour=lambda c: failures[c.config["x"]] if c.config["x"] < 5 and c.config["y"] else square_ns(c))
        summary = world.tune(trials=120)
        assert summary.tasks[0].trials == 120
        assert {Outcome(name) for name in summary.tasks[0].failures} == set(failures)
        assert all(time is None for config, time in world.tuners[0].told if config["x"] < 5 and config["y"])

    def test_a_small_space_ends_the_run(self) -> None:
        world = World(templates=(Line(),))
        summary = world.tune(trials=1000)
        assert (summary.stopped, summary.tasks[0].trials) == ("exhausted", 63)

    def test_a_space_of_rejects_ends_the_run(self) -> None:
        class Huge(Square):
            def space(self, workload: Workload, target: Target) -> ConfigSpace:
                return ConfigSpace([Knob("x", tuple(range(100))), Knob("y", tuple(range(100)))])

        world = World(behaviour=lambda c: Outcome.REJECTED, templates=(Huge(),))
        summary = world.tune(trials=10)
        assert summary.stopped == "exhausted"
        assert not summary.complete
        assert len(world.builder.submitted) < 1000

    def test_time_ends_the_search_and_the_race_is_still_held(self) -> None:
        world = World(before=lambda config: time.sleep(0.02))
        summary = world.tune(trials=None, time_s=0.2)
        assert summary.stopped == "time"
        assert 1 <= summary.tasks[0].trials < 100
        assert world.runner.raced

    def test_the_last_batch_on_a_cpu_is_cut_to_the_time_that_is_left(self) -> None:
        world = World(templates=(CpuSquare(),), target=CPU, before=lambda config: time.sleep(0.1))
        world.tune(trials=None, time_s=1.0, queue_depth=8)
        assert 8 <= len(world.searched) < 16, "there is no time for all of the second eight"

    def test_impossible_options_are_refused(self) -> None:
        for wrong in ({"trials": 0}, {"time_s": 0.0}, {"mode": "lukewarm"}):
            with pytest.raises(UsageError, match="allowed"):
                Options(**wrong)  # type: ignore[arg-type]


class TestSharing:
    def test_tasks_share_the_sum_of_trials(self) -> None:
        summary = World().tune(WORKLOAD, OTHER, trials=30)
        assert sum(task.trials for task in summary.tasks) == 60
        assert min(task.trials for task in summary.tasks) >= 8

    def test_weight_attracts_trials(self) -> None:
        heavy, light = World().tune(Task(WORKLOAD, weight=10.0), OTHER, trials=40).tasks
        assert heavy.trials > 1.5 * light.trials

    def test_a_template_that_is_far_behind_is_starved(self) -> None:
        world = World(templates=(Line(), Square()))  # the line is at least 3 times slower than the square's default
        (task,) = world.tune(trials=100).tasks
        line, square = task.arms
        assert line.trials < 0.25 * square.trials
        assert line.trials >= 8, "but it got its warm-up"
        assert task.template == "square"

    def test_every_arm_gets_its_default_even_with_a_tiny_budget(self) -> None:
        world = World(templates=(Line(), Square()))
        world.tune(trials=2)
        assert {record.config for record in world.searched} == {Config(x=0, y=0), Config(z=0)}

    def test_the_order_of_tasks_does_not_change_what_a_tuner_draws(self) -> None:
        first, second = World(), World()
        first.tune(WORKLOAD, OTHER)
        second.tune(OTHER, WORKLOAD)
        n = min(len(first.tuners[0].asked), len(second.tuners[1].asked))
        assert first.tuners[0].asked[:n] == second.tuners[1].asked[:n]


class TestPipeline:
    def test_builders_are_kept_ahead_on_a_gpu(self) -> None:
        world = World()
        world.tune(trials=60, queue_depth=12)
        assert world.builder.most_pending > 1
        first_measure, last_submit = world.log.index("measure"), len(world.log) - 1 - world.log[::-1].index("submit")
        assert first_measure < last_submit

    def test_building_and_measuring_alternate_on_a_cpu(self) -> None:
        world = World(templates=(CpuSquare(),), target=CPU)
        summary = world.tune(trials=40)
        under_way = 0
        for event in world.log:
            under_way += {"submit": 1, "built": -1, "measure": 0}[event]
            assert event != "measure" or under_way == 0, "measured while something was being built"
        assert summary.tasks[0].trials == 40

    def test_the_runner_learns_the_best_time_so_far(self) -> None:
        world = World(templates=(CpuSquare(),), target=CPU)
        world.tune(trials=40)
        assert world.runner.measured[0][1] is None
        best = np.inf
        for config, told_ns in world.runner.measured:
            assert told_ns is None or told_ns == best
            best = min(best, square_ns(Candidate(WORKLOAD, CpuSquare(), config)))

    def test_only_one_thread_writes_to_the_store(self) -> None:
        world = World()
        world.tune(trials=40)
        assert world.store.threads == {threading.get_ident()}

    def test_shares_of_wall_time_are_fractions(self) -> None:
        shares = World(before=lambda config: time.sleep(0.05)).tune(trials=20).shares
        assert 0.5 < shares.device <= 1
        assert 0 <= shares.build <= 1 and 0 <= shares.tuner <= 1
        assert shares.device + shares.build + shares.tuner + shares.preparing < 1.01

    def test_preparing_workloads_is_no_work_of_the_device(self) -> None:
        summary = World(preparation_s=0.5).tune(WORKLOAD, OTHER, trials=8)
        preparing_s, device_s = (share * summary.wall_s for share in (summary.shares.preparing, summary.shares.device))
        assert preparing_s > 0.9, "half a second for each of the two"
        assert device_s < 0.5, "eight fake measurements take milliseconds"

    def test_the_device_gets_ready_for_a_workload_while_its_first_candidates_are_built(self) -> None:
        world = World(preparation_s=0.05)
        built_at: list[int] = []

        class SlowBuilder(FakeBuilder):
            def poll(self, timeout_s: float) -> list[tuple[int, Built | Measurement]]:
                time.sleep(0.02)
                if len(world.runner.prepared) < 2:
                    return []
                built_at.append(len(world.runner.measured))
                return super().poll(timeout_s)

        world.make_builder = SlowBuilder
        world.tune(WORKLOAD, OTHER, trials=8, queue_depth=32)
        assert built_at[0] == 0, "nothing was measured when both workloads were ready"

    def test_tuners_think_in_a_thread_of_their_own_while_candidates_are_built(self) -> None:
        threads: set[int] = set()
        meanwhile: list[int] = []  # what happened elsewhere during each ask

        class Thinker(RandomTuner):
            def ask(self, n: int) -> list[Config]:
                threads.add(threading.get_ident())
                before = len(world.log)
                time.sleep(0.02)
                meanwhile.append(len(world.log) - before)
                return super().ask(n)

            def tell(self, results: Sequence[tuple[Config, float | None]]) -> None:
                threads.add(threading.get_ident())
                super().tell(results)

        world = World(make_tuner=Thinker)
        summary = world.tune(WORKLOAD, OTHER, trials=40, queue_depth=16, tuner_thread=True)
        assert sum(task.trials for task in summary.tasks) == 80
        assert len(threads) == 1 and threading.get_ident() not in threads
        assert max(meanwhile) > 0
        assert world.store.threads == {threading.get_ident()}
        assert len({record.config for record in world.searched if record.workload == WORKLOAD}) == summary.tasks[0].trials

    def test_a_tuner_that_fails_in_its_thread_ends_the_run(self) -> None:
        class Broken(RandomTuner):
            def tell(self, results: Sequence[tuple[Config, float | None]]) -> None:
                raise ZeroDivisionError("a bug of a tuner")

        for apart in (False, True):
            with pytest.raises(ZeroDivisionError, match="a bug"):
                World(make_tuner=Broken).tune(tuner_thread=apart)

    def test_a_tuner_that_waits_for_results_is_asked_again_when_it_has_them(self) -> None:
        class Waiting(RandomTuner):
            def ask(self, n: int) -> list[Config]:
                return super().ask(n) if set(self.asked) <= dict(self.told).keys() else []

        for apart in (False, True):
            assert World(make_tuner=Waiting).tune(trials=30, tuner_thread=apart).tasks[0].trials == 30

    def test_records_keep_batch_prediction_run_and_stamps(self) -> None:
        world = World()
        before = time.time()
        world.tune(trials=20)
        default, *_ = world.searched
        for record in world.searched:
            assert record.prediction == (record.config["x"] if record is not default else None)
            assert record.run == "run0" and record.batch >= 1
            assert before <= record.started_at <= record.finished_at <= time.time()
            assert record.toolchain == {"compiler": "1"}
        assert len({record.batch for record in world.searched}) > 1

    def test_an_error_of_a_collaborator_is_not_swallowed(self) -> None:
        def fail(config: Config) -> None:
            raise OSError("the device fell off the bus")

        with pytest.raises(OSError, match="fell off"):
            World(before=fail).tune()


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

    def test_the_default_can_win_the_race(self) -> None:
        world = World(race_behaviour=lambda c: 90.0 if c.config == Config(x=0, y=0) else 500.0)
        (task,) = world.tune().tasks
        assert task.best_config == Config(x=0, y=0)
        assert task.best_ns == task.default_ns == 90.0
        assert task.speedup == 1.0

    def test_who_fails_in_the_race_is_replaced_by_the_next_fastest(self) -> None:
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

    def test_no_valid_configuration_is_said_and_raises_nothing(self) -> None:
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


class TestResume:
    def test_the_same_number_of_trials_again_measures_nothing(self) -> None:
        world = World()
        first = world.tune(trials=20)
        records = len(world.store.records)
        again = world.tune(trials=20)
        assert len(world.store.records) == records
        assert again.new_trials == 0
        assert [(t.best_ns, t.best_config, t.trials, t.default_ns) for t in again.tasks] == [
            (t.best_ns, t.best_config, t.trials, t.default_ns) for t in first.tasks
        ]

    def test_more_trials_go_on_where_the_last_run_ended(self) -> None:
        world = World()
        world.tune(trials=20)
        summary = world.tune(trials=50)
        assert (summary.tasks[0].trials, summary.new_trials) == (50, 30)
        assert len({record.config for record in world.searched}) == len(world.searched) == 50
        assert len(world.tuners[0].told) == 50, "the model was taught what was measured before"

    def test_a_best_of_an_earlier_run_is_built_again_for_the_race(self) -> None:
        world = World()
        world.tune(trials=256)
        world.store.records.pop(next(i for i, r in enumerate(world.store.records) if r.config == Config(x=15, y=15)))
        world.store.best_ids.clear()
        (task,) = world.tune(trials=256).tasks
        assert task.best_config == Config(x=11, y=5)
        assert Config(x=11, y=5) in world.runner.raced[0]

    def test_fresh_ignores_earlier_records(self) -> None:
        world = World()
        world.tune(trials=20)
        summary = world.tune(trials=20, resume=False)
        assert summary.new_trials == summary.tasks[0].trials == 20
        assert world.runner.measured[0][0] == Config(x=0, y=0)

    def test_another_toolchain_is_measured_again(self) -> None:
        world = World()
        world.tune(trials=20)
        world.store.records = [replace(record, toolchain={"compiler": "0"}) for record in world.store.records]
        assert world.tune(trials=20).new_trials == 20

    def test_a_new_task_beside_old_ones_gets_its_own_share(self) -> None:
        world = World()
        world.tune(WORKLOAD, trials=100)
        old, new = world.tune(WORKLOAD, OTHER, trials=30).tasks
        assert old.new_trials + new.new_trials == 30
        assert new.new_trials >= 8


class TestHints:
    FAR = WORKLOAD.replace(n=64, h=32, w=32)

    def of_workload(self, candidate: Candidate) -> float:
        """The best x of similar workloads is the same: 11, or 3 for big ones."""
        x = 11 if candidate.workload.n < 32 else 3
        return float((candidate.config["x"] - x) ** 2 + (candidate.config["y"] - 5) ** 2 + 100)

    def test_the_best_of_similar_workloads_is_tried_right_after_the_default(self) -> None:
        world = World(behaviour=self.of_workload)
        best, far = (world.tune(workload, trials=200).tasks[0].best_config for workload in (WORKLOAD, self.FAR))
        world.tune(OTHER, trials=10)
        assert world.tuners[0].hints == [best, far], "the most similar first"
        assert [config for config, _ in world.runner.measured[:3]] == [Config(x=0, y=0), best, far]

    def test_a_few_trials_suffice_where_a_similar_workload_was_tuned(self) -> None:
        cold, warm = World(behaviour=self.of_workload), World(behaviour=self.of_workload)
        warm.tune(WORKLOAD, trials=256)
        for world in (cold, warm):
            world.tune(OTHER, trials=8)
        found = [world.store.best(OTHER, GPU.key).measurement.time_ns for world in (cold, warm)]  # type: ignore[union-attr]
        assert found[1] == 100.0 < found[0], "256 configurations, one of which takes 100 ns"

    def test_what_one_run_finds_helps_its_later_arms(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layers = [WORKLOAD.replace(n=n) for n in range(1, 25)]
        helped, alone = World(behaviour=self.of_workload), World(behaviour=self.of_workload)
        with_hints = helped.tune(*layers, trials=9).tasks
        monkeypatch.setattr("schedsearch.hints.MAX_HINTS", 0)
        without = alone.tune(*layers, trials=9).tasks
        assert helped.tuners[0].hints == [] and all(tuner.hints for tuner in helped.tuners[4:])
        mean_ns = [float(np.mean([task.best_ns or np.inf for task in tasks])) for tasks in (with_hints, without)]
        assert mean_ns[0] - 100 < 0.6 * (mean_ns[1] - 100), "100 ns is the optimum of every layer"

    def test_only_the_same_version_of_the_template_gives_hints_and_fresh_gives_none(self) -> None:
        class Newer(Square):
            version = Square.version + 1

        world = World()
        world.tune(WORKLOAD, trials=20)
        world.tune(OTHER, trials=8, resume=False)
        assert world.tuners[0].hints == []
        world.templates = (Newer(),)
        world.tune(OTHER, trials=8)
        assert world.tuners[0].hints == []

    def test_records_of_this_target_come_before_those_of_others(self) -> None:
        world = World()
        world.target = replace(GPU, name="another GPU", sms=64)
        elsewhere = world.tune(OTHER, trials=20).tasks[0].best_config
        world.target, world.behaviour = GPU, self.of_workload
        here = world.tune(self.FAR, trials=200).tasks[0].best_config
        world.tune(OTHER, trials=8)
        assert world.tuners[0].hints == [here, elsewhere]

    def test_results_of_similar_tasks_are_offered_to_the_model(self) -> None:
        world = World(behaviour=self.of_workload)
        near, far = (world.tune(workload, trials=40) and list(world.searched) for workload in (WORKLOAD, self.FAR))
        world.target = replace(GPU, name="another GPU", sms=64)
        world.tune(WORKLOAD, trials=40)
        world.target = GPU
        summary = world.tune(OTHER, trials=10)
        sources = world.tuners[0].sources
        assert [dict(results) for results in sources[:2]] == [
            {record.config: record.measurement.time_ns for record in records}
            for records in (near, [record for record in far if record.workload == self.FAR])
        ], "the most similar first, then the other device"
        assert [len(results) for results in sources] == [40, 40, 40] and summary.borrowed == 120
        assert summary.to_json()["tasks"][0]["templates"][0]["borrowed"] == 120
        again = world.tune(OTHER, trials=12)
        assert len(world.tuners[0].told) == 12 and again.borrowed == 120, "its own results are told, not offered"

    def test_the_four_most_similar_are_enough_and_each_gives_400_results_at_most(self) -> None:
        class Wide(Square):
            def space(self, workload: Workload, target: Target) -> ConfigSpace:
                return ConfigSpace([Knob("x", tuple(range(32))), Knob("y", tuple(range(32)))])

        world = World(templates=(Wide(),))
        layers = [WORKLOAD.replace(n=n) for n in (3, 4, 5, 6, 7)]
        for layer in layers:
            world.tune(layer, trials=450 if layer.n == 3 else 40, resume=False)
        world.tune(OTHER, trials=8)
        assert [len(results) for results in world.tuners[0].sources] == [400, 40, 40, 40]

    def test_few_results_are_not_offered_and_fresh_offers_none_of_earlier_runs(self) -> None:
        world = World()
        world.tune(WORKLOAD, trials=hints.FEWEST_RESULTS - 1)
        world.tune(OTHER, trials=8)
        assert world.tuners[0].sources == []
        world.tune(WORKLOAD, trials=hints.FEWEST_RESULTS)
        world.tune(self.FAR, trials=8, resume=False)
        assert world.tuners[0].sources == []
        world.tune(OTHER, trials=9)
        assert [len(results) for results in world.tuners[0].sources] == [hints.FEWEST_RESULTS, 8]

    def test_what_one_run_measured_is_offered_to_its_later_tasks(self) -> None:
        layers = [WORKLOAD.replace(n=n) for n in range(1, 25)]
        for resume in (True, False):
            world = World()
            world.tune(*layers, trials=9, resume=resume)
            offered = [[len(results) for results in tuner.sources] for tuner in world.tuners]
            assert offered[0] == [] and len(offered[-1]) == 4 and all(8 <= n <= 9 for n in offered[-1])

    def test_every_arm_has_its_default_before_any_tuner_is_asked(self) -> None:
        layers = [WORKLOAD.replace(n=n) for n in range(1, 7)]
        world = World()
        world.tune(*layers, trials=8)
        assert [record.workload for record in world.searched[:6]] == layers
        assert {record.config for record in world.searched[:6]} == {Config(x=0, y=0)}
        assert all(dict(tuner.told).keys() >= {Config(x=0, y=0)} for tuner in world.tuners), "they learn from it"

    def test_a_real_tuner_learns_from_a_real_store(self, tmp_path: Path) -> None:
        """xgb on 256 configurations: with what a like task knows it needs fewer trials to the optimum."""
        found = {}
        for resume in (True, False):
            with Store.open(tmp_path / f"{resume}.db") as store:
                for task in (Task(WORKLOAD), Task(OTHER)):
                    world = World(behaviour=self.slightly_different)
                    plans = plan_tasks([task], TemplateSet(world.templates), GPU)
                    runner = FakeRunner(world.behaviour, world._template_of, [])
                    builder = FakeBuilder(world.behaviour, world.code, [])
                    options = Options(trials=96 if task.workload == WORKLOAD else 12, resume=resume)
                    summary = Session(plans, store, builder, runner, GPU, options, {"compiler": "1"}).run()
                found[resume] = summary
        assert (found[True].borrowed, found[False].borrowed) == (96, 0)
        gap = {resume: summary.tasks[0].best_after_ns[11] - 100 for resume, summary in found.items()}
        assert gap[True] < gap[False] and gap[True] < 5, "100 ns is the optimum"

    def slightly_different(self, candidate: Candidate) -> float:
        """The optimum of the two workloads is one step apart, so that no hint is the answer."""
        x = 11 if candidate.workload == WORKLOAD else 10
        return float((candidate.config["x"] - x) ** 2 + (candidate.config["y"] - 5) ** 2 + 100)

    def test_hints_outside_the_restrictions_are_dropped(self) -> None:
        world = World()
        world.tune(WORKLOAD, trials=256)
        world.tune(Task(OTHER, restrict={"x": [4, 5]}), trials=8)
        assert world.tuners[0].hints == []


class TestInterruption:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_the_first_signal_stops_cleanly_and_saves_everything(self, number: signal.Signals) -> None:
        seen: list[Config] = []

        def send(config: Config) -> None:
            seen.append(config)
            if len(seen) == 5:
                os.kill(os.getpid(), number)
                time.sleep(0.05)

        world = World(before=send)
        handler = signal.getsignal(number)
        ends: list[RunSummary] = []

        class End(Observer):
            def on_end(self, summary: RunSummary) -> None:
                ends.append(summary)

        with pytest.raises(Interrupted, match=r"records\.db") as caught:
            world.tune(trials=100, observers=[End()])
        assert caught.value.exit_code == 130
        assert caught.value.summary == ends[0] and ends[0].stopped == "interrupted"
        assert len(world.searched) == len(seen), "the measurement under way is finished and recorded"
        assert len(seen) <= 6
        assert not world.runner.raced
        assert signal.getsignal(number) is handler, "the caller's handler is back"
        assert world.store.runs["run0"]["stopped"] == "interrupted"

        world.before = lambda config: None
        assert world.tune(trials=100).new_trials == 100 - len(seen)

    def test_tuning_works_outside_the_main_thread(self) -> None:
        results: list[RunSummary] = []
        thread = threading.Thread(target=lambda: results.append(World().tune(trials=10)))
        thread.start()
        thread.join(20)
        assert results[0].tasks[0].trials == 10


class TestObservers:
    def test_they_hear_everything_in_order(self) -> None:
        heard: list[str] = []

        class Ear(Observer):
            def on_start(self, event: Any) -> None:
                heard.append("start")
                assert [arm.template for arm in event.tasks[0].arms] == ["square"] and event.trials == 20

            def on_trial(self, event: Trial) -> None:
                heard.append("race" if event.final_race else "trial")

            def on_best(self, event: Any) -> None:
                heard.append("best")
                assert event.previous_ns is None or heard[-2] == "race" or event.time_ns < event.previous_ns

            def on_task_end(self, index: int, summary: TaskSummary) -> None:
                heard.append("task end")

            def on_end(self, summary: RunSummary) -> None:
                heard.append("end")

        World().tune(trials=20, observers=[Ear()])
        assert heard[:3] == ["start", "trial", "best"]
        assert heard[-2:] == ["task end", "end"]
        assert heard.count("trial") == 20 and heard.count("race") in (5, 6)

    def test_every_outcome_is_told_with_its_text(self) -> None:
        world = World(behaviour=lambda c: Outcome.COMPILE_ERROR if c.config["x"] == 4 else square_ns(c))
        world.tune(trials=100)
        failed = [trial for trial in world.trials if trial.outcome is Outcome.COMPILE_ERROR]
        assert failed and all(trial.message == "as the test wants" and trial.time_ns is None for trial in failed)
        counted = [trial.done for trial in world.trials if trial.counted]
        assert counted == list(range(1, 101))


class TestPlan:
    def test_restrictions_hold_and_a_default_outside_is_replaced(self) -> None:
        world = World()
        world.tune(Task(WORKLOAD, restrict={"x": [4, 5]}), trials=32)
        assert {record.config["x"] for record in world.searched} == {4, 5}
        assert world.runner.measured[0][0]["y"] == 0, "it keeps what it may of the default"

    @pytest.mark.parametrize(
        ("task", "error", "text"),
        [
            (Task(WORKLOAD, restrict={"xx": [1]}), ConfigError, "knob 'xx'.*did you mean 'x'"),
            (Task(WORKLOAD, restrict={"x": [99]}), ConfigError, "99"),
            (Task(WORKLOAD, restrict={"z": [3]}), ConfigError, "z"),
            (Task(WORKLOAD, templates=["sqare"]), UsageError, "did you mean 'square'"),
            (Task(WORKLOAD, weight=0.0), UsageError, "weight"),
            (WORKLOAD.replace(k=16), UnsupportedError, "k must be 8"),
        ],
    )
    def test_what_cannot_be_is_refused_before_anything_runs(self, task: Task, error: type[Exception], text: str) -> None:
        with pytest.raises(error, match=text):
            plan_tasks([task], TemplateSet([Square(), Line()]), GPU)

    def test_no_task_and_a_task_twice_are_refused(self) -> None:
        for tasks in ([], [WORKLOAD, Task(WORKLOAD)]):
            with pytest.raises(UsageError):
                plan_tasks(tasks, TemplateSet([Square()]), GPU)

    @pytest.mark.parametrize("one", [WORKLOAD, Task(WORKLOAD)])
    def test_one_workload_that_is_no_list_is_refused_with_what_to_write(self, one: Any, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"must be a list.*give tune\(\[workload\], \.\.\.\)"):
            tune(one, tmp_path / "records.db")
        assert list(tmp_path.iterdir()) == []

    def test_a_knob_of_one_template_restricts_that_one_only(self) -> None:
        (plan,) = plan_tasks([Task(WORKLOAD, restrict={"x": [1, 2]})], TemplateSet([Square(), Line()]), GPU)
        assert [arm.space.size.count for arm in plan.arms] == [32, 63]
