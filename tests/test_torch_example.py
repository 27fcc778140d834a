"""The example that takes a model to a measured speed-up, on a CPU and without torchvision."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-integrations installs it")

from torch_support import Clock  # noqa: E402

import schedsearch.torch as sst  # noqa: E402
from schedsearch.torch.models import optimize  # noqa: E402

pytestmark = pytest.mark.integrations
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "pytorch" / "faster_model.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example with one block instead of several, where there is no torchvision."""
    spec = importlib.util.spec_from_file_location("faster_model", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    made = module.stand_in
    monkeypatch.setattr(module, "stand_in", lambda: made(channels=8, blocks=1))
    return module


def test_it_tunes_swaps_and_times(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(optimize, "timer_of", lambda device: Clock())  # the same layers win on every machine
    given = ["--device", "cpu", "--size", "12", "--trials", "1", "--no-compile", "--db", str(tmp_path / "records.db")]
    example.main(["resnet18", *given, "--minutes", "1"])
    told = capsys.readouterr().out
    assert told.startswith(
        "torchvision is not installed: a small network takes the place of resnet18; for resnet18: pip install"
    )
    assert "PyTorch, on the CPU: as it is " in told and "tuned 3 layers" in told and "3 of 3 layers swapped" in told
    assert re.search(r"schedsearch, 3 layers: [\d.]+ us, [\d.]+ times as fast as PyTorch's best\n$", told)
    example.main([*given, "--minutes", "0"])
    assert "3 of 3 layers swapped" in capsys.readouterr().out  # by the records of the first run


def test_it_says_so_if_nothing_is_faster(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(example.sst, "optimize_", lambda *given, **options: sst.Report(notes=("nothing was tried",)))
    example.main(["--device", "cpu", "--size", "12", "--no-compile", "--db", str(tmp_path / "records.db")])
    assert "schedsearch: no layer is faster with a kernel, so the model runs as before, in " in capsys.readouterr().out
