"""A third-party package with small operators. Each differs from a convolution in one way. `install` registers them.

copy        no weight and no arithmetic; exact
take        an index argument
total       sums without products
product     int8 x int8 -> int32, or saturated to int8
extreme     two outputs of different dtypes: each row's largest element and its place
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import plugin_support
import pytest
from numba import types

from schedsearch.backend.cpu_ops import as_array
from schedsearch.backend.ops import device_op
from schedsearch.config import Config
from schedsearch.launch import Grid, Int64, Pointer
from schedsearch.ops import ArgSpec, Op, Parameter, Work, dtype
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Reference, Template
from schedsearch.templates.parts.reference import reader, reference_source, sharer, writer
from schedsearch.workload import Workload

Params = Mapping[str, Any]


# ---- operators


class Copy(Op):
    """y = x."""

    name: ClassVar[str] = "copy"
    reference: ClassVar[str] = "toy_package:CopyReference"

    def parameters(self) -> Mapping[str, Parameter]:
        dtypes = (
            "float32",
            "float16",
            "bfloat16",
            "float64",
            "float8_e4m3",
            "float8_e5m2",
            "int8",
            "uint8",
            "int32",
            "int64",
            "int16",
            "uint16",
        )
        return {"rows": Parameter.count("rows of x"), "dtype": Parameter.choice("of x and y; default float32", dtypes)}

    def arguments(self, p: Params) -> tuple[ArgSpec, ...]:
        return (ArgSpec("x", "R", (p["rows"],), p["dtype"]),)

    def outputs(self, p: Params) -> tuple[ArgSpec, ...]:
        return (ArgSpec("y", "R", (p["rows"],), p["dtype"]),)

    def equality(self, p: Params) -> Literal["exact", "rounded"]:
        return "exact"


class Take(Op):
    """y[i] = x[where[i]]."""

    name: ClassVar[str] = "take"
    reference: ClassVar[str] = "toy_package:TakeReference"

    def parameters(self) -> Mapping[str, Parameter]:
        return {"rows": Parameter.count("rows of x"), "taken": Parameter.count("rows of y")}

    def arguments(self, p: Params) -> tuple[ArgSpec, ...]:
        where = ArgSpec("where", "T", (p["taken"],), "int32", role="index", below=p["rows"])
        return ArgSpec("x", "R", (p["rows"],), "float32"), where

    def outputs(self, p: Params) -> tuple[ArgSpec, ...]:
        return (ArgSpec("y", "T", (p["taken"],), "float32"),)

    def equality(self, p: Params) -> Literal["exact", "rounded"]:
        return "exact"


class Total(Op):
    """y[r] = sum of row r of x."""

    name: ClassVar[str] = "total"
    reference: ClassVar[str] = "toy_package:TotalReference"

    def parameters(self) -> Mapping[str, Parameter]:
        return {
            "rows": Parameter.count("rows of x"),
            "columns": Parameter.count("columns of x"),
            "dtype": Parameter.choice("of x and y; default float32", ("float32", "float16")),
        }

    def arguments(self, p: Params) -> tuple[ArgSpec, ...]:
        return (ArgSpec("x", "RC", (p["rows"], p["columns"]), p["dtype"], role="addend"),)

    def outputs(self, p: Params) -> tuple[ArgSpec, ...]:
        return (ArgSpec("y", "R", (p["rows"],), p["dtype"]),)

    def work(self, p: Params) -> Work:
        return Work(p["rows"] * p["columns"], super().work(p).nbytes, reduction=p["columns"])


class Product(Op):
    """y[m, n] = sum over k of x[m, k] * weight[n, k], saturated to the output's format."""

    name: ClassVar[str] = "product"
    reference: ClassVar[str] = "toy_package:ProductReference"

    def parameters(self) -> Mapping[str, Parameter]:
        return {
            "m": Parameter.count("rows of y"),
            "n": Parameter.count("columns of y"),
            "k": Parameter.count("length of the sums"),
            "dtype": Parameter.choice("of x; default int8", ("int8", "uint8")),
            "out_dtype": Parameter.choice("of y; default int32", ("int32", "int8", "uint8")),
        }

    def arguments(self, p: Params) -> tuple[ArgSpec, ...]:
        x = ArgSpec("x", "MK", (p["m"], p["k"]), p["dtype"], role="factor")
        return x, ArgSpec("weight", "NK", (p["n"], p["k"]), "int8", role="factor", constant=True)

    def outputs(self, p: Params) -> tuple[ArgSpec, ...]:
        return (ArgSpec("y", "MN", (p["m"], p["n"]), p["out_dtype"]),)

    def work(self, p: Params) -> Work:
        return Work(2 * p["m"] * p["n"] * p["k"], super().work(p).nbytes, reduction=p["k"])


