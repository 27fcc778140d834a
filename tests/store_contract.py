"""The tests that every store of records must pass, whatever its database. A test class subclasses `StoreContract`.

::

    class TestSqlite(StoreContract):
        def open(self, folder):
            return Store.open(folder / "records.db")
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schedsearch.config import Config
from schedsearch.errors import UsageError
from schedsearch.launch import Artifact, Grid, Int32, LaunchPlan, Pointer, Step, TensorMap
from schedsearch.measurement import Anchor, Measurement, Outcome, Record, Resources, Verdict
from schedsearch.profiling.profile import Launch, Profile
from schedsearch.records.store import Store
from schedsearch.workload import Workload

H200 = "cuda:sm_90:132:NVIDIA H200"
H100 = "cuda:sm_90:114:NVIDIA H100 PCIe"
A100 = "cuda:sm_80:108:NVIDIA A100-SXM4-80GB"
TOOLCHAIN = {"numba-cuda": "0.30.4", "nvjitlink": "13.0.88", "driver": "580.65"}


def conv(**changes: object) -> Workload:
    return Workload.conv2d(**{"n": 1, "h": 14, "w": 14, "c": 64, "k": 64, "r": 3, "s": 3, "padding": 1, **changes})


def record(time_ns: float | None = 1000.0, outcome: Outcome = Outcome.OK, **changes: Any) -> Record:
    """A record with every field set; `time_ns` is used for ok only."""
    number = changes.pop("number", 0)
    measurement = changes.pop("measurement", None) or Measurement(
        outcome=outcome,
        mode=changes.pop("mode", "cold-graph-v1"),
        times_ns=(time_ns, time_ns * 1.1, time_ns * 0.9) if outcome is Outcome.OK and time_ns else (),
        resources=Resources(registers=128, shared_bytes=49152, local_bytes=8, spill_bytes=0, code_bytes=9000),
        max_error=0.125 if outcome.is_verified else None,
        message="" if outcome is Outcome.OK else "ptxas: something is wrong\n  with “this” kernel",
        build_s=0.75,
        run_s=0.1,
        clocks={"sm_mhz": 1980, "throttle": "none"},
        host="node7",
        device_uuid="GPU-6e1c8a3d-0000-0000-0000-000000000001",
        sustained_ns=1.25 * time_ns if outcome is Outcome.OK and time_ns else None,
    )
    values: dict[str, Any] = {
        "workload": conv(),
        "target": H200,
        "template": "conv2d_wgmma",
        "template_version": 1,
        "config": Config(bm=128, bn=64, swizzle=True, order="row", number=number),
        "measurement": measurement,
        "toolchain": TOOLCHAIN,
        "run": "20250101T000000-00000000",
        "batch": 3,
        "prediction": 0.1,
        "started_at": 1.7e9 + number / 8,
        "finished_at": 1.7e9 + number / 8 + 0.5,
        "model": 2,
        "anchor": Anchor("c0ffee", 4000.0),
        "verdict": Verdict.TIED,
    }
    return Record(**{**values, **changes})


def artifact(text: bytes = b"\x7fELF code", arch: str = "sm_90a") -> Artifact:
    tensor_map = TensorMap(
        "x", "float16", (64, 14, 14, 1), (128, 1792, 25088), (1, 1, 1, 1), box=(64, 8, 8, 1), swizzle_bytes=128
    )
    params = (tensor_map, Pointer("weight"), Pointer("y"), Int32(3))
    step = Step("conv", params, Grid(98, blocks_per_sm=1), block_threads=384, dynamic_shared_bytes=200_000, cluster=2)
    return Artifact(text, LaunchPlan("cuda", arch, (step,), workspaces={"scratch": 4096}, alignments={"x": 16}))


def profile(duration_ns: float = 12_345.0) -> Profile:
    """Two launches, the first three times as long as the second."""
    launches = tuple(
        Launch(
            kernel,
            "(132, 1, 1)",
            "(384, 1, 1)",
            {"gpu__time_duration.sum": time_ns, "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": percent},
        )
        for kernel, time_ns, percent in (("conv", 0.75 * duration_ns, 80.0), ("reduce", 0.25 * duration_ns, 0.0))
    )
    return Profile("kernel", "ncu 2025.3.1.0", "flushed", launches, missing=("lts__t_bytes.sum",), taken_at=1.75e9)


class StoreContract(ABC):
    @abstractmethod
    def open(self, folder: Path) -> Store:
        """A new, empty store; `folder` is empty and belongs to it alone."""

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
        monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path / "state"))
        (tmp_path / "store").mkdir()
        with self.open(tmp_path / "store") as store:
            yield store

    @pytest.mark.parametrize("outcome", Outcome)
    def test_a_record_of_any_outcome_comes_back_as_it_was(self, store: Store, outcome: Outcome) -> None:
        wanted = record(outcome=outcome, number=1)
        record_id = store.append(wanted)
        assert store.row(record_id).record() == wanted
        assert store.history() == [wanted]

    def test_an_error_that_is_not_a_number_is_kept_as_infinite(self, store: Store) -> None:
        wrong = record(measurement=Measurement(Outcome.WRONG_ANSWER, max_error=math.nan, message="NaN at 17"))
        assert store.row(store.append(wrong)).measurement.max_error == math.inf

    def test_a_time_that_is_not_finite_is_a_bug_of_the_caller(self, store: Store) -> None:
        with pytest.raises(ValueError, match=r"time_ns of a record is inf; it must be a finite number above 0"):
            store.append(record(measurement=Measurement(Outcome.OK, times_ns=(math.inf,))))

    def test_the_same_record_twice_is_one_and_a_repetition_is_two(self, store: Store) -> None:
        first = store.append(record(number=1))
        assert store.append(record(number=1)) == first
        again = store.append(record(number=1, started_at=1.8e9))
        assert again > first
        assert len(store.history()) == 2

    def test_history_filters_and_keeps_the_order_of_measurement(self, store: Store) -> None:
        later, earlier = record(number=8), record(number=2, target=A100, template="conv2d_mma")
        other = record(number=5, workload=conv(k=128), mode="hot-graph-v1")
        for item in (later, earlier, other):
            store.append(item)
        assert store.history() == [earlier, other, later]
        assert store.history(workload=conv()) == [earlier, later]
        assert store.history(target=A100) == store.history(template="conv2d_mma") == [earlier]
        assert store.history(mode="hot-graph-v1") == [other]
        assert store.history(op="conv2d", target=H200) == [other, later]
        assert store.history(op="matmul") == []

    def test_measured_is_what_a_resumed_run_need_not_measure(self, store: Store) -> None:
        failed, good = record(number=1, outcome=Outcome.COMPILE_ERROR), record(number=2)
        raced = record(number=2, time_ns=900.0, started_at=1.8e9, final_race=True)
        for item in (
            failed, good, raced, record(number=3, template_version=2), record(number=4, target=H100),
            record(number=5, workload=conv(k=8)), record(number=6, toolchain={**TOOLCHAIN, "driver": "999"}),
            record(number=7, mode="hot-graph-v1"), record(number=8, template="conv2d_mma"),
        ):  # fmt: skip
            store.append(item)
        assert store.measured(conv(), H200, "conv2d_wgmma", 1, toolchain=TOOLCHAIN) == {
            failed.config: failed,
            good.config: good,
        }, "times of the search compare with each other, not with those of a race"
        assert len(store.measured(conv(), H200, "conv2d_wgmma", 1)) == 3, "any toolchain"
        wrong = record(number=2, outcome=Outcome.WRONG_ANSWER, started_at=1.9e9, final_race=True)
        store.append(wrong)
        assert store.measured(conv(), H200, "conv2d_wgmma", 1)[good.config] == wrong, "what a race found wrong is wrong"

    def test_the_last_race_of_a_task_is_that_of_its_last_run(self, store: Store) -> None:
        def raced(number: int, run: str, **changes: Any) -> Record:
            return record(number=number, run=run, started_at=1.8e9 + number, final_race=True, **changes)

        assert store.last_race(conv(), H200) == []
        store.append(record(number=0))
        older, first, failed = raced(1, "a"), raced(2, "b"), raced(3, "b", outcome=Outcome.WRONG_ANSWER)
        elsewhere = (raced(4, "c", target=H100), raced(5, "c", workload=conv(k=8)), raced(6, "c", mode="hot-graph-v1"))
        other_compiler = raced(7, "c", toolchain={**TOOLCHAIN, "driver": "999"})
        for each in (older, first, failed, *elsewhere, other_compiler, record(number=8, run="d")):
            store.append(each)
        assert store.last_race(conv(), H200, toolchain=TOOLCHAIN) == [first, failed]
        assert store.last_race(conv(), H200) == [other_compiler]

    def test_tuned_are_the_workloads_and_targets_where_this_version_of_a_template_has_a_valid_record(
        self, store: Store
    ) -> None:
        for each in (
            record(100.0, number=1),
            record(80.0, number=2),
            record(70.0, number=3, workload=conv(n=2)),
            record(90.0, number=4, target=A100),
            record(10.0, number=6, workload=conv(n=8), template="conv2d_mma"),
            record(10.0, number=7, workload=conv(n=8), template_version=2),
            record(10.0, number=8, workload=conv(n=8), mode="hot-graph-v1"),
            record(outcome=Outcome.WRONG_ANSWER, number=9, workload=conv(n=4)),
        ):
            store.append(each)
        found = store.tuned("conv2d", "conv2d_wgmma", 1)
        assert len(found) == 3 and set(found) == {(conv(), H200), (conv(), A100), (conv(n=2), H200)}
        assert store.tuned("conv2d", "conv2d_wgmma", 2) == [(conv(n=8), H200)]
        assert store.tuned("conv2d", "conv2d_cpu", 1) == []

    def test_evidence_is_the_fastest_time_of_each_configuration_of_one_task_the_fastest_first(self, store: Store) -> None:
        def config(number: int) -> Config:
            return Config(bm=number)

        for number, (time_ns, at) in enumerate([(300.0, 1), (100.0, 2), (None, 3), (200.0, 1), (None, 1)]):
            outcome = Outcome.OK if time_ns else Outcome.COMPILE_ERROR
            store.append(record(time_ns, outcome, number=number, config=config(at)))
        others: list[dict[str, Any]] = [
            {"workload": conv(n=2)},
            {"target": A100},
            {"template_version": 2},
            {"template": "x"},
            {"mode": "hot-graph-v1"},
        ]
        for number, other in enumerate(others, 50):
            store.append(record(1.0, number=number, config=config(4), **other))
        expected = [(config(2), 100.0), (config(1), 200.0), (config(3), None)]
        assert store.evidence(conv(), H200, "conv2d_wgmma", 1, limit=400) == expected

    @pytest.mark.parametrize(("total", "limit"), [(8, 8), (9, 8), (30, 8), (40, 16), (41, 16), (5, 400), (250, 400)])
    def test_of_much_evidence_the_fastest_and_every_nth_of_the_others_is_taken(
        self, store: Store, total: int, limit: int
    ) -> None:
        times = np.random.default_rng(0).permutation(total)
        for number, time_ns in enumerate(times.tolist()):
            store.append(record(1.0 + time_ns, number=number, config=Config(bm=number)))
        found = store.evidence(conv(), H200, "conv2d_wgmma", 1, limit=limit)
        ranks = [int(time_ns - 1) for _, time_ns in found if time_ns]
        assert ranks == sorted(set(ranks)) and min(total, limit // 2) <= len(ranks) <= limit
        assert ranks[: limit // 4] == list(range(min(total, limit // 4)))
        steps = set(np.diff(ranks[limit // 4 - 1 :]).tolist())
        assert len(steps - {1}) <= 1, "evenly"

    def test_nothing_is_best_until_it_is_promoted(self, store: Store) -> None:
        record_id = store.append(record())
        assert store.best(conv(), H200) is None
        assert store.promote(record_id, artifact())
        best = store.best(conv(), H200)
        assert best is not None and best.measurement == record().measurement
        assert best.artifact == artifact().sha256
        assert store.artifact(best.artifact) == artifact()
        assert store.best(conv(), A100) is None and store.best(conv(), H200, "hot-graph-v1") is None

    def test_only_a_record_that_is_ok_can_be_promoted(self, store: Store) -> None:
        failed = store.append(record(outcome=Outcome.WRONG_ANSWER))
        with pytest.raises(UsageError, match=f"record {failed} ended in wrong_answer; only a record that is ok can be best"):
            store.promote(failed, artifact())
        with pytest.raises(UsageError, match="has no record 99"):
            store.promote(99, artifact())
        assert store.stats()["artifacts"] == 0, "a refused promotion leaves nothing behind"

    def test_promotion_is_explicit_and_if_faster_is_judged_by_the_store(self, store: Store) -> None:
        fast, slow = store.append(record(500.0, number=1)), store.append(record(900.0, number=2))
        store.promote(fast, artifact(b"fast"))
        assert not store.promote(slow, artifact(b"slow"), if_faster=True)
        assert [best.record_id for best in store.bests()] == [fast]
        assert store.promote(slow, artifact(b"slow"), verified=False)
        (best,) = store.bests()
        assert (best.record_id, best.verified, best.artifact_sha256) == (slow, False, artifact(b"slow").sha256)

    def test_an_imported_record_is_not_measured_here_and_cannot_be_promoted(self, store: Store) -> None:
        mine, imported = record(900.0, number=1), record(500.0, number=2, source="gift.jsonl", final_race=True)
        store.append(mine)
        imported_id = store.append(imported)
        assert store.measured(conv(), H200, "conv2d_wgmma", 1) == {mine.config: mine}
        assert store.last_race(conv(), H200) == []
        both = [(imported.config, 500.0), (mine.config, 900.0)]
        assert store.evidence(conv(), H200, "conv2d_wgmma", 1, limit=9) == both
        assert store.evidence(conv(), H200, "conv2d_wgmma", 1, limit=9, imported=True) == both[:1]
        with pytest.raises(UsageError, match=r"came from gift\.jsonl; only what was measured here can be best"):
            store.promote(imported_id, artifact())
        assert list(store.bests()) == [] and store.stats()["artifacts"] == 0

    def test_the_code_of_a_best_is_loaded_as_long_as_it_is_right(self, store: Store) -> None:
        store.promote(store.append(record()), artifact())
        (best,) = store.bests()
        assert best.vouched and store.code(best) == artifact()
        store.demote(best.record)
        assert store.code(best) is None, "it turned out wrong"
        store.promote(store.append(record(number=1)), artifact())
        (best,) = store.bests()
        assert store.code(best) == artifact(), "it was verified again"

    def test_a_record_that_was_promoted_keeps_its_code_for_the_next_promotion(self, store: Store) -> None:
        first, second = store.append(record(number=1)), store.append(record(number=2))
        store.promote(first, artifact())
        store.promote(second)
        assert next(store.bests()).artifact_sha256 is None
        store.promote(first)
        assert next(store.bests()).artifact_sha256 == artifact().sha256

    @pytest.mark.parametrize(
        ("time_ns", "anchor", "wins"),
        [
            (958.0, Anchor("default", 1900.0), False),  # a cool card: 0.504 of the default, against 0.5 on the hot one
            (1200.0, Anchor("default", 2500.0), True),  # a slower card: 0.48
            (1100.0, Anchor("default", 2200.0), False),  # the same
            (958.0, Anchor("another default", 1900.0), True),  # nothing in common, so the times decide
            (1101.0, Anchor("another default", 9000.0), False),
            (958.0, None, True),
            (1101.0, None, False),
        ],
    )
    def test_records_of_races_with_the_same_anchor_compare_by_their_ratio_to_it(
        self, store: Store, time_ns: float, anchor: Anchor | None, wins: bool
    ) -> None:
        for k in (8, 16, 24, 32, 40, 48, 56, 72):  # the anchors of other tasks are of the same code, and mean nothing here
            of_another_task = record(9.0, number=k, workload=conv(k=k), anchor=Anchor("default", 20.0 * k))
            store.promote(store.append(of_another_task), artifact(b"hot"))
        hot = store.append(record(1100.0, number=1, anchor=Anchor("default", 2200.0)))
        store.promote(hot, artifact(b"hot"))
        other = store.append(record(time_ns, number=2, anchor=anchor))
        assert store.promote(other, artifact(b"other"), if_faster=True) is wins
        assert [best.record_id for best in store.bests(workload=conv())] == [other if wins else hot]
        assert store.stats()["artifacts"] == 1 + wins, "code that is not served is not kept"

    def test_a_race_decides_between_its_entrants_and_times_between_all_others(self, store: Store) -> None:
        store.promote(standing := store.append(record(500.0, number=1)))
        winner = store.append(record(600.0, number=2, run="later"))
        loser, standing_again = record(650.0, number=3, run="later"), record(610.0, number=1, run="later")
        assert not store.promote(winner, if_faster=True, raced=[loser])
        assert [best.record_id for best in store.bests()] == [standing]
        assert store.promote(winner, if_faster=True, raced=[loser, standing_again])
        assert [best.record_id for best in store.bests()] == [winner]

    def test_there_is_one_best_per_workload_target_and_mode(self, store: Store) -> None:
        some: list[dict[str, Any]] = [{}, {"target": A100}, {"mode": "hot-graph-v1"}, {"workload": conv(k=128)}, {}]
        for number, changes in enumerate(some):
            store.promote(store.append(record(number=number, **changes)))
        assert len(list(store.bests())) == 4
        assert len(list(store.bests(workload=conv()))) == 3
        assert [best.record.target for best in store.bests(target=A100)] == [A100]
        assert list(store.bests(op="matmul")) == []

    def test_a_best_can_be_taken_away_and_its_records_stay(self, store: Store) -> None:
        store.promote(store.append(record()), artifact())
        assert not store.demote(record(number=1)), "another configuration was wrong"
        assert not store.demote(record(target=A100)) and not store.demote(record(workload=conv(k=128)))
        assert store.demote(record()) and not store.demote(record())
        assert store.best(conv(), H200) is None and len(store.history()) == 1

    def test_prune_drops_code_beyond_the_fastest_and_no_measurement(self, store: Store) -> None:
        codes = {}
        for number, time_ns in enumerate((500.0, 400.0, 300.0, 200.0, 100.0)):
            codes[time_ns] = artifact(b"code %d" % number * 1000)
            store.promote(store.append(record(time_ns, number=number)), codes[time_ns])
        other = artifact(b"other")
        store.promote(store.append(record(9e9, target=A100)), other)
        slowest = store.append(record(500.0, number=0))
        store.promote(slowest)
        before = store.history()
        report = store.prune(2)
        assert report == {"artifacts_kept": 4, "artifacts_dropped": 2, "bytes_freed": 12000}
        assert store.history() == before
        kept = {time_ns for time_ns, code in codes.items() if store.artifact(code.sha256)}
        assert kept == {100.0, 200.0, 500.0}, "the two fastest, and the best"
        assert store.artifact(other.sha256) == other, "another target's fastest"
        assert store.prune(2)["artifacts_dropped"] == 0
        with pytest.raises(UsageError, match="at least 1"):
            store.prune(0)

    def test_a_run_is_open_until_it_is_finished(self, store: Store) -> None:
        killed, done = store.start_run({"command": "tune a.yaml"}), store.start_run({"command": "tune b.yaml"})
        store.append(record(run=done))
        store.finish_run(done, {"trials": 1})
        store.append(record(number=2, run=done), {"trials": 2})  # comes too late
        runs = {run["id"]: run for run in store.runs()}
        assert runs[killed]["finished_at"] is None and runs[killed]["summary"] is None
        assert runs[done]["info"] == {"command": "tune b.yaml"} and runs[done]["summary"] == {"trials": 1}
        assert (runs[done]["records"], runs[killed]["records"]) == (2, 0)
        with pytest.raises(UsageError, match="has no run 'nope'"):
            store.finish_run("nope", {})

    def test_an_open_run_tells_about_itself_with_its_records(self, store: Store) -> None:
        one, other = store.start_run({}), store.start_run({})
        store.append(record(number=1, run=one), {"shares": {"device": 0.5}})
        store.append(record(number=2, run=one))
        runs = {run["id"]: run for run in store.runs()}
        assert (runs[one]["summary"], runs[one]["finished_at"]) == ({"shares": {"device": 0.5}}, None)
        assert runs[other]["summary"] is None
        store.finish_run(one, {"trials": 2})
        assert {run["id"]: run for run in store.runs()}[one]["summary"] == {"trials": 2}

    def test_a_listing_is_newest_first_and_says_what_is_served(self, store: Store) -> None:
        first, second = store.append(record(number=1)), store.append(record(number=2, outcome=Outcome.LAUNCH_ERROR))
        store.promote(first)
        rows = store.rows()
        assert [(row.id, row.op, row.best) for row in rows] == [(second, "conv2d", False), (first, "conv2d", True)]
        assert rows[1].record() == record(number=1) and rows[1].label == conv().label and rows[1].problem == ""
        assert [row.id for row in store.rows(limit=1)] == [second]
        assert [row.id for row in store.rows(outcomes={Outcome.OK})] == [first]
        assert [row.id for row in store.rows(outcomes=set(Outcome) - {Outcome.OK})] == [second]
        assert store.rows(outcomes=()) == [] and store.rows(run="another") == []

    def test_a_listing_is_of_the_workloads_that_a_text_names_and_can_begin_with_the_fastest(self, store: Store) -> None:
        slow, fast = store.append(record(number=1, time_ns=2000.0)), store.append(record(number=2, time_ns=1000.0))
        failed = store.append(record(number=3, outcome=Outcome.LAUNCH_ERROR))
        other = store.append(replace(record(number=4, time_ns=1500.0), workload=conv(n=2)))
        assert [row.id for row in store.rows(order="fastest")] == [fast, other, slow, failed]
        assert [row.id for row in store.rows(order="fastest", limit=1)] == [fast]
        assert [row.id for row in store.rows(named=conv(n=2).label.upper())] == [other]
        assert [row.id for row in store.rows(named=conv(n=2).id[:8])] == [other]
        assert len(store.rows(named="conv2d")) == 4 and store.rows(named="matmul") == []

    def test_what_was_appended_since_is_read_in_order(self, store: Store) -> None:
        ids = [store.append(record(number=number, run="ab"[number % 2])) for number in range(6)]
        assert [row.id for row in store.records_after(0)] == ids
        assert [row.id for row in store.records_after(ids[1], limit=2)] == ids[2:4]
        assert [row.id for row in store.records_after(ids[1], run="b")] == [ids[3], ids[5]]
        assert store.records_after(ids[-1]) == []
        new = store.append(record(number=9))
        assert [row.record() for row in store.records_after(ids[-1])] == [record(number=9)] and new > ids[-1]

    def test_some_records_are_read_by_their_ids_in_order(self, store: Store) -> None:
        ids = [store.append(record(number=number)) for number in range(4)]
        found = store.records_of([ids[3], ids[0], ids[3] + 1000])
        assert [(row.id, row.record()) for row in found] == [(ids[0], record(number=0)), (ids[3], record(number=3))]
        assert store.records_of([]) == []

    def test_threads_may_share_a_store(self, store: Store) -> None:

        with ThreadPoolExecutor(4) as pool:
            ids = list(pool.map(lambda number: store.append(record(number=number)), range(40)))
        assert len(set(ids)) == 40 == len(store.history())

    def test_profiles_belong_to_a_record_and_are_kept_once(self, store: Store) -> None:
        first, second = store.append(record(number=1)), store.append(record(number=2))
        store.add_profile(second, replace(profile(), taken_at=2.0))
        store.add_profile(second, replace(profile(), taken_at=1.0))
        store.add_profile(second, replace(profile(), taken_at=1.0))
        assert store.profiles(first) == []
        assert store.profiles(second) == [replace(profile(), taken_at=1.0), replace(profile(), taken_at=2.0)]
        with pytest.raises(UsageError, match="has no record 99"):
            store.add_profile(99, profile())
