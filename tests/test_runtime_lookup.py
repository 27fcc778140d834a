"""How a kernel is found: the levels, what compile and explain agree on, and caches of kernels."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime_support import CPU_WORKLOAD, expected, operands, tuned_database

import schedsearch
from schedsearch.errors import DatabaseError, NoRecordError, UnusableRecordError, UsageError, WrongResultError
from schedsearch.executable.kernels import find_kernels
from schedsearch.measurement import CHAIN_GRAPH, COLD_GRAPH, COLD_GRAPH_PREPARED, HOT_GRAPH, MODES, OTHER_MODES
from schedsearch.records.deployment import export_deploy
from schedsearch.records.store import Store


@pytest.fixture(scope="module")
def cpu_db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuned_database(tmp_path_factory.mktemp("deploy"))


# --- The levels -------------------------------------------------------------------------------------------------------


def test_without_a_record_the_nearest_workload_lends_its_configuration(cpu_db: Path) -> None:
    larger = CPU_WORKLOAD.replace(n=3, h=12)
    kernel = schedsearch.compile(larger, cpu_db, target="cpu")
    assert (kernel.level, kernel.rung, kernel.verified) == ("nearest", "nearest", True)
    assert kernel.provenance.why[0].startswith("exact: no record")
    y = kernel(*(np.ones(arg.shape, np.float32) for arg in larger.signature))
    assert y.max() == 8 * 9 + 1


def test_without_a_database_the_rule_based_default_is_built_and_verified(tmp_path: Path) -> None:
    kernel = schedsearch.compile(CPU_WORKLOAD, tmp_path / "none.db", target="cpu", allow=("exact", "default"))
    assert (kernel.level, kernel.verified, kernel.provenance.time_ns) == ("default", True, None)


def test_without_an_allowed_level_there_is_no_record(cpu_db: Path, tmp_path: Path) -> None:
    with pytest.raises(NoRecordError, match=r"no kernel for .*exact: no record.*[Tt]une") as caught:
        schedsearch.compile(CPU_WORKLOAD.replace(n=5), cpu_db, target="cpu", allow=("exact", "same_architecture"))
    assert caught.value.exit_code == 4
    with pytest.raises(DatabaseError, match="tune first"):
        schedsearch.compile(CPU_WORKLOAD, tmp_path / "none.db", target="cpu", allow=("exact",))
    with pytest.raises(UsageError, match="did you mean 'exact'"):
        schedsearch.compile(CPU_WORKLOAD, cpu_db, target="cpu", allow=("exakt",))


def test_explain_names_every_level_and_builds_nothing(cpu_db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedsearch.backend.compile_source", None)
    explanation = schedsearch.explain(CPU_WORKLOAD, cpu_db, target="cpu")
    lines = explanation.lines
    assert str(explanation).splitlines()[0].startswith(CPU_WORKLOAD.label)
    assert [line.removeprefix("  ") for line in str(explanation).splitlines()[1:]] == lines
    assert lines[0].startswith("-> exact: record") and lines[0].endswith("stored machine code")
    assert [(level.level, level.verdict) for level in explanation.levels] == [
        ("exact", "serves"), ("other_mode", "no"), ("same_architecture", "no"), ("shipped", "no"), ("nearest", "no"),
        ("default", "fallback"),
    ]  # fmt: skip
    assert lines[4].startswith("   nearest: no record of another conv2d on a cpu device")
    assert lines[5].endswith("(a fallback)")
    assert [level["serves"] for level in json.loads(explanation.to_json())["levels"]] == [True, *[False] * 5]


def agree(workload: schedsearch.Workload, db: Path, **options: Any) -> str:
    """The level on which `compile` and `explain` agree."""
    kernel = schedsearch.compile(workload, db, target="cpu", **options)
    serving = schedsearch.explain(workload, db, target="cpu", **options).serving
    assert serving is not None and kernel.provenance.why[-1] == f"{serving.level}: {serving.reason}"
    return kernel.level


def test_explain_and_compile_agree_on_every_level(cpu_db: Path, tmp_path: Path) -> None:
    other = CPU_WORKLOAD.replace(n=1)
    assert agree(CPU_WORKLOAD, cpu_db) == "exact"
    assert agree(other, cpu_db) == "nearest"
    assert agree(other, cpu_db, allow=("default", "exact")) == "default"
    assert agree(CPU_WORKLOAD, tmp_path / "none.db") == "default"
    assert schedsearch.explain(other, cpu_db, target="cpu", allow="exact").serving is None


def test_code_that_is_not_trusted_is_served_by_neither(
    cpu_db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path))  # another machine
    assert agree(CPU_WORKLOAD, cpu_db) == "exact"
    explanation = schedsearch.explain(CPU_WORKLOAD, cpu_db, target="cpu")
    assert [level.verdict for level in explanation.levels[:2]] == ["no", "serves"]
    assert "this machine did not sign the machine code" in explanation.levels[0].reason
    assert explanation.levels[1].reason.endswith("built again from its configuration")


def test_without_a_compiler_neither_builds(cpu_db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedsearch.runtime.loading.COMPILERS", {"cpu": ("numba", "no_such_compiler.driver")})
    other = CPU_WORKLOAD.replace(n=1)
    explanation = schedsearch.explain(other, cpu_db, target="cpu")
    assert explanation.serving is None
    assert "building needs a compiler (there is no module no_such_compiler.driver)" in explanation.levels[-1].reason
    with pytest.raises(NoRecordError, match=r"on [^:]*: nearest, default: building needs a compiler .*; exact: no record"):
        schedsearch.compile(other, cpu_db, target="cpu")
    assert agree(CPU_WORKLOAD, cpu_db) == "exact"


def test_kernels_that_compute_wrong_values_do_not_count_as_a_missing_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("schedsearch.verification.verify.verify_once", lambda *_: "3 of 9 elements are wrong")
    with pytest.raises(WrongResultError, match="default: the kernel computes wrong values here: 3 of 9") as caught:
        schedsearch.compile(CPU_WORKLOAD, tmp_path / "none.db", target="cpu")
    assert caught.value.exit_code == 1


def test_a_record_whose_kernel_cannot_run_here_is_not_a_missing_record(
    cpu_db: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path))  # another machine, which trusts no stored code
    monkeypatch.setattr("schedsearch.runtime.loading.COMPILERS", {"cpu": ("numba", "no_such_compiler.driver")})
    with pytest.raises(UnusableRecordError, match=r"did not sign the machine code.*building needs a compiler") as caught:
        schedsearch.compile(CPU_WORKLOAD, cpu_db, target="cpu")
    assert caught.value.exit_code == 1
    with pytest.raises(UnusableRecordError, match="cannot be used"):
        find_kernels([CPU_WORKLOAD], cpu_db, schedsearch.detect("cpu"), strict=True)
    other = CPU_WORKLOAD.replace(n=1)
    for missing in ([other], [CPU_WORKLOAD, other]):
        with pytest.raises(NoRecordError, match="no record on") as none:
            find_kernels(missing, cpu_db, schedsearch.detect("cpu"), strict=True)
        assert none.value.exit_code == 4
    with pytest.raises(NoRecordError) as without:
        schedsearch.compile(other, cpu_db, target="cpu")
    assert without.value.exit_code == 4


# --- KernelCache ------------------------------------------------------------------------------------------------------
def promote_copy(db: Path, of: schedsearch.Kernel, time_ns: float, mode: str = COLD_GRAPH) -> int:
    """Records the kernel's configuration and code again with a shorter time, as a tuning run would. Returns the record."""
    with Store.open(db) as store:
        best = store.best(CPU_WORKLOAD, schedsearch.detect("cpu").key)
        assert best is not None
        faster = replace(
            best, measurement=replace(best.measurement, times_ns=(time_ns,), mode=mode), started_at=best.started_at + 1
        )
        record = store.append(faster)
        assert store.promote(record, of._loaded.artifact)
    return record


