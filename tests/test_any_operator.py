"""Operators that are not convolutions are verified, tuned and deployed like convolutions: `toy_package` has all kinds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import plugin_support
import pytest
import toy_package
from hypothesis import given
from hypothesis import strategies as st

import schedsearch
from schedsearch import Workload
from schedsearch.backend import compile_source
from schedsearch.backend.code_cache import CodeCache
from schedsearch.device import Device, open_device
from schedsearch.device.detect import detect
from schedsearch.errors import OperatorError
from schedsearch.launch import Grid, Pointer
from schedsearch.measure import Runner
from schedsearch.ops import DTYPES, ArgSpec, Domain, decode
from schedsearch.ops.checks import by_role, sum_sigma
from schedsearch.records import Store
from schedsearch.session import tune
from schedsearch.target import PRESETS, Target
from schedsearch.template import KernelSource, KernelStep, load_reference, load_template
from schedsearch.verification.compare import CpuComparer
from schedsearch.verification.inputs import check_domains, check_scalars, draw, timing_pattern
from schedsearch.verification.verify import Verification, verify_once

CPU = detect("cpu")

WORKLOADS = {
    "copy": {"rows": 1000, "dtype": "int8"},
    "take": {"rows": 37, "taken": 500},
    "total": {"rows": 30, "columns": 70},
    "product": {"m": 20, "n": 30, "k": 64},
    "extreme": {"rows": 40, "columns": 50},
}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toy_package.install(monkeypatch, tmp_path / "site")


@pytest.fixture
def device() -> Iterator[Device]:
    with contextlib.closing(open_device(CPU)) as device:
        yield device


def source(workload: Workload, target: Target = CPU) -> KernelSource:
    template = load_template(f"{workload.op}_{target.kind}")
    config = template.default(workload, target, template.space(workload, target))
    return template.kernel(workload, target, config)


def problem(device: Device, workload: Workload, kernel: KernelSource | None = None) -> str | None:
    return verify_once(device, workload, device.load(compile_source(kernel or source(workload), CPU).artifact))


def with_kernel(workload: Workload, function: Callable[..., None]) -> KernelSource:
    """A kernel with one thread that takes the arguments, then the outputs."""
    pointers = tuple(Pointer(spec.name) for spec in (*workload.signature, *workload.outputs))
    return KernelSource("cpu", "native", (KernelStep(function, pointers, Grid(1), 1),))


# ---- numbers


def specs(role: str, *dtypes: str) -> list[ArgSpec]:
    return [ArgSpec(f"a{number}", "N", (8,), dtype, role=role) for number, dtype in enumerate(dtypes)]  # type: ignore[arg-type]


@given(
    factors=st.sampled_from([("int8", "int8"), ("uint8", "int8"), ("uint8", "uint8"), ("int8",), ("float16", "float16"),
                             ("float8_e4m3", "float8_e5m2"), ("float32", "float32", "float32"), ("bfloat16",)]),
    out=st.sampled_from(["int32", "float32"]),
    reduction=st.integers(1, 100_000),
)  # fmt: skip
def test_sums_of_products_are_exact_in_the_accumulator(factors: tuple[str, ...], out: str, reduction: int) -> None:
    arguments, output = specs("factor", *factors), ArgSpec("y", "N", (8,), out)
    domains = by_role(arguments, [output], reduction)
    limit = 2**31 if "int" in factors[0] else 2**24
    if all(domain.density == 1 for domain in domains.values()):
        assert reduction * np.prod([domain.largest for domain in domains.values()]) < limit
    for argument in arguments:
        drawn = draw(domains[argument.name], 1000, np.random.default_rng(0))
        row = DTYPES[argument.dtype]
        assert row.lowest <= drawn.min() and np.abs(drawn).max() <= row.exact_integers + 1
        assert len(np.unique(drawn)) > 1


@given(st.lists(st.integers(-50, 50), min_size=1, max_size=9), st.floats(0.01, 1))
def test_moments_of_a_domain_are_those_of_its_draws(values: list[int], density: float) -> None:
    spread = Domain(tuple(values), density)
    assert spread.mean == pytest.approx(density * np.mean(values), abs=1e-9)
    assert spread.second_moment == pytest.approx(density * np.mean(np.square(values)), abs=1e-9)
    assert spread.largest == max(map(abs, values))
    whole = Domain(range(min(values), max(values) + 1), density)
    assert whole.second_moment == pytest.approx(density * np.mean(np.square(np.array(whole.values))), abs=1e-9)


@pytest.mark.parametrize("out_dtype", ["int8", "uint8"])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_some_narrow_integers_saturate_and_most_do_not(dtype: str, out_dtype: str) -> None:
    workload = Workload("product", {"m": 300, "n": 100, "k": 200, "dtype": dtype, "out_dtype": out_dtype})
    domains = check_domains(workload)
    rng = np.random.default_rng(1)
    x, weight = (draw(domains[spec.name], spec.size, rng).reshape(spec.shape) for spec in workload.signature)
    y = x @ weight.T
    largest = np.iinfo(out_dtype).max
    assert 0.001 < np.mean(y > largest) < 0.2
    assert np.mean((y > 0) & (y < largest)) > 0.3


def test_addends_of_integer_sums_matter_beside_them() -> None:
    arguments = [*specs("factor", "int8", "int8"), ArgSpec("bias", "N", (8,), "int32", role="addend")]
    output = ArgSpec("y", "N", (8,), "int32")
    domains = by_role(arguments, [output], 4096)
    assert domains["bias"].largest == round(sum_sigma(arguments, 4096, domains)) > 100_000


def test_a_largest_element_is_rarely_a_tie_of_many() -> None:
    """If all numbers were within +-8, a kernel that skips half of a row would find the same maximum."""
    domain = check_domains(Workload("extreme", {"rows": 4, "columns": 50}))["x"]
    rows = draw(domain, 100 * 50, np.random.default_rng(2)).reshape(100, 50)
    assert np.mean(rows.max(axis=1) != rows[:, ::2].max(axis=1)) > 0.3


def test_indices_are_legal_in_verification_and_timing() -> None:
    workload = Workload("take", WORKLOADS["take"])
    where = workload.signature[1]
    drawn = draw(check_domains(workload)["where"], 5000, np.random.default_rng(0))
    timed = decode(timing_pattern(workload, where).elements(5000), "int32")
    for indices in (drawn, timed):
        assert (indices.min(), indices.max()) == (0, 36)
    with pytest.raises(ValueError, match="'where' is an index and needs below=1"):
        ArgSpec("where", "T", (3,), "int32", role="index")


def test_integers_are_timed_on_their_whole_format_and_sums_stay_near_one() -> None:
    workload = Workload("product", WORKLOADS["product"])
    timed = decode(timing_pattern(workload, workload.signature[0]).elements(100_000), "int8")
    assert (timed.min(), timed.max()) == (-128, 127) and abs(timed.mean()) < 1
    assert check_scalars(workload) == {}


# ---- right and wrong kernels


@pytest.mark.parametrize("op", WORKLOADS)
@pytest.mark.mostly_long(3)
def test_a_right_kernel_is_right(device: Device, op: str) -> None:
    assert problem(device, Workload(op, WORKLOADS[op])) is None


@pytest.mark.parametrize("out_dtype", ["int8", "uint8"])
@pytest.mark.mostly_long(2)
def test_saturation_is_part_of_the_truth(device: Device, out_dtype: str) -> None:
    workload = Workload("product", {**WORKLOADS["product"], "out_dtype": out_dtype})
    assert problem(device, workload) is None
    wrapping = toy_package.product(
        workload.replace(out_dtype="int32"),
        lambda name: toy_package.reader(CPU, "int8"),
        lambda name: toy_package._store("cpu", out_dtype),
        toy_package.sharer(CPU),
    )
    found = problem(device, workload, with_kernel(workload, whole(wrapping, workload.output.size)))
    assert found is not None and "elements are wrong" in found


def whole(kernel: Callable[..., None], count: int) -> Callable[..., None]:
    def two_arguments(x: Any, weight: Any, y: Any, start: Any, stop: Any) -> None:
        kernel(x, weight, y, 0, count)

    return two_arguments


def test_each_wrong_output_is_named(device: Device) -> None:
    workload = Workload("extreme", WORKLOADS["extreme"])
    right = source(workload).steps[0].function
    put = toy_package._store("cpu", "int32")

    def off_by_one(x: Any, top: Any, place: Any, start: Any, stop: Any) -> None:
        right(x, top, place, 0, 40)
        put(place, 7, -1)

    found = problem(device, workload, with_kernel(workload, off_by_one))
    assert found is not None and found.startswith("place: 1 of 40 elements are wrong")
    assert "first place[r=7] = -1, expected " in found and "top" not in found


@pytest.mark.parametrize("offset", [40, 64 + 63])
def test_a_write_between_two_outputs_is_seen(device: Device, offset: int) -> None:
    """top has 160 bytes, followed by 96 bytes of alignment and 256 bytes of guard."""
    workload = Workload("extreme", WORKLOADS["extreme"])
    right = source(workload).steps[0].function
    put = toy_package._store("cpu", "float32")

    def stray(x: Any, top: Any, place: Any, start: Any, stop: Any) -> None:
        right(x, top, place, 0, 40)
        put(top, offset, 0.0)

    found = problem(device, workload, with_kernel(workload, stray))
    assert found == (
        f"the kernel wrote outside top and place: 4 bytes after the end of top changed, the first at +{4 * (offset - 40)}"
    )


@pytest.mark.parametrize("poison", DTYPES["int8"].poison)
def test_an_integer_that_is_not_written_is_found_even_if_it_held_the_truth(
    device: Device, monkeypatch: pytest.MonkeyPatch, poison: int
) -> None:
    """The right result equals the contents of the memory before one of the launches, and the kernel writes nothing."""
    held = int(np.uint8(poison).view(np.int8))
    monkeypatch.setattr(toy_package.Copy, "check_inputs", lambda self, params: {"x": Domain((held,))})
    workload = Workload("copy", WORKLOADS["copy"])

    def nothing(x: Any, y: Any, start: Any, stop: Any) -> None:
        pass

    found = problem(device, workload, with_kernel(workload, nothing))
    assert found == "y: 1,000 of 1,000 elements were never written, the first is y[r=0]"
    assert problem(device, workload) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.mostly_long(4)
def test_references_read_every_dtype_exactly(device: Device, dtype: str) -> None:
    """All bit patterns from 0 up, without NaN: the reference's kernel and NumPy read the same values."""
    if dtype == "uint32":
        pytest.skip("copy does not take it")
    workload = Workload("copy", {"rows": 120, "dtype": dtype})
    bits = np.arange(120, dtype=np.uint64).astype(f"u{DTYPES[dtype].nbytes}")
    stored = (bits | bits << (8 * bits.itemsize - 8)).view(DTYPES[dtype].storage) if bits.itemsize > 1 else bits
    expected = decode(stored.view(DTYPES[dtype].storage), dtype)
    stored, expected = stored[np.isfinite(expected)], expected[np.isfinite(expected)]
    wide = np.float64 if DTYPES[dtype].is_float else np.int64
    got = run_reference(device, workload.replace(rows=len(stored)), stored, wide)
    np.testing.assert_array_equal(got, expected.astype(wide))


