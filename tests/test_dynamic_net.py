"""Graphs whose sizes are computed on the device, exact and bounded. Expected values are NumPy's."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedsearch import Workload, dyn_strided_slice, elementwise, nonzero, strided_slice
from schedsearch.backend import compile_source
from schedsearch.device import Device, open_device
from schedsearch.device.detect import detect
from schedsearch.dynamic.bound import extents_written_twice, independent_calls
from schedsearch.dynamic.explain import explain
from schedsearch.dynamic.graph import DynamicGraph, Size
from schedsearch.dynamic.net import DynamicNet
from schedsearch.errors import ArgumentError, UsageError
from schedsearch.launch import Artifact
from schedsearch.ops import ArgSpec
from schedsearch.ops.dependence import SizeError
from schedsearch.runtime import arrays
from schedsearch.target import Target
from schedsearch.template import load_template

FAR = 2**31 - 1


@functools.cache
def artifact(target: Target, workload: Workload) -> Artifact:
    name = "data_movement" if workload.op == "strided_slice" else workload.op
    template = load_template(f"{name}_{target.kind}")
    config = template.default(workload, target, template.space(workload, target))
    return compile_source(template.kernel(workload, target, config), target).artifact


def net_of(graph: DynamicGraph, device: Device) -> DynamicNet:
    return DynamicNet(graph.program(), device, functools.partial(artifact, device.target))


def one_slice() -> DynamicGraph:
    graph = DynamicGraph()
    x = graph.input("x", (Size("n", 0, 9), 24), "float32")
    positions = [graph.input(name, (2,), "int64") for name in ("begin", "end", "strides")]
    graph.output(graph.call(dyn_strided_slice(x=(9, 24), dynamic=True, dtype="float32"), x, *positions, name="slice"))
    return graph


def chain() -> DynamicGraph:
    """A slice, its negative, and a slice of that whose positions are computed from other positions on the device."""
    graph = DynamicGraph()
    x = graph.input("x", (Size("n", 1, 9), 24), "float32")
    begin, end = graph.input("begin", (2,), "int32"), graph.input("end", (2,), "int32")
    rows = dyn_strided_slice(x=(9, 24), dynamic=True, strided=False, dtype="float32", index_dtype="int32")
    first = graph.call(rows, x, begin, end, name="first")
    negative = graph.call(elementwise(y=(9, 24), expression="-a", dtype="float32"), first, name="negative")
    picked = graph.call(
        strided_slice(x=(4,), begin=(1,), end=(3,), dtype="int32"), graph.input("more", (4,), "int32"), name="picked"
    )
    graph.output(graph.call(rows, negative, picked, end, name="second"), first)
    return graph


@pytest.fixture(scope="module")
def device() -> Any:
    opened = open_device(detect("cpu"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def sliced(device: Device) -> Any:
    with net_of(one_slice(), device) as net:
        yield net


positions = st.integers(-30, 30) | st.sampled_from([FAR, -FAR])
pairs = st.tuples(positions, positions)
steps = st.tuples(*[st.sampled_from([1, 2, 3, -1, -2])] * 2)


def inputs(n: int, begin: Any, end: Any, strides: Any) -> tuple[Any, ...]:
    x = np.arange(24 * n, dtype=np.float32).reshape(n, 24)
    return x, *(np.array(each, np.int64) for each in (begin, end, strides))


def numpys(x: Any, begin: Any, end: Any, strides: Any) -> Any:
    return x[tuple(slice(int(b), int(e), int(s)) for b, e, s in zip(begin, end, strides))]


@settings(max_examples=60)
@given(st.integers(0, 9), pairs, pairs, steps)
def test_an_exact_run_gives_arrays_of_exactly_the_right_size(
    sliced: DynamicNet, n: int, begin: Any, end: Any, strides: Any
) -> None:
    arrays = inputs(n, begin, end, strides)
    y = sliced(*arrays)
    assert y.flags["C_CONTIGUOUS"]
    np.testing.assert_array_equal(y, numpys(*arrays))


@pytest.mark.long
def test_a_bounded_run_follows_its_inputs_without_a_word_from_the_host(device: Device, sliced: DynamicNet) -> None:
    x, begin, end, strides = inputs(7, (1, 0), (FAR, FAR), (1, 1))
    bound = sliced.bind(x, begin, end, strides)
    (result,) = bound.step()
    assert result.array.shape == (9, 24)
    for numbers in (((1, 0), (5, 9), (1, 2)), ((-1, -1), (-FAR, 3), (-2, -1)), ((3, 3), (3, 3), (1, 1))):
        begin[:], end[:], strides[:] = numbers
        x += 1
        bound.step()
        wanted = numpys(x, begin, end, strides)
        assert tuple(result.extents) == wanted.shape
        np.testing.assert_array_equal(result.array[: wanted.shape[0], : wanted.shape[1]], wanted)
        np.testing.assert_array_equal(bound.sliced()[0], wanted)
    bound.close()


@pytest.mark.long
def test_a_bounded_run_follows_an_input_that_kernels_read_at_its_bound(device: Device) -> None:
    graph = DynamicGraph()
    negative = elementwise(y=(9, 24), expression="-a", dtype="float32")
    graph.output(graph.call(negative, graph.input("x", (Size("n", 1, 9), 24), "float32")))
    with net_of(graph, device) as net:
        x = np.ones((5, 24), np.float32)
        bound = net.bind(x)
        for _ in range(2):
            bound.step()
            np.testing.assert_array_equal(bound.sliced()[0], -x)
            x += 1
        bound.close()
        np.testing.assert_array_equal(net(x), -x)
        np.testing.assert_array_equal(net(x[:3]), -x[:3])


def test_impossible_numbers_are_reported_with_call_and_numbers(sliced: DynamicNet) -> None:
    arrays = inputs(4, (0, 0), (4, 4), (1, 0))
    text = r"slice\.y: strides has 0; allowed: .*; got x=\[4, 24\], begin=\[0, 0\], end=\[4, 4\], strides=\[1, 0\]"
    with pytest.raises(SizeError, match=text):
        sliced(*arrays)
    bound = sliced.bind(*arrays)
    (result,) = bound.step()
    assert tuple(result.extents) == (0, 0)
    with pytest.raises(SizeError, match=text):
        bound.check()
    arrays[-1][:] = 1
    bound.step()
    bound.check()
    bound.close()
    np.testing.assert_array_equal(sliced(*arrays), numpys(*arrays))


@pytest.mark.long
def test_sizes_beyond_the_bound_are_reported_and_nothing_is_written(device: Device) -> None:
    graph = DynamicGraph()
    given_ = [graph.input("x", (9, 24), "float32"), *(graph.input(name, (2,), "int64") for name in ("begin", "end"))]
    narrow = dyn_strided_slice(x=(9, 24), bound=(9, 8), strided=False, dtype="float32")
    graph.output(graph.call(narrow, *given_, name="slice"))
    with net_of(graph, device) as net:
        x, begin, end, _ = inputs(9, (0, 0), (2, 9), (1, 1))
        text = "slice.y would be 2x9, which exceeds its declared bound 9x8; declare larger bounds"
        with pytest.raises(SizeError, match=text):
            net(x, begin, end)
        bound = net.bind(x, begin, end)
        bound.results[0].array[:] = 7
        bound.step()
        with pytest.raises(SizeError, match=text):
            bound.check()
        assert (bound.results[0].array == 7).all()
        end[:] = 2, 8
        np.testing.assert_array_equal(net(x, begin, end), x[:2, :8])


def test_a_known_extent_below_its_bound_is_not_taken_for_the_whole_array() -> None:
    graph = DynamicGraph()
    x = graph.input("x", (9, 24), "float32")
    begin, end = graph.constant("begin", np.array([0, 1])), graph.constant("end", np.array([9, 24]))
    sliced = graph.call(dyn_strided_slice(x=(9, 24), strided=False, dtype="float32"), x, begin, end, name="sliced")
    with pytest.raises(UsageError, match=r"takes x of fixed extents; it gets \[9, sliced.y:1\]"):
        graph.call(strided_slice(x=(9, 24), begin=(0, 0), end=(9, 20), dtype="float32"), sliced)


def test_positions_that_the_graph_computes_begin_a_segment_of_their_own() -> None:
    program = chain().program()
    assert [[call.name for call in segment.calls] for segment in program.segments] == [
        ["first", "negative", "picked"],
        ["second"],
    ]
    assert [segment.fetched.count for segment in program.segments if segment.fetched] == [2, 2]  # 8 bytes a dimension


@pytest.mark.long
@settings(max_examples=30)
@given(st.integers(1, 9), st.tuples(*[st.integers(-9, 9)] * 2), st.tuples(*[st.integers(-9, 30)] * 2))
def test_a_chain_of_calls_runs_exact_and_bounded(chained: Any, n: int, begin: Any, end: Any) -> None:
    x = np.arange(24 * n, dtype=np.float32).reshape(n, 24)
    first, last = np.array(begin, np.int32), np.array(end, np.int32)
    more = np.array([99, *(2 * first), 99], np.int32)
    middle = numpys(x, first, last, (1, 1))
    wanted = numpys(-middle, 2 * first, last, (1, 1))
    y, z = chained(x, first, last, more)
    np.testing.assert_array_equal(z, middle)
    np.testing.assert_array_equal(y, wanted)
    bound = chained.bind(x, first, last, more)
    bound.step()
    y, z = bound.sliced()
    np.testing.assert_array_equal(z, middle)
    np.testing.assert_array_equal(y, wanted)
    bound.close()


@pytest.fixture(scope="module")
def chained(device: Device) -> Any:
    with net_of(chain(), device) as net:
        yield net


@pytest.mark.long
def test_later_runs_of_the_same_sizes_allocate_nothing(chained: DynamicNet) -> None:
    arrays = np.ones((9, 24), np.float32), *(np.array(n, np.int32) for n in ((1, 1), (5, 9), (0, 1, 1, 0)))
    chained(*arrays)
    before = chained.allocations
    for _ in range(3):
        chained(*arrays)
    assert chained.allocations == before


@pytest.mark.long
def test_results_of_earlier_runs_stay_as_they_are(chained: DynamicNet) -> None:
    """Also if inputs are at other addresses, and results smaller or larger."""
    rng, runs = np.random.default_rng(0), []
    for last in ((5, 9), (9, 24), (2, 2), (5, 9)):
        x = rng.standard_normal((9, 24)).astype(np.float32)
        first, end = np.array((1, 1), np.int32), np.array(last, np.int32)
        more = np.array([0, 1, 1, 0], np.int32)
        runs.append((chained(x, first, end, more), numpys(x, first, end, (1, 1))))
    for (_, found), wanted in runs:
        np.testing.assert_array_equal(found, wanted)


def test_what_a_graph_cannot_run_is_refused_when_it_is_built(sliced: DynamicNet) -> None:
    graph = one_slice()
    with pytest.raises(UsageError, match=r"n=9\.\.3; allowed: LEAST\.\.MOST"):
        Size("n", 9, 3)
    with pytest.raises(UsageError, match="reads 'z', which nothing makes"):
        graph.call(dyn_strided_slice(x=(9, 24)), "z", "begin", "end", "strides")
    with pytest.raises(UsageError, match="takes x as float16"):
        graph.call(dyn_strided_slice(x=(9, 24)), "x", "begin", "end", "strides")
    with pytest.raises(UsageError, match=r"takes x of fixed extents; it gets \[n, 24\], some of which are known"):
        graph.call(dyn_strided_slice(x=(9, 24), dtype="float32"), "x", "begin", "end", "strides", name="fixed")
    with pytest.raises(ArgumentError, match=r"allowed in dimension 0: n=0\.\.9"):
        sliced(*inputs(10, (0, 0), (1, 1), (1, 1)))
    with pytest.raises(ArgumentError, match="allowed in dimension 1: 24"):
        sliced(np.zeros((3, 25), np.float32), *inputs(1, (0, 0), (1, 1), (1, 1))[1:])


def test_calls_that_read_no_computed_size_run_beside_the_kernel_of_sizes() -> None:
    """A slice of x has extents that the caller sent; a slice of that slice needs those that the kernel computes."""
    program = chain().program()
    assert [independent_calls(program, segment) for segment in program.segments] == [3, 1]
    graph = DynamicGraph()
    x = graph.input("x", (9, 24), "float32")
    begin, end = graph.input("begin", (2,), "int64"), graph.input("end", (2,), "int64")
    first = graph.call(dyn_strided_slice(x=(9, 24), strided=False, dtype="float32"), x, begin, end)
    graph.output(graph.call(dyn_strided_slice(x=(9, 24), strided=False, dynamic=True, dtype="float32"), first, begin, end))
    program = graph.program()
    assert [(len(segment.calls), independent_calls(program, segment)) for segment in program.segments] == [(2, 1)]


def counts_and_slices() -> DynamicGraph:
    """Extents of one call that only its kernel knows, and of another that the kernel of sizes computes beside both."""
    graph = DynamicGraph()
    x = graph.input("x", (9, 24), "float32")
    begin, end = graph.input("begin", (2,), "int64"), graph.input("end", (2,), "int64")
    places = graph.call(nonzero(x=(9, 24)), x)
    graph.output(places, graph.call(dyn_strided_slice(x=(9, 24), strided=False, dtype="float32"), x, begin, end))
    return graph


def test_extents_that_only_a_call_counts_stay_where_others_read_them() -> None:
    program = counts_and_slices().program()
    (segment,) = program.segments
    assert independent_calls(program, segment) == 2
    assert [extents_written_twice(call) for call in segment.calls] == [{}, {"y_extents": 2}]


@pytest.mark.gpu
def test_a_gpu_counts_beside_the_kernel_of_sizes() -> None:
    torch = pytest.importorskip("torch")
    opened = open_device(detect("cuda"))
    with net_of(counts_and_slices(), opened) as net:
        x = torch.zeros(9, 24, device="cuda")
        begin, end = (torch.tensor(each, device="cuda") for each in ((1, 2), (5, 9)))
        bound = net.bind(x, begin, end, overlapped=True)
        for count in (3, 24):
            x[4, :count] = 1
            bound.step()
            places, sliced_ = bound.sliced()
            assert torch.equal(places, x.nonzero().T) and torch.equal(sliced_, x[1:5, 2:9])
        bound.close()


@pytest.mark.gpu
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_gpu_runs_exact_and_bounded(overlapped: bool) -> None:
    torch = pytest.importorskip("torch")
    opened = open_device(detect("cuda"))
    rng = np.random.default_rng(0)
    with net_of(one_slice(), opened) as net:
        x = torch.rand(7, 24, device="cuda")
        begin, end, strides = (torch.ones(2, dtype=torch.int64, device="cuda") for _ in range(3))
        bound = net.bind(x, begin, end, strides, overlapped=overlapped)
        for _ in range(20):
            for array, numbers in ((begin, rng.integers(-9, 9, 2)), (end, rng.integers(-9, 30, 2))):
                array.copy_(torch.from_numpy(numbers))
            strides.copy_(torch.tensor([int(rng.choice([1, 2, -1])), int(rng.choice([1, 3, -2]))]))
            wanted = numpys(x.cpu().numpy(), begin.tolist(), end.tolist(), strides.tolist())
            np.testing.assert_array_equal(net(x, begin, end, strides).cpu().numpy(), wanted)
            bound.step()
            np.testing.assert_array_equal(bound.sliced()[0].cpu().numpy(), wanted)
        bound.close()


def test_the_explanation_says_what_is_needed_from_whom_and_what_it_costs() -> None:
    assert explain(chain().program()).splitlines() == [
        "segment 0: exact runs copy 16 bytes to the host and wait once",
        "  first     needs the shape of x; the values of begin, end  allocates y at the bound",
        "  negative  needs nothing  allocates y at the bound",
        "  picked    needs nothing  allocates y",
        "segment 1: exact runs copy 16 bytes to the host and wait once",
        "  second  needs the shape of negative.y; the values of picked.y, end  allocates y",
        "bounded runs: 0 bytes to the host, 0 waits, 0 allocations",
    ]


@pytest.mark.parametrize(("shape", "strides"), [((0, 8), (8, 1)), ((3, 0), (1, 1)), ((2, 0, 4), (4, 4, 1))])
def test_an_array_without_elements_needs_no_memory(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """PyTorch gives such tensors the address 0, and strides as if no extent were 0."""
    spec = ArgSpec("x", "ABC"[: len(shape)], shape, "float32")
    view = arrays.ArrayView(0, shape, strides, "float32", ("cpu", 0), "torch", False)
    assert arrays.check(spec, view, ("cpu", 0)).shape == shape
    one = ArgSpec("x", "A", (1,), "float32")
    with pytest.raises(ArgumentError, match="x has no memory"):
        arrays.check(one, arrays.ArrayView(0, (1,), (1,), "float32", ("cpu", 0), "torch", False), ("cpu", 0))
