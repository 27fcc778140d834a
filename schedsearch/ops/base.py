"""What an operator has to say about itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from schedsearch.errors import Problem

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int8": 1}


@dataclass(frozen=True)
class ArgSpec:
    """One array argument: `shape` is that of the contiguous array whose axes `axes` names (e.g. NHWC, OHWI, K)."""

    name: str
    axes: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class ScalarSpec:
    """A float32 that is given at call time."""

    name: str
    default: float


class Op(Protocol):
    """An operator. Every method takes the normalised parameters that `normalise` returned."""

    name: str
    version: int

    def parameters(self) -> Mapping[str, str]:
        """Name -> one line of documentation, of every parameter."""

    def normalise(self, params: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
        """Fills in defaults and expands shorthands; returns every mistake found (then the first value is partial)."""

    def defaults(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """The value that each optional parameter takes, given the others, when it is left out."""

    def arguments(self, params: Mapping[str, Any]) -> tuple[ArgSpec, ...]: ...

    def output(self, params: Mapping[str, Any]) -> ArgSpec: ...

    def scalars(self, params: Mapping[str, Any]) -> tuple[ScalarSpec, ...]: ...

    def flops(self, params: Mapping[str, Any]) -> int:
        """Two per multiply-add of the definition, padding included; epilogues are not counted."""

    def label(self, params: Mapping[str, Any]) -> str: ...
