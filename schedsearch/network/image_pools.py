"""Pools of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.network.chain import Chain, Read
from schedsearch.network.compositions.composition import noted
from schedsearch.network.epilogue import append_requantise
from schedsearch.network.facts import (
    FLOATS,
    INTEGERS,
    dtype_of,
    extents_of,
    inputs_of,
    name_of,
    only_reader,
)
from schedsearch.network.graph import Constant
from schedsearch.network.quantised import converted_from, converted_to, same_scale
from schedsearch.network.reductions import reduction_of
from schedsearch.network.windows import Window
from schedsearch.typed import ParamsByName

if TYPE_CHECKING:
    import onnx_ir as ir


def _pool(mode: str, *, whole: bool = False) -> Read:
    """Reads pools with a window, or those of whole images."""

    def read(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
        (x,) = inputs_of(node, 1)
        extents = extents_of(node, x)
        if len(extents) != 4:
            return f"{name_of(node)} has {len(extents) - 2} spatial dimensions; allowed: 1 to 3"
        if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
            return (
                f"{name_of(node)} {noted(node) or 'gives the places of the largest pixels of an array of unknown extents'}"
            )
        if whole:
            return _chain(node, x, mode, extents[2:], {}, taken)
        if problem := _auto_pad_problem(node, extents[2:]):
            return f"{name_of(node)} has auto_pad SAME and {problem}, which runtimes pad in different ways; allowed: pads"
        window = Window.of(node)
        params = window.params(extents[2:])
        params["ceil_mode"] = bool(node.attributes.get_int("ceil_mode", 0))
        if mode == "average":
            params["count_include_pad"] = bool(node.attributes.get_int("count_include_pad", 0))
        return _chain(node, x, mode, window.taps, params, taken)

    return read


def _auto_pad_problem(node: ir.Node, image: Sequence[int]) -> str:
    """What makes the padding of a pool uncertain. ONNX Runtime 1.32 pads as if there were no dilations, and leaves out
    pixels in front where strides skip some; ONNX's definition does neither."""
    window = Window.of(node)
    if not window.is_same:
        return ""
    if any(taps > 1 and dilation > 1 for taps, dilation in zip(window.taps, window.dilations)):
        return "dilations"
    sides = zip(image, window.taps, window.strides)
    skips = any((extent - 1) // stride * stride + taps < extent for extent, taps, stride in sides)
    return "strides that skip pixels" if skips else ""


def _mean(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    """A ReduceMean of the two dimensions of images; means over other axes have become pools."""
    found = reduction_of(node)
    if isinstance(found, str):
        return f"{name_of(node)} {found}"
    return _chain(node, found.x, "average", found.shape[2:], {}, taken)


def _norm(node: ir.Node, taken: set[ir.Node]) -> str:
    """Pools by the p-norm have become averages, but for those that cannot be."""
    (x,) = inputs_of(node, 1)
    if (dtype := dtype_of(x)) not in FLOATS:
        return f"{name_of(node)} reads {dtype or 'an unknown dtype'}; allowed: {', '.join(FLOATS)}"
    extents_of(node, x)
    return f"{name_of(node)} has a p that is no positive integer; allowed: 1, 2, ..."


def _quantised_average(
    node: ir.Node, x: ir.Value, kernel: Sequence[int], window: ParamsByName, taken: set[ir.Node]
) -> Chain | None:
    """An average between conversions with different scales: a convolution of each channel with ones, which stand for
    1 / pixels, so that sums are integers and only their product with a scale is rounded. None if there are no such
    conversions, or if windows at a border have fewer pixels."""
    q, follower = converted_from(x), only_reader(node.outputs[0])
    y = None if follower is None or follower in taken else converted_to(follower)
    bordered = any(window.get("padding", ())) and not window.get("count_include_pad")
    if q is None or y is None or follower is None or bordered or window.get("ceil_mode") or q.dtype not in INTEGERS:
        return None
    if q.scale is None or q.scale.size > 1 or q.zero_point is None or y.scale is None or y.scale.size > 1:
        return None
    n, c, h, w = extents_of(node, x)
    r, s = kernel
    params = {"n": n, "c": c, "h": h, "w": w, "k": c, "r": r, "s": s, "groups": c, "dtype": q.dtype, "weight_dtype": "int8"}
    params |= {name: window[name] for name in ("stride", "dilation", "padding") if name in window}
    ones = Constant(f"{name_of(node)}.ones", "OIHW", np.ones((c, 1, r, s), np.int8))
    chain = Chain("conv2d", params, [node], node.outputs[0], {"x": q.value, "weight": ones}, channels=c)
    if q.zero_point:
        params["zero_points"] = ["x"]
        chain.scalars["x_zero_point"] = q.zero_point
    chain.make_depthwise()
    chain.append(follower)
    append_requantise(chain, q.scale * np.float32(1 / (r * s)), y, taken)
    return chain


def _chain(node: ir.Node, x: ir.Value, mode: str, kernel: Sequence[int], window: ParamsByName, taken: set[ir.Node]) -> Chain:
    """The pool; of 8-bit numbers if it stands between conversions with the same scale."""
    n, c, h, w = extents_of(node, x)
    sizes = {"n": n, "c": c, "h": h, "w": w, "r": kernel[0], "s": kernel[1], "mode": mode}
    chain = Chain("pool2d", {**sizes, **window, "dtype": dtype_of(x)}, [node], node.outputs[0], {"x": x})
    follower = chain.next(taken)
    whole = same_scale([x], follower)
    if whole and follower is not None and not (whole[0].zero_point and window.get("count_include_pad")):
        chain.params["dtype"] = whole[0].dtype
        chain.arguments["x"] = whole[0].value
        chain.append(follower)
        return chain
    averaged = _quantised_average(node, x, kernel, window, taken) if mode == "average" else None
    return averaged or chain


POOLS: Mapping[str, Read] = {
    "MaxPool": _pool("max"),
    "AveragePool": _pool("average"),
    "GlobalMaxPool": _pool("max", whole=True),
    "GlobalAveragePool": _pool("average", whole=True),
    "ReduceMean": _mean,
    **dict.fromkeys(("LpPool", "GlobalLpPool"), _norm),
}
