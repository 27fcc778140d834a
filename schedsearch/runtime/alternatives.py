"""What a fallback level offers for a workload, as values: an alternative, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schedsearch.config import Config
from schedsearch.device import Device, LoadedKernel
from schedsearch.runtime.kernel import Provenance

if TYPE_CHECKING:
    from schedsearch.backend import BuildResult
    from schedsearch.records.lookup import LookupRow
    from schedsearch.runtime.ahead import Recipe


class Refusal(Exception):
    """The reason why an alternative cannot be taken. It never leaves this package: the next alternative is tried."""


@dataclass(frozen=True)
class Alternative:
    """One way to get a kernel.

    Attributes:
        level, reason: its level, and a description in words.
        template, config: the template and configuration of the kernel.
        check: raises `Refusal`, SchedsearchError or ImportError if it cannot be taken, as far as this can be seen without a
            device and without compiling.
        load: returns the kernel and whether it is verified for this workload on this kind of device; raises the same errors.
        time_ns, record_id: of the record, if there is one for this workload and device.
        verifies: whether `load` compares the kernel with the reference.
        recipe: what `load` compiles; None: there is stored code.
        shipped: the shipped record that it comes from; None: from none.
        mode: how its record was timed; "": in the mode that was asked for.
    """

    level: str
    reason: str
    template: str
    config: Config
    check: Callable[[], None]
    load: Callable[[Device], tuple[LoadedKernel, bool]]
    time_ns: float | None = None
    record_id: int | None = None
    verifies: bool = False
    recipe: Callable[[], Recipe[BuildResult]] | None = None
    shipped: LookupRow | None = None
    mode: str = ""

    @property
    def recorded(self) -> bool:
        """Whether it comes from a record."""
        return self.record_id is not None


@dataclass(frozen=True)
class Miss:
    """A level without any alternative.

    Attributes:
        recorded: whether the database has a record for it, though not one that can be read.
    """

    level: str
    reason: str
    recorded: bool = False


@dataclass(frozen=True)
class Found:
    """What the fallback levels gave."""

    loaded: LoadedKernel
    verified: bool
    provenance: Provenance
