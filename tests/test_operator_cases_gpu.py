"""Every recorded case of a convolution of floats runs on the GPU, as NHWC x OHWI in fp16; test_operator_cases_int8_gpu.py
has those of integers.

By default a share of the templates that take a case computes it, one at least, and each template some case; --gpu-share 1
runs all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conv2d_numpy import expected, integers, run_on_gpu

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
def test_case_is_exact(shared: Path, some_of: Callable[..., Any], name: str, number: int) -> None:
    target = detect("cuda")
    workload = workload_of(cases(shared, name)[number])
    arrays = integers(workload, np.random.default_rng(number))
    truth = expected(workload, arrays)
    for template in some_of(load_templates().matching(workload, target), number):
        y = run_on_gpu(
            template, workload, target, template.default(workload, target, template.space(workload, target)), arrays
        )
        truth.check(y, f"{template.name}: {workload.label}")
