"""From views to JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from schedsearch.text import printable

JSON = Any  # what `json.dumps` takes


def to_json(value: object) -> JSON:
    """A view as JSON values: dataclasses become objects, tuples lists, numbers that are not finite null.

    Characters that do not show as themselves, such as controls and bidirectional overrides, become escapes, except line
    breaks and tabs. A list is a column, whose values are taken as they are.
    """
    if isinstance(value, str):
        return printable(value, lines=True)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, int | list):
        return value
    if dataclasses.is_dataclass(value):
        return {name: to_json(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {printable(str(key)): to_json(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [to_json(item) for item in value]
    raise TypeError(f"a view holds {type(value).__name__}, which JSON does not have")
