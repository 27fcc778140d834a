"""The kernel of roi_align on a GPU, and the coordinates of samples, which kernels on CPUs share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.roi_align import RoiAlignParams
from schedsearch.templates.parts import vectors
from schedsearch.templates.parts.casts import f32, i32, i64, u32, u64
from schedsearch.templates.parts.ptx import note_index
from schedsearch.workload import Workload

LOWEST = f32(-math.inf)


def roi_kernel(workload: Workload[RoiAlignParams], vector: int, each: int, threads: int) -> Callable[..., None]:
    """The kernel (x, rois, batch_indices, rois_extents, y, y_extents, wrong_index): a thread has `each` vectors of channels
    of a bin. A region of an image that there is not is zeros.

    The bins of neighbouring threads are neighbours in memory: in NHWC they differ in channels, in NCHW in their column.
    """
    p = workload.params
    images, n_channels, height, width, oh, ow, regions = p.n, p.c, p.h, p.w, p.oh, p.ow, p.rois
    channels_last, element = p.layout == "NHWC", dtype_of(p.dtype).nbytes
    groups, bins, roi_bytes = n_channels // (vector * each), oh * ow, 4 * dtype_of(p.rois_dtype).nbytes
    pixel = n_channels * element if channels_last else element  # bytes from a pixel of a row to the next
    of_channels = vector * element if channels_last else height * width * element  # between the vectors of a thread
    of_output = vector * element if channels_last else bins * element
    words, numbers = vectors.words_of(p.dtype, vector), vector * each
    load, unpack = vectors.load(p.dtype, vector), vectors.unpack(p.dtype, vector)
    pack, store = vectors.pack(p.dtype, vector), vectors.store(p.dtype, vector)
    roi_words, load_roi, unpack_roi = (
        vectors.words_of(p.rois_dtype, 4), vectors.load(p.rois_dtype, 4), vectors.unpack(p.rois_dtype, 4)
    )  # fmt: skip
    side_h, side_w, place = side(workload, oh), side(workload, ow), between
    averages, dynamic, shape, larger = p.mode == "average", p.dynamic, workload.outputs[0].shape, vectors.larger
    scale, offset = f32(p.spatial_scale), f32(0.5 if p.coordinates == "half_pixel" else 0.0)

    def roi_align(x, rois, batch_indices, rois_extents, y, y_extents, wrong_index) -> None:  # type: ignore[no-untyped-def]
        word = cuda.local.array(words, u32)
        number = cuda.local.array(vector, f32)
        found = cuda.local.array(numbers, f32)
        roi_word = cuda.local.array(roi_words, u32)
        corner = cuda.local.array(4, f32)
        item = i64(i64(cuda.blockIdx.x) * threads + cuda.threadIdx.x)
        region, rest = i64(item // (bins * groups)), i32(item % (bins * groups))
        used = i64(regions)
        if dynamic:
            used = min(used, i64(rois_extents[0]))
            if item < 4:
                y_extents[item] = rois_extents[0] if item == 0 else shape[item]
        group, at_bin = i32(rest // bins), i32(rest % bins)
        if channels_last:
            group, at_bin = i32(rest % groups), i32(rest // groups)
        row, column = i32(at_bin // ow), i32(at_bin % ow)
        if region < used:
            load_roi(roi_word, 0, u64(rois + u64(region * roi_bytes)), i32(1))
            unpack_roi(roi_word, 0, corner, 0)
            first_h, bin_h, gh = side_h(f32(f32(corner[1] * scale) - offset), f32(f32(corner[3] * scale) - offset))
            first_w, bin_w, gw = side_w(f32(f32(corner[0] * scale) - offset), f32(f32(corner[2] * scale) - offset))
            channel = i64(group * each) * of_channels
            image = i64(batch_indices[region])
            if (image < 0) | (image >= images):
                gh = i32(0)
                if (rest == 0) & (wrong_index != 0):
                    note_index(wrong_index, i64(region + 1), image)
            source = image * (n_channels * height * width * element) + channel
            for i in range(numbers):
                found[i] = f32(0) if averages else LOWEST
            for iy in range(gh):
                top, bottom, down, in_h = place(f32(first_h + row * bin_h), bin_h, iy, gh, height)
                for ix in range(gw):
                    left, right, across, in_w = place(f32(first_w + column * bin_w), bin_w, ix, gw, width)
                    inside = i32(in_h & in_w)
                    for corner_number in range(4):
                        h = bottom if corner_number >= 2 else top
                        w = right if corner_number % 2 else left
                        share_h = down if corner_number >= 2 else f32(f32(1) - down)
                        share_w = across if corner_number % 2 else f32(f32(1) - across)
                        share = f32(share_h * share_w)
                        at = i64(source + i64(h * width + w) * pixel)
                        for e in range(each):
                            load(word, 0, u64(x + u64(at + e * of_channels)), inside)
                            unpack(word, 0, number, 0)
                            for i in range(vector):
                                weighted = f32(number[i] * share)
                                before = found[e * vector + i]
                                found[e * vector + i] = f32(before + weighted) if averages else larger(before, weighted)
            count = i32(max(gh, 0) * max(gw, 0))
            bin_bytes = at_bin * n_channels * element if channels_last else at_bin * element
            to = i64(region * (bins * n_channels * element) + i64(group * each) * of_output + bin_bytes)
            for e in range(each):
                for i in range(vector):
                    total = found[e * vector + i]
                    number[i] = f32(total / f32(max(count, 1))) if averages else total
                    if count == 0:
                        number[i] = f32(0)
                pack(number, 0, word, 0)
                store(word, 0, u64(y + u64(to + e * of_output)))

    return roi_align


def side(p: Workload[RoiAlignParams], count: int) -> Callable[[Any, Any], Any]:
    """`side(start, end)` for kernels: (start, extent of a bin, its samples) along a side of a region of `count` bins."""
    at_least_one, ratio = p.params.coordinates != "half_pixel", p.params.sampling_ratio

    def along(start: Any, end: Any) -> Any:
        extent = f32(end - start)
        if at_least_one:
            extent = max(extent, f32(1))
        of_bin = f32(extent / f32(count))
        samples = i32(ratio)
        if ratio == 0:
            samples = i32(math.ceil(of_bin))
        return start, of_bin, samples

    return along


def between(start: Any, extent: Any, sample: Any, samples: Any, size: Any) -> Any:
    """(pixel before, pixel behind, share of the one behind, whether the sample counts) of a sample of a bin at `start`."""
    at = f32(start + f32(f32(f32(sample) + f32(0.5)) * extent) / f32(samples))
    inside = (at >= f32(-1)) & (at <= f32(size))
    at = f32(min(max(at, f32(0)), f32(size - 1)))
    before = i32(at)
    return before, i32(min(before + 1, size - 1)), f32(at - f32(before)), inside
