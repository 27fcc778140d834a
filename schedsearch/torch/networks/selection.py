"""Networks of ours for graphs of PyTorch: they are built, compared with float32, and race PyTorch's compiled graph."""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from schedsearch.deadline import NEVER, Deadline
from schedsearch.errors import SchedsearchError, first_line
from schedsearch.network.invalid import NoOperatorError
from schedsearch.torch.comparison import accuracy
from schedsearch.torch.comparison.accuracy import Errors, errors_of
from schedsearch.torch.comparison.race import NO_TIME, PYTORCH, Result, race
from schedsearch.torch.comparison.timing import Candidate, Run, Timer, timers_of_graphs
from schedsearch.torch.layers.kernel_op import Kernels
from schedsearch.torch.layers.report import NetworkReport, PartReport, us
from schedsearch.torch.networks.held_network import HeldNetwork, form_of
from schedsearch.torch.networks.partition import MOST_PARTS, Left, Part, find
from schedsearch.torch.operators.formats import without_tf32
from schedsearch.torch.refusal import Refusal

_log = logging.getLogger("schedsearch.torch")
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
NETWORK = "network"  # its name in a race
TRACED_S = 0.015  # for each node of a graph: what it takes to export it and to read it again, before anything is compiled
_BUILDING = 0.9  # of the time that is left: for building a network; the rest is for the race


@dataclass(frozen=True)
class Contest:
    """How networks are built and measured.

    Attributes:
        captures: whether PyTorch's compiled graphs can be part of a CUDA graph; else they are called.
        timer: for tests; default: all ways in which callers may run a graph.
        tunes: whether kernels that have no record are tuned.
        deadline: what is not built by then is PyTorch's.
    """

    kernels: Kernels
    captures: bool = True
    timer: Timer | None = None
    tunes: bool = False
    deadline: Deadline = NEVER

    def built(
        self, module: fx.GraphModule, given: Sequence[torch.Tensor], theirs: Run, deadline: Deadline
    ) -> tuple[HeldNetwork | None, NetworkReport]:
        """A network of a graph, if it is right, or why there is none. It was not timed.

        Args:
            module: the graph; only what a call gives is an input.
            given: real inputs.
            theirs: computes the same in PyTorch.
            deadline: of building it.
        """
        if deadline.left_s < TRACED_S * len(module.graph.nodes):
            return None, NetworkReport(False, NO_TIME.format("build it"))
        started = time.perf_counter()
        net: HeldNetwork | None = None
        try:
            with torch.no_grad():
                expected = list(theirs())
                net = HeldNetwork(module, given, expected, self.kernels, self.tunes, deadline.share(_BUILDING))
                errors = _errors(net, module, given, expected)
            report = NetworkReport(False, error=errors.ours, torch_error=errors.torch)
        except Exception as error:  # torch's exporters raise errors of many kinds
            ours = isinstance(error, SchedsearchError | Refusal)
            reason = first_line(error) if ours else f"{type(error).__name__}: {error}"[:300]
            report = NetworkReport(False, error.nodes if isinstance(error, NoOperatorError) else reason)
            if net is not None:
                net.close()
                net = None
        return net, replace(report, seconds=time.perf_counter() - started)

    def judged(
        self, net: HeldNetwork, given: Sequence[torch.Tensor], theirs: Run, report: NetworkReport
    ) -> tuple[HeldNetwork | None, NetworkReport]:
        """The network if it is faster than PyTorch's compiled graph; else it is closed."""
        started = time.perf_counter()
        result = self.race(theirs, [Candidate(NETWORK, lambda: net(given))], [net])
        report = with_times(report, result, NETWORK)
        if not report.served:
            net.close()
        return net if report.served else None, replace(report, seconds=report.seconds + time.perf_counter() - started)

    def race(self, theirs: Run, others: Sequence[Candidate], nets: Sequence[HeldNetwork] = ()) -> Result:
        """One measurement of PyTorch's compiled graph and of what could take its place.

        Args:
            nets: that the others run.
        """
        timers = timers_of_graphs(self.kernels.device, self.captures) if self.timer is None else [self.timer]
        with torch.no_grad(), contextlib.ExitStack() as stack:
            for net in nets:
                stack.enter_context(net.captured_for_a_while())
            return race(timers, Candidate(PYTORCH, theirs), others, self.deadline)


def with_times(report: NetworkReport, result: Result, name: str) -> NetworkReport:
    """The report with what a race found for a candidate."""
    ours_us, torch_us = us(result.times_ns.get(name)), us(result.pytorch_ns)
    served = result.winner == name
    return replace(report, served=served, ours_us=ours_us, torch_us=torch_us, reason="" if served else result.problems[name])


