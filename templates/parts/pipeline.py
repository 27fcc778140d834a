"""The pipeline between warps that load and warps that multiply: a ring of stages in shared memory with mbarriers.

A ring has `stages` buffers and two mbarriers for each: `full` completes a phase when a stage's bytes have landed, `empty`
when every consumer has read them. A thread that walks the ring carries the number of its stage and the parity of the phase
that it waits for next. A producer starts with parity 1, the phase before the first, because all stages start empty; a
consumer starts with parity 0.

A kernel captures the functions here, and they become part of it. They take addresses in shared memory as u32.

Source: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".

See docs/decisions/050-parts-of-kernels.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from schedsearch.templates.parts import ptx
from schedsearch.templates.parts.casts import u32
from schedsearch.templates.parts.hopper import BARRIER_BYTES


def initialise(barrier: Any, count: Any, arrivals: Any) -> None:
    """Initialises `count` mbarriers in a row, the first at `barrier`, each for `arrivals` arrivals per phase."""
    for number in range(count):
        ptx.mbarrier_init(barrier + number * BARRIER_BYTES, arrivals)


class Ring(NamedTuple):
    """Where a thread is in a ring, for a function that walks it further. All are u32.

    A loop keeps the three in variables of their own: a tuple that goes around a loop gives another order of registers.

    Attributes:
        stage: the stage that is next.
        previous: the stage before.
        parity: of the phase that the thread waits for next; see `consumer` about phases of stages that differ.
    """

    stage: Any
    previous: Any
    parity: Any


class Barriers(NamedTuple):
    """Addresses of the first mbarriers of a ring."""

    full: Any
    empty: Any


class Producer(NamedTuple):
    """The functions of the thread that fills a ring.

    Attributes:
        fill: `fill(buffers, full, empty, stage, parity)` waits until the stage is empty and announces its bytes. It returns
            the stage's address and the barrier for copies into it.
        advance: `advance(stage, parity)` returns both for the next stage.
        drain: `drain(empty, stage, parity)` waits until all stages are empty.
    """

    fill: Callable[..., Any]
    advance: Callable[..., Any]
    drain: Callable[..., Any]


class Consumer(NamedTuple):
    """The functions of a warpgroup that reads a ring.

    Attributes:
        take: `take(full, stage, parity)` waits until the stage is full and returns the next parity.
        advance: `advance(stage, parity)` returns both for the next stage.
    """

    take: Callable[..., Any]
    advance: Callable[..., Any]


def producer(stages: int, stage_bytes: int, loaded_bytes: int | None = None) -> Producer:
    """The producer's side of a ring.

    Args:
        stages: number of stages of the ring.
        stage_bytes: distance from one stage to the next.
        loaded_bytes: bytes that copies bring into a stage; `stage_bytes` if not given.
    """
    advance = _advance(stages)
    expected_bytes = stage_bytes if loaded_bytes is None else loaded_bytes

    def fill(buffers: Any, full: Any, empty: Any, stage: Any, parity: Any) -> Any:
        ptx.mbarrier_wait(empty + stage * BARRIER_BYTES, parity)
        barrier = u32(full + stage * BARRIER_BYTES)
        buffer = u32(buffers + stage * stage_bytes)
        ptx.mbarrier_expect_bytes(barrier, expected_bytes)
        return buffer, barrier

    def drain(empty: Any, stage: Any, parity: Any) -> None:
        for _ in range(stages):
            ptx.mbarrier_wait(empty + stage * BARRIER_BYTES, parity)
            stage, parity = advance(stage, parity)

    return Producer(fill, advance, drain)


def consumer(stages: int, phases: Literal["all", "some", "first"] = "all") -> Consumer:
    """The consumer's side of a ring.

    Args:
        stages: number of stages of the ring.
        phases: the phases of a stage that the consumer takes. `some`: it leaves tiles to others and skips their stages, so
            phases of stages differ, and its parity has one bit per stage. `first`: stages are filled once and stay.
    """

    def take(full: Any, stage: Any, parity: Any) -> Any:
        ptx.mbarrier_wait(full + stage * BARRIER_BYTES, parity)
        return parity

    def take_some(full: Any, stage: Any, parities: Any) -> Any:
        ptx.mbarrier_wait(full + stage * BARRIER_BYTES, (parities >> stage) & u32(1))
        return u32(parities ^ (u32(1) << stage))

    def advance_stage(stage: Any, parities: Any) -> Any:
        stage = u32(stage + 1)
        if stage == stages:
            stage = u32(0)
        return stage, parities

    return Consumer(take_some if phases == "some" else take, _advance(stages) if phases == "all" else advance_stage)


def _advance(stages: int) -> Callable[..., Any]:
    def advance(stage: Any, parity: Any) -> Any:
        stage = u32(stage + 1)
        if stage == stages:
            stage = u32(0)
            parity = u32(parity ^ 1)
        return stage, parity

    return advance
