"""Conversion of arrays between layouts on the host: `pack` and `unpack`, for NumPy arrays and torch tensors."""

from __future__ import annotations

import sys
from typing import Any

from schedsearch.errors import ArgumentError, UsageError, did_you_mean
from schedsearch.ops.layout import Layout, is_torch_tensor
from schedsearch.text import type_text

PLAIN = ("NCHW", "OIHW")  # the layouts of PyTorch and ONNX for images and filters
_ELEMENT_BYTES = (1, 2, 4)


def pack(x: object, layout: str, *, from_layout: str | None = None, **extents: int) -> Any:
    """An array in another layout, for example the NCHW32c that a packed convolution takes.

    Channels that do not fill the last block are padded with zeros. The bits of the elements do not change.

    Args:
        x: a NumPy array or a torch tensor (CPU or CUDA), with any strides; elements of 1, 2 or 4 bytes.
        layout: of the result: a word as `schedsearch.ops.Layout` describes it, for example NHWC, NCHW32c or OIHW32o32i.
        from_layout: of `x`, over the same axes; default: NCHW for images, OIHW for filters.
        extents: the true extent of an axis with blocks in `from_layout`, e.g. c=48; default: the blocks are full.

    Returns:
        A contiguous array of the same library, dtype and device. It never shares memory with `x`.

    Raises:
        UsageError: a layout is not one, or the two have different axes; or an axis of `extents` does not exist.
        ArgumentError: `x` is not an array, has elements of another size, or its shape does not match `from_layout`.

    Examples:
        >>> import numpy as np
        >>> x = np.arange(6, dtype=np.int8).reshape(1, 6, 1, 1)
        >>> packed = pack(x, "NCHW4c")
        >>> packed.shape, packed[0, 1, 0, 0].tolist()
        ((1, 2, 1, 1, 4), [4, 5, 0, 0])
        >>> pack(np.ones((64, 48, 3, 3), np.int8), "OIHW32o32i").shape
        (2, 2, 3, 3, 32, 32)
    """
    to = Layout.parse(layout)
    source = Layout.parse(_plain(to) if from_layout is None else from_layout)
    return _converted(x, source, to, extents)


def unpack(x: object, layout: str, *, to_layout: str | None = None, **extents: int) -> Any:
    """The inverse of `pack`: drops the padding of the last block.

    Args:
        x: a NumPy array or a torch tensor (CPU or CUDA), with any strides; elements of 1, 2 or 4 bytes.
        layout: of `x`.
        to_layout: of the result, over the same axes; default: NCHW for images, OIHW for filters.
        extents: the true extent of each axis with blocks, e.g. c=48, or o=64, i=48; default: the blocks are full.

    Returns:
        A contiguous array of the same library, dtype and device. It never shares memory with `x`.

    Raises:
        UsageError: a layout is not one, or the two have different axes; or an axis of `extents` does not exist.
        ArgumentError: `x` is not an array, has elements of another size, or its shape does not match `layout` and `extents`.

    Examples:
        >>> import numpy as np
        >>> x = np.arange(6, dtype=np.int8).reshape(1, 6, 1, 1)
        >>> unpack(pack(x, "NCHW4c"), "NCHW4c", c=6).ravel().tolist()
        [0, 1, 2, 3, 4, 5]
    """
    source = Layout.parse(layout)
    return _converted(x, source, Layout.parse(_plain(source) if to_layout is None else to_layout), extents)


def _plain(layout: Layout) -> str:
    for plain in PLAIN:
        if sorted(plain) == sorted(layout.axes):
            return plain
    raise UsageError(
        f"layout {layout} has the axes {layout.axes}, so that the other layout has no default; "
        f"only the axes of {' and '.join(PLAIN)} have one: give the other layout too, e.g. {layout.axes}"
    )


def _converted(x: Any, source: Layout, to: Layout, extents: dict[str, int]) -> Any:
    if sorted(source.axes) != sorted(to.axes):
        raise UsageError(
            f"layouts {source} and {to} have different axes, {source.axes} and {to.axes}; "
            "give two layouts of images (N, C, H, W) or two of filters (O, I, H, W)"
        )
    itemsize = _itemsize(x)
    sizes = _sizes(tuple(x.shape), source, extents)
    bits = _bits(x, itemsize)
    packed = to.pack(source.unpack(bits, sizes, to.axes))
    if _shares_memory(packed, bits):
        packed = packed.clone() if is_torch_tensor(packed) else packed.copy()
    return packed.view(x.dtype)


def _itemsize(x: Any) -> int:
    import numpy as np

    if not (isinstance(x, np.ndarray) or is_torch_tensor(x)):
        raise ArgumentError(f"x is {type_text(x)}; allowed: a NumPy array or a torch tensor; give np.asarray(x)")
    itemsize = int(x.dtype.itemsize)
    if itemsize not in _ELEMENT_BYTES:
        raise ArgumentError(
            f"x has dtype {x.dtype} of {itemsize} bytes; allowed: dtypes of 1, 2 or 4 bytes; convert it first"
        )
    return itemsize


def _sizes(shape: tuple[int, ...], layout: Layout, extents: dict[str, int]) -> dict[str, int]:
    """The logical extent of each axis of an array with this shape."""
    if len(shape) != len(layout.dimensions):
        raise ArgumentError(
            f"x has {len(shape)} dimensions, {shape}; layout {layout} has {len(layout.dimensions)}: "
            f"{', '.join(layout.dimensions)}"
        )
    blocks = tuple(length for _, length in layout.blocks)
    if shape[len(layout.axes) :] != blocks:
        raise ArgumentError(
            f"x has shape {shape}, but in layout {layout} its last extents are {', '.join(map(str, blocks))}; "
            "give the layout that the array has"
        )
    outer = dict(zip(layout.axes, shape))
    sizes = {axis: outer[axis] * layout.block(axis) for axis in layout.axes}
    for name, extent in extents.items():
        axis, allowed = name.upper(), [each.lower() for each in layout.axes]
        if name not in allowed:
            raise UsageError(
                f"layout {layout} has no axis {name!r}{did_you_mean(name, allowed)}; allowed: {', '.join(allowed)}"
            )
        block = layout.block(axis)
        if not isinstance(extent, int) or isinstance(extent, bool) or -(-extent // block) != outer[axis]:
            least, most = max((outer[axis] - 1) * block + 1, 0), sizes[axis]
            allowed_extents = f"{least} to {most}" if least < most else str(most)
            raise ArgumentError(
                f"{name} is {extent!r}, but x of shape {shape} in layout {layout} holds {outer[axis]} x {block} along "
                f"{axis}; allowed: {allowed_extents}"
            )
        sizes[axis] = extent
    return sizes


def _bits(x: Any, itemsize: int) -> Any:
    """The elements as integers of the same size, because not every library can fill and copy float8 or bfloat16."""
    import numpy as np

    if is_torch_tensor(x):
        torch = sys.modules["torch"]
        return x.detach().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[itemsize])
    return x.view(np.dtype(f"u{itemsize}"))


def _shares_memory(a: Any, b: Any) -> bool:
    import numpy as np

    if is_torch_tensor(a):
        return bool(a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr())
    return bool(np.may_share_memory(a, b))
