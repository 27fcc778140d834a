"""Python kernel -> PTX by numba-cuda-mlir, the successor of Numba-CUDA.

Each kernel is compiled from its beginning: MLIR has no place for the placeholders by which kernels of the same shape share
work (`front_end`). What the compiler takes is written with Numba's names, so it gets a translated copy
(`mlir_functions`).

See docs/decisions/361-two-compilers-of-kernels.md.
"""

from __future__ import annotations

import re

from schedsearch.backend import mlir_functions, mlir_ops, mlir_private
from schedsearch.backend.front_ends import Ptx
from schedsearch.backend.inlining import inlining
from schedsearch.backend.signatures import signature
from schedsearch.template import KernelStep

_FAST = {"ftz": True, "fma": True, "prec_div": False, "prec_sqrt": False}  # as Numba-CUDA's fastmath
_ERROR_CODE = "__numba_cuda_mlir_error_code"  # where a kernel would note an exception of Python
_SHARED_ARRAY = re.compile(r"\bstatic_shared_memory_\d+")  # numbered over all kernels of a process


def to_ptx(step: KernelStep, cc: tuple[int, int]) -> Ptx:
    """The PTX of a step; see `front_ends.FrontEnd`."""
    function, kinds = mlir_functions.entered(step.function, signature(step))
    options: dict[str, object] = {**(_FAST if step.fastmath else {}), **({} if step.contract else {"fma": False})}
    bounds = step.block_threads, step.min_blocks_per_sm
    text = mlir_private.ptx_of(
        function, kinds, cc, bounds, lambda own: inlining(own, mlir_private.CORE), options, fastmath=step.fastmath
    )
    text = text.replace(mlir_private.CONVERGENT, "")
    if text.count(_ERROR_CODE) == 1:  # its declaration
        text = re.sub(rf"(?m)^\.common \.global .*{_ERROR_CODE};\n", "", text)
    names = {name: f"shared_{number}" for number, name in enumerate(dict.fromkeys(_SHARED_ARRAY.findall(text)))}
    text = _SHARED_ARRAY.sub(lambda match: names[match[0]], text)
    return Ptx(mlir_ops.with_dynamic_shared(text), shared=False)


def libraries() -> list[str]:
    """The files of NVVM and of its library."""
    places = mlir_private.named("numba_cuda_mlir.numba_cuda.cudadrv.libs")
    return [str(places.get_cudalib("nvvm")), str(places.get_libdevice())]
