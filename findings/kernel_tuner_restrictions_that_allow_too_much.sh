#!/bin/sh
# python-constraint2 2.9.0, to which Kernel Tuner 1.5.0 gives each restriction that is a string
# Three kinds of restrictions mean something else than in Python, and nothing is said; so a search misses legal configurations, or
# measures illegal ones.
#     n // 4 == 2    becomes n == 4 ** 2: its "/" are moved to the other side, as "*"
#     bytes < 24576  becomes bytes <= 24576 - 1e-12, which is 24576 in float64 from 16385 on (and so for >); the limits of shared
#                    memory are above that
#     8<=bx<=16      loses its second half if a parameter is called x: the first letter behind "<=" is taken for a space. If none is
#                    called like that, the search ends with an error. With spaces it is right.
# Seen on 2026-11-29 (values of the configurations that each allows):
#     n // 4 == 2: [16], right [8, 9, 10, 11]
#     bytes < 24576: [16384, 24576], right [16384]
#     8<=bx<=16: [8, 16, 32], right [8, 16]
#     8 <= bx <= 16: [8, 16], right [8, 16]
# Exits 0 while it behaves like that.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-deps python-constraint2==2.9.0
"$folder/venv/bin/python" - <<'PYTHON'
import sys

from constraint import Problem

wrong = []
for name, values, restriction in (
    ("n", list(range(1, 17)), "n // 4 == 2"),
    ("bytes", [16384, 24576, 49152], "bytes < 24576"),
    ("bx", [4, 8, 16, 32], "8<=bx<=16"),
    ("bx", [4, 8, 16, 32], "8 <= bx <= 16"),
):
    problem = Problem()
    problem.addVariable(name, values)
    problem.addVariable("x", [1])
    problem.addConstraint(restriction)
    allowed = sorted(each[name] for each in problem.getSolutions())
    right = [value for value in values if eval(restriction, {name: value})]
    print(f"{restriction}: {allowed}, right {right}")
    wrong.append(allowed != right)
sys.exit(wrong != [True, True, True, False])
PYTHON
