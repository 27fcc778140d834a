"""A trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from schedsearch.dashboard.views.noise import Doubt, Mode
from schedsearch.dashboard.views.values import JSON


@dataclass(frozen=True)
class Difference:
    """A knob in which a trial differs from the best one. `here` or `best` is None if that template lacks the knob.

    Attributes:
        ratio: what the change from `here` to `best` does to the time (see `PairEffect`); None without a measured pair.
    """

    knob: str
    here: JSON
    best: JSON
    ratio: float | None
    low: float | None
    high: float | None
    pairs: int


@dataclass(frozen=True)
class Command:
    """A command to copy, and what it is for."""

    purpose: str
    command: str


@dataclass(frozen=True)
class Fact:
    """A name and a string to show in a table."""

    name: str
    value: str


@dataclass(frozen=True)
class TrialView:
    """Everything about a trial.

    Attributes:
        times_ns: every repetition in the order of measurement.
        doubt, words: why the time is not to be trusted, and a sentence about it.
        modes: the two groups of the repetitions; [] if they are one.
        registers, shared_bytes, local_bytes, spill_bytes: None on a CPU, whose compiler does not say, and without code.
        ratio_to_best: its time over that of the best trial that compares with it; None without a time.
        occupancy: blocks per multiprocessor times threads per block over what the device allows, as registers and shared
            memory limit it. `blocks_per_sm` and `block_threads` belong to it. None if it is not known; then
            `occupancy_note` says why. Threads are those of the stored plan, or else of the installed template.
        facts: toolchain, clocks, host, card, source, hashes, time stamps, as strings.
        plan: the launch plan as JSON if the code is stored, otherwise None.
        code: listings of stored code: "SASS" or "Assembly" -> text; empty without any. `code_note` says why there is none,
            or that it was cut.
        differences: from the best trial; [] if it is the best. `other_template`: the best is of another template, so that
            configs cannot be compared knob by knob.
        profiles: what Nsight Compute read, as JSON (`schedsearch records show --json`).
    """

    key: str
    task: str
    task_name: str
    database: str
    id: int
    template: str
    template_version: int
    config: Mapping[str, JSON]
    outcome: str
    message: str
    time_ns: float | None
    times_ns: tuple[float, ...]
    spread: float | None
    doubt: Doubt
    words: str
    modes: tuple[Mode, ...]
    race: bool
    best: bool
    best_key: str | None
    best_ns: float | None
    ratio_to_best: float | None
    prediction: float | None
    model: int | None
    batch: int
    max_error: float | None
    registers: int | None
    shared_bytes: int | None
    local_bytes: int | None
    spill_bytes: int | None
    code_bytes: int | None
    occupancy: float | None
    blocks_per_sm: int | None
    block_threads: int | None
    occupancy_note: str
    build_s: float
    run_s: float
    started_at_s: float
    finished_at_s: float
    facts: tuple[Fact, ...]
    clocks: Mapping[str, JSON]
    plan: JSON
    code: Mapping[str, str]
    code_note: str
    other_template: bool
    differences: tuple[Difference, ...]
    commands: tuple[Command, ...]
    profiles: tuple[JSON, ...]
    notes: tuple[str, ...]
