"""How far a time can be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Doubt = Literal["", "noisy", "bimodal"]
"""Why a median is not to be trusted: its repetitions spread too far, or fall into two groups. "" if it is, or is unknown."""


@dataclass(frozen=True)
class Mode:
    """One of two groups of repetitions: its median, and its share of all repetitions."""

    time_ns: float
    share: float
