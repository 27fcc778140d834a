"""Networks of which callers choose one size, such as the batch: a table from size to kernels in one executable.

The programs of all sizes are one JSON object with a formula or a list for each number that differs
(`launch_sizes.SizedData`), or a few such objects. Machine code that serves several sizes is kept once, with the launch plans
of all its sizes. Weights are kept once. On the device all sizes share them and the memory in which they compute.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from schedsearch.device import Device
from schedsearch.errors import ArgumentError, DatabaseError, PlanError, UsageError
from schedsearch.executable import references
from schedsearch.executable.bound import Bound
from schedsearch.executable.check import LARGEST_BYTES, check, readable, require
from schedsearch.executable.fixed import FixedNet
from schedsearch.executable.net import Net, Times
from schedsearch.executable.ports import Port, Size
from schedsearch.executable.program import SIZED, Call, Origin, Program, Reference, seal
from schedsearch.executable.run import Bundle
from schedsearch.executable.shared import Shared
from schedsearch.fields import check_object
from schedsearch.identity import canonical_json, sha256_hex
from schedsearch.launch import Artifact
from schedsearch.launch_sizes import SizedData, SizedPlan, ranges_text
from schedsearch.ops import ArgSpec
from schedsearch.records import executables
from schedsearch.runtime import arrays
from schedsearch.text import counted, quoted
from schedsearch.typed import Array
from schedsearch.workload import MAX_SIZES


@dataclass(frozen=True)
class SizedCode:
    """Machine code for several sizes, with the plan of each."""

    code: bytes
    plan: SizedPlan

    @property
    def sha256(self) -> str:
        return sha256_hex(self.plan.to_json().encode() + b"\0" + self.code)


class SizedBundle(Protocol):
    """What an executable of several sizes consists of: as built, or in a file."""

    @property
    def table(self) -> SizedPrograms: ...

    @property
    def place(self) -> str:
        """What the bundle is of, for messages."""
        ...

    def codes(self, sha256s: Iterable[str]) -> Mapping[str, SizedCode]:
        """The machine code with these digests. Raises DatabaseError if some is missing or damaged."""
        ...

    def weight(self, program: Program, number: int) -> memoryview:
        """The bytes of a program's weight of this number. Raises DatabaseError if they are missing or damaged."""
        ...

    def save(self, path: str | os.PathLike[str], checked: str) -> None:
        """Writes a file, signed by this machine; as `Net.save`. `checked` is as of a `Program`."""
        ...


@dataclass(frozen=True)
class SizedPrograms:
    """The programs of all sizes. A call's `artifact` is the digest of a `SizedCode`.

    Attributes:
        target, model: as of a `Program`.
        name: of the dimension.
        low, high: the sizes.
        programs: each for some of the sizes.
        arena_bytes: that the largest program needs.
        checked: as of a `Program`.
    """

    target: str
    model: str
    name: str
    low: int
    high: int
    programs: tuple[SizedData, ...]
    arena_bytes: int
    checked: str = ""

    @property
    def sizes(self) -> range:
        return range(self.low, self.high + 1)

    def at(self, size: int) -> Program:
        """The program of a size. Raises PlanError if the table has none, and FieldError if it is not a program."""
        found = next((each for each in self.programs if size in each.sizes), None)
        if found is None:
            raise PlanError(f"there is no program for {self.name} = {size}")
        return replace(Program.from_json(canonical_json(found.data(size))), checked=self.checked)

    @property
    def json(self) -> str:
        return canonical_json(
            {
                "kind": SIZED, "target": self.target, "model": self.model, "name": self.name, "low": self.low,
                "high": self.high, "arena_bytes": self.arena_bytes, "checked": self.checked,
                "programs": [json.loads(each.to_json()) for each in self.programs],
            }
        )  # fmt: skip

    @classmethod
    def from_json(cls, text: str) -> SizedPrograms:
        """Inverse of `json`.

        Raises:
            FieldError: a field is unknown, missing or of another type.
            ProgramError: the programs are not for the sizes of the range.
            PlanError: a formula is not possible.
        """
        data = json.loads(text)
        numbers = dict.fromkeys(("low", "high", "arena_bytes"), int)
        check_object(
            data, {**dict.fromkeys(("kind", "target", "model", "name"), str), **numbers, "programs": list}, {"checked": str}
        )
        programs = tuple(SizedData.from_json(canonical_json(each)) for each in data["programs"])
        low, high, sizes = data["low"], data["high"], sorted(size for each in programs for size in each.sizes)
        require(
            0 < high - low < MAX_SIZES and sizes == list(range(low, high + 1)), f"there are not programs for {low} to {high}"
        )
        require(0 <= data["arena_bytes"] <= LARGEST_BYTES, f"arena_bytes is {quoted(data['arena_bytes'])}")
        return cls(
            data["target"], data["model"], data["name"], data["low"], data["high"], programs, data["arena_bytes"],
            data.get("checked", ""),
        )  # fmt: skip


