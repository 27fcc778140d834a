"""The stage `requantise_add` on a GPU: its text, executed instruction by instruction, against the model in NumPy."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import integer_model
import numpy as np
import pytest
from exact_ptx import rounded, run_ptx
from ptx_emulator import PtxEmulator

from schedsearch import WorkloadError
from schedsearch.constructors.convolutions import conv2d
from schedsearch.templates.parts import epilogue, epilogue_fragments
from schedsearch.templates.parts.epilogue_fragments import TileRows
from schedsearch.templates.parts.stages import STAGE_CODES
from schedsearch.testing.emulator import Memory
from schedsearch.workload import Workload

Array = np.ndarray[Any, Any]
CHANNELS, ROWS, COLUMNS = 32, 8, 6
FORMATS = [("int8", "int8", "int8", False), ("uint8", "uint8", "int8", True), ("uint8", "int8", "uint8", False)]


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[PtxEmulator]:
    cached = (
        epilogue._operation, epilogue_fragments.fragments_operation, epilogue_fragments.load_ahead_operation,
        epilogue_fragments.transposed_operation,
    )  # fmt: skip
    emulator = PtxEmulator(Memory())
    emulator.stand_in(monkeypatch, epilogue, epilogue_fragments)
    for function in cached:
        function.cache_clear()
    yield emulator
    for function in cached:
        function.cache_clear()


class Layer:
    """An image of sums, with the operands of an epilogue in an emulator's memory."""

    def __init__(self, emulator: PtxEmulator, to: str, middle: str, residual: str, relu: bool) -> None:
        params = {"to": to, "middle": middle, "residual": residual, "relu": relu}
        self.workload = conv2d(
            n=1, h=ROWS, w=COLUMNS, c=16, k=CHANNELS, r=1, s=1, dtype="int8", epilogue=["bias", {"requantise_add": params}]
        )
        self.arrays = integer_model.arguments(self.workload)
        self.sums = np.random.default_rng(1).integers(-20000, 20000, (ROWS * COLUMNS, CHANNELS))
        values = {name: emulator.memory.add(array) for name, array in self.arrays.items()} | integer_model.SCALARS
        self.epilogue = epilogue.Epilogue(self.workload)
        names = [operand.name for operand in self.epilogue._operands]
        self.operands = [values.get(name, 0) for name in names]
        total, residual_codes = self.sums + self.arrays["bias"], self.arrays["residual"].reshape(self.sums.shape)
        self.expected = integer_model.added(total, residual_codes, self.arrays["requantise_scale"], params)
        self.limits = integer_model.limits(to)

    def check(self, found: Array, rows: Any, columns: Any) -> None:
        """Registers hold numbers that are not saturated yet: the instruction that packs them does so."""
        wanted = self.expected[np.ix_(rows, columns)]
        assert len(np.unique(wanted)) > 4
        np.testing.assert_array_equal(np.clip(found, *self.limits), wanted)


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_one_value_and_pairs(emulator: PtxEmulator, formats: tuple[str, str, str, bool]) -> None:
    layer = Layer(emulator, *formats)
    rows, channels = range(5), range(CHANNELS)
    one = [
        [layer.epilogue.single(layer.sums[m, k], 1, k, m * CHANNELS + k, *layer.operands) for k in channels] for m in rows
    ]
    layer.check(np.array(one), rows, channels)
    pairs = [
        [layer.epilogue.pair(*layer.sums[m, k : k + 2], 1, k, m * CHANNELS + k, *layer.operands) for k in channels[::2]]
        for m in rows
    ]
    layer.check(np.array(pairs).reshape(len(rows), CHANNELS), rows, channels)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_fragments_of_columns(emulator: PtxEmulator, formats: tuple[str, str, str, bool], interleaved: bool) -> None:
    """The second row of a fragment is 8 below the first. Residuals of interleaved columns are loaded ahead."""
    layer, octets = Layer(emulator, *formats), CHANNELS // 8
    fuse = layer.epilogue.fragments(octets, 8 * CHANNELS, interleaved, ahead=interleaved)
    ahead = [[0] * count] if (count := layer.epilogue.words_ahead(octets, interleaved)) else []
    assert bool(ahead) == interleaved
    for row, lane in ((0, 0), (5, 1), (11, 3)):
        first = lane * (4 if interleaved else 2)
        # Of 16 interleaved columns, value e of octet o is number 2 e + o of four neighbours.
        places = [
            [
                (octet // 2 * 16 + first + 2 * e + octet % 2 if interleaved else octet * 8 + first + e)
                for octet in range(octets)
                for e in range(2)
            ]
        ][0]
        values = [
            int(layer.sums[row + 8 * half, places[2 * octet + e]])
            for octet in range(octets)
            for half in (0, 1)
            for e in (0, 1)
        ]
        place = (CHANNELS, 1, 1, first, row * CHANNELS + first)
        if ahead:
            layer.epilogue.load_ahead(octets, 8 * CHANNELS)(*ahead, *place, *layer.operands)
        fuse(values, *ahead, *place, *layer.operands)
        found = np.array(values).reshape(octets, 2, 2).transpose(1, 0, 2).reshape(2, -1)
        layer.check(found, [row, row + 8], places)


def test_nothing_outside_of_the_columns_and_rows_is_loaded_ahead(emulator: PtxEmulator) -> None:
    layer, octets = Layer(emulator, *FORMATS[0]), CHANNELS // 8
    ahead = [-1] * layer.epilogue.words_ahead(octets, True)
    layer.epilogue.load_ahead(octets, 8 * CHANNELS)(ahead, 16, 1, 0, 0, 0, *layer.operands)
    first = int.from_bytes(layer.arrays["residual"].reshape(-1)[:4].tobytes(), "little")
    assert ahead == [first, 0, 0, 0]


def near_halves(most: int) -> Iterator[tuple[int, int, int]]:
    """(value, scale, power): value / scale / 2^power lies next to where its float32 turns into n + 1/2, or stops to be it.

    Such a limit is an odd number M of 25 bits, times a power of two. With value * 2^k = M * scale - s, the quotient is off
    by s units of a product of 49 bits. All values and scales of 24 bits with |s| <= `most` are found by inverting M.
    """
    for n, side in itertools.product(range(512), (-1, 1)):
        exponent = (n + Fraction(1, 2)).numerator.bit_length() - 2  # of n + 1/2
        limit = (2 * n + 1) * 2 ** (23 - exponent) + side
        if side < 0 and n == 0:
            limit = 2 * limit + 1  # below a power of two neighbours are closer
        for k, s in itertools.product((23, 24, 25), (s for s in range(-most, most + 1) if s)):
            for scale in range(s * pow(limit, -1, 2**k) % 2**k, 2**24, 2**k):
                value, rest = divmod(limit * scale - s, 2**k)
                if scale >= 2**23 and 2**23 <= value < 2**24 and rest == 0:
                    yield value, scale, round(math.log2(value / scale / (n + 0.5)))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.mostly_long(2)
def test_quotients_next_to_halves_are_rounded_to_the_right_side(relu: bool) -> None:
    """The text of a stage divides by a reciprocal; here every operation is done exactly and rounded once."""
    code, tried = STAGE_CODES["requantise_add"], 0
    names = {name: name for name in ("value", "y_scale", "y_zero_point", *(f"temporary{i}" for i in range(4)))}
    text = re.sub(r"\{(\w+)\}", lambda match: names.get(match[1], ""), code.with_relu if relu else code.integer)
    text = text[text.index("mul.rn.f32 temporary1, y_scale" if relu else "mul.rn.f32 temporary3, y_scale") :]
    for value, scale, power in [*near_halves(3), *all_bits_set()]:
        y_scale = math.ldexp(scale, power)
        registers = {"value": float(value), "y_scale": y_scale, "y_zero_point": 0.0}
        quotient = rounded(Fraction(value) / Fraction(y_scale))
        assert run_ptx(text, registers, 2.0**-23)["value"] == round(quotient), (value, scale, power)
        tried += 1
    assert tried > 5000


def all_bits_set() -> Iterator[tuple[int, int, int]]:
    for n in range(512):
        for least in (math.floor((n + 0.5) * (2**24 - 1)), 2**23 + n):
            bits = max(least.bit_length() - 24, 0)
            yield from (
                (value, 2**24 - 1, -bits) for value in range((least >> bits) - 2, (least >> bits) + 3) if value < 2**24
            )


@pytest.mark.parametrize("second", [8, 1])
@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_fragments_of_rows(emulator: PtxEmulator, formats: tuple[str, str, str, bool], second: int) -> None:
    """Positions walk a patch of 8 columns, of which 6 are those of the image."""
    layer, octets, patch_w = Layer(emulator, *formats), 3, 8
    fuse = layer.epilogue.transposed(octets, TileRows(patch_w, COLUMNS * CHANNELS, CHANNELS, second))
    for k, first in ((0, 0), (18, 2)):
        positions = [8 * octet + first + e for octet in range(octets) for e in range(2)]
        pixels = [position // patch_w * COLUMNS + position % patch_w for position in positions]
        values = [
            int(layer.sums[pixels[2 * octet + e], k + half * second])
            for octet in range(octets)
            for half in (0, 1)
            for e in (0, 1)
        ]
        fuse(values, CHANNELS - k, ROWS, COLUMNS, first, 0, k, k, *layer.operands)
        found = np.array(values).reshape(octets, 2, 2).transpose(0, 2, 1).reshape(-1, 2)
        layer.check(found, pixels, [k, k + second])


@pytest.mark.parametrize(
    ("epilogue", "message"),
    [
        (["residual", "requantise_add"], "stages residual and requantise_add both read residual; allowed: one of the two"),
        (["requantise", "requantise_add"], "stages requantise and requantise_add both read requantise_scale"),
        (["dequantise", "requantise_add"], "stage requantise_add needs the 32-bit sums of int8 or uint8, got float32"),
        (["requantise_add", "relu"], "stage relu needs 32-bit sums, got int8; put it before requantise"),
        ([{"requantise_add": {"middle": "int32"}}], "middle of stage requantise_add .*'int32'.* int8, uint8"),
        ([{"requantise_add": {"relu": 1}}], "relu of stage requantise_add .*1"),
        ([{"requantise_add": {"from": "int8"}}], "stage requantise_add .*'from'"),
    ],
    ids=str,
)
def test_a_wrong_epilogue_is_told_what_is_allowed(epilogue: list[Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        conv2d(n=1, h=4, w=4, c=16, k=16, r=1, s=1, dtype="int8", epilogue=epilogue)


def test_floats_have_nothing_to_requantise() -> None:
    with pytest.raises(
        WorkloadError, match="stage requantise_add needs the 32-bit sums of int8 or uint8, got float16; leave"
    ):
        Workload.conv2d(n=1, h=4, w=4, c=16, k=16, r=1, s=1, epilogue=["requantise_add"])
