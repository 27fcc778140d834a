"""The network that benchmarks/super_resolution.py times is the one that it describes, and every layer has a fast kernel."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from schedsearch.ops.layout import Layout
from schedsearch.target import PRESETS
from schedsearch.template import load_template

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
FAST = {"head": "conv2d_stem", "last": "conv2d_few_outputs"}  # and conv2d_halo for all others


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("super_resolution")


@pytest.mark.parametrize("output_layout", ["NHWC", "NCHW"])
def test_each_layer_reads_what_others_wrote(program: ModuleType, output_layout: str) -> None:
    network = program.layers(9, 16, output_layout)
    shapes = {"image": (1, 9, 16, 3)}
    for layer in network:
        x, *_, last = layer.workload.signature
        assert x.shape == shapes[layer.reads], layer
        assert not layer.adds or (last.name, last.shape) == ("residual", shapes[layer.adds]), layer
        shapes[layer.name] = layer.workload.output.shape
    assert shapes["last"] == Layout.parse(output_layout).shape({"N": 1, "C": 3, "H": 36, "W": 64})


def test_the_network_has_the_arithmetic_that_it_names_and_a_fast_kernel_for_every_layer(program: ModuleType) -> None:
    network = program.layers()
    assert round(sum(layer.workload.flops for layer in network) / 1e9) == 627
    for layer in network:
        template = load_template(FAST.get(layer.name, "conv2d_halo"))
        assert template.validate(layer.workload, PRESETS["h200"]) is None, layer


def test_the_network_in_pytorch_has_the_output_that_ours_has(program: ModuleType) -> None:
    torch = pytest.importorskip("torch")
    network = program.layers(4, 8)
    weights = {
        each.name: (torch.zeros(each.workload.k, each.workload.c, 3, 3), torch.ones(each.workload.k)) for each in network
    }
    y = program.forward(network, torch.zeros(1, 3, 4, 8), weights)
    assert y.shape == (1, 3, 16, 32) and (y == 1).all()
