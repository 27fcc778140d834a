"""`schedsearch.torch` on a GPU: numbers, gradients, streams, CUDA graphs and compiled graphs, against PyTorch in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch with CUDA")

pytestmark = pytest.mark.gpu

TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-5}
MEMORY = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
F = torch.nn.functional


@pytest.fixture(scope="module")
def sst(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The package with kernels for every call: those of the default level are built."""
    import schedsearch.torch as package

    with package.use(tmp_path_factory.mktemp("records") / "none.db", allow=("default",)):
        yield package


def tensors(dtype: Any, memory: str = "channels_last", channels: int = 32) -> tuple[Any, ...]:
    """x, weight, bias and residual of a small layer."""
    torch.manual_seed(0)
    shapes = ((2, channels, 14, 14), (64, channels, 3, 3), (64,), (2, 64, 14, 14))
    x, weight, bias, residual = (torch.randn(shape, device="cuda") for shape in shapes)
    weight /= (9 * channels) ** 0.5
    images = (each.to(dtype).to(memory_format=MEMORY[memory]) for each in (x, weight, residual))
    x, weight, residual = images
    return x, weight, bias.to(dtype), residual


def served_by_a_kernel(sst: Any) -> bool:
    return sst.served()[-1].kernel is not None


def close(found: Any, exact: Any, dtype: Any) -> None:
    bound = TOLERANCES[dtype] * float(exact.abs().max())
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=bound)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_convolutions(sst: Any, dtype: Any, memory: str) -> None:
    x, weight, bias, residual = tensors(dtype, memory)
    y = sst.conv2d(x, weight, bias, residual, padding=1, activation="relu", precision="fp32")
    exact = torch.relu(F.conv2d(x.double(), weight.double(), bias.double(), padding=1) + residual.double())
    assert served_by_a_kernel(sst)
    assert y.dtype is dtype and y.is_contiguous(memory_format=MEMORY[memory])
    close(y, exact, dtype)


def test_opcheck(sst: Any) -> None:
    x, weight, bias, residual = tensors(torch.float16)
    permuted = x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    for image in (x, permuted):
        arguments = (image, weight, bias, None, residual, "padding=1,1,1,1 epilogue=bias,residual,relu", 0.0, 0.0)
        torch.library.opcheck(torch.ops.schedsearch.conv2d.default, arguments)


def test_calls_on_two_streams_do_not_disturb_each_other(sst: Any) -> None:
    x, weight, bias, residual = tensors(torch.float16)
    images = [x, x + 1]
    expected = [sst.conv2d(each, weight, bias, residual, padding=1) for each in images]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in images]
    found: list[list[Any]] = [[], []]
    for _ in range(50):
        for place, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[place].append(sst.conv2d(images[place], weight, bias, residual, padding=1))
    torch.cuda.synchronize()
    for each, results in zip(expected, found):
        assert all(torch.equal(each, result) for result in results)


def test_a_captured_graph_sees_new_images_and_new_weights(sst: Any) -> None:
    x, weight, bias, residual = tensors(torch.float16)

    def layer() -> Any:
        return sst.conv2d(x, weight, bias, residual, padding=1, activation="relu")

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer()
    for change in (x, weight):
        change.data.mul_(-0.5)  # in place and past the version counter, as some fine-tuning code does
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, layer())


def test_weights_in_another_memory_format_are_copied_in_every_call(sst: Any) -> None:
    x, weight, bias, _ = tensors(torch.float16)
    plain = weight.contiguous()
    first = sst.conv2d(x, plain, bias, padding=1)
    plain.data.mul_(2)
    second = sst.conv2d(x, plain, bias, padding=1)
    assert not torch.equal(first, second)
    assert torch.equal(second, sst.conv2d(x, weight * 2, bias, padding=1))


