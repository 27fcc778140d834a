"""Models as people have them in PyTorch: ours beside torch.compile, inference in fp16.

    python benchmarks/torch_models.py --limit 900 --db models.db --out benchmarks/results/torch_models_h200.json
    python benchmarks/torch_models.py --cases mobilenet_v2:1 --limit 95 --tune 25 --stages eager,network --out first.json

A case NAME:BATCH runs in a process of its own with its share of the time that is left. The model has random weights, is in
channels_last with cudnn.benchmark, and every time NAME_us is that of a CUDA graph's replay among replays that follow one
another: the GPU's time. NAME_plain_us is the same of calls from Python, of which each takes NAME_host_us of the host.
Stages, which run in this order:

eager       PyTorch without torch.compile
compile     torch.compile(model)
graphs      torch.compile(model, mode="reduce-overhead"), called from Python: PyTorch's own CUDA graphs
network     torch.compile(model, backend="schedsearch"): the whole network, tuned for --tune seconds, beside Inductor's graph
recorded    the same without tuning, by what is recorded then, if the stage before was ended or failed
layers      optimize_(model, tune=True), then torch.compile(model)
autotune    torch.compile(model, mode="max-autotune-no-cudagraphs"), in a CUDA graph as all others

Errors are the largest difference from the model in fp32 without TF32, over the largest magnitude. Each stage has a share of
its case's time, of which tuning may take two fifths. What it finds is printed and written at once. Standard error tells
what is being done.

    python benchmarks/torch_models.py --device cpu --smoke --cases unet:1 edsr:2 --tune 5 --trials 1 --limit 300

Needs PyTorch, onnx, onnx-ir and onnxscript, torchvision for all models but edsr and unet, and a CUDA device but for the last
command, which shows that everything works.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import common
import stages
import torch
import torch_common
from torch import nn
from torch_common import captured, host_us, hot_us

import schedsearch.torch as sst
from schedsearch.records.store import Store
from schedsearch.torch.backend import schedsearch as backend

CASES = tuple(
    f"{name}:{batch}"
    for batch in (1, 32)
    for name in (
        "mobilenet_v2", "efficientnet_b0", "resnet50", "unet", "edsr", "convnext_tiny", "vgg16", "inception_v3"
    )
)  # fmt: skip
# With their shares of a case's time.
STAGES = {"eager": 1.0, "compile": 3.0, "graphs": 1.5, "network": 6.0, "recorded": 3.0, "layers": 6.0, "autotune": 4.0}
TUNED = 0.4  # of a stage's share that tuning may take
SIZES = {"inception_v3": 299, "edsr": 256, "unet": 256}  # of images; 224 of others


# ---- models that torchvision lacks


class Edsr(nn.Module):
    """EDSR's baseline with 8 of its 16 blocks: 64 channels, twice the resolution (Lim et al. 2017)."""

    def __init__(self, channels: int = 64, blocks: int = 8) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(self._conv(channels), nn.ReLU(inplace=True), self._conv(channels)) for _ in range(blocks)
        )
        self.body = self._conv(channels)
        self.up = nn.Sequential(nn.Conv2d(channels, 4 * channels, 3, padding=1), nn.PixelShuffle(2))
        self.tail = nn.Conv2d(channels, 3, 3, padding=1)

    @staticmethod
    def _conv(channels: int) -> nn.Conv2d:
        return nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = first = self.head(x)
        for block in self.blocks:
            y = block(y) + y
        return self.tail(self.up(self.body(y) + first))


class UNet(nn.Module):
    """A U-Net with batch norms: 32 to 256 channels over four resolutions (Ronneberger et al. 2015)."""

    def __init__(self, width: int = 32, classes: int = 8) -> None:
        super().__init__()
        widths = [width << level for level in range(4)]
        self.down = nn.ModuleList(_twice(first, last) for first, last in zip([3, *widths], widths))
        self.up = nn.ModuleList(_twice(3 * last, last) for last in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for place, down in enumerate(self.down):
            x = down(nn.functional.max_pool2d(x, 2) if place else x)
            kept.append(x)
        for up, skipped in zip(self.up, kept[-2::-1]):
            x = up(torch.cat([nn.functional.interpolate(x, scale_factor=2, mode="nearest"), skipped], 1))
        return self.head(x)


def _twice(first: int, last: int) -> nn.Sequential:
    pairs = [(first, last), (last, last)]
    parts = [[nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)] for a, b in pairs]
    return nn.Sequential(*(each for part in parts for each in part))


