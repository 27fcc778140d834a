"""Kernels that may begin while the one before them in the stream still runs: programmatic dependent launch.

Each block waits until the kernel before it is complete and what that wrote is visible, and then lets the kernel behind it
begin. Every kernel of a chain waits, so completeness passes down: a kernel that has waited for its direct predecessor, which
has waited for its own, may read whatever an earlier one wrote and overwrite what an earlier one read. Without the attribute
of the launch both instructions do nothing.

Source: PTX ISA, "griddepcontrol"; CUDA programming guide, "Programmatic dependent launch and synchronization".
See docs/decisions/230-kernels-begin-early.md.
"""

from __future__ import annotations

import re

_LEAST = 90  # the first compute capability, times 10
_BEGIN = "\tgriddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;\n"


def is_possible(arch: str) -> bool:
    """Whether code for an architecture such as sm_90a may have these instructions."""
    match = re.fullmatch(r"sm_(\d+)[a-z]?", arch)
    return match is not None and int(match[1]) >= _LEAST


def with_wait(ptx: str, entry: str) -> str:
    """The text of a kernel with both instructions in front of its first one."""
    body = ptx.index("{\n", ptx.index(f".entry {entry}(")) + 2
    return ptx[:body] + _BEGIN + ptx[body:]
