#!/bin/sh
# numba-cuda-mlir 0.6.0, numba-cuda 0.30.4, numba 0.68.1, nvidia-nvvm 13.5.37
# numba-cuda-mlir infers the type of a call of a named tuple's class, as Numba and numba-cuda do, but has no lowering for it: "This line in
# your program has triggered a compiler bug". A plain tuple works, and so does a named tuple that is captured. Neither needs a GPU.
# Seen on 2026-11-28:
#     Pair(i, i): UserFacingInternalCompilerError
#     (i, i): compiles
# Exits 0 while it behaves like that.
. "${0%/*}/numba_cuda_mlir.env"
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
