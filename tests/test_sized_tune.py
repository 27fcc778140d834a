"""What a build of a network for a range of sizes tunes, in which order, and what it says of the rest."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import schedsearch
from schedsearch.deadline import Deadline
from schedsearch.device.detect import detect
from schedsearch.errors import UsageError
from schedsearch.executable import sized_tune
from schedsearch.executable.sized_build import _range_of
from schedsearch.executable.sized_tune import Group, missing_calls, missing_ranges, tune_groups
from schedsearch.executable.timely import TUNED
from schedsearch.network.costs import Cost
from schedsearch.network.graph import Network, Node, Value
from schedsearch.session.ranges import RangeBudget
from schedsearch.task import Task
from schedsearch.workload import Workload

SIZES = range(1, 65)
SLOW, QUICK = (schedsearch.conv2d(n=64, h=h, w=h, c=8, k=8, r=3, s=3, padding=1, dtype="float32") for h in (56, 14))
ROWS = schedsearch.dense(m=64 * 4, n=8, k=8, dtype="float32")  # four pixels of each of 64 images
TIMES_NS = {SLOW: 9000.0, QUICK: 1000.0, ROWS: 3000.0}


def network() -> Network:
    """Three nodes that have nothing to do with one another."""
    nodes: list[Node] = []
    values: dict[str, Value] = {}
    for name, workload in (("quick", QUICK), ("rows", ROWS), ("slow", SLOW)):
        for spec in (*workload.signature, *workload.outputs):
            values[f"{name}.{spec.name}"] = Value(f"{name}.{spec.name}", spec.axes, tuple(spec.shape), spec.dtype)
        arguments = {spec.name: f"{name}.{spec.name}" for spec in workload.signature}
        outputs = {spec.name: f"{name}.{spec.name}" for spec in workload.outputs}
        nodes.append(Node(name, (name,), arguments, outputs, (workload,)))
    made = {value for node in nodes for value in node.outputs.values()}
    return Network(tuple(sorted({*values} - made)), tuple(sorted(made)), values, {}, tuple(nodes))


def columns() -> list[dict[int, Workload]]:
    found: list[dict[int, Workload]] = [{n: each.replace(n=n) for n in SIZES} for each in (SLOW, QUICK)]
    return [*found, {n: ROWS.replace(m=4 * n) for n in SIZES}]


def costs(*measured: Workload) -> Any:
    return lambda workload: (
        Cost(TIMES_NS[workload], "record", "", TIMES_NS[workload])
        if workload in measured
        else Cost(TIMES_NS[workload], "roofline", "", 0.0)
    )


def labels(groups: list[Group]) -> list[tuple[str, int]]:
    return [(group.label, len(group.tasks)) for group in groups]


def test_the_slowest_layers_come_first_each_as_a_range_where_it_is_one() -> None:
    found = missing_ranges(network(), costs(), columns(), _range_of, lambda each: False)
    samples = len(SLOW.with_dynamic("n", 1, 64).samples())
    assert labels(found) == [
        (f"{SLOW.label}, n = 1 to 64", samples), (ROWS.label, 1), (f"{QUICK.label}, n = 1 to 64", samples)
    ]  # fmt: skip
    assert {task.of_range for task in found[0].tasks} == {SLOW.with_dynamic("n", 1, 64)}


def test_tuned_ranges_are_taken_and_a_record_of_one_size_is_not_enough() -> None:
    def tuned(of_range: Any) -> bool:
        return bool(of_range.workload == SLOW)

    found = missing_ranges(network(), costs(QUICK, ROWS), columns(), _range_of, tuned)
    assert [group.label for group in found] == [f"{QUICK.label}, n = 1 to 64"]


def test_calls_of_a_graph_are_ordered_by_what_all_their_calls_take() -> None:
    found = missing_calls([SLOW, *[ROWS] * 4], [QUICK, ROWS], costs())
    assert [(group.label, group.tasks[0].weight) for group in found] == [(ROWS.label, 4), (SLOW.label, 1), (QUICK.label, 1)]
    assert missing_calls([SLOW], [], costs(SLOW)) == []


@pytest.mark.parametrize(
    ("time_s", "sizes", "largest_only", "left"),
    [
        (1.0, [(SLOW, 1)], [SLOW], [ROWS, QUICK]),
        (2.9, [(SLOW, 1), (ROWS, 1)], [SLOW], [QUICK]),
        (12.4, [(SLOW, 1), (ROWS, 1), (QUICK, 1)], [SLOW, QUICK], []),
        (12.5, [(SLOW, 7), (ROWS, 1), (QUICK, 1)], [QUICK], []),
        (30.0, [(SLOW, 7), (ROWS, 1), (QUICK, 7)], [], []),
    ],
)
def test_all_layers_are_tuned_at_the_largest_size_before_any_is_at_others(
    time_s: float, sizes: list[Any], largest_only: list[Any], left: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size takes a second, and a range of seven searched sizes takes half as much again for the choice: 10.5 s."""
    groups = missing_ranges(network(), costs(), columns(), _range_of, lambda each: False)
    given, said = _tuned(groups, time_s, monkeypatch)
    by_layer = [[task for task in given if task.workload.replace(**_at_largest(task)) == layer] for layer, _ in sizes]
    assert [len(tasks) for tasks in by_layer] == [count for _, count in sizes] and sum(map(len, by_layer)) == len(given)
    assert all((task.of_range is not None) == (len(tasks) > 1) for tasks in by_layer for task in tasks)
    assert f"tuning {len(sizes)} of 3 kernels" in said[0]
    for start, layers in (("tuned at the largest size only, for want of time: ", largest_only),
                          ("not tuned, for want of time: ", left)):  # fmt: skip
        lines = [line for line in said if line.startswith(start)]
        assert len(lines) == bool(layers) and all("--tune 25s tries all" in line for line in lines)
        assert all(layer.label in lines[0] for layer in layers)


