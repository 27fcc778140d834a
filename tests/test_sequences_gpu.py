"""Convolutions over time on a GPU: functions of PyTorch, CUDA graphs, autocast, and networks, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch with CUDA")

import schedsearch  # noqa: E402

pytestmark = pytest.mark.gpu
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5}


@pytest.fixture(scope="module")
def sst(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The package with kernels for every call, which are built here."""
    import schedsearch.torch as package

    with package.use(tmp_path_factory.mktemp("records") / "none.db", allow=("default",)):
        yield package


def made(t: int, last: bool, dtype: Any, c: int = 24) -> list[Any]:
    """x, weight, bias and a gradient of y."""
    torch.manual_seed(t)
    shapes = (2, c, t), (c, 4), (c,), (2, c, t)
    found = [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]
    if last:
        found[0], found[3] = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (found[0], found[3]))
    return found


def right(x: Any, weight: Any, bias: Any) -> Any:
    y = torch.nn.functional.conv1d(x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=x.shape[1])
    return torch.nn.functional.silu(y[:, :, : x.shape[2]])


def close(found: Any, exact: Any, dtype: Any) -> None:
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=TOLERANCES[dtype] * float(exact.abs().max()))


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "time last"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_it_and_its_gradients_are_those_of_the_sum(sst: Any, dtype: Any, last: bool) -> None:
    for t in (1, 3, 500, 1001):  # with time last, lines begin at any step
        *leaves, dy = made(t, last, dtype)
        exact = [each.double().requires_grad_() for each in leaves]
        y = right(*exact)
        wanted = torch.autograd.grad(y, exact, dy.double())
        leaves = [each.requires_grad_() for each in leaves]
        found = sst.causal_conv1d(*leaves, activation="silu")
        assert sst.served()[-1].kernel is not None
        assert t == 1 or found.stride() == leaves[0].stride()
        close(found, y, dtype)
        for ours, theirs in zip(torch.autograd.grad(found, leaves, dy), wanted):
            close(ours, theirs, dtype)


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "time last"])
def test_a_graph_captures_forward_and_decoding(sst: Any, last: bool) -> None:
    x, weight, bias, _ = made(64, last, torch.bfloat16)
    states, token = torch.zeros(2, 24, 3, device="cuda", dtype=x.dtype), x[:, :, 0].contiguous()
    with torch.no_grad():
        sst.causal_conv1d(x, weight, bias, activation="silu")  # the first calls build and load kernels
        sst.causal_conv1d_update(token, states, weight, bias, activation="silu")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = sst.causal_conv1d(x, weight, bias, activation="silu")
            next_y = sst.causal_conv1d_update(token, states, weight, bias, activation="silu")
        x.copy_(torch.randn_like(x))
        states.zero_()
        for step in range(4):
            token.copy_(x[:, :, step])
            graph.replay()
            close(y, right(x.double(), weight.double(), bias.double()), torch.bfloat16)
            torch.testing.assert_close(next_y, y[:, :, step])


def test_autocast_computes_in_its_dtype(sst: Any) -> None:
    x, weight, bias, dy = made(100, True, torch.float32)
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    with torch.autocast("cuda", torch.bfloat16):
        y = sst.causal_conv1d(*leaves, activation="silu")
    assert y.dtype == torch.bfloat16
    found = torch.autograd.grad(y, leaves, dy.to(y.dtype))
    exact = [each.detach().double().requires_grad_() for each in leaves]
    for ours, theirs in zip(found, torch.autograd.grad(right(*exact), exact, dy.double())):
        assert ours.dtype == torch.float32
        close(ours, theirs, torch.bfloat16)


def test_it_compiles_without_a_break(sst: Any) -> None:
    x, weight, bias, _ = made(50, True, torch.bfloat16)
    run = torch.compile(lambda x: sst.causal_conv1d(x, weight, bias, activation="silu") + 1, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(run(x), sst.causal_conv1d(x, weight, bias, activation="silu") + 1)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_a_network_has_the_operator(tmp_path: Path, layout: str) -> None:
    """A causal depthwise convolution between two others, of one dimension."""
    pytest.importorskip("onnx")
    from onnx_support import Net

    net = Net(2, 16, 100)
    first = net.node("Conv", "x", net.weight("a", 32, 16, 1))
    second = net.node("Conv", first, net.weight("b", 32, 1, 4), net.weight("c", 32), group=32, pads=[3, 0])
    net.node("Conv", second, net.weight("d", 8, 32, 1))
    path = tmp_path / "net.onnx"
    path.write_bytes(net.model().SerializeToString())
    x = np.random.default_rng(0).standard_normal((2, 16, 100)).astype(np.float32)
    a, b, c, d = (torch.from_numpy(np.array(each)).double() for each in weights_of(net))
    y = torch.nn.functional.conv1d(torch.from_numpy(x).double(), a)
    y = torch.nn.functional.conv1d(y, b, c, padding=3, groups=32)[:, :, :100]
    with schedsearch.build(path, db=tmp_path / "none.db", target="cuda", layout=layout) as built:
        assert "depthwise_conv1d" in built.explain()
        found = built(torch.from_numpy(x).cuda())
        close(found.cpu(), torch.nn.functional.conv1d(y, d), torch.float32)


def weights_of(net: Any) -> list[Any]:
    from onnx import numpy_helper

    return [numpy_helper.to_array(each) for each in net.weights]
