"""depthwise_conv1d: a convolution over time that filters each channel on its own, and its gradients.

::

    forward    y[n,t,c] = epilogue(sum over k of x[n, t - left + k * dilation, c] * weight[c,k])
    backward   dz = dy * epilogue'(z), where z is the sum with its bias;
               dx[n,t,c] = sum over k of dz[n, t + left - k * dilation, c] * weight[c,k]
               dw[c,k] = sum over n,t of dz[n,t,c] * x[n, t - left + k * dilation, c]
               db[c] = sum over n,t of dz[n,t,c]

`padding` is (left, right). By default it is causal: left = (taps - 1) * dilation, right = 0, so that y has the length of x
and reads nothing that comes later. A causal convolution may have more:

- `initial_state`: what came before x, (n, c, (taps - 1) * dilation); without it x is zero before its start.
- `final_state`: an output of the same shape, the last inputs of the initial state followed by x. It is the initial state
  of the next piece of the same sequence.
- `seq_idx`: the number of the sequence that each step belongs to, for sequences packed behind one another. A step does not
  see steps of other sequences.

The epilogue is nothing, a bias, silu, or both. Sums are float32; a result is rounded once.

=========  ==================================================================================  ==========================
direction  arguments                                                                           outputs
=========  ==================================================================================  ==========================
forward    x, weight, then bias, initial_state, seq_idx if there are any                       y, final_state
backward   x, weight, bias, dy, initial_state, d_final_state, seq_idx, those that there are    dx, dw, db, d_initial_state
=========  ==================================================================================  ==========================

x, y, dx and dy have the axes of `layout`: NTC (channels are neighbours, as in x.transpose(1, 2) of a block that computes
with (batch, time, channels)), or NCT. `dtype` is theirs and that of states; `weight_dtype` is that of weight, bias, dw and
db. Gradients are deterministic: two calls return the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.base import Op
from schedsearch.ops.checks import FP32_ROUNDOFF, Domain, Rounding, by_role
from schedsearch.ops.data_movement import too_large
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.epilogues import epilogue_parameter, parse_epilogue
from schedsearch.ops.params import MAX_INT, Parameter, Params, declared, frozen, judge
from schedsearch.ops.specs import ArgSpec, Work
from schedsearch.ops.stages import Stage
from schedsearch.typed import GivenParams, ParamsByName

DIRECTIONS = ("forward", "backward")
DTYPES = ("float16", "bfloat16", "float32")
LAYOUTS = ("NTC", "NCT")
STAGES = ("bias", "silu")
MOST_TAPS = 256
MOST_STATE = 1 << 16  # steps
_SIMILAR = 8  # times as many elements
_NO_SEQUENCES = 1 << 30  # more than any seq_idx
# Numbers of sequences for verification: most are long, some have one step. The length is prime, so that rows differ.
_SEQUENCES = tuple(sum(step >= edge for edge in (5, 6, 7, 20, 22, 45, 46, 70)) for step in range(89))


def _flag(doc: str) -> Parameter:
    return Parameter(f"{doc}; default false", {"type": "boolean", "default": False})


@dataclass(frozen=True, eq=False, kw_only=True)
class DepthwiseConv1dParams(Params):
    """See `depthwise_conv1d`."""

    n: int = declared(Parameter.count("batch"))
    c: int = declared(Parameter.count("channels"))
    t: int = declared(Parameter.count("steps in time"))
    taps: int = declared(
        Parameter("weights of a channel", {"type": "integer", "minimum": 1, "maximum": MOST_TAPS}, size=True)
    )
    padding: tuple[int, int] = declared(
        Parameter(
            "steps of zeros before and behind x; default: causal, ((taps - 1) * dilation, 0)",
            {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": MOST_STATE},
                "minItems": 2,
                "maxItems": 2,
            },
        )
    )
    dilation: int = declared(
        Parameter("steps between taps; default 1", {"type": "integer", "minimum": 1, "maximum": MOST_STATE, "default": 1})
    )
    direction: str = declared(Parameter.choice("forward: y; backward: dx, dw, db; default forward", DIRECTIONS))
    dtype: str = declared(Parameter.choice("of x, y and states; default float16", DTYPES))
    weight_dtype: str = declared(Parameter("of weight and bias; default: dtype", {"enum": list(DTYPES)}))
    layout: str = declared(Parameter.choice("axes of x and y in memory; default NTC", LAYOUTS))
    initial_state: bool = declared(_flag("an argument has what came before x"))
    final_state: bool = declared(_flag("an output has the last inputs"))
    seq_idx: bool = declared(_flag("an argument has the number of each step's sequence"))
    epilogue: tuple[Stage, ...] = declared(epilogue_parameter(STAGES))

    @property
    def reach(self) -> int:
        """Steps from the first tap to the last: those of a state."""
        return (self.taps - 1) * self.dilation

    @property
    def steps(self) -> int:
        """Steps of y."""
        return self.t + sum(self.padding) - self.reach

    @property
    def causal(self) -> bool:
        return self.padding == (self.reach, 0)

    @property
    def bias(self) -> bool:
        return any(stage.name == "bias" for stage in self.epilogue)

    @property
    def silu(self) -> bool:
        return any(stage.name == "silu" for stage in self.epilogue)

    @property
    def forward(self) -> bool:
        return self.direction == "forward"


class DepthwiseConv1d(Op[DepthwiseConv1dParams]):
    params_type: ClassVar[type[Params]] = DepthwiseConv1dParams
    name: ClassVar[str] = "depthwise_conv1d"
    reference: ClassVar[str] = "schedsearch.templates.depthwise_conv1d.reference:DepthwiseConv1dReference"
    constructor: ClassVar[str] = "schedsearch:depthwise_conv1d"

    def defaults(self, params: GivenParams) -> ParamsByName:
        taps, dilation = params.get("taps"), params.get("dilation", 1)
        known = type(taps) is int and type(dilation) is int
        return {
            "padding": (max(0, (taps - 1) * dilation), 0) if known else (0, 0),  # type: ignore[operator]
            "dilation": 1,
            "direction": "forward",
            "dtype": "float16",
            "weight_dtype": params.get("dtype", "float16"),
            "layout": "NTC",
            "initial_state": False,
            "final_state": False,
            "seq_idx": False,
            "epilogue": (),
        }

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        params, out, problems = self.completed(params)
        known = self.parameters()
        names = [name for name in known if name in params and name != "epilogue"]
        wrong_dtype = [Problem(name, f"{name} {why}") for name in names if (why := judge(out[name], known[name].schema))]
        problems += wrong_dtype
        out = {name: frozen(value) for name, value in out.items() if name != "epilogue"} | {"epilogue": out["epilogue"]}
        out["epilogue"], wrong = parse_epilogue(out["epilogue"], STAGES)
        problems += wrong
        if not problems:
            problems += self._problems(self.typed(out))
        return out, problems

    def _problems(self, p: DepthwiseConv1dParams) -> list[Problem]:
        found = []
        if [stage.name for stage in p.epilogue] == ["silu", "bias"]:
            found.append(Problem("epilogue", "epilogue is [silu, bias]; allowed: bias, silu, or [bias, silu]"))
        if p.reach > MOST_STATE:
            message = f"the taps reach {p.reach} steps back (taps, dilation); allowed: up to {MOST_STATE}"
            found.append(Problem("dilation", message))
        if p.steps < 1:
            message = f"t is {p.t}, padding {p.padding}, but the taps span {p.reach + 1} steps; y would have no steps"
            found.append(Problem("t", message))
        for name in ("initial_state", "final_state", "seq_idx"):
            if p[name] and not p.causal:
                allowed = f"allowed: ({p.reach}, 0), the causal one"
                found.append(Problem(name, f"{name} needs a causal convolution, but padding is {p.padding}; {allowed}"))
            if name != "seq_idx" and p[name] and not p.reach:
                found.append(Problem(name, f"{name} would be empty, because a single tap has no state; leave it out"))
        if p.seq_idx and (p.initial_state or p.final_state):
            found.append(
                Problem("seq_idx", "seq_idx and states do not go together: packed sequences have no common start or end")
            )
        if p.n * p.t > MAX_INT:
            found.append(Problem("t", f"n * t is {p.n * p.t}; allowed: up to {MAX_INT}"))
        return found or too_large("x", (p.n, p.t, p.c), dtype_of(p.dtype).nbytes)

    def _sequence(self, p: DepthwiseConv1dParams, name: str, steps: int) -> ArgSpec:
        shape = (p.n, steps, p.c) if p.layout == "NTC" else (p.n, p.c, steps)
        return ArgSpec(name, p.layout, shape, p.dtype)

    def _state(self, p: DepthwiseConv1dParams, name: str) -> ArgSpec:
        return ArgSpec(name, "NCT", (p.n, p.c, p.reach), p.dtype)

    def arguments(self, params: DepthwiseConv1dParams) -> tuple[ArgSpec, ...]:
        p = params
        found = [self._sequence(p, "x", p.t), ArgSpec("weight", "CK", (p.c, p.taps), p.weight_dtype, constant=p.forward)]
        if p.bias:
            found.append(ArgSpec("bias", "C", (p.c,), p.weight_dtype, constant=p.forward))
        if not p.forward:
            found.append(self._sequence(p, "dy", p.steps))
        if p.initial_state:
            found.append(self._state(p, "initial_state"))
        if p.final_state and not p.forward:
            found.append(self._state(p, "d_final_state"))
        if p.seq_idx:
            found.append(ArgSpec("seq_idx", "NT", (p.n, p.t), "int32", "index", below=_NO_SEQUENCES))
        return tuple(found)

    def outputs(self, params: DepthwiseConv1dParams) -> tuple[ArgSpec, ...]:
        p = params
        if p.forward:
            y = self._sequence(p, "y", p.steps)
            return (y, self._state(p, "final_state")) if p.final_state else (y,)
        found = [self._sequence(p, "dx", p.t), ArgSpec("dw", "CK", (p.c, p.taps), p.weight_dtype)]
        found += [ArgSpec("db", "C", (p.c,), p.weight_dtype)] if p.bias else []
        found += [self._state(p, "d_initial_state")] if p.initial_state else []
        return tuple(found)

    def work(self, params: DepthwiseConv1dParams) -> Work:
        """A kernel for gradients computes three sums with an activation, and two without."""
        p = params
        sums = 1 if p.forward else 2 + p.silu
        reduction = p.taps if p.forward else max(p.taps, p.n * p.steps)
        return Work(sums * 2 * p.n * p.steps * p.c * p.taps, super().work(p).nbytes, reduction)

    def rounding(self, params: DepthwiseConv1dParams) -> Rounding:
        return Rounding(additions=FP32_ROUNDOFF)

    def exact_step(self, params: DepthwiseConv1dParams) -> float | None:
        """Without an activation all sums are of products of integers."""
        return None if params.silu else 1.0

    def check_inputs(self, params: DepthwiseConv1dParams) -> Mapping[str, Domain]:
        """Integers whose sums are exact, or numbers whose sums silu bends."""
        p, arguments = params, self.arguments(params)
        if p.silu:
            near = Domain(tuple(number / 4 for number in range(-8, 9)))
            found = dict.fromkeys(("x", "weight", "bias", "dy", "initial_state", "d_final_state"), near)
            shrink = 2.0 ** -round(math.log2(p.taps) / 2)
            found["weight"] = Domain(tuple(number / 4 * shrink for number in range(-6, 7)))
        else:
            factors = [ArgSpec(name, "A", (1,), p.dtype, "factor") for name in ("x", "weight")]
            outputs = [ArgSpec(each.name, "A", (1,), each.dtype) for each in self.outputs(p)]
            drawn = by_role(factors, outputs, self.work(p).reduction)
            found = {**drawn, "initial_state": drawn["x"], "dy": drawn["weight"]}
            found["bias"] = found["d_final_state"] = Domain(range(-8, 9))
        found["seq_idx"] = Domain(_SEQUENCES, ordered=True, second=Domain(_SEQUENCES[30:] + _SEQUENCES[:30], ordered=True))
        return {spec.name: found[spec.name] for spec in arguments}

    def timing_inputs(self, params: DepthwiseConv1dParams) -> Mapping[str, Domain]:
        """Sequences as they are packed: of some hundreds of steps."""
        packed = Domain(tuple(step // 512 for step in range(4096)), ordered=True)
        return {"seq_idx": packed} if params.seq_idx else {}

    def unrelated(self, params: DepthwiseConv1dParams, others: DepthwiseConv1dParams) -> bool:
        """Kernels of other directions and orders of memory have other knobs, or other values for them. Short runs, which
        fill a device with a small array, are slow for a large one, and long runs the reverse."""
        if (params.direction, params.layout, params.taps) != (others.direction, others.layout, others.taps):
            return True
        one, other = (p.n * p.c * p.t for p in (params, others))
        return not one <= _SIMILAR * other <= _SIMILAR * _SIMILAR * one

    def label(self, params: DepthwiseConv1dParams) -> str:
        p = params
        words = [f"depthwise_conv1d {p.n}x{p.t}x{p.c} k{p.taps}"]
        words += [f"d{p.dilation}"] if p.dilation > 1 else []
        words += [] if p.causal else [f"pad({p.padding[0]},{p.padding[1]})"]
        words += [p.direction] if not p.forward else []
        formats = {dtype_of(p.dtype).short: 0, dtype_of(p.weight_dtype).short: 0}
        words += ["x".join(formats), p.layout]
        words += [name for name in ("initial_state", "final_state", "seq_idx") if p[name]]
        return " ".join(words) + "".join(f"+{stage}" for stage in p.epilogue)


DEPTHWISE_CONV1D = DepthwiseConv1d()
