"""Layouts as values: the order of an array's axes in memory, and their blocks.

A layout is one word. Each capital letter is an axis, slowest first; a number with a small letter is a block of that axis:

    NHWC        channels innermost
    NCHW32c     channels in blocks of 32, the block innermost: shape (n, ceil(c / 32), h, w, 32)
    OIHW4o4i    4 x 4 blocks of output and input channels: shape (ceil(o / 4), ceil(i / 4), h, w, 4, 4)
                (the empty word) a single number, which has no axes: shape ()

The last block of an axis is padded: `pack` fills the padding (with zeros by default) and `unpack` drops it.
Several blocks of one axis are nested; the first is the outermost (OIHW8i2o2i).
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schedsearch.errors import UsageError
from schedsearch.typed import GivenParams

_WORD = re.compile(r"(?:([A-Z]+)((?:[1-9][0-9]{0,5}[a-z])*))?")


@dataclass(frozen=True)
class Layout:
    """An order of axes. Make one with `Layout.parse`.

    Attributes:
        text: the word it was parsed from.
        axes: the logical axes in the order of their outer dimensions, e.g. "NCHW" of NCHW32c.
        blocks: (axis, length) of each block, in order; empty for a plain layout.
    """

    text: str
    axes: str
    blocks: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout that a word names.

        Raises:
            UsageError: the word is not a layout; the message says why.

        Examples:
            >>> Layout.parse("NCHW32c").shape({"N": 1, "C": 48, "H": 7, "W": 7})
            (1, 2, 7, 7, 32)
        """
        return _parse(text)

    def __str__(self) -> str:
        return self.text

    @property
    def dimensions(self) -> tuple[str, ...]:
        """A letter for each dimension of the array in memory: capital for an axis, small for a block of it."""
        return (*self.axes, *(axis.lower() for axis, _ in self.blocks))

    def block(self, axis: str) -> int:
        """How many elements of an axis its blocks hold together; 1 without blocks."""
        return math.prod(length for name, length in self.blocks if name == axis)

    def units(self, axis: str) -> tuple[int, ...]:
        """How far an index along an axis moves for one step of each dimension of this axis, outermost first.

        Examples:
            >>> Layout.parse("OIHW8i16o2i").units("I")
            (16, 2, 1)
        """
        lengths = [length for name, length in self.blocks if name == axis]
        return tuple(math.prod(lengths[place:]) for place in range(len(lengths) + 1))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the array in memory.

        Args:
            sizes: axis -> its logical extent; further axes are ignored.

        Raises:
            UsageError: an axis of the layout has no size.
        """
        missing = [axis for axis in self.axes if axis not in sizes]
        if missing:
            raise UsageError(f"layout {self.text} needs a size for {', '.join(missing)}; got sizes for {', '.join(sizes)}")
        outer = (-(-sizes[axis] // self.block(axis)) for axis in self.axes)
        return (*outer, *(length for _, length in self.blocks))

    def strides(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Elements from one index to the next, for each dimension of the contiguous array in memory."""
        shape = self.shape(sizes)
        return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))

    def offset(self, sizes: Mapping[str, int], index: GivenParams) -> Any:
        """Offset in elements of a logical index.

        Args:
            sizes: axis -> logical extent.
            index: axis -> index along it; numbers, or arrays that broadcast together.
        """
        strides = self.strides(sizes)
        total: Any = 0
        for stride, axis in zip(strides, self.axes):
            total = total + index[axis] // self.block(axis) * stride
        inner = {axis: self.block(axis) for axis in self.axes}
        for stride, (axis, length) in zip(strides[len(self.axes) :], self.blocks):
            inside = index[axis] % inner[axis]
            inner[axis] //= length
            total = total + inside // inner[axis] * stride
        return total

    def pack(self, array: Any, axes: str | None = None, *, fill: float = 0) -> Any:
        """A logical array in this layout.

        Args:
            array: one dimension for each axis. A torch tensor, or what `numpy.asarray` takes.
            axes: the order of its dimensions, e.g. "NCHW"; default: the layout's own.
            fill: the value of the padding of the last block.

        Returns:
            A contiguous array of `shape(sizes)`, where sizes are the array's extents. A tensor stays on its device.

        Raises:
            UsageError: the array's dimensions are not the layout's axes.
        """
        array = _array(array)
        sizes = self._sizes(tuple(array.shape), axes or self.axes)
        array = _transposed(array, [(axes or self.axes).index(axis) for axis in self.axes])
        whole = [-(-sizes[axis] // self.block(axis)) * self.block(axis) for axis in self.axes]
        if list(array.shape) != whole:
            padded = _filled_like(array, whole, fill)
            padded[tuple(slice(sizes[axis]) for axis in self.axes)] = array
            array = padded
        split, places = self._split(sizes)
        return _contiguous(_transposed(array.reshape(split), places))

    def unpack(self, packed: Any, sizes: Mapping[str, int], axes: str | None = None) -> Any:
        """Inverse of `pack`, without the padding.

        Args:
            packed: an array of `shape(sizes)`. A torch tensor, or what `numpy.asarray` takes.
            sizes: axis -> logical extent.
            axes: the order of dimensions of the result; default: the layout's own.

        Raises:
            UsageError: the array has another shape, or `axes` are not the layout's.
        """
        packed = _array(packed)
        if tuple(packed.shape) != self.shape(sizes):
            raise UsageError(
                f"an array in layout {self.text} of {dict(sizes)} has shape {self.shape(sizes)}, got {tuple(packed.shape)}"
            )
        order = axes or self.axes
        self._sizes(tuple(sizes.get(axis, 0) for axis in order), order)
        _, places = self._split(sizes)
        back = sorted(range(len(places)), key=places.__getitem__)
        whole = _transposed(packed, back).reshape(
            [-(-sizes[axis] // self.block(axis)) * self.block(axis) for axis in self.axes]
        )
        inside = whole[tuple(slice(sizes[axis]) for axis in self.axes)]
        return _contiguous(_transposed(inside, [self.axes.index(axis) for axis in order]))

    def _sizes(self, shape: tuple[int, ...], axes: str) -> dict[str, int]:
        if sorted(axes) != sorted(self.axes) or len(shape) != len(axes):
            raise UsageError(
                f"layout {self.text} has the axes {self.axes}; got an array of {len(shape)} dimensions with the axes {axes}"
            )
        return dict(zip(axes, shape))

    def _split(self, sizes: Mapping[str, int]) -> tuple[list[int], list[int]]:
        """The shape in which the blocks of an axis follow it directly, and the position there of each dimension in
        memory.
        """
        split: list[int] = []
        place_of: dict[tuple[str, int], int] = {}
        for axis in self.axes:
            place_of[axis, -1] = len(split)
            split.append(-(-sizes[axis] // self.block(axis)))
            for number, (name, length) in enumerate(self.blocks):
                if name == axis:
                    place_of[axis, number] = len(split)
                    split.append(length)
        places = [place_of[axis, -1] for axis in self.axes]
        return split, places + [place_of[axis, number] for number, (axis, _) in enumerate(self.blocks)]


# ---- the few operations on arrays that NumPy and torch name differently


def is_torch_tensor(array: object) -> bool:
    """Whether an object is a torch tensor. It never imports torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _array(array: Any) -> Any:
    import numpy as np

    return array if is_torch_tensor(array) else np.asarray(array)


def _transposed(array: Any, order: list[int]) -> Any:
    return array.permute(order) if is_torch_tensor(array) else array.transpose(order)


def _contiguous(array: Any) -> Any:
    import numpy as np

    return array.contiguous() if is_torch_tensor(array) else np.asarray(array, order="C")


def _filled_like(array: Any, shape: list[int], fill: float) -> Any:
    import numpy as np

    return array.new_full(shape, fill) if is_torch_tensor(array) else np.full(shape, fill, array.dtype)


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> Layout:
    match = _WORD.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise UsageError(
            f"{text!r} is not a layout; write a capital letter for each axis, then blocks as a number and a small letter, "
            "e.g. NHWC, NCHW32c or OIHW4o4i"
        )
    axes = match[1] or ""
    blocks = tuple((letter.upper(), int(length)) for length, letter in re.findall(r"([0-9]+)([a-z])", match[2] or ""))
    twice = sorted({axis for axis in axes if axes.count(axis) > 1})
    if twice:
        raise UsageError(f"layout {text!r} names axis {twice[0]} twice; an axis has one capital letter")
    for axis, length in blocks:
        if axis not in axes:
            raise UsageError(f"layout {text!r} has a block {length}{axis.lower()} but no axis {axis}; its axes: {axes}")
    return Layout(text, axes, blocks)
