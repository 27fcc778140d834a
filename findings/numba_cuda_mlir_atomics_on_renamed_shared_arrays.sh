#!/bin/sh
# numba-cuda-mlir 0.6.0, nvidia-nvvm 13.5.37
# An atomic operation on a shared array that has a second name, or was passed to a device function, becomes one on global memory at the
# shared address: the kernel fails with an illegal address, or writes where it should not. Nothing is said when it is compiled. The type of
# a variable does not have the memory of an array, and `memref_llvm_address_space` (lowering_utilities/__init__.py) takes an array
# without one to be global. numba-cuda 0.30.4 makes atom.shared of all three.
# Seen on 2026-11-29:
#     counts: atom.shared
#     renamed = counts: atom.global
#     function(counts): atom.global
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
import re
import sys

from compiled import ptx
from numba_cuda_mlir import cuda, types
from numba_cuda_mlir.cuda import jit


def direct(x):
    counts = cuda.shared.array(32, types.int32)
    cuda.atomic.add(counts, x[cuda.threadIdx.x], 1)
    cuda.syncthreads()
    x[cuda.threadIdx.x] = counts[cuda.threadIdx.x]


def renamed(x):
    counts = cuda.shared.array(32, types.int32)
    same = counts
    if x[0] > 3:
        cuda.atomic.add(same, x[cuda.threadIdx.x], 1)
    cuda.syncthreads()
    x[cuda.threadIdx.x] = counts[cuda.threadIdx.x]


@jit(device=True)
def count(counts, at):
    cuda.atomic.add(counts, at, 1)


def passed(x):
    counts = cuda.shared.array(32, types.int32)
    count(counts, x[cuda.threadIdx.x])
    cuda.syncthreads()
    x[cuda.threadIdx.x] = counts[cuda.threadIdx.x]


found = []
for label, kernel in (("counts", direct), ("renamed = counts", renamed), ("function(counts)", passed)):
    found.append(",".join(sorted(set(re.findall(r"atom\.\w+", ptx(kernel, types.int32))))))
    print(f"{label}: {found[-1]}")
sys.exit(found != ["atom.shared", "atom.global", "atom.global"])
PYTHON
