"""A repeated call sees everything that changed since the last one, and PyTorch learns what kernels write."""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numba import cuda

import schedsearch
from schedsearch.dynamic.given import look
from schedsearch.errors import ArgumentError, UsageError
from schedsearch.runtime import arrays
from schedsearch.runtime.repeated import TENSOR_SOURCE, address_of, facts_of, recogniser, same_number

EXTENT = 16
QUIET_NAN, OTHER_NAN = (struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (0x7FF8 << 48, (0x7FF8 << 48) + 5))
NUMBERS = [0.0, -0.0, 1.0, 1, True, 0, False, math.inf, math.nan, np.int64(1), np.float32(1), np.float32(-0.0), 2**63]


def divide(x: Any, s: Any, y: Any) -> None:
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i] / s


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """y = x / s, compiled once for each signature."""
    decorate = schedsearch.tunable(
        knobs={"threads": (64,)}, grid=1, block=lambda k: k.threads, outputs=["y"], verify="once",
        db=tmp_path_factory.mktemp("divided") / "own.db",
    )  # fmt: skip
    return decorate(divide)


def quotients(x: np.ndarray, s: Any) -> np.ndarray:
    """In float64, as NumPy and Numba's `/` say, rounded to float32."""
    with np.errstate(all="ignore"):
        return (x.astype(np.float64) / np.float64(s)).astype(np.float32)


def same_bits(found: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.array_equal(found, expected, equal_nan=True) and np.array_equal(np.signbit(found), np.signbit(expected)))


# Each changes x, s or y in place, or replaces it. State: {"x": ..., "s": ..., "y": ...}
def number(state: dict[str, Any], draw: Any) -> None:
    state["s"] = draw(st.sampled_from(NUMBERS))


def numbers_of_x(state: dict[str, Any], draw: Any) -> None:
    if state["x"].flags.writeable:
        state["x"][...] = draw(st.integers(-3, 3))


def memory_of_x(state: dict[str, Any], draw: Any) -> None:
    """NumPy moves the array; the object stays. There is no view of its old memory then."""
    if state["x"].flags.owndata and state["y"].base is None:
        state["x"].resize(200_000, refcheck=False)
        state["x"].resize(EXTENT, refcheck=False)
        state["x"][...] = np.arange(EXTENT)


def format_of_x(state: dict[str, Any], draw: Any) -> None:
    state["x"].dtype = draw(st.sampled_from([np.float32, np.int32]))


def another_x(state: dict[str, Any], draw: Any) -> None:
    step = draw(st.sampled_from([1, 2]))
    made = np.arange(step * EXTENT, dtype=np.float32)
    state["x"] = made if step == 1 else made[::step]


def writeable_y(state: dict[str, Any], draw: Any) -> None:
    state["y"].flags.writeable = not state["y"].flags.writeable


def view_as_y(state: dict[str, Any], draw: Any) -> None:
    """y becomes a part of x: they overlap."""
    state["y"] = state["x"].view(np.float32)


def another_y(state: dict[str, Any], draw: Any) -> None:
    state["y"] = np.zeros(EXTENT, np.float32)


STEPS = [number, number, numbers_of_x, memory_of_x, format_of_x, another_x, writeable_y, view_as_y, another_y]
SHORT = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)  # of the shapes and formats that are drawn, each is compiled once


@pytest.mark.long  # compiles 20 signatures
@SHORT
@given(data=st.data())
def test_a_call_of_an_own_kernel_computes_with_what_its_arguments_are_now(divided: Any, data: st.DataObject) -> None:
    state: dict[str, Any] = {"x": np.arange(EXTENT, dtype=np.float32), "s": 2.0, "y": np.zeros(EXTENT, np.float32)}
    for _ in range(data.draw(st.integers(2, 6))):
        step: Callable[[dict[str, Any], Any], None] = data.draw(st.sampled_from(STEPS))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # NumPy is going to refuse the assignment of a dtype
            step(state, data.draw)
        x, s, y = state["x"], state["s"], state["y"]
        if not y.flags.writeable or not y.flags.c_contiguous or np.shares_memory(x, y):
            before = y.copy()
            with pytest.raises(ArgumentError):
                divided(x, s, y)
            assert same_bits(y, before)
        else:
            divided(x, s, y)
            assert same_bits(y, quotients(x, s)), (x, s, y)


