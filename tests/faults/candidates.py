"""Candidates that misbehave on the CPU: in the template's code, which runs in a builder, and in the kernel, in the runner.

`FaultyCpu` has the knobs `fault` and `number`. `fault` names an entry of `FAULTS`. `number` seeds what is random in it, and
makes many tries of one fault into different candidates of one run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

from faulty_templates import PointwiseCpu

from schedsearch.config import Config
from schedsearch.space import ConfigSpace
from schedsearch.target import Target
from schedsearch.template import KernelSource
from schedsearch.workload import Workload

from . import faults_of_kernels, faults_of_templates, runs
from .fault import OK, Fault, faulty_space, healthy
from .scenario import Batch, Scenario

FAULTS = {**faults_of_templates.FAULTS, **faults_of_kernels.FAULTS}
_BATCH = 50
_SLOWER = 1.5


class FaultyCpu(PointwiseCpu):
    """See the module."""

    name = "faulty_cpu"

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        return faulty_space(FAULTS)

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        return Config(fault=runs.HEALTHY, number=0)

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        number = config["number"]
        if config["fault"] == runs.HEALTHY:
            return self._source(workload, healthy(workload, number))
        made = FAULTS[config["fault"]].make(workload, random.Random(f"{config['fault']} {number}"))
        function, workspaces = made if isinstance(made, tuple) else (made, {})
        return self._source(workload, function, workspaces)


def numbers(batch: Batch) -> dict[int, int]:
    """The number of each seed's candidate."""
    few = runs.NUMBERS - runs.HEALTHY_NUMBERS
    return {runs.HEALTHY_NUMBERS + seed % few: seed for seed in batch.seeds}


def check(batch: Batch, plan: runs.Plan, run: runs.Run, faults: Mapping[str, Fault], seeds: dict[int, int]) -> None:
    """What must hold after a run that tried some faults.

    Args:
        seeds: the seed of each candidate's number.
    """
    first = batch.seeds[0]

    def each() -> Iterator[tuple[int, str]]:
        for text in runs.complete(run, plan):
            yield first, text
        stored = runs.records(run.db)
        for text in (*runs.nothing_lost([run], stored), *runs.each_tried_once([run], stored, plan), *runs.blamed(stored, 0)):
            yield first, text
        allowed = {runs.HEALTHY: frozenset({OK}), **{name: fault.outcomes for name, fault in faults.items()}}
        for number, text in runs.outcomes(stored, allowed):
            yield seeds.get(number, first), text
        right = {runs.HEALTHY, *(name for name, fault in faults.items() if fault.right)}
        for text in (*runs.right_best(run.db, plan.target, right), *runs.lock_is_free(batch.folder)):
            yield first, text
        times = runs.before_and_after(stored)
        batch.facts.append(times)
        # A CPU has other work to do meanwhile; a GPU is the run's alone.
        if plan.target == "cuda" and times and times["after_ns"] > _SLOWER * times["before_ns"]:
            yield (
                first,
                f"after the faults a right candidate takes {times['after_ns']:.0f} ns, before {times['before_ns']:.0f}",
            )

    for seed, text in each():
        batch.failed(seed, text)


def _tries(name: str) -> Callable[[Batch], None]:
    def run(batch: Batch) -> None:
        seeds = numbers(batch)
        hang = FAULTS[name].slow
        plan = runs.Plan(
            {runs.HEALTHY: [0, 1], name: list(seeds)},
            build_timeout_s=4.0 if hang else runs.BUILD_TIMEOUT_S,
            run_timeout_s=3.0 if hang else runs.RUN_TIMEOUT_S,
        )
        check(batch, plan, runs.tune(plan, batch.folder, limit_s=500.0), {name: FAULTS[name]}, seeds)

    return run


def _mixed(batch: Batch) -> None:
    """Every fault once in one run, in random order; of those that cost a time-out only two."""
    (seed,) = batch.seeds
    slow = [name for name, fault in FAULTS.items() if fault.slow]
    chosen = {"build": 0, "run": 0}
    batch.random(seed).shuffle(slow)
    faults = {}
    for name in [*slow, *(each for each in FAULTS if each not in slow)]:
        group = name.partition("-")[0]
        if name in slow:
            chosen[group] += 1
            if chosen[group] > 1:
                continue
        faults[name] = FAULTS[name]
    seeds = numbers(batch)
    configs = {runs.HEALTHY: [0, 1], **{name: list(seeds) for name in faults}}
    plan = runs.Plan(configs, arguments=("--tuner", "random", "--seed", str(seed)))
    check(batch, plan, runs.tune(plan, batch.folder, limit_s=500.0), faults, seeds)


SCENARIOS = [
    *(Scenario(f"candidate.{name}", each.what, _tries(name), batch=_BATCH) for name, each in FAULTS.items()),
    Scenario("candidate.all", "all of these in one run, in random order", _mixed, share=0.05, short=1),
]
