"""Caches and T4 files with mistakes: each is one line that names the file and the place."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import replay_support as support
from cli_support import schedsearch

from schedsearch.errors import UsageError
from schedsearch.records.formats.recording import Place, parse_json
from schedsearch.records.formats.unfinished import Unfinished
from schedsearch.replay import load


def first(data: dict[str, Any]) -> dict[str, Any]:
    """The entry of the first configuration."""
    entry: dict[str, Any] = next(iter(data["cache"].values()))
    return entry


def each_valid(data: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the entry of every configuration that has a time."""
    for entry in data["cache"].values():
        if not isinstance(entry["time"], str):
            change(entry)


KEY = "16,1,row,7"
AT = f'bad.json: cache["{KEY}"]'


def edit(change: Callable[[dict[str, Any]], Any]) -> str:
    data = copy.deepcopy(support.cache())
    change(data)
    return json.dumps(data)


BAD_CACHES = {
    "no time": (lambda: edit(lambda d: first(d).pop("time")), f"{AT}: the field 'time' is missing"),
    "time is null": (lambda: edit(lambda d: first(d).update(time=None)), f"{AT}.time: the time in milliseconds must be"),
    "negative time": (lambda: edit(lambda d: first(d).update(time=-1.0)), "got -1.0"),
    "time is NaN": (lambda: edit(lambda d: first(d).update(time=float("nan"))), "got nan"),
    "infinite time": (lambda: edit(lambda d: first(d).update(time=float("inf"))), "got inf"),
    "time is true": (lambda: edit(lambda d: first(d).update(time=True)), f"{AT}.time"),
    "time with a unit": (
        lambda: edit(lambda d: first(d).update(time="3.5 us")),
        "'3.5 us' is neither a number of milliseconds",
    ),
    "an error that is a number": (
        lambda: edit(lambda d: first(d).update(__error__=3.5)),
        f"{AT}.__error__: this must be a string, got a number (3.5)",
    ),
    "time in another unit than times": (
        lambda: edit(lambda d: each_valid(d, lambda entry: entry.update(time=entry["time"] * 1e6))),
        f"{AT}: the time, 3.5e+12 ns, does not fit its 3 repetitions, 3.465e+06 to 3.535e+06 ns; so it is in all 14",
    ),
    "times and repetitions in another unit": (
        lambda: edit(
            lambda d: first(d).update(
                time=first(d)["time"] * 1e3, times=[each * 1e3 for each in first(d)["times"]], benchmark_time=10.6
            )
        ),
        f"{AT}: its 3 repetitions take 10500 ms, but benchmark_time, which holds them all, is 10.6 ms",
    ),
    "a value of a parameter is missing": (lambda: edit(lambda d: first(d).pop("bx")), f"{AT}: the value of 'bx' is missing"),
    "unknown value": (
        lambda: edit(lambda d: first(d).update(bx=48)),
        f"{AT}: bx is 48; the values of this parameter are 16",
    ),
    "a key of another configuration": (
        lambda: edit(lambda d: d["cache"].update({"1,2,3": first(d)})),
        "bad.json: cache[\"1,2,3\"]: the key does not belong to the configuration in it, whose key is '16,1,row,7'",
    ),
    "duplicate key": (
        lambda: json.dumps(support.cache()).replace('"32,1,row,7"', f'"{KEY}"'),
        f"bad.json: the key '{KEY}' occurs twice",
    ),
    "duplicate field": (
        lambda: json.dumps(support.cache()).replace('"bx": 16', '"bx": 16, "bx": 16', 1),
        "the key 'bx' occurs twice",
    ),
    "a value twice": (lambda: edit(lambda d: d["tune_params"].update(fixed=[7, 7])), "tune_params.fixed"),
    "a parameter without values": (lambda: edit(lambda d: d["tune_params"].update(fixed=[])), "has no values"),
    "a parameter that is an object": (
        lambda: edit(lambda d: d["tune_params"].update(fixed=[{}])),
        "tune_params.fixed: value {}",
    ),
    "no parameters": (lambda: edit(lambda d: d.update(tune_params={}, tune_params_keys=[])), "no tunable parameter"),
    "names that differ": (lambda: edit(lambda d: d.update(tune_params_keys=["bx"])), "tune_params_keys: ['bx'] are not"),
    "tune_params missing": (lambda: edit(lambda d: d.pop("tune_params")), "the field 'tune_params' is missing"),
    "cache missing": (lambda: edit(lambda d: d.pop("cache")), "the field 'cache' is missing"),
    "cache is a list": (lambda: edit(lambda d: d.update(cache=[])), "cache: this must be a JSON object, got a list"),
    "an entry is a number": (
        lambda: edit(lambda d: d["cache"].update({KEY: 3})),
        f"{AT}: this must be a JSON object, got a number",
    ),
    "empty cache": (lambda: edit(lambda d: d.update(cache={})), "cache: holds no configuration"),
    "all failures": (
        lambda: edit(lambda d: [f.update(time="RuntimeFailedConfig") for f in d["cache"].values()]),
        "all 18 configurations of some_kernel Some GPU failed",
    ),
    "one single point": (lambda: edit(lambda d: d.update(cache={KEY: first(d)})), "one single configuration"),
    "a list": (lambda: "[1, 2]", "neither a Kernel Tuner cache"),
    "another object": (lambda: '{"a": 1}', "neither a Kernel Tuner cache"),
    "a T1 description": (lambda: json.dumps(support.t1()), "bad.json: a T1 description, which is read with its T4 results"),
    "not JSON": (lambda: '{"cash": {', "not JSON: Expecting property name enclosed in double quotes at line 1 column 11"),
    "an unfinished cache without a configuration": (
        lambda: edit(lambda d: d.update(cache={}))[:-2],
        "cache: holds no configuration: the run did not finish any; let Kernel Tuner continue it",
    ),
    "a cut within the parameters": (lambda: json.dumps(support.cache())[:60], "not JSON"),
    "a wrong entry in an unfinished cache": (
        lambda: json.dumps(support.cache())[:-2].replace('"bx": 16', '"bx": 16,,', 1),
        "not JSON",
    ),
    "empty file": (lambda: "\n", "bad.json: empty; get the file again"),
    "nested too deeply": (lambda: "[" * 101, "nested too deeply"),
}


