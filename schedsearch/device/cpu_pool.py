"""Worker threads of a CPU device. They wait in native code, so that a launch costs one foreign call and no interpreter lock.

The code is LLVM IR, compiled when the first pool needs it. A launch runs a function of (block, thread, counter, base): the
address of the argument block, the thread's number, the address of the counter of `barrier`, and its count so far.

See docs/decisions/003-cpu-artifacts.md.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from typing import Any

from llvmlite import binding as llvm

from schedsearch.errors import DeviceError

MAX_THREADS = 256
_MAILBOX_BYTES = 128  # sem_t (32 bytes), run, arguments, thread, counter, base, done; two cache lines
_WORKER_SPINS = 20_000  # polls before a worker goes to sleep: some 100 us, longer than the gap between launches of a chain

# A worker waits for a post of its mailbox's semaphore, runs its share, reports that it is done, and waits again; a null
# function ends it. `dispatch` fills the mailboxes of threads 1..threads-1, runs share 0 itself, and waits until all are
# done. Only then has every thread left the artifact's code, which may then be freed. `barrier` waits until the counter,
# which only grows, has reached its goal.
_POOL_IR = """
declare i32 @sem_init(ptr, i32, i32)
declare i32 @sem_wait(ptr)
declare i32 @sem_trywait(ptr)
declare i32 @sem_post(ptr)
declare i32 @sched_yield()

define void @mailbox_init(ptr %mailbox) {{
  %status = call i32 @sem_init(ptr %mailbox, i32 0, i32 0)
  ret void
}}

define void @worker(ptr %mailbox) {{
entry:
  %at_run = getelementptr i64, ptr %mailbox, i64 4
  %at_arguments = getelementptr i64, ptr %mailbox, i64 5
  %at_thread = getelementptr i64, ptr %mailbox, i64 6
  %at_counter = getelementptr i64, ptr %mailbox, i64 7
  %at_base = getelementptr i64, ptr %mailbox, i64 8
  br label %poll
poll:
  %spins = phi i64 [ 0, %entry ], [ 0, %work ], [ %more, %spin ]
  %polled = call i32 @sem_trywait(ptr %mailbox)
  %posted = icmp eq i32 %polled, 0
  br i1 %posted, label %wake, label %spin
spin:
  call void asm sideeffect "{relax}", ""()
  %more = add i64 %spins, 1
  %tired = icmp ugt i64 %more, {worker_spins}
  br i1 %tired, label %sleep, label %poll
sleep:
  %slept = call i32 @sem_wait(ptr %mailbox)
  %interrupted = icmp ne i32 %slept, 0
  br i1 %interrupted, label %sleep, label %wake
wake:
  %run = load ptr, ptr %at_run
  %end = icmp eq ptr %run, null
  br i1 %end, label %exit, label %work
work:
  %arguments = load ptr, ptr %at_arguments
  %thread = load i64, ptr %at_thread
  %counter = load ptr, ptr %at_counter
  %base = load i64, ptr %at_base
  call void %run(ptr %arguments, i64 %thread, ptr %counter, i64 %base)
  %at_done = getelementptr i64, ptr %mailbox, i64 9
  store atomic i64 1, ptr %at_done release, align 8
  br label %poll
exit:
  ret void
}}

define void @dispatch(ptr %mailboxes, i64 %threads, ptr %run, ptr %arguments, ptr %counter, i64 %base) {{
entry:
  br label %check
check:
  %thread = phi i64 [ 1, %entry ], [ %next, %post ]
  %more = icmp ult i64 %thread, %threads
  br i1 %more, label %post, label %own
post:
  %offset = mul i64 %thread, {mailbox_bytes}
  %mailbox = getelementptr i8, ptr %mailboxes, i64 %offset
  %at_run = getelementptr i64, ptr %mailbox, i64 4
  %at_arguments = getelementptr i64, ptr %mailbox, i64 5
  %at_thread = getelementptr i64, ptr %mailbox, i64 6
  %at_counter = getelementptr i64, ptr %mailbox, i64 7
  %at_base = getelementptr i64, ptr %mailbox, i64 8
  store ptr %run, ptr %at_run
  store ptr %arguments, ptr %at_arguments
  store i64 %thread, ptr %at_thread
  store ptr %counter, ptr %at_counter
  store i64 %base, ptr %at_base
  %at_done = getelementptr i64, ptr %mailbox, i64 9
  store atomic i64 0, ptr %at_done monotonic, align 8
  %posted = call i32 @sem_post(ptr %mailbox)
  %next = add i64 %thread, 1
  br label %check
own:
  call void %run(ptr %arguments, i64 0, ptr %counter, i64 %base)
  br label %collect
collect:
  %other = phi i64 [ 1, %own ], [ %following, %collected ]
  %left = icmp ult i64 %other, %threads
  br i1 %left, label %await, label %exit
await:
  %other_offset = mul i64 %other, {mailbox_bytes}
  %other_mailbox = getelementptr i8, ptr %mailboxes, i64 %other_offset
  %its_done = getelementptr i64, ptr %other_mailbox, i64 9
  call void @wait_for(ptr %its_done, i64 1)
  br label %collected
collected:
  %following = add i64 %other, 1
  br label %collect
exit:
  ret void
}}

