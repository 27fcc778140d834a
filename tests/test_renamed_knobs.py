"""Knobs that were renamed and templates that were removed: what was recorded or written before is still read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from session_support import OTHER, WORKLOAD, Square, World
from store_contract import artifact, record

import schedsearch
from schedsearch.config import Config
from schedsearch.errors import ConfigError, UsageError
from schedsearch.measurement import Record
from schedsearch.records.exchange import export_jsonl, import_jsonl
from schedsearch.records.store import Store
from schedsearch.runtime.ahead import kernel_recipe
from schedsearch.session.plan import plan_tasks
from schedsearch.target import PRESETS
from schedsearch.task import Task
from schedsearch.template import Renamed, TemplateSet, load_template, load_templates
from schedsearch.workload import Workload
from schedsearch.workload_file import load

H200 = PRESETS["h200"]
CONV = Workload.conv2d(n=32, h=28, w=28, c=128, k=128, r=3, s=3, padding=1)
BYTES = Workload.conv2d(n=2, h=9, w=9, c=8, k=8, r=3, s=3, layout="NCHW", weight_layout="OIHW", dtype="int8")
# Configurations as they were recorded before a decision had one name in all templates, and what differs today.
RECORDED: dict[str, tuple[Workload, dict[str, Any], dict[str, Any]]] = {
    "conv2d_wgmma": (
        CONV,
        dict(consumer_groups=2, schedule="together", bn=64, bk=64, stages=4, split_k=1, cluster_m=1, cluster_n=1,
             grid="split", blocks_per_sm=1, group_m=8, l2_promotion=128),
        dict(warpgroups=2, persistent=False, band=8),
    ),
    "conv2d_mma": (
        CONV,
        dict(bm=64, bn=64, bk=32, wm=32, wn=32, slices=1, stages=3, panel=8, blocks_per_sm=2),
        dict(band=8, persistent=True, blocks_per_sm=2, loads="copies"),
    ),
    "conv2d_simt": (
        BYTES,
        dict(bm=16, bn=8, bk=8, tm=2, tn=1, stages=2, copy="registers", batch="folded", panel=1, blocks_per_sm=0),
        dict(band=1, persistent=False, blocks_per_sm=1, loads="registers"),
    ),
    "dyn_strided_slice_cuda": (
        schedsearch.dyn_strided_slice(x=(300, 400)),
        dict(threads=256, unroll=4, blocks_per_sm=0, stores="default"),
        dict(persistent=False, blocks_per_sm=1),
    ),
    "layout_transform_cuda": (
        schedsearch.layout_transform(layout="NHWC", to="NCHW", n=2, h=8, w=8, c=16, dtype="float16"),
        dict(tile_x_bytes=32, tile_y_bytes=128, load_bytes=16, store_bytes=16, read_bytes=4, lanes=8, threads=32, along="y",
             blocks_per_sm=4, loads="async", stores="default"),
        dict(persistent=True, blocks_per_sm=4),
    ),
    "matmul_gemv": (
        schedsearch.dense(m=1, n=1000, k=2048),
        dict(columns=1, parts=2, groups=2, unroll=2),
        dict(slices=2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_configuration_is_one_of_today(name: str) -> None:
    workload, recorded, now = RECORDED[name]
    template = load_template(name)
    config = template.current(recorded)
    assert config.items() >= now.items() and not config.keys() & (template.renamed.keys() - now.keys())
    assert template.space(workload, H200).check(config) == []
    assert template.current(config) == config, "today's names mean what they say"


@pytest.mark.parametrize(
    "template", [each for each in load_templates().values() if each.renamed], ids=lambda each: each.name
)
def test_no_earlier_name_is_ambiguous(template: Any) -> None:
    """Names of today that were something else before are told apart by a knob that configurations did not have then."""
    for old, now in template.renamed.items():
        if not isinstance(now, str):
            names = {frozenset(of) for of in now.values()}
            assert len(names) == 1 and names != {frozenset({old})}


def test_a_configuration_that_mixes_names_is_not_taken() -> None:
    assert dict(Renaming().current({"a": 8, "x": 1})) == {"a": 8, "x": 1}


# --- Databases and logs -------------------------------------------------------------------------------------------------


def stored(folder: Path, config: Config) -> Path:
    """A database in which a configuration of conv2d_wgmma is the best of its workload on an H200."""
    version = load_template("conv2d_wgmma").version
    with Store.open(folder / "records.db") as store:
        found = replace(record(1000.0), workload=CONV, target=H200.key, config=config, template_version=version)
        store.promote(store.append(found), artifact())
        return store.path


def test_an_old_record_lends_its_configuration(tmp_path: Path) -> None:
    _, recorded, _ = RECORDED["conv2d_wgmma"]
    template = load_template("conv2d_wgmma")
    explained = schedsearch.explain(CONV.replace(n=31), stored(tmp_path, Config(recorded)), target=H200)
    assert {level.level: level.verdict for level in explained.levels}["nearest"] == "serves", str(explained)
    old, new = (kernel_recipe(template, CONV, config) for config in (Config(recorded), template.current(recorded)))
    assert old.name == new.name


def test_an_old_record_in_a_log_is_evidence_after_its_import(tmp_path: Path) -> None:
    _, recorded, _ = RECORDED["conv2d_wgmma"]
    template = load_template("conv2d_wgmma")
    with Store.open(stored(tmp_path, Config(recorded))) as store:
        export_jsonl(store, tmp_path / "log.jsonl")
    with Store.open(tmp_path / "other.db") as store:
        import_jsonl(store, tmp_path / "log.jsonl")
        ((config, time_ns),) = store.evidence(CONV, H200.key, template.name, template.version, limit=9)
    assert dict(config) == recorded, "a record stays as it was written"
    assert template.space(CONV, H200).check(template.current(config)) == [] and time_ns == 1000.0


class Renaming(Square):
    """`Square`, whose knobs had other names."""

    renamed: ClassVar[Renamed] = {"a": "x", "b": "y"}


def as_before(found: Record) -> Record:
    return replace(found, config=Config(a=found.config["x"], b=found.config["y"]))


def renamed_world(**tuned: Any) -> World:
    """A world whose first run was made under the earlier names."""
    world = World(templates=(Renaming(),))
    world.tune(**tuned)
    world.store.records = [as_before(each) for each in world.store.records]
    return world


def test_a_run_under_earlier_names_is_resumed() -> None:
    world = renamed_world(trials=20)
    (before,) = World().tune(trials=20).tasks
    (task,) = world.tune(trials=20).tasks
    assert task.new_trials == 0 and not world.runner.raced
    assert (task.best_config, task.best_ns) == (before.best_config, before.best_ns)


def test_results_under_earlier_names_are_hints_for_other_workloads() -> None:
    world = renamed_world(trials=200)
    fastest = min(world.searched, key=lambda found: found.measurement.time_ns or 1e9).config
    world.tune(OTHER, trials=5)
    assert world.tuners[0].hints == [Config(x=fastest["a"], y=fastest["b"])]


def test_of_two_records_of_a_configuration_the_newer_names_count() -> None:
    (plan,) = plan_tasks([WORKLOAD], TemplateSet([Renaming()]), World().target)
    new, old = replace(record(200.0), config=Config(x=1, y=2)), replace(record(100.0), config=Config(a=1, b=2))
    assert plan.arms[0].known({old.config: old, new.config: new}) == {new.config: new}
    assert plan.arms[0].known({old.config: old}) == {new.config: replace(old, config=new.config)}


# --- Restrictions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "restrict", "kept"),
    [
        ("conv2d_wgmma", {"group_m": [1], "grid": ["split"]}, {"band": (1,), "persistent": (False,)}),
        ("conv2d_wgmma", {"consumer_groups": [2, 3], "blocks_per_sm": [1]}, {"warpgroups": (2, 3), "blocks_per_sm": (1,)}),
        ("conv2d_mma", {"panel": [8], "blocks_per_sm": [0]}, {"band": (8,), "persistent": (False,), "blocks_per_sm": (1,)}),
        ("conv2d_mma", {"blocks_per_sm": [2]}, {"persistent": (False, True), "blocks_per_sm": (2,)}),
    ],
)
def test_a_workload_file_restricts_knobs_by_their_earlier_names(
    tmp_path: Path, template: str, restrict: dict[str, Any], kept: dict[str, Any]
) -> None:
    task = {"op": "conv2d", "shape": json.loads(CONV.json)["params"], "templates": [template], "restrict": restrict}
    task["shape"] = {name: value for name, value in task["shape"].items() if name in "nhwckrs"}  # type: ignore[union-attr]
    task |= {"padding": 1}
    (tmp_path / "tasks.yaml").write_text(json.dumps({"tasks": [task]}))
    (plan,) = plan_tasks(load(tmp_path / "tasks.yaml").tasks, load_templates(), H200)
    (arm,) = plan.arms
    assert {name: arm.space.values[name] for name in kept} == kept
    assert arm.space.check(arm.default) == []


def test_values_that_a_knob_never_had_are_refused_with_those_of_today() -> None:
    with pytest.raises(ConfigError, match=r"'grid' cannot be restricted to \['both'\].*'split' is now persistent: False"):
        plan_tasks([Task(CONV, restrict={"grid": ["both"]}, templates=["conv2d_wgmma"])], load_templates(), H200)


def test_a_template_that_was_removed_says_what_took_its_place() -> None:
    task = Task(Workload.conv2d(n=1, h=299, w=299, c=3, k=32, r=3, s=3, stride=2), templates=["conv2d_unfold"])
    for call in (lambda: load_template("conv2d_unfold"), lambda: plan_tasks([task], load_templates(), H200)):
        with pytest.raises(UsageError, match="'conv2d_unfold' was removed; conv2d_stem, conv2d_mma and conv2d_packed take"):
            call()
