"""Subgraphs of a network that ONNX Runtime computes, on the memory of the network."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from schedsearch.device.contract import Device, Workspaces, check_address
from schedsearch.errors import DatabaseError, SubgraphError, UsageError
from schedsearch.executable.turns import TurnsError, is_limited
from schedsearch.typed import JsonObject

if TYPE_CHECKING:
    from schedsearch.executable.program import Call
    from schedsearch.network.graph import Subgraph

ONNX_RUNTIME = "onnxruntime"
_GPU_PROVIDER = "CUDAExecutionProvider"
_CPU_PROVIDER = "CPUExecutionProvider"
_GPU_ALIGNMENT = 16  # of addresses; ONNX Runtime's kernels assume what its own allocator gives
_BFLOAT16 = 16  # TensorProto.BFLOAT16
_ERRORS_ONLY, _NOTHING = 3, 4  # levels of ONNX Runtime's messages on stderr
_PATIENCE_S = 120.0  # of a comparison


def require(what: str) -> Any:
    """The module onnxruntime.

    Args:
        what: needs it, for the message.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise UsageError(
            f"{what} needs ONNX Runtime, which is not installed ({error}): pip install onnxruntime, or onnxruntime-gpu to "
            "run such nodes on a GPU"
        ) from error
    return onnxruntime


def check_runs(subgraph: Subgraph) -> None:
    """Looks whether ONNX Runtime takes a subgraph, before anything is compiled for the nodes around it.

    Raises:
        UsageError: as `OnnxModel`.
    """
    label = ", ".join(dict.fromkeys(reason.partition(":")[0] for reason in subgraph.reasons))
    _session(subgraph.model, f"{subgraph.name} ({label})", label, subgraph.sources, None)


def _session(model: bytes, what: str, label: str, sources: Sequence[str], ordinal: int | None) -> Any:
    """A session of ONNX Runtime.

    Args:
        what, label, sources: the subgraph, its operators, and its nodes, for messages.
        ordinal: of the GPU; None: on the CPU.

    Raises:
        UsageError: onnxruntime is not installed, or it cannot run the model.
    """
    module = require(what)
    options = module.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # the cores are those of our kernels, too
    on_gpu = ordinal is not None and _GPU_PROVIDER in module.get_available_providers()
    providers: list[Any] = [(_GPU_PROVIDER, {"device_id": ordinal})] if on_gpu else []
    try:
        return module.InferenceSession(model, options, providers=[*providers, _CPU_PROVIDER])
    except Exception as error:  # ONNX Runtime's errors have no common base
        raise UsageError(
            f"ONNX Runtime {module.__version__} cannot run {label} ({', '.join(sources)}): {error}. Replace these nodes in "
            "the model, or install a version of ONNX Runtime that has them"
        ) from error


