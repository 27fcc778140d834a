"""What a block of the grid of benchmarks/persistent_kernel.py computes of each layer: its own functions, run in Python."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

MASK, COLUMNS, WARP, THREADS = 0xFFFFFFFF, 40, 32, 256
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def kernel() -> Any:
    """The module, with plain numbers in place of Numba's."""
    benchmarks = str(Path(__file__).parents[1] / "benchmarks")
    sys.path.insert(0, benchmarks)
    module: Any = importlib.import_module("persistent_kernel")
    sys.path.remove(benchmarks)
    module.mark_of = lambda _: lambda *_: None
    module.i32 = module.i64 = module.u64 = int
    module.u32 = lambda value: int(value) & MASK
    module.f32 = np.float32
    module.cuda = SimpleNamespace(local=SimpleNamespace(array=lambda count, _: [0] * count))
    yield module
    del sys.modules["persistent_kernel"], sys.modules["persistent_ops"]


class Block:
    """Memory of a block, and the operations that reach it. The input is not there at first."""

    def __init__(self, kernel: ModuleType, x: Array, weights: Array) -> None:
        self.shared = np.full(240 * 1024, 0xFF, np.uint8)  # NaN wherever nothing was written
        self.shared[: weights.nbytes] = weights.view(np.uint8)
        self.x, self.loads, self.calls, self.sent = x.reshape(-1).view(np.uint8), 0, [], []  # type: ignore[var-annotated]
        kernel.__dict__.update(
            load_fresh=self.load_fresh,
            multiply_warp_tile=lambda _: lambda acc, *addresses: self.calls.append(addresses),
            load_sums=lambda at: tuple(self.shared[at : at + 16].view(np.float32)),
            send_sums=lambda at, *numbers: self.sent.append((at, *numbers)),
            cluster=SimpleNamespace(map_shared=lambda at, rank: (rank, at)),
            ptx=SimpleNamespace(
                store_shared_v4=lambda at, *words: self.write(at, words, np.uint32),
                store_shared_pair=lambda _: lambda at, *numbers: self.write(at, numbers, np.float32),
            ),
        )

    def write(self, at: int, values: Any, dtype: Any) -> None:
        self.shared[at : at + np.dtype(dtype).itemsize * len(values)].view(dtype)[:] = values

    def load_fresh(self, address: int, wanted: int) -> tuple[int, ...]:
        self.loads += 1
        there = wanted and self.loads % 3  # the others come when they are loaded again
        return tuple(map(int, self.x[address : address + 16].view(np.uint32))) if there else (MASK,) * 4

    def row(self, at: int) -> Array:
        return self.shared[at : at + 16].view(np.float16).astype(np.float32)

    def multiplied(self, lanes: list[list[tuple[int, int, int]]]) -> Array:
        """The sums of a warp, by the definition of ldmatrix: lane l has the address of a row of 16 bytes."""
        sums = np.zeros((32, COLUMNS), np.float32)
        for given in zip(*lanes):
            a = [[self.row(given[row + half][tile]) for half in (0, 16)] for tile in range(2) for row in range(16)]
            b = [
                [self.row(given[row + 16 * (tile % 2) + half][2] + 2048 * (tile // 2)) for half in (0, 8)]
                for tile in range(COLUMNS // 8)
                for row in range(8)
            ]
            sums += np.array(a).reshape(32, 16) @ np.array(b).reshape(COLUMNS, 16).T
        return sums


@pytest.mark.parametrize(("layer", "number", "rank"), [(0, 3, 5), (1, 12, 6), (2, 12, 7)])
def test_a_block_sends_the_sums_over_its_channels_to_the_owners_of_the_pixels(
    kernel: Any, layer: int, number: int, rank: int
) -> None:
    run, rng = kernel.Run(COLUMNS), np.random.default_rng(layer)
    inputs = kernel.LAYERS[0][layer]
    shapes = ((512, 1, 1, 2048), (512, 3, 3, 512), (2048, 1, 1, 512))
    filters = [rng.standard_normal(shape, np.float32).astype(np.float16) for shape in shapes]
    x = rng.standard_normal((49, inputs), np.float32).astype(np.float16)
    block = Block(kernel, x, run.packed(*filters)[number * 8 + rank])
    block.shared[run.regions["framed"] : run.regions["sums"]] = 0
    share = 2 if layer == 2 else 8
    fetch, multiply, lay_down = kernel._fetch(run, layer), kernel._multiply(run, layer), kernel._lay_down(run)
    send, weights_at = kernel._send(run, share), sum(map(run.weight_bytes, range(layer)))
    for thread in range(THREADS):
        fetch(0, 0, 1, rank, thread, 0)
    for warp in range(THREADS // WARP):
        lanes = []
        for lane in range(WARP):
            block.calls.clear()
            multiply([0] * COLUMNS, 0, weights_at, warp * WARP + lane)
            lanes.append(list(block.calls))
        tile = block.multiplied(lanes)
        for lane in range(WARP):  # the fragments of m16n8k16
            at = [(m, n, q) for m in range(2) for n in range(COLUMNS // 8) for q in range(4)]
            acc = [tile[16 * m + lane // 4 + 8 * (q // 2), 8 * n + 2 * (lane % 4) + q % 2] for m, n, q in at]
            lay_down(acc, 0, warp * WARP + lane)
    for thread in range(THREADS):
        send(0, 0, "barrier", rank, thread)

    own, column, channels = rank % share, (number * (8 // share) + rank // share) * COLUMNS, inputs // share
    part = slice(own * channels, (own + 1) * channels)
    image = np.pad(x.reshape(7, 7, inputs)[..., part].astype(np.float64), ((1, 1), (1, 1), (0, 0)))
    taps, margin = filters[layer].shape[1], 1 - filters[layer].shape[1] // 2
    expected = np.zeros((7, 7, COLUMNS))
    for r, t in itertools.product(range(taps), repeat=2):
        filter_ = filters[layer][column : column + COLUMNS, r, t, part].astype(np.float64)
        expected[..., : len(filter_)] += image[margin + r :, margin + t :][:7, :7] @ filter_.T
    expected = expected.reshape(49, COLUMNS)
    got, most = np.full((49, COLUMNS), np.nan), -(-49 // share)
    for (to, at), *numbers, barrier in block.sent:
        sender, place = divmod(at // 4, most * COLUMNS)
        pixel = to % share * 49 // share + place // COLUMNS
        assert (sender, to // share, barrier) == (own, rank // share, (to, "barrier"))
        assert pixel < (to % share + 1) * 49 // share and np.isnan(got[pixel, place % COLUMNS])
        got[pixel, place % COLUMNS : place % COLUMNS + 4] = numbers
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("layer", "number", "rank"), [(0, 12, 7), (1, 0, 0), (2, 9, 4), (2, 12, 7)])
def test_a_block_adds_up_what_it_receives_and_writes_its_pixels(
    kernel: Any, monkeypatch: pytest.MonkeyPatch, layer: int, number: int, rank: int
) -> None:
    """A float16 is in the place of its number here, and both of a word in the place of the word."""
    run, rng = kernel.Run(COLUMNS), np.random.default_rng(7)
    outputs, share, phase = kernel.LAYERS[1][layer], 2 if layer == 2 else 8, 5
    own, column, most = rank % share, (number * (8 // share) + rank // share) * COLUMNS, -(-49 // share)
    first, stop = own * 49 // share, (own + 1) * 49 // share
    sums = rng.standard_normal((share, most, COLUMNS), np.float32)
    bias, shortcut = rng.standard_normal(outputs, np.float32), rng.standard_normal((49, outputs), np.float32)
    y, told, expected_bytes = np.full((49, outputs), np.nan, np.float32), [], []
    received = (run.regions["received"] + phase % 2 * run.received_bytes) // 4
    numbers = {received + place: float(value) for place, value in enumerate(sums.reshape(-1))}

    def store(address: int, low: tuple[float, float], high: tuple[float, float]) -> None:
        place = y.reshape(-1)[address // 2 : address // 2 + 4]
        assert np.isnan(place).all()
        place[:] = [*low, *high]

    for name in ("_fetch", "_multiply", "_lay_down", "_send"):
        monkeypatch.setattr(kernel, name, lambda *_: lambda *_: None)
    kernel.__dict__.update(
        load_constants=lambda address: tuple(bias[address // 4 : address // 4 + 4]),
        load_fresh_pair=lambda address: tuple(shortcut.reshape(-1)[address // 2 :][:4].reshape(2, 2)),
        load_sums=lambda at: tuple(np.float32(numbers[at // 4 + i]) for i in range(4)),
        pack_relu=lambda low, high: (max(low, 0), max(high, 0)),
        unpack_pair=lambda word: (0.0, 0.0) if isinstance(word, int) else word,  # 0 where nothing was loaded
        store_fresh_pair=store,
        ptx=SimpleNamespace(
            mbarrier_expect_bytes=lambda barrier, nbytes: expected_bytes.append((barrier, nbytes)),
            mbarrier_wait=lambda barrier, parity: told.append((barrier, parity)),
        ),
    )
    kernel.cuda.syncthreads = lambda: None
    compute = kernel._layer(run, layer)
    for thread in range(THREADS):
        compute(0, phase, 1, 0, 1, 0, 0, 0, number, rank, thread, 0)
    barrier = run.regions["told"] + 8 * (phase % 2)
    assert expected_bytes == [(barrier, (stop - first) * share * COLUMNS * 4)]
    full = run.regions["full"] + 8 * (3 * (1 % run.slots) + layer), 1 // run.slots % 2
    assert set(told) == {(barrier, phase // 2 % 2), full}
    expected = np.full_like(y, np.nan)
    inside = min(COLUMNS, outputs - column)  # a tile may go beyond the last output
    found = sums[:, : stop - first, :inside].sum(0) + bias[column : column + inside]
    if layer == 2:
        found += shortcut[first:stop, column : column + COLUMNS]
    expected[first:stop, column : column + inside] = np.maximum(found, 0)
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)
