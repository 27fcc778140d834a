"""What a call depends on, apart from the numbers in its arrays: the one rule of every short way of a repeated call.

A call that was checked may be repeated without its checks if every argument has the same *facts* as before. An array's facts
are its class, dtype, shape, strides, device and whether it may be written. Its address is compared beside them, because some
callers only bind it anew. A number's facts are its class and its bits: -0.0 is not 0.0, and True is not 1. An argument of
any other class has no facts, and no short way.

Kernels write to memory behind PyTorch's back. `announce` tells it, as its own in-place operations do.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from schedsearch.errors import ArgumentError
from schedsearch.typed import Array

# Source of the facts of a tensor's memory, for functions that are written as text; {0} is the tensor's name.
TENSOR_SOURCE = "{0}.dtype, {0}.shape, {0}.stride(), {0}.get_device()"
_TENSOR_FACTS = f"(t.__class__, {TENSOR_SOURCE.format('t')}, t.is_neg())"
_ARRAY_FACTS = "(t.__class__, t.dtype, t.shape, t.strides, t.flags.writeable)"

_read: Callable[[Any], tuple[Any, ...]] = eval(f"lambda t: {_TENSOR_FACTS}")
_read_array: Callable[[Any], tuple[Any, ...]] = eval(f"lambda t: {_ARRAY_FACTS}")


def tensor_facts(tensor: object) -> tuple[Any, ...] | None:
    """The facts of a tensor of PyTorch; None if it has no strides, as a sparse one, or is something else. A tensor without
    memory has the facts of one on a CPU, and address 0."""
    try:
        return _read(tensor)
    except (RuntimeError, AttributeError):
        return None


def array_facts(array: Array) -> tuple[Any, ...]:
    """The facts of an array of NumPy."""
    return _read_array(array)


def numpy_facts(array: Any) -> tuple[Any, ...] | None:
    """The facts of an array of NumPy; None of anything else."""
    return _read_array(array) if type(array) is np.ndarray else None


def matcher(arrays: Sequence[Any]) -> Callable[..., bool]:
    """A function that says of as many arguments whether each has the facts that the array at its place has now, and, where
    PyTorch compares, the same wish for a gradient. It does not keep the arrays alive.

    Args:
        arrays: plain arrays of NumPy, or tensors of PyTorch.
    """
    if (quick := quick_matcher(arrays)) is not None:
        return quick
    known = [array_facts(each) if type(each) is np.ndarray else tensor_facts(each) for each in arrays]
    reads = [numpy_facts if type(each) is np.ndarray else tensor_facts for each in arrays]

    def matches(*given: Any) -> bool:
        return all(facts is not None and read(each) == facts for each, read, facts in zip(given, reads, known, strict=True))

    return matches


def quick_matcher(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """As `matcher`, but None if there is no way that is quicker than the facts: for arrays of NumPy, where a tensor is there
    twice, and where PyTorch lacks it."""
    plain = all(_is_plain_tensor(type(each)) for each in tensors) and len({id(each) for each in tensors}) == len(tensors)
    make = _guards() if tensors and plain else None
    return None if make is None else make(tensors)


@functools.cache
def _guards() -> Callable[[Sequence[Any]], Callable[..., bool]] | None:
    """Makes the function of `matcher` from what PyTorch's compiler compares tensors with, which takes a fifth of the time of
    the facts in Python. None if this version does not have it as we know it."""
    import torch

    def make(tensors: Sequence[Any]) -> Callable[..., bool]:
        sizes, strides = [list(each.shape) for each in tensors], [list(each.stride()) for each in tensors]
        guards: Any = torch._C._dynamo.guards
        check: Callable[..., bool] = guards.TensorGuards(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        ).check
        return check

    try:
        one, negated = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.complex64).conj().imag
        others = [
            torch.zeros(3, 2),
            one.new_zeros(3, 2).t(),
            one.double(),
            negated,
            one.to_sparse(),
            torch.zeros(6),
            one[:, :2],
        ]
        others += [torch.nn.Parameter(one), torch.zeros(2, 3, device="meta")]
        pair, imag = make([one, one]), make([torch.zeros(2, 3, 2)[..., 1]])
        known = pair(torch.ones(2, 3), one) and not any(pair(one, each) or pair(each, one) for each in [*others, None, 1])
        return make if known and not imag(negated) else None
    except Exception:  # it is private: whatever differs, the facts in Python serve
        return None


def facts_of(array: Any) -> tuple[Any, ...] | None:
    """The facts of an array of any class; None if it has none."""
    kind = type(array)
    if kind is np.ndarray:
        return array_facts(array)
    return tensor_facts(array) if _is_plain_tensor(kind) else None


def address_of(array: Any) -> int:
    """The address of an array that has facts."""
    return array_address(array) if type(array) is np.ndarray else array.data_ptr()


def _is_plain_tensor(kind: type) -> bool:
    """Whether it is PyTorch's class of tensors or of parameters: subclasses may compute their attributes."""
    torch = sys.modules.get("torch")
    return torch is not None and (kind is torch.Tensor or kind is torch.nn.Parameter)


def recogniser(array: Any) -> Callable[[Any], bool] | None:
    """A function that says whether an argument has the facts and the address that this array has now; None if it has no
    facts. It does not keep the array alive."""
    if type(array) is np.ndarray:
        # The address of an array whose structure is where this one's was is read through the same view: a new one takes most
        # of the time. A weak reference to the array would do, too, but NumPy does not resize arrays that have any.
        at = _view_of_address(array) if array_address is _by_structure else None
        return _array_recogniser(array_facts(array), array_address(array), id(array), at)
    facts = facts_of(array)
    return None if facts is None else _tensor_recogniser(facts, array.data_ptr())


