"""Runs conv2d_mma's own source in the emulator: all steps of a configuration over arrays of the workload."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cluster_emulator import ClusterEmulator
from integer_model import SCALARS

import schedsearch.templates.conv2d.mma as template
from schedsearch.config import Config
from schedsearch.ops.sum_of_products import accumulator_dtype
from schedsearch.target import PRESETS
from schedsearch.template import Template
from schedsearch.templates.conv2d import mma_kernel, mma_store, mma_tma, placement, weight_rows
from schedsearch.templates.parts import addressing, gather, mma, pipeline, window_sums, zero_points
from schedsearch.templates.parts.epilogue import Epilogue
from schedsearch.testing.emulator import TYPES, Memory
from schedsearch.workload import Workload

Array = np.ndarray[Any, Any]
_MODULES = (
    mma_kernel, mma_store, mma_tma, placement, weight_rows, addressing, gather, mma, pipeline, window_sums,
    zero_points,
)  # fmt: skip


def emulate(
    monkeypatch: pytest.MonkeyPatch,
    workload: Workload,
    config: Mapping[str, Any],
    arrays: Mapping[str, Array],
    *,
    late: bool = False,
    sms: int = 2,
    memory_of_y: Array | None = None,
    by: Template | None = None,
    emulator: ClusterEmulator | None = None,
    modules: tuple[ModuleType, ...] = (),
) -> Array:
    """y of one configuration, in the format of the workload's output; float16 in the place of bfloat16.

    Args:
        arrays: the workload's arguments as they are in memory.
        late: asynchronous copies finish as late as the waits allow.
        memory_of_y: what y is written to; default: a new array.
        by: a template that takes its kernel from conv2d_mma; default: that one.
        emulator: default: a new one.
        modules: further ones, of a template that takes parts of conv2d_mma.

    Of the epilogue it knows bias, residual and requantise, in this order; see `Stages`.
    """
    emulator = emulator or ClusterEmulator(Memory(), lambda value, *_: value, late)
    memory = emulator.memory
    emulator.stand_in(monkeypatch, *_MODULES, *modules)
    monkeypatch.setattr(template, "Epilogue", lambda w, further=(): Stages(w, further, arrays))
    y = np.full(workload.output.shape, 99, np.dtype(workload.output.dtype)) if memory_of_y is None else memory_of_y
    source = (by or template.Conv2dMma()).kernel(workload, PRESETS["h200"], Config(config))
    buffers = {name: memory.add(array) for name, array in arrays.items()} | {"y": memory.add(y)}
    for name, nbytes in (source.workspaces or {}).items():
        buffers[name] = memory.add(np.full(nbytes, 0xFF, np.uint8))
    tensors = {}
    if any(param.kind == "tensor_map" for param in source.steps[-1].params):
        taps = workload.r * workload.s if workload.op == "conv2d" else 1
        tensors = {"x": arrays["x"], "weight": arrays["weight"].reshape(-1, taps, arrays["weight"].shape[-1])}
    for step in source.steps:
        emulator.run(step, buffers, sms, tensors, SCALARS)
    return y


class Stages(SimpleNamespace):
    """Stands in for `Epilogue`: the stages of a workload in NumPy, on the arrays themselves."""

    def __init__(self, workload: Workload, further: Any, arrays: Mapping[str, Array]) -> None:
        real = Epilogue(workload, further)
        w = workload
        wrap = TYPES.uint32 if accumulator_dtype(w.dtype, w.weight_dtype, w.zero_points) == "uint32" else TYPES.int32
        names = [stage.name for stage in workload.epilogue]
        super().__init__(params=real.params, alignments=real.alignments, index=real.index)

        def single(value: Any, valid: int, k: int, offset: int, *operands: Any) -> Any:
            if "bias" in names:
                value = value + int(arrays["bias"][k])
            if "residual" in names:
                value = value + int(arrays["residual"].reshape(-1)[offset])
            if real.accumulator == "int32":
                value = wrap(value)
            if "requantise" in names:
                value = int(np.rint(np.float32(value) * arrays["requantise_scale"][k]) + SCALARS["y_zero_point"])
            return value

        def pair(v0: Any, v1: Any, valid: int, k: int, offset: int, *operands: Any) -> Any:
            return single(v0, valid, k, offset), single(v1, valid, k + 1, offset + 1)

        self.single, self.pair = single, pair
