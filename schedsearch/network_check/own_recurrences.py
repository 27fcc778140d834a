"""LSTM, GRU and RNN after ONNX's definitions: onnx's reference evaluator (1.23) knows neither lengths of sequences nor other
activations than the usual ones, and ignores clip, input_forget and linear_before_reset of some directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

from schedsearch.typed import Array

_LIMIT = 700.0  # of exponents in float64
_Function = Callable[[Array], Array]


def _function(name: str, alpha: float | None, beta: float | None) -> _Function:
    """An activation; None stands for ONNX's default."""

    def given(number: float | None, default: float) -> float:
        return default if number is None else number

    kind = name.lower()
    if kind == "sigmoid":
        return lambda x: 1 / (1 + np.exp(-np.clip(x, -_LIMIT, _LIMIT)))
    if kind == "tanh":
        return np.tanh
    if kind == "relu":
        return lambda x: np.maximum(x, 0)
    if kind == "softsign":
        return lambda x: x / (1 + np.abs(x))
    if kind == "softplus":
        return lambda x: np.logaddexp(x, 0)
    if kind == "affine":
        return lambda x: given(alpha, 1.0) * x + given(beta, 0.0)
    if kind == "leakyrelu":
        return lambda x: np.where(x < 0, given(alpha, 0.01) * x, x)
    if kind == "thresholdedrelu":
        return lambda x: np.where(x >= given(alpha, 1.0), x, 0)
    if kind == "scaledtanh":
        return lambda x: given(alpha, 1.0) * np.tanh(given(beta, 1.0) * x)
    if kind == "hardsigmoid":
        return lambda x: np.clip(given(alpha, 0.2) * x + given(beta, 0.5), 0, 1)
    if kind == "elu":
        return lambda x: np.where(x < 0, given(alpha, 1.0) * np.expm1(np.minimum(x, 0)), x)
    raise NotImplementedError(f"the activation {name}")


_TAKE = {
    "alpha": ("affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu"),
    "beta": ("affine", "scaledtanh", "hardsigmoid"),
}


def _functions(names: Sequence[str], alpha: Sequence[float] | None, beta: Sequence[float] | None) -> list[_Function]:
    """Activations; each takes the next of the numbers, if it has one."""
    left = {"alpha": list(alpha or ()), "beta": list(beta or ())}

    def number(which: str, name: str) -> float | None:
        return left[which].pop(0) if name.lower() in _TAKE[which] and left[which] else None

    return [_function(name, number("alpha", name), number("beta", name)) for name in names]


class _Recurrent(OpRun):  # type: ignore[misc]
    """What the three have in common. `step(gates of x, h, c, r, bias of h, peepholes, functions)` gives the next h and c."""

    op_domain = ""
    usual: Sequence[str]

    def _run(
        self,
        x: Array,
        w: Array,
        r: Array,
        b: Array | None = None,
        sequence_lens: Array | None = None,
        *states: Array | None,
        **read: Any,
    ) -> tuple[Array, ...]:
        """`states` are the first h, the first c and the peepholes."""
        h, c, p = (*states, None, None, None)[:3]
        rows_first = bool(read.get("layout") or 0)
        if rows_first:
            x, h, c = (None if each is None else each.swapaxes(0, 1) for each in (x, h, c))  # type: ignore[assignment]
        assert x is not None
        (steps, rows, _), (directions, gates, hidden) = x.shape, r.shape
        lens = np.full(rows, steps) if sequence_lens is None else sequence_lens
        names = [*(read.get("activations") or list(self.usual) * directions)]
        functions = _functions(names, read.get("activation_alpha"), read.get("activation_beta"))
        count, backwards = len(functions) // directions, read.get("direction") or "forward"
        y = np.zeros((steps, directions, rows, hidden), x.dtype)
        last = np.zeros((2, directions, rows, hidden))
        for d in range(directions):
            bias = np.zeros(2 * gates) if b is None else b[d].astype(np.float64)
            peepholes = np.zeros(3 * hidden) if p is None else p[d].astype(np.float64)
            of_x = x.astype(np.float64) @ w[d].T.astype(np.float64) + bias[:gates]
            own = functions[d * count : (d + 1) * count]
            for row in range(rows):
                order = range(int(lens[row]))
                h_row, c_row = (np.zeros(hidden) if each is None else each[d, row].astype(np.float64) for each in (h, c))
                for at in reversed(order) if backwards == "reverse" or d == 1 else order:
                    h_row, c_row = self.step(
                        of_x[at, row], h_row, c_row, r[d].astype(np.float64), bias[gates:], peepholes, own, read
                    )
                    y[at, d, row] = h_row
                if len(order):
                    last[:, d, row] = h_row, c_row
        found = [y, *last.astype(x.dtype)]
        if rows_first:
            found = [y.transpose(2, 0, 1, 3), *(each.swapaxes(0, 1) for each in found[1:])]
        return tuple(found[: len(self.onnx_node.output)])

    def step(
        self, x: Array, h: Array, c: Array, r: Array, bias: Array, p: Array, functions: list[_Function], read: Any
    ) -> list[Array]:
        raise NotImplementedError

    @staticmethod
    def limited(sums: Array, read: Any) -> Array:
        return np.clip(sums, -read["clip"], read["clip"]) if read.get("clip") else sums


class RNN(_Recurrent):
    usual = ("Tanh",)

    def step(
        self, x: Array, h: Array, c: Array, r: Array, bias: Array, p: Array, functions: list[_Function], read: Any
    ) -> list[Array]:
        return [functions[0](self.limited(x + r @ h + bias, read)), c]


class GRU(_Recurrent):
    usual = ("Sigmoid", "Tanh")

    def step(
        self, x: Array, h: Array, c: Array, r: Array, bias: Array, p: Array, functions: list[_Function], read: Any
    ) -> list[Array]:
        (x_z, x_r, x_h), (r_z, r_r, r_h), (b_z, b_r, b_h) = (np.split(each, 3) for each in (x, r, bias))
        z = functions[0](self.limited(x_z + r_z @ h + b_z, read))
        reset = functions[0](self.limited(x_r + r_r @ h + b_r, read))
        linear = read.get("linear_before_reset")
        inner = reset * (r_h @ h + b_h) if linear else r_h @ (reset * h) + b_h
        return [(1 - z) * functions[1](self.limited(x_h + inner, read)) + z * h, c]


class LSTM(_Recurrent):
    usual = ("Sigmoid", "Tanh", "Tanh")

    def step(
        self, x: Array, h: Array, c: Array, r: Array, bias: Array, p: Array, functions: list[_Function], read: Any
    ) -> list[Array]:
        """As in ONNX Runtime, the state is not limited before its activation."""
        i, o, f, g = np.split(x + r @ h + bias, 4)
        p_i, p_o, p_f = np.split(p, 3)
        i = functions[0](self.limited(i + p_i * c, read))
        f = 1 - i if read.get("input_forget") else functions[0](self.limited(f + p_f * c, read))
        c = f * c + i * functions[1](self.limited(g, read))
        return [functions[0](self.limited(o + p_o * c, read)) * functions[2](c), c]
