"""The reference of depthwise_conv1d in float64: each element on its own, by the definition."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from schedsearch.launch import Param, Pointer
from schedsearch.ops.depthwise_conv1d import DepthwiseConv1dParams
from schedsearch.target import Target
from schedsearch.template import KernelSource, Reference, magnitude_of
from schedsearch.templates.parts.reference import gather, reader, reference_step, sharer, writer
from schedsearch.workload import Workload

_FUNCTION = 8.0  # roundoffs of float32 of an activation or its derivative


class DepthwiseConv1dReference(Reference[DepthwiseConv1dParams]):
    """Bounds of errors count roundoffs of float32: those of a sum in any order, and those of z where an activation follows.
    They are divided by the workload's reduction, by which they will be multiplied."""

    def kernel(self, workload: Workload[DepthwiseConv1dParams], target: Target) -> KernelSource:
        p = workload.params
        names = ("x", "weight", "bias", "dy", "initial_state", "d_final_state", "seq_idx")
        params: list[Param] = [Pointer(name, optional=True) for name in names]
        outputs: tuple[str, ...]
        if p.forward:
            outputs = ("y", "final_state")
            items = p.n * p.c * max(p.steps, p.reach if p.final_state else 0)
            function = _forward(workload, target)
        else:
            outputs = ("dx", "dw", "db", "d_initial_state")
            items = p.n * p.c * (p.t + p.reach) + p.c * (p.taps + 1)
            function = _backward(workload, target)
        for name in outputs:
            params += [Pointer(name, optional=True), Pointer(magnitude_of(name), optional=True)]
        return KernelSource(target.kind, "native", (reference_step(target, function, params, items),))

    def points(
        self,
        workload: Workload[DepthwiseConv1dParams],
        arrays: Mapping[str, Any],
        scalars: Mapping[str, float],
        flat_indices: Any,
        output: str = "y",
    ) -> np.ndarray[Any, np.dtype[Any]]:
        spec = next(each for each in workload.outputs if each.name == output)
        places = np.unravel_index(np.asarray(flat_indices, np.int64), spec.shape)
        points = _Points(workload, arrays)
        axes = dict(zip(spec.axes, places))
        if output == "y":
            return np.asarray(points.y(axes["N"], axes["C"], axes["T"]))
        p = workload.params
        if output == "final_state":
            return np.asarray(points.x(axes["N"], axes["C"], axes["T"] + p.t - p.reach))
        if output in ("dx", "d_initial_state"):
            shift = p.reach if output == "d_initial_state" else 0
            return np.asarray(points.dx(axes["N"], axes["C"], axes["T"] - shift))
        taps = axes.get("K", np.full(len(axes["C"]), -1))
        return np.array([points.dw(c, k) for c, k in zip(axes["C"], taps)])


def _spans(p: DepthwiseConv1dParams, steps: int) -> tuple[int, int, int]:
    """Elements from batch to batch, step to step, channel to channel."""
    return (steps * p.c, p.c, 1) if p.layout == "NTC" else (steps * p.c, 1, steps)


def _input(p: DepthwiseConv1dParams, target: Target) -> Callable[..., Any]:
    """`value(x, initial, n, c, t)`: x, what came before it, or zero."""
    read, (of_n, of_t, of_c) = reader(target, p.dtype), _spans(p, p.t)
    steps, reach, channels, has_state = p.t, p.reach, p.c, p.initial_state

    def value(x: Any, initial: Any, n: Any, c: Any, t: Any) -> Any:
        if t >= 0 and t < steps:
            return read(x, n * of_n + t * of_t + c * of_c)
        if has_state and t < 0:
            return read(initial, (n * channels + c) * reach + t + reach)
        return 0.0

    return value


def _together(p: DepthwiseConv1dParams, target: Target) -> Callable[..., Any]:
    """`together(seq_idx, n, s, t)`: whether two steps belong to one sequence."""
    read, steps, has = reader(target, "int32"), p.t, p.seq_idx

    def together(seq: Any, n: Any, s: Any, t: Any) -> Any:
        if has and s >= 0:
            return read(seq, n * steps + s) == read(seq, n * steps + t)
        return True

    return together


def _sums(p: DepthwiseConv1dParams, target: Target) -> Callable[..., Any]:
    """`z(x, weight, bias, initial, seq, n, c, t)`: the sum with its bias, and the sum of magnitudes."""
    value, together, read = _input(p, target), _together(p, target), reader(target, p.weight_dtype)
    taps, dilation, left, has_bias = p.taps, p.dilation, p.padding[0], p.bias

    def z(x: Any, weight: Any, bias: Any, initial: Any, seq: Any, n: Any, c: Any, t: Any) -> Any:
        total, bound = 0.0, 0.0
        if has_bias:
            total = read(bias, c)
            bound = abs(total)
        for k in range(taps):
            s = t - left + k * dilation
            if together(seq, n, s, t):
                term = value(x, initial, n, c, s) * read(weight, c * taps + k)
                total += term
                bound += abs(term)
        return total, bound

    return z


