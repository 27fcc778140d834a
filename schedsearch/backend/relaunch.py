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
    steps = tuple(
        dataclasses.replace(
            step,
            params=new.launch_params,
            grid=new.grid,
            dynamic_shared_bytes=new.dynamic_shared_bytes,
            block_shape=new.block_shape,
        )
        for step, new in zip(artifact.plan.steps, now)
    )
    plan = artifact.plan
    made = LaunchPlan(plan.kind, plan.arch, steps, dict(source.workspaces), dict(source.alignments))
    return Artifact(artifact.code, made)


def _code(step: KernelStep) -> tuple[Any, ...]:
    """Everything that decides the machine code of a step."""
    from schedsearch.backend.signatures import signature

    bounds = step.block_threads, step.min_blocks_per_sm, step.max_registers, step.cluster
    numbers = step.fastmath, step.contract
    return id(step.function), signature(step), bounds, numbers, step.shaped_by, step.constant, step.restores
