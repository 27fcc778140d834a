"""The machine code of programs: kernels of workloads, and kernels that compute the sizes of segments."""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from schedsearch.dynamic.program import DynamicProgram
from schedsearch.executable.kernels import Kernels, find_kernels
from schedsearch.executable.program import ChosenKernel
from schedsearch.launch import Artifact
from schedsearch.measurement import COLD_GRAPH
from schedsearch.ops.size_steps import SizeStep
from schedsearch.runtime.fallback import LEVELS
from schedsearch.target import Target
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from schedsearch.backend import BuildResult
    from schedsearch.runtime.ahead import Recipe

SizeCode = Mapping[tuple[int, bool], Artifact]  # (number of a segment, whether the run is bounded) -> kernel of its sizes


def machine_code(
    programs: Sequence[DynamicProgram],
    db: str | os.PathLike[str],
    target: Target,
    *,
    mode: str = COLD_GRAPH,
    strict: bool = False,
    allow: Iterable[str] = LEVELS,
    known: Mapping[Workload, ChosenKernel] | None = None,
) -> tuple[Kernels, list[SizeCode]]:
    """All kernels of some programs, compiled at once; see `find_kernels`, which has the arguments and the errors.

    Returns:
        Kernels by workload, and those of sizes for each program.

    Raises:
        RejectedError: a kernel of sizes cannot be compiled.
    """
    sizes = [_recipes(each) for each in programs]
    workloads = [call.workload for each in programs for segment in each.segments for call in segment.calls]
    recipes = [recipe for each in sizes for recipe in each.values()]
    found = find_kernels(workloads, db, target, mode=mode, strict=strict, allow=allow, also=recipes, known=known)
    return found, [{place: found.others[recipe] for place, recipe in each.items()} for each in sizes]


def size_artifact(program: DynamicProgram, target: Target, number: int, bounded: bool) -> Artifact:
    """The kernel that computes the sizes of a segment, compiled now. Raises CompileError if it cannot be."""
    return _sizes(program.segments[number].steps, program.words, number if bounded else None, target).artifact


def _recipes(program: DynamicProgram) -> dict[tuple[int, bool], Recipe[BuildResult]]:
    from schedsearch.runtime.ahead import Recipe

    found = {}
    for number, segment in enumerate(program.segments):
        for bounded in (False, True) if segment.steps else ():
            make = functools.partial(_sizes, segment.steps, program.words, number if bounded else None)
            found[number, bounded] = Recipe(f"sizes {uuid.uuid4().hex}", make)
    return found


def _sizes(steps: Sequence[SizeStep], words: int, status: int | None, target: Target) -> BuildResult:
    from schedsearch.backend.kept import compile_kept
    from schedsearch.templates.parts.sizes import sizes_source

    return compile_kept(sizes_source(steps, words, target, status), target)