def test_numbers_are_the_same_if_their_class_and_bits_are() -> None:
    for one in NUMBERS:
        for other in NUMBERS:
            bits = type(one) is type(other) and np.asarray(one).tobytes() == np.asarray(other).tobytes()
            assert same_number(one, other) == bits, (one, other)
    assert not same_number(QUIET_NAN, OTHER_NAN)


def test_arrays_look_alike_only_if_all_checks_say_the_same_of_both() -> None:
    base = np.zeros((8, 8), np.float32)
    frozen = base.copy()
    frozen.flags.writeable = False
    several = [
        base,
        base.copy(),
        base.T,
        base[::2],
        base[:4],
        base[:4].copy(),
        base.view(np.int32),
        base.reshape(64),
        frozen,
    ]
    for one in several:
        for other in several:
            views = [arrays.view(each, "x") for each in (one, other)]
            facts = [(view.shape, view.strides, view.dtype, view.device, view.readonly) for view in views]
            assert (look(one, "x")[0] == look(other, "x")[0]) == (facts[0] == facts[1])


def test_an_array_is_recognised_only_with_its_facts_and_its_address(torch: Any) -> None:
    base, tensor = np.zeros((4, 4), np.float32), torch.zeros(4, 4)
    several = [base, base[:], base.copy(), base.T, base[1:], base.view(np.int32), tensor, tensor[:], tensor.T, tensor[1:]]
    several += [tensor.clone(), torch.from_numpy(base), None, 1.0]
    for one in several[:-2]:
        is_like = recogniser(one)
        assert is_like is not None
        for other in several:
            alike = facts_of(one) == facts_of(other) and address_of(one) == address_of(other)
            assert is_like(other) == alike, (one, other)
    is_like = recogniser(base)
    base.resize((100, 100), refcheck=False)  # it moves; NumPy refuses this where something refers to the array
    base.resize((4, 4), refcheck=False)
    assert is_like is not None and is_like(base) == (address_of(base) == several[1].ctypes.data)


def test_the_address_of_an_array_is_that_of_its_interface() -> None:
    for array in (np.zeros(5), np.zeros((3, 4))[1:, ::2], np.zeros(7)[::-1], np.frombuffer(b"12345678", np.int16)):
        assert address_of(array) == array.__array_interface__["data"][0]


def test_an_integer_that_no_format_holds_is_refused(divided: Any) -> None:
    x, y = np.ones(EXTENT, np.float32), np.zeros(EXTENT, np.float32)
    divided(x, 2, y)
    with pytest.raises(ArgumentError, match="too large"):
        divided(x, 2**64, y)


def test_a_tensor_whose_storage_changed_is_looked_at_again(divided: Any, torch: Any) -> None:
    x, y = torch.ones(EXTENT), torch.zeros(EXTENT)
    divided(x, 2.0, y)
    x.set_(torch.full((EXTENT,), 6.0))
    divided(x, 2.0, y)
    assert torch.equal(y, torch.full((EXTENT,), 3.0))
    x.data = torch.full((EXTENT,), 8.0)
    divided(x, 2.0, y)
    assert torch.equal(y, torch.full((EXTENT,), 4.0))
    x.untyped_storage().resize_(8)
    with pytest.raises(ArgumentError, match="its storage has 8"):
        divided(x, 2.0, y)
    x.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="was freed"):
        divided(x, 2.0, y)


