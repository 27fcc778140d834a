"""The parts of its collaborators that the tuning loop uses; tests and benchmarks supply their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from schedsearch.config import Config
from schedsearch.measurement import Measurement, Record
from schedsearch.processes.requests import Candidate, RangeCandidate
from schedsearch.space import ConfigSpace
from schedsearch.typed import JsonMapping, JsonObject
from schedsearch.workload import Workload

if TYPE_CHECKING:
    from schedsearch.launch import Artifact
    from schedsearch.processes.builder import Built


class TunerLike(Protocol):
    """What the loop uses of a tuner (`schedsearch.tuner.base.Tuner`)."""

    batch: int

    @property
    def finished(self) -> bool: ...
    def ask(self, n: int) -> list[Config]: ...
    def tell(self, results: Sequence[tuple[Config, float | None]]) -> None: ...
    def transfer(self, sources: Sequence[Sequence[tuple[Config, float | None]]]) -> None: ...
    def predict(self, configs: Sequence[Config]) -> Any: ...


class TunerFactory(Protocol):
    def __call__(
        self,
        name: str,
        space: ConfigSpace,
        *,
        seed: int,
        default: Config | None,
        exclude: Collection[Config],
        hints: Sequence[Config],
    ) -> TunerLike: ...


class BuilderLike(Protocol):
    """What the loop uses of `schedsearch.measure.Builder`."""

    @property
    def pending(self) -> int: ...
    def submit(self, candidate: Candidate) -> int: ...
    def submit_reference(self, workload: Workload) -> int: ...
    def withdraw(self, tokens: Collection[int]) -> set[int]: ...
    def poll(self, timeout_s: float) -> list[tuple[int, Built | Measurement]]: ...


class RangeBuilderLike(Protocol):
    """What the choice of kernels for a range uses of `schedsearch.measure.Builder`."""

    def submit_range(self, candidate: RangeCandidate) -> int: ...
    def submit_reference(self, workload: Workload) -> int: ...
    def poll(self, timeout_s: float) -> list[tuple[int, Built | Measurement]]: ...


class RunnerLike(Protocol):
    """What the loop uses of `schedsearch.measure.Runner`; called from one thread at a time, not always the main one."""

    @property
    def prepare_s(self) -> float: ...
    @property
    def reference_s(self) -> float: ...
    def prepare(self, workload: Workload) -> None: ...
    def learn_reference(self, workload: Workload, artifact: Artifact) -> None: ...
    def measure(self, workload: Workload, built: Built, best_ns: float | None) -> Measurement: ...
    def race(self, workload: Workload, built: Sequence[Built]) -> list[Measurement]: ...


@runtime_checkable
class FarRunnerLike(RunnerLike, Protocol):
    """What the loop uses, besides, of a runner whose device is elsewhere and may go away and come back
    (`schedsearch.fleet.runner.FleetRunner`). Its calls raise AwayError when that happens."""

    @property
    def batch(self) -> int: ...
    @property
    def is_there(self) -> bool: ...
    @property
    def gone_for_good(self) -> str: ...
    def measure_many(self, jobs: Sequence[tuple[Workload, Built, float | None]]) -> list[Measurement | Exception]: ...


class StoreLike(Protocol):
    """What the loop uses of `schedsearch.records.store.Store`."""

    def append_all(self, records: Sequence[Record], run_so_far: JsonMapping | None = None) -> list[int]: ...
    def promote(self, record_id: int, artifact: Artifact, *, if_faster: bool, raced: Sequence[Record] = ()) -> bool: ...
    def demote(self, record: Record) -> bool: ...
    def best(self, workload: Workload, target_key: str, mode: str) -> Record | None: ...
    def start_run(self, info: JsonObject) -> str: ...
    def finish_run(self, run_id: str, summary: JsonObject) -> None: ...
    def measured(
        self,
        workload: Workload,
        target_key: str,
        template: str,
        version: int,
        mode: str,
        toolchain: Mapping[str, str] | None,
    ) -> Mapping[Config, Record]: ...
    def last_race(
        self, workload: Workload, target_key: str, mode: str, toolchain: Mapping[str, str]
    ) -> Sequence[Record]: ...
    def tuned(self, op: str, template: str, version: int, mode: str) -> Sequence[tuple[Workload, str]]: ...
    def evidence(
        self, workload: Workload, target_key: str, template: str, version: int, mode: str, *, limit: int, imported: bool
    ) -> Sequence[tuple[Config, float | None]]: ...
