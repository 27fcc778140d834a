"""The error of models that cannot be read."""

from __future__ import annotations

from schedsearch.errors import UsageError


class ModelError(UsageError):
    """A model file cannot be read, or its graph cannot be compiled."""
