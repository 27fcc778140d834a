"""Kernels that may begin while the one before them in the stream still runs: programmatic dependent launch.

Each block waits until the kernel before it is complete and what that wrote is visible, and then lets the kernel behind it
begin. Every kernel of a chain waits, so completeness passes down: a kernel that has waited for its direct predecessor, which
has waited for its own, may read whatever an earlier one wrote and overwrite what an earlier one read. Without the attribute
of the launch both instructions do nothing.

A template may place the wait itself (`schedsearch.backend.ops.wait_for_predecessor`) and read constants before it. All other
kernels wait at their start. Constants must be read by `ld.global`, not by `ld.global.nc`: ptxas takes what the latter reads
for read-only, and moves the wait up in front of it. It keeps the order of the wait and every other access.

With the environment variable `SCHEDSEARCH_SLOW_BLOCKS` each wait is surrounded by idle times, up to so many nanoseconds and
drawn anew by each warp, so that tests see kernels meet in rare orders.

Source: PTX ISA, "griddepcontrol"; CUDA programming guide, "Programmatic dependent launch and synchronization".
See docs/decisions/230-kernels-begin-early.md and 241-constants-are-read-before-the-wait.md.
"""

from __future__ import annotations

import os
import re

from schedsearch.target import Architecture

SLOW_BLOCKS = "SCHEDSEARCH_SLOW_BLOCKS"  # for tests: the longest idle time before and after a wait, in nanoseconds
WAIT = "griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;"
_LEAST = 9, 0  # the first compute capability


def is_possible(arch: str) -> bool:
    """Whether code for an architecture such as sm_90a may have these instructions."""
    return Architecture.parse(arch).capability >= _LEAST


def with_wait(ptx: str, entry: str, arch: str) -> str:
    """The text of a kernel that waits: at its start, unless it says where. Without the instructions if there are none."""
    if not is_possible(arch):
        return re.sub(r"^\s*griddepcontrol\.\w+;\n", "", ptx, flags=re.MULTILINE)
    body = ptx.index("{\n", ptx.index(f".entry {entry}(")) + 2
    text = ptx if "griddepcontrol.wait" in ptx[body:] else f"{ptx[:body]}\t{WAIT}\n{ptx[body:]}"
    longest_ns = slow_blocks()
    return text.replace(WAIT, f"{_idle(longest_ns)}\n\t{WAIT}\n\t{_idle(longest_ns)}") if longest_ns else text


def slow_blocks() -> int:
    """The longest idle time around a wait; 0 unless the environment asks for it."""
    text = os.environ.get(SLOW_BLOCKS, "0")
    return int(text) if text.isdecimal() else 0


def _idle(longest_ns: int) -> str:
    """A warp idles for up to `longest_ns`. The clock of its multiprocessor, hashed, says for how long."""
    return (
        "{ .reg .pred p; .reg .u64 begin, now; .reg .u32 ns; mov.u32 ns, %clock; mul.lo.u32 ns, ns, 2654435769; "
        f"mul.hi.u32 ns, ns, {longest_ns}; cvt.u64.u32 now, ns; mov.u64 begin, %globaltimer; add.u64 begin, begin, now; "
        "again: mov.u64 now, %globaltimer; setp.lt.u64 p, now, begin; @p bra again; }"
    )
