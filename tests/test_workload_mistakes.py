"""workload.yaml: the reports of its mistakes, with their places."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from workload_file_support import CPU, TASK, one, only, problems

import schedsearch
from schedsearch.errors import UsageError, WorkloadError
from schedsearch.measurement import MODES
from schedsearch.workload_file import WorkloadFileError, limits, parse
from schedsearch.workload_file.limits import MAX_DEPTH
from schedsearch.workload_file.yaml_source import YamlSource


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
            "net.yaml:2:18: trials must be an integer from 1 to 1,000,000,000, got 0",
            "     2 | budget: {trials: 0}",
            "       |                  ^",
            "net.yaml:5:28: w must be an integer of at least 1, got -8",
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
            ("    stride: [1, 2, 3]", 13, "stride must be an integer >= 1 or [vertical, horizontal], got [1, 2, 3]"),
            ("    padding: -1", 14, "padding must be an integer >= 0"),
            ("    dilation: 0", 15, "dilation must be"),
            ("    groups: no", 13, "groups must be an integer of at least 1, got 'no'"),
            ("    groups: true", 13, "groups must be an integer of at least 1, got True"),
            ("    stride: 99999999999999999999", 13, "stride must be at most 2147483647, got 99999999999999999999"),
            ("    dtype: fp16", 12, "dtype 'fp16' is not possible (did you mean 'float16'?); allowed: float16, bfloat16,"),
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
            ("    restrict: {bm: [64, 1.5]}", 20, "each an integer, string or boolean, got a list"),
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
            ("{n: 0, h: 8, w: 8, c: 16, k: 32, r: 3, s: 3}", 17, "n must be an integer of at least 1, got 0"),
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
            (f"target: gpu\ntasks: [{TASK}]", 1, 9, "target must be auto, cpu, cuda or cuda:N (for several GPUs: "),
            (f"target: cpu:1\ntasks: [{TASK}]", 1, 9, "got 'cpu:1'"),
            (f"db: 3\ntasks: [{TASK}]", 1, 5, "db must be the path of a file, got 3"),
            (f"budget: 3\ntasks: [{TASK}]", 1, 9, "budget must be a mapping, e.g. {trials: 200, time: 10m}, got 3"),
            (f"budget:\ntasks: [{TASK}]", 1, 1, "budget must be a mapping, e.g. {trials: 200, time: 10m}, got nothing"),
            (f"budget: {{trials: yes}}\ntasks: [{TASK}]", 1, 18, "got 'yes'"),
            (f"budget: {{trials: true}}\ntasks: [{TASK}]", 1, 18, "got true"),
            (f"budget: {{time: soon}}\ntasks: [{TASK}]", 1, 16, "time must be a duration above zero"),
            (f"tuner: {{name: xbg}}\ntasks: [{TASK}]", 1, 15, "annealing, random, grid, got 'xbg' (did you mean 'xgb'?)"),
            (f"tuner: {{seed: -1}}\ntasks: [{TASK}]", 1, 15, "seed must be an integer from 0 to 4294967295, got -1"),
            (f"measure: {{mode: cold}}\ntasks: [{TASK}]", 1, 17, f"mode must be one of {', '.join(MODES)}"),
            (f"measure: {{timeout: 0s}}\ntasks: [{TASK}]", 1, 20, "timeout must be a duration above zero"),
            (f"measure: {{workers: 0}}\ntasks: [{TASK}]", 1, 20, "workers must be an integer from 1 to 1024, got 0"),
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
            ("budget: {trials: " + "9" * 40 + "}\n", 1, 18, "trials must be an integer from 1"),
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
        assert "nested too deeply" in only("tasks: " + "[" * MAX_DEPTH + "]" * MAX_DEPTH)[2]

    def test_a_value_counts_once_for_each_alias_of_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        text = "a: &a [x, x, x]\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]\n"
        monkeypatch.setattr(limits, "MAX_STEPS", 100)
        assert "more than 100 steps; values, aliases, merge keys and tasks count" in only(text)[2]
        problems(text.replace("c: [*b, *b, *b]", "c: []"))  # other mistakes
        assert "steps" not in str(problems(text.replace("c: [*b, *b, *b]", "c: []")))

    @pytest.mark.parametrize("merged", ["[*{0}, *{0}]", "*{0}"])
    def test_nested_merge_keys_are_followed_once_each(self, merged: str) -> None:
        """Followed at every occurrence, each level of the first case would take twice the steps of the one before."""

        def steps(levels: int) -> int:
            text = "defaults:\n  restrict: &m0 {bm: [64]}\ntasks:\n  - op: conv2d\n"
            for i in range(1, levels + 1):
                text += f"    m{i}: &m{i} {{<<: {merged.format(f'm{i - 1}')}}}\n"
            text += f"    restrict: *m{levels}\n    shape: {{n: 1, h: 8, w: 8, c: 16, k: 32, r: 3, s: 3}}\n"
            source = YamlSource("f.yaml", text)
            assert source.value["tasks"][0]["restrict"] == {"bm": [64]}
            return source.steps.taken

        assert steps(8) - steps(7) == steps(4) - steps(3)

    @pytest.mark.parametrize(
        "text",
        [
            "a: &a {" + ", ".join(f"k{i}: 1" for i in range(40)) + "}\nb: {<<: [" + ", ".join(["*a"] * 40) + "]}\n",
            "defaults: {op: conv2d, restrict: {bm: [" + "1, " * 100 + "1]}}\ntasks:\n" + "- {}\n" * 50,
            "r: &r [" + "1, " * 100 + "1]\ntasks:\n" + "- {restrict: {bm: *r}}\n" * 20,
            "tasks: [" + "1," * 400 + "]",
        ],
        ids=["merges", "defaults", "aliases", "values"],
    )
    def test_a_file_that_takes_too_many_steps_is_refused(self, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "MAX_STEPS", 1500)
        assert "takes more than 1,500 steps" in problems(text)[-1][2]

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
        assert "groups must be an integer of at least 1, got True" in message

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
