"""`precision` of float32: verification accepts kernels that keep enough bits of their factors, in any order of summation,
and refuses those that keep fewer. Kernels are simulated in NumPy; what is right comes from float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from schedsearch.measure.timed_set import likely_roundoffs
from schedsearch.ops import decode, encode
from schedsearch.ops.checks import Domain
from schedsearch.verification.compare import CpuComparer, Tolerance, Truth
from schedsearch.verification.inputs import check_domains, draw, second_domains, timing_pattern
from schedsearch.verification.truths import allowed_roundoffs
from schedsearch.workload import Workload

ROWS = 128
Array = np.ndarray[Any, np.dtype[Any]]


def workload(k: int, **changes: Any) -> Workload:
    return Workload.conv2d(n=1, h=8, w=8, c=k, k=8, r=1, s=1, dtype="float32").replace(**changes)


# ---- what kernels do to factors


def cut(values: Array) -> Array:
    """What hardware reads from a float32 as TF32: the low 13 bits do not count."""
    return (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def nearest(values: Array) -> Array:
    """float32 rounded to TF32, halves away from zero, as `cvt.rna.tf32.f32` does."""
    return cut((values.view(np.uint32) + np.uint32(0x1000)).view(np.float32))


def bfloat16(values: Array) -> Array:
    return decode(encode(values, "bfloat16"), "bfloat16")


def split(part: Callable[[Array], Array], both: bool = True) -> Callable[[Array, Array], list[Array]]:
    """Products of coarse and fine parts, without that of the fine parts."""

    def products(x: Array, w: Array) -> list[Array]:
        x_hi, w_hi = part(x), part(w)
        x_lo, w_lo = part(x - x_hi), part(w - w_hi)
        return [x_lo * w_hi, x_hi * w_lo, x_hi * w_hi] if both else [x_lo * w_hi, x_hi * w_hi]

    return products


def rounded(part: Callable[[Array], Array]) -> Callable[[Array, Array], list[Array]]:
    return lambda x, w: [part(x) * part(w)]


def in_order(products: list[Array]) -> Array:
    return np.cumsum(np.concatenate(products, axis=1), axis=1, dtype=np.float32)[:, -1]


def backwards(products: list[Array]) -> Array:
    return in_order([each[:, ::-1] for each in products])


def in_pairs(products: list[Array]) -> Array:
    return np.concatenate(products, axis=1).astype(np.float32).sum(axis=1, dtype=np.float32)


EXACT = {"fp32": lambda x, w: [x * w], "three TF32 products": split(cut), "three rounded TF32 products": split(nearest)}
TF32 = {"TF32, cut": rounded(cut), "TF32, rounded": rounded(nearest), "two TF32 products": split(cut, both=False)}
COARSE = {"bfloat16": rounded(bfloat16), "three bfloat16 products": split(bfloat16)}


# ---- judging them


def rows(domain: Domain, k: int, seed: int) -> Array:
    return draw(domain, ROWS * k, np.random.default_rng(seed)).astype(np.float32).reshape(ROWS, k)


def factors(w: Workload, which: str) -> tuple[Array, Array]:
    """The numbers of verification's first launch, or of the one after all inputs have changed."""
    domains = check_domains(w) if which == "first" else second_domains(w)
    k = w.work.reduction
    return rows(domains["x"], k, 1), rows(domains["weight"], k, 2)


def violations(w: Workload, x: Array, weight: Array, sums: Array, tolerance: Tolerance) -> int:
    products = x.astype(np.float64) * weight
    truth, magnitude = products.sum(axis=1), np.abs(products).sum(axis=1)
    y = encode(sums.astype(np.float32), w.out_dtype)
    expected = Truth(w.out_dtype, ROWS, truth.ctypes.data, magnitude.ctypes.data, tolerance)
    return CpuComparer().output(y.ctypes.data, expected).violations


def verified(w: Workload, products: Callable[[Array, Array], list[Array]], order: Callable[[list[Array]], Array]) -> bool:
    k = w.work.reduction
    tolerance = Tolerance.rounded(w.out_dtype, allowed_roundoffs(w, k), exact_sums=True)
    drawn = [factors(w, which) for which in ("first", "second")]
    return not any(violations(w, *each, order(products(*each)), tolerance) for each in drawn)


