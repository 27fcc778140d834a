"""Fills the view of a trial."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from schedsearch.dashboard import effects, loose
from schedsearch.dashboard.kernels import Kernels, NoKernelError, Occupancy, occupancy, target_of
from schedsearch.dashboard.machine_code import Listing
from schedsearch.dashboard.noise import doubt_of, modes_of, words_of
from schedsearch.dashboard.source import Source
from schedsearch.dashboard.views.overview import TaskRow
from schedsearch.dashboard.views.task import PairEffect
from schedsearch.dashboard.views.trial import Command, Difference, Fact, TrialView
from schedsearch.dashboard.views.values import JSON, to_json
from schedsearch.errors import SchedsearchError
from schedsearch.launch import LaunchPlan
from schedsearch.ops.registry import OF_DECORATORS
from schedsearch.records.rows import RecordRow
from schedsearch.records.store import Store
from schedsearch.target import Target
from schedsearch.typed import JsonObject
from schedsearch.workload import Workload

ReadListing = Callable[[Store, str], Listing]
_MISSING = object()
_NO_CODE = (
    "The code of this trial is not stored: a run keeps the code of trials that became the best. The commands above build it "
    "again."
)


@dataclass(frozen=True)
class _Launch:
    """What is known about the launch of a kernel; `note` says why its occupancy is not known."""

    kind: str = ""
    occupancy: Occupancy | None = None
    note: str = ""


class TrialViews:
    """Makes the views of the trials of one task. What they have in common is made once.

    Args:
        source: its database at the last `refresh`. Hold its lock, and make another `TrialViews` after the next one.
        row: of the task.
        pairs: of the task, see `effects.pair_effects`.
        kernels: describes the kernel whose launch plan is not stored.
    """

    def __init__(self, source: Source, row: TaskRow, pairs: Sequence[PairEffect], kernels: Kernels) -> None:
        self._source, self.row, self._pairs, self._kernels = source, row, pairs, kernels
        self._best = _best_of(source, row) or (None, {}, None)
        self._targets: dict[tuple[str, str], Target | NoKernelError] = {}
        self._facts: dict[tuple[str, str], Fact] = {}
        self._differences: dict[tuple[str, type, object], Difference | None] = {}
        self._of_workload: tuple[tuple[Fact, ...], JsonObject | None] | None = None
        self._json: dict[int, JSON] = {}  # of the facts and differences above

    def json(self, record: RecordRow, *, whole: bool = True, listing: ReadListing | None = None) -> JSON:
        """The JSON of `view`. Answers have parts in common: do not change them."""
        return to_json(self.view(record, whole=whole, listing=listing), self._json)

    def view(self, record: RecordRow, *, whole: bool = True, listing: ReadListing | None = None) -> TrialView:
        """Everything about a record of the task.

        Args:
            whole: read launch plan and profiles too, which takes a query each.
            listing: gives the text of stored code by its digest; without it the view says that there is none.
        """
        row, measurement = self.row, record.measurement
        time_ns, resources = measurement.time_ns, measurement.resources
        built = bool(resources.registers or resources.code_bytes or resources.shared_bytes)
        on_gpu = built and record.target.startswith("cuda:")
        plan, problem = _plan(self._source, record) if whole else (None, "")
        code = _listing(self._source, record, listing)
        launch = self._launch(record, plan)
        best_template, _, best_ns = self._best
        config = dict(record.config)
        is_best = record.id == row.best_id
        other_template = best_template is not None and best_template != record.template
        return TrialView(
            key=f"{self._source.key}.{record.id}",
            task=row.key,
            task_name=row.name,
            database=self._source.key,
            id=record.id,
            template=record.template,
            template_version=record.template_version,
            config=config,
            outcome=str(measurement.outcome),
            message=measurement.message,
            time_ns=time_ns,
            times_ns=measurement.times_ns,
            spread=measurement.spread if len(measurement.times_ns) >= 4 else None,
            doubt=doubt_of(measurement.times_ns),
            words=words_of(measurement.times_ns),
            modes=modes_of(measurement.times_ns) or (),
            race=record.final_race,
            best=is_best,
            best_key=f"{self._source.key}.{row.best_id}" if row.best_id is not None else None,
            best_ns=best_ns,
            ratio_to_best=time_ns / best_ns if time_ns is not None and best_ns else None,
            prediction=record.prediction,
            model=record.model,
            batch=record.batch,
            max_error=measurement.max_error,
            registers=resources.registers if on_gpu else None,
            shared_bytes=resources.shared_bytes if on_gpu else None,
            local_bytes=resources.local_bytes if on_gpu else None,
            spill_bytes=resources.spill_bytes if on_gpu else None,
            code_bytes=resources.code_bytes if built else None,
            occupancy=launch.occupancy.share if launch.occupancy else None,
            blocks_per_sm=launch.occupancy.blocks_per_sm if launch.occupancy else None,
            block_threads=launch.occupancy.block_threads if launch.occupancy else None,
            occupancy_note=launch.note,
            build_s=measurement.build_s,
            run_s=measurement.run_s,
            started_at_s=record.started_at,
            finished_at_s=record.finished_at,
            facts=tuple(self._facts_of(record)),
            clocks=measurement.clocks,
            plan=None if plan is None else json.loads(plan.to_json()),
            code={code.name: code.text} if code.text else {},
            code_note=code.note,
            other_template=other_template,
            differences=() if is_best or other_template else self._differences_from_best(record.template, config),
            commands=tuple(self._commands(record, config, is_best, launch.kind)),
            profiles=_profiles(self._source, record) if whole else (),
            notes=(problem,) if problem else (),
        )

    def _differences_from_best(self, template: str, config: Mapping[str, JSON]) -> tuple[Difference, ...]:
        """As `differences`, of a trial of the best one's template."""
        best, found = self._best[1], []
        for knob in dict.fromkeys([*config, *best]):
            mine = config.get(knob, _MISSING)
            key = knob, type(mine), mine
            if key not in self._differences:
                self._differences[key] = made = _difference(template, knob, config, best, self._pairs)
                if made is not None:
                    self._json[id(made)] = to_json(made)
            if (difference := self._differences[key]) is not None:
                found.append(difference)
        return _ranked(found)

    def _launch(self, record: RecordRow, plan: LaunchPlan | None) -> _Launch:
        """By the stored plan, and otherwise by the template."""
        key = record.run, record.target
        if key not in self._targets:
            try:
                self._targets[key] = target_of(record, self._source.runs)
            except NoKernelError as error:
                self._targets[key] = error
        target = self._targets[key]
        if isinstance(target, NoKernelError):
            return _Launch(note=str(target))
        try:
            described = plan if plan is not None else self._kernels.source(record, target)
        except NoKernelError as error:
            return _Launch(note=str(error))
        threads = max((step.block_threads for step in described.steps), default=0)
        try:
            return _Launch(described.kind, occupancy(threads, record.measurement.resources, target))
        except NoKernelError as error:
            return _Launch(described.kind, note=str(error))

    def _about_workload(self, record: RecordRow) -> tuple[tuple[Fact, ...], JsonObject | None]:
        """The facts about the task's workload, and the task of a workload file, None if it cannot name the operator."""
        if self._of_workload is None:
            facts = Fact("workload", f"{record.label} ({record.workload_id})"), Fact("verified", record.unreferenced)
            self._of_workload = facts, _task(record)
            self._json |= {id(fact): to_json(fact) for fact in facts}
        return self._of_workload

    def _facts_of(self, record: RecordRow) -> list[Fact]:
        def at(stamp_s: float) -> str:
            return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(stamp_s))

        def shared(name: str, value: str) -> Fact:
            found = self._facts.get((name, value))
            if found is None:
                found = self._facts[name, value] = Fact(name, value)
                self._json[id(found)] = to_json(found)
            return found

        facts = [
            *self._about_workload(record)[0],
            shared("device", record.target),
            shared("mode", record.measurement.mode),
            shared("policy", str(record.measurement.policy(record.target.partition(":")[0]))),
            shared("final race", str(record.verdict)),
            shared("run", record.run),
            Fact("measured", f"{at(record.started_at)} to {at(record.finished_at)}"),
            shared("host", record.measurement.host),
            shared("card", record.measurement.device_uuid),
            shared("source", record.source or "measured into this database"),
            Fact("machine code", record.artifact or ""),
            *(shared(name, version) for name, version in record.toolchain.items()),
        ]
        if record.measurement.sustained_ns is not None:
            facts.append(Fact("under load", f"{record.measurement.sustained_ns:.6g} ns"))
        if record.anchor is not None:
            facts.append(Fact("default in the same race", f"{record.anchor.time_ns:.6g} ns"))
        return [fact for fact in facts if fact.value]

    def _commands(self, record: RecordRow, config: JsonObject, is_best: bool, kind: str) -> list[Command]:
        db = shlex.quote(self._source.path)
        commands = [Command("Show this record", f"schedsearch records show {record.id} --db {db}")]
        again = _again(record, self._about_workload(record)[1], config)
        if again:
            tune = f"schedsearch tune again.yaml --db {db} --fresh --trials 1"
            commands.append(
                Command("Measure this configuration again", f"printf '%s' {shlex.quote(again)} > again.yaml && {tune}")
            )
        if kind == "cuda":
            commands.append(Command("Print its PTX, compiled anew", f"schedsearch records ptx {record.id} --db {db}"))
        if is_best:
            commands.append(
                Command("Measure all best kernels of this device again", f"schedsearch records verify --db {db}")
            )
        return commands


