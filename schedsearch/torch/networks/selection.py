"""Networks of ours for subgraphs of PyTorch: built, compared with float32, and measured beside PyTorch's compiled code."""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from schedsearch.deadline import NEVER, Deadline
from schedsearch.errors import SchedsearchError, first_line
from schedsearch.network.invalid import NoOperatorError
from schedsearch.torch.comparison import accuracy
from schedsearch.torch.comparison.accuracy import Errors, errors_of
from schedsearch.torch.comparison.benchmark import NO_TIME, PYTORCH, Result, benchmark
from schedsearch.torch.comparison.timing import Candidate, Run, Timer, timers_of_graphs
from schedsearch.torch.layers.kernel_op import Kernels
from schedsearch.torch.layers.report import NetworkReport, PartReport, us
from schedsearch.torch.networks import network_op
from schedsearch.torch.networks.convolutions_alone import convolutions_alone
from schedsearch.torch.networks.frozen_network import FrozenNetwork, copied, form_of
from schedsearch.torch.networks.functional_graph import without_writes
from schedsearch.torch.networks.subgraphs import MOST_SUBGRAPHS, Subgraph, everything, partition, whole
from schedsearch.torch.operators.formats import without_tf32
from schedsearch.torch.refusal import Refusal

_log = logging.getLogger("schedsearch.torch")
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
NETWORK = "network"  # its name in a benchmark
TRACED_S = 0.015  # for each node of a graph: what it takes to export it and to read it again, before anything is compiled
_BUILDING = 0.9  # of the time that is left: for building a network; the rest is for measuring it


@dataclass(frozen=True)
class NetworkSelector:
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

    def measure(self, theirs: Run, others: Sequence[Candidate], nets: Sequence[FrozenNetwork] = ()) -> Result:
        """One measurement of PyTorch's compiled graph and of what could take its place.

        Args:
            nets: that the others run.
        """
        timers = timers_of_graphs(self.kernels.device, self.captures) if self.timer is None else [self.timer]
        with torch.no_grad(), contextlib.ExitStack() as stack:
            for net in nets:
                stack.enter_context(net.captured_for_a_while())
            return benchmark(timers, Candidate(PYTORCH, theirs), others, self.deadline)


def with_times(report: NetworkReport, result: Result, name: str) -> NetworkReport:
    """The report with what a measurement found for a candidate."""
    ours_us, torch_us = us(result.times_ns.get(name)), us(result.pytorch_ns)
    served = result.winner == name
    return replace(report, served=served, ours_us=ours_us, torch_us=torch_us, reason="" if served else result.problems[name])


@dataclass
class Placed:
    """A subgraph, and what became of it.

    Attributes:
        given: real inputs of it.
        net: its network, which computes right; None if there is none, or none any more.
    """

    subgraph: Subgraph
    given: list[torch.Tensor]
    report: NetworkReport
    net: FrozenNetwork | None = None

    def build(self, selector: NetworkSelector, deadline: Deadline) -> None:
        """Builds the network, or notes why there is none. It is not timed."""
        if deadline.left_s < TRACED_S * len(self.subgraph.nodes):
            self.report = NetworkReport(False, NO_TIME.format("build it"))
            return
        started = time.perf_counter()
        module, given, net = self.subgraph.module, self.given, None
        try:
            with torch.no_grad():
                expected = list(module(*given))
                net = FrozenNetwork(module, given, expected, selector.kernels, selector.tunes, deadline.share(_BUILDING))
                errors = _errors(net, module, given, expected)
            self.net, report = net, NetworkReport(False, error=errors.ours, torch_error=errors.torch)
        except Exception as error:  # torch's exporters raise errors of many kinds
            if net is not None:
                net.close()
            ours = isinstance(error, SchedsearchError | Refusal)
            reason = first_line(error) if ours else f"{type(error).__name__}: {error}"[:300]
            report = NetworkReport(False, error.nodes if isinstance(error, NoOperatorError) else reason)
        self.report = replace(report, seconds=time.perf_counter() - started)

    def keep_if_faster(self, selector: NetworkSelector, compile_: Compiler) -> None:
        """Keeps the network only if it is faster than the same subgraph as `compile_`, PyTorch's compiler, makes it. That is
        compiled only if the network is not faster than its convolutions alone."""
        net, given, started = self.net, self.given, time.perf_counter()
        if net is None:
            return
        if selector.deadline.passed:
            self.drop(NO_TIME.format("compare it with PyTorch"))
            return
        ours, module = Candidate(NETWORK, lambda: net(given)), self.subgraph.module
        with torch.no_grad():
            bounds = [selector.measure(run, [ours], [net]) for run in convolutions_alone(module, selector.kernels.device)]
            if bounds and all(each.winner == NETWORK for each in bounds):
                result = min(bounds, key=lambda each: each.pytorch_ns or 0.0)
            else:
                bounds, theirs = [], compile_(module, given)
                result = selector.measure(lambda: theirs(*given), [ours], [net])
        report = with_times(self.report, result, NETWORK)
        seconds = report.seconds + time.perf_counter() - started
        self.report = replace(report, seconds=seconds, is_least=bool(bounds))
        if not report.served:
            self.drop(report.reason)

    def drop(self, reason: str) -> None:
        """Leaves the subgraph to PyTorch."""
        if self.net is not None:
            self.net.close()
            self.net, self.report = None, replace(self.report, served=False, reason=reason)


