"""From a call of an operator to what computes it: a dictionary from the description of its arguments.

An operator is declared by a class, `Operation`. The first call of a description finds a kernel and binds it
(`bound.BoundCall`); without a kernel PyTorch computes it. Later calls cost one look into the dictionary. `implementation`
writes the Python function that does this for an operator's schema, because loops over arguments would double its time.

Calls with a weight that earlier calls had, by its address, are not described at all: PyTorch's compiler has a function that
compares their tensors with those of the earlier call in a third of the time (`repeated_call`).
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch.autograd import forward_ad

from schedsearch.errors import ArgumentError, UnsupportedError
from schedsearch.runtime.kernel import Kernel
from schedsearch.runtime.repeated import TENSOR_SOURCE
from schedsearch.torch.operators import store
from schedsearch.torch.operators.bound_call import BoundCall
from schedsearch.torch.operators.library import register
from schedsearch.torch.operators.repeated_call import around_dispatcher, note
from schedsearch.workload import Workload

Kind = TypeVar("Kind", bound="Operation")
Tensors = Sequence[torch.Tensor | None]
_ARGUMENT = re.compile(r"(?P<kind>\S+) (?P<name>\w+)(=(?P<default>[^,)]+))?(?=[,)])")


@dataclass(frozen=True)
class _Argument:
    """One of a schema, e.g. `Tensor? bias=None`.

    Attributes:
        kind: its type in PyTorch's words.
        default: as Python's source; None without one.
    """

    kind: str
    name: str
    default: str | None

    @property
    def value(self) -> str:
        """Python's source of its value, for a dictionary's key."""
        return f"tuple({self.name})" if self.kind.endswith("]") else self.name

    @property
    def unless_none(self) -> str:
        """Python's source of what stands before an expression that needs a tensor."""
        return f"{self.name} is not None and " if self.kind == "Tensor?" else ""


