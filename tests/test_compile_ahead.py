"""Whoever needs several kernels gets them compiled at once, in other processes; this one compiles nothing then."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import schedsearch
from schedsearch.backend import CompileError, RejectedError, compile_source, cpu, cuda, kept, sharing
from schedsearch.backend.build_cache import BuildCache
from schedsearch.backend.code_cache import CodeCache
from schedsearch.backend.kept import compile_kept
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.executable.kernels import find_kernels
from schedsearch.launch import Grid, NumbaArray
from schedsearch.runtime import ahead
from schedsearch.runtime.ahead import Recipe, compile_ahead, kernel_recipe, verifying_recipes
from schedsearch.runtime.loading import Build
from schedsearch.target import PRESETS, Target
from schedsearch.template import KernelSource, KernelStep, load_reference, load_template
from schedsearch.verification.compare import BETWEEN, WORDS, Comparison
from schedsearch.verification.truths import Truths
from schedsearch.workload import Workload

CPU, H200 = detect("cpu"), PRESETS["h200"]

pytestmark = pytest.mark.usefixtures("own_compilers")


def transposition(channels: int) -> Workload:
    return schedsearch.layout_transform(n=1, c=channels, h=2, w=2, layout="NCHW", to="NHWC", dtype="float32")


@pytest.fixture
def no_compiler_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling in this process fails; other processes are not affected."""

    def refuse(*args: Any) -> Any:
        raise AssertionError("this process compiles")

    monkeypatch.setattr(cpu, "compile_cpu", refuse)
    monkeypatch.setattr(cuda, "compile_cuda", refuse)


@pytest.mark.usefixtures("no_compiler_here")
def test_what_was_built_ahead_is_loaded_and_verified_without_a_compiler(tmp_path: Path) -> None:
    workloads = [*map(transposition, (2, 3))]
    with schedsearch.KernelCache(tmp_path / "no.db", "cpu") as kernels:
        assert kernels.build_ahead(workloads) == 2
        assert all(kernels.kernel(each).verified for each in workloads)
        x = np.arange(8, dtype=np.float32).reshape(1, 2, 2, 2)
        np.testing.assert_array_equal(kernels.kernel(workloads[0])(x), x.transpose(0, 2, 3, 1))


@pytest.mark.usefixtures("no_compiler_here")
@pytest.mark.long
def test_the_build_cache_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_BUILD_CACHE", "off")
    with schedsearch.KernelCache(tmp_path / "no.db", "cpu") as kernels:
        assert kernels.build_ahead([transposition(2)]) == 1
        assert kernels.kernel(transposition(2)).verified


def test_kernels_that_share_no_run_of_numba_come_first_and_short_pieces_last() -> None:
    template = load_template("conv2d_simt")
    plain, with_bias, other_size = (
        Workload.conv2d(n=1, h=size, w=size, c=8, k=8, r=1, s=1, dtype="float32", epilogue=epilogue)
        for size, epilogue in ((7, []), (7, ["bias"]), (9, []))
    )
    config = template.default(plain, H200, template.space(plain, H200))
    kernels = [kernel_recipe(template, each, config) for each in (plain, other_size, with_bias)]
    verifying = verifying_recipes(plain, H200)
    assert ahead._spread([*verifying, *kernels]) == [kernels[0], kernels[2], kernels[1], *verifying]


@pytest.mark.usefixtures("no_compiler_here")
@pytest.mark.long
def test_kernels_of_a_network_are_found_without_a_compiler(tmp_path: Path) -> None:
    workloads = [*map(transposition, (2, 3, 4))]
    found = find_kernels(workloads, tmp_path / "no.db", CPU)
    assert list(found) == workloads and {each.origin.level for each in found.values()} == {"default"}