@dataclass(frozen=True)
class BuiltBundle:
    """What was just built.

    Attributes:
        made, weights: by their digests.
        references: digest of a weight -> where it lies outside of the file that `save` writes.
    """

    table: SizedPrograms
    made: Mapping[str, SizedCode]
    weights: Mapping[str, memoryview]
    references: Mapping[str, Reference] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return self.table.model or "the network"

    def codes(self, sha256s: Iterable[str]) -> Mapping[str, SizedCode]:
        return {sha256: self.made[sha256] for sha256 in sha256s}

    def weight(self, program: Program, number: int) -> memoryview:
        return self.weights[program.weights[number]]

    def save(self, path: str | os.PathLike[str], checked: str) -> None:
        code = [(sha256, each.plan.to_json(), each.code) for sha256, each in self.made.items()]
        held = ((sha256, data) for sha256, data in self.weights.items() if sha256 not in self.references)
        executables.write(Path(path), self.table.target, seal(replace(self.table, checked=checked).json), code, held)


class StoredBundle:
    """The bundle in a file of which the program's text was read, and is trusted."""

    def __init__(self, path: Path, text: str) -> None:
        """Raises DatabaseError if the text is damaged."""
        self.path = path
        try:
            self.table = SizedPrograms.from_json(text)
        except PlanError as error:
            raise DatabaseError(f"{path}: {error}; build the model again") from error

    @property
    def place(self) -> str:
        return str(self.path)

    def codes(self, sha256s: Iterable[str]) -> Mapping[str, SizedCode]:
        with executables.ExecutableFile(self.path) as file:
            found = {}
            for sha256 in sha256s:
                plan, code = file.code(sha256)
                try:
                    found[sha256] = SizedCode(code, SizedPlan.from_json(plan))
                except PlanError as error:
                    raise DatabaseError(f"{self.path}: a launch plan cannot be used: {error}; build it again") from error
            return found

    def weight(self, program: Program, number: int) -> memoryview:
        sha256, array = program.weights[number], program.arrays[program.constants[number]]
        if (reference := program.references.get(sha256)) is not None:
            return memoryview(references.read(reference, array, sha256, self.path))
        with executables.ExecutableFile(self.path) as file:
            return memoryview(file.weight(sha256, array.nbytes))

    def save(self, path: str | os.PathLike[str], checked: str) -> None:
        """As `Net.save`. Weights that lie in the model's file stay there. Raises UsageError if it is in another folder."""
        numbers: dict[str, tuple[Program, int]] = {}  # digest of a weight -> a program that has it, and where
        codes: dict[str, None] = {}
        for size in self.table.sizes:
            program = self.table.at(size)
            if program.references and Path(path).absolute().parent != self.path.absolute().parent:
                raise UsageError(f"weights of {self.path} lie in a model's file beside it; save into the same folder")
            codes |= dict.fromkeys(call.artifact for call in program.calls)
            kept = ((sha256, number) for number, sha256 in enumerate(program.weights) if sha256 not in program.references)
            numbers |= {sha256: (program, number) for sha256, number in kept if sha256 not in numbers}
        code = [(sha256, each.plan.to_json(), each.code) for sha256, each in self.codes(codes).items()]
        weights = ((sha256, self.weight(*place)) for sha256, place in numbers.items())
        table = replace(self.table, checked=checked)
        executables.write(Path(path), table.target, seal(table.json), code, weights)


class _AtSize:
    """The bundle of one size, for `Net`."""

    def __init__(self, bundle: SizedBundle, size: int) -> None:
        """Raises DatabaseError if it is not a program that can run."""
        self._bundle, self._size = bundle, size
        try:
            with readable(bundle.place):
                self.program = bundle.table.at(size)
                check(self.program, {sha256: each.plan for sha256, each in self.artifacts.items()})
                arena_bytes = self.program.arena_bytes
                require(arena_bytes <= bundle.table.arena_bytes, f"size {size} needs {arena_bytes} bytes, which is too much")
        except PlanError as error:
            raise DatabaseError(f"{bundle.place}: {error}; build the model again") from error

    @functools.cached_property
    def artifacts(self) -> Mapping[str, Artifact]:
        codes = self._bundle.codes(dict.fromkeys(call.artifact for call in self.program.calls))
        try:
            return {sha256: Artifact(each.code, each.plan.at(self._size)) for sha256, each in codes.items()}
        except PlanError as error:
            raise DatabaseError(f"a launch plan cannot be used: {error}; build the model again") from error

    @property
    def models(self) -> Mapping[str, bytes]:
        return {}

    @property
    def references(self) -> Mapping[str, Reference]:
        return {}

    @property
    def weights(self) -> Sequence[memoryview]:
        return _WeightsOf(self._bundle, self.program)

    def bodies(self, number: int) -> Sequence[Bundle]:
        """None: a table of sizes has no branches; see `build_sized.read_sized`."""
        return ()


