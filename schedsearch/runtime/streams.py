"""Turns CUDA streams of other libraries into the driver's handles."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from schedsearch.errors import ArgumentError
from schedsearch.text import type_text


def raw_stream(stream: object, library: str, device: tuple[str, int]) -> int:
    """The driver's handle of a stream.

    Args:
        stream: an integer handle, a torch, CuPy or cuda.core stream, or None for the current one of `library`.
        library: the library of the arrays that are used on the stream.
        device: (cpu or cuda, ordinal). On the CPU there are no streams, and the handle is 0.

    Raises:
        ArgumentError: `stream` is something else.
    """
    if stream is None:
        return current_stream(library, device)()
    if isinstance(stream, int):
        return stream
    for attribute in ("cuda_stream", "ptr"):
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    raise ArgumentError(f"stream is {type_text(stream)}; allowed: an integer handle, a torch, CuPy or cuda.core stream")


@functools.cache
def current_stream(library: str, device: tuple[str, int]) -> Callable[[], int]:
    """A function that returns the handle of the library's current stream of a device in the calling thread."""
    kind, ordinal = device
    if kind == "cuda" and library == "torch":
        import torch

        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # takes a tenth of the time of the public way
        return functools.partial(raw, ordinal) if raw else lambda: int(torch.cuda.current_stream(ordinal).cuda_stream)
    if kind == "cuda" and library == "cupy":
        return lambda: int(sys.modules["cupy"].cuda.get_current_stream().ptr)
    return lambda: 0
