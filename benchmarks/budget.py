"""Compares the scheduler of `tune` with equal shares of one budget over several tasks, replayed over recorded spaces.

    python benchmarks/budget.py ../shared/replay/*.json.gz --draw 6 --jobs 8 --out budget_alike.json
    python benchmarks/budget.py network.db --weights 3,4,6,3 --jobs 8

The spaces of the files (any files that `schedsearch replay` takes) are the tasks of one run. The benchmark first searches
each space alone, with every seed. Then `schedsearch.session.task_state.choose_arm`, which `tune` calls, hands out the
budget in batches. An arm that gets n trials moves n evaluations further in its task's recorded search. Both ways of sharing
therefore see the same searches, seed by seed, and differ only in the shares.

The score is the sum over the tasks of weight x best time / optimum; smaller is better. The scheduler knows the weights, and
equal shares do not use them. With `--weights random` every run draws new weights from 1, 1, 1, 2, 3, 6 and 10, as layers
occur in networks. With `--draw N` a run has N tasks drawn from the spaces and seeds, in `--runs` different ways, which
tells more than one fixed set of tasks. The program prints by how much the sum exceeds that of the optima, for equal shares
and for the scheduler, and the difference with a bootstrap interval over the runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import table, write
from numpy.typing import NDArray

from schedsearch import replay
from schedsearch.config import Config
from schedsearch.measurement import Outcome
from schedsearch.processes.process import call_in_children
from schedsearch.replay.figures import RESAMPLES
from schedsearch.session.arms import WARM_TRIALS, Answer, Arm, Lesson
from schedsearch.session.hints import COLD
from schedsearch.session.plan import ArmPlan, TaskPlan
from schedsearch.session.task_state import Finalist, TaskState, choose_arm
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import PRESETS
from schedsearch.task import Task
from schedsearch.workload import Workload

Choose = Callable[[Sequence[TaskState], int], "tuple[TaskState, Arm] | None"]
REACH = 3  # a task's search is known up to this many times the greatest budget per task
BATCH = 8
NOTHING = 10.0  # a task without a valid configuration counts as this many times its optimum
RANDOM_WEIGHTS = (1, 1, 1, 2, 3, 6, 10)


class Playback:
    """A tuner whose proposals are the evaluations of a recorded search, by number."""

    batch = BATCH

    def __init__(self, length: int) -> None:
        self._left = [Config(evaluation=i) for i in range(1, length)]  # 0 is the default, which an arm measures itself

    @property
    def finished(self) -> bool:
        return not self._left

    def ask(self, n: int) -> list[Config]:
        taken, self._left = self._left[:n], self._left[n:]
        return taken

    def tell(self, results: Any) -> None:
        pass

    def transfer(self, sources: Any) -> None:
        pass

    def predict(self, configs: Any) -> None:
        return None


def equal_shares(tasks: Sequence[TaskState], warm_trials: int) -> tuple[TaskState, Arm] | None:
    """The task with the fewest trials."""
    ready = [(task, arm) for task in tasks for arm in task.arms if arm.ready]
    return min(ready, key=lambda pair: pair[1].trials, default=None)


def share(
    searches: Sequence[NDArray[np.float64]], weights: Sequence[float], trials: int, choose: Choose
) -> NDArray[np.int64]:
    """Hands out trials batch by batch.

    Args:
        searches: for each task, the time in ns of every evaluation, NaN for a failure.
        weights: one per task.
        trials: for the whole run.
        choose: `choose_arm` or another rule.

    Returns:
        (trials, tasks): how many trials each task has had after each trial of the run.
    """
    tasks = [_task(i, len(times), weight) for i, (times, weight) in enumerate(zip(searches, weights))]
    had = np.zeros((trials, len(tasks)), dtype=np.int64)
    done = 0
    while done < trials and (chosen := choose(tasks, WARM_TRIALS)):
        task, arm = chosen
        answer = _answer(arm, trials - done) if arm.begun else arm.begin()
        for config in answer.configs:
            time_ns = float(searches[task.index][config["evaluation"]])
            valid = not np.isnan(time_ns)
            arm.proposed()
            arm.done(config, Outcome.OK if valid else Outcome.LAUNCH_ERROR, time_ns if valid else None)
            if valid:
                task.keep_finalist(Finalist(arm, config, time_ns, None), 0)
            had[done] = [each.trials for each in tasks]
            done += 1
        assert arm.tuner is not None
        arm.told(finished=arm.tuner.tell([(config, None) for config in answer.configs]))
    had[done:] = [each.trials for each in tasks]  # every search is at its end
    return had


def _answer(arm: Arm, left: int) -> Answer:
    """The arm's next proposals, given the number of trials left."""
    assert arm.tuner is not None
    n = arm.portion(left, WARM_TRIALS)
    lesson = Lesson() if arm.taught else arm.lesson(COLD)
    arm.asking(n)
    answer = arm.tuner.ask(n, lesson)
    arm.answered(answer)
    return answer


def _task(index: int, length: int, weight: float) -> TaskState:
    space = ConfigSpace([Knob("evaluation", tuple(range(length)))])
    template: Any = SimpleNamespace(name="recorded", version=1)
    workload = Workload.conv2d(n=index + 1, h=8, w=8, c=8, k=8, r=3, s=3)  # only tells the tasks apart
    state = TaskState(
        index, TaskPlan(Task(workload, weight), (ArmPlan(template, space, Config(evaluation=0)),), PRESETS["h200"])
    )
    state.arms[0].start(lambda *_, **__: Playback(length), "", 0, workload)
    return state


