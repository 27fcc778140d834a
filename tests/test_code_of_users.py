"""A reference, a file of kernels or a package that exits, dies, hangs or wants all memory is named in one line."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import plugin_support
import pytest
from numba import cuda

import schedsearch
from schedsearch import plugins
from schedsearch.cli.main import Failure, main
from schedsearch.device.detect import detect
from schedsearch.errors import OperatorError, UsageError
from schedsearch.measure import Runner
from schedsearch.own.command_line import KernelFiles, load_kernel
from schedsearch.own.decorator import Tunable
from schedsearch.processes.memory_limit import available_bytes, limited_memory
from schedsearch.processes.trial_run import trial_run

CPU = detect("cpu")
LIMIT_S = 2.0


def copy(x: Any, y: Any) -> None:
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i]


def copying(reference: Callable[..., Any]) -> Tunable:
    decorate = schedsearch.tunable(
        knobs={"threads": (64, 128)}, grid=1, block=lambda k: k.threads, outputs=["y"], reference=reference
    )
    return decorate(copy)


def exits(x: Any) -> Any:
    sys.exit(0)


def ends_the_process(x: Any) -> Any:
    os._exit(0)


def dies(x: Any) -> Any:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def sleeps(x: Any) -> Any:
    time.sleep(60)


def wants_all_memory(x: Any) -> Any:
    return np.empty(available_bytes() or 2**60, np.uint8)  # none of it is touched


REFERENCES = {
    exits: "it raised SystemExit: 0 (line",
    ends_the_process: "it ended its process: exited with status 0",
    dies: "it ended its process: killed by signal 15 (SIGTERM)",
    sleeps: "it was not done within 2 s; killed. Make it faster, or give it more time (--reference-timeout",
    wants_all_memory: "it raised MemoryError",
}


@pytest.mark.long
def test_a_reference_that_does_not_come_back_is_named() -> None:
    with Runner(CPU, reference_timeout_s=LIMIT_S) as runner:
        for reference, problem in REFERENCES.items():
            workload = copying(reference).workload("64:float32", "64:float32")
            for _ in range(2):  # the second time at once
                with pytest.raises(OperatorError) as caught:
                    runner.prepare(workload)
                text = str(caught.value)
                assert text.startswith("the reference of copy x=64:f32 y=64:f32 cannot judge it: ")
                assert problem in text and "\n" not in text
            assert runner.reference_s == 0
        runner.prepare(copying(lambda x: x).workload("64:float32", "64:float32"))


@pytest.mark.long
def test_a_task_with_such_a_reference_is_given_up_and_the_others_are_tuned(tmp_path: Path) -> None:
    kernels = copying(lambda x: x), copying(exits)
    tasks = [each.task("64:float32", "64:float32") for each in kernels]
    summary = schedsearch.tune(tasks, tmp_path / "own.db", target="cpu", trials=2, tuner="random", workers=1)
    right, wrong = summary.tasks
    assert right.best_ns is not None
    assert wrong.best_ns is None and "SystemExit" in wrong.problem


@pytest.mark.long
def test_observers_are_told_that_a_reference_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from schedsearch.session import journal
    from schedsearch.session.observer import Observer, Phase

    class Phases(Observer):
        def on_phase(self, event: Phase) -> None:
            names.append(event.name)

    names: list[str] = []
    monkeypatch.setattr(journal, "_REFERENCE_EVERY_S", 0.3)
    task = copying(sleeps).task("64:float32", "64:float32")
    with pytest.raises(OperatorError, match="not done within 2 s"):
        schedsearch.tune(
            [task], tmp_path / "own.db", target="cpu", trials=1, workers=1, reference_timeout_s=LIMIT_S, observers=[Phases()]
        )
    assert names.count("reference") > 1


def test_foreign_code_gets_only_a_share_of_the_memory_that_is_left() -> None:
    with limited_memory(share=0.0), pytest.raises(MemoryError):
        bytearray(1 << 28)
    assert len(bytearray(1 << 28)) == 1 << 28


FILES = {
    "import sys; sys.exit(0)": "cannot be run: it calls sys.exit(0)",
    "import sys; sys.exit('bye')": "cannot be run: it calls sys.exit('bye')",
    "class B(BaseException): pass\nraise B('x')": "cannot be run: B: x",
    "import os; os._exit(0)": "ended the process with exit status 0",
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)": "ended the process: killed by signal 15 (SIGTERM)",
    "import time; time.sleep(60)": "was not done within 1 s; killed",
    "raise KeyboardInterrupt": "raises KeyboardInterrupt",
    "import ctypes.nothing": "cannot be run: ModuleNotFoundError",
}


@pytest.mark.parametrize("text", FILES)
def test_a_file_of_kernels_that_cannot_be_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    file = tmp_path / "k.py"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_kernel(f"{file}:copy", limit_s=1)
    assert str(caught.value).startswith(f"{file} {FILES[text]}")
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError):
        KernelFiles([str(file)], limit_s=1)("k:copy", {})


def test_sys_exit_of_other_code_is_not_success_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`grid` is called to plan the run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    Path("k.py").write_text(
        "import sys, schedsearch\nfrom numba import cuda\n"
        "@schedsearch.tunable(knobs={'t': (64,)}, grid=lambda x: sys.exit(0), block=lambda k: k.t, outputs=['y'])\n"
        "def copy(x, y):\n    y[cuda.grid(1)] = x[cuda.grid(1)]\n"
    )
    options = ["--shape", "x=8:float32", "--shape", "y=8:float32", "--target", "cpu"]
    with pytest.raises(Failure) as caught:
        main(["tune", "k.py:copy", *options], standalone_mode=False)
    assert caught.value.exit_code == 2
    assert "SystemExit" in str(caught.value)


@pytest.mark.parametrize(
    ("code", "problem"),
    [("import sys; sys.exit(0)", "SystemExit: 0"), ("import os; os._exit(0)", "ended the process with exit status 0")],
)
def test_a_package_that_exits_when_it_is_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, problem: str
) -> None:
    monkeypatch.setattr(plugins, "_try_first", trial_run)  # as the command line does
    (tmp_path / f"ends_{len(code)}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    offer = plugins.Offer(plugin_support.OPERATORS, "ends", f"ends_{len(code)}:Ends", "ends 1.0")
    with pytest.raises(plugins.PluginError, match=r"ends 1\.0") as caught:
        plugins.load("operator", offer)
    assert problem in str(caught.value)


def test_a_trial_drops_what_it_prints_and_changes_nothing_here(capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []

    def function() -> None:
        print("printed")
        seen.append(1)
        with contextlib.suppress(OSError):
            os.write(1, b"written")

    assert trial_run(function, 10) == ""
    assert seen == [] and capfd.readouterr() == ("", "")
