"""A function for each built-in operator that makes a workload: parameters as keywords, their defaults, what they mean.

They are above `Workload`, and operators are below it. `schedsearch` offers them by name. Nothing that decides what a
parameter means or which values are possible belongs here: that is the operator's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from schedsearch.ops.base import Op
from schedsearch.workload import Workload

P = TypeVar("P", bound=Mapping[str, Any])


def made(op: Op[P], given: Mapping[str, Any]) -> Workload[P]:
    """The workload with these parameters. None stands for a default that depends on others."""
    known = {name: _plain(value) for name, value in given.items() if value is not None}
    return Workload(op.name, known)


def _plain(value: Any) -> Any:
    """Sequences of other libraries, such as arrays, as tuples."""
    foreign = isinstance(value, Iterable) and not isinstance(value, str | list | tuple | Mapping)
    return tuple(value) if foreign else value
