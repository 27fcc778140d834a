"""gather and scatter: the operators, their references and templates, against NumPy and ONNX's node cases."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from bandwidth_support import H200, arrays_of, attributes, node_cases, verdict
from dynamic_support import assert_equal, emulated, expected, on_device

from schedsearch import Workload, gather, scatter
from schedsearch import compile as compile_
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.device.index_notes import IndexNotes
from schedsearch.errors import IndexRangeError
from schedsearch.ops.dtypes import encode
from schedsearch.ops.gather import GATHER
from schedsearch.ops.scatter import SCATTER
from schedsearch.ops.wrong_index import WRONG_INDEX
from schedsearch.template import load_template
from schedsearch.templates.indexing import cuda_kernels, places
from schedsearch.testing.op_contract import OpContract
from schedsearch.testing.template_contract import TemplateContract

TEMPLATES = {op: (load_template(f"{op}_cuda"), load_template(f"{op}_cpu")) for op in ("gather", "scatter")}
MODULES = cuda_kernels, places


class TestGather(OpContract):
    op = GATHER
    examples = (
        {"x": [5, 7], "indices": [3]},
        {"x": [2, 5, 3], "indices": [4, 2], "axis": 1, "dtype": "int64", "index_dtype": "int32"},
        {"x": [4, 6], "indices": [4, 2], "axis": -1, "by": "elements", "dynamic": True},
        {"x": [2, 3, 4], "indices": [2, 5, 1], "by": "tuples", "batch_dims": 1, "dtype": "bfloat16"},
    )
    wrong = (
        ({"x": [5, 7], "indices": [3], "axis": 2}, "axis"),
        ({"x": [5, 7], "indices": [3], "by": "elements"}, "indices"),
        ({"x": [5, 7], "indices": [3, 3], "by": "tuples"}, "indices"),
        ({"x": [5, 7], "indices": [4, 1], "by": "tuples", "batch_dims": 1}, "batch_dims"),
        ({"x": [5, 7], "indices": [3], "batch_dims": 1}, "batch_dims"),
        ({"x": [1] * 8, "indices": [2, 2]}, "indices"),
        ({"x": [2**31 - 1] * 2, "indices": [2**31 - 1, 2]}, "indices"),
    )

    def test_an_axis_has_one_number(self) -> None:
        assert gather(x=(5, 7), indices=(3,), axis=-1).id == gather(x=(5, 7), indices=(3,), axis=1).id


class TestScatter(OpContract):
    op = SCATTER
    examples = (
        {"x": [5, 7], "indices": [3, 2], "axis": 1},
        {"x": [5, 7], "indices": [3, 1], "by": "tuples", "reduction": "add", "dynamic": True},
        {"x": [5, 7], "indices": [3, 2], "by": "tuples", "dtype": "uint8", "index_dtype": "int32"},
    )
    wrong = (
        ({"x": [5, 7], "indices": [6, 2], "axis": 1}, "indices"),
        ({"x": [5, 7], "indices": [3, 2], "dtype": "float16", "reduction": "max"}, "dtype"),
        ({"x": [5, 7], "indices": [3, 2], "reduction": "mul"}, "reduction"),
    )


GATHERS: list[dict[str, Any]] = [
    dict(x=(7, 24), indices=(5, 3)),
    dict(x=(3, 6, 5), indices=(4,), axis=1, dtype="uint8", index_dtype="int32"),
    dict(x=(2, 3, 40), indices=(9,), axis=-1, dtype="float32"),
    dict(x=(4, 6, 3), indices=(3, 8, 2), axis=1, by="elements", dtype="int64"),
    dict(x=(2, 5, 4, 8), indices=(2, 7, 2), by="tuples", batch_dims=1, dtype="float32"),
    dict(x=(5, 4), indices=(6, 2), by="tuples", dtype="bfloat16"),
]
SCATTERS: list[dict[str, Any]] = [
    dict(x=(7, 5), indices=(4, 3), axis=0, dtype="int32"),
    dict(x=(6, 24), indices=(9, 1), by="tuples", dtype="float16"),
    dict(x=(4, 5, 3), indices=(8, 2), by="tuples", dtype="uint8", index_dtype="int32"),
    dict(x=(6, 10), indices=(9, 1), by="tuples", reduction="add", dtype="float32"),
    dict(x=(4, 9), indices=(4, 12), axis=1, reduction="max", dtype="int64"),
    dict(x=(4, 9), indices=(3, 12), axis=1, reduction="min", dtype="float32"),
]
WORKLOADS = [*(gather(**each) for each in GATHERS), *(scatter(**each) for each in SCATTERS)]


def example(workload: Workload, seed: int = 0, wrong: bool = True) -> dict[str, Any]:
    """Whole numbers; indices of both signs and, if `wrong`, some that are out of range."""
    rng = np.random.default_rng(seed)
    found = {}
    for spec in workload.signature:
        low, high = (0, 200) if spec.dtype == "uint8" else (-100, 101)
        if spec.below is not None:
            low, high = (-spec.below, spec.below) if spec.name == "indices" else (spec.below // 2, spec.below // 2 + 1)
        found[spec.name] = rng.integers(low, high, spec.shape)
        if wrong and spec.name == "indices":
            found[spec.name].reshape(-1)[::5] = spec.below + 20
            found[spec.name].reshape(-1)[1::5] = -spec.below - 20
    return found


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.label)
def test_emulated_kernels_are_the_definition(monkeypatch: pytest.MonkeyPatch, workload: Workload) -> None:
    template, _ = TEMPLATES[workload.op]
    space = template.space(workload, H200)
    for each in (workload, workload.replace(dynamic=True)):
        arrays = example(each)
        widest = {knob.name: knob.values[-1] for knob in space.knobs} | {"threads": 128, "each": 2}
        widest["lanes"] = min(widest["lanes"], 128)
        for config in (Config(widest), Config(vector=space.values["vector"][0], lanes=1, each=1, threads=128)):
            assert_equal(each, emulated(monkeypatch, template, each, arrays, config, *MODULES), expected(each, arrays))


@pytest.mark.parametrize("workload", WORKLOADS[:2] + WORKLOADS[3:5] + WORKLOADS[7:10], ids=lambda each: each.label)
def test_a_cpu_kernel_is_the_definition(device: CpuDevice, workload: Workload) -> None:
    _, template = TEMPLATES[workload.op]
    each = workload.replace(dynamic=workload.index_dtype == "int64")
    arrays = example(each)
    assert_equal(each, on_device(device, template, each, arrays), expected(each, arrays))


def one_wrong(workload: Workload, end: int) -> tuple[dict[str, Any], tuple[int, ...], int]:
    """An example with one index out of range, at one of both ends: the arrays, its place, its axis."""
    arrays = example(workload, wrong=False)
    place = tuple(n // 2 for n in workload.indices)
    axis = workload.params.get("batch_dims", 0) + place[-1] if workload.by == "tuples" else workload.axis
    arrays["indices"][place] = workload.x[axis] if end else -workload.x[axis] - 1
    return arrays, place, axis


def noted(workload: Workload, words: Any) -> tuple[tuple[int, ...], int] | None:
    """The place and the index in the words that a kernel was given."""
    return (tuple(map(int, np.unravel_index(words[0] - 1, workload.indices))), int(words[1])) if words[0] else None


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.label)
def test_emulated_kernels_note_the_index_that_is_out_of_range(monkeypatch: pytest.MonkeyPatch, workload: Workload) -> None:
    template, _ = TEMPLATES[workload.op]
    for end, each in enumerate((workload, workload.replace(dynamic=True))):
        arrays, place, _ = one_wrong(each, end)
        if each.dynamic:
            arrays["indices_extents"][0] = place[0] + 1
        words = np.zeros(2, np.int64)
        emulated(monkeypatch, template, each, arrays, None, *MODULES, also={WRONG_INDEX: words})
        assert noted(each, words) == (place, arrays["indices"][place])
        words[:] = 5, 7  # what was noted before stays
        emulated(monkeypatch, template, each, arrays, None, *MODULES, also={WRONG_INDEX: words})
        assert words.tolist() == [5, 7]
        words[:] = 0
        if each.dynamic:
            arrays["indices_extents"][0] = place[0]  # what is not in use is not looked at
        else:
            arrays = example(each, wrong=False)
        emulated(monkeypatch, template, each, arrays, None, *MODULES, also={WRONG_INDEX: words})
        assert not words.any()


@pytest.mark.parametrize("workload", (WORKLOADS[3], WORKLOADS[4], WORKLOADS[6], WORKLOADS[9]), ids=lambda each: each.label)
def test_calls_on_a_cpu_raise_for_the_index_that_is_out_of_range(workload: Workload) -> None:
    with compile_(workload, target="cpu", allow=("default",)) as kernel:
        good = {name: stored_as(workload, name, array) for name, array in example(workload, wrong=False).items()}
        kernel(**good)
        for end in (0, 1):
            arrays, place, axis = one_wrong(workload, end)
            given = {name: stored_as(workload, name, array) for name, array in arrays.items()}
            extent, index = workload.x[axis], arrays["indices"][place]
            text = f"the index at {list(place)} of 'indices' is {index}, but axis {axis} of 'x' has extent {extent}"
            with pytest.raises(IndexRangeError, match=re.escape(f"{text}; allowed: {-extent} to {extent - 1}")):
                kernel(**given)
            step = kernel.bind(**given)
            step()
            with pytest.raises(IndexRangeError, match=re.escape(text)):
                kernel.check()
            kernel.check()
            kernel(**good)


def stored_as(workload: Workload, name: str, array: Any) -> Any:
    spec = next(each for each in workload.signature if each.name == name)
    return encode(np.ascontiguousarray(array), spec.dtype)


def test_verification_accepts_a_cpu_kernel(device: CpuDevice) -> None:
    for workload in (WORKLOADS[2].replace(dynamic=True), WORKLOADS[7]):
        assert verdict(device, TEMPLATES[workload.op][1], workload) is None, workload.label


def test_verification_finds_a_kernel_that_ignores_the_extents(device: CpuDevice) -> None:
    workload = gather(x=(50, 8), indices=(40,), dynamic=True)
    found = verdict(device, TEMPLATES["gather"][1], workload, workload.replace(axis=1, x=(8, 50)))
    assert found is not None and "elements are wrong" in found


def test_no_update_is_lost_and_the_last_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 rows for 3 targets, also as NumPy does it one after the other."""
    workload = scatter(x=(3, 4), indices=(100, 1), by="tuples", dtype="int32")
    indices = np.random.default_rng(0).integers(0, 3, (100, 1))
    updates = np.arange(400).reshape(100, 4)
    x = np.zeros((3, 4), np.int32)
    arrays = {"x": x, "indices": indices, "updates": updates}
    found = emulated(monkeypatch, TEMPLATES["scatter"][0], workload, arrays, None, *MODULES)["y"]
    for row, target in enumerate(indices[:, 0]):
        x[target] = updates[row]
    np.testing.assert_array_equal(found, x)
    summed = emulated(
        monkeypatch, TEMPLATES["scatter"][0], workload.replace(reduction="add"), arrays | {"x": 0 * x}, None, *MODULES
    )["y"]
    np.testing.assert_array_equal(summed, [updates[indices[:, 0] == target].sum(axis=0) for target in range(3)])


