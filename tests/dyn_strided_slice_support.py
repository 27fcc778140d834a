"""Slices whose positions are arrays on the device: NumPy's, and the emulated kernel."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from moves_emulator import MovesEmulator

from schedsearch import Workload, dyn_strided_slice
from schedsearch.config import Config
from schedsearch.target import PRESETS
from schedsearch.template import load_template
from schedsearch.templates.dyn_strided_slice import kernel
from schedsearch.testing.emulator import Memory

H200 = PRESETS["h200"]
CUDA, CPU = load_template("dyn_strided_slice_cuda"), load_template("dyn_strided_slice_cpu")
FAR = 2**31 - 1


@dataclass(frozen=True)
class Slice:
    """A slice of an array of a shape; `end` holds counts if `mode` is size."""

    shape: tuple[int, ...]
    begin: Sequence[int]
    end: Sequence[int]
    strides: Sequence[int] | None = None
    axes: Sequence[int] = ()
    mode: str = "end"

    def expected(self, x: Any) -> Any:
        index = [slice(None)] * x.ndim
        for entry, axis in enumerate(self.axes or range(len(self.begin))):
            begin, end = self.begin[entry], self.end[entry]
            if self.mode == "size":
                first = range(x.shape[axis])[begin:]
                chosen = first if end == -1 else first[:end]
                index[axis] = slice(chosen.start, chosen.stop)
            else:
                index[axis] = slice(begin, end, self.strides[entry] if self.strides is not None else 1)
        return x[tuple(index)]

    def workload(self, **more: Any) -> Workload:
        strided = self.strides is not None and self.mode == "end"
        return dyn_strided_slice(
            x=self.shape, axes=self.axes, entries=len(self.begin), mode=self.mode, strided=strided, **more
        )

    def operands(self, index_dtype: str = "int64") -> dict[str, Any]:
        found = {"begin": np.array(self.begin, index_dtype), "end": np.array(self.end, index_dtype)}
        if self.strides is not None and self.mode == "end":
            found["strides"] = np.array(self.strides, index_dtype)
        return found


def tvm_slices(shared: Path) -> list[Slice]:
    """All slices of TVM's tests whose numbers are whole; lists are made equally long, as in its static operator."""
    families = json.loads((shared / "cases" / "operator_cases.json").read_text(encoding="utf-8"))["cases"]
    rng, found = np.random.default_rng(0), []
    for family, cases in families.items():
        for case in cases if "strided_slice" in family else ():
            shape = case.get("dshape") or case.get("in_shape") or case.get("np_shape")
            if "ANY" in shape:
                shape = [case["unknown_dim_value"]] * len(shape)
            if case.get("values") == "random":
                begin = [int(n) for n in rng.integers(-5, 5, len(shape))]
                end = [int(n) for n in rng.integers(0, 12, len(shape))]
                case = {**case, "begin": begin, "end": end, "strides": [1] * len(shape)}
            begin, end, strides = case["begin"], case["end"], case.get("strides")
            count = max(len(begin), len(end))
            begin = [*begin, *[0] * (count - len(begin))]
            end = [FAR if n is None else n for n in [*end, *[FAR] * (count - len(end))]]
            axes = tuple(case.get("axes") or ())
            mode = case.get("slice_mode") or "end"
            found.append(Slice(tuple(shape), begin, end, None if mode == "size" else strides, axes, mode))
    return found


def any_bits(shape: Sequence[int], dtype: str = "float16") -> Any:
    bits = np.random.default_rng(7).integers(0, 2**62, shape, np.uint64)
    return bits.astype(f"u{np.dtype(dtype).itemsize}")


def small_blocks(unroll: int) -> Config:
    """A configuration whose blocks the emulator can run."""
    return Config(threads=32, unroll=unroll, persistent=True, blocks_per_sm=2, stores="default")


def emulate(patch: pytest.MonkeyPatch, workload: Workload, arrays: Any, config: Config, **strides: int) -> tuple[Any, Any]:
    """(y, y_extents); what is not written keeps the bytes 0xA5."""
    memory = Memory()
    emulator = MovesEmulator(memory)
    emulator.stand_in(patch, kernel)
    y = np.full(workload.bound, 0xA5, "u1").repeat(arrays["x"].itemsize).view(arrays["x"].dtype).reshape(workload.bound)
    extents = np.full(len(workload.bound), -1, np.int64)
    buffers = {name: memory.add(array) for name, array in {**arrays, "y": y, "y_extents": extents}.items()}
    scalars = {scalar.name: scalar.default for scalar in workload.scalars} | strides
    (step,) = CUDA.kernel(workload, H200, config).steps
    emulator.run(step, buffers, sms=1, scalars=scalars)
    return y, extents


def check(y: Any, extents: Any, wanted: Any, what: Any, *, untouched: bool = True) -> None:
    assert extents.tolist() == list(wanted.shape), what
    inside = tuple(slice(n) for n in wanted.shape)
    np.testing.assert_array_equal(y[inside], wanted, err_msg=str(what))
    if untouched:
        beyond = np.ones(y.shape, bool)
        beyond[inside] = False
        assert (y[beyond].view("u1") == 0xA5).all(), f"{what} writes beyond its extents"
