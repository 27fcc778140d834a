"""The inputs of a call, by position and name, in the order of a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from schedsearch.errors import ArgumentError, did_you_mean


def in_order(names: Sequence[str], ports: Sequence[object], args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """The arrays of a call in the order of the network's inputs.

    Args:
        names: of the inputs.
        ports: the same for people: what each looks like.

    Raises:
        ArgumentError: an input is missing, unknown or given twice.
    """
    wanted = ", ".join(map(str, ports))
    if len(args) > len(names):
        raise ArgumentError(f"{len(args)} arrays by position; the network takes {len(names)}: {wanted}")
    found = dict(zip(names, args))
    for name, array in named.items():
        if name not in names:
            raise ArgumentError(f"unknown input {name!r}{did_you_mean(name, names)}; allowed: {', '.join(names)}")
        if name in found:
            raise ArgumentError(f"{name} is given by position and by name; give it once")
        found[name] = array
    missing = [name for name in names if name not in found]
    if missing:
        raise ArgumentError(f"missing {', '.join(missing)}; the network takes {wanted}")
    return [found[name] for name in names]
