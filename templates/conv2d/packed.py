"""conv2d on Hopper for layouts and channels that TMA cannot load: pack the arguments, then run conv2d_wgmma.

    x            any layout         ->  x_packed        blocks of channels, filled up with zeros     at every call
    weight       any layout         ->  weight_packed   OHWI, both channels filled up with zeros     constant
    bias, scale ... of K channels   ->  *_packed        filled up with zeros                         constant
    residual     the layout of y    ->  residual_packed NHWC, k filled up                            at every call
    y            the layout of y   <-   y_packed        NHWC; drops the channels that fill up        at every call

The knob `x` is the number of channels of a block. With all of them in one block, x_packed is NHWC. Blocks are outermost,
(C/x, N, H, W, x), so that a tile has pixels of several images; or images are, NCHW[x]c: the knob `batch`.

An argument that has the wanted form is used as it is. Zero channels add nothing to a sum, whatever the zero point of x is,
because the correction for it multiplies sums of weights. Sums of x, for a zero point of the weight, are those of x as it is
given. Each arrow is a step of `layout_transform.repack`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schedsearch.config import Config
from schedsearch.launch import Pointer
from schedsearch.ops import ArgSpec, Layout
from schedsearch.ops.conv2d import CONV2D, Conv2dParams
from schedsearch.ops.conv2d_formats import INTEGERS
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, Template
from schedsearch.templates.conv2d.geometry import Blocks, Im2col
from schedsearch.templates.conv2d.tiles import batch_knob
from schedsearch.templates.conv2d.wgmma import GROUPS, Conv2dWgmma
from schedsearch.templates.conv2d.wgmma_sizes import GROUP_ROWS, ROW_BYTES
from schedsearch.templates.layout_transform.repack import Repack
from schedsearch.templates.parts.hopper import ALIGNMENT_BYTES
from schedsearch.templates.parts.prepared import Prepared, over_prepared
from schedsearch.templates.parts.subspaces import Choice, fixing, joined, one_of, prefixed
from schedsearch.templates.parts.window_sums import WindowSums
from schedsearch.workload import Workload

_INNER = Conv2dWgmma()
_TUNED = ("tile_x_bytes", "tile_y_bytes", "vector_bytes", "unroll", "threads")  # knobs of the steps at every call
_PREFIXES = {"x": "pack_", "y": "unpack_"}
_BLOCKS = (16, 32, 64, 128)  # channels of a block of x, besides all of them


class Conv2dPacked(Template[Conv2dParams]):
    """conv2d for compute capability 9.0 in every layout and with any number of channels, one group; dtypes of conv2d_wgmma.

    A configuration is one of conv2d_wgmma for the packed workload, plus the form of packed x, and the tiles that pack x and
    unpack y.
    """

    name = "conv2d_packed"
    version = 2 + Conv2dWgmma.version  # if either version changes, a configuration means another kernel
    op = "conv2d"
    kind = "cuda"
    renamed = Conv2dWgmma.renamed

    def validate(self, workload: Workload[Conv2dParams], target: Target) -> str | None:
        p = workload.params
        if p.x_slice:
            return f"x is a slice of an array of {p.x_slice[0]} channels; allowed: an array of its own"
        if any(stage.kind.moves for stage in p.epilogue):
            return "the epilogue has depth_to_space; allowed: without, as y may have to be packed"
        if workload.output.slice_of:
            return f"y is a slice of {p.slice_of} channels; allowed: an array of its own, as y may have to be packed"
        if p.groups != 1:
            return f"groups is {p.groups}; allowed: 1"
        packed = Packed(workload, target)
        if _INNER.validate(workload, target) is None and packed.workload == workload:
            return f"{workload.label} needs no packing; conv2d_wgmma takes such workloads as they are"
        if reason := _INNER.validate(packed.workload, target):
            return f"as {packed.workload.label}: {reason}"
        for name, repack in packed.repacks.items():
            if reason := repack.problem():
                return f"{name}: {reason}"
        return None

    def space(self, workload: Workload[Conv2dParams], target: Target) -> ConfigSpace:
        packed = Packed(workload, target)
        forms: dict[Choice, ConfigSpace] = {(form.x, form.batch): packed.space(form) for form in packed.forms}
        xs, batches = (tuple(dict.fromkeys(values)) for values in zip(*forms))
        x = Knob("x", xs, "channels of a block of packed x; the most are all of them, in NHWC")
        knobs = (x, dataclasses.replace(batch_knob(workload.params.n), values=batches))
        space = one_of(knobs, forms)
        return joined(space, _own_space(packed.repacks["y"], _PREFIXES["y"])) if "y" in packed.repacks else space

    def default(self, workload: Workload[Conv2dParams], target: Target, space: ConfigSpace) -> Config:
        """x in NHWC, conv2d_wgmma's default for that, and layout_transform_cuda's for the steps around it."""
        packed = Packed(workload, target)
        form = packed.forms[0]
        values: dict[str, Any] = {knob.name: knob.values[0] for knob in space.knobs}  # those that this form does not use
        values |= {"x": form.x, "batch": form.batch}
        values |= _INNER.default(packed.workload, target, _INNER.space(packed.workload, target))
        for name, repack in packed.around(form).items():
            if name in _PREFIXES:
                own = repack.default()
                values |= {_PREFIXES[name] + knob: own[knob] for knob in _TUNED if knob in own}
        return Config(values)

    def kernel(self, workload: Workload[Conv2dParams], target: Target, config: Config) -> KernelSource:
        packed = Packed(workload, target)
        form = packed.form(config["x"], config["batch"])
        inner_names = _INNER.space(packed.workload, target, form.gemm).names
        inner_config = Config({name: config[name] for name in inner_names})
        inner = _INNER.without_window_sums(packed.workload, target, inner_config, form.gemm)
        constant = {spec.name: spec.constant for spec in workload.signature}
        used = {param.buffer for step in inner.steps for param in step.params if isinstance(param, Pointer)}
        prepared = []
        for name, repack in packed.around(form).items():
            own, to = _own_config(repack, config, _PREFIXES.get(name)), f"{name}_packed"
            x_alignment, y_alignment = repack.alignments(own)
            if name == "y":
                step, nbytes = repack.step(own, x=to, y=name), repack.permutation.x_bytes
                prepared.append(Prepared(name, to, nbytes, step, y_alignment, is_output=True))
            elif name in ("x", "weight") or name in used:
                step, nbytes = repack.step(own, x=name, y=to, constant=constant[name]), repack.permutation.y_bytes
                prepared.append(Prepared(name, to, nbytes, step, x_alignment))
        source = over_prepared(inner, prepared)
        windows = WindowSums.of(workload)  # of x as it is given: channels that fill it up belong to no window
        return windows.before(source) if windows else source


@dataclass(frozen=True)
class Form:
    """How packed x lies in memory, and which pixels a tile has.

    Attributes:
        x: channels of a block, the last of which is filled up with zeros.
        batch: "folded": a tile may have pixels of several images; "bound": it has those of one.
        layout: of packed x.
        gemm: the convolution that reads it.
    """

    x: int
    batch: str
    layout: str
    gemm: Im2col


@dataclass(frozen=True)
class Packed:
    """The convolution over packed arguments, and the changes of layout around it."""

    original: Workload[Conv2dParams]
    target: Target

    @functools.cached_property
    def workload(self) -> Workload[Conv2dParams]:
        """The same convolution in NHWC and OHWI, with channels filled up to what TMA needs."""
        w = self.original
        channels = ALIGNMENT_BYTES // dtype_of(w.params.dtype).nbytes
        columns = max(8, ALIGNMENT_BYTES // dtype_of(w.params.out_dtype).nbytes)
        return w.replace(
            layout="NHWC",
            output_layout="NHWC",
            weight_layout="OHWI",
            c=_filled_up(w.params.c, channels),
            k=_filled_up(w.params.k, columns),
        )

    @functools.cached_property
    def forms(self) -> tuple[Form, ...]:
        """The forms that x can be packed to; NHWC is the first."""
        w, given = self.workload, Layout.parse(self.original.params.layout)
        element_bytes = dtype_of(w.params.dtype).nbytes
        # A k step wider than a block multiplies zeros by weights of the next block, which is exact for integers only.
        least_bytes = ALIGNMENT_BYTES if w.params.dtype in INTEGERS else min(ROW_BYTES)
        blocks = [x for x in _BLOCKS if x < w.params.c and x * element_bytes >= least_bytes and _nests(given, x)]
        found = [self.form(x, batch) for x in (w.params.c, *blocks) for batch in batch_knob(w.params.n).values]
        return tuple(form for form in found if self._problem(form) is None)

    def form(self, x: int, batch: Any) -> Form:
        """The form with blocks of x channels. All channels in one block are NHWC."""
        w, count = self.workload, -(-self.workload.params.c // x)
        folded = batch == "folded"
        if count == 1:
            layout, blocks = "NHWC", Blocks.folded(x, w.params.n, x)
        elif folded and w.params.n > 1:
            layout, blocks = f"CNHW{x}c", Blocks.folded(count * x, w.params.n, x)
        else:
            layout, blocks = f"NCHW{x}c", Blocks(x, count, count, 1)
        gemm = Im2col.of(w, x=blocks)
        if not folded:
            gemm = dataclasses.replace(gemm, images=w.params.n, image_rows=gemm.rows // w.params.n)
        return Form(x, str(batch), layout, gemm)

    def _problem(self, form: Form) -> str | None:
        x = self._repack_of_x(form)
        return form.gemm.problem(max_tile_rows=GROUP_ROWS * max(GROUPS)) or (x.problem() if x else None)

    def space(self, form: Form) -> ConfigSpace:
        """conv2d_wgmma's space for this form, with the knobs of the step that packs x."""
        space = _INNER.space(self.workload, self.target, form.gemm)
        if repack := self._repack_of_x(form):
            space = joined(space, _own_space(repack, _PREFIXES["x"]))
        if form.gemm.x.plain and form.batch == "bound":
            pixels = form.gemm.image_rows
            differs = Constraint("tiles that divide an image are folded, in NHWC", lambda q: pixels % q["bm"] != 0)
            space = ConfigSpace(space.knobs, (*space.constraints, differs), space.derived)
        return space

    def around(self, form: Form) -> Mapping[str, Repack]:
        """As `repacks`, with x packed to this form."""
        x = self._repack_of_x(form)
        others = {name: repack for name, repack in self.repacks.items() if name != "x"}
        return {"x": x, **others} if x else others

    def _repack_of_x(self, form: Form) -> Repack | None:
        """The change of layout of x, or None if x is in NHWC and stays so."""
        if form.layout == "NHWC":
            return self.repacks.get("x")
        w, x = self.original, self.original.signature[0]
        given, made = Layout.parse(x.axes), Layout.parse(form.layout)
        return Repack.of(given, made, _extents(w, x), dtype_of(x.dtype).nbytes, self.target)

    @functools.cached_property
    def repacks(self) -> Mapping[str, Repack]:
        """Argument or output -> its change of layout to NHWC or OHWI, for each that differs. Arguments first, in order."""
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


