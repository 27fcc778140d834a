"""Images of any layout as rows of pixels, for operators that treat every channel alike: pool2d and resize.

In each layout an array is `planes` images of h x w pixels, and a pixel is a run of channels that are neighbours in memory:

    NHWC       n planes of pixels with c channels
    NCHW       n * c planes of pixels with one channel
    NCHW32c    n * ceil(c / 32) planes of pixels with 32 channels
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from schedsearch.errors import Problem, did_you_mean
from schedsearch.ops.layout import Layout
from schedsearch.ops.params import Parameter, Params
from schedsearch.ops.specs import ArgSpec

PLAIN = ("NHWC", "NCHW")
MAX_BLOCK = 256  # channels
_BLOCKED = re.compile(r"NCHW([1-9][0-9]{0,2})c")

IMAGE_SIZES: Mapping[str, Parameter] = {
    "n": Parameter.count("batch"),
    "c": Parameter.count("channels"),
    "h": Parameter.count("input height"),
    "w": Parameter.count("input width"),
}
IMAGE_LAYOUT = Parameter(
    "axes of x and y in memory: NHWC, NCHW, or NCHW[x]c with blocks of x channels (NCHW32c); default NHWC",
    {"type": "string", "default": "NHWC"},
)


class ImageParams(Params):
    n: int
    c: int
    h: int
    w: int
    dtype: str
    layout: str


def image_layout_problems(layout: object) -> list[Problem]:
    """A problem if a value is not a layout of images."""
    blocked = _BLOCKED.fullmatch(layout) if isinstance(layout, str) else None
    if layout in PLAIN or (blocked is not None and int(blocked[1]) <= MAX_BLOCK):
        return []
    hint = did_you_mean(layout.upper(), PLAIN) if isinstance(layout, str) else ""
    allowed = f"allowed: {', '.join(PLAIN)}, NCHW[x]c with up to {MAX_BLOCK} channels in a block (e.g. NCHW32c)"
    return [Problem("layout", f"layout {layout!r} is not possible{hint}; {allowed}")]


def planes_of(p: ImageParams) -> tuple[int, int]:
    """(planes, channels of a pixel) of a workload with n, c and layout."""
    if p.layout == "NHWC":
        return p.n, p.c
    block = Layout.parse(p.layout).block("C")
    return p.n * -(-p.c // block), block


def image(name: str, p: ImageParams, height: int, width: int) -> ArgSpec:
    """The array of n images with c channels, of the workload's layout and dtype."""
    sizes = {"N": p.n, "C": p.c, "H": height, "W": width}
    return ArgSpec(name, p.layout, Layout.parse(p.layout).shape(sizes), p.dtype)
