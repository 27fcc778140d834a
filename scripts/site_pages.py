"""Builds the documentation as a site in build/site/html.

    python scripts/site_pages.py

Zensical builds a tree of pages in which every link leads to another page. The pages of docs/ also link files outside of it,
as GitHub shows them, so this program makes that tree: README.md is its home, and files that pages link become pages below
`files/`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from posixpath import relpath

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "site"
HOMES = {"README.md": "index.md", "docs/README.md": "pages.md", "CHANGELOG.md": "changelog.md"}
LANGUAGES = {".py": "python", ".c": "c", ".yaml": "yaml", ".json": "json"}
MOST_BYTES = 100_000  # a longer file is linked as it is
PACKAGE = ("schedsearch/*", "templates", "tuner", "records")  # what an installation puts into the package schedsearch
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
CODE = re.compile(r"^```.*?^```$|^    [^\n]*$|`[^`\n]+`", re.DOTALL | re.MULTILINE)


class Stage:
    """The tree of pages that Zensical reads.

    Args:
        source: the repository.
        site: the folder that gets `pages/`, `package/` and `mkdocs.yml`; what it held before is removed.
    """

    def __init__(self, source: Path, site: Path) -> None:
        self._source = source
        self._site = site
        self._pages = site / "pages"
        self._linked: list[Path] = []

    def write(self) -> None:
        """Writes the tree.

        Raises:
            FileNotFoundError: a page links a file that does not exist.
        """
        shutil.rmtree(self._site, ignore_errors=True)
        self._pages.mkdir(parents=True)
        docs = [file for file in sorted((self._source / "docs").rglob("*")) if file.is_file()]
        for file in [*(self._source / name for name in HOMES if name != "docs/README.md"), *docs]:
            self._add(file)
        done: set[Path] = set()
        while todo := [file for file in self._linked if file not in done]:
            for file in todo:
                done.add(file)
                self._add_linked(file)
        for pattern in PACKAGE:
            for folder in sorted(self._source.glob(pattern)):
                link = self._site / "package" / "schedsearch" / folder.name
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(folder)
        (self._site / "mkdocs.yml").write_text(self._configuration(), encoding="utf-8")

    def _staged(self, file: Path) -> str:
        """The path of a file of the repository in the tree."""
        name = file.relative_to(self._source).as_posix()
        if name in HOMES:
            return HOMES[name]
        if name.startswith("docs/"):
            return name.removeprefix("docs/")
        if file not in self._linked:
            self._linked.append(file)
        if file.is_dir():
            return f"files/{name}/index.md"
        return f"files/{name}" if file.suffix == ".md" or not self._is_page(file) else f"files/{name}.md"

    @staticmethod
    def _is_page(file: Path) -> bool:
        return file.suffix in LANGUAGES and file.stat().st_size <= MOST_BYTES

    def _add(self, file: Path) -> None:
        path = self._pages / self._staged(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            path.write_text(self._rewritten(file), encoding="utf-8")
        else:
            shutil.copy(file, path)

    def _add_linked(self, file: Path) -> None:
        path = self._pages / self._staged(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        name = file.relative_to(self._source).as_posix()
        if file.is_dir():
            children = [child for child in sorted(file.iterdir()) if self._is_page(child) or child.suffix == ".md"]
            links = [f"- [{child.name}]({relpath(self._staged(child), f'files/{name}')})" for child in children]
            path.write_text("\n".join([f"# {name}", "", *links, ""]), encoding="utf-8")
        elif self._is_page(file):
            text = file.read_text(encoding="utf-8").rstrip()
            path.write_text(f"# {name}\n\n````{LANGUAGES[file.suffix]}\n{text}\n````\n", encoding="utf-8")
        else:
            self._add(file)

    def _rewritten(self, page: Path) -> str:
        """The page with links to places in the tree."""
        here = Path(self._staged(page)).parent.as_posix()

        def target(match: re.Match[str]) -> str:
            linked = Path(os.path.normpath(page.parent / match[1]))
            if not linked.exists():
                raise FileNotFoundError(f"{page}: {match[1]} does not exist")
            return relpath(self._staged(linked), here) + (match[2] or "")

        text = page.read_text(encoding="utf-8")
        parts, end = [], 0
        for code in CODE.finditer(text):  # links in code are not links
            parts += [LINK.sub(target, text[end : code.start()]), code[0]]
            end = code.end()
        return "".join([*parts, LINK.sub(target, text[end:])])

    def _configuration(self) -> str:
        text = (self._source / "mkdocs.yml").read_text(encoding="utf-8")
        return text.replace("      # decisions by topic\n", "".join(self._decisions()))

    def _decisions(self) -> Iterator[str]:
        """The navigation of the decisions, as their index groups them."""
        index = (self._source / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
        for line in index.splitlines():
            if line.startswith("## "):
                yield f"      - {line[3:]!r}:\n" if ":" in line else f"      - {line[3:]}:\n"
            elif row := re.match(r"\| (\d{3}) \| \[.+?\]\((.+?\.md)\) \| \d{4}-", line):
                yield f"          - decisions/{row[2]}\n"


def pages_without_an_entry(site: Path) -> list[str]:
    """Pages that the navigation does not list; pages of linked files need no entry."""
    configuration = (site / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"^ +- (?:.+: )?([\w./-]+\.md)$", configuration, re.MULTILINE))
    pages = {path.relative_to(site / "pages").as_posix() for path in (site / "pages").rglob("*.md")}
    return sorted(page for page in pages - listed if not page.startswith("files/"))


def main() -> int:
    Stage(ROOT, SITE).write()
    if missing := pages_without_an_entry(SITE):
        print(f"mkdocs.yml has no entry for {', '.join(missing)}; add them to nav", file=sys.stderr)
        return 1
    zensical = Path(sys.executable).parent / "zensical"
    return subprocess.run(
        [zensical, "build", "--strict", "--clean", "--config-file", SITE / "mkdocs.yml"], cwd=SITE
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
