"""Which layers a kernel computes: those where it was measured to be faster than PyTorch here and now, and right."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from schedsearch.deadline import NEVER, Deadline
from schedsearch.errors import NoRecordError, SchedsearchError, UnsupportedError, first_line
from schedsearch.torch.comparison.accuracy import LAYER, Errors, errors_of
from schedsearch.torch.comparison.benchmark import NO_TIME, PYTORCH, Result, benchmark
from schedsearch.torch.comparison.state import cudnn_searches, inference
from schedsearch.torch.comparison.timing import Candidate, Timer, sets_needed
from schedsearch.torch.layers.graph_nodes import Layer, value_of, viewed
from schedsearch.torch.layers.kernel_op import Call, Kernels, call_of
from schedsearch.torch.layers.tuning import missing, reason_without_kernel, tune_missing
from schedsearch.torch.operators.formats import without_tf32
from schedsearch.workload import Workload

KERNEL = "kernel"  # its name in a benchmark
_Operands = Mapping[str, torch.Tensor]
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Selected:
    """What became of a layer.

    Attributes:
        call: the kernel that takes its place, or None.
        reason: why not; empty if it was swapped.
        ours_ns, theirs_ns: measured times of the kernel and of PyTorch; None if they were not measured.
        record_id: row of the kernel's record in the database.
        level: how the kernel was found; see `schedsearch.compile`.
        error, torch_error: largest difference from PyTorch in float32, over the largest magnitude; of the kernel, and of
            PyTorch in the layer's own format.
    """

    call: Call | None
    reason: str = ""
    ours_ns: float | None = None
    theirs_ns: float | None = None
    record_id: int | None = None
    level: str = ""
    error: float | None = None
    torch_error: float | None = None


class LayerSelector:
    """Measures each distinct layer once, and keeps the answers.

    Args:
        timer: measures both sides.
        deadline: layers that are not measured by then are PyTorch's.
    """

    def __init__(self, kernels: Kernels, timer: Timer, deadline: Deadline = NEVER) -> None:
        self.kernels, self._timer, self.deadline = kernels, timer, deadline
        self._known: dict[Any, Selected] = {}
        self._lock = threading.Lock()

    def expect(self, layers: Iterable[Layer]) -> None:
        """Compiles what `select` needs for these layers, all at once: before the first is timed, and not beside it."""
        with contextlib.suppress(SchedsearchError):  # `select` meets it again, and says so
            self.kernels.build_ahead({each.workload for each in layers}, self.deadline)

    def select(self, layer: Layer, *, timed: bool = True) -> Selected:
        """Whether a kernel takes the place of a layer. Nothing that is wrong with a kernel raises.

        Args:
            timed: whether it must be faster than PyTorch; else somebody else compares them.
        """
        scalars = tuple(sorted(layer.scalars.items()))
        strides = tuple((name, value_of(node).stride()) for name, node in layer.arguments.items())
        key = layer.workload, scalars, strides, timed
        with self._lock:
            if key not in self._known:
                if self.deadline.passed:
                    return Selected(None, NO_TIME.format("measure it"))
                self._known[key] = self._measured(layer, timed)
            return self._known[key]

    def lacks_records(self, layers: Iterable[Layer]) -> bool:
        """Whether a layer has no record for this kind of device."""
        return bool(missing(((layer.name, layer.workload) for layer in layers), self.kernels))

    def tune(self, layers: Iterable[Layer], trials: int, deadline: Deadline) -> str:
        """As `tuning.tune_missing`."""
        return tune_missing(((layer.name, layer.workload) for layer in layers), self.kernels, trials, deadline)

    def _measured(self, layer: Layer, timed: bool) -> Selected:
        try:
            call = call_of(layer.workload, layer.scalars, self.kernels)
        except NoRecordError as error:
            return Selected(None, reason_without_kernel(layer.workload, self.kernels, error))
        except SchedsearchError as error:
            return Selected(None, first_line(error))
        origin = call.kernel.provenance
        with inference(self.kernels.device):
            found = Selected(None, record_id=origin.record_id, level=origin.level)
            try:
                bench = _Bench(layer, call, self.kernels)
                errors = bench.errors()
                found = replace(found, error=errors.ours, torch_error=errors.torch)
                if reason := bench.wrong(errors):
                    return replace(found, reason=reason)
                if not timed:
                    return replace(found, call=call)
                result = bench.result(self._timer, self.deadline)
            except SchedsearchError as error:
                return replace(found, reason=first_line(error))
            except torch.OutOfMemoryError:
                return replace(found, reason="there is too little memory to measure it")
        found = replace(found, ours_ns=result.times_ns.get(KERNEL), theirs_ns=result.pytorch_ns)
        if result.winner != KERNEL:
            return replace(found, reason=result.problems[KERNEL])
        return replace(found, call=call)


class _Bench:
    """A layer on operands of its own, by a kernel and by PyTorch."""

    def __init__(self, layer: Layer, call: Call, kernels: Kernels) -> None:
        self.workload, self.scalars, self.call = layer.workload, layer.scalars, call
        generator = torch.Generator(kernels.device).manual_seed(0)
        self._shapes = {name: value_of(node) for name, node in layer.arguments.items()}
        if layer.norm is not None:
            channels = value_of(layer.norm.weight).shape[0]
            dtype = _DTYPES[layer.workload.params["dtype"]]
            self._shapes |= dict.fromkeys(("scale", "shift"), torch.empty(channels, dtype=dtype, device="meta"))
        self._device = kernels.device
        made = {name: self._random(name, like, generator) for name, like in self._shapes.items()}
        self.operands = {name: viewed(layer.views.get(name), each) for name, each in made.items()}
        cache = kernels.target.l2_bytes or (32 << 20)
        nbytes = sum(each.nbytes for each in self.operands.values())
        out = self.workload.output
        self.sets = sets_needed(nbytes + out.size * out_bytes(self.workload), cache)

    def _random(self, name: str, like: Any, generator: torch.Generator) -> torch.Tensor:
        """Normal numbers, such that activations remain near 1."""
        values = torch.empty_strided(tuple(like.shape), tuple(like.stride()), dtype=like.dtype, device=self._device)
        values.normal_(generator=generator)
        if name == "weight":
            values *= math.prod(like.shape[1:]) ** -0.5
        return values.abs_().add_(0.5) if name == "scale" else values

    def _ours(self, operands: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.call([operands[spec.name] for spec in self.workload.signature])

    def errors(self) -> Errors:
        """Raises UnsupportedError if the kernel's result has another shape than PyTorch's."""
        reference, ours = self._exact(), self._ours(self.operands)
        if ours.shape != reference.shape:
            raise UnsupportedError(f"the kernel returns {tuple(ours.shape)}, PyTorch {tuple(reference.shape)}")
        return errors_of(reference, ours, by_torch(self.workload, self.operands, self.scalars))

    def _exact(self) -> torch.Tensor:
        operands = {name: each.float() for name, each in self.operands.items()}
        with without_tf32(), cudnn_searches(False):  # a search for each shape in float32 would be for this call alone
            return by_torch(self.workload, operands, self.scalars)

    def wrong(self, errors: Errors) -> str:
        """Why the kernel's result is not accepted; empty if it is."""
        return LAYER.excess(errors, self.operands["x"].dtype, tf32=self.workload.params.get("precision") == "tf32")

    def result(self, timer: Timer, deadline: Deadline) -> Result:
        """A benchmark of the kernel and PyTorch's best.

        PyTorch's best is its convolution and, where an epilogue follows, one pass over the result: what torch.compile makes
        of batch norm, addition and activation.
        """
        operands = [self.operands, *({n: each.clone() for n, each in self.operands.items()} for _ in range(1, self.sets))]
        pytorch = Candidate(PYTORCH, *(_with(self._theirs, each) for each in operands))
        return benchmark([timer], pytorch, [Candidate(KERNEL, *(_with(self._ours, each) for each in operands))], deadline)

    def _theirs(self, operands: Mapping[str, torch.Tensor]) -> torch.Tensor:
        stages = [stage for stage in stage_names(self.workload) if stage != "depth_to_space"]
        alone = stages in ([], ["bias"])
        y = _core(self.workload, operands, operands.get("bias") if alone else None)
        if not alone:
            residual = operands.get("residual")
            if residual is not None:
                y = y.add_(residual)
            else:
                y = functional.silu(y, inplace=True) if "silu" in stages else torch.relu_(y)
        return functional.pixel_shuffle(y, block) if (block := _block(self.workload)) else y


