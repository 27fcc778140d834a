"""nms: non-maximum suppression, as NonMaxSuppression of ONNX.

For each image and class, boxes with a score above `score_threshold` are taken in the order of their scores, the highest
first and of equal ones that with the lower index. A box is dropped if its intersection over union with one that was kept
exceeds `iou_threshold`; at most `max_output` are kept. A row of y is (image, class, box), and rows come in this order: by
image, by class, by score. How many there are only the kernel knows: `y_extents` says it; see `ops.bounded`.

A box is (y1, x1, y2, x2), where the corners may be any two opposite ones, or with `center_point_box` (x, y, width, height).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.base import Op
from schedsearch.ops.bounded import bounded
from schedsearch.ops.checks import Domain
from schedsearch.ops.dependence import Dependence, ShapeFunction
from schedsearch.ops.params import MAX_INT, Parameter, Params, declared
from schedsearch.ops.specs import ArgSpec, Work
from schedsearch.typed import ParamsByName

LOWEST = -(2.0**24 - 1) * 2.0**104


@dataclass(frozen=True, eq=False, kw_only=True)
class NmsParams(Params):
    """See `nms`."""

    n: int = declared(Parameter.count("images"))
    classes: int = declared(Parameter.count("classes"))
    boxes: int = declared(Parameter.count("boxes of an image"))
    max_output: int = declared(Parameter.count("boxes to keep of an image and class, at most", size=False))
    iou_threshold: float = declared(
        Parameter(
            "boxes that overlap more are dropped; default 0", {"type": "number", "minimum": 0, "maximum": 1, "default": 0.0}
        )
    )
    score_threshold: float = declared(
        Parameter("boxes must score more; default: any finite score", {"type": "number", "default": LOWEST})
    )
    center_point_box: bool = declared(
        Parameter("boxes are (x, y, width, height), not two corners; default false", {"type": "boolean", "default": False})
    )


class Nms(Op[NmsParams]):
    params_type: ClassVar[type[Params]] = NmsParams
    name: ClassVar[str] = "nms"
    reference: ClassVar[str] = "schedsearch.templates.detection.reference:NmsReference"
    constructor: ClassVar[str] = "schedsearch:nms"

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        """No more boxes can be kept than there are. Thresholds are float32."""
        import numpy as np

        found, problems = super().normalise(params)
        if not problems:
            found["max_output"] = min(found["max_output"], found["boxes"])
            for name in ("iou_threshold", "score_threshold"):
                found[name] = float(np.float32(found[name]))
        return found, problems

    def problems(self, params: NmsParams) -> Iterable[Problem]:
        if not abs(params.score_threshold) <= -LOWEST:
            allowed = "allowed: the finite numbers of float32"
            yield Problem("score_threshold", f"score_threshold is {params.score_threshold}; {allowed}")
        size = params.n * params.classes * params.boxes
        if size > MAX_INT:
            yield Problem("boxes", f"there are {size} scores; allowed: up to {MAX_INT}")

    def arguments(self, params: NmsParams) -> tuple[ArgSpec, ...]:
        n, classes, boxes = (params[name] for name in ("n", "classes", "boxes"))
        scores = ArgSpec("scores", "ABC", (n, classes, boxes), "float32")
        return ArgSpec("boxes", "ABC", (n, boxes, 4), "float32"), scores

    def outputs(self, params: NmsParams) -> tuple[ArgSpec, ...]:
        most = params.n * params.classes * params.max_output
        return bounded(ArgSpec("y", "AB", (most, 3), "int64"))

    def shape_functions(self, params: NmsParams) -> Mapping[str, ShapeFunction]:
        needs = {"boxes": Dependence.NOTHING, "scores": Dependence.SHAPE}
        return {"y": ShapeFunction(needs, _extent(params.max_output), counted=True)}

    def check_inputs(self, params: NmsParams) -> Mapping[str, Domain]:
        """Corners and sizes that are integers, and few different scores, so that many are equal."""
        scores = tuple(number / 64 for number in range(-16, 64))
        return {"boxes": Domain(range(33)), "scores": Domain(scores)}

    def timing_inputs(self, params: NmsParams) -> Mapping[str, Domain]:
        return {"boxes": Domain(range(1025)), "scores": Domain(tuple(number / 1024 for number in range(1024)))}

    def work(self, params: NmsParams) -> Work:
        nbytes = sum(spec.nbytes for spec in self.arguments(params))
        return Work(0, nbytes, least_bytes=self.arguments(params)[1].nbytes)

    def label(self, params: NmsParams) -> str:
        p = params
        words = [f"nms {p.n}x{p.classes}x{p.boxes} keep {p.max_output} iou {p.iou_threshold:g}"]
        words += [f"score {p.score_threshold:g}"] if p.score_threshold != LOWEST else []
        return " ".join([*words, *(["centers"] if p.center_point_box else [])])


NMS = Nms()


def _extent(max_output: int) -> Callable[..., int]:
    """The bound of y's extents."""

    def extent(axis: int, scores: Sequence[int]) -> int:
        return 3 if axis == 1 else scores[0] * scores[1] * min(max_output, scores[2])

    return extent