class _WeightsOf(Sequence[memoryview]):
    def __init__(self, bundle: SizedBundle, program: Program) -> None:
        self._bundle, self._program = bundle, program

    def __len__(self) -> int:
        return len(self._program.weights)

    def __getitem__(self, number: Any) -> Any:
        return self._bundle.weight(self._program, range(len(self))[number])


class SizedNet(Net):
    """A `Net` for each size of one dimension. It takes the device over: `close` closes it.

    Calls, arguments, outputs and errors are those of `FixedNet`. The first call of a size loads its kernels; later ones find
    them by the shape of an input. All sizes share the weights, and the memory in which they compute: do not run it on two
    streams at once. Calls may come from any thread; a lock serialises them.

    Attributes:
        name: of the dimension that callers choose.
        sizes: the sizes.

    Examples:
        >>> net = schedsearch.load("resnet50.ssx")  # built with --dynamic n=1..64
        >>> y = net(x)  # of 1 to 64 images
    """

    def __init__(self, bundle: SizedBundle, device: Device) -> None:
        """Raises DeviceError if the device has too little memory; the device is closed then."""
        self.bundle, self._device = bundle, device
        self.name, self.sizes = bundle.table.name, bundle.table.sizes
        self.device = (device.target.kind, device.target.ordinal if device.target.kind == "cuda" else 0)
        self._lock = threading.Lock()
        self._closed, self._checked = False, bundle.table.checked
        self._nets: dict[int, FixedNet] = {}
        self._by_shape: dict[tuple[int, ...], FixedNet] = {}
        try:
            ends = [_AtSize(bundle, size).program for size in (self.sizes[0], self.sizes[-1])]
            with readable(bundle.place):
                self._check_ports(ends)
            self._shared = Shared(device, bundle.table.arena_bytes)
        except BaseException:
            device.close()
            raise
        self._inputs = self._ports(ends, [program.inputs for program in ends])
        self._outputs = self._ports(ends, [program.outputs for program in ends])
        self._position = next(number for number, port in enumerate(self._inputs) if port.sizes)
        self._sizes_of = self._shapes()

    @property
    def model(self) -> str:
        return self.bundle.table.model

    @property
    def target(self) -> str:
        return self.bundle.table.target

    @property
    def checked(self) -> str:
        return self._checked

    @property
    def inputs(self) -> tuple[Port, ...]:
        return self._inputs

    @property
    def outputs(self) -> tuple[Port, ...]:
        return self._outputs

    @property
    def steps(self) -> tuple[Call, ...]:
        raise UsageError(f"the calls depend on {self.name}; those of one size are net.at({self.name}).steps")

    @property
    def kernels(self) -> tuple[Origin, ...]:
        return tuple(call.origin for call in self.bundle.table.at(self.sizes[-1]).calls)

    @property
    def summary(self) -> str:
        return "a table of kernels"

    def __call__(self, *args: Any, out: Any = None, stream: Any = None, **named: Any) -> Any:
        """Computes the outputs; as `FixedNet.__call__`.

        Raises:
            ArgumentError: as there, or the size is outside of the range.
            DeviceError: the launch failed, or the code cannot be loaded.
        """
        try:
            net = self._by_shape[args[self._position].shape]
        except (LookupError, TypeError, AttributeError):
            net = self._net_for(args, named)
        with self._lock:
            return net(*args, out=out, stream=stream, **named)

    def at(self, size: int | Mapping[str, int]) -> FixedNet:
        """The network of one size; loads it the first time. It is closed with this one.

        Raises:
            ArgumentError: the size is outside of the range.
            DatabaseError: the file is damaged.
            DeviceError: the device refuses the code, or has too little memory.
        """
        size = self._chosen(size)[self.name]
        with self._lock:
            if self._closed:
                raise UsageError("the net was closed; load it again")
            if size not in self._nets:
                self._nets[size] = FixedNet(_AtSize(self.bundle, size), self._device, self._shared)
                self._nets[size].mark_checked(self._checked)
            return self._nets[size]

    def bind(self, *args: object, **named: object) -> Bound:
        return self._net_for(args, named).bind(*args, **named)

    def trace(self, *args: object, **named: object) -> dict[str, Array]:
        return self._net_for(args, named).trace(*args, **named)

    def evaluate(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._net_for((), inputs).evaluate(inputs)

    def measure(self, repeat: int = 100, inputs: Mapping[str, Array] | None = None) -> Times:
        """As `Net.measure`, at the size of the inputs, by default the largest."""
        net = self.at({}) if inputs is None else self._net_for((), inputs)
        return net.measure(repeat, inputs)

    def index_limits(self, sizes: Mapping[str, int] | None = None) -> dict[str, int]:
        return self.at(sizes or {}).index_limits()

    def check(self) -> None:
        """As `Net.check`, for the calls of all sizes."""
        with self._lock:
            for net in self._nets.values():
                net.check()

    def explain(self, size: int | None = None) -> str:
        """The kernels of each stretch of sizes, and the calls of one size, by default the largest."""
        table = self.bundle.table
        chosen = size or self.sizes[-1]
        lines = [f"{table.model or 'network'} on {table.target}: a table of kernels for {self.name} = {self._limits}"]
        for each in table.programs:
            calls, differing = counted(len(each.base["calls"]), "call"), counted(len(each.rules), "number")
            lines.append(f"  {self.name} = {ranges_text(each.sizes)}: {calls}; {differing} or names depend on {self.name}")
        lines.append("  a call copies nothing to the host to learn a size, and waits for nothing")
        lines.append(f"at {self.name} = {chosen}:")
        return "\n".join([*lines, self.at(chosen).explain()])

    def mark_checked(self, by: str) -> None:
        with self._lock:
            self._checked = by
            for net in self._nets.values():
                net.mark_checked(by)

    def save(self, path: Any) -> None:
        self.bundle.save(path, self._checked)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._by_shape = {}
            for net in self._nets.values():
                net.close()
            self._nets = {}
            self._shared.close()
            self._device.close()

    @property
    def _limits(self) -> str:
        return f"{self.sizes[0]} to {self.sizes[-1]}"

    def _check_ports(self, ends: Sequence[Program]) -> None:
        """Raises ProgramError if the smallest and the largest size do not have the same ports, or do not differ in one."""
        first, last = (
            [[each.arrays[index] for index in indices] for indices in (each.inputs, each.outputs)] for each in ends
        )
        same = [
            [
                (one.name, one.dtype, len(one.stored)) == (other.name, other.dtype, len(other.stored))
                for one, other in zip(*pair)
            ]
            for pair in zip(first, last)
        ]
        require(
            all(len(one) == len(other) for one, other in zip(first, last)) and all(map(all, same)),
            "its sizes have different inputs or outputs",
        )
        differ = any(one.stored != other.stored for one, other in zip(first[0], last[0]))
        require(differ, f"no input depends on {quoted(self.name)}")

    def _ports(self, ends: Sequence[Program], indices: Sequence[Sequence[int]]) -> tuple[Port, ...]:
        """Inputs or outputs, by the programs of the smallest and of the largest size."""
        found, size = [], Size(self.name, self.sizes[0], self.sizes[-1])
        for one, other in zip(*indices):
            first, last = ends[0].arrays[one], ends[1].arrays[other]
            shape = tuple(n if m == n else size for m, n in zip(first.stored, last.stored))
            found.append(Port(last.name, shape, last.dtype, last.layout, last.axes))
        return tuple(found)

    def _shapes(self) -> dict[tuple[int, ...], int]:
        """Shape of the input that shows the size -> size."""
        port, found = self.inputs[self._position], {}
        for size in reversed(self.sizes):
            shape = port.at({self.name: size}).bound
            for form in arrays.forms(ArgSpec(port.name, port.layout, shape, port.dtype)):
                found[tuple(form.shape)] = size
        return found

    def _net_for(self, args: tuple[object, ...], named: Mapping[str, object]) -> FixedNet:
        port = self.inputs[self._position]
        if len(args) > self._position:
            array = args[self._position]
        elif port.name in named:
            array = named[port.name]
        else:
            raise ArgumentError(f"missing {port.name}; the network takes {', '.join(map(str, self.inputs))}")
        shape = arrays.view(array, port.name).shape
        if (size := self._sizes_of.get(shape)) is None:
            raise ArgumentError(
                f"{port.name} has shape {list(shape)}; allowed: {port.extents}; build a wider range, or check the "
                "other extents"
            )
        net = self._by_shape[shape] = self.at(size)
        return net
