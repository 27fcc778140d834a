"""The README: every block runs as it stands, in a folder that looks like a clone, on a CPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from page_support import Page

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [(block.language, block.text) for block in Page("../README.md").fenced]
CLONED = ("Makefile", "setup.cfg", "pyproject.toml", "README.md", "scripts", "examples")


def test_it_is_short_and_its_longest_table_is_last() -> None:
    lines = README.splitlines()
    assert len(lines) <= 152
    tables = [match[0].count("\n") for match in re.finditer(r"(?:^\|.*\n)+", README, re.MULTILINE)]
    assert max(tables) == tables[-1]
    assert lines[-1] == "<!-- end -->"


def test_blocks_have_a_language_that_is_run() -> None:
    assert {language for language, _ in BLOCKS} == {"sh", "yaml", "python"}
    assert BLOCKS[0][0] == "sh"


def clone(folder: Path) -> None:
    """What `make quickstart` needs, with an environment that is installed already, and a model to build."""
    for name in CLONED:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, folder / name)
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, module in (("python", ""), ("schedsearch", " -m schedsearch")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable}{module} "$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    (programs / "activate").write_text(f"export PATH={programs}:$PATH\n", encoding="utf-8")
    for extra in ("cpu", "cu12", "cu13"):  # nothing to install
        (folder / ".venv" / f".installed-run-{extra}").touch()
    save_model(folder / "model.onnx")


def save_model(path: Path, batch: int | str = 1, c: int = 8, size: int = 14) -> None:
    """A convolution with a relu: x of (batch, c, size, size) to y of 16 channels."""
    onnx = pytest.importorskip("onnx")
    helper, array = onnx.helper, onnx.numpy_helper.from_array
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((16, c, 3, 3)), "b": rng.standard_normal(16)}
    graph = helper.make_graph(
        [helper.make_node("Conv", ["input", "w", "b"], ["c"], pads=[1, 1, 1, 1]), helper.make_node("Relu", ["c"], ["y"])],
        "small",
        [helper.make_tensor_value_info("input", onnx.TensorProto.FLOAT, (batch, c, size, size))],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (batch, 16, size, size))],
        [array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_every_block_runs_as_it_stands(tmp_path: Path) -> None:
    if shutil.which("make") is None or shutil.which("bash") is None:
        pytest.skip("needs make and bash")
    clone(tmp_path)
    (tmp_path / "tmp").mkdir()  # the CPU's lock is there, so the test need not wait for other runs on this machine
    path = f"{tmp_path / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TMPDIR": str(tmp_path / "tmp"), "CUDA_VISIBLE_DEVICES": "", "EXTRA": ""}
    said = []
    for i, (language, block) in enumerate(BLOCKS):
        if language == "yaml":
            (tmp_path / "my.yaml").write_text(block, encoding="utf-8")
            continue
        program = tmp_path / f"block{i}.{'py' if language == 'python' else 'sh'}"
        program.write_text(block, encoding="utf-8")
        command = [sys.executable] if language == "python" else ["bash", "-e"]
        done = subprocess.run(
            [*command, program.name], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=800
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
        said.append(done.stdout)
    own = next(text for (language, block), text in zip([b for b in BLOCKS if b[0] != "yaml"], said) if "tunable" in block)
    assert re.search(r"\d\.\d+x", own), own  # the first example of a kernel shows what tuning gained
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "model.ssx").exists()
