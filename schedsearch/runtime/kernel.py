"""A deployed kernel: checks its arguments, binds them and launches."""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schedsearch.closing import Closing
from schedsearch.config import Config
from schedsearch.device import BoundKernel, LoadedKernel, Workspaces
from schedsearch.device.index_notes import IndexNotes, notes_indices
from schedsearch.errors import ArgumentError, did_you_mean
from schedsearch.launch import Artifact
from schedsearch.measurement import COLD_GRAPH
from schedsearch.ops import ScalarSpec
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.runtime import arrays
from schedsearch.runtime.prepared import Prepared, PreparedArgument, take_prepared
from schedsearch.runtime.repeated import announce, announcer, same_numbers, tracked
from schedsearch.runtime.short_call import ShortCall, kernel_call
from schedsearch.runtime.streams import current_stream, raw_stream
from schedsearch.text import quoted
from schedsearch.workload import Workload


@dataclass(frozen=True)
class Provenance:
    """The origin of a kernel.

    Attributes:
        level: exact, other_mode, same_architecture, shipped, nearest or default; see `schedsearch.compile`.
        template, config: the template and configuration that made it.
        time_ns: the recorded time; None on levels without a record for this workload and device.
        record_id: row of the record in its database, or None.
        why: one line for each level that was tried, in order.
        mode: how the record was timed. In `cold-graph-prepared-v1` the time is that of a call with prepared constants.
    """

    level: str
    template: str
    config: Config
    time_ns: float | None = None
    record_id: int | None = None
    why: tuple[str, ...] = ()
    mode: str = COLD_GRAPH


