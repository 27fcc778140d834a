"""From views to JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from schedsearch.text import printable

JSON = Any  # what `json.dumps` takes
_AS_IT_IS = frozenset((int, bool, type(None), list))


def to_json(value: object, shared: Mapping[int, JSON] | None = None) -> JSON:
    """A view as JSON values: dataclasses become objects, tuples lists, numbers that are not finite null.

    Characters that do not show as themselves, such as controls and bidirectional overrides, become escapes, except line
    breaks and tabs. A list is a column, whose values are taken as they are.

    Args:
        shared: `id` of values that many views hold, which the caller keeps -> what they became, taken as it is.
    """
    if isinstance(value, str):
        return printable(value, lines=True)
    if type(value) in _AS_IT_IS:
        return value
    if shared is not None and id(value) in shared:
        return shared[id(value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int | list):
        return value
    if dataclasses.is_dataclass(value):
        named = ((name, getattr(value, name)) for name in value.__dataclass_fields__)
        return {name: of if type(of) in _AS_IT_IS else to_json(of, shared) for name, of in named}
    if isinstance(value, Mapping):
        return {printable(str(key)): to_json(item, shared) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [to_json(item, shared) for item in value]
    raise TypeError(f"a view holds {type(value).__name__}, which JSON does not have")
