"""Links the objects of an artifact into this process, and makes the native functions that call their steps.

`call(block, start, stop)` computes some work items of a step. It finds everything in the step's block, in 64-bit words: the
address of its function, then its parameters. The code of `call` therefore depends on the types of the parameters only. Most
kernels of a network share one, because compiling it takes several times as long as linking a kernel.
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

from schedsearch.device.cpu_native import target_machine
from schedsearch.device.objects import check_elf
from schedsearch.errors import DeviceError
from schedsearch.launch import Artifact, Literal, NumbaArray, Number, Param, Scalar, Step

STEP_WORDS = 1  # of a step, before its parameters
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

    def address(self, step: Step) -> int:
        """The address of a step's function: the first word of its block."""
        return int(self._addresses[step.entry])


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
    """The word at which the block of each step begins among those of all, and the number of all words."""
    counts = [STEP_WORDS + sum(map(word_count, step.params)) for step in steps]
    return list(itertools.accumulate(counts, initial=0))


def call_address(step: Step) -> int:
    """The address of the function `call` for a step with such parameters. It stays for good."""
    return _call(tuple(kind for param in step.params for kind in _llvm_types(param)))[1]


@functools.cache
def _call(kinds: tuple[str, ...]) -> tuple[llvm.ExecutionEngine, int]:
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(_call_ir(kinds)), target_machine())
    engine.finalize_object()
    return engine, engine.get_function_address("call")


def _llvm_types(param: Param) -> list[str]:
    """The LLVM types of the values that a function gets for a parameter."""
    if isinstance(param, NumbaArray):
        return ["ptr", "ptr", "i64", "i64", "ptr"] + ["i64"] * (len(param.words) - 5)
    if isinstance(param, Literal):
        return ["ptr" if isinstance(param.value, str) else "i8" if isinstance(param.value, bool) else "i64"]
    if isinstance(param, Scalar | Number):
        return [_LLVM_FORMATS.get(param.dtype) or f"i{param.dtype.removeprefix('u').removeprefix('int')}"]
    return [_LLVM_TYPES[param.kind]]


def _call_ir(kinds: Sequence[str]) -> str:
    """`call(block, start, stop)` for values of these LLVM types. It returns what the step's function returns."""
    lines = [
        "define i32 @call(ptr %block, i64 %start, i64 %stop) {",
        "  %result = alloca [8 x i64]",
        "  %exception = alloca [8 x i64]",
    ]
    for word, kind in enumerate(["ptr", *kinds]):
        lines += [f"  %p{word} = getelementptr i64, ptr %block, i64 {word}", f"  %v{word} = load {kind}, ptr %p{word}"]
    values = [f"{kind} %v{word}" for word, kind in enumerate(kinds, STEP_WORDS)]
    arguments = ", ".join(["ptr %result", "ptr %exception", *values, "i64 %start", "i64 %stop"])
    return "\n".join([*lines, f"  %status = call i32 %v0({arguments})", "  ret i32 %status", "}"])
