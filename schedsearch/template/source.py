"""What a template hands to the backend: Python functions with how they are launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from schedsearch.launch import Grid, Param


@dataclass(frozen=True)
class KernelStep:
    """One Python function to compile and how it is launched.

    `function` takes one argument per entry of `params`: u64 for a Pointer or TensorMap (the address of the map), i32, i64,
    f32. A `Pointer` that is `optional` is 0 where the workload lacks the buffer. A last argument `*operands` receives all
    further params as a tuple. On the CPU two more i64 follow: the half-open range [start, stop) of work items to compute
    (keyword arguments where there are `*operands`); the device splits the work items
    evenly over `block_threads` threads. Knobs are closure constants.

    A kernel may call plain Python functions that it captures or that its module holds, without decorators; they are compiled
    into it, and so is what they call. They may take and return tuples, local arrays and functions, have default arguments
    and return early; they cannot be recursive or take `*args`. Import module-level functions by name: a call of
    `module.function` is not inlined.

    `shaped_by` names the captured integers and booleans that decide the code's shape: lengths of local arrays, conditions
    that leave out branches. All others are then mere numbers to the CUDA backend, and kernels that differ in nothing else
    are built several times faster after the first. None: all of them decide. What a captured function captures is named by
    its path: "ring.stages" for the variable `stages` of the function that the kernel calls `ring`. A name that is not
    captured is an error. A function found in the module, not captured, always decides with all that it captures.

    Other fields as in `Step`.
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


@dataclass(frozen=True)
class KernelSource:
    """What a template hands to the backend. Fields as in `LaunchPlan`; `arch` is e.g. sm_80, sm_90a or native."""

    kind: Literal["cuda", "cpu"]
    arch: str
    steps: tuple[KernelStep, ...]
    workspaces: Mapping[str, int] = field(default_factory=dict)
    alignments: Mapping[str, int] = field(default_factory=dict)