class TestGatherCuda(TemplateContract):
    template, target = TEMPLATES["gather"][0], H200
    accepted = (
        gather(x=(30000, 1024), indices=(32, 512)),
        gather(x=(1000, 80), indices=(1000, 5), by="elements", axis=1, dtype="float32", dynamic=True),
    )
    refused = ((gather(x=(4, 5), indices=(2**31 - 1,), axis=1, dtype="int8"), "rows"),)


class TestGatherCpu(TemplateContract):
    template, target, compiled = TEMPLATES["gather"][1], detect("cpu"), 1
    accepted = (gather(x=(300, 24), indices=(32,)),)


class TestScatterCuda(TemplateContract):
    template, target, compiled = TEMPLATES["scatter"][0], H200, 3
    accepted = (
        scatter(x=(30000, 1024), indices=(512, 1), by="tuples", dtype="float16"),
        scatter(x=(100, 80), indices=(100, 5), axis=1, reduction="add", dynamic=True),
        scatter(x=(100, 80), indices=(100, 5), axis=1, reduction="max"),
    )


class TestScatterCpu(TemplateContract):
    template, target, compiled = TEMPLATES["scatter"][1], detect("cpu"), 1
    accepted = (scatter(x=(300, 24), indices=(32, 1), by="tuples"),)


