"""`optimize_`: kernels take the place of layers where they are faster and right; everything else stays as it was.

The clocks here are made up, so that the same layers are swapped on every machine. Kernels are those of the CPU.
"""

from __future__ import annotations

import copy
import importlib
import io
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-integrations installs it")

from torch_support import Clock, Residual, Scattered, close, db, image, optimize, prepared, ran, small, without_autograd  # noqa: E402, F401

import schedsearch.torch as sst  # noqa: E402
from schedsearch.errors import UsageError  # noqa: E402
from schedsearch.torch.layers import kernel_op as calls  # noqa: E402
from schedsearch.torch.layers.kernel_op import Call  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("without_autograd")]
nn = torch.nn


# --- Layers -----------------------------------------------------------------------------------------------------------
def test_a_residual_block_runs_in_two_kernels(optimize: Any, ran: list[str]) -> None:
    model, x = prepared(Residual()), image()
    expected = model(x)
    report = optimize(model, x)
    ran.clear()
    got = model(x)
    assert close(got, expected) and got.stride() == expected.stride() and ran == ["conv2d", "conv2d"]
    assert [(layer.name, layer.kernel.split("NHWC")[1]) for layer in report.layers] == [
        ("conv1", "+scale_shift+relu"), ("conv2", "+bias+scale_shift+residual+relu"),
    ]  # fmt: skip
    assert all(layer.swapped and layer.error < 1e-5 for layer in report.layers)
    assert [(layer.ours_us, layer.torch_us) for layer in report.layers] == [(1.0, 3.0)] * 2
    assert report.saved_us == 4.0 and "2 of 2 layers swapped" in str(report)


def test_depthwise_convolutions_relu6_and_pixel_shuffles_are_layers(optimize: Any, ran: list[str]) -> None:
    model = prepared(
        nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6(), nn.PixelShuffle(2))
    )
    x = image()
    expected = model(x)
    optimize(model, x)
    ran.clear()
    assert close(model(x), expected) and ran == ["depthwise_conv2d", "depth_to_space"]


def test_models_in_contiguous_format_keep_it(optimize: Any, ran: list[str]) -> None:
    model, x = small().to(memory_format=torch.contiguous_format), image(2, 8, 5, 4).contiguous()
    expected = model(x)
    report = optimize(model, x)
    assert close(model(x), expected) and model(x).is_contiguous() and ran and "NCHW" in report.layers[0].kernel


def test_a_layer_keeps_what_something_else_reads(optimize: Any) -> None:
    class Branches(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 1)

        def forward(self, x: Any) -> Any:
            y = self.conv(x)
            return y, torch.relu(y)

    model, x = prepared(Branches()), image()
    expected = model(x)
    report = optimize(model, x)
    assert report.layers[0].kernel.endswith("+bias") and all(map(close, model(x), expected))


def test_a_write_between_a_convolution_and_an_addition_keeps_them_apart(optimize: Any) -> None:
    class Preactivated(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 1)

        def forward(self, x: Any) -> Any:
            x = x * 1.0
            y = self.conv(x)
            x.relu_()
            return y + x

    model, x = prepared(Preactivated()), image()
    expected = model(x)
    report = optimize(model, x)
    assert report.layers[0].kernel.endswith("+bias") and close(model(x), expected)


# --- The choice -------------------------------------------------------------------------------------------------------
def test_a_kernel_that_is_not_faster_is_not_used(optimize: Any, ran: list[str]) -> None:
    model, x = small(), image()
    report = optimize(model, x, timer=Clock(torch_us=1.01))
    ran.clear()
    model(x)
    assert not ran and "forward" not in vars(model)
    assert (report.layers[0].swapped, report.layers[0].reason) == (False, "PyTorch is as fast or faster")
    assert (report.layers[0].ours_us, report.layers[0].torch_us) == (1.0, 1.01)


