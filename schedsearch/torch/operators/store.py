"""Where the operators find kernels: one database for the whole process."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from schedsearch.errors import DatabaseError, NoRecordError, SchedsearchError, UnsupportedError, WorkloadError
from schedsearch.measurement import COLD_GRAPH, DEFAULT_DB
from schedsearch.records.location import require_file
from schedsearch.runtime.caches import shared_caches
from schedsearch.runtime.fallback import LEVELS, check_levels
from schedsearch.runtime.kernel import Kernel
from schedsearch.torch.arguments import check_options
from schedsearch.workload import Workload

_MOST_READY = 4096  # descriptions of calls; the oldest are forgotten
_REPEATED = 2  # calls of one description, before it is taken to be repeated
RECORDED = ("exact", "same_architecture")  # the levels that build nothing

# (tensors, addresses, numbers) -> output; the same for a kernel and for PyTorch's own operator.
Call = Callable[..., Any]


@dataclass(frozen=True)
class Served:
    """What computes the calls of one description.

    Attributes:
        what: the workload's label, or the name of the operator if no workload describes the call.
        device: cpu, cuda:0 ...
        kernel: the kernel; None if PyTorch computes.
        reason: why PyTorch computes; empty with a kernel.
    """

    what: str
    device: str
    kernel: Kernel | None = None
    reason: str = ""

    def __str__(self) -> str:
        by = f"PyTorch ({self.reason})" if self.kernel is None else f"{self.kernel.provenance.template}, {self.kernel.level}"
        return f"{self.what} on {self.device}: {by}"


class Store:
    """A database and what was found in it.

    Attributes:
        db: the database; None: PyTorch computes everything.
        ready: description of a call -> what computes it.
        repeated: address of a tensor of a call -> its operator, and the function of calls that repeat it; see
            `repeated_call`. The address is that of a weight, where there is one.
        served: description of a call -> which record computes it, for messages.
    """

    def __init__(self, db: str | os.PathLike[str] | None, allow: Iterable[str], mode: str) -> None:
        self.db = None if db is None else require_file(db).absolute()
        self.allow, self.mode = check_levels(allow), mode
        self.ready: dict[Any, Call] = {}
        self.repeated: dict[int, tuple[object, Call]] = {}
        self._in_a_row: dict[int, tuple[Call, int]] = {}  # such an address -> the last call that was described, how often
        self.served: dict[Any, Served] = {}

    def kernel(self, workload: Workload, device: torch.device, *, builds: bool = False) -> Kernel:
        """The kernel of a workload.

        Args:
            builds: whether one is built where the allowed levels have none.

        Raises:
            NoRecordError: the allowed levels have none, or there is no database.
            SchedsearchError: the database or the device cannot be used.
        """
        if self.db is None:
            raise NoRecordError("schedsearch.torch.use(None) said so")
        name = device_name(device)
        allow = LEVELS if builds else self.allow
        try:
            cache = shared_caches(self.db, allow, self.mode).on(name)
        except DatabaseError:
            if self.db.exists():
                raise
            raise NoRecordError(f"there is no database {self.db}") from None
        return cache.kernel(workload)

    def is_repeated(self, address: int, call: Call) -> bool:
        """Counts a call that was described; says of one whether so many came in a row at its address that others will
        repeat it.

        Args:
            call: what computes it.
        """
        last, count = self._in_a_row.get(address, (None, 0))
        if last is not call:
            count = 0
            if len(self._in_a_row) >= _MOST_READY:
                self._in_a_row.clear()
                self.repeated.clear()
        if count <= _REPEATED:
            self._in_a_row[address] = call, count + 1
        return count == _REPEATED

    def forget(self) -> None:
        """The next call of each description looks into the database again."""
        self.repeated.clear()
        self._in_a_row.clear()
        self.ready.clear()
        self.served.clear()


def device_name(device: torch.device) -> str:
    """The target of a device, e.g. cuda:0. Raises UnsupportedError for devices without templates."""
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda" or torch.version.hip is not None:
        raise UnsupportedError(f"there are no kernels for device {device}; allowed: cpu or cuda")
    return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"


active = Store(DEFAULT_DB, RECORDED, COLD_GRAPH)  # what the operators use
_said: set[str] = set()


def _set(store: Store) -> None:
    global active
    active = store


class use:
    """Chooses the database of all operators of this process, in every thread.

    It takes effect at once. As a context manager it restores the previous database at the end. Before that the operators
    use `records.db` of the working directory, if there is one.

    A call of an operator for which the database has no kernel is computed by PyTorch; `served` says which.

    Args:
        db: the database; None: PyTorch computes everything.
        allow: levels that may serve, see `schedsearch.compile`. Nearest and default build kernels in the first call
            of each description, which takes seconds.
        mode: how the records were timed.

    Raises:
        TypeError: an argument is of another type.
        UsageError: an unknown level, or an empty `db` or `allow`.
        DatabaseError: `db` is a folder, or is missing while every allowed level needs one.

    Examples:
        >>> import schedsearch.torch as sst
        >>> sst.use("records.db")
        >>> y = sst.conv2d(x, weight, bias, padding=1, activation="relu")
    """

    def __init__(
        self,
        db: str | os.PathLike[str] | None = DEFAULT_DB,
        *,
        allow: Sequence[str] = RECORDED,
        mode: str = COLD_GRAPH,
    ) -> None:
        if db is not None:
            check_options({"db": db, "allow": allow})
        store = Store(db, allow, mode)
        if store.db is not None and store.db.is_dir():
            raise DatabaseError(f"{store.db} is a folder; give the file of a database, e.g. {store.db / 'records.db'}")
        if store.db is not None and not store.db.exists() and "default" not in store.allow:
            raise DatabaseError(f"there is no database {store.db}; tune first, or allow the level default")
        self.store, self._before = store, active
        _set(store)

    def __enter__(self) -> Store:
        return self.store

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _set(self._before)


def refresh() -> None:
    """Makes the next call of each description look into the database again, for records that are newer than its kernel."""
    active.forget()


def served() -> tuple[Served, ...]:
    """What computes the calls so far, one entry for each description, in the order of their first calls."""
    return tuple(active.served.values())


def found(
    key: Any, what: str, device: torch.device, make: Callable[[Store], tuple[Kernel, Call]], without: Callable[[], Call]
) -> Call:
    """What computes a description of calls from now on: a kernel, else what `without` makes.

    Args:
        key: the description.
        make: finds the kernel and binds it; raises SchedsearchError if there is none.
        without: makes what computes them without this kernel: PyTorch's operator, or other kernels.
    """
    store = active
    if capturing(device):
        say(f"{what}: PyTorch computes it, because a CUDA graph captures its first call; call it once before the capture")
        return without()
    try:
        kernel, call = make(store)
        entry = Served(kernel.workload.label, device_name(device), kernel)
    except (NoRecordError, UnsupportedError, WorkloadError) as error:
        call, entry = without(), Served(what, str(device), None, str(error))
    except (SchedsearchError, ImportError) as error:
        say(f"{what}: PyTorch computes it, because {error}")
        call, entry = without(), Served(what, str(device), None, str(error))
    for held in (store.ready, store.served):
        if len(held) >= _MOST_READY:
            with contextlib.suppress(StopIteration, KeyError, RuntimeError):  # another thread does the same
                held.pop(next(iter(held)))
    store.ready[key], store.served[key] = call, entry
    return call


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph captures the device's current stream."""
    if device.type != "cuda":
        return False
    if device.index in (None, torch.cuda.current_device()):  # to enter a device costs 5 us
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):  # PyTorch asks for the current stream of the current device
        return torch.cuda.is_current_stream_capturing()


def say(text: str) -> None:
    """Warns once for each text."""
    if text not in _said:
        _said.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _forked() -> None:
    """A child has no threads of the pool and no driver: it begins anew."""
    _set(Store(active.db, active.allow, active.mode))


os.register_at_fork(after_in_child=_forked)