def make(name: str, *, smoke: bool = False) -> nn.Module:
    torch.manual_seed(0)
    if name == "edsr":
        return (Edsr(8, 1) if smoke else Edsr()).eval()
    if name == "unet":
        return (UNet(8, 4) if smoke else UNet()).eval()
    import torchvision

    options = {"aux_logits": False, "init_weights": True} if name in ("inception_v3", "googlenet") else {}
    return getattr(torchvision.models, name)(weights=None, **options).eval()


def normalise(model: nn.Module, x: torch.Tensor) -> None:
    """Gives every batch norm the mean and variance that it meets for x, as training would.

    With those of random weights, means of 0 and variances of 1, results of deep networks vanish in fp16.
    """
    norms = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    for each in norms:
        each.momentum = 1.0
        each.train()
    model(x)
    for each in norms:
        each.eval()


# ---- one case, in a process of its own


class Case:
    """A model in fp16, its input, and its result in fp32. On a CPU everything is fp32."""

    @torch.no_grad()
    def __init__(self, case: str, options: argparse.Namespace) -> None:
        name, batch = case.split(":")
        self.options, self.device = options, options.device
        Store.open(options.db).close()  # makes it
        size = SIZES.get(name, 224)
        if options.smoke:
            size = 128 if name == "inception_v3" else 64  # batch norms need more than one pixel
        with torch.device(self.device):
            exact = make(name, smoke=options.smoke)
        x = torch.randn((int(batch), 3, size, size), generator=torch.Generator().manual_seed(0)).to(self.device)
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        normalise(exact, x)
        self.truth = exact(x)
        torch.backends.cudnn.benchmark = True  # not before: it would search for the layers in fp32, too
        dtype = torch.float32 if self.device == "cpu" else torch.float16
        self.model = exact.to(dtype).to(memory_format=torch.channels_last)
        self.x = x.to(dtype).contiguous(memory_format=torch.channels_last)

    def stages(self) -> dict[str, stages.Stage]:
        return {name: torch.no_grad()(getattr(self, name)) for name in STAGES}

    def network(self, turn: stages.Turn) -> dict[str, Any]:
        return self._network(turn, min(self.options.tune, TUNED * turn.share_s))

    def recorded(self, turn: stages.Turn) -> dict[str, Any]:
        return {} if "network_us" in turn.found else self._network(turn, 0.0)

    def _network(self, turn: stages.Turn, tune_s: float) -> dict[str, Any]:
        reports: list[sst.Report] = []
        given = {"db": self.options.db, "tune": tune_s > 0, "tune_s": tune_s or 1.0, "layers": False}
        fast = torch.compile(self.model, backend=backend, options={**given, "report": reports.append})
        fast(self.x)
        network = reports[-1].network
        if self.options.verbose:
            print(reports[-1], flush=True)
        if network is None or network.ours_us is None:
            return {"network_reason": str(reports[-1])[-400:]}
        found = {"network_served": network.served, "network_us": network.ours_us}
        found |= {} if "compile_us" in turn.found else {"compile_us": network.torch_us}
        found |= {"parts": len(network.parts), "parts_served": sum(part.served for part in network.parts)}
        turn.tell(found)
        if network.served:
            found |= {"network_us": self._hot_us(captured(lambda: fast(self.x), self.device))}
            found |= self._plain("network", fast)
        error = float((fast(self.x).float() - self.truth).abs().max() / self.truth.abs().max())
        return {**found, "network_error": error, "inductor_error": network.torch_error}

    def layers(self, turn: stages.Turn) -> dict[str, Any]:
        model = copy.deepcopy(self.model)
        tunes = {"tune": self.options.trials > 0, "trials": self.options.trials or 1, "tune_s": TUNED * turn.share_s}
        report = sst.optimize_(model, self.x, db=self.options.db, **tunes)
        found: dict[str, Any] = {"swapped": len(report.swapped), "of_layers": len(report.layers)}
        found |= {"optimize_s": report.seconds, "saved_us": report.saved_us}
        found["layer_errors"] = {row.name: row.error for row in report.layers if row.error is not None}
        if self.options.verbose:
            print(report, flush=True)
        turn.tell(found)
        found |= self._timed("layers", torch.compile(model, fullgraph=True))
        turn.tell(found)
        sst.revert_(model)
        found["optimize_again_s"] = sst.optimize_(model, self.x, db=self.options.db).seconds
        return found

    def eager(self, turn: stages.Turn) -> dict[str, Any]:
        return self._timed("eager", self.model)

    def compile(self, turn: stages.Turn) -> dict[str, Any]:
        return self._timed("compile", torch.compile(self.model))

    def graphs(self, turn: stages.Turn) -> dict[str, Any]:
        fast = torch.compile(self.model, mode="reduce-overhead")
        for _ in range(3):  # runs, records a CUDA graph, replays it
            fast(self.x)
        return self._plain("graphs", fast)

    def autotune(self, turn: stages.Turn) -> dict[str, Any]:
        return self._timed("autotune", torch.compile(self.model, mode="max-autotune-no-cudagraphs"))

    def _timed(self, name: str, call: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        y = call(self.x)
        stages.progress("compiled and run once; now it is timed")
        error = float((y.float() - self.truth).abs().max() / self.truth.abs().max())
        return {f"{name}_us": self._hot_us(captured(lambda: call(self.x), self.device)), f"{name}_error": error}

    def _plain(self, name: str, call: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """Calls from Python."""
        plain_us = self._hot_us(lambda: call(self.x))
        return {f"{name}_plain_us": plain_us, f"{name}_host_us": host_us(lambda: call(self.x), self.device)}

    def _hot_us(self, call: Callable[[], Any]) -> float:
        runs = {"groups": 3, "calls": 2} if self.options.smoke else {}
        return hot_us(call, self.device, **runs)


# ---- all cases


def describe(case: str) -> dict[str, Any]:
    name, _, batch = case.partition(":")
    return {"model": name, "batch": int(batch)}


def show(row: dict[str, Any]) -> None:
    times = {key.removesuffix("_us"): row[key] for key in row if key.endswith("_us") and "host" not in key}
    print(f"{row['case']:<20}" + "  ".join(f"{name} {us:.1f}" for name, us in times.items() if name != "saved"), flush=True)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of PyTorch's best to our best, by batch: of CUDA graphs, and of calls from Python."""
    ways = {
        "": (("compile_us", "eager_us", "autotune_us"), ("network_us", "layers_us")),
        ", plain": (("graphs_plain_us",), ("network_plain_us",)),
    }
    found = {}
    for batch in sorted({row["batch"] for row in rows if "batch" in row}):
        for way, (their_keys, our_keys) in ways.items():
            ratios = {}
            for row in rows:
                theirs, ours = ([row[key] for key in keys if key in row] for keys in (their_keys, our_keys))
                if row.get("batch") == batch and theirs and ours:
                    ratios[row["model"]] = min(theirs) / min(ours)
            if ratios:
                found[f"batch {batch}{way}"] = {**ratios, "geometric mean": common.geometric_mean(list(ratios.values()))}
    return found


def main() -> None:
    parser = torch_common.options(__doc__, CASES, list(STAGES), 900.0)
    parser.add_argument("--tune", type=float, default=30.0, help="seconds for a network, at most 0.4 of its stage; 0: none")
    parser.add_argument("--trials", type=int, default=16, help="for each layer; 0: none are tuned")
    options = stages.parsed(parser, CASES)
    facts = {"torch": torch.__version__}
    stages.run_cases(options, lambda *case: Case(*case).stages(), STAGES, describe, show, summary, facts)


if __name__ == "__main__":
    main()