class TestUnfinishedCaches:
    @pytest.mark.parametrize("indent", [None, 0, 2])
    def test_the_complete_entries_are_read_wherever_the_run_ended(self, indent: int | None) -> None:
        """Kernel Tuner writes an entry and a comma after each configuration, and the closing brackets in the end."""
        data = support.cache()
        text = json.dumps(data, indent=indent)
        start = text.index("{", text.index('"cache"')) + 1
        for end in (*range(start, len(text) - 40, 5), *range(len(text) - 40, len(text))):
            found = parse_json(text[:end].encode(), Place("x.json"))
            entries = list(data["cache"].items())[: len(found["cache"])]
            assert isinstance(found, Unfinished) and found == {**data, "cache": dict(entries)}
            complete = "".join(json.dumps({key: value}, indent=indent).strip("{}") for key, value in entries)
            assert found.cut == (text[start:end].count('"') > complete.count('"'))
        assert len(found["cache"]) == len(data["cache"])

    @pytest.mark.parametrize(
        "command", [("records", "import", "--db", "new.db"), ("replay", "--tuner", "random", "--seeds", "1")]
    )
    def test_commands_take_it_and_say_what_was_cut_off(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        text = json.dumps(support.cache(), indent="")
        support.write(Path("open.json"), text[: text.rindex('"time"')])
        result = schedsearch(*command, "open.json")
        assert result.exit_code == 0, result.output
        count = len(support.cache()["cache"]) - 1
        assert f"open.json: the run did not finish; read: {count} configurations, and 1 entry that was cut" in result.output


class TestBadCaches:
    @pytest.mark.parametrize("name", BAD_CACHES)
    def test_it_is_one_line_that_names_file_and_place(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        make, message = BAD_CACHES[name]
        support.write(Path("bad.json"), make())
        result = schedsearch("replay", "bad.json")
        assert result.exit_code == 2, result.output
        assert result.stdout == "" and result.stderr.count("\n") == 1
        assert message in result.stderr and "bad.json" in result.stderr

    def test_a_truncated_or_damaged_gzip(self, tmp_path: Path) -> None:
        whole = gzip.compress(json.dumps(support.cache()).encode(), mtime=0)
        for name, data, message in (
            ("cut.json.gz", whole[: len(whole) // 2], "is truncated"),
            ("bent.json.gz", whole[:40] + bytes(20) + whole[60:], "is damaged"),
            ("head.json.gz", whole[:2], "is truncated"),
        ):
            (tmp_path / name).write_bytes(data)
            result = schedsearch("replay", tmp_path / name)
            assert result.exit_code == 2 and message in result.stderr and name in result.stderr

    def test_not_text_and_not_there(self, tmp_path: Path) -> None:
        (tmp_path / "bytes.json").write_bytes(b'{"cache": "\xff\xfe"}')
        result = schedsearch("replay", tmp_path / "bytes.json")
        assert result.exit_code == 2 and "UTF-8" in result.stderr and "byte 11" in result.stderr
        result = schedsearch("replay", tmp_path / "nowhere.json")
        assert result.exit_code == 2 and "No such file" in result.stderr

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--evaluations", "25,x"), "must be integers"),
            (("--evaluations", "0"), "must be integers"),
            (("--seeds", "0"), "0 is too small; allowed: 1 or more"),
            (("--seeds", "few"), "'few' is not an integer"),
            (("--jobs", "0"), "0 is too small; allowed: 1 or more"),
            (("--tuner", "xbg"), "did you mean 'xgb'"),
            (("--t1", "nowhere_T1.json"), "nowhere_T1.json"),
        ],
    )
    def test_mistakes_in_options(self, cache: Path, options: tuple[str, ...], message: str) -> None:
        result = schedsearch("replay", cache, *options)
        assert result.exit_code == 2 and message in result.stderr and result.stdout == ""


class TestBadT4:
    def twin(self, folder: Path, change: Callable[[dict[str, Any]], Any], *conditions: str) -> Any:
        support.write(folder / "bad_T1.json", support.t1(*conditions))
        data = support.t4(support.cache())
        change(data)
        support.write(folder / "bad_T4.json", data)
        return schedsearch("replay", folder / "bad_T4.json", "--tuner", "random", "--seeds", "1")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda d: d["metadata"].update(timeunit="fortnights"), "metadata.timeunit: unknown unit of time 'fortnights'"),
            (lambda d: d["metadata"].pop("timeunit"), "metadata: the field 'timeunit' is missing"),
            (lambda d: d["results"][0]["measurements"][0].update(unit="J"), "results[0].measurements[0].unit: unknown unit"),
            (
                lambda d: [each["measurements"][0].update(unit="ns") for each in d["results"] if each["measurements"]],
                "results[0]: the time, 3.5 ns, does not fit",
            ),
            (lambda d: d["results"].append(d["results"][3]), "results[18]: the same configuration as"),
            (lambda d: d["results"][1].pop("configuration"), "results[1]: the field 'configuration' is missing"),
            (lambda d: d["results"][1]["configuration"].update(zz=1), "results[1].configuration: the description has no"),
            (lambda d: d["results"][1]["configuration"].update(bx=17), "results[1].configuration: bx is 17"),
            (lambda d: d["results"][1].update(invalidity="odd"), "results[1].invalidity: unknown word 'odd'"),
            (lambda d: d["results"][1].update(measurements=[], times={}), "results[1]: a correct result has neither"),
            (lambda d: d.update(results=[]), "results: holds no result"),
            (lambda d: d.update(results={}), "results: this must be a list, got an object"),
        ],
    )
    def test_it_is_one_line_that_names_file_and_place(
        self, tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
    ) -> None:
        result = self.twin(tmp_path, change)
        assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1
        assert "bad_T4.json" in result.stderr

    def test_a_condition_that_the_results_break(self, tmp_path: Path) -> None:
        result = self.twin(tmp_path, lambda d: None, "bx < 128", "bx > 16")
        assert result.exit_code == 2 and "breaks the condition 'bx < 128'" in result.stderr

    def test_no_description_and_several(self, tmp_path: Path) -> None:
        path = support.write(tmp_path / "some_gpu_T4.json", support.t4(support.cache()))
        result = schedsearch("replay", path)
        assert result.exit_code == 2 and "there is no *_T1.json beside it" in result.stderr
        support.write(tmp_path / "other_T1.json", support.t1())
        support.write(tmp_path / "another_T1.json", support.t1())
        result = schedsearch("replay", path)
        assert result.exit_code == 2 and "none of another_T1.json, other_T1.json fits its name" in result.stderr
        options = ("--tuner", "random", "--seeds", "1", "--evaluations", "5")
        assert schedsearch("replay", path, "--t1", tmp_path / "other_T1.json", *options).exit_code == 0
        support.write(tmp_path / "some_T1.json", support.t1())
        assert schedsearch("replay", path, *options).exit_code == 0

    @pytest.mark.parametrize(
        "change",
        [
            lambda d: d.pop("ConfigurationSpace"),
            lambda d: d["ConfigurationSpace"].pop("TuningParameters"),
            lambda d: d["ConfigurationSpace"]["TuningParameters"][0].pop("Values"),
            lambda d: d["ConfigurationSpace"]["TuningParameters"][0].update(Values="list(range(9))"),
            lambda d: d["ConfigurationSpace"]["TuningParameters"].append(d["ConfigurationSpace"]["TuningParameters"][0]),
            lambda d: d["ConfigurationSpace"].update(Conditions=[{"Parameters": []}]),
            lambda d: d["ConfigurationSpace"].update(Conditions=[{"Expression": 3}]),
        ],
    )
    def test_mistakes_in_the_description_are_named_in_it(
        self, tmp_path: Path, change: Callable[[dict[str, Any]], Any]
    ) -> None:
        path = support.write(tmp_path / "some_T4.json", support.t4(support.cache()))
        data = support.t1()
        change(data)
        support.write(tmp_path / "some_T1.json", data)
        with pytest.raises(UsageError, match=r"some_T1\.json: ConfigurationSpace|some_T1\.json: the field"):
            load([path])
