"""Helpers for the tests of the CUDA templates of depthwise_conv2d: kernels emulated, and run on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conv2d_support import run_on_cpu
from depthwise_support import numpy_depthwise, small_integers
from ptx_emulator import PtxEmulator

from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.ops.dtypes import dtype
from schedsearch.target import PRESETS
from schedsearch.template import Template
from schedsearch.templates.depthwise_conv2d import (
    cuda_dw_mma,
    cuda_dw_planes,
    cuda_mma_kernel,
    cuda_mma_stage,
    cuda_mma_strips,
    cuda_mma_text,
    cuda_pixels,
    cuda_pixels_staged,
    cuda_planes,
    cuda_weight,
    cuda_weight_staged,
    held,
    patch_text,
    plane_text,
    tile_text,
    tiles,
)
from schedsearch.templates.parts import epilogue, planes
from schedsearch.testing.emulator import Memory
from schedsearch.workload import Workload

H200 = PRESETS["h200"]
SCALARS = {"leaky_relu_slope": 0.25, "clip_min": -5.0, "clip_max": 6.0}
UNITS_IN_LAST_PLACE = {"float32": 2**-22, "float16": 2**-10, "bfloat16": 2**-7}
KERNEL_MODULES = (
    cuda_dw_mma, cuda_dw_planes, cuda_mma_kernel, cuda_mma_stage, cuda_mma_strips, cuda_mma_text, cuda_pixels,
    cuda_pixels_staged, cuda_planes, cuda_weight, cuda_weight_staged, held, patch_text, plane_text, tile_text, tiles, planes,
    epilogue,
)  # fmt: skip


def emulate(
    monkeypatch: pytest.MonkeyPatch,
    template: Template,
    workload: Workload,
    config: Config,
    seed: int = 0,
    change: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Runs every step of a configuration thread by thread, its PTX too, and compares the output with the definition.

    A gradient that is added to the one before is computed in place. `change` writes into the random arguments first.
    """
    memory = Memory()
    emulator = PtxEmulator(memory)
    epilogue._operation.cache_clear()
    emulator.stand_in(monkeypatch, *KERNEL_MODULES)
    source = template.kernel(workload, H200, config)
    epilogue._operation.cache_clear()
    arrays = small_integers(workload, seed)
    if change:
        change(arrays)
    truth = numpy_depthwise(workload, arrays, SCALARS)
    buffers, results = {name: memory.add(array) for name, array in arrays.items()}, {}
    for output in workload.outputs:
        poison = np.frombuffer(bytearray(b"\xff" * output.nbytes), dtype(output.dtype).storage).reshape(output.shape)
        results[output.name] = arrays.get(f"{output.name}_before", poison)
        buffers[output.name] = buffers.get(f"{output.name}_before") or memory.add(poison)
    buffers |= {name: memory.add(np.full(size, 0xFF, np.uint8)) for name, size in source.workspaces.items()}
    for step in source.steps:
        emulator.run(step, buffers, sms=2, scalars=SCALARS)
    for name, result in results.items():
        assert_close(result, truth[name], workload, config)


def run_on_device(device: Any, template: Template, workload: Workload, config: Config) -> None:
    """The same on a GPU, without a gradient in place."""
    arrays = small_integers(workload)
    source = template.kernel(workload, device.target, config)
    outputs = {output.name: (output.shape, dtype(output.dtype).storage) for output in workload.outputs}
    scalars = {each.name: SCALARS[each.name] for each in workload.scalars}
    found, truth = run_on_cpu(device, source, arrays, outputs, scalars), numpy_depthwise(workload, arrays, SCALARS)
    for name in outputs:
        assert_close(found[name], truth[name], workload, config)


def assert_close(found: Any, truth: Any, workload: Workload, config: Config) -> None:
    from schedsearch.ops.dtypes import decode

    name = workload.dtype  # of every output
    values = decode(np.ascontiguousarray(found).view(dtype(name).storage), name).astype(np.float64)
    message = f"{workload.label} {dict(config)}"
    np.testing.assert_allclose(values, truth, rtol=UNITS_IN_LAST_PLACE[name], atol=1e-6, err_msg=message)


def assert_compiles(template: Template, workload: Workload, target: Any) -> None:
    """The default compiles without spills or local memory."""
    assert template.validate(workload, target) is None
    config = template.default(workload, target, template.space(workload, target))
    resources = compile_source(template.kernel(workload, target, config), target).resources
    assert resources.local_bytes == resources.spill_bytes == 0, (workload.label, dict(config), resources)
