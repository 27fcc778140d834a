#!/bin/sh
# numba-cuda-mlir 0.6.0, nvidia-nvvm 13.5.37
# A shared array of length 0 is dynamic shared memory, which begins behind all static shared arrays. Here it is declared as a static
# variable of one byte, not as .extern: ptxas gives it an address before other static arrays, so that its third word and theirs are the
# same memory, and a kernel with both kinds computes nonsense without any error. In the machine code of this kernel (nvdisasm) the
# dynamic array begins at 0, and the other one at 8. numba-cuda 0.30.4 declares .extern .shared.
# Seen on 2026-11-29:
#     .shared .align 16 .b8 __dynamic_shmem__0;
#     .shared .align 8 .b8 static_shared_memory_0[128];
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


def both(x):
    dynamic = cuda.shared.array(0, types.int32)
    static = cuda.shared.array(32, types.int32)
    dynamic[cuda.threadIdx.x] = x[cuda.threadIdx.x]
    static[cuda.threadIdx.x] = x[cuda.threadIdx.x] + 1
    cuda.syncthreads()
    x[cuda.threadIdx.x] = dynamic[31 - cuda.threadIdx.x] + static[31 - cuda.threadIdx.x]


found = sorted(line.strip() for line in ptx(both, types.int32).splitlines() if ".shared .align" in line)
print(*found, sep="\n")
sys.exit(".shared .align 16 .b8 __dynamic_shmem__0;" not in found)
PYTHON
