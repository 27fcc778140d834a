"""Operands like y that conv2d_wgmma loads before it multiplies: the epilogue's text, executed, against NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ptx_emulator import PtxEmulator

from schedsearch.templates.parts import epilogue, epilogue_fragments
from schedsearch.testing.emulator import Memory
from schedsearch.workload import Workload

CHANNELS, ROWS, COLUMNS = 32, 4, 6  # of y
OCTETS = CHANNELS // 8


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[PtxEmulator]:
    cached = epilogue_fragments.fragments_operation, epilogue_fragments.load_ahead_operation
    emulator = PtxEmulator(Memory())
    emulator.stand_in(monkeypatch, epilogue, epilogue_fragments)
    for function in cached:
        function.cache_clear()
    yield emulator
    for function in cached:
        function.cache_clear()


class Layer:
    """relu(sums + bias + residual) of 24 pixels, with the operands in an emulator's memory."""

    def __init__(self, emulator: PtxEmulator) -> None:
        workload = Workload.conv2d(
            n=1, h=ROWS, w=COLUMNS, c=16, k=CHANNELS, r=1, s=1, dtype="float16", epilogue=["bias", "residual", "relu"]
        )
        rng = np.random.default_rng(0)
        self.sums, self.residual = (rng.integers(-40, 40, (ROWS * COLUMNS, CHANNELS)).astype(np.float16) for _ in range(2))
        bias = rng.integers(-9, 9, CHANNELS).astype(workload.signature[2].dtype)
        self.epilogue = epilogue.Epilogue(workload)
        values = {"bias": emulator.memory.add(bias), "residual": emulator.memory.add(self.residual)}
        self.operands = [values.get(operand.name, 0) for operand in self.epilogue._operands]
        self.expected = np.maximum(self.sums.astype(np.float64) + bias + self.residual, 0)


@pytest.mark.parametrize(("row", "lane", "row_8_inside"), [(0, 0, 1), (5, 3, 1), (15, 2, 1), (17, 1, 0)])
def test_words_of_16_bits_serve_both_rows_of_a_fragment(
    emulator: PtxEmulator, row: int, lane: int, row_8_inside: int
) -> None:
    layer = Layer(emulator)
    fuse = layer.epilogue.fragments(OCTETS, 8 * CHANNELS, ahead=True)
    ahead = [-1] * layer.epilogue.words_ahead(OCTETS, False)
    first = 2 * lane
    places = [8 * octet + first + e for octet in range(OCTETS) for e in (0, 1)]
    rows = [row, row + 8] if row_8_inside else [row]
    values = [
        float(layer.sums[r, 8 * octet + first + e]) if r in rows else 0.0
        for octet in range(OCTETS)
        for r in (row, row + 8)
        for e in (0, 1)
    ]
    place = (CHANNELS, 1, row_8_inside, first, row * CHANNELS + first)
    layer.epilogue.load_ahead(OCTETS, 8 * CHANNELS, interleaved=False)(ahead, *place, *layer.operands)
    fuse(values, ahead, *place, *layer.operands)
    found = np.array(values).reshape(OCTETS, 2, 2).transpose(1, 0, 2).reshape(2, -1)
    np.testing.assert_array_equal(found[: len(rows)], layer.expected[np.ix_(rows, places)])


def test_nothing_outside_of_the_columns_and_rows_is_loaded_ahead(emulator: PtxEmulator) -> None:
    layer = Layer(emulator)
    ahead = [-1] * layer.epilogue.words_ahead(OCTETS, False)
    layer.epilogue.load_ahead(OCTETS, 8 * CHANNELS, interleaved=False)(ahead, 16, 1, 0, 0, 0, *layer.operands)
    words: Any = layer.residual[0].view(np.uint32)
    assert np.array(ahead, np.int64).astype(np.uint32).tolist() == [words[0], 0, words[4], 0, 0, 0, 0, 0]
