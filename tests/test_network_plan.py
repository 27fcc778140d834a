"""Plans of networks: the implementations of nodes, the layouts of values and the conversions between them."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import math
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedsearch import Workload, concat, conv2d, layout_transform, transpose
from schedsearch.errors import UnsupportedError
from schedsearch.network.choices import Choices
from schedsearch.network.costs import Cost
from schedsearch.network.elimination import Elimination
from schedsearch.network.explain import explain
from schedsearch.network.graph import Constant, Network, Node, Plan, Value, View
from schedsearch.network.layouts import conversion, same_bytes
from schedsearch.network.plan import best_plan, complete, fastest_kernels, first_plan, missing, priced, uniform_plan

ROOT = Path(__file__).resolve().parents[1]


def image(name: str, c: int, extent: int = 8, n: int = 2, dtype: str = "float16") -> Value:
    return Value(name, "NCHW", (n, c, extent, extent), dtype)


def convolution(name: str, x: Value, y: Value, *layouts: str) -> Node:
    """A 1x1 convolution with an implementation for each layout; NCHW->NHWC writes another layout than it reads."""
    n, c, h, w = x.shape
    workloads = []
    for of_x, _, of_y in (layout.partition("->") for layout in layouts):
        sizes = {"n": n, "h": h, "w": w, "c": c, "k": y.shape[1], "r": 1, "s": 1}
        workloads.append(conv2d(**sizes, dtype=x.dtype, layout=of_x, output_layout=of_y or of_x))
    return Node(name, (name,), {"x": x.name, "weight": f"{name}.weight"}, {"y": y.name}, tuple(workloads))


def network(inputs: list[Value], outputs: list[Value], inner: list[Value], nodes: list[Node | View]) -> Network:
    values = {value.name: value for value in [*inputs, *inner, *outputs]}
    weights = {}
    for node in nodes:
        if isinstance(node, Node) and "weight" in node.arguments:
            o, i = values[node.outputs["y"]].shape[1], values[node.arguments["x"]].shape[1]
            weights[node.arguments["weight"]] = Constant(node.arguments["weight"], "OIHW", np.zeros((o, i, 1, 1)))
    return Network(tuple(v.name for v in inputs), tuple(v.name for v in outputs), values, weights, tuple(nodes))


def steps(plan: Plan) -> list[tuple[str, str, str]]:
    return [(each.value, each.x, each.y) for each in plan.conversions]


def test_layouts_that_differ_in_axes_of_extent_1_only_hold_the_same_bytes() -> None:
    assert same_bytes(image("grey", 1), "NCHW", "NHWC")
    assert same_bytes(image("pooled", 64, extent=1), "NCHW", "NHWC")
    assert same_bytes(image("one block", 32), "NCHW32c", "NHWC")
    assert not same_bytes(image("padded block", 16), "NCHW32c", "NHWC")
    assert not same_bytes(image("colour", 3), "NCHW", "NHWC")


def test_images_change_their_layout_by_layout_transform_and_matrices_by_transpose() -> None:
    assert conversion(image("x", 64), "NCHW", "NCHW32c") == layout_transform(
        n=2, c=64, h=8, w=8, layout="NCHW", to="NCHW32c"
    )
    matrix = Value("m", "ABC", (2, 3, 5), "float32")
    assert conversion(matrix, "ABC", "CAB") == transpose(x=(2, 3, 5), permutation=(2, 0, 1), dtype="float32")
    assert conversion(image("x", 64), "NCHW4c", "NCHW6c") is None  # blocks that do not nest
    assert conversion(Value("mask", "AB", (2, 3), "uint64"), "AB", "BA") is None


def test_the_first_plan_converts_a_value_once_for_all_who_read_it_in_a_layout() -> None:
    x, a, b, c = image("x", 16), image("a", 32), image("b", 32), image("c", 32)
    one = convolution("one", x, a, "NHWC", "NCHW")
    two = convolution("two", a, b, "NCHW")
    three = convolution("three", a, c, "NCHW->NHWC")
    plan = first_plan(network([x], [b, c], [a], [one, two, three]))
    assert plan.implementations == {
        "one": one.implementations[0],
        "two": two.implementations[0],
        "three": three.implementations[0],
    }
    assert steps(plan) == [("x", "NCHW", "NHWC"), ("a", "NHWC", "NCHW"), ("c", "NHWC", "NCHW")]
    assert plan.conversions[1].workload == layout_transform(n=2, c=32, h=8, w=8, layout="NHWC", to="NCHW")


def test_words_say_the_layout_of_arguments_whose_axes_have_other_letters() -> None:
    x, a, y = image("x", 16), image("a", 32), image("y", 48)
    workload = concat(x=[(2, 8, 8, 16), (2, 8, 8, 32)], axis=3)
    letters = {workload: {"x0": "NHWC", "x1": "NHWC", "y": "NHWC"}}
    join = Node("join", ("join",), {"x0": "x", "x1": "a"}, {"y": "y"}, (workload,), letters=letters)
    plan = first_plan(network([x], [y], [a], [convolution("one", x, a, "NHWC"), join]))
    assert steps(plan) == [("x", "NCHW", "NHWC"), ("y", "NHWC", "NCHW")]
    unnamed = Node("join", ("join",), {"x0": "x", "x1": "a"}, {"y": "y"}, (workload,))
    with pytest.raises(ValueError, match=r"x NCHW \(2, 16, 8, 8\) is not \(2, 8, 8, 16\) in layout NCHW, as x0 has it"):
        first_plan(network([x], [y], [a], [convolution("one", x, a, "NHWC"), unnamed]))


def test_a_view_needs_a_layout_in_which_the_bytes_are_the_same() -> None:
    x, a, flat = image("x", 16), image("a", 32), Value("flat", "AB", (2, 2048), "float16")
    plan = first_plan(
        network([x], [flat], [a], [convolution("one", x, a, "NHWC"), View("v", ("v",), "a", "flat", (("NCHW", "AB"),))])
    )
    assert plan.views == {"v": ("NCHW", "AB")}
    assert steps(plan) == [("x", "NCHW", "NHWC"), ("a", "NHWC", "NCHW")]


def test_a_conversion_that_no_kernel_does_is_refused() -> None:
    x, a, b = image("x", 24), image("a", 24), image("b", 24)
    one, two = convolution("one", x, a, "NCHW4c"), convolution("two", a, b, "NCHW6c")
    with pytest.raises(UnsupportedError, match=r"a \(float16 NCHW .* is made in layout NCHW4c, and two reads it in NCHW6c"):
        first_plan(network([x], [b], [a], [one, two]))


# ---- elimination

TABLES = st.integers(1, 5).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(1, 3), min_size=count, max_size=count),
        st.lists(
            st.tuples(st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True), st.integers(0, 2**32 - 1)),
            max_size=6,
        ),
    )
)


def summed(sizes: list[int], factors: list[tuple[tuple[int, ...], np.ndarray]]) -> np.ndarray:
    """The sum of tables, entry by entry."""
    total = np.zeros(sizes)
    for states in itertools.product(*map(range, sizes)):
        total[states] = sum(table[tuple(states[each] for each in variables)] for variables, table in factors)
    return total


@settings(max_examples=100, deadline=None)
@given(TABLES)
def test_elimination_finds_the_minimum_and_the_least_cost_of_every_choice(drawn) -> None:
    sizes, given_factors = drawn
    factors = []
    for variables, seed in given_factors:
        random = np.random.default_rng(seed)
        table = random.integers(0, 9, [sizes[each] for each in variables]).astype(float)
        table[random.random(table.shape) < 0.15] = np.inf
        factors.append((tuple(variables), table))
    total = summed(sizes, factors)
    found = Elimination(sizes, factors)
    assert found.exact
    assert found.cost == total.min()
    assert total[found.states] == total.min() or math.isinf(found.cost)
    for variables, _ in factors:
        rest = tuple(each for each in range(len(sizes)) if each not in variables)
        order = [sorted(variables).index(each) for each in variables]
        assert np.array_equal(found.least(*variables), total.min(axis=rest).transpose(order))
    cut = Elimination(sizes, factors, most_entries=3)  # some variables are fixed
    assert cut.cost >= total.min()
    assert math.isinf(cut.cost) or total[cut.states] == cut.cost


# ---- plans


def by_digest(seed: int, unmeasured: int = 0):
    """Costs of 1 to 16 us that depend on the workload only; of `unmeasured` in 10 workloads they are estimates."""

    def costs(workload: Workload) -> Cost:
        digest = hashlib.sha256(f"{seed} {workload.id}".encode()).digest()
        time_ns = 1000.0 * (1 + digest[0] % 16) / (4 if workload.op == "layout_transform" else 1)
        return Cost(time_ns, "roofline" if digest[1] % 10 < unmeasured else "record", "by digest", time_ns / 4)

    return costs


LAYOUTS = ("NCHW", "NHWC", "NCHW4c", "NCHW8c")


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Up to five nodes: convolutions with some of the layouts, concats of one, and values that several nodes read."""
    x = image("x", 8)
    values, nodes = [x], []
    for number in range(draw(st.integers(1, 5))):
        if draw(st.integers(0, 2)) == 0:
            reads = [draw(st.sampled_from(values)) for _ in range(draw(st.integers(2, 3)))]
            y = image(f"v{number}", sum(each.shape[1] for each in reads))
            workloads, letters = [], {}
            for layout, axis in (("NCHW", 1), ("NHWC", 3)):
                shapes = [each.shape if axis == 1 else (2, 8, 8, each.shape[1]) for each in reads]
                workload = concat(x=shapes, axis=axis)
                workloads.append(workload)
                letters[workload] = dict.fromkeys((*(f"x{place}" for place in range(len(reads))), "y"), layout)
            arguments = {f"x{place}": each.name for place, each in enumerate(reads)}
            nodes.append(Node(f"n{number}", (f"n{number}",), arguments, {"y": y.name}, tuple(workloads), letters=letters))
        else:
            y = image(f"v{number}", 8)
            pairs = ["NCHW", "NHWC", "NCHW->NHWC", "NHWC->NCHW", "NCHW4c", "NCHW8c"]
            workloads = draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=4, unique=True))
            nodes.append(convolution(f"n{number}", draw(st.sampled_from(values)), y, *workloads))
        values.append(y)
    outputs = draw(st.lists(st.sampled_from(values[1:]), min_size=1, max_size=2, unique=True))
    return network([x], outputs, [each for each in values[1:] if each not in outputs], nodes)


