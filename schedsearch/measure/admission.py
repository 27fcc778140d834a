"""Whether configurations that others measured are as good here: each races with the default of its template on this card."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedsearch.backend import toolchain
from schedsearch.config import Config
from schedsearch.errors import SchedsearchError
from schedsearch.measure.runner import Runner
from schedsearch.measurement import COLD_GRAPH, Anchor, Measurement, Record, Verdict
from schedsearch.processes.builder import Builder, Built, Candidate
from schedsearch.records.entries import LEAST_GAIN, Entry, imported
from schedsearch.target import Target
from schedsearch.template import Template, load_template
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from schedsearch.records.store import Store


@dataclass(frozen=True)
class Admission:
    """What became of a configuration.

    Attributes:
        entry: as others measured it.
        verdict: admitted: it is the best here now. default: it is less than `LEAST_GAIN` times as fast as the default, which
            is the best instead. slower: this machine's own best is faster. refused: it cannot be built here, or is wrong.
        gain: over the default, here; None if it did not race.
        reason: why it was refused; "" otherwise.
    """

    entry: Entry
    verdict: str
    gain: float | None = None
    reason: str = ""


def admit(
    store: Store,
    target: Target,
    *,
    mode: str = COLD_GRAPH,
    wait: bool = True,
    on_wait: Callable[[str], None] | None = None,
) -> Iterator[Admission]:
    """Races the imported configurations that could be better than the bests of this machine (`entries.imported`).

    The measurements of both become records with the default as their anchor. What wins is promoted, unless the best of the
    task is faster by its own race.

    Raises:
        DeviceError: the device does not exist, or another run holds it and `wait` is false.
    """
    entries = list(imported(store, target.key, mode))
    if not entries:
        return
    run = store.start_run({"command": "verify --imported", "target": target.facts() | {"key": target.key}})
    with Runner(target, mode=mode, wait=wait, on_wait=on_wait) as runner, Builder(target, workers=1, mode=mode) as builder:
        race = _Race(store, target, mode, runner, builder, run)
        for entry in entries:
            yield race.of(entry)
    store.finish_run(run, {})


@dataclass(frozen=True)
class _Race:
    store: Store
    target: Target
    mode: str
    runner: Runner
    builder: Builder
    run: str

    def of(self, entry: Entry) -> Admission:
        assert entry.record is not None
        workload = entry.record.workload
        try:
            template = load_template(entry.template)
            if reason := _objection(entry, template, workload, self.target):
                return Admission(entry, "refused", reason=reason)
            space = template.space(workload, self.target)
            config, default = template.current(entry.config), template.default(workload, self.target, space)
            if reasons := space.check(config):
                return Admission(entry, "refused", reason=f"it is not legal here: {'; '.join(reasons)}")
        except SchedsearchError as error:
            return Admission(entry, "refused", reason=str(error))
        return self._raced(entry, template, workload, config, default)

    def _raced(self, entry: Entry, template: Template, workload: Workload, config: Config, default: Config) -> Admission:
        configs = list(dict.fromkeys([default, config]))
        started_at = time.time()
        built = [self._built(workload, template, each) for each in configs]
        for made, each in zip(configs, built):
            if isinstance(each, Measurement):  # its record keeps the entry from being taken again
                self.store.append(self._record(workload, template, made, each, None, started_at, Verdict.NONE))
                return Admission(entry, "refused", reason=f"{each.outcome}: {each.message.partition(chr(10))[0]}")
        ready = [each for each in built if isinstance(each, Built)]
        started_at = time.time()
        measured = self.runner.race(workload, ready)
        first, last = measured[0], measured[-1]
        anchor = None if first.time_ns is None else Anchor(ready[0].canonical_hash, first.time_ns)
        gain = None if first.time_ns is None or last.time_ns is None else first.time_ns / last.time_ns
        place = len(configs) - 1 if gain is not None and gain >= LEAST_GAIN else 0
        ids = []
        for number, (made, measurement) in enumerate(zip(configs, measured)):
            verdict = Verdict.WON if gain is not None and number == place else Verdict.NONE
            ids.append(self.store.append(self._record(workload, template, made, measurement, anchor, started_at, verdict)))
        for measurement in (first, last):
            if measurement.time_ns is None:
                return Admission(entry, "refused", reason=f"{measurement.outcome}: {measurement.message[:200]}")
        promoted = self.store.promote(ids[place], ready[place].artifact, if_faster=True)
        return Admission(entry, "slower" if not promoted else "admitted" if place else "default", gain)

    def _built(self, workload: Workload, template: Template, config: Config) -> Built | Measurement:
        self.builder.submit(Candidate(workload, template, config))
        ((_, result),) = self.builder.drain()
        return result

    def _record(
        self,
        workload: Workload,
        template: Template,
        config: Config,
        measurement: Measurement,
        anchor: Anchor | None,
        started_at: float,
        verdict: Verdict,
    ) -> Record:
        return Record(
            workload=workload,
            target=self.target.key,
            template=template.name,
            template_version=template.version,
            config=config,
            measurement=measurement,
            toolchain=toolchain(self.target.kind),
            run=self.run,
            started_at=started_at,
            finished_at=time.time(),
            final_race=True,
            anchor=anchor,
            verdict=verdict,
        )


def _objection(entry: Entry, template: Template, workload: Workload, target: Target) -> str:
    if template.version != entry.template_version:
        return f"{template.name} is now version {template.version}, the record is of {entry.template_version}"
    return template.validate(workload, target) or ""
