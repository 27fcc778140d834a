"""gather and scatter: the operators, their references and templates, against NumPy and ONNX's node cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from bandwidth_support import H200, arrays_of, attributes, node_cases, verdict
from dynamic_support import assert_equal, emulated, expected, on_device
from gather_scatter_support import MODULES, OPEN, TEMPLATES, WORKLOADS, example
from onnx import helper
from onnx.reference import ReferenceEvaluator

from schedsearch import Workload, gather, scatter
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.ops.gather import GATHER
from schedsearch.ops.scatter import SCATTER
from schedsearch.ops.wrong_index import WRONG_INDEX
from schedsearch.templates.indexing import cpu
from schedsearch.testing.op_contract import OpContract
from schedsearch.testing.template_contract import TemplateContract


class TestGather(OpContract):
    op = GATHER
    examples = (
        {"x": [5, 7], "indices": [3]},
        {"x": [2, 5, 3], "indices": [4, 2], "axis": 1, "dtype": "int64", "index_dtype": "int32"},
        {"x": [4, 6], "indices": [4, 2], "axis": -1, "by": "elements", "dynamic": True},
        {"x": [4, 6], "indices": [4, 2], "axis": 1, "dynamic": True, "dynamic_x": True},
        {"x": [4, 6, 5], "indices": [2, 2], "by": "tuples", "dynamic_x": True, "dtype": "float32"},
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
        {"x": [5, 7], "indices": [3, 1], "by": "tuples", "dynamic": True, "dynamic_x": True},
        {"x": [5, 7], "indices": [3, 2], "by": "tuples", "dtype": "uint8", "index_dtype": "int32"},
    )
    wrong = (
        ({"x": [5, 7], "indices": [6, 2], "axis": 1}, "indices"),
        ({"x": [5, 7], "indices": [3, 2], "dtype": "float16", "reduction": "max"}, "dtype"),
        ({"x": [5, 7], "indices": [3, 2], "reduction": "mul"}, "reduction"),
    )


def numpy_of(workload: Workload, arrays: dict[str, Any]) -> Any:
    """y as ONNX's reference computes it of the parts of the arrays that are in use."""
    kind = {"slices": "", "elements": "Elements", "tuples": "ND"}[workload.by]
    name = f"{workload.op.capitalize()}{kind}"
    given = {"axis": workload.axis} if workload.by != "tuples" else {}
    given |= {"batch_dims": workload.batch_dims} if name == "GatherND" else {}
    given |= {"reduction": workload.reduction} if workload.op == "scatter" else {}
    used = {}
    for spec in workload.signature:
        if not spec.name.endswith("_extents"):
            number = np.int64 if spec.name == "indices" or "int" in workload.dtype else np.float32
            used[spec.name] = np.asarray(arrays[spec.name]).astype(number).reshape(spec.shape)
    for argument in ("x", "indices"):
        if f"{argument}_extents" in arrays:
            used[argument] = used[argument][tuple(map(slice, arrays[f"{argument}_extents"]))]
    if workload.op == "scatter":
        shape = used["indices"].shape
        if workload.by == "tuples":
            shape = (*shape[:-1], *used["x"].shape[shape[-1] :])
        used["updates"] = used["updates"][tuple(map(slice, shape))]
    part: Any = ...
    if workload.by == "elements":  # ONNX's reference takes as many indices as elements of x, but along the axis
        part = tuple(slice(None if axis == workload.axis else n) for axis, n in enumerate(used["indices"].shape))
    y = _of_onnx(name, used | {"x": used["x"][part]}, given)
    if workload.op == "gather":
        return y
    used["x"][part] = y
    return used["x"]


def _of_onnx(name: str, arrays: dict[str, Any], given: dict[str, Any]) -> Any:
    dtypes = {each: helper.np_dtype_to_tensor_dtype(array.dtype) for each, array in arrays.items()}
    infos = [helper.make_tensor_value_info(each, dtype, None) for each, dtype in dtypes.items()]
    y = helper.make_tensor_value_info("y", dtypes["x"], None)
    graph = helper.make_graph([helper.make_node(name, list(arrays), ["y"], **given)], "one", infos, [y])
    return ReferenceEvaluator(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])).run(None, arrays)[0]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.label)
