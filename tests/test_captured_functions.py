"""Plain functions that a kernel captures are compiled into it, to the same machine code as if they were written inside."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conv2d_support import run_on_cpu
from numba import cuda, types

from schedsearch.backend import CompileError, compile_source, front_end, sharing
from schedsearch.backend.cpu_ops import as_array
from schedsearch.backend.cuda import _compile_to_ptx
from schedsearch.backend.ops import device_op
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.launch import Grid, Pointer
from schedsearch.target import PRESETS
from schedsearch.template import KernelSource, KernelStep

H200 = PRESETS["h200"]
Kernel = Callable[..., None]
store = device_op("store", "st.global.u32 [$address], $value;", ins={"address": "u64", "value": "u32"})


FLIPS = frozenset({"step.flip", "other.flip"})  # names of `ringed` that decide whether a branch exists


def operation(name: str) -> Any:
    """y = a `name` b of u32; `name` is PTX's."""
    return device_op(name, f"{name}.u32 $y, $a, $b;", ins={"a": "u32", "b": "u32"}, outs={"y": "u32"}, pure=True)


def ring_step(stages: int, flip: bool = True) -> Any:
    """The next slot of a ring and its phase: two results, an early return, a captured number and a captured condition."""

    def step(slot, phase):  # type: ignore[no-untyped-def]
        slot += 1
        if slot == stages:
            return 0, phase ^ 1 if flip else phase
        return slot, phase

    return step


def ringed(stages: int, add: str, offset: float) -> Kernel:
    """Steps of two rings, an operation, and arithmetic, all in captured functions. One of them captures others."""
    step, other, combine = ring_step(stages), ring_step(stages + 2, False), operation(add)

    def shifted(value):  # type: ignore[no-untyped-def]
        return types.uint32(types.float32(value) + types.float32(offset))

    def both(slot, phase):  # type: ignore[no-untyped-def]
        return combine(shifted(slot), phase)

    def kernel(y):  # type: ignore[no-untyped-def]
        slot, phase, far, turn = 0, 0, 0, 0
        for i in range(cuda.threadIdx.x):
            slot, phase = step(slot, phase)
            far, turn = other(far, turn)
            store(y + 4 * i, both(slot, phase) + far + turn)

    return kernel


def ringed_inside(stages: int, add: str, offset: float) -> Kernel:
    """`ringed` with all functions defined in the kernel, where Numba itself inlines them."""
    longer, combine = stages + 2, operation(add)

    def kernel(y):  # type: ignore[no-untyped-def]
        def step(slot, phase):  # type: ignore[no-untyped-def]
            slot += 1
            if slot == stages:
                return 0, phase ^ 1
            return slot, phase

        def other(slot, phase):  # type: ignore[no-untyped-def]
            slot += 1
            if slot == longer:
                return 0, phase
            return slot, phase

        slot, phase, far, turn = 0, 0, 0, 0
        for i in range(cuda.threadIdx.x):
            slot, phase = step(slot, phase)
            far, turn = other(far, turn)
            store(y + 4 * i, combine(types.uint32(types.float32(slot) + types.float32(offset)), phase) + far + turn)

    return kernel


def source(kernel: Kernel, shaped_by: frozenset[str] | None = None) -> KernelSource:
    return KernelSource("cuda", "sm_90a", (KernelStep(kernel, (Pointer("y"),), Grid(1), 128, shaped_by=shaped_by),))


def cubin(kernel: Kernel, shaped_by: frozenset[str] | None = None) -> bytes:
    return compile_source(source(kernel, shaped_by), H200).artifact.code


def ptx(kernel: Kernel, shaped_by: frozenset[str] | None = None) -> str:
    return _compile_to_ptx(source(kernel, shaped_by).steps[0], "kernel_0", "sm_90a")


def test_the_machine_code_is_that_of_the_kernel_with_the_functions_written_inside() -> None:
    for variant in [(4, "add", 0.5), (3, "sub", 0.25)]:
        assert cubin(ringed(*variant)) == cubin(ringed_inside(*variant))


def test_kernels_whose_captured_functions_capture_different_values_share_one_run_of_numba() -> None:
    front_end._front_end.cache_clear()
    variants = [(4, "add", 0.5), (5, "sub", 0.5), (2**33, "max", 0.5)]
    shared = [ptx(ringed(*variant), FLIPS) for variant in variants]
    assert front_end._front_end.cache_info().misses == 1
    assert shared == [ptx(ringed(*variant)) for variant in variants]


