"""What a compiler of kernels does for this package: the module `Compiler.front_end` of each."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol

from schedsearch.backend import compilers
from schedsearch.template import KernelStep


@dataclass(frozen=True)
class Ptx:
    """PTX of one kernel. `shared`: it was made from work that all kernels of the same shape share."""

    text: str
    shared: bool


class FrontEnd(Protocol):
    """A compiler. Importing the module imports it."""

    def to_ptx(self, step: KernelStep, cc: tuple[int, int]) -> Ptx:
        """The PTX of a step for a compute capability. Raises any exception of the compiler."""

    def libraries(self) -> list[str]:
        """The files of NVVM and of its library that the compiler loads. Raises any exception of its search."""


def front_end() -> FrontEnd:
    """The compiler that works here. Raises UsageError if it cannot be used; see `compilers.usable`."""
    made: FrontEnd = importlib.import_module(compilers.usable().front_end)
    return made
