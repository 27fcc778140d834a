"""One measurement of everything that could compute a layer, a graph or a model. PyTorch's own way is always in it.

The candidates are measured in turns, on the same inputs and in the same way. What PyTorch does without schedsearch is the
default: another candidate has to be clearly faster, by the median and in nearly every turn. A tie is PyTorch's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from schedsearch.deadline import Deadline
from schedsearch.errors import first_line
from schedsearch.torch.comparison.timing import Candidate, Sampler, Timer

MARGIN = 0.98
"""What takes PyTorch's place must take less than this part of its time."""
PYTORCH = "PyTorch"
SLOWER = "PyTorch is as fast or faster"
NO_TIME = "there was no time left to {}; PyTorch computes it"
_TURNS = 7
_FEWEST_TURNS = 3  # if the time is over
_WON = 0.75  # of the turns that a winner must win, so that noise does not choose it


@dataclass(frozen=True)
class Result:
    """What a benchmark found.

    Attributes:
        winner: the name of the fastest candidate; PyTorch's unless another one is clearly faster.
        times_ns: name -> its time by the first timer; of those that could be measured by every timer.
        problems: name -> why another one does not win.
    """

    winner: str
    times_ns: Mapping[str, float]
    problems: Mapping[str, str]

    @property
    def pytorch_ns(self) -> float | None:
        return self.times_ns.get(PYTORCH)


def benchmark(
    timers: Sequence[Timer], pytorch: Candidate, others: Sequence[Candidate], deadline: Deadline | None = None
) -> Result:
    """Measures all candidates and chooses one.

    A candidate that raises is out, with the reason; if PyTorch's cannot be measured, nothing can be compared with it, and it
    wins.

    Args:
        timers: the winner has to be faster by each of them, because callers may run it in each of these ways.
        pytorch: named PYTORCH.
        deadline: after it there are no more turns than are needed.
    """
    candidates = {each.name: each for each in (*others, pytorch)}
    samples: list[dict[str, list[float]]] = []
    problems: dict[str, str] = {}
    for timer in timers:
        found, failed = _measured(timer, [each for name, each in candidates.items() if name not in problems], deadline)
        samples.append(found)
        problems |= failed
        if PYTORCH in problems:
            reason = f"PyTorch could not be measured: {problems.pop(PYTORCH)}"
            return Result(PYTORCH, {}, {each.name: problems.get(each.name, reason) for each in others})
    measured = [name for name in candidates if name not in problems]
    times_ns = {name: statistics.median(samples[0][name]) for name in measured}
    able = [name for name in measured if all(_beats(each[name], each[PYTORCH]) for each in samples)]
    winner = min(able, key=times_ns.__getitem__, default=PYTORCH)
    for name in measured:
        if name not in (winner, PYTORCH):
            problems[name] = f"{winner} is faster" if name in able else SLOWER
    return Result(winner, times_ns, problems)


def _beats(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    won = sum(one < other for one, other in zip(ours, theirs))
    return statistics.median(ours) < MARGIN * statistics.median(theirs) and won >= _WON * len(ours)


def _measured(
    timer: Timer, candidates: Sequence[Candidate], deadline: Deadline | None
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Times of each candidate, turn by turn, and why others have none."""
    problems: dict[str, str] = {}
    samplers: dict[str, Callable[[], float]] = {}
    for each in candidates:
        try:
            with each.around():
                samplers[each.name] = timer.sampler(each) if isinstance(timer, Sampler) else _once(timer, each)
        except Exception as error:  # of many kinds: it may fail on the inputs, in a capture, or for want of memory
            problems[each.name] = f"{type(error).__name__}: {first_line(error)}"
    found: dict[str, list[float]] = {name: [] for name in samplers}
    for turn in range(_TURNS if isinstance(timer, Sampler) else 1):
        if deadline is not None and deadline.passed and turn >= _FEWEST_TURNS:
            break
        for each in (each for each in candidates if each.name not in problems):
            try:
                with each.around():
                    found[each.name].append(samplers[each.name]())
            except Exception as error:
                problems[each.name] = f"{type(error).__name__}: {first_line(error)}"
    return {name: times for name, times in found.items() if name not in problems}, problems


def _once(timer: Timer, candidate: Candidate) -> Callable[[], float]:
    """Measured now: other timers do not measure in turns."""
    time_ns = timer.ns(candidate)
    return lambda: time_ns
