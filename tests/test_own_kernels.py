"""`schedsearch.tunable`: from a decorated function to records, calls and deployment, on the CPU and compiled for the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import cuda
from own_kernels_examples import NAMES, example
from own_kernels_support import FACTOR, declared

import schedsearch
from schedsearch.backend import compile_source
from schedsearch.backend.base import CompileError
from schedsearch.backend.code_identity import code_digest
from schedsearch.device.detect import detect
from schedsearch.errors import ArgumentError, PlanError, UsageError, WorkloadError
from schedsearch.launch import Grid, LaunchPlan, Literal, NumbaArray, Number, Pointer, Scalar, Step
from schedsearch.ops.own_kernel import Argument, arguments_of, contiguous, parameters_of
from schedsearch.target import PRESETS
from schedsearch.template import load_template
from schedsearch.templates.own_kernel.rules import predicate
from schedsearch.workload import Workload, distance

ROOT = Path(__file__).resolve().parents[1]


# ---- identity


def digest_of(source: str, name: str = "kernel", **names: Any) -> str:
    scope = dict(names)
    exec(source, scope)
    return code_digest([scope[name]])


def test_comments_docstrings_and_names_of_locals_do_not_change_the_identity() -> None:
    plain = digest_of("def kernel(x):\n    a = x[0]\n    x[1] = a + 1")
    assert digest_of("\n\ndef kernel(x):\n    'A docstring.'\n    b = x[0]  # a comment\n    x[1] = b + 1") == plain


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def kernel(x):\n    a = x[0]\n    x[1] = a + 2", {}),
        ("def kernel(x):\n    a = x[0]\n    x[1] = a - 1", {}),
        ("def kernel(x):\n    a = x[0]\n    x[1] = a + N", {"N": 1}),
        ("def kernel(x):\n    a = x[0]\n    x[1] = a + N", {"N": 2}),
        ("def kernel(x):\n    a = x[0]\n    x[1] = a + N", {"N": 1.0}),
        ("def inner(a):\n    return a + 1\ndef kernel(x):\n    a = x[0]\n    x[1] = inner(a)", {}),
        ("def inner(a):\n    return a + 3\ndef kernel(x):\n    a = x[0]\n    x[1] = inner(a)", {}),
        ("def make(n):\n    def kernel(x):\n        x[1] = x[0] + n\n    return kernel\nkernel = make(1)", {}),
        ("def make(n):\n    def kernel(x):\n        x[1] = x[0] + n\n    return kernel\nkernel = make(2)", {}),
    ],
)
def test_every_edit_and_every_captured_value_changes_the_identity(source: str, names: dict[str, Any]) -> None:
    others = [digest_of("def kernel(x):\n    a = x[0]\n    x[1] = a + 1")]
    others += [
        digest_of("def kernel(x):\n    a = x[0]\n    x[1] = a + N", N=value)
        for value in (1, 2, 1.0)
        if names != {"N": value}
    ]
    assert digest_of(source, **names) not in others


def test_two_kernels_that_capture_other_numbers_are_two_workloads() -> None:
    def made(n: int) -> Any:
        def plus(x, y, *, per):  # type: ignore[no-untyped-def]
            i = cuda.grid(1)
            if i < x.size * per:
                y[i] = x[i] + n

        return declared(plus, knobs={"threads": (64,), "per": (1,)})

    shapes = "8:float32", "8:float32"
    assert made(1).workload(*shapes) == made(1).workload(*shapes)
    assert made(1).workload(*shapes) != made(2).workload(*shapes)


def test_the_launch_and_the_reference_belong_to_the_identity() -> None:
    codes = [
        declared().definition.code,
        declared(grid=lambda x, k: -(-x.size // (k.threads * k.per)) + 1).definition.code,
        declared(block=64, knobs={"per": (1, 2)}, grid=lambda x, k: x.size).definition.code,
        declared(block=128, knobs={"per": (1, 2)}, grid=lambda x, k: x.size).definition.code,
        declared(reference=lambda x: 3 * x).definition.code,
        declared(shared=1024).definition.code,
        declared(max_registers=32).definition.code,
    ]
    assert len(set(codes)) == len(codes)
    assert declared().definition.code == codes[0]


# ---- workloads


def test_a_workload_describes_the_call() -> None:
    a = Argument("a", "float32", "in", (4, 6), (1, 4))  # transposed
    n = Argument("n", "int32", "fixed", value=-7)
    c = Argument("c", "float64", "inout", (5,), (1,))
    params = parameters_of("f", "0" * 16, [a, n, c], "default")
    workload = Workload.from_json(Workload("own_kernel", params).json)
    assert arguments_of(workload.params) == (a, n, c)
    assert [(spec.name, spec.shape) for spec in workload.signature] == [("a", (6, 4)), ("c", (5,))]
    assert [(spec.name, spec.shape) for spec in workload.outputs] == [("c_after", (5,))]
    assert workload.label == "f a=4x6:f32s n=-7 c=5:f64"


def test_workloads_of_near_shapes_are_near() -> None:
    kernel = declared()
    sizes = [kernel.workload(f"{n}:float32", f"{n}:float32") for n in (1000, 2000, 64000)]
    assert distance(sizes[0], sizes[1]) < distance(sizes[0], sizes[2])


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"arguments": ("x:float32:in",)}, "sizes"),
        ({"arguments": ("x:float32:in", "y:floa32:out")}, "dtype"),
        ({"arguments": ("x:float32:in", "y:float32")}, "name:dtype:role"),
        ({"arguments": ("x:float32:in", "y:float32:in")}, "output"),
        ({"strides": ((1,), (2,))}, "gaps"),
        ({"sizes": ((8,), (0,))}, "shape"),
    ],
)
def test_impossible_workloads_are_refused(changes: dict[str, Any], word: str) -> None:
    shape = (8,)
    arguments = [Argument("x", "float32", "in", shape, contiguous(shape)), Argument("y", "float32", "out", shape, (1,))]
    params = parameters_of("f", "0" * 16, arguments, "default")
    with pytest.raises(WorkloadError, match=word):
        Workload("own_kernel", {**params, **changes})


# ---- launch plans


def test_a_numba_array_is_data_and_keeps_its_form() -> None:
    array = NumbaArray("x", "float32", (3, 5), (20, 4))
    assert array.words == (0, 0, 15, 4, None, 3, 5, 20, 4)
    layouts = {(20, 4): "C", (4, 12): "F", (40, 4): "A"}
    assert {strides: NumbaArray("x", "float32", (3, 5), strides).layout for strides in layouts} == layouts
    params = (array, Number(True, "bool"), Literal(3), Scalar("a", dtype="float64"), Scalar("b"))
    step = Step("kernel_0", params, Grid(6, shape=(3, 2, 1)), 64, block_shape=(8, 8, 1))
    plan = LaunchPlan("cuda", "sm_90", (step,))
    assert LaunchPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"grid": Grid(6, shape=(3, 3, 1))}, "product"),
        ({"grid": Grid(70000, shape=(1, 70000, 1))}, "65535"),
        ({"block_shape": (4, 4, 4)}, "block_shape"),
        ({"params": (NumbaArray("x", "float32", (3,), (3,)),)}, "multiples of 4"),
        ({"params": (Number(300, "uint8"),)}, "255"),
        ({"params": (Pointer("x"),), "restores": True}, "two buffers"),
    ],
)
def test_plans_that_cannot_be_launched_are_refused(change: dict[str, Any], word: str) -> None:
    step = Step(**{"entry": "kernel_0", "params": (), "grid": Grid(6), "block_threads": 32, **change})
    with pytest.raises(PlanError, match=word):
        LaunchPlan("cuda", "sm_90", (step,)).check()


def test_an_array_that_reaches_beyond_its_buffer_is_refused() -> None:
    workload = declared().workload("8:float32", "8:float32")
    step = Step("kernel_0", (NumbaArray("x", "float32", (9,), (4,)),), Grid(1), 32)
    with pytest.raises(PlanError, match="an array that reaches 36 bytes into x, which has 32"):
        LaunchPlan("cuda", "sm_90", (step,)).check(workload)


# ---- rules


def test_rules_hold_for_columns_as_for_numbers() -> None:
    rng = np.random.default_rng(0)
    columns = {"a": rng.integers(1, 9, 50), "b": rng.integers(1, 9, 50)}
    for rule in ("a * b <= 16", "1 < a < b or not b % 2", "max(a, b) == a and a != 3", "(a if a > b else b) > 4"):
        expected = [bool(eval(rule, {"a": int(a), "b": int(b)})) for a, b in zip(columns["a"], columns["b"])]
        assert predicate(rule, ("a", "b"))(columns).tolist() == expected


# ---- bad input


def writes_x(x, y, *, per):  # type: ignore[no-untyped-def]
    x[0] = per
    y[0] = x[0]


def has_no_such_knob(x, y):  # type: ignore[no-untyped-def]
    y[0] = x[0]


def ignores_its_knob(x, y, *, per):  # type: ignore[no-untyped-def]
    y[0] = x[0]


@pytest.mark.parametrize(
    ("function", "changes", "words"),
    [
        (None, {"knobs": {"threads": (64,), "perr": (1,)}}, ["per", "did you mean 'perr'"]),
        (has_no_such_knob, {"knobs": {"threads": (64,), "per": (1,)}, "grid": 1}, ["'per'", "neither"]),
        (ignores_its_knob, {"knobs": {"threads": (64,), "per": (1,)}, "grid": 1}, ["'per'", "not used"]),
        (None, {"rules": ["thread <= 64"]}, ["'thread'", "did you mean 'threads'"]),
        (None, {"rules": ["threads <="]}, ["not an expression"]),
        (None, {"rules": ["threads > 64"]}, ["the rule: threads > 64 (got threads=64)", "default={", "'threads': 128"]),
        (None, {"rules": ["threads > 500"]}, ["no values of the knobs keep all rules; change them"]),
        (None, {"outputs": ["z"]}, ["no argument 'z'"]),
        (None, {"outputs": []}, ["names no outputs"]),
        (writes_x, {}, ["writes x", "inplace="]),
        (None, {"grid": lambda xx, k: 1}, ["grid takes 'xx'"]),
        (None, {"default": {"threads": 96}}, ["96", "64, 128"]),
        (None, {"knobs": {}}, ["has no knobs"]),
        (None, {"knobs": {"threads": 64, "per": (1,)}}, ["knobs is a mapping of lists", "write knobs="]),
        (None, {"knobs": ["threads", "per"]}, ["knobs is a mapping of lists"]),
        (None, {"rules": [lambda k: k.threads <= 64]}, ["a rule is a string", "function"]),
        (lambda x, y, *args: None, {}, ["*args"]),
        (None, {"reference": "numpy"}, ["reference is a str", "function"]),
        (None, {"inputs": {"x": (1, 0)}}, ["inputs of x is (1, 0)", "lowest"]),
        (None, {"inputs": {"x": 1}}, ["inputs of x is 1"]),
    ],
)
def test_the_decorator_says_what_is_wrong(function: Any, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        declared(function, **changes)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grid": lambda x: 0}, ["grid", "0 along x"]),
        ({"grid": lambda x: 2**31}, ["2147483648", "2147483647"]),
        ({"grid": lambda x: (1, 70000)}, ["along y", "65535", "fold"]),
        ({"grid": lambda x: x.rank}, ["grid raised AttributeError"]),
        ({"block": lambda k: 2048}, ["2048", "1024"]),
        ({"block": lambda k: (64, 64)}, ["4096 threads"]),
    ],
)
def test_a_launch_that_is_impossible_is_refused_before_a_trial(changes: dict[str, Any], words: list[str]) -> None:
    kernel = declared(**changes)
    with pytest.raises(UsageError) as caught:
        kernel.tune("64:float32", "64:float32", target="cpu", trials=1, db="unused.db")
    assert [word for word in words if word not in str(caught.value)] == []


def test_arguments_that_a_kernel_cannot_take_are_refused(tmp_path: Path) -> None:
    kernel = declared(db=tmp_path / "own.db")
    x = np.zeros(64, np.float32)
    readonly = np.zeros(64, np.float32)
    readonly.flags.writeable = False
    for args, word in (
        ((x,), "takes 2 arguments"),
        ((x, x), "overlaps"),
        ((x, readonly), "read-only"),
        ((x, np.zeros(128, np.float32)[::2]), "no gaps"),
        ((x[::-1], x.copy()), "below zero"),
        ((x.astype(complex), x), "complex128"),
        (((1, 2), x), "tuple"),
        ((np.zeros(4, [("a", np.float32)]), x), "record array"),
        ((np.zeros(0, np.float32), x), "shape"),
    ):
        with pytest.raises((ArgumentError, UsageError), match=word):
            kernel(*args)


def test_a_kernel_of_blocks_is_refused_on_a_cpu() -> None:
    module = example("matmul")
    with pytest.raises(schedsearch.UnsupportedError, match=r"cuda\.(shared|syncthreads|threadIdx).*tune it on a GPU"):
        module.matmul.tune(*module.SHAPES, target="cpu", trials=1, db="unused.db")


def test_arrays_of_the_host_are_refused_by_a_kernel_with_shared_memory(tmp_path: Path) -> None:
    def reversed_blocks(x, y, *, threads):  # type: ignore[no-untyped-def]
        shared = cuda.shared.array(threads, np.float32)
        i = cuda.grid(1)
        shared[cuda.threadIdx.x] = x[i]
        cuda.syncthreads()
        y[i] = shared[threads - 1 - cuda.threadIdx.x]

    kernel = declared(reversed_blocks, knobs={"threads": (64,)}, grid=lambda x, k: x.size // k.threads, db=tmp_path / "a.db")
    x = np.zeros(64, np.float32)
    with pytest.raises(
        schedsearch.SchedsearchError, match=r"reversed_blocks uses cuda\.shared;.* call it with arrays there"
    ):
        kernel(x, np.empty_like(x))


def test_a_lambda_may_be_the_kernel(tmp_path: Path) -> None:
    def store(x, y, i):  # type: ignore[no-untyped-def]
        if i < x.size:
            y[i] = FACTOR * x[i]

    kernel = declared(
        lambda x, y: store(x, y, cuda.grid(1)), knobs={"threads": (64, 128)}, grid=lambda x, k: -(-x.size // k.threads),
        db=tmp_path / "a.db",
    )  # fmt: skip
    x = np.arange(100, dtype=np.float32)
    y = np.empty_like(x)
    kernel(x, y)
    np.testing.assert_array_equal(y, FACTOR * x)


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint16", "int32", "uint32", "int64"])
@pytest.mark.mostly_long(3)
def test_arrays_of_integers(dtype: str, tmp_path: Path) -> None:
    def halve(x, y):  # type: ignore[no-untyped-def]
        i = cuda.grid(1)
        if i < x.size:
            y[i] = x[i] // 2

    kernel = declared(
        halve, knobs={"threads": (64,)}, grid=lambda x, k: -(-x.size // k.threads), reference=lambda x: x // 2,
        db=tmp_path / "a.db",
    )  # fmt: skip
    limits = np.iinfo(dtype)
    x = np.linspace(max(limits.min, -(2**52)), min(limits.max, 2**52), 1000).astype(dtype)
    y = np.empty_like(x)
    kernel(x, y)
    np.testing.assert_array_equal(y, x // 2)
    workload, template, target = kernel.workload(x, y), load_template("own_kernel_cuda"), PRESETS["h200"]
    built = compile_source(template.kernel(workload, target, schedsearch.Config(threads=64)), target)
    built.artifact.plan.check(workload)


# ---- compiled for the GPU


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.mostly_long(3)
def test_every_example_compiles_for_a_gpu(name: str) -> None:
    module, target = example(name), PRESETS["h200"]
    workload, template = getattr(module, name).workload(*module.SHAPES), load_template("own_kernel_cuda")
    assert template.validate(workload, target) is None
    config = template.default(workload, target, template.space(workload, target))
    built = compile_source(template.kernel(workload, target, config), target)
    built.artifact.plan.check(workload)
    assert built.resources.spill_bytes == 0


@pytest.mark.parametrize("name", NAMES)
def test_an_example_needs_at_most_15_lines_beyond_the_kernel(name: str) -> None:
    lines = (ROOT / "examples" / "own_kernel" / f"{name}.py").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("@schedsearch.tunable"))
    stop = next(number for number, line in enumerate(lines[start:]) if line.startswith("def "))
    assert stop <= 15


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_a_kernel_that_numba_cannot_type_gets_its_message_once(kind: str) -> None:
    def untyped(x, y):  # type: ignore[no-untyped-def]
        y[cuda.grid(1)] = x.nothing

    kernel = declared(untyped, knobs={"threads": (64,)}, grid=1)
    workload, template = kernel.workload("64:float32", "64:float32"), load_template(f"own_kernel_{kind}")
    target = PRESETS["h200"] if kind == "cuda" else detect("cpu")
    with pytest.raises(CompileError) as caught:
        compile_source(template.kernel(workload, target, schedsearch.Config(threads=64)), target)
    text = str(caught.value)
    assert text.count("Unknown attribute 'nothing' of type array(float32, 1d, C)") == 1
    assert text.count(f"line {untyped.__code__.co_firstlineno + 1}") == 1


def test_knobs_are_constants_of_the_code() -> None:
    """The product of the documentation sums a tile with 16 or 8 fused multiply-adds, as its knob says."""
    from schedsearch.backend.cuda import _compile_to_ptx

    module, target = example("matmul"), PRESETS["h200"]
    workload, template = module.matmul.workload(*module.SHAPES), load_template("own_kernel_cuda")
    for tile in (8, 16):
        config = schedsearch.Config({**module.matmul.definition.default, "tile": tile, "unroll": False})
        (step,) = template.kernel(workload, target, config).steps
        assert _compile_to_ptx(step, "kernel_0", "sm_90").count("fma.rn.f32") == tile
