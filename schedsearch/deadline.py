"""The moment until which a caller was promised an answer; everything that takes long on the way is told of it.

See docs/decisions/174-a-time-limit-is-kept.md.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]


@dataclass(frozen=True)
class Deadline:
    """A moment of a clock, made once where the caller enters, and passed down.

    Attributes:
        ends_s: of `clock`; infinite if the caller gave no time.
        clock: seconds; of tests, another one than `time.monotonic`.
    """

    ends_s: float = math.inf
    clock: Clock = time.monotonic

    @classmethod
    def within(cls, seconds: float | None, clock: Clock = time.monotonic) -> Deadline:
        """So many seconds from now; None: never."""
        return cls(math.inf if seconds is None else clock() + seconds, clock)

    @property
    def left_s(self) -> float:
        """Seconds from now, 0 if it has passed."""
        return max(0.0, self.ends_s - self.clock())

    @property
    def passed(self) -> bool:
        return self.clock() >= self.ends_s

    def before(self, seconds: float) -> Deadline:
        """An earlier one, which leaves so many seconds for what comes afterwards."""
        return Deadline(self.ends_s - seconds, self.clock)

    def share(self, part: float) -> Deadline:
        """One at which this part of the time that is left will have passed."""
        return Deadline(self.clock() + part * self.left_s, self.clock) if self.ends_s < math.inf else self


NEVER = Deadline()
