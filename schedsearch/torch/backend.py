"""The backend of torch.compile under its public name, which the entry points of installed packages have."""

from __future__ import annotations

from schedsearch.torch.compiler.backend import Options, schedsearch

__all__ = ["Options", "schedsearch"]
