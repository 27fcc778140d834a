"""Losses of classes, which graphs of training keep: SoftmaxCrossEntropyLoss and NegativeLogLikelihoodLoss.

The score of the right class of each item is gathered and weighted. An item whose class is `ignore_index` gets class 0 and
weight 0. The mean is that of the items with their weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from schedsearch.network.compositions.composition import Composition, Rewrite, rewrite, shape_of
from schedsearch.network.facts import FLOATS, dtype_of

if TYPE_CHECKING:
    import onnx_ir as ir

_REDUCTIONS = ("mean", "sum", "none")


def _likelihood(c: Composition) -> str | None:
    if problem := _problem(c):
        return problem
    c.finish(_loss(c, c.needed(0)))
    return None


def _cross_entropy(c: Composition) -> str | None:
    if problem := _problem(c):
        return problem
    scores = c.needed(0)
    logarithms = c.add("LogSoftmax", [scores], shape_of(scores), axis=1)
    c.finish(_loss(c, logarithms) if c.is_read(0) else None, logarithms if c.is_read(1) else None)
    return None


def _problem(c: Composition) -> str:
    scores, classes, reduction = c.needed(0), c.needed(1), c.node.attributes.get_string("reduction", "mean")
    shape = shape_of(scores)
    if reduction not in _REDUCTIONS:
        return f"has reduction {reduction}; allowed: {', '.join(_REDUCTIONS)}"
    if dtype_of(scores) not in FLOATS:
        return f"reads {dtype_of(scores)}; allowed: {', '.join(FLOATS)}"
    if not math.prod(shape):
        return "reads an array without elements; allowed: at least one item and one class"
    if len(shape) < 2 or shape_of(classes) != [shape[0], *shape[2:]]:
        wanted = "scores of at least 2 dimensions, and a class for each item"
        return f"reads scores {shape} and classes {shape_of(classes)}; allowed: {wanted}"
    return ""


def _loss(c: Composition, logarithms: ir.Value) -> ir.Value:
    import onnx_ir as ir

    read, classes, weights = c.node.attributes, c.needed(1), c.input(2)
    shape, items = shape_of(logarithms), shape_of(classes)
    share: ir.Value | None = None
    ignored: ir.Value | None = None
    if "ignore_index" in read:
        number = c.constant(read.get_int("ignore_index", 0), classes)
        ignored = c.add("Equal", [classes, number], items, ir.DataType.BOOL)
        classes = c.add("Where", [ignored, c.constant(0, classes), classes], items, classes.dtype)
    one_each = [shape[0], 1, *shape[2:]]
    picked = c.add("GatherElements", [logarithms, c.reshape(classes, one_each)], one_each, axis=1)
    loss = c.add("Neg", [c.reshape(picked, items)])
    if weights is not None:
        share = c.add("Gather", [weights, classes], items, axis=0)
    if ignored is not None:
        one = c.constant(1.0, logarithms) if share is None else share
        share = c.add("Where", [ignored, c.constant(0.0, logarithms), one], items, logarithms.dtype)
    loss = loss if share is None else c.add("Mul", [loss, share])
    reduction = read.get_string("reduction", "mean")
    if reduction == "none":
        return loss
    total = _sum(c, loss)
    if reduction == "mean":
        count = c.constant(float(math.prod(items)), loss) if share is None else _sum(c, share)
        total = c.add("Div", [total, count])
    return total


def _sum(c: Composition, value: ir.Value) -> ir.Value:
    row = c.reshape(value, [1, math.prod(shape_of(value))])
    return c.reshape(c.last_axis("ReduceSum", row), [])


REWRITTEN: Mapping[str, Rewrite] = {
    "NegativeLogLikelihoodLoss": rewrite(_likelihood),
    "SoftmaxCrossEntropyLoss": rewrite(_cross_entropy),
}
