"""The CPU as a device: loads the objects that `backend.cpu` made and runs them on a pool of native worker threads.

It needs llvmlite, but neither Numba nor templates. For every loaded artifact it generates a small `run` function in LLVM IR.
This takes the packed argument block and a thread number, calls the steps in order on that thread's share of the work items,
and waits for the other threads at a barrier between them. A launch therefore costs one foreign call, workers never take the
interpreter lock, and steps follow each other within a microsecond.
"""

from __future__ import annotations

import ctypes
import functools
import io
import json
import mmap
import zipfile
import zlib
from collections.abc import Mapping, Sequence

from llvmlite import binding as llvm

from schedsearch.device import Workspaces, check_alignment, needed_steps, place_buffers, split_steps
from schedsearch.device.cpu_pool import Pool, barrier_address, target_machine
from schedsearch.device.memory import bytes_at
from schedsearch.device.objects import check_elf
from schedsearch.errors import ArgumentError, DeviceError
from schedsearch.launch import (
    Artifact,
    Float32,
    Int32,
    Int64,
    Literal,
    NumbaArray,
    Number,
    Param,
    Pointer,
    Scalar,
    Step,
    number_bits,
)
from schedsearch.target import Target

# The argument block, in 64-bit words: the status, the barrier's counter on a cache line of its own, and the parameters.
_STATUS_WORD, _COUNTER_WORD, _FIRST_PARAM_WORD = 0, 8, 16
_MAX_CODE_BYTES = 256 << 20


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

    def allocate(self, nbytes: int) -> int:
        """Page-aligned; the pages are zero and are mapped when first touched. A process that is forked gets a copy."""
        try:
            memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # the default is shared
        except (OSError, ValueError, OverflowError) as error:
            raise DeviceError(f"{nbytes} bytes of memory cannot be allocated: {error}") from error
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
        self._pool = pool
        self._in_place: dict[tuple[int, ...], _Chain] = {}
        # Code that does not fit is refused now. Linking all steps may never be needed where callers prepare constant ones.
        if any(step.constant for step in plan.steps):
            _objects(artifact, [step.entry for step in plan.steps])
        else:
            self._chain({})
        self.device = device
        self.workspaces = Workspaces(device, plan.workspaces)

    def bind(
        self, buffers: Mapping[str, int], scalars: Mapping[str, float], prepared: Workspaces | None = None
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
            self._in_place[needed] = _Chain(self.artifact, [steps[number] for number in needed], self._pool)
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
        return _Chain(self.artifact, self.artifact.plan.steps, self._pool)

    @functools.cached_property
    def _constant(self) -> _Chain:
        plan = self.artifact.plan
        return _Chain(self.artifact, [plan.steps[number] for number in split_steps(plan)[0]], self._pool)

    @functools.cached_property
    def _not_constant(self) -> _Chain:
        plan = self.artifact.plan
        return _Chain(self.artifact, [plan.steps[number] for number in split_steps(plan)[1]], self._pool)

    def close(self) -> None:
        self.workspaces.close()


class _Chain:
    """The linked code that runs some steps of an artifact one after the other."""

    def __init__(self, artifact: Artifact, steps: Sequence[Step], pool: Pool) -> None:
        self.steps = steps
        self.threads = max((step.block_threads for step in steps), default=1)
        pool.grow(self.threads)
        self.pool = pool
        self.params = tuple(param for step in steps for param in step.params)
        self._engine, self.run_address = _link(artifact, steps, self.threads)


class BoundCpuKernel:
    """See `schedsearch.device.BoundKernel`."""

    def __init__(
        self,
        kernel: CpuKernel,
        chain: _Chain,
        buffers: Mapping[str, int],
        scalars: Mapping[str, float],
        prepared: Workspaces | None,
    ) -> None:
        self._kernel, self._chain, self._prepared = kernel, chain, prepared  # keeps the code and the workspaces
        self._plan = kernel.artifact.plan
        addresses = place_buffers(self._plan, chain.steps, buffers, kernel.workspaces, prepared)
        self._words = (ctypes.c_uint64 * (_FIRST_PARAM_WORD + sum(map(_word_count, chain.params))))()
        self._pointers: dict[str, list[int]] = {}
        self._scalars: dict[str, list[tuple[int, str]]] = {}
        word = _FIRST_PARAM_WORD
        for param in chain.params:
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
            word += _word_count(param)
        for name in self._pointers:
            self.set_pointer(name, addresses[name])
        for name in self._scalars:
            if name not in scalars:
                raise ArgumentError(f"no value for the scalar {name!r}; the kernel takes {', '.join(self._scalars)}")
            self.set_scalar(name, scalars[name])
        block = ctypes.addressof(self._words)
        self._fixed = (chain.pool.mailboxes, chain.threads, chain.run_address, block, block + 8 * _COUNTER_WORD)
        self._dispatch, self._lock = chain.pool.dispatch, chain.pool.lock
        self._arrivals = 0
        self._arrivals_per_launch = chain.threads * max(len(chain.steps) - 1, 0)

    def launch(self, stream: int = 0) -> None:
        """Computes; returns when all steps are done.

        Raises:
            DeviceError: a kernel raised an exception.
        """
        with self._lock:
            self._dispatch(*self._fixed, self._arrivals)
            self._arrivals += self._arrivals_per_launch
        if self._words[_STATUS_WORD]:
            self._words[_STATUS_WORD] = 0
            raise DeviceError(f"a kernel of {[step.entry for step in self._chain.steps]} raised an exception")

    def set_pointer(self, buffer: str, address: int) -> None:
        """Raises ArgumentError if the address lacks the alignment that the plan requires."""
        check_alignment(self._plan, buffer, address)
        for word in self._pointers.get(buffer, ()):
            self._words[word] = address

    def set_scalar(self, name: str, value: float) -> None:
        for word, dtype in self._scalars.get(name, ()):
            self._words[word] = number_bits(value, dtype)


@functools.cache
def _host_features() -> frozenset[str]:
    return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)


