"""A graph of torch.compile, computed by what is fastest: Inductor's code of it, kernels for layers, or networks of ours."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import fx, nn

from schedsearch.torch.comparison.benchmark import NO_TIME, Result
from schedsearch.torch.comparison.state import same_random_numbers
from schedsearch.torch.comparison.timing import Candidate
from schedsearch.torch.layers.report import NetworkReport
from schedsearch.torch.networks import network_op
from schedsearch.torch.networks.frozen_network import Form, form_of, is_weight
from schedsearch.torch.networks.frozen_weights import FrozenWeights
from schedsearch.torch.networks.selection import NETWORK, Compiler, NetworkSelector, Placement, place, with_times
from schedsearch.torch.operators.store import capturing
from schedsearch.torch.refusal import Refusal

Compiled = Callable[..., Any]
LAYERS, PARTS = "kernels for layers", "networks for parts"  # their names in a benchmark
_CHANGED = "weights have changed since it was built; Inductor's code computes from now on"
_SLOWER_WITH_PARTS = "it is not faster with networks for its parts"


@dataclass
class Compilation:
    """What PyTorch's compiler makes.

    Attributes:
        plain: the graph without schedsearch: what the user would have had.
        seconds: that it took to compile.
        layered: the graph with kernels for layers; None if no kernel won.
        part: compiles a subgraph.
        rest: compiles the graph with networks in the place of subgraphs.
    """

    plain: Compiled
    seconds: float
    layered: Compiled | None
    part: Compiler
    rest: Compiler


class SelectedGraph:
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
        tell: takes what became of networks, and the measurement; None for the latter if there was none.
    """

    def __init__(
        self,
        module: fx.GraphModule | None,
        inputs: Sequence[Any],
        compilation: Compilation,
        selector: NetworkSelector,
        tell: Callable[[NetworkReport | None, Result | None], None],
    ) -> None:
        self._module, self._made, self._selector, self._tell = module, compilation, selector, tell
        self._is_weight = [is_weight(each) for each in inputs]
        self._is_given = [not each for each in self._is_weight]
        self._compiled = compilation.plain
        self._device = selector.kernels.device
        self._undecided = True
        self._serving: Compiled | None = None
        self._frozen = FrozenWeights(())
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
        if not self._frozen.are(self._weights(args)):
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

    def _weights(self, args: Sequence[object]) -> list[Any]:
        """The model's tensors among the inputs."""
        return list(compress(args, self._is_weight))

    def _given(self, args: Sequence[object]) -> list[Any]:
        """The inputs that are those of a call."""
        return list(compress(args, self._is_given))

    def _end(self) -> None:
        """Lets compiled code serve for good. Networks are freed when the last call that uses them is done."""
        with self._lock:
            if self._serving is None:  # another thread was here
                return
            self._serving, self._frozen = None, FrozenWeights(())
        self._tell(NetworkReport(False, _CHANGED), None)

    def _decide(self, args: Sequence[object]) -> None:
        started = time.perf_counter()
        with torch.no_grad(), same_random_numbers(self._device):
            report, result = self._decided(args)
        if self._serving is None:
            self._frozen = FrozenWeights(())
        if result is not None and result.winner == LAYERS and self._made.layered is not None:
            self._compiled = self._made.layered
        self._module = None
        self._tell(report and replace(report, seconds=time.perf_counter() - started), result)

    def _decided(self, args: Sequence[object]) -> tuple[NetworkReport | None, Result | None]:
        module, layered = self._module, self._made.layered
        writes = _writes(self._made.plain, args)
        benchmarked = [each.clone() if writes and isinstance(each, torch.Tensor) else each for each in args]
        others = [] if layered is None else [Candidate(LAYERS, lambda: layered(*benchmarked))]

        def measured(serve: Compiled | None, placement: Placement) -> Result | None:
            name = NETWORK if placement.is_whole else PARTS
            found = [*others, *([] if serve is None else [Candidate(name, lambda: serve(*args))])]
            return self._selector.measure(lambda: self._made.plain(*benchmarked), found, placement.nets) if found else None

        if module is None:
            return None, measured(None, Placement(NetworkReport(False)))
        try:
            if writes:
                raise Refusal("the graph writes to its inputs")
            placement = self._placed(module, args)
        except Refusal as error:
            placement = Placement(NetworkReport(False, str(error)))
        serve = self._with_networks(module, args, placement)
        result = measured(serve, placement)
        if serve is None or result is None:
            return replace(placement.report, parts=placement.rows), result
        if result.winner != PARTS and len(placement.nets) > 1:
            # Some may be faster alone. This is tried now only, because it compiles each subgraph, and the rest again.
            before = len(placement.nets)
            placement.keep_winners(self._selector, self._made.part)
            alone = None if len(placement.nets) == before else self._with_networks(module, args, placement)
            if alone is None:
                placement.drop("the whole graph is not faster with it")
                return replace(placement.report, reason=_SLOWER_WITH_PARTS, parts=placement.rows), result
            serve, result = alone, measured(alone, placement)
            assert result is not None
        report = with_times(placement.report, result, NETWORK if placement.is_whole else PARTS)
        if report.served:
            self._serving = serve
            placement.serve()
        else:
            placement.drop("the whole graph is not faster with it")
            report = report if placement.is_whole else replace(report, reason=_SLOWER_WITH_PARTS)
        return replace(report, parts=placement.rows), result

    def _placed(self, module: fx.GraphModule, args: Sequence[object]) -> Placement:
        """Where networks may compute the graph. Raises Refusal if nowhere."""
        given, deadline = self._given(args), self._selector.deadline
        if not given or not all(type(each) in (torch.Tensor, nn.Parameter) for each in args):
            raise Refusal("it has inputs that are not plain tensors")
        if deadline.passed:  # Inductor compiles nothing beside a network of the whole graph; parts need time for the rest
            raise Refusal(NO_TIME.format("build a network"))
        self._frozen, self._like = FrozenWeights(self._weights(args)), [form_of(each) for each in given]
        if _returns_an_input(self._made.plain, args):
            raise Refusal("the graph returns an input")
        weights = dict(compress(zip(_inputs(module), args), self._is_weight))
        return place(self._selector, module, weights, args, deadline, rest_s=self._made.seconds)

    def _with_networks(self, module: fx.GraphModule, args: Sequence[object], placement: Placement) -> Compiled | None:
        """The graph with its networks; None without any. What Inductor compiles beside them is small."""
        if placement.is_whole:
            (net,), (whole,) = placement.nets, placement.placed
            order = {node: number for number, node in enumerate(_inputs(module))}
            read = [order[node] for node in whole.subgraph.inputs]
            return lambda *args: tuple(net([args[number] for number in read]))
        if placement.nets and self._selector.deadline.passed:
            placement.drop(NO_TIME.format("compile the rest"))
        if not placement.nets:
            return None
        made, calls = placement.put_into(module, None)
        return partial(_run_with, calls, self._made.rest(made, args))


def _inputs(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _run_with(calls: Sequence[network_op.NetworkCall], compiled: Compiled, *args: object) -> Any:
    """Runs a graph that finds these calls as long as somebody holds them."""
    return compiled(*args)


def _writes(call: Compiled, args: Sequence[object]) -> bool:
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