@pytest.mark.gpu
def test_kernels_on_the_device(gpu: Any) -> None:
    for workload in WORKLOADS:
        for each in (workload, workload.replace(dynamic=True)):
            arrays = example(each)
            template = TEMPLATES[each.op][0]
            assert_equal(each, on_device(gpu, template, each, arrays), expected(each, arrays))
            assert verdict(gpu, template, each) is None, each.label


@pytest.mark.gpu
def test_kernels_on_the_device_note_an_index(gpu: Any) -> None:
    """In pinned memory of the host, which is not copied. What was noted first stays until it was read."""
    notes = IndexNotes(gpu, ["call"], lambda *found: f"{found}")
    for workload in WORKLOADS:
        template = TEMPLATES[workload.op][0]
        for end in (0, 1):
            arrays, place, _ = one_wrong(workload, end)
            on_device(gpu, template, workload, arrays, also=notes.buffers("call"))
            found = "call", int(np.ravel_multi_index(place, workload.indices)), int(arrays["indices"][place])
            with pytest.raises(IndexRangeError, match=re.escape(f"{found}")):
                notes.check()
            on_device(gpu, template, workload, example(workload, wrong=False), also=notes.buffers("call"))
            notes.check()
    notes.close()


# ---- ONNX

pytest.importorskip("onnx", reason="needs onnx")
CASES = {
    name: case
    for name, case in node_cases("gather", "gatherelements", "gathernd", "scatterelements", "scatternd").items()
    if name.startswith(("test_gather", "test_scatter"))
}


