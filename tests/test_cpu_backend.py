"""The CPU backend and the CPU device: Python function -> object -> threads."""

from __future__ import annotations

import io
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from conv2d_support import run_on_cpu
from cpu_kernels import F32, TARGET, N, simple, two_steps
from numba import types

from schedsearch.backend import CompileError, compile_source, toolchain
from schedsearch.backend.cpu_ops import as_array, tile_ops
from schedsearch.device import cpu_link
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.cpu_pool import MAX_THREADS
from schedsearch.errors import ArgumentError, DeviceError
from schedsearch.launch import Artifact, Float32, Int32, Int64, LaunchPlan, Pointer, Scalar
from schedsearch.target import PRESETS


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(TARGET)
    yield device
    device.close()


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_steps_run_one_after_the_other_over_all_work_items(device, threads):
    x = np.arange(N, dtype=np.float32)
    y = run_on_cpu(device, two_steps(threads), {"x": x}, {"y": ((N,), np.float32)}, {"factor": 3.0}, launches=200)["y"]
    np.testing.assert_array_equal(y, 3 * x[::-1])


def test_more_threads_than_work_items(device):
    def mark(y, start, stop):
        target = as_array(y, (3,), F32)
        for i in range(start, stop):
            target[i] = i + 1

    y = run_on_cpu(device, simple(mark, items=3, threads=7), {}, {"y": ((3,), np.float32)})["y"]
    assert y.tolist() == [1, 2, 3]


def test_every_kind_of_parameter_arrives(device):
    def gather(y, a, b, c, d, start, stop):
        target = as_array(y, (4,), types.float64)
        target[0], target[1], target[2], target[3] = a, b, c, d

    params = (Pointer("y"), Int32(-7), Int64(-(2**40)), Float32(0.5), Scalar("s"))
    y = run_on_cpu(device, simple(gather, params), {}, {"y": ((4,), np.float64)}, {"s": -1.25})["y"]
    assert y.tolist() == [-7, -(2**40), 0.5, -1.25]


def test_a_bound_kernel_takes_new_pointers_and_scalars(device):
    kernel = device.load(compile_source(two_steps(2), TARGET).artifact)
    x, y, other = (device.allocate(4 * N) for _ in range(3))
    values = np.arange(N, dtype=np.float32)
    device.copy_in(x, memoryview(values))
    bound = kernel.bind({"x": x, "y": y}, {"factor": 1.0})
    bound.set_pointer("y", other)
    bound.set_scalar("factor", 2.0)
    bound.launch()
    out = np.empty(N, np.float32)
    device.copy_out(memoryview(out), other)
    np.testing.assert_array_equal(out, 2 * values[::-1])
    with pytest.raises(ArgumentError, match="not a multiple of 64 bytes"):
        bound.set_pointer("y", y + 4)
    bound.set_pointer("z", y)  # an argument that this kernel does not read
    bound.set_scalar("slope", 1.0)
    bound.launch()
    device.copy_out(memoryview(out), other)
    np.testing.assert_array_equal(out, 2 * values[::-1])
    with pytest.raises(ArgumentError, match="no address for buffer 'y'"):
        kernel.bind({"x": x}, {"factor": 1.0})
    with pytest.raises(ArgumentError, match="no value for the scalar 'factor'"):
        kernel.bind({"x": x, "y": y}, {})


def test_poison_stays_nan(device):
    """Fast-math must not assume that there are no NaNs: verification poisons outputs and workspaces with NaN."""

    def clamp(x, y, start, stop):
        source, target = as_array(x, (2,), F32), as_array(y, (2,), F32)
        for i in range(2):
            value = source[i] * F32(2) + F32(1)
            target[i] = F32(0) if value < F32(0) else value

    x = np.array([np.nan, -3], np.float32)
    y = run_on_cpu(device, simple(clamp, (Pointer("x"), Pointer("y"))), {"x": x}, {"y": ((2,), np.float32)})["y"]
    assert np.isnan(y[0]) and y[1] == 0


