"""The site of the documentation: its tree of pages, its navigation, and the pages that Zensical builds."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import schedsearch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
site: Any = importlib.import_module("site_pages")
ZENSICAL = Path(sys.executable).parent / "zensical"


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    site.Stage(ROOT, folder).write()
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with two pages, of which one links a program."""
    for name, text in {
        "README.md": "# Home\n\n[pages](docs/README.md)\n",
        "CHANGELOG.md": "# Changelog\n",
        "mkdocs.yml": "site_name: small\ndocs_dir: pages\nsite_dir: html\ntheme: {name: material, font: false}\nnav:\n"
        "  - index.md\n  - pages.md\n  - changelog.md\n  - a.md\n  - Decisions:\n      - decisions/README.md\n"
        "      # decisions by topic\n",
        "docs/README.md": "# Pages\n\n[a](a.md#part)\n",
        "docs/a.md": "# A\n\n## Part\n\n[program](../examples/b.py) `[no](link.md)`\n",
        "docs/decisions/README.md": "# Decisions\n\n## Files\n\n| 001 | [One](001-one.md) | 2026-11-21 | stands |\n",
        "docs/decisions/001-one.md": "# One\n",
        "examples/b.py": "print(1)\n",
    }.items():
        path = tmp_path / "repository" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "repository"


def add(page: Path, text: str) -> None:
    page.write_text(page.read_text(encoding="utf-8") + text, encoding="utf-8")


# --- The tree of pages -------------------------------------------------------------------------------------------------
def test_the_navigation_lists_every_page(staged: Path) -> None:
    assert site.pages_without_an_entry(staged) == []


def test_a_page_without_an_entry_is_found(repository: Path, tmp_path: Path) -> None:
    (repository / "docs" / "new.md").write_text("# New\n", encoding="utf-8")
    site.Stage(repository, tmp_path / "site").write()
    assert site.pages_without_an_entry(tmp_path / "site") == ["new.md"]


def test_links_lead_to_places_in_the_tree(repository: Path, tmp_path: Path) -> None:
    site.Stage(repository, tmp_path / "site").write()
    pages = tmp_path / "site" / "pages"
    assert (pages / "index.md").read_text() == "# Home\n\n[pages](pages.md)\n"
    assert (pages / "a.md").read_text() == "# A\n\n## Part\n\n[program](files/examples/b.py.md) `[no](link.md)`\n"
    assert (pages / "files/examples/b.py.md").read_text() == "# examples/b.py\n\n````python\nprint(1)\n````\n"
    assert "      - Files:\n          - decisions/001-one.md\n" in (tmp_path / "site" / "mkdocs.yml").read_text()


def test_a_link_to_a_missing_file_is_an_error(repository: Path, tmp_path: Path) -> None:
    add(repository / "docs" / "a.md", "[b](../examples/missing.py)\n")
    with pytest.raises(FileNotFoundError, match=r"a\.md: \.\./examples/missing\.py does not exist"):
        site.Stage(repository, tmp_path / "site").write()


@pytest.mark.parametrize("public", schedsearch.__all__)
def test_every_public_name_is_in_the_reference(public: str) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    assert f"::: schedsearch.{public}\n" in pages


# --- The built site ----------------------------------------------------------------------------------------------------
class Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value and not urlsplit(value).scheme and not value.startswith("//"):
                self.links.add(value)


def built(folder: Path) -> subprocess.CompletedProcess[str]:
    if not ZENSICAL.exists():
        pytest.skip("needs Zensical: make site installs it")
    command = [ZENSICAL, "build", "--strict", "--config-file", folder / "mkdocs.yml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)


def broken(html: Path) -> list[str]:
    pages = {path.resolve(): Page(path) for path in html.rglob("*.html")}
    found = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are absolute
            continue
        for link in page.links:
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].anchors):
                found.append(f"{path.relative_to(html.resolve())}: {link}")
    return found


@pytest.mark.site
def test_every_link_of_the_built_site_leads_somewhere(staged: Path) -> None:
    result = built(staged)
    assert result.returncode == 0, result.stdout + result.stderr
    assert broken(staged / "html") == []
    names = {inventory for inventory in schedsearch.__all__ if f'id="schedsearch.{inventory}"' not in all_reference(staged)}
    assert names == set()
    assert any("schedsearch" in str(entry) for entry in json.loads((staged / "html" / "search.json").read_text())["items"])


def all_reference(staged: Path) -> str:
    return "".join(path.read_text(encoding="utf-8") for path in (staged / "html" / "reference").rglob("index.html"))


@pytest.mark.site
@pytest.mark.parametrize("fault", ["[b](b.md)\n", "[b](../README.md#nowhere)\n", "::: schedsearch.missing\n"])
def test_a_broken_link_or_name_fails_the_build(fault: str, repository: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "mkdocs.yml", tmp_path / "whole.yml")
    site.Stage(repository, tmp_path / "site").write()
    assert built(tmp_path / "site").returncode == 0
    configuration = tmp_path / "site" / "mkdocs.yml"
    add(configuration, "plugins:\n  - mkdocstrings:\n      handlers: {python: {paths: [package]}}\n")
    add(tmp_path / "site" / "pages" / "a.md", fault.replace("../README.md", "index.md"))
    assert built(tmp_path / "site").returncode != 0
