"""`schedsearch.torch`: the operators compute what PyTorch computes in float64, and look to PyTorch like its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integrations


@pytest.fixture(scope="module")
def sst(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The package with kernels for every call: those of the default rung are built."""
    import schedsearch.torch as package

    with package.use(tmp_path_factory.mktemp("records") / "none.db", allow=("default",)):
        yield package


def images(torch: Any, channels_last: bool = True, residual: bool = True) -> tuple[Any, ...]:
    """x, weight, bias and residual of one small layer, so that few kernels are built."""
    torch.manual_seed(0)
    memory = torch.channels_last if channels_last else torch.contiguous_format
    x, weight = torch.randn(2, 8, 9, 11), torch.randn(16, 8, 3, 3) / 8
    added = torch.randn(2, 16, 9, 11) if residual else None
    return *(each.to(memory_format=memory) for each in (x, weight)), torch.randn(16), added


def test_a_kernel_computes_the_convolution_of_float64(torch: Any, sst: Any) -> None:
    x, weight, bias, residual = images(torch)
    y = sst.conv2d(x, weight, bias, residual, padding=1, activation="relu")
    assert sst.served()[-1].kernel is not None
    exact = torch.nn.functional.conv2d(x.double(), weight.double(), bias.double(), padding=1) + residual.double()
    torch.testing.assert_close(y.double(), torch.relu(exact), rtol=1e-5, atol=1e-5)
    assert y.is_contiguous(memory_format=torch.channels_last)


def permuted(torch: Any, tensor: Any) -> Any:
    """The same numbers, dense, with width as the slowest axis."""
    return tensor.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)


@pytest.mark.parametrize("memory", ["channels_last", "contiguous", "permuted"])
def test_opcheck(torch: Any, sst: Any, memory: str) -> None:
    x, weight, bias, residual = images(torch, memory == "channels_last")
    if memory == "permuted":
        x, residual = permuted(torch, x), permuted(torch, residual)
    arguments = (x, weight, bias, None, residual, "padding=1,1,1,1 epilogue=bias,residual,relu", 0.0, 0.0)
    torch.library.opcheck(torch.ops.schedsearch.conv2d.default, arguments)


def test_a_compiled_function_has_one_graph_and_the_same_result(torch: Any, sst: Any) -> None:
    x, weight, bias, residual = images(torch)

    def layer(*tensors: Any) -> Any:
        return sst.conv2d(*tensors, padding=1, activation="relu")

    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        torch.testing.assert_close(compiled(x, weight, bias, residual), layer(x, weight, bias, residual))


def test_without_a_record_pytorch_computes(torch: Any, sst: Any, tmp_path: Path) -> None:
    x, weight, bias, _ = images(torch)
    with sst.use(None):
        y = sst.conv2d(x, weight, bias)
        (entry,) = sst.served()
    assert entry.kernel is None
    torch.testing.assert_close(y, torch.nn.functional.conv2d(x, weight, bias))


def test_a_database_that_is_not_there_is_refused(sst: Any, tmp_path: Path) -> None:
    from schedsearch.errors import DatabaseError

    with pytest.raises(DatabaseError, match="there is no database"):
        sst.use(tmp_path / "missing.db")


def gradients(torch: Any, layer: Any, x: Any, weight: Any, bias: Any) -> list[Any]:
    """y, and the gradients of x, weight and bias for some dy."""
    given = [each.detach().clone().requires_grad_() for each in (x, weight, bias)]
    y = layer(*given)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))
    return [y, *(each.grad for each in given)]


def depthwise_layer(torch: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    return torch.randn(2, 8, 9, 11), torch.randn(16, 1, 3, 3), torch.randn(16)


@pytest.mark.parametrize("channels_last", [True, False])
def test_gradients_of_a_depthwise_layer_are_those_of_float64(torch: Any, sst: Any, channels_last: bool) -> None:
    x, weight, bias = depthwise_layer(torch)
    x = x.to(memory_format=torch.channels_last) if channels_last else x

    def exact(x: Any, weight: Any, bias: Any) -> Any:
        return torch.relu(torch.nn.functional.conv2d(x, weight, bias, stride=2, padding=1, groups=8))

    def layer(*given: Any) -> Any:
        return sst.depthwise_conv2d(*given, stride=2, padding=1, activation="relu")

    expected = gradients(torch, exact, *(each.double() for each in (x, weight, bias)))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for each in (layer, compiled):
        for found, right in zip(gradients(torch, each, x, weight, bias), expected):
            torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-4)
    directions = [entry.kernel.workload.params["direction"] for entry in sst.served()[-2:]]
    assert directions == ["forward", "grad_both"]


def test_a_second_derivative_is_refused(torch: Any, sst: Any) -> None:
    x, weight, _ = depthwise_layer(torch)
    x.requires_grad_()
    y = sst.depthwise_conv2d(x, weight, stride=2, padding=1)
    (dx,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


def test_opcheck_of_gradients_and_movements(torch: Any, sst: Any) -> None:
    x, weight, _ = depthwise_layer(torch)
    last = x.to(memory_format=torch.channels_last)
    dy = torch.randn(2, 16, 5, 6)
    window, ops = "stride=2,2 padding=1,1,1,1", torch.ops.schedsearch
    for op, arguments in (
        (ops.depthwise_conv2d_grad_input, (dy, weight, [2, 8, 9, 11], window, True)),
        (ops.depthwise_conv2d_grad_weight, (last, dy, [3, 3], window)),
        (ops.depthwise_conv2d_grad_both, (last, weight, permuted(torch, dy), window)),
        (ops.pixel_shuffle, (last, 2)),
        (ops.pixel_unshuffle, (torch.randn(1, 2, 4, 4), 2)),
        (ops.layout_transform, (torch.randn(1, 6, 3, 3), [1, 6, 3, 3], "NCHW", "NCHW4c")),
    ):
        torch.library.opcheck(op.default, arguments)


def test_pixel_shuffles_move_as_pytorch_does_and_are_each_others_gradients(torch: Any, sst: Any) -> None:
    x = torch.randn(2, 8, 4, 6, requires_grad=True)
    for ours, theirs in (
        (sst.pixel_shuffle, torch.nn.functional.pixel_shuffle),
        (sst.pixel_unshuffle, torch.nn.functional.pixel_unshuffle),
    ):
        y, expected = ours(x, 2), theirs(x, 2)
        assert torch.equal(y, expected)
        dy = torch.randn_like(y)
        assert torch.equal(*(torch.autograd.grad(each, x, dy)[0] for each in (y, expected)))


def test_a_layout_with_blocks(torch: Any, sst: Any) -> None:
    x = torch.randn(1, 6, 3, 3)
    packed = sst.layout_transform(x, "NCHW", "NCHW4c")
    assert torch.equal(packed, torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 2)).view(1, 2, 4, 3, 3).permute(0, 1, 3, 4, 2))
    assert torch.equal(sst.layout_transform(packed, "NCHW4c", "NCHW", (1, 6, 3, 3)), x)
