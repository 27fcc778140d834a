"""The run's end of a fleet: which workers are there, and calls of functions in one of them.

Dask finds workers, moves bytes and says who is gone. It does not decide where something runs and how often: every task is
for one worker, is never repeated by Dask (`retries=0`) and never shared with another one (`pure=False`). If its worker is
gone, the caller gets `AwayError` and decides.

Builds are tasks (`submit`, `result`): they wait in Dask's queue for a free core, whichever run they are of. Measurements are
calls (`call`): their device serves one run and waits for them, so they go to the worker without a queue.
See docs/decisions/390-measurements-are-calls.md.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from schedsearch.closing import Closing
from schedsearch.errors import AwayError, DeviceError, UsageError, first_line
from schedsearch.fleet import host
from schedsearch.fleet.connection import Connection
from schedsearch.fleet.roster import Kind, Roster
from schedsearch.progress import say, stage
from schedsearch.typed import JsonObject

try:
    import distributed
except ImportError as error:
    raise UsageError("a fleet needs Dask: pip install 'schedsearch[fleet]'") from error

CONNECT_S = 10.0
_TICK_S = 0.5
_ASK_S = 5.0  # for an answer of the scheduler
_SILENT_S = 20.0  # after which a scheduler that does not answer, but is connected, counts as away
_ENDS_S = 0.1  # a scheduler that is told to end lets go of its workers first, and hears calls for some 20 ms more
_DESCRIBE_S = 120.0  # a worker imports its compilers
_RENEW_EVERY_S = host.LEASE_S / 4
_LOST = (
    "KilledWorker",
    "CancelledError",
    "FutureCancelledError",
    "CommClosedError",
    "FutureLostError",
    "NoValidWorkerError",
)


class Fleet(Closing):
    """A connection to a scheduler and its workers, for one run. Any thread may call its methods.

    Attributes:
        run: what tells this run from others on the same workers.
        roster: the workers that are there.

    Raises:
        UsageError: Dask is not installed.
        DeviceError: the scheduler cannot be reached.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.run = uuid.uuid4().hex
        self.roster = Roster(connection)
        self._asked: dict[str, tuple[Any, float]] = {}  # of workers that have not described themselves yet
        self._numbers = itertools.count()
        self._seen_s = time.monotonic()
        self._renewed_s = time.monotonic()
        self._held: set[str] = set()  # workers whose devices this run holds
        self._closed = threading.Event()
        self._looking = threading.Lock()
        self._is_away = False
        self._client = self._connect()
        within = contextvars.copy_context()  # of the call, which has a display
        self._watcher = threading.Thread(target=within.run, args=(self._watch,), name="fleet", daemon=True)
        self._watcher.start()

    # ---- who is there

    def has(self, address: str) -> bool:
        return address in self.roster.members

    @property
    def away_s(self) -> float:
        """Seconds since the scheduler answered; 0 while it does."""
        away_s = time.monotonic() - self._seen_s
        return away_s if away_s > _ASK_S + 2 * _TICK_S else 0.0

    def wait_for_members(self) -> None:
        """Waits until every worker that is there has described itself."""
        ends_s = time.monotonic() + _DESCRIBE_S
        stage(f"asking the workers of {self.connection.address} what they have")
        self._look()
        while self._asked and time.monotonic() < ends_s:
            self._closed.wait(0.05)
            self._look()

    def _connect(self) -> Any:
        for name in ("distributed", "distributed.client", "distributed.core", "distributed.utils", "distributed.batched"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what it has to say is said by the run
        self.connection.require_scheduler()
        security = None
        if certificates := self.connection.certificates:
            authority, own, key = certificates
            security = distributed.Security(
                tls_ca_file=authority, tls_client_cert=own, tls_client_key=key, require_encryption=True
            )
        try:
            return distributed.Client(
                self.connection.address, security=security, timeout=CONNECT_S, set_as_default=False, name="schedsearch"
            )
        except Exception as error:  # Dask and ssl raise many kinds
            raise DeviceError(
                f"the scheduler {self.connection.address} cannot be reached: {first_line(error)}; is it a Dask scheduler, "
                "and are the certificates those of its authority?"
            ) from error

    def _watch(self) -> None:
        while not self._closed.wait(_TICK_S):
            try:
                if self._client.status not in ("running", "connecting"):
                    with contextlib.suppress(DeviceError):
                        self._client = self._connect()
                self._look()
                self._renew()
            except Exception:  # of a connection that is being lost; the next turn tells
                logging.getLogger(__name__).debug("the fleet cannot be looked at", exc_info=True)

    def _look(self) -> None:
        """Updates the members from what the scheduler says; one thread at a time."""
        with self._looking:
            self._update()

    def _update(self) -> None:
        try:
            if self._client.status != "running":
                raise OSError("not connected")
            workers = self._client.sync(self._client.scheduler.identity, n_workers=-1, callback_timeout=_ASK_S)["workers"]
        except Exception:  # the scheduler does not answer, in one of many ways
            if self._client.status == "running" and time.monotonic() - self._seen_s < _SILENT_S:
                return  # it is connected, so it may only be slow
            self._tell(away=True)
            self.roster.keep({})
            self._asked = {}
            return
        self._seen_s = time.monotonic()
        self._tell(away=False)
        self.roster.keep(workers)
        for address in [address for address in self._asked if address not in workers]:
            del self._asked[address]
        for address, info in workers.items():
            if address in self.roster.members or address in self.roster.refused:
                continue
            if address not in self._asked:
                self._asked[address] = (self._submitted(address, {}, host.describe), time.time())
            elif self._asked[address][0].done():
                future, asked_s = self._asked.pop(address)
                self._take(address, info, future, asked_s)

    def _tell(self, *, away: bool) -> None:
        """Says once that the scheduler does not answer, and that it does again."""
        if away == self._is_away:
            return
        self._is_away, where = away, self.connection.address
        if away:
            say(f"the scheduler {where} does not answer; the run waits for it, at most {self.connection.patience_s:g} s")
        else:
            say(f"the scheduler {where} answers again")

    def _take(self, address: str, info: JsonObject, future: Any, asked_s: float) -> None:
        """A worker has described itself, or failed to."""
        try:
            if future.status == "error":  # whatever a stranger's process raises
                error = future.exception(timeout=_ASK_S)
                if type(error).__name__ not in _LOST:
                    self.roster.refuse(address, first_line(error))
                return
            facts = future.result(timeout=_ASK_S)
        except (Exception, asyncio.CancelledError):  # it is gone, or slow: if it is still there, it is asked again
            return
        self.roster.take(address, facts, info.get("resources") or {}, asked_s, time.time())

    def _renew(self) -> None:
        if self._held and time.monotonic() - self._renewed_s > _RENEW_EVERY_S:
            self._renewed_s = time.monotonic()
            held = [address for address in self._held if self.has(address)]
            self._client.run(host.renew, self.run, workers=held, wait=False, on_error="ignore")

    def toolchain(self, kind: Kind, wanted: Mapping[str, str] | None) -> dict[str, str]:
        """The compilers of a run, see `Roster.builders`. Waits while no worker is there, e.g. because all start again."""
        ends_s = time.monotonic() + self.connection.patience_s
        while not self.roster.members and time.monotonic() < ends_s:
            self._closed.wait(_TICK_S)
        return self.roster.builders(kind, wanted)[0]

    # ---- calls

    def _submitted(self, address: str, resources: Mapping[str, float], function: Callable[..., Any], *args: Any) -> Any:
        return self._client.submit(
            function, *args, key=f"schedsearch-{function.__name__}-{self.run}-{next(self._numbers)}", pure=False, retries=0,
            workers=[address], allow_other_workers=False,
            resources={name: count for name, count in resources.items() if count} or None,
        )  # fmt: skip

    def submit(self, address: str, resources: Mapping[str, float], function: Callable[..., Any], *args: Any) -> Any:
        """Begins a call in a worker; returns Dask's future. Raises AwayError."""
        try:
            return self._submitted(address, resources, function, *args)
        except Exception as error:  # of a client that is closing
            raise AwayError(f"the worker {address} cannot be reached: {first_line(error)}", begun=False) from error

    def result(self, future: Any, address: str, limit_s: float) -> Any:
        """The result of a call.

        Raises:
            AwayError: the worker is gone, or has not answered for `limit_s`.
            What the call raised.
        """
        ends_s = time.monotonic() + limit_s
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        while not done.wait(_TICK_S) and not future.done():
            self._require(future, address, ends_s, limit_s)
        if future.status == "error":
            error = future.exception(timeout=_ASK_S)
            if type(error).__name__ in _LOST:
                raise self._away(f"the worker {address} was lost") from error
            raise error
        if future.status != "finished":
            raise self._away(f"the worker {address} was lost")
        while True:  # the result is still there; it is lost if the worker goes away now
            try:
                return future.result(timeout=_ASK_S)
            except TimeoutError:
                self._require(future, address, ends_s, limit_s)
            except (Exception, asyncio.CancelledError) as error:  # of Dask: the call itself has ended well
                raise self._away(f"the worker {address} was lost with its result") from error

    def call(self, address: str, limit_s: float, function: Callable[..., Any], *args: Any) -> Any:
        """The result of a coroutine function that begins in a worker at once; it must return exceptions, not raise them.

        Raises:
            AwayError: the worker is gone, or has not answered for `limit_s`.
        """
        ends_s, client = time.monotonic() + limit_s, self._client
        try:
            answer = client.run(function, *args, workers=[address], asynchronous=True)
            future = asyncio.run_coroutine_threadsafe(answer, client.loop.asyncio_loop)
        except Exception as error:  # of a client that is closing
            raise AwayError(f"the worker {address} cannot be reached: {first_line(error)}", begun=False) from error
        while not concurrent.futures.wait([future], _TICK_S).done:
            self._require(future, address, ends_s, limit_s)
        try:
            return future.result()[address]
        except (Exception, asyncio.CancelledError) as error:  # of Dask: a connection ended
            raise self._away(f"the worker {address} was lost") from error

    def _require(self, future: Any, address: str, ends_s: float, limit_s: float) -> None:
        """Gives up a call whose worker is gone, or that takes too long. Raises AwayError."""
        late = time.monotonic() > ends_s
        if late or not self.has(address):
            with contextlib.suppress(Exception):
                future.cancel()
            why = f"did not answer within {limit_s:g} s" if late else "was lost"
            raise self._away(f"the worker {address} {why}")

    def lost(self, address: str) -> AwayError:
        """What has become of a call whose worker is gone."""
        return self._away(f"the worker {address} was lost")

    def _away(self, message: str) -> AwayError:
        """A call is lost. If the scheduler went away, all calls are, whatever they compute: none counts as begun then."""
        for pause_s in (0.0, _ENDS_S):
            time.sleep(pause_s)
            try:
                self.connection.require_scheduler()
            except DeviceError as error:
                return AwayError(f"{message}: {error}", begun=False)
        return AwayError(message)

    def hold(self, address: str) -> None:
        """This run holds a device of a worker, and keeps it by saying so now and then."""
        self._held.add(address)

    def close(self) -> None:
        """Frees the devices and leaves the fleet."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(Exception):
            released = [self._submitted(address, {}, host.release, self.run) for address in self._held if self.has(address)]
            distributed.wait(released, timeout=_ASK_S)
        self._watcher.join(2 * _ASK_S)
        with contextlib.suppress(Exception):
            self._client.close(timeout=2)
