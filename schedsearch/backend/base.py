"""The results and errors of every backend. Imports no compiler, so that all layers above may use these types."""

from __future__ import annotations

from dataclasses import dataclass

from schedsearch.launch import Artifact
from schedsearch.measurement import Resources


@dataclass(frozen=True)
class BuildResult:
    """One compiled candidate.

    Attributes:
        artifact: machine code with its launch plan.
        resources: the resources that the compiler reports, the largest over the steps.
        canonical_hash: hex digest of the code with normalised compiler-made names: equal for schedules that compile to the
            same machine code, in any process.
        compile_s: wall seconds from Python function to artifact.
        shared: every step was made from work that other candidates or later runs share. False means that this candidate, and
            probably every one of its template, takes several times longer than necessary: on a GPU a step has no
            `shaped_by`, or needs a captured number that `shaped_by` does not name; or a step captures a value that other
            processes cannot name.
    """

    artifact: Artifact
    resources: Resources
    canonical_hash: str
    compile_s: float
    shared: bool = True


class CompileError(Exception):
    """The compiler refused the kernel; the text is the compiler's. The candidate's outcome is `compile_error`."""


def message_once(error: Exception) -> str:
    """The text of a compiler's exception. Numba repeats the user's line for every pass that was under way: it stays once."""
    said: list[str] = []
    for paragraph in str(error).split("\n\n"):
        place = paragraph.replace("<source missing, REPL/exec in use?>", "").strip()
        if place and place not in said and not place.startswith("During: "):
            said.append(place)
    return "\n".join(said) or str(error)


class RejectedError(Exception):
    """The kernel compiled but is unfit to run: spills, registers x threads, shared memory, serialised wgmma. The
    candidate's outcome is `rejected`. The text says what, how much, and the limit."""
