"""Calls of a network that do not need one another run side by side, where they fit, and never share bytes.

See docs/decisions/325-branches-run-side-by-side.md.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedsearch.device.cuda_graph import _add_nodes
from schedsearch.device.cuda_kernel import GRID_FIELDS
from schedsearch.executable.assemble import assemble
from schedsearch.executable.branches import FILLED, Access, Work, ordered, works_of
from schedsearch.executable.memory import Block, arrange
from schedsearch.executable.predicted import span_ns
from schedsearch.executable.program import ChosenKernel, Origin
from schedsearch.launch import Artifact, Grid, LaunchPlan, Pointer, Step
from schedsearch.network.costs import Cost
from schedsearch.network.graph import Constant, Network, Node, Value
from schedsearch.network.plan import first_plan, priced
from schedsearch.target import PRESETS
from schedsearch.workload import Workload

SMS = 132
MOST = int(FILLED * SMS)  # blocks of two kernels that fit
accesses = st.builds(
    lambda memory, start, nbytes, writes, part: Access(memory, start, start + nbytes, writes, part if writes else None),
    st.sampled_from("ab"), st.integers(0, 5), st.integers(1, 3), st.booleans(), st.sampled_from([None, None, "slices"]),
)  # fmt: skip
works = st.builds(
    Work, st.lists(accesses, max_size=3).map(tuple), st.sampled_from([None, 1, MOST // 2, MOST // 2 + 1, MOST])
)


@given(st.lists(works, max_size=9))
@settings(max_examples=150)
def test_calls_that_conflict_or_do_not_fit_keep_their_order_and_no_wait_is_needless(calls: list[Work]) -> None:
    found = ordered(calls, SMS)
    for later, earlier in ((j, i) for i, j in itertools.combinations(range(len(calls)), 2)):
        bytes_of = [
            [(each, {(each.memory, at) for at in range(each.start, each.end)}) for each in calls[number].accesses]
            for number in (earlier, later)
        ]
        conflict = any(
            one & other
            and (a.writes or b.writes)
            and not (a.writes and b.writes and a.part is not None and a.part == b.part)
            for (a, one), (b, other) in itertools.product(*bytes_of)
        )
        blocks = [calls[number].blocks for number in (earlier, later)]
        fits = None not in blocks and sum(blocks) <= MOST  # type: ignore[arg-type]
        if conflict or not fits:
            assert found.before[later] >> earlier & 1
    for number, after in enumerate(found.after):
        reached = {number}
        for each in sorted(range(number), reverse=True):  # walk along the waits
            if any(each in found.after[other] for other in reached):
                reached.add(each)
        assert found.before[number] == sum(1 << each for each in reached - {number})
        assert not any(found.before[one] >> other & 1 for one in after for other in after)


def test_large_kernels_are_a_chain() -> None:
    x, y, z = (Access(name, 0, 1, True) for name in "xyz")
    calls = [Work((each,), blocks) for each, blocks in ((x, MOST), (y, 1), (z, MOST - 1))]
    assert ordered(calls, SMS).after == ((), (0,), (0,)) and not ordered(calls, SMS).is_chain
    assert ordered(calls, 0).is_chain


@given(st.lists(st.tuples(st.integers(1, 600), st.integers(1, 2**7 - 1)), max_size=8), st.integers(0, 2**21 - 1))
@settings(max_examples=80)
def test_blocks_share_bytes_only_if_all_uses_of_one_are_before_those_of_the_other(
    uses: list[tuple[int, int]], graph: int
) -> None:
    """The steps are those of a random partial order."""
    before: list[int] = []
    pairs = iter(range(21))
    for step in range(7):
        direct = [other for other in range(step) if graph >> next(pairs) & 1]
        before.append(sum(1 << i for i in range(step) if any(i == o or before[o] >> i & 1 for o in direct)))
    blocks = []
    for nbytes, mask in uses:
        steps = [step for step in range(7) if mask >> step & 1]
        common = [i for i in range(7) if all(before[step] >> i & 1 for step in steps)]
        blocks.append(Block(nbytes, steps[0], steps[-1], mask, sum(1 << i for i in common)))
    arena = arrange(blocks)
    for one, other in itertools.combinations(range(len(blocks)), 2):
        a, b = (range(arena.offsets[n], arena.offsets[n] + blocks[n].nbytes) for n in (one, other))
        if a.start < b.stop and b.start < a.stop:
            steps = [[step for step in range(7) if uses[n][1] >> step & 1] for n in (one, other)]
            assert any(
                all(before[late] >> early & 1 for early, late in itertools.product(*pair)) for pair in (steps, steps[::-1])
            )


# --- A network ------------------------------------------------------------------------------------------------------------


def product(name: str, x: str, weight: str, y: str) -> Node:
    workload: Workload = Workload("batch_matmul", dict(b=1, m=64, n=64, k=64, dtype="float16"))
    letters = {spec.name: "ABC" for spec in (*workload.signature, *workload.outputs)}
    return Node(name, (name,), {"x": x, "weight": weight}, {"y": y}, (workload,), letters={workload: letters})


def two_branches() -> Network:
    """a = x w, then b = a w, c = b w and, beside them, d = a w, e = d w; y = c e', z = y w."""
    edges = [
        ("x", "w", "a"),
        ("a", "w", "b"),
        ("a", "w", "d"),
        ("b", "w", "c"),
        ("d", "w", "e"),
        ("c", "e", "y"),
        ("y", "w", "z"),
    ]
    return Network(
        inputs=("x",),
        outputs=("z",),
        values={name: Value(name, "ABC", (1, 64, 64), "float16") for name in "xabcdeyz"},
        constants={"w": Constant("w", "ABC", np.ones((1, 64, 64), np.float32))},
        nodes=tuple(product(y, x, weight, y) for x, weight, y in edges),
    )


