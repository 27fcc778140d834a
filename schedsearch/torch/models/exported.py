"""A module as torch.export shows it, with the strides that its values really have."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
from typing import Any

import torch
from torch import fx, nn

_one_by_one = threading.RLock()  # stderr and the logger are those of all threads


def exported(module: nn.Module, args: tuple[object, ...]) -> Any:
    """What torch.export makes of a module, without the graphs that it prints if it cannot. Raises what it raises."""
    told = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    with _one_by_one:
        before, told.disabled = told.disabled, True
        try:
            with contextlib.redirect_stderr(_OfOthers(sys.stderr)):
                return torch.export.export(module, args, strict=False)
        finally:
            told.disabled = before


class _OfOthers(io.TextIOBase):
    """Passes on what other threads than this write."""

    def __init__(self, to: Any) -> None:
        self._to, self._thread = to, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else int(self._to.write(text))


class _StrideRecorder(fx.Interpreter):
    """Runs a graph and notes the strides of each value; fake tensors may have others than cuDNN's results."""

    def run_node(self, node: fx.Node) -> Any:
        found, fake = super().run_node(node), node.meta.get("val")
        if isinstance(found, torch.Tensor) and isinstance(fake, torch.Tensor) and fake.stride() != found.stride():
            with fake.fake_mode:
                like = {"dtype": found.dtype, "device": found.device}
                node.meta["val"] = torch.empty_strided(tuple(found.shape), found.stride(), **like)
        return found


def record_strides(root: fx.GraphModule, inputs: list[Any]) -> None:
    """Gives the values of a graph the strides that they really have."""
    _StrideRecorder(root).run(*(each.clone() if isinstance(each, torch.Tensor) else each for each in inputs))
