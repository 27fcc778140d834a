"""Records that come with the package: where a look-up takes them, what it checks, and what a file may not do."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cli_support import schedsearch as command
from records_support import H100, H200, conv, record
from runtime_support import CPU_WORKLOAD, expected, operands, tuned_database

import schedsearch
from schedsearch.device.detect import detect
from schedsearch.errors import DatabaseError, NoRecordError, UsageError
from schedsearch.executable.kernels import find_kernels
from schedsearch.measure.recheck import recheck
from schedsearch.measurement import CHAIN_GRAPH, COLD_GRAPH, HOT_GRAPH, Anchor, Measurement, Outcome
from schedsearch.network.costs import RecordCosts
from schedsearch.records.entries import chosen
from schedsearch.records.lookup import Lookup
from schedsearch.records.shipped import GAINS, any_shipped, file_name, gain_key, shipped_records
from schedsearch.records.shipping import MAX_BYTES, ship, shipped_ids
from schedsearch.records.store import Store
from schedsearch.session.hints import shipped_results
from schedsearch.target import PRESETS
from schedsearch.template import load_template
from schedsearch.workload import Workload

CPU = detect("cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with one record of this CPU."""
    return tuned_database(tmp_path_factory.mktemp("source"))


@pytest.fixture
def tuned(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a shipped record of this CPU, twice as fast as the default, which look-ups take."""
    folder = tmp_path / "tuned"
    folder.mkdir()
    with Store.open(source, readonly=True) as store:
        ship(store, folder, CPU.key, "tests")
    set_gain(folder, 2.0)
    monkeypatch.setenv("SCHEDSEARCH_TUNED_DIR", str(folder))
    yield folder


def set_gain(tuned: Path, gain: float) -> None:
    gains = json.dumps({gain_key(CPU_WORKLOAD.id, COLD_GRAPH): gain})
    altered(tuned, f"UPDATE meta SET value = ? WHERE key = '{GAINS}'", gains)


def raced(store: Store, time_ns: float, anchor_ns: float, **changes: object) -> int:
    """Appends a record of a final race and makes it the best of its task."""
    measurement = Measurement(Outcome.OK, times_ns=(time_ns,))
    made = record(measurement=measurement, anchor=Anchor("c0de", anchor_ns), final_race=True, **changes)
    record_id = store.append(made)
    store.promote(record_id, if_faster=True)
    return record_id


# ---- the order of look-up


def test_a_shipped_record_is_built_verified_and_computes_the_right_values(tuned: Path, tmp_path: Path) -> None:
    kernel = schedsearch.compile(CPU_WORKLOAD, tmp_path / "none.db", target="cpu", allow=("exact", "shipped"))
    x, weight, bias = operands()
    np.testing.assert_allclose(kernel(x, weight, bias), expected(x, weight, bias), rtol=1e-4, atol=1e-4)
    assert (kernel.level, kernel.verified, kernel.provenance.time_ns) == ("shipped", True, None)
    assert file_name(CPU.key) in kernel.provenance.why[-1]


def test_the_own_database_comes_first_and_other_workloads_last(tuned: Path, source: Path, tmp_path: Path) -> None:
    def serving(workload: schedsearch.Workload, db: Path) -> str:
        found = schedsearch.explain(workload, db, target="cpu").serving
        assert found is not None
        return found.level

    assert serving(CPU_WORKLOAD, source) == "exact"
    assert serving(CPU_WORKLOAD, tmp_path / "none.db") == "shipped"
    assert serving(CPU_WORKLOAD.replace(n=3), tmp_path / "none.db") == "nearest"


def test_a_shipped_record_of_a_very_different_workload_does_not_serve(tuned: Path, tmp_path: Path) -> None:
    for changes, level in (({"n": 5}, "nearest"), ({"n": 16}, "default"), ({"epilogue": ("bias",)}, "default")):
        found = schedsearch.explain(CPU_WORKLOAD.replace(**changes), tmp_path / "none.db", target="cpu").serving
        assert found is not None and found.level == level, changes


@pytest.mark.parametrize("gain", [1.0, 1.05])
def test_a_shipped_record_that_hardly_beats_its_own_default_serves_no_other_workload(
    tuned: Path, tmp_path: Path, gain: float
) -> None:
    set_gain(tuned, gain)
    for workload, level in ((CPU_WORKLOAD, "shipped"), (CPU_WORKLOAD.replace(n=3), "default")):
        found = schedsearch.explain(workload, tmp_path / "none.db", target="cpu").serving
        assert found is not None and found.level == level


def test_explain_says_which_file_and_why_another_level_does_not_serve(tuned: Path, tmp_path: Path) -> None:
    lines = schedsearch.explain(CPU_WORKLOAD, tmp_path / "none.db", target="cpu").lines
    assert lines[0].startswith("   exact: there is no database")
    assert lines[3].startswith("-> shipped: shipped record by conv2d_cpu") and file_name(CPU.key) in lines[3]
    near = schedsearch.explain(CPU_WORKLOAD.replace(n=3), tmp_path / "none.db", target="cpu").lines
    assert near[3].startswith("   shipped: no shipped record of this workload on cpu:")
    assert near[4].startswith("-> nearest: configuration of") and "a shipped record" in near[4]


def test_without_a_database_only_a_card_with_shipped_records_does(tuned: Path, tmp_path: Path) -> None:
    with schedsearch.KernelCache(tmp_path / "none.db", "cpu", allow=("exact", "shipped")) as kernels:
        assert kernels.kernel(CPU_WORKLOAD).level == "shipped"
    (tuned / file_name(CPU.key)).unlink()
    with pytest.raises(DatabaseError, match="there is no database"):
        schedsearch.KernelCache(tmp_path / "none.db", "cpu", allow=("exact", "shipped"))


def test_a_strict_network_takes_shipped_records(tuned: Path, tmp_path: Path) -> None:
    found = find_kernels([CPU_WORKLOAD], tmp_path / "none.db", CPU, strict=True)
    assert found[CPU_WORKLOAD].origin.level == "shipped"
    with pytest.raises(NoRecordError, match="no record on"):
        find_kernels([CPU_WORKLOAD.replace(n=3)], tmp_path / "none.db", CPU, strict=True)


def test_who_does_not_want_them_gets_none(tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = schedsearch.explain(CPU_WORKLOAD, tmp_path / "none.db", target="cpu", allow=("exact", "nearest", "default"))
    assert found.serving is not None and found.serving.level == "default"
    monkeypatch.setenv("SCHEDSEARCH_TUNED_DIR", "")
    found = schedsearch.explain(CPU_WORKLOAD, tmp_path / "none.db", target="cpu")
    assert [line for line in found.lines if "switched off" in line]
    assert not any_shipped()


# ---- kept in the user's database


def test_a_kernel_is_built_once_and_then_loaded_from_the_database(tuned: Path, tmp_path: Path) -> None:
    db = tmp_path / "records.db"
    Store.open(db).close()
    assert schedsearch.compile(CPU_WORKLOAD, db, target="cpu").level == "shipped"
    again = schedsearch.explain(CPU_WORKLOAD, db, target="cpu")
    assert again.lines[0].startswith("-> exact: record 1 by conv2d_cpu") and again.lines[0].endswith("stored machine code")
    kernel = schedsearch.compile(CPU_WORKLOAD, db, target="cpu", allow="exact")
    x, weight, bias = operands()
    np.testing.assert_allclose(kernel(x, weight, bias), expected(x, weight, bias), rtol=1e-4, atol=1e-4)
    with Store.open(db, readonly=True) as store:
        (best,) = store.bests()
        assert best.row.source == f"shipped: {file_name(CPU.key)}" and best.verified
        assert chosen(store).entries == ()  # it is nothing that this machine measured


def test_verify_measures_here_what_was_shipped(tuned: Path, tmp_path: Path) -> None:
    db = tmp_path / "records.db"
    Store.open(db).close()
    schedsearch.compile(CPU_WORKLOAD, db, target="cpu").close()
    with Store.open(db) as store:
        (check,) = recheck(store, CPU)
        assert check.measurement.ok
        (best,) = store.bests()
        assert (best.row.source, best.record.measurement) == ("", check.measurement)


def test_a_cache_keeps_its_kernel_when_the_database_gets_it(tuned: Path, tmp_path: Path) -> None:
    db = tmp_path / "records.db"
    Store.open(db).close()
    with schedsearch.KernelCache(db, "cpu") as kernels:
        first = kernels.kernel(CPU_WORKLOAD)
        assert kernels.kernel(CPU_WORKLOAD) is first
        assert kernels.has_stored(CPU_WORKLOAD)


@pytest.mark.parametrize("why", ["deployment file", "older schema", "read-only"])
def test_what_cannot_be_written_keeps_nothing_and_serves_all_the_same(
    why: str, tuned: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from schedsearch.records.deployment import export_deploy

    db = tmp_path / "records.db"
    if why == "deployment file":
        with Store.open(source, readonly=True) as store:
            export_deploy(store, db)
    else:
        Store.open(db).close()
    if why == "older schema":
        monkeypatch.setattr("schedsearch.records.lookup.SCHEMA_VERSION", 99)
    if why == "read-only":

        def refuse(*_: object, **__: object) -> None:
            raise DatabaseError("read-only")

        monkeypatch.setattr("schedsearch.records.kept.Store.open", refuse)
    workload = CPU_WORKLOAD if why != "deployment file" else CPU_WORKLOAD.replace(n=3)
    level = "shipped" if why != "deployment file" else "nearest"
    assert schedsearch.compile(workload, db, target="cpu", allow=("shipped", "nearest")).level == level
    with Lookup(db) as lookup:
        assert lookup.exact(workload.id, CPU.key, COLD_GRAPH) is None


def test_a_best_that_was_measured_here_is_never_replaced(tmp_path: Path) -> None:
    with Store.open(tmp_path / "own.db") as store:
        own = raced(store, 900.0, 1000.0)
        other = replace(record(time_ns=100.0, number=7), source="shipped: some.db")
        from records_support import artifact

        assert not store.adopt(other, artifact())
        (best,) = store.bests()
        assert best.record_id == own
        with pytest.raises(ValueError, match="names its source"):
            store.adopt(record(), artifact())


# ---- plans and searches


def test_costs_of_plans_are_those_of_shipped_records_where_there_are_no_own_ones(tuned: Path) -> None:
    shipped = shipped_records(CPU.key)
    row = shipped.exact(CPU_WORKLOAD.id, CPU.key, COLD_GRAPH)
    assert row is not None
    costs = RecordCosts(None, CPU, shipped=shipped, check=lambda workload: "")
    cost = costs(CPU_WORKLOAD)
    assert (cost.origin, cost.record_id, cost.time_ns) == ("record", None, row.time_ns)
    assert cost.reason.startswith("shipped record by conv2d_cpu")
    assert costs(CPU_WORKLOAD.replace(n=4)).origin == "scaled"
    assert RecordCosts(None, CPU, check=lambda workload: "")(CPU_WORKLOAD).origin == "roofline"


def test_a_search_begins_with_the_shipped_configuration(tuned: Path) -> None:
    ((config, time_ns),) = shipped_results(CPU_WORKLOAD, CPU.key, load_template("conv2d_cpu"), COLD_GRAPH)
    row = shipped_records(CPU.key).exact(CPU_WORKLOAD.id, CPU.key, COLD_GRAPH)
    assert row is not None and (config.json, time_ns) == (row.config_json, row.time_ns)
    other_mode = shipped_results(CPU_WORKLOAD, CPU.key, load_template("conv2d_cpu"), HOT_GRAPH)
    assert other_mode == [(config, time_ns)]  # nothing is shipped for hot times: it is the best guess
    assert not shipped_results(CPU_WORKLOAD, CPU.key, load_template("depthwise_conv2d_cpu"), COLD_GRAPH)
    assert not shipped_results(CPU_WORKLOAD, H200, load_template("conv2d_cpu"), COLD_GRAPH)


# ---- what is shipped


def test_a_file_holds_configurations_without_code_and_says_who_measured_them(tuned: Path) -> None:
    shipped = shipped_records(CPU.key)
    assert shipped.lookup is not None and shipped.lookup.with_code() == []
    assert (shipped.manifest["who"], shipped.manifest["records"], shipped.manifest["targets"]) == ("tests", 1, [CPU.key])
    assert shipped.manifest["toolchain"]["llvm"] and shipped.manifest["policy"]["modes"] == [COLD_GRAPH]
    row = shipped.exact(CPU_WORKLOAD.id, CPU.key, COLD_GRAPH)
    assert row is not None and not row.vouched and (shipped.gain(row.workload_id, row.mode) or 0) >= 1


def test_a_configuration_that_hardly_beats_the_default_is_shipped_as_the_default(tmp_path: Path) -> None:
    default = schedsearch.Config(bm=1)
    with Store.open(tmp_path / "own.db") as store:
        for number, (workload, time_ns) in enumerate([(conv(), 990.0), (conv(k=128), 700.0)]):
            run = f"run {number}"
            store.append(
                record(
                    measurement=Measurement(Outcome.OK, times_ns=(1000.0,)), anchor=Anchor("c0de", 1000.0), final_race=True,
                    config=default, workload=workload, run=run,
                )
            )  # fmt: skip
            raced(store, time_ns, 1000.0, workload=workload, run=run)
        raced_without = record(workload=conv(k=256), anchor=None)
        store.promote(store.append(raced_without))
        counts = ship(store, tmp_path, H200, "somebody")
    assert (counts["records"], counts["defaults"], counts["left_out"]) == (2, 1, 1)
    assert counts["size_bytes"] == (tmp_path / file_name(H200)).stat().st_size
    with Lookup(tmp_path / file_name(H200)) as lookup:
        kept = lookup.exact(conv().id, H200, COLD_GRAPH)
        fast = lookup.exact(conv(k=128).id, H200, COLD_GRAPH)
        assert kept is not None and (kept.config_json, kept.time_ns) == (default.json, 1000.0)
        assert fast is not None and fast.time_ns == 700.0
        assert lookup.exact(conv(k=256).id, H200, COLD_GRAPH) is None


def test_shipping_again_keeps_what_the_file_has_of_other_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_TUNED_DIR", str(tmp_path))
    for name, workload in (("one.db", conv()), ("two.db", conv(k=128))):
        with Store.open(tmp_path / name) as store:
            raced(store, 500.0, 1000.0, workload=workload)
            counts = ship(store, tmp_path, H200, "somebody")
    assert (counts["records"], counts["kept"]) == (1, 1)
    shipped = shipped_records(H200)
    for workload in (conv(), conv(k=128)):
        row = shipped.exact(workload.id, H200, COLD_GRAPH)
        assert row is not None and shipped.gain(row.workload_id, row.mode) == 2
    assert shipped.manifest["records"] == 2


def test_two_who_ship_for_one_kind_of_card_at_once_lose_nothing(tmp_path: Path) -> None:
    """Two H200s of a machine, each tuned with a database of its own."""
    tuned = tmp_path / "tuned"
    tuned.mkdir()

    def tune_and_ship(number: int) -> None:
        for turn in range(6):
            with Store.open(tmp_path / f"{number}-{turn}.db") as store:
                raced(store, 500.0, 1000.0, workload=conv(k=8 * (2 * turn + number + 1)))
                ship(store, tuned, H200, f"card {number}")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(tune_and_ship, (0, 1)))
    with Lookup(tuned / file_name(H200)) as lookup:
        assert len(lookup.bests()) == 12


def test_a_file_that_is_too_large_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedsearch.records.shipping.MAX_BYTES", 1000)
    with Store.open(tmp_path / "one.db") as store:
        raced(store, 500.0, 1000.0)
        with pytest.raises(UsageError, match=r"would have .* MiB; allowed"):
            ship(store, tmp_path, H200, "somebody")
        with pytest.raises(NoRecordError, match="no record of a final race"):
            ship(store, tmp_path, H100, "somebody")
    assert not (tmp_path / file_name(H200)).exists()


def test_another_database_is_not_replaced(tmp_path: Path) -> None:
    Store.open(tmp_path / file_name(H200)).close()
    with Store.open(tmp_path / "one.db") as store:
        raced(store, 500.0, 1000.0)
        with pytest.raises(UsageError, match="is not a deployment file"):
            ship(store, tmp_path, H200, "somebody")
    with pytest.raises(UsageError, match="is not a deployment file"):  # before anything is tuned
        shipped_ids(tmp_path, H200, COLD_GRAPH, {})


def test_what_a_file_has_is_known_by_its_mode_and_the_version_of_its_template(tuned: Path) -> None:
    version = load_template("conv2d_cpu").version
    known = {CPU_WORKLOAD.id}
    assert shipped_ids(tuned, CPU.key, COLD_GRAPH, {"conv2d_cpu": version}) == known
    assert shipped_ids(tuned, CPU.key, HOT_GRAPH, {"conv2d_cpu": version}) == set()
    assert shipped_ids(tuned, CPU.key, COLD_GRAPH, {"conv2d_cpu": version + 1}) == set()
    assert shipped_ids(tuned, H200, COLD_GRAPH, {"conv2d_cpu": version}) == set()


def test_the_command_makes_the_folder(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "tuned"
    done = command("records", "ship", "--who", "tests", "--db", source, "--target", "cpu", "--output", folder)
    assert done.exit_code == 0, done.output
    assert (folder / file_name(CPU.key)).exists()
    done = command("records", "ship", "--who", "tests", "--db", source, "--target", "cpu", "--output", source / "tuned")
    assert done.exit_code == 2 and done.output


# ---- bad files


def altered(tuned: Path, statement: str, *values: object) -> None:
    with contextlib.closing(sqlite3.connect(tuned / file_name(CPU.key))) as connection, connection:
        connection.execute(statement, values)


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("UPDATE meta SET value = '999' WHERE key = 'schema_version'", "upgrade"),
        ("UPDATE best SET template_version = template_version + 7", "is now version"),
        ('UPDATE best SET config = \'{"threads":"many"}\'', "not legal here"),
        ("UPDATE best SET config = 'nothing'", "table best"),
        ("UPDATE best SET template = 'no_such_template'", "no_such_template"),
        ("DROP TABLE best", "no table best"),
        ("UPDATE meta SET value = 'store' WHERE key = 'kind'", "table record"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_the_next_level_serves(
    statement: str, reason: str, tuned: Path, tmp_path: Path
) -> None:
    altered(tuned, statement)
    explanation = schedsearch.explain(CPU_WORKLOAD, tmp_path / "none.db", target="cpu")
    (line,) = [each.reason for each in explanation.levels if each.level == "shipped"]
    assert reason in line and "\n" not in line
    assert schedsearch.compile(CPU_WORKLOAD, tmp_path / "none.db", target="cpu").level == "default"


@pytest.mark.parametrize("content", [b"", b"not a database", b"SQLite format 3\0" + b"\0" * 200])
def test_a_file_that_is_no_database_is_one_line(content: bytes, tuned: Path, tmp_path: Path) -> None:
    (tuned / file_name(CPU.key)).write_bytes(content)
    explanation = schedsearch.explain(CPU_WORKLOAD, tmp_path / "none.db", target="cpu")
    (line,) = [each for each in explanation.levels if each.level == "shipped"]
    assert line.verdict == "no" and file_name(CPU.key) in line.reason


def test_a_wrong_manifest_costs_no_kernel(tuned: Path, tmp_path: Path) -> None:
    altered(tuned, "UPDATE meta SET value = ? WHERE key IN ('manifest', 'gains')", "[broken")
    shipped = shipped_records(CPU.key)
    assert shipped.manifest == {}
    db = tmp_path / "records.db"
    Store.open(db).close()
    assert schedsearch.compile(CPU_WORKLOAD, db, target="cpu").level == "shipped"
    with Store.open(db, readonly=True) as store:
        assert [best.row.toolchain for best in store.bests()] == [{}]


def test_code_in_a_shipped_file_is_never_loaded(source: Path, tuned: Path, tmp_path: Path) -> None:
    """Somebody may put machine code, signed by nobody here, into the file: the configuration is built instead."""
    from schedsearch.records.deployment import export_deploy

    with Store.open(source, readonly=True) as store:
        export_deploy(store, tuned / file_name(CPU.key))
    altered(tuned, "UPDATE artifact SET code = ?", b"\xde\xad")
    kernel = schedsearch.compile(CPU_WORKLOAD, tmp_path / "none.db", target="cpu", allow=("exact", "shipped"))
    x, weight, bias = operands()
    np.testing.assert_allclose(kernel(x, weight, bias), expected(x, weight, bias), rtol=1e-4, atol=1e-4)


def test_two_cards_of_one_machine_have_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_TUNED_DIR", str(tmp_path))
    with Store.open(tmp_path / "one.db") as store:
        raced(store, 500.0, 1000.0)
        raced(store, 600.0, 1000.0, target=H100)
        for target in (H200, H100):
            ship(store, tmp_path, target, "somebody")
    times = {}
    for target in (H200, H100):
        row = shipped_records(target).exact(conv().id, target, COLD_GRAPH)
        assert row is not None
        times[target] = row.time_ns
        other = H100 if target == H200 else H200
        assert shipped_records(target).exact(conv().id, other, COLD_GRAPH) is None
    assert times == {H200: 500.0, H100: 600.0}


def test_names_of_files_are_plain() -> None:
    assert file_name(PRESETS["h200"].key) == "cuda-sm_90-132-nvidia-h200.db"
    assert "/" not in file_name("cpu:512:2:../../etc/passwd")
    assert json.loads(json.dumps(file_name("cpu:avx: x/y"))) == "cpu-avx-x-y.db"


# ---- the files of the package

PACKAGE = Path(__file__).resolve().parents[1] / "schedsearch" / "tuned"


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.db")), ids=lambda path: path.stem)
def test_a_file_of_the_package_holds_what_its_manifest_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_TUNED_DIR", str(PACKAGE))
    assert path.stat().st_size <= MAX_BYTES
    with Lookup(path) as lookup:
        rows = lookup.bests()
        (target,) = {row.target_key for row, _, _ in rows}
        assert path.name == file_name(target) and lookup.with_code() == [] and not lookup.damage.summary()
    shipped = shipped_records(target)
    assert (shipped.manifest["records"], shipped.manifest["targets"]) == (len(rows), [target]) and shipped.manifest["who"]
    for row, _, text in rows:
        assert Workload.from_json(text).id == row.workload_id
        assert (shipped.gain(row.workload_id, row.mode) or 0) >= 1


def test_the_layers_of_resnet50_are_shipped_for_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_TUNED_DIR", str(PACKAGE))
    wide = schedsearch.conv2d(n=1, h=7, w=7, c=512, k=2048, r=1, s=1, epilogue=["bias", "residual", "relu"])
    assert shipped_records(PRESETS["h200"].key).exact(wide.id, PRESETS["h200"].key, CHAIN_GRAPH) is not None


@pytest.mark.gpu
def test_shipped_kernels_compute_the_right_values_on_their_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCHEDSEARCH_TUNED_DIR", str(PACKAGE))
    card = detect("cuda")
    shipped = shipped_records(card.key)
    if shipped.lookup is None:
        pytest.skip(shipped.problem)
    workloads = [Workload.from_json(text) for _, _, text in shipped.lookup.bests()[::8]]
    found = find_kernels(workloads, tmp_path / "none.db", card, strict=True)
    assert {found[each].origin.level for each in workloads} == {"shipped"}  # each was compared with its reference