@pytest.fixture
def own_db(cpu_db: Path, tmp_path: Path) -> Path:
    """A copy of `cpu_db` that a test may write to."""
    return Path(shutil.copy(cpu_db, tmp_path / "records.db"))


def test_a_kernel_tuned_in_the_same_process_is_served_next(own_db: Path) -> None:
    first = schedsearch.compile(CPU_WORKLOAD, own_db, target="cpu")
    record = promote_copy(own_db, first, 1.0)
    second = schedsearch.compile(CPU_WORKLOAD, own_db, target="cpu")
    assert (second.provenance.record_id, second.provenance.time_ns) == (record, 1.0)


def test_a_cache_returns_one_kernel_until_there_is_a_better_one(own_db: Path) -> None:
    x, weight, bias = operands()
    other = CPU_WORKLOAD.replace(n=1)
    with schedsearch.KernelCache(own_db, "cpu") as kernels:
        first, lent = kernels.kernel(CPU_WORKLOAD), kernels.kernel(other)
        assert kernels.kernel(CPU_WORKLOAD) is first and (first.level, lent.level) == ("exact", "nearest")
        record = promote_copy(own_db, first, 1.0)
        second = kernels.kernel(CPU_WORKLOAD)
        assert second.provenance.record_id == record and kernels.kernel(CPU_WORKLOAD) is second
        assert kernels.kernel(other) is lent  # already built, and not recorded since
        assert kernels.explain(CPU_WORKLOAD).levels[0].reason.startswith(f"record {record} ")
        for kernel in (first, second):
            np.testing.assert_allclose(kernel(x, weight, bias), expected(x, weight, bias), rtol=1e-5, atol=1e-4)
    with pytest.raises(UsageError, match="was closed; make a new one"):
        kernels.kernel(CPU_WORKLOAD)


