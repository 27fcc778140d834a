"""Python kernel -> PTX by Numba-CUDA and NVVM, with one run of Numba for all kernels of the same shape.

Numba's part (bytecode, types, LLVM IR) takes four fifths of the build time of a kernel. A candidate's kernel usually
differs from an earlier one only in captured numbers and in the strings of device operations, and Numba looks at neither.
Numba therefore runs once with placeholders for them, and its LLVM IR is kept. The next kernel puts its numbers and strings
into that IR. NVVM sees the same input as without the placeholders, and optimises for these numbers.

`KernelStep.shaped_by` names the numbers that Numba does look at. A placeholder cannot be compared or used as a truth
value, so that a forgotten name never makes a wrong kernel: a branch stays in the code until NVVM removes it, and if
Numba needs a number, the kernel is compiled on its own.

Plain functions that a kernel captures are compiled into it (`inlining`). Their captured names are treated like those of the
kernel itself: the variable `stages` of the captured function `ring` is called "ring.stages".

Processes share Numba's results with other processes of their run and with later runs (`sharing`).

See docs/decisions/006-one-front-end-run.md.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import CellType, FunctionType
from typing import Any

from numba import types
from numba.cuda import compiler
from numba.cuda.core.callconv import CUDACallConv
from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.cuda.cudadrv import nvvm
from numba.cuda.cudadrv.libs import get_cudalib, get_libdevice
from numba.cuda.descriptor import cuda_target
from numba.cuda.flags import CUDAFlags
from numba.cuda.utils import numba_target_override
from numba.extending import typeof_impl

from schedsearch.backend.front_ends import Ptx
from schedsearch.backend.inlining import inlining
from schedsearch.backend.kernel_identity import UnidentifiedError, digest, surroundings
from schedsearch.backend.numba_private import for_device
from schedsearch.backend.ops import Operands, operands_and_text, stand_in
from schedsearch.backend.sharing import Key, piece
from schedsearch.backend.signatures import signature
from schedsearch.identity import sha256_hex
from schedsearch.template import KernelStep

_KEPT_SHAPES = 128  # of some 200 KB of text each
_PLACEHOLDER = re.compile(r"@\{([^}]*)\}@")
_THREADS, _BLOCKS = "#threads", "#blocks"  # launch bounds; no variable has such a name
_NEXT_MODULE = "\n; -- next module --\n"  # between LLVM modules: a kernel's own, then those of functions that Numba adds
_Compiler = inlining(compiler.CUDACompiler, "numba.cuda.core")


def to_ptx(step: KernelStep, cc: tuple[int, int]) -> Ptx:
    """The PTX of a step; see `front_ends.FrontEnd`."""
    bounds = step.block_threads, step.min_blocks_per_sm
    return compile_to_ptx(
        step.function, signature(step), cc, bounds, step.shaped_by, fastmath=step.fastmath, contract=step.contract
    )


def libraries() -> list[str]:
    """The files of NVVM and of its library."""
    return [str(get_cudalib("nvvm")), str(get_libdevice())]


def compile_to_ptx(
    function: Callable[..., None],
    signature: tuple[object, ...],
    cc: tuple[int, int],
    launch_bounds: tuple[int, int],
    shaped_by: frozenset[str] | None,
    *,
    fastmath: bool = False,
    contract: bool = True,
) -> Ptx:
    """The PTX of a kernel.

    Args:
        function: the kernel; it captures what it needs and has no default arguments.
        signature: Numba types of its arguments.
        cc: compute capability.
        launch_bounds: threads per block, blocks per multiprocessor.
        shaped_by, fastmath, contract: as in `KernelStep`.

    Raises:
        ValueError: the kernel, or a function that it captures, is recursive or captures a name without a value; or
            `shaped_by` names a variable that is not captured.
        Exception: any error of Numba or NVVM.
    """
    captured = dict(_captured(function))
    if shaped_by is not None and not fastmath:
        _check_names(function, shaped_by, captured)
        shape, filling = _take_apart(function, signature, cc, launch_bounds, shaped_by)
        pieces = _front_end(shape) if _hashable(shape) else None
        if pieces is not None:
            text = "".join(filling[piece] if number % 2 else piece for number, piece in enumerate(pieces))
            return Ptx(_to_ptx(text, cc, contract=contract), shared=True)
    text = _lower(function, signature, cc, launch_bounds, fastmath)
    return Ptx(_to_ptx(text, cc, fastmath=fastmath, contract=contract), shared=False)


def _to_ptx(modules: str, cc: tuple[int, int], *, fastmath: bool = False, contract: bool = True) -> str:
    options = {**({"fastmath": True} if fastmath else {}), **({} if contract else {"fma": False})}
    ptx: bytes = nvvm.compile_ir(modules.split(_NEXT_MODULE), opt=3, arch=f"compute_{cc[0]}{cc[1]}", **options)
    return ptx.decode().strip("\0").strip()


class _Placeholder:
    """A captured number (Numba type `type_`) whose value is filled in later."""

    def __init__(self, name: str, type_: object) -> None:
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
def _typeof_placeholder(value: _Placeholder, context: object) -> Any:
    return value.type_


@dataclass(frozen=True)
class _Shape:
    """Everything that Numba's result depends on.

    `captured` has an entry for each captured name, in order: the type of a number that gets a placeholder, the operands of
    a device operation, a `_Function`, or the type and value of anything else.
    """

    code: Any
    module: int
    signature: tuple[Any, ...]
    cc: tuple[int, int]
    captured: tuple[Any, ...]
    function: Callable[..., None] = field(compare=False)  # any one of this shape


@dataclass(frozen=True)
class _Function:
    """A captured function. `captured` is as in `_Shape` and includes its default arguments.

    `module` tells modules of one process apart. Keys, which other processes must be able to make too, have its name instead.
    """

    code: Any
    module: int = field(metadata={"in_keys": False})
    module_name: str
    defaults: Any
    captured: tuple[Any, ...]


def _captured(function: Any, path: tuple[Any, ...] = (), prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of what a function captures, and of what the captured functions capture.

    Raises:
        ValueError: a function captures itself, or a name without a value.
    """
    path = (*path, function)
    for own, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        name = prefix + own
        try:
            value = cell.cell_contents
        except ValueError:
            raise ValueError(f"{name} is captured before it has a value; assign it before returning the kernel") from None
        yield name, value
        if isinstance(value, FunctionType):
            if value in path:  # not by its code, which functions of one factory share
                raise ValueError(f"{name} calls itself; functions are compiled into the kernel: write a loop instead")
            yield from _captured(value, path, name + ".")


