#!/bin/sh
# numba-cuda-mlir 0.6.0, numba-cuda 0.30.4, numba 0.68.1, nvidia-nvvm 13.5.37
# numba-cuda-mlir infers the type of a call of a named tuple's class, as Numba and numba-cuda do, but has no lowering for it: "This line in
# your program has triggered a compiler bug". A plain tuple works, and so does a named tuple that is captured. Neither needs a GPU.
# Seen on 2026-11-28:
#     Pair(i, i): UserFacingInternalCompilerError
#     (i, i): compiles
# Exits 0 while it behaves like that.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'numba-cuda-mlir[cu13]==0.6.0' nvidia-nvvm==13.5.37
cat > "$folder/compiled.py" <<'PYTHON'
import numba_cuda_mlir.tools as tools

tools._cached_cc = (9, 0)  # it asks a driver otherwise
from numba_cuda_mlir import types
from numba_cuda_mlir.compiler import compile_result
from numba_cuda_mlir.cuda import jit


def ptx(kernel, element):
    text = compile_result(jit(kernel, chip="sm_90a"), types.void(types.Array(element, 1, "C"))).ptx
    return text.decode() if isinstance(text, bytes) else text
PYTHON
run_python() { PYTHONPATH="$folder" "$folder/venv/bin/python" -; }
run_python <<'PYTHON'
import sys
from typing import NamedTuple

from compiled import ptx
from numba_cuda_mlir import cuda, types


class Pair(NamedTuple):
    first: int
    second: int


def named(x):
    i = cuda.threadIdx.x
    pair = Pair(i, i)
    x[pair.first] = pair.second


def plain(x):
    i = cuda.threadIdx.x
    pair = (i, i)
    x[pair[0]] = pair[1]


found = []
for label, kernel in (("Pair(i, i)", named), ("(i, i)", plain)):
    try:
        ptx(kernel, types.int32)
        found.append("compiles")
    except Exception as error:
        found.append(type(error).__name__)
    print(f"{label}: {found[-1]}")
sys.exit(found != ["UserFacingInternalCompilerError", "compiles"])
PYTHON
