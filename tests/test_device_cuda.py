"""How a plan's grid becomes a launch, without a driver; what needs a device is in test_measure_gpu.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import schedsearch.device.cuda as module
from schedsearch.launch import Artifact, Grid, LaunchPlan, Step
from schedsearch.target import PRESETS

CLUSTERS_AT_ONCE = 31  # of 4 blocks, where 132 multiprocessors would be 33


@pytest.mark.parametrize(
    ("grid", "cluster", "blocks"),
    [
        (Grid(1000, blocks_per_sm=1), 4, 4 * CLUSTERS_AT_ONCE),  # those left over would run after all others
        (Grid(40, blocks_per_sm=1), 4, 40),
        (Grid(1000, blocks_per_sm=1), 1, 132),
        (Grid(1000), 4, 1000),
    ],
)
def test_a_persistent_grid_has_the_clusters_that_the_card_runs_at_once(
    monkeypatch: pytest.MonkeyPatch, grid: Grid, cluster: int, blocks: int
) -> None:
    launched = []

    def occupancy(clusters: Any, function: Any, config: Any) -> int:
        assert (function.value, config._obj.block_x, config._obj.shared_bytes) == (7, 256, 5000)
        clusters._obj.value = CLUSTERS_AT_ONCE
        return 0

    def launch(config: Any, *_: Any) -> int:
        launched.append(config._obj.grid_x)
        return 0

    driver = SimpleNamespace(
        cuOccupancyMaxActiveClusters=occupancy, cuLaunchKernelEx=launch, cuTensorMapReplaceAddress=None
    )  # fmt: skip
    monkeypatch.setattr(module, "_libcuda", lambda: driver)
    plan = LaunchPlan("cuda", "sm_90a", (Step("kernel_0", (), grid, 256, 5000, cluster),))
    loaded: Any = SimpleNamespace(
        artifact=Artifact(b"", plan), device=SimpleNamespace(target=PRESETS["h200"]), functions=[7], workspaces={}
    )
    module.CudaBoundKernel(loaded, {}, {}, [0], None).launch()
    assert launched == [blocks]
