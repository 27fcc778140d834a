"""workload.yaml: the meaning of a file, and the reports of its mistakes."""

from __future__ import annotations

import json
import os
import pickle
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugin_support import OPERATORS, install, install_toys

import schedsearch
from schedsearch.errors import UsageError, WorkloadError
from schedsearch.measurement import COLD_GRAPH, MODES
from schedsearch.ops import STAGES, Parameter, StageKind, operator, operator_names, stages
from schedsearch.ops.registry import BUILT_IN
from schedsearch.reading import open_input
from schedsearch.target import PRESETS, Target
from schedsearch.task import Task
from schedsearch.workload import Workload, as_python
from schedsearch.workload_file import WorkloadFile, WorkloadFileError, dump, json_schema, load, parse, parse_duration_s
from schedsearch.workload_file.limits import MAX_FILE_BYTES
from schedsearch.workload_file.schema import sizes
from schedsearch.workload_file.yaml_source import YamlSource

ROOT = Path(__file__).resolve().parents[1]
GPU = PRESETS["h200"]
CPU = Target("cpu", "some CPU")
TASK = "{op: conv2d, shape: {n: 1, h: 8, w: 8, c: 16, k: 32, r: 3, s: 3}}"


def one(text: str) -> str:
    """A file with one task, to which lines are added."""
    return f"tasks:\n  - op: conv2d\n    shape: {{n: 1, h: 8, w: 8, c: 16, k: 32, r: 3, s: 3}}\n{text}"


def problems(text: str) -> list[tuple[int, int, str]]:
    """(line, column, message) of every mistake in a file."""
    with pytest.raises(WorkloadFileError) as caught:
        parse(text, "f.yaml")
    assert all(p.key == f"f.yaml:{p.span.line}:{p.span.column}" for p in caught.value.problems)
    return [(p.span.line, p.span.column, p.message) for p in caught.value.problems]


def only(text: str) -> tuple[int, int, str]:
    found = problems(text)
    assert len(found) == 1, found
    return found[0]


class TestMeaning:
    def test_a_small_file_takes_defaults_for_everything_else(self) -> None:
        file = parse(f"tasks: [{TASK}]")
        assert (file.target, file.db) == ("auto", "records.db")
        assert (file.budget.trials, file.budget.time_s) == (None, None)
        assert (file.tuner.name, file.tuner.seed) == ("xgb", 0)
        assert file.measure.mode == COLD_GRAPH
        assert (file.measure.timeout_s, file.measure.build_timeout_s, file.measure.workers) == (None, None, None)
        (task,) = file.tasks
        assert task.workload == Workload.conv2d(n=1, h=8, w=8, c=16, k=32, r=3, s=3)
        assert (task.weight, task.restrict, task.templates) == (1.0, {}, None)
        assert task.name == task.workload.label

    def test_every_key(self) -> None:
        file = parse(
            """
            version: 1
            target: cuda:1
            db: here.db
            budget: {trials: 7, time: 1h30m}
            tuner: {name: ga, seed: 3}
            measure: {mode: hot-graph-v1, timeout: 5s, build_timeout: 1m, workers: 4}
            tasks:
              - name: all of it
                op: conv2d
                shape: {n: 2, h: 9, w: 10, c: 16, k: 32, r: 3, s: 5}
                stride: [1, 2]
                padding: [1, 2, 3, 4]
                dilation: 2
                groups: 4
                layout: NCHW
                weight_layout: OHWI
                dtype: bfloat16
                out_dtype: float32
                epilogue: [bias, relu]
                weight: 2.5
                restrict: {bm: [64, 128], stages: 4, order: [row, col], split: [true]}
                templates: [conv2d_mma]
            """
        )
        assert (file.target, file.db) == ("cuda:1", "here.db")
        assert (file.budget.trials, file.budget.time_s) == (7, 5400.0)
        assert (file.tuner.name, file.tuner.seed) == ("ga", 3)
        assert file.measure.model_dump() == {"mode": "hot-graph-v1", "timeout_s": 5.0, "build_timeout_s": 60.0, "workers": 4}
        (task,) = file.tasks
        assert task.workload == Workload.conv2d(
            n=2, h=9, w=10, c=16, k=32, r=3, s=5, stride=(1, 2), padding=(1, 2, 3, 4), dilation=(2, 2), groups=4,
            layout="NCHW", weight_layout="OHWI", dtype="bfloat16", out_dtype="float32", epilogue=("bias", "relu"),
        )  # fmt: skip
        assert (task.name, task.weight, task.templates) == ("all of it", 2.5, ("conv2d_mma",))
        assert task.restrict == {"bm": (64, 128), "stages": (4,), "order": ("row", "col"), "split": (True,)}

    def test_defaults_apply_unless_the_task_says_otherwise_and_shape_merges_size_by_size(self) -> None:
        file = parse(
            """
            defaults: {op: conv2d, padding: 1, weight: 2, epilogue: [relu], shape: {n: 4, r: 3, s: 3}}
            tasks:
              - shape: {h: 8, w: 8, c: 16, k: 16}
              - shape: {h: 8, w: 8, c: 16, k: 16, r: 1, s: 1}
                padding: 0
                epilogue: []
            """
        )
        first, second = file.tasks
        assert first.workload == Workload.conv2d(n=4, h=8, w=8, c=16, k=16, r=3, s=3, padding=1, epilogue=("relu",))
        assert second.workload == Workload.conv2d(n=4, h=8, w=8, c=16, k=16, r=1, s=1)
        assert (first.weight, second.weight) == (2.0, 2.0)

    def test_dtype_auto_follows_the_target(self) -> None:
        file = parse(one("    dtype: auto\n"))
        with pytest.raises(RuntimeError, match="resolve"):
            _ = file.tasks
        assert file.resolve(GPU).tasks[0].workload.dtype == "float16"
        assert file.resolve(CPU).tasks[0].workload.dtype == "float32"
        assert file.resolve(CPU).tasks[0].workload.out_dtype == "float32"
        fixed = parse(one("    dtype: bfloat16\n"))
        assert fixed.resolve(CPU).tasks == fixed.tasks == fixed.resolve(GPU).tasks

    def test_anchors_aliases_and_merge_keys(self) -> None:
        file = parse(
            """
            tasks:
              - &a {op: conv2d, shape: &s {n: 1, h: 8, w: 8, c: 16, k: 32, r: 3, s: 3}, padding: 1}
              - {<<: *a, padding: 2}
              - {op: conv2d, shape: {<<: [*s], k: 64}}
            """
        )
        assert [t.workload.padding[0] for t in file.tasks] == [1, 2, 0]
        assert [t.workload.k for t in file.tasks] == [32, 32, 64]

    @pytest.mark.parametrize(
        ("text", "seconds"),
        [
            ("90s", 90),
            ("10m", 600),
            ("1h30m", 5400),
            ("1h 30m 5s", 5405),
            ("1.5h", 5400),
            (45, 45),
            (0.5, 0.5),
            ("0.25s", 0.25),
        ],
    )
    def test_durations(self, text: object, seconds: float) -> None:
        assert parse_duration_s(text) == seconds

    @pytest.mark.parametrize(
        "text", ["", "10", "10x", "-5s", "0s", 0, -1, True, None, "m10", "1m1h", float("inf"), float("nan")]
    )
    def test_no_durations(self, text: object) -> None:
        with pytest.raises(ValueError, match="90s"):
            parse_duration_s(text)

    def test_a_place_can_be_asked_for_later(self) -> None:
        """The session finds that a knob does not exist and points at it."""
        file = parse("defaults:\n  op: conv2d\n  restrict: {bm: [64]}\n" + one("    restrict:\n      bn: [1]\n"), "f.yaml")
        assert file.where(0, "restrict", "bn") == "f.yaml:8:7"
        assert file.where(0, "op") == "f.yaml:5:5"
        assert file.where(0, "shape", "k") == file.where(0, "k") == "f.yaml:6:38"
        assert file.where(0, "restrict", "nowhere") == "f.yaml:8:7"
        assert file.where(0) == "f.yaml:5:5"
        error = file.error("no such knob", 0, "restrict", "bn")
        assert error.render() == "f.yaml:8:7: no such knob\n     8 |       bn: [1]\n       |       ^^"
        inherited = parse("defaults:\n  restrict: {bm: [64]}\n" + one(""), "f.yaml")
        assert inherited.where(0, "restrict", "bm") == "f.yaml:2:14"