def run_reference(device: Device, workload: Workload, x: Any, wide: Any) -> Any:
    from conv2d_support import run_on_cpu

    reference = toy_package.CopyReference().kernel(workload, CPU)
    return run_on_cpu(device, reference, {"x": x}, {"y": (x.shape, wide)})["y"]  # type: ignore[arg-type]


# ---- references that break the contract


def broken(monkeypatch: pytest.MonkeyPatch, **methods: Any) -> None:
    """Replaces methods of the reference of `product`."""
    for name, method in methods.items():
        monkeypatch.setattr(toy_package.ProductReference, name, method)


def raising(*args: Any) -> Any:
    raise ZeroDivisionError("no rows")


def taking(*pointers: str) -> KernelSource:
    step = KernelStep(lambda: None, tuple(map(Pointer, pointers)), Grid(1), 1)  # type: ignore[arg-type,return-value]
    return KernelSource("cpu", "native", (step,))


@pytest.mark.parametrize(
    ("method", "answer", "said"),
    [
        ("kernel", raising, r"kernel\(\) raised ZeroDivisionError: no rows \(line \d+ of test_any_operator.py\)"),
        ("kernel", lambda *args: None, r"kernel\(\) returned None; allowed: a KernelSource"),
        ("kernel", lambda self, w, t: source(w, PRESETS["h200"]), r"code for cuda; allowed here: cpu"),
        ("kernel", lambda self, w, t: taking("x", "weight"), "its kernel has no pointer for y"),
        ("kernel", lambda self, w, t: taking("y", "magnitude"), "a pointer 'magnitude'; allowed: weight, x, y; correct"),
        (
            "kernel",
            lambda self, w, t: taking("y"),
            "does not compile: kernel .*TypeError: the launch passes 3 more arguments",
        ),
        ("points", raising, r"points\(\) raised ZeroDivisionError: no rows"),
        ("points", lambda *args: np.zeros(3, np.int64), r"returned shape \(3,\) for 256 elements of y; allowed: \(256,\)"),
        (
            "points",
            lambda *args: np.full(256, 0.5),
            r"returned fractions for y, whose format is int32; allowed: integers",
        ),
        ("points", lambda *args: np.full(256, "a"), r"returned <U1 for y, whose format is int32"),
        ("points", lambda *args: np.full(256, 123456), r"contradicts NumPy at 2\d\d of 256 points, first y.flat\[\d+\] = "),
    ],
)
def test_a_reference_of_another_package_that_fails_is_its_error(
    device: Device, monkeypatch: pytest.MonkeyPatch, method: str, answer: Any, said: str
) -> None:
    broken(monkeypatch, **{method: answer})
    workload = Workload("product", WORKLOADS["product"])
    with pytest.raises(OperatorError, match=said) as caught:
        Verification(device, CpuComparer(), CodeCache(), workload, seed=0)
    text = str(caught.value)
    assert text.startswith("the reference of product (toy_package:ProductReference) cannot judge product m=20")
    assert "correct it in toy-package 1.0" in text and caught.value.exit_code == 2