@dataclass
class BuiltPart:
    """A part of a graph, and what became of it.

    Attributes:
        given: real inputs of it.
        net: its network; None if there is none, or none any more.
    """

    part: Part
    given: list[torch.Tensor]
    net: HeldNetwork | None
    report: NetworkReport

    @property
    def row(self) -> PartReport:
        return PartReport.of(self.part.name, len(self.part.nodes), self.report)

    def judge(self, contest: Contest, compile_: Compiler) -> None:
        """Keeps the network only if it is faster than the same part in PyTorch."""
        if self.net is None:
            return
        if contest.deadline.passed:
            self.drop(NO_TIME.format("compare it with PyTorch"))
            return
        with torch.no_grad():
            theirs = compile_(self.part.module, self.given)
        self.net, self.report = contest.judged(self.net, self.given, lambda: theirs(*self.given), self.report)

    def drop(self, reason: str) -> None:
        """Leaves the part to PyTorch."""
        if self.net is not None:
            self.net.close()
            self.net, self.report = None, replace(self.report, served=False, reason=reason)


@dataclass
class PartsFound:
    """The parts of a graph.

    Attributes:
        parts: the largest first.
        left: what the importer does not take.
    """

    parts: list[BuiltPart]
    left: list[Left]

    @property
    def nets(self) -> list[tuple[Part, HeldNetwork]]:
        """The parts that have networks."""
        return [(each.part, each.net) for each in self.parts if each.net is not None]

    def drop(self, reason: str) -> None:
        """Leaves all parts that have networks to PyTorch."""
        for each in self.parts:
            each.drop(reason)

    def serve(self) -> None:
        """Notes that the networks that are left serve."""
        for each in self.parts:
            each.report = replace(each.report, served=each.net is not None)

    @property
    def rows(self) -> list[PartReport]:
        """Of the report."""
        return [each.row for each in self.parts]


def parts_built(
    contest: Contest,
    module: fx.GraphModule,
    held: Mapping[fx.Node, torch.Tensor],
    inputs: Sequence[Any],
    deadline: Deadline,
    keep: Callable[[fx.Node], bool] = lambda node: False,
) -> PartsFound:
    """Builds a network for each part of a graph; nothing is timed.

    Args:
        module: without writes.
        held: inputs of the graph that are parameters and buffers.
        inputs: all inputs of the graph: real tensors.
        deadline: for all parts; the larger ones get more of the time.
        keep: whether a node is left to PyTorch.
    """
    found, left = find(module, held, keep)
    wanted = {each for part in found[:MOST_PARTS] for each in part.inputs}
    values = _Values(module, wanted).of(inputs)
    result = PartsFound([], left)
    for place, part in enumerate(found):
        if place >= MOST_PARTS:
            report = NetworkReport(False, f"only the {MOST_PARTS} largest are tried")
            result.parts.append(BuiltPart(part, [], None, report))
            continue
        given = [values[each] for each in part.inputs]
        waiting = sum(len(each.nodes) for each in found[place:MOST_PARTS])
        own = deadline.share(len(part.nodes) / waiting)
        _log.info("part %d of %d: %s", place + 1, min(len(found), MOST_PARTS), part.name)
        net, report = contest.built(part.module, given, lambda: part.module(*given), own)  # noqa: B023
        result.parts.append(BuiltPart(part, given, net, report))
    return result


def parts_that_win(
    contest: Contest,
    module: fx.GraphModule,
    held: Mapping[fx.Node, torch.Tensor],
    inputs: Sequence[Any],
    compile_: Compiler,
    deadline: Deadline,
    keep: Callable[[fx.Node], bool] = lambda node: False,
) -> PartsFound:
    """As `parts_built`; networks are kept that are faster than the same part as `compile_`, PyTorch's compiler, makes it."""
    found = parts_built(contest, module, held, inputs, deadline, keep)
    for each in found.parts:
        each.judge(contest, compile_)
    return found


class _Values(fx.Interpreter):
    """Runs a graph and keeps some of its values."""

    def __init__(self, module: fx.GraphModule, wanted: Set[fx.Node]) -> None:
        super().__init__(module)
        self._wanted, self._found = wanted, dict[fx.Node, Any]()

    def of(self, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
        with torch.no_grad():
            self.run(*inputs)
        return self._found

    def run_node(self, node: fx.Node) -> Any:
        found = super().run_node(node)
        if node in self._wanted:
            self._found[node] = found
        return found


def _errors(
    net: HeldNetwork, module: fx.GraphModule, given: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> Errors:
    """The errors of the network and of the compiled graph, the largest of all outputs.

    Raises:
        Refusal: the network's is too large, or an output has another shape.
    """
    found = net(given)
    if [form_of(each) for each in found] != [form_of(each) for each in expected]:
        raise Refusal("its outputs have another form than PyTorch's")
    with without_tf32():
        exact = copy.deepcopy(module).float()(*(each.float() if each.is_floating_point() else each for each in given))
    worst = Errors(0.0, 0.0)
    for truth, ours, theirs in zip(exact, found, expected):
        errors = errors_of(truth, ours, theirs)
        if reason := accuracy.NETWORK.excess(errors, ours.dtype):
            raise Refusal(reason)
        worst = Errors(*(max(pair) for pair in zip(worst, errors)))
    return worst
