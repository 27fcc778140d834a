"""Where the arrays of one run of a dynamic graph are, and the extents that the host knows."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedsearch.device import BoundKernel
from schedsearch.device.index_notes import IndexNotes
from schedsearch.dynamic.given import Make, maker
from schedsearch.dynamic.loaded import WORD, LoadedProgram
from schedsearch.dynamic.pool import Pool
from schedsearch.dynamic.program import DynamicCall, DynamicProgram, DynamicValue, Segment, axes_of_view
from schedsearch.errors import ArgumentError
from schedsearch.ops import ArgSpec
from schedsearch.ops.data_movement import AXES
from schedsearch.ops.dependence import EXTENTS, STRIDE, SizeError, check_bound, evaluate
from schedsearch.ops.dtypes import decode
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.movement import row_strides
from schedsearch.ops.size_steps import SIZES, Values, Words
from schedsearch.runtime import arrays
from schedsearch.runtime.streams import raw_stream
from schedsearch.typed import Array

Extents = tuple[int, ...]
Box = tuple[Extents, Extents, int]  # extents, bound, bytes of an element


@dataclass(frozen=True)
class Result:
    """An output of a bounded run: an array at its bound, and how much of it counts, both on the device.

    Attributes:
        array: of the bound's shape; elements beyond the extents are undefined.
        extents: an int64 array with a number for each dimension; None if all of the array counts.
    """

    array: Any
    extents: Any


class Run:
    """Where the arrays of one run are, and the extents that the host knows.

    Attributes:
        block: address of the block of sizes.
        places: value -> address.
        shapes: value -> the shape whose strides the array has.
        staged: the inputs that are copied to arrays of their bounds: to, from, and the box as of `Device.copy_box`.
    """

    def __init__(
        self, net: LoadedProgram, given: tuple[object, ...], stream: object, pool: Pool, notes: IndexNotes[str]
    ) -> None:
        program = net.program
        if len(given) != len(program.inputs):
            raise ArgumentError(f"{len(given)} arrays; the graph takes {len(program.inputs)}: {', '.join(program.inputs)}")
        self.net, self.given, self.pool, self.notes, self.block = net, given, pool, notes, net.sizes
        self.views = [arrays.view(array, name) for array, name in zip(given, program.inputs)]
        self.library = self.views[0].library
        self.stream = raw_stream(stream, self.library, net.kind)
        self.places: dict[str, int] = {}
        self.shapes: dict[str, Extents] = {}
        self.extents: dict[str, Extents] = {}
        self._made: dict[str, Any] = {}
        self._makers: dict[str, Make] = {}
        self._boxes: dict[str, Box] = {}  # of inputs that are copied to arrays of their bound
        self.staged: list[tuple[int, int, Box]] = []
        for name, view in zip(program.inputs, self.views):
            value = program.values[name]
            self._check(value, view)
            self.places[name], self.shapes[name], self.extents[name] = view.address, view.shape, view.shape
            if view.shape != value.shape and not value.strided:
                self._boxes[name] = view.shape, value.shape, value.bytes_of(())
                self._stage(name, view.address)
            self._place_views(name)
        for name, address in net.constants.items():
            self.places[name], self.shapes[name] = address, program.values[name].shape
            self._place_views(name)
        sizes = self._chosen_sizes()
        for value in program.values.values():
            if value.known is not None and value.words is not None and value.name not in program.inputs:
                extents = tuple(n if isinstance(n, int) else n.at(sizes) for n in value.known)
                if min(extents) < 0:
                    raise SizeError(_negative(program, value.name, extents, sizes))
                self.extents[value.name] = extents
        self._check_known()

    def _check(self, value: DynamicValue, view: arrays.ArrayView) -> None:
        if len(view.shape) != len(value.shape):
            raise ArgumentError(f"{value.name} has shape {list(view.shape)}; allowed: {len(value.shape)} dimensions")
        for axis, (extent, most) in enumerate(zip(view.shape, value.shape)):
            size = value.sizes.get(axis)
            if not (size.least <= extent <= most if size else extent == most):
                allowed = f"{size.name}={size.least}..{size.most}" if size else str(most)
                raise ArgumentError(f"{value.name} has shape {list(view.shape)}; allowed in dimension {axis}: {allowed}")
        dense = ArgSpec(value.name, AXES[: len(view.shape)], view.shape, value.dtype)
        arrays.check(dense, arrays.as_numbers(view, dense), self.net.kind)

    def _chosen_sizes(self) -> dict[str, int]:
        """The caller's sizes by name. Inputs with sizes of the same name must agree."""
        chosen: dict[str, tuple[str, int]] = {}
        for name in self.net.program.inputs:
            for axis, size in self.net.program.values[name].sizes.items():
                extent = self.extents[name][axis]
                first, before = chosen.setdefault(size.name, (name, extent))
                if before != extent:
                    raise ArgumentError(f"{size.name} is {before} in {first} and {extent} in {name}; give arrays that agree")
        return {name: extent for name, (_, extent) in chosen.items()}

    def _stage(self, name: str, address: int) -> None:
        self.place_at_bound(self.net.program.values[name])
        self.staged.append((self.places[name], address, self._boxes[name]))

    def renew(self, given: tuple[object, ...], addresses: Sequence[int], stream: object) -> None:
        """Takes other arrays of the same shapes and dtypes; what depends on these alone stays."""
        self.given = given
        self.stream = raw_stream(stream, self.library, self.net.kind)
        self.staged.clear()
        for name, address in zip(self.net.program.inputs, addresses):
            if name in self._boxes:
                self._stage(name, address)
            else:
                self.places[name] = address
            self._place_views(name)

    def release(self) -> None:
        """Forgets the arrays of the caller."""
        self.given = ()
        self._made.clear()
        if self.library not in ("numpy", "torch"):
            self._makers.clear()  # they hold an array

    def copy_staged(self, stream: int) -> None:
        """Copies the inputs that kernels read at their bounds."""
        for to, source, box in self.staged:
            self.net.device.copy_box(to, source, *box, stream)

    def place(self, value: DynamicValue) -> None:
        """Places an output of a call in an exact run."""
        exact = self.extents.get(value.name) if value.strided and not value.counted else None
        self._place_of(value, value.shape if exact is None else exact)

    def place_at_bound(self, value: DynamicValue) -> None:
        self._place_of(value, value.shape)

    def _place_of(self, value: DynamicValue, shape: Extents) -> None:
        name = value.name
        self.shapes[name] = shape
        if name in self.net.returned:
            self._made[name], self.places[name] = self.new(name, shape, value.dtype)
        else:
            self.places[name] = self.pool.take(value.bytes_of(shape))
        self._place_views(name)

    def _place_views(self, name: str) -> None:
        for value in self.net.views.get(name, ()):
            self.places[value.name] = self.places[name]
            self.shapes[value.name] = _shape_of_view(self.shapes[name], self.net.program.values[name].shape, value.shape)

    def new(self, name: str, shape: Extents, dtype: str) -> tuple[Any, int]:
        """A new array of the caller's library, and its address."""
        return self._maker(name, dtype)(shape)

    def _maker(self, name: str, dtype: str) -> Make:
        if name not in self._makers:
            self._makers[name] = maker(self.given[0], self.views[0], name, dtype)
        return self._makers[name]

    def buffers(self, call: DynamicCall) -> dict[str, int]:
        """Address of each argument and output; extents are words of the block of sizes. And where it notes wrong indices."""
        found = dict(self.notes.buffers(call.name))
        for mine, name in (*call.inputs.items(), *call.outputs.items()):
            if (value := self.net.program.values.get(name)) is not None and value.numbers and value.words is not None:
                found[mine] = self.block + WORD * value.words.first
            if name not in self.places:
                continue
            found[mine] = self.places[name]
            value = self.net.program.values[name]
            if (words := value.words or value.fixed) is not None:
                found[f"{mine}{EXTENTS}"] = self.block + WORD * words.first
        return found

    def strides(self, call: DynamicCall) -> dict[str, float]:
        """The call-time scalars: strides of arrays where the workload takes them."""
        found = {scalar.name: scalar.default for scalar in call.workload.scalars} | dict(call.scalars)
        for mine, name in (*call.inputs.items(), *call.outputs.items()):
            if f"{mine}{STRIDE}0" in found:
                found |= {f"{mine}{STRIDE}{axis}": n for axis, n in enumerate(row_strides(self.shapes[name]))}
        return found

    def send(self) -> None:
        """Writes the extents of the inputs to the block of sizes."""
        net = self.net
        if not net.sized:
            return
        sent = (self.stream, *(self.extents[name] for name, _ in net.sized))
        if sent == net.last_sent:
            return
        for name, words in net.sized:
            net.sent[words.first : words.first + words.count] = self.extents[name]
        first, last = net.sized[0][1].first, net.sized[-1][1].first + net.sized[-1][1].count
        at = WORD * first
        net.device.copy_from_host(net.sizes + at, net.sent.ctypes.data + at, WORD * (last - first), self.stream)
        net.last_sent = sent

    def bind_sizes(self, number: int, bounded: bool) -> BoundKernel | None:
        """The kernel of sizes of a segment, if there is anything to compute."""
        segment = self.net.program.segments[number]
        if not segment.steps:
            return None
        buffers = {each.buffer: self.places.get(each.buffer, self.block) for each in values_read(segment)}
        return self.net.size_kernel(number, bounded).bind({SIZES: self.block, **buffers}, {})

    def bind_call(self, call: DynamicCall, instead: Mapping[str, int] | None = None) -> BoundKernel:
        """`instead`: addresses of buffers that are not where the run has them."""
        buffers = {**self.buffers(call), **(instead or {})}
        return self.net.kernels[call.workload].bind(buffers, self.strides(call), self.net.prepacked[call.name])

    def fetch(self, words: Words) -> None:
        """Gets sizes in one copy, and waits once."""
        fetch = self.net.fetch(words)
        fetch.get(self.stream)
        self.notes.check()
        if (wrong := fetch.into(self.extents)) is not None:
            self.explain_mistake(wrong)

    def explain_mistake(self, name: str) -> None:
        """Raises the SizeError of the first value of a segment whose sizes are impossible, computed again on the host."""
        self.net.device.synchronize()
        for segment in self.net.program.segments:
            if name in segment.values:
                for value, step in zip(segment.values, segment.steps):
                    if step.bound is None and step.function.problem is None:
                        continue
                    inputs = dict(zip(step.function.inputs, map(self._read, step.inputs)))
                    what = _named(segment, value)
                    extents = evaluate(step.function, step.to.count, inputs, what)
                    if step.bound is not None:
                        check_bound(extents, step.bound, what)
        raise SizeError(f"the sizes of {name} are impossible")

    def _check_known(self) -> None:
        """Raises the SizeError of sizes that the host knows and that are impossible together."""
        program = self.net.program
        known = {value.words: self.extents[name] for name, value in program.values.items() if name in self.extents}
        for segment in program.segments:
            for name, step in zip(segment.values, segment.steps):
                if step.function.problem is not None and all(each in known for each in step.inputs):
                    inputs = dict(zip(step.function.inputs, (known[each] for each in step.inputs)))  # type: ignore[index]
                    evaluate(step.function, step.to.count, inputs, _named(segment, name))

    def _read(self, each: Words | Values) -> list[int]:
        if isinstance(each, Values):
            numbers, address = np.empty(each.count, each.dtype), self.places[each.buffer]
        else:
            numbers, address = np.empty(each.count, np.int64), self.block + WORD * each.first
        self.net.device.copy_out(numbers.view(np.uint8).data, address)
        return [int(number) for number in numbers]

    def sliced(self, name: str) -> Any:
        """An output of an exact run."""
        value = self.net.program.values[name]
        if value.view_of:
            return self._seen(self.sliced(value.view_of), value)
        if name not in self._made:
            return self.given[self.net.program.inputs.index(name)]
        array = self._made[name]
        extents = self.extents.get(self.net.owners[name], self.shapes[name])
        return array if extents == self.shapes[name] else array[tuple(map(slice, extents))]

    def numbers(self, name: str) -> Array:
        """What an array holds, when the run is over: of a value whose extents follow from those of the inputs."""
        value = self.net.program.values[name]
        shape = self.shapes[name]
        raw = np.empty(value.bytes_of(shape), np.uint8)
        if raw.size:
            self.net.device.copy_out(raw.data, self.places[name])
        held = decode(raw.view(dtype_of(value.dtype).storage).reshape(shape), value.dtype)
        return held[tuple(map(slice, self.extents.get(name, value.shape)))]

    def result(self, name: str, block: Any) -> Result:
        """An output of a bounded run; its extents are a view of the block of sizes."""
        value = self.net.program.values[name]
        source = value.view_of or name
        array = self._made[source] if source in self._made else self.given[self.net.program.inputs.index(source)]
        array = self._seen(array, value) if value.view_of else array
        if value.words is None:
            return Result(array, None)
        return Result(array, block[value.words.first : value.words.first + value.words.count])

    def _seen(self, array: Any, view: DynamicValue) -> Any:
        """An array, perhaps sliced, as a view of it."""
        shape = tuple(int(extent) for extent in array.shape)
        return array.reshape(_shape_of_view(shape, self.net.program.values[view.view_of].shape, view.shape))


