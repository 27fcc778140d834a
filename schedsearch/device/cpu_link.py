"""Links the objects of an artifact into this process, and makes the native function `run`, which calls them.

`run(block, thread, counter, base)` does one thread's part of a launch. It finds everything in the argument block, in 64-bit
words: for each step its function's address, its work items and its threads, then its parameters. The code of `run` therefore
depends on the types of the parameters only. Most kernels of a network share one, because compiling it takes several times as
long as linking a kernel.
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import zipfile
import zlib
from collections.abc import Sequence

from llvmlite import binding as llvm

from schedsearch.device.cpu_pool import barrier_address, target_machine
from schedsearch.device.objects import check_elf
from schedsearch.errors import DeviceError
from schedsearch.launch import Artifact, Literal, NumbaArray, Number, Param, Scalar, Step

FIRST_STEP_WORD = 16  # the words before are for the caller
STEP_WORDS = 3  # of a step, before its parameters
_MAX_CODE_BYTES = 256 << 20
_LLVM_TYPES = {"pointer": "i64", "i32": "i32", "i64": "i64", "f32": "float"}
_LLVM_FORMATS = {"float32": "float", "float64": "double", "bool": "i8"}


class LinkedCode:
    """The machine code of an artifact's steps in this process.

    Raises:
        DeviceError: the code is not an archive of `backend.cpu`, lacks a step, or needs instructions that this CPU lacks.
    """

    def __init__(self, artifact: Artifact) -> None:
        entries = list(dict.fromkeys(step.entry for step in artifact.plan.steps))
        try:
            self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
            for code in _objects(artifact, entries):
                self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            self._engine.finalize_object()
            self._addresses = {entry: self._engine.get_function_address(entry) for entry in entries}
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
            raise DeviceError(
                f"the code for {artifact.plan.arch} cannot be loaded ({reason}); tune on this machine"
            ) from error
        missing = [entry for entry, address in self._addresses.items() if not address]
        if missing:
            raise DeviceError(f"the code for {artifact.plan.arch} lacks {', '.join(missing)}; tune on this machine")

    def step_words(self, step: Step) -> tuple[int, int, int]:
        """The `STEP_WORDS` words of a step."""
        return self._addresses[step.entry], step.grid.work_items, step.block_threads


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


@functools.cache
def _host_features() -> frozenset[str]:
    return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)


def word_count(param: Param) -> int:
    """64-bit words of a parameter in the argument block."""
    return len(param.words) if isinstance(param, NumbaArray) else 1


def first_words(steps: Sequence[Step]) -> list[int]:
    """The word at which each step begins in the argument block, and the number of all words."""
    counts = [STEP_WORDS + sum(map(word_count, step.params)) for step in steps]
    return list(itertools.accumulate(counts, initial=FIRST_STEP_WORD))


def block_words(steps: Sequence[Step]) -> int:
    """64-bit words of the argument block."""
    return first_words(steps)[-1]


def run_address(steps: Sequence[Step], threads: int) -> int:
    """The address of the function `run` for steps with such parameters, on this many threads. It stays for good."""
    return _run(tuple(tuple(kind for param in step.params for kind in _llvm_types(param)) for step in steps), threads)[1]


@functools.cache
def _run(signatures: tuple[tuple[str, ...], ...], threads: int) -> tuple[llvm.ExecutionEngine, int]:
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(_run_ir(signatures, threads)), target_machine())
    engine.finalize_object()
    return engine, engine.get_function_address("run")


def _llvm_types(param: Param) -> list[str]:
    """The LLVM types of the values that a function gets for a parameter."""
    if isinstance(param, NumbaArray):
        return ["ptr", "ptr", "i64", "i64", "ptr"] + ["i64"] * (len(param.words) - 5)
    if isinstance(param, Literal):
        return ["ptr" if isinstance(param.value, str) else "i8" if isinstance(param.value, bool) else "i64"]
    if isinstance(param, Scalar | Number):
        return [_LLVM_FORMATS.get(param.dtype) or f"i{param.dtype.removeprefix('u').removeprefix('int')}"]
    return [_LLVM_TYPES[param.kind]]


def _run_ir(signatures: Sequence[Sequence[str]], threads: int) -> str:
    """`run(block, thread, counter, base)`: every step on the thread's share of its work items, a barrier between steps.

    Args:
        signatures: of each step, the LLVM types of its values.
    """
    lines = [
        "define void @run(ptr %block, i64 %thread, ptr %counter, i64 %base) {",
        "  %result = alloca [8 x i64]",
        "  %exception = alloca [8 x i64]",
        "  %after = add i64 %thread, 1",
    ]
    word = FIRST_STEP_WORD

    def load(kind: str) -> str:
        nonlocal word
        lines.extend((f"  %p{word} = getelementptr i64, ptr %block, i64 {word}", f"  %v{word} = load {kind}, ptr %p{word}"))
        word += 1
        return f"{kind} %v{word - 1}"

    for number, kinds in enumerate(signatures):
        function, items, among = load("ptr"), load("i64"), load("i64")
        lines += [
            f"  %start{number} = call i64 @share(i64 %thread, {items}, {among})",
            f"  %stop{number} = call i64 @share(i64 %after, {items}, {among})",
        ]
        values = [load(kind) for kind in kinds]
        arguments = ", ".join(["ptr %result", "ptr %exception", *values, f"i64 %start{number}", f"i64 %stop{number}"])
        lines += [
            f"  %any{number} = icmp slt i64 %start{number}, %stop{number}",
            f"  br i1 %any{number}, label %compute{number}, label %meet{number}",
            f"compute{number}:",
            f"  %status{number} = call i32 {function.removeprefix('ptr ')}({arguments})",
            f"  %bits{number} = zext i32 %status{number} to i64",
            f"  %old{number} = atomicrmw or ptr %block, i64 %bits{number} monotonic",
            f"  br label %meet{number}",
            f"meet{number}:",
        ]
        if threads > 1 and number < len(signatures) - 1:
            lines += [
                f"  %goal{number} = add i64 %base, {threads * (number + 1)}",
                f"  call void inttoptr (i64 {barrier_address()} to ptr)(ptr %counter, i64 %goal{number})",
            ]
    return "\n".join([_SHARE_IR, *lines, "  ret void", "}"])


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
