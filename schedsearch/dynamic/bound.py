"""Bounded runs of a dynamic graph: every array has the memory of its bound, and nothing comes to the host."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from schedsearch.device import BoundKernel
from schedsearch.dynamic.loaded import WORD, LoadedProgram
from schedsearch.dynamic.program import DynamicCall, DynamicProgram, Segment
from schedsearch.dynamic.run import Result, Run
from schedsearch.errors import IndexRangeError
from schedsearch.ops.dependence import EXTENTS, check_bound
from schedsearch.ops.size_steps import KINDS
from schedsearch.runtime.repeated import announce, tracked
from schedsearch.runtime.streams import raw_stream
from schedsearch.typed import Array

if TYPE_CHECKING:
    from schedsearch.device.cuda import CudaDevice


def independent_calls(program: DynamicProgram, segment: Segment) -> int:
    """How many calls at a segment's beginning read nothing that its kernel of sizes writes."""
    written = {word for step in segment.steps for word in range(step.to.first, step.to.first + step.to.count)}
    for number, call in enumerate(segment.calls):
        read = {argument.name for argument in call.workload.signature}
        for mine, name in (*call.inputs.items(), *call.outputs.items()):
            value = program.values.get(name)
            if value is None or value.words is None or value.words.first not in written:
                continue
            if value.counted or value.numbers or f"{mine}{EXTENTS}" in read:
                return number
    return len(segment.calls)


def extents_written_twice(call: DynamicCall) -> dict[str, int]:
    """Extents that a call writes and the kernel of sizes, too, with their dimensions. What a call counts only it writes."""
    counted = {name for name, function in call.shape_functions.items() if function.counted}
    outputs = (each for each in call.workload.outputs if each.extents and each.name not in counted)
    return {output.extents: len(output.shape) for output in outputs}


def _launch_all(kernels: Sequence[BoundKernel], stream: int) -> None:
    for kernel in kernels:
        kernel.launch(stream)


class BoundNet:
    """A bounded run on fixed arrays: it copies nothing to the host, waits for nothing and allocates nothing.

    `step()` runs it, `results` are its outputs, `check()` reports mistakes, and `sliced()` gives what counts of the outputs.
    """

    def __init__(self, net: LoadedProgram, run: Run, overlapped: bool = False) -> None:
        self._net, self._run = net, run
        on_cuda = net.device.target.kind == "cuda"
        program = net.program
        run.send()
        block, run.block = run.new("sizes", (program.words,), "int64")
        self._block = block  # the kernels write there as long as this run lives, whether or not a result shows part of it
        net.device.copy(run.block, net.sizes, WORD * program.words)
        for value in program.values.values():
            if value.name not in run.places and not value.numbers:
                run.place_at_bound(value)
        # for each segment the kernel of sizes, the calls that run beside it, and the others
        self._stages: list[tuple[BoundKernel | None, list[BoundKernel], list[BoundKernel]]] = []
        for number, segment in enumerate(program.segments):
            sizes = run.bind_sizes(number, True)
            free = independent_calls(program, segment) if overlapped and on_cuda and sizes is not None else 0
            beside = [run.bind_call(call, self._unread_extents(call)) for call in segment.calls[:free]]
            self._stages.append((sizes, beside, [run.bind_call(call) for call in segment.calls[free:]]))
        self.results = tuple(run.result(name, block) for name in program.outputs)
        pairs = tuple((each.array, each.extents) for each in self.results)
        self._returned = pairs[0] if len(pairs) == 1 else pairs
        self._written = tracked({name: result.array for name, result in zip(program.outputs, self.results)}, ())
        net.device.synchronize()
        self._graph: Any = None
        self._branch: Any = None
        if on_cuda:
            cuda: CudaDevice = net.device  # type: ignore[assignment]
            if any(beside for _, beside, _ in self._stages):
                self._branch = cuda.create_branch()
            stream = cuda.create_stream()
            try:
                self._graph = cuda.capture(stream, self.enqueue)
            finally:
                cuda.destroy_stream(stream)

    def enqueue(self, stream: int) -> None:
        """Enqueues one kernel after the other, for a caller who captures a graph of more."""
        self._run.copy_staged(stream)
        for sizes, beside, others in self._stages:
            if sizes is not None and beside:
                self._branch.enqueue(stream, sizes.launch, functools.partial(_launch_all, beside))
            elif sizes is not None:
                sizes.launch(stream)
            _launch_all(others, stream)

    def _unread_extents(self, call: DynamicCall) -> dict[str, int]:
        """Other places for the extents that a call beside the kernel of sizes writes as well as that."""
        return {name: self._run.pool.take(WORD * rank) for name, rank in extents_written_twice(call).items()}

    def step(self, stream: Any = None) -> tuple[Result, ...]:
        """Enqueues a run; on a CPU it returns when the results are complete."""
        handle = raw_stream(stream, self._run.library, self._net.kind)
        announce(self._written)
        if self._graph is not None:
            self._graph.launch(handle)
        else:
            self.enqueue(handle)
        return self.results

    def __call__(self, stream: Any = None) -> Any:
        """As `step`. Returns a pair (array, extents), or a tuple of several."""
        self.step(stream)
        return self._returned

    def check(self) -> None:
        """Waits for the last run.

        Raises:
            SizeError: an input of the run was impossible, or sizes exceeded their bounds. Nothing was written outside of the
                arrays; the extents of impossible results are 0.
            IndexRangeError: an index of a gather or scatter was out of range in a run since the last check. Elements that it
                chose are zeros, and updates are left out.
        """
        net = self._net
        net.device.synchronize()
        wrong: IndexRangeError | None = None
        try:
            self._run.notes.check()
        except IndexRangeError as error:  # impossible sizes come first: arrays without elements have no legal index
            wrong = error
        net.read_block(self._run.block)
        for number, segment in enumerate(net.program.segments):
            if code := net.status(number):
                self._run.explain_mistake(segment.values[code // KINDS - 1])
        for value in net.program.values.values():
            if value.counted and value.words is not None:
                check_bound(net.words_at(value.words), value.shape, value.name)
        if wrong is not None:
            raise wrong

    def sliced(self) -> tuple[Any, ...]:
        """What counts of each output, after `check`: views."""
        self.check()
        found = []
        for name, result in zip(self._net.program.outputs, self.results):
            words = self._net.program.values[name].words
            extents = self._net.words_at(words) if words is not None else tuple(result.array.shape)
            found.append(result.array[tuple(map(slice, extents))])
        return tuple(found)

    def trace(self, names: Iterable[str]) -> dict[str, Array]:
        """What values inside held in the last run; see `DynamicNet.trace`."""
        self._net.device.synchronize()
        return {name: self._run.numbers(name) for name in names}

    def close(self) -> None:
        if self._graph is not None:
            cuda: CudaDevice = self._net.device  # type: ignore[assignment]
            cuda.synchronize()
            with cuda.current():
                self._graph.close()
                if self._branch is not None:
                    self._branch.close()
            self._graph = self._branch = None
        self._run.pool.close()
        self._run.notes.close()
