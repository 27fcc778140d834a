"""Checks an operator's shape functions for one workload: against its arguments and outputs, and by calling them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from schedsearch.errors import OperatorError
from schedsearch.ops.base import Op
from schedsearch.ops.dependence import EXTENTS, Dependence, ShapeFunction, SizeError, evaluate
from schedsearch.ops.dtypes import dtype
from schedsearch.ops.specs import ArgSpec

if TYPE_CHECKING:
    from schedsearch.ops.checks import Domain

_MOST_VALUES = 4096  # of a sample; functions of more are not called
_SAMPLES = 16


def declared_shapes(op: Op, params: Mapping[str, object]) -> Mapping[str, ShapeFunction]:
    """Output -> shape function, for the outputs whose shape is not fixed by the parameters.

    Each function is called for some possible inputs: shapes up to the declared ones, zero included, and values that the
    operator is verified with.

    Raises:
        OperatorError: a function is about something that the operator lacks, or gives no possible size.
    """
    functions = op.shape_functions(params)
    if not functions:
        return {}
    arguments = {argument.name: argument for argument in op.arguments(params)}
    outputs = {output.name: output for output in op.outputs(params)}
    wanted = tuple(name for name in arguments if not is_extents(name, arguments))
    for name, function in functions.items():
        what = f"the shape function of {name} of operator {op.name}"
        if name not in outputs:
            raise OperatorError(f"{what}: there is no such output; allowed: {', '.join(outputs)}")
        if tuple(function.needs) != wanted:
            raise OperatorError(
                f"{what} declares dependences on {', '.join(function.needs) or 'nothing'}; declare one for each argument in "
                f"order: {', '.join(wanted)}"
            )
        for value in function.values:
            if dtype(arguments[value].dtype).is_float:
                raise OperatorError(f"{what} needs the values of {value}, which are {arguments[value].dtype}, not integers")
        if function.counted and f"{name}{EXTENTS}" not in outputs:
            raise OperatorError(f"{what}: extents that the kernel counts need an output {name}{EXTENTS}, int64[rank]")
        _try(function, outputs[name], arguments, op.check_inputs(params), what)
    return functions


def is_extents(name: str, arguments: Mapping[str, object]) -> bool:
    """Whether an argument or output only holds the extents of another one."""
    return name.endswith(EXTENTS) and name.removesuffix(EXTENTS) in arguments


def _try(
    function: ShapeFunction, output: ArgSpec, arguments: Mapping[str, ArgSpec], domains: Mapping[str, Domain], what: str
) -> None:
    if sum(arguments[name].size for name in function.values) > _MOST_VALUES:
        return
    for inputs in _samples(function, arguments, domains):
        if function.problem is not None:
            try:
                impossible = function.problem(*(inputs[name] for name in function.inputs))
            except Exception as error:
                raise OperatorError(f"{what}: `problem` fails for {inputs}: {type(error).__name__}: {error}") from error
            if type(impossible) not in (int, bool) or not 0 <= impossible <= len(function.messages):
                allowed = f"0 to {len(function.messages)}"
                raise OperatorError(f"{what}: `problem` returns {impossible!r} for {inputs}; allowed: {allowed}")
            if impossible:
                continue
        try:
            evaluate(function, len(output.shape), inputs)
        except SizeError as error:
            raise OperatorError(f"{what} is wrong: {error}") from error


def _samples(
    function: ShapeFunction, arguments: Mapping[str, ArgSpec], domains: Mapping[str, Domain]
) -> Iterator[dict[str, list[int]]]:
    """Possible inputs: the declared shapes first, then empty arrays, then anything."""
    rng = random.Random(0)
    for number in range(_SAMPLES):
        found: dict[str, list[int]] = {}
        for name in function.inputs:
            spec = arguments[name]
            if function.needs[name] is Dependence.SHAPE:
                smaller: Sequence[int] = [0] * len(spec.shape) if number == 1 else [rng.randint(0, n) for n in spec.shape]
                found[name] = list(spec.shape if number == 0 else smaller)
            else:
                domain = domains[name] if number % 2 == 0 else domains[name].second or domains[name]
                count = math.prod(spec.shape)
                found[name] = [
                    int(domain.values[place % len(domain.values)] if domain.ordered else rng.choice(domain.values))
                    for place in range(count)
                ]
        yield found
