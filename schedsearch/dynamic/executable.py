"""Networks whose sizes are computed in the run, as a `Net`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from schedsearch.device import Device
from schedsearch.dynamic.bound import BoundNet
from schedsearch.dynamic.explain import explain
from schedsearch.dynamic.file import DynamicBundle
from schedsearch.dynamic.given import look
from schedsearch.dynamic.net import DynamicNet
from schedsearch.dynamic.program import DynamicCall, DynamicProgram, DynamicValue
from schedsearch.errors import UsageError
from schedsearch.executable.explain import check_text
from schedsearch.executable.net import Net, Times, check_repeat
from schedsearch.executable.ports import Port, in_order
from schedsearch.executable.program import Origin
from schedsearch.executable.times import time_on_cpu_ns
from schedsearch.ops.data_movement import AXES
from schedsearch.ops.index_map import ByIndicesParams, index_map
from schedsearch.text import counted
from schedsearch.typed import Array


class CallStep(NamedTuple):
    """A call of a graph, as `executable.net.Step`."""

    name: str
    label: str
    origin: Origin


class DynamicExecutable(Net):
    """A `Net` whose sizes are computed in the run. It takes the device over: `close` closes it.

    Inputs are contiguous arrays of the device; arrays in the host's memory are only for CPUs. An exact call returns arrays
    of the shapes that the inputs lead to. A bounded one returns pairs (array, extents); it binds the first arrays that it
    gets, so that later calls with the same arrays copy nothing to the host, wait for nothing and allocate nothing. `bind`
    does the same, whichever mode the graph was built for.

    Attributes:
        net: the graph on the device, for both modes.
    """

    def __init__(self, bundle: DynamicBundle, device: Device) -> None:
        """Raises DeviceError if the device refuses the code, or has too little memory; the device is closed then."""
        self.bundle, self._device = bundle, device
        self.device = (device.target.kind, device.target.ordinal if device.target.kind == "cuda" else 0)
        try:
            kernels = {workload: each.artifact for workload, each in bundle.kernels.items()}
            self.net = DynamicNet(
                bundle.program, device, kernels.__getitem__, lambda number, bounded: bundle.sizes[number, bounded]
            )
        except BaseException:
            device.close()
            raise
        values, program = self.program.values, self.program
        self._inputs = tuple(_port(name, values[name]) for name in program.inputs)
        self._outputs = tuple(_port(called, values[name]) for called, name in zip(program.called, program.outputs))
        self._bound: BoundNet | None = None
        self._looks: list[tuple[Hashable, int]] = []  # of the arrays that it is bound to
        self._closed = False

    @property
    def program(self) -> DynamicProgram:
        return self.net.program

    @property
    def model(self) -> str:
        return self.bundle.model

    @property
    def target(self) -> str:
        return self.bundle.target

    @property
    def checked(self) -> str:
        return self.bundle.checked

    @property
    def inputs(self) -> tuple[Port, ...]:
        return self._inputs

    @property
    def outputs(self) -> tuple[Port, ...]:
        return self._outputs

    @property
    def steps(self) -> tuple[CallStep, ...]:
        calls = (call for segment in self.program.segments for call in segment.calls)
        return tuple(CallStep(each.name, each.workload.label, self.bundle.kernels[each.workload].origin) for each in calls)

    @property
    def kernels(self) -> tuple[Origin, ...]:
        return tuple(each.origin for each in self.bundle.kernels.values())

    @property
    def summary(self) -> str:
        return f"{counted(len(self.steps), 'call')}, runs {self.bundle.run_mode}"

    def explain(self) -> str:
        """What each call needs from whom, bytes to the host, waits and allocations; and the kernel of each workload."""
        lines = [
            f"{self.bundle.model or 'graph'} on {self.bundle.target}, runs {self.bundle.run_mode}",
            check_text(self.bundle.checked),
            explain(self.program),
            "kernels:",
        ]
        for workload, kernel in self.bundle.kernels.items():
            origin = kernel.origin
            source = f"record {origin.record_id}" if origin.record_id is not None else origin.level
            lines.append(f"  {workload.label}: {origin.template} ({source})")
        return "\n".join(lines)

    def __call__(self, *args: Any, stream: Any = None, **named: Any) -> Any:
        """Runs the graph in the mode that it was built for; as `Net.__call__`.

        Raises:
            IndexRangeError: an index of a gather or scatter is out of range. A bounded call raises neither this nor
                SizeError, and an exact one on a GPU may not see a wrong index; ask `check()`.
        """
        given = in_order(self.program.inputs, self._inputs, args, named)
        if self.bundle.run_mode == "exact":
            return self.net(*given, stream=stream)
        looks = [look(array, name) for array, name in zip(given, self.program.inputs)]
        if self._bound is None or looks != self._looks:
            self._unbind()
            self._bound, self._looks = self.net.bind(*given), looks
        return self._bound(stream)

    def bind(self, *args: object, **named: object) -> BoundNet:
        """A bounded run on fixed arrays, whichever mode the graph was built for; as `Net.bind`."""
        return self.net.bind(*in_order(self.program.inputs, self._inputs, args, named))

    def check(self) -> None:
        """As `BoundNet.check` for the last bounded call, and as `DynamicNet.check` for those since the last check."""
        self.net.check()
        if self._bound is not None:
            self._bound.check()

    def evaluate(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        found = self.net(*self._on_device(inputs))
        self.net.check()
        several = found if isinstance(found, tuple) else (found,)
        return {port.name: _on_host(array) for port, array in zip(self.outputs, several)}

    def _on_device(self, inputs: Mapping[str, Array]) -> list[Any]:
        """Arrays of the device in the order of the inputs. Raises UsageError if that needs PyTorch, which is missing."""
        given = in_order(self.program.inputs, self._inputs, (), inputs)
        if self.device[0] == "cpu":
            return given
        try:
            import torch
        except ImportError as error:
            raise UsageError(
                "running on a GPU needs arrays of a library there; install PyTorch: pip install torch"
            ) from error
        return [torch.from_numpy(array).cuda(self.device[1]) for array in given]

    def index_limits(self, sizes: Mapping[str, int] | None = None) -> dict[str, int]:
        chosen = self._chosen(sizes or {})
        found: dict[str, int] = {}
        for call in (call for segment in self.program.segments for call in segment.calls):
            for spec in call.workload.signature:
                value = self.program.values.get(call.inputs.get(spec.name, ""))
                if spec.below is None or value is None or (name := value.view_of or value.name) not in self.program.inputs:
                    continue
                found[name] = min(spec.below, *self._extents_in_use(call, chosen), found.get(name, spec.below))
        return found

    def _extents_in_use(self, call: DynamicCall, sizes: Mapping[str, int]) -> list[int]:
        """The extents that indices count along, if the call reads them and they follow from the sizes of inputs; at least
        1 each."""
        if not call.workload.params.get("dynamic_x") or (known := self.program.values[call.inputs["x"]].known) is None:
            return []
        extents = [known[axis] for axis in index_map(ByIndicesParams.of(call.workload.params)).axes]
        return [max(1, n if isinstance(n, int) else n.at(sizes)) for n in extents]

    def trace(self, *args: object, **named: object) -> dict[str, Array]:
        """As `Net.trace`, of the values whose extents follow from those of the inputs."""
        given = in_order(self.program.inputs, self._inputs, args, named)
        values = self.program.values
        shown = {name: each for name, each in self.program.shows.items() if values[each.name].is_visible}
        arrays = self._on_device(dict(zip(self.program.inputs, given)))
        held = self.net.trace([each.name for each in shown.values()], *arrays)
        return {name: held[each.name].transpose(each.order) for name, each in shown.items()}

    def measure(self, repeat: int = 100, inputs: Mapping[str, Array] | None = None) -> Times:
        check_repeat(repeat)
        if inputs is None:
            raise UsageError("times depend on the inputs, by which sizes are computed; give them: measure(repeat, inputs)")
        arrays = self._on_device(inputs)
        bound = self.net.bind(*arrays)
        runs: dict[str, Callable[[], object]] = {"exact": lambda: self.net(*arrays), "bounded": bound.step}

        def complete(run: Callable[[], object]) -> None:
            run()
            self._device.synchronize()

        try:
            for run in runs.values():
                complete(run)  # prepares what later runs use again
            bound.check()
            found = {mode: time_on_cpu_ns(functools.partial(complete, run), repeat) for mode, run in runs.items()}
        finally:
            bound.close()
        return Times(found[self.bundle.run_mode], run_modes_ns=found)

    def mark_checked(self, by: str) -> None:
        self.bundle = replace(self.bundle, checked=by)

    def save(self, path: str | os.PathLike[str]) -> None:
        self.bundle.save(path)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._unbind()
            self.net.close()
            self._device.close()

    def _unbind(self) -> None:
        if self._bound is not None:
            self._bound.close()
            self._bound, self._looks = None, []


def _port(name: str, value: DynamicValue) -> Port:
    """A value as callers see it."""
    shape, axes = tuple(value.sizes.get(axis, n) for axis, n in enumerate(value.shape)), AXES[: len(value.shape)]
    return Port(name, shape, value.dtype, axes, axes, bool(value.sizes) or value.words is None)


def _on_host(array: object) -> Any:
    return array.cpu().numpy() if hasattr(array, "cpu") else array
