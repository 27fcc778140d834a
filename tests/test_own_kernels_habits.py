"""What users of Numba and Triton type on a kernel works, or says what to do."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import cuda

import schedsearch
from schedsearch.errors import (
    ArgumentError,
    NoRecordError,
    NoValidConfigError,
    UntunedWarning,
    UsageError,
    WrongResultError,
)


def double(x, y, *, each):  # type: ignore[no-untyped-def]
    first = cuda.grid(1) * each
    for i in range(first, min(first + each, x.size)):
        y[i] = 2 * x[i]


def tunable(function: Any = double, **options: Any) -> Any:
    return schedsearch.tunable(
        knobs={"each": (1, 4), "threads": (256, 64)},
        grid=lambda x, k: -(-x.size // (k.threads * k.each)),
        block=lambda k: k.threads,
        outputs=["y"],
        reference=lambda x: 2 * x,
        **options,
    )(function)


@pytest.fixture
def kernel(tmp_path: Path) -> Any:
    return tunable(db=tmp_path / "own.db")


X = np.arange(100, dtype=np.float32)


@pytest.mark.parametrize("grid", [(4, 256), (4,), 4, ((4, 1), (16, 16))], ids=str)
def test_a_grid_in_brackets_is_answered_with_the_call_to_write(kernel: Any, grid: Any) -> None:
    with pytest.raises(UsageError, match=r"is not needed: call double\(x, y\).*double\(x, y, stream=\.\.\.\)"):
        kernel[grid](X, np.empty_like(X))


class TestNames:
    def test_arrays_are_given_by_name_in_any_order_everywhere(self, kernel: Any) -> None:
        y = np.zeros_like(X)
        with pytest.warns(UntunedWarning):
            kernel(y=y, x=X)
        np.testing.assert_array_equal(y, 2 * X)
        y[:] = 0
        kernel.bind(X, y=y)()
        np.testing.assert_array_equal(y, 2 * X)
        assert kernel.workload(y=y, x=X) == kernel.workload(X, y) == kernel.task(x=X, y=y).workload
        assert kernel.explain(x=X, y=y, target="cpu").workload == kernel.workload(X, y)

    @pytest.mark.parametrize(
        ("args", "named", "text"),
        [
            ((X,), {}, r"takes 2 arguments \(x, y\), got 1"),
            ((X,), {"x": X}, "gets x twice"),
            ((), {"x": X}, "lacks y; it takes x, y"),
            ((X, X), {"each": 4}, r"not 'each'; it is a knob.*restrict=\{'each': \[\.\.\.\]\}"),
            ((X, X), {"num_warps": 4}, "not 'num_warps'; the decorator has that"),
            ((X, X), {"grid": 4}, "not 'grid'; the decorator has that"),
            ((X,), {"z": X}, "takes x, y, not 'z'"),
        ],
    )
    def test_names_that_do_not_fit_are_answered(self, kernel: Any, args: Any, named: Any, text: str) -> None:
        for call in (kernel, kernel.bind, kernel.workload):
            with pytest.raises(UsageError, match=text):
                call(*args, **named)

    def test_help_shows_the_arguments(self, kernel: Any) -> None:
        assert list(inspect.signature(kernel).parameters) == ["x", "y"]


@pytest.mark.parametrize(
    ("x", "text"),
    [
        ([1.0, 2.0], r"x is a list; .*numpy\.asarray\(x, numpy\.float32\)"),
        ((1.0, 2.0), "x is a tuple; .*pass its parts"),
        (None, "x is None; allowed: a torch, CuPy or NumPy array"),
        ("x", "is not a shape"),
        (X.astype(np.complex64), "x has dtype complex64; allowed: "),
        (X > 1, r"x has dtype bool; .*x\.view\('uint8'\)"),
        (np.float32(1), "x is .*allowed: an array, or an integer"),
        (X[:0], r"x has shape \(0,\)"),
    ],
    ids=["list", "tuple", "None", "text", "complex", "bool", "scalar", "empty"],
)
def test_what_is_no_array_of_numbers_is_answered(kernel: Any, x: Any, text: str) -> None:
    with pytest.raises((ArgumentError, UsageError), match=text):
        kernel(x, np.empty_like(X))


def test_an_output_that_the_caller_did_not_make_is_answered(kernel: Any) -> None:
    with pytest.raises(ArgumentError, match="y is None, and the kernel writes it; give it an array"):
        kernel(X, None)


class TestAttributes:
    @pytest.mark.parametrize(
        "name",
        ["compile", "specialize", "recompile", "forall", "configure", "inspect_asm", "inspect_types", "parallel_diagnostics",
         "signatures", "overloads", "get_regs_per_thread", "run", "warmup", "fn", "best_config"],
    )  # fmt: skip
    def test_those_of_numba_and_triton_name_what_to_use(self, kernel: Any, name: str) -> None:
        assert not hasattr(kernel, name)
        with pytest.raises(AttributeError, match=f"double has no '{name}': ") as caught:
            getattr(kernel, name)
        assert "{" not in str(caught.value)

    def test_others_name_the_nearest(self, kernel: Any) -> None:
        with pytest.raises(AttributeError, match=r"double has no attribute 'tunes' \(did you mean 'tune'\?\)"):
            kernel.tunes  # noqa: B018

    def test_the_function_is_there(self, kernel: Any) -> None:
        assert kernel.py_func is double


class TestJit:
    def test_above_the_decorator_says_to_take_it_off(self, kernel: Any) -> None:
        for decorate in (cuda.jit, cuda.jit()):
            with pytest.raises(AttributeError, match=r"take off the decorator above it: schedsearch\.tunable"):
                decorate(kernel)

    def test_below_the_decorator_its_options_are_those_of_the_launch(self, tmp_path: Path) -> None:
        function = cuda.jit(fastmath=True, max_registers=32)(double)
        (launch,) = tunable(function).definition.formulations[0].launches
        assert launch.function is double and launch.fastmath and launch.max_registers == 32
        (launch,) = tunable(function, max_registers=64).definition.formulations[0].launches
        assert launch.max_registers == 64

    def test_a_device_function_is_refused(self) -> None:
        with pytest.raises(UsageError, match=r"double is a device function.*leave out device=True"):
            tunable(cuda.jit(device=True)(double))


class TestUntuned:
    def test_a_dtype_or_shape_without_a_record_is_said_once_with_the_remedy(self, kernel: Any) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for array in (X, X, X.astype(np.float64), X, X.astype(np.float64)):
                kernel(array, np.empty_like(array))
            kernel.bind(X, np.empty_like(X))()
        assert [each.category for each in caught] == [UntunedWarning, UntunedWarning]
        assert caught[0].filename == __file__, "the warning points at the call"
        text = str(caught[0].message)
        assert "double x=100:f32 y=100:f32 is not tuned on this device" in text
        assert "your own choice (each=1, threads=256). double.tune(...)" in text and "own.db" in text

    @pytest.mark.long
    def test_nothing_is_said_of_one_that_was_tuned(self, kernel: Any) -> None:
        kernel.tune(x=X, y=np.empty_like(X), trials=1, workers=1, tuner="grid", progress=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kernel(X, np.empty_like(X))
        deployed = schedsearch.own_kernel("double", kernel.db)
        y = np.empty_like(X)
        deployed(y=y, x=X)
        np.testing.assert_array_equal(y, 2 * X)
        with pytest.raises(UsageError, match=r"call double\(x, y\)"):
            deployed[1, 2]
        with pytest.raises(NoRecordError, match="tune this shape"):
            deployed(X[:50], y[:50])


def test_a_run_whose_trials_all_fail_raises_with_reason_place_and_remedy(tmp_path: Path) -> None:
    def short(x, y):  # type: ignore[no-untyped-def]
        i = cuda.grid(1)
        if i < x.size - 3:
            y[i] = 2 * x[i]

    kernel = schedsearch.tunable(
        knobs={"threads": (256,)}, grid=lambda x, k: -(-x.size // k.threads), block=lambda k: k.threads, outputs=["y"],
        reference=lambda x: 2 * x, db=tmp_path / "own.db",
    )(short)  # fmt: skip
    with pytest.raises(NoValidConfigError) as caught:
        kernel.tune("4992:float32", "4992:float32", target="cpu", workers=1, progress=False)
    text = str(caught.value)
    assert "all trials failed (1 wrong_answer). The first, your own choice (threads=256): wrong_answer: " in text
    assert "y: 3 of 4,992 elements were never written, the first is y[4989]" in text and "largest error" not in text
    assert "correct the kernel, or its reference" in text and "report" not in text
    assert f"in {__file__}, line {short.__code__.co_firstlineno}" in text
    assert caught.value.exit_code == 1 and caught.value.summary.tasks[0].failure.config == {"threads": 256}


def test_a_call_of_a_wrong_kernel_says_first_what_is_wrong(tmp_path: Path) -> None:
    kernel = schedsearch.tunable(
        knobs={"each": (1, 4)},
        grid=lambda x: x.size // 128,  # too few blocks for the last elements
        block=128,
        outputs=["y"],
        reference=lambda x: 2 * x,
        db=tmp_path / "own.db",
    )(double)
    x = np.arange(132, dtype=np.float32)
    with pytest.raises(WrongResultError, match=r"on [^:]*: default: .*4 of 132 elements were never written") as caught:
        kernel(x, np.empty_like(x))
    assert str(caught.value).endswith("Correct the kernel, or its reference")
    assert str(caught.value).count("never written") == 1


@pytest.mark.parametrize("time_s", ["1", 0, float("nan")])
def test_a_wrong_time_is_named_with_its_type(kernel: Any, time_s: Any) -> None:
    with pytest.raises(UsageError) as caught:
        kernel.tune(X, np.empty_like(X), time_s=time_s)
    assert str(caught.value) == f"time_s {time_s!r} is not possible; allowed: a number of seconds, more than 0"


def test_a_misspelt_name_of_the_package_is_suggested_by_python() -> None:
    done = subprocess.run([sys.executable, "-c", "import schedsearch; schedsearch.compil"], capture_output=True, text=True)
    assert "has no attribute 'compil'" in done.stderr and "Did you mean: 'compile'?" in done.stderr
