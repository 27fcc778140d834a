"""Networks of ours for parts of a model that has other nodes, too: in `optimize_` and in torch.compile's backend."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-integrations installs it")
pytest.importorskip("onnxscript")

from test_torch_backend import compiled, db  # noqa: E402, F401
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch_support import Clock, Scattered, close, image, prepared  # noqa: E402

import schedsearch.torch as sst  # noqa: E402
from schedsearch.executable.fixed import FixedNet  # noqa: E402
from schedsearch.network import torch_export  # noqa: E402
from schedsearch.torch.compiler import inductor  # noqa: E402
from schedsearch.torch.networks import frozen_weights, functional_graph, network_op  # noqa: E402
from schedsearch.torch.networks.convolutions_alone import convolutions_alone  # noqa: E402
from schedsearch.torch.networks.frozen_weights import FrozenWeights  # noqa: E402
from schedsearch.torch.networks.subgraphs import partition, whole  # noqa: E402
from schedsearch.torch.refusal import Refusal  # noqa: E402

pytestmark = pytest.mark.integrations
nn = torch.nn


class Between(nn.Module):  # type: ignore[misc, name-defined]
    """Two parts with an operator between them that schedsearch lacks; the second reads the first, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 1))
        self.last = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 1))
        self.scattered = Scattered()

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        return self.last(self.scattered(y) + y)


@pytest.fixture(autouse=True)
def _without_autograd() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad(), sst.use(None):
        yield
    torch._dynamo.reset()


@pytest.fixture
def optimize(db: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`optimize_` with default kernels and networks that are always faster, beside PyTorch without a compiler."""
    monkeypatch.setattr(inductor, "compiled_or_eager", lambda graph, inputs: graph)

    def call(model: Any, example: Any, **options: Any) -> Any:
        given = {"db": db, "allow": ("default",), "timer": Clock(), "networks": True, **options}
        return sst.optimize_(model, example, **given)

    return call


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts that networks computed, in order."""
    found: list[str] = []
    compute = network_op.FrozenNetwork.__call__

    def keep(self: Any, given: Any) -> Any:
        found.append("network")
        return compute(self, given)

    monkeypatch.setattr(network_op.FrozenNetwork, "__call__", keep)
    return found


# --- Parts of graphs --------------------------------------------------------------------------------------------------
def exported(model: Any, *given: Any) -> Any:
    """A model's graph without writes, and its parameters by node."""
    program = torch.export.export(model, given, strict=False)
    functional_graph.without_writes(program.graph)
    tensors = {**program.state_dict, **program.constants}
    names = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.target}
    weights = {node: tensors[names[node.name]] for node in program.graph.nodes if node.name in names}
    return torch.fx.GraphModule(program.graph_module, program.graph), weights


def reaches(start: Any, nodes: set[Any], outside: bool = False) -> bool:
    """Whether a path leaves a set of nodes and comes back, by brute force."""
    return any((outside and user in nodes) or (user not in nodes and reaches(user, nodes, True)) for user in start.users)


