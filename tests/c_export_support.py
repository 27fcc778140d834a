"""Databases of kernels for the C export, and the export compiled and called on a driver that only takes notes."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from child_environment import child_environment
from records_support import H200, record

from schedsearch.launch import (
    Artifact,
    Float32,
    Grid,
    Int32,
    Int64,
    LaunchPlan,
    Literal,
    NumbaArray,
    Number,
    Pointer,
    Scalar,
    Step,
    TensorMap,
)
from schedsearch.ops.dtypes import SCALAR_FORMATS
from schedsearch.ops.own_kernel import Argument, parameters_of
from schedsearch.records.store import Store
from schedsearch.workload import Workload

TESTS = Path(__file__).resolve().parent
STRICT = "-Wall -Wextra -Werror -pedantic -O1"
# An ELF file with one empty section: the fake driver does not look into it.
CODE = b"\x7fELF\2\1".ljust(40, b"\0") + struct.pack("<Q10xHHH", 64, 64, 1, 0) + bytes(64)

CONV = Workload.conv2d(n=2, h=14, w=14, c=64, k=64, r=3, s=3, padding=1, epilogue=("bias", "leaky_relu"))


def conv_artifact(arch: str = "sm_90a") -> Artifact:
    """A plan with every kind of parameter: a constant step, a persistent one in clusters, one with a shaped grid."""
    image = TensorMap(
        "x", "float16", (64, 14, 14, 2), (128, 1792, 25088), (1, 1, 1, 1), lower=(-1, -1), upper=(-1, -1),
        channels_per_pixel=64, pixels_per_column=128, swizzle_bytes=128, l2_promotion_bytes=256,
    )  # fmt: skip
    packed = TensorMap("packed", "float16", (64, 576), (128,), (1, 1), box=(32, 64), swizzle_bytes=64)
    array = NumbaArray("y", "float16", (2, 14, 14, 64), (25088, 1792, 128, 2))
    steps = (
        Step(
            "pack", (Pointer("weight"), Pointer("packed"), Int32(-7), Int64(-1), Float32(0.1)), Grid(98), 128, constant=True
        ),
        Step(
            "main",
            (
                image, packed, Pointer("bias"), Pointer("y"), Pointer("residual", optional=True), Scalar("leaky_relu_slope"),
                Number(-3, "int16"), Number(2.5, "float64"), Literal("relu"), Pointer("scratch"),
            ),
            Grid(1000, blocks_per_sm=1), block_threads=256, dynamic_shared_bytes=5000, cluster=4,
        ),
        Step("finish", (array, Pointer("sums")), Grid(24, shape=(4, 3, 2)), 64, block_shape=(8, 4, 2)),
        Step("again", (Pointer("sums"),), Grid(1000, blocks_per_sm=3), 64, cluster=1),
        Step("rounded", (Pointer("sums"),), Grid(7), 64, cluster=4),
    )  # fmt: skip
    workspaces = {"packed": 73728, "scratch": 100, "sums": 300}
    return Artifact(CODE, LaunchPlan("cuda", arch, steps, workspaces, {"x": 16, "y": 16, "scratch": 1024}))


OWN = Workload(
    "own_kernel",
    parameters_of(
        "own.kernels.scale",
        "c0de",
        [
            Argument("x", "float32", "in", (30,), (1,)),
            Argument("y", "float32", "inout", (30,), (1,)),
            Argument("register", "float32", "out", (30,), (1,)),
            Argument("n", "int64", "fixed", value=30),
            *(Argument(f"a_{name}", name, "scalar") for name in SCALAR_FORMATS),
        ],
        "default",
    ),
)


def own_artifact() -> Artifact:
    """An argument that is updated in place, and a scalar of every format."""
    scalars = tuple(Scalar(f"a_{name}", dtype=name) for name in SCALAR_FORMATS)
    arrays = tuple(NumbaArray(name, "float32", (30,), (4,)) for name in ("x", "y_after", "register"))
    restore = Step("restore", (Pointer("y"), Pointer("y_after")), Grid(1), 32, restores=True)
    main = Step("scale", (*arrays, Number(30, "int64"), *scalars), Grid(3), 32)
    return Artifact(CODE, LaunchPlan("cuda", "sm_90", (restore, main), alignments={"x": 4}))


def add(
    store: Store,
    workload: Workload,
    artifact: Artifact | None,
    *,
    time_ns: float = 1000.0,
    verified: bool = True,
    **changes: Any,
) -> int:
    """Makes a kernel the best of its workload on an H200."""
    target = changes.pop("target", H200)
    record_id = store.append(record(time_ns, workload=workload, target=target, artifact=None, **changes))
    store.promote(record_id, artifact, verified=verified)
    return record_id


def need_compiler(*names: str) -> None:
    for name in names:
        if shutil.which(name) is None:
            pytest.skip(f"there is no {name} here")


def fake_driver(folder: Path, *options: str) -> Path:
    """A folder with a libcuda.so.1 that takes notes."""
    need_compiler("gcc")
    folder.mkdir()
    command = ["gcc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, *options, TESTS / "fake_libcuda.c", "-ldl", "-lpthread"], check=True)
    return folder


def driver_path() -> Path:
    """The folder of the libcuda.so.1 that this process uses."""
    ctypes.CDLL("libcuda.so.1")
    maps = Path("/proc/self/maps").read_text().splitlines()
    return next(Path(line.split()[-1]).parent for line in maps if "/libcuda.so" in line)


def parameter_bytes(artifacts: Iterable[Artifact]) -> str:
    """The file FAKE_PARAMS: what the entries of some kernels take, which the real driver finds in the machine code."""
    sizes = {"i32": 4, "f32": 4, "tensor_map": 128}
    lines = {}
    for step in (step for artifact in artifacts for step in artifact.plan.steps):
        found: list[int] = []
        for param in step.params:
            if param.kind == "array":
                found += [8] * len(param.words)
            elif param.kind in ("scalar", "number"):
                found.append(struct.calcsize(SCALAR_FORMATS[param.dtype]))
            else:
                found.append(sizes.get(param.kind, 8))
        line = " ".join(map(str, (step.entry, *found)))
        assert lines.setdefault(step.entry, line) == line, "two kernels of one name take different parameters"
    return "\n".join(lines.values()) + "\n"


def make_library(folder: Path, driver: Path) -> Path:
    """Compiles an export by its own Makefile, with all warnings as errors."""
    need_compiler("gcc", "make")
    command = ["make", "-s", "-C", folder, "CC=gcc", f"CFLAGS={STRICT}", f"LIBCUDA={driver / 'libcuda.so.1'}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (library,) = folder.glob("lib*_kernels.so")
    return library


def run_operator(torch: Any, folder: Path, name: str, device: str, shapes: Iterable[Iterable[int]], **variables: str) -> Any:
    """The shape that c_export_operator.cpp prints, a program without Python; it is compiled here."""
    installed, program = Path(torch.__path__[0]), folder / "operator"
    command = ["g++", "-std=c++17", "-O1", "-isystem", installed / "include", "-o", program, TESTS / "c_export_operator.cpp"]
    libraries = ["torch_cpu", "c10"] + ["torch_cuda"] * (installed / "lib" / "libtorch_cuda.so").exists()
    linked = [
        f"-Wl,--no-as-needed,-rpath,{installed / 'lib'}",
        f"-L{installed / 'lib'}",
        *(f"-l{each}" for each in libraries),
    ]
    subprocess.run([*command, *linked, "-ldl"], check=True)
    words = [",".join(map(str, shape)) for shape in shapes]
    call = [program, folder / "libschedsearch_torch.so", f"schedsearch_c::{name}", device, *words]
    done = subprocess.run(call, capture_output=True, text=True, env={**os.environ, **variables}, timeout=800)
    assert done.returncode == 0, done.stderr
    return [int(extent) for extent in done.stdout.split()]


def run_script(name: str, driver: Path, *arguments: str | Path, **environment: str) -> Any:
    """Runs a script of this folder on the fake driver; its standard output is JSON."""
    inherited = {**child_environment(), "LD_LIBRARY_PATH": str(driver), **environment}
    command = [sys.executable, str(TESTS / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **inherited}, timeout=800)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
