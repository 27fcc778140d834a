"""Bounds of verification: kernels that sum in any order pass, and wrong ones do not, however long the sum.

The kernels are NumPy functions that sum in float32, one number after the other, backwards, in pairs or shuffled, or in
float64. Their results are rounded to the output's format once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import schedsearch
from schedsearch.backend.code_cache import CodeCache
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.device.memory import bytes_at
from schedsearch.ops.dtypes import decode, dtype, encode
from schedsearch.verification.compare import CpuComparer
from schedsearch.verification.verify import Verdict, Verification
from schedsearch.workload import Workload

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]
Sum = Callable[[Array], Array]  # of the last axis
CPU = detect("cpu")
FLOATS = ("float16", "bfloat16", "float32")


def _one_by_one(numbers: Array) -> Array:
    return np.asarray(np.cumsum(numbers, axis=-1, dtype=np.float32)[..., -1])


ORDERS: Mapping[str, Sum] = {
    "in float64": lambda numbers: numbers.astype(np.float64).sum(axis=-1),
    "one by one": _one_by_one,
    "backwards": lambda numbers: _one_by_one(numbers[..., ::-1]),
    "in pairs": lambda numbers: numbers.astype(np.float32).sum(axis=-1),
    "shuffled": lambda numbers: _one_by_one(np.random.default_rng(0).permuted(numbers, axis=-1)),
}


def softmax(w: Workload, arrays: Arrays, total: Sum) -> Array:
    shifted = arrays["x"] - arrays["x"].max(axis=-1, keepdims=True)
    powers = np.exp(shifted)
    if w.log:
        return np.asarray(shifted - np.log(total(powers)[..., None]))
    return np.asarray(powers / total(powers)[..., None])


def layer_norm(w: Workload, arrays: Arrays, total: Sum) -> Array:
    x, length = arrays["x"], arrays["x"].shape[-1]
    distance = x - (total(x) / length)[..., None] if w.centred else x
    factor = 1 / np.sqrt(total(distance**2) / length + w.epsilon)
    y = distance * factor[..., None] * arrays["scale"]
    return np.asarray(y + arrays["bias"] if w.bias else y)


def average(w: Workload, arrays: Arrays, total: Sum) -> Array:
    """Of whole images of one column, NHWC."""
    return np.asarray(total(arrays["x"][:, :, 0].swapaxes(1, 2)) / arrays["x"].shape[1])


def dense(w: Workload, arrays: Arrays, total: Sum) -> Array:
    """The weight is NK."""
    return np.asarray(total(arrays["x"][:, None] * arrays["weight"][None]))


def workload_of(op: str, length: int, dtype: str) -> Workload:
    if op == "layer_norm":
        return schedsearch.layer_norm(x=(3, length), dtype=dtype)
    if op == "rms_norm":
        return schedsearch.layer_norm(x=(3, length), centred=False, bias=False, dtype=dtype)
    if op == "average":
        return schedsearch.pool2d(n=1, c=3, h=length, w=1, r=length, s=1, mode="average", dtype=dtype)
    if op == "dense":
        return schedsearch.dense(m=2, n=3, k=length, dtype=dtype)
    return schedsearch.softmax(x=(3, length), log=op == "log_softmax", dtype=dtype)


KERNELS: Mapping[str, Callable[[Workload, Arrays, Sum], Array]] = {
    "softmax": softmax, "log_softmax": softmax, "layer_norm": layer_norm, "rms_norm": layer_norm, "average": average,
    "dense": dense,
}  # fmt: skip


def missing(order: Sum) -> Sum:
    """The sum without the largest number of each row."""

    def total(numbers: Array) -> Array:
        kept = np.array(numbers)
        np.put_along_axis(kept, np.abs(kept).argmax(axis=-1)[..., None], 0, axis=-1)
        return order(kept)

    return total


def judged(workload: Workload, compute: Callable[[Arrays], Array]) -> Verdict:
    """The verdict about a kernel that is a NumPy function."""
    signature, output = workload.signature, workload.output

    def run(addresses: Mapping[str, int]) -> None:
        def memory(spec: Any) -> Array:
            return np.frombuffer(bytes_at(addresses[spec.name], spec.nbytes), dtype(spec.dtype).storage).reshape(spec.shape)

        with np.errstate(all="ignore"):
            y = compute({spec.name: decode(memory(spec), spec.dtype).astype(np.float32) for spec in signature})
        memory(output)[:] = encode(np.asarray(y).reshape(output.shape), output.dtype)

    plan = SimpleNamespace(workspaces={}, constants=())
    kernel = SimpleNamespace(
        artifact=SimpleNamespace(plan=plan),
        bind=lambda addresses, scalars: SimpleNamespace(launch=lambda: run(addresses)),
    )
    with contextlib.closing(open_device(CPU)) as device:
        verification = Verification(device, CpuComparer(), CodeCache(), workload, seed=0)
        with contextlib.closing(verification):
            return verification.check(kernel)  # type: ignore[arg-type]


def check(op: str, length: int, dtype: str, order: str) -> None:
    workload, kernel, total = workload_of(op, length, dtype), KERNELS[op], ORDERS[order]

    def changed(arrays: Arrays) -> Array:
        y = kernel(workload, arrays, total)
        place = np.unravel_index(np.abs(y).argmax(), y.shape)
        y[place] *= 1 + 16 * (1 / 256)
        return y

    verdict = judged(workload, lambda arrays: kernel(workload, arrays, total))
    assert verdict.ok, f"a right kernel fails: {verdict.message}"
    assert not judged(workload, lambda arrays: 0.75 * kernel(workload, arrays, total)).ok
    assert not judged(workload, changed).ok
    if length > 1 and shows(op, length, dtype):
        assert not judged(workload, lambda arrays: kernel(workload, arrays, missing(total))).ok


def shows(op: str, length: int, dtype: str) -> bool:
    """Whether an element that a sum lacks shows beside the rounding of the sum and of the output."""
    if op in ("layer_norm", "rms_norm"):  # the squares' sums are not exact
        return length <= (1024 if dtype == "float32" else 64)
    if op == "average":
        return length <= 2048 or dtype == "float32"
    return op != "log_softmax" or dtype == "float32"


@pytest.mark.parametrize(
    ("op", "length"), [("softmax", 6625), ("softmax", 100_000), ("layer_norm", 5000), ("average", 100_000)]
)
@pytest.mark.mostly_long(2)
def test_a_long_sum_is_judged_by_its_length(op: str, length: int) -> None:
    check(op, length, "float32", "one by one")


@pytest.mark.long
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    op=st.sampled_from(sorted(KERNELS)),
    length=st.integers(2, 100_000) | st.integers(2, 2000),  # the logarithm of a softmax of one element is 0 for any kernel
    dtype=st.sampled_from(FLOATS),
    order=st.sampled_from(sorted(ORDERS)),
)
def test_right_kernels_pass_and_wrong_ones_do_not(op: str, length: int, dtype: str, order: str) -> None:
    check(op, length, dtype, order)


def quantise(arrays: Arrays) -> Array:
    return np.clip(np.rint(arrays["a"] / arrays["b"]) + arrays["c"], -128, 127)


def test_zero_points_of_channels_are_drawn_from_the_integers() -> None:
    of_channel = ("float32", (4, 1))
    workload = schedsearch.elementwise(
        y=(2, 4, 9),
        expression="quantise(a, b, c)",
        inputs=["a", ("b", *of_channel), ("c", *of_channel)],
        dtype="float32",
        out_dtype="int8",
    )
    assert judged(workload, quantise).ok
    assert not judged(workload, lambda arrays: quantise({**arrays, "c": arrays["c"] + 1})).ok
