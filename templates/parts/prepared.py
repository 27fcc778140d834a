"""Kernels over workspaces: a template prepares arguments in workspaces, then runs another template's kernel on these."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from schedsearch.launch import Param, Pointer, TensorMap
from schedsearch.template import KernelSource, KernelStep


@dataclass(frozen=True)
class Prepared:
    """An argument or output of a workload in another form, in a workspace.

    Attributes:
        name: of the argument or output.
        workspace: its name.
        nbytes: of the workspace.
        step: the launch that writes the workspace, or the output; None if that of another one does.
        alignment: bytes of which the address of the argument or output must be a multiple; None: as the inner kernel says.
        is_output: the step follows the inner kernel.
    """

    name: str
    workspace: str
    nbytes: int
    step: KernelStep | None = None
    alignment: int | None = None
    is_output: bool = False


def over_prepared(inner: KernelSource, prepared: Sequence[Prepared]) -> KernelSource:
    """The inner kernel over workspaces in place of what is prepared, with the steps before and after it."""
    before, after = ([each.step for each in prepared if each.step and each.is_output == late] for late in (False, True))
    given = {each.name: each.workspace for each in prepared}
    return dataclasses.replace(
        inner,
        steps=(*before, *(over_workspaces(step, given) for step in inner.steps), *after),
        workspaces={**inner.workspaces, **{each.workspace: each.nbytes for each in prepared}},
        alignments={**inner.alignments, **{each.name: each.alignment for each in prepared if each.alignment is not None}},
    )


def over_workspaces(step: KernelStep, workspaces: Mapping[str, str]) -> KernelStep:
    """The step; parameters that refer to an argument in `workspaces` refer to its workspace instead."""
    params = tuple(_over_workspace(param, workspaces) for param in step.params)
    return dataclasses.replace(step, params=params, ahead=tuple(workspaces.get(name, name) for name in step.ahead))


def _over_workspace(param: Param, workspaces: Mapping[str, str]) -> Param:
    if isinstance(param, (Pointer, TensorMap)) and param.buffer in workspaces:
        return dataclasses.replace(param, buffer=workspaces[param.buffer])
    return param
