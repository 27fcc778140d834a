"""The short path of a call: for tensors of torch, or arrays of NumPy, that look like those of an earlier call, which was
checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from schedsearch.ops.layout import is_torch_tensor
from schedsearch.runtime.allocation import torch_allocator
from schedsearch.runtime.prepared import PreparedArgument
from schedsearch.runtime.repeated import address_of, array_address, matcher
from schedsearch.runtime.streams import current_stream, raw_stream


class Launch(Protocol):
    """A bound kernel, or several on common arrays."""

    def set_pointer(self, buffer: str, address: int) -> None:
        """Raises ArgumentError if the address lacks the alignment that a kernel requires."""

    def launch(self, stream: int = 0) -> None:
        """Raises DeviceError if it fails."""


# (arrays by position, stream) -> the results; None: no match.
ShortCall = Callable[[Sequence[Any], Any], Any]


def kernel_call(
    bound: Launch,
    arguments: Mapping[str, Any],
    outputs: Mapping[str, Any],
    device: tuple[str, int],
    library: str = "torch",
) -> ShortCall:
    """A function that allocates the outputs, launches the bound kernel and returns them (a tuple when there are several) if
    the arguments match; otherwise it does nothing and returns None.

    An argument matches if its facts are those of the checked call; its address may differ. See
    `schedsearch.runtime.repeated`. A prepared argument must be the same object. Nothing changes until all arguments have
    matched. Calls must come one at a time.

    The function raises ArgumentError if an address lacks the alignment that the kernel requires, or if the stream is not a
    stream, and DeviceError if the launch failed.

    Args:
        bound: the kernel, bound to the tensors of the checked call and the default scalars; nobody else binds it anew while
            the function is in use.
        arguments: name -> tensor, array or prepared argument of the checked call, in the order of the kernel's signature.
        outputs: name -> output of the checked call.
        device: (cpu or cuda, ordinal).
        library: torch or numpy, whose all of them are.
    """
    prepared = {place: each for place, each in enumerate(arguments.values()) if isinstance(each, PreparedArgument)}
    kept = {name: each for name, each in arguments.items() if not isinstance(each, PreparedArgument)}
    names = tuple(name for name in arguments if name in kept), tuple(outputs)
    make = _maker(len(arguments), tuple(prepared), *names, library)
    made: ShortCall = make(
        bound=bound,
        matches=matcher([*kept.values()]),
        known=[address_of(each) for each in (*kept.values(), *outputs.values())],
        prepared=[*prepared.values()],
        allocate=[_empty_like(array) for array in outputs.values()],
        current_stream=current_stream(library, device),
        raw_stream=functools.partial(raw_stream, library=library, device=device),
        array_address=array_address,
    )
    return made


@functools.lru_cache(maxsize=256)
def _maker(
    count: int, prepared: tuple[int, ...], inputs: tuple[str, ...], outputs: tuple[str, ...], library: str
) -> Callable[..., ShortCall]:
    """Writes the function of `kernel_call` without loops.

    Args:
        count: of the arguments.
        prepared: the places of those that are prepared.
        inputs: names of the others.
        outputs: names.
    """
    taken = [f"x{place}" for place in range(count)]
    kept = [name for place, name in enumerate(taken) if place not in prepared]
    results = [f"y{number}" for number in range(len(outputs))]
    differs = [f"x{place} is not prepared_x{place}" for place in prepared]
    source = f"""
def make(bound, matches, known, prepared, allocate, current_stream, raw_stream, array_address):
    {_tuple(f"known_{each}" for each in (*kept, *results))} = known
    {_tuple(f"prepared_x{place}" for place in prepared)} = prepared
    {_tuple(f"allocate_{each}" for each in results)} = allocate

    def call(args, stream):
        nonlocal {", ".join(f"known_{each}" for each in (*kept, *results))}
        if len(args) != {count}:
            return None
        {_tuple(taken)} = args
        if {" or ".join([*differs, f"not matches({', '.join(kept)})"])}:
            return None
{"".join(_moved(each, name, library) for each, name in zip(kept, inputs))}\
{"".join(f"        {each} = allocate_{each}()" + _moved(each, name, library) for each, name in zip(results, outputs))}\
        bound.launch(current_stream() if stream is None else raw_stream(stream))
        return {results[0] if len(results) == 1 else _tuple(results)}

    return call
"""
    namespace: dict[str, Any] = {}
    exec(compile(source, "<short call>", "exec"), namespace)
    made: Callable[..., ShortCall] = namespace["make"]
    return made


def _moved(array: str, buffer: str, library: str) -> str:
    """Source that binds the address of an array if it has changed. For an array without memory it declines the call."""
    return f"""
        address = {f"{array}.data_ptr()" if library == "torch" else f"array_address({array})"}
        if address != known_{array}:
            if not address:
                return None
            known_{array} = None  # until it has moved
            bound.set_pointer({buffer!r}, address)
            known_{array} = address
"""


def _tuple(items: Iterable[str]) -> str:
    return f"({''.join(f'{item}, ' for item in items)})"


def network_call(
    bound: Launch | None, given: Sequence[object], results: Sequence[object], device: tuple[str, int]
) -> ShortCall | None:
    """The short path of a network, whose ports are input0, input1, ..., output0, ...; None if there is none for such arrays.

    Args:
        bound: as of `kernel_call`.
        given, results: the inputs and outputs of a call that was checked.
    """
    arrays = (*given, *results)
    is_numpy = all(type(each) is np.ndarray for each in arrays)
    if bound is None or not (is_numpy or all(is_torch_tensor(each) for each in arrays)):
        return None
    inputs = {f"input{number}": array for number, array in enumerate(given)}
    outputs = {f"output{number}": array for number, array in enumerate(results)}
    return kernel_call(bound, inputs, outputs, device, "numpy" if is_numpy else "torch")


def _empty_like(array: Any) -> Callable[[], Any]:
    """A function that makes arrays of the same shape, strides and dtype."""
    if type(array) is np.ndarray:
        order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
        if order == list(range(array.ndim)) or array.flags.c_contiguous:
            return functools.partial(np.empty, array.shape, array.dtype)
        stored, back = tuple(array.shape[axis] for axis in order), np.argsort(order)
        return lambda: np.empty(stored, array.dtype).transpose(back)
    return torch_allocator(tuple(array.shape), array.stride(), array.dtype, array.device)
