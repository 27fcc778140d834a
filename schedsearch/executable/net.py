"""`Net`: a network that runs, whatever is in its file.

Three executors stand behind it: `fixed` runs one program, `sized` a program for each size of a dimension, and
`schedsearch.dynamic.executable` a graph whose sizes are computed in the run. Callers need not know which one they have.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from schedsearch.closing import Closing
from schedsearch.errors import ArgumentError, UsageError, did_you_mean
from schedsearch.executable.ports import Port, Size
from schedsearch.executable.program import Origin
from schedsearch.typed import Array


class Step(Protocol):
    """A kernel call of a network, or one of ONNX Runtime.

    Attributes:
        name: of the node that it computes.
        label: what it computes, for people.
        origin: where its kernel comes from.
    """

    @property
    def name(self) -> str: ...

    @property
    def label(self) -> str: ...

    @property
    def origin(self) -> Origin: ...


class BoundCall(Protocol):
    """A network on fixed arrays: what `Net.bind` returns."""

    def __call__(self, stream: Any = None) -> Any:
        """Runs the network on a stream (default: the library's current one) and returns what a call returns, always in the
        same arrays."""
        ...

    def check(self) -> None:
        """As `Net.check`, for these runs."""
        ...

    def close(self) -> None:
        """Frees what the binding has. The net must still be open."""
        ...


@dataclass(frozen=True)
class Times:
    """Measured times in nanoseconds.

    Attributes:
        total_ns: of the whole network.
        calls_ns: of each of `Net.steps`, run alone again and again, so that its arrays are in the cache. Empty of a graph
            whose sizes are computed.
        run_modes_ns: of such a graph: exact and bounded -> the time of a run until its results are complete.
    """

    total_ns: float
    calls_ns: tuple[float, ...] = ()
    run_modes_ns: Mapping[str, float] = field(default_factory=dict)


class Net(abc.ABC, Closing):
    """A network that is ready to run on one device: what `schedsearch.build` and `schedsearch.load` return.

    Call it with the inputs, by position or name. On a CPU it takes arrays of NumPy or torch, on a GPU device arrays of
    torch, CuPy or any library with DLPack or `__cuda_array_interface__`. It returns the output, or a tuple of several, in
    arrays of the first input's library. `inputs` and `outputs` say what the arrays look like: extents are integers, or
    sizes that callers choose.

    A net has memory of its own for what it computes: do not run it on two streams at once.

    Examples:
        >>> net = schedsearch.load("model.ssx")
        >>> y = net(x)

    Attributes:
        device: ("cpu", 0), or "cuda" and the number of the GPU.
    """

    device: tuple[str, int]

    # ---- what it is

    @property
    @abc.abstractmethod
    def model(self) -> str:
        """Name of the model's file, or ""."""

    @property
    @abc.abstractmethod
    def target(self) -> str:
        """Key of the kind of device that it runs on."""

    @property
    @abc.abstractmethod
    def checked(self) -> str:
        """What computed the model that the results were compared with, e.g. "ONNX Runtime 1.32.0"; "" if they were not."""

    @property
    @abc.abstractmethod
    def inputs(self) -> tuple[Port, ...]: ...

    @property
    @abc.abstractmethod
    def outputs(self) -> tuple[Port, ...]: ...

    @property
    def dimensions(self) -> dict[str, Size]:
        """The sizes that callers choose with their inputs, by name; none of a network of fixed sizes."""
        return {name: size for port in self.inputs for name, size in port.sizes.items()}

    @property
    @abc.abstractmethod
    def steps(self) -> tuple[Step, ...]:
        """The kernel calls in the order in which they run. Raises UsageError if they depend on the size: see `at`."""

    @property
    @abc.abstractmethod
    def kernels(self) -> tuple[Origin, ...]:
        """Where the kernels come from; of a network with a program for each size, those of the largest."""

    @property
    @abc.abstractmethod
    def summary(self) -> str:
        """What it consists of, in a few words."""

    @abc.abstractmethod
    def explain(self) -> str:
        """The plan in words: its calls with their kernels, and what they cost."""

    # ---- running

    @abc.abstractmethod
    def __call__(self, *args: Any, stream: Any = None, **named: Any) -> Any:
        """Computes the outputs.

        Args:
            args, named: the inputs in order, or by name.
            stream: a CUDA stream: an integer handle, or a torch or CuPy stream; default: the library's current one.

        Raises:
            ArgumentError: an input is missing or unknown, or has a wrong dtype, shape, strides or device.
            SizeError: computed sizes are impossible, or exceed their bounds.
            IndexRangeError: on a CPU: an index of a gather or scatter is out of range. On a GPU `check` says so.
            DeviceError: the launch failed.
        """

    @abc.abstractmethod
    def bind(self, *args: object, **named: object) -> BoundCall:
        """Fixes the arrays once, so that a run copies nothing; on a GPU it captures a graph on their addresses.

        Raises:
            ArgumentError: as a call does; or an array is not on the network's device, or an address lacks an alignment that
                a kernel needs.
        """

    @abc.abstractmethod
    def check(self) -> None:
        """Waits for all calls, and looks whether they could compute what was asked.

        Raises:
            IndexRangeError: an index was out of range since the last check. The message names node, index, its place, and
                what is allowed.
            SizeError: of a bounded call: sizes were impossible, or exceeded their bounds.
        """

    @abc.abstractmethod
    def evaluate(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs for arrays in the host's memory, by name: NumPy arrays with exactly the shapes that the inputs lead
        to. It copies and waits, and raises what calls and `check` raise."""

    # ---- looking inside

    def at(self, size: int | Mapping[str, int]) -> Net:
        """The network at a size of its dimension, or at some by name: one that `steps`, `trace` and `measure` are of. It is
        closed with this one, and may be this one. Sizes that are not named are the largest.

        Raises:
            ArgumentError: there is no such dimension, or the size is outside of its limits.
        """
        self._chosen(size)
        return self

    def _chosen(self, size: int | Mapping[str, int]) -> dict[str, int]:
        known = self.dimensions
        if isinstance(size, int):
            if len(known) != 1:
                raise ArgumentError(f"at({size}) is for networks of one open dimension; this one has {_listed(known)}")
            size = dict.fromkeys(known, size)
        for name, n in size.items():
            if name not in known:
                raise ArgumentError(f"no size {name!r}{did_you_mean(name, known)}; allowed: {_listed(known)}")
            if not known[name].least <= n <= known[name].most:
                raise ArgumentError(f"{name} is {n}; the network was built for {known[name].least} to {known[name].most}")
        return {each.name: size.get(each.name, each.most) for each in known.values()}

    @abc.abstractmethod
    def index_limits(self, sizes: Mapping[str, int] | None = None) -> dict[str, int]:
        """Input that a call reads as indices -> what these must be less than, as far as it follows from the sizes."""

    @abc.abstractmethod
    def trace(self, *args: object, **named: object) -> dict[str, Array]:
        """The values that the calls compute, by name, in the model's order of axes: NumPy arrays that hold their numbers
        exactly. Values inside a fused call do not exist, and those whose sizes are known in the run only are left out."""

    @abc.abstractmethod
    def measure(self, repeat: int = 100, inputs: Mapping[str, Array] | None = None) -> Times:
        """The time of the whole and of each call.

        Args:
            repeat: the number of runs.
            inputs: arrays in the host's memory by name; default: those of the last such call, or zeros.

        Raises:
            UsageError: `repeat` is not an integer of at least 1; or sizes are computed, and no inputs are given.
        """

    # ---- its end

    @abc.abstractmethod
    def mark_checked(self, by: str) -> None:
        """Notes what computed the model that the results were compared with; see `checked`."""

    @abc.abstractmethod
    def save(self, path: Any) -> None:
        """Writes the executable to a file, signed by this machine; see `schedsearch.load`.

        Raises:
            UsageError: there is a file that is not an executable; it stays.
            DatabaseError: it cannot be written, or the file that the net was loaded from cannot be read.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Waits for the calls and frees memory, code and device. Does nothing the second time."""

    def __repr__(self) -> str:
        ports = ", ".join(map(str, self.inputs)), ", ".join(map(str, self.outputs))
        return f"<Net {self.model or 'without a file'} on {self.device[0]}:{self.device[1]}: {ports[0]} -> {ports[1]}>"


def check_repeat(repeat: object) -> None:
    """Raises UsageError if a number of runs is not an integer of at least 1."""
    if not isinstance(repeat, int) or repeat < 1:
        raise UsageError(f"repeat {repeat!r} is not possible; allowed: an integer, 1 or more")


def _listed(sizes: Mapping[str, Size]) -> str:
    return ", ".join(map(str, sizes.values())) or "none"