def test_shaped_by_names_a_captured_value_of_a_captured_function_by_its_path() -> None:
    front_end._front_end.cache_clear()
    for stages in (3, 4):
        assert ptx(ringed(stages, "add", 0.5), FLIPS | {"step.stages"}) == ptx(ringed(stages, "add", 0.5))
    assert front_end._front_end.cache_info().misses == 2  # `other.stages` is only a number, `step.stages` decides


@pytest.mark.parametrize(("first", "second"), [(0.0, -0.0), (1.0, 1.5)])
@pytest.mark.mostly_long(2)
def test_captured_floats_are_never_mixed_up(first: float, second: float) -> None:
    kernels = [ptx(ringed(4, "add", offset), FLIPS) for offset in (first, second)]
    assert kernels == [ptx(ringed(4, "add", offset)) for offset in (first, second)]


@pytest.mark.parametrize("unknown", ["stages", "step.slot", "ring.stages"])
def test_a_name_in_shaped_by_that_nothing_captures_is_an_error(unknown: str) -> None:
    captured = "both, both.combine, both.shifted, both.shifted.offset, other, other.flip, other.stages, step, step.flip"
    with pytest.raises(CompileError, match=f"shaped_by of kernel names {unknown}, which it does not capture.*{captured}"):
        ptx(ringed(4, "add", 0.5), frozenset({"step.stages", unknown}))


def filling(count: int) -> Kernel:
    """A captured function that writes to a local array of the kernel, and one with a loop and a default argument."""

    def fill(values, first):  # type: ignore[no-untyped-def]
        for i in range(count):
            values[i] = first + i

    def total(values, times=3):  # type: ignore[no-untyped-def]
        result = 0
        for i in range(count):
            result += times * values[i]
        return result

    def kernel(y):  # type: ignore[no-untyped-def]
        values = cuda.local.array(count, types.uint32)
        fill(values, 5)
        store(y, total(values) + total(values, times=10))

    return kernel


@pytest.mark.parametrize("shaped_by", [None, frozenset({"count"}), frozenset({"count", "fill.count", "total.count"})])
def test_captured_functions_change_arrays_that_they_are_given(shaped_by: frozenset[str] | None) -> None:
    """3 + 10 times (5 + 6 + 7 + 8): NVVM finds the sum before the kernel ever runs."""
    assert str(13 * (5 + 6 + 7 + 8)) in ptx(filling(4), shaped_by)


def doubled(value):  # type: ignore[no-untyped-def]
    return 2 * value


def quadrupled(value):  # type: ignore[no-untyped-def]
    return doubled(doubled(value))


def applied(function: Any) -> Any:
    def apply(value):  # type: ignore[no-untyped-def]
        return function(function(value))

    return apply


def test_functions_of_the_module_and_functions_as_arguments_are_compiled_in() -> None:
    def call(function, value):  # type: ignore[no-untyped-def]
        return function(value)

    def kernel(y):  # type: ignore[no-untyped-def]
        def plus_one(value: Any) -> Any:
            return value + 1

        store(y, quadrupled(call(plus_one, types.uint32(y))) + call(doubled, 50))

    def by_hand(y):  # type: ignore[no-untyped-def]
        store(y, 4 * (types.uint32(y) + 1) + 100)

    assert cubin(kernel) == cubin(kernel, frozenset()) == cubin(by_hand)


def test_an_inner_function_of_another_module_sees_its_own_module() -> None:
    """`applied` comes from another module, in which `doubled` is a different function."""
    module: dict[str, Any] = {"__name__": "elsewhere", "types": types}
    exec(
        "def doubled(value):\n    return value * 5\n"
        "def twice(value, call):\n    def inner(v):\n        return doubled(v)\n    return call(inner, value)\n",
        module,
    )
    twice = module["twice"]

    def call(function, value):  # type: ignore[no-untyped-def]
        return function(value)

    def kernel(y):  # type: ignore[no-untyped-def]
        store(y, twice(types.uint32(y), call))

    def by_hand(y):  # type: ignore[no-untyped-def]
        store(y, 5 * types.uint32(y))

    assert cubin(kernel) == cubin(by_hand)


def recursive() -> Any:
    def factorial(n):  # type: ignore[no-untyped-def]
        return n * factorial(n - 1) if n else 1

    return factorial


def recursive_in_module(n):  # type: ignore[no-untyped-def]
    return n * recursive_in_module(n - 1) if n else 1


@pytest.mark.parametrize("factorial", [recursive(), applied(recursive()), recursive_in_module])
def test_recursion_is_refused(factorial: Any) -> None:
    def kernel(y):  # type: ignore[no-untyped-def]
        store(y, factorial(3))

    for shaped_by in (None, frozenset[str]()):
        with pytest.raises(CompileError, match=r"calls itself.*write a loop instead"):
            ptx(kernel, shaped_by)


