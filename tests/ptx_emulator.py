"""Runs the PTX text of device operations, so that a test covers generated text too.

`PtxEmulator.device_op` takes the place of `schedsearch.backend.ops.device_op` in a module that generates text. It translates
the text to a Python function once, and the emulated threads call it. The instructions are those of kernels on CUDA cores:
moves, loads, stores, comparisons, float32 arithmetic, products of four bytes, conversions to and from integers and 16
bits, exchanges in a warp, matrix products of 16 bits, and forward branches. A vote is that of one thread, so it suits
kernels that compute the same on both sides of the branch.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from schedsearch.ops.dtypes import decode, encode
from schedsearch.testing.emulator import Emulator, Memory

_STATEMENT = re.compile(r"(?:@(!?)(\S+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_FLOATS = (float, np.float32)
_MASKS = {"32": 0xFFFFFFFF, "64": 0xFFFFFFFFFFFFFFFF}


class PtxEmulator(Emulator):
    """Emulates kernels whose device operations are generated as text; an access that is not aligned raises.

    Example:
        >>> emulator = PtxEmulator(Memory())
        >>> double = emulator.device_op("double", "add.f32 $y, $x, $x;", ins={"x": "f32"}, outs={"y": "f32"})
        >>> float(double(np.float32(1.5)))
        3.0
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__(memory, lambda value, *_: value, late_copies=False)

    def stand_in(self, monkeypatch: Any, *modules: Any) -> None:
        super().stand_in(monkeypatch, *modules)
        for module in modules:
            if hasattr(module, "device_op"):
                monkeypatch.setattr(module, "device_op", self.device_op)

    def device_op(
        self,
        name: str,
        ptx: str,
        *,
        ins: Mapping[str, str] | None = None,
        outs: Mapping[str, str] | None = None,
        inout: Mapping[str, tuple[str, int]] | None = None,
        unused: Iterable[str] = (),
        pure: bool = False,
        convergent: bool = False,
    ) -> Callable[..., Any]:
        """The operation as a Python function; the arguments are those of `backend.ops.device_op`."""
        source = _translated(name, ptx, list(inout or {}), list(ins or {}), outs or {})
        scope: dict[str, Any] = {
            "F": _float, "I": _integer, "H": _half, "f32": np.float32, "memory": self._load,
            "from_shared": self._load_shared, "store": self._store, "store_shared": self._store_shared,
            "to_half": _to_half, "from_half": _from_half, "wide": _signed, "maximum": np.maximum, "minimum": np.minimum,
            "prmt": _permuted, "packed": _packed, "red": self._add, "dot": _dot, "butterfly": self._butterfly,
            "field": _field, "rint": np.rint, "mma": self._multiply,
            "matrices": self._load_matrices,
        }  # fmt: skip
        exec(compile(source, f"<{name}>", "exec"), scope)  # the text of our own generators
        return scope["operation"]  # type: ignore[no-any-return]

    def _load(self, address: int, nbytes: int, count: int) -> Any:
        return _split(self.memory.at(address, nbytes * count), nbytes)

    def _load_shared(self, address: int, nbytes: int, count: int) -> Any:
        return _split(self._shared(int(address), nbytes * count), nbytes)

    def _store(self, address: int, nbytes: int, *values: Any) -> None:
        self.memory.at(address, nbytes * len(values))[:] = _joined(values, nbytes)

    def _store_shared(self, address: int, nbytes: int, *values: Any) -> None:
        self._shared(int(address), nbytes * len(values))[:] = _joined(values, nbytes)

    def _butterfly(self, value: Any, distance: int) -> Any:
        return self.block.exchange(value)[self.thread.number % 32 ^ distance]

    def warp_barrier(self) -> None:
        self.block.exchange(None)

    def _load_matrices(self, address: int, count: int, transposed: bool) -> tuple[int, ...]:
        """ldmatrix: lane (g, t) gets word t of row g of each matrix, or element g of rows 2t and 2t + 1.

        The rows of matrix i are at the addresses of lanes 8 i to 8 i + 7. PTX ISA, "ldmatrix"."""
        addresses, (g, t) = self.block.exchange(int(address)), divmod(self.thread.number % 32, 4)
        found = []
        for number in range(count):
            rows = np.array([self._shared(at, 16) for at in addresses[8 * number : 8 * number + 8]]).view(np.uint16)
            pair = rows[2 * t : 2 * t + 2, g] if transposed else rows[g, 2 * t : 2 * t + 2]
            found.append(int(pair[0]) | int(pair[1]) << 16)
        return tuple(found)

    def _multiply(self, words: Sequence[Any], before: Sequence[Any], dtype: str) -> tuple[Any, ...]:
        """mma.sync m16n8k16: four registers of A and two of B, and four sums. PTX ISA, "Matrix Fragments for
        mma.m16n8k16": a register of lane (g, t) has k = 2t and 2t + 1 of row g of A, or of column g of B."""

        def product(lanes: list[Sequence[Any]]) -> Any:
            bits = np.array([[_integer(word) & 0xFFFFFFFF for word in lane] for lane in lanes], np.uint32)
            values = from_bits(bits.view(np.uint16), dtype).reshape(8, 4, 6, 2)  # g, t, register, element
            a, b = np.zeros((2, 8, 2, 4, 2)), np.zeros((2, 4, 2, 8))
            for register in range(4):
                a[register % 2, :, register // 2] = values[:, :, register]
            for register in range(2):
                b[register] = values[:, :, 4 + register].transpose(1, 2, 0)
            return a.reshape(16, 16) @ b.reshape(16, 8)

        found, (g, t) = self.block.exchange(tuple(words), product), divmod(self.thread.number % 32, 4)
        places = ((g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1))
        return tuple(np.float32(float(_float(total)) + found[place]) for total, place in zip(before, places))

    def _add(self, address: int, value: Any) -> None:
        self.memory.at(address, 4).view(np.float32)[0] += _float(value)


# ---- registers: 32 bits are a float32 or an int, whatever was written last


def _float(value: Any) -> Any:
    if value.__class__ is np.float32:  # nearly always
        return value
    return np.float32(value) if isinstance(value, float) else np.uint32(value & 0xFFFFFFFF).view(np.float32)


def _integer(value: Any) -> int:
    if value.__class__ is int:  # nearly always
        return value
    return int(np.float32(value).view(np.uint32)) if isinstance(value, _FLOATS) else int(value)


def _half(value: Any) -> int:
    return int(value) & 0xFFFF


def _signed(value: Any) -> int:
    return (int(value) + 2**31) % 2**32 - 2**31


def _dot(a: Any, b: Any, total: Any, a_kind: str, b_kind: str) -> int:
    """The sum of four products of bytes, each signed (s32) or not (u32), and `total`."""
    formats = {"s32": np.int8, "u32": np.uint8}
    bytes_a, bytes_b = (np.array([_integer(value) & 0xFFFFFFFF], np.uint32).view(formats[kind]).astype(np.int64)
                        for value, kind in ((a, a_kind), (b, b_kind)))  # fmt: skip
    return _signed(int(bytes_a @ bytes_b) + int(total))


def _field(value: Any, first: int, bits: int, signed: bool) -> int:
    """Some bits of a word as an integer."""
    found = _integer(value) >> first & (1 << bits) - 1
    return found - (1 << bits) if signed and found >> bits - 1 else found


def _permuted(a: Any, b: Any, selector: int) -> int:
    """Four bytes of two words, each chosen by a digit of the selector ("prmt")."""
    both = (_integer(a) & 0xFFFFFFFF) | (_integer(b) & 0xFFFFFFFF) << 32
    return sum((both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i for i in range(4))


def _packed(high: Any, low: Any, upper: Any, kind: str) -> int:
    """Two saturated bytes below those of `upper` ("cvt.pack")."""
    least, most = (0, 255) if kind == "u8" else (-128, 127)
    a, b = (min(max(_signed(_integer(each)), least), most) & 255 for each in (high, low))
    return ((_integer(upper) << 16) | a << 8 | b) & 0xFFFFFFFF


def _split(data: Any, nbytes: int) -> tuple[int, ...]:
    return tuple(int(each) for each in data.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[nbytes]))


def _joined(values: Any, nbytes: int) -> Any:
    return (
        np.array([_integer(each) & (2 ** (8 * nbytes) - 1) for each in values], np.uint64)
        .astype(f"<u{nbytes}")
        .view(np.uint8)
    )


def _to_half(value: Any, dtype: str) -> int:
    return int(encode(np.array([_float(value)], np.float32), dtype).view(np.uint16)[0])


def from_bits(bits: Any, dtype: str) -> Any:
    """Numbers of 16 bits, as they lie in an array of uint16."""
    return decode(bits.view(np.float16) if dtype == "float16" else bits, dtype)


def _from_half(bits: int, dtype: str) -> Any:
    return np.float32(from_bits(np.array([bits], np.uint16), dtype)[0])


# ---- translation


def _translated(name: str, ptx: str, arrays: list[str], ins: list[str], outs: Mapping[str, str]) -> str:
    """Python source of a function `operation`; segments between labels follow one another, or are jumped to."""
    text = re.sub(r"//[^\n]*", "", ptx)
    text = re.sub(r"^\s*\{|\}\s*$", "", text.strip())
    segments: list[list[str]] = [[]]
    labels: dict[str, int] = {}
    for part in re.split(r"(?<=;)|(\b\w+:(?!:))", text):
        part = (part or "").strip()
        if part.endswith(":") and " " not in part:
            segments.append([])
            labels[part[:-1]] = len(segments) - 1
        elif part.strip("; \n") and not part.startswith(".reg"):
            segments[-1].append(part.rstrip(";").strip())
            if re.search(r"\bbra\b", part):
                segments.append([])
    lines = [f"def operation({', '.join([*arrays, *ins])}):", "    next_segment = 0"]
    for number, segment in enumerate(segments):
        lines.append(f"    if next_segment <= {number}:")
        body = [_statement(name, statement, labels) for statement in segment]
        lines += [f"        {line}" for line in body or ["pass"]]
    if outs:
        results = [f"F({name})" if kind == "f32" else name for name, kind in outs.items()]
        lines.append(f"    return {', '.join(results)}")
    return "\n".join(lines)


def _statement(name: str, statement: str, labels: Mapping[str, int]) -> str:
    found = _STATEMENT.fullmatch(statement)
    if not found:
        raise NotImplementedError(f"{name}: {statement!r}")
    negated, guard, operation, rest = found.groups()
    operands = [
        each.strip()
        for each in re.findall(r"\{[^}]*\}|\[[^][]*(?:\[\d+\][^][]*)?\](?=\s*,|\s*$)|\$\w+\[\d+\]|[^,{}]+", rest)
    ]
    operands = [each for each in operands if each]
    kind, *suffixes = operation.split(".")
    guard = f"{'not ' if negated else ''}{guard}" if guard else ""
    if kind == "bra":
        return f"next_segment = {labels[operands[0]]} if {guard or True} else next_segment"
    made = _instruction(kind, suffixes, operands)
    if not made:
        raise NotImplementedError(f"{name}: no emulation of {statement!r}")
    return f"if {guard}: {made}" if guard else made


def _names(operand: str) -> list[str]:
    """Registers of {a, b}, or one operand."""
    return [_name(each.strip()) for each in operand.strip("{}").split(",")]


def _name(operand: str) -> str:
    if re.fullmatch(r"0f[0-9A-Fa-f]{8}", operand):
        return f"f32({struct.unpack('>f', bytes.fromhex(operand[2:]))[0]!r})".replace("inf", "float('inf')")
    return operand.lstrip("$")


def _address(operand: str) -> str:
    base, _, offset = operand.strip("[]").partition("+")
    return f"int({_name(base)}) + {offset or 0}"


def _instruction(kind: str, suffixes: list[str], operands: list[str]) -> str:
    names = [_name(each) for each in operands]
    last = suffixes[-1] if suffixes else ""
    if kind in ("ld", "st", "red"):
        return _access(kind, suffixes, operands)
    if kind == "mov":
        return _move(operands)
    if kind == "ldmatrix":
        to = _names(operands[0])
        return f"{', '.join(to)} = matrices({_address(operands[1])}, {len(to)}, {'trans' in suffixes})"
    if kind == "mma":
        to, a, b, before = (", ".join(_names(each)) for each in operands)
        dtype = {"f16": "float16", "bf16": "bfloat16"}[suffixes[-2]]
        return f"{to} = mma(({a}, {b}), ({before}), {dtype!r})"
    if kind == "setp":
        compare = _COMPARISONS[suffixes[0]]
        a, b = (f"F({n})" if last == "f32" else f"int({n}) % 2**32" if last == "u32" else f"wide({n})" for n in names[1:3])
        also = f" and {names[3]}" if suffixes[1] == "and" else ""
        return f"{names[0]} = bool({a} {compare} {b}){also}"
    if kind == "activemask":
        return f"{names[0]} = 0"
    if kind == "vote":  # of one thread: kernels may take either branch
        return f"{names[0]} = {names[1]}"
    if kind == "selp":
        return f"{names[0]} = {names[1]} if {names[3]} else {names[2]}"
    floats = [f"float(F({n}))" for n in names[1:]]
    if last == "f32" and kind in ("fma", "add", "mul", "sub"):
        formula = {"fma": "{0} * {1} + {2}", "add": "{0} + {1}", "mul": "{0} * {1}", "sub": "{0} - {1}"}[kind]
        result = f"f32({formula.format(*floats)})"
        result = f"minimum(maximum({result}, f32(0)), f32(1))" if "sat" in suffixes else result
        return f"{names[0]} = {result}" if len(floats) > 1 else ""
    if last == "f32" and kind in ("max", "min"):
        return f"{names[0]} = {kind}imum(F({names[1]}), F({names[2]}))"
    if last == "f32" and kind in ("rcp", "neg", "abs"):
        formula = {"rcp": "1 / {0}", "neg": "-{0}", "abs": "abs({0})"}[kind]
        return f"{names[0]} = f32({formula.format(*floats)})"
    if kind == "cvt":
        return _conversion(suffixes, names)
    if kind == "dp4a":
        return f"{names[0]} = dot({names[1]}, {names[2]}, {names[3]}, {suffixes[0]!r}, {suffixes[1]!r})"
    if kind == "shfl":
        return f"{names[0]} = butterfly({names[1]}, {names[2]})"
    if kind == "prmt":
        return f"{names[0]} = prmt({names[1]}, {names[2]}, {names[3]})"
    if kind == "xor":
        return f"{names[0]} = I({names[1]}) ^ {names[2]}"
    if kind == "bfe":
        return f"{names[0]} = field({names[1]}, {names[2]}, {names[3]}, {last == 's32'})"
    if kind in ("mul", "mad") and last == "s32" and suffixes[0] == "lo":
        return f"{names[0]} = wide(wide({names[1]}) * int({names[2]}) + int({names[3] if kind == 'mad' else 0}))"
    if kind == "neg" and last == "s32":
        return f"{names[0]} = wide(-I({names[1]}))"
    if kind == "div" and last == "u32":
        return f"{names[0]} = (I({names[1]}) & {_MASKS['32']}) // int({names[2]})"
    if kind == "shr" and last == "u32":
        return f"{names[0]} = (I({names[1]}) & {_MASKS['32']}) >> {names[2]}"
    if kind == "add" and suffixes == ["sat", "s32"]:
        return f"{names[0]} = min(max(wide({names[1]}) + wide({names[2]}), -(2**31)), 2**31 - 1)"
    if kind == "add" and last == "s32":
        return f"{names[0]} = wide(I({names[1]}) + I({names[2]}))"
    if kind == "sub" and last == "s32":
        return f"{names[0]} = wide(I({names[1]}) - I({names[2]}))"
    if kind in ("max", "min") and last == "s32":
        return f"{names[0]} = {kind}(wide(I({names[1]})), wide(I({names[2]})))"
    if kind in ("max", "min") and last == "u32":
        return f"{names[0]} = {kind}(I({names[1]}) % 2**32, I({names[2]}) % 2**32)"
    if kind == "add":
        return f"{names[0]} = (int({names[1]}) + int({names[2]})) & {_MASKS[last[1:]]}"
    if kind == "mad":
        factor = f"wide({names[1]})" if suffixes[0] == "wide" else f"int({names[1]})"
        return f"{names[0]} = ({factor} * int({names[2]}) + int({names[3]})) & {_MASKS['64']}"
    if kind == "shl":
        return f"{names[0]} = (I({names[1]}) << {names[2]}) & {_MASKS['32']}"
    if kind == "and" and last == "pred":
        return f"{names[0]} = {names[1]} and {names[2]}"
    if kind == "and" and last == "b32":
        return f"{names[0]} = I({names[1]}) & {names[2]}"
    return ""


def _move(operands: list[str]) -> str:
    to, source = operands
    if to.startswith("{"):
        low, high = _names(to)
        return f"{low}, {high} = I({_name(source)}) & 0xFFFF, I({_name(source)}) >> 16"
    if source.startswith("{"):
        low, high = _names(source)
        return f"{_name(to)} = H({low}) | H({high}) << 16"
    return f"{_name(to)} = {_name(source)}"


def _access(kind: str, suffixes: list[str], operands: list[str]) -> str:
    nbytes = int(suffixes[-1][1:]) // 8
    shared = "shared" in suffixes
    if kind == "ld":
        to = _names(operands[0])
        loaded = f"{'from_shared' if shared else 'memory'}({_address(operands[1])}, {nbytes}, {len(to)})"
        if suffixes[-1] == "s8":
            return f"{to[0]} = field({loaded}[0], 0, 8, True)"
        return f"{', '.join(to)}{',' if len(to) == 1 else ''} = {loaded}"
    values = ", ".join(_names(operands[1]))
    if kind == "red":
        return f"red({_address(operands[0])}, {values})"
    return f"{'store_shared' if shared else 'store'}({_address(operands[0])}, {nbytes}, {values})"


def _conversion(suffixes: list[str], names: list[str]) -> str:
    formats = {"f16": "float16", "bf16": "bfloat16"}
    if suffixes[0] == "pack":
        return f"{names[0]} = packed({names[1]}, {names[2]}, {names[3]}, {suffixes[2]!r})"
    if suffixes in (["u32", "u16"], ["s64", "s32"]):
        return f"{names[0]} = {'H' if suffixes[0] == 'u32' else 'wide'}({names[1]})"
    if suffixes[:2] == ["rn", "f32"] and suffixes[2] in ("s32", "u32"):
        whole = f"wide(I({names[1]}))" if suffixes[2] == "s32" else f"I({names[1]}) & {_MASKS['32']}"
        return f"{names[0]} = f32({whole})"
    if suffixes == ["rni", "s32", "f32"]:
        return f"{names[0]} = int(rint(float(F({names[1]}))).clip(-(2**31), 2**31 - 1))"
    if suffixes[0] == "f32":
        return f"{names[0]} = from_half({names[1]}, {formats[suffixes[1]]!r})"
    target = suffixes[1]
    if target.endswith("x2"):
        dtype = formats[target[:-2]]
        return f"{names[0]} = to_half({names[2]}, {dtype!r}) | to_half({names[1]}, {dtype!r}) << 16"
    return f"{names[0]} = to_half({names[1]}, {formats[target]!r})"
