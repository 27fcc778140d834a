"""Products of matrices against cuBLAS through PyTorch, and the time of reading all factors, in one run.

    python benchmarks/dense.py                              fp16 layers from 1 to 4096 rows, a batch of products, and int8
    python benchmarks/dense.py --only "dense 1x" --trials 32
    python benchmarks/dense.py --trials 0                   the defaults, without tuning

Needs a CUDA device and PyTorch. Each product is tuned, then timed cold in a CUDA graph: all operands rotate over sets that
together exceed 2.5x L2. PyTorch's ways are linear, bmm and, for int8, _int_mm. Results are compared with PyTorch's in
float32 or float64. --out is written after every product.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import common
from convolutions import fastest_by_template

import schedsearch
from schedsearch.errors import SchedsearchError

PRODUCTS = [  # m, n, k
    (1, 1000, 2048),  # the last layer of ResNet-50
    (1, 4096, 25088),  # the classifier of VGG-16
    (32, 1000, 2048),
    (32, 4096, 4096),
    (4096, 4096, 4096),
]
BATCHES = [(12, 128, 128, 64)]  # b, m, n, k: the attention of BERT
INTEGERS = [(4096, 4096, 4096)]
HEADER = ("product", "us", "PyTorch us", "faster", "TB/s", "TFLOP/s", "by template")
RTOL = {"float16": 1e-2, "bfloat16": 5e-2, "int8": 0.0}  # of the largest element


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="products whose label contains one of these strings")
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"), help="of the products of floats")
    parser.add_argument("--trials", type=int, default=64, help="trials of a product; 0: the default configuration")
    parser.add_argument("--time", type=float, help="seconds, after which no further product is tuned or timed")
    parser.add_argument("--db", default="dense.db", help="record database")
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args(words)
    if options.trials < 0:
        parser.error("--trials must be at least 0")
    return options


def chosen(options: argparse.Namespace) -> list[schedsearch.Workload]:
    """The products that the options select."""
    found = [schedsearch.dense(m=m, n=n, k=k, dtype=options.dtype) for m, n, k in PRODUCTS]
    found += [schedsearch.batch_matmul(b=b, m=m, n=n, k=k, dtype=options.dtype) for b, m, n, k in BATCHES]
    found += [schedsearch.dense(m=m, n=n, k=k, dtype="int8") for m, n, k in INTEGERS]
    return [workload for workload in found if any(text in workload.label for text in options.only)]


def operands(workload: schedsearch.Workload) -> list[Any]:
    """Random x and weight on the device; those of floats make y about as large as x."""
    import torch

    if workload.dtype == "int8":
        return [torch.randint(-128, 128, spec.shape, device="cuda", dtype=torch.int8) for spec in workload.signature]
    dtype, (x, weight) = getattr(torch, workload.dtype), workload.signature
    scale = workload.k**-0.5
    return [torch.randn(x.shape, device="cuda", dtype=dtype), torch.randn(weight.shape, device="cuda", dtype=dtype) * scale]


def by_torch(workload: schedsearch.Workload, x: Any, weight: Any) -> Any:
    """The product by PyTorch, which takes cuBLAS."""
    import torch

    if workload.dtype == "int8":
        return torch._int_mm(x, weight.t())
    return torch.bmm(x, weight.transpose(1, 2)) if workload.op == "batch_matmul" else torch.nn.functional.linear(x, weight)


def compare(workload: schedsearch.Workload, options: argparse.Namespace, l2_bytes: int) -> dict[str, Any]:
    """Times of our kernel and of PyTorch. Raises AssertionError if our result is wrong."""
    sets = [operands(workload) for _ in range(common.sets_needed(workload.min_bytes, l2_bytes))]
    allow = ("exact",) if options.trials else ("default",)
    kernel = schedsearch.compile(workload, options.db, target="cuda", allow=allow)
    found, (x, weight) = kernel(*sets[0]), sets[0]
    truth = by_torch(workload, x, weight) if workload.dtype == "int8" else x.float() @ weight.float().transpose(-1, -2)
    error = float((found.double() - truth.double()).abs().max() / truth.abs().max())
    assert error <= RTOL[workload.dtype], f"{workload.label}: wrong by {error:.2g} of the largest element"
    us = common.cold_graph_us([kernel.bind(*each) for each in sets])
    torch_us = common.cold_graph_us([lambda each=each: by_torch(workload, *each) for each in sets])
    by_template = fastest_by_template(workload, options.db) if options.trials else {}
    return {
        "label": workload.label, "nbytes": workload.min_bytes, "flops": workload.flops, "us": us, "torch_us": torch_us,
        "error": error, "config": dict(kernel.config), "by_template_us": by_template,
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each product, and the geometric mean of what PyTorch takes longer."""
    lines = [
        (
            row["label"], f"{row['us']:.2f}", f"{row['torch_us']:.2f}", f"{row['torch_us'] / row['us']:.2f}",
            f"{row['nbytes'] / row['us'] * 1e-6:.2f}", f"{row['flops'] / row['us'] * 1e-6:.0f}",
            ", ".join(f"{name.removeprefix('matmul_')} {us:.1f}" for name, us in row["by_template_us"].items()),
        )
        for row in rows
    ]  # fmt: skip
    if rows:
        mean = common.geometric_mean([row["torch_us"] / row["us"] for row in rows])
        lines.append(("geometric mean", "", "", f"{mean:.2f}", "", "", ""))
    return common.table(HEADER, lines)


def main() -> None:
    options = arguments()
    import torch

    started = time.perf_counter()
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    workloads, rows = chosen(options), []
    for number, workload in enumerate(workloads):
        spent = time.perf_counter() - started
        if options.time and spent > options.time:
            print(f"{len(workloads) - number} products are left out: the time is over")
            break
        try:
            if options.trials:
                share = (options.time - spent) / (len(workloads) - number) * 0.8 if options.time else None
                schedsearch.tune([workload], options.db, target="cuda", trials=options.trials, time_s=share)
            rows.append(compare(workload, options, l2_bytes))
        except SchedsearchError as error:
            print(f"{workload.label}: {error}")
            continue
        common.write(options.out, {"rows": rows})
        print(table(rows[-1:]).splitlines()[2], rows[-1]["config"], flush=True)
        torch.cuda.empty_cache()
    print(table(rows))


if __name__ == "__main__":
    main()