def test_a_cache_sees_a_database_that_appears_and_one_that_is_replaced(cpu_db: Path, tmp_path: Path) -> None:
    db = tmp_path / "later.db"
    with schedsearch.KernelCache(db, "cpu") as kernels:
        assert kernels.kernel(CPU_WORKLOAD).level == "default"
        shutil.copy(cpu_db, db)
        exact = kernels.kernel(CPU_WORKLOAD)
        assert exact.level == "exact"
        shutil.copy(cpu_db, tmp_path / "new.db")
        record = promote_copy(tmp_path / "new.db", exact, 1.0)
        (tmp_path / "new.db").replace(db)
        assert kernels.kernel(CPU_WORKLOAD).provenance.record_id == record
        db.unlink()
        assert kernels.kernel(CPU_WORKLOAD).provenance.record_id == record


def test_threads_may_share_a_cache(own_db: Path) -> None:
    """Kernels of one device take turns, so that results are whole."""
    x, weight, bias = operands()
    truth = expected(x, weight, bias)
    with schedsearch.KernelCache(own_db, "cpu") as kernels:

        def call(number: int) -> bool:
            if number == 8:
                promote_copy(own_db, kernels.kernel(CPU_WORKLOAD), 1.0)
            kernel = kernels.kernel(CPU_WORKLOAD)
            return bool(np.allclose(kernel(x, weight, bias), truth, rtol=1e-5, atol=1e-4))

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(call, range(40)))
        assert kernels.kernel(CPU_WORKLOAD).provenance.time_ns == 1.0


def test_a_cache_without_a_database_needs_the_level_default(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=r"there is no database .*none.db; tune first"):
        schedsearch.KernelCache(tmp_path / "none.db", "cpu", allow=("exact", "nearest"))


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("deployment", [False, True])
def test_a_cache_closes_databases_that_were_replaced(own_db: Path, tmp_path: Path, deployment: bool) -> None:
    if deployment:
        shutil.copy(own_db, tmp_path / "store.db")
        own_db.unlink()
        with Store.open(tmp_path / "store.db", readonly=True) as store:
            export_deploy(store, own_db)
    shutil.copy(own_db, tmp_path / "copy.db")
    with schedsearch.KernelCache(own_db, "cpu", allow=("exact",)) as kernels:
        kernel, before = kernels.kernel(CPU_WORKLOAD), descriptors()
        for _ in range(20):
            shutil.copy(tmp_path / "copy.db", tmp_path / "new.db")
            (tmp_path / "new.db").replace(own_db)
            assert kernels.kernel(CPU_WORKLOAD) is kernel, "it is the same best"
        assert descriptors() <= before + 1


