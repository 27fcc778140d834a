"""Launch plans as data: grids within CUDA's limits, lossless JSON, identity of artifacts, consistent measurements."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedsearch.errors import PlanError
from schedsearch.launch import (
    MAX_GRID_X,
    Artifact,
    Float32,
    Grid,
    Int32,
    Int64,
    LaunchPlan,
    Pointer,
    Scalar,
    Step,
    TensorMap,
)
from schedsearch.measurement import Measurement, Outcome, Resources
from schedsearch.workload import Workload

BIAS = Pointer("bias", optional=True)
PLAN = LaunchPlan(
    "cuda",
    "sm_90a",
    (
        Step(
            "kernel_0",
            (
                Pointer("x"), Int32(-3), Int64(2**40), Float32(0.1), Scalar("clip_min"),
                TensorMap("x", "float16", (8, 4, 4, 1), (16, 64, 256), (1, 1, 1, 1), lower=(-1, -1), upper=(-1, -1),
                          channels_per_pixel=8, pixels_per_column=64, swizzle_bytes=128),
                TensorMap("y", "float16", (8, 16), (16,), (1, 1), box=(8, 16)),
            ),
            Grid(1000, blocks_per_sm=2),
            256,
            dynamic_shared_bytes=100_000,
            cluster=2,
        ),
        Step("kernel_1", (Pointer("weight"), BIAS, Pointer("repacked")), Grid(1), 32, constant=True),
    ),
    workspaces={"partial": 4096, "repacked": 64},
    alignments={"x": 16},
)  # fmt: skip


def test_a_plan_survives_json() -> None:
    assert LaunchPlan.from_json(PLAN.to_json()) == PLAN
    assert LaunchPlan.from_json(PLAN.to_json()).to_json() == PLAN.to_json()
    maps = [param for param in PLAN.steps[0].params if isinstance(param, TensorMap)]
    assert [tensor_map.is_im2col for tensor_map in maps] == [True, False]


def test_a_plan_knows_the_buffers_of_its_constant_steps() -> None:
    assert PLAN.constants == ("weight", "bias")
    assert PLAN.constant_workspaces == {"repacked": 64}
    plain = LaunchPlan("cpu", "native", (Step("k", (Pointer("weight"),), Grid(1), 2),))
    assert (plain.constants, plain.constant_workspaces) == ((), {})


def test_a_plan_that_was_stored_by_an_earlier_version_is_read() -> None:
    """Old plans mark steps that read only the weight as `weight_only`. Still older plans have two more fields, which are
    always empty (tests/data/schema_v1.sql)."""
    text = (
        '{"arch":"znver3","kind":"cpu","prepared":{},"steps":[{"block_threads":2,"entry":"step0_pack","grid":{"blocks_per_sm":0,'
        '"work_items":3},"params":[{"buffer":"weight","kind":"pointer"},{"buffer":"packed","kind":"pointer"}],'
        '"weight_only":true},{"block_threads":2,"entry":"step1_multiply","grid":{"blocks_per_sm":0,"work_items":8},'
        '"params":[{"buffer":"packed","kind":"pointer"},{"kind":"i64","value":0}]}],"workspaces":{"packed":64},"zeroed":[]}'
    )
    assert LaunchPlan.from_json(text) == LaunchPlan(
        "cpu",
        "znver3",
        (
            Step("step0_pack", (Pointer("weight"), Pointer("packed")), Grid(3), 2, constant=True),
            Step("step1_multiply", (Pointer("packed"), Int64(0)), Grid(8), 2),
        ),
        workspaces={"packed": 64},
    )


def test_defaults_are_not_written() -> None:
    plan = LaunchPlan("cpu", "native", (Step("k", (Pointer("x"), Pointer("bias", optional=True)), Grid(1), 2),))
    assert plan.to_json() == (
        '{"arch":"native","kind":"cpu","steps":[{"block_threads":2,"entry":"k","grid":{"blocks_per_sm":0,"work_items":1},'
        '"params":[{"buffer":"x","kind":"pointer"},{"buffer":"bias","kind":"pointer","optional":true}]}]}'
    )


def test_an_artifact_is_its_code_and_its_plan() -> None:
    artifact = Artifact(b"code", PLAN)
    assert artifact.sha256 == Artifact(b"code", LaunchPlan.from_json(PLAN.to_json())).sha256
    assert (
        len({artifact.sha256, Artifact(b"cod", PLAN).sha256, Artifact(b"code", LaunchPlan("cuda", "sm_80", ())).sha256}) == 3
    )


@given(st.integers(1, 2**40), st.integers(0, 4), st.integers(1, 200), st.sampled_from((1, 2, 4)))
def test_a_grid_covers_the_work_within_the_limits(work_items: int, per_sm: int, sms: int, cluster: int) -> None:
    grid = Grid(work_items, per_sm)
    if per_sm == 0 and work_items > MAX_GRID_X:
        with pytest.raises(ValueError, match="not possible"):
            grid.blocks(sms, cluster)
        return
    blocks = grid.blocks(sms, cluster)
    assert blocks % cluster == 0 and 1 <= blocks <= MAX_GRID_X
    if per_sm == 0:
        assert work_items <= blocks < work_items + cluster
    else:
        assert blocks <= max(per_sm * sms, cluster)


def test_only_ok_measurements_have_times() -> None:
    ok = Measurement(Outcome.OK, times_ns=(10.0, 30.0, 20.0, 20.0), resources=Resources(registers=40), max_error=0.5)
    assert (ok.time_ns, ok.ok) == (20.0, True)
    failed = Measurement(Outcome.WRONG_ANSWER, message="3 elements differ")
    assert (failed.time_ns, failed.outcome.is_verified, failed.outcome.is_trial) == (None, True, True)
    assert not Outcome.REJECTED.is_trial and not Outcome.RUN_TIMEOUT.is_verified
    for wrong in (lambda: Measurement(Outcome.OK), lambda: Measurement(Outcome.LAUNCH_ERROR, times_ns=(1.0,))):
        with pytest.raises(ValueError, match="only ok has times"):
            wrong()


def test_spread_is_the_interquartile_range_over_the_median() -> None:
    times = tuple(float(t) for t in range(1, 101))
    assert Measurement(Outcome.OK, times_ns=times).spread == pytest.approx(50.5 / 50.5, rel=0.02)
    assert Measurement(Outcome.OK, times_ns=(5.0,)).spread == 0


# ---- plans from files: every mistake is found before anything is launched

GOOD = {
    "kind": "cuda",
    "arch": "sm_90a",
    "steps": [
        {
            "entry": "kernel_0",
            "params": [
                {"kind": "pointer", "buffer": "x"},
                {"kind": "i32", "value": 3},
                {"kind": "i64", "value": 3},
                {"kind": "f32", "value": 0.5},
                {"kind": "scalar", "name": "clip_min"},
                {"kind": "tensor_map", "buffer": "y", "dtype": "float16", "dims": [8, 16], "strides_bytes": [16],
                 "element_strides": [1, 1], "box": [8, 16]},
                {"kind": "tensor_map", "buffer": "x", "dtype": "float16", "dims": [8, 4, 4, 1],
                 "strides_bytes": [16, 64, 256], "element_strides": [1, 1, 1, 1], "lower": [-1, -1], "upper": [-1, -1],
                 "channels_per_pixel": 8, "pixels_per_column": 64, "swizzle_bytes": 128},
            ],
            "grid": {"work_items": 10, "blocks_per_sm": 0},
            "block_threads": 128,
        }
    ],
    "workspaces": {"partial": 4096},
    "alignments": {"x": 16},
}  # fmt: skip


def with_value(path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """A copy of GOOD in which one value is another."""
    data: Any = copy.deepcopy(GOOD)
    inside = data
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return data


STEP: tuple[str | int, ...] = ("steps", 0)
TILED, IM2COL = (*STEP, "params", 5), (*STEP, "params", 6)
NOT_A_COUNT: list[Any] = [-1, 2**63, 2**70, 10**200, True, 1.0, "1", None, [1], {}]
WRONG: list[tuple[tuple[str | int, ...], Any]] = [
    *((("kind",), value) for value in ("metal", "", None, 3, [])),
    *((("arch",), value) for value in ("90a", "sm_", "sm_90a; rm", "znver3", None, 90)),
    *((("steps",), value) for value in ([], {}, None, "x", [GOOD["steps"][0]] * 65)),
    *(((*STEP, "entry"), value) for value in ("", "0x", "a b", "../a", "a\0", "é", None, 3, "a" * 256)),
    *(((*STEP, "block_threads"), value) for value in (*NOT_A_COUNT, 0, 1025)),
    *(((*STEP, "dynamic_shared_bytes"), value) for value in (*NOT_A_COUNT, 232_449)),
    *(((*STEP, "cluster"), value) for value in (*NOT_A_COUNT, 0, 17)),
    *(((*STEP, "constant"), value) for value in (1, "true", None)),
    *(((*STEP, "grid", "work_items"), value) for value in (*NOT_A_COUNT, 0, 2**31)),
    *(((*STEP, "grid", "blocks_per_sm"), value) for value in (*NOT_A_COUNT, 33)),
    *(((*STEP, "grid"), value) for value in (None, 3, [], {})),
    *(((*STEP, "params"), value) for value in (None, {}, "x", [3], [{}], [{"kind": []}], [{"kind": "f64", "value": 1}])),
    ((*STEP, "params"), [{"kind": "i64", "value": 1}] * 4096),
    *(((*STEP, "params", 0, "buffer"), value) for value in ("", "a-b", None, 3, ["x"])),
    *(((*STEP, "params", 0, "optional"), value) for value in (1, None)),
    *(((*STEP, "params", 1, "value"), value) for value in (2**31, -(2**31) - 1, True, 1.0, "1", None)),
    *(((*STEP, "params", 2, "value"), value) for value in (2**63, -(2**63) - 1, True, 1.0, "1", None)),
    *(((*STEP, "params", 3, "value"), value) for value in (3.5e38, -3.5e38, 10**400, True, "1", None)),
    *(((*STEP, "params", 4, "name"), value) for value in ("", 3, None)),
    *(((*TILED, "dtype"), value) for value in ("float17", None, [])),
    *(((*TILED, "dims"), value) for value in ([], [8], [8, 0], [8, -1], [8, 2**32 + 1], [8, 1.0], 8, "88", [1] * 6)),
    *(((*TILED, "strides_bytes"), value) for value in ([], [8], [-16], [2**40], [16.0], [16, 16], None)),
    *(((*TILED, "element_strides"), value) for value in ([1], [0, 1], [9, 1], [1, True])),
    *(((*TILED, "box"), value) for value in ([8], [8, 0], [8, 257], [7, 16], [8, -1], 3)),
    *(((*TILED, "swizzle_bytes"), value) for value in (16, -32, True, "32", 256)),
    *(((*TILED, "l2_promotion_bytes"), value) for value in (32, -64, 512)),
    *(((*TILED, "pixels_per_column"), value) for value in (1, -1)),
    *(((*IM2COL, "lower"), value) for value in ([], [-1], [-129, 0], [0, 128], [0, 0.0])),
    *(((*IM2COL, "channels_per_pixel"), value) for value in (0, -8, 257, 7, 128)),
    *(((*IM2COL, "pixels_per_column"), value) for value in (0, -1, 1025)),
    *((("workspaces", "partial"), value) for value in (*NOT_A_COUNT, 0, 2**40 + 1)),
    *((("workspaces",), value) for value in (None, [], 3, {"a b": 1}, {f"w{number}": 1 for number in range(257)})),
    *((("alignments", "x"), value) for value in (*NOT_A_COUNT, 0, 3, 2**17)),
    *((("prepared",), value) for value in ({"x": 1}, [1])),
    (("grids",), 1),
    ((*STEP, "gird"), {}),
    ((*STEP, "params", 0, "offset"), 64),
    ((*STEP, "grid", "work_item"), 64),
]


def test_the_plan_that_the_mistakes_are_made_in_is_sound() -> None:
    assert LaunchPlan.from_json(json.dumps(GOOD)).steps[0].block_threads == 128


@pytest.mark.parametrize(("path", "value"), WRONG, ids=lambda value: repr(value)[:40])
def test_a_plan_with_one_wrong_value_is_refused(path: tuple[str | int, ...], value: Any) -> None:
    with pytest.raises(PlanError) as caught:
        LaunchPlan.from_json(json.dumps(with_value(path, value)))
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((*STEP, "block_threads"), 1025, "steps/0/block_threads: 1025 is not possible; allowed: 1 to 1024"),
        ((*STEP, "cluster"), "2", "steps/0/cluster: '2' is a str; allowed: int"),
        ((*STEP, "gird"), {}, "steps/0: there is a field 'gird' (did you mean 'grid'?), which this version does not know"),
        (
            (*STEP, "params", 0),
            {"kind": "f64"},
            "steps/0/params/0: it is of the kind 'f64'; allowed: pointer, i32, i64, f32,",
        ),
        ((*TILED, "box"), [7, 16], "steps/0/params/5: the box is 14 bytes wide; allowed: a multiple of 16"),
        (("arch",), "90a", "arch is '90a'; allowed: sm_80, sm_90a, sm_120f and the like"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_mistake_is_told_with_its_place_and_what_is_allowed(path: tuple[str | int, ...], value: Any, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        LaunchPlan.from_json(json.dumps(with_value(path, value)))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "null", '"x"', "[" * 2_000, "{}", '{"kind":"cuda"}', json.dumps(GOOD) + " " * (1 << 20),
     json.dumps(GOOD).replace("0.5", "NaN"), json.dumps(GOOD).replace("0.5", "-Infinity"),
     json.dumps(GOOD).replace('"arch"', '"kind": "cpu", "arch"'), "1" * 5000],
)  # fmt: skip
def test_a_text_that_is_not_a_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError):
        LaunchPlan.from_json(text)


def test_a_cpu_plan_has_no_tensor_map_shared_memory_or_cluster() -> None:
    step = {"entry": "k", "params": [], "grid": {"work_items": 5}, "block_threads": 2}
    cpu = {"kind": "cpu", "arch": "skylake-avx512", "steps": [step]}
    assert LaunchPlan.from_json(json.dumps(cpu)).arch == "skylake-avx512"
    tensor_map = GOOD["steps"][0]["params"][5]
    for wrong in ({"params": [tensor_map]}, {"dynamic_shared_bytes": 16}, {"cluster": 2}, {"entry": "a@b"}):
        with pytest.raises(PlanError):
            LaunchPlan.from_json(json.dumps({**cpu, "steps": [{**step, **wrong}]}))


CONV = Workload.conv2d(n=1, h=4, w=4, c=8, k=16, r=3, s=3, padding=1, dtype="float16")  # x has 256 bytes, y 512


def fitted(*params: Any, constant: bool = False, **fields: Any) -> LaunchPlan:
    return LaunchPlan("cuda", "sm_90a", (Step("k", params, Grid(1), 32, constant=constant),), **fields)


def x_map(**changes: Any) -> TensorMap:
    """All of x, as (channels, w, h)."""
    shape = {"dims": (8, 4, 4), "strides_bytes": (16, 64), "element_strides": (1, 1, 1), "box": (8, 4, 4)}
    return TensorMap(**{"buffer": "x", "dtype": "float16", **shape, **changes})


def test_a_plan_that_fits_its_workload_passes() -> None:
    fitted(
        x_map(), Pointer("weight"), Pointer("bias", optional=True), Pointer("scratch"), Pointer("y"),
        workspaces={"scratch": 64}, alignments={"x": 16, "bias": 4, "scratch": 16},
    ).check(CONV)  # fmt: skip
    fitted(Pointer("weight"), Pointer("scratch"), constant=True, workspaces={"scratch": 64}).check(CONV)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (fitted(x_map(dims=(8, 4, 5))), "reaches 320 bytes into x, which has 256"),
        (fitted(x_map(dtype="float32")), "reaches 272 bytes into x, which has 256"),
        (fitted(x_map(strides_bytes=(16, 80))), "reaches 304 bytes into x, which has 256"),
        (fitted(x_map(buffer="scratch"), workspaces={"scratch": 255}), "reaches 256 bytes into scratch, which has 255"),
        (fitted(Pointer("z")), "takes a buffer 'z'"),
        (fitted(Pointer("bias")), "takes a buffer 'bias'"),
        (fitted(x_map(buffer="z")), "takes a buffer 'z'"),
        (fitted(Scalar("beta")), "takes a scalar 'beta'"),
        (fitted(Pointer("x"), workspaces={"y": 64}), "the workspace 'y' has the name of an argument"),
        (fitted(Pointer("x"), alignments={"z": 16}), "'z', which is neither an argument nor a workspace"),
        (fitted(Pointer("x"), constant=True), "reads x, which may change between calls; allowed: weight"),
        (fitted(Pointer("weight"), Pointer("y"), constant=True), "reads y, which may change"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit_its_workload_is_refused(plan: LaunchPlan, message: str) -> None:
    with pytest.raises(PlanError, match=re.escape(message)):
        plan.check(CONV)


@given(st.data())
def test_a_mutated_plan_is_refused_or_is_a_plan(data: st.DataObject) -> None:
    """Whatever is read is written back as it was meant: no field is dropped, guessed or converted."""
    text = PLAN.to_json()
    begin = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(begin, min(begin + 12, len(text))))
    mutated = text[:begin] + data.draw(st.text('0123456789-.e{}[]",:truefalsnNI ', max_size=8)) + text[end:]
    try:
        plan = LaunchPlan.from_json(mutated)
    except PlanError:
        return
    assert LaunchPlan.from_json(plan.to_json()) == plan
    plan.steps[0].grid.blocks(132, plan.steps[0].cluster)
