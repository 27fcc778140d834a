"""Repeated calls of an operator: a function that compares and launches, and the way to it around PyTorch's dispatcher.

The function is written for the operator's schema and for the tensors that there are, as `runtime.short_call` writes that of
a kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch.autograd import forward_ad

from schedsearch.runtime.repeated import quick_matcher
from schedsearch.torch.operators import store
from schedsearch.torch.operators.bound_call import BoundCall


class Argument(Protocol):
    """See `dispatch.Operation`."""

    @property
    def kind(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def default(self) -> str | None: ...


class Declared(Protocol):
    """An operator, as its class `dispatch.Operation` describes it."""

    name: str
    schema: str
    tensors: tuple[str, ...]
    numbers: tuple[str, ...]
    signature: str
    also: tuple[str, ...]
    settings: tuple[Callable[[], Hashable], ...]
    in_place: Mapping[str, str]

    @property
    def arguments(self) -> Sequence[Argument]: ...


# The arguments of an operator -> what it returns; NotImplemented if the call does not repeat the one that was described.
Repeated = Callable[..., Any]

_KINDS = frozenset(("str", "int", "float", "bool"))  # kinds of arguments that have the same word in Python


def note(
    kind: Declared, address: int, also: tuple[Any, ...], tensors: Sequence[torch.Tensor | None], call: store.Call
) -> None:
    """Counts a call that was described. After some in a row with a weight, `store.active` knows a function for calls that
    repeat them: PyTorch compares their tensors as equal in all but numbers and addresses, in the same modes of the thread,
    and they have the same parameters and settings.

    Args:
        address: of the weight.
        also: parameters and settings, in the order of `kind.also`.
        tensors: of the call; None where there is none.
        call: computes it.
    """
    if store.active.is_repeated(address, call):
        given = [tensor for tensor in tensors if tensor is not None]
        matches = None if any(tensor.requires_grad for tensor in given) else quick_matcher(given)
        if matches is not None:
            make = _maker(cast("Hashable", kind), tuple(tensor is not None for tensor in tensors))
            compute = call.__call__ if isinstance(call, BoundCall) else call  # the method without its slot, which takes time
            store.active.repeated[address] = kind, make(also, kind.settings, matches, compute)


@functools.lru_cache(maxsize=256)
def _maker(kind: Any, there: tuple[bool, ...]) -> Callable[..., Repeated]:
    """Writes the function of repeated calls.

    Args:
        kind: a `Declared`.
        there: whether each tensor of the schema is there.
    """
    given = [name for name, is_there in zip(kind.tensors, there) if is_there]
    differs = [f"{name} is not None" for name, is_there in zip(kind.tensors, there) if not is_there]
    differs += [f"{value} != also_{place}" for place, value in enumerate(kind.also)]
    for each in kind.arguments:  # the dispatcher converts, or refuses, what is of another class
        if each.kind in _KINDS:
            differs.append(f"{each.name}.__class__ is not {each.kind}")
    differs.append(f"not matches({', '.join(given)})")
    addresses = [f"{name}.data_ptr()" if is_there else "0" for name, is_there in zip(kind.tensors, there)]
    source = f"""
def make(also, settings, matches, call):
    {_tuple([f"also_{place}" for place in range(len(kind.also))])} = also

    def repeated({kind.signature}):
        if {" or ".join(differs)}:
            return NotImplemented
        return call({_tuple(kind.tensors)}, {_tuple(addresses)}, {_tuple(kind.numbers)})

    return repeated
"""
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<repeated {kind.name}>", "exec"), namespace)
    made: Callable[..., Repeated] = namespace["make"]
    return made


def around_dispatcher(kind: Declared, operator: Callable[..., Any]) -> Callable[..., Any] | None:
    """A function that computes repeated calls itself and hands all others to PyTorch's dispatcher; None if the dispatcher
    does more for this operator than to choose what computes it, or if this version of PyTorch cannot say whether it would.

    The comparison of the tensors includes the keys by which the dispatcher would choose in this thread. They say whether a
    gradient, autocast, a transformation of functions or a trace of TorchScript takes part. Modes that see functions or
    operators, profilers and forward-mode differentiation are asked for.

    Args:
        operator: PyTorch's own, by which it calls the dispatcher.
    """
    others = [each.kind for each in kind.arguments if each.kind not in ("Tensor", "Tensor?")]
    if kind.in_place or not kind.schema.endswith(" -> Tensor") or any(each not in _KINDS for each in others):
        return None
    least, most = sum(each.default is None for each in kind.arguments), len(kind.arguments)
    weight = min(1, len(kind.tensors) - 1)
    try:  # they are private
        sees_functions, see_operators = torch._C._is_torch_function_mode_enabled, torch._C._len_torch_dispatch_stack
        is_profiled = torch._C._autograd._profiler_enabled
    except AttributeError:
        return None
    plain, parameter = torch.Tensor, torch.nn.Parameter

    def call(*args: Any, **named: Any) -> Any:
        if (
            least <= len(args) <= most
            and not named
            and ((kind_of := args[weight].__class__) is parameter or kind_of is plain)
            and forward_ad._current_level < 0
            and not (sees_functions() or see_operators() or is_profiled())
        ):
            try:
                known = store.active.repeated.get(args[weight].data_ptr())
            except RuntimeError:  # a tensor of a transformation has no memory
                known = None
            if known is not None and known[0] is kind:
                result = known[1](*args)
                if result is not NotImplemented:
                    return result
        return operator(*args, **named)

    return call


def _tuple(items: Sequence[str]) -> str:
    return f"({''.join(f'{item}, ' for item in items)})"
