"""The templates of users' kernels: the grid as the user launches it on a GPU, and walked thread by thread on a CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from schedsearch.errors import UsageError
from schedsearch.launch import MAX_BLOCK_THREADS, Literal, NumbaArray, Number, Param, Scalar
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.own_kernel import Argument, arguments_of
from schedsearch.template import Config, ConfigSpace, Constraint, Grid, KernelSource, KernelStep, Knob, Target, Template
from schedsearch.templates.own_kernel.definition import Definition, definition_of, find, unknown
from schedsearch.templates.own_kernel.rules import predicate
from schedsearch.workload import Workload

_COPY_THREADS = 256


class _OwnKernel(Template):
    op: ClassVar[str] = "own_kernel"

    def validate(self, workload: Workload, target: Target) -> str | None:
        definition = find(workload.code)
        if definition is None:
            return unknown(workload)
        try:
            definition.launch(workload, definition.default)
        except UsageError as error:
            return f"with the default configuration {dict(definition.default)}, {error}"
        return None

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        definition = definition_of(workload)
        knobs = [Knob(name, values, f"of {definition.name}") for name, values in definition.knobs.items()]
        rules = [Constraint(rule, predicate(rule, tuple(definition.knobs))) for rule in definition.rules]
        most = target.shared_bytes_per_block if target.kind == "cuda" else 0
        return ConfigSpace(knobs, [*rules, _launchable(definition, workload, most)])

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        return Config(definition_of(workload).default)


class OwnKernelCuda(_OwnKernel):
    """The kernel as it stands."""

    name: ClassVar[str] = "own_kernel_cuda"
    kind = "cuda"

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        definition, arguments = definition_of(workload), arguments_of(workload.params)
        grid, block, shared = definition.launch(workload, config)
        flat_grid, flat_block = grid[1:] == (1, 1), block[1:] == (1, 1)
        step = KernelStep(
            definition.positional,
            _params(definition, arguments, config),
            Grid(math.prod(grid), shape=() if flat_grid else grid),
            math.prod(block),
            dynamic_shared_bytes=shared,
            block_shape=() if flat_block else block,
        )
        from schedsearch.templates.own_kernel.copies import copy_on_gpu

        restoring = [
            _restoring(each, copy_on_gpu, _COPY_THREADS, _COPY_THREADS) for each in arguments if each.role == "inout"
        ]
        return KernelSource("cuda", "native", (*restoring, step))


class OwnKernelCpu(_OwnKernel):
    """An element-wise kernel, whose grid the CPU's threads walk through."""

    name: ClassVar[str] = "own_kernel_cpu"
    kind = "cpu"

    def validate(self, workload: Workload, target: Target) -> str | None:
        from schedsearch.backend.grid_walk import refused_names

        problem = super().validate(workload, target)
        if problem is not None:
            return problem
        definition = definition_of(workload)
        refused = refused_names(definition.function)
        if refused or definition.shared:
            what = f"cuda.{refused[0]}" if refused else "dynamic shared memory"
            return (
                f"{definition.name} uses {what}; on a CPU a kernel may use cuda.grid, cuda.gridsize and cuda.atomic.add, "
                "because the threads of a block do not run side by side; tune it on a GPU (target='cuda')"
            )
        return None

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        from schedsearch.backend.grid_walk import walked
        from schedsearch.templates.own_kernel.copies import copy_on_cpu

        definition, arguments = definition_of(workload), arguments_of(workload.params)
        grid, block, _ = definition.launch(workload, config)
        threads = grid[0] * block[0], grid[1] * block[1], grid[2] * block[2]
        function = walked(definition.positional, (*definition.parameters, *definition.kernel_knobs), threads)
        params = _params(definition, arguments, config)
        step = KernelStep(function, params, Grid(math.prod(threads)), target.sms)
        restoring = [_restoring(each, copy_on_cpu, 1, target.sms) for each in arguments if each.role == "inout"]
        return KernelSource("cpu", "native", (*restoring, step))


def _params(definition: Definition, arguments: tuple[Argument, ...], config: Config) -> tuple[Param, ...]:
    """The launch parameters: arguments in their order, then the knobs."""
    knobs = (Literal(config[name]) for name in definition.kernel_knobs)
    return (*(_param(each) for each in arguments), *knobs)


def _param(argument: Argument) -> Param:
    if argument.role == "scalar":
        return Scalar(argument.name, dtype=argument.dtype)
    if argument.role == "fixed":
        value = bool(argument.value) if argument.dtype == "bool" else argument.value
        return Number(value, argument.dtype)
    itemsize = dtype_of(argument.dtype).nbytes
    return NumbaArray(argument.buffer, argument.dtype, argument.shape, tuple(itemsize * each for each in argument.strides))


def _launchable(definition: Definition, workload: Workload, shared_bytes: int) -> Constraint:
    """The rule that grid, block and shared memory can be launched. Errors of the user's functions count as illegal."""
    names = tuple(definition.knobs)

    def possible(values: tuple[Any, ...]) -> bool:
        try:
            _, _, shared = definition.launch(workload, dict(zip(names, values)))
        except UsageError:
            return False
        return not shared_bytes or shared <= shared_bytes

    def holds(columns: Any) -> Any:
        rows = zip(*(np.asarray(columns[name]).tolist() for name in names))
        return np.array([possible(row) for row in rows], dtype=np.bool_)

    reason = f"grid, block (up to {MAX_BLOCK_THREADS} threads) and shared memory are within the limits"
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