def test_functions_of_one_factory_may_call_each_other() -> None:
    def adding(before, addend):  # type: ignore[no-untyped-def]
        def added(value):  # type: ignore[no-untyped-def]
            return before(value) + addend

        return added

    three = adding(adding(doubled, 1), 2)

    def kernel(y):  # type: ignore[no-untyped-def]
        store(y, three(types.uint32(y)))

    def by_hand(y):  # type: ignore[no-untyped-def]
        store(y, types.uint32(y) * 2 + 1 + 2)

    assert cubin(kernel) == cubin(kernel, frozenset()) == cubin(by_hand)


def test_stores_after_a_call_of_a_captured_function_are_kept() -> None:
    """Where Numba inlines, it treats stores to arrays that nothing reads as dead code."""

    def fill(y, start, stop):  # type: ignore[no-untyped-def]
        out = as_array(y, (4,), types.float32)
        for i in range(start, stop):
            out[i] = types.float32(1)

    def kernel(y, start, stop):  # type: ignore[no-untyped-def]
        fill(y, start, stop)
        as_array(y, (5,), types.float32)[4] = types.float32(77)

    device = CpuDevice(detect("cpu"))
    source = KernelSource("cpu", "native", (KernelStep(kernel, (Pointer("y"),), Grid(4), 1),))
    assert run_on_cpu(device, source, {}, {"y": ((5,), np.float32)})["y"].tolist() == [1, 1, 1, 1, 77]
    device.close()


def test_a_function_that_is_assigned_after_the_kernel_is_made_must_be_there_when_it_is_compiled() -> None:
    def kernel(y):  # type: ignore[no-untyped-def]
        store(y, later(3))

    with pytest.raises(CompileError, match="later is captured before it has a value"):
        ptx(kernel, frozenset())

    def later(value):  # type: ignore[no-untyped-def]
        return value

    assert ptx(kernel, frozenset()) == ptx(kernel)


def test_a_mistake_in_a_captured_function_is_reported_in_numbas_words() -> None:
    def wrong(value):  # type: ignore[no-untyped-def]
        return value.real_part_of_nothing

    def kernel(y):  # type: ignore[no-untyped-def]
        store(y, wrong(y))

    with pytest.raises(CompileError, match="real_part_of_nothing"):
        ptx(kernel, frozenset())


def test_a_shape_that_needs_its_numbers_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A static index: Numba needs `place`, and `shaped_by` does not name it. Later kernels do not try again."""
    tried = []

    def run(shape: Any, original: Callable[[Any], str] = front_end._run_numba) -> str:
        tried.append(shape)
        return original(shape)

    def picking(place: int) -> Kernel:
        def kernel(y):  # type: ignore[no-untyped-def]
            store(y, (types.uint32(7), types.float32(1.5))[place])

        return kernel

    monkeypatch.setattr(front_end, "_run_numba", run)
    monkeypatch.setattr(sharing, "user_cache", lambda: None)
    front_end._front_end.cache_clear()
    for _ in range(3):
        assert ptx(picking(0), frozenset()) == ptx(picking(0))
    assert len(tried) == 1


@pytest.mark.parametrize("core", ["numba.core", "numba.cuda.core"])
def test_the_private_name_that_inlining_rests_on_is_there(core: str) -> None:
    """Numba calls it for every call in a function, and True means "inlined"."""
    closures = importlib.import_module(f"{core}.inline_closurecall")
    method = closures.InlineClosureCallPass._inline_closure
    assert list(inspect.signature(method).parameters) == ["self", "work_list", "block", "i", "func_def"]
    assert "_inline_closure" in closures.InlineClosureCallPass.run.__code__.co_names


def test_a_cpu_kernel_captures_plain_functions() -> None:
    limit, items = 3, 100

    def scaled(factor: float) -> Any:
        def scale(value, more=1):  # type: ignore[no-untyped-def]
            if value > limit:
                return value * factor, more
            return value, 2 * more

        return scale

    scale = scaled(7.0)

    def kernel(x, y, start, stop):  # type: ignore[no-untyped-def]
        given, result = as_array(x, (items,), types.float64), as_array(y, (items,), types.float64)
        for i in range(start, stop):
            value, added = scale(given[i])
            result[i] = doubled(value) + added

    target = detect("cpu")
    device = CpuDevice(target)
    x = np.arange(items, dtype=np.float64)
    step = KernelStep(kernel, (Pointer("x"), Pointer("y")), Grid(items), 2)
    y = run_on_cpu(device, KernelSource("cpu", "native", (step,)), {"x": x}, {"y": ((items,), np.float64)})["y"]
    device.close()
    np.testing.assert_array_equal(y, np.where(x > 3, 14 * x + 1, 2 * x + 2))
