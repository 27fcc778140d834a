"""Kernels of users in workload files: `op: FILE:KERNEL`, of a Python file that the command line names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cli_support import isolate
from cli_support import schedsearch as command

from schedsearch import workload_file
from schedsearch.own.command_line import KernelFiles
from schedsearch.workload_file import WorkloadFileError

KERNELS = """
from numba import cuda
import schedsearch

open("was_run", "a").write("once ")


@schedsearch.tunable(
    knobs={"threads": (64, 128)}, block=lambda k: k.threads, grid=lambda x, k: -(-x.size // k.threads),
    outputs=["y"], reference=lambda x, a: a * x)
def times(x, a, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = a * x[i]
"""
FILE = """
defaults: { weight: 2, shape: { n: 1 } }
tasks:
  - op: kernels:times
    name: small
    shape: { x: "640:float32", a: 0.5, y: "640:float32" }
    restrict: { threads: 128 }
  - op: kernels:times
    shape: { x: "8x80:float32", a: 2, y: "8x80:float32" }
  - op: conv2d
    shape: { h: 8, w: 8, c: 8, k: 8, r: 3, s: 3 }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    isolate(tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "kernels.py").write_text(KERNELS)
    (tmp_path / "work.yaml").write_text(FILE)
    return tmp_path


def test_tasks_of_a_workload_file_may_be_kernels_of_a_python_file(folder: Path) -> None:
    file = workload_file.load(folder / "work.yaml", KernelFiles(["kernels.py"]))
    small, two_axes, conv2d = file._tasks["cpu"]
    assert small.workload.label == "times x=640:f32 y=640:f32"
    assert (small.name, small.weight, dict(small.restrict)) == ("small", 2, {"threads": (128,)})
    assert two_axes.workload.label == "times x=8x80:f32 y=8x80:f32"
    assert (conv2d.workload.op, conv2d.weight) == ("conv2d", 2)
    assert (folder / "was_run").read_text() == "once once "  # in a copy of this process first


def test_the_command_line_plans_and_shows_them(folder: Path) -> None:
    planned = command("tune", "work.yaml", "--kernels", "kernels.py", "--target", "h200", "--dry-run")
    assert planned.exit_code == 0 and "own_kernel_cuda" in planned.stdout, planned.output
    shown = command("space", "work.yaml", "--kernels", "kernels.py", "--target", "h200", "--task", 2)
    assert shown.exit_code == 0 and "threads" in shown.stdout, shown.output


def test_a_file_is_run_only_if_the_command_line_names_it(folder: Path) -> None:
    result = command("tune", "work.yaml", "--dry-run")
    assert result.exit_code == 2
    assert "work.yaml:4:" in result.stderr and "add --kernels kernels.py" in result.stderr
    with pytest.raises(WorkloadFileError, match="a Python file is run only if you name it"):
        workload_file.load(folder / "work.yaml")
    assert not (folder / "was_run").exists()


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("{ op: kernels:time, shape: { x: 5 } }", "does not exist (did you mean 'times'?)"),
        ("{ op: others:times, shape: { x: 5 } }", "--kernels names kernels.py): add --kernels others.py"),
        ("{ op: kernels:times, shape: { x: '8:float32' } }", "shape lacks a, y; times takes x, a, y"),
        ("{ op: kernels:times, shape: { z: 8 } }", "times has no argument 'z'; it takes x, a, y"),
        ("{ op: kernels:times, shape: { x: '8:flaot32', a: 1, y: '8:float32' } }", "x has dtype 'flaot32'"),
        ("{ op: kernels:times, shape: { x: [8], a: 1, y: 1 } }", "must be text like 4096x4096:float32"),
        ("{ op: kernels:times, shape: 5 }", "a mapping from the kernel's arguments"),
        ("{ op: kernels:times, shape: { x: 1 }, padding: 1 }", "unknown key 'padding'"),
        ("{ op: kernels:times }", "shape lacks x, a, y"),
    ],
)
def test_mistakes_point_into_the_file(folder: Path, task: str, text: str) -> None:
    (folder / "work.yaml").write_text(f"tasks:\n  - {task}\n")
    result = command("tune", "work.yaml", "--kernels", "kernels.py", "--dry-run")
    assert result.exit_code == 2
    assert text in result.stderr and "work.yaml:2:" in result.stderr


def test_two_files_of_one_name_are_refused() -> None:
    result = command("tune", "work.yaml", "--kernels", "a/kernels.py", "--kernels", "b/kernels.py")
    assert result.exit_code == 2 and "have the same name" in result.stderr
