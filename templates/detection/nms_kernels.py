"""The kernels of nms on a GPU: candidates in the order of their scores, which of them overlap, and which stay.

A row of bits says which of the later candidates a candidate drops, 64 in a word; see Girshick et al., py-faster-rcnn (2015),
`nms_kernel.cu`. One block for each image and class then goes through the candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda

from schedsearch.ops.nms import NmsParams
from schedsearch.templates.parts.casts import f32, i32, i64
from schedsearch.templates.selection.block import block_sum, pad, sorter
from schedsearch.templates.selection.keys import index_of, key_of, pair
from schedsearch.workload import Workload

WORD = 64  # candidates of a word of bits, and of a tile


def order_kernel(p: Workload[NmsParams], threads: int) -> Callable[..., None]:
    """The kernel (words, scores, order, counts): the boxes of an image and class that score enough, the best first."""
    boxes, threshold = p.params.boxes, p.params.score_threshold
    key, sort = key_of("float32", True), sorter(threads)

    def order_boxes(words, scores, order, counts) -> None:  # type: ignore[no-untyped-def]
        chosen = cuda.shared.array(0, i64)
        taken = cuda.shared.array(1, i32)
        thread, first = i32(cuda.threadIdx.x), i64(i64(cuda.blockIdx.x) * boxes)
        if thread == 0:
            taken[0] = 0
        cuda.syncthreads()
        for box in range(thread, boxes, threads):
            if scores[first + box] > f32(threshold):
                chosen[cuda.atomic.add(taken, 0, 1)] = pair(key(words[first + box]), box)
        cuda.syncthreads()
        count, size = i32(taken[0]), i32(2)
        while size < count:
            size = i32(2 * size)
        pad(chosen, count, size, threads)
        cuda.syncthreads()
        sort(chosen, size)
        for i in range(thread, count, threads):
            order[first + i] = index_of(chosen[i])
        if thread == 0:
            counts[cuda.blockIdx.x] = count

    return order_boxes


def overlap_kernel(workload: Workload[NmsParams]) -> Callable[..., None]:
    """The kernel (boxes, order, counts, drops): 64 threads compare a tile of candidates with a tile of later ones."""
    p = workload.params
    boxes, classes, tiles, threshold = p.boxes, p.classes, -(-p.boxes // WORD), p.iou_threshold
    corners, numbers = corners_of(p.center_point_box), 4 * WORD

    def overlap(boxes_, order, counts, drops) -> None:  # type: ignore[no-untyped-def]
        later = cuda.shared.array(numbers, f32)
        thread, block = i32(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        group = i64(block // (tiles * tiles))
        row_tile, tile = i32(block // tiles % tiles), i32(block % tiles)
        count, first = i32(counts[group]), i64(group * boxes)
        of_image = i64(group // classes * boxes)
        if (tile >= row_tile) & (tile * WORD < count):
            column = i32(tile * WORD + thread)
            if column < count:
                x1, y1, x2, y2 = corners(boxes_, i64(4 * (of_image + order[first + column])))
                later[4 * thread] = x1
                later[4 * thread + 1] = y1
                later[4 * thread + 2] = x2
                later[4 * thread + 3] = y2
            cuda.syncthreads()
            row = i32(row_tile * WORD + thread)
            if row < count:
                left, top, right, bottom = corners(boxes_, i64(4 * (of_image + order[first + row])))
                bits = i64(0)
                begin = thread + 1 if tile == row_tile else i32(0)
                for i in range(begin, min(i32(WORD), count - tile * WORD)):
                    if overlaps(
                        left, top, right, bottom,
                        later[4 * i], later[4 * i + 1], later[4 * i + 2], later[4 * i + 3], threshold,
                    ):  # fmt: skip
                        bits = i64(bits | (i64(1) << i64(i)))
                drops[(first + row) * tiles + tile] = bits

    return overlap


def sweep_kernel(workload: Workload[NmsParams], threads: int) -> Callable[..., None]:
    """The kernel (order, counts, drops, kept, kept_counts): a block goes through the candidates of an image and class, 64 at
    a time. One thread decides which of a tile stay; then all threads mark what these drop of the tiles behind."""
    p = workload.params
    boxes, most, tiles = p.boxes, p.max_output, -(-p.boxes // WORD)

    def sweep(order, counts, drops, kept, kept_counts) -> None:  # type: ignore[no-untyped-def]
        gone = cuda.shared.array(tiles, i64)
        of_tile = cuda.shared.array(WORD, i64)
        stay = cuda.shared.array(1, i64)
        thread, group = i32(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        count, first = i32(counts[group]), i64(group * boxes)
        used = i32((count + WORD - 1) // WORD)
        for tile in range(thread, used, threads):
            gone[tile] = 0
        total, tile = i32(0), i32(0)
        cuda.syncthreads()
        while (tile < used) & (total < most):
            base = i64(first + tile * WORD)
            inside = i32(min(i32(WORD), count - tile * WORD))
            if thread < inside:
                of_tile[thread] = drops[(base + thread) * tiles + tile]
            cuda.syncthreads()
            if thread == 0:
                dropped, chosen, room = i64(gone[tile]), i64(0), i32(most - total)
                for i in range(inside):
                    bit = i64(i64(1) << i64(i))
                    if ((dropped & bit) == 0) & (room > 0):
                        chosen = i64(chosen | bit)
                        dropped = i64(dropped | of_tile[i])
                        room = i32(room - 1)
                stay[0] = chosen
            cuda.syncthreads()
            staying = i64(stay[0])
            if (thread < inside) & (((staying >> i64(thread)) & 1) != 0):
                before = i32(cuda.popc(staying & ((i64(1) << i64(thread)) - 1)))
                kept[group * most + total + before] = order[base + thread]
            for other in range(tile + 1 + thread, used, threads):
                word = i64(gone[other])
                for i in range(inside):
                    if (staying >> i64(i)) & 1:
                        word = i64(word | drops[(base + i) * tiles + other])
                gone[other] = word
            total = i32(total + cuda.popc(staying))
            tile = i32(tile + 1)
            cuda.syncthreads()
        if thread == 0:
            kept_counts[group] = total

    return sweep


def gather_kernel(workload: Workload[NmsParams], threads: int) -> Callable[..., None]:
    """The kernel (kept, kept_counts, y, y_extents): the kept boxes of all images and classes, one behind the other."""
    p = workload.params
    classes, most, groups, total = p.classes, p.max_output, p.n * p.classes, block_sum(threads)

    def collect(kept, kept_counts, y, y_extents) -> None:  # type: ignore[no-untyped-def]
        partial = cuda.shared.array(threads, i32)
        thread, group = i32(cuda.threadIdx.x), i64(cuda.blockIdx.x)
        before = i32(0)
        for other in range(thread, group, threads):
            before += i32(kept_counts[other])
        to, count = i64(total(before, partial)), i32(kept_counts[group])
        for i in range(thread, count, threads):
            y[3 * (to + i)] = group // classes
            y[3 * (to + i) + 1] = group % classes
            y[3 * (to + i) + 2] = kept[group * most + i]
        if (group == groups - 1) & (thread == 0):
            y_extents[0] = to + count
            y_extents[1] = 3

    return collect


def corners_of(center_point_box: bool) -> Callable[[Any, Any], Any]:
    """`corners(boxes, at)` for kernels: the lower and the upper corner of the box whose four numbers begin at a place."""

    def ordered(boxes: Any, at: Any) -> Any:
        a, b, c, d = boxes[at], boxes[at + 1], boxes[at + 2], boxes[at + 3]
        return min(a, c), min(b, d), max(a, c), max(b, d)

    def around(boxes: Any, at: Any) -> Any:
        half_width = f32(boxes[at + 2] * f32(0.5))
        half_height = f32(boxes[at + 3] * f32(0.5))
        x, y = boxes[at], boxes[at + 1]
        return (
            f32(x - half_width), f32(y - half_height),
            f32(x + half_width), f32(y + half_height),
        )  # fmt: skip

    return around if center_point_box else ordered


def overlaps(
    x1: Any, y1: Any, x2: Any, y2: Any, u1: Any, v1: Any, u2: Any, v2: Any, threshold: Any
) -> Any:  # fmt: skip
    """Whether the intersection of two boxes, over their union, exceeds a threshold; in float32."""
    width = f32(min(x2, u2) - max(x1, u1))
    height = f32(min(y2, v2) - max(y1, v1))
    both = f32(max(width, f32(0)) * max(height, f32(0)))
    one = f32(f32(x2 - x1) * f32(y2 - y1))
    other = f32(f32(u2 - u1) * f32(v2 - v1))
    union = f32(f32(one + other) - both)
    found = False
    if both > f32(0):
        found = f32(both / union) > f32(threshold)
    return found
