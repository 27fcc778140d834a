"""Arrays of other libraries, seen as address, shape, strides, dtype and device, without importing those libraries.

PyTorch tensors are recognised by their class, all other arrays by `__cuda_array_interface__`, `__array_interface__` (NumPy)
or DLPack. Nothing is copied.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from schedsearch.errors import ArgumentError, did_you_mean
from schedsearch.ops import ArgSpec
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.dtypes import from_library
from schedsearch.ops.layout import is_torch_tensor
from schedsearch.text import type_text

if TYPE_CHECKING:
    from schedsearch.workload import Workload


@dataclass(frozen=True)
class ArrayView:
    """Strides are in elements; `device` is (cpu or cuda, ordinal); `library` is torch, cupy, numpy or another module;
    `readonly` is true if the library says so."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: tuple[str, int]
    library: str
    readonly: bool = False


def view(array: Any, name: str) -> ArrayView:
    """Looks at an array.

    Args:
        array: a torch, CuPy or NumPy array, or anything with DLPack or an array interface.
        name: of the argument, for messages.

    Raises:
        ArgumentError: it is not such an array, or it is on a device that no kernel runs on.
    """
    library = type(array).__module__.partition(".")[0]
    if is_torch_tensor(array):
        if array.device.type not in ("cpu", "cuda"):
            raise ArgumentError(f"{name} is on device {array.device}; allowed: cpu or cuda, as the kernel's target")
        if array.layout is not sys.modules["torch"].strided:
            raise ArgumentError(f"{name} has layout {array.layout}; allowed: torch.strided; give {name}.to_dense()")
        _check_memory(name, array)
        device = (array.device.type, array.device.index or 0)
        dtype = from_library(str(array.dtype).removeprefix("torch."))
        return ArrayView(array.data_ptr(), tuple(array.shape), tuple(array.stride()), dtype, device, "torch")
    if library == "numpy" and type(array) is sys.modules["numpy"].ndarray and (known := _known(array.dtype)):
        itemsize, dtype = known
        strides_bytes = array.strides
        _check_strides(name, array.shape, strides_bytes, itemsize)
        address, readonly = array.__array_interface__["data"]
        strides = tuple(stride // itemsize for stride in strides_bytes)
        return ArrayView(address, array.shape, strides, dtype, ("cpu", 0), library, readonly)
    if hasattr(array, "__cuda_array_interface__"):
        return _from_interface(array.__cuda_array_interface__, array, ("cuda", _cuda_ordinal(array)), library, name)
    if hasattr(array, "__array_interface__"):
        return _from_interface(array.__array_interface__, array, ("cpu", 0), library, name)
    if hasattr(array, "__dlpack__"):
        return _from_dlpack(array, name, library)
    raise ArgumentError(
        f"{name} is {type_text(array)}; allowed: a torch, CuPy or NumPy array, or one with DLPack or "
        "__cuda_array_interface__"
    )


def _check_memory(name: str, tensor: Any) -> None:
    """Raises ArgumentError if a tensor's numbers are not in its memory as they are."""
    if tensor.is_neg():
        raise ArgumentError(
            f"{name} is negated when it is read, as the imaginary part of a conjugate; give {name}.resolve_neg()"
        )
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride()))
    needed = (tensor.storage_offset() + span) * tensor.element_size() if tensor.numel() else 0
    if needed > (nbytes := tensor.untyped_storage().nbytes()):
        raise ArgumentError(
            f"{name} needs {needed} bytes of memory and its storage has {nbytes}: it was freed or made smaller; give "
            "another tensor"
        )


@functools.lru_cache(maxsize=64)
def _known(dtype: Any) -> tuple[int, str] | None:
    """Bytes of an element and our name of a dtype of NumPy; None if it needs a closer look. NumPy makes its name anew every
    time it is asked."""
    return (dtype.itemsize, from_library(dtype.name)) if dtype.isnative and dtype.itemsize else None


def _check_strides(name: str, shape: Sequence[int], strides_bytes: Sequence[int], itemsize: int) -> None:
    if any(n > 1 and stride % itemsize for n, stride in zip(shape, strides_bytes)):
        raise ArgumentError(
            f"{name} has strides of {strides_bytes} bytes, not whole elements of {itemsize}; make it contiguous"
        )


