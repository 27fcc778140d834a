"""The notebook of the first steps is kept without outputs, and runs."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "first_steps.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def test_it_is_kept_without_outputs() -> None:
    assert [cell["id"] for cell in CELLS if cell.get("outputs") or cell.get("execution_count")] == []


def test_its_links_lead_somewhere() -> None:
    text = "".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#]+)", text)
    assert len(links) >= 2
    assert [link for link in links if not (NOTEBOOK.parent / link).exists()] == []


@pytest.mark.integrations
@pytest.mark.xdist_group("notebooks")
def test_it_runs_from_its_first_to_its_last_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # of `!schedsearch`
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=800, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = {cell["id"]: "".join(output.get("text", "") for output in cell.get("outputs", ())) for cell in notebook.cells}
    assert any("times as fast as the author's choice" in text for text in said.values())
    assert any("moving_mean" in text and "own_kernel_cpu" in text for text in said.values())
    assert any("the same: True" in text for text in said.values())
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("moving_mean" in output.get("data", {}).get("text/html", "") for output in outputs)  # the table of the run