def _link(artifact: Artifact, steps: Sequence[Step], threads: int) -> tuple[llvm.ExecutionEngine, int]:
    """The linked code of some steps of an artifact and the address of its `run`.

    Raises:
        DeviceError: the code is not an archive of `backend.cpu`, lacks a step, or needs instructions that this CPU lacks.
    """
    try:
        objects = _objects(artifact, [step.entry for step in steps])
        machine = target_machine(0)  # `run` does nothing but calls; optimising it would take most of the time of linking
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(_run_ir(steps, threads)), machine)
        for code in objects:
            engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        engine.finalize_object()
    except (
        zipfile.BadZipFile,
        zlib.error,
        KeyError,
        TypeError,
        ValueError,
        EOFError,
        NotImplementedError,
        RuntimeError,
    ) as error:
        # RuntimeError is LLVM's, and zipfile's for an encrypted member
        reason = f"{type(error).__name__}: {error}"
        raise DeviceError(f"the code for {artifact.plan.arch} cannot be loaded ({reason}); tune on this machine") from error
    return engine, engine.get_function_address("run")


def _objects(artifact: Artifact, entries: Sequence[str]) -> list[bytes]:
    """The object files of some entries. They are read from the archive in memory, and nothing is unpacked to the disk."""
    with zipfile.ZipFile(io.BytesIO(artifact.code)) as archive:
        size = sum(member.file_size for member in archive.infolist())
        if size > _MAX_CODE_BYTES:
            raise DeviceError(f"the code unpacks to {size} bytes; allowed: up to {_MAX_CODE_BYTES}; tune on this machine")
        missing = set(json.loads(archive.read("manifest.json"))["features"]) - _host_features()
        if missing:
            raise DeviceError(
                f"the code was made for {artifact.plan.arch}; this CPU lacks {', '.join(sorted(map(str, missing)))}; "
                "tune on this machine"
            )
        objects = [archive.read(f"{entry}.o") for entry in entries]
    for entry, code in zip(entries, objects):
        check_elf(code, f"{entry}.o of the code")
    return objects


