"""dyn_strided_slice on a GPU: which accesses are vectors, wherever rows begin. The kernel is emulated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dyn_strided_slice_support import CUDA, FAR, H200, Slice, any_bits, check, emulate, small_blocks
from moves_emulator import MovesEmulator

from schedsearch import dyn_strided_slice
from schedsearch.backend.cuda import ptx_of
from schedsearch.config import Config


@pytest.mark.long
def test_neighbours_move_as_vectors() -> None:
    """A slice of rows with runs of 16 bytes has them in one access of 16 bytes each way."""
    (text,) = ptx_of(
        CUDA.kernel(
            dyn_strided_slice(x=(3, 40)),
            H200,
            Config(threads=256, unroll=4, persistent=True, blocks_per_sm=8, stores="default"),
        ),
        H200,
    )
    assert text.count("ld.global.nc.v4.b32") >= 4 and text.count("st.global.v4.b32") >= 4


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "int64"])
def test_runs_that_begin_anywhere_in_x_are_stored_as_vectors(dtype: str) -> None:
    """Rows of x and y are multiples of 16 bytes apart. Each vector comes from two; nothing outside of x is read."""
    columns = 480 // np.dtype(dtype).itemsize
    for first in range(1, min(columns // 16, 17)):
        each = Slice((3, columns), [0, first], [FAR, columns - first % 3], [2, 1])
        x, config = any_bits(each.shape, dtype), small_blocks(first % 2 + 1)
        with pytest.MonkeyPatch.context() as patch:
            y, extents = emulate(patch, each.workload(dtype=dtype), {"x": x, **each.operands()}, config)
        check(y, extents, each.expected(x), each)


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "int64"])
@pytest.mark.parametrize("dense_x", [False, True])
def test_runs_that_begin_anywhere_in_y_are_stored_as_vectors(dtype: str, dense_x: bool) -> None:
    """y of an exact run has no gaps, so that its rows begin anywhere, and so may those of x. Nothing outside of x is read,
    nothing outside of y is written."""
    itemsize = np.dtype(dtype).itemsize
    columns = 512 // itemsize
    vectors = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}[itemsize]
    for first, last, rows, step in ((3, 1, 1, 1), (0, 5, 3, 1), (1, 0, -1, 1), (2, 3, 2, -1), (columns // 3, 1, -2, 2)):
        shape = (2, 4, columns - 1 if dense_x else columns)
        each = Slice(shape, [0, -1 if rows < 0 else 0, first], [FAR, -FAR if rows < 0 else FAR, -1 - last], [1, rows, 1])
        if step < 0:
            each = Slice(shape, [-1, 0, first], [-FAR, FAR, -1 - last], [-1, rows, 1])
        workload = dyn_strided_slice(x=(2, 4, columns), dynamic=True, dtype=dtype)
        x = any_bits(shape, dtype)
        wanted = each.expected(x)
        own = {"x_extents": np.array(shape, np.int64)}
        steps = [np.empty(extents, vectors).strides for extents in (shape, wanted.shape)]
        strides = {f"{name}_stride_{axis}": n // itemsize for name, of in zip("xy", steps) for axis, n in enumerate(of)}
        with pytest.MonkeyPatch.context() as patch:
            y, extents = emulate(patch, workload, {"x": x, **own, **each.operands()}, small_blocks(2), **strides)
        assert extents.tolist() == list(wanted.shape), each
        flat = y.reshape(-1)
        np.testing.assert_array_equal(flat[: wanted.size].reshape(wanted.shape), wanted, err_msg=str(each))
        assert (flat[wanted.size :].view("u1") == 0xA5).all(), f"{each} writes beyond y"


def test_most_accesses_to_rows_that_begin_anywhere_have_16_bytes() -> None:
    """497 columns of 2 bytes, as in an exact run: of each row only both ends are stored element by element."""
    workload, x = dyn_strided_slice(x=(8, 512)), any_bits((8, 512))
    each = Slice((8, 512), [0, 3], [FAR, 500], [1, 1])
    stored: list[int] = []
    taken = MovesEmulator.store_global

    def counting(self: MovesEmulator, nbytes: int, streaming: bool = False) -> Any:
        store = taken(self, nbytes, streaming)

        def counted(words: Any, at: int, address: int) -> None:
            stored.append(nbytes)
            store(words, at, address)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MovesEmulator, "store_global", counting)
        y, _ = emulate(patch, workload, {"x": x, **each.operands()}, small_blocks(2), y_stride_0=497)
    np.testing.assert_array_equal(y.reshape(-1)[: 8 * 497].reshape(8, 497), x[:, 3:500])
    whole = sum(nbytes == 16 for nbytes in stored)
    assert whole >= 8 * 60 and whole * 16 + sum(nbytes == 2 for nbytes in stored) * 2 == 8 * 497 * 2


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "int64"])
@pytest.mark.parametrize("step", [2, -1, -3])
def test_elements_that_are_apart_in_x_are_stored_as_vectors(dtype: str, step: int) -> None:
    columns = 960 // np.dtype(dtype).itemsize
    each = Slice((3, columns), [0, columns - 2 if step < 0 else 1], [FAR, -FAR if step < 0 else FAR], [1, step])
    x, config = any_bits(each.shape, dtype), small_blocks(2)
    with pytest.MonkeyPatch.context() as patch:
        y, extents = emulate(patch, each.workload(dtype=dtype), {"x": x, **each.operands()}, config)
    check(y, extents, each.expected(x), each)