_RECOGNISERS = f"""
def array_recogniser(facts, address, identity, at):
    def is_like(t):
        if type(t) is not ndarray or {_ARRAY_FACTS} != facts:
            return False
        return ((at.value or 0) if at is not None and id(t) == identity else array_address(t)) == address
    return is_like

def tensor_recogniser(facts, address):
    def is_like(t):
        try:
            return {_TENSOR_FACTS} == facts and t.data_ptr() == address
        except (RuntimeError, AttributeError):  # as in tensor_facts
            return False
    return is_like
"""


def is_number(value: Any) -> bool:
    """Whether it is a number that never changes. An array of NumPy without axes can change."""
    kind = type(value)
    return kind in (float, int, bool) or (isinstance(value, np.number | np.bool_) and kind.__module__ == "numpy")


def same_number(one: Any, other: Any) -> bool:
    """Whether two numbers have one class and one value. A NaN equals itself only: its bits may differ."""
    if one is other:
        return True
    if one.__class__ is not other.__class__ or one != other:
        return False
    return bool(one) or math.copysign(1.0, one) == math.copysign(1.0, other)


def same_numbers(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether each number is the same as the one at its place."""
    return len(some) == len(others) and all(map(same_number, some, others))


def _by_interface(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _by_structure(array: Array) -> int:
    """NumPy's C structure begins with the address. This takes a fifth of the time of the interface."""
    return _view_of_address(array).value or 0


def _view_of_address(array: Array) -> ctypes.c_void_p:
    """Where the structure has the address, as long as the array lives."""
    return ctypes.c_void_p.from_address(id(array) + object.__basicsize__)


def _is_structure_known() -> bool:
    if sys.implementation.name != "cpython":
        return False
    tried: list[Array] = [np.zeros(3), np.zeros((4, 5), np.int8)[1:, 2:], np.zeros(7)[::-1]]
    return all(_by_structure(each) == _by_interface(each) for each in tried)


array_address: Callable[[Array], int] = _by_structure if _is_structure_known() else _by_interface
"""The address of the first element of an array of NumPy."""

_made: dict[str, Any] = {"ndarray": np.ndarray, "array_address": array_address}
exec(_RECOGNISERS, _made)  # a call of a function that returns the facts takes a tenth of the time
_array_recogniser: Callable[..., Callable[[Any], bool]] = _made["array_recogniser"]
_tensor_recogniser: Callable[..., Callable[[Any], bool]] = _made["tensor_recogniser"]


def announce(written: Iterable[tuple[str, Any]]) -> None:
    """Tells PyTorch that a kernel is going to write to tensors: autograd then refuses gradients that need the old numbers.

    Args:
        written: names for messages, and arrays; those of other libraries are passed over.

    Raises:
        ArgumentError: a tensor requires a gradient and gradients are on, or it was made in inference mode and this is not
            inference mode. PyTorch refuses in-place operations in the same cases.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for name, array in written:
        if isinstance(array, torch.Tensor):
            announce_tensor(name, array)


def announce_tensor(name: str, tensor: Any) -> None:
    """As `announce`, for one that is known to be a tensor of PyTorch."""
    torch = sys.modules["torch"]
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"{name} requires a gradient, and a kernel writes to it without autograd; call under torch.no_grad(), or "
            f"give {name}.detach()"
        )
    if not tensor.is_inference():
        _increment()((tensor,))
    elif not torch.is_inference_mode_enabled():
        raise ArgumentError(
            f"{name} was made in inference mode, and PyTorch allows writing to it only there; call under "
            f"torch.inference_mode(), or give {name}.clone()"
        )


@functools.cache
def _increment() -> Callable[[Iterable[Any]], None]:
    """What marks tensors as changed. The public function takes twice the time, to tell one tensor from several."""
    torch = sys.modules["torch"]
    quick: Callable[[Iterable[Any]], None] | None = getattr(torch._C, "_increment_version", None)
    return quick or torch.autograd.graph.increment_version


def announcer(written: Sequence[tuple[str, Any]]) -> Callable[[], None] | None:
    """A function that does what `announce` does for the same tensors again and again; None without tensors.

    Args:
        written: what `tracked` returned.
    """
    if not written:
        return None
    tensors, increment = tuple(array for _, array in written), _increment()
    only = tensors[0]

    def announce_one() -> None:
        if only.requires_grad:
            announce(written)
        else:
            increment(tensors)

    def announce_all() -> None:
        for tensor in tensors:
            if tensor.requires_grad:
                announce(written)
                return
        increment(tensors)

    return announce_one if len(tensors) == 1 else announce_all


def tracked(outputs: Mapping[str, object], given: Iterable[str]) -> list[tuple[str, Any]]:
    """The outputs of a launch that is made many times whose changes PyTorch tracks, for `announce`.

    Args:
        given: names of those that the caller gave; PyTorch does not track others that were made in inference mode.

    Raises:
        ArgumentError: as `announce`, for those that the caller gave.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    announce([(name, outputs[name]) for name in given if name in outputs])
    return [(name, array) for name, array in outputs.items() if isinstance(array, torch.Tensor) and not array.is_inference()]