class TestMistakes:
    def test_all_are_told_at_once_in_the_order_of_the_file_with_line_and_caret(self) -> None:
        text = (
            "targt: cpu\n"
            "budget: {trials: 0}\n"
            "tasks:\n"
            "  - op: conv2d\n"
            "    shape: {n: 1, h: 8, w: -8, c: 16, k: 32, r: 3, s: 3}\n"
            "    layout: NHCW\n"
        )
        with pytest.raises(WorkloadFileError) as caught:
            parse(text, "net.yaml")
        assert caught.value.exit_code == 2
        assert isinstance(caught.value, UsageError)
        allowed = "version, target, db, budget, tuner, measure, defaults, tasks"
        assert caught.value.render().splitlines() == [
            f"net.yaml:1:1: unknown key 'targt' (did you mean 'target'?); allowed: {allowed}",
            "     1 | targt: cpu",
            "       | ^^^^^",
            "net.yaml:2:18: trials must be a whole number from 1 to 1,000,000,000, got 0",
            "     2 | budget: {trials: 0}",
            "       |                  ^",
            "net.yaml:5:28: w must be a whole number of at least 1, got -8",
            "     5 |     shape: {n: 1, h: 8, w: -8, c: 16, k: 32, r: 3, s: 3}",
            "       |                            ^^",
            "net.yaml:6:13: layout 'NHCW' is not possible (did you mean 'NHWC'?); "
            "allowed: NHWC, NCHW, NCHW[x]c (e.g. NCHW32c)",
            "     6 |     layout: NHCW",
            "       |             ^^^^",
        ]
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("line", "column", "message"),
        [
            ("    strid: 2", 5, "unknown key 'strid' (did you mean 'stride'?)"),
            ("    stride: [1, 2, 3]", 13, "stride must be a whole number >= 1 or [vertical, horizontal], got [1, 2, 3]"),
            ("    padding: -1", 14, "padding must be a whole number >= 0"),
            ("    dilation: 0", 15, "dilation must be"),
            ("    groups: no", 13, "groups must be a whole number of at least 1, got 'no'"),
            ("    groups: true", 13, "groups must be a whole number of at least 1, got True"),
            ("    stride: 99999999999999999999", 13, "stride must be at most 2147483647, got 99999999999999999999"),
            ("    dtype: fp16", 12, "dtype 'fp16' is not possible; allowed: float16, bfloat16, float32"),
            ("    dtype: Float16", 12, "(did you mean 'float16'?)"),
            ("    layout: NWHC", 13, "(did you mean 'NHWC'?)"),
            ("    epilogue: [bias, rleu]", 22, "(did you mean 'relu'?)"),
            ("    epilogue: relu", 15, "epilogue must be a list of stages"),
            ("    weight: 0", 13, "weight must be a number above zero, got 0"),
            ("    weight: .nan", 13, "weight must be a number above zero"),
            ("    weight: true", 13, "weight must be a number above zero, got true"),
            ("    weight: heavy", 13, "got 'heavy'"),
            ("    templates: conv2d_mma", 16, "templates must be a list of at least one template name, got 'conv2d_mma'"),
            ("    templates: []", 16, "got an empty list"),
            ("    templates: [a, 3]", 20, "item 2 of templates must be the name of a template, got 3"),
            ("    restrict: [bm]", 15, "restrict must be a mapping from knobs"),
            ("    restrict: {bm: []}", 20, "bm must be a value, or a list of at least one value"),
            ("    restrict: {bm: [64, 1.5]}", 20, "each a whole number, text or boolean, got a list"),
            ("    restrict: {bm: {a: 1}}", 20, "got a mapping with 'a'"),
            ("    name: ''", 11, "name must be text, got ''"),
            ("    name: [a]", 11, "name must be text, got a list"),
            ("    k: 32", 5, "unknown key 'k' (it belongs in shape: {k: ...})"),
            ("    dtype: auto\n    out_dtype: float16", 16, "allowed: float32 (dtype auto is float32 on a CPU)"),
        ],
    )  # fmt: skip
    def test_of_a_task(self, line: str, column: int, message: str) -> None:
        got_line, got_column, got = only(one(line + "\n"))
        assert (got_line, got_column) == (3 + line.count("\n") + 1, column)
        assert message in got

    @pytest.mark.parametrize(
        ("shape", "column", "message"),
        [
            ("{n: 1, h: 8, w: 8, c: 16, k: 32, r: 3}", 13, "s (kernel width) is missing"),
            ("{n: 1, h: 8, w: 8, c: 16, k: 32, r: 3, s: 3, stride: 2}", 58, "it belongs beside shape, not in it"),
            ("{n: 1, h: 8, w: 8, c: 16, k: 32, r: 9, s: 3}", 49, "the kernel spans 9"),
            ("{n: 0, h: 8, w: 8, c: 16, k: 32, r: 3, s: 3}", 17, "n must be a whole number of at least 1, got 0"),
            ("{n: 1.0, h: 8, w: 8, c: 16, k: 32, r: 3, s: 3}", 17, "got 1.0"),
            ("{n: 3000000000, h: 8, w: 8, c: 16, k: 32, r: 3, s: 3}", 17, "n must be at most 2147483647, got 3000000000"),
            (
                "{n: 2147483647, h: 1024, w: 8, c: 16, k: 32, r: 3, s: 3}",
                13,
                "takes 512 TiB; an array of at most 1 TiB is possible",
            ),
            ("[1, 8, 8, 16]", 13, "shape must be a mapping {n: batch, h: input height"),
            ("", 6, "shape must be a mapping"),
        ],
    )
    def test_of_a_shape(self, shape: str, column: int, message: str) -> None:
        line, got_column, got = only(f"tasks:\n  - {{op: conv2d,\n     shape: {shape}}}\n")
        assert line == 3
        assert message in got
        assert got_column == column

    def test_channels_that_do_not_divide_into_groups(self) -> None:
        (first, second) = problems(one("    groups: 12\n"))
        assert first[:2] == (3, 34)
        assert "c=16 input channels do not divide into groups=12" in first[2]
        assert "k=32 output channels do not divide into groups=12" in second[2]

    @pytest.mark.parametrize(
        ("text", "line", "column", "message"),
        [
            (f"version: 2\ntasks: [{TASK}]", 1, 10, "version must be 1, the only version that this schedsearch knows"),
            (f"version: '1'\ntasks: [{TASK}]", 1, 10, "got '1'"),
            (f"target: gpu\ntasks: [{TASK}]", 1, 9, "target must be auto, cpu, cuda or cuda:N, got 'gpu'"),
            (f"target: cpu:1\ntasks: [{TASK}]", 1, 9, "got 'cpu:1'"),
            (f"db: 3\ntasks: [{TASK}]", 1, 5, "db must be the path of a file, got 3"),
            (f"budget: 3\ntasks: [{TASK}]", 1, 9, "budget must be a mapping, e.g. {trials: 200, time: 10m}, got 3"),
            (f"budget:\ntasks: [{TASK}]", 1, 1, "budget must be a mapping, e.g. {trials: 200, time: 10m}, got nothing"),
            (f"budget: {{trials: yes}}\ntasks: [{TASK}]", 1, 18, "got 'yes'"),
            (f"budget: {{trials: true}}\ntasks: [{TASK}]", 1, 18, "got true"),
            (f"budget: {{time: soon}}\ntasks: [{TASK}]", 1, 16, "time must be a duration above zero"),
            (f"tuner: {{name: xbg}}\ntasks: [{TASK}]", 1, 15, "annealing, random, grid, got 'xbg' (did you mean 'xgb'?)"),
            (f"tuner: {{seed: -1}}\ntasks: [{TASK}]", 1, 15, "seed must be a whole number from 0 to 4294967295, got -1"),
            (f"measure: {{mode: cold}}\ntasks: [{TASK}]", 1, 17, f"mode must be one of {', '.join(MODES)}"),
            (f"measure: {{timeout: 0s}}\ntasks: [{TASK}]", 1, 20, "timeout must be a duration above zero"),
            (f"measure: {{workers: 0}}\ntasks: [{TASK}]", 1, 20, "workers must be a whole number from 1 to 1024, got 0"),
            (f"defaults: {{name: x}}\ntasks: [{TASK}]", 1, 12, "unknown key 'name'"),
            (f"defaults: {{strid: 1}}\ntasks: [{TASK}]", 1, 12, "(did you mean 'stride'?)"),
            (f"defaults: {{stride: 0}}\ntasks: [{TASK}, {TASK.replace('n: 1', 'n: 2')}]", 1, 20, "stride must be"),
            (f"defaults: 7\ntasks: [{TASK}]", 1, 11, "defaults must be a mapping"),
            ("version: 1\n", 1, 1, "tasks is missing; it must be a list of at least one task"),
            ("tasks: []\n", 1, 8, "tasks must be a list of at least one task, each beginning with `- `, got an empty list"),
            ("tasks: {op: conv2d}\n", 1, 8, "got a mapping with 'op'"),
            ("tasks: [conv2d]\n", 1, 9, "a task must be a mapping with the keys op and shape, got 'conv2d'"),
            ("tasks:\n  - op: conv3d\n", 2, 9, "unknown operator 'conv3d' (did you mean 'conv2d'?); allowed: "),
            ("tasks:\n  - op: [conv2d]\n", 2, 9, "unknown operator a list; allowed"),
            ("tasks:\n  - shape: {n: 1}\n", 2, 5, "op is missing; allowed: "),
            ("tasks:\n  - op: conv2d\n", 2, 5, "shape is missing; it must be a mapping of n (batch), h (input height)"),
            (f"tasks:\n  - {TASK}\n  - {TASK}\n", 3, 5, "the same workload as task 1; keep one"),
            ("- op: conv2d\n", 1, 1, "a workload file is a mapping, got a list"),
            ("conv2d\n", 1, 1, "a workload file is a mapping, got 'conv2d'"),
            ("", 1, 1, "the file is empty; it needs at least the key `tasks`"),
            ("# nothing\n", 1, 1, "the file is empty"),
        ],
    )  # fmt: skip
    def test_of_a_file(self, text: str, line: int, column: int, message: str) -> None:
        got = problems(text)[0]
        assert got[:2] == (line, column)
        assert message in got[2]

    def test_two_tasks_of_one_name(self) -> None:
        tasks = TASK.replace("{op", "{name: a, op"), TASK.replace("{op", "{name: a, op").replace("n: 1", "n: 2")
        line, column, message = only("tasks:\n" + "".join(f"  - {task}\n" for task in tasks))
        assert (line, column) == (3, 12)
        assert message == "task 1 has the name 'a' too; names must differ"

    def test_a_duplicate_key_names_both_lines(self) -> None:
        line, column, message = only(one("    padding: 1\n    stride: 2\n    padding: 2\n"))
        assert (line, column) == (6, 5)
        assert message == "duplicate key 'padding': first given at line 4; keep one"

    @pytest.mark.parametrize(
        ("text", "line", "column", "message"),
        [
            ("tasks: [a\n", 2, 1, "(while parsing a flow sequence that begins in line 1)"),
            ("tasks:\n\t- op: conv2d\n", 2, 1, "a tab is used for indentation; use spaces"),
            ("name: a: b\n", 1, 8, "this line has a second ': '"),
            ("tasks: *nowhere\n", 1, 8, "undefined alias 'nowhere'"),
            ("tasks: []\n---\ntasks: []\n", 2, 1, "a second document begins here"),
            ("tasks: \x01\n", 1, 8, "YAML does not allow the character '\\x01'"),
            ("tasks: &a [*a]\n", 1, 8, "the anchor &a contains itself"),
            ("a: &a {<<: *a}\n", 1, 4, "the anchor &a merges itself"),
            ("<<: 3\n", 1, 5, "<< must name a map"),
            ("? [a]\n: 3\n", 1, 3, "a key must be text"),
            ("db: !secret x\n", 1, 5, "the tag !secret is not possible"),
            ("db: !!int three\n", 1, 5, "'three' does not have the kind of its tag !!int"),
            (f"db: {'x' * 1001}\n", 1, 5, "this value is 1,001 characters long"),
            ("budget: {trials: " + "9" * 40 + "}\n", 1, 18, "trials must be a whole number from 1"),
            ("budget: {trials: " + "9" * 400 + "}\n", 1, 18, "this number has 400 digits; at most 40 make sense"),
            ("budget: {trials: 0x" + "f" * 300 + "}\n", 1, 18, "this number has 302 digits"),
            ("budget: {time: 1e400}\n", 1, 16, "time must be a duration above zero and of at most 14 days"),
            ("budget: {time: 15h 0m 1000000000s}\n", 1, 16, "time must be a duration above zero and of at most 14 days"),
            ("db: !!int ''\n", 1, 5, "'' does not have the kind of its tag !!int"),
            ("db: !!float _\n", 1, 5, "'_' does not have the kind of its tag !!float"),
            ('db: "\\UFFFFFFFF"\n', 1, 1, "the parser stops here with OverflowError"),
            ('db: "\\ud800"\n', 1, 5, "contains the character '\\ud800', which cannot be shown"),
            ('db: "a\\e[2J"\n', 1, 5, "contains the character '\\x1b', which cannot be shown"),
            ('"\\x00": 3\n', 1, 1, "contains the character '\\x00', which cannot be shown"),
            (f"? {'x' * 1001}\n: 3\n", 1, 3, "this value is 1,001 characters long"),
        ],
    )  # fmt: skip
    def test_of_the_yaml(self, text: str, line: int, column: int, message: str) -> None:
        got = next((p for p in problems(text) if message in p[2]), None)
        assert got is not None, problems(text)
        assert got[:2] == (line, column)

    def test_an_integer_too_long_for_python_does_not_crash(self) -> None:
        assert "characters long" in problems("budget: {trials: " + "9" * 5000 + f"}}\ntasks: [{TASK}]")[0][2]

    def test_deep_nesting_does_not_crash(self) -> None:
        assert "nested too deeply" in only("tasks: " + "[" * 5000 + "]" * 5000)[2]

    def test_nested_aliases_do_not_fill_the_memory(self) -> None:
        text = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
        for name, before in zip("bcdefghi", "abcdefgh", strict=True):
            text += f"{name}: &{name} [{', '.join(['*' + before] * 10)}]\n"
        assert "more than 150,000 steps; values, aliases, merge keys and tasks count" in only(text)[2]

    @pytest.mark.parametrize("merged", ["[*{0}, *{0}]", "*{0}"])
    def test_nested_merge_keys_are_followed_once_each(self, merged: str) -> None:
        """Followed at every occurrence, the 30 maps of the first case would take 2**30 steps."""
        text = "defaults:\n  restrict: &m0 {bm: [64]}\ntasks:\n  - op: conv2d\n"
        shapes = "{n: 1, h: 8, w: 8, c: 16, k: 32, r: 3, s: 3}"
        for i in range(1, 30):
            text += f"    m{i}: &m{i} {{<<: {merged.format(f'm{i - 1}')}}}\n"
        text += f"    restrict: *m29\n    shape: {shapes}\n"
        source = YamlSource("f.yaml", text)
        assert source.value["tasks"][0]["restrict"] == {"bm": [64]}
        assert source.steps.taken < 2_000

    @pytest.mark.parametrize(
        "text",
        [
            "a: &a {" + ", ".join(f"k{i}: 1" for i in range(2000)) + "}\nb: {<<: [" + ", ".join(["*a"] * 2000) + "]}\n",
            "defaults: {op: conv2d, restrict: {bm: [" + "1, " * 5000 + "1]}}\ntasks:\n" + "- {}\n" * 5000,
            "r: &r [" + "1, " * 5000 + "1]\ntasks:\n" + "- {restrict: {bm: *r}}\n" * 1000,
            "tasks: [" + "1," * 100_000 + "]",
        ],
        ids=["merges", "defaults", "aliases", "values"],
    )
    def test_a_file_that_takes_too_many_steps_is_refused(self, text: str) -> None:
        assert "takes more than 150,000 steps" in problems(text)[-1][2]

    def test_a_file_of_a_thousand_tasks_is_read(self) -> None:
        tasks = [
            f"  - {{op: conv2d, name: t{n}, shape: {{n: {n}, h: 8, w: 8, c: 16, k: 32, r: 3, s: 3}}, epilogue: [relu]}}\n"
            for n in range(1, 1001)
        ]
        assert len(parse("tasks:\n" + "".join(tasks)).tasks) == 1000

    def test_merges_and_aliases_that_nest_too_deeply_are_refused(self) -> None:
        text = "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 40))
        line, _, message = only(text)
        assert line == 1 and "nested too deeply; a workload file needs five levels" in message

    def test_after_a_hundred_mistakes_the_rest_is_not_looked_at(self) -> None:
        found = problems("tasks:\n" + "  - {}\n" * 5000)
        assert len(found) == 101
        assert found[-1][2] == "100 mistakes; the rest is not looked at"

    def test_an_anchor_may_be_used_again_without_a_warning(self, recwarn: pytest.WarningsRecorder) -> None:
        text = one("    name: &a x\n    stride: &a 2\n    dilation: *a\n")
        assert parse(text).tasks[0].workload.dilation == (2, 2) and not recwarn.list

    def test_a_long_epilogue_is_refused(self) -> None:
        assert only(one(f"    epilogue: [{'relu, ' * 65}]\n"))[2] == "epilogue has 65 stages; at most 64 are possible"

    def test_sizes_beyond_any_float_are_refused(self) -> None:
        big = 2**31 - 1
        message = only(f"tasks: [{{op: conv2d, shape: {{n: {big}, h: {big}, w: {big}, c: {big}, k: {big}, r: 1, s: 1}}}}]")[
            2
        ]
        assert "takes more than a billion TiB; an array of at most 1 TiB is possible" in message
        with pytest.raises(WorkloadError, match=r"n must be at most 2147483647.*stride must be at most 2147483647"):
            schedsearch.conv2d(n=10**400, h=1, w=1, c=1, k=1, r=1, s=1, stride=2**31)

    def test_an_unprintable_character_is_not_printed(self) -> None:
        with pytest.raises(WorkloadFileError) as caught:
            parse("db: a\x1b[2Jb\n", "f.yaml")
        assert "\x1b" not in caught.value.render()

    def test_a_yaml_1_1_boolean_is_not_a_number_and_a_key_n_stays_a_key(self) -> None:
        text = "%YAML 1.1\n---\n" + one("    groups: yes\n")
        line, column, message = only(text)
        assert (line, column) == (6, 13)
        assert "groups must be a whole number of at least 1, got True" in message

    def test_the_caret_stands_under_wide_characters_and_in_long_lines(self) -> None:
        with pytest.raises(WorkloadFileError) as wide:
            parse("{db: '寸法', versoin: 1}", "f.yaml")
        source, caret = wide.value.render().splitlines()[4:6]
        assert caret.index("^") == source.index("versoin") + 2  # two characters are two columns wide each
        with pytest.raises(WorkloadFileError) as long:
            parse(f"{{db: '{'x' * 500}', versoin: 1}}", "f.yaml")
        source, caret = long.value.render().splitlines()[4:6]
        assert len(source) < 180
        assert source[caret.index("^") :].startswith("versoin")


