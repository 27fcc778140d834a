"""The templates of users' kernels: the grid as the user launches it on a GPU, and walked thread by thread on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from schedsearch.errors import UsageError
from schedsearch.launch import MAX_BLOCK_THREADS, NumbaArray, Number, Param, Scalar
from schedsearch.launch import Literal as Constant
from schedsearch.ops.dtypes import DTYPES
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.own_kernel import Argument, OwnKernelParams, arguments_of
from schedsearch.template import Config, ConfigSpace, Constraint, Grid, KernelSource, KernelStep, Knob, Target, Template
from schedsearch.templates.own_kernel.definition import (
    FORMULATION,
    Definition,
    Formulation,
    Planned,
    definition_of,
    find,
    unknown,
)
from schedsearch.templates.own_kernel.launches import ArrayShape, Launch
from schedsearch.workload import Workload

_COPY_THREADS = 256
_CPU_FLOATS = ("float32", "float64")
_CLUSTERS_SINCE = (9, 0)  # compute capability


class _OwnKernel(Template[OwnKernelParams]):
    op: ClassVar[str] = "own_kernel"

    def validate(self, workload: Workload[OwnKernelParams], target: Target) -> str | None:
        definition = find(workload.params.code)
        if definition is None:
            return unknown(workload)
        try:
            planned = definition.plan(workload, definition.default)
        except UsageError as error:
            return f"with the default configuration {dict(definition.default)}, {error}"
        return _unfit(planned, target)

    def space(self, workload: Workload[OwnKernelParams], target: Target) -> ConfigSpace:
        definition = definition_of(workload)
        knobs = [Knob(name, values, f"of {definition.name}") for name, values in definition.knobs.items()]
        return ConfigSpace(knobs, [*definition.constraints(), _launchable(definition, workload, target)])

    def default(self, workload: Workload[OwnKernelParams], target: Target, space: ConfigSpace) -> Config:
        return Config(definition_of(workload).default)

    def reuse(self, workload: Workload[OwnKernelParams]) -> Literal["never", "verified", "trusted"]:
        """Shapes and strides reach a kernel at run time."""
        definition = find(workload.params.code)
        if definition is None:
            return "never"
        return "trusted" if definition.verified_once else "verified"


class OwnKernelCuda(_OwnKernel):
    """The kernels as they stand."""

    name: ClassVar[str] = "own_kernel_cuda"
    kind = "cuda"

    def kernel(self, workload: Workload[OwnKernelParams], target: Target, config: Config) -> KernelSource:
        from schedsearch.templates.own_kernel.copies import copy_on_gpu

        definition, arguments = definition_of(workload), arguments_of(workload.params)
        planned = definition.plan(workload, config)
        steps = [
            KernelStep(
                launch.positional,
                _params(launch, arguments, planned.workspaces, config),
                Grid(math.prod(to.grid), to.blocks_per_sm, shape=() if to.grid[1:] == (1, 1) else to.grid),
                math.prod(to.block),
                dynamic_shared_bytes=to.shared,
                cluster=to.cluster,
                min_blocks_per_sm=to.min_blocks_per_sm,
                block_shape=() if to.block[1:] == (1, 1) else to.block,
                max_registers=to.max_registers,
                fastmath=to.fastmath,
            )
            for launch, to in planned.launches
        ]
        restoring = [
            _restoring(each, copy_on_gpu, _COPY_THREADS, _COPY_THREADS) for each in arguments if each.role == "inout"
        ]
        workspaces = _nbytes(planned.workspaces)
        return KernelSource("cuda", "native", (*restoring, *steps), workspaces, may_spill=True)


class OwnKernelCpu(_OwnKernel):
    """Element-wise kernels, whose grids the CPU's threads walk through."""

    name: ClassVar[str] = "own_kernel_cpu"
    kind = "cpu"

    def validate(self, workload: Workload[OwnKernelParams], target: Target) -> str | None:
        problem = super().validate(workload, target)
        if problem is not None:
            return problem
        definition = definition_of(workload)
        for each in arguments_of(workload.params):
            form = DTYPES.get(each.dtype)  # numbers may have others, too: bool and uint64
            if form is not None and form.is_float and each.dtype not in _CPU_FLOATS:
                return (
                    f"{each.name} of {definition.name} is {each.dtype}, which Numba lacks on a CPU; allowed there: "
                    f"{', '.join(_CPU_FLOATS)} and integers; convert it, or call the kernel with arrays on a GPU"
                )
        return self._refusal(definition, definition.formulations[0])

    def space(self, workload: Workload[OwnKernelParams], target: Target) -> ConfigSpace:
        definition, whole = definition_of(workload), super().space(workload, target)
        refused = [each.name for each in definition.formulations if self._refusal(definition, each)]
        if not refused:
            return whole
        runs = Constraint(
            f"{', '.join(refused)} cannot run on a CPU", lambda columns: ~np.isin(columns[FORMULATION], refused)
        )
        return ConfigSpace(whole.knobs, [*whole.constraints, runs])

    @staticmethod
    def _refusal(definition: Definition, formulation: Formulation) -> str | None:
        """Why a formulation cannot run on a CPU."""
        from schedsearch.backend.grid_walk import refused_names

        for launch in formulation.launches:
            refused = refused_names(launch.function)
            if refused or launch.shared:
                what = f"cuda.{refused[0]}" if refused else "dynamic shared memory"
                return (
                    f"{definition.name} uses {what}; on a CPU a kernel may use cuda.grid, cuda.gridsize and "
                    "cuda.atomic.add, because the threads of a block do not run side by side; tune it on a GPU "
                    "(target='cuda'), and call it with arrays there"
                )
        return None

    def kernel(self, workload: Workload[OwnKernelParams], target: Target, config: Config) -> KernelSource:
        from schedsearch.backend.grid_walk import walked
        from schedsearch.templates.own_kernel.copies import copy_on_cpu

        definition, arguments = definition_of(workload), arguments_of(workload.params)
        planned = definition.plan(workload, config)
        steps = []
        for launch, to in planned.launches:
            threads = to.grid[0] * to.block[0], to.grid[1] * to.block[1], to.grid[2] * to.block[2]
            function = walked(launch.positional, (*launch.parameters, *launch.knobs), threads)
            params = _params(launch, arguments, planned.workspaces, config)
            steps.append(KernelStep(function, params, Grid(math.prod(threads)), target.sms))
        restoring = [_restoring(each, copy_on_cpu, 1, target.sms) for each in arguments if each.role == "inout"]
        return KernelSource("cpu", "native", (*restoring, *steps), _nbytes(planned.workspaces))