@pytest.mark.usefixtures("no_compiler_here")
def test_kernels_for_a_gpu_and_those_that_verify_them_are_compiled_in_other_processes(tmp_path: Path) -> None:
    workload = schedsearch.softmax(x=(4, 64))
    cache = schedsearch.KernelCache(tmp_path / "no.db", H200)
    assert cache.build_ahead([workload]) == 1
    (way,) = (each for each in cache._fallback(workload).viable())
    assert way.recipe is not None
    recipes = [way.recipe(), *verifying_recipes(workload, H200)]
    assert len(recipes) == 4  # the kernel, the reference, the comparisons of outputs and of the memory around them
    for each in recipes:
        assert each.artifact(cache.code, H200).plan.arch.startswith("sm_90")


@pytest.mark.long
def test_a_refused_kernel_gives_way_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload.conv2d(n=1, h=4, w=4, c=8, k=8, r=1, s=1, dtype="float32")
    cache = schedsearch.KernelCache(tmp_path / "no.db", H200)
    first, second, *_ = (way.recipe() for way in cache._fallback(workload).viable() if way.recipe is not None)

    def recipe(build: Build, original: Any = Build.recipe) -> Recipe[Any]:
        found: Recipe[Any] = original(build)
        return Recipe(found.name, _refused) if found.name == first.name else found

    monkeypatch.setattr(Build, "recipe", recipe)
    assert cache.build_ahead([workload]) == 1
    assert cache.code.refusal(first.name) == "not today" and second.name in cache.code


def _refused(*args: Any) -> Any:
    raise CompileError("not today")


def test_other_failures_are_left_to_the_process_that_needs_the_kernel() -> None:
    code = CodeCache()
    recipes = [Recipe("refused", _refused), Recipe("broken", _broken)]
    assert compile_ahead(recipes, code, CPU) == {}
    with pytest.raises(RejectedError, match="not today"):
        recipes[0].artifact(code, CPU)
    with pytest.raises(ZeroDivisionError):
        recipes[1].artifact(code, CPU)


def _broken(target: Target) -> Any:
    return 1 // 0


