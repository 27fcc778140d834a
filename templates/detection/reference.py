"""The references of nms and roi_align in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from schedsearch.ops.nms import NmsParams
from schedsearch.ops.roi_align import RoiAlignParams
from schedsearch.templates.parts.whole_reference import WholeReference
from schedsearch.workload import Workload

Array = np.ndarray[Any, np.dtype[Any]]


class NmsReference(WholeReference[NmsParams]):
    """Greedy: the best box that is left drops those that overlap it. Overlaps are float32, as kernels compute them."""

    def compute(self, workload: Workload[NmsParams], arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        p = workload.params
        boxes, scores = (np.asarray(arrays[name], np.float32) for name in ("boxes", "scores"))
        if p.center_point_box:
            half = boxes[..., 2:] / np.float32(2)
            low, high = boxes[..., :2] - half, boxes[..., :2] + half
        else:
            low, high = np.minimum(boxes[..., :2], boxes[..., 2:]), np.maximum(boxes[..., :2], boxes[..., 2:])
        area = np.prod(high - low, axis=-1, dtype=np.float32)
        rows = []
        for image, class_ in np.ndindex(p.n, p.classes):
            order = np.argsort(-scores[image, class_], kind="stable")
            left = [int(box) for box in order if scores[image, class_, box] > np.float32(p.score_threshold)]
            kept = 0
            while left and kept < p.max_output:
                best, kept = left[0], kept + 1
                rows.append((image, class_, best))
                rest = np.array(left[1:], np.int64)
                a, b = np.maximum(low[image, best], low[image, rest]), np.minimum(high[image, best], high[image, rest])
                both = np.prod(np.maximum(b - a, np.float32(0)), axis=-1, dtype=np.float32)
                union = area[image, best] + area[image, rest] - both
                with np.errstate(all="ignore"):
                    overlap = (both > 0) & (both / union > np.float32(p.iou_threshold))
                left = rest[~overlap].tolist()
        return {"y": np.array(rows, np.int64).reshape(-1, 3)}


class RoiAlignReference(WholeReference[RoiAlignParams]):
    """Samples in float64, region by region."""

    def compute(self, workload: Workload[RoiAlignParams], arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        p = workload.params
        x = np.asarray(arrays["x"], np.float64)
        x = x if p.layout == "NCHW" else x.transpose(0, 3, 1, 2)
        used = int(arrays["rois_extents"][0]) if "rois_extents" in arrays else p.rois
        y = np.zeros((used, p.c, p.oh, p.ow))
        for number in range(used):
            image = x[int(arrays["batch_indices"][number])]
            corners = np.asarray(arrays["rois"][number], np.float64) * p.spatial_scale
            corners -= 0.5 if p.coordinates == "half_pixel" else 0.0
            sides = []
            for axis, count, size in ((1, p.oh, p.h), (0, p.ow, p.w)):
                extent = corners[axis + 2] - corners[axis]
                extent = extent if p.coordinates == "half_pixel" else max(extent, 1.0)
                samples = p.sampling_ratio or max(0, int(np.ceil(extent / count)))
                at = corners[axis] + (np.arange(count * samples) + 0.5) * (extent / (count * max(samples, 1)))
                sides.append((samples, *_between(at, size)))
            (gh, top, bottom, down, in_h), (gw, left, right, across, in_w) = sides
            if gh and gw:
                y[number] = _bins(workload.params, image, (top, bottom, down, in_h), (left, right, across, in_w), gh, gw)
        return {"y": y if p.layout == "NCHW" else y.transpose(0, 2, 3, 1)}


def _between(at: Array, size: int) -> tuple[Array, Array, Array, Array]:
    """(pixel before, pixel behind, share of the one behind, whether the sample counts) of coordinates."""
    inside = (at >= -1.0) & (at <= size)
    at = np.clip(at, 0.0, size - 1.0)
    before = np.floor(at).astype(np.int64)
    return before, np.minimum(before + 1, size - 1), at - before, inside


def _bins(p: RoiAlignParams, image: Array, rows: tuple[Array, ...], columns: tuple[Array, ...], gh: int, gw: int) -> Array:
    """All bins of a region: the mean of the samples, or the largest weighted pixel."""
    top, bottom, down, in_h = rows
    left, right, across, in_w = columns
    counts = in_h[:, None] & in_w[None, :]
    parts = [
        image[:, h[:, None], w[None, :]] * (of_h[:, None] * of_w[None, :] * counts)
        for h, of_h in ((top, 1 - down), (bottom, down))
        for w, of_w in ((left, 1 - across), (right, across))
    ]
    samples = np.sum(parts, axis=0) if p.mode == "average" else np.max(parts, axis=0)
    grouped = samples.reshape(p.c, p.oh, gh, p.ow, gw)
    found: Array = grouped.mean(axis=(2, 4)) if p.mode == "average" else grouped.max(axis=(2, 4))
    return found
