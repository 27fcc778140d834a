"""Softmax, LogSoftmax and Hardmax of opsets 1 to 12, after ONNX's definitions.

All axes from the attribute `axis` on are one row there, by default those from 1 on. onnx's reference evaluator (1.23) takes
it for the only axis at every opset.
"""

from __future__ import annotations

import math

import numpy as np
from onnx import defs
from onnx.reference.op_run import OpRun

from schedsearch.network_check.own_softmaxes import LogSoftmax as _AlongOneAxis
from schedsearch.typed import Array

_OPSET = 11  # the last one that changed them before 13


def _rows(x: Array, axis: int) -> Array:
    before = x.shape[: axis if axis >= 0 else axis + x.ndim]
    return x.reshape(math.prod(before), math.prod(x.shape[len(before) :]))


class Softmax(OpRun):  # type: ignore[misc]
    op_domain, op_schema = "", defs.get_schema("Softmax", _OPSET)

    def _run(self, x: Array, axis: int = 1) -> tuple[Array]:
        wide = _rows(x, axis).astype(np.float64)
        exps = np.exp(wide - wide.max(axis=1, keepdims=True))
        return ((exps / exps.sum(axis=1, keepdims=True)).astype(x.dtype).reshape(x.shape),)


class LogSoftmax(_AlongOneAxis):
    op_schema = defs.get_schema("LogSoftmax", _OPSET)

    def _run(self, x: Array, axis: int = 1) -> tuple[Array]:
        (y,) = super()._run(_rows(x, axis), 1)
        return (y.reshape(x.shape),)


class Hardmax(OpRun):  # type: ignore[misc]
    op_domain, op_schema = "", defs.get_schema("Hardmax", _OPSET)

    def _run(self, x: Array, axis: int = 1) -> tuple[Array]:
        rows = _rows(x, axis)
        y = np.arange(rows.shape[1]) == rows.argmax(axis=1)[:, None]
        return (y.astype(x.dtype).reshape(x.shape),)


ALL: tuple[type[OpRun], ...] = (Softmax, LogSoftmax, Hardmax)
