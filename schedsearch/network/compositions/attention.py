"""Attention as two products of batches with a softmax between them.

    y = softmax(cap(scale * q k^T) + bias) v

Heads of keys and values that several heads of queries share are not repeated: the rows of these heads follow one another and
are those of one product. What constant masks say is one constant; masks that are computed are added, or chosen by.
A row of which every key is masked has a bias of -inf everywhere, so that its softmax is NaN: the row of y is then zero.
The softmax is computed in float32 whatever softmax_precision says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from schedsearch.network.compositions.composition import Composition, Rewrite, rewrite, shape_of
from schedsearch.network.facts import FLOATS, constant_of, dtype_of

if TYPE_CHECKING:
    import onnx_ir as ir

Heads = tuple[int, int]  # of queries, and of keys and values


@dataclass
class Scores:
    """What is added to the products of queries and keys.

    Attributes:
        numbers: what is known: 0 and -inf, or any; None: nothing.
        arrays: computed ones.
    """

    numbers: Any = None
    arrays: Sequence[ir.Value] = ()

    def add(self, numbers: Any) -> None:
        self.numbers = numbers if self.numbers is None else self.numbers + numbers

    def allow(self, allowed: Any) -> None:
        if not np.all(allowed):
            self.add(np.where(allowed, 0.0, -np.inf))


@dataclass(frozen=True)
class Sizes:
    """Of an attention: matrices of the batch, heads, rows of queries and of all keys, and numbers of a row."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    numbers: int
    v_numbers: int


# --- The operator of ONNX -----------------------------------------------------------------------------------------------
def _attention(c: Composition) -> str | None:
    read, q, k, v = c.node.attributes, c.needed(0), c.needed(1), c.needed(2)
    if dtype_of(q) not in FLOATS:
        return f"reads {dtype_of(q)}; allowed: {', '.join(FLOATS)}"
    flat = len(shape_of(q)) == 3
    heads = read.get_int("q_num_heads", 0), read.get_int("kv_num_heads", 0)
    q, k, v = (split_heads(c, each, count) if flat else each for each, count in zip((q, k, v), (heads[0], *heads[1:] * 2)))
    past = 0
    if (past_key := c.input(4)) is not None and (past_value := c.input(5)) is not None:
        past = shape_of(past_key)[2]
        k, v = c.concat([past_key, k], 2), c.concat([past_value, v], 2)
    sizes = sizes_of(q, k, v)
    scores = _scores(c, sizes, past)
    scale = read.get_float("scale", 1 / math.sqrt(sizes.numbers)) if "scale" in read else 1 / math.sqrt(sizes.numbers)
    mode = read.get_int("qk_matmul_output_mode", 0) if c.is_read(3) else None
    y, seen = attend(c, (q, k, v), scale, scores, softcap=read.get_float("softcap", 0.0), seen=mode)
    y = join_heads(c, y) if flat else y
    present = [each if c.is_read(place) else None for place, each in ((1, k), (2, v))]
    c.finish(*[y, *present, seen][: len(c.node.outputs)])
    return None


def sizes_of(q: ir.Value, k: ir.Value, v: ir.Value) -> Sizes:
    (batch, heads, queries, numbers), (_, kv_heads, keys, _) = shape_of(q), shape_of(k)
    return Sizes(batch, heads, kv_heads, queries, keys, numbers, shape_of(v)[3])


