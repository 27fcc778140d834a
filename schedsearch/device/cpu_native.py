"""The native functions of a CPU device, as LLVM IR that is compiled once in a process: chains of steps, and their workers.

`run_chain` takes the address of three words: the pool, entries of `ENTRY_WORDS` words for steps, and their number. It
runs the steps one after the other and returns 0, or the number of the step that raised an exception, counted from 1. A
step for one thread runs in the calling thread, and nobody else learns of it. A step for several threads is published in
the pool's memory. Its work items are cut into chunks, and each thread has a range of chunks. A thread claims the chunks
of its own range one by one, then those that are left in the ranges of others. So a worker that wakes late, or that the
system has stopped, delays a step by no more than the chunk that it has claimed, and who computes a chunk does not change
a result.

See docs/decisions/196-threads-of-a-cpu.md.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

from llvmlite import binding as llvm

MAX_THREADS = 256
CHUNKS_PER_THREAD = 4  # of a step, if it has so many work items
ENTRY_WORDS = 5  # of a step in a chain: code that calls it, its block, its work items, its threads, its chunks

# Polls before a thread goes to sleep, of 10 to 40 ns each: a worker that waits for the next step, and the caller of a launch
# that waits for chunks of others. A worker on the caller's processor sleeps at once, because it would take the time away.
_WORKER_POLLS, _CALLER_POLLS = 1000, 500

# The memory of a pool, in bytes. What different threads write lies on different pairs of cache lines.
_NUMBER, _QUIT = 0, 8  # of the published step, odd while it is written; whether the workers end
_STEP = 128  # call, block, items, chunks, threads of the published step, and the processor of its caller
_DONE, _STATUS = 256, 264  # chunks that are done; all that calls returned
_WAITING, _CALLER_SEMAPHORE = 384, 448  # whether the caller sleeps
_MAILBOXES, _MAILBOX_BYTES = 512, 128  # of thread t
_ASLEEP, _TICKET = 40, 64  # in a mailbox, after its semaphore: see `doze`; number << 16 | next chunk of the thread's range
POOL_BYTES = _MAILBOXES + _MAILBOX_BYTES * MAX_THREADS

# Only the caller of `run_chain` writes the step, between an odd and an even number, while no chunk is open. A worker
# reads it, and begins anew if the number has changed meanwhile. It claims a chunk by comparing and swapping a ticket with
# that number in it, which fails once another step is there. While a chunk is claimed and not done, the caller waits. So
# nobody is in a step's code when `run_chain` returns. A worker that is about to sleep says so first, then looks once
# more; whoever takes the word back (from 1 to 0) owes the post of the semaphore. Workers wake one another, as a tree: 0
# wakes 1 and 2, 1 wakes 3 and 4, and so on.
_IR = """
declare i32 @sem_init(ptr, i32, i32)
declare i32 @sem_wait(ptr)
declare i32 @sem_post(ptr)
declare i32 @sched_getcpu()

define void @pool_init(ptr %pool) {{
  %semaphore = getelementptr i8, ptr %pool, i64 {caller_semaphore}
  %status = call i32 @sem_init(ptr %semaphore, i32 0, i32 0)
  ret void
}}

define void @mailbox_init(ptr %pool, i64 %thread) {{
  %box = call ptr @mailbox(ptr %pool, i64 %thread)
  %status = call i32 @sem_init(ptr %box, i32 0, i32 0)
  ret void
}}

define internal ptr @mailbox(ptr %pool, i64 %thread) alwaysinline {{
  %bytes = mul i64 %thread, {mailbox_bytes}
  %offset = add i64 %bytes, {mailboxes}
  %box = getelementptr i8, ptr %pool, i64 %offset
  ret ptr %box
}}

define internal i64 @first(i64 %amount, i64 %number, i64 %parts) alwaysinline {{
  %product = mul i64 %amount, %number
  %quotient = udiv i64 %product, %parts
  ret i64 %quotient
}}

define internal void @sleep(ptr %semaphore) {{
entry:
  br label %again
again:
  %status = call i32 @sem_wait(ptr %semaphore)
  %interrupted = icmp ne i32 %status, 0
  br i1 %interrupted, label %again, label %out
out:
  ret void
}}

