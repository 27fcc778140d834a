"""What a template gives to the backend: Python functions, and how to launch them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from schedsearch.launch import Grid, Param


@dataclass(frozen=True)
class KernelStep:
    """One Python function to compile, and how to launch it.

    `function` takes one argument per entry of `params`: u64 for a Pointer or TensorMap (the address of the map), i32, i64,
    f32, an array of Numba for a NumbaArray, a number of its format for a Scalar or a Number, and a constant for a Literal.
    An `optional` `Pointer` is 0 if the workload lacks the buffer. A last argument `*operands` receives all further params
    as a tuple. On the CPU two more i64 follow: the half-open range [start, stop) of work items to compute
    (they are keyword arguments if there are `*operands`). The device divides the work items evenly among `block_threads`
    threads. Knobs are closure constants.

    A kernel may call plain Python functions, without decorators, that it captures or that its module defines. They and the
    functions that they call are compiled into the kernel. They may take and return tuples, local arrays and functions, have
    default arguments and return early. They cannot be recursive or take `*args`. Import module-level functions by name: a
    call of `module.function` is not inlined.

    `shaped_by` names the captured integers and booleans that decide the code's shape: lengths of local arrays, and
    conditions that leave out branches. To the CUDA backend all others are mere numbers, and kernels that differ only in
    these are built several times faster after the first. None: all of them decide. The variables of a captured function are
    named by their path: "ring.stages" is the variable `stages` of the function that the kernel calls `ring`. A name that is
    not captured is an error. A function of the module that is not captured always decides, with everything that it captures.

    `run_time` are the numbers that captured `RunTimeNumber`s stand for (`schedsearch.backend.run_time`). A launch passes
    them after `params`. Templates leave it empty.

    `ahead` names the buffers that the kernel reads before it calls `wait_for_predecessor`; see `Step`.

    `max_registers` limits the registers of a thread (0: no limit). `fastmath` allows approximate division and square root,
    and flushes denormal numbers to zero. Both are for CUDA only. Without `contract` each operation of floats rounds its
    result, as in Python: no product and sum become one operation. The other fields are as in `Step`.
    """

    function: Callable[..., None]
    params: tuple[Param, ...]
    grid: Grid
    block_threads: int
    dynamic_shared_bytes: int = 0
    cluster: int = 1
    min_blocks_per_sm: int = 1
    constant: bool = False
    shaped_by: frozenset[str] | None = None
    block_shape: tuple[int, ...] = ()
    restores: bool = False
    max_registers: int = 0
    fastmath: bool = False
    contract: bool = True
    run_time: tuple[Param, ...] = ()
    ahead: tuple[str, ...] = ()

    @property
    def launch_params(self) -> tuple[Param, ...]:
        """Everything that a launch passes, in order."""
        return (*self.params, *self.run_time)


@dataclass(frozen=True)
class KernelSource:
    """What a template gives to the backend. The fields are as in `LaunchPlan`.

    `arch` is native, the target's own architecture, or names one, such as sm_90a or sm_120f. A CUDA kernel whose registers
    spill is rejected unless it `may_spill`.
    """

    kind: Literal["cuda", "cpu"]
    arch: str
    steps: tuple[KernelStep, ...]
    workspaces: Mapping[str, int] = field(default_factory=dict)
    alignments: Mapping[str, int] = field(default_factory=dict)
    may_spill: bool = False