def _filled_up(channels: int, multiple: int) -> int:
    return -(-channels // multiple) * multiple


def _nests(layout: Layout, block: int) -> bool:
    """Whether blocks of channels of a layout and of this length nest."""
    return all(unit % block == 0 or block % unit == 0 for unit in layout.units("C"))


def _extents(w: Workload[Conv2dParams], spec: ArgSpec) -> dict[str, int]:
    """Axis -> logical extent of an argument or output of a convolution of one group."""
    out_h, out_w = CONV2D.output_hw(w.params)
    if spec.name == "x":
        return {"N": w.params.n, "C": w.params.c, "H": w.params.h, "W": w.params.w}
    if spec.name == "weight":
        return {"O": w.params.k, "I": w.params.c, "H": w.params.r, "W": w.params.s}
    if spec.axes == "K":
        return {"K": w.params.k}
    return {"N": w.params.n, "C": w.params.k, "H": out_h, "W": out_w}


def _own_config(repack: Repack, config: Mapping[str, Any], prefix: str | None) -> Config:
    """The configuration of a change of layout: its default, with the knobs of this prefix."""
    own = repack.default()
    if prefix is None:
        return own
    return Config({knob: config.get(prefix + knob, value) for knob, value in own.items()})


def _own_space(repack: Repack, prefix: str) -> ConfigSpace:
    """The tuned part of a change of layout's space, whose names have a prefix. Other knobs have the default's values."""
    fixed = {name: value for name, value in repack.default().items() if name not in _TUNED}
    return prefixed(fixing(repack.space(), fixed), prefix, f"{prefix.removesuffix('_')}ing")