@dataclass
class Placement:
    """Where networks may compute a graph.

    Attributes:
        report: of the whole graph.
        placed: the whole graph if it has a network; else its subgraphs, the largest first.
        is_whole: whether it is the whole graph.
    """

    report: NetworkReport
    placed: list[Placed] = field(default_factory=list)
    is_whole: bool = False

    @property
    def nets(self) -> list[FrozenNetwork]:
        return [each.net for each in self.placed if each.net is not None]

    @property
    def rows(self) -> tuple[PartReport, ...]:
        """Of the report: what became of each subgraph."""
        names = [] if self.is_whole else self.placed
        return tuple(PartReport.of(each.subgraph.name, len(each.subgraph.nodes), each.report) for each in names)

    def keep_winners(self, selector: NetworkSelector, compile_: Compiler) -> None:
        """Keeps the networks that are faster than the same subgraph as `compile_`, PyTorch's compiler, makes it."""
        for each in self.placed:
            each.keep_if_faster(selector, compile_)

    def drop(self, reason: str) -> None:
        """Leaves everything to PyTorch."""
        for each in self.placed:
            each.drop(reason)

    def serve(self) -> None:
        """Notes that the networks that are left serve."""
        for each in self.placed:
            each.report = replace(each.report, served=each.net is not None)

    def put_into(
        self, module: fx.GraphModule, weights: Mapping[fx.Node, torch.Tensor] | None
    ) -> tuple[fx.GraphModule, list[network_op.NetworkCall]]:
        """A copy of the graph in which operators run the networks, as long as somebody holds their calls.

        Args:
            weights: parameters and buffers, which the operators check in each call; None: the caller checks them.
        """
        graph, places = copied(module.graph)
        made, calls = fx.GraphModule(module, graph), []
        for each in self.placed:
            if each.net is not None:
                checked = [] if weights is None else [weights[node] for node in each.subgraph.weights]
                calls.append((each.subgraph.moved(places), network_op.NetworkCall(each.subgraph, each.net, checked)))
        network_op.replace(made, calls, checked=weights is not None)
        return made, [call for _, call in calls]


def place(
    selector: NetworkSelector,
    module: fx.GraphModule,
    weights: Mapping[fx.Node, torch.Tensor],
    inputs: Sequence[Any],
    deadline: Deadline,
    *,
    keep: Callable[[fx.Node], bool] | None = None,
    rest_s: float = 0.0,
) -> Placement:
    """Builds a network for a graph, or else one for each of its largest subgraphs. Nothing is timed.

    Args:
        module: the graph; it loses its writes if it is cut.
        weights: inputs of the graph that are parameters and buffers.
        inputs: all inputs of the graph: real tensors.
        deadline: of building; larger subgraphs get more of the time.
        keep: whether a node is left to PyTorch; None: no node, so that the whole graph is tried first, with what it returns.
        rest_s: seconds that are left for what is beside the subgraphs.
    """
    report = NetworkReport(False)
    if keep is None:
        subgraph = whole(module, weights)
        values = dict(zip((node for node in module.graph.nodes if node.op == "placeholder"), inputs))
        found = Placed(subgraph, [values[each] for each in subgraph.inputs], report)
        found.build(selector, deadline)
        report = found.report
        if found.net is not None:
            return Placement(report, [found], is_whole=True)
        if deadline.left_s < rest_s:
            return Placement(replace(report, reason=f"{report.reason}; {NO_TIME.format('try its parts')}"))
    try:
        without_writes(module.graph)
    except Refusal as error:
        return Placement(
            replace(report, reason=f"{report.reason}; and it has no parts: {error}" if keep is None else str(error))
        )
    module.recompile()
    deadline = deadline.before(rest_s)
    one = everything(module, weights, keep) if keep is not None else None
    tried = _built(selector, module, [one], inputs, deadline) if one is not None else []
    if any(each.net is not None for each in tried):
        return Placement(report, tried)
    subgraphs, unsupported = partition(module, weights, keep or (lambda node: False))
    report = replace(report, left=tuple(map(str, unsupported)))
    if one is not None and [each.nodes for each in subgraphs] == [one.nodes]:  # it would fail again
        return Placement(report, tried)
    return Placement(report, _built(selector, module, subgraphs, inputs, deadline))


def _built(
    selector: NetworkSelector,
    module: fx.GraphModule,
    subgraphs: Sequence[Subgraph],
    inputs: Sequence[object],
    deadline: Deadline,
) -> list[Placed]:
    tried, others = subgraphs[:MOST_SUBGRAPHS], subgraphs[MOST_SUBGRAPHS:]
    values = _Values(module, {each for subgraph in tried for each in subgraph.inputs}).of(inputs)
    found = []
    for number, subgraph in enumerate(tried, start=1):
        _log.info("part %d of %d: %s", number, len(tried), subgraph.name)
        waiting = sum(len(each.nodes) for each in tried[number - 1 :])
        each = Placed(subgraph, [values[each] for each in subgraph.inputs], NetworkReport(False))
        each.build(selector, deadline.share(len(subgraph.nodes) / waiting))
        found.append(each)
    late = NetworkReport(False, f"only the {MOST_SUBGRAPHS} largest are tried")
    return [*found, *(Placed(each, [], late) for each in others)]


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
    net: FrozenNetwork, module: fx.GraphModule, given: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> Errors:
    """The errors of the network and of PyTorch's graph, the largest of all outputs.

    Raises:
        Refusal: the network's is too large, or an output has another shape.
    """
    found = net(given)
    if [form_of(each) for each in found] != [form_of(each) for each in expected]:
        raise Refusal("its outputs have another form than PyTorch's")
    with without_tf32():
        references = copy.deepcopy(module).float()(*(each.float() if each.is_floating_point() else each for each in given))
    worst = Errors(0.0, 0.0)
    for reference, ours, theirs in zip(references, found, expected):
        errors = errors_of(reference, ours, theirs)
        if reason := accuracy.NETWORK.excess(errors, ours.dtype):
            raise Refusal(reason)
        worst = Errors(*(max(pair) for pair in zip(worst, errors)))
    return worst
