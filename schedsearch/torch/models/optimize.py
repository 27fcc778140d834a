"""`optimize_`: one line that makes a model that somebody has faster, where it was measured to be faster."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from schedsearch.deadline import NEVER, Deadline
from schedsearch.errors import ArgumentError, first_line
from schedsearch.measurement import DEFAULT_DB
from schedsearch.progress import is_shown, shown, stage
from schedsearch.records.location import require_file
from schedsearch.runtime.fallback import check_levels
from schedsearch.text import type_text
from schedsearch.torch.arguments import CheckedFilter, Filter, check_database, check_options, checked_example, misfit
from schedsearch.torch.comparison.benchmark import PYTORCH, benchmark
from schedsearch.torch.comparison.state import inference, same_random_numbers
from schedsearch.torch.comparison.timing import CalledTimer, Candidate, Timer, timer_of
from schedsearch.torch.layers import graph_nodes
from schedsearch.torch.layers.kernel_op import ALLOWED, Call, Kernels
from schedsearch.torch.layers.report import LayerReport, PartReport, Report, us
from schedsearch.torch.layers.requirements import kernels_of, reason_without_networks
from schedsearch.torch.layers.rewrite import rewrite
from schedsearch.torch.layers.selection import LayerSelector
from schedsearch.torch.layers.tuning import TUNE_S, strange_records
from schedsearch.torch.models.checks import device_of
from schedsearch.torch.models.forward import OptimizedForward, restore
from schedsearch.torch.models.instance_forward import is_optimized, without_plans
from schedsearch.torch.models.networks import is_kept, named, networks_in
from schedsearch.torch.models.plan import Plan
from schedsearch.torch.models.settings import evaluating, own_copies, same_attributes, same_buffers
from schedsearch.torch.networks.selection import NetworkSelector
from schedsearch.torch.refusal import Refusal

_OURS = "the model with kernels"  # its name in a benchmark
_TUNED = 0.7  # of the time that is left: for tuning, what remains of it for measuring
_CALLS = 10  # of the whole model, when it is compared
_COMPARING = 0.2  # of the time that is left: the most that is kept for that
Place = tuple[str, Plan, tuple[Any, ...]]  # the path of a module, its plan, its inputs


def optimize_(
    model: nn.Module,
    example: object,
    *,
    db: str | os.PathLike[str] = DEFAULT_DB,
    tune: bool = False,
    trials: int = 64,
    tune_s: float = TUNE_S,
    networks: bool = False,
    filter_fn: Filter | None = None,
    allow: Sequence[str] = ALLOWED,
    timer: Timer | None = None,
    progress: bool = True,
) -> Report:
    """Lets tuned kernels compute the layers of a model for which they are faster than PyTorch. In place.

    Layers are convolutions, depthwise ones too, with the batch norm, bias, addition and activation behind them, depthwise
    convolutions over time with what makes them causal and the SiLU behind them, and pixel shuffles. Each is swapped only if
    its kernel is faster than PyTorch here and now, and its result is right. In the end the whole model is timed: unless it
    is faster with its kernels, it remains as it was.

    The model's modules and parameters remain what they are: `state_dict`, `.half()`, `.to()`, `load_state_dict` and
    `copy.deepcopy` work as before, and weights may change at any time. Kernels serve calls like the example, in evaluation
    mode and without autograd; any other call runs exactly as before. `torch.compile(model)` has no graph breaks.

    Call it again with another example to serve that shape as well. `revert_` undoes it. An error leaves the model as it was.

    Args:
        model: in evaluation mode, on a GPU or the CPU, in float16, bfloat16 or float32. Convert it to
            `memory_format=torch.channels_last` first: most kernels are made for that.
        example: an input as later calls have it, or a tuple of several.
        db: the records of tuned kernels. It may be missing if `tune`, or if records are shipped for the device.
        tune: whether to tune layers that have no record first.
        trials: configurations to try for each of them, shared over the run.
        tune_s: if `tune`, seconds until the model is ready, whatever `trials` says, with everything that happens: tuning,
            compiling, measuring. What has no time left is PyTorch's, and the report says so.
        networks: whether networks of ours may compute parts of the model, or the whole: layers that follow one another,
            with copies of their weights. Each call compares addresses and versions of the weights with those copied; once
            they differ, PyTorch computes the part, with a warning. A write through `weight.data` is not noticed.
        filter_fn: (module, its name) -> whether its layer may be swapped; default: all.
        allow: how a kernel may be found; see `schedsearch.compile`.
        timer: measures kernels and PyTorch; default: CUDA graphs on a GPU, the host's clock on a CPU.
        progress: whether to show on standard error what is done, tuning as `schedsearch.tune` does, and the result.

    Returns:
        What became of each layer. A model that cannot be optimized is left as it is; a warning and `Report.notes` say why.

    Raises:
        TypeError: `model` is not a module, an argument is of another type, or `filter_fn` returns what is not a bool.
        UsageError: an unknown level in `allow`, or an impossible budget.
        ArgumentError: `example` has no tensor, one that no kernel takes or on another device, or the model fails on it.
        DatabaseError: there is no file `db`, and neither `tune`, shipped records nor the level default do without it; or,
            with `tune`, none can be made there.
        DeviceError, Interrupted: of the tuning, if `tune`.

    Examples:
        >>> model = torchvision.models.resnet50().eval().half().cuda().to(memory_format=torch.channels_last)
        >>> print(schedsearch.torch.optimize_(model, x, db="records.db", tune=True))
        >>> model = torch.compile(model)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type_text(model)}; give a torch.nn.Module")
    given = {"db": db, "tune": tune, "trials": trials, "tune_s": tune_s, "networks": networks}
    check_options({**given, "filter_fn": filter_fn, "allow": allow, "timer": timer})
    check_database(db, allow, tune)
    deadline = Deadline.within(tune_s) if tune else NEVER
    args = checked_example(example)
    run = _Run(model, args, Budget(trials, deadline) if tune else None, networks, CheckedFilter(filter_fn), timer)
    is_part = is_shown()
    with shown(progress) as display:
        report = run.on(require_file(db), allow, tune)
        if not is_part:
            display.say(report.headline)
    return report


