"""ResNet-50, VGG-16 and Inception-v3 as networks of kernel calls for `layout_plan.py`, without weights and classifiers.

Batch norms and activations are part of the convolutions, and a residual addition is part of the convolution before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from schedsearch import Workload
from schedsearch.errors import WorkloadError
from schedsearch.network.graph import Network, Node, Value
from schedsearch.ops import Layout

LAYOUTS = ("NHWC", "NCHW", "NCHW4c", "NCHW8c", "NCHW16c", "NCHW32c", "NCHW64c")


class Graph:
    """Builds a network node by node; methods take and return values.

    Args:
        layouts: the implementations of each node; convolutions may also read one plain layout and write the other.
    """

    def __init__(self, shape: tuple[int, int, int, int], layouts: Sequence[str], dtype: str = "int8") -> None:
        self.layouts, self.dtype = layouts, dtype
        self.input = Value("input", "NCHW", shape, dtype)
        self.values = {"input": self.input}
        self.nodes: list[Node] = []

    def network(self, output: Value) -> Network:
        return Network(("input",), (output.name,), self.values, {}, tuple(self.nodes))

    def conv(
        self,
        x: Value,
        k: int,
        r: int = 1,
        s: int = 0,
        *,
        stride: int = 1,
        valid: bool = False,
        residual: Value | None = None,
    ) -> Value:
        n, c, h, w = x.shape
        s = s or r
        padding = (0, 0) if valid else (r // 2, s // 2)
        sizes = {"n": n, "c": c, "h": h, "w": w, "k": k, "r": r, "s": s, "stride": stride, "padding": padding}
        stages = ("bias", "residual", "relu", "requantise") if residual else ("bias", "relu", "requantise")
        params = {**sizes, "dtype": self.dtype, "epilogue": stages}
        plain = [layout for layout in self.layouts if layout.isalpha()]
        pairs = [(layout, layout) for layout in self.layouts]
        pairs += [(one, other) for one in plain for other in plain if one != other]
        workloads = self._possible("conv2d", ({**params, "layout": one, "output_layout": other} for one, other in pairs))
        arguments = {"x": x.name, "weight": "weight", "bias": "bias", "requantise_scale": "scale"}
        y = (n, k, *((extent + 2 * pad - taps) // stride + 1 for extent, pad, taps in zip((h, w), padding, (r, s))))
        return self._add(workloads, arguments | ({"residual": residual.name} if residual else {}), y)

    def pool(self, x: Value, *, stride: int = 1, padding: int = 1, extent: int = 3) -> Value:
        n, c, h, w = x.shape
        params = {"n": n, "c": c, "h": h, "w": w, "r": extent, "s": extent, "stride": stride, "padding": padding}
        workloads = self._possible("pool2d", ({**params, "dtype": self.dtype, "layout": layout} for layout in self.layouts))
        y = (n, c, *((each + 2 * padding - extent) // stride + 1 for each in (h, w)))
        return self._add(workloads, {"x": x.name}, y)

    def concat(self, *xs: Value) -> Value:
        n, _, h, w = xs[0].shape
        y = (n, sum(x.shape[1] for x in xs), h, w)
        names = [f"x{place}" for place in range(len(xs))]
        workloads, letters = [], {}
        for layout in map(Layout.parse, self.layouts):
            sizes = [dict(zip("NCHW", x.shape)) for x in xs]
            if any(each["C"] % layout.block("C") for each in sizes):
                continue
            shapes = [layout.shape(each) for each in sizes]
            workload = Workload("concat", {"x": shapes, "axis": layout.axes.index("C"), "dtype": self.dtype})
            workloads.append(workload)
            letters[workload] = dict.fromkeys((*names, "y"), layout.text)
        return self._add(workloads, dict(zip(names, (x.name for x in xs))), y, letters)

    @staticmethod
    def _possible(op: str, candidates: Iterable[dict[str, object]]) -> list[Workload]:
        found = []
        for params in candidates:
            try:
                found.append(Workload(op, params))
            except WorkloadError:  # the channels do not fill the blocks
                continue
        return found

    def _add(
        self,
        workloads: Sequence[Workload],
        arguments: dict[str, str],
        shape: tuple[int, ...],
        letters: dict[Workload, dict[str, str]] | None = None,
    ) -> Value:
        name = f"{workloads[0].op}{len(self.nodes)}"
        value = self.values[f"{name}.y"] = Value(f"{name}.y", "NCHW", shape, self.dtype)
        self.nodes.append(Node(name, (name,), arguments, {"y": value.name}, tuple(workloads), letters=letters or {}))
        return value


def resnet50(layouts: Sequence[str] = LAYOUTS) -> Network:
    g = Graph((1, 3, 224, 224), layouts)
    x = g.pool(g.conv(g.input, 64, 7, stride=2), stride=2)
    for blocks, width, first_stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
        for block in range(blocks):
            stride = 1 if block else first_stride
            y = g.conv(g.conv(x, width), width, 3, stride=stride)
            short = x if block else g.conv(x, 4 * width, stride=stride)
            x = g.conv(y, 4 * width, residual=short)
    return g.network(x)


def vgg16(layouts: Sequence[str] = LAYOUTS) -> Network:
    g = Graph((1, 3, 224, 224), layouts)
    x = g.input
    for convolutions, width in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(convolutions):
            x = g.conv(x, width, 3)
        x = g.pool(x, stride=2, padding=0, extent=2)
    return g.network(x)


def inception_v3(layouts: Sequence[str] = LAYOUTS) -> Network:
    g = Graph((1, 3, 299, 299), layouts)
    x = g.conv(g.conv(g.conv(g.input, 32, 3, stride=2, valid=True), 32, 3, valid=True), 64, 3)
    x = g.conv(g.conv(g.pool(x, stride=2, padding=0), 80), 192, 3, valid=True)
    x = g.pool(x, stride=2, padding=0)
    for width in (32, 64, 64):
        fives = g.conv(g.conv(x, 48), 64, 5)
        threes = g.conv(g.conv(g.conv(x, 64), 96, 3), 96, 3)
        x = g.concat(g.conv(x, 64), fives, threes, g.conv(g.pool(x), width))
    halved = g.conv(g.conv(g.conv(x, 64), 96, 3), 96, 3, stride=2, valid=True)
    x = g.concat(g.conv(x, 384, 3, stride=2, valid=True), halved, g.pool(x, stride=2, padding=0))
    for width in (128, 160, 160, 192):
        sevens = g.conv(g.conv(g.conv(x, width), width, 1, 7), 192, 7, 1)
        twice = g.conv(x, width)
        for r, s, k in ((7, 1, width), (1, 7, width), (7, 1, width), (1, 7, 192)):
            twice = g.conv(twice, k, r, s)
        x = g.concat(g.conv(x, 192), sevens, twice, g.conv(g.pool(x), 192))
    threes = g.conv(g.conv(x, 192), 320, 3, stride=2, valid=True)
    sevens = g.conv(g.conv(g.conv(x, 192), 192, 1, 7), 192, 7, 1)
    x = g.concat(threes, g.conv(sevens, 192, 3, stride=2, valid=True), g.pool(x, stride=2, padding=0))
    for _ in range(2):
        wide = g.conv(x, 384)
        deep = g.conv(g.conv(x, 448), 384, 3)
        split = [g.conv(each, 384, r, s) for each in (wide, deep) for r, s in ((1, 3), (3, 1))]
        x = g.concat(g.conv(x, 320), *split, g.conv(g.pool(x), 192))
    return g.network(x)


NETWORKS: dict[str, Callable[..., Network]] = {"ResNet-50": resnet50, "VGG-16": vgg16, "Inception-v3": inception_v3}
