"""A deployed kernel: checks its arguments, binds them and launches."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from schedsearch.config import Config
from schedsearch.device import BoundKernel, LoadedKernel, WeightWorkspaces
from schedsearch.errors import ArgumentError, did_you_mean
from schedsearch.runtime import arrays
from schedsearch.workload import Workload


@dataclass(frozen=True)
class Provenance:
    """Where a kernel comes from.

    Attributes:
        rung: exact, same_architecture, nearest or default; see `schedsearch.compile`.
        template, config: what made it.
        time_ns: the recorded time, None on the rungs that have no record for this workload and device.
        record_id: row of the record in its database, or None.
        why: one line a rung that was tried, in order.
    """

    rung: str
    template: str
    config: Config
    time_ns: float | None = None
    record_id: int | None = None
    why: tuple[str, ...] = ()


class PreparedWeight:
    """A weight whose repacking is done, for the kernel that made it. Goes where the weight would; see `prepare_weight`.

    Attributes:
        array: the weight itself, kept alive.
        nbytes: device memory that the repacked weight takes; 0 where the kernel reads the weight as it is.
    """

    __slots__ = ("array", "kernel", "nbytes", "workspaces")

    def __init__(self, kernel: Kernel, array: Any, workspaces: WeightWorkspaces | None, nbytes: int) -> None:
        self.kernel, self.array, self.workspaces, self.nbytes = kernel, array, workspaces, nbytes

    def __repr__(self) -> str:
        return f"<weight of {self.kernel.workload.label}, {self.nbytes} bytes repacked>"


class Kernel:
    """Runs one workload on one device.

    Called with the arrays of `workload.signature`, by position or name, and the call-time scalars by name; returns y.
    Arrays may be torch, CuPy, DLPack or `__cuda_array_interface__` ones on the GPU, NumPy or torch ones on the CPU. An
    NHWC argument may be held as a contiguous (N, H, W, C) array or as a logical (N, C, H, W) one in channels_last; y comes
    back in the form and library of x. On the GPU the call only enqueues.

    Calls are serialised by a lock; kernels whose plan has workspaces must not run on two streams at the same time.

    Attributes:
        workload: what it computes.
        provenance: how it was found.
        verified: whether this very artifact was compared with the reference for this workload on this kind of device.
    """

    def __init__(
        self,
        workload: Workload,
        loaded: LoadedKernel,
        device: tuple[str, int],
        provenance: Provenance,
        verified: bool,
    ) -> None:
        self.workload = workload
        self.provenance = provenance
        self.verified = verified
        self.device = device
        self._loaded = loaded
        self._specs = workload.signature
        self._names = [spec.name for spec in self._specs]
        self._scalar_defaults = {scalar.name: scalar.default for scalar in workload.scalars}
        self._lock = threading.Lock()
        self._bound: BoundKernel | None = None
        self._bound_weight: WeightWorkspaces | None = None  # what `_bound` was bound with
        self._scalars: dict[str, float] = {}
        self._seen: list[_SeenTensor] = []
        self._new_output: Callable[[], Any] | None = None

    @property
    def rung(self) -> str:
        return self.provenance.rung

    @property
    def config(self) -> Config:
        return self.provenance.config

    def __call__(self, *args: Any, out: Any = None, stream: Any = None, **named: Any) -> Any:
        """Computes y.

        Args:
            args, named: arrays in the order or by the names of `workload.signature`; scalars by name only.
            out: array to write y into; allocated unless given.
            stream: a CUDA stream: an integer handle, or a torch or CuPy stream; the library's current one unless given.

        Raises:
            ArgumentError: an array or scalar is missing, unknown, or has a wrong dtype, shape, strides, alignment or device.
            DeviceError: the launch failed.
        """
        with self._lock:
            if not named and out is None and self._rebind(args):
                y = self._new_output()  # type: ignore[misc]
                seen = self._seen[-1]
                pointer = y.data_ptr()
                if pointer != seen.pointer:
                    self._bound.set_pointer("y", pointer)  # type: ignore[union-attr]
                    seen.pointer = pointer
                self._bound.launch(self._raw_stream(stream, "torch"))  # type: ignore[union-attr]
                return y
            return self._call_checked(args, named, out, stream)

    def bind(self, *args: Any, out: Any = None, **named: Any) -> Step:
        """Packs the argument block once.

        Returns:
            A callable `step(stream=None)` that does nothing but launch: graph-capturable, and it keeps the arrays alive.

        Raises:
            ArgumentError: as a call does.
        """
        arguments, scalars = self._split(args, named)
        prepared = self._take_prepared(arguments)
        views, y = self._checked(arguments, out)
        bound = self._loaded.bind({name: seen.address for name, seen in views.items()}, scalars, prepared)
        library = views[self._names[0]].library
        return Step(bound, lambda stream: self._raw_stream(stream, library), y, tuple(arguments.values()))

    def prepare_weight(self, weight: Any, stream: Any = None) -> PreparedWeight:
        """Repacks the weight once, for many calls.

        What is returned takes the weight's place in calls and in `bind`, which then leave out the steps that depend on the
        weight alone. Where the kernel has no such steps nothing is done, and it means the weight itself. It holds the weight
        as it was: prepare again after changing it. A record's time is that of the plain path, repacking included.

        Args:
            weight: as the argument of that name of a call.
            stream: as of a call; launches on other streams must wait for it.

        Raises:
            ArgumentError: as a call does.
            DeviceError: the launch failed, or there is no memory.
        """
        seen = arrays.view(weight, "weight")
        arrays.check(next(spec for spec in self._specs if spec.name == "weight"), seen, self.device)
        sizes = self._loaded.artifact.plan.weight_workspaces
        if not sizes:
            return PreparedWeight(self, weight, None, 0)
        made = self._loaded.prepare_weight(seen.address, self._raw_stream(stream, seen.library))
        return PreparedWeight(self, weight, made, sum(sizes.values()))

    def _take_prepared(self, arguments: dict[str, Any]) -> WeightWorkspaces | None:
        """Puts the array in the place of a prepared weight, and returns what was made of it."""
        given = arguments.get("weight")
        if not isinstance(given, PreparedWeight):
            return None
        if given.kernel is not self:
            raise ArgumentError(
                f"weight was prepared by another kernel ({given.kernel!r}); pass what this kernel's prepare_weight returns"
            )
        arguments["weight"] = given.array
        return given.workspaces

    def _rebind(self, args: tuple[Any, ...]) -> bool:
        """The short path: torch tensors that look like those of the last call, at whatever address."""
        seen = self._seen
        if not seen or len(args) != len(self._names) or self._scalars != self._scalar_defaults:
            return False
        for tensor, last in zip(args, seen):
            if (
                type(tensor) is not last.kind
                or tensor.dtype is not last.dtype
                or tensor.shape != last.shape
                or tensor.stride() != last.strides
                or tensor.get_device() != last.ordinal
            ):
                return False
            pointer = tensor.data_ptr()
            if pointer != last.pointer:
                if not pointer:  # a meta tensor, which get_device() takes for one of the CPU
                    return False
                self._bound.set_pointer(last.name, pointer)  # type: ignore[union-attr]
                last.pointer = pointer
        return True

    def _call_checked(self, args: tuple[Any, ...], named: Mapping[str, Any], out: Any, stream: Any) -> Any:
        arguments, scalars = self._split(args, named)
        prepared = self._take_prepared(arguments)
        views, y = self._checked(arguments, out)
        self._seen = []
        if self._bound is None or self._bound_weight is not prepared:
            self._bound = self._loaded.bind({name: seen.address for name, seen in views.items()}, scalars, prepared)
            self._bound_weight = prepared
        else:
            for name, seen in views.items():
                if not (prepared and name == "weight"):  # nothing reads it
                    self._bound.set_pointer(name, seen.address)
            for name, value in scalars.items():
                self._bound.set_scalar(name, value)
        self._scalars = scalars
        library = views[self._names[0]].library
        self._bound.launch(self._raw_stream(stream, library))
        if prepared is None and all(arrays.is_torch_tensor(array) for array in (*arguments.values(), y)):
            self._remember(arguments, y)
        return y

    def _remember(self, arguments: Mapping[str, Any], y: Any) -> None:
        import torch

        self._seen = [_SeenTensor(name, tensor) for name, tensor in (*arguments.items(), ("y", y))]
        shape, strides, dtype, device = tuple(y.shape), tuple(y.stride()), y.dtype, y.device
        empty_strided = torch.empty_strided
        self._new_output = lambda: empty_strided(shape, strides, dtype=dtype, device=device)

    def _split(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
        if len(args) > len(self._names):
            raise ArgumentError(
                f"{len(args)} arrays by position; the kernel takes {len(self._names)}: {', '.join(self._names)}"
            )
        arguments = dict(zip(self._names, args))
        scalars = dict(self._scalar_defaults)
        for name, value in named.items():
            if name in scalars:
                scalars[name] = _number(name, value)
            elif name not in self._names:
                allowed = [*self._names, *scalars, "out", "stream"]
                raise ArgumentError(f"unknown argument {name!r}{did_you_mean(name, allowed)}; allowed: {', '.join(allowed)}")
            elif name in arguments:
                raise ArgumentError(f"{name} is given by position and by name; give it once")
            else:
                arguments[name] = value
        missing = [name for name in self._names if name not in arguments]
        if missing:
            raise ArgumentError(f"missing {', '.join(missing)}; the kernel takes {', '.join(self._names)}")
        return {name: arguments[name] for name in self._names}, scalars

    def _checked(self, arguments: Mapping[str, Any], out: Any) -> tuple[dict[str, arrays.ArrayView], Any]:
        views = {name: arrays.view(array, name) for name, array in arguments.items()}
        held = {spec.name: arrays.check(spec, views[spec.name], self.device) for spec in self._specs}
        output = replace(self.workload.output, name="out")
        if out is None:
            first = self._names[0]
            form = next((form for form in arrays.forms(output) if form.name == held[first].name), arrays.forms(output)[0])
            out = arrays.empty_like(arguments[first], views[first], output, form)
        seen = arrays.view(out, "out")
        arrays.check(output, seen, self.device)
        arrays.check_output(seen, output, views, self._specs)
        return {**views, "y": seen}, out

    def _raw_stream(self, stream: Any, library: str) -> int:
        if stream is None:
            return self._current_stream(library)
        if isinstance(stream, int):
            return stream
        for attribute in ("cuda_stream", "ptr"):
            if hasattr(stream, attribute):
                return int(getattr(stream, attribute))
        if hasattr(stream, "__cuda_stream__"):
            protocol = stream.__cuda_stream__
            return int((protocol() if callable(protocol) else protocol)[1])
        raise ArgumentError(
            f"stream is a {type(stream).__name__}; allowed: an integer handle, a torch, CuPy or cuda.core stream"
        )

    def _current_stream(self, library: str) -> int:
        if self.device[0] == "cpu":
            return 0
        if library == "torch":
            return _torch_stream_getter()(self.device[1])
        if library == "cupy":
            return int(sys.modules["cupy"].cuda.get_current_stream().ptr)
        return 0

    def __repr__(self) -> str:
        time = f"{self.provenance.time_ns / 1e3:.2f} us" if self.provenance.time_ns else "no time"
        return (
            f"<Kernel {self.workload.label} by {self.provenance.template} on {self.device[0]}:{self.device[1]}, "
            f"rung {self.rung}, {time}, {'verified' if self.verified else 'not verified'}>"
        )


class Step:
    """A launch with everything packed. `y` is the output array that it writes."""

    __slots__ = ("_arguments", "_launch", "_stream", "y")

    def __init__(self, bound: BoundKernel, stream: Callable[[Any], int], y: Any, arguments: tuple[Any, ...]) -> None:
        self._launch = bound.launch
        self._stream = stream
        self.y = y
        self._arguments = arguments  # keeps the memory alive

    def __call__(self, stream: Any = None) -> Any:
        """Enqueues the kernel on a stream (the library's current one unless given) and returns y."""
        self._launch(stream if type(stream) is int else self._stream(stream))
        return self.y


class _SeenTensor:
    """What is compared with the next call's tensor: attributes that are cheap to read."""

    __slots__ = ("dtype", "kind", "name", "ordinal", "pointer", "shape", "strides")

    def __init__(self, name: str, tensor: Any) -> None:
        self.name = name
        self.kind = type(tensor)
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.strides = tensor.stride()
        self.ordinal = tensor.get_device()
        self.pointer = tensor.data_ptr()


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ArgumentError(f"{name} is a {type(value).__name__}, {value!r}; allowed: one number") from None


def _torch_stream_getter() -> Callable[[int], int]:
    """PyTorch's current stream of a device as an integer; the raw getter, where there is one, costs a tenth."""
    global _get_torch_stream
    if _get_torch_stream is None:
        import torch

        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        _get_torch_stream = raw or (lambda ordinal: int(torch.cuda.current_stream(ordinal).cuda_stream))
    return _get_torch_stream


_get_torch_stream: Callable[[int], int] | None = None
