"""The compilers that make PTX of Python kernels, and which of them works here. Imports neither.

There are two: numba-cuda, and numba-cuda-mlir, its successor. Both take the same kernels, and their PTX is changed, linked
and launched in the same way, so nothing outside of this package knows which one made a kernel. numba-cuda is taken if it is
installed; otherwise numba-cuda-mlir; `SCHEDSEARCH_COMPILER` names another choice. Code for CPUs is Numba's in any case.

See docs/decisions/361-two-compilers-of-kernels.md.
"""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from schedsearch.errors import UsageError
from schedsearch.text import quoted

ENVIRONMENT_VARIABLE = "SCHEDSEARCH_COMPILER"


@dataclass(frozen=True)
class Compiler:
    """A compiler by the name of its package.

    Attributes:
        package: for pip.
        supported: the beginning of the versions whose private names this package knows.
        versioned: packages whose versions shape the machine code.
        remedy: how to install it.
        front_end: the module of this package that imports it; see `front_ends`.
    """

    package: str
    supported: str
    versioned: tuple[str, ...]
    remedy: str
    front_end: str

    @property
    def installed(self) -> str | None:
        """Its version; None if it is not installed."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None

    def problem(self) -> str:
        """Why it cannot be used; empty if it can."""
        found = self.installed
        if found is None:
            return f"building for a GPU needs the package {self.package}, which is not installed: {self.remedy}"
        if not f"{found}.".startswith(f"{self.supported}."):
            return f"{self.package} is {found}; supported: {self.supported}.*; {self.remedy}"
        return ""

    def toolchain(self) -> dict[str, str]:
        """Versions of everything that shapes the machine code; empty if nothing is installed."""
        found = {}
        for name in (self.package, *_LIBRARIES, *self.versioned):
            with contextlib.suppress(PackageNotFoundError):
                found[name] = version(name)
        return found


_LIBRARIES = ("nvidia-nvvm", "nvidia-nvjitlink", "nvidia-nvjitlink-cu12")
COMPILERS = {
    each.package: each
    for each in (
        Compiler(
            "numba-cuda", "0.30", ("llvmlite",),
            "pip install 'schedsearch[cu13]' (driver 580 or newer), else 'schedsearch[cu12]'",
            "schedsearch.backend.front_end",
        ),
        Compiler(
            "numba-cuda-mlir", "0.6", (), "pip install 'schedsearch[mlir]'",
            "schedsearch.backend.mlir_front_end",
        ),
    )
}  # fmt: skip
"""By name, in the order of preference."""


def chosen() -> Compiler:
    """The compiler that works here, which may not be installed.

    Raises:
        UsageError: `SCHEDSEARCH_COMPILER` names none.
    """
    return _chosen(os.environ.get(ENVIRONMENT_VARIABLE, ""))


def usable() -> Compiler:
    """The compiler that works here.

    Raises:
        UsageError: `SCHEDSEARCH_COMPILER` names none, or the compiler is not installed, or of an unsupported version.
    """
    compiler = chosen()
    if problem := compiler.problem():
        asked = f"{ENVIRONMENT_VARIABLE}={compiler.package}: " if os.environ.get(ENVIRONMENT_VARIABLE) else ""
        usable_ones = [each.package for each in COMPILERS.values() if not each.problem()]
        other = f"; or {ENVIRONMENT_VARIABLE}={usable_ones[0]}, which is installed" if usable_ones else ""
        raise UsageError(f"{asked}{problem}{other}")
    return compiler


@functools.cache
def _chosen(name: str) -> Compiler:
    if name and name not in COMPILERS:
        raise UsageError(
            f"{ENVIRONMENT_VARIABLE} is {quoted(name)}; allowed: {', '.join(COMPILERS)}; unset it to take the first of them "
            "that is installed"
        )
    first, *others = COMPILERS.values()
    found = [each for each in (first, *others) if each.installed is not None]
    return COMPILERS[name] if name else (found or [first])[0]
