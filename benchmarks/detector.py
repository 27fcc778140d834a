"""A detector like Mask R-CNN with random weights, as ONNX: exact, bounded, and with sizes known beforehand.

    python benchmarks/detector.py --size tiny --target cpu
    python benchmarks/detector.py --size full --db records.db --out detector.json

The model has a backbone of two levels, proposals of each level (scores, boxes, top-k, non-maximum suppression), RoIAlign on
the level of each, a box head, a second suppression, a mask head, and a slice of the masks whose positions are on the device.
Three counts are known at run time only: the proposals of each level, and the detections.

For each way the table has the time of a call. On a GPU it also has what the profiler (CUPTI) counts: bytes to the host and
synchronisations; the bytes that stay allocated are the driver's. On a CPU there is no profiler, and these are left out.
In `known` the three counts are known when the model is read, and all but the suppressions is static. ONNX Runtime runs this
file if it is installed. Results of sizes tiny and small are compared with ONNX Runtime's or onnx.reference's, element by
element. Those of size full are compared with ONNX Runtime's as sets of detections: see `share_with_partners`.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import common
import numpy as np
from onnx import TensorProto, helper, numpy_helper

import schedsearch
from schedsearch.device import open_device
from schedsearch.dynamic.code import machine_code
from schedsearch.dynamic.explain import explain
from schedsearch.dynamic.model import read_graph
from schedsearch.dynamic.net import DynamicNet
from schedsearch.dynamic.program import DynamicProgram
from schedsearch.measurement import DEFAULT_DB

STRIDES = (4, 8)  # pixels of the image for one of each level
ANCHORS = 3
FAR = 2**31 - 1


@dataclass(frozen=True)
class Shape:
    """Attributes:
    side: of the image. channels: of both levels. candidates: of a level before suppression. proposals: after it.
    detections: of the image at most. classes: without the background. hidden: width of the box head.
    """

    side: int
    channels: int
    candidates: int
    proposals: int
    detections: int
    classes: int
    hidden: int


SHAPES = {
    "tiny": Shape(32, 8, 24, 6, 4, 3, 16),
    "small": Shape(64, 16, 60, 12, 8, 5, 32),
    "full": Shape(512, 256, 1000, 256, 100, 80, 1024),
}
OUTPUTS = ("boxes", "labels", "masks")


class _Nodes:
    """A graph while nodes are added."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[Any] = []
        self.weights: dict[str, Any] = {}
        self.rng = np.random.default_rng(seed)

    def add(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        names = [f"{op.lower()}{len(self.nodes)}.{number}" for number in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, name=names[0][:-2], **attributes))
        return names if outputs > 1 else names[0]

    def constant(self, values: Any, dtype: Any = np.float32) -> str:
        name = f"constant{len(self.weights)}"
        self.weights[name] = np.asarray(values, dtype)
        return name

    def whole(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def weight(self, *shape: int, gain: float = 1.4) -> str:
        fan = int(np.prod(shape[1:]))
        return self.constant(self.rng.standard_normal(shape) * gain / np.sqrt(fan))

    def conv(self, x: str, k: int, c: int, size: int, *, stride: int = 1, relu: bool = True) -> str:
        bias = self.constant(self.rng.standard_normal(k) * 0.1)
        y = self.add("Conv", x, self.weight(k, c, size, size), bias, strides=[stride] * 2, pads=[size // 2] * 4)
        return self.add("Relu", y) if relu else y


def detector(shape: Shape, known: Sequence[int] | None = None) -> Any:
    """The model.

    Args:
        known: the counts that are known beforehand. The rows that suppression keeps are then inputs of these extents, and
            the suppressions run beside them.
    """
    net, c = _Nodes(0), shape.channels
    x = net.conv("image", c, 3, 3, stride=2)
    fine = net.conv(x, c, c, 3, stride=2)
    coarse = net.conv(net.conv(fine, c, c, 3, stride=2), c, c, 3)
    up = net.add("Resize", net.conv(coarse, c, c, 1, relu=False), "", net.constant([1, 1, 2, 2]), mode="nearest")
    levels = [net.add("Add", net.conv(fine, c, c, 1, relu=False), up), coarse]
    kept: list[str] = []

    def suppressed(boxes: str, scores: str, most: int, *more: str) -> str:
        rows = net.add("NonMaxSuppression", boxes, scores, net.whole(most), net.constant([0.5]), *more)
        kept.append(rows)
        return rows if known is None else f"known{len(kept) - 1}"

    def column(rows: str, number: int) -> str:
        return net.add("Gather", rows, net.constant(number, np.int64), axis=1)

    features, regions = [], []
    for level, stride in zip(levels, STRIDES):
        boxes, scores = _candidates(net, level, stride, shape)
        rows = suppressed(
            net.add("Unsqueeze", boxes, net.whole(0)), net.add("Unsqueeze", scores, net.whole(0)), shape.proposals
        )
        rois = net.add("Gather", net.add("Gather", boxes, column(rows, 2)), net.whole(1, 0, 3, 2), axis=1)
        regions.append(rois)
        features.append(_aligned(net, level, rois, column(rows, 0), 7, stride))
    rois = net.add("Concat", *regions, axis=0)
    flat = net.add("Flatten", net.add("Concat", *features, axis=0), axis=1)
    hidden = net.add("Relu", net.add("Gemm", flat, net.weight(c * 49, shape.hidden, gain=0.3)))
    chances = net.add("Softmax", net.add("Gemm", hidden, net.weight(shape.hidden, shape.classes + 1)), axis=1)
    best = net.add("Slice", chances, net.whole(1), net.whole(FAR), net.whole(1))  # without the background
    score, label = net.add("TopK", best, net.whole(1), axis=1, outputs=2)

    most = len(STRIDES) * shape.proposals  # rows without a proposal have a score below the threshold
    count = net.add("Gather", net.add("Shape", rois), net.constant(0, np.int64))
    every = net.add("Range", net.constant(0, np.int64), count, net.constant(1, np.int64))
    every = net.add("Unsqueeze", every, net.whole(1))
    all_scores = net.add("ScatterND", net.constant(np.full((most, 1), -1)), every, score)
    all_rois = net.add("ScatterND", net.constant(np.zeros((most, 4))), every, rois)
    all_labels = net.add("ScatterND", net.constant(np.zeros((most, 1)), np.int64), every, label)
    rows = suppressed(
        net.add("Unsqueeze", all_rois, net.whole(0)), net.add("Reshape", all_scores, net.whole(1, 1, most)),
        shape.detections, net.constant([0.0]),
    )  # fmt: skip
    number = column(rows, 2)
    found = net.add("Gather", all_rois, number)
    pixels = _aligned(net, levels[0], found, column(rows, 0), 14, STRIDES[0])
    pixels = net.conv(net.conv(pixels, c, c, 3), c, c, 3)
    pixels = net.add("Resize", pixels, "", net.constant([1, 1, 2, 2]), mode="nearest")
    masks = net.add("Sigmoid", net.conv(pixels, 1, c, 1, relu=False))
    net.add("Slice", masks, "begin", "end", net.whole(2, 3))
    net.nodes[-1].output[0] = "masks"
    net.nodes.append(helper.make_node("Identity", [found], ["boxes"]))
    net.nodes.append(helper.make_node("Gather", [all_labels, number], ["labels"]))
    return _model(net, shape, kept, known)


def _candidates(net: _Nodes, level: str, stride: int, shape: Shape) -> tuple[str, str]:
    """The boxes (k, 4) with the best scores (1, k) of a level, as y1, x1, y2, x2."""
    side, c, count = shape.side // stride, shape.channels, (shape.side // stride) ** 2 * ANCHORS
    hidden = net.conv(level, c, c, 3)
    chances, moves = net.conv(hidden, ANCHORS, c, 1, relu=False), net.conv(hidden, 4 * ANCHORS, c, 1, relu=False)
    chances = net.add("Reshape", net.add("Transpose", chances, perm=[0, 2, 3, 1]), net.whole(1, count))
    moves = net.add("Reshape", net.add("Transpose", moves, perm=[0, 2, 3, 1]), net.whole(count, 4))
    y, x, size = np.meshgrid(np.arange(side), np.arange(side), np.array([2.0, 4.0, 6.0])[:ANCHORS], indexing="ij")
    centre_y, centre_x, size = ((each.reshape(-1, 1) + half) * stride for each, half in ((y, 0.5), (x, 0.5), (size, 0.0)))
    dy, dx, dh, dw = net.add("Split", moves, net.whole(1, 1, 1, 1), outputs=4, axis=1)

    def around(centre: Any, move: str, growth: str) -> tuple[str, str]:
        middle = net.add("Add", net.constant(centre), net.add("Mul", net.add("Tanh", move), net.constant(size * 0.5)))
        half = net.add("Mul", net.add("Exp", net.add("Tanh", growth)), net.constant(size * 0.5))
        return net.add("Sub", middle, half), net.add("Add", middle, half)

    (y1, y2), (x1, x2) = around(centre_y, dy, dh), around(centre_x, dx, dw)
    boxes = net.add("Clip", net.add("Concat", y1, x1, y2, x2, axis=1), net.constant(0), net.constant(shape.side))
    scores, places = net.add("TopK", net.add("Sigmoid", chances), net.whole(shape.candidates), axis=1, outputs=2)
    return net.add("Gather", boxes, net.add("Reshape", places, net.whole(shape.candidates))), scores


def _aligned(net: _Nodes, level: str, rois: str, batch: str, size: int, stride: int) -> str:
    return str(
        net.add(
            "RoiAlign", level, rois, batch, output_height=size, output_width=size, sampling_ratio=2,
            spatial_scale=1 / stride, coordinate_transformation_mode="half_pixel",
        )
    )  # fmt: skip


def _model(net: _Nodes, shape: Shape, kept: Sequence[str], known: Sequence[int] | None) -> Any:
    info = helper.make_tensor_value_info
    inputs = [info("image", TensorProto.FLOAT, [1, 3, shape.side, shape.side])]
    inputs += [info(name, TensorProto.INT64, [2]) for name in ("begin", "end")]
    inputs += [info(f"known{number}", TensorProto.INT64, [count, 3]) for number, count in enumerate(known or ())]
    types = {"labels": TensorProto.INT64, **dict.fromkeys(kept, TensorProto.INT64)}
    ranks = dict.fromkeys(kept, 2) | {"boxes": 2, "labels": 2, "masks": 4}
    outputs = [info(name, types.get(name, TensorProto.FLOAT), [None] * ranks[name]) for name in (*OUTPUTS, *kept)]
    weights = [numpy_helper.from_array(array, name) for name, array in net.weights.items()]
    graph = helper.make_graph(net.nodes, "detector", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def example(shape: Shape, seed: int = 0) -> dict[str, Any]:
    image = np.random.default_rng(seed).standard_normal((1, 3, shape.side, shape.side)).astype(np.float32)
    return {"image": image, "begin": np.array([3, -20]), "end": np.array([-2, FAR])}


class Ways:
    """The ways to run the detector on a device.

    Args:
        code: program -> the kernel of each workload and those of its sizes, as `machine_code` of one program.
    """

    def __init__(
        self, shape: Shape, device: Any, code: Callable[[DynamicProgram], Any], on_device: Callable[[Any], Any]
    ) -> None:
        model = detector(shape)
        self.model, self.on_device, self.given = model, on_device, example(shape)
        self.net = _net(read_graph(model).program(), device, code)
        arrays = [on_device(self.given[name]) for name in self.net.program.inputs]
        self.exact: Callable[[], Any] = functools.partial(self.net, *arrays)
        *_, first, second, third = self.exact()
        rows = [first, second, third]
        self.counts = [int(each.shape[0]) for each in rows]
        self.bound = self.net.bind(*arrays)
        self.known_net = _net(read_graph(detector(shape, self.counts)).program(), device, code)
        self.known = self.known_net.bind(*arrays, *rows)

    def results(self) -> dict[str, list[Any]]:
        """Each way's results, on the host."""
        self.bound.step()
        self.known.step()
        ways = {"exact": self.exact(), "bounded": self.bound.sliced(), "known": self.known.sliced()}
        return {way: [_on_host(each) for each in arrays] for way, arrays in ways.items()}

    def close(self) -> None:
        for each in (self.bound, self.known, self.net, self.known_net):
            each.close()


def _net(program: DynamicProgram, device: Any, code: Callable[[DynamicProgram], Any]) -> DynamicNet:
    kernels, sizes = code(program)
    return DynamicNet(program, device, lambda workload: kernels[workload].artifact, lambda *place: sizes[place])


def expected(model: Any, given: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Who computed what is right, and it: ONNX Runtime where it is installed, else onnx.reference."""
    with suppress(ImportError):
        import onnxruntime

        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return "ONNX Runtime", session.run(None, dict(given))
    from onnx.reference import ReferenceEvaluator

    return "onnx.reference", ReferenceEvaluator(model).run(None, dict(given))


def compare(found: Mapping[str, Sequence[Any]], wanted: Sequence[Any]) -> None:
    """Raises AssertionError if a way's results are not right."""
    for way, arrays in found.items():
        for array, right in zip(arrays, wanted, strict=True):
            np.testing.assert_allclose(array, right, rtol=1e-3, atol=2e-3, err_msg=way)


NEAR_PIXELS, NEAR_MASK = 0.05, 0.02  # what may be between a detection and its partner
LEAST_SHARE = 0.9


def share_with_partners(found: Sequence[Any], wanted: Sequence[Any]) -> float:
    """The share of the wanted detections of which ours have one with the same label, box and mask, in whatever order.

    Of 49,152 candidates some have scores that differ by less than roundoff. Two right programs put them in another order,
    and suppression may then keep one box or another.
    """
    boxes, labels, masks = (np.asarray(each) for each in found[: len(OUTPUTS)])
    count = 0
    for box, label, mask in zip(*wanted[: len(OUTPUTS)], strict=True):
        near = (np.abs(boxes - box).max(axis=1) <= NEAR_PIXELS) & (labels.reshape(-1) == np.asarray(label).reshape(-1)[0])
        count += any(np.abs(masks[place] - mask).max(initial=0.0) <= NEAR_MASK for place in np.flatnonzero(near))
    return count / max(len(wanted[0]), 1)


def time_us(run: Callable[[], Any], wait: Callable[[], None], repeat: int) -> float:
    """The median time of a call on the host's clock, until its results are there."""
    run()
    times = []
    for _ in range(repeat):
        wait()
        begin = time.perf_counter()
        run()
        wait()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def onnx_runtime_us(ways: Ways, on_cuda: bool, repeat: int) -> float | None:
    """ONNX Runtime's time of a call; None if it is not installed, or has no provider for the device."""
    try:
        import onnxruntime
    except ImportError:
        return None
    provider = "CUDAExecutionProvider" if on_cuda else "CPUExecutionProvider"
    if provider not in onnxruntime.get_available_providers():
        return None
    session = onnxruntime.InferenceSession(ways.model.SerializeToString(), providers=[provider])
    return time_us(lambda: session.run(None, ways.given), lambda: None, repeat)


def _on_host(array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="small")
    parser.add_argument("--target", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--db", help="records of tuned kernels; default: the default configuration of each")
    parser.add_argument("--repeat", type=int, default=50)
    parser.add_argument("--out", help="a file for the numbers")
    args = parser.parse_args()
    shape, target = SHAPES[args.size], schedsearch.detect(args.target)
    on_cuda = target.kind == "cuda"
    device = open_device(target)
    options: dict[str, Any] = {} if args.db else {"allow": ("default",)}

    def code(program: DynamicProgram) -> Any:
        kernels, (sizes,) = machine_code([program], args.db or DEFAULT_DB, target, **options)
        return kernels, sizes

    def on_device(array: Any) -> Any:
        if not on_cuda:
            return array
        import torch

        return torch.from_numpy(array).cuda()

    ways = Ways(shape, device, code, on_device)
    print(explain(ways.net.program), "\n")
    runs = {"known": ways.known.step, "bounded": ways.bound.step, "exact": ways.exact}
    rows = []
    for way, run in runs.items():
        row: dict[str, Any] = {"way": way, "us": time_us(run, device.synchronize, args.repeat)}
        if on_cuda:
            from dynamic_slice import seen_by_profiler

            row |= seen_by_profiler(run)
        rows.append(row)
    if (us := onnx_runtime_us(ways, on_cuda, args.repeat)) is not None:
        rows.append({"way": "ONNX Runtime", "us": us})
    columns = ("bytes_to_host", "synchronisations", "allocated_bytes")
    known_us = rows[0]["us"]
    print(
        common.table(
            ("way", "us", "times known", *(name.replace("_", " ") for name in columns)),
            [
                (
                    row["way"],
                    f"{row['us']:.1f}",
                    f"{row['us'] / known_us:.2f}",
                    *(f"{row[n]:.0f}" if n in row else "" for n in columns),
                )
                for row in rows
            ],
        )
    )
    data: dict[str, Any] = {"shape": asdict(shape), "counts": ways.counts, "rows": rows}
    common.write(args.out, data)  # whatever the results are
    found = ways.results()
    if args.size != "full":
        source, wanted = expected(ways.model, ways.given)
        compare(found, wanted)
        print(f"{args.size}: {', '.join(map(str, ways.counts))} rows kept; results equal those of {source}")
    elif _has_onnx_runtime():
        source, wanted = expected(ways.model, ways.given)
        data["shares"] = {way: share_with_partners(arrays, wanted) for way, arrays in found.items()}
        common.write(args.out, data)
        shares = ", ".join(f"{share:.0%} of {way}" for way, share in data["shares"].items())
        print(f"full: {', '.join(map(str, ways.counts))} rows kept; {source} has a partner for {shares}")
        if min(data["shares"].values()) < LEAST_SHARE:
            raise AssertionError(f"less than {LEAST_SHARE:.0%} of the detections have a partner: {shares}")
    else:
        print("full: not compared: ONNX Runtime is not installed")
    ways.close()
    device.close()


def _has_onnx_runtime() -> bool:
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    main()
