"""Mutations of JSON values: places are removed, replaced, swapped, repeated or bent."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import sys
from typing import Any

ODD = (
    *(None, True, False, 0, 1, -1, 2, 7, 255, 65536, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30),
    *(0.0, -0.0, 0.5, 1e300, -1e300, 5e-324, 1e18, float("inf"), float("nan")),
    *(
        "",
        "x",
        "0",
        "1",
        "null",
        "ok",
        "inf",
        "nan",
        "é",
        "\ud800",
        "\x00",
        "\x1b[31m",
        "\u202e",
        "a\nb",
        "x" * 50_000,
        "9" * 500,
    ),
    *("wrong_answer", "conv2d", "conv2d_cpu", "foreign", "cpu", "cuda", "__class__", "1e309", "../x", "%s", "{}", "[1,2]"),
)


def mutated(value: Any, rng: random.Random, changes: int = 0) -> str:
    """The JSON text of a value after some changes, sometimes with a duplicate key or a huge number in it."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)  # values may be as deep as a reader should refuse
    try:
        changed = copy.deepcopy(value)
        for _ in range(changes or rng.choice((1, 1, 1, 1, 2, 4))):
            changed = _change(changed, rng)
        text = json.dumps(changed)
    finally:
        sys.setrecursionlimit(before)
    how = rng.random()
    if how < 0.03 and "{" in text:
        at = rng.choice([number for number, c in enumerate(text) if c == "{"]) + 1
        return text[:at] + '"a": 1, "a": 2' + ("" if text[at] == "}" else ", ") + text[at:]
    if how < 0.05 and any(c.isdigit() for c in text):
        at = rng.choice([number for number, c in enumerate(text) if c.isdigit()])
        return text[:at] + rng.choice(("9" * 5000, "1e999", "1e-999", "-", "0x1", "01")) + text[at + 1 :]
    if how < 0.06:
        return text[: rng.randrange(len(text) + 1)]
    return text


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) of a JSON value."""
    found, stack = [], [value]
    while stack:
        at = stack.pop()
        for key in list(at) if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ():
            found.append((at, key))
            stack.append(at[key])
    return found


def _change(value: Any, rng: random.Random) -> Any:
    found = places(value)
    if not found or rng.random() < 0.01:
        return rng.choice((None, [], {}, 0, "x", [value], {"a": value}))
    at, key = rng.choice(found)
    how = rng.randrange(12)
    if how < 4:
        at[key] = rng.choice(ODD) if rng.random() < 0.9 else rng.choice(([], {}, [0], {"a": 0}))
    elif how == 4:
        del at[key]
    elif how == 5:
        other, place = rng.choice(found)
        with contextlib.suppress(KeyError, IndexError):
            at[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(at[key])
    elif how == 6 and isinstance(at, list):
        at[:] = at * rng.choice((2, 2, 50))
    elif how == 7 and isinstance(at, list):
        at.insert(rng.randrange(len(at) + 1), copy.deepcopy(at[key]))
    elif how == 7:
        at[rng.choice(("x", "", key + "s", key.upper(), "\x1b[31m"))] = at.pop(key)
    elif how == 8 and isinstance(at[key], int | float):
        at[key] = rng.choice((-1, 2, 1000, 1e-6, 0.5, 1e30)) * at[key]
    elif how == 9:
        for _ in range(rng.choice((1, 2, 50, 300))):
            at[key] = [at[key]] if rng.random() < 0.5 else {"a": at[key]}
    elif how == 10:
        at[key] = str(at[key]) if not isinstance(at[key], str) else at[key][: rng.randrange(len(at[key]) + 1)]
    else:
        at[key] = [at[key], at[key]] if not isinstance(at[key], list) else (at[key] or [None])[0]
    return value
