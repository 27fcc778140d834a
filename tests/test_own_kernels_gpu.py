"""`schedsearch.tunable` on a GPU: examples are tuned, called, bound, captured in a graph, and deployed without Numba."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import schedsearch

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("device")]
ROOT = Path(__file__).resolve().parents[1]
SHAPES = {
    "matmul": ("130x70:float32", "70x50:float32", "130x50:float32"),
    "stencil": ("100x130:float32", "100x130:float32"),
    "softmax": ("37x1000:float32", "37x1000:float32"),
    "histogram": ("100003:uint8", "256:int32"),
    "total": ("100003:float32", "1:float32"),
    "pnpoly": ("2x10001:float64", "2x60:float64", "10001:int32"),
    "convolution": ("110x130:float32", "15x15:float32", "96x116:float32"),
}


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"own_{name}", ROOT / "examples" / "own_kernel" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


@pytest.mark.parametrize("name", SHAPES)
def test_an_example_is_tuned(name: str, tmp_path: Path) -> None:
    summary = example(name).tune(*SHAPES[name], target="cuda", trials=3, db=tmp_path / "own.db", workers=2)
    (task,) = summary.tasks
    assert not task.problem
    assert set(map(str, task.outcomes)) <= {"ok", "rejected"}
    assert task.best_ns is not None


FORMULATIONS = {
    "whole_rows": ("softmax", ("36x1024:float32", "36x1024:float32")),
    "columns": ("stencil", SHAPES["stencil"]),
    "by_words": ("histogram", SHAPES["histogram"]),
    "in_registers": ("matmul", SHAPES["matmul"]),
    "tiled": ("convolution", SHAPES["convolution"]),
    "by_atomics": ("total", SHAPES["total"]),
}


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_every_alternative_is_right_wherever_it_is_legal(formulation: str, tmp_path: Path) -> None:
    name, shapes = FORMULATIONS[formulation]
    task = example(name).task(*shapes, restrict={"formulation": [formulation]})
    (task,) = schedsearch.tune([task], tmp_path / "own.db", target="cuda", trials=3, workers=2, tuner="random").tasks
    assert not task.problem
    assert set(map(str, task.outcomes)) <= {"ok", "rejected"}
    assert task.best_ns is not None


def test_every_way_to_launch_runs(tmp_path: Path) -> None:
    from numba import cuda

    def strides(x, y):  # type: ignore[no-untyped-def]
        for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
            y[i] = 2 * x[i]

    declared = {"knobs": {"how": ("a", "b")}, "block": 64, "outputs": ["y"], "reference": lambda x: 2 * x}
    for settings in (
        {"grid": 1000, "blocks_per_sm": lambda k: 2 if k.how == "a" else 1},
        {"grid": 16, "cluster": lambda k: 4 if k.how == "a" else 1, "max_registers": 32},
        {"grid": lambda x, k: 8, "fastmath": lambda k: k.how == "a", "min_blocks_per_sm": 4, "shared": 4096},
    ):
        kernel = schedsearch.tunable(**declared, **settings, db=tmp_path / "own.db")(strides)
        summary = kernel.tune("100003:float32", "100003:float32", target="cuda", trials=2, workers=2)
        assert list(map(str, summary.tasks[0].outcomes)) == ["ok"]


DEPLOYED = """
import sys


class NoNumba:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numba", "numba_cuda", "llvmlite"):
            raise ImportError(f"{name} is not installed")


sys.meta_path.insert(0, NoNumba())
import torch
import schedsearch

a, b = torch.randn(130, 70, device="cuda"), torch.randn(70, 50, device="cuda")
c = torch.empty(130, 50, device="cuda")
schedsearch.own_kernel("matmul", sys.argv[1])(a, b, c)
torch.testing.assert_close(c, (a.double() @ b.double()).float(), rtol=1e-4, atol=1e-4)
"""


def test_a_kernel_is_called_bound_captured_and_deployed(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    matmul = example("matmul")
    matmul.db = tmp_path / "own.db"
    a, b = torch.randn(130, 70, device="cuda"), torch.randn(70, 50, device="cuda")
    c = torch.empty(130, 50, device="cuda")
    expected = (a.double() @ b.double()).float()
    matmul.tune(a, b, c, trials=2, workers=2)
    matmul(a, b, c)
    torch.testing.assert_close(c, expected, rtol=1e-4, atol=1e-4)
    step = matmul.bind(a, b, c)
    assert step.kernel.level == "exact"
    c.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(torch.cuda.current_stream())
    graph.replay()
    torch.testing.assert_close(c, expected, rtol=1e-4, atol=1e-4)
    longer = torch.randn(200, 70, device="cuda")  # other sizes: the same machine code
    matmul(longer, b, other := torch.empty(200, 50, device="cuda"))
    torch.testing.assert_close(other, (longer.double() @ b.double()).float(), rtol=1e-4, atol=1e-4)
    assert "machine code of" in matmul.bind(longer, b, other).kernel.provenance.why[-1]
    transposed = a.T.contiguous().T  # another layout: the nearest record's configuration, built now
    matmul(transposed, b, c.zero_())
    torch.testing.assert_close(c, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(schedsearch.ArgumentError, match="several devices"):
        matmul(a.cpu(), b, c)
    (tmp_path / "deployed.py").write_text(DEPLOYED)
    done = subprocess.run([sys.executable, tmp_path / "deployed.py", matmul.db], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_in_place_arguments_are_updated_by_a_call(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    histogram = example("histogram")
    histogram.db = tmp_path / "own.db"
    x = torch.randint(0, 256, (100003,), dtype=torch.uint8, device="cuda")
    bins = torch.zeros(256, dtype=torch.int32, device="cuda")
    histogram(x, bins)
    histogram(x, bins)
    np.testing.assert_array_equal(bins.cpu(), 2 * np.bincount(x.cpu(), minlength=256))
