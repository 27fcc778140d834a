"""causal_conv1d_update: the next steps of causal depthwise convolutions over time, with states that are updated in place.

A state has the last inputs of a sequence, `length` of them or more than that are needed. With s counted from the first new
step, an input of s >= 0 is x[n,s,c], and one of s < 0 is that many steps before::

    y[n,t,c] = epilogue(sum over k of input[s = t - (taps - 1) + k] * weight[c,k])

- A state moves along: afterwards it has the last `length` inputs, the newest at its end.
- With `positions` a state is a ring: the input of step s is at (positions[n] + s) modulo `length`, and stays there.
- With `indices` row n continues the state indices[n], of `rows` states. A row whose index is below 0 or too large has y = 0
  and changes nothing. Two rows must not have the same index.

Arguments: x, weight (c, taps), then bias if there is one, state_before (rows, c, length), indices (n) and positions (n),
int32, if there are any. Outputs: y, and state, which may be the memory of state_before. Axes and formats are those of
`depthwise_conv1d`. There are no gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.base import Op
from schedsearch.ops.checks import Domain
from schedsearch.ops.data_movement import too_large
from schedsearch.ops.depthwise_conv1d import DTYPES, LAYOUTS, MOST_STATE, MOST_TAPS, STAGES
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.epilogues import epilogue_parameter, parse_epilogue
from schedsearch.ops.params import Parameter, Params, declared, frozen, judge
from schedsearch.ops.specs import ArgSpec, Work
from schedsearch.ops.stages import Stage
from schedsearch.typed import GivenParams, ParamsByName

_MOST_POSITION = 1 << 30


@dataclass(frozen=True, eq=False, kw_only=True)
class CausalConv1dUpdateParams(Params):
    """See `causal_conv1d_update`."""

    n: int = declared(Parameter.count("batch"))
    c: int = declared(Parameter.count("channels"))
    t: int = declared(Parameter.count("new steps"))
    taps: int = declared(
        Parameter("weights of a channel", {"type": "integer", "minimum": 1, "maximum": MOST_TAPS}, size=True)
    )
    length: int = declared(
        Parameter(
            "inputs of a state, at least taps - 1", {"type": "integer", "minimum": 1, "maximum": MOST_STATE}, size=True
        )
    )
    rows: int = declared(
        Parameter("states; default n", {"type": "integer", "minimum": 1, "maximum": (1 << 31) - 1}, size=True)
    )
    indices: bool = declared(
        Parameter("an argument says which state a row continues; default false", {"type": "boolean", "default": False})
    )
    positions: bool = declared(
        Parameter(
            "states are rings, and an argument has how many inputs each row had; default false",
            {"type": "boolean", "default": False},
        )
    )
    dtype: str = declared(Parameter.choice("of x, y and states; default float16", DTYPES))
    weight_dtype: str = declared(Parameter("of weight and bias; default: dtype", {"enum": list(DTYPES)}))
    layout: str = declared(Parameter.choice("axes of x and y in memory; default NTC", LAYOUTS))
    epilogue: tuple[Stage, ...] = declared(epilogue_parameter(STAGES))

    @property
    def bias(self) -> bool:
        return any(stage.name == "bias" for stage in self.epilogue)

    @property
    def silu(self) -> bool:
        return any(stage.name == "silu" for stage in self.epilogue)


class CausalConv1dUpdate(Op[CausalConv1dUpdateParams]):
    params_type: ClassVar[type[Params]] = CausalConv1dUpdateParams
    name: ClassVar[str] = "causal_conv1d_update"
    reference: ClassVar[str] = "schedsearch.templates.depthwise_conv1d.update_reference:CausalConv1dUpdateReference"
    constructor: ClassVar[str] = "schedsearch:causal_conv1d_update"

    def defaults(self, params: GivenParams) -> ParamsByName:
        return {
            "rows": params.get("n", 1),
            "indices": False,
            "positions": False,
            "dtype": "float16",
            "weight_dtype": params.get("dtype", "float16"),
            "layout": "NTC",
            "epilogue": (),
        }

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        params, out, problems = self.completed(params)
        known = self.parameters()
        names = [name for name in known if name in params and name != "epilogue"]
        problems += [Problem(name, f"{name} {why}") for name in names if (why := judge(out[name], known[name].schema))]
        stages, wrong = parse_epilogue(out["epilogue"], STAGES)
        out = {name: frozen(value) for name, value in out.items() if name != "epilogue"} | {"epilogue": stages}
        problems += wrong
        if not problems:
            problems += self.problems(self.typed(out))
        return out, problems

    def problems(self, params: CausalConv1dUpdateParams) -> Iterable[Problem]:
        p, found = params, []
        if [stage.name for stage in p.epilogue] == ["silu", "bias"]:
            found.append(Problem("epilogue", "epilogue is [silu, bias]; allowed: bias, silu, or [bias, silu]"))
        if p.length < p.taps - 1:
            found.append(Problem("length", f"length is {p.length}, but {p.taps} taps need the last {p.taps - 1} inputs"))
        if p.rows != p.n and not p.indices:
            found.append(Problem("rows", f"rows is {p.rows} and n is {p.n}; allowed without indices: as many"))
        if p.rows < p.n:
            found.append(Problem("rows", f"rows is {p.rows}, but each of {p.n} rows of x continues a state of its own"))
        return found or too_large("state", (p.rows, p.c, p.length), dtype_of(p.dtype).nbytes)

    def arguments(self, params: CausalConv1dUpdateParams) -> tuple[ArgSpec, ...]:
        p = params
        found = [self._sequence(p, "x"), ArgSpec("weight", "CK", (p.c, p.taps), p.weight_dtype, constant=True)]
        found += [ArgSpec("bias", "C", (p.c,), p.weight_dtype, constant=True)] if p.bias else []
        found.append(ArgSpec("state_before", "NCT", (p.rows, p.c, p.length), p.dtype, aliases="state"))
        found += [ArgSpec("indices", "N", (p.n,), "int32", "index", below=p.rows)] if p.indices else []
        found += [ArgSpec("positions", "N", (p.n,), "int32", "index", below=_MOST_POSITION)] if p.positions else []
        return tuple(found)

    def outputs(self, params: CausalConv1dUpdateParams) -> tuple[ArgSpec, ...]:
        p = params
        return self._sequence(p, "y"), ArgSpec("state", "NCT", (p.rows, p.c, p.length), p.dtype)

    def _sequence(self, p: CausalConv1dUpdateParams, name: str) -> ArgSpec:
        return ArgSpec(name, p.layout, (p.n, p.t, p.c) if p.layout == "NTC" else (p.n, p.c, p.t), p.dtype)

    def work(self, params: CausalConv1dUpdateParams) -> Work:
        """Where there are more states than rows, the others stay where they are if memory is shared."""
        p = params
        element = dtype_of(p.dtype).nbytes
        moved = 2 * p.n * p.c * (p.t + p.length) * element + p.c * (p.taps + p.bias) * dtype_of(p.weight_dtype).nbytes
        return Work(2 * p.n * p.t * p.c * p.taps, moved, p.taps)

    def exact_step(self, params: CausalConv1dUpdateParams) -> float | None:
        return None

    def check_inputs(self, params: CausalConv1dUpdateParams) -> Mapping[str, Domain]:
        p = params
        near = Domain(tuple(number / 4 for number in range(-8, 9)))
        shrink = 2.0 ** -round(math.log2(p.taps) / 2)
        found = dict.fromkeys(("x", "bias", "state_before"), near)
        found["weight"] = Domain(tuple(number / 4 * shrink for number in range(-6, 7)))
        found["indices"] = Domain(tuple(range(p.rows - 1, p.rows - 1 - p.n, -1)), ordered=True)
        found["positions"] = Domain(range(1000))
        return {spec.name: found[spec.name] for spec in self.arguments(p)}

    def timing_inputs(self, params: CausalConv1dUpdateParams) -> Mapping[str, Domain]:
        """States of their own."""
        return {"indices": Domain(tuple(range(params.n)), ordered=True)} if params.indices else {}

    def label(self, params: CausalConv1dUpdateParams) -> str:
        p = params
        words = [f"causal_conv1d_update {p.n}x{p.t}x{p.c} k{p.taps} of {p.rows}x{p.length}"]
        formats = {dtype_of(p.dtype).short: 0, dtype_of(p.weight_dtype).short: 0}
        words += ["x".join(formats), p.layout, *(name for name in ("indices", "positions") if p[name])]
        return " ".join(words) + "".join(f"+{stage}" for stage in p.epilogue)


CAUSAL_CONV1D_UPDATE = CausalConv1dUpdate()
