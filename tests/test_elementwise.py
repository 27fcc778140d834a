"""elementwise: expressions, the operator, its reference and templates, against NumPy and ONNX's node cases."""

from __future__ import annotations

import math
import re
from typing import Any, ClassVar

import numpy as np
import pytest
from bandwidth_support import H200, arrays_of, attributes, default, emulated, node_cases, on_cpu, verdict
from test_typed_expressions import TYPED

from schedsearch import Workload, elementwise
from schedsearch.backend.cuda import _compile_to_ptx
from schedsearch.config import Config
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.errors import OperatorError
from schedsearch.ops.dtypes import decode, encode
from schedsearch.ops.elementwise import ELEMENTWISE, Read
from schedsearch.ops.expressions import FUNCTIONS, ExpressionError, parse_expression
from schedsearch.template import load_reference, load_template
from schedsearch.templates.elementwise import cuda as cuda_template
from schedsearch.templates.elementwise import float32_functions
from schedsearch.templates.elementwise.bounded_functions import BOUNDED, given
from schedsearch.templates.elementwise.broadcast import Spread
from schedsearch.templates.elementwise.float32_functions import nearest
from schedsearch.templates.elementwise.programs import program
from schedsearch.testing.op_contract import OpContract
from schedsearch.testing.template_contract import TemplateContract
from schedsearch.verification.inputs import check_domains, draw

CUDA, CPU = load_template("elementwise_cuda"), load_template("elementwise_cpu")
ADD = {"y": [2, 3, 4, 8], "expression": "relu(a + b)"}


class TestElementwise(OpContract):
    op = ELEMENTWISE
    examples = (
        ADD,
        {"y": [6], "expression": "quantise(x, 0.1, 3)", "dtype": "float32", "out_dtype": "uint8"},
        {**ADD, "inputs": ["b", ["a", "float32", [3, 1, 1]]], "dtype": "bfloat16"},
        {**ADD, "slice_of": [*ADD["y"][:-1], 40]},
        {
            "y": [2, 8],
            "expression": "t = dequantise(q, s, -1); sqrt(t) / log(t + 2)",
            "inputs": [["q", "int8"], ["s"]],
        },
        {"y": [2, 8], "expression": "where(a < b, c, -1)", "inputs": ["a", "b", ["c", "int64"]], "out_dtype": "int64"},
        {"y": [2, 8], "expression": "a * a < b * 0.3 + 1", "dtype": "float32", "out_dtype": "uint8"},
    )
    wrong = (
        ({**ADD, "expression": "relu(a + )"}, "expression"),
        ({**ADD, "expression": "rleu(a)"}, "expression"),
        ({**ADD, "expression": "y + a"}, "expression"),
        ({**ADD, "inputs": ["a"]}, "inputs"),
        ({**ADD, "inputs": ["a", ["b", "float16", [3]]]}, "inputs"),
        ({**ADD, "inputs": ["a", ["b", "float64"]]}, "inputs"),
        ({**ADD, "inputs": ["a", ["b", "uint64"]]}, "inputs"),
        ({**ADD, "expression": "a & b"}, "expression"),
        ({**ADD, "expression": "quotient(a, b)"}, "expression"),
        ({**ADD, "inputs": ["a", 5]}, "inputs"),
        ({**ADD, "y": []}, "y"),
        ({**ADD, "out_dtype": "float64"}, "out_dtype"),
    )
    ids: ClassVar = {
        "8bea7bb9a5f3313cf340bc5c851b80589e403e0ca0a8b67cdba089742f0f5e8c": ADD,
        "906d5dac5f1205c811fd8d6b7275d045dc0d4397d94754b6862fed154ee384f1": {**ADD, "inputs": ["a", ["b", "float32", [8]]]},
    }

    def test_equal_expressions_have_equal_ids(self) -> None:
        assert elementwise(y=(4,), expression="relu( (a)+b )", inputs=["a", "b"], out_dtype="float16").id == (
            elementwise(y=(4,), expression="relu(a + b)").id
        )

    def test_a_message_says_what_to_do(self) -> None:
        assert self.mistakes({**ADD, "inputs": ["a", ["b", "float16", [3, 8]]]}) == {
            "inputs": "input b has the extents 3x8, which do not broadcast to y's 2x3x4x8; allowed: from the last "
            "extent on, 1 or that of y"
        }


