"""Records in the formats of other tuners, and files of other tuners as records."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import replay_support as support
from exchange_support import FORMATS, bare, records
from records_support import A100, conv
from records_support import record as make_record

from schedsearch.config import Config
from schedsearch.errors import UsageError, WorkloadError
from schedsearch.identity import canonical_json
from schedsearch.measurement import Outcome, Record
from schedsearch.records.formats import autotvm, kernel_tuner
from schedsearch.records.formats.content import Content
from schedsearch.records.formats.exchange import export_file, import_file, recognise, recordings
from schedsearch.records.store import Store
from schedsearch.workload import Workload


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(tmp_path / "records.db") as store:
        for one in records():
            store.append(one)
        yield store


class TestOurRecords:
    @pytest.mark.parametrize("form", FORMATS)
    @pytest.mark.parametrize("name", ["some.json", "some.json.gz"])
    def test_they_come_back_as_they_were(self, store: Store, tmp_path: Path, form: str, name: str) -> None:
        """Every repetition, message, stamp and failure comes back. A second import adds nothing. The format is found."""
        path = tmp_path / name
        counts = export_file(store, path, form)
        assert (counts["configurations"], counts["records"]) == (8, 10)
        with Content(path) as content:
            assert recognise(content)[0] == form
        with Store.open(tmp_path / "copy.db") as copy:
            assert import_file(copy, path).records_added == 10
            assert bare(copy.history()) == store.history()
            assert {one.source for one in copy.history()} == {str(path)}
            report = import_file(copy, path, form)
            assert (report.records_added, report.records_known) == (0, 10)

    def test_a_kernel_tuner_cache_has_its_keys_units_and_error_names(self, store: Store, tmp_path: Path) -> None:
        export_file(store, tmp_path / "some.json", "kernel-tuner")
        data = json.loads((tmp_path / "some.json").read_text())
        assert data["tune_params_keys"] == ["bm", "order", "swizzle"] == list(data["tune_params"])
        assert data["tune_params"]["bm"] == [1, 2, 4, 8, 16, 32, 64, 128]
        assert data["kernel_name"] == "conv2d_wgmma" and "H200" in data["device_name"]
        entry = data["cache"]["1,row,True"]
        assert entry["time"] == pytest.approx(1100e-6), "milliseconds, of the last measurement outside of a race"
        assert entry["times"] == pytest.approx([1100e-6, 1210e-6, 990e-6])
        assert entry["compile_time"] == pytest.approx(750.0) and entry["bm"] == 1 and entry["swizzle"] is True
        names = [fields["time"] for fields in data["cache"].values() if isinstance(fields["time"], str)]
        assert names == ["InvalidConfig", *["CompilationFailedConfig"] * 2, *["RuntimeFailedConfig"] * 4]

    def test_t4_results_have_a_description_beside_them(self, store: Store, tmp_path: Path) -> None:
        counts = export_file(store, tmp_path / "some_T4.json", "t4")
        assert counts["description"] == str(tmp_path / "some_T1.json")
        description = json.loads((tmp_path / "some_T1.json").read_text())
        bm, order, swizzle = description["ConfigurationSpace"]["TuningParameters"]
        assert (bm["Name"], bm["Type"], bm["Values"]) == ("bm", "int", "[1, 2, 4, 8, 16, 32, 64, 128]")
        assert (order["Values"], swizzle["Type"]) == ("['row']", "bool")
        data = json.loads((tmp_path / "some_T4.json").read_text())
        assert data["metadata"]["timeunit"] == "milliseconds" and data["schema_version"] == "1.0.0"
        first = data["results"][0]
        assert first["configuration"] == {"bm": 1, "order": "row", "swizzle": True}
        assert first["measurements"] == [{"name": "time", "value": pytest.approx(1100e-6), "unit": "ms"}]
        assert [result["invalidity"] for result in data["results"]] == [
            "correct", "constraints", "compile", "compile", "runtime", "timeout", "correctness", "runtime",
        ]  # fmt: skip

    def test_an_autotvm_log_has_its_fields_and_units(self, store: Store, tmp_path: Path) -> None:
        export_file(store, tmp_path / "some.log", "autotvm")
        lines = [json.loads(line) for line in (tmp_path / "some.log").read_text().splitlines()]
        assert len(lines) == 8 and all(line["version"] == 0.2 for line in lines)
        assert lines[0]["config"]["entity"] == [["bm", "ot", 1], ["order", "ot", "row"], ["swizzle", "ot", True]]
        costs, error, _, stamp = lines[0]["result"]
        assert costs == pytest.approx([1.1e-6, 1.21e-6, 0.99e-6]) and error == 0 and stamp > 1.6e9
        assert [line["result"][1] for line in lines] == [0, 1, 2, 6, 4, 7, 5, 8]
        assert all(line["result"][0] == [1e9] for line in lines[1:])

    @pytest.mark.parametrize("form", ["kernel-tuner", "t4"])
    def test_how_it_was_made_stands_in_the_file_and_disturbs_no_reader(
        self, store: Store, tmp_path: Path, form: str
    ) -> None:
        made = {"command": "python record.py", "card": "NVIDIA H200"}
        export_file(store, tmp_path / "some.json.gz", form, made=made)
        data = json.loads(gzip.decompress((tmp_path / "some.json.gz").read_bytes()))
        assert (data if form == "kernel-tuner" else data["metadata"])["schedsearch"] == made
        with Store.open(tmp_path / "copy.db") as copy:
            assert import_file(copy, tmp_path / "some.json.gz").records_added == 10

    def test_a_file_for_one_task_needs_one_task(self, store: Store, tmp_path: Path) -> None:
        store.append(make_record(workload=conv(k=128), number=60))
        store.append(make_record(target=A100, number=61))
        with pytest.raises(UsageError, match=r"holds one task, and 3 match: .*--workload [0-9a-f]{12}.*choose with"):
            export_file(store, tmp_path / "some.json", "kernel-tuner")
        assert export_file(store, tmp_path / "a.json", "t4", workload=conv(k=128).id[:8])["records"] == 1
        assert export_file(store, tmp_path / "b.json", "t4", target=A100)["records"] == 1
        assert export_file(store, tmp_path / "c.log", "autotvm")["records"] == 12
        assert len(autotvm.parse((tmp_path / "c.log").read_bytes().splitlines(), "c.log")) == 3
        with pytest.raises(UsageError, match="no record that matches"):
            export_file(store, tmp_path / "d.json", "t4", template="nothing")
        with pytest.raises(UsageError, match="cannot write"):
            export_file(store, tmp_path / "no folder" / "d.json", "autotvm")

    def test_only_the_newest_version_of_a_template_is_exported(self, store: Store, tmp_path: Path) -> None:
        store.append(make_record(template_version=2, number=70))
        assert export_file(store, tmp_path / "some.json", "kernel-tuner")["records"] == 1

    def test_records_that_schedsearch_put_into_a_file_are_checked(self, store: Store, tmp_path: Path) -> None:
        export_file(store, tmp_path / "some.json", "kernel-tuner")
        data = json.loads((tmp_path / "some.json").read_text())
        data["cache"]["2,row,False"]["schedsearch"][0]["config"]["bm"] = 4
        support.write(tmp_path / "bent.json", data)
        with pytest.raises(UsageError, match=r"bent\.json: .*is of another one"):
            import_file(store, tmp_path / "bent.json")
        del data["cache"]["2,row,False"]["schedsearch"][0]["target"]
        support.write(tmp_path / "bent.json", data)
        with pytest.raises(UsageError, match=r"bent\.json: .*the field 'target' is missing"):
            import_file(store, tmp_path / "bent.json")
        assert len(store.history()) == 10, "nothing was added"

    @pytest.mark.parametrize(
        ("field", "value"),
        [("batch", 2**63), ("batch", 1e999), ("prediction", 1e999), ("toolchain", 3), ("measurement", "x")],
    )
    def test_a_value_that_no_database_can_hold_is_named(self, store: Store, tmp_path: Path, field: str, value: Any) -> None:
        export_file(store, tmp_path / "some.json", "kernel-tuner")
        data = json.loads((tmp_path / "some.json").read_text())
        data["cache"]["2,row,False"]["schedsearch"][0][field] = value
        support.write(tmp_path / "bent.json", data)
        with pytest.raises(UsageError, match=r"bent\.json: .*the record that schedsearch put beside"):
            import_file(store, tmp_path / "bent.json")


class TestFilesOfOthers:
    def imported(self, tmp_path: Path, path: Path, **options: Any) -> list[Record]:
        with Store.open(tmp_path / "foreign.db") as store:
            import_file(store, path, **options)
            return store.history()

    def test_a_kernel_tuner_cache_becomes_records_of_a_foreign_workload(self, tmp_path: Path) -> None:
        history = self.imported(tmp_path, support.write(tmp_path / "some.json.gz", support.cache()))
        assert len(history) == 18 and sum(one.measurement.ok for one in history) == 14
        by_config = {(one.config["bx"], one.config["unroll"], one.config["order"]): one for one in history}
        one = by_config[32, 1, "row"]
        problem = {"tuner": "kernel-tuner", "kernel": "some_kernel", "problem": "[4096, 4096]"}
        assert one.workload == Workload("foreign", problem)
        assert (one.target, one.template, one.measurement.mode) == ("foreign:Some GPU", "some_kernel", "kernel-tuner")
        assert one.measurement.times_ns == pytest.approx((2.5e6 * 0.99, 2.5e6, 2.5e6 * 1.01))
        assert one.measurement.build_s == pytest.approx(0.25)
        failed = by_config[128, 2, "row"].measurement
        assert (failed.outcome, failed.message) == (Outcome.COMPILE_ERROR, "CompilationFailedConfig")

    def test_files_that_do_not_name_their_device_are_never_taken_for_one(self, tmp_path: Path) -> None:
        """Kernel Tuner's T4 results have no device. Its caches have none if it could not ask for it."""
        other = support.cache()
        for fields in other["cache"].values():
            if not isinstance(fields["time"], str):
                fields["time"], fields["times"] = 2 * fields["time"], []
        support.write(tmp_path / "conv_T1.json", support.t1())
        with Store.open(tmp_path / "foreign.db") as store:
            for name, data in (("conv_A_T4.json.gz", support.cache()), ("conv_B_T4.json", other)):
                import_file(store, support.write(tmp_path / name, support.t4(data)))
            (_, one), (_, two) = recordings(store)
        assert (one.device, two.device) == ("conv_A_T4", "conv_B_T4")
        fastest = [min(entry.time_ns for entry in each.entries if entry.time_ns) for each in (one, two)]
        assert fastest == pytest.approx([1e6, 2e6])

    def test_newer_and_older_ways_of_saying_that_it_failed(self, tmp_path: Path) -> None:
        data = support.cache()
        newer, older, *rest = data["cache"].values()
        del newer["time"], newer["times"]
        newer["__error__"] = "InvalidConfig"
        older["time"] = 1e20
        for valid in (fields for fields in rest if not isinstance(fields["time"], str)):
            valid["__error__"] = None  # none
        entries = kernel_tuner.parse(data, "some.json").entries
        assert sum(entry.outcome is Outcome.OK for entry in entries) == 14 - 2
        assert [entry.outcome for entry in entries[:2]] == [Outcome.REJECTED, Outcome.LAUNCH_ERROR]
        assert [entry.message for entry in entries[:2]] == ["InvalidConfig", "failed; the cache does not say why"]

    def test_an_error_under_the_name_of_another_objective(self) -> None:
        """Caches of searches for GFLOP/s have the time in one of these forms; without any, the time is missing."""
        data = support.cache()
        data["objective"] = "GFLOP/s"
        failed = next(fields for fields in data["cache"].values() if fields["time"] == "CompilationFailedConfig")
        failed["GFLOP/s"] = failed.pop("time")
        entries = {entry.config: entry for entry in kernel_tuner.parse(data, "some.json").entries}
        entry = entries[Config({name: failed[name] for name in support.PARAMS})]
        assert (entry.outcome, entry.message) == (Outcome.COMPILE_ERROR, "CompilationFailedConfig")
        failed["GFLOP/s"] = 3.0
        with pytest.raises(UsageError, match="the field 'time' is missing"):
            kernel_tuner.parse(data, "some.json")

    def test_a_parameter_with_the_name_of_a_field_is_refused(self, tmp_path: Path) -> None:
        """A knob with this name would be read as the time, and an export would lose it."""
        data = json.loads(json.dumps(support.cache()).replace('"fixed"', '"time"'))
        with pytest.raises(UsageError, match=r"some\.json: tune_params: a parameter is called 'time' like a field"):
            kernel_tuner.parse(data, "some.json")
        with Store.open(tmp_path / "records.db") as store:
            store.append(make_record(config=Config(bm=2, times=3)))
            with pytest.raises(UsageError, match=r"the knob 'times' of .* has the name of a field"):
                export_file(store, tmp_path / "out.json", "kernel-tuner")

    def test_a_problem_size_that_is_not_a_number_stays_json(self, tmp_path: Path) -> None:
        data = support.cache()
        data["problem_size"] = float("nan")
        with Store.open(tmp_path / "foreign.db") as store:
            import_file(store, support.write(tmp_path / "some.json", data))
            export_file(store, tmp_path / "again.json", "kernel-tuner")
        assert json.loads((tmp_path / "again.json").read_text())["problem_size"] == "NaN"

    def test_t4_results_and_their_description(self, tmp_path: Path) -> None:
        support.write(tmp_path / "other_T1.json", support.t1("bx > 0"))
        path = support.write(tmp_path / "some_T4.json", support.t4(support.cache(), "microseconds", 1e3))
        history = self.imported(tmp_path, path, t1=tmp_path / "other_T1.json")
        times = sorted(one.measurement.time_ns or 0.0 for one in history)
        assert times[:4] == [0.0] * 4 and times[4] == pytest.approx(1e6)

    LOG = (
        '{"input": ["cuda -model=v100", "conv2d_nchw.cuda", [["TENSOR", [1, 64], "float32"], [1, 1]], {}],'
        ' "config": {"index": 7, "code_hash": null, "entity":'
        ' [["tile_f", "sp", [-1, 2, 32]], ["order", "re", [0, 1]], ["unroll", "ot", 512]]},'
        ' "result": [[0.0015, 0.0017], 0, 2.5, 1600000000.5], "version": 0.2, "tvm_version": "0.8.dev0"}\n'
        '{"input": ["cuda -model=v100", "conv2d_nchw.cuda", [["TENSOR", [1, 64], "float32"], [1, 1]], {}],'
        ' "config": {"index": 9, "code_hash": null, "entity":'
        ' [["tile_f", "sp", [-1, 4, 16]], ["order", "re", [1, 0]], ["unroll", "ot", 0]]},'
        ' "result": [[1000000000.0], 4, 1.5, 1600000001.5], "version": 0.2, "tvm_version": "0.8.dev0"}\n'
        "\n"
        '{"input": ["cuda -model=v100", "dense.cuda", [], {}], "config": {"index": 1, "code_hash": null, "entity":'
        ' [["tile", "an", ["vec"]]]}, "result": [["out of memory"], 2, 1.5, 1600000002.5], "version": 0.2}\n'
    )  # fmt: skip

    def test_an_autotvm_log(self, tmp_path: Path) -> None:
        history = self.imported(tmp_path, support.write(tmp_path / "some.log", self.LOG))
        one, failed, other = history
        assert dict(one.config) == {"tile_f": "sp[-1,2,32]", "order": "re[0,1]", "unroll": 512}
        assert one.measurement.times_ns == pytest.approx((1.5e6, 1.7e6)) and one.finished_at == 1600000000.5
        assert one.workload.problem == canonical_json([["TENSOR", [1, 64], "float32"], [1, 1]])
        assert one.target == "foreign:cuda -model=v100" and one.template == "conv2d_nchw.cuda"
        assert (failed.measurement.outcome, failed.measurement.message) == (Outcome.LAUNCH_ERROR, "RuntimeDeviceError")
        assert other.measurement.message == "CompileHostError: out of memory"

    @pytest.mark.parametrize("stamp", ["253402300800", "-1", "1e300"])
    def test_a_time_stamp_beyond_the_calendar_counts_as_none(self, stamp: str, tmp_path: Path) -> None:
        log = self.LOG.replace("1600000000.5", stamp)
        assert self.imported(tmp_path, support.write(tmp_path / "some.log", log))[0].finished_at == 0.0

    def test_an_autotvm_log_exported_again_says_the_same(self, tmp_path: Path) -> None:
        with Store.open(tmp_path / "foreign.db") as store:
            import_file(store, support.write(tmp_path / "some.log", self.LOG))
            export_file(store, tmp_path / "again.log", "autotvm")
        before = [json.loads(line) for line in self.LOG.splitlines() if line]
        after = [json.loads(line) for line in (tmp_path / "again.log").read_text().splitlines()]
        assert [line["input"] for line in after] == [line["input"] for line in before]
        assert [sorted(line["config"]["entity"]) for line in after] == [sorted(line["config"]["entity"]) for line in before]
        assert [line["result"][1] for line in after] == [0, 4, 2]
        assert after[0]["result"][0] == pytest.approx([0.0015, 0.0017])

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ('"result": [[0.0015, 0.0017], 0', '"result": [[], 0', "some.log:1: result[0]: has neither a cost nor an error"),
            ("0.0015", "-1", "some.log:1: result[0][0]: a cost in seconds must be a positive number"),
            ("0, 2.5, 1600000000.5]", "99, 2.5, 1]", "some.log:1: result[1]: unknown error number 99"),
            ("2.5, 1600000000.5]", "2.5]", "some.log:1: result: [costs, error number"),
            ('"unroll", "ot", 0', '"unroll", "zz", 0', "some.log:2: config.entity[2]: unknown kind 'zz'"),
            ('"unroll", "ot", 0', '"order", "ot", 0', "some.log:2: config.entity[2]: the knob 'order' is there twice"),
            ('"version": 0.2}', '"version": ', "some.log:4: not JSON"),
            ('"result": [["out', '"results": [["out', "some.log:4: the field 'result' is missing"),
        ],
    )
    def test_a_wrong_line_of_a_log_is_named(self, tmp_path: Path, old: str, new: str, message: str) -> None:
        assert old in self.LOG
        path = support.write(tmp_path / "some.log", self.LOG.replace(old, new))
        with pytest.raises(UsageError) as caught:
            self.imported(tmp_path, path, form="autotvm")
        assert message in str(caught.value)
        with Store.open(tmp_path / "foreign.db") as store:
            assert store.history() == []

    def test_a_kernel_that_got_another_knob_keeps_its_records(self, tmp_path: Path) -> None:
        """Both searches come back. An earlier version silently left one out."""
        new = self.LOG.splitlines()[0].replace('["unroll", "ot", 512]', '["unroll", "ot", 512], ["vec", "ot", 4]')
        path = support.write(tmp_path / "some.log", self.LOG + new)
        first = self.imported(tmp_path, path)
        with Store.open(tmp_path / "foreign.db") as store:
            export_file(store, tmp_path / "again.log", "autotvm")
        with Store.open(tmp_path / "again.db") as store:
            import_file(store, tmp_path / "again.log")
            assert sorted(map(repr, bare(store.history()))) == sorted(map(repr, bare(first))) and len(first) == 4

    @pytest.mark.parametrize("form", FORMATS)
    def test_records_of_one_tuner_go_to_any_other_and_come_back(self, tmp_path: Path, form: str) -> None:
        first = self.imported(tmp_path, support.write(tmp_path / "some.json", support.cache()))
        with Store.open(tmp_path / "foreign.db") as store, Store.open(tmp_path / "second.db") as second:
            export_file(store, tmp_path / "out.json", form)
            import_file(second, tmp_path / "out.json")
            assert sorted(bare(second.history()), key=repr) == sorted(bare(first), key=repr)

    def test_parameters_that_are_floats_become_whole_numbers_or_texts(self) -> None:
        params = {"bx": [16.0, 32.0], "scale": [0.5, 1.0, 2.0], "flag": [True, False]}
        entries = {
            f"{bx},{scale},{flag}": {"bx": bx, "scale": scale, "flag": flag, "time": bx * scale}
            for bx in params["bx"] for scale in params["scale"] for flag in params["flag"]
        }  # fmt: skip
        recording = kernel_tuner.parse({"tune_params": params, "cache": entries}, "some.json")
        assert [knob.values for knob in recording.knobs] == [(16, 32), ("0.5", "1.0", "2.0"), (True, False)]
        assert dict(recording.entries[0].config) == {"bx": 16, "flag": True, "scale": "0.5"}

    def test_a_foreign_workload_can_be_listed_but_not_run(self) -> None:
        workload = Workload("foreign", {"tuner": "kernel-tuner", "kernel": "gemm", "problem": "4096"})
        assert workload.label == "kernel-tuner gemm 4096" and workload.flops == 0
        assert Workload.from_json(workload.json) == workload
        with pytest.raises(WorkloadError, match="can only be read and replayed"):
            _ = workload.output
        with pytest.raises(WorkloadError, match="did you mean 'kernel'"):
            Workload("foreign", {"tuner": "a", "kernel": "b", "kernle": "c"})

    @pytest.mark.parametrize("text", ["", "{}", "[1]", "3", '{"a": 1}\n{"a": 2}', "bm,time\n1,2"])
    def test_a_file_of_no_known_format(self, tmp_path: Path, text: str) -> None:
        path = support.write(tmp_path / "some.txt", text)
        with (
            Content(path) as content,
            pytest.raises(UsageError, match=r"some\.txt: (the format is not recognised|not JSON|empty)"),
        ):
            recognise(content)
