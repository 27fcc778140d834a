"""squeeze_excite: each channel of an image times a gate, which follows from the means of all channels.

    mean[n,c]    = (sum over h,w of x[n,h,w,c]) / (h * w)
    squeezed[n,j] = activation(sum over c of mean[n,c] * reduce[j,c] + reduce_bias[j])
    y[n,h,w,c]   = x[n,h,w,c] * gate(sum over j of squeezed[n,j] * expand[j,c] + expand_bias[c])

`activation` is relu, silu or hard_swish, as the stages of that name; `gate` is sigmoid, or hard_sigmoid: alpha t + beta,
within 0 to 1. Kernels keep means, squeezed numbers and gates in float32, and round y once.

Source: Hu, Shen and Sun, "Squeeze-and-excitation networks", 2018.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.base import Op
from schedsearch.ops.checks import FP32_ROUNDOFF, Domain, Rounding
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.images import IMAGE_SIZES, PLAIN, ImageParams, image
from schedsearch.ops.params import Parameter, Params, declared
from schedsearch.ops.specs import ArgSpec, Work
from schedsearch.typed import ParamsByName

DTYPES = ("float16", "bfloat16", "float32")
ACTIVATIONS = ("relu", "silu", "hard_swish")
GATES = ("sigmoid", "hard_sigmoid")
_NUMBER = {"type": "number", "minimum": -1e6, "maximum": 1e6}


@dataclass(frozen=True, eq=False, kw_only=True)
class SqueezeExciteParams(ImageParams):
    """See `squeeze_excite`."""

    n: int = declared(IMAGE_SIZES["n"])
    c: int = declared(IMAGE_SIZES["c"])
    h: int = declared(IMAGE_SIZES["h"])
    w: int = declared(IMAGE_SIZES["w"])
    squeezed: int = declared(Parameter.count("channels between the two products"))
    activation: str = declared(Parameter.choice("between the products: relu, silu or hard_swish; default relu", ACTIVATIONS))
    gate: str = declared(Parameter.choice("behind the products: sigmoid or hard_sigmoid; default sigmoid", GATES))
    alpha: float = declared(Parameter("factor of hard_sigmoid; default 1/6", {**_NUMBER, "default": 1 / 6}))
    beta: float = declared(Parameter("addend of hard_sigmoid; default 1/2", {**_NUMBER, "default": 0.5}))
    dtype: str = declared(Parameter.choice("of x, y and the weights; default float16", DTYPES))
    layout: str = declared(Parameter.choice("axes of x and y in memory; default NHWC", PLAIN))


class SqueezeExcite(Op[SqueezeExciteParams]):
    params_type: ClassVar[type[Params]] = SqueezeExciteParams
    name: ClassVar[str] = "squeeze_excite"
    reference: ClassVar[str] = "schedsearch.templates.squeeze_excite.reference:SqueezeExciteReference"
    constructor: ClassVar[str] = "schedsearch:squeeze_excite"

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        """Numbers that the gate does not have are the defaults."""
        found, problems = super().normalise(params)
        if not problems:
            usual = self.defaults(found)
            own = found["gate"] == "hard_sigmoid"
            found |= {name: float(found[name]) if own else usual[name] for name in ("alpha", "beta")}
        return found, problems

    def arguments(self, params: SqueezeExciteParams) -> tuple[ArgSpec, ...]:
        """Both weights are contiguous along the channels of x; biases are float32."""
        p = params
        return (
            image("x", p, p.h, p.w),
            ArgSpec("reduce", "KC", (p.squeezed, p.c), p.dtype, role="factor", constant=True),
            ArgSpec("reduce_bias", "K", (p.squeezed,), "float32", role="addend", constant=True),
            ArgSpec("expand", "CK", (p.squeezed, p.c), p.dtype, role="factor", constant=True),
            ArgSpec("expand_bias", "K", (p.c,), "float32", role="addend", constant=True),
        )

    def outputs(self, params: SqueezeExciteParams) -> tuple[ArgSpec, ...]:
        return (image("y", params, params.h, params.w),)

    def work(self, params: SqueezeExciteParams) -> Work:
        p = params
        image_bytes = p.n * p.c * p.h * p.w * dtype_of(p.dtype).nbytes
        return Work(
            4 * p.n * p.c * p.squeezed, super().work(p).nbytes, p.h * p.w + p.c + p.squeezed, least_bytes=image_bytes
        )

    def rounding(self, params: SqueezeExciteParams) -> Rounding:
        """Errors of three sums, one behind the other, and of two functions."""
        return Rounding(additions=4 * FP32_ROUNDOFF)

    def exact_step(self, params: SqueezeExciteParams) -> float | None:
        return None

    def check_inputs(self, params: SqueezeExciteParams) -> Mapping[str, Domain]:
        """Positive pixels, so that means are not all about zero, and sums near 1, where gates are neither 0 nor 1."""
        p = params
        weights, biases = (-0.5, -0.25, 0.25, 0.5), tuple(number / 4 for number in range(-4, 5))
        return {
            "x": Domain(tuple(number / 4 for number in range(1, 17))),
            "reduce": Domain(weights, density=min(1.0, 8.0 / p.c)),
            "reduce_bias": Domain(biases),
            "expand": Domain(weights, density=min(1.0, 4.0 / p.squeezed)),
            "expand_bias": Domain(biases),
        }

    def label(self, params: SqueezeExciteParams) -> str:
        p = params
        words = [f"squeeze_excite {p.n}x{p.h}x{p.w}x{p.c} to {p.squeezed}", p.activation, p.gate]
        usual = self.defaults(p)
        words += [f"{name} {p[name]:g}" for name in ("alpha", "beta") if p[name] != usual[name]]
        return " ".join([*words, dtype_of(p.dtype).short, p.layout])


SQUEEZE_EXCITE = SqueezeExcite()
