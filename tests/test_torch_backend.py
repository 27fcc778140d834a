"""torch.compile(model, backend="schedsearch"): layers by kernels, or the whole network, where they are faster and right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-integrations installs it")
pytest.importorskip("onnxscript")

from torch_support import Clock, Residual, Scattered, close, image, prepared  # noqa: E402

import schedsearch.torch as sst  # noqa: E402
from schedsearch.torch.compiler import selected_graph  # noqa: E402
from schedsearch.torch.compiler.backend import schedsearch  # noqa: E402
from schedsearch.torch.layers.report import Report  # noqa: E402
from schedsearch.torch.networks import frozen_network  # noqa: E402
from schedsearch.torch.refusal import Refusal  # noqa: E402

pytestmark = pytest.mark.integrations
nn = torch.nn


@pytest.fixture(autouse=True)
def _without_autograd() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad(), sst.use(None):
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("backend") / "records.db"


@pytest.fixture
def compiled(db: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, list[Report]]]:
    """Compiles with default kernels that are always faster; Inductor is replaced by what interprets its graph, which takes
    no compiler."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    from schedsearch.torch.compiler import inductor

    interpreted = aot_autograd(fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward))
    monkeypatch.setattr(inductor, "compiled", lambda graph, inputs, mode: interpreted(graph, list(inputs)))

    def call(model: Any, **options: Any) -> tuple[Any, list[Report]]:
        reports: list[Report] = []
        given = {"db": db, "allow": ("default",), "timer": Clock(), "report": reports.append, **options}
        return torch.compile(model, backend=schedsearch, options=given, fullgraph=True), reports

    return call


def network() -> Any:
    return prepared(nn.Sequential(Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)))


def test_layers_are_rewritten_and_the_rest_is_compiled(compiled: Any) -> None:
    model, x = network(), image()
    fast, reports = compiled(model, network=False)
    assert close(fast(x), model(x))
    assert [layer.name for layer in reports[0].swapped] == ["0.conv1", "0.conv2"]
    model[0].bn1.weight.mul_(3)
    assert close(fast(x), model(x))


def test_a_whole_network_serves_until_its_weights_change(compiled: Any) -> None:
    model, x = network(), image()
    fast, reports = compiled(model, layers=False)
    assert close(fast(x), model(x)) and close(fast(2 * x), model(2 * x))
    assert [str(report).split(":")[0] for report in reports] == ["a network of ours serves"]
    assert (reports[0].network.ours_us, reports[0].network.torch_us) == (1.0, 3.0) and reports[0].network.error < 1e-5
    model[3].weight.mul_(-2)
    assert close(fast(x), model(x))
    assert reports[-1].network.reason.startswith("weights have changed since it was built")
    assert close(fast(x), model(x)) and len(reports) == 2


@pytest.mark.parametrize("change", ["a write", "another tensor", "statistics", "a fused step"])
def test_weights_are_compared_without_the_guards_of_torch_compile(compiled: Any, change: str) -> None:
    model, x = network(), image()
    fast, reports = compiled(model, layers=False, guard_filter_fn=torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe)
    assert close(fast(x), model(x)) and reports[0].network.served
    if change == "another tensor":
        model[3].weight.data = torch.randn_like(model[3].weight)  # a new address, and the same version
    elif change == "statistics":
        model.train()(3 * x)  # the same version
        model.eval()
    elif change == "a fused step":
        model[3].weight.grad = torch.ones_like(model[3].weight)
        torch.optim.SGD(model.parameters(), lr=1.0, fused=True).step()  # the same version
    else:
        model[3].weight.mul_(-2)
    assert close(fast(x), model(x)) and not reports[-1].network.served