def workload_of(case: Any, x: Any, indices: Any) -> Workload | None:
    """The case's only node as a workload; None for reductions that scatter lacks."""
    node = case.model.graph.node[0]
    given = attributes(node)
    shape: dict[str, Any] = dict(x=x.shape, indices=indices.shape or (1,), dtype=str(x.dtype))
    if node.op_type.endswith("ND"):
        shape["by"] = "tuples"
    else:
        shape |= dict(axis=given.get("axis", 0), by="elements" if node.op_type.endswith("Elements") else "slices")
    if node.op_type.startswith("Scatter"):
        reduction = given.get("reduction", "none")
        return scatter(**shape, reduction=reduction) if reduction != "mul" else None
    return gather(**shape, batch_dims=given.get("batch_dims", 0))


def test_there_are_cases_of_every_operator() -> None:
    assert {case.model.graph.node[0].op_type for case in CASES.values()} == {
        "Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"
    }  # fmt: skip
    assert len(CASES) >= 20


def test_cases_of_onnx(device: CpuDevice) -> None:
    for name, case in CASES.items():
        inputs, (y,) = arrays_of(case)
        workload = workload_of(case, *inputs[:2])
        if workload is not None:
            arrays = dict(zip(("x", "indices", "updates"), inputs))
            np.testing.assert_array_equal(expected(workload, arrays)["y"].reshape(y.shape), y, err_msg=name)
            if name in ("test_gather_1", "test_gather_elements_1", "test_scatternd_add"):
                found = on_device(device, TEMPLATES[workload.op][1], workload, arrays)["y"]
                np.testing.assert_array_equal(found.reshape(y.shape), y, err_msg=name)
