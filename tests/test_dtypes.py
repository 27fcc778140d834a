"""The table of number formats: values known from the formats' definitions, and rounding as other libraries do it."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedsearch.errors import UsageError
from schedsearch.ops import DTYPES, decode, dtype, encode
from schedsearch.ops.dtypes import from_library

FLOATS = [name for name, row in DTYPES.items() if row.is_float]
INTEGERS = [name for name, row in DTYPES.items() if not row.is_float]


def test_the_formats_of_numpy_agree_with_numpy() -> None:
    for name in ("float16", "float32", "float64"):
        row, facts = dtype(name), np.finfo(name)
        assert (row.nbytes, row.largest, row.lowest) == (facts.bits // 8, float(facts.max), float(facts.min)), name
        assert (row.smallest, row.roundoff) == (float(facts.smallest_subnormal), float(facts.eps) / 2), name
    for name in INTEGERS:
        limits = np.iinfo(name)
        assert (dtype(name).nbytes, dtype(name).lowest, dtype(name).largest) == (limits.bits // 8, limits.min, limits.max)


@pytest.mark.parametrize(
    ("name", "largest", "smallest"),
    [
        ("bfloat16", float.fromhex("0x1.fep127"), 2.0**-133),
        ("float8_e4m3", 448.0, 2.0**-9),
        ("float8_e5m2", 57344.0, 2.0**-16),
    ],
)
def test_the_other_formats_have_the_extremes_of_their_definition(name: str, largest: float, smallest: float) -> None:
    assert (dtype(name).largest, dtype(name).smallest) == (largest, smallest)


@pytest.mark.parametrize("name", FLOATS)
def test_whole_numbers_are_exact_up_to_the_limit_and_not_beyond(name: str) -> None:
    limit = dtype(name).exact_integers
    if name in ("float16", "bfloat16", "float8_e4m3", "float8_e5m2"):
        whole = np.arange(limit + 1, dtype=np.float64)
        assert (decode(encode(whole, name), name) == whole).all()
    beyond = np.array([limit + 1.0])
    assert (decode(encode(beyond, name), name).astype(np.float64) != limit + 1).all() or name == "float64"


@pytest.mark.parametrize("name", DTYPES)
def test_every_value_survives_storage(name: str) -> None:
    bits = np.arange(2**16, dtype=np.uint16).view(np.uint8) if dtype(name).nbytes == 2 else np.arange(256, dtype=np.uint8)
    values = decode(np.repeat(bits, 1) if dtype(name).nbytes <= 2 else np.tile(bits, 8), name)
    again = decode(encode(values, name), name)
    assert ((values == again) | (np.isnan(values) & np.isnan(again)) | np.isinf(values)).all()
    assert values.dtype == dtype(name).decoded


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3", "float8_e5m2"])
def test_rounding_is_to_the_nearest_with_ties_to_even(name: str) -> None:
    """Every midpoint between two neighbours, and the numbers next to it."""
    count = 0x7F80 if name == "bfloat16" else 0x7F if name == "float8_e4m3" else 0x7C  # the first value that is not finite
    bits = np.arange(count).astype(dtype(name).storage)
    values = decode(bits, name).astype(np.float64)
    middle = (values[:-1] + values[1:]) / 2
    even = np.where(bits[:-1] % 2 == 0, bits[:-1], bits[1:])
    exact = np.float32(middle).astype(np.float64) == middle
    assert exact.mean() > 0.9
    assert (encode(middle, name) == even)[exact].all()
    wide = np.abs(middle) > 1e-30  # encode goes through float32 for bfloat16, which has values next to the midpoint
    assert (encode(np.nextafter(middle.astype(np.float32), np.float32(0)), name) == bits[:-1])[exact & wide].all()
    assert (encode(np.nextafter(middle.astype(np.float32), np.float32(np.inf)), name) == bits[1:])[exact & wide].all()
    assert (decode(encode(-middle, name), name) == -decode(encode(middle, name), name)).all()


def test_floats_too_large_saturate_in_float8_and_overflow_elsewhere() -> None:
    huge = np.array([1e6, -1e6, np.inf])
    assert decode(encode(huge, "float8_e4m3"), "float8_e4m3").tolist() == [448.0, -448.0, 448.0]
    assert decode(encode(huge, "float8_e5m2"), "float8_e5m2").tolist() == [57344.0, -57344.0, 57344.0]
    assert decode(encode(huge, "float16"), "float16").tolist() == [np.inf, -np.inf, np.inf]


@pytest.mark.parametrize("name", FLOATS)
def test_nan_stays_nan_and_poison_is_nan(name: str) -> None:
    assert np.isnan(decode(encode(np.array([np.nan, -np.nan]), name), name)).all()
    (byte,) = dtype(name).poison
    assert np.isnan(decode(np.full(dtype(name).nbytes, byte, np.uint8), name)).all()


@pytest.mark.parametrize("name", INTEGERS)
def test_no_integer_equals_both_of_its_poisons(name: str) -> None:
    first, second = (decode(np.full(dtype(name).nbytes, byte, np.uint8), name)[0] for byte in dtype(name).poison)
    assert first != second


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_round_to_even_and_saturate(name: str) -> None:
    low, high = int(dtype(name).lowest), int(dtype(name).largest)
    given = np.array([0.5, 1.5, 2.5, np.nan, np.inf, -np.inf, 1e30, -1e30])
    assert [int(value) for value in encode(given, name)] == [0, 2, 2, 0, high, low, high, low]
    assert encode(np.array([-(2**40), 5, 2**40], np.int64), name).tolist() == [max(low, -(2**40)), 5, min(high, 2**40)]


@given(st.floats(width=32, allow_nan=False))
def test_float16_and_bfloat16_round_as_numpy_and_the_nearest_neighbour(value: float) -> None:
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    below, above = bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000
    got = float(decode(encode(np.array([value], np.float32), "bfloat16"), "bfloat16")[0])
    neighbours = [struct.unpack("<f", struct.pack("<I", each))[0] for each in (below, above)]
    if all(map(np.isfinite, neighbours)):
        assert got in neighbours and abs(got - value) == min(abs(each - value) for each in neighbours)
    with np.errstate(over="ignore"):
        assert encode(np.array([value]), "float16")[0] == np.float16(value)


def test_an_unknown_format_is_refused_with_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"dtype 'float61' is not known \(did you mean 'float"):
        dtype("float61")


def test_names_of_libraries_are_ours_or_stay() -> None:
    assert [from_library(name) for name in ("float8_e4m3fn", "bfloat16", "float32", "complex64")] == [
        "float8_e4m3", "bfloat16", "float32", "complex64"
    ]  # fmt: skip
    assert {from_library(row.library) for row in DTYPES.values()} == set(DTYPES)


def test_tma_knows_the_name_of_every_format() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="needs the CUDA bindings")
    known = set(driver.CUtensorMapDataType.__members__)
    assert {f"CU_TENSOR_MAP_DATA_TYPE_{row.tma}" for row in DTYPES.values()} <= known


def test_llvm_knows_the_type_of_every_format() -> None:
    llvm = pytest.importorskip("llvmlite.binding", reason="needs llvmlite")
    for row in DTYPES.values():
        llvm.parse_assembly(f"define void @f(ptr %p) {{\n %v = load {row.llvm}, ptr %p\n ret void\n}}").verify()