def _check_names(function: Any, shaped_by: frozenset[str], captured: Mapping[str, Any]) -> None:
    if unknown := sorted(shaped_by - set(captured)):
        raise ValueError(
            f"shaped_by of {function.__name__} names {', '.join(unknown)}, which it does not capture; captured: "
            f"{', '.join(sorted(captured)) or 'nothing'}"
        )


def _take_apart(
    function: Any, signature: tuple[Any, ...], cc: tuple[int, int], launch_bounds: tuple[int, int], shaped_by: frozenset[str]
) -> tuple[_Shape, dict[str, str]]:
    """A kernel's shape, and what the placeholders of its LLVM IR stand for."""
    filling = {_THREADS: str(launch_bounds[0]), _BLOCKS: str(launch_bounds[1])}
    captured = _parts(function, shaped_by, "", filling)
    return _Shape(function.__code__, id(function.__globals__), signature, cc, captured, function), filling


def _parts(function: Any, shaped_by: frozenset[str], prefix: str, filling: dict[str, str]) -> tuple[Any, ...]:
    """`_Shape.captured` of a function; adds to `filling`."""
    parts: list[Any] = []
    for own, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        name, value = prefix + own, cell.cell_contents
        declared = operands_and_text(value)
        if declared is not None:
            parts.append(declared[0])
            filling[name] = declared[1]
        elif isinstance(value, FunctionType):
            defaults = _typed((value.__defaults__, tuple((value.__kwdefaults__ or {}).items())))
            inner = _parts(value, shaped_by, name + ".", filling)
            parts.append(_Function(value.__code__, id(value.__globals__), value.__module__, defaults, inner))
        elif name not in shaped_by and type(value) is bool:
            parts.append(types.boolean)
            filling[name] = str(value).lower()
        elif name not in shaped_by and type(value) is int and -(2**63) <= value < 2**64:
            parts.append(types.int64 if value < 2**63 else types.uint64)  # as Numba types it
            filling[name] = str(value)
        else:
            parts.append(_typed(value))
    return tuple(parts)


