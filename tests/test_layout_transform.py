"""layout_transform: the operator, its reference, and its kernels on the CPU, emulated, compiled and on a GPU, bit for bit.

The expected values are those of `schedsearch.pack`, which test_packing.py compares with brute force.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from conv2d_numpy import KINDS, check_schedules
from conv2d_support import run_on_cpu as run  # it takes any device
from moves_emulator import MovesEmulator
from test_conv2d_wgmma import instructions

import schedsearch
import schedsearch.templates.layout_transform.kernels as kernels
import schedsearch.templates.layout_transform.places as places
from schedsearch import Workload, layout_transform, pack
from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.device import open_device
from schedsearch.device.cpu import CpuDevice
from schedsearch.errors import WorkloadError
from schedsearch.ops import Layout
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.layout_transform import LAYOUT_TRANSFORM, sizes
from schedsearch.target import PRESETS, Target
from schedsearch.template import load_reference
from schedsearch.templates.layout_transform.cpu import LayoutTransformCpu
from schedsearch.templates.layout_transform.cuda import LayoutTransformCuda
from schedsearch.templates.layout_transform.permutation import Permutation
from schedsearch.testing.emulator import Memory
from schedsearch.testing.op_contract import OpContract
from schedsearch.testing.template_contract import TemplateContract

H200 = PRESETS["h200"]
CUDA, CPU = LayoutTransformCuda(), LayoutTransformCpu()
EMULATED_THREADS = 1500  # threads times tiles; an emulated one takes a millisecond
# Opcodes of machine code: the low 12 bits of an instruction (as nvdisasm names them), and its size in bits 73 to 75.
GLOBAL_LOADS, GLOBAL_STORES, COPY_TO_SHARED, ACCESS_128 = {0x381, 0x981}, {0x386, 0x986}, 0xFAE, 6
IMAGES = ("NCHW", "NHWC", "NCHW2c", "NCHW4c", "NCHW16c", "NCHW32c", "CHWN", "NHCW8c")
FILTERS = ("OIHW", "OHWI", "OIHW4o4i", "OIHW16o32i", "OIHW32i32o", "HWIO", "OIHW8i16o2i")


def target_of(major: int, minor: int) -> Target:
    """A card of this architecture with few resources: 48 KiB of shared memory for a block."""
    return Target("cuda", f"sm_{major}{minor}", (major, minor), 20, 49_152, 65_536, 65536, 1024, 2 << 20, 1_500_000, 4 << 30)


def random_workload(rng: np.random.Generator, most: int = 70) -> Workload:
    """A small transform of images or filters with nested blocks; channels are often ragged, seldom large."""
    while True:
        family, names = ((IMAGES, "nchw"), (FILTERS, "oihw"))[rng.integers(2)]
        source, to = (str(each) for each in rng.choice(family, 2))
        extents = [int(rng.integers(1, 4)), int(rng.integers(1, most)), *(int(v) for v in rng.integers(1, 9, 2))]
        if family is FILTERS:
            extents[0] = int(rng.integers(1, 40))
        if rng.integers(2):
            extents[1] = max(extents[1] // 16 * 16, 16)
        dtype = ("int8", "uint8", "float16", "bfloat16", "float32", "int32")[rng.integers(6)]
        try:
            return Workload("layout_transform", {**dict(zip(names, extents)), "layout": source, "to": to, "dtype": dtype})
        except WorkloadError:
            continue  # blocks that do not nest


def arrays(workload: Workload, rng: np.random.Generator) -> tuple[Any, Any]:
    """x with any bits, also in its padding, and y by `schedsearch.pack`."""
    extents = sizes(workload.params)
    bits = np.dtype(f"u{dtype_of(workload.dtype).nbytes}")
    plain = "NCHW" if "C" in extents else "OIHW"
    values = rng.integers(0, 2 ** (8 * bits.itemsize), [extents[axis] for axis in plain], bits)
    x = Layout.parse(workload.layout).pack(values, plain, fill=0x5A)
    return x, pack(values, workload.to, from_layout=plain)


# --- The operator -------------------------------------------------------------------------------------------------------


class TestOperator(OpContract):
    op = LAYOUT_TRANSFORM
    examples = (
        {"n": 2, "c": 6, "h": 3, "w": 5, "layout": "NCHW", "to": "NCHW4c", "dtype": "int8"},
        {"n": 1, "c": 6, "h": 3, "w": 5, "layout": "NCHW4c", "to": "NHWC", "dtype": "float32"},
        {"o": 6, "i": 5, "h": 3, "w": 3, "layout": "OIHW", "to": "OIHW4o4i"},
    )
    wrong = (
        ({"n": 1, "c": 1, "h": 1, "w": 1, "layout": "nchw", "to": "NHWC"}, "layout"),
        ({"n": 1, "c": 1, "h": 1, "w": 1, "layout": "NCHW", "to": "NHWK"}, "to"),
        ({"n": 1, "c": 1, "h": 1, "w": 1, "layout": "NCHW", "to": "OIHW"}, "to"),
        ({"n": 1, "c": 9, "h": 1, "w": 1, "layout": "NCHW4c", "to": "NCHW6c"}, "to"),
        ({"c": 1, "h": 1, "w": 1, "layout": "NCHW", "to": "NHWC"}, "n"),
        ({"n": 1, "c": 1, "o": 1, "h": 1, "w": 1, "layout": "NCHW", "to": "NHWC"}, "o"),
        ({"n": 1, "c": 1, "h": 1, "w": 1, "layout": "NCHW", "to": "NHWC", "dtype": "float64"}, "dtype"),
    )
    ids: ClassVar = {
        "1932205b2a5e7e9a7b3c14c2d0ca572ffe35ce7d9016babf8e47898b41e1c2ad": {
            "n": 32,
            "c": 64,
            "h": 56,
            "w": 56,
            "layout": "NHWC",
            "to": "NCHW",
        },
    }


def test_work_is_the_bytes_that_are_read_and_written() -> None:
    workload = layout_transform(n=2, c=48, h=7, w=7, layout="NCHW", to="NCHW32c", dtype="int8")
    assert workload.flops == 0
    assert workload.work.nbytes == 2 * 7 * 7 * (48 + 64) == workload.work.least_bytes
    unpacked = layout_transform(n=2, c=48, h=7, w=7, layout="NCHW32c", to="NCHW", dtype="float32")
    assert unpacked.work.nbytes == 4 * 2 * 7 * 7 * (48 + 64)
    assert unpacked.work.least_bytes == 4 * 2 * 7 * 7 * (48 + 48)
    assert unpacked.definition.equality(unpacked.params) == "exact"


def test_blocks_that_do_not_nest_are_refused_with_a_remedy() -> None:
    with pytest.raises(WorkloadError, match=r"blocks of 4 and 6 along C, .* transform twice"):
        layout_transform(n=1, c=12, h=1, w=1, layout="NCHW4c", to="NCHW6c")


@pytest.mark.parametrize("number", range(20))
def test_the_reference_in_numpy_is_the_definition(number: int) -> None:
    rng = np.random.default_rng([7, number])
    workload = random_workload(rng)
    x, y = arrays(workload.replace(dtype="int8"), rng)
    points = load_reference("layout_transform").points(
        workload.replace(dtype="int8"), {"x": x.view(np.int8)}, {}, np.arange(y.size), "y"
    )
    np.testing.assert_array_equal(points, y.view(np.int8).ravel())


# --- Factors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "to", "nbytes", "factors"),
    [  # extent, stride in x, stride in y, of elements of the width before
        ("NHWC", "NCHW", 1, (1, [(2, 2352, 2352), (48, 1, 49), (49, 48, 1)])),
        ("NHWC", "NCHW4c", 1, (4, [(2, 588, 588), (12, 1, 49), (49, 12, 1)])),
        ("NHWC", "NCHW16c", 1, (1, [(2, 2352, 2352), (3, 16, 784), (49, 48, 16), (16, 1, 1)])),
        ("NHWC", "NHWC", 2, (2, [(4704, 1, 1)])),
        ("NCHW", "NCHW32c", 2, (2, [(2, 2352, 3136), (2, 1568, 1568), (49, 1, 32), (32, 49, 1)])),
    ],
)
def test_factors_of_known_transforms(source: str, to: str, nbytes: int, factors: tuple[int, list[Any]]) -> None:
    p = Permutation.of(Layout.parse(source), Layout.parse(to), {"N": 2, "C": 48, "H": 7, "W": 7}, nbytes)
    assert (p.element_bytes, [(factor.extent, factor.x, factor.y) for factor in p.factors]) == factors


# --- On the CPU ---------------------------------------------------------------------------------------------------------


def check_on_cpu(device: CpuDevice, workload: Workload, config: Config, rng: np.random.Generator) -> None:
    x, y = arrays(workload, rng)
    source = CPU.kernel(workload, device.target, config)
    found = run(device, source, {"x": x}, {"y": (y.shape, y.dtype)})["y"]
    np.testing.assert_array_equal(found, y, err_msg=f"{workload.label} {dict(config)}")


@pytest.mark.parametrize("number", range(12))
@pytest.mark.mostly_long(12)
def test_the_cpu_moves_every_element(device: CpuDevice, number: int) -> None:
    rng = np.random.default_rng([11, number])
    workload = random_workload(rng)
    space = CPU.space(workload, device.target)
    config = CPU.default(workload, device.target, space) if number % 2 else space.sample(1, rng)[0]
    check_on_cpu(device, workload, config, rng)


class TestCpuTemplate(TemplateContract):
    template, target = CPU, schedsearch.detect("cpu")
    accepted = (
        layout_transform(n=2, c=48, h=7, w=7, layout="NCHW", to="NCHW32c", dtype="int8"),
        layout_transform(o=6, i=48, h=3, w=3, layout="OHWI", to="OIHW16i", dtype="float32"),
    )
    samples = 4


# --- Emulated -----------------------------------------------------------------------------------------------------------


def check_emulated(monkeypatch: pytest.MonkeyPatch, workload: Workload, config: Config, rng: np.random.Generator) -> None:
    memory = Memory()
    emulator = MovesEmulator(memory, late_copies=bool(rng.integers(2)))
    emulator.stand_in(monkeypatch, kernels, places)
    x, y = arrays(workload, rng)
    found = np.full(y.shape, 0xA5, y.dtype)
    (step,) = CUDA.kernel(workload, H200, config).steps
    emulator.run(step, {"x": memory.add(x), "y": memory.add(found)}, sms=1)
    np.testing.assert_array_equal(found, y, err_msg=f"{workload.label} {dict(config)}")


@pytest.mark.parametrize("number", range(24))
@pytest.mark.mostly_long(3)
def test_any_transform_with_any_schedule_moves_every_element(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    rng = np.random.default_rng([13, number])
    while True:
        workload = random_workload(rng)
        space = CUDA.space(workload, H200)
        config = CUDA.default(workload, H200, space) if number % 4 == 0 else space.sample(1, rng)[0]
        (step,) = CUDA.kernel(workload, H200, config).steps
        if step.grid.work_items * step.block_threads <= EMULATED_THREADS:
            break
    check_emulated(monkeypatch, workload, config, rng)


WIDE = {  # loads and stores of 16 bytes, bytes permuted in registers, several tiles and ragged edges
    "int8": dict(n=1, c=144, h=12, w=12, layout="NHWC", to="NCHW", dtype="int8"),
    "fp16": dict(n=1, c=72, h=12, w=12, layout="NCHW", to="NHWC", dtype="float16"),
    "fp32": dict(n=1, c=36, h=7, w=8, layout="NCHW", to="NHWC", dtype="float32"),
    "wide elements of 4 bytes": dict(n=1, c=80, h=8, w=10, layout="NHWC", to="NCHW4c", dtype="int8"),
    "wide elements of 8 bytes": dict(n=1, c=80, h=8, w=10, layout="NCHW4c", to="NHWC", dtype="float16"),
    "padded blocks": dict(n=1, c=48, h=8, w=8, layout="NCHW", to="NCHW32c", dtype="int8"),
    "unpadded blocks": dict(n=1, c=48, h=8, w=8, layout="NCHW32c", to="NCHW", dtype="int8"),
}


@pytest.mark.parametrize("name", WIDE)
def test_wide_accesses_on_both_sides(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    workload = layout_transform(**WIDE[name])
    config = CUDA.default(workload, H200, CUDA.space(workload, H200))
    assert (config["load_bytes"], config["store_bytes"]) == (16, 16)
    check_emulated(monkeypatch, workload, config, np.random.default_rng(3))


@pytest.mark.parametrize("high", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("lanes", [1, 2, 4, 8])
def test_rows_that_a_quarter_warp_reads_are_in_different_banks(high: int, lanes: int) -> None:
    """The eight threads that a 16-byte access serves at once: `lanes` rows, `high` apart, by 8 / lanes chunks."""
    swizzle = kernels._swizzle(128, high, lanes)
    for r in range(high):
        read = [swizzle(lane * high + r, 16 * chunk) // 16 for lane in range(lanes) for chunk in range(8 // lanes)]
        assert sorted(read) == list(range(8))
    for row in range(32):
        assert sorted(swizzle(row, 16 * chunk) for chunk in range(8)) == [16 * chunk for chunk in range(8)]


# --- Compiled -----------------------------------------------------------------------------------------------------------


class TestCudaTemplate(TemplateContract):
    template, target = CUDA, H200
    accepted = (
        layout_transform(n=8, c=64, h=56, w=56, layout="NHWC", to="NCHW", dtype="int8"),
        layout_transform(n=8, c=3, h=55, w=55, layout="NCHW", to="NHWC", dtype="int8"),
        layout_transform(n=8, c=48, h=56, w=56, layout="NHWC", to="NCHW32c", dtype="float16"),
        layout_transform(o=64, i=3, h=7, w=7, layout="OIHW", to="OIHW32o4i", dtype="float32"),
        layout_transform(n=1, c=1, h=1, w=1, layout="NCHW", to="NHWC", dtype="uint8"),
    )
    refused = ((layout_transform(n=2**20, c=2**15, h=1, w=7, layout="NCHW2c", to="NCHW16c"), "2**31"),)
    samples, compiled = 4, 2


@pytest.mark.parametrize("target", [target_of(7, 5), target_of(8, 0), H200], ids=lambda target: target.name)
@pytest.mark.parametrize("name", ["int8", "fp16"])
@pytest.mark.mostly_long(10)
def test_defaults_spill_nothing_and_use_wide_accesses(target: Target, name: str) -> None:
    workload = layout_transform(**{**WIDE[name], "n": 8, "h": 56, "w": 56})
    config = CUDA.default(workload, target, CUDA.space(workload, target))
    assert (config["load_bytes"], config["store_bytes"]) == (16, 16)
    built = compile_source(CUDA.kernel(workload, target, config), target)
    assert built.resources.spill_bytes == built.resources.local_bytes == 0
    wide = {code & 0xFFF for code in instructions(built.artifact.code) if code >> 73 & 7 == ACCESS_128}
    loads = {COPY_TO_SHARED} if config["loads"] == "async" else GLOBAL_LOADS
    assert loads & wide and GLOBAL_STORES & wide


# --- On a GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.many
@pytest.mark.parametrize("number", range(30))
def test_a_gpu_moves_every_element(some_of: Callable[..., Any], number: int) -> None:
    rng = np.random.default_rng([17, number])
    workload, target = random_workload(rng, most=300), schedsearch.detect("cuda")
    x, y = arrays(workload, rng)
    gpu = open_device(target)

    def check(config: Config) -> None:
        found = run(gpu, CUDA.kernel(workload, target, config), {"x": x}, {"y": (y.shape, y.dtype)})["y"]
        np.testing.assert_array_equal(found, y, err_msg=f"{workload.label} {dict(config)}")

    check_schedules(check, CUDA, workload, target, rng, some_of(KINDS, number))
    gpu.close()