define internal void @post_if(ptr %flag, ptr %semaphore) {{
entry:
  %set = load atomic i64, ptr %flag seq_cst, align 8
  %is_set = icmp eq i64 %set, 1
  br i1 %is_set, label %take, label %out
take:
  %swap = cmpxchg ptr %flag, i64 1, i64 0 seq_cst seq_cst
  %taken = extractvalue {{ i64, i1 }} %swap, 1
  br i1 %taken, label %post, label %out
post:
  %status = call i32 @sem_post(ptr %semaphore)
  br label %out
out:
  ret void
}}

define internal void @wake(ptr %pool, i64 %thread, i64 %threads) {{
entry:
  %is_one = icmp ult i64 %thread, %threads
  br i1 %is_one, label %look, label %out
look:
  %box = call ptr @mailbox(ptr %pool, i64 %thread)
  %asleep = getelementptr i8, ptr %box, i64 {asleep}
  call void @post_if(ptr %asleep, ptr %box)
  br label %out
out:
  ret void
}}

define internal void @wake_next(ptr %pool, i64 %thread, i64 %threads) {{
  %twice = shl i64 %thread, 1
  %left = add i64 %twice, 1
  %right = add i64 %twice, 2
  call void @wake(ptr %pool, i64 %left, i64 %threads)
  call void @wake(ptr %pool, i64 %right, i64 %threads)
  ret void
}}

define internal void @take_part(
    ptr %pool, i64 %thread, i64 %number, ptr %call, ptr %block, i64 %items, i64 %chunks, i64 %threads) {{
entry:
  %done = getelementptr i8, ptr %pool, i64 {done}
  br label %ranges
ranges:
  %passed = phi i64 [ 0, %entry ], [ %passed_one, %range_done ]
  %all = icmp uge i64 %passed, %threads
  br i1 %all, label %out, label %range
range:
  %place = add i64 %thread, %passed
  %beyond = icmp uge i64 %place, %threads
  %wrapped = sub i64 %place, %threads
  %owner = select i1 %beyond, i64 %wrapped, i64 %place
  %owner_next = add i64 %owner, 1
  %limit = call i64 @first(i64 %chunks, i64 %owner_next, i64 %threads)
  %box = call ptr @mailbox(ptr %pool, i64 %owner)
  %ticket = getelementptr i8, ptr %box, i64 {ticket}
  br label %claim
claim:
  %seen = load atomic i64, ptr %ticket acquire, align 8
  %its_number = lshr i64 %seen, 16
  %is_current = icmp eq i64 %its_number, %number
  br i1 %is_current, label %current, label %out
current:
  %chunk = and i64 %seen, 65535
  %is_left = icmp ult i64 %chunk, %limit
  br i1 %is_left, label %swap, label %range_done
swap:
  %following = add i64 %seen, 1
  %swapped = cmpxchg ptr %ticket, i64 %seen, i64 %following acq_rel acquire
  %claimed = extractvalue {{ i64, i1 }} %swapped, 1
  br i1 %claimed, label %compute, label %claim
compute:
  %chunk_next = add i64 %chunk, 1
  %start = call i64 @first(i64 %items, i64 %chunk, i64 %chunks)
  %stop = call i64 @first(i64 %items, i64 %chunk_next, i64 %chunks)
  %status = call i32 %call(ptr %block, i64 %start, i64 %stop)
  %failed = icmp ne i32 %status, 0
  br i1 %failed, label %note, label %count
note:
  %all_statuses = getelementptr i8, ptr %pool, i64 {status}
  store atomic i64 1, ptr %all_statuses monotonic, align 8
  br label %count
count:
  %before = atomicrmw add ptr %done, i64 1 seq_cst
  %now = add i64 %before, 1
  %is_last = icmp eq i64 %now, %chunks
  br i1 %is_last, label %tell, label %claim
tell:
  %waiting = getelementptr i8, ptr %pool, i64 {waiting}
  %semaphore = getelementptr i8, ptr %pool, i64 {caller_semaphore}
  call void @post_if(ptr %waiting, ptr %semaphore)
  br label %out
range_done:
  %passed_one = add i64 %passed, 1
  br label %ranges
out:
  ret void
}}

