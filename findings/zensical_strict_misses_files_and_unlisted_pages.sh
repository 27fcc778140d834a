#!/bin/sh
# zensical 0.0.73, mkdocs 1.6.1, click 8.2.1
# `zensical build --strict` fails for a link to a page that is missing, as `mkdocs build --strict` does. For a link to a missing file
# that is not a page it does not, and for a page that the navigation does not list neither, even with mkdocs' `validation` in the
# configuration. So a site can lose pages and files without a word.
# Seen on 2026-11-28 (exit codes of the builds):
#     missing page: zensical 1 mkdocs 1
#     missing file: zensical 0 mkdocs 1
#     unlisted page: zensical 0 mkdocs 1
# Exits 0 while both behave like that.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q zensical==0.0.73 mkdocs==1.6.1 click==8.2.1
"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import subprocess
import sys
from pathlib import Path

folder = Path(sys.argv[1])
programs = Path(sys.executable).parent
configuration = """site_name: small
nav: [index.md]
validation: {omitted_files: warn, not_found: warn, unrecognized_links: warn}
"""
faults = {"missing page": "[a](a.md)", "missing file": "[a](a.py)", "unlisted page": ""}
codes = {}
for fault, link in faults.items():
    for program in ("zensical", "mkdocs"):
        site = folder / f"{fault} {program}"
        (site / "docs").mkdir(parents=True)
        (site / "mkdocs.yml").write_text(configuration)
        (site / "docs" / "index.md").write_text(f"# Home\n\n{link}\n")
        if fault == "unlisted page":
            (site / "docs" / "other.md").write_text("# Other\n")
        done = subprocess.run([programs / program, "build", "--strict"], cwd=site, capture_output=True)
        codes[fault, program] = int(done.returncode != 0)
    print(f"{fault}:", "zensical", codes[fault, "zensical"], "mkdocs", codes[fault, "mkdocs"])
sys.exit(codes != {(fault, program): int(program == "mkdocs" or fault == "missing page") for fault in faults for program in ("zensical", "mkdocs")})
PYTHON
