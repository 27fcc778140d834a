"""Values of JSON that came from a file: the expected kind, or a default instead of an error."""

from __future__ import annotations

import json
import math
from typing import Any

from schedsearch.typed import JsonObject


def mapping(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}


def sequence(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def number(value: Any) -> float | None:
    """A finite number; true and false are none."""
    return value if type(value) in (int, float) and math.isfinite(value) else None


def whole(value: Any) -> int | None:
    return value if type(value) is int else None


def parsed(text: str) -> Any:
    """What a JSON text holds; None if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