define void @worker(ptr %pool, i64 %thread) {{
entry:
  %box = call ptr @mailbox(ptr %pool, i64 %thread)
  %asleep = getelementptr i8, ptr %box, i64 {asleep}
  %at_number = getelementptr i8, ptr %pool, i64 {number}
  %at_quit = getelementptr i8, ptr %pool, i64 {quit}
  %at_call = getelementptr i8, ptr %pool, i64 {step}
  %at_block = getelementptr i64, ptr %at_call, i64 1
  %at_items = getelementptr i64, ptr %at_call, i64 2
  %at_chunks = getelementptr i64, ptr %at_call, i64 3
  %at_threads = getelementptr i64, ptr %at_call, i64 4
  %at_processor = getelementptr i64, ptr %at_call, i64 5
  br label %poll
poll:
  %seen = phi i64 [ 0, %entry ], [ %seen, %relax ], [ %seen, %undo ], [ %seen, %sleep ], [ %seen, %look ],
                  [ %number, %unwanted ], [ %number, %work ]
  %polls = phi i64 [ 0, %entry ], [ %more, %relax ], [ 0, %undo ], [ 0, %sleep ], [ %polls, %look ],
                   [ %polls, %unwanted ], [ %polls_after, %work ]
  %number = load atomic i64, ptr %at_number acquire, align 8
  %is_new = icmp ne i64 %number, %seen
  %is_odd = trunc i64 %number to i1
  %is_even = xor i1 %is_odd, true
  %is_there = and i1 %is_new, %is_even
  br i1 %is_there, label %look, label %idle
idle:
  %quit = load atomic i64, ptr %at_quit monotonic, align 8
  %ends = icmp ne i64 %quit, 0
  br i1 %ends, label %exit, label %still
still:
  %more = add i64 %polls, 1
  %tired = icmp ugt i64 %more, {worker_polls}
  br i1 %tired, label %doze, label %relax
relax:
  call void asm sideeffect "{relax}", ""()
  br label %poll
doze:
  store atomic i64 1, ptr %asleep seq_cst, align 8
  %number_now = load atomic i64, ptr %at_number seq_cst, align 8
  %quit_now = load atomic i64, ptr %at_quit seq_cst, align 8
  %changed = icmp ne i64 %number_now, %seen
  %ending = icmp ne i64 %quit_now, 0
  %stays = or i1 %changed, %ending
  br i1 %stays, label %undo, label %sleep
undo:
  %swap = cmpxchg ptr %asleep, i64 1, i64 0 seq_cst seq_cst
  %undone = extractvalue {{ i64, i1 }} %swap, 1
  br i1 %undone, label %poll, label %sleep
sleep:
  call void @sleep(ptr %box)
  br label %poll
look:
  %call = load atomic ptr, ptr %at_call monotonic, align 8
  %block = load atomic ptr, ptr %at_block monotonic, align 8
  %items = load atomic i64, ptr %at_items monotonic, align 8
  %chunks = load atomic i64, ptr %at_chunks monotonic, align 8
  %threads = load atomic i64, ptr %at_threads monotonic, align 8
  fence acquire
  %number_after = load atomic i64, ptr %at_number monotonic, align 8
  %is_whole = icmp eq i64 %number_after, %number
  br i1 %is_whole, label %whole, label %poll
whole:
  %is_wanted = icmp ult i64 %thread, %threads
  br i1 %is_wanted, label %work, label %unwanted
unwanted:
  br label %poll
work:
  call void @wake_next(ptr %pool, i64 %thread, i64 %threads)
  call void @take_part(ptr %pool, i64 %thread, i64 %number, ptr %call, ptr %block, i64 %items, i64 %chunks, i64 %threads)
  %callers = load atomic i32, ptr %at_processor monotonic, align 8
  %own = call i32 @sched_getcpu()
  %is_shared = icmp eq i32 %own, %callers
  %polls_after = select i1 %is_shared, i64 {worker_polls}, i64 0
  br label %poll
exit:
  ret void
}}

