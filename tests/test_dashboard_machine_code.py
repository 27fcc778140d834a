"""Listings of machine code: what the trial page shows of stored code, or why it shows none."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from dashboard_support import A100, DEFAULT, SMALL, TEMPLATES, a_trial

from schedsearch.dashboard import machine_code
from schedsearch.dashboard.answers import Answers
from schedsearch.dashboard.machine_code import DISASSEMBLERS, Listing, Listings, disassemble, shortened
from schedsearch.dashboard.report import report_answers
from schedsearch.launch import Artifact, Grid, LaunchPlan, Step
from schedsearch.records import claims
from schedsearch.records.store import Store

PLAN = LaunchPlan("cuda", "sm_80", (Step("kernel", (), Grid(1), 32),))
CUBIN = Artifact(b"\x7fELF of the test", PLAN)


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program that stands for nvdisasm: counts its calls and prints a listing that names its input."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "nvdisasm"
    program.write_text(
        f'#!/bin/sh\necho call >> {tmp_path}/calls\necho "$1 $2"\nfor i in 1 2 3; do echo "IMAD R$i ;"; done\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return program


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """Two valid trials of one task; the code of the faster is stored."""
    rng = Random(1)
    path = tmp_path / "records.db"
    with Store.open(path) as store:
        run = store.start_run({})
        trials = [a_trial(SMALL, A100, TEMPLATES[0], DEFAULT, rng, 1e9 + number, run=run) for number in range(2)]
        ids = [store.append(trial) for trial in trials]
        times = [trial.measurement.time_ns or 0.0 for trial in trials]
        store.promote(ids[times.index(min(times))], CUBIN)
    return path


@pytest.fixture
def answers(database: Path) -> Iterator[Answers]:
    with closing(Answers([str(database)])) as found:
        found.refresh()
        yield found


def best_and_other(answers: Answers) -> tuple[str, str]:
    best = answers.get("overview")["tasks"][0]["best_id"]
    return f"0.{best}", f"0.{3 - best}"


def test_the_trial_shows_the_listing_of_its_code(answers: Answers, tool: Path) -> None:
    best, other = best_and_other(answers)
    trial = answers.get(f"trial/{best}")
    assert trial["code"] == {"SASS": "--print-code kernel.cubin\nIMAD R1 ;\nIMAD R2 ;\nIMAD R3 ;"}
    assert trial["code_note"] == ""
    assert answers.get(f"trial/{other}")["code"] == {}
    assert "code of this trial is not stored" in answers.get(f"trial/{other}")["code_note"]


def test_a_listing_is_made_once(answers: Answers, tool: Path, tmp_path: Path) -> None:
    best, _ = best_and_other(answers)
    assert answers.get(f"trial/{best}") == answers.get(f"trial/{best}")
    assert (tmp_path / "calls").read_text() == "call\n"


def test_a_report_lists_the_best_only(answers: Answers, tool: Path, tmp_path: Path) -> None:
    best, other = best_and_other(answers)
    found = dict(report_answers(answers))
    assert found[f"trial/{best}"]["code"]["SASS"].endswith("IMAD R3 ;")
    assert found[f"trial/{other}"]["code"] == {}


def test_code_of_another_machine_is_not_disassembled(
    answers: Answers, tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "is_ours", lambda *claim: False)
    best, _ = best_and_other(answers)
    trial = answers.get(f"trial/{best}")
    assert trial["code"] == {} and "Another machine stored the code" in trial["code_note"]
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(
    ("script", "note"),
    [("echo no cubin; exit 3", "nvdisasm failed with exit code 3: no cubin"), ("sleep 60", "did not end within 0.2 s")],
)
def test_a_program_that_fails_or_hangs_is_told(tool: Path, monkeypatch: pytest.MonkeyPatch, script: str, note: str) -> None:
    tool.write_text(f"#!/bin/sh\n{script}\n")
    monkeypatch.setattr(machine_code, "_TIMEOUT_S", 0.2)
    assert note in disassemble(CUBIN).note


def test_a_missing_program_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    listing = disassemble(CUBIN)
    assert listing.text == ""
    assert (
        "nvdisasm, which shows it, is not installed here" in listing.note
        and "pip install nvidia-cuda-nvdisasm" in listing.note
    )


@pytest.mark.skipif(DISASSEMBLERS["cpu"].find() is None, reason="objdump is not installed")
def test_the_code_of_a_cpu_kernel_is_listed() -> None:
    from llvmlite import binding as llvm

    from schedsearch.backend import cpu

    text = "define i32 @answer(i32 %x) {\n  %y = mul i32 %x, 3\n  ret i32 %y\n}"
    machine = cpu._target_machine()
    module = llvm.parse_assembly(text)
    code = cpu._archive({"answer": machine.emit_object(module)})
    listing = disassemble(Artifact(code, LaunchPlan("cpu", "cpu", (Step("answer", (), Grid(1), 1),))))
    assert listing.name == "Assembly" and "<answer>:" in listing.text and "ret" in listing.text


def test_code_that_is_not_an_archive_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/true")
    damaged = Artifact(b"no archive", LaunchPlan("cpu", "cpu", (Step("answer", (), Grid(1), 1),)))
    assert disassemble(damaged) == Listing(note="The code cannot be shown: File is not a zip file")


def test_a_long_listing_is_cut_between_lines() -> None:
    listing = shortened(Listing("SASS", "one\ntwo\nthree\nfour"), 9)
    assert (listing.text, listing.note) == ("one\ntwo\n", "SASS: the first 2 of 4 lines are shown.")
    assert shortened(Listing("SASS", "one"), 9) == Listing("SASS", "one")


def test_only_the_last_listings_are_kept(database: Path) -> None:
    listings = Listings()
    with Store.open(database, readonly=True) as store:
        for number in range(20):
            assert "no longer stored" in listings.get(store, f"{number:064x}").note
    assert len(listings._kept) <= 8
