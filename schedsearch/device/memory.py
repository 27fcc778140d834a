"""Host memory at an address."""

from __future__ import annotations

import ctypes


def bytes_at(address: int, nbytes: int) -> memoryview:
    """A writable view of the memory as bytes. The memory must outlive the view."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
