"""Measures on a device of a fleet, wherever it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from schedsearch.closing import Closing
from schedsearch.errors import AwayError, DeviceBusyError, DeviceError
from schedsearch.fleet import host
from schedsearch.launch import Artifact
from schedsearch.measurement import Measurement
from schedsearch.processes.builder import Built
from schedsearch.target import Target
from schedsearch.verification.reference import reference_name
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from schedsearch.fleet.client import Fleet

BATCH = 4
_PREPARE_S = 900.0  # more than a runner allows itself, its processes that start included
_BUSY_POLL_S = 1.0

Job = host.Job


class FleetRunner(Closing):
    """A `Runner` whose device a worker of a fleet has. One call at a time, from any thread.

    The device may change its worker: one that is killed is started again by its nanny, and another worker of the same host
    may take over. A call that a lost worker had raises AwayError.

    Args:
        on_wait: called once with a sentence if another run holds the device.

    Attributes:
        batch: candidates that one call of `measure_many` should take, so that their way there and back takes little of
            each one's time.
        waited_s: seconds until other runs had freed the device.

    Raises:
        DeviceBusyError: another run holds the device, and the connection says not to wait.
        DeviceError: the device cannot be opened.
    """

    batch = BATCH
    reference_s = 0.0

    def __init__(
        self,
        fleet: Fleet,
        target: Target,
        mode: str,
        timeout_s: float,
        reference_timeout_s: float,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        self._fleet, self._target, self._timeout_s = fleet, target, timeout_s
        self._setup = host.Setup(fleet.run, target, mode, timeout_s, reference_timeout_s)
        self._address = ""
        self._guard = threading.Lock()
        self._references: dict[str, tuple[Workload, Artifact]] = {}
        self._sent: set[str] = set()  # names of references that the present worker has
        self._gone_s: float | None = None
        self.prepare_s = self.waited_s = 0.0
        self._open(on_wait)

    def _open(self, on_wait: Callable[[str], None] | None) -> None:
        began_s, told = time.monotonic(), False
        while True:
            try:
                self._ask(host.Measure(()), _PREPARE_S)
                break
            except AwayError as error:
                if time.monotonic() - began_s > self._fleet.connection.patience_s:
                    raise DeviceError(str(error)) from error
                time.sleep(_BUSY_POLL_S)
            except DeviceBusyError as error:
                if not self._fleet.connection.wait_for_device:
                    raise
                if on_wait is not None and not told:
                    on_wait(f"waiting for {self._target.name} of {self._target.host}: in use by {error.holder}")
                told = True
                time.sleep(_BUSY_POLL_S)
                self.waited_s = time.monotonic() - began_s

    # ---- where the device is

    @property
    def is_there(self) -> bool:
        """Whether a worker has the device now."""
        there = self._target.uuid in self._fleet.roster.devices()
        if there:
            self._gone_s = None
        elif self._gone_s is None:
            self._gone_s = time.monotonic()
        return there

    @property
    def gone_for_good(self) -> str:
        """Why nobody waits for the device any more; "" while one should."""
        if self.is_there or self._gone_s is None or time.monotonic() - self._gone_s < self._fleet.connection.patience_s:
            return ""
        away_s = self._fleet.away_s
        who = "no worker has had it" if not away_s else f"the scheduler {self._fleet.connection.address} has not answered"
        return f"{who} for {self._fleet.connection.patience_s:g} s"

    def _find(self) -> str:
        """The worker that is asked next: the same as before while it is there. Raises AwayError."""
        _, addresses = self._fleet.roster.devices().get(self._target.uuid, (None, ()))
        if not addresses:
            raise AwayError(f"no worker has {self._target.name} of {self._target.host} now", begun=False)
        if self._address not in addresses:
            self._address, self._sent = addresses[0], set()
            self._fleet.hold(self._address)
        return self._address

    # ---- calls

    def learn_reference(self, workload: Workload, artifact: Artifact) -> None:
        """Takes a reference that a builder compiled; it goes along with the next call. Any thread may call it."""
        with self._guard:
            self._references.setdefault(reference_name(workload), (workload, artifact))

    def prepare(self, workload: Workload) -> None:
        """As `Runner.prepare`. Raises AwayError, too."""
        for refused in self._asked(host.Prepare(workload), _PREPARE_S):
            assert isinstance(refused, host.Refused)
            raise refused.error(refused.text)

    def measure(self, workload: Workload, built: Built, best_ns: float | None = None) -> Measurement:
        """As `Runner.measure`. Raises AwayError, too."""
        (result,) = self.measure_many([(workload, built, best_ns)])
        if isinstance(result, Exception):
            raise result
        return result

    def measure_many(self, jobs: Sequence[Job]) -> list[Measurement | Exception]:
        """Measures candidates one after another; what `measure` would raise because of a task is returned in its place."""
        limit_s = _PREPARE_S + 3 * self._timeout_s * len(jobs)
        answers = self._asked(host.Measure(tuple(jobs)), limit_s)
        return [each.error(each.text) if isinstance(each, host.Refused) else each for each in answers]

    def race(self, workload: Workload, built: Sequence[Built]) -> list[Measurement]:
        """As `Runner.race`. Raises AwayError, too."""
        limit_s = _PREPARE_S + 6 * self._timeout_s * len(built)
        results: list[Measurement] = []
        for each in self._asked(host.Race(workload, tuple(built)), limit_s):
            if isinstance(each, host.Refused):
                raise each.error(each.text)
            results.append(each)
        return results

    def _asked(self, request: host.Request, limit_s: float) -> Sequence[Measurement | host.Refused]:
        """An answer. If the device moved to another worker of its host, the one before may hold it for a while."""
        ends_s = time.monotonic() + host.LEASE_S + 10
        while True:
            try:
                return self._ask(request, limit_s).results
            except DeviceBusyError as error:
                if time.monotonic() > ends_s:
                    raise DeviceError(str(error)) from error
                time.sleep(_BUSY_POLL_S)

    def _ask(self, request: host.Request, limit_s: float) -> host.Answer:
        address = self._find()
        with self._guard:
            new = {name: each for name, each in self._references.items() if name not in self._sent}
        try:
            answer = self._fleet.call(address, limit_s, host.serve, self._setup, request, tuple(new.values()))
        except AwayError:
            self._address = ""
            raise
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, host.Answer)
        self._sent |= new.keys()
        self.prepare_s += answer.prepare_s
        return answer

    def close(self) -> None:
        """Does nothing: the fleet frees all devices of its run."""