class Operation(ABC):
    """An operator; an object is one call's parameters, without its tensors.

    Attributes:
        schema: of the operator; tensors come first, then parameters, then scalars.
        scalars: names of its call-time numbers, in order.
        settings: what else chooses a kernel: functions that return settings of PyTorch.
        in_place: output of the workload -> the tensor whose memory it is; the schema marks it as written.
        builds: whether kernels are built where the allowed levels have none.
        name: of the operator, by the schema.
        tensors: names of its tensors, by the schema, in order.
        arguments: all of them, by the schema.
        signature: the arguments with their defaults, as Python's source.
        also: what a kernel is chosen by beside tensors, as Python's source: parameters, and calls of `settings`.
        numbers: names of the arguments that are `scalars`, by the schema, in order.
    """

    schema: ClassVar[str]
    scalars: ClassVar[tuple[str, ...]] = ()
    settings: ClassVar[tuple[Callable[[], Hashable], ...]] = ()
    in_place: ClassVar[Mapping[str, str]] = {}
    builds: ClassVar[bool] = False
    name: ClassVar[str]
    tensors: ClassVar[tuple[str, ...]]
    arguments: ClassVar[tuple[_Argument, ...]]
    signature: ClassVar[str]
    also: ClassVar[tuple[str, ...]]
    numbers: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        if "schema" in cls.__dict__:
            cls.name, _, arguments = cls.schema.partition(" -> ")[0].partition("(")
            cls.arguments = tuple(
                _Argument(*each.group("kind", "name", "default")) for each in _ARGUMENT.finditer(arguments)
            )
            cls.tensors = tuple(each.name for each in cls.arguments if each.kind.startswith("Tensor"))
            cls.numbers = tuple(each.name for each in cls.arguments if each.name in cls.scalars)
            cls.signature = ", ".join(
                each.name if each.default is None else f"{each.name}={each.default}" for each in cls.arguments
            )
            settings = (f"settings[{place}]()" for place in range(len(cls.settings)))
            cls.also = (*_parameters(cls), *settings)

    @classmethod
    @abstractmethod
    def of(cls, *args: Any) -> Operation:
        """The operation of a call; `args` are tensors, which may be without memory, and parameters."""

    @abstractmethod
    def check(self, given: Mapping[str, torch.Tensor]) -> None:
        """Raises ArgumentError if the tensors do not fit the parameters; `given` lacks those that are None."""

    @abstractmethod
    def workload(self, given: Mapping[str, torch.Tensor]) -> Workload:
        """The workload of tensors with elements. Raises SchedsearchError if there is none."""

    @abstractmethod
    def empty(self, given: Mapping[str, torch.Tensor]) -> Any:
        """Memory for the output, or for a tuple of outputs. Sizes may be symbolic."""

    @abstractmethod
    def plain(self, given: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> Any:
        """The same by PyTorch's own operators, with the strides of a kernel's output."""

    def accepted(self, kernel: Kernel, where: store.Store, device: torch.device) -> Kernel:
        """The kernel. Raises NoRecordError if `without_kernel` is faster."""
        return kernel

    def without_kernel(self, tensors: Tensors) -> store.Call:
        """Returns what computes calls with such tensors where no kernel serves them: PyTorch."""

        def call(tensors: Tensors, _: tuple[int, ...], numbers: tuple[float, ...]) -> Any:
            return self.plain(self.named(tensors), dict(zip(self.scalars, numbers)))

        return call

    def tensor_of(self, argument: str) -> str:
        """The tensor that is an argument of the workload."""
        return argument

    def scalar_of(self, scalar: str) -> str:
        """The number that is a scalar of the workload."""
        return scalar

    def named(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The tensors by name, without those that are None."""
        return {name: tensor for name, tensor in zip(self.tensors, tensors) if tensor is not None}


def declared(kind: type[Kind]) -> type[Kind]:
    """Registers an operator; a decorator of its class."""
    refuse = _written(kind, "    refuse_formats(kind, tensors)", refuse_formats=_refuse_formats)
    around = functools.partial(around_dispatcher, kind)
    register(kind.schema, implementation(kind), fake(kind), refuses_gradients=True, refuse=refuse, around=around)
    return kind


def implementation(kind: type[Operation]) -> Callable[..., Any]:
    """The operator on a device, as a function of the schema's arguments.

    It raises ArgumentError if the tensors do not fit each other or the parameters, or if a gradient is wanted, and
    DeviceError if the launch failed.
    """
    tensors = [each for each in kind.arguments if each.name in kind.tensors]
    wants = [f"{each.unless_none}{each.name}.requires_grad" for each in tensors]
    addresses = [
        f"{'0 if ' + each.name + ' is None else ' if each.unless_none else ''}{each.name}.data_ptr()" for each in tensors
    ]
    weight = min(1, len(tensors) - 1)
    body = f"""
    if forward_ad._current_level >= 0:
        refuse_tangents(kind)
    known = store.active.repeated.get({addresses[weight]})
    if known is not None and known[0] is kind:
        result = known[1]({", ".join(each.name for each in kind.arguments)})
        if result is not NotImplemented:
            return result
    addresses = {_tuple(addresses)}
    if is_grad_enabled() and ({" or ".join(wants)}):
        refuse_gradients(kind, tensors)
{_found(kind)}
    note(kind, addresses[{weight}], {_tuple(kind.also)}, tensors, call)
    return call(tensors, addresses, numbers)
"""
    refuse = {"refuse_gradients": _refuse_gradients, "refuse_tangents": _refuse_tangents}
    return _written(kind, body, is_grad_enabled=torch.is_grad_enabled, forward_ad=forward_ad, note=note, **refuse)


def finder(kind: type[Operation]) -> Callable[..., store.Call]:
    """What computes a call of an operator, as a function of the schema's arguments; it computes nothing.

    It raises ArgumentError if the tensors do not fit each other or the parameters.
    """
    return _written(kind, f"{_found(kind)}\n    return call")


def _found(kind: type[Operation]) -> str:
    """Python's source of how a call is found."""
    tensors = [each for each in kind.arguments if each.name in kind.tensors]
    described = [f"{each.unless_none}({TENSOR_SOURCE.format(each.name)})" for each in tensors]
    return f"""\
    key = (kind, {", ".join([*kind.also, *described])})
    try:
        call = store.active.ready[key]
    except KeyError:
        call = first_call(key, kind, tensors, {_tuple(_parameters(kind))}, numbers)"""


def fake(kind: type[Operation]) -> Callable[..., Any]:
    """The fake kernel of an operator: what it returns, without memory."""

    def allocate(tensors: Tensors, parameters: tuple[object, ...]) -> Any:
        operation, given = _checked(kind, tensors, parameters)
        return operation.empty(given)

    return _written(kind, f"    return allocate(tensors, {_tuple(_parameters(kind))})", allocate=allocate)


def _parameters(kind: type[Operation]) -> list[str]:
    """The values of the parameters as Python's source."""
    return [each.value for each in kind.arguments if each.name not in (*kind.tensors, *kind.scalars)]


def _written(kind: type[Operation], body: str, **names: Any) -> Callable[..., Any]:
    """A function with the arguments of the schema, whose body also sees them as `tensors` and `numbers`."""
    source = f"""
def {kind.name}({kind.signature}):
    tensors, numbers = {_tuple(kind.tensors)}, {_tuple(kind.numbers)}
{body}
"""
    namespace = {"kind": kind, "settings": kind.settings, "store": store, "first_call": _first_call, **names}
    exec(compile(source, f"<{kind.name}>", "exec"), namespace)
    written: Callable[..., Any] = namespace[kind.name]
    return written


def _tuple(items: Sequence[str]) -> str:
    return f"({''.join(f'{item}, ' for item in items)})"


def _refuse_gradients(kind: type[Operation], tensors: Tensors) -> None:
    for name, tensor in zip(kind.tensors, tensors):
        if tensor is not None and tensor.requires_grad:
            raise ArgumentError(
                f"{name} of torch.ops.schedsearch.{kind.name} requires a gradient, which no operator has; use "
                "torch.no_grad(), or the functions schedsearch.torch.conv2d, depthwise_conv2d, pixel_shuffle or "
                "pixel_unshuffle, which have gradients"
            )


def _refuse_tangents(kind: type[Operation]) -> None:
    raise ArgumentError(
        f"torch.ops.schedsearch.{kind.name} has no rule for forward-mode differentiation; use the functions of "
        "schedsearch.torch"
    )


def _refuse_formats(kind: type[Operation], tensors: Tensors) -> None:
    """Raises ArgumentError for the first tensor whose memory kernels cannot read."""
    for name, tensor in zip(kind.tensors, tensors):
        if tensor is not None and tensor.is_quantized:
            raise ArgumentError(
                f"{name} of {kind.name} is a quantised tensor of {tensor.dtype}; give {name}.int_repr() to "
                f"schedsearch.torch.quantized_conv2d with its scale and zero point, or {name}.dequantize()"
            )
        if tensor is not None and tensor.is_nested:
            raise ArgumentError(f"{name} of {kind.name} is a nested tensor; give one tensor, or call it for each of them")
        if tensor is not None and tensor.layout is not torch.strided:
            raise ArgumentError(f"{name} of {kind.name} has layout {tensor.layout}; give {name}.to_dense()")


def _checked(
    kind: type[Operation], tensors: Tensors, parameters: tuple[object, ...]
) -> tuple[Operation, dict[str, torch.Tensor]]:
    operation = kind.of(*tensors, *parameters)
    given = operation.named(tensors)
    _check_devices(operation, given)
    operation.check(given)
    return operation, given


def _first_call(
    key: Hashable, kind: type[Operation], tensors: Tensors, parameters: tuple[object, ...], numbers: tuple[float, ...]
) -> store.Call:
    """What computes calls with this key, after all checks."""
    operation, given = _checked(kind, tensors, parameters)
    device = next(iter(given.values())).device

    def bind(where: store.Store) -> tuple[Kernel, store.Call]:
        if not all(tensor.numel() for tensor in given.values()):
            raise UnsupportedError("there are no kernels for tensors without elements")
        kernel = operation.accepted(where.kernel(operation.workload(given), device, builds=operation.builds), where, device)
        return kernel, _bind(operation, kernel, tensors, numbers)

    shapes = " and ".join(str(tuple(tensor.shape)) for tensor in list(given.values())[:2])
    what = f"{operation.name} of {shapes}"
    return store.found(key, what, device, bind, lambda: operation.without_kernel(tensors))


def _bind(operation: Operation, kernel: Kernel, tensors: Tensors, numbers: tuple[float, ...]) -> BoundCall:
    """The kernel as a function of the operator's tensors and numbers."""
    workload = kernel.workload
    places = [operation.tensors.index(operation.tensor_of(spec.name)) for spec in workload.signature]
    scalars = {scalar.name: operation.scalars.index(operation.scalar_of(scalar.name)) for scalar in workload.scalars}
    in_place = {output: operation.tensors.index(name) for output, name in operation.in_place.items()}
    return BoundCall(kernel, places, scalars, tensors, numbers, in_place)


def _check_devices(operation: Operation, given: Mapping[str, torch.Tensor]) -> None:
    (first, like), *others = given.items()
    for name, tensor in others:
        if tensor.device != like.device:
            raise ArgumentError(
                f"{name} of {operation.name} is on {tensor.device}, {first} is on {like.device}; move it there"
            )
