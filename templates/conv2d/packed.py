"""conv2d on Hopper for layouts and channels that TMA cannot load: pack the arguments, then run conv2d_wgmma.

    x            any layout         ->  x_packed        NHWC, c filled up with zeros to 16 bytes     at every call
    weight       any layout         ->  weight_packed   OHWI, both channels filled up with zeros     constant
    bias, scale ... of K channels   ->  *_packed        filled up with zeros                         constant
    residual     the layout of y    ->  residual_packed NHWC, k filled up                            at every call
    y            the layout of y   <-   y_packed        NHWC; drops the channels that fill up        at every call

What is in the wanted form already is used as it is. Zero channels add nothing to a sum, whatever the zero point of x is,
because the correction for it multiplies sums of weights. Each arrow is a step of `layout_transform.repack`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from schedsearch.config import Config
from schedsearch.launch import Pointer
from schedsearch.ops import ArgSpec, Layout
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.conv2d.wgmma import Conv2dWgmma
from schedsearch.templates.conv2d.workspaces import over_workspaces
from schedsearch.templates.layout_transform.repack import Repack
from schedsearch.templates.parts.hopper import ALIGNMENT_BYTES
from schedsearch.workload import Workload

_INNER = Conv2dWgmma()
_TUNED = ("tile_x_bytes", "tile_y_bytes", "vector_bytes", "unroll", "threads")  # knobs of the steps at every call
_PREFIXES = {"x": "pack_", "y": "unpack_"}


class Conv2dPacked(Template):
    """conv2d for compute capability 9.0 in every layout and with any number of channels, one group; dtypes of conv2d_wgmma.

    A configuration is one of conv2d_wgmma for the packed workload, plus the tiles that pack x and unpack y.
    """

    name = "conv2d_packed"
    version = 1 + Conv2dWgmma.version  # if either version changes, a configuration means another kernel
    op = "conv2d"
    kind = "cuda"

    def validate(self, workload: Workload, target: Target) -> str | None:
        if workload.groups != 1:
            return f"groups is {workload.groups}; allowed: 1"
        if _INNER.validate(workload, target) is None:
            return f"{workload.label} needs no packing; conv2d_wgmma takes such workloads as they are"
        packed = Packed(workload, target)
        if reason := _INNER.validate(packed.workload, target):
            return f"as {packed.workload.label}: {reason}"
        for name, repack in packed.repacks.items():
            if reason := repack.problem():
                return f"{name}: {reason}"
        return None

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        packed = Packed(workload, target)
        inner = _INNER.space(packed.workload, target)
        knobs, constraints, derived = list(inner.knobs), list(inner.constraints), dict(inner.derived)
        for name, prefix in packed.tuned():
            own = _Prefixed(packed.repacks[name], prefix)
            knobs += own.knobs
            constraints += own.constraints
            derived |= own.derived
        return ConfigSpace(knobs, constraints, derived)

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        """conv2d_wgmma's default for the packed workload, and layout_transform_cuda's for the steps around it."""
        packed = Packed(workload, target)
        values = dict(_INNER.default(packed.workload, target, _INNER.space(packed.workload, target)))
        for name, prefix in packed.tuned():
            own = packed.repacks[name].default()
            values |= {prefix + knob: own[knob] for knob in _TUNED if knob in own}
        return Config(values)

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        packed = Packed(workload, target)
        inner_names = _INNER.space(packed.workload, target).names
        inner = _INNER.kernel(packed.workload, target, Config({name: config[name] for name in inner_names}))
        workspaces = {name: f"{name}_packed" for name in packed.repacks}
        constant = {spec.name: spec.constant for spec in workload.signature}
        used = {param.buffer for step in inner.steps for param in step.params if isinstance(param, Pointer)}
        before: list[KernelStep] = []
        after: list[KernelStep] = []
        sizes, alignments = dict(inner.workspaces), dict(inner.alignments)
        for name, repack in packed.repacks.items():
            own = _own_config(repack, config, _PREFIXES.get(name))
            x_alignment, y_alignment = repack.alignments(own)
            if name == "y":
                after.append(repack.step(own, x=workspaces[name], y=name))
                sizes[workspaces[name]], alignments[name] = repack.permutation.x_bytes, y_alignment
            elif name in ("x", "weight") or name in used:
                before.append(repack.step(own, x=name, y=workspaces[name], constant=constant[name]))
                sizes[workspaces[name]], alignments[name] = repack.permutation.y_bytes, x_alignment
        convolve = [over_workspaces(step, workspaces) for step in inner.steps]
        return dataclasses.replace(inner, steps=(*before, *convolve, *after), workspaces=sizes, alignments=alignments)


@dataclass(frozen=True)
class Packed:
    """The convolution over packed arguments, and the changes of layout around it."""

    original: Workload
    target: Target

    @functools.cached_property
    def workload(self) -> Workload:
        """The same convolution in NHWC and OHWI, with channels filled up to what TMA needs."""
        w = self.original
        channels = ALIGNMENT_BYTES // dtype_of(w.dtype).nbytes
        columns = max(8, ALIGNMENT_BYTES // dtype_of(w.out_dtype).nbytes)
        return w.replace(layout="NHWC", weight_layout="OHWI", c=_filled_up(w.c, channels), k=_filled_up(w.k, columns))

    @functools.cached_property
    def repacks(self) -> Mapping[str, Repack]:
        """Argument or output -> its change of layout, for each that differs. Arguments first, in their order."""
        w, inner = self.original, self.workload
        found: dict[str, Repack] = {}
        for spec, wanted in zip((*w.signature, *w.outputs), (*inner.signature, *inner.outputs)):
            if (spec.axes, spec.shape) == (wanted.axes, wanted.shape):
                continue
            given, made = Layout.parse(spec.axes), Layout.parse(wanted.axes)
            sizes, filled = _extents(w, spec), _extents(inner, wanted)
            element_bytes = dtype_of(spec.dtype).nbytes
            if spec.name in {output.name for output in w.outputs}:
                found[spec.name] = Repack.of(made, given, sizes, element_bytes, self.target, x_sizes=filled)
            else:
                found[spec.name] = Repack.of(given, made, sizes, element_bytes, self.target, y_sizes=filled)
        return found

    def tuned(self) -> Iterator[tuple[str, str]]:
        """(argument or output, prefix of its knobs) of the changes of layout that are tuned."""
        return ((name, prefix) for name, prefix in _PREFIXES.items() if name in self.repacks)


def _filled_up(channels: int, multiple: int) -> int:
    return -(-channels // multiple) * multiple


def _extents(w: Workload, spec: ArgSpec) -> dict[str, int]:
    """Axis -> logical extent of an argument or output of a convolution of one group."""
    out_h, out_w = w.definition.output_hw(w.params)  # type: ignore[attr-defined]
    if spec.name == "x":
        return {"N": w.n, "C": w.c, "H": w.h, "W": w.w}
    if spec.name == "weight":
        return {"O": w.k, "I": w.c, "H": w.r, "W": w.s}
    if spec.axes == "K":
        return {"K": w.k}
    return {"N": w.n, "C": w.k, "H": out_h, "W": out_w}


def _own_config(repack: Repack, config: Mapping[str, Any], prefix: str | None) -> Config:
    """The configuration of a change of layout: its default, with the knobs of this prefix."""
    own = repack.default()
    if prefix is None:
        return own
    return Config({knob: config.get(prefix + knob, value) for knob, value in own.items()})


class _Prefixed:
    """The tuned part of a change of layout's space, whose names have a prefix. Other knobs have the default's values."""

    def __init__(self, repack: Repack, prefix: str) -> None:
        default, space = repack.default(), repack.space()
        fixed = {name: value for name, value in default.items() if name not in _TUNED}

        def within(columns: Mapping[str, Any]) -> Mapping[str, Any]:
            return _Columns(columns, prefix, fixed)

        self.knobs = [
            Knob(prefix + knob.name, knob.values, f"{prefix.removesuffix('_')}ing: {knob.doc}")
            for knob in space.knobs
            if knob.name in _TUNED
        ]
        self.constraints = [
            Constraint(f"{prefix.removesuffix('_')}ing: {rule.reason}", _of_columns(rule.predicate, within))
            for rule in space.constraints
        ]
        self.derived = {prefix + name: _of_columns(function, within) for name, function in space.derived.items()}


def _of_columns(function: Any, within: Any) -> Any:
    return lambda columns: function(within(columns))


class _Columns(Mapping[str, Any]):
    """Columns of a space without their prefix, and the values of fixed knobs."""

    def __init__(self, columns: Mapping[str, Any], prefix: str, fixed: Mapping[str, Any]) -> None:
        self._columns, self._prefix, self._fixed = columns, prefix, fixed

    def __getitem__(self, name: str) -> Any:
        return self._fixed[name] if name in self._fixed else self._columns[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        raise NotImplementedError("formulas of a space read columns by name")

    def __len__(self) -> int:
        raise NotImplementedError("formulas of a space read columns by name")
