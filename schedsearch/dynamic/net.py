"""Runs a `DynamicProgram`: exact, where the host reads the sizes of each segment, or bounded, where it reads nothing.

*Exact*: for each segment one kernel computes the sizes, one copy of 8 bytes an extent brings them to pinned memory, the host
waits once, and launches on arrays that it places. *Bounded*: every array has the memory of its bound, kernels read extents
from the device's memory, and the whole run is a chain of launches, on a GPU one CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np

from schedsearch.device import BoundKernel, Device, LoadedKernel, Workspaces
from schedsearch.device.memory import bytes_at
from schedsearch.dynamic.bound import BoundNet
from schedsearch.dynamic.code import size_artifact
from schedsearch.dynamic.exact import ExactRuns, values_read
from schedsearch.dynamic.fetch import Fetch
from schedsearch.dynamic.noted import index_notes
from schedsearch.dynamic.pool import Pool
from schedsearch.dynamic.program import DynamicCall, DynamicProgram, DynamicValue, Segment
from schedsearch.dynamic.run import WORD, Extents, Run
from schedsearch.errors import UsageError
from schedsearch.launch import Artifact
from schedsearch.ops.dependence import SizeError, check_bound, evaluate
from schedsearch.ops.size_steps import SIZES, Values, Words
from schedsearch.workload import Workload


class DynamicNet:
    """A graph that is ready to run on one device: call it for an exact run, or `bind` it for bounded ones.

    A net has memory of its own: do not run it on two streams at once.

    Args:
        program: of `DynamicGraph.program`.
        device: stays open.
        kernels: gives the machine code of each workload, e.g. that of `schedsearch.compile(workload).artifact`.
        size_kernels: gives the machine code that computes the sizes of a segment, by its number, and whether the run is
            bounded; None: it is compiled when it is first needed. `schedsearch.dynamic.code.machine_code` compiles all code
            of some programs at once.
    """

    def __init__(
        self,
        program: DynamicProgram,
        device: Device,
        kernels: Callable[[Workload], Artifact],
        size_kernels: Callable[[int, bool], Artifact] | None = None,
    ) -> None:
        self.program, self.device = program, device
        self._size_code = size_kernels or functools.partial(size_artifact, program, device.target)
        self._kind = (device.target.kind, device.target.ordinal if device.target.kind == "cuda" else 0)
        workloads = dict.fromkeys(call.workload for segment in program.segments for call in segment.calls)
        self.kernels: dict[Workload, LoadedKernel] = {each: device.load(kernels(each)) for each in workloads}
        self.views: dict[str, list[DynamicValue]] = {}
        for value in program.values.values():
            if value.view_of:
                self.views.setdefault(value.view_of, []).append(value)
        nbytes = WORD * program.words
        self.sizes, self._host = device.allocate(nbytes), device.pinned(nbytes)
        self._words = np.frombuffer(bytes_at(self._host, nbytes), np.int64)
        self._words[:] = 0
        self._sent = np.zeros(program.words, np.int64)  # not pinned: the next run may write it when this one was enqueued
        for words, extents in program.fixed:
            self._sent[words.first : words.first + words.count] = extents
        device.copy_in(self.sizes, self._sent.view(np.uint8).data)
        self.constants = {name: self._constant(numbers) for name, numbers in program.constants.items()}
        self._prepared = {call.name: self._prepare(call) for segment in program.segments for call in segment.calls}
        device.synchronize()
        self._exact: ExactRuns | None = None
        self._fetches: dict[int, Fetch] = {}  # first word -> what gets it
        self._last_sent: tuple[Any, ...] = ()  # a stream, and the extents of the inputs that it got
        sized = [(name, program.values[name].words) for name in program.inputs]
        self._sized = [(name, words) for name, words in sized if words is not None]
        # the first value that has the extents of each: calls that work element by element pass them on
        first: dict[Words | None, str] = {}
        for name, value in program.values.items():
            first.setdefault(value.words, name)
        self.owners = {name: name if value.words is None else first[value.words] for name, value in program.values.items()}
        # what has memory that the caller gets
        self.returned = {program.values[name].view_of or name for name in program.outputs}
        self._size_kernels: dict[tuple[int, bool], LoadedKernel] = {}

    def __call__(self, *given: Any, stream: Any = None) -> Any:
        """Runs exactly: the outputs have the shapes that the inputs lead to.

        Args:
            given: the inputs in order: contiguous arrays of the device whose shapes fit the declared sizes.
            stream: as of `schedsearch.Kernel`.

        Returns:
            The output, or a tuple of several, of the first input's library. Outputs of operators that only work at their
            bound are views of larger arrays.

        Raises:
            ArgumentError: an input has a wrong shape, dtype or device.
            SizeError: inputs are impossible, or sizes exceed their bounds; the message names call and sizes.
            IndexRangeError: an index of a gather or scatter is out of range. On a GPU a run sees this when it waits for
                sizes; otherwise `check` does.
        """
        run = (self._exact or self._exact_runs()).run(given, stream)
        found = [run.sliced(name) for name in self.program.outputs]
        run.release()
        return found[0] if len(found) == 1 else tuple(found)

    def _exact_runs(self) -> ExactRuns:
        self._check_open()
        self._exact = ExactRuns(self)
        return self._exact

    def trace(self, names: Iterable[str], *given: Any) -> dict[str, np.ndarray[Any, Any]]:
        """Runs exactly, and returns what values inside hold, whose extents must follow from those of the inputs: NumPy
        arrays that hold their numbers exactly. Raises as a call does."""
        run = (self._exact or self._exact_runs()).run(given, None)
        self.device.synchronize()
        found = {name: run.numbers(name) for name in names}
        run.release()
        return found

    def bind(self, *given: Any, overlapped: bool = False) -> BoundNet:
        """Prepares bounded runs on these arrays: on a GPU it captures one graph.

        Args:
            given: the inputs in order, as in a call. Later runs take other values from the same arrays.
            overlapped: sizes of a segment are computed while those of its first calls run that do not need them. This has no
                effect on a CPU.

        Raises:
            ArgumentError: an input has a wrong shape, dtype or device.
        """
        self._check_open()
        self.device.synchronize()  # what is done here does not wait for the caller's streams
        notes = index_notes(self.program, self.device, self.kernels)
        return BoundNet(self, Run(self, given, 0, Pool(self.device), notes), overlapped)

    def _check_open(self) -> None:
        if not self.sizes:
            raise UsageError("the net was closed; load it again")

    def check(self) -> None:
        """Waits for the exact runs.

        Raises:
            IndexRangeError: an index of a gather or scatter was out of range in a run since the last check. The message
                names call, index, its place, and what is allowed. Nothing outside of an array was read or written.
        """
        self.device.synchronize()
        if self._exact is not None:
            self._exact.notes.check()

    @property
    def allocations(self) -> int:
        """How often exact runs have allocated memory."""
        return self._exact.allocations if self._exact else 0

    # ---- parts of runs

    def _constant(self, numbers: np.ndarray[Any, Any]) -> int:
        """The address of a constant on the device."""
        address = self.device.allocate(max(numbers.nbytes, 1))
        self.device.copy_in(address, numbers.reshape(-1).view(np.uint8).data)
        return address

    def send(self, run: Run) -> None:
        """Writes the extents of the inputs to the block of sizes."""
        if not self._sized:
            return
        sent = (run.stream, *(run.extents[name] for name, _ in self._sized))
        if sent == self._last_sent:
            return
        for name, words in self._sized:
            self._sent[words.first : words.first + words.count] = run.extents[name]
        first, last = self._sized[0][1].first, self._sized[-1][1].first + self._sized[-1][1].count
        at = WORD * first
        self.device.copy_from_host(self.sizes + at, self._sent.ctypes.data + at, WORD * (last - first), run.stream)
        self._last_sent = sent

    def bind_sizes(self, number: int, run: Run, bounded: bool) -> BoundKernel | None:
        """The kernel of sizes of a segment, if there is anything to compute."""
        segment = self.program.segments[number]
        if not segment.steps:
            return None
        if (number, bounded) not in self._size_kernels:
            self._size_kernels[number, bounded] = self.device.load(self._size_code(number, bounded))
        buffers = {each.buffer: run.places.get(each.buffer, run.block) for each in values_read(segment)}
        return self._size_kernels[number, bounded].bind({SIZES: run.block, **buffers}, {})

    def bind_call(self, call: DynamicCall, run: Run, instead: Mapping[str, int] | None = None) -> BoundKernel:
        """`instead`: addresses of buffers that are not where the run has them."""
        buffers = {**run.buffers(call), **(instead or {})}
        return self.kernels[call.workload].bind(buffers, run.strides(call), self._prepared[call.name])

    def _prepare(self, call: DynamicCall) -> Workspaces | None:
        """What a call's kernel repacks of constants, once for all runs; None if it repacks anything else, or nothing."""
        kernel = self.kernels[call.workload]
        names = kernel.artifact.plan.constants
        if not names or not all(call.inputs[name] in self.constants for name in names):
            return None
        return kernel.prepare({name: self.constants[call.inputs[name]] for name in names})

    def fetch(self, words: Words, run: Run) -> None:
        """Gets sizes in one copy, and waits once."""
        fetch = self._fetches.get(words.first)
        if fetch is None:
            at = WORD * words.first
            fetch = Fetch(self.program, words, self.device, self._host + at, self.sizes + at)
            self._fetches[words.first] = fetch
        fetch.get(run.stream)
        run.notes.check()
        if (wrong := fetch.into(run.extents)) is not None:
            self.explain_mistake(run, wrong)

    def words_at(self, words: Words) -> Extents:
        """Extents that the host has."""
        return tuple(self._words[words.first : words.first + words.count].tolist())

    def explain_mistake(self, run: Run, name: str) -> None:
        """Raises the SizeError of the first value of a segment whose sizes are impossible, computed again on the host."""
        self.device.synchronize()
        for segment in self.program.segments:
            if name in segment.values:
                for value, step in zip(segment.values, segment.steps):
                    if step.bound is None and step.function.problem is None:
                        continue
                    inputs = dict(zip(step.function.inputs, (self._read(each, run) for each in step.inputs)))
                    what = self._named(segment, value)
                    extents = evaluate(step.function, step.to.count, inputs, what)
                    if step.bound is not None:
                        check_bound(extents, step.bound, what)
        raise SizeError(f"the sizes of {name} are impossible")

    def check_known(self, extents: Mapping[str, Extents]) -> None:
        """Raises the SizeError of sizes that the host knows and that are impossible together."""
        known = {value.words: extents[name] for name, value in self.program.values.items() if name in extents}
        for segment in self.program.segments:
            for name, step in zip(segment.values, segment.steps):
                if step.function.problem is not None and all(each in known for each in step.inputs):
                    inputs = dict(zip(step.function.inputs, (known[each] for each in step.inputs)))  # type: ignore[index]
                    evaluate(step.function, step.to.count, inputs, self._named(segment, name))

    def negative(self, name: str, extents: Extents, sizes: Mapping[str, int]) -> str:
        """The message about sizes that would give a value a negative extent."""
        what = next((self._named(each, name) for each in self.program.segments if name in each.values), name)
        given = ", ".join(f"{size}={n}" for size, n in sizes.items())
        return f"{what} would have the extents {list(extents)} for {given}; allowed: sizes that give 0 and above"

    @staticmethod
    def _named(segment: Segment, name: str) -> str:
        """A value that a call of a segment makes, with what the call stands for."""
        source = next((call.source for call in segment.calls if name in call.outputs.values()), "")
        return f"{name} of {source}" if source else name

    def _read(self, each: Words | Values, run: Run) -> list[int]:
        if isinstance(each, Values):
            numbers, address = np.empty(each.count, each.dtype), run.places[each.buffer]
        else:
            numbers, address = np.empty(each.count, np.int64), run.block + WORD * each.first
        self.device.copy_out(numbers.view(np.uint8).data, address)
        return [int(number) for number in numbers]

    def read_words(self, run: Run) -> None:
        """Brings the whole block to the host, in a run that may wait."""
        self.device.copy_to_host(self._host, run.block, WORD * self.program.words)
        self.device.synchronize()

    def status(self, number: int) -> int:
        """Of a segment in a bounded run, after `read_words`."""
        return int(self._words[number])

    def close(self) -> None:
        """Waits for the runs, and frees the memory and the code; does nothing the second time."""
        if self.sizes:
            self.device.synchronize()
        if self._exact is not None:
            self._exact.close()
            self._exact = None
        for kernel in (*self.kernels.values(), *self._size_kernels.values()):
            kernel.close()
        self.kernels, self._size_kernels = {}, {}
        if self.sizes:
            for address in (self.sizes, *self.constants.values()):
                self.device.free(address)
            self.device.free_pinned(self._host)
            self.sizes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