def test_a_database_is_open_while_a_thread_reads_it_and_closed_afterwards(own_db: Path, tmp_path: Path) -> None:
    with schedsearch.KernelCache(own_db, "cpu", allow=("exact",)) as kernels:
        kernel, old = kernels.kernel(CPU_WORKLOAD), kernels._lookup
        assert old is not None
        with kernels._reading():
            shutil.copy(own_db, tmp_path / "new.db")
            (tmp_path / "new.db").replace(own_db)
            assert kernels.kernel(CPU_WORKLOAD) is kernel and kernels._lookup is not old
            assert old.exact(CPU_WORKLOAD.id, kernels.target.key, COLD_GRAPH) is not None
        with pytest.raises(DatabaseError, match="was closed"):
            old.version()


def truncate(db: Path) -> None:
    with db.open("r+b") as file:
        file.truncate(5000)


def overwrite(db: Path) -> None:
    with db.open("r+b") as file:
        file.write(b"\xff" * db.stat().st_size)


def replace_by_text(db: Path) -> None:
    (db.parent / "text").write_text("no database " * 1000)
    (db.parent / "text").replace(db)


def replace_by_a_folder(db: Path) -> None:
    db.unlink()
    db.mkdir()


@pytest.mark.parametrize("damage", [truncate, overwrite, replace_by_text, replace_by_a_folder])
@pytest.mark.parametrize("restore", ["rename", "in place"])
def test_a_cache_comes_back_when_a_damaged_database_is_restored(
    own_db: Path, tmp_path: Path, damage: Callable[[Path], None], restore: str
) -> None:
    x, weight, bias = operands()
    shutil.copy(own_db, tmp_path / "copy.db")
    with schedsearch.KernelCache(own_db, "cpu", allow=("exact",)) as kernels:
        kernel, before = kernels.kernel(CPU_WORKLOAD), descriptors()
        damage(own_db)
        for _ in range(3):
            with contextlib.suppress(DatabaseError):
                assert kernels.kernel(CPU_WORKLOAD) is kernel
            np.testing.assert_allclose(kernel(x, weight, bias), expected(x, weight, bias), rtol=1e-5, atol=1e-4)
        if own_db.is_dir():
            own_db.rmdir()
        if restore == "rename":
            (tmp_path / "copy.db").replace(own_db)
        else:
            own_db.write_bytes((tmp_path / "copy.db").read_bytes())
        assert kernels.kernel(CPU_WORKLOAD) is kernel
        record = promote_copy(own_db, kernel, 1.0)
        assert kernels.kernel(CPU_WORKLOAD).provenance.record_id == record
        assert descriptors() <= before + 1


def test_another_database_with_the_same_record_number_is_noticed(own_db: Path, tmp_path: Path) -> None:
    """Its best may be another configuration whose code is not kept."""
    with schedsearch.KernelCache(own_db, "cpu") as kernels:
        first = kernels.kernel(CPU_WORKLOAD)
        shutil.copy(own_db, tmp_path / "new.db")
        with sqlite3.connect(tmp_path / "new.db") as connection:
            connection.execute(
                "UPDATE best SET config = json_set(config, '$.threads', json_extract(config, '$.threads') + 1)"
            )
        connection.close()
        (tmp_path / "new.db").replace(own_db)
        assert kernels.kernel(CPU_WORKLOAD) is not first


