"""Early loads of what the epilogue needs: every sector of the channels is read, and nothing beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_emulator import PtxEmulator

from schedsearch.templates.parts import warm
from schedsearch.templates.parts.stages import epilogue_operands
from schedsearch.testing.emulator import Memory
from schedsearch.workload import Workload

SECTOR = 32
QUANTISED = {"dtype": "int8", "epilogue": ("bias", "relu", {"requantise": {"to": "int8"}})}
CASES: list[tuple[dict[str, Any], int, int]] = [
    ({"epilogue": ("bias", "relu")}, 0, 64),
    ({"epilogue": ("scale_shift", "residual")}, 64, 24),
    (QUANTISED, 128, 256),  # as many as a warp reads at once
    (QUANTISED, 384, 16),
    (QUANTISED, 0, 0),
    (QUANTISED, 0, -128),
    ({"epilogue": ("relu",)}, 0, 128),
]


class Reads(Memory):
    """Remembers the bytes of every access."""

    def __init__(self) -> None:
        super().__init__()
        self.touched: set[int] = set()

    def at(self, address: int, nbytes: int, alignment: int = 0) -> Any:
        self.touched |= set(range(address, address + nbytes))
        return super().at(address, nbytes, alignment)


@pytest.mark.parametrize(("params", "k", "channels"), CASES)
def test_every_sector_of_the_channels_is_read(
    monkeypatch: pytest.MonkeyPatch, params: dict[str, Any], k: int, channels: int
) -> None:
    memory = Reads()
    emulator = PtxEmulator(memory)
    monkeypatch.setattr(warm, "device_op", emulator.device_op)
    warm._load_sectors.cache_clear()
    workload = Workload.conv2d(n=1, h=4, w=4, c=32, k=400, r=1, s=1, **params)
    arrays = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in workload.signature}
    addresses = {name: memory.add(array) for name, array in arrays.items()}
    given = epilogue_operands(workload)
    operands = tuple(addresses.get(operand.name, 0) for operand in given)
    function = warm.warm_operands(workload, [operand.param for operand in given])
    for lane in range(32):
        function(lane, k, channels, operands)
    warm._load_sectors.cache_clear()

    expected: set[int] = set()
    for spec in workload.signature:
        if spec.axes == "K":
            nbytes, first = arrays[spec.name].itemsize, addresses[spec.name]
            begin, end = first + k * nbytes, first + (k + max(channels, 0)) * nbytes
            read = {address for address in memory.touched if first <= address < first + arrays[spec.name].nbytes}
            assert read <= set(range(begin, end))
            assert {(address - begin) // SECTOR for address in read} == set(range(-(-(end - begin) // SECTOR)))
            expected |= read
    assert memory.touched == expected
