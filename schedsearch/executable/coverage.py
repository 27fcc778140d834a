"""How much of a model has records for a device: its layers, where their records come from, and what the rest would take."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from schedsearch.deadline import NEVER
from schedsearch.errors import DatabaseError, UnsupportedError, UsageError
from schedsearch.executable.build_options import BuildOptions
from schedsearch.executable.lowering import lowered
from schedsearch.executable.reading import read
from schedsearch.measurement import COLD_GRAPH, DEFAULT_DB, OTHER_MODES
from schedsearch.network.costs import RecordCosts, costs_of
from schedsearch.network.graph import Control, Network
from schedsearch.network.plan import best_plan
from schedsearch.records.damage import DamageError
from schedsearch.records.lookup import Lookup
from schedsearch.records.shipped import Shipped, shipped_records
from schedsearch.runtime.fallback import Fallback
from schedsearch.session.options import DEFAULT_TRIALS
from schedsearch.session.plan import plan_tasks
from schedsearch.session.preview import preview
from schedsearch.target import Target
from schedsearch.task import Task
from schedsearch.template import load_templates
from schedsearch.text import counted, duration, seconds
from schedsearch.workload import Workload

Source = Literal["own", "shipped", "near", "none"]


@dataclass(frozen=True)
class CoveredLayer:
    """A kernel that a model needs.

    Attributes:
        label: of its workload.
        count: how often the model runs it.
        source: own: the database has a record of it on this kind of device. shipped: the package has one. near: neither, but
            a look-up would take another layer's record, a shipped one only if it is similar. none: it would take the
            default.
        time_ns: of one run: recorded, or estimated from similar records or the roofline.
        reason: where the time comes from.
    """

    label: str
    count: int
    source: Source
    time_ns: float
    reason: str


@dataclass(frozen=True)
class Coverage:
    """What of a model has records.

    Attributes:
        target: key of the device.
        layers: the ones that take the most time first.
        shipped: the file of shipped records, or why there is none.
        tuning_s: roughly how long tuning the layers without a record of their own takes, at 64 trials each; 0 if there are
            none.
        notes: what is strange about the records, a line each.
    """

    target: str
    layers: tuple[CoveredLayer, ...]
    shipped: str
    tuning_s: float
    notes: tuple[str, ...] = ()

    def count(self, source: Source) -> int:
        """How many different layers have records from there."""
        return sum(each.source == source for each in self.layers)

    def share(self, source: Source) -> float:
        """The share of these layers in the predicted time, 0 to 1."""
        total = sum(each.count * each.time_ns for each in self.layers)
        part = sum(each.count * each.time_ns for each in self.layers if each.source == source)
        return part / total if total else 0.0

    @property
    def lines(self) -> list[str]:
        total = sum(each.count * each.time_ns for each in self.layers)
        found = [f"{counted(len(self.layers), 'different layer')} on {self.target}, predicted {duration(total)}"]
        names: tuple[tuple[Source, str], ...] = (
            ("own", "in the database"),
            ("shipped", "shipped"),
            ("near", "by another layer's record"),
            ("none", "without a record"),
        )
        shown = [(each, name) for each, name in names if each != "near" or self.count(each)]
        found += [f"{self.count(each):6} {name}, {self.share(each):.0%} of the time" for each, name in shown]
        found.append(f"shipped records: {self.shipped}")
        if self.tuning_s:
            found.append(f"tuning the rest takes about {seconds(self.tuning_s)} ({DEFAULT_TRIALS} trials each)")
        return [*found, *self.notes]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def to_json(self) -> dict[str, Any]:
        sources: tuple[Source, ...] = ("own", "shipped", "near", "none")
        return {
            "target": self.target,
            "layers": [asdict(each) for each in self.layers],
            "counts": {each: self.count(each) for each in sources},
            "shares": {each: round(self.share(each), 4) for each in sources},
            "shipped": self.shipped,
            "tuning_s": round(self.tuning_s, 1),
            "notes": list(self.notes),
        }


def coverage(
    model: Any,
    example: Any = None,
    *,
    db: str | os.PathLike[str] = DEFAULT_DB,
    target: str | Target = "auto",
    dtype: str | None = None,
    layout: str = "auto",
    shapes: Mapping[str, Sequence[int]] | None = None,
    inputs: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Coverage:
    """How much of a model has records for a device, own and shipped ones; compiles and measures nothing.

    Args:
        model: the path of an ONNX file or of a workload file (.yaml), a torch module, or a list of `Task`s.
        example: of the input of a torch module; its shape and dtype count.
        db: the database of records; it may be missing.
        target: auto, cpu, cuda, cuda:N, or a `Target`, whose card need not be here.
        dtype, layout, shapes, inputs: as of `schedsearch.build`, which would look for these kernels.
        mode: how the records were timed; default: as `schedsearch.build` asks for, and for layers cold-graph-v1.

    Raises:
        UsageError, UnsupportedError: the model cannot be read, or has what no kernel computes, as of `build`.
        DatabaseError, DeviceError: the database or the device cannot be used.

    Examples:
        >>> print(schedsearch.coverage(model, torch.zeros(1, 3, 224, 224), target="cuda", dtype="float16"))
    """
    options = BuildOptions.of(
        NEVER, target=target, db=db, dtype=dtype, layout=layout, mode=mode, check=False, inputs=dict(inputs or {})
    )
    tasks = _given_tasks(model, options.target)
    if tasks is not None:
        if example is not None or shapes or inputs or dtype is not None:
            raise UsageError("layers have their shapes and dtypes; leave out example, dtype, shapes and inputs")
        options = replace(options, mode=mode or COLD_GRAPH)
        with costs_of(None, db, options.target, options.mode) as costs:
            return _covered({task.workload: int(task.weight) for task in tasks}, options, costs)
    network = network_of(model, example, shapes or {}, options)
    with costs_of(network, db, options.target, options.mode) as costs:
        return _covered(needed(network, costs, layout), options, costs)


def network_of(model: Any, example: Any, shapes: Mapping[str, Sequence[int]], options: BuildOptions) -> Network:
    """The network that `schedsearch.build` makes of a model. Raises as `coverage`."""
    graph, _ = read(model, example, shapes, options)
    return graph if isinstance(graph, Network) else lowered(graph, options)


def needed(network: Network, costs: RecordCosts, layout: str = "auto") -> dict[Workload, int]:
    """The workloads that `schedsearch.build` looks up for a network, and how often it runs each."""
    plan = best_plan(network, costs, layout)
    counts: dict[Workload, int] = {}
    for workload in plan.workloads:
        counts[workload] = counts.get(workload, 0) + 1
    for body in (each for node in network.nodes if isinstance(node, Control) for each in node.networks):
        for workload, count in needed(body, costs).items():
            counts[workload] = counts.get(workload, 0) + count
    return counts


def _given_tasks(model: Any, target: Target) -> list[Task] | None:
    """The tasks of a workload file or a list; None for a model."""
    if isinstance(model, str | os.PathLike) and Path(model).suffix in (".yaml", ".yml"):
        from schedsearch.workload_file import load

        return [task for task in load(Path(model)).resolve(target).tasks if task.of_range is None]
    if isinstance(model, list | tuple) and model and all(isinstance(each, Task) for each in model):
        return list(model)
    return None


def _covered(counts: Mapping[Workload, int], options: BuildOptions, costs: RecordCosts) -> Coverage:
    shipped = shipped_records(options.target.key)
    with _opened(options.db) as lookup:
        sources = {each: _source(each, options, lookup, shipped) for each in counts}
    found = {each: costs(each) for each in counts}
    layers = [
        CoveredLayer(each.label, counts[each], sources[each], found[each].time_ns, found[each].reason)
        for each in counts
        if found[each].origin != "none"
    ]
    notes = [f"no kernel for {each.label}: {found[each].reason}" for each in counts if found[each].origin == "none"]
    missing = [each for each in counts if sources[each] in ("near", "none") and found[each].origin != "none"]
    notes += _differences(shipped, options.target)
    layers.sort(key=lambda each: (-each.count * each.time_ns, each.label))
    return Coverage(options.target.key, tuple(layers), shipped.summary, _tuning_s(missing, options.target), tuple(notes))


@contextlib.contextmanager
def _opened(db: Path) -> Iterator[Lookup | None]:
    if not db.exists():
        yield None
        return
    with Lookup(db) as lookup:
        yield lookup


def _source(workload: Workload, options: BuildOptions, lookup: Lookup | None, shipped: Shipped) -> Source:
    modes = options.mode, *OTHER_MODES[options.mode]  # as a look-up falls back
    places: tuple[tuple[Source, Lookup | Shipped | None], ...] = (("own", lookup), ("shipped", shipped))
    for name, place in places:
        with contextlib.suppress(DamageError):
            if place is not None and any(place.exact(workload.id, options.target.key, mode) for mode in modes):
                return name
    fallback = Fallback(workload, options.target, lookup, options.db, options.mode, ("shipped", "nearest"))
    return "near" if any(each.level == "nearest" for each in fallback.viable()) else "none"


def _differences(shipped: Shipped, target: Target) -> list[str]:
    """What of the toolchain differs from that of the shipped records: their configurations are built by this one."""
    from schedsearch.backend import other_versions

    try:
        other = other_versions(target.kind, shipped.manifest.get("toolchain", {}), here="here")
    except ImportError:
        return []
    return [f"shipped records were measured with {', '.join(other)}"] if other else []


def _tuning_s(missing: Sequence[Workload], target: Target) -> float:
    if not missing:
        return 0.0
    with contextlib.suppress(UnsupportedError, DatabaseError):
        plans = plan_tasks(missing, load_templates(), target)
        return preview(plans, [each.label for each in missing], target, trials=DEFAULT_TRIALS, time_s=None).estimate_s
    return 0.0