def test_threads_may_ask_while_the_database_is_replaced(own_db: Path, tmp_path: Path) -> None:
    shutil.copy(own_db, tmp_path / "copy.db")
    with schedsearch.KernelCache(own_db, "cpu", allow=("exact",)) as kernels:
        kernel = kernels.kernel(CPU_WORKLOAD)

        def ask(number: int) -> bool:
            if number % 10 == 0:
                shutil.copy(tmp_path / "copy.db", tmp_path / f"new{number}.db")
                (tmp_path / f"new{number}.db").replace(own_db)
            return kernels.kernel(CPU_WORKLOAD) is kernel

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(ask, range(400)))


def test_readers_leave_no_log_behind(own_db: Path) -> None:
    schedsearch.compile(CPU_WORKLOAD, own_db, target="cpu")
    schedsearch.explain(CPU_WORKLOAD, own_db, target="cpu")
    schedsearch.KernelCache(own_db, "cpu").close()
    assert [path.name for path in own_db.parent.glob("records.db*")] == ["records.db"]


# --- Prepared constants as a timing mode ------------------------------------------------------------------------------
def test_a_record_of_the_prepared_mode_is_served_in_that_mode(own_db: Path) -> None:
    plain = schedsearch.compile(CPU_WORKLOAD, own_db, target="cpu")
    with pytest.raises(NoRecordError, match=f"exact: no record of this workload on .* in mode {COLD_GRAPH_PREPARED}"):
        schedsearch.compile(CPU_WORKLOAD, own_db, target="cpu", mode=COLD_GRAPH_PREPARED, allow="exact")
    record = promote_copy(own_db, plain, 1.0, COLD_GRAPH_PREPARED)
    kernel = schedsearch.compile(CPU_WORKLOAD, own_db, target="cpu", mode=COLD_GRAPH_PREPARED, allow="exact")
    assert (kernel.provenance.record_id, kernel.provenance.mode) == (record, COLD_GRAPH_PREPARED)
    x, weight, bias = operands()
    for y in (kernel(x, weight, bias), kernel(x, **kernel.prepare(weight=weight, bias=bias))):
        np.testing.assert_allclose(y, expected(x, weight, bias), rtol=1e-5, atol=1e-4)
    assert schedsearch.compile(CPU_WORKLOAD, own_db, target="cpu").provenance == plain.provenance


def test_without_a_record_in_the_mode_that_is_asked_for_one_of_another_mode_serves(own_db: Path) -> None:
    plain = schedsearch.compile(CPU_WORKLOAD, own_db, target="cpu")
    kernel = schedsearch.compile(CPU_WORKLOAD, own_db, target="cpu", mode=COLD_GRAPH_PREPARED)
    assert (kernel.level, kernel.provenance.mode) == ("other_mode", COLD_GRAPH)
    assert kernel.provenance.record_id == plain.provenance.record_id
    explained = schedsearch.explain(CPU_WORKLOAD, own_db, target="cpu", mode=COLD_GRAPH_PREPARED)
    serves = next(level for level in explained.levels if level.verdict == "serves")
    assert serves.level == "other_mode" and f"in mode {COLD_GRAPH}, stored machine code" in serves.reason


def test_other_modes_have_an_order(own_db: Path) -> None:
    """Asked for hot operands, chained ones are most alike, then cold ones with plain constants."""
    plain = schedsearch.compile(CPU_WORKLOAD, own_db, target="cpu")
    assert set(OTHER_MODES) == set(MODES)
    assert all(set(others) == set(MODES) - {mode} for mode, others in OTHER_MODES.items())
    prepared = promote_copy(own_db, plain, 1.0, COLD_GRAPH_PREPARED)

    def served(mode: str) -> int | None:
        return schedsearch.compile(CPU_WORKLOAD, own_db, target="cpu", mode=mode).provenance.record_id

    assert served(HOT_GRAPH) == plain.provenance.record_id
    assert served(CHAIN_GRAPH) == prepared
    chained = promote_copy(own_db, plain, 1.0, CHAIN_GRAPH)
    assert served(HOT_GRAPH) == served(CHAIN_GRAPH) == chained
