"""`schedsearch.torch`: the operators compute what PyTorch computes in float64, and look to PyTorch like its own."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integrations


@pytest.fixture(scope="module")
def sst(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The package with kernels for every call: those of the default level are built."""
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
    from schedsearch.torch.operators import store

    x, weight, bias, residual = images(torch, memory == "channels_last")
    if memory == "permuted":
        x, residual = permuted(torch, x), permuted(torch, residual)
    arguments = (x, weight, bias, None, residual, "padding=1,1,1,1 epilogue=bias,residual,relu", 0.0, 0.0)
    with sst.use(store.active.db if memory == "channels_last" else None, allow=("default",)):  # builds one kernel
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


def gradients(torch: Any, layer: Any, *inputs: Any) -> list[Any]:
    """y, and the gradients of the inputs for some dy."""
    given = [each.detach().clone().requires_grad_() for each in inputs]
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


def plain_depthwise(x: Any, weight: Any) -> Any:
    """PyTorch's own."""
    from torch.nn import functional

    return functional.conv2d(x, weight, padding=1, groups=8)


@pytest.mark.parametrize("channels_last", [True, False])
def test_two_kernels_compute_both_gradients_where_they_are_faster_than_one(
    torch: Any, sst: Any, monkeypatch: pytest.MonkeyPatch, channels_last: bool
) -> None:
    from schedsearch.errors import NoRecordError
    from schedsearch.torch.operators.depthwise import GradBoth

    x, weight, _ = depthwise_layer(torch)
    x = x.to(memory_format=torch.channels_last) if channels_last else x

    def slower(*_: Any) -> Any:
        raise NoRecordError("two kernels take 1 us, one for both gradients 2 us")

    monkeypatch.setattr(GradBoth, "accepted", slower)
    sst.refresh()
    for turn in range(3):  # later calls have other tensors
        given = [each * (turn + 1) for each in (x, weight)]
        found = gradients(torch, lambda x, weight: sst.depthwise_conv2d(x, weight, padding=1), *given)
        for ours, right in zip(found, gradients(torch, plain_depthwise, *(each.double() for each in given))):
            torch.testing.assert_close(ours.double(), right, rtol=1e-4, atol=1e-3)
    _, *apart, both = sst.served()
    assert [each.kernel.workload.params["direction"] for each in apart] == ["grad_input", "grad_weight"]
    assert both.kernel is None and "two kernels take 1 us" in both.reason
    sst.refresh()


