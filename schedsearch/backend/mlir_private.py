"""Which private names of numba-cuda-mlir this package uses: all of them are here.

numba-cuda-mlir has a public function that makes PTX, but it asks a driver for the GPU at hand, links a cubin that nobody
needs, and does not inline plain functions. What is here does the same as its own `compile_mlir` and `optimize`, without
that. Nothing of the package is replaced, but for the compute capability that it would ask a driver for.
`tests/test_mlir_private.py` fails if a name is gone or takes other parameters.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from schedsearch.backend.numba_private import Core

CONVERGENT = "/* convergent */"
"""Ends the text of an operation that all threads of a warp execute together."""

CORE: Core = "numba_cuda_mlir.numba_cuda.core"
"""The package of its passes, which are a copy of Numba-CUDA's."""

USED: Mapping[str, tuple[str, ...]] = {
    "numba_cuda_mlir.descriptor.mlir_target.ensure_initialized": (),
    "numba_cuda_mlir.install_registry.register_lowering": (),
    "numba_cuda_mlir.lowering_utilities.context.get_context": (),
    "numba_cuda_mlir.lowering_utilities.convert": ("value", "target_type", "signed"),
    "numba_cuda_mlir.mlir_compiler.get_compiler_class": ("targetoptions", "launch_config_tracker"),
    "numba_cuda_mlir.mlir_optimization._call_llvm70_capi": ("module", "target_options", "gen_lto", "gen_llvmir"),
    "numba_cuda_mlir.mlir_optimization._compile_to_ptx": ("llvm_ir", "cc", "libdevice", "nvvm_opts"),
    "numba_cuda_mlir.mlir_optimization.get_base_pipeline": (),
    "numba_cuda_mlir.numba_cuda.compiler.compile_extra": (
        "typingctx", "targetctx", "func", "args", "return_type", "flags", "locals", "library", "pipeline_class",
        "call_conv", "abi_info",
    ),
    "numba_cuda_mlir.numba_cuda.core.target_extension.target_override": ("name",),
    "numba_cuda_mlir.numba_cuda.cudadrv.nvvm._get_datalayout": (),
    "numba_cuda_mlir.optimization.run_pre_codegen_patterns": ("module",),
    "numba_cuda_mlir.numba_cuda.core.inline_closurecall.dead_code_elimination": (
        "func_ir", "typemap", "alias_map", "arg_aliases",
    ),
}  # fmt: skip
"""Functions that are called, and their parameters."""


def named(name: str) -> Any:
    """A name of the package, by its path."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


@contextlib.contextmanager
def for_device(cc: tuple[int, int]) -> Iterator[None]:
    """The package takes a GPU of compute capability `cc` to be there."""
    tools: Any = importlib.import_module("numba_cuda_mlir.tools")
    own = tools._cached_cc
    tools._cached_cc = cc
    try:
        yield
    finally:
        tools._cached_cc = own


def ptx_of(
    function: Callable[..., None],
    argument_types: tuple[Any, ...],
    cc: tuple[int, int],
    launch_bounds: tuple[int, int],
    compiler_class: Callable[[Any], Any],
    options: Mapping[str, object],
    *,
    fastmath: bool,
) -> str:
    """The PTX of a kernel.

    Args:
        argument_types: its own types.
        launch_bounds: threads per block, blocks per multiprocessor.
        compiler_class: makes the class that compiles from the package's own.
        options: for NVVM.
        fastmath: of the operations.
    """
    chip = f"sm_{cc[0]}{cc[1]}"
    lock = named("numba_cuda_mlir.numba_cuda.core.compiler_lock.global_compiler_lock")
    with lock, for_device(cc), named("numba_cuda_mlir.lowering_utilities.context.get_context")():
        wanted = {"chip": chip, "launch_bounds": launch_bounds, "opt_level": 3, "fastmath": fastmath}
        module = _module(function, argument_types, wanted, compiler_class)
        return _nvvm(module, cc, options)


def _nvvm(module: Any, cc: tuple[int, int], options: Mapping[str, object]) -> str:
    """The PTX of a lowered module."""
    chip = f"sm_{cc[0]}{cc[1]}"
    text = named("numba_cuda_mlir.mlir_optimization._call_llvm70_capi")(module, {"chip": chip}, gen_llvmir=True)
    nvvm: Any = importlib.import_module("numba_cuda_mlir.numba_cuda.cudadrv.nvvm")
    options = {"opt": 3, "arch": f"compute_{cc[0]}{cc[1]}", **options}
    text = _accepted(text.decode(), nvvm._get_datalayout()).encode()
    ptx: bytes = named("numba_cuda_mlir.mlir_optimization._compile_to_ptx")(text, chip[3:], nvvm.LibDevice(), options)
    return ptx.decode().strip("\0").strip()


def _accepted(text: str, layout: str) -> str:
    """LLVM's text as NVVM accepts it: with its own layout of data, and shared memory without an initial value. Operations
    that say so are convergent, which MLIR cannot say of inline PTX.

    Atomic operations on an array whose memory is not in its type take it to be global, also if it is shared and was only
    given another name, for which no address is right. They get generic pointers, whose memory NVVM finds out.
    """
    text = re.sub(r'(?m)^target datalayout = ".*"$', f'target datalayout = "{layout}"', text)
    text = re.sub(r"(?m)^(@.* addrspace\(3\) global .*) zeroinitializer\b", r"\1 undef", text)
    text = text.replace(" addrspace(1)*", "*")
    text = re.sub(r"(?m)= addrspacecast ([^%@\n]+\*) (\S+) to \1$", r"= bitcast \1 \2 to \1", text)
    text, count = re.subn(rf"(?m)^(.* asm .*){re.escape(CONVERGENT)}(.*\))$", r"\1\2 #0", text)
    return f"{text}\nattributes #0 = {{ convergent }}\n" if count else text


def _module(
    function: Callable[..., None],
    argument_types: tuple[Any, ...],
    wanted: dict[str, object],
    compiler_class: Callable[[Any], Any],
) -> Any:
    """The lowered MLIR module."""
    target: Any = importlib.import_module("numba_cuda_mlir.descriptor").mlir_target
    target.ensure_initialized()
    named("numba_cuda_mlir.install_registry.register_lowering")()
    flags = named("numba_cuda_mlir.numba_cuda.flags.CUDAFlags")()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model = "numpy"
    flags.nrt = flags.lto = False
    flags.nvvm_options = {}
    override = named("numba_cuda_mlir.numba_cuda.core.target_extension.target_override")
    location = named("numba_cuda_mlir._mlir.ir.Location").unknown
    with override("numba_cuda_mlir"), location():
        made = named("numba_cuda_mlir.numba_cuda.compiler.compile_extra")(
            target.typing_context, target.target_context, function, argument_types, None, flags, {},
            pipeline_class=compiler_class(named("numba_cuda_mlir.mlir_compiler.get_compiler_class")(wanted)),
        )  # fmt: skip
    module = made.metadata["mlir_module"]
    pipeline = named("numba_cuda_mlir.mlir_optimization.get_base_pipeline")()
    named("numba_cuda_mlir._mlir.passmanager.PassManager").parse(pipeline).run(module.operation)
    named("numba_cuda_mlir.optimization.run_pre_codegen_patterns")(module)
    return module
