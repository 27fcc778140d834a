"""Every recorded case of an integer convolution is right in every bit on the GPU, in its own layout or in NHWC.

By default a share of the templates that take it computes it, one at least; --gpu-share 1 runs all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import integer_model
import numpy as np
import pytest
from integer_cases import FAMILIES, cases, workload_of

from schedsearch.backend import compile_source
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.target import PRESETS, Target
from schedsearch.template import Template, load_template, load_templates
from schedsearch.workload import Workload


@pytest.mark.parametrize(("family", "count"), FAMILIES.items(), ids=FAMILIES)
def test_every_case_is_a_workload(shared: Path, family: str, count: int) -> None:
    found = cases(shared, family)
    assert len(found) == count
    for case in found:
        w = workload_of(case)
        assert w.output.dtype == ("uint32" if w.dtype == "uint8" else "int32")
        for portable in ("conv2d_mma", "conv2d_simt"):
            assert load_template(portable).validate(w, PRESETS["a100"]) is None
        if "out_dtype" in case:
            assert w.output.dtype == case["out_dtype"]


def run(template: Template, w: Workload, target: Target, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """y of the template's default configuration, launched once over poison."""
    config = template.default(w, target, template.space(w, target))
    artifact = compile_source(template.kernel(w, target, config), target).artifact
    y = np.empty(w.output.shape, w.output.dtype)
    device = open_device(target)
    addresses = {}
    try:
        for name, array in {**arrays, "y": y}.items():
            addresses[name] = device.allocate(array.nbytes)
            device.copy_in(addresses[name], memoryview(array).cast("B"))
        device.fill(addresses["y"], 0x55, y.nbytes)
        kernel = device.load(artifact)
        kernel.bind(addresses, {}).launch()
        device.synchronize()
        device.copy_out(memoryview(y).cast("B"), addresses["y"])
        kernel.close()
    finally:
        for address in addresses.values():
            device.free(address)
        device.close()
    return y


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "number"), [(family, i) for family, count in FAMILIES.items() for i in range(count)], ids=str
)
def test_case_is_exact(shared: Path, some_of: Callable[..., Any], family: str, number: int) -> None:
    target, case = detect("cuda"), cases(shared, family)[number]
    forms = dict.fromkeys((workload_of(case), workload_of(case, "NHWC")))
    taken = [(template, w) for w in forms for template in load_templates().matching(w, target)]
    for template, w in some_of(taken, number):
        arrays = integer_model.arguments(w, number)
        expected = integer_model.expected(w, arrays)
        np.testing.assert_array_equal(run(template, w, target, arrays), expected, err_msg=f"{template.name}: {w.label}")
