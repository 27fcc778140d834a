"""Networks of random valid ONNX graphs compute what the graphs do, or the graphs are refused with an error of ours."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from random_graphs import fault, random_graph


def check(seeds: range, *, runtime: bool) -> None:
    """Most graphs are taken, and none has a fault."""
    taken = 0
    for seed in seeds:
        graph = random_graph(seed, runtime=runtime)
        found = fault(graph.model(), graph.arrays, graph.open, seed)
        assert not found or found.startswith("("), f"seed {seed}: {found}"
        taken += not found
    assert taken > 0.8 * len(seeds)


@pytest.mark.parametrize("start", range(0, 40, 20))
@pytest.mark.mostly_long(2)
def test_a_network_computes_what_its_random_graph_does(start: int) -> None:
    check(range(start, start + 20), runtime=False)


@pytest.mark.integrations
@pytest.mark.drawn
@pytest.mark.parametrize("start", range(1000, 1200, 50))
def test_networks_compute_what_onnx_runtime_does(start: int) -> None:
    pytest.importorskip("onnxruntime")
    check(range(start, start + 50), runtime=True)


@pytest.mark.long
@pytest.mark.parametrize("start", range(2000, 2400, 100))
def test_many_networks_compute_what_their_random_graphs_do(start: int) -> None:
    check(range(start, start + 100), runtime=False)