def _with(run: Callable[[_Operands], torch.Tensor], operands: _Operands) -> Callable[[], Any]:
    return lambda: run(operands)


def out_bytes(workload: Workload) -> int:
    return int(_DTYPES[workload.output.dtype].itemsize)


def stage_names(workload: Workload) -> list[str]:
    """The names of the stages of an epilogue, in order."""
    return [stage.name for stage in workload.params.get("epilogue", ())]


def _block(workload: Workload) -> int:
    """The block of a depth_to_space at the end of the epilogue; 0 without one."""
    shuffles = [stage for stage in workload.params.get("epilogue", ()) if stage.name == "depth_to_space"]
    return shuffles[0].params["block"] if shuffles else 0


def by_torch(workload: Workload, operands: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> torch.Tensor:
    """A workload in PyTorch, stage by stage."""
    y = _core(workload, operands, None)
    values = {scalar.name: scalar.default for scalar in workload.scalars} | dict(scalars)
    for stage in stage_names(workload):
        if stage == "bias":
            y = y + operands["bias"].view(_of_channels(workload))
        elif stage == "silu":
            y = functional.silu(y)
        elif stage == "scale_shift":
            y = y * operands["scale"].view(-1, 1, 1) + operands["shift"].view(-1, 1, 1)
        elif stage == "residual":
            y = y + operands["residual"]
        elif stage == "relu":
            y = torch.relu(y)
        elif stage == "leaky_relu":
            y = functional.leaky_relu(y, values["leaky_relu_slope"])
        elif stage == "clip":
            y = y.clamp(values["clip_min"], values["clip_max"])
        elif stage == "depth_to_space":
            y = functional.pixel_shuffle(y, _block(workload))
        else:
            raise UnsupportedError(f"PyTorch has no equal of the stage {stage}")
    return y


def _of_channels(workload: Workload) -> tuple[int, ...]:
    """The shape in which a vector of channels is added to a result."""
    if workload.op == "depthwise_conv1d":
        return (-1,) if workload.params["layout"] == "NTC" else (-1, 1)
    return (-1, 1, 1)


def _core(workload: Workload, operands: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
    """A workload without its epilogue."""
    p, x = workload.params, operands["x"]
    if workload.op in ("depth_to_space", "space_to_depth"):
        shuffle = functional.pixel_shuffle if workload.op == "depth_to_space" else functional.pixel_unshuffle
        return shuffle(x, p["block"])
    if workload.op == "depthwise_conv1d":
        return _over_time(workload, x, operands["weight"], bias)
    top, left, bottom, right = p["padding"]
    padding = (top, left)
    if (top, left) != (bottom, right):
        x, padding = functional.pad(x, (left, right, top, bottom)), (0, 0)
    groups = p["groups"] if workload.op == "conv2d" else p["c"]
    return functional.conv2d(x, operands["weight"], bias, tuple(p["stride"]), padding, tuple(p["dilation"]), groups)


def _over_time(workload: Workload, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As models write it: padded on both sides, with the end cut off."""
    p = workload.params
    if p["layout"] == "NTC":
        x = x.transpose(1, 2)
    left, right = p["padding"]
    if right > left:
        x, left, right = functional.pad(x, (left, right)), 0, 0
    y = functional.conv1d(x, weight[:, None], bias, 1, left, p["dilation"], p["c"])
    y = y[:, :, : y.shape[2] - (left - right)]
    return y.transpose(1, 2) if p["layout"] == "NTC" else y


def causal_by_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dilation: int, silu: bool
) -> torch.Tensor:
    """A causal convolution of x (n, c, t) by filters (c, 1, taps), as models write it."""
    padding = (weight.shape[2] - 1) * dilation
    y = functional.conv1d(x, weight, bias, 1, padding, dilation, x.shape[1])[:, :, : x.shape[2]]
    return functional.silu(y) if silu else y
