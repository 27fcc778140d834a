"""The benchmarks of whole networks without a GPU: what they can be asked for, how runs add up, and their tables."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.mark.parametrize("text", ["resnet50", "resnet50:0:float16", "resnet50:1:float32", "densenet121:1:int8"])
def test_other_cases_are_refused(benchmark_module: Any, text: str) -> None:
    pytest.importorskip("onnx")
    with pytest.raises(ValueError, match=f"case '{text}' is not possible"):
        benchmark_module("network_cases").Case.of(text)


def test_a_case_is_a_file_or_a_model_of_pytorch(benchmark_module: Any) -> None:
    pytest.importorskip("onnx")
    of = benchmark_module("network_cases").Case.of
    assert of("resnet50:1:int8").is_file and not of("densenet121:32:float16").is_file


def test_a_run_keeps_the_other_rows_and_commands_of_a_file(
    benchmark_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    program, file = benchmark_module("early_launch"), tmp_path / "times.json"
    monkeypatch.setattr(program.common, "facts", lambda: {"command": "now"})
    assert program.kept_rows(file, ["a:1:int8"]) == ("now", [])
    file.write_text(json.dumps({"command": "before", "rows": [{"case": "a:1:int8"}, {"case": "b:1:int8"}]}))
    assert program.kept_rows(file, ["a:1:int8"]) == ("before\nnow", [{"case": "b:1:int8"}])


def test_the_table_of_networks_has_means_for_each_batch(benchmark_module: Any) -> None:
    rows = [
        {
            "case": "a:1:float16",
            "before, early": 15.0,
            "one after another": 20.0,
            "early": 10.0,
            "tuned": 8.0,
            "torch.compile": 32.0,
        },
        {"case": "a:1:int8", "one after another": 9.0, "early": 18.0},
        {"case": "a:32:float16", "one after another": 40.0, "early": 40.0, "torch.compile": 50.0, "max-autotune": 44.0},
        {"case": "b:1:float16", "failed": "it was not built"},
    ]
    table = benchmark_module("batch_one_tables").network_times({"rows": rows}).splitlines()
    cells = [[each.strip() for each in line.strip("|").split("|")] for line in table[2:]]
    assert [(row[0], *row[-3:]) for row in cells] == [
        ("a, batch 1, float16", "2.00", "1.50", "4.00"),
        ("a, batch 1, int8", "0.50", "", ""),
        ("a, batch 32, float16", "1.00", "", "1.10"),
        ("geometric mean, batch 1", "**1.00** of 2", "**1.50** of 1", "**4.00** of 1"),
        ("geometric mean, batch 32", "**1.00** of 1", "", "**1.10** of 1"),
    ]


def test_the_picture_of_a_network_is_drawn_from_its_data(benchmark_module: Any) -> None:
    """To draw it again: timeline.py --data benchmarks/results/timeline_h200.json --draw docs/images/timeline.svg"""
    data = json.loads((BENCHMARKS / "results" / "timeline_h200.json").read_text(encoding="utf-8"))
    kept = BENCHMARKS.parent / "docs" / "images" / "timeline.svg"
    assert benchmark_module("timeline").draw(data) == kept.read_text(encoding="utf-8")
