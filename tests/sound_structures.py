"""Structures of real ONNX files that hear: voice activity, wake words, the end of a turn, pitch. See `structure_support`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import helper
from structure_support import BOOL, FLOAT, INT32, INT64, Body, Structure, like

WINDOW, HIDDEN = 16, 12  # of the voice activity nets


# --- Voice activity ---------------------------------------------------------------------------------------------------
def _spectrum(g: Body, x: str) -> str:
    """Magnitudes of a short-time Fourier transform: a reflected border, a convolution over samples, and two halves."""
    bins = WINDOW // 2 + 1
    pads = g.op("Concat", g.ints(0, 4), g.op("ConstantOfShape", g.ints(2), value=_whole(0)), axis=0)
    pairs = g.op("Reshape", pads, g.ints(-1, 2))
    turned = g.op("Slice", pairs, g.ints(-1), g.ints(-(2**63) + 1), g.ints(0), g.ints(-1))
    pads = g.op("Cast", g.op("Reshape", g.op("Transpose", turned, perm=[1, 0]), g.ints(-1)), to=INT64)
    padded = g.op("Unsqueeze", g.op("Pad", x, pads, mode="reflect"), g.ints(1))
    basis = g.weight(2 * bins, 1, WINDOW)
    waves = g.op("Conv", padded, basis, kernel_shape=[WINDOW], strides=[8], pads=[0, 0])
    waves = g.op("Slice", waves, g.ints(0), g.ints(2**63 - 1), g.ints(0), g.ints(1))
    halves = [
        g.op("Cast", g.op("Slice", waves, g.ints(first), g.ints(last), g.ints(1), g.ints(1)), to=FLOAT)
        for first, last in ((0, bins), (bins, 2**63 - 1))
    ]
    squares = [g.op("Pow", half, g.number(2)) for half in halves]
    return str(g.op("Sqrt", g.op("Add", *squares)))


def _encoder(g: Body, x: str) -> str:
    c = WINDOW // 2 + 1
    for k, stride in ((HIDDEN, 1), (8, 2), (HIDDEN, 2)):
        x = g.op("Relu", g.conv(x, c, k, [3], pads=[1, 1], strides=[stride]))
        c = k
    return x


def _chosen(g: Body, condition: str, then: Callable[[Body], str], otherwise: Callable[[Body], str]) -> str:
    branches = [g.branch(), g.branch()]
    results = [then(branches[0]), otherwise(branches[1])]
    graphs = [each.graph(name, made) for each, name, made in zip(branches, ("then", "else"), results)]
    return str(g.op("If", condition, then_branch=graphs[0], else_branch=graphs[1]))


def _without_last(g: Body, x: str) -> str:
    """A squeeze of an axis that has one element, which torch's exporter asks for in the graph."""
    extent = g.op("Gather", g.op("Shape", x), g.ints(-1))
    is_one = g.op("Equal", extent, g.ints(1))
    return _chosen(g, is_one, lambda b: b.op("Squeeze", x, b.ints(-1)), lambda b: b.op("Identity", x))


def _cell(g: Body, x: str, state: str) -> tuple[str, str]:
    """One step of an LSTM whose gates are sliced from torch's order; y and the new state."""
    h, c = (g.op("Gather", state, g.array(n, np.int64)) for n in (0, 1))
    is_matrix = g.op("Not", g.op("Equal", g.op("Size", g.op("Shape", x)), g.array(2, np.int64)))
    x = _chosen(
        g, g.op("Cast", is_matrix, to=BOOL), lambda b: b.op("Unsqueeze", x, b.ints(0)), lambda b: b.op("Identity", x)
    )
    gates = []
    for inner in (HIDDEN, HIDDEN):
        weight = g.weight(4 * HIDDEN, inner)
        order = ((0, 1), (3, 4), (1, 3))
        parts = [g.op("Slice", weight, g.ints(HIDDEN * a), g.ints(HIDDEN * b), g.ints(0)) for a, b in order]
        gates.append(g.op("Unsqueeze", g.op("Concat", *parts, axis=0), g.ints(0)))
    bias = g.op(
        "Unsqueeze", g.op("Concat", g.weight(4 * HIDDEN, scale=0.1), g.weight(4 * HIDDEN, scale=0.1), axis=0), g.ints(0)
    )
    wide = [g.op("Unsqueeze", each, g.ints(0)) for each in (x, h, c)]
    _, h, c = g.op("LSTM", wide[0], *gates, bias, "", *wide[1:], outputs=3, hidden_size=HIDDEN)
    return g.op("Squeeze", h, g.ints(0)), g.op("Concat", h, c, axis=0)


