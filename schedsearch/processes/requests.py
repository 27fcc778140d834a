"""What builders are asked for: candidates of one size, of a range of sizes, references, and functions that compile; and what
they return."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from schedsearch.backend import BuildResult
from schedsearch.backend.shipping import pack
from schedsearch.config import Config
from schedsearch.deadline import NEVER, Deadline
from schedsearch.errors import UsageError
from schedsearch.launch import Artifact
from schedsearch.launch_sizes import SizedPlan
from schedsearch.measurement import Measurement, Resources
from schedsearch.processes.build_worker import BuildTask, CallTask, ReferenceTask, Task
from schedsearch.processes.range_build import RangeResult, RangeTask
from schedsearch.target import Target
from schedsearch.template import Template
from schedsearch.workload import Workload, WorkloadRange

_UNNUMBERED = -1


@dataclass(frozen=True)
class Candidate:
    """One way to run one workload. Each candidate gets an outcome."""

    workload: Workload
    template: Template
    config: Config


@dataclass(frozen=True)
class RangeCandidate:
    """One way to run the sizes of a range that share machine code with the size `origin`.

    Attributes:
        config: None: the template's rule-based configuration for `origin`.
        restrict: knob -> the only values that this configuration may have.
    """

    of_range: WorkloadRange
    template: Template
    config: Config | None
    origin: int
    restrict: Mapping[str, Sequence[int | str | bool]] = field(default_factory=dict)


@dataclass(frozen=True)
class Built:
    """A candidate that compiled.

    Attributes:
        canonical_hash: equal for candidates that compiled to the same code and launch; measure only one of these.
        build_s: wall seconds from configuration to artifact, in the worker.
        shared: as in `BuildResult`.
    """

    artifact: Artifact
    resources: Resources
    canonical_hash: str
    build_s: float
    shared: bool = True


@dataclass(frozen=True, kw_only=True)
class BuiltRange(Built):
    """A `RangeCandidate` that compiled. `artifact` is that of its origin.

    Attributes:
        config: what was built.
        plan: the launch plan of each size that the machine code serves; each was checked.
    """

    config: Config
    plan: SizedPlan


class Submitting(abc.ABC):
    """The requests of a builder, wherever its processes are, and waiting for all of them."""

    @property
    @abc.abstractmethod
    def pending(self) -> int:
        """The number of candidates that were submitted and not yet returned by `poll`."""

    @abc.abstractmethod
    def poll(self, timeout_s: float = 0.0) -> list[tuple[int, Built | Measurement]]:
        """The finished candidates. Waits up to `timeout_s` for the first, but not at all when nothing is pending."""

    @abc.abstractmethod
    def submit_task(self, task: Task) -> int:
        """Queues what `poll` reports under the token that this returns; the task's own token does not count."""

    def submit(self, candidate: Candidate) -> int:
        """Queues a candidate; returns the token under which `poll` reports it.

        Raises:
            UsageError: the workers cannot import the template's class by name.
        """
        return self.submit_task(BuildTask(_UNNUMBERED, _location(candidate.template), candidate.workload, candidate.config))

    def submit_range(self, candidate: RangeCandidate) -> int:
        """Queues a configuration for many sizes; `poll` reports it as a `BuiltRange`, or as a failure like others.

        Raises:
            UsageError: as `submit`.
        """
        location, restrict = _location(candidate.template), dict(candidate.restrict)
        return self.submit_task(
            RangeTask(_UNNUMBERED, location, candidate.of_range, candidate.config, candidate.origin, restrict)
        )

    def submit_reference(self, workload: Workload) -> int:
        """Queues the reference kernel of a workload; `poll` reports it like a candidate. It is `rejected` if the operator's
        reference is not a kernel."""
        return self.submit_task(ReferenceTask(_UNNUMBERED, workload))

    def submit_call(self, make: Callable[[Target], BuildResult | RangeResult]) -> int:
        """Queues a function that compiles something for the target; `poll` reports it like a candidate, and as `rejected`
        what the compiler refuses.

        Raises:
            UsageError: it captures something that cannot be sent to another process.
        """
        return self.submit_task(CallTask(_UNNUMBERED, pack(make)))

    def drain(self, deadline: Deadline = NEVER) -> list[tuple[int, Built | Measurement]]:
        """Waits until the builder is idle, or the deadline has passed; returns all finished candidates."""
        done = []
        while self.pending and not deadline.passed:
            done += self.poll(min(1.0, deadline.left_s))
        return done + self.poll()


def _location(template: Template) -> str:
    cls = type(template)
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        raise UsageError(
            f"template {cls.name!r} is defined in {cls.__module__}.{cls.__qualname__}, which the compiler processes cannot "
            "import; move the class to the top level of a module of its own"
        )
    return f"{cls.__module__}:{cls.__qualname__}"