class Extreme(Op):
    """top[r] = the largest element of row r; place[r] = the first column that holds it."""

    name: ClassVar[str] = "extreme"
    reference: ClassVar[str] = "toy_package:ExtremeReference"

    def parameters(self) -> Mapping[str, Parameter]:
        return {"rows": Parameter.count("rows of x"), "columns": Parameter.count("columns of x")}

    def arguments(self, p: Params) -> tuple[ArgSpec, ...]:
        return (ArgSpec("x", "RC", (p["rows"], p["columns"]), "float32"),)

    def outputs(self, p: Params) -> tuple[ArgSpec, ...]:
        return ArgSpec("top", "R", (p["rows"],), "float32"), ArgSpec("place", "R", (p["rows"],), "int32")


# ---- the arithmetic, for any way to read and write; references and templates differ in these


def copy(w: Workload, read: Any, write: Any, items: Any) -> Callable[..., None]:
    read_x, write_y = read("x"), write("y")

    def kernel(x: Any, y: Any, start: Any, stop: Any) -> None:
        for i in items(start, stop):
            write_y(y, i, read_x(x, i))

    return kernel


def take(w: Workload, read: Any, write: Any, items: Any) -> Callable[..., None]:
    read_x, read_where, write_y = read("x"), read("where"), write("y")

    def kernel(x: Any, where: Any, y: Any, start: Any, stop: Any) -> None:
        for i in items(start, stop):
            write_y(y, i, read_x(x, read_where(where, i)))

    return kernel


