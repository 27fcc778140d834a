"""A simulated world to tune in: builder, runner, store and tuner answer with functions of the configuration."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from schedsearch.config import Config
from schedsearch.launch import Artifact, Grid, LaunchPlan, Step
from schedsearch.measurement import COLD_GRAPH, Measurement, Outcome, Record, Resources
from schedsearch.processes.builder import Built, Candidate
from schedsearch.session.loop import Session
from schedsearch.session.observer import Observer, Trial
from schedsearch.session.options import Options
from schedsearch.session.plan import plan_tasks
from schedsearch.session.summary import RunSummary
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.task import Task
from schedsearch.template import KernelSource, Template, TemplateSet
from schedsearch.workload import Workload

GPU = Target("cuda", "a pretended GPU", (9, 0), 132)
CPU = Target("cpu", "a pretended CPU", sms=2)
WORKLOAD = Workload.conv2d(n=1, h=8, w=8, c=8, k=8, r=3, s=3)
OTHER = Workload.conv2d(n=2, h=8, w=8, c=8, k=8, r=3, s=3)


class Square(Template):
    """256 configurations. In most tests the time is (x - 11)^2 + (y - 5)^2 + 100 ns, and the default takes 346 ns."""

    name = "square"
    op = "conv2d"
    kind = "cuda"

    def validate(self, workload: Workload, target: Target) -> str | None:
        return "k must be 8" if workload.k != 8 else None

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        return ConfigSpace([Knob("x", tuple(range(16))), Knob("y", tuple(range(16)))])

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        return Config(x=0, y=0)

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        raise NotImplementedError("nothing is compiled here")


class Line(Square):
    name = "line"

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        return ConfigSpace([Knob("z", tuple(range(64)))], [Constraint("z != 3", lambda k: k["z"] != 3)])

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        return Config(z=0)


class CpuSquare(Square):
    name = "cpu_square"
    kind = "cpu"


class Counted(CpuSquare):
    """Counts how often the space and the default of each workload are computed."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        self.calls["space", workload.id] += 1
        return super().space(workload, target)

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        self.calls["default", workload.id] += 1
        return super().default(workload, target, space)


def square_ns(candidate: Candidate) -> float:
    config = candidate.config
    return float((config["x"] - 11) ** 2 + (config["y"] - 5) ** 2 + 100) if "x" in config else 1000.0 + config["z"]


REFERENCE = Artifact(b"", LaunchPlan("cuda", "sm_90a", ()))

Behaviour = Callable[[Candidate], "float | Outcome"]


