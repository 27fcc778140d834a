"""Take the pictures of docs/dashboard.md.

    python scripts/dashboard_screenshots.py [--out docs/images] [--keep FOLDER] [--also A.db B.db]

The data are times that were measured on an H200: the spaces recorded in benchmarks/spaces. The tuner searches them as
`schedsearch replay` does, and every proposal becomes a record with the recorded measurement, so that the model's predictions
are real ones too. The final races are those of the recordings. Nothing is measured again; only the time stamps are new.

`--also` takes the pictures of several databases whose times are doubtful: those in docs are of two runs of
examples/quickstart.yaml on two cores that other programs used too.

Needs what `make test-browser` installs, and Pillow, which makes the pictures small.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from schedsearch.config import Config
from schedsearch.dashboard.answers import Answers
from schedsearch.dashboard.report import report_html
from schedsearch.measurement import Record
from schedsearch.records.formats.exchange import import_file
from schedsearch.records.store import Store
from schedsearch.replay import load
from schedsearch.session.observer import ArmStart, RunStart, TaskStart
from schedsearch.space import SpaceSize
from schedsearch.tuner import make_tuner

ROOT = Path(__file__).resolve().parent.parent
SPACES = sorted((ROOT / "benchmarks" / "spaces").glob("*.json.gz"))
TRIALS = 400
MAX_BYTES = 80_000

# name, page, width, height, theme, text of the heading at the top
PICTURES = (
    ("dashboard-overview", "overview", 1360, 860, "light", ""),
    ("dashboard-task", "task", 1440, 1060, "light", ""),
    ("dashboard-knobs", "task", 1440, 620, "dark", "What made it better?"),
    ("dashboard-map", "task", 1440, 520, "light", "Times by two knobs"),
    ("dashboard-model", "task", 1440, 640, "light", "Can I trust the model?"),
    ("dashboard-run", "run", 1440, 900, "light", ""),
    ("dashboard-records", "records", 1440, 560, "light", ""),
    ("dashboard-phone", "task", 360, 760, "dark", ""),
)
ALSO = (
    ("dashboard-noise", "overview", 1280, 740, "light", ""),
    ("dashboard-compare", "compare", 1280, 860, "light", ""),
)
COLORS = 96
BUILDERS = 16  # of the machine on which the spaces were recorded; they build while the device measures


def recorded_run(path: Path, folder: Path) -> Path:
    """A database of one run of the tuner over all recorded spaces, `TRIALS` trials for each."""
    measured = [measurements(space, folder) for space in SPACES]
    first = next(iter(measured[0].values()))
    with Store.open(path) as store:
        tasks = [TaskStart(task.workload, task.workload.label, 1.0, (arm_of(each),)) for each, task in heads(measured)]
        event = RunStart(
            "", first.target, tuple(tasks), TRIALS * len(tasks), None, 0, {"name": first.target},
            {"tuner": "xgb", "seed": 0, "mode": first.measurement.mode, "trials": TRIALS}, first.toolchain,
        )  # fmt: skip
        run = store.start_run({name: value for name, value in event.to_json().items() if name != "run"})
        started_s = at_s = time.time()
        for space, each in zip(SPACES, measured):
            found = search(space, each)
            for record in [*found, *races(space, folder, {record.config for record in found})]:
                duration_s = max(record.measurement.run_s, record.measurement.build_s / BUILDERS)
                store.append(replace(record, run=run, started_at=at_s, finished_at=at_s + duration_s))
                at_s += duration_s
        store.finish_run(run, {"run": run, "stopped": "trials", "wall_s": at_s - started_s, "tasks": []})
    return path


def measurements(space: Path, folder: Path) -> dict[Config, Record]:
    """The records of a recorded space by their configuration, without those of the final race."""
    with Store.open(folder / f"{space.name}.db") as store:
        import_file(store, space)
        return {record.config: record for record in store.history() if not record.final_race}


def races(space: Path, folder: Path, found: set[Config]) -> list[Record]:
    """The recorded final race of a space, with the configurations that a search found."""
    with Store.open(folder / f"{space.name}.db") as store:
        return [record for record in store.history() if record.final_race and record.config in found]


def heads(measured: list[dict[Config, Record]]) -> list[tuple[dict[Config, Record], Record]]:
    return [(each, next(iter(each.values()))) for each in measured]


def arm_of(measured: dict[Config, Record]) -> ArmStart:
    first = next(iter(measured.values()))  # the default: it was recorded first
    return ArmStart(first.template, SpaceSize(len(measured), True), first.config, 0)


def search(space: Path, measured: dict[Config, Record]) -> list[Record]:
    """The records that a search of the space gives, in its order, with the predictions of its model."""
    (recorded,) = load([space]).spaces
    tuner = make_tuner("xgb", recorded.space(), seed=0)
    found: list[Record] = []
    state = 0
    while len(found) < TRIALS and not tuner.finished:
        configs = tuner.ask(tuner.batch)
        scores = tuner.predict(configs)
        for i, config in enumerate(configs):
            known = {"prediction": float(scores[i]), "model": state} if scores is not None else {}
            found.append(replace(measured[config], batch=state, **known))
        tuner.tell([(config, measured[config].measurement.time_ns) for config in configs])
        state += 1
    return found[:TRIALS]


def take(browser: Any, report: str, out: Path, pictures: Sequence[tuple[str, str, int, int, str, str]]) -> None:
    """Writes pictures of a report as PNG files.

    Raises:
        SystemExit: a picture is larger than MAX_BYTES.
    """
    for name, kind, width, height, theme, heading in pictures:
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
        page.goto(report)
        page.wait_for_selector("main[data-ready]")
        if kind == "task":
            page.locator("td.task a").nth(1).click()
            page.wait_for_selector("main[data-page=task]")
        elif kind != "overview":
            page.locator("#nav a", has_text={"run": "Runs"}.get(kind, kind.capitalize())).click()
            page.wait_for_selector(f"main[data-page={kind}{'s' if kind == 'run' else ''}]")
        if kind == "run":
            page.locator("tbody a").first.click()
            page.wait_for_selector("main[data-page=run]")
        if kind == "records":
            page.get_by_label("Task").select_option(index=2)
        if heading:
            page.get_by_role("heading", name=heading).evaluate("heading => window.scrollTo(0, heading.offsetTop - 24)")
        if kind == "task":
            page.get_by_text("Boosted trees, trained on").wait_for()  # the model's importance comes later
        page.wait_for_timeout(800)
        file = out / f"{name}.png"
        page.screenshot(path=file)
        page.close()
        Image.open(file).convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(file, optimize=True)
        if file.stat().st_size > MAX_BYTES:
            sys.exit(f"{file} has {file.stat().st_size:,} bytes; at most {MAX_BYTES:,} are wanted: make it smaller")
        print(f"{file}  {file.stat().st_size:,} bytes")


def report_of(path: Path, databases: Sequence[str | Path]) -> Path:
    answers = Answers([str(database) for database in databases])
    path.write_text(report_html(answers), encoding="utf-8")
    answers.close()
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--keep", type=Path, help="leave the database and the report in this folder")
    parser.add_argument("--also", nargs="*", default=(), help="databases with doubtful times")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as name:
        folder = options.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / "h200.db"
        database = kept if kept.exists() else recorded_run(kept, Path(name))
        shown = [(PICTURES, report_of(folder / "report.html", [database]))]
        if options.also:
            shown.append((ALSO, report_of(folder / "also.html", options.also)))
        with sync_playwright() as driver:
            path = shutil.which("chromium") or shutil.which("google-chrome")
            browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
            for pictures, report in shown:
                take(browser, report.as_uri(), options.out, pictures)
            browser.close()


if __name__ == "__main__":
    main()
