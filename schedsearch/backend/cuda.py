"""Python kernel -> PTX (a compiler of `compilers`, with NVVM) -> cubin (nvJitLink). Needs no GPU and no driver.

The PTX is changed in four ways, as text:

- names that differ from process to process (mangled entries, NumbaEnv globals) become stable ones, so that equal
  schedules give equal text;
- a parameter declared as `TensorMap` becomes 128 bytes of `.param` space aligned to 64, and the kernel's argument becomes
  its generic address (PTX ISA, "Tensor-map": a tensor map must live in param, const or global space);
- a kernel waits for the one before it, so that it may be launched early (`schedsearch.backend.early_launch`);
- the target gets its suffix, `a` or `f`, if the kernel asks for architecture-specific instructions.
"""

from __future__ import annotations

import dataclasses
import re
import time
from typing import Any

from schedsearch.backend import compilers, early_launch, front_ends, ptxas
from schedsearch.backend.base import BuildResult, CompileError, RejectedError, message_once
from schedsearch.backend.elf import static_shared_bytes
from schedsearch.backend.sharing import check_may_build
from schedsearch.identity import sha256_hex
from schedsearch.launch import (
    MAX_BLOCK_THREADS,
    TENSOR_MAP_ALIGNMENT,
    TENSOR_MAP_BYTES,
    Artifact,
    LaunchPlan,
    Step,
    TensorMap,
)
from schedsearch.measurement import Resources
from schedsearch.target import Architecture, Target
from schedsearch.template import KernelSource, KernelStep


def compile_cuda(source: KernelSource, target: Target) -> BuildResult:
    """Compiles every step and links them into one cubin.

    Raises:
        UsageError: the compiler is not installed, or of an unsupported version.
        CompileError: the compiler, NVVM or nvJitLink refused the kernel; their text.
        RejectedError: the kernel compiled, but spills, exceeds a limit of the target, has serialised wgmma instructions, or
            shows a known fault of the compiler.
    """
    started = time.perf_counter()
    check_may_build()
    require_compiler()
    _check_limits(source, target)
    arch = _architecture(source.arch, target)
    plan = launch_plan(source, target)
    made = [_ptx(step, placed.entry, arch) for step, placed in zip(source.steps, plan.steps)]
    texts = [ptx.text for ptx in made]
    code, log = _link(texts, arch)
    resources = _resources(log, source, code)
    _check_quality(log, resources, source, target.registers_per_sm)
    if fault := ptxas.fault_of(code, ptxas.linker_version()):
        raise RejectedError(fault)
    canonical_hash = sha256_hex("\n".join([plan.to_json(), *texts]))
    shared = all(ptx.shared for ptx in made)
    return BuildResult(Artifact(code, plan), resources, canonical_hash, time.perf_counter() - started, shared)


def launch_plan(source: KernelSource, target: Target) -> LaunchPlan:
    """How the compiled kernel is launched. Raises CompileError if the target cannot run its code."""
    arch = _architecture(source.arch, target)
    early = early_launch.is_possible(arch)
    steps = tuple(
        Step(
            f"kernel_{number}", step.launch_params, step.grid, step.block_threads, step.dynamic_shared_bytes, step.cluster,
            step.constant, step.block_shape, step.restores, early, step.ahead if early else (),
        )
        for number, step in enumerate(source.steps)
    )  # fmt: skip
    return LaunchPlan("cuda", arch, steps, dict(source.workspaces), dict(source.alignments))


def ptx_of(source: KernelSource, target: Target) -> list[str]:
    """The PTX of every step, as `compile_cuda` gives it to the linker.

    Raises:
        UsageError: the compiler is not installed, or of an unsupported version.
        CompileError: the compiler or NVVM refused the kernel; their text.
    """
    require_compiler()
    arch = _architecture(source.arch, target)
    return [_ptx(step, f"kernel_{number}", arch).text for number, step in enumerate(source.steps)]


def require_compiler() -> None:
    """Raises UsageError if the compiler of kernels is missing, or of an unsupported version; see `compilers`."""
    compilers.usable()


def toolchain_cuda() -> dict[str, str]:
    """Versions of everything that shapes the machine code."""
    return compilers.chosen().toolchain()


def _architecture(arch: str, target: Target) -> str:
    """What to compile for: `native` is the target's own architecture.

    Raises:
        CompileError: the target cannot run code for `arch`.
    """
    own = str(target.architecture)
    if arch == "native":
        return own
    try:
        runs = Architecture.parse(arch).runs_on(target.compute_capability)
    except ValueError as error:
        raise CompileError(f"{error}; or native") from None
    if not runs:
        raise CompileError(
            f"code for arch {arch!r} does not run on {target.name}, which is {own}; write native, or refuse this device in "
            "validate"
        )
    return arch


def _check_limits(source: KernelSource, target: Target) -> None:
    for step in source.steps:
        if step.dynamic_shared_bytes > target.shared_bytes_per_block:
            raise RejectedError(
                f"{step.dynamic_shared_bytes} bytes of shared memory per block; {target.name} has "
                f"{target.shared_bytes_per_block}"
            )
        if not 0 < step.block_threads <= MAX_BLOCK_THREADS:
            raise RejectedError(f"{step.block_threads} threads per block; allowed: 1 to {MAX_BLOCK_THREADS}")


