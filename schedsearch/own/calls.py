"""Calls of a user's kernel: each signature is resolved once, and a repeated call only compares and launches."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from schedsearch.device import BoundKernel
from schedsearch.errors import ArgumentError
from schedsearch.own.arguments import Given, addresses, check_overlaps, device_of, format_of, scalar_values
from schedsearch.runtime.caches import KernelCaches
from schedsearch.runtime.kernel import Kernel, Step
from schedsearch.runtime.repeated import announce_tensor, is_number, recogniser, same_number
from schedsearch.runtime.streams import current_stream, raw_stream
from schedsearch.workload import Workload


class Launches:
    """The kernels of one database, by device, and the last call of each signature.

    Args:
        read: turns the arguments of a call into `Given`s.
        workload: the workload of some `Given`s.
        allow: the levels of deployment that may serve; see `schedsearch.compile`.
        notice: is told each kernel that was found for a call.
    """

    def __init__(
        self,
        db: str | os.PathLike[str],
        read: Callable[[tuple[Any, ...]], list[Given]],
        workload: Callable[[Sequence[Given]], Workload],
        allow: Sequence[str],
        notice: Callable[[Kernel], None] = lambda kernel: None,
    ) -> None:
        self._notice = notice
        self._read, self._workload = read, workload
        self._caches = KernelCaches(db, allow)
        self._lock = threading.Lock()
        self._ready: dict[tuple[Any, ...], _Ready] = {}
        self._recent: _Ready | None = None

    def call(self, args: tuple[Any, ...], stream: Any) -> None:
        with self._lock:
            recent = self._recent
            if recent is None or not recent.takes(args):
                recent = self._find(args)
            recent.launch(args, stream)

    def bind(self, args: tuple[object, ...]) -> Step:
        with self._lock:
            given = self._read(args)
            kernel = self._kernel(given)
            bound = kernel.bind_addresses(addresses(given), scalar_values(given))
            written = [(name, args[place]) for name, place in _tensors_written(given)]
            return Step(kernel, bound, _library(given), (), args, written)

    def kernel(self, given: Sequence[Given]) -> Kernel:
        """The kernel that serves a call with such arguments."""
        with self._lock:
            return self._kernel(given)

    def forget(self) -> None:
        """Looks everything up again: the database has new records."""
        with self._lock:
            self._ready.clear()
            self._recent = None

    def close(self) -> None:
        """Unloads all kernels."""
        self.forget()
        self._caches.close()

    def _find(self, args: tuple[object, ...]) -> _Ready:
        given = self._read(args)
        key = tuple((each.argument, each.view.device, each.view.library) if each.view else each.argument for each in given)
        ready = self._ready.get(key)
        if ready is None:
            kernel = self._kernel(given)
            bound = kernel.bind_addresses(addresses(given), scalar_values(given))
            ready = self._ready[key] = _Ready(bound, _library(given), kernel.device)
        else:
            check_overlaps(given)
        ready.rebind(args, given)
        self._recent = ready
        return ready

    def _kernel(self, given: Sequence[Given]) -> Kernel:
        check_overlaps(given)
        kind, ordinal = device_of(given)
        cache = self._caches.on("cpu" if kind == "cpu" else f"cuda:{ordinal}")
        kernel = cache.kernel(self._workload(given))
        self._notice(kernel)
        return kernel


class _Ready:
    """A bound kernel for one signature, and what the arguments of the last call were like."""

    def __init__(self, bound: BoundKernel, library: str, device: tuple[str, int]) -> None:
        self._bound, self._library, self._device = bound, library, device
        self._current = current_stream(library, device)
        self._last: list[_Last] = []
        self._tensors: list[tuple[str, int]] = []  # that the kernel writes: names and places among the arguments

    def rebind(self, args: tuple[object, ...], given: Sequence[Given]) -> None:
        """Binds the arrays and numbers of a call that was checked."""
        self._last = [_Last(value, each) for value, each in zip(args, given)]
        self._tensors = _tensors_written(given)
        for name, address in addresses(given).items():
            self._bound.set_pointer(name, address)
        for name, number in scalar_values(given).items():
            self._bound.set_scalar(name, number)

    def takes(self, args: tuple[object, ...]) -> bool:
        """Whether the arguments are like those of the last call, at the same addresses. Other numbers are bound then."""
        if len(args) != len(self._last):
            return False
        changed: list[tuple[_Last, Any]] = []
        for value, last in zip(args, self._last):
            if last.is_like is not None:
                if not last.is_like(value):
                    return False
            elif not last.is_number or type(value) is not last.kind:
                return False
            elif not same_number(value, last.value):
                if not last.takes(value):
                    return False
                changed.append((last, value))
        for last, value in changed:
            self._bound.set_scalar(last.name, value)
            last.value = value
        return True

    def launch(self, args: tuple[Any, ...], stream: Any) -> None:
        for name, place in self._tensors:
            announce_tensor(name, args[place])
        self._bound.launch(self._current() if stream is None else raw_stream(stream, self._library, self._device))


class _Last:
    """One argument of the last call. Only an array with facts, or a number, has a short way."""

    __slots__ = ("is_like", "is_number", "kind", "name", "scalar", "value")

    def __init__(self, value: object, given: Given) -> None:
        self.kind, self.name = type(value), given.argument.name
        self.is_like = None if given.view is None else recogniser(value)
        self.is_number = given.view is None and is_number(value)
        self.scalar = given.argument.dtype if given.argument.role == "scalar" else ""
        self.value: Any = value if self.is_number else None

    def takes(self, value: Any) -> bool:
        """Whether another number of the same class only has to be bound. The format of an integer depends on its size."""
        return self.scalar != "" and (self.kind is not int or format_of(value) == self.scalar)


def _tensors_written(given: Sequence[Given]) -> list[tuple[str, int]]:
    return [
        (each.argument.name, place)
        for place, each in enumerate(given)
        if each.argument.role in ("out", "inout") and each.view is not None and each.view.library == "torch"
    ]


def _library(given: Sequence[Given]) -> str:
    for each in given:
        if each.view is not None:
            return each.view.library
    raise ArgumentError("no arrays given")
