"""Whether a network of ours takes the place of a graph: it was built, is right, and took less time than PyTorch just now."""

from __future__ import annotations

import copy
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from schedsearch.errors import SchedsearchError, first_line
from schedsearch.network.model import NoOperatorError
from schedsearch.torch.calls import Kernels
from schedsearch.torch.formats import without_tf32
from schedsearch.torch.held import HeldNetwork, Refusal, form_of
from schedsearch.torch.parts import MOST_PARTS, Left, Part, find
from schedsearch.torch.report import NetworkReport, PartReport
from schedsearch.torch.timing import Timer

_log = logging.getLogger("schedsearch.torch")
Run = Callable[[], Any]
Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
MARGIN = 0.98
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-3}
_WORSE = 2.0  # times the compiled graph's own error that a network may have, above the tolerance
_RUNS = 20


@dataclass(frozen=True)
class Contest:
    """How networks are built and measured.

    Attributes:
        captures: whether PyTorch's compiled graphs can be part of a CUDA graph; else they are called.
        timer: for tests; default: CUDA graphs that follow one another, or the host's clock.
    """

    kernels: Kernels
    captures: bool = True
    timer: Timer | None = None

    def held(
        self, module: fx.GraphModule, given: Sequence[torch.Tensor], theirs: Run, tune_s: float | None
    ) -> tuple[HeldNetwork | None, NetworkReport]:
        """A network of a graph, if it wins, and what was measured; see `built`."""
        net, report = self.built(module, given, theirs, tune_s)
        return (None, report) if net is None else self.judged(net, given, theirs, report)

    def built(
        self, module: fx.GraphModule, given: Sequence[torch.Tensor], theirs: Run, tune_s: float | None
    ) -> tuple[HeldNetwork | None, NetworkReport]:
        """A network of a graph, if it is right, or why there is none. It was not timed.

        Args:
            module: the graph; only what a call gives is an input.
            given: real inputs.
            theirs: computes the same in PyTorch.
            tune_s: seconds to tune kernels that have no record; None: none are tuned.
        """
        started = time.perf_counter()
        net: HeldNetwork | None = None
        try:
            with torch.no_grad():
                expected = list(theirs())
                net = HeldNetwork(module, given, expected, self.kernels, tune_s)
                own_error, torch_error = _errors(net, module, given, expected)
            report = NetworkReport(False, error=own_error, torch_error=torch_error)
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
        try:
            with torch.no_grad():
                times = self.times(lambda: net(given), theirs)
            wins = times[0] <= MARGIN * times[1]
            report = replace(report, served=wins, ours_us=times[0], torch_us=times[1])
            report = report if wins else replace(report, reason="PyTorch is as fast or faster")
        except Exception as error:  # of many kinds: a capture may fail
            report = replace(report, reason=f"{type(error).__name__}: {error}"[:300])
        if not report.served:
            net.close()
        return net if report.served else None, replace(report, seconds=report.seconds + time.perf_counter() - started)

    def times(self, ours: Run, theirs: Run) -> tuple[float, float]:
        """Microseconds of both, each in its fastest form: both as CUDA graphs."""
        if self.timer is not None:
            return self.timer.ns([ours]) / 1e3, self.timer.ns([theirs]) / 1e3
        if self.kernels.device.type == "cpu":
            return _host_us(ours), _host_us(theirs)
        with torch.cuda.device(self.kernels.device):
            return _event_us(ours), _event_us(captured(theirs) if self.captures else theirs)


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
        if self.net is not None:
            with torch.no_grad():
                theirs = compile_(self.part.module, self.given)
            self.net, self.report = contest.judged(self.net, self.given, lambda: theirs(*self.given), self.report)


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

    @property
    def rows(self) -> list[PartReport]:
        """Of the report."""
        return [each.row for each in self.parts]


def parts_built(
    contest: Contest,
    module: fx.GraphModule,
    held: Mapping[fx.Node, torch.Tensor],
    inputs: Sequence[Any],
    tune_s: float | None,
    keep: Callable[[fx.Node], bool] = lambda node: False,
) -> PartsFound:
    """Builds a network for each part of a graph; nothing is timed.

    Args:
        module: without writes.
        held: inputs of the graph that are parameters and buffers.
        inputs: all inputs of the graph: real tensors.
        tune_s: seconds for all parts; the larger ones get more of them.
        keep: whether a node is left to PyTorch.
    """
    found, left = find(module, held, keep)
    wanted = {each for part in found[:MOST_PARTS] for each in part.inputs}
    values = _Values(module, wanted).of(inputs)
    ends = None if tune_s is None else time.monotonic() + tune_s
    result = PartsFound([], left)
    for place, part in enumerate(found):
        if place >= MOST_PARTS:
            report = NetworkReport(False, f"only the {MOST_PARTS} largest are tried")
            result.parts.append(BuiltPart(part, [], None, report))
            continue
        given = [values[each] for each in part.inputs]
        share_s = None
        if ends is not None:
            waiting = sum(len(each.nodes) for each in found[place:MOST_PARTS])
            share_s = max(1.0, (ends - time.monotonic()) * len(part.nodes) / waiting)
        _log.info("part %d of %d: %s", place + 1, min(len(found), MOST_PARTS), part.name)
        net, report = contest.built(part.module, given, lambda: part.module(*given), share_s)  # noqa: B023
        result.parts.append(BuiltPart(part, given, net, report))
    return result


def parts_that_win(
    contest: Contest,
    module: fx.GraphModule,
    held: Mapping[fx.Node, torch.Tensor],
    inputs: Sequence[Any],
    compile_: Compiler,
    tune_s: float | None,
    keep: Callable[[fx.Node], bool] = lambda node: False,
) -> PartsFound:
    """As `parts_built`; networks are kept that are faster than the same part as `compile_`, PyTorch's compiler, makes it."""
    found = parts_built(contest, module, held, inputs, tune_s, keep)
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
) -> tuple[float, float]:
    """The largest errors of the network and of the compiled graph against float32, over the largest magnitude.

    Raises:
        Refusal: the network's is too large, or an output has another shape.
    """
    found = net(given)
    if [form_of(each) for each in found] != [form_of(each) for each in expected]:
        raise Refusal("its outputs have another form than PyTorch's")
    with without_tf32():
        exact = copy.deepcopy(module).float()(*(each.float() if each.is_floating_point() else each for each in given))
    worst = [0.0, 0.0]
    for truth, ours, theirs in zip(exact, found, expected):
        most = float(truth.abs().max()) or 1.0
        errors = [float((each.float() - truth.float()).abs().max()) / most for each in (ours, theirs)]
        if not errors[0] <= max(_TOLERANCE.get(ours.dtype, 0.0), _WORSE * errors[1]):
            raise Refusal(f"its error against float32 is {errors[0]:.1e}, PyTorch's {errors[1]:.1e}")
        worst = [max(pair) for pair in zip(worst, errors)]
    return worst[0], worst[1]


def captured(call: Run) -> Run:
    """A call as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Run = graph.replay
    return replay


def _event_us(call: Run) -> float:
    """The median over groups of calls that follow one another."""
    for _ in range(3):
        call()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(_RUNS):
        first.record()
        for _ in range(5):
            call()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) * 200)
    return float(statistics.median(times))


def _host_us(call: Run) -> float:
    times = []
    for _ in range(_RUNS):
        started = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - started)
    return statistics.median(times[2:]) / 1e3
