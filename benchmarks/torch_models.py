"""Models as people have them in PyTorch: ours beside torch.compile, inference in fp16.

    python benchmarks/torch_models.py --limit 900 --db models.db --out benchmarks/results/torch_models_h200.json
    python benchmarks/torch_models.py --cases mobilenet_v2:1 --limit 95 --tune 25 --stages network --out first.json

A case NAME:BATCH runs in a process of its own with its share of the time that is left. The model has random weights, is in
channels_last with cudnn.benchmark, and every time is that of a CUDA graph's replay among replays that follow one another.
Stages, in the order given:

network     torch.compile(model, backend="schedsearch"): the whole network, tuned for --tune seconds, beside Inductor's graph
layers      optimize_(model, tune=True), then torch.compile(model)
eager       PyTorch without torch.compile
autotune    torch.compile(model, mode="max-autotune-no-cudagraphs"), in a CUDA graph as all others

Errors are the largest difference from the model in fp32 without TF32, over the largest magnitude. The file is written
after every stage, so that a case that runs out of time keeps what it had.

Needs a CUDA device, PyTorch, torchvision, onnx, onnx-ir and onnxscript.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import common
import torch
from networks import _captured, host_us, hot_us
from torch import nn

import schedsearch.torch as sst
from schedsearch.torch.backend import schedsearch as backend

CASES = tuple(
    f"{name}:{batch}"
    for batch in (1, 32)
    for name in (
        "mobilenet_v2", "efficientnet_b0", "resnet50", "unet", "edsr", "convnext_tiny", "vgg16", "inception_v3"
    )
)  # fmt: skip
STAGES = ("network", "layers", "eager", "autotune")
SIZES = {"inception_v3": 299, "edsr": 256, "unet": 256}  # of images; 224 of others
MARK = "RESULT "


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


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name in ("edsr", "unet"):
        return {"edsr": Edsr, "unet": UNet}[name]().eval()
    import torchvision

    options = {"aux_logits": False, "init_weights": True} if name == "inception_v3" else {}
    return getattr(torchvision.models, name)(weights=None, **options).eval()


# ---- one case, in a process of its own


class Case:
    """A model in fp16 on the GPU, its input, and its result in fp32."""

    def __init__(self, case: str, options: argparse.Namespace) -> None:
        name, batch = case.split(":")
        self.options, self.found = options, {"case": case, "model": name, "batch": int(batch)}
        size = SIZES.get(name, 224)
        torch.backends.cudnn.benchmark = True
        exact = make(name).cuda()
        x = torch.randn((int(batch), 3, size, size), generator=torch.Generator().manual_seed(0)).cuda()
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        self.truth = exact(x)
        self.model = exact.half().to(memory_format=torch.channels_last)
        self.x = x.half().contiguous(memory_format=torch.channels_last)

    def run(self) -> None:
        for stage in self.options.stages.split(","):
            started = time.perf_counter()
            try:
                found = getattr(self, stage)()
            except Exception:  # the other stages go on
                found = {f"{stage}_failed": traceback.format_exc()[-600:]}
            self.found |= {**found, f"{stage}_s": round(time.perf_counter() - started, 1)}
            print(MARK + json.dumps(self.found), flush=True)

    def network(self) -> dict[str, Any]:
        reports: list[sst.Report] = []
        given = {"db": self.options.db, "tune": self.options.tune > 0, "tune_s": self.options.tune, "layers": False}
        fast = torch.compile(self.model, backend=backend, options={**given, "report": reports.append})
        fast(self.x)
        network = reports[-1].network
        if network is None or network.ours_us is None:
            return {"network_reason": str(reports[-1])[-400:]}
        found = {"network_served": network.served, "network_us": network.ours_us, "compile_us": network.torch_us}
        if network.served:
            found |= {"network_us": hot_us(lambda: fast(self.x)), "network_host_us": host_us(lambda: fast(self.x))}
        return {**found, "network_error": network.error, "compile_error": network.torch_error}

    def layers(self) -> dict[str, Any]:
        model = copy.deepcopy(self.model)
        tunes = self.options.trials > 0
        report = sst.optimize_(model, self.x, db=self.options.db, tune=tunes, trials=self.options.trials or 1)
        found: dict[str, Any] = {"swapped": len(report.swapped), "of_layers": len(report.layers)}
        found |= {"optimize_s": report.seconds, "saved_us": report.saved_us}
        if self.options.verbose:
            print(report, flush=True)
        sst.revert_(model)
        again = sst.optimize_(model, self.x, db=self.options.db)
        found |= {"optimize_again_s": again.seconds}
        found |= self._timed("layers", torch.compile(model, fullgraph=True))
        if "compile_us" not in self.found:
            found |= self._timed("compile", torch.compile(self.model))
        return found

    def eager(self) -> dict[str, Any]:
        return self._timed("eager", self.model)

    def autotune(self) -> dict[str, Any]:
        return self._timed("autotune", torch.compile(self.model, mode="max-autotune-no-cudagraphs"))

    def _timed(self, name: str, call: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        error = float((call(self.x).float() - self.truth).abs().max() / self.truth.abs().max())
        graph = _captured(lambda: call(self.x))
        return {f"{name}_us": hot_us(graph.replay), f"{name}_error": error}


# ---- all cases


def measure(case: str, arguments: list[str], limit_s: float) -> dict[str, Any]:
    """What a process of its own found until its time was up."""
    command = [sys.executable, __file__, "--case", case, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, errors = process.communicate(timeout=limit_s)
        ended = {} if process.returncode == 0 else {"failed": errors[-600:]}
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        ended = {"stopped_after_s": round(limit_s, 1)}
    rows = [json.loads(line.removeprefix(MARK)) for line in out.splitlines() if line.startswith(MARK)]
    return {"case": case, **(rows[-1] if rows else {}), **ended}


def show(row: dict[str, Any]) -> None:
    times = {key.removesuffix("_us"): row[key] for key in row if key.endswith("_us") and "host" not in key}
    print(f"{row['case']:<20}" + "  ".join(f"{name} {us:.1f}" for name, us in times.items() if name != "saved"), flush=True)
    for key in ("failed", "network_reason", "network_failed", "layers_failed", "eager_failed", "autotune_failed"):
        if key in row:
            print(f"   {key}: {row[key]}", flush=True)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of PyTorch's best to our best, by batch."""
    found = {}
    for batch in sorted({row["batch"] for row in rows if "batch" in row}):
        ratios = {}
        for row in rows:
            theirs = [row[key] for key in ("compile_us", "eager_us", "autotune_us") if key in row]
            ours = [row[key] for key in ("network_us", "layers_us") if key in row]
            if row.get("batch") == batch and theirs and ours:
                ratios[row["model"]] = min(theirs) / min(ours)
        if ratios:
            found[f"batch {batch}"] = {**ratios, "geometric mean": common.geometric_mean(list(ratios.values()))}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--stages", default=",".join(STAGES), help="separated by commas")
    parser.add_argument("--db", default="models.db")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for all cases")
    parser.add_argument("--tune", type=float, default=30.0, help="seconds for a network; 0: none")
    parser.add_argument("--trials", type=int, default=16, help="for each layer; 0: none are tuned")
    parser.add_argument("--verbose", action="store_true", help="print every layer")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--out")
    options = parser.parse_args()
    if options.case:
        with torch.no_grad():
            Case(options.case, options).run()
        return
    ends = time.monotonic() + options.limit
    passed = ["--stages", options.stages, "--db", options.db, "--tune", str(options.tune), "--trials", str(options.trials)]
    rows: list[dict[str, Any]] = []
    for place, case in enumerate(options.cases):
        share_s = (ends - time.monotonic()) / (len(options.cases) - place)
        if share_s < 5:
            break
        rows.append(measure(case, passed, share_s))
        show(rows[-1])
        common.write(options.out, {"rows": rows, "speedups": summary(rows)})
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
