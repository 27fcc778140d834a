"""The built-in and installed templates, and the set of templates that a run uses."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from schedsearch.errors import UnsupportedError, UsageError, did_you_mean
from schedsearch.ops import operator, operator_names
from schedsearch.ops.registry import BUILT_IN as BUILT_IN_OPERATORS
from schedsearch.plugins import Offer, PluginError, load, offers, the_offer
from schedsearch.target import Target
from schedsearch.template.contract import Reference, Template
from schedsearch.text import type_text
from schedsearch.workload import Workload

ENTRY_POINT_GROUP = "schedsearch.templates"

# Built-in templates by name, imported when first needed; an import has no side effect.
BUILT_IN = {
    "conv2d_wgmma": "schedsearch.templates.conv2d.wgmma:Conv2dWgmma",
    "conv2d_halo": "schedsearch.templates.conv2d.halo:Conv2dHalo",
    "conv2d_stem": "schedsearch.templates.conv2d.stem:Conv2dStem",
    "conv2d_tf32x3": "schedsearch.templates.conv2d.tf32x3:Conv2dTf32x3",
    "conv2d_few_outputs": "schedsearch.templates.conv2d.few_outputs:Conv2dFewOutputs",
    "conv2d_reordered": "schedsearch.templates.conv2d.reordered:Conv2dReordered",
    "conv2d_packed": "schedsearch.templates.conv2d.packed:Conv2dPacked",
    "conv2d_mma": "schedsearch.templates.conv2d.mma:Conv2dMma",
    "conv2d_simt": "schedsearch.templates.conv2d.simt:Conv2dSimt",
    "conv2d_tcgen05": "schedsearch.templates.conv2d.tcgen05:Conv2dTcgen05",  # behind those that cards have run
    "conv2d_cpu": "schedsearch.templates.conv2d.cpu:Conv2dCpu",
    "conv2d_cpu_int8": "schedsearch.templates.conv2d.cpu_int8:Conv2dCpuInt8",
    "data_movement_cuda": "schedsearch.templates.data_movement.cuda:DataMovementCuda",
    "dyn_strided_slice_cuda": "schedsearch.templates.dyn_strided_slice.cuda:DynStridedSliceCuda",
    "dyn_strided_slice_cpu": "schedsearch.templates.dyn_strided_slice.cpu:DynStridedSliceCpu",
    # Small planes of NCHW first: of several templates, the first one's default serves workloads without a record.
    "depthwise_conv2d_planes_cuda": "schedsearch.templates.depthwise_conv2d.cuda_planes:DepthwiseConv2dPlanesCuda",
    "depthwise_conv2d_cuda": "schedsearch.templates.depthwise_conv2d.cuda:DepthwiseConv2dCuda",
    "depthwise_conv2d_mma": "schedsearch.templates.depthwise_conv2d.cuda_mma:DepthwiseConv2dMma",  # no card has run it
    "data_movement_cpu": "schedsearch.templates.data_movement.cpu:DataMovementCpu",
    "depthwise_conv2d_dw_planes_cuda": "schedsearch.templates.depthwise_conv2d.cuda_dw_planes:DepthwiseConv2dDwPlanesCuda",
    "depthwise_conv2d_dw_cuda": "schedsearch.templates.depthwise_conv2d.cuda_dw:DepthwiseConv2dDwCuda",
    "depthwise_conv2d_dw_mma": "schedsearch.templates.depthwise_conv2d.cuda_dw_mma:DepthwiseConv2dDwMma",  # nor this one
    "depthwise_conv2d_both_cuda": "schedsearch.templates.depthwise_conv2d.cuda_both:DepthwiseConv2dBothCuda",
    "depthwise_conv2d_cpu": "schedsearch.templates.depthwise_conv2d.cpu:DepthwiseConv2dCpu",
    "depthwise_conv2d_cpu_int8": "schedsearch.templates.depthwise_conv2d.cpu_int8:DepthwiseConv2dCpuInt8",
    "depthwise_conv1d_rows_cuda": "schedsearch.templates.depthwise_conv1d.cuda_rows:DepthwiseConv1dRows",
    "depthwise_conv1d_lines_cuda": "schedsearch.templates.depthwise_conv1d.cuda_lines:DepthwiseConv1dLines",
    "depthwise_conv1d_any_cuda": "schedsearch.templates.depthwise_conv1d.cuda_any:DepthwiseConv1dAny",
    "depthwise_conv1d_cpu": "schedsearch.templates.depthwise_conv1d.cpu:DepthwiseConv1dCpu",
    "causal_conv1d_token_cuda": "schedsearch.templates.depthwise_conv1d.token:CausalConv1dToken",
    "causal_conv1d_update_cuda": "schedsearch.templates.depthwise_conv1d.update:CausalConv1dUpdateCuda",
    "causal_conv1d_update_cpu": "schedsearch.templates.depthwise_conv1d.update:CausalConv1dUpdateCpu",
    "matmul_gemv": "schedsearch.templates.matmul.gemv:MatmulGemv",
    "matmul_wgmma": "schedsearch.templates.matmul.cuda:MatmulWgmma",
    "matmul_mma": "schedsearch.templates.matmul.cuda:MatmulMma",
    "matmul_simt": "schedsearch.templates.matmul.cuda:MatmulSimt",
    "matmul_tcgen05": "schedsearch.templates.matmul.cuda:MatmulTcgen05",
    "matmul_cpu": "schedsearch.templates.matmul.cpu:MatmulCpu",
    "matmul_cpu_int8": "schedsearch.templates.matmul.cpu:MatmulCpuInt8",
    "pool2d_planes_cuda": "schedsearch.templates.pool2d.cuda_planes:Pool2dPlanesCuda",
    "pool2d_cuda": "schedsearch.templates.pool2d.cuda:Pool2dCuda",
    "pool2d_cpu": "schedsearch.templates.pool2d.cpu:Pool2dCpu",
    "elementwise_cuda": "schedsearch.templates.elementwise.cuda:ElementwiseCuda",
    "elementwise_cpu": "schedsearch.templates.elementwise.cpu:ElementwiseCpu",
    "softmax_cuda": "schedsearch.templates.softmax.cuda:SoftmaxCuda",
    "softmax_cpu": "schedsearch.templates.softmax.cpu:SoftmaxCpu",
    "layer_norm_cuda": "schedsearch.templates.layer_norm.cuda:LayerNormCuda",
    "layer_norm_cpu": "schedsearch.templates.layer_norm.cpu:LayerNormCpu",
    "recurrent_cuda": "schedsearch.templates.recurrent.cuda:RecurrentCuda",
    "recurrent_cpu": "schedsearch.templates.recurrent.cpu:RecurrentCpu",
    "squeeze_excite_cuda": "schedsearch.templates.squeeze_excite.cuda:SqueezeExciteCuda",
    "resize_cuda": "schedsearch.templates.resize.cuda:ResizeCuda",
    "resize_cpu": "schedsearch.templates.resize.cpu:ResizeCpu",
    "dyn_resize_cuda": "schedsearch.templates.resize.dyn_cuda:DynResizeCuda",
    "dyn_resize_cpu": "schedsearch.templates.resize.dyn_cpu:DynResizeCpu",
    "gather_cuda": "schedsearch.templates.indexing.cuda:GatherCuda",
    "gather_cpu": "schedsearch.templates.indexing.cpu:GatherCpu",
    "scatter_cuda": "schedsearch.templates.indexing.cuda:ScatterCuda",
    "scatter_cpu": "schedsearch.templates.indexing.cpu:ScatterCpu",
    "topk_cuda": "schedsearch.templates.selection.topk_cuda:TopKCuda",
    "topk_cpu": "schedsearch.templates.selection.cpu:TopKCpu",
    "nonzero_cuda": "schedsearch.templates.selection.nonzero_cuda:NonZeroCuda",
    "nonzero_cpu": "schedsearch.templates.selection.cpu:NonZeroCpu",
    "nms_cuda": "schedsearch.templates.detection.cuda:NmsCuda",
    "nms_cpu": "schedsearch.templates.detection.cpu:NmsCpu",
    "roi_align_cuda": "schedsearch.templates.detection.cuda:RoiAlignCuda",
    "roi_align_cpu": "schedsearch.templates.detection.cpu:RoiAlignCpu",
    "unique_cuda": "schedsearch.templates.selection.unique_cuda:UniqueCuda",
    "unique_cpu": "schedsearch.templates.selection.unique_cpu:UniqueCpu",
    "arrange_cuda": "schedsearch.templates.arrange.cuda:ArrangeCuda",
    "arrange_cpu": "schedsearch.templates.arrange.cpu:ArrangeCpu",
    "fill_margin_cuda": "schedsearch.templates.arrange.margin:FillMarginCuda",
    "fill_margin_cpu": "schedsearch.templates.arrange.margin:FillMarginCpu",
    "layout_transform_cuda": "schedsearch.templates.layout_transform.cuda:LayoutTransformCuda",
    "layout_transform_cpu": "schedsearch.templates.layout_transform.cpu:LayoutTransformCpu",
}

# Templates of earlier versions, which records and workload files may name -> what took their place.
REMOVED = {"conv2d_unfold": "conv2d_stem, conv2d_mma and conv2d_packed take its layers"}

# Templates of kernels that `schedsearch.tunable` decorates; their knobs are the kernel's.
OF_DECORATORS = {
    "own_kernel_cuda": "schedsearch.templates.own_kernel.templates:OwnKernelCuda",
    "own_kernel_cpu": "schedsearch.templates.own_kernel.templates:OwnKernelCpu",
}


def _own() -> dict[str, str]:
    return BUILT_IN | OF_DECORATORS


class TemplateSet(Mapping[str, Template]):
    """Templates by name, in the order in which they were added.

    Attributes:
        problems: name -> why an installed template of this name cannot be used.

    Raises:
        UsageError: two templates have the same name, or a name is not printable text.
    """

    def __init__(self, templates: Iterable[Template], problems: Mapping[str, str] | None = None) -> None:
        self._templates: dict[str, Template] = {}
        self.problems = dict(problems or {})
        for template in templates:
            if not (isinstance(template.name, str) and template.name and template.name.isprintable()):
                raise UsageError(f"the name of a template must be text that can be printed, got {template.name!r}")
            if template.name in self._templates:
                raise UsageError(f"two templates are named {template.name!r}; names must be unique")
            self._templates[template.name] = template

    def __getitem__(self, name: str) -> Template:
        try:
            return self._templates[name]
        except KeyError:
            raise KeyError(self.why_missing(name)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._templates)

    def __len__(self) -> int:
        return len(self._templates)

    def why_missing(self, name: str, op: str | None = None) -> str:
        """Why this set has no template of this name, and which templates it has, if `op` is given for this operator."""
        if name in self.problems:
            return self.problems[name]
        if name in REMOVED:
            return _removed(name)
        known = [each.name for each in self.values() if op is None or op in each.ops]
        return f"no template {name!r}{did_you_mean(name, known)}; known{f' for {op}' if op else ''}: {', '.join(known)}"

    def matching(self, workload: Workload, target: Target) -> list[Template]:
        """The templates that can run the workload on the target.

        Raises:
            UnsupportedError: no template can; the message gives each template's reason.
        """
        found, elsewhere = [], []
        refused: dict[str, list[str]] = {}  # reason -> names
        for template in self.values():
            if workload.op not in template.ops:
                continue
            if template.kind != target.kind:
                elsewhere.append(template)
            elif reason := template.validate(workload, target):
                refused.setdefault(reason, []).append(template.name)
            else:
                found.append(template)
        if not found:
            reasons = [f"{', '.join(names)}: {reason}" for reason, names in refused.items()]
            for kind in dict.fromkeys(template.kind for template in elsewhere):
                names = [template.name for template in elsewhere if template.kind == kind]
                reasons.append(f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} for {kind}")
            if not reasons:
                given = ", ".join(f"{template.name} (for {', '.join(template.ops)})" for template in self.values())
                reasons.append(f"no template for {workload.op} is among those given: {given or 'none'}")
            reasons += self.problems.values()
            raise UnsupportedError(f"no template can run {workload.label} on {target.name}: " + "; ".join(reasons))
        return found


def load_template(name: str) -> Template:
    """One template, built in or installed, without importing the others.

    Raises:
        UsageError: the name is unknown; or the package that offers it cannot be imported, breaks the contract of `Template`,
            serves an operator that is not installed, or claims the same name as another package.
    """
    if location := _own().get(name):
        return _built_in(location)  # type: ignore[no-any-return]
    claims = offers(ENTRY_POINT_GROUP).get(name)
    if claims is None and name in REMOVED:
        raise UsageError(_removed(name))
    if claims is None:
        known = template_names()
        raise UsageError(f"no template {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}")
    return _installed(the_offer("template", claims))


def load_templates(names: Iterable[str] | None = None) -> TemplateSet:
    """The templates of these names; by default all built-in ones and all usable installed ones.

    Without `names` a broken package does not stop the others: the set's `problems` say what is wrong with it.

    Raises:
        UsageError: one of `names` is not available; see `load_template`.
    """
    if names is not None:
        return TemplateSet(load_template(name) for name in names)
    found: list[Template] = []
    problems = {
        name: f"template {name!r} is built in; the one of {claims[0]} is not used and needs another name"
        for name, claims in offers(ENTRY_POINT_GROUP).items()
        if name in _own()
    }
    for name in template_names():
        try:
            found.append(load_template(name))
        except PluginError as error:
            problems[name] = str(error)
    return TemplateSet(found, problems)


def _removed(name: str) -> str:
    return f"template {name!r} was removed; {REMOVED[name]}"


def template_names() -> list[str]:
    """All names, built-in ones first. Imports nothing, so that an installed one may prove unusable."""
    return list(dict.fromkeys([*_own(), *offers(ENTRY_POINT_GROUP)]))


def load_reference(op: str) -> Reference:
    """The reference that an operator names.

    Raises:
        UnknownOperatorError: the operator does not exist.
        UsageError: the operator names no reference, or its reference cannot be imported or is not a `Reference`.
    """
    location = operator(op).reference
    if op in BUILT_IN_OPERATORS:
        return _built_in(location)  # type: ignore[no-any-return]
    if not location:
        raise UsageError(f"operator {op!r} names no reference; kernels of it cannot be verified")
    found = load("reference of operator", Offer("", op, location, "operator " + repr(op)))
    if not (isinstance(found, type) and issubclass(found, Reference)):
        raise UsageError(
            f"{location}, the reference of operator {op!r}, must be a subclass of schedsearch.template.Reference"
        )
    return found()


def _built_in(location: str) -> Any:
    module, _, name = location.partition(":")
    return getattr(importlib.import_module(module), name)()


@functools.lru_cache(maxsize=1024)
def _loaded(offer: Offer) -> Template:
    made = load("template", offer)
    try:
        made = made() if callable(made) else made
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise PluginError(f"template {offer.name!r} of {offer} cannot be made: {cause}") from error
    problem = ""
    if not isinstance(made, Template):
        problem = f"it is {type_text(made)}, not a schedsearch.template.Template"
    elif made.name != offer.name:
        problem = f"its name is {made.name!r}; entry point and `name` must agree"
    elif made.kind not in ("cuda", "cpu"):
        problem = f"its kind is {made.kind!r}; allowed: cuda, cpu"
    if problem:
        raise PluginError(f"template {offer.name!r} of {offer} cannot be used: {problem}")
    return made  # type: ignore[no-any-return]


def _installed(offer: Offer) -> Template:
    template = _loaded(offer)
    known = operator_names()
    for op in template.ops:
        if op not in known:
            raise PluginError(
                f"template {offer.name!r} of {offer} is for operator {op!r}, which no installed package "
                f"offers{did_you_mean(op, known)}; known: {', '.join(known)}"
            )
    return template
