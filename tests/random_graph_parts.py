"""More nodes of random graphs, as in `random_graph_nodes`: movements, constants, 8-bit numbers, bodies and others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto, helper
from random_graph_nodes import axis_of, broadcasts, clear, image, is_float, of_rank, other_of
from random_graphs import Graph, Known, Unfit


# --- Movements ----------------------------------------------------------------------------------------------------------
def any_array(value: Known) -> bool:
    return value.array.ndim > 0


def reshape(graph: Graph) -> None:
    x = graph.pick(lambda each: True)
    shape = _factors(graph, x.array.size)
    if graph.chance.random() < 0.3 and shape:
        shape[graph.chance.randrange(len(shape))] = -1
    graph.node("Reshape", x, graph.row(*shape), exact=True)


def _factors(graph: Graph, size: int) -> list[int]:
    found = []
    for _ in range(graph.chance.choice([0, 1, 2, 3, 3])):
        divisors = [each for each in range(1, size + 1) if size % each == 0]
        found.append(graph.chance.choice(divisors))
        size //= found[-1]
    return [*found, size]


def shape_chain(graph: Graph) -> None:
    """A Reshape as exporters write it: the shape comes from a Shape, and its parts are gathered and concatenated."""
    x = graph.pick(lambda each: each.array.ndim > 1)
    shape = graph.fixed("Shape", x.name)
    first = graph.fixed("Gather", shape, graph.constant(np.array(0, np.int64)), axis=0)
    first = graph.fixed("Unsqueeze", first, graph.row(0))
    if graph.chance.random() < 0.5:
        rest = graph.row(-1)
    else:
        rest = graph.fixed("Slice", shape, graph.row(1), graph.row(np.iinfo(np.int64).max))
        rest = graph.fixed("ReduceProd", rest, keepdims=1)
    graph.node("Reshape", x, graph.fixed("Concat", first, rest, axis=0), exact=True)


def view(graph: Graph) -> None:
    way, x = graph.chance.randrange(3), graph.pick(any_array)
    if way == 0:
        graph.node("Flatten", x, axis=graph.chance.randrange(x.array.ndim + 1), exact=True)
    elif way == 1:
        axes = sorted(graph.chance.sample(range(x.array.ndim + 1), graph.chance.choice([1, 1, 2])))
        graph.node("Unsqueeze", x, graph.row(*axes), exact=True)
    else:
        axes = [axis for axis, extent in enumerate(x.shape) if extent == 1]
        graph.node("Squeeze", x, *graph.chance.choice([[graph.row(*axes)], []]) if axes else [], exact=True)


def transpose(graph: Graph) -> None:
    x = graph.pick(any_array)
    graph.node("Transpose", x, perm=graph.chance.sample(range(x.array.ndim), x.array.ndim), exact=True)


def cut(graph: Graph) -> None:
    x = graph.pick(any_array)
    axes = graph.chance.sample(range(x.array.ndim), graph.chance.randrange(1, min(3, x.array.ndim) + 1))
    starts, ends, steps = [], [], []
    for axis in axes:
        extent = x.shape[axis]
        start = graph.chance.randrange(-extent, extent)
        back = graph.chance.random() < 0.2
        starts.append(start)
        steps.append(graph.chance.choice([-1, -2]) if back else graph.chance.choice([1, 1, 1, 2, 3]))
        least = -(2**40) if back else 2**40
        ends.append(graph.chance.choice([least, start + (steps[-1] // abs(steps[-1])) * graph.chance.randrange(1, 5)]))
        if start < 0 and not back and ends[-1] >= 0 and ends[-1] < 2**40:
            ends[-1] = 2**40
    more = [graph.row(*steps)] if any(step != 1 for step in steps) or graph.chance.random() < 0.5 else []
    graph.node("Slice", x, graph.row(*starts), graph.row(*ends), graph.row(*axes), *more, exact=True)


def split(graph: Graph) -> None:
    x = graph.pick(any_array)
    axis = axis_of(graph, x)
    extent = x.shape[axis]
    if graph.chance.random() < 0.5:
        first = graph.chance.randrange(1, extent) if extent > 1 else 1
        parts = [first, extent - first] if first < extent else [extent]
        parts = graph.node("Split", x, graph.row(*parts), outputs=len(parts), axis=axis, exact=True)
    else:
        count = graph.chance.choice([2, 3])
        if extent < count:
            raise Unfit
        parts = graph.node("Split", x, outputs=count, axis=axis, num_outputs=count, exact=True)
    if graph.chance.random() < 0.3:
        graph.node("Concat", *reversed(parts), axis=axis, exact=True)


def gather(graph: Graph) -> None:
    x = graph.pick(any_array)
    axis, shape = axis_of(graph, x), graph.chance.choice([(), (1,), (2,), (2, 3)])
    extent = x.shape[axis]
    draw = np.random.default_rng(graph.chance.getrandbits(32))
    way = graph.chance.randrange(3)
    if way == 0:
        graph.node("Gather", x, graph.constant(draw.integers(-extent, extent, shape)), axis=axis, exact=True)
    elif way == 1:
        shape = tuple(graph.chance.choice([1, extent, 2]) if each == axis % x.array.ndim else extent
                      for each, extent in enumerate(x.shape))  # fmt: skip
        graph.node("GatherElements", x, graph.constant(draw.integers(0, extent, shape)), axis=axis, exact=True)
    else:
        depth = graph.chance.randrange(1, x.array.ndim + 1)
        indices = np.stack([draw.integers(0, each, (3,)) for each in x.shape[:depth]], -1)
        graph.node("GatherND", x, graph.constant(indices.astype(np.int64)), exact=True)


def pad(graph: Graph) -> None:
    x, mode = (
        graph.pick(lambda each: each.is_float and each.array.ndim > 0),
        graph.chance.choice(["constant", "constant", "edge", "reflect", "wrap"]),
    )
    most = [0 if extent < 2 else 1 for extent in x.shape]
    pads = [graph.chance.choice([0, 0, most[axis % x.array.ndim]]) for axis in range(2 * x.array.ndim)]
    if mode == "constant":
        pads = [each if graph.chance.random() < 0.8 else graph.chance.choice([2, -1]) for each in pads]
    value = [graph.constant(np.float32(graph.chance.choice([0, 1, -0.5])))] if graph.chance.random() < 0.5 else []
    graph.node("Pad", x, graph.row(*pads), *value, mode=mode, exact=True)


def concat(graph: Graph) -> None:
    x = graph.pick(any_array)
    axis = axis_of(graph, x)
    shape = [*x.shape]

    def fits(each: Known) -> bool:
        mine, theirs = list(shape), list(each.shape)
        if each.array.dtype != x.array.dtype or len(mine) != len(theirs):
            return False
        mine[axis] = theirs[axis] = 0
        return mine == theirs

    parts: list[Known | str] = [x]
    for _ in range(graph.chance.choice([1, 1, 2])):
        if graph.chance.random() < 0.2 and x.is_float:
            parts.append(graph.constant(graph.numbers(*x.shape)))
        else:
            parts.append(graph.pick(fits))
    graph.chance.shuffle(parts)
    graph.node("Concat", *parts, axis=axis, exact=True)


def tile(graph: Graph) -> None:
    x = graph.pick(any_array)
    graph.node("Tile", x, graph.row(*(graph.chance.choice([1, 1, 2]) for _ in x.shape)), exact=True)


def triangle(graph: Graph) -> None:
    x = graph.pick(lambda each: each.is_float and each.array.ndim > 1)
    graph.node("Trilu", x, *graph.chance.choice([[], [graph.constant(np.array(graph.chance.choice([-1, 0, 1]), np.int64))]]),
               upper=graph.chance.choice([0, 1]), exact=True)  # fmt: skip


def scatter(graph: Graph) -> None:
    x = graph.pick(lambda each: each.is_float and each.array.ndim > 0)
    draw = np.random.default_rng(graph.chance.getrandbits(32))
    axis = axis_of(graph, x)
    count = graph.chance.randrange(1, x.shape[axis] + 1)
    shape = [*x.shape]
    shape[axis] = count
    order = np.argsort(draw.random(x.shape), axis)
    indices = np.take(order, range(count), axis).astype(np.int64)
    reduction = graph.chance.choice(["none", "none", "add", "mul", "max"])
    graph.node(
        "ScatterElements", x, graph.constant(indices), graph.constant(graph.numbers(*shape)), axis=axis, reduction=reduction
    )


# --- Constants that follow from shapes ----------------------------------------------------------------------------------
def mask(graph: Graph) -> None:
    """What a model adds to or multiplies by: an identity matrix, a range or equal numbers, in the shape of a value."""
    x, way = graph.pick(lambda each: each.is_float and each.array.ndim > 0), graph.chance.randrange(4)
    if way == 0:
        if x.array.ndim != 2:
            raise Unfit
        made = graph.fixed("EyeLike", x.name, k=graph.chance.choice([-1, 0, 1]))
    elif way == 1:
        fill = helper.make_tensor("fill", TensorProto.FLOAT, [1], [0.5])
        made = graph.fixed("ConstantOfShape", graph.fixed("Shape", x.name), value=fill)
    else:
        last = graph.fixed("Shape", x.name, start=-1)
        last = graph.fixed("Squeeze", last)
        made = graph.fixed("Range", graph.constant(np.int64(0)), last, graph.constant(np.int64(1)))
        made = graph.fixed("Cast", made, to=TensorProto.FLOAT)
        if way == 3:
            made = graph.fixed("Softmax", made)
    if graph.chance.random() < 0.3:
        made = graph.fixed("ReduceSum", made, graph.row(-1), keepdims=1)
    graph.node(graph.chance.choice(["Add", "Mul", "Sub"]), x, made)


# --- Others -------------------------------------------------------------------------------------------------------------
def truth(graph: Graph) -> None:
    """What computes with truths."""
    x = graph.pick(lambda each: each.array.dtype == bool)
    way = graph.chance.randrange(3)
    if way == 0:
        other = graph.pick(lambda each: each.array.dtype == bool and broadcasts(each.shape, x.shape))
        graph.node(graph.chance.choice(["And", "Or", "Xor"]), x, other)
    elif way == 1:
        one = graph.pick(lambda each: each.is_float and broadcasts(each.shape, x.shape))
        graph.node("Where", x, one, other_of(graph, one), exact=False)
    else:
        graph.node("Cast", x, to=TensorProto.FLOAT, exact=True)


def whole(graph: Graph) -> None:
    """Arithmetic of integers."""
    x = graph.pick(lambda each: each.array.dtype in (np.int64, np.int32))
    op = graph.chance.choice(["Mod", "Div", "Equal", "Abs", "Neg", "Sign", "BitwiseAnd"])
    if op in ("Abs", "Neg", "Sign"):
        graph.node(op, x, exact=True)
    elif op == "Div":
        (x,) = graph.node("Abs", x, exact=True)
        graph.node(op, x, graph.constant(x.array.dtype.type(3)), exact=True)
    else:
        graph.node(op, x, graph.constant(x.array.dtype.type(graph.chance.choice([2, 3]))), exact=True)


def one_hot(graph: Graph) -> None:
    x = graph.pick(lambda each: each.array.dtype == np.int64)
    graph.node("OneHot", x, graph.constant(np.array(4, np.int64)), graph.constant(np.array([0, 1], np.float32)),
               axis=graph.chance.choice([-1, 0]), exact=True)  # fmt: skip


def several(graph: Graph) -> None:
    """Sum, Mean, Max or Min of three."""
    x = graph.pick(is_float)
    others = [graph.pick(lambda each: each.is_float and broadcasts(each.shape, x.shape)) for _ in range(2)]
    graph.node(graph.chance.choice(["Sum", "Mean", "Max", "Min"]), x, *others)


def other_unary(graph: Graph) -> None:
    x, way = graph.pick(is_float), graph.chance.randrange(4)
    if way == 0:
        graph.node("MeanVarianceNormalization", graph.pick(image))
    elif way == 1:
        graph.node("LRN", graph.pick(image), size=3)
    elif way == 2:
        clear(x, np.abs(x.array) - 0.5)
        graph.node("Shrink", x, lambd=0.5, bias=0.1)
    else:
        axis = axis_of(graph, x)
        clear(Known("", x.array), np.diff(np.sort(x.array, axis), axis=axis))
        graph.node("Hardmax", x, axis=axis, exact=True)


def recurrence(graph: Graph) -> None:
    x, op = graph.pick(of_rank(3)), graph.chance.choice(["LSTM", "GRU", "RNN"])
    gates, hidden = {"LSTM": 4, "GRU": 3, "RNN": 1}[op], graph.chance.choice([2, 3])
    weight, again = graph.numbers(1, gates * hidden, x.shape[2]), graph.numbers(1, gates * hidden, hidden)
    bias = [graph.constant(graph.numbers(1, 2 * gates * hidden))] if graph.chance.random() < 0.5 else []
    graph.node(
        op, x, graph.constant(weight), graph.constant(again), *bias, outputs=graph.chance.choice([1, 2]), hidden_size=hidden
    )


def attention(graph: Graph) -> None:
    """Heads of a product with itself, as exporters write them."""
    x = graph.pick(of_rank(3))
    n, length, width = x.shape
    heads = graph.chance.choice([each for each in (1, 2, 3) if width % each == 0])
    parts = []
    for place in range(3):
        (y,) = graph.node("MatMul", x, graph.constant(graph.numbers(width, width)))
        (y,) = graph.node("Reshape", y, graph.row(0, 0, heads, width // heads))
        parts += graph.node("Transpose", y, perm=[0, 2, 3, 1] if place == 1 else [0, 2, 1, 3])
    (scores,) = graph.node("MatMul", parts[0], parts[1])
    (scores,) = graph.node(graph.chance.choice(["Mul", "Div"]), scores, graph.constant(np.float32(1.5)))
    if graph.chance.random() < 0.5:
        mask = np.triu(np.full((length, length), -1e4, np.float32), 1)
        (scores,) = graph.node("Add", scores, graph.constant(mask))
    (shares,) = graph.node("Softmax", scores, axis=-1)
    (y,) = graph.node("MatMul", shares, parts[2])
    (y,) = graph.node("Transpose", y, perm=[0, 2, 1, 3])
    graph.node("Reshape", y, graph.row(n, length, width))


def gate(graph: Graph) -> None:
    """Squeeze-excite, or a number times what a gate makes of it."""
    if graph.chance.random() < 0.5:
        x = graph.pick(is_float)
        (gated,) = graph.node(graph.chance.choice(["Sigmoid", "HardSigmoid", "Tanh"]), x)
        graph.node("Mul", *graph.chance.sample([x, gated], 2))
        return
    x = graph.pick(image)
    (y,) = graph.node("GlobalAveragePool", x)
    (y,) = graph.node("Conv", y, graph.constant(graph.numbers(2, x.shape[1], 1, 1)))
    (y,) = graph.node("Relu", y)
    (y,) = graph.node("Conv", y, graph.constant(graph.numbers(x.shape[1], 2, 1, 1)))
    (y,) = graph.node(graph.chance.choice(["Sigmoid", "HardSigmoid"]), y)
    graph.node("Mul", *graph.chance.sample([x, y], 2))


def residual(graph: Graph) -> None:
    """Two convolutions that are added or concatenated."""
    x = graph.pick(image)
    made = []
    for _ in range(2):
        weight = graph.constant(graph.numbers(graph.chance.choice([2, 4]), x.shape[1], 3, 3))
        made += graph.node("Conv", x, weight, pads=[1, 1, 1, 1])
        if graph.chance.random() < 0.5:
            made[-1:] = graph.node("Relu", made[-1])
    if made[0].shape == made[1].shape and graph.chance.random() < 0.5:
        graph.node("Relu", *graph.node("Add", *made))
    else:
        graph.node("Concat", *made, axis=1)


def unknown(graph: Graph) -> None:
    """A node whose result has as many numbers as the input says."""
    x = graph.pick(is_float)
    clear(Known("", x.array), x.array)
    (places,) = graph.node("NonZero", x)
    graph.node("ReduceSum", places, graph.row(1), keepdims=0)


# --- 8-bit numbers ------------------------------------------------------------------------------------------------------
_SCALES = (0.0625, 0.05, 0.11)


def _quantised(graph: Graph, x: Known, axis: int | None = None) -> Known:
    scale = np.float32(graph.chance.choice(_SCALES))
    kind = graph.chance.choice([np.int8, np.uint8])
    zero = kind(graph.chance.choice([0, 5]) if kind == np.int8 else 128)
    scaled = x.array / scale
    if not (x.exact and scale == np.float32(0.0625)):
        clear(Known("", x.array), 0.02 * (scaled - np.floor(scaled) - 0.5))  # a twentieth of a step
    pair = graph.constant(scale), graph.constant(zero)
    (codes,) = graph.node("QuantizeLinear", x, *pair, exact=True)
    (y,) = graph.node("DequantizeLinear", codes, *pair)
    return Known(y.name, y.array, exact=scale == np.float32(0.0625))


def quantise(graph: Graph) -> None:
    _quantised(graph, graph.pick(is_float))


def _codes(graph: Graph, shape: list[int], axis: int) -> Known:
    """Dequantised weights."""
    draw = np.random.default_rng(graph.chance.getrandbits(32))
    codes = draw.integers(-20, 21, shape).astype(np.int8)
    if graph.chance.random() < 0.5:
        scale, more = np.float32(0.03), {}
    else:
        scale, more = draw.uniform(0.01, 0.05, shape[axis]).astype(np.float32), {"axis": axis}
    zero = np.zeros_like(scale, np.int8)
    name = graph.fixed("DequantizeLinear", graph.weight(codes), graph.weight(scale), graph.weight(zero), **more)
    return Known(name, graph.arrays[name], fixed=True)


def quantised_product(graph: Graph) -> None:
    """A product of 8-bit numbers, quantised behind it."""
    x = graph.pick(of_rank(2, 3, 4))
    real = _quantised(graph, x)
    if x.array.ndim == 4:
        taps = graph.chance.choice([1, min(3, *x.shape[2:])])
        weight = _codes(graph, [graph.chance.choice([2, 4]), x.shape[1], taps, taps], 0)
        (y,) = graph.node("Conv", real, weight, pads=[taps // 2] * 4)
    else:
        weight = _codes(graph, [x.shape[-1], graph.chance.choice([2, 4])], 1)
        (y,) = graph.node("MatMul", real, weight)
    if graph.chance.random() < 0.5:
        (y,) = graph.node("Relu", y)
    if graph.chance.random() < 0.7:
        _quantised(graph, y)


# --- Bodies -------------------------------------------------------------------------------------------------------------
def branch(graph: Graph) -> None:
    """An If of a condition that is computed, or known."""
    x = graph.pick(is_float)
    if graph.chance.random() < 0.5:
        condition: Known | str = graph.constant(np.array(graph.chance.choice([True, False])))
    else:
        (total,) = graph.node("ReduceSum", x, keepdims=0)
        clear(Known("", total.array), total.array)
        (condition,) = graph.node("Greater", total, graph.constant(np.float32(0)))
    bodies = []
    for op in graph.chance.sample(["Relu", "Neg", "Sigmoid", "Identity"], 2):
        name = f"b{len(graph.nodes)}.{len(bodies)}"
        inner = helper.make_node(op, [x.name], [name], name=name)
        bodies.append(
            helper.make_graph([inner], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape)])
        )
    graph.node("If", condition, then_branch=bodies[0], else_branch=bodies[1])


def loop(graph: Graph) -> None:
    """A Loop of a known number of turns, which adds a value to what it carries."""
    x = graph.pick(is_float)
    turns = graph.constant(np.array(graph.chance.choice([1, 2, 3]), np.int64))
    name = f"b{len(graph.nodes)}"
    info = helper.make_tensor_value_info
    inputs = [info(f"{name}.turn", TensorProto.INT64, []), info(f"{name}.go", TensorProto.BOOL, []),
              info(f"{name}.in", TensorProto.FLOAT, x.shape)]  # fmt: skip
    nodes = [
        helper.make_node("Identity", [f"{name}.go"], [f"{name}.on"], name=f"{name}.0"),
        helper.make_node("Tanh", [f"{name}.in"], [f"{name}.t"], name=f"{name}.1"),
        helper.make_node("Add", [f"{name}.t", x.name], [f"{name}.out"], name=f"{name}.2"),
    ]
    outputs = [info(f"{name}.on", TensorProto.BOOL, []), info(f"{name}.out", TensorProto.FLOAT, x.shape)]
    body = helper.make_graph(nodes, name, inputs, outputs)
    graph.node("Loop", turns, graph.constant(np.array(True)), x, body=body)


PARTS: tuple[Callable[[Graph], None], ...] = (
    reshape,
    shape_chain,
    view,
    transpose,
    transpose,
    cut,
    cut,
    split,
    gather,
    pad,
    concat,
    concat,
    tile,
    triangle,
    scatter,
    mask,
    mask,
    quantise,
    quantised_product,
    quantised_product,
    branch,
    loop,
    truth,
    truth,
    whole,
    whole,
    one_hot,
    several,
    other_unary,
    recurrence,
    attention,
    gate,
    residual,
    unknown,
)