def _compile_to_ptx(step: KernelStep, entry: str, arch: str) -> str:
    """The PTX of one step, ready to be linked."""
    return _ptx(step, entry, arch).text


def _ptx(step: KernelStep, entry: str, arch: str) -> front_ends.Ptx:
    built = Architecture.parse(arch)
    front_end = front_ends.front_end()
    try:
        made = front_end.to_ptx(step, built.capability)
    except Exception as error:  # any exception of a compiler is the candidate's failure
        raise CompileError(f"{type(error).__name__}: {message_once(error)}") from error
    ptx = made.text.replace(f".target {built.virtual}", f".target {arch}", 1)
    if step.max_registers:
        ptx = re.sub(r"\.minnctapersm [^\n]*", f".maxnreg {step.max_registers}", ptx, count=1)
    if step.cluster > 1:
        # Explicit: otherwise the cluster's barriers also get code for a launch without a cluster.
        directives = rf"\1\n.explicitcluster\n.reqnctapercluster {step.cluster}, 1, 1"
        ptx = re.sub(r"(\.maxntid [^\n]*)", directives, ptx, count=1)
    text = _tensor_map_params(_stable_names(ptx, entry), entry, step)
    return dataclasses.replace(made, text=early_launch.with_wait(text, entry, arch))


def _stable_names(ptx: str, entry: str) -> str:
    """Drops comments and the NumbaEnv global, and renames the entry."""
    match = re.search(r"\.visible \.entry (\w+)\(", ptx)
    if match is None:
        raise CompileError("the compiler's output has no entry point")
    ptx = re.sub(r"^\s*//.*\n", "", ptx, flags=re.MULTILINE)
    ptx = re.sub(r"^\.common \.global .*_ZN08NumbaEnv\w+;\n", "", ptx, flags=re.MULTILINE)
    return ptx.replace(match[1], entry)


def _tensor_map_params(ptx: str, entry: str, step: KernelStep) -> str:
    for number, param in enumerate(step.params):
        if not isinstance(param, TensorMap):
            continue
        name = f"{entry}_param_{number}"
        ptx = re.sub(rf"\.param \.u64 {name}\b", f".param .align {TENSOR_MAP_ALIGNMENT} .b8 {name}[{TENSOR_MAP_BYTES}]", ptx)
        ptx = re.sub(rf"ld\.param\.[ub]64\s+(%\w+), \[{name}\];", rf"mov.b64 \1, {name};\n\tcvta.param.u64 \1, \1;", ptx)
        if re.search(rf"\[{name}\]", ptx):
            raise CompileError(f"parameter {number} is a tensor map: the kernel may only pass on its 64-bit address")
    return ptx


def _link(texts: list[str], arch: str) -> tuple[bytes, str]:
    from cuda.bindings import nvjitlink

    # Where there is a driver, nvJitLink finds what it has linked before in the driver's cache, and then says no resources.
    options = [f"-arch={arch}", "-O3", "-Xptxas=-v", "-no-cache"]
    handle = nvjitlink.create(len(options), options)
    try:
        for number, text in enumerate(texts):
            data = text.encode()
            nvjitlink.add_data(handle, nvjitlink.InputType.PTX, data, len(data), f"step_{number}")
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
        log = _log(nvjitlink.get_info_log_size, nvjitlink.get_info_log, handle)
    except nvjitlink.nvJitLinkError as error:
        text = _log(nvjitlink.get_error_log_size, nvjitlink.get_error_log, handle)
        raise CompileError(f"nvJitLink: {text or error}") from error
    finally:
        nvjitlink.destroy(handle)
    return bytes(cubin), log


def _log(size: Any, get: Any, handle: int) -> str:
    buffer = bytearray(size(handle))
    if not buffer:
        return ""
    get(handle, buffer)
    return buffer.decode(errors="replace").rstrip("\0").strip()


def _resources(log: str, source: KernelSource, code: bytes) -> Resources:
    def largest(pattern: str) -> int:
        return max((int(number) for number in re.findall(pattern, log)), default=0)

    static = static_shared_bytes(code)
    shared = [static.get(f"kernel_{number}", 0) + step.dynamic_shared_bytes for number, step in enumerate(source.steps)]
    return Resources(
        registers=largest(r"[Uu]sed (\d+) registers"),
        shared_bytes=max(shared),
        local_bytes=largest(r"(\d+) bytes stack frame"),
        spill_bytes=max(largest(r"(\d+) bytes spill stores"), largest(r"(\d+) bytes spill loads")),
        code_bytes=len(code),
    )


def _check_quality(log: str, resources: Resources, source: KernelSource, registers_per_sm: int) -> None:
    if resources.spill_bytes and not source.may_spill:
        raise RejectedError(f"{resources.spill_bytes} bytes of registers spill; use smaller tiles")
    by_entry = re.findall(r"Compiling entry function '(\w+)'.*?[Uu]sed (\d+) registers", log, flags=re.DOTALL)
    for entry, registers in by_entry:
        threads = source.steps[int(entry.removeprefix("kernel_"))].block_threads
        if int(registers) * threads > registers_per_sm:
            raise RejectedError(
                f"{registers} registers x {threads} threads exceed the {registers_per_sm} of a multiprocessor"
            )
    serialised = re.search(r".*wgmma.*serializ.*", log, flags=re.IGNORECASE)
    if serialised:
        raise RejectedError(f"ptxas serialises wgmma: {serialised[0].strip()}")
