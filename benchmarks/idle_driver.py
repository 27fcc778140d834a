"""A driver that accepts launches and computes nothing: host times of calls on a machine without a GPU.

Tensors are in the host's memory. Everything between the caller and `cuLaunchKernelEx` is real; the driver's own time is
missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from schedsearch.device import cuda_driver, cuda_kernel
from schedsearch.launch import TENSOR_MAP_BYTES, Artifact, Grid, LaunchPlan, Pointer, Scalar, Step, TensorMap
from schedsearch.runtime.kernel import Kernel, Provenance
from schedsearch.target import PRESETS
from schedsearch.torch.operators.store import Store
from schedsearch.workload import Workload

_SOURCE = """
int cuLaunchKernelEx(void *config, void *function, void **parameters, void **extra) { return 0; }
int cuTensorMapReplaceAddress(void *map, void *address) { return 0; }
"""
_BY_TENSOR_MAP = ("x", "weight")  # as in the fast kernels of conv2d


@contextlib.contextmanager
def idle_driver() -> Iterator[None]:
    """Lets every operator of `schedsearch.torch` find a kernel of one launch, which this driver accepts."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "idle.c"), Path(folder, "idle.so")
        source.write_text(_SOURCE)
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
        driver = ctypes.CDLL(str(library))
        encoded = (ctypes.c_char * TENSOR_MAP_BYTES)()
        with (
            mock.patch.object(cuda_driver, "libcuda", lambda: driver),
            mock.patch.object(cuda_driver, "immediate", lambda: ctypes.PyDLL(str(library))),
            mock.patch.object(cuda_kernel, "_encode", lambda *_: SimpleNamespace(getPtr=lambda: ctypes.addressof(encoded))),
            mock.patch.object(Store, "kernel", _kernel),
        ):
            yield


def _kernel(store: Store, workload: Workload, device: torch.device, builds: bool = False) -> Kernel:
    names = [spec.name for spec in (*workload.signature, *workload.outputs)]
    params = [_tensor_map(name) if name in _BY_TENSOR_MAP else Pointer(name) for name in names]
    step = Step("idle", (*params, *(Scalar(scalar.name) for scalar in workload.scalars)), Grid(98), 128)
    artifact = Artifact(b"", LaunchPlan("cuda", "sm_90a", (step,), {}, dict.fromkeys(names, 16)))
    loaded: Any = SimpleNamespace(
        artifact=artifact,
        device=SimpleNamespace(current=contextlib.nullcontext, target=PRESETS["h200"], is_current=True),
        functions=[1],
        workspaces=SimpleNamespace(take=lambda names: {}),
    )
    loaded.bind = lambda buffers, scalars, prepared=None: cuda_kernel.CudaBoundKernel(
        loaded, buffers, scalars, [0], prepared
    )
    return Kernel(workload, loaded, ("cpu", 0), Provenance("exact", "idle", {}), verified=False)


def _tensor_map(buffer: str) -> TensorMap:
    return TensorMap(buffer, "float32", (64, 7, 7, 1), (256, 1792, 12544), (1, 1, 1, 1), box=(32, 7, 7, 1))
