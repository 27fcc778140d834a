"""How values get stable identities: canonical JSON (sorted keys, no spaces), hashed with sha256."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from schedsearch.text import type_text


def canonical_json(value: object, *, finite: bool = False) -> str:
    """The canonical JSON text of a value: sorted keys, no spaces, tuples as lists, ASCII; objects by their `to_json()`.

    Raises:
        ValueError: a number is infinite or NaN, which JSON does not have, and `finite` is set.
    """
    return (_FINITE if finite else _ENCODER).encode(value)


def plain_json(value: object) -> Any:
    """The JSON form of an object that has `to_json()`. Serves as the argument `default` of `json.dumps`.

    Raises:
        TypeError: the object has no `to_json()`.
    """
    if hasattr(value, "to_json"):
        return value.to_json()
    raise TypeError(f"{type_text(value)} has no JSON form")


_ENCODER, _FINITE = (
    json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=allow_nan, default=plain_json)
    for allow_nan in (True, False)
)


def sha256_hex(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()
