"""`optimize_`: one line that makes a model that somebody has faster, where it was measured to be faster."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from schedsearch.errors import SchedsearchError, UsageError
from schedsearch.measurement import DEFAULT_DB
from schedsearch.torch import patterns
from schedsearch.torch.calls import ALLOWED, Call, Kernels
from schedsearch.torch.checks import device_of
from schedsearch.torch.choose import Chooser, inference
from schedsearch.torch.contest import Contest
from schedsearch.torch.forward import OptimizedForward, Plan, evaluating, without_plans
from schedsearch.torch.held import Refusal
from schedsearch.torch.model_networks import is_kept, networks_in
from schedsearch.torch.report import LayerReport, PartReport, Report
from schedsearch.torch.rewrite import rewrite
from schedsearch.torch.telling_forward import TellingForward
from schedsearch.torch.timing import Timer, timer_of
from schedsearch.torch.tuning import TUNE_S, strange_records

Filter = Callable[[nn.Module, str], bool]
Place = tuple[str, Plan, tuple[Any, ...]]  # the path of a module, its plan, its inputs


def optimize_(
    model: nn.Module,
    example: Any,
    *,
    db: str | os.PathLike[str] = DEFAULT_DB,
    tune: bool = False,
    trials: int = 64,
    tune_s: float = TUNE_S,
    networks: bool = False,
    filter_fn: Filter | None = None,
    allow: Sequence[str] = ALLOWED,
    timer: Timer | None = None,
) -> Report:
    """Lets tuned kernels compute the layers of a model for which they are faster than PyTorch. In place.

    Layers are convolutions, depthwise ones too, with the batch norm, bias, addition and activation behind them, and pixel
    shuffles. Each is swapped only if its kernel is faster than PyTorch here and now, and its result is right. In the end the
    whole model is timed: unless it is faster with its kernels, it remains as it was.

    The model's modules and parameters remain what they are: `state_dict`, `.half()`, `.to()`, `load_state_dict` and
    `copy.deepcopy` work as before, and weights may change at any time. Kernels serve calls like the example, in evaluation
    mode and without autograd; any other call runs exactly as before. `torch.compile(model)` has no graph breaks.

    Call it again with another example to serve that shape as well. `revert_` undoes it.

    Args:
        model: in evaluation mode, on a GPU or the CPU, in float16, bfloat16 or float32. Convert it to
            `memory_format=torch.channels_last` first: most kernels are made for that.
        example: an input as later calls have it, or a tuple of several.
        db: the records of tuned kernels. It may be missing if `tune`.
        tune: whether to tune layers that have no record first.
        trials: configurations to try for each of them, shared over the run.
        tune_s: seconds after which tuning ends, whatever `trials` says; a final race of some seconds comes on top.
        networks: whether networks of ours may compute parts of the model, or the whole: layers that follow one another,
            with copies of their weights. Each call compares addresses and versions of the weights with those copied; once
            they differ, PyTorch computes the part, with a warning. A write through `weight.data` is not noticed.
        filter_fn: (module, its name) -> whether its layer may be swapped; default: all.
        allow: how a kernel may be found; see `schedsearch.compile`.
        timer: measures kernels and PyTorch; default: CUDA graphs on a GPU, the host's clock on a CPU.

    Returns:
        What became of each layer. A model that cannot be optimized is left as it is; a warning and `Report.notes` say why.

    Raises:
        TypeError: `model` is not a module, or an argument is of another type.
        UsageError: an unknown rung in `allow`, or an impossible budget.
        DatabaseError, DeviceError, Interrupted: of the tuning, if `tune`.

    Example:
        >>> model = torchvision.models.resnet50().eval().half().cuda().to(memory_format=torch.channels_last)
        >>> print(schedsearch.torch.optimize_(model, x, db="records.db", tune=True))
        >>> model = torch.compile(model)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    started = time.perf_counter()
    args = example if isinstance(example, tuple) else (example,)
    try:
        device = device_of(model, args)
        kernels = kernels_of(Path(db), device, tuple(allow), tune)
        clock = timer or timer_of(device)
        chooser = Chooser(kernels, clock)
        places = _places(model, args)
        notes: list[str] = []
        parts: list[PartReport] = []
        if networks:
            contest = Contest(kernels, timer=timer)
            share_s = tune_s / 2 / len(places) if tune else None
            for path, plan, given in places:
                part = model.get_submodule(path)
                found = networks_in(part, plan, given, contest, share_s, is_kept(part, path, filter_fn))
                parts += found[0]
                notes += found[1]
        layers = [each for _, plan, _ in places for each in plan.found if isinstance(each, patterns.Layer)]
        if tune:
            notes.append(chooser.tune(layers, trials, tune_s - (time.perf_counter() - started)))
        elif strange := strange_records((each.workload for each in layers), kernels):
            notes.append(strange)
        notes += _advice(model, layers)
        wanted = {path: _wanted(model.get_submodule(path), path, plan, filter_fn) for path, plan, _ in places}
        chooser.expect(each for layers in wanted.values() for each in layers)
        rows = [row for path, plan, _ in places for row in _swap(model, path, plan, chooser, wanted[path])]
        report = Report(tuple(rows), tuple(notes), parts=tuple(parts))
        if report.is_used:
            report = _compared(report, model, args, places, device, clock)
    except Refusal as error:
        warnings.warn(f"optimize_ leaves the model as it is: {error}", stacklevel=2)
        return Report(notes=(f"the model is as it was: {error}",), seconds=time.perf_counter() - started)
    if not rows and not parts:
        report = replace(report, notes=(*notes, "the model has no convolutions and no pixel shuffles"))
    return replace(report, seconds=time.perf_counter() - started)


