"""One machine code for several sizes: the captured numbers that differ become parameters, and plans become formulas."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from conv2d_support import run_on_cpu
from hypothesis import given
from hypothesis import strategies as st
from numba import types

from schedsearch import Workload, load_templates
from schedsearch.backend import CompileError, compile_source
from schedsearch.backend.cpu_ops import as_array
from schedsearch.backend.relaunch import relaunched
from schedsearch.backend.run_time import shared_code
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.errors import PlanError
from schedsearch.launch import Grid, LaunchPlan, Pointer
from schedsearch.launch_sizes import Listed, Quotient, SizedPlan, ranges_text, runs
from schedsearch.target import PRESETS
from schedsearch.template import KernelSource, KernelStep
from schedsearch.verification.verify import verify_once

CPU, H200 = detect("cpu"), PRESETS["h200"]
LAYER = dict(h=5, w=6, c=4, k=8, r=3, s=3, padding=1, dtype="float32")


def scaling(rows: int, doubles: bool = False) -> KernelSource:
    """y[:rows] = x[:rows] + rows, in a captured function that captures `rows`, too."""

    def shifted(value):  # type: ignore[no-untyped-def]
        return value + rows if not doubles else 2 * value + rows

    def kernel(x, y, start, stop):  # type: ignore[no-untyped-def]
        given, made = as_array(x, (rows,), types.float32), as_array(y, (rows,), types.float32)
        for i in range(start, stop):
            made[i] = shifted(given[i])

    step = KernelStep(kernel, (Pointer("x"), Pointer("y")), Grid(rows), 1)
    return KernelSource("cpu", "native", (step,))


def conv_sources(template: str, sizes: list[int], target, layer=LAYER, made_for: int | None = None):  # type: ignore[no-untyped-def]
    chosen = load_templates([template])[template]
    workloads = {n: Workload("conv2d", {**layer, "n": n}) for n in sizes}
    like = workloads[made_for or sizes[-1]]
    config = chosen.default(like, target, chosen.space(like, target))
    return {n: chosen.kernel(workload, target, config) for n, workload in workloads.items()}, workloads


def test_numbers_that_differ_become_parameters_and_equal_ones_share_one() -> None:
    (group,) = shared_code({rows: scaling(rows) for rows in (3, 10)})
    assert [[param.value for param in step.run_time] for source in group.values() for step in source.steps] == [[3], [10]]
    assert group[3].steps[0].function is group[10].steps[0].function


def test_a_condition_that_differs_becomes_a_parameter_too() -> None:
    (group,) = shared_code({3: scaling(3), 10: scaling(10, doubles=True)})
    assert [[param.value for param in source.steps[0].run_time] for source in group.values()] == [[3, 0], [10, 1]]


def test_kernels_that_differ_in_more_than_numbers_do_not_share() -> None:
    other = scaling(10)
    threads = dataclasses.replace(other, steps=(dataclasses.replace(other.steps[0], block_threads=2),))
    shaped = dataclasses.replace(other.steps[0], shaped_by=frozenset({"rows"}))
    for different in (threads, dataclasses.replace(other, steps=(shaped,)), dataclasses.replace(other, arch="else")):
        assert [list(group) for group in shared_code({3: scaling(3), 10: different})] == [[3], [10]]


@pytest.mark.parametrize("template", ["conv2d_cpu", "depthwise_conv2d_cpu"])
@pytest.mark.mostly_long(2)
def test_one_cpu_code_computes_every_size(template: str) -> None:
    layer = LAYER if template == "conv2d_cpu" else dict(h=5, w=6, c=4, r=3, s=3, padding=1)
    chosen, op = load_templates([template])[template], template.removesuffix("_cpu")
    workloads = {n: Workload(op, {**layer, "n": n, "dtype": "float32"}) for n in (1, 2, 3, 5)}
    config = chosen.default(workloads[5], CPU, chosen.space(workloads[5], CPU))
    if op == "conv2d":  # "padded" has no number that depends on n
        config = Config({**config, "x_layout": "packed"})
    (group,) = shared_code({n: chosen.kernel(workload, CPU, config) for n, workload in workloads.items()})
    assert any(step.run_time for step in group[5].steps)
    artifact = compile_source(group[5], CPU).artifact
    plans = {n: relaunched(artifact, group[5], source).plan for n, source in group.items()}  # type: ignore[union-attr]
    sized = SizedPlan.from_json(SizedPlan.of(plans).to_json())
    device = CpuDevice(CPU)
    for n, workload in workloads.items():
        made = dataclasses.replace(artifact, plan=sized.at(n))
        assert made.plan == plans[n]
        loaded = device.load(made)
        assert verify_once(device, workload, loaded) is None
        loaded.close()
    device.close()


LAYERS = {
    "conv2d_wgmma": dict(h=14, w=14, c=256, k=1024, r=1, s=1, epilogue=("bias", "residual", "relu")),
    "conv2d_mma": dict(h=7, w=7, c=64, k=96, r=3, s=3, padding=1),
}


@pytest.mark.long
@pytest.mark.parametrize("template", LAYERS)
def test_gpu_code_takes_the_size_at_no_more_than_a_few_registers(template: str) -> None:
    sources, workloads = conv_sources(template, [33, 47, 64], H200, LAYERS[template], made_for=33)
    (group,) = shared_code(sources)
    fixed, made = compile_source(sources[64], H200), compile_source(group[64], H200)
    assert made.resources.spill_bytes == 0
    assert abs(made.resources.registers - fixed.resources.registers) <= 4
    for n, workload in workloads.items():
        other = relaunched(made.artifact, group[64], group[n])
        assert other is not None
        other.plan.check(workload)
        assert other.plan.steps[0].params[: len(sources[n].steps[0].params)] == sources[n].steps[0].params


def test_the_same_source_without_other_sizes_is_compiled_as_before() -> None:
    sources, _ = conv_sources("conv2d_cpu", [3], CPU)
    (group,) = shared_code(sources)
    assert group[3] is sources[3]


def test_a_launch_that_passes_more_than_the_kernel_takes_is_refused() -> None:
    source = scaling(3)
    step = dataclasses.replace(source.steps[0], params=(*source.steps[0].params, Pointer("z")))
    with pytest.raises((CompileError, TypeError), match="1 more arguments than the function takes"):
        compile_source(dataclasses.replace(source, steps=(step,)), CPU)


@given(
    st.integers(-50, 5000), st.integers(-5000, 5000), st.lists(st.integers(1, 1024), min_size=2, max_size=40, unique=True)
)
def test_rows_and_bytes_are_lines(scale: int, offset: int, some: list[int]) -> None:
    sizes = sorted(some)
    values = [scale * size + offset for size in sizes]
    found = Quotient.through(sizes, values)
    assert found == Quotient(scale, offset) and [found.at(size, 0) for size in sizes] == values


@pytest.mark.parametrize(
    "values", [[5, 1, 9, 2], [1, 1, 2, 2], [0, 1, 1, 3]], ids=["any", "tiles", "with the ends of a line"]
)
def test_values_that_are_on_no_line_are_listed(values: list[int]) -> None:
    assert Quotient.through([1, 2, 3, 4], values) is None
    assert Listed(tuple(values)).at(3, 2) == values[2]


def test_counts_of_tiles_of_earlier_files_are_computed() -> None:
    data = json.loads(sized().to_json())
    data["rules"] = [[["steps", 0, "grid", "work_items"], {"scale": 3, "offset": 5, "divisor": 4, "factor": 2}]]
    step = SizedPlan.from_json(json.dumps(data)).data(7)["steps"][0]
    assert step["grid"]["work_items"] == (3 * 7 + 5) // 4 * 2


def sized() -> SizedPlan:
    sources, _ = conv_sources("conv2d_cpu", [1, 2, 3, 7], CPU)
    (group,) = shared_code(sources)
    artifact = compile_source(group[7], CPU).artifact
    return SizedPlan.of({n: relaunched(artifact, group[7], each).plan for n, each in group.items()})  # type: ignore[union-attr]


def test_a_size_that_the_plan_was_not_made_for_is_refused() -> None:
    with pytest.raises(PlanError, match="no size 5; it has 1 to 3, 7"):
        sized().at(5)


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": [[3, 1]]}, {"sizes": [[1, 10**9]]}, {"sizes": [["a", 2]]}, {"sizes": []}, {"plan": 3},
        {"rules": [[["steps"], 5]]},
        {"rules": [[["steps", 0, "grid", "work_items"], [1]]]},
        {"rules": [[["steps", 0, "grid", "work_items"], {"scale": 1, "offset": 0, "divisor": 0}]]},
        {"rules": [[["steps", 9, "grid"], [1, 2, 3, 4]]]},
        {"rules": [[["steps", 0, "grid", "work_items"], {"scale": -(2**60), "offset": 0}]]},
    ],
)  # fmt: skip
def test_damaged_plans_are_refused(change: dict) -> None:  # type: ignore[type-arg]
    data = json.loads(sized().to_json()) | change
    with pytest.raises(PlanError):
        SizedPlan.from_json(json.dumps(data)).at(7)


def test_sizes_are_shown_as_runs() -> None:
    assert runs([1, 2, 3, 7]) == [(1, 3), (7, 7)]
    assert ranges_text([4]) == "4"
    with pytest.raises(ValueError, match="different parts"):
        SizedPlan.of({1: LaunchPlan("cpu", "a", (), {}), 2: LaunchPlan("cpu", "a", (), {"w": 4})})


def test_the_kernel_with_a_captured_function_computes() -> None:
    (group,) = shared_code({rows: scaling(rows) for rows in (3, 10)})
    x, device = np.arange(10, dtype=np.float32), CpuDevice(CPU)
    for rows in (3, 10):
        y = run_on_cpu(device, group[rows], {"x": x}, {"y": ((rows,), np.float32)})["y"]
        np.testing.assert_array_equal(y, x[:rows] + rows)
    device.close()
