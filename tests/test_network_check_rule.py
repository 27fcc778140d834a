"""What counts as a difference from the model: right networks pass, and wrong ones do not, without compiling anything."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from schedsearch.errors import WrongNetworkError
from schedsearch.network_check.rule import difference, surely_equal

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from schedsearch.network_check.check import Checker  # noqa: E402
from schedsearch.network_check.draws import Wanted  # noqa: E402
from schedsearch.network_check.rule import Difference  # noqa: E402
from schedsearch.network_check.source import Source  # noqa: E402
from schedsearch.network_check.subjects import wrong  # noqa: E402

Array = np.ndarray[Any, np.dtype[Any]]


class Emulated:
    """A network that computes every value of a model in float64, rounds it, and then spoils one of them.

    Attributes:
        spoil: value -> what becomes of it.
    """

    what = "the network"

    def __init__(self, model: Any, dtype: str, spoil: Mapping[str, Any]) -> None:
        self._model, self._dtype, self._spoil = _in_double(model), dtype, spoil
        (x,) = model.graph.input
        shape = tuple(each.dim_value for each in x.type.tensor_type.shape.dim)
        self.inputs = [Wanted("x", shape, dtype)]
        self.sizes: Mapping[str, int] = {node.output[0]: int(np.prod(shape)) for node in model.graph.node[:-1]}

    def dtype(self, value: str) -> str:
        return self._dtype

    def outputs(self, inputs: Mapping[str, Array]) -> list[Array]:
        return [self._run(inputs)[self._model.graph.output[0].name]]

    def values(self, inputs: Mapping[str, Array], names: Collection[str]) -> dict[str, Array]:
        found = self._run(inputs)
        return {name: found[name] for name in names}

    def untaken(self) -> list[str]:
        return []

    def complaint(self, value: str, apart: Difference, source: str) -> str:
        return wrong(self.what, value, apart, source)

    def _run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        known: dict[str, Array] = {"x": np.asarray(inputs["x"], np.float64)}
        constants = {each.name: numpy_helper.to_array(each) for each in self._model.graph.initializer}
        for node in self._model.graph.node:
            feeds = {name: known.get(name, constants.get(name)) for name in node.input}
            infos = [helper.make_tensor_value_info(name, TensorProto.DOUBLE, None) for name in (*feeds, node.output[0])]
            graph = helper.make_graph([node], "one", infos[:-1], infos[-1:])
            one = helper.make_model(graph, opset_imports=self._model.opset_import, ir_version=self._model.ir_version)
            with np.errstate(all="ignore"):
                (found,) = ReferenceEvaluator(one).run(None, feeds)
                rounded = np.asarray(found).astype(self._dtype).astype(np.float64)
            spoil = self._spoil.get(node.output[0], lambda array: array)
            known[node.output[0]] = spoil(rounded)
        return {name: each.astype(np.float32) for name, each in known.items()}


def _in_double(model: Any) -> Any:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for each in made.graph.initializer:
        each.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(each).astype(np.float64), each.name))
    return made


CALM = ("Relu", "Sigmoid", "Tanh", "Neg", "Abs", "HardSwish", "Elu", "Softplus", "LeakyRelu", "Erf", "Exp", "Softmax")
CONSTANTS = ("Add", "Sub", "Mul", "Div", "Max", "Min", "MatMul")
EXTENTS = (6, 16)


@st.composite
def chains(draw: st.DrawFn) -> Any:
    """Models of one to six nodes, each of which reads the one before."""
    nodes, constants, value = [], [], "x"
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    for number in range(draw(st.integers(1, 6))):
        op = draw(st.sampled_from((*CALM, *CONSTANTS)))
        inputs = [value]
        if op in CONSTANTS:
            shape = (EXTENTS[1], EXTENTS[1]) if op == "MatMul" else (EXTENTS[1],)
            array = rng.standard_normal(shape).astype(np.float32)
            array = np.where(np.abs(array) < 0.1, np.float32(0.1), array) if op == "Div" else array
            constants.append(numpy_helper.from_array(array, f"c{number}"))
            inputs.append(f"c{number}")
        value = f"v{number}"
        nodes.append(helper.make_node(op, inputs, [value], name=f"n{number}"))
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, EXTENTS) for name in ("x", value)]
    graph = helper.make_graph(nodes, "chain", infos[:1], infos[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def checked(model: Any, folder: Path, dtype: str = "float32", spoil: Mapping[str, Any] | None = None) -> None:
    onnx.save(model, folder / "m.onnx")
    source = Source.of_file(folder / "m.onnx", dtype)
    Checker(source, lambda text: None, 0.0).check(Emulated(model, dtype, spoil or {}))


@given(model=chains(), dtype=st.sampled_from(["float32", "float16"]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_right_network_passes_in_every_format(tmp_path: Path, model: Any, dtype: str) -> None:
    checked(model, tmp_path, dtype)


def _three_quarters(array: Array) -> Array:
    return array * 0.75


def _one_channel_shifted(array: Array) -> Array:
    found = array.copy()
    found[:, 3] = array[:, 2]
    return found


@given(model=chains(), dtype=st.sampled_from(["float32", "float16"]), data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.long(of="networks")
def test_a_value_that_is_three_quarters_of_the_right_one_is_named(
    tmp_path: Path, model: Any, dtype: str, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([node.output[0] for node in model.graph.node]))
    probe = Emulated(model, dtype, {})
    values = probe._run({"x": np.random.default_rng(0).standard_normal(EXTENTS)})
    assume(np.isfinite(values[name]).all() and np.abs(values[name]).max() > 1e-3)
    # Nodes behind it may not hide it, as a relu of negative numbers would.
    spoiled = Emulated(model, dtype, {name: _three_quarters})._run({"x": np.random.default_rng(0).standard_normal(EXTENTS)})
    result = model.graph.output[0].name
    scale = np.abs(values[result]).max()
    assume(np.isfinite(values[result]).all() and np.abs(values[result] - spoiled[result]).max() > 0.05 * scale)
    with pytest.raises(WrongNetworkError, match=rf"first value that differs is '{name}'"):
        checked(model, tmp_path, dtype, {name: _three_quarters})


def test_steps_at_ties_are_no_differences_and_steps_everywhere_are() -> None:
    rng = np.random.default_rng(0)
    exact = rng.uniform(-100, 100, 100_000)
    right = np.rint(exact).astype(np.int8)
    noisy = [np.rint(exact * (1 + 1e-4 * rng.uniform(-1, 1, exact.shape))).astype(np.int8) for _ in range(4)]
    at_ties = np.rint(exact * (1 + 1e-4 * rng.uniform(-1, 1, exact.shape))).astype(np.int8)
    assert (at_ties != right).any()
    assert difference(at_ties, right, noisy, dtype="int8") is None
    assert difference(np.floor(exact).astype(np.int8), right, noisy, dtype="int8") is not None
    two_steps = right.copy()
    two_steps[7] += 2
    apart = difference(two_steps, right, noisy, dtype="int8")
    assert apart is not None and apart.index == (7,)


def test_one_wrong_element_among_many_is_found() -> None:
    right = np.random.default_rng(0).standard_normal((1, 8, 300, 300)).astype(np.float32)
    noisy = [right * np.float32(1 + 1e-6), right * np.float32(1 - 1e-6)]
    found = right.copy()
    found[0, 5, 17, 4] += 0.5
    apart = difference(found, right, noisy)
    assert apart is not None and apart.index == (0, 5, 17, 4) and apart.count == 1


def test_infinities_and_nan_must_be_the_models_where_noise_does_not_make_them() -> None:
    right = np.array([1.0, np.inf, np.nan, 2.0], np.float32)
    noisy = [right, right]
    assert difference(right.copy(), right, noisy) is None
    assert difference(np.array([1.0, -np.inf, np.nan, 2.0], np.float32), right, noisy) is not None
    assert difference(np.array([1.0, np.inf, 0.0, 2.0], np.float32), right, noisy) is not None
    assert difference(np.array([np.nan, np.inf, np.nan, 2.0], np.float32), right, noisy) is not None
    overflowing = [np.array([1.0, np.inf, np.nan, np.inf], np.float32)]
    assert difference(np.array([1.0, np.inf, np.nan, np.inf], np.float32), right, overflowing) is None


def test_another_shape_is_a_difference() -> None:
    right = np.zeros((2, 3), np.float32)
    apart = difference(np.zeros((3, 2), np.float32), right, [right])
    assert apart is not None and "shape [3, 2] in ours, [2, 3] in theirs" in apart.text("ours", "theirs")


@pytest.mark.parametrize(
    ("found", "right", "is_gross"),
    [
        ([1.0, 2.0], [1.0, 1.0], True),
        ([np.inf, 1.0], [1.0, 1.0], True),
        ([1.0, 1.0 + 2e-5], [1.0, 1.0], False),  # 0.002 % of the largest
        ([np.uint8(9), np.uint8(2)], [np.uint8(9), np.uint8(0)], False),  # two steps
        ([np.uint8(9), np.uint8(200)], [np.uint8(9), np.uint8(0)], True),
    ],
)
def test_noise_that_was_taken_for_too_small_does_not_explain_a_gross_difference(
    found: list[Any], right: list[Any], is_gross: bool
) -> None:
    truth = np.array(right)
    apart = difference(np.array(found), truth, [truth])
    assert apart is not None and apart.is_gross == is_gross


@settings(deadline=None, max_examples=200)
@given(
    shape=st.sampled_from([(7,), (2, 3), (2, 3, 8, 9)]),
    seed=st.integers(0, 2**32 - 1),
    apart=st.sampled_from([0.0, 1e-8, 1e-7, 1e-6, 3e-6, 1e-5, 1e-3, np.inf, np.nan]),
    roundoff=st.sampled_from([0.0, 2.0**-22, 2.0**-11]),
)
def test_what_needs_no_noisy_run_is_no_difference_with_any(
    shape: tuple[int, ...], seed: int, apart: float, roundoff: float
) -> None:
    rng = np.random.default_rng(seed)
    right = (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3)).astype(np.float32)
    found = (right + apart * rng.standard_normal(shape) * np.abs(right).max()).astype(np.float32)
    noisy = [(right.astype(np.float64) * (1 + sign * roundoff * 1.01)) for sign in (1, -1)]
    if surely_equal(found, right, roundoff):
        assert difference(found, right, noisy) is None
    if roundoff and apart < roundoff / 64:
        assert surely_equal(found, right, roundoff)


@settings(deadline=None, max_examples=200)
@given(
    shape=st.sampled_from([(7,), (2, 3), (2, 3, 8, 9)]),
    seed=st.integers(0, 2**32 - 1),
    apart=st.sampled_from([0.0, 1e-7, 1e-5, 1e-3, 1e-1, np.inf, np.nan]),
    noise=st.sampled_from([0.0, 1e-6, 1e-3]),
)
def test_what_one_noisy_run_decides_is_no_difference_with_more_of_them(
    shape: tuple[int, ...], seed: int, apart: float, noise: float
) -> None:
    rng = np.random.default_rng(seed)
    right = (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 3)).astype(np.float32)
    found = (right + apart * rng.standard_normal(shape) * np.abs(right).max()).astype(np.float32)
    first, second = ((right + noise * rng.standard_normal(shape) * np.abs(right)).astype(np.float32) for _ in range(2))
    if surely_equal(found, right, noisy=first):
        assert difference(found, right, [first]) is None and difference(found, right, [first, second]) is None
    assert surely_equal(right, right, noisy=first) and surely_equal(first, right, noisy=first)


@pytest.mark.parametrize(
    ("found", "right"),
    [
        (np.float32([1, 2, 3]), np.float32([[1, 2, 3]])),
        (np.int8([1, 2, 3]), np.int8([1, 2, 4])),
        (np.float32([1, np.nan]), np.float32([1, np.nan])),
        (np.float32([1, np.inf]), np.float32([1, np.inf])),
        (np.float32([1, 1.001]), np.float32([1, 1])),
        (np.float32([1e30, 0]), np.float32([1e30, 1e29])),
    ],
)
def test_other_values_need_noisy_runs(found: Array, right: Array) -> None:
    assert not surely_equal(found, right, 2.0**-22)
