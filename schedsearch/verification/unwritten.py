"""Which elements of outputs a kernel never writes, and how messages name elements."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence

import numpy as np

from schedsearch.device import BoundKernel, Device
from schedsearch.ops import ArgSpec
from schedsearch.ops.dtypes import dtype
from schedsearch.ops.layout import Layout
from schedsearch.typed import Array

_PROBES = (0x3C, 0xC3)  # neither is in guards or workspaces, which a kernel may copy


def unwritten(
    device: Device, bound: BoundKernel, outputs: Sequence[ArgSpec], addresses: Mapping[str, int]
) -> dict[str, Array]:
    """Output -> which of its elements hold what was there before a launch, whatever that was; bool, flat.

    The kernel is launched twice, over different contents: either may be a result, but not both.

    Args:
        addresses: output -> its address in the device's memory.

    Raises:
        DeviceError: the kernel fails on the device.
    """
    kept = {output.name: np.ones(output.size, bool) for output in outputs}
    for byte in _PROBES:
        for output in outputs:
            device.fill(addresses[output.name], byte, output.span_bytes)
        bound.launch()
        device.synchronize()
        for output in outputs:
            kept[output.name] &= _consists_of(device, output, addresses[output.name], byte)
    return kept


def _consists_of(device: Device, output: ArgSpec, address: int, byte: int) -> Array:
    """Which elements of an output consist of this byte alone."""
    itemsize = dtype(output.dtype).nbytes
    raw = np.empty(output.span_bytes, np.uint8)
    device.copy_out(raw.data, address)
    elements = raw.view(f"u{itemsize}")
    run, step = output.runs
    if run != step and output.size:
        strides = (step * itemsize, itemsize)
        elements = np.lib.stride_tricks.as_strided(elements, (output.size // run, run), strides).reshape(-1)
    filled: Array = elements == int.from_bytes(bytes([byte]) * itemsize, "little")
    return filled


def unwritten_text(output: ArgSpec, kept: Array, wrong: int) -> str:
    """Says how many elements were never written, which is the first, and how many others are wrong; "" if all were written.

    Args:
        kept: which elements were not written.
        wrong: how many elements are wrong in all.
    """
    count = int(np.count_nonzero(kept))
    if not count:
        return ""
    was, first = "was" if count == 1 else "were", element_text(output, int(np.argmax(kept)))
    others = f"; {wrong - count:,} others are wrong" if wrong > count else ""
    return f"{output.name}: {count:,} of {output.size:,} elements {was} never written, the first is {first}{others}"


def element_text(spec: ArgSpec, flat: int) -> str:
    """An element by its flat index: y[n=0, h=3], or y[0, 3] where axes have no names (A, B and so on). Blocks of a layout
    count as axes of their own."""
    letters = tuple(spec.axes) if len(spec.axes) == len(spec.shape) else Layout.parse(spec.axes).dimensions
    places = dict(zip(letters, map(int, np.unravel_index(flat, spec.shape))))
    if sorted(places) == list(string.ascii_uppercase[: len(places)]):
        return f"{spec.name}[{', '.join(str(places[letter]) for letter in sorted(places))}]"
    return f"{spec.name}[{', '.join(f'{letter.lower()}={place}' for letter, place in places.items())}]"
