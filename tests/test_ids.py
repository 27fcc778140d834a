"""Ids never change: old records are found by them.

golden_ids.json and golden_workloads.json were written once. A failure here means that every stored record would be
orphaned: do not regenerate the files, give the new parameter a default instead.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schedsearch.config import Config
from schedsearch.ops.registry import BUILT_IN
from schedsearch.workload import Workload

GOLDEN = json.loads((Path(__file__).parent / "golden_ids.json").read_text())


@pytest.mark.parametrize("entry", GOLDEN["workloads"], ids=lambda entry: entry["id"][:8])
def test_a_workload_keeps_its_id(entry: dict) -> None:
    workload = Workload("conv2d", entry["params"])
    assert workload.json == entry["json"]
    assert workload.id == entry["id"]


@pytest.mark.parametrize("entry", GOLDEN["configs"], ids=lambda entry: entry["id"][:8])
def test_a_config_keeps_its_id(entry: dict) -> None:
    config = Config(entry["values"])
    assert config.json == entry["json"]
    assert config.id == entry["id"]


def test_an_id_is_the_sha256_of_sorted_json_without_spaces() -> None:
    """The test spells out the algorithm, so that other programs can compute ids."""
    shape = {"n": 2, "h": 9, "w": 8, "c": 16, "k": 24, "r": 3, "s": 3}
    text = '{"op":"conv2d","params":{"c":16,"h":9,"k":24,"n":2,"padding":[1,1,1,1],"r":3,"s":3,"w":8},"v":1}'
    assert Workload("conv2d", {**shape, "padding": 1}).id == hashlib.sha256(text.encode()).hexdigest()
    assert Config(stages=3, bm=64, grid="split").id == hashlib.sha256(b'{"bm":64,"grid":"split","stages":3}').hexdigest()


def test_a_parameter_at_its_default_is_not_part_of_the_id() -> None:
    shape = {"n": 1, "h": 8, "w": 8, "c": 8, "k": 8, "r": 3, "s": 3}
    spelled_out = {
        "stride": (1, 1), "padding": 0, "dilation": 1, "groups": 1, "dtype": "float16", "out_dtype": "float16",
        "layout": "NHWC", "weight_layout": "OHWI", "epilogue": (),
    }  # fmt: skip
    assert Workload.conv2d(**shape, **spelled_out) == Workload.conv2d(**shape)
    assert Workload.conv2d(**shape, **spelled_out).id == Workload.conv2d(**shape).id


def test_a_default_that_follows_another_parameter_is_not_part_of_the_id() -> None:
    shape = {"n": 1, "h": 8, "w": 8, "c": 8, "k": 8, "r": 3, "s": 3, "layout": "NCHW", "dtype": "float32"}
    assert Workload.conv2d(**shape, weight_layout="OIHW", out_dtype="float32").id == Workload.conv2d(**shape).id
    assert Workload.conv2d(**shape, weight_layout="OHWI").id != Workload.conv2d(**shape).id


@given(st.dictionaries(st.text("abcxyz_", min_size=1), st.integers() | st.booleans() | st.text('aé"\\')), st.randoms())
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_config_does_not_depend_on_the_order_of_its_knobs(values: dict, random: object) -> None:
    names = list(values)
    random.shuffle(names)  # type: ignore[attr-defined]
    shuffled = Config({name: values[name] for name in names})
    assert shuffled.id == Config(values).id
    assert shuffled == Config(values) and hash(shuffled) == hash(Config(values))
    assert Config.from_json(shuffled.json) == shuffled


def test_ids_do_not_depend_on_the_process() -> None:
    make = "Workload.conv2d(n=1, h=8, w=8, c=8, k=8, r=3, s=3).id, Config(b=1, a=2).id"
    code = f"from schedsearch import Config, Workload; print({make})"
    texts = {
        subprocess.run([sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1 and len(texts.pop().split()) == 2


WORKLOADS = json.loads((Path(__file__).parent / "golden_workloads.json").read_text())


@pytest.mark.parametrize("entry", WORKLOADS, ids=lambda entry: f"{entry['op']}-{entry['id'][:8]}")
def test_a_workload_of_every_operator_keeps_its_id(entry: dict) -> None:
    assert Workload(entry["op"], entry["params"]).id == entry["id"]
    assert Workload.from_json(Workload(entry["op"], entry["params"]).json).id == entry["id"]


def test_the_ids_cover_every_built_in_operator() -> None:
    assert {entry["op"] for entry in WORKLOADS} == set(BUILT_IN)
