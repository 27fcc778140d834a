"""The CPU as a device: loads the objects that `backend.cpu` made and runs them on a pool of native worker threads.

It needs llvmlite, but neither Numba nor templates. A launch is one foreign call of `run_chain` (`cpu_native`), which runs
the steps of a kernel, or of all kernels of a network, one after the other: those for one thread in the calling thread,
others together with workers, which never take the interpreter lock.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from schedsearch.device.contract import Workspaces, check_alignment, needed_steps, place_buffers, split_steps
from schedsearch.device.cpu_link import STEP_WORDS, LinkedCode, call_address, first_words, word_count
from schedsearch.device.cpu_native import CHUNKS_PER_THREAD, ENTRY_WORDS
from schedsearch.device.cpu_pool import Pool
from schedsearch.device.memory import bytes_at
from schedsearch.errors import ArgumentError, DeviceError, DeviceMemoryError
from schedsearch.launch import (
    Artifact,
    Float32,
    Int32,
    Int64,
    NumbaArray,
    Number,
    Pointer,
    Scalar,
    Step,
    number_bits,
)
from schedsearch.target import Target


class CpuDevice:
    """See `schedsearch.device.Device`. The calling thread takes a share of the work; the others wait in native code."""

    def __init__(self, target: Target) -> None:
        if target.kind != "cpu":
            raise DeviceError(f"target {target.key} is not a CPU; open it with open_device")
        self.target = target
        self._memory: dict[int, mmap.mmap] = {}
        self._pool = Pool()

    def start_threads(self, threads: int) -> None:
        """Starts the worker threads that launches of this many threads need. Otherwise `load` does."""
        self._pool.grow(threads)

    def load(self, artifact: Artifact) -> CpuKernel:
        """Raises DeviceError for GPU code, and for code with instructions that this CPU lacks."""
        return CpuKernel(self, self._pool, artifact)

    def together(self, bound: Sequence[BoundCpuKernel]) -> Launches:
        """Some bound kernels of this device as one launch. They see pointers and scalars that are set later."""
        return Launches(self._pool, bound)

    def allocate(self, nbytes: int) -> int:
        """Page-aligned; the pages are zero and are mapped when first touched. A process that is forked gets a copy."""
        try:
            memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # the default is shared
        except (OSError, ValueError, OverflowError) as error:
            text = getattr(error, "strerror", None) or error
            raise DeviceMemoryError(f"{nbytes:,} bytes of memory cannot be allocated: {text}") from error
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._memory[address] = memory
        return address

    def free(self, address: int) -> None:
        self._memory.pop(address).close()

    def copy_in(self, address: int, data: memoryview) -> None:
        flat = data.cast("B")
        bytes_at(address, flat.nbytes)[:] = flat

    def copy(self, destination: int, source: int, nbytes: int, stream: int = 0) -> None:
        ctypes.memmove(destination, source, nbytes)

    def copy_box(
        self,
        destination: int,
        source: int,
        extents: tuple[int, ...],
        bound: tuple[int, ...],
        element_bytes: int,
        stream: int = 0,
    ) -> None:
        if extents[1:] == bound[1:]:
            self.copy(destination, source, element_bytes * math.prod(extents))
        elif 0 not in extents:
            form = f"u{element_bytes}"
            larger = np.ndarray(bound, form, bytes_at(destination, element_bytes * math.prod(bound)))
            larger[tuple(map(slice, extents))] = np.ndarray(
                extents, form, bytes_at(source, element_bytes * math.prod(extents))
            )

    def pinned(self, nbytes: int) -> int:
        return self.allocate(nbytes)

    def free_pinned(self, address: int) -> None:
        self.free(address)

    copy_from_host = copy_to_host = copy

    def wait(self, stream: int = 0) -> None:
        """Does nothing: a launch returns when its result is complete."""

    def copy_out(self, data: memoryview, address: int) -> None:
        flat = data.cast("B")
        flat[:] = bytes_at(address, flat.nbytes)

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        ctypes.memset(address, byte, nbytes)

    def synchronize(self) -> None:
        """Does nothing: a launch returns when its result is complete."""

    def close(self) -> None:
        """Ends the worker threads and frees all memory. Nothing of this device may be used afterwards."""
        self._pool.close()
        for address in list(self._memory):
            self.free(address)


class CpuKernel:
    """See `schedsearch.device.LoadedKernel`."""

    def __init__(self, device: CpuDevice, pool: Pool, artifact: Artifact) -> None:
        plan = artifact.plan
        if plan.kind != "cpu":
            raise DeviceError(f"code for {plan.arch} does not run on a CPU")
        self.artifact = artifact
        self.pool = pool
        self._code = LinkedCode(artifact)
        pool.grow(_threads(plan.steps))
        self._in_place: dict[tuple[int, ...], _Chain] = {}
        self.device = device
        self.workspaces = Workspaces(device, plan.workspaces)

    def bind(
        self,
        buffers: Mapping[str, int],
        scalars: Mapping[str, float],
        prepared: Workspaces | None = None,
        *,
        early: bool = False,
    ) -> BoundCpuKernel:
        return BoundCpuKernel(
            self, self._chain(buffers) if prepared is None else self._not_constant, buffers, scalars, prepared
        )

    def _chain(self, buffers: Mapping[str, int]) -> _Chain:
        """The code of the steps that have something to do."""
        steps = self.artifact.plan.steps
        needed = needed_steps(steps, buffers)
        if len(needed) == len(steps):
            return self._all
        if needed not in self._in_place:
            self._in_place[needed] = self._chain_of(needed)
        return self._in_place[needed]

    def prepare(self, addresses: Mapping[str, int], stream: int = 0) -> Workspaces:
        plan = self.artifact.plan
        made = Workspaces(self.device, plan.constant_workspaces, addresses)
        made.take(plan.constant_workspaces)
        if split_steps(plan)[0]:
            BoundCpuKernel(self, self._constant, addresses, {}, made).launch()
        return made

    @functools.cached_property
    def _all(self) -> _Chain:
        return self._chain_of(range(len(self.artifact.plan.steps)))

    @functools.cached_property
    def _constant(self) -> _Chain:
        return self._chain_of(split_steps(self.artifact.plan)[0])

    @functools.cached_property
    def _not_constant(self) -> _Chain:
        return self._chain_of(split_steps(self.artifact.plan)[1])

    def _chain_of(self, numbers: Iterable[int]) -> _Chain:
        return _Chain([self.artifact.plan.steps[number] for number in numbers], self._code)

    def close(self) -> None:
        self.workspaces.close()


def _threads(steps: Sequence[Step]) -> int:
    return max((step.block_threads for step in steps), default=1)


class _Chain:
    """Some steps of an artifact, which run one after the other."""

    def __init__(self, steps: Sequence[Step], code: LinkedCode) -> None:
        self.steps, self.code = steps, code
        self.calls = [call_address(step) for step in steps]


class Launches:
    """The steps of some bound kernels of one device, in order, as one launch."""

    def __init__(self, pool: Pool, bound: Sequence[BoundCpuKernel]) -> None:
        self._kept = [each.kept for each in bound], pool
        self._names = [step.entry for each in bound for step in each.steps]
        words = [word for each in bound for entry in each.entries for word in entry]
        self._entries = (ctypes.c_uint64 * len(words))(*words)
        self._words = (ctypes.c_uint64 * 3)(pool.address, ctypes.addressof(self._entries), len(self._names))
        self._chain = ctypes.c_uint64(ctypes.addressof(self._words))  # a call converts it quicker than an integer
        self._run, self._lock = pool.run_chain, pool.lock

    def launch(self, stream: int = 0) -> None:
        """Computes; returns when all steps are done.

        Raises:
            DeviceError: a kernel raised an exception. The steps after it did not run.
        """
        with self._lock:
            failed = self._run(self._chain)
        if failed:
            raise DeviceError(f"the kernel {self._names[failed - 1]} raised an exception")


class BoundCpuKernel:
    """See `schedsearch.device.BoundKernel`.

    Attributes:
        steps: those that a launch runs.
        entries: what `run_chain` takes for each of them.
        kept: what must live as long as somebody may launch: the block, the code and the workspaces.
    """

    def __init__(
        self,
        kernel: CpuKernel,
        chain: _Chain,
        buffers: Mapping[str, int],
        scalars: Mapping[str, float],
        prepared: Workspaces | None,
    ) -> None:
        self._plan, self.steps = kernel.artifact.plan, chain.steps
        addresses = place_buffers(self._plan, chain.steps, buffers, kernel.workspaces, prepared)
        words = first_words(chain.steps)
        self._words = (ctypes.c_uint64 * words[-1])()
        self._pointers: dict[str, list[int]] = {}
        self._scalars: dict[str, list[tuple[int, str]]] = {}
        self.entries: list[tuple[int, ...]] = []
        for step, call, word in zip(chain.steps, chain.calls, words):
            self._words[word] = chain.code.address(step)
            self._place_params(step, word + STEP_WORDS)
            self.entries.append(_entry(step, call, ctypes.addressof(self._words) + 8 * word))
        for name in self._pointers:
            self.set_pointer(name, addresses[name])
        for name in self._scalars:
            if name not in scalars:
                raise ArgumentError(f"no value for the scalar {name!r}; the kernel takes {', '.join(self._scalars)}")
            self.set_scalar(name, scalars[name])
        self.kept = self._words, kernel, prepared
        self.launch = Launches(kernel.pool, [self]).launch

    def _place_params(self, step: Step, word: int) -> None:
        """Writes a step's constants from a word on, and notes where its pointers and scalars go."""
        for param in step.params:
            if isinstance(param, Pointer):
                self._pointers.setdefault(param.buffer, []).append(word)
            elif isinstance(param, NumbaArray):
                for place, value in enumerate(param.words, word):
                    if value is None:
                        self._pointers.setdefault(param.buffer, []).append(place)
                    else:
                        self._words[place] = value
            elif isinstance(param, Scalar):
                self._scalars.setdefault(param.name, []).append((word, param.dtype))
            elif isinstance(param, (Int32, Int64)):
                self._words[word] = param.value & 0xFFFF_FFFF_FFFF_FFFF
            elif isinstance(param, Float32):
                self._words[word] = number_bits(param.value, "float32")
            elif isinstance(param, Number):
                self._words[word] = number_bits(param.value, param.dtype)
            word += word_count(param)

    def set_pointer(self, buffer: str, address: int) -> None:
        """Raises ArgumentError if the address lacks the alignment that the plan requires."""
        check_alignment(self._plan, buffer, address)
        for word in self._pointers.get(buffer, ()):
            self._words[word] = address

    def set_scalar(self, name: str, value: float) -> None:
        for word, dtype in self._scalars.get(name, ()):
            self._words[word] = number_bits(value, dtype)


def _entry(step: Step, call: int, block: int) -> tuple[int, ...]:
    items, threads = step.grid.work_items, min(step.block_threads, step.grid.work_items)
    entry = call, block, items, threads, min(items, CHUNKS_PER_THREAD * threads)
    assert len(entry) == ENTRY_WORDS
    return entry