@dataclass(frozen=True)
class Budget:
    """How long layers without a record are tuned: configurations for each, and until when everything is done."""

    trials: int
    deadline: Deadline


class _Run:
    """One call of `optimize_`.

    Args:
        budget: of tuning; None: nothing is tuned.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        budget: Budget | None,
        networks: bool,
        wanted: CheckedFilter,
        timer: Timer | None,
    ) -> None:
        self.started = time.perf_counter()
        self._model, self._budget, self._networks, self._wanted, self._timer = model, budget, networks, wanted, timer
        self._args = own_copies(args)

    def on(self, db: Path, allow: Sequence[str], tune: bool) -> Report:
        """The report of a model that kernels of `db` compute, or that is left as it is, with a warning."""
        model = self._model
        try:
            stage("looking at the device and the records")
            device = device_of(model, self._args)
            kernels = kernels_of(db, device, check_levels(allow), tune)
            with same_random_numbers(device), same_buffers(model), same_attributes(model) as left:
                report = self.report(kernels)
                left |= {inner for each in model.modules() if is_optimized(each) for inner in each.modules()}
            return report
        except Refusal as error:
            warnings.warn(f"optimize_ leaves the model as it is: {error}", stacklevel=3)
            return Report(notes=(str(error),), seconds=time.perf_counter() - self.started)

    def report(self, kernels: Kernels) -> Report:
        """Swaps what wins. Raises Refusal if the model is left as it is; after any exception it is as it was."""
        stage("exporting the model with torch.export")
        places = _places(self._model, self._args)
        wanted = {path: self._layers(path, plan) for path, plan, _ in places}  # asks the filter before anything is done
        timer = self._timer or timer_of(kernels.device)
        selector = LayerSelector(kernels, timer, self._deadline.before(self._model_s(kernels.device)))
        parts, notes = self._in_networks(kernels, places) if self._networks else ([], [])
        if self._networks:
            wanted = {path: self._layers(path, plan) for path, plan, _ in places}
        notes += self._tuned(selector, [each for layers in wanted.values() for each in layers])
        notes += _advice(self._model, [each for _, plan, _ in places for each in _layers_of(plan)])
        selector.expect(each for layers in wanted.values() for each in layers)
        try:
            rows = [row for path, plan, _ in places for row in _swap(self._model, path, plan, selector, wanted[path])]
            report = Report(tuple(rows), tuple(notes), parts=tuple(parts))
            if report.is_used:
                report = _compared(report, self._model, self._args, places, kernels.device, timer, self._deadline)
        except BaseException:
            _drop(self._model, places)
            raise
        if not rows and not parts:
            report = replace(report, notes=(*notes, "the model has no convolutions and no pixel shuffles"))
        return replace(report, seconds=time.perf_counter() - self.started)

    @property
    def _deadline(self) -> Deadline:
        return NEVER if self._budget is None else self._budget.deadline

    def _model_s(self, device: torch.device) -> float:
        """What comparing the whole model will take, by one call of it."""
        if self._deadline is NEVER:
            return 0.0
        with inference(device), evaluating(self._model):
            self._model(*self._args)  # what is done once only
            started = time.perf_counter()
            self._model(*self._args)
        return min(_CALLS * (time.perf_counter() - started), _COMPARING * self._deadline.left_s)

    def _layers(self, path: str, plan: Plan) -> list[graph_nodes.Layer]:
        """The layers of a part of the model that may be swapped."""
        part = self._model.get_submodule(path)
        return [each for each in _layers_of(plan) if self._wanted(*named(part, path, each.name))]

    def _in_networks(self, kernels: Kernels, places: Sequence[Place]) -> tuple[list[PartReport], list[str]]:
        """Lets networks compute parts of the plans."""
        if why := reason_without_networks():
            return [], [why]
        selector = NetworkSelector(kernels, timer=self._timer, tunes=self._budget is not None, deadline=self._deadline)
        parts: list[PartReport] = []
        notes: list[str] = []
        until = self._deadline.share(0.5)
        for number, (path, plan, given) in enumerate(places):
            part, own = self._model.get_submodule(path), until.share(1 / (len(places) - number))
            found = networks_in(part, plan, given, selector, own, is_kept(part, path, self._wanted))
            parts += found[0]
            notes += found[1]
        return parts, notes

    def _tuned(self, selector: LayerSelector, layers: Sequence[graph_nodes.Layer]) -> list[str]:
        """Tunes layers, or says why none has a record."""
        if self._budget is not None:
            return [selector.tune(layers, self._budget.trials, selector.deadline.share(_TUNED))]
        strange = strange_records((each.workload for each in layers), selector.kernels)
        return [strange] if strange else []


def revert_(model: nn.Module) -> nn.Module:
    """Undoes `optimize_` on a model and everything in it, and returns the model. Raises TypeError if it is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type_text(model)}; give a torch.nn.Module")
    for module in model.modules():
        restore(module)
    return model