def split_heads(c: Composition, x: ir.Value, heads: int) -> ir.Value:
    """[b, s, h * d] as [b, h, s, d]."""
    batch, rows, numbers = shape_of(x)
    return c.transpose(c.reshape(x, [batch, rows, heads, numbers // heads]), [0, 2, 1, 3])


def join_heads(c: Composition, y: ir.Value) -> ir.Value:
    """[b, h, s, d] as [b, s, h * d]."""
    batch, heads, rows, numbers = shape_of(y)
    return c.reshape(c.transpose(y, [0, 2, 1, 3]), [batch, rows, heads * numbers])


def _scores(c: Composition, sizes: Sizes, past: int) -> Scores:
    """What masks, causality, windows and the lengths of sequences add."""
    read, found = c.node.attributes, Scores()
    lengths = c.input(6)
    ahead = np.arange(sizes.keys) - np.arange(sizes.queries)[:, None]  # of a key, from its query
    known = None if lengths is None else constant_of(lengths)
    offset: Any = past
    if lengths is not None and not past:
        offset = None if known is None else (known - sizes.queries).reshape(-1, 1, 1, 1)
    left, right = read.get_int("left_window_size", -1), read.get_int("right_window_size", -1)
    bounds = [(ahead, 0)] if read.get_int("is_causal", 0) else []  # ahead - offset <= bound
    bounds += [(ahead, right)] if right >= 0 else []
    bounds += [(-ahead, left)] if left >= 0 else []
    arrays: list[ir.Value] = []
    for distance, bound in bounds:
        sign = 1 if distance is ahead else -1
        if offset is not None:
            found.allow(distance <= bound + sign * offset)
        else:
            assert lengths is not None
            arrays.append(_within(c, sign * (distance - bound) + sizes.queries, lengths, sign))
    if known is not None:
        found.allow(np.arange(sizes.keys) < known.reshape(-1, 1, 1, 1))
    elif lengths is not None:
        arrays.append(_within(c, np.arange(sizes.keys)[None] + 1, lengths, 1))
    if (mask := c.input(3)) is not None:
        arrays += _masked(c, mask, found, sizes.keys)
    found.arrays = arrays
    return found


def _within(c: Composition, distance: Any, lengths: ir.Value, sign: int) -> ir.Value:
    """0 where distance <= length (or >=, if the sign is -1), else -inf."""
    rows, (batch,) = c.constant(distance.astype(np.int64)[None, None]), shape_of(lengths)
    counts = c.reshape(lengths, [batch, 1, 1, 1])
    outside = c.add("Greater" if sign > 0 else "Less", [rows, counts], None, _bool())
    return chosen(c, outside, -np.inf, 0.0, c.needed(0))


def _bool() -> ir.DataType:
    import onnx_ir as ir

    return ir.DataType.BOOL


def chosen(c: Composition, condition: ir.Value, one: float, other: float, like: ir.Value) -> ir.Value:
    """A number where a condition is true, and another one where it is not."""
    return c.add("Where", [condition, c.constant(one, like), c.constant(other, like)], shape_of(condition), like.dtype)


def _masked(c: Composition, mask: ir.Value, found: Scores, keys: int) -> list[ir.Value]:
    """Adds a constant mask to what is known; one that is computed is an array. A short one is filled with masked keys."""
    missing = keys - (shape_of(mask) or [keys])[-1]
    if shape_of(mask)[-1:] == [1] and c.model.opset_imports.get("", 0) < _FILLED:
        missing = 0  # repeated
    truths = dtype_of(mask) == "uint8"
    array = constant_of(mask)
    if array is not None:
        pads = [(0, 0)] * (array.ndim - 1) + [(0, missing)] if missing else None
        numbers = np.where(array, 0.0, -np.inf) if truths else array.astype(np.float64)
        found.add(np.pad(numbers, pads, constant_values=-np.inf) if pads else numbers)
        return []
    added = chosen(c, mask, 0.0, -np.inf, c.needed(0)) if truths else mask
    if missing:
        shape = [*shape_of(added)[:-1], missing]
        added = c.concat([added, c.constant(np.full(shape, -np.inf), added)], len(shape) - 1)
    return [added]


_FILLED = 24  # the first opset in which the keys of a mask may be fewer


# --- What all operators have in common ------------------------------------------------------------------------------------
def attend(
    c: Composition,
    arrays: tuple[ir.Value, ir.Value, ir.Value],
    scale: float,
    scores: Scores,
    *,
    softcap: float = 0.0,
    seen: int | None = None,
    has_empty_rows: bool = True,
) -> tuple[ir.Value, ir.Value | None]:
    """Queries [b, h, s, d], keys [b, g, t, d] and values [b, g, t, e], where g divides h, as an attention [b, h, s, e].

    Args:
        seen: which of the scores is asked for as well: 0: the products, 1: after the cap, 2: with the bias, 3: the softmax.
        has_empty_rows: computed scores may be -inf for every key of a row.
    """
    q, k, v = arrays
    sizes = sizes_of(q, k, v)
    of_scores = [sizes.batch, sizes.heads, sizes.queries, sizes.keys]
    known: list[ir.Value] = []
    products = c.reshape(c.times(c.matmul(_by_kv_head(c, q, sizes), c.swap(k)), scale), of_scores)
    known.append(products)
    if softcap > 0:
        products = c.times(c.add("Tanh", [c.times(products, 1 / softcap)]), softcap)
    known.append(products)
    for each in [*scores.arrays, *([] if scores.numbers is None else [c.constant(scores.numbers, q)])]:
        products = c.add("Add", [products, each], of_scores)
    known.append(products)
    weights = c.add("Softmax", [products], of_scores, axis=3)
    masked = _masked_rows(c, scores, q) if has_empty_rows else None
    if masked is not None and seen == 3:
        weights = _zeroed(c, masked, weights)
    known.append(weights)
    y = c.reshape(c.matmul(_by_kv_head(c, weights, sizes), v), [*of_scores[:3], sizes.v_numbers])
    if masked is not None:
        y = _zeroed(c, masked, y)
    return y, None if seen is None else known[seen]


def _by_kv_head(c: Composition, x: ir.Value, sizes: Sizes) -> ir.Value:
    """Rows of all heads that share keys, behind one another."""
    shape = shape_of(x)
    return c.reshape(x, [sizes.batch, sizes.kv_heads, sizes.heads // sizes.kv_heads * shape[2], shape[3]])


def _masked_rows(c: Composition, scores: Scores, like: ir.Value) -> ir.Value | None:
    """Truths [..., s, 1]: rows of which every key is masked; None if there are none."""
    if not scores.arrays:
        numbers = scores.numbers
        rows = (
            np.isneginf(np.max(numbers, axis=-1, keepdims=True)) if numbers is not None and numbers.ndim else np.array(False)
        )
        return c.constant(rows) if rows.any() else None
    total, *others = scores.arrays
    for each in [*others, *([] if scores.numbers is None else [c.constant(scores.numbers, like)])]:
        total = c.add("Add", [total, each])
    largest = c.last_axis("ReduceMax", total) if shape_of(total) else total
    return c.add("Equal", [largest, c.constant(-np.inf, like)], shape_of(largest), _bool())


def _zeroed(c: Composition, masked: ir.Value, x: ir.Value) -> ir.Value:
    return c.add("Where", [masked, c.constant(0.0, x), x], shape_of(x), x.dtype)


REWRITTEN: Mapping[str, Rewrite] = {"Attention": rewrite(_attention)}
