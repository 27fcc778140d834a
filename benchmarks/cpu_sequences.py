"""Causal depthwise convolutions over time on a CPU, beside PyTorch in both layouts: 4 taps, a bias and silu.

    python benchmarks/cpu_sequences.py --out cpu_sequences.json

All contenders take turns; the table has their medians. PyTorch's causal form pads on both sides and cuts the end off.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import common
import torch
from torch.nn import functional

import schedsearch.torch as sst

TAPS = 4
SHAPES = ((1, 8192, 1024), (8, 1024, 512), (1, 8192, 1))
DTYPES = ("bfloat16", "float32")


def by_torch(x: Any, weight: Any, bias: Any) -> Any:
    padded = functional.conv1d(x, weight[:, None], bias, padding=TAPS - 1, groups=x.shape[1])
    return functional.silu(padded[:, :, : x.shape[2]])


def ours(x: Any, weight: Any, bias: Any) -> Any:
    return sst.causal_conv1d(x, weight, bias, activation="silu")


def milliseconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


def row_of(shape: tuple[int, int, int], dtype: str, rounds: int) -> dict[str, Any]:
    b, c, t = shape
    kind = getattr(torch, dtype)
    weight, bias = (torch.randn(size).to(kind) for size in ((c, TAPS), (c,)))
    last, first = torch.randn(b, t, c).to(kind).transpose(1, 2), torch.randn(b, c, t).to(kind)
    exact = by_torch(first.double(), weight.double(), bias.double())
    error = float((ours(first, weight, bias).double() - exact).abs().max())
    assert error < (0.1 if dtype == "bfloat16" else 1e-4), f"wrong by {error}"
    contenders: dict[str, Callable[[], Any]] = {
        "ours": lambda: ours(last, weight, bias),
        "ours, time last": lambda: ours(first, weight, bias),
        "PyTorch": lambda: by_torch(first, weight, bias),
        "PyTorch, channels last": lambda: by_torch(last, weight, bias),
        "copy": lambda: first.clone(),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with torch.no_grad():
        for run in contenders.values():
            run()
        for _ in range(rounds):
            for name, run in contenders.items():
                times[name].append(milliseconds(run))
    found = {name: statistics.median(each) for name, each in times.items()}
    return {"shape": shape, "dtype": dtype, "ms": found, "threads": torch.get_num_threads(), "error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = []
    with sst.use("none.db", allow=("default",)):
        for dtype in args.dtype:
            for shape in SHAPES:
                rows.append(row_of(shape, dtype, args.rounds))
                print(rows[-1], flush=True)
                common.write(args.out, {"rows": rows})


if __name__ == "__main__":
    main()
