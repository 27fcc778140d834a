"""depthwise_conv2d on NVIDIA GPUs, dx and dw in one launch plan: the kernels of two templates, one after the other.

The second kernel finds what it needs of dy in L2, as far as that fits. docs/kernels/depthwise.md says what is known about
reading dy once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from schedsearch.config import Config
from schedsearch.ops.depthwise_conv2d import DepthwiseConv2dParams
from schedsearch.space import ConfigSpace
from schedsearch.target import Target
from schedsearch.template import KernelSource, Template
from schedsearch.templates.depthwise_conv2d.cuda import DepthwiseConv2dCuda
from schedsearch.templates.depthwise_conv2d.cuda_dw import DepthwiseConv2dDwCuda
from schedsearch.templates.depthwise_conv2d.cuda_dw_planes import DepthwiseConv2dDwPlanesCuda
from schedsearch.templates.depthwise_conv2d.cuda_planes import DepthwiseConv2dPlanesCuda
from schedsearch.templates.parts.subspaces import own_values, side_by_side
from schedsearch.workload import Workload

_OF_DX = (DepthwiseConv2dPlanesCuda(), DepthwiseConv2dCuda())  # the first that takes a workload
_OF_DW = (DepthwiseConv2dDwPlanesCuda(), DepthwiseConv2dDwCuda())


class DepthwiseConv2dBothCuda(Template[DepthwiseConv2dParams]):
    """dx and dw. A configuration is one of the template of dx (`dx_...`), and one of the template of dw (`dw_...`). They are
    those of small planes where these take the workload."""

    name = "depthwise_conv2d_both_cuda"
    version = sum(each.version for each in (*_OF_DX, *_OF_DW)) - 3  # if one changes, a configuration is another kernel
    op = "depthwise_conv2d"
    kind = "cuda"

    def current(self, config: Mapping[str, int | str | bool]) -> Config:
        """As in `Template`. Only configurations by patches lack knobs that were added later."""
        now, more = super().current(config), dict[str, int | str | bool]()
        for half, (*_, by_patches) in {"dx_": _OF_DX, "dw_": _OF_DW}.items():
            if f"{half}vector" in now:
                more |= {half + knob: value for knob, value in by_patches.added.items()}
        return Config({**more, **now})

    def validate(self, workload: Workload[DepthwiseConv2dParams], target: Target) -> str | None:
        if workload.params.direction != "grad_both":
            return f"direction is {workload.params.direction}; allowed: grad_both"
        for name, (template, half) in _halves(workload, target).items():
            if problem := template.validate(half, target):
                return f"{name}: {problem}"
        return None

    def space(self, workload: Workload[DepthwiseConv2dParams], target: Target) -> ConfigSpace:
        halves = _halves(workload, target)
        return side_by_side({name: template.space(half, target) for name, (template, half) in halves.items()})

    def default(self, workload: Workload[DepthwiseConv2dParams], target: Target, space: ConfigSpace) -> Config:
        """The defaults of both."""
        found: dict[str, Any] = {}
        for name, (template, half) in _halves(workload, target).items():
            own = template.default(half, target, template.space(half, target))
            found |= {name + knob: value for knob, value in own.items()}
        return Config(found)

    def plain(self, workload: Workload[DepthwiseConv2dParams], target: Target, space: ConfigSpace) -> Config | None:
        """The plain configurations of both."""
        found: dict[str, Any] = {}
        for name, (template, half) in _halves(workload, target).items():
            own = template.plain(half, target, template.space(half, target))
            if own is None:
                return None
            found |= {name + knob: value for knob, value in own.items()}
        return Config(found)

    def kernel(self, workload: Workload[DepthwiseConv2dParams], target: Target, config: Config) -> KernelSource:
        of_dx, of_dw = (
            template.kernel(half, target, Config(own_values(config, name)))
            for name, (template, half) in _halves(workload, target).items()
        )
        arguments = {*of_dx.alignments, *of_dw.alignments}
        # Both are powers of two.
        alignments = {name: max(of_dx.alignments.get(name, 1), of_dw.alignments.get(name, 1)) for name in arguments}
        return KernelSource(
            "cuda", "native", (*of_dx.steps, *of_dw.steps), {**of_dx.workspaces, **of_dw.workspaces}, alignments
        )


def _halves(
    workload: Workload[DepthwiseConv2dParams], target: Target
) -> dict[str, tuple[Template, Workload[DepthwiseConv2dParams]]]:
    """Prefix of knobs -> the template and the workload of a gradient."""
    dx = workload.replace(direction="grad_input", deterministic=False)
    dw = workload.replace(direction="grad_weight")
    return {"dx_": (_first(_OF_DX, dx, target), dx), "dw_": (_first(_OF_DW, dw, target), dw)}


def _first(templates: Sequence[Template], workload: Workload[DepthwiseConv2dParams], target: Target) -> Template:
    """The first of some templates that takes a workload, or the last one."""
    return next((each for each in templates[:-1] if each.validate(workload, target) is None), templates[-1])
