"""workload.yaml: the meaning of a file, and reading and writing it."""

from __future__ import annotations

import os
import pickle
import threading
import time
from pathlib import Path

import pytest
from plugin_support import OPERATORS, install, install_toys
from workload_file_support import CPU, GPU, TASK, one, only, plain, problems

import schedsearch
from schedsearch.measurement import COLD_GRAPH
from schedsearch.ops import STAGES, Parameter, StageKind, stages
from schedsearch.reading import open_input
from schedsearch.task import Task
from schedsearch.workload import Workload, as_python
from schedsearch.workload_file import WorkloadFileError, dump, json_schema, load, parse, parse_duration_s
from schedsearch.workload_file.limits import MAX_FILE_BYTES


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
            measure: {mode: hot-graph-v1, timeout: 5s, build_timeout: 1m, reference_timeout: 2m, workers: 4}
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
        assert file.measure.model_dump() == {
            "mode": "hot-graph-v1", "timeout_s": 5.0, "build_timeout_s": 60.0, "reference_timeout_s": 120.0, "workers": 4
        }  # fmt: skip
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
        error = file.error([("no such knob", 0, ("restrict", "bn"))])
        assert error.render() == "f.yaml:8:7: no such knob\n     8 |       bn: [1]\n       |       ^^"
        inherited = parse("defaults:\n  restrict: {bm: [64]}\n" + one(""), "f.yaml")
        assert inherited.where(0, "restrict", "bm") == "f.yaml:2:14"

    def test_a_name_belongs_to_a_task_and_one_among_defaults_is_the_only_mistake(self) -> None:
        line, column, message = only(f"defaults: {{name: layer}}\ntasks: [{TASK}, {TASK.replace('n: 1', 'n: 2')}]\n")
        assert (line, column) == (1, 12)
        assert "name" in message

    def test_two_ranges_in_a_task_are_one_too_many(self) -> None:
        shape = "{n: 1..4, h: 8..9, w: 8, c: 8, k: 8, r: 1, s: 1}"
        line, column, message = only(f"tasks:\n  - op: conv2d\n    shape: {shape}\n")
        assert (line, column) == (3, 25)
        assert message == "n and h are ranges; only one size of a task may be a range"

    def test_an_array_of_exactly_one_tebibyte_is_possible_and_a_larger_one_is_not(self) -> None:
        def matrix(rows: int) -> str:
            return f"tasks: [{{op: layer_norm, shape: {{x: [{rows}, 1048576]}}, dtype: float32}}]"

        (task,) = parse(matrix(1 << 18)).tasks
        assert task.workload.signature[0].nbytes == 1 << 40
        assert "takes 1 TiB; an array of at most 1 TiB is possible" in only(matrix((1 << 18) + 1))[2]


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
            ("{op: copy, shape: {rows: 0, columns: 1}}", "0", "rows must be an integer of at least 1, got 0"),
            ("{op: copy, shape: {rows: 1}}", "{rows: 1}", "columns (columns of x) is missing; give an integer of at"),
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
            return validator(schema).is_valid(plain(text))

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
