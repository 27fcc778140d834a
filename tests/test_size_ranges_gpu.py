"""Machine code with a run-time batch on a GPU: right at ends, tails and between, and a range that is called with torch."""

from __future__ import annotations

from pathlib import Path

import pytest

import schedsearch
from schedsearch import Workload, load_templates
from schedsearch.backend import compile_source
from schedsearch.backend.relaunch import relaunched
from schedsearch.backend.run_time import shared_code
from schedsearch.device import open_device
from schedsearch.device.detect import detect
from schedsearch.verification.verify import verify_once

pytestmark = pytest.mark.gpu

FUSED = ("bias", "relu")
LAYERS = {
    "conv2d_wgmma": ("conv2d", dict(h=14, w=14, c=128, k=192, r=3, s=3, padding=1, epilogue=("bias", "residual", "relu"))),
    "conv2d_halo": ("conv2d", dict(h=28, w=28, c=64, k=64, r=3, s=3, padding=1, epilogue=FUSED)),
    "conv2d_stem": ("conv2d", dict(h=64, w=64, c=3, k=64, r=7, s=7, stride=2, padding=3, epilogue=FUSED)),
    "conv2d_mma": ("conv2d", dict(h=7, w=7, c=96, k=80, r=3, s=3, padding=1, epilogue=FUSED)),
    "conv2d_simt": ("conv2d", dict(h=9, w=9, c=16, k=24, r=3, s=3, padding=1, dtype="float32")),
    "depthwise_conv2d_cuda": ("depthwise_conv2d", dict(h=28, w=28, c=64, r=3, s=3, padding=1)),
    "pool2d_cuda": ("pool2d", dict(h=28, w=28, c=64, r=3, s=3, stride=2, padding=1, mode="max")),
}


@pytest.mark.parametrize("template", LAYERS)
def test_one_machine_code_is_right_at_ends_and_tails(template: str) -> None:
    op, params = LAYERS[template]
    target, chosen = detect("cuda"), load_templates([template])[template]
    workloads = {n: Workload(op, {**params, "n": n}) for n in (2, 17, 33, 63, 64)}
    if reason := chosen.validate(workloads[33], target):
        pytest.skip(reason)
    config = chosen.default(workloads[33], target, chosen.space(workloads[33], target))
    legal = {n: workload for n, workload in workloads.items() if not chosen.space(workload, target).check(config)}
    group = max(shared_code({n: chosen.kernel(workload, target, config) for n, workload in legal.items()}), key=len)
    assert len(group) > 1
    made_for = max(group)
    artifact = compile_source(group[made_for], target).artifact
    device = open_device(target)
    try:
        for n, source in group.items():
            again = relaunched(artifact, group[made_for], source)
            assert again is not None
            loaded = device.load(again)
            assert verify_once(device, workloads[n], loaded) is None, n
            loaded.close()
    finally:
        device.close()


@pytest.mark.xdist_group("device")
def test_a_tuned_range_computes_every_batch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    workload = Workload.conv2d(n=1, h=14, w=14, c=64, k=64, r=3, s=3, padding=1, epilogue=("bias", "relu"))
    of_range, db = workload.with_dynamic("n", 1, 12), tmp_path / "records.db"
    (found,) = schedsearch.tune([of_range], db, target="cuda", trials=3, workers=2, tuner="random").ranges
    assert found.table is not None, found.problem
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randint(-3, 4, (64, 3, 3, 64), generator=generator, device="cuda").half()
    bias = torch.randint(-3, 4, (64,), generator=generator, device="cuda").half()
    with schedsearch.compile(of_range, db, target="cuda") as kernel:
        for n in (1, 2, 3, 5, 7, 11, 12, 5):
            x = torch.randint(-3, 4, (n, 14, 14, 64), generator=generator, device="cuda").half()
            y = torch.nn.functional.conv2d(x.double().permute(0, 3, 1, 2), weight.double().permute(0, 3, 1, 2), padding=1)
            wanted = (y + bias.double().view(1, -1, 1, 1)).relu().permute(0, 2, 3, 1)
            torch.testing.assert_close(kernel(x, weight, bias).double(), wanted, rtol=1e-3, atol=1e-3)