def by_brute_force(found: Network, costs) -> list[Plan]:
    counts = [len(node.layouts) if isinstance(node, View) else len(node.implementations) for node in found.nodes]
    names = [node.name for node in found.nodes]
    return [
        priced(complete(found, dict(zip(names, workloads))), costs) for workloads in itertools.product(*map(range, counts))
    ]


@settings(max_examples=40, deadline=None)
@given(networks(), st.integers(0, 1000))
def test_the_best_plan_is_that_of_brute_force(found: Network, seed: int) -> None:
    costs = by_digest(seed)
    every = by_brute_force(found, costs)
    best = best_plan(found, costs)
    assert best.predicted_ns == pytest.approx(min(plan.predicted_ns for plan in every))
    assert best == best_plan(found, costs)
    assert best.predicted_ns <= fastest_kernels(found, costs).predicted_ns


@settings(max_examples=15, deadline=None)
@given(networks(), st.integers(0, 1000))
def test_losses_say_what_the_best_plan_costs_that_makes_a_value_in_another_layout(found: Network, seed: int) -> None:
    costs = by_digest(seed)
    choices = Choices(found, costs)
    every = by_brute_force(found, costs)
    best_ns = min(plan.predicted_ns for plan in every)
    for node in found.nodes:
        of: dict[str, float] = {}
        for plan in every:
            layout = (
                plan.implementations[node.name].params.get("output_layout")
                or node.letters[plan.implementations[node.name]]["y"]
            )
            layout = "NHWC" if layout == "NCHW8c" and found.values[node.outputs["y"]].shape[1] == 8 else layout
            of[layout] = min(of.get(layout, math.inf), plan.predicted_ns - best_ns)
        assert choices.losses_ns(node.outputs["y"]) == pytest.approx(of)
        assert choices.losses_ns(node.outputs["y"])[choices.made(node.outputs["y"])] == 0