def _voice(g: Body, x: str, state: str) -> tuple[str, str]:
    y, state = _cell(g, _without_last(g, _encoder(g, _spectrum(g, x))), state)
    wide = g.op("Relu", g.op("Unsqueeze", y, g.ints(-1)))
    y = g.op("Sigmoid", g.conv(wide, HIDDEN, 1, [1], pads=[0, 0]))
    means = {"axes": [1], "keepdims": 0}
    return g.op("Unsqueeze", g.op("ReduceMean", g.op("Squeeze", y, g.ints(1)), **means), g.ints(1)), state


def _whole(value: int) -> Any:
    return helper.make_tensor("value", INT64, [1], [value])


_INPUTS: dict[str, tuple[Any, ...]] = {"x": (1, 36), "state": (2, 1, HIDDEN)}


@like("silero_vad")
def silero_vad() -> Any:
    """A net for each sampling rate, chosen by an input."""
    g = Structure(16, **_INPUTS, sr=(INT64, ()))
    branches = [g.branch(), g.branch()]
    graphs = [each.graph(name, *_voice(each, "x", "state")) for each, name in zip(branches, ("then", "else"))]
    is_fast = g.op("Equal", "sr", g.array(16000, np.int64))
    return g.model(*g.op("If", is_fast, outputs=2, then_branch=graphs[0], else_branch=graphs[1]))


@like("silero_vad_op15")
def silero_vad_op15() -> Any:
    """The sampling rate scales what is not needed; every condition follows from shapes."""
    g = Structure(15, **_INPUTS)
    return g.model(*_voice(g, "x", "state"))


@like("silero_vad_half")
def silero_vad_half() -> Any:
    """Weights in float16, which a Cast widens."""
    g = Structure(16, **_INPUTS)
    keep = g.keep

    def halved(array: Any) -> str:
        if array.dtype != np.float32 or array.ndim < 2:
            return keep(array)
        return str(g.op("Cast", keep(array.astype(np.float16)), to=FLOAT))

    g.keep = halved  # type: ignore[method-assign]
    return g.model(*_voice(g, "x", "state"))


@like("silero_vad_openvino")
def silero_vad_openvino() -> Any:
    """All Constants have one name, and the state is taken apart by slices."""
    g = Structure(16, **_INPUTS)
    model = g.model(*_voice(g, "x", "state"))
    for node in model.graph.node:
        if node.op_type == "Constant":
            node.name = "anonymous"
    return model


@like("silero_vad_sequence")
def silero_vad_sequence() -> Any:
    """All windows at once: the batch of the encoder is the sequence of the LSTM."""
    g = Structure(16, x=(5, 36), h=(1, 1, HIDDEN), c=(1, 1, HIDDEN))
    x = g.op("ReduceMean", _encoder(g, _spectrum(g, "x")), axes=[2], keepdims=0)
    rows = g.op("Reshape", x, g.ints(-1, 1, HIDDEN))
    weights = [g.weight(1, 4 * HIDDEN, HIDDEN), g.weight(1, 4 * HIDDEN, HIDDEN), g.weight(1, 8 * HIDDEN, scale=0.1)]
    y, h, c = g.op("LSTM", rows, *weights, "", "h", "c", outputs=3, hidden_size=HIDDEN)
    wide = g.op("Transpose", g.op("Squeeze", y, g.ints(1)), perm=[1, 2, 0])
    y = g.op("Sigmoid", g.conv(g.op("Relu", wide), HIDDEN, 1, [1], pads=[0, 0]))
    return g.model(g.op("Reshape", y, g.ints(-1)), h, c)


# --- Wake words -------------------------------------------------------------------------------------------------------
@like("melspectrogram")
def melspectrogram() -> Any:
    g = Structure(13, x=(1, 96))
    wave, squares = g.op("Unsqueeze", "x", g.ints(1)), []
    for _ in range(2):
        part = g.op("Conv", wave, g.weight(9, 1, 32), dilations=[1], group=1, kernel_shape=[32], pads=[0, 0], strides=[16])
        squares.append(g.op("Pow", g.op("Transpose", g.op("Unsqueeze", part, g.ints(1)), perm=[0, 1, 3, 2]), g.number(2)))
    mel = g.op("MatMul", g.op("Add", *squares), g.array(np.abs(g.normal((9, 6), 0.3))))
    log = g.op("Log", g.op("Clip", mel, g.array(1e-10), g.array(np.inf)))
    decibels = g.op("Sub", g.op("Div", g.op("Mul", log, g.number(10)), g.number(2.3025851)), g.number(0))
    least = g.op("Cast", g.op("Sub", g.op("ReduceMax", decibels, keepdims=0), g.number(10)), to=FLOAT)
    return g.model(g.op("Clip", decibels, least, g.array(np.inf)))