@dataclass(frozen=True)
class Run:
    """The tasks of a run: each one's search, the optimum of its space in ns, and its weight."""

    searches: Sequence[NDArray[np.float64]]
    optima: NDArray[np.float64]
    weights: NDArray[np.float64]

    def excess(self, budgets: Sequence[int], choose: Choose) -> NDArray[np.float64]:
        """(budgets,): by how much the weighted sum exceeds that of the optima, for each number of trials per task."""
        at = np.array(budgets) * len(self.searches) - 1
        had = share(self.searches, self.weights.tolist(), int(at[-1]) + 1, choose)[at]
        ratios = np.empty(had.shape)
        for i, (times, optimum) in enumerate(zip(self.searches, self.optima)):
            best = np.fmin.accumulate(np.append(np.nan, times))[had[:, i]] / optimum
            ratios[:, i] = np.fmin(best, NOTHING)
        found: NDArray[np.float64] = ratios @ self.weights / self.weights.sum() - 1
        return found


def compare(runs: Sequence[Run], budgets: Sequence[int]) -> dict[str, Any]:
    """Both ways of sharing: mean excess by budget, and the difference with its interval."""
    equal, ours = (np.array([run.excess(budgets, rule) for run in runs]) for rule in (equal_shares, choose_arm))
    chosen = np.random.default_rng(0).integers(0, len(runs), size=(RESAMPLES, len(runs)))
    low, high = np.quantile((ours - equal)[chosen].mean(axis=1), [0.025, 0.975], axis=0)
    return {
        str(budget): {
            "equal": float(equal[:, i].mean()),
            "scheduler": float(ours[:, i].mean()),
            "difference": float((ours - equal)[:, i].mean()),
            "low": float(low[i]),
            "high": float(high[i]),
        }
        for i, budget in enumerate(budgets)
    }


def search(
    spaces: Sequence[replay.RecordedSpace], tuner: str, evaluations: int, seeds: int, jobs: int
) -> NDArray[np.float64]:
    """(seeds, tasks, evaluations): times in ns, NaN for a failure, inf where a space was exhausted before."""
    slim = [replace(space, repetitions_ns=()) for space in spaces]
    calls = [(space, tuner, seed, evaluations) for seed in range(seeds) for space in slim]
    times = np.full((len(calls), evaluations), np.inf)
    for number, run in call_in_children("schedsearch.replay:run", calls, jobs):
        times[number, : len(run.times_ns)] = run.times_ns
    return times.reshape(seeds, len(spaces), evaluations)


def make_runs(
    times: NDArray[np.float64], optima: NDArray[np.float64], weights: Sequence[float] | None, draw: int, runs: int
) -> list[Run]:
    """One run per seed, or `runs` of `draw` tasks drawn from all spaces and seeds. Without weights, they are drawn too."""
    rng = np.random.default_rng(0)
    seeds, tasks, _ = times.shape
    if draw:
        chosen = [list(zip(rng.integers(0, seeds, draw), rng.integers(0, tasks, draw))) for _ in range(runs)]
    else:
        chosen = [[(seed, task) for task in range(tasks)] for seed in range(seeds)]
    made = []
    for pairs in chosen:
        searches = [times[seed, task][~np.isinf(times[seed, task])] for seed, task in pairs]
        of = [task for _, task in pairs]
        own = rng.choice(RANDOM_WEIGHTS, size=len(of)) if weights is None else np.array(weights)[of]
        made.append(Run(searches, optima[of], own.astype(float)))
    return made


def show(figures: dict[str, Any]) -> str:
    rows = [
        [
            f"{budget} trials per task",
            f"{f['equal']:.1%}",
            f"{f['scheduler']:.1%}",
            f"{f['difference']:+.1%} [{f['low']:+.1%} {f['high']:+.1%}]",
        ]
        for budget, f in figures.items()
    ]
    return table(["above the optimum", "equal shares", "scheduler", "difference"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--tuner", default="xgb")
    parser.add_argument("--weights", default="1", help="one for all, one per space, or: random")
    parser.add_argument("--budgets", default="16,25,50,100", help="trials per task")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--draw", type=int, default=0, help="tasks of a run, drawn from all spaces and seeds")
    parser.add_argument("--runs", type=int, default=200, help="with --draw: how many runs")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--searches", help="file to keep the searches in; read instead of searching when it exists")
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    spaces = replay.load(options.files).spaces
    budgets = sorted({int(text) for text in options.budgets.split(",")})
    weights = None if options.weights == "random" else [float(text) for text in options.weights.split(",")]
    if weights and len(weights) not in (1, len(spaces)):
        parser.error(f"--weights has {len(weights)} numbers, but there are {len(spaces)} spaces")
    if options.searches and Path(options.searches).exists():
        times = np.load(options.searches)["times"]
    else:
        times = search(spaces, options.tuner, REACH * budgets[-1], options.seeds, options.jobs)
        if options.searches:
            np.savez_compressed(options.searches, times=times)
    optima = np.array([space.best_ns for space in spaces])
    full = weights * len(spaces) if weights and len(weights) == 1 else weights
    runs = make_runs(times, optima, full, options.draw, options.runs)
    figures = compare(runs, budgets)
    print(f"{options.tuner}, {len(runs)} runs of {len(runs[0].searches)} tasks, weights {options.weights}")
    print(show(figures))
    facts = {"tuner": options.tuner, "weights": options.weights, "runs": len(runs), "tasks": len(runs[0].searches)}
    write(
        options.out, {**facts, "spaces": [f"{Path(space.file).name}: {space.name}" for space in spaces], "excess": figures}
    )


if __name__ == "__main__":
    main()