@pytest.mark.parametrize("most_joint", [1, 2500])
def test_the_loss_of_a_layout_is_that_of_the_cheapest_plan_that_makes_it(most_joint: int) -> None:
    """The node makes each layout from both. With small tables these are two states, of which the cheaper one may be last."""
    x, y = image("x", 16), image("y", 32)
    for order in itertools.permutations(("NCHW", "NCHW->NHWC", "NHWC->NCHW", "NHWC")):
        one = convolution("one", x, y, *order)
        found = network([x], [y], [], [one])
        times = dict(zip(order, (4000.0, 9000.0, 7000.0, 1000.0)))
        times_of = dict(zip(one.implementations, (times[layouts] for layouts in order)))

        def costs(workload: Workload, times_of: dict[Workload, float] = times_of) -> Cost:
            return Cost(times_of.get(workload, 500.0), "record", "")

        losses: dict[str, float] = {}
        plans = by_brute_force(found, costs)
        for plan in plans:
            made = plan.implementations["one"].params.get("output_layout") or plan.implementations["one"].layout
            loss_ns = plan.predicted_ns - min(each.predicted_ns for each in plans)
            losses[made] = min(losses.get(made, math.inf), loss_ns)
        with mock.patch("schedsearch.network.choices.MOST_JOINT", most_joint):
            assert Choices(found, costs).losses_ns("y") == losses


