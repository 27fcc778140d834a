"""The measurement of one candidate, and the record that stores it together with its circumstances."""

from __future__ import annotations

import enum
import math
import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from schedsearch.config import Config
from schedsearch.errors import UsageError
from schedsearch.identity import canonical_json
from schedsearch.text import storable_text
from schedsearch.typed import JsonObject

if TYPE_CHECKING:
    from schedsearch.workload import Workload


class Outcome(enum.StrEnum):
    """How a candidate ended. Only ok has times."""

    OK = "ok"
    REJECTED = "rejected"  # found unfit before the device saw it: spills, shared bytes, serialised wgmma
    COMPILE_ERROR = "compile_error"
    COMPILE_TIMEOUT = "compile_timeout"
    LAUNCH_ERROR = "launch_error"
    RUN_TIMEOUT = "run_timeout"
    WRONG_ANSWER = "wrong_answer"
    WORKER_LOST = "worker_lost"  # the builder or runner process died

    @property
    def is_trial(self) -> bool:
        """A static reject costs no trial."""
        return self is not Outcome.REJECTED

    @property
    def is_verified(self) -> bool:
        """Whether the device itself computed a whole output that was compared."""
        return self in (Outcome.OK, Outcome.WRONG_ANSWER)


class Verdict(enum.StrEnum):
    """What the final race of a task found about one of its entrants."""

    NONE = ""  # slower, or not of a race, or of one that an earlier version held
    WON = "won"
    TIED = "tied"  # it cannot be told from the fastest, and the rules for ties prefer another one


DEFAULT_DB = "records.db"
"""The default database of records, in the working folder."""

COLD_GRAPH = "cold-graph-v1"
COLD_GRAPH_PREPARED = "cold-graph-prepared-v1"
HOT_GRAPH = "hot-graph-v1"
CHAIN_GRAPH = "chain-graph-v1"
MODES = (COLD_GRAPH, COLD_GRAPH_PREPARED, HOT_GRAPH, CHAIN_GRAPH)
"""How times are taken; docs/measuring.md explains each mode. Times of different modes are never compared."""
GPU_MODES = (CHAIN_GRAPH,)
"""The modes that only a GPU has."""
PREPARED_MODES = (COLD_GRAPH_PREPARED, CHAIN_GRAPH)
"""The modes whose times leave out what depends on constants alone, as calls with prepared constants do."""


OTHER_MODES = {
    COLD_GRAPH: (CHAIN_GRAPH, COLD_GRAPH_PREPARED, HOT_GRAPH),
    COLD_GRAPH_PREPARED: (CHAIN_GRAPH, COLD_GRAPH, HOT_GRAPH),
    HOT_GRAPH: (CHAIN_GRAPH, COLD_GRAPH, COLD_GRAPH_PREPARED),
    CHAIN_GRAPH: (COLD_GRAPH_PREPARED, COLD_GRAPH, HOT_GRAPH),
}
"""Where a record is looked for next if there is none in a mode: first what times a kernel most alike."""


@dataclass(frozen=True)
class Policy:
    """How a kernel was timed.

    Attributes:
        operands: cold (none is in the cache), hot (all are), or chain (those that the kernel in front has left).
        constants: plain, or prepared before the time is taken.
        launched: graph, or calls in a row on a CPU.
        load: burst, or burst and sustained: in turns with the other entrants of a race while the device got no rest, too.
        clocks: what the device said after timing, e.g. {"sm_mhz": 1980, "throttle": "none"}; {} if it says nothing.
    """

    operands: str
    constants: str
    launched: str
    load: str
    clocks: JsonObject

    def __str__(self) -> str:
        return f"operands {self.operands}, constants {self.constants}, launched as {self.launched}, load {self.load}"


