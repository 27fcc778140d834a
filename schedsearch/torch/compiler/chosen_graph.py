"""A graph of torch.compile, computed by what is fastest: Inductor's code of it, kernels for layers, or networks of ours."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import fx, nn

from schedsearch.torch.comparison.race import NO_TIME, Result
from schedsearch.torch.comparison.state import same_random_numbers
from schedsearch.torch.comparison.timing import Candidate
from schedsearch.torch.layers.report import NetworkReport
from schedsearch.torch.networks import network_op
from schedsearch.torch.networks.functional_graph import without_writes
from schedsearch.torch.networks.held_network import Copied, Form, HeldNetwork, copied, form_of, frozen, is_held
from schedsearch.torch.networks.selection import NETWORK, Compiler, Contest, PartsFound, parts_built, with_times
from schedsearch.torch.operators.store import capturing
from schedsearch.torch.refusal import Refusal

Compiled = Callable[..., Any]
LAYERS, PARTS = "kernels for layers", "networks for parts"  # their names in a race
_CHANGED = "weights have changed since it was built; Inductor's code computes from now on"


@dataclass
class Compilation:
    """What PyTorch's compiler makes.

    Attributes:
        plain: the graph without schedsearch: what the user would have had.
        seconds: that it took to compile.
        layered: the graph with kernels for layers; None if no kernel won.
        part: compiles a part of the graph.
        rest: compiles the graph with networks in the place of parts.
    """

    plain: Compiled
    seconds: float
    layered: Compiled | None
    part: Compiler
    rest: Compiler


@dataclass
class _Entry:
    """Networks that compute the graph, before it is known whether they win.

    Attributes:
        candidate: named NETWORK or PARTS; None if there are no networks.
        serve: computes the graph.
        found: the parts, if it has some.
    """

    report: NetworkReport
    candidate: Candidate | None = None
    serve: Compiled | None = None
    nets: Sequence[HeldNetwork] = ()
    found: PartsFound = field(default_factory=lambda: PartsFound([], []))


class ChosenGraph:
    """What torch.compile calls.

    The first call decides, because only then are all tensors real: everything that can compute the graph is measured at
    once, Inductor's code of the graph as it is among them. That serves unless another is clearly faster.

    A network holds copies of the weights. Every call checks that the tensors of the model are the same and were not written
    to since; once they were, compiled code serves. While a CUDA graph is captured, networks' kernels are captured one by
    one. The CUDA graph then uses their memory, and the weights as they were: networks are never freed, and replays do not
    see new weights.

    Args:
        module: the graph, for networks; None: none are tried.
        inputs: of the graph, when it was compiled; parameters and buffers among them are told by torch's mark.
        tell: takes what became of networks, and the race; None for the latter if there was none.
    """

    def __init__(
        self,
        module: fx.GraphModule | None,
        inputs: Sequence[Any],
        compilation: Compilation,
        contest: Contest,
        tell: Callable[[NetworkReport | None, Result | None], None],
    ) -> None:
        self._module, self._made, self._contest, self._tell = module, compilation, contest, tell
        self._is_held = [is_held(each) for each in inputs]
        self._is_given = [not each for each in self._is_held]
        self._compiled = compilation.plain
        self._device = contest.kernels.device
        self._undecided = True
        self._serving: Compiled | None = None
        self._copied = Copied(())
        self._like: list[Form] = []
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        captured = capturing(self._device)
        if self._undecided:
            if captured:  # to build and to measure would break the capture
                return self._compiled(*args)
            with self._lock:
                if self._undecided:
                    self._undecided = False
                    self._decide(args)
        serving = self._serving  # another thread may find changed weights meanwhile
        if serving is None:
            return self._compiled(*args)
        if not self._copied.are(self._held(args)):
            if captured:  # to free memory would break the capture
                return self._compiled(*args)
            self._end()
            return self._compiled(*args)
        given = self._given(args)
        if [form_of(each) for each in given] != self._like or (
            torch.is_grad_enabled() and any(x.requires_grad for x in given)
        ):
            return self._compiled(*args)
        return serving(*args)

    def _held(self, args: Sequence[Any]) -> list[Any]:
        """The model's tensors among the inputs."""
        return list(compress(args, self._is_held))

    def _given(self, args: Sequence[Any]) -> list[Any]:
        """The inputs that are those of a call."""
        return list(compress(args, self._is_given))

    def _end(self) -> None:
        """Lets compiled code serve for good. Networks are freed when the last call that uses them is done."""
        with self._lock:
            if self._serving is None:  # another thread was here
                return
            self._serving, self._copied = None, Copied(())
        self._tell(NetworkReport(False, _CHANGED), None)

    def _decide(self, args: Sequence[Any]) -> None:
        started = time.perf_counter()
        with torch.no_grad(), same_random_numbers(self._device):
            report, result = self._decided(args)
        if self._serving is None:
            self._copied = Copied(())
        if result is not None and result.winner == LAYERS and self._made.layered is not None:
            self._compiled = self._made.layered
        self._module = None
        self._tell(report and replace(report, seconds=time.perf_counter() - started), result)

    def _decided(self, args: Sequence[Any]) -> tuple[NetworkReport | None, Result | None]:
        module, layered = self._module, self._made.layered
        writes = _writes(self._made.plain, args)
        racing = [each.clone() if writes and isinstance(each, torch.Tensor) else each for each in args]
        others = [] if layered is None else [Candidate(LAYERS, lambda: layered(*racing))]

        def race(entry: _Entry) -> Result | None:
            found = [*others, *([] if entry.candidate is None else [entry.candidate])]
            return self._contest.race(lambda: self._made.plain(*racing), found, entry.nets) if found else None

        if module is None:
            return None, race(_Entry(NetworkReport(False)))
        try:
            if writes:
                raise Refusal("the graph writes to its inputs")
            entry = self._with_network(module, args)
        except Refusal as error:
            entry = _Entry(NetworkReport(False, str(error)))
        result = race(entry)
        if entry.candidate is None or result is None:
            return entry.report, result
        if result.winner != entry.candidate.name and len(entry.nets) > 1:
            entry = self._with_parts_that_win(module, args, entry)
            if entry.candidate is None:
                return entry.report, result
            result = race(entry)
        assert result is not None and entry.candidate is not None
        name = entry.candidate.name
        report = with_times(entry.report, result, name)
        if report.served:
            self._serving = entry.serve
        elif name == NETWORK:
            entry.nets[0].close()
        else:
            entry.found.drop("the whole graph is not faster with it")
            report = replace(report, reason="it is not faster with networks for its parts")
        if name == PARTS:
            entry.found.serve()
            report = replace(report, parts=tuple(entry.found.rows))
        return report, result

    def _with_network(self, module: fx.GraphModule, args: Sequence[Any]) -> _Entry:
        """The whole graph as a network, or else with networks for its parts."""
        given = self._given(args)
        if not given or not all(type(each) in (torch.Tensor, nn.Parameter) for each in args):
            raise Refusal("it has inputs that are not plain tensors")
        deadline = self._contest.deadline
        if deadline.left_s < self._made.seconds:
            raise Refusal(NO_TIME.format("build a network"))
        whole = frozen(module, {place: args[place] for place, held in enumerate(self._is_held) if held})
        self._copied, self._like = Copied(self._held(args)), [form_of(each) for each in given]
        if _returns_an_input(self._made.plain, args):
            raise Refusal("the graph returns an input")
        net, report = self._contest.built(whole, given, lambda: self._made.plain(*args), deadline)
        if net is not None:
            run = Candidate(NETWORK, lambda: net(given))
            return _Entry(report, run, lambda *args: tuple(net(self._given(args))), [net])
        if deadline.left_s < self._made.seconds:
            return _Entry(replace(report, reason=f"{report.reason}; {NO_TIME.format('try its parts')}"))
        try:
            without_writes(module.graph)
        except Refusal as error:
            return _Entry(replace(report, reason=f"{report.reason}; and it has no parts: {error}"))
        module.recompile()
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        held = dict(compress(zip(inputs, args), self._is_held))
        found = parts_built(self._contest, module, held, args, deadline.before(self._made.seconds))
        report = replace(report, left=tuple(map(str, found.left)))
        return self._together(module, args, report, found)

    def _together(self, module: fx.GraphModule, args: Sequence[Any], report: NetworkReport, found: PartsFound) -> _Entry:
        """The graph with the networks of all parts that have one. What Inductor compiles then is small."""
        if found.nets and self._contest.deadline.passed:
            found.drop(NO_TIME.format("compile the rest"))
        if not found.nets:
            return _Entry(replace(report, parts=tuple(found.rows)), found=found)
        graph, places = copied(module.graph)
        made = fx.GraphModule(module, graph)
        calls = [(part.moved(places), network_op.NetworkCall(part, net, [])) for part, net in found.nets]
        network_op.replace(made, calls, checked=False)
        rest = partial(_run_with, [call for _, call in calls], self._made.rest(made, args))
        nets = [net for _, net in found.nets]
        return _Entry(report, Candidate(PARTS, lambda: rest(*args)), rest, nets, found)

    def _with_parts_that_win(self, module: fx.GraphModule, args: Sequence[Any], entry: _Entry) -> _Entry:
        """The graph with those of its parts that are faster alone than Inductor's code of the same part.

        This is tried after all parts together, because it compiles the graph again. No parts if none loses: all together
        were measured already.
        """
        found = entry.found
        before = len(found.nets)
        for each in found.parts:
            each.judge(self._contest, self._made.part)
        if len(found.nets) == before:
            found.drop("the whole graph is not faster with it")
            reason = "it is not faster with networks for its parts"
            return _Entry(replace(entry.report, reason=reason, parts=tuple(found.rows)))
        return self._together(module, args, entry.report, found)


def _run_with(calls: Sequence[network_op.NetworkCall], compiled: Compiled, *args: Any) -> Any:
    """Runs a graph that finds these calls as long as somebody holds them."""
    return compiled(*args)


def _writes(call: Compiled, args: Sequence[Any]) -> bool:
    """Whether a graph writes to its inputs; they have their numbers back then."""
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    before = [each.clone() for each in tensors]
    call(*args)
    if all(_same(each, old) for each, old in zip(tensors, before)):
        return False
    for each, old in zip(tensors, before):
        each.copy_(old)
    return True


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same numbers; NaN is equal to itself."""
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and bool(torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True))


def _returns_an_input(call: Compiled, args: Sequence[torch.Tensor]) -> bool:
    return not {each.data_ptr() for each in args}.isdisjoint(each.data_ptr() for each in call(*args))
