"""Expressions over integers, truths and floats: kernels against NumPy in the dtypes themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bandwidth_support import H200, default, emulated, on_cpu, verdict

from schedsearch import Workload, elementwise
from schedsearch.backend.cuda import _compile_to_ptx
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.errors import WorkloadError
from schedsearch.ops.elementwise import typed_of
from schedsearch.ops.expression_types import typed
from schedsearch.ops.expressions import parse_expression
from schedsearch.template import load_template
from schedsearch.templates.elementwise import cuda as cuda_template
from schedsearch.templates.elementwise import float32_functions, whole_functions
from schedsearch.templates.parts import whole_vectors

CUDA, CPU = load_template("elementwise_cuda"), load_template("elementwise_cpu")
MODULES = (cuda_template, float32_functions, whole_functions, whole_vectors)
DTYPES = {
    "i": "int64", "j": "int32", "k": "int16", "m": "uint32", "n": "uint16",
    "u": "uint8", "v": "int8", "x": "float32", "z": "float16",
}  # fmt: skip
Y = (4, 16)
TYPED: list[dict[str, Any]] = [
    dict(expression="where(x * z < 0.5, i, j)", out_dtype="int32"),
    dict(expression="where(x * z < 1, x, z)", out_dtype="float16"),
    dict(expression="int32(x * 1.7) + uint8(z) + int8(i) + int16(j) + uint16(k) + uint32(v)", out_dtype="int64"),
    dict(expression="int64(x * 1000) % 7 - fmod(i, 3) + quotient(i, j)", out_dtype="int64"),
    dict(expression="pow(int64(u), 3) ^ k", out_dtype="int16"),
    dict(expression="is_nan(x) | is_inf(z)", out_dtype="uint8"),
    dict(expression="sin(x) + cos(z) * tan(x)", out_dtype="float32"),
    dict(expression="asinh(x) - atan(z) + sinh(x) / cosh(x)", out_dtype="float32"),
    dict(expression="acos(x * 0.1) + asin(x * 0.1) + atanh(x * 0.1) + acosh(abs(x) + 1)", out_dtype="float32"),
    dict(expression="floor(x * 1.3) + ceil(z) + sign(x)", out_dtype="float32"),
    dict(expression="fmod(x, z) + pow(abs(x), z) + x % 0.7", out_dtype="float32"),
    dict(expression="float32(i) * 0.5", out_dtype="float16"),
    dict(expression="x * 2", out_dtype="int16"),
    dict(expression="t = i == j; (t & u) << 2 | ~v >> 1", out_dtype="uint8"),
]


def workload(expression: str, out_dtype: str, y: tuple[int, ...] = Y) -> Workload:
    inputs = [(name, DTYPES[name]) for name in parse_expression(expression).inputs]
    return elementwise(y=y, expression=expression, inputs=inputs, dtype="float32", out_dtype=out_dtype)


def numbers(rng: np.random.Generator, shape: tuple[int, ...] = Y) -> dict[str, Any]:
    """Of every dtype, over its whole range now and then."""
    found: dict[str, Any] = {}
    for name, dtype in DTYPES.items():
        if dtype.startswith("float"):
            found[name] = (rng.normal(size=shape) * 4).astype(dtype)
        else:
            limits = np.iinfo(dtype)
            small = rng.integers(max(-9, limits.min), 10, shape)
            wide = rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)
            found[name] = np.where(rng.random(shape) < 0.3, wide, small).astype(dtype)
    return found


def both(
    device: CpuDevice, patch: pytest.MonkeyPatch, made: Workload, arrays: dict[str, Any], vector: int | None = None
) -> list[Any]:
    """What the kernel on a CPU and the emulated one of a GPU compute."""
    taken = {spec.name: arrays[spec.name] for spec in made.signature}
    config = default(CUDA, made, H200)
    if vector is not None:
        config = Config(vector=vector, unroll=1, threads=64)
    with patch.context() as here:
        of_gpu = emulated(here, CUDA, made, taken, config, *MODULES)
    return [on_cpu(device, CPU, made, taken), of_gpu]


# ---- random expressions, of which NumPy computes every operation in int64 or float32

Leaf = tuple[str, Any]


def _divided(a: Any, b: Any) -> Any:
    """C's division, by Python's integers."""
    found = [0 if y == 0 else (abs(x) // abs(y)) * (1 if (x < 0) == (y < 0) else -1) for x, y in zip(*map(_plain, (a, b)))]
    return np.array([(each + 2**63) % 2**64 - 2**63 for each in found], np.int64).reshape(a.shape)


def _plain(a: Any) -> list[int]:
    return [int(each) for each in a.reshape(-1)]


def _truth(found: Any) -> Any:
    return found.astype(np.int64)


WHOLE_OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "{} + {}": np.add, "{} - {}": np.subtract, "{} * {}": np.multiply, "min({}, {})": np.minimum,
    "max({}, {})": np.maximum, "int64({}) & {}": np.bitwise_and, "int64({}) | {}": np.bitwise_or,
    "int64({}) ^ {}": np.bitwise_xor, "quotient({}, {})": _divided,
    "{} < {}": lambda a, b: _truth(a < b), "{} == {}": lambda a, b: _truth(a == b), "{} >= {}": lambda a, b: _truth(a >= b),
}  # fmt: skip
WHOLE_OF_ONE: dict[str, Callable[[Any], Any]] = {
    "-{}": np.negative, "abs({})": np.abs, "sign({})": np.sign, "~int64({})": np.invert,
    "int8({})": lambda a: a.astype(np.int8).astype(np.int64), "uint16({})": lambda a: a.astype(np.uint16).astype(np.int64),
}  # fmt: skip
FLOAT_OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "{} + {}": np.add, "{} - {}": np.subtract, "min({}, {})": np.minimum, "max({}, {})": np.maximum,
}  # fmt: skip
FLOAT_OF_ONE: dict[str, Callable[[Any], Any]] = {
    "floor({})": np.floor, "ceil({})": np.ceil, "-{}": np.negative, "abs({})": np.abs, "round({})": np.rint,
}  # fmt: skip


class Trees:
    """Draws expressions with what NumPy makes of them. An addition of floats is rounded as float32 is."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.arrays = numbers(self.rng)

    def whole(self, depth: int) -> Leaf:
        if depth == 0:
            name = self.rng.choice(list("ijkmn"))
            return str(name), self.arrays[name].astype(np.int64)
        kind = self.rng.integers(5)
        if kind == 0:
            condition, text = self.truth(depth - 1), self.whole(depth - 1)
            other = self.whole(depth - 1)
            return f"where({condition[0]}, {text[0]}, {other[0]})", np.where(condition[1] != 0, text[1], other[1])
        if kind == 1:
            name, of_one = self.drawn(WHOLE_OF_ONE)
            text, value = self.whole(depth - 1)
            return name.format(f"({text})"), of_one(value)
        name, of_two = self.drawn(WHOLE_OF_TWO)
        (text, a), (second, b) = self.whole(depth - 1), self.whole(depth - 1)
        return name.format(f"({text})", f"({second})"), of_two(a, b)

    def float(self, depth: int) -> Leaf:
        if depth == 0:
            name = self.rng.choice(list("xzuv"))
            return str(name), self.arrays[name].astype(np.float32)
        if self.rng.random() < 0.3:
            condition, (text, a), (other, b) = self.truth(depth - 1), self.float(depth - 1), self.float(depth - 1)
            return f"where({condition[0]}, {text}, {other})", np.where(condition[1] != 0, a, b)
        if self.rng.random() < 0.4:
            name, of_one = self.drawn(FLOAT_OF_ONE)
            text, value = self.float(depth - 1)
            return name.format(f"({text})"), of_one(value)
        name, of_two = self.drawn(FLOAT_OF_TWO)
        (text, a), (second, b) = self.float(depth - 1), self.float(depth - 1)
        return name.format(f"({text})", f"({second})"), of_two(a, b).astype(np.float32)

    def truth(self, depth: int) -> Leaf:
        (text, a), (second, b) = (self.float if self.rng.random() < 0.5 else self.whole)(depth), self.whole(depth)
        b = b.astype(a.dtype)  # an integer beside a float becomes one
        return f"({text}) < ({second})", _truth(a < b)

    def drawn(self, table: dict[str, Any]) -> tuple[str, Any]:
        name = str(self.rng.choice(list(table)))
        return name, table[name]


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 6))])
@pytest.mark.mostly_long(2)
def test_random_expressions_over_mixed_dtypes_are_what_numpy_computes(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    trees = Trees(seed)
    with np.errstate(all="ignore"):
        cases = [(*trees.whole(3), "int64"), (*trees.whole(2), "int16"), (*trees.float(3), "float32")]
    for text, wanted, out_dtype in cases:
        for found in both(device, monkeypatch, workload(text, out_dtype), trees.arrays):
            np.testing.assert_array_equal(found, wanted.astype(out_dtype), err_msg=text)


# ---- what is special about a function


def computed(device: CpuDevice, patch: pytest.MonkeyPatch, expression: str, out_dtype: str, **arrays: Any) -> Any:
    """The same on both devices."""
    (shape,) = {np.shape(each) for each in arrays.values()}
    made = workload(expression, out_dtype, shape)
    of_cpu, of_gpu = both(device, patch, made, arrays)
    np.testing.assert_array_equal(of_cpu, of_gpu)
    return of_cpu


def test_a_float_becomes_an_integer_without_its_fraction_and_within_the_format(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.array([1.9, -1.9, 0.5, -0.5, 300, -300, 1e30, -1e30, np.nan, np.inf, -np.inf, 2**31], np.float32)
    assert computed(device, monkeypatch, "int8(x)", "int8", x=x).tolist() == [
        *(1, -1, 0, 0, 127, -128, 127, -128, 0, 127, -128, 127)
    ]  # fmt: skip
    limits = np.iinfo(np.int64)
    assert computed(device, monkeypatch, "int64(x)", "int64", x=x).tolist() == [
        *(1, -1, 0, 0, 300, -300, limits.max, limits.min, 0, limits.max, limits.min, 2**31)
    ]  # fmt: skip


def test_an_integer_becomes_a_shorter_one_of_its_last_bits(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    i = np.array([128, -129, 2**40 + 5, -1], np.int64)
    for dtype in ("int8", "uint8", "int16", "uint32"):
        assert computed(device, monkeypatch, "i", dtype, i=i).tolist() == i.astype(dtype).tolist()
        assert computed(device, monkeypatch, f"{dtype}(i) + 1", "int64", i=i).tolist() == (
            (i.astype(dtype).astype(np.int64) + 1).tolist()
        )


def test_division_truncates_and_by_zero_gives_zero(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    least = np.iinfo(np.int64).min
    i, j = np.array([7, -7, 7, -7, 5, least, 0]), np.array([2, 2, -2, -2, 0, -1, 3], np.int32)
    assert computed(device, monkeypatch, "quotient(i, j)", "int64", i=i, j=j).tolist() == [3, -3, -3, 3, 0, least, 0]
    assert computed(device, monkeypatch, "i % j", "int64", i=i, j=j).tolist() == [1, 1, -1, -1, 0, 0, 0]
    assert computed(device, monkeypatch, "fmod(i, j)", "int64", i=i, j=j).tolist() == [1, -1, 1, -1, 0, 0, 0]


def test_shifts_beyond_the_bits_leave_zero_or_the_sign(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    m, i = np.array([1, 2**31, 255, 1], np.uint32), np.array([31, 1, 64, -1])
    assert computed(device, monkeypatch, "m << i", "uint32", m=m, i=i).tolist() == [2**31, 0, 0, 0]
    assert computed(device, monkeypatch, "m >> i", "uint32", m=m, i=i).tolist() == [0, 2**30, 0, 0]
    v = np.array([-5, -5, -5, 7], np.int8)
    assert computed(device, monkeypatch, "v >> i", "int8", v=v, i=i).tolist() == [-1, -3, -1, 0]


def test_powers_of_integers_are_exact(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    i, j = np.array([3, -3, 2, 7, 1, -1, -1, 5]), np.array([39, 3, 62, 0, -5, -5, -4, -2], np.int32)
    assert computed(device, monkeypatch, "pow(i, j)", "int64", i=i, j=j).tolist() == [3**39, -27, 2**62, 1, 1, -1, 1, 0]
    assert computed(device, monkeypatch, "i ** 3", "int64", i=i).tolist() == (i**3).tolist()


def test_a_nan_of_the_branch_that_is_not_taken_goes_nowhere(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    x, u = np.array([np.nan, 1, np.inf, -np.inf], np.float32), np.array([0, 1, 0, 1], np.uint8)
    assert computed(device, monkeypatch, "where(u, x, 5)", "float32", x=x, u=u).tolist() == [5, 1, 5, -np.inf]
    assert computed(device, monkeypatch, "is_nan(x) + 2 * is_inf(x)", "uint8", x=x).tolist() == [1, 0, 2, 2]
    assert computed(device, monkeypatch, "x < 5", "uint8", x=x).tolist() == [0, 1, 0, 1]


def test_numbers_beyond_float64_are_exact(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    i, text = np.array([2**53 + 1, 2**63 - 1, -(2**63) + 1]), "where(i == 9223372036854775807, -9223372036854775807, i)"
    found = computed(device, monkeypatch, text, "int64", i=i)
    assert found.tolist() == [2**53 + 1, -(2**63) + 1, -(2**63) + 1]


def test_numbers_that_only_integers_are_stay_what_stands_beside_them() -> None:
    def whole(text: str, **dtypes: str) -> bool:
        return typed(parse_expression(text), tuple(dtypes.items())).whole

    assert whole("i + 1", i="int64") and not whole("i + 0.5", i="int64") and not whole("i * x", i="int64", x="float32")
    assert not whole("u + u", u="uint8") and whole("int64(u) + u", u="uint8") and whole("u & 3", u="uint8")
    assert not whole("i / 2", i="int64") and whole("x < 2", x="float32")


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("x & 1", "gives & a float; allowed: integers"),
        ("~z", "gives ~ a float"),
        ("quotient(x, 2)", "gives quotient a float"),
        ("(x << 1) + 1", "gives << a float"),
    ],
)
def test_operators_of_integers_take_no_floats(expression: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        workload(expression, "int32")


@pytest.mark.parametrize(
    "each",
    [
        pytest.param(each, id=each["expression"], marks=[pytest.mark.long] * (number % 2))
        for number, each in enumerate(TYPED)
    ],
)
@pytest.mark.mostly_long(9)
def test_verification_accepts_kernels(device: CpuDevice, each: dict[str, Any]) -> None:
    made = workload(each["expression"], each["out_dtype"], (40, 64))
    assert verdict(device, CPU, made) is None


@pytest.mark.parametrize(
    ("right", "wrong", "out_dtype"),
    [
        ("i + j", "i - j", "int64"),
        ("x * z < 0.5", "x * z < 0.6", "uint8"),
        ("where(x < z, i, j)", "where(x < z, i, j + 1)", "int32"),
        ("int32(x * 1.7)", "int32(x * 1.7 + 0.4)", "int32"),
        ("where(u > 3, x, z)", "where(u > 4, x, z)", "float32"),
    ],
)
@pytest.mark.mostly_long(2)
def test_verification_finds_wrong_kernels(device: CpuDevice, right: str, wrong: str, out_dtype: str) -> None:
    assert verdict(device, CPU, workload(right, out_dtype, (40, 64)), workload(wrong, out_dtype, (40, 64))) is not None


@pytest.mark.parametrize(
    "chosen", [pytest.param(TYPED[:2], id="two"), pytest.param(TYPED[2:], id="all", marks=pytest.mark.long)]
)
def test_kernels_for_gpus_compile(chosen: list[dict[str, Any]]) -> None:
    for each in chosen:
        made = workload(each["expression"], each["out_dtype"])
        (step,) = CUDA.kernel(made, H200, default(CUDA, made, H200)).steps
        assert ".entry kernel" in _compile_to_ptx(step, "kernel", "sm_90")


@pytest.mark.parametrize("out_dtype", ["int64", "uint32", "int16", "uint8"])
@pytest.mark.mostly_long(3)
def test_a_cpu_converts_every_integer(device: CpuDevice, out_dtype: str) -> None:
    arrays = numbers(np.random.default_rng(1))
    for name in "ijkmnuv":
        found = on_cpu(device, CPU, workload(f"int64({name})", out_dtype), {name: arrays[name]})
        np.testing.assert_array_equal(found, arrays[name].astype(out_dtype))


@pytest.mark.parametrize("vector", [1, 2, 4, 8])
@pytest.mark.mostly_long(4)
def test_vectors_of_every_width_hold_every_integer(monkeypatch: pytest.MonkeyPatch, vector: int) -> None:
    arrays, config, widths = numbers(np.random.default_rng(1)), Config(vector=vector, unroll=1, threads=64), 0
    for name in "ijkmnuv":
        for out_dtype in ("int64", "uint32", "int16", "uint8"):
            made = workload(f"int64({name})", out_dtype)
            if not CUDA.space(made, H200).check(config):
                found = emulated(monkeypatch, CUDA, made, {name: arrays[name]}, config, *MODULES)
                np.testing.assert_array_equal(found, arrays[name].astype(out_dtype))
                widths += 1
    assert widths >= 8


@pytest.mark.gpu
def test_kernels_on_the_device(gpu: Any) -> None:
    arrays = numbers(np.random.default_rng(2))
    for each in TYPED:
        made = workload(each["expression"], each["out_dtype"])
        found = typed_of(made.params)
        taken = {spec.name: arrays[spec.name] for spec in made.signature}
        wanted, got = found.evaluate(taken), on_cpu(gpu, CUDA, made, taken)
        if found.whole and found.decided:
            np.testing.assert_array_equal(got, wanted.astype(each["out_dtype"]))
        assert verdict(gpu, CUDA, made) is None
