"""A stand-in for compute-sanitizer: an executable that runs what it is given on the CPU and prints what the tool prints.

The text follows the manual: the tool's lines begin with =========, and its exit code is the one of --error-exitcode.
"""

from __future__ import annotations

import sys
from pathlib import Path

_PROGRAM = """#!{python}
import json, subprocess, sys
from pathlib import Path

arguments = sys.argv[1:]
Path({log!r}).open("a").write(json.dumps(arguments) + "\\n")
print("========= COMPUTE-SANITIZER")
if {fails!r}:
    sys.exit({fails!r})
if {runs!r}:
    subprocess.run(arguments[arguments.index("all") + 1:], check=True)
else:
    print("schedsearch: launched")
for line in {report!r}:
    print("========= " + line)
errors = sum(not line.startswith(" ") for line in {report!r})
print(f"========= ERROR SUMMARY: {{errors}} error" + "s" * (errors != 1))
sys.exit(int(arguments[arguments.index("--error-exitcode") + 1]) if errors else 0)
"""

OUT_OF_BOUNDS = (
    "Invalid __global__ write of size 4 bytes",
    "    at pointwise_1+0x1a0",
    "    by thread (31,0,0) in block (7,0,0)",
    "    Address 0x7f1c0a600000 is out of bounds",
)


def write(folder: Path, report: tuple[str, ...] = (), fails: str = "", runs: bool = False) -> Path:
    """The program in `folder`. It runs the command that it is given if `runs`, and ends with the text `fails` if given."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "compute-sanitizer"
    program.write_text(
        _PROGRAM.format(python=sys.executable, log=str(folder / "calls"), report=report, fails=fails, runs=runs)
    )
    program.chmod(0o755)
    return program
