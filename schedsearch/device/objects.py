"""A first look at machine code, before a loader that trusts its input gets it.

LLVM and the CUDA driver follow the offsets in an ELF file without a check and may crash on a file that was cut off. This
module finds such files. It cannot find code that does harm: only code whose digest somebody signed gets this far.

Source: System V ABI, "ELF Header" and "Sections".
"""

from __future__ import annotations

import struct

from schedsearch.errors import DeviceError

_HEADER_BYTES, _SECTION_BYTES = 64, 64
_WITHOUT_CONTENT = (0, 8)  # sh_type: SHT_NULL, SHT_NOBITS


def check_elf(code: bytes, what: str) -> None:
    """Raises DeviceError unless `code` is a 64-bit little-endian ELF file with all of its sections; `what` names it."""
    if len(code) < _HEADER_BYTES or code[:6] != b"\x7fELF\2\1":
        raise DeviceError(f"{what} is not an ELF object ({len(code)} bytes, begins with {code[:6]!r}); tune again")
    (first,) = struct.unpack_from("<Q", code, 40)
    section_bytes, count, of_names = struct.unpack_from("<HHH", code, 58)
    if not count or section_bytes != _SECTION_BYTES or of_names >= count or first + count * section_bytes > len(code):
        raise DeviceError(f"{what} is damaged: its sections are not inside of its {len(code)} bytes; tune again")
    for number in range(count):
        kind, offset, size = struct.unpack_from("<4xI16xQQ", code, first + number * section_bytes)
        if kind not in _WITHOUT_CONTENT and offset + size > len(code):
            raise DeviceError(f"{what} is damaged: section {number} ends after its {len(code)} bytes; tune again")