def test_a_network_is_captured_with_its_weights(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = network(), image()
    fast, reports = compiled(model, layers=False)
    monkeypatch.setattr(selected_graph, "capturing", lambda device: True)
    assert close(fast(x), model(x)) and not reports  # it cannot be built in a capture
    monkeypatch.setattr(selected_graph, "capturing", lambda device: False)
    fast(x)
    monkeypatch.setattr(selected_graph, "capturing", lambda device: True)
    monkeypatch.setattr(frozen_network, "capturing", lambda device: device.type == "cpu")
    monkeypatch.setattr(frozen_network, "_ALIGNMENT", 16)  # what memory of CPUs has
    before = len(frozen_network._captured_nets)
    assert close(fast(x), model(x)) and close(fast(2 * x), model(2 * x))
    (net,) = frozen_network._captured_nets[before:]
    model[3].weight.mul_(-2)
    assert close(fast(x), model(x)) and len(reports) == 1  # a new capture does not take the old weights
    monkeypatch.setattr(selected_graph, "capturing", lambda device: False)
    assert close(fast(x), model(x)) and len(reports) == 2
    assert not close(torch.as_tensor(net(x)), model(x))  # still open, as graphs use it, with the weights of the capture


def test_a_network_that_is_slower_does_not_serve(compiled: Any) -> None:
    model, x = network(), image()
    fast, reports = compiled(model, layers=False, timer=Clock(torch_us=0.5))
    assert close(fast(x), model(x)) and reports[-1].network.reason == "PyTorch is as fast or faster"


def test_another_shape_is_a_graph_of_its_own(compiled: Any) -> None:
    model = network()
    fast, reports = compiled(model, layers=False)
    for x in (image(), image(2, 8, 6, 6), image()):
        assert close(fast(x), model(x))
    assert len(reports) == 2


class InPlace(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1)

    def forward(self, x: Any) -> Any:
        return self.conv(torch.relu_(x))


class ConvolvedAndScattered(nn.Sequential):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(8, 8, 1), Scattered())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (InPlace, "the graph writes to its inputs"),
        (ConvolvedAndScattered, "no operator for these nodes of the model: ScatterElements"),
    ],
    ids=["writes", "unknown_operator"],
)
def test_a_graph_that_no_network_computes_keeps_its_layers(compiled: Any, model: Any, reason: str) -> None:
    made, x, y = prepared(model()), image(), image()
    fast, reports = compiled(made)
    assert close(fast(x), made(y)) and torch.equal(x, y)
    assert reason in reports[0].network.reason and len(reports[0].swapped) == 1
    assert "--fallback" not in reports[0].network.reason  # `build` has it


def test_depthwise_convolutions_are_trained_with_kernels(compiled: Any) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    model = prepared(model).train()
    other, x = copy.deepcopy(model), image(2, 8, 6, 6)
    fast, reports = compiled(model)
    with torch.enable_grad():
        got, expected = fast(x), other(x)
        got.square().sum().backward()
        expected.square().sum().backward()
    assert close(got, expected)
    assert [(layer.name, layer.swapped) for layer in reports[0].layers] == [("0", True)]
    computed = {str(each).split()[0] for each in sst.served() if each.kernel is not None}
    assert "depthwise_conv2d" in computed
    for ours, theirs in zip(model.parameters(), other.parameters()):
        assert float((ours.grad - theirs.grad).abs().max()) < 1e-4 * (1 + float(theirs.grad.abs().max()))


def test_deterministic_algorithms_are_inductors(compiled: Any) -> None:
    fast, reports = compiled(network())
    torch.use_deterministic_algorithms(True)
    try:
        fast(image())
    finally:
        torch.use_deterministic_algorithms(False)
    assert reports[0].notes == ("Inductor compiles the graph: deterministic algorithms are asked for",)


def test_unknown_options_are_refused_with_the_known_ones(compiled: Any) -> None:
    fast, _ = compiled(network(), trails=5)
    with pytest.raises(Exception, match=r"unknown option 'trails' \(did you mean 'trials'\?\); allowed: db, tune, trials"):
        fast(image())


def test_inductor_compiles_around_the_kernels(db: Path) -> None:
    model, x = network(), image()
    options = {"db": db, "allow": ("default",), "timer": Clock(), "network": False}
    fast = torch.compile(model, backend=schedsearch, options=options, fullgraph=True)
    assert close(fast(x), model(x))


def test_the_backend_is_found_by_its_name() -> None:
    import configparser
    import importlib

    setup = configparser.ConfigParser()
    setup.read(Path(__file__).resolve().parents[1] / "setup.cfg")
    name, _, place = setup["options.entry_points"]["torch_dynamo_backends"].strip().partition(" = ")
    module, _, function = place.partition(":")
    assert name == "schedsearch" and getattr(importlib.import_module(module), function) is schedsearch