def revert_(model: nn.Module) -> nn.Module:
    """Undoes `optimize_` on a model and everything in it, and returns the model."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, OptimizedForward):
            forward.remove()
    return model


def kernels_of(db: Path, device: torch.device, allow: tuple[str, ...], tune: bool) -> Kernels:
    if not db.exists() and not tune and "default" not in allow:
        raise Refusal(f"there is no database {db}; tune first, e.g. optimize_(model, example, tune=True)")
    if not db.exists() and tune:
        from schedsearch.records.store import Store

        Store.open(db).close()
    try:
        return Kernels.of(db.absolute(), device, allow)
    except UsageError:  # the caller's mistake
        raise
    except SchedsearchError as error:
        raise Refusal(str(error)) from error


def _places(model: nn.Module, args: tuple[Any, ...]) -> list[Place]:
    """The largest parts of a model that torch.export can read, with their inputs: the model, or else its children, theirs,
    and so on."""
    try:
        return [("", Plan.of(model, args), args)]
    except Exception as error:  # torch.export raises errors of many kinds
        reason = f"torch.export cannot read {type(model).__name__}: {_first_line(error)}"
    calls = _calls_of_children(model, args)
    found = []
    for name, (child, given) in calls.items():
        if not any(isinstance(each, nn.Conv2d | nn.PixelShuffle | nn.PixelUnshuffle) for each in child.modules()):
            continue
        try:
            found += [(f"{name}.{path}".strip("."), plan, of) for path, plan, of in _places(child, given)]
        except Refusal:
            continue
    if not found:
        raise Refusal(reason)
    return found


def _calls_of_children(model: nn.Module, args: tuple[Any, ...]) -> dict[str, tuple[nn.Module, tuple[Any, ...]]]:
    """Each child that one run of the model calls, with the arguments of its first call."""
    calls: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {}
    handles = []
    for name, child in model.named_children():

        def keep(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], name: str = name) -> None:
            if not named:
                calls.setdefault(name, (module, given))

        handles.append(child.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        with torch.no_grad(), evaluating(model):
            model(*args)
    except Exception as error:  # the example does not fit the model
        raise Refusal(f"the model fails on the example: {_first_line(error)}") from error
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _wanted(part: nn.Module, path: str, plan: Plan, filter_fn: Filter | None) -> list[patterns.Layer]:
    """The layers of a part of the model that may be swapped."""
    layers = [each for each in plan.found if isinstance(each, patterns.Layer)]
    return [each for each in layers if filter_fn is None or filter_fn(_module(part, each.name), _joined(path, each))]


def _swap(model: nn.Module, path: str, plan: Plan, chooser: Chooser, wanted: Sequence[patterns.Layer]) -> list[LayerReport]:
    """Measures the layers of a part of the model, and lets it run with those kernels that won."""
    part = model.get_submodule(path)
    rows: list[LayerReport] = []
    chosen: list[tuple[patterns.Layer, Call]] = []
    for each in plan.found:
        choice = None
        if isinstance(each, patterns.Layer) and any(each is other for other in wanted):
            choice = chooser.choose(each)
            if choice.call is not None:
                chosen.append((each, choice.call))
        row = LayerReport.of(each, choice)
        rows.append(LayerReport(**{**vars(row), "name": _joined(path, each)}))
    if chosen:
        rewrite(plan.graph, chosen)
    if chosen or _has_networks(plan):
        TellingForward.install(part, plan)
    return rows


def _compared(
    report: Report, model: nn.Module, args: tuple[Any, ...], places: Sequence[Place], device: torch.device, timer: Timer
) -> Report:
    """Runs the whole model with its kernels and without. Kernels are given up if it fails with them or is not faster."""

    def run() -> Any:
        return model(*args)

    with inference(device), evaluating(model):
        try:
            run()
        except Exception as error:  # of many kinds, and whatever it is, PyTorch alone did not raise it on this example
            reason = f"the model fails with kernels: {_first_line(error)}"
            return _given_up(replace(report, notes=(*report.notes, reason)), model, places, reason)
        try:
            ours_us = timer.ns([run]) / 1e3
            with without_plans(model):
                torch_us = timer.ns([run]) / 1e3
        except RuntimeError as error:  # a CUDA graph cannot capture every model
            return replace(report, notes=(*report.notes, f"the whole model could not be timed: {_first_line(error)}"))
    report = replace(report, ours_us=ours_us, torch_us=torch_us)
    if ours_us < torch_us:
        return report
    return _given_up(report, model, places, "it is faster alone, but the model is not faster with all that are")


def _given_up(report: Report, model: nn.Module, places: Sequence[Place], reason: str) -> Report:
    """Lets the model run as it did before."""
    for path, plan, _ in places:
        OptimizedForward.drop(model.get_submodule(path), plan)
    layers = [replace(each, swapped=False, reason=reason) if each.swapped else each for each in report.layers]
    parts = [replace(each, served=False, reason=reason) if each.served else each for each in report.parts]
    return replace(report, layers=tuple(layers), parts=tuple(parts))


def _advice(model: nn.Module, layers: Sequence[patterns.Layer]) -> list[str]:
    """What the caller may not have meant."""
    found = []
    if any(module.training for module in model.modules()):
        found.append("the model is in training mode, in which kernels do not serve; they do after model.eval()")
    if layers and all(each.workload.params.get("layout") == "NCHW" for each in layers):
        found.append(
            "its images are in NCHW, for which there are fewer kernels; for others convert the model and the example by "
            ".to(memory_format=torch.channels_last)"
        )
    return found


def _has_networks(plan: Plan) -> bool:
    return any(node.target is torch.ops.schedsearch.network.default for node in plan.graph.nodes)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _module(part: nn.Module, name: str) -> nn.Module:
    try:
        return part.get_submodule(name)
    except AttributeError:  # a call of a function, named after its node
        return part


def _joined(path: str, layer: patterns.Layer | patterns.Refused) -> str:
    return f"{path}.{layer.name}" if path else layer.name
