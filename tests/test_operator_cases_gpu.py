"""Every recorded convolution case runs on the GPU: those of floats as NHWC x OHWI in fp16, those of integers as they are.

None is skipped, but those of int4 are left out: no operator has that format.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import integer_model
import numpy as np
import pytest
from conv2d_numpy import expected, integers, run_on_gpu
from conv2d_support import run_on_cpu

from schedsearch.device.detect import detect
from schedsearch.template import load_template, load_templates
from schedsearch.workload import Workload

CASES = {  # name in the file -> number of cases
    "conv2d_nchw (cuda float)": 61,
    "conv2d_nhwc_tensorcore": 6,
    "conv2d_nhwc_winograd": 9,
    "group_conv2d_nchw": 7,
    "group_conv2d_nhwc": 7,
}
INTEGER_CASES = {
    "conv2d_NCHWc_int8": 78,
    "conv2d_nchw_int8": 9,
    "conv2d_NHWC_gemm_int8 (cpu test, shapes only)": 17,
    "conv2d_HWNCnc_tensorcore": 1,  # the others are of int4
    "group_conv2d_NCHWc_int8": 7,
    "group_conv2d_nchw_int8": 7,
}
PORTABLE = "conv2d_mma"


def padding(case: dict[str, Any], kernel: tuple[int, int], dilation: tuple[int, int]) -> tuple[int, ...]:
    """(top, left, bottom, right); SAME is (kernel extent - 1) split with the larger half first."""
    given = case["padding"]
    if given == "VALID":
        return (0, 0, 0, 0)
    if given == "SAME":
        total = [(size - 1) * step for size, step in zip(kernel, dilation)]
        first = [(t + 1) // 2 for t in total]
        return (*first, *(t - f for t, f in zip(total, first)))
    values = [given, given] if isinstance(given, int) else list(given)
    return tuple(values * 2 if len(values) == 2 else values)


def both(value: int | list[int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def workload_of(case: dict[str, Any]) -> Workload:
    kernel, dilation = both(case["kernel"]), both(case["dilation"])
    height, width = both(case["in_size"])
    stages = [
        stage
        for stage, wanted in (("bias", case["add_bias"]), ("relu", case.get("apply_relu", case.get("add_relu"))))
        if wanted
    ]
    return Workload.conv2d(
        n=case["batch"], h=height, w=width, c=case["in_channel"], k=case["num_filter"], r=kernel[0], s=kernel[1],
        stride=both(case["stride"]), padding=padding(case, kernel, dilation), dilation=dilation,
        groups=case.get("groups", 1), dtype="float16", out_dtype="float32" if "out_dtype" in case else "float16",
        epilogue=stages,
    )  # fmt: skip


def integer_cases(shared: Path, name: str) -> list[dict[str, Any]]:
    return [case for case in cases(shared, name) if case.get("in_dtype", case.get("dtype")) in ("int8", "uint8")]


def integer_workload_of(case: dict[str, Any]) -> Workload:
    """The case in its own layout, or in NHWC in the place of HWNC; sums leave as they are."""
    kernel, dilation = both(case["kernel"]), both(case["dilation"])
    height, width = both(case["in_size"])
    dtype = case.get("in_dtype", case.get("dtype"))
    return Workload.conv2d(
        n=case["batch"], h=height, w=width, c=case["in_channel"], k=case["num_filter"], r=kernel[0], s=kernel[1],
        stride=both(case["stride"]), padding=padding(case, kernel, dilation), dilation=dilation,
        groups=case.get("groups", 1), dtype=dtype, layout=case["layout"] if "/" not in case["layout"] else "NHWC",
        epilogue=[stage for stage in ("bias", "relu") if case.get(f"add_{stage}")],
    )  # fmt: skip


def cases(shared: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((shared / "cases" / "operator_cases.json").read_text())["cases"][name]
    return found


@pytest.mark.parametrize(("name", "count"), CASES.items(), ids=CASES)
def test_every_case_is_a_workload_that_the_portable_template_takes(shared: Path, name: str, count: int) -> None:
    from schedsearch.target import PRESETS

    found = cases(shared, name)
    assert len(found) == count
    for case in found:
        assert load_template(PORTABLE).validate(workload_of(case), PRESETS["h200"]) is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "number"), [(name, i) for name, count in CASES.items() for i in range(count)], ids=lambda value: str(value)
)
def test_case_is_exact(shared: Path, name: str, number: int) -> None:
    target = detect("cuda")
    workload = workload_of(cases(shared, name)[number])
    arrays = integers(workload, np.random.default_rng(number))
    truth = expected(workload, arrays)
    for template in load_templates().matching(workload, target):
        y = run_on_gpu(
            template, workload, target, template.default(workload, target, template.space(workload, target)), arrays
        )
        truth.check(y, f"{template.name}: {workload.label}")


@pytest.mark.parametrize(("name", "count"), INTEGER_CASES.items(), ids=INTEGER_CASES)
def test_every_case_of_integers_is_one_too(shared: Path, name: str, count: int) -> None:
    from schedsearch.target import PRESETS

    found = [integer_workload_of(case) for case in integer_cases(shared, name)]
    assert len(found) == count
    assert [w.label for w in found if load_template(PORTABLE).validate(w, PRESETS["a100"])] == []
    assert [w.label for w in found if load_template("conv2d_simt").validate(w, PRESETS["a100"])] == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "number"),
    [(name, i) for name, count in INTEGER_CASES.items() for i in range(count)],
    ids=lambda value: str(value),
)
def test_case_of_integers_is_exact(shared: Path, name: str, number: int) -> None:
    from schedsearch.device import open_device

    target = detect("cuda")
    w = integer_workload_of(integer_cases(shared, name)[number])
    arrays = integer_model.arguments(w, seed=number)
    truth = integer_model.expected(w, arrays)
    device = open_device(target)
    try:
        for template in load_templates().matching(w, target):
            source = template.kernel(w, target, template.default(w, target, template.space(w, target)))
            y = run_on_cpu(device, source, arrays, {"y": (w.output.shape, w.output.dtype)}, {})["y"]
            np.testing.assert_array_equal(y, truth, err_msg=f"{template.name}: {w.label}")
    finally:
        device.close()