def _places(model: nn.Module, args: tuple[object, ...]) -> list[Place]:
    """The largest parts of a model that torch.export can read, with their inputs: the model, or else its children, theirs,
    and so on."""
    try:
        return [("", Plan.of(model, args), args)]
    except Refusal as error:
        reason = str(error)
    except Exception as error:  # torch.export raises errors of many kinds
        reason = f"torch.export cannot read {type(model).__name__}: {first_line(error)}"
    calls = _calls_of_children(model, args)
    found = []
    for name, (child, given) in calls.items():
        if not any(
            isinstance(each, nn.Conv1d | nn.Conv2d | nn.PixelShuffle | nn.PixelUnshuffle) for each in child.modules()
        ):
            continue
        try:
            found += [(f"{name}.{path}".strip("."), plan, of) for path, plan, of in _places(child, given)]
        except (Refusal, ArgumentError):
            continue
    if not found:
        raise Refusal(reason)
    return found


def _calls_of_children(model: nn.Module, args: tuple[object, ...]) -> dict[str, tuple[nn.Module, tuple[Any, ...]]]:
    """Each child that one run of the model calls, with the arguments of its first call."""
    calls: dict[str, tuple[nn.Module, tuple[Any, ...]]] = {}
    handles = []
    for name, child in model.named_children():

        def keep(module: nn.Module, given: tuple[object, ...], named: dict[str, Any], name: str = name) -> None:
            if not named:
                calls.setdefault(name, (module, given))

        handles.append(child.register_forward_pre_hook(keep, with_kwargs=True))
    try:
        with torch.no_grad(), evaluating(model):
            model(*args)
    except Exception as error:  # of many kinds: the example does not fit the model
        raise misfit(model, args, error) from error
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _swap(
    model: nn.Module, path: str, plan: Plan, selector: LayerSelector, wanted: Sequence[graph_nodes.Layer]
) -> list[LayerReport]:
    """Measures the layers of a part of the model, and lets it run with those kernels that won."""
    part = model.get_submodule(path)
    rows: list[LayerReport] = []
    chosen: list[tuple[graph_nodes.Layer, Call]] = []
    for each in plan.found:
        selected = None
        if isinstance(each, graph_nodes.Layer) and any(each is other for other in wanted):
            stage(f"measuring layer {each.name}")
            selected = selector.select(each)
            if selected.call is not None:
                chosen.append((each, selected.call))
        row = LayerReport.of(each, selected)
        rows.append(LayerReport(**{**vars(row), "name": named(part, path, each.name)[1]}))
    if chosen:
        rewrite(plan.graph, chosen)
    if chosen or _has_networks(plan):
        OptimizedForward.install(part, plan)
    return rows