def test_a_call_that_is_new_during_a_capture_is_left_to_pytorch(sst: Any) -> None:
    x, weight, bias, _ = tensors(torch.float16, channels=24)
    F.conv2d(x, weight, padding=2)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        F.conv2d(x, weight, padding=2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.warns(RuntimeWarning, match="call it once before the capture"), torch.cuda.graph(graph):
        y = sst.conv2d(x, weight, bias, padding=2)
    graph.replay()
    torch.cuda.synchronize()
    close(y, F.conv2d(x.double(), weight.double(), bias.double(), padding=2), torch.float16)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_gradients_of_a_depthwise_layer(sst: Any, dtype: Any, memory: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 32, 17, 15, device="cuda").to(dtype).to(memory_format=MEMORY[memory]).requires_grad_()
    weight = torch.randn(32, 1, 3, 3, device="cuda").to(dtype).requires_grad_()
    bias = torch.randn(32, device="cuda").to(dtype).requires_grad_()
    factor = torch.randn(4, 32, 9, 8, device="cuda").to(dtype)
    y = sst.depthwise_conv2d(x, weight, bias, stride=2, padding=1)
    (y * factor).sum().backward()
    assert served_by_a_kernel(sst)
    exact = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
    of_exact = F.conv2d(*exact, stride=2, padding=1, groups=32)
    (of_exact * factor.double()).sum().backward()
    close(y, of_exact, dtype)
    for found, each in zip((x, weight, bias), exact):
        close(found.grad, each.grad, dtype)
    assert x.grad.is_contiguous(memory_format=MEMORY[memory])


def test_deterministic_algorithms_give_the_same_bits(sst: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 64, 28, 28, device="cuda").to(memory_format=torch.channels_last)
    dy = torch.randn_like(x)
    torch.use_deterministic_algorithms(True)
    try:
        found = [torch.ops.schedsearch.depthwise_conv2d_grad_weight(x, dy, [3, 3], "padding=1,1,1,1") for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert sst.served()[-1].kernel.workload.params["deterministic"]
    assert all(torch.equal(found[0], each) for each in found)


def test_autocast_computes_in_half(sst: Any) -> None:
    x, weight, bias, residual = tensors(torch.float32)
    with torch.autocast("cuda", torch.float16):
        y = sst.conv2d(x, weight, bias, residual, padding=1)
    assert y.dtype is torch.float16 and served_by_a_kernel(sst)
    exact = F.conv2d(x.double(), weight.double(), bias.double(), padding=1) + residual.double()
    close(y, exact, torch.float16)


def test_inductor_compiles_a_layer_to_one_graph(sst: Any) -> None:
    x, weight, bias, residual = tensors(torch.float16)

    def layer(x: Any) -> Any:
        return sst.conv2d(x * 2, weight, bias, residual, padding=1, activation="relu") + 1

    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("memory", MEMORY)
def test_pixel_shuffles(sst: Any, memory: str) -> None:
    x = torch.randn(2, 16, 12, 8, device="cuda").half().to(memory_format=MEMORY[memory])
    assert torch.equal(sst.pixel_shuffle(x, 2), F.pixel_shuffle(x, 2)) and served_by_a_kernel(sst)
    assert torch.equal(sst.pixel_unshuffle(x, 4), F.pixel_unshuffle(x, 4)) and served_by_a_kernel(sst)


def test_layouts(sst: Any) -> None:
    x = torch.randn(2, 48, 5, 6, device="cuda").half()
    packed = sst.layout_transform(x, "NCHW", "NCHW32c")
    assert served_by_a_kernel(sst)
    padded = F.pad(x, (0, 0, 0, 0, 0, 16)).view(2, 2, 32, 5, 6).permute(0, 1, 3, 4, 2)
    assert torch.equal(packed, padded)
    assert torch.equal(sst.layout_transform(packed, "NCHW32c", "NCHW", (2, 48, 5, 6)), x)


def test_tensors_on_the_second_gpu(sst: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, weight, bias, residual = tensors(torch.float16)
    expected = sst.conv2d(x, weight, bias, residual, padding=1)
    y = sst.conv2d(*(each.to("cuda:1") for each in (x, weight, bias, residual)), padding=1)
    assert y.device == torch.device("cuda", 1) and served_by_a_kernel(sst)
    assert torch.equal(y.to("cuda:0"), expected)
