"""The reference of causal_conv1d_update in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from schedsearch.launch import Param, Pointer
from schedsearch.ops.causal_conv1d_update import CausalConv1dUpdateParams
from schedsearch.target import Target
from schedsearch.template import KernelSource, Reference, magnitude_of
from schedsearch.templates.parts.reference import gather, reader, reference_step, sharer, writer
from schedsearch.workload import Workload

_ACTIVATION = 4.0


class CausalConv1dUpdateReference(Reference[CausalConv1dUpdateParams]):
    """An item is a channel of a row of x, or of a state. It first copies states that no row continues."""

    def kernel(self, workload: Workload[CausalConv1dUpdateParams], target: Target) -> KernelSource:
        p = workload.params
        read, read_weight, read_int = reader(target, p.dtype), reader(target, p.weight_dtype), reader(target, "int32")
        write, items = writer(target), sharer(target)
        batch, channels, steps, taps, length, rows = p.n, p.c, p.t, p.taps, p.length, p.rows
        has_indices, ring, has_bias, silu = p.indices, p.positions, p.bias, p.silu
        of_t, of_c = (channels, 1) if p.layout == "NTC" else (1, steps)
        of_n = channels * steps

        def update(
            x: Any, weight: Any, bias: Any, before: Any, indices: Any, positions: Any,
            y: Any, y_bound: Any, state: Any, state_bound: Any, start: Any, stop: Any,
        ) -> None:  # fmt: skip
            for item in items(start, stop):
                c, row = item % channels, item // channels
                n = row
                if has_indices:
                    n = -1
                    for other in range(batch):
                        if read_int(indices, other) == row:
                            n = other
                base = (row * channels + c) * length
                position = read_int(positions, n) if ring and n >= 0 else 0
                for i in range(length):
                    source, new = i, 0
                    if n >= 0 and ring:
                        for s in range(steps):
                            if (position + s) % length == i:
                                source, new = s, 1
                    elif n >= 0:
                        source = i + steps
                        if source >= length:
                            source, new = source - length, 1
                    value = read(x, n * of_n + source * of_t + c * of_c) if new else read(before, base + source)
                    write(state, base + i, value)
                    write(state_bound, base + i, 0.0)
                if n >= 0:
                    for t in range(steps):
                        total = read_weight(bias, c) if has_bias else 0.0
                        bound = abs(total)
                        for k in range(taps):
                            s = t - taps + 1 + k
                            if s >= 0:
                                value = read(x, n * of_n + s * of_t + c * of_c)
                            elif ring:
                                value = read(before, base + (position + s + length * taps) % length)
                            else:
                                value = read(before, base + length + s)
                            term = value * read_weight(weight, c * taps + k)
                            total += term
                            bound += abs(term)
                        if silu:
                            total = total * (0.5 + 0.5 * math.tanh(0.5 * total))
                        write(y, n * of_n + t * of_t + c * of_c, total)
                        write(y_bound, n * of_n + t * of_t + c * of_c, _ACTIVATION * bound + 8.0 * abs(total) / taps)

        names = ("x", "weight", "bias", "state_before", "indices", "positions")
        params: list[Param] = [Pointer(name, optional=True) for name in names]
        for name in ("y", "state"):
            params += [Pointer(name), Pointer(magnitude_of(name))]
        return KernelSource(target.kind, "native", (reference_step(target, update, params, rows * channels),))

    def points(
        self,
        workload: Workload[CausalConv1dUpdateParams],
        arrays: Mapping[str, Any],
        scalars: Mapping[str, float],
        flat_indices: Any,
        output: str = "y",
    ) -> np.ndarray[Any, np.dtype[Any]]:
        p, specs = workload.params, {spec.name: spec for spec in workload.signature}
        spec = next(each for each in workload.outputs if each.name == output)
        places = dict(zip(spec.axes, np.unravel_index(np.asarray(flat_indices, np.int64), spec.shape)))
        rows = np.asarray(arrays["indices"]).reshape(-1) if p.indices else np.arange(p.n)
        positions = np.asarray(arrays["positions"]).reshape(-1) if p.positions else np.zeros(p.n, np.int64)
        found = []
        for first, c, t in zip(places["N"], places["C"], places["T"]):
            n = first if output == "y" else int(np.argmax(rows == first)) if (rows == first).any() else -1
            row = rows[first] if output == "y" else first
            if output == "y" and not 0 <= row < p.rows:
                found.append(0.0)
                continue
            state = gather(
                arrays, specs["state_before"], (np.full(p.length, row), np.full(p.length, c), np.arange(p.length))
            )
            if n < 0:
                found.append(state[t])
                continue
            steps = np.arange(p.t)
            where = (
                (np.full(p.t, n), steps, np.full(p.t, c)) if p.layout == "NTC" else (np.full(p.t, n), np.full(p.t, c), steps)
            )
            new, position = gather(arrays, specs["x"], where), int(positions[n])
            if p.positions:
                state = np.roll(state, -(position % p.length))  # the oldest input first
            inputs = np.concatenate([state, new])
            if output == "y":
                taps = gather(arrays, specs["weight"], (np.full(p.taps, c), np.arange(p.taps)))
                end = p.length + t + 1
                z = float((inputs[end - p.taps : end] * taps).sum())
                z += float(gather(arrays, specs["bias"], np.array([c]))[0]) if p.bias else 0.0
                found.append(z * (0.5 + 0.5 * np.tanh(0.5 * z)) if p.silu else z)
            else:
                last = inputs[-p.length :]
                found.append(np.roll(last, (position + p.t) % p.length)[t] if p.positions else last[t])
        return np.array(found)
