"""Helpers for the tests of pool2d, elementwise, softmax and resize: kernels on the CPU, emulated, and ONNX's node cases."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from conv2d_support import run_on_cpu
from vector_emulator import VectorEmulator

from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.ops.dtypes import decode, dtype, encode
from schedsearch.target import PRESETS
from schedsearch.template import Template
from schedsearch.templates.parts import vectors
from schedsearch.testing.emulator import Memory
from schedsearch.verification.verify import verify_once
from schedsearch.workload import Workload

H200 = PRESETS["h200"]


def default(template: Template, workload: Workload, target: Any) -> Config:
    return template.default(workload, target, template.space(workload, target))


def stored(workload: Workload, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as they lie in memory: 16-bit floats that NumPy lacks as their bits."""
    return {
        spec.name: np.ascontiguousarray(encode(arrays[spec.name], spec.dtype)).reshape(spec.shape)
        for spec in workload.signature
    }


def on_cpu(device: CpuDevice, template: Template, workload: Workload, arrays: Mapping[str, Any], config: Any = None) -> Any:
    """The output of a kernel, as numbers; the default configuration unless one is given."""
    config = config or default(template, workload, device.target)
    assert template.space(workload, device.target).check(config) == []
    output = workload.output
    source = template.kernel(workload, device.target, config)
    found = run_on_cpu(device, source, stored(workload, arrays), {"y": (output.shape, dtype(output.dtype).storage)})["y"]
    return decode(found, output.dtype)


def verdict(device: CpuDevice, template: Template, workload: Workload, computed: Workload | None = None) -> str | None:
    """What verification says of the default kernel of a workload, or of the one that was made for `computed`."""
    made_for = computed or workload
    source = template.kernel(made_for, device.target, default(template, made_for, device.target))
    kernel = device.load(compile_source(source, device.target).artifact)
    try:
        return verify_once(device, workload, kernel)
    finally:
        kernel.close()


def emulated(
    monkeypatch: pytest.MonkeyPatch,
    template: Template,
    workload: Workload,
    arrays: Mapping[str, Any],
    config: Config,
    *modules: Any,
) -> Any:
    """The output of a CUDA kernel that is run thread by thread; if it is a slice, all of the larger array, which was NaN."""
    memory = Memory()
    emulator = VectorEmulator(memory)
    emulator.stand_in(monkeypatch, vectors, *modules)
    assert template.space(workload, H200).check(config) == []
    source = template.kernel(workload, H200, config)
    output = workload.output
    whole = bytearray(b"\xff" * (output.whole * dtype(output.dtype).nbytes))
    y = np.frombuffer(whole, dtype(output.dtype).storage).reshape(output.slice_of or output.shape)
    buffers = {name: memory.add(array) for name, array in stored(workload, arrays).items()} | {"y": memory.add(y)}
    for step in source.steps:
        emulator.run(step, buffers, sms=2)
    return decode(y, output.dtype)


def node_cases(*modules: str) -> dict[str, Any]:
    """ONNX's node cases of some operators, which are modules of its cases, by name. All would take ten seconds."""
    from onnx.backend.test import loader

    def some(package: Any) -> None:
        for name in modules:
            importlib.import_module(f"{package.__name__}.{name}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "import_recursive", some)
        found = {case.name: case for case in loader.load_model_tests(kind="node")}  # with those of earlier calls
    return {name: case for name, case in found.items() if case.model.graph.node[0].op_type.lower() in modules}


def attributes(node: Any) -> dict[str, Any]:
    import onnx

    found = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in found.items()}


def arrays_of(case: Any) -> tuple[list[Any], list[Any]]:
    """A case's inputs and outputs."""
    import onnx

    ((inputs, outputs),) = case.data_sets

    def plain(value: Any) -> Any:
        return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)

    return [plain(each) for each in inputs], [plain(each) for each in outputs]
