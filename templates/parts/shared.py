"""The layout of a block's dynamic shared memory: one computation for the space's constraints and for the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SharedLayout:
    """Regions of shared memory, one after the other.

    Sizes may be arrays with one value per configuration, for the formulas of a space, or single numbers for a kernel:

        >>> layout = SharedLayout.of(ring=3 * 4096, y=1024, full=3 * 8, empty=3 * 8)
        >>> layout.nbytes, layout.offset("full")
        (13360, 13312)

    Attributes:
        offsets: region -> bytes from the start of shared memory, which is aligned to 1024 bytes.
        nbytes: bytes of all regions.
    """

    offsets: Mapping[str, Any]
    nbytes: Any

    @classmethod
    def of(cls, **sizes_bytes: Any) -> SharedLayout:
        """The regions in the order of the arguments. A configuration does not use a region of 0 bytes."""
        offsets, end = {}, 0
        for region, size in sizes_bytes.items():
            offsets[region] = end
            end = end + size
        return cls(offsets, end)

    def offset(self, region: str) -> int:
        """The offset of a region in bytes, in a layout of single numbers, for a kernel to capture."""
        return int(self.offsets[region])
