"""What a scenario is: one fault, a way to inject it that a seed decides, and what must hold afterwards."""

from __future__ import annotations

import importlib
import pkgutil
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Unit = Literal["tries", "files", "databases"]


@dataclass(frozen=True)
class Scenario:
    """One kind of fault.

    Attributes:
        name: group, a dot and the fault, e.g. `candidate.segfault`.
        what: the fault in words, for the table.
        run: injects the fault once for every seed of a batch, and reports what did not hold by `Batch.failed`. It runs in a
            process of its own, in an empty folder. An exception counts as a failure of the seed that `Batch.each` is at.
        target: the kind of device that it needs.
        unit: which number of the campaign counts its tries: `--n`, `--files` or `--databases`.
        share: the part of that number that this scenario tries, above 1 where tries cost little; the shares of all fuzzers
            of a unit sum to 1.
        batch: how many tries share one process. A process costs a few milliseconds, a tuning run one or two seconds.
        short: how many tries `make test` makes.
        limit_s: wall seconds of a batch on an idle machine, after which it counts as a hang; its runs have limits of their
            own.
    """

    name: str
    what: str
    run: Callable[[Batch], None]
    target: Literal["cpu", "cuda"] = "cpu"
    unit: Unit = "tries"
    share: float = 1.0
    batch: int = 1
    short: int = 0
    limit_s: float = 1200.0

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]


@dataclass
class Batch:
    """The tries of a scenario that share one process.

    Attributes:
        seeds: one for each try. A try draws everything that is random from its seed, so that it can be repeated alone.
        folder: an empty folder, also the working directory. TMPDIR and the state folder lie in it.
        failures: (seed, what did not hold).
        facts: figures for the report, e.g. times before and after a fault.
    """

    seeds: Sequence[int]
    folder: Path
    failures: list[tuple[int, str]] = field(default_factory=list)
    facts: list[dict[str, Any]] = field(default_factory=list)
    current: int | None = None

    def each(self) -> Any:
        """The seeds one after another. An exception that ends the batch is a failure of the present one."""
        for seed in self.seeds:
            self.current = seed
            yield seed

    def failed(self, seed: int, text: str) -> None:
        """Something did not hold."""
        self.failures.append((seed, text))

    def check(self, seed: int, holds: bool, text: str) -> None:
        if not holds:
            self.failed(seed, text)

    def random(self, seed: int, *more: object) -> random.Random:
        """A generator that depends on the seed alone (and on `more`)."""
        return random.Random(repr((seed, *more)))


def catalogue() -> list[Scenario]:
    """All scenarios of this package's modules, in the order of the modules' names."""
    package = importlib.import_module(__package__)
    found: list[Scenario] = []
    for module in pkgutil.iter_modules(package.__path__):
        if not module.name.startswith(("test_", "__")):
            found += getattr(importlib.import_module(f"{__package__}.{module.name}"), "SCENARIOS", [])
    names = [scenario.name for scenario in found]
    assert len(names) == len(set(names)), "two scenarios have one name"
    return found
