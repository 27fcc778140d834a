"""The nodes of random graphs: each function adds one node, or a few that belong together, or raises `Unfit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto
from random_graphs import Array, Graph, Known, Unfit

MARGIN = 1e-3  # how far a number that is not exact must be from where a step is


def is_float(value: Known) -> bool:
    return value.is_float


def of_rank(*ranks: int) -> Callable[[Known], bool]:
    return lambda value: value.is_float and value.array.ndim in ranks


def image(value: Known) -> bool:
    return value.is_float and value.array.ndim == 4


def clear(known: Known, distances: Array) -> None:
    """Refuses numbers so near to a step that rounding decides on which side they are."""
    if not known.exact and np.abs(distances).min(initial=1) < MARGIN:
        raise Unfit


def axis_of(graph: Graph, x: Known) -> int:
    if not x.array.ndim:
        raise Unfit
    return graph.chance.randrange(-x.array.ndim, x.array.ndim)


# --- Element by element -------------------------------------------------------------------------------------------------
_UNARY = ("Relu", "Neg", "Abs", "Sigmoid", "Tanh", "Softplus", "Erf", "Elu", "Selu", "HardSigmoid", "HardSwish", "Mish",
          "LeakyRelu", "Softsign", "Sin", "Cos", "Exp", "Gelu", "ThresholdedRelu", "Identity", "Celu")  # fmt: skip
_EXACT = ("Relu", "Neg", "Abs", "Identity")


def unary(graph: Graph) -> None:
    op = graph.chance.choice(_UNARY)
    x = graph.pick(is_float)
    if op == "ThresholdedRelu":
        clear(x, x.array - 0.5)
        graph.node(op, x, alpha=0.5)
    else:
        graph.node(op, x, exact=op in _EXACT)


def bounded(graph: Graph) -> None:
    op, x = graph.chance.choice(["Sqrt", "Log", "Reciprocal"]), graph.pick(is_float)
    (positive,) = graph.node("Add", *graph.node("Abs", x), graph.constant(np.float32(0.5)))
    graph.node(op, positive)


def stepped(graph: Graph) -> None:
    op, x = graph.chance.choice(["Floor", "Ceil", "Round", "Sign"]), graph.pick(is_float)
    clear(x, x.array - (np.floor(x.array) + 0.5 if op == "Round" else np.round(x.array)))
    graph.node(op, x, exact=True)


def other_of(graph: Graph, x: Known) -> Known | str:
    """What broadcasts with a value: another one, or a constant."""
    if graph.chance.random() < 0.5:
        return graph.pick(lambda each: each.array.dtype == x.array.dtype and broadcasts(each.shape, x.shape))
    shape = [extent if graph.chance.random() < 0.6 else 1 for extent in x.shape][graph.chance.randrange(x.array.ndim + 1) :]
    if x.is_float:
        return graph.constant(graph.numbers(*shape))
    return graph.constant(np.full(shape, graph.chance.choice([1, 2, 3])).astype(x.array.dtype))


def broadcasts(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    try:
        np.broadcast_shapes(one, other)
    except ValueError:
        return False
    return True


def binary(graph: Graph) -> None:
    op = graph.chance.choice(["Add", "Sub", "Mul", "Max", "Min", "Add", "Mul"])
    x = graph.pick(lambda each: each.array.dtype in (np.float32, np.int64, np.int32))
    pair = [x, other_of(graph, x)]
    graph.chance.shuffle(pair)
    graph.node(op, *pair, exact=op in ("Max", "Min", "Add", "Sub"))


def division(graph: Graph) -> None:
    x, y = graph.pick(is_float), graph.pick(is_float)
    if not broadcasts(x.shape, y.shape):
        raise Unfit
    (away,) = graph.node("Add", *graph.node("Abs", y), graph.constant(np.float32(1)))
    graph.node("Div", x, away)


def power(graph: Graph) -> None:
    graph.node("Pow", graph.pick(is_float), graph.constant(np.float32(graph.chance.choice([2, 3, 1]))))


def comparison(graph: Graph) -> None:
    op = graph.chance.choice(["Less", "Greater", "LessOrEqual", "GreaterOrEqual"])
    x = graph.pick(is_float)
    other = other_of(graph, x)
    array = other.array if isinstance(other, Known) else graph.arrays[other]
    if not (x.exact and (not isinstance(other, Known) or other.exact)):
        clear(Known("", x.array), x.array - array)
    (truth,) = graph.node(op, x, other)
    way = graph.chance.randrange(4)
    if way == 0:
        graph.node("Not", truth)
    elif way == 1:
        graph.node("Cast", truth, to=graph.chance.choice([TensorProto.FLOAT, TensorProto.INT64]), exact=True)
    elif way == 2:
        graph.node("Where", truth, x, other, exact=isinstance(other, Known))


def clip(graph: Graph) -> None:
    low = graph.constant(np.float32(graph.chance.choice([0, -1, -0.5])))
    high = graph.constant(np.float32(graph.chance.choice([1, 6])))
    graph.node("Clip", graph.pick(is_float), low, graph.chance.choice([high, ""]), exact=True)


def slope(graph: Graph) -> None:
    x = graph.pick(is_float)
    channels = (x.shape[1], *(1,) * (x.array.ndim - 2)) if x.array.ndim > 1 else ()
    graph.node("PRelu", x, graph.constant(graph.numbers(*channels)))


def cast(graph: Graph) -> None:
    x = graph.pick(lambda each: each.array.dtype in (np.float32, np.int64, np.int32))
    to = graph.chance.choice([TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.DOUBLE])
    if x.is_float and to not in (TensorProto.FLOAT, TensorProto.DOUBLE):
        clear(x, x.array - np.round(x.array))
    (y,) = graph.node("Cast", x, to=to, exact=True)
    if to == TensorProto.DOUBLE:
        graph.node("Cast", y, to=TensorProto.FLOAT, exact=True)


def expand(graph: Graph) -> None:
    x = graph.pick(is_float)
    shape = [graph.chance.choice([2, 3]) if extent == 1 else extent for extent in x.shape]
    graph.node("Expand", x, graph.row(*[*graph.chance.choice([[], [2]]), *shape]), exact=True)


# --- Images -------------------------------------------------------------------------------------------------------------
def _windows(graph: Graph, extents: tuple[int, ...], dilated: bool = True) -> dict[str, Any]:
    choice = graph.chance.choice
    taps = [choice([1, 2, 3]) for _ in extents]
    dilations = [choice([1, 1, 2]) if dilated else 1 for _ in extents]
    reach = [(count - 1) * step + 1 for count, step in zip(taps, dilations)]
    pads = [choice([0, min(1, each - 1)]) for each in (*taps, *taps)]
    for axis, extent in enumerate(extents):
        if reach[axis] > extent + pads[axis] + pads[axis + len(extents)]:
            raise Unfit
    found = {"kernel_shape": taps, "strides": [choice([1, 1, 2, 3]) for _ in extents], "dilations": dilations}
    if choice([True, True, True, False]):
        return {**found, "pads": pads}
    return {**found, "auto_pad": choice(["SAME_UPPER", "SAME_LOWER", "VALID"])}


def convolution(graph: Graph) -> None:
    x = graph.pick(of_rank(3, 4, 4, 5))
    windows = _windows(graph, x.shape[2:])
    channels = x.shape[1]
    group = graph.chance.choice([each for each in (1, 1, 2, channels) if channels % each == 0])
    weight = graph.numbers(group * graph.chance.choice([1, 2, 3]), channels // group, *windows["kernel_shape"])
    bias = [graph.constant(graph.numbers(len(weight)))] if graph.chance.random() < 0.6 else []
    (y,) = graph.node("Conv", x, graph.constant(weight), *bias, group=group, **windows)
    _behind(graph, y)


def _behind(graph: Graph, y: Known) -> None:
    """What fuses with convolutions and products."""
    way = graph.chance.randrange(6)
    if way == 0:
        graph.node("Relu", y)
    elif way == 1:
        shape = (y.shape[1], *(1,) * (y.array.ndim - 2))
        graph.node(graph.chance.choice(["Mul", "Add"]), y, graph.constant(graph.numbers(*shape)))
    elif way == 2 and y.array.ndim == 4:
        parts = [graph.constant(graph.numbers(y.shape[1])) for _ in range(3)]
        graph.node("BatchNormalization", y, *parts, graph.constant(np.abs(graph.numbers(y.shape[1])) + np.float32(0.5)))
    elif way == 3:
        graph.node("Mul", y, *graph.node("Sigmoid", y))


def transposed_convolution(graph: Graph) -> None:
    x = graph.pick(of_rank(3, 4, 4))
    windows = _windows(graph, x.shape[2:])
    if "auto_pad" in windows:
        raise Unfit
    group = graph.chance.choice([1, 1, 2])
    if x.shape[1] % group:
        raise Unfit
    more = [graph.chance.choice([0, min(1, stride - 1)]) for stride in windows["strides"]]
    weight = graph.numbers(x.shape[1], graph.chance.choice([1, 2, 3]), *windows["kernel_shape"])
    bias = [graph.constant(graph.numbers(weight.shape[1] * group))] if graph.chance.random() < 0.6 else []
    (y,) = graph.node("ConvTranspose", x, graph.constant(weight), *bias, group=group, output_padding=more, **windows)
    _behind(graph, y)


def pool(graph: Graph) -> None:
    op, x = graph.chance.choice(["MaxPool", "AveragePool", "LpPool"]), graph.pick(of_rank(3, 4, 4, 5))
    windows = _windows(graph, x.shape[2:], dilated=op == "MaxPool")
    if op == "AveragePool" and graph.chance.random() < 0.5:
        windows["count_include_pad"] = 1
    if graph.chance.random() < 0.3 and "auto_pad" not in windows:
        windows["ceil_mode"] = 1
    graph.node(op, x, exact=op == "MaxPool", **windows)


def global_pool(graph: Graph) -> None:
    x = graph.pick(of_rank(3, 4))  # ONNX's evaluator forgets a dimension of the maxima of rows
    graph.node(graph.chance.choice(["GlobalAveragePool", "GlobalMaxPool"]) if x.array.ndim == 4 else "GlobalAveragePool", x)


def normalisation(graph: Graph) -> None:
    way = graph.chance.randrange(4)
    x = graph.pick(lambda each: each.is_float and each.array.ndim > 2)
    channels = x.shape[1]
    scale, shift = graph.constant(graph.numbers(channels)), graph.constant(graph.numbers(channels))
    if way == 0:
        axis = graph.chance.randrange(1, x.array.ndim)
        shape = x.shape[axis:]
        if np.var(x.array, axis=tuple(range(axis, x.array.ndim))).min() < 0.05:
            raise Unfit
        graph.node("LayerNormalization", x, graph.constant(graph.numbers(*shape)), axis=axis)
        return
    if np.var(x.array, axis=tuple(range(2, x.array.ndim))).min() < 0.05:
        raise Unfit
    if way == 1:
        graph.node("InstanceNormalization", x, scale, shift)
    elif way == 2:
        groups = graph.chance.choice([each for each in (1, 2, channels) if channels % each == 0])
        graph.node("GroupNormalization", x, scale, shift, num_groups=groups)
    else:
        graph.node("LpNormalization", x, axis=axis_of(graph, x), p=graph.chance.choice([1, 2]))


def softmax(graph: Graph) -> None:
    x = graph.pick(lambda each: each.is_float and each.array.ndim > 0)
    graph.node(graph.chance.choice(["Softmax", "LogSoftmax"]), x, axis=axis_of(graph, x))


def resize(graph: Graph) -> None:
    x, choice = graph.pick(of_rank(3, 4, 4)), graph.chance.choice
    mode = choice(["nearest", "linear", "cubic"])
    coordinates = choice(["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric"])
    more: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": coordinates}
    if mode == "nearest":
        more["nearest_mode"] = choice(["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
    if mode == "cubic":
        more["exclude_outside"] = choice([0, 1])
    spatial = [choice([1, 2, 3, 4, 5, 7]) for _ in x.shape[2:]]
    if choice([True, False]):
        graph.node("Resize", x, "", "", graph.row(*x.shape[:2], *spatial), exact=mode == "nearest", **more)
    else:
        scales = [choice([0.5, 1, 2, 1.5, 0.75, 3]) for _ in x.shape[2:]]
        graph.node("Resize", x, "", graph.constant(np.array([1, 1, *scales], np.float32)), exact=mode == "nearest", **more)


def grid_sample(graph: Graph) -> None:
    x, choice = graph.pick(image), graph.chance.choice
    more = {"padding_mode": choice(["zeros", "border", "reflection"]), "align_corners": choice([0, 1])}
    grids = [each for each in graph.values if not each.fixed and each.shape[:1] == x.shape[:1] and each.shape[3:] == (2,)]
    mode = choice(["linear", "cubic", "nearest"] if graph.opset >= 20 else ["bilinear", "bicubic", "nearest"])
    size = x.shape[0], choice([1, 2, 4]), choice([1, 3]), 2
    if mode == "nearest":
        grid = np.random.default_rng(graph.chance.getrandbits(32)).uniform(-1.2, 1.2, size).astype(np.float32)
        graph.node("GridSample", x, graph.constant(grid), mode=mode, **more)
    elif grids and choice([True, False]):
        graph.node("GridSample", x, *graph.node("Tanh", choice(grids)), mode=mode, **more)
    else:
        graph.node("GridSample", x, graph.constant(graph.numbers(*size)), mode=mode, **more)


def shuffle(graph: Graph) -> None:
    x = graph.pick(image)
    if x.shape[1] % 4 == 0:
        graph.node("DepthToSpace", x, blocksize=2, mode=graph.chance.choice(["DCR", "CRD"]), exact=True)
    else:
        graph.node("SpaceToDepth", x, blocksize=2, exact=True)


# --- Products -----------------------------------------------------------------------------------------------------------
def product(graph: Graph) -> None:
    x = graph.pick(lambda each: each.is_float and each.array.ndim > 0)
    if graph.chance.random() < 0.5:
        batch = [] if graph.chance.random() < 0.6 else list(x.shape[:-2])
        graph.node("MatMul", x, graph.constant(graph.numbers(*batch, x.shape[-1], graph.chance.choice([1, 2, 3, 5]))))
        return
    other = graph.pick(lambda each: each.is_float and each.array.ndim > 0)
    if x.shape[-1] != (other.shape[-2] if other.array.ndim > 1 else other.shape[0]) and other.array.ndim > 1:
        (other,) = graph.node(
            "Transpose", other, perm=[*range(other.array.ndim - 2), other.array.ndim - 1, other.array.ndim - 2]
        )
    graph.node("MatMul", x, other)


def gemm(graph: Graph) -> None:
    x, choice = graph.pick(of_rank(2)), graph.chance.choice
    ta, tb = choice([0, 0, 1]), choice([0, 1])
    m, k = x.shape[::-1] if ta else x.shape
    n = choice([1, 2, 4])
    more = []
    if choice([True, False]):
        more = [graph.constant(graph.numbers(*choice([(n,), (1, n), (m, n), (m, 1), ()])))]
    weight = graph.constant(graph.numbers(*((n, k) if tb else (k, n))))
    (y,) = graph.node("Gemm", x, weight, *more, transA=ta, transB=tb, alpha=choice([1.0, 0.5]), beta=choice([1.0, 2.0]))
    if choice([True, False]):
        graph.node("Relu", y)


def einsum(graph: Graph) -> None:
    x = graph.pick(of_rank(2, 3))
    letters = "abc"[: x.array.ndim]
    way = graph.chance.randrange(4)
    if way == 0:
        kept = "".join(graph.chance.sample(letters, graph.chance.randrange(1, len(letters) + 1)))
        graph.node("Einsum", x, equation=f"{letters}->{kept}")
    elif way == 1:
        graph.node(
            "Einsum", x, graph.constant(graph.numbers(x.shape[-1], 3)), equation=f"{letters},{letters[-1]}z->{letters[:-1]}z"
        )
    elif way == 2:
        graph.node("Einsum", x, x, equation=f"{letters},{letters}->{letters[0]}")
    else:
        z = graph.constant(graph.numbers(x.shape[0], 2))
        kept = graph.chance.choice([f"z{letters[1:]}", f"{letters[-1]}z", f"{letters}z", f"z{letters[0]}"])
        graph.node("Einsum", x, z, equation=f"{letters},{letters[0]}z->{kept}")


# --- Reductions ---------------------------------------------------------------------------------------------------------
_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare",
               "ReduceLogSumExp", "ReduceProd")  # fmt: skip


def reduction(graph: Graph) -> None:
    op = graph.chance.choice(_REDUCTIONS)
    x = graph.pick(lambda each: each.array.ndim > 0 and (each.is_float or op in ("ReduceSum", "ReduceMax", "ReduceMin")) and
                   each.array.dtype in (np.float32, np.int64, np.int32))  # fmt: skip
    axes = graph.chance.sample(range(x.array.ndim), graph.chance.randrange(1, x.array.ndim + 1))
    given, more = [], {}
    if graph.chance.random() < 0.85:
        if graph.opset < 18 and op != "ReduceSum":
            more["axes"] = axes
        else:
            given.append(graph.row(*axes))
    graph.node(op, x, *given, keepdims=graph.chance.choice([0, 1]), exact=op in ("ReduceMax", "ReduceMin"), **more)


def place(graph: Graph) -> None:
    op = graph.chance.choice(["ArgMax", "ArgMin"])
    x = graph.pick(lambda each: each.is_float and each.array.ndim > 0)
    axis = axis_of(graph, x)
    ordered = np.sort(x.array, axis)
    clear(x, np.diff(ordered, axis=axis))
    last = graph.chance.choice([0, 1]) if x.exact else 0
    graph.node(op, x, axis=axis, keepdims=graph.chance.choice([0, 1]), select_last_index=last, exact=True)


def top(graph: Graph) -> None:
    x = graph.pick(lambda each: each.is_float and each.array.ndim > 0)
    axis = axis_of(graph, x)
    clear(Known("", x.array), np.diff(np.sort(x.array, axis), axis=axis))
    k = graph.chance.randrange(1, x.shape[axis] + 1)
    graph.node("TopK", x, graph.row(k), outputs=2, axis=axis, largest=graph.chance.choice([0, 1]), exact=True)


def cumulative(graph: Graph) -> None:
    x, choice = graph.pick(lambda each: each.is_float and each.array.ndim > 0), graph.chance.choice
    axis = graph.constant(np.array(axis_of(graph, x), np.int64))
    graph.node("CumSum", x, axis, exclusive=choice([0, 1]), reverse=choice([0, 1]))


NODES: tuple[Callable[[Graph], None], ...] = (
    unary,
    unary,
    binary,
    binary,
    binary,
    bounded,
    stepped,
    division,
    power,
    comparison,
    clip,
    slope,
    cast,
    expand,
    convolution,
    convolution,
    transposed_convolution,
    pool,
    pool,
    global_pool,
    normalisation,
    softmax,
    resize,
    grid_sample,
    shuffle,
    product,
    product,
    gemm,
    einsum,
    reduction,
    reduction,
    place,
    top,
    cumulative,
)
