"""The truth about conv2d: a naive float64 kernel for either kind of target, and NumPy at single points.

One kernel source serves both targets; what differs (reading a number of the workload's dtype, writing a float64, which items
a thread takes) comes in as operations. A thread computes one pixel of four output channels, so that x is read once for four
products. Neighbouring threads take neighbouring pixels: they share their weights, and with NCHW their reads are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import types

from schedsearch.launch import Float32, Grid, Int64, Param, Pointer, Scalar
from schedsearch.ops import STAGES, ArgSpec
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Reference
from schedsearch.workload import Workload

_CHANNELS = 4  # output channels per thread; the kernel spells them out
_CUDA_THREADS = 128
_CUDA_MAX_BLOCKS = 1 << 20  # beyond that threads loop
_POINTS_ELEMENTS = 1 << 22  # products that `points` holds at once

_STAGE_CODES = {stage: code for code, stage in enumerate(STAGES)}
_BIAS, _SCALE_SHIFT, _RESIDUAL = _STAGE_CODES["bias"], _STAGE_CODES["scale_shift"], _STAGE_CODES["residual"]
_RELU, _LEAKY_RELU, _CLIP = _STAGE_CODES["relu"], _STAGE_CODES["leaky_relu"], _STAGE_CODES["clip"]


class Conv2dReference(Reference):
    """Magnitude through the epilogue: bias, shift and residual add their absolute values to `magnitude`, scale
    multiplies it, leaky_relu multiplies it by max(1, |slope|); relu and clip bring values together and leave it."""

    op = "conv2d"

    def kernel(self, workload: Workload, target: Target) -> KernelSource:
        groups_of_channels = math.ceil(workload.k // workload.groups / _CHANNELS)
        oh, ow = workload.definition.output_hw(workload.params)  # type: ignore[attr-defined]
        items = workload.n * workload.groups * groups_of_channels * oh * ow
        given = {arg.name for arg in workload.signature}
        params: tuple[Param, ...] = (
            Pointer("x"),
            Pointer("weight"),
            *(Pointer(name, optional=name not in given) for name in ("bias", "scale", "shift", "residual")),
            Pointer("y"),
            Pointer("magnitude"),
            *_given(
                ("leaky_relu_slope", "clip_min", "clip_max"),
                {scalar.name for scalar in workload.scalars},
                Scalar,
                Float32(0.0),
            ),
        )
        if target.kind == "cpu":
            function = _kernel(workload, _cpu_operations(workload))
            return KernelSource("cpu", "native", (KernelStep(function, params, Grid(items), target.sms),))
        function = _kernel(workload, _cuda_operations(workload))
        blocks = min(math.ceil(items / _CUDA_THREADS), _CUDA_MAX_BLOCKS)
        step = KernelStep(function, (*params, Int64(0), Int64(items)), Grid(blocks), _CUDA_THREADS, shaped_by=frozenset())
        major, minor = target.compute_capability
        return KernelSource("cuda", f"sm_{major}{minor}", (step,))

    def points(
        self, workload: Workload, arrays: Mapping[str, Any], scalars: Mapping[str, float], flat_indices: Any
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        """y before the cast to out_dtype, at flat indices into the output as it lies in memory.

        Args:
            arrays: the workload's arguments by name, in their layout. bfloat16 as uint16 bits or any dtype that converts.
            scalars: call-time scalars; the default where one is not given.
            flat_indices: int (p,).

        Returns:
            float64 (p,).
        """
        indices = np.asarray(flat_indices, dtype=np.int64)
        per_point = workload.c // workload.groups * workload.r * workload.s
        chunk = max(_POINTS_ELEMENTS // per_point, 1)
        values = {scalar.name: float(np.float32(scalars.get(scalar.name, scalar.default))) for scalar in workload.scalars}
        parts = [_points(workload, arrays, values, indices[at : at + chunk]) for at in range(0, len(indices), chunk)]
        return np.concatenate(parts) if parts else np.empty(0)


def _given(names: tuple[str, ...], present: set[str], make: Callable[[str], Param], absent: Param) -> list[Param]:
    return [make(name) if name in present else absent for name in names]


def _strides(arg: ArgSpec, order: str) -> tuple[int, ...]:
    """Elements between neighbours along the axes in `order`."""
    return tuple(math.prod(arg.shape[arg.axes.index(axis) + 1 :]) for axis in order)


# ---- the kernel


@dataclass(frozen=True)
class _Operations:
    """What a target has to provide. Addresses are integers.

    Attributes:
        load: `load(address) -> float64` of a number of the workload's dtype.
        load_out: the same of its out_dtype.
        store: `store(address, value)` of a float64.
        first, step: `first() -> i64` and `step() -> i64`: a thread takes items start + first, then every step-th.
    """

    load: Any
    load_out: Any
    store: Any
    first: Any
    step: Any


def _cpu_operations(workload: Workload) -> _Operations:
    from schedsearch.backend.cpu_ops import constant, load_op, store_op

    return _Operations(load_op(workload.dtype), load_op(workload.out_dtype), store_op("float64"), constant(0), constant(1))


def _cuda_operations(workload: Workload) -> _Operations:
    from schedsearch.backend.ops import device_op

    widen = {
        "float16": "{ .reg .b16 h; ld.global.nc.b16 h, [$address]; cvt.f64.f16 $value, h; }",
        "bfloat16": "{ .reg .b16 h, z; .reg .b32 w; mov.b16 z, 0; ld.global.nc.b16 h, [$address]; mov.b32 w, {z, h}; "
        "cvt.f64.f32 $value, w; }",
        "float32": "{ .reg .f32 w; ld.global.nc.f32 w, [$address]; cvt.f64.f32 $value, w; }",
    }

    def load(dtype: str) -> Any:  # pure, since nothing writes what it reads while the kernel runs
        return device_op(f"load_{dtype}", widen[dtype], ins={"address": "i64"}, outs={"value": "f64"}, pure=True)

    special = "{ .reg .b32 a, b, c; mov.u32 a, %%%s; mov.u32 b, %%ntid.x; %s }"
    return _Operations(
        load(workload.dtype),
        load(workload.out_dtype),
        device_op("store_float64", "st.global.f64 [$address], $value;", ins={"address": "i64", "value": "f64"}),
        device_op(
            "first",
            special % ("ctaid.x", "mov.u32 c, %tid.x; mul.wide.u32 $item, a, b; { .reg .b64 t; cvt.u64.u32 t, c; "
                       "add.s64 $item, $item, t; }"),
            outs={"item": "i64"},
            pure=True,
        ),
        device_op("step", special % ("nctaid.x", "mul.wide.u32 $items, a, b;"), outs={"items": "i64"}, pure=True),
    )  # fmt: skip


def _kernel(p: Workload, operations: _Operations) -> Callable[..., None]:
    """f(x, weight, bias, scale, shift, residual, y, magnitude, slope, low, high, start, stop), addresses and float32s."""
    load, load_out, store, first, step = (
        operations.load, operations.load_out, operations.store, operations.first, operations.step
    )  # fmt: skip
    x_arg, w_arg, y_arg = p.signature[0], p.signature[1], p.output
    size, out_size = dtype_of(p.dtype).nbytes, dtype_of(p.out_dtype).nbytes
    xn, xc, xh, xw = (size * stride for stride in _strides(x_arg, "NCHW"))  # bytes
    wo, wi, wr, ws = (size * stride for stride in _strides(w_arg, "OIHW"))
    yn, yk, yp, yq = _strides(y_arg, "NCHW")  # elements
    oh, ow = p.definition.output_hw(p.params)  # type: ignore[attr-defined]
    height, width, kr, ks = p.h, p.w, p.r, p.s
    groups, reduced, outputs = p.groups, p.c // p.groups, p.k // p.groups
    quads = math.ceil(outputs / _CHANNELS)
    stride_h, stride_w = p.stride
    dilation_h, dilation_w = p.dilation
    top, left = p.padding[:2]
    stages = (*(_STAGE_CODES[stage.name] for stage in p.epilogue), -1)
    stage_count = len(p.epilogue)

    def conv2d_reference(  # type: ignore[no-untyped-def]
        x, weight, bias, scale, shift, residual, y, magnitude, slope, low, high, start, stop
    ):
        x, weight, y, magnitude = types.int64(x), types.int64(weight), types.int64(y), types.int64(magnitude)
        bias, scale, shift, residual = types.int64(bias), types.int64(scale), types.int64(shift), types.int64(residual)
        for item in range(start + first(), stop, step()):
            q = item % ow
            row = item // ow % oh
            rest = item // (ow * oh)
            k0 = rest % quads * _CHANNELS
            group = rest // quads % groups
            n = rest // (quads * groups)
            # Channels past the group's last repeat it; they are not stored.
            w0 = weight + (group * outputs + k0) * wo
            w1 = w0 + min(1, outputs - 1 - k0) * wo
            w2 = w0 + min(2, outputs - 1 - k0) * wo
            w3 = w0 + min(3, outputs - 1 - k0) * wo
            sum0 = sum1 = sum2 = sum3 = 0.0
            bound0 = bound1 = bound2 = bound3 = 0.0
            for r in range(kr):
                h = row * stride_h - top + r * dilation_h
                if h < 0 or h >= height:
                    continue
                for s in range(ks):
                    w = q * stride_w - left + s * dilation_w
                    if w < 0 or w >= width:
                        continue
                    x_at = x + n * xn + group * reduced * xc + h * xh + w * xw
                    w_at = r * wr + s * ws
                    for _ in range(reduced):
                        value = load(x_at)
                        product = value * load(w0 + w_at)
                        sum0 += product
                        bound0 += abs(product)
                        product = value * load(w1 + w_at)
                        sum1 += product
                        bound1 += abs(product)
                        product = value * load(w2 + w_at)
                        sum2 += product
                        bound2 += abs(product)
                        product = value * load(w3 + w_at)
                        sum3 += product
                        bound3 += abs(product)
                        x_at += xc
                        w_at += wi
            for j in range(min(_CHANNELS, outputs - k0)):
                total = sum0 if j == 0 else sum1 if j == 1 else sum2 if j == 2 else sum3
                bound = bound0 if j == 0 else bound1 if j == 1 else bound2 if j == 2 else bound3
                k = group * outputs + k0 + j
                at = n * yn + k * yk + row * yp + q * yq
                for position in range(stage_count):
                    stage = stages[position]
                    if stage == _BIAS:
                        addend = load(bias + k * size)
                        total += addend
                        bound += abs(addend)
                    elif stage == _SCALE_SHIFT:
                        factor = load(scale + k * size)
                        addend = load(shift + k * size)
                        total = total * factor + addend
                        bound = bound * abs(factor) + abs(addend)
                    elif stage == _RESIDUAL:
                        addend = load_out(residual + at * out_size)
                        total += addend
                        bound += abs(addend)
                    elif stage == _RELU:
                        total = 0.0 if total < 0.0 else total
                    elif stage == _LEAKY_RELU:
                        total = total * slope if total < 0.0 else total
                        bound = bound * abs(slope) if abs(slope) > 1.0 else bound
                    elif stage == _CLIP:
                        total = low if total < low else total
                        total = high if total > high else total
                store(y + at * 8, total)
                store(magnitude + at * 8, bound)

    return conv2d_reference


# ---- NumPy


def _points(p: Workload, arrays: Mapping[str, Any], scalars: Mapping[str, float], flat: Any) -> Any:
    place = dict(zip(p.output.axes, np.unravel_index(flat, p.output.shape)))
    n, k, row, q = (place[axis] for axis in "NCHW")
    reduced, outputs = p.c // p.groups, p.k // p.groups
    x, weight = p.signature[:2]
    channel = (k // outputs * reduced)[:, None] + np.arange(reduced)
    h = (row * p.stride[0] - p.padding[0])[:, None] + np.arange(p.r) * p.dilation[0]
    w = (q * p.stride[1] - p.padding[1])[:, None] + np.arange(p.s) * p.dilation[1]
    inside = ((h >= 0) & (h < p.h))[:, None, :, None] & ((w >= 0) & (w < p.w))[:, None, None, :]
    axes_x = {
        "N": n[:, None, None, None],
        "C": channel[:, :, None, None],
        "H": np.clip(h, 0, p.h - 1)[:, None, :, None],
        "W": np.clip(w, 0, p.w - 1)[:, None, None, :],
    }
    axes_w = {
        "O": k[:, None, None, None],
        "I": np.arange(reduced)[None, :, None, None],
        "H": np.arange(p.r)[None, None, :, None],
        "W": np.arange(p.s)[None, None, None, :],
    }
    # Only what is gathered becomes float64: the arrays may have gigabytes.
    pixels = np.asarray(arrays["x"])[tuple(axes_x[axis] for axis in x.axes)]
    filters = np.asarray(arrays["weight"])[tuple(axes_w[axis] for axis in weight.axes)]
    patch = np.where(inside, _float64(pixels, x.dtype), 0.0)
    y = np.einsum("pcrs,pcrs->p", patch, _float64(filters, weight.dtype))
    for stage in (each.name for each in p.epilogue):
        if stage == "bias":
            y = y + _float64(arrays["bias"], p.dtype)[k]
        elif stage == "scale_shift":
            y = y * _float64(arrays["scale"], p.dtype)[k] + _float64(arrays["shift"], p.dtype)[k]
        elif stage == "residual":
            y = y + _float64(np.asarray(arrays["residual"]).reshape(-1)[flat], p.out_dtype)
        elif stage == "relu":
            y = np.maximum(y, 0.0)
        elif stage == "leaky_relu":
            y = np.where(y < 0, y * scalars["leaky_relu_slope"], y)
        elif stage == "clip":
            y = np.minimum(np.maximum(y, scalars["clip_min"]), scalars["clip_max"])
        else:
            raise NotImplementedError(f"the reference does not know the epilogue stage {stage!r}")
    return y


def _float64(array: Any, dtype: str) -> Any:
    array = np.asarray(array)
    if dtype == "bfloat16" and array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)
