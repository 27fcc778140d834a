"""The activations of recurrent on float32 numbers, for kernels on CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from schedsearch.ops.recurrent import Activation
from schedsearch.templates.parts.casts import f32

Unary = Callable[[Any], Any]


class Primitives(NamedTuple):
    """What a device computes by itself: float32 -> float32, within a few roundoffs of the result."""

    exp: Unary
    tanh: Unary
    log1p: Unary


def function_of(activation: Activation, clip: float, of: Primitives) -> Unary:
    """An activation of numbers that are limited to -clip to clip, if clip is not 0. A NaN stays one."""
    alpha, beta, limit = f32(activation.alpha), f32(activation.beta), f32(clip)
    exp, tanh, log1p = of

    def sigmoid(x: Any) -> Any:
        return f32(f32(1) / f32(f32(1) + exp(f32(-x))))

    def relu(x: Any) -> Any:
        return f32(0) if x < f32(0) else x

    def softsign(x: Any) -> Any:
        return f32(x / f32(f32(1) + f32(abs(x))))

    def softplus(x: Any) -> Any:
        return f32((f32(0) if x < f32(0) else x) + log1p(exp(f32(-f32(abs(x))))))

    def affine(x: Any) -> Any:
        return f32(f32(alpha * x) + beta)

    def leaky_relu(x: Any) -> Any:
        return f32(alpha * x) if x < f32(0) else x

    def thresholded_relu(x: Any) -> Any:
        return f32(0) if x < alpha else x

    def scaled_tanh(x: Any) -> Any:
        return f32(alpha * tanh(f32(beta * x)))

    def hard_sigmoid(x: Any) -> Any:
        y = f32(f32(alpha * x) + beta)
        y = f32(0) if y < f32(0) else y
        return f32(1) if y > f32(1) else y

    def elu(x: Any) -> Any:
        """e^x - 1 = tanh(x / 2) (e^x + 1), which loses no digits near 0."""
        less = f32(0) if x > f32(0) else x
        y = f32(alpha * f32(tanh(f32(f32(0.5) * less)) * f32(exp(less) + f32(1))))
        return y if x < f32(0) else x

    functions: dict[str, Unary] = {
        "sigmoid": sigmoid, "tanh": tanh, "relu": relu, "softsign": softsign, "softplus": softplus, "affine": affine,
        "leaky_relu": leaky_relu, "thresholded_relu": thresholded_relu, "scaled_tanh": scaled_tanh,
        "hard_sigmoid": hard_sigmoid, "elu": elu,
    }  # fmt: skip
    function = functions[activation.name]

    def limited(x: Any) -> Any:
        x = f32(-limit) if x < f32(-limit) else x
        return function(limit if x > limit else x)

    return limited if clip else function
