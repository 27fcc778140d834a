"""Whether a model's weights are still those that a network copied.

PyTorch counts writes to a tensor as versions of it, with two exceptions that every training has: statistics of batch norms,
and steps of fused optimizers. These are noticed by what happens beside them.
"""

from __future__ import annotations

import gc
import operator
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from schedsearch.torch.refusal import Refusal

_version = operator.attrgetter("_version")


def _each_lies_at(tensors: list[torch.Tensor], addresses: list[int], places: list[int]) -> bool:
    return all(tensors[place].data_ptr() == addresses[place] for place in places)


_lie_at = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", _each_lies_at)  # Inductor's own, for CUDA graphs


class FrozenWeights:
    """Weights that a network copied, as they were then.

    Their memory is kept, so that tensors that replace them cannot come to lie at the same addresses.

    Raises:
        Refusal: a tensor was made in inference mode, and has no version.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        if any(each.is_inference() for each in tensors):
            raise Refusal("its parameters were made in inference mode, which does not say when they change")
        self._addresses, self._versions = [each.data_ptr() for each in tensors], list(map(_version, tensors))
        self._places = list(range(len(tensors)))
        self._kept = [each.detach() for each in tensors]
        self._counters = _counters_beside(tensors)
        self._counts = list(map(_version, self._counters))
        self._stepped = False
        if tensors:
            _steps.tell(self)

    def are(self, tensors: list[torch.Tensor]) -> bool:
        """Whether these are the same tensors, and nobody has replaced, moved or written to one.

        Addresses alone would miss writes, versions alone `parameter.data = other`. Every call with weights waits for it: no
        loop in Python.
        """
        if len(tensors) != len(self._places) or self._stepped:
            return False
        try:
            return (
                _lie_at(tensors, self._addresses, self._places)
                and list(map(_version, tensors)) == self._versions
                and list(map(_version, self._counters)) == self._counts
            )
        except RuntimeError:  # a tensor of inference mode
            return False

    def note(self, written: set[int]) -> None:
        """Takes the addresses of tensors that an optimizer has written to."""
        self._stepped = self._stepped or not written.isdisjoint(self._addresses)


def _counters_beside(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The counters of the batch norms whose running statistics are among some tensors.

    In training mode PyTorch writes to the statistics without a new version, but it adds 1 to the counter beside them. Graphs
    have the tensors only, so the modules' buffers are found by who refers to the statistics.
    """
    buffers = {id(each): each for each in tensors if not isinstance(each, nn.Parameter)}
    found = {}
    for each in gc.get_referrers(*buffers.values()) if buffers else ():
        if isinstance(each, dict) and id(each.get("running_mean")) in buffers:
            counter = each.get("num_batches_tracked")
            if isinstance(counter, torch.Tensor):
                found[id(counter)] = counter
    return list(found.values())


class _Steps:
    """Tells frozen weights of the steps of all optimizers: fused ones write to parameters without new versions."""

    def __init__(self) -> None:
        self._told: weakref.WeakSet[FrozenWeights] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._hook: Any = None

    def tell(self, weights: FrozenWeights) -> None:
        with self._lock:
            self._told.add(weights)
            if self._hook is None:
                self._hook = register_optimizer_step_post_hook(self._after)

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():  # a compiled step counts its writes
            return
        with self._lock:
            told = list(self._told)
        if told:
            parameters = [each for group in optimizer.param_groups for each in group["params"]]
            written = {each.data_ptr() for each in parameters if each.grad is not None}
            for weights in told:
                weights.note(written)


_steps = _Steps()
