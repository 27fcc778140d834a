"""Turns a template's Python functions into machine code. No other package knows a compiler.

`compile_source` chooses the backend by `KernelSource.kind` and imports it only then. Importing this package therefore costs
nothing, and a machine without the CUDA wheels can still build for its CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from schedsearch.backend.base import BuildResult, CompileError, RejectedError
from schedsearch.target import Target
from schedsearch.template import KernelSource

__all__ = ["BuildResult", "CompileError", "RejectedError", "compile_source", "other_versions", "toolchain"]


def compile_source(source: KernelSource, target: Target) -> BuildResult:
    """Compiles every step of `source` for `target`.

    Raises:
        CompileError: the compiler refused a kernel.
        RejectedError: the kernel compiled, but is unfit to run (spills, registers, shared memory).
        ValueError: source and target are of different kinds.
    """
    if source.kind != target.kind:
        raise ValueError(f"a kernel for {source.kind} cannot be built for {target.key}; give a {source.kind} target")
    if source.kind == "cuda":
        from schedsearch.backend.cuda import compile_cuda

        return compile_cuda(source, target)
    from schedsearch.backend.cpu import compile_cpu

    return compile_cpu(source)


def toolchain(kind: Literal["cuda", "cpu"]) -> dict[str, str]:
    """Versions of everything that shapes the machine code; part of a record's identity."""
    if kind == "cuda":
        from schedsearch.backend.cuda import toolchain_cuda

        return toolchain_cuda()
    from schedsearch.backend.cpu import toolchain_cpu

    return toolchain_cpu()


def other_versions(kind: Literal["cuda", "cpu"], made_by: Mapping[str, str], here: str = "now") -> list[str]:
    """What of the toolchain of a record is another one in this process, a text each, by name.

    Args:
        made_by: as `toolchain` returned it there. Packages that do not shape machine code are passed over.
        here: begins what is said of this process.
    """
    from schedsearch.backend.compilers import COMPILERS, ENVIRONMENT_VARIABLE

    own = toolchain(kind)
    other = [
        f"{name} {made_by[name]} ({here} {own[name]})" for name in sorted(own) if made_by.get(name, own[name]) != own[name]
    ]
    if kind == "cuda" and not COMPILERS.keys() & own.keys() & made_by.keys():
        names = [f"{name} {found[name]}" for found in (made_by, own) for name in COMPILERS if name in found]
        asked = next((f"{ENVIRONMENT_VARIABLE}={name}" for name in COMPILERS if name in made_by), "")
        other += [f"{names[0]} ({here} {names[1]}; {asked} takes the other)"] if len(names) == 2 else []
    return other