def _best_of(source: Source, row: TaskRow) -> tuple[str, dict[str, JSON], float] | None:
    """Template, config and time of the task's best trial."""
    task = source.task_of(row.key)
    if task is None or row.best_id is None or row.best_ns is None or row.template is None:
        return None
    progress = source.tasks[task]
    rows = [*progress.last_race, *([progress.best] if progress.best else [])]
    config = next((each.config for each in rows if each.id == row.best_id), "{}")
    return row.template, loose.mapping(loose.parsed(config)), row.best_ns


def differences(
    template: str, here: Mapping[str, JSON], best: Mapping[str, JSON], pairs: Sequence[PairEffect]
) -> tuple[Difference, ...]:
    """The knobs in which two configs differ, the one worth most first, those without a measured pair last."""
    found = (_difference(template, knob, here, best, pairs) for knob in dict.fromkeys([*here, *best]))
    return _ranked([each for each in found if each is not None])


def _ranked(found: Sequence[Difference]) -> tuple[Difference, ...]:
    return tuple(sorted(found, key=lambda each: each.ratio if each.ratio is not None else 10.0))


def _difference(
    template: str, knob: str, here: Mapping[str, JSON], best: Mapping[str, JSON], pairs: Sequence[PairEffect]
) -> Difference | None:
    """What changing a knob to that of the best is worth; None if both have the same."""
    mine, other = here.get(knob), best.get(knob)
    if (knob in here) == (knob in best) and type(mine) is type(other) and mine == other:
        return None
    pair = effects.worth(pairs, template, knob, mine, other)
    if pair is None:
        return Difference(knob, mine, other, None, None, None, 0)
    return Difference(knob, mine, other, pair.ratio, pair.low, pair.high, pair.pairs)


