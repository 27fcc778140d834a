"""Softmax, layer norms and Resize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.network.chain import Chain, Operand, Read
from schedsearch.network.compositions.normalisations import NORMS, SOFTMAX_OPSET
from schedsearch.network.facts import FLOATS, constant_input, dtype_of, extents_of, inputs_of, is_given, name_of
from schedsearch.network.graph import Constant
from schedsearch.typed import ParamsByName

if TYPE_CHECKING:
    import onnx_ir as ir

_COORDINATES = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")


def _softmax(*, log: bool) -> Read:
    def read(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
        (x,) = inputs_of(node, 1)
        extents = extents_of(node, x)
        old = node.graph is not None and node.graph.opset_imports.get("", SOFTMAX_OPSET) < SOFTMAX_OPSET
        axis = node.attributes.get_int("axis", 1 if old else -1) % len(extents)
        if (dtype := dtype_of(x)) not in FLOATS:
            return f"{name_of(node)} is {dtype}; allowed: {', '.join(FLOATS)}"
        return Chain("softmax", {"x": extents, "axis": axis, "log": log, "dtype": dtype}, [node], node.outputs[0], {"x": x})

    return read


def _layer_norm(*, centred: bool) -> Read:
    def read(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
        (x,) = inputs_of(node, 1)
        extents = extents_of(node, x)
        axis = node.attributes.get_int("axis", -1) % len(extents)
        if (dtype := dtype_of(x)) not in FLOATS:
            return f"{name_of(node)} is {dtype}; allowed: {', '.join(FLOATS)}"
        arguments: dict[str, Operand] = {"x": x}
        for place, name in ((1, "scale"), (2, "bias")):
            if not is_given(node, place):
                continue
            constant = constant_input(node, place)
            assert constant is not None  # others have become nodes behind it
            row = np.broadcast_to(constant, extents[axis:]).ravel()
            arguments[name] = Constant(f"{name_of(node)}.{name}", "K", row)
        params = {
            "x": extents,
            "axis": axis,
            "epsilon": node.attributes.get_float("epsilon", 1e-5),
            "centred": centred,
            "bias": "bias" in arguments,
            "dtype": dtype,
        }
        return Chain("layer_norm", params, [node], node.outputs[0], arguments)

    return read


def _resize(node: ir.Node, taken: set[ir.Node]) -> Chain | str:
    (x,) = inputs_of(node, 1)
    shape, to = extents_of(node, x), extents_of(node, node.outputs[0])
    if len(shape) != 4 or shape[:2] != to[:2]:
        return f"{name_of(node)} makes {to} of {shape}; allowed: images, of which height and width change"
    words, scales = resize_words(node), resize_scales(node)
    if isinstance(words, str) or isinstance(scales, str):
        return words if isinstance(words, str) else str(scales)
    if words["mode"] != "nearest" and (dtype := dtype_of(x)) not in FLOATS:
        return f"{name_of(node)} interpolates {dtype}, which runtimes round in different ways; allowed: nearest"
    params: ParamsByName = dict(zip("nchw", shape)) | words
    params |= {"oh": to[2], "ow": to[3], "dtype": dtype_of(x)}
    if scales is not None:
        params["scale"] = scales[2:]
        if words["coordinates"] == "align_corners" and any(
            scale * before != after for scale, before, after in zip(params["scale"], shape[2:], to[2:])
        ):
            return (
                f"{name_of(node)} has align_corners and scales that do not make {to[2:]} of {shape[2:]}; give sizes instead"
            )
    return Chain("resize", params, [node], node.outputs[0], {"x": x})


def resize_words(node: ir.Node) -> dict[str, str] | str:
    """The parameters mode, coordinates and rounding of a Resize or Upsample, or why no operator computes it."""
    read = node.attributes
    mode = {"nearest": "nearest", "linear": "linear", "bilinear": "linear"}.get(found := read.get_string("mode", "nearest"))
    old = _is_old(node)
    coordinates = "asymmetric" if old else read.get_string("coordinate_transformation_mode", "half_pixel")
    wrong = [name for name in ("antialias", "exclude_outside") if read.get_int(name, 0)]
    if read.get_string("keep_aspect_ratio_policy", "stretch") != "stretch":
        wrong.append("keep_aspect_ratio_policy")
    if mode is None or coordinates not in _COORDINATES or wrong:
        got = ", ".join([found, coordinates, *wrong])
        return f"{name_of(node)} is {got}; allowed: nearest or linear, {', '.join(_COORDINATES)}"
    words = {"mode": mode, "coordinates": coordinates}
    if mode == "nearest":
        words["rounding"] = read.get_string("nearest_mode", "round_prefer_floor")
        if old:
            scales = resize_scales(node)
            if not isinstance(scales, list) or min(scales) < 1 < max(scales):
                return f"{name_of(node)} enlarges one axis and shrinks another one; use Resize of opset 11"
            words["rounding"] = "floor" if min(scales) >= 1 else "ceil"
    return words


def _is_old(node: ir.Node) -> bool:
    """Whether it is an Upsample, or a Resize of opset 10: these have no choice of coordinates. ONNX Runtime counts from the
    corner, and takes the pixel before a coordinate, or after it where images become smaller."""
    return node.op_type == "Upsample" or len(node.inputs) == 2


def resize_scales(node: ir.Node) -> list[float] | str | None:
    """The scales of all four axes of an image; None where sizes are given, and the reason where no operator takes them."""
    place = 1 if _is_old(node) else 2
    scales = constant_input(node, place)
    if scales is None and "scales" in node.attributes:  # opset 7 and 8
        scales = np.array(node.attributes.get_floats("scales"))
    if scales is None and is_given(node, place):
        return f"{name_of(node)} has scales that are computed; allowed: constants"
    if scales is None or not scales.size:
        return None
    by_axis = dict(zip(resized_axes(node), scales.tolist()))
    return [by_axis.get(axis, 1.0) for axis in range(4)]


def resized_axes(node: ir.Node) -> list[int]:
    """The axes of an image that the scales or sizes of a Resize are about, in their order."""
    return [axis % 4 for axis in node.attributes.get_ints("axes", (0, 1, 2, 3))]


def _norm(node: ir.Node, taken: set[ir.Node]) -> str:
    """Of a normalisation that has not become others."""
    (x,) = inputs_of(node, 1)
    shape = extents_of(node, x)
    if (dtype := dtype_of(x)) not in FLOATS:
        return f"{name_of(node)} is {dtype}; allowed: {', '.join(FLOATS)}"
    if node.op_type == "GroupNormalization":
        groups = node.attributes.get_int("num_groups", 0)
        return f"{name_of(node)} makes {groups} groups of {shape[1]} channels; allowed: a number that divides them"
    return f"{name_of(node)} normalises an array of shape {shape}; allowed: [n, c, ...], with elements"


SOFTMAXES: Mapping[str, Read] = {"Softmax": _softmax(log=False), "LogSoftmax": _softmax(log=True)}
RESIZES: Mapping[str, Read] = {"Resize": _resize, "Upsample": _resize}
LAYER_NORMS: Mapping[str, Read] = {
    "LayerNormalization": _layer_norm(centred=True),
    "RMSNormalization": _layer_norm(centred=False),
    **dict.fromkeys(NORMS, _norm),
}