def _typed(value: object) -> Any:
    """The value with its type: it differs for 1, True and 1.0, and for 0.0 and -0.0."""
    if isinstance(value, tuple):
        return type(value), tuple(map(_typed, value))
    return (float, value.hex()) if type(value) is float else (type(value), value)


def _hashable(shape: _Shape) -> bool:
    try:
        hash(shape)
    except TypeError:  # an array, say
        return False
    return True


@functools.lru_cache(_KEPT_SHAPES)
def _front_end(shape: _Shape) -> list[str] | None:
    """The LLVM IR in pieces: text alternates with names of placeholders.

    None if Numba refuses the kernel with placeholders: either it needs a value, or the kernel has an error, which
    appears when it is compiled on its own.
    """
    key = _key(shape)
    text = (piece(key, lambda: _tried(shape)) if key is not None else _tried(shape)).decode()
    return _PLACEHOLDER.split(text) if text else None


def _tried(shape: _Shape) -> bytes:
    """The LLVM IR; empty if Numba refuses the kernel with placeholders, so that no other process tries again."""
    try:
        return _run_numba(shape).encode()
    except Exception:
        return b""


def _key(shape: _Shape) -> Key | None:
    """A name for the shape that is the same in all processes, or None if it captures something that has none."""
    try:
        own = digest(shape.function.__module__, shape.code, list(map(str, shape.signature)), shape.cc, shape.captured)
    except UnidentifiedError:
        return None
    functions = [shape.function, *(value for _, value in _captured(shape.function) if isinstance(value, FunctionType))]
    try:
        return Key(sha256_hex(" ".join([own, *map(surroundings, functions)])), lasting=True)
    except UnidentifiedError:
        return Key(own, lasting=False)


def _run_numba(shape: _Shape) -> str:
    """The LLVM IR with placeholders."""
    bounds = _Placeholder(_THREADS, None), _Placeholder(_BLOCKS, None)
    return _lower(_opened(shape.function, shape.captured, ""), shape.signature, shape.cc, bounds)


def _opened(function: Any, parts: tuple[Any, ...], prefix: str) -> Any:
    """The function with placeholders for what it captures, as `parts` says."""
    cells = []
    for own, part, cell in zip(function.__code__.co_freevars, parts, function.__closure__ or ()):
        name, value = prefix + own, cell.cell_contents
        if isinstance(part, Operands):
            value = stand_in(part, str(_Placeholder(name, None)))
        elif isinstance(part, _Function):
            value = _opened(value, part.captured, name + ".")
        elif isinstance(part, types.Type):
            value = _Placeholder(name, part)
        cells.append(CellType(value))
    defaults = function.__defaults__
    opened = FunctionType(function.__code__, function.__globals__, function.__name__, defaults, tuple(cells))
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


def _lower(
    function: Any, signature: tuple[Any, ...], cc: tuple[int, int], launch_bounds: tuple[Any, Any], fastmath: bool = False
) -> str:
    """A kernel's LLVM modules.

    Numba has no public way to get them. This does the same as its own `compile`, with another pipeline.
    """
    flags = CUDAFlags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model = "numpy"
    if fastmath:
        flags.fastmath = True
    flags.compute_capability = cc
    context = cuda_target.target_context
    with global_compiler_lock, numba_target_override(), for_device(cc):
        result = compiler.compile_extra(
            cuda_target.typing_context, context, function, signature, None, flags, {},
            pipeline_class=_Compiler, call_conv=CUDACallConv(context), abi_info={},
        )  # fmt: skip
        if result.signature.return_type != types.void:
            raise TypeError(f"a kernel returns nothing, {function.__name__} returns {result.signature.return_type}")
        result.library.finalize()
        kernel = result.library.get_function(result.fndesc.llvm_func_name)
        compiler.kernel_fixup(kernel, False)
        nvvm.set_launch_bounds(kernel, launch_bounds)
        return _NEXT_MODULE.join(result.library.llvm_strs)
