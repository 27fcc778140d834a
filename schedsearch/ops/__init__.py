"""The operators that schedsearch knows: parameters, arguments, output and work of each, as plain data."""

from __future__ import annotations

from schedsearch.ops.base import DTYPE_BYTES, ArgSpec, Op, ScalarSpec
from schedsearch.ops.conv2d import CONV2D, EPILOGUE_STAGES
from schedsearch.ops.foreign import FOREIGN

# What can be computed here, and beside it what only records may be about.
OPS: dict[str, Op] = {CONV2D.name: CONV2D}
RECORDED_OPS: dict[str, Op] = {**OPS, FOREIGN.name: FOREIGN}

__all__ = ["CONV2D", "DTYPE_BYTES", "EPILOGUE_STAGES", "OPS", "RECORDED_OPS", "ArgSpec", "Op", "ScalarSpec"]
