"""Measures best records again: do the kernels that deployment serves still compute correctly, and reach their times?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedsearch.backend import toolchain
from schedsearch.measure.runner import Runner
from schedsearch.measurement import COLD_GRAPH, Measurement, Outcome, Record
from schedsearch.ops.registry import OF_DECORATORS
from schedsearch.processes.builder import Builder, Built, Candidate
from schedsearch.target import Target
from schedsearch.template import load_template

if TYPE_CHECKING:
    from schedsearch.records.rows import Best
    from schedsearch.records.store import Store

SLOWER = 1.1
"""A best that takes this many times its recorded time has regressed."""

_ATTEMPTS = 3  # another process may disturb one measurement; a regression shows in all


@dataclass(frozen=True)
class Check:
    """A best record beside its new measurement. `ratio` is new time over recorded time; None if the measurement failed."""

    record_id: int
    record: Record
    measurement: Measurement

    @property
    def ratio(self) -> float | None:
        then, now = self.record.measurement.time_ns, self.measurement.time_ns
        return now / then if then and now else None

    @property
    def wrong(self) -> bool:
        """Whether it no longer computes a correct result."""
        return not self.measurement.ok

    @property
    def regressed(self) -> bool:
        return self.ratio is not None and self.ratio > SLOWER


def recheck(
    store: Store,
    target: Target,
    *,
    mode: str = COLD_GRAPH,
    rebuild: bool = False,
    wait: bool = True,
    on_wait: Callable[[str], None] | None = None,
    on_skip: Callable[[str], None] | None = None,
) -> Iterator[Check]:
    """Verifies and times every best record of a target again, as the final race of a tuning run does.

    It measures the stored code. If none is stored, or this machine does not vouch for it, it builds the configuration again.
    Each measurement is appended to the store. A best with a wrong result is demoted. A correct measurement replaces a best
    that this machine does not vouch for, so that deployment serves its code from then on, and one of which somebody else
    measured the time. A kernel of a decorator whose source this process does not know has no reference to be verified with:
    it is passed over, and `on_skip` gets the reason.

    Args:
        rebuild: take only bests of another toolchain than the installed one, and build their configurations again instead of
            loading their code. What is right and not slower then replaces the best; otherwise the best stays as it is.

    Raises:
        DeviceError: the device does not exist, or another run holds it and `wait` is false.
        UsageError: a best record's template is not installed.
    """
    versions = toolchain(target.kind)
    bests = [best for best in store.bests(target=target.key, mode=mode) if not rebuild or best.record.toolchain != versions]
    if not bests:
        return
    run = store.start_run({"command": "verify", "target": target.facts() | {"key": target.key}})
    with Runner(target, mode=mode, wait=wait, on_wait=on_wait) as runner, Builder(target, workers=1, mode=mode) as builder:
        for best in bests:
            if reason := _unknown_source(best.record, target):
                if on_skip is not None:
                    on_skip(f"record {best.record_id} is not verified: {reason}")
                continue
            built = build(builder, best) if rebuild else machine_code(store, builder, best)
            started_at = time.time()
            measurement = built if isinstance(built, Measurement) else _measure(runner, best, built)
            record = Record(
                workload=best.record.workload,
                target=target.key,
                template=best.record.template,
                template_version=best.record.template_version,
                config=best.record.config,
                measurement=measurement,
                toolchain=versions,
                run=run,
                started_at=started_at,
                finished_at=time.time(),
            )
            record_id = store.append(record)
            check = Check(best.record_id, best.record, measurement)
            replaces = not check.regressed if rebuild else not best.vouched or bool(best.row.source)
            if isinstance(built, Built) and measurement.ok and replaces and _is_current(best):
                store.promote(record_id, built.artifact, if_faster=True, raced=[best.record])
            if measurement.outcome is Outcome.WRONG_ANSWER and not rebuild:
                store.demote(best.record)
            yield check
    store.finish_run(run, {})


def _unknown_source(record: Record, target: Target) -> str:
    """Why a kernel of a decorator cannot be verified in this process; else empty."""
    if record.workload.op not in OF_DECORATORS:
        return ""
    return load_template(record.template).validate(record.workload, target) or ""


def machine_code(store: Store, builder: Builder, best: Best) -> Built | Measurement:
    """A best record's stored code, or its configuration built again (see `Store.code`); a Measurement if that fails."""
    artifact = store.code(best)
    if artifact is not None:
        return Built(artifact, best.record.measurement.resources, artifact.sha256, 0.0)
    return build(builder, best)


def build(builder: Builder, best: Best) -> Built | Measurement:
    """A best record's configuration, built now; a Measurement if that fails."""
    record = best.record
    builder.submit(Candidate(record.workload, load_template(record.template), record.config))
    ((_, result),) = builder.drain()
    return result


def _is_current(best: Best) -> bool:
    """Whether what was built is what a best names: this version of the template."""
    record = best.record
    return (best.row.template_version, best.row.workload_id) == (load_template(record.template).version, record.workload.id)


def _measure(runner: Runner, best: Best, built: Built) -> Measurement:
    """The fastest of a few attempts. Stops at the first that is fast enough, or that fails."""
    attempts: list[Measurement] = []
    recorded_ns = best.record.measurement.time_ns
    assert recorded_ns is not None
    while len(attempts) < _ATTEMPTS:
        (measurement,) = runner.race(best.record.workload, [built])
        if measurement.time_ns is None or measurement.time_ns <= SLOWER * recorded_ns:
            return measurement
        attempts.append(measurement)
    return min(attempts, key=lambda m: m.time_ns or 0.0)