def test_a_kernel_that_is_wrong_is_not_used(optimize: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compute = Call.__call__
    monkeypatch.setattr(Call, "__call__", lambda self, arrays: compute(self, arrays) * 1.001)
    report = optimize(small(), image(), db=tmp_path / "other.db")
    assert not report.swapped and "its error against float32 is" in report.layers[0].reason


def test_filter_fn_leaves_layers_out(optimize: Any) -> None:
    model = prepared(nn.Sequential(Residual(), Residual()))
    seen = []

    def keep(module: Any, name: str) -> bool:
        seen.append((type(module).__name__, name))
        return name.startswith("1.")

    report = optimize(model, image(), filter_fn=keep)
    assert [layer.name for layer in report.swapped] == ["1.conv1", "1.conv2"]
    assert seen == [("Conv2d", f"{place}.conv{number}") for place in (0, 1) for number in (1, 2)]


def test_without_records_nothing_is_swapped(optimize: Any, tmp_path: Path) -> None:
    from schedsearch.records.store import Store

    Store.open(tmp_path / "empty.db").close()
    report = sst.optimize_(small(), image(), db=tmp_path / "empty.db")
    assert not report.swapped and "no record" in report.layers[0].reason


def test_cudnn_searches_for_what_is_timed_and_not_for_the_reference(optimize: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from schedsearch.torch.layers import selection as choose

    seen, convolve = [], choose._core

    def keep(*given: Any) -> Any:
        seen.append(torch.backends.cudnn.benchmark)
        return convolve(*given)

    monkeypatch.setattr(choose, "_core", keep)
    before = torch.backends.cudnn.benchmark
    optimize(small(), image())
    assert seen == [False, True, True] and torch.backends.cudnn.benchmark is before  # float32, its own format, the time


class Times:
    """Says one time after the other, in microseconds; every call is run once."""

    def __init__(self, *times_us: float) -> None:
        self.left = list(times_us)

    def ns(self, runs: Sequence[Callable[[], Any]]) -> float:
        runs[-1]()
        return 1000.0 * self.left.pop(0)


def test_a_model_that_is_slower_with_faster_layers_remains_as_it_was(optimize: Any, ran: list[str]) -> None:
    model, x, other = small(), image(), image(2, 8, 6, 6)
    report = optimize(model, x, timer=Times(1, 3, 5, 4))  # the layer by a kernel and PyTorch, then the model
    assert "forward" not in model.__dict__ and not report.swapped
    assert (report.ours_us, report.torch_us, report.layers[0].ours_us) == (5, 4, 1)
    assert "the model takes 5.0 us with kernels and 4.0 us without, so it remains as it was" in str(report)
    assert "it is faster alone, but the model as a whole is not" in str(report)
    assert optimize(model, other, timer=Times(1, 3, 3, 4)).swapped
    optimize(model, x, timer=Times(1, 3, 5, 4))
    ran.clear()
    model(other)
    assert ran == ["conv2d"]  # the kernels of another example stay
    model(x)
    assert ran == ["conv2d"]


def test_the_clock_of_the_host_measures_both_sides(optimize: Any) -> None:
    report = optimize(small(), image(), timer=None)
    assert report.layers[0].ours_us > 0 and report.layers[0].torch_us > 0


# --- What a model remains ---------------------------------------------------------------------------------------------
def test_parameters_are_shared_and_may_change(optimize: Any, ran: list[str]) -> None:
    model, x = small(), image()
    before = {name: (tensor, tensor.data_ptr()) for name, tensor in model.state_dict(keep_vars=True).items()}
    optimize(model, x)
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[name] is tensor and tensor.data_ptr() == address for name, (tensor, address) in before.items())
    for change in (
        lambda: model[0].weight.mul_(2),
        lambda: model[1].running_var.add_(1),
        lambda: model.load_state_dict(small().state_dict()),
        lambda: model.load_state_dict(prepared(small()).state_dict(), assign=True),
        lambda: setattr(model[0], "bias", nn.Parameter(torch.ones(8))),
    ):
        change()
        ran.clear()
        assert close(model(x), model.forward.original(x)) and ran == ["conv2d"]


def test_a_copy_is_optimized_and_independent(optimize: Any, ran: list[str]) -> None:
    model, x = small(), image()
    optimize(model, x)
    other = copy.deepcopy(model)
    other[0].weight.mul_(-1)
    expected = other.forward.original(x)
    ran.clear()
    assert close(other(x), expected) and not close(model(x), expected) and len(ran) == 2


def test_a_saved_model_is_one_that_was_not_optimized(optimize: Any) -> None:
    model, x = small(), image()
    optimize(model, x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for loaded in (torch.load(file, weights_only=False), pickle.loads(pickle.dumps(model))):
        assert torch.equal(loaded(x), model.forward.original(x))
        assert not isinstance(vars(loaded).get("forward"), type(model.forward))


def test_a_model_that_an_earlier_version_saved_loads(optimize: Any) -> None:
    model, x = small(), image()
    optimize(model, x)
    names = {
        "models.forward": "forward",
        "models.instance_forward": "forward",
        "own_forward": "_own_forward",
        "Replicate": "_Replicate",
    }
    text = pickle.dumps(model, protocol=0)  # whose names are lines of text
    for new, old in names.items():
        text = text.replace(f"schedsearch.torch.{new}\n".encode(), f"schedsearch.torch.{old}\n".encode())
        text = text.replace(f"\n{new}\n".encode(), f"\n{old}\n".encode())
    assert b"schedsearch.torch.forward\n_own_forward" in text and b"schedsearch.torch.models" not in text
    loaded = pickle.loads(text)
    assert torch.equal(loaded(x), model.forward.original(x)) and set(vars(sst.revert_(loaded))) == set(vars(small()))


def replicated(model: Any, scale: float) -> Any:
    """What DataParallel makes of a model for another GPU (torch.nn.parallel.replicate); here with weights times `scale`."""
    replicas = {each: each._replicate_for_data_parallel() for each in model.modules()}
    for each, replica in replicas.items():
        for name, child in each._modules.items():
            setattr(replica, name, replicas[child])
        for name, weight in each._parameters.items():
            setattr(replica, name, None if weight is None else weight.detach() * scale)
    return replicas[model]


def test_copies_of_data_parallel_compute_with_their_own_weights(optimize: Any, ran: list[str]) -> None:
    model, x = small(), image()
    expected = replicated(model, -2)(x)
    optimize(model, x)
    models = model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    ran.clear()
    for each in models:
        assert torch.equal(replicated(each, -2)(x), expected) and not ran
    assert close(model(x), model.forward.original(x)) and ran
    assert "_replicate_for_data_parallel" not in vars(sst.revert_(model))


@pytest.mark.parametrize(
    ("what", "change", "x"),
    [
        ("another shape", lambda model: None, lambda: image(2, 8, 6, 6)),
        ("another order in memory", lambda model: None, lambda: image().contiguous()),
        ("another format", lambda model: model.double(), lambda: image().double()),
        ("training", lambda model: model.train(), image),
        ("a batch norm in training", lambda model: model[1].train(), image),
        ("a hook", lambda model: model[1].register_forward_hook(lambda module, given, y: y + 1), image),
        ("a hook before", lambda model: model[0].register_forward_pre_hook(lambda module, given: (given[0] * 2,)), image),
        ("another module", lambda model: model.__setitem__(2, nn.Sigmoid()), image),
        ("a module inside another", lambda model: model.__setitem__(0, nn.Sequential(model[0], nn.Tanh())), image),
    ],
    ids=lambda each: each.replace(" ", "_") if isinstance(each, str) else "",
)
def test_any_other_call_runs_as_before(optimize: Any, ran: list[str], what: str, change: Any, x: Any) -> None:
    model = small()
    optimize(model, image())
    ran.clear()
    change(model)
    plain = sst.revert_(copy.deepcopy(model))
    torch.manual_seed(5)
    expected = plain(x())
    torch.manual_seed(5)
    assert torch.equal(model(x()), expected) and not ran, what


def test_hooks_of_the_model_itself_are_called(optimize: Any, ran: list[str]) -> None:
    model, x = small(), image()
    optimize(model, x)
    expected = model(x) + 1
    model.register_forward_hook(lambda module, given, y: y + 1)
    ran.clear()
    assert torch.equal(model(x), expected) and ran == ["conv2d"]


def test_gradients_autocast_and_deterministic_algorithms_take_pytorch(optimize: Any, ran: list[str]) -> None:
    model, x = small(), image()
    optimize(model, x)
    ran.clear()
    with torch.enable_grad():
        model(x).sum().backward()
        assert model[0].weight.grad is not None and not ran
        model.requires_grad_(False)
        model(x)
        assert ran == ["conv2d"]  # nothing needs a gradient
        ran.clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16 and not ran
    torch.use_deterministic_algorithms(True)
    try:
        model(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not ran
    with torch.inference_mode():
        assert close(model(x), model.forward.original(x)) and ran == ["conv2d"]


def test_layers_in_several_places_and_several_examples(optimize: Any, ran: list[str]) -> None:
    shared = nn.Conv2d(8, 8, 1)
    model = prepared(nn.Sequential(shared, nn.ReLU(), shared))
    for x in (image(), image(2, 8, 4, 4)):
        optimize(model, x)
    ran.clear()
    for x in (image(), image(2, 8, 4, 4)):
        assert close(model(x), shared(torch.relu(shared(x))))
    assert ran == ["conv2d"] * 4


def test_revert_gives_the_model_back(optimize: Any, ran: list[str]) -> None:
    model, x = small(), image()
    names = set(vars(model))
    expected = model(x)
    optimize(model, x)
    assert sst.revert_(model) is model and set(vars(model)) == names
    ran.clear()
    assert torch.equal(model(x), expected) and not ran


def test_parts_are_optimized_if_the_whole_cannot_be_exported(optimize: Any, ran: list[str]) -> None:
    class Looping(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.backbone = small()

        def forward(self, x: Any) -> Any:
            y = self.backbone(x)
            while y.max() > 1:
                y = y / 2
            return y

    model, x = prepared(Looping()), image()
    expected = model(x)
    report = optimize(model, x)
    ran.clear()
    assert [layer.name for layer in report.swapped] == ["backbone.0"] and close(model(x), expected) and ran == ["conv2d"]


# --- Models that stay as they are -------------------------------------------------------------------------------------
def _lazy() -> Any:
    return nn.Sequential(nn.LazyConv2d(8, 1))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.jit.script(small()), "scripted"),
        (lambda: nn.DataParallel(small()), "contains DataParallel; call optimize_ on the module before it is wrapped"),
        (lambda: torch.compile(small()), "compiled already; call optimize_ first"),
        (_lazy, "lazy modules without a shape; call the model once before"),
        (lambda: small().to("meta"), "the model is on meta; allowed: a GPU of CUDA, or the CPU"),
        (lambda: nn.Sequential(small(), small().to("meta")), "the model lies on several devices: cpu, meta"),
    ],
    ids=["scripted", "wrapped", "compiled", "lazy", "elsewhere", "spread"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_model_that_cannot_be_optimized_is_left_alone_with_one_warning(optimize: Any, make: Any, reason: str) -> None:
    model = make()
    with pytest.warns(UserWarning, match="optimize_ leaves the model as it is") as warned:
        report = optimize(model, image())
    assert len([each for each in warned if "optimize_" in str(each.message)]) == 1
    assert reason in report.notes[0] and not report.layers


def test_what_is_no_module_is_a_mistake(optimize: Any) -> None:
    with pytest.raises(TypeError, match=r"model is a function; give a torch.nn.Module"):
        optimize(image, image())


def test_other_formats_are_kept_with_the_reason(optimize: Any) -> None:
    model = small().double()
    assert "torch.float64" in optimize(model, image().double()).layers[0].reason


# --- torch.compile ----------------------------------------------------------------------------------------------------
def test_an_optimized_model_compiles_without_graph_breaks(optimize: Any, ran: list[str]) -> None:
    model, x = prepared(Residual()), image()
    expected = model(x)
    optimize(model, x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ran.clear()
    assert close(compiled(x), expected) and ran == ["conv2d", "conv2d"]
    model.conv1.weight.mul_(2)
    assert close(compiled(x), model.forward.original(x))
    ran.clear()
    other = image(3, 8, 6, 6)
    assert close(compiled(other), model.forward.original(other)) and not ran


def test_the_operators_keep_the_rules_of_pytorch(optimize: Any) -> None:
    model, x = small(), image()
    optimize(model, x)
    ops = torch.ops.schedsearch
    parts = [torch.rand(8) for _ in range(4)]
    torch.library.opcheck(ops.batch_norm_vectors.default, (parts, 1e-5, torch.float32))
    key, call = next(each for each in calls._calls.items() if each[1].workload.op == "conv2d")
    arrays = [image(*_logical(spec)) if len(spec.shape) == 4 else torch.rand(spec.shape) for spec in call.workload.signature]
    torch.library.opcheck(ops.call.default, (key, arrays))


def test_a_kernel_is_not_loaded_in_a_capture(optimize: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = small(), image()
    optimize(model, x)
    for call in calls._calls.values():
        monkeypatch.setattr(call, "_bound", None)
    monkeypatch.setattr(calls, "capturing", lambda device: True)
    with pytest.raises(UsageError, match=r"captures the first call of .*; call it once before the capture"):
        model(x)


def _logical(spec: Any) -> tuple[int, ...]:
    return tuple(spec.shape[spec.axes.index(axis)] for axis in ("NCHW" if "N" in spec.axes else "OIHW"))


def test_vectors_of_batch_norms_are_those_of_pytorch() -> None:
    norms = [prepared(nn.BatchNorm2d(channels)) for channels in (8, 70)]
    parts = [getattr(norm, name) for name in ("weight", "bias", "running_mean", "running_var") for norm in norms]
    table = torch.ops.schedsearch.batch_norm_vectors(parts, 1e-5, torch.float32)
    for norm, start in zip(norms, calls.vector_places([8, 70])[0]):
        x = torch.randn(2, norm.num_features, 3, 3)
        scale, shift = table[:, start : start + norm.num_features, None, None]
        assert close(x * scale + shift, norm(x)) and start % 64 == 0


def test_a_saved_graph_without_its_kernels_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"this process has no kernel conv2d-0; call schedsearch.torch.optimize_ or"):
        torch.ops.schedsearch.call("conv2d-0", [image()])


# --- Time -------------------------------------------------------------------------------------------------------------
def test_layers_that_have_no_time_are_pytorchs_and_the_report_says_so(
    optimize: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from schedsearch.deadline import Deadline

    monkeypatch.setattr(Deadline, "within", lambda seconds: Deadline(0.0, lambda: 1.0))
    model = prepared(Residual())
    report = optimize(model, image(), db=tmp_path / "records.db", tune=True, tune_s=60.0)
    assert "forward" not in vars(model) and not report.is_used
    assert "2 layers without a record: there was no time left to tune" in report.notes
    assert {layer.reason for layer in report.layers} == {"there was no time left to measure it; PyTorch computes it"}


def test_a_model_that_is_as_fast_without_kernels_remains_as_it_was(optimize: Any) -> None:
    model = small()
    report = optimize(model, image(), timer=Times(1, 3, 5, 5))  # the layer by a kernel and PyTorch, then the model
    assert "forward" not in vars(model) and not report.swapped


def test_layers_are_not_tuned_while_another_run_holds_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    import schedsearch
    from schedsearch.deadline import Deadline
    from schedsearch.errors import DeviceBusyError
    from schedsearch.torch.layers.tuning import tune_missing

    def busy(*given: Any, **options: Any) -> None:
        raise DeviceBusyError("cpu is in use by process 7, and there is no time left to wait")

    monkeypatch.setattr(importlib.import_module("schedsearch.session.tune"), "tune_until", busy)
    device: dict[str, Any] = {"target": schedsearch.detect("cpu"), "device": torch.device("cpu")}
    kernels: Any = SimpleNamespace(db=tmp_path / "none.db", allow=("exact",), **device)
    workload = schedsearch.Workload.conv2d(n=1, h=8, w=8, c=4, k=4, r=3, s=3, padding=1, dtype="float32")
    said = tune_missing([("first", workload)], kernels, 4, Deadline.within(30))
    assert said == "1 layer without a record: not tuned, cpu is in use by process 7, and there is no time left to wait"
