"""Repeats scenarios in parallel, each batch of tries in a process of its own, and keeps count of what held."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import lab
from .results import machine, write_json
from .scenario import Batch, Scenario, Unit

_FAILURES_KEPT = 20  # per scenario, in the result
_FACTS_KEPT = 200
_TEXT_CHARS = 1500
_STATUS_S = 20.0
_SAVE_S = 30.0
# Files in TMPDIR that a run may leave: the device's lock stays, so that descriptors of waiters remain valid.
_MAY_STAY = (".lock",)


@dataclass
class Tally:
    """What became of a scenario's tries."""

    scenario: Scenario
    wanted: int
    tries: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    failed: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0
    facts: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        scenario = self.scenario
        return {
            "name": scenario.name,
            "what": scenario.what,
            "target": scenario.target,
            "unit": scenario.unit,
            "wanted": self.wanted,
            "tries": self.tries,
            "held": self.tries - self.failed,
            "failed": self.failed,
            "seconds": round(self.seconds, 1),
            "cpu_s": round(self.cpu_s, 1),
            "peak_mib": round(self.peak_bytes / 2**20),
            "facts": self.facts[:_FACTS_KEPT],
            "failures": self.failures,
        }


@dataclass
class _Job:
    tally: Tally
    seeds: Sequence[int]
    process: lab.Process


class Campaign:
    """Runs scenarios until all tries are done or the time is up.

    Args:
        counts: how many tries each unit gets; None for the short size.
        seed: try number i of a scenario has the seed `seed + i`.
        jobs: batches that run at the same time.
        time_s: no batch begins after this time.
        out: where the result is written while the campaign goes on; None for nowhere.
        add: whether the result keeps what `out` has of other scenarios, so that a campaign may have several parts.
        keep: whether the folders of failed batches stay, for a look into them.
    """

    def __init__(
        self,
        scenarios: Sequence[Scenario],
        counts: Mapping[Unit, int] | None,
        *,
        seed: int,
        jobs: int,
        time_s: float = math.inf,
        out: Path | None = None,
        add: bool = False,
        keep: bool = False,
        command: str = "",
    ) -> None:
        self.tallies = [Tally(scenario, _wanted(scenario, counts)) for scenario in scenarios]
        self._seed, self._jobs, self._time_s, self._out, self._keep = seed, jobs, time_s, out, keep
        self._command = command
        self._earlier = json.loads(out.read_text()) if add and out is not None and out.exists() else None
        self._began = time.monotonic()
        self._running: list[_Job] = []
        self._folder = Path(tempfile.mkdtemp(prefix="faults-"))
        self._number = 0
        self._stopped = ""

    @property
    def held(self) -> bool:
        """Whether everything held in every try so far."""
        return not any(tally.failed for tally in self.tallies)

    def run(self) -> None:
        """Runs everything. Ctrl-C and SIGTERM end it early; the tries that are done count."""
        lab.adopt_orphans()
        for signum in (signal.SIGINT, signal.SIGTERM):  # a shell starts background jobs with SIGINT ignored
            signal.signal(signum, signal.default_int_handler)
        waiting = self._plan()
        told = saved = time.monotonic()
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self._jobs and self._elapsed_s < self._time_s:
                    self._start(*waiting.pop(0))
                if waiting and self._elapsed_s >= self._time_s:
                    self._stopped = "time"
                    waiting.clear()
                self._collect()
                now = time.monotonic()
                if now - told > _STATUS_S:
                    told = now
                    self._say_status()
                if now - saved > _SAVE_S:
                    saved = now
                    self.save()
                time.sleep(0.02)
        except KeyboardInterrupt:
            self._stopped = "interrupted"
            for job in self._running:
                job.process.kill()
        finally:
            lab.reap(1.0)
            self.save()
            if not self._keep:
                shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def interrupted(self) -> bool:
        return self._stopped == "interrupted"

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def _plan(self) -> list[tuple[Tally, Sequence[int]]]:
        """All batches, in an order in which every scenario is equally far at any time."""
        batches = []
        for tally in self.tallies:
            for first in range(0, tally.wanted, tally.scenario.batch):
                last = min(first + tally.scenario.batch, tally.wanted)
                seeds = range(self._seed + first, self._seed + last)
                batches.append((first / tally.wanted, tally, seeds))
        batches.sort(key=lambda each: each[0])
        return [(tally, seeds) for _, tally, seeds in batches]

    def _start(self, tally: Tally, seeds: Sequence[int]) -> None:
        self._number += 1
        folder = self._folder / f"{self._number:06d}"
        (folder / "work").mkdir(parents=True)
        builds = self._folder / "builds"

        def batch() -> None:
            _run_batch(tally.scenario, seeds, folder, builds)

        self._running.append(_Job(tally, seeds, lab.start(batch, folder)))

    def _collect(self) -> None:
        for job in list(self._running):
            ended = job.process.poll()
            if ended is None and time.monotonic() - job.process.began > job.tally.scenario.limit_s * lab.patience():
                ended = job.process.kill()
            if ended is not None:
                self._running.remove(job)
                self._count(job, ended)

    def _count(self, job: _Job, ended: lab.Ended) -> None:
        tally, folder = job.tally, job.process.folder
        failures: list[tuple[int, str]] = []
        try:
            result = json.loads((folder / "result.json").read_text())
            failures += [(seed, text) for seed, text in result["failures"]]
            tally.facts += result["facts"]
        except (OSError, ValueError):
            how = f"hung: not done after {ended.seconds:.0f} s" if ended.status is None else "died"
            failures.append((job.seeds[0], f"the batch {how} (status {ended.status})\n{ended.err[-_TEXT_CHARS:]}"))
        if ended.peak_bytes > lab.PEAK_LIMIT_BYTES:
            failures.append((job.seeds[0], f"a process had {ended.peak_bytes >> 20} MiB"))
        tally.tries += len(job.seeds)
        tally.failed += len({seed for seed, _ in failures})
        tally.seconds += ended.seconds
        tally.cpu_s += ended.cpu_s
        tally.peak_bytes = max(tally.peak_bytes, ended.peak_bytes)
        for seed, text in failures:
            self._report(job, seed, text)
        if not (failures and self._keep):
            shutil.rmtree(folder, ignore_errors=True)

    def _report(self, job: _Job, seed: int, text: str) -> None:
        name = job.tally.scenario.name
        alone = f"python -m tests.faults --only {name} --seed {seed} --n 1"
        batch = f"python -m tests.faults --only {name} --seed {job.seeds[0]} --n {len(job.seeds)}"
        if len(job.tally.failures) < _FAILURES_KEPT:
            job.tally.failures.append({"seed": seed, "text": text[:_TEXT_CHARS], "command": alone, "batch": batch})
        kept = f"\n  its folder: {job.process.folder}" if self._keep else ""
        print(f"DID NOT HOLD  {name}, seed {seed}: {text[:_TEXT_CHARS]}\n  repeat: {alone}")
        print(f"  with its batch: {batch}{kept}", flush=True)

    def _say_status(self) -> None:
        done, wanted = sum(tally.tries for tally in self.tallies), sum(tally.wanted for tally in self.tallies)
        failed = sum(tally.failed for tally in self.tallies)
        now = ", ".join(sorted({job.tally.scenario.name for job in self._running}))
        print(f"{self._elapsed_s:6.0f} s: {done} of {wanted} tries, {failed} did not hold; now {now}", flush=True)

    def save(self) -> None:
        """Writes the result so far."""
        if self._out is None:
            return
        result = {
            "command": self._command,
            "seed": self._seed,
            "jobs": self._jobs,
            "seconds": round(self._elapsed_s, 1),
            "stopped": self._stopped,
            "machine": machine(),
            "scenarios": [tally.to_json() for tally in self.tallies],
        }
        if self._earlier is not None:
            names = {tally.scenario.name for tally in self.tallies}
            earlier = [row for row in self._earlier["scenarios"] if row["name"] not in names]
            result["scenarios"] = earlier + result["scenarios"]
            result["seconds"] += self._earlier["seconds"]
        write_json(self._out, result)


