"""The most similar of many workloads, against `workload.distance` of each."""

from __future__ import annotations

import random

from schedsearch.constructors.convolutions import conv2d
from schedsearch.similar import Similar
from schedsearch.workload import Workload, distance


def drawn(rng: random.Random) -> Workload:
    epilogue = rng.choice([[], ["relu"], ["bias", "relu"]])
    size, channels, kernel = rng.choice([7, 14, 28]), rng.choice([3, 64, 100, 512]), rng.choice([1, 3, 5])
    return conv2d(
        n=rng.choice([1, 2, 32]), h=size, w=size, c=channels, k=rng.choice([8, 64, 96]), r=kernel, s=kernel,
        padding=kernel // 2, stride=rng.choice([1, 2]), dtype=rng.choice(["float16", "float32"]), epilogue=epilogue,
    )  # fmt: skip


def test_the_nearest_are_those_of_the_least_distance() -> None:
    rng = random.Random(5)
    known = list(dict.fromkeys(drawn(rng) for _ in range(300)))
    similar = Similar((workload, workload) for workload in known)
    for _ in range(50):
        wanted = drawn(rng)
        found = similar.nearest(wanted, 7)
        best = sorted(distance(wanted, each) for each in known)[:7]
        assert [round(far, 9) for far, _ in found] == [round(far, 9) for far in best]
        assert [round(distance(wanted, each), 9) for _, each in found] == [round(far, 9) for far in best]


def test_of_none_there_is_no_nearest() -> None:
    assert Similar[str]([]).nearest(drawn(random.Random(0)), 3) == []
