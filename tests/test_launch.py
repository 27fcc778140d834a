"""Launch plans as data: grids within CUDA's limits, lossless JSON, identity of artifacts, consistent measurements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    assert Measurement.from_json(ok.to_json()) == ok
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
