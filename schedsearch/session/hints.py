"""Warm start from similar tasks: the template's fastest configurations there are tried early, the rest teach the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from schedsearch.config import Config
from schedsearch.measurement import OTHER_MODES
from schedsearch.records.damage import DamageError
from schedsearch.records.evidence import thinned
from schedsearch.records.shipped import shipped_records
from schedsearch.space import ConfigSpace
from schedsearch.template import Template
from schedsearch.workload import Workload, distance

MAX_READ = 8  # similar tasks that are looked at
MAX_HINTS = 4  # each costs a trial
MAX_SOURCES = 4  # tasks whose results are offered to the model
SOURCE_RESULTS = 400  # of each at most
FEWEST_RESULTS = 32  # of all sources together: fewer teach nothing

Results = Sequence[tuple[Config, "float | None"]]  # a time in ns, None for a failure


@dataclass(frozen=True)
class Known:
    """Another task on which the template was tried. `read` gets its results; it is called for the nearest tasks only.

    Attributes:
        imported: the results come from elsewhere. Those of the very task that starts are then no results of its own, but the
            nearest evidence that there is.
    """

    workload: Workload
    target: str
    read: Callable[[], Results]
    imported: bool = False


@dataclass(frozen=True)
class WarmStart:
    """Configurations to propose early, and results to learn from, one sequence per task."""

    hints: tuple[Config, ...] = ()
    sources: tuple[Results, ...] = ()


COLD = WarmStart()


def warm_start(workload: Workload, target: str, space: ConfigSpace, known: Iterable[Known]) -> WarmStart:
    """Takes the `MAX_READ` most similar tasks, and of them at most `MAX_HINTS` hints and `MAX_SOURCES` sources.

    Tasks of the same target come first, then those of other targets, each ordered by the similarity of their workloads
    (`schedsearch.workload.distance`). Records of the task itself are left out, because they are results, unless they were
    imported. Hints are distinct and
    legal in the space. Of a source the tuner drops configurations that are not.

    Args:
        target: key of the task's target.
        known: other tasks, for the same version of one template; if a task is listed twice, the first entry counts.
    """
    by_task: dict[tuple[Workload, str], Known] = {}
    for each in known:
        if each.imported or (each.workload, each.target) != (workload, target):
            by_task.setdefault((each.workload, each.target), each)
    ranked = sorted(
        by_task.values(), key=lambda each: (each.target != target, distance(workload, each.workload), each.workload.json)
    )
    hints: dict[Config, None] = {}
    sources: list[Results] = []
    for each in ranked[:MAX_READ]:
        results = thinned(_ranked(each.read()), SOURCE_RESULTS)
        if not results or results[0][1] is None:
            continue
        fastest = results[0][0]
        if len(hints) < MAX_HINTS and not space.check(fastest):
            hints[fastest] = None
        if len(sources) < MAX_SOURCES:
            sources.append(results)
    enough = sum(len(results) for results in sources) >= FEWEST_RESULTS
    return WarmStart(tuple(hints), tuple(sources) if enough else ())


def shipped_results(workload: Workload, target: str, template: Template, mode: str) -> Results:
    """The configuration of a template that is shipped for a task; none if another one is, or none at all. Where none is
    shipped in the mode, one of another mode is a hint, too."""
    shipped = shipped_records(target)
    try:
        rows = (shipped.exact(workload.id, target, each) for each in (mode, *OTHER_MODES[mode]))
        row = next((row for row in rows if row is not None), None)
    except DamageError:
        return ()
    if row is None or (row.template, row.template_version) != (template.name, template.version):
        return ()
    return [(template.current(Config.from_json(row.config_json)), row.time_ns)]


def combined(read: Callable[[], Results], more: Results) -> Results:
    """What `read` gives, and `more`."""
    return [*read(), *more]


def _ranked(results: Results) -> Results:
    """The fastest first, failures last."""
    return sorted(results, key=lambda result: (result[1] is None, result[1] or 0.0, result[0].json))
