"""The builders of a run: one for each kind of device, behind one queue of finished candidates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from schedsearch.measurement import Measurement
from schedsearch.processes.requests import Candidate
from schedsearch.session.collaborators import BuilderLike
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from schedsearch.processes.builder import Built

Token = tuple[str, int]
"""The key of a kind of device, and the number that its builder gave."""


class Builders:
    """Builds for several kinds of devices, which are told apart by `Target.key`."""

    def __init__(self, of_kind: Mapping[str, BuilderLike]) -> None:
        self._of_kind = dict(of_kind)

    def submit(self, kind: str, candidate: Candidate) -> Token:
        return kind, self._of_kind[kind].submit(candidate)

    def submit_reference(self, kind: str, workload: Workload) -> Token:
        return kind, self._of_kind[kind].submit_reference(workload)

    def withdraw(self, tokens: Iterable[Token]) -> set[Token]:
        """Takes candidates back that no builder has begun; returns their tokens."""
        wanted: dict[str, set[int]] = {}
        for kind, number in tokens:
            wanted.setdefault(kind, set()).add(number)
        return {(kind, number) for kind, numbers in wanted.items() for number in self._of_kind[kind].withdraw(numbers)}

    def poll(self, timeout_s: float) -> list[tuple[Token, Built | Measurement]]:
        """What is finished. Waits up to `timeout_s` for the first."""
        if len(self._of_kind) > 1:
            done = self._poll(0.0)
            return done or self._poll(timeout_s / len(self._of_kind))
        return self._poll(timeout_s)

    def _poll(self, each_s: float) -> list[tuple[Token, Built | Measurement]]:
        return [
            ((kind, number), result) for kind, builder in self._of_kind.items() for number, result in builder.poll(each_s)
        ]
