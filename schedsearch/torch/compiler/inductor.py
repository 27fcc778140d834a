"""PyTorch's own compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from schedsearch.errors import UsageError, did_you_mean

Compiled = Callable[..., Any]


def compiled(module: fx.GraphModule, inputs: Sequence[Any], mode: str) -> Compiled:
    """A graph as Inductor compiles it.

    Args:
        mode: default, reduce-overhead, max-autotune or max-autotune-no-cudagraphs.

    Raises:
        UsageError: `mode` is unknown. Inductor raises errors of many kinds, e.g. without a compiler.
    """
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    modes = list_mode_options()
    if mode not in modes:
        raise UsageError(f"mode {mode!r} is not known{did_you_mean(mode, list(modes))}; allowed: {', '.join(modes)}")
    found: Compiled = compile_fx(module, list(inputs), config_patches=modes[mode])
    return found


def compiled_or_eager(module: fx.GraphModule, inputs: Sequence[object]) -> Compiled:
    """A graph as Inductor compiles it, or as PyTorch runs it where Inductor cannot, e.g. without a compiler."""
    try:
        found = compiled(module, inputs, "default")
        found(*inputs)
    except Exception:  # of many kinds
        return module
    return found
