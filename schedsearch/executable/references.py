"""Weights that stay in the model's file: where their bytes lie there, and how they are read when a network is loaded.

Only `find` needs ONNX. `read` packs what it reads as `build` did, so that the digest of a weight, which the program names
anyway, covers bytes inside and outside of an executable alike.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from schedsearch.errors import DatabaseError
from schedsearch.executable.program import Array, Program, Reference
from schedsearch.identity import sha256_hex
from schedsearch.ops import Layout
from schedsearch.ops.dtypes import DTYPES, decode, encode
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.text import quoted

if TYPE_CHECKING:
    import numpy as np

    from schedsearch.network.graph import Constant

LEAST_BYTES = 1024  # smaller weights are not worth a reference


def packed(values: np.ndarray[Any, Any], axes: str, layout: str, dtype: str) -> bytes:
    """The bytes of a constant as its kernels read them.

    Args:
        values: numbers, of any dtype.
        axes: what each dimension of `values` is.
        layout, dtype: those of the result.
    """
    data: bytes = Layout.parse(layout).pack(encode(values, dtype), axes).tobytes()
    return data


def find(program: Program, constants: Mapping[str, Constant], model: Path, folder: Path) -> dict[str, Reference]:
    """Where the weights of a program lie in the file of its model, and in files beside it.

    Weights that were computed when the network was built, such as filters with a folded batch norm, lie nowhere, and have
    no reference.

    Args:
        constants: those of the network, by name.
        model: an ONNX file that `network.model.read_model` accepts.
        folder: of the executable; the paths of the references are relative to it.

    Returns:
        sha256 of a weight (one of `program.weights`) -> its place.
    """
    places = {sha256_hex(data): (path, offset) for path, offset, data in _stored(model)}
    found = {}
    for index, sha256 in zip(program.constants, program.weights):
        array = program.arrays[index]
        for axes, dtype, stored in _originals(constants[array.name]):
            if (place := places.get(sha256_hex(stored.tobytes()))) is None:
                continue
            if sha256_hex(packed(decode(stored, dtype), axes, array.layout, array.dtype)) == sha256:
                path, offset = place
                found[sha256] = Reference(os.path.relpath(path, folder), offset, axes, dtype)
    return found


def read(reference: Reference, array: Array, sha256: str, executable: Path) -> bytes:
    """The bytes of a weight that an executable does not hold itself.

    Args:
        array: the constant.
        sha256: of the result.

    Raises:
        DatabaseError: the file is missing, cannot be read, or holds something else at this place.
    """
    import numpy as np

    path = Path(os.path.normpath(executable.parent / reference.path))
    model = f"the weights of {executable} are in {path}"
    remedy = "restore it there, or build again (with --weights inside the model's file is not needed later)"
    row = dtype_of(reference.dtype)
    sizes = dict(zip(array.axes, array.shape))
    shape = [sizes[axis] for axis in reference.axes]
    try:
        raw = np.fromfile(path, row.storage, int(np.prod(shape)), offset=reference.offset)
    except FileNotFoundError as error:
        raise DatabaseError(f"{model}, which does not exist; {remedy}") from error
    except (OSError, ValueError) as error:
        raise DatabaseError(f"{model}, which cannot be read: {error}; {remedy}") from error
    if raw.size == np.prod(shape):
        data = packed(decode(raw.reshape(shape), reference.dtype), reference.axes, array.layout, array.dtype)
        if sha256_hex(data) == sha256:
            return data
    raise DatabaseError(f"{model}, which was changed: {quoted(array.name)} is not there any more; {remedy}")


def _stored(model: Path) -> Iterator[tuple[Path, int, bytes]]:
    """File, offset and bytes of each initializer that lies in a file as it lies in memory."""
    import onnx_ir as ir

    with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        end = 0
        for value in ir.load(model).graph.initializers.values():
            tensor = value.const_value
            if tensor is None or tensor.nbytes < LEAST_BYTES:
                continue
            if isinstance(tensor, ir.ExternalTensor):
                yield model.parent / tensor.location, tensor.offset or 0, tensor.tobytes()
            elif isinstance(tensor, ir.TensorProtoTensor) and (data := tensor.raw.raw_data):
                place = held.find(data, end)  # a file has them one after the other
                if place >= 0:
                    end = place + len(data)
                    yield model, place, data


def _originals(constant: Constant) -> Iterator[tuple[str, str, np.ndarray[Any, Any]]]:
    """Axes, dtype and numbers in the dtype's storage, of arrays that a file may have in place of a constant."""
    array = constant.array
    if array.nbytes < LEAST_BYTES:
        return
    order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])  # a transposed view of what the file has
    axes, stored = "".join(constant.axes[axis] for axis in order), array.transpose(order)
    if not stored.flags.c_contiguous:
        return
    name = array.dtype.name
    if name in DTYPES and DTYPES[name].storage == name:
        yield axes, name, stored
    if name == "float32":
        yield axes, "bfloat16", encode(stored, "bfloat16")
