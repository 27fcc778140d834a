"""The result of a final race, and the rules that find its winner. Only these times of a run are compared with each other.

In a race the finalists and the default run in turns, so that clocks, temperature and other load are the same for all.
Times of the search are single measurements, minutes apart; the first one on a busy machine may be ten times too slow.

See docs/decisions/267-ties-of-a-race.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from schedsearch.config import Config
from schedsearch.measure.timing import median_half_width
from schedsearch.measurement import Measurement, Verdict
from schedsearch.session.plan import ArmPlan
from schedsearch.typed import JsonObject

NOISE = 0.005
"""Times that differ by less are equal, however steady they are: two runs of one kernel differ by as much."""


@dataclass(frozen=True)
class Raced:
    """A configuration that passed a final race.

    Attributes:
        time_ns: median of its repeats.
        spread: interquartile range of the repeats over their median.
        is_default, is_plain: whether it is its template's default or plain configuration.
        sustained_ns: its time while the device got no rest; None where the kernels are short.
        verdict: what the race found about it.
    """

    template: str
    config: Config
    time_ns: float
    spread: float
    is_default: bool = False
    is_plain: bool = False
    sustained_ns: float | None = None
    verdict: Verdict = Verdict.NONE

    @classmethod
    def of(cls, plan: ArmPlan, config: Config, measurement: Measurement, verdict: Verdict = Verdict.NONE) -> Raced:
        """From a measurement that is ok."""
        assert measurement.time_ns is not None
        is_default, is_plain = config == plan.default, config == plan.plain
        times = measurement.time_ns, measurement.spread
        return cls(plan.template.name, config, *times, is_default, is_plain, measurement.sustained_ns, verdict)

    def to_json(self) -> JsonObject:
        return asdict(self) | {"config": dict(self.config)}


@dataclass(frozen=True)
class RaceResult:
    """The result of a final race.

    Attributes:
        best: the winner (`judged`). In races of earlier versions, which broke no ties, the fastest.
        default: the fastest default; None if none passed.
        plain: the fastest plain configuration; None if no template has one.
        tied: the others that cannot be told from the fastest, the fastest first.
    """

    best: Raced
    default: Raced | None
    plain: Raced | None = None
    tied: tuple[Raced, ...] = ()

    @classmethod
    def of(cls, raced: Sequence[Raced]) -> RaceResult | None:
        """From all entrants that passed, with their verdicts; None without any."""
        ranked = sorted(raced, key=lambda each: each.time_ns)
        if not ranked:
            return None
        best = next((each for each in ranked if each.verdict is Verdict.WON), ranked[0])
        default = next((each for each in ranked if each.is_default), None)
        plain = next((each for each in ranked if each.is_plain), None)
        return cls(best, default, plain, tuple(each for each in ranked if each.verdict is Verdict.TIED))

    @property
    def speedup(self) -> float | None:
        """The default's time over the best's."""
        return None if self.default is None else self.default.time_ns / self.best.time_ns

    @property
    def over_plain(self) -> float | None:
        """The plain configuration's time over the best's."""
        return None if self.plain is None else self.plain.time_ns / self.best.time_ns

    def to_json(self) -> JsonObject:
        return {
            "best": self.best.to_json(),
            "default": None if self.default is None else self.default.to_json(),
            "plain": None if self.plain is None else self.plain.to_json(),
            "tied": [each.to_json() for each in self.tied],
        }


# ---- the winner


@dataclass(frozen=True)
class Entrant:
    """What decides a race about one of its entrants.

    Attributes:
        template, config: of the entrant.
        measurement: of the race, ok.
        is_anchor: whether it is what the task gets without tuning.
        is_default: whether it is the default of its template.
        neighbours_ns: the median time of the measured configurations that differ from it in one knob, where a failure takes
            forever; None if none was measured.
    """

    template: str
    config: Config
    measurement: Measurement
    is_anchor: bool = False
    is_default: bool = False
    neighbours_ns: float | None = None


def judged(entrants: Sequence[Entrant]) -> list[Verdict]:
    """The verdict on each entrant of a race, of which one has won if there is any.

    The fastest is the one whose worst phase is best: a phase (burst, and sustained where kernels are long) counts by the
    time over the least of that phase. Whatever cannot be told from the fastest is tied with it. An entrant that took
    longer than a default cannot win, unless it is what the task gets without tuning. Of the others wins

    1. the configuration that the task gets without tuning, then the default of another template: nothing is gained by
       another one;
    2. the one with the best neighbourhood: its time depends least on one knob, and on this day's noise. One without measured
       neighbours comes after all that have some;
    3. the first by the name of the template and the text of the configuration.
    """
    if not entrants:
        return []
    least = [min(times) for times in zip(*(_phases(each) for each in entrants))]
    scores = [max(time / best for time, best in zip(_phases(each), least)) for each in entrants]
    fastest = entrants[scores.index(min(scores))]
    tied = [each for each in entrants if each is fastest or not _is_slower(each.measurement, fastest.measurement)]
    default = min((score for score, each in zip(scores, entrants) if each.is_anchor or each.is_default), default=math.inf)
    behind = [each for score, each in zip(scores, entrants) if score > default and not each.is_anchor]
    winner = min((each for each in tied if not any(each is other for other in behind)), key=_preference)
    return [
        Verdict.WON if each is winner else Verdict.TIED if any(each is other for other in tied) else Verdict.NONE
        for each in entrants
    ]


def neighbours_ns(config: Config, results: Mapping[Config, float | None]) -> float | None:
    """See `Entrant.neighbours_ns`. `results` are those of the same template on the same task, None for a failure."""
    near = [math.inf if time_ns is None else time_ns for other, time_ns in results.items() if _distance(config, other) == 1]
    return statistics.median(near) if near else None


def _distance(config: Config, other: Config) -> int:
    """In how many knobs they differ."""
    return sum(config[name] != other.get(name) for name in config)


def _phases(entrant: Entrant) -> tuple[float, ...]:
    measurement = entrant.measurement
    assert measurement.time_ns is not None
    return (measurement.time_ns,) if measurement.sustained_ns is None else (measurement.time_ns, measurement.sustained_ns)


def _is_slower(one: Measurement, fastest: Measurement) -> bool:
    """Whether the times of the race tell the first from the second.

    The entrants of a race run in turns, so their times are compared pair by pair: what disturbs one turn disturbs both.
    """
    assert one.time_ns is not None and fastest.time_ns is not None
    if (one.sustained_ns or 0.0) > (fastest.sustained_ns or math.inf) * (1 + NOISE):
        return True
    if len(one.times_ns) != len(fastest.times_ns):
        return one.time_ns > fastest.time_ns * (1 + NOISE)
    ratios = [mine / other for mine, other in zip(one.times_ns, fastest.times_ns)]
    ratio = statistics.median(ratios)
    return ratio * (1 - median_half_width(ratios)) > 1 + NOISE


def _preference(entrant: Entrant) -> tuple[bool, bool, bool, float, str, str]:
    alone = entrant.neighbours_ns is None
    near = math.inf if entrant.neighbours_ns is None else entrant.neighbours_ns
    return not entrant.is_anchor, not entrant.is_default, alone, near, entrant.template, entrant.config.json
