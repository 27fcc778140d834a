"""Fuzzes workload files: every file is read, or refused with an error that names file and place.

The seeds are the project's examples and a few files with every key. Of each file some nodes change, then often some bytes.
Most cases only read the file. Some also give it to the commands that plan with it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

from ruamel.yaml import YAML

from schedsearch.workload_file import WorkloadFileError, limits, load

from . import fuzzing, yaml_mutations
from .commands import call, check_message, check_text
from .fuzzing import Broken, Result

NAME = "workload_files"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EVERY_KEY = """\
version: 1
target: cpu
db: some.db
budget: {trials: 9, time: 1m30s}
tuner: {name: xgb, seed: 3}
measure: {timeout: 20s, build_timeout: 1m, workers: 1, mode: cold-graph-v1}
defaults: {op: conv2d, dtype: float32, layout: NHWC, shape: {n: 1}, restrict: {threads: [1, 2]}, templates: [conv2d_cpu]}
tasks:
  - {name: one, shape: {h: 8, w: 8, c: 8, k: 8, r: 3, s: 3}, stride: [1, 1], padding: [1, 1, 1, 1], dilation: 1, groups: 2}
  - {name: two, op: conv2d, shape: {n: 2, h: 9, w: 8, c: 8, k: 8, r: 1, s: 1}, out_dtype: float32, epilogue: [bias, relu],
     weight: 2.5}
"""
PLANNED_ONE_IN = 25
FEW_STEPS = 2_000  # a limit that aliases and merge keys reach which no other reader needs to fear
LONGEST_ERROR = 64 << 10


class WorkloadFiles:
    """See `fuzzing.Fuzzer`."""

    def __init__(self) -> None:
        texts = [path.read_text() for path in sorted(EXAMPLES.glob("*.yaml"))] + [EVERY_KEY]
        self._bytes = [text.encode() for text in texts]
        self._trees = [yaml_mutations.from_data(_plain(text)) for text in texts]

    def case(self, random: random.Random, folder: Path) -> str:
        path = folder / "some_file.yaml"
        path.write_bytes(self._content(random))
        planned = random.random() < 1 / PLANNED_ONE_IN
        most_steps = limits.MAX_STEPS if planned or random.random() < 0.8 else FEW_STEPS
        try:
            with mock.patch.object(limits, "MAX_STEPS", most_steps):
                file = load(path)
            for kind in ("cpu", "cuda"):
                if not all(task.workload.id for task in file._tasks[kind]):
                    raise Broken("a task without an id")
        except WorkloadFileError as error:
            _check(error, path)
            word = "refused"
        else:
            word = "read"
        if not planned:
            return word
        command = random.choice(
            (("space",), ("explain", "--db", folder / "none.db"), ("compile", "--db", folder / "none.db"))
        )
        target = random.choice((("--target", "cpu"), ("--target", "h200"), ("--json", "--target", "cpu")))
        names = ("some_file.yaml", "none.db")
        answer = call(*command, path, *target, codes=(0, 2, 4, 6), names=names, longest=LONGEST_ERROR)
        if word == "refused" and answer.code != 2:
            raise Broken(f"the file is refused, but {command[0]} exits with {answer.code}")
        return f"{word}, {command[0]} {answer.word}"

    def _content(self, random: random.Random) -> bytes:
        if random.random() < 0.2:
            data = random.choice(self._bytes)
        else:
            data = yaml_mutations.mutated(self._trees, random)
            if random.random() < 0.7:
                return data
        for _ in range(random.choice((1, 1, 2, 4))):
            data = yaml_mutations.mutate_bytes(data, self._bytes, random)
        return data


def run(seed: int, count: int, folder: Path, deadline_s: float | None = None, first: int = 0, **options: Any) -> Result:
    """See `fuzzing.run`."""
    return fuzzing.run(NAME, WorkloadFiles(), seed, count, folder, deadline_s, first=first, **options)


def _plain(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


def _check(error: WorkloadFileError, path: Path) -> None:
    if not error.problems:
        raise Broken("an error without problems")
    for problem in error.problems:
        check_message(str(problem), (path.name,), "a problem")
        if problem.span.line < 1 or problem.span.column < 1:
            raise Broken(f"the place {problem.span}")
    for text in (error.render(), str(error)):  # a file with a hundred mistakes is told of all of them
        check_text(text, "the error with all problems", LONGEST_ERROR)
