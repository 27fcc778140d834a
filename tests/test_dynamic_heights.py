"""Heights and widths as run-time numbers: which templates share machine code, and what it computes at every kind of size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import schedsearch
from schedsearch import Workload, load_templates
from schedsearch.backend.run_time import shared_code
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.launch import Artifact
from schedsearch.launch_sizes import SizedPlan
from schedsearch.processes.range_build import Spaces, build_shared, default_for_sizes
from schedsearch.target import PRESETS, Target
from schedsearch.verification.verify import verify_once

pytestmark = pytest.mark.long  # compiles

CPU, H200 = detect("cpu"), PRESETS["h200"]

LAYER: dict[str, Any] = dict(n=2, h=24, w=24, c=64, k=64, r=3, s=3, padding=1, epilogue=("bias", "relu"))
STEM: dict[str, Any] = dict(n=2, h=48, w=48, c=3, k=64, r=7, s=7, stride=2, padding=3)
ON_GPU: dict[str, Workload] = {
    "conv2d_wgmma": schedsearch.conv2d(**LAYER),
    "conv2d_mma": schedsearch.conv2d(**LAYER),
    "conv2d_halo": schedsearch.conv2d(**LAYER),
    "conv2d_stem": schedsearch.conv2d(**STEM),
    "conv2d_packed": schedsearch.conv2d(**STEM),
    "conv2d_tf32x3": schedsearch.conv2d(**LAYER, dtype="float32"),
    "conv2d_simt": schedsearch.conv2d(**LAYER, dtype="float32"),
    "pool2d_cuda": schedsearch.pool2d(n=2, h=24, w=24, c=64, r=3, s=3, stride=2, padding=1),
    "resize_cuda": schedsearch.resize(n=2, h=24, w=24, c=64, oh=48, ow=48),
    "layout_transform_cuda": schedsearch.layout_transform(n=2, h=24, w=24, c=64, layout="NCHW", to="NHWC", dtype="float16"),
    "depthwise_conv2d_cuda": schedsearch.depthwise_conv2d(n=2, h=24, w=24, c=64, r=3, s=3, padding=1),
}
SMALL: dict[str, Any] = dict(n=2, h=20, w=20, c=8, dtype="float32")
ON_CPU: dict[str, Workload] = {
    "conv2d_cpu": schedsearch.conv2d(**SMALL, k=8, r=3, s=3, padding=1, epilogue=("bias", "relu")),
    "depthwise_conv2d_cpu": schedsearch.depthwise_conv2d(**SMALL, r=3, s=3, padding=1),
    "pool2d_cpu": schedsearch.pool2d(**SMALL, r=3, s=3, stride=2, padding=1),
    "resize_cpu": schedsearch.resize(**SMALL, oh=40, ow=40),
    "layout_transform_cpu": schedsearch.layout_transform(**SMALL, layout="NCHW", to="NHWC"),
}
# Each of these sizes needs machine code of its own: it is in the text of the kernel's instructions, or in addresses.
APART = {
    ("conv2d_halo", "w"), ("depthwise_conv2d_cuda", "h"), ("depthwise_conv2d_cuda", "w"), ("depthwise_conv2d_cpu", "w"),
}  # fmt: skip

# Configurations that are legal for small sizes, too; the defaults of large ones are not.
GIVEN = {
    "conv2d_cpu": Config(
        threads=1, block=4, ow_tile=1, oc_vectors=1, unroll=1, oh_tile=2, x_layout="packed", order="rows"
    ),
    "depthwise_conv2d_cpu": Config(threads=1, block=8, tile=4, rows=4, splits=1),
}  # fmt: skip

# Rows of x that are no multiple of 16 bytes are copied first, by one of two moves.
SEVERAL = {("conv2d_stem", "w"): 3}


def of_sizes(template: str, target: Target, at: Callable[[int], Workload], middle: int) -> list[dict[int, Any]]:
    """The groups of sizes around one that share the machine code of one configuration, the default of the middle size."""
    loaded = load_templates([template])[template]
    spaces = Spaces(loaded, at, target)
    sizes = range(middle - 4, middle + 17)
    config = default_for_sizes(loaded, {size: at(size) for size in sizes}, spaces, target, middle)
    legal = [size for size in sizes if (each := spaces(size)) is not None and not each.check(config)]
    return shared_code({size: loaded.kernel(at(size), target, config) for size in legal})


@pytest.mark.parametrize("dimension", ["h", "w"])
@pytest.mark.parametrize(("template", "target"), [*((name, H200) for name in ON_GPU), *((name, CPU) for name in ON_CPU)])
def test_sizes_share_machine_code_unless_it_holds_them(template: str, target: Target, dimension: str) -> None:
    workload = (ON_GPU | ON_CPU)[template]
    size = workload.params[dimension]
    groups = of_sizes(template, target, workload.with_dynamic(dimension, size - 16, size + 16).at, size)
    together = sum(map(len, groups))
    assert together > 1
    expected = SEVERAL.get((template, dimension), 1)
    assert len(groups) == (together if (template, dimension) in APART else expected)
    if template == "conv2d_stem" and dimension == "w":  # whole pieces of 16 bytes: w * 3 channels * 2 bytes
        assert sorted(w for w in set().union(*groups) if w * 3 * 2 % 16 == 0) in [sorted(group) for group in groups]


@pytest.mark.parametrize(
    ("template", "dimension"), [(name, each) for name in ON_CPU for each in "hw" if (name, each) not in APART]
)
def test_one_machine_code_is_right_at_the_ends_at_tails_and_between(
    template: str, dimension: str, device: CpuDevice
) -> None:
    """Tiles have 2 and 4 rows or columns, so these sizes leave every rest. Every element is compared with the reference."""
    of_range = ON_CPU[template].with_dynamic(dimension, 5, 40)
    loaded = load_templates([template])[template]
    spaces = Spaces(loaded, of_range.at, device.target)
    workloads = {size: of_range.at(size) for size in of_range.sizes}
    given = GIVEN.get(template)
    built = build_shared(loaded, workloads, spaces, device.target, given, of_range.high)
    plan, code = SizedPlan.from_json(built.plan), built.result.artifact.code
    assert len(plan.sizes) > 30 and plan.sizes[-1] == of_range.high
    for size in sorted({*plan.sizes[:3], 13, 16, *plan.sizes[-2:]}):
        kernel = device.load(Artifact(code, plan.at(size)))
        assert verify_once(device, of_range.at(size), kernel) is None, size
        kernel.close()