@settings(max_examples=15, deadline=None)
@given(networks(), st.integers(0, 1000))
def test_what_is_missing_is_in_the_plan_or_could_be(found: Network, seed: int) -> None:
    costs = by_digest(seed, unmeasured=4)
    best = best_plan(found, costs)
    tasks = missing(found, costs)
    missed = {task.workload for task in tasks}
    launched = [*best.implementations.values(), *(each.workload for each in best.conversions)]
    assert {workload for workload in launched if not costs(workload).measured} <= missed
    for task in tasks:
        assert not costs(task.workload).measured

    def optimistic(workload: Workload) -> Cost:  # one workload at a time is as fast as it can be
        cost = costs(workload)
        return Cost(cost.least_ns, "record", "") if workload == tried else cost

    workloads = [workload for node in found.nodes for workload in node.implementations]
    for tried in workloads:
        if workloads.count(tried) == 1 and not costs(tried).measured:
            assert (tried in missed) or best_plan(found, optimistic).predicted_ns == pytest.approx(best.predicted_ns)


@settings(max_examples=30, deadline=None)
@given(networks(), st.integers(0, 1000))
def test_values_with_many_readers_and_nodes_with_many_layouts_have_the_same_best_plan(found: Network, seed: int) -> None:
    costs = by_digest(seed)
    with mock.patch("schedsearch.network.choices.MOST_JOINT", 1):  # as if all tables were too large
        small = Choices(found, costs)
    assert small.solution.cost == pytest.approx(Choices(found, costs).solution.cost)
    assert priced(complete(found, small.best()), costs).predicted_ns == pytest.approx(small.solution.cost)


def test_a_value_that_many_nodes_read_is_converted_once_for_each_layout() -> None:
    """Sixteen readers in four layouts: a table over all of them would have 4^17 entries."""
    x, a = image("x", 16), image("a", 16)
    outputs = [image(f"y{place}", 16) for place in range(16)]
    readers = [convolution(f"n{place}", a, y, LAYOUTS[place % 4], LAYOUTS[place % 3]) for place, y in enumerate(outputs)]
    plan = best_plan(network([x], outputs, [a], [convolution("one", x, a, *LAYOUTS), *readers]), free_readers)
    assert sorted(each.y for each in plan.conversions if each.value == "a") == ["NCHW4c", "NHWC"]
    assert {each.layout for each in plan.implementations.values()} == {"NCHW", "NHWC", "NCHW4c"}


def free_readers(workload: Workload) -> Cost:
    """Everything costs 1 us; NCHW8c costs 3 us, so that a reader with another way does not take it."""
    slow = workload.op == "conv2d" and workload.layout == "NCHW8c"
    return Cost(3000.0 if slow else 1000.0 if workload.op == "conv2d" else 1.0, "record", "")


def test_one_layout_for_all_and_the_fastest_kernels_are_baselines() -> None:
    x, a, b = image("x", 16), image("a", 16), image("b", 32)
    one, two = convolution("one", x, a, "NCHW", "NHWC", "NCHW4c"), convolution("two", a, b, "NHWC", "NCHW4c")
    found = network([x], [b], [a], [one, two])
    times = {
        one.implementations[0]: 3.0,
        one.implementations[1]: 2.0,
        one.implementations[2]: 1.0,
        two.implementations[0]: 1.0,
        two.implementations[1]: 2.0,
    }

    def costs(workload: Workload) -> Cost:
        return Cost(times.get(workload, 0.25), "record", "")

    nhwc = uniform_plan(found, costs, "NHWC")
    assert [each.layout for each in nhwc.implementations.values()] == ["NHWC", "NHWC"]
    assert nhwc.predicted_ns == 2.0 + 1.0 + 2 * 0.25
    fastest = fastest_kernels(found, costs)
    assert [each.layout for each in fastest.implementations.values()] == ["NCHW4c", "NHWC"]
    assert fastest.predicted_ns == 1.0 + 1.0 + 3 * 0.25
    assert fastest.measured == {
        each.id: costs(each).time_ns
        for each in [*fastest.implementations.values(), *(c.workload for c in fastest.conversions)]
    }
    assert best_plan(found, costs) == fastest


