"""A `DynamicProgram` on a device: its machine code, its constants, and the block of sizes; what all runs of it share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from schedsearch.device import Device, LoadedKernel, Workspaces
from schedsearch.device.memory import bytes_at
from schedsearch.dynamic.code import size_artifact
from schedsearch.dynamic.fetch import Fetch
from schedsearch.dynamic.program import DynamicCall, DynamicProgram, DynamicValue
from schedsearch.launch import Artifact
from schedsearch.ops.size_steps import Words
from schedsearch.typed import Array
from schedsearch.workload import Workload

WORD = 8  # bytes of an extent


class LoadedProgram:
    """Takes the arguments of `DynamicNet`.

    Attributes:
        kind: of the device, and its number.
        kernels: workload -> its kernel.
        views: value -> those that have its memory.
        sizes: address of the block of sizes of exact runs; 0 when it is closed.
        constants: name -> address.
        prepacked: call -> what its kernel repacked of constants, once for all runs.
        sized: inputs whose extents callers choose, with their words.
        sent: the block of sizes in the host's memory, not pinned: the next run may write it when this one was enqueued.
        last_sent: a stream, and the extents of the inputs that it got.
        owners: value -> the first one that has its extents: calls that work element by element pass them on.
        returned: values that have memory that the caller gets.
    """

    def __init__(
        self,
        program: DynamicProgram,
        device: Device,
        kernels: Callable[[Workload], Artifact],
        size_kernels: Callable[[int, bool], Artifact] | None,
    ) -> None:
        self.program, self.device = program, device
        self._size_code = size_kernels or functools.partial(size_artifact, program, device.target)
        self.kind = (device.target.kind, device.target.ordinal if device.target.kind == "cuda" else 0)
        calls = [call for segment in program.segments for call in segment.calls]
        workloads = dict.fromkeys(call.workload for call in calls)
        self.kernels: dict[Workload, LoadedKernel] = {each: device.load(kernels(each)) for each in workloads}
        self.views: dict[str, list[DynamicValue]] = {}
        for value in program.values.values():
            if value.view_of:
                self.views.setdefault(value.view_of, []).append(value)
        nbytes = WORD * program.words
        self.sizes, self._host = device.allocate(nbytes), device.pinned(nbytes)
        self._words = np.frombuffer(bytes_at(self._host, nbytes), np.int64)
        self._words[:] = 0
        self.sent = np.zeros(program.words, np.int64)
        for words, extents in program.fixed:
            self.sent[words.first : words.first + words.count] = extents
        device.copy_in(self.sizes, self.sent.view(np.uint8).data)
        self.constants = {name: self._constant(numbers) for name, numbers in program.constants.items()}
        self.prepacked = {call.name: self._prepack(call) for call in calls}
        device.synchronize()
        self._fetches: dict[int, Fetch] = {}  # first word -> what gets it
        self.last_sent: tuple[Any, ...] = ()
        sized = [(name, program.values[name].words) for name in program.inputs]
        self.sized = [(name, words) for name, words in sized if words is not None]
        first: dict[Words | None, str] = {}
        for name, value in program.values.items():
            first.setdefault(value.words, name)
        self.owners = {name: name if value.words is None else first[value.words] for name, value in program.values.items()}
        self.returned = {program.values[name].view_of or name for name in program.outputs}
        self._size_kernels: dict[tuple[int, bool], LoadedKernel] = {}

    def _constant(self, numbers: Array) -> int:
        """The address of a constant on the device."""
        address = self.device.allocate(max(numbers.nbytes, 1))
        self.device.copy_in(address, numbers.reshape(-1).view(np.uint8).data)
        return address

    def _prepack(self, call: DynamicCall) -> Workspaces | None:
        """What a call's kernel repacks of constants, once for all runs; None if it repacks anything else, or nothing."""
        kernel = self.kernels[call.workload]
        names = kernel.artifact.plan.constants
        if not names or not all(call.inputs[name] in self.constants for name in names):
            return None
        return kernel.prepare({name: self.constants[call.inputs[name]] for name in names})

    def size_kernel(self, number: int, bounded: bool) -> LoadedKernel:
        """What computes the sizes of a segment, which has some."""
        if (number, bounded) not in self._size_kernels:
            self._size_kernels[number, bounded] = self.device.load(self._size_code(number, bounded))
        return self._size_kernels[number, bounded]

    def fetch(self, words: Words) -> Fetch:
        """What gets these sizes in one copy."""
        fetch = self._fetches.get(words.first)
        if fetch is None:
            at = WORD * words.first
            fetch = Fetch(self.program, words, self.device, self._host + at, self.sizes + at)
            self._fetches[words.first] = fetch
        return fetch

    def words_at(self, words: Words) -> tuple[int, ...]:
        """Extents that the host has."""
        return tuple(self._words[words.first : words.first + words.count].tolist())

    def read_block(self, block: int) -> None:
        """Brings a whole block of sizes to the host, and waits."""
        self.device.copy_to_host(self._host, block, WORD * self.program.words)
        self.device.synchronize()

    def status(self, number: int) -> int:
        """Of a segment in a bounded run, after `read_block`."""
        return int(self._words[number])

    def close(self) -> None:
        """Frees the memory and the code. The device must have finished."""
        for kernel in (*self.kernels.values(), *self._size_kernels.values()):
            kernel.close()
        self.kernels, self._size_kernels = {}, {}
        if self.sizes:
            for address in (self.sizes, *self.constants.values()):
                self.device.free(address)
            self.device.free_pinned(self._host)
            self.sizes = 0
