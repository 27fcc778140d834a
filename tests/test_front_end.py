"""Kernels of the same shape share one run of Numba, and are the same kernels as without sharing."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import cuda, types

from schedsearch.backend import CompileError, compile_source, front_end, kernel_identity, sharing
from schedsearch.backend.build_cache import BuildCache
from schedsearch.backend.cuda import _compile_to_ptx
from schedsearch.backend.front_end import _front_end
from schedsearch.backend.ops import device_op
from schedsearch.backend.signatures import signature
from schedsearch.launch import Grid, Param, Pointer, Scalar
from schedsearch.target import PRESETS
from schedsearch.template import KernelSource, KernelStep, Template, load_reference
from schedsearch.templates.conv2d.halo import Conv2dHalo
from schedsearch.templates.conv2d.mma import Conv2dMma
from schedsearch.templates.conv2d.stem import Conv2dStem
from schedsearch.templates.conv2d.wgmma import Conv2dWgmma
from schedsearch.workload import Workload

H200 = PRESETS["h200"]
store = device_op("store", "st.global.u32 [$address], $value;", ins={"address": "u64", "value": "u32"})


def scaling(factor: int, add: str = "add", twice: bool = False, length: int = 2) -> Callable[..., None]:
    """y[i] = factor * i + factor (or -), doubled on request, through a local array."""
    combine = device_op(add, f"{add}.u32 $sum, $a, $b;", ins={"a": "u32", "b": "u32"}, outs={"sum": "u32"}, pure=True)

    def kernel(y):  # type: ignore[no-untyped-def]
        def product(value: Any) -> Any:
            return types.uint32(value * factor)

        values = cuda.local.array(length, types.uint32)
        for i in range(length):
            values[i] = combine(product(cuda.threadIdx.x), factor)
            if twice:
                values[i] = types.uint32(values[i] * 2)
            store(y + 4 * (length * cuda.threadIdx.x + i), values[i])

    return kernel


def ptx(function: Callable[..., None], shaped_by: frozenset[str] | None, threads: int = 128) -> str:
    return _compile_to_ptx(
        KernelStep(function, (Pointer("y"),), Grid(1), threads, shaped_by=shaped_by), "kernel_0", "sm_90a"
    )


def runs_of_numba(build: Callable[[], Any]) -> int:
    before = _front_end.cache_info().misses
    build()
    return _front_end.cache_info().misses - before


SHAPED_BY = frozenset({"length"})
VARIANTS = [dict(factor=3), dict(factor=-7), dict(factor=2**40), dict(factor=3, add="sub"), dict(factor=8, twice=True)]


def test_kernels_that_differ_in_numbers_and_texts_share_one_run_and_are_as_if_compiled_alone() -> None:
    _front_end.cache_clear()
    alone = [ptx(scaling(**variant), None) for variant in VARIANTS]
    shared: list[str] = []
    assert runs_of_numba(lambda: shared.extend(ptx(scaling(**variant), SHAPED_BY) for variant in VARIANTS)) == 1
    assert shared == alone
    assert len(set(shared)) == len(VARIANTS)


def test_kernels_of_different_shapes_have_runs_of_their_own() -> None:
    _front_end.cache_clear()
    kernels = [scaling(5, length=length) for length in (1, 2, 3, 2)]
    assert runs_of_numba(lambda: [ptx(kernel, SHAPED_BY) for kernel in kernels]) == 3
    assert ptx(kernels[2], SHAPED_BY) == ptx(kernels[2], None)


def test_launch_bounds_are_those_of_the_kernel() -> None:
    assert ".maxntid 64" in ptx(scaling(3), SHAPED_BY, 64) and ".maxntid 96" in ptx(scaling(3), SHAPED_BY, 96)


@pytest.mark.parametrize("factor", [2**63, 2**64 - 1])
def test_unsigned_numbers_keep_their_type(factor: int) -> None:
    assert ptx(scaling(factor), SHAPED_BY) == ptx(scaling(factor), None)


def test_a_name_that_was_forgotten_costs_time_only() -> None:
    assert ptx(scaling(3, length=4), frozenset()) == ptx(scaling(3, length=4), None)


def test_a_mistake_in_a_kernel_is_reported_in_the_kernels_own_names() -> None:
    picky = device_op("picky", "st.global.u32 [$a], $value;", ins={"a": "u64", "value": "u32"})

    def kernel(y):  # type: ignore[no-untyped-def]
        picky(y, types.float32(1))

    with pytest.raises(CompileError, match="picky: value must be u32, got float32"):
        ptx(kernel, frozenset())


def test_an_optional_buffer_has_the_type_of_an_address() -> None:
    def kernel(y, bias):  # type: ignore[no-untyped-def]
        store(y, bias // 3)  # a division of signed numbers takes more instructions

    def compiled(param: Param) -> str:
        return _compile_to_ptx(KernelStep(kernel, (Pointer("y"), param), Grid(1), 32), "kernel_0", "sm_90a")

    assert compiled(Pointer("bias", optional=True)) == compiled(Pointer("bias"))


def test_operands_follow_the_named_arguments() -> None:
    """They are numbered and placed in memory like separate arguments. An absent address has the type of an address."""
    multiply = device_op("multiply", "mul.f32 $y, $a, $b;", ins={"a": "f32", "b": "f32"}, outs={"y": "f32"})

    def named(y, bias, a, b):  # type: ignore[no-untyped-def]
        store(y, bias // 3 + types.uint64(multiply(a, b)))

    def variadic(y, *operands):  # type: ignore[no-untyped-def]
        store(y, operands[0] // 3 + types.uint64(multiply(*operands[1:])))

    def compiled(function: Any, bias: Param) -> str:
        params = (Pointer("y"), bias, Scalar("a"), Scalar("b"))
        return _compile_to_ptx(KernelStep(function, params, Grid(1), 32), "kernel_0", "sm_90a")

    present, absent = Pointer("bias"), Pointer("bias", optional=True)
    assert compiled(variadic, present) == compiled(named, present) == compiled(variadic, absent)


# Two workloads per template, and the tile for which their kernels have the same shape.
GROUPED = dict(n=2, h=24, w=24, c=64, k=64, r=3, s=3, padding=1, groups=16, stride=2)
STEM = dict(n=2, h=24, w=24, c=4, k=64, r=3, s=3, padding=1)
DENSE: tuple[dict[str, int], dict[str, int]] = (
    dict(n=4, h=28, w=28, c=64, k=96, r=3, s=3, padding=1),
    dict(n=2, h=17, w=9, c=256, k=72, r=1, s=1),
)
SAME_SHAPE: list[tuple[Template, tuple[dict[str, int], dict[str, int]], dict[str, Any]]] = [
    (Conv2dWgmma(), DENSE, dict(bn=32, bk=64, cluster_m=2, split_k=2)),
    (Conv2dMma(), DENSE, dict(bm=64, bn=32, bk=32, wm=32, wn=16, slices=1, loads="copies")),
    (Conv2dMma(), DENSE, dict(bm=64, bn=32, bk=32, wm=32, wn=16, slices=1, loads="tma")),
    (Conv2dHalo(), (GROUPED, {**GROUPED, "n": 5, "h": 23}), dict(tile_h=12, tile_w=12, merged=2, schedule="together")),
    (Conv2dStem(), (STEM, {**STEM, "n": 5, "h": 30}), dict(tile_w=16, patches=1)),
]


@pytest.mark.long
@pytest.mark.parametrize(("template", "shapes", "tile"), SAME_SHAPE, ids=lambda value: getattr(value, "name", ""))
def test_a_candidate_that_shares_with_another_is_as_if_compiled_alone(
    template: Template, shapes: tuple[dict[str, int], dict[str, int]], tile: dict[str, Any]
) -> None:
    """The first differs in its tensors, its other knobs and its epilogue. Both read a residual: the words of it that a
    thread loads ahead are an array, whose size is part of a kernel's shape."""
    _front_end.cache_clear()
    epilogues: list[list[str]] = [["residual"], ["bias", "residual", "relu"]]
    for number, (shape, epilogue) in enumerate(zip(shapes, epilogues)):
        workload = Workload.conv2d(**shape, epilogue=epilogue)
        space = template.space(workload, H200).restrict({name: [value] for name, value in tile.items()})
        source = template.kernel(workload, H200, space.sample(1, np.random.default_rng(number))[0])
        shared = compile_source(source, H200).artifact
    assert _front_end.cache_info().misses == len(source.steps), "all steps were compiled by sharing, and once"
    assert shared == compile_source(without_sharing(source), H200).artifact


