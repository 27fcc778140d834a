"""Writes the files that are generated from the code: the JSON Schema of workload files. A test compares them."""

from __future__ import annotations

import json
from pathlib import Path

from schedsearch.ops.registry import BUILT_IN, operator
from schedsearch.workload_file import json_schema

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    built_in = [operator(name) for name in BUILT_IN]
    text = json.dumps(json_schema(built_in), indent=2) + "\n"
    (ROOT / "schedsearch" / "workload_file" / "workload.schema.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
