"""One machine code for several sizes: captured numbers that differ between sizes become parameters of the launch.

A template's kernel captures the sizes that it needs as numbers, and the compiler makes constants of them. The kernels of
one configuration for several sizes have the same functions, and a few of the numbers differ: tiles, rows, elements.
`shared_code` finds these by comparing the kernels, and puts a `RunTimeNumber` in the place of each. When the kernel is
compiled (`schedsearch.backend.inlining`), it becomes one more parameter. Nothing is assumed about the template: if anything
else differs, such as another function, the length of a local array or the number of threads, the sizes do not share code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import CellType, FunctionType
from typing import Any

from schedsearch.backend.inlining import RunTimeNumber
from schedsearch.backend.kernel_identity import UnidentifiedError, identity
from schedsearch.backend.signatures import signature
from schedsearch.launch import Int32, Int64
from schedsearch.template import KernelSource, KernelStep

_INT32, _INT64 = 2**31, 2**63


def shared_code(sources: Mapping[int, KernelSource]) -> list[dict[int, KernelSource]]:
    """The kernels of one configuration for several sizes, in groups that compile to the same machine code.

    Args:
        sources: size -> kernel.

    Returns:
        Groups in the order of their smallest sizes. All kernels of a group have the same functions, and the numbers that
        differ are in `KernelStep.run_time`. A kernel that shares with no other is unchanged.
    """
    groups: dict[Any, dict[int, KernelSource]] = {}
    for size, source in sources.items():
        try:
            key: Any = _shape(source)
        except UnidentifiedError:  # nobody can say whether two such kernels are the same
            key = size
        groups.setdefault(key, {})[size] = source
    return [_generalised(group) for group in groups.values()]


def _shape(source: KernelSource) -> str:
    """Everything that decides the machine code but captured numbers; `KernelStep.shaped_by` names those that do decide."""
    steps = [
        (
            _taken_apart(step.function, step.shaped_by, "", {}), list(map(str, signature(step))), step.block_threads,
            step.min_blocks_per_sm, step.max_registers, step.fastmath, step.contract, step.cluster,
            sorted(step.shaped_by or ()), step.constant, step.restores, len(step.block_shape),
        )
        for step in source.steps
    ]  # fmt: skip
    return repr((source.kind, source.arch, source.may_spill, sorted(source.alignments.items()), steps))


def _taken_apart(function: Any, shaped_by: frozenset[str] | None, prefix: str, numbers: dict[str, int]) -> Any:
    """A function without its captured numbers, which go to `numbers` by their path."""
    parts: list[Any] = []
    for own, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        name, value = prefix + own, cell.cell_contents
        if isinstance(value, FunctionType):
            parts.append(_taken_apart(value, shaped_by, name + ".", numbers))
        elif type(value) in (int, bool) and name not in (shaped_by or ()) and -_INT64 <= value < _INT64:
            numbers[name] = value
            parts.append(type(value).__name__)
        else:
            parts.append(identity(value))
    outside = id(function.__globals__), identity((function.__defaults__, function.__kwdefaults__))
    return identity(function.__code__), outside, parts


def _generalised(group: Mapping[int, KernelSource]) -> dict[int, KernelSource]:
    if len(group) == 1:
        return dict(group)
    columns = [_generalised_steps(steps) for steps in zip(*(source.steps for source in group.values()))]
    return {
        size: dataclasses.replace(group[size], steps=tuple(column[number] for column in columns))
        for number, size in enumerate(group)
    }


def _generalised_steps(steps: tuple[KernelStep, ...]) -> list[KernelStep]:
    """One step of a group's kernels: its function, with the numbers that differ as parameters."""
    captured: list[dict[str, int]] = []
    for step in steps:
        captured.append({})
        _taken_apart(step.function, step.shaped_by, "", captured[-1])
    values = {name: tuple(numbers[name] for numbers in captured) for name in captured[0]}
    differing = {name: column for name, column in values.items() if len(set(column)) > 1}
    if not differing:
        return [dataclasses.replace(step, function=steps[0].function) for step in steps]
    columns = list(dict.fromkeys(differing.values()))  # names with equal numbers share a parameter
    stand_ins = {name: RunTimeNumber(columns.index(column), type(column[0]) is bool) for name, column in differing.items()}
    function = _with_values(steps[0].function, stand_ins, "")
    kinds = [Int32 if all(-_INT32 <= value < _INT32 for value in column) else Int64 for column in columns]
    return [
        dataclasses.replace(
            step, function=function, run_time=tuple(of(int(column[number])) for of, column in zip(kinds, columns))
        )
        for number, step in enumerate(steps)
    ]


def _with_values(function: Any, values: Mapping[str, Any], prefix: str) -> Any:
    """The function with other values of what it captures, by path."""
    cells = []
    for own, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        name, value = prefix + own, cell.cell_contents
        if isinstance(value, FunctionType):
            value = _with_values(value, values, name + ".")
        cells.append(CellType(values.get(name, value)))
    code, defaults = function.__code__, function.__defaults__
    made = FunctionType(code, function.__globals__, function.__name__, defaults, tuple(cells))
    made.__kwdefaults__, made.__module__ = function.__kwdefaults__, function.__module__
    return made
