"""`torch.compile(model, backend="schedsearch")`: kernels for the layers that they win, or for the whole network.

Each graph that torch.compile finds is rewritten as `optimize_` does, and Inductor compiles the rest. A graph for inference
whose every node has a kernel is also built as a network of ours (`schedsearch.build`) when it is first called, and serves
where it was measured to be faster than what Inductor made.
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

from schedsearch.errors import SchedsearchError, UsageError, did_you_mean
from schedsearch.measurement import DEFAULT_DB
from schedsearch.runtime.ladder import check_rungs
from schedsearch.torch import candidates, inductor, patterns
from schedsearch.torch.arguments import check_database, check_options
from schedsearch.torch.calls import ALLOWED
from schedsearch.torch.checks import check_kind, reason_without_networks
from schedsearch.torch.choose import Chooser
from schedsearch.torch.contest import Contest
from schedsearch.torch.formats import allows_tf32
from schedsearch.torch.held import Refusal, copied
from schedsearch.torch.optimize import kernels_of
from schedsearch.torch.report import LayerReport, NetworkReport, Report
from schedsearch.torch.rewrite import rewrite
from schedsearch.torch.store import say, use
from schedsearch.torch.timing import Timer, timer_of
from schedsearch.torch.training import swap_depthwise, workloads
from schedsearch.torch.tuning import TUNE_S, tune_missing
from schedsearch.torch.whole import Network

_log = logging.getLogger("schedsearch.torch")
Compiled = Callable[..., Any]


@dataclass(frozen=True)
class Options:
    """What `torch.compile(..., options={...})` may say.

    Attributes:
        db: the records of tuned kernels.
        tune: whether to tune what has no record first; it may take minutes.
        trials: configurations to try for each layer that is tuned.
        tune_s: seconds after which tuning ends, if `tune`; layers may take half of them, networks the rest.
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
            DatabaseError: there is no file `db`, if it is given, and neither `tune` nor the rung default does without.
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
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
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

    Example:
        >>> fast = torch.compile(model, backend="schedsearch", options={"db": "records.db"})
    """
    chosen = Options.of({**(options or {}), **({} if mode is None else {"mode": mode})})
    started = time.perf_counter()
    if _trains(inputs):
        return _trained(module, inputs, chosen)
    try:
        device = _device_of(inputs)
        kernels = kernels_of(Path(chosen.db), device, check_rungs(chosen.allow), chosen.tune)
    except Refusal as error:
        _tell_refusal(chosen, error)
        return inductor.compiled(module, inputs, chosen.mode)
    lacking = reason_without_networks() if chosen.network else ""
    whole = fx.GraphModule(module, copied(module.graph)[0]) if chosen.network and not lacking else None
    timer = chosen.timer or timer_of(device)
    chooser = Chooser(kernels, timer)
    rows, notes = _rewritten(module, chooser, chosen) if chosen.layers else ([], [])
    notes += [lacking] if lacking else []
    tuned_s = time.perf_counter() - started
    _log.info("Inductor compiles a graph of %d nodes", len(module.graph.nodes))
    compiled = inductor.compiled(module, inputs, chosen.mode)
    if whole is None:
        _tell(chosen, Report(tuple(rows), tuple(notes), time.perf_counter() - started))
        return compiled

    def tell(network: NetworkReport) -> None:
        _tell(chosen, Report(tuple(rows), tuple(notes), time.perf_counter() - started, network))

    def compile_part(part: fx.GraphModule, given: Sequence[Any]) -> Compiled:
        return inductor.compiled(part, given, chosen.mode)

    def compile_rest(rest: fx.GraphModule, given: Sequence[Any]) -> Compiled:
        if chosen.layers:
            _rewritten(rest, chooser, replace(chosen, tune=False))
        return inductor.compiled(rest, given, chosen.mode)

    captures = chosen.mode in ("default", "max-autotune-no-cudagraphs")
    return Network(
        whole,
        inputs,
        compiled,
        Contest(kernels, captures, chosen.timer),
        tell,
        compile_part=compile_part,
        compile_rest=compile_rest,
        tune_s=max(1.0, chosen.tune_s - tuned_s) if chosen.tune else None,
    )


def _device_of(inputs: Sequence[Any]) -> torch.device:
    devices = {each.device for each in inputs if isinstance(each, torch.Tensor)}
    if len(devices) != 1:
        raise Refusal(f"its inputs lie on {len(devices)} devices; allowed: 1")
    (device,) = devices
    check_kind(device)
    if torch.are_deterministic_algorithms_enabled():
        raise Refusal("deterministic algorithms are asked for")
    return device


def _trains(inputs: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs)


def _trained(module: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Compiled:
    """A graph with gradients: depthwise convolutions by kernels, in both directions."""
    started = time.perf_counter()
    rows: list[LayerReport] = []
    notes: list[str] = []
    try:
        device = _device_of(inputs)
        kernels = kernels_of(Path(options.db), device, check_rungs(options.allow), options.tune)
        if options.layers:
            if options.tune:
                notes.append(tune_missing(workloads(module.graph), kernels, options.trials, options.tune_s))
            use(options.db, allow=options.allow)
            _log.info("depthwise layers are timed")
            rows = swap_depthwise(module.graph, options.timer or timer_of(device), kernels.target.l2_bytes)
            module.recompile()
    except (Refusal, SchedsearchError) as error:
        _tell_refusal(options, error)
        return inductor.compiled(module, inputs, options.mode)
    _tell(options, Report(tuple(rows), tuple(notes), time.perf_counter() - started))
    return inductor.compiled(module, inputs, options.mode)


def _rewritten(module: fx.GraphModule, chooser: Chooser, options: Options) -> tuple[list[LayerReport], list[str]]:
    """Rewrites the layers of a graph for which kernels won."""
    found = patterns.find(module.graph, tf32=allows_tf32() and chooser.kernels.device.type == "cuda")
    layers = [each for each in found if isinstance(each, patterns.Layer)]
    tune_s = options.tune_s / 2 if options.network else options.tune_s
    notes = [chooser.tune(layers, options.trials, tune_s)] if options.tune and layers else []
    competes = options.mode.startswith("max-autotune") and bool(layers)
    if competes and (why := candidates.register()):
        notes.append(why)
        competes = False
    chooser.expect(layers)
    choices = {id(layer): chooser.choose(layer, timed=not competes) for layer in layers}
    rows = [LayerReport.of(each, choices.get(id(each))) for each in found]
    chosen = [(each, call) for each in layers if (call := choices[id(each)].call) is not None]
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