def test_ranges_whose_largest_size_was_tuned_are_tuned_at_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a time that is too short, or nothing would be tuned at all."""
    groups = missing_ranges(network(), costs(SLOW, QUICK, ROWS), columns(), _range_of, lambda each: False)
    given, said = _tuned(groups, 3.0, monkeypatch)
    assert {task.of_range.workload for task in given if task.of_range} == {groups[0].largest.workload}
    assert [task.workload.params["n"] for task in given] == SLOW.with_dynamic("n", 1, 64).samples()
    assert "tuning 1 of 2 kernels" in said[0] and groups[1].label in said[1]


def _tuned(groups: list[Group], time_s: float, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Task], list[str]]:
    """The tasks of a run in so much time, and what is said."""
    given: list[Task] = []

    def tuned(tasks: list[Task], *args: Any) -> Any:
        given.extend(tasks)
        return SimpleNamespace(ranges=())

    monkeypatch.setattr(sized_tune, "tuned", tuned)
    said: list[str] = []
    deadline = Deadline.within(time_s / TUNED, lambda: 0.0)
    tune_groups(groups, Path("none.db"), detect("cpu"), deadline, "cold-graph-v1", said.append)
    return given, said


def _at_largest(task: Task) -> dict[str, int]:
    return {"n": 64} if task.workload.op == "conv2d" else {}


def test_nothing_to_tune_starts_no_run() -> None:
    said: list[str] = []
    tune_groups([], Path("none.db"), detect("cpu"), Deadline.within(1.0), "cold-graph-v1", said.append)
    assert said == ["every kernel of the plan was tuned; nothing to tune"]


def test_the_time_of_a_choice_is_shared_by_the_ranges_that_are_left() -> None:
    deadline = Deadline(100.0, lambda: 20.0)
    assert RangeBudget(deadline=deadline).share(4).deadline.ends_s == 40.0
    assert RangeBudget(trials=5).share(4) == RangeBudget(trials=5)


@pytest.mark.parametrize("tune_s", ["10m", -1, True, float("inf")])
def test_impossible_times_are_refused(tune_s: Any) -> None:
    with pytest.raises(UsageError, match=r"tune_s is .*; allowed: a number of seconds above 0, or None"):
        schedsearch.build_dynamic("none.onnx", {"n": (1, 4)}, target="cpu", tune_s=tune_s)


def test_reversed_sizes_say_the_order() -> None:
    with pytest.raises(UsageError, match=r"n=4\.\.1 is reversed; .* give \(1, 4\)"):
        schedsearch.build_dynamic("none.onnx", {"n": (4, 1)}, target="cpu")
