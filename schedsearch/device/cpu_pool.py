"""Worker threads of a CPU device. They wait in native code, so that a launch costs one foreign call and no interpreter lock.

The functions that they run are those of `cpu_native`.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref

from schedsearch.device.cpu_native import MAX_THREADS, POOL_BYTES, Native, native
from schedsearch.errors import DeviceError

_ALIGNMENT = 128


class Pool:
    """Worker threads that wait in native code. A process that is forked gets workers of its own, in every pool.

    Attributes:
        run_chain: see `cpu_native`.
        address: of the memory in which the threads meet.
        lock: to be held during a launch. A fork waits for it.
    """

    def __init__(self) -> None:
        self._native = native()
        self.run_chain = self._native.run_chain
        # The memory holds one step at a time. A signal's handler may fork when this thread has the lock.
        self.lock = threading.RLock()
        self._memory = ctypes.create_string_buffer(POOL_BYTES + _ALIGNMENT)
        base = ctypes.addressof(self._memory)
        self.address = base + -base % _ALIGNMENT
        self._native.pool_init(self.address)
        self._workers: list[threading.Thread] = []
        with _pools_lock:
            _pools.add(self)

    def grow(self, threads: int) -> None:
        """Makes sure that launches of this many threads, including the caller's, can be dispatched."""
        if not 1 <= threads <= MAX_THREADS:
            raise DeviceError(f"a step wants {threads} threads; allowed: 1 to {MAX_THREADS}")
        with self.lock:
            while len(self._workers) < threads - 1:
                number = len(self._workers) + 1
                self._native.mailbox_init(self.address, number)
                # The thread's frame holds the memory, so that it lives as long as a thread waits there.
                arguments = (self._native, self.address, number, self._memory)
                worker = threading.Thread(target=_work, args=arguments, daemon=True)
                worker.start()
                self._workers.append(worker)

    def close(self) -> None:
        """Ends the workers and waits for them."""
        workers, self._workers = self._workers, []
        if workers:
            self._native.quit(self.address, len(workers) + 1)
        for worker in workers:
            worker.join()

    def _renew(self) -> None:
        """In a forked process, which has no thread but the one that forked."""
        threads = len(self._workers) + 1
        self._workers = []
        ctypes.memset(self.address, 0, POOL_BYTES)  # whatever was under way when the wait for it was interrupted
        self._native.pool_init(self.address)
        self.grow(threads)


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_pools_lock = threading.RLock()  # of the set, for a moment only
_held: dict[int, list[list[Pool]]] = {}  # thread -> the pools that it locked for each fork that it has begun


def _before_fork() -> None:
    """Waits for launches of other threads, because a copy of a launch that has begun could not go on. An exception, e.g. of
    Ctrl-C, ends the wait but not the fork: Python prints it."""
    held: list[Pool] = []
    _held.setdefault(threading.get_ident(), []).append(held)
    with _pools_lock:
        pools = sorted(_pools, key=id)  # one order, so that two threads that fork do not wait for each other
    for pool in pools:
        pool.lock.acquire()
        held.append(pool)


def _after_fork_in_parent() -> list[Pool]:
    held = _held[threading.get_ident()].pop()
    for pool in held:
        pool.lock.release()
    return held


def _after_fork_in_child() -> None:
    """No other thread is there any more, whatever it held."""
    global _pools_lock
    _pools_lock = threading.RLock()
    held = _after_fork_in_parent()
    for thread in set(_held) - {threading.get_ident()}:
        del _held[thread]
    for pool in list(_pools):
        if pool not in held:  # the wait for it was interrupted
            pool.lock._at_fork_reinit()  # type: ignore[attr-defined]
        pool._renew()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def _work(functions: Native, pool: int, number: int, keep_alive: object) -> None:
    functions.worker(pool, number)
