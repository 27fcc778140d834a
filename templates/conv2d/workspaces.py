"""Kernels over workspaces: a template prepares arguments in workspaces, then runs another template's kernel on these."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from schedsearch.launch import Param, Pointer, TensorMap
from schedsearch.template import KernelStep


def over_workspaces(step: KernelStep, workspaces: Mapping[str, str]) -> KernelStep:
    """The step; parameters that refer to an argument in `workspaces` refer to its workspace instead."""
    return dataclasses.replace(step, params=tuple(_over_workspace(param, workspaces) for param in step.params))


def _over_workspace(param: Param, workspaces: Mapping[str, str]) -> Param:
    if isinstance(param, (Pointer, TensorMap)) and param.buffer in workspaces:
        return dataclasses.replace(param, buffer=workspaces[param.buffer])
    return param
