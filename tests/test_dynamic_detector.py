"""Detectors whose batch, height and width are open, as exports of YOLOv8 and MTCNN are: anchors counted by Range, reshapes
of maps to rows, and pads that depend on the size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from image_structures import anchors, detector, proposals  # noqa: E402
from structure_support import FLOAT, Structure  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.dynamic.graph import Size  # noqa: E402
from schedsearch.dynamic.model import read_graph  # noqa: E402
from schedsearch.network.model import ModelError  # noqa: E402

SIZES = {"n": (1, 2), "h": (2, 5), "w": (3, 6)}


def sizes(**limits: tuple[int, int]) -> dict[str, Size]:
    return {name: Size(name, *each) for name, each in limits.items()}


def head() -> Any:
    """The end of a detector with two maps: rows of all pixels, beside the centres of these."""
    g = Structure(17, x=("n", 4, "h", "w"))
    up = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    maps = ["x", g.op("Resize", "x", "", g.array([1, 1, 2, 2]), **up)]
    batch = g.op("Unsqueeze", g.op("Gather", g.op("Shape", "x"), g.array(0, np.int64)), g.ints(0))
    to = g.op("Concat", batch, g.ints(4), g.ints(-1), axis=0)
    rows = g.op("Concat", *(g.op("Reshape", each, to) for each in maps), axis=2)
    centres = g.op("Concat", *(anchors(g, each)[0] for each in maps), axis=0)
    low = g.op(
        "Sub",
        g.op("Unsqueeze", g.op("Transpose", centres, perm=[1, 0]), g.ints(0)),
        g.op("Slice", rows, g.ints(0), g.ints(2), g.ints(1)),
    )
    return g.model(low)


def computed(model: Any, x: Any) -> list[Any]:
    try:
        import onnxruntime
    except ImportError:
        from onnx.reference import ReferenceEvaluator

        return list(ReferenceEvaluator(model).run(None, {"x": x}))
    return list(onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x}))


def check(model: Any, limits: dict[str, tuple[int, int]], shapes: list[tuple[int, ...]], folder: Path) -> None:
    onnx.save(model, folder / "net.onnx")
    with schedsearch.build_dynamic(folder / "net.onnx", limits, target="cpu", db=folder / "r.db", progress=False) as net:
        for shape in shapes:
            x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
            found = net(x)
            for ours, wanted in zip(found if isinstance(found, tuple) else (found,), computed(model, x), strict=True):
                assert ours.shape == wanted.shape
                np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.long(of="detectors")
def test_centres_of_pixels_meet_rows_of_pixels(tmp_path: Path) -> None:
    """Both have as many as there are pixels in two maps: that is h w + 2 h 2 w in two ways, which a run compares."""
    check(head(), SIZES, [(1, 4, 2, 3), (2, 4, 5, 6), (2, 4, 3, 5)], tmp_path)


def test_a_detector_of_any_batch_and_size_is_a_graph() -> None:
    limits = {"n": (1, 2), "h": (8, 32), "w": (8, 48)}
    graph = read_graph(detector("n", 3, "h", "w"), sizes(**limits))
    (output,) = graph.program().outputs
    assert graph.bound(output).shape == (2, 7, 8 * 12 + 4 * 6)


def test_a_batch_that_stays_does_not_count_twice() -> None:
    g = Structure(17, x=("n", 3, "w"))
    batch = g.op("Slice", g.op("Shape", "x"), g.ints(0), g.ints(1))
    y = g.op("Reshape", "x", g.op("Concat", batch, g.ints(-1), axis=0))
    graph = read_graph(g.model(g.op("Neg", y)), sizes(n=(1, 8), w=(1, 5)))
    assert graph.bound(graph.program().outputs[0]).shape == (8, 15)


@pytest.mark.parametrize("half", [pytest.param(0.0, marks=pytest.mark.long(of="detectors")), 0.5])
def test_a_range_of_floats_counts_by_integers_or_is_refused(half: float, tmp_path: Path) -> None:
    g = Structure(17, x=("h", "w"))
    rows = g.op("Cast", g.op("Squeeze", g.op("Slice", g.op("Shape", "x"), g.ints(0), g.ints(1)), g.ints(0)), to=FLOAT)
    counted = g.op("Range", g.array(half), rows, g.array(1.0))
    model = g.model(g.op("Mul", counted, g.array(0.25)))
    if not half:
        check(model, {"h": (1, 9), "w": (1, 3)}, [(1, 3), (9, 1), (4, 2)], tmp_path)
        return
    with pytest.raises(ModelError, match="counts by floats that are computed from sizes; allowed: integers below"):
        read_graph(model, sizes(h=(1, 9), w=(1, 3)))


@pytest.mark.long(of="detectors")
def test_pads_that_only_follow_the_image_may_depend_on_its_size(tmp_path: Path) -> None:
    """auto_pad SAME_UPPER of windows of 2 by 2 with strides of 2 adds a row behind an odd height, and nothing before it."""
    check(
        proposals("n", "h", "w", 3), {"n": (1, 2), "h": (12, 17), "w": (12, 16)}, [(1, 12, 13, 3), (2, 17, 16, 3)], tmp_path
    )