def check_mode(mode: object, kind: str) -> None:
    """Checks a mode of timing.

    Args:
        kind: of the device, cpu or cuda.

    Raises:
        UsageError: there is no such mode, or devices of this kind do not have it.
    """
    allowed = [each for each in MODES if kind == "cuda" or each not in GPU_MODES]
    if mode not in MODES:
        raise UsageError(f"mode {mode!r} is not known; allowed: {', '.join(allowed)}")
    if mode not in allowed:
        raise UsageError(
            f"mode {mode!r} is for GPUs, whose kernels may begin before the one in front of them ends; allowed on a {kind} "
            f"target: {', '.join(allowed)}"
        )


BUSY_SPREAD = 0.2
"""Above this spread of its repeats, other programs disturb a measurement: its time and ratios of it say little."""

MESSAGE_CHARACTERS = 20_000
"""The longest message of a measurement. A longer one keeps its beginning and its end, which say the most."""

_CLOCKS = ("sm_mhz", "memory_mhz", "cpu_mhz", "throttle", "temperature_c", "power_w")
_FACT_CHARACTERS = 1_000  # a host's name, or one of the clocks


def _storable_facts(facts: JsonObject) -> JsonObject:
    """Without numbers that JSON does not have."""
    return {
        storable_text(name, _FACT_CHARACTERS): storable_text(value, _FACT_CHARACTERS) if isinstance(value, str) else value
        for name, value in facts.items()
        if not (isinstance(value, float) and not math.isfinite(value))
    }


@dataclass(frozen=True)
class Resources:
    """The resources of a kernel as the compiler reports them, the largest over its steps."""

    registers: int = 0
    shared_bytes: int = 0
    local_bytes: int = 0
    spill_bytes: int = 0
    code_bytes: int = 0


def sizes_of_mode(mode: str) -> str:
    """The range in the mode of a measurement of code for many sizes (see `session.ranges.range_mode`); "" in others.

    >>> sizes_of_mode("cold-graph-v1/n=1..64")
    'n=1..64'
    """
    return mode.partition("/")[2]


@dataclass(frozen=True)
class Measurement:
    """Outcome of building, verifying and timing one candidate.

    Attributes:
        times_ns: one time per launch and repeat, cold or hot as `mode` says; empty unless the outcome is ok.
        max_error: largest |y - reference| over all elements; None when nothing was compared.
        message: what went wrong, as text; empty when ok. At most `MESSAGE_CHARACTERS`.
        build_s, run_s: wall seconds of building, and of verifying plus timing.
        clocks: e.g. {"sm_mhz": 1980, "memory_mhz": 3201, "throttle": "none"} read after timing.
        host, device_uuid: which machine and which card ran it; "" when nothing ran or it is not known.
        sustained_ns: median of one launch while the device got no rest, with the other entrants of a final race in turns;
            None outside a race, for short kernels, and in records of earlier versions.

    All strings pass through `storable_text`, because they may be those of a candidate.
    """

    outcome: Outcome
    mode: str = COLD_GRAPH
    times_ns: tuple[float, ...] = ()
    resources: Resources = field(default_factory=Resources)
    max_error: float | None = None
    message: str = ""
    build_s: float = 0.0
    run_s: float = 0.0
    clocks: JsonObject = field(default_factory=dict)
    host: str = ""
    device_uuid: str = ""
    sustained_ns: float | None = None

    def __post_init__(self) -> None:
        if bool(self.times_ns) != (self.outcome is Outcome.OK):
            raise ValueError(f"outcome {self.outcome} with {len(self.times_ns)} times; only ok has times, and at least one")
        object.__setattr__(self, "message", storable_text(self.message, MESSAGE_CHARACTERS))
        object.__setattr__(self, "host", storable_text(self.host, _FACT_CHARACTERS))
        object.__setattr__(self, "device_uuid", storable_text(self.device_uuid, _FACT_CHARACTERS))
        object.__setattr__(self, "clocks", _storable_facts(self.clocks))

    @property
    def ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def sizes(self) -> str:
        """The range of sizes that the machine code serves, e.g. n=1..64; "" for code of one size."""
        return sizes_of_mode(self.mode)

    def policy(self, kind: str) -> Policy:
        """How it was timed. `kind` of the device: cpu or cuda."""
        mode = self.mode.partition("/")[0]
        return Policy(
            operands=mode.partition("-")[0],
            constants="prepared" if mode in PREPARED_MODES else "plain",
            launched="graph" if kind == "cuda" else "calls",
            load="burst" if self.sustained_ns is None else "burst and sustained",
            clocks={name: value for name, value in self.clocks.items() if name in _CLOCKS},
        )

    @property
    def time_ns(self) -> float | None:
        """Median of the repeats, or None."""
        return statistics.median(self.times_ns) if self.times_ns else None

    @property
    def spread(self) -> float:
        """Interquartile range over the median; 0 with fewer than four repeats."""
        if len(self.times_ns) < 4:
            return 0.0
        low, middle, high = statistics.quantiles(self.times_ns, n=4)
        return (high - low) / middle

    def to_json(self) -> str:
        return canonical_json(asdict(self))