def kernel_of(blocks: int) -> Any:
    def kernel(workload: Workload) -> ChosenKernel:
        step = Step("run", tuple(map(Pointer, ("x", "weight", "y", "scratch"))), Grid(blocks), 1, early=True)
        return ChosenKernel(
            Artifact(workload.id.encode(), LaunchPlan("cuda", "sm_90a", (step,), {"scratch": 4096})),
            Origin("exact", "t", "{}"),
        )

    return kernel


@pytest.mark.parametrize("blocks", [8, MOST])
def test_small_kernels_of_two_branches_run_side_by_side(blocks: int) -> None:
    """Also that the memory plan leaves them bytes of their own; a plan for a chain would not."""
    network = two_branches()
    executable = assemble(network, first_plan(network), kernel_of(blocks), target=PRESETS["h200"].key)
    program = executable.program
    (artifact,) = executable.artifacts.values()
    plans = [artifact.plan] * len(program.calls)
    found = ordered(works_of(program, plans, [False] * len(plans), SMS), SMS)
    names = [call.name for call in program.calls]
    waits = {names[number]: {names[each] for each in after} for number, after in enumerate(found.after)}
    chain = {later: {earlier} for earlier, later in itertools.pairwise(names)} | {"a": set()}
    beside = {"a": set(), "b": {"a"}, "d": {"a"}, "c": {"b"}, "e": {"d"}, "y": {"c", "e"}, "z": {"y"}}
    assert waits == (beside if blocks == 8 else chain)


