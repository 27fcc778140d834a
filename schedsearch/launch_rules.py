"""What single values of a launch plan may be: CUDA's limits, and ours on what a file may ask for.

`schedsearch.launch` declares its fields by these types, and `schedsearch.fields` checks them wherever a plan comes from.

Sources of the limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" and "Kernel Parameter
Limits"; CUDA driver API, "Tensor Map Object Management".

See docs/decisions/018-launch-plans-are-checked.md.
"""

from __future__ import annotations

import sys
from typing import Annotated

from schedsearch.fields import AmongThese, Count, Matches, Within
from schedsearch.ops.dtypes import DTYPES, MAX_RANK, SCALAR_FORMATS

MAX_GRID_X = 2**31 - 1
MAX_GRID_YZ = 2**16 - 1
MAX_BLOCK_THREADS = 1024
MAX_BLOCK_Z = 64
MAX_BLOCKS_PER_SM = 32
MAX_CLUSTER = 16
MAX_SHARED_BYTES = 227 << 10
MAX_PARAM_BYTES = 32_764
TENSOR_MAP_BYTES = 128

MAX_STEPS = 64
MAX_NAMES = 256  # workspaces, and alignments
MAX_WORKSPACE_BYTES = 1 << 40
MAX_ALIGNMENT = 1 << 16
MAX_WORK_ITEMS = 1 << 48  # the CPU multiplies it by the number of threads, in 64 bits
MAX_TEXT = 255  # characters of a literal
LARGEST_FLOAT = {"float32": (2**24 - 1) * 2.0**104, "float64": sys.float_info.max}
CORNERS = {3: 2**15, 4: 2**7, 5: 2**4}  # rank -> an im2col corner is in [-limit, limit)
PARAM_BYTES = {
    "pointer": 8, "i32": 4, "i64": 8, "f32": 4, "scalar": 8, "tensor_map": TENSOR_MAP_BYTES, "number": 8, "literal": 8,
    "array": 8 * (5 + 2 * MAX_RANK),
}  # fmt: skip


def integers(bits: int, *, signed: bool = True) -> Within:
    """Those that so many bits hold."""
    return Within(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else Within(0, 2**bits - 1)


def finite(dtype: str) -> Within:
    """The finite numbers of a floating-point format."""
    return Within(-LARGEST_FLOAT[dtype], LARGEST_FLOAT[dtype])


Name = Annotated[str, Matches(r"[A-Za-z_][A-Za-z0-9_]{0,254}", "letters, digits and underscores, up to 255, no digit first")]
Format = Annotated[str, AmongThese(tuple(DTYPES))]
ScalarFormat = Annotated[str, AmongThese(tuple(SCALAR_FORMATS))]
BlockThreads = Annotated[int, Within(1, MAX_BLOCK_THREADS)]
SharedBytes = Annotated[int, Within(0, MAX_SHARED_BYTES)]
Cluster = Annotated[int, Within(1, MAX_CLUSTER)]
WorkItems = Annotated[int, Within(1, MAX_WORK_ITEMS)]
BlocksPerSm = Annotated[int, Within(0, MAX_BLOCKS_PER_SM)]
WorkspaceBytes = Annotated[int, Within(1, MAX_WORKSPACE_BYTES)]
Alignment = Annotated[int, AmongThese(tuple(1 << n for n in range(MAX_ALIGNMENT.bit_length())))]
AtMostNames = Count(0, MAX_NAMES)

# Of arrays and tensor maps, from cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col without interleaving.
ArrayExtent = Annotated[int, Within(1, 2**40)]
ArrayStride = Annotated[int, Within(0, 2**43)]
MapExtent = Annotated[int, Within(1, 2**32)]
MapStride = Annotated[int, Within(0, 2**40 - 16, multiple=16)]
ElementStride = Annotated[int, Within(1, 8)]
Corner = Annotated[int, Within(-(2**15), 2**15 - 1)]
BoxExtent = Annotated[int, Within(1, 256)]
PixelsPerColumn = Annotated[int, Within(0, 1024)]
SwizzleBytes = Annotated[int, AmongThese((0, 32, 64, 128))]
PromotionBytes = Annotated[int, AmongThese((0, 64, 128, 256))]