def _forward(workload: Workload[DepthwiseConv1dParams], target: Target) -> Callable[..., None]:
    p = workload.params
    write, items, z, value = writer(target), sharer(target), _sums(p, target), _input(p, target)
    steps, channels, silu, has_state, reach, t_in = p.steps, p.c, p.silu, p.final_state, p.reach, p.t
    of_n, of_t, of_c = _spans(p, p.steps)
    longest = max(steps, reach if has_state else 0)

    def forward(
        x: Any, weight: Any, bias: Any, dy: Any, initial: Any, d_final: Any, seq: Any,
        y: Any, y_bound: Any, final: Any, final_bound: Any, start: Any, stop: Any,
    ) -> None:  # fmt: skip
        for item in items(start, stop):
            t = item % longest
            c = item // longest % channels
            n = item // longest // channels
            if t < steps:
                total, bound = z(x, weight, bias, initial, seq, n, c, t)
                if silu:
                    total, bound = total * (0.5 + 0.5 * math.tanh(0.5 * total)), 4.0 * bound
                at = n * of_n + t * of_t + c * of_c
                write(y, at, total)
                write(y_bound, at, bound)
            if has_state and t < reach:
                at = (n * channels + c) * reach + t
                write(final, at, value(x, initial, n, c, t_in - reach + t))
                write(final_bound, at, 0.0)

    return forward


def _gradient_of_sums(p: DepthwiseConv1dParams, target: Target) -> Callable[..., Any]:
    """`dz(x, weight, bias, initial, seq, dy, n, c, t)`, and roundoffs that it may have by an activation."""
    z, read, silu, (of_n, of_t, of_c) = _sums(p, target), reader(target, p.dtype), p.silu, _spans(p, p.steps)
    additions = float(p.taps)

    def dz(x: Any, weight: Any, bias: Any, initial: Any, seq: Any, dy: Any, n: Any, c: Any, t: Any) -> Any:
        given = read(dy, n * of_n + t * of_t + c * of_c)
        if silu:
            total, bound = z(x, weight, bias, initial, seq, n, c, t)
            gate = 0.5 + 0.5 * math.tanh(0.5 * total)
            return given * gate * (1.0 + total * (1.0 - gate)), abs(given) * (additions + _FUNCTION) * (bound + 4.0)
        return given, 0.0

    return dz


def _backward(workload: Workload[DepthwiseConv1dParams], target: Target) -> Callable[..., None]:
    p = workload.params
    write, items, value, together = writer(target), sharer(target), _input(p, target), _together(p, target)
    dz, read, read_state = _gradient_of_sums(p, target), reader(target, p.weight_dtype), reader(target, p.dtype)
    t_in, steps, channels, batch, taps, dilation, left = p.t, p.steps, p.c, p.n, p.taps, p.dilation, p.padding[0]
    reach, has_final, has_initial, has_bias = p.reach, p.final_state, p.initial_state, p.bias
    (of_n, of_t, of_c), reduction = _spans(p, p.t), float(workload.work.reduction)
    long, of_x, length = float(p.n * p.steps), p.n * p.c * (p.t + p.reach), p.t + p.reach

    def backward(
        x: Any, weight: Any, bias: Any, dy: Any, initial: Any, d_final: Any, seq: Any,
        dx: Any, dx_bound: Any, dw: Any, dw_bound: Any, db: Any, db_bound: Any, d_initial: Any, d_initial_bound: Any,
        start: Any, stop: Any,
    ) -> None:  # fmt: skip
        for item in items(start, stop):
            total, bound = 0.0, 0.0
            if item < of_x:
                s = item % length - reach
                c = item // length % channels
                n = item // length // channels
                if s >= 0 or has_initial:
                    for k in range(taps):
                        t = s + left - k * dilation
                        if t >= 0 and t < steps and together(seq, n, s, t):
                            found, errors = dz(x, weight, bias, initial, seq, dy, n, c, t)
                            factor = read(weight, c * taps + k)
                            total += found * factor
                            bound += abs(factor) * (abs(found) * taps + errors)
                    if has_final and s >= t_in - reach:
                        found = read_state(d_final, (n * channels + c) * reach + s - (t_in - reach))
                        total += found
                        bound += abs(found) * taps
                    if s >= 0:
                        write(dx, n * of_n + s * of_t + c * of_c, total)
                        write(dx_bound, n * of_n + s * of_t + c * of_c, bound / reduction)
                    else:
                        write(d_initial, (n * channels + c) * reach + s + reach, total)
                        write(d_initial_bound, (n * channels + c) * reach + s + reach, bound / reduction)
            else:
                k = (item - of_x) % (taps + 1)
                c = (item - of_x) // (taps + 1)
                if k < taps or has_bias:
                    for n in range(batch):
                        for t in range(steps):
                            s = t - left + k * dilation
                            factor = 1.0
                            if k < taps:
                                factor = value(x, initial, n, c, s) if together(seq, n, s, t) else 0.0
                            if factor != 0.0:
                                found, errors = dz(x, weight, bias, initial, seq, dy, n, c, t)
                                total += found * factor
                                bound += abs(factor) * (abs(found) * long + errors)
                    if k < taps:
                        write(dw, c * taps + k, total)
                        write(dw_bound, c * taps + k, bound / reduction)
                    else:
                        write(db, c, total)
                        write(db_bound, c, bound / reduction)

    return backward


