"""What is known to be wrong with versions of ptxas, the assembler inside nvJitLink, and what is done about it.

| fault | fixed in | here |
|---|---|---|
| registers that wgmma still reads are overwritten | CUDA 13.3 | the machine code is looked at (`register_operands`) |
| registers are corrupted in nested divergence | CUDA 13.3 | every kernel is verified where it is served; `doctor` says so |

See docs/decisions/269-known-faults-of-ptxas.md.
"""

from __future__ import annotations

import contextlib
import functools
from importlib.metadata import PackageNotFoundError, version

from schedsearch.backend.register_operands import count_from_registers, overwritten

Version = tuple[int, int]

FIXED: Version = (13, 3)
"""The CUDA version that has none of the faults above."""

COMPARED: Version = (12, 9)
"""The oldest version whose machine code was compared with what `register_operands` reads."""

_REMEDY = "pip install 'nvidia-nvjitlink>=13.3' 'nvidia-nvvm>=13.3' (driver 580 or newer)"
_PACKAGES = {"NVVM": ("nvidia-nvvm", "nvidia-cuda-nvcc-cu12"), "nvJitLink": ("nvidia-nvjitlink", "nvidia-nvjitlink-cu12")}


@functools.cache
def linker_version() -> Version | None:
    """The CUDA version of nvJitLink, whose ptxas makes all machine code; None if it is not installed."""
    try:
        from cuda.bindings import nvjitlink

        major, minor = nvjitlink.version()
    except Exception:  # of a search for libraries, by another package
        return None
    return int(major), int(minor)


def fault_of(cubin: bytes, linker: Version | None) -> str:
    """Why a kernel must not run, although it compiled; empty for nearly all.

    Args:
        linker: the CUDA version that made it.
    """
    if found := overwritten(cubin):
        return (
            f"ptxas of CUDA {_text(linker)} overwrites {found[0]} while wgmma may still read it, which is known of versions "
            f"before {_text(FIXED)}: {_REMEDY}"
        )
    if linker is not None and linker < COMPARED and count_from_registers(cubin):
        return (
            f"wgmma takes an operand from registers, which ptxas before CUDA {_text(FIXED)} is known to overwrite. Machine "
            f"code is looked at from CUDA {_text(COMPARED)} on; this is {_text(linker)}: {_REMEDY}"
        )
    return ""


def exclusions(linker: Version | None) -> list[str]:
    """What a version of nvJitLink excludes, a line each; none from `FIXED` on."""
    if linker is None or linker >= FIXED:
        return []
    wgmma = (
        "kernels whose wgmma reads registers (conv2d_stem) are left out where their machine code shows the fault"
        if linker >= COMPARED
        else "kernels whose wgmma reads registers (conv2d_stem) are left out"
    )
    return [
        f"ptxas of CUDA {_text(linker)} is known to make wrong code in rare cases: {wgmma}; nested divergence may corrupt "
        f"registers, which shows when a kernel is verified. Better: {_REMEDY}"
    ]


def mismatch() -> str:
    """What is wrong with the installed pair of NVVM and nvJitLink; empty if nothing is known."""
    found = {name: _installed(packages) for name, packages in _PACKAGES.items()}
    nvvm, linker = found["NVVM"], found["nvJitLink"]
    if nvvm is None or linker is None or nvvm <= linker:
        return ""
    return (
        f"NVVM is of CUDA {_text(nvvm)} and writes PTX that nvJitLink of CUDA {_text(linker)} may not know; install both of "
        f"one version: pip install --upgrade nvidia-nvjitlink, or 'nvidia-nvvm=={linker[0]}.{linker[1]}.*'"
    )


def _installed(packages: tuple[str, ...]) -> Version | None:
    for package in packages:
        with contextlib.suppress(PackageNotFoundError, ValueError):
            major, minor = version(package).split(".")[:2]
            return int(major), int(minor)
    return None


def _text(cuda: Version | None) -> str:
    return "an unknown version" if cuda is None else f"{cuda[0]}.{cuda[1]}"