@functools.lru_cache(maxsize=1024)
def _shape_of_view(shape: Extents, bound: Extents, view: Extents) -> Extents:
    """The shape of a view of an array of this shape.

    Args:
        bound: what the shape is at most.
        view: the shape of the view then.
    """
    if shape == bound:
        return view
    if view == bound:
        return shape
    places = axes_of_view(bound, view, [used != most for used, most in zip(shape, bound)])
    assert places is not None  # the graph has only such views
    return tuple(shape[place] if place >= 0 else n for place, n in zip(places, view))


def values_read(segment: Segment) -> list[Values]:
    """The arrays whose values a segment's kernel of sizes reads."""
    found = {each.buffer: each for step in segment.steps for each in step.inputs if isinstance(each, Values)}
    return list(found.values())


def _negative(program: DynamicProgram, name: str, extents: Extents, sizes: Mapping[str, int]) -> str:
    """The message about sizes that would give a value a negative extent."""
    what = next((_named(each, name) for each in program.segments if name in each.values), name)
    given = ", ".join(f"{size}={n}" for size, n in sizes.items())
    return f"{what} would have the extents {list(extents)} for {given}; allowed: sizes that give 0 and above"


def _named(segment: Segment, name: str) -> str:
    """A value that a call of a segment makes, with what the call stands for."""
    source = next((call.source for call in segment.calls if name in call.outputs.values()), "")
    return f"{name} of {source}" if source else name
