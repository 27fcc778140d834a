"""The reference of recurrent in NumPy, step by step in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from schedsearch.ops.recurrent import Activation, RecurrentParams
from schedsearch.templates.parts.whole_reference import WholeReference
from schedsearch.workload import Workload

Array = np.ndarray[Any, np.dtype[Any]]


class RecurrentReference(WholeReference[RecurrentParams]):
    def compute(self, workload: Workload[RecurrentParams], arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        p = workload.params
        given = {
            name: np.asarray(array, np.int64 if name == "sequence_lens" else np.float64) for name, array in arrays.items()
        }
        gates = given["gates"].swapaxes(0, 1) if p.batch_first else given["gates"]
        gates = gates.reshape(p.t, p.n, p.directions, p.gates, p.hidden)
        lens = np.clip(given.get("sequence_lens", np.full(p.n, p.t)), 0, p.t)
        y = np.zeros((p.t, p.directions, p.n, p.hidden))
        states = []
        for place, backwards in enumerate({"forward": (False,), "reverse": (True,)}.get(p.direction, (False, True))):
            h, c = (_state(p, given, name, place) for name in ("initial_h", "initial_c"))
            step = _steps(p, given, place)
            for s in range(p.t):
                row = np.flatnonzero(s < lens)
                at = lens[row] - 1 - s if backwards else np.full(len(row), s)
                h[row], c[row] = step(gates[at, row, place], h[row], c[row])
                y[at, place, row] = h[row]
            h[lens == 0], c[lens == 0] = 0, 0
            states.append((h, c))
        y_h, y_c = (np.stack(each, 1 if p.batch_first else 0) for each in zip(*states))
        found = {"y": y.transpose(2, 0, 1, 3) if p.batch_first else y, "y_h": y_h, "y_c": y_c}
        return {spec.name: found[spec.name] for spec in workload.outputs}


def _state(p: RecurrentParams, given: Mapping[str, Array], name: str, direction: int) -> Array:
    if name not in given:
        return np.zeros((p.n, p.hidden))
    return np.array(given[name][:, direction] if p.batch_first else given[name][direction])


def _steps(p: RecurrentParams, given: Mapping[str, Array], direction: int) -> Callable[[Array, Array, Array], Any]:
    """step(gates, h, c) -> the next h and c, for some rows."""
    r = given["r"][direction].reshape(p.gates, p.hidden, p.hidden)
    clips = (p.clip, p.clip, 0.0)  # the state of lstm is not limited
    functions = [_limited(each, clip) for each, clip in zip(p.functions(direction), clips)]

    def rnn(gates: Array, h: Array, c: Array) -> Any:
        return functions[0](gates[:, 0] + h @ r[0].T), c

    def gru(gates: Array, h: Array, c: Array) -> Any:
        z, reset = (functions[0](gates[:, gate] + h @ r[gate].T) for gate in (0, 1))
        if p.linear_before_reset:
            bias = given["bias"][direction] if "bias" in given else 0.0
            new = functions[1](gates[:, 2] + reset * (h @ r[2].T + bias))
        else:
            new = functions[1](gates[:, 2] + (reset * h) @ r[2].T)
        return (1 - z) * new + z * h, c

    def lstm(gates: Array, h: Array, c: Array) -> Any:
        i, o, f, g = (gates[:, gate] + h @ r[gate].T for gate in range(4))
        p_i, p_o, p_f = given["peepholes"][direction].reshape(3, -1) if "peepholes" in given else (0.0, 0.0, 0.0)
        i = functions[0](i + p_i * c)
        f = 1 - i if p.input_forget else functions[0](f + p_f * c)
        c = f * c + i * functions[1](g)
        return functions[0](o + p_o * c) * functions[2](c), c

    return {"rnn": rnn, "gru": gru, "lstm": lstm}[p.cell]


def _limited(activation: Activation, clip: float) -> Callable[[Array], Array]:
    name, alpha, beta = activation
    function: Mapping[str, Callable[[Array], Array]] = {
        "sigmoid": lambda x: 0.5 + 0.5 * np.tanh(0.5 * x),
        "tanh": np.tanh,
        "relu": lambda x: np.maximum(x, 0),
        "softsign": lambda x: x / (1 + np.abs(x)),
        "softplus": lambda x: np.logaddexp(0, x),
        "affine": lambda x: alpha * x + beta,
        "leaky_relu": lambda x: np.where(x < 0, alpha * x, x),
        "thresholded_relu": lambda x: np.where(x >= alpha, x, 0),
        "scaled_tanh": lambda x: alpha * np.tanh(beta * x),
        "hard_sigmoid": lambda x: np.clip(alpha * x + beta, 0, 1),
        "elu": lambda x: np.where(x < 0, alpha * np.expm1(np.minimum(x, 0)), x),
    }
    return lambda x: function[name](np.clip(x, -clip, clip) if clip else x)