# ---- expressions


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("relu( (a+b) )*2", "relu(a + b) * 2"),
        ("a-(b-c)", "a - (b - c)"),
        ("(a-b)-c", "a - b - c"),
        ("(a*b)/(c/d)", "a * b / (c / d)"),
        ("(-a)**2 - -a**2", "(-a) ** 2 - -a ** 2"),
        ("-3*a - -2", "(-3) * a - (-2)"),
        ("hard_sigmoid(x)", "hard_sigmoid(x, 0.2, 0.5)"),
        ("t=a*s\nt*sigmoid(t)", "t = a * s; t * sigmoid(t)"),
    ],
)
def test_an_expression_has_one_form(text: str, normal: str) -> None:
    assert parse_expression(text).text == normal
    assert parse_expression(normal) == parse_expression(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "1", "a.b", "__import__('os')", "a if b else c", "lambda: a", "a = b", "a; b", "t = a; t = b; t", "a ** b",
        "relu(a, b)", "(" * 300, "-" * 900 + "a", "+".join(["a"] * 66), "a" * 1001, "_a", "relu", "a * 1e999", "f(a)",
        "a[0]", "a := b",
    ],
)  # fmt: skip
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse_expression(text)


def test_a_broadcast_input_is_described_by_runs() -> None:
    y, at = (2, 3, 4, 5), np.arange(120)
    for extents in [(5,), (3, 1, 1), (2, 1, 1, 5), (1,), (2, 3, 1, 1), (4, 1), (2, 3, 4, 5), (1, 3, 4, 1)]:
        full = np.arange(math.prod(extents)).reshape(extents)
        offset = Spread.of(Read("a", "float16", extents), y).offset(int)
        assert [offset(int(place)) for place in at] == np.broadcast_to(full, y).reshape(-1).tolist(), extents


# ---- every function, with numbers that verification draws

EVERY: list[dict[str, Any]] = [
    dict(expression="relu(a) + leaky_relu(b, 0.1)"),
    dict(expression="clip(a, -1, 2) - sigmoid(b)", dtype="float32"),
    dict(expression="silu(a) / (1 + hard_sigmoid(b))", dtype="bfloat16"),
    dict(expression="hard_swish(a) + gelu(b)", dtype="float32"),
    dict(expression="tanh(a) + erf(b) - exp(a)", dtype="float32"),
    dict(expression="log(a) + sqrt(b) + abs(-a)", dtype="float32"),
    dict(expression="min(a, b) * max(a, b) + a ** 3 + b ** -2 + abs(a) ** 1.5", dtype="float32"),
    dict(expression="t = dequantise(a, 0.5, -3); u = t + round(t); u * u", inputs=[("a", "int8")], out_dtype="float32"),
    dict(expression="clip(quantise(a * b, 0.05, 3), 0, 200)", inputs=["a", "b"], out_dtype="uint8"),
    dict(expression="relu(a * s + t)", inputs=["a", ("s", "float32", (8,)), ("t", "float32", (2, 1, 1, 8))]),
    dict(expression="a * s + t", inputs=["a", ("s", "bfloat16", (3, 1, 1)), ("t", "float32", (1,))], out_dtype="int8"),
]


def example(workload: Workload) -> tuple[dict[str, Any], Any]:
    """Numbers that verification draws, and y as NumPy computes it, rounded once."""
    rng, domains = np.random.default_rng(0), ELEMENTWISE.check_inputs(workload.params)
    arrays = {each.name: draw(domains[each.name], each.size, rng).reshape(each.shape) for each in workload.signature}
    values = parse_expression(workload.expression).evaluate(arrays)
    return arrays, decode(encode(np.broadcast_to(values, workload.y), workload.out_dtype), workload.out_dtype)


def errors_of_float32(workload: Workload, arrays: dict[str, Any]) -> Any:
    """What every element of y may be wrong by when float32 computes it, but at most 0.001, for an output of floats."""
    names = [spec.name for spec in workload.signature]
    bounded = program(parse_expression(workload.expression), names, BOUNDED)
    numbers = [np.broadcast_to(arrays[name], workload.y).reshape(-1) for name in names]
    bounds = [bounded(tuple(given(np.float64(each)) for each in values))[1] for values in zip(*numbers)]
    return np.minimum(np.reshape(bounds, workload.y) * 2.0**-24, 1e-3)  # next to a half, rounding may be wrong by 1


