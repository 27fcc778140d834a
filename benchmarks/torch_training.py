"""Training steps of models with depthwise convolutions: ours beside PyTorch's best.

    python benchmarks/torch_training.py --limit 1500 --db training.db --out benchmarks/results/torch_training_h200.json
    python benchmarks/torch_training.py --device cpu --smoke --cases mobilenet_v1:2:fp32 dilated:2:amp --limit 400

A case is MODEL:BATCH:PRECISION and runs in a process of its own with its share of the time that is left. A step is forward
pass, cross entropy, backward pass and SGD with momentum, in channels_last with cudnn.benchmark. amp is autocast to float16
with a fixed scale of the loss (bfloat16 on a CPU), fp32 has no TF32. Every time is given twice: of plain steps, and of
replays of a CUDA graph that holds the whole step. Plain steps take the host's time: each stage takes it again, in turns, for
all that its process has compiled. Python does not collect what compilers left meanwhile. Stages, which run in this order:

eager       PyTorch
compile     torch.compile(model)
ours        torch.compile(model, backend="schedsearch"), depthwise convolutions tuned for --tune seconds before
recorded    the same without tuning, by what is recorded then, if the stage before was ended or failed
graphs      torch.compile(model, mode="reduce-overhead"): forward and backward pass are CUDA graphs; plain steps only
ours_graphs torch.compile(model, backend="schedsearch", options={"mode": "reduce-overhead"}), by what is recorded then
autotune    torch.compile(model, mode="max-autotune-no-cudagraphs")
loss        the loss over --steps steps on the same synthetic data from the same weights: PyTorch, compiled PyTorch, ours;
            --repeats times, each with another order of the data

The share of depthwise is the sum over the layers of their forward and backward pass, each measured alone, over the captured
step: before with PyTorch's layers and its best step, after with those of ours that serve. How far a loss is from PyTorch's
in the end is given as the mean over the repeats with its standard error. Compiled PyTorch shows how far two correct runs
part by rounding alone.

Each stage has a share of its case's time, of which tuning may take three tenths. What it finds is printed and written at
once. Standard error tells what is being done.

Needs PyTorch, and a CUDA device but for the second command, which shows that everything works.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
from collections.abc import Callable
from typing import Any

import common
import stages
import torch
import torch_common
from torch import nn
from torch.nn import functional
from torch_common import captured, hot_us

import schedsearch.torch as sst
from schedsearch.records.store import Store
from schedsearch.torch.backend import schedsearch as backend

MODELS = ("mobilenet_v1", "mobilenet_v2", "dilated")
CASES = tuple(f"{name}:{batch}:{kind}" for name in MODELS for batch in (32, 128) for kind in ("fp32", "amp"))
# With their shares of a case's time.
STAGES = {"eager": 2.0, "compile": 4.0, "ours": 6.0, "recorded": 3.0, "graphs": 2.0, "ours_graphs": 2.0}
STAGES |= {"autotune": 4.0, "loss": 2.0}
TUNED = 0.3  # of a stage's share that tuning may take
BATCHES = 8  # that steps take in turns
LOSS_SCALE = 128.0
LAST = 20  # steps of a run whose mean loss is compared


# ---- models


def _unit(
    first: int, last: int, kernel: int, stride: int = 1, groups: int = 1, dilation: int = 1, act: Any = nn.ReLU6
) -> Any:
    padding = dilation * (kernel // 2)
    conv = nn.Conv2d(first, last, kernel, stride, padding, dilation, groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(last), act())


def _separable(first: int, last: int, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    return nn.Sequential(_unit(first, first, 3, stride, first, dilation, nn.ReLU), _unit(first, last, 1, act=nn.ReLU))


class MobileNetV1(nn.Sequential):
    """Thirteen separable convolutions (Howard et al. 2017)."""

    def __init__(self, classes: int, depth: int = 13) -> None:
        plan = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)][:depth]
        widths = [32, *(width for width, _ in plan)]
        blocks = [_separable(first, last, stride) for first, (last, stride) in zip(widths, plan)]
        super().__init__(
            _unit(3, 32, 3, 2, act=nn.ReLU), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)
        )


class Inverted(nn.Module):
    """An inverted residual: wide depthwise between two narrow 1x1 convolutions."""

    def __init__(self, first: int, last: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = first * expand
        self.body = nn.Sequential(
            *([_unit(first, wide, 1)] if expand > 1 else []),
            _unit(wide, wide, 3, stride, wide),
            nn.Conv2d(wide, last, 1, bias=False),
            nn.BatchNorm2d(last),
        )
        self.adds = stride == 1 and first == last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self.adds else self.body(x)


class MobileNetV2(nn.Sequential):
    """Seventeen inverted residuals (Sandler et al. 2018)."""

    def __init__(self, classes: int, depth: int = 17) -> None:
        plan = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
        blocks, before = [], 32
        for expand, width, count, stride in plan:
            for place in range(count):
                blocks.append(Inverted(before, width, stride if place == 0 else 1, expand))
                before = width
        blocks = blocks[:depth]
        before = [each for each in blocks[-1].body if isinstance(each, nn.Conv2d)][-1].out_channels
        head = [_unit(before, 1280, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, classes)]
        super().__init__(_unit(3, 32, 3, 2), *blocks, *head)


class Dilated(nn.Module):
    """A head as of DeepLabv3+: separable convolutions of dilation 6, 12 and 18 on features of stride 8 (Chen 2018)."""

    def __init__(self, classes: int, width: int = 256) -> None:
        super().__init__()
        half = width // 2
        steps = [(3, width // 8, 2), (width // 8, width // 4, 2), (width // 4, half, 2)]
        self.stem = nn.Sequential(*(_unit(first, last, 3, stride, act=nn.ReLU) for first, last, stride in steps))
        self.branches = nn.ModuleList(
            [_unit(half, width, 1, act=nn.ReLU), *(_separable(half, width, 1, 6 * k) for k in (1, 2, 3))]
        )
        self.mix = nn.Sequential(_separable(4 * width, width), _separable(width, width))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(self.mix(torch.cat([branch(x) for branch in self.branches], 1)).mean((2, 3)))


def make(name: str, classes: int, smoke: bool) -> nn.Module:
    torch.manual_seed(0)
    if name == "dilated":
        return Dilated(classes, 32 if smoke else 256)
    kinds: dict[str, Any] = {"mobilenet_v1": MobileNetV1, "mobilenet_v2": MobileNetV2}
    return kinds[name](classes, **({"depth": 3} if smoke else {}))


# ---- one case, in a process of its own


class Step:
    """A training step of a model on fixed memory, which a CUDA graph can capture.

    Args:
        model: a copy of its own.
        call: the model, perhaps compiled.
        lr: the step along the gradients.
    """

    def __init__(self, model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], case: Case, lr: float) -> None:
        self._model, self._call, self._case, self.lr = model, call, case, lr
        self._weights = list(model.parameters())
        self._momenta = [torch.zeros_like(each) for each in self._weights]
        self.x, self.labels = (each.clone() for each in case.batch(0))
        self.loss = torch.zeros((), device=case.device)

    def __call__(self) -> torch.Tensor:
        case = self._case
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(case.device, case.autocast, enabled=case.amp):
            loss = functional.cross_entropy(self._call(self.x).float(), self.labels)
        scale = LOSS_SCALE if case.amp else 1.0
        gradients = list(torch.autograd.grad(loss * scale, self._weights))
        with torch.no_grad():
            torch._foreach_mul_(self._momenta, 0.9)
            torch._foreach_add_(self._momenta, gradients, alpha=1.0 / scale)
            torch._foreach_add_(self._weights, self._momenta, alpha=-self.lr)
            self.loss.copy_(loss.detach())
        return self.loss

    def reset(self, state: dict[str, Any], lr: float) -> None:
        """Begins anew with these weights."""
        self._model.load_state_dict(state)
        torch._foreach_zero_(self._momenta)
        self.lr = lr

    def load(self, number: int) -> None:
        x, labels = self._case.batch(number)
        self.x.copy_(x)
        self.labels.copy_(labels)


class Case:
    """A model with its data."""

    def __init__(self, case: str, options: argparse.Namespace) -> None:
        name, batch, precision = case.split(":")
        self.options, self.device, self.amp = options, options.device, precision == "amp"
        self.autocast = torch.bfloat16 if options.device == "cpu" else torch.float16
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        Store.open(options.db).close()  # makes it
        self.classes, self.size = (10, 32) if options.smoke else (1000 if name != "dilated" else 21, 224)
        with torch.device(self.device):
            model = make(name, self.classes, options.smoke).train()
        self.model = model.to(memory_format=torch.channels_last)
        self.reports: list[sst.Report] = []
        self._count, self._batches = int(batch), dict[int, tuple[torch.Tensor, torch.Tensor]]()
        self._steps: dict[str, Step] = {}
        self.tune_s = 0.0

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images whose mean colour depends on the label, so that there is something to learn."""
        number %= BATCHES
        if number not in self._batches:
            generator = torch.Generator().manual_seed(number)
            labels = torch.randint(self.classes, (self._count,), generator=generator)
            x = torch.randn((len(labels), 3, self.size, self.size), generator=generator)
            x += torch.stack([torch.sin(labels.float() * k) for k in (1, 2, 3)], 1)[:, :, None, None]
            x = x.to(self.device).contiguous(memory_format=torch.channels_last)
            self._batches[number] = x, labels.to(self.device)
        return self._batches[number]

    def stages(self) -> dict[str, stages.Stage]:
        return {name: getattr(self, name) for name in STAGES}

    def eager(self, turn: stages.Turn) -> dict[str, Any]:
        return self._times("eager", turn)

    def compile(self, turn: stages.Turn) -> dict[str, Any]:
        return self._times("compile", turn)

    def graphs(self, turn: stages.Turn) -> dict[str, Any]:
        return self._times("graphs", turn, capture=False)

    def ours_graphs(self, turn: stages.Turn) -> dict[str, Any]:
        self.tune_s = 0.0
        return self._times("ours_graphs", turn, capture=False)

    def autotune(self, turn: stages.Turn) -> dict[str, Any]:
        return self._times("autotune", turn)

    def recorded(self, turn: stages.Turn) -> dict[str, Any]:
        return {} if "ours_captured_us" in turn.found else self._ours(turn, 0.0)

    def ours(self, turn: stages.Turn) -> dict[str, Any]:
        return self._ours(turn, min(self.options.tune, TUNED * turn.share_s))

    def _ours(self, turn: stages.Turn, tune_s: float) -> dict[str, Any]:
        self.tune_s = tune_s
        found = self._times("ours", turn)
        report = self.reports[0]
        if self.options.verbose:
            print(report, flush=True)
        found |= {"notes": list(report.notes), "swapped": len(report.swapped), "of_layers": len(report.layers)}
        before = sum(layer.torch_us or 0.0 for layer in report.layers)
        found |= {"depthwise_torch_us": before, "depthwise_ours_us": before - report.saved_us}
        captured_us = [turn.found[key] for name in ("eager", "compile") if (key := f"{name}_captured_us") in turn.found]
        if captured_us and report.layers:
            found["depthwise_share_before"] = before / min(captured_us)
            found["depthwise_share_after"] = (before - report.saved_us) / found["ours_captured_us"]
        return found

    def _compiled(self, name: str, model: nn.Module) -> Any:
        if name == "eager":
            return model
        if name == "compile":
            return torch.compile(model)
        if name == "autotune":
            return torch.compile(model, mode="max-autotune-no-cudagraphs")
        if name == "graphs":
            return torch.compile(model, mode="reduce-overhead")
        mode = "reduce-overhead" if name == "ours_graphs" else "default"
        tunes = {"tune": self.tune_s > 0, "tune_s": self.tune_s or 1.0, "trials": self.options.trials}
        options = {"db": self.options.db, "report": self.reports.append, "mode": mode, **tunes}
        return torch.compile(model, backend=backend, options=options)

    def _step(self, name: str) -> Step:
        """The step of a way to compile the model, which has run once."""
        if name not in self._steps:
            model = copy.deepcopy(self.model)
            step = Step(model, self._compiled(name, model), self, lr=1e-4)
            step()
            stages.progress(f"{name}: compiled and run once")
            self._steps[name] = step
        return self._steps[name]

    def loss(self, turn: stages.Turn) -> dict[str, Any]:
        self.tune_s = 0.0  # a new process has its records
        found: dict[str, Any] = {"loss_steps": self.options.steps, "losses": {}, "loss_end": {}}
        for name in ("eager", "ours", "compile"):
            curves = [self._curve(name, repeat) for repeat in range(self.options.repeats)]
            ends = [statistics.fmean(curve[-LAST:]) for curve in curves]
            found["losses"][name], found["loss_end"][name] = curves, ends
            if name == "eager":
                found["loss_first"] = statistics.fmean(curve[0] for curve in curves)
            else:
                apart = [one - other for one, other in zip(ends, found["loss_end"]["eager"])]
                error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else None
                found[f"loss_apart_{name}"] = {"mean": statistics.fmean(apart), "standard_error": error}
            turn.tell({key: value for key, value in found.items() if key != "losses"})
        return found

    def _curve(self, name: str, first: int) -> list[float]:
        """The losses of a training from the model's weights that begins with batch `first`."""
        step = self._step(name)
        step.reset(self.model.state_dict(), lr=0.02)
        losses = []
        for number in range(self.options.steps):
            step.load(first + number)
            losses.append(step().clone())
        return [round(each, 4) for each in torch.stack(losses).tolist()]

    def _plain_us(self, groups: int, calls: int) -> dict[str, Any]:
        """Times of plain steps in turns, of all that were compiled so far: the host is not always equally fast."""
        times: dict[str, list[float]] = {name: [] for name in self._steps}
        for _ in range(groups):
            for name, step in self._steps.items():
                times[name].append(hot_us(step, self.device, groups=1, calls=calls))
        return {f"{name}_us": statistics.median(found) for name, found in times.items()}

    def _times(self, name: str, turn: stages.Turn, *, capture: bool = True) -> dict[str, Any]:
        step = self._step(name)
        # Compilers and tuning leave a million objects, and looking through them takes Python longer than a launch.
        gc.collect()
        gc.freeze()
        runs = {"groups": 2, "calls": 2} if self.options.smoke else {"groups": 5, "calls": 3}
        found = self._plain_us(runs["groups"], runs["calls"])
        turn.tell(found)
        if capture:
            found[f"{name}_captured_us"] = hot_us(captured(step, self.device), self.device, **runs)
        return found


