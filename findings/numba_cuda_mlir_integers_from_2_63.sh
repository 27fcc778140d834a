#!/bin/sh
# numba-cuda-mlir 0.6.0, numba-cuda 0.30.4, numba 0.68.1, nvidia-nvvm 13.5.37
# numba-cuda-mlir types a captured or written integer from 2**63 on as uint64, as Numba and numba-cuda do, and then lowers it as an i64
# constant: the compilation ends with "std::bad_cast", without a line of the kernel. A conversion of the int64 with the same bits works.
# Neither needs a GPU.
# Seen on 2026-11-28:
#     2**63 + 1: RuntimeError: std::bad_cast
#     uint64(-2**63 + 1): compiles
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

from compiled import ptx
from numba_cuda_mlir import cuda, types

LARGE, BITS = 2**63 + 1, -(2**63) + 1


def written(x):
    x[cuda.threadIdx.x] = LARGE


def converted(x):
    x[cuda.threadIdx.x] = types.uint64(BITS)


found = []
for label, kernel in (("2**63 + 1", written), ("uint64(-2**63 + 1)", converted)):
    try:
        ptx(kernel, types.uint64)
        found.append("compiles")
    except Exception as error:
        found.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    print(f"{label}: {found[-1]}")
sys.exit(found != ["RuntimeError: std::bad_cast", "compiles"])
PYTHON