def _cuda_ordinal(array: object) -> int:
    device = getattr(array, "device", None)
    return int(getattr(device, "id", 0)) if not isinstance(device, int) else device


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _from_interface(interface: object, array: object, device: tuple[str, int], library: str, name: str) -> ArrayView:
    try:
        shape, strides_bytes, dtype, address, readonly = _read_interface(interface, getattr(array, "dtype", None))
    except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ArgumentError(
            f"{name}, {type_text(array)}, has an array interface that makes no sense ({reason:.200}); "
            "give an array of torch, CuPy or NumPy"
        ) from None
    _check_strides(name, shape, strides_bytes or (), dtype.itemsize)
    strides = contiguous_strides(shape) if strides_bytes is None else tuple(s // dtype.itemsize for s in strides_bytes)
    declared = getattr(array, "dtype", dtype)  # bfloat16 has no typestr of its own
    dtype_name = from_library(getattr(declared, "name", dtype.name))
    if not dtype.isnative:
        dtype_name += " of the other byte order"
    return ArrayView(address, shape, strides, dtype_name, device, library, readonly)


def _read_interface(interface: Any, declared: Any = None) -> tuple[tuple[int, ...], tuple[int, ...] | None, Any, int, bool]:
    """Shape, strides in bytes (None if contiguous), dtype, address and read-only of an array interface.

    Args:
        declared: the array's own dtype, for the types of ml_dtypes whose typestr NumPy does not know.

    Raises:
        TypeError, ValueError, KeyError, IndexError, OverflowError: an entry is missing or makes no sense.
    """
    import numpy as np

    shape = tuple(operator.index(extent) for extent in interface["shape"])
    given = interface.get("strides")
    strides = None if given is None else tuple(operator.index(stride) for stride in given)
    if any(extent < 0 for extent in shape):
        raise ValueError(f"the shape is {shape}")
    if strides is not None and len(strides) != len(shape):
        raise ValueError(f"{len(strides)} strides for {len(shape)} axes")
    try:
        dtype = np.dtype(interface["typestr"])
    except TypeError:
        if not isinstance(declared, np.dtype):
            raise
        dtype = declared
    if not dtype.itemsize:
        raise ValueError(f"the typestr is {interface['typestr']!r}")
    address, readonly = interface["data"]
    address = 0 if address is None else operator.index(address)
    if not 0 <= address < 2**64:
        raise ValueError(f"the address is {address}")
    return shape, strides, dtype, address, bool(readonly)


class _DLTensor(ctypes.Structure):
    """DLTensor of the DLPack specification, version 0."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_DLPACK_DEVICES = {1: "cpu", 2: "cuda"}
_DLPACK_TYPES = {0: "int", 1: "uint", 2: "float", 4: "bfloat"}


def _from_dlpack(array: Any, name: str, library: str) -> ArrayView:
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    try:
        device_type, ordinal = (int(number) for number in array.__dlpack_device__())
        if device_type not in _DLPACK_DEVICES:
            raise ArgumentError(f"{name} is on DLPack device type {device_type}; allowed: 1 (CPU) and 2 (CUDA)")
        capsule = array.__dlpack__()  # its destructor frees the unused tensor; `array` keeps the memory alive
        pointer = get_pointer(capsule, b"dltensor")
    except ArgumentError:
        raise
    except (TypeError, ValueError, OverflowError, BufferError) as error:
        raise ArgumentError(
            f"{name}, {type_text(array)}, has DLPack that makes no sense ({error!s:.200}); give an array of torch, "
            "CuPy or NumPy"
        ) from None
    tensor = ctypes.cast(pointer, ctypes.POINTER(_DLTensor)).contents
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else contiguous_strides(shape)
    dtype = f"{_DLPACK_TYPES.get(tensor.type_code, 'unknown')}{tensor.type_bits}"
    return ArrayView(
        (tensor.data or 0) + tensor.byte_offset,
        shape,
        strides,
        dtype,
        (_DLPACK_DEVICES[device_type], ordinal),
        library,
    )


FORMS = ("plain", "channels_last")
_LOGICAL_AXES = {"NHWC": "NCHW", "OHWI": "OIHW"}


@dataclass(frozen=True)
class Form:
    """One way in which a caller may hold an argument: shape and strides (in elements) of the same memory."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def matches(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
        """Whether shape and strides describe this form; strides along axes of extent 1 do not matter."""
        return shape == self.shape and all(
            extent == 1 or stride == own for extent, stride, own in zip(shape, strides, self.strides)
        )


def forms(spec: ArgSpec) -> tuple[Form, ...]:
    """The forms of an argument: `plain`, and for NHWC and OHWI also `channels_last` (a logical NCHW or OIHW array)."""
    plain = Form("plain", spec.shape, contiguous_strides(spec.slice_of or spec.shape))
    logical = _LOGICAL_AXES.get(spec.axes)
    if logical is None:
        return (plain,)
    order = [spec.axes.index(axis) for axis in logical]
    return plain, Form("channels_last", tuple(spec.shape[i] for i in order), tuple(plain.strides[i] for i in order))


def form_of(spec: ArgSpec, shape: tuple[int, ...], strides: tuple[int, ...]) -> Form | None:
    """The form in which an array of this shape and these strides (in elements) holds the argument, or None."""
    return next((form for form in forms(spec) if form.matches(shape, strides)), None)


def output_form(spec: ArgSpec, name: str) -> Form:
    """The form of an output if the first argument has form `name`: the same if the output has this form, else plain."""
    plain, *others = forms(spec)
    return next((form for form in others if form.name == name), plain)


@dataclass(frozen=True)
class OutputLike:
    """Shape, strides (in elements) and dtype of an output array."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


def output_like(workload: Workload, form: str = "plain") -> tuple[OutputLike, ...]:
    """The arrays that a kernel of this workload returns, without a kernel or a device, e.g. for PyTorch's fake kernels.

    Args:
        workload: what to compute.
        form: the form of the first argument, plain or channels_last; `form_of` finds it for an array.

    Raises:
        ArgumentError: the form does not exist.

    Examples:
        >>> workload = schedsearch.Workload.conv2d(n=1, h=8, w=8, c=16, k=32, r=1, s=1)
        >>> output_like(workload, "channels_last")
        (OutputLike(name='y', shape=(1, 32, 8, 8), strides=(2048, 1, 256, 32), dtype='float16'),)
    """
    if form not in FORMS:
        raise ArgumentError(f"there is no form {form!r}{did_you_mean(form, FORMS)}; allowed: {', '.join(FORMS)}")
    held = [(spec, output_form(spec, form)) for spec in workload.outputs]
    return tuple(OutputLike(spec.name, own.shape, own.strides, spec.dtype) for spec, own in held)


def check(spec: ArgSpec, seen: ArrayView, device: tuple[str, int], label: str = "") -> Form:
    """Returns the form in which the caller holds the argument; `label` names it in messages.

    Raises:
        ArgumentError: wrong dtype, shape, strides or device; the message says what it got and what is allowed.
    """
    label = label or spec.name
    if seen.device != device:
        raise ArgumentError(
            f"{label} is on {seen.device[0]}:{seen.device[1]}, the kernel runs on {device[0]}:{device[1]}; move it there"
        )
    if not seen.address and spec.size:
        raise ArgumentError(f"{label} has no memory (address 0); give an array with memory")
    if seen.dtype != spec.dtype:
        raise ArgumentError(f"{label} has dtype {seen.dtype}, the kernel takes {spec.dtype}; {_converted(seen, spec)}")
    held, allowed = form_of(spec, seen.shape, seen.strides), forms(spec)
    if held is None and not spec.size:  # without elements any strides are right
        held = next((form for form in allowed if form.shape == seen.shape), None)
    if held is not None:
        return held
    remedy = f"give a slice of an array of shape {spec.slice_of}" if spec.slice_of else "make it contiguous"
    options = " or ".join(f"shape {form.shape} with strides {form.strides} ({form.name})" for form in allowed)
    if any(seen.shape == form.shape for form in allowed):
        raise ArgumentError(
            f"{label} has strides {seen.strides} (elements) for shape {seen.shape}; allowed: {options}; "
            + remedy
            + (" in channels_last" if len(allowed) > 1 else "")
        )
    if len(allowed) == 1:  # the shape alone is wrong
        options = f"shape {allowed[0].shape}"
    plain_layout = "".join(letter for letter in spec.axes if letter.isupper())
    remedy = ""
    if any(letter.isdigit() for letter in spec.axes):
        remedy = f"; schedsearch.pack({spec.name}, {spec.axes!r}) makes it of an {plain_layout} array"
    axes = f" ({spec.axes})" if spec.axes else ""
    raise ArgumentError(f"{label} has shape {seen.shape}; allowed: {options}{axes}{remedy}")


def as_numbers(seen: ArrayView, spec: ArgSpec) -> ArrayView:
    """An input of truths (dtype bool) as the zeros and ones of uint8 that its bytes are, if the kernel takes these."""
    return replace(seen, dtype=spec.dtype) if (seen.dtype, spec.dtype) == ("bool", "uint8") else seen


def _converted(seen: ArrayView, spec: ArgSpec) -> str:
    """What to do with an array of another dtype."""
    return "give zeros and ones of uint8" if (seen.dtype, spec.dtype) == ("bool", "uint8") else "convert it"


def check_numbers(spec: ArgSpec, seen: ArrayView) -> None:
    """Checks the numbers of a scale in a CPU's memory; a GPU's memory is not read, because that would wait for the GPU.

    Args:
        seen: a contiguous array that `check` accepted.

    Raises:
        ArgumentError: a number of a `positive` argument is not finite or not above zero; the message names the first one.
    """
    if not spec.positive or seen.device[0] != "cpu":
        return
    import numpy as np

    numbers = np.ctypeslib.as_array((ctypes.c_float * spec.size).from_address(seen.address))
    wrong = ~((numbers > 0) & (numbers < np.inf))
    if wrong.any():
        place = int(wrong.argmax())
        more = f", and {wrong.sum() - 1} more are wrong" if wrong.sum() > 1 else ""
        raise ArgumentError(
            f"{spec.name}[{place}] is {numbers[place]:g}{more}; allowed: finite numbers above zero; check the range that it "
            "was computed from (a channel of zeros has an empty one: give it the scale 1)"
        )


def overlap(one: ArrayView, one_bytes: int, other: ArrayView, other_bytes: int) -> bool:
    """Whether two arrays share memory."""
    return one.address < other.address + other_bytes and other.address < one.address + one_bytes


def check_output(
    output: ArrayView, spec: ArgSpec, inputs: Mapping[str, ArrayView], specs: Mapping[str, ArgSpec], label: str = "out"
) -> None:
    """Checks that a kernel may write to `output`. An argument may be updated in place if its spec says so.

    Raises:
        ArgumentError: it is read-only, or overlaps an array that the kernel reads at the same time.
    """
    if output.readonly:
        raise ArgumentError(f"{label} is read-only; give a writable array")
    for name, each in specs.items():
        seen = inputs[name]
        in_place = each.aliases == spec.name and seen.address == output.address and each.span_bytes == spec.span_bytes
        if overlap(output, spec.span_bytes, seen, each.span_bytes) and not in_place:
            raise ArgumentError(f"{label} overlaps {name}, which the kernel reads while it writes; give other memory")


def empty_like(array: Any, seen: ArrayView, spec: ArgSpec, form: Form) -> Any:
    """A new array of the same library and device as `array` for an output of this form.

    Raises:
        ArgumentError: the library is unknown, or lacks the output's format; pass `out`.
    """
    if seen.library == "torch":
        torch = sys.modules["torch"]
        return torch.empty_strided(
            form.shape, form.strides, dtype=getattr(torch, dtype_of(spec.dtype).library), device=array.device
        )
    if seen.library in ("cupy", "numpy"):
        module = sys.modules[seen.library]
        try:
            plain = module.empty(spec.slice_of or spec.shape, dtype=dtype_of(spec.dtype).library)
        except TypeError:
            raise ArgumentError(
                f"{seen.library} has no dtype {spec.dtype}, which {spec.name} needs; pass an array of this dtype as out="
            ) from None
        plain = plain[(*(slice(extent) for extent in spec.shape), ...)]  # an array also where there are no axes
        order = [spec.axes.index(axis) for axis in _LOGICAL_AXES.get(spec.axes, spec.axes)]
        return plain if form.name == "plain" else plain.transpose(order)
    raise ArgumentError(f"cannot make an output array for {seen.library}; pass one as out=")
