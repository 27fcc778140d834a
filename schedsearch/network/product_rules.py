"""What shape inference leaves out of products of matrices and attention: heads, masks, keys from before, letters."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from schedsearch.network.facts import differ, is_given, partial_extents

if TYPE_CHECKING:
    import onnx_ir as ir

_FLAT = 3  # dimensions of queries whose heads lie side by side
_DOTS = "..."


def _matmul(node: ir.Node) -> Iterator[str]:
    x, weight = partial_extents(node, 0), partial_extents(node, 1)
    if not x or not weight:
        return
    of_weight = weight[-2] if len(weight) > 1 else weight[0]
    if differ(x[-1], of_weight):
        yield f"multiplies {x} by {weight}; allowed: as many columns of the first as rows of the second"


def _gemm(node: ir.Node) -> Iterator[str]:
    a, b = partial_extents(node, 0), partial_extents(node, 1)
    if a is None or b is None or len(a) != 2 or len(b) != 2:
        return
    of_a, of_b = a[0 if node.attributes.get_int("transA", 0) else 1], b[1 if node.attributes.get_int("transB", 0) else 0]
    if differ(of_a, of_b):
        yield f"multiplies sums of length {of_a} and {of_b}; allowed: the same. transA and transB say which axis it is"


def _einsum(node: ir.Node) -> Iterator[str]:
    shapes = [partial_extents(node, place) for place in range(len(node.inputs))]
    if any(shape is None for shape in shapes):
        return
    found = letters_of(node.attributes.get_string("equation", ""), [shape for shape in shapes if shape is not None])
    if isinstance(found, str):
        yield found


def letters_of(equation: str, shapes: Sequence[Sequence[int | None]]) -> tuple[list[str], str] | str:
    """A letter for each dimension of every array and of the result, capitals and others; or what is wrong with the equation.
    Dimensions of an ellipsis get letters that the equation does not have."""
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(shapes):
        return f"has the equation {equation!r} for {len(terms)} arrays, but {len(shapes)} inputs; allowed: as many"
    free = [letter for letter in string.ascii_letters if letter not in text]
    several = max(
        (len(shape) - len(term.replace(_DOTS, "")) for term, shape in zip(terms, shapes) if _DOTS in term), default=0
    )
    dots = "".join(free[: max(several, 0)])
    found: list[str] = []
    for term, shape in zip(terms, shapes):
        plain = term.replace(_DOTS, "", 1)
        count = len(shape) - len(plain)
        if not all(letter in string.ascii_letters for letter in plain) or count < 0 or (count and _DOTS not in term):
            return (
                f"has the term {term!r} for an array of shape {list(shape)}; allowed: a letter for each dimension, or '...'"
            )
        found.append(term.replace(_DOTS, dots[len(dots) - count :]))
    every = "".join(found)
    result = (
        right.replace(_DOTS, dots, 1)
        if arrow
        else dots + "".join(sorted({a for a in left if left.count(a) == 1} - {".", ","}))
    )
    if len(set(result)) < len(result) or any(letter not in every for letter in result):
        return f"has the result {right!r}; allowed: letters of the arrays, each once"
    extents: dict[str, int] = {}
    for term, shape in zip(found, shapes):
        for letter, extent in zip(term, shape):
            if extent is not None and extent != 1 and extents.setdefault(letter, extent) != extent:
                pair = f"{extents[letter]} and {extent} for the letter {letter!r}"
                return f"has the equation {equation!r} with {pair}; allowed: the same, or 1"
    return found, result


# --- Attention ----------------------------------------------------------------------------------------------------------
def _attention(node: ir.Node) -> Iterator[str]:
    read = node.attributes
    shapes = [partial_extents(node, place) for place in range(3)]
    q, k, v = shapes
    if q is None or k is None or v is None:
        return
    if len(q) not in (_FLAT, 4) or len(k) != len(q) or len(v) != len(q):
        yield f"has Q, K and V of shapes {q}, {k} and {v}; allowed: all of 3 dimensions, or all of 4"
        return
    heads: list[int | None] = [q[1], k[1]]
    if len(q) == _FLAT:
        counts = [read.get_int("q_num_heads", 0), read.get_int("kv_num_heads", 0)]
        if min(counts) < 1:
            yield f"has q_num_heads {counts[0]} and kv_num_heads {counts[1]} for Q of 3 dimensions; allowed: both, 1 or more"
            return
        for name, shape, count in zip("QKV", (q, k, v), (counts[0], counts[1], counts[1])):
            if shape[2] is not None and shape[2] % count:
                yield f"has {count} heads and {name} of {shape[2]} numbers in a row; allowed: a multiple of the heads"
                return
        heads = [*counts]
        q, k, v = ([s[0], count, s[1], None if s[2] is None else s[2] // count]
                   for s, count in zip((q, k, v), (counts[0], counts[1], counts[1])))  # fmt: skip
    if heads[0] is not None and heads[1] is not None and (not heads[1] or heads[0] % heads[1]):
        yield f"has {heads[0]} heads of queries and {heads[1]} of keys; allowed: a multiple of those of keys"
    if differ(q[3], k[3]) or differ(k[2], v[2]) or differ(q[0], k[0]) or differ(k[0], v[0]) or differ(k[1], v[1]):
        by_heads = f"{q}, {k} and {v}, by heads"
        yield f"has Q, K and V of {by_heads}; allowed: equal batches, heads and rows of K and V, columns of Q and K"
        return
    past = partial_extents(node, 4)
    if is_given(node, 4) != is_given(node, 5):
        yield "has only one of past_key and past_value; allowed: both or none"
    if past is not None and (len(past) != 4 or differ(past[1], k[1]) or differ(past[3], k[3]) or differ(past[0], k[0])):
        yield f"has a past_key of shape {past}; allowed: {[k[0], k[1], 'any', k[3]]}"
        return
    keys = k[2] if not is_given(node, 4) else None if past is None or past[2] is None or k[2] is None else past[2] + k[2]
    yield from _mask(node, [q[0], q[1], q[2], keys])
    lengths = partial_extents(node, 6)
    if lengths is not None and (len(lengths) != 1 or differ(lengths[0], q[0])):
        yield f"has nonpad_kv_seqlen of shape {lengths}; allowed: [{q[0]}], one for each of the batch"
    if is_given(node, 6) and is_given(node, 4):
        yield "has nonpad_kv_seqlen and past_key; allowed: one of them"


def _mask(node: ir.Node, scores: list[int | None]) -> Iterator[str]:
    """Args: scores: batch, heads, queries and keys."""
    mask = partial_extents(node, 3)
    if mask is None:
        return
    if len(mask) > len(scores):
        yield f"has a mask of shape {mask}; allowed: at most 4 dimensions, which are repeated to {scores}"
        return
    *others, keys = mask or [1]
    fewer = keys is not None and scores[3] is not None and keys < scores[3]
    wrong = [pair for pair in zip(reversed(others), reversed(scores[:3])) if pair[0] != 1 and differ(*pair)]
    if wrong or (differ(keys, scores[3]) and keys != 1 and not fewer):
        yield f"has a mask of shape {mask}; allowed: one that can be repeated to {scores}"


def _rotary(node: ir.Node) -> Iterator[str]:
    x, heads = partial_extents(node, 0), node.attributes.get_int("num_heads", 0)
    if x is None:
        return
    if len(x) not in (_FLAT, 4):
        yield f"has an input of shape {x}; allowed: 3 or 4 dimensions"
        return
    if len(x) == _FLAT and (heads < 1 or (x[2] is not None and x[2] % heads)):
        yield f"has num_heads {heads} for rows of {x[2]} numbers; allowed: a divisor of them"
        return
    numbers = x[3] if len(x) == 4 else None if x[2] is None else x[2] // heads
    turned = node.attributes.get_int("rotary_embedding_dim", 0) or numbers
    if turned is None:
        return
    if turned % 2 or turned < 0 or (numbers is not None and turned > numbers):
        yield f"has rotary_embedding_dim {turned} for heads of {numbers} numbers; allowed: an even number of them"
        return
    positions = is_given(node, 3)
    for place, name in ((1, "cos_cache"), (2, "sin_cache")):
        shape = partial_extents(node, place)
        if shape is not None and (len(shape) != (2 if positions else 3) or differ(shape[-1], turned // 2)):
            rows = ["positions"] if positions else [x[0], x[1] if len(x) == _FLAT else x[2]]
            yield f"has a {name} of shape {shape}; allowed: {[*rows, turned // 2]}"


PRODUCT_RULES: Mapping[str, Callable[[ir.Node], Iterator[str]]] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Attention": _attention,
    "RotaryEmbedding": _rotary,
}
