"""The parameters of a workload are an object of a class of the operator, with types, and a mapping for generic code."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from schedsearch import conv2d, dense, softmax
from schedsearch.ops import Op, operator
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.params import Params
from schedsearch.ops.registry import BUILT_IN, OF_DECORATORS, RECORDED_ONLY
from schedsearch.ops.softmax import SoftmaxParams

LAYER = conv2d(n=1, h=8, w=8, c=16, k=32, r=3, s=3, padding=1)


def test_a_workload_carries_the_class_of_its_operator() -> None:
    assert type(LAYER.params) is Conv2dParams
    assert (LAYER.params.stride, LAYER.params.padding, LAYER.params.epilogue) == ((1, 1), (1, 1, 1, 1), ())


def test_generic_code_reads_them_as_a_mapping() -> None:
    assert LAYER.params["padding"] == (1, 1, 1, 1)
    assert list(LAYER.params) == list(operator("conv2d").parameters())
    assert dict(LAYER.params)["k"] == 32 and "multiplier" not in LAYER.params
    with pytest.raises(KeyError, match="multiplier"):
        LAYER.params["multiplier"]


@pytest.mark.parametrize("name", [*BUILT_IN, *RECORDED_ONLY, *OF_DECORATORS])
def test_each_operator_declares_its_parameters_in_a_frozen_class(name: str) -> None:
    declared = operator(name).params_type
    assert declared is not None and issubclass(declared, Params)
    assert declared.__dataclass_params__.frozen
    assert [field.name for field in dataclasses.fields(declared)] == list(operator(name).parameters())


def test_parameters_never_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LAYER.params.k = 64
    assert LAYER.params.replace(k=64).k == 64 and LAYER.params.k == 32


def test_parameters_of_equal_workloads_are_equal_and_have_one_hash() -> None:
    same = pickle.loads(pickle.dumps(LAYER)).params
    assert same == LAYER.params and hash(same) == hash(LAYER.params)
    assert LAYER.params != LAYER.replace(k=64).params


def test_those_of_another_operator_are_refused_by_name() -> None:
    assert SoftmaxParams.of(softmax(x=(4, 8)).params).axis == -1
    with pytest.raises(TypeError, match="expected the parameters SoftmaxParams, got DenseParams"):
        SoftmaxParams.of(dense(m=1, n=2, k=3).params)


class Twice(Op):
    """An operator that declares no class."""

    name = "twice"
    reference = ""

    def parameters(self):
        return {"n": operator("dense").parameters()["n"]}

    def arguments(self, params):
        return ()

    def outputs(self, params):
        return ()


def test_an_operator_without_a_class_has_an_immutable_mapping() -> None:
    params = Twice().typed({"n": 3})
    assert params == {"n": 3}
    with pytest.raises(TypeError):
        params["n"] = 4


def test_attributes_of_a_workload_are_its_parameters() -> None:
    assert LAYER.k == LAYER.params.k
    with pytest.raises(AttributeError, match="conv2d workload has no parameter 'multiplier'"):
        _ = LAYER.multiplier
