"""The checked options of a run: its budget, and how it searches."""

from __future__ import annotations

from dataclasses import dataclass

from schedsearch.errors import UsageError, did_you_mean
from schedsearch.measurement import COLD_GRAPH, check_mode
from schedsearch.tuner import TUNERS

DEFAULT_TRIALS = 64  # per task, when neither trials nor a time are given
RACE_SIZE = 5
OVERTIME = 1.1  # times the time of a run: then it ends, whatever has no result
RACE_SHARE = 0.5  # of the time of a run: the most that is kept for final races


@dataclass(frozen=True)
class Options:
    """How a session runs.

    Attributes:
        trials: per task, shared over the run: the run may spend `trials` times the number of tasks wherever it pays off.
            Resumed earlier trials count. None: no limit (then `time_s` or the spaces end the run).
        time_s: seconds for the search and the final races. The search ends when the races are expected to need the rest,
            which may be half of the time. What has not begun then is dropped, unless its task has no result yet. Every task
            has its race as long as there is time; when little is left fewer configurations take part, the fastest and those
            to compare with. The run waits for nothing more when `OVERTIME` times the time is over, but for a measurement
            that the device has begun: tasks without a result then have a problem.
        patient: whether the first result of all is waited for, however long it takes, and the default of its task.
        tuner, seed: name of the tuner, and the seed of every random choice.
        resume: whether records of earlier runs count and teach the tuner, and those of other workloads and devices give it
            a warm start.
        mode: how times are measured; see `schedsearch.measurement.MODES`.
        race_size: how many of a task's fastest configurations meet in the final race; the default joins them.
        queue_depth: candidates under way at most.
        tuner_thread: whether tuners think in a thread of their own (not on a CPU target, where they would disturb timing).
    """

    trials: int | None = None
    time_s: float | None = None
    tuner: str = "xgb"
    seed: int = 0
    resume: bool = True
    mode: str = COLD_GRAPH
    race_size: int = RACE_SIZE
    queue_depth: int = 8
    tuner_thread: bool = False
    patient: bool = True

    def __post_init__(self) -> None:
        if self.trials is not None and (type(self.trials) is not int or self.trials < 1):
            raise UsageError(f"trials {self.trials!r} is not possible; allowed: an integer, 1 or more")
        if self.time_s is not None and (type(self.time_s) not in (int, float) or not self.time_s > 0):
            raise UsageError(f"time_s {self.time_s!r} is not possible; allowed: a number of seconds, more than 0")
        if self.tuner not in TUNERS:
            raise UsageError(
                f"tuner {self.tuner!r} is not known{did_you_mean(self.tuner, TUNERS)}; allowed: {', '.join(TUNERS)}"
            )
        check_mode(self.mode, "cuda")  # whether the run's device has it is checked where that is known