class Splits(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.scattered = Scattered()

    def forward(self, x: Any) -> Any:
        first, second = x.chunk(2, 1)
        y = torch.relu(first) * 2 + torch.sigmoid(second)
        z = self.scattered(y)
        return torch.tanh(z) + torch.relu(y), self.scattered(z)


@pytest.mark.parametrize(("make", "missing"), [(Between, 1), (Splits, 2)], ids=["between", "splits"])
def test_parts_are_convex_and_compute_what_their_nodes_do(make: Any, missing: int) -> None:
    model, x = prepared(make()), image()
    graph, weights = exported(model, x)
    found, left = partition(graph, weights)
    assert [(each.what, each.count) for each in left] == [("scatter_reduce.two", missing)]
    assert "node_scatter_reduce: reduction: reduction 'mul' is not possible" in str(left[0])
    values: dict[Any, Any] = {}

    class Keep(torch.fx.Interpreter):  # type: ignore[misc, name-defined]
        def run_node(self, node: Any) -> Any:
            values[node] = super().run_node(node)
            return values[node]

    Keep(graph).run(*(weights.get(node, x) for node in graph.graph.nodes if node.op == "placeholder"))
    taken = [node for part in found for node in part.nodes]
    assert found and len(taken) == len(set(taken))
    for part in found:
        assert not any(reaches(node, set(part.nodes)) for node in part.nodes)
        got = part.module(*(values[node] for node in part.inputs))
        assert all(torch.equal(one, values[node]) for one, node in zip(got, part.outputs, strict=True))


class Twice(nn.Module):  # type: ignore[misc, name-defined]
    """It returns a value that it reads itself, another one twice, and does not read its second input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1)

    def forward(self, x: Any, unread: Any) -> Any:
        y = self.conv(x)
        z = torch.relu(y)
        return z, y, z


def test_a_whole_graph_is_a_subgraph_that_returns_what_the_graph_returns() -> None:
    model, x = prepared(Twice()), image()
    graph, weights = exported(model, x, image())
    found = whole(graph, weights)
    assert [node.name for node in found.inputs] == ["x"] and set(found.weights) == set(weights)
    assert all(torch.equal(one, other) for one, other in zip(found.module(x), model(x, image()), strict=True))
    buffers = {each.data_ptr() for each in found.module.buffers()}
    assert buffers == {each.data_ptr() for each in weights.values()}


def test_parts_leave_out_what_the_caller_keeps() -> None:
    graph, weights = exported(prepared(Between()), image())
    found, _ = partition(graph, weights, keep=lambda node: node.name == "conv2d_2")
    assert all(node.name != "conv2d_2" for part in found for node in part.nodes)


# --- Graphs without writes --------------------------------------------------------------------------------------------
def _chain(x: Any) -> Any:
    y = x * 2
    y.relu_()
    y += x
    return y.clamp_(0, 1), y.sum()


def _of_a_copy(x: Any) -> Any:
    y = x.clone()
    z = y + 1
    y.mul_(3)
    return z, y


def _through_a_view(x: Any) -> Any:
    y = x * 2
    view = y.permute(0, 2, 3, 1)
    view.add_(1)
    return y, view


def _of_an_input(x: Any) -> Any:
    return x.relu_()


def _of_a_place(x: Any) -> Any:
    y = x * 2
    y[0] = 0
    return y


@pytest.mark.parametrize("run", [_chain, _of_a_copy])
def test_writes_become_results(run: Any) -> None:
    graph = torch.export.export(_Call(run), (image(),), strict=False).graph_module
    functional_graph.without_writes(graph.graph)
    graph.recompile()
    x, expected = image(), run(image())
    assert all(torch.equal(*pair) for pair in zip(graph(x), expected, strict=True)) and torch.equal(x, image())
    assert not any(torch.fx.Node.is_impure(node) for node in graph.graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("run", [_through_a_view, _of_an_input, _of_a_place])
def test_writes_to_shared_memory_are_refused(run: Any) -> None:
    graph = torch.export.export(_Call(run), (image(),), strict=False).graph_module
    with pytest.raises(Refusal, match="writes to memory"):
        functional_graph.without_writes(graph.graph)


class _Call(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Any) -> Any:
        return self.run(x)


# --- optimize_ --------------------------------------------------------------------------------------------------------
def test_networks_compute_parts_of_a_model(optimize: Any, ran: list[str]) -> None:
    model, x = prepared(Between()), image()
    plain = copy.deepcopy(model)
    report = optimize(model, x)
    assert [(part.name, part.served) for part in report.parts] == [("add to last.2", True), ("first.0 to first.2", True)]
    assert "PyTorch computes scatter_reduce.two (scattered): node_scatter_reduce: reduction" in str(report)
    ran.clear()
    assert close(model(x), plain(x)) and model(x).stride() == plain(x).stride() and ran == ["network"] * 4
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    ran.clear()
    assert close(fast(x), plain(x)) and ran == ["network"] * 2
    twin = copy.deepcopy(model)
    for each in (model, plain):
        each.first[0].weight.mul_(-2)
    ran.clear()
    with pytest.warns(UserWarning, match="weights of first.0 to first.2 are not those that its network was built with"):
        assert close(model(x), plain(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert close(model(x), plain(x)) and close(fast(x), plain(x)) and ran == ["network"] * 3
    with pytest.warns(UserWarning, match="weights of add to last.2 are not those"):  # a copy has weights of its own
        assert close(twin(x), sst.revert_(copy.deepcopy(twin))(x))
    assert "forward" not in vars(sst.revert_(model)) and close(model(x), plain(x))


def test_a_model_that_the_importer_takes_is_exported_once_for_its_network(
    optimize: Any, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exports: list[str] = []
    export_ = torch_export.exported
    monkeypatch.setattr(torch_export, "exported", lambda *given: exports.append("export") or export_(*given))
    model, x = prepared(Between().last), image()
    plain = copy.deepcopy(model)
    report = optimize(model, x)
    assert [part.served for part in report.parts] == [True] and exports == ["export"]
    ran.clear()
    assert close(model(x), plain(x)) and ran == ["network"]


def test_the_operator_keeps_the_rules_of_pytorch(optimize: Any) -> None:
    model, x = prepared(Between()), image()
    optimize(model, x)
    key, call = next(each for each in list(network_op._networks.items())[::-1] if each[1].name == "add to last.2")
    weights = [parameter.detach() for name, parameter in model.named_parameters() if name.startswith("last")]
    torch.library.opcheck(torch.ops.schedsearch.network.default, (key, [image(), image()], weights))
    assert call.fake([image()])[0].shape == (1, 4, 6, 6)


class Convolutions(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc, name-defined]
    """Keeps what PyTorch's convolutions are called with, but for their biases, in the terms of `aten.convolution`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            x, weight, _, *window = args
            self.found.append((tuple(x.shape), x.is_contiguous(), tuple(weight.shape), *map(str, window)))
        return func(*args, **(kwargs or {}))


def test_the_bound_of_a_part_is_its_convolutions_in_both_formats() -> None:
    layers = (
        nn.Conv2d(8, 6, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding="same", groups=2),
        nn.Conv2d(6, 4, 1),
    )
    model, x = nn.Sequential(*layers).eval(), image().contiguous()
    graph, weights = exported(model, x)
    with Convolutions() as theirs:
        model(x)
    for is_contiguous, run in zip((True, False), convolutions_alone(whole(graph, weights).module, torch.device("cpu"))):
        with Convolutions() as ours:
            run()
        assert [(shape, *rest) for shape, _, *rest in ours.found] == [(shape, *rest) for shape, _, *rest in theirs.found]
        assert len(ours.found) == 3 and all(each[1] == is_contiguous for each in ours.found)


def test_images_without_a_batch_have_no_bound() -> None:
    graph, weights = exported(nn.Conv2d(8, 4, 1).eval(), torch.ones(8, 6, 6))
    assert convolutions_alone(whole(graph, weights).module, torch.device("cpu")) == []


def test_a_device_without_memory_for_the_convolutions_gives_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    graph, weights = exported(nn.Conv2d(8, 4, 1).eval(), image())
    module = whole(graph, weights).module
    assert len(convolutions_alone(module, torch.device("cpu"))) == 2
    monkeypatch.setattr(torch, "empty_strided", full)
    assert convolutions_alone(module, torch.device("cpu")) == []


@pytest.mark.parametrize(
    ("patch", "torch_us", "asked"),
    [({}, 3.0, False), ({}, 0.5, True), ({"max_autotune": True}, 3.0, True)],
    ids=["faster", "slower", "autotuned"],
)
def test_pytorchs_compiler_is_asked_if_a_network_is_not_faster_than_the_convolutions_alone(
    optimize: Any, monkeypatch: pytest.MonkeyPatch, patch: dict[str, Any], torch_us: float, asked: bool
) -> None:
    from torch._inductor import config

    compiled_graphs: list[Any] = []
    monkeypatch.setattr(inductor, "compiled_or_eager", lambda graph, inputs: compiled_graphs.append(graph) or graph)
    with config.patch(patch):
        (part,) = optimize(prepared(Between().last), image(), timer=Clock(torch_us=torch_us)).parts
    assert bool(compiled_graphs) == asked and part.is_least == (not asked) and part.served == (torch_us == 3.0)


def test_parts_that_lose_are_pytorchs(optimize: Any, ran: list[str]) -> None:
    model, x = prepared(Between()), image()
    report = optimize(model, x, timer=Clock(torch_us=0.5))
    assert {part.reason for part in report.parts} == {"PyTorch is as fast or faster"} and not report.swapped
    ran.clear()
    model(x)
    assert not ran and "forward" not in vars(model)


# --- torch.compile ----------------------------------------------------------------------------------------------------
def test_the_backend_has_networks_for_parts_until_weights_change(compiled: Any, ran: list[str]) -> None:
    model, x = prepared(Between()), image()
    fast, reports = compiled(model, timer=Clock(kernels_for_layers=2.0))
    assert close(fast(x), model(x))
    network = reports[0].network
    assert network.served and [part.served for part in network.parts] == [True, True]
    assert network.left == (
        "PyTorch computes scatter_reduce (scattered): node_scatter_reduce: reduction: reduction 'mul' is not possible; "
        "allowed: none, add, max, min",
    )
    ran.clear()
    assert close(fast(2 * x), model(2 * x)) and ran == ["network"] * 2
    model.last[2].bias.add_(1)
    ran.clear()
    assert close(fast(x), model(x)) and not ran
    assert reports[-1].network.reason.startswith("weights have changed")


class Times:
    """A timer that has these times, in turns."""

    def __init__(self, *times_ns: float) -> None:
        self._times = iter(times_ns)

    def ns(self, runs: Any) -> float:
        for run in runs:
            run()
        return next(self._times)


@pytest.fixture
def compilations(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of nodes of each graph that Inductor compiles."""
    found: list[int] = []
    compile_ = inductor.compiled

    def keep(graph: Any, inputs: Any, mode: str) -> Any:
        found.append(len(graph.graph.nodes))
        return compile_(graph, inputs, mode)

    monkeypatch.setattr(inductor, "compiled", keep)
    return found


def test_parts_that_win_together_are_not_compiled(compiled: Any, compilations: list[int]) -> None:
    model, x = prepared(Between()), image()
    fast, reports = compiled(model, layers=False, timer=Times(1.0, 2.0))
    assert close(fast(x), model(x))
    network = reports[-1].network
    assert network.served and (network.ours_us, network.torch_us) == (1e-3, 2e-3)
    assert len(compilations) == 2  # the graph, and what is left beside the parts


def test_parts_that_lose_together_are_tried_one_by_one(
    compiled: Any,
    compilations: list[int],
    ran: list[str],
) -> None:
    model, x = prepared(Between()), image()
    times = Times(3.0, 2.0, 1.0, 2.0, 3.0, 2.0, 1.0, 2.0)  # ours, PyTorch's: of both, the first, the second, the first alone
    fast, reports = compiled(model, layers=False, timer=times)
    assert close(fast(x), model(x))
    network = reports[-1].network
    assert network.served
    assert [(part.served, part.ours_us) for part in network.parts] == [(True, 1e-3), (False, 3e-3)]
    assert network.parts[1].reason == "PyTorch is as fast or faster"
    assert len(compilations) == 5  # the graph, the rest, two parts, the rest with one part
    ran.clear()
    assert close(fast(2 * x), model(2 * x)) and ran == ["network"]


def test_a_graph_that_is_slower_with_networks_for_its_parts_is_inductors(
    compiled: Any,
    ran: list[str],
) -> None:
    model, x = prepared(Between()), image()
    times = Times(3.0, 2.0, 1.0, 2.0, 1.0, 2.0)  # both win alone
    fast, reports = compiled(model, layers=False, timer=times)
    assert close(fast(x), model(x))
    network = reports[-1].network
    assert not network.served and network.reason == "it is not faster with networks for its parts"
    assert {(part.served, part.reason) for part in network.parts} == {(False, "the whole graph is not faster with it")}
    ran.clear()
    assert close(fast(2 * x), model(2 * x)) and not ran


# --- What networks hold -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("with_pytorchs_own", [True, False])
def test_new_weights_cannot_lie_where_the_copied_ones_lay(with_pytorchs_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator gives memory that was freed to the next tensor of its size, which has version 0, too."""
    if not with_pytorchs_own:  # a PyTorch without the function that compares addresses
        monkeypatch.setattr(frozen_weights, "_lie_at", frozen_weights._each_lies_at)
    weight = torch.ones(64, 64)
    frozen, memory = FrozenWeights([weight]), StorageWeakRef(weight.untyped_storage())
    assert frozen.are([weight])
    del weight
    assert not memory.expired()
    assert not any(frozen.are([torch.full((64, 64), float(value))]) for value in range(8))
    del frozen
    assert memory.expired()


def test_networks_of_a_model_that_is_reverted_are_freed(optimize: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[Any] = []
    close_net = FixedNet.close
    gc.collect()
    monkeypatch.setattr(FixedNet, "close", lambda self: (freed.append(self), close_net(self)))
    model, x = prepared(Between()), image()
    optimize(model, x)
    twin = copy.deepcopy(model)
    sst.revert_(model)
    gc.collect()
    assert not freed  # the copy runs them, too
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert close(twin(x), model(x))
    sst.revert_(twin)
    gc.collect()
    assert len(freed) == 2


def test_statistics_of_a_batch_norm_in_training_are_noticed() -> None:
    """PyTorch writes to them without a new version."""
    norm = nn.BatchNorm2d(3).train()
    statistics = [norm.running_mean, norm.running_var]
    frozen, others = FrozenWeights(statistics), FrozenWeights([nn.BatchNorm2d(3).running_mean])
    assert frozen.are(statistics)
    norm(image(2, 3, 4, 4))
    assert not frozen.are(statistics) and others.are([others._kept[0]])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_steps_of_optimizers_are_noticed(kind: Any, fused: bool) -> None:
    """A fused one writes to parameters without a new version."""
    changed, kept = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    changed.grad = torch.ones(4)  # the other one has no gradient, so no step changes it
    frozen = {each: FrozenWeights([each]) for each in (changed, kept)}
    kind([changed, kept], lr=0.1, fused=fused).step()
    assert not frozen[changed].are([changed]) and frozen[kept].are([kept])
    assert FrozenWeights([changed]).are([changed])
