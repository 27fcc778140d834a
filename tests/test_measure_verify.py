"""Verification: inputs on which fp32 is exact, a tolerance from the arithmetic, all elements compared."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import faulty_templates as faulty
import numpy as np
import pytest
from conv2d_numpy import FLOAT_STAGES
from hypothesis import given
from hypothesis import strategies as st
from numba import types
from records_support import forked

from schedsearch import measure, softmax, verification
from schedsearch.backend import compile_source
from schedsearch.backend.code_cache import CodeCache
from schedsearch.backend.cpu_ops import as_array
from schedsearch.config import Config
from schedsearch.device import Device, open_device
from schedsearch.device.detect import detect
from schedsearch.device.memory import bytes_at
from schedsearch.launch import Grid, Pointer
from schedsearch.ops import DTYPES, ArgSpec, decode, encode
from schedsearch.ops.checks import is_sum_of_products
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template, load_reference, load_template
from schedsearch.verification import reference
from schedsearch.verification.compare import CpuComparer, Tolerance, Truth
from schedsearch.verification.inputs import BLOCK, Pattern, check_domains, check_scalars, draw, normal_sigma
from schedsearch.verification.unwritten import element_text, unwritten, unwritten_text
from schedsearch.verification.verify import Verification, verify_once
from schedsearch.workload import Workload

CPU = detect("cpu")
FLOATS = ("float16", "bfloat16", "float32")


@pytest.fixture
def device() -> Iterator[Device]:
    with contextlib.closing(open_device(CPU)) as device:
        yield device


def pointwise(**changes: Any) -> Workload:
    return Workload.conv2d(n=1, h=5, w=7, c=24, k=8, r=1, s=1, dtype="float32").replace(**changes)


# ---- numbers


@given(
    c=st.integers(1, 4096),
    r=st.sampled_from([1, 3, 5, 7]),
    dtype=st.sampled_from(FLOATS),
    epilogue=st.sampled_from([(), ("bias", "relu"), ("scale_shift",), ("scale_shift", "residual", "bias")]),
)
def test_sums_of_verification_inputs_are_exact_in_fp32_in_every_order(c: int, r: int, dtype: str, epilogue: Any) -> None:
    workload = Workload.conv2d(n=1, h=8, w=8, c=c, k=8, r=r, s=r, padding=r // 2, dtype=dtype, epilogue=epilogue)
    domains = check_domains(workload)
    length = c * r * r
    largest = {name: max(map(abs, domain.values)) for name, domain in domains.items()}
    worst = length * largest["x"] * largest["weight"] * largest.get("scale", 1)
    worst += sum(largest.get(name, 0) * largest.get("scale", 1) for name in ("bias", "shift", "residual"))
    assert worst < 2**24
    # four standard deviations of an output are exact integers in its format
    drawn = {name: draw(domains[name], 20_000, np.random.default_rng(7)) for name in ("x", "weight")}
    sigma = math.sqrt(length * drawn["x"].var() * drawn["weight"].var()) * largest.get("scale", 1)
    assert 4 * sigma <= 2 / DTYPES[workload.out_dtype].roundoff
    # but most sums are not zero
    assert sigma > 0.5


def test_call_time_scalars_differ_from_their_defaults_and_do_not_saturate_everything() -> None:
    workload = pointwise(c=512, epilogue=("leaky_relu", "clip"))
    chosen = check_scalars(workload)
    for scalar in workload.scalars:
        assert chosen[scalar.name] != scalar.default
        assert float(np.float32(chosen[scalar.name])) == chosen[scalar.name]
    assert chosen["clip_min"] < 0 < chosen["clip_max"]


@pytest.mark.parametrize("dtype", FLOATS)
@given(value=st.floats(-60000, 60000))
def test_the_tolerance_allows_rounding_to_nearest_and_no_more(dtype: str, value: float) -> None:
    tolerance = Tolerance.rounded(dtype, 1, exact_sums=True)
    allowed = tolerance.output * abs(value) + tolerance.smallest
    nearest = float(decode(encode(np.array([value], np.float32), dtype), dtype)[0])
    if dtype != "float32":
        value = float(np.float32(value))
    assert abs(nearest - value) <= allowed
    spacing = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}[dtype]
    if abs(value) > 1e-3:
        assert 2 * spacing * abs(value) > allowed  # two units in the last place are too many


def test_on_exact_data_a_missing_product_exceeds_the_accumulation_allowance() -> None:
    assert Tolerance.rounded("float16", 1 << 20, exact_sums=True).limit < 1
    assert Tolerance.rounded("float16", 1 << 20, exact_sums=False).limit == math.inf


def test_timing_outputs_stay_near_one() -> None:
    for c in (16, 64, 512, 4096):
        sigma = normal_sigma(pointwise(c=c), "weight")
        assert 0.5 <= sigma * math.sqrt(c) <= 2.0
    assert normal_sigma(pointwise(), "x") == 1.0


# ---- memory


@pytest.mark.parametrize("count", [1, BLOCK - 1, BLOCK + 1, 9 * BLOCK + 5])
def test_a_pattern_repeats_without_seams(device: Device, count: int) -> None:
    block = np.arange(min(count, BLOCK), dtype=np.float32)
    pattern = Pattern(block)
    address = device.allocate(4 * count + 4)
    device.fill(address, 0xFF, 4 * count + 4)
    pattern.write(device, address, count, phase=3)
    got = np.empty(count + 1, np.float32)
    device.copy_out(got.data, address)
    np.testing.assert_array_equal(got[:-1], (np.arange(count) + 3) % block.size)
    assert np.isnan(got[-1])
    np.testing.assert_array_equal(pattern.elements(count), np.arange(count) % block.size)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_wrong_element_is_counted_and_the_first_is_named(dtype: str) -> None:
    rng = np.random.default_rng(1)
    size = 600_001  # more than one piece
    reference = rng.integers(-100, 100, size).astype(np.float64)
    magnitude = np.abs(reference) * 3
    y = encode(reference.astype(np.float32), dtype)
    wrong = [77, 262_144, 500_000, size - 1]
    y[wrong[:3]] = encode((reference[wrong[:3]] + 7).astype(np.float32), dtype)
    y[wrong[3]] = encode(np.array([np.nan], np.float32), dtype)[0]
    tolerance = Tolerance.rounded(dtype, 10, exact_sums=True)
    truth = Truth(dtype, size, reference.ctypes.data, magnitude.ctypes.data, tolerance)
    difference = CpuComparer().output(y.ctypes.data, truth)
    assert (difference.violations, difference.first, difference.max_error) == (4, 77, 7.0)


class Fake:
    """A device whose memory is the host's, and a kernel that a function is."""

    def __init__(self, launch: Callable[[], None] = lambda: None) -> None:
        self.launch = launch

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        np.frombuffer(bytes_at(address, nbytes), np.uint8)[:] = byte

    def copy_out(self, into: Any, address: int) -> None:
        np.frombuffer(into, np.uint8)[:] = np.frombuffer(bytes_at(address, len(into)), np.uint8)

    def synchronize(self) -> None: ...


