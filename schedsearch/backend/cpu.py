"""Python kernel -> LLVM -> ELF object for the CPU at hand, with Numba as the front end.

Every step becomes one function with C linkage, `i32 entry(ptr result, ptr exception, params..., i64 start, i64 stop)`:
Numba's own native convention, whose first two arguments are scratch and whose result is 0 unless the kernel raised. The
objects need nothing of Numba or Python when they run, which this module checks, so that loading them takes LLVM only.

Numba's compiler pipeline is not a public interface. Only this file uses it (checked with 0.63 to 0.68).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import io
import json
import time
import zipfile
from typing import Any

from llvmlite import binding as llvm

from schedsearch.backend.base import BuildResult, CompileError, message_once
from schedsearch.backend.inlining import inlining
from schedsearch.backend.kernel_identity import UnidentifiedError, digest
from schedsearch.backend.numba_private import link_and_optimise
from schedsearch.backend.sharing import Key, check_may_build, piece
from schedsearch.backend.signatures import signature
from schedsearch.launch import Artifact, LaunchPlan, Step, TensorMap
from schedsearch.measurement import Resources
from schedsearch.template import KernelSource, KernelStep

# No nnan or ninf: poisoned outputs must stay NaN. No reassoc: a kernel's order of summation is part of its schedule.
FASTMATH = frozenset({"contract", "nsz"})
_FORBIDDEN_PREFIXES = ("Py", "_Py", "NRT_", "numba_")


def toolchain_cpu() -> dict[str, str]:
    """Versions of everything that shapes CPU machine code."""
    return {
        "numba": importlib.metadata.version("numba"),
        "llvm": ".".join(map(str, llvm.llvm_version_info)),
        "cpu": llvm.get_host_cpu_name(),
    }


def compile_cpu(source: KernelSource) -> BuildResult:
    """Compiles every step for the processor that this process runs on.

    The code is a zip archive: `manifest.json` ({"cpu": LLVM's name, "features": what LLVM may have used}) and one ELF object
    per step, named `<entry>.o`.

    Raises:
        CompileError: Numba cannot type or lower a kernel, or the kernel calls into the Python runtime (it raises an
            exception, allocates or prints).
    """
    begin = time.perf_counter()
    steps, objects, shared = [], {}, True
    for number, step in enumerate(source.steps):
        entry = f"step{number}_{''.join(c if c.isalnum() else '_' for c in step.function.__name__)}"
        key = _key(step, entry)
        shared = shared and key is not None
        objects[entry] = (
            _object_code(step, entry) if key is None else piece(key, functools.partial(_object_code, step, entry))
        )
        steps.append(
            Step(
                entry, step.launch_params, step.grid, step.block_threads,
                dynamic_shared_bytes=step.dynamic_shared_bytes, constant=step.constant, restores=step.restores,
            )
        )  # fmt: skip
    plan = LaunchPlan(
        kind="cpu",
        arch=llvm.get_host_cpu_name(),
        steps=tuple(steps),
        workspaces=dict(source.workspaces),
        alignments=dict(source.alignments),
    )
    artifact = Artifact(_archive(objects), plan)
    return BuildResult(
        artifact=artifact,
        resources=Resources(code_bytes=sum(_text_bytes(data) for data in objects.values())),
        canonical_hash=artifact.sha256,  # names are normalised before code is emitted, so equal schedules give equal bytes
        compile_s=time.perf_counter() - begin,
        shared=shared,
    )


def _object_code(step: KernelStep, entry: str) -> bytes:
    """ELF object with the one global function `entry`."""
    check_may_build()
    module = llvm.parse_assembly(_optimised_ir(step, entry))
    _check_externals(module, entry)
    return bytes(_target_machine().emit_object(module))


def _key(step: KernelStep, entry: str) -> Key | None:
    """The name of everything that decides the code of a step; None if it captures something that has no name."""
    try:
        machine = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
        return Key(
            digest("cpu", machine, entry, list(map(str, _signature(step))), step.contract, step.function), lasting=True
        )
    except UnidentifiedError:
        return None


def _signature(step: KernelStep) -> tuple[Any, ...]:
    from numba import types

    if any(isinstance(param, TensorMap) for param in step.params):
        raise CompileError("a CPU kernel takes no tensor_map parameter; pass a Pointer")
    return (*signature(step), types.int64, types.int64)


def _optimised_ir(step: KernelStep, entry: str) -> str:
    """LLVM IR in which `entry` is the only exported name and all others are normalised."""
    from numba import types
    from numba.core import compiler, errors, registry
    from numba.core.compiler_lock import global_compiler_lock

    flags: Any = compiler.Flags()
    flags.error_model = "numpy"  # a division by zero does not raise
    flags.fastmath = set(FASTMATH if step.contract else FASTMATH - {"contract"})
    flags.boundscheck = False
    flags.enable_pyobject = False
    flags.nrt = False  # a kernel that allocates does not compile
    flags.no_cpython_wrapper = True
    flags.no_cfunc_wrapper = True
    flags.no_compile = True
    cpu = registry.cpu_target
    cpu.typing_context.refresh()
    cpu.target_context.refresh()
    try:
        with global_compiler_lock:
            result = compiler.compile_extra(
                cpu.typing_context, cpu.target_context, step.function, _signature(step), types.void, flags, {},
                pipeline_class=_inlining_compiler(),
            )  # fmt: skip
            link_and_optimise(result.library)
    except Exception as error:  # Numba's own errors for unsupported code are not all NumbaErrors
        kind = "" if isinstance(error, errors.NumbaError) else f"{type(error).__name__}: "
        raise CompileError(f"kernel {step.function.__name__}: {kind}{message_once(error)}") from error
    module = llvm.parse_assembly(result.library.get_llvm_str())
    native = result.fndesc.llvm_func_name
    for number, value in enumerate([*module.functions, *module.global_variables]):
        if value.name == native:
            value.name = entry
        elif not value.is_declaration:
            value.linkage = llvm.Linkage.internal
            value.name = f"local{number}"
    module.name = entry
    _remove_dead_code(module)
    return str(module)


@functools.cache
def _inlining_compiler() -> Any:
    from numba.core.compiler import Compiler

    return inlining(Compiler, "numba.core")


def _remove_dead_code(module: llvm.ModuleRef) -> None:
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.add_strip_dead_prototype_pass()
    builder = llvm.create_pass_builder(_target_machine(), llvm.create_pipeline_tuning_options())
    passes.run(module, builder)


def _check_externals(module: llvm.ModuleRef, entry: str) -> None:
    """Checks that the code calls only symbols that exist in any process: MCJIT aborts on a symbol that it cannot find."""
    libc = ctypes.CDLL(None)
    for value in [*module.functions, *module.global_variables]:
        if not value.is_declaration or value.name.startswith("llvm."):
            continue
        if value.name.startswith(_FORBIDDEN_PREFIXES) or not hasattr(libc, value.name):
            raise CompileError(
                f"kernel {entry} needs {value.name!r} of the Python runtime; a CPU kernel must not raise, print, allocate "
                "or use objects: take addresses and scalars only, and check arguments before the launch"
            )


@functools.cache
def _target_machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # MCJIT may put code and its constants more than 2 GB apart, and a shorter reference than the large model's then aborts.
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="static",
        codemodel="large",
    )


def _archive(objects: dict[str, bytes]) -> bytes:
    features = sorted(name for name, present in llvm.get_host_cpu_features().items() if present)
    manifest = json.dumps({"cpu": llvm.get_host_cpu_name(), "features": features}).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in [("manifest.json", manifest), *((f"{entry}.o", code) for entry, code in objects.items())]:
            archive.writestr(zipfile.ZipInfo(name), data)  # ZipInfo's fixed date keeps equal code equal
    return buffer.getvalue()


def _text_bytes(code: bytes) -> int:
    return sum(int(section.size()) for section in llvm.ObjectFileRef.from_data(code).sections() if section.is_text())
