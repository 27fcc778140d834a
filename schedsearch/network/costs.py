"""What a workload costs on a target: its best recorded time, or an estimate where nobody measured it.

See docs/decisions/131-what-an-unmeasured-kernel-costs.md.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from schedsearch.errors import UnsupportedError
from schedsearch.measurement import CHAIN_GRAPH, COLD_GRAPH, OTHER_MODES
from schedsearch.network.graph import Network, Node
from schedsearch.network.residency import Residency
from schedsearch.records.damage import DamageError
from schedsearch.records.location import require_file
from schedsearch.records.lookup import Lookup, LookupRow
from schedsearch.records.shipped import Shipped, shipped_records, workload_of
from schedsearch.roofline import least_time_ns, suspect_time_ns
from schedsearch.similar import Similar
from schedsearch.target import Target
from schedsearch.workload import Workload

OVER_ROOFLINE = 4.0
"""An operator without any record is taken to need so many times its roofline (`roofline.suspect_time_ns`). The best kernels
of 86 convolutions of ResNet-50, VGG-16 and Inception-v3 at batch 1 on an H200 (benchmarks/results/networks_h200.json) need 2
to 10.6 times theirs, 4.4 times in the geometric mean."""

UNTUNED = 2.0
"""An estimate from the record of a similar workload is raised by this: its kernel was not tuned for the workload."""

NOT_FIRST = 2.0
"""The estimate of an implementation that is not the first of its node is raised by this, too. Layouts have the same
roofline, but not kernels of the same speed. A lowering puts the layout first that the fastest kernels have."""


@dataclass(frozen=True)
class Cost:
    """The cost of one launch of a workload.

    Attributes:
        time_ns: inf if no kernel can run it on the target.
        origin: record: it was measured; scaled: from the record of a similar workload; roofline: from the device's peaks;
            none: no kernel can run it.
        reason: where it comes from, in words.
        least_ns: no kernel is faster; `time_ns` of a record.
        record_id: of the record, if origin is record.
    """

    time_ns: float
    origin: Literal["record", "scaled", "roofline", "none"]
    reason: str
    least_ns: float = 0.0
    record_id: int | None = None

    @property
    def measured(self) -> bool:
        return self.origin == "record"


Costs = Callable[[Workload], Cost]


class RecordCosts:
    """Costs from a database.

    A workload with a record costs the time of the best one, whichever machine measured it, so that a database gives the same
    plan everywhere, less what a call saves in a network (`residency`). Where there is none in the mode that is asked for,
    one in another mode serves, as in a look-up. Any other workload is estimated: the time of the most similar workload of
    the operator (by `workload.distance`; records of the same kind of device come first), times the ratio of the two
    rooflines, times `UNTUNED`. Without any record of the operator it is its roofline times `OVER_ROOFLINE`. Estimates are
    pessimistic, so that a plan takes what was not measured only where it has to.
    `plan.missing` says what is worth measuring.

    Args:
        lookup: None if there are no records.
        shipped: the records that come with the package for the target; they count where `lookup` has none. Default: none.
        mode: how the records were timed.
        network: what the workloads are for; None: nothing is saved. Estimates of implementations that are not the first of a
            node are raised by `NOT_FIRST`.
        check: returns why no kernel runs a workload on the target, or ""; default: asks the templates.

    Examples:
        >>> cost = RecordCosts(None, PRESETS["h200"])(conv2d(n=1, h=14, w=14, c=256, k=256, r=3, s=3, padding=1))
        >>> cost.origin, cost.reason
        ('roofline', '4 times its roofline; there is no record of another conv2d')
    """

    def __init__(
        self,
        lookup: Lookup | None,
        target: Target,
        mode: str = COLD_GRAPH,
        network: Network | None = None,
        check: Callable[[Workload], str] | None = None,
        shipped: Shipped | None = None,
    ) -> None:
        self.target, self.mode = target, mode
        self._lookup, self._shipped = lookup, shipped
        self._check = check or no_template(target)
        nodes = [] if network is None else [node for node in network.nodes if isinstance(node, Node)]
        first = {node.implementations[0] for node in nodes}
        self._residencies = {each: Residency.of(network, target, each) for each in (mode, *OTHER_MODES.get(mode, ()))}
        self._not_first = {workload for node in nodes for workload in node.implementations if workload not in first}
        self._known: dict[Workload, Cost] = {}
        self._neighbours: dict[str, Similar[_Neighbour]] = {}

    def __call__(self, workload: Workload) -> Cost:
        found = self._known.get(workload)
        if found is None:
            found = self._known[workload] = self._recorded(workload) or self._estimated(workload)
        return found

    def _recorded(self, workload: Workload) -> Cost | None:
        sources: tuple[Lookup | Shipped | None, ...] = (self._lookup, self._shipped)
        for source, mode in itertools.product(sources, self._residencies):
            if source is None:
                continue
            with contextlib.suppress(DamageError):
                row = source.exact(workload.id, self.target.key, mode)
                if row is not None:
                    return self._cost_of(workload, row, mode, is_own=source is self._lookup)
        return None

    def _cost_of(self, workload: Workload, row: LookupRow, mode: str, is_own: bool) -> Cost:
        saved_ns = self._residencies[mode].saved_ns(workload, row.time_ns)
        why = f"record {row.record_id} by {row.template}" if is_own else f"shipped record by {row.template}"
        why += "" if mode == self.mode else f" in mode {mode}"
        if saved_ns and mode == CHAIN_GRAPH:
            why += f", {-saved_ns / 1e3:+.2f} us beside other kernels"
        elif saved_ns:
            why += f", {saved_ns / 1e3:.2f} us less than cold"
        time_ns = row.time_ns - saved_ns
        return Cost(time_ns, "record", why, time_ns, row.record_id if is_own else None)

    def _estimated(self, workload: Workload) -> Cost:
        if reason := self._check(workload):
            return Cost(math.inf, "none", reason, math.inf)
        least_ns = least_time_ns(workload, self.target.key, self.mode)
        roofline_ns = suspect_time_ns(workload, self.target.key, self.mode)
        found = self._of(workload.op).nearest(workload)
        nearest = found[0][1] if found else None
        raised = NOT_FIRST if workload in self._not_first else 1.0
        if nearest is None:
            raised *= OVER_ROOFLINE
            why = f"{raised:g} times its roofline; there is no record of another {workload.op}"
            return Cost(raised * roofline_ns, "roofline", why, least_ns)
        raised *= UNTUNED
        ratio = raised * roofline_ns / suspect_time_ns(nearest.workload, nearest.target_key, self.mode)
        why = f"{ratio:.3g} times the {nearest.time_ns / 1e3:.2f} us of {nearest.workload.label}"
        return Cost(max(least_ns, ratio * nearest.time_ns), "scaled", why, least_ns)

    def _of(self, op: str) -> Similar[_Neighbour]:
        if op not in self._neighbours:
            found = sorted(self._recorded_neighbours(op), key=lambda each: (each.workload.id, each.target_key))
            self._neighbours[op] = Similar((each.workload, each) for each in found)
        return self._neighbours[op]

    def _recorded_neighbours(self, op: str) -> list[_Neighbour]:
        sought = op, self.mode, f"{self.target.kind}:"
        rows = [] if self._lookup is None else [(row, workload_of(row)) for row in self._lookup.nearest(*sought)]
        known = {workload for row, workload in rows if row.target_key == self.target.key}
        shipped = () if self._shipped is None else self._shipped.neighbours(*sought)
        rows += [(row, workload) for row, workload in shipped if workload not in known]
        found = [_Neighbour(workload, row.target_key, row.time_ns) for row, workload in rows if workload is not None]
        here = [each for each in found if each.target_key == self.target.key]
        return here or found


@contextlib.contextmanager
def costs_of(network: Network | None, db: str | os.PathLike[str], target: Target, mode: str) -> Iterator[RecordCosts]:
    """What the workloads of a network cost by the records that there are, own and shipped ones; the database may be missing.
    Without a network, what any workload costs."""
    with contextlib.ExitStack() as stack:
        lookup = stack.enter_context(Lookup(require_file(db))) if require_file(db).exists() else None
        yield RecordCosts(lookup, target, mode, network, shipped=shipped_records(target.key))


def no_template(target: Target) -> Callable[[Workload], str]:
    """`why(workload)`: why no template has a kernel for a workload on a device; "" if one has.

    The templates are loaded once, when it is first asked.
    """
    from schedsearch.template import load_templates

    templates = functools.cache(load_templates)

    def why(workload: Workload) -> str:
        try:
            templates().matching(workload, target)
        except UnsupportedError as error:
            return str(error)
        return ""

    return why


@dataclass(frozen=True)
class _Neighbour:
    workload: Workload
    target_key: str
    time_ns: float