def _compared(
    report: Report,
    model: nn.Module,
    args: tuple[object, ...],
    places: Sequence[Place],
    device: torch.device,
    timer: Timer,
    deadline: Deadline,
) -> Report:
    """Runs the whole model with its kernels and without. Kernels are given up if it fails with them or is not faster."""

    def run() -> Any:
        return model(*args)

    stage("comparing the whole model with and without kernels")
    with inference(device), evaluating(model):
        try:
            run()
        except Exception as error:  # of many kinds, and whatever it is, PyTorch alone did not raise it on this example
            reason = f"the model fails with kernels: {first_line(error)}"
            return _given_up(replace(report, notes=(*report.notes, reason)), model, places, reason)
        pytorch = Candidate(PYTORCH, run, around=lambda: without_plans(model))
        result = benchmark([timer], pytorch, [Candidate(_OURS, run)], deadline)
        if PYTORCH not in result.times_ns and device.type == "cuda":  # a CUDA graph cannot capture every model
            result = benchmark([CalledTimer(device)], pytorch, [Candidate(_OURS, run)], deadline)
    report = replace(report, ours_us=us(result.times_ns.get(_OURS)), torch_us=us(result.pytorch_ns))
    if result.winner == _OURS:
        return report
    reason = "it is faster alone, but the model as a whole is not"
    if report.ours_us is None:
        reason = f"the whole model could not be timed: {result.problems[_OURS]}"
        report = replace(report, notes=(*report.notes, reason))
    return _given_up(report, model, places, reason)


def _given_up(report: Report, model: nn.Module, places: Sequence[Place], reason: str) -> Report:
    """Lets the model run as it did before."""
    _drop(model, places)
    layers = [replace(each, swapped=False, reason=reason) if each.swapped else each for each in report.layers]
    parts = [replace(each, served=False, reason=reason) if each.served else each for each in report.parts]
    return replace(report, layers=tuple(layers), parts=tuple(parts))


def _layers_of(plan: Plan) -> list[graph_nodes.Layer]:
    return [each for each in plan.found if isinstance(each, graph_nodes.Layer)]


def _drop(model: nn.Module, places: Sequence[Place]) -> None:
    for path, plan, _ in places:
        OptimizedForward.drop(model.get_submodule(path), plan)


def _advice(model: nn.Module, layers: Sequence[graph_nodes.Layer]) -> list[str]:
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