_LLVM_TYPES = {"pointer": "i64", "i32": "i32", "i64": "i64", "f32": "float"}
_LLVM_FORMATS = {"float32": "float", "float64": "double", "bool": "i8"}


def _word_count(param: Param) -> int:
    """64-bit words of a parameter in the argument block."""
    return len(param.words) if isinstance(param, NumbaArray) else 1


def _llvm_types(param: Param) -> list[str]:
    """The LLVM types of the values that a function gets for a parameter."""
    if isinstance(param, NumbaArray):
        return ["ptr", "ptr", "i64", "i64", "ptr"] + ["i64"] * (len(param.words) - 5)
    if isinstance(param, Literal):
        return ["ptr" if isinstance(param.value, str) else "i8" if isinstance(param.value, bool) else "i64"]
    if isinstance(param, Scalar | Number):
        return [_LLVM_FORMATS.get(param.dtype) or f"i{param.dtype.removeprefix('u').removeprefix('int')}"]
    return [_LLVM_TYPES[param.kind]]


def _run_ir(steps: Sequence[Step], threads: int) -> str:
    """`run(block, thread, counter, base)`: every step on the thread's share of its work items, a barrier between steps."""
    lines = [
        "define void @run(ptr %block, i64 %thread, ptr %counter, i64 %base) {",
        "  %result = alloca [8 x i64]",
        "  %exception = alloca [8 x i64]",
    ]
    declarations = []
    word = _FIRST_PARAM_WORD
    for number, step in enumerate(steps):
        kinds = [kind for param in step.params for kind in _llvm_types(param)]
        declarations.append(f"declare i32 @{step.entry}({', '.join(['ptr', 'ptr', *kinds, 'i64', 'i64'])})")
        lines += [
            f"  %start{number} = call i64 @share(i64 %thread, i64 {step.grid.work_items}, i64 {step.block_threads})",
            f"  %after{number} = add i64 %thread, 1",
            f"  %stop{number} = call i64 @share(i64 %after{number}, i64 {step.grid.work_items}, i64 {step.block_threads})",
        ]
        values = []
        for kind in kinds:
            lines += [f"  %p{word} = getelementptr i64, ptr %block, i64 {word}", f"  %v{word} = load {kind}, ptr %p{word}"]
            values.append(f"{kind} %v{word}")
            word += 1
        arguments = ", ".join(["ptr %result", "ptr %exception", *values, f"i64 %start{number}", f"i64 %stop{number}"])
        lines += [
            f"  %any{number} = icmp slt i64 %start{number}, %stop{number}",
            f"  br i1 %any{number}, label %compute{number}, label %meet{number}",
            f"compute{number}:",
            f"  %status{number} = call i32 @{step.entry}({arguments})",
            f"  %bits{number} = zext i32 %status{number} to i64",
            f"  %old{number} = atomicrmw or ptr %block, i64 %bits{number} monotonic",
            f"  br label %meet{number}",
            f"meet{number}:",
        ]
        if threads > 1 and number < len(steps) - 1:
            lines += [
                f"  %goal{number} = add i64 %base, {threads * (number + 1)}",
                f"  call void inttoptr (i64 {barrier_address()} to ptr)(ptr %counter, i64 %goal{number})",
            ]
    return "\n".join([*declarations, _SHARE_IR, *lines, "  ret void", "}"])


# First work item of a thread: items * thread / threads, or all of them for a thread that has no share.
_SHARE_IR = """
define internal i64 @share(i64 %thread, i64 %items, i64 %threads) alwaysinline {
  %product = mul i64 %items, %thread
  %first = udiv i64 %product, %threads
  %none = icmp ugt i64 %thread, %threads
  %start = select i1 %none, i64 %items, i64 %first
  ret i64 %start
}
"""