def test_equal_schedules_hash_equal_in_every_process():
    program = (
        "import sys; sys.path.insert(0, {!r}); import cpu_kernels as t; from schedsearch.backend import compile_source; "
        "print(compile_source(t.two_steps({}), t.TARGET).canonical_hash)"
    )
    folder = __file__.rpartition("/")[0]

    def elsewhere(threads: int) -> str:
        command = [sys.executable, "-c", program.format(folder, threads)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    here = compile_source(two_steps(2), TARGET)
    assert elsewhere(2) == here.canonical_hash
    assert compile_source(two_steps(1), TARGET).canonical_hash != here.canonical_hash


def test_another_process_runs_the_artifact_without_numba(tmp_path):
    artifact = compile_source(two_steps(2), TARGET).artifact
    (tmp_path / "code").write_bytes(artifact.code)
    (tmp_path / "plan").write_text(artifact.plan.to_json())
    program = """
import sys, pathlib
class Banned:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "numba" or name.startswith("schedsearch.templates"):
            raise ImportError(name)
sys.meta_path.insert(0, Banned())
import array
from schedsearch.device import open_device
from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.device.detect import detect
folder = pathlib.Path(sys.argv[1])
device = open_device(detect("cpu"))
kernel = device.load(Artifact((folder / "code").read_bytes(), LaunchPlan.from_json((folder / "plan").read_text())))
x, y = device.allocate(4000), device.allocate(4000)
device.copy_in(x, memoryview(array.array("f", range(1000))))
kernel.bind({"x": x, "y": y}, {"factor": 2.0}).launch()
out = array.array("f", bytes(4000))
device.copy_out(memoryview(out), y)
device.close()
print(out[0], out[999])
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["1998.0", "0.0"], "")


@pytest.mark.skipif(sys.platform != "linux", reason="arranges memory by Linux's flags of mmap")
def test_code_is_loaded_wherever_memory_is_free(tmp_path):
    """This also holds if a free gap takes the code and its constants are gigabytes further on."""

    def count(x, y, start, stop):
        source, target = as_array(x, (N,), F32), as_array(y, (N,), F32)
        for i in range(start, stop):
            target[i] = source[i] + F32(i)  # a whole vector of i at once, from the constants 0, 1, 2 ...

    artifact = compile_source(simple(count, (Pointer("x"), Pointer("y")), items=N), TARGET).artifact
    (tmp_path / "code").write_bytes(artifact.code)
    (tmp_path / "plan").write_text(artifact.plan.to_json())
    program = """
import ctypes, pathlib, sys
from schedsearch.device import open_device
from schedsearch.launch import Artifact, LaunchPlan
from schedsearch.device.detect import detect
folder = pathlib.Path(sys.argv[1])
artifact = Artifact((folder / "code").read_bytes(), LaunchPlan.from_json((folder / "plan").read_text()))
libc, size = ctypes.CDLL(None), ctypes.c_size_t
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, size]
reserve = lambda nbytes: libc.mmap(None, nbytes, 0, 0x4022, -1, 0)  # no access; private, anonymous, without swap space
device, kernels = open_device(detect("cpu")), []
for pages in range(1, 5):
    gap = reserve(pages << 12)
    below = reserve(5 << 30)
    for filler in (256, 16, 4, 1):  # of all other gaps
        while reserve(filler << 12) > below:
            pass
    libc.munmap(gap, pages << 12)
    kernels.append(device.load(artifact))
x, y = device.allocate(4000), device.allocate(4000)
device.copy_in(x, memoryview((ctypes.c_float * 1000)(*range(1000))).cast("B"))
for kernel in kernels:
    device.fill(y, 0xFF, 4000)
    kernel.bind({"x": x, "y": y}, {}).launch()
    out = (ctypes.c_float * 1000)()
    device.copy_out(memoryview(out).cast("B"), y)
    assert list(out) == [2 * i for i in range(1000)]
device.close()
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def allocates(y, start, stop):
    as_array(y, (N,), F32)[0] = np.zeros(3)[start]


def raises(y, start, stop):
    if start > 10:
        raise ValueError("no")


def prints(y, start, stop):
    print(start)


def unknown_name(y, start, stop):
    undefined(y)  # noqa: F821


def writes_a_global(y, start, stop):
    global N
    N = start


@pytest.mark.parametrize("function", [allocates, prints, unknown_name, writes_a_global])
def test_a_forbidden_operation_of_a_kernel_is_a_compile_error(function):
    with pytest.raises(CompileError, match=function.__name__) as caught:
        compile_source(simple(function), TARGET)
    assert "Traceback" not in str(caught.value)


def test_an_exception_in_a_kernel_is_a_device_error(device):
    """Raising with constant arguments does not need the Python runtime, so it compiles. The launch reports the exception."""
    artifact = compile_source(simple(raises, items=40, threads=2), TARGET).artifact
    bound = device.load(artifact).bind({"y": device.allocate(4)}, {})
    for _ in range(2):
        with pytest.raises(DeviceError, match="raised an exception"):
            bound.launch()


def test_code_for_something_else_is_refused(device):
    artifact = compile_source(two_steps(1), TARGET).artifact
    with pytest.raises(DeviceError, match="sm_90a"):
        device.load(Artifact(b"", LaunchPlan("cuda", "sm_90a", ())))
    with pytest.raises(DeviceError, match="threads"):
        steps = tuple(replace(step, block_threads=MAX_THREADS + 1) for step in artifact.plan.steps)
        device.load(replace(artifact, plan=replace(artifact.plan, steps=steps)))
    with pytest.raises(DeviceError, match="not a CPU"):
        CpuDevice(PRESETS["h200"])
    with pytest.raises(ValueError, match="give a cpu target"):
        compile_source(two_steps(1), PRESETS["h200"])


def test_code_that_needs_other_instructions_is_refused(device, monkeypatch):
    artifact = compile_source(two_steps(1), TARGET).artifact
    monkeypatch.setattr("schedsearch.device.cpu_link._host_features", lambda: frozenset({"sse2"}))
    with pytest.raises(DeviceError, match="this CPU lacks"):
        device.load(artifact)


