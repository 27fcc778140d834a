"""From a call of an operator to what computes it: a dictionary from the description of its arguments.

The first call of a description finds a kernel and binds it (`bound.BoundCall`); without a kernel PyTorch computes it. Later
calls cost one look into the dictionary.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from schedsearch.errors import ArgumentError
from schedsearch.runtime.kernel import Kernel
from schedsearch.torch import store
from schedsearch.torch.bound import BoundCall
from schedsearch.workload import Workload

Tensors = Sequence[torch.Tensor | None]


class Operation(ABC):
    """One call's parameters, without its tensors.

    Attributes:
        schema: of the operator.
        name: of the operator.
        tensors: names of its tensors, in order.
        scalars: names of its call-time numbers, in order.
    """

    schema: ClassVar[str]
    name: ClassVar[str]
    tensors: ClassVar[tuple[str, ...]]
    scalars: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abstractmethod
    def of(cls, *args: Any) -> Operation:
        """The operation of a call; `args` are those of the operator, which may be without memory."""

    @abstractmethod
    def check(self, given: Mapping[str, torch.Tensor]) -> None:
        """Raises ArgumentError if the tensors do not fit the parameters; `given` lacks those that are None."""

    @abstractmethod
    def workload(self, given: Mapping[str, torch.Tensor]) -> Workload:
        """Raises SchedsearchError if there is none."""

    @abstractmethod
    def empty(self, given: Mapping[str, torch.Tensor]) -> Any:
        """Memory for the output, or for a tuple of outputs. Sizes may be symbolic."""

    @abstractmethod
    def plain(self, given: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> Any:
        """The same by PyTorch's own operators, with the strides of a kernel's output."""

    def accepted(self, kernel: Kernel, where: store.Store, device: torch.device) -> Kernel:
        """The kernel. Raises NoRecordError if `plain` is faster."""
        return kernel

    def tensor_of(self, argument: str) -> str:
        """The tensor that is an argument of the workload."""
        return argument

    def scalar_of(self, scalar: str) -> str:
        """The number that is a scalar of the workload."""
        return scalar

    def named(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The tensors by name, without those that are None."""
        return {name: tensor for name, tensor in zip(self.tensors, tensors) if tensor is not None}


def fake(kind: type[Operation]) -> Callable[..., Any]:
    """The fake kernel of an operator: what it returns, without memory."""

    def allocate(*args: Any) -> Any:
        operation = kind.of(*args)
        given = operation.named(args[: len(kind.tensors)])
        operation.check(given)
        return operation.empty(given)

    return allocate


def description(tensor: torch.Tensor | None) -> Hashable:
    """What two tensors share if the same call can take both."""
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device())


def run(kind: type[Operation], tensors: Tensors, parameters: tuple[Any, ...], numbers: tuple[float, ...] = ()) -> Any:
    """Computes a call whose key is its description.

    Args:
        parameters: what `kind.of` takes behind the tensors; hashable.
        numbers: the values of `kind.scalars`.

    Raises:
        ArgumentError: the tensors do not fit each other or the parameters, or a gradient is wanted.
        DeviceError: the launch failed.
    """
    if torch.is_grad_enabled():
        refuse_gradients(kind, tensors)
    key = (kind.name, parameters, *map(description, tensors))
    call = store.active.ready.get(key) or first_call(key, kind, tensors, parameters, numbers)
    return call(tensors, numbers)


def refuse_gradients(kind: type[Operation], tensors: Tensors) -> None:
    """Raises ArgumentError if a tensor requires a gradient, which the operator does not have."""
    for name, tensor in zip(kind.tensors, tensors):
        if tensor is not None and tensor.requires_grad:
            raise ArgumentError(
                f"{name} of torch.ops.schedsearch.{kind.name} requires a gradient, which the operator does not have; call "
                "the function in schedsearch.torch, or use torch.no_grad()"
            )


def first_call(
    key: Hashable, kind: type[Operation], tensors: Tensors, parameters: tuple[Any, ...], numbers: tuple[float, ...]
) -> store.Call:
    """What computes calls with this key, after all checks. Raises as `run`."""
    operation = kind.of(*tensors, *parameters)
    given = operation.named(tensors)
    _check_devices(operation, given)
    operation.check(given)
    return _found(key, operation, given, numbers)


def _found(
    key: Hashable, operation: Operation, given: Mapping[str, torch.Tensor], numbers: tuple[float, ...]
) -> Callable[[Tensors, tuple[float, ...]], Any]:
    device = next(iter(given.values())).device

    def plain(tensors: Tensors, numbers: tuple[float, ...]) -> Any:
        return operation.plain(operation.named(tensors), dict(zip(operation.scalars, numbers)))

    def bind(where: store.Store) -> tuple[Kernel, store.Call]:
        kernel = operation.accepted(where.kernel(operation.workload(given), device), where, device)
        return kernel, _bind(operation, kernel, given, numbers)

    shapes = " and ".join(str(tuple(tensor.shape)) for tensor in list(given.values())[:2])
    return store.found(key, f"{operation.name} of {shapes}", device, bind, plain)


def _bind(
    operation: Operation, kernel: Kernel, given: Mapping[str, torch.Tensor], numbers: tuple[float, ...]
) -> Callable[[Tensors, tuple[float, ...]], Any]:
    """The kernel as a function of the operator's tensors and numbers."""
    workload = kernel.workload
    names = {spec.name: operation.tensor_of(spec.name) for spec in workload.signature}
    scalars = [(scalar.name, operation.scalars.index(operation.scalar_of(scalar.name))) for scalar in workload.scalars]
    values = {name: numbers[place] for name, place in scalars}
    bound = BoundCall(kernel, {name: given[tensor] for name, tensor in names.items()}, values)
    places = [operation.tensors.index(tensor) for tensor in names.values()]
    pick: Callable[[Any], Any] = operator.itemgetter(*places)
    if len(places) == 1:
        (only,) = places
        pick = operator.itemgetter(slice(only, only + 1))
    if not scalars:
        return lambda tensors, numbers: bound(pick(tensors), values)
    last = numbers, values

    def call(tensors: Tensors, numbers: tuple[float, ...]) -> Any:
        nonlocal last
        known, values = last
        if known != numbers:
            values = {name: numbers[place] for name, place in scalars}
            last = numbers, values
        return bound(pick(tensors), values)

    return call


def _check_devices(operation: Operation, given: Mapping[str, torch.Tensor]) -> None:
    first = next(iter(given.items()))
    for name, tensor in given.items():
        if tensor.device != first[1].device:
            raise ArgumentError(
                f"{name} of {operation.name} is on {tensor.device}, {first[0]} is on {first[1].device}; move it there"
            )
        if tensor.layout is not torch.strided:
            raise ArgumentError(f"{name} of {operation.name} has layout {tensor.layout}; give {name}.to_dense()")