def test_a_negated_view_is_refused_because_its_memory_holds_other_numbers(divided: Any, torch: Any) -> None:
    plain = torch.zeros(2 * EXTENT, dtype=torch.float32)
    negated = torch.complex(torch.zeros(EXTENT), torch.ones(EXTENT)).conj().imag
    y = torch.zeros(EXTENT)
    divided(plain[::2], 1.0, y)
    with pytest.raises(ArgumentError, match="resolve_neg"):
        divided(negated, 1.0, y)


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A kernel of schedsearch: leaky_relu(x @ weight)."""
    workload = schedsearch.dense(m=4, n=4, k=4, dtype="float32", epilogue=("leaky_relu",))
    return schedsearch.compile(workload, db=tmp_path_factory.mktemp("product") / "records.db", target="cpu")


WRITERS = ["own kernel", "bound own kernel", "kernel", "step"]


def writer(name: str, divided: Any, product: Any, torch: Any) -> tuple[Callable[[], None], Any]:
    """A function that writes to a tensor, and the tensor."""
    if "own" in name:
        x, y = torch.ones(EXTENT), torch.zeros(EXTENT)
        return (divided.bind(x, 2.0, y) if "bound" in name else lambda: divided(x, 2.0, y)), y
    given, y = [torch.ones(spec.shape) for spec in product.workload.signature], torch.zeros(4, 4)
    return (product.bind(*given, out=y) if name == "step" else lambda: product(*given, out=y)), y


@pytest.mark.parametrize("name", WRITERS)
def test_autograd_refuses_a_gradient_that_needs_what_a_kernel_overwrote(
    name: str, divided: Any, product: Any, torch: Any
) -> None:
    write, y = writer(name, divided, product, torch)
    for _ in range(2):
        a = torch.ones(y.shape, requires_grad=True)
        loss = (a * y).sum()
        write()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("name", WRITERS)
def test_an_output_that_requires_a_gradient_is_refused_unless_gradients_are_off(
    name: str, divided: Any, product: Any, torch: Any
) -> None:
    write, y = writer(name, divided, product, torch)
    write()
    y.zero_().requires_grad_()
    with pytest.raises(ArgumentError, match="requires a gradient"):
        write()
    assert torch.equal(y, torch.zeros_like(y))
    with torch.no_grad():
        write()
    assert y.min() > 0


def test_a_view_of_a_tensor_with_a_gradient_is_refused_as_an_output(divided: Any, torch: Any) -> None:
    whole = torch.zeros(2 * EXTENT, requires_grad=True)
    for output in (whole[:EXTENT], (whole * 1)[:EXTENT]):
        with pytest.raises(ArgumentError, match="requires a gradient"):
            divided(torch.ones(EXTENT), 2.0, output)


def test_an_output_of_inference_mode_is_taken_only_there(divided: Any, torch: Any) -> None:
    x = torch.ones(EXTENT)
    with torch.inference_mode():
        y = torch.zeros(EXTENT)
        divided(x, 2.0, y)
        assert torch.equal(y, torch.full((EXTENT,), 0.5))
    with pytest.raises(ArgumentError, match="inference mode"):
        divided(x, 2.0, y)


def test_an_output_whose_elements_share_memory_is_refused(divided: Any, torch: Any) -> None:
    for output in (
        torch.zeros(1).expand(EXTENT),
        torch.zeros(EXTENT + 3).as_strided((4, 4), (4, 1)).as_strided((4, 4), (1, 1)),
    ):
        with pytest.raises(ArgumentError, match="no gaps"):
            divided(torch.ones(output.shape), 2.0, output)


def test_a_kernel_called_with_a_zero_of_the_other_sign_computes_with_it(product: Any, torch: Any) -> None:
    """leaky_relu of -1 is -slope: -0.0 for the slope 0.0, and 0.0 for -0.0."""
    x, weight = -torch.eye(4), torch.eye(4)
    default = product(x, weight)
    for slope in (0.0, -0.0, 0.0):
        y = product(x, weight, leaky_relu_slope=slope)
        assert torch.signbit(y.diagonal()).all() == (math.copysign(1, slope) > 0)
        assert torch.equal(product(x, weight), default)


def test_a_bound_call_of_torch_computes_with_a_zero_of_the_other_sign(product: Any, torch: Any) -> None:
    from schedsearch.torch.operators.bound_call import BoundCall

    given = [-torch.eye(4), torch.eye(4)]
    bound = BoundCall(product, range(2), {"leaky_relu_slope": 0}, given, (0.0,))
    for slope in (0.0, -0.0, 0.0):
        y = bound(given, tuple(each.data_ptr() for each in given), (slope,))
        assert torch.signbit(y.diagonal()).all() == (math.copysign(1, slope) > 0)


@pytest.mark.long
@SHORT
@given(data=st.data())
def test_a_repeated_call_of_a_kernel_computes_with_what_its_tensors_are_now(
    product: Any, torch: Any, data: st.DataObject
) -> None:
    """Against PyTorch in float64. Arrays of NumPy, tensors with other strides and views are drawn, too."""
    makers = [
        lambda: torch.randint(-3, 4, (4, 4)).float(),
        lambda: torch.randint(-3, 4, (4, 4)).float().T,
        lambda: torch.randint(-3, 4, (8, 4)).float()[4:],
        lambda: torch.randint(-3, 4, (4, 8)).float()[:, ::2],
        lambda: np.random.default_rng(0).integers(-3, 4, (4, 4)).astype(np.float32),
        lambda: torch.zeros(4, 4, device="meta"),
        lambda: torch.zeros(4, 4).to_sparse(),
        lambda: torch.zeros(4, 4, dtype=torch.float64),
    ]
    x, weight = torch.eye(4), torch.eye(4)
    for _ in range(data.draw(st.integers(2, 6))):
        if data.draw(st.booleans()):
            if type(x) is torch.Tensor and x.device.type == "cpu" and x.layout is torch.strided and x.dtype is torch.float32:
                x.set_(data.draw(st.sampled_from(makers[:4]))())
        else:
            x = data.draw(st.sampled_from(makers))()
        fresh, repeated = outcome(lambda x: product.bind(x, weight)(), x), outcome(lambda x: product(x, weight), x)
        assert type(fresh) is type(repeated)
        if not isinstance(fresh, Exception):
            right = torch.nn.functional.leaky_relu(torch.as_tensor(x).double() @ weight.double(), 0.01)
            for found in (fresh, repeated):
                torch.testing.assert_close(torch.as_tensor(found).double(), right)


def outcome(call: Callable[[Any], Any], x: Any) -> Any:
    try:
        return call(x)
    except ArgumentError as error:
        return error


# ---- graphs whose sizes are computed


@pytest.fixture(scope="module")
def slices() -> Any:
    """x[begin : end], run in both ways."""
    from schedsearch.device import open_device
    from schedsearch.dynamic.executable import DynamicExecutable
    from schedsearch.dynamic.file import DynamicBundle
    from schedsearch.dynamic.graph import DynamicGraph, Size
    from schedsearch.executable.kernels import find_kernels

    graph, target = DynamicGraph(), schedsearch.detect("cpu")
    workload = schedsearch.dyn_strided_slice(x=(4, 4), dynamic=True, dtype="float32")
    given = [graph.input("x", (Size("n", 1, 4), 4), "float32")]
    given += [graph.input(name, (2,), "int64") for name in ("begin", "end", "strides")]
    graph.output(graph.call(workload, *given, name="cut"))
    (chosen,) = find_kernels([workload], "none.db", target).values()
    bundle = DynamicBundle.of(graph, target, lambda _: chosen)
    nets = [DynamicExecutable(replace(bundle, run_mode=run_mode), open_device(target)) for run_mode in ("exact", "bounded")]
    yield nets
    for net in nets:
        net.close()


def shape_of_x(state: dict[str, Any], draw: Any) -> None:
    state["x"].shape = draw(st.sampled_from([(4, 4), (2, 8), (16,)]))


def matrix_as_x(state: dict[str, Any], draw: Any) -> None:
    made = np.arange(32, dtype=np.float32).reshape(8, 4)
    state["x"] = made[draw(st.sampled_from([slice(0, 4), slice(4, 8), slice(1, 4), slice(0, 8, 2)]))]


def transposed_x(state: dict[str, Any], draw: Any) -> None:
    state["x"] = state["x"].T


def numbers_of_begin(state: dict[str, Any], draw: Any) -> None:
    state["begin"][0] = draw(st.integers(0, 3))


STEPS_OF_SLICES = [numbers_of_x, memory_of_x, format_of_x, shape_of_x, matrix_as_x, transposed_x, numbers_of_begin]


@pytest.mark.long
@SHORT
@given(data=st.data())
def test_a_call_of_a_graph_computes_with_what_its_arrays_are_now(slices: Any, data: st.DataObject) -> None:
    """Against NumPy. What a run on new arrays refuses, a repeated call does, too."""
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    state: dict[str, Any] = {"x": x, "begin": np.array([1, 1]), "y": np.zeros(1)}
    end, strides = np.array([4, 4]), np.array([1, 1])
    for _ in range(data.draw(st.integers(2, 6))):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # NumPy is going to refuse assignments of dtype and shape
            try:
                data.draw(st.sampled_from(STEPS_OF_SLICES))(state, data.draw)
            except (AttributeError, ValueError):  # NumPy refuses this for the array
                continue
        x, begin = state["x"], state["begin"]
        for net in slices:
            if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != 4 or x.shape[0] > 4 or not x.flags.c_contiguous:
                with pytest.raises(ArgumentError):
                    net(x, begin, end, strides)
                continue
            found = net(x, begin, end, strides)
            if net.bundle.run_mode == "bounded":
                found = found[0][tuple(map(slice, found[1]))]
            np.testing.assert_array_equal(found, x[begin[0] :, 1:])


# ---- operators of PyTorch


@pytest.mark.long
@SHORT
@given(data=st.data())
def test_a_call_of_an_operator_computes_with_what_its_tensors_are_now(product: Any, torch: Any, data: st.DataObject) -> None:
    """Bound calls are found by the description of tensors, as operators do. Against PyTorch in float64."""
    from schedsearch.torch.operators.bound_call import BoundCall

    describe = eval(f"lambda t: ({TENSOR_SOURCE.format('t')})")
    ready: dict[Any, BoundCall] = {}
    makers = [
        lambda: torch.randint(-3, 4, (4, 4)).float(),
        lambda: torch.randint(-3, 4, (4, 4)).float().T,
        lambda: torch.randint(-3, 4, (8, 4)).float()[4:],
        lambda: torch.randint(-3, 4, (4, 8)).float()[:, ::2],
        lambda: torch.randint(-3, 4, (17,)).float()[1:].view(4, 4),
    ]
    x, weight, slope = torch.eye(4), torch.randint(-3, 4, (4, 4)).float(), 0.5
    for _ in range(data.draw(st.integers(2, 6))):
        change = data.draw(st.sampled_from(["x", "set", "data", "numbers", "slope", "weight", "swapped"]))
        other = data.draw(st.sampled_from(makers))()
        if change == "x":
            x = other
        elif change == "set":
            x.set_(other)
        elif change == "data":
            x.data = other
        elif change == "numbers":
            x.fill_(data.draw(st.sampled_from([-1.0, 2.0])))
        elif change == "weight":
            weight = other
        elif change == "swapped":
            x, weight = weight, x
        else:
            slope = data.draw(st.sampled_from([0.0, -0.0, 0.25, 1.0]))
        key = describe(x), describe(weight)
        if key not in ready:
            ready[key] = BoundCall(product, range(2), {"leaky_relu_slope": 0}, (x, weight), (slope,))
        y = ready[key]((x, weight), (x.data_ptr(), weight.data_ptr()), (slope,))
        right = torch.nn.functional.leaky_relu(x.double() @ weight.double().T, slope)
        torch.testing.assert_close(y.double(), right)
        assert torch.equal(torch.signbit(y[right < 0]), torch.signbit(right[right < 0]))


@pytest.mark.parametrize("form", ["kept", "copied"])
def test_a_bound_call_of_torch_refuses_a_tensor_whose_memory_was_freed(
    form: str, product: Any, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that the kernel would get as a copy: PyTorch does not see that there is nothing to copy."""
    from schedsearch.torch.operators.bound_call import BoundCall

    def tensors() -> list[Any]:
        return [torch.ones(4, 4).T if form == "copied" else torch.ones(4, 4), torch.eye(4)]

    given = tensors()
    bound = BoundCall(product, range(2), {"leaky_relu_slope": 0}, given, (0.0,))
    given[0].untyped_storage().resize_(0)
    with monkeypatch.context() as patch, pytest.raises(UsageError, match="has no memory; it was freed"):
        for name in ("contiguous", "clone"):  # they would read it
            patch.setattr(torch.Tensor, name, lambda *args, **named: pytest.fail("PyTorch copies what was freed"))
        bound(given, tuple(each.data_ptr() for each in given), (0.0,))
    given = tensors()
    assert torch.equal(bound(given, tuple(each.data_ptr() for each in given), (0.0,)), torch.ones(4, 4))