@pytest.mark.long
@pytest.mark.parametrize("cached", [True, False])
def test_processes_share_the_work_of_numba(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cached: bool) -> None:
    """Through the user's cache or, if that is off, through a folder of the run."""
    runs = []

    def counted(shape: Any, run: Callable[[Any], str] = front_end._run_numba) -> str:
        runs.append(shape)
        return run(shape)

    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setattr(sharing, "user_cache", lambda: BuildCache(tmp_path / "cache") if cached else None)
    monkeypatch.setattr(sharing, "_run_folder", tmp_path)
    monkeypatch.setattr(front_end, "_run_numba", counted)
    texts = []
    for factor in (3, 5):
        _front_end.cache_clear()  # as in a new process
        texts.append(ptx(scaling(factor), SHAPED_BY))
    assert len(runs) == 1
    assert texts == [ptx(scaling(factor), None) for factor in (3, 5)]
    assert bool(list((tmp_path / "cache").iterdir())) == cached


PRINT_KEYS = """
import sys
sys.path[:] = {path!r}
from test_front_end import keys
print(*keys(), sep="\\n")
"""


def keys() -> list[str]:
    """The names of the templates' kernels in the build cache."""
    found = []
    for template in (Conv2dWgmma(), Conv2dMma(), Conv2dHalo(), Conv2dStem()):
        channels = 4 if template.name == "conv2d_stem" else 64
        workload = Workload.conv2d(n=2, h=24, w=24, c=channels, k=64, r=3, s=3, padding=1, epilogue=["bias", "relu"])
        for step in template.kernel(workload, H200, template.default(workload, H200, template.space(workload, H200))).steps:
            assert step.shaped_by is not None
            shape, _ = front_end._take_apart(step.function, signature(step), (9, 0), (128, 1), step.shaped_by)
            key = front_end._key(shape)
            assert key is not None and key.lasting
            found.append(key.digest)
    return found


