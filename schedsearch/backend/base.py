"""What every backend returns and raises. Imports no compiler, so that any layer above may name these types."""

from __future__ import annotations

from dataclasses import dataclass

from schedsearch.launch import Artifact
from schedsearch.measurement import Resources


@dataclass(frozen=True)
class BuildResult:
    """One compiled candidate.

    Attributes:
        artifact: machine code with its launch plan.
        resources: what the compiler says the kernels use, the largest over the steps.
        canonical_hash: hex digest of the code with compiler-made names normalised: equal for schedules that compile to the
            same machine code, in whatever process they were compiled.
        compile_s: wall seconds from Python function to artifact.
        shared: every step was made of work that other candidates or later runs share. False says that this candidate, and
            probably all of its template, takes several times longer than need be: on a GPU a step has no `shaped_by`, or
            needs a captured number that `shaped_by` does not name; or a step captures what no other process can name.
    """

    artifact: Artifact
    resources: Resources
    canonical_hash: str
    compile_s: float
    shared: bool = True


class CompileError(Exception):
    """The compiler refused the kernel; the text is the compiler's. A candidate's failure: outcome `compile_error`."""


class RejectedError(Exception):
    """The kernel compiled but is unfit to run: spills, registers x threads, shared memory, serialised wgmma. A candidate's
    failure: outcome `rejected`. The text says what, how much, and the limit."""
