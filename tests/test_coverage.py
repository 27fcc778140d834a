"""How much of a model has records: `schedsearch.coverage` and `schedsearch doctor --coverage`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_support import schedsearch as command
from network_support import two_convolutions
from records_support import H100, H200, record

import schedsearch
from schedsearch.deadline import NEVER
from schedsearch.errors import UsageError
from schedsearch.executable.build_options import BuildOptions
from schedsearch.executable.coverage import coverage, needed
from schedsearch.measurement import Anchor, Measurement, Outcome
from schedsearch.network.costs import RecordCosts
from schedsearch.records.shipping import ship
from schedsearch.records.store import Store
from schedsearch.target import PRESETS
from schedsearch.task import Task
from schedsearch.template import load_template
from schedsearch.workload import Workload

CARD = PRESETS["h200"]
LAYERS = [
    Task(schedsearch.conv2d(n=1, h=14, w=14, c=64, k=k, r=3, s=3, padding=1), weight=weight, name=f"layer {k}")
    for k, weight in ((64, 1), (128, 2), (256, 4))
]


def recorded(db: Path, workload: Workload, time_ns: float, target: str = H200, gain: float = 2.0, **changes: Any) -> None:
    facts = {"measurement": Measurement(Outcome.OK, times_ns=(time_ns,)), "anchor": Anchor("c0de", gain * time_ns)}
    made = record(workload=workload, final_race=True, target=target, **facts, **changes)
    with Store.open(db) as store:
        store.promote(store.append(made))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a record of the first layer in own.db, and one of the second in the shipped records."""
    recorded(tmp_path / "own.db", LAYERS[0].workload, 1000.0)
    recorded(tmp_path / "theirs.db", LAYERS[1].workload, 2000.0)
    recorded(tmp_path / "theirs.db", LAYERS[1].workload, 2000.0, H100)
    with Store.open(tmp_path / "theirs.db") as store:
        ship(store, tmp_path, H200, "Ada")
    monkeypatch.setenv("SCHEDSEARCH_TUNED_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_layers_are_counted_by_where_their_records_are(folder: Path) -> None:
    found = coverage(LAYERS, db=folder / "own.db", target=CARD)
    assert {each.label: each.source for each in found.layers} == {
        LAYERS[0].workload.label: "own", LAYERS[1].workload.label: "shipped", LAYERS[2].workload.label: "none"
    }  # fmt: skip
    assert (found.count("own"), found.count("shipped"), found.count("none")) == (1, 1, 1)
    estimate = next(each.time_ns for each in found.layers if each.source == "none")
    total = 1000.0 + 2 * 2000.0 + 4 * estimate
    assert found.share("own") == pytest.approx(1000.0 / total)
    assert found.share("shipped") == pytest.approx(4000.0 / total)
    assert found.share("none") == pytest.approx(4 * estimate / total)
    assert found.tuning_s > 0 and "1 record by Ada" in found.shipped
    assert found.layers[0].source == "none"  # the layers that take longest come first


@pytest.mark.parametrize("gain, source", [(2.0, "near"), (1.05, "none")])
def test_a_layer_that_the_record_of_a_similar_one_would_serve_is_near(
    gain: float, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, other = LAYERS[0].workload, LAYERS[1]
    template = load_template("conv2d_wgmma")
    config = template.default(known, CARD, template.space(known, CARD))
    made = {"template": template.name, "template_version": template.version, "config": config}
    recorded(tmp_path / "theirs.db", known, 2000.0, gain=gain, **made)
    with Store.open(tmp_path / "theirs.db") as store:
        ship(store, tmp_path, H200, "Ada")
    monkeypatch.setenv("SCHEDSEARCH_TUNED_DIR", str(tmp_path))
    found = coverage([other], db=tmp_path / "none.db", target=CARD)
    assert [each.source for each in found.layers] == [source]
    assert found.tuning_s > 0  # it has no record of its own
    own = coverage([other], db=tmp_path / "theirs.db", target=CARD)  # as one's own it serves with any gain
    assert [each.source for each in own.layers] == ["near"]


def test_without_records_everything_is_left_and_with_all_of_them_nothing(folder: Path) -> None:
    nothing = coverage(LAYERS, db=folder / "none.db", target=PRESETS["a100"])
    assert (nothing.count("none"), nothing.share("none")) == (3, 1.0)
    assert nothing.shipped.startswith("no records are shipped for cuda:sm_80")
    every = coverage(LAYERS[:2], db=folder / "own.db", target=CARD)
    assert (every.count("none"), every.tuning_s, every.share("none")) == (0, 0.0, 0.0)


def test_another_toolchain_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for here, notes in (("0.30.4", ()), ("9.9", ("shipped records were measured with numba-cuda 0.30.4 (here 9.9)",))):
        monkeypatch.setattr("schedsearch.backend.toolchain", lambda kind, here=here: {"numba-cuda": here})
        assert coverage(LAYERS, db=folder / "own.db", target=CARD).notes == notes


def test_a_network_is_covered_by_what_build_would_look_up(folder: Path) -> None:
    network = two_convolutions("float16", 64)
    options = BuildOptions.of(NEVER, target=CARD, check=False)
    wanted = needed(network, RecordCosts(None, CARD, network=network))
    found = coverage(network, db=folder / "none.db", target=CARD)
    assert sorted(each.label for each in found.layers) == sorted(each.label for each in wanted)
    assert options.target is CARD
    (first, *_) = wanted
    recorded(folder / "net.db", first, 900.0)
    again = coverage(network, db=folder / "net.db", target=CARD)
    assert [each.label for each in again.layers if each.source == "own"] == [first.label]


def test_a_layer_that_no_kernel_computes_is_said(folder: Path) -> None:
    wrong = Task(schedsearch.conv2d(n=1, h=8, w=8, c=8, k=8, r=3, s=3, dtype="float8_e4m3"), name="float8")
    found = coverage([wrong], db=folder / "own.db", target=schedsearch.detect("cpu"))
    assert found.layers == () and found.notes[0].startswith("no kernel for conv2d")


def test_a_torch_module_is_covered(folder: Path, torch: Any) -> None:
    pytest.importorskip("onnxscript", reason="needs onnxscript")
    model = torch.nn.Sequential(torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.ReLU()).eval()
    found = coverage(model, torch.zeros(1, 64, 14, 14), db=folder / "own.db", target=CARD, dtype="float16")
    assert any(each.label.startswith("conv2d 1x14x14x64 k64 3x3") for each in found.layers)


def test_the_command_reads_a_workload_file(folder: Path) -> None:
    from schedsearch.workload_file import dump

    (folder / "layers.yaml").write_text(dump(LAYERS))
    words = ("doctor", "--coverage", "layers.yaml", "--db", "own.db", "--target", "h200")
    result = command(*words)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("3 different layers on cuda:sm_90:132:NVIDIA H200, predicted")
    assert lines[1].split(maxsplit=1)[0] == "1" and "in the database" in lines[1]
    assert "1 shipped" in lines[2] and "1 without a record" in lines[3]
    told = json.loads(command(*words, "--json").stdout)
    assert told["counts"] == {"own": 1, "shipped": 1, "near": 0, "none": 1} and sum(
        told["shares"].values()
    ) == pytest.approx(1, abs=1e-3)


def test_bad_input_is_one_line(folder: Path) -> None:
    for words, code in (
        (("doctor", "--coverage", "missing.onnx", "--target", "h200"), 2),
        (("doctor", "--coverage", "missing.yaml", "--target", "h200"), 2),
        (("doctor", "--coverage", "layers.yaml", "--target", "h200", "--db", "missing.db"), 6),
        (("doctor", "--target", "h200"), 2),
        (("doctor", "--dtype", "float16"), 2),
    ):
        result = command(*words)
        assert (result.exit_code, len(result.stderr.splitlines())) == (code, 1), (words, result.stderr)
    with pytest.raises(UsageError, match="layers have their shapes"):
        coverage(LAYERS, db=folder / "own.db", target=CARD, dtype="float16")
