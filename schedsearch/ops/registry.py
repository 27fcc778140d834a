"""Operators by name: the built-in ones and those of installed packages (entry-point group `schedsearch.ops`).

An operator is imported when it is first needed. No module registers anything when it is imported.
"""

from __future__ import annotations

import functools
import importlib
import keyword

from schedsearch.errors import Problem, UnknownOperatorError, did_you_mean
from schedsearch.ops.base import RESERVED_NAMES, Op
from schedsearch.ops.params import Parameter
from schedsearch.plugins import Offer, PluginError, load, offers, the_offer
from schedsearch.text import type_text

ENTRY_POINT_GROUP = "schedsearch.ops"

BUILT_IN = {
    "conv2d": "schedsearch.ops.conv2d:CONV2D",
    "depthwise_conv2d": "schedsearch.ops.depthwise_conv2d:DEPTHWISE_CONV2D",
    "depthwise_conv1d": "schedsearch.ops.depthwise_conv1d:DEPTHWISE_CONV1D",
    "causal_conv1d_update": "schedsearch.ops.causal_conv1d_update:CAUSAL_CONV1D_UPDATE",
    "dense": "schedsearch.ops.dense:DENSE",
    "batch_matmul": "schedsearch.ops.batch_matmul:BATCH_MATMUL",
    "layout_transform": "schedsearch.ops.layout_transform:LAYOUT_TRANSFORM",
    "transpose": "schedsearch.ops.transpose:TRANSPOSE",
    "depth_to_space": "schedsearch.ops.depth_to_space:DEPTH_TO_SPACE",
    "space_to_depth": "schedsearch.ops.depth_to_space:SPACE_TO_DEPTH",
    "strided_slice": "schedsearch.ops.strided_slice:STRIDED_SLICE",
    "dyn_strided_slice": "schedsearch.ops.dyn_strided_slice:DYN_STRIDED_SLICE",
    "concat": "schedsearch.ops.concat:CONCAT",
    "pad": "schedsearch.ops.pad:PAD",
    "pool2d": "schedsearch.ops.pool2d:POOL2D",
    "elementwise": "schedsearch.ops.elementwise:ELEMENTWISE",
    "softmax": "schedsearch.ops.softmax:SOFTMAX",
    "layer_norm": "schedsearch.ops.layer_norm:LAYER_NORM",
    "resize": "schedsearch.ops.resize:RESIZE",
    "gather": "schedsearch.ops.gather:GATHER",
    "scatter": "schedsearch.ops.scatter:SCATTER",
    "unique": "schedsearch.ops.unique:UNIQUE",
    "roi_align": "schedsearch.ops.roi_align:ROI_ALIGN",
    "nms": "schedsearch.ops.nms:NMS",
    "nonzero": "schedsearch.ops.nonzero:NONZERO",
    "topk": "schedsearch.ops.topk:TOPK",
    "arange": "schedsearch.ops.arange:ARANGE",
    "expand": "schedsearch.ops.expand:EXPAND",
    "reshape": "schedsearch.ops.reshape:RESHAPE",
    "where": "schedsearch.ops.where:WHERE",
    "dyn_concat": "schedsearch.ops.dyn_concat:DYN_CONCAT",
    "fill_margin": "schedsearch.ops.fill_margin:FILL_MARGIN",
    "dyn_resize": "schedsearch.ops.dyn_resize:DYN_RESIZE",
    "recurrent": "schedsearch.ops.recurrent:RECURRENT",
    "squeeze_excite": "schedsearch.ops.squeeze_excite:SQUEEZE_EXCITE",
}
RECORDED_ONLY = {"foreign": "schedsearch.ops.foreign:FOREIGN"}  # only records may be about these
OF_DECORATORS = {"own_kernel": "schedsearch.ops.own_kernel:OWN_KERNEL"}  # workloads are made by `schedsearch.tunable`


def operator(name: str) -> Op:
    """The operator of this name, built in or installed.

    Raises:
        UnknownOperatorError: no operator has this name, its package cannot be imported or breaks the contract of `Op`, or
            several packages claim the name. The message says what to do.
    """
    location = BUILT_IN.get(name) or RECORDED_ONLY.get(name) or OF_DECORATORS.get(name)
    if location is not None:
        return _built_in(location)
    claims = offers(ENTRY_POINT_GROUP).get(name)
    if claims is None:
        known = sorted(operator_names())
        hint = did_you_mean(name, known) if isinstance(name, str) else ""
        problem = Problem("op", f"unknown operator {name!r}{hint}; allowed: {', '.join(known)}")
        raise UnknownOperatorError([problem], name)
    try:
        return _installed(the_offer("operator", claims))
    except PluginError as error:
        raise UnknownOperatorError([Problem("op", str(error))], name) from error


def operator_names() -> list[str]:
    """The names that a workload's `op` may have, built-in ones first. Imports nothing, so that some may prove unusable."""
    installed = (name for name in offers(ENTRY_POINT_GROUP) if name not in RECORDED_ONLY and name not in OF_DECORATORS)
    return list(dict.fromkeys([*BUILT_IN, *installed]))


def operators() -> tuple[dict[str, Op], tuple[str, ...]]:
    """All usable operators by name, and a message for each installed operator that cannot be used."""
    found: dict[str, Op] = {}
    problems = [
        f"operator {name!r} is built in; the one of {claims[0]} is not used and needs another name"
        for name, claims in offers(ENTRY_POINT_GROUP).items()
        if name in BUILT_IN or name in RECORDED_ONLY or name in OF_DECORATORS
    ]
    for name in operator_names():
        try:
            found[name] = operator(name)
        except UnknownOperatorError as error:
            problems += [problem.message for problem in error.problems]
    return found, tuple(problems)


def contract_problems(op: object) -> list[str]:
    """How an object breaks the contract of `Op`, as far as this can be seen without parameters."""
    if not isinstance(op, Op):
        return [f"it is {type_text(op)}, not an instance of schedsearch.ops.Op"]
    problems = []
    missing = [name for name in ("name", "reference") if not isinstance(getattr(op, name, None), str)]
    problems += [f"its attribute {name} must be text" for name in missing]
    if not isinstance(op.version, int) or op.version < 1:
        problems.append(f"its version must be an integer of at least 1, got {op.version!r}")
    for name, parameter in op.parameters().items():
        if name in RESERVED_NAMES:
            problems.append(
                f"its parameter {name!r} has a reserved name: `workload.{name}` or the key {name!r} of a task is something "
                "else; rename it"
            )
        elif not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
            problems.append(f"its parameter {name!r} must be a Python name that does not begin with an underscore")
        described: object = parameter
        if not isinstance(described, Parameter):
            problems.append(f"its parameter {name!r} must be described by a schedsearch.ops.Parameter, got {parameter!r}")
    return problems


@functools.cache
def _built_in(location: str) -> Op:
    module, _, name = location.partition(":")
    found: Op = getattr(importlib.import_module(module), name)
    return found


@functools.lru_cache(maxsize=1024)
def _installed(offer: Offer) -> Op:
    found = load("operator", offer)
    if isinstance(found, type) and issubclass(found, Op):
        try:
            found = found()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # `SystemExit` included
            raise PluginError(
                f"operator {offer.name!r} of {offer} cannot be made: {type(error).__name__}: {error}"
            ) from error
    problems = contract_problems(found)
    if not problems and found.name != offer.name:
        problems = [f"its name is {found.name!r}; entry point and `name` must agree"]
    if problems:
        raise PluginError(f"operator {offer.name!r} of {offer} cannot be used: {'; '.join(problems)}")
    return found  # type: ignore[no-any-return]
