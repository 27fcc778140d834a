"""MaxPool with the places of the largest pixels, and MaxUnpool, beside a search through every window."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from compared_models import assert_as_onnxruntime, normal, referred  # noqa: E402
from onnx import TensorProto  # noqa: E402
from onnx_support import Net  # noqa: E402

import schedsearch  # noqa: E402
from schedsearch.dynamic.graph import Size  # noqa: E402
from schedsearch.dynamic.model import read_graph  # noqa: E402
from schedsearch.network.model import ModelError  # noqa: E402

Array = np.ndarray[Any, Any]


def places(x: Array, made: Sequence[int], window: dict[str, Any]) -> Array:
    """Of the first largest pixel of each window, row by row, in the whole array; padding is never the largest."""
    kernel, rank = window["kernel_shape"], len(window["kernel_shape"])
    strides, dilations = (window.get(name, [1] * rank) for name in ("strides", "dilations"))
    pads = window.get("pads", [0] * 2 * rank)
    found = np.empty((*x.shape[:2], *made), np.int64)
    for at in np.ndindex(found.shape):
        best = None
        for tap in itertools.product(*map(range, kernel)):
            pixel = [o * s - p + t * d for o, s, p, t, d in zip(at[2:], strides, pads, tap, dilations)]
            if all(0 <= place < extent for place, extent in zip(pixel, x.shape[2:])):
                whole = (*at[:2], *pixel)
                if best is None or x[whole] > x[best]:
                    best = whole
        assert best is not None
        found[at] = np.ravel_multi_index(best, x.shape)
    return found


def pooled(net: Net, **window: Any) -> None:
    y = net.node("MaxPool", "x", outputs=2, name="pool", **window)
    net.results = [y, "pool.out1"]


WINDOWS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "side by side": ((2, 3, 4, 6), {"kernel_shape": [2, 3], "strides": [2, 3]}),
    "that overlap": ((1, 2, 7, 6), {"kernel_shape": [3, 3], "strides": [2, 1]}),
    "with padding": ((2, 2, 5, 7), {"kernel_shape": [3, 4], "strides": [2, 2], "pads": [1, 2, 1, 0]}),
    "with dilations and padding": (
        (1, 2, 8, 9),
        {"kernel_shape": [3, 2], "strides": [1, 2], "dilations": [2, 3], "pads": [2, 1, 2, 2]},
    ),
    "of ceil_mode": ((1, 2, 6, 5), {"kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": 1}),
    "of one pixel": ((2, 2, 3, 4), {"kernel_shape": [1, 1]}),
    "of one pixel with strides": ((2, 2, 5, 4), {"kernel_shape": [1, 1], "strides": [2, 3]}),
    "of one axis": ((2, 3, 9), {"kernel_shape": [3], "strides": [2], "pads": [1, 0]}),
    "of three axes": ((1, 2, 4, 5, 6), {"kernel_shape": [2, 3, 2], "strides": [2, 1, 2], "pads": [0, 1, 0, 0, 1, 0]}),
}


@pytest.mark.parametrize("few", [False, True], ids=["different numbers", "equal numbers"])
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.mostly_long(3)
def test_a_pool_gives_the_place_of_the_first_largest_pixel(name: str, few: bool) -> None:
    shape, window = WINDOWS[name]
    net = Net(*shape)
    pooled(net, **window)
    x = np.random.default_rng(1).integers(-1, 1, shape).astype(np.float32) if few else normal(*shape) - 5
    y, index = referred(net.model(), {"x": x})
    np.testing.assert_array_equal(index, places(x, y.shape[2:], window))
    np.testing.assert_array_equal(x.ravel()[index], y)


def test_places_of_minus_infinity_lie_in_the_image() -> None:
    net, x = Net(1, 1, 4, 4), np.full((1, 1, 4, 4), -np.inf, np.float32)
    window = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    pooled(net, **window)
    np.testing.assert_array_equal(referred(net.model(), {"x": x})[1], places(x, (2, 2), window))


@pytest.mark.parametrize("auto_pad", ["VALID", "SAME_UPPER", "SAME_LOWER"])
def test_places_with_auto_pad_are_those_of_onnxruntime(auto_pad: str) -> None:
    net = Net(1, 2, 6, 5)
    pooled(net, kernel_shape=[3, 2], strides=[2, 1], auto_pad=auto_pad)
    assert_as_onnxruntime(net.model(), {"x": normal(1, 2, 6, 5)})


@pytest.mark.parametrize("shape", [(2, 2, 4, 6), (1, 2, 4, 2, 6)], ids=str)
def test_places_column_by_column_are_those_of_onnxruntime(shape: tuple[int, ...]) -> None:
    net, rank = Net(*shape), len(shape) - 2
    pooled(net, kernel_shape=[2] * rank, strides=[2] * rank, storage_order=1)
    assert_as_onnxruntime(net.model(), {"x": normal(*shape)})


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT16, TensorProto.UINT8, TensorProto.INT8])
def test_pools_of_other_numbers_give_places(dtype: int) -> None:
    net, window = Net(1, 2, 6, 6, dtype=dtype), {"kernel_shape": [3, 3], "strides": [1, 1], "pads": [1] * 4}
    x = np.random.default_rng(1).integers(0, 9, (1, 2, 6, 6)).astype(onnx.helper.tensor_dtype_to_np_dtype(dtype))
    pooled(net, **window)
    net.results = net.results[1:]
    np.testing.assert_array_equal(referred(net.model(), {"x": x})[0], places(x, (6, 6), window))


# --- Pixels that go back ------------------------------------------------------------------------------------------------
def unpooling(given: Sequence[int] | None = None) -> Net:
    net, window = Net(2, 3, 4, 6), {"kernel_shape": [2, 2], "strides": [2, 2]}
    pooled(net, **window)
    pixels = net.node("Neg", "pool.out")
    net.results = [net.node("MaxUnpool", pixels, "pool.out1", *([net.row(*given)] if given else []), name="un", **window)]
    return net


@pytest.mark.parametrize("given", [None, (2, 3, 4, 6)])
def test_an_unpooling_puts_pixels_where_they_were_the_largest(given: Sequence[int] | None) -> None:
    x = normal(2, 3, 4, 6)
    index = places(x, (2, 3), {"kernel_shape": [2, 2], "strides": [2, 2]})
    wanted = np.zeros(x.size, np.float32)
    wanted[index.ravel()] = -x.ravel()[index.ravel()]
    np.testing.assert_array_equal(referred(unpooling(given).model(), {"x": x})[0], wanted.reshape(x.shape))


@pytest.mark.long  # builds a network
def test_an_unpooling_that_pytorch_exports_runs_on_the_cpu(tmp_path: Path) -> None:
    """PyTorch writes it as a scatter, and the places as differences to those of a pool of single pixels."""
    torch = pytest.importorskip("torch")

    class Unpooled(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.MaxPool2d(2, return_indices=True)
            self.unpool = torch.nn.MaxUnpool2d(2)

        def forward(self, x: Any) -> Any:
            y, index = self.pool(self.conv(x))
            return self.unpool(torch.relu(y), index, output_size=x.shape)

    x, module = torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(0)), Unpooled().eval()
    torch.onnx.export(module, (x,), tmp_path / "m.onnx", dynamo=True, verbose=False)
    with schedsearch.build(tmp_path / "m.onnx", target="cpu", db=tmp_path / "none.db") as built:
        found = built(x.numpy())
    np.testing.assert_allclose(found, module(x).detach().numpy(), rtol=1e-5, atol=1e-5)


# --- What is refused ----------------------------------------------------------------------------------------------------
def test_an_output_shape_that_runtimes_understand_in_different_ways_is_refused() -> None:
    with pytest.raises(ModelError, match=r"un \(has an output_shape \[2, 3, 5, 7\].*allowed: \[2, 3, 4, 6\]"):
        referred(unpooling((2, 3, 5, 7)).model(), {"x": normal(2, 3, 4, 6)})


def test_places_for_other_pixels_are_refused() -> None:
    net = unpooling()
    net.nodes[-1].input[1] = net.row(*range(18))
    with pytest.raises(ModelError, match=r"un \(reads places of shape \[18\]; allowed: one for each pixel, \[2, 3, 2, 3\]"):
        referred(net.model(), {"x": normal(2, 3, 4, 6)})


def test_an_unpooling_of_other_axes_is_refused() -> None:
    net = unpooling()
    net.nodes[-1].attribute[0].ints[:] = [2]
    with pytest.raises(ModelError, match=r"un \(has windows of other axes than its pixels; allowed: 2 numbers"):
        referred(net.model(), {"x": normal(2, 3, 4, 6)})


def test_places_of_open_sizes_are_refused_with_a_reason() -> None:
    net = Net("n", 3, 4, 6)
    pooled(net, kernel_shape=[2, 2])
    with pytest.raises(ModelError, match=r"pool.*places of the largest pixels of an array whose extents are known at run"):
        read_graph(net.model(), {"n": Size("n", 1, 4)})
