"""Which calls of a network run side by side on a GPU: those that do not need one another, and whose kernels fit together.

The calls of a program have an order in which they can run one after another. A call must wait for an earlier one if one of
the two writes what the other one reads or writes (`Access`), or if their kernels do not fit on the device side by side: they
would only take multiprocessors away from one another. So a network of large kernels stays a chain, in which each kernel
begins while the one before it ends, and small kernels of parallel branches run at the same time.

The same function serves when memory is planned, where arrays that may be used at the same time get bytes of their own, and
when a program is loaded, where it sees nothing but bytes. Whatever the memory plan was, a loaded program is right.

See docs/decisions/325-branches-run-side-by-side.md.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from schedsearch.executable.program import Program
from schedsearch.launch import LaunchPlan

FILLED = 4.0
"""Blocks of two kernels that run side by side, for each multiprocessor, at most. Inception-v3 takes 303 us on an H200 with
1, 257 with 2, 246 with 4, and 315 as a chain: blocks of small layers leave much of a multiprocessor idle."""
CALLERS = "the caller's arrays"  # memory of which nobody knows whether inputs and outputs share it


class Access(NamedTuple):
    """Bytes that a call reads or writes.

    Attributes:
        memory: in which they are.
        part: of an array of which several calls write different parts; None: the call writes all of the bytes.
    """

    memory: Hashable
    start: int
    end: int
    writes: bool
    part: Hashable = None

    def conflicts(self, other: Access) -> bool:
        """Whether the order of the two matters."""
        if self.memory != other.memory or self.start >= other.end or other.start >= self.end:
            return False
        if self.writes and other.writes:
            return self.part is None or self.part != other.part
        return self.writes or other.writes


@dataclass(frozen=True)
class Work:
    """What a call does.

    Attributes:
        accesses: but for constants.
        blocks: of its largest kernel; None if nothing may run beside it.
    """

    accesses: tuple[Access, ...]
    blocks: int | None


@dataclass(frozen=True)
class Order:
    """A partial order of calls.

    Attributes:
        after: of each call, the calls that it directly waits for, the latest first.
        before: of each call, those that are complete when it begins, as bits.
    """

    after: tuple[tuple[int, ...], ...]
    before: tuple[int, ...]

    @property
    def is_chain(self) -> bool:
        return all(after == ((number - 1,) if number else ()) for number, after in enumerate(self.after))


def ordered(calls: Sequence[Work], sms: int) -> Order:
    """The order of calls, as few waits as possible.

    Args:
        sms: multiprocessors.

    Example:
        >>> x, y, z = (Access(name, 0, 1, False) for name in "xyz")
        >>> makes_y, makes_z = Work((x, y._replace(writes=True)), 8), Work((x, z._replace(writes=True)), 8)
        >>> ordered([makes_y, makes_z, Work((y, z), 8)], sms=132).after
        ((), (), (1, 0))
    """
    after: list[tuple[int, ...]] = []
    before: list[int] = []
    for number, call in enumerate(calls):
        waits: list[int] = []
        known, left = 0, (1 << number) - 1
        while left:
            other = left.bit_length() - 1
            if not _fit(call, calls[other], sms) or _conflict(call, calls[other]):
                waits.append(other)
                known |= before[other] | 1 << other
            left &= ~(known | 1 << other)
        after.append(tuple(waits))
        before.append(known)
    return Order(tuple(after), tuple(before))


def works_of(program: Program, plans: Sequence[LaunchPlan | None], ready: Sequence[bool], sms: int) -> list[Work]:
    """What each call of a program does to bytes.

    Args:
        plans: of the kernel of each call; None: the host makes the call.
        ready: whether the constant steps of each call have run.
    """
    works = []
    for call, plan, prepacked in zip(program.calls, plans, ready):
        accesses: list[Access] = []
        for name, index in call.buffers.items():
            place, writes = program.arrays[index].place, name in call.outputs
            if place.space in ("arena", "input", "output"):
                end = place.offset + program.arrays[index].nbytes
                part = index if name in call.offsets else None
                accesses.append(Access((place.space, place.number), place.offset, end, writes, part))
                accesses += callers(place.space == "input", writes and place.space == "output")
        if plan is not None:
            spaces = {name: place for name, place in call.workspaces.items() if place.space == "arena"}
            accesses += [
                Access(("arena", 0), place.offset, place.offset + plan.workspaces[name], True)
                for name, place in spaces.items()
            ]
        works.append(Work(tuple(accesses), blocks_of(plan, prepacked, sms)))
    return works


def blocks_of(plan: LaunchPlan | None, is_ready: bool, sms: int) -> int | None:
    """Blocks of the largest kernel of a call; None if it has none. With `is_ready` its constant steps do not run."""
    if plan is None:
        return None
    return max((step.grid.blocks(sms, step.cluster) for step in plan.steps if not (step.constant and is_ready)), default=0)


def callers(is_input: bool, is_output: bool) -> Iterator[Access]:
    """What a call does to the caller's memory: it may be given one array as an input and as an output."""
    if is_input:
        yield Access(CALLERS, 0, 1, False)
    if is_output:
        yield Access(CALLERS, 0, 1, True, "outputs")


def _fit(one: Work, other: Work, sms: int) -> bool:
    return one.blocks is not None and other.blocks is not None and one.blocks + other.blocks <= FILLED * sms


def _conflict(one: Work, other: Work) -> bool:
    return any(a.conflicts(b) for a in one.accesses for b in other.accesses)
