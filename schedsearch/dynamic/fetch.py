"""Sizes that the host reads in an exact run: one copy to pinned memory, one wait, and where the words belong."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

from schedsearch.device import Device
from schedsearch.device.memory import bytes_at
from schedsearch.dynamic.program import DynamicProgram
from schedsearch.ops.dependence import check_bound
from schedsearch.ops.size_steps import Words

if TYPE_CHECKING:
    from schedsearch.device.cuda import CudaDevice

_WORD = 8
_LAST_DEFAULT_STREAM = 2  # up to this, a handle means a stream of the current context


class Fetch:
    """Gets words of the block of sizes. All that does not depend on their numbers is prepared here.

    Args:
        host, address: of the first word, in pinned memory and on the device.
    """

    def __init__(self, program: DynamicProgram, words: Words, device: Device, host: int, address: int) -> None:
        nbytes = _WORD * words.count
        self.get = _copy_and_wait(device, host, address, nbytes)
        self._bytes, self._unpack = bytes_at(host, nbytes), struct.Struct(f"={words.count}q").unpack_from
        inside = range(words.first, words.first + words.count)
        self._values = [
            (value.name, slice(own.first - words.first, own.first - words.first + own.count))
            for value in program.values.values()
            if (own := value.words) is not None and own.first in inside
        ]
        self._counted = [program.values[name] for name, _ in self._values if program.values[name].counted]

    def into(self, extents: dict[str, tuple[int, ...]]) -> str | None:
        """Writes the extents of each value; returns the first one with an impossible extent, if any.

        Raises:
            SizeError: a kernel counted more than the bound of its array.
        """
        numbers: tuple[int, ...] = self._unpack(self._bytes)
        for name, own in self._values:
            extents[name] = numbers[own]
        if min(numbers) < 0:
            return next((name for name, own in self._values if min(numbers[own], default=0) < 0), None)
        for value in self._counted:
            check_bound(extents[value.name], value.shape, value.name)
        return None


def _copy_and_wait(device: Device, host: int, address: int, nbytes: int) -> Callable[[int], None]:
    """On a GPU with arguments that are packed once, and one look at the current context instead of two."""
    if device.target.kind != "cuda":

        def simply(stream: int) -> None:
            device.copy_to_host(host, address, nbytes, stream)
            device.wait(stream)

        return simply
    cuda: CudaDevice = device  # type: ignore[assignment]
    to, source, size = ctypes.c_void_p(host), ctypes.c_uint64(address), ctypes.c_size_t(nbytes)

    def quickly(stream: int) -> None:
        handle = ctypes.c_void_p(stream)
        cuda.call_quickly("cuMemcpyDtoHAsync_v2", to, source, size, handle)
        cuda.call_quickly("cuStreamSynchronize", handle)

    def copy_and_wait(stream: int) -> None:
        if stream > _LAST_DEFAULT_STREAM or cuda.is_current:
            quickly(stream)
        else:
            with cuda.current():
                quickly(stream)

    return copy_and_wait
