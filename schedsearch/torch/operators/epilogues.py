"""Epilogues as one text, so that a call of an operator has few arguments: "bias,residual,relu".

A word is the name of a stage of `schedsearch.ops.STAGES`. A stage with a parameter has it behind a colon:
"requantise:uint8", "dequantise:float16", "depth_to_space:2" (in the order of torch.nn.PixelShuffle).
`Epilogue.text` writes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from schedsearch.errors import ArgumentError
from schedsearch.ops.epilogues import parse_epilogue, stage_of
from schedsearch.ops.stages import Stage

# Operand of a stage -> the tensor of the operator that holds it.
TENSORS = {
    "bias": "bias",
    "shift": "bias",
    "scale": "scale",
    "requantise_scale": "scale",
    "dequantise_scale": "scale",
    "quantise_scale": "output_scale",
    "residual": "residual",
}
# Stages without operands and numbers.
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "hard_swish": functional.hardswish,
    "gelu": functional.gelu,
}
SCALARS = {"leaky_relu_slope": "low", "clip_min": "low", "clip_max": "high"}


@functools.cache
def stages(epilogue: str) -> tuple[Stage, ...]:
    """The stages that a string names.

    Raises:
        ArgumentError: a stage does not exist, or does not belong there.
    """
    items = [stage_of(word) for word in epilogue.split(",") if word]
    found, problems = parse_epilogue(items, moves=True)
    if problems:
        raise ArgumentError(f"epilogue {epilogue!r}: {'; '.join(problem.message for problem in problems)}")
    taken = [scalar for stage in found for scalar in {SCALARS.get(each.name, each.name) for each in stage.kind.scalars}]
    taken += [TENSORS[operand.name] for stage in found for operand in stage.kind.operands if operand.name in TENSORS]
    twice = sorted({name for name in taken if taken.count(name) > 1})
    if twice:
        raise ArgumentError(f"epilogue {epilogue!r} needs {', '.join(twice)} for two stages; leave one of the stages out")
    return found


def block_of(epilogue: str) -> int:
    """Pixels along each axis that a pixel becomes at the end; 1 without depth_to_space."""
    found = stages(epilogue)
    return int(found[-1].params["block"]) if found and found[-1].kind.moves else 1


def computed(
    y: torch.Tensor,
    epilogue: str,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    residual: torch.Tensor | None,
    low: float,
    high: float,
) -> torch.Tensor:
    """The epilogue of floating-point numbers by PyTorch's operators, which have gradients; `y` are the sums."""
    for word in epilogue.split(","):
        if word == "bias" and bias is not None:
            y = y + bias.view(1, -1, 1, 1)
        elif word == "scale_shift" and scale is not None and bias is not None:
            y = y * scale.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)
        elif word == "residual" and residual is not None:
            y = y + residual
        elif word in ACTIVATIONS:
            y = ACTIVATIONS[word](y)
        elif word == "leaky_relu":
            y = functional.leaky_relu(y, low)
        elif word == "clip":
            y = torch.clamp(y, low, high)
        elif word.startswith("depth_to_space:"):
            y = functional.pixel_shuffle(y, int(word.partition(":")[2]))
    return y
