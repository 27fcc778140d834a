"""Why something is left to PyTorch."""

from __future__ import annotations


class Refusal(Exception):
    """Why a model or a graph is left to PyTorch. It never leaves this package."""
