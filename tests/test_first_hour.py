"""The tasks of the first hour: each command of docs/first-hour.md says what the page promises."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "first-hour.md").read_text(encoding="utf-8")
TASKS = re.findall(r"^\| (\d+) \| (.+?) \| `(schedsearch .+?)` \| `(.+?)` \|$", PAGE, re.MULTILINE)
WITHOUT_A_RUN = ("--help", "templates", "tun ", "doctor")  # tasks that neither need the files of others nor take long


def said(command: str, folder: Path) -> str:
    environment = {**os.environ, "TMPDIR": str(folder), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "schedsearch", *shlex.split(command)[1:]],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode in (0, 1, 2, 4, 6), done.stderr
    return done.stdout + done.stderr


def test_there_are_twenty_tasks() -> None:
    assert [int(number) for number, *_ in TASKS] == list(range(1, 21))


@pytest.mark.parametrize(
    ("command", "answer"),
    [pytest.param(*task[2:], id=task[1]) for task in TASKS if task[2].partition(" ")[2].startswith(WITHOUT_A_RUN)],
)
def test_tasks_that_need_no_run_are_answered(command: str, answer: str, tmp_path: Path) -> None:
    assert answer in said(command, tmp_path)


@pytest.mark.long
def test_every_task_is_answered_in_one_step(tmp_path: Path) -> None:
    for language, name in (("yaml", "wrong.yaml"), ("python", "broken.py")):
        (block,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
        (tmp_path / name).write_text(block, encoding="utf-8")
    outputs = {task: said(command, tmp_path) for _, task, command, _ in TASKS}
    assert {task: outputs[task] for _, task, _, answer in TASKS if answer not in outputs[task]} == {}