def _dense(g: Body, x: str, c: int, k: int) -> str:
    return str(g.op("Gemm", x, g.weight(k, c), g.weight(k, scale=0.1), alpha=1.0, beta=1.0, transB=1))


@like("alexa_v0.1")
def alexa() -> Any:
    g = Structure(13, x=(1, 4, 6))
    y = g.op("Relu", _dense(g, g.op("Flatten", "x", axis=1), 24, 8))
    return g.model(g.op("Sigmoid", _dense(g, g.op("Relu", _dense(g, y, 8, 8)), 8, 1)))


@like("timer_v0.1")
def timer() -> Any:
    g = Structure(13, x=(1, 4, 6))
    y = g.op("Relu", _dense(g, g.op("Flatten", "x", axis=1), 24, 8))
    return g.model(g.op("Softmax", g.op("Relu", _dense(g, y, 8, 7)), axis=-1))


def _judge(g: Body) -> str:
    """Two layers with layer norms out of means, and a probability."""
    x = g.op("Flatten", "x", axis=1)
    for c in (24, 8):
        x = _dense(g, x, c, 8)
        apart = g.op("Sub", x, g.op("ReduceMean", x, axes=[-1]))
        deviation = g.op("Sqrt", g.op("Add", g.op("ReduceMean", g.op("Pow", apart, g.number(2)), axes=[-1]), g.number(1e-5)))
        scaled = g.op("Mul", g.op("Div", apart, deviation), g.array(np.linspace(0.5, 1.5, 8)))
        x = g.op("Relu", g.op("Add", scaled, g.weight(8, scale=0.1)))
    return str(g.op("Sigmoid", _dense(g, x, 8, 1)))


@like("hey_marvin_v0.1")
def hey_marvin() -> Any:
    g = Structure(13, x=(1, 4, 6))
    return g.model(_judge(g))


@like("hey_jarvis_v0.1")
def hey_jarvis() -> Any:
    """A second net that verifies what the first one heard: its condition is computed in the run."""
    g = Structure(13, x=(1, 4, 6))
    heard = _judge(g)
    is_heard = g.op("Cast", g.op("GreaterOrEqual", heard, g.number(0.5)), to=BOOL)
    return g.model(_chosen(g, is_heard, _judge, lambda b: b.op("Identity", heard)))


@like("hey_mycroft_v0.1")
def hey_mycroft() -> Any:
    """Bidirectional LSTMs as Keras has them: zeros by Expand, and directions that are slices of the result."""
    g = Structure(13, x=(1, 4, 6))

    def zeros(shape: str, hidden: int) -> str:
        batch = g.op("Slice", g.op("Cast", shape, to=INT32), g.ints(0), g.ints(1), g.ints(0))
        extents = g.op("Cast", g.op("Concat", batch, g.array([hidden], np.int32), axis=0), to=INT64)
        one = g.op("Unsqueeze", g.op("Expand", g.array(0.0), extents), g.ints(0))
        return str(g.op("Concat", one, one, axis=0))

    def lstm(x: str, c: int, hidden: int, shape: str) -> list[str]:
        state = zeros(shape, hidden)
        weights = [g.weight(2, 4 * hidden, c), g.weight(2, 4 * hidden, hidden), g.weight(2, 8 * hidden, scale=0.1)]
        y, _, _ = g.op(
            "LSTM", x, *weights, "", state, state, outputs=3, direction="bidirectional", hidden_size=hidden
        )  # fmt: skip
        return [g.op("Squeeze", g.op("Slice", y, g.ints(n), g.ints(n + 1), g.ints(1)), g.ints(1)) for n in (0, 1)]

    both = g.op("Concat", *lstm(g.op("Transpose", "x", perm=[1, 0, 2]), 6, 5, g.op("Shape", "x")), axis=2)
    turned = g.op("Gather", g.op("Shape", both), g.ints(1, 0, 2))
    forward, backward = lstm(both, 10, 4, turned)
    last = g.op("Squeeze", g.op("Slice", forward, g.ints(-1), g.ints(2**31 - 1), g.ints(0)), g.ints(0))
    first = g.op("Squeeze", g.op("Slice", backward, g.ints(0), g.ints(1), g.ints(0)), g.ints(0))
    y = g.op("MatMul", g.op("Concat", last, first, axis=1), g.weight(8, 1))
    return g.model(g.op("Sigmoid", g.op("Add", y, g.weight(1))))


