"""Reports: the same answers as the server's, in one file; tables to paste; the command."""

from __future__ import annotations

import base64
import csv
import errno
import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from dashboard_support import HOSTILE, hostile_database, sample_database
from session_support import World

from schedsearch import progress
from schedsearch.cli.main import main
from schedsearch.dashboard import report as reports
from schedsearch.dashboard.answers import Answers
from schedsearch.errors import DatabaseError
from schedsearch.records import output
from schedsearch.records.reader import Reader

REPLAY = Path(__file__).parents[1] / "benchmarks" / "results" / "replay_xgb.json"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_database(tmp_path_factory.mktemp("sample") / "a.db", trials=40)


def held(page: str) -> dict[str, Any]:
    """The answers that a report holds."""
    packed = re.search(r'<script type="text/plain" id="data">([A-Za-z0-9+/=\s]+)</script>', page)
    assert packed is not None
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return found


def html_of(*files: Path) -> str:
    answers = Answers([str(file) for file in files], [str(REPLAY)])
    try:
        return reports.report_html(answers)
    finally:
        answers.close()


class TestHtml:
    def test_it_holds_what_the_server_would_answer(self, sample: Path) -> None:
        found = held(html_of(sample))
        answers = Answers([str(sample)], [str(REPLAY)])
        answers.refresh()
        for path, value in found.items():
            wanted = answers.get(path)
            if path == "overview":
                wanted["now_s"] = value["now_s"]
            if path == "records":
                assert value["total"] == len(value["records"]["id"])
            assert value == wanted, path
        answers.close()
        trials = {path for path in found if path.startswith("trial/")}
        assert len(trials) == found["overview"]["databases"][0]["records"]
        assert {f"compare/{a}/{b}" for a, b in found["overview"]["compared"]} <= set(found)

    def test_it_refers_to_nothing_outside_itself(self, sample: Path) -> None:
        page = html_of(sample)
        assert not re.search(r"<(?:script|link|img|iframe|object|embed)\b[^>]*\b(?:src|href)=(?!\"data:)", page)
        assert "connect-src 'none'" in page

    def test_foreign_text_cannot_leave_its_element(self, tmp_path: Path) -> None:
        page = html_of(hostile_database(tmp_path / "h.db"))
        assert "<img src=x" not in page
        assert held(page)["overview"]["tasks"][0]["template"] == HOSTILE.replace("\u202e", r"\u202e")

    def test_beyond_the_limit_it_is_a_sample_that_says_so(self, sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = held(html_of(sample))
        monkeypatch.setattr(reports, "WHOLE_TRIALS", 60)
        monkeypatch.setattr(reports, "_BEST_OF_A_TASK", 5)
        found = held(html_of(sample))
        shown = sum(path.startswith("trial/") for path in found)
        assert 40 <= shown <= 75
        assert f"{shown:,} of 132 trials" in found["overview"]["notes"][0]
        for path in (path for path in found if path.startswith("task/")):
            part, all_of_it = found[path], whole[path]
            assert part["sampled"] and part["total"] == len(all_of_it["trials"]["id"])
            assert all(part[name] == all_of_it[name] for name in ("knob_effects", "failures", "pairs", "race", "agreement"))
            assert part["row"]["best_id"] in part["trials"]["id"]
            ids = [f"trial/0.{number}" for number in part["trials"]["id"]]
            assert set(ids) <= set(found)
        assert len(found["records"]["records"]["id"]) == shown

    def test_trials_that_are_not_shown_are_not_read_whole(self, sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Reading a record whole takes ten times as long as reading its columns."""
        monkeypatch.setattr(reports, "WHOLE_TRIALS", 60)
        monkeypatch.setattr(reports, "_BEST_OF_A_TASK", 5)
        made: list[int] = []
        record = Reader.record
        monkeypatch.setattr(Reader, "record", lambda reader, row: made.append(row.id) or record(reader, row))
        found = held(html_of(sample))
        shown = sorted(int(path.partition(".")[2]) for path in found if path.startswith("trial/"))
        assert len(shown) < 132 and set(made) == set(shown)

    def test_what_trials_have_in_common_is_made_once(self, sample: Path) -> None:
        answers = Answers([str(sample)])
        found = dict(reports.report_answers(answers))
        answers.close()
        trials = [value for path, value in found.items() if path.startswith("trial/")]
        cards = [fact for trial in trials for fact in trial["facts"] if fact["name"] == "card"]
        assert len(cards) == len(trials) == 132
        assert len({id(card) for card in cards}) == len({trial["task"] for trial in trials}) == 3

    def test_a_report_of_nothing_is_a_page_too(self, tmp_path: Path) -> None:
        found = held(html_of(tmp_path / "missing.db"))
        assert found["overview"]["databases"][0]["problem"].startswith("no database")


class TestTables:
    def test_markdown_has_a_row_for_each_task(self, sample: Path) -> None:
        answers = Answers([str(sample)])
        text = reports.report_markdown(answers)
        answers.close()
        rows = [line for line in text.splitlines() if line.startswith("| ")]
        assert len(rows) == 2 + 3
        assert all(line.count(" | ") == rows[0].count(" | ") for line in rows)
        assert "Geometric mean of the speed-ups over 3 raced tasks" in text

    def test_markdown_and_csv_do_not_interpret_foreign_text(self, tmp_path: Path) -> None:
        answers = Answers([str(hostile_database(tmp_path / "h.db"))])
        markdown, table = reports.report_markdown(answers), reports.report_csv(answers)
        answers.close()
        assert "<" not in markdown
        (row,) = csv.DictReader(table.splitlines())
        assert row["name"] == HOSTILE.replace("\u202e", r"\u202e")

    def test_a_formula_is_text_in_csv(self) -> None:
        assert reports._cell("=HYPERLINK(1)") == "'=HYPERLINK(1)"
        assert reports._cell(-1.5) == -1.5

    def test_csv_has_numbers_in_base_units(self, sample: Path) -> None:
        answers = Answers([str(sample)])
        rows = list(csv.DictReader(reports.report_csv(answers).splitlines()))
        tasks = answers.overview().tasks
        answers.close()
        assert [float(row["best_ns"]) for row in rows] == [task.best_ns for task in tasks]
        assert [row["device" if "device" in row else "target"] for row in rows] == [task.target for task in tasks]


class TestCommand:
    @pytest.mark.parametrize(
        ("name", "start"), [("r.html", "<!doctype html>"), ("r.md", "| task |"), ("r.csv", "database,"), ("r.json", "{")]
    )
    def test_the_end_of_the_name_says_the_format(self, sample: Path, tmp_path: Path, name: str, start: str) -> None:
        result = CliRunner().invoke(main, ["report", str(sample), "-o", str(tmp_path / name)])
        assert (result.exit_code, result.stdout) == (0, ""), result.output
        assert (tmp_path / name).read_text(encoding="utf-8").startswith(start)

    def test_it_shows_how_far_it_is(self, sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        said: list[str] = []

        def stage(text: str) -> None:
            assert progress.is_shown()
            said.append(text)

        monkeypatch.setattr(progress, "stage", stage)
        assert CliRunner().invoke(main, ["report", str(sample), "-o", str(tmp_path / "r.html")]).exit_code == 0
        assert said[0] == "reading the databases" and said[-1] == "packing the page"
        assert sum("what the knobs are worth" in text for text in said) == 3
        assert any(text.startswith("task small on cuda:") and text.endswith(": trial 0 of 44") for text in said)

    def test_without_a_file_it_prints_markdown(self, sample: Path) -> None:
        assert CliRunner().invoke(main, ["report", str(sample)]).stdout.startswith("| task |")

    def test_a_database_may_be_given_as_to_other_commands(self, sample: Path) -> None:
        assert CliRunner().invoke(main, ["report", "--db", str(sample)]).stdout.startswith("| task |")

    def test_a_missing_database_is_an_error_unless_another_one_is_there(self, sample: Path, tmp_path: Path) -> None:
        missing = str(tmp_path / "missing.db")
        result = CliRunner().invoke(main, ["report", missing], standalone_mode=False)
        assert getattr(result.exception, "exit_code", None) == DatabaseError.exit_code
        both = CliRunner().invoke(main, ["report", missing, str(sample)])
        assert both.exit_code == 0
        assert f"warning: no database at {missing}" in both.stderr

    def test_a_file_that_cannot_be_written_is_said(self, sample: Path, tmp_path: Path) -> None:
        result = CliRunner().invoke(main, ["report", str(sample), "-o", str(tmp_path / "no" / "r.html")])
        assert result.exit_code == 2
        assert "cannot write" in result.output

    def test_a_full_disk_is_not_the_callers_mistake(self, sample: Path) -> None:
        result = CliRunner().invoke(main, ["report", str(sample), "-o", "/dev/full"])
        assert result.exit_code == 74
        assert "free some space" in result.output

    def test_a_full_disk_keeps_the_earlier_report(
        self, sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(number: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        (tmp_path / "r.html").write_text("earlier")
        monkeypatch.setattr(output.os, "fsync", full)
        result = CliRunner().invoke(main, ["report", str(sample), "-o", str(tmp_path / "r.html")])
        assert (result.exit_code, (tmp_path / "r.html").read_text()) == (74, "earlier")
        assert [path.name for path in tmp_path.iterdir()] == ["r.html"]

    def test_a_database_is_never_replaced(self, sample: Path) -> None:
        before = sample.read_bytes()
        result = CliRunner().invoke(main, ["report", str(sample), "-o", str(sample), "--format", "html"])
        assert result.exit_code == 2 and "is a database, so it is left alone" in result.output
        assert sample.read_bytes() == before

    def test_an_end_of_no_format_is_refused(self, sample: Path, tmp_path: Path) -> None:
        words = ["report", str(sample), "-o", str(tmp_path / "report.pdf")]
        result = CliRunner().invoke(main, words)
        assert result.exit_code == 2
        assert "ends in .pdf, which is not a format of reports; allowed: .html, .htm, .md, .csv, .json" in result.output
        assert not (tmp_path / "report.pdf").exists()
        assert CliRunner().invoke(main, [*words, "--format", "csv"]).exit_code == 0

    def test_a_dash_is_standard_output(self, sample: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        result = CliRunner().invoke(main, ["report", str(sample), "-o", "-", "--format", "html"])
        assert result.stdout.startswith("<!doctype html>") and result.stderr == ""
        assert list(tmp_path.iterdir()) == []

    def test_it_needs_no_server(self, sample: Path, tmp_path: Path) -> None:
        code = (
            "import sys\nsys.modules['starlette'] = sys.modules['uvicorn'] = None\n"
            "from schedsearch.cli.main import main\nmain(sys.argv[1:], standalone_mode=False)"
        )
        subprocess.run([sys.executable, "-c", code, "report", str(sample), "-o", str(tmp_path / "r.html")], check=True)
        assert (tmp_path / "r.html").stat().st_size > 100_000


def test_a_notebook_shows_the_results_of_a_run_as_a_table() -> None:
    html = World().tune()._repr_html_()
    assert html.startswith("<table><thead><tr><th>task</th><th>template</th>")
    assert "<td>square</td>" in html


def test_a_file_that_is_no_replay_is_a_problem_of_the_view(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"tuner": "xgb"}')
    (tmp_path / "y.json").write_text("[")
    answers = Answers([], [str(tmp_path / name) for name in ("x.json", "y.json", "z.json")] + [str(REPLAY)])
    view = answers.get("replay")
    assert len(view["problems"]) == 3
    (file,) = view["files"]
    assert (file["tuner"], len(file["spaces"][0]["fractions"])) == ("xgb", len(file["budgets"]))
