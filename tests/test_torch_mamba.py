"""Mamba of `transformers` computes the same with our convolutions: prompts, decoding, and gradients."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-integrations installs it")
pytest.importorskip("transformers", reason="needs transformers, which nothing here installs: pip install transformers")

import schedsearch.torch as sst  # noqa: E402

pytestmark = pytest.mark.integrations
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "pytorch" / "mamba.py"


def test_the_example_computes_the_same() -> None:
    spec = importlib.util.spec_from_file_location("mamba_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = example.model_of(32, 1, "cpu", torch.float32)
    with sst.use(None):
        found = example.compared(model, torch.randint(0, 256, (2, 9)), 3)
    assert found["logits"] < 1e-5 and found["gradients"] < 1e-4 and found["same tokens"]
