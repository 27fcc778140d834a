"""Replay: figures computed by hand and by brute force, the same data in every format, determinism, and bad input."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import replay_support as support
from cli_support import alive, children, schedsearch, start
from records_support import conv
from records_support import record as make_record

from schedsearch.config import Config
from schedsearch.errors import ConfigError, UsageError
from schedsearch.measurement import Outcome
from schedsearch.records.formats.exchange import import_file
from schedsearch.records.store import Store
from schedsearch.replay import Run, load, replay, run, summarise
from schedsearch.replay.search import _best_so_far
from schedsearch.space import ConfigSpace, Constraint, Knob
from schedsearch.space.listed import ListedSpace
from schedsearch.tuner import TUNERS, make_tuner


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return support.write(tmp_path / "some.json.gz", support.cache())


def figures(*arguments: str | Path) -> dict[str, Any]:
    result = schedsearch("replay", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    data: dict[str, Any] = json.loads(result.stdout)
    return data


class TestListedSpace:
    KNOBS = (Knob("a", (1, 2, 4, 8)), Knob("b", ("x", "y", "z")), Knob("c", (False, True)))

    def spaces(self) -> tuple[ConfigSpace, ListedSpace]:
        """The same space by a rule and by a list."""
        ruled = ConfigSpace(self.KNOBS, [Constraint("a", lambda k: (k["a"] > 1) | (k["b"] == "x") & ~k["c"])])
        rows = np.concatenate(list(ruled.walk()))
        return ruled, ListedSpace(self.KNOBS, np.random.default_rng(0).permutation(rows))

    def test_it_behaves_as_the_space_of_the_rule_that_made_the_list(self) -> None:
        ruled, listed = self.spaces()
        every = ConfigSpace(self.KNOBS)
        rows = np.concatenate(list(every.walk()))
        assert (listed.legal(rows) == ruled.legal(rows)).all()
        assert str(listed.size) == str(ruled.size) == "19"
        assert np.array_equal(np.concatenate(list(listed.walk(4))), np.concatenate(list(ruled.walk())))
        assert np.array_equal(listed.encode(rows), ruled.encode(rows))
        for row in rows:
            assert np.array_equal(listed.neighbours(row), ruled.neighbours(row))
        assert listed.check({"a": 2, "b": "x", "c": True}) == []
        assert "not one of the 19 listed" in listed.check({"a": 1, "b": "y", "c": True})[0]
        assert "unknown knob" in listed.check({"a": 1, "b": "y", "c": True, "d": 1})[0]

    def test_samples_are_distinct_legal_and_complete_whatever_is_excluded(self) -> None:
        _, listed = self.spaces()
        rng = np.random.default_rng(0)
        exclude = set(listed.keys(listed.sample_indices(7, rng)).tolist())
        for n, expected in ((5, 5), (12, 12), (100, 12)):
            rows = listed.sample_indices(n, rng, exclude)
            keys = listed.keys(rows).tolist()
            assert len(set(keys)) == len(keys) == expected
            assert listed.legal(rows).all() and exclude.isdisjoint(keys)

    def test_restricting_keeps_the_listed_configurations(self) -> None:
        ruled, listed = self.spaces()
        fewer = {"a": [1, 4], "c": [True]}
        assert {c.id for c in listed.restrict(fewer).sample(99, np.random.default_rng(0))} == {
            c.id for c in ruled.restrict(fewer).sample(99, np.random.default_rng(0))
        }
        with pytest.raises(ConfigError, match="no legal configuration is left"):
            listed.restrict({"a": [1], "c": [True]})

    def test_mistakes_in_the_list(self) -> None:
        with pytest.raises(ConfigError, match="at least one"):
            ListedSpace(self.KNOBS, np.empty((0, 3), dtype=np.int32))
        with pytest.raises(ConfigError, match="twice"):
            ListedSpace(self.KNOBS, np.zeros((2, 3), dtype=np.int32))
        with pytest.raises(ConfigError, match="do not index"):
            ListedSpace(self.KNOBS, np.array([[0, 3, 0]]))


class TestFigures:
    def test_best_so_far_is_nothing_until_something_is_valid(self) -> None:
        nan = float("nan")
        times = [nan, 4.0, nan, 5.0, 2.0]
        assert _best_so_far(times, times, 1).tolist() == [np.inf, 4.0, 4.0, 4.0, 2.0]

    def test_with_noise_the_winner_is_the_best_of_the_lowest_readings(self) -> None:
        """The third configuration is slow and has one lucky reading. It would win alone, but it loses a race of two."""
        true, readings = [3.0, 2.0, 9.0, 8.0], [3.1, 2.2, 1.0, 7.0]
        assert _best_so_far(true, readings, 1).tolist() == [3.0, 2.0, 9.0, 9.0]
        assert _best_so_far(true, readings, 2).tolist() == [3.0, 2.0, 2.0, 2.0]

    def test_a_report_by_hand(self, tmp_path: Path) -> None:
        """Two spaces, two seeds, budgets 1 and 3. The test computes every figure by hand."""
        other = support.cache()
        for fields in other["cache"].values():
            if not isinstance(fields["time"], str):
                fields["time"], fields["times"] = fields["time"] ** 2, []
        paths = [support.write(tmp_path / "a.json", support.cache()), support.write(tmp_path / "b.json", other)]
        spaces = load(paths).spaces
        runs = [
            [Run(np.array([0.0, 0.5, 0.96]), 16, 1.0), Run(np.array([0.5, 0.5, 1.0]), 16, 2.0)],
            [Run(np.array([0.0, 0.0, 0.2]), 16, 0.5), Run(np.array([0.0, 0.0, 0.2]), 16, 0.5)],
        ]
        report = summarise(spaces, "xgb", [1, 3], runs)
        one, two = report.spaces
        assert (one.file, one.configurations, one.valid) == (str(paths[0]), 18, 14)
        assert one.best_ns == pytest.approx(1e6)
        assert one.fractions == {1: 0.25, 3: pytest.approx(0.98)} and two.fractions == {1: 0.0, 3: pytest.approx(0.2)}
        assert one.within_5 == {1: 0.0, 3: 1.0} and two.within_5 == {1: 0.0, 3: 0.0}
        assert report.geomean == {1: pytest.approx((0.25 * 0.001) ** 0.5), 3: pytest.approx((0.98 * 0.2) ** 0.5)}
        # The bootstrap draws a pair of the two seeds: the mean is one of the ends with a quarter each, otherwise the middle.
        assert (one.low[1], one.high[1]) == (0.0, 0.5) and (two.low[3], two.high[3]) == pytest.approx((0.2, 0.2))
        assert report.geomean_low[1] == pytest.approx(0.001) and report.geomean_high[3] == pytest.approx((1.0 * 0.2) ** 0.5)
        assert one.cpu_s_per_64 == pytest.approx(64 * 3 / 32) and report.cpu_s_per_64 == pytest.approx(64 * 4 / 64)

    def test_grid_search_finds_the_same_as_walking_the_file(self, cache: Path) -> None:
        """Brute force: the grid tuner walks the space in order of values, so the expectation is a running minimum."""
        entries = sorted(
            support.cache()["cache"].values(),
            key=lambda e: tuple(support.PARAMS[name].index(e[name]) for name in support.PARAMS),
        )
        best, expected = np.inf, []
        for fields in entries:
            if not isinstance(fields["time"], str):
                best = min(best, fields["time"])
            expected.append(1.0 / best)
        found = run(load([cache]).spaces[0], "grid", 0, 100)
        assert found.fractions[:18] == pytest.approx(expected)
        assert (found.fractions[18:] == 1.0).all(), "an exhausted space keeps its best"

    def test_random_search_finds_in_the_mean_the_same_as_drawing_from_the_file(self, cache: Path) -> None:
        """The distribution of the minimum of n draws without replacement, from 40,000 permutations of the times."""
        times = [e["time"] for e in support.cache()["cache"].values()]
        values = np.array([np.inf if isinstance(time, str) else time for time in times])
        rng = np.random.default_rng(0)
        drawn = np.array([1.0 / values[rng.permutation(18)[:5]].min() for _ in range(40_000)])
        report = replay(load([cache]).spaces, "random", evaluations=[5], seeds=300)
        error = 4 * drawn.std() / 300**0.5
        assert report.spaces[0].fractions[5] == pytest.approx(drawn.mean(), abs=error)
        space = report.spaces[0]
        assert space.high[5] - space.low[5] == pytest.approx(2 * 1.96 * drawn.std() / 300**0.5, rel=0.2)

    @pytest.mark.parametrize("tuner", TUNERS)
    def test_every_tuner_finds_the_optimum_when_the_budget_covers_the_space(self, cache: Path, tuner: str) -> None:
        data = figures(cache, "--tuner", tuner, "--seeds", "2", "--evaluations", "10,18")
        space = data["spaces"][0]
        assert space["fractions"]["18"] == space["within_5"]["18"] == data["geomean"]["18"] == 1.0
        assert 0 < space["low"]["10"] <= space["fractions"]["10"] <= space["high"]["10"] <= 1

    def test_a_budget_does_not_change_earlier_results(self, cache: Path) -> None:
        few = figures(cache, "--seeds", "3", "--evaluations", "3,10")["spaces"][0]["fractions"]
        many = figures(cache, "--seeds", "3", "--evaluations", "10,20,3")["spaces"][0]["fractions"]
        assert {key: many[key] for key in few} == few

    def test_a_budget_of_any_length_is_taken(self, cache: Path) -> None:
        assert figures(cache, "--tuner", "grid", "--seeds", "1", "--evaluations", "9" * 30)["geomean"] == {"9" * 30: 1.0}

    def test_a_budget_beyond_the_space_costs_nothing(self, cache: Path) -> None:
        report = replay(load([cache]).spaces, "random", evaluations=[1, 18, 10**12], seeds=2)
        assert report.geomean[18] == report.geomean[10**12] == 1.0 > report.geomean[1]

    def test_every_run_starts_from_fresh_objects(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import schedsearch.replay.search as module

        seen: list[Any] = []

        def spying(name: str, space: Any, *, seed: int, hints: Any) -> Any:
            assert not any(space is other.space for other in seen)
            seen.append(make_tuner(name, space, seed=seed, hints=hints))
            return seen[-1]

        monkeypatch.setattr(module, "make_tuner", spying)
        replay(load([cache]).spaces, "random", evaluations=[5], seeds=3)
        assert len({id(tuner) for tuner in seen}) == 3

    def test_noise_changes_the_times_for_the_tuner_and_not_its_score(self, cache: Path) -> None:
        space = load([cache]).spaces[0]
        noisy = run(space, "grid", 0, 18, noise=True)
        assert noisy.fractions == pytest.approx(run(space, "grid", 0, 18).fractions), "1 % of noise, five finalists"

    def test_noise_without_repetitions_is_none_and_that_is_said(self, cache: Path, tmp_path: Path) -> None:
        data = support.cache()
        for fields in data["cache"].values():
            fields.pop("times", None)
        single = support.write(tmp_path / "single.json", data)
        options = ("--noise", "--tuner", "random", "--seeds", "1", "--evaluations", "5")
        result = schedsearch("replay", single, *options)
        assert result.exit_code == 0 and f"warning: {single} (some_kernel Some GPU) has no repetitions" in result.stderr
        assert "warning" not in schedsearch("replay", cache, *options).stderr


class TestFiles:
    def without(self, data: dict[str, Any]) -> dict[str, Any]:
        """Figures without the parts that may differ: the file and the time spent."""
        space = {key: value for key, value in data["spaces"][0].items() if key not in ("file", "name", "cpu_s_per_64")}
        return {"geomean": data["geomean"], **space}

    @pytest.mark.parametrize(("unit", "per_ms"), [("miliseconds", 1.0), ("seconds", 1e-3), ("nanoseconds", 1e6)])
    def test_t4_results_give_the_figures_of_their_cache(self, cache: Path, tmp_path: Path, unit: str, per_ms: float) -> None:
        support.write(tmp_path / "some_T1.json", support.t1("bx * unroll != 64", "fixed == 7 or order in ['row']"))
        results = support.write(tmp_path / "some_T4.json.gz", support.t4(support.cache(), unit, per_ms))
        options = ("--seeds", "3", "--evaluations", "5,12")
        mine, theirs = self.without(figures(results, *options)), self.without(figures(cache, *options))
        for key in ("geomean", "fractions", "low", "high"):
            assert mine.pop(key) == pytest.approx(theirs.pop(key), rel=1e-12)
        assert mine.pop("best_ns") == pytest.approx(theirs.pop("best_ns"))
        assert mine == theirs

    def test_conditions_calculate_with_the_numbers_of_the_file(self, tmp_path: Path) -> None:
        """A parameter of floats becomes a knob of strings, but its conditions still see floats."""
        params = {**support.PARAMS, "fixed": [0.5, 1]}
        path = support.write(tmp_path / "some_T4.json", support.t4(support.cache(params)))
        support.write(tmp_path / "some_T1.json", support.t1("fixed * bx >= 8", params=params))
        assert len(load([path]).spaces[0].rows) == 36
        support.write(tmp_path / "some_T1.json", support.t1("fixed * bx >= 8.5", params=params))
        with pytest.raises(UsageError, match=r"results\[0\]: .*fixed='0\.5'.* breaks the condition 'fixed \* bx >= 8\.5'"):
            load([path])

    def test_the_same_data_twice_counts_once(self, cache: Path, tmp_path: Path) -> None:
        support.write(tmp_path / "some_T1.json", support.t1())
        results = support.write(tmp_path / "some_T4.json", support.t4(support.cache(), "seconds", 1e-3))
        result = schedsearch("replay", results, cache, cache, "--tuner", "random", "--seeds", "2", "--json")
        data = json.loads(result.stdout)
        assert [space["file"] for space in data["spaces"]] == [str(results)]
        assert len(data["left_out"]) == 2 and "the same data as" in data["left_out"][0]
        assert "left out" in result.stderr

    def test_imported_records_are_the_same_data_as_their_file(self, tmp_path: Path) -> None:
        """Kernel Tuner's time is the mean of its repetitions, not their median."""
        data = support.cache({**support.PARAMS, "fixed": list(range(7, 14))})
        for i, fields in enumerate(entry for entry in data["cache"].values() if "times" in entry):
            fields["times"] = [20 + 0.1 * i, 30 + 0.1 * i, 43 + 0.1 * i]
            fields["time"] = sum(fields["times"]) / 3
        path = support.write(tmp_path / "some.json", data)
        with Store.open(tmp_path / "records.db") as store:
            import_file(store, path)
        loaded = load([path, tmp_path / "records.db"])
        assert len(loaded.spaces) == 1 and "the same data as" in loaded.left_out[0]
        (again,) = load([tmp_path / "records.db"]).spaces
        assert again.best_ns == pytest.approx(1e6 * min(e["time"] for e in data["cache"].values() if "times" in e))

    def test_values_that_never_occur_do_not_make_it_other_data(self, cache: Path, tmp_path: Path) -> None:
        data = json.loads(json.dumps(support.cache()).replace('"fixed": [7]', '"fixed": [7, 8]'))
        assert data["tune_params"]["fixed"] == [7, 8]
        loaded = load([cache, support.write(tmp_path / "more.json", data)])
        assert len(loaded.spaces) == 1 and "more.json" in loaded.left_out[0]

    def test_times_are_the_same_whatever_their_last_bit(self, tmp_path: Path) -> None:
        text = json.dumps(support.cache()).replace('"time": 1.0,', '"time": 29.94895,')
        text = text.replace('"times": [0.99, 1.0, 1.01]', '"times": []')
        one = support.write(tmp_path / "one.json", text)
        other = support.write(tmp_path / "other.json", text.replace("29.94895", "29.948949999999996"))
        assert len(load([one, other]).spaces) == 1 and len(load([one]).spaces[0].rows) == 18

    def test_the_recorded_cache_and_its_t4_twin(self, shared: Path) -> None:
        options = ("--seeds", "1", "--evaluations", "25,50")
        folder = shared / "replay"
        one = figures(folder / "convolution_A100.json.gz", *options)
        other = figures(folder / "convolution_A100_T4.json.gz", *options)
        assert self.without(one) == self.without(other)
        assert one["spaces"][0]["configurations"] == 4362 and one["spaces"][0]["valid"] == 4201

    def test_a_database_has_a_space_for_every_task_with_enough_records(self, tmp_path: Path) -> None:
        with Store.open(tmp_path / "records.db") as store:
            for i in range(60):
                config = Config(bm=2 ** (i % 10), order="row" if i < 30 else "column", stages=1 + i % 30 // 10)
                outcome = Outcome.OK if i % 7 else Outcome.COMPILE_ERROR
                store.append(make_record(1000.0 + i, outcome, number=i, config=config))
                if i < 20:
                    store.append(make_record(5.0, number=i, config=config, workload=conv(k=128)))
                failed = make_record(5.0, Outcome.COMPILE_ERROR, number=i, config=config, workload=conv(k=32))
                store.append(failed)
            best = Config(bm=2, order="row", stages=1)  # number 1, the fastest one that works
            store.append(make_record(1.0, number=90, config=best, final_race=True))
        loaded = load([tmp_path / "records.db"])
        (space,) = loaded.spaces
        assert space.file == str(tmp_path / "records.db") and "conv2d" in space.name
        assert (len(space.rows), np.count_nonzero(~np.isnan(space.times_ns))) == (60, 51)
        assert space.best_ns == 1001.0, "a final race is measured under other circumstances and does not count"
        few, all_failed = loaded.left_out
        assert "20 configurations, fewer than 50" in few and "all 60 configurations failed" in all_failed
        options = ("--tuner", "random", "--seeds", "1", "--evaluations", "5")
        assert f"\nrecords.db: {space.name} " in schedsearch("replay", tmp_path / "records.db", *options).stdout
        assert replay(loaded.spaces, "random", evaluations=[60], seeds=1).geomean == {60: 1.0}

    def test_a_database_without_enough_records(self, tmp_path: Path) -> None:
        with Store.open(tmp_path / "records.db") as store:
            store.append(make_record())
        result = schedsearch("replay", tmp_path / "records.db")
        assert result.exit_code == 2 and "50 or more recorded configurations" in result.stderr

    @pytest.mark.parametrize("pack", [bytes, gzip.compress])
    def test_a_pipe_is_read_once(self, tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
        """As in `schedsearch replay <(zcat some.json.gz)`."""
        os.mkfifo(tmp_path / "pipe")
        writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(pack(json.dumps(support.cache()).encode()),))
        writer.start()
        (space,) = load([tmp_path / "pipe"]).spaces
        writer.join()
        assert len(space.rows) == 18

    def test_the_same_figures_in_another_process_and_with_several(self, cache: Path) -> None:
        options = ("--seeds", "2", "--evaluations", "10,18", "--json")
        here = figures(cache, *options[:-1])
        for more in ((), ("--jobs", "2")):
            process = start("replay", cache, *options, *more, cwd=cache.parent)
            out, err = process.communicate(timeout=240)
            there = json.loads(out)
            assert self.without(there) == self.without(here)
            assert "4 of 4 runs" in err or "2 of 2 runs" in err

    def test_figures_that_a_full_disk_does_not_take_are_one_line_of_error(self, cache: Path) -> None:
        command = [
            sys.executable,
            "-c",
            "from schedsearch.cli.console import run; run()",
            "replay",
            str(cache),
            "--tuner",
            "grid",
            "--seeds",
            "1",
        ]
        with Path("/dev/full").open("w") as full:
            result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert result.returncode == 74 and "cannot write to standard output: No space left" in result.stderr
        assert "Traceback" not in result.stderr

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
    @pytest.mark.mostly_long(2)
    def test_however_it_ends_its_processes_end_with_it(self, cache: Path, number: int, code: int) -> None:
        """At Ctrl-C a terminal sends SIGINT to all of them."""
        process = start("replay", cache, "--seeds", "5000", "--tuner", "random", "--jobs", "2", cwd=cache.parent)
        assert process.stderr is not None
        assert process.stderr.readline() == "500 of 5000 runs\n"
        workers = children(process.pid)
        for pid in (process.pid, *workers) if number == signal.SIGINT else (process.pid,):
            os.kill(pid, number)
        _, errors = process.communicate(timeout=240)
        assert process.returncode == code and "Traceback" not in errors
        assert len(workers) == 3, "two that search, and the keeper that ends what they leave behind"
        deadline = time.monotonic() + 120
        while any(alive(worker) for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(alive(worker) for worker in workers)

    def test_progress_on_a_narrow_terminal_stays_in_one_line(self, cache: Path) -> None:
        master, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
        command = [sys.executable, "-c", "from schedsearch.cli.console import run; run()", "replay", str(cache)]
        options = ["--tuner", "random", "--seeds", "3", "--evaluations", "3"]
        subprocess.run([*command, *options], stdout=subprocess.DEVNULL, stderr=terminal, check=True)
        os.close(terminal)
        told = os.read(master, 10_000).decode().split("\r\x1b[2K")
        assert told == ["", "1 of 3 runs, some_k", "2 of 3 runs, some_k", "3 of 3 runs, some_k", ""]

    def test_without_json_there_is_a_table(self, cache: Path) -> None:
        result = schedsearch("replay", cache, "--tuner", "random", "--seeds", "2", "--evaluations", "5,18")
        assert result.exit_code == 0
        assert "some" in result.stdout and "at 18" in result.stdout and "1.000 [1.000 1.000]" in result.stdout
        assert "geometric mean" in result.stdout and "CPU seconds per 64 proposals" in result.stdout


class TestWarm:
    def test_another_device_teaches_where_to_begin(self, cache: Path, tmp_path: Path) -> None:
        """The other device is half as fast and has the same order, so the model knows the optimum at once."""
        other = support.cache()
        for fields in other["cache"].values():
            if not isinstance(fields["time"], str):
                fields["time"], fields["times"] = 2 * fields["time"], []
        warm = support.write(tmp_path / "other.json", other)
        options = ("--seeds", "4", "--evaluations", "3")
        cold = figures(cache, *options)["geomean"]["3"]
        taught = figures(cache, *options, "--warm", warm)["geomean"]["3"]
        assert taught > max(cold, 0.85)

    def test_a_space_is_never_warmed_by_its_own_data_and_that_is_said(self, cache: Path, tmp_path: Path) -> None:
        options = ("--seeds", "2", "--evaluations", "3,6", "--json")
        cold = schedsearch("replay", cache, *options)
        own = schedsearch("replay", cache, *options, "--warm", cache)
        assert json.loads(own.stdout)["geomean"] == json.loads(cold.stdout)["geomean"]
        assert list(json.loads(own.stdout)) == list(json.loads(cold.stdout))
        name = f"{cache} (some_kernel Some GPU)"
        assert f"warning: {name} is searched cold, nothing warms it: {name} is its own data" in own.stderr
        assert "warning" not in cold.stderr

        other = json.loads(json.dumps(support.cache()).replace('"bx"', '"block"'))
        other = support.write(tmp_path / "other.json", other)
        result = schedsearch("replay", cache, other, *options, "--warm", other)
        first, second = (line for line in result.stderr.splitlines() if line.startswith("warning"))
        assert f"{name} is searched cold" in first and f"{other} (some_kernel Some GPU) has other knobs" in first
        assert f"{other} (some_kernel Some GPU) is searched cold" in second and "its own data" in second

    def test_the_matching_part_of_a_database_warms_and_the_rest_is_not_a_mistake(self, cache: Path, tmp_path: Path) -> None:
        params = {**support.PARAMS, "fixed": [7, 8, 9, 10]}
        slower = json.loads(json.dumps(support.cache(params)).replace('"time": 1.0,', '"time": 1.005,'))
        stranger = json.loads(json.dumps(support.cache(params)).replace('"bx"', '"block"'))
        with Store.open(tmp_path / "records.db") as store:
            for name, data in (("slower.json", slower), ("stranger.json", stranger)):
                import_file(store, support.write(tmp_path / name, {**data, "device_name": name}))
        options = ("--seeds", "1", "--evaluations", "3")
        result = schedsearch("replay", cache, "--warm", tmp_path / "records.db", *options)
        assert result.exit_code == 0 and "warning" not in result.stderr, result.stderr

    def test_a_recording_of_something_else_cannot_warm(self, cache: Path, tmp_path: Path) -> None:
        other = json.loads(json.dumps(support.cache()).replace('"bx"', '"block"'))
        result = schedsearch("replay", cache, "--warm", support.write(tmp_path / "other.json", other))
        assert result.exit_code == 2 and "other knobs" in result.stderr