@pytest.mark.parametrize("name", ["int8", "int32", "float32", "float64"])
@pytest.mark.parametrize("slice_of", [(), (5, 7)])
@pytest.mark.parametrize("byte", [0xFF, 0x3C, 0xC3])
def test_elements_that_are_never_written_are_told_from_wrong_ones(name: str, slice_of: tuple[int, ...], byte: int) -> None:
    """Whatever a kernel writes, a copy of a guard or of a probe included, is written."""
    spec = ArgSpec("y", "AB", (5, 4), name, slice_of=slice_of)
    bytes_ = np.zeros((*(slice_of or (5, 4)), np.dtype(name).itemsize), np.uint8)

    def launch() -> None:
        missing = bytes_[3, 1:3].copy()
        bytes_[:, :4] = byte
        bytes_[3, 1:3] = missing

    kept = unwritten(cast(Any, Fake()), cast(Any, Fake(launch)), [spec], {"y": bytes_.ctypes.data})
    assert np.flatnonzero(kept["y"]).tolist() == [13, 14]
    assert unwritten_text(spec, kept["y"], 2) == "y: 2 of 20 elements were never written, the first is y[3, 1]"
    assert unwritten_text(spec, kept["y"], 5).endswith("the first is y[3, 1]; 3 others are wrong")
    assert unwritten_text(spec, np.zeros(20, bool), 5) == ""


