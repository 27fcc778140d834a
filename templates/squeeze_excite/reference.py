"""The reference of squeeze_excite in NumPy, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from schedsearch.ops.squeeze_excite import SqueezeExciteParams
from schedsearch.templates.parts.whole_reference import WholeReference
from schedsearch.workload import Workload

Array = np.ndarray[Any, np.dtype[Any]]


class SqueezeExciteReference(WholeReference[SqueezeExciteParams]):
    def compute(self, workload: Workload[SqueezeExciteParams], arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        p = workload.params
        given = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
        pixels = (1, 2) if p.layout == "NHWC" else (2, 3)
        squeezed = _activated(p, given["x"].mean(axis=pixels) @ given["reduce"].T + given["reduce_bias"])
        gates = _gate(p, squeezed @ given["expand"] + given["expand_bias"])
        return {"y": given["x"] * np.expand_dims(gates, pixels)}


def _activated(p: SqueezeExciteParams, t: Array) -> Array:
    if p.activation == "relu":
        return np.maximum(t, 0)
    return t * (_sigmoid(t) if p.activation == "silu" else np.clip(t / 6 + 0.5, 0, 1))


def _gate(p: SqueezeExciteParams, t: Array) -> Array:
    return _sigmoid(t) if p.gate == "sigmoid" else np.clip(p.alpha * t + p.beta, 0, 1)


def _sigmoid(t: Array) -> Array:
    return 0.5 + 0.5 * np.tanh(0.5 * t)
