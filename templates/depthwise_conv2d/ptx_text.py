"""PTX as text: registers that are declared as they are asked for, and loads and stores of neighbours in any format.

Source: PTX ISA, "Data Movement: ld.global.nc", "Data Conversion: cvt", "Data Movement: prmt".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.templates.parts.stages import BYTES

WORD_BYTES = 4
VECTOR = {1: "", 2: ".v2", 4: ".v4"}  # registers of an access -> what its instruction says


class Text:
    """Lines of PTX with registers that are declared as they are asked for."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._counts: dict[str, int] = {}
        self._of_bytes: dict[tuple[str, str], tuple[str, str]] = {}  # (format, zero point) -> registers that hold it

    def add(self, *lines: str) -> None:
        self.lines += lines

    def new(self, kind: str, count: int = 1) -> list[str]:
        """New registers of a type: f32, b32, b16, b64 or pred."""
        first = self._counts.get(kind, 0)
        self._counts[kind] = first + count
        return [f"{kind}_{first + i}" for i in range(count)]

    def one(self, kind: str) -> str:
        return self.new(kind)[0]

    def block(self) -> str:
        """The text, in braces that hold its registers and labels."""
        declared = " ".join(f".reg .{kind} {kind}_<{count}>;" for kind, count in self._counts.items())
        return "\n".join(["{ " + declared, *self.lines, "}"])

    # ---- elements of 2 or 4 bytes and float32 registers

    def zero_point(self, name: str, dtype: str) -> None:
        """Declares the zero point that 8-bit numbers of a format have, an operand of the operation or "", for `load` and
        `widen`."""
        if dtype not in BYTES:
            return
        bias, word = self.one("f32"), self.one("b32")
        base = _literal(2.0**23 + (128 if dtype == "int8" else 0))
        self.add(f"mov.b32 {word}, 0; mov.f32 {bias}, {base};")
        if name:
            self.add(f"add.rn.f32 {bias}, ${name}, {base}; cvt.rni.s32.f32 {word}, ${name}; and.b32 {word}, {word}, 255;")
            self.add(f"mul.lo.s32 {word}, {word}, 0x01010101;")
        self._of_bytes[dtype, name] = (bias, word)

    def load(
        self, address: str, dtype: str, count: int, inside: str = "", space: str = "global.nc", zero_point: str = ""
    ) -> list[str]:
        """Loads neighbours as float32; zeros where the predicate `inside` is false. Call `widen` on the result."""
        guard = f"@{inside} " if inside else ""
        if dtype in BYTES:
            return self._load_bytes(address, count, guard, space, self._of_bytes[dtype, zero_point][1])
        nbytes = count * dtype_of(dtype).nbytes
        registers = self.new("b32" if nbytes >= WORD_BYTES else "b16", max(nbytes // WORD_BYTES, 1))
        if inside:
            self.add(*(f"mov.{'b32' if nbytes >= WORD_BYTES else 'b16'} {register}, 0;" for register in registers))
        kind, words = ("b32" if nbytes >= WORD_BYTES else "b16"), ", ".join(registers)
        words = f"{{{words}}}" if len(registers) > 1 else words
        self.add(f"{guard}ld.{space}{VECTOR[len(registers)]}.{kind} {words}, [{address}];")
        return registers

    def _load_bytes(self, address: str, count: int, guard: str, space: str, outside: str) -> list[str]:
        """Loads 8-bit numbers in words; the zero point where they are outside."""
        registers = self.new("b32", max(count // WORD_BYTES, 1))
        if guard:
            self.add(*(f"mov.b32 {register}, {outside};" for register in registers))
        kind, words = ({1: "u8", 2: "u16"}.get(count, "b32")), ", ".join(registers)
        words = f"{{{words}}}" if len(registers) > 1 else words
        self.add(f"{guard}ld.{space}{VECTOR[len(registers)]}.{kind} {words}, [{address}];")
        return registers

    def widen(self, registers: Sequence[str], dtype: str, count: int, zero_point: str = "") -> list[str]:
        """The float32 registers of loaded neighbours; of 8-bit numbers less their zero point.

        A byte becomes the lowest one of a float32 between 2^23 and 2^24, where neighbours are 1 apart; int8 is first made
        unsigned by adding 128. Two instructions for a number; conversions have a quarter of their rate.
        """
        if dtype == "float32":
            return list(registers)
        if dtype in BYTES:
            (bias, _), values = self._of_bytes[dtype, zero_point], self.new("f32", count)
            if dtype == "int8":
                words = self.new("b32", len(registers))
                self.add(*(f"xor.b32 {to}, {word}, 0x80808080;" for to, word in zip(words, registers)))
                registers = words
            for i, value in enumerate(values):
                self.add(f"prmt.b32 {value}, {registers[i // WORD_BYTES]}, 0x4B000000, {0x7440 + i % WORD_BYTES:#x};")
                self.add(f"sub.rn.f32 {value}, {value}, {bias};")
            return values
        values = self.new("f32", count)
        if dtype == "bfloat16":
            self._widen_bfloat16(registers, values)
            return values
        halves = list(registers)
        if count > 1:
            halves = self.new("b16", count)
            self.add(*(f"mov.b32 {{{halves[2 * i]}, {halves[2 * i + 1]}}}, {word};" for i, word in enumerate(registers)))
        self.add(*(f"cvt.f32.f16 {value}, {half};" for value, half in zip(values, halves)))
        return values

    def _widen_bfloat16(self, registers: Sequence[str], values: Sequence[str]) -> None:
        """A bfloat16 is the upper half of a float32."""
        if len(values) == 1:
            zero = self.one("b16")
            self.add(f"mov.b16 {zero}, 0; mov.b32 {values[0]}, {{{zero}, {registers[0]}}};")
        for i, word in enumerate(registers if len(values) > 1 else ()):
            self.add(f"shl.b32 {values[2 * i]}, {word}, 16; and.b32 {values[2 * i + 1]}, {word}, 0xffff0000;")

    def store(self, address: str, values: Sequence[str], dtype: str, inside: str, space: str = "global") -> None:
        """Stores float32 registers as neighbours, rounded to nearest even, where `inside` is true; "": always."""
        words, kind = list(values), "f32"
        if dtype in BYTES:
            words, kind = self._packed(values, dtype), {1: "u8", 2: "u16"}.get(len(values), "b32")
        elif dtype_of(dtype).nbytes == 2:
            name = {"float16": "f16", "bfloat16": "bf16"}[dtype]
            if len(values) == 1:
                words, kind = [self.one("b16")], "b16"
                self.add(f"cvt.rn.{name}.f32 {words[0]}, {values[0]};")
            else:
                words, kind = self.new("b32", len(values) // 2), "b32"
                for word, low, high in zip(words, values[::2], values[1::2]):
                    self.add(f"cvt.rn.{name}x2.f32 {word}, {high}, {low};")
        group = f"{{{', '.join(words)}}}" if len(words) > 1 else words[0]
        guard = f"@{inside} " if inside else ""
        self.add(f"{guard}st.{space}{VECTOR[len(words)]}.{kind} [{address}], {group};")

    def _packed(self, values: Sequence[str], dtype: str) -> list[str]:
        """Words of saturated integers."""
        pack, words = f"cvt.pack.sat.{'u8' if dtype == 'uint8' else 's8'}.s32.b32", []
        for i in range(0, len(values), WORD_BYTES):
            four = [*values[i : i + WORD_BYTES], *["0"] * WORD_BYTES][:WORD_BYTES]
            upper, word = self.new("b32", 2)
            self.add(f"{pack} {upper}, {four[3]}, {four[2]}, 0; {pack} {word}, {four[1]}, {four[0]}, {upper};")
            words.append(word)
        return words


def _literal(number: float) -> str:
    return "0f" + struct.pack(">f", number).hex().upper()