def _plan(source: Source, record: RecordRow) -> tuple[LaunchPlan | None, str]:
    """The launch plan, and what is wrong with it."""
    if record.artifact is None or source.store is None:
        return None, ""
    try:
        return source.store.plan(record.artifact), ""
    except SchedsearchError as error:
        return None, str(error)


def _listing(source: Source, record: RecordRow, listing: ReadListing | None) -> Listing:
    if record.artifact is None:
        return Listing(note=_NO_CODE if record.measurement.ok else "The trial failed, so its code was not kept.")
    if listing is None or source.store is None:
        return Listing(note="A report lists the code of best trials only; schedsearch dashboard lists all stored code.")
    return listing(source.store, record.artifact)


def _profiles(source: Source, record: RecordRow) -> tuple[JSON, ...]:
    if source.store is None:
        return ()
    return tuple(
        {
            "subject": profile.subject,
            "tool": profile.tool,
            "cache": profile.cache,
            "taken_at_s": profile.taken_at,
            "figures": profile.figures(),
            "launches": tuple(
                {"kernel": launch.kernel, "grid": launch.grid, "block": launch.block, **profile.figures(launch)}
                for launch in profile.launches
            ),
        }
        for profile in source.store.profiles(record.id)
    )


def _task(record: RecordRow) -> JsonObject | None:
    """The task of a workload file for a record's workload; None if a workload file cannot name its operator."""
    if record.problem or record.op == "foreign" or record.op in OF_DECORATORS:
        return None
    workload: Workload = record.workload
    parameters = workload.definition.parameters()
    task: JsonObject = {"op": workload.op, "shape": {}}
    for name, value in json.loads(workload.json)["params"].items():
        part = task["shape"] if name in parameters and parameters[name].size else task
        part[name] = value
    return task


def _again(record: RecordRow, task: JsonObject | None, config: JsonObject) -> str:
    """A workload file, as JSON, that allows this configuration only; "" without a task."""
    if task is None:
        return ""
    only = {**task, "templates": [record.template], "restrict": config}
    return json.dumps({"tasks": [only], "measure": {"mode": record.measurement.mode}}, ensure_ascii=False)
