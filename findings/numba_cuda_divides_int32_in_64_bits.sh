#!/bin/sh
# numba-cuda 0.30.4, numba 0.68.1, nvidia-nvvm 13.5.37
# Numba types // and % of two int32 as int64. numba-cuda's PTX then divides 64-bit numbers, behind a test that takes the division of 32
# bits only if both numbers are positive or 0. ptxas makes a call of the 64-bit division, and calls cost registers everywhere. Of two
# uint32 NVVM proves that 32 bits suffice. // of a float32 by a whole number is computed in float64. Needs no GPU.
# Seen on 2026-11-29:
#     int32 // int32: div.s64, div.u32
#     int32 % int32: rem.s64, rem.u32
#     uint32 // uint32: div.u32
#     uint32 % uint32: rem.u32
#     float32 // int32: div.rn.f64
# Exits 0 while numba-cuda behaves like that.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'numba-cuda[cu13]==0.30.4' numba==0.68.1 nvidia-nvvm==13.5.37
"$folder/venv/bin/python" - <<'PYTHON'
import re
import sys

from numba import cuda, types


def divided(y, a, b):
    y[0] = a // b


def rest(y, a, b):
    y[0] = a % b


found = {}
for kernel, sign in ((divided, "//"), (rest, "%")):
    for a, b in ((types.int32, types.int32), (types.uint32, types.uint32), (types.float32, types.int32)):
        ptx, _ = cuda.compile_ptx(kernel, types.void(types.Array(a, 1, "C"), a, b), cc=(9, 0))
        found[f"{a} {sign} {b}"] = sorted(set(re.findall(r"\b(?:div|rem)\.(?:rn\.)?[fsu]\d+", ptx)))
for label in sorted(found, key=lambda text: (text[:5] == "float", text[:4] == "uint", text)):
    print(f"{label}:", ", ".join(found[label]))
right = found["int32 // int32"] == ["div.s64", "div.u32"] and found["int32 % int32"] == ["rem.s64", "rem.u32"]
sys.exit(not (right and found["uint32 // uint32"] == ["div.u32"] and found["float32 // int32"] == ["div.rn.f64"]))
PYTHON
