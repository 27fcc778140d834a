"""Models, examples, databases and versions of PyTorch that kernels cannot serve: said once, and the model runs as it did."""

from __future__ import annotations

import sqlite3
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-integrations installs it")

from torch_support import Clock, close, db, image, optimize, prepared, small, without_autograd  # noqa: E402, F401

import schedsearch.torch as sst  # noqa: E402
from schedsearch.torch.compiler import backend, inductor  # noqa: E402
from schedsearch.torch.models import checks  # noqa: E402
from schedsearch.torch.operators import store  # noqa: E402
from schedsearch.torch.refusal import Refusal  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("without_autograd")]
nn = torch.nn


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """One process that trains together with nobody."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch has no gloo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def said(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call returns, and our warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = call()
    return found, [
        str(each.message) for each in caught if "schedsearch" in each.filename or "optimize_" in str(each.message)
    ]


def _quantised() -> Any:
    model = nn.Sequential(torch.ao.quantization.QuantStub(), nn.Conv2d(8, 8, 1), torch.ao.quantization.DeQuantStub()).eval()
    model.qconfig = torch.ao.quantization.get_default_qconfig("x86")
    torch.ao.quantization.prepare(model, inplace=True)
    model(image())
    return torch.ao.quantization.convert(model)


def _sharded() -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(small())


def _flat() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(small(), device_id=torch.device("cpu"))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.jit.trace(small(), image()), "TopLevelTracedModule is scripted"),
        (_quantised, "is quantised; allowed: float16, bfloat16 and float32"),
        (
            lambda: nn.parallel.DistributedDataParallel(small()),
            "contains DistributedDataParallel; call optimize_ on the module",
        ),
        (_sharded, "contains FSDPSequential; call optimize_ on the module before it is wrapped"),
        (_flat, "contains FullyShardedDataParallel; call optimize_ on the module before it is wrapped"),
    ],
    ids=["traced", "quantised", "ddp", "fully_shard", "fsdp"],
)
@pytest.mark.filterwarnings("ignore")
def test_models_of_other_kinds_run_as_they_did(group: None, optimize: Any, make: Any, reason: str) -> None:
    model, x = make(), image()
    expected = model(x)
    report, texts = said(lambda: optimize(model, x))
    assert len(texts) == 1 and texts[0].startswith("optimize_ leaves the model as it is: ")
    assert reason in report.notes[0] and not report.layers and torch.equal(model(x), expected)
    assert report.headline.count("as it was") == 1


def test_calls_of_another_shape_are_said_once(optimize: Any) -> None:
    model = small()
    optimize(model, image())
    other = image(3, 8, 5, 5)
    (got, texts), (_, again) = said(lambda: model(other)), said(lambda: model(other))
    assert close(got, sst.revert_(model)(other)) and not again
    assert texts == [
        "a call of the optimized Sequential with float32 [3, 8, 5, 5] with strides (200, 1, 40, 8) runs as before: "
        "kernels are made for float32 [1, 8, 6, 6] in channels_last; call optimize_ with an example like it, too"
    ]


def test_calls_like_the_example_and_training_say_nothing(optimize: Any) -> None:
    model = small()
    optimize(model, image())
    assert said(lambda: (model(image()), model.train()(image(2, 8, 4, 4))))[1] == []


def test_what_the_caller_may_not_have_meant_is_in_the_report(optimize: Any) -> None:
    report = optimize(small().train(), image())
    assert report.notes == ("the model is in training mode, in which kernels do not serve; they do after model.eval()",)
    report = optimize(small().to(memory_format=torch.contiguous_format), image().contiguous())
    assert len(report.notes) == 1 and report.notes[0].startswith("its images are in NCHW, for which there are fewer kernels")


def test_a_type_that_a_cpu_has_no_kernels_for(optimize: Any) -> None:
    report = optimize(small().half(), image().half())
    assert [layer.reason for layer in report.layers] == ["it is float16; allowed on a CPU: float32"]


class Remembers(nn.Module):  # type: ignore[misc, name-defined]
    """Leaves its features in itself, as models do for those who look at them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = small(), 0

    def forward(self, x: Any) -> Any:
        self.features = self.body(x)
        self.calls += 1
        return self.features.sum()


def test_what_a_model_does_beside_its_result_is_done_as_before(optimize: Any) -> None:
    model, x = prepared(Remembers()), image()
    report = optimize(model, x)
    assert (model.calls, hasattr(model, "features")) == (0, False)  # measuring leaves nothing
    y = model(x)
    assert torch.equal(model.features.sum(), y) and model.calls == 1
    assert [layer.name for layer in report.swapped] == ["body.0"]  # its parts are optimized


def test_a_buffer_that_counts_counts_the_calls_of_the_caller(optimize: Any) -> None:
    class Counts(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.body = small()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Any) -> Any:
            self.calls += 1
            return self.body(x) * self.calls

    model, x = prepared(Counts()), image()
    assert optimize(model, x).swapped
    for number in (1, 2, 3):
        assert close(model(x), model.body(x) * number) and float(model.calls) == number


def test_an_example_that_the_model_writes_to_is_not_changed(optimize: Any) -> None:
    model, x = prepared(nn.Sequential(nn.ReLU(inplace=True), small())), image()
    assert optimize(model, x).swapped and torch.equal(x, image())


