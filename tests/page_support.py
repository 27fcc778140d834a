"""Runs the files and commands of pages in docs/ that show a package of one's own, as they stand.

The blocks of a page are written to a folder, and its commands run there, in processes that find the new package only through
its installation. Two things differ: the package is installed into a folder without a registry, and `schedsearch` and
`python` are found in another way.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SCHEDSEARCH = [sys.executable, "-c", "from schedsearch.cli.console import run; run()"]
RUN_S = 240


class Page:
    """A page of docs/."""

    def __init__(self, name: str) -> None:
        self.path = Path(__file__).resolve().parents[1] / "docs" / name
        self._text = self.path.read_text(encoding="utf-8")

    def blocks(self, language: str) -> list[str]:
        return re.findall(rf"^```{language}\n(.*?)^```$", self._text, re.DOTALL | re.MULTILINE)

    def files(self) -> dict[str, str]:
        """The blocks after a paragraph that begins with a file name in backticks, by file name. If a name
        occurs twice, the last block counts."""
        found = re.findall(r"^`(\w+\.\w+)` (?:(?!```).)*?^```\w+\n(.*?)^```$", self._text, re.DOTALL | re.MULTILINE)
        return dict(found)

    def block_with(self, language: str, text: str) -> str:
        """The only block that holds `text`."""
        (block,) = [block for block in self.blocks(language) if text in block]
        return block

    def commands(self) -> list[str]:
        """Lines of the page's first shell block."""
        return self.blocks("sh")[0].splitlines()


class Package:
    """A page's package, built by the page's own pyproject.toml and installed into a folder.

    Args:
        files: name -> text.
    """

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        self.folder, self.site = folder, folder / "site"
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        (folder / "tmp").mkdir()  # the CPU's lock is there, so the test need not wait for other runs on this machine

    def environment(self, installed: bool = True) -> dict[str, str]:
        """The environment of a process that finds the package, and nothing in the folder itself."""
        paths = [str(self.site)] if installed else []
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep),
            "PYTHONSAFEPATH": "1",  # the folder itself is not on the path
            "TMPDIR": str(self.folder / "tmp"),
        }

    def run(self, *command: str, installed: bool = True) -> str:
        """The output of a command that succeeds."""
        environment = self.environment(installed)
        result = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False
        )
        assert result.returncode == 0, f"{command}: {result.stdout}\n{result.stderr}"
        return result.stdout

    def run_line(self, line: str, **options: bool) -> str:
        """A line of the page's shell block."""
        program, *arguments = line.split()
        if line == "pip install .":
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
            return self.run(*install, "--no-index", "--target", str(self.site), ".")
        return self.run(*(SCHEDSEARCH if program == "schedsearch" else [sys.executable]), *arguments, **options)