class _Points:
    """The definition in NumPy; indices are arrays of one length."""

    def __init__(self, workload: Workload[DepthwiseConv1dParams], arrays: Mapping[str, Any]) -> None:
        self.p, self.arrays = workload.params, arrays
        self.specs = {spec.name: spec for spec in workload.signature}

    def _sequence(self, name: str, n: Any, c: Any, t: Any) -> Any:
        return gather(self.arrays, self.specs[name], (n, t, c) if self.p.layout == "NTC" else (n, c, t))

    def x(self, n: Any, c: Any, t: Any) -> Any:
        p = self.p
        inside = (t >= 0) & (t < p.t)
        found = np.where(inside, self._sequence("x", n, c, np.clip(t, 0, p.t - 1)), 0.0)
        if p.initial_state:
            before = gather(self.arrays, self.specs["initial_state"], (n, c, np.clip(t + p.reach, 0, p.reach - 1)))
            found = np.where(t < 0, before, found)
        return found

    def _together(self, n: Any, s: Any, t: Any) -> Any:
        p = self.p
        if not p.seq_idx:
            return np.full(len(n), True)
        first, second = (gather(self.arrays, self.specs["seq_idx"], (n, np.clip(step, 0, p.t - 1))) for step in (s, t))
        return (first == second) | (s < 0)

    def _weight(self, c: Any, k: int) -> Any:
        return gather(self.arrays, self.specs["weight"], (c, np.full(len(c), k)))

    def _z(self, n: Any, c: Any, t: Any) -> Any:
        p = self.p
        z = gather(self.arrays, self.specs["bias"], (c,)) if p.bias else np.zeros(len(c))
        for k in range(p.taps):
            s = t - p.padding[0] + k * p.dilation
            z = z + np.where(self._together(n, s, t), self.x(n, c, s), 0.0) * self._weight(c, k)
        return z

    def y(self, n: Any, c: Any, t: Any) -> Any:
        z = self._z(n, c, t)
        return z * _sigmoid(z) if self.p.silu else z

    def _dz(self, n: Any, c: Any, t: Any) -> Any:
        dy = self._sequence("dy", n, c, t)
        if not self.p.silu:
            return dy
        z = self._z(n, c, t)
        gate = _sigmoid(z)
        return dy * gate * (1.0 + z * (1.0 - gate))

    def dx(self, n: Any, c: Any, s: Any) -> Any:
        p, found = self.p, np.zeros(len(n))
        for k in range(p.taps):
            t = s + p.padding[0] - k * p.dilation
            inside = np.clip(t, 0, p.steps - 1)
            term = self._dz(n, c, inside) * self._weight(c, k)
            found += np.where((t == inside) & self._together(n, s, inside), term, 0.0)
        if p.final_state:
            place = s - (p.t - p.reach)
            given = gather(self.arrays, self.specs["d_final_state"], (n, c, np.clip(place, 0, p.reach - 1)))
            found += np.where(place >= 0, given, 0.0)
        return found

    def dw(self, c: int, k: int) -> float:
        """The gradient of a weight; of the bias if k is -1."""
        p = self.p
        n, t = (each.reshape(-1) for each in np.indices((p.n, p.steps)))
        channel = np.full(len(n), c)
        dz = self._dz(n, channel, t)
        if k < 0:
            return float(dz.sum())
        s = t - p.padding[0] + k * p.dilation
        return float((dz * np.where(self._together(n, s, t), self.x(n, channel, s), 0.0)).sum())


def _sigmoid(z: Any) -> Any:
    return 0.5 + 0.5 * np.tanh(0.5 * z)