def assert_close(workload: Workload, found: Any, expected: Any, errors: Any = 0.0) -> None:
    """Floats may differ by `errors` and a rounding. Integers may be the other neighbour of a half."""
    assert np.isfinite(expected.astype(float)).all() and np.unique(expected).size > 2
    tolerance = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}.get(workload.out_dtype)
    if tolerance is None:
        difference = np.abs(found.astype(int) - expected.astype(int))
        assert difference.max() <= 1 and np.count_nonzero(difference) <= difference.size // 20
    else:
        difference = np.abs(found.astype(float) - expected.astype(float))
        np.testing.assert_array_less(difference, tolerance * (1 + np.abs(expected.astype(float))) + errors)


def every(changes: dict[str, Any]) -> Workload:
    return elementwise(y=(2, 3, 4, 8), **changes)


def test_every_function_is_in_a_test() -> None:
    given = [each["expression"] for each in [*EVERY, *TYPED]]
    assert [name for name in FUNCTIONS if not any(f"{name}(" in expression for expression in given)] == []


@pytest.mark.parametrize("changes", EVERY, ids=lambda each: each["expression"])
def test_an_emulated_kernel_is_the_definition(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    workload = every(changes)
    arrays, expected = example(workload)
    config = Config(vector=CUDA.space(workload, H200).knobs[0].values[-1], unroll=2, threads=64)
    found = emulated(monkeypatch, CUDA, workload, arrays, config, cuda_template, float32_functions)
    assert_close(workload, found, expected)


@pytest.mark.parametrize("changes", EVERY, ids=lambda each: each["expression"])
def test_the_bound_holds_for_float32_and_is_not_wide(changes: dict[str, Any]) -> None:
    """The same functions on float64 with a bound, and on float32: their difference is below the bound, which is small."""
    workload = every(changes)
    arrays, _ = example(workload)
    expression, names = parse_expression(workload.expression), [spec.name for spec in workload.signature]
    exact = expression.without_last_rounding() if workload.out_dtype in ("int8", "uint8") else expression
    bounded, computed = program(exact, names, BOUNDED), program(exact, names, nearest(np.rint, np.multiply))
    numbers = [np.broadcast_to(arrays[name], workload.y).reshape(-1) for name in names]
    bounds = []
    for values in list(zip(*numbers))[:100]:
        value, bound = bounded(tuple(given(np.float64(each)) for each in values))
        assert value == pytest.approx(float(exact.evaluate(dict(zip(names, values)))), rel=1e-12, abs=1e-12)
        found = computed(tuple(np.float32(each) for each in values))
        assert abs(float(found) - value) <= bound * 2.0**-24 + abs(value) * 2.0**-24
        bounds.append(bound * 2.0**-24 / max(1.0, abs(value)))
    assert np.quantile(bounds, 0.25) < 1e-5  # others are next to a half, or have a small base


@pytest.mark.parametrize("changes", [EVERY[3], EVERY[8], EVERY[9]], ids=str)
@pytest.mark.mostly_long(3)
def test_verification_accepts_cpu_kernels(device: CpuDevice, changes: dict[str, Any]) -> None:
    assert verdict(device, CPU, every(changes)) is None


@pytest.mark.parametrize(
    "expression",
    [
        "sqrt(a - b * b + 1e-05)",
        "log(a - b)",
        "log(1 - exp(a))",
        "sqrt(a * a - 4 * b * c)",
        "sqrt(a - b) / (c - d)",
        "log(a / b - c)",
    ],
)
@pytest.mark.mostly_long(3)
def test_numbers_for_verification_are_ones_for_which_the_expression_is_defined(device: CpuDevice, expression: str) -> None:
    """The variance of a normalisation is a difference that is never negative; verification must draw such numbers."""
    workload = elementwise(y=(40, 50), expression=expression, dtype="float32")
    drawn = {name: draw(domain, 20_000, np.random.default_rng(7)) for name, domain in check_domains(workload).items()}
    assert np.isfinite(parse_expression(expression).evaluate(drawn)).all()
    assert verdict(device, CPU, workload) is None


@pytest.mark.parametrize("zero_point", [0, 128, 254])
def test_a_root_of_dequantised_numbers_is_verified_where_it_is_defined(device: CpuDevice, zero_point: int) -> None:
    """The deviation of a layer norm that ONNX Runtime quantised is such a root."""
    expression = f"sqrt(dequantise(a, 0.5, {zero_point}))"
    workload = elementwise(y=(40,), expression=expression, inputs=[("a", "uint8")], dtype="float32")
    assert (draw(check_domains(workload)["a"], 1000, np.random.default_rng(7)) >= zero_point).all()
    assert verdict(device, CPU, workload) is None


def test_dequantised_numbers_for_verification_have_both_signs(device: CpuDevice) -> None:
    shape: dict[str, Any] = dict(y=(500,), inputs=[("a", "uint8")], dtype="float32", out_dtype="uint8")
    right, wrong = (
        elementwise(**shape, expression=f"quantise({each}(dequantise(a, 0.5, 128)), 0.5, 0)") for each in ("abs", "-1 * ")
    )
    assert verdict(device, CPU, right, right) is None
    assert verdict(device, CPU, right, wrong) is not None


def test_an_expression_that_is_defined_nowhere_is_refused(device: CpuDevice) -> None:
    with pytest.raises(OperatorError, match="cannot be verified: y is NaN"):
        verdict(device, CPU, elementwise(y=(40,), expression="sqrt(-abs(a) - 1)", dtype="float32"))


def test_sums_of_dequantised_numbers_are_quantised_as_if_each_product_were_rounded(device: CpuDevice) -> None:
    """All pairs of 8-bit numbers. Quotients are wholes and halves but for roundoff, so a fused product shows."""
    inputs = [("a", "uint8", (256, 256)), ("b", "int8", (256, 256))]
    expression = "quantise(dequantise(a, 0.7, 4) + dequantise(b, 0.35, 9), 0.7, 7)"
    a, b = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(-128, 128, dtype=np.int8), indexing="ij")
    workload = elementwise(y=(256, 256), expression=expression, inputs=inputs, dtype="uint8", out_dtype="uint8")
    numbers = (a.astype(np.float32) - 4) * np.float32(0.7) + (b.astype(np.float32) - 9) * np.float32(0.35)
    expected = np.clip(np.rint(numbers / np.float32(0.7)) + 7, 0, 255)
    np.testing.assert_array_equal(on_cpu(device, CPU, workload, {"a": a, "b": b}), expected)