class OnnxModel:
    """A subgraph in ONNX Runtime, ready to be bound; see `schedsearch.device.LoadedKernel`.

    On a GPU it runs there if ONNX Runtime has its CUDA provider; otherwise it runs on the CPU, and every launch copies its
    arrays to the host and back.

    Attributes:
        provider: CUDAExecutionProvider or CPUExecutionProvider.

    Raises:
        UsageError: onnxruntime is not installed, or it cannot run the model.
    """

    def __init__(self, device: Device, model: bytes, call: Call) -> None:
        self.device, self.call = device, call
        on_gpu = device.target.kind == "cuda"
        self.session = _session(
            model, f"{call.name} ({call.label})", call.label, call.sources, device.target.ordinal if on_gpu else None
        )
        self.provider: str = self.session.get_providers()[0]
        self.ports = {f"x{number}": port for number, port in enumerate(self.session.get_inputs())}
        self.ports |= {f"y{number}": port for number, port in enumerate(self.session.get_outputs())}

    @property
    def copies_to_host(self) -> bool:
        """Whether every launch copies its arrays between the GPU and the host."""
        return self.device.target.kind == "cuda" and self.provider != _GPU_PROVIDER

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Raises DatabaseError unless a call has arrays of these bytes for just the inputs and outputs of the model."""
        wanted = {name: _nbytes(port) for name, port in self.ports.items()}
        if wanted != dict(sizes):
            raise DatabaseError(
                f"the ONNX model of {self.call.name} ({self.call.label}) has inputs and outputs of {wanted} bytes; the "
                f"program has arrays of {dict(sizes)}; build the model again"
            )

    def check_address(self, name: str, address: int) -> None:
        """Raises ArgumentError if an address lacks the alignment that an input or output needs."""
        if self.device.target.kind == "cuda":
            check_address(name, address, _GPU_ALIGNMENT)

    def prepare(self, addresses: Mapping[str, int], stream: int = 0) -> Workspaces:
        """Nothing: constants are in the model."""
        return Workspaces(self.device, {})

    def bind(
        self,
        buffers: Mapping[str, int],
        scalars: Mapping[str, float],
        prepared: Workspaces | None = None,
        *,
        early: bool = False,
    ) -> BoundOnnxModel:
        """Raises ArgumentError if an address lacks the alignment that it needs."""
        return BoundOnnxModel(self, buffers)

    def close(self) -> None:
        """ONNX Runtime frees its memory when nothing refers to the session."""


class BoundOnnxModel:
    """A subgraph on fixed addresses; see `schedsearch.device.BoundKernel`. On a GPU a launch waits for all work of the
    stream before it begins, because ONNX Runtime computes on a stream of its own, and returns when its results are there."""

    def __init__(self, model: OnnxModel, buffers: Mapping[str, int]) -> None:
        self._model = model
        self._binding = model.session.io_binding()
        call = model.call
        self._ports = model.ports
        self._host: JsonObject = {}  # memory of the host, where ONNX Runtime cannot reach the network's
        self._addresses: dict[str, int] = {}
        for name in call.buffers:
            if model.copies_to_host:
                self._host[name] = _host_array(self._ports[name])
                self._bind(name, "cpu", self._host[name].ctypes.data)
            self.set_pointer(name, buffers[name])

    def set_pointer(self, buffer: str, address: int) -> None:
        self._model.check_address(buffer, address)
        self._addresses[buffer] = address
        if not self._model.copies_to_host:
            self._bind(buffer, "cuda" if self._model.provider == _GPU_PROVIDER else "cpu", address)

    def set_scalar(self, name: str, value: float) -> None:
        """A subgraph has no scalars."""

    def _bind(self, name: str, kind: str, address: int) -> None:
        port, ordinal = self._ports[name], self._model.device.target.ordinal if kind == "cuda" else 0
        bind = self._binding.bind_output if name in self._model.call.outputs else self._binding.bind_input
        bind(port.name, kind, ordinal, _element_type(port), port.shape, address)

    def _run(self) -> None:
        """Raises TurnsError if it takes longer than a comparison waits."""
        if not is_limited():
            self._model.session.run_with_iobinding(self._binding)
            return
        import onnxruntime

        options, call = onnxruntime.RunOptions(), self._model.call
        options.log_severity_level = _NOTHING  # numbers that nobody gave may be out of range
        timer = threading.Timer(_PATIENCE_S, setattr, (options, "terminate", True))
        timer.daemon = True
        timer.start()
        try:
            self._model.session.run_with_iobinding(self._binding, options)
        except Exception as error:
            if not options.terminate:
                raise
            raise TurnsError(
                f"the inputs take ONNX Runtime more than {_PATIENCE_S:g} s in {call.name} ({call.label}), and perhaps it "
                "never ends for them"
            ) from error
        finally:
            timer.cancel()

    def _other_shape(self) -> str:
        """Which output has another shape than the network was built with, by a run that makes the outputs; empty if none."""
        model, binding = self._model, self._model.session.io_binding()
        kind = "cuda" if model.provider == _GPU_PROVIDER else "cpu"
        made = [name for name in model.call.buffers if name in model.call.outputs]
        for name in model.call.buffers:
            port, ordinal = self._ports[name], model.device.target.ordinal if kind == "cuda" else 0
            address = self._host[name].ctypes.data if name in self._host else self._addresses[name]
            if name in made:
                binding.bind_output(port.name, "cpu")
            else:
                binding.bind_input(port.name, kind, ordinal, _element_type(port), port.shape, address)
        try:
            model.session.run_with_iobinding(binding)
        except Exception:  # the cause is another one
            return ""
        for name, value in zip(made, binding.get_outputs()):
            wanted, found = list(self._ports[name].shape), list(value.shape())
            if wanted != found:
                return (
                    f": {self._ports[name].name!r} has shape {found} in this call, and {wanted} in the network, as the "
                    "model declares it or as it was in two runs of the build. Correct the shape in the model, or give "
                    "inputs for which it holds"
                )
        return ""

    def launch(self, stream: int = 0) -> None:
        """Raises SubgraphError if ONNX Runtime fails, or makes an array of another shape than the network has; inside of
        `limited_turns` TurnsError if it takes minutes."""
        model = self._model
        model.device.wait(stream)
        outputs = model.call.outputs
        for name, array in self._host.items():
            if name not in outputs:
                model.device.copy_out(array.data, self._addresses[name])
        try:
            self._run()
        except TurnsError:
            raise
        except Exception as error:  # ONNX Runtime's errors have no common base
            reason = self._other_shape() or f": {error}"
            raise SubgraphError(f"ONNX Runtime failed in {model.call.name} ({model.call.label}){reason}") from error
        for name, array in self._host.items():
            if name in outputs:
                model.device.copy_in(self._addresses[name], array.data)


def _element_type(port: Any) -> Any:
    """NumPy's type of an input or output, or ONNX's number of a dtype that NumPy lacks."""
    import numpy as np

    name = str(port.type).removeprefix("tensor(").removesuffix(")")
    if name == "bfloat16":
        return _BFLOAT16
    return np.dtype({"float": "float32", "double": "float64"}.get(name, name)).type


def _host_array(port: object) -> Any:
    """Uninitialised memory of the host for an input or output, as bytes."""
    import numpy as np

    return np.empty(_nbytes(port), np.uint8)


def _nbytes(port: Any) -> int:
    import numpy as np

    kind = _element_type(port)
    itemsize = 2 if kind == _BFLOAT16 else np.dtype(kind).itemsize
    return int(np.prod(port.shape, dtype=np.int64)) * itemsize
