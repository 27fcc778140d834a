"""Kernels of users on a CPU, from a script or the command line to a program without Numba."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import isolate
from cli_support import schedsearch as command
from page_support import Page

import schedsearch
from schedsearch.errors import NoRecordError, UsageError

# ---- on the CPU, end to end

SCRIPT = """
import json, sys
import numpy as np
from numba import cuda
import schedsearch

SHIFT = 1

def helper(value, factor):
    return factor * value + SHIFT


@schedsearch.tunable(
    knobs={"threads": (64, 128), "per": (1, 4)},
    block=lambda k: k.threads, grid=lambda x, k: (-(-x.shape[1] // (k.threads * k.per)), x.shape[0]),
    outputs=["y"], inplace=["count"], db=sys.argv[1],
    reference=lambda x, a, count: (a * x + SHIFT, count + np.isfinite(x).sum(axis=1)))
def affine(x, a, y, count, *, per):
    first, row = cuda.grid(2)
    for j in range(per):
        column = first * per + j
        if column < x.shape[1]:
            y[row, column] = helper(x[row, column], a)
            cuda.atomic.add(count, row, 1)


x = np.random.default_rng(0).standard_normal((300, 40)).astype(np.float32).T
y, count = np.zeros((40, 300), np.float32), np.zeros(40, np.int32)
summary = affine.tune(x, 2.5, y, count, trials=4, workers=1, tuner="grid")
affine(x, 2.5, y, count)
np.testing.assert_allclose(y, 2.5 * x + 1, rtol=1e-5, atol=1e-6)
np.testing.assert_array_equal(count, 300)
affine(x, -1.0, y, count)
np.testing.assert_allclose(y, 1 - x, rtol=1e-5, atol=1e-6)
np.testing.assert_array_equal(count, 600)
step = affine.bind(x, 0.5, y, count)
step()
np.testing.assert_array_equal(count, 900)
other = np.ones((7, 5), np.float32)
affine(other, 3.0, y[:7, :5].copy(), count[:7].copy())
print(json.dumps({"outcomes": {str(k): v for k, v in summary.tasks[0].outcomes.items()}, "level": step.kernel.level,
                  "code": affine.definition.code}))
"""


DEPLOYED = """
import sys


class NoNumba:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numba", "numba_cuda"):
            raise ImportError(f"{name} is not installed")


sys.meta_path.insert(0, NoNumba())
import numpy as np
import schedsearch

kernel = schedsearch.own_kernel("affine", sys.argv[1])
x = np.random.default_rng(1).standard_normal((300, 40)).astype(np.float32).T
y, count = np.zeros((40, 300), np.float32), np.zeros(40, np.int32)
kernel(x, 2.0, y, count)
np.testing.assert_allclose(y, 2 * x + 1, rtol=1e-5, atol=1e-6)
np.testing.assert_array_equal(count, 300)
try:
    kernel(x[:10], 2.0, y[:10], count[:10])
except schedsearch.NoRecordError as error:
    print(error)
"""


def run(script: Path, *args: object) -> str:
    """What a script printed. It has one core, so that it starts few processes, and the CPU's lock for itself."""
    core = min(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, script.name, *map(str, args)],
        cwd=script.parent,
        env={**os.environ, "TMPDIR": str(script.parent)},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A database that a script without a `__main__` guard made, and what the script printed."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "script.py").write_text(SCRIPT)
    printed = run(folder / "script.py", folder / "own.db")
    return folder / "own.db", json.loads(printed)


def test_a_script_tunes_calls_and_binds_its_kernel_on_a_cpu(tuned: tuple[Path, dict[str, Any]]) -> None:
    assert tuned[1]["outcomes"] == {"ok": 3}  # with per=4 both numbers of threads give one grid, and equal code
    assert tuned[1]["level"] == "exact"


def test_it_is_deployed_where_numba_cannot_be_imported(tuned: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    done = command("records", "export", "--db", tuned[0], "--deploy", tmp_path / "small.db")
    assert done.exit_code == 0, done.output
    (tmp_path / "deployed.py").write_text(DEPLOYED)
    assert "there is no record of affine x=10x300:f32s" in run(tmp_path / "deployed.py", tmp_path / "small.db")


def test_deployment_by_name_says_what_the_database_has(tuned: tuple[Path, dict[str, Any]]) -> None:
    with pytest.raises(NoRecordError, match="did you mean 'affine'"):
        schedsearch.own_kernel("afine", tuned[0])
    with pytest.raises(UsageError, match=tuned[1]["code"]):
        schedsearch.own_kernel("affine", tuned[0], code="0000")
    assert [each.verified_by for each in schedsearch.own_kernel("affine", tuned[0]).workloads] == ["reference"]


# ---- on the command line

KERNEL_FILE = """
from numba import cuda
import schedsearch
from constants import FACTOR


@schedsearch.tunable(
    knobs={"threads": (64, 128)}, block=lambda k: k.threads, grid=lambda x, k: -(-x.size // k.threads),
    outputs=["y"], reference=lambda x, a: FACTOR * a * x, db="own.db")
def times(x, a, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = FACTOR * a * x[i]


plain = 5
"""


GIVEN = ("--shape", "x=640:float32", "--scalar", "a=0.5", "--shape", "y=640:float32")


@pytest.fixture
def kernel_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    isolate(tmp_path, monkeypatch)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "kernels.py").write_text(KERNEL_FILE)
    (tmp_path / "constants.py").write_text("FACTOR = 3\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    return tmp_path


def test_the_command_line_tunes_a_kernel_in_a_file(kernel_file: Path) -> None:
    planned = command("tune", "kernels.py:times", *GIVEN, "--target", "h200", "--dry-run")
    assert planned.exit_code == 0 and "own_kernel_cuda" in planned.stdout, planned.output
    done = command("tune", "kernels.py:times", *GIVEN, "--target", "cpu", "--trials", 1)
    assert done.exit_code == 0, done.output
    assert "schedsearch.own_kernel('times', db='own.db')" in done.stdout
    x, y = np.ones(640, np.float32), np.zeros(640, np.float32)
    schedsearch.own_kernel("times", kernel_file / "own.db")(x, 2.0, y)
    np.testing.assert_array_equal(y, 6)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("gone.py:times",), "gone.py is not a file"),
        (("broken.py:times",), "broken.py cannot be run: ZeroDivisionError"),
        (("kernels.py:time",), "time in kernels.py does not exist (did you mean 'times'?); its kernels: times"),
        (("kernels.py:plain",), "plain in kernels.py is of type int, not a tunable"),
        (("kernels.py:times",), "times needs x, a, y; x, a, y not given: write --shape x=4096x4096:float32"),
        (("kernels.py:times", *GIVEN, "--shape", "z=3:float32"), "--shape names 'z'; times takes x, a, y"),
        (("kernels.py:times", *GIVEN, "--shape", "x=3:float32"), "x is given twice"),
        (("kernels.py:times", "--shape", "640:float32"), "write it like --shape a=4096x4096:float32"),
        (("kernels.py:times", "--scalar", "a=half"), "--scalar a='half' is not a number"),
        (
            ("kernels.py:times", *GIVEN[:-1], "y=640"),
            "y='640' is not a shape; write an array like 4096x4096:float32, and a scalar as a number: 5 or 0.5",
        ),
        (("kernels.py", *GIVEN), "kernels.py is a Python file; name the kernel in it, e.g. kernels.py:KERNEL"),
        (("tiny.yaml", *GIVEN), "--shape and --scalar describe a kernel of your own, and tiny.yaml is a workload file"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(kernel_file: Path, words: tuple[str, ...], text: str) -> None:
    result = command("tune", *words, "--dry-run")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert text in result.stderr


@pytest.mark.long
def test_the_page_leads_from_a_kernel_to_its_deployment(tmp_path: Path) -> None:
    files = Page("own-kernels.md").files()
    assert list(files) == ["kernels.py", "tune.py", "use.py", "deploy.py"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with (tmp_path / "kernels.py").open("a") as kernels:
        kernels.write("\n\n" + Page("own-kernels.md").block_with("python", "@smooth.alternative"))
    for name in ("tune.py", "use.py", "deploy.py"):
        if name == "deploy.py":
            (tmp_path / "kernels.py").unlink()
        printed = run(tmp_path / name)
    assert printed.startswith("[0.")