@pytest.mark.parametrize(
    ("axes", "shape", "flat", "text"),
    [
        ("NHWC", (2, 3, 4, 5), 67, "y[n=1, h=0, w=1, c=2]"),
        ("AB", (3, 4), 6, "y[1, 2]"),
        ("BA", (4, 3), 7, "y[1, 2]"),  # in the order of Fortran: y[1, 2] is the element 2 * 3 + 1 in memory
        ("A", (9,), 6, "y[6]"),
    ],
)
def test_an_element_is_named_as_its_caller_would(axes: str, shape: tuple[int, ...], flat: int, text: str) -> None:
    assert element_text(ArgSpec("y", axes, shape, "float32"), flat) == text


def test_words_that_differ_are_counted() -> None:
    memory = np.arange(1000, dtype=np.uint32)
    expected = memory.copy()
    assert CpuComparer().words(memory.ctypes.data, expected.ctypes.data, 4000) == (0, None)
    memory[[5, 900]] = 0
    assert CpuComparer().words(memory.ctypes.data, expected.ctypes.data, 4000) == (2, 20)


# ---- kernels


def kernel_of(device: Device, template: Any, workload: Workload) -> Any:
    config = template.default(workload, CPU, template.space(workload, CPU))
    return device.load(compile_source(template.kernel(workload, CPU, config), CPU).artifact)


def test_verify_once_describes_the_mistake(device: Device) -> None:
    workload = pointwise()
    assert verify_once(device, workload, kernel_of(device, faulty.PointwiseCpu(), workload)) is None
    problem = verify_once(device, workload, kernel_of(device, faulty.MissingProduct(), workload))
    assert problem is not None and "elements are wrong" in problem


@pytest.mark.parametrize(
    ("layout", "epilogue"),
    [("NCHW", ()), ("NHWC", ("relu",)), ("NHWC", tuple(stage for stage in FLOAT_STAGES if stage != "relu"))],
)  # relu would hide what leaky_relu does
@pytest.mark.mostly_long(3)
def test_every_epilogue_stage_is_verified(device: Device, layout: str, epilogue: tuple[str, ...]) -> None:
    workload = Workload.conv2d(
        n=1, h=6, w=5, c=8, k=8, r=3, s=3, padding=1, dtype="float32", layout=layout, epilogue=epilogue
    )
    kernel = kernel_of(device, load_template("conv2d_cpu"), workload)
    assert verify_once(device, workload, kernel) is None


def test_fresh_seeds_give_fresh_inputs_and_the_same_seed_the_same(device: Device) -> None:
    workload = pointwise()
    code, seen = CodeCache(), []
    for seed in (0, 1, 0):
        verification = Verification(device, CpuComparer(), code, workload, seed)
        assert verification.check(kernel_of(device, faulty.PointwiseCpu(), workload)).ok
        seen.append(verification._patterns["x"].elements(workload.signature[0].size).tobytes())
        verification.close()
    assert seen[0] == seen[2] != seen[1]


