"""Kernels as operators of PyTorch: `torch.ops.schedsearch.call` runs a workload, `batch_norm_vectors` makes its vectors.

The graphs that `optimize_` and the backend rewrite call them. A call names its kernel by a string that is made of what it
computes and where its records are, so that a compiled graph that PyTorch keeps on disk cannot mean another one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from schedsearch.deadline import NEVER, Deadline
from schedsearch.errors import UsageError
from schedsearch.ops import ArgSpec
from schedsearch.records.location import require_file
from schedsearch.runtime.arrays import output_like
from schedsearch.runtime.cache import KernelCache
from schedsearch.runtime.caches import shared_caches
from schedsearch.runtime.kernel import Kernel
from schedsearch.torch.operators.bound_call import BoundCall
from schedsearch.torch.operators.library import register
from schedsearch.torch.operators.store import capturing, device_name
from schedsearch.workload import Workload

ALLOWED = ("exact", "same_architecture", "shipped")
ALIGNMENT = 64  # elements, of each layer's part of the vectors of batch norms
_calls: dict[str, Call] = {}  # by key


class Kernels:
    """The kernels of one database on one device.

    Attributes:
        db: the database, an absolute path.
        device: the device of torch.
        target: the same device by our facts.
    """

    def __init__(self, db: str | Path, device: torch.device, allow: Sequence[str] = ALLOWED) -> None:
        """Raises DatabaseError, DeviceError or UnsupportedError if the database or the device cannot be used."""
        self.db, self.device, self.allow = require_file(db).absolute(), device, tuple(allow)
        self._name = device_name(device)
        self.target = self._cache.target

    @property
    def _cache(self) -> KernelCache:
        return shared_caches(self.db, self.allow).on(self._name)

    def kernel(self, workload: Workload) -> Kernel:
        """The best kernel of a workload that is recorded by now. Raises as `KernelCache.kernel`."""
        return self._cache.kernel(workload)

    def build_ahead(self, workloads: Iterable[Workload], deadline: Deadline = NEVER) -> None:
        """Compiles what `kernel` would have to, as much as the time is enough for. Raises as `KernelCache.build_ahead`."""
        self._cache.build_ahead(workloads, deadline=deadline)


class Call:
    """A workload with its scalars and its kernel, as the operator `call` runs it.

    Attributes:
        kernel: the same in every call, because graphs may have captured it.
        key: what the operator takes.

    Raises:
        SchedsearchError: as `Kernels.kernel`.
    """

    def __init__(self, workload: Workload, scalars: Mapping[str, float], kernels: Kernels) -> None:
        self.workload, self.scalars, self.kernel = workload, dict(scalars), kernels.kernel(workload)
        artifact, record = self.kernel.artifact, self.kernel.provenance.record_id
        text = json.dumps([workload.id, sorted(scalars.items()), str(kernels.db), str(kernels.device), record])
        code = text.encode() + artifact.plan.to_json().encode() + artifact.code
        self.key = f"{workload.op}-{hashlib.sha256(code).hexdigest()[:20]}"
        self._formats = [_memory_format(spec) for spec in workload.signature]
        self._numbers = tuple(self.scalars.get(scalar.name, scalar.default) for scalar in workload.scalars)
        self._bound: BoundCall | None = None

    def __call__(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        """Computes the output; copies an array that has other strides than the kernel takes.

        Raises:
            ArgumentError, DeviceError: as `Kernel`.
            UsageError: a CUDA graph captures the first call, which has to load the kernel.
        """
        given = [
            each if each.is_contiguous(memory_format=form) else each.contiguous(memory_format=form)
            for each, form in zip(arrays, self._formats)
        ]
        if self._bound is None:
            if capturing(given[0].device):
                label = self.workload.label
                raise UsageError(f"a CUDA graph captures the first call of {label}; call it once before the capture")
            places = {scalar.name: place for place, scalar in enumerate(self.workload.scalars)}
            self._bound = BoundCall(self.kernel, range(len(given)), places, given, self._numbers)
        y: torch.Tensor = self._bound(given, tuple([each.data_ptr() for each in given]), self._numbers)
        return y

    def fake(self, arrays: Sequence[torch.Tensor]) -> torch.Tensor:
        """An output without memory."""
        (like,) = output_like(self.workload, "channels_last")
        return arrays[0].new_empty_strided(like.shape, like.strides)


def _memory_format(spec: ArgSpec) -> torch.memory_format:
    return torch.channels_last if spec.axes in ("NHWC", "OHWI") else torch.contiguous_format


def call_of(workload: Workload, scalars: Mapping[str, float], kernels: Kernels) -> Call:
    """The call of a workload by its best kernel, registered under its key. Raises as `Call`."""
    call = Call(workload, scalars, kernels)
    return _calls.setdefault(call.key, call)


def _run(key: str, arrays: list[torch.Tensor]) -> torch.Tensor:
    return _find(key)(arrays)


def _fake(key: str, arrays: list[torch.Tensor]) -> torch.Tensor:
    return _find(key).fake(arrays)


def _find(key: str) -> Call:
    try:
        return _calls[key]
    except KeyError:
        raise UsageError(
            f"this process has no kernel {key}; call schedsearch.torch.optimize_ or torch.compile(model, "
            'backend="schedsearch") before it runs a graph that was saved'
        ) from None


def vector_places(channels: Sequence[int]) -> tuple[list[int], int]:
    """Where each layer's vectors begin in the result of `batch_norm_vectors`, and its length."""
    starts, end = [], 0
    for count in channels:
        starts.append(end)
        end += -(-count // ALIGNMENT) * ALIGNMENT
    return starts, end


def _batch_norm_vectors(parts: list[torch.Tensor], eps: float, dtype: torch.dtype) -> torch.Tensor:
    """Scale and shift of batch norms, two rows: y = x * scale + shift.

    Args:
        parts: the weights of all layers, then the biases, the means and the variances.
        eps: that of all layers.
        dtype: of the result; it is computed in float32.
    """
    padded = []
    for vector in parts:
        padded.append(vector)
        if gap := -vector.shape[0] % ALIGNMENT:
            padded.append(vector.new_ones(gap))
    weight, bias, mean, var = torch.cat(padded).float().view(4, -1).unbind()
    scale = weight * torch.rsqrt(var + eps)
    return torch.stack((scale, torch.addcmul(bias, mean, scale, value=-1))).to(dtype)


def _fake_vectors(parts: list[torch.Tensor], eps: float, dtype: torch.dtype) -> torch.Tensor:
    length = vector_places([each.shape[0] for each in parts[: len(parts) // 4]])[1]
    return parts[0].new_empty((2, length), dtype=dtype)


register("call(str key, Tensor[] arrays) -> Tensor", _run, _fake)
register("batch_norm_vectors(Tensor[] parts, float eps, ScalarType dtype) -> Tensor", _batch_norm_vectors, _fake_vectors)
