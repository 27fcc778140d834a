"""What an ONNX file stores as numbers: whether each tensor has the bytes that its shape and dtype need.

The numbers of a tensor lie in the file, or as external data in a file beside it.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.network.invalid import ModelError

if TYPE_CHECKING:
    import onnx

_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")
_FIELD_OF = {
    **dict.fromkeys(("FLOAT", "COMPLEX64"), "float_data"),
    **dict.fromkeys(("DOUBLE", "COMPLEX128"), "double_data"),
    **dict.fromkeys(("UINT32", "UINT64"), "uint64_data"),
    "INT64": "int64_data",
    "STRING": "string_data",
}  # of other dtypes it is int32_data
_HALVES = ("FLOAT16", "BFLOAT16")  # their bits lie in the lower half of an int32
_MOST_BYTES = 1 << 62
_SMALL_NUMBER = 18  # digits of an offset or a length that can be one


@dataclass(frozen=True)
class External:
    """Where the numbers of a tensor lie: `nbytes` bytes from `offset` on in a file."""

    path: Path
    offset: int
    nbytes: int

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.nbytes)


def check_tensor(tensor: onnx.TensorProto, what: str, folder: Path | None) -> External | None:
    """Looks at a tensor without reading its numbers.

    Args:
        what: the tensor, for messages, with the name of the model.
        folder: the resolved folder of the model, in which external data must lie; None for a model that has no file.

    Returns:
        Where its numbers are, if they are not in `tensor` itself.

    Raises:
        ModelError: the shape or the dtype is impossible, or there are more or fewer bytes than both need, or external data
            is not in a regular file in `folder`.
    """
    import onnx

    if tensor.data_type not in onnx.TensorProto.DataType.values() or not tensor.data_type:
        raise ModelError(f"{what} has the unknown dtype {tensor.data_type}; export the model again, or upgrade onnx")
    kind = onnx.TensorProto.DataType.Name(tensor.data_type)
    what = f"{what} of shape {list(tensor.dims)} and dtype {kind}"
    if any(extent < 0 for extent in tensor.dims):
        raise ModelError(f"{what} has a negative extent; correct the model")
    elements, bits = math.prod(tensor.dims), _bits(tensor.data_type)
    nbytes = -(-elements * bits // 8)
    if nbytes > _MOST_BYTES:
        raise ModelError(f"{what} is larger than any memory; correct the model")
    if tensor.HasField("segment"):
        raise ModelError(f"{what} is one segment of a tensor; allowed: whole tensors. Save the model again in one piece")
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        if kind == "STRING":
            raise ModelError(f"{what} is external data, which strings cannot be; correct the model")
        return _external(tensor, what, nbytes, folder)
    _check_fields(tensor, what, kind, elements, nbytes)
    return None


def _bits(data_type: int) -> int:
    import onnx_ir as ir

    kind = ir.DataType(data_type)
    return 0 if kind == ir.DataType.STRING else kind.bitwidth


def _check_fields(tensor: onnx.TensorProto, what: str, kind: str, elements: int, nbytes: int) -> None:
    """The numbers are raw bytes, or in the one field that belongs to their dtype."""
    filled = [name for name in _FIELDS if len(getattr(tensor, name))]
    field = _FIELD_OF.get(kind, "int32_data")
    if tensor.HasField("raw_data") and (tensor.raw_data or not filled):
        filled.append("raw_data")
    if len(filled) > 1:
        raise ModelError(f"{what} has its numbers twice, as {' and '.join(filled)}; correct the model")
    if filled and filled[0] not in (field, *(["raw_data"] if kind != "STRING" else [])):
        raise ModelError(f"{what} has its numbers in the field {filled[0]}; allowed: {field} or raw_data. Correct the model")
    if filled == ["raw_data"]:
        if len(tensor.raw_data) != nbytes:
            raise ModelError(
                f"{what} is damaged: it has {len(tensor.raw_data):,} bytes and needs {nbytes:,}; export or copy the model "
                "again"
            )
        return
    wanted, got = elements, len(getattr(tensor, field))
    if kind.startswith("COMPLEX"):
        wanted = 2 * elements
    elif 0 < (bits := _bits(tensor.data_type)) < 8:
        wanted = -(-elements * bits // 8)
    if got != wanted:
        raise ModelError(f"{what} is damaged: it has {got:,} numbers and needs {wanted:,}; export or copy the model again")
    if kind in _HALVES and got:
        numbers = np.asarray(tensor.int32_data, np.int64)
        if numbers.min() < 0 or numbers.max() > 0xFFFF:
            raise ModelError(f"{what} is damaged: one of its numbers has more than 16 bits; export the model again")


def _external(tensor: onnx.TensorProto, what: str, nbytes: int, folder: Path | None) -> External:
    given = {entry.key: entry.value for entry in tensor.external_data}
    location = given.get("location", "")
    if folder is None:
        raise ModelError(f"{what} is external data of a model that has no folder; give the path of the file, not the model")
    if not location or "\0" in location:
        raise ModelError(f"{what} is external data in {location!r}, which is not a name of a file; correct the model")
    path = (folder / location).resolve()
    if not path.is_relative_to(folder) or Path(location).is_absolute():
        raise ModelError(
            f"{what} is in {location!r}, outside of the model's folder; allowed: files in {folder}. Save the model again "
            "with its weights beside it"
        )
    offset, length = (_number(given, key, what) for key in ("offset", "length"))
    if length is not None and length != nbytes:
        raise ModelError(
            f"{what} needs {nbytes:,} bytes, but its external data has a length of {length:,}; export the model again"
        )
    wanted = (offset or 0) + nbytes
    size, got = -1, "does not exist"
    try:
        found = path.stat()
        size, got = found.st_size, f"has {found.st_size:,} bytes"
        if not stat.S_ISREG(found.st_mode):
            size, got = -1, "is not a regular file"
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            got = f"cannot be read: {error.strerror}"
    if size < wanted:
        raise ModelError(
            f"{what} needs {wanted:,} bytes of {location!r}, which {got}; copy the file that belongs to the model to {path}"
        )
    return External(path, offset or 0, nbytes)


def _number(given: dict[str, str], key: str, what: str) -> int | None:
    text = given.get(key)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > _SMALL_NUMBER:
        raise ModelError(f"{what} has external data with the {key} {text!r}; allowed: a number of bytes. Correct the model")
    return int(text)


def tensors_of(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """The tensors that a node holds itself, each with the name of the attribute."""
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.name, attribute.t
        for tensor in attribute.tensors:
            yield attribute.name, tensor
