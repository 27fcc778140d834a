"""nms and roi_align on NVIDIA GPUs: see docs/kernels/detection.md."""

from __future__ import annotations

import math

from schedsearch.config import Config
from schedsearch.launch import Grid, NumbaArray, Pointer
from schedsearch.launch_rules import MAX_GRID_X
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.nms import NmsParams
from schedsearch.ops.roi_align import RoiAlignParams
from schedsearch.ops.wrong_index import WRONG_INDEX
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.detection import nms_kernels
from schedsearch.templates.detection.nms_kernels import WORD
from schedsearch.templates.detection.roi_kernels import roi_kernel
from schedsearch.templates.parts.vectors import LEAST_CAPABILITY
from schedsearch.templates.selection.block import next_power
from schedsearch.workload import Workload

THREADS = (64, 128, 256)
ORDER_THREADS = (256, 512, 1024)
EACH = (1, 2, 4, 8)
_COLLECT_THREADS = 128
_MOST_WORKSPACE = 8 << 30
_STATIC_SHARED = 4 << 10


class NmsCuda(Template[NmsParams]):
    """Candidates are sorted, compared pair by pair all at once, and gone through by a block for each image and class."""

    name = "nms_cuda"
    version = 1
    op = "nms"
    kind = "cuda"

    def validate(self, workload: Workload[NmsParams], target: Target) -> str | None:
        p = workload.params
        boxes, groups = p.boxes, p.n * p.classes
        most = (target.shared_bytes_per_block - _STATIC_SHARED) // 8
        if next_power(boxes) > most:
            return (
                f"there are {boxes} boxes; allowed: up to {1 << (most.bit_length() - 1)}, which are sorted in shared memory"
            )
        tiles = -(-boxes // WORD)
        if groups * tiles * tiles > MAX_GRID_X:
            return (
                f"{groups} images and classes of {boxes} boxes have {groups * tiles * tiles} tiles; allowed: less than 2**31"
            )
        if (nbytes := 8 * groups * boxes * tiles) > _MOST_WORKSPACE:
            return (
                f"{groups} images and classes of {boxes} boxes need {nbytes} bytes for overlaps; allowed: {_MOST_WORKSPACE}"
            )
        return None

    def space(self, workload: Workload[NmsParams], target: Target) -> ConfigSpace:
        return ConfigSpace(
            (
                Knob("order_threads", ORDER_THREADS, "threads of a block that sorts candidates"),
                Knob("threads", THREADS, "threads of a block that goes through candidates"),
            )
        )

    def default(self, workload: Workload[NmsParams], target: Target, space: ConfigSpace) -> Config:
        """A thread for each pair of candidates that are sorted, and for each tile behind the current one."""
        order = min((n for n in ORDER_THREADS if 2 * n >= workload.params.boxes), default=ORDER_THREADS[-1])
        sweep = min((n for n in THREADS if n * WORD >= workload.params.boxes), default=THREADS[-1])
        return Config(order_threads=order, threads=sweep)

    def kernel(self, workload: Workload[NmsParams], target: Target, config: Config) -> KernelSource:
        p = workload.params
        groups, tiles = p.n * p.classes, -(-p.boxes // WORD)
        order_threads, threads = config["order_threads"], config["threads"]
        boxes, scores = (NumbaArray(spec.name, "float32", (spec.size,), (4,)) for spec in workload.signature)
        words = NumbaArray("scores", "uint32", scores.shape, (4,))
        y, y_extents = (NumbaArray(spec.name, "int64", (spec.size,), (8,)) for spec in workload.outputs)
        sizes = {
            "order": groups * p.boxes, "counts": groups, "kept": groups * p.max_output, "kept_counts": groups,
        }  # fmt: skip
        spaces = {name: NumbaArray(name, "int32", (size,), (4,)) for name, size in sizes.items()}
        order, counts, kept, kept_counts = (spaces[name] for name in sizes)
        drops = NumbaArray("drops", "int64", (groups * p.boxes * tiles,), (8,))
        steps = (
            KernelStep(
                nms_kernels.order_kernel(workload, order_threads), (words, scores, order, counts), Grid(groups),
                order_threads,
                dynamic_shared_bytes=8 * next_power(p.boxes),
            ),
            KernelStep(
                nms_kernels.overlap_kernel(workload), (boxes, order, counts, drops), Grid(groups * tiles * tiles), WORD
            ),
            KernelStep(
                nms_kernels.sweep_kernel(workload, threads), (order, counts, drops, kept, kept_counts), Grid(groups), threads
            ),
            KernelStep(
                nms_kernels.gather_kernel(workload, _COLLECT_THREADS), (kept, kept_counts, y, y_extents), Grid(groups),
                _COLLECT_THREADS,
            ),
        )  # fmt: skip
        workspaces = {name: 4 * size for name, size in sizes.items()} | {"drops": 8 * drops.shape[0]}
        return KernelSource("cuda", "native", steps, workspaces)


class RoiAlignCuda(Template[RoiAlignParams]):
    """A thread has some channels of a bin, and takes their samples one after the other."""

    name = "roi_align_cuda"
    version = 2
    op = "roi_align"
    kind = "cuda"

    def validate(self, workload: Workload[RoiAlignParams], target: Target) -> str | None:
        if problem := target.older_than(LEAST_CAPABILITY):
            return problem
        elements = workload.outputs[0].size
        if elements > MAX_GRID_X:
            return f"y has {elements} elements; allowed: less than 2**31"
        return None

    def space(self, workload: Workload[RoiAlignParams], target: Target) -> ConfigSpace:
        vectors = _vectors(workload)
        channels = workload.params.c // vectors[-1]
        return ConfigSpace(
            (
                Knob("vector", vectors, "neighbouring channels of an access"),
                Knob("each", tuple(n for n in EACH if channels % n == 0), "vectors of a thread, or channels in NCHW"),
                Knob("threads", THREADS, "threads of a block"),
            )
        )

    def default(self, workload: Workload[RoiAlignParams], target: Target, space: ConfigSpace) -> Config:
        """The widest accesses in NHWC. In NCHW some channels for each thread, whose samples lie at the same places, if there
        are bins for all threads of the device."""
        p, values = workload.params, space.values
        busy = target.sms * 2048
        each = 1
        if p.layout == "NCHW":
            each = max(n for n in values["each"] if n == 1 or workload.outputs[0].size >= n * busy)
        return Config(vector=values["vector"][-1], each=each, threads=128)

    def kernel(self, workload: Workload[RoiAlignParams], target: Target, config: Config) -> KernelSource:
        p, vector, each, threads = workload.params, config["vector"], config["each"], config["threads"]
        batch = NumbaArray("batch_indices", "int64", (p.rois,), (8,))
        extents, y_extents = batch, batch  # read and written only with `dynamic`
        if p.dynamic:
            extents = NumbaArray("rois_extents", "int64", (2,), (8,))
            y_extents = NumbaArray("y_extents", "int64", (4,), (8,))
        wrong_index = Pointer(WRONG_INDEX, optional=True)
        params = (Pointer("x"), Pointer("rois"), batch, extents, Pointer("y"), y_extents, wrong_index)
        items = workload.outputs[0].size // (vector * each)
        step = KernelStep(roi_kernel(workload, vector, each, threads), params, Grid(-(-items // threads)), threads)
        element = dtype_of(p.dtype).nbytes
        alignments = {"x": vector * element, "y": vector * element, "rois": 4 * dtype_of(p.rois_dtype).nbytes}
        return KernelSource("cuda", "native", (step,), alignments=alignments)


def _vectors(workload: Workload[RoiAlignParams]) -> tuple[int, ...]:
    """Neighbouring channels of up to 16 bytes."""
    p = workload.params
    if p.layout == "NCHW":
        return (1,)
    widest = math.gcd(p.c, 16 // dtype_of(p.dtype).nbytes)
    return tuple(1 << i for i in range(widest.bit_length()))
