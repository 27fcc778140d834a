"""Helpers for the tests of operators with indices and data-dependent sizes: their kernels, emulated and on devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from array_emulator import ArrayEmulator
from bandwidth_support import H200, default, stored
from conv2d_support import run_on_cpu

from schedsearch.config import Config
from schedsearch.ops.bounded import in_use
from schedsearch.ops.dtypes import decode, dtype
from schedsearch.template import Template, load_reference
from schedsearch.templates.own_kernel import copies
from schedsearch.testing.emulator import Memory
from schedsearch.workload import Workload


def used(workload: Workload, found: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs as numbers, without what lies beyond the extents in use."""
    decoded = {spec.name: decode(found[spec.name], spec.dtype) for spec in workload.outputs}
    return {
        spec.name: decoded[spec.name][in_use(spec.shape, decoded[spec.extents]) if spec.extents else ...]
        for spec in workload.outputs
    }


def expected(workload: Workload, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """What the reference says about whole outputs."""
    numbers = {spec.name: np.asarray(arrays[spec.name]).reshape(spec.shape) for spec in workload.signature}
    found = load_reference(workload.op).truths(workload, numbers, {}, dict, H200)  # type: ignore[arg-type]
    return {
        spec.name: found[spec.name][in_use(spec.shape, found[spec.extents]) if spec.extents else ...]
        for spec in workload.outputs
    }


def emulated(
    monkeypatch: Any,
    template: Template,
    workload: Workload,
    arrays: Mapping[str, Any],
    config: Config | None,
    *modules: Any,
    also: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The outputs of CUDA kernels that are run thread by thread. `also` has optional buffers."""
    config = config or default(template, workload, H200)
    assert template.space(workload, H200).check(config) == []
    memory = Memory()
    emulator = ArrayEmulator(memory)
    emulator.stand_in(monkeypatch, copies, *modules)
    source = template.kernel(workload, H200, config)
    outputs = {
        spec.name: np.frombuffer(bytearray(b"\xff" * spec.nbytes), dtype(spec.dtype).storage).reshape(spec.shape)
        for spec in workload.outputs
    }
    spaces = {name: np.full(nbytes, 0x5A, np.uint8) for name, nbytes in source.workspaces.items()}
    buffers = {
        name: memory.add(array) for name, array in {**stored(workload, arrays), **outputs, **spaces, **(also or {})}.items()
    }
    for step in source.steps:
        emulator.run(step, buffers, sms=2)
    return used(workload, outputs)


def on_device(
    device: Any,
    template: Template,
    workload: Workload,
    arrays: Mapping[str, Any],
    config: Config | None = None,
    also: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The outputs of a kernel; the default configuration unless one is given. `also` has addresses of optional buffers."""
    config = config or default(template, workload, device.target)
    assert template.space(workload, device.target).check(config) == []
    source = template.kernel(workload, device.target, config)
    outputs = {spec.name: (spec.shape, dtype(spec.dtype).storage) for spec in workload.outputs}
    return used(workload, run_on_cpu(device, source, stored(workload, arrays), outputs, also=also))


def assert_equal(workload: Workload, found: Mapping[str, Any], wanted: Mapping[str, Any], tolerance: float = 0) -> None:
    for name in wanted:
        np.testing.assert_allclose(
            found[name].astype(np.float64), wanted[name], rtol=tolerance, atol=tolerance, err_msg=f"{workload.label}: {name}"
        )