def test_a_reference_that_contradicts_numpy_is_our_bug(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    class Liar(type(load_reference("conv2d"))):  # type: ignore[misc]
        def points(self, *args: Any) -> Any:
            return super().points(*args) + 1.0

    monkeypatch.setattr(reference, "load_reference", lambda op: Liar())
    with pytest.raises(RuntimeError, match="contradicts NumPy at 256 of 256 points"):
        Verification(device, CpuComparer(), CodeCache(), pointwise(), seed=0)


def test_helper_code_is_compiled_once_and_can_be_taken_over(device: Device) -> None:
    workload, code = pointwise(), CodeCache()
    Verification(device, CpuComparer(), code, workload, seed=0).close()
    fresh = code.take_fresh()
    assert list(fresh) == [f"reference {workload.id}"]
    assert code.take_fresh() == {}
    heir = CodeCache()
    heir.learn(fresh)
    Verification(device, CpuComparer(), heir, workload, seed=1).close()
    assert heir.take_fresh() == {}


def test_inputs_that_a_kernel_overwrote_are_restored(device: Device) -> None:
    """The inputs come before y in memory: a write one element before y hits the guard, and one far before y an argument."""
    workload = pointwise()
    verification = Verification(device, CpuComparer(), CodeCache(), workload, seed=0)

    class WriteIntoX(faulty._StrayWrite):
        @staticmethod
        def where(workload: Workload) -> int:
            return (verification._offsets["x"] - verification._offsets["y"]) // 4 + 3

    verdict = verification.check(kernel_of(device, WriteIntoX(), workload))
    assert not verdict.ok and verdict.stray and "argument 'x' at byte 12" in verdict.message
    assert verification.check(kernel_of(device, faulty.PointwiseCpu(), workload)).ok


def test_a_copy_of_the_process_that_a_kernel_forked_cannot_change_what_is_verified(device: Device) -> None:
    """The copy goes on with the same work, in memory of its own."""
    workload = pointwise()
    verification = Verification(device, CpuComparer(), CodeCache(), workload, seed=0)
    kernel = kernel_of(device, faulty.PackedCpu(), workload)
    bound = verification.bind(kernel)

    def spoil() -> str:
        device.fill(verification._memory, 0, verification._others - verification._memory)
        return "spoiled"

    assert forked(spoil) == "spoiled"
    assert verification.check_again(kernel, bound).ok
    assert verification.check(kernel).ok


class SoftmaxOnce(Template):
    """The softmax of rows; `stays` says whether a row that holds finite numbers stays as it is."""

    op, kind, name = "softmax", "cpu", "softmax_once"

    def __init__(self, stays: bool) -> None:
        self.stays = stays

    def validate(self, workload: Workload, target: Target) -> str | None:
        return None

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        return ConfigSpace([Knob("stays", (self.stays,))])

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        return Config(stays=self.stays)

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        (rows, columns), stays = workload.x, self.stays

        def softmax_once(x_at: Any, y_at: Any, start: Any, stop: Any) -> None:
            x, y = as_array(x_at, (rows, columns), types.float32), as_array(y_at, (rows, columns), types.float32)
            for i in range(start, stop):
                if stays and abs(y[i, 0]) < types.float32(1e30):
                    continue
                largest, total = x[i, 0], types.float32(0.0)
                for j in range(columns):
                    largest = max(largest, x[i, j])
                for j in range(columns):
                    y[i, j] = math.exp(x[i, j] - largest)
                    total += y[i, j]
                for j in range(columns):
                    y[i, j] /= total

        step = KernelStep(softmax_once, (Pointer("x"), Pointer("y")), Grid(rows), block_threads=1)
        return KernelSource("cpu", "native", (step,))


def test_results_of_earlier_numbers_are_seen_also_where_sums_are_not_exact(device: Device) -> None:
    workload = softmax(x=(6, 40), dtype="float32")
    verification = Verification(device, CpuComparer(), CodeCache(), workload, seed=0)
    assert not is_sum_of_products(workload.signature)
    assert verification.check(kernel_of(device, SoftmaxOnce(stays=False), workload)).ok
    verdict = verification.check(kernel_of(device, SoftmaxOnce(stays=True), workload))
    assert not verdict.ok and verdict.message.startswith("after x changed in its place, y: ")
    verification.close()


def test_measuring_knows_no_operator_and_no_argument_by_name() -> None:
    """Operators provide everything that it must know about them."""
    packages = [Path(each.__file__).parent for each in (measure, verification)]
    names = {"conv2d", *(f'"{spec.name}"' for spec in pointwise(epilogue=("bias", "scale_shift", "residual")).signature)}
    paths = [path for package in packages for path in package.glob("*.py")]
    assert {path.name: name for path in paths for name in names if name in path.read_text(encoding="utf-8")} == {}