define void @quit(ptr %mailboxes, i64 %threads) {{
entry:
  br label %check
check:
  %thread = phi i64 [ 1, %entry ], [ %next, %post ]
  %more = icmp ult i64 %thread, %threads
  br i1 %more, label %post, label %exit
post:
  %offset = mul i64 %thread, {mailbox_bytes}
  %mailbox = getelementptr i8, ptr %mailboxes, i64 %offset
  %at_run = getelementptr i64, ptr %mailbox, i64 4
  store ptr null, ptr %at_run
  %posted = call i32 @sem_post(ptr %mailbox)
  %next = add i64 %thread, 1
  br label %check
exit:
  ret void
}}

define void @barrier(ptr %counter, i64 %goal) {{
  %before = atomicrmw add ptr %counter, i64 1 acq_rel
  call void @wait_for(ptr %counter, i64 %goal)
  ret void
}}

define internal void @wait_for(ptr %counter, i64 %goal) {{
entry:
  br label %check
check:
  %spins = phi i64 [ 0, %entry ], [ %more, %wait ], [ 0, %yield ]
  %reached = load atomic i64, ptr %counter acquire, align 8
  %all = icmp sge i64 %reached, %goal
  br i1 %all, label %out, label %wait
wait:
  call void asm sideeffect "{relax}", ""()
  %more = add i64 %spins, 1
  %long = icmp ugt i64 %more, 2000
  br i1 %long, label %yield, label %check
yield:
  %yielded = call i32 @sched_yield()
  br label %check
out:
  ret void
}}
"""


class Pool:
    """Worker threads that wait in native code. A process that is forked gets workers of its own, in every pool.

    Attributes:
        dispatch: takes `mailboxes`, the number of threads, the function's address, and its block, counter and base. It runs
            the function on all threads, including the caller's, and returns when all are done.
        mailboxes: an address.
        lock: to be held while a launch is dispatched and accounted for. A fork waits for it.
    """

    def __init__(self) -> None:
        native = _native()
        self.dispatch = native.dispatch
        # The mailboxes hold one launch at a time. A signal's handler may fork when this thread has the lock.
        self.lock = threading.RLock()
        self._native = native
        self._mailboxes = ctypes.create_string_buffer(_MAILBOX_BYTES * (MAX_THREADS + 1))
        base = ctypes.addressof(self._mailboxes)
        self.mailboxes = base + -base % _MAILBOX_BYTES
        self._workers: list[threading.Thread] = []
        with _pools_lock:
            _pools.add(self)

    def grow(self, threads: int) -> None:
        """Makes sure that launches of this many threads, including the caller's, can be dispatched."""
        if not 1 <= threads <= MAX_THREADS:
            raise DeviceError(f"a step wants {threads} threads; allowed: 1 to {MAX_THREADS}")
        while len(self._workers) < threads - 1:
            mailbox = self.mailboxes + _MAILBOX_BYTES * (len(self._workers) + 1)
            self._native.mailbox_init(mailbox)
            # The thread's frame holds the mailboxes, so that they live as long as a thread waits on them.
            worker = threading.Thread(target=_work, args=(self._native, mailbox, self._mailboxes), daemon=True)
            worker.start()
            self._workers.append(worker)

    def close(self) -> None:
        """Ends the workers and waits for them."""
        workers, self._workers = self._workers, []
        if workers:
            self._native.quit(self.mailboxes, len(workers) + 1)
        for worker in workers:
            worker.join()

    def _renew(self) -> None:
        """In a forked process, which has no thread but the one that forked."""
        threads = len(self._workers) + 1
        self._workers = []
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


def _work(native: _Native, mailbox: int, keep_alive: object) -> None:
    native.worker(mailbox)


class _Native:
    """The functions of `_POOL_IR`, callable. A foreign call gives up the interpreter lock."""

    def __init__(self) -> None:
        relax = {"x86_64": "pause", "aarch64": "yield"}.get(os.uname().machine, "")
        module = llvm.parse_assembly(_POOL_IR.format(relax=relax, worker_spins=_WORKER_SPINS, mailbox_bytes=_MAILBOX_BYTES))
        self._engine = llvm.create_mcjit_compiler(module, target_machine())
        self._engine.finalize_object()
        word = ctypes.c_uint64
        self.mailbox_init = self._function("mailbox_init", word)
        self.worker = self._function("worker", word)
        self.dispatch = self._function("dispatch", word, word, word, word, word, word)
        self.quit = self._function("quit", word, word)
        self.barrier_address = self._engine.get_function_address("barrier")

    def _function(self, name: str, *types: Any) -> Any:
        return ctypes.CFUNCTYPE(None, *types)(self._engine.get_function_address(name))


@functools.cache
def _native() -> _Native:
    return _Native()


def barrier_address() -> int:
    """The address of the function `barrier(counter, goal)`, at which the threads of one launch wait for each other."""
    return int(_native().barrier_address)


def target_machine() -> llvm.TargetMachine:
    """LLVM's target machine for code that is linked into this process. It does not optimise: what this process compiles does
    nothing but calls and waits, and optimising it would take most of the time of linking."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    return llvm.Target.from_default_triple().create_target_machine(opt=0, reloc="static", codemodel="large")