@pytest.mark.mostly_long(3)
def test_emulated_kernels_are_the_definition(monkeypatch: pytest.MonkeyPatch, workload: Workload) -> None:
    template, _ = TEMPLATES[workload.op]
    space = template.space(workload, H200)
    for seed, each in enumerate((workload, *(workload.replace(**some) for some in OPEN))):
        arrays = example(each, seed)
        widest = {knob.name: knob.values[-1] for knob in space.knobs} | {"threads": 128, "each": 2}
        widest["lanes"] = min(widest["lanes"], 128)
        for config in (Config(widest), Config(vector_bytes=space.values["vector_bytes"][0], lanes=1, each=1, threads=128)):
            assert_equal(each, emulated(monkeypatch, template, each, arrays, config, *MODULES), expected(each, arrays))


@pytest.mark.long
@pytest.mark.parametrize("workload", WORKLOADS[:2] + WORKLOADS[3:5] + WORKLOADS[7:10], ids=lambda each: each.label)
def test_a_cpu_kernel_is_the_definition(device: CpuDevice, workload: Workload) -> None:
    _, template = TEMPLATES[workload.op]
    each = workload.replace(dynamic=workload.index_dtype == "int64")
    arrays = example(each)
    assert_equal(each, on_device(device, template, each, arrays), expected(each, arrays))


@pytest.mark.long
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.label)
def test_arrays_in_use_give_what_arrays_of_these_extents_give(device: CpuDevice, workload: Workload) -> None:
    """-1 is the last element in use, not that of the memory."""
    on_gpu, on_cpu = TEMPLATES[workload.op]
    for number, some in enumerate(OPEN):
        each = workload.replace(**some)
        for seed in range(3):
            arrays = example(each, seed, wrong=False, least=seed)
            wanted = numpy_of(each, arrays)
            found = {"reference": expected(each, arrays)}
            with pytest.MonkeyPatch.context() as patch:
                found["GPU"] = emulated(patch, on_gpu, each, arrays, None, *MODULES)
            if number == 2 and seed == 0:
                found["CPU"] = on_device(device, on_cpu, each, arrays)
            for which, results in found.items():
                y = np.asarray(results["y"], wanted.dtype)
                assert y.shape == (wanted.shape or (1,)), f"{which}: {each.label}"
                np.testing.assert_array_equal(y.reshape(wanted.shape), wanted, err_msg=f"{which}: {each.label}")