@pytest.mark.parametrize(
    "card, blocks, predicted_ns",
    [
        # a, y and z alone; b and d, then c and e side by side, each slowed by .6 for a block of the other's a multiprocessor
        ("h100", SMS, 3 * 1000 + 2 * 1000 * 1.6),
        ("h100", SMS // 2, 3 * 1000 + 2 * 1000 * 1.3),
        ("h100", MOST, 7 * 1000),  # a chain
        ("h200", SMS, 3 * 1000 + 2 * 1000 * 1.6 + 1100),  # y waits for two
    ],
)
def test_the_predicted_time_counts_calls_side_by_side_together(card: str, blocks: int, predicted_ns: float) -> None:
    network = two_branches()
    plan = priced(first_plan(network), lambda workload: Cost(1000.0, "record", "made"))
    assert plan.predicted_ns == 7000.0
    program = assemble(network, plan, kernel_of(blocks), target=PRESETS[card].key).program
    assert program.predicted_ns == pytest.approx(predicted_ns)
    unpriced = assemble(network, first_plan(network), kernel_of(blocks), target=PRESETS[card].key).program
    assert unpriced.predicted_ns == 0.0


@given(st.lists(works, max_size=9), st.lists(st.integers(1, 50), min_size=9, max_size=9))
@settings(max_examples=60)
def test_a_predicted_time_is_at_least_that_of_the_longest_way(calls: list[Work], times: list[int]) -> None:
    """It is exactly that if calls do not slow one another down, and the sum in a chain."""
    found = ordered(calls, SMS)
    times_ns = [float(time) for time in times[: len(calls)]]
    ends: list[float] = []
    for time, after in zip(times_ns, found.after):
        ends.append(time + max((ends[each] for each in after), default=0.0))
    alone = span_ns(found, times_ns, [0] * len(calls), "cuda:sm_90:132:another card", SMS)
    assert alone == pytest.approx(max(ends, default=0.0))
    span = span_ns(found, times_ns, [call.blocks for call in calls], "cuda:sm_90:132:another card", SMS)
    assert span >= alone - 1e-6
    one_by_one = span_ns(ordered([Work((), None)] * len(calls), SMS), times_ns, [None] * len(calls), "any", SMS)
    assert one_by_one == sum(times_ns)


def test_any_order_that_keeps_the_waits_computes_the_same() -> None:
    """Calls are run in random orders on the bytes of the memory plan, each as y = 3 x + 5 w, with scratch memory."""
    network = two_branches()
    executable = assemble(network, first_plan(network), kernel_of(8), target=PRESETS["h200"].key)
    program = executable.program
    (artifact,) = executable.artifacts.values()
    found = ordered(works_of(program, [artifact.plan] * 7, [False] * 7, SMS), SMS)

    def run(order: list[int]) -> Any:
        memory = {"arena": np.zeros(program.arena_bytes, np.uint8), "input": np.arange(8192, dtype=np.uint8)}
        memory |= {"output": np.zeros(8192, np.uint8), "constant": np.full(program.constant_bytes, 7, np.uint8)}
        for number in order:
            call = program.calls[number]
            places = {name: program.arrays[index].place for name, index in call.buffers.items()} | dict(call.workspaces)
            x, weight, y, scratch = (
                memory[place.space][place.offset : place.offset + (4096 if name == "scratch" else 8192)]
                for name, place in ((name, places[name]) for name in ("x", "weight", "y", "scratch"))
            )
            scratch[:] = number  # what another call would find there
            y[:] = 3 * x + 5 * weight
        return memory["output"]

    wanted = run(list(range(7)))
    for seed in range(20):
        draw, order = random.Random(seed), list[int]()
        while len(order) < 7:
            ready = [n for n in range(7) if n not in order and set(found.after[n]) <= set(order)]
            order.append(draw.choice(ready))
        assert np.array_equal(run(order), wanted)


def test_a_kernel_begins_early_behind_several_others_but_not_behind_nodes_of_the_caller() -> None:
    """Calls 0 and 2 have no kernels left to launch: what waits for them waits for the nodes in front of the network."""
    edges: dict[int, list[tuple[int, bool]]] = {}

    class Device:
        def call_quickly(self, name: str, *given: Any) -> None:
            if name == "cuGraphAddKernelNode_v2":
                node = len(edges) + 100
                edges[node] = [(other, False) for other in given[2] or ()]
                given[0]._obj.value = node
            else:
                edges[given[2]._obj.value].append((given[1]._obj.value, True))

    def bound(count: int) -> Any:
        config = SimpleNamespace(attribute_count=1, **{name: 1 for name, _ in GRID_FIELDS})
        return SimpleNamespace(launches=[(config, 1, ctypes.create_string_buffer(8))] * count)

    kernels = [bound(count) for count in (0, 1, 0, 1, 2, 1)]
    after = [(), (0,), (), (1,), (1,), (4, 3, 2)]
    _add_nodes(Device(), 1, kernels, after, [ctypes.c_void_p(7)])  # type: ignore[arg-type]
    assert edges == {
        100: [(7, False)],
        101: [(100, True)],
        102: [(100, True)],
        103: [(102, True)],
        104: [(103, False), (101, False), (7, False)],
    }
    edges.clear()
    _add_nodes(Device(), 1, [bound(1)] * 4, [(), (0,), (0,), (2, 1)], [ctypes.c_void_p(7)])  # type: ignore[arg-type]
    assert edges[103] == [(102, True), (101, True)]
