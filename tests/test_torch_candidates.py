"""Kernels as candidates of Inductor's max-autotune."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-integrations installs it")

from torch_support import Clock, Residual, close, db, image, prepared, ran, without_autograd  # noqa: E402, F401

from schedsearch.torch.compiler.backend import schedsearch  # noqa: E402
from schedsearch.torch.layers import candidates  # noqa: E402
from schedsearch.torch.layers import kernel_op as calls  # noqa: E402

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.usefixtures("without_autograd"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU"),
]


@pytest.mark.parametrize("ours", [True, False], ids=["ours_wins", "inductor_wins"])
def test_inductor_chooses_between_a_kernel_and_its_own_code(
    db: Path,
    ran: list[str],
    ours: bool,
) -> None:
    if why := candidates.register():
        pytest.skip(why)
    settings = torch._inductor.config.test_configs
    if not hasattr(settings, "force_custom_op_decomposition"):
        pytest.skip("this PyTorch cannot be told which candidate wins")
    model, x = prepared(Residual()), image()
    reports: list[Any] = []
    options = {"db": db, "allow": ("default",), "timer": Clock(), "report": reports.append, "network": False}
    options |= {"mode": "max-autotune-no-cudagraphs"}
    forced = {"test_configs.force_custom_op_decomposition": not ours, "force_disable_caches": True}
    with torch._inductor.config.patch(forced):
        fast = torch.compile(model, backend=schedsearch, options=options, fullgraph=True)
        expected = model(x)
        assert close(fast(x), expected)
    assert reports[0].notes == ("Inductor's max-autotune chooses between its code and our kernels for 2 layers",)
    assert [(layer.name, layer.is_candidate) for layer in reports[0].layers] == [("conv1", True), ("conv2", True)]
    assert "2 of 2 layers have a candidate" in str(reports[0]) and reports[0].saved_us == 0
    ran.clear()
    assert close(fast(x), expected) and ran == (["conv2d", "conv2d"] if ours else [])
    model.bn1.weight.mul_(-3)
    assert close(fast(x), model(x))


def test_an_older_pytorch_has_no_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.11.0"))
    assert candidates.register.__wrapped__() == "candidates of max-autotune need PyTorch 2.12 or newer (this is 2.11.0)"


def test_the_operators_keep_the_rules_of_pytorch(db: Path) -> None:
    import schedsearch.torch as sst

    sst.optimize_(prepared(Residual()), image(), db=db, allow=("default",), timer=Clock())
    key, call = next(each for each in calls._calls.items() if "residual" in each[1].workload.label)
    generator = torch.Generator().manual_seed(3)
    vectors = {"OHWI": (8, 8, 3, 3), "NHWC": (1, 8, 6, 6)}
    arrays = [torch.randn(vectors.get(spec.axes, spec.shape), generator=generator) for spec in call.workload.signature]
    arrays = [each.contiguous(memory_format=torch.channels_last) if each.dim() == 4 else each for each in arrays]
    operator = candidates.operator_for(arrays)
    torch.library.opcheck(operator, (*arrays, key))
    assert close(operator(*arrays, key), candidates._plain(*arrays, key=key))