class Kernel(Closing):
    """Runs one workload on one device.

    Call it with the arrays of `workload.signature`, by position or name, and the call-time scalars by name. It returns the
    output, or a tuple if there are several outputs. On the GPU it takes arrays of torch, CuPy, DLPack or
    `__cuda_array_interface__`, on the CPU those of NumPy or torch. An NHWC argument may be a contiguous (N, H, W, C) array
    or a logical (N, C, H, W) array in channels_last. Outputs have the form and library of the first argument. On the GPU a
    call only enqueues.

    Calls may come from any thread; a lock serialises them. A kernel with workspaces must not run on two streams at once.

    Attributes:
        workload: what it computes.
        provenance: how it was found.
        verified: whether this artifact was compared with the reference for this workload on this kind of device.
        device: (cpu or cuda, ordinal).
    """

    def __init__(
        self,
        workload: Workload,
        loaded: LoadedKernel,
        device: tuple[str, int],
        provenance: Provenance,
        verified: bool,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_close` is called by `close`, after the code was unloaded."""
        self.workload = workload
        self.provenance = provenance
        self.verified = verified
        self.device = device
        self._loaded = loaded
        self._on_close = on_close
        self._plan = loaded.artifact.plan
        self._inputs = {spec.name: spec for spec in workload.signature}
        self._outputs = {spec.name: spec for spec in workload.outputs}
        self._scalars = {scalar.name: scalar for scalar in workload.scalars}
        self._scalar_defaults = {scalar.name: scalar.default for scalar in workload.scalars}
        self._lock = threading.Lock()
        self._notes = IndexNotes(loaded.device, [workload] if notes_indices(self._plan) else [], _describe)
        self._bound: BoundKernel | None = None
        self._bound_prepared: Workspaces | None = None  # the operands of `_bound`
        self._short_call: ShortCall | None = None

    @property
    def level(self) -> str:
        return self.provenance.level

    @property
    def rung(self) -> str:
        """The earlier name of `level`."""
        return self.level

    @property
    def config(self) -> Config:
        return self.provenance.config

    @property
    def artifact(self) -> Artifact:
        """The machine code and how to launch it."""
        return self._loaded.artifact

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of the arguments that `prepare` repacks, all of them together; empty if it has nothing to do."""
        return self._plan.constants

    def __call__(self, *args: Any, out: Any = None, stream: Any = None, **named: Any) -> Any:
        """Computes the outputs.

        Args:
            args, named: arrays in the order or by the names of `workload.signature`; scalars by name only.
            out: the array for the output; allocated by default. For several outputs: a tuple of arrays in the order of
                `workload.outputs`, or a mapping by name; outputs that it lacks are allocated.
            stream: a CUDA stream: an integer handle, or a torch or CuPy stream; default: the library's current one.

        Raises:
            ArgumentError: an array or scalar is missing, unknown, or has a wrong dtype, shape, strides, alignment or device;
                or, on a CPU, a scale of quantised numbers is not finite or not above zero.
            IndexRangeError: on a CPU, an index is out of range. On a GPU `check` says so.
            DeviceError: the launch failed.
        """
        with self._lock:
            result = None
            if self._short_call is not None and out is None and not named:
                result = self._short_call(args, stream)
            if result is None:
                result = self._call_checked(args, named, out, stream)
            if self.device[0] == "cpu":
                self._notes.check()
            return result

    def check(self) -> None:
        """Waits for all calls, and looks whether an index of a gather or scatter was out of range since the last check.

        A GPU computes zeros for such an index, or leaves an update out, and reads and writes nothing outside of the arrays.
        Calls on a CPU raise themselves; launches of `bind` do not.

        Raises:
            IndexRangeError: an index was out of range. The message names it, its place, and what is allowed.
        """
        self._loaded.device.synchronize()
        self._notes.check()

    def bind(self, *args: object, out: object = None, **named: object) -> Step:
        """Packs the argument block once.

        Returns:
            A callable `step(stream=None)` that only launches. A CUDA graph can capture it, and it keeps the arrays alive.

        Raises:
            ArgumentError: as a call does.
        """
        arguments, scalars = self._split(args, named)
        prepared = take_prepared(self, arguments, self.constants)
        views = self._view(arguments)
        outputs = self._check_outputs(arguments, views, out)
        bound = self._loaded.bind({**_addresses(views, outputs), **self._notes.buffers(self.workload)}, scalars, prepared)
        written = tracked({name: array for name, (array, _) in outputs.items()}, self._given_outputs(out))
        results = tuple(array for array, _ in outputs.values())
        return Step(self, bound, self._library(views), results, tuple(arguments.values()), written)

    def bind_addresses(self, buffers: Mapping[str, int], scalars: Mapping[str, float]) -> BoundKernel:
        """Packs the argument block from addresses that the caller has checked, for call protocols other than this class's.

        Raises:
            ArgumentError: an address or a scalar is missing, or an address lacks the alignment that the plan requires.
        """
        return self._loaded.bind({**buffers, **self._notes.buffers(self.workload)}, scalars)

    def prepare(self, *, stream: object = None, **named: object) -> Prepared:
        """Repacks constant arguments (weights, scales, biases) once, for many calls.

        Calls and `bind` take the result instead of the arrays. They then leave out the steps that depend on constants
        alone::

            prepared = kernel.prepare(weight=weight, bias=bias)
            y = kernel(x, **prepared)
            y = kernel(x, prepared["weight"], prepared["bias"])  # the same; by position a call costs less host time

        If a kernel repacks nothing, this does nothing, so that callers need not ask. Prepared arguments keep the values that
        the arrays had. In mode `cold-graph-prepared-v1` a record's time is that of calls with prepared constants; in the
        other modes it includes the repacking.

        Args:
            named: arrays by argument name: all of `constants`, and any others that do not change between calls.
            stream: as in a call; launches on other streams must wait for it.

        Raises:
            ArgumentError: a call would refuse an array, an array is not a constant argument, or one of `constants` is
                missing.
            DeviceError: the launch failed, or there is no memory.
        """
        allowed = [name for name, spec in self._inputs.items() if spec.constant or name in self.constants]
        for name in named:
            if name not in allowed:
                raise ArgumentError(
                    f"{name!r} is not a constant argument of the kernel{did_you_mean(name, allowed)}; "
                    f"allowed: {', '.join(allowed) or 'none'}"
                )
        missing = [name for name in self.constants if name not in named]
        if missing:
            raise ArgumentError(f"the kernel repacks {', '.join(self.constants)} together; missing: {', '.join(missing)}")
        views = {name: arrays.view(array, name) for name, array in named.items()}
        for name, seen in views.items():
            arrays.check(self._inputs[name], seen, self.device)
            arrays.check_numbers(self._inputs[name], seen)
        workspaces = None
        if self.constants:
            handle = raw_stream(stream, self._library(views), self.device)
            workspaces = self._loaded.prepare({name: seen.address for name, seen in views.items()}, handle)
        return Prepared(self, named, views, workspaces)

    def close(self) -> None:
        """Unloads the code and frees its workspaces; does nothing the second time.

        Do not use the kernel, its bound steps, or graphs that captured it afterwards. A kernel that is never closed keeps
        its code loaded for the life of the process.
        """
        with self._lock:
            self._short_call = self._bound = None
            self._loaded.close()
            self._notes.close()
            self._on_close()

    def _call_checked(self, args: tuple[object, ...], named: Mapping[str, object], out: object, stream: object) -> Any:
        arguments, scalars = self._split(args, named)
        prepared = take_prepared(self, arguments, self.constants)
        views = self._view(arguments)
        outputs = self._check_outputs(arguments, views, out)
        handle = raw_stream(stream, self._library(views), self.device)
        announce((name, outputs[name][0]) for name in self._given_outputs(out) if name in outputs)
        self._short_call = None  # it is bound to what changes now
        bound = self._bind_to(_addresses(views, outputs), scalars, prepared)
        bound.launch(handle)
        results = {name: array for name, (array, _) in outputs.items()}
        everything = (*views.values(), *(seen for _, seen in outputs.values()))
        defaults = same_numbers(list(scalars.values()), list(self._scalar_defaults.values()))
        if defaults and all(seen.library == "torch" for seen in everything):
            self._short_call = kernel_call(bound, arguments, results, self.device)
        return _one_or_all(tuple(results.values()))

    def _bind_to(
        self, addresses: Mapping[str, int], scalars: Mapping[str, float], prepared: Workspaces | None
    ) -> BoundKernel:
        """The kernel's own binding, with these operands."""
        if self._bound is None or self._bound_prepared is not prepared:
            self._bound = self._loaded.bind({**addresses, **self._notes.buffers(self.workload)}, scalars, prepared)
            self._bound_prepared = prepared
            return self._bound
        for name, address in addresses.items():
            self._bound.set_pointer(name, address)
        for name, value in scalars.items():
            self._bound.set_scalar(name, value)
        return self._bound

    def _split(self, args: tuple[object, ...], named: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, float]]:
        """Arrays by name in the order of the signature, and the scalars."""
        names = list(self._inputs)
        if len(args) > len(names):
            raise ArgumentError(f"{len(args)} arrays by position; the kernel takes {len(names)}: {', '.join(names)}")
        arguments = dict(zip(names, args))
        scalars = dict(self._scalar_defaults)
        for name, value in named.items():
            if name in scalars:
                scalars[name] = _number(self._scalars[name], value)
            elif name not in names:
                allowed = [*names, *scalars, "out", "stream"]
                raise ArgumentError(f"unknown argument {name!r}{did_you_mean(name, allowed)}; allowed: {', '.join(allowed)}")
            elif name in arguments:
                raise ArgumentError(f"{name} is given by position and by name; give it once")
            else:
                arguments[name] = value
        missing = [name for name in names if name not in arguments]
        if missing:
            raise ArgumentError(f"missing {', '.join(missing)}; the kernel takes {', '.join(names)}")
        return {name: arguments[name] for name in names}, scalars

    def _view(self, arguments: Mapping[str, object]) -> dict[str, arrays.ArrayView]:
        """Checks the arguments; a prepared argument was checked when it was prepared."""
        views = {}
        for name, given in arguments.items():
            if isinstance(given, PreparedArgument):
                views[name] = given.view
            else:
                views[name] = arrays.view(given, name)
                arrays.check(self._inputs[name], views[name], self.device)
                arrays.check_numbers(self._inputs[name], views[name])
        return views

    def _check_outputs(
        self, arguments: Mapping[str, object], views: Mapping[str, arrays.ArrayView], out: object
    ) -> dict[str, tuple[Any, arrays.ArrayView]]:
        """name -> (array, its description) of each output; allocates outputs that are not given."""
        given = self._given_outputs(out)
        outputs: dict[str, tuple[Any, arrays.ArrayView]] = {}
        for name, spec in self._outputs.items():
            label = "out" if len(self._outputs) == 1 else f"out[{name!r}]"
            array = given.get(name)
            if array is None:
                array = self._allocate(spec, arguments, views)
            seen = arrays.view(array, label)
            arrays.check(spec, seen, self.device, label)
            arrays.check_output(seen, spec, views, self._inputs, label)
            for other, (_, before) in outputs.items():
                if arrays.overlap(seen, spec.span_bytes, before, self._outputs[other].span_bytes):
                    raise ArgumentError(f"{label} overlaps out[{other!r}]; give each output memory of its own")
            outputs[name] = array, seen
        return outputs

    def _given_outputs(self, out: object) -> Mapping[str, Any]:
        names = list(self._outputs)
        if out is None:
            return {}
        if isinstance(out, Mapping):
            for name in out:
                if name not in names:
                    raise ArgumentError(
                        f"out names {name!r}{did_you_mean(str(name), names)}; the outputs are {', '.join(names)}"
                    )
            return out
        given: Sequence[Any] = out if isinstance(out, tuple | list) else (out,)
        if len(given) != len(names):
            raise ArgumentError(
                f"out holds {len(given)} arrays; the kernel has {len(names)} outputs: {', '.join(names)}; "
                "give a tuple with all of them, or a mapping by name"
            )
        return dict(zip(names, given))

    def _allocate(self, spec: Any, arguments: Mapping[str, Any], views: Mapping[str, arrays.ArrayView]) -> Any:
        first = next(iter(self._inputs))
        array = arguments[first]
        if isinstance(array, PreparedArgument):
            array = array.array
        held = arrays.form_of(self._inputs[first], views[first].shape, views[first].strides)
        return arrays.empty_like(array, views[first], spec, arrays.output_form(spec, held.name if held else "plain"))

    def _library(self, views: Mapping[str, arrays.ArrayView]) -> str:
        return next(iter(views.values())).library

    def __repr__(self) -> str:
        time = f"{self.provenance.time_ns / 1e3:.2f} us" if self.provenance.time_ns else "no time"
        return (
            f"<Kernel {self.workload.label} by {self.provenance.template} on {self.device[0]}:{self.device[1]}, "
            f"level {self.level}, {time}, {'verified' if self.verified else 'not verified'}>"
        )


class Step:
    """A launch with everything packed; it keeps the arrays alive. A CUDA graph can capture it.

    Attributes:
        kernel: what it launches; `kernel.provenance` says where it comes from.
        outputs: the arrays that it writes, in the order of `workload.outputs`; of a kernel of a user, which returns nothing,
            there are none here.
    """

    __slots__ = (
        "_announce",
        "_arguments",
        "_current_stream",
        "_device",
        "_launch",
        "_library",
        "_result",
        "kernel",
        "outputs",
    )

    def __init__(
        self,
        kernel: Kernel,
        bound: BoundKernel,
        library: str,
        outputs: tuple[Any, ...],
        arguments: tuple[Any, ...],
        written: Sequence[tuple[str, Any]],
    ) -> None:
        self.kernel, self.outputs = kernel, outputs
        self._launch, self._library, self._device = bound.launch, library, kernel.device
        self._current_stream = current_stream(library, kernel.device)
        self._result = _one_or_all(outputs) if outputs else None
        self._arguments = arguments  # keeps the memory alive
        self._announce = announcer(written)  # to PyTorch, which tracks changes of outputs

    @property
    def y(self) -> Any:
        """The result of a call: the output, or a tuple of several outputs."""
        return self._result

    def __call__(self, stream: Any = None) -> Any:
        """Enqueues the kernel on a stream: an integer handle, or a torch or CuPy stream; default: the library's current one.
        Returns the kernel's result.

        Raises:
            ArgumentError: PyTorch refuses that an output is written; see `schedsearch.runtime.repeated.announce`.
        """
        if self._announce is not None:
            self._announce()
        if stream is None:
            stream = self._current_stream()
        elif type(stream) is not int:
            stream = raw_stream(stream, self._library, self._device)
        self._launch(stream)
        return self._result


def _addresses(views: Mapping[str, arrays.ArrayView], outputs: Mapping[str, tuple[Any, arrays.ArrayView]]) -> dict[str, int]:
    inputs = {name: seen.address for name, seen in views.items()}
    return inputs | {name: seen.address for name, (_, seen) in outputs.items()}


def _describe(workload: Workload, place: int, index: int) -> str:
    """What is wrong with an index that the kernel noted."""
    names = {spec.name: spec.name for spec in workload.signature}
    return f"{workload.label}: {workload.definition.wrong_index(workload.params, place, index, names)}"


def _one_or_all(results: tuple[object, ...]) -> Any:
    return results[0] if len(results) == 1 else results


def _number(scalar: ScalarSpec, value: Any) -> float:
    """The value of a scalar.

    Raises:
        ArgumentError: it is not one number that a float32 can hold (inf and nan are), or not one of the scalar's format.
    """
    name = scalar.name
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
        (stored,) = struct.unpack("<f", struct.pack("<f", number))
    except (TypeError, ValueError):
        raise ArgumentError(f"{name} is {quoted(value)}; allowed: one number") from None
    except OverflowError:
        raise ArgumentError(f"{name} is too large; allowed: a number that float32 can hold") from None
    if scalar.number:
        row = dtype_of(scalar.number)
        if not (row.lowest <= number <= row.largest and number.is_integer()):
            raise ArgumentError(
                f"{name} is {value}; allowed: an integer from {row.lowest:.0f} to {row.largest:.0f}, as it belongs to "
                f"{scalar.number} data"
            )
    if scalar.positive and not 0.0 < stored < math.inf:
        raise ArgumentError(f"{name} is {value}; allowed: a finite number above zero, as it is a scale of 8-bit numbers")
    return number
