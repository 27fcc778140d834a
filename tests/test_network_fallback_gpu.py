"""Networks on a GPU with nodes that ONNX Runtime computes, without a GPU: graphs of kernels between these, and where the
arrays are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from onnx_support import Net as Model

import schedsearch
from schedsearch.device import open_device
from schedsearch.errors import ArgumentError
from schedsearch.executable.onnx_runtime import OnnxModel
from schedsearch.executable.program import Call, Foreign, Origin
from schedsearch.executable.segments import Segments

pytest.importorskip("onnx")

from onnx import TensorProto


class Bound:
    """A bound kernel that writes down its launches."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def launch(self, stream: int = 0) -> None:
        self.said.append(f"{self.name} on {stream}")


def test_kernels_between_parts_are_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Graph:
        def __init__(self, device: Any, kernels: Sequence[Bound], after: Any) -> None:
            self.name = "+".join(kernel.name for kernel in kernels)
            waits.append(after)

        def update(self, number: int) -> None:
            said.append(f"{self.name} updates {number}")

        def launch(self, stream: int) -> None:
            said.append(f"{self.name} on {stream}")

        def close(self) -> None:
            said.append(f"{self.name} closed")

    class BoundPart(Bound):
        pass

    monkeypatch.setattr("schedsearch.device.cuda_graph.KernelGraph", Graph)
    monkeypatch.setattr("schedsearch.device.cuda_kernel.CudaBoundKernel", Bound)
    monkeypatch.setattr("schedsearch.executable.segments.HOST_CALLS", (BoundPart,))
    kinds = {"a": Bound, "b": Bound, "P": BoundPart, "Q": BoundPart, "c": Bound}
    waits: list[Any] = []
    after = [(), (), (1, 0), (2,), (3,)]  # a and b do not need one another; what is in another graph is complete
    segments = Segments(object(), [kind(name, said) for name, kind in kinds.items()], after)  # type: ignore[arg-type]
    segments.launch(7)
    for number in range(5):
        segments.update(number)
    segments.close()
    assert said == [
        "a+b on 7", "P on 7", "Q on 7", "c on 7", "a+b updates 0", "a+b updates 1", "c updates 0", "a+b closed", "c closed",
    ]  # fmt: skip
    assert waits == [[[], []], [[]]]


class HostGpu:
    """A device of the kind cuda whose memory is the host's."""

    def __init__(self) -> None:
        self._cpu = open_device(schedsearch.detect("cpu"))
        self.target = replace(self._cpu.target, kind="cuda", ordinal=1)
        self.said: list[str] = []

    def wait(self, stream: int = 0) -> None:
        self.said.append(f"wait {stream}")

    def copy_out(self, data: memoryview, address: int) -> None:
        self.said.append("copy out")
        self._cpu.copy_out(data, address)

    def copy_in(self, address: int, data: memoryview) -> None:
        self.said.append("copy in")
        self._cpu.copy_in(address, data)


NEG = Call(
    "negative", ("neg",), "", "Neg", "", {"x0": 0, "y0": 1}, ("y0",), {}, {}, Origin("onnxruntime", "onnxruntime", ""),
    foreign=Foreign(0, ("",)),
)  # fmt: skip


def test_where_onnx_runtime_has_cuda_it_gets_device_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    class Binding:
        def bind_input(self, *arguments: Any) -> None:
            said.append(("in", *arguments))

        def bind_output(self, *arguments: Any) -> None:
            said.append(("out", *arguments))

    class Session:
        def __init__(self, model: bytes, options: Any, providers: Any) -> None:
            said.append(providers)

        def get_providers(self) -> list[str]:
            return ["CUDAExecutionProvider", "CPUExecutionProvider"]

        def get_inputs(self) -> list[Any]:
            return [SimpleNamespace(name="a", type="tensor(float16)", shape=[2, 3])]

        def get_outputs(self) -> list[Any]:
            return [SimpleNamespace(name="b", type="tensor(bfloat16)", shape=[])]

        def io_binding(self) -> Binding:
            return Binding()

        def run_with_iobinding(self, binding: Binding) -> None:
            said.append("run")

    options = SimpleNamespace(add_session_config_entry=lambda *entry: None)
    module = SimpleNamespace(
        __version__="9", SessionOptions=lambda: options, InferenceSession=Session,
        get_available_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "onnxruntime", module)
    gpu = HostGpu()
    model = OnnxModel(gpu, b"", NEG)  # type: ignore[arg-type]
    bound = model.bind({"x0": 256, "y0": 512}, {})
    bound.launch(5)
    bound.set_pointer("y0", 1024)
    assert said == [
        [("CUDAExecutionProvider", {"device_id": 1}), "CPUExecutionProvider"],
        ("in", "a", "cuda", 1, np.float16, [2, 3], 256),
        ("out", "b", "cuda", 1, TensorProto.BFLOAT16, [], 512),
        "run",
        ("out", "b", "cuda", 1, TensorProto.BFLOAT16, [], 1024),
    ]
    assert gpu.said == ["wait 5"]
    with pytest.raises(ArgumentError, match="x0 is at an address that is not a multiple of 16 bytes"):
        bound.set_pointer("x0", 257)


@pytest.mark.integrations
def test_a_gpu_without_its_provider_copies_to_the_host_and_back() -> None:
    pytest.importorskip("onnxruntime")
    net = Model(1, 8, 6, 6)
    net.node("Neg", "x")
    negative, gpu = net.model(), HostGpu()
    model = OnnxModel(gpu, negative.SerializeToString(), NEG)  # type: ignore[arg-type]
    x, y = np.random.default_rng(0).standard_normal((1, 8, 6, 6)).astype(np.float32), np.zeros((1, 8, 6, 6), np.float32)
    bound = model.bind({"x0": x.ctypes.data, "y0": y.ctypes.data}, {})
    bound.launch(3)
    np.testing.assert_array_equal(y, -x)
    assert gpu.said == ["wait 3", "copy out", "copy in"]
