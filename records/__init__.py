"""Keeping what was measured: `store` (the database), `exchange` (files in and out), `lookup` (deployment), `trust`.

Imports nothing until it is used: `lookup` must stay free of SQLAlchemy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedsearch.records.lookup import Lookup
    from schedsearch.records.store import Store

_HOMES = {"Lookup": "schedsearch.records.lookup", "Store": "schedsearch.records.store"}

__all__ = ["Lookup", "Store"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'schedsearch.records' has no attribute {name!r}")
