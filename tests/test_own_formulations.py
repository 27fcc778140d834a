"""Tunables of several kernels in a row, of several formulations, and with every way to launch a kernel."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import cuda, float32
from own_kernels_emulated import outputs
from own_kernels_examples import example

import schedsearch
from schedsearch import folded, unfolded
from schedsearch.backend import compile_source
from schedsearch.backend.base import CompileError
from schedsearch.backend.cuda import ptx_of
from schedsearch.backend.relaunch import relaunched
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.errors import UsageError
from schedsearch.ops.own_kernel import arguments_of
from schedsearch.target import PRESETS
from schedsearch.template import KernelSource, load_template
from schedsearch.verification.verify import verify_once
from schedsearch.workload import Workload, distance

SHAPES = ("1000:float32", "1000:float32")


def twice(x, y, *, per):  # type: ignore[no-untyped-def]
    first = cuda.grid(1) * per
    for j in range(per):
        if first + j < x.size:
            y[first + j] = 2 * x[first + j]


def declared(function: Any = twice, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "knobs": {"threads": (64, 128), "per": (1, 2)},
        "block": lambda k: k.threads,
        "grid": lambda x, k: -(-x.size // (k.threads * k.per)),
        "outputs": ["y"],
        "reference": lambda x: 2 * x,
    }
    return schedsearch.tunable(**{**given, **changes})(function)


def source_of(kernel: Any, shapes: tuple[Any, ...] = SHAPES, target: Any = PRESETS["h200"], **config: Any) -> KernelSource:
    workload, template = kernel.workload(*shapes), load_template(f"own_kernel_{target.kind}")
    assert template.validate(workload, target) is None
    space = template.space(workload, target)
    chosen = schedsearch.Config({**kernel.definition.default, **config})
    space.require(chosen)
    return template.kernel(workload, target, chosen)


def legal(kernel: Any, shapes: tuple[Any, ...] = SHAPES, target: Any = PRESETS["h200"]) -> list[dict[str, Any]]:
    workload, template = kernel.workload(*shapes), load_template(f"own_kernel_{target.kind}")
    space = template.space(workload, target)
    return [dict(config) for rows in space.walk() for config in space.configs(rows)]


def assert_right_on_a_cpu(workload: Workload, source: KernelSource) -> None:
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(contextlib.closing(open_device(detect("cpu"))))
        loaded = stack.enter_context(contextlib.closing(device.load(compile_source(source, device.target).artifact)))
        assert verify_once(device, workload, loaded) is None


# ---- several kernels in a row


def squares(x, scratch, *, per):  # type: ignore[no-untyped-def]
    first = cuda.grid(1) * per
    for j in range(per):
        if first + j < x.size:
            scratch[first + j] = x[first + j] * x[first + j]


def neighbours(scratch, y):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    if i < y.size:
        y[i] = scratch[i] + (scratch[i + 1] if i + 1 < y.size else float32(0))


def chain(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "knobs": {"threads": (64, 128), "per": (1, 4)},
        "before": [schedsearch.Launch(squares, grid=lambda x, k: -(-x.size // (64 * k.per)), block=64)],
        "workspaces": {"scratch": lambda x: (x.shape, "float32")},
        "grid": lambda scratch, k: -(-scratch.size // k.threads),
        "block": lambda k: k.threads,
        "outputs": ["y"],
        "reference": lambda x: x**2 + np.append(x[1:] ** 2, 0),
        "reduction": 2,
    }
    return schedsearch.tunable(**{**given, **changes})(neighbours)


def test_kernels_in_a_row_share_workspaces_that_callers_do_not_pass() -> None:
    kernel = chain()
    assert kernel.definition.parameters == ("x", "y")
    source = source_of(kernel, per=4)
    assert [step.grid.work_items for step in source.steps] == [4, 16]
    assert source.workspaces == {"scratch": 4000}
    compile_source(source, PRESETS["h200"]).artifact.plan.check(kernel.workload(*SHAPES))
    assert_right_on_a_cpu(kernel.workload(*SHAPES), source_of(kernel, target=detect("cpu"), per=4))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"before": [squares]}, ["before is a list of launches", "schedsearch.Launch"]),
        ({"workspaces": {"scratsh": ((8,), "float32")}}, ["workspace 'scratsh'", "did you mean 'scratch'"]),
        ({"workspaces": {}}, ["squares writes scratch", "workspaces="]),
        ({"before": [schedsearch.Launch(squares, grid=lambda z: 1, block=64)]}, ["grid takes 'z'"]),
        ({"knobs": {"threads": (64,)}}, ["squares", "'per'", "not a knob"]),
    ],
)
def test_a_wrong_chain_is_refused_by_the_decorator(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        chain(**changes)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("given", [5, ((0,), "float32"), ((8,), "flaot32"), (("a",), "float32")])
def test_a_workspace_that_is_not_an_array_is_refused_before_a_trial(given: Any) -> None:
    kernel = chain(workspaces={"scratch": lambda x: given})
    with pytest.raises(schedsearch.UnsupportedError, match=r"(workspace scratch|dtype 'flaot32')"):
        kernel.tune(*SHAPES, target="cpu", trials=1, db="unused.db")


# ---- several formulations


def with_an_alternative() -> Any:
    kernel = declared()

    @kernel.alternative(knobs={"threads": (256, 64), "ahead": (1, 2)}, rules=["threads * ahead < 512"],
                        block=lambda k: k.threads, grid=lambda x, k: -(-x.size // k.threads))  # fmt: skip
    def by_steps(x, y, *, ahead):  # type: ignore[no-untyped-def]
        for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
            y[i] = (2 if ahead else 3) * x[i]

    return kernel


def test_formulations_compete_in_one_space_with_knobs_of_their_own() -> None:
    kernel = with_an_alternative()
    found = legal(kernel)
    # A knob that a formulation lacks keeps one value, so that no kernel is tried twice.
    expected = [{"formulation": "twice", "threads": t, "per": p, "ahead": 1} for t in (64, 128) for p in (1, 2)]
    expected += [{"formulation": "by_steps", "threads": t, "per": 1, "ahead": a} for t, a in ((64, 1), (64, 2), (256, 1))]
    assert sorted(found, key=str) == sorted((dict(sorted(each.items())) for each in expected), key=str)
    assert kernel.definition.default == {"formulation": "twice", "threads": 64, "per": 1, "ahead": 1}
    source = source_of(kernel, target=detect("cpu"), formulation="by_steps", threads=256)
    assert_right_on_a_cpu(kernel.workload(*SHAPES), source)


def test_an_alternative_belongs_to_the_identity() -> None:
    assert declared().definition.code != with_an_alternative().definition.code == with_an_alternative().definition.code


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("twice", {}, ["has a formulation 'twice' already"]),
        ("other", {"knobs": {"formulation": (1, 2)}, "grid": lambda k: k.formulation}, ["'formulation'", "rename"]),
        ("fewer", {}, ["fewer takes y", "allowed: x, y"]),
    ],
)
def test_an_alternative_that_does_not_fit_is_refused(name: str, changes: dict[str, Any], words: list[str]) -> None:
    def other(x, y):  # type: ignore[no-untyped-def]
        y[0] = x[0]

    def fewer(y):  # type: ignore[no-untyped-def]
        y[0] = 1

    kernel, functions = declared(), {"twice": twice, "other": other, "fewer": fewer}
    given = {"knobs": {"threads": (64,), **({"per": (1,)} if name == "twice" else {})}, "grid": 1} | changes
    with pytest.raises(UsageError) as caught:
        kernel.alternative(**{"block": lambda k: k.threads if "threads" in vars(k) else 64, **given})(functions[name])
    assert [word for word in words if word not in str(caught.value)] == []


def test_an_alternative_for_gpus_only_leaves_the_rest_for_a_cpu() -> None:
    kernel = declared()

    @kernel.alternative(knobs={"size": (32, 64)}, block=lambda k: k.size, grid=lambda x, k: -(-x.size // k.size))
    def through_shared_memory(x, y, *, size):  # type: ignore[no-untyped-def]
        tile = cuda.shared.array(size, float32)
        tile[cuda.threadIdx.x] = x[cuda.grid(1)]
        y[cuda.grid(1)] = 2 * tile[cuda.threadIdx.x]

    assert {config["formulation"] for config in legal(kernel, target=detect("cpu"))} == {"twice"}
    assert {config["formulation"] for config in legal(kernel)} == {"twice", "through_shared_memory"}


# ---- ways to launch


def directives(**changes: Any) -> tuple[KernelSource, str]:
    source = source_of(declared(**changes))
    (ptx,) = ptx_of(source, PRESETS["h200"])
    return source, ptx


def test_registers_launch_bounds_clusters_and_fastmath_reach_the_machine_code() -> None:
    def root(x, y, *, per):  # type: ignore[no-untyped-def]
        i = cuda.grid(1)
        if i < x.size * per:
            y[i] = x[i] / (x[i] + float32(3))

    given = {"function": root, "grid": lambda x, k: -(-x.size // k.threads)}
    plain = directives(**given)[1]
    assert "div.rn.f32" in plain and ".maxntid 64" in plain
    assert "div.approx.ftz.f32" in directives(**given, fastmath=True)[1]
    assert ".maxnreg 40" in directives(**given, max_registers=40)[1]
    assert ".minnctapersm 4" in directives(**given, min_blocks_per_sm=lambda k: 4)[1]
    source, ptx = directives(**{**given, "grid": 16, "cluster": 4})
    assert source.steps[0].cluster == 4 and ".reqnctapercluster 4" in ptx


def test_a_persistent_grid_has_as_many_blocks_as_the_card_at_hand() -> None:
    source = source_of(declared(blocks_per_sm=lambda k: 2, grid=lambda x: x.size))
    assert [source.steps[0].grid.blocks(sms) for sms in (132, 108, 1000)] == [264, 216, 1000]


def test_dynamic_shared_memory_is_an_array_of_length_zero() -> None:
    def reversed_blocks(x, y):  # type: ignore[no-untyped-def]
        tile = cuda.shared.array(0, float32)
        tile[cuda.threadIdx.x] = x[cuda.grid(1)]
        cuda.syncthreads()
        y[cuda.grid(1)] = tile[cuda.blockDim.x - 1 - cuda.threadIdx.x]

    kernel = declared(
        reversed_blocks, knobs={"threads": (64, 49152)}, block=64, grid=1, shared=lambda k: 4 * k.threads, reference=None
    )
    built = compile_source(source_of(kernel), PRESETS["h200"])
    assert built.artifact.plan.steps[0].dynamic_shared_bytes == built.resources.shared_bytes == 256
    assert legal(kernel, target=PRESETS["a100"]) == [{"threads": 64}]  # 192 KiB are too much
    assert len(legal(kernel)) == 2
    kernel = declared(reversed_blocks, knobs={"threads": (65536,)}, block=64, grid=1, shared=lambda k: 4 * k.threads)
    assert "262144 bytes; allowed: up to 232448" in str(
        load_template("own_kernel_cuda").validate(kernel.workload(*SHAPES), PRESETS["h200"])
    )


def test_static_shared_memory_over_the_limit_is_found_at_build() -> None:
    def greedy(x, y, *, size):  # type: ignore[no-untyped-def]
        tile = cuda.shared.array(size, float32)
        tile[cuda.threadIdx.x] = x[0]
        cuda.syncthreads()
        y[0] = tile[0]

    kernel = declared(greedy, knobs={"size": (65536,)}, block=64, grid=1)
    with pytest.raises(CompileError, match=r"uses too much shared data \(0x40000 bytes"):
        compile_source(source_of(kernel), PRESETS["h200"])


def test_texts_are_constants_of_the_code_on_both_kinds_of_device() -> None:
    def scaled(x, y, *, how):  # type: ignore[no-untyped-def]
        i = cuda.grid(1)
        if i < x.size:
            if how == "double":
                y[i] = x[i] + x[i]
            else:
                y[i] = x[i] * x[i]

    kernel = declared(scaled, knobs={"how": ("double", "square")}, block=64, grid=lambda x: -(-x.size // 64))
    texts = {how: ptx_of(source_of(kernel, how=how), PRESETS["h200"])[0] for how in ("double", "square")}
    assert "mul.f32" in texts["square"] and "mul.f32" not in texts["double"]
    compile_source(source_of(kernel), PRESETS["h200"]).artifact.plan.check(kernel.workload(*SHAPES))
    assert_right_on_a_cpu(kernel.workload(*SHAPES), source_of(kernel, target=detect("cpu")))


def test_a_grid_of_many_rows_is_folded_along_x() -> None:
    for x in range(3):
        for y in range(4):
            for z in range(2):
                assert unfolded(x + 3 * (y + 4 * z), 3, 4) == (x, y, z)

    def rows(x, y, *, threads):  # type: ignore[no-untyped-def]
        block, row, _ = unfolded(cuda.blockIdx.x, -(-x.shape[1] // threads), x.shape[0])
        column = block * threads + cuda.threadIdx.x
        if column < x.shape[1]:
            y[row, column] = 2 * x[row, column]

    grid = lambda x, k: (-(-x.shape[1] // k.threads), x.shape[0])  # noqa: E731
    tall = ("70000x100:float32", "70000x100:float32")
    kernel = declared(rows, knobs={"threads": (64,)}, grid=grid)
    with pytest.raises(schedsearch.UnsupportedError, match=r"grid of rows is 70000 along y; .* schedsearch\.folded"):
        kernel.tune(*tall, target="cpu", trials=1, db="unused.db")
    kernel = declared(rows, knobs={"threads": (64,)}, grid=lambda x, k: folded(*grid(x, k)))
    source = source_of(kernel, tall)
    assert source.steps[0].grid.work_items == 140000
    compile_source(source, PRESETS["h200"])


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"cluster": 3, "grid": 16}, "multiples of the cluster, 3"),
        ({"cluster": 2, "grid": (16, 2)}, "x only"),
        ({"cluster": 17, "grid": 17}, "from 1 to 16"),
        ({"blocks_per_sm": 2, "grid": (16, 2)}, "x only"),
        ({"max_registers": 300}, "from 0 to 255"),
        ({"max_registers": 32, "min_blocks_per_sm": 2}, "one of them"),
        ({"fastmath": 1}, "True and False"),
        ({"shared": -4}, "number of bytes"),
        ({"grid": lambda k: k.treads}, "there is no knob 'treads' (did you mean 'threads'?); the knobs are threads, per"),
    ],
)
def test_a_launch_that_cannot_be_is_refused_before_a_trial(changes: dict[str, Any], word: str) -> None:
    kernel = declared(**changes)
    with pytest.raises(UsageError) as caught:
        kernel.tune(*SHAPES, target="cpu", trials=1, db="unused.db")
    assert word in str(caught.value)


def test_clusters_are_refused_where_there_are_none() -> None:
    kernel = declared(cluster=2, grid=16)
    reason = load_template("own_kernel_cuda").validate(kernel.workload(*SHAPES), PRESETS["a100"])
    assert reason is not None and "need sm_90" in reason


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UsageError, match=r"no option 'max_register' \(did you mean 'max_registers'\?\)"):
        declared(max_register=32)
    with pytest.raises(
        UsageError, match=r"no option 'output' \(did you mean 'outputs'\?\); allowed: knobs, grid, .* fastmath$"
    ):
        declared(output=["y"])
    with pytest.raises(UsageError, match=r"inplace is a list of names, got the string 'y'; write inplace=\['y'\]"):
        declared(inplace="y")


def test_a_chain_is_tuned_called_and_deployed_on_a_cpu(tmp_path: Path) -> None:
    kernel = chain(db=tmp_path / "own.db")
    x = np.arange(1000, dtype=np.float32)
    y = np.empty_like(x)
    summary = kernel.tune(x, y, trials=1, workers=1)
    assert {str(outcome) for outcome in summary.tasks[0].outcomes} == {"ok"}
    kernel(x, y)
    expected = x**2 + np.append(x[1:] ** 2, 0)
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    schedsearch.own_kernel("neighbours", tmp_path / "own.db")(x, y)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


# ---- the formulations of the examples, thread by thread

EMULATED = [
    ("matmul", ("33x21:float32", "21x18:float32", "33x18:float32"),
     {"formulation": "in_registers", "height": 32, "width": 32, "depth": 8, "rows": 4, "columns": 4}),
    ("stencil", ("23x40:float32", "23x40:float32"), {"formulation": "stencil"}),
    ("stencil", ("23x40:float32", "23x40:float32"), {"formulation": "columns", "rows": 4, "height": 2}),
    ("softmax", ("3x100:float32", "3x100:float32"), {"formulation": "softmax", "threads": 32, "each": 2}),
    ("softmax", ("4x256:float32", "4x256:float32"),
     {"formulation": "whole_rows", "threads": 64, "each": 4, "rows": 2, "fast": False}),
    ("histogram", ("9011:uint8", "256:int32"),
     {"formulation": "by_words", "threads": 256, "copies": 2, "each": 4, "per_sm": 1}),
    ("total", ("3001:float32", "1:float32"), {"formulation": "total", "threads": 128, "each": 4, "last": 256}),
    ("total", ("3001:float32", "1:float32"), {"formulation": "by_atomics", "threads": 128, "each": 16}),
    ("convolution", ("37x40:float32", "15x15:float32", "23x26:float32"),
     {"formulation": "tiled", "width": 32, "height": 2, "each": 4}),
    ("pnpoly", ("2x300:float32", "2x9:float32", "300:int32"), {"threads": 64, "each": 2, "branch": False}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shapes", "choice"), EMULATED, ids=lambda each: each if isinstance(each, str) else "")
@pytest.mark.mostly_long(3)
def test_a_formulation_of_an_example_computes_what_its_reference_says(
    name: str, shapes: tuple[str, ...], choice: dict[str, Any]
) -> None:
    kernel = getattr(example(name), name)
    workload, rng = kernel.workload(*shapes), np.random.default_rng(0)
    arrays = {}
    for each in arguments_of(workload.params):
        if each.role != "out":
            numbers = rng.standard_normal(each.shape) if each.dtype == "float32" else rng.integers(0, 256, each.shape)
            arrays[each.name] = numbers.astype(each.dtype)
    config = kernel.definition.completed(kernel.definition.formulation({**kernel.definition.default, **choice}), choice)
    found = outputs(workload, kernel.definition, config, arrays, seed=1, sms=2)
    wide = [array.astype(float if array.dtype.kind == "f" else np.int64) for array in arrays.values()]
    truth = kernel.definition.reference(*wide)
    (result,) = found.values()
    if result.dtype.kind == "f":
        np.testing.assert_allclose(result, truth, rtol=1e-5, atol=1e-5 * np.abs(truth).max())
    else:
        np.testing.assert_array_equal(result, truth)


# ---- sizes that change


def test_machine_code_is_launched_for_other_sizes() -> None:
    """What is launched is what a build for these sizes would be, and nothing else is served."""
    kernel, target = chain(), PRESETS["h200"]
    made_from, source = source_of(kernel, per=4), source_of(kernel, ("70001:float32", "70001:float32"), per=4)
    artifact = compile_source(made_from, target).artifact
    assert relaunched(artifact, made_from, source) == compile_source(source, target).artifact
    for other in (
        source_of(kernel, ("70001:float64", "70001:float64"), per=4),
        source_of(kernel, per=1),
        source_of(kernel, per=4, threads=128),
        source_of(chain(max_registers=40), per=4),
    ):
        assert relaunched(artifact, made_from, other) is None


@pytest.mark.long
def test_a_call_with_other_sizes_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.arange(1000, dtype=np.float32)
    declared(db=tmp_path / "own.db").tune([(x, x.copy()), (x[:8], x[:8].copy())], trials=1, workers=1)
    monkeypatch.setattr("schedsearch.backend.cpu.compile_cpu", None)
    x = np.arange(77777, dtype=np.float32)
    for verify, verified in (("each size", True), ("once", False)):
        kernel, y = declared(db=tmp_path / "own.db", verify=verify), np.empty_like(x)
        kernel(x, y)
        np.testing.assert_array_equal(y, 2 * x)
        served = kernel.bind(x, y).kernel
        assert (served.level, served.verified) == ("nearest", verified)
        assert "machine code of twice x=1000:f32" in served.provenance.why[-1]


def test_kernels_of_other_names_lend_no_configuration() -> None:
    one, other = declared().workload(*SHAPES), chain().workload(*SHAPES)
    assert distance(one, other) == math.inf
    assert distance(one, declared(reference=None).workload(*SHAPES)) < 10


def test_an_unknown_way_to_verify_is_refused() -> None:
    with pytest.raises(UsageError, match="verify is 'never'; allowed: each size, once"):
        declared(verify="never")