def _wanted(scenario: Scenario, counts: Mapping[Unit, int] | None) -> int:
    return scenario.short if counts is None else math.ceil(counts[scenario.unit] * scenario.share)


def _run_batch(scenario: Scenario, seeds: Sequence[int], folder: Path, builds: Path) -> None:
    """In the batch's process: prepares its surroundings, runs the scenario, and looks at what is left afterwards."""
    lab.adopt_orphans()
    work, temporary = folder / "work", folder / "tmp"
    temporary.mkdir()
    os.chdir(work)
    os.environ.update(
        TMPDIR=str(temporary),
        SCHEDSEARCH_STATE_DIR=str(folder / "state"),
        SCHEDSEARCH_BUILD_CACHE=str(builds),
        OMP_NUM_THREADS="1",
    )
    tempfile.tempdir = None
    batch = Batch(seeds, work)
    try:
        scenario.run(batch)
    except Exception:
        batch.failed(seeds[0] if batch.current is None else batch.current, traceback.format_exc())
    at = seeds[0] if batch.current is None else batch.current
    if left := lab.reap():
        batch.failed(at, f"processes are left: {left}")
    stays = [path.name for path in temporary.iterdir() if not path.name.endswith(_MAY_STAY)]
    if stays:
        batch.failed(at, f"files are left in TMPDIR: {stays}")
    (folder / "result.json").write_text(json.dumps({"failures": batch.failures, "facts": batch.facts}))
    sys.stdout.flush()
