"""The state of PyTorch in which candidates are run: for inference, and such that nothing is left of it afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def inference(device: torch.device) -> Iterator[None]:
    """Without autograd and autocast, and with cuDNN's fastest algorithms."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), cudnn_searches(True):
        yield


@contextlib.contextmanager
def cudnn_searches(whether: bool) -> Iterator[None]:
    """Whether cuDNN measures its algorithms for each new shape."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, whether
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def same_random_numbers(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Gives PyTorch's generators the states back that they had: a model may draw numbers."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])