define internal i64 @run_shared(ptr %pool, ptr %call, ptr %block, i64 %items, i64 %threads, i64 %chunks) {{
entry:
  %at_number = getelementptr i8, ptr %pool, i64 {number}
  %before = load atomic i64, ptr %at_number monotonic, align 8
  %odd = add i64 %before, 1
  %number = add i64 %before, 2
  store atomic i64 %odd, ptr %at_number seq_cst, align 8
  fence release
  %at_call = getelementptr i8, ptr %pool, i64 {step}
  %at_block = getelementptr i64, ptr %at_call, i64 1
  %at_items = getelementptr i64, ptr %at_call, i64 2
  %at_chunks = getelementptr i64, ptr %at_call, i64 3
  %at_threads = getelementptr i64, ptr %at_call, i64 4
  store atomic ptr %call, ptr %at_call monotonic, align 8
  store atomic ptr %block, ptr %at_block monotonic, align 8
  store atomic i64 %items, ptr %at_items monotonic, align 8
  store atomic i64 %chunks, ptr %at_chunks monotonic, align 8
  store atomic i64 %threads, ptr %at_threads monotonic, align 8
  %at_processor = getelementptr i64, ptr %at_call, i64 5
  %processor = call i32 @sched_getcpu()
  store atomic i32 %processor, ptr %at_processor monotonic, align 8
  %done = getelementptr i8, ptr %pool, i64 {done}
  %status = getelementptr i8, ptr %pool, i64 {status}
  store atomic i64 0, ptr %done monotonic, align 8
  store atomic i64 0, ptr %status monotonic, align 8
  %shifted = shl i64 %number, 16
  br label %tickets
tickets:
  %owner = phi i64 [ 0, %entry ], [ %owner_next, %fill ]
  %filled = icmp uge i64 %owner, %threads
  br i1 %filled, label %publish, label %fill
fill:
  %box = call ptr @mailbox(ptr %pool, i64 %owner)
  %ticket = getelementptr i8, ptr %box, i64 {ticket}
  %first_chunk = call i64 @first(i64 %chunks, i64 %owner, i64 %threads)
  %word = or i64 %shifted, %first_chunk
  store atomic i64 %word, ptr %ticket monotonic, align 8
  %owner_next = add i64 %owner, 1
  br label %tickets
publish:
  store atomic i64 %number, ptr %at_number seq_cst, align 8
  call void @wake_next(ptr %pool, i64 0, i64 %threads)
  call void @take_part(ptr %pool, i64 0, i64 %number, ptr %call, ptr %block, i64 %items, i64 %chunks, i64 %threads)
  br label %check
check:
  %polls = phi i64 [ 0, %publish ], [ %more, %relax ]
  %found = load atomic i64, ptr %done acquire, align 8
  %complete = icmp eq i64 %found, %chunks
  br i1 %complete, label %out, label %poll
poll:
  %more = add i64 %polls, 1
  %tired = icmp ugt i64 %more, {caller_polls}
  br i1 %tired, label %doze, label %relax
relax:
  call void asm sideeffect "{relax}", ""()
  br label %check
doze:
  %waiting = getelementptr i8, ptr %pool, i64 {waiting}
  %semaphore = getelementptr i8, ptr %pool, i64 {caller_semaphore}
  store atomic i64 1, ptr %waiting seq_cst, align 8
  %found_now = load atomic i64, ptr %done seq_cst, align 8
  %complete_now = icmp eq i64 %found_now, %chunks
  br i1 %complete_now, label %undo, label %sleep
undo:
  %swap = cmpxchg ptr %waiting, i64 1, i64 0 seq_cst seq_cst
  %undone = extractvalue {{ i64, i1 }} %swap, 1
  br i1 %undone, label %out, label %sleep
sleep:
  call void @sleep(ptr %semaphore)
  br label %out
out:
  %result = load atomic i64, ptr %status acquire, align 8
  ret i64 %result
}}

