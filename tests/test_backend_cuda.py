"""The CUDA compiler behind the templates: declared operations, tensor-map parameters, stable text, refusals."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable

import pytest

pytest.importorskip("numba_cuda", reason="needs numba-cuda; install the extra cu13")

from numba import cuda, types

from schedsearch.backend import CompileError, RejectedError, compile_source, toolchain
from schedsearch.backend.cuda import _compile_to_ptx
from schedsearch.backend.ops import device_op, operands_and_text, shared_base
from schedsearch.launch import Grid, Int32, Param, Pointer, TensorMap
from schedsearch.target import PRESETS, Target
from schedsearch.template import KernelSource, KernelStep

H200 = PRESETS["h200"]
add_three = device_op(
    "add_three", "{ .reg .u32 t; add.u32 t, $a, $b; add.u32 $sum, t, $c; }",
    ins={"a": "u32", "b": "u32", "c": "u32"}, outs={"sum": "u32"}, pure=True,
)  # fmt: skip
store = device_op("store", "st.global.u32 [$address], $value;", ins={"address": "u64", "value": "u32"})
double_all = device_op("double_all", "add.f32 $x, $x, $x;", inout={"x": ("f32", 1)})


def source(function: Callable[..., None], params: tuple[Param, ...], **step: int) -> KernelSource:
    return KernelSource("cuda", "sm_90a", (KernelStep(function, params, Grid(1), step.pop("threads", 128), **step),))


def simple(out, n):  # type: ignore[no-untyped-def]
    store(out, add_three(n, 2, cuda.threadIdx.x))


def test_an_operation_becomes_its_ptx_with_registers_in_place() -> None:
    ptx = _compile_to_ptx(source(simple, (Pointer("y"), Int32(5))).steps[0], "kernel_0", "sm_90a")
    assert ".target sm_90a" in ptx and ".maxntid 128" in ptx
    assert "add.u32 t, %r" in ptx and "st.global.u32 [%rd" in ptx
    assert "$" not in ptx


def test_an_inout_operand_is_read_and_written_in_place() -> None:
    def kernel(out):  # type: ignore[no-untyped-def]
        values = cuda.local.array(1, types.float32)
        values[0] = types.float32(3)
        double_all(values)
        store(out, types.uint32(values[0]))

    built = compile_source(source(kernel, (Pointer("y"),)), H200)
    assert built.resources.local_bytes == 0 and built.resources.registers > 0


def test_declarations_and_calls_are_checked() -> None:
    with pytest.raises(ValueError, match=r"names \['a', 'b'\], declared are \['a'\]"):
        device_op("typo", "add.u32 $a, $a, $b;", ins={"a": "u32"})

    def wrong(out, n):  # type: ignore[no-untyped-def]
        store(out, types.float32(n))

    with pytest.raises(CompileError, match="value must be u32, got float32"):
        compile_source(source(wrong, (Pointer("y"), Int32(1))), H200)


def test_an_operation_leaves_out_only_what_is_declared_as_unused() -> None:
    with pytest.raises(ValueError, match=r"declared are \['a', 'b', 'y'\]"):
        device_op("copy", "mov.u32 $y, $a;", ins={"a": "u32", "b": "u32"}, outs={"y": "u32"})
    copy = device_op("copy", "mov.u32 $y, $a;", ins={"a": "u32", "b": "u32"}, outs={"y": "u32"}, unused=("b",))
    operands, text = operands_and_text(copy) or pytest.fail("it declares an operation")
    assert [name for name, _ in operands.ins] == ["a", "b"]
    assert text == "mov.u32 $0, $1;"


def test_a_tensor_map_is_passed_by_value_and_seen_by_address() -> None:
    prefetch = device_op("prefetch", "prefetch.tensormap [$map];", ins={"map": "u64"})

    def kernel(tensor_map, out):  # type: ignore[no-untyped-def]
        prefetch(tensor_map)

    def reads_it_as_a_number(tensor_map, out):  # type: ignore[no-untyped-def]
        store(out, types.uint32(tensor_map))

    params = (TensorMap("x", "float16", (64, 64), (128,), (1, 1), box=(64, 64)), Pointer("y"))
    ptx = _compile_to_ptx(source(kernel, params).steps[0], "kernel_0", "sm_90a")
    assert ".param .align 64 .b8 kernel_0_param_0[128]" in ptx and "cvta.param.u64" in ptx
    compile_source(source(kernel, params), H200)
    with pytest.raises(CompileError, match="parameter 0 is a tensor map"):
        compile_source(source(reads_it_as_a_number, params), H200)


def test_dynamic_shared_memory_starts_at_a_kilobyte_boundary() -> None:
    def kernel(out):  # type: ignore[no-untyped-def]
        store(out, shared_base())

    step = source(kernel, (Pointer("y"),), dynamic_shared_bytes=64_000).steps[0]
    assert ".extern .shared .align 1024" in _compile_to_ptx(step, "kernel_0", "sm_90a")


HASH_PROGRAM = """
import sys; sys.path.insert(0, {folder!r})
from test_backend_cuda import H200, Int32, Pointer, compile_source, simple, source
print(compile_source(source(simple, (Pointer("y"), Int32(5))), H200).canonical_hash)
"""


def test_equal_schedules_have_equal_hashes_in_every_process() -> None:
    here = compile_source(source(simple, (Pointer("y"), Int32(5))), H200)
    folder = __file__.rpartition("/")[0]
    done = subprocess.run(
        [sys.executable, "-c", HASH_PROGRAM.format(folder=folder)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == here.canonical_hash, done.stderr
    other = compile_source(source(simple, (Pointer("y"), Int32(6))), H200)  # a parameter is part of the launch
    assert other.canonical_hash != here.canonical_hash


def test_code_that_exceeds_a_limit_is_rejected_before_a_device_sees_it() -> None:
    with pytest.raises(RejectedError, match="232449 bytes of shared memory per block"):
        compile_source(source(simple, (Pointer("y"), Int32(5)), dynamic_shared_bytes=232_449), H200)
    with pytest.raises(RejectedError, match="2048 threads per block; allowed: 1 to 1024"):
        compile_source(source(simple, (Pointer("y"), Int32(5)), threads=2048), H200)


def test_spilling_registers_is_rejected() -> None:
    load = device_op("load", "ld.global.f32 $v, [$address];", ins={"address": "u64"}, outs={"v": "f32"})
    put = device_op("put", "st.global.f32 [$address], $v;", ins={"address": "u64", "v": "f32"})

    def kernel(out):  # type: ignore[no-untyped-def]
        values = cuda.local.array(100, types.float32)
        for i in range(100):
            values[i] = load(out + 4 * i)
        for i in range(100):
            put(out + 4 * i, values[99 - i])

    with pytest.raises(RejectedError, match="spill"):
        compile_source(source(kernel, (Pointer("y"),), threads=1024), H200)


@pytest.mark.gpu
def test_resources_are_known_of_code_that_was_linked_before() -> None:
    """With a driver, nvJitLink may take code from the driver's cache, and then says nothing of registers and spills."""
    first, second = (compile_source(source(simple, (Pointer("y"), Int32(5))), H200).resources for _ in range(2))
    assert first == second and first.registers > 0
    test_spilling_registers_is_rejected()
    test_spilling_registers_is_rejected()


