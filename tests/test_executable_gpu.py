"""Executables on a GPU: one graph, arrays of torch, streams, and host arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import network_support as support
import numpy as np
import pytest

import schedsearch
from schedsearch.errors import ArgumentError
from schedsearch.executable.fixed import FixedNet
from schedsearch.network.graph import Network

pytestmark = pytest.mark.gpu
NETWORK = support.two_convolutions("float16", channels=16)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FixedNet]:
    """Built, saved and loaded again."""
    path = tmp_path_factory.mktemp("net") / "model.ssx"
    schedsearch.build(NETWORK, db="none.db", target="cuda", out=path).close()
    with schedsearch.load(path) as net:
        yield net


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def image(seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-1, 2, (1, 16, 6, 6)).astype(np.float16)


def expected(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rounded to float16 where the network rounds; the sums are integers that float32 holds."""
    first, second = NETWORK.nodes
    halves = {}
    for node in (first, second):
        part = support.truth(
            Network(NETWORK.inputs, (), NETWORK.values, NETWORK.constants, (node,)),
            {"x": x} if node is first else {"t": halves["t"]},
        )
        halves |= {name: array.astype(np.float16) for name, array in part.items()}
    return halves["y"]


def test_a_call_computes_and_its_outputs_are_new_arrays(net: FixedNet, torch: Any) -> None:
    kept = []
    for seed in range(3):
        x = torch.from_numpy(image(seed)).cuda()
        kept.append((seed, net(x)))
    for seed, y in kept:
        np.testing.assert_array_equal(y.cpu().numpy(), expected(image(seed)))


def test_calls_that_are_under_way_keep_the_arrays_that_they_were_given(net: FixedNet, torch: Any) -> None:
    images = [torch.from_numpy(image(seed)).cuda() for seed in range(4)]
    net(images[0])
    torch.cuda._sleep(20_000_000)  # all calls are enqueued before the first one runs
    kept = [net(x) for x in images]
    for seed, y in enumerate(kept):
        np.testing.assert_array_equal(y.cpu().numpy(), expected(image(seed)))


def test_an_input_may_have_any_address(net: FixedNet, torch: Any) -> None:
    for seed in range(2):
        x = torch.from_numpy(image(seed)).cuda()
        odd = torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)[1:].view(x.shape)  # not a multiple of 16 bytes
        odd.copy_(x)
        np.testing.assert_array_equal(net(odd).cpu().numpy(), expected(image(seed)))


def test_calls_follow_the_callers_stream(net: FixedNet, torch: Any) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.zeros((1, 16, 6, 6), device="cuda", dtype=torch.float16)
        torch.cuda._sleep(20_000_000)  # the input comes late on this stream
        x.copy_(torch.from_numpy(image()))
        y = net(x)
    stream.synchronize()
    np.testing.assert_array_equal(y.cpu().numpy(), expected(image()))


def test_a_bound_network_reads_and_writes_the_callers_memory(net: FixedNet, torch: Any) -> None:
    x = torch.from_numpy(image()).cuda()
    out = torch.empty_like(x)
    step = net.bind(x, out=out)
    assert step() is out
    np.testing.assert_array_equal(out.cpu().numpy(), expected(image()))
    x.copy_(torch.from_numpy(image(1)))
    step()
    np.testing.assert_array_equal(out.cpu().numpy(), expected(image(1)))
    step.close()


def test_host_arrays_are_copied_and_the_net_says_so(net: FixedNet) -> None:
    with pytest.warns(UserWarning, match="x: in the host's memory"):
        y = net(image())
    np.testing.assert_array_equal(y, expected(image()))
    with pytest.raises(ArgumentError, match="x is on cpu:0, the kernel runs on cuda:0"):
        net.bind(image())


def test_instances_run_at_the_same_time_on_streams_of_their_own(net: FixedNet, torch: Any) -> None:
    other = net.instance()
    xs = [torch.from_numpy(image(seed)).cuda() for seed in range(2)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in xs]
    ys = [torch.empty_like(x) for x in xs]
    for _ in range(20):
        for each, x, y, stream in zip((net, other), xs, ys, streams):
            each(x, out=y, stream=stream)
    torch.cuda.synchronize()
    for seed, y in enumerate(ys):
        np.testing.assert_array_equal(y.cpu().numpy(), expected(image(seed)))
    other.close()


def test_inputs_and_outputs_may_be_rewritten_right_after_a_call(net: FixedNet, torch: Any) -> None:
    """By two instances on two streams: no kernel of a network runs on when what follows it in the stream begins."""
    seeds = list(range(4))
    images = [torch.from_numpy(image(seed)).cuda() for seed in seeds]
    with net.instance() as other:
        streams, kept = [torch.cuda.Stream() for _ in range(2)], []
        torch.cuda.synchronize()
        arrays = [(torch.empty_like(images[0]), torch.empty_like(images[0])) for _ in streams]
        for turn in range(100):
            for number, (each, (x, y), stream) in enumerate(zip((net, other), arrays, streams)):
                seed = (turn + number) % len(seeds)
                with torch.cuda.stream(stream):
                    x.copy_(images[seed])
                    each(x, out=y)
                    kept.append((seed, y.clone()))
                    x.fill_(float("nan"))
                    y.fill_(float("nan"))
        torch.cuda.synchronize()
    wanted = [expected(image(seed)) for seed in seeds]
    for seed, y in kept:
        np.testing.assert_array_equal(y.cpu().numpy(), wanted[seed])


def test_the_trace_and_the_times_have_every_call(net: FixedNet) -> None:
    np.testing.assert_array_equal(net.trace(image())["y"], expected(image()))
    times = net.measure(20)
    assert len(times.calls_ns) == 4 and min(times.total_ns, *times.calls_ns) > 0


def test_a_torch_module_is_built_by_torch_export(torch: Any) -> None:
    pytest.importorskip("onnxscript")
    layers = torch.nn
    module = layers.Sequential(layers.Conv2d(16, 16, 3, padding=1), layers.ReLU()).cuda()
    x = torch.from_numpy(image()).cuda()
    with schedsearch.build(module, x.float(), db="none.db", target="cuda", dtype="float16") as net:
        y = net(x)
        torch.testing.assert_close(y.float(), module(x.float()), rtol=1e-2, atol=1e-2)


def test_a_channels_last_tensor_gives_one_in_every_call(torch: Any) -> None:
    with schedsearch.build(NETWORK.with_io_layout("NHWC"), db="none.db", target="cuda") as net:
        assert not any(call.is_conversion for call in net.steps)
        for seed in range(2):  # the second call takes the short path
            x = torch.from_numpy(image(seed)).cuda().contiguous(memory_format=torch.channels_last)
            y = net(x)
            assert y.is_contiguous(memory_format=torch.channels_last)
            np.testing.assert_array_equal(y.cpu().numpy(), expected(image(seed)))
