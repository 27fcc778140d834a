"""The picture of replayed searches shows the figures of the replays."""

from __future__ import annotations

import importlib
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import replay_support as support

from schedsearch.replay import load, replay, to_json

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("replay_curves")


@pytest.fixture
def reports(tmp_path: Path) -> list[dict[str, Any]]:
    """Two tuners over two spaces."""
    other = support.cache()
    for fields in other["cache"].values():
        if not isinstance(fields["time"], str):
            fields["time"], fields["times"] = fields["time"] ** 2, []
    paths = [support.write(tmp_path / "one.json.gz", support.cache()), support.write(tmp_path / "two.json", other)]
    spaces = load(paths).spaces
    return [
        json.loads(json.dumps(to_json(replay(spaces, name, evaluations=[2, 4, 8], seeds=3)))) for name in ("random", "grid")
    ]


def test_every_curve_goes_through_its_figures(curves: ModuleType, reports: list[dict[str, Any]]) -> None:
    root = ET.fromstring(curves.draw(reports))
    titles = [text.text for text in root.iter(f"{SVG}text")]
    assert {"one", "two", "geometric mean", "random", "grid"} <= set(titles)
    lines = [path for path in root.iter(f"{SVG}path") if path.get("stroke-width") == "2"]
    bands = [path for path in root.iter(f"{SVG}path") if path.get("fill-opacity")]
    assert len(lines) == len(bands) == 2 * 3
    points = [[float(number) for number in re.findall(r"[\d.]+", line.get("d", ""))] for line in lines]
    assert all(xs[2] - xs[0] == pytest.approx(xs[4] - xs[2], abs=0.2) for xs in points), "2, 4 and 8 on a logarithmic scale"

    # Two curves with known figures give the panels' upper and lower ends, which predict the height of every other point.
    expected = [
        figures
        for panel in (*zip(*(report["spaces"] for report in reports)), None)
        for report, figures in reversed(
            list(zip(reports, panel or reports))  # the first is drawn last
        )
    ]
    fractions = [list(each["fractions" if "fractions" in each else "geomean"].values()) for each in expected]
    for ys, values in zip(points, fractions):
        for (y1, v1), (y2, v2) in zip(zip(ys[1::2], values), zip(ys[3::2], values[1:])):
            height = curves.PANEL_HEIGHT - curves.ABOVE - curves.BELOW
            assert (y1 - y2) == pytest.approx((v2 - v1) / scale(reports) * height, abs=0.25)


def scale(reports: list[dict[str, Any]]) -> float:
    """The span of the axis: from the lowest end of an interval, rounded down to a tenth, to 1."""
    ends = [report["geomean_low"] for report in reports] + [s["low"] for report in reports for s in report["spaces"]]
    lowest = min(min(end.values()) for end in ends)
    return 1.0 - min(int(10 * lowest) / 10, 0.9)


def test_it_reads_replays_and_comparisons_and_takes_each_tuner_once(
    curves: ModuleType, reports: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "replay.json").write_text(json.dumps({**reports[0], "left_out": []}))
    (tmp_path / "peers.json").write_text(json.dumps({"command": "", "reports": reports}))
    read = curves.read([str(tmp_path / "replay.json"), str(tmp_path / "peers.json")])
    assert [report["tuner"] for report in read] == ["random", "grid"]
    assert curves.draw(read) == curves.draw(reports)


def test_one_space_has_no_mean(curves: ModuleType, reports: list[dict[str, Any]]) -> None:
    for report in reports:
        report["spaces"] = report["spaces"][:1]
    assert list(curves.panels(reports)) == ["one"]


def test_other_spaces_and_other_files_are_refused(curves: ModuleType, reports: list[dict[str, Any]], tmp_path: Path) -> None:
    reports[1]["spaces"] = reports[1]["spaces"][:1]
    (tmp_path / "two.json").write_text(json.dumps({"reports": reports}))
    with pytest.raises(SystemExit, match="grid was replayed over other spaces than random"):
        curves.read([str(tmp_path / "two.json")])
    (tmp_path / "other.json").write_text(json.dumps({"tuner": "xgb"}))
    with pytest.raises(SystemExit, match=r"other\.json is not the output"):
        curves.read([str(tmp_path / "other.json")])
