"""Reads the README and the pages of docs/: their blocks, files and commands. Runs them as they stand.

`Page.run` makes one program of the Python blocks of a page. `Package` is for pages that show a package of one's own: its
files are written to a folder, and commands run there, in processes that find the new package only through its installation.
Two things differ: the package is installed into a folder without a registry, and `schedsearch` and `python` are found in
another way.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

SCHEDSEARCH = [sys.executable, "-c", "from schedsearch.cli.console import run; run()"]
RUN_S = 240


ROOT = Path(__file__).resolve().parents[1]


class Block(NamedTuple):
    """A fenced block of a page. `line` is the number of its first line of text, from 1."""

    language: str
    text: str
    line: int


class Page:
    """The README, or a page of docs/.

    Args:
        name: relative to docs/, e.g. "c.md" or "../README.md".
    """

    def __init__(self, name: str) -> None:
        self.path = (ROOT / "docs" / name).resolve()
        self._text = self.path.read_text(encoding="utf-8")
        self.fenced = [
            Block(found[1], found[2], self._text.count("\n", 0, found.start(2)) + 1)
            for found in re.finditer(r"^```(\w*)\n(.*?)^```$", self._text, re.DOTALL | re.MULTILINE)
        ]

    def blocks(self, language: str) -> list[str]:
        return [block.text for block in self.fenced if block.language == language]

    def lines(self) -> Iterator[tuple[int, str]]:
        """What a reader may copy: lines of shell blocks and of indented blocks without their prompt, and text in backticks.
        Each with its number."""
        for block in self.fenced:
            if block.language in ("", "sh", "text"):
                yield from enumerate(block.text.splitlines(), block.line)
        for found in re.finditer(r"^ {4}(?:\$ )?(\S.*)$|`([^`]+)`", self._prose(), re.MULTILINE):
            yield self._text.count("\n", 0, found.start()) + 1, found[1] or " ".join(found[2].split())

    def _prose(self) -> str:
        """The page with blank lines in place of its fenced blocks."""
        return re.sub(r"^```.*?^```$", lambda found: "\n" * found[0].count("\n"), self._text, flags=re.DOTALL | re.MULTILINE)

    def commands_of(self, program: str) -> Iterator[tuple[int, list[str]]]:
        """The words after `program` in every command line of the page, without comments and what the shell reads."""
        for number, line in self.lines():
            if line.startswith(f"{program} "):
                command = re.split(r" {3,}|\s#\s|\s[|>]|\s\\$|\\\||\s&&", line)[0]
                yield number, shlex.split(command)[1:]

    def run(self, names: dict[str, Any], left_out: Mapping[str, str]) -> list[Block]:
        """Runs the Python blocks in their order, as one program with the global `names`.

        Args:
            left_out: text of a block -> why it does not run.

        Returns:
            The blocks that ran.
        """
        ran = [block for block in self.fenced if block.language == "python" and not any(s in block.text for s in left_out)]
        for block in ran:
            code = compile(
                "\n" * (block.line - 1) + block.text, str(self.path), "exec"
            )  # a traceback shows the page's lines
            exec(code, names)
        return ran

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
