"""A network as calls of machine code on addresses: what a file of an executable holds, apart from code and weights.

Everything here is data that JSON can hold. Nothing in it needs the network, the plan or the records that it was made from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from schedsearch.executable.memory import stacked
from schedsearch.fields import FieldError, read
from schedsearch.identity import canonical_json, sha256_hex
from schedsearch.launch import Artifact
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.text import type_text
from schedsearch.typed import JsonObject

DYNAMIC = "dynamic"  # the "kind" in the strings of files that hold more than one program: of dynamic graphs,
SIZED = "sizes"  # and of networks for several sizes
ARENA = "arena"  # the workspace of a call with programs of its own
STATE = "state"  # that of a loop: see `Control.addresses`
IF, LOOP = "If", "Loop"  # what stands for a kernel there
CONDITION = "x0"  # of an If
CARRIED = 2  # the number of the first array that a loop carries, behind the number of turns and the condition
_TURN_BYTES = 8
_SEAL = "check"  # the field of the checksum
Space = Literal["arena", "input", "output", "constant", "once"]
"""Where an array is: in the memory that arrays of one run share; in the caller's memory; among the constants, which are
copied to the device when the executable is loaded; or among those constants that only steps which run once at load read."""


@dataclass(frozen=True)
class Place:
    """An address that is known when the executable is loaded.

    Attributes:
        space: the memory.
        offset: bytes from its beginning.
        number: of the input or output; 0 in the other spaces.
    """

    space: Space
    offset: int = 0
    number: int = 0


@dataclass(frozen=True)
class Array:
    """A value or constant of the network in memory.

    Attributes:
        name: of the value or constant.
        layout: in the letters of the value's axes, e.g. NHWC.
        axes: of the value in the model's order, e.g. NCHW.
        shape: the extents of `axes`, without the padding of blocks.
        dtype: by our names.
        stored: the shape in memory.
    """

    name: str
    layout: str
    axes: str
    shape: tuple[int, ...]
    dtype: str
    stored: tuple[int, ...]
    place: Place

    @property
    def nbytes(self) -> int:
        return math.prod(self.stored) * dtype_of(self.dtype).nbytes


RECORDED = ("exact", "other_mode", "shipped")
"""The levels of records of exactly a workload on exactly a kind of device, in any mode of timing."""


@dataclass(frozen=True)
class Origin:
    """Where a kernel comes from; see `schedsearch.runtime.Provenance`."""

    rung: str  # files have this name for the fallback level
    template: str
    config: str
    time_ns: float | None = None
    record_id: int | None = None

    @property
    def level(self) -> str:
        """The fallback level: exact, other_mode, same_architecture, ..., default; or what else."""
        return self.rung


@dataclass(frozen=True)
class ChosenKernel:
    """The kernel that serves a workload."""

    artifact: Artifact
    origin: Origin


@dataclass(frozen=True)
class Foreign:
    """What ONNX Runtime computes in one call, because no kernel does.

    Attributes:
        nbytes: of the ONNX model, whose sha256 is the call's `artifact`.
        reasons: for each source its operator, and why it has no kernel.
    """

    nbytes: int
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Impossible:
    """A program that cannot be. A call that comes to it fails.

    Attributes:
        reason: why, for people.
    """

    reason: str


@dataclass(frozen=True)
class Control:
    """Programs that a call runs because of numbers that the host reads when it comes to it. They share one memory, the
    workspace `arena`.

    Attributes:
        bodies: of an If, for a condition that is true, and for one that is false: inputs are the arguments behind the
            first, outputs those of the call. Of a Loop, one, whose inputs are the number of the turn, a true condition, what
            is carried, and the arguments behind that; outputs are the condition and what is carried. The call has the most
            turns, the first condition, and what is carried first, as its first arguments.
    """

    bodies: tuple[Program | Impossible, ...]
    kind: Literal["If", "Loop"] = "If"

    @property
    def programs(self) -> tuple[Program, ...]:
        """The bodies that can run."""
        return tuple(body for body in self.bodies if isinstance(body, Program))

    @property
    def arena_bytes(self) -> int:
        return max((body.arena_bytes for body in self.programs), default=0)

    @property
    def carried_bytes(self) -> list[int]:
        """Of each array that a Loop carries from turn to turn."""
        (body,) = self.programs
        return [body.arrays[index].nbytes for index in body.outputs[1:]]

    def addresses(self, base: int) -> list[int]:
        """Of a Loop in its workspace `state`: the number of the turn, a true condition, that of the body, and what is
        carried, twice."""
        return [base + offset for offset in self._state[0]]

    @property
    def workspaces(self) -> dict[str, int]:
        """Name -> bytes."""
        return {ARENA: self.arena_bytes} | ({STATE: self._state[1]} if self.kind == LOOP else {})

    @property
    def _state(self) -> tuple[list[int], int]:
        return stacked([_TURN_BYTES, 1, 1, *self.carried_bytes, *self.carried_bytes])


@dataclass(frozen=True)
class Call:
    """One kernel call, one of ONNX Runtime, or one of a program inside of this one.

    Attributes:
        name: of the node; of a conversion, the value with both layouts.
        sources: nodes of the model that it stands for; none for a conversion.
        workload: JSON of what it computes; "" unless it is of a kernel.
        label: describes the workload in messages.
        artifact: sha256 of the machine code with its launch plan, or of an ONNX model; "" with `control`.
        buffers: argument or output -> index of an array.
        outputs: names among `buffers` that it writes.
        workspaces: name -> place of scratch memory. Those among the constants are written once at load.
        scalars: values of the call-time scalars.
        offsets: output of which the call writes a slice -> bytes from the array's beginning to the slice's.
        foreign: of a call of ONNX Runtime. Its inputs are x0, x1 ..., its outputs y0, y1 ..., in the order of its model.
        control: of a call of a program inside. Its arguments and outputs are named in the same way; see `Control`.
    """

    name: str
    sources: tuple[str, ...]
    workload: str
    label: str
    artifact: str
    buffers: Mapping[str, int]
    outputs: tuple[str, ...]
    workspaces: Mapping[str, Place]
    scalars: Mapping[str, float]
    origin: Origin
    offsets: Mapping[str, int] = field(default_factory=dict)
    foreign: Foreign | None = None
    control: Control | None = None

    @property
    def is_kernel(self) -> bool:
        return self.foreign is None and self.control is None

    @property
    def is_conversion(self) -> bool:
        return not self.sources


@dataclass(frozen=True)
class Reference:
    """Where a weight lies that an executable does not hold itself.

    Attributes:
        path: of the file, relative to the executable's folder.
        offset: bytes from its beginning.
        axes: of the array there, in its order.
        dtype: of the array there, by our names.
    """

    path: str
    offset: int
    axes: str
    dtype: str


@dataclass(frozen=True)
class Program:
    """All calls of an executable in order.

    Attributes:
        target: key of the kind of device that it runs on.
        model: name of the model's file, or "".
        arrays: every array; calls refer to them by index.
        inputs, outputs: indices of the network's inputs and outputs, in order.
        constants: indices of the constants, in the order in which a file keeps their bytes.
        calls: in the order in which they run.
        copies: pairs of arrays (from, to) that are copied in the end: an output that is another output or an input as well.
        arena_bytes: memory that one run needs, apart from inputs, outputs and constants.
        least_arena_bytes: no placement of the same arrays needs less.
        constant_bytes: memory of the constants and of what is computed from them at load.
        predicted_ns: of the plan; 0 if there is no prediction.
        reasons: lines that explain the plan.
        weights: sha256 of the bytes of each of `constants`.
        references: one of `weights` -> its place, if it lies outside of the executable's file.
        checked: what computed the model that the results were compared with, e.g. "ONNX Runtime 1.32.0"; "" if they were
            not, or an older version wrote the file.
    """

    target: str
    model: str
    arrays: tuple[Array, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: tuple[int, ...]
    calls: tuple[Call, ...]
    copies: tuple[tuple[int, int], ...]
    arena_bytes: int
    least_arena_bytes: int
    constant_bytes: int
    predicted_ns: float = 0.0
    reasons: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    references: Mapping[str, Reference] = field(default_factory=dict)
    checked: str = ""

    @property
    def all_calls(self) -> Iterator[Call]:
        """Its calls, each followed by those of the programs inside of it."""
        for call in self.calls:
            yield call
            for body in () if call.control is None else call.control.programs:
                yield from body.all_calls

    @property
    def json(self) -> str:
        return canonical_json(asdict(self))

    @property
    def id(self) -> str:
        """sha256 of everything: code and weights take part by their own digests."""
        return sha256_hex(self.json)

    @classmethod
    def from_json(cls, text: str) -> Program:
        """Inverse of `json`. Raises FieldError if a field is unknown, missing or of another type; see also `check`."""
        return read(cls, json.loads(text))


def seal(text: str) -> str:
    """The JSON text of a program of any kind with its own checksum: what a file keeps."""
    data = json.loads(text)
    return canonical_json({**data, _SEAL: sha256_hex(canonical_json(data))})


def unseal(text: str, *, required: bool) -> JsonObject:
    """Inverse of `seal`: the object that the text is of.

    Args:
        required: whether it must have a checksum. Files until version 4 have none.

    Raises:
        FieldError: the text is not JSON, or not what was sealed.
    """
    try:
        data = json.loads(text, object_pairs_hook=_distinct)
    except FieldError:
        raise
    except (ValueError, RecursionError) as error:
        raise FieldError(f"it is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise FieldError(f"it is {type_text(data)}; allowed: an object")
    found = data.pop(_SEAL, None)
    if (required or found is not None) and found != sha256_hex(canonical_json(data)):
        raise FieldError("it does not match its checksum, so it was changed after it was built")
    return data


def _distinct(pairs: list[tuple[str, Any]]) -> JsonObject:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise FieldError("a field occurs twice")
    return data
