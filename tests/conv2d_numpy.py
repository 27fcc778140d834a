"""conv2d in NumPy, and comparing a template's kernel on the GPU with it. The tests of the conv2d templates share it.

The GPU tests use small integers. Every sum is then exact in float32, and only the output is rounded, so results must be
equal bit for bit; only behind a curve such as gelu may they differ, within a bound for each element (`Expected`). 16-bit
floats travel as uint16 (`to_bits`), because NumPy has no bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.config import Config
from schedsearch.ops import STAGES
from schedsearch.space import ConfigSpace
from schedsearch.target import Target
from schedsearch.template import Template
from schedsearch.workload import Workload

Array = np.ndarray[Any, Any]
FLOAT_STAGES = tuple(
    name for name, kind in STAGES.items() if "float" in kind.takes and name != "quantise" and not kind.moves
)  # for convolutions of floats
SCALARS = {"leaky_relu_slope": 0.25, "clip_min": -5.0, "clip_max": 60.0}  # exact in every dtype


def integers(workload: Workload, rng: np.random.Generator) -> dict[str, Array]:
    """Every argument of the workload as float32 holding integers from -2 to 2."""
    return {a.name: rng.integers(-2, 3, a.shape, dtype=np.int8).astype(np.float32) for a in workload.signature}


# Stages that round even where everything else is an integer. A kernel's error is relative to 1 and, except that of
# sigmoid, to what the curve is of if that is larger: up to 5e-7 by its formula (test_activations.py), and as much again by
# the approximate instructions, whose relative errors are 2^-22 and 2^-23.
CURVES = {"sigmoid", "silu", "hard_swish", "gelu"}
CURVE_ERROR = 1e-6
STEEPEST = 1.5  # slope of any of them: that of hard_swish at 3
HALF_STEP = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}  # of rounding, relative


@dataclass(frozen=True)
class Expected:
    """What a kernel must write.

    Attributes:
        y: the exact values, float64, in the output's layout.
        error: for each element, how far a kernel's float32 may be from it; None if it must be equal.
        dtype: the output's, to which both are rounded.
    """

    y: Array
    error: Array | None
    dtype: str

    @property
    def bits(self) -> Array:
        """The exact values in `to_bits` form."""
        return to_bits(self.y, self.dtype)

    def check(self, bits: Array, what: str = "") -> None:
        """Fails unless a result, in `to_bits` form, is equal or within the error and the rounding of the output's dtype."""
        wrong = bits != self.bits
        if self.error is not None and wrong.any():
            allowed = self.error + HALF_STEP[self.dtype] * (np.abs(self.y) + self.error) + 2.0**-25  # float16 below 2^-14
            wrong &= ~(np.abs(from_bits(bits, self.dtype) - self.y) <= allowed)  # NaN is wrong
        assert not wrong.any(), f"{int(wrong.sum())} of {wrong.size} elements differ, first {np.argwhere(wrong)[0]}: {what}"


def numpy_conv2d(
    workload: Workload,
    arrays: Mapping[str, Array],
    scalars: Mapping[str, float] | None = None,
    *,
    absolute: bool = False,
    epilogue: bool = True,
) -> Array:
    """The definition: one matrix product per tap and group over whole padded images, float64, in the output's layout.

    Args:
        arrays: float arrays in the workload's layouts; bfloat16 as its uint16 bits.
        scalars: call-time scalars that are not at their default.
        absolute: convolve |x| and |weight|, without the epilogue.
        epilogue: whether to apply the epilogue.
    """
    values = {name: _as_float64(array) for name, array in arrays.items()}
    y = _convolution(workload, values, absolute)
    return y if absolute or not epilogue else _with_epilogue(workload, y, values, scalars or {})[0]