HOLLOW = """
from schedsearch.ops import ArgSpec, Op, Parameter


class Hollow(Op):
    name = "hollow"
    reference = "hollow_reference:Reference"

    def parameters(self):
        return {"rows": Parameter.count("rows")}

    def arguments(self, p):
        return (ArgSpec("x", "R", (p["rows"],), "float32"),)

    def outputs(self, p):
        return (ArgSpec("y", "R", (p["rows"],), "float32"),)
"""


def test_a_runner_hands_the_error_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The runner's process calls the reference, and its faults are not reported as bugs of ours."""
    points = {plugin_support.OPERATORS: {"hollow": "hollow_package:Hollow"}}
    modules = {"hollow_package": HOLLOW, "hollow_reference": "raise ImportError('no such library')"}
    plugin_support.install(monkeypatch, tmp_path / "hollow", "hollow-package", points, modules)
    with Runner(CPU) as runner, pytest.raises(OperatorError, match="no such library") as caught:
        runner.prepare(Workload("hollow", {"rows": 3}))
    assert "hollow_reference:Reference" in str(caught.value)


# ---- from end to end


def expected_of(op: str, arrays: dict[str, Any]) -> list[Any]:
    x = arrays["x"]
    if op == "take":
        return [x[arrays["where"]]]
    if op == "product":
        return [x.astype(np.int32) @ arrays["weight"].astype(np.int32).T]
    if op == "extreme":
        return [x.max(axis=1), x.argmax(axis=1)]
    return [x.sum(axis=1) if op == "total" else x]


