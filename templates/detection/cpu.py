"""nms and roi_align on CPUs: see docs/kernels/detection.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from schedsearch.backend.cpu_ops import as_array, note_index
from schedsearch.backend.cpu_taps import stack_memory
from schedsearch.config import Config
from schedsearch.launch import Grid, NumbaArray, Pointer
from schedsearch.ops.nms import NmsParams
from schedsearch.ops.roi_align import RoiAlignParams
from schedsearch.ops.wrong_index import WRONG_INDEX
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.detection.nms_kernels import corners_of, overlaps
from schedsearch.templates.detection.roi_kernels import between, side
from schedsearch.templates.parts.casts import f32, i64
from schedsearch.templates.parts.cpu_elements import element_type, narrowed, widened
from schedsearch.templates.parts.cpu_threads import busy_threads, threads_knob
from schedsearch.templates.selection.cpu import sink
from schedsearch.templates.selection.keys import index_of, key_of, pair
from schedsearch.workload import Workload

_CHANNELS = (32, 128, 512)


class NmsCpu(Template[NmsParams]):
    """A work item has an image and class. It takes the best candidate from a heap until enough are kept."""

    name = "nms_cpu"
    version = 1
    op = "nms"
    kind = "cpu"

    def validate(self, workload: Workload[NmsParams], target: Target) -> str | None:
        return None

    def space(self, workload: Workload[NmsParams], target: Target) -> ConfigSpace:
        return ConfigSpace((threads_knob(target),))

    def default(self, workload: Workload[NmsParams], target: Target, space: ConfigSpace) -> Config:
        return Config(threads=space.values["threads"][-1])

    def kernel(self, workload: Workload[NmsParams], target: Target, config: Config) -> KernelSource:
        p, groups = workload.params, workload.params.n * workload.params.classes
        boxes, scores = (NumbaArray(spec.name, "float32", (spec.size,), (4,)) for spec in workload.signature)
        words = NumbaArray("scores", "uint32", scores.shape, (4,))
        y, y_extents = (NumbaArray(spec.name, "int64", (spec.size,), (8,)) for spec in workload.outputs)
        sizes = {"heaps": groups * p.boxes, "kept": groups * p.max_output, "kept_counts": groups}
        heaps, kept, kept_counts = (NumbaArray(name, "int64", (size,), (8,)) for name, size in sizes.items())
        params = (boxes, words, scores, heaps, kept, kept_counts)
        steps = (
            KernelStep(_suppress_kernel(workload), params, Grid(groups), min(groups, config["threads"])),
            KernelStep(_collect_kernel(workload), (kept, kept_counts, y, y_extents), Grid(1), 1),
        )
        return KernelSource("cpu", "native", steps, {name: 8 * size for name, size in sizes.items()})


class RoiAlignCpu(Template[RoiAlignParams]):
    """A work item has a region. It adds up the samples of some channels of a bin at a time."""

    name = "roi_align_cpu"
    version = 2
    op = "roi_align"
    kind = "cpu"

    def validate(self, workload: Workload[RoiAlignParams], target: Target) -> str | None:
        return None

    def space(self, workload: Workload[RoiAlignParams], target: Target) -> ConfigSpace:
        channels = tuple(n for n in _CHANNELS if n == _CHANNELS[0] or n < 2 * workload.params.c)
        return ConfigSpace((Knob("channels", channels, "channels of a bin that are sampled together"), threads_knob(target)))

    def default(self, workload: Workload[RoiAlignParams], target: Target, space: ConfigSpace) -> Config:
        return Config(channels=space.values["channels"][-1], threads=busy_threads(workload, target, space.values["threads"]))

    def kernel(self, workload: Workload[RoiAlignParams], target: Target, config: Config) -> KernelSource:
        p = workload.params
        batch = NumbaArray("batch_indices", "int64", (p.rois,), (8,))
        extents, y_extents = batch, batch  # read and written only with `dynamic`
        if p.dynamic:
            extents = NumbaArray("rois_extents", "int64", (2,), (8,))
            y_extents = NumbaArray("y_extents", "int64", (4,), (8,))
        wrong_index = Pointer(WRONG_INDEX, optional=True)
        params = (Pointer("x"), Pointer("rois"), batch, extents, Pointer("y"), y_extents, wrong_index)
        step = KernelStep(_roi_kernel(workload, config["channels"]), params, Grid(p.rois), min(p.rois, config["threads"]))
        return KernelSource("cpu", "native", (step,))


def _suppress_kernel(workload: Workload[NmsParams]) -> Callable[..., None]:
    """The kernel (boxes, words, scores, heaps, kept, kept_counts, start, stop) over images and classes."""
    p = workload.params
    count, classes, most = p.boxes, p.classes, p.max_output
    threshold, iou, key, corners = (
        p.score_threshold,
        p.iou_threshold,
        key_of("float32", True),
        corners_of(p.center_point_box),
    )

    def suppress(
        boxes: Any, words: Any, scores: Any, heaps: Any, kept: Any, kept_counts: Any, start: Any, stop: Any
    ) -> None:  # fmt: skip
        for group in range(start, stop):
            first, of_image = i64(group * count), i64(group // classes * count)
            left = i64(0)
            for box in range(count):
                if scores[first + box] > f32(threshold):
                    heaps[first + left] = -pair(key(words[first + box]), box)
                    left = i64(left + 1)
            for at in range(left // 2 - 1, -1, -1):
                sink(heaps, first, left, heaps[first + at], at)
            found = i64(0)
            while left > 0 and found < most:
                box = index_of(-heaps[first])
                left = i64(left - 1)
                sink(heaps, first, left, heaps[first + left], 0)
                x1, y1, x2, y2 = corners(boxes, 4 * (of_image + box))
                stays = True
                for other in range(found):
                    u1, v1, u2, v2 = corners(boxes, 4 * (of_image + kept[group * most + other]))
                    if overlaps(u1, v1, u2, v2, x1, y1, x2, y2, iou):
                        stays = False
                        break
                if stays:
                    kept[group * most + found] = box
                    found = i64(found + 1)
            kept_counts[group] = found

    return suppress


def _collect_kernel(workload: Workload[NmsParams]) -> Callable[..., None]:
    """The kernel (kept, kept_counts, y, y_extents, start, stop) of one item."""
    p = workload.params
    groups, classes, most = p.n * p.classes, p.classes, p.max_output

    def collect(kept: Any, kept_counts: Any, y: Any, y_extents: Any, start: Any, stop: Any) -> None:
        to = 0
        for group in range(groups):
            for i in range(kept_counts[group]):
                y[3 * to] = group // classes
                y[3 * to + 1] = group % classes
                y[3 * to + 2] = kept[group * most + i]
                to += 1
        y_extents[0] = to
        y_extents[1] = 3

    return collect


def _roi_kernel(workload: Workload[RoiAlignParams], channels: int) -> Callable[..., None]:
    """The kernel (x, rois, batch_indices, rois_extents, y, y_extents, wrong_index, start, stop) over regions. A region of an
    image that there is not is zeros."""
    p = workload.params
    count, height, width, oh, ow, regions = p.c, p.h, p.w, p.oh, p.ow, p.rois
    images, size, out_size, image = p.n, p.n * p.c * p.h * p.w, workload.outputs[0].size, p.c * p.h * p.w
    channels_last = p.layout == "NHWC"
    pixel, plane, out_pixel, out_plane = (count, 1, count, 1) if channels_last else (1, height * width, 1, oh * ow)
    element, roi_element, widen, widen_roi = (
        element_type(p.dtype), element_type(p.rois_dtype), widened(p.dtype), widened(p.rois_dtype)
    )  # fmt: skip
    narrow, memory, side_h, side_w = narrowed(p.dtype), stack_memory(4 * channels), side(workload, oh), side(workload, ow)
    averages, dynamic, shape, lowest = p.mode == "average", p.dynamic, workload.outputs[0].shape, -math.inf
    scale, offset = p.spatial_scale, 0.5 if p.coordinates == "half_pixel" else 0.0

    def roi_align(
        x: Any, rois: Any, batch_indices: Any, rois_extents: Any, y: Any, y_extents: Any, wrong_index: Any,
        start: Any, stop: Any,
    ) -> None:  # fmt: skip
        source, out = as_array(x, (size,), element), as_array(y, (out_size,), element)
        corners, found = as_array(rois, (4 * regions,), roi_element), as_array(memory(), (channels,), f32)
        used = stop
        if dynamic:
            used = min(stop, rois_extents[0])
            if start == 0:
                for axis in range(4):
                    y_extents[axis] = rois_extents[0] if axis == 0 else shape[axis]
        for region in range(start, used):
            x1 = f32(f32(widen_roi(corners[4 * region]) * f32(scale)) - f32(offset))
            y1 = f32(f32(widen_roi(corners[4 * region + 1]) * f32(scale)) - f32(offset))
            x2 = f32(f32(widen_roi(corners[4 * region + 2]) * f32(scale)) - f32(offset))
            y2 = f32(f32(widen_roi(corners[4 * region + 3]) * f32(scale)) - f32(offset))
            first_h, bin_h, gh = side_h(y1, y2)
            first_w, bin_w, gw = side_w(x1, x2)
            samples = max(gh, 0) * max(gw, 0)
            if (batch_indices[region] < 0) | (batch_indices[region] >= images):
                samples = 0
                if wrong_index != 0:
                    note_index(wrong_index, i64(region + 1), batch_indices[region])
            for at_bin in range(oh * ow):
                row, column = f32(first_h + f32(at_bin // ow) * bin_h), f32(first_w + f32(at_bin % ow) * bin_w)
                for channel in range(0, count, channels):
                    many = min(channels, count - channel)
                    for c in range(many):
                        found[c] = f32(0) if averages or samples == 0 else f32(lowest)
                    for sample in range(samples):
                        top, bottom, down, in_h = between(row, bin_h, sample // gw, gh, height)
                        left, right, across, in_w = between(column, bin_w, sample % gw, gw, width)
                        inside = f32(1) if in_h & in_w else f32(0)
                        for corner in range(4):
                            h = bottom if corner >= 2 else top
                            w = right if corner % 2 else left
                            share_h = down if corner >= 2 else f32(f32(1) - down)
                            share_w = across if corner % 2 else f32(f32(1) - across)
                            share = f32(f32(share_h * share_w) * inside)
                            at = batch_indices[region] * image + (h * width + w) * pixel + channel * plane
                            for c in range(many):
                                weighted = f32(widen(source[at + c * plane]) * share)
                                found[c] = f32(found[c] + weighted) if averages else max(found[c], weighted)
                    to = (region * count * oh * ow + at_bin * out_pixel) + channel * out_plane
                    for c in range(many):
                        mean = f32(found[c] / f32(max(samples, 1)))
                        out[to + c * out_plane] = narrow(mean if averages else found[c])

    return roi_align
