"""RotaryEmbedding: pairs of numbers of each head, turned by the angle of their position.

real = cos * x1 - sin * x2        imag = sin * x1 + cos * x2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from schedsearch.network.compositions.composition import Composition, Rewrite, rewrite, shape_of
from schedsearch.network.facts import FLOATS, dtype_of

if TYPE_CHECKING:
    import onnx_ir as ir


def _rotary(c: Composition) -> str | None:
    x, cos, sin = c.needed(0), c.needed(1), c.needed(2)
    read = c.node.attributes
    if dtype_of(x) not in FLOATS:
        return f"reads {dtype_of(x)}; allowed: {', '.join(FLOATS)}"
    c.finish(
        rotated(
            c,
            x,
            cos,
            sin,
            c.input(3),
            heads=read.get_int("num_heads", 0),
            turned=read.get_int("rotary_embedding_dim", 0),
            interleaved=bool(read.get_int("interleaved", 0)),
        )
    )
    return None


def rotated(
    c: Composition,
    x: ir.Value,
    cos: ir.Value,
    sin: ir.Value,
    positions: ir.Value | None,
    *,
    heads: int,
    turned: int,
    interleaved: bool,
) -> ir.Value:
    """[b, h, s, d] or [b, s, h * d] with the first `turned` numbers of each head turned, all if it is 0."""
    shape = shape_of(x)
    flat = len(shape) == 3
    view = c.reshape(x, [shape[0], shape[1], heads, shape[2] // heads]) if flat else x
    turned = turned or shape_of(view)[3]
    factors = []
    for table in (cos, sin):
        if positions is not None:
            table = c.add("Gather", [table, positions], [*shape_of(positions), *shape_of(table)[1:]], axis=0)
        batch, rows, numbers = shape_of(table)
        factors.append(c.reshape(table, [batch, rows, 1, numbers] if flat else [batch, 1, rows, numbers]))
    if interleaved:
        parts = [c.slice(view, 3, start, turned, 2) for start in (0, 1)]
    else:
        parts = [c.slice(view, 3, start, start + turned // 2) for start in (0, turned // 2)]
    (first, second), (by_cos, by_sin) = parts, factors
    real = c.add("Sub", [c.add("Mul", [first, by_cos]), c.add("Mul", [second, by_sin])])
    imaginary = c.add("Add", [c.add("Mul", [first, by_sin]), c.add("Mul", [second, by_cos])])
    if interleaved:
        pairs = [c.reshape(each, [*shape_of(each), 1]) for each in (real, imaginary)]
        made = [c.reshape(c.concat(pairs, 4), [*shape_of(view)[:3], turned])]
    else:
        made = [real, imaginary]
    rest = [c.slice(view, 3, turned, shape_of(view)[3])] if turned < shape_of(view)[3] else []
    return c.reshape(c.concat([*made, *rest], 3), shape)


REWRITTEN: Mapping[str, Rewrite] = {"RotaryEmbedding": rewrite(_rotary)}
