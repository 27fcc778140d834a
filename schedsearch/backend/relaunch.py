"""Machine code of one workload, launched for another: for kernels that take their sizes at run time."""

from __future__ import annotations

import dataclasses
from typing import Any

from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.template import KernelSource, KernelStep


def relaunched(artifact: Artifact, made_from: KernelSource, source: KernelSource) -> Artifact | None:
    """The machine code of `made_from` with the launches of `source`; None if the two would compile to different code.

    Args:
        artifact: what `compile_source` made from `made_from`.
    """
    before, now = made_from.steps, source.steps
    if (made_from.kind, made_from.arch, len(before)) != (source.kind, source.arch, len(now)):
        return None
    if any(_code(one) != _code(other) for one, other in zip(before, now)):
        return None
    return with_launches(artifact, source)


def with_launches(artifact: Artifact, source: KernelSource) -> Artifact:
    """Machine code with the launches of a source that compiles to the same code."""
    steps = tuple(
        dataclasses.replace(
            step,
            params=new.launch_params,
            grid=new.grid,
            dynamic_shared_bytes=new.dynamic_shared_bytes,
            block_shape=new.block_shape,
            block_threads=new.block_threads,
            ahead=new.ahead if step.early else (),
        )
        for step, new in zip(artifact.plan.steps, source.steps)
    )
    plan = artifact.plan
    made = LaunchPlan(plan.kind, plan.arch, steps, dict(source.workspaces), dict(source.alignments))
    return Artifact(artifact.code, made)


def code_name(source: KernelSource) -> str | None:
    """The name of the machine code of a source, which does not depend on its launches; None if it has none."""
    from schedsearch.backend.kernel_identity import UnidentifiedError, digest
    from schedsearch.backend.signatures import signature

    steps = [
        (step.function, [str(each) for each in signature(step)], *_code(step)[3:], _bounds(step, source.kind))
        for step in source.steps
    ]
    try:
        return digest("shared code", source.kind, source.arch, steps)
    except UnidentifiedError:
        return None


def _code(step: KernelStep) -> tuple[Any, ...]:
    """Everything that decides the machine code of a step."""
    from schedsearch.backend.signatures import signature

    numbers = step.fastmath, step.contract
    return id(step.function), signature(step), _bounds(step, "cuda"), numbers, step.shaped_by, step.constant, step.restores


def _bounds(step: KernelStep, kind: str) -> tuple[int, ...]:
    """Limits that the compiler sees; on a CPU the number of threads is none."""
    threads = step.block_threads if kind == "cuda" else 0
    return threads, step.min_blocks_per_sm, step.max_registers, step.cluster