def random_workload(rng: Any) -> Workload:
    """Small arrays of one to four axes, looked up in any way, of which some extents are known at run time only."""
    op = str(rng.choice(["gather", "scatter"]))
    x = rng.integers(1, 6, rng.integers(1, 5)).tolist()
    params: dict[str, Any] = {"x": x, "dtype": str(rng.choice(["float32", "int64", "int32"])), **rng.choice(OPEN)}
    by = str(rng.choice(["slices", "elements", "tuples"] if op == "gather" else ["elements", "tuples"]))
    if by == "tuples":
        batch = int(rng.integers(0, len(x))) if op == "gather" else 0
        depth = int(rng.integers(1, len(x) - batch + 1))
        params["indices"] = [*x[:batch], *rng.integers(1, 5, rng.integers(batch == 0, 3)).tolist(), depth]
        params |= {"batch_dims": batch} if op == "gather" else {}
    else:
        axis = params["axis"] = int(rng.integers(0, len(x)))
        if by == "slices":
            params["indices"] = rng.integers(1, 5, rng.integers(1, 3)).tolist()
        else:
            params["indices"] = [int(rng.integers(1, 7 if each == axis else n + 1)) for each, n in enumerate(x)]
    if op == "scatter":
        params["reduction"] = str(rng.choice(["none", "add", "max", "min"]))
    return Workload(op, params | {"by": by})


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60))
def test_any_look_up_is_that_of_onnx(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = np.random.default_rng(seed)
    workload = random_workload(rng)
    arrays = example(workload, seed, wrong=False, least=int(rng.integers(0, 2)))
    wanted = numpy_of(workload, arrays)
    for found in (
        expected(workload, arrays),
        emulated(monkeypatch, TEMPLATES[workload.op][0], workload, arrays, None, *MODULES),
    ):
        assert found["y"].shape == (wanted.shape or (1,)), workload.label
        np.testing.assert_array_equal(found["y"].reshape(wanted.shape), wanted, err_msg=workload.label)


def test_extents_beyond_the_bound_touch_nothing_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """They say that the bound was too small; the emulator checks every access. No index reaches beyond the memory."""
    workload = gather(x=(4, 6), indices=(3, 2), axis=1, dynamic=True, dynamic_x=True)
    arrays = example(workload, wrong=False) | {"x_extents": np.array([9, 9]), "indices_extents": np.array([3, 9])}
    arrays["indices"] = np.array([[5, 8], [-6, -9], [0, 6]])
    words = np.zeros(2, np.int64)
    emulated(monkeypatch, TEMPLATES["gather"][0], workload, arrays, None, *MODULES, also={WRONG_INDEX: words})
    assert words[1] in (8, -9, 6)


@pytest.mark.long
def test_verification_accepts_a_cpu_kernel(device: CpuDevice) -> None:
    for workload in (
        WORKLOADS[2].replace(**OPEN[0]),
        WORKLOADS[7],
        WORKLOADS[1].replace(**OPEN[1]),
        WORKLOADS[9].replace(**OPEN[2]),
    ):
        assert verdict(device, TEMPLATES[workload.op][1], workload) is None, workload.label


@pytest.mark.long
def test_verification_finds_a_kernel_that_ignores_the_extents(device: CpuDevice) -> None:
    workload = gather(x=(50, 8), indices=(40,), dynamic=True)
    found = verdict(device, TEMPLATES["gather"][1], workload, workload.replace(axis=1, x=(8, 50)))
    assert found is not None and "elements are wrong" in found


@pytest.mark.long
@pytest.mark.parametrize("workload", [WORKLOADS[0], WORKLOADS[3], WORKLOADS[7], WORKLOADS[9]], ids=lambda each: each.label)
def test_verification_finds_a_kernel_that_counts_to_the_bound_of_x(device: CpuDevice, workload: Workload) -> None:
    """It takes extents from memory that it was never told: those of its bounds."""
    each = workload.replace(**OPEN[2])
    template, places_of = TEMPLATES[each.op][1], cpu.finder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "finder", lambda m, dynamic_x: places_of(m, False))
        found = verdict(device, template, each)
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
        gather(x=(1000, 80), indices=(64, 5), dynamic=True, dynamic_x=True),
        gather(x=(50, 1000, 80), indices=(50, 7, 1), by="tuples", batch_dims=1, dtype="float32", dynamic_x=True),
    )
    compiled = 4
    refused = ((gather(x=(4, 5), indices=(2**31 - 1,), axis=1, dtype="int8"), "rows"),)


class TestGatherCpu(TemplateContract):
    template, target, compiled = TEMPLATES["gather"][1], detect("cpu"), 1
    accepted = (gather(x=(300, 24), indices=(32,)),)


class TestScatterCuda(TemplateContract):
    template, target, compiled = TEMPLATES["scatter"][0], H200, 5
    accepted = (
        scatter(x=(30000, 1024), indices=(512, 1), by="tuples", dtype="float16"),
        scatter(x=(100, 80), indices=(100, 5), axis=1, reduction="add", dynamic=True),
        scatter(x=(100, 80), indices=(100, 5), axis=1, reduction="max"),
        scatter(x=(100, 80), indices=(60, 1), by="tuples", dynamic=True, dynamic_x=True),
        scatter(x=(100, 80), indices=(100, 5), axis=0, reduction="min", dynamic_x=True),
    )


class TestScatterCpu(TemplateContract):
    template, target, compiled = TEMPLATES["scatter"][1], detect("cpu"), 1
    accepted = (scatter(x=(300, 24), indices=(32, 1), by="tuples"),)


@pytest.mark.gpu
def test_kernels_on_the_device(gpu: Any) -> None:
    for workload in WORKLOADS:
        for each in (workload, *(workload.replace(**some) for some in OPEN)):
            arrays = example(each)
            template = TEMPLATES[each.op][0]
            assert_equal(each, on_device(gpu, template, each, arrays), expected(each, arrays))
            assert verdict(gpu, template, each) is None, each.label


# ---- ONNX

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


@pytest.mark.long
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