def test_what_ends_or_stops_a_compiler_is_not_compiled_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may also be lost for want of memory: then its piece is compiled alone."""
    monkeypatch.setattr(ahead, "available_cores", lambda: 3)
    monkeypatch.setattr(ahead, "_TIMEOUT_S", 5.0)
    lost = functools.partial(_lost, tmp_path / "lost once")
    recipes = [Recipe("crashes", _crashes), Recipe("hangs", _hangs), Recipe("lost", lost)]
    code = CodeCache()
    assert list(compile_ahead(recipes, code, CPU)) == ["lost"]
    with pytest.raises(RejectedError, match="process was lost"):
        recipes[0].artifact(code, CPU)
    with pytest.raises(RejectedError, match="not compiled within 5 s"):
        recipes[1].artifact(code, CPU)


def _crashes(target: Target) -> Any:
    sharing.check_may_build()  # as all that compiles
    os.kill(os.getpid(), signal.SIGKILL)


def _hangs(target: Target) -> Any:
    sharing.check_may_build()
    time.sleep(600)


def _lost(marker: Path, target: Target) -> Any:
    sharing.check_may_build()
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return compile_source(load_reference("layout_transform").kernel(transposition(2), target), target)


def test_what_cannot_be_sent_is_left_to_the_process_that_needs_it() -> None:
    lock, code = threading.Lock(), CodeCache()
    assert compile_ahead([Recipe("here only", lambda _: lock)], code, CPU) == {}
    assert "here only" not in code


def test_functions_without_a_name_are_sent_too() -> None:
    reference = load_reference("layout_transform")
    workload = transposition(2)

    def make(target: Target) -> Any:
        from schedsearch.backend import compile_source

        return compile_source(reference.kernel(workload, target), target)

    code = CodeCache()
    built = compile_ahead([Recipe("local", make)], code, CPU)
    assert list(built) == ["local"] and "local" in code


@pytest.mark.parametrize(
    "workload",
    [
        transposition(2),
        Workload.conv2d(n=1, h=4, w=4, c=8, k=8, r=1, s=1, dtype="float16"),
        Workload.conv2d(n=1, h=4, w=4, c=8, k=8, r=1, s=1, dtype="float16", slice_of=16),
        schedsearch.dyn_strided_slice(x=(4, 6), dtype="float32"),
    ],
)
def test_the_comparisons_are_those_that_verification_asks_for(workload: Workload) -> None:
    names = {each.name for each in verifying_recipes(workload, H200)}
    with contextlib.closing(open_device(CPU)) as device, contextlib.closing(_truths(device, workload)) as truths:
        asked = {WORDS} | {Comparison.of(each.dtype, each.tolerance is not None, each.partial) for each in truths.values()}
        asked |= {BETWEEN} if any(each.slice_of for each in workload.outputs) else set()
    assert names - {f"reference {workload.id}"} == {each.name for each in asked}


def _truths(device: Any, workload: Workload) -> Truths:
    return Truths(device, workload, exact_sums=False)


# ---- the build cache


@pytest.fixture
def build_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BuildCache:
    """An empty one for this process; compiler processes have that of the tests."""
    folder = tmp_path / "builds"
    folder.mkdir(mode=0o700)
    cache = BuildCache(folder)
    monkeypatch.setattr(sharing, "user_cache", lambda: cache)
    return cache


def copying(count: int, blocks: int = 1) -> KernelSource:
    def copy(x: Any, y: Any) -> None:
        for at in range(count):
            y[at] = x[at]

    params = NumbaArray("x", "float32", (count,), (4,)), NumbaArray("y", "float32", (count,), (4,))
    return KernelSource("cuda", "native", (KernelStep(copy, params, Grid(blocks), 32),))


@pytest.mark.usefixtures("build_cache")
def test_finished_machine_code_is_kept_for_the_same_kernel_only(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def counted(source: KernelSource, target: Target, original: Any = cuda.compile_cuda) -> Any:
        compiled.append(source)
        return original(source, target)

    monkeypatch.setattr(cuda, "compile_cuda", counted)
    first = compile_kept(copying(8), H200)
    again = compile_kept(copying(8), H200)
    assert len(compiled) == 1
    assert (again.artifact, again.resources, again.canonical_hash) == (first.artifact, first.resources, first.canonical_hash)
    for other in (copying(9), copying(8, blocks=2), replace(copying(8), may_spill=True)):
        compile_kept(other, H200)
    compile_kept(copying(8), replace(H200, registers_per_sm=1 << 17))
    assert len(compiled) == 5
    assert compile_kept(copying(8, blocks=2), H200).artifact.plan.steps[0].grid == Grid(2)


@pytest.mark.usefixtures("build_cache")
def test_another_toolkit_in_the_same_place_compiles_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """With wheels their versions say which; a toolkit of the system has none."""
    kept.unversioned_libraries.cache_clear()
    assert kept.unversioned_libraries() == []
    versions = cuda.toolchain_cuda()
    unknown = {name: found for name, found in versions.items() if not name.startswith("nvidia")}
    monkeypatch.setattr(cuda, "toolchain_cuda", lambda: unknown)
    kept.unversioned_libraries.cache_clear()
    try:
        libraries = kept.unversioned_libraries()
    finally:
        kept.unversioned_libraries.cache_clear()
    assert [Path(path).stat().st_size for path, _, _ in libraries] == [size for _, size, _ in libraries]
    assert len(libraries) == 3
    monkeypatch.setattr(kept, "unversioned_libraries", lambda: libraries)
    compile_kept(copying(8), H200)
    with sharing.only_kept():
        compile_kept(copying(8), H200)
    monkeypatch.setattr(kept, "unversioned_libraries", lambda: [(path, size, 1) for path, size, _ in libraries])
    with pytest.raises(sharing.NotKeptError), sharing.only_kept():
        compile_kept(copying(8), H200)


@pytest.mark.usefixtures("build_cache")
def test_what_is_kept_needs_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe("copy", _copy)
    with pytest.raises(sharing.NotKeptError), sharing.only_kept():
        recipe.make(H200)
    made = recipe.make(H200)
    monkeypatch.setattr("schedsearch.runtime.ahead.Builder", None)
    code = CodeCache()
    assert compile_ahead([recipe], code, H200)["copy"].artifact == made.artifact
    assert recipe.artifact(code, H200) == made.artifact


def _copy(target: Target) -> Any:
    return compile_kept(copying(8), target)