def test_pytorch_computes_both_gradients_at_once_where_there_is_no_kernel(
    torch: Any, sst: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from schedsearch.torch.operators.depthwise import GradBoth

    x, weight, _ = depthwise_layer(torch)
    masks, by_pytorch = [], GradBoth.by_pytorch

    def kept(self: Any, given: Any, mask: Any) -> Any:
        masks.append(mask)
        return by_pytorch(self, given, mask)

    monkeypatch.setattr(GradBoth, "by_pytorch", kept)
    with sst.use(None):
        found = gradients(torch, lambda x, weight: sst.depthwise_conv2d(x, weight, padding=1), x, weight)
    for ours, right in zip(found, gradients(torch, plain_depthwise, x.double(), weight.double())):
        torch.testing.assert_close(ours.double(), right, rtol=1e-4, atol=1e-3)
    assert masks == [(True, True)]


def test_a_second_derivative_is_refused(torch: Any, sst: Any) -> None:
    x, weight, _ = depthwise_layer(torch)
    x.requires_grad_()
    with sst.use(None):
        y = sst.depthwise_conv2d(x, weight, stride=2, padding=1)
        (dx,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
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
        with sst.use(None):  # `test_fake_results...` compares fake results with those of kernels
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


def whole_numbers(torch: Any, dtype: Any, *shape: int) -> Any:
    return torch.randint(-100 if dtype is torch.int8 else 0, 100, shape).to(dtype)


@pytest.mark.parametrize("kernels", [True, False])
def test_quantised_convolutions_are_exact(torch: Any, sst: Any, kernels: bool) -> None:
    from schedsearch.torch.operators import store

    torch.manual_seed(0)
    x, weight = whole_numbers(torch, torch.uint8, 2, 8, 6, 7), whole_numbers(torch, torch.int8, 16, 8, 3, 3)
    bias, scale = torch.randint(-500, 500, (16,), dtype=torch.int32), torch.full((16,), 2.0**-10)
    exact = torch.nn.functional.conv2d(x.double() - 7, weight.double(), bias.double(), padding=1)
    rounded = (torch.round(torch.relu(exact).float() * scale.view(1, -1, 1, 1)) + 3).clamp(0, 255).to(torch.uint8)
    last = (x.to(memory_format=torch.channels_last), weight.to(memory_format=torch.channels_last))
    with sst.use(None):
        sums = sst.quantized_conv2d(*last, bias, x_zero_point=7, padding=1)
    with sst.use(store.active.db if kernels else None, allow=("default",)):
        y = sst.quantized_conv2d(
            *last, bias, scale, out_dtype=torch.uint8, x_zero_point=7, y_zero_point=3, padding=1, activation="relu"
        )
        assert [entry.kernel is not None for entry in sst.served()] == [kernels]
    assert sums.dtype is torch.int32 and torch.equal(sums.double(), exact)
    assert y.dtype is torch.uint8 and torch.equal(y, rounded)


def test_opcheck_of_a_quantised_convolution(torch: Any, sst: Any) -> None:
    x, weight = whole_numbers(torch, torch.uint8, 1, 4, 5, 5), whole_numbers(torch, torch.int8, 8, 4, 3, 3)
    scale = torch.full((8,), 2.0**-8)
    for epilogue, bias in (
        ("bias,requantise:int8", torch.zeros(8, dtype=torch.int32)),
        ("dequantise:float16,bias,relu", torch.zeros(8)),
    ):
        arguments = (x, weight, bias, scale, None, None, f"zero_points=x epilogue={epilogue}", 0.0, 0.0, 3, 0, 0)
        with sst.use(None):
            torch.library.opcheck(torch.ops.schedsearch.quantized_conv2d.default, arguments)


def test_wrong_arguments_say_what_is_allowed(torch: Any, sst: Any) -> None:
    from schedsearch.errors import ArgumentError

    x, weight, bias, residual = images(torch)
    eight_bits = whole_numbers(torch, torch.uint8, 1, 4, 5, 5), whole_numbers(torch, torch.int8, 8, 4, 3, 3)
    for call, message in (
        (lambda: sst.conv2d(x, weight[:, :4]), "does not fit groups=1 and the 8 channels"),
        (lambda: sst.conv2d(x, weight.double()), "weight of conv2d has dtype torch.float64, x has torch.float32"),
        (lambda: sst.conv2d(x, weight, bias[:3]), r"bias of conv2d has shape \(3,\); allowed: \(16,\)"),
        (lambda: sst.conv2d(x, weight, None, residual), r"residual of conv2d has shape .* allowed: \(2, 16, 7, 9\)"),
        (lambda: sst.conv2d(x, weight, activation="rleu"), "did you mean 'relu'"),
        (lambda: sst.conv2d(x, weight, padding="full"), "allowed: numbers, 'valid' or 'same'"),
        (lambda: sst.conv2d(x, weight, dilation=9), "larger than the padded image"),
        (lambda: sst.conv2d(x.to(torch.int8), weight.to(torch.int8)), "quantized_conv2d takes 8-bit numbers"),
        (lambda: sst.quantized_conv2d(x, weight), "both of int8 or uint8"),
        (lambda: sst.conv2d(x[0], weight), "allowed: four axes"),
        (lambda: sst.pixel_shuffle(x, 3), "allowed: a multiple of block \\* block = 9"),
        (lambda: torch.ops.schedsearch.conv2d(x, weight, None, None, None, "strides=2", 0.0, 0.0), "the parameters are"),
        (lambda: sst.conv2d(x.to_sparse(), weight), r"x of conv2d has layout torch.sparse_coo; give x.to_dense\(\)"),
        (lambda: sst.conv2d(x, weight, bias.to_sparse()), r"give bias.to_dense\(\)"),
        (lambda: sst.conv2d(x, weight.to("meta")), "weight of conv2d is on meta, x is on cpu; move it there"),
        (lambda: sst.conv2d(x[0, 0, 0], weight, groups=8), r"x of conv2d has shape \(11,\); allowed: four axes"),
        (lambda: sst.depthwise_conv2d(x[0, 0, 0], weight), "allowed: four axes"),
        (lambda: torch.ops.schedsearch.depthwise_conv2d_grad_weight(bias, bias, [3, 3], ""), "allowed: four axes"),
        (lambda: sst.conv2d(x, weight, stride=2.0), r"stride is 2.0; allowed: integers, e.g. stride=1"),
        (lambda: sst.conv2d(x, weight, padding=0.5), "padding is 0.5; allowed: integers"),
        (lambda: sst.conv2d(x, weight, groups=2.0), "groups is 2.0; allowed: an integer"),
        (lambda: sst.conv2d(x, weight, activation=torch.relu), "allowed: relu, "),
        (lambda: sst.conv2d(x, weight, precision="bf16"), "allowed: fp32, tf32 or None"),
        (lambda: sst.conv2d(x, weight, pixel_shuffle=3), "16 output channels before its pixel shuffle by 3; allowed: .* 9"),
        (lambda: sst.quantized_conv2d(*eight_bits, x_zero_point=300), "x_zero_point is 300; allowed: 0 to 255"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()


def test_quantised_and_nested_tensors_of_pytorch_are_refused(torch: Any, sst: Any) -> None:
    from schedsearch.errors import ArgumentError

    x, weight, _, _ = images(torch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one is deprecated, the other a prototype
        nested = torch.nested.nested_tensor([x[0]])
        quantised = torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)
    with pytest.raises(ArgumentError, match=r"x of conv2d is a quantised tensor of torch.quint8; give x.int_repr\(\)"):
        sst.conv2d(quantised, weight)
    with pytest.raises(ArgumentError, match="x of conv2d is a nested tensor; give one tensor"):
        sst.conv2d(nested, weight)


def test_a_tensor_whose_memory_was_freed_is_refused(torch: Any, sst: Any) -> None:
    from schedsearch.errors import UsageError

    x, weight, bias, residual = images(torch)
    expected = sst.conv2d(x, weight, bias, residual, padding=1)
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(UsageError, match="has no memory"):
        sst.conv2d(freed, weight, bias, residual, padding=1)
    assert torch.equal(sst.conv2d(x, weight, bias, residual, padding=1), expected)


def strided(torch: Any, dtype: Any, memory: str, *shape: int) -> Any:
    """A tensor without numbers, in one of several memory formats."""
    if memory == "permuted":
        return torch.empty(shape[3], *shape[:3], dtype=dtype).permute(1, 2, 3, 0)
    if memory == "sliced":
        return torch.empty(shape[0], shape[1] + 3, *shape[2:], dtype=dtype)[:, 1:-2]
    return torch.empty(shape, dtype=dtype, memory_format=getattr(torch, memory))


@pytest.mark.parametrize("memory", ["channels_last", "contiguous_format", "permuted", "sliced"])
@pytest.mark.parametrize("channels, size", [(8, 6), (1, 6), (8, 1), (1, 1)])
def test_fake_results_are_what_a_kernel_allocates(torch: Any, sst: Any, memory: str, channels: int, size: int) -> None:
    from schedsearch.runtime.arrays import output_like
    from schedsearch.torch.operators.convolution import Conv2d
    from schedsearch.torch.operators.depthwise import DepthwiseConv2d, GradBoth
    from schedsearch.torch.operators.formats import torch_dtype
    from schedsearch.torch.operators.moves import PixelUnshuffle
    from schedsearch.torch.operators.quantized import QuantizedConv2d

    def image(dtype: Any = torch.float16, c: int = channels) -> Any:
        return strided(torch, dtype, memory, 2, c, size, size)

    window = "stride=2,1 padding=2,1,1,2"
    grown = ((size + 3 - 3) // 2 + 1, size + 3 - 3 + 1)
    dense, small = torch.empty(4, channels, 3, 3).half(), torch.empty(2 * channels, 1, 3, 3).half()
    none = (None,) * 3
    calls = [
        (Conv2d, (image(), dense, *none, window)),
        (Conv2d, (image(), dense, *none, f"{window} epilogue=depth_to_space:2")),
        (Conv2d, (image(torch.float32), dense.float().to(memory_format=torch.channels_last), *none, window)),
        (DepthwiseConv2d, (image(), small, *none, window)),
        (GradBoth, (image(), small, torch.empty(2, 2 * channels, *grown).half(), window)),
        (QuantizedConv2d, (image(torch.uint8), dense.to(torch.int8), *none, None, window)),
    ]
    calls += [(PixelUnshuffle, (image(), 2))] if size % 2 == 0 else []
    for kind, arguments in calls:
        operation = kind.of(*arguments)
        given = operation.named(arguments[: len(kind.tensors)])
        operation.check(given)
        made = operation.empty(given)
        expected = output_like(operation.workload(given), "channels_last")
        for found, like in zip(made if isinstance(made, tuple) else (made,), expected, strict=True):
            assert (tuple(found.shape), found.stride(), found.dtype) == (like.shape, like.strides, torch_dtype(like.dtype))


def test_weights_that_change_are_never_taken_from_a_copy(torch: Any, sst: Any) -> None:
    x, weight, bias, residual = images(torch)
    for each in (weight, weight.contiguous()):  # the second has another memory format than x
        before = sst.conv2d(x, each, bias, residual, padding=1)
        each.data.mul_(-2)  # which autograd's version counter does not see
        after = sst.conv2d(x, each, bias, residual, padding=1)
        added = bias.view(1, -1, 1, 1) + residual
        torch.testing.assert_close(after - added, -2 * (before - added))
        each.data.mul_(-0.5)


def test_addresses_without_alignment_are_taken(torch: Any, sst: Any) -> None:
    x, weight, bias, residual = images(torch)
    expected = sst.conv2d(x, weight, bias, residual, padding=1)
    memory = torch.empty(x.numel() + 1)
    shifted = torch.as_strided(memory, x.shape, x.stride(), 1).copy_(x)
    assert torch.equal(sst.conv2d(shifted, weight, bias, residual, padding=1), expected)


def test_threads_and_inference_mode(torch: Any, sst: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    x, weight, bias, residual = images(torch)

    @torch.inference_mode()  # type: ignore[misc, untyped-decorator]
    def layer(factor: int) -> Any:
        return sst.conv2d(x * factor, weight, bias, residual, padding=1)

    expected = [layer(factor) for factor in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(layer, list(range(8)) * 8))
    assert all(torch.equal(y, expected[place % 8]) for place, y in enumerate(found))
    assert expected[0].is_inference()


def test_autocast_casts_as_for_pytorchs_convolution(torch: Any, sst: Any) -> None:
    x, weight, bias, residual = images(torch)
    with sst.use(None), torch.autocast("cpu", torch.bfloat16):
        y = sst.conv2d(x, weight, bias, residual, padding=1)
        assert y.dtype is torch.nn.functional.conv2d(x, weight).dtype is torch.bfloat16


def test_whether_a_graph_is_captured_is_asked_of_the_tensors_gpu(
    torch: Any, sst: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from schedsearch.torch.operators import store

    current = [0]

    @contextlib.contextmanager
    def device(found: Any) -> Iterator[None]:
        current.append(found.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1] == 1)
    assert store.capturing(torch.device("cuda", 1))
    assert not store.capturing(torch.device("cuda", 0))
    assert not store.capturing(torch.device("cpu"))


@pytest.mark.parametrize("activation", ["relu", "relu6", "leaky_relu", "clip", "sigmoid", "silu", "hard_swish", "gelu"])
def test_activations_by_pytorch_are_those_of_the_stages(torch: Any, sst: Any, activation: str) -> None:
    """What PyTorch computes where there is no kernel, against the definition in NumPy."""
    from schedsearch.ops import STAGES

    x, weight, bias, _ = images(torch)
    exact = torch.nn.functional.conv2d(x.double(), weight.double(), bias.double()).numpy()
    with sst.use(None):
        y = sst.conv2d(x, weight, bias, activation=activation, negative_slope=0.3, low=-0.5, high=0.75)
    limits = (0.0, 6.0) if activation == "relu6" else (-0.5, 0.75)
    scalars = {"leaky_relu_slope": 0.3, "clip_min": limits[0], "clip_max": limits[1]}
    expected = STAGES["clip" if activation == "relu6" else activation].apply(exact, {}, scalars, {})
    torch.testing.assert_close(y.double(), torch.from_numpy(expected), rtol=1e-4, atol=1e-4)


def test_an_operator_refuses_gradients_that_it_does_not_have(torch: Any, sst: Any) -> None:
    from schedsearch.errors import ArgumentError

    x, weight, _, _ = images(torch)
    arguments = (x, weight.requires_grad_(), None, None, None, "", 0.0, 0.0)
    with pytest.raises(ArgumentError, match=r"weight of torch\.ops\.schedsearch\.conv2d requires"):
        torch.ops.schedsearch.conv2d(*arguments)
    with torch.no_grad(), sst.use(None):
        torch.ops.schedsearch.conv2d(*arguments)
    assert sst.conv2d(x, weight).requires_grad  # PyTorch computes the function where gradients are wanted
