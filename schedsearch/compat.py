"""Lets versions of packages work together that would not by themselves."""

from __future__ import annotations

import sys
from typing import Any


class _BeforeNumbaCuda:
    """An import hook that finds nothing, and acts before `numba.cuda` is imported, wherever that happens.

    numba-cuda 0.30 refers to `numpy.row_stack`, another name of `vstack` that NumPy 2.5 no longer has.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "numba.cuda":
            import numpy

            if not hasattr(numpy, "row_stack"):
                numpy.row_stack = numpy.vstack


def install() -> None:
    """Called once, before anything of this package can import Numba."""
    sys.meta_path.insert(0, _BeforeNumbaCuda())