@dataclass(frozen=True)
class Anchor:
    """The default configuration of a final race, timed in turns with the finalists.

    A hot card slows the anchor and the finalists alike. Two records whose anchors are the same machine code can therefore be
    compared by `Record.anchor_ratio`, although their times come from different runs, days or cards.

    Attributes:
        code: `Built.canonical_hash` of the anchor: equal for the same machine code and launch.
        time_ns: median of its times in the same race.

    Raises:
        ValueError: the code is empty, or the time is not positive.
    """

    code: str
    time_ns: float

    def __post_init__(self) -> None:
        if not self.code or not self.time_ns > 0:
            raise ValueError(
                f"an anchor needs the hash of its code and a time above 0, got {self.code!r} and {self.time_ns}"
            )


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One candidate, its measurement and the circumstances: everything in a record except the workload.

    Attributes:
        target: `Target.key` of the device.
        template, template_version: the template that made the kernel.
        toolchain: versions that shape the code and the times, e.g. {"numba-cuda": "0.30.4", ...}.
        run: id of the tuning run.
        batch: number of the tuner's proposal batch within the run and arm.
        prediction: the cost model's score before the measurement (higher is faster), or None.
        model: number of the model's state that made the prediction, counted within the run, workload and template. Only
            scores of one state are comparable. None without a prediction, and in records of earlier versions.
        started_at, finished_at: wall clock, seconds since the epoch.
        artifact: sha256 of its artifact, which the store need not keep, or None.
        source: "" when measured here, else the origin of the import.
        final_race: whether the times come from the interleaved race at the end of a run.
        anchor: of that race; None outside a race, when no default passed it, and in records of earlier versions.
        verdict: of that race.
    """

    target: str
    template: str
    template_version: int
    config: Config
    measurement: Measurement
    toolchain: dict[str, str] = field(default_factory=dict)
    run: str = ""
    batch: int = 0
    prediction: float | None = None
    started_at: float = 0.0
    finished_at: float = 0.0
    artifact: str | None = None
    source: str = ""
    final_race: bool = False
    model: int | None = None
    anchor: Anchor | None = None
    verdict: Verdict = Verdict.NONE

    @property
    def anchor_ns(self) -> float | None:
        """Time of the default configuration in the same race, or None."""
        return self.anchor.time_ns if self.anchor else None

    @property
    def anchor_ratio(self) -> float | None:
        """`time_ns / anchor_ns`, below 1 when faster than the default; None without a time or an anchor."""
        time_ns = self.measurement.time_ns
        return None if time_ns is None or self.anchor is None else time_ns / self.anchor.time_ns


@dataclass(frozen=True, kw_only=True)
class Record(Attempt):
    """One measured candidate of a workload. The store keeps one row for each."""

    workload: Workload
