"""Pages of the dashboard under test: served, written to a file, opened and watched."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

READY_MS = 120_000  # for a machine that is busy with something else
CHROMIUM_FLAGS = (
    "--no-sandbox",  # containers lack the rights for the sandbox; the pages are our own
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
REPLAY = json.dumps(
    {
        "tuner": "xgb", "seeds": 3, "cpu_s_per_64": 0.5, "geomean": {"8": 0.5, "16": 0.8},
        "geomean_low": {"8": 0.4, "16": 0.7},
        "geomean_high": {"8": 0.6, "16": 0.9},
        "spaces": [
            {
                "file": "s.json", "name": "gemm", "configurations": 100, "valid": 90, "best_ns": 1e6,
                "fractions": {"8": 0.5, "16": 0.8}, "low": {"8": 0.4, "16": 0.7}, "high": {"8": 0.6, "16": 0.9},
                "within_5": {"8": 0.1, "16": 0.4}, "cpu_s_per_64": 0.5,
            }
        ],
    }
)  # fmt: skip


def chromium_path() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def running_chromium() -> Iterator[Any]:
    """The browser of Playwright, headless. Playwright and `chromium_path` must be there."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=chromium_path(), headless=True, args=list(CHROMIUM_FLAGS), timeout=READY_MS
        )
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page, and what it did that it must not do: `problems` are messages in the console and errors of scripts, `requests`
    the addresses that it asked for, `dialogs` the strings of alerts."""

    page: Any
    root: str
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", lambda message: self.problems.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))

    def go(self, address: str) -> Any:
        """Opens the page `#/...` as a reader who types it, and waits until it is drawn."""
        self.page.goto("about:blank")
        self.page.goto(self.root + address)
        self.page.wait_for_selector("main[data-ready]", timeout=READY_MS)
        return self.page

    def foreign_requests(self) -> list[str]:
        own = self.root.split("#")[0]
        return [url for url in self.requests if not url.startswith((own, "data:", "blob:", "about:"))]


@contextmanager
def served(*files: Path, port: int = 0) -> Iterator[str]:
    """The address of a dashboard of these files, in a thread of this process."""
    import uvicorn

    from schedsearch.dashboard.answers import Answers, split_files
    from schedsearch.dashboard.server import application, bind

    databases, replays = split_files([str(path) for path in files])
    answers = Answers(databases, replays)
    listening = bind("127.0.0.1", port)
    config = uvicorn.Config(application(answers), log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        listening.close()
        answers.close()


def write_report(path: Path, *files: Path) -> str:
    """Writes the report of these files; its address."""
    from schedsearch.dashboard.answers import Answers, split_files
    from schedsearch.dashboard.report import report_html

    databases, replays = split_files([str(file) for file in files])
    answers = Answers(databases, replays)
    try:
        path.write_text(report_html(answers), encoding="utf-8")
    finally:
        answers.close()
    return path.as_uri()


def all_pages(watched: Watched) -> dict[str, str]:
    """The address of one page of every kind, followed by links as a reader would: {"overview": "#/", ...}."""
    page = watched.go("#/")
    pages = {"overview": "#/", "records": "#/records", "replay": "#/replay", "runs": "#/runs"}
    page = watched.go("#/runs")
    pages["run"] = page.locator("tbody tr td:first-child a").first.get_attribute("href")
    page = watched.go("#/")
    pages["task"] = page.locator("td.task a").first.get_attribute("href")
    watched.go("#/records")
    page.wait_for_selector("tbody tr")
    pages["trial"] = page.locator("tbody tr td:first-child a").first.get_attribute("href")
    watched.go("#/compare")
    page.wait_for_url("**/compare/*/*")
    pages["compare"] = "#" + page.url.split("#")[1]
    return pages
