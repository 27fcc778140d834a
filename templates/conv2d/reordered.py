"""conv2d on Hopper that reads another layout than it writes: bring x to NHWC, then run a template of NHWC.

    x            any layout  ->  x_nhwc       at every call
    weight       any layout  ->  weight_ohwi  constant

conv2d_packed does the same around conv2d_wgmma. This template is for layers that conv2d_stem and conv2d_halo compute faster:
few input channels, and windows of several pixels. y and the residual are in NHWC, so nothing follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedsearch.config import Config
from schedsearch.ops import Layout
from schedsearch.ops.conv2d import Conv2dParams
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, Template
from schedsearch.templates.conv2d.halo import Conv2dHalo
from schedsearch.templates.conv2d.stem import Conv2dStem
from schedsearch.templates.layout_transform.repack import Repack
from schedsearch.templates.parts.prepared import Prepared, over_prepared
from schedsearch.templates.parts.subspaces import Choice, fixing, joined, one_of, prefixed
from schedsearch.workload import Workload

_INNER: Mapping[str, Template[Conv2dParams]] = {"conv2d_stem": Conv2dStem(), "conv2d_halo": Conv2dHalo()}
_TUNED = ("tile_x_bytes", "tile_y_bytes", "vector_bytes", "unroll", "threads")  # knobs of the step that moves x
_PREFIX = "pack_"


class Conv2dReordered(Template[Conv2dParams]):
    """conv2d for compute capability 9.0 that reads any layout and writes NHWC; dtypes of conv2d_stem and conv2d_halo.

    A configuration is one of the template that runs in NHWC, plus the tiles that bring x there. Knobs that this template's
    earlier records lack keep the value that those mean: not all that it runs have them, so `added` cannot say it here.
    """

    name = "conv2d_reordered"
    version = Conv2dStem.version + Conv2dHalo.version  # if either changes, a configuration means another kernel
    op = "conv2d"
    kind = "cuda"

    def validate(self, workload: Workload[Conv2dParams], target: Target) -> str | None:
        p = workload.params
        if p.layout == "NHWC" or p.output_layout != "NHWC":
            return f"layout and output_layout are {p.layout} and {p.output_layout}; allowed: one but NHWC, and NHWC"
        if p.x_slice:
            return f"x is a slice of an array of {p.x_slice[0]} channels; allowed: an array of its own"
        if not _inner(workload, target):
            return "; ".join(f"as {name}: {each.validate(_in_nhwc(workload), target)}" for name, each in _INNER.items())
        return next((reason for repack in _repacks(workload, target).values() if (reason := repack.problem())), None)

    def space(self, workload: Workload[Conv2dParams], target: Target) -> ConfigSpace:
        found, plain = _inner(workload, target), _in_nhwc(workload)
        spaces: dict[Choice, ConfigSpace] = {
            (name,): fixing(template.space(plain, target), template.added) for name, template in found.items()
        }
        space = one_of([Knob("inner", tuple(found), "the template that computes in NHWC")], spaces)
        x = _repacks(workload, target)["x"]
        fixed = {name: value for name, value in x.default().items() if name not in _TUNED}
        return joined(space, prefixed(fixing(x.space(), fixed), _PREFIX, "packing"))

    def default(self, workload: Workload[Conv2dParams], target: Target, space: ConfigSpace) -> Config:
        """The first template's default, and layout_transform_cuda's for the step before it."""
        (name, template), *_ = _inner(workload, target).items()
        plain = _in_nhwc(workload)
        values: dict[str, Any] = {knob.name: knob.values[0] for knob in space.knobs}  # those that it does not use
        chosen = template.default(plain, target, template.space(plain, target))
        values |= {"inner": name, **{knob: value for knob, value in chosen.items() if knob not in template.added}}
        own = _repacks(workload, target)["x"].default()
        return Config(values | {_PREFIX + knob: own[knob] for knob in _TUNED if knob in own})

    def kernel(self, workload: Workload[Conv2dParams], target: Target, config: Config) -> KernelSource:
        template, plain = _INNER[config["inner"]], _in_nhwc(workload)
        own = Config({name: {**template.added, **config}[name] for name in template.space(plain, target).names})
        prepared = []
        for name, repack in _repacks(workload, target).items():
            to, tiles = f"{name}_nhwc", repack.default()
            if name == "x":
                tiles = Config({knob: config.get(_PREFIX + knob, value) for knob, value in tiles.items()})
            step = repack.step(tiles, x=name, y=to, constant=name != "x")
            prepared.append(Prepared(name, to, repack.permutation.y_bytes, step, repack.alignments(tiles)[0]))
        return over_prepared(template.kernel(plain, target, own), prepared)


def _in_nhwc(workload: Workload[Conv2dParams]) -> Workload[Conv2dParams]:
    return workload.replace(layout="NHWC", output_layout="NHWC", weight_layout="OHWI")


def _inner(workload: Workload[Conv2dParams], target: Target) -> dict[str, Template[Conv2dParams]]:
    """The templates that compute it in NHWC."""
    plain = _in_nhwc(workload)
    return {name: template for name, template in _INNER.items() if template.validate(plain, target) is None}


def _repacks(workload: Workload[Conv2dParams], target: Target) -> dict[str, Repack]:
    """Argument -> its change of layout, for x, and for the weight if it differs."""
    p, found = workload.params, {}
    sizes = {
        "x": {"N": p.n, "C": p.c, "H": p.h, "W": p.w},
        "weight": {"O": p.k, "I": p.c // p.groups, "H": p.r, "W": p.s},
    }
    for spec, wanted in zip(workload.signature, _in_nhwc(workload).signature):
        if spec.name in sizes and spec.axes != wanted.axes:
            given, made = Layout.parse(spec.axes), Layout.parse(wanted.axes)
            found[spec.name] = Repack.of(given, made, sizes[spec.name], dtype_of(spec.dtype).nbytes, target)
    return found
