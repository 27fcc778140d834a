"""`pack` and `unpack`: against indexing by brute force, round trips, and what is refused."""

from __future__ import annotations

import doctest
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import schedsearch.ops.packing as module
from schedsearch import pack, unpack
from schedsearch.errors import ArgumentError, UsageError

DTYPES = ("int8", "uint8", "bool", "int16", "float16", "int32", "float32")


def image(layout: str, n: int, c: int, h: int, w: int, dtype: str = "int32") -> Any:
    """Element (n, c, h, w) is its number in NCHW, written out for each layout: the definition of the words."""
    numbers = (np.arange(1, 1 + n * c * h * w) % 251).reshape(n, c, h, w).astype(dtype)
    if layout == "NCHW":
        return numbers
    if layout == "NHWC":
        shape, place = (n, h, w, c), lambda i, j, p, q: (i, p, q, j)
    else:
        block = int(layout[4:-1])
        shape = (n, -(-c // block), h, w, block)
        place = lambda i, j, p, q: (i, j // block, p, q, j % block)  # noqa: E731
    array = np.zeros(shape, dtype)
    for index in itertools.product(range(n), range(c), range(h), range(w)):
        array[place(*index)] = numbers[index]
    return array


def filters(layout: str, o: int, i: int, h: int, w: int) -> Any:
    numbers = np.arange(1, 1 + o * i * h * w, dtype=np.float32).reshape(o, i, h, w)
    if layout == "OIHW":
        return numbers
    if layout == "OHWI":
        array = np.zeros((o, h, w, i), np.float32)
        for a, b, p, q in itertools.product(range(o), range(i), range(h), range(w)):
            array[a, p, q, b] = numbers[a, b, p, q]
        return array
    x, y = (int(word) for word in layout[4:-1].split("o"))
    array = np.zeros((-(-o // x), -(-i // y), h, w, x, y), np.float32)
    for a, b, p, q in itertools.product(range(o), range(i), range(h), range(w)):
        array[a // x, b // y, p, q, a % x, b % y] = numbers[a, b, p, q]
    return array


IMAGES = ("NCHW", "NHWC", "NCHW4c", "NCHW3c", "NCHW32c")
FILTERS = ("OIHW", "OHWI", "OIHW4o4i", "OIHW2o3i", "OIHW32o16i")


@given(
    st.sampled_from(IMAGES),
    st.sampled_from(IMAGES),
    st.tuples(*[st.integers(1, high) for high in (2, 37, 4, 4)]),
    st.sampled_from(DTYPES),
)
@settings(max_examples=60, deadline=None)
def test_images_are_where_brute_force_puts_them(source: str, to: str, sizes: tuple[int, int, int, int], dtype: str) -> None:
    x = image(source, *sizes, dtype)
    packed = pack(x, to, from_layout=source, c=sizes[1])
    assert packed.dtype == x.dtype and packed.flags.c_contiguous
    np.testing.assert_array_equal(packed, image(to, *sizes, dtype))
    back = unpack(packed, to, to_layout=source, c=sizes[1])
    np.testing.assert_array_equal(back, x)


@given(st.sampled_from(FILTERS), st.sampled_from(FILTERS), st.tuples(*[st.integers(1, high) for high in (37, 20, 3, 3)]))
@settings(max_examples=40, deadline=None)
def test_filters_are_where_brute_force_puts_them(source: str, to: str, sizes: tuple[int, int, int, int]) -> None:
    weight = filters(source, *sizes)
    packed = pack(weight, to, from_layout=source, o=sizes[0], i=sizes[1])
    np.testing.assert_array_equal(packed, filters(to, *sizes))
    np.testing.assert_array_equal(unpack(packed, to, to_layout=source, o=sizes[0], i=sizes[1]), weight)


def test_the_other_layout_is_that_of_pytorch_by_default() -> None:
    np.testing.assert_array_equal(pack(image("NCHW", 2, 6, 3, 3), "NCHW4c"), image("NCHW4c", 2, 6, 3, 3))
    np.testing.assert_array_equal(unpack(image("NCHW4c", 2, 6, 3, 3), "NCHW4c", c=6), image("NCHW", 2, 6, 3, 3))
    np.testing.assert_array_equal(unpack(image("NHWC", 2, 6, 3, 3), "NHWC"), image("NCHW", 2, 6, 3, 3))
    np.testing.assert_array_equal(pack(filters("OIHW", 6, 5, 1, 2), "OHWI"), filters("OHWI", 6, 5, 1, 2))


def test_without_a_count_the_blocks_are_full() -> None:
    assert unpack(image("NCHW4c", 1, 6, 2, 2), "NCHW4c").shape == (1, 8, 2, 2)


def test_strides_do_not_matter_and_nothing_is_shared() -> None:
    x = image("NCHW", 2, 6, 5, 4)
    np.testing.assert_array_equal(pack(x[:, ::-2, 1:], "NHWC"), x[:, ::-2, 1:].transpose(0, 2, 3, 1))
    same = pack(x, "NCHW")
    assert not np.may_share_memory(same, x)
    np.testing.assert_array_equal(same, x)


def test_bits_do_not_change() -> None:
    signalling = np.array([0x7F800001, 0x80000000, 0xFFFFFFFF], np.uint32).view(np.float32).reshape(1, 3, 1, 1)
    packed = pack(signalling, "NCHW2c")
    assert packed.view(np.uint32).ravel().tolist() == [0x7F800001, 0x80000000, 0xFFFFFFFF, 0]


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda x: pack(x, "nhwc"), UsageError, ["'nhwc' is not a layout", "e.g. NHWC"]),
        (lambda x: pack(x, "OHWI", from_layout="NCHW"), UsageError, ["NCHW and OHWI have different axes"]),
        (lambda x: pack(x, "NCDHW"), UsageError, ["NCDHW", "no default", "give the other layout"]),
        (lambda x: pack(x[0], "NHWC"), ArgumentError, ["3 dimensions, (8, 2, 3)", "NCHW has 4: N, C, H, W"]),
        (lambda x: unpack(x[None], "NCHW4c"), ArgumentError, ["(1, 2, 8, 2, 3)", "last extents are 4"]),
        (lambda x: unpack(pack(x, "NCHW4c"), "NCHW4c", c=4), ArgumentError, ["c is 4", "2 x 4", "allowed: 5 to 8"]),
        (lambda x: unpack(pack(x, "NCHW4c"), "NCHW4c", k=4), UsageError, ["no axis 'k'", "allowed: n, c, h, w"]),
        (lambda x: pack(x, "NHWC", c=7), ArgumentError, ["c is 7", "allowed: 8"]),
        (lambda x: unpack(pack(x, "NCHW4c"), "NCHW4c", c=8.0), ArgumentError, ["c is 8.0"]),
        (lambda x: pack(x.astype(np.float64), "NHWC"), ArgumentError, ["float64 of 8 bytes", "1, 2 or 4", "convert"]),
        (lambda x: pack(x.tolist(), "NHWC"), ArgumentError, ["x is a list", "NumPy array or a torch tensor", "asarray"]),
    ],
)
def test_what_cannot_be_packed_is_refused(call: Any, kind: type[Exception], words: list[str]) -> None:
    x = image("NCHW", 2, 8, 2, 3)
    with pytest.raises(kind) as error:
        call(x)
    assert [word for word in words if word not in str(error.value)] == []


def test_the_examples_of_the_docstrings() -> None:
    assert doctest.testmod(module).failed == 0


# --- torch ---------------------------------------------------------------------------------------------------------------


def check_torch(device: str) -> None:
    torch = pytest.importorskip("torch")
    for dtype in ("int8", "uint8", "bfloat16", "float16", "float32", "float8_e4m3fn"):
        plain = torch.from_numpy(image("NCHW", 2, 6, 3, 5, "uint8")).to(device)
        x = plain.view(torch.uint8) if dtype == "float8_e4m3fn" else plain
        x = x.view(getattr(torch, dtype)) if dtype == "float8_e4m3fn" else x.to(getattr(torch, dtype))
        packed = pack(x, "NCHW4c")
        assert packed.dtype == x.dtype and packed.device == x.device and packed.is_contiguous()
        expected = image("NCHW4c", 2, 6, 3, 5, "uint8")
        read = packed.view(torch.uint8) if dtype == "float8_e4m3fn" else packed.float()
        wanted = torch.from_numpy(expected) if dtype == "float8_e4m3fn" else torch.from_numpy(expected).to(x.dtype).float()
        assert torch.equal(read.cpu(), wanted)
        back = unpack(packed, "NCHW4c", c=6)
        assert back.dtype == x.dtype and torch.equal(back.view(torch.uint8), x.contiguous().view(torch.uint8))
    channels_last = x.contiguous(memory_format=torch.channels_last)
    copy = pack(channels_last, "NHWC")
    assert copy.data_ptr() != channels_last.data_ptr() and copy.shape == (2, 3, 5, 6)


def test_torch_tensors_on_the_cpu() -> None:
    check_torch("cpu")


@pytest.mark.gpu
def test_torch_tensors_on_a_gpu_stay_there() -> None:
    check_torch("cuda")