@pytest.mark.long
def test_all_processes_call_a_shape_the_same() -> None:
    script = PRINT_KEYS.format(path=sys.path)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == keys()
    assert len(set(keys())) == 4


def test_kernels_of_templates_have_names_that_last() -> None:
    """Otherwise their output is not kept for later runs."""
    assert len(set(keys())) == 4  # which asserts it of each


def test_the_name_of_a_kernel_covers_the_named_tuples_that_it_makes() -> None:
    def kernel(fields: str, default: int) -> Callable[[], object]:
        place = namedtuple("Place", fields, defaults=[default])

        def made() -> object:
            return place(1)

        return made

    names = {kernel_identity.identity(kernel(*each)) for each in (("a b", 0), ("a c", 0), ("a b", 1), ("a b", 0))}
    assert len(names) == 3


@pytest.mark.long
def test_references_of_all_workloads_share_one_run() -> None:
    """They are compiled in the process that feeds the device, and the device waits for them."""
    _front_end.cache_clear()
    for shape in (
        dict(n=2, h=9, w=7, c=64, k=24, r=3, s=3, padding=1),
        dict(n=1, h=30, w=30, c=6, k=10, r=1, s=1, groups=2),
    ):
        source = load_reference("conv2d").kernel(Workload.conv2d(**shape), H200)
        assert compile_source(source, H200).artifact == compile_source(without_sharing(source), H200).artifact
    assert _front_end.cache_info().misses == 1


def without_sharing(source: KernelSource) -> KernelSource:
    return dataclasses.replace(source, steps=tuple(dataclasses.replace(step, shaped_by=None) for step in source.steps))