def arguments_of(workload: Workload) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    ranges = {spec.name: (0, spec.below) if spec.below else (-99, 100) for spec in workload.signature}
    return {spec.name: rng.integers(*ranges[spec.name], spec.shape).astype(spec.dtype) for spec in workload.signature}


def tune_and_use(target: Target, db: Path) -> None:
    """One run tunes all operators, and the deployed kernels compute the same as NumPy."""
    workloads = [Workload(op, params) for op, params in WORKLOADS.items()]
    summary = tune(workloads, db, target=target, trials=2 * len(workloads))
    assert all(task.best_ns for task in summary.tasks)
    with Store.open(db, readonly=True) as store:
        for workload in workloads:
            assert {str(record.measurement.outcome) for record in store.history(workload=workload)} == {"ok"}
            best = store.best(workload, target.key)
            assert best is not None and best.measurement.max_error == 0
    for workload in workloads:
        arrays = arguments_of(workload)
        kernel = schedsearch.compile(workload, db, target=target, allow=("exact",))
        given, back = (arrays, np.asarray) if target.kind == "cpu" else on_gpu(arrays)
        results = kernel(**given)
        results = results if isinstance(results, tuple) else (results,)
        for result, expected in zip(results, expected_of(workload.op, arrays), strict=True):
            np.testing.assert_array_equal(back(result), expected)


def on_gpu(arrays: dict[str, Any]) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """The same numbers as tensors of PyTorch on the GPU, and what brings a result back."""
    torch = pytest.importorskip("torch", reason="PyTorch holds the arrays on the GPU")
    return {name: torch.from_numpy(array).cuda() for name, array in arrays.items()}, lambda tensor: tensor.cpu().numpy()


@pytest.mark.long
def test_all_of_them_tune_on_the_cpu_and_deploy(tmp_path: Path) -> None:
    tune_and_use(CPU, tmp_path / "toys.db")


@pytest.mark.parametrize("op", WORKLOADS)
@pytest.mark.mostly_long(3)
def test_their_kernels_and_references_compile_for_cuda_without_a_gpu(op: str) -> None:
    pytest.importorskip("cuda.bindings.nvjitlink", reason="needs nvJitLink, an extra of schedsearch")
    workload, target = Workload(op, WORKLOADS[op]), PRESETS["a100"]
    for kernel in (source(workload, target), load_reference(op).kernel(workload, target)):
        assert compile_source(kernel, target).resources.local_bytes == 0


@pytest.mark.gpu
@pytest.mark.xdist_group("device")
def test_all_of_them_tune_on_a_gpu_and_deploy(tmp_path: Path) -> None:
    tune_and_use(detect("cuda"), tmp_path / "toys.db")
