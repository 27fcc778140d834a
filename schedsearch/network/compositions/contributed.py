"""ONNX Runtime's operators of transformers and quantised products (domain com.microsoft) as compositions of ONNX's own.

Their definitions need shapes, and shapes behind them follow from their results. So they are replaced while a graph is
simplified, in order, and the shapes of nodes between them are inferred on the way. Source: ONNX Runtime,
docs/ContribOperators.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.network.compositions.attention import (
    Scores,
    attend,
    chosen,
    join_heads,
    sizes_of,
    split_heads,
)
from schedsearch.network.compositions.composition import Compose, Composition, known, note, shape_of
from schedsearch.network.compositions.rotary import rotated
from schedsearch.network.contributed import DOMAIN
from schedsearch.network.facts import OF_RUNTIME, constant_of, is_onnx

if TYPE_CHECKING:
    import onnx_ir as ir


def rewrite_contributed_shapes(model: ir.Model) -> bool:
    """Replaces the nodes of which all shapes are known; returns whether there were any."""
    changed = False
    for node in list(model.graph):
        compose = COMPOSED.get(node.op_type) if node.domain == DOMAIN or node.op_type in OF_RUNTIME else None
        if compose is not None and known(node.inputs):
            reason = compose(Composition(model, node))
            changed = changed or reason is None
            note(node, reason)
        elif changed and is_onnx(node) and not known(node.outputs):
            _infer(node, model.opset_imports)
    return changed


def _infer(node: ir.Node, opsets: Mapping[str, int]) -> None:
    """Gives the results of a node the shapes that follow from those of its inputs."""
    import onnx
    import onnx_ir as ir

    given = [value for value in node.inputs if value is not None]
    if not known(given) or any(each.type.name in ("GRAPH", "GRAPHS") for each in node.attributes.values()):
        return
    make = onnx.helper.make_tensor_type_proto
    types = {str(value.name): make(value.dtype.value, shape_of(value)) for value in given if value.dtype is not None}
    data = {
        str(value.name): ir.serde.serialize_tensor(value.const_value)
        for value in given
        if value.const_value is not None and value.const_value.size <= 64
    }
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets.get("", 1), "")
        found = onnx.shape_inference.infer_node_outputs(schema, ir.serde.serialize_node(node), types, data)
    except (RuntimeError, onnx.defs.SchemaError):  # the check of the graph says what is wrong
        return
    for value in node.outputs:
        if value.name in found and found[value.name].HasField("tensor_type"):
            value.shape = ir.serde.deserialize_type_proto_for_shape(found[value.name])
            value.type = ir.serde.deserialize_type_proto_for_type(found[value.name])


# --- Products -----------------------------------------------------------------------------------------------------------
def _fused_matmul(c: Composition) -> str | None:
    read = c.node.attributes
    if read.get_int("transBatchA", 0) or read.get_int("transBatchB", 0):
        return "exchanges axes of the batch; allowed: transBatchA 0 and transBatchB 0"
    a, b = c.needed(0), c.needed(1)
    if min(len(shape_of(a)), len(shape_of(b))) < 2:
        return f"multiplies {shape_of(a)} by {shape_of(b)}; allowed: two dimensions or more"
    y = c.matmul(c.swap(a) if read.get_int("transA", 0) else a, c.swap(b) if read.get_int("transB", 0) else b)
    c.finish(c.times(y, read.get_float("alpha", 1.0)))
    return None


def _dynamic_quantize_matmul(c: Composition) -> str | None:
    """A, B, the scale and zero point of B, and a bias."""
    x = c.needed(0)
    codes = _quantised_now(c, x)
    c.finish(_scaled_product(c, codes, (c.needed(1), c.needed(2), c.input(3)), c.input(4)))
    return None


_Linear = tuple["ir.Value", "ir.Value", "ir.Value | None"]  # integers, their scale and their zero point


def _quantised_now(c: Composition, x: ir.Value) -> _Linear:
    return c.several("DynamicQuantizeLinear", [x], [(shape_of(x), "UINT8"), ([], "FLOAT"), ([], "UINT8")])


def _integer_to_float(c: Composition) -> str | None:
    """A, B, their scales, their zero points, and a bias."""
    first, second = ((c.needed(place), c.needed(place + 2), c.input(place + 4)) for place in (0, 1))
    c.finish(_scaled_product(c, first, second, c.input(6)))
    return None


def _scaled_product(c: Composition, a: _Linear, b: _Linear, bias: ir.Value | None) -> ir.Value:
    import onnx_ir as ir

    batch = np.broadcast_shapes(tuple(shape_of(a[0])[:-2]), tuple(shape_of(b[0])[:-2]))
    shape = [*batch, shape_of(a[0])[-2], shape_of(b[0])[-1]]
    inputs = [a[0], b[0], a[2], b[2]]
    while inputs[-1] is None:
        inputs.pop()
    sums = c.cast(c.add("MatMulInteger", inputs, shape, ir.DataType.INT32), ir.DataType.FLOAT)
    y = c.add("Mul", [sums, c.add("Mul", [a[1], b[1]])], shape)
    return y if bias is None else c.add("Add", [y, bias], shape)


def _qgemm(c: Composition) -> str | None:
    """A, its scale and zero point; B and its; C in integers of the product of the scales; the scale and zero point of Y."""
    import onnx_ir as ir

    read, alpha = c.node.attributes, c.node.attributes.get_float("alpha", 1.0)
    scales = [constant_of(c.input(place)) for place in (1, 4)]
    if scales[0] is None or scales[1] is None or scales[0].size > 1:
        return "has scales that are computed, or several of A; allowed: constants, one for A"
    by = (scales[1].astype(np.float32) * np.float32(alpha)).reshape(scales[1].shape if scales[1].size > 1 else ())
    zero = None if c.input(5) is None else c.reshape(c.needed(5), list(by.shape))
    b_scale = c.constant(by)
    columns = 0 if read.get_int("transB", 0) else 1
    kind = ir.DataType.FLOAT
    a = c.add(
        "DequantizeLinear", [c.needed(0), *(c.reshape(c.needed(at), []) for at in (1, 2))], shape_of(c.needed(0)), kind
    )
    b = c.add("DequantizeLinear", [c.needed(3), b_scale, zero], shape_of(c.needed(3)), kind, axis=columns)
    inputs = [a, b]
    if (bias := c.input(6)) is not None:
        unit = c.constant(scales[0].reshape(()).astype(np.float32) * by)
        inputs.append(c.add("DequantizeLinear", [bias, unit], shape_of(bias), kind, axis=max(len(shape_of(bias)) - 1, 0)))
    transposes = {name: read.get_int(name, 0) for name in ("transA", "transB")}
    rows = shape_of(a)[1 if transposes["transA"] else 0]
    y = c.add("Gemm", inputs, [rows, shape_of(b)[columns]], kind, **transposes)
    if c.input(7) is not None:
        made = c.node.outputs[0].dtype
        inputs = [y, *(c.reshape(value, []) for value in (c.input(7), c.input(8)) if value is not None)]
        zero_y = c.input(8)
        made = made if made is not None else ir.DataType.UINT8 if zero_y is None else zero_y.dtype
        y = c.add("QuantizeLinear", inputs, shape_of(y), made)
    c.finish(y)
    return None


def _matmul_bits(c: Composition) -> str | None:
    """MatMulNBits: a weight [n, blocks, bytes] of numbers of 4 or 8 bits, the first one in the low bits."""
    read = c.node.attributes
    k, n, bits, size = (
        read.get_int(name, default) for name, default in (("K", 0), ("N", 0), ("bits", 4), ("block_size", 0))
    )
    packed, scales = constant_of(c.input(1)), constant_of(c.input(2))
    zero = constant_of(c.input(3))
    if bits not in (4, 8):
        return f"has weights of {bits} bits; allowed: 4 and 8"
    if packed is None or scales is None or (c.input(3) is not None and zero is None) or c.input(4) is not None:
        return "has weights, scales or zero points that are computed, or indices of groups; allowed: constants, no indices"
    blocks = -(-k // size) if size else 0
    if not blocks or packed.size != n * blocks * size * bits // 8 or scales.size != n * blocks:
        return f"has {packed.size} bytes for K {k}, N {n} and blocks of {size}; allowed: N x blocks x {size * bits // 8}"
    whole = _unpacked(packed.reshape(n, blocks, -1), bits).astype(np.float32)
    if zero is None:
        shift: Any = float(2 ** (bits - 1))
    elif zero.dtype == np.uint8:
        shift = _unpacked(zero.reshape(n, -1), bits)[:, :blocks, None].astype(np.float32)
    else:
        shift = zero.reshape(n, blocks, 1).astype(np.float32)
    weight = ((whole - shift) * scales.reshape(n, blocks, 1).astype(np.float32)).reshape(n, -1)[:, :k].T
    y = c.matmul(c.needed(0), c.constant(np.ascontiguousarray(weight), c.needed(0)))
    c.finish(y if (bias := c.input(5)) is None else c.add("Add", [y, bias], shape_of(y)))
    return None


def _unpacked(packed: Any, bits: int) -> Any:
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


# --- Activations and norms ----------------------------------------------------------------------------------------------
def _gelu(c: Composition) -> str | None:
    """The exact one; BiasGelu adds a row before."""
    x = c.needed(0) if c.input(1) is None else c.add("Add", [c.needed(0), c.needed(1)])
    half = c.add("Erf", [c.times(x, math.sqrt(0.5))])
    c.finish(c.times(c.add("Mul", [x, c.add("Add", [half, c.constant(1.0, x)], shape_of(x))]), 0.5))
    return None


def _fast_gelu(c: Composition) -> str | None:
    """By tanh, after a row that may be added."""
    x = c.needed(0) if c.input(1) is None else c.add("Add", [c.needed(0), c.needed(1)])
    cube = c.add("Mul", [c.add("Mul", [x, x]), c.times(x, 0.044715)])
    bent = c.add("Tanh", [c.times(c.add("Add", [x, cube]), math.sqrt(2 / math.pi))])
    c.finish(c.times(c.add("Mul", [x, c.add("Add", [bent, c.constant(1.0, x)], shape_of(x))]), 0.5))
    return None


def _quick_gelu(c: Composition) -> str | None:
    x = c.needed(0)
    c.finish(c.add("Mul", [x, c.add("Sigmoid", [c.times(x, c.node.attributes.get_float("alpha", 1.702))])]))
    return None


def _skip_norm(op: str) -> Compose:
    """The norm of x + skip + bias. Inputs: x, skip, scale, for layer norms a shift, and a bias."""

    def compose(c: Composition) -> str | None:
        if c.is_read(1) or c.is_read(2):
            return "gives its mean or deviation; allowed: only the numbers and the sum"
        x, skip, scale, *rest = c.needed(0), c.needed(1), c.needed(2), c.input(3), c.input(4)
        shift, bias = rest if op == "LayerNormalization" else (None, rest[0])
        total = c.add("Add", [x, skip], shape_of(x))
        total = total if bias is None else c.add("Add", [total, bias], shape_of(x))
        inputs = [total, scale, *([] if shift is None else [shift])]
        epsilon = c.node.attributes.get_float("epsilon", 1e-12)
        y = c.add(op, inputs, shape_of(x), axis=len(shape_of(x)) - 1, epsilon=epsilon)
        c.finish(*[y, None, None, total if c.is_read(3) else None][: len(c.node.outputs)])
        return None

    return compose


def _simplified_norm(c: Composition) -> str | None:
    if c.is_read(1):
        return "gives its deviation; allowed: only the numbers"
    x, read = c.needed(0), c.node.attributes
    axis = read.get_int("axis", -1) % len(shape_of(x))
    y = c.add("RMSNormalization", [x, c.needed(1)], shape_of(x), axis=axis, epsilon=read.get_float("epsilon", 1e-5))
    c.finish(y)
    return None


def _embedding(c: Composition) -> str | None:
    """EmbedLayerNormalization: the norm of the rows of words, positions and segments."""
    if c.is_read(1):
        return "gives lengths of masks; allowed: only the numbers"
    ids, segments, words, places, kinds = (c.input(place) for place in range(5))
    scale, shift, position_ids = c.needed(5), c.needed(6), c.input(8)
    assert ids is not None and words is not None and places is not None
    shape = [*shape_of(ids), shape_of(words)[1]]
    total = c.add("Gather", [words, ids], shape, axis=0)
    if position_ids is None:
        rows = c.slice(places, 0, 0, shape[1])
    else:
        rows = c.add("Gather", [places, position_ids], [*shape_of(position_ids), shape[2]], axis=0)
    total = c.add("Add", [total, rows], shape)
    if segments is not None and kinds is not None:
        total = c.add("Add", [total, c.add("Gather", [kinds, segments], shape, axis=0)], shape)
    epsilon = c.node.attributes.get_float("epsilon", 1e-12)
    y = c.add("LayerNormalization", [total, scale, shift], shape, axis=2, epsilon=epsilon)
    c.finish(*[y, None, total if c.is_read(2) else None][: len(c.node.outputs)])
    return None


# --- Attention ----------------------------------------------------------------------------------------------------------
def _attention(c: Composition) -> str | None:
    """Attention: x, one weight and bias of queries, keys and values, a mask, keys and values from before, and a bias."""
    read, x, weight, bias = c.node.attributes, c.needed(0), c.needed(1), c.input(2)
    heads = read.get_int("num_heads", 0)
    if c.input(6) is not None or read.get_int("do_rotary", 0) or read.get_int("past_present_share_buffer", 0):
        return "rotates, or writes into the keys from before; allowed: do_rotary 0 and past_present_share_buffer 0"
    total = shape_of(weight)[1]
    sizes = list(read.get_ints("qkv_hidden_sizes", ())) or [total // 3] * 3
    if heads < 1 or len(sizes) != 3 or sum(sizes) != total or any(size % heads for size in sizes):
        return f"has {heads} heads and rows of {sizes} in {total} columns; allowed: multiples of the heads"
    y = c.matmul(x, weight)
    y = y if bias is None else c.add("Add", [y, bias], shape_of(y))
    q, k, v = _heads_of_one(c, y, sizes, heads)
    if (past := c.input(4)) is not None:
        before = [c.reshape(c.slice(past, 0, at, at + 1), shape_of(past)[1:]) for at in (0, 1)]
        k, v = c.concat([before[0], k], 2), c.concat([before[1], v], 2)
    present = None
    if c.is_read(1):
        present = c.concat([c.reshape(each, [1, *shape_of(each)]) for each in (k, v)], 0)
    if reason := _masked_attention(c, (q, k, v), c.input(3), c.input(5), [present]):
        return reason
    return None


def _heads_of_one(c: Composition, y: ir.Value, sizes: list[int], heads: int) -> list[ir.Value]:
    """Queries, keys and values [b, h, s, d] that lie side by side in rows."""
    if len(set(sizes)) > 1:
        ends = pairwise(np.cumsum([0, *sizes]).tolist())
        return [split_heads(c, c.slice(y, 2, start, stop), heads) for start, stop in ends]
    batch, rows, _ = shape_of(y)
    size = sizes[0] // heads
    moved = c.transpose(c.reshape(y, [batch, rows, 3, heads, size]), [2, 0, 3, 1, 4])  # all at once
    return [c.reshape(c.slice(moved, 0, at, at + 1), [batch, heads, rows, size]) for at in range(3)]


def _multi_head(c: Composition) -> str | None:
    """MultiHeadAttention: queries, keys, values, a bias of them, a mask of keys, a bias of scores, keys and values from
    before."""
    heads, q, k, v = c.node.attributes.get_int("num_heads", 0), c.needed(0), c.input(1), c.input(2)
    if k is None or v is None or len(shape_of(q)) != 3:
        return "has queries, keys and values in one array; allowed: three arrays"
    if heads < 1 or shape_of(q)[2] % heads or c.input(8) is not None or c.is_read(3):
        return f"has {heads} heads for rows of {shape_of(q)[2]}, or gives scores; allowed: a divisor, no scores"
    arrays = [q, k, v]
    if (bias := c.input(3)) is not None:
        ends = np.cumsum([0, *(shape_of(q)[2], shape_of(q)[2])])
        parts = [*zip(ends, [*ends[1:], shape_of(bias)[0]])]
        arrays = [
            each
            if len(shape_of(each)) != 3
            else c.add("Add", [each, c.slice(bias, 0, int(start), int(stop))], shape_of(each))
            for each, (start, stop) in zip(arrays, parts)
        ]
    q, k, v = (split_heads(c, each, heads) if len(shape_of(each)) == 3 else each for each in arrays)
    if (past_key := c.input(6)) is not None and (past_value := c.input(7)) is not None:
        k, v = c.concat([past_key, k], 2), c.concat([past_value, v], 2)
    return _masked_attention(c, (q, k, v), c.input(4), c.input(5), [k, v])


def _masked_attention(
    c: Composition,
    arrays: tuple[ir.Value, ir.Value, ir.Value],
    mask: ir.Value | None,
    bias: ir.Value | None,
    present: list[ir.Value | None],
) -> str | None:
    """Writes an attention with a mask of integers, of which 0 means that a key counts little: for each of the batch and key,
    or also for each query; or the number of keys for each of the batch."""
    read, sizes, scores = c.node.attributes, sizes_of(*arrays), Scores()
    found = [] if bias is None else [bias]
    little = read.get_float("mask_filter_value", -10000.0)
    if mask is not None:
        shape = shape_of(mask)
        views = {(sizes.batch, sizes.keys): [sizes.batch, 1, 1, sizes.keys],
                 (sizes.batch, sizes.queries, sizes.keys): [sizes.batch, 1, sizes.queries, sizes.keys]}  # fmt: skip
        if shape == [sizes.batch]:
            keys, counts = (
                c.constant(np.arange(sizes.keys, dtype=np.int32)[None, None, None]),
                c.reshape(mask, [sizes.batch, 1, 1, 1]),
            )
            hidden = c.add("GreaterOrEqual", [keys, counts], None, _bool())
        elif tuple(shape) in views:
            hidden = c.add("Equal", [c.reshape(mask, views[tuple(shape)]), c.constant(0, mask)], None, _bool())
        else:
            return f"has a mask of shape {shape}; allowed: {[sizes.batch]} or {', '.join(str(list(each)) for each in views)}"
        found.append(chosen(c, hidden, little, 0.0, arrays[0]))
    if read.get_int("unidirectional", 0):
        scores.allow(np.arange(sizes.keys) - np.arange(sizes.queries)[:, None] <= sizes.keys - sizes.queries)
    scale = read.get_float("scale", 0.0) or 1 / math.sqrt(sizes.numbers)
    y, _ = attend(c, arrays, scale, Scores(scores.numbers, found), has_empty_rows=False)
    given = [each if c.is_read(1 + place) else None for place, each in enumerate(present)]
    c.finish(*[join_heads(c, y), *given][: len(c.node.outputs)])
    return None


def _bool() -> ir.DataType:
    import onnx_ir as ir

    return ir.DataType.BOOL


def _grouped(c: Composition) -> str | None:
    """GroupQueryAttention whose lengths are constants: every row of the caches from before counts."""
    read, heads = c.node.attributes, [c.node.attributes.get_int(name, 0) for name in ("num_heads", "kv_num_heads")]
    q, k, v = c.needed(0), c.input(1), c.input(2)
    if min(heads) < 1 or heads[0] % heads[1]:
        return f"has num_heads {heads[0]} and kv_num_heads {heads[1]}; allowed: a multiple of the second"
    if read.get_int("smooth_softmax", 0) or any(c.input(place) is not None for place in range(9, len(c.node.inputs))):
        return "has positions, a bias or a sink; allowed: none of them"
    if k is None or v is None:
        size = shape_of(q)[2] // (heads[0] + 2 * heads[1])
        ends = [0, heads[0] * size, (heads[0] + heads[1]) * size, shape_of(q)[2]]
        q, k, v = (c.slice(q, 2, start, stop) for start, stop in pairwise(ends))
    rows = shape_of(q)[1]
    past = c.input(3)
    before = 0 if past is None else shape_of(past)[2]
    lengths = constant_of(c.input(5))
    if lengths is None or (lengths != before + rows - 1).any():
        return f"has seqlens_k that are computed, or not {before + rows - 1}; allowed: constants, so that all rows count"
    q, k, v = (split_heads(c, each, count) for each, count in zip((q, k, v), (heads[0], *heads[1:] * 2)))
    if read.get_int("do_rotary", 0):
        cos, sin = (c.slice(c.needed(place), 0, before, before + rows) for place in (7, 8))
        by_cos, by_sin = (c.reshape(each, [1, *shape_of(each)]) for each in (cos, sin))
        turned = 2 * shape_of(cos)[1]
        mixed = bool(read.get_int("rotary_interleaved", 0))
        q, k = (rotated(c, each, by_cos, by_sin, None, heads=0, turned=turned, interleaved=mixed) for each in (q, k))
    if past is not None:
        k, v = c.concat([past, k], 2), c.concat([c.needed(4), v], 2)
    scores, sizes = Scores(), sizes_of(q, k, v)
    ahead = np.arange(sizes.keys) - np.arange(sizes.queries)[:, None] - before
    window = read.get_int("local_window_size", -1)
    scores.allow((ahead <= 0) & ((ahead > -window) if window > 0 else True))
    scale = read.get_float("scale", 0.0) or 1 / math.sqrt(sizes.numbers)
    y, _ = attend(c, (q, k, v), scale, scores, softcap=read.get_float("softcap", 0.0))
    given = [each if c.is_read(1 + place) else None for place, each in enumerate((k, v))]
    c.finish(*[join_heads(c, y), *given][: len(c.node.outputs)])
    return None


def _rotary(c: Composition) -> str | None:
    """RotaryEmbedding: x, positions of each row or of the first one, and tables."""
    read, x, positions, cos, sin = c.node.attributes, c.needed(0), c.needed(1), c.needed(2), c.needed(3)
    if read.get_int("is_packed_batching", 0) or read.get_float("scale", 1.0) != 1.0:
        return "is packed or scaled; allowed: is_packed_batching 0 and scale 1"
    shape, turned = shape_of(x), read.get_int("rotary_embedding_dim", 0)
    heads = read.get_int("num_heads", 0)
    if len(shape) == 3 and not heads:
        size = turned or 2 * shape_of(cos)[1]
        heads = shape[2] // size
    rows = shape[1] if len(shape) == 3 else shape[2]
    if shape_of(positions) == [1]:
        first = constant_of(positions)
        steps = np.arange(rows, dtype=np.int64)[None]
        places = c.add("Add", [positions, c.constant(steps)]) if first is None else c.constant(first.reshape(1, 1) + steps)
    else:
        places = positions
    mixed = bool(read.get_int("interleaved", 0))
    c.finish(rotated(c, x, cos, sin, places, heads=heads, turned=turned, interleaved=mixed))
    return None


COMPOSED: Mapping[str, Compose] = {
    "FusedMatMul": _fused_matmul,
    "TransposeMatMul": _fused_matmul,
    "DynamicQuantizeMatMul": _dynamic_quantize_matmul,
    "MatMulIntegerToFloat": _integer_to_float,
    "QGemm": _qgemm,
    "MatMulNBits": _matmul_bits,
    "Gelu": _gelu,
    "BiasGelu": _gelu,
    "FastGelu": _fast_gelu,
    "QuickGelu": _quick_gelu,
    "SkipLayerNormalization": _skip_norm("LayerNormalization"),
    "SkipSimplifiedLayerNormalization": _skip_norm("RMSNormalization"),
    "SimplifiedLayerNormalization": _simplified_norm,
    "EmbedLayerNormalization": _embedding,
    "Attention": _attention,
    "MultiHeadAttention": _multi_head,
    "GroupQueryAttention": _grouped,
    "RotaryEmbedding": _rotary,
}
