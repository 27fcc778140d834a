"""Launch plans as data: grids within CUDA's limits, lossless JSON, identity of artifacts; measurements that cannot lie."""

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
    over_tiles,
)
from schedsearch.measurement import Measurement, Outcome, Resources

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
        Step("kernel_1", (Pointer("weight"), Pointer("repacked")), Grid(1), 32, weight_only=True),
    ),
    workspaces={"partial": 4096, "repacked": 64},
    alignments={"x": 16},
)  # fmt: skip


def test_a_plan_survives_json() -> None:
    assert LaunchPlan.from_json(PLAN.to_json()) == PLAN
    assert LaunchPlan.from_json(PLAN.to_json()).to_json() == PLAN.to_json()
    maps = [param for param in PLAN.steps[0].params if isinstance(param, TensorMap)]
    assert [tensor_map.is_im2col for tensor_map in maps] == [True, False]


def test_workspaces_of_steps_on_the_weight_alone_are_the_weights() -> None:
    assert PLAN.weight_workspaces == {"repacked": 64}
    assert LaunchPlan("cpu", "native", (Step("k", (Pointer("weight"),), Grid(1), 2),)).weight_workspaces == {}


@pytest.mark.parametrize("field", ['"prepared":{}', '"zeroed":[]'])
def test_a_plan_with_a_former_field_is_read(field: str) -> None:
    text = PLAN.to_json()
    assert LaunchPlan.from_json(text.replace('"steps":', f'{field},"steps":', 1)) == PLAN


def test_what_is_at_its_default_is_not_written() -> None:
    plan = LaunchPlan("cpu", "native", (Step("k", (), Grid(1), 2),))
    assert plan.to_json() == (
        '{"arch":"native","kind":"cpu","steps":[{"block_threads":2,"entry":"k","grid":{"blocks_per_sm":0,"work_items":1},'
        '"params":[]}]}'
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


def test_tiles_are_folded_into_one_axis() -> None:
    assert over_tiles(65536 * 3) == 65536 * 3  # y and z would end at 65535
    assert over_tiles(1000, 256) == 4
    with pytest.raises(ValueError, match="2147483647"):
        over_tiles(2**31 * 256 + 1, 256)


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
