"""How long a network takes, by the times of its calls and the order in which they wait for one another.

A call begins when the calls that it waits for have ended (`branches.Order`). Calls that run side by side slow one another
down: each runs at 1 / (1 + SLOWED * blocks) of its speed alone, where `blocks` are those of the others for each
multiprocessor. A call that waits for several takes `JOINED_NS` longer than its time, which is that of a call in a chain.

See docs/decisions/376-predictions-know-branches.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from schedsearch.executable.branches import Order

SLOWED = 0.6
"""By one block of other calls for each multiprocessor. Fitted with `JOINED_NS` to Inception-v3 and ResNet-50 under limits of
0.5 to 4 blocks (benchmarks/results/branches_h200.json): the eight predictions are within 3.5 % of the measured times."""

JOINED_NS: Mapping[str, float] = {"NVIDIA H200": 1100.0}  # by the words of a target's key
"""Cards that are missing lose nothing: nothing is known to be saved in a chain there either."""


def span_ns(order: Order, times_ns: Sequence[float], blocks: Sequence[int | None], target: str, sms: int) -> float:
    """Nanoseconds from the first call's begin to the last one's end.

    Args:
        times_ns: of each call alone.
        blocks: of each call's largest kernel; None: nothing runs beside it.
        target: key of the device.
        sms: its multiprocessors.

    Example:
        >>> forked = Order(after=((), (0,), (0,), (2, 1)), before=(0, 1, 1, 7))
        >>> span_ns(forked, [1000.0, 2000.0, 2000.0, 1000.0], [132, 66, 66, 132], "cuda:sm_90:132:another card", 132)
        4600.0
    """
    if order.is_chain:
        return sum(times_ns)
    joined_ns = next((ns for words, ns in JOINED_NS.items() if target.endswith(words)), 0.0)
    left = [time_ns + joined_ns * (len(after) > 1) for time_ns, after in zip(times_ns, order.after, strict=True)]
    waits = [len(after) for after in order.after]
    readers: list[list[int]] = [[] for _ in left]
    for number, after in enumerate(order.after):
        for other in after:
            readers[other].append(number)
    running = [number for number, count in enumerate(waits) if not count]
    now_ns = 0.0
    while running:
        there = sum(blocks[number] or 0 for number in running)
        slower = {number: 1 + SLOWED * (there - (blocks[number] or 0)) / sms for number in running}
        step_ns = min(left[number] * slower[number] for number in running)
        now_ns += step_ns
        ended = [number for number in running if left[number] * slower[number] <= step_ns]
        for number in running:
            left[number] -= step_ns / slower[number]
        running = [number for number in running if number not in ended]
        for reader in (reader for number in ended for reader in readers[number]):
            waits[reader] -= 1
            if not waits[reader]:
                running.append(reader)
    return now_ns