def test_no_addition_is_fused_with_a_product_on_a_gpu() -> None:
    expression = "quantise(dequantise(a, 0.7, 4) + dequantise(b, 0.35, 9), 0.7, 7)"
    workload = elementwise(y=(64,), expression=expression, inputs=[("a", "int8"), ("b", "int8")], out_dtype="int8")
    (step,) = CUDA.kernel(workload, H200, default(CUDA, workload, H200)).steps
    text = _compile_to_ptx(step, "kernel", "sm_90")
    assert "mul.rn.f32" in text and not re.search("fma[^;]*0f3F333333", text)  # 0.7 is a factor of products alone


def test_verification_finds_a_wrong_kernel(device: CpuDevice) -> None:
    """The bound of float32's errors is not so wide that another function passes."""
    shape: dict[str, Any] = dict(y=(500,), dtype="float32", out_dtype="int8")
    right, wrong = elementwise(**shape, expression="quantise(a, 0.1, 0)"), elementwise(**shape, expression="a / 0.1 + 0.6")
    assert verdict(device, CPU, right, wrong) is not None


@pytest.mark.parametrize(
    "expression",
    ["silu(float32(a) * b)", "sigmoid(float32(a))", "c = exp(abs(float32(a))); b / c", "b * exp(-abs(float32(a)))"],
)
@pytest.mark.mostly_long(4)
def test_a_result_that_underflows_in_float32_on_the_way_may_be_0(device: CpuDevice, expression: str) -> None:
    """exp(-x) is infinite in float32 from x = -88.8 on, where x / (1 + exp(-x)) is -2e-37."""
    shape: dict[str, Any] = dict(y=(24, 32), dtype="float32")
    inputs = [("a", "int32"), *([("b", "float32", (1,))] if "b" in expression else [])]
    right = elementwise(**shape, expression=expression, inputs=inputs)
    assert verdict(device, CPU, right) is None
    wrong = elementwise(
        **shape,
        expression=f"r = ({expression}); r + r * 1e-5" if "=" not in expression else f"{expression} + 1e-5 / c",
        inputs=inputs,
    )
    assert verdict(device, CPU, right, wrong) is not None


