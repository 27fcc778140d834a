"""How often, and how soon, a process that failed to start is started again."""

from __future__ import annotations

import math
import time

from schedsearch.errors import DeviceError

FIRST_WAIT_S = 0.25
LONGEST_WAIT_S = 30.0
# A process that the system kills, or has no memory for, is tried for about two minutes: others may free memory.
ATTEMPTS = 11
# One that ends by itself, e.g. because a module cannot be imported, will probably do so again.
ATTEMPTS_IF_HOPELESS = 5


class Restarts:
    """Counts failed starts in a row. After each, the next start waits twice as long, up to `LONGEST_WAIT_S`.

    Attributes:
        next_s: the time (`time.monotonic`) of the next start; -inf when it need not wait.
    """

    def __init__(self, what: str) -> None:
        self._what, self._failures, self._hopeless, self._since_s = what, 0, 0, 0.0
        self.next_s = -math.inf

    @property
    def due(self) -> bool:
        return time.monotonic() >= self.next_s

    def succeeded(self) -> None:
        """A process started: failures are counted from zero again."""
        self._failures = self._hopeless = 0
        self.next_s = -math.inf

    def wait(self) -> None:
        """Sleeps until the next start is due."""
        time.sleep(max(0.0, self.next_s - time.monotonic()))

    def failed(self, error: Exception, *, hopeless: bool = False, others: bool = False) -> None:
        """A process did not start.

        Args:
            error: how the process ended.
            hopeless: whether the next one will probably end in the same way.
            others: whether other processes of the same kind go on.

        Raises:
            DeviceError: too many failed in a row, and there are no others.
        """
        now = time.monotonic()
        if not self._failures:
            self._since_s = now
        self._failures += 1
        self._hopeless += hopeless
        self.next_s = now + min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(self._failures - 1, 20))
        if not others and (self._failures >= ATTEMPTS or self._hopeless >= ATTEMPTS_IF_HOPELESS):
            raise DeviceError(
                f"no {self._what} can be started: {self._failures} failed in a row within {now - self._since_s:.0f} s. "
                f"The last one: {error}"
            ) from error