# --- Time -------------------------------------------------------------------------------------------------------------
def test_what_computes_a_graph_is_compared_with_inductors_code_of_the_same_graph(compiled: Any) -> None:
    """A network is faster than the graph with kernels for layers, but the graph as it is is faster than both."""
    model, x = network(), image()
    clock = Clock(357.0, kernel=200.0, kernels_for_layers=403.0, network=392.0)
    fast, reports = compiled(model, timer=clock)
    assert close(fast(x), model(x))
    report = reports[-1]
    assert not report.is_used and not report.network.served and not report.swapped
    assert (report.ours_us, report.torch_us) == (403.0, 357.0)
    assert (report.network.ours_us, report.network.torch_us) == (392.0, 357.0)
    assert {layer.reason for layer in report.layers} == {"the whole graph with it: PyTorch is as fast or faster"}


@pytest.mark.parametrize(("layers_us", "network_us", "winner"), [(1.0, 2.0, "layers"), (2.0, 1.0, "network")])
def test_the_fastest_of_all_serves(compiled: Any, layers_us: float, network_us: float, winner: str) -> None:
    model, x = network(), image()
    fast, reports = compiled(model, timer=Clock(3.0, kernel=1.0, kernels_for_layers=layers_us, network=network_us))
    assert close(fast(x), model(x)) and close(fast(2 * x), model(2 * x))
    assert bool(reports[-1].swapped) == (winner == "layers") and reports[-1].network.served == (winner == "network")


def test_without_time_inductor_computes_the_graph_and_the_report_says_so(
    compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from schedsearch.deadline import Deadline

    monkeypatch.setattr(Deadline, "within", lambda seconds: Deadline(0.0, lambda: 1.0))
    model, x = network(), image()
    fast, reports = compiled(model, db=tmp_path / "records.db", tune=True, tune_s=20.0)
    assert close(fast(x), model(x))
    (report,) = reports
    assert not report.is_used
    assert {layer.reason for layer in report.layers} == {
        "there was no time left to tune it beside a network; PyTorch computes it"
    }
    assert report.network.reason == "there was no time left to build a network; PyTorch computes it"


def test_a_network_is_built_in_less_time_than_inductor_took(
    compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor compiles nothing beside a network of the whole graph."""
    from schedsearch.deadline import Deadline

    monkeypatch.setattr(Deadline, "within", lambda seconds: Deadline(30.0, lambda: 0.0))
    monkeypatch.setattr("schedsearch.executable.planned.time_to_tune", lambda *_: None)
    plain = selected_graph.SelectedGraph.__init__

    def after_a_long_compilation(self: Any, module: Any, inputs: Any, compilation: Any, *rest: Any) -> None:
        compilation.seconds = 40.0
        plain(self, module, inputs, compilation, *rest)

    monkeypatch.setattr(selected_graph.SelectedGraph, "__init__", after_a_long_compilation)
    model, x = network(), image()
    timer = Clock(3.0, kernel=1.0, network=1.0)
    fast, reports = compiled(model, db=tmp_path / "records.db", tune=True, tune_s=20.0, timer=timer)
    assert close(fast(x), model(x))
    assert reports[-1].network.served


@pytest.mark.parametrize("left_s, network, tuned", [(30.0, True, False), (30.0, False, True), (300.0, True, True)])
def test_a_short_time_is_for_a_network_alone(
    compiled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_s: float, network: bool, tuned: bool
) -> None:
    """A clock that stands still: only what is left at the start counts."""
    from schedsearch.deadline import Deadline
    from schedsearch.torch.layers import selection as choose

    monkeypatch.setattr(Deadline, "within", lambda seconds: Deadline(left_s + 10.0, lambda: 0.0))
    asked: list[str] = []

    def refused(*args: Any) -> Any:
        raise Refusal("not built here")

    monkeypatch.setattr(choose, "tune_missing", lambda layers, *rest: asked.extend(name for name, _ in layers) or "tuned")
    monkeypatch.setattr(selected_graph.SelectedGraph, "_placed", refused)
    model, x = prepared(Residual()), image()
    fast, _ = compiled(model, db=tmp_path / "records.db", tune=True, tune_s=20.0, network=network)
    assert close(fast(x), model(x))
    assert bool(asked) == tuned
