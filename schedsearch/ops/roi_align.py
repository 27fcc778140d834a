"""roi_align: parts of images of any place and size, each as oh x ow pixels, as RoiAlign of ONNX.

A region of interest is (x1, y1, x2, y2) in units of 1 / `spatial_scale` pixels, of the image that batch_indices names. It is
divided into oh x ow bins, and each bin is sampled at gh x gw points that lie evenly in it. gh and gw are `sampling_ratio`,
or with 0 the bin's height and width, rounded up. A sample is interpolated linearly between four pixels; it is 0 where it
lies more than a pixel outside of the image. With mode `average` a bin is the mean of its samples, with `max` the largest of
the four weighted pixels of all its samples, as ONNX defines it. With coordinates `half_pixel` regions are shifted by half a
pixel; with `output_half_pixel` they are not, and are at least one pixel wide and high. A bin without a sample is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.base import Op
from schedsearch.ops.bounded import DYNAMIC, bounded, count_argument
from schedsearch.ops.checks import Domain
from schedsearch.ops.dependence import Dependence, ShapeFunction
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.images import IMAGE_SIZES, ImageParams, image
from schedsearch.ops.params import Parameter, Params, declared
from schedsearch.ops.specs import ArgSpec, Work
from schedsearch.typed import ParamsByName

MODES = ("average", "max")
COORDINATES = ("half_pixel", "output_half_pixel")
DTYPES = ("float16", "bfloat16", "float32")
LAYOUTS = ("NHWC", "NCHW")
_MOST_SAMPLES = 64  # along one side of a bin


@dataclass(frozen=True, eq=False, kw_only=True)
class RoiAlignParams(ImageParams):
    """See `roi_align`."""

    n: int = declared(IMAGE_SIZES["n"])
    c: int = declared(IMAGE_SIZES["c"])
    h: int = declared(IMAGE_SIZES["h"])
    w: int = declared(IMAGE_SIZES["w"])
    rois: int = declared(Parameter.count("regions of interest"))
    oh: int = declared(Parameter.count("height of y"))
    ow: int = declared(Parameter.count("width of y"))
    mode: str = declared(Parameter.choice("what becomes of the samples of a bin; default average", MODES))
    coordinates: str = declared(
        Parameter.choice("whether regions are shifted by half a pixel; default half_pixel", COORDINATES)
    )
    sampling_ratio: int = declared(
        Parameter(
            "samples along each side of a bin; 0, the default: as many as it has pixels",
            {"type": "integer", "minimum": 0, "maximum": _MOST_SAMPLES, "default": 0},
        )
    )
    spatial_scale: float = declared(
        Parameter("pixels of x for a unit of rois; default 1", {"type": "number", "default": 1.0})
    )
    dtype: str = declared(Parameter.choice("of x and y; default float16", DTYPES))
    rois_dtype: str = declared(Parameter.choice("of rois; default float32", DTYPES, "float32"))
    layout: str = declared(Parameter.choice("of x and y; default NHWC", LAYOUTS))
    dynamic: bool = declared(DYNAMIC)


_PARAMETERS = RoiAlignParams.parameters()


class RoiAlign(Op[RoiAlignParams]):
    params_type: ClassVar[type[Params]] = RoiAlignParams
    name: ClassVar[str] = "roi_align"
    reference: ClassVar[str] = "schedsearch.templates.detection.reference:RoiAlignReference"
    constructor: ClassVar[str] = "schedsearch:roi_align"

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        """The scale is a float32."""
        import numpy as np

        found, problems = super().normalise(params)
        if not problems:
            found["spatial_scale"] = float(np.float32(found["spatial_scale"]))
        return found, problems

    def problems(self, params: RoiAlignParams) -> Iterable[Problem]:
        if not 2.0**-16 <= params.spatial_scale <= 2.0**16:
            yield Problem("spatial_scale", f"spatial_scale is {params.spatial_scale}; allowed: 2**-16 to 2**16")

    def arguments(self, params: RoiAlignParams) -> tuple[ArgSpec, ...]:
        x = image("x", params, params.h, params.w)
        rois = ArgSpec("rois", "AB", (params.rois, 4), params.rois_dtype)
        indices = ArgSpec("batch_indices", "A", (params.rois,), "int64", role="index", below=params.n)
        return (x, rois, indices, count_argument(rois)) if params.dynamic else (x, rois, indices)

    def outputs(self, params: RoiAlignParams) -> tuple[ArgSpec, ...]:
        y = image("y", params.replace(n=params.rois), params.oh, params.ow)
        return bounded(replace(y)) if params.dynamic else (y,)

    def wrong_index(self, params: RoiAlignParams, place: int, index: int, names: Mapping[str, str]) -> str:
        x, count = names["x"], params.n
        where = f"the number of an image at [{place}] of {names['batch_indices']!r}"
        return f"{where} is {index}, but {x!r} has {count} images; allowed: 0 to {count - 1}"

    def shape_functions(self, params: RoiAlignParams) -> Mapping[str, ShapeFunction]:
        if not params.dynamic:
            return {}
        needs = {"x": Dependence.SHAPE, "rois": Dependence.SHAPE, "batch_indices": Dependence.NOTHING}
        sizes = {"N": 0, "C": params.c, "H": params.oh, "W": params.ow}
        return {"y": ShapeFunction(needs, _extent(tuple(sizes[axis] for axis in params.layout)))}

    def check_inputs(self, params: RoiAlignParams) -> Mapping[str, Domain]:
        """Regions inside of the images, whose corners may be swapped: results jump a pixel outside of them."""
        most = (min(params.h, params.w) - 1) / params.spatial_scale
        units = tuple(sorted({round(most * part / 64 * 4) / 4 for part in range(65) if round(most * part / 16) / 4 <= most}))
        found = {"x": Domain(range(-8, 9)), "rois": Domain(units), "batch_indices": Domain(range(params.n))}
        if params.dynamic:
            found["rois_extents"] = Domain(range(params.rois + 1))
        return found

    def timing_inputs(self, params: RoiAlignParams) -> Mapping[str, Domain]:
        """Regions as for verification; all of a bounded array is in use."""
        found = {"rois": self.check_inputs(params)["rois"]}
        return found | ({"rois_extents": Domain((params.rois,))} if params.dynamic else {})

    def work(self, params: RoiAlignParams) -> Work:
        """An element's samples have coordinates of float32, whose roundoff counts as often as there are pixels."""
        return Work(0, super().work(params).nbytes, 16 * (params.h + params.w))

    def label(self, params: RoiAlignParams) -> str:
        p = params
        words = [f"roi_align {p.n}x{p.h}x{p.w}x{p.c} {p.rois} rois to {p.oh}x{p.ow}"]
        words += [p[name] for name in ("mode", "coordinates") if p[name] != _PARAMETERS[name].schema["default"]]
        words += [f"ratio {p.sampling_ratio}"] if p.sampling_ratio else []
        words += [f"scale {p.spatial_scale:g}"] if p.spatial_scale != 1 else []
        words += ["dynamic"] if p.dynamic else []
        return " ".join([*words, dtype_of(p.dtype).short, p.layout])


ROI_ALIGN = RoiAlign()


def _extent(extents: tuple[int, ...]) -> Callable[..., int]:
    """The shape function of y; an extent of 0 stands for the number of regions."""

    def extent(axis: int, x: Sequence[int], rois: Sequence[int]) -> int:
        return extents[axis] if extents[axis] > 0 else rois[0]

    return extent
