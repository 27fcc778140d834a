"""`records verify --sanitize`: kernels under compute-sanitizer, of which a stand-in prints what the manual shows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import cli_support
import fake_sanitizer
import faulty_templates as faulty
import pytest
from records_support import artifact, conv, record

from schedsearch.backend import compile_source
from schedsearch.config import Config
from schedsearch.device.detect import detect
from schedsearch.errors import DeviceError, UnsupportedError, UsageError
from schedsearch.launch import Artifact
from schedsearch.measure import recheck as rechecks
from schedsearch.measure import sanitizer
from schedsearch.records.store import Store
from schedsearch.target import PRESETS
from schedsearch.workload import Workload

CPU = detect("cpu")
H200 = PRESETS["h200"]
WORKLOAD = Workload.conv2d(n=1, h=5, w=5, c=8, k=8, r=1, s=1, dtype="float32")


def built() -> Artifact:
    return compile_source(faulty.PointwiseCpu().kernel(WORKLOAD, CPU, Config(step=1)), CPU).artifact


def test_the_tool_runs_the_kernel_in_a_process_of_its_own(tmp_path: Path) -> None:
    program = fake_sanitizer.write(tmp_path, runs=True)
    assert sanitizer.sanitize(WORKLOAD, built(), CPU, "memcheck", str(program)) == ""
    (call,) = map(json.loads, (tmp_path / "calls").read_text().splitlines())
    assert call[call.index("--tool") + 1] == "memcheck" and "schedsearch.measure.sanitizer" in call


def test_a_finding_is_reported_without_banner_and_stacks_of_the_host(tmp_path: Path) -> None:
    report = (*fake_sanitizer.OUT_OF_BOUNDS, "    Saved host backtrace up to driver entry point", "    Host Frame: cuLaunch")
    program = fake_sanitizer.write(tmp_path, report=report)
    finding = sanitizer.sanitize(WORKLOAD, built(), CPU, "memcheck", str(program)).splitlines()
    assert finding == [*(line.strip() for line in fake_sanitizer.OUT_OF_BOUNDS), "ERROR SUMMARY: 1 error"]


@pytest.mark.parametrize(
    ("summary", "errors"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0),
        ("========= ERROR SUMMARY: 12 errors", 12),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warning)", 2),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0),
        ("", 0),
    ],
)
def test_errors_are_counted_in_every_tool_s_summary(summary: str, errors: int) -> None:
    assert sanitizer._errors(f"noise\n{summary}\n") == errors


def test_a_tool_that_fails_says_why(tmp_path: Path) -> None:
    program = fake_sanitizer.write(tmp_path, fails="Device not supported. Please refer to the manual")
    with pytest.raises(DeviceError, match=r"memcheck failed with exit code 1; it said: .*Device not supported"):
        sanitizer.sanitize(WORKLOAD, built(), CPU, "memcheck", str(program))


def test_a_kernel_that_cannot_be_loaded_is_an_error_and_no_finding(tmp_path: Path) -> None:
    program = fake_sanitizer.write(tmp_path, runs=True)
    foreign = Artifact(b"", dataclasses.replace(built().plan, kind="cuda", arch="sm_90"))
    with pytest.raises(DeviceError, match="failed with exit code 1"):
        sanitizer.sanitize(WORKLOAD, foreign, CPU, "memcheck", str(program))


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A best record of an H200, which a stand-in for `detect` finds; measuring it again is left out."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("schedsearch.device.detect.detect", lambda selector: H200)
    monkeypatch.setattr(rechecks, "recheck", lambda *args, **kwargs: iter(()))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sanitizer, "_INSTALLED", ())
    path = tmp_path / "records.db"
    with Store.open(path) as store:
        store.promote(store.append(dataclasses.replace(record(), target=H200.key)), artifact())
    return path


def verify(db: Path, *options: str) -> tuple[int, str]:
    """Exit code and everything that the command prints."""
    result = cli_support.schedsearch("records", "verify", "--db", db, "--sanitize", *options)
    return result.exit_code, result.output


def bests(db: Path) -> int:
    with Store.open(db) as store:
        return len(list(store.bests(workload=conv(), target=H200.key)))


def test_a_best_with_a_finding_is_demoted_and_the_command_exits_with_1(db: Path, tmp_path: Path) -> None:
    fake_sanitizer.write(tmp_path / "bin", report=fake_sanitizer.OUT_OF_BOUNDS)
    code, output = verify(db)
    assert code == 1 and "Invalid __global__ write of size 4 bytes" in output and "tune these workloads again" in output
    assert bests(db) == 0


def test_a_best_without_a_finding_stays(db: Path, tmp_path: Path) -> None:
    fake_sanitizer.write(tmp_path / "bin")
    code, output = verify(db, "racecheck")
    assert code == 0 and "ok" in output and "racecheck" in output
    assert bests(db) == 1


def test_without_the_tool_the_error_says_how_to_get_it(db: Path) -> None:
    code, output = verify(db)
    assert code == DeviceError.exit_code and "compute-sanitizer is not installed" in output and "leave out" in output
    assert bests(db) == 1


def test_nonsense_is_refused(db: Path) -> None:
    with Store.open(db) as store:
        with pytest.raises(UsageError, match="allowed: memcheck, initcheck, racecheck, synccheck"):
            list(sanitizer.sanitize_bests(store, H200, "valgrind"))
        with pytest.raises(UnsupportedError, match="needs a CUDA device"):
            list(sanitizer.sanitize_bests(store, CPU, "memcheck"))
