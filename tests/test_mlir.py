"""numba-cuda-mlir makes kernels of every CUDA template, with the instructions that numba-cuda's have."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numba_cuda_mlir", reason="needs numba-cuda-mlir: make test-mlir")

from numba import cuda, types

from schedsearch import Workload, load_templates
from schedsearch.backend import compile_source, compilers
from schedsearch.backend.cuda import ptx_of
from schedsearch.backend.ops import device_op
from schedsearch.launch import Grid, Int32, Literal, NumbaArray, Pointer, Scalar
from schedsearch.processes.builder import Builder, Built, Candidate
from schedsearch.target import PRESETS
from schedsearch.template import KernelSource, KernelStep, load_template

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import compilers as compared  # noqa: E402

H200 = PRESETS["h200"]
ROWS: list[dict[str, Any]] = [
    row for row in json.loads((BENCHMARKS / "results/compilers.json").read_text())["rows"] if "refused" not in str(row["by"])
]
FIRST = {row["template"]: row for row in reversed(ROWS)}


@pytest.fixture(autouse=True)
def _compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compilers.ENVIRONMENT_VARIABLE, "numba-cuda-mlir")


@functools.cache
def nvdisasm() -> str:
    """The program, of PATH or of the wheel nvidia-cuda-nvdisasm; the test is skipped without it."""
    beside = [Path(folder) / "nvidia/cu13/bin/nvdisasm" for folder in sys.path]
    found = shutil.which("nvdisasm") or next((str(path) for path in beside if path.is_file()), None)
    if found is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    subprocess.run([found, "--version"], check=True, capture_output=True)
    return found


@pytest.mark.parametrize("name", sorted(FIRST))
def test_each_template_compiles_to_the_instructions_of_the_other_compiler(name: str) -> None:
    row = FIRST[name]
    template = load_templates([name])[name]
    source = template.kernel(Workload.from_json(json.dumps(row["workload"])), H200, template.current(row["config"]))
    built = compile_source(source, H200)
    found, expected = compared.instructions(built.artifact.code, nvdisasm()), row["by"]["numba-cuda"]
    special = [each for each in (*compared.TENSOR, *compared.COPIES) if each in expected["instructions"]]
    assert [each for each in (*compared.TENSOR, *compared.COPIES) if each in found] == special
    reserved = expected["shared_bytes"] - built.resources.shared_bytes
    assert reserved in (0, 1024)  # ptxas of some versions counts what a multiprocessor reserves
    assert built.resources.spill_bytes == 0 or source.may_spill


def twice(value: Any) -> Any:
    return value + value


shout = device_op("shout", "add.s32 $c, $a, $b;", ins={"a": "i32", "b": "i32"}, outs={"c": "i32"}, pure=True)


def step(function: Any, *params: Any, **fields: Any) -> KernelSource:
    return KernelSource("cuda", "native", (KernelStep(function, params, Grid(1), 64, **fields),))


def ptx(source: KernelSource, target: Any = H200) -> str:
    return ptx_of(source, target)[0]


def test_arrays_literals_tuples_and_scalars_are_the_parameters_of_the_other_compiler() -> None:
    """An array has seven words for one dimension, see `NumbaArray`."""

    def kernel(x: Any, mode: Any, factor: Any, *operands: Any) -> None:
        if mode == "double":
            x[cuda.threadIdx.x] = twice(x[cuda.threadIdx.x]) * factor + operands[1]

    array = NumbaArray("x", "float32", (64,), (4,))
    text = ptx(step(kernel, array, Literal("double"), Scalar("factor"), Pointer("y"), Int32(3)))
    kinds = [line.split()[1] for line in text.splitlines() if line.strip().startswith(".param")]
    assert kinds == [".u64"] * 8 + [".f32", ".u64", ".u32"]
    assert "st.global" in text and ".maxntid 64" in text.replace(",", "")


def test_operations_and_captured_functions_are_compiled_into_a_kernel() -> None:
    shared = 32

    def kernel(y: Any, number: Any) -> None:
        words = cuda.shared.array(shared, types.int32)
        words[cuda.threadIdx.x] = shout(number, twice(number))
        cuda.syncthreads()
        if words[0] == 7:
            words[1] = 0

    text = ptx(step(kernel, Pointer("y"), Int32(3)))
    assert "call" not in text and text.count("add.s32") >= 1 and "shared_0" in text
    assert text == ptx(step(kernel, Pointer("y"), Int32(3)))  # no name depends on the process


def test_atomic_operations_find_out_where_their_array_is() -> None:
    """A shared array with a second name loses its memory in the type, and numba-cuda-mlir then takes it to be global."""

    def kernel(x: Any) -> None:
        counts = cuda.shared.array(32, types.int32)
        renamed, thread = counts, cuda.threadIdx.x
        counts[thread] = 0
        cuda.syncthreads()
        for i in range(x[1]):
            cuda.atomic.add(renamed, x[i] & 31, 1)
        cuda.syncthreads()
        cuda.atomic.add(x, thread, counts[thread])

    text = ptx(step(kernel, NumbaArray("x", "int32", (64,), (4,))))
    places = set(re.findall(r"(?:atom|red)\.(\w+)\.add", text))
    assert places == {"shared", "global"}


def test_arrays_of_length_0_lie_behind_those_of_fixed_length() -> None:
    """Dynamic shared memory begins where static shared memory ends; a static declaration would let them overlap."""

    def kernel(x: Any) -> None:
        dynamic, static = cuda.shared.array(0, types.int32), cuda.shared.array(32, types.int32)
        dynamic[cuda.threadIdx.x], static[cuda.threadIdx.x] = x[cuda.threadIdx.x], x[cuda.threadIdx.x + 1]
        cuda.syncthreads()
        x[cuda.threadIdx.x] = dynamic[63 - cuda.threadIdx.x] + static[x[0]]

    source = step(kernel, NumbaArray("x", "int32", (64,), (4,)), dynamic_shared_bytes=256)
    declared = re.findall(r"(\.extern )?\.shared \.align \d+ \.b8\s+\w+\[(\d*)\];", ptx(source))
    assert sorted(declared) == [("", "128"), (".extern ", "")]
    assert compile_source(source, H200).resources.shared_bytes == 128 + 256


def test_the_processes_of_a_search_build_with_it() -> None:
    row = FIRST["softmax_cuda"]
    template, workload = load_template("softmax_cuda"), Workload.from_json(json.dumps(row["workload"]))
    with Builder(H200, workers=1, timeout_s=120) as builder:
        builder.submit(Candidate(workload, template, template.current(row["config"])))
        ((_, made),) = builder.drain()
    assert isinstance(made, Built), made


@pytest.mark.parametrize("preset", ["a100", "b200", "rtx5090"])
def test_kernels_are_made_for_cards_of_other_generations(preset: str) -> None:
    def kernel(x: Any) -> None:
        x[cuda.threadIdx.x] = 1.0

    target = PRESETS[preset]
    source = step(kernel, NumbaArray("x", "float32", (64,), (4,)))
    assert f".target {target.architecture}\n" in ptx(source, target)
    assert compile_source(source, target).artifact.plan.arch == str(target.architecture)
