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
    arguments = (x, weight, bias, None, residual, [1, 1], [1, 1, 1, 1], [1, 1], 1, "bias,residual,relu", 0.0, 0.0, "fp32")
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