def _convolution(workload: Workload, values: Mapping[str, Array], absolute: bool = False) -> Array:
    x = values["x"].transpose([workload.layout.index(axis) for axis in "NHWC"])
    weight = values["weight"].transpose([workload.weight_layout.index(axis) for axis in "OHWI"])
    if absolute:
        x, weight = np.abs(x), np.abs(weight)
    top, left, bottom, right = workload.padding
    (stride_h, stride_w), (dilation_h, dilation_w) = workload.stride, workload.dilation
    x = np.pad(x, ((0, 0), (top, bottom), (left, right), (0, 0)))
    out_h = (x.shape[1] - (workload.r - 1) * dilation_h - 1) // stride_h + 1
    out_w = (x.shape[2] - (workload.s - 1) * dilation_w - 1) // stride_w + 1
    groups, inputs, outputs = workload.groups, workload.c // workload.groups, workload.k // workload.groups
    y = np.zeros((workload.n, out_h, out_w, workload.k))
    for r in range(workload.r):
        for s in range(workload.s):
            rows = slice(r * dilation_h, r * dilation_h + (out_h - 1) * stride_h + 1, stride_h)
            columns = slice(s * dilation_w, s * dilation_w + (out_w - 1) * stride_w + 1, stride_w)
            taps = np.ascontiguousarray(x[:, rows, columns].reshape(-1, groups, inputs).transpose(1, 0, 2))
            by_group = weight[:, r, s].reshape(groups, outputs, inputs).transpose(0, 2, 1)
            y += (taps @ by_group).transpose(1, 0, 2).reshape(y.shape)
    return y.transpose(["NHWC".index(axis) for axis in workload.output_layout])


def _with_epilogue(
    workload: Workload, y: Array, values: Mapping[str, Array], scalars: Mapping[str, float]
) -> tuple[Array, Array | None]:
    """The values behind the epilogue, and how far off a kernel in float32 may be: None up to the first curve."""
    given = {scalar.name: scalar.default for scalar in workload.scalars} | dict(scalars)
    error: Array | None = None

    def per_channel(name: str) -> Array:
        return values[name] if workload.output_layout == "NHWC" else values[name][:, None, None]

    for stage in workload.epilogue:
        if stage.name == "depth_to_space":
            y = depth_to_space(y, workload.output_layout, **stage.params)
            error = None if error is None else depth_to_space(error, workload.output_layout, **stage.params)
            continue
        before, steepest = y, 1.0 if stage.name not in CURVES else STEEPEST
        if stage.name == "bias":
            y = y + per_channel("bias")
        elif stage.name == "scale_shift":
            y, steepest = y * per_channel("scale") + per_channel("shift"), np.abs(per_channel("scale"))
        elif stage.name == "residual":
            y = y + values["residual"]
        elif stage.name == "relu":
            y = np.maximum(y, 0)
        elif stage.name == "leaky_relu":
            y = np.where(y > 0, y, y * np.float64(np.float32(given["leaky_relu_slope"])))
        elif stage.name == "clip":
            y = np.minimum(np.maximum(y, given["clip_min"]), given["clip_max"])
        else:
            y = _curve(stage.name, y)
            error = np.zeros_like(y) if error is None else error
        if error is not None:
            size = np.float64(1) if stage.name == "sigmoid" else np.maximum(np.abs(before), 1)
            own = CURVE_ERROR * size if stage.name in CURVES else 0
            rounding = HALF_STEP["float32"] * (steepest * np.abs(before) + np.abs(y))
            error = steepest * error + own + rounding
    return y, error


def _curve(name: str, x: Array) -> Array:
    if name == "hard_swish":
        return x * np.clip(x + 3, 0, 6) / 6
    if name == "gelu":
        return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
    with np.errstate(over="ignore"):
        return (x if name == "silu" else 1.0) / (1 + np.exp(-x))


