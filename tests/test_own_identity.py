"""A record belongs to what was built: to the values that a kernel captured then, wherever they stand."""

from __future__ import annotations

import math
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import cuda

import schedsearch
from schedsearch.backend.code_identity import code_digest
from schedsearch.errors import NoRecordError, SchedsearchError

SHIFT = 10.0
TABLE = np.array([1.0, 2.0])


@cuda.jit(device=True)
def shifted_on_device(v: Any) -> Any:
    return v + SHIFT


def shifted(v: Any) -> Any:
    return shifted_on_device(v) + TABLE[1] - 2


def shift(x: Any, y: Any) -> None:
    i = cuda.grid(1)
    if i < x.size:
        y[i] = shifted(x[i])


def own(function: Callable[..., None], folder: Path, **options: Any) -> Any:
    return schedsearch.tunable(
        knobs={"threads": (64, 128)}, grid=lambda x, k: -(-x.size // k.threads), block=lambda k: k.threads, outputs=["y"],
        db=folder / "own.db", **options,
    )(function)  # fmt: skip


def test_a_kernel_on_a_cpu_may_call_device_functions_through_plain_ones(tmp_path: Path) -> None:
    kernel, x = own(shift, tmp_path), np.arange(200, dtype=np.float32)
    y = np.zeros_like(x)
    kernel(x, y)
    np.testing.assert_array_equal(y, x + 10)


def test_a_device_function_with_names_that_a_cpu_lacks_is_named(tmp_path: Path) -> None:
    @cuda.jit(device=True)
    def waits(v: Any) -> Any:
        cuda.syncthreads()
        return v

    def copy(x: Any, y: Any) -> None:
        i = cuda.grid(1)
        if i < x.size:
            y[i] = waits(x[i])

    x = np.ones(64, np.float32)
    with pytest.raises(NoRecordError, match="syncthreads"):
        own(copy, tmp_path)(x, np.zeros_like(x))


@pytest.mark.parametrize("name", ["SHIFT", "TABLE"])
def test_a_shape_that_is_built_later_has_the_present_values_and_another_identity(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, x = own(shift, tmp_path), np.arange(200, dtype=np.float32)
    y = np.zeros_like(x)
    kernel(x, y)
    before = kernel.workload(x, y).code
    monkeypatch.setitem(globals(), name, {"SHIFT": 99.0, "TABLE": np.array([1.0, 91.0])}[name])
    kernel(x[:100], y[:100])
    np.testing.assert_array_equal(y[:100], x[:100] + 99)
    assert kernel.workload(x, y).code != before
    monkeypatch.undo()
    assert kernel.workload(x, y).code == before


def test_a_task_whose_captured_values_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = own(shift, tmp_path).task("64:float32", "64:float32")
    monkeypatch.setitem(globals(), "SHIFT", 99.0)
    with pytest.raises(SchedsearchError, match="changed after its task was made"):
        schedsearch.tune([task], tmp_path / "own.db", target="cpu", trials=1, workers=1)


FILE = """
import schedsearch, helping
from helping import scaled
from numba import cuda
SHIFT = 10.0
@schedsearch.tunable(knobs={"threads": (64, 128)}, grid=lambda x, k: -(-x.size // k.threads), block=lambda k: k.threads,
                     outputs=["y"], db="own.db")
def shift(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = scaled(x[i]) + SHIFT + helping.MORE
"""
HELPING = "FACTOR = 2.0\nMORE = 0.5\ndef scaled(v):\n    return FACTOR * v\n"
USE = "import contextlib, numpy as np, schedsearch, shifting, helping; x = np.ones(300, np.float32); y = np.zeros_like(x); "


@pytest.mark.long
@pytest.mark.parametrize("changed", ["shifting.SHIFT", "helping.FACTOR", "helping.MORE"])
def test_a_process_with_the_file_as_it_stands_never_gets_the_number_of_another(changed: str, tmp_path: Path) -> None:
    (tmp_path / "shifting.py").write_text(FILE)
    (tmp_path / "helping.py").write_text(HELPING)

    def run(code: str) -> str:
        done = subprocess.run([sys.executable, "-c", USE + code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        return done.stdout.strip() or done.stderr.strip().splitlines()[-1]

    tuned = run(
        f"{changed} = 7.0\nwith contextlib.suppress(schedsearch.NoValidConfigError):\n"
        "    shifting.shift.tune(x, y, trials=2, workers=1)\nshifting.shift(x, y); print(y[0])"
    )
    right = {"shifting.SHIFT": 9.5, "helping.FACTOR": 17.5, "helping.MORE": 19.0}[changed]
    assert tuned == str(right) or "values of modules that were changed" in tuned
    assert run("shifting.shift(x, y); print(y[0])") == "12.5"


@pytest.mark.parametrize("kind", ["float16"])
def test_a_format_that_numba_lacks_on_a_cpu_is_named(kind: str, tmp_path: Path) -> None:
    x = np.ones(64, kind)
    with pytest.raises(NoRecordError, match=f"x of shift is {kind}, which Numba lacks on a CPU"):
        own(shift, tmp_path)(x, np.zeros_like(x))


def _bounds(code: Any, n: int = 2, *, names: Any = ("a", b"b", None, ...)) -> Any:
    return [math.sqrt(float(TABLE[0])) if item else _bounds for item in range(n)], code, (lambda: SHIFT)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="bytecode, and so the digest, is of a minor version of Python")
def test_the_digest_of_a_kernel_finds_the_records_of_earlier_versions() -> None:
    captured = types.SimpleNamespace(a=1.5, b={"x": [True, 2j]}, c=frozenset({1, 2}))
    assert code_digest([_bounds, 3, "text"], [captured, np.float32(2), np.add, object()]) == "a2ea818596dec574"