@pytest.mark.parametrize("k", [1, 9, 27, 64, 576, 2304])
@pytest.mark.mostly_long(3)
def test_fp32_means_fp32(k: int) -> None:
    for products in EXACT.values():
        for order in (in_order, backwards, in_pairs):
            assert verified(workload(k), products, order)
    for products in (TF32 | COARSE).values():
        assert not verified(workload(k), products, in_order)


@pytest.mark.parametrize("k", [1, 9, 27, 64, 576, 2304])
@pytest.mark.mostly_long(3)
def test_tf32_means_tf32_or_better(k: int) -> None:
    for products in (EXACT | TF32 | {"three bfloat16 products": COARSE["three bfloat16 products"]}).values():
        for order in (in_order, backwards, in_pairs):
            assert verified(workload(k, precision="tf32"), products, order)
    assert not verified(workload(k, precision="tf32"), COARSE["bfloat16"], in_order)


@pytest.mark.parametrize("epilogue", [(), ("bias", "relu"), ("scale_shift", "residual")])
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("k", [1, 30, 147, 4608])
def test_sums_of_long_numbers_are_exact_in_every_order(k: int, precision: str, epilogue: tuple[str, ...]) -> None:
    """No partial sum in any order is larger than the sum of the products of one sign."""
    w = workload(k, precision=precision, epilogue=epilogue)
    for which in ("first", "second"):
        x, weight = factors(w, which)
        products = x.astype(np.float64) * weight
        gain = check_domains(w)["scale"].largest if "scale_shift" in epilogue else 1.0
        largest = max(products.clip(min=0).sum(axis=1).max(), -products.clip(max=0).sum(axis=1).min())
        assert largest * gain + 24 < 2**24
        long = (np.abs(x) > 4) & (np.abs(weight) > 4)
        assert not long.any()
        assert 0.3 < np.mean(((np.abs(x) > 4) | (np.abs(weight) > 4)).any(axis=1)) < 0.8


def test_two_numbers_alone_cannot_be_long_together_while_inputs_change() -> None:
    """Verification replaces x first: then both factors are short."""
    w = workload(64)
    first, second = check_domains(w), second_domains(w)
    assert (first["x"].rarity > 0, first["weight"].rarity) == (True, 0)
    assert (second["x"].rarity, second["weight"].rarity > 0) == (0, True)


@pytest.mark.parametrize("k", [1, 16, 147, 4608])
def test_on_the_timings_numbers_each_precision_passes_and_a_much_coarser_one_fails(k: int) -> None:
    def passes(w: Workload, products: Callable[[Array, Array], list[Array]]) -> bool:
        x_spec, w_spec = w.signature
        x = timing_pattern(w, x_spec).elements(ROWS * k).reshape(ROWS, k)
        weight = timing_pattern(w, w_spec).elements(ROWS * k + 77)[77:].reshape(ROWS, k)
        tolerance = Tolerance.rounded("float32", likely_roundoffs(w), exact_sums=False)
        return violations(w, x, weight, in_order(products(x, weight)), tolerance) == 0

    assert passes(workload(k), EXACT["fp32"])
    assert all(passes(workload(k, precision="tf32"), products) for products in (EXACT | TF32).values())
    if k >= 16:
        assert passes(workload(k), EXACT["three TF32 products"])
    if k <= 16:
        assert not passes(workload(k), TF32["TF32, cut"])
        assert not passes(workload(k, precision="tf32"), COARSE["bfloat16"])


def test_a_moment_of_a_domain_with_rare_numbers_is_that_of_its_draws() -> None:
    domain = Domain(range(-4, 5), 0.5, rare=(100.0, -50.0), rarity=0.25)
    drawn = draw(domain, 400_000, np.random.default_rng(3)).astype(float)
    assert domain.largest == 100.0
    assert drawn.mean() == pytest.approx(domain.mean, abs=0.5)
    assert np.square(drawn).mean() == pytest.approx(domain.second_moment, rel=0.02)


def test_identities_of_float32_workloads_do_not_change() -> None:
    assert workload(64).json == workload(64, precision="fp32").json
    assert "precision" not in workload(64).json
    assert workload(64, precision="tf32").id != workload(64).id
    assert workload(64, precision="tf32").replace(precision="fp32") == workload(64)
    assert (workload(64).label, workload(64, precision="tf32").label) == (
        "conv2d 1x8x8x64 k8 1x1 f32 NHWC",
        "conv2d 1x8x8x64 k8 1x1 tf32->f32 NHWC",
    )