# ---- all cases


def describe(case: str) -> dict[str, Any]:
    name, batch, precision = case.split(":")
    return {"model": name, "batch": int(batch), "precision": precision}


def show(row: dict[str, Any]) -> None:
    times = [f"{key.removesuffix('_us')} {row[key] / 1e3:.2f}" for key in row if key.endswith("_us")]
    print(f"{row['case']:<26}" + "  ".join(times) + " ms", flush=True)
    if "loss_end" in row:
        ends = "  ".join(f"{name} {statistics.fmean(losses):.4f}" for name, losses in row["loss_end"].items())
        print(f"   loss {row['loss_first']:.4f} -> {ends}", flush=True)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of PyTorch's best step to ours, plain and captured."""
    found: dict[str, Any] = {}
    for suffix in ("us", "captured_us"):
        ratios = {}
        for row in rows:
            ways = ("eager", "compile", "graphs", "autotune"), ("ours", "ours_graphs")
            theirs, ours = ([row[key] for name in names if (key := f"{name}_{suffix}") in row] for names in ways)
            if theirs and ours:
                ratios[row["case"]] = min(theirs) / min(ours)
        if ratios:
            name = "plain" if suffix == "us" else "captured"
            found[name] = {**ratios, "geometric mean": common.geometric_mean(list(ratios.values()))}
    return found


def main() -> None:
    parser = torch_common.options(__doc__, CASES, list(STAGES), 1500.0)
    parser.set_defaults(db="training.db")
    parser.add_argument("--tune", type=float, default=60.0, help="seconds for a model, at most 0.3 of its stage; 0: none")
    parser.add_argument("--trials", type=int, default=24, help="for each layer and direction")
    parser.add_argument("--steps", type=int, default=200, help="of the stage loss")
    parser.add_argument("--repeats", type=int, default=5, help="of the stage loss")
    options = stages.parsed(parser, CASES)
    facts = {"torch": torch.__version__}
    stages.run_cases(options, lambda *case: Case(*case).stages(), STAGES, describe, show, summary, facts)


if __name__ == "__main__":
    main()
