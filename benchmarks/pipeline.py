"""How well the tuning loop keeps builders and device busy: a run with simulated ones, the real loop and the real tuner.

The simulated host has builders that take a given time per candidate after a cold start, and a device that takes a given
time per measurement. No GPU is needed. `bound` is the most that the builders (or the device) could do.

Run: python benchmarks/pipeline.py [--builders 15] [--build-s 0.7] [--measure-s 0.012] [--one-thread] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import resource
import time
from collections.abc import Sequence
from typing import Any

from common import table, write

from schedsearch.config import Config
from schedsearch.launch import Artifact, Grid, LaunchPlan, Step
from schedsearch.measurement import Measurement, Outcome, Record, Resources
from schedsearch.processes.builder import Built, Candidate
from schedsearch.session.loop import Session
from schedsearch.session.observer import Observer, Trial
from schedsearch.session.options import Options
from schedsearch.session.plan import plan_tasks
from schedsearch.session.tune import queue_depth
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import PRESETS, Target
from schedsearch.template import KernelSource, Template, TemplateSet
from schedsearch.workload import Workload

POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PREPARE_S = 0.4  # inputs and reference of a workload


class TiledOne(Template):
    """A space shaped like that of a tiled kernel."""

    name = "tiled_one"
    op = "conv2d"
    kind = "cuda"

    def validate(self, workload: Workload, target: Target) -> str | None:
        return None

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        return ConfigSpace(
            [*(Knob(f"tile{i}", POWERS) for i in range(6)), Knob("order", ("x", "y", "z")), Knob("stages", (1, 2, 3, 4, 5))],
            [
                Constraint("threads <= 1024", lambda k: k["threads"] <= 1024),
                Constraint("shared memory <= 232448 bytes", lambda k: k["shared_bytes"] <= 232448),
            ],
            derived={
                "threads": lambda k: k["tile0"] * k["tile1"],
                "shared_bytes": lambda k: 2 * k["stages"] * (k["tile2"] * k["tile3"] + k["tile4"] * k["tile5"]),
            },
        )

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        return Config({**{f"tile{i}": 8 for i in range(6)}, "order": "x", "stages": 2})

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        raise NotImplementedError("this benchmark compiles nothing")


class TiledTwo(TiledOne):
    name = "tiled_two"


def time_ns(workload: Workload, config: Config) -> float:
    """A smooth landscape whose optimum moves with the workload."""
    best = 3 + math.log2(workload.n * workload.k) / 4
    slow = sum((math.log2(int(config[f"tile{i}"])) - best - (i % 3)) ** 2 for i in range(6))
    return 1000 * (1 + 0.1 * slow + 0.05 * abs(int(config["stages"]) - 3) + 0.2 * (config["order"] != "y"))


class PretendedBuilder:
    """`workers` slots that run by themselves. Candidates reach them in the order of submission."""

    def __init__(self, workers: int, build_s: float, start_s: float) -> None:
        self.workers, self.busy_s = workers, 0.0
        self._build_s, self._start_s = build_s, start_s
        self._rng = random.Random(0)
        self._free_at = [math.inf] * workers  # inf: not started
        self._under_way: dict[int, tuple[float, float, Candidate]] = {}
        self._tokens = itertools.count()

    @property
    def pending(self) -> int:
        return len(self._under_way)

    def warm_up(self) -> None:
        """Starts every worker."""
        now = time.monotonic()
        self._free_at = [now + self._start_s if math.isinf(at) else at for at in self._free_at]

    def submit(self, candidate: Candidate) -> int:
        now = time.monotonic()
        slot = min(range(self.workers), key=lambda i: now if math.isinf(self._free_at[i]) else max(now, self._free_at[i]))
        begins = now + self._start_s if math.isinf(self._free_at[slot]) else max(now, self._free_at[slot])
        takes = self._build_s * self._rng.uniform(0.6, 1.4)
        self.busy_s += takes
        self._free_at[slot] = begins + takes
        token = next(self._tokens)
        self._under_way[token] = (begins + takes, takes, candidate)
        return token

    def poll(self, timeout_s: float) -> list[tuple[int, Built | Measurement]]:
        ready = min((end for end, _, _ in self._under_way.values()), default=math.inf)
        time.sleep(max(0.0, min(timeout_s, ready - time.monotonic())))
        now = time.monotonic()
        done = [token for token, (end, _, _) in self._under_way.items() if end <= now]
        return [(token, self._built(*self._under_way.pop(token)[1:])) for token in done]

    def _built(self, build_s: float, candidate: Candidate) -> Built | Measurement:
        if int(candidate.config["tile2"]) * int(candidate.config["stages"]) >= 512:
            return Measurement(Outcome.REJECTED, message="spills", build_s=build_s)
        plan = LaunchPlan("cuda", "sm_90a", (Step("kernel", (), Grid(1), 32),))
        return Built(Artifact(candidate.config.json.encode(), plan), Resources(), candidate.config.json, build_s)


class PretendedRunner:
    def __init__(self, measure_s: float) -> None:
        self._measure_s, self.prepare_s = measure_s, 0.0
        self._prepared: set[Workload] = set()

    def prepare(self, workload: Workload) -> None:
        if workload not in self._prepared:
            time.sleep(PREPARE_S)
            self.prepare_s += PREPARE_S
            self._prepared.add(workload)

    def measure(self, workload: Workload, built: Built, best_ns: float | None) -> Measurement:
        self.prepare(workload)
        time.sleep(self._measure_s)
        return self._measurement(workload, built)

    def race(self, workload: Workload, built: Sequence[Built]) -> list[Measurement]:
        return [self._measurement(workload, each) for each in built]

    def _measurement(self, workload: Workload, built: Built) -> Measurement:
        config = Config.from_json(built.artifact.code.decode())
        return Measurement(Outcome.OK, times_ns=(time_ns(workload, config),) * 5, max_error=0.0, run_s=self._measure_s)


class NoStore:
    """Takes records and forgets them."""

    def append(self, record: Record, run_so_far: Any = None) -> int:
        return 0

    def promote(self, record_id: int, artifact: Artifact, *, if_faster: bool) -> bool:
        return True

    def demote(self, workload: Workload, target_key: str, mode: str) -> bool:
        return False

    def best(self, workload: Workload, target_key: str, mode: str) -> Record | None:
        return None

    def start_run(self, info: dict[str, Any]) -> str:
        return "run"

    def finish_run(self, run_id: str, summary: dict[str, Any]) -> None:
        pass

    def measured(self, *args: Any) -> dict[Config, Record]:
        return {}

    def last_race(self, *args: Any) -> list[Record]:
        return []

    def tuned(self, *args: Any) -> list[Any]:
        return []


class FirstTrial(Observer):
    """The times at which the search's outcomes arrived."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def on_trial(self, event: Trial) -> None:
        if not event.final_race:
            self.at_s.append(event.elapsed_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--builders", type=int, default=15)
    parser.add_argument("--build-s", type=float, default=0.7)
    parser.add_argument("--start-s", type=float, default=2.5)
    parser.add_argument("--measure-s", type=float, default=0.012)
    parser.add_argument("--tasks", type=int, default=13)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--tuner", default="xgb")
    parser.add_argument("--one-thread", action="store_true", help="tuners run in the loop's own thread")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()

    target = PRESETS["h200"]
    shapes = [Workload.conv2d(n=1 + i, h=28, w=28, c=64, k=64, r=3, s=3, dtype="float16") for i in range(args.tasks)]
    plans = plan_tasks(shapes, TemplateSet([TiledOne(), TiledTwo()]), target)
    builder = PretendedBuilder(args.builders, args.build_s, args.start_s)
    builder_like: Any = builder
    runner = PretendedRunner(args.measure_s)
    observer = FirstTrial()
    builder.warm_up()
    depth = queue_depth(args.builders)
    options = Options(trials=args.trials, tuner=args.tuner, queue_depth=depth, tuner_thread=not args.one_thread)
    summary = Session(plans, NoStore(), builder_like, runner, target, options, observers=[observer]).run()
    outcomes = len(observer.at_s)
    search_s = observer.at_s[-1]
    result = {
        "trials": summary.new_trials,
        "outcomes": outcomes,
        "search_s": round(search_s, 2),
        "first_s": round(observer.at_s[0], 2),
        "outcomes_per_s": round(outcomes / search_s, 2),
        "bound_per_s": round(min(args.builders / args.build_s, 1 / args.measure_s), 2),
        "builders_busy": round(builder.busy_s / args.builders / search_s, 3),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(table(list(result), [list(result.values())]))
    print(summary.shares)
    write(args.json, {**vars(args), **result})


if __name__ == "__main__":
    main()
