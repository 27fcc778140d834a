"""Operations for kernels that check other kernels: read numbers of any dtype, write truths, share work; for CPUs and GPUs.

Floats of every format become float64, integers int64, so that one kernel source serves all dtypes and both targets::

    at = access(target.kind)
    first, step, load, store = at.first, at.step, at.load("bfloat16"), at.store("float64")

    def double(x, y, start, stop):
        x, y = types.int64(x), types.int64(y)
        for i in range(start + first(), stop, step()):
            store(y + 8 * i, 2.0 * load(x + 2 * i))
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from schedsearch.ops.dtypes import dtype
from schedsearch.typed import DeviceFunction

Wide = Literal["float64", "int64"]


@dataclass(frozen=True)
class Access:
    """Operations for the kernels of one kind of target. Addresses are int64.

    Attributes:
        load: `load(dtype)` makes `load(address)`, which reads one number: float64 for a float format, int64 for an integer
            format. The same kernel must not write the memory that it reads.
        store: `store(wide)` makes `store(address, value)` for a float64 or an int64.
        first, step: `first() -> int64`, `step() -> int64`: a thread takes the items start + first, start + first + step ...
            below stop.
    """

    load: Callable[[str], Any]
    store: Callable[[Wide], Any]
    first: Any
    step: Any


@functools.cache
def access(kind: Literal["cuda", "cpu"]) -> Access:
    """The operations for a kind of target. Needs Numba, or Numba-CUDA; neither a GPU nor a driver."""
    if kind == "cpu":
        from schedsearch.backend.cpu_ops import constant, load_op, store_op

        return Access(load_op, store_op, constant(0), constant(1))
    from schedsearch.backend.ops import device_op

    special = "{ .reg .b32 a, b, c; mov.u32 a, %%%s; mov.u32 b, %%ntid.x; %s }"
    first = device_op(
        "first",
        special % ("ctaid.x", "mov.u32 c, %tid.x; mul.wide.u32 $item, a, b; { .reg .b64 t; cvt.u64.u32 t, c; "
                   "add.s64 $item, $item, t; }"),
        outs={"item": "i64"},
        pure=True,
    )  # fmt: skip
    step = device_op("step", special % ("nctaid.x", "mul.wide.u32 $items, a, b;"), outs={"items": "i64"}, pure=True)
    return Access(_cuda_load, _cuda_store, first, step)


@functools.cache
def _cuda_load(name: str) -> DeviceFunction:
    from schedsearch.backend.ops import device_op

    wide = "f64" if dtype(name).is_float else "i64"
    return device_op(
        f"load_{name}", f"{{ {_cuda_load_ptx(name)} }}", ins={"address": "i64"}, outs={"value": wide}, pure=True
    )


def _cuda_load_ptx(name: str) -> str:
    row = dtype(name)
    if not row.is_float:
        # A load of 8 bits extends them to its wider register (PTX ISA, "Operand Size Exceeding Instruction-Type Size").
        wide = row.ptx[0] + "64"
        if row.nbytes == 8:
            return f"ld.global.nc.{wide} $value, [$address];"
        register = f"{row.ptx[0]}{max(16, 8 * row.nbytes)}"
        return f".reg .{register} n; ld.global.nc.{row.ptx} n, [$address]; cvt.{wide}.{register} $value, n;"
    if name in ("float16", "float32"):
        return f".reg .{row.ptx_bits} w; ld.global.nc.{row.ptx_bits} w, [$address]; cvt.f64.{row.ptx} $value, w;"
    if name == "float64":
        return "ld.global.nc.f64 $value, [$address];"
    if name == "bfloat16":
        return (
            ".reg .b16 h, z; .reg .b32 w; mov.b16 z, 0; ld.global.nc.b16 h, [$address]; mov.b32 w, {z, h}; "
            "cvt.f64.f32 $value, w;"
        )
    if name == "float8_e5m2":  # the upper half of a float16
        return ".reg .u16 b; .reg .b16 h; ld.global.nc.u8 b, [$address]; shl.b16 h, b, 8; cvt.f64.f16 $value, h;"
    # float8_e4m3: its bits, shifted into a float16, mean the number times 2 ** -8; all ones are NaN.
    return (
        ".reg .u16 b; .reg .b16 h, s; .reg .pred p; .reg .f64 f; ld.global.nc.u8 b, [$address]; "
        "and.b16 s, b, 128; shl.b16 s, s, 8; and.b16 h, b, 127; setp.eq.u16 p, h, 127; shl.b16 h, h, 7; or.b16 h, h, s; "
        "cvt.f64.f16 f, h; mul.f64 f, f, 0d4070000000000000; selp.f64 $value, 0dFFF8000000000000, f, p;"
    )


@functools.cache
def _cuda_store(wide: Wide) -> DeviceFunction:
    from schedsearch.backend.ops import device_op

    kind = {"float64": "f64", "int64": "i64"}[wide]
    ptx = f"st.global.{'f64' if kind == 'f64' else 'b64'} [$address], $value;"
    return device_op(f"store_{wide}", ptx, ins={"address": "i64", "value": kind})
