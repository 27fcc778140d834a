"""The only table of number formats: sizes, rounding, extreme values, and how each tool names the format.

`dtype("float16")` gives a row; `encode` and `decode` move NumPy arrays into and out of the storage of formats that NumPy
lacks. The float8 formats are E4M3 and E5M2 of the OCP "8-bit Floating Point Specification" (E4M3 has no infinity).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from schedsearch.errors import UsageError, did_you_mean
from schedsearch.typed import Array


@dataclass(frozen=True)
class DType:
    """One number format.

    Attributes:
        name: the name in workloads.
        short: the name in labels of workloads.
        nbytes: bytes of one element.
        roundoff: largest relative error of rounding to nearest, 2 ** -(bits of the significand); 0 for integers.
        smallest: smallest positive number (subnormal); 1 for integers.
        lowest, largest: range of finite values.
        exact_integers: integers up to this magnitude are exact (for integers: up to `largest`).
        poison: bytes to fill an output with before a kernel runs. The first is NaN in every float format. In an integer
            format no value is always wrong, so there are several bytes: an element that a kernel does not write differs
            from the truth for at least one of them.
        storage: NumPy dtype that holds the format in memory: "uint16" for bfloat16, "uint8" for float8.
        decoded: NumPy dtype that `decode` returns; it holds every value of the format exactly.
        ptx: type of PTX instructions, e.g. "f16" in `cvt.f32.f16`.
        llvm: type that LLVM loads from memory; an integer of the same size for bfloat16 and float8.
        tma: CUtensorMapDataType without its prefix; TMA moves float8 and int8 as UINT8, and
            int16 as UINT16.
        library: name in PyTorch, ml_dtypes and array interfaces.
    """

    name: str
    short: str
    nbytes: int
    kind: Literal["float", "int", "uint"]
    roundoff: float
    smallest: float
    lowest: float
    largest: float
    exact_integers: int
    poison: tuple[int, ...]
    storage: str
    decoded: str
    ptx: str
    llvm: str
    tma: str
    library: str

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def ptx_bits(self) -> str:
        """PTX type of the untyped bits, e.g. b16."""
        return f"b{8 * self.nbytes}"


def _float(
    name: str, short: str, nbytes: int, significand: int, smallest: int, largest: float,
    storage: str, decoded: str, ptx: str, llvm: str, tma: str, library: str = "",
) -> DType:  # fmt: skip
    """`significand` counts its bits, the hidden one included; `smallest` is the exponent of the smallest subnormal."""
    return DType(
        name, short, nbytes, "float", 2.0**-significand, 2.0**smallest, -largest, largest, 2**significand, (0xFF,),
        storage, decoded, ptx, llvm, tma, library or name,
    )  # fmt: skip


def _integer(name: str, kind: Literal["int", "uint"], tma: str) -> DType:
    bits = int(name.removeprefix(kind))
    lowest, largest = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if kind == "int" else (0, 2**bits - 1)
    return DType(
        name, f"{kind[0]}{bits}", bits // 8, kind, 0.0, 1.0, lowest, largest, largest, (0x55, 0xAA),
        name, name, f"{'s' if kind == 'int' else 'u'}{bits}", f"i{bits}", tma, name,
    )  # fmt: skip


DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        row.name: row
        for row in (
            _float("float16", "f16", 2, 11, -24, 65504.0, "float16", "float16", "f16", "half", "FLOAT16"),
            _float("bfloat16", "bf16", 2, 8, -133, 255 * 2.0**120, "uint16", "float32", "bf16", "i16", "BFLOAT16"),
            _float(
                "float32", "f32", 4, 24, -149, (2**24 - 1) * 2.0**104, "float32", "float32", "f32", "float", "FLOAT32"
            ),
            _float(
                "float64", "f64", 8, 53, -1074, (2**53 - 1) * 2.0**971, "float64", "float64", "f64", "double", "FLOAT64"
            ),
            _float(
                "float8_e4m3", "e4m3", 1, 4, -9, 448.0, "uint8", "float32", "e4m3", "i8", "UINT8", "float8_e4m3fn"
            ),
            _float("float8_e5m2", "e5m2", 1, 3, -16, 57344.0, "uint8", "float32", "e5m2", "i8", "UINT8"),
            _integer("int8", "int", "UINT8"),
            _integer("uint8", "uint", "UINT8"),
            _integer("int32", "int", "INT32"),
            _integer("uint32", "uint", "UINT32"),
            _integer("int64", "int", "INT64"),
            _integer("int16", "int", "UINT16"),
            _integer("uint16", "uint", "UINT16"),
        )
    }
)  # fmt: skip

MAX_RANK = 8  # axes of an array that a kernel of a user takes
# Number format of a scalar -> its code in the module struct.
SCALAR_FORMATS = {
    "bool": "?", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I", "int64": "q",
    "uint64": "Q", "float32": "f", "float64": "d",
}  # fmt: skip
_FROM_LIBRARY = {row.library: row.name for row in DTYPES.values()}


def dtype(name: str) -> DType:
    """The row of a format.

    Raises:
        UsageError: no format has this name.

    Examples:
        >>> dtype("bfloat16").nbytes
        2
    """
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        raise UsageError(
            f"dtype {name!r} is not known{did_you_mean(str(name), DTYPES)}; allowed: {', '.join(DTYPES)}"
        ) from None


def from_library(name: str) -> str:
    """Our name of a format that PyTorch, ml_dtypes or an array interface calls `name`. Other names are returned unchanged.

    A library may use one of our names for another format: `float8_e4m3` of ml_dtypes has infinities; ours is called
    `float8_e4m3fn` there.

    Examples:
        >>> from_library("float8_e4m3fn")
        'float8_e4m3'
        >>> from_library("float8_e4m3")
        'float8_e4m3 with infinities'
    """
    found = _FROM_LIBRARY.get(name)
    return found or (f"{name} with infinities" if name in DTYPES else name)


def encode(values: object, name: str) -> Array:
    """Numbers rounded to a format, in its storage type.

    Floats round to nearest, ties to even. float8 saturates at its largest finite value, as PTX's `cvt.rn.satfinite` does;
    the larger formats overflow to infinity. Integers round to nearest even and saturate; NaN becomes 0.

    Args:
        values: numbers of any NumPy dtype and shape.
        name: of the format.

    Returns:
        The same shape, of dtype `dtype(name).storage`.
    """
    import numpy as np

    row, values = dtype(name), np.asarray(values)
    if row.kind != "float":
        return _encode_integer(values, row)
    if name == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).reshape(values.shape).view(np.uint32)
        rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
        if values.dtype.kind == "f" and (isnan := np.isnan(values)).any():
            rounded = np.where(isnan, np.uint16(0x7FC0), rounded)  # the carry of a NaN with a full payload would be zero
        return rounded
    if row.storage == "uint8":
        return _encode_float8(values, row)
    with np.errstate(over="ignore"):
        stored: Array = values.astype(row.storage)
    return stored


def decode(raw: Array, name: str) -> Array:
    """Inverse of `encode`, exact.

    Args:
        raw: an array of the storage type, or bytes (uint8) whose last axis holds whole elements.

    Returns:
        An array of `dtype(name).decoded`; a view of `raw` if the two types are the same.
    """
    import numpy as np

    row = dtype(name)
    stored = raw.view(row.storage)
    if name == "bfloat16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if row.is_float and row.storage == "uint8":
        values: Array = _float8_values(row)[stored]
        return values
    return stored


def _encode_integer(values: Array, row: DType) -> Array:
    import numpy as np

    if values.dtype.kind in "iub":
        limits = np.iinfo(values.dtype) if values.dtype.kind != "b" else np.iinfo(np.uint8)
        low, high = max(int(row.lowest), limits.min), min(int(row.largest), limits.max)
        return np.clip(values.astype(limits.dtype), low, high).astype(row.storage)
    numbers = np.nan_to_num(np.rint(values.astype(np.float64)), nan=0.0, posinf=np.inf, neginf=-np.inf)
    inside = np.clip(numbers, row.lowest, np.nextafter(float(row.largest) + 1.0, 0.0))
    whole: Array = inside.astype(row.storage)
    # Near 2**63 a float64 cannot hold the largest integer itself.
    return np.where(numbers >= float(row.largest), np.array(int(row.largest), row.storage), whole)


def _float8_values(row: DType) -> Array:
    """The 256 values of a float8 format by their bits; float32."""
    import numpy as np

    bits = np.arange(256)
    mantissa_bits = {"float8_e4m3": 3, "float8_e5m2": 2}[row.name]
    exponent_bits = 7 - mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    exponent, mantissa = (bits >> mantissa_bits) & (2**exponent_bits - 1), bits & (2**mantissa_bits - 1)
    significand = np.where(exponent > 0, 1.0, 0.0) + mantissa / 2**mantissa_bits
    values = np.ldexp(significand, np.maximum(exponent, 1) - bias)
    if row.name == "float8_e4m3":
        values[(bits & 0x7F) == 0x7F] = np.nan
    else:
        top = exponent == 2**exponent_bits - 1
        values[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    signed: Array = values * np.where(bits & 0x80, -1.0, 1.0)
    return signed.astype(np.float32)


def _encode_float8(values: Array, row: DType) -> Array:
    import numpy as np

    numbers = values.astype(np.float64)
    finite = _float8_values(row)[:0x80].astype(np.float64)
    finite = finite[finite <= row.largest]  # ascending, as bits and values of positive floats are
    magnitude = np.minimum(np.abs(np.nan_to_num(numbers, nan=0.0, posinf=np.inf, neginf=-np.inf)), row.largest)
    above = np.clip(np.searchsorted(finite, magnitude), 1, len(finite) - 1)
    below = above - 1
    up, down = finite[above] - magnitude, magnitude - finite[below]
    bits = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    bits = np.where(np.isnan(numbers), 0x7F, bits)
    return (bits | np.where(np.signbit(numbers), 0x80, 0)).astype(np.uint8)
