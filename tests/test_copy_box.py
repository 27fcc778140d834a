"""Boxes: a contiguous array copied to the first places of a larger one. Expected values are those of NumPy's slices."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedsearch.device import cuda_driver, open_device
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.cuda import CudaDevice
from schedsearch.device.cuda_box import MOST_PITCH, Part, parts
from schedsearch.device.detect import detect
from schedsearch.target import PRESETS

ELEMENT_BYTES = (1, 2, 4, 8)
Shape = tuple[int, ...]


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Shape, Shape, int]:
    """Extents, bound and bytes of an element; often an axis has all of its bound, one element, or none."""
    bound = tuple(draw(st.lists(st.integers(1, 5), max_size=6)))
    extents = tuple(draw(st.sampled_from((most, 1, 0)) | st.integers(0, most)) for most in bound)
    return extents, bound, draw(st.sampled_from(ELEMENT_BYTES))


def arrays(extents: Shape, bound: Shape, element_bytes: int) -> tuple[Any, Any, Any]:
    """A source, a larger array, and what it is after the copy."""
    rng = np.random.default_rng(0)
    source = rng.integers(1, 200, extents).astype(f"u{element_bytes}")
    larger = np.full(bound, 255, f"u{element_bytes}")
    wanted = larger.copy()
    wanted[tuple(map(slice, extents))] = source
    return source, larger, wanted


# --- Copies of planes of rows ------------------------------------------------------------------------------------------
def copied(part: Part, to: Any, source: Any) -> None:
    """What the driver does with a part, byte by byte."""
    for z in range(part.depth):
        for y in range(part.height):
            row = part.to + (z * part.rows + y) * part.pitch
            at = part.source + (z * part.height + y) * part.width
            to[row : row + part.width] = source[at : at + part.width]


@given(boxes())
def test_the_parts_of_a_box_together_copy_it(box: tuple[Shape, Shape, int]) -> None:
    source, larger, wanted = arrays(*box)
    flat = larger.reshape(-1).view(np.uint8)
    for part in parts(*box):
        copied(part, flat, source.reshape(-1).view(np.uint8))
    np.testing.assert_array_equal(larger, wanted)


@pytest.mark.parametrize(
    ("extents", "bound", "expected"),
    [
        ((5, 8), (9, 8), [Part(0, 0, 160)]),  # all of the later axis: one run of bytes
        ((1, 1, 3), (4, 4, 4), [Part(0, 0, 12)]),
        ((2, 3, 5, 7), (2, 3, 5, 7), [Part(0, 0, 840)]),
        ((2, 0, 5), (4, 4, 8), []),
        ((5, 8), (9, 16), [Part(0, 0, 32, 5, 1, 64, 5)]),
        ((2, 3, 5, 8), (4, 3, 9, 8), [Part(0, 0, 160, 6, 1, 288, 6)]),  # images and channels are one axis
        ((2, 3, 5, 7), (4, 3, 9, 8), [Part(0, 0, 28, 5, 6, 32, 9)]),
        ((1, 2, 1, 7), (4, 3, 9, 8), [Part(0, 0, 28, 2, 1, 288, 2)]),  # axes of one element take no copy of their own
    ],
)
def test_axes_merge_so_that_few_copies_are_needed(extents: Shape, bound: Shape, expected: list[Part]) -> None:
    assert parts(extents, bound, 4) == expected


def test_axes_beyond_three_are_several_copies() -> None:
    found = parts((2, 3, 4, 5), (3, 4, 5, 6), 2)
    assert [(each.to, each.source) for each in found] == [(0, 0), (240, 120)]
    assert {(each.width, each.height, each.depth, each.pitch, each.rows) for each in found} == {(10, 4, 3, 12, 5)}


def test_rows_farther_apart_than_a_copy_can_skip_are_copied_one_by_one() -> None:
    row = MOST_PITCH + 1
    assert parts((2, 3, 7), (2, 4, row), 1) == [
        Part(to, 7 * number, 7, 1, 1, 7, 1) for number, to in enumerate((0, row, 2 * row, 4 * row, 5 * row, 6 * row))
    ]


# --- Devices -----------------------------------------------------------------------------------------------------------
class HostDriver:
    """A driver of CUDA whose memory is the host's. It reads CUDA_MEMCPY3D as NVIDIA's bindings declare it."""

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:
        return 0, ordinal

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        return 0, 1

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[int]:
        return (0,)

    class CUresult:
        CUDA_SUCCESS = 0

    def cuCtxGetCurrent(self, reference: Any) -> int:
        reference._obj.value = 1
        return 0

    def cuMemcpyDtoDAsync_v2(self, to: Any, source: Any, nbytes: Any, stream: Any) -> int:
        assert stream.value == 5
        ctypes.memmove(to.value, source.value, nbytes.value)
        return 0

    def cuMemcpy3DAsync_v2(self, reference: Any, stream: Any) -> int:
        assert stream.value == 5
        bindings = pytest.importorskip("cuda.bindings.driver")
        box = bindings.CUDA_MEMCPY3D(ctypes.addressof(reference._obj))
        assert ctypes.sizeof(reference._obj) == 200  # sizeof(CUDA_MEMCPY3D) on 64-bit systems
        on_device = bindings.CUmemorytype.CU_MEMORYTYPE_DEVICE
        assert box.srcMemoryType == box.dstMemoryType == on_device
        skipped = ("srcXInBytes", "srcY", "srcZ", "srcLOD", "dstXInBytes", "dstY", "dstZ", "dstLOD")
        assert not any(getattr(box, name) for name in skipped)
        assert box.WidthInBytes <= min(box.srcPitch, box.dstPitch) and box.Height <= min(box.srcHeight, box.dstHeight)
        for z in range(box.Depth):
            for y in range(box.Height):
                to = int(box.dstDevice) + (z * box.dstHeight + y) * box.dstPitch
                source = int(box.srcDevice) + (z * box.srcHeight + y) * box.srcPitch
                ctypes.memmove(to, source, box.WidthInBytes)
        return 0


@pytest.fixture
def host_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    driver = HostDriver()
    monkeypatch.setattr(cuda_driver, "bindings", lambda: driver)
    monkeypatch.setattr(cuda_driver, "libcuda", lambda: driver)
    monkeypatch.setattr(cuda_driver, "immediate", lambda: driver)
    with contextlib.closing(open_device(PRESETS["h200"])) as device:
        yield device


SOME = [
    ((), (), 4),
    ((0, 3), (5, 4), 4),
    ((3, 0), (5, 4), 4),
    ((3, 4), (5, 4), 2),
    ((3, 3), (5, 4), 1),
    ((2, 3, 4, 5), (4, 3, 7, 6), 4),
    ((2, 3, 5, 7), (4, 3, 5, 8), 8),
    ((1, 1, 1, 1), (4, 3, 7, 6), 4),
    ((2, 2, 2, 2, 2), (3, 4, 3, 4, 3), 2),
]


@pytest.mark.parametrize("box", SOME)
def test_the_driver_gets_the_box(host_driver: Any, box: tuple[Shape, Shape, int]) -> None:
    source, larger, wanted = arrays(*box)
    host_driver.copy_box(larger.ctypes.data, source.ctypes.data, *box, 5)
    np.testing.assert_array_equal(larger, wanted)


@given(boxes())
def test_a_cpu_copies_boxes(box: tuple[Shape, Shape, int]) -> None:
    source, larger, wanted = arrays(*box)
    with contextlib.closing(CpuDevice(detect("cpu"))) as device:
        device.copy_box(larger.ctypes.data, source.ctypes.data, *box)
    np.testing.assert_array_equal(larger, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("box", [*SOME, ((70_000, 3), (70_001, 5), 4), ((3, 70_000, 2, 3), (3, 70_003, 3, 5), 2)])
def test_a_gpu_copies_boxes_also_in_a_graph(box: tuple[Shape, Shape, int]) -> None:
    source, larger, wanted = arrays(*box)
    with contextlib.closing(CudaDevice(detect("cuda"))) as device:
        places = [device.allocate(max(each.nbytes, 1)) for each in (source, larger)]
        stream = device.create_stream()

        def copy(stream: int) -> None:
            device.copy_box(places[1], places[0], *box, stream)

        graph = device.capture(stream, copy)
        with device.current():
            runs = (lambda: copy(stream), lambda: copy(0), lambda: graph.launch(stream))
            for number, run in enumerate(runs):
                source += number
                wanted[tuple(map(slice, box[0]))] = source
                for address, array in zip(places, (source, larger)):
                    device.copy_in(address, array.reshape(-1).view(np.uint8).data)
                run()
                device.synchronize()
                found = np.empty_like(larger)
                device.copy_out(found.reshape(-1).view(np.uint8).data, places[1])
                np.testing.assert_array_equal(found, wanted)
            graph.close()
        device.destroy_stream(stream)
        for address in places:
            device.free(address)
