"""What a cubin, a 64-bit little-endian ELF file, says about its kernels.

Source: System V ABI, "Sections" and "Symbol Table".
"""

from __future__ import annotations

import struct

_SYMBOL_TABLE = 2  # sh_type
_SHARED = ".nv.shared."
_RESERVED = ".nv.reservedSmem.cap"  # its value is what the system reserves at the start of a block's shared memory


_CODE = ".text."


def machine_code(cubin: bytes) -> dict[str, bytes]:
    """Entry -> its instructions."""
    sections, names = _sections(cubin)
    found = {_text(cubin, names + name): cubin[offset : offset + size] for name, _, _, _, offset, size, _ in sections}
    return {name.removeprefix(_CODE): code for name, code in found.items() if name.startswith(_CODE)}


def static_shared_bytes(cubin: bytes) -> dict[str, int]:
    """Entry -> bytes of its static shared arrays. The linker lays them out, so that ptxas's log does not tell."""

    def text(place: int) -> str:
        return _text(cubin, place)

    sections, names = _sections(cubin)
    reserved = 0
    for _, kind, _, _, offset, size, link in sections:
        if kind == _SYMBOL_TABLE:
            for name, _, _, _, value, _ in struct.iter_unpack("<IBBHQQ", cubin[offset : offset + size]):
                if text(sections[link][4] + name) == _RESERVED:
                    reserved = value
    found = {text(names + name): size for name, _, _, _, _, size, _ in sections}
    return {name.removeprefix(_SHARED): size - reserved for name, size in found.items() if name.startswith(_SHARED)}


def _sections(cubin: bytes) -> tuple[list[tuple[int, ...]], int]:
    """The headers of all sections (name, type, flags, address, offset, size, link), and where their names are."""
    first, header_bytes, count, of_names = *struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQI", cubin, first + number * header_bytes) for number in range(count)]
    return sections, sections[of_names][4]


def _text(cubin: bytes, place: int) -> str:
    return cubin[place : cubin.index(b"\0", place)].decode()