def _params(
    launch: Launch, arguments: tuple[Argument, ...], workspaces: Mapping[str, ArrayShape], config: Config
) -> tuple[Param, ...]:
    """The launch parameters: arguments and workspaces in the order of the function's, then the knobs."""
    params = {each.name: _param(each) for each in arguments}
    params |= {name: NumbaArray(name, each.dtype, each.shape, each.strides) for name, each in workspaces.items()}
    return (*(params[name] for name in launch.parameters), *(Constant(config[name]) for name in launch.knobs))


def _nbytes(workspaces: Mapping[str, ArrayShape]) -> dict[str, int]:
    return {name: each.size * dtype_of(each.dtype).nbytes for name, each in workspaces.items()}


def _unfit(planned: Planned, target: Target) -> str | None:
    """Why a device cannot run some launches, as far as the user says it."""
    for launch, to in planned.launches if target.kind == "cuda" else ():
        name = launch.function.__name__
        if to.shared > target.shared_bytes_per_block:
            return (
                f"shared of {name} is {to.shared} bytes; allowed: up to {target.shared_bytes_per_block} on {target.name}; "
                "use a smaller tile"
            )
        if to.cluster > 1 and target.compute_capability < _CLUSTERS_SINCE:
            return f"{name} is launched in clusters of {to.cluster} blocks; {target.name} has none: they need sm_90 or newer"
    return None


def _param(argument: Argument) -> Param:
    if argument.role == "scalar":
        return Scalar(argument.name, dtype=argument.dtype)
    if argument.role == "fixed":
        value = bool(argument.value) if argument.dtype == "bool" else argument.value
        return Number(value, argument.dtype)
    itemsize = dtype_of(argument.dtype).nbytes
    return NumbaArray(argument.buffer, argument.dtype, argument.shape, tuple(itemsize * each for each in argument.strides))


def _launchable(definition: Definition, workload: Workload[OwnKernelParams], target: Target) -> Constraint:
    """The rule that a device can run the launches. Errors of the user's functions count as illegal."""
    names = tuple(definition.knobs)

    def possible(values: tuple[Any, ...]) -> bool:
        try:
            return _unfit(definition.plan(workload, dict(zip(names, values))), target) is None
        except UsageError:
            return False

    def holds(columns: Any) -> Any:
        rows = zip(*(np.asarray(columns[name]).tolist() for name in names))
        return np.array([possible(row) for row in rows], dtype=np.bool_)

    reason = f"grid, block (up to {MAX_BLOCK_THREADS} threads), cluster and shared memory are within the limits"
    return Constraint(reason, holds)


def _restoring(argument: Argument, function: Callable[..., None], per_item: int, threads: int) -> KernelStep:
    """The step that copies an argument to the output that the kernel updates.

    Args:
        per_item: words that a work item copies.
    """
    nbytes = math.prod(argument.shape) * dtype_of(argument.dtype).nbytes
    word = next(name for name in ("int64", "int32", "uint8") if nbytes % dtype_of(name).nbytes == 0)
    size = dtype_of(word).nbytes
    views = tuple(NumbaArray(name, word, (nbytes // size,), (size,)) for name in (argument.name, argument.buffer))
    return KernelStep(function, views, Grid(-(-nbytes // size // per_item)), threads, restores=True)
