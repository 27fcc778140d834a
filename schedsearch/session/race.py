"""The result of a final race. Only these times of a run are compared with each other.

In a race the finalists and the default run in turns, so that clocks, temperature and other load are the same for all.
Times of the search are single measurements, minutes apart; the first one on a busy machine may be ten times too slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from schedsearch.config import Config
from schedsearch.measurement import Measurement
from schedsearch.session.plan import ArmPlan
from schedsearch.typed import JsonObject


@dataclass(frozen=True)
class Raced:
    """A configuration that passed a final race.

    Attributes:
        time_ns: median of its repeats.
        spread: interquartile range of the repeats over their median.
        is_default, is_plain: whether it is its template's default or plain configuration.
    """

    template: str
    config: Config
    time_ns: float
    spread: float
    is_default: bool = False
    is_plain: bool = False

    @classmethod
    def of(cls, plan: ArmPlan, config: Config, measurement: Measurement) -> Raced:
        """From a measurement that is ok."""
        assert measurement.time_ns is not None
        is_default, is_plain = config == plan.default, config == plan.plain
        return cls(plan.template.name, config, measurement.time_ns, measurement.spread, is_default, is_plain)

    def to_json(self) -> JsonObject:
        return asdict(self) | {"config": dict(self.config)}


@dataclass(frozen=True)
class RaceResult:
    """The result of a final race.

    Attributes:
        best: the fastest configuration.
        default: the fastest default; None if none passed.
        plain: the fastest plain configuration; None if no template has one.
    """

    best: Raced
    default: Raced | None
    plain: Raced | None = None

    @classmethod
    def of(cls, raced: Sequence[Raced]) -> RaceResult | None:
        """From all entrants that passed; None without any."""
        ranked = sorted(raced, key=lambda each: each.time_ns)
        if not ranked:
            return None
        default = next((each for each in ranked if each.is_default), None)
        return cls(ranked[0], default, next((each for each in ranked if each.is_plain), None))

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
        }