def test_slices_of_one_value_are_written_in_one_layout() -> None:
    x, joined = image("x", 16), image("joined", 64)
    sizes = {"n": 2, "h": 8, "w": 8, "c": 16, "k": 32, "r": 1, "s": 1, "slice_of": 64}
    workloads = [conv2d(**sizes, layout="NHWC"), conv2d(**sizes, layout="NCHW")]
    weight = Constant("weight", "OIHW", np.zeros((32, 16, 1, 1)))
    nodes = [
        Node(name, (name,), {"x": "x", "weight": "weight"}, {"y": "joined"}, order)
        for name, order in (("one", (workloads[0], workloads[1])), ("two", (workloads[1],)))
    ]
    found = Network(("x",), ("joined",), {"x": x, "joined": joined}, {"weight": weight}, tuple(nodes))

    def costs(workload: Workload) -> Cost:
        return Cost(1.0 if workload == workloads[0] else 9.0, "record", "")

    for plan in (best_plan(found, costs), fastest_kernels(found, costs), uniform_plan(found, costs, "NHWC")):
        assert [each.layout for each in plan.implementations.values()] == ["NCHW", "NCHW"]


def test_a_node_that_no_kernel_computes_is_refused_with_the_reasons() -> None:
    x, y = image("x", 16), image("y", 16)
    found = network([x], [y], [], [convolution("one", x, y, "NCHW", "NHWC")])
    with pytest.raises(
        UnsupportedError, match=r"no kernel computes node one \(one\): no template has NCHW. 1 other layout fails too"
    ):
        best_plan(found, lambda workload: Cost(math.inf, "none", f"no template has {workload.layout}"))


def test_an_explanation_has_what_each_layout_costs_and_the_baselines() -> None:
    x, a, b = image("x", 16), image("a", 16), image("b", 32)
    one, two = convolution("one", x, a, "NCHW", "NHWC", "NCHW4c"), convolution("two", a, b, "NHWC", "NCHW4c")
    found = network([x], [b], [a], [one, two])
    times = dict(zip([*one.implementations, *two.implementations], (9e3, 3e3, 2e3, 1e3, 3e3)))

    def costs(workload: Workload) -> Cost:
        return Cost(times.get(workload, 1e3), "roofline" if workload == two.implementations[0] else "record", "by hand")

    explanation = explain(found, best_plan(found, costs), costs)
    assert explanation.plans.rows == (
        ("this plan", "6.00", "2 (2.00 us)"),
        ("all NHWC", "6.00", "2 (2.00 us)"),
        ("fastest kernels", "6.00", "3 (3.00 us)"),
    )
    assert explanation.summary == (
        "Predicted: 6.00 us for 2 kernels and 2 conversions of layouts, one after another.\n"
        "The times of 1 of 4 different workloads are estimated."
    )
    rows = {row[0]: row[1:] for row in explanation.values.rows}
    assert rows["x"] == ("NCHW", "NHWC", "", "", "the caller gives it so")
    assert rows["a"] == ("NHWC", "NHWC", "NCHW4c", "+0.00", "as fast as the next best")
    assert rows["b"] == ("NHWC", "NCHW", "NCHW4c", "+1.00", "made faster so, in spite of 1 conversion")
    assert explanation.nodes.rows[1] == ("two", two.implementations[0].label, "1.00", "estimated: by hand")
    assert max(map(len, explanation.text().splitlines())) < 100
    assert "| b | NHWC | NCHW | NCHW4c | +1.00 |" in explanation.markdown()


# ---- the benchmark and the picture


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_an_integer_program_finds_no_better_plan_of_inception_v3(benchmark_module) -> None:
    program = benchmark_module("layout_plan")
    inception = benchmark_module("layout_graphs").inception_v3(["NHWC", "NCHW"])
    costs = program.made_up(0, 1.0)
    pairs = program.Pairs(inception, costs)
    best_ns = best_plan(inception, costs).predicted_ns
    assert pairs.plan_ns(program.integer_program(pairs)) == pytest.approx(best_ns)
    assert pairs.plan_ns(program.pairwise(pairs)) >= best_ns - 1e-6


def test_the_picture_of_a_plan_is_drawn_by_the_program(benchmark_module) -> None:
    """To draw it again: python benchmarks/draw_plan.py --out docs/images/layout-plan.svg"""
    kept = ROOT / "docs" / "images" / "layout-plan.svg"
    assert benchmark_module("draw_plan").draw() == kept.read_text(encoding="utf-8")