class TestInstalledOperators:
    """Mistakes in operators of other packages get the same words and places as in the built-in ones."""

    @pytest.fixture(autouse=True)
    def toys(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        install_toys(monkeypatch, tmp_path / "toys")

    def test_they_become_workloads(self) -> None:
        file = parse(
            "tasks: [{op: copy, shape: {rows: 3, columns: 5}, transposed: yes, dtype: auto}]".replace("yes", "true")
        )
        assert file.resolve(GPU).tasks[0].workload == Workload(
            "copy", {"rows": 3, "columns": 5, "transposed": True, "dtype": "float16"}
        )
        assert file.resolve(CPU).tasks[0].workload.dtype == "float32"

    @pytest.mark.parametrize(
        ("task", "marked", "message"),
        [
            ("{op: cpy, shape: {rows: 1}}", "cpy", "unknown operator 'cpy' (did you mean 'copy'?); allowed: "),
            ("{op: foreign, shape: {}}", "foreign", "operator 'foreign' can be in records only; allowed: "),
            ("{op: copy, shape: {rows: 0, columns: 1}}", "0", "rows must be a whole number of at least 1, got 0"),
            ("{op: copy, shape: {rows: 1}}", "{rows: 1}", "columns (columns of x) is missing; give a whole number of at"),
            ("{op: copy, shape: {rows: 1, colums: 1}}", "colums", "unknown key 'colums' in shape (did you mean 'columns'?)"),
            ("{op: copy, rows: 1, shape: {columns: 1}}", "rows", "unknown key 'rows' (it belongs in shape: {rows: ...})"),
            ("{op: copy}", "{op: copy}", "shape is missing; it must be a mapping of rows (rows of x), columns"),
            ("{op: copy, shape: {rows: 1, columns: 1}, padding: zero}", "zero", "padding 'zero' is not possible (did"),
            ("{op: copy, shape: {rows: 2, columns: 3}, padding: 1}", "1", "padding 1 is not possible; allowed: none, zeros"),
            ("{op: copy, shape: {rows: 1, columns: 1}, stride: 1}", "stride", "unknown key 'stride'"),
            ("{op: min_max, shape: {rows: 1, columns: 1}, dtype: int8}", "int8", "dtype 'int8' is not possible"),
            ("{op: copy, shape: {rows: 999999999, columns: 99999}}", "{rows: 999999999, columns: 99999}",
             "x, RC = 999999999x99999, takes 364 TiB"),
        ],
    )  # fmt: skip
    def test_their_mistakes_have_places(self, task: str, marked: str, message: str) -> None:
        text = f"tasks:\n  - {task}\n"
        with pytest.raises(WorkloadFileError) as caught:
            parse(text)
        found = [problem for problem in caught.value.problems if message in problem.message]
        assert len(found) == 1, caught.value.render()
        span = found[0].span
        assert text.splitlines()[span.line - 1][span.column - 1 :][: span.length] == marked

    def test_defaults_serve_each_operator_with_its_own_keys(self) -> None:
        file = parse(
            """
            defaults: {padding: 1, dtype: float32, shape: {rows: 4, n: 1, r: 1, s: 1}}
            tasks:
              - {op: conv2d, shape: {h: 8, w: 8, c: 8, k: 8}}
              - {op: copy, shape: {columns: 5}, padding: zeros}
            """
        )
        conv, copy = (task.workload for task in file.tasks)
        assert conv.padding == (1, 1, 1, 1) and copy.params == {
            "rows": 4, "columns": 5, "transposed": False, "padding": "zeros", "dtype": "float32"
        }  # fmt: skip

    def test_a_package_that_fails_is_named_where_it_is_used(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        install(monkeypatch, tmp_path / "acme", "acme", {OPERATORS: {"row_softmax": "acme_softmax:OP"}}, {})
        line, column, message = problems(f"tasks:\n  - {{op: row_softmax, shape: {{rows: 1}}}}\n  - {TASK}\n")[0]
        assert (line, column) == (2, 10)
        assert "operator 'row_softmax' of acme 1.0 (acme_softmax:OP) cannot be imported: ModuleNotFoundError" in message

    def test_the_json_schema_tells_operators_apart(self) -> None:
        validator = pytest.importorskip("jsonschema", reason="needs jsonschema (extra dev)").Draft202012Validator
        schema = json_schema()
        validator.check_schema(schema)

        def right(*tasks: str, defaults: str = "{}") -> bool:
            text = f"defaults: {defaults}\ntasks:\n" + "".join(f"  - {task}\n" for task in tasks)
            return validator(schema).is_valid(_plain(text))

        assert right(TASK, "{op: copy, shape: {rows: 1, columns: 1}, padding: zeros}")
        assert not right("{op: copy, shape: {rows: 1, columns: 1}, padding: 1}")
        assert not right("{op: conv2d, shape: {n: 1}, padding: zeros}")
        assert not right("{op: copy, shape: {n: 1}}")
        assert not right("{op: row_softmax, shape: {rows: 1}}")
        assert right("{shape: {rows: 1, columns: 1}, padding: zeros}", defaults="{op: copy}")
        assert right(TASK, defaults="{padding: zeros}") and right(TASK, defaults="{padding: 1}")
        assert not right(TASK, defaults="{padding: noughts}")

    def test_the_python_of_one_makes_it_again(self) -> None:
        workload = Workload("copy", {"rows": 3, "columns": 5, "dtype": "int8"})
        module, text = as_python(workload)
        assert (module, text) == ("schedsearch", "schedsearch.Workload('copy', {'rows': 3, 'columns': 5, 'dtype': 'int8'})")
        assert eval(text, {"schedsearch": schedsearch}) == workload


class TestStagesWithParameters:
    """A stage of a later operator takes parameters: `- {scale_by: {factor: 2}}`."""

    @pytest.fixture(autouse=True)
    def scale_by(self, monkeypatch: pytest.MonkeyPatch) -> None:
        parameters = {
            "factor": Parameter("multiplies every value", {"type": "number"}),
            "rounding": Parameter("of the product", {"enum": ["even", "up"], "default": "even"}),
        }
        kind = StageKind("scale_by", "multiplies", lambda value, *_: value, parameters=parameters)
        monkeypatch.setattr(stages, "STAGES", {**STAGES, "scale_by": kind})

    def task(self, stage: str) -> str:
        return one(f"    epilogue:\n      - bias\n      - {stage}\n")

    def test_they_are_part_of_the_workload_and_its_identity(self) -> None:
        (task,) = parse(self.task("{scale_by: {factor: 2, rounding: even}}")).tasks
        stage = task.workload.epilogue[1]
        assert (stage.name, dict(stage.params), str(stage)) == (
            "scale_by", {"factor": 2, "rounding": "even"}, "scale_by(factor=2)"
        )  # fmt: skip
        assert '"epilogue":["bias",{"scale_by":{"factor":2}}]' in task.workload.json
        assert Workload.from_json(task.workload.json) == task.workload == pickle.loads(pickle.dumps(task.workload))
        assert task.workload.replace(epilogue=["bias", {"scale_by": {"factor": 3}}]).id != task.workload.id
        assert eval(as_python(task.workload)[1], {"schedsearch": schedsearch}) == task.workload

    @pytest.mark.parametrize(
        ("stage", "column", "message"),
        [
            ("scale_by", 9, "stage scale_by: factor (multiplies every value) is missing; give a number"),
            ("{scal_by: {factor: 2}}", 9, "epilogue 'scal_by' is not possible (did you mean 'scale_by'?)"),
            ("{scale_by: 2}", 20, "stage scale_by takes a mapping of factor, rounding, got 2"),
            ("{scale_by: {factor: two}}", 29, "factor of stage scale_by must be a number, got 'two'"),
            ("{scale_by: {factor: 2, fctor: 3}}", 32, "stage scale_by has no parameter 'fctor' (did you mean 'factor'?)"),
            ("{scale_by: {factor: 2, rounding: odd}}", 42, "rounding of stage scale_by 'odd' is not possible"),
            ("{relu: {factor: 2}}", 17, "stage relu has no parameter 'factor'; it takes none"),
            ("[relu]", 9, "epilogue ['relu'] is not possible"),
            ("bias", 9, "stage 'bias' occurs more than once; only relu, sigmoid, silu, hard_swish, gelu may"),
        ],
    )
    def test_their_mistakes_have_places(self, stage: str, column: int, message: str) -> None:
        line, at, got = only(self.task(stage))
        assert (line, at) == (6, column)
        assert message in got


class TestFiles:
    def error(self, path: Path) -> str:
        with pytest.raises(WorkloadFileError) as caught:
            load(path)
        return caught.value.render()

    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "w.yaml"
        path.write_text(one(""), encoding="utf-8-sig")  # an editor's byte order mark is not a mistake
        assert load(path).tasks[0].workload.k == 32
        assert load(str(path)).path == str(path)

    def test_windows_line_ends(self, tmp_path: Path) -> None:
        path = tmp_path / "w.yaml"
        path.write_bytes(one("    strid: 1\n").replace("\n", "\r\n").encode())
        assert f"{path}:4:5: unknown key" in self.error(path)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        assert (
            self.error(tmp_path / "none.yaml")
            == f"{tmp_path / 'none.yaml'}: there is no such file; give the path of a workload file"
        )

    @pytest.mark.parametrize("name", ["kernels.py", "kernels.py:double"])
    def test_a_python_file(self, name: str, tmp_path: Path) -> None:
        assert "this is Python; give the path of a workload file" in self.error(tmp_path / name)

    def test_a_directory(self, tmp_path: Path) -> None:
        assert "this is a directory" in self.error(tmp_path)

    def test_bytes_that_are_not_utf8(self, tmp_path: Path) -> None:
        path = tmp_path / "w.yaml"
        path.write_bytes(b"version: 1\ndb: caf\xe9.db\n")
        assert self.error(path) == f"{path}:2:8: byte 0xe9 is not UTF-8; save the file as UTF-8 text"

    def test_a_file_that_is_not_text(self, tmp_path: Path) -> None:
        path = tmp_path / "records.db"
        path.write_bytes(b"SQLite format 3\0" + bytes(5000))
        assert "YAML does not allow the character" in self.error(path)

    def test_a_huge_file(self, tmp_path: Path) -> None:
        path = tmp_path / "w.yaml"
        with path.open("wb") as file:
            file.truncate(1 << 30)
        assert "larger than 256 KiB, the limit of a workload file" in self.error(path)
        assert "larger than 256 KiB" in self.error(Path("/dev/zero"))
        with pytest.raises(WorkloadFileError, match="larger than 256 KiB"):
            parse("#" * (MAX_FILE_BYTES + 1))

    def test_a_pipe(self, tmp_path: Path) -> None:
        """Text that comes late and in pieces is read whole."""
        path = tmp_path / "pipe"
        os.mkfifo(path)
        text = one("")

        def write() -> None:
            with path.open("w") as file:
                for part in (text[:10], text[10:]):
                    file.write(part)
                    file.flush()
                    time.sleep(0.05)

        writer = threading.Thread(target=write)
        writer.start()
        assert load(path).tasks[0].workload.k == 32
        writer.join()

    def test_a_pipe_to_which_nobody_writes(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(TimeoutError, match="nobody wrote to it within"):
            open_input(tmp_path / "pipe", writer_wait_s=0.1)

    def test_a_name_that_no_file_can_have(self, tmp_path: Path) -> None:
        assert "cannot be read" in self.error(tmp_path / "a\0b")
        assert "no such file" in self.error(tmp_path / "\udcff")


@given(st.text(max_size=60))
def test_any_text_is_understood_or_refused_with_places(text: str) -> None:
    try:
        parse(text)
    except WorkloadFileError as error:
        assert error.problems
        assert error.render()


_SCALARS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
_TASK_KEYS = [
    "shape",
    "stride",
    "padding",
    "groups",
    "dtype",
    "out_dtype",
    "layout",
    "epilogue",
    "weight",
    "restrict",
    "templates",
    "op",
]


@given(st.sampled_from(_TASK_KEYS), _VALUES)
def test_any_value_of_any_key_is_understood_or_refused_with_places(key: str, value: Any) -> None:
    task = {"op": "conv2d", "shape": {"n": 1, "h": 8, "w": 8, "c": 16, "k": 32, "r": 3, "s": 3}, "dtype": "auto", key: value}
    text = json.dumps({"tasks": [task]}).replace("NaN", ".nan").replace("-Infinity", "-.inf").replace("Infinity", ".inf")
    try:
        file = parse(text)
    except WorkloadFileError as error:
        assert all(problem.span.line == 1 for problem in error.problems)
    else:
        assert file.resolve(CPU).tasks[0].workload.n == 1


class TestJsonSchema:
    def test_the_checked_in_file_is_current(self) -> None:
        """`make docs` writes it."""
        path = ROOT / "schedsearch" / "workload_file" / "workload.schema.json"
        assert json.loads(path.read_text(encoding="utf-8")) == json_schema([operator(name) for name in BUILT_IN])

    def test_it_agrees_with_the_loader(self) -> None:
        validator = pytest.importorskip("jsonschema", reason="needs jsonschema (extra dev)").Draft202012Validator
        validator.check_schema(json_schema())
        check = validator(json_schema())
        for path in EXAMPLES:
            assert list(check.iter_errors(_plain(path.read_text(encoding="utf-8")))) == [], path
        for text in _refused():
            assert list(check.iter_errors(_plain(text))) != [], text

    def test_every_parameter_of_every_operator_is_in_it(self) -> None:
        definitions = json_schema()["$defs"]
        for op in map(operator, operator_names()):
            assert all(parameter.schema for parameter in op.parameters().values()), "give the new parameter a schema"
            task, shape = (definitions[f"{op.name}_{part}"]["properties"] for part in ("task", "shape"))
            assert set(op.parameters()) - set(sizes(op)) <= set(task)
            assert set(sizes(op)) == set(shape)

    def test_words_that_higher_layers_own_are_the_same_here(self) -> None:
        from schedsearch.tuner import TUNERS

        schema = json_schema()["$defs"]
        assert set(TUNERS) == set(schema["TunerChoice"]["properties"]["name"]["enum"])
        assert set(schema["MeasureOptions"]["properties"]["mode"]["enum"]) == set(MODES)


def _plain(text: str) -> Any:
    from ruamel.yaml import YAML

    return YAML(typ="safe", pure=True).load(text)


def _refused() -> Iterator[str]:
    """Files with a mistake that an editor can also see."""
    yield from (
        one(f"    {line}\n")
        for line in ("strid: 2", "stride: 0", "padding: [1, 2, 3]", "dtype: fp16", "weight: 0", "templates: []")
    )
    yield from (
        f"{line}\ntasks: [{TASK}]\n" for line in ("version: 2", "target: gpu", "tuner: {name: x}", "budget: {trials: 0}")
    )
    yield from ("tasks: []\n", "version: 1\n", "- a\n")


EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_right_and_points_at_the_schema(path: Path) -> None:
    file = load(path)
    assert isinstance(file, WorkloadFile)
    for target in (GPU, CPU):
        assert file.resolve(target).tasks
    first = path.read_text(encoding="utf-8").splitlines()[0]
    named = re.fullmatch(r"# yaml-language-server: \$schema=(.+)", first)
    assert named
    assert (path.parent / named[1]).resolve() == ROOT / "schedsearch" / "workload_file" / "workload.schema.json"


def test_quickstart_is_two_tasks_in_at_most_a_minute() -> None:
    file = load(ROOT / "examples" / "quickstart.yaml")
    assert len(file.resolve(CPU).tasks) == 2
    assert file.target == "auto"
    assert file.budget.time_s is not None
    assert file.budget.time_s <= 60


class TestDocumentation:
    PAGE = (ROOT / "docs" / "workload-file.md").read_text(encoding="utf-8")

    def test_every_key_and_every_word_is_on_the_page(self) -> None:
        schema = json_schema()
        sections = [schema, *schema["$defs"].values()]
        words = {key for section in sections for key in section["properties"]}
        for section in sections:
            for value in section["properties"].values():
                words |= set(value.get("enum", ())) | set(value.get("items", {}).get("enum", ()))
        assert sorted(word for word in words if f"`{word}`" not in self.PAGE) == []

    def test_the_files_on_the_page_are_right(self) -> None:
        texts = [text for text in re.findall(r"```yaml\n(.*?)```", self.PAGE, re.S) if "tasks:" in text]
        assert len(texts) == 13
        for text in texts:
            assert parse(text).resolve(CPU).tasks and parse(text).resolve(GPU).tasks

    def test_the_mistakes_on_the_page_are_what_is_printed(self) -> None:
        shown = re.search(r"```text\n(.*?)```", self.PAGE, re.S)
        assert shown
        text = "targt: cpu\n\ntasks:\n  - op: conv2d\n    shape: { n: 1, h: 8, w: -8, c: 16, k: 32, r: 3, s: 3 }\n"
        with pytest.raises(WorkloadFileError) as caught:
            parse(text, "net.yaml")
        assert caught.value.render() == shown[1].rstrip()


# --- Writing ------------------------------------------------------------------------------------------------------------
def test_what_is_written_is_read_as_the_same_tasks() -> None:
    tasks = (
        Task(Workload.conv2d(n=1, h=8, w=8, c=16, k=16, r=3, s=3, padding=[0, 1, 2, 3], stride=2), 2.5, name="a: b # c"),
        Task(Workload.conv2d(n=1, h=8, w=8, c=16, k=16, r=1, s=1, dtype="int8", epilogue=[{"requantise": {"to": "uint8"}}])),
        Task(
            Workload("transpose", {"x": [2, 3, 4], "permutation": [2, 0, 1], "dtype": "int8"}),
            restrict={"tile_x_bytes": (128,), "loads": ("async", "registers")},
            templates=("layout_transform_cuda",),
        ),
    )
    assert parse(dump(tasks, comment="two lines\nof comment")).tasks == tasks
    with pytest.raises(ValueError, match="at least one task"):
        dump([])
