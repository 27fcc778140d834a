"""A training step of a Mamba-2 block on a GPU: its causal convolution by PyTorch and by ours, and the rest as it is.

    python benchmarks/mamba_block.py --out mamba_block.json

The block has a projection, the convolution over the channels of x, B and C, the state space of Mamba-2 in chunks (products
of matrices in plain PyTorch), a gate and a projection back, all in bfloat16. A step is forward and backward with the
gradients of all parameters and of the input, in a CUDA graph. Blocks take turns in one process; `compiled` is torch.compile
of the whole block. y and all gradients are compared.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from typing import Any

import common
import torch
from torch import nn
from torch.nn import functional

import schedsearch.torch as sst

TAPS, HEAD, STATE, CHUNK = 4, 64, 128, 256
SHAPES = ((8, 2048, 1024), (1, 8192, 2048))  # batch, time, width of the model
ROUNDS, REPLAYS = 5, 3


def scan(x: Any, decay: Any, b: Any, c: Any) -> Any:
    """y[t] = sum over s <= t of (c[t] . b[s]) * exp(decay[s + 1] + ... + decay[t]) * x[s], chunk by chunk.

    x: (batch, time, heads, HEAD), decay: (batch, time, heads), b, c: (batch, time, STATE)."""
    batch, time, heads, width = x.shape
    chunks = time // CHUNK
    x = x.view(batch, chunks, CHUNK, heads, width)
    b, c = (each.view(batch, chunks, CHUNK, STATE) for each in (b, c))
    sums = decay.float().view(batch, chunks, CHUNK, heads).cumsum(2)
    within = sums[:, :, :, None] - sums[:, :, None]  # (batch, chunk, t, s, heads)
    mask = torch.ones(CHUNK, CHUNK, device=x.device, dtype=torch.bool).tril()[None, None, :, :, None]
    factors = within.masked_fill(~mask, float("-inf")).exp().to(x.dtype)
    scores = (c @ b.transpose(-1, -2))[..., None] * factors
    y = torch.einsum("bctsh,bcshp->bcthp", scores, x)
    left = (sums[:, :, -1:] - sums).exp().to(x.dtype)  # what is left of a step at the end of its chunk
    states = torch.einsum("bcsn,bcsh,bcshp->bchnp", b, left, x)
    total = sums[:, :, -1].cumsum(1)  # (batch, chunks, heads)
    before = functional.pad(total, (0, 0, 1, 0))[:, :-1]
    between = before[:, :, None] - total[:, None]  # from the end of chunk s to the start of chunk t
    mask = torch.ones(chunks, chunks, device=x.device, dtype=torch.bool).tril(-1)[None, :, :, None]
    between = between.masked_fill(~mask, float("-inf")).exp().to(x.dtype)
    carried = torch.einsum("btsh,bshnp->bthnp", between, states)
    y = y + torch.einsum("bctn,bcth,bchnp->bcthp", c, sums.exp().to(x.dtype), carried)
    return y.reshape(batch, time, heads, width)


class Block(nn.Module):
    """Mamba-2 with one group of B and C."""

    def __init__(self, width: int, ours: bool) -> None:
        super().__init__()
        self.inner, self.heads, self.ours = 2 * width, 2 * width // HEAD, ours
        channels = self.inner + 2 * STATE
        self.norm = nn.RMSNorm(width)
        self.into = nn.Linear(width, self.inner + channels + self.heads, bias=False)
        self.conv = nn.Conv1d(channels, channels, TAPS, groups=channels, padding=TAPS - 1)
        self.rate = nn.Parameter(torch.zeros(self.heads))
        self.back = nn.Linear(self.inner, width, bias=False)

    def forward(self, hidden: Any) -> Any:
        gate, mixed, step = self.into(self.norm(hidden)).split([self.inner, self.inner + 2 * STATE, self.heads], dim=-1)
        mixed = mixed.transpose(1, 2)
        if self.ours:
            mixed = sst.causal_conv1d(mixed, self.conv.weight.squeeze(1), self.conv.bias, activation="silu")
        else:
            mixed = functional.silu(self.conv(mixed)[:, :, : mixed.shape[2]])
        x, b, c = mixed.transpose(1, 2).split([self.inner, STATE, STATE], dim=-1)
        step = functional.softplus(step)
        x = x.unflatten(-1, (self.heads, HEAD)) * step[..., None]
        y = scan(x, -step * self.rate.exp(), b, c).flatten(-2)
        return hidden + self.back(y * functional.silu(gate))


def step_of(block: Any, hidden: Any, gradient: Any) -> Any:
    leaves = [hidden, *block.parameters()]
    y = block(hidden)
    return y, torch.autograd.grad(y, leaves, gradient)


def graph_of(block: Any, hidden: Any, gradient: Any) -> tuple[Any, Any]:
    """A graph of one step, and its y and gradients."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step_of(block, hidden, gradient)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step_of(block, hidden, gradient)
    return graph, results


def milliseconds(graph: Any) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end) / REPLAYS)


def row_of(shape: tuple[int, int, int], compiled: bool) -> dict[str, Any]:
    batch, time, width = shape
    torch.manual_seed(0)
    theirs = Block(width, False).cuda().bfloat16()
    ours = copy.deepcopy(theirs)
    ours.ours = True
    hidden = torch.randn(batch, time, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(hidden)
    blocks: dict[str, Any] = {"PyTorch": theirs, "ours": ours}
    if compiled:
        torch._dynamo.reset()
        blocks |= {f"{name}, compiled": torch.compile(block, dynamic=False) for name, block in list(blocks.items())}
    graphs, results = {}, {}
    for name, block in blocks.items():
        graphs[name], results[name] = graph_of(block, hidden, gradient)
        graphs[name].replay()
    torch.cuda.synchronize()
    y, slopes = results["PyTorch"]
    for name, (other, others) in results.items():
        for a, b in zip((y, *slopes), (other, *others)):
            error = float((a.detach().float() - b.detach().float()).norm() / a.detach().float().norm())
            assert error < 5e-2, f"{name} differs from PyTorch by {error:.2g} of the norm"
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            times[name].append(milliseconds(graph))
    return {"shape": shape, "ms": {name: statistics.median(each) for name, each in times.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = []
    with sst.use("none.db", allow=("default",)):
        for shape in SHAPES[: args.shapes]:
            rows.append(row_of(shape, not args.eager))
            print(rows[-1], flush=True)
            common.write(args.out, {"rows": rows})
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