# --- Turns and pitch --------------------------------------------------------------------------------------------------
@like("smart_turn")
def smart_turn() -> Any:
    """A quantised encoder of Whisper: convolutions over time, attention between conversions, and a pooled classifier."""
    n, c, heads = 8, 16, 2
    g = Structure(18, x=(1, 6, 2 * n))

    def quantised(x: str, scale: float, zero: int) -> str:
        parts = [g.array(scale), g.array(zero, np.uint8)]
        return str(g.op("DequantizeLinear", g.op("QuantizeLinear", x, *parts), *parts))

    def whole(*shape: int, axis: int) -> str:
        k = shape[axis]
        scales = g.array(np.linspace(0.5, 1, k) / (64 * np.sqrt(np.prod(shape) / k)))
        given = [g.integers(-127, 128, shape, np.int8), scales, g.array([0] * k, np.int8)]
        return str(g.op("DequantizeLinear", *given, axis=axis))

    def gelu(x: str) -> str:
        half = g.op("Mul", g.array(0.5), g.op("Add", g.op("Erf", g.op("Div", x, g.array(2**0.5))), g.array(1.0)))
        return str(g.op("Mul", x, half))

    def dense(x: str, inner: int, k: int) -> str:
        return str(g.op("Add", quantised(g.op("MatMul", x, whole(inner, k, axis=1)), 0.05, 128), g.weight(k, scale=0.1)))

    x, inner = quantised("x", 0.04, 128), 6
    batch = g.op("Shape", x, start=0, end=1)
    for stride in (1, 2):
        bias = g.op("DequantizeLinear", g.integers(-50, 50, (c,), np.int32), g.array(np.full(c, 0.002)), axis=0)
        x = g.op("Conv", x, whole(c, inner, 3, axis=0), bias, pads=[1, 1], strides=[stride])
        x, inner = gelu(quantised(x, 0.03, 128)), c
        x = quantised(x, 0.03, 10) if stride == 1 else x
    x = g.op("Add", g.op("Transpose", x, perm=[0, 2, 1]), g.weight(n, c, scale=0.3))
    norm = {"axis": -1, "epsilon": 1e-5, "stash_type": 1}
    normal = quantised(g.op("LayerNormalization", x, g.array(np.linspace(0.5, 1.5, c)), g.weight(c), **norm), 0.03, 128)
    to = g.op("Concat", batch, g.ints(-1, heads, c // heads), axis=0)
    q, k, v = (g.op("Transpose", g.op("Reshape", dense(normal, c, c), to, allowzero=1), perm=[0, 2, 1, 3]) for _ in range(3))
    extents = g.op("Gather", g.op("Shape", k, start=0), g.ints(0, 1, 2, 3))
    outer = g.op("Slice", extents, g.ints(-(2**63)), g.ints(-2))
    rows, columns = (g.op("Slice", extents, g.ints(a), g.ints(b)) for a, b in ((-2, -1), (-1, 2**63 - 1)))
    turned = g.op("Transpose", g.op("Reshape", k, g.op("Concat", g.ints(-1), rows, columns, axis=0)), perm=[0, 2, 1])
    turned = g.op("Reshape", turned, g.op("Concat", outer, columns, rows, axis=0))
    scaled = [quantised(g.op("Mul", each, g.array([8**-0.25])), 0.02, 128) for each in (q, turned)]
    weights = quantised(g.op("Softmax", quantised(g.op("MatMul", *scaled), 0.03, 128), axis=-1), 1 / 256, 0)
    seen = quantised(g.op("MatMul", weights, quantised(v, 0.02, 128)), 0.02, 128)
    flat = g.op(
        "Reshape", g.op("Transpose", seen, perm=[0, 2, 1, 3]), g.op("Concat", batch, g.ints(n, c), axis=0), allowzero=1
    )
    x = g.op("Add", x, dense(quantised(flat, 0.02, 128), c, c))
    pooled = g.op("Softmax", dense(g.op("Tanh", dense(x, c, 8)), 8, 1), axis=1)
    y = g.op("ReduceSum", g.op("Mul", x, pooled), g.ints(1), keepdims=0)
    y = g.op("Gemm", quantised(y, 0.02, 128), whole(c, 8, axis=1), g.weight(8, scale=0.1))
    return g.model(g.op("Sigmoid", g.op("Gemm", gelu(y), whole(8, 1, axis=1), g.weight(1))))


@like("basic_pitch")
def basic_pitch() -> Any:
    """Octaves of a constant-Q transform, each from half the samples, a normalised logarithm, and stacked harmonics."""
    samples, frames, bins, taps = 64, 8, 4, 16
    g = Structure(15, x=(1, samples, 1))
    wave, octaves = g.op("Reshape", "x", g.ints(-1, 1, samples)), []
    for octave in range(2):
        stride, length = 8 >> octave, samples >> octave
        padded = g.op("Pad", wave, g.ints(0, 0, taps // 2, 0, 0, taps // 2), mode="reflect")
        image = g.op(
            "Reshape",
            g.op("Unsqueeze", g.op("Reshape", padded, g.ints(-1, length + taps, 1)), g.ints(-3)),
            g.ints(-1, 1, 1, length + taps),
        )
        parts = []
        for turned in (False, True):
            part = g.op(
                "Conv", image, g.weight(bins, 1, 1, taps), g.array([0] * bins), kernel_shape=[1, taps], strides=[1, stride]
            )
            part = g.op("Neg", part) if turned else part
            part = g.op("Slice", part, g.ints(0), g.ints(frames), g.ints(3))
            rows = g.op("Reshape", g.op("Transpose", part, perm=[0, 2, 3, 1]), g.ints(-1, frames, bins))
            parts.append(g.op("Unsqueeze", rows, g.ints(3)))
        octaves.insert(0, g.op("Concat", *parts, axis=3))
        if not octave:
            padded = g.op("Pad", wave, g.ints(0, 0, 7, 0, 0, 7))
            image = g.op("Reshape", padded, g.ints(-1, 1, 1, samples + 14))
            low = g.op("Conv", image, g.weight(1, 1, 1, taps), g.array([0]), kernel_shape=[1, taps], strides=[1, 2])
            wave = g.op("Reshape", low, g.ints(-1, 1, samples // 2))
    spectrum = g.op("Slice", g.op("Concat", *octaves, axis=2), g.ints(-7), g.ints(2**31 - 1), g.ints(2))
    scaled = g.op("Mul", g.op("Transpose", spectrum, perm=[0, 2, 1, 3]), g.array(np.linspace(1, 2, 7).reshape(7, 1, 1)))
    total = g.op("ReduceSum", g.op("Mul", scaled, scaled), g.ints(-1), keepdims=0, noop_with_empty_axes=1)
    x = g.op("Transpose", g.op("Sqrt", total), perm=[0, 2, 1])
    log = g.op("Mul", g.op("Log", g.op("Add", g.op("Mul", x, x), g.array(1e-10))), g.array(4.342944622))
    batch = g.op("Slice", g.op("Cast", g.op("Shape", x), to=INT32), g.ints(0), g.ints(1), g.ints(0))
    to = g.op("Cast", g.op("Concat", batch, g.array([1], np.int32), g.array([1], np.int32), axis=0), to=INT64)
    log = g.op("Sub", log, g.op("Reshape", g.op("ReduceMin", log, axes=[1, 2], keepdims=0), to))
    most = g.op("Reshape", g.op("ReduceMax", log, axes=[1, 2], keepdims=0), to)
    x = g.op("Where", g.op("Equal", most, g.array(0.0)), g.array(0.0), g.op("Div", log, most))
    x = g.op("Add", g.op("Mul", g.op("Unsqueeze", x, g.ints(-1)), g.array([2.4])), g.array([-0.8]))
    shifted = [g.op("Slice", x, g.ints(0, 0, 3, 0), g.ints(*[2**31 - 1] * 4), g.ints(0, 1, 2, 3)), x]
    shifted[0] = g.op("Pad", shifted[0], g.ints(0, 0, 0, 0, 0, 0, 3, 0))
    stacked = g.op(
        "Transpose", g.op("Slice", g.op("Concat", *shifted, axis=3), g.ints(0), g.ints(6), g.ints(2)), perm=[0, 3, 1, 2]
    )
    first = g.op("Relu", g.conv(stacked, 2, 8, [5, 5], pads=[2, 1, 2, 1], strides=[1, 3]))
    contours = g.op("Sigmoid", g.conv(g.op("Relu", g.conv(stacked, 2, 8, [3, 7])), 8, 1, 5))
    notes = g.op("Relu", g.conv(contours, 1, 8, [7, 7], pads=[3, 2, 3, 2], strides=[1, 3]))
    notes = g.op("Sigmoid", g.conv(notes, 8, 1, [7, 3]))
    onsets = g.op("Sigmoid", g.conv(g.op("Concat", notes, first, axis=1), 9, 1, 3))
    return g.model(
        *(g.op("Reshape", each, g.ints(-1, frames, width)) for each, width in ((contours, 6), (notes, 2), (onsets, 2)))
    )