define i64 @run_chain(ptr %chain) {{
entry:
  %pool = load ptr, ptr %chain
  %at_entries = getelementptr i64, ptr %chain, i64 1
  %at_count = getelementptr i64, ptr %chain, i64 2
  %entries = load ptr, ptr %at_entries
  %count = load i64, ptr %at_count
  br label %next
next:
  %number = phi i64 [ 0, %entry ], [ %number_next, %went ]
  %number_next = add i64 %number, 1
  %ended = icmp uge i64 %number, %count
  br i1 %ended, label %complete, label %step
step:
  %offset = mul i64 %number, {entry_words}
  %at_call = getelementptr i64, ptr %entries, i64 %offset
  %at_block = getelementptr i64, ptr %at_call, i64 1
  %at_items = getelementptr i64, ptr %at_call, i64 2
  %at_threads = getelementptr i64, ptr %at_call, i64 3
  %at_chunks = getelementptr i64, ptr %at_call, i64 4
  %call = load ptr, ptr %at_call
  %block = load ptr, ptr %at_block
  %items = load i64, ptr %at_items
  %threads = load i64, ptr %at_threads
  %chunks = load i64, ptr %at_chunks
  %is_alone = icmp ule i64 %threads, 1
  br i1 %is_alone, label %alone, label %shared
alone:
  %its_status = call i32 %call(ptr %block, i64 0, i64 %items)
  %wide = zext i32 %its_status to i64
  br label %went
shared:
  %joint = call i64 @run_shared(ptr %pool, ptr %call, ptr %block, i64 %items, i64 %threads, i64 %chunks)
  br label %went
went:
  %status = phi i64 [ %wide, %alone ], [ %joint, %shared ]
  %failed = icmp ne i64 %status, 0
  br i1 %failed, label %raised, label %next
raised:
  ret i64 %number_next
complete:
  ret i64 0
}}

define void @quit(ptr %pool, i64 %threads) {{
entry:
  %at_quit = getelementptr i8, ptr %pool, i64 {quit}
  store atomic i64 1, ptr %at_quit seq_cst, align 8
  br label %next
next:
  %thread = phi i64 [ 1, %entry ], [ %thread_next, %post ]
  %more = icmp ult i64 %thread, %threads
  br i1 %more, label %post, label %out
post:
  call void @wake(ptr %pool, i64 %thread, i64 %threads)
  %thread_next = add i64 %thread, 1
  br label %next
out:
  ret void
}}
"""


class Native:
    """The functions of `_IR`, callable. A foreign call gives up the interpreter lock."""

    def __init__(self) -> None:
        module = llvm.parse_assembly(
            _IR.format(
                relax={"x86_64": "pause", "aarch64": "yield"}.get(os.uname().machine, ""),
                worker_polls=_WORKER_POLLS, caller_polls=_CALLER_POLLS, entry_words=ENTRY_WORDS,
                number=_NUMBER, quit=_QUIT, step=_STEP, done=_DONE, status=_STATUS, waiting=_WAITING,
                caller_semaphore=_CALLER_SEMAPHORE, mailboxes=_MAILBOXES, mailbox_bytes=_MAILBOX_BYTES,
                asleep=_ASLEEP, ticket=_TICKET,
            )
        )  # fmt: skip
        self._engine = llvm.create_mcjit_compiler(module, target_machine())
        self._engine.finalize_object()
        word = ctypes.c_uint64
        self.pool_init = self._function("pool_init", None, word)
        self.mailbox_init = self._function("mailbox_init", None, word, word)
        self.worker = self._function("worker", None, word, word)
        self.run_chain = self._function("run_chain", word, word)
        self.quit = self._function("quit", None, word, word)

    def _function(self, name: str, result: Any, *types: Any) -> Any:
        return ctypes.CFUNCTYPE(result, *types)(self._engine.get_function_address(name))


@functools.cache
def native() -> Native:
    return Native()


def target_machine() -> llvm.TargetMachine:
    """LLVM's target machine for code that is linked into this process. It does not optimise: what this process compiles does
    nothing but calls and waits, and optimising it would take most of the time of linking."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    return llvm.Target.from_default_triple().create_target_machine(opt=0, reloc="static", codemodel="large")
