"""A tunable that is defined where no module is: typed into a REPL, and in a cell of a notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CELLS = [
    """import numpy as np
from numba import cuda
import schedsearch

FACTOR = 3
""",
    """@schedsearch.tunable(
    knobs={"threads": (64, 128)}, block=lambda k: k.threads, db="own.db",
    grid=lambda x, k: -(-x.size // k.threads), outputs=["y"], reference=lambda x: FACTOR * x)
def times(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = FACTOR * x[i]
""",
    """x = np.arange(1000, dtype=np.float32)
y = np.empty_like(x)
summary = times.tune(x, y, trials=1, workers=1)
times(x, y)
print("right:", np.array_equal(y, 3 * x), [str(outcome) for outcome in summary.tasks[0].outcomes])
""",
]
PRINTED = "right: True ['ok']"


def test_a_kernel_that_is_typed_into_a_repl_is_tuned_and_called(tmp_path: Path) -> None:
    typed = "\n".join(CELLS)
    done = subprocess.run(
        [sys.executable, "-i", "-q"], input=typed, cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert PRINTED in done.stdout, done.stderr


@pytest.mark.integrations
@pytest.mark.xdist_group("notebooks")
def test_a_kernel_of_a_notebook_is_tuned_and_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=800, resources={"metadata": {"path": str(tmp_path)}}).execute()
    texts: list[Any] = [output.get("text", "") for output in notebook.cells[-1].outputs]
    assert PRINTED in "".join(texts)
