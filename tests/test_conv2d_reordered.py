"""conv2d that reads another layout than it writes: its steps, what it takes, and that its kernels compile.

Its kernels are those of conv2d_stem, conv2d_halo and layout_transform, whose own tests emulate them.
"""

from __future__ import annotations

import pytest

from schedsearch.launch import Pointer, TensorMap
from schedsearch.target import PRESETS
from schedsearch.templates.conv2d.reordered import Conv2dReordered
from schedsearch.testing.template_contract import TemplateContract
from schedsearch.workload import Workload

H200 = PRESETS["h200"]
MIXED = {"layout": "NCHW", "output_layout": "NHWC"}
STEM = Workload.conv2d(n=1, h=32, w=32, c=3, k=64, r=7, s=7, stride=2, padding=3, **MIXED)
HALO = Workload.conv2d(n=1, h=16, w=16, c=64, k=64, r=3, s=3, padding=1, epilogue=("bias", "residual", "relu"), **MIXED)


class TestReordered(TemplateContract):
    template = Conv2dReordered()
    target = H200
    accepted = (STEM, HALO)
    refused = (
        (HALO.replace(layout="NHWC", weight_layout="OHWI"), "layout"),
        (HALO.replace(output_layout="NCHW"), "output_layout"),
        (Workload.conv2d(n=1, h=16, w=16, c=256, k=64, r=1, s=1, **MIXED), "conv2d_halo"),
    )
    samples = 3


@pytest.mark.parametrize(("workload", "inner"), [(STEM, "conv2d_stem"), (HALO, "conv2d_halo")])
def test_x_is_moved_at_every_call_and_the_weight_once(workload: Workload, inner: str) -> None:
    template = Conv2dReordered()
    config = template.default(workload, H200, template.space(workload, H200))
    assert config["inner"] == inner
    source = template.kernel(workload, H200, config)
    buffers = [{param.buffer for param in step.params if isinstance(param, Pointer | TensorMap)} for step in source.steps]
    assert buffers[:2] == [{"x", "x_nhwc"}, {"weight", "weight_nhwc"}]
    assert [step.constant for step in source.steps] == [False, True, False]
    assert {"x_nhwc", "weight_nhwc", "y"} <= buffers[2] and not buffers[2] & {"x", "weight"}
    p = workload.params
    assert source.workspaces == {"x_nhwc": 2 * p.n * p.h * p.w * p.c, "weight_nhwc": 2 * p.k * p.r * p.s * p.c}