def test_registers_are_counted_against_the_threads_of_their_own_step() -> None:
    load = device_op("load", "ld.global.f32 $v, [$address];", ins={"address": "u64"}, outs={"v": "f32"})

    def many_registers(out):  # type: ignore[no-untyped-def]
        values = cuda.local.array(100, types.float32)
        for i in range(100):
            values[i] = load(out + 4 * i)
        double_all(values)
        for i in range(100):
            store(out + 4 * i, types.uint32(values[99 - i]))

    few_threads = source(many_registers, (Pointer("y"),), threads=64)
    both = dataclasses.replace(
        few_threads, steps=(*few_threads.steps, KernelStep(simple, (Pointer("y"), Int32(5)), Grid(1), 1024))
    )
    built = compile_source(both, H200)
    assert built.resources.registers * 1024 > H200.registers_per_sm


def test_a_compiler_error_is_a_candidates_failure_with_the_compilers_text() -> None:
    bad = device_op("bad", "frobnicate.u32 [$address];", ins={"address": "u64"})

    def kernel(out):  # type: ignore[no-untyped-def]
        bad(out)

    with pytest.raises(CompileError, match="frobnicate"):
        compile_source(source(kernel, (Pointer("y"),)), H200)


def test_the_toolchain_names_the_compiler() -> None:
    assert toolchain("cuda")["numba-cuda"]


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_are_compiled_for_their_own_architecture(preset: str) -> None:
    target = PRESETS[preset]
    arch = "sm_{}{}".format(*target.compute_capability)
    built = compile_source(dataclasses.replace(source(simple, (Pointer("y"), Int32(5))), arch=arch), target)
    assert built.artifact.plan.arch == arch and built.artifact.code[:4] == b"\x7fELF"


WITHOUT_ROW_STACK = """
import numpy
vars(numpy).pop("row_stack", None)  # as in NumPy 2.5
import schedsearch
import numba.cuda.np.arrayobj
assert numpy.row_stack is numpy.vstack
"""


def test_numba_cuda_can_be_imported_where_numpy_has_no_row_stack() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_ROW_STACK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("arch", "target"), [("sm_80", PRESETS["a100"]), ("sm_90a", H200)])
@pytest.mark.parametrize("count", [0, 96])
def test_static_shared_arrays_count_as_shared_memory(arch: str, target: Target, count: int) -> None:
    """The kilobyte that the system reserves in each block from sm_90 on does not."""

    def reverse(y):  # type: ignore[no-untyped-def]
        values = cuda.shared.array(count, types.uint32)
        thread = cuda.threadIdx.x
        values[thread] = thread
        cuda.syncthreads()
        store(y + types.uint64(4 * thread), values[count - 1 - thread])

    step = KernelStep(reverse if count else simple, (Pointer("y"), Int32(5))[: 1 if count else 2], Grid(1), 96, 100)
    assert compile_source(KernelSource("cuda", arch, (step,)), target).resources.shared_bytes == 4 * count + 100


def test_code_is_made_for_the_device_at_hand_or_not_at_all() -> None:
    step = KernelStep(simple, (Pointer("y"), Int32(5)), Grid(1), 128)
    assert compile_source(KernelSource("cuda", "native", (step,)), PRESETS["a100"]).artifact.plan.arch == "sm_80"
    for card, arch in (("rtx5090", "sm_120f"), ("gb300", "sm_100f")):  # code of a family runs on its later cards
        assert compile_source(KernelSource("cuda", arch, (step,)), PRESETS[card]).artifact.plan.arch == arch
    for arch in ("sm_80", "sm_100", "sm_120f", "sm_103a"):
        with pytest.raises(CompileError, match=rf"code for arch '{arch}' does not run on NVIDIA H200, which is sm_90"):
            compile_source(KernelSource("cuda", arch, (step,)), H200)
    for arch in ("sm_90x", "compute_90", "sm_90f"):
        with pytest.raises(CompileError, match=rf"architecture '{arch}' does not exist; allowed: .*; or native"):
            compile_source(KernelSource("cuda", arch, (step,)), H200)