def test_a_nan_stays(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {"a": np.array([np.nan, 0.5], np.float32)}
    for expression in ("relu(a)", "max(a, 1)", "min(1, a)", "clip(a, 0, 6)", "hard_swish(a)"):
        workload = elementwise(y=(2,), expression=expression, dtype="float32")
        config = default(CUDA, workload, H200)
        found = emulated(monkeypatch, CUDA, workload, arrays, config, cuda_template, float32_functions)
        assert np.isnan(found).tolist() == [True, False], expression
    workload = elementwise(y=(2,), expression="clip(a, 0, 6)", dtype="float32")
    assert np.isnan(on_cpu(device, CPU, workload, arrays)).tolist() == [True, False]


class TestCpuContract(TemplateContract):
    template, target, compiled = CPU, detect("cpu"), 1
    accepted = (every(EVERY[0]), every(EVERY[9]))


class TestCudaContract(TemplateContract):
    template, target, compiled = CUDA, H200, 1
    accepted = (
        elementwise(y=(32, 56, 56, 256), expression="relu(a + b)"),
        every(EVERY[10]),
        elementwise(y=(7, 3), expression="-a"),
    )


def test_defaults_access_16_bytes() -> None:
    for changes, vector in ((EVERY[0], 8), (EVERY[1], 4), (EVERY[7], 4), (EVERY[10], 8)):
        assert default(CUDA, every(changes), H200)["vector"] == vector, changes
    large = elementwise(y=(32, 56, 56, 256), expression="relu(a + b)")
    source = CUDA.kernel(large, H200, default(CUDA, large, H200))
    assert dict(source.alignments) == {"a": 16, "b": 16, "y": 16}


@pytest.mark.gpu
def test_kernels_on_the_device(gpu: Any) -> None:
    """A GPU's functions are less exact than NumPy's, and terms that cancel show it: b ** -2 may be large."""
    for changes in EVERY:
        workload = every(changes)
        arrays, expected = example(workload)
        errors = 0.0 if workload.out_dtype in ("int8", "uint8") else errors_of_float32(workload, arrays)
        assert_close(workload, on_cpu(gpu, CUDA, workload, arrays), expected, errors)


# ---- ONNX

pytest.importorskip("onnx", reason="needs onnx")
SAME = {"Add": "a + b", "Sub": "a - b", "Mul": "a * b", "Div": "a / b", "Min": "min(a, b)", "Max": "max(a, b)"}
ONE = ("relu", "sigmoid", "tanh", "erf", "exp", "log", "sqrt", "abs", "round")
MODULES = (*map(str.lower, SAME), *ONE, "neg", "leakyrelu", "hardsigmoid", "hardswish", "gelu", "clip", "pow", "reciprocal")


def expression_of(case: Any, inputs: list[Any]) -> str | None:
    """The case's only node as an expression; None if it has none."""
    (node,) = case.model.graph.node
    given = attributes(node)
    op = node.op_type
    if op in SAME:
        return SAME[op] if len(inputs) == 2 else None
    if op.lower() in ONE:
        return f"{op.lower()}(a)"
    if op == "Clip":
        return f"clip(a, {float(inputs[1])}, {float(inputs[2])})" if len(inputs) == 3 and inputs[1].size else None
    if op == "Gelu":
        return "gelu(a)" if given.get("approximate", "none") == "none" else None
    return {
        "Neg": "-a",
        "Reciprocal": "1 / a",
        "LeakyRelu": f"leaky_relu(a, {given.get('alpha', 0.01)})",
        "HardSigmoid": f"hard_sigmoid(a, {given.get('alpha', 0.2)}, {given.get('beta', 0.5)})",
        "HardSwish": "hard_swish(a)",
    }.get(op)


def test_cases_of_onnx() -> None:
    seen = set()
    for case in node_cases(*MODULES).values():
        if len(case.model.graph.node) != 1 or len(case.data_sets) != 1:
            continue
        inputs, (y,) = arrays_of(case)
        expression = expression_of(case, inputs)
        if expression is None or any(each.dtype != np.float32 or not each.ndim for each in (inputs[0], y)):
            continue
        names = parse_expression(expression).inputs
        arrays = dict(zip(("a", "b"), inputs))
        taken = [(name, "float32", arrays[name].shape or (1,)) for name in names]
        workload = elementwise(y=y.shape, expression=expression, inputs=taken, dtype="float32")
        values = {name: arrays[name].reshape(shape) for name, _, shape in taken}
        found = load_reference("elementwise").points(workload, values, {}, np.arange(y.size), "y")
        np.testing.assert_allclose(found.reshape(y.shape), y, rtol=2e-6, atol=1e-6, err_msg=case.name)
        seen.add(case.model.graph.node[0].op_type)
    assert seen >= {*SAME, "Relu", "Sigmoid", "Gelu", "LeakyRelu", "HardSigmoid", "HardSwish", "Clip", "Round", "Reciprocal"}
