"""`torch.compile(model, backend="schedsearch")`: kernels for the layers that they win, or for the whole network.

Inductor compiles each graph that torch.compile finds as it is: that is what the user would have had. A copy is rewritten as
`optimize_` does, and Inductor compiles the rest. A graph for inference is also built as a network of ours
(`schedsearch.build`), or with networks for parts of it, when it is first called. All of these are measured at once in that
call, and Inductor's code of the graph as it is serves unless another is clearly faster.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from schedsearch.deadline import NEVER, Deadline
from schedsearch.errors import SchedsearchError, UsageError, did_you_mean
from schedsearch.measurement import DEFAULT_DB
from schedsearch.runtime.fallback import check_levels
from schedsearch.torch.arguments import check_database, check_options
from schedsearch.torch.comparison.benchmark import NO_TIME, Result
from schedsearch.torch.comparison.timing import Timer, timer_of
from schedsearch.torch.compiler import inductor
from schedsearch.torch.compiler.selected_graph import LAYERS, Compilation, SelectedGraph
from schedsearch.torch.compiler.training import swap_depthwise, workloads
from schedsearch.torch.layers import candidates, graph_nodes, patterns
from schedsearch.torch.layers.kernel_op import ALLOWED
from schedsearch.torch.layers.report import LayerReport, NetworkReport, Report, us
from schedsearch.torch.layers.requirements import check_kind, kernels_of, reason_without_networks
from schedsearch.torch.layers.rewrite import rewrite
from schedsearch.torch.layers.selection import LayerSelector, Selected
from schedsearch.torch.layers.tuning import TUNE_S, tune_missing
from schedsearch.torch.networks.frozen_network import copied
from schedsearch.torch.networks.selection import NetworkSelector
from schedsearch.torch.operators.formats import allows_tf32
from schedsearch.torch.operators.store import say, use
from schedsearch.torch.refusal import Refusal

_log = logging.getLogger("schedsearch.torch")
Compiled = Callable[..., Any]
_TUNED = 0.8  # of the time that is left: for tuning, what remains of it for measuring and compiling
_BOTH_S = 60.0  # less time is for a network alone: it gains more than layers do, and takes half a minute to compile


@dataclass(frozen=True)
class Options:
    """What `torch.compile(..., options={...})` may say.

    Attributes:
        db: the records of tuned kernels.
        tune: whether to tune what has no record first; it may take minutes.
        trials: configurations to try for each layer that is tuned.
        tune_s: if `tune`, seconds until the first call of a graph has its answer, with everything that happens before:
            Inductor's compilation, tuning, building, comparing. What has no time left is PyTorch's.
        mode: Inductor's: default, max-autotune, max-autotune-no-cudagraphs or reduce-overhead.
        layers: whether kernels may take the place of single layers.
        network: whether networks may take the place of a graph, or of parts of it.
        allow: how a kernel of a layer may be found; see `schedsearch.compile`.
        report: is called with a `Report` for each graph.
        timer: measures kernels and PyTorch.
    """

    db: str | os.PathLike[str] = DEFAULT_DB
    tune: bool = False
    trials: int = 64
    tune_s: float = TUNE_S
    mode: str = "default"
    layers: bool = True
    network: bool = True
    allow: Sequence[str] = ALLOWED
    report: Callable[[Report], None] | None = None
    timer: Timer | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Options by name.

        Raises:
            TypeError: one has a value of another type.
            UsageError: an unknown option, or an impossible value.
            DatabaseError: there is no file `db`, if it is given, and neither `tune` nor the level default does without.
        """
        names = [each.name for each in fields(cls)]
        for name in given:
            if name not in names:
                raise UsageError(f"unknown option {name!r}{did_you_mean(str(name), names)}; allowed: {', '.join(names)}")
        check_options(dict(given))
        options = cls(**given)
        if "db" in given:
            check_database(options.db, options.allow, options.tune)
        return options


