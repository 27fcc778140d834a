"""Chromium, and the pages of sample databases live and as a file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_support import READY_MS, REPLAY, Watched, chromium_path, running_chromium, served, write_report
from dashboard_support import hostile_database, sample_database


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A running Chromium. Skips the test where there is none."""
    pytest.importorskip("playwright.sync_api", reason="Playwright is missing: make test-browser")
    pytest.importorskip("uvicorn", reason="the extra dashboard is missing: pip install 'schedsearch[dashboard]'")
    if chromium_path() is None:
        pytest.skip("Chromium is missing; on Debian: apt install chromium")
    with running_chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core."""
    path = Path(sys.prefix) / "axe.min.js"
    if not path.exists():
        pytest.skip("axe-core is missing: make test-browser fetches it where there is npm")
    return path.read_text(encoding="utf-8")


@pytest.fixture
def watch(chromium: Any) -> Iterator[Callable[..., Watched]]:
    """Makes pages: watch(root, theme="light", width=1280, height=900)."""
    contexts = []

    def make(root: str, theme: str = "light", width: int = 1280, height: int = 900) -> Watched:
        context = chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce", timezone_id="UTC"
        )
        context.set_default_timeout(READY_MS)
        contexts.append(context)
        return Watched(context.new_page(), root)

    yield make
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def sample_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ...]:
    """Two databases with the same tasks, and a replay."""
    folder = tmp_path_factory.mktemp("samples")
    replay = folder / "replay.json"
    replay.write_text(REPLAY, encoding="utf-8")
    return sample_database(folder / "a.db"), sample_database(folder / "b.db", seed=1, trials=40), replay


@pytest.fixture(scope="session")
def roots(sample_files: tuple[Path, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Where the pages of `sample_files` are: {"live": ..., "offline": ...}."""
    offline = write_report(tmp_path_factory.mktemp("report") / "report.html", *sample_files)
    with served(*sample_files) as live:
        yield {"live": live, "offline": offline}


@pytest.fixture(scope="session")
def hostile_roots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The same for a database with markup and script in every text."""
    folder = tmp_path_factory.mktemp("hostile")
    path = hostile_database(folder / "h.db")
    other = hostile_database(folder / "<img src=x onerror=alert(3)>.db")
    offline = write_report(folder / "report.html", path, other)
    with served(path, other) as live:
        yield {"live": live, "offline": offline}