def archive(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name, data in members.items():
            made.writestr(name, data)
    return buffer.getvalue()


def test_damaged_code_is_refused_before_a_loader_sees_it(device):
    """LLVM crashes on an object file that was cut off. Nothing of an archive is unpacked to the disk, whatever its names."""
    artifact = compile_source(two_steps(1), TARGET).artifact
    with zipfile.ZipFile(io.BytesIO(artifact.code)) as made:
        members = {name: made.read(name) for name in made.namelist()}
    first = next(name for name in members if name.endswith(".o"))
    whole = members[first]
    damaged = [
        b"", b"PK", artifact.code[:-30], artifact.code[:200], artifact.code[:100] + b"\0" * 40 + artifact.code[140:],
        *(archive({**members, "manifest.json": text}) for text in (b"", b"{}", b"[]", b'{"features":3}', b"\xff")),
        *(archive({**members, first: data}) for data in (b"", b"\x7fELF", whole[:70], whole[:200], whole[:-1], whole[::-1])),
        archive({f"../{name}": data for name, data in members.items()}),
    ]  # fmt: skip
    for code in damaged:
        with pytest.raises(DeviceError, match=r"cannot be loaded|ELF|damaged"):
            device.load(replace(artifact, code=code))
    device.load(replace(artifact, code=archive(members))).close()


def test_kernels_may_be_dropped_between_launches(device):
    """A worker must have left the code before a launch returns: the code is unmapped when its kernel is collected."""
    artifact = compile_source(two_steps(2), TARGET).artifact
    x, y = device.allocate(4 * N), device.allocate(4 * N)
    for _ in range(50):
        device.load(artifact).bind({"x": x, "y": y}, {"factor": 1.0}).launch()


def test_kernels_with_the_same_types_of_parameters_share_the_code_that_calls_them(device):
    """Compiling it takes longer than linking a kernel."""

    def count(y, start, stop):
        target = as_array(y, (5,), F32)
        for i in range(start, stop):
            target[i] = i

    def count_down(y, start, stop):
        target = as_array(y, (5,), F32)
        for i in range(start, stop):
            target[i] = -i

    def run(function, items):
        return run_on_cpu(device, simple(function, items=items, threads=2), {}, {"y": ((5,), np.float32)})["y"]

    assert run(count, 5).tolist() == [0, 1, 2, 3, 4]
    compiled = cpu_link._call.cache_info().misses
    assert run(count_down, 5).tolist() == [0, -1, -2, -3, -4]
    assert run(count, 3)[:3].tolist() == [0, 1, 2] and np.isnan(run(count, 3)[3:]).all()
    assert cpu_link._call.cache_info().misses == compiled


def test_closing_ends_the_worker_threads():
    before = threading.active_count()
    device = CpuDevice(TARGET)
    kernel = device.load(compile_source(two_steps(4), TARGET).artifact)
    kernel.bind({"x": device.allocate(4 * N), "y": device.allocate(4 * N)}, {"factor": 1.0}).launch()
    assert threading.active_count() == before + 3
    device.close()
    assert threading.active_count() == before


def test_memory_is_aligned_and_can_be_filled(device):
    address = device.allocate(300)
    assert address % 256 == 0
    device.fill(address, 0xAB, 300)
    out = bytearray(300)
    device.copy_out(memoryview(out), address)
    assert out == b"\xab" * 300
    with pytest.raises(DeviceError, match="cannot be allocated"):
        device.allocate(2**60)


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.mostly_long(5)
def test_a_register_tile_multiplies_and_adds(device, lanes, broadcast):
    rows, columns, depth, repeats = 3, 2, 2, 5
    step = 1 if broadcast else columns * lanes  # floats of x per step of the reduction
    row = repeats * depth * step
    ops = tile_ops(rows, columns, lanes, depth, x_row_bytes=4 * row, x_depth_bytes=4 * step, broadcast=broadcast)
    zero, multiply_add, spill = ops.zero, ops.multiply_add, ops.spill
    size = rows * columns * lanes

    def accumulate(x, w, y, start, stop):
        tile = zero()
        x, w = types.int64(x), types.int64(w)
        for i in range(repeats):
            tile = multiply_add(tile, x + i * depth * step * 4, w + i * depth * columns * lanes * 4)
        result, target = as_array(spill(tile), (size,), F32), as_array(y, (size,), F32)
        for i in range(size):
            target[i] = result[i]

    rng = np.random.default_rng(lanes)
    x = rng.integers(-4, 5, (rows, repeats * depth, step)).astype(np.float32)
    w = rng.integers(-4, 5, (repeats * depth, columns * lanes)).astype(np.float32)
    params = (Pointer("x"), Pointer("w"), Pointer("y"))
    y = run_on_cpu(device, simple(accumulate, params), {"x": x, "w": w}, {"y": ((rows, columns * lanes), np.float32)})["y"]
    np.testing.assert_array_equal(y, (x * w).sum(axis=1))


def test_the_toolchain_names_everything_that_shapes_the_code():
    assert set(toolchain("cpu")) == {"numba", "llvm", "cpu"}
