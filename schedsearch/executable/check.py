"""What every program of a network obeys, whoever signed it: checked when it comes from a file, before anything is loaded.

A program tells machine code which addresses to use. So every array lies within its memory, every call gets the arrays that
its workload and its launch plan describe, and every array is written before it is read, in the order of the calls.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from schedsearch.errors import DatabaseError, SchemaVersionError, UnknownOperatorError, UsageError
from schedsearch.executable.memory import ALIGNMENT, rounded_up
from schedsearch.executable.program import CARRIED, LOOP, Array, Call, Control, Place, Program
from schedsearch.executable.written import Written
from schedsearch.fields import FieldError
from schedsearch.launch import LaunchPlan
from schedsearch.ops import ArgSpec, Layout
from schedsearch.ops.dtypes import DTYPES
from schedsearch.text import quoted
from schedsearch.workload import Workload

_SHA256 = re.compile(r"[0-9a-f]{64}")
_BODIES = {"If": 2, "Loop": 1}  # how many programs a call has inside
_KEPT = ("constant", "once")  # spaces that are filled when the executable is loaded
LARGEST_BYTES = 1 << 48  # bytes; no device has so much memory
_Specs = dict[str, ArgSpec | None]  # of the arguments or outputs of a call; None: of what is no kernel


class ProgramError(ValueError):
    """A program that no builder makes. The text names the place."""


def check(program: Program, plans: Mapping[str, LaunchPlan]) -> None:
    """Checks a program whose fields have their types.

    Args:
        plans: sha256 of machine code -> its launch plan.

    Raises:
        ProgramError: it breaks a rule.
        UnknownOperatorError: a workload is of an operator that is not installed.
    """
    _check_arrays(program)
    _check_ports(program)
    _check_constants(program)
    _Walk(program, plans).run()


def require(condition: bool, what: str) -> None:
    """Raises ProgramError with `what` unless the condition holds."""
    if not condition:
        raise ProgramError(what)


def _check_arrays(program: Program) -> None:
    for what in ("arena_bytes", "least_arena_bytes", "constant_bytes"):
        size = getattr(program, what)
        require(0 <= size <= LARGEST_BYTES, f"{what} is {quoted(size)}; allowed: 0 to {LARGEST_BYTES}")
    limits = {"arena": program.arena_bytes, "constant": program.constant_bytes, "once": LARGEST_BYTES}
    for number, array in enumerate(program.arrays):
        where = f"array {number} ({quoted(array.name)})"
        require(array.dtype in DTYPES, f"{where} has the dtype {quoted(array.dtype)}; allowed: {', '.join(DTYPES)}")
        require(all(0 <= n <= LARGEST_BYTES for n in array.shape), f"{where} has the shape {quoted(array.shape)}")
        require(
            array.stored == _stored(array, where) and math.prod(array.stored) <= LARGEST_BYTES,
            f"{where} is stored as {quoted(array.stored)}, which is not {array.layout} of {quoted(array.shape)}",
        )
        place = array.place
        if place.space in limits:
            require(
                place.number == 0 and place.offset % ALIGNMENT == 0, f"{where} is at {_text(place)}, which is not aligned"
            )
            require(
                place.offset >= 0 and place.offset + array.nbytes <= limits[place.space],
                f"{where} of {array.nbytes} bytes is at {_text(place)}, outside of the {limits[place.space]} bytes there",
            )
        else:
            ports = program.inputs if place.space == "input" else program.outputs
            require(
                place.offset == 0 and 0 <= place.number < len(ports), f"{where} is at {_text(place)}; there is no such port"
            )


def _stored(array: Array, where: str) -> tuple[int, ...]:
    try:
        layout = Layout.parse(array.layout) if array.layout else None
    except UsageError as error:
        raise ProgramError(f"{where}: {error}") from error
    axes = layout.axes if layout else ""
    require(
        sorted(array.axes) == sorted(axes) and len(array.axes) == len(array.shape),
        f"{where} has the axes {quoted(array.axes)}, the layout {quoted(array.layout)} and the shape {quoted(array.shape)}",
    )
    return layout.shape(dict(zip(array.axes, array.shape))) if layout else ()


def _check_ports(program: Program) -> None:
    for space, indices in (("input", program.inputs), ("output", program.outputs)):
        for number, index in enumerate(indices):
            _check_index(program, index, f"{space} {number}")
            place = program.arrays[index].place
            require(
                (place.space, place.number) == (space, number),
                f"{space} {number} is array {index}, which is at {_text(place)}",
            )
    for array in program.arrays:
        if array.place.space in ("input", "output"):
            ports = program.inputs if array.place.space == "input" else program.outputs
            most = program.arrays[ports[array.place.number]].nbytes
            require(array.nbytes <= most, f"{quoted(array.name)} has {array.nbytes} bytes in a port of {most}")
    for source, to in program.copies:
        _check_index(program, source, "a copy")
        _check_index(program, to, "a copy")
        one, other = program.arrays[source], program.arrays[to]
        require(
            other.place.space == "output" and one.place.space != "once" and one.nbytes == other.nbytes,
            f"a copy goes from array {source} of {one.nbytes} bytes to array {to} of {other.nbytes} at {_text(other.place)}",
        )


def _check_index(program: Program, index: int, what: str) -> None:
    count = len(program.arrays)
    require(0 <= index < count, f"{what} is array {quoted(index)}; there are arrays 0 to {count - 1}")


def _check_constants(program: Program) -> None:
    require(
        len(program.weights) == len(program.constants) == len(set(program.constants)),
        f"{len(program.constants)} constants with {len(program.weights)} weights; allowed: one weight for each",
    )
    for index in program.constants:
        _check_index(program, index, "a constant")
    for sha256 in program.weights:
        require(bool(_SHA256.fullmatch(sha256)), f"a weight is {quoted(sha256)}; allowed: a sha256")
    kept = {number for number, array in enumerate(program.arrays) if array.place.space in _KEPT}
    require(kept == set(program.constants), "the constants are not the arrays in the memory of constants")
    for sha256, reference in program.references.items():
        arrays = [program.arrays[i] for i, weight in zip(program.constants, program.weights) if weight == sha256]
        require(
            bool(arrays) and reference.offset >= 0 and reference.dtype in DTYPES and "\0" not in reference.path
            and all(sorted(reference.axes) == sorted(array.axes) for array in arrays),
            f"the reference of weight {quoted(sha256)[:16]} is not possible",
        )  # fmt: skip


class _Stretch(NamedTuple):
    """Bytes of one memory that a call uses."""

    memory: tuple[str, int]
    start: int
    end: int

    def meets(self, other: _Stretch) -> bool:
        return self.memory == other.memory and self.start < other.end and other.start < self.end


class _Parts:
    """The slices of an array that were written: parts of each row of so many bytes."""

    def __init__(self, row: int) -> None:
        self.row = row
        self._runs: dict[int, int] = {}  # start -> bytes

    def add(self, start: int, run: int) -> None:
        self._runs[start] = run

    def fill(self) -> bool:
        """Whether they fill a row without overlapping."""
        end = 0
        for start, run in sorted(self._runs.items()):
            if start != end:
                return False
            end = start + run
        return end == self.row

    def cover(self, start: int, end: int) -> bool:
        """Whether all bytes of a row from `start` to `end` were written."""
        for first, run in sorted(self._runs.items()):
            if first <= start:
                start = max(start, first + run)
        return start >= end


class _Walk:
    """Follows the calls and what they leave in memory."""

    def __init__(self, program: Program, plans: Mapping[str, LaunchPlan]) -> None:
        self._program, self._plans = program, plans
        self._memory: dict[tuple[str, int], Written] = {}
        self._parts: dict[Place, _Parts] = {}  # of arrays of which slices were written
        self._blocks: dict[str, set[tuple[int, int]]] = {}  # space -> offset and bytes of all that lies there

    def run(self) -> None:
        program = self._program
        for index in program.inputs:
            array = program.arrays[index]
            self._write(self._whole(array), array.place)
        for index in program.constants:
            array = program.arrays[index]
            stretch = self._whole(array)
            require(self._free(stretch), f"constant {quoted(array.name)} lies on another one")
            self._write(stretch, array.place)
        for number, call in enumerate(program.calls):
            self._call(call, f"call {number} ({quoted(call.name)})")
        for source, to in program.copies:
            self._read(program.arrays[source], "a copy")
            self._write(self._whole(program.arrays[to]), program.arrays[to].place)
        for number, index in enumerate(program.outputs):
            self._read(program.arrays[index], f"output {number}")
        for array in program.arrays:
            self._note_block(array.place, array.nbytes)
        once = max((self._whole(array).end for array in program.arrays if array.place.space == "once"), default=0)
        for space, nbytes in (("arena", program.arena_bytes), ("constant", program.constant_bytes), ("once", once)):
            most = sum(rounded_up(size) for _, size in self._blocks.get(space, ()))
            require(nbytes <= most, f"the memory {space} has {nbytes} bytes; its arrays need at most {most}")

    # ---- one call

    def _call(self, call: Call, where: str) -> None:
        for name, index in call.buffers.items():
            _check_index(self._program, index, f"{name} of {where}")
        require(set(call.outputs) <= call.buffers.keys() and bool(call.outputs), f"{where} writes {quoted(call.outputs)}")
        inputs: Mapping[str, ArgSpec | None]
        outputs: Mapping[str, ArgSpec | None]
        if call.control is not None:
            inputs, outputs = self._control(call, call.control, where)
        else:
            allowed = bool(_SHA256.fullmatch(call.artifact))
            require(allowed, f"{where} has the code {quoted(call.artifact)}; allowed: a sha256")
            inputs, outputs = (self._foreign if call.foreign is not None else self._kernel)(call, where)
        for name, read in inputs.items():
            self._read(self._array(call, name), f"{name} of {where}", read)
        for name, spec in outputs.items():
            self._write_output(call, name, spec, f"{name} of {where}")

    def _foreign(self, call: Call, where: str) -> tuple[_Specs, _Specs]:
        """The arguments and outputs of a subgraph that ONNX Runtime computes; it checks their shapes itself."""
        assert call.foreign is not None
        require(
            not call.workspaces and not call.offsets and not call.scalars and 0 <= call.foreign.nbytes <= LARGEST_BYTES,
            f"{where} is for ONNX Runtime, which takes neither workspaces, scalars nor slices",
        )
        inputs = [name for name in call.buffers if name not in call.outputs]
        require(
            all(self._array(call, name).place.space != "once" for name in inputs),
            f"{where} reads a constant that is gone after loading",
        )
        return dict.fromkeys(inputs), dict.fromkeys(call.outputs)

    def _control(self, call: Call, control: Control, where: str) -> tuple[_Specs, _Specs]:
        """The same of a call with programs of its own, which are checked like the whole."""
        reads = [name for name in call.buffers if name not in call.outputs]
        names = [*(f"x{number}" for number in range(len(reads))), *(f"y{number}" for number in range(len(call.outputs)))]
        require(
            [*reads, *call.outputs] == names and call.foreign is None and not call.workload and not call.artifact
            and not call.offsets and not call.scalars and len(control.bodies) == _BODIES[control.kind]
            and bool(control.programs) and call.workspaces.keys() == control.workspaces.keys()
            and len(reads) >= (CARRIED + len(call.outputs) if control.kind == LOOP else 1),
            f"{where} is not {control.kind} of {_BODIES[control.kind]} programs on x0, x1 ... and y0, y1 ...",
        )  # fmt: skip
        first = [self._array(call, name).nbytes for name in reads[: CARRIED if control.kind == LOOP else 1]]
        wanted = [8, 1] if control.kind == LOOP else [1]
        require(first == wanted, f"{where} has {first} bytes for what the host reads; allowed: {wanted}")
        gone = any(self._array(call, name).place.space == "once" for name in reads)
        require(not gone, f"{where} reads a constant that is gone after loading")
        for body in control.programs:
            check(body, self._plans)
            self._check_body(call, control, body, reads, where)
            require(not body.references and body.target == self._program.target, f"{where} has a program of something else")
        for name, nbytes in control.workspaces.items():
            self._workspace(call, name, nbytes, where, control.workspaces)
        return dict.fromkeys(reads), dict.fromkeys(call.outputs)

    def _check_body(self, call: Call, control: Control, body: Program, reads: list[str], where: str) -> None:
        """A program inside has the arrays of the call."""
        inputs, outputs = ([body.arrays[index] for index in own] for own in (body.inputs, body.outputs))
        if control.kind == LOOP:
            turn, condition = inputs[:CARRIED], outputs[:1]
            held = [each.nbytes for each in (*turn, *condition)]
            require(held == [8, 1, 1], f"{where} has a body whose turn and conditions have {held} bytes; allowed: [8, 1, 1]")
            inputs, outputs, given = inputs[CARRIED:], outputs[1:], reads[CARRIED:]
        else:
            given = reads[1:]
        for own, outer in ((inputs, given), (outputs, call.outputs)):
            ports = [(each.dtype, each.stored) for each in own]
            arrays = [(each.dtype, each.stored) for each in (self._array(call, name) for name in outer)]
            require(ports == arrays, f"{where} has a program on {quoted(ports)}; its arrays are {quoted(arrays)}")

    def _kernel(self, call: Call, where: str) -> tuple[_Specs, _Specs]:
        """The same of a kernel, checked against its workload and its launch plan."""
        plan = self._plans.get(call.artifact)
        require(plan is not None, f"{where} has code {call.artifact[:12]}, which is not in the file")
        assert plan is not None
        try:
            workload = Workload.from_json(call.workload)
            plan.check(workload)
        except UnknownOperatorError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError) as error:  # of strings that are not workloads, too
            raise ProgramError(f"{where} cannot be what its workload says: {error}") from error
        arguments = {spec.name: spec for spec in workload.signature}
        outputs = {spec.name: spec for spec in workload.outputs}
        require(
            call.buffers.keys() == arguments.keys() | outputs.keys() and set(call.outputs) == outputs.keys(),
            f"{where} has {', '.join(call.buffers)} and writes {', '.join(call.outputs)}; {workload.op} takes "
            f"{', '.join(arguments)} and writes {', '.join(outputs)}",
        )
        scalars = {scalar.name for scalar in workload.scalars}
        require(call.scalars.keys() == scalars, f"{where} has the scalars {', '.join(call.scalars)}; allowed: {scalars}")
        require(call.offsets.keys() <= outputs.keys(), f"{where} has offsets of {', '.join(call.offsets)}")
        for name, spec in {**arguments, **outputs}.items():
            self._fit(call, name, spec, where)
        self._workspaces(call, plan, where)
        self._in_place(call, arguments, outputs, where)
        return dict(arguments), dict(outputs)

    def _fit(self, call: Call, name: str, spec: ArgSpec, where: str) -> None:
        """An argument or output is as large as its array, or a slice within it."""
        array, offset = self._array(call, name), call.offsets.get(name, 0)
        itemsize = DTYPES[spec.dtype].nbytes
        whole = spec.whole * itemsize
        require(
            array.dtype == spec.dtype and whole == array.nbytes and offset % itemsize == 0
            and offset >= 0 and offset + spec.span_bytes <= array.nbytes and bool(spec.slice_of or not offset),
            f"{name} of {where} is {spec.dtype} of {whole} bytes at {quoted(offset)}; its array {quoted(array.name)} is "
            f"{array.dtype} of {array.nbytes} bytes",
        )  # fmt: skip

    def _workspaces(self, call: Call, plan: LaunchPlan, where: str) -> None:
        """Workspaces are those of the plan, apart from all else; constant steps run once at load, or with every call."""
        names = call.workspaces.keys()
        require(
            names == plan.workspaces.keys(),
            f"{where} has the workspaces {', '.join(names)}; {', '.join(plan.workspaces)} are wanted",
        )
        kept = {name for name, place in call.workspaces.items() if place.space == "constant"}
        prepacked = bool(kept)
        require(kept in (set(), set(plan.constant_workspaces)), f"{where} keeps the workspaces {', '.join(kept)}")
        for name in plan.constants if prepacked else ():
            require(
                name not in call.buffers or self._array(call, name).place.space in _KEPT,
                f"{where} prepares {name} once, which is not a constant",
            )
        later = {name for step in plan.steps if not (step.constant and prepacked) for name in step.buffers}
        for name in call.buffers:
            gone = self._array(call, name).place.space == "once"
            require(not gone or name not in later, f"{where} reads {name}, a constant that is gone after loading")
        for name in call.workspaces:
            self._workspace(call, name, plan.workspaces[name], where, plan.workspaces)

    def _workspace(self, call: Call, name: str, nbytes: int, where: str, sizes: Mapping[str, int]) -> None:
        """A workspace lies apart from all else.

        Args:
            sizes: the bytes of the others.
        """
        place = call.workspaces[name]
        limit = {"arena": self._program.arena_bytes, "constant": self._program.constant_bytes}.get(place.space, -1)
        require(
            place.offset >= 0 and place.offset % ALIGNMENT == 0 and place.number == 0 and place.offset + nbytes <= limit,
            f"workspace {name} of {where} has {nbytes} bytes at {_text(place)}",
        )
        stretch = _Stretch((place.space, 0), place.offset, place.offset + nbytes)
        if place.space == "constant":
            require(self._free(stretch), f"workspace {name} of {where} lies on a constant")
        others = [self._whole(self._array(call, other)) for other in call.buffers]
        others += [
            _Stretch((each.space, 0), each.offset, each.offset + sizes[other])
            for other, each in call.workspaces.items()
            if other != name
        ]
        require(not any(map(stretch.meets, others)), f"workspace {name} of {where} lies on what the call uses")
        self._write(stretch, None)
        self._note_block(place, nbytes)

    def _in_place(self, call: Call, arguments: Mapping[str, ArgSpec], outputs: Mapping[str, ArgSpec], where: str) -> None:
        """An output has the memory of an argument only if the kernel updates it in place."""
        written: list[str] = []
        for name in outputs:
            target = self._array(call, name)
            for other, spec in arguments.items():
                source = self._array(call, other)
                allowed = spec.aliases == name and source.place == target.place
                require(
                    allowed or not self._whole(target).meets(self._whole(source)),
                    f"{where} writes {name} over {other}, which it reads",
                )
            for other in written:
                require(
                    not self._whole(target).meets(self._whole(self._array(call, other))),
                    f"{where} writes {name} over {other}",
                )
            written.append(name)

    # ---- memory

    def _array(self, call: Call, name: str) -> Array:
        return self._program.arrays[call.buffers[name]]

    def _whole(self, array: Array) -> _Stretch:
        place = array.place
        return _Stretch((place.space, place.number), place.offset, place.offset + array.nbytes)

    def _write(self, stretch: _Stretch, tag: Place | tuple[Place, str] | None) -> None:
        self._memory.setdefault(stretch.memory, Written()).write(stretch.start, stretch.end, tag)

    def _free(self, stretch: _Stretch) -> bool:
        return not self._memory.setdefault(stretch.memory, Written()).meets(stretch.start, stretch.end)

    def _read(self, array: Array, what: str, spec: ArgSpec | None = None) -> None:
        """Checks that the array was written, or the part of it that is read."""
        stretch = self._whole(array)
        memory = self._memory.setdefault(stretch.memory, Written())
        held = memory.holds(stretch.start, stretch.end, array.place)
        if not held and spec is not None and spec.part:
            first, count, row = (n * DTYPES[spec.dtype].nbytes for n in spec.part)
            parts = self._parts.get(array.place)
            held = parts is not None and parts.row == row and parts.cover(first, first + count)
            held = held and memory.holds(stretch.start, stretch.end, (array.place, "in part"))
        require(held, f"{what} reads {quoted(array.name)} at {_text(array.place)}, which nothing has written there before")

    def _write_output(self, call: Call, name: str, spec: ArgSpec | None, what: str) -> None:
        array = self._array(call, name)
        require(array.place.space in ("arena", "output"), f"{what} writes {quoted(array.name)}, an input or constant")
        if spec is None or not spec.slice_of:
            self._parts.pop(array.place, None)
            self._write(self._whole(array), array.place)
        else:
            self._write_slice(array, spec, call.offsets.get(name, 0), what)

    def _write_slice(self, array: Array, spec: ArgSpec, offset: int, what: str) -> None:
        """Writes a part of an array, which is complete when its parts meet."""
        whole, partial = self._whole(array), (array.place, "in part")
        memory = self._memory.setdefault(whole.memory, Written())
        run, step = (n * DTYPES[spec.dtype].nbytes for n in spec.runs)
        require(offset + run <= step, f"{what} has a slice that begins at {offset}, in rows of {step} bytes")
        parts = self._parts.get(array.place)
        if parts is None or parts.row != step or not memory.holds(whole.start, whole.end, partial):
            # the first part, or something was written over the others
            parts = self._parts[array.place] = _Parts(step)
            memory.write(whole.start, whole.end, partial)
        parts.add(offset, run)
        if parts.fill():
            del self._parts[array.place]
            memory.write(whole.start, whole.end, array.place)

    def _note_block(self, place: Place, nbytes: int) -> None:
        self._blocks.setdefault(place.space, set()).add((place.offset, nbytes))


def _text(place: Place) -> str:
    return f"{place.space} {place.number if place.space in ('input', 'output') else place.offset}"


def artifacts(program: Program) -> Iterator[str]:
    """The digests of the machine code that the calls name, each once."""
    yield from dict.fromkeys(call.artifact for call in program.calls if call.is_kernel)


@contextlib.contextmanager
def readable(path: Path | str) -> Iterator[None]:
    """Turns what is wrong with the program of a file into one message.

    Raises:
        SchemaVersionError: a later version of schedsearch wrote it.
        DatabaseError: it is not a program.
    """
    try:
        yield
    except FieldError as error:
        if error.later:
            raise SchemaVersionError(
                f"{path} was written by a later version of schedsearch, or was changed: {error}; upgrade schedsearch (pip "
                "install -U schedsearch), or build the model again here"
            ) from error
        raise _damaged(path, error) from error
    except ProgramError as error:
        raise _damaged(path, error) from error


def _damaged(path: Path | str, error: ValueError) -> DatabaseError:
    return DatabaseError(
        f"{path} is damaged: its program cannot run: {error}; restore it from a copy, or build it again: schedsearch build "
        "MODEL.onnx"
    )
