"""What this package changes in Numba, and which private names it uses: all of it is here.

Numba has no options for these. A replacement lasts while one kernel is compiled, under Numba's own lock, and Numba has its
own again afterwards. `tests/test_numba_private.py` fails if a name is gone or takes other parameters: `setup.cfg` allows a
new version of Numba once it passes.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Literal

from schedsearch.backend.live_map import live_map

# The packages of Numba's passes: for CPUs, for CUDA, and the copy of the latter in numba-cuda-mlir.
Core = Literal["numba.core", "numba.cuda.core", "numba_cuda_mlir.numba_cuda.core"]

REPLACED: Mapping[str, tuple[str, ...]] = {
    "numba.cuda.core.analysis.compute_live_map": ("cfg", "blocks", "var_use_map", "var_def_map"),
    "numba.cuda.core.ir_utils.compute_live_map": ("cfg", "blocks", "var_use_map", "var_def_map"),
    "numba.cuda.dispatcher.get_current_device": (),
    "numba.cuda.core.inline_closurecall.dead_code_elimination": ("func_ir", "typemap", "alias_map", "arg_aliases"),
    "numba.core.inline_closurecall.dead_code_elimination": ("func_ir", "typemap", "alias_map", "arg_aliases"),
}
"""Functions that others stand in for, and their parameters."""


@contextlib.contextmanager
def for_device(cc: tuple[int, int]) -> Iterator[None]:
    """For kernels of CUDA: Numba finds live variables by `live_map`. It compiles decorated device functions and its own
    overloads for the GPU at hand: it takes one of compute capability `cc` to be there."""
    device = SimpleNamespace(compute_capability=cc)
    names = ("analysis.compute_live_map", "ir_utils.compute_live_map")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(_replaced(f"numba.cuda.core.{name}", live_map))
        stack.enter_context(_replaced("numba.cuda.dispatcher.get_current_device", lambda: device))
        yield


def dead_code_removed_by(function: Callable[[Any], None], core: Core) -> contextlib.AbstractContextManager[None]:
    """The pass that inlines closures ends with `function(func_ir)`."""
    return _replaced(f"{core}.inline_closurecall.dead_code_elimination", function)


@contextlib.contextmanager
def _replaced(name: str, by: Callable[..., object]) -> Iterator[None]:
    module, _, attribute = name.rpartition(".")
    of = importlib.import_module(module)
    own = getattr(of, attribute)
    setattr(of, attribute, by)
    try:
        yield
    finally:
        setattr(of, attribute, own)


def link_and_optimise(library: Any) -> None:
    """The first half of a Numba library's `finalize`. The second would generate code in Numba's own engine and keep it."""
    for used in dict.fromkeys(library._linking_libraries):
        library._final_module.link_in(used._get_module_for_linking(), preserve=True)
    library._optimize_final_module()


def definition_of(value: object) -> Any:
    """The function that defines an intrinsic; None if the value is none."""
    return getattr(value, "_defn", None)