def depth_to_space(y: Array, layout: str, *, block: int, mode: str) -> Array:
    """ONNX's DepthToSpace, as its documentation defines it, of an array in NHWC or NCHW."""
    order = [layout.index(axis) for axis in "NCHW"]
    n, k, h, w = (y.shape[axis] for axis in order)
    images = y.transpose(order)
    if mode == "DCR":
        parts = images.reshape(n, block, block, k // block**2, h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        parts = images.reshape(n, k // block**2, block, block, h, w).transpose(0, 1, 4, 2, 5, 3)
    shuffled = parts.reshape(n, k // block**2, h * block, w * block)
    return shuffled.transpose(["NCHW".index(axis) for axis in layout])


def _as_float64(array: Array) -> Array:
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def convolve(workload: Workload, x: Array, weight: Array) -> Array:
    """The convolution alone of float32 x and weight, as float32: exact for small integers."""
    return numpy_conv2d(workload, {"x": x, "weight": weight}, epilogue=False).astype(np.float32)


def expected(workload: Workload, arrays: Mapping[str, Array], scalars: Mapping[str, float] = SCALARS) -> Expected:
    """y as a kernel must write it."""
    values = {name: _as_float64(array) for name, array in arrays.items()}
    y, error = _with_epilogue(workload, _convolution(workload, values), values, scalars)
    return Expected(y, error, workload.out_dtype)


def to_bits(values: Array, dtype: str) -> Array:
    """Float32 numbers -> the contents of memory, rounded to nearest even; 16-bit floats as uint16."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = np.where(np.isnan(values), np.uint32(0x7FC00000), values.view(np.uint32))
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bits(bits: Array, dtype: str) -> Array:
    """Inverse of `to_bits`: float32."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits if dtype == "float32" else bits.view(np.float16).astype(np.float32)


def run_on_gpu(template: Template, workload: Workload, target: Target, config: Config, arrays: Mapping[str, Array]) -> Array:
    """Builds, launches twice over poisoned output, and returns y in `to_bits` form. `arrays` are float32.

    The second launch finds workspaces and counters as the first one left them. If y is a slice, it begins at the first
    element of the larger array, and the rest of that array must stay as it was.
    """
    from schedsearch.backend import compile_source
    from schedsearch.device import open_device

    artifact = compile_source(template.kernel(workload, target, config), target).artifact
    data = {a.name: to_bits(arrays[a.name], a.dtype) for a in workload.signature}
    output = workload.output
    whole = np.empty(output.slice_of or output.shape, np.float32 if workload.out_dtype == "float32" else np.uint16)
    device = open_device(target)
    addresses = {}
    try:
        for name, array in {**data, "y": whole}.items():
            addresses[name] = device.allocate(array.nbytes)
            if name != "y":
                device.copy_in(addresses[name], memoryview(array).cast("B"))
        device.fill(addresses["y"], 0xFF, whole.nbytes)  # NaN in every float format
        kernel = device.load(artifact)
        bound = kernel.bind(addresses, SCALARS)
        for _ in range(2):
            bound.launch()
        device.synchronize()
        device.copy_out(memoryview(whole).cast("B"), addresses["y"])
        kernel.close()
    finally:
        for address in addresses.values():
            device.free(address)
        device.close()
    within = tuple(slice(extent) for extent in output.shape)
    y = whole[within].copy()
    whole[within].view(f"u{whole.itemsize}")[...] = -1 % 2 ** (8 * whole.itemsize)
    assert (whole.view(np.uint8) == 0xFF).all(), f"elements around y are written: {workload.label} {config}"
    return y


def exactly(template: Template, workload: Workload, target: Target, seed: int = 0) -> Callable[[Config], None]:
    """A check that a configuration's result on the GPU is what is expected: right in every bit, unless there is a curve."""
    arrays = integers(workload, np.random.default_rng(seed))
    truth = expected(workload, arrays)

    def check(config: Config) -> None:
        truth.check(run_on_gpu(template, workload, target, config, arrays), f"{workload.label} {config}")

    return check


KINDS = ("default", "sampled")  # of configurations; tests of many shapes take one for each shape, by `some_of`


def check_schedules(
    check: Callable[[Config], None],
    template: Template,
    workload: Workload,
    target: Target,
    rng: np.random.Generator,
    kinds: Collection[str] = KINDS,
    space: ConfigSpace | None = None,
) -> None:
    """Checks the default configuration, a sampled one, or both, as `kinds` says.

    Args:
        space: what to sample from, if not the template's whole space.
    """
    whole = template.space(workload, target)
    if "default" in kinds:
        check(template.default(workload, target, whole))
    if "sampled" in kinds:
        check_sampled(check, space or whole, rng)


def check_sampled(check: Callable[[Config], None], space: ConfigSpace, rng: np.random.Generator) -> None:
    """Checks a sampled configuration. If this machine's compiler rejects one, it takes another."""
    from schedsearch.backend import RejectedError

    for config in space.sample(8, rng):
        try:
            check(config)
        except RejectedError:
            continue
        return
    raise AssertionError("the compiler rejects every configuration")