def schedsearch(
    module: fx.GraphModule,
    inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Compiled:
    """The backend, as torch.compile calls it.

    Args:
        module: a graph; parameters are inputs of it.
        inputs: of the graph, as the call that caused the compilation has them.
        mode: as the option.
        options: see `Options`.

    Raises:
        TypeError, UsageError, DatabaseError: as `Options.of`. torch.compile raises them in the first call, within its own
            BackendCompilerFailed.

    Examples:
        >>> fast = torch.compile(model, backend="schedsearch", options={"db": "records.db"})
    """
    chosen = Options.of({**(options or {}), **({} if mode is None else {"mode": mode})})
    started = time.perf_counter()
    deadline = Deadline.within(chosen.tune_s) if chosen.tune else NEVER
    if _trains(inputs):
        return _trained(module, inputs, chosen, deadline)
    try:
        device = _device_of(inputs)
        kernels = kernels_of(Path(chosen.db), device, check_levels(chosen.allow), chosen.tune)
    except Refusal as error:
        _tell_refusal(chosen, error)
        return inductor.compiled(module, inputs, chosen.mode)
    lacking = reason_without_networks() if chosen.network else ""
    for_networks = _copy(module) if chosen.network and not lacking else None
    layered = _copy(module) if chosen.layers else None
    _log.info("Inductor compiles a graph of %d nodes", len(module.graph.nodes))
    plain = inductor.compiled(module, inputs, chosen.mode)
    compile_s = time.perf_counter() - started
    selector = LayerSelector(kernels, chosen.timer or timer_of(device), deadline.before(compile_s))
    rows, notes = _rewritten(layered, selector, chosen, for_networks is not None) if layered is not None else ([], [])
    notes += [lacking] if lacking else []
    with_layers: Compiled | None = None
    if layered is not None and any(row.swapped for row in rows):
        if deadline.left_s >= compile_s:
            _log.info("Inductor compiles the graph with kernels for layers")
            with_layers = inductor.compiled(layered, inputs, chosen.mode)
        else:
            rows = _unswapped(rows, NO_TIME.format("compile the graph with it"))

    def tell(network: NetworkReport | None, result: Result | None) -> None:
        seconds = time.perf_counter() - started
        _tell(chosen, _with_times(Report(tuple(rows), tuple(notes), seconds, network), result))

    def compile_part(part: fx.GraphModule, given: Sequence[object]) -> Compiled:
        return inductor.compiled(part, given, chosen.mode)

    def compile_rest(rest: fx.GraphModule, given: Sequence[object]) -> Compiled:
        if chosen.layers:
            _rewritten(rest, selector, replace(chosen, tune=False), False)
        return inductor.compiled(rest, given, chosen.mode)

    if for_networks is None and with_layers is None:
        tell(None, None)
        return plain
    captures = chosen.mode in ("default", "max-autotune-no-cudagraphs")
    network_selector = NetworkSelector(kernels, captures, chosen.timer, chosen.tune, deadline)
    compilation = Compilation(plain, compile_s, with_layers, compile_part, compile_rest)
    return SelectedGraph(for_networks, inputs, compilation, network_selector, tell)


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    return fx.GraphModule(module, copied(module.graph)[0])


def _with_times(report: Report, result: Result | None) -> Report:
    """The report with what the measurement of the whole graph found for its layers."""
    if result is None or LAYERS not in {*result.times_ns, *result.problems}:
        return report
    ours_us, torch_us = us(result.times_ns.get(LAYERS)), us(result.pytorch_ns)
    if result.winner == LAYERS:
        return replace(report, ours_us=ours_us, torch_us=torch_us)
    by_networks = report.network is not None and report.network.served
    reason = "networks of ours are faster" if by_networks else f"the whole graph with it: {result.problems[LAYERS]}"
    return replace(report, ours_us=ours_us, torch_us=torch_us, layers=tuple(_unswapped(report.layers, reason)))


def _unswapped(rows: Sequence[LayerReport], reason: str) -> list[LayerReport]:
    return [replace(each, swapped=False, reason=reason) if each.swapped else each for each in rows]


def _device_of(inputs: Sequence[object]) -> torch.device:
    devices = {each.device for each in inputs if isinstance(each, torch.Tensor)}
    if len(devices) != 1:
        raise Refusal(f"its inputs lie on {len(devices)} devices; allowed: 1")
    (device,) = devices
    check_kind(device)
    if torch.are_deterministic_algorithms_enabled():
        raise Refusal("deterministic algorithms are asked for")
    return device


def _trains(inputs: Sequence[object]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs)


def _trained(module: fx.GraphModule, inputs: Sequence[object], options: Options, deadline: Deadline) -> Compiled:
    """A graph with gradients: depthwise convolutions by kernels, in both directions."""
    started = time.perf_counter()
    rows: list[LayerReport] = []
    notes: list[str] = []
    try:
        device = _device_of(inputs)
        kernels = kernels_of(Path(options.db), device, check_levels(options.allow), options.tune)
        if options.layers:
            if options.tune:
                notes.append(tune_missing(workloads(module.graph), kernels, options.trials, deadline.share(_TUNED)))
            use(options.db, allow=options.allow)
            _log.info("depthwise layers are timed")
            timer = options.timer or timer_of(device)
            rows = swap_depthwise(module.graph, timer, kernels.target.l2_bytes, deadline)
            module.recompile()
    except (Refusal, SchedsearchError) as error:
        _tell_refusal(options, error)
        return inductor.compiled(module, inputs, options.mode)
    _tell(options, Report(tuple(rows), tuple(notes), time.perf_counter() - started))
    return inductor.compiled(module, inputs, options.mode)


def _rewritten(
    module: fx.GraphModule, selector: LayerSelector, options: Options, networks: bool
) -> tuple[list[LayerReport], list[str]]:
    """Rewrites the layers of a graph for which kernels won.

    Args:
        networks: whether networks are tried afterwards, which get half of the time that is left.
    """
    found = patterns.find(module.graph, tf32=allows_tf32() and selector.kernels.device.type == "cuda")
    layers = [each for each in found if isinstance(each, graph_nodes.Layer)]
    if networks and options.tune and selector.deadline.left_s < _BOTH_S and selector.lacks_records(layers):
        late = Selected(None, NO_TIME.format("tune it beside a network"))
        return [LayerReport.of(each, late if isinstance(each, graph_nodes.Layer) else None) for each in found], []
    notes = []
    if options.tune and layers:
        notes.append(selector.tune(layers, options.trials, selector.deadline.share(_TUNED / 2 if networks else _TUNED)))
    competes = options.mode.startswith("max-autotune") and bool(layers)
    if competes and (why := candidates.register()):
        notes.append(why)
        competes = False
    selector.expect(layers)
    selected = {id(layer): selector.select(layer, timed=not competes) for layer in layers}
    rows = [LayerReport.of(each, selected.get(id(each))) for each in found]
    chosen = [(each, call) for each in layers if (call := selected[id(each)].call) is not None]
    if chosen:
        rewrite(module.graph, chosen, candidates=competes)
        module.recompile()
    if competes:
        notes.append(f"Inductor's max-autotune chooses between its code and our kernels for {len(chosen)} layers")
    return rows, notes


def _tell_refusal(options: Options, error: Exception) -> None:
    """Warns once for each reason; a model may have many graphs."""
    text = f"Inductor compiles the graph: {str(error).splitlines()[0]}"
    say(f"torch.compile(backend='schedsearch'): {text}")
    _tell(options, Report(notes=(text,)))


def _tell(options: Options, report: Report) -> None:
    _log.info("%s", report)
    if options.report is not None:
        options.report(report)
