"""The references of operators as templates, so that a `Builder` compiles them in parallel before they verify kernels."""

from __future__ import annotations

from schedsearch.config import Config
from schedsearch.measure.builder import Candidate
from schedsearch.space import ConfigSpace, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, Template, load_reference
from schedsearch.workload import Workload

_ONLY = Config({"naive": 1})


def reference_candidate(workload: Workload) -> Candidate | None:
    """The kernel that verifies a workload, for `Builder.submit`; None if the reference works without one.

    Raises:
        SchedsearchError: the operator's reference cannot be imported.
    """
    return Candidate(workload, ReferenceKernels(), _ONLY) if load_reference(workload.op).pointwise else None


class ReferenceKernels(Template):
    """The naive kernel of each operator's reference, in one configuration. Not a template that a search may choose."""

    name = "reference"

    def validate(self, workload: Workload, target: Target) -> str | None:
        return None

    def space(self, workload: Workload, target: Target) -> ConfigSpace:
        return ConfigSpace([Knob("naive", (1,), "the only configuration")])

    def default(self, workload: Workload, target: Target, space: ConfigSpace) -> Config:
        return _ONLY

    def kernel(self, workload: Workload, target: Target, config: Config) -> KernelSource:
        return load_reference(workload.op).kernel(workload, target)
