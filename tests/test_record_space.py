"""benchmarks/record_space.py records a space, continues where it stopped, and its recording can be replayed."""

from __future__ import annotations

import gzip
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cli_support import isolate, schedsearch

from schedsearch.device.detect import detect
from schedsearch.records.store import Store
from schedsearch.template import load_template
from schedsearch.workload import Workload

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SPACE, NAME = "1,8,8,8,8,1", "1x8x8x8_k8_1x1_conv2d_cpu"
WORKLOAD = Workload.conv2d(n=1, h=8, w=8, c=8, k=8, r=1, s=1, dtype="float32")


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def record_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the program with arguments in an empty working folder; returns exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)
    isolate(tmp_path, monkeypatch)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program = importlib.import_module("record_space")

    def run(*arguments: str | int) -> tuple[int, str, str]:
        words = [str(BENCHMARKS / "record_space.py"), "--target", "cpu", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", words)
        code = 0
        try:
            program.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
            print("" if isinstance(end.code, int) else end.code, file=sys.stderr)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.mark.long
def test_it_records_goes_on_and_is_replayed(record_space: Run) -> None:
    options = (SPACE, "--template", "conv2d_cpu", "--workers", 1, "--export", "{space}.json.gz")
    code, _, err = record_space(*options, "--configurations", 2)
    assert code == 0, err
    with Store.open(f"{NAME}.db", readonly=True) as store:
        before = [record for record in store.history() if not record.final_race]
    target = detect("cpu")
    assert sum(record.measurement.outcome.is_verified for record in before) == 2
    assert before[0].workload == WORKLOAD
    template = load_template("conv2d_cpu")
    assert template.default(WORKLOAD, target, template.space(WORKLOAD, target)) in [record.config for record in before]

    code, _, err = record_space(*options, "--configurations", 3)
    assert code == 0, err
    with Store.open(f"{NAME}.db", readonly=True) as store:
        history = store.history()
    after = [record for record in history if not record.final_race]
    assert after[: len(before)] == before, "earlier records are kept"
    assert len({record.config for record in after}) == len(after), "and not measured again"
    assert sum(record.measurement.outcome.is_verified for record in after) == 3

    plain = template.plain(WORKLOAD, target, template.space(WORKLOAD, target))
    measured = {record.config for record in after} | {plain}  # every final race has the plain configuration
    assert {record.config for record in history} == measured
    failed = sum(not record.measurement.outcome.is_verified for record in after)

    data = json.loads(gzip.decompress(Path(f"{NAME}.json.gz").read_bytes()))
    assert len(data["cache"]) == len(measured)
    made = data["schedsearch"]
    assert made["target"]["key"] == target.key and made["template"] == "conv2d_cpu" and made["stopped"] == "trials"
    assert "--configurations 3" in made["command"] and "numba" in made["versions"]

    replayed = schedsearch(
        "replay", f"{NAME}.json.gz", "--tuner", "random", "--seeds", 2, "--evaluations", f"1,{len(measured)}", "--json"
    )
    assert replayed.exit_code == 0, replayed.output
    (space,) = json.loads(replayed.stdout)["spaces"]
    assert space["configurations"] == len(measured) and space["valid"] == len(measured) - failed
    # A time outside of a race counts if there is one.
    times_ns = {record.config: record.measurement.time_ns or np.inf for record in (*history, *after)}
    assert space["best_ns"] == pytest.approx(min(times_ns.values()))
    assert space["fractions"][str(len(measured))] == 1.0


@pytest.mark.long
def test_a_time_limit_stops_it_and_keeps_the_results(record_space: Run) -> None:
    options = (
        SPACE,
        "--template",
        "conv2d_cpu",
        "--configurations",
        100_000,
        "--workers",
        1,
        "--format",
        "t4",
        "--export",
        "{space}_T4.json.gz",
    )
    code, out, err = record_space(*options, "--time", "3s")
    assert code == 0, err
    assert "ended by time" in out
    data = json.loads(gzip.decompress(Path(f"{NAME}_T4.json.gz").read_bytes()))
    assert data["metadata"]["schedsearch"]["stopped"] == "time"
    assert schedsearch("records", "import", f"{NAME}_T4.json.gz", "--db", "copy.db").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["1,8,8,8"], "a space is n,h,w,c,k,r[,stride], got '1,8,8,8'"),
        (["1,8,8,8,8,x"], "invalid literal"),
        ([SPACE, "--time", "soon"], "'soon' is not a duration"),
        ([SPACE, "--configurations", "0"], "--configurations 0 is too small"),
        ([SPACE, "1,9,9,8,8,1", "--db", "all.db"], "several spaces need {space} in --db and --export"),
    ],
)
def test_mistakes_measure_nothing(record_space: Run, tmp_path: Path, arguments: list[str], wanted: str) -> None:
    code, _, err = record_space(*arguments, "--template", "conv2d_cpu")
    assert code == 2 and wanted in err
    assert list(tmp_path.glob("*.db")) == []


def test_a_template_that_does_not_fit_is_named(record_space: Run) -> None:
    code, _, err = record_space(SPACE, "--template", "conv2d_wgmma")
    assert code == 1 and "conv2d_wgmma" in err
