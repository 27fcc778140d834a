"""Prints the programs in benchmarks/ with the first line of each docstring."""

from __future__ import annotations

import ast
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


def main() -> None:
    for path in sorted(FOLDER.glob("[!_]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.If) and "__main__" in ast.dump(node.test) for node in tree.body):
            lines = (ast.get_docstring(tree) or "").splitlines()
            print(f"make bench BENCH={path.stem:<20} {lines[0] if lines else ''}")


if __name__ == "__main__":
    main()
