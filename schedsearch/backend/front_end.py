"""Python kernel -> PTX by Numba-CUDA and NVVM, with one run of Numba for all kernels of the same shape.

Numba's part (bytecode, types, LLVM IR) is four fifths of the time that a kernel takes to build. A candidate's kernel mostly
differs from an earlier one in captured numbers and in the texts of device operations only, and Numba looks at neither. So it
is run once with placeholders for them, and its LLVM IR is kept. The next kernel puts its own numbers and texts into
that: NVVM then sees what it would have seen without the detour, and optimises for these numbers.

What Numba does look at is named by `KernelStep.shaped_by`. A placeholder refuses to be compared or to count as true or
false, so that a name forgotten there never makes a wrong kernel: a branch is not left out until NVVM does it, and where
Numba needs a number the kernel is compiled on its own.

Processes that build for one run share what Numba made through a folder (`share_through`).
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

from numba import cuda, types
from numba.cuda import compiler
from numba.cuda.cudadrv import nvvm
from numba.extending import typeof_impl

from schedsearch.backend.ops import Operands, operands_and_text, stand_in

_KEPT_SHAPES = 128  # of some 200 KB of text each
_PLACEHOLDER = re.compile(r"@\{([^}]*)\}@")
_THREADS, _BLOCKS = "#threads", "#blocks"  # launch bounds; no variable has such a name
_shared_folder: Path | None = None


def share_through(folder: Path) -> None:
    """From now on Numba's results are taken from `folder` where another process has put them, and put there.

    Only for processes that run the same sources: of what a kernel refers to in its module, nothing is compared.
    """
    global _shared_folder
    _shared_folder = folder


def compile_to_ptx(
    function: Callable[..., None],
    signature: tuple[Any, ...],
    cc: tuple[int, int],
    launch_bounds: tuple[int, int],
    shaped_by: frozenset[str] | None,
) -> str:
    """The PTX of a kernel.

    Args:
        function: captures what it needs, and has no default arguments.
        signature: Numba types of its arguments.
        cc: compute capability.
        launch_bounds: threads a block, blocks a multiprocessor.
        shaped_by: as in `KernelStep`.

    Raises:
        Exception: whatever Numba or NVVM raise.
    """
    if shaped_by is not None:
        try:
            shape, filling = _take_apart(function, signature, cc, launch_bounds, shaped_by)
            pieces = _front_end(shape)
        except Exception:  # of a kernel that has no shape to share: what is wrong with it, if anything, shows below
            pass
        else:
            text = "".join(filling[piece] if number % 2 else piece for number, piece in enumerate(pieces))
            ptx: bytes = nvvm.compile_ir(text, opt=3, arch=f"compute_{cc[0]}{cc[1]}")
            return ptx.decode().strip("\0").strip()
    ptx_text, _ = cuda.compile(function, signature, device=False, abi="numba", cc=cc, launch_bounds=launch_bounds)
    return str(ptx_text)


class _Placeholder:
    """A captured number (Numba type `type_`) whose value is filled in later."""

    def __init__(self, name: str, type_: Any) -> None:
        self.name, self.type_ = name, type_

    def __str__(self) -> str:
        return f"@{{{self.name}}}@"  # llvmlite prints a constant by str()

    def __bool__(self) -> bool:
        raise TypeError(f"{self.name} is not known yet")

    def __eq__(self, other: object) -> bool:
        if self is not other:
            raise TypeError(f"{self.name} is not known yet")
        return True

    def __hash__(self) -> int:
        return id(self)


@typeof_impl.register(_Placeholder)
def _typeof_placeholder(value: _Placeholder, context: Any) -> Any:
    return value.type_


@dataclass(frozen=True)
class _Shape:
    """What Numba's result depends on; `captured` has numbers' types, operations' operands, and of others type and value."""

    code: Any
    module: int
    signature: tuple[Any, ...]
    cc: tuple[int, int]
    captured: tuple[Any, ...]
    function: Callable[..., None] = field(compare=False)  # any one of this shape


def _take_apart(
    function: Any, signature: tuple[Any, ...], cc: tuple[int, int], launch_bounds: tuple[int, int], shaped_by: frozenset[str]
) -> tuple[_Shape, dict[str, str]]:
    """A kernel's shape, and what the placeholders of its LLVM IR stand for."""
    captured: list[Any] = []
    filling = {_THREADS: str(launch_bounds[0]), _BLOCKS: str(launch_bounds[1])}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        value = cell.cell_contents
        declared = operands_and_text(value)
        if declared is not None:
            captured.append(declared[0])
            filling[name] = declared[1]
        elif name not in shaped_by and type(value) is bool:
            captured.append(types.boolean)
            filling[name] = str(value).lower()
        elif name not in shaped_by and type(value) is int and -(2**63) <= value < 2**64:
            captured.append(types.int64 if value < 2**63 else types.uint64)  # as Numba types it
            filling[name] = str(value)
        else:
            captured.append((type(value), value))
    return _Shape(function.__code__, id(function.__globals__), signature, cc, tuple(captured), function), filling


@functools.lru_cache(_KEPT_SHAPES)
def _front_end(shape: _Shape) -> list[str]:
    """The LLVM IR in pieces: text and names of placeholders by turns."""
    key = _shared_folder and _key(shape)
    return _PLACEHOLDER.split(_run_once(shape, _shared_folder / key) if _shared_folder and key else _run_numba(shape))


def _run_once(shape: _Shape, path: Path) -> str:
    """What `path` holds, written by the process that is first; another waits for it, or takes over when it dies."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            unfinished = path.with_suffix(".part")
            unfinished.write_text(_run_numba(shape))
            unfinished.replace(path)
    return path.read_text()


def _key(shape: _Shape) -> str | None:
    """A name for the shape that all processes give it, or None when it captures what has none."""
    try:
        module = shape.function.__module__
        text = repr((module, _stable(shape.code), list(map(str, shape.signature)), shape.cc, _stable(shape.captured)))
    except TypeError:
        return None
    return hashlib.sha256(text.encode()).hexdigest()


def _stable(value: Any) -> Any:
    """Something whose repr is the same in every process. Raises TypeError when there is none."""
    if isinstance(value, CodeType):
        return value.co_qualname, value.co_code, value.co_names, value.co_freevars, _stable(value.co_consts)
    if isinstance(value, tuple):
        return tuple(map(_stable, value))
    if isinstance(value, types.Type | type):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str | Operands):
        return value
    raise TypeError(f"{type(value).__name__} has no stable name")


def _run_numba(shape: _Shape) -> str:
    """The LLVM IR with placeholders."""
    function: Any = shape.function
    cells = []
    for name, what, cell in zip(function.__code__.co_freevars, shape.captured, function.__closure__ or ()):
        value = cell.cell_contents
        if isinstance(what, Operands):
            value = stand_in(what, str(_Placeholder(name, None)))
        elif isinstance(what, types.Type):
            value = _Placeholder(name, what)
        cells.append(CellType(value))
    open_function = FunctionType(function.__code__, function.__globals__, function.__name__, None, tuple(cells))
    # Numba has no public way to its LLVM IR. Should this one change, kernels are compiled one by one, and a test fails.
    library, _ = compiler._compile_pyfunc_with_fixup(
        open_function,
        shape.signature,
        device=False,
        abi="numba",
        cc=shape.cc,
        launch_bounds=(_Placeholder(_THREADS, None), _Placeholder(_BLOCKS, None)),
    )
    (text,) = library.llvm_strs
    return str(text)