def test_hooks_inside_a_model_are_called_and_the_other_parts_optimized(optimize: Any) -> None:
    model, x, seen = prepared(nn.Sequential(small(), nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU()))), image(), []
    model[1][1].register_forward_hook(lambda module, given, y: seen.append(y))
    expected = model(x)
    report = optimize(model, x, filter_fn=lambda module, name: name != "1.0")
    seen.clear()
    assert close(model(x), expected) and len(seen) == 1
    assert [(layer.name, layer.swapped) for layer in report.layers] == [("0.0", True), ("1.0", False)]


def test_hooks_for_all_modules_are_said_once_and_called(optimize: Any) -> None:
    model, x, seen = small(), image(), []
    handle = nn.modules.module.register_module_forward_pre_hook(lambda module, given: seen.append(type(module).__name__))
    try:
        report, texts = said(lambda: optimize(model, x))
        assert len(texts) == 1 and "this process has hooks for all modules" in report.notes[0]
    finally:
        handle.remove()
    optimize(model, x)
    handle = nn.modules.module.register_module_forward_pre_hook(lambda module, given: seen.append(type(module).__name__))
    try:
        seen.clear()
        model(x)
    finally:
        handle.remove()
    assert seen == ["Sequential", "Conv2d", "BatchNorm2d", "ReLU"]


# --- Databases --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record of the layer of `small`, of this machine."""
    path = tmp_path_factory.mktemp("tuned") / "records.db"
    with torch.no_grad():
        report = sst.optimize_(small(), image(), db=path, tune=True, trials=1, timer=Clock())
        assert report.notes == ("tuned 1 layer",) and report.swapped[0].record_id is not None
    return path


def test_a_second_run_tunes_nothing(tuned: Path) -> None:
    report = sst.optimize_(small(), image(), db=tuned, tune=True, trials=1, timer=Clock())
    assert report.notes == ("every layer has a record; nothing was tuned",) and len(report.swapped) == 1


def test_a_layer_that_no_template_computes_says_so(tuned: Path) -> None:
    class Mixed(nn.Module):  # type: ignore[misc, name-defined]
        """Its weight makes PyTorch return images in channels_last, and its input is in NCHW."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3)

        def forward(self, x: Any) -> Any:
            return self.conv(x.contiguous())

    model = Mixed().eval().to(memory_format=torch.channels_last)
    report = sst.optimize_(model, image(), db=tuned, tune=True, trials=1, timer=Clock())
    (layer,) = report.layers
    assert not layer.swapped and layer.reason.startswith(f"no template can run {layer.kernel} on ")
    assert report.notes[0] == "every layer that a template computes has a record; nothing was tuned"
    assert f"0 of 1 layer swapped in {report.seconds:.1f} s\n" in str(report)


def _changed(path: Path, copy: Path, *statements: str) -> Path:
    with sqlite3.connect(path) as before, sqlite3.connect(copy) as after:
        before.backup(after)
        for statement in statements:
            after.execute(statement)
    return copy


def test_a_database_of_another_device(tuned: Path, tmp_path: Path) -> None:
    other = "cuda:sm_90:NVIDIA H100"
    moved = _changed(tuned, tmp_path / "other.db", f"UPDATE best SET target_key = '{other}'")
    model = small()
    report = sst.optimize_(model, image(), db=moved, timer=Clock())
    assert report.notes[0].startswith(f"{moved} is of another device ({other}; this is cpu:")
    assert [layer.reason for layer in report.layers] == ["it has no record for this device"]
    assert "forward" not in vars(model)


def test_a_database_of_unknown_origin(tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "another machine"))
    moved = _changed(tuned, tmp_path / "unknown.db")
    model, x = small(), image()
    expected = model(x)
    report, texts = said(lambda: sst.optimize_(model, x, db=moved, timer=Clock()))
    assert not texts and close(model(x), expected)
    assert report.layers[0].swapped and report.layers[0].level == "exact"  # its machine code was built again, here


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_bytes(b"hello" * 1000)
    report, texts = said(lambda: sst.optimize_(small(), image(), db=tmp_path / "text.db"))
    assert len(texts) == 1 and "text.db is not a database: it does not begin as an SQLite file does" in report.notes[0]


def test_the_backend_says_once_why_inductor_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "compiled", lambda graph, inputs, mode: graph.forward)
    monkeypatch.setattr(store, "_said", set())
    monkeypatch.chdir(tmp_path)  # where there is no records.db
    model, x = small(), image()
    fast = torch.compile(model, backend=backend.schedsearch, dynamic=False)
    got, texts = said(lambda: (fast(x), fast(image(2, 8, 6, 6)))[0])
    assert close(got, model(x)) and len(texts) == 1
    assert texts[0].startswith("torch.compile(backend='schedsearch'): Inductor compiles the graph: there is no database")


# --- Versions ---------------------------------------------------------------------------------------------------------
def test_a_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.0+cu126")
    with pytest.raises(ImportError, match=r"schedsearch.torch needs PyTorch 2.9 or newer; .* \(this is 2.8.0\+cu126\)"):
        sst._require_torch()


def test_a_torch_for_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    checks.check_kind(torch.device("cpu"))
    with pytest.raises(Refusal, match=r"this PyTorch is for GPUs of AMD \(ROCm\); allowed: a PyTorch for CUDA"):
        checks.check_kind(torch.device("cuda:0"))


def test_networks_without_their_extra(optimize: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    report, texts = said(lambda: optimize(small(), image(), networks=True))
    assert len(report.notes) == 1 and not texts and len(report.swapped) == 1
    assert "no networks: ONNX files need the extra `network`: pip install" in report.notes[0]