def product(w: Workload, read: Any, write: Any, items: Any) -> Callable[..., None]:
    read_x, read_weight, write_y, n, depth = read("x"), read("weight"), write("y"), w.n, w.k
    row = dtype(w.out_dtype)
    low, high = int(row.lowest), int(row.largest)

    def kernel(x: Any, weight: Any, y: Any, start: Any, stop: Any) -> None:
        for i in items(start, stop):
            total = types.int64(0)
            for k in range(depth):
                total += read_x(x, i // n * depth + k) * read_weight(weight, i % n * depth + k)
            write_y(y, i, min(max(total, low), high))

    return kernel


def total(w: Workload, read: Any, write: Any, items: Any) -> Callable[..., None]:
    read_x, write_y, columns = read("x"), write("y"), w.columns

    def kernel(x: Any, y: Any, start: Any, stop: Any) -> None:
        for row in items(start, stop):
            total = 0.0
            for column in range(columns):
                total += read_x(x, row * columns + column)
            write_y(y, row, total)

    return kernel


def extreme(w: Workload, read: Any, write: Any, items: Any) -> Callable[..., None]:
    read_x, write_top, write_place, columns = read("x"), write("top"), write("place"), w.columns

    def kernel(x: Any, top: Any, place: Any, start: Any, stop: Any) -> None:
        for row in items(start, stop):
            best = 0
            for column in range(1, columns):
                if read_x(x, row * columns + column) > read_x(x, row * columns + best):
                    best = column
            write_top(top, row, read_x(x, row * columns + best))
            write_place(place, row, best)

    return kernel


# ---- references


class CopyReference(Reference):
    def kernel(self, workload: Workload, target: Target) -> KernelSource:
        function = copy(workload, *_truth(workload, target))
        return reference_source(workload, target, function, workload.rows)

    def points(self, workload: Workload, arrays: Any, scalars: Any, flat_indices: Any, output: str) -> Any:
        return arrays["x"][flat_indices]


class TakeReference(Reference):
    def kernel(self, workload: Workload, target: Target) -> KernelSource:
        function = take(workload, *_truth(workload, target))
        return reference_source(workload, target, function, workload.taken)

    def points(self, workload: Workload, arrays: Any, scalars: Any, flat_indices: Any, output: str) -> Any:
        return arrays["x"][arrays["where"][flat_indices]]


class TotalReference(Reference):
    def kernel(self, workload: Workload, target: Target) -> KernelSource:
        read, _, items = _truth(workload, target)
        read_x, write, columns = read("x"), writer(target), workload.columns

        def kernel(x: Any, y: Any, magnitude: Any, start: Any, stop: Any) -> None:
            for row in items(start, stop):
                total = bound = 0.0
                for column in range(columns):
                    total += read_x(x, row * columns + column)
                    bound += abs(read_x(x, row * columns + column))
                write(y, row, total)
                write(magnitude, row, bound)

        return reference_source(workload, target, kernel, workload.rows)

    def points(self, workload: Workload, arrays: Any, scalars: Any, flat_indices: Any, output: str) -> Any:
        return arrays["x"][flat_indices].astype(np.float64).sum(axis=1)


class ProductReference(Reference):
    def kernel(self, workload: Workload, target: Target) -> KernelSource:
        function = product(workload, *_truth(workload, target))
        return reference_source(workload, target, function, workload.output.size)

    def points(self, workload: Workload, arrays: Any, scalars: Any, flat_indices: Any, output: str) -> Any:
        rows, columns = np.divmod(flat_indices, workload.n)
        sums = (arrays["x"][rows].astype(np.int64) * arrays["weight"][columns]).sum(axis=1)
        limits = np.iinfo(workload.out_dtype)
        return np.clip(sums, limits.min, limits.max)


class ExtremeReference(Reference):
    def kernel(self, workload: Workload, target: Target) -> KernelSource:
        read, write, items = _truth(workload, target)
        read_x, write_top, write_place, columns = read("x"), write("top"), write("place"), workload.columns

        def kernel(x: Any, top: Any, magnitude: Any, place: Any, start: Any, stop: Any) -> None:
            for row in items(start, stop):
                best = 0
                for column in range(1, columns):
                    if read_x(x, row * columns + column) > read_x(x, row * columns + best):
                        best = column
                write_top(top, row, read_x(x, row * columns + best))
                write_top(magnitude, row, 0.0)
                write_place(place, row, best)

        return reference_source(workload, target, kernel, workload.rows)

    def points(self, workload: Workload, arrays: Any, scalars: Any, flat_indices: Any, output: str) -> Any:
        rows = arrays["x"][flat_indices]
        return rows.max(axis=1) if output == "top" else rows.argmax(axis=1)


def _truth(workload: Workload, target: Target) -> tuple[Any, Any, Any]:
    """How a reference reads arguments, writes truths and shares items."""
    arguments = {spec.name: spec.dtype for spec in workload.signature}
    wide = {spec.name: "float64" if dtype(spec.dtype).is_float else "int64" for spec in workload.outputs}
    return lambda name: reader(target, arguments[name]), lambda name: writer(target, wide[name]), sharer(target)  # type: ignore[arg-type]


# ---- templates


class _Toy(Template):
    """One thread or a few per element of the output; knob `threads`."""

    make: ClassVar[Callable[..., Callable[..., None]]]

    def validate(self, workload: Workload, target: Target) -> str | None:
        wrong = [spec.dtype for spec in workload.outputs if spec.dtype not in _STORES]
        return f"the output is {wrong[0]}; allowed: {', '.join(_STORES)}" if wrong else None

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        threads = (1, 2) if self.kind == "cpu" else (64, 128, 256)
        return ConfigSpace([Knob("threads", threads, "that share the elements")])

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        return Config(threads=1 if self.kind == "cpu" else 128)

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        specs = (*workload.signature, *workload.outputs)
        dtypes = {spec.name: spec.dtype for spec in specs}
        function = type(self).make(
            workload,
            lambda name: reader(target, dtypes[name]),
            lambda name: _store(self.kind, dtypes[name]),
            sharer(target),
        )
        items, threads = workload.outputs[0].size, config["threads"]
        pointers = tuple(Pointer(spec.name) for spec in specs)
        if self.kind == "cpu":
            return KernelSource("cpu", "native", (KernelStep(function, pointers, Grid(items), threads),))
        step = KernelStep(function, (*pointers, Int64(0), Int64(items)), Grid(-(-items // threads)), threads)
        return KernelSource("cuda", "sm_{}{}".format(*target.compute_capability), (step,))


_STORES = {"float32": types.float32, "int32": types.int32, "int8": types.int8, "uint8": types.uint8}


def _store(kind: str, name: str) -> Any:
    numba_type, itemsize = _STORES[name], dtype(name).nbytes
    if kind == "cpu":

        def put(array: Any, index: Any, value: Any) -> None:
            as_array(types.int64(array) + itemsize * index, (1,), numba_type)[0] = value

        return put
    ptx, operand = {
        "float32": ("{ .reg .f32 f; cvt.rn.f32.f64 f, $value; st.global.f32 [$address], f; }", "f64"),
        "int32": ("{ .reg .s32 i; cvt.s32.s64 i, $value; st.global.b32 [$address], i; }", "i64"),
        "int8": ("{ .reg .s16 i; cvt.s16.s64 i, $value; st.global.u8 [$address], i; }", "i64"),
        "uint8": ("{ .reg .s16 i; cvt.s16.s64 i, $value; st.global.u8 [$address], i; }", "i64"),
    }[name]
    store = device_op(f"store_{name}", ptx, ins={"address": "i64", "value": operand})

    def put_there(array: Any, index: Any, value: Any) -> None:
        store(types.int64(array) + itemsize * index, value)

    return put_there


_MADE: dict[str, Callable[..., Any]] = {
    "copy": copy, "take": take, "total": total, "product": product, "extreme": extreme
}  # fmt: skip
OPERATORS: dict[str, type[Op]] = {op.name: op for op in (Copy, Take, Total, Product, Extreme)}
TEMPLATES: dict[str, type[Template]] = {
    f"{op}_{kind}": type(
        f"{op}_{kind}",
        (_Toy,),
        {"__module__": __name__, "name": f"{op}_{kind}", "op": op, "kind": kind, "make": staticmethod(make)},
    )
    for op, make in _MADE.items()
    for kind in ("cpu", "cuda")
}
globals().update(TEMPLATES)  # entry points and builder processes find these by name


def install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Registers the operators and templates like those of an installed package."""
    points = {
        plugin_support.OPERATORS: {name: f"toy_package:{op.__name__}" for name, op in OPERATORS.items()},
        plugin_support.TEMPLATES: {name: f"toy_package:{name}" for name in TEMPLATES},
    }
    plugin_support.install(monkeypatch, folder, "toy-package", points, {})
