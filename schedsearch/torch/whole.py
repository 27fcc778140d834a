"""A graph of torch.compile as networks of ours, the whole or its parts, where they are faster than Inductor's code."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import fx, nn

from schedsearch.torch import network_op
from schedsearch.torch.contest import MARGIN, Compiler, Contest, parts_built
from schedsearch.torch.functional_graph import without_writes
from schedsearch.torch.held import Copied, Form, HeldNetwork, Refusal, copied, form_of, frozen, is_held
from schedsearch.torch.parts import Part
from schedsearch.torch.report import NetworkReport
from schedsearch.torch.settings import same_random_numbers
from schedsearch.torch.store import capturing

Compiled = Callable[..., Any]
_CHANGED = "weights have changed since it was built; Inductor's code computes from now on"


class Network:
    """What torch.compile calls: a network of ours, networks for parts of the graph, or the compiled graph.

    The first call decides, because only then are all tensors real. A network holds copies of the weights. Every call checks
    that the tensors of the model are the same and were not written to since; once they were, the compiled graph serves.

    While a CUDA graph is captured, networks' kernels are captured one by one. The CUDA graph then uses their memory, and the
    weights as they were: networks are never freed, and replays do not see new weights.

    Args:
        module: the graph.
        inputs: of the graph, when it was compiled; parameters and buffers among them are told by torch's mark.
        compiled: what Inductor made of the graph.
        tell: takes what was decided.
        compile_part: compiles a part of the graph.
        compile_rest: compiles the graph with networks in the place of parts.
        tune_s: seconds to tune kernels that have no record; None: none are tuned.
        parts: whether networks may take the place of parts, if the whole has none.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        compiled: Compiled,
        contest: Contest,
        tell: Callable[[NetworkReport], None],
        *,
        compile_part: Compiler,
        compile_rest: Compiler,
        tune_s: float | None,
        parts: bool = True,
    ) -> None:
        self._module: fx.GraphModule | None = module
        self._is_held = [is_held(each) for each in inputs]
        self._is_given = [not each for each in self._is_held]
        self._compiled, self._contest, self._tell, self._tune_s = compiled, contest, tell, tune_s
        self._compile_part, self._compile_rest, self._parts = compile_part, compile_rest, parts
        self._device = contest.kernels.device
        self._serving: Compiled | None = None
        self._copied = Copied(())
        self._like: list[Form] = []
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        captured = capturing(self._device)
        if self._module is not None:
            if captured:  # to build and to measure would break the capture
                return self._compiled(*args)
            with self._lock:
                module, self._module = self._module, None
                if module is not None:
                    self._decide(module, args)
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
        """Lets the compiled graph serve for good. Networks are freed when the last call that uses them is done."""
        with self._lock:
            if self._serving is None:  # another thread was here
                return
            self._serving, self._copied = None, Copied(())
        self._tell(NetworkReport(False, _CHANGED))

    def _decide(self, module: fx.GraphModule, args: Sequence[Any]) -> None:
        started = time.perf_counter()
        try:
            with torch.no_grad(), same_random_numbers(self._device):
                found = self._decided(module, args)
        except Refusal as error:
            found = NetworkReport(False, str(error))
        if self._serving is None:
            self._copied = Copied(())
        self._tell(replace(found, seconds=time.perf_counter() - started))

    def _decided(self, module: fx.GraphModule, args: Sequence[Any]) -> NetworkReport:
        """The whole graph as a network, or else its parts."""
        given = self._given(args)
        if not given or not all(type(each) in (torch.Tensor, nn.Parameter) for each in args):
            raise Refusal("it has inputs that are not plain tensors")
        whole = frozen(module, {place: args[place] for place, held in enumerate(self._is_held) if held})
        self._copied, self._like = Copied(self._held(args)), [form_of(each) for each in given]
        _check_effects(self._compiled, args)
        ends = None if self._tune_s is None else time.monotonic() + self._tune_s
        net, report = self._contest.held(whole, given, lambda: self._compiled(*args), self._tune_s)
        if net is not None:
            self._serving = lambda *args: tuple(net(self._given(args)))
            return report
        if report.ours_us is not None or not self._parts:
            return report  # it was built, and lost
        return self._in_parts(module, args, report, None if ends is None else max(1.0, ends - time.monotonic()))

    def _in_parts(
        self, module: fx.GraphModule, args: Sequence[Any], report: NetworkReport, tune_s: float | None
    ) -> NetworkReport:
        """The graph with networks for parts of it.

        All parts that have a network are tried together first, because that compiles next to nothing: what is left is small.
        Only if they lose, each is measured beside Inductor's code of the same part, which compiles the graph again.
        """
        try:
            without_writes(module.graph)
        except Refusal as error:
            return replace(report, reason=f"{report.reason}; and it has no parts: {error}")
        module.recompile()
        inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        held = dict(compress(zip(inputs, args), self._is_held))
        found = parts_built(self._contest, module, held, args, tune_s)
        report = replace(report, left=tuple(map(str, found.left)))
        tried = found.nets
        while tried:
            rest, ours, theirs = self._together(module, args, tried)
            report = replace(report, ours_us=ours, torch_us=theirs)
            if ours <= MARGIN * theirs:
                self._serving = rest
                for each in found.parts:
                    each.report = replace(each.report, served=each.net is not None)
                return replace(report, served=True, reason="", parts=tuple(found.rows))
            if len(tried) == 1:
                break
            for each in found.parts:
                each.judge(self._contest, self._compile_part)
            tried, before = found.nets, tried
            if len(tried) == len(before):
                break
        for each in found.parts:
            if each.net is not None:
                each.net.close()
                each.report = replace(each.report, served=False, reason="the whole graph is not faster with it")
        if tried:
            report = replace(report, reason="it is not faster with networks for its parts")
        return replace(report, parts=tuple(found.rows))

    def _together(
        self, module: fx.GraphModule, args: Sequence[Any], nets: Sequence[tuple[Part, HeldNetwork]]
    ) -> tuple[Compiled, float, float]:
        """The graph with these networks in the place of parts, and the times of it and of Inductor's graph."""
        graph, places = copied(module.graph)
        made = fx.GraphModule(module, graph)
        calls = [(part.moved(places), network_op.NetworkCall(part, net, [])) for part, net in nets]
        network_op.replace(made, calls, checked=False)
        rest = partial(_run_with, [call for _, call in calls], self._compile_rest(made, args))
        return rest, *self._contest.times(lambda: rest(*args), lambda: self._compiled(*args))


def _run_with(calls: Sequence[network_op.NetworkCall], compiled: Compiled, *args: Any) -> Any:
    """Runs a graph that finds these calls as long as somebody holds them."""
    return compiled(*args)


def _check_effects(call: Compiled, args: Sequence[Any]) -> None:
    """Raises Refusal if a graph returns one of its inputs, or writes to them; they have their numbers back then."""
    before = [each.clone() for each in args]
    found = list(call(*args))
    if not all(torch.equal(each, old) for each, old in zip(args, before)):
        for each, old in zip(args, before):
            each.copy_(old)
        raise Refusal("the graph writes to its inputs")
    if {each.data_ptr() for each in args} & {each.data_ptr() for each in found}:
        raise Refusal("the graph returns an input")
