"""Kernels that may begin while the one before them in the stream still runs: programmatic dependent launch.

Each block waits until the kernel before it is complete and what that wrote is visible, and then lets the kernel behind it
begin. Every kernel of a chain waits, so completeness passes down: a kernel that has waited for its direct predecessor, which
has waited for its own, may read whatever an earlier one wrote and overwrite what an earlier one read. Without the attribute
of the launch both instructions do nothing.

A template may place the wait itself (`schedsearch.backend.ops.wait_for_predecessor`) and read constants before it. All other
kernels wait at their start.

Source: PTX ISA, "griddepcontrol"; CUDA programming guide, "Programmatic dependent launch and synchronization".
See docs/decisions/230-kernels-begin-early.md and 241-constants-are-read-before-the-wait.md.
"""

from __future__ import annotations

import re

WAIT = "griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;"
_LEAST = 90  # the first compute capability, times 10


def is_possible(arch: str) -> bool:
    """Whether code for an architecture such as sm_90a may have these instructions."""
    match = re.fullmatch(r"sm_(\d+)[a-z]?", arch)
    return match is not None and int(match[1]) >= _LEAST


def with_wait(ptx: str, entry: str, arch: str) -> str:
    """The text of a kernel that waits: at its start, unless it says where. Without the instructions if there are none."""
    if not is_possible(arch):
        return re.sub(r"^\s*griddepcontrol\.\w+;\n", "", ptx, flags=re.MULTILINE)
    body = ptx.index("{\n", ptx.index(f".entry {entry}(")) + 2
    return ptx if "griddepcontrol.wait" in ptx[body:] else f"{ptx[:body]}\t{WAIT}\n{ptx[body:]}"
