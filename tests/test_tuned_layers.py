"""The workload files that shipped records are made from."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from schedsearch.constructors.convolutions import conv2d, dense
from schedsearch.device.detect import detect
from schedsearch.target import PRESETS
from schedsearch.template import load_templates
from schedsearch.workload import Workload
from schedsearch.workload_file import WorkloadFile, load

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "tuned"
FILES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


@functools.cache
def loaded(name: str) -> WorkloadFile:
    return load(FOLDER / f"{name}.yaml")


def workloads(name: str) -> list[Workload]:
    return [task.workload for task in loaded(name).tasks]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.mostly_long(3)
def test_every_file_is_a_workload_file_that_some_template_computes(name: str) -> None:
    file = loaded(name)
    target = detect("cpu") if file.target == "cpu" else PRESETS["h200"]
    templates = load_templates()
    for task in file.tasks[:: max(1, len(file.tasks) // 20)]:
        assert templates.matching(task.workload, target), task.name


def test_no_two_files_of_a_card_have_the_same_layer() -> None:
    seen: dict[Workload, str] = {}
    for name in FILES:
        if name != "cpu":
            for workload in workloads(name):
                assert workload not in seen, (name, seen.get(workload), workload.label)
                seen[workload] = name


def test_the_layers_of_well_known_networks_are_there() -> None:
    """ResNet-50 as its paper has it, with batch norms in the weights."""
    first = set(workloads("first_1")[:28])
    stem = conv2d(n=1, h=224, w=224, c=3, k=64, r=7, s=7, stride=2, padding=3, epilogue=["bias", "relu"])
    wide = conv2d(n=1, h=7, w=7, c=512, k=2048, r=1, s=1, epilogue=["bias", "residual", "relu"])
    assert {stem, wide, dense(m=1, n=1000, k=2048, epilogue=["bias"])} <= first
    assert stem.replace(n=32) in workloads("networks_32")
    assert dense(m=4096, n=3 * 8192, k=8192, epilogue=["bias"]) in workloads("products")
