"""Finished machine code in the build cache: of kernels that other processes and later runs will ask for again.

A search does not keep its candidates: there are thousands, and next to none is built twice.

See docs/decisions/046-build-cache.md.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from pathlib import Path

from schedsearch.backend import BuildResult, compile_source
from schedsearch.launch import Artifact
from schedsearch.measurement import Resources
from schedsearch.target import Target
from schedsearch.template import KernelSource


def compile_kept(source: KernelSource, target: Target) -> BuildResult:
    """As `compile_source`, from the build cache if it has the code; otherwise it has it now. Raises as `compile_source`.

    Code for CPUs is kept in any case. A kernel that captures a value without a name is compiled anew.
    """
    if source.kind != "cuda":
        return compile_source(source, target)
    from schedsearch.backend.cuda import launch_plan, require_compiler, toolchain_cuda
    from schedsearch.backend.kernel_identity import UnidentifiedError, digest
    from schedsearch.backend.sharing import Key, piece

    started = time.perf_counter()
    require_compiler()
    plan = launch_plan(source, target)
    limits = target.shared_bytes_per_block, target.registers_per_sm, source.may_spill
    try:
        key = digest(
            "machine code with its resources, without known faults",
            plan.to_json(),
            source.steps,
            limits,
            toolchain_cuda(),
            unversioned_libraries(),
        )
    except UnidentifiedError:
        return compile_source(source, target)
    kept = piece(Key(key, lasting=True), lambda: _packed(compile_source(source, target)))
    text, _, code = kept.partition(b"\n")
    resources, canonical_hash, shared = json.loads(text)
    took_s = time.perf_counter() - started
    return BuildResult(Artifact(code, plan), Resources(**resources), canonical_hash, took_s, shared)


@functools.cache
def unversioned_libraries() -> list[tuple[str, int, int]]:
    """Path, bytes and time of change of NVVM, its library and the linker, unless packages of Python say their versions: they
    may be those of a CUDA toolkit, which is replaced in place. Raises UnidentifiedError if they are not found."""
    from schedsearch.backend import cuda, front_ends
    from schedsearch.backend.kernel_identity import UnidentifiedError

    versions = cuda.toolchain_cuda()
    if "nvidia-nvvm" in versions and any(name.startswith("nvidia-nvjitlink") for name in versions):
        return []
    from cuda.pathfinder import load_nvidia_dynamic_lib

    try:
        paths = *front_ends.front_end().libraries(), load_nvidia_dynamic_lib("nvJitLink").abs_path
        found = [(str(path), Path(path).stat()) for path in paths]
    except Exception as error:  # of a search for files, by other packages
        raise UnidentifiedError(f"the compiler's libraries: {error}") from error
    return [(path, about.st_size, about.st_mtime_ns) for path, about in found]


def _packed(made: BuildResult) -> bytes:
    text = json.dumps([dataclasses.asdict(made.resources), made.canonical_hash, made.shared])
    return text.encode() + b"\n" + made.artifact.code
