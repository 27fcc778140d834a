"""Makes versions of packages work together that would otherwise fail."""

from __future__ import annotations

import sys


class _BeforeNumbaCuda:
    """An import hook that finds no module, but acts just before anything imports `numba.cuda`.

    numba-cuda 0.30 refers to `numpy.row_stack`, an old name of `vstack` that NumPy 2.5 has removed.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "numba.cuda":
            import numpy

            if not hasattr(numpy, "row_stack"):
                numpy.row_stack = numpy.vstack


def install() -> None:
    """Called once, before anything of this package can import Numba."""
    sys.meta_path.insert(0, _BeforeNumbaCuda())
