"""Where a module holds the tensors that a graph of it takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

HOLDERS = {"PARAMETER": "_parameters", "BUFFER": "_buffers"}  # kind of a tensor -> attribute of a module


def tensor_facts(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, torch.device]:
    return tensor.dtype, tensor.shape, tensor.device


def resolve(module: nn.Module, kind: str, path: str) -> tuple[dict[str, Any], str, Any]:
    """Where a parameter, a buffer or a plain tensor is held, and the tensor."""
    owner, _, name = path.rpartition(".")
    part = module.get_submodule(owner)
    where: dict[str, Any] = getattr(part, HOLDERS[kind]) if kind in HOLDERS else vars(part)
    return where, name, where[name]


def ties(module: nn.Module, paths: list[tuple[str, str]]) -> list[tuple[tuple[str, str, str], tuple[str, str]]]:
    """Other places of tensors than these paths; see `Plan.ties`."""
    places = {id(tensor): (where, name, path) for path in paths for where, name, tensor in [resolve(module, *path)]}
    found = []
    for name, each in module.named_modules():
        for holder in HOLDERS.values():
            for last, tensor in getattr(each, holder).items():
                where, other, path = places.get(id(tensor), (None, "", ("", "")))
                if where is not None and not (where is getattr(each, holder) and last == other):
                    found.append(((name, holder, last), path))
    return found


def is_attribute(module: nn.Module, path: str) -> bool:
    """Whether a path leads to a tensor that is neither a parameter nor a buffer."""
    try:
        return isinstance(resolve(module, "ATTRIBUTE", path)[2], torch.Tensor)
    except (AttributeError, KeyError):
        return False