class FakeBuilder:
    """Everything is built by the next poll. `code` maps a configuration to its machine code."""

    def __init__(self, behaviour: Behaviour, code: Callable[[Config], str], log: list[str]) -> None:
        self._behaviour, self._code, self._log = behaviour, code, log
        self._queue: list[tuple[int, Candidate]] = []
        self._references: list[int] = []
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

    def submit_reference(self, workload: Workload) -> int:
        self._references.append(next(self._tokens))
        return self._references[-1]

    def withdraw(self, tokens: Collection[int]) -> set[int]:
        taken = {token for token, _ in self._queue if token in tokens}
        self._queue = [each for each in self._queue if each[0] not in taken]
        return taken

    def poll(self, timeout_s: float) -> list[tuple[int, Built | Measurement]]:
        references = self.poll_references()
        done, self._queue = self._queue, []
        return [*references, *((token, self._build(candidate)) for token, candidate in done)]

    def poll_references(self) -> list[tuple[int, Built | Measurement]]:
        done, self._references = self._references, []
        return [(token, Built(REFERENCE, Resources(), "reference", build_s=0.1)) for token in done]

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
    """Returns the measurements of `behaviour`, also in the race unless there is a `race_behaviour`."""

    behaviour: Behaviour
    template_of: Callable[[Config], Template]
    log: list[str]
    race_behaviour: Behaviour | None = None
    measured: list[tuple[Config, float | None]] = field(default_factory=list)
    raced: list[list[Config]] = field(default_factory=list)
    before: Callable[[Config], None] = lambda config: None
    prepared: list[Workload] = field(default_factory=list)
    learned: list[Workload] = field(default_factory=list)
    preparation_s: float = 0.0
    prepare_s: float = 0.0
    reference_s: float = 0.0

    def learn_reference(self, workload: Workload, artifact: Artifact) -> None:
        self.learned.append(workload)

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
        self.log.append("race")
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

    def append_all(self, records: Sequence[Record], run_so_far: dict[str, Any] | None = None) -> list[int]:
        self.threads.add(threading.get_ident())
        self.records += records
        if run_so_far is not None:
            self.runs[records[-1].run] = run_so_far
        return list(range(len(self.records) - len(records), len(self.records)))

    def promote(self, record_id: int, artifact: Artifact, *, if_faster: bool = False, raced: Sequence[Record] = ()) -> bool:
        record = self.records[record_id]
        assert record.measurement.ok, "only a record that is ok can be best"
        assert artifact.code.decode() == record.config.json
        best = self.best(record.workload, record.target, record.measurement.mode)
        if if_faster and best is not None and best.measurement.time_ns <= record.measurement.time_ns:
            entered = any((best.template, best.config) == (each.template, each.config) for each in raced)
            if not entered:
                return False
        self.best_ids[record.workload.id, record.target, record.measurement.mode] = record_id
        return True

    def demote(self, record: Record) -> bool:
        best = self.best(record.workload, record.target, record.measurement.mode)
        if best is None or (best.template, best.config) != (record.template, record.config):
            return False
        del self.best_ids[record.workload.id, record.target, record.measurement.mode]
        return True

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
        found: dict[Config, Record] = {}
        for r in self.records:
            if (r.workload, r.target, r.template, r.template_version, r.measurement.mode, r.toolchain) != wanted:
                continue
            if not (r.final_race and r.measurement.ok and r.config in found and found[r.config].measurement.ok):
                found[r.config] = r
        return found

    def last_race(self, workload: Workload, target_key: str, mode: str, toolchain: Mapping[str, str]) -> list[Record]:
        wanted = (workload, target_key, mode, toolchain, True)
        raced = [r for r in self.records if (r.workload, r.target, r.measurement.mode, r.toolchain, r.final_race) == wanted]
        return [r for r in raced if r.run == raced[-1].run]

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
        self, workload: Workload, target_key: str, template: str, version: int, mode: str, *, limit: int, imported: bool
    ) -> list[tuple[Config, float | None]]:
        if imported:
            return []
        found = self.measured(workload, target_key, template, version, mode, {"compiler": "1"})
        times = [(config, record.measurement.time_ns) for config, record in found.items()]
        return sorted(times, key=lambda result: (result[1] is None, result[1]))[:limit]

    def start_run(self, info: dict[str, Any]) -> str:
        self.runs[f"run{len(self.runs)}"] = None
        return f"run{len(self.runs) - 1}"

    def finish_run(self, run_id: str, summary: dict[str, Any]) -> None:
        self.runs[run_id] = summary


class RandomTuner:
    """Proposes the default, then the hints, then everything else in a random order."""

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
    """A session's collaborators, and the calls that they saw."""

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
    make_runners: Sequence[Callable[..., FakeRunner]] = (FakeRunner,)  # one for each device

    def tune(self, *tasks: Task | Workload, observers: Sequence[Observer] = (), **options: Any) -> RunSummary:
        plans = plan_tasks(tasks or [WORKLOAD], TemplateSet(self.templates), self.target)
        self.tuners.clear()
        self.log.clear()
        self.trials.clear()
        self.builder = self.make_builder(self.behaviour, self.code, self.log)
        self.runners = [
            make(self.behaviour, self._template_of, self.log, self.race_behaviour, before=self.before)
            for make in self.make_runners
        ]
        self.runner = self.runners[0]
        for runner in self.runners:
            runner.preparation_s = self.preparation_s
        devices = [
            (replace(self.target, ordinal=number, uuid=f"GPU-{number}"), runner)
            for number, runner in enumerate(self.runners)
        ]
        session = Session(
            plans, self.store, self.builder, devices, self.target, Options(**{"trials": 20, **options}),
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
